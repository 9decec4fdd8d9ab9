"""Tests of infer.py: each method against an oracle, batches, any text, files, bad input.

That a fine-tuned model gives the labels, numbers and answers that were scored is tested in
test_finetune.py; that a misspelling is near its word in test_all.py.
"""

import contextlib
import gc
import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import infer
import readouts
from bloom import random_order
from coherent import popularity_prior
from data.items import HELD_OUT_KEY
from data.splitters import ItemNames
from hashing import MD5, sketch_index
from infer import Predictor
from model import Config, Model
from readouts import READOUTS
from support import predict_file, runner
from support.candidates import embed_words
from support.common import InputError, load_checkpoint, save_checkpoint
from support.readers import Example
from tests.helpers import ROOT, assert_refused, make_words, needs_full_disk, run_main, run_script
from tokenizer import FIRST_WORD_ID, MASK, make_tokenizer
from words import normalize_word

WORDS = [*make_words(50), "cat", "the"]
NAMES = ["Miles Davis", "Bill Evans", "x"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory, bpe, lsh):
    """Checkpoints with fresh weights, by name: one for each head and kind of words."""
    folder = tmp_path_factory.mktemp("untrained")
    made = {}

    def add(name, tokenizer_parts, task={}, words=WORDS, **sizes):
        torch.manual_seed(0)
        config = Config(layers=1, width=8, heads=2, ffn=8, length=64, lsh_pairs="all", **sizes)
        model = Model(config)
        tokenizer = make_tokenizer(config, **tokenizer_parts)
        path = str(folder / name)
        save_checkpoint(path, model, tokenizer.state(), words=words, task=task)
        made[name] = path

    # hashes of words
    ngrams = dict(hash=lsh)
    median = dict(emb="median", buckets=31, head="hash-mlm")
    add("detect", ngrams, emb="proj", bits=32)
    add("index", ngrams, emb="emb", rows=50)
    add("missing", dict(key="s"), **median)

    # rows of pieces
    pieces = dict(splitter=bpe, vocabulary=bpe.units)
    table = dict(emb="lookup", rows=FIRST_WORD_ID + len(bpe.units))
    answers = dict(name="squad_v2", texts=["question", "context"], labels=None)
    add("fill", pieces, head="mlm", **table)
    add("answer", pieces, answers, head="span", **table)

    # classes of one text, and of two
    for name, texts in (("classify", ["review"]), ("pair", ["a", "b"])):
        task = dict(texts=texts, labels=["up", "down"])
        add(name, dict(hash=MD5()), task, emb="pool", head="classify")

    # item sets: any names, and those of a vocabulary
    names = dict(splitter=ItemNames(), vocabulary=[*NAMES, "3"])
    add("set", dict(splitter=ItemNames()), words=NAMES, order=False, **median)
    add("fixed_set", names, emb="lookup", rows=FIRST_WORD_ID + 4, head="mlm", order=False)
    return made


@pytest.fixture(scope="module")
def untrained(paths):
    """A Predictor for each of these."""
    return {name: Predictor(path) for name, path in paths.items()}


# [MASK] in a text


@pytest.mark.parametrize("name, text, words", [
    ("detect", "Die [MASK] ab[MASK].", ["die", "[MASK]", "ab", "[MASK]", "."]),
    ("fill", "the [MASK]. [MASK] sat", ["Ġthe", "[MASK]", ".", "[MASK]", "Ġsat"]),  # not "Ġ."
    ("fill", "the[MASK]cat", ["Ġthe", "[MASK]", "cat"]),  # no space, not "Ġcat"
    ("fill", "[MASK] cat", ["[MASK]", "Ġcat"]),
    ("classify", "good [MASK]", ["good", "[", "mask", "]"]),  # as in fine-tuning
])
def test_split_leaves_the_words_around_a_mask_alone(untrained, name, text, words):
    found, ids, _ = untrained[name].reader.split(text)
    assert [word for word in found if word != "Ġ"] == words
    assert ids.count(MASK) == words.count("[MASK]")


# Any text


HARD = ("[MASK]", "[MASK", " ", "\t", "\x00", "\ud800", "İ", "e\u0301", "日本", "Ġ", "a" * 1_000)
ANY_PART = st.text(st.characters(exclude_categories=()), max_size=20) | st.sampled_from(HARD)


