#!/usr/bin/env bash
# HashFormers, Table 1: LSH against MD5 by the held-out loss of pre-training, over draws of the hash.
# Makes: results/draws.json, from which docs/claims.md has its rows. Runs in it are not trained again.
# Data: the docstrings of your Python.
# Hardware: one CPU core, two minutes a run of 600 steps.
# Differs from the paper: width 128, 600 steps (Proj also 1,500), Emb with 8,192 rows. Each run has its own hash.
set -euo pipefail
cd "$(dirname "$0")/.."

pretrain() {  # embedding, its flags, hash, draw, name of the flag that draws it, steps, name
    grep -q "\"$7\"" results/draws.json || python pretrain.py --emb $1 $2 --hash $3 --seed $4 \
        --$5 $4 --steps $6 --out out/$7
}

for draw in 0 1 2 3 4 5; do
    for emb in proj emb add pool; do
        flags=
        if [ $emb = emb ]; then flags="--rows 8192"; fi
        pretrain $emb "$flags" lsh $draw hash_seed 600 draws-$emb-lsh-$draw
        pretrain $emb "$flags" md5 $draw key 600 draws-$emb-md5-$draw
    done
    pretrain proj "" lsh $draw hash_seed 1500 draws-proj-lsh-1500-$draw
    pretrain proj "" md5 $draw key 1500 draws-proj-md5-1500-$draw
done
python -m bench.draws losses --runs 'out/draws-*' --known results/draws.json --json results/draws.json
