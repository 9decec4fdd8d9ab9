#!/usr/bin/env bash
# Speed on a GPU: attention, training steps, words per second.
# Makes: the tables of docs/speed.md under "One GPU".
# Data: none. Rows of Hugging Face BERT need `pip install transformers`.
# Hardware: one GPU.
# Cost: six minutes. Each table is stopped after its share of them, and its rows so far are kept.
#     First `python -m pytest tests/test_bench.py -k gpu` tries them at tiny sizes, also on a CPU.
# Differs from the papers: they give no such table.
set -euo pipefail
cd "$(dirname "$0")/.."

timeout 130 python -m bench.gpu kernels --json results/gpu-attention.json || true
timeout 110 python -m bench.gpu mfu --json results/gpu-steps.json || true
timeout 75 python -m bench.gpu words --json results/gpu-words.json || true
