"""Apply a trained model: misplaced words, masked words, item sets, labels, answers, similar words.

    python infer.py --ckpt out/proj-lsh "if the two arrays have kubernetes same shape"
    python infer.py --ckpt out/lookup-bpe-mlm "Return the [MASK] of a list."    fill a mask
    python infer.py --ckpt out/bloom-items "socket bind listen [MASK]"          complete an item set
    python infer.py --ckpt out/proj-lsh-sst2 "a charming journey"               classify a text
    python infer.py --ckpt out/proj-lsh-squad "Who wrote it?" "It was written by Ada Lovelace."
    python infer.py --ckpt out/proj-lsh --near initalization                    list similar words
    python infer.py --ckpt out/proj-lsh-sst2 --file reviews.csv > labels.jsonl  an object per row
    python infer.py --ckpt out/proj-lsh --file reviews.csv --vectors out.npy    a vector per row

    from infer import Predictor
    p = Predictor("out/proj-lsh")
    words, spans, probabilities = p.detect("a text")

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
Out of scope: scores over a data set (pretrain.py, finetune.py).
Deviations:
    1. A new word is hashed like others. Only a fixed vocabulary (lookup, bloom) has unknown words.
Notation:
    L positions   M masked positions   V candidate words   d hidden size   T bits
    m vectors or hashes of an item   k hash functions   R buckets   N rows of a table
"""

import argparse
import difflib
import json
import re
import sys

import numpy as np
import torch
import torch.nn.functional as F

from baselines.canine import select_classes
from bloom import SketchMap, beam_search, hash_logp
from common import InputError, at_least, blame_file, load_checkpoint, resolve_device, run_script
from data.corpus import get_ending, read_rows
from data.squad import best_spans
from model import load_model
from objectives import KINDS
from tokenizer import (CLS, FIRST_WORD_ID, MASK, SEP, SPECIALS, UNK, build_inputs,
                       sliding_windows)

MASK_WORD = SPECIALS[MASK]
MIN_SPANS = 20  # best answers that share the probability
TRAINING = {  # head -> the command that trains it, for errors
    "sr": "pretrain.py --objective sr",
    "mlm": "pretrain.py --emb lookup --objective mlm",
    "hash-mlm": "pretrain.py --objective hash-mlm",
    "classify": "finetune.py",
    "span": "finetune.py --task squad",
}


