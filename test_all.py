"""Read this first: each concept as an example worked out by hand, and against a few plain lines.

    python -m pytest -q test_all.py        under a minute, no network
    python -m pytest -q -n 2               everything: the laws, edge cases and faults are in tests/

A section is about one file, and needs only the sections above it:

    words.py         a text becomes words
    hashing.py       a word becomes bits or a bucket
    bloom.py         an item becomes m hash tokens
    search.py        the most likely hash tokens lead back to the item
    embeddings.py    bits and buckets become a vector
    attention.py     each vector becomes an average of all; LSH computes fewer of the scores
    model.py         layers of attention, and how many parameters they have
    objectives.py    what a model learns from a text without labels
    tokenizer.py     words become token IDs, and IDs become the input of a model
    pretrain.py      a run from its first loss on
    infer.py         scores of a trained model, and what hashing brings

Tags such as [HF §3.2] name a paper, as in the headers of the files. Seeds are fixed, and a measured
share may differ from its law by six standard deviations: a failure is a fault, not chance. The seed
of each test and fixtures such as text_path are in tests/fixtures.py.
"""

import hashlib
import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import embeddings
import hashing
import infer
import pretrain
from attention import collision_probability, draw_hyperplanes, full_attention, simhash
from attention import full_attention_reference, lsh_attention, lsh_attention_reference
from bloom import BloomMap, ItemMap
from coherent import coherent_map, popularity_prior
from data.corpus import Corpus, prepare
from data.classification import METRICS
from data.squad import exact_and_f1, normalize_answer
from model import Config, Model, count_parameters
from objectives import IGNORE_INDEX, MaskedHashes, MaskedWords, RowTarget, ShuffleRandom
from objectives import SketchTarget, make_batch
from search import beam_search, exhaustive
from support.common import save_checkpoint
from tests.helpers import make_words
from tokenizer import CLS, FIRST_WORD_ID, MASK, SEP, UNK, build_inputs, make_tokenizer
from words import split_words

# == words.py: a text becomes words


def test_split_words_by_hand():
    """A word is a run of letters or a run of signs, in lower case, with its place in the text.

        D o n ' t   s t o p !  !
        0     3 4   6       10
    """
    words, spans = split_words("Don't stop!!")
    assert words == ["don", "'", "t", "stop", "!!"]
    assert spans == [(0, 3), (3, 4), (4, 5), (6, 10), (10, 12)]
    words, _ = split_words("Don't stop!!", "space")  # as the paper splits
    assert words == ["don't", "stop!!"]


# == hashing.py: a word becomes bits or a bucket
#
# A transformer usually has a table with a row for each word of a vocabulary. Here a hash function
# gives 128 bits to any word, known or not. With MD5, "play" and "plays" share no more bits than any
# two words do. With locality-sensitive hashing (LSH) they share about 105 of 128.


def test_md5_bits_by_hand():
    """md5("play") = a3b3... in hexadecimal, and a = 1010, 3 = 0011, b = 1011. [HF §3.2]"""
    digest = hashlib.md5(b"play").hexdigest()
    assert digest == "a3b34c0871dc2fd51eec5559b68f709d"
    bits = hashing.md5_bits(["play"])  # (1, 128)
    digits = "".join(map(str, bits[0]))
    assert digits[:16] == "1010" + "0011" + "1011" + "0011"
    assert digits == format(int(digest, 16), "0128b")


def test_md5_index_by_hand():
    """The bucket of a word is its digest, a number of 128 bits, modulo the number of buckets.

    Modulo 16 it is the last hexadecimal digit, of "play" d = 13.
    """
    assert hashing.md5_index(["play"], 16) == [13]
    words = make_words(101)  # made-up words of 2 to 12 letters
    index = hashing.md5_index(words, 50_260)
    for word, bucket in zip(words, index):
        digest = hashlib.md5(word.encode()).hexdigest()
        assert bucket == int(digest, 16) % 50_260


def test_bits_to_chunks_by_hand():
    """128 bits are 12 chunks of 10 bits, and one of the 8 bits that are left. [HF §3.4]

        a    3    b    3    4    c          first chunk    1010001110 = 512 + 128 + 8 + 4 + 2
        1010 0011 1011 0011 0100 1100 ...   second chunk   1100110100 = 512 + 256 + 32 + 16 + 4
        9    d
        1001 1101                           last chunk       10011101 = 128 + 16 + 8 + 4 + 1
    """
    bits = hashing.md5_bits(["play"])
    chunks = hashing.bits_to_chunks(bits, 10)[0].tolist()
    assert len(chunks) == 13
    assert chunks[:2] == [654, 820]
    assert chunks[12] == 157


def test_list_ngrams_by_hand():
    """4 + 3 + 2 + 1 = 10 runs of one to four characters. [HF §3.3]"""
    grams = hashing.list_ngrams("play")
    assert grams == "p l a y pl la ay pla lay play".split()


def test_lsh_by_hand():
    """Bit j is the side of hyperplane j that a word lies on; its bucket has the largest product.

    The features are a, b and ab. "aab" has the counts x = (2, 1, 1); its "aa" and "aab" are no
    features. Hyperplane j is the random vector eta = (-3, 1, 2), rotated by j. [HF §3.3]

        r^0 = (-3,  1,  2)    x · r^0 = -6 + 1 + 2 = -3    bit 0
        r^1 = ( 1,  2, -3)    x · r^1 =  2 + 2 - 3 =  1    bit 1
        r^2 = ( 2, -3,  1)    x · r^2 =  4 - 3 + 1 =  2    bit 1, and the largest: bucket 2
    """
    lsh = hashing.NgramLSH(["a", "b", "ab"], features=3)
    lsh.eta = np.array([-3, 1, 2] * 2)  # stored twice, so that a window may run over the end
    bits = lsh.bits(["aab"], 3)
    assert bits.tolist() == [[0, 1, 1]]
    assert lsh.index(["aab"], 3) == [2]


