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

from data.sources import choose_columns, choose_set_columns
from data.rows import list_names, peek_columns, read_rows, reader_options
from support.common import InputError, blame

PART = 256  # records in memory at a time
OUTPUT = ("prediction", "notes", "error")  # what is added to a record


def write_rows(args, predictor):
    """Write each record of --file with notes and a prediction, or an error, as a line of JSON."""
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
    records = []  # those of these rows
    for row, record in part:
        if not record:
            record["error"] = "expected a cell for each column, got more, fewer, or the header."
            continue
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
    vectors = []  # one array for each part; the rows themselves are not kept
    num_rows = 0
    num_empty = 0
    num_damaged = 0
    for part in split_parts(read_file(args, predictor)):
        examples = []
        places = []  # those of the examples among the rows of the part
        for place, (row, record) in enumerate(part):
            num_rows += 1
            if not record:  # a damaged row, or the header again
                num_damaged += 1
                continue
            with blame(f"{args.file}, row {num_rows:,}"):
                example = predictor.reader.read_for_vector(row)
            if not example.words:
                num_empty += 1
            examples.append(example)
            places.append(place)
        part_vectors = np.zeros((len(part), predictor.config.width), np.float32)
        part_vectors[places] = predictor.embed_examples(examples)
        vectors.append(part_vectors)
    vectors = np.concatenate(vectors)
    Path(args.vectors).parent.mkdir(parents=True, exist_ok=True)
    with open(args.vectors, "wb") as file:  # now: a bad row must not empty an earlier file
        np.save(file, vectors)  # to a name it would add .npy
    print(f"Saved {args.vectors}: {len(vectors):,} vectors", file=sys.stderr)
    if num_empty > 0:
        print(f"note: {num_empty:,} rows have no words, or no items that the model knows",
              file=sys.stderr)
    if num_damaged > 0:
        print(f"note: {num_damaged:,} rows are damaged, or the header again; their vectors are 0",
              file=sys.stderr)


def split_parts(rows):
    """Yield what an iterator yields, in lists of at most PART."""
    while True:
        part = list(itertools.islice(rows, PART))
        if not part:
            return
        yield part


def read_file(args, predictor):
    """Yield (row, record) for each row of --file."""
    rows = read_rows(args.file, keep_damaged=True, **reader_options(args))
    columns, records = peek_columns(rows)
    names = choose_names(args, predictor, columns)
    print(f"columns: {', '.join(names)} of {args.file}", file=sys.stderr)
    is_split_at_tabs = not predictor.config.order and has_tabs(args, names[0])
    for record in records:
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
        names = choose_set_columns(args.file, columns, flag="--text")
    elif len(names) == 1 and names[0] not in columns:
        # the file lacks the model's column: take its only column of texts
        names = choose_columns(args.file, columns, flag="--text")
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
