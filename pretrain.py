"""Pre-train a transformer over hashed words.

    python pretrain.py                                            laptop: docstrings of your Python
    python pretrain.py --emb pool --hash md5 --data my_texts/     your own files
    torchrun --nproc_per_node=8 pretrain.py --emb proj --hash lsh            eight GPUs or processes
    torchrun --nproc_per_node=8 pretrain.py --preset hashformer --emb proj --hash lsh \\
        --data wikipedia+bookcorpus                               the paper's size and data
    python pretrain.py --emb median                               masked words, predicted by hashes
    python pretrain.py --preset superbloom-small                  masked names of item sets
    python pretrain.py --preset superbloom-small --data pages.jsonl --alpha 50       your own sets
    python pretrain.py --init_from out/proj-lsh --data my_texts/  from the weights of another run

Paper map:    [HF Table 4] RECIPES   [HF Table 4] learning_rate   [SB §3.2] RECIPES
              [SB §3.2] learning_rate   [BL §2.4] RECIPES   [HF §3.1] build_parser
              [HF §3.2] build_parser   [HF §3.3] build_parser   [HF §4.2] build_parser
              [SB §3.2] build_parser   [CM] build_parser   [SV] build_parser
              [BL §2.1] build_parser   [HF §3.6] build_parser   [BERT §3.1] build_parser
              [SB §3.3] build_parser   [SB §2.4] build_parser
Out of scope: objectives (objectives.py), scores on tasks (finetune.py), texts of a user (infer.py).

One training step of the default run, B = 32 sequences of L = 128 positions, d = 128:

    ids, noise, random_words   batches.get_batch(step, rows): (B, L), (3, B, L), (B, L). A function
                               of seed and step, so that a resumed run reads the same batches
    inputs, labels (B, L)      objective.corrupt: some words are shuffled, others are random
    codes (B, L, T / 8)        model.codes[inputs]. Nothing is hashed here: each distinct word was
                               hashed once, before training, and a word's bits are a row of a table
    x (B, L, d)                model.embedding: codes to vectors, then positions and a norm
    x (B, L, d)                model.layers: attention and feed-forward
    logits (B, L, 3)           model.head: intact, shuffled or random?
    loss                       objective.loss: the sum over positions. It is divided by their number
                               in the batch of all ranks, then come backward and optimizer.step
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import math
import os
import signal
import time

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from common import InputError, add_device_flags, at_least, autocast, blame_input, catch_signals
from common import gather_from_ranks, load_checkpoint, lock_output, read_ranks, resolve_device
from common import run_script, save_checkpoint
from data.batches import ItemSetBatches, TextBatches
from data.codes import build_codes, build_tokenizer
from data.corpus import Corpus, add_reader_flags, name_data, prepare, reader_options
from embeddings import EMBEDDINGS
from model import CHOICES, PRESETS, Config, Model, count_parameters, parameter_groups
from objectives import IGNORE_INDEX, OBJECTIVES
from plot import draw_losses
from tokenizer import CLS, FIRST_WORD_ID, HASHES, MASK, SEP, SPLITS, UNK, HashTokenizer

# -----------------------------------------------------------------------------
# Settings

# How each preset is trained: defaults of the flags of the same names, beside its sizes in SIZES.
# micro: sequences a device holds at once; lr_mlm: the rate of objectives that predict words
RECIPES = {
    "tiny": dict(batch=32, micro=32, steps=10_000, lr=2e-3, warmup=300, short=0.25),
    # as its authors train it [BL §2.4]
    "bert-lsh": dict(batch=8, micro=8, steps=88_245, lr=5e-5, warmup=0, decay=0.0, vocab=31_995),
    # as we train it
    "bert-lsh-fast": dict(batch=64, micro=32, steps=20_000, lr=1e-3, warmup=1_000, vocab=31_995),
    "median": dict(batch=128, micro=32, steps=100_000, lr=2e-4, warmup=5_000, vocab=30_517),
    # [HF Table 4]
    "hashformer": dict(batch=128, micro=16, steps=500_000, lr=5e-5, lr_mlm=1e-4, warmup=10_000,
                       beta2=0.9999),
    "superbloom-small": dict(batch=64, micro=16, steps=6_000, lr=2e-3, warmup=300, mask=0.40),
    # [SB §3.2] Adam is AdamW without decay
    "superbloom": dict(batch=1024, micro=64, steps=1_000_000, lr=1e-4, warmup=10_000, decay=0.0,
                       schedule="rsqrt", alpha=50),
}
SIZES = PRESETS | {"bert-lsh-fast": PRESETS["bert-lsh"]}
# Defaults of flags that a recipe does not name. Those of sizes are the defaults of model.Config
COMMON = dict(data="python", preset="tiny", emb=None, vocab=50_000, hash="lsh", hash_seed=0,
              features=50_000, alpha=25, coherent=0, mask=0.15, noise=0.10, samples=8_192,
              decay=0.01, beta2=0.999, schedule="linear", lr_mlm=None)
# Defaults of item sets. A set has no order: of its pairs (i, j) and (j, i) are equal
SETS = dict(data="python-names", vocab=None, length=32, lsh_pairs="all", short=0.0)

# The flags that only some runs use: those whose --emb has such codes, whose --objective has such a
# head, and those with --attn lsh. In any other run such a flag has no effect and is refused; its
# help says what it requires
FORMAT_FLAGS = {
    "row": "vocab",
    "index": "hash rows",
    "chunks": "hash bits chunk",
    "bits": "hash bits",
    "digest": "vocab alpha coherent hashes hash_seed",
    "sketch": "hashes buckets hash_seed key",
    "weighted": "hashes rows weights hash_seed key",
}
HEAD_FLAGS = {
    "sr": "noise",
    "mlm": "mask tied",
    "hash-mlm": "mask tied hashes buckets hash_seed key",
}
LSH_FLAGS = "lsh_bands lsh_buckets lsh_hashes lsh_fill lsh_pairs lsh_redraw"

# With --init_from these come from the other run, as does everything that shapes the weights
WORDS = ("split", "vocab", "hash", "features", "key", "hash_seed", "alpha", "coherent", "objective")
SEED_STRIDE = 1_000_003  # seed · stride + step: for runs of fewer steps no two seeds are equal
RANK_STRIDE = 4_099  # the same for ranks

# A run may be resumed with other values of these. --data is compared by its content
FREE = ("data", "field", "encoding", "sep", "cache", "out", "device", "dtype", "compile", "micro",
        "eval_every", "save_every", "quiet", "init_from")


def list_uses():
    """Return dict: flag -> its choices -> the flags above that a run with this choice uses.

    For example list_uses()["emb"]["pool"] is "hash bits chunk".
    """
    objectives = {name: HEAD_FLAGS[cls.head] for name, cls in OBJECTIVES.items()}
    objectives["sampled"] += " samples"
    return dict(
        emb={name: FORMAT_FLAGS[cls.code_format] for name, cls in EMBEDDINGS.items()},
        objective=objectives,
        hash={name: " ".join(cls.options.values()) for name, cls in HASHES.items()},
        split=dict(bpe="vocab", phrases="vocab"),
        attn=dict(lsh=LSH_FLAGS))


def describe_requirement(flag):
    """Return the choices that use a flag, as "--emb lookup, bloom or --split bpe, phrases"."""
    parts = []
    for name, uses in list_uses().items():
        choices = [choice for choice, flags in uses.items() if flag in flags.split()]
        if choices:
            parts.append(f"--{name} {', '.join(choices)}")
    return " or ".join(parts)


def build_parser():
    """Return the parser of all flags, grouped by idea. What stays None parse_flags fills in."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="pretrain.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python pretrain.py [flags]        (--help explains them)",
        description=(__doc__ or "").split("\nPaper map")[0])
    count = dict(type=at_least(1))
    share = dict(type=at_least(0.001, float, 0.999))
    group = None

    def add(flag, help, **options):
        requirement = describe_requirement(flag)
        if requirement:
            help = f"{help}; requires {requirement}"
        group.add_argument(f"--{flag}", help=help, **options)

    group = parser.add_argument_group(
        "words", "Every distinct word gets an ID, however many there are. [HF §3.1]")
    add("data", "python: docstrings of the installed Python; stdlib: of the standard library "
        "alone; python-names: names its functions use; wikipedia, bookcorpus or any hub ID; a file "
        "or folder of .txt .tsv .csv .jsonl .json .parquet, .gz too, links followed; or several, "
        "joined by +. A row is a document, of .txt a line; with --split items a set: a list, text "
        "with names between tabs, else spaces, or page and item (default: python, of sets "
        "python-names)")
    add("split", "runs of letters or punctuation; white space; BPE pieces; frequent words and "
        "pairs, and pieces for the rest; item sets (default: regex, of lookup bpe, of bloom items)",
        choices=SPLITS)
    add("field", "column of text or lists; of sets also PAGE,ITEM (default: text)")
    add_reader_flags(group.add_argument)
    add("vocab", "BPE pieces, phrases, words of a lookup or items (default: 50,000 or the "
        "preset's, phrases 1,000,000, items all)", type=at_least(1, maximum=10_000_000))
    add("cache", "folder of prepared corpora, which fit every hash (default: cache)",
        default="cache")

    group = parser.add_argument_group(
        "hashes",
        "MD5 gives words random bits, LSH similar words similar bits. [HF §3.2] [HF §3.3]")
    add("hash", "lsh: of n-grams (default: lsh)", choices=tuple(HASHES))
    add("bits", f"T of each hash (default: {Config.bits})", type=at_least(8, maximum=1 << 16))
    add("chunk", f"bits of a chunk (default: {Config.chunk})", **count)
    add("features", "frequent n-grams, raised to --bits or --rows (default: 50,000)", **count)
    add("key", "secret key (default: none)")
    add("hash_seed", "seed (default: 0)", type=at_least(0))

    group = parser.add_argument_group(
        "model", "A post-LN transformer over the embedded words. [HF §4.2]")
    methods = []  # the first sentence of each class
    for emb, cls in EMBEDDINGS.items():
        idea = (cls.__doc__ or "").partition(": ")[2].partition(".")[0]
        methods.append(f"{emb}: {idea}")
    add("emb", "; ".join(methods) + " (default: proj, or the preset's)", choices=tuple(EMBEDDINGS))
    add("preset", "sizes and recipe: those of a paper, or ours for two cores (default: tiny)",
        choices=tuple(RECIPES))
    add("layers", "encoder layers; 0 sees one word at a time (default of this and all other sizes: "
        "the preset's)", type=at_least(0, maximum=1_000))
    add("width", "hidden size d", **count)
    add("heads", "attention heads", **count)
    add("ffn", "feed-forward size (with --width: 4 d)", **count)
    add("length", "positions, [CLS] included", type=at_least(2))
    add("types", "token type embeddings", **count)
    add("rows", "hash buckets", **count)
    add("act", "feed-forward activation", choices=CHOICES["act"])
    add("dropout", "also of attention", type=float)
    add("tied", "predict masked words by the embedding's rows and not the head's, which learn "
        "sooner and take as many parameters again (default: of lookup and bloom)",
        action=argparse.BooleanOptionalAction)

    group = parser.add_argument_group(
        "Bloom digests", "An item is m hash tokens, alpha items share one. [SB §3.2]")
    add("alpha", "items that share a token, at most √N (default: 25, superbloom 50)", **count)
    add("coherent", "maps with items of a page together (default: 0)", type=at_least(0))
    add("hashes", "m of an item (default: 2), k of a sketch (default: 5)",
        type=at_least(1, maximum=99))

    group = parser.add_argument_group(
        "count-median sketch",
        "A word is the median or mean of one row of each of k blocks [CM], or a weighted sum. [SV]")
    add("buckets", f"rows, or classes, of a hash function (default: {Config.buckets})", **count)
    add("weights", f"rows of the table of importance weights (default: {Config.weights:,})",
        **count)

    group = parser.add_argument_group(
        "attention", "lsh: only pairs that collide under SimHash, computed exactly. [BL §2.1]")
    add("attn", "full: over all pairs (default: full, or the preset's)", choices=CHOICES["attn"])
    add("lsh_bands", f"hyperplanes of a hash (default: {Config.lsh_bands}, bert-lsh 2)", **count)
    add("lsh_buckets", f"buckets of a hash function (default: {Config.lsh_buckets})", **count)
    add("lsh_hashes", "hash functions; a pair collides if one agrees (default: 1)", **count)
    add("lsh_fill", "other pairs weigh exp(0), or nothing (default: zero)",
        choices=CHOICES["lsh_fill"])
    add("lsh_pairs", "all: each pair has its own score; upper: (i, j) and (j, i) share one, as in "
        "the released code (default: all, bert-lsh upper)", choices=CHOICES["lsh_pairs"])
    add("lsh_redraw", "new hyperplanes in every training step",
        action=argparse.BooleanOptionalAction)

    group = parser.add_argument_group(
        "objective",
        "sr: shuffled and random words. [HF §3.6] mlm: masked words. [BERT §3.1]\n"
        "sampled: mlm over sampled rows. [SB §3.3] hash-mlm: hashes of masked words. [SB §2.4]")
    add("objective", "mlm and sampled require --emb lookup, hash-mlm any other (default: sr; mlm "
        "or hash-mlm for sketches, sets and presets that predict words)", choices=tuple(OBJECTIVES))
    add("mask", "share of words masked (default: 0.15, superbloom-small 0.40)", **share)
    add("noise", "share of words shuffled, and of the others replaced (default: 0.10)", **share)
    add("short", "share of the training windows of text that are cut to a random length, so that "
        "a model reads sentences, too (default: 0, tiny 0.25)", type=at_least(0, float, 1))
    add("samples", "rows of the sampled softmax (default: 8,192)", **count)

    group = parser.add_argument_group(
        "training", "Warm-up, then decay: linear [HF Table 4] or inverse square root. [SB §3.2]")
    add("init_from", "start from weights of another run, whose words and sizes stay")
    add("batch", "sequences per step, all ranks (default: the preset's)", **count)
    add("micro", "sequences a device holds at once", **count)
    add("steps", "optimizer steps; more steps of a finished run: --init_from its folder", **count)
    add("lr", "peak learning rate", type=at_least(0, float))
    add("warmup", "steps to the peak", type=at_least(0))
    add("schedule", "decay (default: linear, superbloom rsqrt)", choices=("linear", "rsqrt"))
    add("decay", "weight decay of AdamW; 0: Adam (default: 0.01, superbloom and bert-lsh 0)",
        type=at_least(0, float))
    add("clip", "gradient clipping norm; 0: none (default: 1)", type=at_least(0, float),
        default=1.0)
    add("seed", "of weights, batches, noise, dropout (default: 0)", type=at_least(0), default=0)

    group = parser.add_argument_group(
        "device and files", "SIGTERM and Ctrl-C save; the same command resumes.")
    add_device_flags(group.add_argument)
    add("out", "folder of checkpoints and log (default: out/ and a name from the flags, such as "
        "out/proj-lsh or out/proj-lsh-my_texts)")
    add("eval_every", "steps between evaluations (default: 1,000)", default=1_000, **count)
    add("save_every", "steps between checkpoints (default: 1,000)", default=1_000, **count)
    add("quiet", "print errors alone", action="store_true")
    return parser