def test_lsh_matches_explicit_hyperplanes():
    """The same for 997 features, the most frequent n-grams: r^j[f] = eta[(f + j) mod 997]."""
    words = make_words(400, 3)
    lsh = hashing.NgramLSH.fit(dict.fromkeys(words, 1), features=997, seed=5)
    eta = lsh.eta[:997]
    for word in ["play", "", "ZZZ", "tattoo" * 9, *words[:9]]:
        x = np.zeros(997, np.int64)
        grams = hashing.list_ngrams(word)
        for f, gram in enumerate(lsh.grams):
            x[f] = grams.count(gram)
        products = []
        for j in range(499):
            r = np.roll(eta, -j)
            products.append(x @ r)
        bits = np.array(products[:131]) > 0
        assert (lsh.bits([word], 131) == bits).all()
        assert lsh.index([word], 499) == np.argmax(products)


def test_lsh_bits_differ_by_the_angle_law():
    """The share of bits that differ is the angle between two words, divided by π. [HF §3.3]

    The 10 n-grams of play are among the 14 of plays, so the cosine is 10 / √(10 · 14) = 0.845, the
    angle 0.564, and 0.564 / π · 128 = 23 bits differ.
    """
    angle = math.acos(10 / math.sqrt(10 * 14))
    law = angle / math.pi
    assert round(law * 128) == 23
    shares = []
    for seed in range(64):
        lsh = hashing.NgramLSH.fit({"play": 1, "plays": 1}, features=5_003, seed=seed)
        play, plays = lsh.bits(["play", "plays"], 128)
        shares.append(np.mean(play != plays))
    sigma = math.sqrt(law * (1 - law) / (64 * 128))
    # twice the spread of independent draws: the 128 bits of one seed share one vector eta
    assert abs(np.mean(shares) - law) < 6 * 2 * sigma


def test_sketch_index_by_hand():
    """k hash functions for one word: k pieces of eight bytes of its digests. [CM]

        md5("play")     a3b34c0871dc2fd5 1eec5559b68f709d    modulo 16 the last digits, 5 and d
        md5("play" 1)   the next two pieces, where 1 is written in four bytes
    """
    index = hashing.sketch_index(["play"], 3, 16)
    assert index[0, :2].tolist() == [5, 13]
    second = hashlib.md5(b"play\0\0\0\1").hexdigest()
    assert index[0, 2] == int(second[15], 16)


def test_ngram_index_by_hand():
    """Each n-gram of a word between boundary marks has a bucket; 0 fills the row. [FT §3.2]

        n-gram    <     a     >     <a    a>    <a>
        digit     0     8     4     2     c     5      the 16th of its md5: 64 bits, modulo 16
        bucket    1     9     5     3     13    6      as bucket 0 is padding
    """
    index = hashing.ngram_index(["a"], 17, 8)
    assert index.tolist() == [[1, 9, 5, 3, 13, 6, 0, 0]]
    index = hashing.ngram_index(["a"], 17, 3)  # too short for all: the shortest n-grams are first
    assert index.tolist() == [[1, 9, 5]]


# == bloom.py: an item becomes m hash tokens
#
# Each of N items gets one of R buckets in each of m maps. An item shares each of its buckets with
# alpha - 1 others, but no two items share all m, so m small numbers name one of many items: with
# 1,000 buckets in each of two maps, one of a million.


def test_bloom_map_by_hand():
    """A map is an order of the items, cut after every alpha = 2 of them. [SB §3.2]

        map 0   0 1 | 2 3 | 4 5        item 3 is in bucket 1 of map 0 and in bucket 0 of map 1
        map 1   0 3 | 1 4 | 2 5
    """
    bloom_map = BloomMap(6, 2, orders=[
        [0, 1, 2, 3, 4, 5],
        [0, 3, 1, 4, 2, 5],
    ])
    assert bloom_map.num_buckets == 3
    assert bloom_map.members[1].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert bloom_map.digest.T.tolist() == [  # by map, and then by item
        [0, 0, 1, 1, 2, 2],
        [0, 1, 2, 0, 1, 2],
    ]


def test_coherent_map_keeps_companions_together():
    """Items that occur in the same sets share a bucket, here 0 with 3, 1 with 2. [SB App. D]"""
    items = np.array([0, 3, 1, 2, 4, 7, 5, 6] * 2)  # of eight sets, one after another
    sizes = np.full(8, 2)
    bloom_map = coherent_map(items, sizes, n_items=8, alpha=2, coherent=1)  # map 1 is random
    assert bloom_map.members[0].tolist() == [[0, 3], [1, 2], [4, 7], [5, 6]]


# == search.py: the most likely hash tokens lead back to the item
#
# A model predicts a probability for each bucket. The best item has the largest sum of logarithms.


