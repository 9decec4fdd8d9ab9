"""Apply a trained model to text: misplaced words, masked words, item sets, labels, answers, similar words.

    python infer.py --ckpt out/proj-lsh "the arrays have same the shape"        find misplaced words
    python infer.py --ckpt out/lookup-bpe-mlm "Return the [MASK] of a list."    predict a masked word
    python infer.py --ckpt out/bloom-items "socket bind listen [MASK]"          complete an item set
    python infer.py --ckpt out/proj-lsh-sst2 "a charming journey"               classify a text
    python infer.py --ckpt out/proj-lsh-squad "Who wrote it?" "It was written by Ada Lovelace."
    python infer.py --ckpt out/proj-lsh --near initalization                    list similar words
    python infer.py --ckpt out/proj-lsh-sst2 --file reviews.csv > labels.jsonl  one JSON object per row

    from infer import Predictor; p = Predictor("out/proj-lsh"); p.detect("the arrays have same the shape")

Paper map:    [HF §3.6] Predictor.detect   [HF §3.3] Predictor.neighbors   [BERT §3.1] Predictor.fill_mask
              [BERT §4.2] Predictor.answer   [SB §2.5] Predictor.predict_missing
              [CM] Predictor.predict_missing
Out of scope: scores over a data set: pretrain.py and finetune.py evaluate.
Deviations:   1. A new word is hashed like others; only a fixed vocabulary (lookup, bloom) has unknown words.
Notation:     L positions   M masked positions   V candidate words   d width   m vectors of an item
"""

import argparse
import contextlib
import difflib
import itertools
import json
import os
import sys
from collections import namedtuple

import numpy as np
import torch

from bloom import SketchMap, beam_search, exhaustive, hash_logp
from data.corpus import choose_column, get_ending, read_rows
from data.squad import best_spans
from model import load_model
from runtime import HelpFormatter, InputError, at_least, blame_input, exit_on_bad_input, load_checkpoint
from runtime import resolve_device
from tokenizer import CLS, FIRST_WORD_ID, MASK, SEP, SPECIALS, HashTokenizer, build_inputs, sliding_windows

__all__ = ["Predictor", "beam_search", "exhaustive", "main"]  # the two searches come from bloom.py

CLASSES = ("intact", "shuffled", "random")
COLORS = {"shuffled": "\033[33m", "random": "\033[31m"}  # yellow, red
# what a model does by its head: method of Predictor, its options, key of the result, how to train such a
# model, and what finetune.py writes about its task into the checkpoint
Ability = namedtuple("Ability", "method options key command task", defaults=[{}])
HEADS = {
    "sr": Ability("detect", (), "words", "pretrain.py --objective sr"),
    "mlm": Ability("fill_mask", ("k",), "masks", "pretrain.py --emb lookup --objective mlm"),
    "hash-mlm": Ability("predict_missing", ("k", "beam"), "missing", "pretrain.py --objective hash-mlm"),
    "classify": Ability("classify", ("k",), "labels", "finetune.py", dict(
        labels=list | None, scale=list | None, label=str | None, pair=bool, texts=list | None)),
    "span": Ability("answer", ("k",), "answers", "finetune.py --task squad", dict(
        pair=bool, stride=int, longest=int, null=bool, texts=list | None))}
NEAR = Ability("neighbors", ("k",), "neighbours", "")  # of every head


