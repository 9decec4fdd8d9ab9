"""Flags of pretrain.py: the parser, the presets' training recipes, and how flags resolve to a run's settings.

Paper map:    [HF Table 4] RECIPES   [SB §3.2] RECIPES   [HF §3.1] parser   [HF §3.2] parser
              [HF §3.3] parser   [HF §3.6] parser   [HF §4.2] parser   [BERT §3.1] parser   [SB §2.4] parser
              [SB §3.3] parser   [BL §2.1] parser   [CM] parser   [SV] parser
Out of scope: the training loop (pretrain.py), the sizes of the presets (model.PRESETS).
"""

import argparse
import os

import torch

from embeddings import EMBEDDINGS
from model import PRESETS, Config
from objectives import OBJECTIVES
from runtime import HelpFormatter, InputError, add_device_flags, at_least, blame_input
from tokenizer import FIRST_WORD_ID, HASHES, SPLITS

# How each size is trained. micro: sequences a device holds at once; lr_mlm: lr of other objectives than sr
RECIPES = {
    "tiny": dict(batch=32, micro=32, steps=10_000, lr=2e-3, warmup=300),
    "bert-lsh": dict(batch=64, micro=32, steps=20_000, lr=1e-3, warmup=1_000),
    "median": dict(batch=128, micro=32, steps=100_000, lr=2e-4, warmup=5_000),
    "hashformer": dict(batch=128, micro=16, steps=500_000, lr=5e-5, lr_mlm=1e-4, warmup=10_000,
                       beta2=0.9999),  # [HF Table 4]
    "superbloom-small": dict(batch=64, micro=16, steps=6_000, lr=2e-3, warmup=300, mask=0.40),
    "superbloom": dict(batch=1024, micro=64, steps=1_000_000, lr=1e-4, warmup=10_000, alpha=50),  # [SB §3.2]
}


def embeddings_with(*formats):
    """Return the names of embeddings with one of these code formats."""
    return tuple(name for name, cls in EMBEDDINGS.items() if cls.code_format in formats)


def objectives_with(*heads):
    """Return the names of objectives with one of these heads."""
    return tuple(name for name, cls in OBJECTIVES.items() if cls.head in heads)


def requirements():
    """Return flag -> what it requires: one of these values of one of these other flags."""
    masking, sketching = objectives_with("mlm", "hash-mlm"), objectives_with("hash-mlm")
    sketches = dict(emb=embeddings_with("digest", "sketch", "weighted"), objective=sketching)
    bloom = dict(emb=embeddings_with("digest"))
    return dict(alpha=bloom, coherent=bloom, hashes=sketches, buckets=sketches, tied=dict(objective=masking),
                weights=dict(emb=embeddings_with("weighted")), mask=dict(objective=masking),
                **{flag: dict(attn=("lsh",)) for flag in LSH})


LSH = ("lsh_bands", "lsh_buckets", "lsh_hashes", "lsh_fill", "lsh_pairs", "lsh_redraw")
# flags with the names of Config's fields
SHAPE = ("emb", "bits", "chunk", "layers", "width", "heads", "ffn", "length", "rows", "dropout", "tied",
         "hashes", "buckets", "weights", "attn", *LSH)

HASHED = ("index", "chunks", "bits")  # code formats that --hash, --bits and --features shape


