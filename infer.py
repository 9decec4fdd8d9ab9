"""Apply a trained model to text: misplaced words, masked words, item sets, labels, answers, similar words.

    python infer.py --ckpt out/proj-lsh "True if the two arrays have kubernetes same shape."  misplaced words
    python infer.py --ckpt out/lookup-bpe-mlm "Return the [MASK] of a list."    predict a masked word
    python infer.py --ckpt out/bloom-items "socket bind listen [MASK]"          complete an item set
    python infer.py --ckpt out/proj-lsh-sst2 "a charming journey"               classify a text
    python infer.py --ckpt out/proj-lsh-squad "Who wrote it?" "It was written by Ada Lovelace."
    python infer.py --ckpt out/proj-lsh --near initalization                    list similar words
    python infer.py --ckpt out/proj-lsh-sst2 --file reviews.csv > labels.jsonl  one JSON object per row
    python infer.py --ckpt out/proj-lsh --file reviews.csv --vectors out.npy    one vector per row

    from infer import Predictor; p = Predictor("out/proj-lsh"); p.detect("a text")

Paper map:    [HF §3.6] Predictor.detect   [HF §3.3] Predictor.neighbors   [BERT §3.1] Predictor.fill_mask
              [BERT §4.2] Predictor.answer   [SB §2.5] Predictor.predict_missing
              [CM] Predictor.predict_missing
Out of scope: scores over a data set (pretrain.py, finetune.py), files and what is printed (infer_io.py).
Deviations:   1. A new word is hashed like others; only a fixed vocabulary (lookup, bloom) has unknown words.
Notation:     L positions   M masked positions   V candidate words   d width   m vectors of an item   T bits
"""

import argparse
import contextlib
import difflib
import sys

import numpy as np
import torch
import torch.nn.functional as F

from bloom import SketchMap, beam_search, exhaustive, hash_logp  # noqa: F401  exhaustive is for importers
from baselines.canine import select_classes
from data.batches import length_batches, pad_batch
from data.squad import best_spans
from infer_io import HEADS, NEAR, check_flags, print_prediction, print_rows, read_texts, split_masked
from infer_io import validate_checkpoint
from model import load_model
from runtime import HelpFormatter, InputError, at_least, blame_input, exit_on_bad_input, load_checkpoint
from runtime import resolve_device
from tokenizer import CLS, FIRST_WORD_ID, MASK, SEP, SPECIALS, build_inputs, sliding_windows

BATCH = 32  # inputs that the model reads at once
CLASSES = ("intact", "shuffled", "random")


