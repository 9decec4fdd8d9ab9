"""How pretrain.py trains each row of the papers' tables: commands, and the settings of the papers.

RECIPES lists tuples (row, command, paper, departures). `paper` holds what the paper says, or where
it is silent its released code, by the names of flags and of Config's fields; what neither says is
left out. `departures` holds what the command resolves to where that differs.
"""

RECIPES = []


def recipe(row, command, paper, **departures):
    RECIPES.append((row, command, paper, departures))


def sizes(width, heads, ffn, layers=12):
    """Return the columns d, n_A, d_F and L of Superbloom's tables."""
    return dict(width=width, heads=heads, ffn=ffn, layers=layers)


def size_flags(columns):
    """Return the flags of these columns."""
    return " ".join(f"--{name} {value}" for name, value in columns.items())


# HashFormers, Tables 1 to 3 and 6: sizes of §4.2, pre-training of Table 4. The baseline CANINE-C
# is downloaded, and ProFormer is not pre-trained: finetune.py --preset proformer

HASHFORMERS = dict(
    layers=12, width=768, heads=12, ffn=3072, length=512, types=1, act="gelu", dropout=0.1,
    batch=128, steps=500_000, lr=5e-5, warmup=10_000, schedule="linear", decay=0.01, beta2=0.9999,
    objective="sr", split="space", data="wikipedia+bookcorpus")
HASHFORMER = "--preset hashformer --data wikipedia+bookcorpus"
PIECES = dict(split="bpe", vocab=50_000)

recipe("HashFormers, BERT-MLM", f"{HASHFORMER} --emb lookup --objective mlm",
       HASHFORMERS | PIECES | dict(emb="lookup", objective="mlm", lr=1e-4, mask=0.15))
recipe("HashFormers, BERT-S+R", f"{HASHFORMER} --emb lookup",
       HASHFORMERS | PIECES | dict(emb="lookup"))
for name, hash_name in (("MD", "md5"), ("LSH", "lsh")):
    paper = HASHFORMERS | dict(hash=hash_name)
    for title, emb, rows, facts, departures in (
        # 50K and 1K are 50,260 and 1,038 rows by the parameters that Table 2 prints
        ("Emb (50K)", "emb", "", dict(rows=50_000), dict(rows=50_260)),
        ("Emb (1K)", "emb", " --rows 1038", dict(rows=1_000), dict(rows=1_038)),
        ("Pool", "pool", "", dict(bits=128, chunk=10), {}),
        ("Add", "add", "", dict(bits=128), {}),
        ("Proj", "proj", "", dict(bits=128), {}),
    ):
        recipe(f"HashFormers, {name} {title}",
               f"{HASHFORMER} --split space --emb {emb} --hash {hash_name}{rows}",
               paper | dict(emb=emb) | facts, **departures)
for name, hash_name in (("MD", "md5"), ("LSH", "lsh")):
    paper = HASHFORMERS | PIECES | dict(hash=hash_name)
    command = f"{HASHFORMER} --split bpe"
    recipe(f"HashFormers Table 6, {name} Emb (50K) of pieces",
           f"{command} --emb emb --hash {hash_name}",
           paper | dict(emb="emb", rows=50_000), rows=50_260)
    recipe(f"HashFormers Table 6, {name} Proj of pieces",
           f"{command} --emb proj --hash {hash_name}", paper | dict(emb="proj"))



# Superbloom: §3.2 for all of Wikipedia's 5,281,889 pages, or for the 500,000 most frequent ones.
# Warm-up and clipping are not mentioned; Adam is AdamW without decay. §4 trains on text as BERT
# does; batch, rate and steps are not given. A baseline has a row for each item

SUPERBLOOM = dict(
    mask=0.15, length=32, types=2, act="relu", order=False, steps=1_000_000, schedule="rsqrt",
    decay=0.0, batch=1024, lr=1e-4)
ITEMS = "--preset superbloom --data pages.jsonl"
BASELINE = sizes(48, 4, 1024)
SAMPLED = sizes(512, 8, 2048)

recipe("Superbloom Tables 1, 2, baseline", f"{ITEMS} --emb lookup {size_flags(BASELINE)}",
       SUPERBLOOM | BASELINE | dict(vocab=None, objective="mlm"))
