#!/usr/bin/env bash
# Superbloom, Table 7: none, one or both of the two maps coherent, at alpha 10 and 20.
# Paper: arXiv 2002.04723, Appendix D.
# Data: pages.jsonl, a line {"links": [...]} for each page. It is not shipped.
# Hardware: written for eight GPUs. Never run at this size.
# Cost: 4.1 billion sets a row.
# Differs from the paper: warm-up and clipping, which it does not name.
set -euo pipefail
cd "$(dirname "$0")/.."

for alpha in 10 20; do
    for coherent in 0 1 2; do
        torchrun --nproc_per_node=8 pretrain.py --preset superbloom --data pages.jsonl \
            --vocab 500000 --batch 4096 --lr 2e-4 --width 256 --heads 8 --ffn 1024 \
            --alpha $alpha --coherent $coherent --out out/sb7-hash$alpha-$coherent
    done
done
