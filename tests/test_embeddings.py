"""embeddings.py: every method against its literal formula, and the facts that each class states."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

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


def random_codes(module, *shape):
    """Return random codes (..., C) within the limits that the module states."""
    return torch.cat([torch.randint(0, end, (*shape, count)) for count, end in module.code_limits], -1)


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


def test_add_and_linear_match_sums_of_rows():
    codes = torch.randint(0, 2, (5, 3, 23), dtype=torch.uint8)
    add, linear = embeddings.AddEmbedding(23, 7), embeddings.LinearEmbedding(23, 7)
    literal = sum(add.codebooks[j, codes[..., j].long()] for j in range(23)) / math.sqrt(23)
    assert_matches(add, codes, literal)
    assert_matches(linear, codes, sum(linear.weight[j] * codes[..., j, None] for j in range(23)))


def test_proj_matches_correlation():
    module, codes = embeddings.ProjEmbedding(24, 7).double(), torch.randint(0, 2, (5, 3, 24), dtype=torch.uint8)
    a, b = (x - x.mean(-1, keepdim=True) for x in (codes.double(), module.weight))
    assert_matches(module, codes, a @ b.T / (a.norm(dim=-1, keepdim=True) * b.norm(dim=-1)))
    by_numpy = np.corrcoef(codes[2, 1].numpy(), module.weight[4].detach().numpy())[0, 1]
    assert math.isclose(module(codes)[2, 1, 4].item(), by_numpy, rel_tol=1e-5)


def test_proj_of_constant_bits_is_zero_with_finite_gradient():
    module = embeddings.ProjEmbedding(128, 5)
    out = module(torch.tensor([[0], [1]]).expand(2, 128))
    out.sum().backward()
    assert not out.any() and module.weight.grad.isfinite().all()


def test_lookup_hash_and_bloom_return_rows():
    """A BloomMap's digest counts from 0 in each map, and the table has a block of rows for each."""
    codes = torch.tensor([[[4, 9], [0, 10]], [[10, 0], [4, 4]]], dtype=torch.int32)
    for module in (embeddings.LookupEmbedding(11, 3), embeddings.HashEmbedding(11, 3)):
        assert (module(codes[..., :1]) == module.weight[codes[..., 0].long()]).all()
    module = embeddings.BloomEmbedding(2, 11, 3)
    assert (module(codes) == module.weight[codes.long() + torch.tensor([0, 11])]).all()


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


@pytest.mark.parametrize("aggregate,expected", [("median", [2.0, 7.0]), ("mean", [301.0, 2.0])])
def test_sketch_worked_example(aggregate, expected):
    """The example of SketchEmbedding's docstring. [CM]"""
    sketch = SketchEmbedding(3, 2, 2, aggregate)
    sketch.weight.data[:] = torch.tensor([[0, 0], [1, 7], [2, -9], [0, 0], [0, 0], [900, 8]])
    assert sketch(torch.tensor([[1, 0, 1]])).tolist() == [expected]
    assert sketch(torch.zeros(1, 0, 3, dtype=torch.int32)).shape == (1, 0, 2)


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


@pytest.mark.parametrize("build, arguments, message", [
    *((embeddings.PoolEmbedding, (128, chunk, 3), "chunk: expected 1 to 15 bits") for chunk in (0, 16)),
    *((SketchEmbedding, (k, 5, 3), "hashes: expected an odd number") for k in (2, 4, 257)),
    *((SketchEmbedding.from_config, [Config(emb="mean", hashes=k)], "hashes: exp") for k in (2, 4, 257)),
    (SketchEmbedding, (3, 5, 3, "max"), "aggregate: expected median or mean")])
def test_impossible_sizes_raise(build, arguments, message):
    with pytest.raises(ValueError, match=message):
        build(*arguments)


def test_weighted_worked_example():
    module = WeightedEmbedding(2, 4, 3, 2)
    module.weight.data[:] = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]])
    module.importance.data[:] = torch.tensor([[0, 0], [2, -1], [0, 0]])
    assert module(torch.tensor([[[3, 0, 1]]])).tolist() == [[[13.0, 14.0]]]  # 2·(7, 8) - (1, 2): a sum


@pytest.mark.parametrize("emb", EMBEDDINGS)
def test_facts_agree_with_forward(emb):
    """The largest codes within code_limits work, others are refused; a word is one vector, or m."""
    c, cls = Config(emb=emb, **SIZES), EMBEDDINGS[emb]
    module = cls.from_config(c)
    vectors = module(random_codes(module, 4, 3))
    assert vectors.shape == ((4, 3, c.hashes, c.width) if cls.is_stacked else (4, 3, c.width))
    assert cls.code_format == c.code_format and (cls.can_tie or not cls.is_tied)
    if cls.can_tie:  # one row per class of an output layer
        assert module.weight.shape == (c.rows if emb == "lookup" else c.hashes * c.buckets, c.width)
    counts, ends = torch.tensor(module.code_limits).T
    codes = (ends - 1).repeat_interleave(counts)[None, None]  # (1, 1, C), the largest ones
    assert module(codes).isfinite().all()
    first = F.one_hot(torch.tensor(0), codes.shape[-1])
    for bad in (codes + first, codes - first * ends[0], codes.float(), codes[..., 1:], F.pad(codes, (0, 1))):
        with pytest.raises(ValueError, match=f"codes: expected .*{counts[0]} below {ends[0]}.* got"):
            module(bad)


@pytest.mark.parametrize("emb", EMBEDDINGS)
def test_initial_std_agrees_with_measured_std(emb):
    """Exact for Proj and where it is measured. Truncation takes 12 % of a table's; Linear's share a mean."""
    ratio = dict(proj=1, median=1, mean=1, weighted=1, linear=0.8796 * math.sqrt(2)).get(emb, 0.8796)
    large = dict(rows=900, bits=128, chunk=10, buckets=700, weights=800, width=96)
    c, cls = Config(emb=emb, **SIZES | large), EMBEDDINGS[emb]
    module = cls.from_config(c).requires_grad_(False)
    measured = module(random_codes(module, 1, 400)).std().item()
    assert abs(measured / float(module.initial_std(c)) / ratio - 1) < 0.06
