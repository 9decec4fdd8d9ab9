"""Apply a trained model: misplaced words, masked words, item sets, labels, answers, similar words.

    python infer.py --ckpt out/proj-lsh "if the two arrays have kubernetes same shape"
    python infer.py --ckpt out/lookup-bpe-mlm "Return the [MASK] of a list."    fill a mask
    python infer.py --ckpt out/bloom-items "socket bind listen"                 complete an item set
    python infer.py --ckpt out/proj-lsh-sst2 "a charming journey" "a bad film"  classify two texts
    python infer.py --ckpt out/proj-lsh-squad "Who wrote it?" "It was written by Ada Lovelace."
    python infer.py --ckpt out/proj-lsh --near initalization                    list similar words
    python infer.py --ckpt out/proj-lsh-sst2 --file reviews.csv > labels.jsonl  an object a row
    python infer.py --ckpt out/proj-lsh --file reviews.csv --vectors out.npy    a vector a row

    from infer import Predictor
    predictor = Predictor("out/proj-lsh")
    words, spans, probabilities = predictor.detect("a text")
    results = predictor.detect(["a text", "another"])  # in batches, a result for each

Sources: [HF] Xue & Aletras 2022, HashFormers. [BERT] Devlin et al. 2019. [SB] Superbloom, ICLR 2020
    submission. [CM] Median is all you need, a proposal
Out of scope: scores (finetune.py --epochs 0)
Notation: B batch   L positions   M masked positions   V candidate words   d hidden size   T bits
    m vectors or hashes of an item   k hash functions, or results to return   R buckets   N rows
"""

import argparse
import itertools
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from bloom import SketchMap, beam_search, hash_logp
from common import InputError, at_least, blame_file, find_device, load_checkpoint, run_script
from data.batches import length_batches, pad_batch
from data.corpus import choose_columns, item_names
from data.rows import add_reader_flags, list_names, peek_columns, read_rows, reader_options
from data.squad import QuestionAnswering
from data.tasks import TASKS
from hashing import NgramLSH
from model import load_model
from objectives import KINDS
from tokenizer import FIRST_WORD_ID, MASK, SPECIALS, UNK, HashTokenizer, build_inputs

MASK_WORD = SPECIALS[MASK]
BATCH = 32  # rows; on a CPU 8 to 64 are best, as more have more padding
MAX_UNKNOWN = 0.1  # share of words; above it there is a note
# Hash bits that neighbors compares: with the 128 that a model reads the right word comes first for
# 40 % of misspellings, with 1,024 for 55 %, with the n-grams themselves for 60 to 70 %
NEAR_BITS = 1_024
ROWS = 256  # of a file that are predicted at a time
OUTPUT = ("prediction", "scores", "notes", "error")  # what --file adds to a row
# between two words in braces; its middle is not printed
LONG_STRETCH = re.compile(r"([^{}]{150})[^{}]{50,}([^{}]{150})")


class Example(NamedTuple):
    """A row as a model reads it."""

    ids: np.ndarray  # int32 (L,), token IDs with special tokens
    words: list  # of the text, or of the second text of a pair; or the names of a set
    spans: list  # (start, end), characters of each word
    notes: list  # str, what a user has to know, details behind a colon


