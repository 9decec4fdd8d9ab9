"""Words to bits and buckets: MD5, locality-sensitive hashing of character n-grams, bit chunks, sketch hashes.

Paper map: [HF] Xue & Aletras 2022, HashFormers: Towards Vocabulary-independent Pre-trained Transformers
    [HF §3.2] md5_digests   [HF §3.3] NgramLSH   [HF §3.4] bits_to_chunks   [HF §3.5] NgramLSH.bits
    [CM] sketch_index (Median is all you need, a proposal)
Out of scope: vocabularies and token IDs (tokenizer.py), Bloom maps (bloom.py), LSH of vectors (attention.py).
Deviations:
    1. A word is a run of letters or of symbols, in lower case ("regex"). "space" splits as the paper does.
    2. The vector of the hyperplanes is rounded to 1/4096: sums are exact integers, the same on every machine.
    3. The seed and the key are arguments, and state() returns them. The paper withholds the value of its key.
    4. One rotated vector serves the bits (§3.5) too; the paper has T random hyperplanes. fit shuffles the
       n-grams, which decorrelates the bits (measured in docs/hashformers.md, deviation 5).
    5. A byte order mark or a NUL separates words, as white space does.
Notation: V words   T bits   N hash buckets   k bits of a chunk, or hash functions of a sketch of R rows each
Demo: python hashing.py "play plays played"
"""

import hmac
import os
import re
import sys
from hashlib import md5

import numpy as np

_PATTERNS = {"regex": re.compile(r"\w+|[^\w\s\ufeff\0]+"), "space": re.compile(r"[^\s\ufeff\0]+")}
_SHIFTS = np.array([48, 32, 16, 0], np.uint64)  # bits below each of the four digits of a _gram_keys number


def check(name, is_valid, expected, value, advice=""):
    """Raise a ValueError that names an argument and its value, unless is_valid."""
    if not is_valid:
        raise ValueError(f"{name}: expected {expected}, got {value!r:.60}.{advice}")


def check_int(name, value, low, high, advice=""):
    """Raise ValueError unless value is an int of low .. high."""
    is_valid = isinstance(value, (int, np.integer)) and low <= value <= high
    check(name, is_valid, f"{low:,} to {high:,}", value, advice)


def check_words(words, name="words"):
    """Raise ValueError unless words is a list of str. A plain str would be hashed letter by letter."""
    kinds = set(map(type, words)) if isinstance(words, (list, tuple)) else {None}
    check(name, kinds <= {str, np.str_}, "a list of str", words)


def split_words(text, how="regex"):
    """Split text into lower-case words and return their positions. [HF §3.2]

    Args: text str; how "regex" (runs of letters, digits and _, and runs of other symbols) or "space".
    Returns: words list[str]; spans list[(start, end)] in characters.  "Don't stop!!" -> don ' t stop !!
    """
    matches = list(_get_pattern(text, how).finditer(text))
    # subtle: lower-case each match, not the text: "İ".lower() is two characters and would shift the offsets
    return [match.group().lower() for match in matches], [match.span() for match in matches]


def list_words(text, how="regex"):
    """Return the words of split_words without their spans, about three times as fast."""
    # in ASCII lower() keeps every offset, so one call serves the whole text
    words = _get_pattern(text, how).findall(text.lower() if text.isascii() else text)
    return words if text.isascii() else [word.lower() for word in words]


def _get_pattern(text, how):
    """Return the compiled pattern of `how`, a key of _PATTERNS; ValueError for a bad text or how."""
    check("text", isinstance(text, str), "a str", text)
    check("how", how in _PATTERNS, " or ".join(_PATTERNS), how)
    return _PATTERNS[how]


