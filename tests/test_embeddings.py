"""Tests of embeddings.py: what all methods share, and the laws of some.

test_all.py has each method by hand; here are those that a small example does not tell apart.
"""

import copy
import math

import numpy as np
import pytest
import torch

import embeddings
from attention import SelfAttention
from embeddings import EMBEDDINGS, MedianEmbedding
from model import Config

METHODS = pytest.mark.parametrize("emb", EMBEDDINGS)
SIZES = dict(rows=901, bits=127, chunk=10, buckets=701, weights=797, width=192)
TRUNCATED = 0.8796  # std of a normal(0, 1) that is cut at ±2


def make_module(emb):
    c = Config(emb=emb, **SIZES)
    return EMBEDDINGS[emb].from_config(c)


def random_codes(module, *shape):
    """Return random codes (*shape, C) within the limits that the module states."""
    columns = [torch.randint(limit, shape) for limit in module.code_limits]
    return torch.stack(columns, -1)


# Chunks and bits


def test_pool_before_training_depends_on_the_order_of_chunks():
    """Why W starts random: with equal weights the chunks "1 2" and "2 1" have one vector."""
    module = embeddings.PoolEmbedding(8, 4, 5)
    vectors = module(torch.tensor([[1, 2], [2, 1]]))
    assert not torch.allclose(vectors[0], vectors[1], atol=1e-6)


def test_proj_of_equal_bits_is_zero_with_finite_gradients():
    """Bits that are all 0, or all 1, have no correlation: 0, and not 0 / 0."""
    module = embeddings.ProjEmbedding(128, 5)
    module.weight.data[4] = 1  # nor has a vector of equal numbers
    codes = torch.tensor([[0], [1]]).expand(2, 128)
    vectors = module(codes)
    vectors.sum().backward()
    assert not vectors.any()
    assert module.weight.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1, 1e-3])  # of w: its squares are 0 in float16
def test_proj_of_low_precision_is_zero_for_equal_bits(dtype, scale):
    """Padding is 0, and every position of an attention layer above it is finite."""
    exact = embeddings.ProjEmbedding(128, 16)
    exact.weight.data *= scale
    codes = torch.randint(2, (2, 5, 128))
    codes[:, 3:] = 0
    low = copy.deepcopy(exact).to(dtype)
    vectors = low(codes)
    assert not vectors[:, 3:].any()
    assert (vectors - exact(codes)).abs().max() < 0.01  # 8 bits of numbers below 0.5

    layer = SelfAttention(16, 2).to(dtype)
    layer(vectors).sum().backward()
    assert layer(vectors).isfinite().all()
    assert low.weight.grad.isfinite().all()


# Several hash functions


@pytest.mark.parametrize("cls", [
    embedding for embedding in EMBEDDINGS.values() if embedding.code_format == "sketch"])
def test_sketch_of_repeated_words_is_that_of_each_by_itself(cls):
    """Each distinct word is computed once; its gradient is the sum over its places."""
    module = cls(5, 17, 8)
    codes = random_codes(module, 6)[torch.randint(6, (4, 9))]  # (4, 9, 5), 36 words, six distinct
    out = module(codes)
    expected = module.aggregate_rows(codes)
    assert torch.equal(out, expected)
    weights = torch.randn(out.shape)
    gradient = torch.autograd.grad(out, module.weight, weights)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, module.weight, weights))


# Sizes


@pytest.mark.parametrize("cls, arguments, message", [
    (embeddings.PoolEmbedding, (128, 0, 3), "chunk: expected 1 to 15 bits, got 0"),
    (embeddings.PoolEmbedding, (128, 16, 3), "chunk: expected 1 to 15 bits, got 16"),
    (MedianEmbedding, (4, 5, 3), "hashes: expected an odd number"),
    (embeddings.NgramEmbedding, (1, 5, 3), "rows: expected at least 2"),
])
def test_constructor_refuses_impossible_arguments(cls, arguments, message):
    with pytest.raises(ValueError, match=message):
        cls(*arguments)


# Codes


@METHODS
def test_vectors_have_the_shape_of_the_batch(emb):
    module = make_module(emb)
    sizes = (2, 192) if module.is_stacked else (192,)  # (m, d) or (d,)
    for shape in [(), (4, 0)]:  # one word, a batch of no words
        vectors = module(random_codes(module, *shape))
        assert vectors.shape == shape + sizes


@METHODS
def test_forward_takes_an_array_of_short_integers(emb):
    """As hashing.py returns them; F.embedding takes int32 and int64 alone."""
    module = make_module(emb)
    codes = random_codes(module, 4, 3)
    array = codes.numpy().astype(np.int16)
    assert torch.equal(module(array), module(codes))


