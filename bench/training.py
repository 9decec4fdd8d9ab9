"""Training: what a step costs, also against Hugging Face Transformers; an evaluation; scores of many fine-tunings.

    python -m bench.training steps (train, evaluation)
    python -m bench.training tasks --runs out/*

Paper map:    [HF Table 3] bench_train
"""

import functools, itertools, json, os, sys

import numpy as np
import torch
import torch.nn.functional as F

from bench import common
from bench.common import REQUIRED, Bench, Stopwatch, build_model, made_up_words, run_name, training_step
from data.batches import length_batches, pad_batch
from data.squad import QuestionAnswering
from data.tasks import SequenceClassification, Task
from model import PRESETS, Config
from objectives import OBJECTIVES
from tokenizer import FIRST_WORD_ID, MASK, HashTokenizer


def objective_step(net, name, ids, dtype="bfloat16", clip=None, compute_loss=None):
    """Return a training step of an objective on IDs int64 (B, L).

    compute_loss: function(inputs, labels) -> 0-dim tensor; None: that of the objective, a mean over the batch.
    """
    objective = OBJECTIVES[name](Config(), 0.15, MASK, FIRST_WORD_ID)
    noise = torch.from_numpy(np.random.default_rng(0).random((3, *ids.shape), np.float32))
    compute_loss = compute_loss or (lambda inputs, labels: objective.loss(net, inputs, labels) / labels.numel())
    return training_step(net, lambda: compute_loss(*objective.corrupt(ids, noise, ids.flip(0))), dtype, clip)


