"""Texts in and predictions out for infer.py: heads, [MASK] in a text, files, JSON, lines for people.

Out of scope: what a model says (infer.py), the rows of files (data/corpus.py).
"""

import itertools
import json
import sys
from collections import namedtuple

from tqdm import tqdm

from data.corpus import choose_column, get_ending, read_rows
from runtime import InputError
from tokenizer import MASK, SPECIALS

CHUNK = 256  # rows of a file that are in memory at once
# what a model does by its head: method of Predictor, its options, key of the result, how to train such a
# model, and what finetune.py writes about its task into the checkpoint
Ability = namedtuple("Ability", "method options key command task columns", defaults=["", {}, ["text"]])
HEADS = {
    "sr": Ability("detect", (), "words", "pretrain.py --objective sr"),
    "mlm": Ability("fill_mask", ("k",), "masks", "pretrain.py --emb lookup --objective mlm"),
    "hash-mlm": Ability("predict_missing", ("k", "beam"), "missing", "pretrain.py --objective hash-mlm"),
    "classify": Ability("classify", ("k",), "labels", "finetune.py", dict(
        labels=list | None, scale=list | None, label=str | None, pair=bool, texts=list | None)),
    "span": Ability("answer", ("k",), "answers", "finetune.py --task squad", dict(
        pair=bool, stride=int, longest=int, null=bool, texts=list | None), ["question", "context"])}
NEAR = Ability("neighbors", ("k", "raw"), "neighbours", columns=["word"])  # of every head


def validate_checkpoint(task, config, tokenizer):
    """Return the task of a checkpoint with the keys of HEADS; ValueError where its parts do not fit."""
    head, n, kinds = config.head, config.labels, HEADS[config.head].task
    task = {name: task.get(name) for name in kinds}
    fits = all(map(isinstance, task.values(), kinds.values()))
    if fits:
        labels, scale, texts = (task.get(name) or [] for name in ("labels", "scale", "texts"))
        fits = {*map(type, labels + texts)} <= {str} and {*map(type, scale)} <= {float}
        fits = fits and len(texts) in (0, 1 + task.get("pair", 0))
    if fits and head == "classify":  # one name for each class, or what a regression predicts
        fits = len(labels) == n or n == 1 and len(scale) == 2 and task["label"] is not None
    if fits and head == "span":
        sizes = task["stride"], task["longest"]
        fits = {*map(type, sizes)} == {int} and 1 <= min(sizes) and max(sizes) < 1 << 31  # no bool
        fits = fits and task["pair"] and config.length >= 8
    if not fits:
        raise ValueError(f"task: expected that of head {head} with {n} labels, got {task}.")
    expected = config.buckets if config.code_format == "digest" else config.rows  # of a block, of the table
    if tokenizer.is_fixed and (rows := tokenizer.codes().max() + 1) != expected:
        raise ValueError(f"vocabulary: expected {expected:,} rows, got {rows:,}.")
    return task


def split_masked(tokenizer, text):
    """Return list[(word, (start, end))] of a text; a literal [MASK] is one word."""
    pairs, start, mask = [], 0, SPECIALS[MASK]
    # A subword piece contains the space before it and depends on its neighbors: split the whole text, with
    # signs that join no letter in place of each mask. A word does not: split what is between the masks.
    whole = tokenizer.subwords and list(zip(*tokenizer.split(text.replace(mask, "\ue000" * len(mask)))))
    for part in text.split(mask):
        end = start + len(part)
        stop = end - (bool(whole) and part.endswith(" ") and end < len(text))  # its space is the mask's
        words = whole or [(word, (start + a, start + b)) for word, (a, b) in zip(*tokenizer.split(part))]
        pairs += [(word, (a, b)) for word, (a, b) in words if start <= a and b <= stop]
        pairs.append((mask, (end, start := end + len(mask))))
    return pairs[:-1]


