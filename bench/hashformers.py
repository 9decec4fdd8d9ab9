"""HashFormers: parameters of the paper's table, speed of hashing, scores on GLUE.

`counts` compares our parameters with those that the paper prints. `hashing` measures times. `glue`
trains every variant with the same budget and seeds and compares their scores, mean ±
standard deviation over seeds. The ± of an average has no sampling error of the tasks' rows. The
column `paper` is the average of the paper's eight tasks.

    python -m bench.hashformers counts           or hashing
    python -m bench.hashformers glue --steps 2000 --data_dir glue/    four hours
    python -m bench.hashformers collect --runs out/proj-lsh-?          fine-tuned by other commands
"""

import functools
import statistics
from pathlib import Path

import finetune
import hashing
from baselines import canine
from bench import harness
from bench.harness import Stopwatch, made_up_words
from model import PRESETS, Config
from support.common import InputError, read_json
from tokenizer import make_tokenizer
from words import list_words

COUNTS = """
    model                | name          | s
    embedding            | embedding     | ,
    with the word row    | with_word     | ,
    paper prints         | printed       | s
    total                | total         | ,
    paper prints         | printed_total | s
    in the authors' code | authors       | ,
    PCR all %            | pcr_all       | .1f
    PCR emb %            | pcr_emb       | .1f
    PoEP %               | poep          | .1f
                         | note          | s
"""
# name, emb, rows, printed embedding, printed total, rows more in the authors' code, note
PAPER_MODELS = (
    ("lookup 50K (BERT)", "lookup", 50_265, "38.6M", "124.6M", 0, ""),
    ("emb 50K", "emb", 50_260, "38.6M", "124.6M", 0, ""),
    ("emb 1K", "emb", 1_038, "797.2K", "86.8M", -5,
     "theirs: the specials are among the rows"),
    ("pool", "pool", 1, "797.2K", "86.8M", 1,
     "theirs: a 1,025th codebook row, for padding"),
    ("add", "add", 1, "197.4K", "86.2M", 0, ""),
    ("proj", "proj", 1, "99.1K", "86.1M", 0, ""),
)


def count_paper_models(args=None):
    """Count the parameters of [HF Table 2], beside what the paper prints."""
    for name, emb, num_rows, printed, printed_total, more_rows, note in PAPER_MODELS:
        shape = PRESETS["hashformer"] | dict(head="classify", emb=emb, rows=num_rows)
        sizes = harness.count_sizes(shape)
        total = sizes["total"]
        embedding = sizes["embedding"]  # as the paper counts it
        if emb in ("pool", "add", "proj"):
            embedding += shape["width"]  # the row that the model adds to every word
        if name == "lookup 50K (BERT)":  # the first row, with which the others are compared
            bert = sizes
        yield dict(
            name=name, embedding=sizes["embedding"], with_word=embedding, printed=printed,
            total=total, printed_total=printed_total,
            authors=total + shape["width"] * more_rows, note=note,
            pcr_all=100 * (1 - total / bert["total"]),
            pcr_emb=100 * (1 - embedding / bert["embedding"]),
            poep=100 * embedding / total)


HASHING = """
    one core   | name | s
    per second | rate | ,.0f
"""


def bench_hashing(args, *, num_words=100_000, repeats=20_000, rounds=5):
    """Measure how many distinct words, or characters of a text, one core hashes per second."""
    words = made_up_words(num_words)
    tenth = words[::10]  # for LSH index, the slowest
    sentence = "The 12 quick-witted foxes (all of them!) jumped over one lazy dog; it didn't mind. "
    text = sentence * repeats
    # the paper's number of rows
    n = 50_260
    # each word counts once, as none occurs in a text
    fit = functools.partial(hashing.NgramLSH.fit, dict.fromkeys(words, 1), features=n)
    lsh = fit()
    tokenizer = make_tokenizer(Config(), hash=hashing.MD5())
    functions = {  # name -> how many are hashed, function
        "MD5 digests": (num_words, lambda: hashing.md5_digests(words)),
        "MD5 index, N 50,260": (num_words, lambda: hashing.md5_index(words, n)),
        "LSH bits, T 128": (num_words, lambda: lsh.bits(words, 128)),
        "LSH index, N 50,260": (len(tenth), lambda: lsh.index(tenth, n)),
        "text to words, characters": (len(text), lambda: list_words(text)),
        "text to ids, characters": (len(text), lambda: tokenizer.ids_of_texts([text])),
        "LSH fit": (num_words, fit),
    }
    watch = Stopwatch({name: function for name, (_, function) in functions.items()}, rounds)
    for name, ms in watch.ms.items():
        size, _ = functions[name]
        yield dict(name=name, rate=1000 * size / ms)


# Scores

