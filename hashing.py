"""Words and items to integers: MD5, sketches, LSH of n-grams, Bloom maps, BPE, phrases.

Sources   [HF] Xue & Aletras 2022, HashFormers: Towards Vocabulary-independent Pre-trained Transformers
          [SB] Superbloom: Bloom filter meets Transformer, ICLR 2020 submission
          [CM] Median is all you need, a proposal
Map       [HF §3.2] md5_digests   [HF §3.3] NgramLSH   [HF §3.4] bits_to_chunks   [HF §3.5] NgramLSH.bits
          [SB §3.2] BloomMap   [SB App. D] coherent_map   [SB §4] Phrases
          [CM] sketch_index
Not here  hashing of *vectors*: attention by buckets shares only the name. Nothing here imports torch.
Departs   1. A word is a run of letters or a run of signs, lower-cased ("regex"); the paper's text says white
             space ("space"). Both are offered.
          2. The Gaussian vector of the hyperplanes is rounded to 1/4096, so every sum is an exact integer:
             no order of addition, no processor and no library version can flip a bit.
          3. The seed and the key are arguments and are saved with the model; the paper names neither.
          4. Random Bloom maps come from integer arithmetic alone and are the same on every machine; items
             that would share all buckets trade places: independent permutations alone do not prevent it.
Letters   V words   T bits   C code numbers a word   N rows (buckets), items   k bits a chunk
          m hashes an item   R buckets of a map
Try       python hashing.py "play plays played"
"""

import ast
import glob
import hashlib
import hmac
import json
import os
import re
import sys
import sysconfig
import warnings
import zlib
from collections import Counter

import numpy as np

# Special tokens are never hashed. WORD is no token: its row is added to the vector of every ordinary word.
SPECIALS = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "[WORD]")
PAD, CLS, SEP, UNK, MASK, WORD = range(6)
FIRST = len(SPECIALS)  # the id of the first ordinary word

SPLITS = ("regex", "space", "bpe", "phrases", "items")
# form of the codes -> what C numbers a word gets; embeddings.py has one module or more for each
FORMS = {
    "row": "one number: the word's row in a vocabulary (lookup)",
    "index": "one number: a bucket of N (emb)",
    "chunks": "ceil(T/k) numbers of k bits each (pool)",
    "bits": "T bits, packed into ceil(T/8) bytes, most significant bit first (add, proj, linear)",
    "digest": "m numbers: the item's rows in one table, a range of its own for each hash (bloom)",
    "sketch": "k numbers: a row in the block of each hash function (mean, median)",
    "weighted": "k + 1 numbers: k rows of N, and a row of the table of weights (weighted)",
}


class InputError(ValueError):
    """The input is at fault, not the program: the scripts print the message and exit with code 2."""


# ---------------------------------------------------------------------------------------------------------
# Text to words

_PATTERNS = {"regex": re.compile(r"\w+|[^\w\s]+"), "space": re.compile(r"\S+")}


def split_words(text, how="regex"):
    """Split text into lower-case words and say where each one stands.

    in:  text str; how "regex" (runs of letters, digits and _, runs of other signs) or "space"
    out: words list[str]; spans list[(start, end)] in characters, text[start:end].lower() == word
    [HF §3.2]  "Don't stop!!" -> don ' t stop !!
    """
    matches = list(_pattern(how).finditer(text))
    # subtle: lower-case each match, not the text: "İ".lower() is two characters and would shift the offsets
    return [m.group().lower() for m in matches], [m.span() for m in matches]


def words_of(text, how="regex"):
    """The words of split_words without the spans, about three times as fast.

    in:  text str; how as in split_words
    out: list[str]
    """
    if text.isascii():  # then lower() keeps every character's place, and one call serves the whole text
        return _pattern(how).findall(text.lower())
    return [word.lower() for word in _pattern(how).findall(text)]


def _pattern(how):
    if how not in _PATTERNS:
        raise InputError(f"unknown way to split: {how!r}; wanted {', '.join(SPLITS)}")
    return _PATTERNS[how]


def _plain(text):
    """A text as the BPE library can take it, as long as it was: lone surrogates become "?"."""
    # subtle: İ alone has a lower case of two characters, after which the library's offsets would be wrong
    return text.encode("utf-8", "replace").decode().replace("İ", "i")


class BPE:
    """Byte-level byte-pair encoding through the `tokenizers` library: the vocabulary of the baselines.

    Lower-cased like the words, so that the two differ in nothing but the vocabulary. A piece that opens a
    word starts with "Ġ", the byte-level alphabet's sign for a space; every text can be written, so there is
    no unknown piece.
    """

    def __init__(self, text):
        """in: text str, the tokenizer as JSON (what `.json` holds)"""
        import tokenizers

        self.json, self.tokenizer = text, tokenizers.Tokenizer.from_str(text)
        place = self.tokenizer.get_vocab()
        self.pieces = sorted(place, key=place.get)

    @classmethod
    def train(cls, texts, size=50_000, least=5):
        """Learn the pieces.

        in:  texts iterator of str; size int, most pieces; least int: a pair seen less often is never merged,
             which keeps the vocabulary of a small corpus small
        out: BPE
        """
        from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.normalizer = normalizers.Lowercase()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=size, min_frequency=least, initial_alphabet=alphabet,
                                      show_progress=False)
        tokenizer.train_from_iterator(map(_plain, texts), trainer)
        return cls(tokenizer.to_str())

    def split(self, text):
        """The pieces of a text and their character spans; shapes as in split_words."""
        coded = self.tokenizer.encode(_plain(text))
        return coded.tokens, coded.offsets

    def split_many(self, texts):
        """The pieces of many texts at once: list[list[str]], on all cores."""
        coded = self.tokenizer.encode_batch_fast(list(map(_plain, texts)))
        return [[self.pieces[i] for i in one.ids] for one in coded]