def parse_flags(argv=None):
    """Return all settings as a Namespace, and the checkpoint of --init_from or None.

    Config's fields are settings of the same names; some of them, as order and head, have no flag.
    """
    flags = vars(build_parser().parse_args(argv))
    given = {flag: value for flag, value in flags.items() if value is not None}
    start = None
    inherited = {}
    if flags["init_from"]:
        start = load_checkpoint(flags["init_from"])
        inherited = read_inherited(start, given)
    fixed = inherited | given
    preset = (COMMON | fixed)["preset"]

    # each line goes before those above it: defaults, preset, other run, command line
    settings = flags | {field.name: field.default for field in dataclasses.fields(Config)} | COMMON
    settings |= SIZES[preset] | RECIPES[preset]
    settings |= inherited
    settings |= given
    args = argparse.Namespace(**settings)

    # what is open follows from the others. Until they are set here, order and head are the preset's
    if args.split is None and (args.emb == "bloom" or not args.order):
        args.split = "items"
    is_sets = args.split == "items"
    args.order = not is_sets
    if is_sets:
        vars(args).update(SETS | fixed)
    if args.emb is None:
        args.emb = "bloom" if is_sets else "proj"
    code_format = EMBEDDINGS[args.emb].code_format
    if args.split is None:
        args.split = "bpe" if code_format == "row" else "regex"
    if args.objective is None:
        args.objective = choose_objective(code_format, is_sets or args.head != "sr")
    args.head = OBJECTIVES[args.objective].head
    if "vocab" not in fixed and args.split == "phrases":
        args.vocab = 1_000_000
    if "width" in given and "ffn" not in fixed:
        args.ffn = 4 * args.width
    if "lr" not in given and args.head != "sr" and args.lr_mlm is not None:
        args.lr = args.lr_mlm
    if "warmup" not in given:
        args.warmup = min(args.warmup, args.steps // 10)
    # rotations of F numbers give F hyperplanes: F is at least the number of bits or rows
    num_hyperplanes = args.rows if code_format == "index" else args.bits
    args.features = max(args.features, num_hyperplanes)

    check_flags(args, given, code_format)
    if args.out is None:
        args.out = name_output(args, code_format)
    return args, start


def read_inherited(start, given):
    """Return the settings that a run takes from the checkpoint of --init_from: sizes and words."""
    if not start["run"].keys() >= {"preset", *WORDS}:  # of finetune.py
        raise InputError(f"--init_from {given['init_from']}: expected a checkpoint of pretrain.py.")
    inherited = {name: start["run"][name] for name in ("preset", *WORDS)} | start["config"]
    for name, value in inherited.items():
        other = given.get(name, value)
        if name not in ("preset", "dropout", "short") and other != value:
            raise InputError(f"--{name}: expected {value}, as in --init_from "
                             f"{given['init_from']}, got {other}. Remove one of the two flags.")
    return inherited


def choose_objective(code_format, predicts_words):
    """Return the default objective of an embedding."""
    if not predicts_words and code_format not in ("digest", "sketch"):
        return "sr"
    if code_format == "row":
        return "mlm"
    return "hash-mlm"


def check_flags(args, given, code_format):
    """Raise InputError for a flag without effect, or flags that contradict each other."""
    in_use = []
    for name, uses in list_uses().items():
        if name != "hash" or "hash" in in_use:  # not every embedding has a hash
            in_use += uses.get(getattr(args, name), "").split()
    for flag in given:
        requirement = describe_requirement(flag)
        if requirement and flag not in in_use:
            raise InputError(f"--{flag} requires {requirement}.")

    for flag in ("buckets", "key"):
        if code_format == "digest" and flag in given:
            raise InputError(f"--{flag} requires another --emb than {args.emb}, whose buckets "
                             "--alpha and --hash_seed decide.")
    if args.coherent and (args.split != "items" or args.coherent > (args.hashes or 2)):
        raise InputError("--coherent requires --split items, and at most as many as --hashes, got "
                         f"{args.coherent}.")
    if args.short > 0 and args.split == "items":
        raise InputError(f"--short requires texts, got --split {args.split}.")
    if args.warmup > args.steps:
        raise InputError(f"--warmup: expected at most {args.steps:,} --steps, got {args.warmup:,}.")
    with blame_input(), torch.device("meta"):
        Model(build_config(args))  # takes no memory, and raises where sizes do not fit each other


def build_config(args):
    """Return the Config of the settings; ValueError where they contradict each other."""
    return Config(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Config)})


