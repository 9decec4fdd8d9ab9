"""embeddings.py: every method against its literal formula, and the facts that each class states."""

import math

import numpy as np
import pytest
import torch

import embeddings
from embeddings import EMBEDDINGS, SketchEmbedding, WeightedEmbedding
from model import Config

SIZES = dict(rows=61, bits=21, chunk=5, buckets=17, weights=13, width=6, heads=3, layers=0)


def assert_matches(module, codes, literal):
    """Assert that values and gradients equal those of the literal form."""
    fast, cotangent = module(codes), torch.randn_like(literal)
    assert fast.shape == literal.shape
    torch.testing.assert_close(fast, literal, rtol=1e-5, atol=1e-6)
    parameters = list(module.parameters())
    ours, expected = (torch.autograd.grad((y * cotangent).sum(), parameters) for y in (fast, literal))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


def random_codes(cls, c, *shape):
    """Return random codes (..., C) within the limits that the class states, as forward expects them."""
    parts = [torch.randint(0, end, (*shape, count)) for count, end in cls.code_limits(c)]
    codes = torch.cat(parts, -1)
    return embeddings.unpack_bits(codes.byte(), c.bits) if c.code_format == "bits" else codes


def test_pool_matches_weighted_sum():
    module, codes = embeddings.PoolEmbedding(21, 4, 7), torch.randint(0, 2, (5, 3, 6))  # J 6, last of 1 bit
    codes[..., :5] = torch.randint(0, 16, (5, 3, 5))
    weight = module.weight.softmax(0)  # (J, d)
    assert_matches(module, codes, sum(weight[j] * module.codebook[codes[..., j]] for j in range(6)))


def test_pool_with_equal_weights_ignores_order():
    """Why W starts random: with equal weights "1 2" and "2 1" are one word."""
    module, codes = embeddings.PoolEmbedding(8, 4, 5), torch.tensor([[1, 2], [2, 1]])
    assert not torch.allclose(*module(codes), atol=1e-7)
    torch.nn.init.zeros_(module.weight)
    assert torch.allclose(*module(codes), atol=1e-7)


@pytest.mark.parametrize("chunk", [0, 16])
def test_pool_refuses_chunk_sizes(chunk):
    with pytest.raises(ValueError, match="chunk: expected 1 to 15 bits"):
        embeddings.PoolEmbedding(128, chunk, 3)


def test_add_matches_sum_of_chosen_rows():
    module, codes = embeddings.AddEmbedding(24, 7), torch.randint(0, 2, (5, 3, 24), dtype=torch.uint8)
    literal = sum(module.codebooks[j, codes[..., j].long()] for j in range(24)) / math.sqrt(24)
    assert_matches(module, codes, literal)


def test_linear_matches_sum_of_rows():
    module, codes = embeddings.LinearEmbedding(21, 7), torch.randint(0, 2, (5, 3, 21), dtype=torch.uint8)
    assert_matches(module, codes, sum(module.weight[j] * codes[..., j, None] for j in range(21)))


def test_proj_matches_correlation():
    module = embeddings.ProjEmbedding(24, 7).double()
    codes = torch.randint(0, 2, (5, 3, 24), dtype=torch.uint8)
    rows = []
    for tau in codes.flatten(0, 1).double():
        a = tau - tau.mean()
        for w in module.weight:
            b = w - w.mean()
            rows.append((a @ b) / (a.norm() * b.norm()))
    assert_matches(module, codes, torch.stack(rows).view(5, 3, 7))
    by_numpy = np.corrcoef(codes[2, 1].numpy(), module.weight[4].detach().numpy())[0, 1]
    assert math.isclose(module(codes)[2, 1, 4].item(), by_numpy, rel_tol=1e-5)


def test_proj_of_constant_bits_is_zero_with_finite_gradient():
    module = embeddings.ProjEmbedding(128, 5)
    out = module(torch.stack([torch.zeros(128), torch.ones(128)]))
    out.sum().backward()
    assert not out.any() and module.weight.grad.isfinite().all()


@pytest.mark.parametrize("cls", [embeddings.LookupEmbedding, embeddings.HashEmbedding])
def test_lookup_and_hash_return_rows(cls):
    module, codes = cls(11, 3), torch.tensor([[[4], [0]], [[10], [4]]], dtype=torch.int32)
    assert (module(codes) == module.weight[codes.squeeze(-1).long()]).all()


