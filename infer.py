"""Apply a trained model: misplaced words, masked words, item sets, labels, answers, similar words.

    python infer.py --ckpt out/proj-lsh "if the two arrays have kubernetes same shape"
    python infer.py --ckpt out/lookup-bpe-mlm "Return the [MASK] of a list."    fill a mask
    python infer.py --ckpt out/bloom-items "socket bind listen [MASK]"          complete an item set
    python infer.py --ckpt out/proj-lsh-sst2 "a charming journey"               classify a text
    python infer.py --ckpt out/proj-lsh-squad "Who wrote it?" "It was written by Ada Lovelace."
    python infer.py --ckpt out/proj-lsh --near initalization                    list similar words
    python infer.py --ckpt out/proj-lsh-sst2 --file reviews.csv > labels.jsonl  an object per row
    python infer.py --ckpt out/proj-lsh-sst2 --file dev.tsv --label label       and the score
    python infer.py --ckpt out/proj-lsh --file reviews.csv --vectors out.npy    a vector per row

    from infer import Predictor
    predictor = Predictor("out/proj-lsh")
    words, spans, probabilities = predictor.detect("a text")

Paper map:
    [HF §3.6] Predictor.detect
    [HF §3.3] Predictor.neighbors
    [BERT §3.1] Predictor.fill_mask
    [BERT §4.2] Predictor.answer
    [SB §2.5] Predictor.predict_missing
    [CM] Predictor.predict_missing
Sources:
    [HF] Xue & Aletras 2022, HashFormers
    [BERT] Devlin et al. 2019
    [SB] Superbloom, ICLR 2020 submission
    [CM] Median is all you need, a proposal
Out of scope: scores over seeds, and beside controls (finetune.py).
Deviations:
    1. A new word is hashed like others. Only a fixed vocabulary (lookup, bloom) has unknown words.
Notation:
    L positions   M masked positions   V candidate words   d hidden size
    m vectors or hashes of an item   k hash functions; as an argument, results to return
    R buckets   N rows of a table   E items that a set shows
"""

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from baselines.canine import select_classes
from bloom import SketchMap, beam_search, hash_logp
from common import InputError, at_least, blame_file, find_device, load_checkpoint, run_script
from data.corpus import add_reader_flags, get_ending, is_document, list_names, peek_columns
from data.corpus import read_rows, reader_options
from data.squad import best_spans
from data.tasks import CLASS_METRICS, METRICS, NUMBER_METRICS, TASKS, Task, parse_label
from model import load_model
from objectives import KINDS
from tokenizer import (CLS, FIRST_WORD_ID, MASK, SEP, SPECIALS, UNK, build_inputs,
                       sliding_windows)

MASK_WORD = SPECIALS[MASK]
NO_ANSWER = (0, 0)  # the span of an answer that is not in the context
MAX_NUMBERS = 5  # rows with an error whose numbers are printed
MIN_SPANS = 20  # the probability of an answer is among so many spans, however few are listed


