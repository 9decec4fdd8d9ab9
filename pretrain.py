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
from common import gather_from_ranks, load_checkpoint, lock_output, read_ranks, remove
from common import resolve_device, run_script, save_checkpoint
from data.batches import Batches, ItemSetBatches, TextBatches
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
# it also has proformer, which is trained by finetune.py alone and so has no recipe
SIZES = PRESETS | {"bert-lsh-fast": PRESETS["bert-lsh"]}
# Defaults of flags that a recipe does not name. Those of sizes are the defaults of model.Config.
# emb has none: fill_settings derives it from the preset, and split and objective from both
COMMON = dict(data="python", preset="tiny", emb=None, vocab=50_000, hash="lsh", hash_seed=0,
              features=50_000, alpha=25, coherent=0, mask=0.15, noise=0.10, samples=8_192,
              decay=0.01, beta2=0.999, schedule="linear", lr_mlm=None)
# Defaults of item sets. lsh_pairs upper would take one score for (i, j) and (j, i), by the order
# of i and j, which a set does not have
SETS = dict(data="python-names", vocab=None, length=32, lsh_pairs="all", short=0.0)

# The flags that only some runs use. In any other run such a flag has no effect and is refused; its
# help says what it requires
FORMAT_FLAGS = {  # by the code format of --emb
    "row": ["vocab"],
    "index": ["hash", "rows"],
    "chunks": ["hash", "bits", "chunk"],
    "bits": ["hash", "bits"],
    "digest": ["vocab", "alpha", "coherent", "hashes", "hash_seed"],
    "sketch": ["hashes", "buckets", "hash_seed", "key"],
    "weighted": ["hashes", "rows", "weights", "hash_seed", "key"],
}
HEAD_FLAGS = {  # by the head that --objective trains
    "sr": ["noise"],
    "mlm": ["mask", "tied"],
    "hash-mlm": ["mask", "tied", "hashes", "buckets", "hash_seed", "key"],
}
LSH_FLAGS = ["lsh_bands", "lsh_buckets", "lsh_hashes", "lsh_fill", "lsh_pairs", "lsh_redraw"]


def list_uses():
    """Return dict: option -> choice -> the flags that a run with this choice uses.

    For example list_uses()["emb"]["pool"] is ["hash", "bits", "chunk"].
    """
    embeddings = {name: FORMAT_FLAGS[cls.code_format] for name, cls in EMBEDDINGS.items()}
    objectives = {name: HEAD_FLAGS[cls.head] + cls.flags for name, cls in OBJECTIVES.items()}
    # options: an argument of the hash -> its flag
    hashes = {name: list(cls.options.values()) for name, cls in HASHES.items()}
    return dict(emb=embeddings, objective=objectives, hash=hashes,
                split=dict(bpe=["vocab"], phrases=["vocab"]), attn=dict(lsh=LSH_FLAGS))


def describe_requirement(flag):
    """Return the choices that use a flag, as "--emb lookup, bloom or --split bpe, phrases".

    It is "" for a flag that every run uses.
    """
    parts = []
    for option, uses in list_uses().items():
        choices = [choice for choice, flags in uses.items() if flag in flags]
        if choices:
            parts.append(f"--{option} {', '.join(choices)}")
    return " or ".join(parts)


def list_used_flags(args):
    """Return which of the flags that only some runs use this run uses."""
    uses = list_uses()
    used = uses["emb"][args.emb] + uses["objective"][args.objective]  # a new list
    if "hash" in used:
        used = used + uses["hash"][args.hash]
    # most choices of these two use none
    return used + uses["split"].get(args.split, []) + uses["attn"].get(args.attn, [])