class Predictor:
    """A trained model and its tokenizer. What a model can do depends on its head.

    Each method takes a list of rows, computes them in batches of similar length, and returns a
    result for each. It takes one row, too, and returns its result alone. A row is a text, str; a
    pair of texts, tuple; or an item set, list of names, or str with tabs or else spaces between.

    Args:
        path: str, a checkpoint or its folder.
        device: str or torch.device.
        truncate: bool, read the start of a text that is too long for a pre-trained model.

    Attributes:
        task: dict, what finetune.py says about its task; empty after pretrain.py.
        columns: list[str], the name of each text of a row.
        words: list[str], the candidates of neighbors, the most frequent first.
        items, item_map: list[str], the candidates of predict_missing; and their BloomMap, or
            SketchMap of words, or None.

    Raises:
        InputError: The checkpoint, a row of a method, or the model's head does not fit.
    """

    def __init__(self, path, device="cpu", truncate=False):
        checkpoint = load_checkpoint(path)
        with blame_file(path):
            self.model = load_model(checkpoint)
            self.model.to(device).requires_grad_(False)
            self.config = self.model.config
            self.tokenizer = HashTokenizer.load(checkpoint["tokenizer"], self.config)
            self.set_candidates(checkpoint["words"])
        self.tokenizer.id_of_word[MASK_WORD] = MASK
        self.task = checkpoint.get("task", {})
        self.columns = self.task.get("texts", ["text"])
        self.truncate = truncate

    def set_candidates(self, words):
        """Search among words, list[str], from now on. Items of a fixed vocabulary stay."""
        self.words = words
        self.items = self.tokenizer.words
        self.item_map = self.tokenizer.bloom_map
        if self.tokenizer.is_fixed:  # all unknown words would have one vector
            self.words = [word for word in words if word in self.tokenizer.id_of_word]
        elif self.config.head == "hash-mlm":  # any word has hashes
            self.items = words
            self.item_map = SketchMap(self.tokenizer.sketch_targets(words), self.config.buckets)

    # Predictions. Each says how the model's output for one row is decoded; apply does it for all

    def detect(self, texts):
        """Judge each word: is it intact, shuffled or random? [HF §3.6]

        Returns:
            words list[str], of a text that was cut those that were read; spans list[(start, end)]
            in characters; float (words, 3), the probabilities of objectives.KINDS.
        """
        def decode(example, logits):  # (L, 3)
            num_read = len(example.ids) - 2  # without [CLS] and [SEP]
            probabilities = logits[1:1 + num_read].softmax(-1).cpu()
            return example.words[:num_read], example.spans[:num_read], probabilities

        return self.apply(self.model, decode, texts, "sr")

    def fill_mask(self, texts, k=8):
        """Predict each [MASK] of a text or set among the words of the vocabulary. [BERT §3.1]

        Returns:
            A list of the k best (word, probability) for each [MASK], without what a set shows.
        """
        vocabulary = self.tokenizer.words

        def decode(example, logits):  # (M, N)
            if not self.config.order:
                logits[:, example.ids] = -torch.inf  # what the set shows
            probabilities = logits[:, FIRST_WORD_ID:].softmax(-1)  # no special tokens
            best = probabilities.topk(min(k, len(vocabulary)))
            masks = []
            for values, numbers in zip(best.values.tolist(), best.indices.tolist()):
                # an item that is left out has 0, or NaN if the set shows all items
                masks.append([(vocabulary[n], p) for n, p in zip(numbers, values) if p > 0])
            return masks

        return self.apply(self.score_masks, decode, texts, "mlm")

    def predict_missing(self, texts, k=8):
        """Predict each [MASK] of a text or set by its hashes, among all items. [SB §2.5] [CM]

        Returns:
            A dict for each [MASK]: items, the k best (name, sum of the log-probabilities of its
            hashes), without what a set shows; total, int, all items; scored, int, those that the
            search scored to certify the best.
        """
        def decode(example, logits):  # (M, m, m·R), or (M, k, R) for words
            shown = []
            if not self.config.order:
                visible = set(example.words)
                shown = [n for n, name in enumerate(self.items) if name in visible]
            exclude = torch.tensor([shown] * len(logits), dtype=torch.int64, device=logits.device)
            logp = hash_logp(logits, self.item_map)  # (M, m, R)
            # without a limit of rounds the search goes on until the k best are certified
            best, scores, _, num_scored = beam_search(
                logp, self.item_map, k, beam=k, rounds=None, exclude=exclude)
            masks = []
            for numbers, values, scored in zip(best.tolist(), scores.tolist(), num_scored.tolist()):
                # -1: fewer than k items are left
                items = [(self.items[n], value) for n, value in zip(numbers, values) if n >= 0]
                masks.append(dict(items=items, scored=scored, total=len(self.items)))
            return masks

        return self.apply(self.score_masks, decode, texts, "hash-mlm")

    def classify(self, rows, k=None):
        """Label a text or a pair of texts.

        Returns:
            A list of the k best (label, probability), or of a regression of one (name, number).
        """
        def decode(example, logits):  # (labels,)
            if self.task["labels"] is None:
                mean, deviation = self.task["scale"]
                return [(self.task["label"], logits.item() * deviation + mean)]
            pairs = zip(self.task["labels"], logits.softmax(-1).tolist())
            return sorted(pairs, key=lambda pair: -pair[1])[:k]

        return self.apply(self.model, decode, rows, "classify")

    def answer(self, pairs):
        """Find the words of a context that answer a question. [BERT §4.2]

        Args:
            pairs: list of (question, context), or one. A long context is read in windows.

        Returns:
            A list of one pair: the answer, "" for none; and its score minus that of none, float.
        """
        if isinstance(pairs, tuple):
            return self.answer([pairs])[0]
        for pair in pairs:
            self.read(pair, "span")
        rows = [(pair, []) for pair in pairs]
        data = QuestionAnswering(None, rows, self.tokenizer, self.config.length)
        results = []
        for text, margin in zip(*data.answers(self.run(self.model, data.examples))):
            if self.task["null"] and margin <= 0:
                text = ""
            results.append([(text, float(margin))])
        return results

    def embed(self, rows):
        """Return float32 (rows, d), the mean of the encoder's outputs for each; of one row (d,)."""
        def decode(example, outputs):  # (L·m, d)
            size = len(example.ids) * self.model.vectors_per_item  # the rest is padding
            return outputs[:size].mean(0).tolist()

        return np.array(self.apply(self.model.encode, decode, rows), np.float32)

    def neighbors(self, words, k=8):
        """Find the candidates that are most similar to a word, seen in training or not. [HF §3.3]

        With n-gram LSH words are compared by their hash bits, +1 or -1, so those are similar that
        are spelled alike. With other hashes they are compared by their embeddings, less the mean.

        Returns:
            A list of (word, cosine), best first; of equals the more frequent word.
        """
        if isinstance(words, str):
            return self.neighbors([words], k)[0]
        words = [self.read_word(word) for word in words]
        if not self.words:
            raise InputError("expected words to search among that this model knows, got none.")
        x = self.word_vectors([*words, *self.words])
        candidates = x[len(words):]  # (V, T) or (V, m·d)
        results = []
        for word, vector in zip(words, x):
            cosines = candidates @ vector  # (V,)
            best = cosines.argsort(descending=True, stable=True)[:k + 1].tolist()
            pairs = [(self.words[i], cosines[i].item()) for i in best if self.words[i] != word]
            results.append(pairs[:k])
        return results

    def word_vectors(self, words):
        """Return vectors of length 1, whose products are cosines, of words: (n, T) or (n, m·d)."""
        hash = self.tokenizer.hash
        if isinstance(hash, NgramLSH):
            bits = hash.bits(words, min(NEAR_BITS, hash.features))
            return F.normalize(2.0 * torch.from_numpy(bits) - 1)
        [(_, x)] = self.run(lambda ids, _: self.model.embed(ids), [self.tokenizer.ids(words)])
        x = x.view(len(words), -1).cpu()
        return F.normalize(x - x.mean(0))

    def predict(self, rows, k=8):
        """Return what the method of the model's head returns, k results at most."""
        head = self.config.head
        if head == "sr":
            return self.detect(rows)
        if head == "mlm":
            return self.fill_mask(rows, k)
        if head == "hash-mlm":
            return self.predict_missing(rows, k)
        if head == "classify":
            return self.classify(rows, k)
        return self.answer(rows)  # which raises for any other head

    # From rows to the model

    def apply(self, forward, decode, rows, head=None):
        """Return decode(Example, output) for each row; forward as in run, head as in read."""
        if isinstance(rows, (str, tuple)):
            return self.apply(forward, decode, [rows], head)[0]
        examples = [self.read(row, head) for row in rows]
        results = [None] * len(examples)
        for chosen, outputs in self.run(forward, [example.ids for example in examples]):
            for i, output in zip(chosen, outputs):
                results[i] = decode(examples[i], output)
        return results

    def run(self, forward, inputs):
        """Yield the indices of a batch of inputs of similar length, (B,), and what forward returns.

        Args:
            forward: function of ids int64 (B, L), 0 is padding, and mask bool (B, L) or None.
            inputs: list of int32 (L,), token IDs.
        """
        self.model.set_codes(self.tokenizer.codes())  # of new words, too
        lengths = [len(ids) for ids in inputs]
        for chosen in length_batches(lengths, BATCH):
            ids, key_mask = pad_batch([inputs[i] for i in chosen])
            if key_mask is not None:
                key_mask = key_mask.to(self.model.device)
            yield chosen, forward(ids.to(self.model.device), key_mask)

    def score_masks(self, ids, key_mask):
        """Return for each row the logits of its M [MASK]: (M, N), (M, m, m·R) or (M, k, R)."""
        is_mask = ids == MASK  # (B, L)
        [positions] = torch.where(is_mask.flatten())
        logits = self.model(ids, key_mask, masked_positions=positions)
        return logits.split(is_mask.sum(1).tolist())

    def read(self, row, head=None):
        """Return the Example of a row; an InputError unless it and the head, None for any, fit."""
        c = self.config
        if head not in (None, c.head):
            raise InputError(f"expected a model with head {head}, got one with {c.head}.")
        if c.order:
            example, num_cut = self.read_texts(row, head)
        else:
            example, num_cut = self.read_set(row, head)
        if num_cut > 0:
            if not self.task and not self.truncate:
                raise InputError(f"expected at most {c.length} positions (--length), got "
                                 f"{c.length + num_cut}. Use --truncate, in Python truncate=True.")
            example.notes.append(f"cut to {c.length} positions (--length)")
        fills_masks = head in ("mlm", "hash-mlm")
        if head is not None and fills_masks != (MASK in example.ids):
            raise InputError("expected [MASK] for a model of --objective mlm or hash-mlm, and for "
                             f"no other, got {row!r:.60}.")
        return example

    def read_texts(self, row, head):
        """Return the Example of a text or a pair, and how many words do not fit in it."""
        texts = row if isinstance(row, tuple) else (row,)
        are_texts = all(isinstance(text, str) for text in texts)
        if not are_texts or len(texts) != len(self.columns):
            raise InputError(f"expected text ({', '.join(self.columns)}), got {texts!r:.60}.")
        parts = []  # token IDs
        for text in texts:
            words, spans = self.split(text)
            parts.append(self.tokenizer.ids(words))
        notes = []
        if min(map(len, parts)) == 0:
            if not self.task:
                raise InputError("expected words, got none.")
            notes.append("a text has no words")
        ids = np.concatenate(parts)
        num_unknown = self.count_unknown(ids)
        if num_unknown > MAX_UNKNOWN * len(ids):
            notes.append("unknown words look all alike to the model; train on such text, or with "
                         f"--hash md5: {num_unknown:,} of {len(ids):,}")
        first, second = [*parts, None][:2]
        ids, num_cut = build_inputs(first, second, self.config.length)
        if head == "span":  # a long context is read in windows, of which a question has a half
            num_cut = len(first) - (self.config.length - 4) // 2
        return Example(ids, words, spans, notes), num_cut

    def read_set(self, row, head):
        """Return the Example of an item set, and how many items do not fit in it."""
        names = []
        if isinstance(row, list):
            names = item_names(row)
        elif isinstance(row, str):
            names, _ = self.tokenizer.split(row)
        ids = dict(zip(names, self.tokenizer.ids(names).tolist()))
        unknown = [name for name in ids if ids[name] == UNK]
        known = [i for i in ids.values() if i >= FIRST_WORD_ID]
        if not known:
            raise InputError(f"expected items that this model knows, got {row!r:.60}.")
        notes = []
        if unknown:
            notes.append(f"unknown items were left out: {', '.join(unknown)}")
        if head is not None:  # all [MASK] of a set have one output: there is one, written or not
            known = [MASK, *known]
        length = self.config.length
        return Example(known[:length], names, [], notes), len(known) - length

    def split(self, text):
        """Return the words of a text, list[str], and their spans up to the first [MASK]."""
        if self.task:  # as in fine-tuning, where [MASK] is ordinary text
            return self.tokenizer.split(text)
        first, *others = re.split(r" ?\[MASK\]", text)
        words, spans = self.tokenizer.split(first)
        for part in others:
            # subtle: BPE puts a space before a text, here before a line break that is left out
            more, places = self.tokenizer.split("\n" + part)
            words.append(MASK_WORD)
            words += [word for word, (start, _) in zip(more, places) if start > 0]
        return words, spans

    def read_word(self, text):
        """Return the only word of a text, as the tokenizer writes it; an InputError without one."""
        words, _ = self.tokenizer.split(text)
        if len(words) != 1 or self.count_unknown(self.tokenizer.ids(words)) > 0:
            raise InputError(f"expected one word that this model can compare, got {text!r:.60}.")
        return words[0]

    def count_unknown(self, ids):
        """Return how many token IDs are [UNK], or of words whose n-grams the hash does not know."""
        if not isinstance(self.tokenizer.hash, NgramLSH):
            return (ids == UNK).sum()
        codes = self.tokenizer.codes()[ids[ids >= FIRST_WORD_ID]]
        return (~codes.any(1)).sum()  # no bit is set, and the index is 0


