"""Words to bits and buckets: MD5, bit chunks, n-grams, locality-sensitive hashing, sketches.

Sources:
    [HF] Xue & Aletras 2022, HashFormers: Towards Vocabulary-independent Pre-trained Transformers
    [CM] Median is all you need, a proposal
    [FT] Bojanowski et al. 2017, Enriching Word Vectors with Subword Information
Out of scope: text to words (words.py), vocabularies and token IDs (tokenizer.py), Bloom maps
    (bloom.py), LSH of vectors (attention.py).
Deviations:
    1. NgramLSH rounds its random numbers to 1/4096. Sums are then exact integers, the same on
       every machine with one version of numpy.
    2. The seed and the key are arguments, and state() returns them. The paper withholds its key.
    3. NgramLSH.index and .bits share hyperplanes. The paper draws T others for the bits.
    4. NgramLSH.fit shuffles the features: as neighbors in eta, n-grams that occur together would
       make bits depend on each other (fit says why).
    5. [FT §3.2] ngram_index takes n-grams of 1 to 4 characters, and not the word itself. The paper
       takes those of 3 to 6, and the word.
    6. A word has the n-grams of its first 4,096 letters. ngram_index counts its mark < as one.
Notation:
    V words   T bits   N size of an index: hash buckets (MD5), hyperplanes (NgramLSH)
    F features, n-grams   G n-grams of a word   k hash functions of a sketch   R buckets of each
Demo: python hashing.py "play plays played"

The hash functions take lists of words, in lower case as words.split_words returns them, and return
numpy arrays.
"""

import hmac
import math
import sys
from collections import Counter
from hashlib import md5

import numpy as np

# Words to digests, bits and buckets of MD5

MD5_BITS = 128  # bits of a digest


def md5_digests(words, count=1, key=None):
    """Return the MD5 digests of each word. [HF §3.2]

    Args:
        words: list[str], V words.
        count: int, digests per word. The first is of the word, the next of the word followed by
            1, 2, ... in four bytes.
        key: str for keyed digests (HMAC-MD5), "" too; or None.

    Returns:
        uint8 (V, 16 · count).
    """
    check_words(words)
    # suffixes begin with NUL, which no word of words.py contains: word + suffix is no other word
    suffixes = [b""]
    for i in range(1, count):
        suffixes.append(i.to_bytes(4, "big"))
    digests = []
    for word in words:
        for suffix in suffixes:
            digests.append(md5_digest(encode(word) + suffix, key))
    return np.frombuffer(b"".join(digests), np.uint8).reshape(len(words), 16 * count)


def md5_bits(words, T=MD5_BITS, key=None):
    """Return the first bits of MD5, most significant first. [HF §3.2]

    Args:
        words, key: as in md5_digests.
        T: int, number of bits. Bits after 128 are those of further digests.

    Returns:
        uint8 (V, T) of 0 and 1.
    """
    digests = md5_digests(words, math.ceil(T / MD5_BITS), key)
    return np.unpackbits(digests, axis=1)[:, :T]


def md5_index(words, N, key=None):
    """Return MD5 as a 128-bit integer, modulo N. [HF §3.2]

    Args:
        words, key: as in md5_digests.
        N: int, number of buckets.

    Returns:
        int64 (V,) in 0 .. N-1.

    Example:
        md5_index(["play"], 50_000)  # [15933]
    """
    numbers = [int.from_bytes(digest, "big") % N for digest in md5_digests(words, key=key)]
    return np.array(numbers, np.int64)


def md5_digest(data, key):
    """Return the 16 bytes of MD5 of data, bytes, or of HMAC-MD5 with a key, str."""
    if key is None:
        return md5(data, usedforsecurity=False).digest()  # else FIPS systems refuse MD5
    return hmac.digest(encode(key), data, "md5")


def encode(text):
    """Return text in UTF-8, lone surrogates included: JSON can produce them, UTF-8 refuses them."""
    return text.encode("utf-8", "surrogatepass")


def check_words(words):
    """Raise a ValueError for a plain str, which would be hashed letter by letter."""
    if isinstance(words, str):
        raise ValueError(f"words: expected a list of str, got {words!r:.60}.")