def validate_checkpoint(task, config, tokenizer):
    """Return the task of a checkpoint with the keys of HEADS; ValueError where its parts do not fit."""
    head, num_labels, kinds = config.head, config.labels, HEADS[config.head].task
    task = {name: task.get(name) for name in kinds}
    fits = all(map(isinstance, task.values(), kinds.values()))
    labels, scale, texts = (fits and task.get(name) or [] for name in ("labels", "scale", "texts"))
    fits = fits and {*map(type, labels + texts)} <= {str} and {*map(type, scale)} <= {float}
    fits = fits and len(texts) in (0, 1 + task.get("pair", 0))
    if fits and head == "classify":
        fits = len(labels) == num_labels or num_labels == 1 and len(scale) == 2 and task["label"] is not None
    if not fits or head == "span" and (min(task["stride"], task["longest"]) < 1 or not task["pair"]):
        raise ValueError(f"task: expected that of head {head} with {num_labels} labels, got {task}.")
    if tokenizer.is_fixed and (rows := tokenizer.codes().max() + 1) != config.rows:
        raise ValueError(f"vocabulary: expected {config.rows:,} rows, got {rows:,}.")
    return task


def split_masked(tokenizer, text):
    """Return list[(word, (start, end))] of a text; a literal [MASK] is one word."""
    pairs, start, mask = [], 0, SPECIALS[MASK]
    # A subword piece contains the space before it and depends on its neighbors: split the whole text, with
    # signs that join no letter in place of each mask. A word does not: split what is between the masks.
    whole = tokenizer.subwords and list(zip(*tokenizer.split(text.replace(mask, "\ue000" * len(mask)))))
    for part in text.split(mask):
        end = start + len(part)
        if tokenizer.subwords:
            stop = end - (part.endswith(" ") and end < len(text))  # the space before a mask is the mask's
            pairs += [(word, (a, b)) for word, (a, b) in whole if start <= a and b <= stop]
        else:
            pairs += [(word, (start + a, start + b)) for word, (a, b) in zip(*tokenizer.split(part))]
        start = end + len(mask)
        pairs.append((mask, (end, start)))
    return pairs[:-1]


