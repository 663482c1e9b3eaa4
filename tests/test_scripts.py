"""The study for GPUs as a script: what it refuses, decides and does where something ends badly."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_study.sh"
pytestmark = pytest.mark.skipif(
    shutil.which("bash") is None or sys.platform != "linux", reason="needs bash on Linux"
)

# stands for the interpreter: writes down what is asked of resroute, and does what a file says
PYTHON = f"""#!/usr/bin/env bash
if [ "$1" = - ]; then exec {sys.executable} "$@"; fi
shift 2
echo "$*" >>calls
case "$*" in
  *--dry-run*) [ ! -e broken ] || {{ echo "resroute: no corpus" >&2; exit 2; }}
    case "$2" in paper) echo "about 900 s (15 min)" ;; *) echo "about 200 s (3 min)" ;; esac ;;
  "sweep learning_rate"*) [ ! -e refused ] || {{ echo "resroute: no" >&2; exit 2; }}
    cp plan.json study/learning_rate/suite.json
    if [ -e slow ]; then
      trap 'exit 143' TERM
      echo started
      for _ in {{1..200}}; do sleep 0.05; done
    fi
    exit "$(<tuning)" ;;
  "sweep paper"*) mkdir -p study/paper/cell
    touch study/paper/cell/summary.json
    exit "$(<paper)" ;;
esac
"""


@pytest.fixture
def place(tmp_path):
    """A folder with a stand-in for Python; both sweeps end well there."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    (tmp_path / "plan.json").write_text('{"runs": ["a", "b"]}')
    for run in ("a", "b"):
        (tmp_path / "study/learning_rate" / run).mkdir(parents=True)
        (tmp_path / "study/learning_rate" / run / "summary.json").touch()
    for name in ("tuning", "paper"):
        (tmp_path / name).write_text("0")
    return tmp_path


def start(place, *arguments, **environment):
    return subprocess.Popen(
        ["bash", str(SCRIPT), "--out", "study", *arguments],
        cwd=place, env={**os.environ, "PYTHON": "./python", **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def call(place, *arguments, **environment):
    process = start(place, *arguments, **environment)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def calls(place):
    """What was asked of resroute since the last look, without the study's own options."""
    path = place / "calls"
    found = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return found


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--hours"], "--hours needs a value; usage: gpu_study.sh"),
        (["--hours", "many"], "--hours needs a number, got many"),
        (["--hours", "-1"], "--hours needs a number, got -1"),
        (["--hours", ""], "--hours needs a number, got "),
        (["--fast", "1"], "unknown option --fast; usage: gpu_study.sh"),
        (["more"], "unknown option more; usage: gpu_study.sh"),
        (["--out", "python"], "python cannot be made; name another folder with --out"),
        (["--hours", "0.01"], "0.01 hours are too few: 400 steps a cell take about 0.11"),
        (["--", "--steps", "3"], "--steps behind -- would change what this script decides"),
    ],
)
def test_a_mistake_is_one_line(place, arguments, says):
    code, out, err = call(place, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"gpu_study: {says}")
    assert not list((place / "study").glob("steps*"))


def test_help_and_a_missing_interpreter(place):
    code, out, _ = call(place, "--help")
    assert (code, out.count("\n")) == (0, 1)
    assert out.startswith("usage: gpu_study.sh [--hours H] [--data A,B] [--out DIR] [-- OPTIONS ")
    code, _, err = call(place, PYTHON="./none")
    assert (code, err) == (
        2, "gpu_study: there is no ./none; run make setup, or name one with PYTHON=\n"
    )  # fmt: skip


def test_the_steps_are_decided_once_and_options_reach_both_sweeps(place):
    code, out, err = call(place, "--hours", "1.01", "--", "--batch", "8", "--set", "a b=1")
    assert (code, err) == (0, "")
    # 0.95 * 3636 s over (900 + 200 / 4) / 1000 s a step
    assert out == "gpu_study: 3600 steps a cell, 900 to tune the learning rates\n"
    first, second, tuning, paper, report = calls(place)
    assert first.startswith(
        "sweep learning_rate --data data/tinystories,data/text8 --preset paper "
    )
    assert first.endswith("--batch 8 --set a b=1 --steps 1000 --dry-run")
    assert second.startswith("sweep paper ")
    assert tuning.split(" --batch 8 ")[1].startswith("--set a b=1 --steps 900 --hours ")
    assert 0.9 < float(tuning.rsplit(" ", 1)[1]) <= 1.01
    assert (
        "--seeds 3 --primary-seeds 5 --out study/paper --batch 8 --set a b=1 --steps 3600" in paper
    )
    assert "--rates study/learning_rate --hours " in paper
    assert report == "report study/paper"
    # more hours do not change them, other options would
    assert call(place, "--hours", "9", "--", "--batch", "8", "--set", "a b=1")[:2] == (0, out)
    assert not any("--dry-run" in one for one in calls(place))
    code, _, err = call(place, "--hours", "9")
    assert (code, calls(place)) == (2, [])
    assert err == (
        "gpu_study: study was begun with --data data/tinystories,data/text8 --batch 8 --set a b=1; "
        "give the same, or another --out\n"
    )


def test_where_the_plan_fails_nothing_is_decided(place):
    (place / "broken").touch()
    assert call(place) == (2, "", "resroute: no corpus\n")
    assert [path.name for path in (place / "study").glob("steps*")] == []
    (place / "broken").unlink()
    assert call(place)[0] == 0


def test_the_study_waits_for_the_learning_rates(place):
    (place / "study/learning_rate/b/summary.json").unlink()
    code, out, _ = call(place)
    assert (code, out.splitlines()[1]) == (
        0,
        "gpu_study: the learning rates are not tuned yet (cells left: 1); the study begins after "
        "that",
    )
    assert calls(place)[-1].startswith("sweep learning_rate")
    # one that failed for another reason than its rate is no reason to go on
    (place / "tuning").write_text("2")
    logs = place / "study/learning_rate/logs"
    logs.mkdir()
    (logs / "b.log").write_text("no space left on device\n")
    assert call(place)[0] == 2
    assert calls(place)[-1].startswith("sweep learning_rate")
    (logs / "b.log").write_text("step 7: loss nan; lower the learning rate\nnone yet\n")
    code, out, _ = call(place)
    assert (code, out.splitlines()[1:]) == (
        0, ["gpu_study: goes on without the learning rates that were too high"]
    )  # fmt: skip
    assert calls(place)[-1] == "report study/paper"


def test_a_sweep_that_is_refused_has_the_last_word(place):
    (place / "refused").touch()
    code, _, err = call(place)
    assert (code, err) == (2, "resroute: no\n")
    assert calls(place)[-1].startswith("sweep learning_rate")


@pytest.mark.parametrize(("code", "is_reported"), [(2, True), (1, False), (143, False)])
def test_a_failed_cell_is_reported_and_told_by_the_exit_code(place, code, is_reported):
    (place / "paper").write_text(str(code))
    assert call(place)[0] == code
    assert (calls(place)[-1] == "report study/paper") == is_reported


def test_a_stop_reaches_what_runs_and_a_second_call_is_refused(place):
    (place / "slow").touch()
    process = start(place)
    assert process.stdout.readline().startswith("gpu_study: ")
    assert process.stdout.readline() == "started\n"
    if shutil.which("flock"):
        code, _, err = call(place)
        assert (code, err) == (
            2, "gpu_study: study is in use by another call; wait for it, or give another --out\n"
        )  # fmt: skip
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert time.monotonic() - began < 5
    (place / "slow").unlink()
    assert call(place)[0] == 0