class Predictor:
    """A trained model and its tokenizer. Each ability is a method, and predict calls the right one.

    Args:
        path: str, a checkpoint or its folder.
        device: str or torch.device.

    Attributes:
        model, tokenizer, config: Model, HashTokenizer and Config, or those of baselines/.
        task: dict, what finetune.py says about its task.
        columns: list[str], the texts that the model reads: one, or two of a pair. a|b: either name.
        words: list[str], the words that neighbors and predict_missing search among.

    Raises:
        InputError: The checkpoint is missing or damaged. In methods: the text, or the model's head,
            does not fit.
    """

    def __init__(self, path, device="cpu"):
        checkpoint = load_checkpoint(path)
        with blame_file(path):
            *classes, tokenizer_class = select_classes(checkpoint["config"])
            self.model = load_model(checkpoint, classes)
            self.config = self.model.config
            self.tokenizer = tokenizer_class.load(checkpoint["encoder"], self.config)
            self.task = checkpoint.get("task", {})
            self.columns = ["text"]
            if self.config.head == "classify":
                self.columns = self.task["texts"]
            elif self.config.head == "span":
                self.columns = ["question", "context"]
            self.model.set_codes(torch.from_numpy(self.tokenizer.codes()))
            self.set_candidates(checkpoint.get("words", []))
        self.model.to(device)

    def set_candidates(self, words):
        """Search among words list[str] from now on, instead of the corpus's most frequent."""
        self.words = words
        self.items = self.tokenizer.words  # what head hash-mlm predicts: the words of its Bloom map
        self.item_map = self.tokenizer.bloom_map
        if self.config.head == "hash-mlm" and self.item_map is None:
            self.items = words
            self.item_map = SketchMap(self.tokenizer.sketch_targets(words), self.config.buckets)
        if not self.config.order and not self.tokenizer.is_fixed:
            self.tokenizer.ids(words)  # names of several words are matched as they are

    # From texts to logits

    def split(self, text):
        """Split a text. [MASK] is a word of its own, but ordinary text for a fine-tuned model.

        Args:
            text: str.

        Returns:
            words list[str], spans list[(start, end)] in characters, and token IDs list[int].

        Raises:
            InputError: There are no words, or an item is unknown. A fine-tuned model reads all.
        """
        if self.config.head in ("classify", "span"):  # as in training
            words, spans = self.tokenizer.split(text)
            return words, spans, self.tokenizer.ids(words).tolist()
        words, spans = split_masked(self.tokenizer, text)
        if len(words) == 0:
            raise InputError("text: expected words, got none.")
        ids = [MASK] * len(words)
        for i, word in enumerate(words):
            if word != MASK_WORD:
                ids[i] = self.tokenizer.ids([word]).item()
                if ids[i] == UNK and not self.config.order:
                    self.refuse_item(word)
        return words, spans, ids

    def refuse_item(self, name):
        """Raise an InputError for a name that is no item, with names that are spelled like it."""
        items = self.tokenizer.words
        candidates = [item for item in items if item[0] == name[0]]  # all would take seconds
        similar = ", ".join(difflib.get_close_matches(name, candidates))
        raise InputError(f"text: expected {MASK_WORD} or one of {len(items):,} items, between "
                         f"spaces or tabs, got {name!r}. Similar items: [{similar}].")

    def read(self, texts):
        """Return the token IDs (L,) that the model reads of texts, list[str]: one, or a pair.

        Of a long context this is the first window, and other long texts are cut as in fine-tuning.
        """
        check_texts(texts, self.columns)
        c = self.config
        ids = [self.split(text)[2] for text in texts]
        if c.head == "span":
            windows = sliding_windows(ids[0], ids[1], c.length, self.task["stride"])
            inputs, *_ = windows[0]
            return inputs
        if c.head == "classify":
            second = None
            if len(ids) == 2:
                second = ids[1]
            has_bag = c.bag > 0  # which reads all words
            inputs, _ = build_inputs(ids[0], second, c.length, self.tokenizer.separator, has_bag)
            return inputs
        [inputs] = ids
        if c.order:
            inputs = [CLS, *inputs, SEP]
        if len(inputs) > c.length:
            raise InputError(f"text: expected at most {c.length} positions (--length), "
                             f"got {len(inputs)}.")
        return inputs

    @torch.no_grad()
    def compute(self, inputs):
        """Return the logits of one input (L,), without a batch dimension."""
        ids = self.prepare(inputs)  # (1, L)
        if not self.config.predicts_rows:
            return self.model(ids, None)[0]  # (L, 3), (L, 2) or (labels,)
        positions = (ids == MASK).flatten().nonzero()[:, 0]  # (M,)
        return self.model(ids, None, positions)  # (M, N), (M, m, m·R) or (M, k, R)

    def prepare(self, inputs):
        """Return inputs (L,) as int64 (1, L) on the model's device. New words get their codes."""
        codes = self.tokenizer.codes()
        if len(codes) > len(self.model.codes):
            self.model.set_codes(torch.from_numpy(codes))
        ids = torch.as_tensor(inputs, dtype=torch.int64)
        return ids[None].to(self.model.device)

    def logits(self, head, *texts):
        """Return compute's logits of one text or pair; InputError if the model has another head."""
        self.check_head(head)
        inputs = self.read(texts)
        if self.config.predicts_rows and MASK not in inputs:
            raise InputError('text: expected [MASK], as in "the [MASK] statement", got none.')
        return self.compute(inputs)

    def check_head(self, head):
        """Raise an InputError if the model has another head."""
        if self.config.head != head:
            raise InputError(f"--ckpt: expected head {head} ({TRAINING[head]}), "
                             f"got {self.config.head}.")

    # The abilities

    def detect(self, text):
        """Judge each word: is it intact, shuffled or random? [HF §3.6]

        Args:
            text: str.

        Returns:
            words list[str]; spans list[(start, end)] in characters; float (words, 3), the
            probabilities of objectives.KINDS.
        """
        logits = self.logits("sr", text)  # (L, 3)
        words, spans, ids = self.split(text)
        if MASK in ids:
            raise InputError(f"text: expected no [MASK] for detect. Train with {TRAINING['mlm']}.")
        probabilities = logits[1:1 + len(words)].softmax(-1).cpu()  # without [CLS] and [SEP]
        return words, spans, probabilities

    def fill_mask(self, text, k=8):
        """Predict each [MASK] of a text. [BERT §3.1]

        Args:
            text: str.
            k: int, words for each.

        Returns:
            A list, one for each [MASK], of the k best pairs (word, probability). A set has an item
            once, so its other items are left out.
        """
        logits = self.logits("mlm", text)  # (M, N)
        if not self.config.order:
            _, _, ids = self.split(text)
            logits[:, ids] = -torch.inf
        words = self.tokenizer.words
        p = logits[:, FIRST_WORD_ID:].softmax(-1)  # no special tokens
        p, best = p.topk(min(k, len(words)))  # (M, k) each
        results = []
        for numbers, shares in zip(best.tolist(), p.tolist()):
            # not those of a set: 0, or NaN if it has all items
            results.append([(words[i], share) for i, share in zip(numbers, shares) if share > 0])
        return results

    def predict_missing(self, text, k=8, beam=None):
        """Predict each [MASK] of a text by its hashes, among the candidates. [SB §2.5] [CM]

        Args:
            text: str.
            k: int, items for each.
            beam: int, buckets of each hash function to look into; None: until certified.

        Returns:
            A list, one for each [MASK], of dict: items, the k best pairs (name, sum of the
            log-probabilities of its hashes), of a set without those that it shows; certified bool,
            provably the best; scored and total, int, of the candidates.
        """
        logits = self.logits("hash-mlm", text)  # (M, m, m·R) or (M, k, R)
        if len(self.items) == 0:
            raise InputError("--words: expected words to search among, got none.")
        exclude = None
        if not self.config.order:
            visible = set(self.split(text)[0])
            shown = [i for i, name in enumerate(self.items) if name in visible]
            exclude = torch.tensor([[-1, *shown]], device=logits.device)  # -1: none
            exclude = exclude.expand(len(logits), -1)  # (M, E)
        rounds = 1
        if beam is None:
            rounds = None  # until certified
            beam = k
        logp = hash_logp(logits, self.item_map)  # (M, m, R)
        numbers, scores, certified, num_scored = beam_search(
            logp, self.item_map, k, beam, rounds, exclude=exclude)
        results = []
        for i in range(len(logits)):
            items = []
            for number, score in zip(numbers[i].tolist(), scores[i].tolist()):
                if number >= 0:  # -1: fewer items were reached
                    items.append((self.items[number], score))
            results.append(dict(items=items, certified=certified[i].item(),
                                scored=num_scored[i].item(), total=len(self.items)))
        return results

    def classify(self, first, second=None, k=None):
        """Label a text or a pair.

        Args:
            first, second: str, and str or None.
            k: int, labels to return; None: all.

        Returns:
            list of (label, probability), best first. Of a regression one pair (name, number).
        """
        texts = [first]
        if second is not None:
            texts.append(second)
        logits = self.logits("classify", *texts)  # (labels,)
        if self.task["labels"] is None:
            name = self.task["label"].split("|")[-1]
            mean, deviation = self.task["scale"]
            return [(name, logits.item() * deviation + mean)]
        pairs = zip(self.task["labels"], logits.softmax(-1).tolist())
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
        self.check_head("span")
        length = self.config.length
        _, _, question_ids = self.split(question)
        _, spans, context_ids = self.split(context)
        windows = sliding_windows(question_ids, context_ids, length, self.task["stride"])
        num_best = max(k, MIN_SPANS)
        scores = {}  # (start, end) in characters -> score; two windows may share words
        for ids, first, start, stop in windows:
            logits = self.compute(ids)[None]  # (1, L, 2)
            position = torch.arange(len(ids), device=logits.device)
            is_context = (position >= first) & (position < first + stop - start)  # (L,)
            best, firsts, lasts, null = best_spans(
                logits, is_context[None], num_best, self.task["longest"])
            for score, i, j in zip(best[0].tolist(), firsts[0].tolist(), lasts[0].tolist()):
                if score == -torch.inf:  # a window of few words has fewer spans
                    break
                begin, _ = spans[start + i - first]
                _, end = spans[start + j - first]
                text = context[begin:end].strip()  # a piece may contain the space before it
                begin = context.index(text, begin)
                place = (begin, begin + len(text))
                if text != "":
                    scores[place] = max(score, scores.get(place, score))
            if self.task["null"]:  # in every window: the least sure one counts
                scores[0, 0] = min(null.item(), scores.get((0, 0), torch.inf))
        # of equal scores the first place, so no answer
        places = sorted(scores, key=lambda place: (-scores[place], place))[:num_best]
        p = torch.tensor([scores[place] for place in places]).softmax(0).tolist()
        answers = []
        for (begin, end), share in zip(places[:k], p):
            answers.append((context[begin:end], (begin, end), share))
        return answers

    def neighbors(self, word, k=8, raw=False):
        """Find the candidates whose embeddings are most similar to a word's. [HF §3.3]

        The mean vector of all is subtracted first, so the cosine depends on the candidates.

        Args:
            word: str, seen in training or not.
            k: int, words.
            raw: bool, compare hash bits, not embeddings.

        Returns:
            list of (word, cosine), or with raw (word, share of equal bits), best first.
        """
        word = self.read_word(word)
        known = self.words
        if self.tokenizer.is_fixed:
            known = [other for other in known if other in self.tokenizer.id_of_word]
        others = [other for other in known if other != word]
        if len(others) == 0:
            raise InputError("--words: expected words to search among, got none.")
        has_bits = self.config.code_format in ("bits", "chunks")
        if has_bits and not self.embed_words([word], raw=True).any():
            raise InputError(f"--near: expected a word with an n-gram that the hash knows, "
                             f"got {word!r}.")
        x = self.embed_words([word, *others], raw)  # (1 + V, m·d) or (1 + V, T)
        if raw:
            similarity = (x[1:] == x[0]).float().mean(1)  # (V,)
        else:
            x = F.normalize(x - x.mean(0), dim=-1)
            similarity = x[1:] @ x[0]  # (V,)
        values, best = similarity.topk(min(k, len(others)))
        return [(others[i], value) for i, value in zip(best.tolist(), values.tolist())]

    def read_word(self, text):
        """Return the only word, or subword piece, of a text."""
        check_texts([text], ["word"])
        words, _, ids = self.split(text)
        if len(words) != 1 or ids[0] in (UNK, MASK):
            raise InputError(f"--near: expected one word or piece of this model, "
                             f"got {' '.join(words)!r}.")
        return words[0]

    @torch.no_grad()
    def embed_words(self, words, raw=False):
        """Return the vectors in the embedding, or with raw the hash bits, of words.

        Args:
            words: list[str].
            raw: bool.

        Returns:
            float (len(words), m·d), or (len(words), T).
        """
        self.check_has_words()
        if not raw:
            ids = self.prepare(self.tokenizer.ids(words))  # (1, V)
            return self.model.embed(ids).view(len(words), -1).cpu()
        if self.config.code_format not in ("bits", "chunks"):
            raise InputError(f"--raw requires an embedding of hash bits, got {self.config.emb}.")
        bits = self.tokenizer.hash.bits(words, self.config.bits)
        return torch.from_numpy(bits).float()

    @torch.no_grad()
    def embed(self, rows):
        """Return a vector for each text or pair: the mean of the encoder's outputs.

        Args:
            rows: list of str, or of list[str] for pairs. Of a long context the first window counts.

        Returns:
            float32 ndarray (len(rows), d).
        """
        self.check_has_words()
        vectors = []
        for row in rows:
            if isinstance(row, str):
                row = [row]
            ids = self.prepare(self.read(row))  # (1, L)
            outputs = self.model.encode(ids)[0]  # (L·m, d)
            vectors.append(outputs.mean(0).cpu())
        return torch.stack(vectors).numpy()

    def check_has_words(self):
        """Raise an InputError for CANINE, whose characters have no vectors that are trained."""
        if self.config.code_format == "points":
            raise InputError("--vectors: expected a model of words, got canine, "
                             "which trains labels alone.")

    def predict(self, *texts, k=8, beam=None):
        """Return what the model says about a text or a pair, by the ability that its head has.

        Args:
            texts: one str, or two of a pair.
            k, beam: as those of the ability, if it has them.

        Returns:
            dict of plain types: words, spans, classes and probabilities; masks; missing; label, the
            best one or the number of a regression, and labels; or answers.
        """
        head = self.config.head
        if head == "sr":
            words, spans, p = self.detect(*texts)
            return dict(words=words, spans=spans, classes=KINDS, probabilities=p.tolist())
        if head == "mlm":
            return dict(masks=self.fill_mask(*texts, k))
        if head == "hash-mlm":
            return dict(missing=self.predict_missing(*texts, k, beam))
        if head == "classify":
            labels = self.classify(*texts, k=k)
            label, number = labels[0]
            if self.task["labels"] is None:
                label = number
            return dict(label=label, labels=labels)
        if head == "span":
            return dict(answers=self.answer(*texts, k))
        raise InputError(f"--ckpt: expected head {', '.join(TRAINING)}, got {head}.")