class Predictor:
    """A trained model that reads texts: path str of a checkpoint or its folder, device str or torch.device.

    Attributes: model, tokenizer, config; task dict, see HEADS; columns list[str], the texts that it reads.
    Raises: InputError for a damaged checkpoint, and in methods for a text or a head that does not fit.
    """

    def __init__(self, path, device="cpu"):
        checkpoint = load_checkpoint(path)
        with blame_input(path):
            self.model = load_model(checkpoint).to(device)
            self.config = self.model.config
            self.tokenizer = HashTokenizer.load(checkpoint["encoder"], self.config)
            self.model.set_codes(torch.from_numpy(self.tokenizer.codes()))
            self.task = validate_checkpoint(checkpoint.get("task", {}), self.config, self.tokenizer)
            columns = ["question", "context"] if self.task.get("pair") else ["text"]
            self.columns = self.task.get("texts") or columns
            self.set_candidates(checkpoint.get("words", []))

    def set_candidates(self, words):
        """Search neighbors and masked words among words list[str] from now on, instead of the corpus's."""
        self.words, self.items, self.item_map = words, self.tokenizer.words, self.tokenizer.bloom_map
        if self.config.head == "hash-mlm" and not self.item_map:
            targets = self.tokenizer.sketch_targets(words)
            self.items, self.item_map = words, SketchMap(targets, self.config.buckets)
        if not self.config.order and not self.tokenizer.is_fixed:
            self.tokenizer.ids(words)  # names of several words are matched as they are

    def require_head(self, head):
        """Raise InputError where the model has another head than head str."""
        if self.config.head != head:
            raise InputError(f"--ckpt: expected head {head} ({HEADS[head].command}), got {self.config.head}.")

    def check_items(self, names):
        """Raise InputError, with similar names, where a model of item sets knows not all names list[str]."""
        words, known = self.tokenizer.words, self.tokenizer.index
        name = next((name for name in names if name not in known), None)
        if name is not None and self.tokenizer.is_fixed and not self.config.order:
            spelling = {word.lower(): word for word in reversed(words)  # of many, those with its first letter
                        if len(words) < 200_000 or word[:1].lower() == name[:1].lower()}
            similar = difflib.get_close_matches(name.lower(), spelling, 3)
            similar = ["[MASK]"] if name.lower() == "[mask]" else [spelling[match] for match in similar]
            hint = f" Did you mean {', '.join(similar)}?" * bool(similar)
            hint += " Write spaces or tabs between names." * ("," in name)
            raise InputError(f"text: expected items among this model's {len(known):,}, got {name!r}.{hint}")

    def split(self, text):
        """Return words list[str], spans list[(start, end)] in characters, IDs list[int], MASK of [MASK]."""
        pairs = split_masked(self.tokenizer, text)
        words = [word for word, _ in pairs if word != SPECIALS[MASK]]
        self.check_items(words)
        if not pairs:
            raise InputError("text: expected words, got none.")
        ids = iter(self.tokenizer.ids(words).tolist())
        ids = [MASK if word == SPECIALS[MASK] else next(ids) for word, _ in pairs]
        return *map(list, zip(*pairs)), ids

    def to_device(self, ids):
        """Return ids, a sequence of int, as int64 (1, L) on the device; give the model codes of new words."""
        if len(codes := self.tokenizer.codes()) > len(self.model.codes):
            self.model.set_codes(torch.from_numpy(codes))
        return torch.tensor(np.array([ids], np.int64), device=self.model.device)

    def logits(self, ids, masked_positions=None):
        """Return the model's logits of ids, a sequence of int; masked_positions int64 (M,) or None."""
        with torch.no_grad(), blame_input():  # a text that is too long
            return self.model(self.to_device(ids), masked_positions=masked_positions)

    def mask_logits(self, text):
        """Return IDs list[int] of a text, and the logits of its M masks."""
        ids = self.split(text)[2]
        if MASK not in ids:
            raise InputError('text: expected [MASK], as in "the [MASK] statement", got none.')
        ids = [CLS, *ids, SEP] if self.config.order else ids
        positions = [i for i, number in enumerate(ids) if number == MASK]
        return ids, self.logits(ids, torch.tensor(positions, device=self.model.device))

    def detect(self, text):
        """Return words list[str], spans list[(start, end)], float (words, 3) p of CLASSES. [HF §3.6]"""
        self.require_head("sr")
        words, spans, ids = self.split(text)
        if MASK in ids:
            raise InputError(f"text: expected no [MASK] for detect. Train with {HEADS['mlm'].command}.")
        return words, spans, self.logits([CLS, *ids, SEP]).softmax(-1)[0, 1:-1].cpu()

    def fill_mask(self, text, k=8):
        """Return a list, one per [MASK] of text str, of the k best pairs (word, probability). [BERT §3.1]"""
        self.require_head("mlm")
        ids, logits = self.mask_logits(text)
        logits = logits[:, FIRST_WORD_ID:]  # (M, V): no special token is an answer
        if not self.config.order:  # a set has an item once
            logits[:, [i - FIRST_WORD_ID for i in ids if i >= FIRST_WORD_ID]] = -torch.inf
        best = logits.softmax(-1).topk(min(k, logits.shape[1]))
        return [[(self.tokenizer.words[i], p) for i, p in zip(row, probabilities)]
                for row, probabilities in zip(best.indices.tolist(), best.values.tolist())]

    def predict_missing(self, text, k=8, beam=None):
        """Predict each [MASK] of text str by its hashes among the candidates. [SB §2.5] [CM]

        Returns: list, one per mask, of dict: items, the k best pairs (name, sum of its hashes' logp), of
            a set new ones; certified bool, provably the best; scored, total int, of items. beam: as --beam.
        """
        self.require_head("hash-mlm")
        (ids, logits), exclude = self.mask_logits(text), None
        if not self.items:
            raise InputError("--words: expected words to search among, got none.")
        if not self.config.order:
            exclude = [i - FIRST_WORD_ID for i in ids if i >= FIRST_WORD_ID]
            if not self.tokenizer.bloom_map:  # candidates have numbers of their own
                visible = {self.tokenizer.words[i] for i in exclude}
                exclude = [i for i, name in enumerate(self.items) if name in visible]
            exclude = torch.tensor([exclude or [-1]], device=logits.device).expand(len(logits), -1)
        rounds, logp = None if beam is None else 1, hash_logp(logits, self.item_map)
        results = beam_search(logp, self.item_map, k, beam or k, rounds, exclude=exclude)
        return [dict(items=[(self.items[i], score) for i, score in zip(best, scores) if i >= 0],
                     certified=certified, scored=scored, total=len(self.items))
                for best, scores, certified, scored in zip(*(result.tolist() for result in results))]

    @torch.no_grad()
    def neighbors(self, word, k=8, among=None):
        """Return the k pairs (word, cosine) most similar to word str, of `among` or candidates. [HF §3.3]"""
        pieces, index = self.tokenizer.split(word)[0], self.tokenizer.index
        self.check_items(pieces)
        if len(pieces) != 1 or self.tokenizer.is_fixed and pieces[0] not in index:
            raise InputError(f"text: expected one word or piece of this model, got {' '.join(pieces)!r}.")
        among = [other for other in (self.words if among is None else among)
                 if other != pieces[0] and (not self.tokenizer.is_fixed or other in index)]
        if not among:
            raise InputError("--words: expected words to search among, got none.")
        ids = self.to_device(self.tokenizer.ids(pieces + among))
        vectors = self.model.embed(ids).view(1 + len(among), -1)  # (1+V, m·d)
        vectors = torch.nn.functional.normalize(vectors - vectors.mean(0), dim=-1)
        best = (vectors[1:] @ vectors[0]).topk(min(k, len(among)))
        return [(among[i], cosine) for i, cosine in zip(best.indices.tolist(), best.values.tolist())]

    def classify(self, first, second=None, k=None):
        """Return k (label, probability), best first, of a text or pair; of a regression [(name, number)]."""
        self.require_head("classify")
        second = None if second is None else self.split(second)[2]
        ids, _ = build_inputs(self.split(first)[2], second, self.config.length)
        [logits] = self.logits(ids).cpu()
        if not self.task["labels"]:
            mean, deviation = self.task["scale"]
            return [(self.task["label"].split("|")[-1], logits.item() * deviation + mean)]
        return sorted(zip(self.task["labels"], logits.softmax(-1).tolist()), key=lambda pair: -pair[1])[:k]

    def answer(self, question, context, k=8):
        """Return the k best (text, (start, end), probability) of a context; "" is no answer. [BERT §4.2]"""
        self.require_head("span")
        (_, spans, ids), scores, null = self.split(context), {}, torch.inf
        question = self.split(question)[2]
        with blame_input():
            windows = sliding_windows(question, ids, self.config.length, self.task["stride"])
        for window, first, start, stop in windows:
            positions = torch.arange(len(window), device=self.model.device)[None]
            inside = (positions >= first) & (positions < first + stop - start)  # (1, L)
            *best, no_answer = best_spans(self.logits(window), inside, k, self.task["longest"])
            null = min(null, no_answer.item())
            for score, i, j in zip(*(part[0].tolist() for part in best)):
                if score > -torch.inf:  # a window of few words has fewer than k spans
                    span = spans[start + i - first][0], spans[start + j - first][1]
                    scores[span] = max(score, scores.get(span, -torch.inf))  # the same words in two windows
        if self.task["null"]:
            scores = {(0, 0): null} | scores  # first: a tie is no answer, as finetune.py has it
        best, answers = dict(sorted(scores.items(), key=lambda pair: -pair[1])[:k]), []
        for (a, b), share in zip(best, torch.tensor([*best.values()]).softmax(0).tolist()):
            text = context[a:b].lstrip()  # a subword piece may contain the space before it, or be one
            a, text = b - len(text), text.rstrip()
            answers.append((text, (a, a + len(text)), share))
        return answers


