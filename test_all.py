"""Read this first: one hand-worked example and one oracle per concept.

    python -m pytest -q test_all.py        under a minute, no network
    python -m pytest -q -n 2               everything: the laws, edge cases and faults are in tests/

Bands of statistical tests are six standard deviations to each side, and seeds are fixed: a failure is a
fault, not chance. A wrong constant moves the mean by far more.
"""

import hashlib
import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import attention
import embeddings
import hashing
import infer
import pretrain
from bloom import BloomMap, beam_search, exhaustive
from data.corpus import Corpus, prepare
from data.squad import exact_and_f1, normalize_answer
from data.tasks import METRICS
from hashing import NgramLSH
from model import Config, Model, count_parameters
from objectives import IGNORE_INDEX, MaskedHashes, MaskedWords, ShuffleRandom, mask_words
from runtime import load_checkpoint, save_checkpoint
from tests.support import SMALL, make_words
from tokenizer import CLS, FIRST_WORD_ID, MASK, SEP, HashTokenizer, build_inputs

# == hashing.py: words to bits and buckets


def test_split_words_by_hand():
    """"Don't" is a run of letters, a sign and a run of letters; two signs in a row stay one word."""
    words, spans = hashing.split_words("Don't stop!!")
    assert words == ["don", "'", "t", "stop", "!!"]
    assert spans == [(0, 3), (3, 4), (4, 5), (6, 10), (10, 12)]
    assert hashing.split_words("Don't stop!!", "space")[0] == ["don't", "stop!!"]


def test_md5_golden_values():
    """md5("play") = a3b34c..., cut by hand into 10-bit chunks: 1010 0011 10 = 654, 11 0011 0100 = 820, ..."""
    assert hashing.md5_digests(["play"]).tobytes().hex() == "a3b34c0871dc2fd51eec5559b68f709d"
    chunks = hashing.bits_to_chunks(hashing.md5_bits(["play"]), 10)
    assert chunks.tolist() == [[654, 820, 770, 113, 880, 765, 327, 748, 341, 411, 419, 880, 157]]
    assert hashing.md5_index(["play"], 50_000).tolist() == [15_933]
    whole = [int(hashlib.md5(word.encode()).hexdigest(), 16) for word in make_words(101)]
    assert hashing.md5_index(make_words(101), 50_260).tolist() == [number % 50_260 for number in whole]


def test_chunks_by_hand():
    """The last chunk is short and is read as a number of its own length: 001 is 1, not 0010. [HF §3.4]"""
    bits = np.array([[1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 1]], np.uint8)
    assert hashing.bits_to_chunks(bits, 4).tolist() == [[10, 4, 1]]


def ngrams(word):
    """The definition: all runs of 1 to 4 characters, with their counts."""
    return Counter(word[i:i + n] for n in range(1, 5) for i in range(len(word) - n + 1))


def test_play_has_ten_ngrams():
    assert len(NgramLSH.fit({"play": 1}).grams) == 4 + 3 + 2 + 1
    assert sorted(NgramLSH.fit({"play": 1}).grams) == sorted(ngrams("play"))


def test_lsh_equals_explicit_hyperplanes():
    """Hyperplane j is eta rotated by j: r^j[f] = eta[(f + j) mod features]; bit j: x · r^j > 0. [HF §3.3]"""
    lsh = NgramLSH.fit(dict.fromkeys(make_words(400, 3), 1), 997, seed=5)
    words = ["play", "", "ZZZ", "tattoo" * 9, *make_words(23, 9)]
    eta = lsh.eta[:997].astype(np.int64)
    for word, bits, index in zip(words, lsh.bits(words, 131), lsh.index(words, 499)):
        x = np.array([ngrams(word)[gram] for gram in lsh.grams] + [0] * (997 - len(lsh.grams)))
        products = x @ np.stack([np.roll(eta, -j) for j in range(499)], 1)
        assert (bits == (products[:131] > 0)).all() and index == products.argmax(), word


