"""Tests of data/squad.py: files, scores by hand, spans and answers against all pairs."""

import json
import random

import numpy as np
import pytest
import torch

from data import squad
from data.squad import QuestionAnswering, cut_windows, exact_and_f1, find_answer_words, find_answers
from data.squad import normalize_answer
from data.tasks import Task, read_task
from hashing import MD5
from model import Config
from support.common import InputError
from tests.helpers import make_words
from tests.test_tasks import flags
from tokenizer import SEP, make_tokenizer
from words import list_words, split_words

WORDS = make_words(60, 3)


def make_rows(rng, n, no_answer=0.0):
    """The answer is "zebra", alone or before "quagga", in a context of up to sixty other words."""
    rows = []
    for _ in range(n):
        words = rng.choices(WORDS, k=rng.randint(20, 60))
        place = rng.randrange(1, len(words) - 3)
        answer = rng.choice(["zebra", "zebra quagga"])
        answers = []
        if rng.random() >= no_answer:
            start = len(" ".join(words[:place])) + 1
            answers = [(answer, start)]
            words.insert(place, answer)
        rows.append((("Which word?", " ".join(words)), answers))
    return rows


def read(path, records, name="squad_v2"):
    """Return the training rows of a file with these records."""
    path.write_text(json.dumps(dict(data=records)))
    _, splits = read_task(name, flags(train=str(path), dev=str(path)))
    return splits["train"]


def make_data(rows, length, name="squad_v2", tokenizer=None):
    """Return the windows of rows."""
    if tokenizer is None:
        tokenizer = make_tokenizer(Config(), hash=MD5())
    task = Task(["question", "context"], None, ["f1"], name=name)
    return QuestionAnswering(task, rows, tokenizer, length)


def batches(logits):
    """Return batches in another order, padded: what `evaluate` reads. logits: list of (L, 2)."""
    rng = np.random.default_rng(0)
    order = rng.permutation(len(logits))
    parts = []
    for indices in np.array_split(order, 3):
        part = [logits[i] for i in indices]
        padded = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
        parts.append((indices, padded))
    return parts


# Files


def test_questions_are_nested_as_published_or_flat_as_on_the_hub(tmp_path):
    answers = [dict(text="b", answer_start=2)]
    question = dict(question="Which?", answers=answers)
    paragraph = dict(context="a b c", qas=[question])
    nested = dict(title="t", paragraphs=[paragraph])
    answers = dict(text=["b"], answer_start=[2])  # of lists
    flat = dict(title="t", context="a b c", question="Which?", answers=answers)
    row = (("Which?", "a b c"), [("b", 2)])
    assert read(tmp_path / "a.json", [nested, flat]) == [row, row]


@pytest.mark.parametrize("change, message", [
    (dict(answers=None), "own.json, row 1: expected answers as .* got None"),
    (dict(context=5), "own.json, row 1: expected text, got 5"),
    (dict(answers=dict(text=["a"], answer_start=["x"])), "expected answers as .* got "),
    (dict(answers=dict(text=["a", "b"], answer_start=[0])), "expected answers as .* got "),
    (dict(answers=dict(text=[""], answer_start=[0])), "expected answers as .* got "),
    (dict(answers=""), "expected answers as .* got ''"),  # an empty cell of a table
    (dict(answers=[]), "Use --task squad_v2"),
    (dict(answers=[dict(text="d", answer_start=0)]),
     "own.json: 0 of 1 answers stand elsewhere .*, 1 nowhere"),
    # nested, as published
    (dict(paragraphs=None), "own.json: expected paragraphs, a list of objects, got None"),
    (dict(paragraphs=["a"]), "own.json: expected paragraphs, a list of objects, got "),
    (dict(paragraphs=[dict(context="a")]), "own.json: expected qas, a list of objects, got None"),
])
def test_read_squad_refuses_other_rows(tmp_path, change, message):
    record = dict(question="x", context="a b c", answers=[]) | change
    with pytest.raises(InputError, match=message):
        read(tmp_path / "own.json", [record], "squad")


def test_misplaced_answer_is_trained_where_it_is_nearest_and_a_missing_one_not(tmp_path, capsys):
    """Each start is one too small, as after an emoji, which UTF-16 counts as two characters."""
    records = []
    for start, text in ((3, "b"), (7, "b"), (0, "nowhere")):
        answers = [dict(text=text, answer_start=start)]
        records.append(dict(question="x", context="🙂 a b a b", answers=answers))
    rows = read(tmp_path / "own.json", records)
    data = make_data(rows, 20)
    assert len(rows) == 2
    # [CLS] x [SEP] [SEP] 🙂 a b a b [SEP]
    assert data.targets.tolist() == [[6, 6], [8, 8]]
    assert "own.json: 2 of 3 answers stand elsewhere" in capsys.readouterr().err


def test_questions_about_one_context_stay_together_however_it_is_written(tmp_path):
    """Law: a context that chooses the weights is no context of the training, in no spelling."""
    records = []
    for number in range(20):
        context = f"the {WORDS[number]} sat"
        for text in (context, context.title(), f" {context}  "):
            records.append(dict(question=f"{len(records)}?", context=text, answers=[]))
    path = tmp_path / "own.json"
    path.write_text(json.dumps(dict(data=records)))

    _, splits = read_task("squad_v2", flags(train=str(path), select=0.3))

    contexts = []
    for split, size in (("train", 39), ("select", 15), ("dev", 6)):
        assert len(splits[split]) == size
        contexts.append({tuple(list_words(context)) for (_, context), _ in splits[split]})
    assert len(set.union(*contexts)) == sum(map(len, contexts)) == 20


# Scores


