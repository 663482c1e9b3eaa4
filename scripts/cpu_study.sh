#!/usr/bin/env bash
# The study of results/cpu-study: width 64, context 128, 1.6 M characters a run, on slices of
# TinyStories and text8, for two CPU cores and some hours. Going on after a stop is the same command.
# usage: scripts/cpu_study.sh TEXTS [OUT [RESULTS]]
#   TEXTS has tinystories-lower-4mb.txt (the first 4,177,285 bytes of the TinyStories V1 training text in
#   lower case, stories parted by blank lines, ASCII alone; sha256 1b7df2cc..acc34f) and
#   text8-first-1mib.txt (the first 1,048,576 characters of text8; sha256 f9635e4a..9d90cb); OUT is where
#   runs and corpora go, RESULTS where each finished cell is added at once
set -euo pipefail
if [ $# -lt 1 ]; then echo "usage: scripts/cpu_study.sh TEXTS [OUT [RESULTS]]" >&2; exit 2; fi
texts=$1
out=${2:-runs/cpu-study}
results=${3:-$out/results}
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || { echo "cpu_study: there is no $python; run make setup, or name one with PYTHON=" >&2; exit 2; }
run=("$python" -m resroute)

for name in tinystories-lower-4mb text8-first-1mib; do
  [ -f "$out/data/$name/meta.json" ] || "${run[@]}" data prepare "$texts/$name.txt" --out "$out/data/$name"
done
stories=$out/data/tinystories-lower-4mb
letters=$out/data/text8-first-1mib
common=(--context 128 --batch 16 --set model.dim=64 --set model.num_heads=4 --precision float32 --device cpu)

tuned=(--steps 240 --seeds 1 --axis 3e-3,6e-3,1.2e-2 --out "$out/learning_rate" --results "$results/learning_rate")
full=(--steps 800 --rates "$out/learning_rate")
three=pre-norm,block-attn-res,wav
others=re-zero,layer-scale,haares,delta-attn-res,full-attn-res

# each method's rate: one seed, 0.3 of the steps, on TinyStories alone
"${run[@]}" sweep learning_rate --data "$stories" "${common[@]}" "${tuned[@]}" --layers 12,24,48 --methods "$three"
# the comparison over depth
"${run[@]}" sweep paper --data "$stories,$letters" "${common[@]}" "${full[@]}" --seeds 3 --primary-seeds 5 \
  --methods "$three" --out "$out/paper" --results "$results"
# what WAV's gain is due to, controls first
"${run[@]}" sweep ablation --data "$stories" "${common[@]}" "${full[@]}" --layers 12 --seeds 3 \
  --out "$out/ablation" --results "$results/ablation" --reuse "$results"
# the other methods, shallow alone
"${run[@]}" sweep learning_rate --data "$stories" "${common[@]}" "${tuned[@]}" --layers 12 --methods "$others"
"${run[@]}" sweep paper --data "$stories" "${common[@]}" "${full[@]}" --layers 12 --seeds 3 \
  --methods "pre-norm,block-attn-res,$others" --out "$out/others" --results "$results/others" --reuse "$results"
# two and four times the training, shallow alone: does the gap at 12 layers come from short runs
"${run[@]}" sweep horizon --data "$stories" "${common[@]}" "${full[@]}" --layers 12 --seeds 3 --axis 1,2,4 \
  --methods block-attn-res,wav --out "$out/horizon" --results "$results/horizon" --reuse "$results"
