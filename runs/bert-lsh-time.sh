#!/usr/bin/env bash
# BERT-LSH: LSH attention against dense attention after equal time of training, 4,096 positions.
# Makes: results/time.json, from which docs/claims.md has its row. Runs in it are not trained again.
# Data: the docstrings of your Python.
# Hardware: one CPU core, 17 minutes a run.
# Differs from the paper: 4,096 pieces and positions, batches of one, a score for each pair, fixed
#     hyperplanes, 8 of them. The paper trains for equal steps.
set -euo pipefail
cd "$(dirname "$0")/.."

pretrain() {  # attention and draw, flags
    local name=time-$1
    grep -qs "\"$name\"" results/time.json || python pretrain.py --preset bert-lsh --vocab 4096 \
        --length 4096 --batch 1 --lr 1e-3 --warmup 250 --dropout 0 \
        "${@:2}" --seed ${1##*-} --out out/$name
}

# A step of LSH attention takes 1 / 1.86 of the time of a dense one: 19.0K and 10.2K words a second,
# medians of three turns each (Intel Xeon with AMX, one thread, bfloat16)
for draw in 0 1 2; do
    pretrain dense-$draw --attn full --steps 2500
    pretrain lsh-$draw --lsh_bands 8 --lsh_pairs all --steps 4650
done
python -m bench.draws losses --runs 'out/time-*' --known results/time.json --json results/time.json
