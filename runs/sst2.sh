#!/usr/bin/env bash
# HashFormers, Tables 1 and 2, SST-2 alone: Proj, Emb of eight times its size, a bag of words.
# Makes: results/sst2.json, from which docs/claims.md has its rows.
# Data: the docstrings of your Python, and GLUE's own files in glue/ (SST-2/train.tsv, ...).
# Hardware: one CPU core, seven minutes a run.
# Differs from the paper: width 128, 2,000 steps on docstrings, one epoch of SST-2. Each run has its own hash.
set -euo pipefail
cd "$(dirname "$0")/.."

for draw in 0 1 2 3; do
    for model in "proj-lsh --emb proj" "emb-1K-lsh --emb emb --rows 1038"; do
        run=out/sst2/${model%% *}-$draw
        python pretrain.py ${model#* } --hash lsh --steps 2000 --seed $draw --hash_seed $draw --out $run
        python finetune.py --ckpt $run --task sst2 --data_dir glue/ --epochs 1 --seeds 1 --seed $draw \
            --out $run-sst2
    done
done
python -m bench.hashformers collect --runs out/sst2/*-? --json results/sst2.json
