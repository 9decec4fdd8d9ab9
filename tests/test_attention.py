"""Tests of attention.py and blocks.py: dense attention, simhash, and LSH attention against its literal formula."""

import itertools
import math

import numpy as np
import pytest
import torch

import attention
import blocks


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("padded", [False, True])
def test_full_attention_matches_reference(dtype, tolerance, padded):
    """bfloat16 on a CPU takes its own path; the tolerance is its 8 bits of mantissa on weights up to 1."""
    q, k, v = torch.randn(3, 5, 3, 7, 11)  # B 5, H 3, L 7, e 11
    key_mask = torch.arange(7) < torch.tensor([7, 1, 3, 0, 6])[:, None] if padded else None
    expected = attention.full_attention_reference(q, k, v, key_mask=key_mask)
    inputs = [t.to(dtype).requires_grad_() for t in (q, k, v)]
    out = attention.full_attention(*inputs, key_mask=key_mask)
    assert out.dtype == dtype and (out.float() - expected).abs().max() < tolerance
    out.float().square().sum().backward()
    assert all(t.grad.isfinite().all() for t in inputs)
    if padded:
        assert not out[3].any()  # no key to attend to


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999999])
def test_apply_dropout_zeroes_a_share_and_scales_the_rest(dtype, p):
    """Within six sigma, also of pairs of neighbors: numbers of one draw are independent. A seed repeats it."""
    x = torch.ones(997, 1_001, dtype=dtype, requires_grad=True)  # no multiple of 4 numbers
    first, again = (torch.manual_seed(3) and attention.apply_dropout(x, p) for _ in range(2))
    assert torch.equal(first, again) and first.dtype == dtype
    zero, scale = first.flatten() == 0, torch.tensor(2**16 / (2**16 - min(round(p * 2**16), 2**16 - 1))).to(dtype)
    assert ((first.flatten() == scale) | zero).all()
    for count, q in ((zero, p), (zero[1:] & zero[:-1], p * p)):
        assert abs(count.double().mean() - q) <= 6 * math.sqrt(3 * q * (1 - q) / len(count)) + 1e-5
    first.sum().backward()
    assert torch.equal(x.grad == 0, first == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_attention_dropout_keeps_mean_and_spread(dtype):
    q, k, v = torch.zeros(1, 1, 500, 8), torch.zeros(1, 1, 500, 8), torch.ones(1, 1, 500, 8)
    out = attention.full_attention(*(t.to(dtype) for t in (q, k, v)), dropout=0.25).float()[..., 0]
    sigma = math.sqrt(0.25 / 0.75 / 500)  # of a row: 500 weights of 1/500, each 0 or 4/3
    assert 0.85 * sigma < out.std() < 1.15 * sigma and abs(out.mean() - 1) < 6 * sigma / math.sqrt(500) + 4e-3


def random_inputs(B=2, H=3, L=37, e=5, n=2, buckets=7, seed=0, dtype=torch.float32, scale=1.0):
    """Random q, k, v with gradients, and few random buckets, so that some hold many rows and some none."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (scale * torch.randn(B, H, L, e, generator=g, dtype=dtype) for _ in range(3))
    hq, hk = torch.randint(buckets, (2, B, H, n, L), generator=g)
    return [t.requires_grad_() for t in (q, k, v / scale)], (hq, hk)


def run_with_gradients(function, inputs, *args, **mode):
    """Return the output and the gradients of a weighted sum without symmetry."""
    out = function(*inputs, *args, **mode)
    cotangent = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)
    return out, torch.autograd.grad(out, inputs, cotangent)


def assert_matches_reference(inputs, args, impl="blocks", **mode):
    expected, gradients = run_with_gradients(attention.lsh_attention_reference, inputs, *args, **mode)
    out, actual = run_with_gradients(attention.lsh_attention, inputs, *args, **mode, impl=impl)
    assert out.shape == expected.shape and (out - expected).abs().max() <= 1e-5
    for name, a, b in zip("qkv", actual, gradients):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-5, name  # of a row with one key it is 0


MODES = [dict(fill=fill, pairs=pairs) for fill in ("zero", "mask") for pairs in ("upper", "all")]
MODE = pytest.mark.parametrize("mode", MODES, ids=lambda m: "-".join(m.values()))
KEY_MASK, NO_KEYS = (torch.arange(37) < torch.tensor([[37], [n]]) for n in (20, 0))  # (B, L)


def test_simhash_under_autocast_stays_float32():
    """Each head has its own hyperplanes, each function its own buckets; autocast changes nothing."""
    g = torch.Generator().manual_seed(0)
    planes, coef = attention.draw_hyperplanes(3, 4, 6, 5, 97, g)
    assert planes.shape == (3, 4, 6, 5) and coef.shape == (3, 4, 6) and 0 <= coef.min() and coef.max() < 97
    x = torch.randn(2, 3, 1_001, 5, generator=g, requires_grad=True)
    h = attention.simhash(x, planes, coef, 97)
    assert h.shape == (2, 3, 4, 1_001) and h.dtype == torch.int64 and not h.requires_grad
    above = (x[1, 2, 7] * planes[2, 3]).sum(-1) > 0
    assert h[1, 2, 3, 7] == coef[2, 3][above].sum() % 97
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attention.simhash(x, planes, coef, 97), h)


@pytest.mark.parametrize("bands, buckets, functions", [*itertools.product((1, 2, 8), (2, 64), (1, 3))])
def test_collision_probability_matches_simhash(bands, buckets, functions):
    """[BL §2.1] 1 - (1 - p - (1 - p)/m)^n within three standard deviations, 40,000 draws an angle."""
    g, draws = torch.Generator().manual_seed(bands * 100 + buckets + functions), 40_000
    for angle in (0.0, 0.3, math.pi / 2, 3.0):
        planes, coef = attention.draw_hyperplanes(draws, functions, bands, 2, buckets, g)
        pair = torch.tensor([[1.0, 0.0], [math.cos(angle), math.sin(angle)]]).expand(1, draws, 2, 2)
        h = attention.simhash(pair, planes, coef, buckets)  # (1, draws, n, 2)
        share = (h[..., 0] == h[..., 1]).any(2).float().mean().item()
        law = attention.collision_probability(angle, bands, buckets, functions)
        assert abs(share - law) <= 3 * math.sqrt(law * (1 - law) / draws) + 1e-9, angle
    # erratum [BL §2.1]: (1 - θ/π)^r + 1/m is no probability, for equal vectors it exceeds 1
    assert 1 + 1 / buckets > 1 == attention.collision_probability(0.0, bands, buckets, functions)


@MODE
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("key_mask", [None, KEY_MASK, NO_KEYS], ids=["", "padded", "no keys"])
def test_lsh_attention_matches_reference(mode, n, key_mask):
    """With three functions many pairs collide more than once. A row of padding gets 0 and no gradient."""
    inputs, codes = random_inputs(n=n)
    for impl in ("blocks", "dense"):
        assert_matches_reference(inputs, codes, impl, key_mask=key_mask, **mode)
    if key_mask is NO_KEYS:
        out, grads = run_with_gradients(attention.lsh_attention, inputs, *codes, **mode, key_mask=NO_KEYS)
        assert not any(x[1].any() for x in (out, *grads))


@MODE
@pytest.mark.parametrize("L, width", [(1, 5), (2, 5), (7, 5), (63, 3), (1_100, 3)])
def test_attention_at_any_length_and_width_of_values_matches_reference(mode, L, width):
    (q, k, v), codes = random_inputs(B=1, H=2, L=L, n=1, buckets=max(L // 5, 1))
    v = v.detach()[..., :width].clone().requires_grad_()
    for impl in ("auto", "blocks"):
        assert_matches_reference([q, k, v], codes, impl, **mode)
    for dtype in (torch.float32, torch.bfloat16):
        out = attention.full_attention(*(x.to(dtype) for x in (q, k, v)))
        assert (out - attention.full_attention_reference(q, k, v)).abs().max() < 0.05


@MODE
@pytest.mark.parametrize("max_chunk,max_saved", [(1, 0), (5, 100), (40, 0)])
def test_lsh_attention_in_small_chunks_matches_reference(monkeypatch, mode, max_chunk, max_saved):
    """Buckets are split between queries, and weights are saved or computed again in the backward pass."""
    monkeypatch.setattr(blocks, "MAX_CHUNK", max_chunk)
    monkeypatch.setattr(blocks, "MAX_SAVED", max_saved)
    inputs, codes = random_inputs(buckets=3)
    layouts = [layout.fill() for layout in attention.make_layouts(*codes, **mode, key_mask=KEY_MASK)]
    num_chunks = sum(len(list(layout.chunks())) for layout in layouts)
    assert num_chunks > sum(len(layout.shapes) for layout in layouts)  # the limit is in force
    out = attention.lsh_attention(*inputs, *codes, **mode, key_mask=KEY_MASK, impl="blocks")
    num_saved = len(out.grad_fn.saved_tensors) - 6  # besides q, k, v, out, terms, mask
    assert num_saved == (num_chunks if max_saved else 0)
    assert_matches_reference(inputs, codes, key_mask=KEY_MASK, **mode)


@MODE
def test_lsh_attention_without_collisions_averages_or_copies(mode):
    """fill="zero": every key weighs the same, the mean of v. fill="mask": each position sees itself alone."""
    (q, k, v), (hq, hk) = random_inputs()
    expected = v.mean(2, keepdim=True) if mode["fill"] == "zero" else v
    for impl in ("blocks", "dense"):
        out = attention.lsh_attention(q, k, v, hq * 0, hk * 0 + 1, **mode, impl=impl)
        assert (out - expected).abs().max() < 1e-6
    assert_matches_reference([q, k, v], (hq * 0, hk * 0 + 1), **mode, key_mask=KEY_MASK)


@pytest.mark.parametrize("function, impl", [
    (attention.lsh_attention, dict(impl="blocks")), (attention.lsh_attention, dict(impl="dense")),
    (attention.lsh_attention, {}), (attention.lsh_attention_reference, {})])
def test_lsh_attention_by_default_with_one_bucket_equals_full_attention(function, impl):
    """With m = 1 all pairs collide: hashing has no effect, except by the triangle of the released code."""
    vectors, one = random_inputs(buckets=1)
    expected = attention.full_attention(*vectors, key_mask=KEY_MASK)
    assert (function(*vectors, *one, key_mask=KEY_MASK, **impl) - expected).abs().max() < 1e-5
    for codes, pairs in ((one, "upper"), (random_inputs()[1], "all")):
        out = function(*vectors, *codes, key_mask=KEY_MASK, pairs=pairs, **impl)
        assert (out - expected).abs().max() > 0.1


@MODE
@pytest.mark.parametrize("scale", [-1.0, 1.0])
@pytest.mark.parametrize("buckets", [1, 4])
def test_lsh_attention_with_extreme_scores_stays_accurate(mode, scale, buckets):
    """Scores beyond 150 or -150 in all of a row, against float64: exp(150) is infinite in float32, and where
    all keys collide and all scores are low, Σ (e^s - 1) + L is 0. Scores are off by 150 · 2^-24 at best."""
    (q, k, v), h = random_inputs(L=29, n=1, buckets=buckets)
    q, k = (q.detach().abs() * 4 + 12).requires_grad_(), (scale * (k.detach().abs() + 6)).requires_grad_()
    double = [t.double() for t in (q, k, v)]
    exact, gradients = run_with_gradients(attention.lsh_attention_reference, double, *h, **mode)
    out, actual = run_with_gradients(attention.lsh_attention, [q, k, v], *h, **mode, impl="blocks")
    plain, plain_gradients = run_with_gradients(attention.lsh_attention_reference, [q, k, v], *h, **mode)
    scores = (q @ k.transpose(-2, -1)).abs() / math.sqrt(5)
    assert 150 < scores.min() and scores.max() < 2_000
    assert (out - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-5
    for a, b, c in zip(actual, gradients, plain_gradients):
        assert (a - b).norm() <= 2 * (c - b).norm() + 1e-4 * b.norm() + 1e-12


@MODE
def test_lsh_attention_keeps_nan_in_its_sequence(mode):
    """A NaN does not reach other sequences: padding slots repeat rows of their own bucket."""
    (q, k, v), h = random_inputs(B=3, H=2, L=13, n=1, buckets=5)
    for t in (q, k, v):
        t.data[2, 1, 12] = torch.nan  # the last row of all
    out, gradients = run_with_gradients(attention.lsh_attention, [q, k, v], *h, **mode, impl="blocks")
    assert out[2, 1].isnan().any() and not any(t[:2].isnan().any() for t in (out, *gradients))
    v = v.nan_to_num(0)
    for function in (attention.lsh_attention, attention.lsh_attention_reference):  # the NaN stays visible
        assert function(q, k, v, *h, **mode)[2, 1, 12].isnan().all()
    assert attention.full_attention_reference(q, k, v)[2, 1, 12].isnan().all()
    assert attention.lsh_attention(q, k, v, *h, **mode, impl="blocks")[2, 1, 12].isnan().all()


@MODE
def test_lsh_attention_passes_gradcheck(mode):
    inputs, buckets = random_inputs(B=1, H=2, L=9, e=3, buckets=4, dtype=torch.float64)
    mode = mode | dict(key_mask=KEY_MASK[1:, 13:22], impl="blocks")
    assert torch.autograd.gradcheck(lambda *t: attention.lsh_attention(*t, *buckets, **mode), inputs)


def test_bucket_layout_matches_docstring_example(monkeypatch):
    """One bucket has three queries and one key; the bucket without keys is dropped."""
    monkeypatch.setattr(blocks, "TILES", (4,))
    layout = blocks.BucketLayout(torch.tensor([[5, 7, 5, 5]]), torch.tensor([[2, 5, 2, 3]])).fill()
    assert layout.shapes == [(1, 4, 4)] and layout.num_pairs == 16
    assert layout.to_q.tolist() == [0, 2, 3, 4] and layout.to_k.tolist() == [1, 4, 4, 4]
    assert layout.from_q.tolist() == [0, 2, 3, 0] and layout.from_k.tolist() == [1, 0, 0, 0]
    assert layout.in_q.tolist() == [0, 0, 0, -1] and layout.in_k.tolist() == [0, -2, -2, -2]
    [(s, t, G, allowed)] = layout.chunks()
    assert (s, t, G) == (slice(0, 4), slice(0, 4), 1)
    assert allowed.tolist() == [[[1, 0, 0, 0]] * 3 + [[0] * 4]]


@pytest.mark.parametrize("tile", [16, 64])
def test_pack_tiles_fills_tiles_in_order(tile):
    """Whole buckets of one sequence up to the size of a tile; larger ones are alone."""
    rng = np.random.default_rng(tile)
    sizes, sequence = rng.integers(1, 40, (2, 200)), np.sort(rng.integers(0, 7, 200))
    start, opening, number, total = blocks.pack_tiles(sizes, sequence, tile)
    for i, first in enumerate(opening):
        members = np.arange(200)[number == i]
        assert members[0] == first and (np.diff(members) == 1).all() and len({*sequence[members]}) == 1
        assert (total[:, i] == sizes[:, members].sum(1)).all()
        assert len(members) == 1 or total[:, i].max() <= tile
        assert (start[:, members] == sizes[:, members].cumsum(1) - sizes[:, members]).all()
        after = members[-1] + 1
        if after < 200 and sequence[after] == sequence[first]:  # the next one did not fit
            assert (total[:, i] + sizes[:, after]).max() > tile


FAST_DENSE = attention.Costs(pair=1, row=1, size=1, layout=1, dense_pair=1e-3, dense_row=1e-3)
FAST_BLOCKS = attention.Costs(pair=1e-3, row=1e-3, size=1e-3, layout=1e-3, dense_pair=1, dense_row=1)


def test_select_implementation_takes_the_cheaper():
    """Short sequences and full buckets are dense, long sequences in many buckets are not."""
    def select(L, buckets, **mode):
        codes = torch.randint(buckets, (2, 1, 2, 1, L))
        mode = dict(costs=attention.Costs()) | mode
        return attention.select_implementation(*codes, fill="zero", pairs="upper", **mode)[0]

    assert select(64, 1000) == select(2048, 200, impl="dense") == "dense" and select(2048, 200) == "blocks"
    assert select(256, 1) == "dense" and select(attention.MAX_DENSE_LENGTH + 1, 1) == "blocks"
    assert select(64, 10, impl="blocks") == select(64, 1000, costs=FAST_BLOCKS) == "blocks"
    assert select(1024, 1000, costs=FAST_DENSE) == "dense"
    inputs, codes = random_inputs(L=1024, n=1, buckets=200)
    for impl, costs in (("blocks", FAST_BLOCKS), ("dense", FAST_DENSE)):
        auto, forced = (attention.lsh_attention(*inputs, *codes, costs=costs, impl=x) for x in ("auto", impl))
        assert torch.equal(auto, forced)


def test_select_implementation_predicts_close_cases_from_every_8th_sequence(monkeypatch):
    """The buckets of 2 of 16 sequences of the batch tell what the layouts of all will cost."""
    generator, made, real = torch.Generator().manual_seed(0), [], attention.make_layouts
    hq, hk = torch.randint(100, (2, 16, 3, 1, 64), generator=generator)
    mask = torch.rand(16, 64, generator=generator) < 0.3

    def spy(*args):
        made.append(real(*args))
        return made[-1]

    monkeypatch.setattr(attention, "make_layouts", spy)
    for dense, chosen in ((0.95, "dense"), (1.05, "blocks")):  # of what the blocks cost
        costs = attention.Costs()
        cost = sum(layout.cost for layout in real(hq, hk, "mask", "upper", mask, costs))
        costs = costs._replace(dense_row=0, dense_pair=dense * cost / (hq.numel() * 64))
        made.clear()
        about = dict(fill="mask", pairs="upper", key_mask=mask)
        assert attention.select_implementation(hq, hk, costs, **about)[0] == chosen
        assert [layouts[0].N for layouts in made] == [2 * 3 * 64, hq.numel()][:1 + (chosen == "blocks")]
        predicted, *_ = (sum(layout.cost for layout in layouts) for layouts in made)
        assert abs(predicted / cost - 1) < 0.04


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("use_grad", [False, True])
def test_measure_costs_is_cached_and_draws_no_random_numbers(dtype, use_grad):
    attention.measure_costs.cache_clear()
    state = torch.get_rng_state()
    costs = attention.measure_costs("cpu", dtype, 8, use_grad=use_grad)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(0 < x < 1 for x in costs[:6]) and costs.has_fast_bfloat16 in (0, dtype == torch.bfloat16)
    assert attention.measure_costs("cpu", dtype, 8, use_grad=use_grad) is costs


def test_measure_costs_times_each_dtype_as_it_is_under_autocast(monkeypatch):
    real, seen = torch.bmm, set()

    def spy(a, b):
        seen.add((a.dtype, (out := real(a, b)).dtype))
        return out

    monkeypatch.setattr(torch, "bmm", spy)
    attention.measure_costs.cache_clear()
    with torch.autocast("cpu", torch.bfloat16):
        attention.measure_costs("cpu", torch.bfloat16, 8)
    assert seen == {(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)}


@MODE
@pytest.mark.parametrize("impl", ["blocks", "dense"])
@pytest.mark.parametrize("is_fast", [0.0, 1.0])
def test_lsh_attention_in_bfloat16_is_as_accurate_as_dense(mode, impl, is_fast):
    """At most twice the error of plain dense attention, against float64, forward and back; also under autocast."""
    inputs, codes = random_inputs(L=64, e=16, buckets=9)
    low = [x.detach().bfloat16().requires_grad_() for x in inputs]
    high = [x.detach().double().requires_grad_() for x in low]
    exact, gradients = run_with_gradients(attention.lsh_attention_reference, high, *codes, **mode)
    plain = [run_with_gradients(attention.full_attention_reference, x) for x in (low, high)]
    options = mode | dict(impl=impl, costs=attention.Costs(has_fast_bfloat16=is_fast))
    single = attention.lsh_attention(*inputs, *codes, **options)
    with torch.autocast("cpu", torch.bfloat16, enabled=impl == "blocks"):
        out, actual = run_with_gradients(attention.lsh_attention, low, *codes, **options)
        assert torch.equal(attention.lsh_attention(*inputs, *codes, **options), single)  # float32 in, float32 sums
    errors = [(a - b).norm() / b.norm() for a, b in zip((out, *actual), (exact, *gradients))]
    limits = [(a - b).norm() / b.norm() for (a, b) in zip(*((x, *y) for x, y in plain))]
    assert all(x.dtype == torch.bfloat16 for x in (out, *actual))
    assert all(error <= 2 * limit for error, limit in zip(errors, limits)), (errors, limits)


GOOD = dict(zip("qkv", torch.ones(3, 2, 3, 37, 5)), x=torch.ones(2, 3, 37, 5), planes=torch.ones(3, 2, 4, 5),
            coef=torch.zeros(3, 2, 4).long(), hq=torch.zeros(2, 3, 2, 37).long())
GOOD |= dict(hk=GOOD["hq"], buckets=8)
LSH, SIMHASH = ("lsh_attention", "lsh_attention_reference"), ("simhash",)
ANY = (*LSH, "full_attention")
NAMES = dict.fromkeys(LSH, ("q", "k", "v", "hq", "hk"))
NAMES |= dict(full_attention="qkv", simhash=("x", "planes", "coef", "buckets"))


@pytest.mark.parametrize("functions, name, value, expected", [
    (ANY, "q", None, "float .B=any, H=any, L=any, e=any., got NoneType"),
    (ANY, "q", torch.ones(3, 37, 5), "float .*, got torch.float32 .3, 37, 5"),
    (ANY, "k", torch.ones(2, 3, 9, 5), "torch.float32 .B=2, H=3, L=37, e=5., got .*2, 3, 9, 5"),
    (ANY, "v", torch.ones(2, 3, 9, 4), "torch.float32 .*L=37, u=.*, got .*2, 3, 9, 4"),
    (ANY, "v", torch.ones(2, 3, 37, 5).double(), "torch.float32 .*, got torch.float64"),
    (ANY, "key_mask", torch.ones(2, 37), "bool .B=2, L=37., got torch.float32"),
    (ANY, "key_mask", torch.ones(2, 9) > 0, "torch.bool .*, got torch.bool .2, 9"),
    (LSH, "hq", GOOD["hq"][:, :1], "torch.int64 .B=2, H=3, n=.*, got torch.int64 .2, 1, 2, 37"),
    (LSH, "hk", GOOD["hq"][:, :, :1], "torch.int64 .*n=2.*, got .*2, 3, 1, 37"),
    (LSH, "hk", GOOD["hk"] - 1, "0 to .*, got -1 to -1. Use simhash"),
    (LSH, "hq", GOOD["hq"] + 2**31, "0 to .*, got 2147483648"),
    (LSH, "fill", "none", "one of zero, mask, got 'none'"),
    (LSH, "pairs", None, "one of all, upper, got None"), (LSH[:1], "impl", "fast", "one of .*, got 'fast'"),
    (SIMHASH, "planes", torch.ones(3, 2, 4, 6), "torch.float32 .H=3, n=.*, e=5., got .*3, 2, 4, 6"),
    (SIMHASH, "coef", torch.zeros(3, 2, 5).long(), ".*r=4., got torch.int64 .3, 2, 5")])
def test_bad_argument_is_named(functions, name, value, expected):
    for function in functions:
        with pytest.raises(ValueError, match=f"^{name}: expected {expected}"):
            getattr(attention, function)(**{key: GOOD[key] for key in NAMES[function]} | {name: value})


def test_collision_share_matches_expectation():
    _, codes = random_inputs(n=2, buckets=4, L=400)
    assert abs(attention.collision_share(*codes) - (1 - 0.75 ** 2)) < 6 * math.sqrt(0.25 / 400)
    # erratum [BL §1] "common buckets across all hash functions": its matrix M and Algorithm 1 need one
    hq, hk = torch.tensor([0, 1]).view(1, 1, 2, 1), torch.tensor([0, 2]).view(1, 1, 2, 1)
    assert attention.collision_share(hq, hk) == 1
