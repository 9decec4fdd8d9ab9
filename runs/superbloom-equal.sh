#!/usr/bin/env bash
# Superbloom, Tables 2 and 3 in small, models of equal size, over draws of the maps: two hash tokens
#     against a table and random walks; a full softmax against a sampled one; six layers against a
#     wide one.
# Makes: results/equal.json, sampled-turns.json, layers.json, names.json, walks.json,
#     walks-names.json and prior-pages.json. Runs in the first four are not trained again. Those of
#     alpha 25 and of width 16 have never run.
# Data: simplewiki.jsonl.gz, the links of each page of the Simple English Wikipedia of April 2007;
#     names in functions of your Python, whose packages decide what they are.
# Hardware: one CPU core, 20 minutes for 6,000 steps, 3 for a run of layers.
# Differs from the paper: the preset superbloom-small, alpha 4 and 25, no dropout. The table of width 16
#     is as starved as the paper's, a sixteenth of the tokens' width. Each item is masked in turn.
set -euo pipefail
cd "$(dirname "$0")/.."

pretrain() {  # variant, draw, flags
    local name=$1-$2
    grep -qs "\"$name\"" results/{equal,sampled-turns,layers,names}.json ||
        python pretrain.py --preset superbloom-small --data simplewiki.jsonl.gz --dropout 0 \
            --seed $2 "${@:3}" --out out/$name
}

for draw in 0 1 2 3; do
    pretrain sets-tokens-alpha4 $draw --alpha 4 --steps 6000 --hash_seed $draw
    pretrain sets-table-d168 $draw --emb lookup --width 168 --ffn 336 --steps 6000
    pretrain sets-table-d256 $draw --emb lookup --steps 6000
    pretrain sets-sampled-d168 $draw --emb lookup --width 168 --ffn 336 --steps 6000 \
        --objective sampled --samples 1000
    pretrain sets-sampled-d256 $draw --emb lookup --steps 6000 --objective sampled --samples 1000
    pretrain names-tokens-alpha4 $draw --alpha 4 --steps 6000 --hash_seed $draw \
        --data python-names --vocab 20000
    pretrain sets-tokens-alpha25 $draw --alpha 25 --steps 12000 --hash_seed $draw
    pretrain sets-table-d88 $draw --emb lookup --width 88 --ffn 176 --steps 12000
    pretrain sets-table-d16 $draw --emb lookup --width 16 --ffn 32 --steps 12000
done
for draw in 0 1 2 3 4 5; do
    small="--alpha 5 --vocab 2000 --lr 0.001 --steps 1500 --hash_seed $draw"
    pretrain layers-six $draw $small --width 128 --ffn 256 --layers 6
    pretrain layers-wide $draw $small --width 276 --ffn 552 --layers 1
done
python -m bench.draws recall --runs 'out/layers-*' --data simplewiki.jsonl.gz \
    --known results/layers.json --json results/layers.json
python -m bench.draws recall --runs 'out/sets-t*' --data simplewiki.jsonl.gz \
    --known results/equal.json --json results/equal.json
python -m bench.draws recall --runs 'out/sets-sampled-*' --data simplewiki.jsonl.gz \
    --known results/sampled-turns.json --json results/sampled-turns.json
python -m bench.draws recall --runs 'out/names-tokens-*' --data python-names \
    --known results/names.json --json results/names.json
python -m bench.draws neighbors --data simplewiki.jsonl.gz --json results/walks.json
python -m bench.draws neighbors --data python-names --items 20000 --json results/walks-names.json
python -m bench.superbloom prior --runs out/sets-tokens-alpha4-0 out/sets-tokens-alpha4-1 \
    out/sets-tokens-alpha4-2 out/sets-tokens-alpha4-3 --data simplewiki.jsonl.gz \
    --json results/prior-pages.json