def check_texts(texts, columns):
    """Raise an InputError where texts are not as many str as columns."""
    strings = [text for text in texts if isinstance(text, str)]
    if not len(strings) == len(texts) == len(columns):
        raise InputError(f"text: expected {len(columns)} ({', '.join(columns)}), "
                         f"got {str(list(texts))[:60]}.")


def split_masked(tokenizer, text):
    """Return the words and spans of a text, in which each literal [MASK] is one word."""
    # The whole text is split, with signs that join nothing in place of each mask: a subword piece
    # contains the space before it and depends on its neighbors.
    signs = " \0\0\0\0 "  # as long as [MASK]; of a set an item of its own
    if tokenizer.subwords is not None:
        signs = "\ue000" * len(MASK_WORD)  # a private character
    elif "\t" in text:
        signs = "\t" * len(MASK_WORD)  # names stand between tabs
    whole = text.replace(MASK_WORD, signs)
    spans = [match.span() for match in re.finditer(re.escape(MASK_WORD), text)]
    words = [MASK_WORD] * len(spans)
    for word, (start, end) in zip(*tokenizer.split(whole)):
        piece = whole[start:end]
        is_space_of_mask = piece == " " and whole.startswith(signs, end)
        if piece.strip(signs) and not is_space_of_mask:
            spans.append((start, end))
            words.append(word)
    order = sorted(range(len(spans)), key=lambda i: spans[i][0])
    return [words[i] for i in order], [spans[i] for i in order]