# -------------------------------------------------------------------------------------------------
# Results: those of Predictor.predict, for people and in one value


def print_result(predictor, row, result, k):
    """Print the result of a row."""
    head = predictor.config.head
    if head == "sr":
        print_words(row, *result, k)
    elif head in ("classify", "span"):
        print_pairs(result)
    else:
        for i, found in enumerate(result, 1):
            title = f"[MASK] {i}"
            if head == "hash-mlm":
                title += (f"   {found['scored']:,} of {found['total']:,} scored by sums of "
                          "log-probabilities, certified: provably the best")
                found = found["items"]
            print(title)
            print_pairs(found)


def print_pairs(pairs):
    """Print pairs (name, number), the names aligned at their right ends."""
    for name, value in pairs:
        name = name.replace("Ġ", " ")  # the sign of a space in pieces of BPE
        if name == "":
            name = "(no answer)"
        print(f"  {name:>16}   {value:.3f}")


def print_words(text, words, spans, probabilities, k):
    """Print a text with its misplaced words in braces, then the words least likely to be intact."""
    marked = mark_words(text, words, spans, probabilities)
    print(re.sub(LONG_STRETCH, r"\1 ... \2", marked))
    num_marked = int((probabilities.argmax(1) > 0).sum())
    if num_marked == 0:
        print("No word is marked: each is likeliest intact.")
    ranking = probabilities[:, 0].argsort(stable=True)
    for i in ranking[:min(k, num_marked + 3)].tolist():
        intact, shuffled, random = probabilities[i].tolist()
        print(f"  {words[i].replace('Ġ', ' '):>16}   intact {intact:5.1%}   "
              f"shuffled {shuffled:5.1%}   random {random:5.1%}")


