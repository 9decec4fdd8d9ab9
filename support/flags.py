"""Settings of pretrain.py: its flags, and where the value of a setting comes from.

    args, initial = parse_flags(["--emb", "pool", "--steps", "500"])

A setting is a flag, a field of model.Config, or both. Where several of these set it, the first one
counts: its flag, the checkpoint of --init_from, other settings that it follows from, the preset,
its default. choose_settings has this order. Nothing changes a setting after parse_flags.

Out of scope: the flags of finetune.py (support/finetune_flags.py) and infer.py, which defines them.
"""

import argparse
import dataclasses
import os
from pathlib import Path

import torch

from data.coders import CODERS, SketchCoder
from data.rows import add_reader_flags
from data.sources import HUB, SOURCES, name_data
from data.splitters import SPLITS, SUBWORDS
from embeddings import EMBEDDINGS
from hashing import HASHES
from model import HEADS, PRESETS, Config, Model
from objectives import OBJECTIVES
from support.common import InputError, Ranks, add_device_flags, at_least, blame, find_checkpoint
from support.common import load_checkpoint, make_parser
from support.config import CHOICES

# All settings: the fields of Config, also those without a flag (head, order, grams), and the rest,
# in the groups of --help; max_alpha, lr_mlm and beta2 have no flag. batch, micro, steps, lr and
# warmup are not here: every preset for pretrain.py sets them. None: chosen later, or off
DEFAULTS = {field.name: field.default for field in dataclasses.fields(Config)} | dict(
    # words
    data="python",
    split=None,
    field=None,
    encoding=None,
    sep=None,
    header=None,
    vocab=50_000,
    cache="cache",
    # hashes
    hash="lsh",
    features=50_000,
    key=None,
    hash_seed=0,
    # model, Bloom digests
    preset="tiny",
    emb=None,
    alpha=None,
    max_alpha=4,
    coherent=0,
    # objective
    objective=None,
    mask=0.15,
    noise=0.10,
    samples=8_192,
    short=0.0,
    # training, device and files
    init_from=None,  # a path, and after parse_flags also the step of its checkpoint
    lr_mlm=None,
    schedule="linear",
    decay=0.01,
    beta2=0.999,
    clip=1.0,
    seed=0,
    device="auto",
    dtype="auto",
    compile=None,
    workers=None,
    out=None,
    eval_every=1_000,
    save_every=1_000)
DATA_OF_SETS = "python-names"  # in place of the default of data
# With --init_from these settings come from the other run, as the fields of Config do
INHERITED = "preset split vocab hash features key hash_seed coherent objective".split()
# These may change when a run resumes, and all others must not. The digest of the corpus and the
# alpha of the Bloom map stand for those of the first line: the same text may lie elsewhere
MAY_CHANGE = (
    "data field encoding sep header cache alpha max_alpha "
    "out device dtype compile micro workers eval_every save_every").split()


