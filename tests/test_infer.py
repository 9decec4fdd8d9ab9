"""infer.py: any text on every head, what comes out, files, checkpoints that do not fit, the command line."""

import contextlib
import copy
import gzip
import io
import json
import math
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import asdict

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import infer
from bloom import hash_logp
from hashing import HASHES, NgramLSH, sketch_index
from infer import Predictor, predict, print_prediction
from model import Config, Model
from runtime import FORMAT, InputError, save_checkpoint
from tests.support import ROOT, assert_refused, make_words, run_main, run_script
from tokenizer import BPE, CLS, FIRST_WORD_ID, MASK, SEP, HashTokenizer, Phrases

LABELS = dict(labels=["up", "down"], pair=False, label="a", scale=None, texts=["review|text"])
SPAN = dict(labels=None, pair=True, stride=5, longest=9, null=True)
SHAPE = dict(layers=1, width=8, heads=2, ffn=8, length=64)


def save(path, tokenizer, words=("a",), task={}):
    """Save a fresh model for a tokenizer's config; return the path."""
    torch.manual_seed(0)
    save_checkpoint(str(path), Model(tokenizer.config), tokenizer.state(), words=list(words), task=task)
    return str(path)


def run_infer(ckpt, *argv):
    """Run infer.py; return what it printed to stdout."""
    done = run_main(infer.main, "--ckpt", ckpt, *argv)
    assert not done.code, done.err
    return done.out


def run_file(ckpt, path, *argv):
    """Run infer.py --file; return the objects that it printed."""
    return [json.loads(line) for line in run_infer(ckpt, "--file", path, *argv).splitlines()]


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
        classify_pair=(dict(emb="pool", head="classify"), md5,
                       LABELS | dict(pair=True, texts=["first", "second|b"])),
        score=(dict(emb="pool", head="classify", labels=1), md5,
               dict(labels=None, pair=False, label="x|stars", scale=[3.0, 2.0], texts=["text"])),
        answer=(dict(emb="emb", rows=99, head="span"), md5, SPAN),
        answer_pieces=(dict(emb="lookup", head="span"), pieces, SPAN))
    made = {}
    for name, (shape, options, task) in kinds.items():
        rows = dict(rows=FIRST_WORD_ID + len(options["vocabulary"])) if "vocabulary" in options else {}
        tokenizer = HashTokenizer(Config(**SHAPE | rows | shape), **options)
        made[name] = save(folder / name, tokenizer, words, task)
    return made


@pytest.fixture(scope="module")
def untrained(paths):
    return {name: Predictor(path) for name, path in paths.items()}


def test_split_finds_masks_and_offsets(untrained):
    text = "Die [MASK] ab[MASK]"
    _, spans, ids = untrained["detect"].split(text)
    assert [text[a:b] for a, b in spans] == ["Die", "[MASK]", "ab", "[MASK]"] and ids[1] == ids[3] == MASK


def test_split_masks_among_pieces_leaves_the_other_pieces_alone(untrained):
    """The pieces around a mask are those of the whole text: no stray space before it or a full stop."""
    p, other = untrained["fill"], BPE.train(["the box of axes"] * 50, size=300)  # has letters that join
    for text in ("the [MASK] sat", "the [MASK].", "[MASK] cat", "[MASK] [MASK]", "the cat[MASK]"):
        words, spans, ids = p.split(text)
        masked = [text[a:b] for word, (a, b) in zip(words, spans) if word == "[MASK]"]
        assert masked == ["[MASK]"] * ids.count(MASK) and len(masked) == text.count("[MASK]")
        assert "Ġ" not in words
    assert p.split("the [MASK]. [MASK] sat")[0] == ["Ġthe", "[MASK]", ".", "[MASK]", "Ġsat"]
    tokenizer = HashTokenizer(p.config, split="bpe", subwords=other, vocabulary=other.units)
    for text in ("the bo[MASK] of", "the [MASK]es of", "the a[MASK]es", "[MASK]s[MASK]", "the[MASK]7[MASK]."):
        spans = [span for _, span in infer.split_masked(tokenizer, text)]
        assert "".join(text[a:b] for a, b in spans).replace(" ", "") == text.replace(" ", "")