@hypothesis.settings(max_examples=25, deadline=None, database=None, derandomize=True,
                     suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(text=st.lists(ANY_PART, max_size=12).map("".join))
def test_any_text_is_read_by_every_head_or_refused(text, untrained):
    with contextlib.suppress(InputError):
        words, spans, p = untrained["detect"].detect(text)
        assert [normalize_word(text[start:end]) for start, end in spans] == words
        assert len(p) == len(words)
    for name in ("fill", "missing"):
        with contextlib.suppress(InputError):
            assert len(untrained[name].predict(text)) == text.count("[MASK]") > 0
    shares = [share for _, share in untrained["classify"].classify(text)]
    assert sum(shares) == pytest.approx(1)
    answer, _ = untrained["answer"].answer(("who", text))
    assert answer in text


@pytest.mark.parametrize("name, call, message", [
    ("detect", lambda p: p.fill_mask("a [MASK]"), "fill_mask, got one with detect (head sr)"),
    ("detect", lambda p: p.detect("the [MASK]"), "expected no [MASK]. Remove it"),
    ("fill", lambda p: p.fill_mask("the cat"), "expected [MASK] in the first 64"),
    ("detect", lambda p: p.detect("a " * 63), "expected at most 64 positions, got 65"),
    ("detect", lambda p: p.embed(["a", 3]), "row 2: expected a text or a tuple"),
    ("fixed_set", lambda p: p.fill_mask("y z\t[MASK]"), "expected items that this model knows"),
    ("fixed_set", lambda p: p.fill_mask([("x", {})]), "expected an item set, a tuple of names"),
    ("fixed_set", lambda p: p.embed([3]), "expected an item set, a tuple of names"),  # not 0
    ("classify", lambda p: p.classify(("a", "b")), "tuple of texts (review), got ('a', 'b')"),
    ("pair", lambda p: p.classify(["a", "b"]), "row 1: expected a text or a tuple"),
    ("detect", lambda p: p.detect(""), "expected words, got none"),
    ("detect", lambda p: p.neighbors("日本"), "expected one word that this model knows"),
    ("fixed_set", lambda p: p.neighbors("nope"), "expected one item that this model knows"),
])
def test_input_that_does_not_fit_is_refused(untrained, name, call, message):
    with pytest.raises(InputError) as error:
        call(untrained[name])
    assert message in str(error.value)
    # a Python user has no flags
    assert "--" not in str(error.value).replace("Use --truncate, or truncate=True in Python", "")


# Batches


def approx(value):
    """Return what is equal to a value of two digits."""
    return pytest.approx(value, abs=0.005)


def leaves(value):
    """Return the numbers and names of a nested result."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (torch.Tensor, np.ndarray)):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        return [value]
    return [leaf for part in value for leaf in leaves(part)]


@pytest.mark.parametrize("name, method", [
    ("detect", "detect"),
    ("detect", "embed"),
    ("fill", "fill_mask"),
    ("missing", "predict_missing"),
    ("classify", "classify"),
    ("answer", "answer"),
    ("classify", "neighbors"),
])
def test_batch_is_equal_to_one_by_one(untrained, monkeypatch, name, method):
    """Law: the result of a row does not depend on its neighbors, and has its place."""
    monkeypatch.setattr(runner, "BATCH", 3)
    rng = np.random.default_rng(1)
    rows = []
    for size in (1, 9, 2, 30, 3, 3, 17, 1):
        text = " ".join(rng.choice(["cat", "the", "mat", "there"], size))
        if method in ("fill_mask", "predict_missing"):
            text += " [MASK] the [MASK]"
        rows.append(text)
    if method == "answer":
        rows = [(text[:20], text) for text in rows]
    if method == "neighbors":
        rows = ["cats", "zebra", "mat", "hat"]
    predict = getattr(untrained[name], method)
    many = predict(rows)
    assert len(many) == len(rows)
    for row, result in zip(rows, many):
        alone = predict(row)
        assert leaves(result) == pytest.approx(leaves(alone), abs=1e-4)


# Words and labels


def test_probabilities_are_those_of_the_docstrings(untrained):
    up_and_down = untrained["classify"].readout.interpret(None, torch.tensor([1.0, -1.0]), None)
    assert leaves(up_and_down) == ["up", approx(0.88), "down", approx(0.12)]
    p = untrained["fixed_set"]
    logits = torch.tensor([[9.0] * 5 + [2, 1, 0, 3]])  # the set shows the last item
    ranking = p.readout.interpret(p.read("3"), logits, 2)
    assert leaves(ranking) == [NAMES[0], approx(0.67), NAMES[1], approx(0.24)]
    assert logits.isfinite().all()  # the model's output is not written to


def test_class_that_an_objective_leaves_out_is_never_printed(paths, tmp_path, capsys):
    """The head has three classes, and the objective of this checkpoint two kinds of words."""
    checkpoint = load_checkpoint(paths["detect"])
    torch.save(checkpoint | dict(kinds={0: "intact", 2: "strange"}), tmp_path / "ckpt.pt")
    probabilities = torch.tensor([[0.1, 0.8, 0.1], [0.1, 0.5, 0.4]])
    result = (["a", "cat"], [(0, 1), (2, 5)], probabilities)
    infer.print_result(Predictor(str(tmp_path)), "a cat", result, 2)
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "a {cat:strange}"
    assert "shuffled" not in out


def test_predict_missing_scores_are_sums_of_hash_probabilities(untrained):
    """Also with a key, which another tokenizer does not have."""
    p = untrained["missing"]
    [found] = p.predict_missing("the [MASK] cat", 9)
    row = p.read("the [MASK] cat")
    ids = torch.from_numpy(row.ids).long().unsqueeze(0)  # (1, L)
    [logits] = p.readout.forward(ids, None)
    [logp] = logits.log_softmax(-1)  # (k, R)
    scores = []
    for buckets in sketch_index(p.words, 5, 31, key="s"):
        score = logp[range(5), buckets].sum()
        scores.append(score.item())
    best = sorted(scores, reverse=True)[:9]
    assert [score for _, score in found["items"]] == pytest.approx(best, abs=1e-4)
    assert found["total"] == len(p.words)


def test_candidates_may_be_words_that_no_text_had(paths):
    words = ["xylophone", "zebra", "unheard", "-", "of"]
    p = Predictor(paths["missing"], words=words)
    [found] = p.predict_missing("a [MASK]")
    assert sorted(name for name, _ in found["items"]) == sorted(words)
    assert {name for name, _ in p.neighbors("xylophon")} == set(words)


# Similar words


@pytest.mark.parametrize("name", ["detect", "index"])
def test_neighbors_of_lsh_share_most_bits(untrained, name):
    """Whatever the model reads of a hash. The first of words with equal distances comes first."""
    p = untrained[name]
    hash = p.tokenizer.coder.hash
    bits = hash.bits(["cats", *p.words], hash.features)  # 997, less than NEAR_BITS
    distance = (bits[1:] != bits[0]).sum(1)
    order = np.argsort(distance, kind="stable")[:9]
    cosines = 1 - 2 * distance[order] / hash.features
    words, values = zip(*p.neighbors("cats", 9))
    best = [p.words[i] for i in order]
    assert list(words) == best
    assert values == pytest.approx(cosines.tolist(), abs=1e-5)


def test_neighbors_of_other_hashes_are_the_largest_cosines(untrained):
    """Less the mean of the candidates."""
    p = untrained["classify"]
    codes = torch.from_numpy(p.tokenizer.coder.codes(["cats", *p.words]))
    v = p.model.inputs.embedding(codes)
    v = v - v[1:].mean(0)
    cosines = F.cosine_similarity(v[1:], v[:1])  # (V,)
    values, best = cosines.topk(7)
    words, found = zip(*p.neighbors("cats", 7))
    expected = [p.words[i] for i in best]
    assert list(words) == expected
    assert found == pytest.approx(values.tolist(), abs=1e-4)


def test_words_of_a_model_in_half_precision_are_compared_in_float32(paths):
    p = Predictor(paths["classify"])
    p.model.half()
    assert embed_words(p.model, p.tokenizer, p.words).dtype == torch.float32


# What a user has to know


@pytest.mark.parametrize("name, row, notes", [
    ("classify", "", ["the text has no words"]),
    ("classify", "日本 фильм", []),  # MD5 knows all words
    ("classify", "cat " * 63, ["cut to 64 positions"]),
    ("answer", ("who", "cat " * 63), []),  # read in windows
    ("fixed_set", "x nope", ["unknown items were left out: nope"]),
    ("detect", "the " * 9 + "日本", []),  # a tenth
    ("detect", "the " * 8 + "日本", ["the model knows nothing of 1 of 9 words; pre-train on such "
                                   "text, or with MD5"]),
])
def test_notes_say_how_a_row_is_read(untrained, name, row, notes):
    p = untrained[name]
    assert p.list_notes(row) == notes


def test_truncated_text_is_judged_as_its_start(paths, untrained):
    """Law: what is cut off changes nothing."""
    p = Predictor(paths["detect"], truncate=True)
    start = untrained["detect"].detect("cat " * 62)
    assert leaves(p.detect("cat " * 63)) == pytest.approx(leaves(start))


# Item sets


@pytest.mark.parametrize("row, ids", [
    ("Miles Davis [MASK] x", [0, 2]),  # longest match of names
    ("Miles Davis\tx\tnope", [0, 2]),  # without unknown items
    ("x [MASK] x [MASK]", [2]),  # a set has no item twice, and one item to predict
    (("x", 3, None, " Bill\nEvans ", "nope", 4), [2, 3, 1]),  # every form that training reads
    (["x", "nope"], [2]),
])
def test_set_is_read_in_every_form(untrained, row, ids):
    p = untrained["fixed_set"]
    ids = [FIRST_WORD_ID + i for i in ids]
    assert p.read(row).ids.tolist() == [MASK, *ids]
    assert p.reader.read_for_vector(row).ids.tolist() == ids  # a vector is of the items alone


def test_items_of_a_set_are_not_proposed_again(untrained):
    [found] = untrained["set"].predict_missing("Miles Davis [MASK]")
    assert {name for name, _ in found["items"]} == {"Bill Evans", "x"}
    [pairs] = untrained["fixed_set"].fill_mask("Miles Davis")
    assert {name for name, _ in pairs} == {"Bill Evans", "x", "3"}
    [pairs] = untrained["fixed_set"].fill_mask((*NAMES, "3"))
    assert pairs == []  # all items: the probabilities are NaN


# What people read


@pytest.mark.parametrize("name, result, lines", [
    ("detect", (["a", "b"], [(0, 1), (2, 3)], torch.tensor([[0.9, 0.1, 0], [0.2, 0.7, 0.1]])),
     ["a {b:shuffled}",  # the rest was cut; the most suspicious word comes first
      "                 b   intact 20.0%   shuffled 70.0%   random 10.0%",
      "                 a   intact 90.0%   shuffled 10.0%   random  0.0%"]),
    ("fill", [[("ĠcafÃ©", 1.0)]], ["[MASK] 1", f"{'café':>18}   1.000"]),  # bytes in a piece
    ("fill", [[("Ċ", 1.0)]], ["[MASK] 1", " " * 16 + r"\n   1.000"]),
    ("answer", ("Ġé", 1.0), [f"{'Ġé':>18}   1.000"]),  # no piece
    ("answer", ("", -0.25), [f"{'(no answer)':>18}   -0.250"]),
])
def test_print_result_shows_what_the_pages_print(untrained, capsys, name, result, lines):
    infer.print_result(untrained[name], "a b c", result, 8)
    assert capsys.readouterr().out.splitlines() == lines


def test_each_readout_has_a_printer():
    assert infer.PRINTERS.keys() == READOUTS.keys()


# Files


def run_file(ckpt, path, *flags):
    """Run infer.py --file; return its objects, and what it says on stderr."""
    done = run_main(infer.main, "--ckpt", ckpt, "--file", path, *flags)
    assert not done.code, done.err
    return [json.loads(line) for line in done.out.splitlines()], done.err


@pytest.mark.parametrize("name, text", [
    ("detect", "cat the"),
    ("missing", "the [MASK]"),
])
def test_object_has_the_columns_beside_the_prediction(paths, untrained, tmp_path, name, text):
    (tmp_path / "in.csv").write_text(f"id,text,label\n7,the,up\n8,{text},?\n")
    rows, _ = run_file(paths[name], tmp_path / "in.csv", "--text", "text")
    prediction = rows[1].pop("prediction")
    assert rows[1] == dict(id="8", text=text, label="?", notes=[])
    expected = untrained[name].predict(text)
    assert leaves(prediction) == pytest.approx(leaves(expected), abs=1e-4)


TABLE = "n,title,body\none,the cat,a zebra\n"


@pytest.mark.parametrize("model, name, content, flags, texts", [
    ("classify", "in.csv", "review,text\na zebra,1\n", [], "a zebra"),  # the model's own
    ("classify", "in.jsonl", '{"text": "a zebra", "title": "a"}', [], "a zebra"),
    ("classify", "in.jsonl", '{"n": 1, "body": "a zebra"}', [], "a zebra"),  # the only text
    ("classify", "in.csv", "1,a zebra\n", ["--header", "none", "--text", "2"], "a zebra"),
    ("answer", "in.csv", TABLE, ["--text", "title, body"], ["the cat", "a zebra"]),
    ("fixed_set", "in.txt", "x; Miles Davis\n", ["--sep", ";"], ["x", " Miles Davis"]),
    ("fixed_set", "in.jsonl", '{"text": "a", "items": ["x", 3, null]}', [], ["x", 3, None]),
    ("classify", "in.jsonl", '{"review": null}', ["--text", "review"], ""),
    ("pair", "in.jsonl", '{"a": null, "b": "a zebra"}', [], ["", "a zebra"]),
])
def test_file_is_read_as_training_reads_it(
        untrained, tmp_path, model, name, content, flags, texts):
    (tmp_path / name).write_text(content)
    args = infer.build_parser().parse_args(["--file", str(tmp_path / name), *flags])
    [(row, _)] = predict_file.read_file(args, untrained[model])
    assert row == texts
    untrained[model].reader.read_for_vector(row)


@pytest.mark.parametrize("name, content, rows", [
    ("in.txt", "Art Blakey\nx\tBill Evans\n", [("Art Blakey",), ("x", "Bill Evans")]),
    ("in.csv", 'n,set\n1,Art Blakey\n2,"x\tMiles"\n', [("Art Blakey",), ("x", "Miles")]),
    ("in.txt", "Miles Davis x\n", ["Miles Davis x"]),  # no tab in the whole file
])
def test_tab_anywhere_decides_for_the_file(untrained, tmp_path, name, content, rows):
    """As in training: the name of a line without tabs is no set of its words."""
    (tmp_path / name).write_text(content)
    flags = ["--text", "set"] if name == "in.csv" else []
    args = infer.build_parser().parse_args(["--file", str(tmp_path / name), *flags])
    found = predict_file.read_file(args, untrained["set"])
    assert [row for row, _ in found] == rows


@pytest.mark.parametrize("model, content, flags, message", [
    ("classify", TABLE, [], "expected one column of text, got n, title, body. Use --text NAME"),
    ("classify", TABLE, ["--text", "gone"], "expected 1 of its columns n, title, body, got gone"),
    ("classify", "title,body\n", [], "expected rows with columns, got none"),
    ("answer", TABLE, [], "expected 2 of its columns n, title, body, got question"),
    ("fixed_set", "order,item\n7,x\n", [], "got order, item. Use --text NAME"),
])
def test_file_without_the_columns_is_refused(paths, tmp_path, model, content, flags, message):
    path = tmp_path / "in.csv"
    path.write_text(content)
    assert_refused(infer.main, ["--ckpt", paths[model], "--file", path, *flags], path, message)


@pytest.mark.parametrize("model, name, content, is_good, reason", [
    # a cell more; the header again; an empty cell
    ("classify", "in.csv", "n,text\n1,a\n2,b, c\nn,text\n3,\n", [True, False, False, True],
     "a cell for each"),
    ("classify", "in.jsonl", '{"text": 3}\n{"no": 1}\n[3]\n{"text"\n{"text": "\\ud83d"}',
     [False, False, False, False, True], "a text"),
    ("fixed_set", "in.txt", "x nope\nnope\n", [True, False], "items"),
])
def test_file_goes_on_after_a_bad_row(paths, tmp_path, model, name, content, is_good, reason):
    (tmp_path / name).write_text(content)
    flags = ["--text", "text", "--header", "first"]
    rows, err = run_file(paths[model], tmp_path / name, *flags)
    assert ["error" not in row for row in rows] == is_good
    assert ["prediction" in row for row in rows] == is_good
    assert f"{len(rows)} rows, {is_good.count(False)} with an error" in err
    assert f"the first in row {is_good.index(False) + 1}: expected {reason}" in err


@pytest.mark.parametrize("name, content, message", [
    ("in.csv", "text\n" + "a zebra\n" * 110 + '"not closed\n', "could not be read"),
    ("in.jsonl", '{"text": "a"}\n' * 110 + '{"text": "a", "notes": 1}\n', "expected no column"),
])
def test_parts_before_a_broken_place_are_predicted(
        paths, tmp_path, monkeypatch, name, content, message):
    monkeypatch.setattr(predict_file, "PART", 3)
    path = tmp_path / name
    path.write_text(content)
    done = run_main(infer.main, "--ckpt", paths["classify"], "--file", path)
    assert done.code == 2
    assert f"infer.py: {path}: {message}" in done.err
    assert len(done.out.splitlines()) == 108


# str.splitlines and JavaScript end a line at U+0085, U+2028 and U+2029, too
ENDS = {"{\x85}: \u2029": ["a\u2028b\u2029c\x85d", "\u2028", "\x1c\v"]}


@pytest.mark.parametrize("value, expected", [
    (ENDS, ENDS),
    # these numbers are no JSON
    (dict(a=np.nan, b=dict(c=[torch.inf, 1.5])), dict(a=None, b=dict(c=[None, 1.5]))),
])
def test_an_object_is_one_line_of_json_for_every_program(value, expected):
    line = predict_file.to_json(value)
    assert len(line.splitlines()) == 1
    assert json.loads(line) == expected


def test_jsonl_is_utf8_with_plain_line_ends_on_every_system(paths, tmp_path):
    """Half of a surrogate pair, which Python reads in JSON, has no bytes in UTF-8."""
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "the caf\\u00e9"}\n{"text": "a \\ud83d cat"}\n')
    out = tmp_path / "new/out.jsonl"
    done = run_main(infer.main, "--ckpt", paths["detect"], "--file", path, "--jsonl", out)
    assert not done.code, done.err
    assert done.out == ""
    content = out.read_bytes().decode("utf-8")
    assert "the café" in content
    assert content.count("\n") == 2 and "\r" not in content
    texts = [json.loads(line)["text"] for line in content.splitlines()]
    assert texts == ["the café", "a \ud83d cat"]
    flags = ["--ckpt", paths["detect"], "--file", tmp_path / "missing.txt", "--jsonl", out]
    assert_refused(infer.main, flags, f"infer.py: {tmp_path / 'missing.txt'}: No such file")
    assert out.read_bytes().decode("utf-8") == content  # the earlier file is still there


def test_embed_is_the_mean_of_the_outputs(untrained):
    p = untrained["detect"]
    vector = p.embed("the cat")
    ids = torch.from_numpy(p.read("the cat").ids).long()  # (L,)
    [outputs] = p.model.encode(ids.unsqueeze(0))  # (L, 1, d)
    np.testing.assert_allclose(vector, outputs.mean((0, 1)), atol=1e-6)
    assert vector.dtype == np.float32
    assert not p.embed([]).size


@pytest.mark.parametrize("model, name, content, note, rows", [
    ("detect", "in.csv", "id,text\n1,the cat\n2,\n3,cat\n4,cat cat\n", "1 rows have no words",
     ["the cat", None, "cat", "cat cat"]),
    # a fine-tuned model has a vector for an empty text, but not for a row that is damaged
    ("classify", "in.csv", "id,review\n1,a,b\n2,cat\nid,review\n3,\n",
     "2 rows are damaged, or the header again", [None, "cat", None, ""]),
    ("fixed_set", "in.txt", "x\nnope\nnope nothing\n3 x\n", "2 rows have no words, or no items",
     ["x", None, None, ("3", "x")]),
])
def test_vectors_are_those_of_the_rows_and_zero_where_nothing_is_read(
        untrained, paths, tmp_path, monkeypatch, model, name, content, note, rows):
    """Law: each row keeps its place."""
    monkeypatch.setattr(predict_file, "PART", 3)
    path = tmp_path / name
    path.write_text(content)
    out = tmp_path / "new/v.npy"
    header = ["--header", "first"] if model == "classify" else []
    done = run_main(infer.main, "--ckpt", paths[model], "--file", path, "--vectors", out, *header)
    assert f"note: {note}" in done.err
    for row, vector in zip(rows, np.load(out), strict=True):
        expected = 0 if row is None else untrained[model].embed(row)
        np.testing.assert_allclose(vector, expected, atol=1e-5)


@pytest.mark.parametrize("flag", ["--vectors", "--jsonl"])
def test_rows_of_a_file_are_not_kept(paths, tmp_path, monkeypatch, flag):
    """Law: memory does not grow with the file, but by its new words and vectors."""
    monkeypatch.setattr(predict_file, "PART", 3)
    num_kept = []

    def count_examples(*arguments):
        num_kept.append(sum(type(thing) is Example for thing in gc.get_objects()))
        return run_batches(*arguments)

    run_batches = runner.run_batches
    monkeypatch.setattr(infer, "run_batches", count_examples)
    monkeypatch.setattr(readouts, "run_batches", count_examples)
    path = tmp_path / "in.txt"
    path.write_text("the cat\n" * 30)
    done = run_main(infer.main, "--ckpt", paths["detect"], "--file", path, flag, tmp_path / "out")
    assert not done.code, done.err
    assert len(num_kept) == 10
    assert num_kept[-1] - num_kept[0] <= 6  # at the last part those of one before it may be alive


def test_vectors_of_an_earlier_run_stay_where_a_row_is_refused(paths, tmp_path):
    path = tmp_path / "in.txt"
    out = tmp_path / "v.npy"
    out.write_bytes(b"earlier")
    path.write_text(f"the cat\n{'cat ' * 99}\n")  # too long
    flags = ["--ckpt", paths["detect"], "--file", path, "--vectors", out]
    assert_refused(infer.main, flags, "row 2: expected at most")
    assert out.read_bytes() == b"earlier"


@needs_full_disk
@pytest.mark.parametrize("flag", ["--jsonl", "--vectors"])
def test_output_on_a_full_disk_is_named(paths, tmp_path, flag):
    path = tmp_path / "in.txt"
    path.write_text("the cat\n" * 30)
    flags = ["--ckpt", paths["detect"], "--file", path, flag, "/dev/full"]
    assert_refused(infer.main, flags, "infer.py: /dev/full: could not be written")


@pytest.mark.parametrize("flags, message", [
    ([], "one of the arguments TEXT --near --file is required"),
    (["--file", "bad.jsonl", "--vectors", "v.npy", "--jsonl", "o.jsonl"], "--jsonl: expected"),
    (["a", "--file", "bad.jsonl"], "argument --file: not allowed with argument TEXT"),
    (["--file", "bad.jsonl"], "bad.jsonl: 1 rows, 1 with an error, the first in row 1: expected"),
    (["--file", "/dev/stdin"], "/dev/stdin: expected a file in .txt"),
    (["a", "--vectors", "v.npy"], "--sep and --header require --file"),
])
def test_flags_that_do_not_fit_are_refused(paths, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"review": 3}\n')
    assert_refused(infer.main, ["--ckpt", paths["classify"], *flags], message)


def test_texts_of_the_command_line_are_answered_pair_by_pair(paths):
    done = run_main(infer.main, "--ckpt", paths["pair"], "a", "b", "c", "d", "--top_k", 1)
    assert len(done.out.splitlines()) == 2
    assert_refused(infer.main, ["--ckpt", paths["pair"], "a"], "TEXT: expected a and b")


def test_damaged_checkpoint_ends_in_one_line(paths, tmp_path):
    """The hash is another one's."""
    parts = torch.load(paths["classify"])
    parts["tokenizer"].update(hash=dict(bits=3))
    path = tmp_path / "ckpt.pt"
    torch.save(parts, path)
    assert_refused(infer.main, ["--ckpt", path, "a"], f"infer.py: {path}: ")


# The prior of items


def test_prior_is_of_the_training_sets_and_changes_scores_by_its_weight(sets_run, pages_path):
    plain = Predictor(sets_run)
    weighted = Predictor(sets_run, prior=0.5)
    names = plain.tokenizer.words
    row = tuple(names[:2])
    # counted from the file
    pages = [json.loads(line)["links"] for line in open(pages_path)]
    order = random_order(len(pages), HELD_OUT_KEY)
    counts = Counter(name for i in order[len(pages) // 10:] for name in pages[i])
    prior = popularity_prior([counts[name] for name in names], plain.tokenizer.coder.bloom_map)
    before = dict(plain.predict_missing(row, k=len(names))[0]["items"])
    after = weighted.predict_missing(row, k=len(names))[0]["items"]
    assert len(after) == len(names) - 2
    for name, score in after:
        expected = before[name] + 0.5 * prior[names.index(name)].item()
        assert score == pytest.approx(expected, abs=1e-5)
    assert [name for name, _ in after] != list(before)


@pytest.mark.parametrize("name", ["detect", "missing", "fixed_set", "set"])
def test_prior_needs_counts_of_items(paths, name):
    assert_refused(infer.main, ["--ckpt", paths[name], "--prior", "0.5", "a"], "prior: expected")


def test_prior_is_refused_where_the_head_searches_no_items(paths, tmp_path):
    """It would have no effect. The checkpoint has counts, so nothing else is amiss."""
    checkpoint = load_checkpoint(paths["fixed_set"])
    torch.save(checkpoint | dict(item_counts=torch.ones(4)), tmp_path / "ckpt.pt")
    flags = ["--ckpt", tmp_path, "--prior", "0.5", "x [MASK]"]
    assert_refused(infer.main, flags, "--prior: expected", "head mlm")


def test_shipped_model_of_item_sets_counts_its_items():
    """A prior lowers "self", the most frequent name of Python, behind the names of times."""
    done = run_main(infer.main, "--ckpt", ROOT / "models/names.pt", "--prior", "0.5",
                    "year month [MASK]")
    first = [line.split()[0] for line in done.out.splitlines()[1:4]]
    assert first == ["day", "second", "minute"]


# Import, threads, kinds, hashes


def test_import_loads_nothing_slow_that_a_text_does_not_need():
    """They take seconds: the compiler of PyTorch, readers of tables and of the hub, figures.

    And tokenizers, which Windows on ARM and Python without a global lock do not have.
    """
    code = "import sys, torch; old = set(sys.modules); import infer; print(*set(sys.modules) - old)"
    loaded = run_script("-c", code).stdout.split()
    slow = {"torch._dynamo", "torch._inductor", "sympy", "pyarrow", "pandas", "datasets",
            "matplotlib", "tokenizers"}
    assert "model" in loaded
    assert slow.isdisjoint(loaded)


class SlowList(list):
    """A list that lets other threads run before it grows."""

    def append(self, value):
        time.sleep(1e-5)
        super().append(value)


@pytest.mark.parametrize("name, method", [
    ("detect", "embed"), ("set", "embed"), ("classify", "neighbors")])
def test_threads_share_a_predictor(paths, name, method):
    """Each row has words that no other has: the list of words grows in all threads."""
    rows = [" ".join(make_words(3, seed=i)) for i in range(160)]
    if name == "set":
        rows = [tuple(f"{row} {i}" for i in range(20)) for row in rows]
    if method == "neighbors":
        rows = [row.split()[0] for row in rows]
    alone = Predictor(paths[name])
    expected = [getattr(alone, method)(row) for row in rows]
    shared = Predictor(paths[name])
    shared.tokenizer.words = SlowList(shared.tokenizer.words)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(getattr(shared, method), rows))
    for result, right in zip(results, expected):
        assert leaves(result) == leaves(right)


class LetterHash(MD5):
    """Words that begin alike have the same bits."""

    near_bits = 12

    def bits(self, words, T):
        return super().bits([word[0] for word in words], T)


def test_neighbors_compare_the_bits_of_a_hash_that_says_so(paths):
    predictor = Predictor(paths["detect"], words=["cow", "dog", "cat"])
    predictor.tokenizer.coder.hash = LetterHash()
    assert leaves(predictor.neighbors("cub", 2)) == ["cow", approx(1.0), "cat", approx(1.0)]
