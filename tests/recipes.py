"""How pretrain.py trains each row of the papers' tables: commands, and the hyper-parameters of the papers.

RECIPES lists tuples (row, command, paper, departures). `paper` holds what the paper says, or where it is
silent its released code, by the names of flags and of Config's fields; what neither says is left out.
`departures` holds what the command resolves to where that differs. tests/test_settings.py resolves them all.
"""

# HashFormers, Tables 1 to 3: sizes of §4.2, pre-training of Table 4. The baseline CANINE-C is downloaded,
# and ProFormer is not pre-trained: finetune.py --preset proformer.
HASHFORMERS = dict(layers=12, width=768, heads=12, ffn=3072, length=512, types=1, act="gelu", dropout=0.1,
                   batch=128, steps=500_000, lr=5e-5, warmup=10_000, schedule="linear", optimizer="adamw",
                   decay=0.01, beta2=0.9999, objective="sr", split="space", data="wikipedia+bookcorpus")
BASE = "--preset hashformer --data wikipedia+bookcorpus"
LOOKUP = dict(emb="lookup", split="bpe", vocab=50_000)

# Superbloom: §3.2 for all of Wikipedia's 5,281,889 pages or for the 500,000 most frequent ones. Warm-up,
# weight decay and clipping are not mentioned. §4 trains on text as BERT does; batch, rate and steps are not
# given.
SUPERBLOOM = dict(hashes=2, mask=0.15, length=32, types=2, act="relu", order=False, steps=1_000_000,
                  schedule="rsqrt", optimizer="adam", batch=1024, lr=1e-4)
TOP_500K = SUPERBLOOM | dict(vocab=500_000, batch=4096, lr=2e-4)
TEXT = dict(mask=0.15, length=512, types=2, act="relu", order=True, optimizer="adam", schedule="rsqrt", vocab=1_000_000)
ITEMS = "--preset superbloom --data pages.jsonl"
ITEMS_500K = ITEMS + " --vocab 500000 --batch 4096 --lr 2e-4"
PHRASES = "--preset superbloom --data wikipedia --split phrases --length 512"

# BERT-LSH: §2.4 and the released code. Our planes change in every training step, and not in an evaluation.
BERT_LSH = dict(layers=2, width=128, heads=2, ffn=512, length=512, types=2, act="gelu", vocab=31_995,
                rows=32_000, batch=8, steps=88_245, lr=5e-5, warmup=0, schedule="linear", optimizer="adamw",
                mask=0.15, objective="mlm", emb="lookup", split="bpe", data="bookcorpus")
LSH = dict(attn="lsh", lsh_bands=2, lsh_buckets=256, lsh_hashes=1, lsh_fill="zero", lsh_pairs="upper", lsh_redraw=True)

# Median is all you need, a proposal: common settings
MEDIAN = dict(layers=4, width=512, heads=4, length=512, batch=128, data="wikipedia+bookcorpus")


def sizes(width, heads, ffn, layers=12, **more):
    """Return the columns d, n_A, d_F and L of Superbloom's tables, and others."""
    return dict(width=width, heads=heads, ffn=ffn, layers=layers, **more)


def flags(width, heads, ffn, layers=12, alpha=None):
    """Return the flags of these columns; alpha None is the baseline with a row for each item."""
    kind = "--emb lookup" if alpha is None else f"--alpha {alpha}"
    return f"{kind} --width {width} --heads {heads} --ffn {ffn} --layers {layers}"