# Bits to chunks

MAX_CHUNK = 15  # bits of a chunk: 16 overflow int16


def bits_to_chunks(bits, size):
    """Cut each row of bits into chunks of `size` bits, as numbers. [HF §3.4]

    The last chunk may be shorter.

    Args:
        bits: uint8 (V, T) of 0 and 1.
        size: int, bits of a chunk, 1 .. 15.

    Returns:
        int16 (V, ceil(T / size)).

    Example:
        1010 0100 001 with size 4 gives 10 4 1
    """
    assert 1 <= size <= MAX_CHUNK, f"size: expected 1 to {MAX_CHUNK}"
    columns = bits.astype(np.int16).T  # (T, V)
    chunks = []
    for start in range(0, len(columns), size):
        chunk = np.zeros(len(bits), np.int16)  # (V,)
        for digit in columns[start:start + size]:
            chunk = 2 * chunk + digit
        chunks.append(chunk)
    return np.stack(chunks, 1)


# N-grams

MAX_GRAM = 4  # characters of the longest n-gram
MAX_LETTERS = 4_096  # of a word whose n-grams are listed: bounds memory where spaces are missing


def list_ngrams(word):
    """Return the runs of 1 to MAX_GRAM = 4 characters of a word: 4 + 3 + 2 + 1 = 10 of "play"."""
    word = word[:MAX_LETTERS]
    grams = []
    for size in range(1, MAX_GRAM + 1):
        grams += [word[start:start + size] for start in range(len(word) - size + 1)]
    return grams


# The hashes of --hash

ETA_SCALE = 4096  # the random vector of NgramLSH is in units of 1/4096
NEAR_BITS = 1_024  # more bits than a model reads: they find the word of a misspelling more often


class WordHash:
    """Base class of the hashes in HASHES. A subclass has those methods that raise an error here.

    Attributes of a class:
        options: dict, from the name of an argument of fit to the flag of pretrain.py that sets it.
            {"seed": "hash_seed"}: the value of --hash_seed is the argument seed.
        needs_counts: bool, fit learns from the counts of words. A caller then saves the state.
        near_bits: int, how many bits support/candidates.py compares to find the words most similar
            to another. 0: none, as similar words share no more bits than others. Each NgramLSH
            replaces it by a number of its own, as it has F bits at most.
    """

    options = {}
    needs_counts = False
    near_bits = 0

    @classmethod
    def fit(cls, counts, **options):
        """Return a hash for a corpus. counts: dict, word -> how often it occurs."""
        return cls(**options)

    def bits(self, words, T):
        """Return T bits of each word, uint8 (V, T) of 0 and 1."""
        raise NotImplementedError

    def index(self, words, N):
        """Return a bucket of each word, int64 (V,) in 0 .. N-1."""
        raise NotImplementedError

    def state(self):
        """Return a dict of plain types: cls(**state) is the same hash."""
        raise NotImplementedError

    def knows(self, words):
        """Return bool (V,): whether the hash tells a word from all unknown words."""
        return np.ones(len(words), bool)


class MD5(WordHash):
    """MD5: similar words share no more bits than others. [HF §3.2]"""

    options = {"key": "key"}

    def __init__(self, key=None):
        self.key = key

    def bits(self, words, T):
        return md5_bits(words, T, self.key)

    def index(self, words, N):
        return md5_index(words, N, self.key)

    def state(self):
        return dict(key=self.key)


