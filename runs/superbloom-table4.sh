#!/usr/bin/env bash
# Superbloom, Tables 4 and 5: text with a vocabulary of a million words and phrases.
# Paper: arXiv 2002.04723, Section 4.
# Data: Wikipedia from the hub.
# Hardware: written for eight GPUs. Never run at this size.
# Cost: a million steps of 1,024 windows of 512 a row, with the preset's batch.
# Differs from the paper: words and phrases beside byte-level BPE pieces, where it starts from
#     WordPiece. It names no batch, rate or steps; these are those of its tables of items.
set -euo pipefail
cd "$(dirname "$0")/.."

torchrun --nproc_per_node=8 pretrain.py --preset superbloom --data wikipedia --split phrases \
    --length 512 --emb lookup --width 64 --heads 4 --ffn 256 --out out/sb4-baseline-h64
torchrun --nproc_per_node=8 pretrain.py --preset superbloom --data wikipedia --split phrases \
    --length 512 --emb lookup --width 256 --heads 8 --ffn 1024 --out out/sb4-baseline-h256
torchrun --nproc_per_node=8 pretrain.py --preset superbloom --data wikipedia --split phrases \
    --length 512 --alpha 40 --width 512 --heads 8 --ffn 2048 --out out/sb4-hash40-h512
torchrun --nproc_per_node=8 pretrain.py --preset superbloom --data wikipedia --split phrases \
    --length 512 --alpha 20 --width 1024 --heads 16 --ffn 4096 --out out/sb4-hash20-h1024
