"""HashFormers: parameters of the paper's table, speed of hashes and embeddings, scores on GLUE.

`counts` compares our parameters with those that the paper prints. `hashing` and `embeddings` are
times. `glue` trains every variant with the same budget and seeds and compares their scores, mean ±
standard deviation; its column `paper` is the average of the paper's eight tasks.

    python -m bench.hashformers counts           or hashing, embeddings
    python -m bench.hashformers glue --steps 2000 --data_dir glue/    two hours
"""

import functools
import statistics
import time

import torch

import embeddings
import finetune
import hashing
from baselines import canine
from bench import harness
from bench.harness import Bench, Stopwatch, made_up_words
from common import autocast, read_json
from model import PRESETS, Config, Model
from tokenizer import HashTokenizer

COUNTS = """
    name             s      model
    embedding        ,      embedding
    with_word        ,      with the word row
    printed          s      paper prints
    total            ,      total
    printed_total    s      paper prints
    authors          ,      in the authors' code
    pcr_all          .1f    PCR all %
    pcr_emb          .1f    PCR emb %
    poep             .1f    PoEP %
    note             s
"""
THEIR_SPECIALS = "theirs: the specials are among the rows"
THEIR_PADDING = "theirs: a 1,025th codebook row, for padding"
# name, emb, rows, printed embedding, printed total, rows more in the authors' code, note
PAPER_MODELS = (
    ("lookup 50K (BERT)", "lookup", 50_265, "38.6M", "124.6M", 0, ""),
    ("emb 50K", "emb", 50_260, "38.6M", "124.6M", 0, ""),
    ("emb 1K", "emb", 1_038, "797.2K", "86.8M", -5, THEIR_SPECIALS),
    ("pool", "pool", 1, "797.2K", "86.8M", 1, THEIR_PADDING),
    ("add", "add", 1, "197.4K", "86.2M", 0, ""),
    ("proj", "proj", 1, "99.1K", "86.1M", 0, ""),
)


def count_paper_models(args=None):
    """Count the parameters of [HF Table 2], beside what the paper prints."""
    for name, emb, num_rows, printed, printed_total, more_rows, note in PAPER_MODELS:
        shape = PRESETS["hashformer"] | dict(head="classify", emb=emb, rows=num_rows)
        sizes = harness.count_sizes(**shape)
        total = sizes["total"]
        embedding = sizes["embedding"]  # as the paper counts it
        if emb in ("pool", "add", "proj"):
            embedding += shape["width"]  # the row that the model adds to every word
        if embedding >= 1e6:
            shown = f"{embedding / 1e6:.1f}M"
        else:
            shown = f"{embedding / 1e3:.1f}K"
        if name == "lookup 50K (BERT)":  # the first row, with which the others are compared
            bert = sizes
        yield dict(
            name=name, embedding=sizes["embedding"], with_word=embedding, shown=shown,
            printed=printed, total=total, printed_total=printed_total,
            authors=total + shape["width"] * more_rows, note=note,
            pcr_all=100 * (1 - total / bert["total"]),
            pcr_emb=100 * (1 - embedding / bert["embedding"]),
            poep=100 * embedding / total)


HASHING = """
    name    s       one core
    rate    ,.0f    per second
"""


def bench_hashing(args, *, num_words=100_000, repeats=20_000, rounds=5):
    """Measure how many distinct words, or characters of a text, one core hashes per second."""
    words = made_up_words(num_words)
    n = 50_260
    sentence = "The 12 quick-witted foxes (all of them!) jumped over one lazy dog; it didn't mind. "
    text = sentence * repeats
    # fitting is timed once: it is done once a corpus
    start = time.perf_counter()
    lsh = hashing.NgramLSH.fit(dict.fromkeys(words, 1), features=n)
    fit_seconds = time.perf_counter() - start
    tokenizer = HashTokenizer(Config(), hash=hashing.MD5())
    tenth = words[::10]  # LSH index is the slowest
    functions = {
        "MD5 digests": lambda: hashing.md5_digests(words),
        "MD5 index, N 50,260": lambda: hashing.md5_index(words, n),
        "LSH bits, T 128": lambda: lsh.bits(words, 128),
        "LSH index, N 50,260": lambda: lsh.index(tenth, n),
        "text to words, characters": lambda: hashing.list_words(text),
        "text to ids, characters": lambda: tokenizer.ids_of_texts([text]),
    }
    for name, ms in Stopwatch(functions, rounds).ms.items():
        size = num_words
        if "characters" in name:
            size = len(text)
        elif "LSH index" in name:
            size = len(tenth)
        yield dict(name=name, rate=1000 * size / ms)
    yield dict(name="LSH fit", rate=num_words / fit_seconds)


