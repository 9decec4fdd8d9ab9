"""Tests of attention.py: dense attention, simhash, LSH attention against its literal formula."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F

import attention
from attention import SelfAttention, full_attention, full_attention_reference, lsh_attention
from attention import lsh_attention_reference, simhash


def random_vectors(B=2, H=3, L=37, e=5, scale=1.0, dtype=torch.float32):
    """Return q, k, v (B, H, L, e) with gradients; q and k are scaled."""
    generator = torch.Generator().manual_seed(0)
    q = scale * torch.randn(B, H, L, e, generator=generator, dtype=dtype)
    k = scale * torch.randn(B, H, L, e, generator=generator, dtype=dtype)
    v = torch.randn(B, H, L, e, generator=generator, dtype=dtype)
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_()]


def random_buckets(B=2, H=3, L=37, n=1, num_buckets=7):
    """Return hq, hk (B, H, n, L): few buckets, so that some hold many rows and some hold none."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(num_buckets, (2, B, H, n, L), generator=generator).unbind()


def first_keys(*counts, L=37):
    """Return key_mask bool (B, L): each sequence attends to its first keys."""
    return torch.arange(L) < torch.tensor(counts).unsqueeze(1)


def with_gradients(function, vectors, *args, **options):
    """Return the output and the gradients of a weighted sum of it, all in one list."""
    out = function(*vectors, *args, **options)
    weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
    return [out, *torch.autograd.grad(out, vectors, weights)]


def assert_blocks_match_reference(vectors, buckets, tolerance=1e-5, **options):
    """Outputs and gradients of both forms are equal, relative to the largest number."""
    actual = with_gradients(lsh_attention, vectors, *buckets, impl="blocks", **options)
    expected = with_gradients(lsh_attention_reference, vectors, *buckets, **options)
    for a, b in zip(actual, expected):
        assert a.shape == b.shape
        assert (a - b).abs().max() <= tolerance * max(1, b.abs().max().item())


FILL = pytest.mark.parametrize("fill", ["zero", "mask"])


# Dense attention


