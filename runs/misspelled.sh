#!/usr/bin/env bash
# Misspelled words: what Proj, Add and Emb of LSH bits, Proj of MD5 bits and BPE pieces still score.
# Makes: the table of docs/tables.md under "Misspelled words", and that of linear models in
#     docs/claims.md. No paper has them.
# Data: the docstrings of your Python; SST-2 from the hub, and its files in glue/SST-2; topics/, built
#     by default.sh.
# Hardware: two CPU cores, about an hour.
set -euo pipefail
cd "$(dirname "$0")/.."

python pretrain.py --steps 2000 --short 0 --emb proj --hash lsh --out out/small-proj-lsh
python pretrain.py --steps 2000 --short 0 --emb proj --hash md5 --out out/small-proj-md5
python pretrain.py --steps 2000 --short 0 --emb add --hash lsh --out out/small-add-lsh
python pretrain.py --steps 2000 --short 0 --emb emb --hash lsh --out out/small-emb-lsh
python pretrain.py --steps 2000 --short 0 --emb lookup --out out/small-lookup-bpe
for row in proj-lsh proj-md5 add-lsh emb-lsh lookup-bpe; do
    python finetune.py --ckpt out/small-$row --task sst2 --epochs 1 --seeds 1
    for task in articles nations; do
        python finetune.py --ckpt out/small-$row --seeds 1 --out out/small-$row-$task \
            --train topics/$task/train.jsonl --dev topics/$task/dev.jsonl
    done
done
python -m bench.misspell scores --runs out/small-*
# no encoder: a linear model over the mean of a text's words, in minutes
python -m bench.misspell linear --runs topics/articles topics/nations glue/SST-2
