"""Ask a trained model: what is wrong in a text, what is missing, which label, which words answer.

    python infer.py --ckpt out/proj-lsh "the arrays have same the shape"        which words are misplaced?
    python infer.py --ckpt out/lookup-bpe-mlm "Return the [MASK] of a list."    what stands there?
    python infer.py --ckpt out/proj-lsh --near initalization                    which words look like it?
    python infer.py --ckpt out/median "The [MASK] statement is used for …"     which word, of any list?
    python infer.py --ckpt out/bloom-items "socket bind listen [MASK]"          which name is missing?
    python infer.py --ckpt out/proj-lsh-sst2 "a charming journey"               which label?
    python infer.py --ckpt out/proj-lsh-squad "Who wrote it?" "It was written by Ada Lovelace."
    python infer.py --ckpt out/proj-lsh-sst2 --file reviews.txt > labels.jsonl  a line in, an object out
    python infer.py --ckpt out/proj-lsh                                        asks for text after text

Sources   [HF] Xue & Aletras 2022, HashFormers   [BERT] Devlin et al. 2019
          [SB] Superbloom, ICLR 2020 submission   [CM] Median is all you need, a proposal
Map       [HF §3.6] detect   [BERT §3.1] fill   [HF §3.3] neighbours
          [BERT §4.2] Reader.answer   [SB §2.5] Reader.complete   [CM] Reader.complete
Not here  scores over a data set: pretrain.py and finetune.py evaluate, this reads texts.
Departs   1. A word never seen is hashed like any other: there is no [UNK] but in a lookup table, and a Bloom
             map has no digest for a stranger.
Letters   L positions   V candidate words   d width   W windows
"""

import argparse
import contextlib
import difflib
import functools
import json
import os
import sys

import numpy as np
import torch

from hashing import CLS, FIRST, MASK, SEP, SPECIALS, UNK, Encoder, InputError, SketchMap, pack, windows
from model import FORM, ConfigError, beam_search, best_spans, choose_machine, exhaustive, hash_logp
from model import load_checkpoint, load_model

__all__ = ["Reader", "beam_search", "exhaustive", "main"]  # the two searches live with the model

CLASSES = ("intact", "shuffled", "random")
COLOURS = {"shuffled": "\033[33m", "random": "\033[31m"}  # yellow, red


TASK = dict(classify=dict(labels=list | None, pair=bool, label=str | None, scale=list | None),
            span=dict(pair=bool, stride=int, longest=int, null=bool))  # what finetune.py leaves to be known


