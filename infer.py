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

Source: [HF] Xue & Aletras 2022
Out of scope: rows to token IDs (support/readers.py), batches (support/runner.py), outputs to
    results (readouts.py), neighbors of a word (support/candidates.py), files
    (support/predict_file.py), scores (finetune.py --epochs 0)
Notation: B batch   L positions   V items to choose from   d hidden size   m vectors of a word
    k results to return

A row goes one way:

    row, "a text"  ->  Example  ->  batches of token IDs  ->  outputs of the head  ->  result
              reader         run_batches              model                  readout
"""

import sys
from pathlib import Path

import numpy as np
import torch

from data.rows import add_reader_flags, reader_options
from model import load_model
from objectives import ShuffleRandom
from readouts import READOUTS
from support.candidates import choose_candidates, find_neighbors
from support.common import InputError, at_least, blame, find_device, load_checkpoint, make_parser
from support.common import run_script
from support.predict_file import write_rows, write_vectors
from support.readers import MASK_WORD, SetReader, TextReader, read_all
from support.runner import run_batches
from tokenizer import HashTokenizer


def infer(args):
    """Check the flags, load the model, and print what it says."""
    check_flags(args)
    path = args.ckpt
    if path is None:  # a model either fills masks or judges words
        is_masked = any(MASK_WORD in text for text in args.texts)
        name = "english-fill.pt" if is_masked else "english-detect.pt"
        path = Path(__file__).with_name("models") / name
    print(f"model: {path}", file=sys.stderr)
    predictor = Predictor(path, find_device(args.device), args.truncate, prior=args.prior)

    if args.texts:
        print_texts(predictor, args.texts, args.top_k)
    elif args.near is not None:
        for word, pairs in zip(args.near, predictor.neighbors(args.near, args.top_k)):
            print(word)
            print_words(predictor.tokenizer, pairs)
    elif args.vectors is None:
        write_rows(args, predictor)
    else:
        write_vectors(args, predictor)


# A model for users


class Predictor:
    """A trained model and its tokenizer: rows in, results out.

    A row is a text, str; a pair of texts, tuple; or an item set, tuple of names, or str with tabs
    or else spaces between names. Each method takes a list of rows and returns the list of their
    results, or takes one row and returns its result alone. A list is always several rows.

    The head of the model decides which of detect, fill_mask, predict_missing, classify and answer
    it has; predict calls that one. k is the most results that a row gets: 8, but all labels in
    classify. Every model has embed and neighbors. list_notes(row) says which items of a row the
    model does not know, and what it cuts off. Threads may share a Predictor.

    Args:
        path: str, a checkpoint or its folder.
        device: str or torch.device.
        truncate: bool, read the start of a text that is too long for a pre-trained model.
        words: list[str], the most frequent first, what neighbors searches and, without a
            vocabulary, the heads for [MASK]; None: those of the checkpoint.
        prior: float, weight of the items' popularity in the scores of a model of item sets, see
            coherent.popularity_prior.

    Attributes:
        task: dict, what finetune.py says about its task; empty after pretrain.py.
        is_fine_tuned: bool, whether finetune.py trained it.
        columns: list[str], the name of each text of a row.
        kinds: dict, label -> name, what detect says of a word.
        words: list[str], what neighbors searches.
        items: list[str], what a [MASK] may stand for.
        item_counts: int tensor (V,), how often each item occurs; None: the checkpoint has none.
        reader: Reader, which turns rows into Examples.
        readout: Readout, which turns the outputs of the head into results.

    Raises:
        InputError: The checkpoint is damaged, a row cannot be read, or the head is another one.
    """

    def __init__(self, path, device="cpu", truncate=False, words=None, prior=0.0):
        checkpoint = load_checkpoint(path)
        with blame(path):
            self.model = load_model(checkpoint)
            self.config = self.model.config
            self.tokenizer = HashTokenizer.load(checkpoint["tokenizer"], self.config)
        self.model.to(device).requires_grad_(False)
        self.task = checkpoint.get("task", {})
        self.is_fine_tuned = bool(self.task)
        self.columns = self.task.get("texts", ["text"])
        self.kinds = checkpoint.get("kinds")
        if self.kinds is None:  # the objective has none, or the checkpoint is older
            self.kinds = ShuffleRandom.kinds
        self.item_counts = checkpoint.get("item_counts")  # None: of texts, or older than these
        if words is None:
            words = checkpoint["words"]
        self.words, self.items = choose_candidates(self.tokenizer, words)
        self.prior = prior

        self.reader = self.choose_reader(truncate)
        self.readout = self.choose_readout(path)

    def choose_reader(self, truncate):
        """Return the reader of what the model was trained on: texts, or item sets."""
        length = self.config.length
        # a fine-tuned model was trained on cut texts, and cuts them here too; list_notes says so
        may_cut = truncate or self.is_fine_tuned
        if not self.config.order:
            return SetReader(self.tokenizer, length, may_cut, self.items)
        # in fine-tuning [MASK] is ordinary text
        has_masks = not self.is_fine_tuned
        return TextReader(self.tokenizer, length, may_cut, self.columns, has_masks)

    def choose_readout(self, path):
        """Return the readout of the head, or raise InputError if it cannot use the prior."""
        readout_class = READOUTS[self.model.head.method]
        if self.prior != 0.0 and not readout_class.uses_prior:
            raise InputError("--prior: expected a model that predicts items by their hashes, got "
                             f"{path} (head {self.config.head}). Leave --prior out.")
        if self.prior != 0.0 and self.item_counts is None:
            raise InputError("--prior: expected a model of item sets whose checkpoint counts its "
                             f"items, got {path}. Models of texts and older ones do not.")
        return readout_class(
            self.model, self.tokenizer, self.items, self.task, self.item_counts, self.prior)

    # What the head says

    def predict(self, rows, k=8):
        """Return what the model's head says of each row, k results at most.

        So a row gets 8 labels at most, where classify returns all.
        """
        if not isinstance(rows, list):
            return self.predict([rows], k)[0]
        return self.readout.predict(read_all(self.read, rows), k)

    def read(self, row):
        """Return the Example of a row, or raise a ValueError if the head cannot read it."""
        example = self.reader.read(row)
        self.readout.check(example)
        return example

    def detect(self, rows):
        """Judge each word of a text: (words, spans, probabilities), see WordJudge."""
        return self.ask("detect", rows)

    def fill_mask(self, rows, k=8):
        """Predict each [MASK] among the words of the vocabulary, see WordRanking."""
        return self.ask("fill_mask", rows, k)

    def predict_missing(self, rows, k=8):
        """Predict each [MASK] by its hashes, among all items, see ItemSearch."""
        return self.ask("predict_missing", rows, k)

    def classify(self, rows, k=None):
        """Label a text or a pair: the k best (label, probability), all for None, see Labels."""
        return self.ask("classify", rows, k)

    def answer(self, rows):
        """Find the answer to a (question, context): (answer, margin), see Answers."""
        return self.ask("answer", rows)

    def ask(self, method, rows, k=None):
        """Return predict(rows, k), or raise InputError if the model's head has another method."""
        its_method = self.model.head.method
        if method != its_method:
            raise InputError(f"expected a model with the method {method}, got one with "
                             f"{its_method} (head {self.config.head}).")
        return self.predict(rows, k)

    def list_notes(self, row):
        """Return what a user has to know about how a row is read, list[str]."""
        [example] = read_all(self.read, [row])
        return self.list_example_notes(example)

    def list_example_notes(self, example):
        """Return the list_notes of the row of an Example."""
        notes = self.reader.list_notes(example)
        if example.num_cut > 0 and not self.readout.reads_windows:
            notes.append(f"cut to {self.config.length} positions")
        return notes

    # For every head: vectors, similar words

    def embed(self, rows):
        """Return float32 (rows, d), the mean of the encoder's outputs for each; (d,) for one.

        The vector of a text without words is 0, unless the model was fine-tuned. So is that of a
        set without items that the model knows.
        """
        if not isinstance(rows, list):
            return self.embed([rows])[0]
        return self.embed_examples(read_all(self.reader.read_for_vector, rows))

    def embed_examples(self, examples):
        """Return the vectors of Examples that reader.read_for_vector made, float32 (n, d)."""
        inputs = [example.ids for example in examples]
        vectors = np.zeros((len(examples), self.config.width), np.float32)
        batches = run_batches(self.model, self.tokenizer, inputs, self.model.encode)
        for chosen, outputs in batches:  # (B,) and (B, L, m, d)
            for i, output in zip(chosen, outputs):
                if examples[i].words or self.is_fine_tuned:
                    vectors[i] = output[:len(inputs[i])].mean((0, 1)).cpu()  # the rest is padding
        return vectors

    def neighbors(self, words, k=8):
        """Find the k words that are most similar to a word: (word, cosine). [HF §3.3]

        A model of item sets has items for words. The word need not occur in training: see
        find_neighbors. A call hashes all of self.words, so look up many words at once.
        """
        if not isinstance(words, list):
            return self.neighbors([words], k)[0]
        queries = [self.reader.read_word(text) for text in words]
        return find_neighbors(self.model, self.tokenizer, self.words, queries, k)


