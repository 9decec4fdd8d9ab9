"""Count-median sketch: its embedding layer, its collisions, the hidden words that it names.

`sketch` compares times and parameters of embeddings, `collisions` counts words that share buckets.
`gaps` trains models, hides words of a text, and asks which of all words they are.

    python -m bench.sketch sketch                         or collisions
    python -m bench.sketch gaps --text FILE               an hour

Notation:
    V words   k hash functions   R buckets of one   d width
"""

import collections
import functools
import math
from pathlib import Path

import numpy as np
import torch

from bench import harness
from bench.harness import Stopwatch, load_corpus, load_run
from hashing import sketch_index
from metrics import rank_words
from model import count_parameters
from support.common import InputError
from tokenizer import CLS, FIRST_WORD_ID, MASK, SEP, UNK
from words import split_words

SKETCH = """
    4,096 words, d 512, k 5, R 500 | name       | s
    parameters                     | parameters | ,
    ms                             | ms         | .1f
    × mean                         | ratio      | .2f
"""


def bench_sketch(args, *, num_words=30_000, shape=(8, 512), rounds=60):
    """Time embeddings of 4,096 words, as frequent as in text, both passes. [CM] [SV]"""
    words = harness.made_up_words(num_words)
    generator = torch.Generator().manual_seed(0)
    rank = num_words ** torch.rand(shape, generator=generator)  # Zipf's law
    ids = FIRST_WORD_ID + rank.long().clamp(max=num_words - 1)
    # a fixed gradient stands for the layers above
    cotangent = torch.randn(*shape, 512, generator=generator)

    def both_passes(model, embed):
        embed(ids).backward(cotangent)
        model.zero_grad(set_to_none=True)

    kinds = {
        "one row per word": dict(emb="lookup", head="mlm", rows=FIRST_WORD_ID + num_words),
        "mean": dict(emb="mean"),
        "median": dict(emb="median"),
        "median, each occurrence": dict(emb="median"),
        "weighted": dict(emb="weighted", rows=2_500, weights=10_000),
        "proj": dict(emb="proj"),
    }
    functions = {}
    parameters = {}
    for name, changes in kinds.items():
        model = harness.build_model(words, "median", layers=0, **changes)
        parameters[name] = count_parameters(model)["embedding"]
        if name == "median, each occurrence":
            # skips embed's unique(), so repeated words are computed again
            model.inputs.embedding.embed = model.inputs.embedding.aggregate_rows
        functions[name] = functools.partial(both_passes, model, model.embed)
    watch = Stopwatch(functions, rounds)
    for name, ms in watch.ms.items():
        yield dict(name=name, parameters=parameters[name], ms=ms,
                   ratio=watch.ratio(name, "mean"))


COLLISIONS = """
    hash functions, buckets                           | name     | s
    words per bucket                                  | words    | ,.1f
    % of text behind a more frequent word in a bucket | one      | .1f
    in most of its buckets                            | half     | .1f
    pairs with all buckets equal                      | counted  | ,
    V (V - 1) / 2 R^k                                 | expected | ,.1f
"""


