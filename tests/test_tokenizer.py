"""tokenizer.py: words to token IDs and codes, subwords, names, pairs of texts and windows."""

import json
import random
from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from bloom import BloomMap
from hashing import HASHES, MD5, bits_to_chunks, md5_bits, md5_index, sketch_index
from tests.support import make_words
from tokenizer import BPE, CLS, FIRST_WORD_ID, MASK, PAD, SEP, SPECIALS, SUBWORDS, UNK, HashTokenizer, Phrases
from tokenizer import build_inputs, match_longest, sliding_windows, split_names


def make_config(code_format, **sizes):
    """Return what HashTokenizer reads of a model's configuration, with odd and distinct sizes."""
    defaults = dict(bits=29, chunk=7, rows=499, hashes=3, buckets=41, weights=97)
    return SimpleNamespace(code_format=code_format, **defaults | sizes)


BITS, ROW, DIGEST, SKETCH = map(make_config, ("bits", "row", "digest", "sketch"))


def reload(tokenizer):
    """Return a tokenizer's copy, through its state as JSON."""
    return HashTokenizer.load(json.loads(json.dumps(tokenizer.state())), tokenizer.config)


def make_bloom_tokenizer():
    """Return a tokenizer of 23 names with a Bloom map of 8 buckets, the map, and the names."""
    names, bloom_map = make_words(23), BloomMap(23, 3)
    return HashTokenizer(DIGEST, "items", vocabulary=names, bloom_map=bloom_map), bloom_map, names


def test_bpe_splits_all_text_into_a_limited_number_of_pieces(bpe):
    pieces, spans = bpe.split("The caterpillar 日本")
    numbers = [bpe.tokenizer.token_to_id(piece) for piece in pieces]
    assert pieces[0] == "Ġthe" and bpe.tokenizer.decode(numbers).strip() == "the caterpillar 日本"
    assert spans[0] == (0, 3) and [bpe.units[i] for i in numbers] == pieces
    assert bpe.number_texts(["The caterpillar 日本", "\ud800"])[0] == numbers
    pieces, spans = BPE(bpe.json).split("İ the")  # the lower case of İ has two characters
    assert (pieces[-1], spans[-1]) == ("Ġthe", (1, 5)) and BPE(bpe.json).units == bpe.units
    assert len(BPE.train(["the cats sat there"] * 50, size=260).units) == 260
    assert len(BPE.train(["rare words only once"], size=999).units) == 256  # no pair is seen five times
    # without the cut, one word of 9,000 letters would give pieces of 4,096
    assert 500 < max(map(len, BPE.train(["ab" * 4_500], size=999).units)) <= 1_001


def test_longest_names_and_phrases_come_first():
    """new york city hall: "new york" before "new", and "york city" comes too late. Tabs keep spaces."""
    for words, longest, stops in (("new york city hall", 3, [2, 4]), ("a b c a b", 3, [3, 4, 5]),
                                  ("a b c", 2, [1, 2, 3]), ("", 3, [])):
        runs = match_longest(words.split(), {"new york", "york city", "city hall", "a b c"}, longest)
        assert runs == [*zip([0, *stops], stops)]
    text = "Miles  Davis plays, Jazz"
    names, spans = split_names(text, {"Miles Davis"}, 2)
    assert names == [" ".join(text[a:b].split()) for a, b in spans] == ["Miles Davis", "plays,", "Jazz"]
    tokenizer = HashTokenizer(SKETCH, "items")
    assert tokenizer.split("New York Jazz")[0] == ["New", "York", "Jazz"]
    tokenizer.ids(["New York"])
    assert tokenizer.split("New York Jazz")[0] == ["New York", "Jazz"]
    assert split_names("New  York\t \tJazz", {}, 1) == (["New York", "Jazz"], [(0, 9), (12, 16)])


