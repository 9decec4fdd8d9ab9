"""Training: what a step costs, also by Hugging Face Transformers; scores of many fine-tunings.

    python -m bench.training steps (train)
    python -m bench.training inference --data text/ --data_dir glue/
    python -m bench.training tasks (files, public) --runs out/*

Paper map:    [HF Table 3] bench_train   [HF Table 3] bench_inference
"""

import functools, itertools, json, sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import finetune
from bench import common
from bench.common import REQUIRED, Bench, Stopwatch, build_model, list_dtypes, made_up_words, read_json
from bench.common import training_step
from baselines.canine import Canine, CanineConfig, CharacterTokenizer
from data.batches import pad_batch
from data.tasks import SequenceClassification, read_task
from hashing import MD5
from model import PRESETS, Config, Model
from objectives import OBJECTIVES
from tokenizer import FIRST_WORD_ID, MASK, HashTokenizer


def objective_step(net, name, ids, dtype, clip=None, compute_loss=None):
    """Return a training step of an objective on IDs (B, L); compute_loss(inputs, labels): another loss."""
    config = Config(emb="lookup", head=OBJECTIVES[name].head)
    objective = OBJECTIVES[name](config, 0.15, MASK, FIRST_WORD_ID)
    noise = torch.from_numpy(np.random.default_rng(0).random((3, *ids.shape), np.float32))
    compute_loss = compute_loss or (lambda x, labels: objective.loss(net, x, labels) / labels.numel())
    return training_step(net, lambda: compute_loss(*objective.corrupt(ids, noise, ids.flip(0))), dtype, clip)


