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
from tokenizer import (BPE, CLS, FIRST_WORD_ID, MASK, PAD, SEP, SPECIALS, SUBWORDS, UNK, HashTokenizer,
                       Phrases, build_inputs, match_longest, sliding_windows, split_names)


def make_config(code_format, **sizes):
    """Return what HashTokenizer reads of a model's configuration, with odd and distinct sizes."""
    defaults = dict(bits=29, chunk=7, rows=499, hashes=3, buckets=41, weights=97)
    return SimpleNamespace(code_format=code_format, **defaults | sizes)


def reload(tokenizer):
    """Return a tokenizer's copy, through its state as JSON."""
    return HashTokenizer.load(json.loads(json.dumps(tokenizer.state())), tokenizer.config)


def test_bpe_splits_all_text(bpe):
    pieces, spans = bpe.split("The caterpillar 日本")
    numbers = [bpe.tokenizer.token_to_id(piece) for piece in pieces]
    assert pieces[0] == "Ġthe" and bpe.tokenizer.decode(numbers).strip() == "the caterpillar 日本"
    assert spans[0] == (0, 3) and [bpe.units[i] for i in numbers] == pieces
    assert bpe.number_texts(["The caterpillar 日本", "\ud800"])[0] == numbers
    again = BPE(bpe.json)
    assert again.units == bpe.units and again.split("the mat") == bpe.split("the mat")


def test_bpe_size_is_a_limit_and_rare_pairs_stay_apart():
    assert len(BPE.train(["the cats sat there"] * 50, size=260).units) == 260
    assert len(BPE.train(["rare words only once"], size=999).units) == 256  # no pair is seen five times


def test_bpe_spans_are_those_of_the_text_after_a_letter_that_grows(bpe):
    """The lower case of İ has two characters."""
    text = "İ the"
    pieces, spans = bpe.split(text)
    assert text[slice(*spans[-1])].strip() == "the" and pieces[-1] == "Ġthe"


def test_match_longest_by_hand():
    """new york city hall: "new york" before "new", and "york city" comes too late."""
    phrases = {"new york", "york city", "city hall", "a b c"}
    assert match_longest("new york city hall".split(), phrases, 3) == [(0, 2), (2, 4)]
    assert match_longest("a b c a b".split(), phrases, 3) == [(0, 3), (3, 4), (4, 5)]
    assert match_longest("a b c".split(), phrases, 2) == [(0, 1), (1, 2), (2, 3)]
    assert match_longest([], phrases, 3) == []


def test_split_names_finds_several_words_and_tabs_keep_spaces():
    text = "Miles  Davis plays, Jazz"
    names, spans = split_names(text, {"Miles Davis"}, 2)
    assert names == ["Miles Davis", "plays,", "Jazz"]
    assert [text[a:b] for a, b in spans] == ["Miles  Davis", "plays,", "Jazz"]
    names, spans = split_names("New  York\t \tJazz", {}, 1)
    assert names == ["New York", "Jazz"] and spans == [(0, 9), (12, 16)]


def test_phrases_are_frequent_words_pairs_and_pieces():
    phrases = Phrases.train(["New York is new", "the New York mayor", "in New York"] * 9, 300, 270)
    assert {"new york", "york", "new", "the"} <= phrases.phrases and "mayor is" not in phrases.phrases
    assert len(phrases.units) <= 300 and len(set(phrases.units)) == len(phrases.units)
    text = "NEW  York mayor qzj"
    units, spans = phrases.split(text)
    assert units[:2] == ["new york", "mayor"] and "".join(units[2:]) == "Ġqzj"
    assert [text[a:b] for a, b in spans[:2]] == ["NEW  York", "mayor"]
    assert [text[a:b] for a, b in spans[-2:]] == ["z", "j"]
    again = Phrases(phrases.json)
    assert again.units == phrases.units
    assert again.number_texts([text, ""]) == [[phrases.units.index(unit) for unit in units], []]


