"""data/squad.py: files, best spans, exact match and F1; answers against going through all pairs."""

import gzip
import json
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from data.squad import SQUAD, QuestionAnswering, best_spans, exact_and_f1, find_answer_words, normalize_answer
from data.squad import read_squad, score_answers, span_loss
from hashing import MD5, split_words
from model import PRESETS, Config
from runtime import InputError
from tests.support import make_words
from tokenizer import FIRST_WORD_ID, HashTokenizer

WORDS = make_words(60, 3)


def make_questions(rng, n, no_answer=0.0):
    """The answer is "zebra", alone or before "quagga", in a context of up to sixty other words."""
    questions = []
    for i in range(n):
        words = rng.choices(WORDS, k=rng.randint(20, 60))
        place, count = rng.randrange(1, len(words) - 3), rng.randint(1, 2)
        answers = []
        if rng.random() >= no_answer:
            words[place:place + count] = ["zebra", "quagga"][:count]
            answers = [(" ".join(words[place:place + count]), len(" ".join(words[:place])) + 1)]
        questions.append(dict(id=f"q{i}", question="Which word?", context=" ".join(words), answers=answers))
    return questions


def flat_rows(questions):
    return [q | dict(title="t", answers=dict(text=[t for t, _ in q["answers"]],
                                             answer_start=[s for _, s in q["answers"]])) for q in questions]


def nested_file(questions):
    """The content of a file as published."""
    articles = []
    for q in questions:
        answers = [dict(text=text, answer_start=start) for text, start in q["answers"]]
        qas = [dict(id=q["id"], question=q["question"], answers=answers)]
        articles.append(dict(title="t", paragraphs=[dict(context=q["context"], qas=qas)]))
    return dict(version="x", data=articles)


def make_tokenizer(**options):
    config = Config(**PRESETS["tiny"] | (dict(emb="lookup") if "subwords" in options else {}))
    return HashTokenizer(config, **dict(hash=MD5()) | options)


def question_answering(questions, tokenizer, length, stride=None, max_words=None, **options):
    return QuestionAnswering(questions, questions, tokenizer, length, stride, max_words, **options)


def test_read_squad_nested_and_flat_are_equal(tmp_path, monkeypatch):
    questions = make_questions(random.Random(0), 7)
    monkeypatch.setitem(SQUAD, "squad", ("v1.1", 7, 7))
    (tmp_path / "train-v1.1.json").write_text(json.dumps(nested_file(questions)))
    flat = "".join(json.dumps(row) + "\n" for row in flat_rows(questions))
    (tmp_path / "dev-v1.1.jsonl.gz").write_bytes(gzip.compress(flat.encode()))
    args = SimpleNamespace(train=None, dev=None, data_dir=str(tmp_path))
    assert read_squad("squad", args) == [questions, questions]
    monkeypatch.setitem(SQUAD, "squad", ("v1.1", 8, 7))
    with pytest.raises(InputError, match="expected 8 questions, got 7"):
        read_squad("squad", args)
    path = tmp_path / "own.json"
    args = SimpleNamespace(train=str(path), dev=str(path), data_dir=None)
    for content, message in ((flat_rows(questions[:1] * 2), "own.json: expected a distinct id for each"),
                             (nested_file(make_questions(random.Random(0), 7, 1)), "Use --task squad_v2")):
        path.write_text(json.dumps(content))
        with pytest.raises(InputError, match=message):
            read_squad("squad", args)
    assert [q["answers"] for q in read_squad("squad_v2", args)[0]] == [[]] * 7


@pytest.mark.parametrize("change", [
    *({name: value} for name in ("question", "context", "answers", "id") for value in (None, 5, ["a"], ...)),
    *(dict(answers=dict(text=texts, answer_start=starts)) for texts, starts in (
        ([None], [0]), (["a"], ["x"]), (["a"], [1.5]), (["a"], [-1]), (["a", "b"], [0]), ("a", [0])))])
def test_read_squad_refuses_other_rows(tmp_path, change):
    row = {key: value for key, value in (flat_rows(make_questions(random.Random(0), 1))[0] | change).items()
           if value is not ...}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    args = SimpleNamespace(train=str(tmp_path / "a.jsonl"), dev=str(tmp_path / "a.jsonl"), data_dir=None)
    with pytest.raises(InputError, match="a.jsonl, question 1: expected id, question, context and answers"):
        read_squad("squad_v2", args)