class TextModel:
    """A trained model and its tokenizer: texts to logits and vectors. Base class of Predictor."""

    def __init__(self, path, device="cpu"):
        checkpoint = load_checkpoint(path)
        *kinds, tokenizer = select_classes(checkpoint["config"])
        with blame_input(path):
            self.model, self.cached_logits = load_model(checkpoint, kinds).to(device), {}
            self.config = self.model.config
            self.tokenizer = tokenizer.load(checkpoint["encoder"], self.config)
            self.model.set_codes(torch.from_numpy(self.tokenizer.codes()))
            self.task = validate_checkpoint(checkpoint.get("task", {}), self.config, self.tokenizer)
            self.columns = self.task.get("texts") or HEADS[self.config.head].columns
            self.set_candidates(checkpoint.get("words", []))

    def set_candidates(self, words):
        """Search neighbors and masked words among words list[str] from now on, instead of the corpus's."""
        self.words, self.items, self.item_map = words, self.tokenizer.words, self.tokenizer.bloom_map
        if self.config.head == "hash-mlm" and not self.item_map:
            sketch = self.tokenizer.sketch_targets(words)
            self.items, self.item_map = words, SketchMap(sketch, self.config.buckets)
        if not self.config.order and not self.tokenizer.is_fixed:
            self.tokenizer.ids(words)  # names of several words are matched as they are

    def split(self, text):
        """Return words list[str], spans list[(start, end)] in characters, IDs list[int], MASK of [MASK].

        A model that was fine-tuned reads an empty text too, and [MASK] as ordinary words, as in training.
        Raises: InputError, no words, or, with similar names, an item that a model of item sets does not know.
        """
        is_any, known = self.config.head in ("classify", "span"), self.tokenizer.words
        pairs = list(zip(*self.tokenizer.split(text))) if is_any else split_masked(self.tokenizer, text)
        ordinary = [word for word, _ in pairs if word != SPECIALS[MASK]]
        unknown = [word for word in ordinary if word not in self.tokenizer.id_of_word]
        if unknown and self.tokenizer.is_fixed and not self.config.order:
            name = unknown[0].lower()
            spelling = {word.lower(): word for word in ("[MASK]", *known) if word[:1].lower() == name[:1]}
            similar = ", ".join(map(spelling.get, difflib.get_close_matches(name, spelling, 3)))
            hint = f" Did you mean {similar}?" * bool(similar) + " Use spaces or tabs." * ("," in name)
            raise InputError(f"text: expected one of {len(known):,} items, got {unknown[0]!r}.{hint}")
        if not pairs and not is_any:
            raise InputError("text: expected words, got none.")
        ids = iter(self.tokenizer.ids(ordinary).tolist())
        words, spans = ([pair[i] for pair in pairs] for i in (0, 1))
        return words, spans, [MASK if word == SPECIALS[MASK] else next(ids) for word in words]

    def read(self, first, second=None):
        """Return the inputs that the model reads of a text or pair, each (L,) int: a context's windows."""
        c, (ids, second) = self.config, [x if x is None else self.split(x)[2] for x in (first, second)]
        if c.head == "span":
            return [ids for ids, *_ in sliding_windows(ids, second, c.length, self.task["stride"])]
        if c.order:  # classify: cut to the length, as in fine-tuning
            ids = [CLS, *ids, SEP] if c.head != "classify" else build_inputs(
                ids, second, c.length, self.tokenizer.separator, keep_rest=c.bag > 0)[0]
        if len(ids) > c.length and not c.bag:
            raise InputError(f"text: expected at most {c.length} positions (--length), got {len(ids)}.")
        return [ids]

    def update_codes(self):
        """Give the model the codes of words that are new."""
        if len(codes := self.tokenizer.codes()) > len(self.model.codes):
            self.model.set_codes(torch.from_numpy(codes))

    @torch.no_grad()
    def compute(self, inputs, is_vector=False):
        """Return a list of the logits of inputs, of words those of masks (M, ...); or of vectors (d,)."""
        self.update_codes()
        results = {}
        for batch in length_batches(list(map(len, inputs)), BATCH) if inputs else ():
            some = [inputs[i] for i in batch]
            ids, key_mask = (x if x is None else x.to(self.model.device) for x in pad_batch(some))
            if is_vector:
                sizes = [len(ids) * self.model.vectors_per_item for ids in some]
                rows = [x[:size].mean(0) for x, size in zip(self.model.encode(ids, key_mask), sizes)]
            elif self.config.predicts_rows:
                masks = ids == MASK
                rows = self.model(ids, key_mask, masks.flatten().nonzero()[:, 0]).split(masks.sum(1).tolist())
            else:
                rows = self.model(ids, key_mask)
            results |= zip(batch, rows)
        return [results[i] for i in range(len(inputs))]

    def read_word(self, text):
        """Return the only word, or subword piece, of a text."""
        pieces = self.split(text)[0]
        if len(pieces) != 1 or self.tokenizer.is_fixed and pieces[0] not in self.tokenizer.id_of_word:
            raise InputError(f"--near: expected one word or piece of this model, got {' '.join(pieces)!r}.")
        return pieces[0]

    def check_texts(self, row, is_word):
        """Return a row, a text or pair, as list[str]; InputError where it is not what the model reads."""
        columns, row = (NEAR if is_word else self).columns, row if isinstance(row, (list, tuple)) else [row]
        if len(row) != len(columns) or not all(isinstance(text, str) for text in row):
            raise InputError(f"text: expected {len(columns)} ({', '.join(columns)}), got {str(row)[:60]}.")
        return row

    @torch.no_grad()
    def embed_words(self, words, raw=False):
        """Return the embedding's own vectors of words list[str], float (n, m·d), or raw their bits (n, T)."""
        if raw and self.config.code_format not in ("bits", "chunks"):
            raise InputError(f"--raw requires an embedding of hash bits, got {self.config.emb}.")
        if raw:
            return torch.from_numpy(self.tokenizer.hash.bits(words, self.config.bits)).float()
        ids = torch.from_numpy(self.tokenizer.ids(words)).long().to(self.model.device)
        self.update_codes()
        return self.model.embed(ids[None]).view(len(words), -1).cpu()

    def embed(self, texts, is_word=False, raw=False):
        """Return the vectors of a list of texts or pairs, or of words, float32 ndarray (n, d).

        A text has the mean over positions of what the encoder returns, of a long context its first window's.
        A word has its own vector in the embedding (n, m·d), or with raw its hash bits (n, T).
        """
        inputs = []
        if self.config.emb == "canine":
            raise InputError("--vectors: expected a model of words, got canine, which trains labels alone.")
        if raw and not is_word:
            raise InputError("raw: requires is_word, for only words have hash bits.")
        for number, row in enumerate([texts] if isinstance(texts, str) else texts, 1):
            try:
                row = self.check_texts(row, is_word)
                inputs.append(self.read_word(*row) if is_word else self.read(*row)[0])
            except InputError as error:
                raise InputError(f"row {number:,}: {error}") from error
        if not inputs:
            raise InputError("texts: expected one or more, got none.")
        x = self.embed_words(inputs, raw) if is_word else torch.stack(self.compute(inputs, is_vector=True))
        return x.cpu().numpy()


