"""Training: what a step costs beside Hugging Face Transformers, and scores of fine-tunings.

`steps`, `train` and `inference` measure the time of a step or of a forward pass; "× X" is the time
of X over that of the row: above 1, the row is faster. `tasks` collects the scores of trained runs,
in percent.

    python -m bench.training steps               or train
    python -m bench.training inference --data text/ --data_dir glue/
    python -m bench.training tasks --runs out/*
"""

import functools
import itertools
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import torch

from baselines.canine import Canine, CanineConfig, CharacterTokenizer
from bench import harness
from bench.harness import CORPUS, GLUE_FILES, RUNS, Stopwatch, build_model
from data.batches import Draw, divide, pad_batch
from data.classification import SequenceClassification
from hashing import MD5
from model import PRESETS, Config, Model, parameter_groups
from objectives import build_objective
from support.common import autocast, has_fast_bfloat16, read_json
from tokenizer import FIRST_WORD_ID, make_tokenizer

# Times


def list_dtypes():
    """Return the dtypes in which this processor trains: bfloat16 too where hardware has it."""
    if has_fast_bfloat16(torch.device("cpu")):
        return ["float32", "bfloat16"]
    return ["float32"]


def objective_step(model, name, ids, dtype, compute_loss=None):
    """Return a function without arguments that takes a training step, always on the same batch.

    Args:
        model: Model, one of Hugging Face Transformers, or either in DistributedDataParallel.
        name: str, a key of OBJECTIVES, which corrupts the IDs: once, as workers do that ahead.
        ids: int64 (B, L).
        dtype: str, of matrix products.
        compute_loss: function(model, batch) of a loss summed over positions, instead of the
            objective's.
    """
    device = next(model.parameters()).device
    rates = Namespace(objective=name, noise=0.10, mask=0.15)
    objective = build_objective(Config(), rates, None, device)
    # the same noise for each model: what varies is the time alone
    noise = torch.rand(3, *ids.shape, generator=torch.Generator().manual_seed(0))
    batch = objective.corrupt_batch(Draw(ids, None, noise, ids.flip(0))).to(device)
    if compute_loss is None:
        compute_loss = objective.loss
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.01), fused=True)

    def step():
        with autocast(device, dtype):
            loss = compute_loss(model, batch) / ids.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return step


STEPS = """
    8,192 positions per step | name      | s
    full, ms                 | full      | ,.0f
    LSH upper, ms            | upper     | ,.0f
    % of full                | share     | .0f
    LSH all, ms              | all       | ,.0f
    % of full                | share_all | .0f
"""