def search_four_items(k):
    """Search the best k of the items a b c d, numbered 0 1 2 3, with a beam of one bucket a map.

        map 0   a b | c d    0.6 | 0.4        a 0.6 · 0.3 = 0.18    b 0.6 · 0.7 = 0.42
        map 1   a c | b d    0.3 | 0.7        c 0.4 · 0.3 = 0.12    d 0.4 · 0.7 = 0.28
    """
    bloom_map = BloomMap(4, 2, orders=[
        [0, 1, 2, 3],
        [0, 2, 1, 3],
    ])
    p = torch.tensor([
        [0.6, 0.4],
        [0.3, 0.7],
    ])
    logp = p.log().unsqueeze(0)  # (1, m, R): one position
    return beam_search(logp, bloom_map, k, beam=1)


def test_beam_search_certifies_the_best_item_by_hand():
    """The beam is {a, b} and {b, d}. So a, b and d are scored, and b is first. [SB §2.5 Alg.1]

    An item outside has at most the last bucket of the beam in each map: 0.6 · 0.7 = 0.42. b has
    as much, so it is certified: no other item is better, although c was not scored.
    """
    items, scores, certified, num_scored = search_four_items(k=1)
    assert items.tolist() == [[1]]
    assert scores.exp().item() == pytest.approx(0.42)
    assert certified.item() is True
    assert num_scored.item() == 3


def test_beam_search_does_not_certify_the_second_item_by_hand():
    """d, the second, has 0.28 < 0.42: an item outside might have more."""
    items, _, certified, _ = search_four_items(k=2)
    assert items.tolist() == [[1, 3]]
    assert certified.item() is False


def test_popularity_prior_by_hand():
    """Two items of a bucket have one p, whichever is popular. The prior tells them apart.

    Of the items a b c d in the maps a b | c d and a c | b d, a was seen 8 times, the others never.
    Each count is raised by 1: 9 + 1 + 1 + 1 = 12. A model that knows only how often each bucket
    occurs predicts 10/12 and 2/12, so a has 10/12 · 10/12 = 0.694, b and c 0.139, d 0.028: b and c
    gain from a. The prior P(item) / (P(bucket 0) · P(bucket 1)) makes them 9/12 and 1/12 each.
    """
    bloom_map = BloomMap(4, 2, orders=[
        [0, 1, 2, 3],
        [0, 2, 1, 3],
    ])
    p = torch.tensor([[
        [10 / 12, 2 / 12],
        [10 / 12, 2 / 12],
    ]])
    prior = popularity_prior([8, 0, 0, 0], bloom_map)
    _, scores = exhaustive(p.log(), bloom_map, k=4)
    assert scores[0].exp().tolist() == pytest.approx([100 / 144, 20 / 144, 20 / 144, 4 / 144])
    _, scores = exhaustive(p.log(), bloom_map, k=4, prior=prior)
    assert scores[0].exp().tolist() == pytest.approx([9 / 12, 1 / 12, 1 / 12, 1 / 12])


def test_beam_search_matches_scoring_all_items():
    """The answer is certified where the k-th best of all items reaches the bound; then it is right.

    The bound adds up the B-th largest log-probability of each map. On these random predictions it
    is reached about once in five times.
    """
    for seed in range(200):
        bloom_map = BloomMap(200 + seed, 1 + seed % 8, seed=seed)
        logits = 3 * torch.randn(1, 2, bloom_map.num_buckets, dtype=torch.float64)
        logp = logits.log_softmax(-1)
        scores = []
        for bucket_0, bucket_1 in bloom_map.digest:
            score = logp[0, 0, bucket_0] + logp[0, 1, bucket_1]
            scores.append(score.item())
        scores.sort(reverse=True)
        best = pytest.approx(scores[:7])
        bound = logp.topk(4).values[0, :, 3].sum()

        found = beam_search(logp, bloom_map, k=7, beam=4)
        assert found.certified.item() == (scores[6] >= bound)
        if found.certified:
            assert found.scores[0].tolist() == best
        # rounds=None doubles the beam until the answer is certified
        found = beam_search(logp, bloom_map, k=7, beam=4, rounds=None)
        assert found.certified.item()
        assert found.scores[0].tolist() == best


def test_sketch_map_finds_the_word_of_predicted_buckets():
    """The same search finds a word by its sketch: the buckets of "play" have the largest p. [CM]"""
    words = ["play", *make_words(200)]
    digest = hashing.sketch_index(words, 3, 23)  # (V, k)
    logits = torch.zeros(1, 3, 23)
    for j, bucket in enumerate(digest[0]):
        logits[0, j, bucket] = 5
    logp = logits.log_softmax(-1)
    found = beam_search(logp, ItemMap(digest, 23), k=1, beam=1)
    assert found.ids.item() == 0
    assert found.certified.item() is True


# == embeddings.py: bits and buckets become a vector
#
# A module maps the codes of words, (words, C), to vectors, (words, d). The codes are what a hash
# gave: one bucket, chunks, bits, or several buckets. Each method is one formula.


def test_emb_by_hand():
    """The bucket of a word chooses a row. Two words in one bucket have one vector. [HF §3.1]"""
    emb = embeddings.HashEmbedding(3, 2)  # 3 buckets, width 2
    emb.weight.data = torch.tensor([
        [1.0, 2],
        [3, 4],
        [5, 6],
    ])
    vectors = emb(torch.tensor([[2], [0], [2]]))
    assert vectors[0].tolist() == [5, 6]
    assert vectors[1].tolist() == [1, 2]
    assert torch.equal(vectors[0], vectors[2])