def mark_words(text, words, spans, probabilities):
    """Return a text, as far as it was read, with its misplaced words in braces."""
    marked = ""
    last = 0  # first character that is not in it
    for (start, end), kind in zip(spans, probabilities.argmax(1).tolist()):
        if KINDS[kind] != "intact":
            marked += f"{text[last:start]}{{{text[start:end]}:{KINDS[kind]}}}"
            last = end
    _, end = spans[-1]
    return marked + text[last:end]


def find_best(predictor, row, result):
    """Return the best of the result of a row: a marked text, a list of words, a label, a number."""
    head = predictor.config.head
    if head == "sr":
        return mark_words(row, *result)
    if head in ("classify", "span"):
        name, value = result[0]
        is_number = head == "classify" and predictor.task["labels"] is None
        return value if is_number else name
    if head == "hash-mlm":
        result = [found["items"] for found in result]
    return [pairs[0][0] for pairs in result if pairs]


# -------------------------------------------------------------------------------------------------
# Files


def read_file(args, predictor):
    """Yield for each row of --file what the Predictor reads, and the columns of the row, a dict."""
    is_sets = not predictor.config.order
    header = None
    renamed = {}
    if predictor.task.get("name") in TASKS and args.columns is None:  # files as of GLUE
        task = TASKS[predictor.task["name"]]
        header = task.header
        renamed = task.renamed
    rows = read_rows(args.file, header, keep_wrong=True, **reader_options(args))
    examples, rows = peek_columns(rows)
    if not set(OUTPUT).isdisjoint(examples):
        raise InputError(f"{args.file}: expected no column {', '.join(OUTPUT)}, which infer.py "
                         f"writes, got {', '.join(examples)}.")

    # the columns of --text, the model's own, or of a text or a set the only one that fits
    columns = predictor.columns
    names = columns
    theirs = {renamed.get(name, name): name for name in examples}
    if args.columns is not None:
        names = list_names(args.columns)
    elif set(columns) <= set(theirs):
        names = [theirs[name] for name in columns]
    elif len(columns) == 1:
        names = choose_columns(args.file, examples, None, is_sets)
    is_table = is_sets and len(names) == 2  # a row has a set and one of its items
    if not set(names) <= set(examples) or len(names) != len(columns) + is_table:
        raise InputError(f"{args.file}: expected the columns {', '.join(columns)}, got "
                         f"{', '.join(examples)}. Name {len(columns)} of them by --text.")
    print(f"columns: {', '.join(names)} of {args.file}", file=sys.stderr)
    if is_table:
        rows = group_items(rows, *names)
        names = names[1:]
    for row in rows:
        cells = tuple(row.get(name) for name in names)
        yield cells if len(cells) == 2 else cells[0], row


