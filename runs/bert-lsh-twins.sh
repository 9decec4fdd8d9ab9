#!/usr/bin/env bash
# BERT-LSH, Tables 1 to 4 and Figure 2 in small: LSH attention, its dense twin, random pairs.
# Makes: the tables of docs/bert-lsh.md under "Operations", "Pre-training and fine-tuning quality"
#     and "Buckets of trained models".
# Data: the docstrings of your Python; text/, 100 MB of novels and Wikipedia, which is not shipped; glue/ with GLUE's own files
#     and SQuAD's train-v1.1.json and dev-v1.1.json.
# Hardware: two CPU cores, about three hours.
# Differs from the paper: 128 positions, 8,192 pieces, 2,500 steps of 32.
set -euo pipefail
cd "$(dirname "$0")/.."

python -m bench.attention flops
python -m bench.attention twins --data text/ --data_dir glue/ --steps 2500 --seeds 3

# losses on docstrings (docs-train.txt: docs/operations.md)
for attn in full lsh; do
    python pretrain.py --preset bert-lsh --attn $attn --data docs-train.txt --vocab 8192 --length 128 \
        --batch 32 --lr 1e-3 --warmup 250 --steps 2500 --dropout 0 --seed 0 --out out/docs-$attn-0
    python pretrain.py --preset bert-lsh --attn $attn --data docs-train.txt --vocab 8192 --length 128 \
        --batch 32 --lr 1e-3 --warmup 250 --steps 2500 --dropout 0 --seed 1 --out out/docs-$attn-1
    python pretrain.py --preset bert-lsh --attn $attn --data docs-train.txt --vocab 8192 --length 128 \
        --batch 32 --lr 1e-3 --warmup 250 --steps 2500 --dropout 0 --seed 2 --out out/docs-$attn-2
done

# the same with new hyperplanes in each step, as the authors have them
for seed in 0 1 2; do
    python pretrain.py --preset bert-lsh --lsh_redraw --data docs-train.txt --vocab 8192 --length 128 \
        --batch 32 --lr 1e-3 --warmup 250 --steps 2500 --dropout 0 --seed $seed --out out/docs-redraw-$seed
done

# sequences of 1,024 positions: dense, and with eight hyperplanes
for seed in 0 1 2; do
    python pretrain.py --preset bert-lsh --attn full --data docs-train.txt --vocab 8192 --length 1024 \
        --batch 4 --lr 1e-3 --warmup 250 --steps 2500 --dropout 0 --seed $seed --out out/long-full-$seed
    python pretrain.py --preset bert-lsh --lsh_bands 8 --lsh_pairs all --data docs-train.txt \
        --vocab 8192 --length 1024 --batch 4 --lr 1e-3 --warmup 250 --steps 2500 --dropout 0 \
        --seed $seed --out out/long-lsh-$seed
done

# the pairs of trained models that collide
for attn in full lsh; do
    python pretrain.py --preset bert-lsh --attn $attn --data text/ --vocab 8192 --lr 1e-3 \
        --warmup 250 --steps 2500 --dropout 0 --length 128 --batch 32 --out out/twin-$attn-128
    python pretrain.py --preset bert-lsh --attn $attn --data text/ --vocab 8192 --lr 1e-3 \
        --warmup 250 --steps 2500 --dropout 0 --length 512 --batch 8 --out out/twin-$attn-512
done
python -m bench.attention trained --runs out/twin-*