class Reader:
    """A checkpoint made ready to read texts."""

    def __init__(self, path, device="cpu"):
        """in: path of a checkpoint or its folder; device str"""
        checkpoint = load_checkpoint(path)
        self.model = load_model(checkpoint).to(device)
        self.encoder = Encoder.load(checkpoint["encoder"])
        self.task = checkpoint.get("task", {})  # what finetune.py says of it
        self.config = checkpoint["config"]
        self.agree(path)
        self.use(checkpoint.get("words", []))  # the commonest of the corpus

    def agree(self, path):
        """A checkpoint may say anything; in: path, to name; err: ConfigError when its parts do not fit"""
        c, encoder = self.config, self.encoder
        self.task = task = self.task if c.head in TASK else {}
        for name, kind in TASK.get(c.head, {}).items():
            if not isinstance(task.get(name, ...), kind) or kind is int and isinstance(task[name], bool):
                raise ConfigError(f"{path}: the task's {name} is {task.get(name)!r}, wanted {kind}")
        if c.head == "classify":
            numbers = task["labels"] is None
            said, kind = task["scale"] if numbers else task["labels"], float if numbers else str
            fits = c.labels == 1 and len(said or ()) == 2 and isinstance(task["label"], str)
            if not (fits if numbers else len(said) == c.labels) or not all(isinstance(s, kind) for s in said):
                raise ConfigError(f"{path}: {said} are not the labels of this model, nor a scale")
        if c.head == "span" and (min(task["stride"], task["longest"]) < 1 or not task["pair"]):
            raise ConfigError(f"{path}: an answer of no words, or to no question")
        ours = dict(form=FORM[c.emb])
        if FORM[c.emb] in ("bits", "chunks"):
            ours |= dict(bits=c.bits)
        if FORM[c.emb] == "chunks":
            ours |= dict(chunk=c.chunk)
        if encoder.fixed:
            ours |= dict(rows=c.rows)
        if c.head == "hash-mlm" and c.emb != "bloom":
            ours |= dict(sketch=(c.hashes, c.buckets, *(encoder.sketch or ())[2:]))
        for name, value in ours.items():
            if getattr(encoder, name) != value:
                raise ConfigError(f"{path}: the model wants {name} {value} of its words' hash, which has "
                                  f"{getattr(encoder, name)}")

    def split(self, text):
        """Split a text into words; a literal [MASK] is the mask.

        in:  text str
        out: words list[str], spans list[(start, end)], ids list[int]
        """
        words, spans, ids, start, mask = [], [], [], 0, SPECIALS[MASK]
        # A BPE piece holds the space before it and knows what it touches: split the whole text, with signs
        # in place of each mask that no letter joins. Words touch nothing: split what is between the masks.
        whole = self.encoder.split(text.replace(mask, "\ue000" * len(mask))) if self.encoder.bpe else None
        parts = text.split(mask)
        for i, part in enumerate(parts, 1):
            end, last = start + len(part), i == len(parts)
            if whole is None:
                found, places = self.encoder.split(part)
                places = [(start + a, start + b) for a, b in places]
            else:
                stop = end - (part.endswith(" ") and not last)  # the mask's own space
                pairs = [(word, span) for word, span in zip(*whole) if start <= span[0] and span[1] <= stop]
                found, places = [word for word, _ in pairs], [span for _, span in pairs]
            self.known(found)
            words += found + [mask] * (not last)
            spans += places + [(end, end + len(mask))] * (not last)
            ids += self.encoder.ids(found).tolist() + [MASK] * (not last)
            start = end + len(mask)
        if not words:
            raise InputError("the text has no words")
        return words, spans, ids

    def ready(self, ids):
        """in: ids, numbers; out: int64 (1, L) on the device; the model knows the codes of all words so far"""
        self.model.set_codes(torch.from_numpy(self.encoder.codes()), self.encoder.bloom)
        return torch.tensor(np.array([ids], np.int64), device=self.model.device)

    def read(self, text):
        """in: text str; out: words, spans as split(); ids int64 (1, L), [CLS] words [SEP], of a set words"""
        words, spans, ids = self.split(text)
        return words, spans, self.ready([CLS, *ids, SEP] if self.config.order else ids)

    def known(self, names):
        """in: names list[str]; err: InputError, with what looks like it, when a model of sets lacks one"""
        if not self.config.order and self.encoder.fixed:
            for name in names:
                if name not in self.encoder.table:
                    like = ["[MASK]"] if name.lower() == "[mask]" else self.like(name)
                    like = ", or ".join(like)
                    raise InputError(f"{name!r} is none of the {len(self.encoder.words):,} items of this "
                                     f"model{f'; do you mean {like}?' if like else ''}"
                                     f"{'; names stand between spaces or tabs' if ',' in name else ''}")

    def like(self, name):
        """in: name str; out: list[str], at most three known names that look most like it, case aside"""
        spelt, words = {}, self.encoder.words
        if len(words) > 200_000:  # a second and more: those that begin alike
            words = [word for word in words if word[:1].lower() == name[:1].lower()]
        for word in words:
            spelt.setdefault(word.lower(), word)
        return [spelt[found] for found in difflib.get_close_matches(name.lower(), spelt, 3)]

    @functools.cached_property
    def candidates(self):
        """out: words list[str], and the map of their hashes: of bloom its own, else one of self.words"""
        if self.encoder.bloom:
            return self.encoder.words, self.encoder.bloom
        if not self.words:
            raise InputError("there are no words to look among")
        return self.words, SketchMap(self.words, *self.encoder.sketch[:3], self.encoder.key)

    @torch.no_grad()
    def complete(self, text, k, beam=None):
        """The likeliest words or items for each [MASK]; of a set, those it has not yet. [SB §2.5] [CM]

        in:  text str with [MASK]; k int; beam, buckets of each map to look into, None: until certified
        out: list, one per mask, of dict: items, k pairs (name, sum of its hashes' log-probabilities);
             certified bool, no other item scores more; scored int, how many items were; total int, of all
        err: InputError without a [MASK]; ConfigError when the model was not trained with --objective hash-mlm
        """
        self.needs("hash-mlm", "this needs one trained with --objective hash-mlm")
        (ids, at), (words, made) = self.masks(text), self.candidates
        logp, left_out = hash_logp(self.model(ids, at=at), made), None
        if not self.config.order:
            left_out = (ids - FIRST).clamp(min=-1)
            if not self.encoder.bloom:  # its words have other numbers
                given = set(self.split(text)[0])
                left_out = [i for i, word in enumerate(words) if word in given] or [-1]
                left_out = torch.tensor([left_out], device=ids.device)
            left_out = left_out.expand(len(at), -1)
        searches = beam_search(logp, made, k, beam or k, None if beam is None else 1, exclude=left_out)
        return [dict(items=[(words[i], score) for i, score in zip(row, scores) if i >= 0],
                     certified=certified, scored=scored, total=made.n_items)
                for row, scores, certified, scored in zip(*(found.tolist() for found in searches))]

    def use(self, words):
        """in: words list[str], to look among from now on"""
        self.words = words
        self.__dict__.pop("candidates", None)
        if not self.config.order and not self.encoder.fixed:
            self.encoder.ids(words)  # names of several words are found as they are

    def look_among(self, path):
        """in: path of a text file: its words, of a set its lines, take the place of the corpus's words"""
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                lines = file.read().splitlines()
        except OSError as error:
            raise InputError(f"{path}: {error}") from error
        found = [w for line in lines for w in (self.encoder.split(line)[0] if self.config.order else [line])]
        self.use(list(dict.fromkeys(word for word in found if word)))

    def masks(self, text):
        """in: text str; out: ids int64 (1, L), at int64 (M,), where masks are; err: InputError without one"""
        _, _, ids = self.read(text)
        at = (ids.flatten() == MASK).nonzero().squeeze(1)
        if not len(at):
            raise InputError('nothing to fill: write [MASK] where a word is missing, '
                             'as in "the [MASK] statement"')
        return ids, at

    @torch.no_grad()
    def detect(self, text):
        """For each word, whether it seems intact, shuffled or random. [HF §3.6]

        in:  text str
        out: words, spans, probabilities float (words, 3) in the order of CLASSES
        err: ConfigError when the model was not trained with --objective sr, or the text is too long for it
        """
        self.needs("sr", "finding misplaced words needs one trained with --objective sr")
        words, spans, ids = self.read(text)
        if MASK in ids:
            raise ConfigError("this model finds misplaced words: filling a [MASK] needs one trained with "
                              "--objective mlm or hash-mlm")
        return words, spans, self.model(ids).softmax(-1)[0, 1:-1].cpu()

    @torch.no_grad()
    def fill(self, text, k):
        """The likeliest pieces for each [MASK]. [BERT §3.1]

        in:  text str with [MASK]; k int
        out: list, one per mask, of k pairs (piece, probability)
        err: InputError without a [MASK]; ConfigError when the model was not trained with --objective mlm
        """
        self.needs("mlm", "filling a [MASK] needs one trained with --emb lookup --objective mlm")
        ids, at = self.masks(text)
        logits = self.model(ids, at=at)
        logits = logits[:, FIRST - 1:]  # without the rows of the specials
        if not self.config.order:  # a set has an item once
            logits[:, ids[ids >= FIRST] - FIRST] = -torch.inf
        best = logits.softmax(-1).topk(min(k, logits.shape[1]))
        return [[(self.encoder.words[word], p) for word, p in zip(rows, ps)]
                for rows, ps in zip(best.indices.tolist(), best.values.tolist())]

    @torch.no_grad()
    def neighbours(self, word, k, among=None):
        """The words whose embedding is most like a word's, no context. [HF §3.3]

        in:  word str, seen or not; k int; among list[str], default the corpus's 50,000 commonest words
        out: k pairs (word, cosine), the cosine of the vectors less the mean of all, the word's among them

        Under LSH a misspelling finds its word; under MD5 strangers, for their bits have nothing in common.
        """
        pieces, _ = self.encoder.split(word)
        self.known(pieces)
        if len(pieces) != 1:
            raise InputError(f"{word!r} is {len(pieces)} words or pieces to this model ({' '.join(pieces)}): "
                             f"give it one that is whole")
        [word] = pieces
        among = [w for w in (self.words if among is None else among) if w != word]
        if self.encoder.fixed:
            among = [w for w in among if w in self.encoder.table]
        if not among:
            raise InputError("there are no words to look among")
        ids = self.encoder.ids([word] + among)
        if ids[0] == UNK:
            raise InputError(f"{word!r} is not in this model's vocabulary: "
                             f"it has no vector for it")
        vectors = self.model.embed(self.ready(ids)).view(len(ids), -1)  # (1+V, m·d)
        vectors = torch.nn.functional.normalize(vectors - vectors.mean(0), dim=-1)
        best = (vectors[1:] @ vectors[0]).topk(min(k, len(among)))
        return [(among[i], cosine) for i, cosine in zip(best.indices.tolist(), best.values.tolist())]

    def needs(self, head, how):
        """in: head; how to get there; err: ConfigError when the model has another"""
        if self.config.head != head:
            raise ConfigError(f"this model was trained for {self.config.head}: {how}")

    @torch.no_grad()
    def classify(self, first, second=None):
        """The labels of a text, or of a pair; words beyond the model's length are cut.

        in:  first str; second str for a model of pairs
        out: list of (label, probability), likeliest first; of a regression [(the label's column, the number)]
        err: ConfigError when the model was not fine-tuned for it
        """
        self.needs("classify", "labels need one fine-tuned by finetune.py")
        second = None if second is None else np.array(self.split(second)[2], np.int32)
        ids, _ = pack(np.array(self.split(first)[2], np.int32), second, self.config.length)
        [logits] = self.model(self.ready(ids)).cpu()
        if not self.task["labels"]:
            mean, deviation = self.task["scale"]
            return [(self.task["label"].split("|")[-1], logits.item() * deviation + mean)]
        pairs = zip(self.task["labels"], logits.softmax(-1).tolist())
        return sorted(pairs, key=lambda pair: -pair[1])

    @torch.no_grad()
    def answer(self, question, context, k):
        """The words of a context that answer a question. [BERT §4.2]

        in:  question, context str, the context of any length; k int
        out: list of at most k (text, (start, end), probability), best first; end is exclusive, in characters;
             probability among all that are listed. "" with (0, 0) says that there is no answer (SQuAD v2).
        err: ConfigError when the model was not fine-tuned on SQuAD
        """
        self.needs("span", "answers need one fine-tuned with --task squad")
        _, spans, ids = self.split(context)
        found, null = {}, torch.inf
        asked, ids = np.array(self.split(question)[2], np.int32), np.array(ids, np.int32)
        for piece, first, start, stop in windows(asked, ids, self.config.length, self.task["stride"]):
            place = torch.arange(len(piece), device=self.model.device)[None]
            inside = (place >= first) & (place < first + stop - start)
            scores, a, b, none = best_spans(self.model(self.ready(piece)), inside, k, self.task["longest"])
            null = min(null, none.item())
            for score, i, j in zip(scores[0].tolist(), a[0].tolist(), b[0].tolist()):
                if score > -torch.inf:  # a window of few words has fewer than k spans
                    span = spans[start + i - first][0], spans[start + j - first][1]
                    found[span] = max(score, found.get(span, -torch.inf))  # the same words in two windows
        if self.task["null"]:
            found = {(0, 0): null} | found  # first: a tie is silence, as finetune.py has it
        best = sorted(found.items(), key=lambda pair: -pair[1])[:k]
        shares = torch.tensor([score for _, score in best]).softmax(0).tolist()
        out = []
        for ((a, b), _), share in zip(best, shares):
            text = context[a:b].strip()  # a piece of a BPE may hold the space before it, or be one
            a += len(context[a:b]) - len(context[a:b].lstrip())
            out.append((text, (a, a + len(text)), share))
        return out


