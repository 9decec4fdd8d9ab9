"""HashFormers: parameters of the paper's table, speed of hashes and embeddings, all variants.

`counts` compares our parameters with those that the paper prints. `hashing`, `embeddings` and
`words` are times. `variants` and `glue` train every variant with the same budget and seeds and
compare their scores, mean ± standard deviation; `paper` is the average of the paper's eight tasks.

    python -m bench.hashformers counts (hashing, embeddings)
    python -m bench.hashformers words          minutes
    python -m bench.hashformers lengths --runs out/*
    python -m bench.hashformers variants       half an hour
    python -m bench.hashformers glue --steps 2000 --data_dir glue/    two hours
"""

import functools
import statistics
import tempfile
import time
from pathlib import Path

import torch

import embeddings
import finetune
import hashing
import pretrain
from baselines import canine
from bench import harness
from bench.harness import Bench, Stopwatch, made_up_words
from common import autocast
from data.corpus import prepare
from model import PRESETS, Config, Model
from tokenizer import SEP, HashTokenizer

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
    """Parameters of [HF Table 2], exact, beside what the paper prints."""
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
    """Distinct words, and characters of a text, that one core hashes per second."""
    words = made_up_words(num_words)
    n = 50_260
    sentence = "The 12 quick-witted foxes (all of them!) jumped over one lazy dog; it didn't mind. "
    text = sentence * repeats
    # fitting is timed once: it is done once a corpus
    start = time.perf_counter()
    lsh = hashing.NgramLSH.fit(dict.fromkeys(words, 1), features=n)
    fit_seconds = time.perf_counter() - start
    tokenizer = HashTokenizer(Config(), hash=hashing.MD5())
    tenth = words[::10]  # the index is the slowest
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
    """Forward and backward of each embedding at width 768 beside the twelve layers it feeds."""
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
    encoder = 6 * watch.ms.pop("encoder")
    for name, ms in watch.ms.items():
        share = 100 * watch.ratio(name, "encoder") / 6
        yield dict(name=name, dtype=dtype, ms=ms, encoder=encoder, share=share)


WORDS = """
    name         s       step
    words        ,       distinct words
    seconds      ,.0f    seconds
    gigabytes    .2f     peak memory, GiB
"""


def bench_words(args, *, num_words=12_000_000, flags=()):
    """Twelve million distinct words: prepared, hashed, trained on for two steps."""
    train = functools.partial(harness.run_main, pretrain.main)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/words.txt"
        with open(path, "w") as file:  # in parts: this process stays small
            for start in range(0, num_words, 1_000):
                print(*made_up_words(start + 1_000, start), file=file)
        run = ["--data", path, "--cache", folder, "--steps", 2, "--device", "cpu", *flags, "--out"]
        steps = {  # name -> function and its arguments, each in a process of its own
            "prepare": (prepare, path, "regex", folder, 50_000, True),
            "hash with MD5, train 2 steps": (train, [*run, f"{folder}/a", "--hash", "md5"]),
            "hash with LSH, train 2 steps": (train, [*run, f"{folder}/b"]),
            "hashed already, train 2 steps": (train, [*run, f"{folder}/c", "--seed", 1]),
        }
        for name, step in steps.items():
            start = time.perf_counter()
            _, memory = harness.run_in_new_process(harness.measure_memory, *step)
            seconds = time.perf_counter() - start
            yield dict(name=name, words=num_words, seconds=seconds, gigabytes=memory)


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
    # released, and pre-trained, there
    "CANINE-C, tiny, from scratch": ("canine-tiny", 70.4, canine.main),
}
BERT = "lookup of BPE pieces, MLM"
FLAGS = {name: flags.split() for name, (flags, _) in MODELS.items()}


VARIANTS = """
    name           s    embedding, hash
    accuracy       ±    accuracy
    f1_intact      ±    F1 intact
    f1_shuffled    ±    F1 shuffled
    f1_random      ±    F1 random
    eval_loss      ±    loss
"""


def bench_variants(args):
    """Every variant with the same budget and seeds on one corpus: the last evaluation."""
    return harness.compare(args, FLAGS)


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


