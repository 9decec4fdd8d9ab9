"""Tests of infer.py: each method against an oracle, any text on every head, files, bad input.

That a fine-tuned model gives the labels, numbers and answers that were scored is tested in
test_finetune.py and test_canine.py; that a misspelling is near its word in test_all.py.
"""

import contextlib
import gzip
import io
import json
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
from hashing import MD5, sketch_index
from infer import Predictor
from model import Config, Model
from objectives import KINDS
from tests.support import assert_refused, make_words, run_main
from tokenizer import FIRST_WORD_ID, MASK, HashTokenizer

WORDS = [*make_words(50), "cat", "the"]
NAMES = ["Miles Davis", "Bill Evans", "x"]
LABELS = dict(labels=["up", "down"], texts=["review|text"])
SPAN = dict(stride=5, longest=9, null=True)


@pytest.fixture(scope="module")
def paths(tmp_path_factory, bpe, lsh):
    """Checkpoints with fresh weights, by name: one for each head and kind of words."""
    folder = tmp_path_factory.mktemp("untrained")
    made = {}

    def add(name, tokenizer_parts, task={}, words=WORDS, **sizes):
        torch.manual_seed(0)
        config = Config(layers=1, width=8, heads=2, ffn=8, length=64, lsh_pairs="all", **sizes)
        tokenizer = HashTokenizer(config, **tokenizer_parts)
        made[name] = str(folder / name)
        save_checkpoint(made[name], Model(config), tokenizer.state(), words=words, task=task)

    pieces = dict(split="bpe", subwords=bpe, vocabulary=bpe.units)
    lookup = dict(emb="lookup", rows=FIRST_WORD_ID + len(bpe.units))
    median = dict(emb="median", buckets=31, head="hash-mlm")
    add("detect", dict(hash_name="lsh", hash=lsh), emb="proj", bits=32)
    add("index", dict(hash_name="lsh", hash=lsh), emb="emb", rows=50)
    add("fill", pieces, **lookup, head="mlm")
    add("missing", dict(key="s"), **median)
    add("classify", dict(hash=MD5()), LABELS, emb="pool", head="classify")
    add("answer", pieces, SPAN, **lookup, head="span")
    add("set", dict(split="items"), words=NAMES, **median, order=False)
    names = dict(split="items", vocabulary=NAMES)
    add("fixed_set", names, emb="lookup", rows=FIRST_WORD_ID + 3, head="mlm", order=False)
    return made


@pytest.fixture(scope="module")
def untrained(paths):
    """A Predictor for each of these."""
    return {name: Predictor(path) for name, path in paths.items()}


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
    ("fill", "the\ue000[MASK]", ["Ġthe", "î", "Ģ", "Ģ", "[MASK]"]),  # the filler's character stays
    ("classify", "good [MASK]", ["good", "[", "mask", "]"]),  # as in fine-tuning
    ("set", "Miles Davis [MASK] x", ["Miles Davis", "[MASK]", "x"]),  # longest match of names
    ("set", "Miles [MASK] Davis", ["Miles", "[MASK]", "Davis"]),  # no name reaches across a mask
    ("set", "x\tGil Evans [MASK]\ty", ["x", "Gil Evans", "[MASK]", "y"]),  # new names, by tabs
])
def test_split_leaves_the_words_around_a_mask_alone(untrained, name, text, words):
    found, _ = untrained[name].split(text)
    ids = untrained[name].token_ids(found)
    assert found == words
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
        assert [text[a:b].lower() for a, b in spans] == words
        assert len(p) == len(words)
    for name in ("fill", "missing"):
        with contextlib.suppress(InputError):
            [masks] = untrained[name].predict(text).values()
            assert len(masks) == text.count("[MASK]") > 0
    assert sum(p for _, p in untrained["classify"].classify(text)) == pytest.approx(1)
    for answer, (a, b), _ in untrained["answer"].answer("who", text):
        assert text[a:b] == answer == answer.strip()


