#!/usr/bin/env bash
# HashFormers, Table 1: LSH against MD5 by the held-out loss of pre-training, over draws of the hash.
# Makes: results/draws.json, from which docs/claims.md has its rows. Runs in it are not trained again.
# Data: the docstrings of your Python.
# Hardware: one CPU core, two minutes a run.
# Differs from the paper: width 128, 600 steps, Emb with 8,192 rows. Each run has its own hash.
set -euo pipefail
cd "$(dirname "$0")/.."

for emb in proj "emb --rows 8192" add pool; do
    for draw in 0 1 2 3 4 5; do
        name=draws-${emb%% *}-lsh-$draw
        grep -q "\"$name\"" results/draws.json ||
            python pretrain.py --emb $emb --hash lsh --steps 600 --seed $draw --hash_seed $draw --out out/$name
        name=draws-${emb%% *}-md5-$draw
        grep -q "\"$name\"" results/draws.json ||
            python pretrain.py --emb $emb --hash md5 --steps 600 --seed $draw --key $draw --out out/$name
    done
done
python -m bench.draws losses --runs 'out/draws-*' --known results/draws.json --json results/draws.json
