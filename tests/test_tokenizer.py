"""Tests of tokenizer.py: words to token IDs and codes, subwords, names, pairs, and windows."""

import json
import random
from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from bloom import BloomMap
from hashing import NgramLSH, HASHES, MD5, bits_to_chunks, sketch_index
from tests.support import make_words
from tokenizer import BPE, CLS, FIRST_WORD_ID, MASK, PAD, SEP, SPECIALS, SUBWORDS, UNK
from tokenizer import HashTokenizer, Phrases, build_inputs, match_longest, sliding_windows
from tokenizer import split_names


def make_config(code_format):
    """Return what HashTokenizer reads of a model's config, with odd and distinct sizes."""
    return SimpleNamespace(code_format=code_format, bits=29, chunk=7, rows=499, hashes=3,
                           buckets=41, weights=97)


BITS = make_config("bits")
ROW = make_config("row")
DIGEST = make_config("digest")
SKETCH = make_config("sketch")


def reload(tokenizer):
    """Return a tokenizer's copy, through its state as JSON."""
    state = json.loads(json.dumps(tokenizer.state()))
    return HashTokenizer.load(state, tokenizer.config)


@pytest.fixture
def bloom_tokenizer():
    """A tokenizer of 23 names with a Bloom map of 8 buckets."""
    bloom_map = BloomMap(23, 3)
    return HashTokenizer(DIGEST, "items", vocabulary=make_words(23), bloom_map=bloom_map)


# BPE and phrases


def test_bpe_pieces_spell_the_text_and_have_spans(bpe):
    pieces, spans = bpe.split("The caterpillar 日本")
    numbers = [bpe.tokenizer.token_to_id(piece) for piece in pieces]
    assert bpe.tokenizer.decode(numbers).strip() == "the caterpillar 日本"
    assert [bpe.units[i] for i in numbers] == pieces
    assert (pieces[0], spans[0]) == ("Ġthe", (0, 3))
    assert bpe.number_texts(["The caterpillar 日本", "\ud800"])[0] == numbers


def test_bpe_keeps_offsets_after_a_letter_whose_lower_case_is_longer(bpe):
    pieces, spans = bpe.split("İ the")
    assert (pieces[-1], spans[-1]) == ("Ġthe", (1, 5))


def test_bpe_is_restored_from_its_json(bpe):
    assert BPE(bpe.json).units == bpe.units


@pytest.mark.parametrize("texts, size, num_pieces", [
    (["the cats sat there"] * 50, 260, 260),  # the size is the limit
    (["rare words only once"], 999, 256),  # no pair is seen five times: the 256 bytes
])
def test_bpe_learns_frequent_pairs_up_to_a_size(texts, size, num_pieces):
    assert len(BPE.train(texts, size=size).units) == num_pieces


def test_bpe_cuts_words_of_more_than_1000_letters():
    """Without the cut a word of 9,000 letters would give pieces of 4,096."""
    units = BPE.train(["ab" * 4_500], size=999).units
    assert 500 < max(map(len, units)) <= 1_001


@pytest.fixture(scope="module")
def phrases():
    return Phrases.train(["New York is new", "the New York mayor", "in New York"] * 9, 300, 270)


def test_phrases_are_frequent_words_and_pairs(phrases):
    assert {"new york", "york", "new", "the"} <= phrases.phrases
    assert "mayor is" not in phrases.phrases
    assert len(phrases.units) == len(set(phrases.units)) <= 300


def test_phrases_split_takes_the_longest_and_pieces_for_the_rest(phrases):
    text = "NEW  York mayor qzj"
    units, spans = phrases.split(text)
    assert units[:2] == ["new york", "mayor"]
    assert "".join(units[2:]) == "Ġqzj"
    covered = [text[a:b] for a, b in spans]
    assert covered[:2] + covered[-2:] == ["NEW  York", "mayor", "z", "j"]


def test_phrases_are_restored_from_their_json(phrases):
    again = Phrases(phrases.json)
    units, _ = phrases.split("new york qzj")
    assert again.units == phrases.units
    assert again.number_texts(["new york qzj", ""]) == [[phrases.units.index(u) for u in units], []]


def test_phrases_drop_the_rare_where_memory_is_short(monkeypatch):
    texts = [f"new york x{i % 20}" for i in range(40)]
    common = {"new york", "new", "york"}
    assert Phrases.train(texts, 300, 270).phrases > common
    monkeypatch.setattr(Phrases, "MAX_COUNTED", 9)
    assert Phrases.train(texts, 300, 270).phrases == common


