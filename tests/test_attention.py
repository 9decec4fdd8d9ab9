"""Tests of attention.py and its fast forms: simhash, LSH attention against its formula.

test_all.py has both in three numbers, and against loops; test_model.py has the layer's parts.
"""

import math
import sys

import pytest
import torch
import torch._dynamo.utils
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_mask

import attention
import attention_fast
import attention_flex
from attention import LSHSelfAttention, SelfAttention, full_attention, full_attention_reference
from attention import lsh_attention, lsh_attention_reference, simhash
from bench.shares import outside_share, outside_share_law


def random_vectors(L=37, e=5):
    """Return q, k, v (2, 3, L, e) with gradients."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(3, 2, 3, L, e, generator=generator)
    return [x.requires_grad_() for x in vectors.unbind()]


def random_buckets(L=37, num_buckets=7):
    """Return hq, hk (2, 3, 1, L), from -2 on: few, so that some hold many rows and some none."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-2, num_buckets - 2, (2, 2, 3, 1, L), generator=generator)


def first_keys(*counts, L=37):
    """Return key_mask bool (B, L): each sequence attends to its first keys."""
    return torch.arange(L) < torch.tensor(counts).unsqueeze(1)


def with_gradients(function, vectors, *args, **options):
    """Return the output and the gradients of a weighted sum of it, all in one list."""
    out = function(*vectors, *args, **options)
    weights = torch.linspace(-1, 2, out.numel()).view_as(out)
    gradients = torch.autograd.grad(out, vectors, weights.to(out))
    return [out, *gradients]


def assert_close(actual, expected, tolerance=1e-5):
    """Each tensor of two lists is equal, relative to the largest number. NaN is not."""
    for a, b in zip(actual, expected, strict=True):
        largest = b.abs().max().item()
        assert (a - b).abs().max() <= tolerance * max(1, largest)


def attend_dense(q, k, v, blocks):
    """Do what attend_flex does by a matrix of all pairs, less those in blocks that do not meet.

    PyTorch's FlexAttention has no backward pass on a CPU. Its kernel of a GPU is not tested here.
    """
    B, H, L, e = q.shape
    collide = create_mask(blocks.mask_mod, B, H, L, L, device="cpu")
    meet = blocks.to_dense().bool()
    for dim in (2, 3):
        meet = meet.repeat_interleave(attention_flex.FLEX_BLOCK, dim)
    scores = q @ k.transpose(2, 3) / math.sqrt(e)
    is_out = ~(collide & meet[:, :, :L, :L])
    scores = scores.masked_fill(is_out, -torch.inf)
    weights = scores.softmax(3).masked_fill(is_out, 0.0)  # no keys, no gradient, as on a GPU
    return weights @ v, scores.logsumexp(3)


@pytest.fixture
def dense_kernel(monkeypatch):
    if torch.cuda.is_available():
        attention_flex.compile_flex()  # there FlexAttention itself is tested
    monkeypatch.setattr(attention_flex, "attend_flex", attend_dense)


FILL = pytest.mark.parametrize("fill", ["zero", "mask"])
FAST = pytest.mark.parametrize("impl", ["blocks", "flex"])
DTYPES = pytest.mark.parametrize("dtype, tolerance", [
    (torch.float32, 1e-5),
    (torch.bfloat16, 0.02),  # 8 bits of mantissa
])


# Dense attention


@DTYPES
@pytest.mark.parametrize("L", [37, 600])  # above 512 bfloat16 takes PyTorch's kernel too
def test_full_attention_matches_reference_and_is_zero_without_keys(L, dtype, tolerance):
    vectors = random_vectors(L=L)
    key_mask = first_keys(20, 0, L=L)
    expected = with_gradients(full_attention_reference, vectors, key_mask=key_mask)
    low = [x.detach().to(dtype).requires_grad_() for x in vectors]
    results = with_gradients(full_attention, low, key_mask=key_mask)
    assert results[0].dtype == dtype
    assert not results[0][1].any()
    assert_close(results, expected, tolerance)


@pytest.mark.parametrize("attend", [full_attention, full_attention_reference])
def test_dropout_keeps_mean_and_spread(attend):
    """A row is the sum of 500 weights of 1/500, each 0 or 4/3 times as large."""
    zeros = torch.zeros(1, 1, 500, 1)
    out = attend(zeros, zeros, zeros + 1, dropout=0.25)
    sigma = math.sqrt(0.25 / 0.75 / 500)
    assert 0.85 * sigma < out.std() < 1.15 * sigma
    error = abs(out.mean() - 1)
    assert error < 6 * sigma / math.sqrt(500)


# Buckets


