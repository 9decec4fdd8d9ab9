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
Out of scope: rows to token IDs (support/readers.py), files (support/predict_file.py), scores
    (finetune.py --epochs 0)
Notation: B batch   L positions   M masked positions   V candidate words   d hidden size   T bits
    m vectors or hashes of an item   k results to return   R buckets of a hash   N rows
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from bloom import ItemMap, beam_search, hash_logp
from data.batches import length_batches, pad_batch
from data.rows import add_reader_flags, reader_options
from data.splitters import import_tokenizers
from data.squad import V2, find_answers, sliding_windows
from model import load_model
from objectives import ShuffleRandom
from support.common import InputError, at_least, blame, find_device, load_checkpoint, make_parser
from support.common import run_script, send
from support.predict_file import write_rows, write_vectors
from support.readers import LOCK, MASK_WORD, SetReader, TextReader, list_ids, read_all
from tokenizer import FIRST_WORD_ID, MASK, HashTokenizer

BATCH = 32  # rows; on a CPU 8 to 64 are best, as more have more padding


def infer(args):
    """Check the flags, load the model, and print what it says."""
    check_flags(args)
    if args.ckpt is None:  # a model either fills masks or judges words
        is_masked = any(MASK_WORD in text for text in args.texts)
        name = "english-fill.pt" if is_masked else "english-detect.pt"
        args.ckpt = Path(__file__).with_name("models") / name
    print(f"model: {args.ckpt}", file=sys.stderr)
    predictor = Predictor(args.ckpt, find_device(args.device), args.truncate)

    if args.texts:
        print_texts(predictor, args.texts, args.top_k)
    elif args.near is not None:
        for word, pairs in zip(args.near, predictor.neighbors(args.near, args.top_k)):
            print(word)
            print_words(predictor, pairs)
    elif args.vectors is None:
        write_rows(args, predictor)
    else:
        write_vectors(args, predictor)


def print_texts(predictor, rows, k):
    """Print what a model says of the texts of the command line, at most k results for each."""
    if len(predictor.columns) == 2:  # a row is a pair of them
        if len(rows) % 2:
            raise InputError(f"TEXT: expected {' and '.join(predictor.columns)}, got {rows}.")
        rows = list(zip(rows[::2], rows[1::2]))
    examples = read_all(predictor.read, rows)
    for example, result in zip(examples, predictor.predict(examples, k)):
        predictor.readout.print_result(example.row, result, k)
        for note in predictor.list_notes(example):
            print(f"note: {note}")


