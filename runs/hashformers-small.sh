#!/usr/bin/env bash
# HashFormers, Tables 1, 2 and 6 in small: every row as a model of 2 layers, 2,000 steps.
# Makes: the tables of docs/scores.md, "HashFormers' Tables 1, 2 and 6, small" and above it.
# Data: the docstrings of your Python, and GLUE's own files in glue/ (SST-2/train.tsv, ...).
# Hardware: two CPU cores, four hours. Three seeds, each pre-trained and fine-tuned anew.
# Run so far: results/glue.json is of an earlier version, whose scored rows chose the evaluation and
#     whose windows were all full. The other results are of single rows, by --only.
# Differs from the paper: width 128, docstrings, five of its eight tasks, SST-2 for one epoch.
set -euo pipefail
cd "$(dirname "$0")/.."

python -m bench.hashformers counts
python -m bench.hashformers glue --steps 2000 --data_dir glue/
