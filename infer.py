"""Apply a trained model: misplaced words, masked words, item sets, labels, answers, similar words.

    python infer.py "She looked out of the kubernetes."                         judge each word
    python infer.py "She opened the [MASK] and looked out of the window."       fill a mask
    python infer.py --ckpt models/names.pt "socket bind listen"                 complete an item set
    python infer.py --ckpt out/proj-lsh-sst2 --file reviews.csv > labels.jsonl  classify each row
    python infer.py --file reviews.csv --vectors out.npy                        a vector a row

    from infer import Predictor
    predictor = Predictor("models/english-detect.pt")
    words, spans, probabilities = predictor.detect("a text")
    results = predictor.detect(["a text", "another"])  # in batches, a result for each

Sources: [HF] Xue & Aletras 2022. [BERT] Devlin et al. 2019. [SB], [CM]: see objectives.py
Out of scope: scores (finetune.py --epochs 0)
Notation: B batch   L positions   M masked positions   V candidate words   d hidden size   T bits
    m vectors or hashes of an item   k results to return   R buckets of a hash   N rows
"""

import functools
import re
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers.decoders import ByteLevel

from bloom import ItemMap, beam_search, hash_logp
from data.batches import length_batches, pad_batch
from data.rows import add_reader_flags, reader_options
from data.sources import is_names
from data.squad import V2, find_answers, sliding_windows
from model import HEADS, load_model
from objectives import ShuffleRandom
from support.common import InputError, at_least, blame, find_device, load_checkpoint, make_parser
from support.common import run_script, send
from support.predict_file import write_rows, write_vectors
from tokenizer import FIRST_WORD_ID, MASK, MAX_UNKNOWN, SPECIALS, HashTokenizer, ItemNames
from tokenizer import build_inputs, item_names

MASK_WORD = SPECIALS[MASK]
BATCH = 32  # rows; on a CPU 8 to 64 are best, as more have more padding
RANKED = ("fill_mask", "predict_missing", "classify")  # methods that take k
# subtle: held while the tokenizer's list of words grows, or is read. Threads may share a Predictor
LOCK = threading.Lock()


def infer(args):
    """Check the flags, load the model, and print what it says."""
    needs_file = args.vectors or args.jsonl or args.text_columns or reader_options(args)
    if needs_file and args.file is None:
        raise InputError("--vectors, --jsonl, --text, --encoding, --sep and --header require "
                         "--file.")
    if args.vectors and args.jsonl:
        raise InputError("--jsonl: expected --file without --vectors, got both.")
    if args.ckpt is None:  # a model either fills masks or judges words
        is_masked = any(MASK_WORD in text for text in args.texts)
        name = "english-fill.pt" if is_masked else "english-detect.pt"
        args.ckpt = Path(__file__).with_name("models") / name
    print(f"model: {args.ckpt}", file=sys.stderr)
    predictor = Predictor(args.ckpt, find_device(args.device), args.truncate)

    if args.texts:
        rows = args.texts
        if len(predictor.columns) == 2:  # each pair is two texts of the command line
            if len(rows) % 2:
                raise InputError(f"TEXT: expected {' and '.join(predictor.columns)}, got {rows}.")
            rows = list(zip(rows[::2], rows[1::2]))
        examples = predictor.read_all(rows)
        for example, result in zip(examples, predictor.predict(examples, args.top_k)):
            print_result(predictor, example.row, result, args.top_k)
            for note in predictor.list_notes(example):
                print(f"note: {note}")
    elif args.near is not None:
        for word, pairs in zip(args.near, predictor.neighbors(args.near, args.top_k)):
            print(word)
            print_words(predictor, pairs)
    elif args.vectors is None:
        write_rows(args, predictor)
    else:
        write_vectors(args, predictor)


class Example(NamedTuple):
    """A row as a model reads it."""

    row: object  # str or tuple, as the user has it
    ids: np.ndarray  # int32 (L,), token IDs with special tokens
    words: list  # str, those of the text or of both texts, [MASK] is one; or the names of a set
    num_cut: int  # words or items that were cut off, as they did not fit
    text_ids: tuple = ()  # for each text its token IDs, list of int: all of them
    spans: tuple = ()  # (start, end) of each word of the last text, in characters


def takes_one_row(method):
    """Let a method that takes a list of rows also take one row, and return its result alone.

    A row may be an Example, which was read already.
    """
    @functools.wraps(method)
    def call(self, rows, *options, **named):
        if isinstance(rows, list):
            return method(self, rows, *options, **named)
        return method(self, [rows], *options, **named)[0]
    return call


