#!/usr/bin/env bash
# More epochs, and other pre-trainings, of the default run.
# Makes: the tables of docs/scores.md under "Default run" on more epochs; results/pretrainings.json.
# Data: the docstrings of your Python; MRPC from the hub; topics/, built by default.sh, whose model
#     out/proj-lsh the first part fine-tunes.
# Hardware: two CPU cores, about two hours.
set -euo pipefail
cd "$(dirname "$0")/.."

for task in articles nations; do
    python finetune.py --ckpt out/proj-lsh --epochs 15 --out out/epochs-15-$task \
        --train topics/$task/train.jsonl --dev topics/$task/dev.jsonl
done
python finetune.py --ckpt out/proj-lsh --epochs 15 --out out/epochs-15-mrpc --task mrpc

python pretrain.py --steps 6000 --short 0 --emb mean --objective sr --out out/mean-sr
python pretrain.py --steps 6000 --short 0 --emb mean --out out/mean-hm
python pretrain.py --steps 6000 --short 0 --emb proj --objective hash-mlm --out out/proj-hm
for row in mean-sr mean-hm proj-hm; do
    python finetune.py --ckpt out/$row --task pydoc --seeds 1
    python finetune.py --ckpt out/$row --task mrpc --seeds 1
    for task in articles nations; do
        python finetune.py --ckpt out/$row --seeds 1 --out out/$row-$task \
            --train topics/$task/train.jsonl --dev topics/$task/dev.jsonl
    done
done
python -m bench.training tasks --runs out/epochs-15-* out/mean-* out/proj-hm-*