def bench_steps(args, *, lengths=(128, 512, 1024, 2048, 4096), positions=8_192, num_words=20_000,
                rounds=5):
    """Time a training step of preset bert-lsh with full and with LSH attention."""
    words = harness.made_up_words(num_words)
    kinds = dict(full=dict(attn="full"), upper={}, all=dict(lsh_pairs="all"))
    models = (("mlm", "lookup"), ("sr", "proj"))
    for (objective, emb), L, dtype in itertools.product(models, lengths, list_dtypes()):
        # as many positions in a step at every length
        ids = torch.randint(FIRST_WORD_ID, num_words, (positions // L, L))
        functions = {}
        # models of one shape, which differ in their attention alone
        for name, changes in kinds.items():
            model = build_model(
                words, "bert-lsh",
                length=L,
                dropout=0.0,
                lsh_bands=8,
                emb=emb,
                head=objective,
                **changes)
            functions[name] = objective_step(model, objective, ids, dtype)
        watch = Stopwatch(functions, rounds)
        yield dict(
            name=f"{objective}, L {L}, {dtype}",
            share=100 * watch.ratio("upper", "full"),
            share_all=100 * watch.ratio("all", "full"),
            **watch.ms,
        )


MLM = "MLM, lookup 50K"
MLM_TRANSFORMERS = "MLM, Hugging Face Transformers"
TRAIN = """
    step                       | name                 | s
    dtype                      | dtype                | s
    batch                      | batch                | ,
    ms per sample              | ms                   | .2f
    × our MLM                  | speed                | .2f
    × Transformers, same dtype | against_transformers | .2f
"""


def bench_train(args):
    """Time a training step of S+R and of MLM on one encoder, per sample."""
    num_words = 50_260  # rows of the paper's table
    words = harness.made_up_words(num_words)
    num_rows = FIRST_WORD_ID + num_words
    models = {  # name -> embedding, objective
        MLM: ("lookup", "mlm"),
        "S+R, lookup 50K": ("lookup", "sr"),
        "S+R, emb 50K": ("emb", "sr"),
        "S+R, pool": ("pool", "sr"),
        "S+R, add": ("add", "sr"),
        "S+R, proj": ("proj", "sr"),
    }
    sizes = (("tiny", 64), ("hashformer", 4))  # preset, batch
    for (preset, batch), dtype in itertools.product(sizes, list_dtypes()):
        ids = torch.randint(FIRST_WORD_ID, num_words, (batch, PRESETS[preset]["length"]))
        functions = {}
        for name, (emb, objective) in models.items():
            model = build_model(words, preset, emb=emb, rows=num_rows, head=objective).train()
            functions[name] = objective_step(model, objective, ids, dtype)
        # this one computes logits at all positions, as most code does
        model = build_transformers_model(PRESETS[preset], num_rows)
        if model is not None:
            functions[MLM_TRANSFORMERS] = objective_step(
                model, "mlm", ids, dtype, loss_by_transformers)
        watch = Stopwatch(functions, rounds=3)
        for name, ms in watch.ms.items():
            row = dict(name=f"{preset}: {name}", dtype=dtype, batch=batch, ms=ms / batch)
            # ratios within rounds, not of medians
            row["speed"] = watch.ratio(MLM, name)
            if MLM_TRANSFORMERS in functions:
                row["against_transformers"] = watch.ratio(MLM_TRANSFORMERS, name)
            yield row


def loss_by_transformers(model, batch):
    """Return the summed MLM loss of a model of Hugging Face Transformers, which returns a mean."""
    return model(input_ids=batch.inputs, labels=batch.labels).loss * batch.labels.numel()


def build_transformers_model(shape, num_rows):
    """Return the same encoder by Hugging Face Transformers, or None where that is not installed."""
    try:
        import transformers
    except ImportError:
        print("transformers: not installed, its rows are left out. Run pip install transformers.",
              file=sys.stderr)
        return None
    config = transformers.BertConfig(
        vocab_size=num_rows, hidden_size=shape["width"], num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"], intermediate_size=shape["ffn"],
        max_position_embeddings=shape["length"])
    return transformers.BertForMaskedLM(config).train()


INFERENCE = """
    task              | name             | s
    pieces per sample | pieces           | .1f
    words             | words            | .1f
    characters        | characters       | .1f
    BERT, ms          | pieces_ms        | .1f
    Proj, ms          | words_ms         | .1f
    × BERT            | words_speed      | .2f
    CANINE-C, ms      | characters_ms    | .1f
    × BERT            | characters_speed | .2f
"""


def bench_inference(args):
    """Time forward passes over dev texts of GLUE at the paper's size. [HF Table 3]"""
    corpus = harness.load_corpus(args, "bpe")
    shape = PRESETS["hashformer"] | dict(head="classify")
    # untrained weights take as long as trained ones
    hashed = Config.choose(shape)
    lookup = Config.choose(shape | dict(emb="lookup", rows=FIRST_WORD_ID + len(corpus.words)))
    pieces = make_tokenizer(lookup, corpus.splitter, vocabulary=corpus.words)
    readers = dict(
        pieces=(Model(lookup).eval(), pieces),
        words=(Model(hashed).eval(), make_tokenizer(hashed, hash=MD5())),
        characters=(Canine(CanineConfig()).eval(), CharacterTokenizer()),
    )
    # the same texts as pieces, words and characters
    for name in ("sst2", "cola", "mrpc", "rte", "stsb"):
        task, splits = harness.read_glue(name, args)
        row = dict(name=name)
        functions = {}
        for unit, (model, tokenizer) in readers.items():
            # a text has other tokens for each reader
            data = SequenceClassification(task, splits["dev"], tokenizer, model.config.length)
            if unit != "characters":
                harness.set_codes(model, tokenizer)
            row[unit] = np.mean([len(ids) for ids in data.ids])  # tokens a text
            # padded to the longest of 16
            batches = [pad_batch(ids) for ids in divide(data.ids[:64], 16)]
            functions[unit] = functools.partial(run_batches, model, batches)
        watch = Stopwatch(functions, rounds=3)
        for unit, ms in watch.ms.items():
            row[f"{unit}_ms"] = ms / 64
            row[f"{unit}_speed"] = watch.ratio("pieces", unit)
        yield row


@torch.no_grad()
def run_batches(model, batches):
    """Run a model on batches of IDs and masks."""
    for ids, mask in batches:
        model(ids, mask)


# Scores of trained runs

TASKS = """
    model, task     | name         | s
    score           | score        | .1f ±
    last evaluation | last         | .1f
    bag of words    | bag_of_words | .1f ±
    difference      | over_bag     | .1f ±
    majority class  | majority     | .1f
    seeds           | seeds        | ,
    n               | n            | ,
"""


def bench_tasks(args):
    """Collect scores of fine-tunings beside their controls, mean ± std over seeds.

    The error of the difference is that of rows and seeds together, see standard_error in
    data/classification.py.
    """
    for folder in args.runs:
        path = Path(folder, "results.json")
        if not path.exists():
            continue  # out/* has pre-trained models too
        run = read_json(path)
        settings = run["settings"]
        for task, result in run["tasks"].items():
            name = harness.name_run(settings, task)
            row = dict(name=name, n=result["rows"]["dev"], seeds=len(result["values"]),
                       score=result["mean"], score_std=result["std"])
            for key in ("last", "bag_of_words", "bag_of_words_std", "majority", "over_bag"):
                row[key] = result.get(key)
            # an error, which tables show behind ±, where they show deviations
            row["over_bag_std"] = result.get("over_bag_error")
            yield row


TABLES = {  # name -> function that yields the rows, columns, flags and their defaults
    "steps": (bench_steps, STEPS, {}),
    "train": (bench_train, TRAIN, {}),
    "inference": (bench_inference, INFERENCE, CORPUS | GLUE_FILES),
    "tasks": (bench_tasks, TASKS, RUNS),
}


if __name__ == "__main__":
    harness.main("bench.training", TABLES, __doc__)
