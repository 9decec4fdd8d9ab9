#!/usr/bin/env bash
# Superbloom, Table 3: one layer and twelve, hashed or not, the 500,000 most frequent pages.
# Paper: arXiv 2002.04723, Section 3.3.
# Data: pages.jsonl, a line {"links": [...]} for each page. It is not shipped.
# Hardware: written for eight GPUs. Never run at this size.
# Cost: 4.1 billion sets a row.
# Differs from the paper: warm-up and clipping, which it does not name.
set -euo pipefail
cd "$(dirname "$0")/.."

torchrun --nproc_per_node=8 pretrain.py --preset superbloom --data pages.jsonl --vocab 500000 \
    --batch 4096 --lr 2e-4 --emb lookup --width 256 --heads 1 --ffn 1024 --layers 1 \
    --out out/sb3-baseline-l1
torchrun --nproc_per_node=8 pretrain.py --preset superbloom --data pages.jsonl --vocab 500000 \
    --batch 4096 --lr 2e-4 --emb lookup --width 256 --heads 8 --ffn 1024 --layers 12 \
    --out out/sb3-baseline-l12
torchrun --nproc_per_node=8 pretrain.py --preset superbloom --data pages.jsonl --vocab 500000 \
    --batch 4096 --lr 2e-4 --alpha 20 --width 256 --heads 1 --ffn 1024 --layers 1 \
    --out out/sb3-d256l1
torchrun --nproc_per_node=8 pretrain.py --preset superbloom --data pages.jsonl --vocab 500000 \
    --batch 4096 --lr 2e-4 --alpha 20 --width 384 --heads 1 --ffn 1536 --layers 1 \
    --out out/sb3-d384l1
torchrun --nproc_per_node=8 pretrain.py --preset superbloom --data pages.jsonl --vocab 500000 \
    --batch 4096 --lr 2e-4 --alpha 20 --width 256 --heads 8 --ffn 1024 --layers 12 \
    --out out/sb3-d256l12