def test_normalize_answer_removes_whole_articles():
    """[SQ §6] test_all.py has case, punctuation, and a score by hand."""
    assert normalize_answer("a theory, an answer") == ["theory", "answer"]


@pytest.mark.parametrize("answer, truths, allow_no_answer, expected", [
    # a word counts as often as in both
    (["cat", "cat", "cat"], [["cat", "cat", "dog"]], True, (0, 2 / 3)),
    ([], [[]], True, (1, 1)),
    ([], [["dog"]], True, (0, 0)),
    (["dog"], [[]], True, (0, 0)),
    ([], [[]], False, (1, 0)),  # as the script of v1 has it
])
def test_exact_and_f1_by_hand(answer, truths, allow_no_answer, expected):
    assert exact_and_f1(answer, truths, allow_no_answer) == pytest.approx(expected)


@pytest.mark.parametrize("name, expected", [
    ("squad_v2", [[0, 0], [1, 1]]),
    ("squad", [[1, 0], [1, 0]]),
])
def test_answer_of_punctuation_is_no_answer_in_v2(name, expected):
    """As in the official script: giving none is right only if all answers normalize to nothing."""
    texts = ("x", "a b .")
    rows = [
        (texts, [(".", 4), ("b", 2)]),
        (texts, [(".", 4)]),
    ]
    data = make_data(rows, 20, name)
    assert data.score(["", ""]).tolist() == expected


# Spans


def list_pairs(logits, first, stop, max_words):
    """Return all (score, start, end) of a context at first .. stop - 1, best first."""
    pairs = []
    for i in range(first, stop):
        for j in range(i, min(i + max_words, stop)):
            score = logits[i, 0] + logits[j, 1]
            pairs.append((score.item(), i, j))
    return sorted(pairs, reverse=True)


@pytest.mark.parametrize("text, start, expected", [
    ("bc de", 1, [0, 1]),  # parts of both words
    (" ", 3, []),  # between the words
])
def test_find_answer_words_by_hand(text, start, expected):
    spans = [(0, 3), (4, 7), (8, 9)]
    assert find_answer_words("abc def g", spans, text, start) == expected


# Windows and answers


@pytest.mark.parametrize("split, length, name, no_answer", [
    ("regex", 33, "squad", 0.0),
    ("regex", 33, "squad_v2", 0.4),
    ("bpe", 131, "squad", 0.0),  # an answer is several pieces
])
def test_targets_read_as_answers_score_100(split, length, name, no_answer, bpe):
    rows = make_rows(random.Random(1), 40, no_answer)
    tokenizer = None
    if split == "bpe":
        config = Config(emb="lookup")
        tokenizer = make_tokenizer(config, bpe, vocabulary=bpe.units)
    data = make_data(rows, length, name, tokenizer)
    assert len(data.ids) > 40
    assert "0 answers found in none" in data.notes

    logits = [torch.zeros(len(ids), 2) for ids in data.ids]
    for scores, ids, (start, end) in zip(logits, data.ids, data.targets):
        assert SEP not in ids[[start, end]]
        scores[start, 0] = 1
        scores[end, 1] = 1
    scores, texts = data.evaluate(batches(logits))
    assert scores["f1"] == scores["em"] == 100
    assert data.score(texts).min() == 1


def test_answers_and_questions_that_are_longer_than_a_window_are_counted():
    context = " ".join(WORDS)
    rows = [
        (("x", context), [(context, 0)]),
        ((context, context), []),
    ]
    data = make_data(rows, 20)
    assert "1 answers found in none, 1 questions cut" in data.notes
    assert not data.targets.any()


def test_answers_are_the_best_over_all_windows(monkeypatch):
    """Random scores, against going through all pairs of all windows. An answer has three words."""
    monkeypatch.setattr(squad, "MAX_ANSWER", 3)
    pairs = [pair for pair, _ in make_rows(random.Random(4), 9)]
    tokenizer = make_tokenizer(Config(), hash=MD5())
    windows, spans, _ = cut_windows(pairs, tokenizer, 25)
    # below 0, so that a span that ends behind its window would be the best one
    logits = [torch.randn(len(window.ids), 2) - 5 for _, window in windows]
    texts, margins = find_answers(pairs, windows, spans, batches(logits), False)

    best = {}  # question -> (score, first word, last word)
    null = {}
    for scores, (number, window) in zip(logits, windows):
        shift = window.start - window.offset  # from positions to words of the context
        stop = window.stop - shift
        score, i, j = list_pairs(scores, window.offset, stop, 3)[0]
        pair = (score, i + shift, j + shift)
        no_answer = scores[0].sum().item()
        best[number] = max(best.get(number, pair), pair)
        null[number] = min(null.get(number, no_answer), no_answer)
    for number, (score, a, b) in best.items():
        _, context = pairs[number]
        _, spans = split_words(context)
        begin, _ = spans[a]
        _, end = spans[b]
        assert texts[number] == context[begin:end]
        assert margins[number] == pytest.approx(score - null[number], abs=1e-5)


def test_eval_loss_is_the_mean_over_the_windows():
    """Law: batches of other sizes, and their padding, change nothing."""
    rows = make_rows(random.Random(4), 8, 0.3)
    data = make_data(rows, 25)
    logits = [torch.randn(len(ids), 2) for ids in data.ids]
    result, _ = data.evaluate(batches(logits))

    total = 0
    for scores, ids, (start, end) in zip(logits, data.ids, data.targets):
        context = 2 + ids.tolist().index(SEP)  # [CLS] question [SEP] [SEP] context [SEP]
        candidates = torch.cat([scores[:1], scores[context:-1]])
        logp = scores - candidates.logsumexp(0)
        total -= logp[start, 0]
        total -= logp[end, 1]
    mean = total.item() / 2 / len(logits)
    assert result["eval_loss"] == pytest.approx(mean)