def test_pool_by_hand():
    """Each chunk chooses a row of one codebook; the rows are averaged by weights. [HF §3.4 eq.1]

    Two chunks of one bit, rows B[0] = 4 and B[1] = 8. W = (0, ln 3), so softmax gives 1/4 and 3/4.

        chunks 0 1    1/4 · 4 + 3/4 · 8 = 7
        chunks 1 0    1/4 · 8 + 3/4 · 4 = 5    their order counts
    """
    pool = embeddings.PoolEmbedding(bits=2, chunk=1, width=1)
    pool.codebook.data = torch.tensor([[4.0], [8]])
    pool.weight.data = torch.tensor([[1.0], [3]]).log()
    vectors = pool(torch.tensor([[0, 1], [1, 0]]))
    assert vectors.flatten().tolist() == pytest.approx([7, 5])


def test_pool_matches_formula():
    """e = Σ_j softmax_j(W)_j ⊙ B[c_j]: in each dimension the weights of the chunks add up to 1."""
    pool = embeddings.PoolEmbedding(bits=21, chunk=4, width=7)  # J = 6 chunks, the last of one bit
    codes = torch.tensor([[3, 15, 0, 7, 8, 1]])
    weight = pool.weight.softmax(0)  # (J, d)
    expected = torch.zeros(1, 7)
    for j in range(6):
        row = pool.codebook[codes[:, j]]  # (1, d)
        expected += weight[j] * row
    assert_close(pool(codes), expected)


def test_add_by_hand():
    """Each bit chooses one of its own two rows; the T rows are added, over √T. [HF §3.4 eq.2]

        bits 1 0    rows 2 and 3    5 / √2
        bits 0 1    rows 1 and 5    6 / √2
    """
    add = embeddings.AddEmbedding(2, 1)
    add.codebooks.data = torch.tensor([
        [[1.0], [2]],  # the rows of bit 0
        [[3], [5]],  # the rows of bit 1
    ])
    vectors = add(torch.tensor([[1, 0], [0, 1]]))
    root = math.sqrt(2)
    assert vectors.flatten().tolist() == pytest.approx([5 / root, 6 / root])


def test_proj_by_hand():
    """A dimension is the correlation of the bits with a learned vector. [HF §3.4 eq.3]

        bits    1 1 0  0    minus their mean    0.5  0.5 -0.5 -0.5    length 1
        vector  3 1 1 -1    minus its mean      2    0    0   -2      length √8
        product 1 + 0 + 0 + 1 = 2               2 / (1 · √8) = 0.7071

    If all bits are flipped the correlation changes its sign. If all are equal it is 0.
    """
    proj = embeddings.ProjEmbedding(4, 1)
    proj.weight.data = torch.tensor([[3.0, 1, 1, -1]])
    vectors = proj(torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]]))
    correlation = 2 / math.sqrt(8)
    assert vectors.flatten().tolist() == pytest.approx([correlation, -correlation, 0])


def test_proj_matches_numpy():
    proj = embeddings.ProjEmbedding(24, 7)
    bits = torch.randint(0, 2, (5, 24))
    vectors = proj(bits)  # (5, d)
    weight = proj.weight.detach()  # (d, T)
    for i in range(5):
        for j in range(7):
            expected = np.corrcoef(bits[i], weight[j])[0, 1]
            assert vectors[i, j].item() == pytest.approx(expected, abs=1e-6)


def test_linear_by_hand():
    """The rows of the bits that are 1, added up: (1, 2) + (5, 6). [HF App. B eq.11]"""
    linear = embeddings.LinearEmbedding(3, 2)
    linear.weight.data = torch.tensor([
        [1.0, 2],
        [3, 4],
        [5, 6],
    ])
    vectors = linear(torch.tensor([[1, 0, 1]]))
    assert vectors.tolist() == [[6, 8]]


def test_bloom_by_hand():
    """An item has a row in each of m blocks. The rows stay apart, side by side. [SB §2.1]"""
    bloom = embeddings.BloomEmbedding(2, 3, 1)  # m = 2 blocks of 3 rows, width 1
    bloom.weight.data = torch.tensor([
        [10.0], [11], [12],  # block 0
        [20], [21], [22],  # block 1
    ])
    vectors = bloom(torch.tensor([[2, 0]]))  # (1, m, d)
    assert vectors.tolist() == [[[12], [20]]]


@pytest.mark.parametrize("aggregate, expected", [
    ("median", [2, 7]),
    ("mean", [301, 2]),  # (1 + 2 + 900) / 3 and (7 - 9 + 8) / 3
])
def test_sketch_with_an_outlier_by_hand(aggregate, expected):
    """A word has a row in each of k blocks, and is their median or mean, number by number. [CM]

    Its rows are (1, 7), (2, -9) and (900, 8). Another word has pulled the third far away. That
    drags the mean along; the median moves at most to the next number in order.
    """
    sketch = embeddings.EMBEDDINGS[aggregate](3, 2, 2)  # k = 3 blocks of R = 2 rows, width 2
    sketch.weight.data = torch.tensor([
        [0.0, 0], [1, 7],  # block 0
        [2, -9], [0, 0],  # block 1
        [0, 0], [900, 8],  # block 2
    ])
    vectors = sketch(torch.tensor([[1, 0, 1]]))
    assert vectors.tolist() == [expected]


def test_weighted_by_hand():
    """k rows of one pool, each times the word's own weight p, which another hash finds. [SV §3]

    Rows 2 and 0 with p = (2, -1): 2 · (5, 6) - (1, 2) = (9, 10).
    """
    weighted = embeddings.WeightedEmbedding(2, 3, 2, 2)  # k = 2 of 3 rows, 2 rows of p, width 2
    weighted.weight.data = torch.tensor([
        [1.0, 2],
        [3, 4],
        [5, 6],
    ])
    weighted.importance.data = torch.tensor([
        [1.0, 1],
        [2, -1],
    ])
    vectors = weighted(torch.tensor([[2, 0, 1]]))  # rows 2 and 0, row 1 of p
    assert vectors.tolist() == [[9, 10]]