class Predictor:
    """A trained model and its tokenizer. What a model can do depends on its head; predict does it.

    A prediction takes these steps, of which each has a method:

        text --split--> words --token_ids--> token IDs --build_input--> input --logits--> logits

    Args:
        path: str, a checkpoint or its folder.
        device: str or torch.device.
        truncate: bool, a pre-trained model reads the start of a long text, too.

    Attributes:
        model, tokenizer, config: Model, HashTokenizer and Config, or those of baselines/.
        task: dict, what finetune.py says about its task; empty after pretrain.py.
        columns: list[str], the name of each text that the model reads, two of a pair. A name a|b
            means column a or b of a file.
        words: list[str], the candidates of neighbors, at first the corpus's most frequent words.
        items, item_map: list[str], the candidates of predict_missing, and their BloomMap, which
            comes with the model, or SketchMap of words. Of other heads item_map is None.
        notes: list[str], what to know of the last result: a text was cut, has no words, or is a new
            word.

    Raises:
        InputError: The checkpoint is missing or damaged. In methods: the text, or the model's head,
            does not fit.
    """

    def __init__(self, path, device="cpu", truncate=False):
        self.truncate = truncate
        self.notes = []
        checkpoint = load_checkpoint(path)
        with blame_file(path):
            classes = select_classes(checkpoint["config"])
            self.model = load_model(checkpoint, classes.config, classes.model)
            self.config = self.model.config
            self.tokenizer = classes.tokenizer.load(checkpoint["tokenizer"], self.config)
            self.model.set_codes(self.tokenizer.codes())
            self.set_candidates(checkpoint["words"])
        self.model.to(device).requires_grad_(False)
        self.task = checkpoint.get("task", {})
        self.columns = self.task.get("texts", ["text"])
        if self.config.head == "span":
            self.columns = ["question", "context"]

    def can_predict_any_word(self):
        """Return whether predict_missing searches among any words, by their sketch hashes."""
        return self.config.head == "hash-mlm" and self.tokenizer.bloom_map is None

    def set_candidates(self, words):
        """Search among words, list[str], from now on. Items of a Bloom map stay as they are."""
        self.words = words
        if self.can_predict_any_word():
            self.items = words
            self.item_map = SketchMap(self.tokenizer.sketch_targets(words), self.config.buckets)
        else:
            self.items = self.tokenizer.words
            self.item_map = self.tokenizer.bloom_map
        if not self.config.order and not self.tokenizer.is_fixed:
            # split finds names of several words only if the tokenizer knows them
            self.tokenizer.add_words(words)

    # From a text to logits, step by step

    def begin(self, texts, head):
        """Clear the notes; raise an InputError where the texts or the head do not fit.

        Args:
            texts: list[str], as many as columns.
            head: str, the head that a prediction needs.
        """
        if self.config.head != head:
            raise InputError(f"--ckpt: expected head {head}, got {self.config.head}.")
        check_texts(texts, self.columns)
        self.notes = []

    def add_note(self, note):
        """Add to the notes, str, once: both texts of a pair may be empty."""
        if note not in self.notes:
            self.notes.append(note)

    def split(self, text):
        """Return the words list[str] of a text, and their spans list[(start, end)] in characters.

        [MASK] is one word for a pre-trained model, and ordinary text for a fine-tuned one.
        """
        if self.task:
            return self.tokenizer.split(text)  # as in fine-tuning
        return split_masked(self.tokenizer, text)

    def token_ids(self, words):
        """Return the token IDs of words, list[int].

        Raises:
            InputError: A pre-trained model got no words, or an item that it does not know.
        """
        ids = self.tokenizer.ids(words).tolist()
        if self.task:  # as in fine-tuning
            if not words:
                self.add_note("a text has no words")
            return ids
        if not words:
            raise InputError("text: expected words, got none.")
        for i, word in enumerate(words):
            if word == MASK_WORD:
                ids[i] = MASK
            elif ids[i] == UNK and not self.config.order:
                raise InputError(f"text: expected {MASK_WORD} or items of this model, between "
                                 f"spaces or tabs, got {word!r}.")
        return ids

    def build_input(self, first, second=None):
        """Return the input (L,) of the token IDs of a text or pair: cut, with special tokens.

        A fine-tuned model reads the start of a long text. A pre-trained one refuses a long text
        unless truncate is set.
        """
        c = self.config
        if self.task:  # as in fine-tuning
            has_bag = c.bag > 0  # a bag of words reads what the encoder does not
            inputs, num_cut = build_inputs(
                first, second, c.length, self.tokenizer.separator, has_bag)
        else:
            room = c.length
            if c.order:
                room -= 2  # for [CLS] and [SEP], which a set does not have
            inputs = first[:room]
            num_cut = len(first) - len(inputs)
            if c.order:
                inputs = [CLS, *inputs, SEP]
        if num_cut > 0:
            if not self.task and not self.truncate:
                raise InputError(f"text: expected at most {c.length} positions (--length), "
                                 f"got {c.length + num_cut}. Use --truncate.")
            self.add_note(f"cut to {c.length} positions (--length)")  # a bag reads the rest, too
        return inputs

    def read(self, texts):
        """Return the input (L,) of a text or pair, list[str]: all steps before the logits."""
        texts_ids = []
        for text in texts:
            words, _ = self.split(text)
            texts_ids.append(self.token_ids(words))
        return self.build_input(*texts_ids)

    def refresh_codes(self):
        """Give the model the codes of words that token_ids has added, before it reads their IDs."""
        codes = self.tokenizer.codes()
        if len(codes) > len(self.model.codes):
            self.model.set_codes(codes)

    def to_batch(self, inputs):
        """Give the model the codes of new words; return inputs (L,) as int64 (1, L) for it."""
        self.refresh_codes()
        return torch.tensor(inputs, dtype=torch.int64, device=self.model.device)[None]

    def logits(self, inputs):
        """Return the logits of an input (L,): sr (L, 3), span (L, 2) or classify (labels,)."""
        return self.model(self.to_batch(inputs))[0]

    def read_masks(self, text):
        """Read a text with M [MASK]: a head that predicts words does so at these positions alone.

        Returns:
            words, list[str]; their token IDs, list[int]; logits of head mlm (M, N), of hash-mlm
            (M, m, m·R), or (M, k, R) for words.

        Raises:
            InputError: There is no [MASK].
        """
        words, _ = self.split(text)
        word_ids = self.token_ids(words)
        inputs = self.to_batch(self.build_input(word_ids))  # (1, L)
        [positions] = torch.where(inputs[0] == MASK)  # (M,)
        if len(positions) == 0:
            message = 'text: expected [MASK], as in "the [MASK] statement", got none.'
            if not self.config.order:
                message += " A set is one text, line or cell, with all its items."
            raise InputError(message)
        return words, word_ids, self.model(inputs, masked_positions=positions)

    # Predictions

    def detect(self, text):
        """Judge each word: is it intact, shuffled or random? [HF §3.6]

        Args:
            text: str.

        Returns:
            words list[str], of a text that was cut those that were read; spans list[(start, end)]
            in characters; float (words, 3), the probabilities of objectives.KINDS.
        """
        self.begin([text], "sr")
        words, spans = self.split(text)
        ids = self.token_ids(words)
        if MASK in ids:
            raise InputError("text: expected no [MASK], as head sr does not fill it. Train with "
                             "pretrain.py --objective hash-mlm, or --emb lookup --objective mlm.")
        inputs = self.build_input(ids)  # (L,)
        logits = self.logits(inputs)  # (L, 3)
        probabilities = logits[1:-1].softmax(-1).cpu()  # without [CLS] and [SEP]
        num_read = len(probabilities)
        return words[:num_read], spans[:num_read], probabilities

    def fill_mask(self, text, k=8):
        """Predict each [MASK] of a text. [BERT §3.1]

        Args:
            text: str.
            k: int, words for each.

        Returns:
            A list, one for each [MASK], of the k best pairs (word, probability). Of a set, items
            that it shows are left out.
        """
        self.begin([text], "mlm")
        _, ids, logits = self.read_masks(text)  # logits (M, N)
        if not self.config.order:
            logits[:, ids] = -torch.inf  # what the set shows
        vocabulary = self.tokenizer.words
        probabilities = logits[:, FIRST_WORD_ID:].softmax(-1)  # no special tokens
        values, best = probabilities.topk(min(k, len(vocabulary)))  # (M, k) each
        results = []
        for numbers, shares in zip(best.tolist(), values.tolist()):
            # an item that is left out has 0, or NaN if the set shows all items
            pairs = [(vocabulary[i], p) for i, p in zip(numbers, shares) if p > 0]
            results.append(pairs)
        return results

    def predict_missing(self, text, k=8):
        """Predict each [MASK] of a text by its hashes, among all items. [SB §2.5] [CM]

        Args:
            text: str.
            k: int, items for each.

        Returns:
            A list, one for each [MASK], of dict: items, the k best pairs (name, sum of the
            log-probabilities of its hashes), which the search has certified; scored, int, items
            that it looked at; total, int, all items. Of a set, items that it shows are left out.
        """
        self.begin([text], "hash-mlm")
        words, _, logits = self.read_masks(text)  # logits (M, m, m·R) or (M, k, R)
        shown = []  # E items, the same for each [MASK]
        if not self.config.order:
            visible = set(words)
            shown = [i for i, name in enumerate(self.items) if name in visible]
        exclude = torch.tensor([shown] * len(logits), dtype=torch.int64, device=logits.device)
        logp = hash_logp(logits, self.item_map)  # (M, m, R)
        # without a limit of rounds the search goes on until the k best are certified
        best, scores, _, num_scored = beam_search(
            logp, self.item_map, k, beam=k, rounds=None, exclude=exclude)
        results = []
        for numbers, values, scored in zip(best.tolist(), scores.tolist(), num_scored.tolist()):
            # -1: fewer than k items are left
            items = [(self.items[i], value) for i, value in zip(numbers, values) if i >= 0]
            results.append(dict(items=items, scored=scored, total=len(self.items)))
        return results

    def classify(self, *texts, k=None):
        """Label a text or a pair.

        Args:
            texts: one str, or two of a pair.
            k: int, labels to return; None: all.

        Returns:
            list of (label, probability), best first. Of a regression one pair (name, number).
        """
        self.begin(texts, "classify")
        inputs = self.read(texts)  # (L,)
        logits = self.logits(inputs)  # (labels,)
        labels = self.task["labels"]
        if labels is None:
            name = self.task["label"].split("|")[-1]
            mean, deviation = self.task["scale"]
            return [(name, logits.item() * deviation + mean)]
        pairs = zip(labels, logits.softmax(-1).tolist())
        return sorted(pairs, key=lambda pair: -pair[1])[:k]

    def answer(self, question, context, k=8):
        """Find the words of a context that answer a question. [BERT §4.2]

        Args:
            question, context: str. A long context is read in windows.
            k: int, answers.

        Returns:
            list of (text, (start, end), probability), best first; "" is no answer. The probability
            is that among the 20 best spans, or k if k is larger.
        """
        self.begin([question, context], "span")
        question_words, _ = self.split(question)
        question_ids = self.token_ids(question_words)
        context_words, spans = self.split(context)
        context_ids = self.token_ids(context_words)
        windows = sliding_windows(
            question_ids, context_ids, self.config.length, self.task["stride"])
        if windows[0].first < 3 + len(question_ids):  # [CLS], all of the question, [SEP] [SEP]
            self.add_note(f"the question was cut, to half of {self.config.length} positions "
                          "(--length)")
        num_best = max(k, MIN_SPANS)

        scores = {}  # (start, end) in characters, or NO_ANSWER -> score
        null_scores = []
        for window in windows:
            best, null_score = self.find_spans(window, num_best)
            null_scores.append(null_score)
            for first_word, last_word, score in best:
                start, _ = spans[first_word]
                _, end = spans[last_word]
                start, end = strip_span(context, start, end)
                if start < end:  # two windows may share a span: the better score counts
                    old_score = scores.get((start, end), -torch.inf)
                    scores[start, end] = max(score, old_score)
        if self.task["null"]:
            # all windows have it. There is no answer only if none has one: the lowest counts
            scores[NO_ANSWER] = min(null_scores)

        # of equal scores the first place, so no answer
        places = sorted(scores, key=lambda place: (-scores[place], place))[:num_best]
        probabilities = torch.tensor([scores[place] for place in places]).softmax(0).tolist()
        answers = []
        for (start, end), p in zip(places[:k], probabilities):
            answers.append((context[start:end], (start, end), p))
        return answers

    def find_spans(self, window, num_best):
        """Find the best spans of a window, num_best at most; window is one of sliding_windows.

        Returns:
            list of (first word, last word, score), words of the context; and float, the score of
            no answer.
        """
        inputs, first, start, stop = window  # word start of the context is at position first
        logits = self.logits(inputs)[None]  # (1, L, 2)
        is_context = torch.zeros(1, len(inputs), dtype=torch.bool, device=logits.device)
        is_context[:, first:first + stop - start] = True
        scores, firsts, lasts, null_scores = best_spans(
            logits, is_context, num_best, self.task["longest"])
        shift = start - first  # from a position of the window to a word of the context
        spans = []
        rows = zip(firsts[0].tolist(), lasts[0].tolist(), scores[0].tolist())
        for first_position, last_position, score in rows:
            if score > -torch.inf:  # a window of few words has fewer spans
                spans.append((first_position + shift, last_position + shift, score))
        return spans, null_scores.item()

    def neighbors(self, word, k=8):
        """Find the candidates whose embeddings are most similar to a word's. [HF §3.3]

        The mean vector of all is subtracted first, so the cosine depends on the candidates.

        Args:
            word: str, seen in training or not.
            k: int, words.

        Returns:
            list of (word, cosine), best first.
        """
        self.require_words("--near")
        self.notes = []
        word = self.read_word(word)
        others = [other for other in self.words if other != word]
        if self.tokenizer.is_fixed:  # all unknown words would have one vector
            others = [other for other in others if other in self.tokenizer.id_of_word]
        elif word not in self.words:
            self.add_note("not among the words to search; if training had no such word, its "
                          "vector comes from its hash alone")
        if not others:
            raise InputError("--words: expected words to search among, got none.")
        ids = self.to_batch(self.tokenizer.ids([word, *others]))  # (1, 1 + V)
        x = self.model.embed(ids).view(1 + len(others), -1)  # (1 + V, m·d)
        x = F.normalize(x - x.mean(0), dim=-1)
        cosines = x[1:] @ x[0]  # (V,)
        values, best = cosines.topk(min(k, len(others)))
        return [(others[i], value) for i, value in zip(best.tolist(), values.tolist())]

    def read_word(self, text):
        """Return the only word of a text, as the tokenizer writes it; an InputError without one."""
        words, _ = self.split(text)
        ids = self.token_ids(words)
        if len(words) != 1 or ids[0] in (UNK, MASK):
            raise InputError("--near: expected one word or piece of this model, "
                             f"got {' '.join(words)!r}.")
        c = self.config
        if c.code_format in ("index", "chunks", "bits"):
            num_bits = c.bits
            if c.code_format == "index":
                num_bits = c.rows  # the index is one of so many hyperplanes, whose signs are bits
            # n-gram LSH gives a word without a known n-gram bits that are all 0, and index 0
            if not self.tokenizer.hash.bits(words, num_bits).any():
                raise InputError("--near: expected a word with an n-gram that the hash knows, "
                                 f"got {words[0]!r}.")
        return words[0]

    def require_words(self, flag):
        """Raise an InputError for a model of characters: no vector of a character is trained."""
        if self.config.code_format == "points":  # of baselines/canine.py
            raise InputError(f"{flag}: expected a model of words, got canine, which trains labels "
                             "alone.")

    def embed(self, rows):
        """Return a vector for each text or pair: the mean of the encoder's outputs.

        Args:
            rows: iterable of str, or of list[str] for pairs. Of long texts see build_input.

        Returns:
            float32 ndarray (rows, d).

        Raises:
            InputError: There are no rows, or one has no vector; its number from 1 is named.
        """
        if isinstance(rows, str):  # it would have a vector for each letter
            raise InputError(f"rows: expected a list of texts, got {rows!r:.60}.")
        vectors = []
        for number, row in enumerate(rows, 1):
            if isinstance(row, str):
                row = [row]
            try:
                vectors.append(self.embed_text(*row))
            except InputError as error:  # left out, it would shift the vectors of all later rows
                raise InputError(f"row {number:,}: {error}") from error
        if not vectors:
            raise InputError("rows: expected texts, got none.")
        return np.stack(vectors)

    def embed_text(self, *texts):
        """Return the vector of one text or pair, float32 ndarray (d,)."""
        self.require_words("--vectors")
        self.begin(texts, self.config.head)  # any head will do
        ids = self.to_batch(self.read(texts))  # (1, L)
        outputs = self.model.encode(ids)[0]  # (L·m, d)
        return outputs.mean(0).cpu().numpy()

    def predict(self, *texts, k=8):
        """Return what the model says about a text or a pair: the result of its head's method.

        Args:
            texts: one str, or two of a pair.
            k: int, results to return; of detect all words are.

        Returns:
            dict of plain types, by head:

                sr          words, spans, classes, probabilities
                mlm         masks
                hash-mlm    missing
                classify    label, the best one or a number; labels
                span        answers
        """
        check_texts(texts, self.columns)  # a text too many would be taken for k
        head = self.config.head
        if head == "sr":
            words, spans, probabilities = self.detect(*texts)
            return dict(words=words, spans=spans, classes=KINDS,
                        probabilities=probabilities.tolist())
        if head == "mlm":
            return dict(masks=self.fill_mask(*texts, k))
        if head == "hash-mlm":
            return dict(missing=self.predict_missing(*texts, k))
        if head == "classify":
            labels = self.classify(*texts, k=k)
            label, number = labels[0]
            if self.task["labels"] is None:
                label = number
            return dict(label=label, labels=labels)
        if head == "span":
            return dict(answers=self.answer(*texts, k))
        raise InputError(f"--ckpt: expected a head that predict knows, got {head}.")