def test_lsh_law():
    """E[Hamming distance] / T = angle / π. play's 10 n-grams are among the 14 of plays: cos 10 / √140."""
    expected = math.acos(10 / math.sqrt(10 * 14)) / math.pi
    grams = list(ngrams("playsxylophone"))
    samples = [NgramLSH(grams, 5_003, seed).bits(["play", "plays"], 128) for seed in range(64)]
    share = np.mean([(bits[0] != bits[1]).mean() for bits in samples])
    assert round(expected * 128) == 23
    # twice the band of a binomial share with 64 · 128 draws: the bits of one seed share eta
    assert abs(share - expected) < 2 * 6 * math.sqrt(expected * (1 - expected) / (64 * 128))


# == bloom.py: items to hash tokens and back


def test_bloom_map_by_hand():
    """Orders 0 1 | 2 3 | 4 5 and 0 2 | 1 4 | 3 5: item 1 has bucket 0 in the first map, 1 in the second."""
    bloom_map = BloomMap(6, 2, orders=[[0, 1, 2, 3, 4, 5], [0, 2, 1, 4, 3, 5]])
    assert bloom_map.digest.tolist() == [[0, 0], [0, 1], [1, 0], [1, 2], [2, 1], [2, 2]]
    assert bloom_map.members.tolist() == [[[0, 1], [2, 3], [4, 5]], [[0, 2], [1, 4], [3, 5]]]