def test_phrases_drop_rare_pairs_where_memory_is_short(monkeypatch):
    texts = [f"new york x{i % 20}" for i in range(40)]
    whole = Phrases.train(texts, 300, 270).phrases
    monkeypatch.setattr(Phrases, "MAX_COUNTED", 9)
    assert Phrases.train(texts, 300, 270).phrases == {"new york", "new", "york"} < whole


@pytest.mark.parametrize("name", ["md5", "lsh"])
@pytest.mark.parametrize("code_format", ["index", "chunks", "bits"])
def test_codes_are_the_hashes_of_the_words(code_format, name, lsh):
    hash = lsh if name == "lsh" else MD5()
    tokenizer = HashTokenizer(make_config(code_format), hash_name=name, hash=hash)
    ids = tokenizer.ids(["play", "plays", "play"])
    assert ids.tolist() == [FIRST_WORD_ID, FIRST_WORD_ID + 1, FIRST_WORD_ID] and ids.dtype == np.int32
    assert tokenizer.ids(["new"]).tolist() == [FIRST_WORD_ID + 2]
    bits = lsh.bits(["plays"], 29) if name == "lsh" else md5_bits(["plays"], 29)
    index = lsh.index(["plays"], 499) if name == "lsh" else md5_index(["plays"], 499)
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


@pytest.mark.parametrize("code_format", ["sketch", "weighted"])
def test_sketch_codes_are_slices_of_their_own(code_format):
    tokenizer, words = HashTokenizer(make_config(code_format), hash_seed=3), make_words(301)
    tokenizer.ids(words)
    specials, codes = np.split(tokenizer.codes(), [FIRST_WORD_ID])
    targets = sketch_index(words, 3, 41, 3)
    assert (targets == tokenizer.sketch_targets(words)).all() and not specials.any()
    if code_format == "sketch":
        assert (codes == targets).all()
    else:
        assert (codes[:, :3] == sketch_index(words, 3, 499, 3)).all()
        assert (codes[:, 3] == sketch_index(words, 4, 97, 3)[:, 3]).all()


def test_codes_are_computed_once_per_word():
    hashed = []

    class CountingHash(MD5):
        def bits(self, words, T):
            hashed.extend(words)
            return super().bits(words, T)

    tokenizer = HashTokenizer(make_config("bits"), hash=CountingHash())
    for text in ("a b a", "b c", "c"):
        tokenizer.ids(tokenizer.split(text)[0])
        tokenizer.codes()
    assert [word for word in hashed if word] == ["a", "b", "c"]


def test_fixed_vocabulary_has_unknown_words_and_special_tokens_first():
    assert (PAD, CLS, SEP, UNK, MASK) == tuple(range(FIRST_WORD_ID)) and SPECIALS[MASK] == "[MASK]"
    tokenizer = HashTokenizer(make_config("row"), vocabulary=["the", "cat"])
    assert tokenizer.ids(["cat", "dog"]).tolist() == [FIRST_WORD_ID + 1, UNK]
    assert tokenizer.codes().ravel().tolist() == [PAD, CLS, SEP, UNK, MASK, 5, 6]
    assert tokenizer.hash_words(["the", "dog", "cat"]).tolist() == [[5], [UNK], [6]]
    assert tokenizer.words == ["the", "cat"] == reload(tokenizer).words


def test_digest_codes_have_ranges_of_their_own():
    """Map 0 has rows 0 .. R-1, map 1 rows R .. 2R-1, and each special token two rows more."""
    words, bloom_map = make_words(23), BloomMap(23, 3)
    tokenizer = HashTokenizer(make_config("digest"), "items", vocabulary=words, bloom_map=bloom_map)
    codes = tokenizer.codes()
    assert bloom_map.buckets == 8 and codes.shape == (FIRST_WORD_ID + 23, 2) and codes.dtype == np.int32
    assert codes[:FIRST_WORD_ID].flatten().tolist() == list(range(16, 26))
    assert (codes[FIRST_WORD_ID:] == bloom_map.digest + [0, 8]).all()
    assert tokenizer.ids([words[3], "?"]).tolist() == [FIRST_WORD_ID + 3, UNK]
    assert (tokenizer.hash_words(words[4:6]) == codes[FIRST_WORD_ID + 4:FIRST_WORD_ID + 6]).all()
    again = reload(tokenizer)
    assert (again.codes() == codes).all() and again.split("a [b]")[0] == ["a", "[b]"]