# Texts


def check_texts(texts, columns):
    """Raise an InputError where texts are not as many str as columns."""
    if None in texts:
        raise InputError(f"text: expected {', '.join(columns)}, got none: the row is damaged or "
                         "has no such cell.")
    are_texts = all(isinstance(text, str) for text in texts)
    if not are_texts or len(texts) != len(columns):
        message = (f"text: expected {len(columns)} ({', '.join(columns)}), "
                   f"got {str(list(texts))[:60]}.")
        if len(texts) > len(columns):
            message += " A pair requires a model of pairs. Many texts go in a --file."
        raise InputError(message)


def split_masked(tokenizer, text):
    """Return the words and spans of a text, in which each literal [MASK] is one word.

    A tokenizer would cut [MASK] up, and BPE would read the text after it, alone, as the start of a
    text. So the tokenizer splits the whole text, with a filler as long as [MASK] in its place:

        text     the [MASK].
        filled   the ######.
        hidden      xxxxxxx
        pieces   the # # # # # # .
        words    the [MASK] .
    """
    places = []  # (start, end, word)
    hidden = set()  # characters at which no word of the text starts
    for match in re.finditer(r" ?(\[MASK\])", text):
        places.append((*match.span(1), MASK_WORD))
        hidden.update(range(*match.span()))  # the space too: BPE may make it a piece of its own
    filled = text.replace(MASK_WORD, choose_filler(tokenizer, text))
    words, spans = tokenizer.split(filled)
    for word, (start, end) in zip(words, spans):
        if start not in hidden:
            places.append((start, end, word))
    places.sort(key=lambda place: place[0])  # by start alone: pieces of one character keep order
    words = [word for _, _, word in places]
    spans = [(start, end) for start, end, _ in places]
    return words, spans


