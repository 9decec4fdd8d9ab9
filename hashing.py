"""Words to integers without a vocabulary: MD5 digests, locality-sensitive hashes of character n-grams, BPE.

Sources   [HF] Xue & Aletras 2022, HashFormers: Towards Vocabulary-independent Pre-trained Transformers
Map       [HF §3.2] md5_digests   [HF §3.3] NgramLSH   [HF §3.4] bits_to_chunks   [HF §3.5] NgramLSH.bits
Not here  hashing of *vectors*: attention by buckets shares only the name. Nothing here imports torch.
Departs   1. A word is a run of letters or a run of signs, lower-cased ("regex"); the paper's text says white
             space ("space"). Both are offered.
          2. The Gaussian vector of the hyperplanes is rounded to 1/4096, so every sum is an exact integer:
             no order of addition, no processor and no library version can flip a bit.
          3. The seed and the key are arguments and are saved with the model; the paper names neither.
Letters   V words   T bits   C code numbers a word   N rows (buckets)   k bits a chunk
Try       python hashing.py "play plays played"
"""

import ast
import glob
import hashlib
import hmac
import os
import re
import sys
import sysconfig
import warnings

import numpy as np

# Special tokens are never hashed. WORD is no token: its row is added to the vector of every ordinary word.
SPECIALS = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "[WORD]")
PAD, CLS, SEP, UNK, MASK, WORD = range(6)
FIRST = len(SPECIALS)  # the id of the first ordinary word

