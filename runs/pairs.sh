#!/usr/bin/env bash
# Why pairs of texts transfer worse from a larger model: attention to copies, and STS-B.
# Makes: results/copies.json and results/pairs.json.
# Data: wikipedia.jsonl, a slice of English Wikipedia; GLUE from the hub and in glue/. None is shipped.
# Hardware: two CPU cores, about half an hour.
set -euo pipefail
cd "$(dirname "$0")/.."

# a small model after pre-trainings of two lengths
for steps in 500 1500; do
    python pretrain.py --data wikipedia.jsonl --steps $steps --out out/wiki-$steps
    python finetune.py --ckpt out/wiki-$steps --task stsb --seeds 1
done
python -m bench.training tasks --runs out/wiki-*-stsb

# the attention of a word to the same word in the other text, before fine-tuning
python -m bench.copies copies --data_dir glue/ --runs out/wiki-500 out/wiki-1500 \
    models/docstrings.pt models/english-detect.pt models/english-fill.pt out/english-bpe-detect.pt \
    out/english-mean-fill.pt