def predict(predictor, texts, near=False, **options):
    """Return what a model says about texts list[str] as plain types; options: k and beam, where needed."""
    ability, columns = (NEAR, ["text"]) if near else (HEADS[predictor.config.head], predictor.columns)
    if len(texts) != len(columns) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"text: expected {len(columns)} ({', '.join(columns)}), got {str(texts)[:60]}.")
    result = getattr(predictor, ability.method)(*texts, **{name: options[name] for name in ability.options})
    if ability.method != "detect":
        return {ability.key: result}
    return dict(words=result[0], spans=result[1], classes=CLASSES, probabilities=result[2].tolist())


def print_prediction(result, text):
    """Print for people what predict() returned for a text; of detect the text, then the eight worst words."""
    if "spans" in result:
        line, last, rows = "", 0, result["probabilities"]
        for (start, end), row in zip(result["spans"], rows):
            word, guess = text[start:end], CLASSES[row.index(max(row))]
            if guess != "intact":
                word = f"{COLORS[guess]}{word}\033[0m" if sys.stdout.isatty() else f"{{{word}:{guess}}}"
            line, last = line + text[last:start] + word, end
        print(line + text[last:])
        for word, row in sorted(zip(result["words"], rows), key=lambda pair: pair[1][0])[:8]:
            print(f"  {word:>16}   " + "   ".join(f"{name} {p:5.1%}" for name, p in zip(CLASSES, row)))
    for i, best in enumerate(result.get("masks", []), 1):
        print(f"[MASK] {i}", *(f"  {piece.replace('Ġ', ' '):>16}   {p:6.1%}" for piece, p in best), sep="\n")
    for i, best in enumerate(result.get("missing", []), 1):
        proof = "certified: provably the best" if best["certified"] else "not certified: try a wider --beam"
        print(f"[MASK] {i}   {best['scored']:,} of {best['total']:,} scored, {proof}",
              *(f"  {score:8.2f}   {name.replace('Ġ', ' ')}" for name, score in best["items"]), sep="\n")
    for name, value in result.get(NEAR.key, []) + result.get("labels", []):
        print(f"  {name.replace('Ġ', ' '):>16}   {value:.3f}")
    for answer, (start, end), p in result.get("answers", []):
        print(f"  {p:6.1%}   {answer or '(no answer)'}   [{start}:{end}]")