def build_parser():
    """Return the parser of all flags, grouped by idea.

    A flag that is not given is None, or has a default that no preset changes, as --clip has.
    """
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="pretrain.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python pretrain.py [flags]        (--help explains them)",
        description=(__doc__ or "").split("\nPaper map")[0])
    count = dict(type=at_least(1))
    share = dict(type=at_least(0.001, float, 0.999))

    def new_group(title, idea):
        """Return a function that adds a flag to a new group; its help says what it requires."""
        group = parser.add_argument_group(title, idea)

        def add(flag, help, **options):
            requirement = describe_requirement(flag.removeprefix("--"))
            if requirement:
                help = f"{help}; requires {requirement}"
            group.add_argument(flag, help=help, **options)
        return add

    add = new_group(
        "words", "Every distinct word gets an ID, however many there are. [HF §3.1]")
    add("--data", "python: docstrings of the installed Python; stdlib: of the standard library "
        "alone; python-names: names its functions use; wikipedia, bookcorpus or any hub ID; a file "
        "or folder of .txt .tsv .csv .jsonl .json .parquet, .gz too, links followed; or several, "
        "joined by +. A row is a document, of .txt a line; with --split items a set: a list, text "
        "with names between tabs, else spaces, or page and item (default: python, of sets "
        "python-names)")
    add("--split", "regex: runs of letters or punctuation; space: what white space separates; bpe: "
        "BPE pieces; phrases: frequent words and pairs, and pieces for the rest; items: item sets "
        "(default: regex, of lookup bpe, of bloom items)", choices=SPLITS)
    add("--field", "column of text or lists; of sets also PAGE,ITEM (default: text)")
    add_reader_flags(add)
    add("--vocab", "BPE pieces, phrases, words of a lookup or items (default: 50,000 or the "
        "preset's, phrases 1,000,000, items all)", type=at_least(1, maximum=10_000_000))
    add("--cache", "folder of prepared corpora; one serves all hashes (default: cache)",
        default="cache")

    add = new_group(
        "hashes",
        "MD5 gives words random bits, LSH similar words similar bits. [HF §3.2] [HF §3.3]")
    add("--hash", "lsh: of n-grams (default: lsh)", choices=tuple(HASHES))
    add("--bits", f"T of each hash (default: {Config.bits})", type=at_least(8, maximum=1 << 16))
    add("--chunk", f"bits of a chunk (default: {Config.chunk})", **count)
    add("--features", "n-grams to keep, at least --bits or --rows (default: 50,000)", **count)
    add("--key", "secret key (default: none)")
    add("--hash_seed", "seed (default: 0)", type=at_least(0))

    add = new_group(
        "model", "A post-LN transformer over the embedded words. [HF §4.2]")
    names = {}  # the idea of a class, its first sentence -> names of the method
    for emb, cls in EMBEDDINGS.items():
        idea = (cls.__doc__ or "").partition(": ")[2].partition(".")[0]
        names.setdefault(idea, []).append(emb)
    methods = [f"{', '.join(embs)}: {idea}" for idea, embs in names.items()]
    add("--emb", "; ".join(methods) + " (default: proj, or the preset's)",
        choices=tuple(EMBEDDINGS))
    add("--preset", "sizes and recipe: those of a paper, or ours for two cores (default: tiny)",
        choices=tuple(RECIPES))
    add("--layers", "encoder layers; 0 sees one word at a time (default of this and all other "
        "sizes: the preset's)", type=at_least(0, maximum=1_000))
    add("--width", "hidden size d", **count)
    add("--heads", "attention heads", **count)
    add("--ffn", "feed-forward size (with --width: 4 d)", **count)
    add("--length", "positions, [CLS] included", type=at_least(2))
    add("--types", "token type embeddings", **count)
    add("--rows", "hash buckets", **count)
    add("--act", "feed-forward activation", choices=CHOICES["act"])
    add("--dropout", "also of attention", type=float)
    add("--tied", "share the embedding's rows with the output layer; rows of its own learn sooner "
        "and double the parameters of words (default: of lookup and bloom)",
        action=argparse.BooleanOptionalAction)

    add = new_group(
        "Bloom digests", "An item is m hash tokens, alpha items share one. [SB §3.2]")
    add("--alpha", "items that share a token, at most √N (default: 25, superbloom 50)", **count)
    add("--coherent", "maps with items of a page together (default: 0)", type=at_least(0))
    add("--hashes", "m of an item (default: 2), k of a sketch (default: 5)",
        type=at_least(1, maximum=99))

    add = new_group(
        "count-median sketch",
        "A word is the median or mean of one row of each of k blocks [CM], or a weighted sum. [SV]")
    add("--buckets", f"rows, or classes, of a hash function (default: {Config.buckets})", **count)
    add("--weights", f"rows of the table of importance weights (default: {Config.weights:,})",
        **count)

    add = new_group(
        "attention", "lsh: exact scores of the pairs that collide under SimHash alone. [BL §2.1]")
    add("--attn", "full: over all pairs (default: full, or the preset's)", choices=CHOICES["attn"])
    add("--lsh_bands", f"hyperplanes of a hash (default: {Config.lsh_bands}, bert-lsh 2)", **count)
    add("--lsh_buckets", f"buckets of a hash function (default: {Config.lsh_buckets})", **count)
    add("--lsh_hashes", "hash functions; a pair collides if one agrees (default: 1)", **count)
    add("--lsh_fill", "other pairs weigh exp(0), or nothing (default: zero)",
        choices=CHOICES["lsh_fill"])
    add("--lsh_pairs", "all: each pair has its own score; upper: (i, j) and (j, i) share one, as "
        "in the released code (default: all, bert-lsh upper)", choices=CHOICES["lsh_pairs"])
    add("--lsh_redraw", "new hyperplanes in every training step",
        action=argparse.BooleanOptionalAction)

    add = new_group(
        "objective",
        "sr: shuffled and random words. [HF §3.6] mlm: masked words. [BERT §3.1]\n"
        "sampled: mlm over sampled rows. [SB §3.3] hash-mlm: hashes of masked words. [SB §2.4]")
    add("--objective", "mlm and sampled require --emb lookup, hash-mlm any other (default: sr; mlm "
        "or hash-mlm for sketches, sets and presets that predict words)", choices=tuple(OBJECTIVES))
    add("--mask", "share of words masked (default: 0.15, superbloom-small 0.40)", **share)
    add("--noise", "share of words shuffled, and of the others replaced (default: 0.10)", **share)
    add("--short", "share of the training windows of text that are cut to a random length, so that "
        "a model reads sentences, too (default: 0, tiny 0.25)", type=at_least(0, float, 1))
    add("--samples", "rows of the sampled softmax (default: 8,192)", **count)

    add = new_group(
        "training", "Warm-up, then decay: linear [HF Table 4] or inverse square root. [SB §3.2]")
    add("--init_from", "start from weights of another run, whose words and sizes stay")
    add("--batch", "sequences per step, all ranks (default: the preset's)", **count)
    add("--micro", "sequences a device holds at once", **count)
    add("--steps", "optimizer steps; to train a finished run for longer, give its flags, "
        "--init_from and a new --out", **count)
    add("--lr", "peak learning rate", type=at_least(0, float))
    add("--warmup", "steps to the peak (default: the preset's, at most a tenth of --steps)",
        type=at_least(0))
    add("--schedule", "decay (default: linear, superbloom rsqrt)", choices=("linear", "rsqrt"))
    add("--decay", "weight decay of AdamW; 0: Adam (default: 0.01, superbloom and bert-lsh 0)",
        type=at_least(0, float))
    add("--clip", "gradient clipping norm; 0: none (default: 1)", type=at_least(0, float),
        default=1.0)
    add("--seed", "of weights, batches, noise, dropout (default: 0)", type=at_least(0), default=0)

    add = new_group(
        "device and files", "SIGTERM and Ctrl-C save; the same command resumes.")
    add_device_flags(add)
    add("--out", "folder of checkpoints and log (default: out/ and a name from the flags, such as "
        "out/proj-lsh or out/proj-lsh-my_texts)")
    add("--eval_every", "steps between evaluations (default: 1,000)", default=1_000, **count)
    add("--save_every", "steps between checkpoints (default: 1,000)", default=1_000, **count)
    add("--quiet", "print errors alone", action="store_true")
    return parser