# What people read


def print_texts(predictor, rows, k):
    """Print what a model says of the texts of the command line, at most k results for each."""
    if len(predictor.columns) == 2:  # a row is a pair of them
        if len(rows) % 2:
            raise InputError(f"TEXT: expected {' and '.join(predictor.columns)}, got {rows}.")
        rows = list(zip(rows[::2], rows[1::2]))
    examples = read_all(predictor.read, rows)
    for example, result in zip(examples, predictor.readout.predict(examples, k)):
        print_result(predictor, example.row, result, k)
        for note in predictor.list_example_notes(example):
            print(f"note: {note}")


def print_result(predictor, row, result, k):
    """Print the result of a row, whose form depends on the method: see readouts.py."""
    print_it = PRINTERS[predictor.model.head.method]
    print_it(predictor, row, result, k)


def print_judged_words(predictor, text, result, k):
    """Print a text with misplaced words as {word:kind}, then the k words least likely intact.

        She looked out of the {kubernetes:random}.
                kubernetes   intact  8.7%   shuffled  0.3%   random 91.0%
                       the   intact 99.6%   shuffled  0.4%   random  0.0%
    """
    words, spans, probabilities = result
    kinds = predictor.kinds
    # a label is also the number of its column in `probabilities`. The objective may use some of the
    # head's classes alone: a column without a kind is not printed
    labels = torch.tensor(list(kinds))
    best = labels[probabilities[:, labels].argmax(1)]  # (words,), the most likely of these
    marked = ""
    last = 0  # the first character that is not in `marked` yet
    for (start, end), label in zip(spans, best.tolist()):
        if label != 0:  # not intact
            marked += f"{text[last:start]}{{{text[start:end]}:{kinds[label]}}}"
            last = end
    _, end = spans[-1]
    print(marked + text[last:end])  # what follows was not read
    ranking = probabilities[:, 0].argsort(stable=True)
    for i in ranking[:k].tolist():
        line = f"  {predictor.tokenizer.splitter.show(words[i]):>16}"
        for label, kind in kinds.items():
            line += f"   {kind} {probabilities[i, label]:5.1%}"
        print(line)