def test_phrases_are_frequent_words_pairs_and_pieces(monkeypatch):
    phrases = Phrases.train(["New York is new", "the New York mayor", "in New York"] * 9, 300, 270)
    assert {"new york", "york", "new", "the"} <= phrases.phrases and "mayor is" not in phrases.phrases
    assert len(phrases.units) <= 300 and len(set(phrases.units)) == len(phrases.units)
    text = "NEW  York mayor qzj"
    units, spans = phrases.split(text)
    assert units[:2] == ["new york", "mayor"] and "".join(units[2:]) == "Ġqzj"
    assert [text[a:b] for a, b in spans[:2] + spans[-2:]] == ["NEW  York", "mayor", "z", "j"]
    again = Phrases(phrases.json)
    assert again.units == phrases.units
    assert again.number_texts([text, ""]) == [[phrases.units.index(unit) for unit in units], []]
    texts, common = [f"new york x{i % 20}" for i in range(40)], {"new york", "new", "york"}
    assert Phrases.train(texts, 300, 270).phrases > common
    monkeypatch.setattr(Phrases, "MAX_COUNTED", 9)  # where memory is short, the rare ones are dropped
    assert Phrases.train(texts, 300, 270).phrases == common


@pytest.mark.parametrize("name", ["md5", "lsh"])
@pytest.mark.parametrize("code_format", ["index", "chunks", "bits"])
def test_codes_are_the_hashes_of_the_words(code_format, name, lsh):
    hash = lsh if name == "lsh" else MD5()
    tokenizer = HashTokenizer(make_config(code_format), hash_name=name, hash=hash)
    ids = tokenizer.ids(["play", "plays", "play", "new"])
    assert (ids - FIRST_WORD_ID).tolist() == [0, 1, 0, 2] and ids.dtype == np.int32
    to_bits, to_index = (lsh.bits, lsh.index) if name == "lsh" else (md5_bits, md5_index)
    bits, index = to_bits(["plays"], 29), to_index(["plays"], 499)
    expected = dict(index=index[:, None], chunks=bits_to_chunks(bits, 7), bits=np.packbits(bits, axis=1))
    codes = tokenizer.codes()
    assert codes.shape == (FIRST_WORD_ID + 3, dict(index=1, chunks=5, bits=4)[code_format])
    assert codes.dtype == dict(index=np.int32, chunks=np.int16, bits=np.uint8)[code_format]
    assert (codes[FIRST_WORD_ID + 1] == expected[code_format]).all() and not codes[:FIRST_WORD_ID].any()
    assert (reload(tokenizer).hash_words(["play", "plays", "new"]) == codes[FIRST_WORD_ID:]).all()


@pytest.mark.parametrize("code_format", ["index", "chunks", "bits", "sketch", "weighted"])
def test_state_has_every_setting(code_format):
    """No setting is at its default; the key changes the codes."""
    def make(key):
        hash = HASHES["md5"].fit(None, key=key)
        return HashTokenizer(make_config(code_format), "space", "md5", hash, hash_seed=11, key=key)

    tokenizer, words = make("k"), make_words(5)
    assert tokenizer.state().items() >= dict(split="space", hash_name="md5", hash_seed=11, key="k").items()
    again = reload(tokenizer)
    assert again.state() == tokenizer.state() and again.split("don't")[0] == ["don't"]
    assert (again.hash_words(words) == tokenizer.hash_words(words)).all()
    assert (make(None).hash_words(words) != again.hash_words(words)).any()


def test_sketch_codes_are_slices_of_their_own():
    words = make_words(301)
    sketch, weighted = (HashTokenizer(make_config(name), hash_seed=3) for name in ("sketch", "weighted"))
    targets = sketch_index(words, 3, 41, 3)
    assert (targets == sketch.hash_words(words)).all() and (targets == weighted.sketch_targets(words)).all()
    rows, weights = np.split(weighted.hash_words(words), [3], axis=1)
    assert (rows == sketch_index(words, 3, 499, 3)).all()
    assert (weights == sketch_index(words, 4, 97, 3)[:, 3:]).all()
    assert not sketch.codes()[:FIRST_WORD_ID].any() and not weighted.codes()[:FIRST_WORD_ID].any()


