#!/usr/bin/env bash
# Speed on a GPU: attention, training steps, words per second, ranks.
# Makes: results/gpu.json, for the tables of docs/speed.md under "One GPU", and of README under
#     "Several GPUs".
# Data: none. Rows of Hugging Face BERT need `pip install transformers`.
# Hardware: one GPU, six minutes. Where two are, two ranks are measured, too.
# Differs from the papers: they give no such table.
set -euo pipefail
cd "$(dirname "$0")/.."

python -m bench.gpu --json results/gpu.json
