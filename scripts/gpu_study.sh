#!/usr/bin/env bash
# The study at the WAV paper's scale on a machine with CUDA GPUs: width 512, bfloat16, 12, 24 and 48
# layers, sized to a budget of hours. The same command goes on after a stop.
# usage: scripts/gpu_study.sh [--hours H] [--data A,B] [--out DIR] [-- OPTIONS]
#   OPTIONS are for `resroute sweep`, and win over the study's own: `-- --batch 32` where memory is
#   short; `-- --preset tiny --layers 2,4 --device cpu --precision float32` to try it without a GPU.
#   PYTHON= names another interpreter than .venv's.
# About an eighth of the budget tunes the learning rates, the rest is the study; where cells turn out
# slower than was estimated, later ones wait: give more --hours to go on. Corpora are prepared before:
#   resroute data prepare tinystories && resroute data prepare text8
# Exit status: 0 done, or cells wait for more hours; 2 refused, or a cell failed; 130 and 143 stopped.
set -euo pipefail
hours=24
data=data/tinystories,data/text8
out=runs/gpu-study
python=${PYTHON:-.venv/bin/python}
usage="usage: gpu_study.sh [--hours H] [--data A,B] [--out DIR] [-- OPTIONS of resroute sweep]"

refuse() { echo "gpu_study: $1" >&2; exit 2; }

while [ $# -gt 0 ] && [ "$1" != -- ]; do
  case $1 in
    -h | --help) echo "$usage"; exit 0 ;;
    --hours | --data | --out) ;;
    *) refuse "unknown option $1; $usage" ;;
  esac
  [ $# -ge 2 ] || refuse "$1 needs a value; $usage"
  printf -v "${1#--}" %s "$2"
  shift 2
done
[ $# -eq 0 ] || shift
for word in "$@"; do
  case $word in
    --data* | --out* | --steps* | --rates* | --hours* | --dry-run | --results*)
      refuse "$word behind -- would change what this script decides; leave it out" ;;
  esac
done
more=("$@")
[[ $hours =~ ^[0-9]+([.][0-9]+)?$ ]] || refuse "--hours needs a number, got $hours"
command -v "$python" >/dev/null || refuse "there is no $python; run make setup, or name one with PYTHON="
mkdir -p "$out" 2>/dev/null || refuse "$out cannot be made; name another folder with --out"
[ -w "$out" ] || refuse "$out cannot be written; name another folder with --out"
# held until what runs has ended, also where this script is killed
exec 9>"$out/.lock"
if command -v flock >/dev/null; then
  flock -n 9 || refuse "$out is in use by another call; wait for it, or give another --out"
fi

# a signal to this script is one to what it runs, which saves first
child=
stopped=
stop() { stopped=$1; if [ -n "$child" ]; then kill -TERM "$child" 2>/dev/null || true; else exit "$1"; fi; }
trap 'stop 143' TERM HUP
trap 'stop 130' INT
run() {
  local status
  "$python" -m resroute "$@" &
  child=$!
  # a signal ends the wait, not the child
  while status=0; wait "$child" || status=$?; kill -0 "$child" 2>/dev/null; do :; done
  child=
  [ -z "$stopped" ] || exit "$stopped"
  return "$status"
}
common=(--data "$data" --preset paper --context 256 --batch 64 --precision bfloat16 --device cuda)
tuning=(sweep learning_rate "${common[@]}" --layers 12,48 --seeds 1 --axis 5e-4,1e-3,2e-3
  --out "$out/learning_rate" "${more[@]}")
study=(sweep paper "${common[@]}" --methods pre-norm,block-attn-res,wav --seeds 3 --primary-seeds 5
  --out "$out/paper" "${more[@]}")

# the number of steps is decided once, so that a later call continues the same runs
settings="--data $data ${more[*]}"
if [ ! -s "$out/steps" ]; then
  seconds() { "$python" -m resroute "$@" --steps 1000 --dry-run | sed -n 's/^about \([0-9]*\) s .*/\1/p'; }
  tune=$(seconds "${tuning[@]}")
  main=$(seconds "${study[@]}")
  # rates are tuned over a quarter of the steps
  steps=$(awk -v hours="$hours" -v tune="$tune" -v main="$main" 'BEGIN {
    each = (main + tune / 4 + 1e-3) / 1000 / 0.95
    steps = hours * 3600 / each
    if (steps < 400) {
      printf "gpu_study: %s hours are too few: 400 steps a cell take about %.2g\n", hours, 400 * each / 3600 > "/dev/stderr"
      exit 2
    }
    print 100 * int((steps > 50000 ? 50000 : steps) / 100)
  }')
  echo "$steps $settings" >"$out/steps.new"
  mv "$out/steps.new" "$out/steps"
fi
read -r steps begun <"$out/steps" || true
[[ $steps =~ ^[0-9]+$ ]] || refuse "$out/steps is damaged; begin anew in another folder with --out"
[ "$(<"$out/steps")" = "$steps $settings" ] || refuse "$out was begun with $begun; give the same, or another --out"
echo "gpu_study: $steps steps a cell, $((steps / 4)) to tune the learning rates"

left() {
  awk -v hours="$hours" -v gone="$SECONDS" 'BEGIN { left = hours - gone / 3600; printf("%.5f", (left > 0) ? left : 0) }'
}
status=0
run "${tuning[@]}" --steps $((steps / 4)) --hours "$(left)" || status=$?
case $status in 0 | 2) ;; *) exit "$status" ;; esac
[ -f "$out/learning_rate/suite.json" ] || exit "$status"
untuned=$("$python" - "$out/learning_rate" <<'PYTHON'
import json
import sys
from pathlib import Path

folder = Path(sys.argv[1])


def is_left(name):
    # a rate that is too high has no result, and would have none again
    log = folder / "logs" / f"{name}.log"
    is_too_high = log.is_file() and "lower the learning rate" in log.read_text(errors="replace")
    return not is_too_high and not (folder / name / "summary.json").is_file()


print(sum(map(is_left, json.loads((folder / "suite.json").read_text())["runs"])))
PYTHON
)
if [ "$untuned" != 0 ]; then
  echo "gpu_study: the learning rates are not tuned yet (cells left: $untuned); the study begins after that"
  exit "$status"
fi
[ "$status" = 0 ] || echo "gpu_study: goes on without the learning rates that were too high"
status=0
run "${study[@]}" --steps "$steps" --rates "$out/learning_rate" --hours "$(left)" || status=$?
case $status in 0 | 2) ;; *) exit "$status" ;; esac
if compgen -G "$out/paper/*/summary.json" >/dev/null; then
  run report "$out/paper" || status=$?
fi
exit "$status"