def test_simhash_matches_definition_for_each_head_and_function():
    """[BL §2.1] h(x) = sum, mod m, of coef over the hyperplanes that x lies above."""
    planes, coef = attention.draw_hyperplanes(3, 4, 6, 5, 97)
    x = torch.randn(2, 3, 11, 5)
    x[0, 0, 0] = 0  # above none
    h = simhash(x, planes, coef, 97)
    assert h.shape == (2, 3, 4, 11)
    for head in range(3):
        for function in range(4):
            total = 0
            for plane, c in zip(planes[head, function], coef[head, function]):
                total = total + c * (x[:, head] @ plane > 0)  # (B, L)
            assert torch.equal(h[:, head, function], total % 97)


def test_simhash_under_autocast_stays_float32():
    planes, coef = attention.draw_hyperplanes(2, 1, 8, 5, 97)
    x = torch.randn(1, 2, 2000, 5)
    expected = simhash(x, planes, coef, 97)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(simhash(x, planes, coef, 97), expected)


def test_simhash_refuses_other_hyperplanes():
    planes, coef = attention.draw_hyperplanes(3, 2, 4, 5, num_buckets=8)
    for wrong in [
        (planes[:1], coef),  # one head would be broadcast
        (planes, coef[:1]),
        (planes.bfloat16(), coef),  # rounded
    ]:
        with pytest.raises(ValueError, match="^planes, coef: expected"):
            simhash(torch.ones(2, 3, 7, 5), *wrong, 8)


def test_collision_probability_by_hand():
    """[BL §2.1] At 90° two signs agree in one case of four; the other sums agree in one of 64.

    One of several functions that agrees is enough.
    """
    law = attention.collision_probability(math.pi / 2, 2, 64, num_functions=4)
    P = 1 / 4 + 3 / 4 / 64
    assert law == pytest.approx(1 - (1 - P)**4)


@pytest.mark.parametrize("r", [1, 2, 4, 8])
def test_share_of_keys_outside_follows_its_law(r):
    """In 8 · 64 heads of 128 random vectors: measured, and by the law."""
    q, k = torch.randn(2, 8, 64, 128, 64)
    planes, coef = attention.draw_hyperplanes(64, 1, r, 64, 256)
    hq = simhash(q, planes, coef, 256)
    hk = simhash(k, planes, coef, 256)
    share = outside_share(q, k, hq, hk).mean().item()
    law = outside_share_law(64, r, 256)
    assert abs(share - law) < 0.02


# LSH attention


def waves(*shape, phase):
    """Return numbers that look random, by a formula."""
    n = torch.arange(math.prod(shape), dtype=torch.float64)
    return torch.sin(phase + 1.3 * n ** 1.1).float().view(shape)


@pytest.mark.parametrize("n, num_keys, expected", [
    (1, 6, [
        [-1.35015, 2.92699, -1.53062, -0.00062, -1.88158, 2.89894],
        [-0.40080, 0.95061, -1.81981, 1.97650, -1.89056, 1.68125],
    ]),
    (2, 4, [
        [-1.60368, 1.77423, -1.53778, -0.19158, -1.71422, 1.94859],
        [-0.48831, 1.03639, -1.02968, 0.17875, -1.05750, 1.19025],
    ]),
])
def test_self_attention_matches_recorded_outputs_of_the_authors_code(n, num_keys, expected):
    """[BL Alg. 1] as released: d 8, two heads, six positions, r 2, m 4; four keys: two padded.

    Recorded: coordinates 0 and 5 of the output, which are of the first and of the second head.
    """
    layer = LSHSelfAttention(
        8, 2, pairs="upper", num_functions=n, num_hyperplanes=2, num_buckets=4)
    layer.qkv.weight.data = waves(24, 8, phase=2.0)
    layer.qkv.bias.data.zero_()
    layer.out.weight.data = torch.eye(8)
    layer.out.bias.data.zero_()
    layer.planes = waves(2, n, 2, 4, phase=1.0)
    layer.coef = (torch.arange(4 * n) * 3 % 4).view(2, n, 2)
    x = waves(1, 6, 8, phase=0.5)
    key_mask = first_keys(num_keys, L=6)
    out = layer(x, key_mask)[0, :, [0, 5]]  # (L, heads)
    assert (out.T - torch.tensor(expected)).abs().max() < 1e-4


CASES = pytest.mark.parametrize("L, num_buckets, num_keys", [
    (1, 1, (1, 0)),  # a sequence of padding alone gives 0 and has no gradient
    (37, 1, (37, 20)),  # all collide
    (37, 7, (37, 1)),
    (300, 2, (300, 150)),  # above 64 queries of a cell PyTorch's kernel attends
    (300, 9, (300, 0)),  # three blocks of FlexAttention; the last is short
    (300, 10_000, (299, 150)),  # nearly none collide
])


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a GPU")