class NgramLSH(WordHash):
    """Locality-sensitive hashing: words that share character n-grams share bits. [HF §3.3]

    The vector x (F,) of a word counts its n-grams, n = 1 .. 4, among the F most frequent of the
    corpus. Bit j says on which side of a random hyperplane x lies: whether x · r^j > 0. The normals
    r^j are rotations of one random vector eta (F,), r^j[f] = eta[(f + j) mod F], so no matrix is
    stored, and an n-gram f adds eta[f : f + T] to the T products. The word aab, where the features
    0, 1, 2 are a, b, ab, eta = (-3, 1, 2) and T = 3:

        a           eta[0:3]                    -3   1   2
        a again     eta[0:3]                    -3   1   2
        b           eta[1:4], around the end     1   2  -3
        ab          eta[2:5], around the end     2  -3   1
        products                                -3   1   2      bits 0 1 1

    A random hyperplane passes between two vectors with probability angle / π, so two words differ
    in that share of the bits: play and plays in 23 of 128 on average, with a standard deviation
    of 4, and words that share no n-gram in 64.

    Args:
        grams: list[str], feature f is grams[f]; at most F.
        features: int, F, the length of eta.
        seed: int, of eta.

    Example:
        lsh = NgramLSH.fit({"play": 3, "plays": 2})  # counts of lower-case words
        lsh.bits(["play", "plays"], 128)  # uint8 (2, 128)
        lsh.bits(["PLAY"], 128)  # all 0: its n-grams are unknown
    """

    options = {"features": "features", "seed": "hash_seed"}
    needs_counts = True

    def __init__(self, grams, features, seed=0):
        assert len(grams) <= features, "features: expected a number in eta for each n-gram"
        self.grams = grams
        self.features = features
        self.seed = seed
        self.near_bits = min(NEAR_BITS, features)
        self.feature_of_gram = {gram: f for f, gram in enumerate(grams)}
        eta = np.random.default_rng(seed).standard_normal(features)
        eta = np.rint(eta * ETA_SCALE).astype(np.int32)  # (F,)
        # the sum over a word's n-grams, fewer than MAX_GRAM · MAX_LETTERS, is an int32, too
        assert MAX_GRAM * MAX_LETTERS * int(abs(eta).max()) < 2**31
        self.eta = np.tile(eta, 2)  # (2F,): a window may run over the end

    @classmethod
    def fit(cls, counts, features=50_000, seed=0):
        """Choose the most frequent n-grams of a corpus.

        Args:
            counts: dict, word -> count in the corpus.
            features: int, F, the most to choose.
            seed: int, of eta and of the order of the n-grams.
        """
        assert isinstance(counts, dict), "counts: expected a dict, such as Counter(words)"
        frequency = Counter()
        for word, count in counts.items():
            for gram in list_ngrams(word):
                frequency[gram] += count
        # ties: the shorter n-gram, then the one with the smaller code points
        grams = sorted(frequency, key=lambda gram: (-frequency[gram], len(gram), gram))
        grams = grams[:features]
        # Shuffle: n-grams of similar frequency often occur together. As neighbors f and f + 1 they
        # would add eta[f + j] + eta[f + j + 1] to product j, and eta[f + j + 1] + eta[f + j + 2] to
        # product j + 1. Both have eta[f + j + 1], so bits j and j + 1 would often be equal
        # (Deviation 4). [seed, 1] gives another random stream than eta's
        np.random.default_rng([seed, 1]).shuffle(grams)
        return cls(grams, features, seed)

    def bits(self, words, T):
        """Return the side of each of T hyperplanes that a word lies on. [HF §3.5]

        Args:
            words: list[str], V words, in lower case if those of fit were.
            T: int, number of bits, up to F.

        Returns:
            uint8 (V, T): bit j is 1 where x · r^j > 0. All 0 for a word without a known n-gram.
        """
        self.check(words, T)
        bits = np.empty((len(words), T), np.uint8)
        for i, word in enumerate(words):
            bits[i] = self.products(word, T) > 0
        return bits

    def index(self, words, N):
        """Return the hyperplane, of N, whose normal has the largest product with x. [HF §3.3]

        Args:
            words: list[str], V words, in lower case if those of fit were.
            N: int, number of hyperplanes, up to F.

        Returns:
            int64 (V,): argmax over j < N of x · r^j. 0 for a word without a known n-gram.
        """
        self.check(words, N)
        index = np.empty(len(words), np.int64)
        for i, word in enumerate(words):
            index[i] = self.products(word, N).argmax()
        return index

    def products(self, word, size):
        """Return x · r^j of a word for all j < size, int32 (size,): a window of eta an n-gram."""
        products = np.zeros(size, np.int32)
        for f in self.list_features(word):
            products += self.eta[f:f + size]
        return products

    def list_features(self, word):
        """Return the features of a word: the numbers of its known n-grams, repeated ones too."""
        return [self.feature_of_gram[gram] for gram in list_ngrams(word)
                if gram in self.feature_of_gram]

    def knows(self, words):
        """Return whether each word has an n-gram of the corpus, bool (V,). Others are all alike."""
        return np.array([len(self.list_features(word)) > 0 for word in words], bool)

    def state(self):
        return dict(grams=self.grams, features=self.features, seed=self.seed)

    def check(self, words, size):
        """Refuse a plain str, and more hyperplanes than eta has rotations."""
        check_words(words)
        assert 1 <= size <= self.features, f"T, N: expected 1 to F, {self.features:,}"


