#!/usr/bin/env bash
# Speed: attention, hashing, embeddings, beam search and training steps.
# Makes: the tables of docs/speed.md, "Attention alone" of docs/bert-lsh.md, and "Search" of
#     docs/superbloom.md. HashFormers' Table 3 is among them.
# Data: text/, 100 MB of novels and Wikipedia, and glue/ with GLUE's own files, for `inference`.
# Hardware: an idle machine, here two CPU cores; about two hours. For a GPU there is gpu.sh.
# Differs from the papers: their processors are GPUs.
set -euo pipefail
cd "$(dirname "$0")/.."

python -m bench.attention attention
python -m bench.attention auto
python -m bench.hashformers hashing
python -m bench.superbloom bloom
python -m bench.training steps
python -m bench.training train
python -m bench.training inference --data text/ --data_dir glue/
