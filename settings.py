"""Flags of pretrain.py: the parser, the presets' training recipes, and how flags resolve to a run's settings.

Paper map:    [HF Table 4] RECIPES   [SB §3.2] RECIPES   [BL §2.4] RECIPES   [HF §3.1] parser
              [HF §3.2] parser   [HF §3.3] parser   [HF §4.2] parser   [SB §3.2] parser   [BL §2.1] parser
              [CM] parser   [SV] parser   [HF §3.6] parser   [BERT §3.1] parser   [SB §3.3] parser
              [SB §2.4] parser   [HF Table 4] parser
Out of scope: the training loop (pretrain.py), the sizes of the presets (model.PRESETS).
"""

import argparse
import dataclasses
import os

import torch

from embeddings import EMBEDDINGS
from model import CHOICES, PRESETS, Config, Model, load_config
from objectives import OBJECTIVES, SampledWords
from runtime import HelpFormatter, InputError, add_device_flags, at_least, blame_input
from tokenizer import FIRST_WORD_ID, HASHES, SPLITS, SUBWORDS

SIZES = PRESETS | {"bert-lsh-fast": PRESETS["bert-lsh"]}
# How each size is trained. micro: sequences a device holds at once; lr_mlm: lr of other objectives than sr
RECIPES = {
    "tiny": dict(batch=32, micro=32, steps=10_000, lr=2e-3, warmup=300),
    "bert-lsh": dict(batch=8, micro=8, steps=88_245, lr=5e-5, warmup=0),  # as its authors train it [BL §2.4]
    "bert-lsh-fast": dict(batch=64, micro=32, steps=20_000, lr=1e-3, warmup=1_000),  # as we train it
    "median": dict(batch=128, micro=32, steps=100_000, lr=2e-4, warmup=5_000),
    # [HF Table 4]
    "hashformer": dict(batch=128, micro=16, steps=500_000, lr=5e-5, lr_mlm=1e-4, warmup=10_000, beta2=0.9999),
    "superbloom-small": dict(batch=64, micro=16, steps=6_000, lr=2e-3, warmup=300, mask=0.40),
    "superbloom": dict(batch=1024, micro=64, steps=1_000_000, lr=1e-4, warmup=10_000, alpha=50,
                       optimizer="adam", schedule="rsqrt"),  # [SB §3.2]
}
COMMON = dict(alpha=25, mask=0.15, samples=8_192, decay=0.01, hash="lsh")  # of recipes that do not say

LSH = ("lsh_bands", "lsh_buckets", "lsh_hashes", "lsh_fill", "lsh_pairs", "lsh_redraw")
# flags with the names of Config's fields
SHAPE = (*"emb bits chunk layers width heads ffn act length types rows dropout tied hashes buckets".split(),
         "weights", "attn", *LSH)
# flags of words and objective: --init_from takes these and SHAPE from its checkpoint
WORDS = ("split", "vocab", "hash", "features", "key", "hash_seed", "alpha", "coherent", "objective")
HASHED = ("index", "chunks", "bits")  # code formats that --hash shapes


def names_with(table, attribute, *values):
    """Return the names of embeddings or objectives whose attribute has one of these values."""
    return tuple(name for name, cls in table.items() if getattr(cls, attribute) in values)


def requirements():
    """Return flag -> what it requires: one of these values of one of these other flags."""
    def reads(*formats):
        return dict(emb=names_with(EMBEDDINGS, "code_format", *formats))
    masking = dict(objective=names_with(OBJECTIVES, "head", "mlm", "hash-mlm"))
    sketch = dict(reads("digest", "sketch", "weighted"), objective=names_with(OBJECTIVES, "head", "hash-mlm"))
    fits, seeded = (dict(hash=[name for name, cls in HASHES.items() if flag in cls.options.values()])
                    for flag in ("features", "hash_seed"))
    return dict(
        vocab=reads("row", "digest") | dict(split=[*SUBWORDS]), alpha=reads("digest"),
        coherent=reads("digest"), hashes=sketch, buckets=sketch, tied=masking, weights=reads("weighted"),
        rows=reads("index", "weighted"), chunk=reads("chunks"), bits=reads("bits", "chunks"),
        hash=reads(*HASHED), features=fits, hash_seed=seeded | sketch, mask=masking,
        samples=dict(objective=[x for x, cls in OBJECTIVES.items() if issubclass(cls, SampledWords)]),
        decay=dict(optimizer=["adamw"]), **dict.fromkeys(LSH, dict(attn=["lsh"])))