# Files


def read_texts(path, columns, chosen=None, is_set=False):
    """Read the texts of a file row by row.

    Args:
        path: str, .txt (a tab between the texts of a pair), .csv, .tsv, .jsonl, .json, .parquet, or
            one of them with .gz.
        columns: list[str], one for each text. a|b: either name.
        chosen: str, "a,b", names instead of them, or None.
        is_set: bool, a text may be a list of names.

    Yields:
        int, the row's number from 1, and list, its texts. What is missing or damaged is no str.
    """
    is_table = get_ending(path) != ".txt"
    names = None
    for number, row in enumerate(read_rows(path, keep_wrong=True), 1):
        if not is_table:
            texts = [row["text"]]
            if len(columns) > 1:
                texts = row["text"].split("\t")
        else:
            if names is None:
                names = choose_columns(path, row, columns, chosen, is_set)
            texts = [row.get(name) for name in names]
        if is_set and isinstance(texts[0], list):
            # a tab after each name: none of them ends at a space
            texts = ["".join(f"{name}\t" for name in texts[0] if name is not None)]
        yield number, texts


def choose_columns(path, row, columns, chosen, is_set):
    """Return the name of each text's column: chosen, the model's own, or the only one that fits."""
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",")]
    else:
        names = []
        for column in columns:
            present = [name for name in column.split("|") if name in row]
            names += present[:1]
        kind = list if is_set else str
        fitting = [name for name in row if isinstance(row[name], kind)]
        if len(fitting) == 1 and (is_set or not names):
            names = fitting
    if len(names) != len(columns) or not set(names) <= set(row):
        raise InputError(f"{path}: expected {len(columns)} of the columns {', '.join(row)}, "
                         f"got {names}. Use --text, or name a column text.")
    print(f"columns: {', '.join(names)} of {path}", file=sys.stderr)
    return names


