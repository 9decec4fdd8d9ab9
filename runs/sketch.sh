#!/usr/bin/env bash
# Median is all you need, at the proposal's sizes: median, mean, and a row for each word.
# Source: an unpublished proposal; 4 layers of width 512, 5 hash functions of 500 rows.
# Data: Wikipedia and BookCorpus from the hub.
# Hardware: written for one GPU. Never run at this size.
# Cost: 100,000 steps of 128 sequences of 512 a row.
# Differs from the proposal: it gives no number of steps.
set -euo pipefail
cd "$(dirname "$0")/.."

for emb in lookup mean median; do
    python pretrain.py --preset median --emb $emb --data wikipedia+bookcorpus --out out/cm-$emb
    python finetune.py --ckpt out/cm-$emb --task glue --batch 64
done