def resolve(args, world):
    """Fill in what the flags leave open, from the preset and from each other, and check them.

    Returns:
        Config, as far as it is known before the corpus is.
    """
    recipe, shape = RECIPES[args.preset], dict(PRESETS[args.preset])
    is_sets = (args.split or ("items" if args.emb == "bloom" or "order" in shape else "")) == "items"
    args.emb = args.emb or shape.get("emb", "bloom" if is_sets else "proj")
    kind = EMBEDDINGS[args.emb].code_format
    args.split = "items" if is_sets else args.split or ("bpe" if kind == "row" else "regex")
    args.data = args.data or ("python-names" if is_sets else "python")
    args.attn = args.attn or shape.get("attn", "full")
    if args.objective is None:  # the preset's, or where that does not fit the embedding, what does
        predicts_words = is_sets or shape.get("head", "sr") != "sr" or kind in ("digest", "sketch")
        args.objective = "sr" if not predicts_words else "mlm" if kind == "row" else "hash-mlm"
    check_flags(args, world)
    defaults = {name: recipe[name] for name in ("batch", "micro", "steps")}
    lr = recipe["lr"] if OBJECTIVES[args.objective].head == "sr" else recipe.get("lr_mlm", recipe["lr"])
    defaults |= dict(lr=lr, ffn=args.width and 4 * args.width)
    if not is_sets:  # of sets all items
        size = shape["rows"] - FIRST_WORD_ID if {"emb", "rows"} <= shape.keys() else 50_000
        defaults["vocab"] = 1_000_000 if args.split == "phrases" else size
    if kind == "digest":
        defaults["alpha"] = recipe.get("alpha", 25)
    if args.objective in requirements()["mask"]["objective"]:
        defaults["mask"] = recipe.get("mask", 0.15)
    for name, value in defaults.items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    args.warmup = min(recipe["warmup"], args.steps // 10) if args.warmup is None else args.warmup
    args.beta2 = recipe.get("beta2", 0.999)
    if is_sets:
        shape["length"] = min(shape["length"], 32)
        shape |= dict(lsh_pairs="all") if args.attn == "lsh" else {}  # a set has no upper triangle
    shape |= {flag: getattr(args, flag) for flag in SHAPE if getattr(args, flag) is not None}
    with blame_input():
        config = Config(**shape | dict(order=not is_sets, head=OBJECTIVES[args.objective].head))
        with torch.device("meta"):
            EMBEDDINGS[args.emb].from_config(config)  # has limits of its own
    if kind in HASHED and HASHES[args.hash].max_outputs:
        # rotations of a vector of F features give F hyperplanes: it must be as long as there are bits or rows
        args.features = max(args.features, config.rows if kind == "index" else config.bits)
        most, flag = HASHES[args.hash].max_outputs, "rows" if kind == "index" else "bits"
        if args.features > most:
            raise InputError(f"--{flag} or --features: expected at most {most:,}, got {args.features:,}.")
    args.out = args.out or name_output(args, kind)
    return config


def check_flags(args, world):
    """Raise InputError where flags contradict each other, or the ranks cannot share a batch."""
    for flag, alternatives in requirements().items():
        if getattr(args, flag) is not None and all(getattr(args, name) not in values
                                                   for name, values in alternatives.items()):
            required = " or ".join(f"--{name} {', '.join(values)}" for name, values in alternatives.items())
            raise InputError(f"--{flag} requires {required}.")
    kind, predicts_hashes = EMBEDDINGS[args.emb].code_format, args.objective in objectives_with("hash-mlm")
    if args.buckets and (kind == "digest" or kind == "weighted" and not predicts_hashes):
        raise InputError(f"--buckets requires another --emb than {args.emb}.")
    if args.coherent and args.split != "items":
        raise InputError("--coherent requires --split items.")
    if args.coherent and args.coherent > (args.hashes or 2):
        raise InputError(f"--coherent: expected at most the number of --hashes, got {args.coherent}.")
    if args.mask is not None and not 0 < args.mask < 1:
        raise InputError(f"--mask: expected more than 0 and less than 1, got {args.mask}.")
    uses_sketch = kind in ("sketch", "weighted") or predicts_hashes and kind != "digest"
    if args.key and not uses_sketch and not (kind in HASHED and "key" in HASHES[args.hash].options.values()):
        raise InputError("--key requires --hash md5, or an embedding or objective with sketch hashes.")
    batch = args.batch or RECIPES[args.preset]["batch"]
    if batch % world:
        raise InputError(f"--batch: expected a multiple of {world} ranks, got {batch}. "
                         f"Use {max(batch // world, 1) * world}.")


def name_output(args, kind):
    """Return the default --out: out/proj-lsh, out/emb-md5-bpe, out/lookup-bpe-mlm."""
    default = "hash-mlm" if kind in ("digest", "sketch") else "sr"
    tied = {None: "", True: "tied", False: "untied"}[args.tied]
    parts = [args.emb, kind in HASHED and args.hash, args.split != "regex" and args.split,
             args.objective != default and args.objective, tied, args.attn == "lsh" and "lsh-attention"]
    return os.path.join("out", "-".join(filter(None, parts)))


def summarize(cls):
    """Return what a docstring of the form "Name: what it does. More." says it does."""
    return " ".join((cls.__doc__ or "").partition(": ")[2].partition(".")[0].split())


def parser(description):
    """Return the parser of all flags, grouped by idea."""
    p = argparse.ArgumentParser(formatter_class=HelpFormatter, description=description,
                                usage="python pretrain.py [flags]        (--help explains them)")

    def group(title, text):
        return p.add_argument_group(title, text).add_argument

    count = dict(type=at_least(1), metavar="n")
    flag = group("words", "Words become token IDs as they are; there is no vocabulary. [HF §3.1]")
    flag("--data", metavar="A+B", help=(
        "python: docstrings of the installed Python; python-names: the names its functions use; wikipedia, "
        "bookcorpus or any hub ID; a file or folder of .txt .tsv .csv .jsonl .json .parquet, .gz too. A row "
        "is a document, of a .txt a line; with --split items an item set: a list of names, text with names "
        "between tabs or spaces, or a page and one of its items (default: python, of sets python-names)"))
    flag("--split", choices=SPLITS, help=(
        "runs of letters or punctuation; white space; BPE pieces; frequent words and pairs, and pieces for "
        "the rest; item sets without order (default: regex, with --emb lookup bpe, with --emb bloom items)"))
    flag("--field", metavar="NAME", help=(
        "column of the text, of the item lists, or two columns PAGE,ITEM (default: text, or the only one)"))
    flag("--vocab", **count | dict(metavar="V"), help=(
        "vocabulary size: BPE pieces, phrases, words of a lookup, items (default: 50,000, phrases 1,000,000, "
        "all items; or the preset's)"))
    flag("--cache", default="cache", metavar="DIR", help="folder of prepared corpora, which fit every hash")

    flag = group("hashes", "MD5 gives words random bits, LSH similar words similar bits. [HF §3.2] [HF §3.3]")
    flag("--hash", choices=tuple(HASHES), default="lsh", help="hash of emb, pool, add, proj; lsh: of n-grams")
    flag("--bits", type=at_least(8), default=128, metavar="T", help="bits of a word's hash (pool, add, proj)")
    flag("--chunk", default=10, **count, help="bits of a chunk (pool); its codebook has 2^k rows")
    flag("--features", default=50_000, **count, help="n-grams that count, the most frequent ones (lsh)")
    flag("--key", help="secret key of MD5 (default: plain MD5)")
    flag("--hash_seed", type=at_least(0), default=0, metavar="S", help="seed of LSH, Bloom maps and sketches")

    sizes = "; ".join("{} {layers} layers of {width}".format(name, **PRESETS[name]) for name in RECIPES)
    flag = group("model", "A post-LN transformer over the embedded words. [HF §4.2]")
    methods = "; ".join(f"{name}: {summarize(cls)}" for name, cls in EMBEDDINGS.items())
    flag("--emb", choices=tuple(EMBEDDINGS), help=f"{methods} (default: proj, or the preset's)")
    flag("--preset", choices=tuple(RECIPES), default="tiny", help=f"size and training settings: {sizes}")
    for name, text in dict(layers="encoder layers; 0 sees one word at a time", width="hidden size d",
                           heads="attention heads", ffn="feed-forward size; with --width 4 d",
                           length="positions, [CLS] included", rows="hash buckets of emb").items():
        minimum = dict(layers=0, length=2).get(name, 1)
        flag(f"--{name}", metavar="n", type=at_least(minimum), help=text + " (default: the preset's)")
    flag("--dropout", type=float, metavar="p", help="also of attention weights (default: 0.1, tiny 0)")
    flag("--tied", action=argparse.BooleanOptionalAction, help=(
        "predict masked words by the embedding's rows (lookup, bloom, mean, median), not by the head's own "
        "table, which learns sooner and takes as many parameters again (default: lookup, bloom)"))

    flag = group("Bloom digests (--emb bloom)", "An item is m hash tokens, alpha items share one. [SB §3.2]")
    flag("--alpha", **count, help="items that share a token, at most about √N (default: 25, superbloom 50)")
    flag("--hashes", **count, help="m, tokens of an item (default: 2); k, hashes of a sketch (default: 5)")
    flag("--coherent", type=at_least(0), metavar="n",
         help="how many of the m maps put items of the same pages together (default: 0)")

    flag = group("count-median sketch (--emb mean, median, weighted; --objective hash-mlm)",
                 "A word is the median or mean of one row of each of k blocks [CM], or a weighted sum. [SV]")
    flag("--buckets", **count, help="rows, or classes, of a hash function (default: 500)")
    flag("--weights", **count, help="rows of the importance table; requires --emb weighted (default: 50,000)")

    flag = group("attention", "lsh: only pairs that collide under SimHash, computed exactly. [BL §2.1]")
    flag("--attn", choices=("full", "lsh"), help="(default: full, or the preset's)")
    for name, text in dict(lsh_bands="hyperplanes of a hash; more give fewer collisions (default: 8)",
                           lsh_buckets="buckets of a hash function (default: 256)",
                           lsh_hashes="hash functions; a pair collides if one agrees (default: 1)").items():
        flag(f"--{name}", **count, help=text + "; requires --attn lsh")
    flag("--lsh_fill", choices=("zero", "mask"), help=(
        "weight of other pairs: exp(0) as in the paper, or none, but each position attends to itself "
        "(default: zero)"))
    flag("--lsh_pairs", choices=("upper", "all"), help=(
        "upper: (i, j) and (j, i) share one score, as in the released code; all: one each (default: upper, "
        "of item sets all)"))
    flag("--lsh_redraw", action=argparse.BooleanOptionalAction, help="new hyperplanes in every training step")

    flag = group("objective", (
        "sr: which words were shuffled, which replaced. [HF §3.6] mlm: masked words of a vocabulary.\n"
        "[BERT §3.1] sampled: mlm against sampled rows. [SB §3.3] hash-mlm: masked hashes. [SB §2.4] [CM]"))
    flag("--objective", choices=tuple(OBJECTIVES), help=(
        "mlm and sampled require --emb lookup, hash-mlm any other (default: sr; hash-mlm or mlm for mean, "
        "median, bloom, item sets and presets that predict words)"))
    flag("--mask", type=float, metavar="p", help="share masked (default: 0.15, superbloom-small 0.40)")

    flag = group("training", "AdamW with linear warm-up and decay. [HF Table 4]")
    for name, text in dict(batch="sequences per step, all ranks", micro="sequences a device holds at once",
                           steps="optimizer steps").items():
        flag(f"--{name}", **count, help=text + " (default: the preset's)")
    flag("--lr", type=at_least(0, float), metavar="x", help="peak learning rate (default: the preset's)")
    flag("--warmup", type=at_least(0), metavar="n", help="steps to the peak (default: the preset's)")
    flag("--decay", type=at_least(0, float), default=0.01, metavar="w", help="weight decay")
    flag("--clip", type=at_least(0, float), default=1.0, metavar="g", help="largest gradient norm")
    flag("--seed", type=at_least(0), default=0, metavar="S", help="seed of weights, batches, noise, dropout")

    g = p.add_argument_group("device and files", "SIGTERM and Ctrl-C save; the same command resumes exactly.")
    add_device_flags(g)
    flag = g.add_argument
    flag("--out", metavar="DIR", help="folder of ckpt.pt and log.jsonl (default: out/EMB-HASH)")
    flag("--eval_every", default=1_000, **count, help="steps between evaluations")
    flag("--save_every", default=1_000, **count, help="steps between checkpoints")
    return p