def read_words(path, p):
    """Return the distinct words of a file, as the tokenizer of Predictor p splits them."""
    words = []
    for _, texts in read_texts(path, ["text"], is_set=not p.config.order):
        check_texts(texts, ["text"])  # no word is left out in silence
        [text] = texts
        if not p.config.order:
            text += "\t"  # a line is one name
        words += p.tokenizer.split(text)[0]
    return list(dict.fromkeys(words))


# What people read


def print_prediction(result, text):
    """Print what Predictor.predict or neighbors returned for a text, list by list."""
    if "spans" in result:
        print_words(result, text)
    for i, best in enumerate(result.get("masks", []), 1):
        print(f"[MASK] {i}")
        for word, p in best:
            print(f"  {show(word):>16}   {p:6.1%}")
    for i, found in enumerate(result.get("missing", []), 1):
        proof = "not certified: try a wider --beam"
        if found["certified"]:
            proof = "certified: provably the best"
        print(f"[MASK] {i}   {found['scored']:,} of {found['total']:,} scored, {proof}")
        for name, score in found["items"]:
            print(f"  {score:8.2f}   {show(name)}")
    for name, value in result.get("neighbours", []) + result.get("labels", []):
        print(f"  {show(name):>16}   {value:.3f}")
    for answer, (start, end), p in result.get("answers", []):
        if answer == "":
            answer = "(no answer)"
        print(f"  {p:6.1%}   {answer}   [{start}:{end}]")


