#!/usr/bin/env bash
# Superbloom, Tables 1 and 2: all of Wikipedia's 5,281,889 pages as items.
# Paper: arXiv 2002.04723, Section 3.2.
# Data: pages.jsonl, a line {"links": [...]} for each page. It is not shipped.
# Hardware: written for eight GPUs. Never run at this size.
# Cost: 1.02 billion sets a row.
# Differs from the paper: warm-up and clipping, which it does not name.
set -euo pipefail
cd "$(dirname "$0")/.."

torchrun --nproc_per_node=8 pretrain.py --preset superbloom --data pages.jsonl \
    --emb lookup --width 48 --heads 4 --ffn 1024 --out out/sb-baseline
torchrun --nproc_per_node=8 pretrain.py --preset superbloom --data pages.jsonl \
    --emb lookup --width 512 --heads 8 --ffn 2048 --objective sampled --samples 131072 \
    --out out/sb-sampled-softmax
torchrun --nproc_per_node=8 pretrain.py --preset superbloom --data pages.jsonl \
    --out out/sb-superbloom
