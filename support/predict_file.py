"""infer.py --file: a prediction or a vector for each row of a table or text.

A record has all columns of a row of the file, dict. What the Predictor reads of it is called row:

    record   {"id": "7", "text": "good"}
    row      "good"
    output   {"id": "7", "text": "good", "notes": [], "prediction": [["up", 0.9], ["down", 0.1]]}

Records are read and predicted in parts, so that memory does not grow with the file.
"""

import contextlib
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import torch

from data.sources import choose_columns
from data.rows import list_names, number_rows, peek_columns, read_rows, reader_options
from support.common import InputError, writing

PART = 256  # records in memory at a time
OUTPUT = ("prediction", "notes", "error")  # what is added to a record
DAMAGED = "expected a cell for each column, got more, fewer, or the header."  # the error of a row


def write_rows(args, predictor):
    """Write each record of --file with notes and a prediction, or an error, as a line of JSON."""
    num_rows = 0
    all_errors = []  # a bad row stops no other
    parts = read_parts(args, predictor, predictor.read)
    first = next(parts)  # now: a file that cannot be read must not empty an earlier output
    with open_output(args.jsonl) as output:
        for records, examples, errors in itertools.chain([first], parts):
            results = predictor.readout.predict(list(examples.values()), args.top_k)
            for (place, example), result in zip(examples.items(), results):
                records[place]["notes"] = predictor.list_example_notes(example)
                records[place]["prediction"] = result
            for place, record in enumerate(records):
                num_rows += 1
                if place in errors:
                    record["error"] = errors[place]
                    all_errors.append(f"row {num_rows:,}: {errors[place]}")
                print(to_json(record), file=output)
    summary = f"{num_rows:,} rows, {len(all_errors):,} with an error"
    if all_errors:
        summary += f", the first in {all_errors[0]}"
    if len(all_errors) == num_rows:
        raise InputError(f"{args.file}: {summary}")
    print(summary, file=sys.stderr)


@contextlib.contextmanager
def open_output(path):
    """Return a context of the file --jsonl, in UTF-8, or of stdout for None."""
    if path is None:
        yield sys.stdout
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    # half of a surrogate pair becomes its escape, as on stdout
    options = dict(encoding="utf-8", errors="backslashreplace", newline="\n")
    with writing(path), open(path, "w", **options) as file:
        yield file


def write_vectors(args, predictor):
    """Write a vector for each row of --file to --vectors, 0 where there is nothing to read."""
    vectors = []  # one array for each part; the rows themselves are not kept
    num_rows = 0
    num_empty = 0
    num_damaged = 0
    parts = read_parts(args, predictor, predictor.reader.read_for_vector)
    for records, examples, errors in parts:
        for place, error in errors.items():
            if error != DAMAGED:
                raise InputError(f"{args.file}, row {num_rows + place + 1:,}: {error}")
        num_rows += len(records)
        num_damaged += len(errors)
        num_empty += sum(not example.words for example in examples.values())
        part_vectors = np.zeros((len(records), predictor.config.width), np.float32)
        part_vectors[list(examples)] = predictor.embed_examples(list(examples.values()))
        vectors.append(part_vectors)
    vectors = np.concatenate(vectors)
    Path(args.vectors).parent.mkdir(parents=True, exist_ok=True)
    # now: a bad row must not empty an earlier file
    with writing(args.vectors), open(args.vectors, "wb") as file:
        np.save(file, vectors)  # to a name it would add .npy
    print(f"Saved {args.vectors}: {len(vectors):,} vectors", file=sys.stderr)
    if num_empty > 0:
        print(f"note: {num_empty:,} rows have no words, or no items that the model knows",
              file=sys.stderr)
    if num_damaged > 0:
        print(f"note: {num_damaged:,} rows are damaged, or the header again; their vectors are 0",
              file=sys.stderr)


def read_parts(args, predictor, read):
    """Yield --file in parts of at most PART rows.

    Args:
        args, predictor: the flags of infer.py, and its Predictor.
        read: function of a row that returns its Example, or raises a ValueError.

    Yields:
        records: list of dict, all rows of the part.
        examples: dict, place in records -> Example, of the rows that can be read.
        errors: dict, place in records -> why the row has no Example, str.
    """
    rows = read_file(args, predictor)
    while True:
        part = list(itertools.islice(rows, PART))
        if not part:
            return
        examples = {}
        errors = {}
        for place, (row, record) in enumerate(part):
            if not record:
                errors[place] = DAMAGED
                continue
            try:
                examples[place] = read(row)
            except ValueError as error:
                errors[place] = str(error)
        yield [record for _, record in part], examples, errors


def read_file(args, predictor):
    """Yield (row, record) for each row of --file."""
    rows = number_rows(args.file, keep_damaged=True, **reader_options(args))
    columns, records = peek_columns(rows)
    names = choose_names(args, predictor, columns)
    print(f"columns: {', '.join(names)} of {args.file}", file=sys.stderr)
    is_split_at_tabs = not predictor.config.order and has_tabs(args, names[0])
    for _, record in records:
        if not record.keys().isdisjoint(OUTPUT):
            raise InputError(f"{args.file}: expected no column {', '.join(OUTPUT)}, as these are "
                             "added to each row.")
        row = []  # both texts of a pair
        for name in names:
            cell = record.get(name)
            if cell is None and name in record:
                cell = ""  # an empty cell has an empty text, as in fine-tuning
            row.append(cell)
        if len(names) == 1:
            [row] = row
        if is_split_at_tabs and isinstance(row, str):
            row = tuple(row.split("\t"))
        yield row, record


def has_tabs(args, name):
    """Return whether a set of --file has tabs: then they split all of its sets, as in training."""
    for record in read_rows(args.file, keep_damaged=True, **reader_options(args)):
        items = record.get(name)
        if isinstance(items, str) and "\t" in items:
            return True
    return False


def choose_names(args, predictor, columns):
    """Return the names of the columns to read, list[str]; columns has a value of each, dict."""
    if not columns:
        raise InputError(f"{args.file}: expected rows with columns, got none.")
    names = predictor.columns  # those that the model was fine-tuned on, or "text"
    if args.text_columns is not None:
        names = list_names(args.text_columns)
    elif not predictor.config.order:
        names = choose_columns(args.file, columns, is_sets=True, flag="--text")
    elif len(names) == 1 and names[0] not in columns:
        # the file lacks the model's column: take its only column of texts
        names = choose_columns(args.file, columns, is_sets=False, flag="--text")
    if not set(names) <= set(columns) or len(names) != len(predictor.columns):
        raise InputError(f"{args.file}: expected {len(predictor.columns)} of its columns "
                         f"{', '.join(columns)}, got {', '.join(names)}. Use --text.")
    return names


def to_json(record):
    """Return a dict as a line of JSON, which has no NaN and no infinity: they become null."""
    text = json.dumps(record, default=to_plain)
    record = json.loads(text, parse_constant=lambda name: None)  # a constant is NaN or infinity
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    # other programs end a line at these
    for separator in ("\u0085", "\u2028", "\u2029"):
        text = text.replace(separator, f"\\u{ord(separator):04x}")
    return text


def to_plain(value):
    """Return a value that JSON does not know, such as a date, as one that it knows."""
    if torch.is_tensor(value):
        return value.tolist()
    return str(value)