@pytest.mark.parametrize("L", [1, 7, 1100])  # above 1,024 bfloat16 takes PyTorch's kernel too
@pytest.mark.parametrize("dtype, tolerance", [
    (torch.float32, 1e-5),
    (torch.bfloat16, 0.02),  # 8 bits of mantissa, weights up to 1
])
def test_full_attention_matches_reference(L, dtype, tolerance):
    vectors = random_vectors(B=1, L=L)
    expected = full_attention_reference(*vectors)
    q, k, v = [x.detach().to(dtype) for x in vectors]
    out = full_attention(q, k, v)
    assert out.dtype == dtype
    assert (out.float() - expected).abs().max() < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_attention_without_keys_is_zero_with_finite_gradients(dtype):
    vectors = [x.detach().to(dtype).requires_grad_() for x in random_vectors()]
    key_mask = first_keys(20, 0)
    results = with_gradients(full_attention, vectors, key_mask=key_mask)
    expected = with_gradients(full_attention_reference, vectors, key_mask=key_mask)
    assert not results[0][1].any()
    for a, b in zip(results, expected):
        assert a.isfinite().all()
        assert (a - b).abs().max() < (1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("attend", [
    full_attention,
    full_attention_reference,
    lambda q, k, v, dropout: lsh_attention(q, k, v, *random_buckets(1, 1, 500, num_buckets=1),
                                           dropout=dropout, impl="dense"),
    lambda q, k, v, dropout: lsh_attention(q, k, v, *random_buckets(1, 1, 500, num_buckets=1),
                                           dropout=dropout, impl="blocks"),
], ids=["full", "reference", "lsh dense", "lsh blocks"])
def test_dropout_keeps_mean_and_spread(attend):
    """A row is the sum of 500 weights of 1/500, each 0 or 4/3 times as large."""
    zeros = torch.zeros(1, 1, 500, 8)
    torch.manual_seed(0)
    out = attend(zeros, zeros, torch.ones(1, 1, 500, 8), dropout=0.25)[0, 0, :, 0]
    sigma = math.sqrt(0.25 / 0.75 / 500)
    assert 0.85 * sigma < out.std() < 1.15 * sigma
    assert abs(out.mean() - 1) < 6 * sigma / math.sqrt(500)


def test_dropout_in_blocks_drops_keys_outside_the_bucket_together():
    """No pair collides, so the extra key has all the weight: kept, it counts 1 / (1 - p)."""
    hq = torch.zeros(1, 1, 1, 400, dtype=torch.int64)
    values = torch.ones(1, 1, 400, 2)
    torch.manual_seed(0)
    out = lsh_attention(values, values, values, hq, hq + 1, dropout=0.5, impl="blocks")
    assert set(out.flatten().tolist()) == {0.0, 2.0}
    assert abs((out == 0).float().mean() - 0.5) < 6 * math.sqrt(0.25 / 400)


# Buckets


def test_simhash_matches_definition_for_each_head_and_function():
    """[BL §2.1] h(x) = sum, mod m, of coef over the hyperplanes that x lies above."""
    generator = torch.Generator().manual_seed(0)
    planes, coef = attention.draw_hyperplanes(3, 4, 6, 5, 97, generator)
    x = torch.randn(2, 3, 11, 5, generator=generator, requires_grad=True)
    h = simhash(x, planes, coef, 97)
    assert h.shape == (2, 3, 4, 11)
    assert h.dtype == torch.int64
    assert not h.requires_grad
    for b, head, function, i in [(0, 0, 0, 0), (1, 2, 3, 10), (0, 1, 2, 7)]:
        total = 0
        for plane, c in zip(planes[head, function], coef[head, function]):
            if torch.dot(x[b, head, i], plane) > 0:
                total += c.item()
        assert h[b, head, function, i] == total % 97


def test_simhash_under_autocast_stays_float32():
    generator = torch.Generator().manual_seed(0)
    planes, coef = attention.draw_hyperplanes(2, 1, 8, 5, 97, generator)
    x = torch.randn(1, 2, 2000, 5, generator=generator)
    expected = simhash(x, planes, coef, 97)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(simhash(x, planes, coef, 97), expected)


@pytest.mark.parametrize("heads, functions, head_size", [(1, 2, 5), (3, 1, 5), (3, 2, 1)])
def test_simhash_refuses_hyperplanes_of_another_layer(heads, functions, head_size):
    """Sizes of 1 would be broadcast: all heads with the same buckets, without a word."""
    planes, _ = attention.draw_hyperplanes(heads, functions, 4, head_size, 8)
    _, coef = attention.draw_hyperplanes(3, 2, 4, 5, 8)
    with pytest.raises(ValueError, match="^planes, coef: expected"):
        simhash(torch.ones(2, 3, 7, 5), planes, coef, 8)


@pytest.mark.parametrize("bands, buckets, functions", [
    (1, 2, 1),
    (2, 64, 1),  # the paper's efficiency table
    (8, 64, 3),  # several functions: one that agrees is enough
])
@pytest.mark.parametrize("angle", [0.0, 0.3, math.pi / 2, 3.0])
def test_collision_probability_matches_simhash(bands, buckets, functions, angle):
    """[BL §2.1] 1 - (1 - P)^n, P = p + (1 - p)/m, within four standard deviations."""
    draws = 40_000
    generator = torch.Generator().manual_seed(0)
    planes, coef = attention.draw_hyperplanes(draws, functions, bands, 2, buckets, generator)
    pair = torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)]])
    h = simhash(pair.expand(1, draws, 2, 2), planes, coef, buckets)  # (1, draws, n, 2)
    share = (h[..., 0] == h[..., 1]).any(2).float().mean().item()
    law = attention.collision_probability(angle, bands, buckets, functions)
    assert abs(share - law) <= 4 * math.sqrt(law * (1 - law) / draws) + 1e-6


def test_printed_collision_law_exceeds_one():
    """Erratum [BL §2.1]: for equal vectors (1 - θ/π)^r + 1/m is above 1, the law is 1."""
    assert (1 - 0 / math.pi) ** 2 + 1 / 64 > 1
    assert attention.collision_probability(0.0, num_hyperplanes=2, num_buckets=64) == 1


