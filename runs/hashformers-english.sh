#!/usr/bin/env bash
# HashFormers, Table 1 in small on English text: Proj, Pool and Add of LSH and MD5 bits, and Emb 1K.
# Makes: the table of docs/scores.md, "HashFormers' Table 1 on English text".
# Data: text/, 100 MB of novels and Wikipedia, and GLUE's own files in glue/. Neither is shipped.
# Hardware: one GPU for the pre-training, about a minute a model; eight ran side by side on an H200.
#     Two CPU cores for the fine-tuning, four minutes of one core a model.
# Differs from the paper: 2 layers of width 128, 2,500 steps of 128 windows, five of its eight tasks.
set -euo pipefail
cd "$(dirname "$0")/.."

tune() {  # a run, its seed, a task, epochs
    python finetune.py --ckpt $1.pt --task $3 --epochs $4 --seeds 1 --seed $2 --data_dir glue/ \
        --out $1-$3
}

for seed in 0 1 2; do
    for emb in proj pool add; do
        for hash in lsh md5; do
            python pretrain.py --data text/ --emb $emb --hash $hash --steps 2500 --batch 128 --micro 128 \
                --seed $seed --out out/$emb-$hash-$seed
        done
    done
    python pretrain.py --data text/ --emb emb --hash lsh --rows 1038 --steps 2500 --batch 128 --micro 128 \
        --seed $seed --out out/emb-1K-lsh-$seed
    for model in proj-lsh proj-md5 pool-lsh pool-md5 add-lsh add-md5 emb-1K-lsh; do
        python -m bench.shrink out/$model-$seed out/$model-$seed.pt
        tune out/$model-$seed $seed sst2 1
        for task in cola mrpc rte stsb; do
            tune out/$model-$seed $seed $task 5
        done
    done
done
python -m bench.hashformers collect --runs \
    out/{proj-lsh,proj-md5,pool-lsh,pool-md5,add-lsh,add-md5,emb-1K-lsh}-{0,1,2}