def longest_matches(words, known, longest):
    """Cut words into runs that are known, from the left, each as long as can be; any word may stand alone.

    in:  words list[str]; known, a container of runs joined by one space; longest, words of a run at most
    out: list of (start, stop)

        new york city hall, known "new york" and "city hall"    ->    (0, 2) (2, 4)
    """
    runs, start = [], 0
    while start < len(words):
        stop = min(start + longest, len(words))
        while stop > start + 1 and " ".join(words[start:stop]) not in known:
            stop -= 1
        runs.append((start, stop))
        start = stop
    return runs


def split_names(text, known, longest):
    """A text of names, which may be of several words, as they are: no lower case, signs stay.

    in:  text str, names between tabs, or else words; known, longest as in longest_matches
    out: names list[str]; spans list[(start, end)] in characters
    """
    if "\t" in text:
        parts = [match for match in re.finditer("[^\t]+", text) if match.group().strip()]
        return [" ".join(match.group().split()) for match in parts], [match.span() for match in parts]
    found = [(match.group(), *match.span()) for match in _PATTERNS["space"].finditer(text)]
    runs = longest_matches([word for word, _, _ in found], known, longest)
    return ([" ".join(word for word, _, _ in found[a:b]) for a, b in runs],
            [(found[a][1], found[b - 1][2]) for a, b in runs])


class Phrases:
    """The commonest words and pairs of words, and word pieces for the rest, longest first. [SB §4]

    A vocabulary of a million has many names in it: "new york" is one token. Here phrases are lower-cased
    words joined by a space; a word that is not among them is cut to pieces of a BPE of the same texts.
    """

    MOST = 10_000_000  # words and pairs counted at a time; then the rarest are forgotten, to half of it

    def __init__(self, text):
        """in: text str, JSON (what `.json` holds)"""
        state = json.loads(text)
        self.json, self.phrases, self.bpe = text, state["phrases"], BPE(state["bpe"])
        self.known = set(self.phrases)
        self.pieces = self.phrases + [piece for piece in self.bpe.pieces if piece not in self.known]

    @classmethod
    def train(cls, texts, size=1_000_000, pieces=30_000):
        """in: texts iterator of str; size int, words, pairs and pieces in all; pieces int, most of the BPE"""
        counts, room = Counter(), cls.MOST

        def counted():
            nonlocal room
            for text in texts:
                words = words_of(text)
                counts.update(words)
                counts.update(map(" ".join, zip(words, words[1:])))
                for least in range(1, 9) if len(counts) > room else ():
                    if len(counts) > cls.MOST / 2:
                        for phrase in [p for p, count in counts.items() if count <= least]:
                            del counts[phrase]
                    room = max(cls.MOST, 2 * len(counts))
                yield text

        bpe = BPE.train(counted(), min(pieces, size))
        best = sorted(counts, key=lambda phrase: (-counts[phrase], phrase))
        best = [phrase for phrase in best[:max(size - len(bpe.pieces), 0)] if counts[phrase] > 1]
        return cls(json.dumps(dict(phrases=best, bpe=bpe.json)))

    def split(self, text):
        """The phrases of a text and their character spans; shapes as in split_words."""
        words, spans = split_words(text)
        out, places = [], []
        for start, stop in longest_matches(words, self.known, 2):
            if stop == start + 1 and words[start] not in self.known:
                a, b = spans[start]
                pieces, inside = self.bpe.split(text[a:b])  # not of the word: İ in lower case is longer
                out += pieces
                places += [(a + first, a + last) for first, last in inside]
            else:
                out.append(" ".join(words[start:stop]))
                places.append((spans[start][0], spans[stop - 1][1]))
        return out, places

    def split_many(self, texts):
        """The phrases of many texts: list[list[str]]"""
        return [self.split(text)[0] for text in texts]


# ---------------------------------------------------------------------------------------------------------
# MD5


def md5_digests(words, count=1, key=None):
    """MD5 of each word, as bytes. [HF §3.2]

    in:  words list[str]; count int, digests a word; key str or None: keyed (HMAC) when given
    out: uint8 (V, 16 * count)
    """
    # subtle: surrogatepass, else a lone surrogate, which json can produce, stops a week of hashing
    texts = [word.encode("utf-8", "surrogatepass") for word in words]
    if count > 1:  # the first digest is the word's own; the others are of the word with a counter after it
        suffixes = [b""] + [i.to_bytes(4, "big") for i in range(1, count)]
        texts = [text + suffix for text in texts for suffix in suffixes]
    if key is None:
        md5 = hashlib.md5
        raw = b"".join([md5(text, usedforsecurity=False).digest() for text in texts])
    else:
        key = key.encode("utf-8", "surrogatepass")
        raw = b"".join([hmac.digest(key, text, "md5") for text in texts])
    return np.frombuffer(raw, np.uint8).reshape(len(words), 16 * count)


