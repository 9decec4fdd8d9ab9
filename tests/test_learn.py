"""learn.ipynb runs without Jupyter, teaches what is true, and its checks name the usual errors."""

import contextlib
import importlib
import inspect
import io
import json
import math
import operator
import os
import re
import runpy
import sys

import matplotlib
import numpy as np
import pytest
import torch

from attention import lsh_attention_reference
from bloom import BloomMap
from embeddings import MedianEmbedding, ProjEmbedding
from hashing import NgramLSH, list_ngrams
from model import Config
from objectives import MaskedHashes, ShuffleRandom, SketchTarget, make_batch
from search import beam_search
from support import learn_checks
from support.common import read_json
from support.learn_checks import EXERCISES, QUIZ, check, check_quiz, judge_function
from tests.helpers import ROOT
from tokenizer import FIRST_WORD_ID

CELLS = json.loads((ROOT / "learn.ipynb").read_text(encoding="utf-8"))["cells"]
SOURCES = ["".join(cell["source"]) for cell in CELLS]
CODE = [i for i, cell in enumerate(CELLS) if cell["cell_type"] == "code"]
SOURCES_TEXT = "\n\n".join(SOURCES)
TEXT = "\n\n".join(source for i, source in enumerate(SOURCES) if i not in CODE)
MARK = "<cell {}>"


# ---------------------------------------------------------------------------------------------
# Solutions, as a reader may write them from what the text says


def my_bits(word, feature_of_gram, eta, T):
    products = np.zeros(T)
    for gram in list_ngrams(word):
        if gram in feature_of_gram:
            f = feature_of_gram[gram]
            products += eta[f:f + T]
    return products > 0


def my_proj(bits, weight):
    x = bits - bits.mean()
    w = weight - weight.mean(-1, keepdim=True)
    if x.norm() == 0:
        return torch.zeros(len(weight))
    return w @ x / (w.norm(dim=-1) * x.norm())


def my_labels(ids, inputs, is_shuffled, is_random):
    labels = torch.zeros_like(ids)
    labels[is_shuffled] = 1
    labels[is_random] = 2
    labels[inputs == ids] = 0
    labels[ids < 5] = -100
    return labels


def my_certificate(logp, digest, beam):
    best = logp.topk(beam, 1)
    bound = best.values[:, -1].sum()
    scores = []
    for a, b in digest.tolist():
        if a in best.indices[0] or b in best.indices[1]:
            scores.append(logp[0, a] + logp[1, b])
    return max(scores) >= bound, len(scores)


def my_score(parts):
    return -(parts[0] + parts[1])