def parse_flags(argv=None, doc=""):
    """Return all settings as a Namespace, and the checkpoint of --init_from or None."""
    flags = vars(build_parser(doc).parse_args(argv))  # only those on the command line
    initial = None
    inherited = {}
    if "init_from" in flags:
        initial = load_checkpoint(flags["init_from"])
        inherited = inherit_settings(initial, flags)
    args = choose_settings(flags, inherited)
    check_flags(args, flags)
    if args.out is None:
        args.out = name_output(args)
    if initial is not None:
        source = Path(find_checkpoint(args.init_from)).parent
        if source.resolve() == Path(args.out).resolve():  # it would be overwritten
            raise InputError(f"--out {args.out}: expected another folder than that of --init_from, "
                             "got the same. Use another --out.")
        # which weights these are: what a checkpoint keeps, and a resumed run compares
        args.init_from = f"{os.path.normpath(args.init_from)} at step {initial['step']}"
    ranks = Ranks()
    if args.batch % ranks.world != 0:
        raise InputError(f"--batch: expected a multiple of {ranks.world} ranks, got {args.batch}.")
    args.micro = min(args.micro, args.batch // ranks.world)
    return args, initial


def inherit_settings(initial, flags):
    """Return what the checkpoint of --init_from decides, a dict: the model, hashes and words.

    It does not decide about data, batch, steps and rates, which are those of its preset.
    """
    run = initial["run"]  # settings of pretrain.py, or results of finetune.py
    source = f"--init_from {flags['init_from']}"
    if any(name not in run for name in INHERITED):
        raise InputError(f"{source}: expected a checkpoint of pretrain.py.")
    with blame(source):
        inherited = dataclasses.asdict(Config.load(initial["config"]))
    kinds = dict(preset=PRESETS, split=SPLITS, hash=HASHES, objective=OBJECTIVES)
    for name in INHERITED:
        inherited[name] = run[name]
        if name in kinds and run[name] not in kinds[name]:  # another version had it
            raise InputError(f"{source}: expected a {name} of {', '.join(kinds[name])}, got "
                             f"{run[name]}.")
    if "alpha" in run:  # it has a Bloom map
        inherited["alpha"] = run["alpha"]
    for name, value in flags.items():
        if name in ("preset", "dropout"):  # the weights fit all the same
            continue
        if name in inherited and value != inherited[name]:
            difference = f"got {value}, there {inherited[name]}"
            if name == "key":  # a secret is not printed
                difference = "got another"
            raise InputError(f"--{name}: expected that of {source}, {difference}. Remove one of "
                             "the two flags.")
    return inherited


def choose_settings(flags, inherited):
    """Return all settings as a Namespace.

    Args:
        flags: dict, those on the command line.
        inherited: dict, what inherit_settings returns; {} without --init_from.
    """
    fixed = inherited | flags
    preset = PRESETS[fixed.get("preset", DEFAULTS["preset"])]
    wishes = DEFAULTS | preset | fixed
    method = choose_method(argparse.Namespace(**wishes))
    args = argparse.Namespace(**wishes | method)
    derived = derive_settings(args, fixed)
    vars(args).update(derived | fixed)
    return args


def find_coder(emb):
    """Return the class of data.coders.CODERS whose codes an embedding reads."""
    return CODERS[EMBEDDINGS[emb].code_format]


def choose_method(wish):
    """Return emb, split and objective, and order and head, which follow from them, a dict.

    wish: Namespace, where the first three may be None. Its order and head are those of the preset,
        or of the checkpoint.
    """
    # 1. emb follows from --split; presets of sets have one
    emb = wish.emb
    if emb is None:
        emb = "bloom" if wish.split == "items" else "proj"
    coder = find_coder(emb)
    # 2. split follows from the preset's order, or else from emb
    split = wish.split
    if split is None:
        split = coder.default_split if wish.order else "items"
    order = split != "items"
    # 3. objective follows from both, and from the preset's head; a set has no order to shuffle
    objective = wish.objective
    if objective is None:
        objective = coder.masked_objective
        if wish.head == "sr" and order and not coder.is_predicted:
            objective = "sr"
    head = OBJECTIVES[objective].head
    return dict(emb=emb, split=split, order=order, objective=objective, head=head)


def derive_settings(args, fixed):
    """Return sizes and rates that follow from other settings, a dict.

    Args:
        args: Namespace, with the result of choose_method.
        fixed: dict, flags and what the checkpoint of --init_from decides.
    """
    derived = dict(warmup=min(args.warmup, args.steps // 10))
    if EMBEDDINGS[args.emb].code_format == "index":
        derived["features"] = max(args.features, args.rows)
    if args.split == "phrases":
        derived["vocab"] = 1_000_000
    if args.split == "items":  # sets are short, and replace what the preset says of texts
        # lsh_pairs upper would give a pair one score, by the order of its items: sets have none
        derived.update(data=DATA_OF_SETS, vocab=None, length=32, lsh_pairs="all", short=0.0)
    if "width" in fixed:
        derived["ffn"] = 4 * args.width
    if HEADS[args.head].predicts_rows and args.lr_mlm is not None:
        derived["lr"] = args.lr_mlm
    return derived


def list_conditional():
    """Return the flags that some settings do not read, a set: check_flags refuses them there."""
    flags = {"short"}
    for objective in OBJECTIVES.values():
        flags.update(objective.options)
    for coder in CODERS.values():
        for hash_class in HASHES.values():
            flags |= coder.list_flags(hash_class)
    return flags


def check_flags(args, flags):
    """Raise InputError for settings that contradict each other, or flags that have no effect.

    Args:
        args: Namespace, all settings.
        flags: dict, those on the command line.
    """
    code_format = EMBEDDINGS[args.emb].code_format
    coder = find_coder(args.emb)
    hash_class = HASHES[args.hash]
    effective = coder.list_flags(hash_class)
    if args.head == "hash-mlm" and not coder.is_predicted:  # it predicts the buckets of a sketch
        effective |= SketchCoder.list_flags(hash_class)
    if args.split in SUBWORDS:
        effective.add("vocab")
    if args.order:
        effective.add("short")
    effective.update(OBJECTIVES[args.objective].options)
    conditional = list_conditional()
    for name in flags:
        if name in conditional and name not in effective:
            raise InputError(f"--{name} requires other settings than --emb {args.emb}, --hash "
                             f"{args.hash}, --split {args.split} and --objective "
                             f"{args.objective}, which do not read it. --help says which.")
    num_hyperplanes = args.rows if code_format == "index" else args.bits
    if "features" in effective and args.features < num_hyperplanes:
        raise InputError(f"--features: expected {num_hyperplanes:,} at least, as many as --bits, "
                         f"or --rows of --emb emb, got {args.features:,}.")
    for name in flags:
        if name.startswith("lsh_") and args.attn != "lsh":
            raise InputError(f"--{name} requires --attn lsh.")
    with blame(), torch.device("meta"):
        config = Config.choose(vars(args))
        Model(config)  # raises where sizes do not fit each other, and takes no memory
    if args.coherent > 0:
        if code_format != "digest" or args.order or args.coherent > config.hashes:
            raise InputError("--coherent requires --emb bloom over item sets, and at most as many "
                             f"as --hashes, got {args.coherent}.")


def name_output(args):
    """Return the default --out, such as out/proj-lsh: --emb, and what differs from the usual."""
    coder = find_coder(args.emb)
    parts = [args.emb]
    if "hash" in coder.list_fields():
        parts.append(args.hash)
    if args.split != "regex":
        parts.append(args.split)
    # What is usual depends on the code format alone, not on the preset: --preset median is named
    # "median", and bert-lsh, whose objective is mlm, "lookup-bpe-mlm"
    usual_objective = "hash-mlm" if coder.is_predicted else "sr"
    if args.objective != usual_objective:
        parts.append(args.objective)
    if args.attn == "lsh":
        parts.append("lsh-attention")
    if args.data != (DEFAULTS["data"] if args.order else DATA_OF_SETS):
        parts.append(name_data(args.data))
    name = "-".join(parts)
    return f"out/{name}"  # on Windows too, as finetune.py and all pages write it


def list_methods(field):
    """Return the names of --emb whose codes depend on a field, str."""
    return ", ".join(emb for emb in EMBEDDINGS if field in find_coder(emb).list_fields())


def list_tied():
    """Return the names of --emb whose rows are those of the output layer, too, str."""
    return ", ".join(emb for emb in EMBEDDINGS if EMBEDDINGS[emb].tie == "yes")


def list_objectives(flag):
    """Return the names of --objective that read a flag, str."""
    return ", ".join(name for name in OBJECTIVES if flag in OBJECTIVES[name].options)


def build_parser(doc=""):
    """Return the parser of all flags, without defaults: choose_settings merges them.

    doc: str, a docstring; its beginning is the text above the flags in --help.
    """
    parser = make_parser(
        "pretrain.py", doc,
        argument_default=argparse.SUPPRESS,  # what is not typed is not in the result
        usage="python pretrain.py [flags]        (--help explains them)",
        epilog="Sections of the papers: [HF] HashFormers, [SB] Superbloom, [CM] count-median "
        "sketch, [SV] hash embeddings, [BL] BERT-LSH, [BERT] BERT. Formats: docs/operations.md")
    defaults = DEFAULTS | PRESETS[DEFAULTS["preset"]]
    positive = at_least(1)
    natural = at_least(0)
    rate = at_least(0, float)
    probability = at_least(0, float, 1)
    share = at_least(0.001, float, 0.999)

    def add(flag, help, kind=positive):
        """Add a flag. kind: its choices, bool, or a type as in argparse."""
        if kind is bool:
            options = dict(action=argparse.BooleanOptionalAction)
        elif callable(kind):
            options = dict(type=kind)
        else:
            options = dict(choices=kind)
        action = group.add_argument(flag, **options)  # subtle: to the latest group below
        default = defaults[action.dest]
        action.help = help if default is None else f"{help} (default: {default})"

    group = parser.add_argument_group("words: every distinct word gets an ID [HF §3.1]")
    add("--data", f"{', '.join((*SOURCES, *HUB))}, a file, a folder, or a hub ID "
        "owner/name:CONFIG:SPLIT; several joined by +", str)
    add("--split", f"what a word is; {' and '.join(SUBWORDS)} learn --vocab pieces, items are "
        "those of sets (default: that of --emb or --preset)", SPLITS)
    add("--field", "column of text or lists, or SET,ITEM for item sets (default: text, or the only "
        "one)", str)
    add_reader_flags(group.add_argument)
    add("--vocab", "BPE pieces, or rows of lookup; phrases default to 1,000,000, items to all")
    add("--cache", "folder of prepared corpora; one serves all hashes", str)

    group = parser.add_argument_group(f"hashes, for --emb {list_methods('hash')}")
    add("--hash", "md5: random bits [HF §3.2]; lsh: words with equal n-grams get similar bits "
        "[HF §3.3]", HASHES)
    add("--bits", "T, bits of a word's hash", at_least(8, maximum=1 << 16))
    add("--chunk", f"bits of a chunk of {list_methods('chunk')}")
    add("--features", "n-grams that lsh keeps, at least --bits or --rows")
    add("--key", "secret key of md5 and of sketches (default: none)", str)
    add("--hash_seed", "seed of all hashes but md5", natural)

    group = parser.add_argument_group("model: a post-LN transformer over embedded words [HF §4.2]")
    presets = [name for name in PRESETS if "steps" in PRESETS[name]]  # others: finetune.py
    add("--preset", "sizes and recipe of a paper, or ours for two cores: defaults of other flags. "
        f"This help shows those of {defaults['preset']}", presets)
    add("--emb", "how a word becomes a vector, a class of embeddings.py (default: the preset's, "
        "else proj, or bloom for item sets)", EMBEDDINGS)
    add("--layers", "encoder layers; 0 sees one word at a time", at_least(0, maximum=1_000))
    add("--width", "hidden size d", at_least(1, maximum=1 << 20))  # so that 64 bits count all bytes
    add("--heads", "attention heads")
    add("--ffn", "feed-forward size; 4 d if --width is given")
    add("--length", "positions, [CLS] and [SEP] included", at_least(2))
    add("--rows", f"hash buckets of {list_methods('rows')}")
    add("--dropout", "dropout rate, of attention weights too unless --attn lsh", probability)
    add("--tied", "share the rows of the embedding with the output layer (default: with "
        f"{list_tied()})", bool)

    group = parser.add_argument_group("Bloom digests [SB §3.2] and sketches [CM] [SV]")
    add("--alpha", f"items that share a token of {list_methods('bloom_map')} (default: "
        f"{defaults['max_alpha']}; fewer for few items)")
    add("--coherent", "how many of the --hashes Bloom maps put items of a page together", natural)
    add("--hashes", "m hashes of an item (default: 2), or k of a sketch (default: 5)",
        at_least(1, maximum=99))
    add("--buckets", f"rows, or classes, of a hash function of {list_methods('buckets')} and "
        "hash-mlm")
    add("--weights", f"rows of the importance table of {list_methods('weights')}")

    group = parser.add_argument_group(
        "attention: dense, or with scores for the pairs that collide alone [BL §2.1]")
    add("--attn", "full: dense; lsh: with the flags below", CHOICES["attn"])
    add("--lsh_bands", "hyperplanes of a hash function")
    add("--lsh_buckets", "buckets of a hash function")
    add("--lsh_hashes", "hash functions; a pair collides if one agrees")
    add("--lsh_fill",
        "score of pairs that do not collide: zero: 0 before the softmax; mask: no weight",
        CHOICES["lsh_fill"])
    add("--lsh_pairs",
        "all: each pair has its own score; upper: (i, j) and (j, i) share one, as released",
        CHOICES["lsh_pairs"])
    add("--lsh_redraw", "new hyperplanes in every training step", bool)

    group = parser.add_argument_group("objective")
    add("--objective", "sr: find shuffled and random words [HF §3.6]; mlm, sampled: predict masked "
        "words of lookup [BERT §3.1] [SB §3.3]; hash-mlm: predict hashes of masked words [SB §2.4] "
        "(default: sr; mlm or hash-mlm for sketches, item sets and presets that predict words)",
        OBJECTIVES)
    add("--mask", f"share of words masked, for {list_objectives('mask')}", share)
    add("--noise", "share of words shuffled, and of the others replaced, for "
        f"{list_objectives('noise')}", share)
    add("--samples", f"rows of the softmax of {list_objectives('samples')}")
    add("--short", "share of text windows cut in training, as short texts", probability)

    group = parser.add_argument_group("training, device and files")
    add("--init_from", "start from weights of another run, whose words and sizes stay; keep its "
        "checkpoint until this run ends", str)
    add("--batch", "sequences per step, all ranks")
    add("--micro", "sequences a device holds at once")
    add("--steps", "optimizer steps; for more of them, later, --init_from and a new --out")
    add("--lr", "peak learning rate", rate)
    add("--warmup", "steps to the peak; at most a tenth of --steps by default", natural)
    add("--schedule", "decay of the rate [HF Table 4] [SB §3.2]", ("linear", "rsqrt"))
    add("--decay", "weight decay of AdamW; 0: Adam", rate)
    add("--clip", "gradient clipping norm; 0: none", rate)
    add("--seed", "seed of weights, batches, noise and dropout", natural)
    add_device_flags(group.add_argument)
    add("--workers", "processes that make batches (default: 4 for a GPU, else 0)", natural)
    add("--out", "folder of checkpoints and log (default: out/ and a name, as out/proj-lsh)", str)
    add("--eval_every", "steps between evaluations")
    add("--save_every", "steps between checkpoints")
    return parser