def show_detected(words, spans, probabilities, text, colour):
    """in: what detect() gave, the text, colour or not; prints the text, then the suspects, worst first"""
    guesses = [CLASSES[i] for i in probabilities.argmax(-1).tolist()]
    line, last = "", 0
    for (start, end), guess in zip(spans, guesses):
        word = text[start:end]
        if guess != "intact":
            word = f"{COLOURS[guess]}{word}\033[0m" if colour else f"{{{word}:{guess}}}"
        line, last = line + text[last:start] + word, end
    print(line + text[last:])
    order = sorted(range(len(words)), key=lambda i: probabilities[i, 0].item())
    for i in order[:8]:
        shown = "   ".join(f"{name} {p:5.1%}" for name, p in zip(CLASSES, probabilities[i].tolist()))
        print(f"  {words[i]:>16}   {shown}")


def look(reader, texts, k, near=False, beam=None):
    """All a model has to say, as plain types.

    in:  reader; texts list of one str, or two for a model of pairs; k, how many answers; near: of one word;
         beam as in Reader.complete
    out: dict
    err: InputError when there are more or fewer texts than the model takes
    """
    wanted = 1 + bool(reader.task.get("pair") and not near)
    if len(texts) != wanted:
        raise InputError(f"this model takes {wanted} text{'s' * (wanted > 1)}, got {len(texts)}" + (
            ": a question and its context" if reader.config.head == "span" else ""))
    if near:
        return dict(neighbours=reader.neighbours(*texts, k))
    if reader.config.head == "mlm":
        return dict(masks=reader.fill(*texts, k))
    if reader.config.head == "hash-mlm":
        return dict(missing=reader.complete(*texts, k, beam))
    if reader.config.head == "classify":
        return dict(labels=reader.classify(*texts)[:k])
    if reader.config.head == "span":
        return dict(answers=reader.answer(*texts, k))
    words, spans, p = reader.detect(*texts)
    return dict(words=words, spans=spans, classes=CLASSES, probabilities=p.tolist())


