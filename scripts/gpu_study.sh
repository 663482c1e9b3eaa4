#!/usr/bin/env bash
# The study at the WAV paper's scale on a machine with CUDA GPUs: width 512, bfloat16, 12, 24 and 48
# layers, sized to a budget of hours. The same command goes on after a stop.
# usage: scripts/gpu_study.sh [--hours H] [--data A,B] [--out DIR]    (PYTHON= names another interpreter)
# A fifth of the budget tunes the learning rates, the rest is the study; where cells turn out slower
# than was estimated, later ones wait: give more --hours to go on. Corpora are prepared before:
#   resroute data prepare tinystories && resroute data prepare text8
set -euo pipefail
hours=24
data=data/tinystories,data/text8
out=runs/gpu-study
python=${PYTHON:-.venv/bin/python}

refuse() { echo "gpu_study: $1" >&2; exit 2; }

while [ $# -gt 0 ]; do
  [ $# -ge 2 ] || refuse "$1 needs a value; usage: gpu_study.sh [--hours H] [--data A,B] [--out DIR]"
  case $1 in
    --hours) hours=$2 ;;
    --data) data=$2 ;;
    --out) out=$2 ;;
    *) refuse "unknown option $1; usage: gpu_study.sh [--hours H] [--data A,B] [--out DIR]" ;;
  esac
  shift 2
done
[[ $hours =~ ^[0-9]+([.][0-9]+)?$ ]] || refuse "--hours needs a number, got $hours"
command -v "$python" >/dev/null || refuse "there is no $python; run make setup, or name one with PYTHON="
device=${DEVICE:-cuda}

common=(--data "$data" --preset paper --context 256 --batch "${BATCH:-64}" --precision bfloat16 --device "$device")
mkdir -p "$out"
# the number of steps is decided once, so that a later call continues the same runs
if [ ! -s "$out/steps" ]; then
  plan() { "$python" -m resroute sweep "$1" "${common[@]}" --steps 1000 --out "$out/$1" --dry-run "${@:2}" |
    sed -n 's/^about \([0-9]*\) s .*/\1/p'; }
  tune=$(plan learning_rate --layers 12,48 --seeds 1 --axis 5e-4,1e-3,2e-3)
  main=$(plan paper --methods pre-norm,block-attn-res,wav --seeds 3 --primary-seeds 5)
  awk -v hours="$hours" -v tune="$tune" -v main="$main" 'BEGIN {
    # rates are tuned over a quarter of the steps
    steps = 1000 * hours * 3600 * 0.95 / (main + tune / 4)
    if (steps < 400) { print "gpu_study: " hours " hours are too few: even 400 steps a cell take more" > "/dev/stderr"; exit 2 }
    steps = steps > 50000 ? 50000 : steps
    print 100 * int(steps / 100)
  }' >"$out/steps.new"
  mv "$out/steps.new" "$out/steps"
fi
steps=$(<"$out/steps")
echo "gpu_study: $steps steps a cell, $((steps / 4)) to tune the learning rates"

until=$("$python" -c "import sys, time; print(time.time() + 3600 * float(sys.argv[1]))" "$hours")
left() { "$python" -c "import sys, time; print(max(0.0, (float(sys.argv[1]) - time.time()) / 3600))" "$until"; }
"$python" -m resroute sweep learning_rate "${common[@]}" --steps $((steps / 4)) --layers 12,48 --seeds 1 \
  --axis 5e-4,1e-3,2e-3 --out "$out/learning_rate" --hours "$(left)"
"$python" -m resroute sweep paper "${common[@]}" --steps "$steps" --methods pre-norm,block-attn-res,wav --seeds 3 \
  --primary-seeds 5 --rates "$out/learning_rate" --out "$out/paper" --hours "$(left)"
"$python" -m resroute report "$out/paper"