HARD = ("[MASK]", "[MASK", " ", "\t", "\n", "\x00", "\ud800", "\udfff", "\x85", "\u2028", "İ", "ﬃ",
        "e\u0301", "👩\u200d👧", "don't", "Ġ", "<unk>", "a" * 10_000, "ab " * 40, "日本語")
ANY_TEXT = st.lists(st.text(st.characters(exclude_categories=()), max_size=20) | st.sampled_from(HARD),
                    max_size=12).map("".join)


@hypothesis.settings(max_examples=25, deadline=None, database=None, derandomize=True, suppress_health_check=[
    hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(text=ANY_TEXT)
def test_any_text_is_read_by_every_head_or_refused(text, untrained):
    for name in ("detect", "detect_pieces"):
        with contextlib.suppress(InputError):
            words, spans, p = untrained[name].detect(text)
            assert p.shape == (len(words), 3) and torch.allclose(p.sum(-1), torch.ones(len(words)))
            assert len(spans) == len(words) <= 62 and all(0 <= a <= b <= len(text) for a, b in spans)
    for name in ("fill", "missing", "missing_proj"):
        with contextlib.suppress(InputError):
            [rows] = predict(untrained[name], [text], k=3, beam=None).values()
            assert len(rows) == text.count("[MASK]") > 0
            for row in rows:
                scores = [score for _, score in (row if name == "fill" else row["items"])]
                assert len(scores) == 3 and scores == sorted(scores, reverse=True)
                assert math.isfinite(sum(scores))
    for name in ("classify", "classify_phrases"):
        with contextlib.suppress(InputError):
            assert sum(p for _, p in untrained[name].classify(text)) == pytest.approx(1)
    for name in ("answer", "answer_pieces"):
        for question, context in ((text, "the cat sat"), ("who", text), (text, text)):
            with contextlib.suppress(InputError):
                for answer, (a, b), p in untrained[name].answer(question, context, 3):
                    assert context[a:b] == answer and 0 <= p <= 1


def test_texts_that_do_not_fit_are_refused_with_the_reason(untrained):
    for name, call, says in (
            ("detect", lambda p: p.fill_mask("a [MASK]", 1), "objective mlm"),
            ("detect", lambda p: p.detect(" "), "expected words"),
            ("detect", lambda p: p.detect("the [MASK] of a list"), "objective mlm"),
            ("detect", lambda p: p.detect("a " * 63), "at most 64 positions"),
            ("fill", lambda p: p.neighbors("qqqq", 1), "one word"),  # several pieces
            ("fill", lambda p: p.fill_mask("a", 1), r"expected \[MASK\]"),
            ("missing", lambda p: p.neighbors("a", 1, among=["a"]), "words to search among"),
            ("answer", lambda p: p.classify("a"), "finetune.py"),
            ("detect", lambda p: predict(p, ["a", "b"]), "expected 1 .*'b'"),
            ("answer", lambda p: predict(p, ["a"], k=1), "expected 2 .question, context")):
        with pytest.raises(InputError, match=says) as error:
            call(untrained[name])
        assert "\n" not in str(error.value)


def test_detect_and_fill_mask_report_what_the_model_says(untrained, monkeypatch):
    """A head that answers by the ID modulo 3: each word gets its own answer, in the order of the classes."""
    p = untrained["fill"]
    [row] = p.fill_mask("a [MASK] b", 10**6)
    assert sorted(word for word, _ in row) == sorted(p.tokenizer.words)  # every word, no special token
    p = untrained["detect"]
    monkeypatch.setattr(p.model, "forward", lambda ids, masked_positions: F.one_hot(ids % 3, 3) * 20.0)
    probabilities = p.detect("one two three four")[2]
    assert probabilities.argmax(-1).tolist() == [i % 3 for i in p.split("one two three four")[2]]


def test_fill_mask_of_a_trained_model_names_a_word_that_may_follow(mlm_run, text_path):
    """Two words may follow each: one of them must come out first, for most of the masks."""
    p, followers, right = Predictor(mlm_run), {}, 0
    lines = [line.rstrip(".").split() for line in text_path.read_text().splitlines()]
    for a, b in (pair for line in lines for pair in zip(line, line[1:])):
        followers.setdefault(a, set()).add(b)
    for line in [line for line in lines if len(line) >= 6][:40]:
        [row] = p.fill_mask(" ".join([*line[:3], "[MASK]", *line[4:6]]), 3)
        right += row[0][0] in followers[line[2]] and row[0][1] >= row[1][1] >= row[2][1]
    assert right >= 20  # a guess by frequency: 2 of 40


def test_neighbors_are_the_largest_cosines(sr_run):
    p = Predictor(sr_run)
    neighbors, among = p.neighbors("ONE", 7), [word for word in p.words if word != "one"]
    v = p.model.embed(p.to_device(p.tokenizer.ids(["one"] + among)))[0].detach().double().numpy()
    v -= v.mean(0)
    cosines = v[1:] @ v[0] / np.linalg.norm(v[1:], axis=1) / np.linalg.norm(v[0])
    assert neighbors == [(among[i], pytest.approx(cosines[i], abs=1e-4)) for i in np.argsort(-cosines)[:7]]


def test_neighbors_find_a_misspelled_word_under_lsh_and_not_under_md5(tmp_path):
    """True from the first step on: Proj keeps the angles between bits."""
    words = ["receive", "the", "separate", "definitely", *make_words(300, 11, "abcdefghijklmnop")]
    for name, finds in (("lsh", True), ("md5", False)):
        config = Config(layers=0, width=512, heads=4, ffn=8, length=9)
        hash = HASHES[name].fit(dict.fromkeys(words, 1))
        p = Predictor(save(tmp_path / name, HashTokenizer(config, hash_name=name, hash=hash), words))
        for wrong, right in (("recieve", "receive"), ("seperate", "separate"), ("definately", "definitely")):
            assert (p.neighbors(wrong, 1)[0][0] == right) == finds


def test_predict_missing_scores_are_sums_of_hash_probabilities(untrained):
    p = untrained["missing_proj"]
    [found] = p.predict_missing("the [MASK] cat", 9)
    logp = hash_logp(p.mask_logits("the [MASK] cat")[1], p.item_map)[0]
    index = {word: sketch_index([word], 3, 31)[0] for word in p.words}
    scores = {word: sum(logp[j, i].item() for j, i in enumerate(index[word])) for word in p.words}
    best = sorted(scores.values(), reverse=True)[:9]
    assert [score for _, score in found["items"]] == pytest.approx(best, abs=1e-4)
    assert all(score == pytest.approx(scores[word], abs=1e-4) for word, score in found["items"])
    assert found["certified"] and found["total"] == len(p.words)


def test_candidates_may_be_words_that_no_text_had(tmp_path, paths):
    """--words, also of a model with a secret key."""
    (tmp_path / "words.txt").write_text("Xylophone zebra\n\nzebra unheard-of\n")
    (tmp_path / "words.csv").write_text("n,text\n1,Xylophone zebra\n2,zebra unheard-of\n")
    (tmp_path / "empty.txt").write_text("")
    config = Config(**SHAPE, emb="weighted", head="hash-mlm", hashes=2, rows=41, weights=31)
    keyed = save(tmp_path / "keyed", HashTokenizer(config, key="s"), make_words(9))
    for name, path in (("words.txt", keyed), ("words.csv", paths["missing"])):
        out = run_infer(path, "--words", tmp_path / name, "a [MASK]")
        assert "of 5 scored" in out and {*out.split()} >= {"xylophone", "zebra", "unheard", "-", "of"}
    assert "xylophone" in run_infer(paths["detect"], "--near", "zebra", "--words", tmp_path / "words.txt")
    for name, words, says in (("missing", tmp_path / "gone.txt", "gone.txt"), ("missing", "", "not found"),
                              ("missing", tmp_path / "empty.txt", "--words"),
                              ("fill", tmp_path / "words.txt", "--words requires")):
        assert_refused(infer.main, ["--ckpt", paths[name], "--words", str(words), "a [MASK]"], says)


def test_items_of_a_set_are_matched_suggested_and_not_repeated(sets_run, pages_path, tmp_path):
    [found] = Predictor(sets_run).predict_missing("Miles  Davis [MASK]", 10**6)
    items = [name for name, _ in found["items"]]
    assert len(items) == 119 and "Miles Davis" not in items
    for text, says in (("Miles Dvis\t", "Miles Davis"), ("[mask]", "Did you mean [MASK]?"),
                       ("a,b [MASK]", "tabs")):
        assert_refused(infer.main, ["--ckpt", str(sets_run), text], says)
    out = run_infer(sets_run, "Miles Davis [MASK]", "--beam", 1, "--top_k", 2)
    assert len(out.splitlines()) == 3 and "of 120 scored" in out
    pages = [json.loads(line)["links"][:2] for line in pages_path.read_text().splitlines()[:3]]
    rows = [dict(title="t", links=page + ["[MASK]"]) for page in pages]
    rows += [dict(links=None), dict(links=["x"])]
    (tmp_path / "pages.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rows = run_file(sets_run, tmp_path / "pages.jsonl")
    assert [len(row["missing"][0]["items"]) for row in rows[:3]] == [8, 8, 8]
    assert "None" in rows[3]["error"] and "'x'" in rows[4]["error"]
    (tmp_path / "pages.txt").write_text("\t".join(pages[0] + ["[MASK]"]) + "\nMiles Davis [MASK]\n")
    assert [len(row["missing"][0]["items"]) for row in run_file(sets_run, tmp_path / "pages.txt")] == [8, 8]


def test_hashed_sets_match_candidates_of_several_words(tmp_path):
    config = Config(**SHAPE, emb="median", buckets=31, head="hash-mlm", order=False, lsh_pairs="all")
    save(tmp_path / "ckpt.pt", HashTokenizer(config, split="items"), ["Miles Davis", "Bill Evans", "x"])
    [found] = Predictor(tmp_path).predict_missing("Miles Davis [MASK]", 9)
    assert dict(found["items"]).keys() == {"Bill Evans", "x"}
    (tmp_path / "names.txt").write_text("Miles Davis\nGil Evans\n\n")
    out = run_infer(tmp_path, "--words", tmp_path / "names.txt", "Miles Davis [MASK]").splitlines()
    assert "of 2 scored" in out[0] and len(out) == 2 and out[1].endswith("Gil Evans")


def test_classify_sorts_labels_cuts_long_texts_and_scales_numbers(untrained):
    labels = untrained["classify"].classify("the cat " * 100)
    assert {label for label, _ in labels} == {"up", "down"} and labels[0][1] >= labels[1][1]
    assert untrained["classify"].classify("the cat " * 100, k=1) == labels[:1]
    p = untrained["score"]
    [(label, value)] = p.classify("the cat")
    logit = p.logits([CLS, *p.split("the cat")[2], SEP]).item()
    assert label == "stars" and value == pytest.approx(2 * logit + 3)


def test_answer_looks_into_every_window_of_a_long_context(untrained, monkeypatch):
    """A model that answers with the word "cat": the last word of a context of many windows."""
    p, words = untrained["answer"], make_words(90) + ["cat"]
    cat = p.tokenizer.ids(["cat"])[0]
    monkeypatch.setattr(p.model, "forward",
                        lambda ids, masked_positions: 9.0 * torch.stack([ids == cat] * 2, -1))
    context = " ".join(words)
    [(text, (a, b), first), *rest] = p.answer("who is the cat", context, 4)
    assert text == context[a:b] == "cat" and b == len(context) and first > 0.9 and len(rest) == 3


def test_print_prediction_lists_the_most_suspicious_words_first(capsys):
    p = [[0.9, 0.1, 0.0], [0.2, 0.7, 0.1], [0.5, 0.1, 0.4]]
    print_prediction(dict(words=["a", "b", "c"], spans=[(0, 1), (2, 3), (4, 5)], probabilities=p), "a b c")
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "a {b:shuffled} c" and [line.split()[0] for line in rest] == ["b", "c", "a"]


def test_file_gives_the_same_objects_for_every_kind_of_table(paths, tmp_path):
    """Columns of the checkpoint (review|text), whatever stands beside them; a label is no text."""
    texts, results = ["a zebra", 'a "quagga", twice'], []
    rows = [dict(label="up", review=text, other="x") for text in texts]
    quoted = "".join('up,"%s",x\n' % text.replace('"', '""') for text in texts)
    tabbed = "".join(f"up\t{text}\tx\n" for text in texts)
    for name, content in (
            ("in.txt", f"{texts[0]}\n \n{texts[1]}\n"), ("in.jsonl", "\n".join(map(json.dumps, rows))),
            ("in.json", json.dumps(dict(data=rows))), ("in.csv.gz", "label,text,other\n" + quoted),
            ("in.tsv", "label\treview\tother\n" + tabbed)):
        with (gzip.open if name.endswith(".gz") else open)(tmp_path / name, "wt") as file:
            file.write(content)
        rows = run_file(paths["classify"], tmp_path / name)
        assert [row.pop("line") for row in rows] == ([1, 3] if name == "in.txt" else [1, 2])
        results.append([(row["texts"], row["labels"]) for row in rows])
    assert all(result == results[0] for result in results) and [text for [text], _ in results[0]] == texts


def test_file_chooses_columns_and_says_which(paths, tmp_path):
    path = tmp_path / "in.csv"
    path.write_text("id,title,body\n1,the cat,a zebra\n2,,\n")
    done = run_main(infer.main, "--ckpt", paths["classify"], "--file", path, "--text", "body")
    first, second = map(json.loads, done.out.splitlines())
    assert first["texts"] == ["a zebra"] and "expected words" in second["error"]
    assert "columns: body" in done.err
    rows = run_file(paths["classify_pair"], path, "--text", "title,body")
    assert rows[0]["texts"] == ["the cat", "a zebra"]
    for name, flags, says in (("classify", (), "id, title, body"), ("classify", ("--text", "gone"), "gone"),
                              ("classify_pair", (), "id, title, body"),
                              ("classify_pair", ("--text", "body"), "body"),
                              ("classify", ("--text", "title,body"), "title,body")):
        assert_refused(infer.main, ["--ckpt", paths[name], "--file", str(path), *flags], "--text", says)
    (tmp_path / "pairs.jsonl").write_text('{"context": "It was Ada.", "id": "7", "question": "Who?"}\n')
    [row] = run_file(paths["answer"], tmp_path / "pairs.jsonl", "--top_k", 2)
    assert row["texts"] == ["Who?", "It was Ada."] and len(row["answers"]) == 2
    (tmp_path / "pairs.txt").write_text("Who?\tIt was Ada.\n")
    assert run_file(paths["answer"], tmp_path / "pairs.txt", "--top_k", 2) == [row]
    rows = run_file(paths["classify"], path, "--near", "--text", "id", "--top_k", 3)
    assert len(rows[0]["neighbours"]) == 3


def test_file_goes_on_after_a_bad_row(paths, tmp_path):
    (tmp_path / "two.txt").write_text("a\tb\na zebra\n")
    rows = run_file(paths["classify"], tmp_path / "two.txt")
    assert "expected 1" in rows[0]["error"] and rows[1]["labels"]
    bad = '{"text": 3}\n{"no": 1}\n{"text": ["a"]}\n{"text": "a zebra \\ud83d"}\n'
    (tmp_path / "bad.jsonl").write_text(bad)
    done = run_script("infer.py", "--ckpt", paths["classify"], "--file", tmp_path / "bad.jsonl", check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["line"] for row in rows] == [1, 2, 3, 4] and rows[3]["texts"] == ["a zebra \ud83d"]
    assert all("expected" in row["error"] for row in rows[:3]) and rows[3]["labels"]


def test_file_that_cannot_be_read_or_written_is_refused(paths, tmp_path):
    (tmp_path / "in.txt").write_text("a zebra\n")
    (tmp_path / "bad.jsonl").write_text('{"text"\n')
    for argv, says in ((("--file", tmp_path / "gone.txt"), "gone.txt"), (("--file", ""), "not found"),
                       (("--file", tmp_path / "bad.jsonl"), "bad.jsonl"),
                       (("--text", "body", "a"), "--text requires"),
                       (("a", "--file", tmp_path / "in.txt"), "--file")):
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
    good, outcomes, rng = content_of(Predictor(paths[name])), Counter(), random.Random(0)
    for place in leaves(good):
        for bad in rng.sample(BAD_VALUES, 2):
            part = content = copy.deepcopy(good)
            for key in place[:-1]:
                part = part[key]
            part[place[-1]] = bad
            if bad is MISSING:
                del part[place[-1]]
            torch.save(content, tmp_path / "ckpt.pt")
            try:
                p = Predictor(tmp_path)
                text = "the cat" if name == "detect" else "the [MASK] cat"
                predict(p, [text] * len(p.columns), k=2, beam=None)
                outcomes["works"] += 1
            except InputError:
                outcomes["refused"] += 1
    assert outcomes["refused"] > 50 and outcomes["works"] > 3


@pytest.mark.parametrize("head, labels, task", [
    ("span", 2, SPAN | dict(pair=False)), ("span", 2, SPAN | dict(stride=0)), ("span", 2, {}),
    ("classify", 2, dict(labels=None, pair=False, label="score", scale=[0.0, 1.0])),
    ("classify", 1, dict(labels=None, pair=False, label=None, scale=[0.0, 1.0])),
    ("classify", 3, LABELS), ("classify", 2, LABELS | dict(texts=["a", "b"])),
    ("classify", 2, LABELS | dict(pair=1))])
def test_task_that_does_not_fit_the_model_is_refused(tmp_path, head, labels, task):
    config = Config(emb="median", buckets=9, layers=0, width=8, heads=1, length=64, head=head, labels=labels)
    path = save(tmp_path / "ckpt.pt", HashTokenizer(config), task=task)
    assert_refused(infer.main, ["--ckpt", path, "a", "b"], "task")


def test_parts_of_different_checkpoints_are_refused(untrained, tmp_path):
    detect, fill = untrained["detect"], untrained["fill"]
    for bad, says in ((content_of(detect) | dict(encoder=fill.tokenizer.state()), "tokenizer"),
                      (content_of(fill, vocabulary=fill.tokenizer.words[:-1]), "vocabulary"),
                      (content_of(fill, vocabulary=list(range(300))), "word is not a str"),
                      (content_of(untrained["missing"], config=dict(buckets=2**31)), "do not fit")):
        torch.save(bad, tmp_path / "ckpt.pt")
        with pytest.raises(InputError, match=says) as error:
            Predictor(tmp_path)
        assert "\n" not in str(error.value)


def test_command_line_answers_texts_words_and_a_prompt(sr_run, paths, monkeypatch):
    assert "intact" in run_infer(sr_run, "one two three")
    assert len(run_infer(sr_run, "--near", "one", "--top_k", 3).splitlines()) == 3
    assert run_infer(paths["classify"], "a zebra").split()[0] in ("up", "down")
    monkeypatch.setattr(sys, "stdin", io.StringIO("one two\n\nthree\n"))
    done = run_main(infer.main, "--ckpt", sr_run)  # an empty line is answered, not fatal
    assert done.out.count("> ") == 4 and "expected words" in done.err and not done.code


def test_command_line_refuses_flags_that_do_not_fit(sr_run, paths, tmp_path):
    for flag, value in (("--top_k", "0"), ("--beam", "3"), ("--device", "nowhere")):
        assert_refused(infer.main, ["--ckpt", str(sr_run), flag, value, "a"], flag)
    assert_refused(infer.main, ["--ckpt", str(tmp_path), "a"], str(tmp_path))
    assert_refused(infer.main, ["a"], "--ckpt")