def choose_filler(tokenizer, text):
    """Return a str as long as [MASK] that the tokenizer joins to no word beside it."""
    private = "\ue000"  # a character of no language: neither a letter nor a space
    if tokenizer.subwords is not None:
        border = private  # after a space the next piece would open a word
    elif "\t" in text:
        border = "\t"  # names stand between tabs
    else:
        border = " "
    return border + private * (len(MASK_WORD) - 2) + border


def strip_span(text, start, end):
    """Return start and end of text[start:end] without the white space around it."""
    piece = text[start:end]
    start += len(piece) - len(piece.lstrip())
    return start, start + len(piece.strip())


# Files


def read_texts(path, columns, chosen=None, others=(), is_sets=False, **reading):
    """Read a file row by row.

    Args:
        path: str, .txt (a tab between the texts of a pair), .csv, .tsv, .jsonl, .json, .parquet, or
            one of them with .gz.
        columns: list[str], one for each text. a|b: either name.
        chosen: str, "a,b", names instead of them, or None.
        others: list[str], columns that the file must have, too.
        is_sets: bool, a cell may be a list: the items of a set.
        reading: encoding and sep of read_rows.

    Yields:
        list, the texts of a row, of which a missing one is None and a wrong one any value; and the
        row, dict.
    """
    is_pair_file = get_ending(path) == ".txt" and len(columns) == 2
    if is_pair_file:
        reading = dict(sep="\t") | reading
    examples, rows = peek_columns(read_rows(path, keep_wrong=True, **reading))
    names = []
    if examples and not is_pair_file:
        names = choose_text_columns(path, examples, columns, chosen, is_sets)
    if examples and not set(others) <= set(examples):
        raise InputError(f"{path}: expected the columns {', '.join(others)} (--label, --keep), got "
                         f"{', '.join(examples)}.")
    for row in rows:
        if not row:
            texts = [None]  # no object
        elif is_pair_file:
            texts = row["text"]  # sep has cut the line
        else:
            texts = [row.get(name) for name in names]
            if is_sets:
                texts = [join_items(cell) for cell in texts]
        yield texts, row