def test_ngram_by_hand():
    """The rows of a word's n-grams, added up: (3, 4) + (1, 2) + (3, 4) = (7, 10). [FT §3.2]"""
    ngram = embeddings.NgramEmbedding(3, 4, 2)  # 3 rows, at most 4 n-grams, width 2
    ngram.weight.data = torch.tensor([
        [100.0, 100],  # padding, which is not added
        [1, 2],
        [3, 4],
    ])
    vectors = ngram(torch.tensor([[2, 1, 2, 0]]))
    assert vectors.tolist() == [[7, 10]]


# == attention.py: each vector becomes an average of all; LSH computes fewer of the scores
#
# Attention averages the values of all positions by the similarity of a query with their keys: L²
# products for L positions. LSH attention hashes queries and keys so that similar ones share a
# bucket, and multiplies only pairs in one bucket. All others keep the score 0. That is no mask:
# before normalization each has the weight e^0 = 1, so together they may outweigh the bucket.


def column(*numbers):
    """Return a tensor (B, H, L, e) of one head with e = 1: a number for each position."""
    return torch.tensor(numbers).view(1, 1, -1, 1)


def test_full_attention_by_hand():
    """softmax(q kᵀ / √e) v with head size e = 4, so √e = 2. [V §3.2.1]

    A query has the products 2 ln 3 and 0 with two keys: scores ln 3 and 0, weights 3/4 and 1/4.
    With the values 1 and 5 the output is 3/4 · 1 + 1/4 · 5 = 2.
    """
    q = torch.full((1, 1, 2, 4), math.log(3) / 2)
    k = column(1.0, 0).expand(1, 1, 2, 4)
    v = column(1.0, 5).expand(1, 1, 2, 4)
    out = full_attention(q, k, v)
    assert_close(out, torch.full_like(out, 2))


def test_simhash_by_hand():
    """A bucket is the sum of the numbers of the hyperplanes that x is above, modulo m. [BL §2.1]

    Three hyperplanes, the axes, have the numbers 9, 12 and 3; x is above where it is positive.

        x = ( 1,  1, -1)    (9 + 12) mod 16 = 5
        x = ( 1, -1,  1)    (9 + 3)  mod 16 = 12
        x = (-1, -1, -1)    0
    """
    planes = torch.eye(3).view(1, 1, 3, 3)  # (H, n, r, e)
    coef = torch.tensor([[[9, 12, 3]]])  # (H, n, r)
    x = torch.tensor([
        [1.0, 1, -1],
        [1, -1, 1],
        [-1, -1, -1],
    ])
    h = simhash(x.view(1, 1, 3, 3), planes, coef, 16)  # (B, H, n, L)
    assert h.flatten().tolist() == [5, 12, 0]


@pytest.mark.parametrize("angle", [0.0, 0.3, math.pi / 2])
def test_simhash_collides_by_the_angle_law(angle):
    """Two vectors share a bucket with P = p + (1 - p)/m, p = (1 - angle/π)^r. [BL §2.1]

    p: both are on one side of all r hyperplanes. Otherwise their sums agree by chance, 1 in m. At a
    right angle with r = 2 and m = 64, p = 1/4 and P = 1/4 + 3/4 / 64.
    """
    p = (1 - angle / math.pi) ** 2
    law = p + (1 - p) / 64
    assert collision_probability(angle, num_hyperplanes=2, num_buckets=64) == pytest.approx(law)
    num_draws = 40_000  # as heads, each with hyperplanes of its own
    generator = torch.Generator().manual_seed(0)
    planes, coef = draw_hyperplanes(num_draws, 1, 2, 2, 64, generator)
    pair = torch.tensor([
        [1.0, 0.0],
        [math.cos(angle), math.sin(angle)],
    ])
    h = simhash(pair.expand(1, num_draws, 2, 2), planes, coef, 64)  # (1, draws, 1, 2)
    is_equal = h[..., 0] == h[..., 1]
    share = is_equal.float().mean().item()
    sigma = math.sqrt(law * (1 - law) / num_draws)
    assert abs(share - law) <= 6 * sigma


@pytest.mark.parametrize("impl", ["dense", "blocks"])
def test_lsh_attention_in_three_numbers(impl):
    """One query has the score ln 3 with the one key in its bucket; the values are 1, 2, 3.

        dense    the literal formula      weights e^(ln 3), e^0, e^0    (3·1 + 1·2 + 1·3) / 5 = 1.6
        blocks   bucket by bucket         weights e^(ln 3), e^(ln 2)    (3·1 + 2·2.5)     / 5 = 1.6

    blocks has one extra key for the two keys outside: its score is ln 2, its value their mean, 2.5.
    """
    q = column(math.log(3), 0, 0)
    k = column(1.0, 1, 1)
    v = column(1.0, 2, 3)
    hq = column(0, 5, 5).mT  # (B, H, n, L)
    hk = column(0, 1, 2).mT
    out = lsh_attention(q, k, v, hq, hk, impl=impl)
    assert out[0, 0, 0].item() == pytest.approx(1.6)


