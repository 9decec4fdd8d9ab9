"""Build a topic task from a public text: a folder with train.jsonl and dev.jsonl.

    python -m bench.topics articles squad-train.jsonl topics/
    python -m bench.topics nations wikipedia.jsonl topics/

articles: which of 30 articles of SQuAD is a question about? Rows of the file: title, context,
    question. All questions about a paragraph are in one split.
nations: which of nine nations does the first paragraph of an article name, as in "was an American
    ..."? Rows of the file: title, text. The other paragraphs are the texts. All paragraphs of an
    article are in one split.
Out of scope: the scores (`finetune.py --train topics/articles/train.jsonl ...`).
"""

import collections
import json
import os
import re

import numpy as np

from data.rows import read_rows
from support.common import InputError, make_parser, run_script

NATIONS = ("American", "English", "British", "German", "Canadian", "Australian", "French",
           "Italian", "Irish")


def list_questions(rows):
    """Return (paragraph, question, article) of the 30 articles with the most questions."""
    # title -> its number of questions
    counts = collections.Counter(row["title"] for row in rows)
    # the 30 largest classes
    titles = dict(counts.most_common(30))
    return [(row["context"], row["question"], row["title"])
            for row in rows if row["title"] in titles]


def list_paragraphs(rows):
    """Return (article, paragraph, nation) of paragraphs of at least 20 words.

    The first of an article is not among them: it names the nation.
    """
    pattern = re.compile(rf"\b(?:is|was|are|were) an? ({'|'.join(NATIONS)})\b")
    examples = []
    for row in rows:
        paragraphs = [text for text in row["text"].split("\n") if len(text.split()) >= 20]
        if not paragraphs:
            continue
        # the first match is the label; the paragraph that holds it is no example
        nation = pattern.search(paragraphs[0])
        if nation is None:
            continue
        for text in paragraphs[1:]:
            examples.append((row["title"], text, nation[1]))
    return examples


def write_task(folder, examples, num_train, num_dev):
    """Write both splits. Examples (group, text, label) of one group are in one split."""
    # a share of the groups, drawn at random, is for dev
    rng = np.random.default_rng(0)
    groups = sorted({group for group, _, _ in examples})
    is_dev = rng.random(len(groups)) < num_dev / (num_train + num_dev)
    dev_groups = set(np.array(groups)[is_dev])
    train = []
    dev = []
    for group, text, label in examples:
        part = dev if group in dev_groups else train
        part.append(dict(text=text, label=label))
    # an error where it exists: it may hold another task
    os.makedirs(folder)
    for split, part, size in (("train", train, num_train), ("dev", dev, num_dev)):
        with open(f"{folder}/{split}.jsonl", "w") as file:
            # a random part: files are sorted by article
            for i in rng.permutation(len(part))[:size]:
                print(json.dumps(part[i]), file=file)


# name -> function that lists the examples, the columns that it reads, rows of train and of dev
KINDS = {
    "articles": (list_questions, ["title", "context", "question"], 5_000, 2_000),
    "nations": (list_paragraphs, ["title", "text"], 4_000, 1_500),
}


def build(kind, source, out):
    """Read the rows of a file, and write the task to the folder OUT/KIND."""
    rows = list(read_rows(source))
    list_examples, columns, num_train, num_dev = KINDS[kind]
    for number, row in enumerate(rows, 1):
        for column in columns:
            if not isinstance(row.get(column), str):
                raise InputError(f"{source}, row {number:,}: expected a text in column {column}, "
                                 f"got {row.get(column)!r:.60}.")
    write_task(f"{out}/{kind}", list_examples(rows), num_train, num_dev)


def main(argv=None):
    """Build the task that the command line, or the list argv, names."""
    args = build_parser().parse_args(argv)
    run_script("bench.topics", build, args.kind, args.source, args.out)


def build_parser():
    """Return the parser of the command line."""
    p = make_parser("python -m bench.topics", __doc__)
    p.add_argument("kind", choices=KINDS)
    p.add_argument("source", help="file of rows: .jsonl, or .jsonl.gz")
    p.add_argument("out", help="folder; the task is written to OUT/KIND")
    return p


if __name__ == "__main__":
    main()