def bench_collisions(args):
    """Count the words of a corpus that share buckets of a sketch, and with which words."""
    corpus = load_corpus(args, "regex")
    counts = corpus.counts[FIRST_WORD_ID:]
    V = len(corpus.words)
    for k, R in ((1, 500), (3, 500), (5, 500), (1, 5_000), (3, 5_000), (5, 50), (3, 50), (2, 500)):
        index = sketch_index(corpus.words, k, R)  # (V, k)
        num_behind = np.zeros(V, int)  # buckets that hold a more frequent word
        for buckets in index.T:
            # the most frequent word of a bucket trains its row most
            largest = np.zeros(R, counts.dtype)
            np.maximum.at(largest, buckets, counts)
            num_behind += largest[buckets] > counts
        _, sizes = np.unique(index, axis=0, return_counts=True)  # words with all buckets equal
        yield dict(
            name=f"k {k}, R {R:,}", words=V / R,
            one=100 * counts[num_behind > 0].sum() / counts.sum(),
            half=100 * counts[2 * num_behind > k].sum() / counts.sum(),
            counted=np.sum(sizes * (sizes - 1) // 2).item(),
            expected=V * (V - 1) / 2 / R**k)


# Hidden words


def hide_words(texts, tokenizer):
    """Hide 15 % of the words of texts, the same ones whatever a model reads.

    Only words of letters after a space are hidden, in the first 50 words of ASCII texts: other
    letters are many pieces.

    Returns:
        rows: list of token IDs list[int], [CLS] .. [SEP], with [MASK] at the hidden words.
        hidden: list of lists of (word, its positions), as many positions as the word has pieces.
    """
    rng = np.random.default_rng(0)
    rows = []
    hidden = []
    for text in texts:
        words, spans = split_words(text)
        if not words or not text.isascii():
            continue
        noise = rng.random(len(words))  # one a word of the whole text, so equal for every model
        # short enough for each model, whatever the number of pieces
        words = words[:50]
        spans = spans[:50]
        _, end_of_text = spans[-1]
        units, unit_spans = tokenizer.split(text[:end_of_text])
        row = [CLS, *tokenizer.ids(units).tolist(), SEP]
        gaps = []
        for word, (start, end), x in zip(words, spans, noise):
            if x >= 0.15 or not word.isalpha() or text[start - 1:start] != " ":
                continue
            # b >= start, not >: a piece that is only the space ends at start, and is the word's
            positions = [i for i, (a, b) in enumerate(unit_spans, 1) if a < end and b >= start]
            # pieces that reach into other words would hide more of one model's text
            pieces, _ = tokenizer.split(word)
            if [units[i - 1] for i in positions] != pieces:
                raise InputError(f"--text: expected pieces of {word!r} alone, "
                                 f"got others: {text[:60]!r}.")
            gaps.append((word, positions))
            for i in positions:
                row[i] = MASK
        rows.append(row)
        hidden.append(gaps)
    return rows, hidden


@torch.no_grad()
def name_hidden(folder, words, texts):
    """Ask a run for the hidden words of texts: it scores all of words at each.

    A word scores by the log-probabilities of its hashes, its row, or its pieces. The number of
    pieces is not hidden: a word competes with words of as many.

    Returns:
        dict: first and ten, the percentage of hidden words that rank first and in the first ten;
        asked, their number.
    """
    model, tokenizer, _ = load_run(folder)
    rows, hidden = hide_words(texts, tokenizer)
    harness.set_codes(model, tokenizer)
    is_hashed = model.config.head == "hash-mlm"
    candidates = list_candidates(words, tokenizer, is_hashed)

    known = set(words)
    ranks = []  # how many other words score as much or more
    for row, gaps in zip(rows, hidden):
        if not gaps:
            continue
        masked = torch.tensor(row) == MASK
        logits = model(torch.tensor([row]), masked_positions=masked.nonzero().flatten())
        if not is_hashed:  # one distribution a position, as of one hash function
            logits = logits[:, None, FIRST_WORD_ID:]  # (M, 1, V)
        # the masked positions of all gaps, in the order of the text
        logp = logits.log_softmax(-1)  # (M, k, R)
        start = 0
        for word, positions in gaps:
            n = len(positions)
            part = logp[start:start + n].flatten(0, 1)  # (n k, R)
            start += n
            if word not in known:
                continue
            rank = math.inf  # a word without a row is asked for, and never named
            names, digests = candidates[n]
            if word in names:
                place = torch.tensor([names.index(word)])
                rank = rank_words(part.unsqueeze(0), digests, place).item()
            ranks.append(rank)
    if not ranks:
        raise InputError(
            "--text: expected words of the training text, got none. Use a longer file.")
    ranks = np.array(ranks)
    first = 100 * (ranks < 1).mean().item()
    ten = 100 * (ranks < 10).mean().item()
    return dict(first=first, ten=ten, asked=len(ranks))


def list_candidates(words, tokenizer, is_hashed):
    """Return the words that compete for n masked positions, dict, n -> (names, digests).

    names: list of W words, without those that have an unknown piece.
    digests: integer (W, k) or (W, n), their hash buckets or their pieces.
    """
    if is_hashed:
        return {1: (words, torch.from_numpy(tokenizer.target_coder.codes(words)))}
    candidates = collections.defaultdict(lambda: ([], []))
    for word in words:
        pieces, _ = tokenizer.split(word)
        ids = tokenizer.ids(pieces)
        if UNK not in ids:
            names, digests = candidates[len(ids)]
            names.append(word)
            digests.append(ids - FIRST_WORD_ID)
    return {n: (names, torch.from_numpy(np.stack(digests)))
            for n, (names, digests) in candidates.items()}


GAPS = """
    model               | name       | s
    parameters          | parameters | ,
    embedding           | table      | ,
    named first, %      | first      | .1f ±
    in first ten, %     | ten        | .1f ±
    held-out loss       | eval_loss  | .3f ±
    seconds of training | seconds    | ,.0f
    SST-2               | sst2       | .1f ±
    CoLA                | cola       | .1f ±
    MRPC                | mrpc       | .1f ±
    STS-B               | stsb       | .1f ±
"""
MODELS = {  # name -> flags of pretrain.py
    "median": "--emb median",
    "mean": "--emb mean",
    "median, tied": "--emb median --tied",
    "mean, tied": "--emb mean --tied",
    "proj, LSH": "--emb proj --hash lsh --objective hash-mlm",
    "20,000 BPE pieces": "--emb lookup --objective mlm --vocab 20000",
    "20,000 words": "--emb lookup --objective mlm --vocab 20000 --split regex",
    "20,000 words, not tied": "--emb lookup --objective mlm --vocab 20000 --split regex --no-tied",
    "weighted": "--emb weighted --rows 2500 --objective hash-mlm",
}


def train_and_ask(job, words, texts, flags):
    """Train a run, name hidden words of texts, and fine-tune where there are flags."""
    result = harness.train_variant(job)
    result |= name_hidden(job.folder, words, texts)
    if flags:
        tasks = dict(sst2=1, cola=5, mrpc=5, stsb=5)
        result |= harness.finetune_run(job, ["--ckpt", job.folder], tasks, flags)
    return result


def bench_gaps(args):
    """Train models of hashes, rows and pieces; name hidden words; score GLUE. [CM]"""
    texts = Path(args.text).read_text(encoding="utf-8").split("\n")
    # the flags of fine-tuning, where GLUE is at hand
    tuning = []
    if args.data_dir:
        tuning = ["--data_dir", args.data_dir, "--cache", args.cache]
    # all words of the training text compete, however rare
    words = [word for word in load_corpus(args, "regex").words if word.isalpha()]  # as hidden ones
    train = functools.partial(train_and_ask, words=words, texts=texts, flags=tuning)
    return harness.compare(args, MODELS, train)


TABLES = {  # name -> function that yields the rows, columns, flags and their defaults
    "sketch": (bench_sketch, SKETCH, {}),
    "collisions": (bench_collisions, COLLISIONS, harness.CORPUS),
    "gaps": (bench_gaps, GAPS, harness.COMPARE | dict(text=harness.REQUIRED, data_dir=None)),
}


if __name__ == "__main__":
    harness.main("bench.sketch", TABLES, __doc__)