def attend_in_loops(q, k, v, hq, hk):
    """Return LSH attention of q, k, v (1, 1, L, e) and buckets hq, hk (1, 1, 1, L)."""
    L, e = q.shape[2:]
    out = torch.zeros_like(v)
    for i in range(L):
        weights = torch.zeros(L)
        for j in range(L):
            score = 0.0
            if hq[..., i] == hk[..., j]:
                product = torch.dot(q[0, 0, i], k[0, 0, j])
                score = product / math.sqrt(e)
            weights[j] = math.exp(score)
        weights /= weights.sum()
        out[0, 0, i] = weights @ v[0, 0]
    return out


def test_lsh_attention_matches_loops():
    q, k, v = torch.randn(3, 1, 1, 11, 5)
    hq, hk = torch.randint(4, (2, 1, 1, 1, 11))
    expected = attend_in_loops(q, k, v, hq, hk)
    assert_close(lsh_attention_reference(q, k, v, hq, hk), expected)
    assert_close(lsh_attention(q, k, v, hq, hk, impl="blocks"), expected)


def test_attention_in_one_bucket_is_full_attention():
    q, k, v = torch.randn(3, 1, 1, 11, 5)
    h = torch.zeros(1, 1, 1, 11, dtype=torch.int64)
    assert_close(full_attention(q, k, v), attend_in_loops(q, k, v, h, h))


# == model.py: layers of attention, and how many parameters they have
#
# Codes become vectors, layers mix the vectors, and a head predicts from them. Only the embedding
# differs between methods, and the parameters show what hashing saves.


@pytest.mark.parametrize("emb, expected", [
    ("emb", 50_260 * 768),  # a row for each bucket
    ("pool", (13 + 1_024) * 768),  # a weight for each chunk, a row for each number of 10 bits
    ("add", 2 * 128 * 768),  # two rows for each bit
    ("proj", 128 * 768),  # a number for each bit and dimension: 98,304
])
def test_parameter_counts_match_paper(emb, expected):
    """HashFormers' model for two labels: d 768, 12 layers, 514 positions. [HF Table 2, App. B]"""
    config = Config(emb=emb, head="classify", spare_positions=2)
    with torch.device("meta"):  # counted, not allocated
        counts = count_parameters(Model(config))
    assert counts["embedding"] == expected

    d = 768
    attention = 4 * (d * d + d)  # queries, keys, values, output: a matrix and a bias each
    ffn = (d * 3_072 + 3_072) + (3_072 * d + d)
    norm = 2 * d  # a scale and a shift
    layers = 12 * (attention + norm + ffn + norm)
    inputs = 514 * d + d + norm  # 512 + 2 positions, one token type
    head = (d * d + d) + (d * 2 + 2)
    others = counts["total"] - counts["embedding"] - counts["specials"]
    assert others == layers + inputs + head == 86_043_650


def test_transformer_layer_matches_formula():
    """LN(x + Attention(x)), and then LN(x + FFN(x)). [BERT §3]"""
    config = Config(layers=1, width=12, heads=3, ffn=20)
    layer = Model(config).eval().layers[0]
    x = torch.randn(2, 5, 12)  # (B, L, d)
    q, k, v = layer.attention.project(x)
    a = full_attention_reference(q, k, v)  # (B, H, L, e)
    a = a.transpose(1, 2).flatten(2)  # (B, L, d): the heads side by side
    a = layer.attention.out(a)
    y = F.layer_norm(x + a, (12,))
    f = layer.down(F.gelu(layer.up(y)))
    expected = F.layer_norm(y + f, (12,))
    assert_close(layer(x), expected)


def test_set_model_ignores_order():
    """A set has no positions: reverse its items, and the outputs are reversed alike. [SB §3.2]

    So the two masked items, which differ in their place alone, have equal outputs.
    """
    config = Config(
        emb="bloom", head="hash-mlm", order=False, buckets=60,
        layers=2, width=12, heads=3, ffn=20)
    model = Model(config).eval()
    codes = torch.randint(60, (40, 2))  # m = 2 hash tokens for each of 40 IDs
    model.set_codes(codes)
    ids = torch.tensor([[8, MASK, 30, 9, MASK]])
    out = model.encode(ids)[0]  # (L, m, d)
    out = out.view(5, 24)  # a row for each item
    reversed_out = model.encode(ids.flip(1))[0].view(5, 24)
    assert_close(reversed_out, out.flip(0))
    assert_close(out[1], out[4])


# == objectives.py: what a model learns from a text without labels
#
# A text is corrupted, and the model predicts what was there, or what was done. A text is a row of
# token IDs: 0 to 4 are special tokens, such as CLS at the start and SEP at the end, and words begin
# with ID 5. Each position has a random number in [0, 1), its noise, and a word is chosen where the
# noise is below the rate. So a test can choose the words, by the noise that it gives.