def show(result, text):
    """in: what look() gave; text str; prints it for people"""
    for i, best in enumerate(result.get("masks", []), 1):
        print(f"[MASK] {i}")
        for piece, p in best:
            print(f"  {piece.replace('Ġ', ' '):>16}   {p:6.1%}")
    for i, found in enumerate(result.get("missing", []), 1):
        sure = found["certified"]
        how = "certified: no other scores more" if sure else "not certified: a wider --beam may find better"
        print(f"[MASK] {i}   {found['scored']:,} of {found['total']:,} scored, {how}")
        for name, score in found["items"]:
            print(f"  {score:8.2f}   {name.replace('Ġ', ' ')}")
    for word, cosine in result.get("neighbours", []):
        print(f"  {word.replace('Ġ', ' '):>16}   {cosine:.3f}")
    for label, p in result.get("labels", []):
        print(f"  {label:>16}   {p:.3f}")
    for answer, (start, end), p in result.get("answers", []):
        print(f"  {p:6.1%}   {answer or '(no answer)'}   [{start}:{end}]")
    if "words" in result:
        show_detected(result["words"], result["spans"], torch.tensor(result["probabilities"]), text,
                      sys.stdout.isatty())


def read_line(line, fields, page=False):
    """in: line str of a file; fields: it is JSON, an object whose values are the texts, or a list; page: a
    set, whose names stand between tabs or spaces, or are the JSON's list; out: list[str], a page's as one
    """
    if not fields:
        line = line.rstrip("\r\n")
        return [line] if page else line.split("\t")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {error}") from error
    if page:
        row = next((v for v in row.values() if isinstance(v, list)), row) if isinstance(row, dict) else row
        if isinstance(row, list):
            return ["\t".join(map(str, row)) + "\t"]  # a tab says that no name ends at a space
    row = list(row.values()) if isinstance(row, dict) else [row] if isinstance(row, str) else row
    if not isinstance(row, list) or not all(isinstance(text, str) for text in row):
        raise InputError(f"wanted texts, got {line[:60]!r}")
    return row