def print_ranked_words(predictor, row, result, k):
    """Print the words for each [MASK]."""
    for number, pairs in enumerate(result, 1):
        print(f"[MASK] {number}")
        print_words(predictor.tokenizer, pairs)


def print_found_items(predictor, row, result, k):
    """Print the items of each [MASK], and how many of all the search has scored.

        [MASK] 1   sums of log-probabilities; provably the best of 5,000, of which 104 were scored
                      door   -5.321
                      room   -9.850
    """
    kind = "sums of log-probabilities"
    if predictor.prior != 0.0:
        kind += " and a prior"
    for number, found in enumerate(result, 1):
        print(f"[MASK] {number}   {kind}; provably the best of {found['total']:,}, of which "
              f"{found['scored']:,} were scored")
        print_words(predictor.tokenizer, found["items"])


def print_labels(predictor, row, result, k):
    """Print each label and its probability, or the number of a regression."""
    print_pairs(result)


def print_answer(predictor, row, result, k):
    """Print an answer and its margin."""
    answer, margin = result
    if not answer:
        answer = "(no answer)"
    print_pairs([(answer, margin)])


PRINTERS = {  # the method of a head -> how a result of its readout is printed
    "detect": print_judged_words,
    "fill_mask": print_ranked_words,
    "predict_missing": print_found_items,
    "classify": print_labels,
    "answer": print_answer,
}


def print_words(tokenizer, pairs):
    """Print pairs (word of the tokenizer, number)."""
    print_pairs([(tokenizer.splitter.show(word), value) for word, value in pairs])


def print_pairs(pairs):
    """Print pairs (name, number), the names aligned at their right ends."""
    for name, value in pairs:
        print(f"  {name:>16}   {value:.3f}")


# The command


def main(argv=None):
    """Parse the command line, argv list[str] or None, and predict. Bad input exits with code 2."""
    return run_script("infer.py", infer, build_parser().parse_args(argv))


def check_flags(args):
    """Raise InputError if flags contradict each other."""
    needs_file = args.vectors or args.jsonl or args.text_columns or reader_options(args)
    if needs_file and args.file is None:
        raise InputError("--vectors, --jsonl, --text, --encoding, --sep and --header require "
                         "--file.")
    if args.vectors and args.jsonl:
        raise InputError("--jsonl: expected --file without --vectors, got both. Use two "
                         "commands.")


def build_parser():
    """Return the parser of all flags."""
    usage = "python infer.py [--ckpt DIR] (TEXT ... | --file FILE | --near WORD ...) [flags]"
    parser = make_parser("infer.py", __doc__, usage=usage)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True).add_argument
    source("texts", nargs="*", default=[], metavar="TEXT",
           help="a text, or an item set; for a model of pairs both texts of each pair")
    source("--near", nargs="+", metavar="WORD",
           help="list the words, or items, most similar to these")
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
    add("--top_k", type=at_least(1), default=8,
        help="results to list for a row at most, labels too (default: 8)")
    add("--prior", type=at_least(0, float, 1), default=0.0, metavar="WEIGHT",
        help="add popularity to the scores of items, weight 0 to 1; requires a model that predicts "
             "their hashes, and a checkpoint with counts (default: 0, as in Superbloom)")
    add("--device", default="cpu", help="cpu, cuda, or auto (default: cpu)")
    return parser


if __name__ == "__main__":
    main()
