"""Tests of infer.py: each ability against an oracle, any text on every head, files, bad input.

CANINE and the bag of words are read back in test_canine.py and test_finetune.py.
"""

import contextlib
import io
import json
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import infer
from bloom import hash_logp
from common import InputError, save_checkpoint
from hashing import HASHES, NgramLSH, sketch_index
from infer import Predictor
from model import Config, Model
from objectives import KINDS
from tests.support import ROOT, assert_refused, make_words, run_main
from tokenizer import CLS, FIRST_WORD_ID, MASK, SEP, HashTokenizer

SIZES = dict(layers=1, width=8, heads=2, ffn=8, length=64)
SET = dict(order=False, lsh_pairs="all")
LABELS = dict(labels=["up", "down"], pair=False, label="a", scale=None, texts=["review|text"])
PAIR = LABELS | dict(pair=True, texts=["first", "second|b"])
NUMBER = LABELS | dict(labels=None, label="x|stars", scale=[3.0, 2.0])
SPAN = dict(labels=None, pair=True, stride=5, longest=9, null=True)
NAMES = ["Miles Davis", "Bill Evans", "x"]


def save(path, words, task, tokenizer_parts, **sizes):
    """Save a fresh model of these sizes, with its tokenizer; return the path as str."""
    torch.manual_seed(0)
    config = Config(**SIZES | sizes)
    tokenizer = HashTokenizer(config, **tokenizer_parts)
    save_checkpoint(str(path), Model(config), tokenizer.state(), words=words, task=task)
    return str(path)


@pytest.fixture(scope="module")
def paths(tmp_path_factory, bpe):
    """Checkpoints with fresh weights, by name: one for each head and kind of words."""
    folder = tmp_path_factory.mktemp("untrained")
    words = [*make_words(50), "cat", "the"]
    made = {}

    def add(name, tokenizer_parts, task, **sizes):
        made[name] = save(folder / name, words, task, tokenizer_parts, **sizes)

    lsh = NgramLSH.fit(dict.fromkeys(words, 1), 500)
    pieces = dict(split="bpe", subwords=bpe, vocabulary=bpe.units)
    rows = FIRST_WORD_ID + len(bpe.units)
    md5 = dict(hash=HASHES["md5"].fit(None))
    add("detect", dict(hash_name="lsh", hash=lsh), {}, emb="proj", bits=32)
    add("fill", pieces, {}, emb="lookup", rows=rows, head="mlm")
    add("missing", dict(key="s"), {}, emb="median", buckets=31, head="hash-mlm")
    add("classify", md5, LABELS, emb="pool", head="classify")
    add("classify_pair", md5, PAIR, emb="pool", head="classify")
    add("number", md5, NUMBER, emb="pool", head="classify", labels=1)
    add("answer", md5, SPAN, emb="emb", rows=99, head="span")
    add("answer_pieces", pieces, SPAN, emb="lookup", rows=rows, head="span")
    return made


@pytest.fixture(scope="module")
def untrained(paths):
    return {name: Predictor(path) for name, path in paths.items()}


@pytest.fixture
def sets(tmp_path):
    """A Predictor of hashed names."""
    parts = dict(split="items")
    sizes = dict(emb="median", buckets=31, head="hash-mlm", **SET)
    path = save(tmp_path / "sets.pt", NAMES, {}, parts, **sizes)
    return Predictor(path)


def run_file(ckpt, path, *flags):
    """Run infer.py --file; return its objects."""
    done = run_main(infer.main, "--ckpt", ckpt, "--file", path, *flags)
    assert not done.code, done.err
    return [json.loads(line) for line in done.out.splitlines()]


# [MASK] in a text


@pytest.mark.parametrize("name, text, words", [
    ("detect", "Die [MASK] ab[MASK].", ["die", "[MASK]", "ab", "[MASK]", "."]),
    ("fill", "the [MASK]. [MASK] sat", ["Ġthe", "[MASK]", ".", "[MASK]", "Ġsat"]),  # not "Ġ."
    ("fill", "the[MASK]cat", ["Ġthe", "[MASK]", "cat"]),  # no space, not "Ġcat"
    ("classify", "good [MASK]", ["good", "[", "mask", "]"]),  # as in fine-tuning
])
def test_split_leaves_the_words_around_a_mask_alone(untrained, name, text, words):
    found, spans, ids = untrained[name].split(text)
    assert found == words
    assert ids.count(MASK) == words.count("[MASK]")
    written = [text[a:b].strip().lower() for a, b in spans]
    assert written == [word.strip("Ġ").lower() for word in words]


