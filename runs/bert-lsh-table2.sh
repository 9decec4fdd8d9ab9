#!/usr/bin/env bash
# BERT-LSH, Tables 2 to 4: BERT and BERT-LSH, pre-trained and fine-tuned on SST-2 and SQuAD v1.1.
# Paper: arXiv 2404.08836, Section 2.4, and its released code.
# Data: BookCorpus, SST-2 and SQuAD from the hub.
# Hardware: one GPU. Never run at this size.
# Cost: 88,245 steps of 8 sequences of 512 a row.
# Differs from the paper: all of BookCorpus instead of a tenth. The hyperplanes change in every
#     training step and not in an evaluation. Fine-tuning has no weight decay, and keeps the
#     evaluation with the highest score instead of the lowest loss.
set -euo pipefail
cd "$(dirname "$0")/.."

python pretrain.py --preset bert-lsh --attn full --data bookcorpus --out out/bl-bert
python pretrain.py --preset bert-lsh --lsh_redraw --data bookcorpus --out out/bl-bert-lsh
for row in bert bert-lsh; do
    for task in sst2 squad; do
        python finetune.py --ckpt out/bl-$row --task $task --epochs 3 --lr 2e-5 --select 0.05
    done
done
