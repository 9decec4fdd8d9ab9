#!/usr/bin/env bash
# HashFormers, Table 6: hash BPE pieces instead of words.
# Paper: arXiv 2210.07904; all else as in hashformers-table1.sh.
# Data: Wikipedia, BookCorpus and GLUE from the hub.
# Hardware and cost: eight GPUs, as hashformers-table1.sh. Never run at this size.
# Differs from the paper: Emb has 50,260 rows.
set -euo pipefail
cd "$(dirname "$0")/.."

for hash in md5 lsh; do
    torchrun --nproc_per_node=8 pretrain.py --preset hashformer --data wikipedia+bookcorpus \
        --split bpe --emb emb --hash $hash --out out/hf-pieces-$hash-emb-50k
    torchrun --nproc_per_node=8 pretrain.py --preset hashformer --data wikipedia+bookcorpus \
        --split bpe --emb proj --hash $hash --out out/hf-pieces-$hash-proj
done
for row in {md5,lsh}-{emb-50k,proj}; do
    torchrun --nproc_per_node=8 finetune.py --ckpt out/hf-pieces-$row --task glue
done