@pytest.mark.parametrize("text, names", [
    ("Miles Davis [MASK] x", ["Miles Davis", "[MASK]", "x"]),  # longest match between spaces
    ("Miles [MASK] Davis", ["Miles", "[MASK]", "Davis"]),  # no name reaches across a mask
    ("x\tGil Evans [MASK]\ty", ["x", "Gil Evans", "[MASK]", "y"]),  # new names between tabs
])
def test_split_finds_masks_between_names(sets, text, names):
    assert sets.split(text)[0] == names


# Any text


HARD = ("[MASK]", "[MASK", " ", "\t", "\n", "\x00", "\ud800", "\x85", "İ", "ﬃ", "e\u0301", "日本",
        "👩\u200d👧", "don't", "Ġ", "<unk>", "a" * 1_000, "ab " * 40)
ANY_PART = st.text(st.characters(exclude_categories=()), max_size=20) | st.sampled_from(HARD)


@hypothesis.settings(max_examples=25, deadline=None, database=None, derandomize=True,
                     suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(text=st.lists(ANY_PART, max_size=12).map("".join))
def test_any_text_is_read_by_every_head_or_refused(text, untrained):
    with contextlib.suppress(InputError):
        words, spans, p = untrained["detect"].detect(text)
        assert len(words) == len(spans) == len(p)
        assert torch.allclose(p.sum(-1), torch.ones(len(words)))
    for name in ("fill", "missing"):
        with contextlib.suppress(InputError):
            [masks] = untrained[name].predict(text).values()
            assert len(masks) == text.count("[MASK]") > 0
    assert sum(p for _, p in untrained["classify"].classify(text)) == pytest.approx(1)
    for name in ("answer", "answer_pieces"):
        for answer, (a, b), _ in untrained[name].answer("who", text):
            assert text[a:b] == answer == answer.strip()


@pytest.mark.parametrize("name, call, message", [
    ("detect", lambda p: p.fill_mask("a [MASK]"), "expected head mlm (pretrain.py"),
    ("detect", lambda p: p.detect("the [MASK]"), "expected no [MASK]"),
    ("detect", lambda p: p.detect("a " * 63), "expected at most 64 positions"),
    ("fill", lambda p: p.fill_mask("a"), "expected [MASK]"),
    ("classify_pair", lambda p: p.classify("one"), "text: expected 2 (first, second|b)"),
    ("classify", lambda p: p.neighbors(""), "expected one word or piece"),
    ("detect", lambda p: p.neighbors("日本"), "expected a word with an n-gram that the hash knows"),
    ("missing", lambda p: p.neighbors("a", raw=True), "--raw requires"),
])
def test_text_that_does_not_fit_is_refused(untrained, name, call, message):
    with pytest.raises(InputError) as error:
        call(untrained[name])
    assert message in str(error.value)


def test_predict_unknown_head_is_refused(paths):
    predictor = Predictor(paths["detect"])
    predictor.config.head = "toy"
    with pytest.raises(InputError, match="got toy"):
        predictor.predict("a text")


# Words


def test_detect_reports_what_the_model_says(untrained, monkeypatch):
    """A head that answers by the ID modulo 3: each word gets its own answer."""
    p = untrained["detect"]

    def forward(ids, key_mask):
        return 20.0 * F.one_hot(ids % 3, 3)  # (1, L, 3)

    monkeypatch.setattr(p.model, "forward", forward)
    _, _, ids = p.split("one two three")
    _, _, probabilities = p.detect("one two three")
    assert probabilities.argmax(-1).tolist() == [i % 3 for i in ids]


def test_fill_mask_ranks_all_words_and_no_special_token(untrained, monkeypatch):
    """A head that prefers rare words, whose IDs are large."""
    p = untrained["fill"]
    logits = torch.arange(p.config.rows)[None] / 100  # (1, N)
    monkeypatch.setattr(p.model, "forward", lambda ids, key_mask, positions: logits)
    [pairs] = p.fill_mask("a [MASK] b", 10**6)
    assert [word for word, _ in pairs] == p.tokenizer.words[::-1]
    assert sum(share for _, share in pairs) == pytest.approx(1)


def test_neighbors_are_the_largest_cosines(sr_run):
    p = Predictor(sr_run)
    v = p.embed_words(["one", *p.words]).numpy().astype(float)
    v -= v.mean(0)
    v /= np.linalg.norm(v, axis=1, keepdims=True)
    cosines = v[1:] @ v[0]  # (V,)
    best = np.argsort(-cosines)[:7]
    neighbors = p.neighbors("ONE", 7)
    assert [word for word, _ in neighbors] == [p.words[i] for i in best]
    assert [value for _, value in neighbors] == pytest.approx(cosines[best], abs=1e-4)


def test_neighbors_raw_is_the_share_of_equal_bits(sr_run):
    p = Predictor(sr_run)
    [(word, share)] = p.neighbors("one", 1, raw=True)
    bits = p.tokenizer.hash.bits(["one", *p.words], p.config.bits)
    shares = (bits[1:] == bits[0]).mean(1)  # (V,)
    assert share == pytest.approx(shares.max())
    assert shares[p.words.index(word)] == shares.max()


# Hashes of words, item sets


def test_predict_missing_scores_are_sums_of_hash_probabilities(untrained):
    """Also with a key, which another tokenizer does not have."""
    p = untrained["missing"]
    [found] = p.predict_missing("the [MASK] cat", 9)
    logits = p.logits("hash-mlm", "the [MASK] cat")
    logp = hash_logp(logits, p.item_map)[0]  # (k, R)
    scores = []
    for buckets in sketch_index(p.words, 5, 31, key="s"):
        score = 0.0
        for j, bucket in enumerate(buckets):
            score += logp[j, bucket].item()
        scores.append(score)
    best = sorted(scores, reverse=True)[:9]
    assert [score for _, score in found["items"]] == pytest.approx(best, abs=1e-4)
    assert found["certified"]
    assert found["total"] == len(p.words)


def test_candidates_may_be_words_that_no_text_had(paths, tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("Xylophone zebra\n\nzebra unheard-of\n")
    flags = ["--words", path, "a [MASK]"]
    done = run_main(infer.main, "--ckpt", paths["missing"], *flags)
    assert "of 5 scored" in done.out
    assert {"xylophone", "zebra", "unheard", "-", "of"} <= set(done.out.split())


@pytest.mark.parametrize("name, content, message", [
    ("missing", "", "--words: expected words"),
    ("fill", "text\na\n", "--words requires --near"),  # its candidates are the vocabulary
    ("missing", "text\ny,z\n", "expected 1 (text), got [None]"),  # none is left out in silence
])
def test_candidates_that_do_not_fit_are_refused(paths, tmp_path, name, content, message):
    path = tmp_path / "words.csv"
    path.write_text(content)
    assert_refused(infer.main, ["--ckpt", paths[name], "--words", path, "a [MASK]"], message)


def test_hashed_items_of_a_set_are_not_proposed_again(sets):
    [found] = sets.predict_missing("Miles Davis [MASK]")
    assert {name for name, _ in found["items"]} == {"Bill Evans", "x"}


def test_looked_up_items_of_a_set_are_not_proposed_again(tmp_path):
    parts = dict(split="items", vocabulary=NAMES)
    sizes = dict(emb="lookup", rows=FIRST_WORD_ID + len(NAMES), head="mlm", **SET)
    path = save(tmp_path / "sets.pt", [], {}, parts, **sizes)
    p = Predictor(path)
    [pairs] = p.fill_mask("Miles Davis\t[MASK]")
    assert {name for name, _ in pairs} == {"Bill Evans", "x"}
    assert p.fill_mask("\t".join([*NAMES, "[MASK]"])) == [[]]  # the set has all items


def test_unknown_item_is_refused_with_similar_names(sets_run):
    with pytest.raises(InputError, match="one of 120 items, .* got 'Miles Dvis'.*Miles Davis"):
        Predictor(sets_run).predict_missing("Miles Dvis\t[MASK]")


def test_file_of_sets_reads_lists_and_lines(sets_run, tmp_path):
    page = ["Miles Davis", None, "[MASK]"]
    rows = [
        dict(title="t", links=page),
        dict(links=["no item", "[MASK]"]),
    ]
    (tmp_path / "pages.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "pages.txt").write_text("Miles Davis [MASK]")
    good, bad = run_file(sets_run, tmp_path / "pages.jsonl", "--top_k", 999)
    [line] = run_file(sets_run, tmp_path / "pages.txt", "--top_k", 999)
    assert good["missing"] == line["missing"]
    assert len(good["missing"][0]["items"]) == 119
    assert "'no item'" in bad["error"]


# Fine-tuned models


def test_classify_reads_a_pair_as_in_fine_tuning(untrained):
    """[CLS] A [SEP] [SEP] B [SEP], and the best label comes first."""
    p = untrained["classify_pair"]
    labels = p.classify("the cat", "a dog")
    first = p.tokenizer.ids(["the", "cat"]).tolist()
    second = p.tokenizer.ids(["a", "dog"]).tolist()
    inputs = torch.tensor([[CLS, *first, SEP, SEP, *second, SEP]])
    up, down = p.model(inputs)[0].softmax(-1).tolist()
    assert dict(labels) == pytest.approx(dict(up=up, down=down))
    assert labels[0][1] == max(up, down)
    result = p.predict("the cat", "a dog", k=1)
    assert result == dict(label=labels[0][0], labels=labels[:1])


def test_regression_is_scaled_back_and_named(untrained):
    p = untrained["number"]
    logit = p.logits("classify", "the cat").item()
    number = 2 * logit + 3
    assert p.predict("the cat") == dict(label=number, labels=[("stars", number)])


def test_answer_looks_into_every_window_of_a_long_context(untrained, monkeypatch):
    """A model that answers with the word "cat": the last word of a context of many windows."""
    p = untrained["answer"]
    context = " ".join([*make_words(90), "cat"])
    [cat] = p.tokenizer.ids(["cat"])

    def point_at_cat(ids, key_mask):
        is_cat = 9.0 * (ids == cat)
        return torch.stack([is_cat, is_cat], -1)

    monkeypatch.setattr(p.model, "forward", point_at_cat)
    best, *others = p.answer("who is the cat", context, 4)
    assert best[:2] == ("cat", (len(context) - 3, len(context)))
    assert best[2] > 0.9
    assert len(others) == 3
    assert p.answer("who is the cat", context, 1) == [best]  # p is not of the k best


# What people read


@pytest.mark.parametrize("result, lines", [
    (dict(words=["a", "b"], spans=[(0, 1), (2, 3)], probabilities=[[0.9, 0.1, 0], [0.2, 0.7, 0.1]]),
     ["a {b:shuffled} c",  # the most suspicious word comes first
      "                 b   intact 20.0%   shuffled 70.0%   random 10.0%",
      "                 a   intact 90.0%   shuffled 10.0%   random  0.0%"]),
    (dict(masks=[[("Ġcat", 0.5)]]), ["[MASK] 1", "               cat    50.0%"]),
    (dict(missing=[dict(items=[("cat", -1.5)], certified=True, scored=2, total=3_000)]),
     ["[MASK] 1   2 of 3,000 scored, certified: provably the best", "     -1.50   cat"]),
    (dict(neighbours=[("cat", 0.75)]), ["               cat   0.750"]),
    (dict(answers=[("", (0, 0), 0.25)]), ["   25.0%   (no answer)   [0:0]"]),
])
def test_print_prediction_shows_every_kind_of_result(capsys, result, lines):
    infer.print_prediction(result, "a b c")
    assert capsys.readouterr().out.splitlines() == lines


def test_prompt_goes_on_after_a_bad_text(sr_run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one two\n\nthree\n"))
    done = run_main(infer.main, "--ckpt", sr_run)
    assert not done.code
    assert done.out.count("> ") == 4
    assert "infer.py: text: expected words" in done.err


# Files


@pytest.mark.parametrize("name, content", [
    ("in.txt", 'a zebra\na "quagga", twice\n'),
    ("in.csv", 'label,text,other\nup,a zebra,x\nup,"a ""quagga"", twice",x\n'),
    ("in.jsonl", '{"review": "a zebra"}\n{"other": "x", "review": "a \\"quagga\\", twice"}\n'),
])
def test_file_gives_the_same_objects_for_every_kind(paths, untrained, tmp_path, name, content):
    """Columns of the checkpoint, review|text, whatever stands beside them."""
    (tmp_path / name).write_text(content)
    rows = run_file(paths["classify"], tmp_path / name)
    assert [row["line"] for row in rows] == [1, 2]
    assert [row["texts"] for row in rows] == [["a zebra"], ['a "quagga", twice']]
    for row in rows:
        (label, p), _ = untrained["classify"].classify(*row["texts"])
        assert row["label"] == label
        assert row["labels"][0] == [label, p]


@pytest.mark.parametrize("name, flags, texts", [
    ("classify_pair", ["--text", "title, body"], ["the cat", "a zebra"]),
    ("classify", ["--near", "--text", "n"], ["one"]),
    ("classify", [], None),  # three columns, neither review nor text
    ("classify", ["--text", "gone"], None),
])
def test_file_reads_the_chosen_columns_or_names_all(paths, tmp_path, name, flags, texts):
    path = tmp_path / "in.csv"
    path.write_text("n,title,body\none,the cat,a zebra\n")
    if texts is None:
        argv = ["--ckpt", paths[name], "--file", path, *flags]
        assert_refused(infer.main, argv, path, "columns n, title, body", "--text")
    else:
        [row] = run_file(paths[name], path, *flags)
        assert row["texts"] == texts
        assert "error" not in row


@pytest.mark.parametrize("model, name, content, is_good", [
    ("classify", "in.csv", "n,text\n1,a\n2,b, c\n3,\n", [True, False, True]),  # cells; empty
    ("classify", "in.jsonl", '{"text": 3}\n{"no": 1}\n{"text": "\\ud83d"}', [False, False, True]),
    ("answer", "in.txt", "Who?\tAda.\nWho?\n", [True, False]),  # a tab between the two
])
def test_file_goes_on_after_a_bad_row(paths, tmp_path, model, name, content, is_good):
    (tmp_path / name).write_text(content)
    rows = run_file(paths[model], tmp_path / name, "--text", "text")
    assert [row["line"] for row in rows] == list(range(1, len(rows) + 1))
    assert ["error" not in row for row in rows] == is_good


def test_damaged_file_is_read_up_to_the_damage(paths, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a"}\n{"')
    done = run_main(infer.main, "--ckpt", paths["classify"], "--file", path)
    assert done.code == 2
    assert json.loads(done.out)["texts"] == ["a"]
    assert str(path) in done.err


@pytest.mark.parametrize("flags, message", [
    (["--file", "gone.txt"], "gone.txt"),
    (["--file", "bad.jsonl"], "expected rows that this model can read"),  # all rows failed
    (["a", "--file", "bad.jsonl"], "got both"),
    (["--vectors", "v.npy"], "expected 1 (review|text), got []"),
    (["a", "--vectors", "no/v"], "no/v"),
])
def test_flags_that_do_not_fit_are_refused(paths, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"text": 3}\n')
    assert_refused(infer.main, ["--ckpt", paths["classify"], *flags], message)


def test_full_disk_ends_in_one_line(paths, tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("a zebra\n")
    command = [sys.executable, "infer.py", "--ckpt", paths["classify"], "--file", path]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("infer.py: [Errno 28]")
    assert done.stderr.count("\n") == 1


# Vectors


def test_vectors_of_a_file_are_the_means_of_the_outputs(untrained, paths, tmp_path):
    p = untrained["detect"]
    out = tmp_path / "v"  # gets no ending
    (tmp_path / "in.txt").write_text("the cat\ncat\n")
    flags = ["--file", tmp_path / "in.txt", "--vectors", out]
    assert not run_main(infer.main, "--ckpt", paths["detect"], *flags).code
    vectors = np.load(out)
    assert vectors.dtype == np.float32
    assert (vectors == p.embed(["the cat", "cat"])).all()
    ids = p.tokenizer.ids(["the", "cat"]).tolist()
    outputs = p.model.encode(torch.tensor([[CLS, *ids, SEP]]))[0]
    np.testing.assert_allclose(vectors[0], outputs.mean(0).detach(), atol=1e-6)


def test_vectors_of_words_are_those_of_the_embedding(untrained, paths, tmp_path):
    out = tmp_path / "v.npy"
    run_main(infer.main, "--ckpt", paths["detect"], "--near", "cat", "--vectors", out)
    assert (np.load(out) == untrained["detect"].embed_words(["cat"]).numpy()).all()


def test_vectors_name_the_row_that_has_none(paths, tmp_path):
    """An empty line would shift the vectors of all later rows."""
    path = tmp_path / "gap.txt"
    path.write_text("a\n\nb\n")
    argv = ["--ckpt", paths["detect"], "--file", path, "--vectors", tmp_path / "v"]
    assert_refused(infer.main, argv, "row 2: text: expected words")
    assert not (tmp_path / "v").exists()


# Checkpoints


@pytest.mark.parametrize("damage", [
    lambda parts: parts.pop("encoder"),
    lambda parts: parts["encoder"].update(hash=dict(bits=3)),  # of another hash
    lambda parts: parts["config"].update(width=16),  # of other weights
    lambda parts: parts["task"].clear(),
])
def test_damaged_checkpoint_ends_in_one_line(paths, tmp_path, damage):
    parts = torch.load(paths["classify"])
    damage(parts)
    path = tmp_path / "ckpt.pt"
    torch.save(parts, path)
    assert_refused(infer.main, ["--ckpt", path, "a"], f"infer.py: {path}: could not be read")
