"""infer.py: any text on every head, what comes out, files, checkpoints that do not fit, the command line."""

import contextlib
import copy
import gzip
import io
import itertools
import json
import math
import random
import re
import subprocess
import sys
from dataclasses import asdict

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import infer
from bloom import hash_logp
from data.tasks import SequenceClassification, Task
from hashing import HASHES, NgramLSH, sketch_index
from infer import Predictor, print_prediction
from model import Config, Model
from runtime import FORMAT, InputError, save_checkpoint
from tests.support import ROOT, assert_refused, make_words, run_main, run_script
from tokenizer import BPE, FIRST_WORD_ID, MASK, HashTokenizer, Phrases

LABELS = dict(labels=["up", "down"], pair=False, label="a", scale=None, texts=["review|text"])
SPAN = dict(labels=None, pair=True, stride=5, longest=9, null=True)
SHAPE = dict(layers=1, width=8, heads=2, ffn=8, length=64)


def save(path, tokenizer, words=("a",), task={}):
    """Save a fresh model for a tokenizer's config; return the path."""
    torch.manual_seed(0)
    save_checkpoint(str(path), Model(tokenizer.config), tokenizer.state(), words=list(words), task=task)
    return str(path)


def run_infer(ckpt, *argv):
    """Run infer.py; return what it printed to stdout, as objects if it read a --file."""
    done = run_main(infer.main, "--ckpt", ckpt, *argv)
    assert not done.code, done.err
    return [json.loads(line) for line in done.out.splitlines()] if "--file" in argv else done.out


def predict(predictor, row, **options):
    """Return what predict() says about one text or pair; raise its error."""
    [result] = predictor.predict([row], **options)
    if "error" in result:
        raise InputError(result["error"])
    return result


@pytest.fixture(scope="module")
def paths(tmp_path_factory, bpe):
    """Checkpoints with fresh weights: one for each head and kind of words."""
    folder, words = tmp_path_factory.mktemp("untrained"), make_words(50) + ["cat", "the"]
    lsh = NgramLSH.fit({word: 1 for word in words}, 500)
    phrases = Phrases.train(["new york is the cat"] * 9, 300)
    pieces = dict(split="bpe", subwords=bpe, vocabulary=bpe.units)
    known = dict(split="phrases", subwords=phrases, vocabulary=phrases.units)
    md5 = dict(hash_name="md5", hash=HASHES["md5"].fit(None))
    kinds = dict(
        detect=(dict(emb="proj", bits=32), dict(hash_name="lsh", hash=lsh), {}),
        detect_pieces=(dict(emb="lookup"), pieces, {}),
        fill=(dict(emb="lookup", head="mlm"), pieces, {}),
        missing=(dict(emb="median", buckets=31, head="hash-mlm"), {}, {}),
        missing_proj=(dict(emb="proj", hashes=3, buckets=31, head="hash-mlm"), md5, {}),
        classify=(dict(emb="pool", head="classify"), md5, LABELS),
        classify_phrases=(dict(emb="lookup", head="classify"), known, LABELS),
        classify_pair=(dict(emb="pool", head="classify"), md5, LABELS | dict(pair=True, texts=["first", "second|b"])),
        score=(dict(emb="pool", head="classify", labels=1), md5,
               dict(labels=None, pair=False, label="x|stars", scale=[3.0, 2.0], texts=["text"])),
        answer=(dict(emb="emb", rows=99, head="span"), md5, SPAN),
        answer_pieces=(dict(emb="lookup", head="span"), pieces, SPAN))
    for name, (shape, options, task) in kinds.items():
        rows = dict(rows=FIRST_WORD_ID + len(options["vocabulary"])) if "vocabulary" in options else {}
        save(folder / name, HashTokenizer(Config(**SHAPE | rows | shape), **options), words, task)
    return {name: str(folder / name) for name in kinds}


@pytest.fixture(scope="module")
def untrained(paths):
    return {name: Predictor(path) for name, path in paths.items()}