def test_codes_are_computed_once_per_word(monkeypatch):
    hashed, tokenizer = [], HashTokenizer(BITS, hash=MD5())
    monkeypatch.setattr(MD5, "bits", lambda self, words, T: hashed.extend(words) or md5_bits(words, T))
    for text in ("a b a", "b c", "c"):
        tokenizer.ids_of_texts([text])
        tokenizer.codes()
    assert [word for word in hashed if word] == ["a", "b", "c"]


def test_fixed_vocabulary_has_unknown_words_and_special_tokens_first():
    assert (PAD, CLS, SEP, UNK, MASK) == tuple(range(FIRST_WORD_ID)) and SPECIALS[MASK] == "[MASK]"
    tokenizer = HashTokenizer(ROW, vocabulary=["the", "cat"])
    assert tokenizer.ids(["cat", "dog"]).tolist() == [FIRST_WORD_ID + 1, UNK]
    assert tokenizer.codes().ravel().tolist() == [PAD, CLS, SEP, UNK, MASK, 5, 6]
    assert tokenizer.hash_words(["the", "dog", "cat"]).tolist() == [[5], [UNK], [6]]
    assert tokenizer.words == ["the", "cat"] == reload(tokenizer).words


def test_digest_codes_count_in_the_block_of_their_map():
    """Items have the buckets 0 .. R-1 of each map, and special token s row R + s of each block."""
    tokenizer, bloom_map, words = make_bloom_tokenizer()
    codes = tokenizer.codes()
    assert bloom_map.buckets == 8 and codes.shape == (FIRST_WORD_ID + 23, 2) and codes.dtype == np.int32
    assert codes[:FIRST_WORD_ID].tolist() == [[8 + s, 8 + s] for s in range(5)]
    assert (codes[FIRST_WORD_ID:] == bloom_map.digest).all()
    assert tokenizer.ids([words[3], "?"]).tolist() == [FIRST_WORD_ID + 3, UNK]
    assert (tokenizer.hash_words(words[4:6]) == codes[FIRST_WORD_ID + 4:FIRST_WORD_ID + 6]).all()
    again = reload(tokenizer)
    assert (again.codes() == codes).all() and again.split("a [b]")[0] == ["a", "[b]"]


@pytest.mark.parametrize("split", ["regex", "space", *SUBWORDS])
def test_ids_of_texts_matches_split_and_ids(split, bpe):
    subwords = dict(bpe=bpe, phrases=Phrases.train(["the cat sat"] * 7, 280, 270)).get(split)
    a, b = (HashTokenizer(SKETCH, split, subwords=subwords) for _ in range(2))
    texts = ["The cat, the mat!", "", "sat İ日"]
    assert [ids.tolist() for ids in a.ids_of_texts(texts)] == [b.ids(b.split(t)[0]).tolist() for t in texts]
    assert a.words == b.words


@hypothesis.settings(deadline=None, max_examples=50, derandomize=True)
@hypothesis.given(st.text(st.characters() | st.sampled_from("\ud800İß\x00'")))
def test_any_text_has_words_spans_and_codes(text):
    for split in ("regex", "space", "items"):
        tokenizer = HashTokenizer(BITS, split, hash=MD5())
        words, spans = tokenizer.split(text)
        assert len(words) == len(spans) and all(0 <= a < b <= len(text) for a, b in spans)
        tokenizer.ids(words)
        assert len(tokenizer.codes()) == FIRST_WORD_ID + len(set(words))


@pytest.mark.parametrize("change", [dict(split="bytes"), dict(vocabulary=None), dict(vocabulary=[7] * 23),
                                    dict(vocabulary=["a"]), dict(more=1), dict(bloom_map=dict(n_items=23))])
def test_load_refuses_a_damaged_state(change):
    tokenizer, _, _ = make_bloom_tokenizer()
    with pytest.raises(ValueError, match="not the state of a tokenizer"):
        HashTokenizer.load(tokenizer.state() | change, tokenizer.config)


