#!/usr/bin/env bash
# Test and time the triton backend on a machine with a CUDA GPU: under 8 minutes on an H200.
# usage: scripts/gpu_check.sh [RESULT.json]    (PYTHON= names another interpreter than .venv's)
# Installs nothing. Exit status: 0 all is well, 1 a test or benchmark failed, 2 it cannot run here.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-gpu_check.json}
python=${PYTHON:-.venv/bin/python}

refuse() { echo "gpu_check: $1" >&2; exit 2; }

command -v "$python" >/dev/null || refuse "there is no $python; run make setup, or name one with PYTHON="
if [ -e "$out" ] || [ -L "$out" ]; then refuse "$out exists: name a new file"; fi
[ -d "$(dirname "$out")" ] || refuse "there is no folder $(dirname "$out") for $out"
why_not=$("$python" - <<'PYTHON'
import importlib

def missing():
    for name in ("torch", "resroute", "pytest"):
        try:
            importlib.import_module(name)
        except Exception as error:
            return f"{name} cannot be imported ({error})"
    import torch
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU here"
    try:
        import triton
    except Exception as error:
        return f"triton cannot be imported ({error})"

print(" ".join((missing() or "").split()))
PYTHON
) || refuse "$python does not run"
[ -z "$why_not" ] || refuse "$why_not"

unset TRITON_INTERPRET
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4}
work=$(mktemp -d)
# where the script is stopped, what runs beside it is stopped too
trap 'jobs -p | xargs -r kill 2>/dev/null || true; rm -rf "$work"' EXIT

# most of a test is compiling, on one core: files run at once. $1: name, rest: what pytest takes
tests() {
  local name=$1 status=0
  shift
  timeout 220 "$python" -m pytest -q -p no:cacheprovider --junitxml="$work/$name.xml" "$@" \
    >"$work/$name.log" 2>&1 || status=$?
  echo "$status" >"$work/$name.test"
  echo "tests $name: exit status $status, $(tail -n 1 "$work/$name.log")"
}

# $1: name, $2: most seconds, rest: what `resroute bench` takes
bench() {
  local name=$1 seconds=$2 status=0
  shift 2
  timeout "$seconds" "$python" -m resroute bench "$@" --device cuda --out "$work/$name.json" \
    >"$work/$name.log" 2>&1 || status=$?
  echo "$status" >"$work/$name.bench"
  echo "bench $name: exit status $status"
  cat "$work/$name.log"
}

tests formula tests/ops/test_triton.py -m "not gpu" &
tests widths tests/ops/test_triton.py -m gpu &
tests backends tests/ops/test_backends.py -m gpu &
tests models tests/ops/test_gpu.py -m gpu &
tests others tests -m gpu --ignore=tests/ops &
wait

size="--layers 12 --dim 512 --context 512"
backends="--backends triton,lean"
bench mixer 45 mixer $size $backends --pairs 10
bench memory 45 memory $size $backends --precision bfloat16 --no-compile
bench step 50 step $size $backends --precision bfloat16 --no-compile --pairs 8
bench step-compiled 120 step $size --backends triton --precision bfloat16 --compile --pairs 8

"$python" - "$work" "$out" <<'PYTHON'
import json
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from xml.etree import ElementTree

import torch
from resroute.files import write_json
from resroute.training.device import choose_device, environment

work, out = map(Path, sys.argv[1:])
device = choose_device("auto")
machine = {**environment(device, torch.bfloat16), "command": ["gpu_check.sh"]}
try:
    machine["triton"] = version("triton")
except PackageNotFoundError:
    machine["triton"] = None
if device.type == "cuda":
    gpu = torch.cuda.get_device_properties(device)
    machine |= {
        "cuda": torch.version.cuda,
        "capability": f"{gpu.major}.{gpu.minor}",
        "memory_bytes": gpu.total_memory,
    }


def ending(path):
    status = int(path.read_text())
    if status == 0:
        return {"status": 0}
    lines = path.with_suffix(".log").read_text(errors="replace").splitlines()
    # without the folders of this machine
    last = [line.replace(str(Path.cwd()), ".").replace(str(Path.home()), "~") for line in lines[-20:]]
    return {"status": status, "timed_out": status == 124, "log": last}


tests, bench = {}, {}
for path in sorted(work.glob("*.test")):
    tests[path.stem] = ending(path)
    xml = path.with_suffix(".xml")
    if xml.exists():
        suite = ElementTree.parse(xml).getroot().find("testsuite")
        counts = ("tests", "failures", "errors", "skipped")
        numbers = {name: int(suite.get(name)) for name in counts}
        passed = 2 * numbers["tests"] - sum(numbers.values())
        tests[path.stem] |= {**numbers, "passed": passed}
        if not passed and not tests[path.stem]["status"]:
            # nothing was tested
            tests[path.stem]["status"] = 5
        tests[path.stem]["seconds"] = float(suite.get("time"))
        tests[path.stem]["failed"] = [
            case.get("name")
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ]
for path in sorted(work.glob("*.bench")):
    bench[path.stem] = ending(path)
    result = path.with_suffix(".json")
    if result.exists():
        found = json.loads(result.read_text())
        bench[path.stem] |= {"settings": found["settings"], "rows": found["rows"]}
write_json(out, {"format_version": 1, "machine": machine, "tests": tests, "bench": bench})
failed = [name for name, found in {**tests, **bench}.items() if found["status"]]
print(f"wrote {out}" + (f"; failed: {', '.join(failed)}" if failed else ""))
sys.exit(bool(failed))
PYTHON