def group_items(rows, page_column, item_column):
    """Yield a row for each page, with the list of its items, of rows of a page and an item."""
    pages = {}
    for row in rows:
        page = str(row.get(page_column))
        pages.setdefault(page, []).append(row.get(item_column))
    for page, items in pages.items():
        yield {page_column: page, item_column: items}


def write_rows(args, predictor, out):
    """Write an object for each row of --file: its columns, and notes, prediction, scores, or error.

    scores is what Predictor.predict returns, and prediction the best of it. With --vectors, write a
    vector for each row without error, and the columns of these rows.
    """
    head = None if args.vectors else predictor.config.head
    rows = read_file(args, predictor)
    num_rows = 0
    notes = Counter()  # of how many rows
    errors = []
    vectors = []
    for part in iter(lambda: list(itertools.islice(rows, ROWS)), []):  # until none is left
        good = []
        for row, columns in part:
            num_rows += 1
            try:
                columns["notes"] = predictor.read(row, head).notes
                good.append((row, columns))
            except InputError as error:  # a bad row stops no other
                columns["error"] = str(error)
                errors.append(f"row {num_rows:,}: {error}")
            notes.update(note.partition(":")[0] for note in columns.get("notes", []))
        texts = [row for row, _ in good]
        if args.vectors is not None:
            vectors.extend(predictor.embed(texts))
            part = good
        else:
            for (row, columns), result in zip(good, predictor.predict(texts, args.top_k)):
                columns |= dict(prediction=find_best(predictor, row, result), scores=result)
        for _, columns in part:
            print(to_json(columns), file=out)
    if len(errors) == num_rows:
        raise InputError(f"{args.file}: expected rows that this model can read, got none. "
                         f"{''.join(errors[:1])}")
    if args.vectors is not None:
        np.save(args.vectors, vectors)
        print(f"Saved {args.vectors} and {args.out}: {len(vectors):,} rows", file=sys.stderr)
    print(f"{num_rows:,} rows, {len(errors):,} with an error", *errors[:1], sep="; the first: ",
          file=sys.stderr)
    for note, count in notes.items():
        print(f"{count:,} rows: {note}", file=sys.stderr)