def bench_steps(args, *, lengths=(128, 512, 2048), positions=8_192, num_words=20_000, rounds=5, dtypes=None):
    """A training step (forward, backward, AdamW) of the BERT-LSH model with full and with LSH attention."""
    rows, words = [], made_up_words(num_words)
    for (objective, emb), L, dtype in itertools.product(
            (("mlm", "lookup"), ("sr", "proj")), lengths, dtypes or list_dtypes()):
        functions, ids = {}, torch.randint(FIRST_WORD_ID, num_words, (positions // L, L))
        for name, changes in dict(full=dict(attn="full"), upper={}, all=dict(lsh_pairs="all")).items():
            net = build_model(words, "bert-lsh", length=L, dropout=0.0, lsh_bands=8, emb=emb, head=objective,
                              **changes)
            functions[name] = objective_step(net, objective, ids, dtype)
        watch = Stopwatch(functions, rounds)
        share, share_all = (100 * watch.ratio(name, "full") for name in ("upper", "all"))
        rows.append(watch.ms() | dict(name=f"{objective}, L {L}, {dtype}", share=share, share_all=share_all))
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def bench_train(args, *, sizes=(("tiny", 64), ("hashformer", 4)), num_words=50_260, rounds=3, dtypes=None):
    """A step (forward, backward, AdamW) of S+R and of MLM on the same encoder, per sample: [HF Table 3]."""
    rows, words, num_rows = [], [str(i) for i in range(num_words)], FIRST_WORD_ID + num_words
    mlm, theirs = "MLM, lookup 50K", "MLM, Hugging Face Transformers"
    mlm_all = f"{mlm}, all positions"
    nets = {mlm_all: ("lookup", "mlm"), mlm: ("lookup", "mlm"), "S+R, lookup 50K": ("lookup", "sr"),
            "S+R, emb 50K": ("emb", "sr")} | {f"S+R, {emb}": (emb, "sr") for emb in ("pool", "add", "proj")}
    try:
        import transformers
    except ImportError:
        transformers = None
        print("transformers: not installed, no rows of it. Run pip install transformers.", file=sys.stderr)
    for (preset, batch), dtype in itertools.product(sizes, dtypes or list_dtypes()):
        shape, functions = PRESETS[preset], {}
        ids = torch.randint(FIRST_WORD_ID, num_words, (batch, shape["length"]))
        for name, (emb, objective) in nets.items():
            net = build_model(words, preset, emb=emb, rows=num_rows, head=objective).train()
            def loss_of_all(inputs, labels, net=net):  # logits of every position, as most code computes them
                logits = net(inputs, masked_positions=torch.arange(inputs.numel())).float()
                return F.cross_entropy(logits, labels.flatten(), reduction="sum") / labels.numel()
            loss = loss_of_all if name == mlm_all else None
            functions[name] = objective_step(net, objective, ids, dtype, 1.0, loss)
        if transformers:
            net = transformers.BertForMaskedLM(transformers.BertConfig(
                vocab_size=num_rows, hidden_size=shape["width"], num_hidden_layers=shape["layers"],
                num_attention_heads=shape["heads"], intermediate_size=shape["ffn"],
                max_position_embeddings=shape["length"])).train()
            functions[theirs] = objective_step(
                net, "mlm", ids, dtype, 1.0, lambda x, labels, net=net: net(input_ids=x, labels=labels).loss)
        watch = Stopwatch(functions, rounds)
        against = dict(speed=mlm, against_all=mlm_all, against_transformers=theirs)
        rows += [dict(name=f"{preset}: {name}", dtype=dtype, batch=batch, ms=ms / batch, **{
            key: watch.ratio(slow, name) for key, slow in against.items() if slow in watch.times})
            for name, ms in watch.ms().items()]
    return rows


def bench_inference(args, *, names=("sst2", "cola", "mrpc", "rte", "stsb"), samples=64, batch=16, rounds=3, **sizes):
    """A forward pass of the paper's size over dev texts of GLUE, in float32: [HF Table 3]."""
    corpus, shape = common.load_corpus(args, "bpe"), PRESETS["hashformer"] | dict(head="classify") | sizes
    lookup = Config(**shape | dict(emb="lookup", rows=FIRST_WORD_ID + len(corpus.words)))
    hashed, characters = Config(**shape), CanineConfig(**sizes)
    pieces = HashTokenizer(lookup, "bpe", subwords=corpus.subwords, vocabulary=corpus.words)
    readers = dict(pieces=(Model(lookup), pieces), words=(Model(hashed), HashTokenizer(hashed, hash=MD5())),
                   characters=(Canine(characters), CharacterTokenizer()))
    rows = []
    for name in names:
        flags = ["--preset", "proformer", "--task", name, "--data_dir", args.data_dir]
        task, train, devs = read_task(name, finetune.parser().parse_args(flags))
        row, functions = dict(name=name), {}
        for unit, (net, tokenizer) in readers.items():
            data = SequenceClassification(task, train, devs, tokenizer, net.config.length, limit=1)
            net.eval().set_codes(torch.from_numpy(tokenizer.codes()))
            examples = data.devs[task.dev[0]][0]
            row[unit] = np.mean([len(ids) for ids in examples])
            order = np.random.default_rng(0).permutation(len(examples))[:samples]
            batches = [pad_batch([examples[i] for i in order[k:k + batch]]) for k in range(0, len(order), batch)]
            functions[unit] = lambda net=net, batches=batches: [net(*inputs) for inputs in batches]
        with torch.no_grad():
            watch = Stopwatch(functions, rounds)
        rows.append(row | {f"{unit}_ms": ms / len(order) for unit, ms in watch.ms().items()}
                    | {f"{unit}_speed": watch.ratio("pieces", unit) for unit in ("words", "characters")})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def bench_tasks(args):
    """Scores of several fine-tunings: a row a model, a column a task, mean ± std over the seeds."""
    rows, majority, bag_of_words = {}, dict(name="majority class"), dict(name="bag of words")
    for path in filter(Path.exists, (Path(folder, "results.json") for folder in args.runs)):
        run = json.loads(path.read_text())
        flags = run["settings"]
        name = (flags["preset"] or Path(flags["ckpt"]).name) + ", from scratch" * flags["from_scratch"]
        name += ", --bag 0" * (flags.get("bag") == 0)
        for task, result in run["tasks"].items():
            row = rows.setdefault(name, dict(name=name, parameters=0))
            row["parameters"] = max(row["parameters"], run["model"]["parameters"])
            row |= {task: result["mean"], f"{task}_std": result["std"], f"{task}_last": result.get("last")}
            majority[task] = result["majority"]
            if result["bag_of_words"] is not None and "bpe" not in name:  # of words, not of pieces
                bag_of_words[task] = result["bag_of_words"]
    return [rows[name] for name in sorted(rows)] + [majority, bag_of_words]


# Name, parameters, SST-2 and MRPC of public models, as their model cards print them
PUBLIC = (("bert-hash-femto", 243_000, 78.2, 68.4), ("bert-hash-pico", 448_000, 78.8, 70.8),
          ("bert-hash-nano", 969_000, 81.3, 70.8), ("bert-tiny", 4_400_000, 82.2, 73.5))


def bench_public(args):
    """Scores of several fine-tunings, and of public models of their size as their model cards print them."""
    names = "name", "parameters", "sst2", "mrpc"
    return bench_tasks(args) + [dict(zip(names, row)) for row in PUBLIC]


def bench_files(args):
    """Scores of fine-tunings on files of one's own: a row a training file, mean ± std over the seeds."""
    rows = []
    for run in (read_json(folder, "results.json") for folder in args.runs):
        [row], path = run["tasks"].values(), Path(run["settings"]["train"])
        name = f"{path.parent.name}, {row['n_train']:,} rows" + ", --bag 0" * (run["settings"]["bag"] == 0)
        rows.append(dict(name=name, score=row["mean"], score_std=row["std"],
                         last=row["last"], bag_of_words=row["bag_of_words"], majority=row["majority"], n=row["n"]))
    return rows


BENCHES = {
    "steps": Bench(bench_steps, "name:s:8,192 positions per step | full:,.0f:full, ms | "
        "upper:,.0f:LSH upper, ms | share:.0f:% of full | all:,.0f:LSH all, ms | share_all:.0f:% of full"),
    "train": Bench(bench_train, "name:s:step | dtype:s:dtype | batch:,:batch | ms:.2f:ms per sample | "
        "speed:.2f:× our MLM | against_all:.2f:× MLM, all positions | "
        "against_transformers:.2f:× Transformers, same dtype"),
    "inference": Bench(bench_inference, "name:s:task | pieces:.1f:pieces per sample | words:.1f:words | "
        "characters:.1f:characters | pieces_ms:.1f:BERT, ms | words_ms:.1f:Proj, ms | words_speed:.2f:× BERT | "
        "characters_ms:.1f:CANINE-C, ms | characters_speed:.2f:× BERT",
        dict(data="python", data_dir=REQUIRED, cache="cache")),
    "tasks": Bench(bench_tasks, "name:s:model | sst2:±1:SST-2 | cola:±1:CoLA | mrpc:±1:MRPC | rte:±1:RTE | "
        "stsb:±1:STS-B | qqp:±1:QQP | qnli:±1:QNLI | mnli:±1:MNLI | squad:±1:SQuAD F1 | pydoc:±1:pydoc",
        dict(runs=REQUIRED)),
    "public": Bench(bench_public, "name:s:model | parameters:,:parameters | sst2:±1:SST-2 | sst2_last:.1f:last | "
        "mrpc:±1:MRPC | mrpc_last:.1f:last", dict(runs=REQUIRED)),
    "files": Bench(bench_files, "name:s:task | score:±1:best evaluation | last:.1f:last evaluation | "
        "bag_of_words:.1f:bag of words | majority:.1f:majority class | n:,:n", dict(runs=REQUIRED))}
main = functools.partial(common.run_command, "training", __doc__, BENCHES)

if __name__ == "__main__":
    main()