def print_words(result, text):
    """Print a text with its misplaced words in braces, then the eight most suspicious words."""
    line = ""
    last = 0  # first character that is not in line
    for (start, end), p in zip(result["spans"], result["probabilities"]):
        guess = KINDS[p.index(max(p))]
        if guess != "intact":
            line += f"{text[last:start]}{{{text[start:end]}:{guess}}}"
            last = end
    print(line + text[last:])
    ranked = sorted(zip(result["words"], result["probabilities"]), key=lambda pair: pair[1][0])
    for word, p in ranked[:8]:
        shares = [f"{kind} {share:5.1%}" for kind, share in zip(KINDS, p)]
        print(f"  {word:>16}", *shares, sep="   ")


def show(piece):
    """Return a subword piece with a space for its sign of a space."""
    return piece.replace("Ġ", " ")


# The script


def parser():
    """Return the parser of all flags."""
    p = argparse.ArgumentParser(
        description=str(__doc__).split("Paper map")[0],  # python -OO leaves None
        formatter_class=argparse.RawDescriptionHelpFormatter)
    p.set_defaults(dtype="float32", compile=False)
    add = p.add_argument
    add("texts", nargs="*", metavar="TEXT",
        help="the text, or the pair; without any, a prompt asks")
    add("--ckpt", required=True, metavar="DIR",
        help="folder of a run of pretrain.py or finetune.py")
    add("--file", metavar="FILE",
        help="one JSON object per row of a .txt (a tab between pairs), .csv, .tsv, .jsonl, .json, "
             ".parquet, or .gz: line (number), texts, results (a classifier's best label as label) "
             "or error; exit code 2: all failed")
    add("--text", dest="columns", metavar="A[,B]",
        help="columns of --file (default: the task's, text or the only one)")
    add("--words", metavar="FILE",
        help="words to search among, new ones too; requires --near or a model that predicts the "
             "hashes of words (default: the corpus's 50,000 most frequent)")
    add("--near", action="store_true",
        help="list the words whose embeddings are most similar to TEXT's")
    add("--raw", action="store_true", help="compare hash bits, not embeddings; requires --near")
    add("--vectors", metavar="OUT.npy",
        help="write a vector per TEXT or row instead, float32 (n, d): the mean of the encoder's "
             "outputs, or with --near the embedding of a word")
    add("--top_k", type=at_least(1), default=8, metavar="k",
        help="how many answers to list (default: 8)")
    add("--beam", type=at_least(1), metavar="B",
        help="hash buckets to search (default: as many as a certificate needs)")
    add("--device", default="cpu", metavar="NAME", help="cpu, cuda, or auto (default: cpu)")
    return p