def choose_text_columns(path, examples, columns, chosen, is_sets):
    """Return the name of each text's column: chosen, the model's own, or the only one that fits.

    Args:
        path, columns, chosen, is_sets: as of read_texts.
        examples: dict, column -> one of its values.
    """
    names = list_names(chosen)
    if chosen is None:
        for column in columns:
            present = [name for name in column.split("|") if name in examples]
            names += present[:1]
        texts = []
        for name, value in examples.items():
            if value is not None and is_document(value, is_sets):
                texts.append(name)
        if not names and len(texts) == 1:
            names = texts
    if len(names) != len(columns) or not set(names) <= set(examples):
        raise InputError(f"{path}: expected the columns {', '.join(columns)}, got the columns "
                         f"{', '.join(examples)}. Name {len(columns)} of them by --text.")
    print(f"columns: {', '.join(names)} of {path}", file=sys.stderr)
    return names


def join_items(cell):
    """Return the items of a set, list[str], as a text with tabs between them; else the cell."""
    if isinstance(cell, list) and all(isinstance(item, str) for item in cell):
        return "\t".join(item.strip() for item in cell)
    return cell


def read_words(path, predictor, **reading):
    """Return the distinct words of a file, as the Predictor's tokenizer splits them."""
    words = []
    is_sets = not predictor.config.order
    for texts, _ in read_texts(path, ["text"], is_sets=is_sets, **reading):
        check_texts(texts, ["text"])  # no word is left out in silence
        [text] = texts
        if is_sets:
            text += "\t"  # a line is one name
        words += predictor.tokenizer.split(text)[0]
    if not words:
        raise InputError(f"{path}: expected words, got none.")
    return list(dict.fromkeys(words))