@CASES
@FILL
@pytest.mark.parametrize("impl, device", [
    ("blocks", "cpu"),
    ("flex", "cpu"),
    pytest.param("flex", "cuda", marks=GPU),  # several lengths in one process, compiled
])
def test_fast_forms_match_reference(
        impl, device, fill, L, num_buckets, num_keys, dense_kernel):
    vectors = [x.detach().to(device).requires_grad_() for x in random_vectors(L=L, e=16)]
    buckets = random_buckets(L, num_buckets).to(device)
    options = dict(fill=fill, key_mask=first_keys(*num_keys, L=L).to(device))
    actual = with_gradients(lsh_attention, vectors, *buckets, impl=impl, **options)
    expected = with_gradients(lsh_attention_reference, vectors, *buckets, **options)
    assert_close(actual, expected)


def test_fill_mask_without_a_collision_copies_the_values():
    """Each position attends to itself alone."""
    q, k, v = random_vectors()
    hq, hk = random_buckets()
    out = lsh_attention_reference(q, k, v, hq, hk + 7, fill="mask")
    assert_close([out], [v])


@FAST
@FILL
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("num_buckets", [1, 4])
def test_extreme_scores_stay_accurate(impl, fill, sign, num_buckets, dense_kernel):
    """All scores beyond 150, or below -150, where exp overflows: compared with float64."""
    q, k, v = random_vectors(29)
    q = 4 * q.abs() + 12
    k = sign * (k.abs() + 6)
    exact = [q.double(), k.double(), v.double()]
    buckets = random_buckets(29, num_buckets)
    actual = with_gradients(lsh_attention, [q, k, v], *buckets, fill=fill, impl=impl)
    expected = with_gradients(lsh_attention_reference, exact, *buckets, fill=fill)
    # a score of 1,000 has an error of 1,000 · 2^-24, and so has the weight, relative to itself
    assert_close(actual, expected, 1e-3)


@FILL
@pytest.mark.parametrize("impl", ["dense", "blocks"])
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_sequence_of_padding_alone_has_no_nan_in_between(fill, impl):
    """detect_anomaly raises where the backward pass of a step gives NaN."""
    options = dict(fill=fill, key_mask=first_keys(20, 0))
    with torch.autograd.detect_anomaly(check_nan=True):
        with_gradients(lsh_attention, random_vectors(), *random_buckets(), impl=impl, **options)
        with_gradients(full_attention_reference, random_vectors(), key_mask=first_keys(20, 0))


@FILL
@pytest.mark.parametrize("impl", ["dense", "blocks", "flex"])
def test_lsh_attention_keeps_nan_in_its_sequence(fill, impl, dense_kernel):
    vectors = random_vectors()
    for x in vectors:
        x.data[1, 2, 36] = torch.nan
    results = with_gradients(lsh_attention, vectors, *random_buckets(), fill=fill, impl=impl)
    assert results[0][1, 2, 36].isnan().all()
    for x in results:
        assert not x[0].isnan().any()
        assert not x[1, :2].isnan().any()


@FILL
@DTYPES
@pytest.mark.parametrize("L", [1, 300])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_of_pytorch_matches_reference(fill, L, dtype, tolerance):
    """Forward alone: the backward pass, and other cases, are those of attend_dense above."""
    low = [x.detach().to(dtype) for x in random_vectors(L=L)]
    exact = [x.double() for x in low]
    buckets = random_buckets(L, 9)
    options = dict(fill=fill, key_mask=first_keys(L, 0, L=L))
    out = lsh_attention(*low, *buckets, impl="flex", **options)
    expected = lsh_attention_reference(*exact, *buckets, **options)
    assert_close([out], [expected], tolerance)


def test_one_compilation_of_flex_serves_all_buckets(monkeypatch):
    counter = CompileCounter()
    compiled = torch.compile(attention_flex.attend_flex, backend=counter)
    monkeypatch.setattr(attention_flex, "attend_flex", compiled)
    vectors = [x.detach() for x in random_vectors(150)]
    for num_buckets in (1, 9, 999):
        lsh_attention(*vectors, *random_buckets(150, num_buckets), impl="flex")
    assert counter.frame_count == 1