# form of the codes -> what C numbers a word gets; embeddings.py has one module or more for each
FORMS = {
    "row": "one number: the word's row in a vocabulary (lookup)",
    "index": "one number: a bucket of N (emb)",
    "chunks": "ceil(T/k) numbers of k bits each (pool)",
    "bits": "T bits, packed into ceil(T/8) bytes, most significant bit first (add, proj, linear)",
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
        raise InputError(f"unknown way to split: {how!r}; the ways are {', '.join(_PATTERNS)} and bpe")
    return _PATTERNS[how]


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
        tokenizer.train_from_iterator((t.encode("utf-8", "replace").decode() for t in texts), trainer)
        return cls(tokenizer.to_str())

    def split(self, text):
        """The pieces of a text and their character spans; shapes as in split_words."""
        coded = self.tokenizer.encode(text.encode("utf-8", "replace").decode())  # lone surrogates become "?"
        return coded.tokens, coded.offsets

    def split_many(self, texts):
        """The pieces of many texts at once: list[list[str]], on all cores."""
        clean = [t.encode("utf-8", "replace").decode() for t in texts]
        return [[self.pieces[i] for i in coded.ids] for coded in self.tokenizer.encode_batch_fast(clean)]


# ---------------------------------------------------------------------------------------------------------
# MD5


def md5_digests(words, count=1, key=None):
    """MD5 of each word, as bytes. [HF §3.2]

    in:  words list[str]; count int, digests a word; key bytes or str or None: keyed (HMAC) when given
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
        key = key.encode("utf-8", "surrogatepass") if isinstance(key, str) else key
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
        keys = np.array([self._key(gram) for gram in grams], np.uint64)
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
        each, _, frequency = _sum_by_key(points, np.repeat(weights, lengths))
        most = np.lexsort((each, -frequency))[:cls.MOST]  # a rarer one can be no feature, nor part of one
        alphabet = np.sort(each[most])
        keys, sums = np.empty(0, np.uint64), np.empty(0, np.int64)
        for start in range(0, len(words), cls.PIECE):  # memory: its n-grams, and the distinct ones
            part = slice(start, start + cls.PIECE)
            grams, known, lengths = _gram_keys(words[part], alphabet)
            amount = np.repeat(weights[part], lengths)[:, None].repeat(cls.LONGEST, 1)
            keys, _, sums = _sum_by_key(np.concatenate([keys, grams[known]]),
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
            word, shared = words[i], 0
            for a, b in zip(before, word):
                if a != b:
                    break
                shared += 1
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

    def _key(self, gram):
        key = 0
        for place in np.searchsorted(self.alphabet, _code_points([gram])[0]).tolist():
            key = key << 16 | (place + 1)
        return key

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
    """in: keys (M,), amounts int64 (M,); out: distinct keys in order, their count, sum of their amounts"""
    order = np.argsort(keys, kind="stable")
    keys, amounts = keys[order], amounts[order]
    starts = np.concatenate([[True], keys[1:] != keys[:-1]])
    first = np.flatnonzero(starts) if len(keys) else np.empty(0, np.int64)
    sums = np.add.reduceat(amounts, first) if len(first) else amounts
    return keys[first], np.diff(first, append=len(keys)), sums


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
    hashed on the fly. Only form "row" has a fixed vocabulary, and [UNK] for the rest.
    """

    def __init__(self, form, hash="md5", split="regex", bits=128, chunk=10, rows=50_260, key=None, lsh=None,
                 bpe=None, vocabulary=None):
        """in: form of FORMS; hash "md5" or "lsh"; split "regex", "space" or "bpe"; bits T; chunk k; rows N;
        key str or None; lsh NgramLSH for "lsh"; bpe BPE for "bpe"; vocabulary list[str] for form "row"
        """
        if form not in FORMS:
            raise InputError(f"unknown form of codes: {form!r}; the forms are {', '.join(FORMS)}")
        if form == "chunks" and not 0 < chunk <= 15:
            raise InputError(f"chunks of {chunk} bits: wanted 1 .. 15")
        self.form, self.hash, self.split_how = form, hash, split
        self.bits, self.chunk, self.rows, self.key = bits, chunk, rows, key
        self.lsh, self.bpe, self.vocabulary = lsh, bpe, vocabulary
        self.words, self.table = [], {}  # the words of ids FIRST, FIRST + 1, ..., and the way back
        self.done = None  # codes computed so far
        if form == "row":
            self.words, self.rows = list(vocabulary), FIRST - 1 + len(vocabulary)
            self.table = {word: FIRST + i for i, word in enumerate(self.words)}

    def split(self, text):
        """text -> words, spans, as split_words"""
        return self.bpe.split(text) if self.split_how == "bpe" else split_words(text, self.split_how)

    def ids(self, words):
        """in: words list[str]; out: int32 (L,); the table grows by the new ones (form "row": they are UNK)"""
        if self.form == "row":
            return np.array([self.table.get(word, UNK) for word in words], np.int32)
        for word in words:
            if word not in self.table:
                self.table[word] = FIRST + len(self.words)
                self.words.append(word)
        return np.array([self.table[word] for word in words], np.int32)

    def ids_of(self, texts):
        """in: texts list[str]; out: list of int32 (words,), one each; faster than split and ids"""
        many = (self.bpe.split_many(texts) if self.split_how == "bpe"
                else (words_of(text, self.split_how) for text in texts))
        return [self.ids(words) for words in many]

    def hash_words(self, words):
        """The codes of words, specials not among them.

        in:  words list[str]
        out: (V, C): "row" and "index" int32 (V, 1), "chunks" int16 (V, ceil(T/k)),
             "bits" uint8 (V, ceil(T/8)), packed
        """
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

    def special_codes(self):
        """Codes of ids 0 .. FIRST-1: (FIRST, C), dtype as hash_words; zeros, but in form "row" their rows."""
        if self.form == "row":
            return np.array([[PAD], [CLS], [SEP], [UNK], [MASK], [UNK]], np.int32)
        return np.zeros_like(self.hash_words([""] * FIRST))

    def codes(self):
        """The codes of all ids so far, (FIRST + V, C); those of a word are computed once."""
        new = self.words[len(self.done) - FIRST if self.done is not None else 0:]
        parts = [self.special_codes() if self.done is None else self.done]
        self.done = np.concatenate(parts + [self.hash_words(new)] * bool(new))
        return self.done

    def state(self):
        """All of it as plain types, for a checkpoint; Encoder.load(state) gives it back."""
        lsh = self.lsh and dict(grams=self.lsh.grams, features=self.lsh.features, seed=self.lsh.seed)
        return dict(form=self.form, hash=self.hash, split=self.split_how, bits=self.bits, chunk=self.chunk,
                    rows=self.rows, key=self.key, lsh=lsh, bpe=self.bpe and self.bpe.json,
                    vocabulary=self.vocabulary)

    @classmethod
    def load(cls, state):
        """in: what state() gave; out: Encoder"""
        state = dict(state)
        state["lsh"] = state["lsh"] and NgramLSH(**state["lsh"])
        state["bpe"] = state["bpe"] and BPE(state["bpe"])
        return cls(**state)


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
                inner = [n for statement in node.body for n in ast.walk(statement)]
                used = [n.id if isinstance(n, ast.Name) else n.attr for n in inner
                        if isinstance(n, (ast.Name, ast.Attribute))]
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


if __name__ == "__main__":
    main()