class Predictor:
    """A trained model and its tokenizer: rows -> read_all -> Examples -> run -> results.

    A row is a text, str; a pair of texts, tuple; or an item set, tuple of names, or str with tabs
    or else spaces between names. Each method takes a list of rows and returns the list of their
    results, or takes one row and returns its result alone. A list is always several rows.

    The head of the model decides which of detect, fill_mask, predict_missing, classify and answer
    it has; predict calls that one. Every model has embed and neighbors. list_notes(row) says which
    items of a row the model does not know, and what it cuts off. Threads may share a Predictor.

    Args:
        path: str, a checkpoint or its folder.
        device: str or torch.device.
        truncate: bool, read the start of a text that is too long for a pre-trained model.

    Attributes:
        task: dict, what finetune.py says about its task; empty after pretrain.py.
        columns: list[str], the name of each text of a row.
        kinds: dict, label -> name, what detect says of a word.
        words: list[str], which neighbors searches.
        items: list[str], which fill_mask and predict_missing search.
        item_map: bloom.BloomMap or ItemMap of the items, or None: they have no hashes.

    Raises:
        InputError: The checkpoint is damaged, a row cannot be read, or the head is another one.
    """

    def __init__(self, path, device="cpu", truncate=False):
        checkpoint = load_checkpoint(path)
        with blame(path):
            self.model = load_model(checkpoint)
            self.config = self.model.config
            self.tokenizer = HashTokenizer.load(checkpoint["tokenizer"], self.config)
        self.model.to(device).requires_grad_(False)
        self.task = checkpoint.get("task", {})
        self.columns = self.task.get("texts", ["text"])
        self.kinds = checkpoint.get("kinds")
        if self.kinds is None:  # an older checkpoint
            self.kinds = ShuffleRandom.kinds
        self.truncate = truncate
        self.set_candidates(checkpoint["words"])
        self.splitter = self.tokenizer.splitter
        if not self.config.order:  # names of known items may have spaces
            self.splitter = ItemNames(self.items)

    def set_candidates(self, words):
        """Set what the methods search: words for neighbors, items for [MASK].

        words: list[str], those of the checkpoint, the most frequent first.
        """
        tokenizer = self.tokenizer
        self.words = words
        self.items = words
        self.item_map = tokenizer.coder.bloom_map
        if tokenizer.is_fixed:  # a word outside the vocabulary has no row and no digest
            self.words = [word for word in words if word in tokenizer.id_of_word]
            self.items = tokenizer.words  # item i has the token ID FIRST_WORD_ID + i
        elif self.config.predicts_rows:  # the buckets of a sketch
            buckets = tokenizer.targets.codes(words)  # (V, k)
            self.item_map = ItemMap(buckets, self.config.buckets)
        self.item_numbers = {name: number for number, name in enumerate(self.items)}

    def predict(self, rows, k=8):
        """Return what the method of the model's head returns, k results at most."""
        name = self.model.head.method
        method = getattr(self, name)
        if name in RANKED:
            return method(rows, k)
        return method(rows)

    # 1. Read: a row to token IDs

    def read_all(self, rows, for_head=True):
        """Return the Example of each row. for_head False: for embed, which reads any row."""
        examples = []
        for number, row in enumerate(rows, 1):
            source = f"row {number:,}" if len(rows) > 1 else ""
            with blame(source):
                examples.append(self.read(row, for_head))
        return examples

    def read(self, row, for_head=True):
        """Return the Example of a row, or raise a ValueError if this model cannot read it."""
        if isinstance(row, Example):  # it was read before
            return row
        if self.config.order:
            example = self.read_texts(row, for_head)
        else:
            example = self.read_set(row, for_head)
        # a fine-tuned model was trained on cut texts, and cuts them here too; list_notes says so
        if example.num_cut > 0 and not self.task and not self.truncate:
            raise ValueError(f"expected at most {self.config.length} positions, got "
                             f"{self.config.length + example.num_cut}. The flag or argument "
                             "truncate reads the start.")
        has_mask = MASK in example.ids
        if for_head and self.config.predicts_rows and not has_mask:
            raise ValueError(f"expected [MASK] in the first {self.config.length} positions, "
                             f"got {row!r:.60}.")
        if for_head and has_mask and not self.config.predicts_rows:
            raise ValueError("expected no [MASK]. Remove it, or use a model that fills masks, such "
                             "as models/english-fill.pt.")
        return example

    def read_texts(self, row, for_head):
        """Return the Example of a text or a pair. for_head: as in read_all."""
        texts = row if isinstance(row, (tuple, list)) else [row]
        are_texts = all(isinstance(text, str) for text in texts)
        if not are_texts or len(texts) != len(self.columns):
            kind = "a text" if len(self.columns) == 1 else "a tuple of texts"
            raise ValueError(f"expected {kind} ({', '.join(self.columns)}), got {row!r:.60}.")
        words = []
        text_ids = []
        for text in texts:
            found, ids, spans = self.split(text)
            words += found
            text_ids.append(ids)
        # a task may have rows with an empty text
        if for_head and not words and not self.task:
            raise ValueError("expected words, got none.")
        second = text_ids[1] if len(texts) == 2 else None
        ids, num_cut = build_inputs(text_ids[0], second, self.config.length)
        return Example(row, ids, words, num_cut, tuple(text_ids), spans)

    def split(self, text):
        """Return words list[str], their token IDs, and their spans up to the first [MASK]."""
        first = text
        others = []
        if not self.task:  # in fine-tuning [MASK] is ordinary text
            first, *others = re.split(r" ?\[MASK\]", text)
        words, spans = self.splitter.split(first)
        ids = self.list_ids(words).tolist()
        for part in others:
            # subtle: BPE adds a space to the start of a text, here to a line break instead of part.
            # Both become pieces that start at 0, and are dropped; other splits give no word there
            more, places = self.splitter.split("\n" + part)
            more = [word for word, (start, _) in zip(more, places) if start > 0]
            words += [MASK_WORD, *more]
            ids += [MASK, *self.list_ids(more).tolist()]
        return words, ids, spans

    def list_ids(self, words):
        """Return the token IDs of words, int32 (n,). The tokenizer may add them to its list."""
        with LOCK:
            return self.tokenizer.ids(words)

    def read_set(self, row, for_head):
        """Return the Example of an item set, without the items that the model does not know.

        For a head, all of which fill masks, it begins with a [MASK]. The user may write none, one
        or several.
        """
        names = []
        if isinstance(row, str):
            names, _ = self.splitter.split(row)
        elif isinstance(row, (tuple, list)) and is_names(list(row)):
            names = item_names(list(row))
        names = [name for name in dict.fromkeys(names) if name != MASK_WORD]
        is_known = self.tokenizer.is_known(names)
        known = [name for name, is_good in zip(names, is_known) if is_good]
        if not known and for_head:
            raise ValueError("expected items that this model knows, split by tabs or spaces, got "
                             f"{row!r:.60}.")
        if not known:  # [MASK] stands for nothing here: embed returns 0 for a row without words
            return Example(row, np.array([MASK], np.int32), [], 0)
        ids = self.list_ids(known)
        if for_head:
            ids = np.append(np.int32(MASK), ids)
        length = self.config.length
        return Example(row, ids[:length], names, max(0, len(ids) - length))

    def list_notes(self, row):
        """Return what a user has to know about how a row is read, list[str]."""
        [example] = self.read_all([row])
        notes = []
        if not example.words:
            notes.append("the text has no words")
        words = [word for word in example.words if word != MASK_WORD]
        is_known = self.tokenizer.is_known(words)
        unknown = [word for word, is_good in zip(words, is_known) if not is_good]
        if unknown and not self.config.order:
            notes.append(f"unknown items were left out: {', '.join(unknown)}")
        elif len(unknown) > MAX_UNKNOWN * len(words):
            notes.append(f"the model knows nothing of {len(unknown):,} of {len(words):,} words; "
                         "pre-train on such text, or with MD5")
        if example.num_cut > 0 and self.model.head.method != "answer":  # which reads windows
            notes.append(f"cut to {self.config.length} positions")
        return notes

    # 2. Run: token IDs to the outputs of the model

    def run(self, rows, method, forward, interpret):
        """Return for each row interpret(its Example, the model's output for it).

        Rows of similar length come together.

        Args:
            rows: list of rows or Examples.
            method: str, the method that the model's head must have; None: any.
            forward: see run_batches.
        """
        self.check_method(method)
        examples = self.read_all(rows, for_head=method is not None)
        inputs = [example.ids for example in examples]
        results = [None] * len(rows)
        for chosen, outputs in self.run_batches(inputs, forward):
            for i, output in zip(chosen, outputs):
                results[i] = interpret(examples[i], output)
        return results

    def check_method(self, method):
        """Raise InputError unless the model's head has this method. None: any has it."""
        if method not in (None, self.model.head.method):
            heads = [name for name, head in HEADS.items() if head.method == method]
            raise InputError(
                f"expected a model with head {' or '.join(heads)}, got one with "
                f"{self.config.head}. finetune.py makes classify and span, pretrain.py the others.")

    def run_batches(self, inputs, forward):
        """Yield the indices of a batch of inputs of similar length, (B,), and its outputs.

        Args:
            inputs: list of int32 (L,), token IDs.
            forward: function of ids int64 (B, L), 0 is padding, and mask bool (B, L) or None.
        """
        self.update_codes()
        for chosen in length_batches(inputs, BATCH):
            ids, key_mask = pad_batch([inputs[i] for i in chosen])
            ids = send(ids, self.model.device)
            key_mask = send(key_mask, self.model.device)
            yield chosen, forward(ids, key_mask)

    def update_codes(self):
        """Let the model have the codes of all words that were read."""
        with LOCK:
            self.model.set_codes(self.tokenizer.codes())

    def score_masks(self, ids, key_mask):
        """Return for each row the logits of its M [MASK]: (M, N), or what hash_logp reads."""
        is_mask = ids == MASK  # (B, L)
        [positions] = torch.where(is_mask.flatten())
        logits = self.model(ids, key_mask, masked_positions=positions)
        return logits.split(is_mask.sum(1).tolist())

    # 3. Outputs to results, a method for each head

    @takes_one_row
    def detect(self, rows):
        """Judge each word of a text: is it intact, shuffled or random? [HF §3.6]

        Returns:
            words: list[str], those that were read, if the text was cut.
            spans: list[(start, end)], the characters of each word.
            probabilities: float (words, 3); column i is of self.kinds[i].
        """
        def judge(example, logits):  # (L, 3)
            num_read = len(example.ids) - 2  # without [CLS] and [SEP]
            probabilities = logits[1:1 + num_read].softmax(-1).cpu()
            return example.words[:num_read], example.spans[:num_read], probabilities

        return self.run(rows, "detect", self.model, judge)

    @takes_one_row
    def fill_mask(self, rows, k=8):
        """Predict each [MASK] of a text or set among the words of the vocabulary. [BERT §3.1]

        Returns:
            For each [MASK] a list of the k best (word, probability). An item that the set shows is
            not among them.
        """
        def list_best(example, logits):  # (M, N)
            logits = logits[:, FIRST_WORD_ID:]  # (M, words): no special tokens
            logits[:, self.list_shown(example)] = -torch.inf
            best = logits.softmax(-1).topk(min(k, len(self.items)))
            found = []  # for each [MASK] its pairs
            for values, numbers in zip(best.values.tolist(), best.indices.tolist()):
                # an item that is left out has 0, or NaN if the set shows all items
                pairs = [(self.items[n], p) for n, p in zip(numbers, values) if p > 0]
                found.append(pairs)
            return found

        return self.run(rows, "fill_mask", self.score_masks, list_best)

    @takes_one_row
    def predict_missing(self, rows, k=8):
        """Predict each [MASK] of a text or set by its hashes, among all items. [SB §2.5] [CM]

        Returns:
            For each [MASK], of which a set has one, a dict:
            items: list of the k best (name, sum of the log-probabilities of its hashes). An item
                that the set shows is not among them.
            scored: int, how many items the search scored to certify that these are the best.
            total: int, how many items there are.
        """
        def search(example, logits):
            logp = hash_logp(  # (M, m, R): m hashes of an item
                logits, self.item_map, one_softmax=self.tokenizer.is_fixed)
            shown = self.list_shown(example).to(logits.device)  # (E,)
            # without a limit of rounds the search goes on until the k best are certified
            best, scores, _, num_scored = beam_search(  # (M, k), (M, k), (M,), (M,)
                logp, self.item_map, k, beam=k, rounds=None, exclude=shown.expand(len(logp), -1))
            found = []  # for each [MASK] its dict
            for numbers, values, scored in zip(best.tolist(), scores.tolist(), num_scored.tolist()):
                # -1: fewer than k items are left
                items = [(self.items[n], value) for n, value in zip(numbers, values) if n >= 0]
                found.append(dict(items=items, scored=scored, total=len(self.items)))
            return found

        return self.run(rows, "predict_missing", self.score_masks, search)

    def list_shown(self, example):
        """Return the numbers of the items that a set shows, int64 (E,); none for a text."""
        names = [] if self.config.order else example.words
        shown = [self.item_numbers[name] for name in names if name in self.item_numbers]
        return torch.tensor(shown, dtype=torch.int64)

    @takes_one_row
    def classify(self, rows, k=None):
        """Label a text or a pair of texts.

        Returns:
            A list of the k best (label, probability), all of them if k is None. A regression has
            one (name of the label column, number).
        """
        labels = self.task.get("labels")

        def label(example, logits):  # (labels,)
            if labels is None:
                mean, deviation = self.task["scale"]
                return [(self.task["label"], logits.item() * deviation + mean)]
            pairs = zip(labels, logits.softmax(-1).tolist())
            return sorted(pairs, key=lambda pair: -pair[1])[:k]

        return self.run(rows, "classify", self.model, label)

    @takes_one_row
    def answer(self, rows):
        """Find the words of a context that answer a question. [BERT §4.2]

        A row is (question, context). A long context is read in windows.

        Returns:
            The answer, "" for none; and its score minus that of none, float.
        """
        self.check_method("answer")
        examples = self.read_all(rows)
        windows = []  # (number of the row, Window)
        for number, example in enumerate(examples):
            question, context = example.text_ids
            for window in sliding_windows(question, context, self.config.length):
                windows.append((number, window))
        batches = self.run_batches([window.ids for _, window in windows], self.model)
        pairs = [example.row for example in examples]
        spans = [example.spans for example in examples]  # of the words of each context
        texts, margins = find_answers(pairs, windows, spans, batches, self.task["name"] == V2)
        return list(zip(texts, margins.tolist()))

    # For every head: vectors, similar words

    @takes_one_row
    def embed(self, rows):
        """Return float32 (rows, d), the mean of the encoder's outputs for each; (d,) for one.

        The vector of a text without words is 0, unless the model was fine-tuned on such texts. So
        is that of a set without items that the model knows.
        """
        def average(example, outputs):  # (L·m, d)
            if not example.words and not self.task:
                return np.zeros(self.config.width, np.float32)
            size = len(example.ids) * self.model.vectors_per_item  # the rest is padding
            return outputs[:size].mean(0).cpu().numpy()

        vectors = self.run(rows, None, self.model.encode, average)
        return np.reshape(vectors, (-1, self.config.width))  # no rows: (0, d)

    @takes_one_row
    def neighbors(self, words, k=8):
        """Find the words that are most similar to a word, seen in training or not. [HF §3.3]

        Words are compared by their hash bits, +1 or -1, if the hash gives similar words similar
        bits. Otherwise they are compared by their embeddings, less the mean embedding.
        A call hashes all of self.words: look up many words at once.

        Returns:
            A list of the k best (word, cosine). Among equals the more frequent word comes first.
        """
        queries = []  # as the tokenizer writes them
        for text in words:
            found, _ = self.splitter.split(text)
            if len(found) != 1 or not self.tokenizer.is_known(found)[0]:
                raise InputError(f"expected one word that this model knows, got {text!r:.60}.")
            queries += found
        candidates = self.word_vectors(self.words)  # (V, T) or (V, m·d)
        mean = 0
        if self.near_bits() == 0:
            mean = candidates.mean(0)
        candidates = F.normalize(candidates - mean)
        results = []
        for word, query in zip(queries, F.normalize(self.word_vectors(queries) - mean)):
            cosines = candidates @ query  # (V,)
            best = cosines.argsort(descending=True, stable=True)[:k + 1].tolist()
            pairs = [(self.words[i], cosines[i].item()) for i in best if self.words[i] != word]
            results.append(pairs[:k])
        return results

    def word_vectors(self, words):
        """Return what neighbors compares: bits as +1 and -1, (n, T), or embeddings (n, m·d)."""
        if self.near_bits() > 0:
            bits = self.tokenizer.coder.hash.bits(words, self.near_bits())
            return 2.0 * torch.from_numpy(bits) - 1
        ids = torch.from_numpy(self.list_ids(words)).long()
        self.update_codes()
        x = self.model.embed(ids.to(self.model.device))  # (n·m, d)
        return x.view(len(words), -1).cpu()

    def near_bits(self):
        """Return how many bits of the hash tell which words are similar; 0: none do."""
        hash = self.tokenizer.coder.hash
        return 0 if hash is None else hash.near_bits


