#!/usr/bin/env bash
# BERT-LSH: the loss against the pairs that are scored, by hyperplanes and length.
# Makes: results/frontier.json, from which docs/claims.md has its rows. Runs in it are not trained again.
# Data: the docstrings of your Python.
# Hardware: one CPU core, two to six minutes a run.
# Differs from the paper: 4,096 pieces, 1,500 steps of 2,048 positions, fixed hyperplanes, a score for each
#     pair. The paper has one length, no other number of hyperplanes and no shared queries and keys.
set -euo pipefail
cd "$(dirname "$0")/.."

pretrain() {  # program, length, attention and draw, flags
    local name=frontier-$2-$3
    shared="--preset bert-lsh --vocab 4096 --length $2 --batch $((2048 / $2))
        --steps 1500 --lr 1e-3 --warmup 200 --dropout 0"
    grep -q "\"$name\"" results/frontier.json || python $1 $shared ${@:4} --seed ${3##*-} --out out/$name
}

for draw in 0 1 2; do
    for length in 128 512 1024; do
        pretrain pretrain.py $length dense-$draw --attn full
        for bands in 1 2 4 8; do
            pretrain pretrain.py $length $bands-$draw --lsh_bands $bands --lsh_pairs all
        done
        pretrain "-m bench.attention_controls shared" $length shared-4-$draw --lsh_bands 4 --lsh_pairs all
    done
    pretrain "-m bench.attention_controls shared" 128 shared-dense-$draw --attn full
done
python -m bench.draws frontier --runs 'out/frontier-*' \
    --known results/frontier.json --json results/frontier.json
