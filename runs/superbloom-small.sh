#!/usr/bin/env bash
# Superbloom, Tables 1, 2, 3 and 7 in small: four data sets of up to 82,629 items.
# Makes: the tables of docs/superbloom.md from "Recall" on.
# Data: names in functions of your Python; simplewiki.jsonl.gz, the links of each page of the
#     Simple English Wikipedia of April 2007; beauty.jsonl.gz and books.jsonl.gz, the items of each
#     user of two Amazon sets. The three files are not shipped.
# Hardware: two CPU cores, about a day; 25 minutes for the names.
# Differs from the paper: the preset superbloom-small, 6,000 steps or fewer, alpha 4 to 25.
set -euo pipefail
cd "$(dirname "$0")/.."

# sizes of the paper's models, counted
python -m bench.superbloom sizes

# names of Python, by beam width
python pretrain.py --preset superbloom-small --alpha 25 --coherent 1
python -m bench.superbloom beams --runs out/bloom-items

# the items' prior, 20,000 names, 15 minutes
python pretrain.py --preset superbloom-small --alpha 25 --coherent 1 --width 128 --vocab 20000 \
    --out out/names-0
python -m bench.superbloom prior --runs out/names-0

# maps, a table of equal size, a sampled softmax, and neighbors
python -m bench.superbloom entities --data simplewiki.jsonl.gz --alpha 4 --steps 6000
python -m bench.superbloom entities --data simplewiki.jsonl.gz --alpha 25 --steps 3000 \
    --only '0 of 2|^lookup, as many'
python -m bench.superbloom entities --data simplewiki.jsonl.gz --alpha 25 --steps 6000 \
    --seeds 1 --only '0 of 2'
python -m bench.superbloom entities --data beauty.jsonl.gz --steps 4000 --only '1 of 2'
python -m bench.superbloom entities --data books.jsonl.gz --steps 4000 --only '1 of 2'

# one layer, six layers, one wide layer
python -m bench.superbloom depth --data simplewiki.jsonl.gz --alpha 5 --steps 1500