def md5_digests(words, count=1, key=None):
    """Return the MD5 digests of each word. [HF §3.2]

    Args:
        words: list[str], V words; key str for keyed digests (HMAC-MD5), or None.
        count: int, digests per word: of the word, then of the word followed by 1, 2, ... in four bytes.
    Returns: uint8 (V, 16 * count).
    """
    check_words(words)
    check_int("count", count, 1, 1 << 32)
    check("key", key is None or isinstance(key, str), "a str or None", key)
    suffixes = [b""] + [i.to_bytes(4, "big") for i in range(1, count)]
    # subtle: JSON can produce a lone surrogate; "surrogatepass" encodes it where the default would raise
    texts = [word.encode("utf-8", "surrogatepass") + suffix for word in words for suffix in suffixes]
    secret = (key or "").encode("utf-8", "surrogatepass")
    digests = [md5(text, usedforsecurity=False).digest() if key is None else hmac.digest(secret, text, "md5")
               for text in texts]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(len(words), 16 * count)


def md5_bits(words, bits=128, key=None):
    """Return the first bits of MD5, most significant first; after 128, of further digests. [HF §3.2]

    Args: words and key as in md5_digests; bits int T, at least 1.  Returns: uint8 (V, T) of 0 and 1.
    """
    check_int("bits", bits, 1, 1 << 32)
    return np.unpackbits(md5_digests(words, -(-bits // 128), key), axis=1)[:, :bits]


def md5_index(words, n, key=None):
    """Return MD5, read as a 128-bit integer, modulo n. [HF §3.2]

    Args: words and key as in md5_digests; n int, number of buckets, 1 .. 2**32.
    Returns: int64 (V,) in 0 .. n-1: play -> 15933 of 50,000.
    """
    check_int("n", n, 1, 1 << 32)
    n, (high, low) = int(n), md5_digests(words, 1, key).view(">u8").astype(np.uint64).T  # each (V,)
    # (2^64 · high + low) mod n; with n up to 2^32 nothing exceeds 64 bits
    return ((high % n * (2**64 % n) + low % n) % n).astype(np.int64)


def sketch_index(words, k, rows, seed=0, key=None):
    """Return k independent hash buckets per word, from disjoint slices of eight bytes of its digests. [CM]

    Args:
        words: as in md5_digests; seed int; key str or None: HMAC-MD5 keyed with both, plain MD5 if neither.
        k, rows: int, number of hash functions, 1 .. 255, and R, the buckets of each, 1 .. 2**32.
    Returns: int64 (V, k), each in 0 .. R-1: play -> 409, 489, 306, 104, 165 of 500.
    """
    # not h(x) = x · prime_j mod R: numbers equal modulo R collide under every function of that family
    check_int("k", k, 1, 255)
    check_int("rows", rows, 1, 1 << 32)
    digests = md5_digests(words, -(-k // 2), f"{key or ''} sketch {seed}" if seed or key else None)
    return (digests.view(">u8")[:, :k] % np.uint64(rows)).astype(np.int64)


def bits_to_chunks(bits, k):
    """Cut rows of bits into numbers of k bits; the last has the remaining bits, unpadded. [HF §3.4]

    Args: bits uint8 (V, T) of 0 and 1; k int, 1 .. 15.
    Returns: int16 (V, ceil(T/k)): 1010 0100 001 with k = 4 -> 10 4 1.
    """
    check_int("k", k, 1, 15)
    is_valid = isinstance(bits, np.ndarray) and bits.dtype == np.uint8 and bits.ndim == 2 and bits.shape[1]
    check("bits", is_valid and bits.max(initial=0) < 2, "uint8 (V, T) of 0 and 1", bits)
    chunks = [bits[:, start:start + k].astype(np.int16) for start in range(0, bits.shape[1], k)]
    # the product with the place values 2^(n-1) .. 4 2 1 reads n binary digits as a number
    return np.stack([c @ (1 << np.arange(c.shape[1], dtype=np.int16)[::-1]) for c in chunks], 1)


class Hash:
    """Base class of HASHES: an instance is saved as the keyword arguments of its constructor.

    options: keyword of fit -> command-line flag. needs_counts: fit reads its counts. index_is_slow: callers
    index many words in parallel. max_outputs: largest T and N, or None. learned: attributes that fit sets.
    """
    needs_counts, index_is_slow, max_outputs, learned = False, False, None, ()

    def state(self):
        """Return a dict of plain types, of `learned` and of `options`: cls(**state) is the same hash."""
        return {name: getattr(self, name) for name in (*self.learned, *self.options)}


class MD5(Hash):
    """MD5 as a class of HASHES: similar words share no more bits than unrelated ones. [HF §3.2]"""
    options = {"key": "key"}

    def __init__(self, key=None):
        self.key = key

    @classmethod
    def fit(cls, counts=None, key=None):
        """Return MD5(key). Nothing is learned from `counts`."""
        return cls(key)

    def bits(self, words, T):
        """Return md5_bits: uint8 (V, T) of 0 and 1."""
        return md5_bits(words, T, self.key)

    def index(self, words, N):
        """Return md5_index: int64 (V,) in 0 .. N-1."""
        return md5_index(words, N, self.key)


class NgramLSH(Hash):
    """Locality-sensitive hashing: words that share character n-grams share bits. [HF §3.3]

    The features are the F most frequent n-grams of the corpus, n = 1..4. A word is the vector x (F,) of its
    feature counts. Hyperplane j is the random vector eta (F,) rotated by j: r^j[f] = eta[(f + j) mod F]. So
    the values of feature f under hyperplanes 0, 1, 2, ... are a window of eta, and no matrix is ever stored:

        x · [r^0 r^1 r^2 ...] = sum over the word's n-grams of eta[f : f + T]

    The law is E[Hamming distance] / T = angle(x, y) / pi. play and plays differ in about 23 of 128 bits.

    Attributes: grams list[str], feature f is grams[f]; feature_of_gram, dict of gram -> f; features int F;
        eta int32 (2F,), F numbers in 1/4096, twice, as a window may run over the end; alphabet int (A,),
        code points of the grams; keys uint64, _gram_keys, sorted; feature_of_key int64, f of each.
    """
    options = {"features": "features", "seed": "hash_seed"}
    needs_counts, index_is_slow, learned = True, True, ("grams",)
    max_outputs = 65_535  # features, and distinct characters, for which _gram_keys has 16 bits

    def __init__(self, grams, features, seed=0):
        """Take grams list[str], at most F; features int F, the length of one eta; and the seed of eta."""
        check_int("features", features, max(len(grams), 1), self.max_outputs)
        self.grams, self.features, self.seed = grams, features, seed
        eta = np.random.default_rng(seed).standard_normal(features)
        self.eta = np.rint(np.tile(eta, 2) * 4096).astype(np.int32)
        self.feature_of_gram = {gram: f for f, gram in enumerate(grams)}
        self.alphabet = np.unique(_code_points(grams)[0])
        keys, owner = _gram_keys(grams, self.alphabet)
        # the longest n-gram of grams[f] is the whole of it, and has the largest key
        keys = np.maximum.reduceat(keys, np.searchsorted(owner, range(len(grams))))
        self.keys, self.feature_of_key = np.unique(keys, return_index=True)

    @classmethod
    def fit(cls, counts, features=50_000, seed=0):
        """Choose the most frequent n-grams of a corpus, ties by length and code point, and shuffle them.

        Args: counts dict, word -> count in the corpus; features int F, the most to choose; seed int of eta.
        """
        check("counts", isinstance(counts, dict), "a dict of word -> count", counts)
        words, weights = list(counts), np.fromiter(counts.values(), float)  # exact up to 2**53
        points, lengths = _code_points(words)
        frequency = np.bincount(points, np.repeat(weights, lengths))
        # no n-gram is more frequent than its rarest character, so the features have only these characters
        alphabet = np.sort(np.argsort(-frequency, kind="stable")[:cls.max_outputs])
        keys, sums = np.empty(0, np.uint64), np.empty(0)
        for start in range(0, len(words), 500_000):  # in parts, as each n-gram of a word takes 8 bytes
            new_keys, owner = _gram_keys(words[start:start + 500_000], alphabet)
            keys, group = np.unique(np.append(keys, new_keys), return_inverse=True)
            sums = np.bincount(group, np.append(sums, weights[start + owner]))
        best = keys[np.argsort(-sums, kind="stable")[:features]]  # ties: smaller key, so shorter n-gram
        letters = ["", *map(chr, alphabet)]  # of each digit of a key; 0 is none
        grams = ["".join([letters[p] for p in row]) for row in (best[:, None] >> _SHIFTS & 0xFFFF).tolist()]
        np.random.default_rng([seed, 1]).shuffle(grams)  # a stream of its own, not that of eta
        return cls(grams, features, seed)

    def bits(self, words, T):
        """Return the side of each of T hyperplanes a word lies on: bit j = (x · r^j > 0). [HF §3.5]

        Args: words list[str], V words; T int, number of bits, 1 .. features.
        Returns: uint8 (V, T) of 0 and 1; all 0 for a word without a known n-gram.
        """
        check_words(words)
        check_int("T", T, 1, self.features, " Raise the features (65,535 at most).")
        windows = np.lib.stride_tricks.sliding_window_view(self.eta, T)  # (2F - T + 1, T), a view
        out = np.empty((len(words), T), np.uint8)
        for start in range(0, len(words), 4096):
            keys, owner = _gram_keys(words[start:start + 4096], self.alphabet)  # (G,), (G,)
            place = np.searchsorted(self.keys, keys)  # of each key, or of the next larger one
            is_feature = np.append(self.keys, np.uint64(0))[place] == keys  # no key is 0
            feature_ids = self.feature_of_key[place[is_feature]]  # of all words; a word's begin at `first`
            amounts = np.bincount(owner[is_feature], minlength=len(words[start:start + 4096]))  # per word
            # Pass p adds feature p of each word that has one. Sorted by amount, these words come first:
            #     play (10), cat (6), at (3)    passes 0 .. 2: all rows;  3 .. 5: 2 rows;  6 .. 9: 1 row
            order = np.argsort(-amounts, kind="stable")
            first, amounts = (np.cumsum(amounts) - amounts)[order], amounts[order]
            # subtle: int32 is safe up to 40,000 n-grams, as |eta| < 13 sigma = 2**31 / (40,000 * 4096)
            sums = np.zeros((len(order), T), np.int64 if amounts[0] > 40_000 else np.int32)
            for p in range(amounts[0]):
                rows = first[amounts > p]
                sums[:len(rows)] += windows[feature_ids[rows + p]]
            out[start + order] = sums > 0
        return out

    def index(self, words, N):
        """Return the nearest of N hyperplanes: argmax over j < N of x · r^j. [HF §3.3]

        An n-gram costs N additions. stack[i] is the sum over the n-grams of the first i letters. Sorted words
        share prefixes and keep the sums of these, which halves the work:

            play     stack of  ""  p  pl  pla  play
            plays    stack of  ""  p  pl  pla  play  plays      adds what ends at the s: s ys ays lays

        Args: words list[str], V words; N int, number of hyperplanes, 1 .. features.
        Returns: int64 (V,) in 0 .. N-1; 0 for a word without a known n-gram.
        """
        check_words(words)
        check_int("N", N, 1, self.features, " Raise the features (65,535 at most).")
        out, before = np.zeros(len(words), np.int64), ""
        stack, depth = [np.zeros(N, np.int32)], 24  # later letters share stack[25]: bounds the memory
        for word, i in sorted(zip(words, range(len(words)))):
            del stack[min(len(os.path.commonprefix([before, word])), depth) + 1:]
            for end in range(len(stack), len(word) + 1):
                if end <= depth + 1:  # stack[25] sums any number of n-grams: 64 bits
                    stack.append(stack[-1].copy() if end <= depth else stack[-1].astype(np.int64))
                for size in range(1, min(end, 4) + 1):
                    if (f := self.feature_of_gram.get(word[end - size:end])) is not None:
                        stack[-1] += self.eta[f:f + N]
            out[i], before = stack[-1].argmax(), word
        return out


def list_ngrams(word):
    """Return the runs of 1 to 4 characters of a word, 10 of "play"."""
    return [word[i:i + n] for n in range(1, 5) for i in range(len(word) - n + 1)]


def _code_points(words):
    """Return the code points of all words in a row, uint32 (characters,), and the lengths, int64 (V,)."""
    text = "".join(words).encode("utf-32-le", "surrogatepass")
    return np.frombuffer(text, np.uint32), np.fromiter(map(len, words), np.int64)


def _gram_keys(words, alphabet):
    """Return the G known n-grams of words as numbers, uint64 (G,), and the index of each word, int64 (G,).

    They come by first character, then by length. A number has base 65,536 and a digit per character: its
    place in the alphabet, int (A,), from 1. So a longer n-gram is a larger number.

        p  l  a  y        p   pl   pla   play
                     ->   l   la   lay   .          "play" has 4 + 3 + 2 + 1 = 10
                          a   ay   .     .          . is unknown: it runs over the end of the word
                          y   .    .     .
    """
    points, lengths = _code_points(words)
    place = np.zeros(0x110000, np.uint64)  # of each code point; 0 outside of the alphabet
    place[alphabet] = np.arange(1, len(alphabet) + 1)
    place = np.insert(place[points], np.cumsum(lengths), 0)  # a 0 ends each word
    windows = np.stack([np.roll(place, -n) for n in range(4)])  # (4, characters + V): four from each on
    is_known = np.logical_and.accumulate(windows > 0)  # False from the first 0 on
    four = np.bitwise_or.reduce(windows << _SHIFTS[:, None])  # (characters + V,), keys of the 4-grams
    keys = (four[:, None] >> _SHIFTS)[is_known.T]  # of (characters + V, 4): 1, 2, 3 and 4 digits
    return keys, np.repeat(np.repeat(np.arange(len(words)), lengths + 1), is_known.sum(0))


def ngram_products_reference(lsh, words, T):
    """Return x @ R, int64 (V, T), of which NgramLSH.bits is the sign and .index the argmax: slow, an oracle.

    Row x counts the n-grams of a word; column j of R is eta rotated by j.
    """
    x = np.zeros((len(words), lsh.features + 1), np.int64)  # the last column counts the unknown n-grams
    for row, word in zip(x, words):
        for gram in list_ngrams(word):
            row[lsh.feature_of_gram.get(gram, -1)] += 1
    return x[:, :-1] @ np.stack([np.roll(lsh.eta[:lsh.features], -j) for j in range(T)], 1)


HASHES = {"md5": MD5, "lsh": NgramLSH}  # a new hash is one class like these two, and its line here


def main(argv=None):
    """Show the MD5 and LSH bits of the words of a text, and how many differ, beside the law."""
    words = list_words(" ".join(sys.argv[1:] if argv is None else argv)) or "play plays played zebra".split()
    grams = set(list_ngrams(" ".join(words)))
    x = np.array([[list_ngrams(word).count(gram) for gram in grams] for word in words])
    cosines = x @ x[0] / np.sqrt((x * x).sum(1) * (x[0] @ x[0]))
    pairs = [a + b for a in "etaoinshrdlu" for b in "etaoinshrdlu"]  # the law needs unrelated n-grams, too
    print("differ: bits unlike the first word's, by chance 64. law of lsh: 128 · angle of n-gram counts / pi")
    for name, hash_class in HASHES.items():
        print(f"\n{name:>12}  {'40 of 128 bits: # is 1, . is 0':40}  differ  law")
        bits = hash_class.fit(dict.fromkeys(words + pairs, 1)).bits(words, 128)
        for word, row, law in zip(words, bits, 128 / np.pi * np.arccos(np.minimum(cosines, 1))):
            print(f"{word:>12}  {''.join('.#'[b] for b in row[:40])}  {(row != bits[0]).sum():6d}{law:5.0f}")
    print("\nmd5 modulo 50,000:", dict(zip(words, md5_index(words, 50_000).tolist())))


if __name__ == "__main__":
    main()