def name_output(args, code_format):
    """Return the default --out, which tells runs apart: out/proj-lsh, out/lookup-bpe-mlm."""
    parts = [args.emb]
    if "hash" in FORMAT_FLAGS[code_format].split():
        parts.append(args.hash)
    if args.split != "regex":
        parts.append(args.split)
    if args.objective != choose_objective(code_format, predicts_words=False):
        parts.append(args.objective)
    if args.tied is not None:
        parts.append("tied" if args.tied else "untied")
    if args.attn == "lsh":
        parts.append("lsh-attention")
    if args.init_from:
        parts.append("continued")
    default_data = COMMON["data"] if args.order else SETS["data"]
    if args.data != default_data:
        parts.append(name_data(args.data))
    return os.path.join("out", "-".join(parts))


# -----------------------------------------------------------------------------
# Training


def learning_rate(args, step):
    """Return a step's rate: warm-up to --lr, then linear [HF Table 4] or rsqrt decay. [SB §3.2]"""
    rise = (step + 1) / max(args.warmup, 1)  # 1 at the end of the warm-up
    if args.schedule == "linear":
        fall = (args.steps - step) / max(args.steps - args.warmup, 1)
    elif args.schedule == "rsqrt":
        fall = rise**-0.5
    else:
        raise ValueError(f"schedule: expected linear or rsqrt, got {args.schedule}.")
    return args.lr * min(rise, fall)