def parse_flags(argv=None):
    """Return all settings as a Namespace, and the checkpoint of --init_from or None.

    A setting is a flag or a field of model.Config, most of them both. Without a flag are fields
    that follow from others, such as head, and what only recipes set, such as lr_mlm.
    Its value comes from the command line, else from the run of --init_from, else it is a default:
    the preset's, else that of COMMON, else that of Config. Some follow from others (fill_settings).
    """
    args = build_parser().parse_args(argv)
    flags = {name: value for name, value in vars(args).items() if value is not None}
    start = None
    fixed_settings = flags  # the settings that no default changes
    if args.init_from:
        start = load_checkpoint(args.init_from)
        fixed_settings = read_inherited(start, flags) | flags

    settings = list_defaults(fixed_settings.get("preset", COMMON["preset"])) | fixed_settings
    for name, value in settings.items():
        setattr(args, name, value)
    fill_settings(args, fixed_settings)
    check_flags(args, flags)
    if args.out is None:
        args.out = name_output(args)
    return args, start


def list_defaults(preset):
    """Return dict: setting -> its default with a preset. Of two defaults the later one counts."""
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    defaults |= COMMON
    defaults |= SIZES[preset]
    defaults |= RECIPES[preset]
    return defaults


# With --init_from these come from the other run, as do the preset and the fields of Config
WORDS = ("split", "vocab", "hash", "features", "key", "hash_seed", "alpha", "coherent", "objective")
# These may differ from the other run's: the weights fit all the same
MAY_DIFFER = ("preset", "dropout", "short")


def read_inherited(start, flags):
    """Return the settings that a run takes from the checkpoint of --init_from: sizes and words.

    Data, batch, steps and rates are defaults of its preset, whatever flags the other run had.
    """
    run = start["run"]  # settings of pretrain.py, or results of finetune.py
    names = ("preset", *WORDS)
    if any(name not in run for name in names):
        raise InputError(f"--init_from {flags['init_from']}: expected a checkpoint of pretrain.py.")
    inherited = {name: run[name] for name in names}
    inherited |= start["config"]
    for option in ("emb", "objective", "hash"):
        if inherited[option] not in list_uses()[option]:
            raise InputError(f"--init_from {flags['init_from']}: requires --{option} "
                             f"{inherited[option]}. Register it first, as tests/test_extend.py "
                             "does.")
    for name, value in inherited.items():
        if name in flags and name not in MAY_DIFFER and flags[name] != value:
            raise InputError(f"--{name}: expected {value}, as in --init_from "
                             f"{flags['init_from']}, got {flags[name]}. Remove one of the two "
                             "flags.")
    return inherited