@pytest.mark.parametrize("name, call, message", [
    ("detect", lambda p: p.fill_mask("a [MASK]"), "expected head mlm, got sr"),
    ("detect", lambda p: p.detect("the [MASK]"), "--objective hash-mlm, or --emb lookup"),
    ("detect", lambda p: p.detect("a " * 63), "expected at most 64 positions"),
    ("fill", lambda p: p.fill_mask("a"), "expected [MASK]"),
    ("set", lambda p: p.predict_missing("x"), "A set is one text, line or cell"),
    ("fixed_set", lambda p: p.fill_mask("Miles Dvis\t[MASK]"), "tabs, got 'Miles Dvis'"),
    ("classify", lambda p: p.classify("a", "b"), "text: expected 1 (review|text)"),
    ("classify", lambda p: p.answer("a", "b"), "expected head span, got classify"),
    ("classify", lambda p: p.neighbors(""), "expected one word or piece"),
    ("detect", lambda p: p.neighbors("日本"), "expected a word with an n-gram that the hash knows"),
    ("index", lambda p: p.neighbors("日本"), "expected a word with an n-gram that the hash knows"),
])
def test_text_that_does_not_fit_is_refused(untrained, name, call, message):
    with pytest.raises(InputError) as error:
        call(untrained[name])
    assert message in str(error.value)


# Words


def test_detect_reports_what_the_model_says(untrained, monkeypatch):
    """A head that answers by the ID modulo 3: each word gets its own answer."""
    p = untrained["detect"]
    monkeypatch.setattr(p.model, "forward", lambda ids: 20.0 * F.one_hot(ids % 3, 3))  # (1, L, 3)
    words, _ = p.split("one two three")
    ids = p.token_ids(words)
    _, _, probabilities = p.detect("one two three")
    assert probabilities.argmax(-1).tolist() == [i % 3 for i in ids]


def test_fill_mask_ranks_all_words_and_no_special_token(untrained, monkeypatch):
    """A head that prefers rare words, whose IDs are large."""
    p = untrained["fill"]
    logits = torch.arange(p.config.rows)[None] / 100  # (1, N)
    monkeypatch.setattr(p.model, "forward", lambda ids, masked_positions: logits)
    [pairs] = p.fill_mask("a [MASK] b", 10**6)
    assert [word for word, _ in pairs] == p.tokenizer.words[::-1]
    assert sum(share for _, share in pairs) == pytest.approx(1)


def test_neighbors_are_the_largest_cosines(sr_run):
    p = Predictor(sr_run)
    ids = p.to_batch(p.tokenizer.ids(["one", *p.words]))  # (1, 1 + V)
    p.refresh_codes()
    v = p.model.embed(ids)[0]  # (1 + V, d)
    v = v - v.mean(0)
    cosines = F.cosine_similarity(v[1:], v[:1])  # (V,)
    values, best = cosines.topk(7)
    neighbors = p.neighbors("ONE", 7)
    assert [word for word, _ in neighbors] == [p.words[i] for i in best]
    assert [value for _, value in neighbors] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("name, word, num_notes", [
    ("missing", "cat", 0),
    ("missing", "neverseen", 1),  # its rows are those of other words
    ("fill", "sat", 0),  # a piece of the vocabulary, though not among the candidates
])
def test_neighbors_of_a_word_that_may_be_new_have_a_note(untrained, name, word, num_notes):
    p = untrained[name]
    p.neighbors(word)
    assert len(p.notes) == num_notes


# Longer and empty texts


def test_truncated_text_is_judged_as_its_start(paths, untrained):
    """Law: what is cut off changes nothing."""
    p = Predictor(paths["detect"], truncate=True)
    words, spans, probabilities = p.detect("cat " * 63)
    assert p.notes == ["cut to 64 positions (--length)"]
    of_start = untrained["detect"].detect("cat " * 62)
    assert (words, spans) == of_start[:2]
    torch.testing.assert_close(probabilities, of_start[2])