def test_one_common_bucket_is_a_collision():
    """Erratum [BL §1] "across all hash functions": the matrix M and Algorithm 1 need one."""
    hq = torch.tensor([0, 1]).view(1, 1, 2, 1)
    hk = torch.tensor([0, 2]).view(1, 1, 2, 1)
    assert attention.collisions(hq, hk).item() is True
    assert attention.collision_share(hq, hk) == 1


def test_collision_share_counts_the_first_sequence():
    hq, hk = random_buckets(n=2, num_buckets=4, L=400)
    expected = attention.collisions(hq, hk)[0].float().mean().item()
    assert attention.collision_share(hq, hk) == pytest.approx(expected)
    assert abs(expected - (1 - 0.75 ** 2)) < 6 * math.sqrt(0.25 / 400)


# LSH attention


def waves(*shape, phase):
    """Return numbers that look random, by a formula."""
    n = torch.arange(math.prod(shape), dtype=torch.float64)
    return torch.sin(phase + 1.3 * n ** 1.1).float().view(shape)


@pytest.mark.parametrize("n, padded, head_1, head_2", [
    (1, False, [-1.35015, 2.92699, -1.53062, -0.00062, -1.88158, 2.89894],
     [-0.40080, 0.95061, -1.81981, 1.97650, -1.89056, 1.68125]),
    (1, True, [-1.60368, 1.77423, -1.53778, -0.19158, -1.71422, 0.14830],
     [-0.48831, 1.03639, -0.94921, -0.12690, -1.38202, 1.10867]),
    (2, False, [-1.35015, 2.92699, -2.14607, -0.00062, -1.88158, 2.60106],
     [-0.29200, 1.79009, -1.93745, 0.57995, -1.71932, 1.72878]),
    (2, True, [-1.60368, 1.77423, -1.53778, -0.19158, -1.71422, 1.94859],
     [-0.48831, 1.03639, -1.02968, 0.17875, -1.05750, 1.19025]),
])
def test_self_attention_matches_recorded_outputs_of_the_authors_code(n, padded, head_1, head_2):
    """[BL Alg. 1] as released: d 8, two heads, six positions, r 2, m 4, the last two padded.

    Recorded: coordinates 0 and 5 of the output, which are of the first and of the second head.
    """
    layer = SelfAttention(8, 2, attn="lsh", num_functions=n, num_hyperplanes=2, num_buckets=4,
                          pairs="upper")
    layer.qkv.weight.data = waves(24, 8, phase=2.0)
    layer.qkv.bias.data.zero_()
    layer.out.weight.data = torch.eye(8)
    layer.out.bias.data.zero_()
    layer.planes = waves(2, n, 2, 4, phase=1.0)
    layer.coef = (torch.arange(4 * n) * 3 % 4).view(2, n, 2)
    key_mask = first_keys(4, L=6) if padded else None
    out = layer(waves(1, 6, 8, phase=0.5), key_mask)[0]
    assert out[:, 0].tolist() == pytest.approx(head_1, abs=1e-4)
    assert out[:, 5].tolist() == pytest.approx(head_2, abs=1e-4)


@pytest.mark.parametrize("impl", ["dense", "blocks"])
def test_lsh_attention_matches_example_in_three_numbers(impl):
    """The header of attention.py: score ln 3 with the first of three keys, values 1, 2, 3."""
    q = torch.tensor([3.0, 1, 1]).log().view(1, 1, 3, 1)
    v = torch.tensor([1.0, 2, 3]).view(1, 1, 3, 1)
    hq = torch.tensor([0, 5, 5]).view(1, 1, 1, 3)
    hk = torch.tensor([0, 1, 2]).view(1, 1, 1, 3)
    out = lsh_attention(q, torch.ones_like(v), v, hq, hk, impl=impl)
    assert out[0, 0, 0, 0].item() == pytest.approx((3 * 1 + 2 + 3) / 5)


@FILL
@pytest.mark.parametrize("L", [1, 2, 3, 5, 9, 17, 64, 65, 257])
@pytest.mark.parametrize("num_buckets", [1, 4, 1000])
def test_blocks_match_reference_at_any_length(fill, L, num_buckets):
    """All in one bucket, a few buckets, and nearly no collision."""
    vectors = random_vectors(L=L)
    buckets = random_buckets(L=L, num_buckets=num_buckets)
    assert_blocks_match_reference(vectors, buckets, fill=fill)