def run(args):
    """Load the model, then answer the texts, the file, or the prompt."""
    if args.texts and args.file is not None:
        raise InputError("--file: expected a file or TEXT, got both.")
    device, _, _ = resolve_device(args)
    p = Predictor(args.ckpt, device)
    columns = p.columns
    if args.near:
        columns = ["word"]
    if args.words is not None:
        if not args.near and p.items is not p.words:
            raise InputError("--words requires --near, or a model that predicts hashes of words.")
        p.set_candidates(read_words(args.words, p))

    def ask(texts):
        """Return what the model says about a text or pair, or about a word."""
        check_texts(texts, columns)
        if args.near:
            return dict(neighbours=p.neighbors(*texts, args.top_k, args.raw))
        return p.predict(*texts, k=args.top_k, beam=args.beam)

    def embed(texts):
        """Return the vector of a text or pair, or of a word: float32 (d,)."""
        check_texts(texts, columns)
        if args.near:
            word = p.read_word(*texts)
            return p.embed_words([word], args.raw)[0].numpy()
        return p.embed([texts])[0]

    if args.file is not None:
        rows = read_texts(args.file, columns, args.columns, is_set=not p.config.order)
    else:
        rows = [(1, args.texts)]

    # a vector for each row
    if args.vectors is not None:
        vectors = []
        for number, texts in rows:
            try:
                vectors.append(embed(texts))
            except InputError as error:
                raise InputError(f"row {number:,}: {error}") from error
        if len(vectors) == 0:
            raise InputError(f"{args.file}: expected rows, got none.")
        with open(args.vectors, "wb") as file:  # np.save would add .npy to a name
            np.save(file, vectors)
        print(f"Saved {args.vectors}: {len(vectors):,} vectors of {len(vectors[0]):,} numbers",
              file=sys.stderr)
        return

    # a JSON object for each row of a file; a bad row never stops the others
    if args.file is not None:
        num_good = 0
        for number, texts in rows:
            try:
                result = ask(texts)
                num_good += 1
            except InputError as error:
                result = dict(error=str(error))
            print(json.dumps(dict(line=number, texts=texts) | result, default=str))
        if num_good == 0:
            raise InputError(f"{args.file}: expected rows that this model can read, got none.")
        return

    # one text, or a prompt
    if args.texts:
        print_prediction(ask(args.texts), args.texts[0])
        return
    while True:
        try:
            texts = [input("> ") for _ in columns]
            print_prediction(ask(texts), texts[0])
        except EOFError:
            print()
            return
        except InputError as error:  # does not end the conversation
            print(f"infer.py: {error}", file=sys.stderr)


def main(argv=None):
    """Parse the command line, argv list[str] or None, and predict. Bad input exits with code 2."""
    return run_script("infer.py", run, parser().parse_args(argv))


if __name__ == "__main__":
    main()