# Names of items


@pytest.mark.parametrize("words, max_words, stops", [
    ("new york city hall", 3, [2, 4]),  # "york city" comes too late
    ("a b c a b", 3, [3, 4, 5]),
    ("a b c", 2, [1, 2, 3]),  # too long a phrase
    ("", 3, []),
])
def test_match_longest_is_greedy(words, max_words, stops):
    phrases = {"new york", "york city", "city hall", "a b c"}
    runs = match_longest(words.split(), phrases, max_words)
    assert runs == list(zip([0, *stops], stops))


def test_split_names_finds_long_names_between_spaces():
    text = "Miles  Davis plays, Jazz"
    names, spans = split_names(text, {"Miles Davis"}, 2)
    assert names == ["Miles Davis", "plays,", "Jazz"]
    assert [" ".join(text[a:b].split()) for a, b in spans] == names


def test_split_names_between_tabs_keeps_inner_spaces():
    assert split_names("New  York\t \tJazz", {}, 1) == (["New York", "Jazz"], [(0, 9), (12, 16)])


def test_new_names_are_found_in_later_texts():
    tokenizer = HashTokenizer(SKETCH, "items")
    assert tokenizer.split("New York Jazz")[0] == ["New", "York", "Jazz"]
    tokenizer.ids(["New York"])
    assert tokenizer.split("New York Jazz")[0] == ["New York", "Jazz"]


# Token IDs and codes


def test_new_words_get_the_next_ids():
    tokenizer = HashTokenizer(SKETCH)
    ids = tokenizer.ids(["play", "plays", "play", "new"])
    assert (ids - FIRST_WORD_ID).tolist() == [0, 1, 0, 2]
    assert ids.dtype == np.int32


@pytest.mark.parametrize("name", ["md5", "lsh"])
@pytest.mark.parametrize("code_format, C, dtype", [
    ("index", 1, np.int32),
    ("chunks", 5, np.int16),  # 29 bits in chunks of 7
    ("bits", 4, np.uint8),  # 29 bits in bytes
])
def test_codes_are_the_hashes_of_the_words(code_format, C, dtype, name, lsh):
    hash = lsh if name == "lsh" else MD5()
    tokenizer = HashTokenizer(make_config(code_format), hash_name=name, hash=hash)
    tokenizer.ids(["play", "plays", "new"])
    codes = tokenizer.codes()
    assert codes.shape == (FIRST_WORD_ID + 3, C)
    assert codes.dtype == dtype
    bits = hash.bits(["plays"], 29)
    expected = dict(index=hash.index(["plays"], 499)[:, None], chunks=bits_to_chunks(bits, 7),
                    bits=np.packbits(bits, axis=1))
    assert (codes[FIRST_WORD_ID + 1] == expected[code_format]).all()
    assert not codes[:FIRST_WORD_ID].any()
    assert (reload(tokenizer).hash_words(["play", "plays", "new"]) == codes[FIRST_WORD_ID:]).all()


def test_sketch_codes_are_its_targets():
    words = make_words(301)
    tokenizer = HashTokenizer(SKETCH, hash_seed=3)
    targets = sketch_index(words, 3, 41, 3)
    assert (tokenizer.hash_words(words) == targets).all()
    assert (tokenizer.sketch_targets(words) == targets).all()
    assert not tokenizer.codes()[:FIRST_WORD_ID].any()


def test_weighted_codes_are_rows_and_one_row_of_importance_weights():
    """Of k + 1 = 4 independent hash functions the last chooses the importance weights."""
    words = make_words(301)
    codes = HashTokenizer(make_config("weighted"), hash_seed=3).hash_words(words)
    assert (codes[:, :3] == sketch_index(words, 3, 499, 3)).all()
    assert (codes[:, 3] == sketch_index(words, 4, 97, 3)[:, 3]).all()


def test_codes_are_computed_once_per_word(monkeypatch):
    hashed = []
    original = MD5.bits

    def spy(self, words, T):
        hashed.extend(words)
        return original(self, words, T)

    monkeypatch.setattr(MD5, "bits", spy)
    tokenizer = HashTokenizer(BITS, hash=MD5())
    for text in ["a b a", "b c", "c"]:
        tokenizer.ids_of_texts([text])
        tokenizer.codes()
    assert [word for word in hashed if word] == ["a", "b", "c"]  # "": the special tokens