EMBEDDINGS = """
    name       s       embedding, 4 × 512 words
    dtype      s       dtype
    ms         ,.1f    ms
    encoder    ,.0f    12 layers, ms
    share      .1f     share %
"""


def bench_embeddings(args, *, batch=4, length=512, rows=50_260, rounds=5):
    """Time each embedding, forward and backward at width 768, beside the layers that it feeds."""
    dtype = harness.list_dtypes()[-1]
    d = 768
    cotangent = torch.randn(batch, length, d)
    bits = torch.randint(0, 2, (batch, length, 128), dtype=torch.uint8)
    shape = PRESETS["hashformer"] | dict(layers=2, dropout=0.0)  # two are timed, there are twelve
    layers = torch.nn.Sequential(*Model(Config.choose(shape)).layers)

    def draw_numbers(limit, count=1):
        return torch.randint(0, limit, (batch, length, count))

    def both_passes(module, inputs):
        with autocast(inputs.device, dtype):
            out = module(inputs)
        out.backward(cotangent.to(out.dtype))
        module.zero_grad(set_to_none=True)

    cases = {
        "emb 50K": (embeddings.HashEmbedding(rows, d), draw_numbers(rows)),
        "emb 1K": (embeddings.HashEmbedding(1_038, d), draw_numbers(1_038)),
        "pool": (embeddings.PoolEmbedding(128, 10, d), draw_numbers(256, 13)),
        "add": (embeddings.AddEmbedding(128, d), bits),
        "encoder": (layers, torch.randn(batch, length, d)),
        "proj": (embeddings.ProjEmbedding(128, d), bits),
    }
    functions = {}
    for name, (module, inputs) in cases.items():
        functions[name] = functools.partial(both_passes, module, inputs)
    watch = Stopwatch(functions, rounds)
    # the time of two layers stands for that of twelve
    encoder = 6 * watch.ms.pop("encoder")
    for name, ms in watch.ms.items():
        share = 100 * watch.ratio(name, "encoder") / 6
        yield dict(name=name, dtype=dtype, ms=ms, encoder=encoder, share=share)



# Scores

MODELS = {  # name -> flags of pretrain.py [HF §4.3], average of eight tasks [HF Tables 1, 6]
    "emb 1K, md5": ("--emb emb --hash md5 --rows 1038", 66.8),
    "emb 1K, lsh": ("--emb emb --hash lsh --rows 1038", 64.2),
    "emb, md5": ("--emb emb --hash md5", 79.9),  # with 50,260 rows in the paper
    "emb, lsh": ("--emb emb --hash lsh", 76.0),
    "pool, md5": ("--emb pool --hash md5", 75.3),
    "pool, lsh": ("--emb pool --hash lsh", 78.9),
    "add, md5": ("--emb add --hash md5", 75.7),
    "add, lsh": ("--emb add --hash lsh", 78.9),
    "proj, md5": ("--emb proj --hash md5", 75.7),
    "proj, lsh": ("--emb proj --hash lsh", 79.1),
    "lookup of BPE pieces": ("--emb lookup", 79.6),
    "emb, md5, of BPE pieces": ("--emb emb --hash md5 --split bpe", 78.5),
    "emb, lsh, of BPE pieces": ("--emb emb --hash lsh --split bpe", 66.0),
    "proj, md5, of BPE pieces": ("--emb proj --hash md5 --split bpe", 74.1),
    "proj, lsh, of BPE pieces": ("--emb proj --hash lsh --split bpe", 78.3),
    "lookup of BPE pieces, MLM": ("--emb lookup --objective mlm", 79.5),
    "proj, lsh, no layers": ("--layers 0", None),
}
SCRATCH = {  # models that are not pre-trained: name -> --preset, average, main of their script
    "ProFormer, tiny, from scratch": ("proformer-tiny", 51.8, finetune.main),
    # the paper has the released model, which is pre-trained
    "CANINE-C, tiny, from scratch": ("canine-tiny", 70.4, canine.main),
}
BERT = "lookup of BPE pieces, MLM"
TASKS = dict(sst2=1, cola=5, mrpc=5, rte=5, stsb=5)  # epochs
GLUE = """
    name       s      embedding, hash
    sst2       ±1     SST-2
    cola       ±1     CoLA
    mrpc       ±1     MRPC
    rte        ±1     RTE
    stsb       ±1     STS-B
    average    ±1     average
    paper      .1f    paper, eight tasks
    prr        .1f    PRR %
    pcr        .1f    PCR all %
    poep       .1f    PoEP %
"""