class Predictor(TextModel):
    """A trained model that reads texts: path str of a checkpoint or its folder, device str or torch.device.

    predict and embed take a list and run padded batches, which changes probabilities by less than 1e-5; the
    other methods take one text or pair.

    Attributes: model, tokenizer, config; task dict, see HEADS; columns list[str], the texts that it reads.
    Raises: InputError for a damaged checkpoint, and in methods for a text or a head that does not fit.
    """

    def predict(self, rows, near=False, **options):
        """Return a list of dict, what the model says about each text or pair of rows, as plain types.

        Args: near bool, return neighbors of words; options k, beam, raw, of which the method takes its own. A
        bad row gives dict(error=message). The logits of all rows are in memory at once.
        """
        ability, inputs, results = NEAR if near else HEADS[self.config.head], [], []
        options = {name: options[name] for name in ability.options if name in options}
        rows = [rows] if isinstance(rows, str) else list(rows)
        for row in rows:
            with contextlib.suppress(InputError):  # raised again below
                inputs += [] if near else self.read(*self.check_texts(row, near))
        self.cached_logits = dict(zip(map(tuple, inputs), self.compute(inputs)))
        for row in rows:
            try:
                result = {ability.key: getattr(self, ability.method)(*self.check_texts(row, near), **options)}
                if "words" in result:
                    words, spans, p = result["words"]
                    result = dict(words=words, spans=spans, classes=CLASSES, probabilities=p.tolist())
            except InputError as error:
                result = dict(error=str(error))
            results.append(result)
        self.cached_logits = {}
        return results

    def logits(self, head, *texts):
        """Return the logits of the inputs of texts, which predict() has computed or are computed now."""
        if self.config.head != head:
            raise InputError(f"--ckpt: expected head {head} ({HEADS[head].command}), got {self.config.head}.")
        inputs = self.read(*self.check_texts([text for text in texts if text is not None], False))
        is_ready = self.cached_logits.keys() >= {*map(tuple, inputs)}
        logits = [self.cached_logits[tuple(ids)] for ids in inputs] if is_ready else self.compute(inputs)
        if self.config.predicts_rows and not len(logits[0]):
            example = "the [MASK] statement" if self.config.order else "bread butter [MASK]"
            raise InputError(f'text: expected [MASK], as in "{example}", got none.')
        return logits

    def detect(self, text):
        """Return words list[str], spans list[(start, end)], float (words, 3) p of CLASSES. [HF §3.6]"""
        [logits], (words, spans, ids) = self.logits("sr", text), self.split(text)
        if MASK in ids:
            raise InputError(f"text: expected no [MASK] for detect. Train with {HEADS['mlm'].command}.")
        return words, spans, logits[1:1 + len(words)].softmax(-1).cpu()

    def fill_mask(self, text, k=8):
        """Return a list, one per [MASK] of text str, of the k best pairs (word, probability). [BERT §3.1]"""
        [logits] = self.logits("mlm", text)
        words = self.tokenizer.words
        if not self.config.order:  # a set has an item once
            logits[:, self.split(text)[2]] = -torch.inf
        p, best = logits[:, FIRST_WORD_ID:].softmax(-1).topk(min(k, len(words)))  # (M, k): no special tokens
        return [[(words[i], share) for i, share in zip(*row) if share > 0]  # nan: the set has all items
                for row in zip(best.tolist(), p.tolist())]

    def predict_missing(self, text, k=8, beam=None):
        """Predict each [MASK] of text str by its hashes among the candidates. [SB §2.5] [CM]

        Returns: list, one per mask, of dict: items, the k best pairs (name, sum of its hashes' logp), of
            a set new ones; certified bool, provably the best; scored, total int, of items. beam: as --beam.
        """
        [logits] = self.logits("hash-mlm", text)
        (words, _, ids), exclude = self.split(text), None
        if not self.items:
            raise InputError("--words: expected words to search among, got none.")
        if not self.config.order:
            exclude, visible = [i - FIRST_WORD_ID for i in ids], {*words}  # -1, no item, of [MASK]
            if not self.tokenizer.bloom_map:  # candidates have numbers of their own
                exclude = [-1, *(i for i, name in enumerate(self.items) if name in visible)]
            exclude = torch.tensor([exclude], device=logits.device).expand(len(logits), -1)
        rounds, logp = None if beam is None else 1, hash_logp(logits, self.item_map)
        results = beam_search(logp, self.item_map, k, beam or k, rounds, exclude=exclude)
        return [dict(items=[(self.items[i], score) for i, score in zip(best, scores) if i >= 0],
                     certified=certified, scored=scored, total=len(self.items))
                for best, scores, certified, scored in zip(*(result.tolist() for result in results))]

    def neighbors(self, word, k=8, raw=False):
        """Return the k pairs (word, cosine) most similar to word str; raw: share of equal bits. [HF §3.3]

        The mean vector of the word and its candidates is subtracted first: the cosine depends on them all.
        """
        word, index = self.read_word(word), self.tokenizer.id_of_word
        among = [x for x in self.words if x != word and (not self.tokenizer.is_fixed or x in index)]
        if not among:
            raise InputError("--words: expected words to search among, got none.")
        if self.config.code_format in ("bits", "chunks") and not self.embed_words([word], raw=True).any():
            raise InputError(f"--near: expected a word with an n-gram that the hash knows, got {word!r}.")
        x = self.embed_words([word] + among, raw)  # (1+V, m·d)
        x = x if raw else F.normalize(x - x.mean(0), dim=-1)
        similarity = (x[1:] == x[0]).float().mean(1) if raw else x[1:] @ x[0]
        best = similarity.topk(min(k, len(among)))
        return [(among[i], value) for i, value in zip(best.indices.tolist(), best.values.tolist())]

    def classify(self, first, second=None, k=None):
        """Return k (label, probability), best first, of a text or pair; of a regression [(name, number)]."""
        [logits] = self.logits("classify", first, second)
        if not self.task["labels"]:
            mean, deviation = self.task["scale"]
            return [(self.task["label"].split("|")[-1], logits.item() * deviation + mean)]
        return sorted(zip(self.task["labels"], logits.softmax(-1).tolist()), key=lambda pair: -pair[1])[:k]

    def answer(self, question, context, k=8):
        """Return the k best (text, (start, end), p) of a context; "" is no answer. [BERT §4.2]

        p is the probability among the 20 best spans, or k of them if k is larger.
        """
        outputs, (_, spans, ids), scores = self.logits("span", question, context), self.split(context), {}
        windows = sliding_windows(self.split(question)[2], ids, self.config.length, self.task["stride"])
        num_best = max(k, 20)
        for (window, first, start, stop), logits in zip(windows, outputs):
            # (1, L): after the context is one [SEP]
            inside = F.pad(torch.ones(1, stop - start, dtype=torch.bool, device=logits.device), (first, 1))
            *best, null = best_spans(logits[None, :len(window)], inside, num_best, self.task["longest"])
            for score, i, j in zip(*(part[0].tolist() for part in best)):
                if score > -torch.inf:  # a window of few words has fewer spans
                    a, b = spans[start + i - first][0], spans[start + j - first][1]
                    # a subword piece may contain the space before it, or be one
                    span = b - len(context[a:b].lstrip()), a + len(context[a:b].rstrip())
                    if span[0] < span[1]:
                        scores[span] = max(score, scores.get(span, score))  # the same words in two windows
            if self.task["null"]:
                scores[0, 0] = min(null.item(), scores.get((0, 0), torch.inf))
        # a tie: (0, 0) first
        best, answers = sorted(scores.items(), key=lambda pair: (-pair[1], pair[0]))[:num_best], []
        for ((a, b), _), share in zip(best, torch.tensor([score for _, score in best]).softmax(0).tolist()):
            answers.append((context[a:b], (a, b), share))
        return answers[:k]