def read_texts(path, expected, chosen=None, is_set=False):
    """Yield number and texts of a file's rows: columns --text, or the expected ones, or the only one."""
    rows, is_table = read_rows(path), get_ending(path) != ".txt"
    if is_table and (head := list(itertools.islice(rows, 100))):
        rows, columns = itertools.chain(head, rows), dict.fromkeys(name for row in head for name in row)
        lists = [name for name in columns if any(isinstance(row.get(name), list) for row in head)]
        names = [next((name for name in x.split("|") if name in columns), None) for x in expected]
        if chosen or is_set and len(lists) == 1:
            names = chosen.split(",") if chosen else lists
        if len(names) != len(expected) or len(names) > 1 and None in names:
            raise InputError(f"--text: expected {len(expected)} of {', '.join(columns)}, got {chosen}.")
        names = [choose_column(path, head, name, "--text") for name in names]
        print(f"columns: {', '.join(names)} of {path}", file=sys.stderr)
    for number, row in enumerate(rows, 1):
        if is_table:  # the last tab of a list says that no name ends at a space
            yield number, ["\t".join(map(str, x)) + "\t" if is_set and isinstance(x, list) else x
                           for x in map(row.get, names)]
        elif row["text"].strip():
            yield number, [row["text"]] if is_set else row["text"].split("\t")