# What people read


def print_prediction(result, text, k):
    """Print what Predictor.predict or neighbors returned for a text, list by list.

    Of the words of a text, which detect returns all, k are listed.
    """
    if "spans" in result:
        print_words(result, text, k)
    for i, best in enumerate(result.get("masks", []), 1):
        print(f"[MASK] {i}")
        print_column([(word, percent(p)) for word, p in best])
    for i, found in enumerate(result.get("missing", []), 1):
        print(f"[MASK] {i}   {found['scored']:,} of {found['total']:,} scored by sums of "
              "log-probabilities, certified: provably the best")
        for name, score in found["items"]:
            print(f"  {score:8.2f}   {show(name)}")
    for key in ("neighbors", "labels"):  # cosines, or probabilities (of a regression the number)
        print_column([(name, f"{value:.3f}") for name, value in result.get(key, [])])
    for answer, (start, end), p in result.get("answers", []):
        if answer == "":
            answer = "(no answer)"
        print(f"  {percent(p)}   {answer}   [{start}:{end}]")
    for note in result.get("notes", []):
        print(f"note: {note}")


def print_words(result, text, k):
    """Print a text with its misplaced words in braces, then the k most suspicious words."""
    line = ""
    last = 0  # first character that is not in line
    for (start, end), p in zip(result["spans"], result["probabilities"]):
        guess = KINDS[p.index(max(p))]
        if guess != "intact":
            line += f"{text[last:start]}{{{text[start:end]}:{guess}}}"
            last = end
    print(line + text[last:])
    if line == "":
        print("No word is marked: each is likeliest intact.")
    ranked = sorted(zip(result["words"], result["probabilities"]), key=lambda pair: pair[1][0])
    rows = []
    for word, p in ranked[:k]:
        shares = [f"{kind} {percent(share, 5)}" for kind, share in zip(KINDS, p)]
        rows.append((word, "   ".join(shares)))
    print_column(rows)


def print_column(rows):
    """Print pairs (name, numbers), the names aligned at their right ends."""
    width = 16
    for name, _ in rows:
        width = max(width, min(len(name), 40))  # one endless word does not move the others
    for name, numbers in rows:
        print(f"  {show(name):>{width}}   {numbers}")


def percent(p, width=6):
    """Return a probability as people read it, such as "  4.2%"."""
    return f"{p:{width}.1%}"


def show(piece):
    """Return a subword piece with a space for its sign of a space."""
    return piece.replace("Ġ", " ")


# The script