def parser():
    """Return the parser of all flags."""
    p = argparse.ArgumentParser(formatter_class=HelpFormatter, description=(__doc__ or "").split("Paper")[0],
                                usage="python infer.py --ckpt DIR [flags] [TEXT [TEXT]]        (try --help)")
    add = p.add_argument
    add("texts", nargs="*", metavar="TEXT", help="the text, or the pair; without any, a prompt asks")
    add("--ckpt", required=True, metavar="DIR", help="folder of a run of pretrain.py or finetune.py")
    add("--file", metavar="FILE", help="one JSON object per row of a .txt (a tab between pairs), .csv, .tsv, "
        ".jsonl, .json, .parquet, or .gz: line (number), texts, results or error; exit code 2: all failed")
    add("--text", dest="columns", metavar="A[,B]", help="columns (default: the task's, text or the only one)")
    add("--words", metavar="FILE", help="words to search among, new ones too; requires --near or a model "
        "that predicts the hashes of words (default: the corpus's 50,000 most frequent)")
    add("--near", action="store_true", help="list the words whose embeddings are most similar to TEXT's")
    add("--raw", action="store_true", help="compare hash bits, not embeddings; requires --near")
    add("--vectors", metavar="OUT.npy", help="write a vector per TEXT or row instead, float32 (n, d): the "
        "mean of the encoder's outputs, or with --near the embedding of a word")
    add("--top_k", type=at_least(1), default=8, metavar="k", help="how many answers to list")
    add("--beam", type=at_least(1), metavar="B", help="hash buckets to search (default: as many as needed)")
    add("--device", default="cpu", metavar="NAME", help="cpu, cuda, or auto")
    return p