@GPU
@FILL
def test_flex_on_a_gpu_never_waits(fill):
    layer = LSHSelfAttention(64, 4, fill=fill).cuda()
    x = torch.randn(2, 600, 64, device="cuda")

    def train():
        with torch.autocast("cuda", torch.bfloat16):
            out = layer(x)
        out.sum().backward()

    train()  # compiles
    torch.cuda.set_sync_debug_mode("error")  # from here on a wait raises
    try:
        train()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_blocks_compute_in_float32_under_autocast():
    """With bfloat16 vectors the result is that of float32, rounded once."""
    low = [x.detach().bfloat16() for x in random_vectors()]
    high = [x.float() for x in low]
    expected = lsh_attention(*high, *random_buckets(), impl="blocks")
    with torch.autocast("cpu", torch.bfloat16):
        out = lsh_attention(*low, *random_buckets(), impl="blocks")
    assert torch.equal(out, expected.bfloat16())


@pytest.mark.parametrize("L, e, n, pairs, dtype, on_cpu, on_gpu", [
    (513, 16, 1, "all", torch.bfloat16, "blocks", "flex"),
    (513, 16, 1, "all", torch.float32, "blocks", "blocks"),  # measured: flex is slower
    (513, 15, 1, "all", torch.bfloat16, "blocks", "blocks"),  # flex compiles no narrower heads
    (512, 16, 1, "all", torch.bfloat16, "blocks", "dense"),
    (256, 16, 1, "all", torch.bfloat16, "dense", "dense"),
    (513, 16, 2, "all", torch.bfloat16, "dense", "dense"),
    (513, 16, 1, "upper", torch.bfloat16, "dense", "dense"),
])
def test_auto_chooses_what_serves(monkeypatch, L, e, n, pairs, dtype, on_cpu, on_gpu):
    q = torch.zeros(1, 1, L, e, dtype=dtype)
    hq = torch.zeros(1, 1, n, L, dtype=torch.int64)

    def choose():
        impl = attention.choose_impl("auto", q, hq, pairs)
        if impl == "auto":
            return attention_fast.choose_fast_impl(q)
        return impl

    assert choose() == on_cpu
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(attention_fast, "has_flex", lambda: True)
    assert choose() == on_gpu


def remove_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")


def remove_flex(monkeypatch):
    monkeypatch.setitem(sys.modules, "attention_flex", None)  # as if there were none


@pytest.mark.parametrize("remove, message", [
    (remove_compiler, "found no C compiler for FlexAttention. It runs bucket by bucket"),
    (remove_flex, "found no attention_flex.py beside attention.py. It runs bucket by bucket"),
])
def test_without_what_flex_requires_a_gpu_takes_blocks_and_warns(monkeypatch, remove, message):
    remove(monkeypatch)
    monkeypatch.setattr(attention_fast, "has_flex", attention_fast.has_flex.__wrapped__)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with pytest.warns(UserWarning, match=message):
        q = torch.zeros(1, 1, 513, 16, dtype=torch.bfloat16)
        impl = attention_fast.choose_fast_impl(q)
    assert impl == "blocks"


def test_blocks_keep_no_matrix_of_all_pairs():
    """All 500 positions share a bucket. The backward pass needs what the forward pass keeps."""
    sizes = []

    def keep(x):
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        lsh_attention(*random_vectors(500), *random_buckets(500, 1))
    assert max(sizes) < 500 * 500


def test_find_blocks_matches_docstring_example(monkeypatch):
    monkeypatch.setattr(attention_flex, "FLEX_BLOCK", 2)
    queries = torch.tensor([[[0, 0, 0, 6, 6, 6, 12, 12]]])
    keys = torch.tensor([[[0, 0, 0, 6, 6, 12, 12, 16]]])
    blocks = attention_flex.find_blocks(queries, keys)
    assert blocks.to_dense()[0, 0].tolist() == [
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]


def test_attention_alone_warns_and_is_right(monkeypatch):
    """A file that is copied alone is never slow in silence."""
    monkeypatch.setitem(sys.modules, "attention_fast", None)  # as if there were none
    vectors = random_vectors(L=300)
    buckets = random_buckets(300)
    with pytest.warns(UserWarning, match="found no attention_fast.py beside attention.py"):
        out = lsh_attention(*vectors, *buckets)
    assert torch.equal(out, lsh_attention_reference(*vectors, *buckets))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("missing, L, pairs", [
    ("attention_fast", 256, "all"),
    ("attention_fast", 300, "upper"),  # the formula alone serves
    ("attention_flex", 300, "all"),  # it is for a GPU
])
def test_attention_without_a_file_that_it_needs_not_is_silent(monkeypatch, missing, L, pairs):
    vectors = random_vectors(L=L)
    buckets = random_buckets(L)
    expected = lsh_attention(*vectors, *buckets, pairs=pairs)
    monkeypatch.setitem(sys.modules, missing, None)
    out = lsh_attention(*vectors, *buckets, pairs=pairs)
    assert torch.equal(out, expected)


