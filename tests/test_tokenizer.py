"""Tests of data/splitters.py and tokenizer.py: words, subwords, names, token IDs, pairs."""

import json
import sys
from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from bloom import BloomMap
from data.coders import BitCoder
from data.splitters import BPE, SPLITS, ItemNames, Phrases, SpacedWords, Words, match_longest
from data.squad import sliding_windows
from hashing import MD5, NgramLSH, bits_to_chunks, ngram_index, sketch_index
from tests.helpers import make_words
from tokenizer import CLS, FIRST_WORD_ID, SEP, HashTokenizer, build_inputs, make_tokenizer


def make_config(code_format):
    """Return what make_tokenizer reads of a model's config, with odd and distinct sizes."""
    return SimpleNamespace(code_format=code_format, bits=29, chunk=7, rows=499, hashes=3,
                           buckets=41, weights=97, grams=9, special_tokens=FIRST_WORD_ID)


BITS = make_config("bits")
ROW = make_config("row")
DIGEST = make_config("digest")
SKETCH = make_config("sketch")


def reload(tokenizer, config):
    """Return a tokenizer's copy, through its state as JSON."""
    state = json.loads(json.dumps(tokenizer.state()))
    return HashTokenizer.load(state, config)


# Words of a text


@pytest.mark.parametrize("split, words", [
    ("regex", ["new", "york", "mayor", "!"]),
    ("space", ["new", "york", "mayor!"]),
    ("items", ["New", "York", "mayor!"]),
])
def test_example_of_the_header_is_split_as_it_says(split, words):
    assert SPLITS[split]().split("New York mayor!")[0] == words


# BPE and phrases


def test_bpe_pieces_spell_the_text_and_have_spans(bpe):
    text = "The caterpillar 日本"
    pieces, spans = bpe.split(text)
    numbers = [bpe.units.index(piece) for piece in pieces]
    assert bpe.tokenizer.decode(numbers) == " the caterpillar 日本"
    assert pieces[0] == "Ġthe"
    assert spans[0] == (0, 3)


def test_bpe_of_a_letter_whose_lower_case_is_longer_keeps_offsets(bpe):
    pieces, spans = bpe.split("İ the")
    assert pieces == ["Ġ", "i", "Ġthe"]
    assert spans[-1] == (1, 5)


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