def test_special_tokens_have_the_first_ids():
    assert (PAD, CLS, SEP, UNK, MASK) == (0, 1, 2, 3, 4)
    assert SPECIALS[MASK] == "[MASK]"


def test_fixed_vocabulary_has_unknown_words():
    tokenizer = HashTokenizer(ROW, vocabulary=["the", "cat"])
    assert tokenizer.ids(["cat", "dog"]).tolist() == [FIRST_WORD_ID + 1, UNK]
    assert tokenizer.codes().ravel().tolist() == [PAD, CLS, SEP, UNK, MASK, 5, 6]
    assert tokenizer.hash_words(["the", "dog", "cat"]).tolist() == [[5], [UNK], [6]]
    assert tokenizer.words == ["the", "cat"] == reload(tokenizer).words


def test_digest_codes_count_in_the_block_of_their_map(bloom_tokenizer):
    """Items have the buckets 0 .. R-1 of each map, and special token s row R + s of each block."""
    codes = bloom_tokenizer.codes()
    bloom_map = bloom_tokenizer.bloom_map
    assert bloom_map.buckets == 8
    assert codes[:FIRST_WORD_ID].tolist() == [[8, 8], [9, 9], [10, 10], [11, 11], [12, 12]]
    assert (codes[FIRST_WORD_ID:] == bloom_map.digest).all()
    words = bloom_tokenizer.words
    assert (bloom_tokenizer.hash_words(words[4:6]) == bloom_map.digest[4:6]).all()
    assert bloom_tokenizer.ids([words[3], "?"]).tolist() == [FIRST_WORD_ID + 3, UNK]
    assert (reload(bloom_tokenizer).codes() == codes).all()


@pytest.mark.parametrize("split", ["regex", "space", *SUBWORDS])
def test_ids_of_texts_matches_split_and_ids(split, bpe, phrases):
    subwords = dict(bpe=bpe, phrases=phrases).get(split)
    fast = HashTokenizer(SKETCH, split, subwords=subwords)
    plain = HashTokenizer(SKETCH, split, subwords=subwords)
    texts = ["The cat, the mat!", "", "sat İ日"]
    ids = fast.ids_of_texts(texts)
    for text, row in zip(texts, ids):
        words, _ = plain.split(text)
        assert row.tolist() == plain.ids(words).tolist()
    assert fast.words == plain.words


@hypothesis.settings(deadline=None, max_examples=50, derandomize=True)
@hypothesis.given(st.text(st.characters() | st.sampled_from("\ud800İß\x00'")))
@pytest.mark.parametrize("split", ["regex", "space", "items"])
def test_any_text_has_words_spans_and_codes(split, text):
    tokenizer = HashTokenizer(BITS, split, hash=MD5())
    words, spans = tokenizer.split(text)
    assert len(words) == len(spans)
    assert all(0 <= a < b <= len(text) for a, b in spans)
    tokenizer.ids(words)
    assert len(tokenizer.codes()) == FIRST_WORD_ID + len(set(words))


# State and refusals


@pytest.mark.parametrize("code_format", ["index", "chunks", "bits", "sketch", "weighted"])
def test_state_has_every_setting(code_format):
    """No setting is at its default, and the key changes the codes."""
    words = make_words(5)
    config = make_config(code_format)
    keyed = HASHES["md5"].fit(None, key="k")
    tokenizer = HashTokenizer(config, "space", "md5", keyed, hash_seed=11, key="k")
    again = reload(tokenizer)
    assert again.state() == tokenizer.state()
    assert again.split("don't")[0] == ["don't"]
    assert (again.hash_words(words) == tokenizer.hash_words(words)).all()
    plain = HashTokenizer(config, "space", "md5", MD5(), hash_seed=11)
    assert (plain.hash_words(words) != again.hash_words(words)).any()


@pytest.mark.parametrize("change", [
    dict(split="bytes"),  # unknown
    dict(vocabulary=None),
    dict(vocabulary=[7] * 23),  # no words
    dict(vocabulary=["a"]),  # of another map
    dict(more=1),
    dict(bloom_map=dict(n_items=23)),  # incomplete
])
def test_load_refuses_a_damaged_state(change, bloom_tokenizer):
    with pytest.raises(ValueError, match="not the state of a tokenizer"):
        HashTokenizer.load(bloom_tokenizer.state() | change, DIGEST)