@pytest.mark.parametrize("n, alpha, m", [(1_000, 7, 2), (997, 13, 3), (2_601, 50, 2), (27, 9, 3)])
def test_bloom_maps_are_balanced_and_digests_are_distinct(n, alpha, m):
    bloom_map = BloomMap(n, alpha, m, seed=5)
    sizes = [alpha] * (-(-n // alpha) - 1)
    for j in range(m):
        assert np.bincount(bloom_map.digest[:, j]).tolist() == sizes + [n - sum(sizes)]
    assert len(np.unique(bloom_map.digest, axis=0)) == n


def test_beam_search_by_hand():
    """Map 0: a b | c d with 0.6, 0.4; map 1: a c | b d with 0.3, 0.7.

    a 0.6 · 0.3 = 0.18   b 0.6 · 0.7 = 0.42   c 0.4 · 0.3 = 0.12   d 0.4 · 0.7 = 0.28
    One bucket of each map: {a, b} and {b, d}, so a, b, d are scored and c is not. The threshold is 0.6 · 0.7:
    b = 0.42 is certified to be first. The second, d = 0.28 < 0.42, is not.
    """
    bloom_map = BloomMap(4, 2, orders=[[0, 1, 2, 3], [0, 2, 1, 3]])
    logp = torch.tensor([[[0.6, 0.4], [0.3, 0.7]]]).log()
    ids, scores, certified, num_scored = beam_search(logp, bloom_map, k=1, beam=1)
    assert ids.tolist() == [[1]] and certified.tolist() == [True] and num_scored.tolist() == [3]
    torch.testing.assert_close(scores.exp(), torch.tensor([[0.42]]))
    ids, _, certified, _ = beam_search(logp, bloom_map, k=2, beam=1)
    assert ids.tolist() == [[1, 3]] and certified.tolist() == [False]
    ids, _, certified, _ = beam_search(logp, bloom_map, k=4, beam=1, rounds=None)  # until certified
    assert ids.tolist() == [[1, 3, 0, 2]] and certified.tolist() == [True]


def test_beam_search_matches_exhaustive():
    rng = np.random.default_rng(0)
    for case in range(40):
        bloom_map = BloomMap(int(rng.integers(100, 300)), int(rng.integers(1, 9)), 2, seed=case)
        logp = torch.from_numpy(rng.standard_normal((5, 2, bloom_map.buckets)) * 3).log_softmax(-1)
        _, scores, certified, _ = beam_search(logp, bloom_map, k=7, beam=4)
        expected = exhaustive(logp, bloom_map, k=7)[1]
        torch.testing.assert_close(scores[certified], expected[certified])
        torch.testing.assert_close(beam_search(logp, bloom_map, k=7, beam=4, rounds=None)[1], expected)


# == embeddings.py: codes to vectors, each against its formula


def test_pool_matches_formula():
    module, codes = embeddings.PoolEmbedding(21, 4, 7), torch.randint(0, 2, (5, 3, 6))  # J 6
    codes[..., :5] = torch.randint(0, 16, (5, 3, 5))
    weight = module.weight.softmax(0)  # (J, d)
    expected = sum(weight[j] * module.codebook[codes[..., j]] for j in range(6))
    torch.testing.assert_close(module(codes), expected)


def test_add_matches_formula():
    module, codes = embeddings.AddEmbedding(24, 7), torch.randint(0, 2, (5, 3, 24))
    expected = sum(module.codebooks[j, codes[..., j]] for j in range(24)) / math.sqrt(24)
    torch.testing.assert_close(module(codes), expected)


def test_proj_matches_numpy_correlation():
    module, codes = embeddings.ProjEmbedding(24, 7), torch.randint(0, 2, (5, 24))
    expected = np.corrcoef(codes.numpy(), module.weight.detach().numpy())[:5, 5:]  # (5, d)
    np.testing.assert_allclose(module(codes).detach().numpy(), expected, atol=1e-6)


def test_sketch_by_hand():
    """One row far away drags the mean along; the median moves at most to the next number in order. [CM]"""
    for aggregate, expected in (("median", [2.0, 7.0]), ("mean", [301.0, 2.0])):
        sketch = embeddings.SketchEmbedding(3, 2, 2, aggregate)
        sketch.weight.data[:] = torch.tensor([[0, 0], [1, 7], [2, -9], [0, 0], [0, 0], [900, 8]])
        assert sketch(torch.tensor([[1, 0, 1]])).tolist() == [expected]
    rows = list(torch.randn(5, 70))
    assert torch.equal(embeddings.median(rows), torch.stack(rows).median(0).values)


# == attention.py: over all pairs, or over pairs that collide


def test_simhash_by_hand():
    """Hyperplanes are the axes: x is above where it is positive; 9 + 12 = 21 is 5 modulo 16. [BL §2.1]"""
    planes, coef = torch.eye(3).view(1, 1, 3, 3), torch.tensor([[[9, 12, 3]]])
    x = torch.tensor([[1.0, 1, -1], [1, -1, 1], [-1, -1, -1]]).view(1, 1, 3, 3)
    assert attention.simhash(x, planes, coef, 16).tolist() == [[[[5, 12, 0]]]]


def test_collision_law():
    """P = p + (1 - p)/m with p = (1 - angle/π)^r: on one side of all hyperplanes, or by chance."""
    generator, samples = torch.Generator().manual_seed(0), 40_000
    for angle in (0.0, 0.3, math.pi / 2):
        planes, coef = attention.draw_hyperplanes(samples, 1, 2, 2, 64, generator)
        pair = torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)]]).expand(1, samples, 2, 2)
        h = attention.simhash(pair, planes, coef, 64)  # (1, samples, 1, 2)
        law = attention.collision_probability(angle, 2, 64)
        band = 6 * math.sqrt(law * (1 - law) / samples) + 1e-9
        assert abs((h[..., 0] == h[..., 1]).float().mean().item() - law) <= band


@pytest.mark.parametrize("fill", ["zero", "mask"])
def test_lsh_attention_matches_reference(fill):
    """Computed bucket by bucket, the literal formula, forward and backward."""
    q, k, v = (torch.randn(3, 2, 63, 5, requires_grad=True) for _ in range(3))
    planes, coef = attention.draw_hyperplanes(2, 1, 3, 5, 8, torch.Generator().manual_seed(0))
    hq, hk = (attention.simhash(x, planes, coef, 8) for x in (q, k))
    modes = dict(fill=fill, key_mask=torch.arange(63) < torch.tensor([[63], [17], [40]]))
    out = attention.lsh_attention(q, k, v, hq, hk, impl="blocks", **modes)
    expected = attention.lsh_attention_reference(q, k, v, hq, hk, **modes)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    cotangent = torch.randn_like(out)
    gradients, expected = (torch.autograd.grad((x * cotangent).sum(), (q, k, v)) for x in (out, expected))
    torch.testing.assert_close(gradients, expected, rtol=1e-3, atol=1e-4)