def test_bloom_keeps_rows_of_item_apart():
    module, codes = embeddings.BloomEmbedding(11, 3), torch.tensor([[[4, 9], [0, 10]]], dtype=torch.int32)
    assert (module(codes) == module.weight[[4, 9, 0, 10]]).all() and module(codes).shape == (1, 4, 3)


@pytest.mark.parametrize("T", [128, 420, 13, 1])
def test_unpack_bits_inverts_packbits(T):
    bits = np.random.default_rng(T).integers(0, 2, (13, 2, T), dtype=np.uint8)
    packed = torch.from_numpy(np.packbits(bits, axis=-1))
    assert packed.shape[-1] == -(-T // 8) and (embeddings.unpack_bits(packed, T).numpy() == bits).all()


def test_init_normal_is_truncated_at_two_sigma():
    """A normal cut at two standard deviations has 0.8796 of its std."""
    weight = embeddings.init_normal(torch.empty(49_152))
    assert weight.abs().max() <= 0.04
    assert abs(weight.std().item() - 0.02 * 0.8796) < 6 * 0.02 / math.sqrt(2 * len(weight))


def test_proj_and_add_initial_spread():
    """Proj: a correlation of T random numbers has std 1/√(T−1) = 0.0887. Add: one row's, of T rows / √T."""
    bits = torch.randint(0, 2, (64, 128))
    proj, add = (EMBEDDINGS[emb](128, 768)(bits).std().item() for emb in ("proj", "add"))
    assert abs(proj - 1 / math.sqrt(127)) < 6 * proj / math.sqrt(2 * 768)  # 768 independent columns at least
    assert abs(add - 0.02 * 0.8796) < 6 * add / math.sqrt(2 * 768)


@pytest.mark.parametrize("aggregate,expected", [("median", [2.0, 7.0]), ("mean", [301.0, 2.0])])
def test_sketch_worked_example(aggregate, expected):
    """The example of SketchEmbedding's docstring. [CM]"""
    sketch = SketchEmbedding(3, 2, 2, aggregate)
    sketch.weight.data[:] = torch.tensor([[0, 0], [1, 7], [2, -9], [0, 0], [0, 0], [900, 8]])
    assert sketch(torch.tensor([[1, 0, 1]])).tolist() == [expected]
    assert sketch(torch.zeros(1, 0, 3)).shape == (1, 0, 2)


def test_median_moves_at_most_to_its_neighbor():
    """One row of five off by 1,000 moves the mean by 200, the median to the next number at most. [CM]"""
    rows = torch.randn(5, 7)
    before = rows.sort(0).values
    for j in range(5):
        moved = rows.clone()
        moved[j] += 1000
        after = embeddings.median(list(moved))
        assert ((after == before[2]) | (after == before[3])).all()
        torch.testing.assert_close(moved.mean(0) - rows.mean(0), torch.full((7,), 200.0), rtol=1e-4, atol=0)


@pytest.mark.parametrize("k", [1, 3, 5, 7, 9, 11])
@pytest.mark.parametrize("part", [24, 2**16])
def test_median_matches_sort_with_its_gradient(k, part, monkeypatch):
    """Also of ties, of three words at a time, and of the same row many times."""
    x = list(torch.randint(0, 6, (k, 500)).float())
    assert (embeddings.median(x) == embeddings.median_reference(x)).all()
    assert (embeddings.median_reference(x) == torch.stack(x).median(0).values).all()
    calls, fast = [], embeddings.median
    monkeypatch.setattr(embeddings.RowMedian, "PART", part)  # 24 numbers are three words of width 8
    monkeypatch.setattr(embeddings, "median", lambda rows: calls.append(len(rows)) or fast(rows))
    sketch, codes = SketchEmbedding(k, 6, 8).double(), torch.randint(0, 6, (4, 5, k))
    out = sketch(codes.short())
    assert calls == [k] * (7 if part == 24 else 1)
    rows = sketch.weight[codes + 6 * torch.arange(k)]  # (4, 5, k, 8)
    expected, cotangent = rows.median(2).values, torch.randn_like(out)
    assert (out == expected).all()
    [ours], [exact] = (torch.autograd.grad(y, sketch.weight, cotangent) for y in (out, expected))
    torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)
    # one row per coordinate: what arrives in all rows is what was sent
    torch.testing.assert_close(ours.sum(0), cotangent.flatten(0, 1).sum(0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("k", [1, 3, 5, 255])
def test_median_gradient_of_equal_rows_goes_to_first(k):
    equal = torch.ones(k, 3, requires_grad=True)
    embeddings.RowMedian.apply(equal, torch.arange(k)[None]).sum().backward()
    assert equal.grad[0].eq(1).all() and not equal.grad[1:].any()


def test_median_and_mean_spread_of_five_normals():
    """0.536 σ and 0.447 σ. The lower middle of four is biased, the median of five is not. [CM]"""
    x = torch.randn(5, 200_000)
    median = embeddings.median(list(x))
    assert abs(median.std() - 0.5356) < 0.005 and abs(x.mean(0).std() - 0.4472) < 0.005
    assert abs(median.mean()) < 0.01 and abs(x[:4].median(0).values.mean() + 0.297) < 0.01


@pytest.mark.parametrize("k", [2, 4, 257])
def test_sketch_refuses_even_or_too_many_hashes_and_unknown_aggregate(k):
    with pytest.raises(ValueError, match="hashes: expected an odd number"):
        SketchEmbedding(k, 5, 3)
    with pytest.raises(ValueError, match="hashes: expected an odd number"):
        SketchEmbedding.from_config(Config(emb="mean", hashes=k))
    with pytest.raises(ValueError, match="aggregate: expected median or mean"):
        SketchEmbedding(3, 5, 3, "max")


def test_weighted_worked_example():
    module = WeightedEmbedding(2, 4, 3, 2)
    module.weight.data[:] = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]])
    module.importance.data[:] = torch.tensor([[0, 0], [2, -1], [0, 0]])
    assert module(torch.tensor([[[3, 0, 1]]])).tolist() == [[[13.0, 14.0]]]  # 2·(7, 8) - (1, 2): a sum
    module = WeightedEmbedding(2, 4, 3, 5, append=True)
    out = module(torch.tensor([3, 0, 1]))
    assert out.shape == (5,) and (out[3:] == module.importance[1]).all()
    assert sum(p.numel() for p in module.parameters()) == 4 * 3 + 3 * 2
    with pytest.raises(ValueError, match="width: expected more than the 2"):
        WeightedEmbedding(2, 4, 3, 2, append=True)