def bench_steps(args, *, lengths=(128, 512, 2048), positions=8_192, num_words=20_000, rounds=5):
    """A training step (forward, backward, AdamW) of the BERT-LSH model with full and with LSH attention."""
    rows, words = [], made_up_words(num_words)
    for (objective, emb), L, dtype in itertools.product(
            (("mlm", "lookup"), ("sr", "proj")), lengths, ("float32", "bfloat16")):
        functions, ids = {}, torch.randint(FIRST_WORD_ID, num_words, (positions // L, L))
        for name, changes in (("full", dict(attn="full")), ("upper", {}), ("all", dict(lsh_pairs="all"))):
            net = build_model(words, "bert-lsh", length=L, dropout=0.0, lsh_bands=8, emb=emb, head=objective, **changes)
            functions[name] = objective_step(net, objective, ids, dtype)
        watch = Stopwatch(functions, rounds)
        rows.append(watch.ms() | dict(name=f"{objective}, L {L}, {dtype}", share=100 * watch.ratio("upper", "full"),
                                      share_all=100 * watch.ratio("all", "full")))
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def transformers_steps(shape, ids, num_rows):
    """Return dict, name -> the step by Hugging Face Transformers: empty where that package is not installed."""
    try:
        import transformers
    except ImportError:
        return {}
    config = transformers.BertConfig(vocab_size=num_rows, hidden_size=shape["width"], num_hidden_layers=shape["layers"],
                                     num_attention_heads=shape["heads"], intermediate_size=shape["ffn"],
                                     max_position_embeddings=shape["length"])
    nets = {dtype: transformers.BertForMaskedLM(config).train() for dtype in ("float32", "bfloat16")}
    return {f"MLM, Hugging Face Transformers, {dtype}": objective_step(
        net, "mlm", ids, dtype, 1.0, lambda inputs, labels, net=net: net(input_ids=inputs, labels=labels).loss)
        for dtype, net in nets.items()}


def bench_train(args, *, sizes=(("tiny", 64), ("hashformer", 4)), num_words=50_260, rounds=3):
    """A step (forward, backward, AdamW) of S+R and of MLM on the same encoder, per sample: [HF Table 3]."""
    rows, words, num_rows = [], [str(i) for i in range(num_words)], FIRST_WORD_ID + num_words
    for preset, batch in sizes:
        shape = PRESETS[preset]
        ids = torch.randint(FIRST_WORD_ID, num_words, (batch, shape["length"]))
        functions, nets = {}, {f"S+R, {name}": (emb, "sr") for name, emb in (
            ("lookup 50K", "lookup"), ("emb 50K", "emb"), ("pool", "pool"), ("add", "add"), ("proj", "proj"))}
        mlm, mlm_all = "MLM, lookup 50K", "MLM, lookup 50K, all positions"
        for name, (emb, objective) in ({mlm_all: ("lookup", "mlm"), mlm: ("lookup", "mlm")} | nets).items():
            net = build_model(words, preset, emb=emb, rows=num_rows, head=objective).train()

            def loss_of_all(inputs, labels, net=net):  # the logits of every position, as most code computes them
                logits = net(inputs, masked_positions=torch.arange(inputs.numel())).float()
                return F.cross_entropy(logits, labels.flatten(), reduction="sum") / labels.numel()

            functions[name] = objective_step(net, objective, ids, clip=1.0,
                                             compute_loss=loss_of_all if name == mlm_all else None)
        watch = Stopwatch(functions | transformers_steps(shape, ids, num_rows), rounds)
        for name, ms in watch.ms().items():
            against = dict(speed=mlm, against_all=mlm_all, against_usual="MLM, Hugging Face Transformers, float32",
                           against_bfloat16="MLM, Hugging Face Transformers, bfloat16")
            rows.append(dict(name=f"{preset}: {name}", ms=ms / batch, **{
                key: watch.ratio(slow, name) for key, slow in against.items() if slow in watch.times}))
    return rows


def bench_evaluation(args, *, num_texts=2_000, num_questions=500, rounds=5):
    """What an evaluation pass of finetune.py costs beside the forward passes it is made of."""
    rng, words, rows = np.random.default_rng(0), made_up_words(20_000), []
    texts = [" ".join(rng.choice(words, rng.integers(8, 60))) for _ in range(num_texts)]
    split = dict(first=texts, second=None, labels=(["up", "down"] * num_texts)[:num_texts])
    questions = [dict(id=i, question="which words ?", context=f"{a} {b}", answers=[(a.split()[0], 0)])
                 for i, (a, b) in enumerate(zip(texts[:num_questions], texts[num_questions:]))]
    tokenizer = HashTokenizer(Config(**PRESETS["tiny"]), hash=common.MD5())
    task = Task(("text",), ("down", "up"), ("accuracy", "macro_f1"))
    sentences = SequenceClassification(task, split, {"dev": split}, tokenizer, 128)
    answers = QuestionAnswering(questions[:1], questions, tokenizer, 128, stride=42, max_words=30)
    for name, data, examples in ((f"{num_texts:,} texts, classes", sentences, sentences.devs["dev"][0]),
                                 (f"{len(questions):,} questions, spans", answers, answers.windows)):
        net = build_model(tokenizer.words, "tiny", head=data.head).eval()

        def pad_batches(examples):
            for batch in length_batches(list(map(len, examples)), 32_768 // 128):
                yield batch, pad_batch([examples[i] for i in batch])

        inputs = [padded for _, padded in pad_batches(examples)]
        with torch.no_grad():
            watch = Stopwatch({
                "whole": lambda: data.evaluate(lambda some: ((b, net(*padded)) for b, padded in pad_batches(some))),
                "alone": lambda: [net(*padded) for padded in inputs]}, rounds)
        rows.append(dict(name=name, **watch.ms(), outside=100 * (1 - watch.ratio("alone", "whole"))))
    return rows


def bench_tasks(args):
    """Scores of several fine-tunings: a row a model, a column a task, mean ± std over the seeds."""
    rows, majority, bag_of_words = {}, dict(name="the majority class"), dict(name="a bag of words")
    for path in filter(os.path.exists, (os.path.join(folder, "results.json") for folder in args.runs)):
        with open(path) as file:
            run = json.load(file)
        settings = run["settings"]
        name = (settings["preset"] or run_name(settings["ckpt"])) + ", from scratch" * settings["from_scratch"]
        for task, result in run["tasks"].items():
            rows.setdefault(name, dict(name=name)).update({task: result["mean"], f"{task}_std": result["std"]})
            majority[task] = result["majority"]
            if result["bag_of_words"] is not None and "bpe" not in name:  # of words, not of pieces
                bag_of_words[task] = result["bag_of_words"]
    return [rows[name] for name in sorted(rows)] + [majority, bag_of_words]


BENCHES = {
    "steps": Bench(bench_steps, "name:s:8,192 positions a step | full:,.0f:full, ms | upper:,.0f:LSH upper, ms | "
                   "share:.0f:% of full | all:,.0f:LSH all, ms | share_all:.0f:% of full"),
    "train": Bench(bench_train, "name:s:step | ms:.2f:ms a sample | speed:.2f:× our MLM | "
                   "against_all:.2f:× MLM, all positions | against_usual:.2f:× Transformers, float32"),
    "evaluation": Bench(bench_evaluation, "name:s:dev set | whole:,.0f:evaluation, ms | "
                        "alone:,.0f:forward passes alone, ms | outside:.1f:outside the model %"),
    "tasks": Bench(bench_tasks, "name:s:model | sst2:±1:SST-2 | cola:±1:CoLA | mrpc:±1:MRPC | rte:±1:RTE | "
                   "stsb:±1:STS-B | qqp:±1:QQP | qnli:±1:QNLI | mnli:±1:MNLI | squad:±1:SQuAD F1 | pydoc:±1:pydoc",
                   dict(runs=REQUIRED))}
main = functools.partial(common.run_command, "training", __doc__, BENCHES)

if __name__ == "__main__":
    main()