@pytest.mark.parametrize("codes", [
    torch.zeros(4, 1, dtype=torch.int64),  # would be broadcast to all chunks
    torch.zeros(4, 13),  # floats
])
def test_forward_refuses_codes_of_another_size_or_type(codes):
    with pytest.raises(ValueError, match=r"codes: expected integers \(\.\.\., 13\), got torch"):
        make_module("pool")(codes)


@pytest.mark.parametrize("emb", ["lookup", "emb", "pool", "bloom", "median", "weighted", "ngram"])
def test_forward_of_code_without_row_raises(emb):
    """A code beyond its block never reads the block before or after."""
    module = make_module(emb)
    for number in (0, -1):  # the first and the last of a word's codes
        for bad in (max(module.code_limits), -1):
            codes = random_codes(module, 1)
            codes[0, number] = bad
            with pytest.raises((IndexError, RuntimeError)):
                module(codes)


@METHODS
def test_check_accepts_the_codes_that_have_vectors(emb):
    module = make_module(emb)
    codes = torch.tensor([module.code_limits]) - 1  # (1, C), the largest
    module.check_range(codes)
    module.check_range(torch.zeros_like(codes))
    assert module(codes).isfinite().all()


WEIGHTED = embeddings.WeightedEmbedding(2, 17, 7, 3)
POOL = embeddings.PoolEmbedding(128, 10, 3)


@pytest.mark.parametrize("module, codes", [
    (WEIGHTED, [16, 16, 7]),  # the last number has a limit of its own
    (WEIGHTED, [17, 0, 0]),
    (WEIGHTED, [0, -1, 0]),
    (WEIGHTED, [0, 0]),  # a number is missing
    (POOL, [0] * 12 + [256]),  # 128 bits are 12 chunks of 10 bits, and one of 8
])
def test_check_refuses_codes_beyond_limits(module, codes):
    with pytest.raises(ValueError, match="codes: expected"):
        module.check_range(torch.tensor([codes]))


def test_check_compares_wide_integers():
    """A limit of 256 as uint8 is 0, and every code would be beyond it."""
    module = embeddings.HashEmbedding(256, 3)
    module.check_range(torch.tensor([[255]], dtype=torch.uint8))


# Gradients, compilation and precision


@METHODS
def test_every_parameter_has_a_gradient(emb):
    module = make_module(emb)
    vectors = module(random_codes(module, 9))
    vectors.square().sum().backward()
    assert all(parameter.grad.any() for parameter in module.parameters())


@METHODS
@pytest.mark.parametrize("transform, tolerance", [
    (lambda module: torch.compile(module, fullgraph=True, backend="aot_eager"), 1e-6),
    (lambda module: module.half(), 0.005),  # 11 bits of mantissa
    (lambda module: torch.autocast("cpu", torch.bfloat16)(module.forward), 0.02),  # 8 bits
], ids=["compile", "half", "autocast"])
def test_transformed_module_gives_the_same_vectors(emb, transform, tolerance):
    """Up to the rounding of the type, relative to the largest number."""
    torch._dynamo.reset()
    module = make_module(emb)
    codes = random_codes(module, 4, 3)
    expected = module(codes)
    vectors = transform(module)(codes)
    assert vectors.shape == expected.shape
    assert (vectors - expected).abs().max() <= tolerance * expected.abs().max()


# Initial values


STD_RATIOS = {
    "proj": 1,  # exact
    "median": 1,  # measured
    "mean": 1,
    "weighted": 1,
    "ngram": TRUNCATED * math.sqrt(64 / 22),  # 64 n-grams here, 22 in a usual word
    "linear": TRUNCATED * math.sqrt(2),  # the words share a mean, as large as the spread
}


@METHODS
def test_initial_std_agrees_with_measured_std(emb):
    """Up to 10 %, so that truncation, 12 %, shows."""
    module = make_module(emb)
    measured = module(random_codes(module, 400)).std()
    ratio = measured / module.initial_std()
    assert ratio.item() == pytest.approx(STD_RATIOS.get(emb, TRUNCATED), rel=0.1)


# Bits


def test_unpack_bits_inverts_packbits():
    """13 bits are a whole byte and a part of one."""
    bits = torch.randint(2, (3, 2, 13))
    packed = np.packbits(bits.numpy(), axis=-1)  # (3, 2, 2)
    unpacked = embeddings.unpack_bits(torch.from_numpy(packed), 13)
    assert torch.equal(unpacked, bits.byte())