def answer_file(reader, path, k, near, beam=None):
    """Write an object for each line of a file that is not blank: texts and what look() gives, or an error.

    in:  reader; path: .jsonl, or a text a line, two with a tab between; k; near; beam
    """
    try:
        file = open(path, encoding="utf-8", errors="replace", newline="\n")
    except OSError as error:
        raise InputError(f"{path}: {error}") from error
    with file:
        for i, line in enumerate(file, 1):
            if line.strip():
                try:
                    texts = read_line(line, path.endswith(".jsonl"), not reader.config.order)
                    result = dict(line=i, texts=texts) | look(reader, texts, k, near, beam)
                except (InputError, ConfigError) as error:  # one bad line does not end the file
                    result = dict(line=i, error=str(error))
                print(json.dumps(result, ensure_ascii=False), flush=True)


def main(argv=None):
    """in: argv list[str] or None for the command line. Bad input exits with code 2."""
    p = argparse.ArgumentParser(description=__doc__.split("\nSources")[0],
                                formatter_class=argparse.RawDescriptionHelpFormatter,
                                usage="python infer.py --ckpt DIR [flags] [TEXT [TEXT]]        "
                                      "(--help explains them)")
    p.add_argument("text", nargs="*", help=(
        "the text; of a model of pairs both, of SQuAD the question and its context; without any, they are "
        "asked for until the input ends"))
    p.add_argument("--ckpt", required=True, metavar="DIR", help=(
        "folder of a run of pretrain.py or finetune.py, or its ckpt.pt; it says what model this is, so there "
        "are no flags for that"))
    p.add_argument("--file", metavar="FILE", help=(
        "read the texts from a file, one a line (two with a tab between) and no header, or .jsonl with the "
        "texts alone; write an object for each line that is not blank"))
    p.add_argument("--words", metavar="FILE", help=(
        "look among the words of this text, whether the model has seen them or not; None: the 50,000 "
        "commonest of its corpus (--near, and [MASK] of models that predict the hashes of words)"))
    p.add_argument("--near", action="store_true",
                   help="TEXT is a word: show the words nearest to it in the embedding")
    p.add_argument("--top_k", type=int, default=8, metavar="k", help="how many answers (default 8)")
    p.add_argument("--beam", type=int, metavar="B", help=(
        "items by hash: look once at the B likeliest tokens of each hash; None: at k, 2 k, 4 k ..., until it "
        "is certain that no item scores more"))
    p.add_argument("--device", default="cpu", metavar="NAME",
                   help="cpu or cuda (default cpu: one text is quick)")
    args = p.parse_args(argv)
    with contextlib.suppress(AttributeError):  # half of a character, as JSON may hold it, is written \\ud83d
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        args.dtype, args.compile = "float32", False
        device, _, _ = choose_machine(args)
        if args.top_k < 1:
            raise InputError(f"--top_k {args.top_k}: wanted 1 or more")
        if args.beam is not None and args.beam < 1:
            raise InputError(f"--beam {args.beam}: wanted 1 or more")
        if args.text and args.file:
            raise InputError("TEXT or --file, not both")
        reader = Reader(args.ckpt, device)
        if args.beam and reader.config.head != "hash-mlm":
            raise InputError("--beam is of models that predict hashes (--objective hash-mlm)")
        if args.words:
            if not args.near and (reader.config.head != "hash-mlm" or reader.encoder.bloom):
                raise InputError("--words is of --near, and of models that predict the hashes of words")
            reader.look_among(args.words)
        if args.text:
            return show(look(reader, args.text, args.top_k, args.near, args.beam), args.text[0])
        if args.file:
            return answer_file(reader, args.file, args.top_k, args.near, args.beam)
    except (InputError, ConfigError, OSError) as error:
        if isinstance(error, OSError):  # nobody reads what is written: nor what is still to be
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print(f"infer.py: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    while True:
        try:
            texts = [input("> ") for _ in range(1 + bool(reader.task.get("pair") and not args.near))]
            show(look(reader, texts, args.top_k, args.near, args.beam), texts[0])
        except EOFError:
            return print()
        except (InputError, ConfigError) as error:  # one bad line does not end the conversation
            print(f"infer.py: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