def train_and_tune(job, flags):
    """Train a run and fine-tune it; return its results, with the sizes of SST-2's model."""
    if job.name in SCRATCH:
        preset, _, main = SCRATCH[job.name]
        result = harness.finetune_run(job, ["--preset", preset], TASKS, flags, main)
    else:
        result = harness.train_variant(job)
        result |= harness.finetune_run(job, ["--ckpt", job.folder], TASKS, flags)
    sizes = read_json(f"{job.folder}-sst2/results.json")["tasks"]["sst2"]["size"]
    result["average"] = statistics.mean(result[task] for task in TASKS)
    result["parameters"] = sizes["total"]
    result["poep"] = 100 * sizes["poep"]
    return result


def bench_glue(args):
    """Pre-train and fine-tune every variant. [HF Table 2] [HF §4.4 eq.4, 5, 7]"""
    variants = {name: flags.split() for name, (flags, _) in MODELS.items()}
    variants |= dict.fromkeys(SCRATCH, ())
    train = functools.partial(
        train_and_tune, flags=["--data_dir", args.data_dir, "--cache", args.cache])
    rows = list(harness.compare(args, variants, train=train))
    for row in rows:
        row["paper"] = (MODELS | SCRATCH)[row["name"]][1]
    # BERT's row may come last, or not at all with --only
    for bert in rows:
        if bert["name"] == BERT:
            for row in rows:
                row["prr"] = 100 * row["average"] / bert["average"]
                row["pcr"] = 100 * (1 - row["parameters"] / bert["parameters"])
    # the bags of words of all models that read words are alike: one row. CANINE has none
    for row in rows:
        if "sst2_bag" in row:
            return [*rows, make_control(row)]
    return rows


def make_control(model):
    """Return the row of the bag of words that was trained beside a model."""
    row = dict(name=f"bag of words, as {model['name']}")
    for task in TASKS:
        for suffix in ("", "_std", "_all"):
            row[f"{task}{suffix}"] = model.get(f"{task}_bag{suffix}")
    averages = []
    for scores in zip(*[row[f"{task}_all"] for task in TASKS]):  # one a task, of the same seed
        averages.append(statistics.mean(scores))
    row["average"] = statistics.mean(averages)
    if len(averages) > 1:
        row["average_std"] = statistics.stdev(averages)
    return row


BENCHES = {
    "counts": Bench(count_paper_models, COUNTS),
    "hashing": Bench(bench_hashing, HASHING),
    "embeddings": Bench(bench_embeddings, EMBEDDINGS),
    "glue": Bench(bench_glue, GLUE, harness.COMPARE | dict(data_dir=harness.REQUIRED)),
}


def main(argv=None):
    """Run the command of this file that the command line, or the list argv, names."""
    harness.run_command("hashformers", __doc__, BENCHES, argv)


if __name__ == "__main__":
    main()
