#!/usr/bin/env bash
# The two models of English in models/, and two of their shape: pre-training, small tasks.
# Makes: models/english-detect.pt, english-fill.pt, and results/english.json.
# Data: wikipedia.jsonl and novels.jsonl, 100 MB of text; GLUE from the hub. mrpc/ has two parts of
#     MRPC's training rows, which choose the learning rate. None of them is shipped.
# Hardware: one GPU for the pre-training, four minutes a model on an H200. Two CPU cores for the rest:
#     a seed takes about 3 minutes of one core on MRPC, STS-B or RTE, 2 on CoLA and 8 on SST-2.
# Run so far: english-detect.pt on all tasks, and two learning rates.
# Differs from the paper: 4 layers of width 256, 21 million words, 8,000 steps.
set -euo pipefail
cd "$(dirname "$0")/.."

sizes="--layers 4 --width 256 --heads 4 --ffn 1024 --length 128"
recipe="--batch 256 --micro 256 --lr 1e-3 --warmup 800 --steps 8000"
data="--data wikipedia.jsonl+novels.jsonl"
python pretrain.py $data $sizes $recipe --out out/english-detect
python pretrain.py $data $sizes $recipe --objective hash-mlm --out out/english-fill
python pretrain.py $data $sizes $recipe --emb lookup --vocab 16000 --out out/english-bpe-detect
python pretrain.py $data $sizes $recipe --emb mean --out out/english-mean-fill
for model in detect fill bpe-detect mean-fill; do
    python -m bench.shrink out/english-$model out/english-$model.pt
done

# the learning rate: chosen on a fifth of MRPC's training rows, on which no model is trained
for lr in 1e-4 3e-4 1e-3; do
    python finetune.py --ckpt models/english-detect.pt --task mrpc --lr $lr --seeds 1 \
        --train mrpc/train.tsv --dev mrpc/dev.tsv --out out/english-lr-$lr
done

# scores
for model in detect fill bpe-detect mean-fill; do
    for task in mrpc stsb rte cola; do
        python finetune.py --ckpt out/english-$model.pt --task $task --lr 3e-4
    done
    python finetune.py --ckpt out/english-$model.pt --task sst2 --lr 3e-4 --epochs 3
done

# the same encoder without pre-training
for task in mrpc stsb rte cola; do
    python finetune.py --ckpt out/english-detect.pt --task $task --lr 3e-4 --from_scratch
done

python -m bench.training tasks --runs out/english-*