# Results for people. A function for each method: its result, which predict returned for a row


def print_result(predictor, row, result, k):
    """Print the result of a row, of Predictor.predict."""
    PRINTERS[predictor.model.head.method](predictor, row, result, k)


def print_judgments(predictor, text, result, k):
    """Print a text with misplaced words as {word:kind}, then the k words least likely intact."""
    words, spans, probabilities = result
    marked = ""
    last = 0  # the first character that is not in `marked` yet
    for (start, end), kind in zip(spans, probabilities.argmax(1).tolist()):
        if kind != 0:  # not intact
            marked += f"{text[last:start]}{{{text[start:end]}:{predictor.kinds[kind]}}}"
            last = end
    _, end = spans[-1]
    print(marked + text[last:end])  # what follows was not read
    ranking = probabilities[:, 0].argsort(stable=True)
    for i in ranking[:k].tolist():
        line = f"  {clean(predictor, words[i]):>16}"
        for label, kind in predictor.kinds.items():
            line += f"   {kind} {probabilities[i, label]:5.1%}"
        print(line)


def print_masks(predictor, row, result, k):
    """Print the best words for each [MASK]."""
    for number, pairs in enumerate(result, 1):
        print(f"[MASK] {number}")
        print_words(predictor, pairs)


def print_searches(predictor, row, result, k):
    """Print the best items for each [MASK], and how many of all the search has scored."""
    for number, found in enumerate(result, 1):
        print(f"[MASK] {number}   sums of log-probabilities; provably the best of "
              f"{found['total']:,}, of which {found['scored']:,} were scored")
        print_words(predictor, found["items"])