recipe("Superbloom Tables 1, 2, sampled-softmax",
       f"{ITEMS} --emb lookup {size_flags(SAMPLED)} --objective sampled --samples 131072",
       SUPERBLOOM | SAMPLED | dict(vocab=None, objective="sampled", samples=131_072))
recipe("Superbloom Tables 1, 2, superbloom", ITEMS,
       SUPERBLOOM | sizes(768, 12, 3072) | dict(hashes=2, alpha=50, vocab=None))

TOP_500K = SUPERBLOOM | dict(vocab=500_000, batch=4096, lr=2e-4)
ITEMS_500K = f"{ITEMS} --vocab 500000 --batch 4096 --lr 2e-4"
for name, columns in {
    "baseline-l1": sizes(256, 1, 1024, 1),
    "baseline-l12": sizes(256, 8, 1024, 12),
}.items():
    recipe(f"Superbloom Table 3, {name}", f"{ITEMS_500K} --emb lookup {size_flags(columns)}",
           TOP_500K | columns)
for name, columns in {
    "d256l1": sizes(256, 1, 1024, 1),
    "d384l1": sizes(384, 1, 1536, 1),
    "d256l12": sizes(256, 8, 1024, 12),
}.items():
    recipe(f"Superbloom Table 3, superbloom-{name}",
           f"{ITEMS_500K} --alpha 20 {size_flags(columns)}",
           TOP_500K | columns | dict(hashes=2, alpha=20))

TEXT = dict(
    mask=0.15, length=512, types=2, act="relu", order=True, decay=0.0, schedule="rsqrt",
    vocab=1_000_000)
PHRASES = "--preset superbloom --data wikipedia --split phrases --length 512"
for name, columns in {"h64": sizes(64, 4, 256), "h256": sizes(256, 8, 1024)}.items():
    recipe(f"Superbloom Tables 4, 5, baseline-{name}",
           f"{PHRASES} --emb lookup {size_flags(columns)}", TEXT | columns)
for alpha, columns in {40: sizes(512, 8, 2048), 20: sizes(1024, 16, 4096)}.items():
    recipe(f"Superbloom Tables 4, 5, hash{alpha}-h{columns['width']}",
           f"{PHRASES} --alpha {alpha} {size_flags(columns)}",
           TEXT | columns | dict(hashes=2, alpha=alpha))

TABLE_7 = sizes(256, 8, 1024)
for alpha in (10, 20):
    for coherent, name in enumerate(("00", "01", "11")):
        recipe(f"Superbloom Table 7, hash{alpha}-{name}",
               f"{ITEMS_500K} --alpha {alpha} {size_flags(TABLE_7)} --coherent {coherent}",
               TOP_500K | TABLE_7 | dict(hashes=2, alpha=alpha, coherent=coherent))


# BERT-LSH: §2.4 and the released code. Our hyperplanes change in every training step, and not in
# an evaluation

BERT_LSH = dict(
    layers=2, width=128, heads=2, ffn=512, length=512, types=2, act="gelu", vocab=31_995,
    rows=32_000, batch=8, steps=88_245, lr=5e-5, warmup=0, schedule="linear", decay=0.0, mask=0.15,
    objective="mlm", emb="lookup", split="bpe", data="bookcorpus")
LSH = dict(attn="lsh", lsh_bands=2, lsh_buckets=256, lsh_hashes=1, lsh_fill="zero",
           lsh_pairs="upper", lsh_redraw=True)

recipe("BERT-LSH Tables 2 to 4, BERT", "--preset bert-lsh --attn full --data bookcorpus",
       BERT_LSH | dict(attn="full"))
recipe("BERT-LSH Tables 2 to 4, BERT-LSH", "--preset bert-lsh --lsh_redraw --data bookcorpus",
       BERT_LSH | LSH)


# Median is all you need, a proposal: common settings

MEDIAN = dict(layers=4, width=512, heads=4, length=512, batch=128, data="wikipedia+bookcorpus")
HASHES = dict(hashes=5, buckets=500, objective="hash-mlm")
for emb, name, facts in (
    ("lookup", "standard embeddings", dict(objective="mlm")),
    ("mean", "mean", HASHES),
    ("median", "median", HASHES),
):
    recipe(f"Median, {name}", f"--preset median --emb {emb} --data wikipedia+bookcorpus",
           MEDIAN | dict(emb=emb) | facts)