class Predictor:
    """A trained model and its tokenizer: rows -> read -> Examples -> the readout -> results.

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
        candidates: Candidates, what neighbors and the heads for [MASK] search.
        readout: Readout, which turns the outputs of the head into results.

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
        self.readout = READOUTS[self.model.head.method](self)
        length = self.config.length
        if self.config.order:
            has_masks = not self.task  # in fine-tuning [MASK] is ordinary text
            self.reader = TextReader(self.tokenizer, length, self.columns, has_masks)
        else:
            self.reader = SetReader(self.tokenizer, length, self.candidates.items)

    def set_candidates(self, words):
        """Search these words, list[str], the most frequent first, instead of the checkpoint's."""
        self.candidates = Candidates(words, self.tokenizer, self.config)
        self.words = self.candidates.words

    # What the head says. Its class in READOUTS says what a result is

    def predict(self, rows, k=8):
        """Return what the model's head says of each row, k results at most."""
        if not isinstance(rows, list):
            return self.predict([rows], k)[0]
        return self.readout.predict(read_all(self.read, rows), k)

    def detect(self, rows):
        """Judge each word of a text: (words, spans, probabilities), see WordJudge."""
        self.check_method("detect")
        return self.predict(rows)

    def fill_mask(self, rows, k=8):
        """Predict each [MASK] among the words of the vocabulary, see WordRanking."""
        self.check_method("fill_mask")
        return self.predict(rows, k)

    def predict_missing(self, rows, k=8):
        """Predict each [MASK] by its hashes, among all items, see ItemSearch."""
        self.check_method("predict_missing")
        return self.predict(rows, k)

    def classify(self, rows, k=None):
        """Label a text or a pair: the k best (label, probability), or all, see Labels."""
        self.check_method("classify")
        return self.predict(rows, k)

    def answer(self, rows):
        """Find the answer to a (question, context): (answer, margin), see Answers."""
        self.check_method("answer")
        return self.predict(rows)

    def check_method(self, method):
        """Raise InputError unless the model's head has this method."""
        its_method = self.model.head.method
        if method != its_method:
            raise InputError(f"expected a model with the method {method}, got one with "
                             f"{its_method} (head {self.config.head}).")

    # Rows to Examples, and Examples to outputs

    def read(self, row):
        """Return the Example of a row, or raise a ValueError if the head cannot read it."""
        example = self.reader.read(row)
        self.check_length(example)
        self.readout.check(example)
        return example

    def read_for_vector(self, row):
        """Return the Example of a row for embed, which needs no [MASK] and no words."""
        example = self.reader.read_for_vector(row)
        self.check_length(example)
        return example

    def check_length(self, example):
        """Raise a ValueError if a row was cut, and may not be."""
        # a fine-tuned model was trained on cut texts, and cuts them here too; list_notes says so
        if example.num_cut > 0 and not self.task and not self.truncate:
            length = self.config.length
            raise ValueError(f"expected at most {length} positions, got {length + example.num_cut}."
                             " The flag or argument truncate reads the start.")

    def list_notes(self, row):
        """Return what a user has to know about how a row is read, list[str]."""
        [example] = read_all(self.read, [row])
        notes = self.reader.list_notes(example)
        if example.num_cut > 0 and not self.readout.reads_windows:
            notes.append(f"cut to {self.config.length} positions")
        return notes

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

    # For every head: vectors, similar words

    def embed(self, rows):
        """Return float32 (rows, d), the mean of the encoder's outputs for each; (d,) for one.

        The vector of a text without words is 0, unless the model was fine-tuned on such texts. So
        is that of a set without items that the model knows.
        """
        if not isinstance(rows, list):
            return self.embed([rows])[0]
        examples = read_all(self.read_for_vector, rows)
        inputs = [example.ids for example in examples]
        vectors = np.zeros((len(rows), self.config.width), np.float32)
        for chosen, outputs in self.run_batches(inputs, self.model.encode):  # (B, L, m, d)
            for i, output in zip(chosen, outputs):
                if not examples[i].words and not self.task:
                    continue
                vectors[i] = output[:len(inputs[i])].mean((0, 1)).cpu()  # the rest is padding
        return vectors

    def neighbors(self, words, k=8):
        """Find the words that are most similar to a word, seen in training or not. [HF §3.3]

        Words are compared by their hash bits, +1 or -1, if the hash gives similar words similar
        bits. Otherwise they are compared by their embeddings, less the mean embedding.
        A call hashes all of self.words: look up many words at once.

        Returns:
            A list of the k best (word, cosine). Among equals the more frequent word comes first.
        """
        if not isinstance(words, list):
            return self.neighbors([words], k)[0]
        queries = [self.read_word(text) for text in words]
        vectors = F.normalize(self.word_vectors(self.words + queries))
        candidates = vectors[:len(self.words)]  # (V, T) or (V, m·d)
        results = []
        for query, vector in zip(queries, vectors[len(self.words):]):
            cosines = candidates @ vector  # (V,)
            best = cosines.argsort(descending=True, stable=True)[:k + 1].tolist()
            pairs = [(self.words[i], cosines[i].item()) for i in best if self.words[i] != query]
            results.append(pairs[:k])
        return results

    def read_word(self, text):
        """Return the one word of a text, as the tokenizer writes it."""
        words, _ = self.reader.splitter.split(text)
        if len(words) != 1 or not self.tokenizer.is_known(words)[0]:
            raise InputError(f"expected one word that this model knows, got {text!r:.60}.")
        return words[0]

    def word_vectors(self, words):
        """Return what neighbors compares: bits as +1 and -1, (n, T), or embeddings (n, m·d).

        words: list[str], which begins with self.words.
        """
        hash = self.tokenizer.coder.hash
        if hash is not None and hash.near_bits > 0:
            bits = hash.bits(words, hash.near_bits)
            return 2.0 * torch.from_numpy(bits) - 1
        ids = torch.from_numpy(list_ids(self.tokenizer, words)).long()
        self.update_codes()
        x = self.model.embed(ids.to(self.model.device))  # (n·m, d)
        x = x.view(len(words), -1).cpu()
        return x - x[:len(self.words)].mean(0)


class Candidates:
    """What a Predictor searches: words for neighbors, items for a [MASK].

    Args:
        words: list[str], the most frequent first.
        tokenizer: HashTokenizer.
        config: model.Config.

    Attributes:
        words: list[str], those that neighbors searches.
        items: list[str], those that fill_mask and predict_missing search.
        item_map: bloom.BloomMap or ItemMap of the items, or None: they have no hashes.
        numbers: dict, item -> its place in items.
    """

    def __init__(self, words, tokenizer, config):
        self.words = words
        self.items = words
        self.item_map = tokenizer.coder.bloom_map
        if tokenizer.is_fixed:  # a word outside the vocabulary has no row and no digest
            self.words = [word for word in words if word in tokenizer.id_of_word]
            self.items = tokenizer.words  # item i has the token ID FIRST_WORD_ID + i
        elif config.predicts_rows:  # the buckets of a sketch
            buckets = tokenizer.targets.codes(words)  # (V, k)
            self.item_map = ItemMap(buckets, config.buckets)
        self.numbers = {name: number for number, name in enumerate(self.items)}