def to_json(row):
    """Return a dict as JSON. It has no NaN and no infinity: they become null, at any depth."""
    def to_plain(value):
        return value.tolist() if torch.is_tensor(value) else str(value)

    text = json.dumps(row, default=to_plain)
    row = json.loads(text, parse_constant=lambda name: None)
    return json.dumps(row, ensure_ascii=False)


# -------------------------------------------------------------------------------------------------
# The script


def build_parser():
    """Return the parser of all flags."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="infer.py", description=__doc__,
        usage="python infer.py --ckpt DIR (TEXT ... | --file FILE | --near WORD ...) [flags]",
        formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("texts", nargs="*", metavar="TEXT", help="a text, or an item set; of pairs both texts")
    add("--ckpt", metavar="DIR", default=Path(__file__).with_name("models") / "docstrings.pt",
        help="of pretrain.py or finetune.py (default: models/docstrings.pt, finds misplaced words)")
    add("--near", nargs="+", metavar="WORD", help="list the words that are most similar to these")
    add("--file",
        help="predict each row of a .txt .csv .tsv .jsonl .json .parquet (or .gz): a JSON object "
             "with its columns, and prediction, scores and notes, or error")
    add("--out", metavar="OUT.jsonl", help="write these objects here (default: on the screen)")
    add("--vectors", metavar="OUT.npy",
        help="write vectors instead, float32 (n, d), and to --out (default: OUT.jsonl) their rows, "
             "those without an error")
    add("--text", "--field", dest="columns", metavar="A[,B]",
        help="columns to read in --file (default: the task's, text, or the only one)")
    add_reader_flags(add)
    add("--words", metavar="FILE.txt",
        help="words to search among, for --near, or a model that predicts hashes of words "
             "(default: the most frequent of its corpus)")
    add("--truncate", action="store_true",
        help="read the start of a text that is too long for a pre-trained model")
    add("--top_k", type=at_least(1), default=8, help="results to list (default: 8)")
    add("--device", default="cpu", help="cpu, cuda, or auto (default: cpu)")
    return parser


def infer(args):
    """Check the flags, load the model, and answer."""
    check_flags(args)
    if hasattr(sys.stdout, "reconfigure"):  # UTF-8, whatever the locale says
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    print(f"model: {args.ckpt}", file=sys.stderr)
    predictor = Predictor(args.ckpt, find_device(args.device), args.truncate)
    if args.words is not None:
        predictor.set_candidates(read_words(args.words, predictor))
        if args.near is None and predictor.items is not predictor.words:
            raise InputError("--words requires --near, or a model that predicts hashes of words.")
    if args.out is not None:
        with open(args.out, "w", encoding="utf-8", errors="backslashreplace") as out:
            write_rows(args, predictor, out)
    elif args.file is not None:
        write_rows(args, predictor, sys.stdout)
    elif args.near is not None:
        for word, pairs in zip(args.near, predictor.neighbors(args.near, args.top_k)):
            print(word)
            print_pairs(pairs)
    else:
        print_texts(args, predictor)


def print_texts(args, predictor):
    """Print what the model says about each TEXT, or each pair."""
    rows = args.texts
    if len(predictor.columns) == 2:
        rows = list(zip(rows[::2], rows[1::2]))
    if len(rows) * len(predictor.columns) != len(args.texts):
        raise InputError(f"TEXT: expected {', '.join(predictor.columns)}, got {args.texts}.")
    for row, result in zip(rows, predictor.predict(rows, args.top_k)):
        print_result(predictor, row, result, args.top_k)
        for note in predictor.read(row, predictor.config.head).notes:
            print(f"note: {note}")


def check_flags(args):
    """Raise an InputError where flags do not go together; choose --out where it follows."""
    if [args.texts == [], args.file is None, args.near is None].count(False) != 1:
        raise InputError("expected one of TEXT, --file and --near. See --help.")
    of_files = [args.out, args.vectors, args.columns, args.encoding, args.sep]
    if args.file is None and of_files != [None] * 5:
        raise InputError("--out, --vectors, --text, --encoding and --sep require --file.")
    if args.vectors is not None and not args.vectors.endswith(".npy"):
        raise InputError(f"--vectors: expected a name that ends in .npy, got {args.vectors}.")
    if args.vectors is not None and args.out is None:
        args.out = args.vectors.removesuffix(".npy") + ".jsonl"
    if args.out is not None and os.path.exists(args.out) and os.path.samefile(args.out, args.file):
        raise InputError(f"--out: expected another file than --file {args.file}.")


def read_words(path, predictor):
    """Return the distinct words of a text file, as the tokenizer writes them."""
    words = []
    with blame_file(path):
        lines = Path(path).read_text("utf-8-sig").splitlines()
    for line in lines:
        words += predictor.tokenizer.split(line)[0]
    if not words:
        raise InputError(f"--words {path}: expected words, got none.")
    return list(dict.fromkeys(words))


def main(argv=None):
    """Parse the command line, argv list[str] or None, and predict. Bad input exits with code 2."""
    return run_script("infer.py", infer, build_parser().parse_args(argv))


if __name__ == "__main__":
    main()