def test_shuffle_random_by_hand():
    """Some words are put in a random order, others replaced; a label says which. [HF §3.6]

        position   0   1  2  3  4  5  6  7  8
        text       CLS 10 11 12 13 14 15 16 SEP    11, 13, 15 are chosen to be shuffled, 16 to go
        inputs     CLS 10 15 12 11 14 13 99 SEP    in the random order 6 2 4: position 2 gets 15,
        labels     -   0  1  0  1  0  1  2  -      4 gets 11, 6 gets 13; and 7 gets a random word

    Labels: 0 intact, 1 shuffled, 2 random, - not scored. A word that the random order puts back in
    its place is intact.
    """
    ids = torch.tensor([[CLS, 10, 11, 12, 13, 14, 15, 16, SEP]])
    noise = torch.tensor([  # of three decisions
        # below the rate of 10 % a word is shuffled
        [0.9999, 0.1001, 0.0999, 0.1001, 0.0999, 0.1001, 0.0999, 0.1001, 0.9999],
        # or goes: only the one at 7, as 2 is shuffled, and CLS and SEP are no words
        [0.0999, 0.1001, 0.0999, 0.1001, 0.1001, 0.1001, 0.1001, 0.0999, 0.0999],
        # sorted, this is the new order
        [0.9999, 0.9999, 0.3000, 0.9999, 0.4000, 0.9999, 0.2000, 0.9999, 0.9999],
    ])
    random_words = torch.full_like(ids, 99)

    objective = ShuffleRandom()
    inputs, labels = objective.corrupt(ids, noise.unsqueeze(1), random_words)
    assert inputs.tolist() == [[CLS, 10, 15, 12, 11, 14, 13, 99, SEP]]
    assert labels.tolist() == [[IGNORE_INDEX, 0, 1, 0, 1, 0, 1, 2, IGNORE_INDEX]]


def fixed_model(logits):
    """Return a model that predicts these logits whatever it reads."""
    return lambda inputs, key_mask=None, masked_positions=None: torch.tensor(logits)


def test_shuffle_random_loss_by_hand():
    """The loss is the sum over words. A label whose logit is 2 costs S - 2, one whose logit is 0 S.

    Here S = ln(e² + 1 + 1). The labels are 0 intact, 1 shuffled, 2 random, - not scored.

        label   logits   loss     predicted
        0       2 0 0    S - 2    0             accuracy 2/3
        1       2 0 0    S        0             class 0: 1 right, 1 labeled, 2 predicted,
        2       0 0 2    S - 2    2                      so F1 = 2 · 1 / (1 + 2)
        -       0 9 0    not scored
    """
    model = fixed_model([[
        [2.0, 0, 0],
        [2, 0, 0],
        [0, 0, 2],
        [0, 9, 0],
    ]])
    labels = torch.tensor([[0, 1, 2, IGNORE_INDEX]])
    S = math.log(math.exp(2) + 1 + 1)
    objective = ShuffleRandom()
    sums = objective.evaluate(model, make_batch(None, labels))
    assert sums["loss"].item() == pytest.approx(S - 2 + S + S - 2)
    assert objective.metrics(sums) == pytest.approx(dict(
        accuracy=2 / 3,
        majority=1 / 3,
        f1_intact=2 / 3,
        f1_shuffled=0,
        f1_random=1,
        macro_f1=5 / 9,
    ))


def test_masked_words_by_hand():
    """80 % of the chosen words become [MASK], 10 % a random word, and 10 % stay. [BERT §3.1]"""
    ids = torch.tensor([[10, 11, 12, 13]])
    noise = torch.tensor([
        [[0.14, 0.14, 0.14, 0.16]],  # below 0.15: chosen
        [[0.79, 0.81, 0.81, 0.00]],  # below 0.8: [MASK]
        [[0.00, 0.49, 0.51, 0.00]],  # of the others below 0.5: a random word, here 77
    ])
    random_words = torch.full_like(ids, 77)
    objective = MaskedWords(Config(emb="lookup", head="mlm"), 0.15, RowTarget())
    inputs, labels = objective.corrupt(ids, noise, random_words)
    assert inputs.tolist() == [[MASK, 77, 12, 13]]
    assert labels.tolist() == [[10, 11, 12, IGNORE_INDEX]]


def test_masked_hashes_loss_by_hand():
    """Without a row for each word, predict its k hashes; the loss is their mean. [CM]

    k = 3 hashes of R = 3 buckets, and the word has the buckets 2, 1 and 0.

        hash 0   logits 0 0 0       p(bucket 2) = 1/3              loss ln 3
        hash 1   logits 0 ln 2 0    p(bucket 1) = 2 / (1 + 2 + 1)  loss ln 2
        hash 2   logits 0 0 0       p(bucket 0) = 1/3              loss ln 3
    """
    config = Config(emb="mean", head="hash-mlm", hashes=3, buckets=3)
    targets = torch.zeros(7, 3, dtype=torch.int64)  # (IDs, k)
    targets[6] = torch.tensor([2, 1, 0])
    objective = MaskedHashes(config, 0.15, SketchTarget(targets))
    model = fixed_model([[  # (M, k, R)
        [0, 0, 0],
        [0, math.log(2), 0],
        [0, 0, 0],
    ]])
    loss = objective.loss(model, make_batch(None, torch.tensor([[6]])))
    mean = (math.log(3) + math.log(2) + math.log(3)) / 3
    assert loss.item() == pytest.approx(mean)


# == tokenizer.py, data/corpus.py: words become token IDs, and IDs become the input of a model
#
# A corpus on disk is a row of token IDs. The tokenizer keeps the word of each ID, and hashes each
# word once.


def test_tokenizer_gives_a_new_word_the_next_id():
    """No word is unknown: it gets the next free ID, and its codes are its hash. [HF §3.1]"""
    config = Config(emb="emb", rows=16)
    tokenizer = make_tokenizer(config, hash=hashing.MD5())
    words, _ = tokenizer.split("Play! The play")
    ids = tokenizer.ids(words)
    assert ids.tolist() == [5, 6, 7, 5]
    codes = tokenizer.codes()  # (IDs, 1)
    assert not codes[:FIRST_WORD_ID].any()  # special tokens are never hashed
    expected = hashing.md5_index(["play", "!", "the"], 16)
    assert codes[FIRST_WORD_ID:, 0].tolist() == expected.tolist()


