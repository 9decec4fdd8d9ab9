#!/usr/bin/env bash
# CANINE-C, the row of HashFormers' Tables 1 to 3 that hashes characters.
# Paper: Clark et al. 2021; in HashFormers a released, pre-trained model.
# Data: GLUE from the hub, and the released checkpoint in canine-c/, which you download.
# Hardware: one GPU for the first command, two CPU cores for the second. The released weights were
#     never read here; the second command takes minutes.
# Differs from the paper: the second command trains a tiny model from fresh weights, on one task.
set -euo pipefail
cd "$(dirname "$0")/.."

for task in mnli qnli qqp rte sst2 mrpc cola stsb; do
    python -m baselines.canine --weights canine-c/ --task $task --out out/canine-$task
done
python -m baselines.canine --preset canine-tiny --task sst2 --epochs 1