def md5_bits(words, bits=128, key=None):
    """The first bits of MD5, most significant first; beyond 128 further digests follow. [HF §3.2]

    in:  words list[str]; bits int; key as in md5_digests
    out: uint8 (V, bits) of 0 and 1
    """
    return np.unpackbits(md5_digests(words, -(-bits // 128), key), axis=1)[:, :bits]


def md5_index(words, n, key=None):
    """MD5, read as a 128-bit integer, modulo n. [HF §3.2]

    in:  words list[str]; n int, 1 .. 2**32
    out: int64 (V,) in 0 .. n-1        play -> 15933 of 50,000
    """
    if not 0 < n <= 1 << 32:
        raise InputError(f"n = {n:,} rows: wanted 1 .. 2**32")
    high, low = md5_digests(words, 1, key).view(">u8").astype(np.uint64).T
    n = np.uint64(n)
    # 2**64 mod n without a 65-bit number; no product below exceeds n * n <= 2**64
    carry = (np.uint64(2**64 - 1) % n + np.uint64(1)) % n
    return (((high % n) * carry % n + low % n) % n).astype(np.int64)


def sketch_index(words, k, rows, seed=0, key=None):
    """k independent hash functions of a word: disjoint slices of eight bytes of its digests. [CM]

    in:  words list[str]; k int; rows R, 1 .. 2**32; seed int, key str or None: without, plain MD5, else keyed
    out: int64 (V, k), each in 0 .. R-1        play -> 409, 489, 306, 104, 165 of 500

    Not h(x) = x · prime_j mod R: two numbers that are equal modulo R collide under every such function.
    """
    if not 0 < k <= 255 or not 0 < rows <= 1 << 32:
        raise InputError(f"k {k} hash functions of R {rows:,} rows: wanted 1 .. 255, and 1 .. 2**32")
    digests = md5_digests(words, -(-k // 2), f"{key or ''} sketch {seed}" if seed or key else None)
    return (digests.view(">u8")[:, :k] % np.uint64(rows)).astype(np.int64)


class SketchMap:
    """Words by their sketch: what BloomMap is to items, for any list of words. [CM]

    Two words may share all k buckets, about V² / 2 R^k pairs; they score the same.
    """

    def __init__(self, words, k, rows, seed=0, key=None):
        """in: as sketch_index

        attributes: as BloomMap: digest int32 (V, k); members int32 (k, R, alpha), -1 where empty; n_items V;
        m k; buckets R; alpha, the most words in a bucket
        """
        self.n_items, self.m, self.buckets = len(words), k, rows
        index = sketch_index(words, k, rows, seed, key)
        self.digest = index.astype(np.int32)
        cell = (index + rows * np.arange(k)).T.ravel()  # hash function and bucket in one number
        sizes = np.bincount(cell, minlength=k * rows)
        self.alpha = int(sizes.max())
        order = np.argsort(cell, kind="stable")  # map by map, bucket by bucket
        place = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # within its bucket
        self.members = np.full((k, rows, self.alpha), -1, np.int32)
        self.members.reshape(k * rows, -1)[cell[order], place] = order % max(len(words), 1)


# ---------------------------------------------------------------------------------------------------------
# Locality-sensitive hashing of words by their character n-grams


class NgramLSH:
    """Words that share character n-grams share bits. [HF §3.3]

    A word is the bag x of its n-grams, n = 1..4, weighted by their count in it; only the `features` commonest
    in the corpus count. Hyperplane j is the vector eta rotated by j: r^j[f] = eta[(f + j) mod features].
    So the values of feature f under hyperplanes 0, 1, 2, ... are a window that starts at eta[f], and

        x · [r^0 r^1 r^2 ...] = sum over the word's n-grams of eta[f : f + T]      no matrix is ever stored.

    Law: E[Hamming distance] / T = angle(x, y) / pi. play and plays differ in about 23 of 128 bits.
    """

    ONE = 4096  # eta is kept in units of 1/4096
    MOST = 65_535  # features: a character is packed in 16 bits
    PIECE = 500_000  # words fitted at a time
    LONGEST = 4  # n-grams of 1..4 characters

    def __init__(self, grams, features, seed=0):
        """in: grams list[str], feature f is grams[f]; features int >= len(grams), length of eta; seed int"""
        if features > self.MOST:
            raise InputError(f"features = {features:,}: wanted at most 65,535, "
                             f"n-grams are packed in 4 times 16 bits")
        self.grams, self.features, self.seed = grams, features, seed
        eta = np.random.default_rng(seed).standard_normal(features)
        self.eta = np.rint(np.tile(eta, 2) * self.ONE).astype(np.int32)  # twice: a window may run over
        self.feature = {gram: f for f, gram in enumerate(grams)}
        self.alphabet = np.unique(_code_points(grams)[0])
        if features < len(grams):
            raise InputError(f"features = {features:,} for {len(grams):,} n-grams: wanted as many at least")
        keys, _, lengths = _gram_keys(grams, self.alphabet)
        keys = keys[np.cumsum(lengths) - lengths, lengths - 1]  # the whole n-gram's, at its first character
        self.order = np.argsort(keys)
        self.keys = keys[self.order]

    @classmethod
    def fit(cls, counts, features=50_000, seed=0):
        """Choose the n-grams most frequent in a corpus; ties go to the shorter, then the first by code point.

        in:  counts dict[str, int], word -> count in the corpus
        out: NgramLSH
        """
        words = list(counts)
        weights = np.fromiter(counts.values(), np.int64, len(counts))
        points, lengths = _code_points(words)
        each, frequency = _sum_by_key(points, np.repeat(weights, lengths))
        most = np.lexsort((each, -frequency))[:cls.MOST]  # a rarer one can be no feature, nor part of one
        alphabet = np.sort(each[most])
        keys, sums = np.empty(0, np.uint64), np.empty(0, np.int64)
        for start in range(0, len(words), cls.PIECE):  # memory: its n-grams, and the distinct ones
            part = slice(start, start + cls.PIECE)
            grams, known, lengths = _gram_keys(words[part], alphabet)
            amount = np.repeat(weights[part], lengths)[:, None].repeat(cls.LONGEST, 1)
            keys, sums = _sum_by_key(np.concatenate([keys, grams[known]]),
                                     np.concatenate([sums, amount[known]]))
        best = np.lexsort((keys, -sums))[:features]  # a longer n-gram has a larger key: that settles the ties
        grams = []
        for key in keys[best].tolist():
            places = [(key >> shift) & 0xFFFF for shift in (48, 32, 16, 0)]
            grams.append("".join(chr(alphabet[p - 1]) for p in places if p))
        return cls(grams, features, seed)

    def bits(self, words, T):
        """Which side of each of T hyperplanes a word lies on: bit j = (x · r^j > 0). [HF §3.5]

        in:  words list[str]; T int <= features
        out: uint8 (V, T) of 0 and 1; a word with no known n-gram has all bits 0
        """
        self._check(T, "bits")
        windows = np.lib.stride_tricks.sliding_window_view(self.eta, T)  # (features + ..., T), a view
        out = np.empty((len(words), T), np.uint8)
        for start in range(0, len(words), 4096):
            part = words[start:start + 4096]
            features, amounts = self._features(part)  # all words' features, one word after the other
            first = np.cumsum(amounts) - amounts
            # Add the p-th n-gram of every word that has one. With the longest words first, those are always
            # the first `alive` rows: a pass is one gather and one addition.
            order = np.argsort(-amounts, kind="stable")
            first, amounts = first[order], amounts[order]
            wide = np.int64 if amounts[0] > 40_000 else np.int32  # 40,000 * 4 sigma * 4096 < 2**31
            sums = np.zeros((len(part), T), wide)
            alive = len(part)
            for p in range(amounts[0]):
                while amounts[alive - 1] <= p:
                    alive -= 1
                sums[:alive] += windows[features[first[:alive] + p]]
            out[start + order] = sums > 0
        return out

    def index(self, words, n):
        """The nearest of n hyperplanes: argmax over j of x · r^j, j < n. [HF §3.3]

        in:  words list[str]; n int <= features
        out: int64 (V,) in 0 .. n-1; a word with no known n-gram has index 0

        Cost: one addition of n numbers per n-gram. Sorted words share prefixes, and "plays" is "play" and the
        four n-grams that end at its s: a stack with one sum per letter halves the work.
        """
        self._check(n, "rows")
        out = np.zeros(len(words), np.int64)
        order = sorted(range(len(words)), key=words.__getitem__)
        depth = 24  # sums kept on the stack, 4n bytes each; the letters of a longer word after these are not
        stack, before = [np.zeros(n, np.int32)], ""
        for i in order:
            word = words[i]
            shared = len(os.path.commonprefix([before, word]))
            del stack[min(shared, depth) + 1:]
            total = stack[-1]
            if len(word) > 10_000:  # see `wide` above
                total = total.astype(np.int64)
            for end in range(len(stack), len(word) + 1):
                grams = (word[end - size:end] for size in range(1, min(end, self.LONGEST) + 1))
                windows = [self.eta[f:f + n] for f in map(self.feature.get, grams) if f is not None]
                if end <= depth or total is stack[-1]:
                    total = total.copy()
                for window in windows:
                    total += window
                if end <= depth:
                    stack.append(total)
            out[i] = total.argmax()
            before = word
        return out

    def _features(self, words):
        """in: words; out: features int64 (all n-grams of all words that are known), amounts int64 (V,)"""
        keys, known, lengths = _gram_keys(words, self.alphabet)
        if not len(self.keys) or not len(keys):
            return np.empty(0, np.int64), np.zeros(len(words), np.int64)
        owner = np.repeat(np.arange(len(words)), lengths)[:, None].repeat(self.LONGEST, 1)[known]
        keys = keys[known]
        place = np.searchsorted(self.keys, keys)
        place[place == len(self.keys)] = 0
        found = self.keys[place] == keys
        return self.order[place[found]], np.bincount(owner[found], minlength=len(words))

    def _check(self, n, what):
        if n > self.features:
            raise InputError(f"{n:,} {what} need as many hyperplanes, but rotations of a vector of "
                             f"{self.features:,} n-gram features give only {self.features:,}: "
                             f"raise the features")


def _code_points(words):
    """The characters of all words in a row, uint32, and the words' lengths, int64."""
    text = "".join(words).encode("utf-32-le", "surrogatepass")
    return np.frombuffer(text, np.uint32), np.fromiter(map(len, words), np.int64, len(words))


def _gram_keys(words, alphabet):
    """One number per n-gram: its characters' places in the alphabet, from 1, in 16 bits each.

    out: keys uint64 (characters, 4), column n-1 holds the n-gram that starts there; known bool, same shape:
         it ends inside the word and has only characters of the alphabet; lengths int64 (V,)

            p  l  a  y        p   pl   pla   play
                         ->   l   la   lay   .          "play" has 4 + 3 + 2 + 1 = 10
                              a   ay   .     .
                              y   .    .     .
    """
    points, lengths = _code_points(words)
    if not len(alphabet) or not len(points):
        return np.empty((0, 4), np.uint64), np.empty((0, 4), bool), np.zeros_like(lengths)
    place = np.searchsorted(alphabet, points)
    place[place == len(alphabet)] = 0
    inside = alphabet[place] == points
    place = (place + 1).astype(np.uint64)
    left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(points))  # characters to the word's end
    keys = np.empty((len(points), NgramLSH.LONGEST), np.uint64)
    known = np.empty(keys.shape, bool)
    keys[:, 0], known[:, 0] = place, inside
    for n in range(1, NgramLSH.LONGEST):
        keys[:, n] = keys[:, n - 1] << np.uint64(16)
        keys[:-n, n] |= place[n:]
        known[:, n] = known[:, n - 1] & (left > n)
        known[:-n, n] &= inside[n:]
    return keys, known, lengths


def _sum_by_key(keys, amounts):
    """in: keys (M,), amounts int64 (M,); out: distinct keys in order, sum of their amounts"""
    order = np.argsort(keys, kind="stable")
    keys, amounts = keys[order], amounts[order]
    first = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[:len(keys)])
    return keys[first], np.add.reduceat(amounts, first) if len(first) else amounts


# ---------------------------------------------------------------------------------------------------------
# Bloom maps: items of a huge vocabulary, each known by m small numbers


def random_order(n, *key):
    """A permutation from integer arithmetic alone: no library, version or machine changes it.

    in:  n int; key ints that name it
    out: int64 (n,), each of 0 .. n-1 once

    The order of i under splitmix64, which is a bijection: there are no ties.
    """
    def scatter(x):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    with np.errstate(over="ignore"):  # modulo 2**64 is meant
        start = np.zeros(1, np.uint64)
        for part in key:
            start = scatter(start + np.uint64(part % 2**64) + np.uint64(0x9E3779B97F4A7C15))
        return np.argsort(scatter(start + np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)))


class BloomMap:
    """N items in m maps of buckets, alpha items a bucket; no two items share all m buckets. [SB §3.2]

    Map j is an order of the items, cut after every alpha; the last bucket may be short:

        N 6, alpha 2        map 0   0 1 | 2 3 | 4 5          digest of item 1: (0, 1)
                            map 1   0 2 | 1 4 | 3 5          digest of item 4: (2, 1)

    Items that two random orders put together twice (about (alpha - 1)² / 2 pairs, whatever N is) trade places
    in the last map with others until none is left, so that every bucket keeps its size.
    """

    def __init__(self, n_items, alpha, m=2, seed=0, orders=None):
        """in: n_items N; alpha; m; seed int; orders int (m, N): the maps themselves (coherent_map)

        attributes: digest int32 (N, m) in 0 .. R-1, R = ceil(N/alpha); members int32 (m, R, alpha), the items
        of each bucket, -1 where empty
        err: InputError when so many items to a bucket leave too few digests
        """
        if min(n_items, alpha, m) < 1 or m > 255:
            raise InputError(f"N {n_items}, alpha {alpha}, m {m}: wanted 1 or more, and m 255 at most")
        self.n_items, self.alpha, self.m, self.seed = n_items, alpha, m, seed
        self.buckets = R = -(-n_items // alpha)
        if R ** (m - 1) < min(alpha, n_items):  # the items of a bucket must differ in the other maps
            self._impossible()
        self.given = orders is not None
        self.orders = (np.array(orders, np.int64) if self.given else
                       np.stack([random_order(n_items, seed, j) for j in range(m)]))  # (m, N)
        if not self.given and R ** (m - 1) < 4 * alpha:  # a quarter of all digests is taken, or more:
            for j in range(1, m):  # trading places would go on for long, so the maps are dealt out
                self._deal(j)
        self._trade()
        self.digest = np.empty((m, n_items), np.int32).T  # (N, m), each map's column in one piece
        for j, order in enumerate(self.orders):
            self.digest[order, j] = np.arange(n_items) // alpha
        self.members = np.full((m, R, alpha), -1, np.int32)
        self.members.reshape(m, -1)[:, :n_items] = self.orders
        del self.orders  # of use while the maps are made, and as large as they are

    def _impossible(self):
        most = max(int(self.n_items ** (1 - 1 / self.m)), 1)
        raise InputError(f"alpha = {self.alpha} is too large: {self.m} hashes of {self.buckets:,} buckets "
                         f"cannot tell {self.n_items:,} items apart; wanted less, about {most:,} at most, or "
                         f"more hashes")

    def _cells(self, maps):
        """in: maps int; out: int64 (N,), equal for items that share their buckets in the first `maps`"""
        cell = np.zeros(self.n_items, np.int64)
        for order in self.orders[:maps]:
            if cell.max() >= 2**62 // self.buckets:
                cell = np.unique(cell, return_inverse=True)[1]
            token = np.empty(self.n_items, np.int64)
            token[order] = np.arange(self.n_items) // self.alpha
            cell = cell * self.buckets + token
        return cell

    def _trade(self):
        """Items whose digest another has trade places in the last map, until there are none.

        A partner's place is free of trouble with a chance of 3/4 or more (or the maps are dealt out), so that
        a round leaves about a quarter of the offenders at most: two or three rounds do.
        """
        last, place = self.orders[-1], np.empty(self.n_items, np.int64)
        for turn in range(100):
            cell = self._cells(self.m)
            sorted_cell = np.sort(cell)
            twice = sorted_cell[1:][sorted_cell[1:] == sorted_cell[:-1]]
            if not len(twice):
                return
            suspects = np.flatnonzero(np.isin(cell, twice))
            suspects = suspects[np.argsort(cell[suspects], kind="stable")]
            # all but the first of each cell
            offenders = suspects[1:][cell[suspects[1:]] == cell[suspects[:-1]]]
            place[last] = np.arange(self.n_items)
            others = np.ones(self.n_items, bool)
            others[offenders] = False
            partners = random_order(self.n_items, self.seed, self.m, turn)
            partners = partners[others[partners]][:len(offenders)]
            a, b = place[offenders[:len(partners)]], place[partners]
            last[a], last[b] = last[b], last[a]
        self._impossible()

    def _deal(self, j):
        """Map j, so that items alike so far go to different buckets, and every bucket fills up exactly.

        The largest group of items alike so far goes first, one item to each of the buckets with most room,
        ties at random. For two maps this finds a map if there is one (it builds a 0/1 matrix with given row
        and column sums, as the theorem of Gale and Ryser has it); for more it may give up near the limit.
        """
        cell, order = self._cells(j), random_order(self.n_items, self.seed, self.m, j)
        order = order[np.argsort(cell[order], kind="stable")]
        groups = np.split(order, np.flatnonzero(np.diff(cell[order])) + 1)
        room = np.full(self.buckets, self.alpha)
        room[-1] = self.n_items - self.alpha * (self.buckets - 1)
        token = np.empty(self.n_items, np.int64)
        for number, group in enumerate(sorted(groups, key=len, reverse=True)):
            shuffled = random_order(self.buckets, self.seed, self.m, j, number)
            while len(group):
                best = shuffled[np.argsort(-room[shuffled], kind="stable")[:len(group)]]
                best = best[room[best] > 0]
                room[best] -= 1
                token[group[:len(best)]] = best
                group = group[len(best):]
                if len(group) and j == self.m - 1:
                    self._impossible()
        self.orders[j] = np.argsort(token, kind="stable")

    def check(self):
        """out: str, eight hex digits of the tables: a checkpoint notices if they were ever built otherwise"""
        return f"{zlib.crc32(self.digest.tobytes()):08x}"

    def state(self):
        """out: dict of plain types: the seed, or, of a map that was given, the maps themselves"""
        # the order in which members lists the items is the order that was given
        orders = [table.reshape(-1)[:self.n_items].tobytes() for table in self.members]
        return dict(n_items=self.n_items, alpha=self.alpha, m=self.m, seed=self.seed,
                    orders=orders if self.given else None, check=self.check())

    @classmethod
    def load(cls, state):
        """in: what state() gave; out: BloomMap; err: InputError when it does not come out as it was"""
        state = dict(state)
        check, orders = state.pop("check"), state.pop("orders")
        orders = orders and [np.frombuffer(order, np.int32) for order in orders]
        made = cls(**state, orders=orders)
        if made.check() != check:
            raise InputError("the Bloom map comes out unlike the one that the model was trained with")
        return made


def page_vectors(items, sizes, n_items, width=64, seed=0):
    """Items as vectors: those that stand on the same pages point the same way. [SB App. D]

    in:  items int (links,), page after page; sizes int (pages,); n_items N; width; seed
    out: float32 (N, width) of length 1, or 0 for an item on no page

    The leading singular vectors of the matrix pages × items, each link weighing 1/√(page's size · item's
    frequency), by subspace iteration: the matrix of co-occurrences is factorised and never built.
    """
    page = np.repeat(np.arange(len(sizes)), sizes)
    frequency = np.bincount(items, minlength=n_items)
    weight = 1 / np.sqrt(frequency[items] * np.asarray(sizes)[page])

    def pages_of(vectors):  # (N, width) -> (pages, width)
        return np.stack([np.bincount(page, weight * v[items], len(sizes)) for v in vectors.T], 1)

    def items_of(vectors):  # (pages, width) -> (N, width)
        return np.stack([np.bincount(items, weight * v[page], n_items) for v in vectors.T], 1)

    vectors = np.random.default_rng(seed).standard_normal((n_items, min(width, n_items)))
    for _ in range(8):
        vectors = np.linalg.qr(items_of(pages_of(vectors)))[0]
    seen = pages_of(vectors)
    values, turn = np.linalg.eigh(seen.T @ seen)
    vectors = (vectors @ turn) * np.sqrt(np.maximum(values, 0))
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.maximum(length, 1e-12) * (length > 1e-9)).astype(np.float32)


def coherent_map(items, sizes, n_items, alpha, m=2, coherent=None, width=64, seed=0):
    """A Bloom map whose buckets hold items that are alike. [SB App. D]

    in:  items, sizes, n_items, width as page_vectors; alpha, m, seed as BloomMap; coherent int, how many of
         the m maps, None: all; the others are random
    out: BloomMap

    In order of frequency, each item that has no bucket yet opens one with the alpha - 1 nearest items that
    have none either. In the next map two that shared a bucket may not share again. Cost: for each of N /
    alpha buckets a product with all items left: seconds for ten thousand items, hours for a million.
    """
    coherent = m if coherent is None else coherent
    vectors = page_vectors(items, sizes, n_items, width, seed)
    by_frequency = np.argsort(-np.bincount(items, minlength=n_items), kind="stable")
    orders, tokens = [], []
    for _ in range(coherent):
        left, free = by_frequency.copy(), np.ones(n_items, bool)
        order = []
        for first in by_frequency:
            if not free[first]:
                continue
            if 2 * free.sum() < len(left):
                left = left[free[left]]
            candidates = left[free[left]] if len(left) < 4 * alpha else left
            near = candidates[np.argsort(-(vectors[candidates] @ vectors[first]), kind="stable")]
            order += _bucket(first, near, free, alpha, tokens)
        orders.append(np.array(order))
        token = np.empty(n_items, np.int64)
        token[orders[-1]] = np.arange(n_items) // alpha
        tokens.append(token)
    orders += [random_order(n_items, seed, j) for j in range(coherent, m)]
    return BloomMap(n_items, alpha, m, seed, orders)


def _bucket(first, near, free, alpha, tokens):
    """in: first item, the others by nearness, which are free, alpha, tokens of earlier maps; out: a bucket"""
    bucket, taken = [first], [{token[first]} for token in tokens]
    free[first] = False
    for strict in (True, False):  # False: no free item is left that shared no bucket; BloomMap repairs it
        for item in near:
            if len(bucket) == alpha:
                return bucket
            if free[item] and not (strict and any(token[item] in seen for token, seen in zip(tokens, taken))):
                bucket.append(item)
                free[item] = False
                for token, seen in zip(tokens, taken):
                    seen.add(token[item])
    return bucket


# ---------------------------------------------------------------------------------------------------------
# Codes, and the way from text to them


def bits_to_chunks(bits, k):
    """Cut each row of bits into numbers of k bits, the last of what is left, not padded. [HF §3.4]

    in:  bits uint8 (V, T); k int <= 15
    out: int16 (V, ceil(T/k))        1010 0100 001 with k = 4 -> 10 4 1
    """
    if not 0 < k <= 15:
        raise InputError(f"chunks of {k} bits: wanted 1 .. 15")
    columns = [bits[:, start:start + k] for start in range(0, bits.shape[1], k)]
    return np.stack([c.astype(np.int16) @ (1 << np.arange(c.shape[1])[::-1]).astype(np.int16)
                     for c in columns], 1)


class Encoder:
    """text -> words -> ids -> codes, for one way to split and one hash; all a checkpoint needs to know of it.

    The word table grows with the text and costs no parameters: a word never seen gets the next free id and is
    hashed on the fly. Forms "row" and "digest" have a fixed vocabulary, and [UNK] for the rest.
    """

    def __init__(self, form, hash="md5", split="regex", bits=128, chunk=10, rows=50_260, key=None, lsh=None,
                 bpe=None, vocabulary=None, bloom=None, sketch=None):
        """in: form of FORMS; hash "md5" or "lsh"; split one of SPLITS; bits T; chunk k; rows N; key str or
        None; lsh NgramLSH for "lsh"; bpe BPE for "bpe", Phrases for "phrases"; vocabulary list[str] for forms
        "row" and "digest"; bloom BloomMap of the vocabulary for "digest"; sketch (k, R, seed) for "sketch",
        (k, R, seed, weights) for "weighted", and of other forms for words that are to be predicted
        """
        if form not in FORMS:
            raise InputError(f"unknown form of codes: {form!r}; the forms are {', '.join(FORMS)}")
        if split not in SPLITS:
            raise InputError(f"unknown way to split: {split!r}; wanted {', '.join(SPLITS)}")
        if hash not in ("md5", "lsh"):
            raise InputError(f"unknown hash: {hash!r}; wanted md5 or lsh")
        if form == "chunks" and not 0 < chunk <= 15:
            raise InputError(f"chunks of {chunk} bits: wanted 1 .. 15")
        numbers = bits, rows, *(sketch or ())
        if not 0 < bits <= 1 << 16 or not all(isinstance(n, int | None) for n in numbers):
            raise InputError(f"{bits} bits, {rows} rows, sketch {sketch}: wanted whole numbers, and of bits "
                             f"65,536 at most")
        self.form, self.hash, self.split_how = form, hash, split
        self.bits, self.chunk, self.rows, self.key = bits, chunk, rows, key
        self.lsh, self.bpe, self.vocabulary, self.bloom = lsh, bpe, vocabulary, bloom
        self.sketch = sketch and tuple(sketch)
        self.words, self.table = [], {}  # the words of ids FIRST, FIRST + 1, ..., and the way back
        self.done, self.most = None, None  # codes computed so far; words of the longest name
        self.fixed = form in ("row", "digest")
        if self.fixed:
            self.words, self.rows = list(vocabulary), FIRST - 1 + len(vocabulary)
            self.table = {word: FIRST + i for i, word in enumerate(self.words)}
        if bloom:  # a range of R rows for each hash, then m rows for each special: [MASK_1] .. [MASK_m] ...
            self.rows = bloom.m * (bloom.buckets + FIRST - 1)

    def split(self, text):
        """text -> words, spans, as split_words"""
        if self.split_how == "items":
            return split_names(text, self.table, self.longest())
        return self.bpe.split(text) if self.bpe else split_words(text, self.split_how)

    def longest(self):
        """out: int, words of the longest name"""
        self.most = self.most or 1 + max((word.count(" ") for word in self.words), default=0)
        return self.most

    def ids(self, words):
        """in: words list[str]; out: int32 (L,); the table grows by new ones (a fixed one: they are UNK)"""
        if self.fixed:
            return np.array([self.table.get(word, UNK) for word in words], np.int32)
        for word in words:
            if word not in self.table:
                self.table[word] = FIRST + len(self.words)
                self.words.append(word)
                self.most = None
        return np.array([self.table[word] for word in words], np.int32)

    def ids_of(self, texts):
        """in: texts list[str]; out: list of int32 (words,), one each; faster than split and ids"""
        many = (self.bpe.split_many(texts) if self.bpe else
                (words_of(text, self.split_how) for text in texts))
        return [self.ids(words) for words in many]

    def hash_words(self, words):
        """The codes of words, specials not among them.

        in:  words list[str]
        out: (V, C): "row" and "index" int32 (V, 1), "chunks" int16 (V, ceil(T/k)),
             "bits" uint8 (V, ceil(T/8)), packed; "digest" int32 (V, m); "sketch" int32 (V, k), "weighted"
             int32 (V, k + 1)
        """
        if self.form == "digest":
            return self.codes()[self.ids(words)]
        if self.form == "sketch":
            return self.targets(words)
        if self.form == "weighted":
            k, _, seed, weights = self.sketch
            weight = sketch_index(words, k + 1, weights, seed, self.key)[:, k:]  # a slice the rows do not use
            rows = sketch_index(words, k, self.rows, seed, self.key)
            return np.concatenate([rows, weight], 1).astype(np.int32)
        if self.form == "row":  # rows 0..4 are the specials' (WORD has none: free rows need no shared one)
            ids = self.ids(words)[:, None]
            return ids - (ids >= FIRST)
        if self.form == "index":
            index = (self.lsh.index(words, self.rows) if self.hash == "lsh"
                     else md5_index(words, self.rows, self.key))
            return index.astype(np.int32)[:, None]
        if self.form == "bits" and self.hash == "md5":
            return md5_digests(words, -(-self.bits // 128), self.key)[:, :-(-self.bits // 8)]
        bits = self.lsh.bits(words, self.bits) if self.hash == "lsh" else md5_bits(words, self.bits, self.key)
        return bits_to_chunks(bits, self.chunk) if self.form == "chunks" else np.packbits(bits, axis=1)

    def targets(self, words):
        """in: words list[str]; out: int32 (V, k), the buckets that a model with head hash-mlm predicts"""
        return sketch_index(words, *self.sketch[:3], self.key).astype(np.int32)

    def special_codes(self):
        """Codes of ids 0 .. FIRST-1: (FIRST, C), dtype as hash_words; zeros, or rows in a fixed table."""
        if self.form == "digest":
            m = self.bloom.m
            rows = np.arange(self.rows - m * (FIRST - 1), self.rows, dtype=np.int32)
            return rows.reshape(FIRST - 1, m)[[PAD, CLS, SEP, UNK, MASK, UNK]]
        if self.form == "row":
            return np.array([[PAD], [CLS], [SEP], [UNK], [MASK], [UNK]], np.int32)
        return np.zeros_like(self.hash_words([""] * FIRST))

    def codes(self):
        """The codes of all ids so far, (FIRST + V, C); those of a word are computed once."""
        if self.done is None:
            self.done = self.special_codes()
            if self.form == "digest":
                ranges = np.arange(self.bloom.m, dtype=np.int32) * np.int32(self.bloom.buckets)
                self.done = np.concatenate([self.done, self.bloom.digest + ranges])
        if new := self.words[len(self.done) - FIRST:]:
            self.done = np.concatenate([self.done, self.hash_words(new)])
        return self.done

    def state(self):
        """All of it as plain types, for a checkpoint; Encoder.load(state) gives it back."""
        lsh = self.lsh and dict(grams=self.lsh.grams, features=self.lsh.features, seed=self.lsh.seed)
        return dict(form=self.form, hash=self.hash, split=self.split_how, bits=self.bits, chunk=self.chunk,
                    rows=self.rows, key=self.key, lsh=lsh, bpe=self.bpe and self.bpe.json,
                    vocabulary=self.vocabulary, bloom=self.bloom and self.bloom.state(),
                    sketch=self.sketch and list(self.sketch))

    @classmethod
    def load(cls, state):
        """in: what state() gave; out: Encoder; err: InputError when it is anything else"""
        try:
            state = dict(state)
            state["lsh"] = state["lsh"] and NgramLSH(**state["lsh"])
            kind = Phrases if state["split"] == "phrases" else BPE
            state["bpe"] = state["bpe"] and kind(state["bpe"])
            if state.get("bloom") and state["bloom"]["n_items"] != len(state["vocabulary"]):
                raise InputError("the Bloom map is not of this vocabulary")
            state["bloom"] = state.get("bloom") and BloomMap.load(state["bloom"])
            made = cls(**state)
            made.split("a"), made.hash_words(["a"])  # what is wrong with its parts shows now
            if made.vocabulary and not all(isinstance(word, str) for word in made.vocabulary):
                raise InputError("a vocabulary of other things than words")
            if made.sketch and len(made.sketch) != 3 + (made.form == "weighted"):
                raise InputError(f"sketch {made.sketch}: wanted k, R, seed, and for form weighted weights")
            return made
        except InputError:
            raise
        except Exception as error:  # numpy and the BPE library raise whatever they do
            raise InputError(f"not the state of an encoder: {type(error).__name__}: {error}") from error


def pack(first, second, length):
    """[CLS] A [SEP], or [CLS] A [SEP] [SEP] B [SEP]; of what is too long the longer side is cut first.

    in:  first int32 (n,); second int32 (m,) or None; length L, at least 5
    out: ids int32, L at most; cut int, how many words did not fit

        n 10, m 3, room 8   ->   5 and 3        n 10, m 10, room 7   ->   4 and 3
    """
    if second is None:
        n, m = min(len(first), length - 2), 0
        parts = [[CLS], first[:n], [SEP]]
    else:
        room = length - 4
        n = min(len(first), max(room - len(second), (room + 1) // 2))
        m = min(len(second), room - n)
        parts = [[CLS], first[:n], [SEP, SEP], second[:m], [SEP]]
    cut = len(first) - n + (0 if second is None else len(second) - m)
    return np.concatenate(parts).astype(np.int32), cut


def windows(question, context, length, stride):
    """A context that is too long, in pieces that overlap, each behind the question: the pair, many times.

    in:  question, context int32 (n,), (m,); length L, at least 8; stride: words from one piece to the next
    out: list of (ids int32 (at most L,), first, start, stop): words start .. stop-1 of the context stand at
         first, first + 1, ... of ids. A question keeps half the room at most; every word is in some piece.
    """
    if length < 8:
        raise InputError(f"a model of {length} positions reads no question with its text: wanted 8 at least")
    question = question[:(length - 4) // 2]
    room = length - 4 - len(question)
    out, start = [], 0
    while True:
        ids, _ = pack(question, context[start:start + room], length)
        out.append((ids, len(question) + 3, start, min(start + room, len(context))))
        if start + room >= len(context):
            return out
        start += min(stride, room)


# ---------------------------------------------------------------------------------------------------------
# Text that is on every machine: the installed Python. Files are parsed, never imported or run.


def python_files():
    """Every .py file of the standard library and the installed packages, but no tests.

    out: dict, name from the library's folder on -> path, in the order of the names
    """
    found = {}
    for root in dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")):
        for path in glob.glob(os.path.join(root, "**", "*.py"), recursive=True):
            name = os.path.relpath(path, root)
            if "site-packages" not in name and "/test" not in f"/{name}":
                found.setdefault(name, path)
    return {name: found[name] for name in sorted(found)}


def python_texts(path, names=False):
    """What a Python file says in words.

    in:  path of a .py file; names bool
    out: iterator of str: a docstring each, and of pydoc_data the help topics; with names one a function, the
         distinct names it uses. A file that does not parse gives nothing.
    """
    try:
        with open(path, "rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # a template, Python 2, a test of some parser
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if names:
            if isinstance(node, functions):
                used, todo = [], list(node.body)
                for n in todo:  # breadth first, as ast.walk; an inner function has a page of its own
                    if isinstance(n, (ast.Name, ast.Attribute)):
                        used.append(n.id if isinstance(n, ast.Name) else n.attr)
                    todo += [] if isinstance(n, functions) else ast.iter_child_nodes(n)
                if len(set(used)) > 1:
                    yield " ".join(dict.fromkeys(used))
        elif isinstance(node, (ast.Module, ast.ClassDef, *functions)):
            yield ast.get_docstring(node) or ""
        elif isinstance(node, ast.Dict) and path.endswith("topics.py"):
            values = [v.value for v in node.values if isinstance(v, ast.Constant)]
            yield from (value for value in values if isinstance(value, str))


def main(argv=None):
    """Show the words of a text, their MD5 and LSH bits, and how far apart those are."""
    text = " ".join(sys.argv[1:] if argv is None else argv) or "play plays played"
    words = list(dict.fromkeys(words_of(text)))
    lsh = NgramLSH.fit(dict.fromkeys(words, 1))  # a corpus of these words alone: enough to see the law work
    for name, bits in (("MD5", md5_bits(words)), ("LSH", lsh.bits(words, 128))):
        print(f"{name}: 128 bits of each word, "
              f"and how many differ from the first word's (unrelated words: 64)")
        for word, row in zip(words, bits):
            print(f"  {word:>12}  {''.join('.#'[b] for b in row[:64])}…  {int((row != bits[0]).sum()):3d}")
    print("MD5 modulo 50,000: ", dict(zip(words, md5_index(words, 50_000).tolist())))
    for j, buckets in enumerate(BloomMap(9, 3).members):
        print(f"Bloom map {j} of 9 items: ", " | ".join(" ".join(map(str, row)) for row in buckets))


if __name__ == "__main__":
    main()