# What the heads say. A readout is a class for a `method` of model.HEADS, and its line in READOUTS


class Readout:
    """How the outputs of a head become results.

    A subclass has

        interpret      (Example, its output, k) -> the result of a row; k is the most to return
        print_result   (row, result, k): prints it for people
    """

    reads_windows = False  # whether it reads a long text whole, in windows

    def __init__(self, predictor):
        self.predictor = predictor

    def check(self, example):
        """Raise a ValueError if the head cannot read an Example."""

    def forward(self, ids, key_mask):
        """Return an output for each row of ids (B, L). key_mask is as in Model.forward."""
        return self.predictor.model(ids, key_mask)

    def predict(self, examples, k):
        """Return the result of each Example."""
        inputs = [example.ids for example in examples]
        results = [None] * len(examples)
        for chosen, outputs in self.predictor.run_batches(inputs, self.forward):
            for i, output in zip(chosen, outputs):
                results[i] = self.interpret(examples[i], output, k)
        return results


class WordJudge(Readout):
    """Is each word of a text intact, shuffled or random? [HF §3.6]

    A result is (words, spans, probabilities):

        words            list[str], those that were read, if the text was cut
        spans            list[(start, end)], the characters of each word
        probabilities    float (words, 3); column i is of predictor.kinds[i]
    """

    def check(self, example):
        if not example.words:
            raise ValueError("expected words, got none.")
        if MASK in example.ids:
            raise ValueError("expected no [MASK]. Remove it, or use a model that fills masks, such "
                             "as models/english-fill.pt.")

    def interpret(self, example, logits, k):  # (L, 3)
        num_read = len(example.ids) - 2  # without [CLS] and [SEP]
        probabilities = logits[1:1 + num_read].softmax(-1).cpu()
        return example.words[:num_read], example.spans[:num_read], probabilities

    def print_result(self, text, result, k):
        """Print a text with misplaced words as {word:kind}, then the k words least likely intact.

            She looked out of the {kubernetes:random}.
                    kubernetes   intact  8.7%   shuffled  0.3%   random 91.0%
                           the   intact 99.6%   shuffled  0.4%   random  0.0%
        """
        words, spans, probabilities = result
        kinds = self.predictor.kinds
        marked = ""
        last = 0  # the first character that is not in `marked` yet
        for (start, end), kind in zip(spans, probabilities.argmax(1).tolist()):
            if kind != 0:  # not intact
                marked += f"{text[last:start]}{{{text[start:end]}:{kinds[kind]}}}"
                last = end
        _, end = spans[-1]
        print(marked + text[last:end])  # what follows was not read
        ranking = probabilities[:, 0].argsort(stable=True)
        for i in ranking[:k].tolist():
            line = f"  {clean(self.predictor, words[i]):>16}"
            for label, kind in kinds.items():
                line += f"   {kind} {probabilities[i, label]:5.1%}"
            print(line)


class MaskReadout(Readout):
    """What both heads that predict a [MASK] share: a row has M of them, and M rows of logits."""

    def check(self, example):
        if MASK not in example.ids:
            raise ValueError(f"expected [MASK] in the first {self.predictor.config.length} "
                             f"positions, got {example.row!r:.60}.")
        if not example.words:  # a set, as a [MASK] of a text is among its words
            raise ValueError("expected items that this model knows, split by tabs or spaces, got "
                             f"{example.row!r:.60}.")

    def forward(self, ids, key_mask):
        """Return the logits of each row's [MASK].

            rows "a [MASK] [MASK]" and "[MASK] cat"  ->  logits (2, ...) and (1, ...)
        """
        is_mask = ids == MASK  # (B, L)
        [positions] = torch.where(is_mask.flatten())
        logits = self.predictor.model(ids, key_mask, masked_positions=positions)
        return logits.split(is_mask.sum(1).tolist())  # B times (M, ...)

    def list_shown(self, example):
        """Return the numbers of the items that a set shows, int64 (E,); none for a text."""
        numbers = self.predictor.candidates.numbers
        shown = [numbers[name] for name in example.shown if name in numbers]
        return torch.tensor(shown, dtype=torch.int64)