def test_truncated_set_has_no_special_tokens(paths):
    p = Predictor(paths["set"], truncate=True)
    assert len(p.read(["\t".join(["x", "[MASK]"] * 40)])) == 64


@pytest.mark.parametrize("name, texts, notes", [
    ("classify", [""], ["a text has no words"]),
    ("classify", ["cat " * 62], []),
    ("classify", ["cat " * 63], ["cut to 64 positions (--length)"]),
    ("answer", ["who", ""], ["a text has no words"]),
    ("answer", ["who", "cat " * 63], []),  # read in windows
])
def test_notes_say_how_a_text_was_read(untrained, name, texts, notes):
    untrained[name].predict(*texts)
    assert untrained[name].notes == notes


# Hashes of words, item sets


def test_predict_missing_scores_are_sums_of_hash_probabilities(untrained):
    """Also with a key, which another tokenizer does not have."""
    p = untrained["missing"]
    [found] = p.predict_missing("the [MASK] cat", 9)
    _, _, logits = p.read_masks("the [MASK] cat")
    logp = hash_logp(logits, p.item_map)[0]  # (k, R)
    scores = []
    for buckets in sketch_index(p.words, 5, 31, key="s"):
        scores.append(logp[range(5), buckets].sum().item())
    best = sorted(scores, reverse=True)[:9]
    assert [score for _, score in found["items"]] == pytest.approx(best, abs=1e-4)
    assert found["total"] == len(p.words)