def build_parser():
    """Return the parser of all flags."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="infer.py",
        description=(__doc__ or "").split("Paper map")[0],  # python -OO leaves None
        formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("texts", nargs="*", metavar="TEXT",
        help="the text, or the pair; without any, a prompt asks")
    add("--ckpt", metavar="DIR",
        help="folder of a run of pretrain.py or finetune.py (default: models/docstrings.pt, which "
             "finds misplaced words)")
    add("--file", metavar="FILE",
        help="one JSON object per row of a .txt (a tab between pairs), .csv, .tsv, .jsonl, .json, "
             ".parquet, or .gz: line (number of the row, from 1), texts, results, notes or error; "
             "exit code 2: all failed")
    add("--text", dest="columns", metavar="A[,B]",
        help="columns; requires --file (default: the task's, text or the only one)")
    add_reader_flags(add)
    add("--label", metavar="COLUMN",
        help="score the labels against this column; requires --file and a model that was "
             "fine-tuned to classify")
    add("--keep", metavar="A[,B…]",
        help="columns to copy to the objects, under kept; requires --file")
    add("--truncate", action="store_true",
        help="read the start of a text that is too long for a pre-trained model (default: it is an "
             "error)")
    add("--words", metavar="FILE",
        help="words to search among, new ones too; requires --near or a model that predicts the "
             "hashes of words (default: those of the checkpoint, the most frequent)")
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--near", action="store_true",
        help="list the words whose embeddings are most similar to TEXT's")
    group.add_argument(
        "--vectors", metavar="OUT.npy",
        help="write a vector per TEXT or row instead, float32 (n, d): the mean of the encoder's "
             "outputs; NaN for a row in error")
    add("--top_k", type=at_least(1), default=8, metavar="k",
        help="how many answers or words to list (default: 8)")
    add("--device", default="cpu", metavar="NAME", help="cpu, cuda, or auto (default: cpu)")
    return parser


def infer(args):
    """Check the flags, load the model, then answer the file, the texts, or the prompt."""
    check_flags(args)
    predictor = load_predictor(args)
    if args.vectors is not None:  # before the work, as it may fail
        Path(args.vectors).parent.mkdir(parents=True, exist_ok=True)
    if args.file is not None and args.vectors is not None:
        write_vectors(args, predictor)
    elif args.file is not None:
        write_answers(args, predictor)
    elif args.vectors is not None:
        save_vectors(args.vectors, [predictor.embed_text(*args.texts)])
    elif args.texts:
        print_prediction(ask(args, predictor, args.texts), args.texts[0], args.top_k)
    else:
        answer_prompt(args, predictor)


def check_flags(args):
    """Raise an InputError where flags do not go together, whatever the model is."""
    if args.texts and args.file is not None:
        raise InputError("--file: expected a file or TEXT, got both.")
    of_rows = [args.columns, args.label, args.keep]
    if args.file is None and of_rows != [None, None, None]:
        raise InputError("--text, --label and --keep require --file.")
    if args.label is not None and args.label in list_names(args.columns):
        raise InputError(f"--text: expected other columns than --label {args.label}.")
    if reader_options(args) and args.file is None and args.words is None:
        raise InputError("--encoding and --sep require --file or --words.")
    if args.vectors is not None:
        if not args.vectors.endswith(".npy"):
            raise InputError(f"--vectors: expected a name that ends in .npy, got {args.vectors}.")
        if args.keep is not None:
            raise InputError("--keep requires objects, which --vectors does not write.")


def load_predictor(args):
    """Return the Predictor of --ckpt with the candidates of --words; it must fit the flags."""
    path = args.ckpt
    if path is None:
        path = Path(__file__).with_name("models") / "docstrings.pt"
        print(f"model: {path} (its card: models/README.md). --ckpt takes another.",
              file=sys.stderr)
    predictor = Predictor(path, find_device(args.device), args.truncate)
    is_labeling = predictor.config.head == "classify" and not args.near and args.vectors is None
    if args.label is not None and not is_labeling:
        raise InputError("--label requires a model that was fine-tuned to classify, without --near "
                         "and --vectors.")
    if args.words is not None:
        if not args.near and not predictor.can_predict_any_word():
            raise InputError("--words requires --near, or a model that predicts hashes of words.")
        predictor.set_candidates(read_words(args.words, predictor, **reader_options(args)))
    return predictor


def list_columns(args, predictor):
    """Return the name of each text that the Predictor is asked about."""
    if args.near:
        return ["word"]
    return predictor.columns


def ask(args, predictor, texts):
    """Return what the Predictor says about a text or pair, or with --near about a word, dict."""
    if args.near:
        check_texts(texts, ["word"])
        result = dict(neighbors=predictor.neighbors(*texts, args.top_k))
    else:
        result = predictor.predict(*texts, k=args.top_k)
    if predictor.notes:
        result["notes"] = predictor.notes
    return result


def answer_prompt(args, predictor):
    """Read texts from the keyboard or a pipe, and print what the Predictor says about each."""
    columns = list_columns(args, predictor)
    prompts = [""] * len(columns)
    is_dialog = sys.stdin.isatty() and sys.stdout.isatty()  # no pipe
    if is_dialog:
        print("One text a line; Ctrl-D ends.")
        prompts = [f"{column}> " for column in columns]
    while True:
        try:
            texts = [input(prompt) for prompt in prompts]
            print_prediction(ask(args, predictor, texts), texts[0], args.top_k)
        except EOFError:
            if is_dialog:
                print()
            return
        except InputError as error:  # does not end the conversation
            print(f"infer.py: {error}", file=sys.stderr)


# The rows of --file


def read_file(args, predictor):
    """Return the rows of --file as read_texts yields them: texts for the Predictor, and the row."""
    others = list_names(args.keep)
    if args.label is not None:
        others.append(args.label)
    return read_texts(
        args.file, list_columns(args, predictor), args.columns, others,
        is_sets=not predictor.config.order, **reader_options(args))


class FileReport:
    """Counts the rows of a file, with their errors and notes, for the lines after the last row."""

    def __init__(self, path):
        self.path = path
        self.num_rows = 0
        self.error_rows = []  # their numbers, from 1
        self.first_error = ""
        self.note_counts = Counter()

    def add(self, result):
        """Count a row's result: dict, in which error is a str and notes are list[str], if any."""
        self.num_rows += 1
        if "error" in result:
            if not self.error_rows:
                self.first_error = f"row {self.num_rows:,}: {result['error']}"
            self.error_rows.append(self.num_rows)
        self.note_counts.update(result.get("notes", []))

    def print_lines(self):
        """Print the lines to stderr; raise an InputError if all rows have an error."""
        num_errors = len(self.error_rows)
        if num_errors == self.num_rows:
            raise InputError(f"{self.path}: expected rows that this model can read, got none. "
                             f"{self.first_error}")
        if num_errors > 0:
            numbers = [f"{number:,}" for number in self.error_rows[:MAX_NUMBERS]]
            if num_errors > MAX_NUMBERS:
                numbers.append("...")
            print(f"{num_errors:,} of {self.num_rows:,} rows have an error ({', '.join(numbers)}), "
                  f"the first is {self.first_error}", file=sys.stderr)
        for note, count in self.note_counts.items():
            print(f"{count:,} of {self.num_rows:,} rows: {note}", file=sys.stderr)