def read_texts(path, texts, chosen=None, is_set=False, advice="Use --text NAME.", keep_wrong=True):
    """Yield (number from 1, list[str]) of a file's rows. InputError: it is damaged or has no such columns.

    Columns: `chosen` ("a,b"), else `texts`, else the only one, else an error with advice.
    """
    rows = read_rows(path, (), keep_wrong)
    if get_ending(path) == ".txt":
        for i, row in enumerate(rows, 1):
            if row["text"].strip():  # the number of an empty line is not given again
                yield i, row["text"].split("\t") if len(texts) > 1 else [row["text"]]
        return
    if not (head := list(itertools.islice(rows, 100))):
        return  # the caller says that there are no rows
    known = list(dict.fromkeys(name for row in head for name in row))
    lists = [name for name in known if is_set and any(isinstance(row.get(name), list) for row in head)]
    if chosen:
        names = [name.strip() for name in chosen.split(",")]
    else:  # a|b: either name; None: choose_column looks for the only column of text
        names = [next((name for name in (x, *x.split("|")) if name in known), None) for x in texts]
        names = lists if len(lists) == 1 else names
    if len(names) != len(texts) or len(names) > 1 and None in names:
        raise InputError(f"--text: expected {len(texts)} of {', '.join(known)}, got {chosen or 'none'}.")
    names = [choose_column(path, head, name, advice) for name in names]
    print(f"columns: {', '.join(names)} of {path}", file=sys.stderr)
    for i, row in enumerate(itertools.chain(head, rows), 1):
        yield i, [join_names(row.get(name)) if is_set else row.get(name) for name in names]


def join_names(value):
    """Return a list of names as a text: a tab after each says that none ends at a space; None is no name."""
    return "".join(f"{name}\t" for name in value if name is not None) if isinstance(value, list) else value


def print_rows(rows, predict, source):
    """Print a JSON object for each of rows (number, texts): both, and what predict(list of texts) returns.

    A bad row has an "error", and the rest goes on. Raises: InputError, no row could be predicted, or the file
    is damaged; the rows before are printed first.
    """
    num_good, failure, chunk = 0, None, [()]
    # a bar only where it does not mix with the objects
    rows = iter(tqdm(rows, unit=" rows", disable=sys.stdout.isatty() or not sys.stderr.isatty()))
    while chunk:
        chunk = []
        try:
            chunk.extend(itertools.islice(rows, CHUNK))
        except InputError as error:  # the rows before it are in the chunk; none follow
            failure = error
        for (number, texts), result in zip(chunk, predict([texts for _, texts in chunk])):
            num_good += "error" not in result
            print(json.dumps(dict(line=number, texts=texts) | result, ensure_ascii=False, default=str))
    if failure or not num_good:
        raise failure or InputError(f"{source}: expected rows that this model can read, got none.")


def print_prediction(result, text):
    """Print for people what predict() returned for a text; of detect the text, then the eight worst words."""
    if "error" in result:
        raise InputError(result["error"])
    if "spans" in result:
        line, last, rows = "", 0, result["probabilities"]
        for (start, end), row in zip(result["spans"], rows):
            word, guess = text[start:end], result["classes"][row.index(max(row))]
            if guess != "intact":
                word = f"{{{word}:{guess}}}"
            line, last = line + text[last:start] + word, end
        print(line + text[last:])
        for word, row in sorted(zip(result["words"], rows), key=lambda pair: pair[1][0])[:8]:
            shares = (f"{name} {p:5.1%}" for name, p in zip(result["classes"], row))
            print(f"  {word:>16}", *shares, sep="   ")
    for i, best in enumerate(result.get("masks", []), 1):
        print(f"[MASK] {i}", *(f"  {piece.replace('Ġ', ' '):>16}   {p:6.1%}" for piece, p in best), sep="\n")
    for i, best in enumerate(result.get("missing", []), 1):
        proof = "certified: provably the best" if best["certified"] else "not certified: try a wider --beam"
        print(f"[MASK] {i}   {best['scored']:,} of {best['total']:,} scored, {proof}",
              *(f"  {score:8.2f}   {name.replace('Ġ', ' ')}" for name, score in best["items"]), sep="\n")
    for name, value in result.get("neighbours", []) + result.get("labels", []):
        print(f"  {name.replace('Ġ', ' '):>16}   {value:.3f}")
    for answer, (start, end), p in result.get("answers", []):
        print(f"  {p:6.1%}   {answer or '(no answer)'}   [{start}:{end}]")


def check_flags(args, p):
    """Raise InputError where flags contradict each other or the Predictor p."""
    for is_wrong, message in (
            ("" in (args.file, args.words, args.vectors), "--file, --words, --vectors: expected a path."),
            (args.texts and args.file, "--file: expected a file or TEXT, got both."),
            (args.columns and get_ending(args.file or "a.txt") == ".txt", "--text requires a table: --file."),
            (args.raw and not args.near, "--raw requires --near."),
            (args.vectors and not (args.texts or args.file), "--vectors requires TEXT or --file."),
            (args.beam and (args.near or p.config.head != "hash-mlm"), "--beam requires head hash-mlm."),
            (args.words and not args.near and p.items is not p.words, "--words requires --near or hashes.")):
        if is_wrong:
            raise InputError(message)