@FILL
@pytest.mark.parametrize("counts", [(37, 20), (37, 1), (37, 0), (0, 0)])
def test_blocks_match_reference_with_padding(fill, counts):
    """A sequence of padding alone gives 0 and has no gradient."""
    vectors = random_vectors()
    options = dict(fill=fill, key_mask=first_keys(*counts))
    assert_blocks_match_reference(vectors, random_buckets(), **options)
    results = with_gradients(lsh_attention, vectors, *random_buckets(), impl="blocks", **options)
    if counts[1] == 0:
        assert not any(x[1].any() for x in results)


@FILL
def test_blocks_without_a_collision_average_or_copy(fill):
    """fill="zero": every key weighs the same. fill="mask": each position sees itself alone."""
    q, k, v = random_vectors()
    hq, hk = random_buckets(num_buckets=1)
    out = lsh_attention(q, k, v, hq, hk + 1, fill=fill, impl="blocks")
    expected = v
    if fill == "zero":
        expected = v.mean(2, keepdim=True)
    assert (out - expected).abs().max() < 1e-6
    assert_blocks_match_reference([q, k, v], (hq, hk + 1), fill=fill)


@FILL
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("num_buckets", [1, 4])
def test_blocks_with_extreme_scores_stay_accurate(fill, sign, num_buckets):
    """All scores beyond 150, or below -150, where exp overflows: compared in float64."""
    q, k, v = random_vectors(L=29)
    q = 4 * q.detach().abs() + 12
    k = sign * (k.detach().abs() + 6)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    buckets = random_buckets(L=29, num_buckets=num_buckets)
    assert 150 < (q @ k.transpose(-2, -1)).abs().min() / math.sqrt(5)
    assert_blocks_match_reference(exact, buckets, tolerance=1e-11, fill=fill)
    single = lsh_attention(q, k, v, *buckets, fill=fill, impl="blocks")
    error = (single - lsh_attention(*exact, *buckets, fill=fill, impl="blocks")).abs().max()
    # a score of 1,000 has an error of 1,000 · 2^-24, and so has the weight, relative to itself
    assert error < 1e-3


@FILL
def test_blocks_with_scores_of_scale_30_match_reference(fill):
    vectors = random_vectors(scale=math.sqrt(30))
    assert_blocks_match_reference(vectors, random_buckets(), tolerance=2e-4, fill=fill)


@FILL
@pytest.mark.parametrize("low", [-5, 2**31 - 5])
def test_blocks_take_any_integers_as_buckets(fill, low):
    """A negative number does not reach the sequence before, a large one does not overflow."""
    hq, hk = random_buckets()
    assert_blocks_match_reference(random_vectors(), (hq + low, hk + low), fill=fill)


@FILL
def test_blocks_pass_gradcheck(fill):
    vectors = random_vectors(B=1, H=2, L=9, e=3, dtype=torch.float64)
    buckets = random_buckets(B=1, H=2, L=9, num_buckets=4)

    def attend(q, k, v):
        return lsh_attention(q, k, v, *buckets, fill=fill, key_mask=first_keys(7, L=9),
                             impl="blocks")

    assert torch.autograd.gradcheck(attend, vectors)


@FILL
@pytest.mark.parametrize("impl", ["dense", "blocks"])
def test_lsh_attention_keeps_nan_in_its_sequence(fill, impl):
    vectors = random_vectors()
    for x in vectors:
        x.data[1, 2, 36] = torch.nan
    results = with_gradients(lsh_attention, vectors, *random_buckets(), fill=fill, impl=impl)
    assert results[0][1, 2, 36].isnan().all()
    for x in results:
        assert not x[0].isnan().any()
        assert not x[1, :2].isnan().any()


@FILL
@pytest.mark.parametrize("impl", ["dense", "blocks"])
def test_lsh_attention_in_bfloat16_is_as_accurate_as_dense_attention(fill, impl):
    """At most twice the error of dense attention, against float64, also under autocast."""
    low = [x.detach().bfloat16() for x in random_vectors(L=64, e=16)]
    high = [x.double() for x in low]
    buckets = random_buckets(L=64)
    exact = lsh_attention_reference(*high, *buckets, fill=fill)
    dense_error = (full_attention_reference(*low) - full_attention_reference(*high)).norm()
    with torch.autocast("cpu", torch.bfloat16):
        out = lsh_attention(*low, *buckets, fill=fill, impl=impl)
    assert out.dtype == torch.bfloat16
    assert (out - exact).norm() <= 2 * dense_error * exact.norm() / full_attention(*high).norm()