class WordRanking(MaskReadout):
    """Which words of the vocabulary does each [MASK] stand for? [BERT §3.1]

    A result has for each [MASK] a list of the k best (word, probability). An item that the set
    shows is not among them.
    """

    def interpret(self, example, logits, k):  # (M, N)
        items = self.predictor.candidates.items
        logits = logits[:, FIRST_WORD_ID:]  # (M, V): no special tokens
        logits[:, self.list_shown(example)] = -torch.inf
        best = logits.softmax(-1).topk(min(k, len(items)))
        result = []
        for shares, numbers in zip(best.values.tolist(), best.indices.tolist()):
            pairs = []
            for number, share in zip(numbers, shares):
                if share > 0:  # a shown item has 0, and all have NaN if the set shows all items
                    pairs.append((items[number], share))
            result.append(pairs)
        return result

    def print_result(self, row, result, k):
        """Print the pairs of each [MASK] under its number, from 1 on."""
        for number, pairs in enumerate(result, 1):
            print(f"[MASK] {number}")
            print_words(self.predictor, pairs)


class ItemSearch(MaskReadout):
    """Which item has the hashes that are predicted for a [MASK]? [SB §2.5] [CM]

    A result has for each [MASK], of which a set has one, a dict:

        items     list of the k best (name, sum of the log-probabilities of its hashes). An item
                  that the set shows is not among them
        scored    int, how many items the search scored to certify that these are the best
        total     int, how many items there are
    """

    def interpret(self, example, logits, k):  # (M, k, R), or as hash_logp says
        items = self.predictor.candidates.items
        item_map = self.predictor.candidates.item_map
        # (M, m, R): m hashes of an item
        logp = hash_logp(logits, item_map, one_softmax=self.predictor.tokenizer.is_fixed)
        shown = self.list_shown(example).to(logits.device).expand(len(logp), -1)  # (M, E)
        # without a limit of rounds the search goes on until the k best are certified
        best, scores, _, num_scored = beam_search(  # (M, k), (M, k), (M,), (M,)
            logp, item_map, k, beam=k, rounds=None, exclude=shown)
        result = []
        for position, scored in enumerate(num_scored.tolist()):
            pairs = []
            for number, score in zip(best[position].tolist(), scores[position].tolist()):
                if number >= 0:  # -1: fewer than k items are left
                    pairs.append((items[number], score))
            result.append(dict(items=pairs, scored=scored, total=len(items)))
        return result

    def print_result(self, row, result, k):
        """Print the items of each [MASK], and how many of all the search has scored.

            [MASK] 1   sums of log-probabilities; provably the best of 5,000, of which 104 ...
                          door   -5.321
                          room   -9.850
        """
        for number, found in enumerate(result, 1):
            print(f"[MASK] {number}   sums of log-probabilities; provably the best of "
                  f"{found['total']:,}, of which {found['scored']:,} were scored")
            print_words(self.predictor, found["items"])


class Labels(Readout):
    """Which label has a text, or a pair of texts?

    A result is a list of the k best (label, probability), all of them if k is None. A regression
    has one (name of the label column, number).
    """

    def interpret(self, example, logits, k):  # (labels,)
        task = self.predictor.task
        if task.get("labels") is None:
            mean, deviation = task["scale"]
            return [(task["label"], logits.item() * deviation + mean)]
        pairs = zip(task["labels"], logits.softmax(-1).tolist())
        return sorted(pairs, key=lambda pair: -pair[1])[:k]

    def print_result(self, row, result, k):
        print_pairs(result)


class Answers(Readout):
    """Which words of a context answer a question? [BERT §4.2]

    A row is (question, context). A result is the answer, "" for none; and its score minus that of
    none, float.
    """

    reads_windows = True

    def predict(self, examples, k):
        """Return the result of each Example. The best span of all windows of its context counts."""
        windows = []  # (number of the Example, Window)
        for number, example in enumerate(examples):
            question, context = example.text_ids
            for window in sliding_windows(question, context, self.predictor.config.length):
                windows.append((number, window))
        inputs = [window.ids for _, window in windows]
        batches = self.predictor.run_batches(inputs, self.forward)
        pairs = [example.row for example in examples]
        spans = [example.spans for example in examples]  # of the words of each context
        allow_no_answer = self.predictor.task["name"] == V2
        answers, margins = find_answers(pairs, windows, spans, batches, allow_no_answer)
        return list(zip(answers, margins.tolist()))

    def print_result(self, row, result, k):
        answer, margin = result
        print_pairs([(answer or "(no answer)", margin)])


READOUTS = {  # the method of a head -> how its outputs are read
    "detect": WordJudge,
    "fill_mask": WordRanking,
    "predict_missing": ItemSearch,
    "classify": Labels,
    "answer": Answers,
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
        decoder = import_tokenizers().decoders.ByteLevel()
        word = decoder.decode([word])  # BPE writes the bytes of " café" as "ĠcafÃ©"
    return word.replace("\n", "\\n")


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
        raise InputError("--jsonl: expected --file without --vectors, got both.")


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