def test_exact_and_f1_by_hand():
    """[SQ §6] "the Cat sat." against "A cat slept": cat of (cat sat) and (cat slept), F1 1/2."""
    assert normalize_answer("The U.S. Army!") == ["us", "army"]
    assert normalize_answer("a theory, an answer") == ["theory", "answer"]  # articles are whole words
    truths = [normalize_answer(text) for text in ("A cat slept", "dog")]
    assert exact_and_f1(normalize_answer("the Cat sat."), truths) == (0.0, 0.5)
    assert exact_and_f1(["dog"], truths) == (1.0, 1.0)
    assert exact_and_f1(["cat", "cat"], [["cat"]]) == (0.0, pytest.approx(2 / 3))  # counted once
    assert exact_and_f1([], [[]]) == (1.0, 1.0)
    assert exact_and_f1([], [[], ["dog"]], allow_no_answer=False) == (1.0, 0.0)  # as v1's script has it
    assert exact_and_f1([], truths) == exact_and_f1(["dog"], [[]]) == (0.0, 0.0)


def test_best_spans_match_all_pairs():
    logits, position = torch.randn(5, 11, 2), torch.arange(11)
    first, stop = torch.tensor([(3, 11), (1, 2), (4, 9), (5, 5), (2, 8)]).T.unsqueeze(-1)
    is_context = (position >= first) & (position < stop)
    scores, starts, ends, null = best_spans(logits, is_context, 7, 3)
    assert torch.equal(null, logits[:, 0].sum(1))
    for row in range(5):
        pairs = {(i, j): (logits[row, i, 0] + logits[row, j, 1]).item() for i in range(11)
                 for j in range(i, min(i + 3, 11)) if is_context[row, i] and is_context[row, j]}
        expected = sorted(pairs, key=pairs.get, reverse=True)[:7]
        spans = zip(starts[row].tolist(), ends[row].tolist(), scores[row].tolist())
        assert [(i, j) for i, j, score in spans if score > -math.inf] == expected
        torch.testing.assert_close(scores[row, :len(expected)], torch.tensor([pairs[p] for p in expected]))


def test_span_loss_ignores_words_of_the_question():
    """Loss over [CLS] and the context's words alone: positions 0, 4, 5, 6 here."""
    logits, targets = torch.randn(2, 9, 2), torch.tensor([[5, 6, 4, 3], [0, 0, 4, 3]])
    candidates, places = logits[:, [0, 4, 5, 6]], torch.tensor([[2, 3], [0, 0]])
    start, end = (F.cross_entropy(candidates[..., i], places[:, i]) for i in (0, 1))
    torch.testing.assert_close(span_loss(logits, targets), (start + end) / 2)


def gold_logits(data):
    """A predict() that knows: 1 at the true start and end, -1 at [CLS]; of questions without an answer 2."""
    def predict(examples):
        for order in np.array_split(np.random.default_rng(0).permutation(len(examples)), 3):
            logits = torch.zeros(len(order), max(map(len, examples)), 2)
            for row, i in zip(logits, order):
                number, first, start, stop = data.places[i].tolist()
                question = data.questions[number]
                row[0] = -1 if question["answers"] else 2
                for answer in question["answers"]:
                    a, b = find_answer_words(data.spans[number], *answer)
                    if start <= a and b < stop:
                        row[first + a - start, 0] = row[first + b - start, 1] = 1
            yield order, logits

    return predict


@pytest.mark.parametrize("split", ["regex", "bpe"])
@pytest.mark.parametrize("no_answer", [0.0, 0.4])
def test_gold_spans_score_100(split, no_answer, bpe):
    questions = make_questions(random.Random(1), 40, no_answer)
    options = dict(split="bpe", subwords=bpe, vocabulary=bpe.units) if split == "bpe" else {}
    tokenizer = make_tokenizer(**options)
    data = question_answering(questions, tokenizer, 131 if options else 33, allow_no_answer=no_answer > 0)
    assert len(data.windows) > len(questions) == data.n and data.num_lost == 0
    scores, constant = data.evaluate(gold_logits(data))
    assert constant is None and all(scores[name] == 100 for name in scores if name != "threshold")
    answers = {q["id"]: q["answers"][0][0] if q["answers"] else "" for q in questions}
    words = {answer.replace(" ", "") for answer in answers.values() if answer}
    for ids, (start, end, _, _) in zip(data.examples, data.targets):  # training points to the same words
        text = "".join(tokenizer.words[i - FIRST_WORD_ID] for i in ids[start:end + 1].tolist() if start)
        assert not start or text.replace("Ġ", "") in words
    majority = pytest.approx(100 * list(answers.values()).count("") / 40)
    assert data.baselines() == dict(majority=majority, bag_of_words=None)
    assert data.submission(gold_logits(data)) == answers