def test_lsh_attention_with_one_bucket_matches_full_attention():
    q, k, v = torch.randn(3, 2, 3, 37, 5)
    hq = hk = torch.zeros(2, 3, 1, 37, dtype=torch.int64)
    out = attention.lsh_attention(q, k, v, hq, hk, pairs="all", impl="blocks")
    torch.testing.assert_close(out, attention.full_attention_reference(q, k, v), rtol=1e-4, atol=1e-5)


# == model.py: vectors to predictions


def test_parameter_counts_match_paper():
    """[HF Table 2, App. B] as integers: width 768, 12 layers, a binary task."""
    counts = {}
    with torch.device("meta"):
        for name in ("emb", "pool", "add", "proj"):
            counts[name] = count_parameters(Model(Config(emb=name, head="classify", spare_positions=2)))
    assert {name: c["embedding"] for name, c in counts.items()} == {
        "emb": 50_260 * 768, "pool": (13 + 1024) * 768, "add": 2 * 128 * 768, "proj": 128 * 768}
    assert all(c["total"] - c["embedding"] - c["specials"] == 86_043_650 for c in counts.values())


def test_transformer_layer_matches_formula():
    """[BERT §3] LN(x + Attention(x)), then LN(x + FFN(x))."""
    layer = Model(Config(layers=1, width=12, heads=3, ffn=20, dropout=0.0)).layers[0]
    x = torch.randn(2, 5, 12)
    q, k, v = layer.attention.project(x)
    heads = attention.full_attention_reference(q, k, v).transpose(1, 2).flatten(2)
    y = F.layer_norm(x + layer.attention.out(heads), (12,))
    y = F.layer_norm(y + layer.down(F.gelu(layer.up(y))), (12,))
    torch.testing.assert_close(layer(x), y, rtol=1e-4, atol=1e-5)


def test_set_model_ignores_order():
    """Permuting the items of a set permutes the outputs."""
    sizes = dict(buckets=60, layers=2, width=12, heads=3, ffn=20)
    model = Model(Config(emb="bloom", head="hash-mlm", order=False, **sizes)).eval()
    model.set_codes(torch.randint(0, 60, (40, 2)))
    ids, order = torch.tensor([[8, 12, 30, 9, 22]]), torch.tensor([3, 0, 4, 2, 1])
    out, permuted = (model.encode(x).unflatten(1, (5, 2)) for x in (ids, ids[:, order]))
    torch.testing.assert_close(out[:, order], permuted, rtol=1e-4, atol=1e-5)


# == data/corpus.py, tokenizer.py: text to token IDs


def test_prepare_by_hand(tmp_path):
    """IDs go by frequency from FIRST_WORD_ID = 5 on, ties by first appearance; SEP = 2 closes a document."""
    (tmp_path / "a.txt").write_text("The cat.\n\nthe Dog the\n")
    corpus = Corpus(prepare(str(tmp_path / "a.txt"), "regex", str(tmp_path / "cache"), quiet=True))
    assert corpus.words == ["the", "cat", ".", "dog"]
    assert corpus.ids.tolist() == [5, 6, 7, SEP, 5, 8, 5, SEP]
    assert corpus.counts.tolist() == [0, 0, 2, 0, 0, 3, 1, 1, 1]


def test_build_inputs_by_hand():
    """10 and 3 words with room for 8: the longer one gives up five."""
    a, b = np.arange(100, 110), np.arange(200, 203)
    ids, num_cut = build_inputs(a, b, 12)
    assert ids.tolist() == [CLS, *range(100, 105), SEP, SEP, 200, 201, 202, SEP] and num_cut == 5
    assert build_inputs(a, None, 5)[0].tolist() == [CLS, 100, 101, 102, SEP]


# == objectives.py: what a model learns from