def write_answers(args, predictor):
    """Print a JSON object for each row, then the scores of --label. A bad row stops no other."""
    kept_names = list_names(args.keep)
    task = None  # without --label nothing is scored
    label_place = None
    if args.label is not None:
        task = find_task(predictor.task)
        label_place = f"--label {args.label}"
        if task.labels is not None:
            label_place += " (upper and lower case differ)"
    report = FileReport(args.file)
    predicted = []
    truth = []
    for number, (texts, row) in enumerate(read_file(args, predictor), 1):
        result = {}
        try:
            result = ask(args, predictor, texts)
            if args.label is not None:
                truth.append(parse_label(row.get(args.label), task, label_place))
                predicted.append(result["label"])
        except InputError as error:  # if the label is at fault, the prediction stays
            result["error"] = str(error)
        report.add(result)
        line = dict(line=number, texts=texts)
        if kept_names:
            line["kept"] = {}
        for name in kept_names:
            value = row.get(name)
            if value != value:  # NaN, an empty cell in a column of numbers, is no JSON
                value = None
            line["kept"][name] = value
        print(json.dumps(line | result, default=str))
    report.print_lines()
    if args.label is not None:
        print_scores(task, predicted, truth)


def write_vectors(args, predictor):
    """Save a vector for each row. A bad row stops no other."""
    report = FileReport(args.file)
    vectors = []
    for texts, _ in read_file(args, predictor):
        # NaN of a bad row: left out, it would shift the vectors of all later ones
        vector = np.full(predictor.config.width, np.nan, np.float32)
        result = {}
        try:
            vector = predictor.embed_text(*texts)
            result["notes"] = predictor.notes
        except InputError as error:
            result["error"] = str(error)
        report.add(result)
        vectors.append(vector)
    report.print_lines()
    save_vectors(args.vectors, vectors)


def save_vectors(path, vectors):
    """Write a list of vectors (d,) as float32 (n, d) to a .npy file."""
    vectors = np.stack(vectors)
    np.save(path, vectors)
    print(f"Saved {path}: float32 {vectors.shape}", file=sys.stderr)


def find_task(description):
    """Return the Task that a checkpoint's description is of, with its metrics."""
    name = description.get("name")
    if name in TASKS:
        return TASKS[name]
    metrics = CLASS_METRICS
    if description["labels"] is None:
        metrics = NUMBER_METRICS
    return Task(description["texts"], description["labels"], metrics)


def print_scores(task, predicted, truth):
    """Print a Task's metrics of labels, in percent and to stderr."""
    if task.labels is not None:  # numbers of classes
        predicted = [task.labels.index(label) for label in predicted]
        truth = [task.labels.index(label) for label in truth]
    scores = []
    for metric in task.metrics:
        score = 100 * METRICS[metric](np.array(predicted), np.array(truth))
        scores.append(f"{metric} {score:.2f}")
    print(f"{', '.join(scores)} of {len(truth):,} rows", file=sys.stderr)


def main(argv=None):
    """Parse the command line, argv list[str] or None, and predict. Bad input exits with code 2."""
    return run_script("infer.py", infer, build_parser().parse_args(argv))


if __name__ == "__main__":
    main()
