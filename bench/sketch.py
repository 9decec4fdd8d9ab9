"""Count-median sketch: its embedding layer, collisions, hidden words that it names, damage that it survives.

    python -m bench.sketch sketch (collisions)
    python -m bench.sketch gaps --text FILE               an hour
    python -m bench.sketch robust --runs out/median out/mean

Paper map:    [CM] bench_sketch   [SV] bench_sketch
Notation:     V words   k hash functions   R buckets of one   d width
"""

import collections, functools
from pathlib import Path

import numpy as np
import torch

from bench import common
from bench.common import REQUIRED, Bench, Stopwatch, compare, load_corpus, load_run, made_up_words
from console import InputError
from data.batches import TextBatches
from hashing import sketch_index, split_words
from model import count_parameters
from objectives import MaskedHashes, rank_words
from tokenizer import CLS, FIRST_WORD_ID, MASK, SEP


def bench_sketch(args, *, num_words=30_000, shape=(8, 512), rounds=60):
    """The embedding layer of [CM], forward and backward, 8 rows of 512 words as frequent as in text."""
    functions, rows, words, generator = {}, [], made_up_words(num_words), torch.Generator().manual_seed(0)
    rank = num_words ** torch.rand(shape, generator=generator)  # Zipf's law
    ids = FIRST_WORD_ID + rank.long().clamp(max=num_words - 1)
    cotangent = torch.randn(*shape, 512, generator=generator)
    kinds = {"one row per word": dict(emb="lookup", head="mlm", rows=FIRST_WORD_ID + num_words), "mean": {},
             "median": {}, "weighted": dict(rows=2_500, weights=10_000), "proj": {}}
    for name, changes in kinds.items():
        net = common.build_model(words, "median", layers=0, **dict(emb=name) | changes)
        def run(net=net, embed=net.embed):
            embed(ids).backward(cotangent)
            net.zero_grad(set_to_none=True)
        functions[name] = run
        rows.append(dict(name=name, parameters=count_parameters(net)["embedding"]))
        if name == "median":  # without embedding each distinct word once
            functions["median, each occurrence"] = functools.partial(run, embed=net.embed_tokens)
            rows.append(rows[-1] | dict(name="median, each occurrence"))
    watch = Stopwatch(functions, rounds)
    return [row | dict(ms=watch.ms()[row["name"]], ratio=watch.ratio(row["name"], "mean")) for row in rows]