TASKS = dict(sst2=1, cola=5, mrpc=5, rte=5, stsb=5)  # epochs


def train_and_tune(job, flags):
    """Train a run and fine-tune it; return its results, with the sizes of SST-2's model."""
    if job.name in SCRATCH:
        result = {}
        preset, _, main = SCRATCH[job.name]
        scores = harness.finetune_run(job, ["--preset", preset], TASKS, flags, main)
    else:
        result = harness.train_variant(job)
        scores = harness.finetune_run(job, ["--ckpt", job.folder], TASKS, flags)
    average = statistics.mean(scores[task] for task in TASKS)
    sizes = harness.read_json(f"{job.folder}-sst2", "results.json")["tasks"]["sst2"]["size"]
    return result | scores | dict(average=average, parameters=sizes["total"],
                                  poep=100 * sizes["poep"])


def bench_glue(args):
    """Every variant, pre-trained, then fine-tuned. [HF Table 2] [HF §4.4 eq.4, 5, 7]"""
    train = functools.partial(
        train_and_tune, flags=["--data_dir", args.data_dir, "--cache", args.cache])
    rows = list(harness.compare(args, FLAGS | dict.fromkeys(SCRATCH, ()), train=train))
    for row in rows:
        row["paper"] = (MODELS | SCRATCH)[row["name"]][1]
    # BERT's row may come last, or not at all with --only
    for bert in rows:
        if bert["name"] == BERT:
            for row in rows:
                row["prr"] = 100 * row["average"] / bert["average"]
                row["pcr"] = 100 * (1 - row["parameters"] / bert["parameters"])
    # the control of the first model of words; those of the others are alike but for their words
    words = [row for row in rows if "sst2_bag" in row]
    if not words:  # CANINE alone, which reads characters
        return rows
    first = words[0]
    control = dict(name=f"bag of words, as {first['name']}")
    for task in TASKS:
        for suffix in ("", "_std", "_all"):
            control[f"{task}{suffix}"] = first.get(f"{task}_bag{suffix}")
    averages = []
    for scores in zip(*[control[f"{task}_all"] for task in TASKS]):
        averages.append(statistics.mean(scores))
    control["average"] = statistics.mean(averages)
    if len(averages) > 1:
        control["average_std"] = statistics.stdev(averages)
    return [*rows, control]


LENGTHS = """
    name           s      run
    positions      ,      positions of a text
    eval_loss      .3f    loss
    f1_random      .3f    F1 random
    f1_shuffled    .3f    F1 shuffled
"""


@torch.no_grad()
def bench_lengths(args, *, lengths=(8, 16, 32, 64, 128), num_windows=512):
    """What a model of S+R finds in short texts: held-out windows, cut."""
    for folder in args.runs:
        model, objective, batches, _ = harness.load_shuffle_random(folder, args, batch_size=1)
        ids, _, noise, random_words = batches.eval_batch(slice(num_windows))
        for L in lengths:
            text = ids[:, :L].clone()
            if L < ids.shape[1]:
                text[:, -1] = SEP
            batch = objective.corrupt_batch(text, None, noise[..., :L], random_words[:, :L])
            loss, counts = objective.evaluate(model, batch)
            yield dict(name=Path(folder).name, positions=L,
                       eval_loss=loss.item() / len(batch.positions),
                       **objective.metrics(counts.numpy()))


BENCHES = {
    "counts": Bench(count_paper_models, COUNTS),
    "hashing": Bench(bench_hashing, HASHING),
    "embeddings": Bench(bench_embeddings, EMBEDDINGS),
    "words": Bench(bench_words, WORDS),
    "lengths": Bench(bench_lengths, LENGTHS,
                     dict(data="python", cache="cache", runs=harness.REQUIRED)),
    "variants": Bench(bench_variants, VARIANTS, harness.COMPARE),
    "glue": Bench(bench_glue, GLUE, harness.COMPARE | dict(data_dir=harness.REQUIRED)),
}


def main(argv=None):
    """Run a command of this file."""
    harness.run_command("hashformers", __doc__, BENCHES, argv)


if __name__ == "__main__":
    main()