def run(args):
    """Load the model and read the texts, the file, or the prompt."""
    p = Predictor(args.ckpt, resolve_device(args)[0])
    check_flags(args, p)
    is_set, columns = not p.config.order, NEAR.columns if args.near else p.columns
    if args.words:
        rows = read_texts(args.words, ["text"], None, is_set, "Keep one column, or name it text.", False)
        texts = [text for _, texts in rows for text in texts if isinstance(text, str)]
        texts = [text + "\t" for text in texts] if is_set else texts  # a tab: a line is one name
        p.set_candidates(list(dict.fromkeys(word for text in texts for word in p.tokenizer.split(text)[0])))
    options = dict(near=args.near, raw=args.raw, k=args.top_k, beam=args.beam)
    rows = read_texts(args.file, columns, args.columns, is_set) if args.file else iter([(1, args.texts)])
    if args.vectors:
        rows = list(rows)
        if rows and rows[-1][0] > len(rows):
            raise InputError(f"{args.file}: expected no empty line with --vectors, got "
                             f"{rows[-1][0] - len(rows):,}. A row of the vectors is a line.")
        n, d = (vectors := p.embed([texts for _, texts in rows], args.near, args.raw)).shape
        with open(args.vectors, "wb") as file:  # np.save would add .npy to a name
            np.save(file, vectors)
        print(f"Saved {args.vectors}: {n:,} vectors of {d:,} numbers", file=sys.stderr)
    elif args.file:
        print_rows(rows, lambda texts: p.predict(texts, **options), args.file)
    elif args.texts:
        print_prediction(*p.predict([args.texts], **options), args.texts[0])
    while not (args.vectors or args.file or args.texts):
        try:
            texts = [input("> ") for _ in columns]
            print_prediction(*p.predict([texts], **options), texts[0])
        except EOFError:
            return print()
        except InputError as error:
            print(f"infer.py: {error}", file=sys.stderr)  # one bad text does not end the conversation


def main(argv=None):
    """Parse the command line (argv list[str], or None) and predict. Bad input exits with code 2."""
    with exit_on_bad_input("infer.py", needs_output=True):
        run(parser().parse_args(argv, argparse.Namespace(dtype="float32", compile=False)))


if __name__ == "__main__":
    main()
