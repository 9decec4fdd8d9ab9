#!/usr/bin/env bash
# Median is all you need in small: median, mean, Proj and tables, 2 layers of width 128.
# Makes: the tables of docs/sketch.md.
# Data: docs-train.txt and docs-test.txt, docstrings of installed packages and of networkx; text/,
#     100 MB of novels and Wikipedia; squad-dev.txt, the contexts of SQuAD's dev set; glue/ with
#     GLUE's own files. None of them is shipped.
# Hardware: two CPU cores, about half a day.
# Differs from the proposal: width 128, 1,200 to 10,000 steps, tied tables beside untied ones.
set -euo pipefail
cd "$(dirname "$0")/.."

# speed of a layer, and collisions of the words of docstrings
python -m bench.sketch sketch
python -m bench.sketch collisions

# which hidden words are named, and GLUE
python -m bench.sketch gaps --data docs-train.txt --text docs-test.txt --steps 1200
python -m bench.sketch gaps --data docs-train.txt --text docs-test.txt --steps 4000 \
    --only '^(median|mean)$|not tied'
python -m bench.sketch gaps --data docs-train.txt --text docs-test.txt --steps 10000 --seeds 1 \
    --only '^(median|mean)$'
python -m bench.sketch gaps --data text/ --text squad-dev.txt --data_dir glue/ --steps 2000