def test_shuffle_random_by_hand():
    """The docstring's example and a random word at the end: b d f are chosen, and trade positions."""
    ids = torch.tensor([[CLS, 10, 11, 12, 13, 14, 15, 16, SEP]])
    noise = torch.full((3, 1, 9), 0.99)
    noise[0, 0, [2, 4, 6]] = 0.05  # shuffled: b (11), d (13), f (15)
    noise[2, 0, [6, 2, 4]] = torch.tensor([0.1, 0.2, 0.3])  # random order: positions 6, 2, 4
    noise[1, 0, [0, 7, 8]] = 0.05  # random: only 16, for CLS and SEP are no words
    objective = ShuffleRandom(None, first_word_id=FIRST_WORD_ID)
    inputs, labels = objective.corrupt(ids, noise, torch.full_like(ids, 77))
    assert inputs.tolist() == [[CLS, 10, 15, 12, 11, 14, 13, 77, SEP]]
    assert labels.tolist() == [[IGNORE_INDEX, 0, 1, 0, 1, 0, 1, 2, IGNORE_INDEX]]


def test_masking_law():
    """Of 15 %: 80 % [MASK], 10 % another word, 10 % unchanged. [BERT §3.1]"""
    rng = np.random.default_rng(0)
    ids, words = (torch.from_numpy(rng.integers(FIRST_WORD_ID, 5_003, (257, 63))) for _ in range(2))
    noise = torch.from_numpy(rng.random((3, 257, 63), np.float32))
    inputs, labels = mask_words(ids, noise, words, 0.15, MASK, FIRST_WORD_ID)
    is_chosen = labels != IGNORE_INDEX
    n = int(is_chosen.sum())
    # 2 / 5,003: a random word may be the masked one
    for count, total, share in ((n, ids.numel(), 0.15), ((inputs == MASK).sum(), n, 0.8),
                                ((is_chosen & (inputs == words)).sum(), n, 0.1),
                                ((is_chosen & (inputs == ids)).sum(), n, 0.1)):
        assert abs(int(count) / total - share) < 6 * math.sqrt(share * (1 - share) / total) + 2 / 5_003


def test_losses_by_hand():
    """Logits 2 0 0: the loss of class 0 is ln(e² + 2) - 2, of class 1 ln(e² + 2)."""
    logits = torch.tensor([[[2.0, 0, 0], [2, 0, 0], [0, 0, 2], [0, 9, 0]]])
    labels = torch.tensor([[0, 1, 2, IGNORE_INDEX]])
    objective = ShuffleRandom(None, first_word_id=FIRST_WORD_ID)
    loss, counts = objective.evaluate(lambda inputs: logits, None, labels)
    assert loss.item() == pytest.approx(3 * math.log(math.exp(2) + 2) - 4)
    metrics = objective.metrics(counts)
    assert metrics["accuracy"] == pytest.approx(2 / 3) and metrics["f1_intact"] == pytest.approx(2 / 3)
    # masked hashes: two hashes of three buckets each; the loss is the mean over the hashes
    targets = torch.tensor([[0, 0]] * FIRST_WORD_ID + [[2, 1], [0, 0]])
    config = Config(emb="mean", head="hash-mlm", hashes=2)
    objective = MaskedHashes(config, None, MASK, FIRST_WORD_ID, targets)
    logits = torch.tensor([[[0.0, 0, 0], [0, math.log(2), 0]]])
    loss = objective.loss(lambda inputs, masked_positions: logits, None, torch.tensor([[FIRST_WORD_ID]]))
    assert loss.item() == pytest.approx((math.log(3) + math.log(4) - math.log(2)) / 2)


def test_uniform_model_has_expected_loss():
    """A model that knows nothing has the uniform baseline: ln of the number of classes."""
    config = Config(emb="lookup", head="mlm", rows=45)
    objective = MaskedWords(config, None, MASK, FIRST_WORD_ID)
    loss = objective.loss(lambda *args, **kwargs: torch.zeros(3, 45), None, torch.tensor([[7, 8, 9]]))
    assert loss.item() / 3 == pytest.approx(math.log(objective.expected_loss(np.ones(40), None)[0]))


# == pretrain.py: a run