@pytest.mark.parametrize("impl", ["dense", "blocks", "auto"])
def test_lsh_attention_with_one_bucket_equals_full_attention(impl):
    vectors = random_vectors()
    buckets = random_buckets(num_buckets=1)
    key_mask = first_keys(37, 20)
    out = lsh_attention(*vectors, *buckets, key_mask=key_mask, impl=impl)
    assert (out - full_attention(*vectors, key_mask=key_mask)).abs().max() < 1e-5


def test_upper_differs_from_full_attention_in_one_bucket():
    """The authors' code writes <q_i, k_j>, i <= j, to both triangles."""
    q, k, v = random_vectors()
    out = lsh_attention(q, k, v, *random_buckets(num_buckets=1), pairs="upper")
    scores = q @ k.transpose(-2, -1) / math.sqrt(5)
    symmetric = scores.triu() + scores.triu(1).transpose(-2, -1)
    assert (out - symmetric.softmax(-1) @ v).abs().max() < 1e-5
    assert (out - full_attention(q, k, v)).abs().max() > 0.1


@pytest.mark.parametrize("L, n, pairs, is_blocks", [
    (256, 1, "all", False),  # short: the literal formula
    (257, 1, "all", True),
    (257, 2, "all", False),  # the blocks serve one function
    (257, 1, "upper", False),  # and all pairs
])
def test_auto_takes_blocks_where_they_serve(monkeypatch, L, n, pairs, is_blocks):
    calls = []

    def spy(q, k, v, hq, hk, **options):
        calls.append(q.shape)
        return q

    monkeypatch.setattr(attention, "lsh_attention_blocks", spy)
    vectors = random_vectors(B=1, H=1, L=L)
    lsh_attention(*vectors, *random_buckets(B=1, H=1, L=L, n=n), pairs=pairs)
    assert len(calls) == int(is_blocks)


def test_blocks_hold_no_matrix_of_all_pairs(monkeypatch):
    """All 3,000 positions share a bucket, and no tensor has as many numbers as pairs."""
    largest = []
    original = attention.attend

    def spy(q, k, v, dropout):
        largest.append(max(q.numel(), k.numel(), v.numel()))
        assert q.shape[1] > attention.MAX_PRODUCT  # so that PyTorch's kernel attends
        return original(q, k, v, dropout)

    monkeypatch.setattr(attention, "attend", spy)
    vectors = random_vectors(B=1, H=1, L=3000)
    out = lsh_attention(*vectors, *random_buckets(B=1, H=1, L=3000, num_buckets=1))
    assert max(largest) < 3000 * 10
    assert (out - full_attention(*vectors)).abs().max() < 1e-5


def test_group_buckets_matches_docstring_example():
    """Bucket 0: queries 0, 2, 3 and key 1. Bucket 1: query 1 and keys 0, 3. Bucket 2: key 2."""
    bucket_q = torch.tensor([0, 1, 0, 0])
    bucket_k = torch.tensor([1, 0, 2, 1])
    queries, keys = attention.group_buckets(bucket_q, bucket_k, 3)
    assert [group.tolist() for group in queries] == [[[0, 2, 3], [1, 4, 4]]]
    assert [group.tolist() for group in keys] == [[[1, 5, 4], [0, 3, 4]]]