def print_labels(predictor, row, result, k):
    """Print the best labels."""
    print_pairs(result)


def print_answer(predictor, row, result, k):
    """Print an answer and its margin."""
    answer, margin = result
    print_pairs([(answer or "(no answer)", margin)])


PRINTERS = {  # the method of a head -> what prints its result
    "detect": print_judgments,
    "fill_mask": print_masks,
    "predict_missing": print_searches,
    "classify": print_labels,
    "answer": print_answer,
}


def print_words(predictor, pairs):
    """Print pairs (word of the tokenizer, number)."""
    print_pairs([(clean(predictor, word), value) for word, value in pairs])


def print_pairs(pairs):
    """Print pairs (name, number), the names aligned at their right ends."""
    for name, value in pairs:
        print(f"  {name:>16}   {value:.3f}")


def clean(predictor, word):
    """Return a word of the tokenizer as people write it, on one line."""
    splitter = predictor.tokenizer.splitter
    if splitter.json is not None and word not in getattr(splitter, "phrases", ()):
        word = ByteLevel().decode([word])  # BPE writes the bytes of " café" as "ĠcafÃ©"
    return word.replace("\n", "\\n")


# The command


def main(argv=None):
    """Parse the command line, argv list[str] or None, and predict. Bad input exits with code 2."""
    return run_script("infer.py", infer, build_parser().parse_args(argv))