def predict_file(predictor, path, chosen=None, near=False, **options):
    """Print a JSON object for each row of a file: number, texts and what predict() returns, or its error."""
    expected = ["text"] if near else predictor.columns
    for number, texts in read_texts(path, expected, chosen, not predictor.config.order):
        try:
            result = dict(line=number, texts=texts) | predict(predictor, texts, near, **options)
        except InputError as error:  # one bad row does not end the file
            result = dict(line=number, error=str(error))
        print(json.dumps(result, ensure_ascii=False), flush=True)


def parser():
    """Return the parser of all flags."""
    p = argparse.ArgumentParser(formatter_class=HelpFormatter, description=__doc__.split("\nPaper map")[0],
                                usage="python infer.py --ckpt DIR [flags] [TEXT [TEXT]]        (try --help)")
    add = p.add_argument
    add("texts", nargs="*", metavar="TEXT", help="the text, or the pair; without any, a prompt asks")
    add("--ckpt", required=True, metavar="DIR", help="folder of a run of pretrain.py or finetune.py")
    add("--file", metavar="FILE", help="one object per row of a file: .txt, pairs with a tab between, or "
        ".csv .tsv .jsonl .json .parquet; .gz too")
    add("--text", dest="columns", metavar="COL[,COL]", help="columns of a table (default: those of the "
        "fine-tuning, or text, or the only column of text)")
    add("--words", metavar="FILE", help="words to search among, new ones too; requires --near or a model "
        "that predicts the hashes of words (default: the corpus's 50,000 most frequent)")
    add("--near", action="store_true", help="list the words whose embeddings are most similar to TEXT's")
    add("--top_k", type=at_least(1), default=8, metavar="k", help="how many answers to list")
    add("--beam", type=at_least(1), metavar="B", help="hash buckets to search (default: as many as needed)")
    add("--device", default="cpu", metavar="NAME", help="cpu, cuda, or auto")
    return p


def run(args):
    """Load the model, check the flags, and read the texts, the file, or the prompt."""
    p = Predictor(args.ckpt, resolve_device(args)[0])
    file, is_table, head = args.file, args.file and get_ending(args.file) != ".txt", p.config.head
    for is_wrong, message in (
            (args.texts and file, "--file: expected a file or TEXT, got both."),
            (args.columns and not is_table, "--text requires --file with a table."),
            (args.beam and (args.near or head != "hash-mlm"), "--beam requires a model with head hash-mlm."),
            (args.words and not args.near and p.items is not p.words, "--words requires --near or hashes.")):
        if is_wrong:
            raise InputError(message)
    if args.words is not None:
        rows = read_texts(args.words, ["text"], is_set=not p.config.order)
        texts = [text for _, texts in rows for text in texts if isinstance(text, str)]
        words = (word for text in texts for word in p.tokenizer.split(text)[0]) if p.config.order else texts
        p.set_candidates(list(dict.fromkeys(words)))
    options = dict(near=args.near, k=args.top_k, beam=args.beam)
    if file is not None:
        return predict_file(p, file, args.columns, **options)
    if args.texts:
        return print_prediction(predict(p, args.texts, **options), args.texts[0])
    while True:
        try:
            texts = [input("> ") for _ in (["text"] if args.near else p.columns)]
            print_prediction(predict(p, texts, **options), texts[0])
        except (EOFError, KeyboardInterrupt):
            return print()
        except InputError as error:  # one bad text does not end the conversation
            print(f"infer.py: {error}", file=sys.stderr)


def main(argv=None):
    """Parse the command line (argv list[str], or None) and predict. Bad input exits with code 2."""
    args = parser().parse_args(argv, argparse.Namespace(dtype="float32", compile=False))
    with contextlib.suppress(AttributeError):  # half of a surrogate pair, as JSON has it, becomes \\ud83d
        sys.stdout.reconfigure(errors="backslashreplace")
        sys.stdin.reconfigure(errors="replace")
    with exit_on_bad_input("infer.py"):
        try:
            run(args)
        except OSError:  # nobody reads the output: neither what is still in the buffer
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise


if __name__ == "__main__":
    main()