HASHES = {"md5": MD5, "lsh": NgramLSH}  # a new hash is a class and its line here


# Several hashes of a word: k buckets, or a bucket of each n-gram


def sketch_index(words, k, R, seed=0, key=None):
    """Return k independent hash buckets per word, from disjoint slices of its digests. [CM]

    A digest of 16 bytes holds two 64-bit numbers, and each hash function takes one, modulo R.

    Args:
        words: list[str], V words.
        k: int, number of hash functions.
        R: int, number of buckets of each function.
        seed: int. key: str, or None or, unlike in md5_digests, "" for none. With seed 0 and no key
            the digests are plain MD5, else they are keyed with both.

    Returns:
        int64 (V, k), each in 0 .. R-1.

    Example:
        sketch_index(["play"], 5, 500)  # [[409, 489, 306, 104, 165]]

    Linear functions of one number x, such as (x · prime_j) mod R, would not be independent: two
    numbers that are equal modulo R collide under all of them.
    """
    assert k >= 1 and R >= 1, "k, R: expected at least 1"  # numpy: x % 0 is 0
    if key is None:
        key = ""  # no key, either
    secret = None
    if key != "" or seed != 0:
        secret = f"{key} sketch {seed}"
    digests = md5_digests(words, math.ceil(k / 2), secret)  # (V, 16 · ceil(k/2))
    slices = digests.view(">u8")[:, :k]  # (V, k), numbers of 64 bits
    return (slices % np.uint64(R)).astype(np.int64)


def ngram_index(words, N, G, seed=0, key=None):
    """Return the hash buckets of each word's n-grams, and zeros after them. [FT §3.2]

    Boundary marks tell beginnings and ends: "at>" occurs in <cat> and <at>, "<at" in <at> alone.

    Args:
        words: list[str], V words.
        N: int, number of buckets, with bucket 0, the padding.
        G: int, the most n-grams of a word. A word of 15 letters has 62. Beyond G the longest
            n-grams are dropped first.
        seed, key: as in sketch_index.

    Returns:
        int64 (V, G): 1 .. N-1 for each n-gram, repeated ones too, then 0.
    """
    check_words(words)
    index = np.zeros((len(words), G), np.int64)
    for i, word in enumerate(words):
        grams = list_ngrams(f"<{word}>")[:G]
        buckets = sketch_index(grams, 1, N - 1, seed, key)  # (number of n-grams, 1)
        index[i, :len(grams)] = 1 + buckets[:, 0]
    return index


def main():
    """Show MD5 and LSH bits of words, and how many of them differ from the first word's."""
    words = " ".join(sys.argv[1:]).lower().split()
    if not words:
        words = ["play", "plays", "played", "zebra"]

    # a few words are no corpus: add the header of this file
    counts = Counter(words + __doc__.lower().split())
    for name, hash_class in HASHES.items():
        print(f"{name:>12}  {'40 of 128 bits: # is 1, . is 0':40}  differ")
        bits = hash_class.fit(counts).bits(words, MD5_BITS)  # (V, 128)
        for word, row in zip(words, bits):
            signs = "".join(".#"[bit] for bit in row[:40])
            num_different = (row != bits[0]).sum()
            print(f"{word:>12}  {signs}  {num_different:6d}")


if __name__ == "__main__":
    main()