def test_library_of_bpe_that_is_missing_is_named(monkeypatch):
    """test_infer.py tests that infer.py starts without it."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # as if it were not installed
    with pytest.raises(ValueError, match="requires the package tokenizers, not found"):
        BPE.train(["a text"])


class FewPieces(Phrases):
    MAX_PIECES = 256


@pytest.fixture(scope="module")
def phrases():
    texts = ["New York is new", "the New York mayor", "in New York"] * 9
    return FewPieces.train(texts, 300)


def test_phrases_are_frequent_words_and_pairs(phrases):
    assert {"new york", "york", "new", "the"} <= phrases.phrases
    assert "mayor is" not in phrases.phrases
    assert len(phrases.units) == len(set(phrases.units)) <= 300


def test_phrases_occur_twice_and_leave_room_for_pieces():
    """A phrase occurs twice at least. The size counts pieces, 256 or more, and phrases."""
    assert FewPieces.train(["new york"], 300).phrases == set()
    assert len(FewPieces.train(["new york"] * 9, 258).units) == 258


def test_phrases_refuse_texts_that_can_be_read_once():
    """The second time a generator is empty: there would be no pieces but bytes."""
    with pytest.raises(AssertionError, match="expected what can be read twice"):
        Phrases.train((text for text in ["new york"] * 9), 300)


def test_phrases_split_takes_the_longest_and_pieces_for_the_rest(phrases):
    text = "NEW  York mayor qzj"
    units, spans = phrases.split(text)
    assert units == ["new york", "mayor", *units[2:]]
    assert "".join(units[2:]) == "Ġqzj"
    covered = [text[a:b] for a, b in spans]
    assert covered[:2] == ["NEW  York", "mayor"]
    assert covered[-2:] == ["z", "j"]


def test_show_decodes_pieces_and_no_phrases():
    phrases = FewPieces.train(["café"] * 9, 258)
    assert phrases.show("café") == "café"
    assert phrases.show("ĠÃ©") == " é"


def test_pieces_are_of_a_word_as_it_is_written(bpe, phrases):
    """Hashing drops the word joiner, and cuts at U+200B; BPE has pieces for both."""
    for mark in ("\u2060", "\u200b"):
        _, spans = bpe.split(f"zq{mark}jk")
        assert (2, 3) in spans
    _, spans = phrases.split("zq\u2060jk")
    assert (2, 3) in spans
    _, spans = phrases.split("zq\u200bjk")
    assert (2, 3) not in spans
    assert phrases.split("ne\u2060w")[0] == ["new"]


@pytest.mark.parametrize("texts, kept", [
    ([f"new york x{i % 20}" for i in range(40)], {"new york", "new", "york"}),
    (["a b c d e f"] * 9, {"a"}),  # of equal counts not all are dropped
])
def test_phrases_drop_the_rare_where_memory_is_short(monkeypatch, texts, kept):
    monkeypatch.setattr(FewPieces, "MAX_COUNTED", 9)
    assert FewPieces.train(texts, 300).phrases >= kept


# Names of items


@pytest.mark.parametrize("words, max_words, stops", [
    ("new york city hall", 3, [2, 4]),  # "york city" comes too late
    ("a b c a b", 3, [3, 4, 5]),
    ("a b c", 2, [1, 2, 3]),  # too long a phrase
])
def test_match_longest_is_greedy(words, max_words, stops):
    phrases = {"new york", "york city", "city hall", "a b c"}
    runs = match_longest(words.split(), phrases, max_words)
    assert list(runs) == list(zip([0, *stops], stops))


@pytest.mark.parametrize("text, expected", [
    ("Miles  Davis plays, Jazz", ["Miles Davis", "plays,", "Jazz"]),  # the longest known name
    ("New  York\t \tJazz", ["New York", "Jazz"]),  # tabs: each is a name, known or not
])
def test_split_names_finds_names_of_several_words(text, expected):
    names, _ = ItemNames(["Miles Davis"]).split(text)
    assert names == expected


def test_names_of_a_text_do_not_change_the_next():
    tokenizer = make_tokenizer(SKETCH, ItemNames(["New York"]))
    tokenizer.ids(["Bill Evans"])
    names, _ = tokenizer.split("New York Bill Evans")
    assert names == ["New York", "Bill", "Evans"]


def test_names_of_a_generator_may_have_spaces():
    """It can be read once: the longest name is not looked for in what is left of it."""
    splitter = ItemNames(name for name in ["Miles Davis", "Jazz"])
    assert splitter.split("Miles Davis Jazz")[0] == ["Miles Davis", "Jazz"]


@hypothesis.settings(deadline=None, database=None, derandomize=True)
@hypothesis.given(st.text("ab \t\u2028İ\ud800"))
def test_split_names_hold_all_words_and_stand_at_their_spans(text):
    names, spans = ItemNames(["a b"]).split(text)
    assert " ".join(names).split() == text.split()
    assert names == [" ".join(text[start:end].split()) for start, end in spans]


# Token IDs and codes


@pytest.mark.parametrize("code_format, dtype", [
    ("index", np.int32),
    ("chunks", np.int16),
    ("bits", np.uint8),
    ("sketch", np.int32),
    ("weighted", np.int32),
    ("ngrams", np.int32),
])
def test_codes_are_the_hashes_of_the_words(code_format, dtype, lsh):
    """The last one of k + 1 = 4 independent hash functions chooses the importance weights."""
    words = make_words(5)
    bits = lsh.bits(words, 29)
    sketch = sketch_index(words, 3, 41, 3, "k")
    rows = sketch_index(words, 3, 499, 3, "k")
    weights = sketch_index(words, 4, 97, 3, "k")[:, 3:]
    expected = dict(
        index=lsh.index(words, 499)[:, None],
        chunks=bits_to_chunks(bits, 7),
        bits=np.packbits(bits, axis=1),
        sketch=sketch,
        weighted=np.hstack([rows, weights]),
        ngrams=ngram_index(words, 499, 9, 3, "k"))

    config = make_config(code_format)
    tokenizer = make_tokenizer(config, hash=lsh, hash_seed=3, key="k")
    tokenizer = reload(tokenizer, config)
    ids = tokenizer.ids(words)
    codes = tokenizer.codes()
    assert codes.dtype == dtype
    assert not codes[:FIRST_WORD_ID].any()
    assert (codes[ids] == expected[code_format]).all()
    assert (tokenizer.target_coder.codes(words) == sketch).all()  # for hash-mlm, with any codes


@pytest.mark.parametrize("code_format", ["bits", "index"])
def test_lsh_knows_the_words_with_an_ngram_of_its_corpus(code_format):
    """A known word may be in bucket 0 of index codes, as unknown words are."""
    config = make_config(code_format)
    config.rows = 1
    tokenizer = make_tokenizer(config, hash=NgramLSH.fit({"play": 1}))
    assert tokenizer.is_known(["play", "lay", "фильм"]).tolist() == [True, True, False]


def test_other_hashes_know_all_words_and_a_vocabulary_its_own():
    assert make_tokenizer(BITS, hash=MD5()).is_known(["фильм"]).all()
    lsh = NgramLSH.fit({"play": 1})  # which codes of a sketch do not depend on
    assert make_tokenizer(SKETCH, hash=lsh).is_known(["фильм"]).all()
    tokenizer = make_tokenizer(ROW, vocabulary=["cat"])
    assert tokenizer.is_known(["cat", "фильм"]).tolist() == [True, False]


def test_digest_codes_count_in_the_block_of_their_map():
    """Items have the buckets 0 .. R-1 of each map, and special token s row R + s of each block."""
    words = make_words(23)
    bloom_map = BloomMap(23, 3)  # R = 8
    tokenizer = make_tokenizer(DIGEST, ItemNames(), vocabulary=words, bloom_map=bloom_map)
    codes = tokenizer.codes()
    assert codes.dtype == np.int32
    assert (codes[:FIRST_WORD_ID].T == [8, 9, 10, 11, 12]).all()
    assert (codes[FIRST_WORD_ID:] == bloom_map.digest).all()
    some = codes[tokenizer.ids([words[4], "?"])]
    assert some.tolist() == [bloom_map.digest[4].tolist(), [11, 11]]  # UNK
    copied = reload(tokenizer, DIGEST)
    assert (copied.codes() == codes).all()
    assert copied.target_coder is copied.coder  # hash-mlm predicts the digests themselves


@pytest.mark.parametrize("hash_name", ["md5", None])
def test_state_of_a_sketch_has_no_hash(hash_name):
    """Older checkpoints have the name of a hash where there is none."""
    tokenizer = make_tokenizer(SKETCH, key="k")
    state = tokenizer.state()
    assert "hash_name" not in state
    loaded = HashTokenizer.load(state | dict(hash_name=hash_name), SKETCH)
    assert loaded.coder == tokenizer.coder


@pytest.mark.parametrize("split", ["regex", "space", "bpe", "phrases"])
def test_ids_of_texts_matches_split_and_ids_of_a_copy(split, bpe, phrases):
    splitters = dict(regex=Words(), space=SpacedWords(), bpe=bpe, phrases=phrases)
    fast = make_tokenizer(SKETCH, splitters[split])
    plain = reload(fast, SKETCH)
    texts = ["The cat,\tthe mat!", "", "The cat, sat İ日\ud800"]
    for text, ids in zip(texts, fast.ids_of_texts(texts)):
        words, _ = plain.split(text)
        assert ids.tolist() == plain.ids(words).tolist()
    assert fast.words == plain.words


# Refusals


@pytest.mark.parametrize("call, error, message", [
    # the IDs of all words after the second "cat" would be those of their neighbors
    (lambda: make_tokenizer(ROW, vocabulary=["cat", "cat", "dog"]), ValueError,
     "vocabulary: expected each word once"),
    (lambda: make_tokenizer(DIGEST, vocabulary=["cat"], bloom_map=BloomMap(23, 3)), ValueError,
     "bloom_map: expected that of 1 words, got one of 23 items"),
    (lambda: make_tokenizer(BITS), ValueError, "hash: expected a part"),
    (lambda: BitCoder(bits=8), ValueError, "hash: expected a part"),
    (lambda: make_tokenizer(ROW), ValueError, "vocabulary: expected a part"),
    (lambda: make_tokenizer(SKETCH).ids("play"), ValueError, "words: expected a list of str"),
    (lambda: sliding_windows(np.arange(5), np.arange(9), 7), ValueError,
     "length: expected 8 or more"),
    (lambda: build_inputs(np.arange(5), np.arange(5), 4), ValueError,
     "length: expected 5 or more"),
])
def test_silently_wrong_arguments_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("config, changes, message", [  # changes, or the part that is not there
    (BITS, dict(hash=dict(bits=3)), "hash md5: expected key, got bits"),
    (BITS, dict(hash_name="md6"), "hash: expected one of .*, got 'md6'"),
    (BITS, dict(split="item"), "split: expected one of .*, got 'item'"),
    (BITS, dict(split="bpe", subwords='{"model":'), "pieces of BPE: could not be read"),
    (BITS, dict(split="bpe"), "pieces of BPE: could not be read"),
    *[(BITS, dict(split="phrases", subwords=subwords), "phrases: could not be read")
      for subwords in (None, "{", "[]", '{"phrases": []}', '{"phrases": null, "bpe": "{}"}')],
    (DIGEST, dict(vocabulary=[], bloom_map=dict(n_items=23)),
     "Bloom map: expected .*, got n_items"),
    (DIGEST, dict(vocabulary=["cat"], bloom_map=BloomMap(23, 3).state()), "bloom_map: expected"),
    (ROW, dict(vocabulary=["cat", "cat"]), "vocabulary: expected each word once"),
    (BITS, "split", "split: expected one of .*, got None"),
    (BITS, "hash_name", "hash: expected one of .*, got None"),
    (BITS, "hash", "tokenizer: expected hash, got "),
    (BITS, "hash_seed", "tokenizer: expected hash_seed, got "),
    (BITS, "key", "tokenizer: expected key, got "),
])
def test_damaged_state_is_refused(config, changes, message):
    state = make_tokenizer(BITS, hash=MD5()).state()
    if isinstance(changes, str):
        del state[changes]
    else:
        state |= changes
    with pytest.raises(ValueError, match=f"^{message}"):
        HashTokenizer.load(state, config)


def test_state_of_an_older_checkpoint_is_loaded():
    """It had no sizes, and None for a part that the codes do not have."""
    state = make_tokenizer(SKETCH, hash_seed=3, key="k").state()
    old_state = dict(split="regex", subwords=None, hash_seed=3, key="k", hash_name="md5",
                     hash=dict(key=None), vocabulary=None, bloom_map=None)
    loaded = HashTokenizer.load(old_state, SKETCH)
    assert loaded.state() == state


# Inputs of a model


@pytest.mark.parametrize("length", [8, 21])
@pytest.mark.parametrize("num_question, num_context", [(1, 1), (3, 29), (12, 40)])
def test_sliding_windows_hold_every_word_and_the_question(num_question, num_context, length):
    """A question has half of the room at most. Windows start a third of the length apart."""
    question = list(range(1000, 1000 + num_question))[:(length - 4) // 2]
    room = length - 4 - len(question)
    context = np.arange(num_context)
    windows = sliding_windows(np.arange(1000, 1000 + num_question), context, length)
    end = 0
    for i, (ids, offset, start, stop) in enumerate(windows):
        assert start == i * (length // 3) <= end < num_context
        assert stop == min(start + room, num_context)
        assert ids.tolist() == [CLS, *question, SEP, SEP, *range(start, stop), SEP]
        assert ids[offset] == start
        end = stop
    assert end == num_context