def bench_collisions(args):
    """Words of a corpus in the buckets of a sketch: how many share one, and with which words."""
    corpus, rows = load_corpus(args, "regex"), []
    counts, V = corpus.counts[FIRST_WORD_ID:], len(corpus.words)
    for k, R in ((1, 500), (3, 500), (5, 500), (1, 5_000), (3, 5_000), (5, 50), (3, 50), (2, 500)):
        index, largest = sketch_index(corpus.words, k, R), np.zeros((k, R), np.int64)
        np.maximum.at(largest, (np.arange(k), index), counts[:, None])
        behind = (largest[np.arange(k), index] > counts[:, None]).sum(1)  # buckets with a more frequent word
        same = np.unique(index @ R ** np.arange(k), return_counts=True)[1]
        rows.append(dict(name=f"k {k}, R {R:,}", words=V / R, most=int(np.bincount(index[:, 0]).max()),
                         one=100 * counts[behind > 0].sum() / counts.sum(),
                         half=100 * counts[2 * behind > k].sum() / counts.sum(),
                         counted=int((same * (same - 1) // 2).sum()), expected=V * (V - 1) / 2 / R**k))
    return rows


def hide_words(texts, tokenizer):
    """Hide 15 % of the words of ASCII texts, the same ones whatever a model reads: of letters, after a space.

    Returns: list of IDs list[int], [CLS] .. [SEP], of the first 50 words, with [MASK] for what is hidden;
        list of lists of the hidden (word, positions): a word of several pieces has as many positions.
    """
    rng, ids, hidden = np.random.default_rng(0), [], []
    for text in filter(str.isascii, texts):  # other letters are many pieces
        words, spans = split_words(text)
        noise = rng.random(len(words))
        units, unit_spans = tokenizer.split(text[:spans[:50][-1][1]])
        row = tokenizer.ids(units).tolist()
        hidden.append([])
        for word, (a, b), x in list(zip(words, spans, noise))[:50]:
            if x < 0.15 and word.isalpha() and text[a - 1:a] == " ":
                first = a - bool(tokenizer.subwords)  # a piece may hold the space before it, or be it
                at = [i for i, (start, end) in enumerate(unit_spans) if start < b and end > first]
                if tokenizer.subwords and [units[i] for i in at] != tokenizer.split(word)[0]:
                    raise InputError(f"--text: expected pieces of {word!r} alone, got others: {text[:60]!r}.")
                hidden[-1].append((word, [1 + i for i in at]))
                row = [MASK if i in at else number for i, number in enumerate(row)]
        ids.append([CLS, *row, SEP])
    return ids, hidden


@torch.no_grad()
def name_hidden(folder, words, texts):
    """Return how often a hidden word is the first, and among ten, of all words, in percent, and asked.

    A word scores by the log-probabilities of its hashes, its row, or its pieces. The number of pieces is not
    hidden: a word competes with words of as many.
    """
    net, tokenizer, _ = load_run(folder)
    (ids, hidden), candidates = hide_words(texts, tokenizer), set(words)
    net.set_codes(torch.from_numpy(tokenizer.codes()))
    if net.config.head == "hash-mlm":
        digests = tokenizer.sketch_targets(words).tolist()
    else:
        pieces = [tokenizer.split(word)[0] if tokenizer.subwords else [word] for word in words]
        digests = [[tokenizer.id_of_word.get(piece, -1) - FIRST_WORD_ID for piece in row] for row in pieces]
    # number of pieces -> digests of its words, and its hidden words; word -> number of pieces, index there
    groups, found, place = collections.defaultdict(list), collections.defaultdict(list), {}
    for word, digest in zip(words, digests):
        if min(digest) >= 0:
            place[word] = len(digest), len(groups[len(digest)])
            groups[len(digest)].append(digest)
    for row, gaps in zip(ids, hidden):
        if gaps := [(at, *place[word]) for word, at in gaps if word in place]:
            logits = net(torch.tensor([row]), masked_positions=torch.tensor(sum((at for at, *_ in gaps), [])))
            logits = logits[:, None, FIRST_WORD_ID:] if net.config.head == "mlm" else logits
            parts = logits.log_softmax(-1).split([len(at) for at, *_ in gaps])
            for (_, n, number), logp in zip(gaps, parts):
                found[n].append((logp.flatten(0, 1), number))
    ranks = torch.cat([rank_words(torch.stack([logp for logp, _ in rows]), torch.tensor(groups[n]),
                                  torch.tensor([number for _, number in rows])) for n, rows in found.items()])
    asked = sum(word in candidates for gaps in hidden for word, _ in gaps)
    shares = [100 * (ranks < k).sum().item() / asked for k in (1, 10)]
    return dict(first=shares[0], ten=shares[1], asked=asked)


def score_gaps(folder, seed, words, texts, glue):
    """Return name_hidden of a trained run where there are texts, its GLUE scores where there are flags."""
    named, tasks = name_hidden(folder, words, texts) if texts else {}, dict(sst2=1, cola=5, mrpc=5, stsb=5)
    return named | (common.finetune_run(folder, seed, tasks, glue) if glue else {})


def bench_gaps(args, *flags):
    """Models that predict hashes, rows and pieces, trained alike: words named among all; GLUE. [CM]"""
    if not args.text and not args.data_dir:
        raise InputError("gaps requires --text, a file that is no part of --data, or --data_dir, GLUE's.")
    lines = Path(args.text).read_text(encoding="utf-8").split("\n") if args.text else []
    texts = [line for line in lines if line.strip()]
    words = list(filter(str.isalpha, load_corpus(args, "regex").words))  # as are those that are hidden
    glue = ["--data_dir", args.data_dir, "--cache", args.cache] if args.data_dir else []
    hashes, table = ["--objective", "hash-mlm"], ["--emb", "lookup", "--objective", "mlm", "--vocab", 20_000]
    variants = {"median": ["--emb", "median"], "mean": ["--emb", "mean"],
                "median, tied": ["--emb", "median", "--tied"], "mean, tied": ["--emb", "mean", "--tied"],
                "proj, LSH": ["--emb", "proj", "--hash", "lsh", *hashes], "20,000 BPE pieces": table,
                "20,000 words": [*table, "--split", "regex"],
                "20,000 words, not tied": [*table, "--split", "regex", "--no-tied"],
                "weighted": ["--emb", "weighted", "--rows", 2_500, *hashes]}
    score = functools.partial(score_gaps, words=words, texts=texts, glue=glue)
    return compare(args, variants, *flags, after=score)


def damaged_tables(weight, buckets):
    """Yield names and damaged copies of a table (k·R, d) of blocks of R rows."""
    yield "as trained", weight
    noisy, generator = weight.clone(), torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(weight), generator=generator)[:len(weight) // 50]
    noisy[chosen] += 10 * weight.std() * torch.randn(len(chosen), weight.shape[1], generator=generator)
    yield "1 row in 50 corrupted by 10 σ", noisy
    for bits in (4, 2):
        step = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        yield f"rows of {bits} bits", (weight / step).round() * step
    blocks = weight.view(-1, buckets, weight.shape[1])
    yield "half as many buckets", ((blocks + blocks.roll(buckets // 2, 1)) / 2).flatten(0, 1)


@torch.no_grad()
def bench_robust(args):
    """A trained table damaged in four ways, the head left whole: how far do vectors and loss move? [CM]"""
    rows = []
    for folder in args.runs:
        net, tokenizer, checkpoint = load_run(folder)
        c = net.config
        if c.code_format != "sketch" or c.head != "hash-mlm" or not c.order or c.buckets % 2:
            raise InputError(f"--runs: expected text, --emb mean or median and even --buckets, got {folder}.")
        corpus = load_corpus(args, checkpoint["run"]["split"], checkpoint)
        tokenizer.ids(corpus.words)
        net.set_codes(torch.from_numpy(tokenizer.codes()))
        words = FIRST_WORD_ID + np.flatnonzero(corpus.counts[FIRST_WORD_ID:])
        batch = TextBatches(corpus.ids, c.length, 1, words, 0, CLS).eval_batch(slice(0, 64))
        objective, original = MaskedHashes(c, 0.15, MASK, FIRST_WORD_ID, net.codes), None
        inputs, labels = objective.corrupt(*batch)
        for damage, table in damaged_tables(net.embedding.weight.data.clone(), c.buckets):
            net.embedding.weight.data = table.clone()
            vectors = net.embed(inputs)[inputs >= FIRST_WORD_ID]
            loss = (objective.loss(net, inputs, labels) / (labels >= 0).sum()).item()
            original = original or (vectors, loss)
            moved = ((vectors - original[0]).norm(dim=-1) / original[0].norm(dim=-1)).mean().item()
            rows.append(dict(name=f"{Path(folder).name}: {damage}", moved=100 * moved, loss=loss,
                             more=loss - original[1]))
    return rows


BENCHES = {
    "sketch": Bench(bench_sketch, "name:s:4,096 words, d 512, k 5, R 500 | parameters:,:parameters | "
        "ms:.1f:ms | ratio:.2f:× mean"),
    "collisions": Bench(bench_collisions, "name:s:hash functions, buckets | words:,.1f:words per bucket | "
        "most:,:most | one:.1f:% of text behind a more frequent word in a bucket | "
        "half:.1f:in most of its buckets | counted:,:pairs with all buckets equal | "
        "expected:,.1f:V (V - 1) / 2 R^k", dict(data="python", cache="cache")),
    "gaps": Bench(bench_gaps, "name:s:model | parameters:,:parameters | table:,:embedding | "
        "first:±1:named first, % | ten:±1:in first ten, % | eval_loss:±:held-out loss | sst2:±1:SST-2 | cola:±1:CoLA | "
        "mrpc:±1:MRPC | stsb:±1:STS-B", common.COMPARE | dict(text=None, data_dir=None)),
    "robust": Bench(bench_robust, "name:s:run, table | moved:.1f:mean movement of a vector, % | "
        "loss:.3f:held-out loss | more:.3f:increase", dict(data="python", cache="cache", runs=REQUIRED))}
main = functools.partial(common.run_command, "sketch", __doc__, BENCHES)

if __name__ == "__main__":
    main()