@pytest.mark.parametrize("function, message, calls", [
    (HashTokenizer, "config: expected a model.Config, got 'bits'", [("bits", "regex", "lsh", "lsh")]),
    (HashTokenizer, "hash: expected a fitted one, such as NgramLSH.fit", [
        (BITS, "regex", "lsh", "lsh"), (BITS, "regex", "md5", MD5), (BITS,)]),
    (HashTokenizer, "split: expected one of regex, .* got 'words'", [(SKETCH, "words")]),
    (HashTokenizer, "subwords: expected BPE for bpe, got None", [(SKETCH, "bpe")]),
    (HashTokenizer, "vocabulary: expected a list of str", [(ROW,), (ROW, "regex", "md5", None, None, "cat")]),
    (HashTokenizer, "bloom_map: expected that of the vocabulary", [
        (DIGEST, "items", "md5", None, None, ["cat"], bloom_map) for bloom_map in (None, BloomMap(23, 3))]),
    (HashTokenizer(SKETCH).ids, "words: expected a list of str, got 'play'", [("play",)]),
    (HashTokenizer(SKETCH).split, "text: expected a str, got 5", [(5,)]),
    (HashTokenizer(make_config("rows")).hash_words, "code_format: expected one that", [(["a"],)]),
    (BPE.train, "size: expected 1 to 10,000,000, got", [(["a"], 2**32), (["a"], 0), (["a"], "9")]),
    (BPE.train, "text: expected a str, got 5", [([5],)]),
    (sliding_windows, "length: expected 8 to", [(np.arange(5), np.arange(9), 7, 1)]),
    (sliding_windows, "stride: expected 1 to", [(np.arange(5), np.arange(9), 8, 0)]),
    (build_inputs, "length: expected 5 to", [(np.arange(5), None, 4), (np.arange(5), None, 5.5)]),
])
def test_bad_arguments_are_value_errors(function, message, calls):
    for args in calls:
        with pytest.raises(ValueError, match=message):
            function(*args)


def test_build_inputs_matches_definition():
    """Words leave the longer side one by one until both fit; on a tie the second loses first."""
    for n in range(7):
        for m in range(7):
            for room in range(1, 9):
                x, y = list(range(n)), list(range(m))
                while len(x) + len(y) > room:
                    (x if len(x) > len(y) else y).pop()
                ids, num_cut = build_inputs(np.arange(n), np.arange(m), room + 4)
                assert ids.tolist() == [CLS, *x, SEP, SEP, *y, SEP] and num_cut == n + m - len(x) - len(y)
            ids, num_cut = build_inputs(np.arange(n), None, m + 5)
            assert ids.tolist() == [CLS, *range(min(n, m + 3)), SEP] and num_cut == max(n - m - 3, 0)
            assert ids.dtype == np.int32
            assert build_inputs(np.arange(n), None, m + 5, keep_rest=True)[0].tolist() == [*ids, *range(m + 3, n)]


@pytest.mark.parametrize("stride", [1, 3, 99])
def test_sliding_windows_hold_every_word_and_the_question(stride):
    rng = random.Random(stride)
    for _ in range(50):
        question, context = np.arange(1000, 1000 + rng.randint(1, 12)), np.arange(rng.randint(1, 40))
        windows = sliding_windows(question, context, length := rng.randint(8, 21), stride)
        cut = question[:(length - 4) // 2]
        for ids, first, start, stop in windows:
            assert len(ids) <= length and ids[1:1 + len(cut)].tolist() == cut.tolist()
            assert ids[first:first + stop - start].tolist() == list(range(start, stop)) and ids[-1] == SEP
        assert {i for *_, a, b in windows for i in range(a, b)} == set(context.tolist())
        assert all(b[2] - a[2] == min(stride, length - 4 - len(cut)) for a, b in zip(windows, windows[1:]))
        assert all(a[3] < b[3] for a, b in zip(windows, windows[1:])) and windows[-1][3] == len(context)
