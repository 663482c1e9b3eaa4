#!/usr/bin/env bash
# The study of results/cpu-study: width 64, context 128, 1.6 M characters a run, on slices of
# TinyStories and text8, for two CPU cores and some hours. Going on after a stop is the same command.
# usage: scripts/cpu_study.sh TEXTS [OUT]
#   TEXTS has tinystories-lower-4mb.txt (the first 4,177,285 bytes of the TinyStories V1 training text in
#   lower case, stories parted by blank lines, ASCII alone; sha256 1b7df2cc..acc34f) and
#   text8-first-1mib.txt (the first 1,048,576 characters of text8; sha256 f9635e4a..9d90cb); OUT is where
#   runs and corpora go
set -euo pipefail
if [ $# -lt 1 ]; then echo "usage: scripts/cpu_study.sh TEXTS [OUT]" >&2; exit 2; fi
texts=$1
out=${2:-runs/cpu-study}
python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || { echo "cpu_study: there is no $python; run make setup, or name one with PYTHON=" >&2; exit 2; }
run=("$python" -m resroute)

for name in tinystories-lower-4mb text8-first-1mib; do
  [ -f "$out/data/$name/meta.json" ] || "${run[@]}" data prepare "$texts/$name.txt" --out "$out/data/$name"
done
stories=$out/data/tinystories-lower-4mb
letters=$out/data/text8-first-1mib
common=(--context 128 --batch 16 --set model.dim=64 --set model.num_heads=4 --precision float32 --device cpu)

# each method's rate: one seed, 0.3 of the steps, on TinyStories alone
"${run[@]}" sweep learning_rate --data "$stories" "${common[@]}" --steps 240 --seeds 1 --layers 12,24,48 \
  --axis 3e-3,6e-3,1.2e-2 --out "$out/learning_rate"
"${run[@]}" sweep paper --data "$stories,$letters" "${common[@]}" --steps 800 --seeds 3 --primary-seeds 5 \
  --methods pre-norm,block-attn-res,wav --rates "$out/learning_rate" --out "$out/paper"