def my_median(rows):
    k = len(rows)
    sorted_rows = rows.sort(0).values
    return (sorted_rows[(k - 1) // 2] + sorted_rows[k // 2]) / 2


def my_loss(logits, buckets):
    logp = logits.log_softmax(1)
    total = 0
    for j in range(len(buckets)):
        total = total - logp[j, buckets[j]]
    return total / len(buckets)


def my_extra_key(scores, values, c, mean):
    scores = torch.cat([scores, torch.tensor([math.log(c)])])
    values = torch.cat([values, mean.unsqueeze(0)])
    return scores.softmax(0) @ values


SOLUTIONS = [my_bits, my_proj, my_labels, my_certificate, my_score, my_median, my_loss,
             my_extra_key]


# ---------------------------------------------------------------------------------------------
# The notebook


@pytest.fixture
def run_cells(tmp_path, monkeypatch):
    """Return a function that runs all code cells in one namespace, as a program.

    It takes the sources of all cells, and returns what each code cell prints, number -> text.
    """
    def run(sources):
        program = "\n".join(f"print({MARK.format(i)!r})\n{sources[i]}" for i in CODE)
        path = tmp_path / "cells.py"
        path.write_text(program, encoding="utf-8")
        out = io.StringIO()
        with contextlib.redirect_stdout(out), matplotlib.rc_context():
            matplotlib.use("Agg", force=True)
            runpy.run_path(str(path))
        matplotlib.pyplot.close("all")
        parts = re.split(r"<cell (\d+)>\n", out.getvalue())
        return {int(number): text for number, text in zip(parts[1::2], parts[2::2])}

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return run


def stored_text(cell):
    return "".join("".join(output["text"]) for output in cell["outputs"] if "text" in output)


@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
def test_blank_notebook_prints_what_is_stored(run_cells):
    printed = run_cells(SOURCES)

    for i in CODE:  # after a change, run all cells in Jupyter, and save
        assert printed[i] == stored_text(CELLS[i]), SOURCES[i]
    everything = "".join(printed.values())
    assert everything.count("guess: not yet") == SOURCES_TEXT.count("guess = ...") == 7
    for solution in SOLUTIONS:
        assert f"{solution.__name__}: not yet\n" in everything
    assert f"{len(QUIZ)} not yet" in everything


@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
def test_solved_notebook_is_right(run_cells):
    """The solutions pass, and what is guessed is what the text says afterwards."""
    sources = [source.replace("guess = ...", "guess = 0") for source in SOURCES]
    for solution in SOLUTIONS:
        name = solution.__name__
        [i] = [i for i in CODE if f"def {name}(" in sources[i]]
        # the signature and the blank, up to two empty lines
        blank = re.search(rf"def {name}\(.*?(?=\n\n\n)", sources[i], re.S)[0]
        written = inspect.getsource(solution).rstrip()
        assert blank.split("\n")[0] == written.split("\n")[0]
        sources[i] = sources[i].replace(blank, written)
    for truth, _ in QUIZ:
        sources[CODE[-1]] = sources[CODE[-1]].replace("    ...,", f"    {truth},", 1)

    everything = "".join(run_cells(sources).values())

    for solution in SOLUTIONS:
        assert f"{solution.__name__}: right" in everything
    assert "quiz: 14 of 14 right, 0 not yet" in everything
    assert "not yet" not in everything.replace("0 not yet", "")
    measured = re.findall(r"guess: 0   measured: (.*)", everything)
    assert measured == ["27", "-1.0", "1.0", "6", "0.086", "2", "61"]


def test_limits_of_size():
    lines = [line for source in SOURCES for line in source.split("\n") if line.strip()]
    assert 36 <= len(CELLS) <= 44
    assert len(lines) <= 350
    assert os.path.getsize(ROOT / "learn.ipynb") <= 300_000


def test_files_functions_and_tests_of_the_text_exist():
    tests = (ROOT / "test_all.py").read_text(encoding="utf-8")
    num_functions = 0
    for name in re.findall(r"`([a-z][\w./-]+)`", TEXT):
        module, _, attributes = name.partition(".")
        if name.startswith("test_") and not attributes:
            assert f"def {name}(" in tests, name
        elif name.endswith(".pt"):
            assert (ROOT / "models" / name).exists(), name
        elif name.endswith((".py", ".txt")):
            assert (ROOT / name).exists(), name
        elif attributes:
            operator.attrgetter(attributes)(importlib.import_module(module))
            num_functions += 1
    assert num_functions > 12
    for link in re.findall(r"\]\((.*?)\)", TEXT):
        assert (ROOT / link).exists(), link


def test_text_says_how_well_the_frequency_of_a_word_finds_random_words():
    rows = read_json(ROOT / "results/frequency.json")["rows"]
    f1 = {row["name"]: row["f1_random"] for row in rows}
    model, frequency = f1["proj-lsh"], f1["proj-lsh: frequency of the word alone"]
    assert f"an F1 of {frequency:.3f} for random words, and a trained model {model:.3f}" in TEXT


def test_text_says_from_which_length_lsh_attention_is_faster():
    rows = read_json(ROOT / "results/attention.json")["rows"]
    faster = [row["L"] for row in rows if row.get("ratio", 0) > 1.1]
    assert min(faster) == 1_024 and "from about 1,000 positions on" in TEXT


# ---------------------------------------------------------------------------------------------
# The checks


def bits_of_lsh(word, feature_of_gram, eta, T):
    lsh = NgramLSH(list(feature_of_gram), features=len(eta) // 2)
    lsh.eta = eta
    return lsh.bits([word], T)[0]


def vector_of_proj(bits, weight):
    d, T = weight.shape
    proj = ProjEmbedding(T, d)
    proj.weight.data = weight
    return proj(bits.long())


def vector_of_median(rows):
    k, d = rows.shape
    if k % 2 == 0:  # which the embedding refuses
        return np.median(rows, 0)
    embedding = MedianEmbedding(k, 1, d)  # blocks of one row
    embedding.weight.data = rows
    return embedding(torch.zeros(k, dtype=torch.int64))


def loss_of_objective(logits, buckets):
    k, R = logits.shape
    config = Config(emb="mean", head="hash-mlm", hashes=k, buckets=R)
    targets = torch.zeros(FIRST_WORD_ID + 1, k, dtype=torch.int64)
    targets[FIRST_WORD_ID] = buckets  # of the only word
    objective = MaskedHashes(config, 0.15, SketchTarget(targets))
    batch = make_batch(None, torch.tensor([[FIRST_WORD_ID]]))
    return objective.loss(lambda *batch: logits.unsqueeze(0), batch)


@pytest.mark.parametrize("name, computed, num_cases", [
    ("my_bits", bits_of_lsh, 9),
    ("my_proj", vector_of_proj, 5),
    ("my_median", vector_of_median, 7),
    ("my_loss", loss_of_objective, 4),
])
def test_truth_is_what_the_class_computes(name, computed, num_cases):
    assert judge_function(name, computed) == f"right in all {num_cases} cases"


def test_true_labels_are_those_of_the_objective():
    ids = torch.randint(10, (20, 50))
    random_words = torch.randint(FIRST_WORD_ID, 10, ids.shape)
    noise = torch.rand(3, *ids.shape)
    _, labels = ShuffleRandom().corrupt(ids, noise, random_words)
    arguments = learn_checks.shuffle_random(ids, noise, random_words)
    assert torch.equal(EXERCISES["my_labels"].truth(*arguments), labels)


def test_true_certificate_is_that_of_the_search():
    num_certified = 0
    for seed in range(50):
        bloom_map = BloomMap(60, alpha=2, seed=seed)
        logp = (3 * torch.randn(2, bloom_map.num_buckets)).log_softmax(1)
        found = beam_search(logp.unsqueeze(0), bloom_map, 1, beam=2)
        digest = torch.from_numpy(bloom_map.digest).long()
        is_certified, num_scored = EXERCISES["my_certificate"].truth(logp, digest, 2)
        assert is_certified == found.certified
        assert num_scored == found.num_scored
        num_certified += is_certified
    assert 0 < num_certified < 50


def test_true_extra_key_is_that_of_attention():
    q, k, v = torch.randn(3, 1, 1, 20, 5)
    hq, hk = torch.randint(4, (2, 1, 1, 1, 20))
    expected = lsh_attention_reference(q, k, v, hq, hk)[0, 0]  # (20, 5)
    for i in range(20):
        is_inside = hk.flatten() == hq.flatten()[i]
        arguments = learn_checks.divide_keys(q[0, 0, i], k[0, 0], v[0, 0], is_inside)
        assert torch.allclose(EXERCISES["my_extra_key"].truth(*arguments), expected[i], atol=1e-5)


@pytest.mark.parametrize("name, error, hint", [
    (name, *pair) for name, exercise in EXERCISES.items() for pair in exercise.errors])
def test_usual_error_gets_its_own_hint(name, error, hint):
    assert judge_function(name, error) == f"not right yet. {hint}"


def test_other_error_shows_the_first_wrong_case(capsys):
    check("my_median", lambda rows: rows[0] + 1)
    printed = capsys.readouterr().out
    assert "not a usual one" in printed
    assert "first in my_median([[1.0, 7.0], [2.0, -9.0], [900.0, 8.0]])" in printed
    assert "expected [2.0, 7.0], got [2.0, 8.0]" in printed


def test_usual_error_that_raises_has_a_hint(capsys):
    def my_bits(word, feature_of_gram, eta, T):
        windows = [eta[feature_of_gram[gram]:][:T] for gram in list_ngrams(word)]
        return sum(windows, np.zeros(T)) > 0

    def my_certificate(logp, digest, beam):
        beams = logp.topk(beam, 1).indices
        is_scored = torch.isin(digest[:, 0], beams[0]) & torch.isin(digest[:, 1], beams[1])
        scores = logp[0, digest[:, 0]] + logp[1, digest[:, 1]]
        return scores[is_scored].max() >= 0, is_scored.sum()

    check("my_bits", my_bits)
    assert "no word of the corpus has" in capsys.readouterr().out
    check("my_certificate", my_certificate)
    assert "one bucket is enough" in capsys.readouterr().out


def test_function_that_raises_is_reported_with_its_line(capsys):
    def my_loss(logits, buckets):
        return logits[buckets, 99]

    check("my_loss", my_loss)
    printed = capsys.readouterr().out
    assert printed.startswith("my_loss: raises IndexError")
    assert "logits[buckets, 99]" in printed


@pytest.mark.parametrize("yours, fragment", [
    (lambda parts: parts[0] + parts[1], "the score sum"),
    (lambda parts: torch.minimum(*parts), "the score min"),
    (lambda parts: parts[0] + 3 * parts[1], "held on 50 maps"),
    (lambda parts: parts[0] * parts[1], "right"),
    (lambda parts: 1.0, "expected a tensor"),
])
def test_score_that_falls_is_told_from_others(yours, fragment, capsys):
    check("my_score", yours)
    assert fragment in capsys.readouterr().out
    assert "yours" not in learn_checks.SCORES


def test_quiz_tells_right_from_wrong(capsys):
    answers = [not QUIZ[0][0], QUIZ[1][0]] + [...] * 12
    check_quiz(answers)
    lines = capsys.readouterr().out.split("\n")
    assert lines[0].startswith(" 1 wrong, it is False. ")
    assert lines[1].startswith(" 2 right, True. ")
    assert lines[2] == "quiz: 1 of 14 right, 12 not yet"


def test_quiz_has_a_reason_for_each_statement():
    """About as many are true as are false, and their numbers are in order."""
    source = SOURCES[CODE[-1]]
    numbers = re.findall(r"^    \.\.\.,  # (\d+) ", source, re.M)
    assert numbers == [str(i) for i in range(1, len(QUIZ) + 1)]
    assert sum(truth for truth, _ in QUIZ) == 7
