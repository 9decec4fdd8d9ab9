"""infer.py --file: a prediction or a vector for each row of a table or text.

Rows are read and predicted in parts, so that memory does not grow with the file.
"""

import contextlib
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import torch

from data.sources import choose_columns, choose_set_columns
from data.rows import list_names, peek_columns, read_rows, reader_options
from support.common import InputError, blame

PART = 256  # rows in memory at a time
OUTPUT = ("prediction", "notes", "error")  # what is added to a row


def write_rows(args, predictor):
    """Write a JSON object for each row of --file: its columns, notes, and prediction or error."""
    num_rows = 0
    errors = []  # a bad row stops no other
    parts = split_parts(read_file(args, predictor))
    first = next(parts)  # now: a file that cannot be read must not empty an earlier output
    with open_output(args.jsonl) as output:
        for part in itertools.chain([first], parts):
            predict_part(predictor, part, args.top_k)
            for _, record in part:
                num_rows += 1
                if "error" in record:
                    errors.append(f"row {num_rows:,}: {record['error']}")
                print(to_json(record), file=output)
    summary = f"{num_rows:,} rows, {len(errors):,} with an error"
    if errors:
        summary += f", the first in {errors[0]}"
    if len(errors) == num_rows:
        raise InputError(f"{args.file}: {summary}")
    print(summary, file=sys.stderr)


def predict_part(predictor, part, k):
    """Add notes and a prediction, or an error, to each record of a part: (row, record) pairs."""
    examples = []  # of the rows that the model can read
    records = []  # theirs
    for row, record in part:
        try:
            example = predictor.read(row)
        except ValueError as error:
            record["error"] = str(error)
            continue
        record["notes"] = predictor.list_example_notes(example)
        examples.append(example)
        records.append(record)
    for record, result in zip(records, predictor.readout.predict(examples, k)):
        record["prediction"] = result


def open_output(path):
    """Return a context of the file --jsonl, in UTF-8, or of stdout for None."""
    if path is None:
        return contextlib.nullcontext(sys.stdout)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    # half of a surrogate pair becomes its escape, as on stdout
    return open(path, "w", encoding="utf-8", errors="backslashreplace", newline="\n")


def write_vectors(args, predictor):
    """Write a vector for each row of --file to --vectors, 0 where there is nothing to read."""
    vectors = []  # of each part; the rows themselves are not kept
    num_rows = 0
    num_empty = 0
    for part in split_parts(read_file(args, predictor)):
        examples = []
        for row, _ in part:
            num_rows += 1
            with blame(f"{args.file}, row {num_rows:,}"):
                example = predictor.reader.read_for_vector(row)
            if not example.words:
                num_empty += 1
            examples.append(example)
        vectors.append(predictor.embed_examples(examples))
    vectors = np.concatenate(vectors)
    Path(args.vectors).parent.mkdir(parents=True, exist_ok=True)
    with open(args.vectors, "wb") as file:  # now: a bad row must not empty an earlier file
        np.save(file, vectors)  # to a name it would add .npy
    print(f"Saved {args.vectors}: {len(vectors):,} vectors", file=sys.stderr)
    if num_empty > 0:
        print(f"note: {num_empty:,} rows have no words, or no items that the model knows",
              file=sys.stderr)


def split_parts(rows):
    """Yield the rows of an iterator in lists of at most PART."""
    while True:
        part = list(itertools.islice(rows, PART))
        if not part:
            return
        yield part


def read_file(args, predictor):
    """Yield for each row of --file what the Predictor reads, and the record, its columns, dict."""
    rows = read_rows(args.file, keep_damaged=True, **reader_options(args))
    examples, rows = peek_columns(rows)
    names = choose_names(args, predictor, examples)
    print(f"columns: {', '.join(names)} of {args.file}", file=sys.stderr)
    for record in rows:
        if not record.keys().isdisjoint(OUTPUT):
            raise InputError(f"{args.file}: expected no column {', '.join(OUTPUT)}, as these are "
                             "added to each row.")
        row = [record.get(name) for name in names]  # both texts of a pair
        if len(names) == 1:
            [row] = row
        yield row, record


def choose_names(args, predictor, examples):
    """Return the names of the columns to read, list[str]; examples has a value of each column."""
    if not examples:
        raise InputError(f"{args.file}: expected rows with columns, got none.")
    names = predictor.columns  # those that the model was fine-tuned on, or "text"
    if args.text_columns is not None:
        names = list_names(args.text_columns)
    elif not predictor.config.order:
        names = choose_set_columns(args.file, examples, flag="--text")
    elif len(names) == 1 and names[0] not in examples:
        # the file lacks the model's column: take its only column of texts
        names = choose_columns(args.file, examples, flag="--text")
    if not set(names) <= set(examples) or len(names) != len(predictor.columns):
        raise InputError(f"{args.file}: expected {len(predictor.columns)} of its columns "
                         f"{', '.join(examples)}, got {', '.join(names)}. Use --text.")
    return names


def to_json(row):
    """Return a dict as JSON. It has no NaN and no infinity: they become null, at any depth."""
    def to_plain(value):
        return value.tolist() if torch.is_tensor(value) else str(value)

    text = json.dumps(row, default=to_plain)
    row = json.loads(text, parse_constant=lambda name: None)
    text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    # other programs end a line at these
    for separator in ("\u0085", "\u2028", "\u2029"):
        text = text.replace(separator, f"\\u{ord(separator):04x}")
    return text