@pytest.mark.parametrize("emb", EMBEDDINGS)
def test_facts_agree_with_forward(emb):
    """The largest codes within code_limits work, the next do not; a word is one vector, or m."""
    c, cls = Config(emb=emb, **SIZES), EMBEDDINGS[emb]
    module = cls.from_config(c)
    vectors = module(random_codes(cls, c, 4, 3))
    assert vectors.shape == (4, 3 * c.hashes if cls.is_stacked else 3, c.width)
    assert cls.code_format == c.code_format and (cls.can_tie or not cls.is_tied)
    if cls.can_tie:  # one row per class of an output layer
        rows = c.hashes * c.buckets if cls.code_format == "sketch" else c.rows
        assert module.weight.shape == (rows, c.width)
    if cls.code_format == "bits":
        assert sum(count for count, _ in cls.code_limits(c)) * 8 >= c.bits > 8
        return
    counts, ends = torch.tensor(cls.code_limits(c)).T
    codes = (ends - 1).repeat_interleave(counts)[None, None]  # (1, 1, C), the largest ones
    assert module(codes).isfinite().all()
    codes[..., -1] += 1
    with pytest.raises((IndexError, RuntimeError)):
        module(codes)


@pytest.mark.parametrize("emb", EMBEDDINGS)
def test_initial_std_agrees_with_measured_std(emb):
    """Exact for Proj and where it is measured. Truncation takes 12 % of a table's; Linear's share a mean."""
    ratio = dict(proj=1, median=1, mean=1, weighted=1, linear=0.8796 * math.sqrt(2)).get(emb, 0.8796)
    large = dict(rows=900, bits=128, chunk=10, buckets=700, weights=800, width=96)
    c, cls = Config(emb=emb, **SIZES | large), EMBEDDINGS[emb]
    module = cls.from_config(c).requires_grad_(False)
    measured = module(random_codes(cls, c, 1, 400)).std().item()
    assert abs(measured / float(module.initial_std(c)) / ratio - 1) < 0.06