def test_candidates_may_be_words_that_no_text_had(paths, tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("Xylophone zebra\n\nzebra unheard-of\n")
    done = run_main(infer.main, "--ckpt", paths["missing"], "--words", path, "a [MASK]")
    assert "of 5 scored" in done.out
    assert {"xylophone", "zebra", "unheard", "-", "of"} <= set(done.out.split())


@pytest.mark.parametrize("name, content, message", [
    ("missing", "", "words.csv: expected words, got none"),
    ("fill", "text\na\n", "--words requires --near"),  # its candidates are the vocabulary
    ("missing", "text\ny,z\n", "text: expected text, got none"),  # no row is left out in silence
])
def test_candidates_that_do_not_fit_are_refused(paths, tmp_path, name, content, message):
    path = tmp_path / "words.csv"
    path.write_text(content)
    assert_refused(infer.main, ["--ckpt", paths[name], "--words", path, "a [MASK]"], message)


def test_hashed_items_of_a_set_are_not_proposed_again(untrained):
    [found] = untrained["set"].predict_missing("Miles Davis [MASK]")
    assert {name for name, _ in found["items"]} == {"Bill Evans", "x"}


@pytest.mark.parametrize("shown, others", [
    (["Miles Davis"], {"Bill Evans", "x"}),
    (NAMES, set()),  # all items: the probabilities are NaN
])
def test_looked_up_items_of_a_set_are_not_proposed_again(untrained, shown, others):
    [pairs] = untrained["fixed_set"].fill_mask("\t".join([*shown, "[MASK]"]))
    assert {name for name, _ in pairs} == others


# Fine-tuned models


@pytest.mark.parametrize("num_words, is_cut", [(30, False), (31, True)])  # of (64 - 4) / 2
def test_question_that_was_cut_is_noted(untrained, num_words, is_cut):
    predictor = untrained["answer"]
    question = "?" * (num_words - 1)  # BPE puts a piece for a space before it
    assert len(predictor.split(question)[0]) == num_words
    predictor.answer(question, "the cat sat there")
    assert ("the question was cut" in "".join(predictor.notes)) == is_cut


def test_answer_probability_does_not_depend_on_how_many_are_listed(untrained):
    question = "who is the cat", "the cat sat there " * 30  # many windows
    answers = untrained["answer"].answer(*question, 4)
    assert len(answers) == 4
    assert untrained["answer"].answer(*question, 1) == answers[:1]


# What people read


@pytest.mark.parametrize("result, lines", [
    (dict(words=["a", "b"], spans=[(0, 1), (2, 3)], probabilities=[[0.9, 0.1, 0], [0.2, 0.7, 0.1]]),
     ["a {b:shuffled} c",  # the most suspicious word comes first
      "                 b   intact 20.0%   shuffled 70.0%   random 10.0%",
      "                 a   intact 90.0%   shuffled 10.0%   random  0.0%"]),
    (dict(words=["a"], spans=[(0, 1)], probabilities=[[0.9, 0.1, 0]]),
     ["a b c", "No word is marked: each is likeliest intact.",
      "                 a   intact 90.0%   shuffled 10.0%   random  0.0%"]),
    (dict(missing=[dict(items=[("cat", -1.5)], scored=2, total=3_000)]),
     ["[MASK] 1   2 of 3,000 scored by sums of log-probabilities, certified: provably the best",
      "     -1.50   cat"]),
    (dict(labels=[("Ġcat", 0.75)]), ["               cat   0.750"]),
    (dict(labels=[("a" * 18, 0.75), ("b" * 41, 0.2), ("c", 0.05)]),  # up to 40 characters align
     [" " * 24 + "a" * 18 + "   0.750", "  " + "b" * 41 + "   0.200", " " * 41 + "c   0.050"]),
    (dict(labels=[("a", 0.75)], notes=["a text has no words"]),
     ["                 a   0.750", "note: a text has no words"]),
    (dict(answers=[("", (0, 0), 0.25)]), ["   25.0%   (no answer)   [0:0]"]),
])
def test_print_prediction_shows_what_the_pages_print(capsys, result, lines):
    infer.print_prediction(result, "a b c", 8)
    assert capsys.readouterr().out.splitlines() == lines


@pytest.mark.parametrize("flags, num_words", [([], 8), (["--top_k", "3"], 3)])
def test_top_k_limits_the_words_that_detect_lists(paths, flags, num_words):
    done = run_main(infer.main, "--ckpt", paths["detect"], "a b c d e f g h i j", *flags)
    listed = [line for line in done.out.splitlines() if "   intact " in line]
    assert len(listed) == num_words


def test_prompt_goes_on_after_a_bad_text(paths, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one two\n\nthree\n"))
    done = run_main(infer.main, "--ckpt", paths["detect"])
    assert not done.code
    assert "infer.py: text: expected words" in done.err
    assert "three" in done.out
    assert "> " not in done.out  # no terminal, no prompt


# Files


def test_file_gives_what_the_method_gives(paths, untrained, tmp_path):
    (tmp_path / "in.txt").write_text("a zebra\nan owl\n")
    rows = run_file(paths["classify"], tmp_path / "in.txt")
    for number, text in enumerate(["a zebra", "an owl"]):
        labels = [list(pair) for pair in untrained["classify"].classify(text)]
        expected = dict(line=number + 1, texts=[text], label=labels[0][0], labels=labels)
        assert rows[number] == expected


TABLE = "n,title,body\none,the cat,a zebra\n"


def test_items_of_a_line_are_cut_at_the_separator(sets_run, tmp_path):
    """So their names may have spaces; others are refused one by one, as unknown."""
    first, second, *_ = Predictor(str(sets_run)).items
    path = tmp_path / "sets.txt"
    path.write_text(f"{first}; {second}; [MASK]\n")
    [row] = run_file(str(sets_run), path, "--sep", ";")
    assert len(row["missing"]) == 1


def test_the_only_column_of_lists_is_read(sets_run, tmp_path):
    """As pretrain.py does."""
    first, second, *_ = Predictor(str(sets_run)).items
    path = tmp_path / "sets.jsonl"
    path.write_text(json.dumps(dict(n=1, items=[first, second, "[MASK]"])))
    [row] = run_file(str(sets_run), path)
    assert row["texts"] == [f"{first}\t{second}\t[MASK]"]
    assert len(row["missing"]) == 1


@pytest.mark.parametrize("model, name, content, flags, texts", [
    ("classify", "in.csv", "n,text\n1,a zebra\n", [], ["a zebra"]),  # the model's, review|text
    ("classify", "in.jsonl", '{"text": "", "review": "a zebra"}', [], ["a zebra"]),
    ("classify", "in.jsonl", '{"n": 1, "body": "a zebra"}', [], ["a zebra"]),  # the only text
    ("answer", "in.csv", TABLE, ["--text", "title, body"], ["the cat", "a zebra"]),
    ("classify", "in.csv", "n;text\n1;a, b\n", ["--sep", ";"], ["a, b"]),
    ("answer", "in.txt", "Who?|Ada.\n", ["--sep", "|"], ["Who?", "Ada."]),
    ("classify", "in.csv", TABLE, ["--near", "--text", "n"], ["one"]),
])
def test_file_is_read_by_column(paths, tmp_path, model, name, content, flags, texts):
    (tmp_path / name).write_text(content)
    [row] = run_file(paths[model], tmp_path / name, *flags)
    assert row["texts"] == texts
    assert "error" not in row


@pytest.mark.parametrize("model, flags", [
    ("classify", []),  # neither review nor text
    ("classify", ["--text", "gone"]),
    ("answer", []),  # two texts, but which is the question?
])
def test_file_without_the_column_is_refused_with_all_names(paths, tmp_path, model, flags):
    path = tmp_path / "in.csv"
    path.write_text("title,body\nthe cat,a zebra\n")
    argv = ["--ckpt", paths[model], "--file", path, *flags]
    assert_refused(infer.main, argv, path, "columns title, body", "--text")


@pytest.mark.parametrize("model, name, content, is_good", [
    ("classify", "in.csv", "n,text\n1,a\n2,b, c\n3,\n", [True, False, True]),  # cells; empty
    ("classify", "in.jsonl", '{"text": 3}\n{"no": 1}\n{"text": "\\ud83d"}', [False, False, True]),
    ("classify", "in.jsonl", '[3]\n{"text": "a"}\n{"text"\n', [False, True, False]),
    ("classify", "in.jsonl", '{"text": ["a"]}\n{"text": "a b"}\n', [False, True]),  # no text
    ("answer", "in.txt", "Who?\tAda.\nWho?\n", [True, False]),  # a tab between the two
])
def test_file_goes_on_after_a_bad_row(paths, tmp_path, model, name, content, is_good):
    (tmp_path / name).write_text(content)
    rows = run_file(paths[model], tmp_path / name, "--text", "text")
    assert ["error" not in row for row in rows] == is_good


def test_column_is_chosen_by_more_than_the_first_row(paths, tmp_path):
    """The first row has no text, and its only column is none."""
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": "a1"}\n{"id": "a2", "text": "the cat"}\n')
    rows = run_file(paths["detect"], path)
    assert "error" in rows[0]
    assert rows[1]["texts"] == ["the cat"]


def test_column_without_a_value_is_no_text(paths, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"note": null, "title": "the cat"}\n')
    [row] = run_file(paths["detect"], path)
    assert row["texts"] == ["the cat"]


def test_sep_does_not_delete_characters_of_a_text(paths, tmp_path):
    """It parts the names of a set. A model of texts refuses the row."""
    path = tmp_path / "in.txt"
    path.write_text("one,two\nthree\n")
    argv = ["--ckpt", paths["detect"], "--file", path, "--sep", ","]
    assert_refused(infer.main, argv, "text: expected 1 (text), got [['one', 'two']]")


def test_empty_number_that_is_kept_is_null(paths, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "the cat", "score": NaN}\n')
    [row] = run_file(paths["detect"], path, "--keep", "score")
    assert row["kept"] == dict(score=None)


def test_file_counts_on_stderr_what_a_reader_could_overlook(paths, tmp_path):
    path = tmp_path / "in.csv"
    path.write_text(f"n,text\n1,a\n2,\n3\n4,{'c ' * 99}\n")
    done = run_main(infer.main, "--ckpt", paths["classify"], "--file", path)
    assert not done.code
    _, errors, empty, cut = done.err.splitlines()  # after the name of the column
    assert errors.startswith("1 of 4 rows have an error (3), the first is row 3: text: expected ")
    assert empty == "1 of 4 rows: a text has no words"
    assert cut == "1 of 4 rows: cut to 64 positions (--length)"


@pytest.mark.parametrize("num_empty, numbers", [
    (5, "(2, 3, 4, 5, 6)"),
    (6, "(2, 3, 4, 5, 6, ...)"),
])
def test_first_five_rows_with_an_error_are_named(paths, tmp_path, num_empty, numbers):
    path = tmp_path / "in.txt"
    path.write_text("a\n" + "\n" * num_empty)
    done = run_main(infer.main, "--ckpt", paths["detect"], "--file", path)
    assert f"{num_empty} of {num_empty + 1} rows have an error {numbers}, the first" in done.err


def test_file_that_breaks_keeps_what_was_written(paths, tmp_path):
    path = tmp_path / "in.txt.gz"
    path.write_bytes(gzip.compress(b"the cat\n" * 101)[:-8])  # without its end
    done = run_main(infer.main, "--ckpt", paths["detect"], "--file", path)
    assert done.code == 2
    lines = done.out.splitlines()
    assert len(lines) == 101
    assert json.loads(lines[-1])["words"] == ["the", "cat"]
    assert "in.txt.gz: could not be read as .txt after row 101: EOFError" in done.err


def test_file_is_scored_and_columns_are_kept(paths, untrained, tmp_path):
    """A row without a label that the model has keeps its prediction and is not scored."""
    path = tmp_path / "in.csv"
    path.write_text("id,text,gold\n7,a zebra,up\n8,an owl,down\n9,,up\n10,a,Up\n")
    done = run_main(infer.main, "--ckpt", paths["classify"], "--file", path, "--label", "gold",
                    "--keep", "id, gold")
    rows = [json.loads(line) for line in done.out.splitlines()]
    assert rows[1]["kept"] == dict(id="8", gold="down")
    assert all("label" in row for row in rows)
    message = "--label gold (upper and lower case differ): expected a label (up, down), got 'Up'."
    assert rows[3]["error"] == message
    is_right = [row["label"] == row["kept"]["gold"] for row in rows[:3]]
    assert f"accuracy {100 * np.mean(is_right):.2f}, macro_f1 " in done.err
    assert done.err.endswith(" of 3 rows\n")


@pytest.mark.parametrize("description, predicted, truth, line", [
    (dict(name="mrpc"), ["equivalent"] * 4, ["equivalent"] * 3 + ["not_equivalent"],
     "accuracy 75.00, f1 85.71 of 4 rows"),
    (dict(name="own", texts=["a"], labels=["x", "y"]), ["x", "y"], ["x", "x"],
     "accuracy 50.00, macro_f1 33.33 of 2 rows"),
    (dict(name="own", texts=["a"], labels=None), [1.0, 2.0, 4.0], [0.1, 0.2, 0.3],
     "spearman 100.00, pearson 98.20 of 3 rows"),
])
def test_scores_are_those_of_the_task(capsys, description, predicted, truth, line):
    infer.print_scores(infer.find_task(description), predicted, truth)
    assert capsys.readouterr().err.strip() == line


@pytest.mark.parametrize("model, flags, message", [
    ("classify", ["--label", "no"], "in.csv: expected the columns no (--label, --keep), got text"),
    ("classify", ["--keep", "text,no"], "expected the columns text, no"),
    ("classify", ["--label", "text", "--near"], "--label requires a model that was fine-tuned"),
    ("detect", ["--label", "text"], "--label requires a model that was fine-tuned to classify"),
    ("classify", ["--keep", "text", "--vectors", "v.npy"], "--keep requires objects"),
])
def test_columns_that_do_not_fit_are_refused(paths, tmp_path, monkeypatch, model, flags, message):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "in.csv"
    path.write_text("text\na\n")
    assert_refused(infer.main, ["--ckpt", paths[model], "--file", path, *flags], message)


@pytest.mark.parametrize("flags, message", [
    (["--file", "bad.jsonl"], "expected rows that this model can read"),  # all rows failed
    (["a", "--file", "bad.jsonl"], "got both"),
    (["--file", "bad.jsonl"], "row 1: text: expected 1 (review|text), got [3]"),
    (["--file", "/dev/stdin"], "/dev/stdin: expected a file in .txt"),
    (["a", "--text", "review"], "--text, --label and --keep require --file"),
    (["a", "--keep", "review"], "--text, --label and --keep require --file"),
    (["--file", "a", "--text", "b", "--label", "b"], "--text: expected other columns"),
    (["--vectors", "v.npy"], "expected 1 (review|text), got []."),
    (["--vectors", "v.npy", "a", "b"], "got ['a', 'b']. A pair requires a model of pairs. Many"),
    (["--vectors", "v.csv", "a"], "--vectors: expected a name that ends in .npy, got v.csv"),
    (["--vectors", "v.npy", "--near", "a"], "not allowed with"),
    (["a", "--sep", ";"], "--sep require --file"),
])
def test_flags_that_do_not_fit_are_refused(paths, tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"text": 3}\n')
    assert_refused(infer.main, ["--ckpt", paths["classify"], *flags], message)


# Vectors


def test_vectors_of_a_file_are_the_means_of_the_outputs(untrained, paths, tmp_path):
    out = tmp_path / "new" / "folder" / "v.npy"
    (tmp_path / "in.txt").write_text("the cat\ncat\n")
    flags = ["--file", tmp_path / "in.txt", "--vectors", out]
    assert not run_main(infer.main, "--ckpt", paths["detect"], *flags).code
    vectors = np.load(out)
    assert vectors.shape == (2, 8)
    p = untrained["detect"]
    ids = p.to_batch(p.read(["the cat"]))  # (1, L)
    p.refresh_codes()
    outputs = p.model.encode(ids)[0]  # (L, d)
    np.testing.assert_allclose(vectors[0], outputs.mean(0), atol=1e-6)


def test_vectors_of_a_row_in_error_are_nan(paths, tmp_path):
    """Left out, the row would shift the vectors of all later ones."""
    path = tmp_path / "gap.txt"
    path.write_text("a\n\nb\n")
    done = run_main(infer.main, "--ckpt", paths["detect"], "--file", path, "--vectors",
                    tmp_path / "v.npy")
    assert not done.code
    assert "1 of 3 rows have an error (2), the first is row 2: text: expected words" in done.err
    vectors = np.load(tmp_path / "v.npy")
    assert vectors.dtype == np.float32
    assert np.isnan(vectors).all(1).tolist() == [False, True, False]
    assert np.isfinite(vectors[[0, 2]]).all()


def test_text_too_many_and_str_for_rows_are_refused_from_python(sr_run):
    predictor = Predictor(str(sr_run))
    with pytest.raises(InputError, match="expected 1 "):
        predictor.predict("a", "b")
    with pytest.raises(InputError, match="expected a list of texts, got 'abc'"):
        predictor.embed("abc")


def test_embed_names_the_row_that_has_no_vector(untrained):
    with pytest.raises(InputError, match="row 2: text: expected words"):
        untrained["detect"].embed(["a", "", "b"])


def test_damaged_checkpoint_ends_in_one_line(paths, tmp_path):
    """The hash is another one's."""
    parts = torch.load(paths["classify"])
    parts["tokenizer"].update(hash=dict(bits=3))
    path = tmp_path / "ckpt.pt"
    torch.save(parts, path)
    assert_refused(infer.main, ["--ckpt", path, "a"], f"infer.py: {path}: could not be read")
