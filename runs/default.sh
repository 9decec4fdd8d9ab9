#!/usr/bin/env bash
# The default run of README: Proj of LSH bits on docstrings, then eight small tasks.
# Makes: the models and scores of README's default run, and results/default.json, overlap.json,
#     scratch.json and frequency.json.
# Data: the docstrings of your Python; GLUE from the hub. articles and nations are built from a
#     SQuAD training file and from a file of Wikipedia articles, which are not shipped.
# Hardware: two CPU cores. Pre-training takes 6 to 25 minutes, fine-tuning an hour or two.
# Differs from the paper: 2 layers of width 128, docstrings, 10,000 steps.
set -euo pipefail
cd "$(dirname "$0")/.."

python pretrain.py
for task in pydoc sst2 cola mrpc rte stsb; do
    python finetune.py --ckpt out/proj-lsh --task $task
done

python -m bench.topics articles squad-train.jsonl topics/
python -m bench.topics nations wikipedia.jsonl topics/
for task in articles nations; do
    python finetune.py --ckpt out/proj-lsh --out out/proj-lsh-$task \
        --train topics/$task/train.jsonl --dev topics/$task/dev.jsonl
done

# the same encoder without pre-training
for task in mrpc stsb; do
    python finetune.py --ckpt out/proj-lsh --task $task --from_scratch
done
for task in articles nations; do
    python finetune.py --ckpt out/proj-lsh --out out/proj-lsh-scratch-$task --from_scratch \
        --train topics/$task/train.jsonl --dev topics/$task/dev.jsonl
done

# the tables; a bench prints its table, and --json FILE keeps it
python -m bench.training tasks --runs out/proj-lsh-*
python -m bench.controls frequency --runs out/proj-lsh
python -m bench.controls overlap --data_dir glue/ --runs out/proj-lsh-stsb out/proj-lsh-mrpc \
    out/proj-lsh-rte