def test_split_finds_masks_and_leaves_the_other_words_and_pieces_alone(untrained):
    """The pieces around a mask are those of the whole text: no stray space before it or a full stop."""
    _, spans, ids = untrained["detect"].split("Die [MASK] ab[MASK]")
    assert spans == [(0, 3), (4, 10), (11, 13), (13, 19)] and ids[1] == ids[3] == MASK
    p, other = untrained["fill"], BPE.train(["the box of axes"] * 50, size=300)  # has letters that join
    for text in ("the [MASK] sat", "the [MASK].", "[MASK] cat", "[MASK] [MASK]", "the cat[MASK]"):
        words, spans, ids = p.split(text)
        masked = [text[a:b] for word, (a, b) in zip(words, spans) if word == "[MASK]"]
        assert masked == ["[MASK]"] * ids.count(MASK) and len(masked) == text.count("[MASK]") and "Ġ" not in words
    assert p.split("the [MASK]. [MASK] sat")[0] == ["Ġthe", "[MASK]", ".", "[MASK]", "Ġsat"]
    tokenizer = HashTokenizer(p.config, split="bpe", subwords=other, vocabulary=other.units)
    for text in ("the bo[MASK] of", "the [MASK]es of", "the a[MASK]es", "[MASK]s[MASK]", "the[MASK]7[MASK]."):
        spans = [span for _, span in infer.split_masked(tokenizer, text)]
        assert "".join(text[a:b] for a, b in spans).replace(" ", "") == text.replace(" ", "")


HARD = ("[MASK]", "[MASK", " ", "\t", "\n", "\x00", "\ud800", "\udfff", "\x85", "\u2028", "İ", "ﬃ",
        "e\u0301", "👩\u200d👧", "don't", "Ġ", "<unk>", "a" * 10_000, "ab " * 40, "日本語")
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=20) | st.sampled_from(HARD)