def test_tokenizer_of_a_vocabulary_has_unknown_words():
    """The baseline: a table has rows for the words of a list alone."""
    config = Config(emb="lookup", head="mlm", rows=7)
    tokenizer = make_tokenizer(config, vocabulary=["the", "cat"])
    ids = tokenizer.ids(["cat", "dog", "the"])
    assert ids.tolist() == [6, UNK, 5]
    assert tokenizer.codes()[ids, 0].tolist() == [6, UNK, 5]  # the row of an ID has its number


def test_prepare_by_hand(tmp_path):
    """IDs go by frequency, ties by first appearance. SEP closes a document, here a line."""
    path = tmp_path / "a.txt"
    path.write_text("The cat.\n\nthe Dog the\n")
    folder = prepare(str(path), "regex", str(tmp_path / "cache"))
    corpus = Corpus(folder)
    assert corpus.words == ["the", "cat", ".", "dog"]
    assert corpus.ids.tolist() == [5, 6, 7, SEP, 5, 8, 5, SEP]
    assert corpus.counts.tolist() == [0, 0, 2, 0, 0, 3, 1, 1, 1]  # by ID


def test_build_inputs_by_hand():
    """[CLS] A [SEP] for one text, which is cut to fit: 10 words, and room for 4 - 2 = 2."""
    words = np.arange(100, 110)
    ids, num_cut = build_inputs(words, None, 4)
    assert ids.tolist() == [CLS, 100, 101, SEP]
    assert num_cut == 8


@pytest.mark.parametrize("num_a, num_b, length, kept_a, kept_b", [
    (10, 3, 12, 5, 3),  # room for 12 - 4 = 8 words
    (10, 10, 11, 4, 3),  # both are cut
    (2, 10, 11, 2, 5),
])
def test_build_inputs_of_a_pair_cuts_the_longer_text_by_hand(num_a, num_b, length, kept_a, kept_b):
    """[CLS] A [SEP] [SEP] B [SEP]: four tokens are no words."""
    a = np.arange(100, 100 + num_a)
    b = np.arange(200, 200 + num_b)
    ids, num_cut = build_inputs(a, b, length)
    assert ids.tolist() == [CLS, *a[:kept_a], SEP, SEP, *b[:kept_b], SEP]
    assert num_cut == num_a + num_b - kept_a - kept_b
    assert ids.dtype == np.int32


# == pretrain.py: a run from its first loss on
#
# A model of one layer trains on a small text in a second. tests/test_pretrain.py has the laws of
# longer runs: a run that is stopped and resumed ends with the same weights, bit for bit.


def test_pretrain_starts_at_uniform_baseline_and_learns_the_frequencies(small, capsys):
    """Three classes: a loss near ln 3 at step 0, and less after 60, as most words are intact."""
    flags = small(*"--steps 60 --warmup 5 --lr 3e-3 --eval_every 30".split())
    result = pretrain.main(flags)
    printed = capsys.readouterr().out
    first = float(re.search(r"eval_loss: ([\d.]+) at step 0", printed)[1])
    assert abs(first - math.log(3)) < 0.2
    assert result["eval_loss"] < 0.6 * first


# == data/classification.py, squad.py, infer.py: scores of a trained model, and what hashing brings
#
# The metrics are those of the GLUE tasks and of SQuAD. The last test needs no training.


def test_glue_metrics_by_hand():
    """Six examples of three classes.

        truth        0 0 1 1 1 2    three are right: accuracy 1/2
        prediction   0 1 1 1 0 0    class 1: 2 right, 3 predicted, 3 true, F1 = 2 · 2 / (3 + 3)
    """
    truth = np.array([0, 0, 1, 1, 1, 2])
    prediction = np.array([0, 1, 1, 1, 0, 0])
    assert METRICS["accuracy"](prediction, truth) == 0.5
    assert METRICS["f1"](prediction, truth) == pytest.approx(2 / 3)


def test_squad_scores_by_hand():
    """Case, punctuation and articles do not count: "the Cat sat." is cat sat. [SQ §6]

    "A cat slept" has one word of two in common with it, so F1 is 1/2, and no exact match.
    """
    assert normalize_answer("The U.S. Army!") == ["us", "army"]
    answer = normalize_answer("the Cat sat.")
    truths = [normalize_answer("A cat slept"), ["dog"]]
    assert exact_and_f1(answer, truths) == (0.0, 0.5)
    assert exact_and_f1(["dog"], truths) == (1.0, 1.0)  # of several answers the best one counts


@pytest.mark.parametrize("hash_name, is_found", [
    ("lsh", True),
    ("md5", False),
])
def test_misspelling_is_nearest_to_its_word_under_lsh(tmp_path, hash_name, is_found):
    """Without any training: LSH keeps the angles between spellings, and Proj those between bits."""
    words = ["receive", "separate", "definitely", *make_words(300, 11, "abcdefghijklmnop")]
    config = Config(emb="proj", layers=0, width=512, heads=4, ffn=8, length=9)
    hash_function = hashing.HASHES[hash_name].fit(dict.fromkeys(words, 1))
    tokenizer = make_tokenizer(config, hash=hash_function)
    path = tmp_path / "ckpt.pt"
    save_checkpoint(str(path), Model(config), tokenizer.state(), words=words)
    predictor = infer.Predictor(str(tmp_path))
    for misspelling, word in [
        ("recieve", "receive"),
        ("seperate", "separate"),
        ("definately", "definitely"),
    ]:
        [(nearest, _)] = predictor.neighbors(misspelling, k=1)
        assert (nearest == word) == is_found