def test_items_split_finds_longer_names_after_they_are_added():
    tokenizer = HashTokenizer(make_config("sketch"), "items")
    assert tokenizer.split("New York Jazz")[0] == ["New", "York", "Jazz"]
    tokenizer.ids(["New York"])
    assert tokenizer.split("New York Jazz")[0] == ["New York", "Jazz"]


@pytest.mark.parametrize("split", ["regex", "space", *SUBWORDS])
def test_ids_of_texts_matches_split_and_ids(split, bpe):
    subwords = dict(bpe=bpe, phrases=Phrases.train(["the cat sat"] * 7, 280, 270)).get(split)
    a, b = (HashTokenizer(make_config("sketch"), split, subwords=subwords) for _ in range(2))
    texts = ["The cat, the mat!", "", "sat İ日"]
    assert [ids.tolist() for ids in a.ids_of_texts(texts)] == [b.ids(b.split(t)[0]).tolist() for t in texts]
    assert a.words == b.words


@hypothesis.settings(deadline=None, max_examples=50, derandomize=True)
@hypothesis.given(st.text(st.characters() | st.sampled_from("\ud800İß\x00'")))
def test_any_text_has_words_spans_and_codes(text):
    for split in ("regex", "space", "items"):
        tokenizer = HashTokenizer(make_config("bits"), split, hash=MD5())
        words, spans = tokenizer.split(text)
        assert len(words) == len(spans) and all(0 <= a < b <= len(text) for a, b in spans)
        tokenizer.ids(words)
        assert len(tokenizer.codes()) == FIRST_WORD_ID + len(set(words))


@pytest.mark.parametrize("change", [dict(split="bytes"), dict(vocabulary=None), dict(vocabulary=[7] * 23),
                                    dict(vocabulary=["a"]), dict(more=1), dict(bloom_map=dict(n_items=23))])
def test_load_refuses_a_damaged_state(change):
    bloom_map, words = BloomMap(23, 3), make_words(23)
    tokenizer = HashTokenizer(make_config("digest"), "items", vocabulary=words, bloom_map=bloom_map)
    with pytest.raises(ValueError, match="not the state of a tokenizer"):
        HashTokenizer.load(tokenizer.state() | change, tokenizer.config)


def test_bad_arguments_are_value_errors():
    with pytest.raises(ValueError, match="split: expected one of regex"):
        HashTokenizer(make_config("bits"), "words")
    with pytest.raises(ValueError, match="length: expected 8"):
        sliding_windows(np.arange(5), np.arange(9), 7, 1)
    with pytest.raises(ValueError, match="code_format: expected"):
        HashTokenizer(make_config("rows")).hash_words(["a"])


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


@pytest.mark.parametrize("stride", [1, 3, 99])
def test_sliding_windows_hold_every_word_and_the_question(stride):
    rng = random.Random(stride)
    for _ in range(50):
        question = np.arange(1000, 1000 + rng.randint(1, 12))
        context, length = np.arange(rng.randint(1, 40)), rng.randint(8, 21)
        windows = sliding_windows(question, context, length, stride)
        cut = question[:(length - 4) // 2]
        for ids, first, start, stop in windows:
            assert len(ids) <= length and ids[1:1 + len(cut)].tolist() == cut.tolist()
            assert ids[first:first + stop - start].tolist() == list(range(start, stop)) and ids[-1] == SEP
        assert {i for *_, a, b in windows for i in range(a, b)} == set(context.tolist())
        assert all(b[2] - a[2] == min(stride, length - 4 - len(cut)) for a, b in zip(windows, windows[1:]))
        assert all(a[3] < b[3] for a, b in zip(windows, windows[1:])) and windows[-1][3] == len(context)