def test_answers_are_the_best_over_all_windows():
    """Random scores for every window, in batches of several questions, against going through all pairs."""
    questions = make_questions(random.Random(4), 9, 0.3)
    data = question_answering(questions, make_tokenizer(), 25, stride=5, max_words=3, allow_no_answer=True)
    scores = [torch.randn(len(ids), 2) for ids in data.windows]

    def predict(examples):
        for order in np.array_split(np.random.default_rng(0).permutation(len(examples)), 4):
            yield order, torch.nn.utils.rnn.pad_sequence([scores[i] for i in order], batch_first=True)

    texts, margins = data.answers(predict)
    for q, question in enumerate(questions):
        pairs, null = [], math.inf
        for logits, (number, first, start, stop) in zip(scores, data.places.tolist()):
            if number == q:
                null = min(null, logits[0].sum().item())
                pairs += [((logits[first + a - start, 0] + logits[first + b - start, 1]).item(), a, b)
                          for a in range(start, stop) for b in range(a, min(a + 3, stop))]
        best, a, b = max(pairs)
        spans = split_words(question["context"])[1]
        assert texts[q] == question["context"][spans[a][0]:spans[b][1]]
        assert margins[q] == pytest.approx(best - null, abs=1e-5)


def test_answer_of_punctuation_is_no_answer_in_v2():
    """As in the official script: "." normalizes to nothing, and silence is then right only if all do."""
    questions = [dict(id="a", question="x", context="a b .", answers=[(".", 4), ("b", 2)]),
                 dict(id="b", question="x", context="a b .", answers=[(".", 4)])]
    for allow_no_answer, silence in ((True, [[0, 0], [1, 1]]), (False, [[1, 0], [1, 0]])):
        data = question_answering(questions, make_tokenizer(), 20, allow_no_answer=allow_no_answer)
        assert data.score(["", ""]).tolist() == silence


def test_answer_longer_than_any_window_is_counted():
    question = dict(id="a", question="x", context=" ".join(WORDS), answers=[(" ".join(WORDS), 0)])
    data = question_answering([question], make_tokenizer(), 20)
    assert data.num_lost == 1 and not data.targets[:, :2].any()
    misplaced = dict(question, context="a b c", answers=[("b c", 1)])  # starts in bytes, say
    assert question_answering([misplaced], make_tokenizer(), 20).num_lost == 1
    assert find_answer_words([(0, 3), (4, 7), (8, 9)], "bc de", 1) == (0, 1)
    assert find_answer_words([(0, 3), (4, 7)], " ", 3) is None
    for bad in (dict(stride=-1), dict(max_words=-2), dict(stride="x")):
        with pytest.raises(InputError, match="stride, max_words: expected 1 or more"):
            question_answering([question], make_tokenizer(), 20, **bad)
    assert data.description() == dict(head="span", labels=None, pair=True, stride=6, longest=30, null=False)


@pytest.mark.parametrize("n", [1, 2, 9, 50])
def test_null_threshold_is_the_best_there_is(n):
    """Against trying every threshold; equal margins answer together."""
    rng = np.random.default_rng(n)
    scores, silent = (rng.integers(0, 2, (n, 1)).repeat(2, 1).astype(float) for _ in range(2))
    margins = rng.integers(-3, 4, n).astype(float)

    def f1_where(answers):
        return 100 * np.where(answers, scores[:, 1], silent[:, 1]).mean()

    result = score_answers(scores, silent, margins)
    assert result["f1"] == result["em"] == pytest.approx(f1_where(margins > 0))
    assert result["best_f1"] == pytest.approx(max(f1_where(margins > t) for t in np.arange(-4.5, 5)))
    assert result["best_f1"] == pytest.approx(f1_where(margins >= result["threshold"]))