@pytest.mark.parametrize("change, message", [
    (dict(k=torch.ones(2, 3, 9, 5)), "q, k, v: expected one shape, got"),
    (dict(hq=torch.zeros(2, 1, 1, 37).long()), r"hq, hk: expected \(2, 3, n, 37\), got"),
    (dict(key_mask=torch.ones(1, 37).bool()), r"key_mask: expected bool \(2, 37\), got"),
    # PyTorch's kernel would add a float mask to the scores
    (dict(key_mask=torch.ones(2, 37)), r"key_mask: expected bool \(2, 37\), got"),
    (dict(fill="mean"), "fill: expected zero or mask, got 'mean'"),
    (dict(fill="mean", impl="blocks"), "fill: expected zero or mask, got 'mean'"),
    (dict(pairs="lower"), "pairs: expected all or upper, got 'lower'"),
    (dict(impl="fast"), "impl: expected auto, dense or blocks, got 'fast'"),
    (dict(impl="blocks", pairs="upper"), "impl: expected auto or dense for 1 hash functions"),
    (dict(impl="blocks", hq=torch.zeros(2, 3, 2, 37).long(), hk=torch.zeros(2, 3, 2, 37).long()),
     "impl: expected auto or dense for 2 hash functions"),
])
def test_lsh_attention_refuses_what_would_be_silently_wrong(change, message):
    arguments = dict(zip("qkv", random_vectors()))
    hq, hk = random_buckets()
    arguments |= dict(hq=hq, hk=hk) | change
    with pytest.raises(ValueError, match=f"^{message}"):
        lsh_attention(**arguments)


# The module


@pytest.mark.parametrize("attn", ["full", "lsh"])
def test_self_attention_matches_its_parts(attn):
    """Query, key and value of head 1 are rows 4 to 7 of each third of qkv."""
    layer = SelfAttention(12, 3, attn=attn, num_hyperplanes=2)
    x = torch.randn(2, 300, 12)
    key_mask = first_keys(300, 111, L=300)
    third = []
    for part in range(3):
        rows = slice(12 * part + 4, 12 * part + 8)
        third.append(F.linear(x, layer.qkv.weight[rows], layer.qkv.bias[rows]).unsqueeze(1))
    if attn == "full":
        expected = full_attention_reference(*third, key_mask=key_mask)
    else:
        hq = simhash(third[0], layer.planes[1:2], layer.coef[1:2], 256)
        hk = simhash(third[1], layer.planes[1:2], layer.coef[1:2], 256)
        expected = lsh_attention_reference(*third, hq, hk, key_mask=key_mask)
    layer.out.weight.data = torch.eye(12)
    layer.out.bias.data.zero_()
    assert (layer(x, key_mask)[..., 4:8] - expected[:, 0]).abs().max() < 1e-5


def test_self_attention_drops_weights_in_training_alone():
    layer = SelfAttention(8, 2, attn="lsh", dropout=0.5)
    x = torch.randn(1, 9, 8)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("cast", [
    lambda layer: layer.half(),
    lambda layer: layer.to(torch.bfloat16).float(),  # back again
    copy.deepcopy,
])
def test_hyperplanes_stay_in_float32(cast):
    layer = SelfAttention(16, 2, attn="lsh")
    planes = layer.planes.clone()
    changed = cast(layer)
    assert changed.planes.dtype == torch.float32
    assert torch.equal(changed.planes, planes)
    x = torch.randn(1, 9, 16, dtype=changed.qkv.weight.dtype)
    assert changed(x).dtype == x.dtype


def test_self_attention_is_built_on_the_meta_device():
    """As a model is that takes its weights from a checkpoint."""
    with torch.device("meta"):
        layer = SelfAttention(16, 2, attn="lsh")
    layer = layer.to_empty(device="cpu")
    layer.load_state_dict(SelfAttention(16, 2, attn="lsh").state_dict())
    assert layer(torch.randn(1, 9, 16)).isfinite().all()


@pytest.mark.parametrize("attn", ["full", "lsh"])
def test_self_attention_survives_autocast_pickling_and_compilation(attn):
    layer = SelfAttention(16, 2, attn=attn)
    x = torch.randn(1, 300, 16)
    expected = layer(x)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).isfinite().all()
    compiled = torch.compile(layer, backend="eager")
    assert (compiled(x) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("change, message", [
    (dict(attn="sparse"), "attn, fill, pairs: expected full or lsh, .* got 'sparse'"),
    (dict(fill="mean"), "attn, fill, pairs: expected .* got 'full', 'mean'"),
    (dict(num_heads=3), "hidden_size: expected a multiple of 3 heads, got 8"),
])
def test_self_attention_refuses_bad_sizes(change, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        SelfAttention(8, **dict(num_heads=2) | change)