def train(args, start):
    """Train until the last step or a signal; return the last evaluation.

    The parts: ranks; data; model, objective, optimizer; resume; what a step calls; summary; loop.
    """
    # -----------------------------------------------------------------------------
    # Ranks: torchrun starts one process for each GPU. Only the first one prints and writes
    rank, world, local_rank = read_ranks()
    device, dtype, use_compile = resolve_device(args, local_rank)
    is_first = rank == 0
    is_quiet = args.quiet or not is_first
    if args.batch % world != 0:
        raise InputError(f"--batch: expected a multiple of {world} ranks, got {args.batch}.")
    if world > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        patience = datetime.timedelta(hours=12)  # one node may prepare the corpus for hours
        dist.init_process_group(backend, timeout=patience)

    # of each step's sequences this rank has a share, in micro-batches
    share = args.batch // world
    micro = min(args.micro, share)
    end = share * (rank + 1)
    slices = [slice(i, min(i + micro, end)) for i in range(share * rank, end, micro)]

    # -----------------------------------------------------------------------------
    # What --out holds is refused if it is of a run with other flags, before the data is prepared
    path = os.path.join(args.out, "ckpt.pt")
    log_path = os.path.join(args.out, "log.jsonl")
    identity = {name: value for name, value in vars(args).items() if name not in FREE}
    identity["init_from"] = None
    if start is not None:
        identity["init_from"] = f"{args.init_from} at step {start['step']}"
    saved = None
    if os.path.exists(path):
        saved = load_checkpoint(path)
        check_same_run(saved["run"], saved["run"] | identity, args, path)

    # -----------------------------------------------------------------------------
    # Data: token IDs on disk, and the hash codes of each distinct word
    config = build_config(args)
    with blame_input():
        folder = prepare(args.data, args.split, args.cache, args.vocab, is_quiet, args.field,
                         **reader_options(args))
        corpus = Corpus(folder)
        if start is None:
            tokenizer = build_tokenizer(args, config, corpus)
        else:
            tokenizer = HashTokenizer.load(start["encoder"], config)
            check_vocabulary(args, tokenizer, corpus)
        config = tokenizer.config  # a fixed vocabulary decides its rows
        codes, targets = build_codes(args, tokenizer, corpus)

        # of a fixed vocabulary, IDs from num_ids on are unknown words
        known_words = tokenizer.words if tokenizer.is_fixed else corpus.words
        num_ids = FIRST_WORD_ID + len(known_words)
        word_counts = corpus.counts[FIRST_WORD_ID:num_ids]
        # random words are drawn from these
        occurring_words = FIRST_WORD_ID + np.flatnonzero(word_counts)
        sizes = dict(length=config.length, batch_size=args.batch, word_ids=occurring_words,
                     seed=args.seed)
        if config.order:
            batches = TextBatches(corpus.ids, first_id=CLS, last_id=SEP, short=config.short,
                                  **sizes)
        else:
            train_pages, eval_pages = corpus.split_pages()
            batches = ItemSetBatches(corpus.ids, corpus.offsets, train_pages, eval_pages,
                                     limits=(FIRST_WORD_ID, num_ids), **sizes)

    # -----------------------------------------------------------------------------
    # Model, objective, optimizer
    torch.manual_seed(args.seed)
    model = Model(config)
    if start is not None:
        model.load_state_dict(start["model"])
    model.to(device).train()
    model.set_codes(codes)
    objective = OBJECTIVES[args.objective](
        config, mask_rate=args.mask, noise_rate=args.noise, mask_id=MASK,
        first_word_id=FIRST_WORD_ID, targets=targets.to(device), bloom_map=tokenizer.bloom_map,
        num_samples=args.samples)
    groups = parameter_groups(model, args.decay)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, args.beta2), fused=True)

    # -----------------------------------------------------------------------------
    # Resume: the same command goes on where the checkpoint in --out ends
    identity["corpus"] = corpus.meta["digest"]
    if tokenizer.bloom_map is not None:
        identity["bloom"] = tokenizer.bloom_map.checksum()
    step = 0
    best = math.inf  # the lowest eval_loss
    log_size = 0
    if saved is not None:
        check_same_run(saved["run"], identity, args, path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
        best = saved["best"]
        log_size = saved["log_size"]
        if args.dtype == "auto":
            dtype = saved["dtype"]
    is_finished = step == args.steps

    if use_compile:
        model.encode = torch.compile(model.encode)
    ddp_model = model
    if world > 1:
        states = gather_from_ranks((step, dtype, identity))
        if any(state != states[0] for state in states):
            raise InputError("--out, --cache: expected a folder that all nodes see, got ranks that "
                             "differ in steps, data, hashes or dtypes.")
        # averages the gradients over ranks, while backward still computes others. Codes and
        # hyperplanes, the buffers, are equal on all ranks
        ddp_model = DistributedDataParallel(model, forward_sync_buffers=False)

    # -----------------------------------------------------------------------------
    # What a step calls
    def corrupt(batch):
        """Return inputs and labels, int64 (B, L) on the device, and how many labels are scored."""
        ids, noise, random_words = batch
        ids = ids.masked_fill(ids >= num_ids, UNK)
        inputs, labels = objective.corrupt(ids, noise, random_words)
        num_scored = int((labels != IGNORE_INDEX).sum())  # on the host: no wait for a GPU
        if device.type == "cuda":  # nor for a copy from pinned memory
            inputs = inputs.pin_memory()
            labels = labels.pin_memory()
        inputs = inputs.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        return inputs, labels, num_scored

    @torch.no_grad()
    def evaluate():
        """Return loss and metrics of the held-out sequences, a dict, and the metrics' counts."""
        model.eval()
        rows = np.array_split(np.arange(batches.num_eval), world)[rank]
        total = torch.zeros(2 + objective.num_counts, dtype=torch.float64)  # on the host
        for i in range(0, len(rows), micro):
            inputs, labels, num_scored = corrupt(batches.eval_batch(rows[i:i + micro]))
            with autocast(device, dtype):
                loss, counts = objective.evaluate(model, inputs, labels)
            total[0] += loss.item()
            total[1] += num_scored
            total[2:] += counts.cpu()
        model.train()
        if world > 1:
            total = total.to(device)
            dist.all_reduce(total)
        loss, num_scored, *counts = total.tolist()
        if num_scored == 0:
            raise InputError("--data: expected words to predict in the held-out text, got none. "
                             "Use more text or a larger --mask.")
        return dict(eval_loss=loss / num_scored, **objective.metrics(counts)), counts

    def save(name, **more):
        if is_first:
            save_checkpoint(os.path.join(args.out, name), model, tokenizer.state(), run=identity,
                            step=step, best=best, dtype=dtype, log_size=os.path.getsize(log_path),
                            words=corpus.frequent(50_000), **more)

    def write_log(**row):
        """Append a row to the log, with six digits. All ranks have the same numbers."""
        for name, value in row.items():
            if not math.isfinite(value):
                raise InputError(f"--lr: expected finite numbers in step {step}, got {name} "
                                 f"{value}. What {args.out} holds is older. Try a lower --lr.")
            if isinstance(value, float):
                row[name] = float(f"{value:.6g}")
        if is_first:
            with open(log_path, "a") as file:
                file.write(json.dumps(row) + "\n")

    def show(text):
        if not is_quiet:
            with contextlib.suppress(OSError):  # a reader that has left does not end a run
                tqdm.write(text)  # above the progress bar

    # -----------------------------------------------------------------------------
    # Summary: what is about to run, and the loss that theory expects of an untrained model
    size = count_parameters(model)
    epochs = args.steps / batches.steps_per_epoch
    show(f"model: emb {args.emb}, split {args.split}, objective {args.objective}, "
         f"{config.layers} layers, width {config.width}, length {config.length}, "
         f"attention {args.attn}")
    show(f"parameters: {size['total']:,}; embedding {size['embedding']:,} "
         f"(PoEP {100 * size['poep']:.2f} %)")
    show("corpus: {data}, {words:,} words, {distinct:,} distinct, {documents:,} documents, "
         "{replaced:,} characters not UTF-8".format(**corpus.meta))
    if tokenizer.bloom_map is not None:
        show("Bloom map: {n_items:,} items in {m} maps of {buckets:,} buckets of {alpha}"
             .format(**vars(tokenizer.bloom_map)))
    show(f"batch: {args.batch} = {world} ranks × {len(slices)} micro-batches, {micro} each")
    show(f"steps: {args.steps:,} = {epochs:.1f} epochs, lr {args.lr:g}, warm-up {args.warmup:,}")
    if epochs > 20:
        show("warning: more than 20 epochs. Use fewer --steps or more text; best.pt is the best.")
    show(f"device: {device}, {dtype}, compile {use_compile}, torch {torch.__version__}, "
         f"seed {args.seed}")
    result, counts = evaluate()
    num_classes, unigram_loss = objective.expected_loss(word_counts, counts)
    uniform_loss = math.log(num_classes)
    show(f"eval_loss: {result['eval_loss']:.3f} at step {step:,}; uniform baseline "
         f"{uniform_loss:.3f} = ln {num_classes:,}, frequencies alone {unigram_loss:.3f}")
    if step > 0 and not is_finished:
        show(f"Resuming {args.out} at step {step:,}")

    # -----------------------------------------------------------------------------
    # Training loop
    if is_first:
        with open(log_path, "a") as file:
            file.truncate(min(log_size, file.tell()))  # the steps after the checkpoint run again
    no_bar = True if is_quiet else None  # None: if stderr is no terminal
    bar = tqdm(total=args.steps, initial=step, unit="step", disable=no_bar)
    clock = time.perf_counter()  # speed is measured from this time and step on
    clock_step = step
    last_shown = clock
    with catch_signals() as signals, bar:
        while step < args.steps:
            # read the batch, and count the positions that are scored in the batch of all ranks
            micro_batches = []
            num_scored = 0
            for rows in batches.micro_batch_rows(step, slices):
                inputs, labels, count = corrupt(batches.get_batch(step, rows))
                micro_batches.append((inputs, labels))
                num_scored += count
            must_stop = len(signals)
            if world > 1:  # one sum over the ranks says, too, whether any of them has to stop
                numbers = torch.tensor([num_scored, must_stop], device=device)
                dist.all_reduce(numbers)
                num_scored, must_stop = numbers.tolist()
            if must_stop:
                save("ckpt.pt", optimizer=optimizer.state_dict())
                break
            num_scored = max(num_scored, 1)

            # dropout and sampled rows depend on seed, step and rank alone: a resumed run draws the
            # same
            step_seed = args.seed * SEED_STRIDE + step
            torch.manual_seed((step_seed * RANK_STRIDE + rank) % 2**63)
            if config.lsh_redraw:
                model.redraw_hyperplanes(step_seed)
            lr = learning_rate(args, step)
            for group in optimizer.param_groups:
                group["lr"] = lr

            # forward and backward: gradients add up over micro-batches, and are averaged over ranks
            # in the last one
            optimizer.zero_grad()
            total_loss = torch.zeros((), device=device)
            for i, (inputs, labels) in enumerate(micro_batches):
                if world > 1:
                    ddp_model.require_backward_grad_sync = i == len(micro_batches) - 1
                with autocast(device, dtype):
                    loss = objective.loss(ddp_model, inputs, labels)
                # subtle: divided by the global count, or short micro-batches would weigh too much;
                # times world, since DDP averages
                (loss * (world / num_scored)).backward()
                total_loss += loss.detach()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip or math.inf)
            optimizer.step()
            step += 1
            bar.update()

            # loss and norm stay on the device until they are logged: the host waits to read them
            is_last = step == args.steps
            is_logged = step % 10 == 0 or is_last
            is_evaluated = step % args.eval_every == 0 or is_last
            is_saved = step % args.save_every == 0 or is_last
            if is_logged:
                if world > 1:
                    dist.all_reduce(total_loss)
                loss = total_loss.item() / num_scored
                norm = norm.item()
                seconds = time.perf_counter() - clock
                ms_per_sample = 1000 * seconds / ((step - clock_step) * args.batch)
                words_per_s = 1000 * batches.words_per_sequence / ms_per_sample
                write_log(step=step, loss=loss, lr=lr, grad_norm=norm, words_per_s=words_per_s,
                          ms_per_sample=ms_per_sample)
                text = f"loss {loss:.3f}, {words_per_s:,.0f} words/s"
                bar.set_postfix_str(text)
                if bar.disable and time.perf_counter() > last_shown + 30:  # no terminal: lines
                    seconds_left = (args.steps - step) * args.batch * ms_per_sample / 1000
                    time_left = tqdm.format_interval(seconds_left)
                    show(f"step {step:,} of {args.steps:,}: {text}, {time_left} left")
                    last_shown = time.perf_counter()
            if is_evaluated:
                result, _ = evaluate()
                write_log(step=step, **result)
                if result["eval_loss"] < best:
                    best = result["eval_loss"]
                    save("best.pt")
                metrics = ", ".join(f"{name} {value:.3f}" for name, value in result.items())
                show(f"step {step:,}: {metrics}")
            if is_saved:
                save("ckpt.pt", optimizer=optimizer.state_dict())
            # evaluating and saving are no part of the speed. They also wait for steps that are in
            # the queue of a GPU, so the next row's speed is of the steps after them alone
            if is_logged or is_evaluated or is_saved:
                clock = time.perf_counter()
                clock_step = step

    if world > 1:
        dist.barrier()  # subtle: a rank that leaves early aborts the others, which still send
    if step < args.steps:
        show(f"Interrupted at step {step:,}; saved {path}. Rerun the same command to resume, bit "
             "for bit on the same device, ranks, threads and --micro.")
        number = signals[0] if signals else signal.SIGTERM  # of another rank
        raise SystemExit(128 + number)
    if is_finished:
        show(f"Finished before, at step {step:,}: {path}. For more steps use --init_from "
             f"{args.out} and another --out.")
    else:
        show(f"Saved {path}, and the lowest loss in best.pt: eval_loss {best:.3f}")
    if is_first:
        show(draw_losses(args.out, uniform_loss, unigram_loss))
    show(f"Next: python infer.py --ckpt {args.out}")
    return result