RECIPES = [
    ("HashFormers, BERT-MLM", f"{BASE} --emb lookup --objective mlm",
     HASHFORMERS | LOOKUP | dict(objective="mlm", lr=1e-4, mask=0.15), {}),
    ("HashFormers, BERT-S+R", f"{BASE} --emb lookup", HASHFORMERS | LOOKUP, {}),
    *((f"HashFormers, {name} {title}", f"{BASE} --split space --emb {emb} --hash {hash}{rows}",
       HASHFORMERS | dict(emb=emb, hash=hash) | facts, departures)
      for name, hash in (("MD", "md5"), ("LSH", "lsh")) for title, emb, rows, facts, departures in (
          # 50K and 1K are 50,260 and 1,038 rows by the parameters that Table 2 prints
          ("Emb (50K)", "emb", "", dict(rows=50_000), dict(rows=50_260)),
          ("Emb (1K)", "emb", " --rows 1038", dict(rows=1_000), dict(rows=1_038)),
          ("Pool", "pool", "", dict(bits=128, chunk=10), {}), ("Add", "add", "", dict(bits=128), {}),
          ("Proj", "proj", "", dict(bits=128), {}))),
    *((f"HashFormers Table 6, {name} {title} of pieces", f"{BASE} --split bpe --emb {emb} --hash {hash}",
       HASHFORMERS | dict(emb=emb, hash=hash, split="bpe", vocab=50_000) | facts, departures)
      for name, hash in (("MD", "md5"), ("LSH", "lsh")) for title, emb, facts, departures in (
          ("Emb (50K)", "emb", dict(rows=50_000), dict(rows=50_260)), ("Proj", "proj", {}, {}))),
    ("Superbloom Tables 1, 2, baseline", f"{ITEMS} {flags(48, 4, 1024)}",
     SUPERBLOOM | sizes(48, 4, 1024, hashes=None, vocab=None, objective="mlm"), {}),
    ("Superbloom Tables 1, 2, sampled-softmax",
     f"{ITEMS} {flags(512, 8, 2048)} --objective sampled --samples 131072",
     SUPERBLOOM | sizes(512, 8, 2048, hashes=None, vocab=None, objective="sampled", samples=131_072), {}),
    ("Superbloom Tables 1, 2, superbloom", ITEMS,
     SUPERBLOOM | sizes(768, 12, 3072, alpha=50, vocab=None), {}),
    *((f"Superbloom Table 3, {name}", f"{ITEMS_500K} {flags(*columns, alpha)}",
       TOP_500K | sizes(*columns, alpha=alpha) | dict(hashes=alpha and 2), {}) for name, alpha, *columns in (
          ("baseline-l1", None, 256, 1, 1024, 1), ("baseline-l12", None, 256, 8, 1024, 12),
          ("superbloom-d256l1", 20, 256, 1, 1024, 1), ("superbloom-d384l1", 20, 384, 1, 1536, 1),
          ("superbloom-d256l12", 20, 256, 8, 1024, 12))),
    *((f"Superbloom Tables 4, 5, {name}", f"{PHRASES} {flags(*columns, alpha=alpha)}",
       TEXT | sizes(*columns, alpha=alpha) | dict(hashes=alpha and 2), {}) for name, alpha, *columns in (
          ("baseline-h64", None, 64, 4, 256), ("baseline-h256", None, 256, 8, 1024),
          ("hash40-h512", 40, 512, 8, 2048), ("hash20-h1024", 20, 1024, 16, 4096))),
    *((f"Superbloom Table 7, hash{alpha}-{name}",
       f"{ITEMS_500K} {flags(256, 8, 1024, alpha=alpha)} --coherent {n}",
       TOP_500K | sizes(256, 8, 1024, alpha=alpha, coherent=n), {})
      for alpha in (10, 20) for n, name in enumerate(("00", "01", "11"))),
    ("BERT-LSH Tables 2 to 4, BERT", "--preset bert-lsh --attn full --data bookcorpus",
     BERT_LSH | dict(attn="full"), {}),
    ("BERT-LSH Tables 2 to 4, BERT-LSH", "--preset bert-lsh --lsh_redraw --data bookcorpus",
     BERT_LSH | LSH, {}),
    *((f"Median, {name}", f"--preset median --emb {emb} --data wikipedia+bookcorpus",
       MEDIAN | dict(emb=emb) | facts, {})
      for name, emb, facts in (("standard embeddings", "lookup", dict(objective="mlm")),
                               ("mean", "mean", dict(hashes=5, buckets=500, objective="hash-mlm")),
                               ("median", "median", dict(hashes=5, buckets=500, objective="hash-mlm")))),
]