ONE_HEAD = torch.zeros(2, 1, 1, 37, dtype=torch.int64)
TWO_HASHES = torch.zeros(2, 3, 2, 37, dtype=torch.int64)
NO_HASH = TWO_HASHES[:, :, :0]


@pytest.mark.parametrize("change, message", [
    (dict(hq=ONE_HEAD, hk=ONE_HEAD), r"hq, hk: expected \(2, 3, n, 37\), got"),  # broadcast
    (dict(hq=NO_HASH, hk=NO_HASH), r"hq, hk: expected \(2, 3, n, 37\), got"),
    (dict(key_mask=first_keys(9)), r"key_mask: expected bool \(2, 37\), got"),
    # PyTorch's kernel would add a float mask to the scores
    (dict(key_mask=torch.ones(2, 37)), r"key_mask: expected bool \(2, 37\), got"),
    (dict(fill="mean"), "fill: expected zero or mask, got 'mean'"),
    (dict(pairs="lower"), "pairs: expected all or upper, got 'lower'"),
    (dict(impl="fast", hq=TWO_HASHES, hk=TWO_HASHES),
     "impl: expected auto, dense, blocks or flex, got 'fast'"),
    (dict(impl="blocks", pairs="upper"), "impl: blocks requires one hash .* 'upper'"),
    (dict(impl="flex", hq=TWO_HASHES, hk=TWO_HASHES), "impl: flex requires one .*, got 2"),
    # the literal formula would take it, and the fast forms fail beyond 256 positions
    (dict(v=torch.zeros(2, 3, 37, 6)), "q, k, v: expected one shape, got"),
])
def test_lsh_attention_refuses_what_would_be_silently_wrong(change, message):
    q, k, v = random_vectors()
    hq, hk = random_buckets()
    arguments = dict(q=q, k=k, v=v, hq=hq, hk=hk) | change
    with pytest.raises(ValueError, match=f"^{message}"):
        lsh_attention(**arguments)


# The layers


@pytest.mark.parametrize("layer, is_training, is_random", [
    (SelfAttention(8, 2, dropout=0.5), True, True),
    (SelfAttention(8, 2, dropout=0.5), False, False),
    (LSHSelfAttention(8, 2), True, False),  # deviation 4
])
def test_self_attention_drops_weights_of_dense_attention_in_training(layer, is_training, is_random):
    layer.train(is_training)
    x = torch.randn(1, 9, 8)
    has_changed = not torch.equal(layer(x), layer(x))
    assert has_changed == is_random


@pytest.mark.parametrize("length, num_graphs", [(256, 1), (300, 2)])
def test_self_attention_compiles_around_lsh_attention(length, num_graphs):
    """The formula, for short texts, is compiled too; else a graph before and one after it.

    Later calls reuse them.
    """
    layer = LSHSelfAttention(16, 2)
    x = torch.randn(1, length, 16)
    counter = CompileCounter()
    compiled = torch.compile(layer, backend=counter)
    assert_close([compiled(x)], [layer(x)])
    assert counter.frame_count == num_graphs
    compiled(x)
    num_frames = torch._dynamo.utils.counters["frames"]["total"]
    for _ in range(3):
        y = torch.randn(1, length, 16)
        assert_close([compiled(y)], [layer(y)])
    assert torch._dynamo.utils.counters["frames"]["total"] == num_frames


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traced_self_attention_is_right_for_other_vectors():
    """300 positions: impl="auto" would take blocks, whose shapes depend on the vectors."""
    layer = LSHSelfAttention(16, 2)
    traced = torch.jit.trace(layer, torch.randn(1, 300, 16))
    for length in (300, 400):
        x = torch.randn(2, length, 16)
        assert_close([traced(x)], [layer(x)])


def test_self_attention_over_no_sequence_is_empty():
    layer = LSHSelfAttention(16, 2)
    assert layer(torch.zeros(0, 300, 16)).shape == (0, 300, 16)


@pytest.mark.parametrize("changes, message", [
    (dict(fill="zeros"), "fill: expected zero or mask, got 'zeros'"),
    (dict(num_hyperplanes=0), "hyperplanes: expected sizes of at least 1"),
    (dict(num_heads=3), "hidden_size: expected a multiple of num_heads, got 8 and 3"),
    (dict(num_heads=0), "hidden_size: expected a multiple of num_heads, got 8 and 0"),
])
def test_self_attention_refuses_what_it_cannot_be(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        LSHSelfAttention(8, **dict(num_heads=2) | changes)