@pytest.mark.parametrize("config, options, message", [
    (BITS, {}, "hash: expected a fitted one"),
    (SKETCH, dict(split="words"), "split: expected one of regex"),
    (SKETCH, dict(split="bpe"), "subwords: expected those of split 'bpe', got None"),
    # a checkpoint would be saved that cannot be loaded
    (BITS, dict(hash=NgramLSH(["a"], 99), hash_name="md5"),
     "hash_name: expected that of <.*NgramLSH"),
    # the digests of all words after the second "cat" would be those of their neighbors
    (ROW, dict(vocabulary=["cat", "cat", "dog"]), "vocabulary: expected each word once"),
    (ROW, dict(vocabulary="cat"), "words: expected a list of str, got 'cat'"),
    (DIGEST, dict(vocabulary=["cat"]), "bloom_map: expected that of 1 words"),
    (DIGEST, dict(vocabulary=["cat"], bloom_map=BloomMap(23, 3)), "bloom_map: expected that of 1"),
])
def test_parts_that_do_not_fit_are_refused(config, options, message):
    with pytest.raises(ValueError, match=message):
        HashTokenizer(config, **options)


@pytest.mark.parametrize("call, message", [
    (lambda: HashTokenizer(SKETCH).ids("play"), "words: expected a list of str"),
    (lambda: HashTokenizer(make_config("new")).hash_words(["a"]), "code_format: expected one"),
    (lambda: BPE.train(["a"], 2**32), "size: expected 1 to 10,000,000"),
    (lambda: sliding_windows(np.arange(5), np.arange(9), 7, 1), "length, stride: expected"),
    (lambda: sliding_windows(np.arange(5), np.arange(9), 8, 0), "length, stride: expected"),
    (lambda: build_inputs(np.arange(5), None, 4), "length: expected 5 or more"),
])
def test_silently_wrong_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Inputs of a model


@pytest.mark.parametrize("n, m, room", [
    (10, 3, 8), (10, 10, 7), (2, 10, 8),  # the docstring's
    (6, 6, 5), (0, 6, 4), (6, 0, 4), (3, 3, 8), (1, 1, 1),
])
def test_build_inputs_cuts_the_longer_text(n, m, room):
    """Words leave the longer side one by one until both fit; on a tie the second loses first."""
    x = list(range(n))
    y = list(range(100, 100 + m))
    while len(x) + len(y) > room:
        if len(x) > len(y):
            x.pop()
        else:
            y.pop()
    ids, num_cut = build_inputs(np.arange(n), np.arange(100, 100 + m), room + 4)
    assert ids.tolist() == [CLS, *x, SEP, SEP, *y, SEP]
    assert num_cut == n + m - len(x) - len(y)
    assert ids.dtype == np.int32


@pytest.mark.parametrize("n", [0, 3, 4, 9])
def test_build_inputs_of_one_text_cuts_its_end(n):
    ids, num_cut = build_inputs(np.arange(n), None, 6)
    assert ids.tolist() == [CLS, *range(min(n, 4)), SEP]
    assert num_cut == max(n - 4, 0)
    whole, _ = build_inputs(np.arange(n), None, 6, keep_rest=True)
    assert whole.tolist() == [*ids, *range(4, n)]


@pytest.mark.parametrize("stride", [1, 3, 99])
def test_sliding_windows_hold_every_word_and_the_question(stride):
    rng = random.Random(stride)
    for _ in range(50):
        length = rng.randint(8, 21)
        question = np.arange(1000, 1000 + rng.randint(1, 12))
        context = np.arange(rng.randint(1, 40))
        cut = question[:(length - 4) // 2].tolist()
        seen = []
        for ids, first, start, stop in sliding_windows(question, context, length, stride):
            assert len(ids) <= length
            assert ids[1:1 + len(cut)].tolist() == cut
            assert ids[first:first + stop - start].tolist() == list(range(start, stop))
            assert ids[-1] == SEP
            seen.append((start, stop))
        assert seen[-1][1] == len(context)
        for (start, stop), (next_start, next_stop) in zip(seen, seen[1:]):
            assert next_start - start == min(stride, length - 4 - len(cut))
            assert next_start <= stop < next_stop  # no word is left out
