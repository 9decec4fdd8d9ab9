#!/usr/bin/env bash
# Why pairs of texts transfer worse from some models: the text of the pre-training, attention to copies.
# Makes: results/texts.json, repeats.json, pairs.json, pairs-gpu.json, copies-texts.json, copies.json.
# Data: wikipedia.jsonl, a slice of English Wikipedia, and novels.jsonl, 87 old novels; GLUE's own files
#     in glue/. None is shipped.
# Hardware: two CPU cores, about an hour; one GPU for the models of 4 layers.
set -euo pipefail
cd "$(dirname "$0")/.."

stsb() {
    python finetune.py --ckpt out/$1 --task stsb --data_dir glue/ --out out/$1-stsb "${@:2}"
}

# the default model on either text
for seed in 0 1 2; do
    for text in wikipedia novels; do
        python pretrain.py --data $text.jsonl --steps 2000 --seed $seed --out out/$text-$seed
        stsb $text-$seed --seeds 1 --seed $seed
    done
done
python -m bench.hashformers collect --runs out/wikipedia-{0,1,2} out/novels-{0,1,2}
python -m bench.copies repeats --data wikipedia.jsonl+novels.jsonl
python -m bench.copies copies --data_dir glue/ --runs out/wikipedia-{0,1,2} out/novels-{0,1,2}

# a small model after pre-trainings of two lengths
for steps in 500 1500; do
    python pretrain.py --data wikipedia.jsonl --steps $steps --out out/wiki-$steps
    stsb wiki-$steps --seeds 1
done

# larger models of both texts, and a small one, after more steps
recipe="--data wikipedia.jsonl+novels.jsonl --length 128 --batch 256 --micro 256 --lr 1e-3"
for steps in 500 1000; do
    python pretrain.py $recipe --layers 4 --width 256 --ffn 1024 --warmup $((steps / 10)) \
        --steps $steps --out out/english-$steps
    stsb english-$steps --seeds 1 --lr 3e-4
done
python pretrain.py $recipe --warmup 400 --steps 4000 --out out/english-small-4000
stsb english-small-4000
python -m bench.training tasks --runs out/wiki-*-stsb out/english-*-stsb

# the attention of a word to the same word in the other text, before fine-tuning
python -m bench.copies copies --data_dir glue/ --runs out/wiki-500 out/wiki-1500 \
    out/proj-lsh models/english-detect.pt models/english-fill.pt out/english-bpe-detect.pt \
    out/english-mean-fill.pt