@hypothesis.settings(max_examples=25, deadline=None, database=None, derandomize=True, suppress_health_check=[
    hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(text=st.lists(ANY_TEXT, max_size=12).map("".join))
def test_any_text_is_read_by_every_head_or_refused(text, untrained):
    for name in ("detect", "detect_pieces"):
        with contextlib.suppress(InputError):
            words, spans, p = untrained[name].detect(text)
            assert p.shape == (len(words), 3) and torch.allclose(p.sum(-1), torch.ones(len(words)))
            assert len(spans) == len(words) <= 62 and all(0 <= a <= b <= len(text) for a, b in spans)
    for name in ("fill", "missing", "missing_proj"):
        with contextlib.suppress(InputError):
            [rows] = predict(untrained[name], text, k=3).values()
            assert len(rows) == text.count("[MASK]") > 0
            for row in rows:
                scores = [score for _, score in (row if name == "fill" else row["items"])]
                assert len(scores) == 3 and scores == sorted(scores, reverse=True) and math.isfinite(sum(scores))
    for name in ("classify", "classify_phrases"):
        with contextlib.suppress(InputError):
            assert sum(p for _, p in untrained[name].classify(text)) == pytest.approx(1)
    pairs = (text, "the cat sat"), ("who", text), (text, text), ("who", "  a  cat")
    for name, (question, context) in itertools.product(("answer", "answer_pieces"), pairs):
        with contextlib.suppress(InputError):
            for answer, (a, b), p in untrained[name].answer(question, context, 3):
                assert context[a:b] == answer == answer.strip() and 0 <= p <= 1 and (answer or a == b == 0)


def test_texts_that_do_not_fit_are_refused_with_the_reason(untrained):
    for name, call, says in (
            ("detect", lambda p: p.fill_mask("a [MASK]", 1), "objective mlm"),
            ("detect", lambda p: p.detect(" "), "expected words"),
            ("detect", lambda p: p.detect("the [MASK] of a list"), "objective mlm"),
            ("detect", lambda p: p.detect("a " * 63), "at most 64 positions"),
            ("fill", lambda p: p.neighbors("qqqq", 1), "one word"),  # several pieces
            ("fill", lambda p: p.fill_mask("a", 1), r"expected \[MASK\]"),
            ("detect", lambda p: p.neighbors("two words"), "one word .*'two words'"),
            ("detect", lambda p: p.neighbors("日本"), "--near: expected a word with an n-gram .*, got '日本'"),
            ("detect", lambda p: predict(p, 3), "expected 1 .text., got .3"),
            ("detect", lambda p: p.embed(["a", ""]), "row 2: .*expected words"),
            ("missing", lambda p: p.embed(["a"], is_word=True, raw=True), "--raw requires"),
            ("answer", lambda p: p.classify("a"), "finetune.py"),
            ("detect", lambda p: predict(p, ["a", "b"]), "expected 1 .*'b'"),
            ("answer", lambda p: predict(p, ["a"], k=1), "expected 2 .question, context")):
        with pytest.raises(InputError, match=says) as error:
            call(untrained[name])
        assert "\n" not in str(error.value)


def test_detect_and_fill_mask_report_what_the_model_says(untrained, monkeypatch):
    """A head that answers by the ID modulo 3: each word gets its own answer, in the order of the classes."""
    p, fill = untrained["detect"], untrained["fill"]
    [row] = fill.fill_mask("a [MASK] b", 10**6)
    assert sorted(word for word, _ in row) == sorted(fill.tokenizer.words)  # every word, no special token
    monkeypatch.setattr(p.model, "forward", lambda ids, key_mask: F.one_hot(ids % 3, 3) * 20.0)
    assert p.detect("one two three")[2].argmax(-1).tolist() == [i % 3 for i in p.split("one two three")[2]]


def test_fill_mask_of_a_trained_model_names_a_word_that_may_follow(mlm_run, text_path):
    """Two words may follow each: one of them must come out first, for most of the masks."""
    p, right = Predictor(mlm_run), 0
    lines = [line.rstrip(".").split() for line in text_path.read_text().splitlines()]
    pairs = {pair for line in lines for pair in zip(line, line[1:])}
    for line in [line for line in lines if len(line) >= 6][:40]:
        [row] = p.fill_mask(" ".join([*line[:3], "[MASK]", *line[4:6]]), 3)
        right += (line[2], row[0][0]) in pairs and row[0][1] >= row[1][1] >= row[2][1]
    assert right >= 20  # a guess by frequency: 2 of 40


def test_neighbors_are_the_largest_cosines(sr_run):
    p = Predictor(sr_run)
    neighbors, among = p.neighbors("ONE", 7), [word for word in p.words if word != "one"]
    v = p.embed(["one"] + among, is_word=True).astype(float)
    v -= v.mean(0)
    cosines = v[1:] @ v[0] / np.linalg.norm(v[1:], axis=1) / np.linalg.norm(v[0])
    assert neighbors == [(among[i], pytest.approx(cosines[i], abs=1e-4)) for i in np.argsort(-cosines)[:7]]
    bits = p.embed(["one"] + among, is_word=True, raw=True)  # (1+V, T)
    shares = sorted((bits[1:] == bits[0]).mean(1), reverse=True)[:7]
    assert [share for _, share in p.neighbors("one", 7, raw=True)] == pytest.approx(shares)


def test_predict_missing_scores_are_sums_of_hash_probabilities(untrained):
    p = untrained["missing_proj"]
    [found] = p.predict_missing("the [MASK] cat", 9)
    logp = hash_logp(p.logits("hash-mlm", "the [MASK] cat")[0], p.item_map)[0]
    scores = {word: logp[range(3), sketch_index([word], 3, 31)[0]].sum().item() for word in p.words}
    best = [pytest.approx(score, abs=1e-4) for score in sorted(scores.values(), reverse=True)[:9]]
    assert [score for _, score in found["items"]] == best == [scores[word] for word, _ in found["items"]]
    assert found["certified"] and found["total"] == len(p.words)


def test_candidates_may_be_words_that_no_text_had_also_with_a_key(tmp_path, paths):
    words, empty = tmp_path / "words.txt", tmp_path / "empty.txt"
    words.write_text("Xylophone zebra\n\nzebra unheard-of\n")
    words.with_suffix(".csv").write_text("n,text\n1,Xylophone zebra\n2,zebra unheard-of\n")
    empty.touch()
    (columns := tmp_path / "columns.csv").write_text("a,b\nx,y\n")
    (cells := tmp_path / "cells.csv").write_text("text\nx\ny,z\n")  # no word is left out in silence
    config = Config(**SHAPE, emb="weighted", head="hash-mlm", hashes=2, rows=41, weights=31)
    keyed = save(tmp_path / "keyed", HashTokenizer(config, key="s"), make_words(9))
    for file, path in ((words, keyed), (words.with_suffix(".csv"), paths["missing"])):
        out = run_infer(path, "--words", file, "a [MASK]")
        assert "of 5 scored" in out and {*out.split()} >= {"xylophone", "zebra", "unheard", "-", "of"}
    assert "xylophone" in run_infer(paths["detect"], "--near", "zebra", "--words", words)
    for name, file, says in (("missing", tmp_path / "gone.txt", "gone.txt"), ("missing", "", "--words"),
                             ("missing", empty, "--words"), ("fill", words, "--words requires"),
                             ("missing", cells, "another number in 1 of 2 rows, the first 'y | z'"),
                             ("missing", columns, "got a, b. Keep one column, or name it text.")):
        assert_refused(infer.main, ["--ckpt", paths[name], "--words", str(file), "a [MASK]"], says)


def test_items_of_a_set_are_matched_suggested_and_not_repeated(sets_run, pages_path, tmp_path):
    [found] = Predictor(sets_run).predict_missing("Miles  Davis [MASK]", 10**6)
    items = [name for name, _ in found["items"]]
    assert len(items) == 119 and "Miles Davis" not in items
    for text, says in (("Miles Dvis\t", "Miles Davis"), ("[mask]", "Did you mean [MASK]?"), ("a,b [MASK]", "tabs")):
        assert_refused(infer.main, ["--ckpt", str(sets_run), text], says)
    out = run_infer(sets_run, "Miles Davis [MASK]", "--beam", 1, "--top_k", 2)
    assert len(out.splitlines()) == 3 and "of 120 scored" in out
    pages = [json.loads(line)["links"][:2] for line in pages_path.read_text().splitlines()[:3]]
    rows = [dict(title="t", links=[*page, None, "[MASK]"]) for page in pages] + [dict(links=None), dict(links=["x"])]
    (tmp_path / "pages.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rows = run_infer(sets_run, "--file", tmp_path / "pages.jsonl")
    assert [len(row["missing"][0]["items"]) for row in rows[:3]] == [8, 8, 8]
    assert "None" in rows[3]["error"] and "'x'" in rows[4]["error"]
    (tmp_path / "pages.txt").write_text("\t".join(pages[0] + ["[MASK]"]) + "\nMiles Davis [MASK]\n")
    assert [len(row["missing"][0]["items"]) for row in run_infer(sets_run, "--file", tmp_path / "pages.txt")] == [8, 8]


def test_hashed_sets_match_candidates_of_several_words(tmp_path):
    config = Config(**SHAPE, emb="median", buckets=31, head="hash-mlm", order=False, lsh_pairs="all")
    save(tmp_path / "ckpt.pt", HashTokenizer(config, split="items"), ["Miles Davis", "Bill Evans", "x"])
    [found] = Predictor(tmp_path).predict_missing("Miles Davis [MASK]", 9)
    assert dict(found["items"]).keys() == {"Bill Evans", "x"}
    config = Config(**SHAPE | dict(rows=FIRST_WORD_ID + 3), emb="lookup", head="mlm", order=False, lsh_pairs="all")
    save(tmp_path / "lookup", HashTokenizer(config, split="items", vocabulary=["Miles Davis", "Bill Evans", "x"]))
    known = Predictor(tmp_path / "lookup")
    assert [dict(row).keys() for row in known.fill_mask("Miles Davis\t[MASK]")] == [{"Bill Evans", "x"}]
    assert known.fill_mask("Miles Davis\tBill Evans\tx\t[MASK]") == [[]]
    (tmp_path / "names.txt").write_text("Miles  Davis\nGil Evans\n\n")
    (tmp_path / "names.jsonl").write_text('{"items": ["Miles Davis", "Gil Evans"]}\n')
    for file in ("names.txt", "names.jsonl"):
        first, second = run_infer(tmp_path, "--words", tmp_path / file, "Miles Davis [MASK]").splitlines()
        assert "of 2 scored" in first and second.endswith("Gil Evans")


def test_classify_sorts_labels_cuts_long_texts_scales_numbers_and_equals_fine_tuning(untrained):
    labels = untrained["classify"].classify("the cat " * 100)
    assert {label for label, _ in labels} == {"up", "down"} and labels[0][1] >= labels[1][1]
    assert untrained["classify"].classify("the cat " * 100, k=1) == labels[:1]
    assert untrained["classify"].split("good [MASK]")[0] == ["good", "[", "mask", "]"]  # as in fine-tuning
    for name, texts in (("classify", ("one", "two")), ("classify_pair", ("one",)), ("classify", (5,))):
        with pytest.raises(InputError, match="text: expected"):
            untrained[name].classify(*texts)
    [logit], numbers = untrained["score"].logits("classify", "the cat"), untrained["score"].classify("the cat")
    assert numbers == [("stars", pytest.approx(2 * logit.item() + 3))]
    p = untrained["classify_pair"]
    split = dict(first=["the cat", "a b c"], second=["a dog", "d"], labels=["up", "up"])
    task = Task(("first", "second|b"), ("up", "down"), ("accuracy",))
    [inputs, _] = SequenceClassification(task, split, dict(dev=split), p.tokenizer, 64).devs["dev"]
    p.model.set_codes(torch.from_numpy(p.tokenizer.codes()))
    for ids, *pair in zip(inputs, split["first"], split["second"], strict=True):
        expected = p.model(torch.from_numpy(ids)[None].long())[0].softmax(-1).tolist()
        assert dict(p.classify(*pair)) == pytest.approx(dict(zip(("up", "down"), expected)))


def test_answer_looks_into_every_window_of_a_long_context(untrained, monkeypatch):
    """A model that answers with the word "cat": the last word of a context of many windows."""
    p, context = untrained["answer"], " ".join(make_words(90) + ["cat"])
    cat = p.tokenizer.ids(["cat"])[0]
    monkeypatch.setattr(p.model, "forward", lambda ids, mask: 9.0 * torch.stack([ids == cat] * 2, -1))
    [(text, (a, b), first), *rest] = p.answer("who is the cat", context, 4)
    assert text == context[a:b] == "cat" and b == len(context) and first > 0.9 and len(rest) == 3
    assert p.answer("who is the cat", context, 1) == [(text, (a, b), first)]


def test_print_prediction_lists_the_most_suspicious_words_first(capsys):
    p, spans = [[0.9, 0.1, 0.0], [0.2, 0.7, 0.1], [0.5, 0.1, 0.4]], [(0, 1), (2, 3), (4, 5)]
    print_prediction(dict(words=["a", "b", "c"], spans=spans, classes=infer.CLASSES, probabilities=p), "a b c")
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "a {b:shuffled} c" and [line.split()[0] for line in rest] == ["b", "c", "a"]


def test_file_gives_the_same_objects_for_every_kind_of_table(paths, tmp_path):
    """Columns of the checkpoint (review|text), whatever stands beside them; a label is no text."""
    texts, results = ["a zebra", 'a "quagga", twice'], []
    rows = [dict(label="up", review=text, other="x") for text in texts]
    quoted = 'label,text,other\nup,a zebra,x\nup,"a ""quagga"", twice",x\n'
    tabbed = "".join(f"{label}\t{text}\tx\n" for label, text in zip(("label", "up", "up"), ("review", *texts)))
    for name, content in (
            ("in.txt", f"{texts[0]}\n \n{texts[1]}\n"), ("in.jsonl", "\n".join(map(json.dumps, rows))),
            ("in.json", json.dumps(dict(data=rows))), ("in.csv.gz", quoted), ("in.tsv", tabbed)):
        with (gzip.open if name.endswith(".gz") else open)(tmp_path / name, "wt") as file:
            file.write(content)
        rows = run_infer(paths["classify"], "--file", tmp_path / name)
        assert [row.pop("line") for row in rows] == ([1, 3] if name == "in.txt" else [1, 2])
        results.append([(row["texts"], row["labels"]) for row in rows])
    assert all(result == results[0] for result in results) and [text for [text], _ in results[0]] == texts


def test_file_chooses_columns_and_says_which(paths, tmp_path):
    path = tmp_path / "in.csv"
    path.write_text("id,title,body\n1,the cat,a zebra\n2,,\n")
    done = run_main(infer.main, "--ckpt", paths["classify"], "--file", path, "--text", "body")
    first, second = map(json.loads, done.out.splitlines())
    assert first["texts"] == ["a zebra"] and "columns: body" in done.err
    assert second["labels"]  # an empty cell, as in fine-tuning
    [row, _] = run_infer(paths["classify_pair"], "--file", path, "--text", "title, body")
    assert row["texts"] == ["the cat", "a zebra"]
    for name, flags, says in (("classify", (), "id, title, body"), ("classify", ("--text", "gone"), "gone"),
                              ("classify_pair", (), "id, title, body"), ("classify_pair", ("--text", "body"), "body"),
                              ("classify", ("--text", "title,body"), "title,body")):
        assert_refused(infer.main, ["--ckpt", paths[name], "--file", str(path), *flags], "--text", says)
    (tmp_path / "pairs.jsonl").write_text('{"context": "It was Ada.", "id": "7", "question": "Who?"}\n')
    [row] = run_infer(paths["answer"], "--file", tmp_path / "pairs.jsonl", "--top_k", 2)
    assert row["texts"] == ["Who?", "It was Ada."] and len(row["answers"]) == 2
    (tmp_path / "pairs.txt").write_text("Who?\tIt was Ada.\n")
    assert run_infer(paths["answer"], "--file", tmp_path / "pairs.txt", "--top_k", 2) == [row]
    [row, _] = run_infer(paths["classify"], "--file", path, "--near", "--text", "id", "--top_k", 3)
    assert len(row["neighbours"]) == 3


@pytest.mark.parametrize("name", "detect fill missing classify classify_pair score answer".split())
def test_predict_of_a_list_equals_single_texts(untrained, name):
    """Rows of different lengths share batches; bad ones give an error, and the order is kept."""
    p, words, mask = untrained[name], make_words(50), "[MASK] " * (name in ("fill", "missing"))
    rows = [[mask + " ".join(words[i:i + 1 + i % 6])] * len(p.columns) for i in range(infer.BATCH + 9)]
    rows[3] = [None] * len(p.columns)
    results, numbers = p.predict(iter(rows), k=3), lambda x: [float(n) for n in re.findall(r"\d\.[\de-]+", str(x))]
    assert "error" in results[3] and len(results) == len(rows)
    for row, result in zip(rows[:3] + rows[4:], results[:3] + results[4:]):
        assert numbers(result) == pytest.approx(numbers(predict(p, row, k=3)), abs=1e-5)


def test_embed_is_the_mean_of_the_outputs_or_the_embedding(untrained, paths, tmp_path):
    p, texts = untrained["detect"], ["the cat", "cat", "a longer text of words"]
    vectors = p.embed(texts)
    for text, vector in zip(texts, vectors):
        outputs = p.model.encode(torch.tensor(p.read(text)))[0].detach()
        np.testing.assert_allclose(vector, outputs.mean(0), atol=1e-5)
    (tmp_path / "in.txt").write_text("\n".join(texts))
    run_infer(paths["detect"], "--file", tmp_path / "in.txt", "--vectors", tmp_path / "out.npy")
    run_infer(paths["detect"], "--near", "cat", "--vectors", tmp_path / "word.npy")
    written, word = np.load(tmp_path / "out.npy"), np.load(tmp_path / "word.npy")
    assert written.dtype == np.float32 and (written == vectors).all() and (word == p.embed(["cat"], True)).all()
    with pytest.raises(InputError, match="raw: requires is_word"):
        p.embed(texts, raw=True)


def test_file_goes_on_after_a_bad_row(paths, tmp_path):
    (tmp_path / "two.txt").write_text("a b\na zebra\tb\n")
    rows = run_infer(paths["classify_pair"], "--file", tmp_path / "two.txt")
    assert "expected 2" in rows[0]["error"] and rows[1]["labels"]
    assert run_infer(paths["classify"], "--file", tmp_path / "two.txt")[1]["texts"] == ["a zebra\tb"]
    (tmp_path / "cells.csv").write_text("n,text\n1,a\n2,b, c\n3,d\n")
    rows = run_infer(paths["classify"], "--file", tmp_path / "cells.csv")
    assert [(r["line"], *r["texts"], "error" in r) for r in rows] == [(1, "a", False), (2, None, True), (3, "d", False)]
    (tmp_path / "bad.jsonl").write_text('{"text": 3}\n{"no": 1}\n{"text": ["a"]}\n{"text": "a zebra \\ud83d"}\n')
    done = run_script("infer.py", "--ckpt", paths["classify"], "--file", tmp_path / "bad.jsonl", check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["line"] for row in rows] == [1, 2, 3, 4] and rows[3]["texts"] == ["a zebra \ud83d"]
    assert all("expected" in row["error"] for row in rows[:3]) and rows[3]["labels"]


def test_files_and_flags_that_do_not_fit_are_refused(paths, tmp_path):
    for name, content in (("in.txt", "a zebra\n"), ("all.jsonl", '{"text": 3}\n' * 3), ("gap.txt", "a\n\nb"),
                          ("bad.jsonl", '{"'), ("0.txt", ""), ("0.csv", "text\n")):
        (tmp_path / name).write_text(content)
    for argv, says in ((["--file", tmp_path / "gone.txt"], "gone.txt"), (["--file", ""], "--file"),
                       (["--file", tmp_path / "all.jsonl"], "got none"), (["--file", tmp_path / "0.csv"], "got none"),
                       (["--file", tmp_path / "bad.jsonl"], "bad.jsonl"), (["--raw", "a"], "--raw requires"),
                       (["--vectors", "v.npy"], "--vectors requires"),
                       (["--vectors", tmp_path / "v", "--file", tmp_path / "0.txt"], "expected one or more"),
                       (["--vectors", tmp_path / "v", "--file", tmp_path / "gap.txt"], "no empty line with --vectors"),
                       (["a", "--vectors", "no/v"], "No such file or directory: 'no/v'"),
                       (["--text", "body", "a"], "--text requires"), (["--top_k", "0", "a"], "--top_k"),
                       (["--beam", "3", "a"], "--beam"), (["--device", "nowhere", "a"], "--device"),
                       (["a", "--file", tmp_path / "in.txt"], "--file"), (["--ckpt", tmp_path], tmp_path)):
        assert_refused(infer.main, ["--ckpt", paths["classify"], *map(str, argv)], says)
    command = [sys.executable, "infer.py", "--ckpt", paths["classify"], "--file", str(tmp_path / "in.txt")]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and re.fullmatch(r"infer.py: \[Errno 28\].*\n", done.stderr), done.stderr


MISSING = object()
BAD_VALUES = (None, True, -1, 0, 1, 10**12, 1.5, "x", b"x", [], {}, [None], {"x": 1}, torch.zeros(2), MISSING)


def leaves(tree, path=()):
    """Yield the paths to all values of nested dicts and lists."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree[:3]) if isinstance(tree, list) else ()
    for key, value in pairs:
        yield (*path, key)
        yield from leaves(value, (*path, key))


def content_of(predictor, **changes):
    """Return the content of a predictor's checkpoint, config and encoder with changes."""
    config = asdict(predictor.config) | changes.pop("config", {})
    return dict(format=FORMAT, config=config, model=predictor.model.state_dict(), words=predictor.words[:3],
                encoder=predictor.tokenizer.state() | changes, task=predictor.task)


@pytest.mark.parametrize("name", "detect fill missing missing_proj classify answer classify_phrases".split())
def test_hostile_checkpoint_works_or_is_refused(paths, tmp_path, name):
    """Each value that it holds replaced by others, also monstrous ones."""
    good, num_all, num_works, rng = content_of(Predictor(paths[name])), 0, 0, random.Random(0)
    for place in leaves(good):
        if place == ("config", "layers"):  # a million layers take an hour to build, which no check prevents
            continue
        for bad in rng.sample(BAD_VALUES, 2):
            part = content = copy.deepcopy(good)
            for key in place[:-1]:
                part = part[key]
            part[place[-1]] = bad
            if bad is MISSING:
                del part[place[-1]]
            torch.save(content, tmp_path / "ckpt.pt")
            with contextlib.suppress(InputError):
                p = Predictor(tmp_path)
                predict(p, ["the cat" if name == "detect" else "the [MASK] cat"] * len(p.columns), k=2)
                num_works += 1
            num_all += 1
    assert num_all - num_works > 50 and num_works > 3


@pytest.mark.parametrize("head, labels, task", [
    ("span", 2, SPAN | dict(pair=False)), ("span", 2, SPAN | dict(stride=0)), ("span", 2, {}),
    ("classify", 2, dict(labels=None, pair=False, label="score", scale=[0.0, 1.0])),
    ("classify", 1, dict(labels=None, pair=False, label=None, scale=[0.0, 1.0])),
    ("classify", 3, LABELS), ("classify", 2, LABELS | dict(texts=["a", "b"])), ("classify", 2, LABELS | dict(pair=1))])
def test_task_that_does_not_fit_the_model_is_refused(tmp_path, head, labels, task):
    config = Config(emb="median", buckets=9, layers=0, width=8, heads=1, length=64, head=head, labels=labels)
    path = save(tmp_path / "ckpt.pt", HashTokenizer(config), task=task)
    assert_refused(infer.main, ["--ckpt", path, "a", "b"], "task")


def test_parts_of_different_checkpoints_are_refused(untrained, tmp_path):
    detect, fill = untrained["detect"], untrained["fill"]
    for bad, says in ((content_of(detect) | dict(encoder=fill.tokenizer.state()), "tokenizer"),
                      (content_of(fill, vocabulary=fill.tokenizer.words[:-1]), "vocabulary"),
                      (content_of(fill, vocabulary=list(range(300))), "tokenizer"),
                      (content_of(untrained["missing"], config=dict(hashes=255)), "do not fit"),  # at once
                      (content_of(detect, config=dict(width=2**31)), "do not fit"),
                      (content_of(untrained["missing"], config=dict(buckets=2**31)), "do not fit")):
        torch.save(bad, tmp_path / "ckpt.pt")
        assert_refused(infer.main, ["--ckpt", str(tmp_path), "a"], says)


def test_command_line_answers_texts_words_and_a_prompt(sr_run, paths, monkeypatch):
    assert "intact" in run_infer(sr_run, "one two three")
    assert len(run_infer(sr_run, "--near", "one", "--top_k", 3).splitlines()) == 3
    assert run_infer(paths["classify"], "a zebra").split()[0] in ("up", "down")
    monkeypatch.setattr(sys, "stdin", io.StringIO("one two\n\nthree\n"))
    done = run_main(infer.main, "--ckpt", sr_run)  # an empty line is answered, not fatal
    assert done.out.count("> ") == 4 and "expected words" in done.err and not done.code