def pretrain_small(text_path, tmp_path, name, *flags):
    """Train a model of one layer for six steps; return its result and its checkpoint."""
    out = str(tmp_path / name)
    paths = ["--data", str(text_path), "--cache", str(tmp_path / "cache"), "--out", out]
    result = pretrain.main([*paths, *SMALL, *flags])
    return result, load_checkpoint(out)


def test_pretrain_starts_at_uniform_baseline_and_learns(text_path, tmp_path):
    flags = "--steps", "60", "--warmup", "5", "--lr", "3e-3", "--eval_every", "30"
    result, _ = pretrain_small(text_path, tmp_path, "run", *flags)
    rows = [json.loads(line) for line in open(tmp_path / "run" / "log.jsonl")]
    first = next(row["loss"] for row in rows if "loss" in row)
    assert result["eval_loss"] < first < 1.3  # ln 3 = 1.099 before training


def test_resume_is_exact(text_path, tmp_path, monkeypatch):
    """Stopped after step 3 and started again: the weights of the uninterrupted run, bit for bit."""
    def take_step_or_fail(run, *args, take_step=pretrain.take_step):
        if run.step == 3:
            raise KeyError("the machine is lost")
        return take_step(run, *args)

    _, whole = pretrain_small(text_path, tmp_path, "whole", "--dropout", "0.1")
    with monkeypatch.context() as patch:
        patch.setattr(pretrain, "take_step", take_step_or_fail)
        with pytest.raises(KeyError, match="lost"):
            pretrain_small(text_path, tmp_path, "parts", "--dropout", "0.1")
    _, parts = pretrain_small(text_path, tmp_path, "parts", "--dropout", "0.1")
    assert all(torch.equal(whole["model"][name], parts["model"][name]) for name in whole["model"])


# == finetune.py and infer.py: scores, and what hashing brings


def test_metrics_by_hand():
    """Truth 0 0 1 1 1 2, prediction 0 1 1 1 0 0: three correct; class 1: 2 of 3 predicted, 3 true."""
    prediction, truth = np.array([0, 1, 1, 1, 0, 0]), np.array([0, 0, 1, 1, 1, 2])
    assert METRICS["accuracy"](prediction, truth) == 0.5
    assert METRICS["f1"](prediction, truth) == pytest.approx(2 * 2 / (3 + 3))
    a, b = np.array([1.0, 2, 3, 4]), np.array([10.0, 30, 20, 99])  # ranks differ by 0 1 1 0: 1 - 6·2 / (4·15)
    assert METRICS["spearman"](a, b) == pytest.approx(0.8)


def test_exact_match_and_f1_by_hand():
    """"the Cat sat." against "A cat slept": cat of (cat sat) and (cat slept), F1 1/2. [SQ §6]"""
    assert normalize_answer("The U.S. Army!") == ["us", "army"]
    answers = [normalize_answer("A cat slept"), ["dog"]]
    assert exact_and_f1(normalize_answer("the Cat sat."), answers) == (0.0, 0.5)
    assert exact_and_f1(["dog"], [["cat"], ["dog"]]) == (1.0, 1.0)


@pytest.mark.parametrize("name, finds_it", [("lsh", True), ("md5", False)])
def test_misspelling_finds_its_word_under_lsh(tmp_path, name, finds_it):
    """True without training: Proj keeps the angles between bits, and LSH bits those between spellings."""
    words = ["receive", "the", "separate", "definitely", *make_words(300, 11, "abcdefghijklmnop")]
    config = Config(layers=0, width=512, heads=4, ffn=8, length=9)
    hash = hashing.HASHES[name].fit(dict.fromkeys(words, 1))
    state = HashTokenizer(config, hash_name=name, hash=hash).state()
    save_checkpoint(str(tmp_path / "ckpt.pt"), Model(config), state, words=words)
    predictor = infer.Predictor(str(tmp_path))
    for misspelled, word in (("recieve", "receive"), ("seperate", "separate"), ("definately", "definitely")):
        assert (predictor.neighbors(misspelled, 1)[0][0] == word) == finds_it