def check_vocabulary(args, tokenizer, corpus):
    """Raise InputError unless the token IDs of --init_from are those of the corpus."""
    own = getattr(tokenizer.subwords, "json", None)  # of BPE or phrases
    pieces = getattr(corpus.subwords, "json", None)
    if own != pieces or tokenizer.words != corpus.words[:len(tokenizer.words)]:
        raise InputError(f"--init_from {args.init_from}: requires the pieces and words of its own "
                         f"corpus, got those of --data {args.data}. Use the same --data, or hashed "
                         "whole words.")


def check_same_run(old, new, args, path):
    """Raise InputError where the checkpoint in --out is of another run."""
    changes = []
    for name in sorted(old.keys() | new.keys()):  # init_from may be in one of them alone
        if old.get(name) != new.get(name):
            changes.append(f"{name} was {old.get(name)} and is {new.get(name)}")
    if changes:
        raise InputError(f"{path}: expected a checkpoint of this run, got another: "
                         f"{'; '.join(changes)}. Use another --out; there --init_from {args.out} "
                         "starts from these weights.")


def pretrain(argv):
    """Parse the flags, hold --out, and train; return the last evaluation."""
    args, start = parse_flags(argv)
    rank, _, _ = read_ranks()
    with lock_output(args.out, rank):  # first: another run may be saving the checkpoint there
        return train(args, start)


def main(argv=None):
    """Train as argv says (default: the command line); return the last evaluation."""
    return run_script("pretrain.py", pretrain, argv)


if __name__ == "__main__":
    main()