BERT = "lookup of BPE pieces, MLM"
MODELS = {  # name -> flags of pretrain.py [HF §4.3], average of eight tasks [HF Tables 1, 6]
    BERT: ("--emb lookup --objective mlm", 79.5),  # the first one: ratios of the others need it
    "proj, lsh": ("--emb proj --hash lsh", 79.1),
    "proj, md5": ("--emb proj --hash md5", 75.7),
    "emb 1K, lsh": ("--emb emb --hash lsh --rows 1038", 64.2),
    "emb 1K, md5": ("--emb emb --hash md5 --rows 1038", 66.8),
    "pool, lsh": ("--emb pool --hash lsh", 78.9),
    "pool, md5": ("--emb pool --hash md5", 75.3),
    "add, lsh": ("--emb add --hash lsh", 78.9),
    "add, md5": ("--emb add --hash md5", 75.7),
    "emb, lsh": ("--emb emb --hash lsh", 76.0),
    "emb, md5": ("--emb emb --hash md5", 79.9),  # with 50,260 rows in the paper
    "lookup of BPE pieces": ("--emb lookup", 79.6),
    "proj, lsh, of BPE pieces": ("--emb proj --hash lsh --split bpe", 78.3),
    "proj, md5, of BPE pieces": ("--emb proj --hash md5 --split bpe", 74.1),
    "emb, lsh, of BPE pieces": ("--emb emb --hash lsh --split bpe", 66.0),
    "emb, md5, of BPE pieces": ("--emb emb --hash md5 --split bpe", 78.5),
}
SCRATCH = {  # models that are not pre-trained: name -> --preset, average, main
    "ProFormer, tiny, from scratch": ("proformer-tiny", 51.8, finetune.main),
    # the paper has the released model, which is pre-trained
    "CANINE-C, tiny, from scratch": ("canine-tiny", 70.4, canine.main),
}
TASKS = dict(sst2=1, cola=5, mrpc=5, rte=5, stsb=5)  # epochs
GLUE = """
    model              | name    | s
    SST-2              | sst2    | .1f ±
    CoLA               | cola    | .1f ±
    MRPC               | mrpc    | .1f ±
    RTE                | rte     | .1f ±
    STS-B              | stsb    | .1f ±
    average            | average | .1f ±
    paper, eight tasks | paper   | .1f
    PRR %              | prr     | .1f
    PCR all %          | pcr     | .1f
    PoEP %             | poep    | .1f
"""


def train_and_tune(job, flags):
    """Train a run and fine-tune it; return its results, as read_run does."""
    result = {}
    start = ["--ckpt", job.folder]
    main = finetune.main
    if job.name in SCRATCH:
        preset, _, main = SCRATCH[job.name]
        start = ["--preset", preset]
    else:
        result = harness.train_variant(job)
    harness.finetune_run(job, start, TASKS, flags, main)  # writes what read_run reads
    return result | read_run(job.folder)


def read_run(folder):
    """Return scores, sizes and averages of a run's fine-tunings, in folders such as FOLDER-sst2."""
    result = {}
    for task in TASKS:
        out = f"{folder}-{task}"
        if Path(out, "results.json").exists():
            result |= harness.read_scores(out, task)
            if "poep" not in result:  # the model of SST-2, if that was run
                sizes = read_json(f"{out}/results.json")["tasks"][task]["size"]
                result |= dict(parameters=sizes["total"], poep=100 * sizes["poep"])
    # here, for each seed, so that compare finds the deviation of an average
    for suffix in ("", "_bag"):
        scores = [result.get(f"{task}{suffix}") for task in TASKS]
        if None not in scores:  # CANINE has no bag of words
            result[f"average{suffix}"] = statistics.mean(scores)
    return result


def bench_glue(args):
    """Pre-train and fine-tune every variant. [HF Table 2] [HF §4.4 eq.4, 5, 7]"""
    variants = {name: flags for name, (flags, _) in MODELS.items()}
    variants |= dict.fromkeys(SCRATCH, "")
    train = functools.partial(
        train_and_tune, flags=["--data_dir", args.data_dir, "--cache", args.cache])
    return with_controls(harness.compare(args, variants, train))


def with_controls(rows):
    """Yield rows with their ratios to BERT's, if that is the first, and a row of bags of words."""
    bert = None
    has_control = False
    for row in rows:
        name = row["name"]
        if name in MODELS | SCRATCH:
            row["paper"] = (MODELS | SCRATCH)[name][1]
        if name == BERT:
            bert = row
        if bert is not None:
            row["prr"] = 100 * row["average"] / bert["average"]
            row["pcr"] = 100 * (1 - row["parameters"] / bert["parameters"])
        yield row
        # the bags of words of all models that read words are alike: one row
        if "sst2_bag" in row and "pieces" not in name and not has_control:
            has_control = True
            control = dict(name=f"bag of words, as {name}")
            for task in (*TASKS, "average"):
                for suffix in ("", "_std", "_all", "_rows"):
                    control[f"{task}{suffix}"] = row.get(f"{task}_bag{suffix}")
            yield control


def bench_collect(args):
    """Collect the rows of `glue` from runs that were fine-tuned one by one.

    --runs are pre-trained models, such as out/proj-lsh-0 with seed 0. A fine-tuning is beside it,
    in out/proj-lsh-0-sst2.
    """
    names = {}  # that of a folder -> that of the table
    for name in MODELS:
        names[name.replace(", ", "-").replace(" ", "-")] = name
    results = {}  # name of a model -> list of dict, a seed each
    for run in args.runs:
        result = read_run(run)
        if not result:
            raise InputError(f"--runs: expected fine-tunings beside {run}, got none.")
        short, _, _ = Path(run).name.rpartition("-")
        results.setdefault(names.get(short, short), []).append(result)
    rows = [dict(name=name) | harness.summarize(seeds) for name, seeds in results.items()]
    return with_controls(rows)


TABLES = {  # name -> function that yields the rows, columns, flags and their defaults
    "counts": (count_paper_models, COUNTS, {}),
    "hashing": (bench_hashing, HASHING, {}),
    "glue": (bench_glue, GLUE, harness.COMPARE | harness.GLUE_FILES),
    "collect": (bench_collect, GLUE, harness.RUNS),
}


if __name__ == "__main__":
    harness.main("bench.hashformers", TABLES, __doc__)