def fill(args, **defaults):
    """Set the flags that the command line leaves open."""
    vars(args).update({name: value for name, value in defaults.items() if getattr(args, name) is None})


def adopt(args, start):
    """Take words and sizes from the checkpoint of --init_from; return the fields of its Config."""
    with blame_input(f"--init_from {args.init_from}"):
        shape = dataclasses.asdict(load_config(start))
    saved = start.get("run", {}) | shape
    choices = dict(preset=RECIPES, hash=HASHES, split=SPLITS, objective=OBJECTIVES)
    if not {*WORDS} <= saved.keys() or any(saved.get(key) not in [*known] for key, known in choices.items()):
        raise InputError(f"--init_from {args.init_from}: expected a checkpoint of pretrain.py, got another.")
    for name in sorted({*SHAPE, *WORDS} - {"dropout"}):  # which has no weights
        if getattr(args, name) not in (None, saved[name]):
            raise InputError(f"--{name}: expected {saved[name]}, as in --init_from {args.init_from}, got "
                             f"{getattr(args, name)}. Remove one of the two flags.")
        setattr(args, name, saved[name] if name in WORDS else None)
    fill(args, preset=saved["preset"])
    return shape


def resolve(args, world, start=None):
    """Fill in what the flags leave open, from the preset and from each other, and check them.

    Args: args Namespace of parser(); world int, ranks; start dict, the checkpoint of --init_from, or None.
    Returns: Config, as far as it is known before the corpus is.
    """
    shape = adopt(args, start) if start else dict(SIZES[args.preset or "tiny"])
    fill(args, preset="tiny")
    recipe = COMMON | RECIPES[args.preset]
    is_sets = (args.split or ("items" if args.emb == "bloom" or "order" in shape else "")) == "items"
    fill(args, emb=shape.get("emb", "bloom" if is_sets else "proj"), attn=shape.get("attn", "full"))
    kind = EMBEDDINGS[args.emb].code_format
    # the preset's objective, or where that does not fit the embedding, what does
    predicts_words = is_sets or shape.get("head", "sr") != "sr" or kind in ("digest", "sketch")
    masking, split = ("mlm", "bpe") if kind == "row" else ("hash-mlm", "regex")
    fill(args, split="items" if is_sets else split, data="python-names" if is_sets else "python",
         objective=masking if predicts_words else "sr",
         optimizer=recipe.get("optimizer", "adamw"), schedule=recipe.get("schedule", "linear"),
         **{name: recipe[name] for name in ("batch", "micro", "steps")})
    fill(args, warmup=min(recipe["warmup"], args.steps // 10))
    for flag, others in requirements().items():
        if any(getattr(args, other) in values for other, values in others.items()):
            fill(args, **{flag: recipe.get(flag)})
        elif getattr(args, flag) is not None and not (start and flag in WORDS):
            required = " or ".join(f"--{other} {', '.join(values)}" for other, values in others.items())
            raise InputError(f"--{flag} requires {required}.")
    check_flags(args, world)
    lr = recipe["lr"] if OBJECTIVES[args.objective].head == "sr" else recipe.get("lr_mlm", recipe["lr"])
    # a preset with an embedding of its own gives its words and special tokens as rows
    size = shape["rows"] - FIRST_WORD_ID if {"emb", "rows"} <= shape.keys() else 50_000
    fill(args, lr=lr, ffn=args.width and 4 * args.width, decay=0.0, hash=recipe["hash"], hash_seed=0,
         features=50_000, vocab=dict(items=None, phrases=1_000_000).get(args.split, size))  # None: all items
    args.beta2 = recipe.get("beta2", 0.999)
    if is_sets and not start:
        fill(args, length=min(shape["length"], 32))
    shape |= {flag: getattr(args, flag) for flag in SHAPE if getattr(args, flag) is not None}
    with blame_input():
        config = Config(**shape | dict(order=not is_sets, head=OBJECTIVES[args.objective].head))
        require_weights(config)
    if kind in HASHED and "features" in HASHES[args.hash].options.values():
        # rotations of a vector of F features give F hyperplanes: it must be as long as there are bits or rows
        args.features = max(args.features, config.rows if kind == "index" else config.bits)
    args.out = args.out or name_output(args, kind)
    return config


def require_weights(config):
    """Raise InputError if weights, gradients and Adam's moments exceed the memory, if it is known."""
    with torch.device("meta"):
        models = [Model(dataclasses.replace(config, layers=n)) for n in (0, 1)]
    rest, more = (sum(tensor.numel() for tensor in model.state_dict().values()) for model in models)
    needed = 16 * (rest + config.layers * (more - rest))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else needed
    if needed > memory:
        raise InputError("--width, --layers, --vocab and other sizes: expected at most "
                         f"{memory / 1e9:,.1f} GB, got {needed / 1e9:,.1f} GB.")


def check_flags(args, world):
    """Raise InputError where flags contradict each other, or the ranks cannot share a batch."""
    kind, predicts_hashes = EMBEDDINGS[args.emb].code_format, OBJECTIVES[args.objective].head == "hash-mlm"
    if args.buckets and (kind == "digest" or kind == "weighted" and not predicts_hashes):
        raise InputError(f"--buckets requires another --emb than {args.emb}.")
    if args.coherent and (args.split != "items" or args.coherent > (args.hashes or 2)):
        raise InputError(f"--coherent requires --split items and at most --hashes, got {args.coherent}.")
    if args.mask is not None and not 0 < args.mask < 1:
        raise InputError(f"--mask: expected more than 0 and less than 1, got {args.mask}.")
    if args.warmup > args.steps:
        raise InputError(f"--warmup: expected at most {args.steps:,} --steps, got {args.warmup:,}.")
    uses_sketch = kind in ("sketch", "weighted") or predicts_hashes and kind != "digest"
    if args.key and not uses_sketch and not (kind in HASHED and "key" in HASHES[args.hash].options.values()):
        raise InputError("--key requires --hash md5, or an embedding or objective with sketch hashes.")
    if args.batch % world:
        raise InputError(f"--batch: expected a multiple of {world} ranks, got {args.batch}. "
                         f"Use {max(args.batch // world, 1) * world}.")


def name_output(args, kind):
    """Return the default --out: out/proj-lsh, out/emb-md5-bpe, out/lookup-bpe-mlm."""
    default = "hash-mlm" if kind in ("digest", "sketch") else "sr"
    parts = [args.emb, kind in HASHED and args.hash, args.split != "regex" and args.split,
             args.objective != default and args.objective, {True: "tied", False: "untied"}.get(args.tied),
             args.attn == "lsh" and "lsh-attention", args.init_from and "continued"]
    return os.path.join("out", "-".join(filter(None, parts)))


def parser(description):
    """Return the parser of all flags, grouped by idea."""
    p = argparse.ArgumentParser(formatter_class=HelpFormatter, description=description,
                                usage="python pretrain.py [flags]        (--help explains them)")

    def group(title, text):
        return p.add_argument_group(title, text).add_argument

    count, size = (dict(type=at_least(1, maximum=most), metavar="n") for most in (None, 1 << 20))
    flag = group("words", "Every distinct word gets an ID, however many there are. [HF §3.1]")
    flag("--data", metavar="A+B", help="python: docstrings of the installed Python; python-names: names its "
         "functions use; wikipedia, bookcorpus or any hub ID; a file or folder of .txt .tsv .csv .jsonl "
         ".json .parquet, .gz too. A row is a document, of .txt a line; with --split items a set: a list, "
         "text with names between tabs or spaces, or page and item (default: python, of sets python-names)")
    flag("--split", choices=SPLITS, help="runs of letters or punctuation; white space; BPE pieces; frequent "
         "words and pairs, and pieces for the rest; item sets (default: regex, of lookup bpe, bloom items)")
    flag("--field", metavar="NAME", help="column of text or lists; of sets also PAGE,ITEM (default: text)")
    flag("--vocab", type=at_least(1, maximum=10_000_000), metavar="V", help=(
        "BPE pieces, phrases, words of a lookup or items (default: 50,000, 1,000,000, the preset's, all)"))
    flag("--cache", default="cache", metavar="DIR", help="folder of prepared corpora, which fit every hash")

    flag = group("hashes", "MD5 gives words random bits, LSH similar words similar bits. [HF §3.2] [HF §3.3]")
    flag("--hash", choices=tuple(HASHES), help=(
        f"hash of {', '.join(names_with(EMBEDDINGS, 'code_format', *HASHED))}; lsh: of n-grams "
        f"(default: {COMMON['hash']})"))
    flag("--bits", type=at_least(8, int, 1 << 16), metavar="T", help=f"of each hash (default: {Config.bits})")
    flag("--chunk", **count, help=f"bits of a chunk (pool), of 2^k rows (default: {Config.chunk})")
    flag("--features", **count, help="frequent n-grams (lsh), raised to --bits or --rows (default: 50,000)")
    flag("--key", help="secret key of MD5 (default: plain MD5)")
    flag("--hash_seed", type=at_least(0), metavar="S", help="seed of LSH, Bloom maps, sketches (default: 0)")

    flag = group("model", "A post-LN transformer over the embedded words. [HF §4.2]")
    methods = {}  # the first sentence of each class's docstring, after its name
    for emb, cls in EMBEDDINGS.items():
        methods.setdefault((cls.__doc__ or "").partition(": ")[2].partition(".")[0], []).append(emb)
    methods = "; ".join(f"{', '.join(names)}: {idea}" for idea, names in methods.items())
    sizes = "; ".join("{} {layers} layers of {width}, {steps:,} steps of {batch}".format(
        name, **SIZES[name] | RECIPES[name]) for name in RECIPES)
    flag("--emb", choices=tuple(EMBEDDINGS), help=f"{methods} (default: proj, or the preset's)")
    flag("--preset", choices=tuple(RECIPES), help=f"size and training settings: {sizes} (default: tiny)")
    for name, text in dict(layers="encoder layers; 0 sees one word at a time", width="hidden size d",
                           heads="attention heads", ffn="feed-forward size; with --width 4 d",
                           length="positions, [CLS] included", types="token type embeddings").items():
        number = at_least(dict(layers=0, length=2).get(name, 1), maximum=1 << 20)
        flag(f"--{name}", type=number, metavar="n", help=f"{text} (default: the preset's)")
    flag("--rows", **count, help="hash buckets of emb and weighted (default: the preset's)")
    flag("--act", choices=CHOICES["act"], help="feed-forward activation (default: the preset's)")
    flag("--dropout", type=float, metavar="p", help=f"also of attention (default: {Config.dropout}, tiny 0)")
    flag("--tied", action=argparse.BooleanOptionalAction, help="predict masked words by the embedding's rows "
         "and not the head's, which learn sooner and take as many parameters again (default: lookup, bloom)")

    flag = group("Bloom digests (--emb bloom)", "An item is m hash tokens, alpha items share one. [SB §3.2]")
    flag("--alpha", **count, help=(
        f"items that share a token, at most about √N (default: {COMMON['alpha']}, superbloom 50)"))
    flag("--hashes", type=at_least(1, maximum=99), metavar="m", help="of an item (default: 2), a sketch (5)")
    flag("--coherent", type=at_least(0), metavar="n", help="maps with items of a page together (default: 0)")

    flag = group("count-median sketch (--emb mean, median, weighted; --objective hash-mlm)",
                 "A word is the median or mean of one row of each of k blocks [CM], or a weighted sum. [SV]")
    flag("--buckets", **count, help=f"rows, or classes, of a hash function (default: {Config.buckets})")
    flag("--weights", **count, help=(
        f"rows of the importance table of weighted (default: {Config.weights:,})"))

    flag = group("attention (all but --attn require --attn lsh)",
                 "lsh: only pairs that collide under SimHash, computed exactly. [BL §2.1]")
    flag("--attn", choices=("full", "lsh"), help="(default: full, or the preset's)")
    flag("--lsh_bands", **size, help=(
        f"hyperplanes of a hash; more: fewer collisions (default: {Config.lsh_bands}, bert-lsh 2)"))
    flag("--lsh_buckets", **size, help=f"buckets of a hash function (default: {Config.lsh_buckets})")
    flag("--lsh_hashes", **size, help=(
        f"hash functions; a pair collides if one agrees (default: {Config.lsh_hashes})"))
    flag("--lsh_fill", choices=("zero", "mask"), help="other pairs weigh exp(0), or nothing (default: zero)")
    flag("--lsh_pairs", choices=("upper", "all"), help=(
        "all: each pair has its own score; upper: (i, j) and (j, i) share one, as in the released code "
        "(default: all, bert-lsh upper)"))
    flag("--lsh_redraw", action=argparse.BooleanOptionalAction, help="new hyperplanes in every training step")

    flag = group("objective", "sr: shuffled and random words. [HF §3.6] mlm: masked words. [BERT §3.1]\n"
                 "sampled: mlm over sampled rows. [SB §3.3] hash-mlm: hashes of masked words. [SB §2.4] [CM]")
    flag("--objective", choices=tuple(OBJECTIVES), help="mlm and sampled require --emb lookup, hash-mlm any "
         "other (default: sr; hash-mlm or mlm for mean, median, bloom, sets, presets that predict words)")
    flag("--mask", type=float, metavar="p", help=(
        f"share masked (default: {COMMON['mask']}, superbloom-small 0.40)"))
    flag("--samples", **size, help=f"rows of the sampled softmax (default: {COMMON['samples']:,})")

    flag = group("training", "Warm-up, then decay: linear [HF Table 4] or inverse square root. [SB §3.2]")
    flag("--init_from", metavar="DIR", help="start from weights of another run, whose words and sizes stay")
    flag("--batch", **count, help="sequences per step, all ranks (default: the preset's)")
    flag("--micro", **count, help="sequences a device holds at once (default: the preset's)")
    flag("--steps", **count, help="optimizer steps (default: the preset's)")
    flag("--lr", type=at_least(0, float), metavar="x", help="peak learning rate (default: the preset's)")
    flag("--warmup", type=at_least(0), metavar="n", help="steps to the peak (default: the preset's)")
    flag("--schedule", choices=("linear", "rsqrt"), help="decay (default: linear, superbloom rsqrt)")
    flag("--optimizer", choices=("adamw", "adam"), help="adam: no decay (default: adamw, superbloom adam)")
    flag("--decay", type=at_least(0, float), metavar="w", help=(
        f"weight decay of adamw (default: {COMMON['decay']})"))
    flag("--clip", type=at_least(0, float), default=1.0, metavar="g", help="gradient clipping norm; 0: none")
    flag("--seed", type=at_least(0), default=0, metavar="S", help="seed of weights, batches, noise, dropout")

    flag = group("device and files", "SIGTERM and Ctrl-C save; the same command resumes.")
    add_device_flags(flag)
    flag("--out", metavar="DIR", help="folder of checkpoints and log (default: out/ and a name from the "
         "flags, such as out/proj-lsh)")
    flag("--eval_every", default=1_000, **count, help="steps between evaluations")
    flag("--save_every", default=1_000, **count, help="steps between checkpoints")
    flag("--quiet", action="store_true", help="print errors alone")
    return p
