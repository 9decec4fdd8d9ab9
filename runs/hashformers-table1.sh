#!/usr/bin/env bash
# HashFormers, Table 1: pre-train each row, and fine-tune it on eight GLUE tasks.
# Paper: arXiv 2210.07904, sizes of Section 4.2, recipes of Tables 4 and 5.
# Data: Wikipedia, BookCorpus and GLUE from the hub.
# Hardware: written for eight GPUs. Never run at this size.
# Cost: 33 billion positions a row. One step of Proj was measured on one H200 (docs/speed.md);
#     at that speed a row takes 15 hours there.
# Differs from the paper: Emb (50K) and Emb (1K) have 50,260 and 1,038 rows, as many as the
#     printed parameters give. ProFormer is not pre-trained there either. CANINE-C: canine.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

torchrun --nproc_per_node=8 pretrain.py --preset hashformer --data wikipedia+bookcorpus \
    --emb lookup --objective mlm --out out/hf-bert-mlm
torchrun --nproc_per_node=8 pretrain.py --preset hashformer --data wikipedia+bookcorpus \
    --emb lookup --out out/hf-bert-sr
for hash in md5 lsh; do
    torchrun --nproc_per_node=8 pretrain.py --preset hashformer --data wikipedia+bookcorpus \
        --split space --emb emb --hash $hash --out out/hf-$hash-emb-50k
    torchrun --nproc_per_node=8 pretrain.py --preset hashformer --data wikipedia+bookcorpus \
        --split space --emb emb --hash $hash --rows 1038 --out out/hf-$hash-emb-1k
    for emb in pool add proj; do
        torchrun --nproc_per_node=8 pretrain.py --preset hashformer --data wikipedia+bookcorpus \
            --split space --emb $emb --hash $hash --out out/hf-$hash-$emb
    done
done

# Table 2 has these scores in percent of those of bert-mlm
torchrun --nproc_per_node=8 finetune.py --preset proformer --task glue
for row in bert-mlm bert-sr {md5,lsh}-{emb-50k,emb-1k,pool,add,proj}; do
    torchrun --nproc_per_node=8 finetune.py --ckpt out/hf-$row --task glue
done
python -m bench.training tasks --runs out/hf-*-glue