def fill_settings(args, fixed_settings):
    """Set what has no default of its own, since it follows from other settings.

    Args:
        args: Namespace. It is changed in place.
        fixed_settings: dict, settings of the command line and of --init_from, which stay.
    """
    # so far these are of the preset, or of --init_from. Below they become those of this run
    preset_has_order = args.order  # its sequences are texts, not item sets
    preset_predicts_words = args.head != "sr"

    # what a sequence is. Bloom digests are of items
    has_digests = args.emb is not None and EMBEDDINGS[args.emb].code_format == "digest"
    if args.split is None and (has_digests or not preset_has_order):
        args.split = "items"
    args.order = args.split != "items"
    if not args.order:
        for name, value in SETS.items():
            if name not in fixed_settings:
                setattr(args, name, value)

    # what a word is: a table with a row for each word has none for a new one, so it reads pieces.
    # Hashes read whole words, as any word has a hash
    if args.emb is None:
        args.emb = "proj" if args.order else "bloom"
    code_format = EMBEDDINGS[args.emb].code_format
    if args.split is None:
        args.split = "bpe" if code_format == "row" else "regex"
    if args.split == "phrases" and "vocab" not in fixed_settings:
        args.vocab = 1_000_000

    # what is predicted: a set has no order that shuffling could change, so its items are masked
    if args.objective is None:
        predicts_words = preset_predicts_words or not args.order
        args.objective = choose_objective(code_format, predicts_words)
    args.head = OBJECTIVES[args.objective].head

    # sizes and rates
    if "width" in fixed_settings and "ffn" not in fixed_settings:
        args.ffn = 4 * args.width
    if args.head != "sr" and args.lr_mlm is not None and "lr" not in fixed_settings:
        args.lr = args.lr_mlm
    if "warmup" not in fixed_settings:
        args.warmup = min(args.warmup, args.steps // 10)
    # LSH needs a hyperplane for each bit or row. They are the rotations of one random vector of F
    # numbers, of which there are F (hashing.NgramLSH)
    num_hyperplanes = args.rows if code_format == "index" else args.bits
    args.features = max(args.features, num_hyperplanes)


def choose_objective(code_format, predicts_words):
    """Return the default objective of an embedding."""
    if not predicts_words and code_format not in ("digest", "sketch"):
        return "sr"
    if code_format == "row":
        return "mlm"
    return "hash-mlm"


def check_flags(args, flags):
    """Raise InputError for a flag without effect, or flags that contradict each other.

    Args:
        args: Namespace, all settings.
        flags: dict, the flags of the command line.
    """
    used_flags = list_used_flags(args)
    for flag in flags:
        requirement = describe_requirement(flag)
        if requirement and flag not in used_flags:
            raise InputError(f"--{flag} requires {requirement}.")

    code_format = EMBEDDINGS[args.emb].code_format
    for flag in ("buckets", "key"):  # hash-mlm uses them, but not for Bloom digests
        if code_format == "digest" and flag in flags:
            raise InputError(f"--{flag} requires another --emb than {args.emb}, whose buckets "
                             "--alpha and --hash_seed decide.")
    num_maps = 2 if args.hashes is None else args.hashes
    if args.coherent > 0 and (args.split != "items" or args.coherent > num_maps):
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
    names = [field.name for field in dataclasses.fields(Config)]
    return Config(**{name: getattr(args, name) for name in names})


def name_output(args):
    """Return the default --out, such as out/proj-lsh or out/lookup-bpe-mlm.

    It tells apart what runs hash and predict. Of two that differ in sizes or rates alone
    check_same_run refuses the second.
    """
    code_format = EMBEDDINGS[args.emb].code_format
    parts = [args.emb]
    if "hash" in FORMAT_FLAGS[code_format]:
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

# The seed of a step is seed · stride + step. Runs of two seeds share none, if they have fewer steps
# than the stride
SEED_STRIDE = 1_000_003
RANK_STRIDE = 4_099  # the same for ranks


def train(args, start):
    """Train until the last step or a signal; return the last evaluation.

    Args:
        args: Namespace, all settings.
        start: checkpoint of --init_from, or None.
    """
    rank = Rank(args)

    # What --out holds must be of this run. Its flags are compared now, as the data may take hours,
    # and with the data below
    path = os.path.join(args.out, "ckpt.pt")
    identity = identify_run(args, start)
    saved = None
    if os.path.exists(os.path.join(args.out, "settings.json")):
        raise InputError(f"--out {args.out}: expected a folder of pretrain.py, got one of "
                         "finetune.py. Use another --out.")
    if os.path.exists(path):
        saved = load_checkpoint(path)
        check_same_run(saved["run"], identity, path)
        if args.dtype == "auto":
            rank.dtype = saved["dtype"]

    # Data: token IDs on disk, and the hash codes of each distinct word
    with blame_input():
        data = load_data(args, start, rank)

    # Model, objective, optimizer
    torch.manual_seed(args.seed)
    # the corpus has decided the rows of lookup and the buckets of bloom, so args lack them
    model = Model(data.tokenizer.config)
    if start is not None:
        model.load_state_dict(start["model"])
    model.to(rank.device).train()
    model.set_codes(data.codes)
    objective = build_objective(args, data, rank.device)
    groups = parameter_groups(model, args.decay)
    optimizer = torch.optim.AdamW(groups, betas=(0.9, args.beta2), fused=True)

    # Resume: the same command goes on where the checkpoint ends, if it was of the same data
    identity |= identify_data(data)
    if saved is not None:
        check_same_run(saved["run"], identity, path)
    step, best, log_size = restore(saved, model, optimizer)
    saved = None  # gives its memory back
    if step == 0 and rank.is_first:  # of a run that ended before its first ckpt.pt
        remove(os.path.join(args.out, "best.pt"))
    was_finished = step == args.steps

    # Compile, and join the ranks
    if rank.use_compile:
        model.encode = torch.compile(model.encode)
    ddp_model = model
    if rank.world > 1:
        check_same_ranks((step, rank.dtype, identity))
        # takes the mean of the gradients over ranks, while backward still computes others. Codes
        # and hyperplanes, the buffers, are equal on all ranks
        ddp_model = DistributedDataParallel(model, forward_sync_buffers=False)

    # Summary: what is about to run, and the loss that theory expects of an untrained model
    rank.show(describe_model(args, model))
    rank.show(describe_data(data))
    rank.show(describe_training(args, data, rank))
    result, counts = evaluate(model, objective, data, rank)
    num_classes, unigram_loss = objective.expected_loss(data.word_counts, counts)
    uniform_loss = math.log(num_classes)
    first_loss = result["eval_loss"]
    rank.show(f"eval_loss: {result['eval_loss']:.3f} at step {step:,}; uniform baseline "
              f"{uniform_loss:.3f} = ln {num_classes:,}, frequencies alone {unigram_loss:.3f}")
    if step > 0 and not was_finished:
        rank.show(f"Resuming {args.out} at step {step:,}")

    log = Log(args, rank, data.batches.words_per_sequence, step, log_size)
    frequent_words = data.corpus.frequent(50_000)  # candidates of infer.py

    def save(name, **state):
        """Write a checkpoint: what a run needs to go on, and infer.py to do without the data."""
        if rank.is_first:
            save_checkpoint(
                os.path.join(args.out, name), model, data.tokenizer.state(), run=identity,
                dtype=rank.dtype, log_size=os.path.getsize(log.path),
                words=frequent_words, **state)

    # -----------------------------------------------------------------------------
    # Training loop
    max_norm = args.clip if args.clip > 0 else math.inf  # inf: measured, not clipped
    with catch_signals() as signals, log.bar:
        while step < args.steps:
            # Get this rank's share of the batch, and corrupt it
            micro_batches = []
            num_scored = 0
            # rows: a slice, or of item sets an array, since sets of similar size go together
            for rows in data.batches.micro_batch_rows(step, rank.slices):
                batch = data.batches.get_batch(step, rows)
                inputs, labels, count = corrupt(batch, objective, len(data.codes), rank.device)
                micro_batches.append((inputs, labels))
                num_scored += count

            # Add up over ranks: the scored positions of the whole batch, and the signals, so that a
            # signal to one rank stops all of them before the same step
            numbers = rank.sum(torch.tensor([num_scored, len(signals)]))
            num_scored, num_signals = numbers.tolist()
            if num_signals > 0:
                save("ckpt.pt", step=step, best=best, optimizer=optimizer.state_dict())
                break

            # Dropout and sampled rows depend on seed, step and rank alone, so that a resumed run
            # draws the same
            step_seed = args.seed * SEED_STRIDE + step
            torch.manual_seed((step_seed * RANK_STRIDE + rank.number) % 2**63)
            if model.config.lsh_redraw:
                model.redraw_hyperplanes(step_seed)

            # Forward and backward. objective.loss is the sum over the scored positions of a
            # micro-batch. The loss of the step is the mean over those of the whole batch, so each
            # sum is divided by num_scored, and the gradients add up. A mean of means would give a
            # micro-batch with few scored positions too much weight.
            # subtle: DDP takes the mean of the ranks' gradients. Times world it is their sum
            num_scored = max(num_scored, 1)
            scale = rank.world / num_scored
            optimizer.zero_grad()
            total_loss = torch.zeros((), device=rank.device)
            for i, (inputs, labels) in enumerate(micro_batches):
                if rank.world > 1:  # exchange gradients once a step, in the last backward
                    ddp_model.require_backward_grad_sync = i == len(micro_batches) - 1
                with autocast(rank.device, rank.dtype):
                    loss = objective.loss(ddp_model, inputs, labels)
                (loss * scale).backward()
                total_loss += loss.detach()

            # Clip and step
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            lr = learning_rate(args, step)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            step += 1
            log.bar.update()

            # Now and then log, evaluate and save
            is_last = step == args.steps
            is_logged = step % 10 == 0 or is_last
            is_evaluated = step % args.eval_every == 0 or is_last
            is_saved = step % args.save_every == 0 or is_last
            # subtle: a row of the log is about its own step alone. What adds up over steps would
            # have to be in ckpt.pt, or a resumed run would write other rows
            if is_logged:  # until then the loss stays on the device: to read it the host waits
                mean_loss = rank.sum(total_loss).item() / num_scored
                log.write_training(step, mean_loss, lr, norm.item())
            if is_evaluated:
                result, _ = evaluate(model, objective, data, rank)
                log.write(step, result)
                if result["eval_loss"] < best:
                    best = result["eval_loss"]
                    save("best.pt", step=step, best=best)
                metrics = ", ".join(f"{name} {value:.3f}" for name, value in result.items())
                rank.show(f"step {step:,}: {metrics}")
            if is_saved:
                save("ckpt.pt", step=step, best=best, optimizer=optimizer.state_dict())
            if is_logged or is_evaluated or is_saved:
                log.restart_clock(step)

    # -----------------------------------------------------------------------------
    # End
    if rank.world > 1:
        dist.barrier()  # subtle: a rank that leaves early aborts the others, which still send
    if step < args.steps:
        rank.show(f"Interrupted at step {step:,}; saved {path}. Rerun the same command to resume, "
                  "bit for bit on the same device, ranks, threads and --micro.")
        number = signals[0] if signals else signal.SIGTERM  # of another rank
        raise SystemExit(128 + number)
    if was_finished:
        rank.show(f"Finished before, at step {step:,}: {path}. For more steps use the same flags "
                  f"with --init_from {args.out} and another --out.")
    else:
        rank.show(f"Saved {path}, and the lowest loss in best.pt: eval_loss {best:.3f}")
    if "majority" in result and result["accuracy"] <= result["majority"]:  # of Shuffle+Random
        rank.show("warning: no more accurate than to call each word intact. Use more --steps, or "
                  "more text.")
    elif result["eval_loss"] >= unigram_loss:
        rank.show("warning: no better than frequencies alone. Use more --steps, or more text.")
    if args.init_from and best > first_loss:
        rank.show(f"warning: eval_loss was lower before, {first_loss:.3f}. Try a lower --lr.")
    if rank.is_first:
        rank.show(draw_losses(args.out, uniform_loss, unigram_loss))
    rank.show(f"Next: python infer.py --ckpt {args.out}")
    return result


# -----------------------------------------------------------------------------
# What a step calls


def corrupt(batch, objective, num_ids, device):
    """Return inputs and labels, int64 (B, L) on the device, and how many labels are scored."""
    ids, noise, random_words = batch
    ids = ids.masked_fill(ids >= num_ids, UNK)  # words outside a fixed vocabulary
    inputs, labels = objective.corrupt(ids, noise, random_words)
    num_scored = int((labels != IGNORE_INDEX).sum())  # on the host: no wait for a GPU
    if device.type == "cuda":  # nor for a copy from pinned memory
        inputs = inputs.pin_memory()
        labels = labels.pin_memory()
    inputs = inputs.to(device, non_blocking=True)
    labels = labels.to(device, non_blocking=True)
    return inputs, labels, num_scored


def learning_rate(args, step):
    """Return a step's rate: warm-up to --lr, then linear [HF Table 4] or rsqrt decay. [SB §3.2]"""
    rise = (step + 1) / max(args.warmup, 1)  # 1 at the end of the warm-up
    # fall is at least 1 during the warm-up, so that min takes rise
    if args.schedule == "linear":
        fall = (args.steps - step) / max(args.steps - args.warmup, 1)
    elif args.schedule == "rsqrt":
        fall = rise**-0.5
    else:
        raise ValueError(f"schedule: expected linear or rsqrt, got {args.schedule!r}.")
    return args.lr * min(rise, fall)


@torch.no_grad()
def evaluate(model, objective, data, rank):
    """Return loss and metrics of the held-out sequences, a dict, and the metrics' counts."""
    model.eval()
    rows = np.array_split(np.arange(data.batches.num_eval), rank.world)[rank.number]
    # loss, scored positions, and the metrics' counts, all of which add up over batches and ranks
    sums = torch.zeros(2 + objective.num_counts, dtype=torch.float64)  # on the host
    for i in range(0, len(rows), rank.micro):
        batch = data.batches.eval_batch(rows[i:i + rank.micro])
        inputs, labels, num_scored = corrupt(batch, objective, len(data.codes), rank.device)
        with autocast(rank.device, rank.dtype):
            loss, counts = objective.evaluate(model, inputs, labels)
        sums[0] += loss.item()
        sums[1] += num_scored
        sums[2:] += counts.cpu()
    model.train()

    total_loss, total_scored, *total_counts = rank.sum(sums).tolist()
    if total_scored == 0:
        raise InputError("--data: expected words to predict in the held-out text, got none. "
                         "Use more text or a larger --mask.")
    result = dict(eval_loss=total_loss / total_scored, **objective.metrics(total_counts))
    return result, total_counts


# -----------------------------------------------------------------------------
# Ranks


class Rank:
    """This process: one of `world` that train together. torchrun starts one for each GPU.

    Attributes:
        number: int, 0 .. world - 1. Rank 0 is the first one, and it alone prints and writes.
        world: int, 1 without torchrun.
        device: torch.device.
        dtype: "float32" or "bfloat16", of matrix products.
        use_compile: bool.
        micro: int, the most sequences of a micro-batch.
        slices: list[slice]. Of the rows of a batch each rank has an equal share, in micro-batches.
            Of a batch of 8, rank 1 of 2 with --micro 3 has the rows 4 to 6, and 7.
    """

    def __init__(self, args):
        self.number, self.world, local_rank = read_ranks()
        self.device, self.dtype, self.use_compile = resolve_device(args, local_rank)
        self.is_first = self.number == 0
        self.is_quiet = args.quiet or not self.is_first
        if args.batch % self.world != 0:
            raise InputError(f"--batch: expected a multiple of {self.world} ranks, got "
                             f"{args.batch}.")
        if self.world > 1:
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            patience = datetime.timedelta(hours=12)  # one node may prepare the corpus for hours
            dist.init_process_group(backend, timeout=patience)

        share = args.batch // self.world
        self.micro = min(args.micro, share)
        start = share * self.number
        end = start + share
        self.slices = [slice(i, min(i + self.micro, end)) for i in range(start, end, self.micro)]

    def show(self, text):
        """Print a text above the progress bar, on the first rank and without --quiet."""
        if not self.is_quiet:
            with contextlib.suppress(OSError):  # a reader that has left does not end a run
                tqdm.write(text)

    def sum(self, numbers):
        """Return the sum of every rank's tensor; of one rank it is the tensor itself."""
        if self.world > 1:
            numbers = numbers.to(self.device)
            dist.all_reduce(numbers)
        return numbers


# -----------------------------------------------------------------------------
# Resuming

# A run may be resumed with other values of these. Instead of --data its content is compared, and of
# --init_from also the step
FREE = ("data", "field", "encoding", "sep", "cache", "out", "device", "dtype", "compile", "micro",
        "eval_every", "save_every", "quiet", "init_from")


def identify_run(args, start):
    """Return a dict of the flags that decide the weights, and of the run that they start from."""
    identity = {name: value for name, value in vars(args).items() if name not in FREE}
    identity["init_from"] = None
    if start is not None:
        identity["init_from"] = f"{os.path.normpath(args.init_from)} at step {start['step']}"
    return identity


def identify_data(data):
    """Return what identify_run lacks, and is known once the data is here."""
    identity = dict(corpus=data.corpus.meta["digest"])
    if data.tokenizer.bloom_map is not None:
        identity["bloom"] = data.tokenizer.bloom_map.checksum()
    return identity


def check_same_run(old, new, path):
    """Raise InputError where the checkpoint in --out is of another run.

    Args:
        old: dict, identity of the run in the checkpoint.
        new: dict, identity of this run. What it lacks, such as the corpus, is not compared.
        path: str, of the checkpoint.
    """
    changes = []
    for name in sorted(new):
        if old.get(name) == new[name]:
            continue
        if name == "corpus":
            changes.append("the text of --data was changed")
        else:
            changes.append(f"{name} was {old.get(name)} and is {new[name]}")
    if changes:
        raise InputError(f"{path}: expected a checkpoint of this run, got another: "
                         f"{'; '.join(changes)}. Use another --out. There --init_from "
                         f"{os.path.dirname(path)} starts from these weights, of the same sizes.")


def check_same_ranks(state):
    """Raise InputError unless `state`, of plain types, is equal on all ranks."""
    states = gather_from_ranks(state)
    if any(other != states[0] for other in states):
        raise InputError("--out, --cache: expected a folder that all nodes see, got ranks that "
                         "differ in steps, data, hashes or dtypes.")


def restore(saved, model, optimizer):
    """Load a checkpoint, or None, into model and optimizer; return where the run goes on.

    Returns:
        step: int.
        best: float, the lowest eval_loss so far.
        log_size: int, bytes of the log when the checkpoint was saved.
    """
    if saved is None:
        return 0, math.inf, 0
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["step"], saved["best"], saved["log_size"]


# -----------------------------------------------------------------------------
# Data


@dataclasses.dataclass
class Data:
    """What a run reads.

    Attributes:
        corpus: Corpus, the token IDs of the text.
        tokenizer: HashTokenizer. Its config is that of the model.
        codes, targets: tensors with a row for each known token ID, as of build_codes. Of a fixed
            vocabulary, later IDs are unknown words.
        word_counts: int array, how often each known word occurs.
        batches: TextBatches or ItemSetBatches.
    """

    corpus: Corpus
    tokenizer: HashTokenizer
    codes: torch.Tensor
    targets: torch.Tensor
    word_counts: np.ndarray
    batches: Batches


def load_data(args, start, rank):
    """Return the Data of a run; what takes long is done once and kept in --cache."""
    folder = prepare(args.data, args.split, args.cache, args.vocab, rank.is_quiet, args.field,
                     **reader_options(args))
    corpus = Corpus(folder)
    if start is None:
        tokenizer = build_tokenizer(args, build_config(args), corpus)
    else:
        tokenizer = HashTokenizer.load(start["tokenizer"], build_config(args))
        check_vocabulary(args, tokenizer, corpus)
    codes, targets = build_codes(args, tokenizer, corpus)
    word_counts = corpus.counts[FIRST_WORD_ID:len(codes)]
    batches = build_batches(args, tokenizer.config, corpus, word_counts)
    return Data(corpus, tokenizer, codes, targets, word_counts, batches)


def check_vocabulary(args, tokenizer, corpus):
    """Raise InputError unless the token IDs of --init_from are those of the corpus."""
    pieces = getattr(tokenizer.subwords, "json", None)  # of BPE or phrases
    corpus_pieces = getattr(corpus.subwords, "json", None)
    corpus_words = corpus.words[:len(tokenizer.words)]  # none, where words are hashed
    if pieces != corpus_pieces or tokenizer.words != corpus_words:
        raise InputError(f"--init_from {args.init_from}: requires the pieces and words of its own "
                         f"corpus, got those of --data {args.data}. Use the same --data, or hashed "
                         "whole words.")


def build_batches(args, config, corpus, word_counts):
    """Return the batches of a corpus: windows of text, or segments of item sets."""
    # random words are drawn from those that occur; some pieces of BPE do not
    occurring_words = FIRST_WORD_ID + np.flatnonzero(word_counts)
    options = dict(length=config.length, batch_size=args.batch, word_ids=occurring_words,
                   seed=args.seed)
    if config.order:
        return TextBatches(corpus.ids, first_id=CLS, last_id=SEP, short=config.short, **options)
    train_pages, eval_pages = corpus.split_pages()
    limits = (FIRST_WORD_ID, FIRST_WORD_ID + len(word_counts))
    return ItemSetBatches(corpus.ids, corpus.offsets, train_pages, eval_pages, limits=limits,
                          **options)


def build_objective(args, data, device):
    """Return the objective of --objective, with all that any objective may ask for."""
    return OBJECTIVES[args.objective](
        data.tokenizer.config, mask_rate=args.mask, noise_rate=args.noise, mask_id=MASK,
        first_word_id=FIRST_WORD_ID, targets=data.targets.to(device),
        bloom_map=data.tokenizer.bloom_map, num_samples=args.samples)


# -----------------------------------------------------------------------------
# What is printed and logged


def describe_model(args, model):
    """Return the lines of the summary about the model."""
    c = model.config
    size = count_parameters(model)
    return (f"model: emb {args.emb}, split {args.split}, objective {args.objective}, "
            f"{c.layers} layers, width {c.width}, length {c.length}, attention {args.attn}\n"
            f"parameters: {size['total']:,}; embedding {size['embedding']:,} "
            f"(PoEP {100 * size['poep']:.2f} %)")


def describe_data(data):
    """Return the lines of the summary about the corpus, and the Bloom map if there is one."""
    text = ("corpus: {data}, {words:,} words, {distinct:,} distinct, {documents:,} documents"
            .format(**data.corpus.meta))
    text += f"; {data.batches.num_eval:,} held-out sequences"
    bloom_map = data.tokenizer.bloom_map
    if bloom_map is not None:
        num_rows = bloom_map.m * data.tokenizer.config.buckets
        text += (f"\nBloom map: {bloom_map.n_items:,} items in {bloom_map.m} maps of "
                 f"{bloom_map.buckets:,} buckets of {bloom_map.alpha}; with special tokens "
                 f"{num_rows:,} rows")
    return text


def describe_training(args, data, rank):
    """Return the lines of the summary about the steps and the device."""
    epochs = args.steps / data.batches.steps_per_epoch
    text = (f"batch: {args.batch} = {rank.world} ranks × {len(rank.slices)} micro-batches "
            f"of at most {rank.micro}\n"
            f"steps: {args.steps:,} = {epochs:.1f} epochs, lr {args.lr:g}, warm-up "
            f"{args.warmup:,}\n")
    if epochs > 20:
        text += ("warning: more than 20 epochs. Use fewer --steps or more text; best.pt is the "
                 "best.\n")
    text += (f"device: {rank.device}, {rank.dtype}, compile {rank.use_compile}, torch "
             f"{torch.__version__}, seed {args.seed}")
    return text


class Log:
    """What a run says while it trains: log.jsonl, the progress bar, and the speed.

    Args:
        args: Namespace.
        rank: Rank. The first one alone writes and prints.
        words_per_sequence: float, to turn the time of steps into words per second.
        step: int, where the run begins or goes on.
        size: int, bytes of the log at that step. What follows is cut: these steps run again.
    """

    def __init__(self, args, rank, words_per_sequence, step, size):
        self.args = args
        self.rank = rank
        self.words_per_step = args.batch * words_per_sequence
        self.path = os.path.join(args.out, "log.jsonl")
        if rank.is_first:
            with open(self.path, "a") as file:
                file.truncate(min(size, file.tell()))
        no_bar = True if rank.is_quiet else None  # None: if stderr is no terminal
        self.bar = tqdm(total=args.steps, initial=step, unit="step", disable=no_bar)
        self.restart_clock(step)
        self.last_shown = self.start

    def restart_clock(self, step):
        """Measure the speed of the steps from this one on.

        Evaluating and saving are no part of it. They also wait for steps that are in the queue of a
        GPU, so after them the clock measures new steps alone.
        """
        self.start = time.perf_counter()
        self.start_step = step

    def write(self, step, numbers):
        """Append a row to the log, with six digits. All ranks have the same numbers, a dict."""
        row = dict(step=step)
        for name, value in numbers.items():
            if not math.isfinite(value):
                raise InputError(f"--lr: expected finite numbers in step {step}, got {name} "
                                 f"{value}. What {self.args.out} holds is older. Try a lower --lr.")
            row[name] = float(f"{value:.6g}")
        if self.rank.is_first:
            with open(self.path, "a") as file:
                file.write(json.dumps(row) + "\n")

    def write_training(self, step, loss, lr, grad_norm):
        """Write a row about training with its speed, and show it behind the bar.

        Where no terminal shows the bar, a line each 30 seconds says the same, and the time left.
        """
        seconds = (time.perf_counter() - self.start) / (step - self.start_step)  # of a step
        words_per_s = self.words_per_step / seconds
        self.write(step, dict(loss=loss, lr=lr, grad_norm=grad_norm, words_per_s=words_per_s,
                              ms_per_sample=1000 * seconds / self.args.batch))
        text = f"loss {loss:.3f}, {words_per_s:,.0f} words/s"
        self.bar.set_postfix_str(text)
        if self.bar.disable and time.perf_counter() > self.last_shown + 30:
            steps = self.args.steps
            time_left = tqdm.format_interval((steps - step) * seconds)
            self.rank.show(f"step {step:,} of {steps:,}: {text}, {time_left} left")
            self.last_shown = time.perf_counter()


# -----------------------------------------------------------------------------
# Start


def pretrain(argv):
    """Parse the flags, hold --out, and train; return the last evaluation."""
    args, start = parse_flags(argv)
    rank_number, _, _ = read_ranks()
    # first: another run may be saving the checkpoint there
    with lock_output(args.out, rank_number):
        return train(args, start)


def main(argv=None):
    """Train as argv says (default: the command line); return the last evaluation."""
    return run_script("pretrain.py", pretrain, argv)


if __name__ == "__main__":
    main()
