#!/usr/bin/env bash
# HashFormers, Table 1: LSH against MD5 by the held-out loss of pre-training, over draws of the hash.
# Makes: the table of docs/scores.md, "LSH and MD5 over draws of the hash".
# Data: the docstrings of your Python.
# Hardware: one CPU core, about an hour and a half.
# Differs from the paper: width 128, 1,500 steps, Emb with 8,192 rows. Each run has its own hash.
set -euo pipefail
cd "$(dirname "$0")/.."

for draw in 0 1 2 3 4 5; do
    for emb in proj add pool "emb --rows 8192"; do
        python pretrain.py --emb $emb --hash lsh --steps 1500 --seed $draw --hash_seed $draw --out out/draws-${emb%% *}-lsh-$draw
        python pretrain.py --emb $emb --hash md5 --steps 1500 --seed $draw --key $draw --out out/draws-${emb%% *}-md5-$draw
    done
done