def build_parser():
    """Return the parser of all flags."""
    usage = "python infer.py [--ckpt DIR] (TEXT ... | --file FILE | --near WORD ...) [flags]"
    parser = make_parser("infer.py", __doc__, usage=usage)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True).add_argument
    source("texts", nargs="*", default=[], metavar="TEXT",
           help="a text, or an item set; for a model of pairs both texts of each pair")
    source("--near", nargs="+", metavar="WORD", help="list the words most similar to these")
    source("--file",
           help="print a JSON object for each row of a table or text: columns, notes, prediction")
    add("--ckpt", metavar="DIR",
        help="folder or file of a trained model (default: models/english-fill.pt where a TEXT has "
             "[MASK], else models/english-detect.pt)")
    add("--jsonl", metavar="OUT.jsonl",
        help="write the objects of --file there, in UTF-8 on every system (default: to stdout)")
    add("--vectors", metavar="OUT.npy",
        help="write a vector for each row of --file, in its order, float32 (rows, d)")
    add("--text", dest="text_columns", metavar="A[,B]",
        help="columns to read in --file (default: the task's, text, or the only one)")
    add_reader_flags(add)
    add("--truncate", action="store_true", help="cut texts too long for a pre-trained model")
    add("--top_k", type=at_least(1), default=8, help="results to list (default: 8)")
    add("--device", default="cpu", help="cpu, cuda, or auto (default: cpu)")
    return parser


if __name__ == "__main__":
    main()
