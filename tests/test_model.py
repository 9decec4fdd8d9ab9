"""model.py: parameter counts of the papers, and every part of the model against its formula written out."""

import math
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F

import attention
import model
from embeddings import EMBEDDINGS, unpack_bits
from model import PRESETS, Config, Model, count_parameters, load_model
from tests.support import bloom_model, run_main, tiny_model
from tokenizer import CLS, FIRST_WORD_ID, MASK, PAD, SEP, SPECIALS

LSH = dict(attn="lsh", lsh_bands=3, lsh_buckets=5, lsh_hashes=2)
PARTS = ("embedding", "specials", "positions", "encoder", "head")


def random_ids(*shape, words=25):
    """Return random IDs of ordinary words."""
    return torch.randint(FIRST_WORD_ID, FIRST_WORD_ID + words, shape)


def stir(net, scale=1.0):
    """Add noise to all parameters, as attention of new ones is too weak to tell; return the model."""
    for parameter in net.parameters():
        parameter.data += scale * torch.randn_like(parameter)
    return net


def count(preset, **changes):
    """Count the parameters of a preset without allocating them."""
    with torch.device("meta"):
        return count_parameters(Model(Config(**PRESETS[preset] | changes)))


def test_counts_match_hashformers_paper():
    """[HF Table 2, App. B] as integers, d = 768, a binary task."""
    counts = {emb: count("hashformer", head="classify", emb=emb) for emb in ("emb", "pool", "add", "proj")}
    embedding = dict(emb=50_260 * 768, pool=(13 + 1024) * 768, add=2 * 128 * 768, proj=128 * 768)
    assert {emb: c["embedding"] for emb, c in counts.items()} == embedding
    assert all(c["total"] - c["embedding"] - c["specials"] == 86_043_650 for c in counts.values())
    assert {emb: c["total"] for emb, c in counts.items()} == {
        "emb": 124_647_170, "pool": 86_844_674, "add": 86_244_866, "proj": 86_146_562}
    lookup = count("hashformer", head="classify", emb="lookup", rows=50_265)
    assert (lookup["embedding"], lookup["specials"], lookup["total"]) == (38_603_520, 0, 124_647_170)
    # 1,038 rows, five of them those of the special tokens
    assert count("hashformer", head="classify", emb="emb", rows=1_033)["total"] == 86_840_834
    assert all(sum(c[part] for part in PARTS) == c["total"] for c in (*counts.values(), lookup))


def test_printed_counts_are_formulas_and_word_row():
    """[HF Table 2] prints 797.2K, 197.4K, 99.1K: one d-vector more than the formulas of [HF App. B] give."""
    printed = {emb: count("hashformer", emb=emb)["embedding"] + 768 for emb in ("pool", "add", "proj")}
    assert printed == dict(pool=797_184, add=197_376, proj=99_072)
    assert 1_038 * 768 == printed["pool"]  # "1K" rows of emb: chosen to equal pool
    # with that row counted twice the total of pool is 86,845,442; its share is 0.9 %, printed as 1.0
    total = count("hashformer", head="classify", emb="pool")["total"]
    assert total + 768 == 86_845_442 and round(100 * 797_184 / total, 1) == 0.9
    assert round(100 * count("hashformer", head="classify", emb="emb")["poep"], 1) == 31.0


def test_counts_match_proformer():
    """[HF Table 2]: 322.6K to embed words = 420 · 768; the 15.1M in all hold no positions and no specials."""
    counts = count("proformer", head="classify")
    assert counts["embedding"] == 420 * 768 == 322_560
    assert counts["embedding"] + counts["encoder"] + counts["head"] == 15_090_434
    assert round(counts["total"] / 1e6, 1) == 15.5


def test_lsh_attention_adds_no_parameters():
    """[BL §2.2] 32,000 pieces, two types, tied MLM head: 4.6 M, where it says 4.7 M."""
    assert [count("bert-lsh", attn=attn)["total"] for attn in ("lsh", "full")] == [4_607_360] * 2


def test_counts_match_count_median_proposal():
    """[CM] With d 512: five blocks of 500 rows, against a row for each of 30,522 words."""
    sketch, proj = count("median"), count("median", emb="proj")
    assert sketch["embedding"] == count("median", emb="mean")["embedding"] == 1_280_000
    table = count("median", emb="lookup", head="mlm")
    assert table["embedding"] == 15_627_264 and proj["embedding"] == 512 * 128
    transform = 512 * 512 + 512 + 2 * 512  # and its norm; then a bias per row, and the rows if not tied
    assert table["head"] == transform + 30_522
    assert sketch["head"] == proj["head"] == transform + 5 * 500 * 513


def test_demo_prints_every_embedding_and_takes_no_memory():
    with torch.device("meta"):
        Model(Config(emb="emb", rows=2**31, layers=1, width=8, heads=1, ffn=8, attn="lsh", lsh_bands=2**31))
    out = run_main(model.main).out
    assert [line.split()[0] for line in out.splitlines()] == ["method", *EMBEDDINGS] and " 98,304 " in out


@pytest.mark.parametrize("changes,message", [
    (dict(emb="medium"), "emb: expected one of"), (dict(buckets=0), "buckets: expected 1 to"),
    (dict(head="x"), "head: expected one of"), (dict(emb="mean", hashes=0), "hashes: expected 1"),
    (dict(order=False), "objective: expected hash-mlm"), (dict(layers="2"), "layers: expected"),
    (dict(order=False, head="classify"), "objective: expected hash-mlm"), (dict(layers=-1), "layers: expected 0 to"),
    (dict(pool="max"), "pool: expected one of cls, mean"), (dict(attn="half"), "full, lsh"),
    (dict(lsh_fill="one"), "zero, mask"), (dict(lsh_hashes=0), "1 to 2"),
    (dict(lsh_pairs="lower"), "upper, all"), (dict(lsh_buckets=2**40), "1 to 2")])
def test_config_refuses_contradictions(changes, message):
    with pytest.raises(ValueError, match=message):
        Config(**changes)


def test_config_resolves_what_is_open():
    """Defaults depend on the embedding, and what nothing reads is None."""
    assert Config(hashes=7).hashes is None and Config(head="hash-mlm").hashes == 5
    assert Config(emb="bloom").hashes == 2 and Config(emb="weighted", hashes=3).hashes == 3
    assert Config(emb="lookup", head="classify", tied=True).tied is None
    assert [Config(emb=emb, head="hash-mlm").tied for emb in ("bloom", "mean")] == [True, False]
    c = Config(emb="bloom", head="hash-mlm", order=False)
    assert Config(**asdict(c)) == c and c.code_format == "digest" and c.special_tokens == len(SPECIALS)


@pytest.mark.parametrize("emb", EMBEDDINGS)
def test_embed_adds_word_row_and_never_hashes_specials(emb):
    net = stir(tiny_model(emb=emb), 0.3)
    ids = torch.tensor([[CLS, FIRST_WORD_ID, FIRST_WORD_ID + 3, SEP, PAD, MASK]])
    out, codes, special = net.embed(ids), net.codes[ids], ids < FIRST_WORD_ID
    own = net.embedding(unpack_bits(codes, 16) if net.config.code_format == "bits" else codes)
    if not net.embedding.needs_specials:
        assert emb in ("lookup", "bloom") and net.specials is None and (out == own.view_as(out)).all()
        return
    assert len(net.specials.weight) == len(SPECIALS) + net.embedding.has_word_row
    word_row = net.specials.weight[-1] if net.embedding.has_word_row else 0
    torch.testing.assert_close(out[~special], (own + word_row)[~special])
    assert (out[special] == net.specials.weight[ids[special]]).all()
    net.codes[:FIRST_WORD_ID] = net.codes[:FIRST_WORD_ID].flip(0)  # whatever the codes of the specials say
    assert (net.embed(ids)[special] == out[special]).all()


def test_embed_of_distinct_words_changes_nothing():
    """Embedding each word of a batch once gives the vectors and gradients of embedding each position."""
    net, ids = tiny_model(emb="median"), torch.randint(0, FIRST_WORD_ID + 25, (3, 9))
    calls = []
    net.embedding.register_forward_pre_hook(lambda module, inputs: calls.append(inputs[0].numel() // 5))
    results = []
    for is_costly in (True, False):
        net.embedding.is_costly = is_costly
        out = net.embed(ids)
        results.append((out, *torch.autograd.grad(out.sum(), net.embedding.weight)))
    assert calls == [len(ids.unique()), 27] and torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])


@pytest.mark.parametrize("emb", EMBEDDINGS)
def test_set_codes_refuses_codes_that_do_not_fit(emb):
    net = tiny_model(emb=emb)
    (num, end), *_ = [(2, 256)] if net.config.code_format == "bits" else net.embedding.code_limits
    codes = net.codes.long()
    net.set_codes(codes[:3])
    assert len(net.codes) == 3
    last, first = torch.tensor([num - 1]), torch.tensor([0])
    for bad in (codes[:, 1:], codes[0], codes.unsqueeze(0), F.pad(codes, (0, 1)), codes.float(),
                codes.index_fill(1, last, end), codes.index_fill(1, first, -1)):
        with pytest.raises(ValueError, match=rf"codes: expected (\(V, C\)|.* {num} below {end}.*), got"):
            net.set_codes(bad)


@pytest.mark.parametrize("emb", ["mean", "median", "weighted"])
@pytest.mark.parametrize("k", [1, 5])
def test_positions_of_sketches_start_at_measured_scale(emb, k):
    """Median and mean are compared at one ratio of positions to words: 2.25 of the words' std."""
    sizes = dict(buckets=300, weights=300, rows=300, width=64, heads=2, layers=0, length=32)
    net = Model(Config(emb=emb, hashes=k, **sizes))
    codes = torch.randint(0, 300, (2_000, k + (emb == "weighted")))
    ratio = net.positions.weight.abs().max() / net.embedding(codes).std()
    assert abs(ratio / 2.25 - 1) < 0.06


@pytest.mark.parametrize("emb", EMBEDDINGS)
@pytest.mark.parametrize("head", ["sr", "classify", "span"])
def test_padding_changes_nothing(emb, head):
    net, ids = stir(tiny_model(emb=emb, head=head)), random_ids(3, 7)
    padded = F.pad(ids, (0, 2), value=PAD)
    with_mask, without = (out if head == "classify" else out[:, :7]
                          for out in (net(padded, key_mask=padded != PAD), net(padded)))
    torch.testing.assert_close(with_mask, net(ids), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(without, net(ids), atol=1e-5)


@pytest.mark.parametrize("changes", [dict(act="gelu"), dict(act="relu"), *(
    LSH | dict(lsh_fill=fill, lsh_pairs=pairs) for fill in ("zero", "mask") for pairs in ("upper", "all"))])
def test_layer_matches_post_norm_formula(changes):
    """[BERT §3] LN(x + Attention(x)), then LN(x + FFN(x)); LSH attention with the layer's own hyperplanes."""
    layer, x = stir(tiny_model(**changes), 0.3).layers[1], torch.randn(3, 7, 12)
    key_mask, c = torch.arange(7) < torch.tensor([7, 4, 1])[:, None], layer.config
    q, k, v = (t.unflatten(-1, (3, 4)).transpose(1, 2) for t in layer.qkv(x).chunk(3, -1))
    if c.attn == "lsh":
        layer.draw(1)  # others than at first
        hq, hk = (attention.simhash(t, layer.planes, layer.coef, 5) for t in (q, k))
        a = attention.lsh_attention_reference(q, k, v, hq, hk, fill=c.lsh_fill, pairs=c.lsh_pairs, key_mask=key_mask)
    else:
        a = attention.full_attention_reference(q, k, v, key_mask=key_mask)
    y = F.layer_norm(x + layer.out(a.transpose(1, 2).flatten(2)), (12,), layer.norm1.weight, layer.norm1.bias)
    hidden = layer.up(y).clamp(min=0) if c.act == "relu" else F.gelu(layer.up(y))
    y = F.layer_norm(y + layer.down(hidden), (12,), layer.norm2.weight, layer.norm2.bias)
    torch.testing.assert_close(layer(x, key_mask), y, rtol=1e-4, atol=1e-5)


def test_second_type_row_is_of_the_second_text_of_a_pair():
    """[SEP] [SEP] begins it. Windows, whose documents end with one [SEP], and sets have row 0 alone."""
    net, (sets, _) = tiny_model(types=2), bloom_model(types=2)
    x, y = random_ids(2, 1)
    pair, window = (torch.tensor([[CLS, x, SEP, other, y, SEP, PAD]]) for other in (SEP, x))
    shown = []
    for model, ids in (net, pair), (net, window), (sets, torch.where(pair == CLS, x, pair)):
        before = model.embed_inputs(ids)
        model.types.weight.data[1] += torch.randn(12)
        shown.append((model.embed_inputs(ids) != before).any(2)[0].tolist())
    assert shown == [[False] * 3 + [True] * 4, [False] * 7, [False] * 14]
    assert count("bert-lsh")["positions"] - count("bert-lsh", types=1)["positions"] == 128


@pytest.mark.parametrize("change, message", [
    (dict(ids=torch.full((2, 7), 6.0)), "ids: expected"), (dict(ids=torch.full((7,), 6)), "ids: expected"),
    (dict(ids=torch.full((2, 7), 30)), "ids: .*below 30"), (dict(ids=torch.full((2, 7), -1)), "ids: exp"),
    (dict(masked_positions=None), "masked_positions: expected with head mlm or hash-mlm"),
    (dict(head="sr"), "masked_positions: expected"), (dict(codes=None), "codes: expected set_codes")])
def test_model_refuses_bad_inputs(change, message):
    inputs = dict(ids=random_ids(2, 7), masked_positions=torch.tensor([3])) | change
    net = tiny_model(head=inputs.pop("head", "hash-mlm"))
    net.codes = inputs.pop("codes", net.codes)
    with pytest.raises(ValueError, match=message):
        net(**inputs)


def test_encode_matches_sum_norm_and_layers():
    """Word, position and type, norm, layers; the two spare rows of the position table are never used."""
    net, ids = stir(tiny_model(spare_positions=2, types=2), 0.3), random_ids(3, 7)
    x = net.norm(net.embed(ids) + net.positions.weight[2:9] + net.types.weight[0])
    for layer in net.layers:
        x = layer(x)
    torch.testing.assert_close(net.encode(ids), x)
    with pytest.raises(ValueError, match="at most 9 positions.* got 10"):
        net.encode(random_ids(1, 10))


def test_dropout_acts_in_training_only(monkeypatch):
    """On embeddings, on both residual branches, on attention weights and before the head."""
    net, ids = tiny_model(dropout=0.5), random_ids(3, 7)
    assert torch.equal(net(ids), net(ids))
    net.train()
    assert (net.embed_inputs(ids) == 0).float().mean() > 0.3
    layer, x = net.layers[0], torch.randn(2, 5, 12)
    for branch, other in ((layer.out, layer.down), (layer.down, layer.out)):
        silenced = dict(weight=torch.zeros_like(other.weight), bias=torch.zeros_like(other.bias))
        active = dict(bias=torch.ones_like(branch.bias))
        state = {f"{name}.{key}": value for name, module in layer.named_children()
                 for key, value in {other: silenced, branch: active}.get(module, {}).items()}
        a, b = (torch.func.functional_call(layer, state, (x,)) for _ in range(2))
        assert not torch.equal(a, b)
    layer.dropout.p = 0.0  # what differs now are the attention weights
    assert not torch.equal(layer(x), layer(x))
    encoded = net.encode(ids).detach()
    monkeypatch.setattr(net, "encode", lambda ids, key_mask=None: encoded)
    assert not torch.equal(net(ids), net(ids))  # the dropout of the head


def test_initial_weights():
    """Sinusoids by hand: rates 1 and 1/100 at width 4. Matrices of the encoder: 0.02 · √(768/192) = 0.04."""
    expected = [math.sin(1), math.cos(1), math.sin(0.01), math.cos(0.01)]
    torch.testing.assert_close(model.sinusoids(3, 4)[1], torch.tensor(expected))
    net = tiny_model()
    torch.testing.assert_close(net.positions.weight.data, 2.25 * 15 ** -0.5 * model.sinusoids(9, 12))
    assert all(p.requires_grad and p.is_leaf for p in net.parameters())
    assert Model(Config(bits=1, layers=0, width=8, heads=1)).positions.weight.isfinite().all()
    net = tiny_model(width=192, ffn=64)
    qkv = net.layers[0].qkv
    assert abs(qkv.weight.std().item() - 0.04 * 0.8796) < 2e-3 and not qkv.bias.any()
    assert abs(net.head.weight.std().item() - 0.02 * 0.8796) < 2e-3


def test_parameter_groups_decay_no_biases_and_norms():
    net = tiny_model(head="hash-mlm")
    decayed, plain = model.parameter_groups(net, 0.01)
    ids = {id(p) for p in plain["params"]}
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.01, 0.0)
    assert len(decayed["params"]) + len(ids) == len(list(net.parameters()))
    for name, parameter in net.named_parameters():
        assert (id(parameter) in ids) == ("norm" in name or name.endswith("bias")), name


def test_hyperplanes_come_from_seed_and_state_dict():
    """Each layer and head has its own, a seed draws them again, and weights equal those of the dense model."""
    first, other = tiny_model(**LSH), tiny_model(**LSH)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), tiny_model().parameters(), strict=True))
    (layer, second), changed = first.layers, other.layers[0]
    assert torch.equal(layer.planes, changed.planes) and layer.planes.shape == (3, 2, 3, 4)  # H, n, r, e
    torch.manual_seed(1)
    assert not torch.equal(layer.planes, Model(first.config).layers[0].planes)
    assert not torch.equal(layer.planes, second.planes) and not torch.equal(*layer.planes[:2])
    other.resample_hyperplanes(3)
    assert not torch.equal(layer.planes, changed.planes) and not torch.equal(layer.coef, changed.coef)
    first.resample_hyperplanes(3)
    loaded = load_model(dict(config=asdict(other.config), model=other.state_dict()))
    for a, b, c in zip(first.layers, other.layers, loaded.layers):
        assert all(torch.equal(x.planes, b.planes) and torch.equal(x.coef, b.coef) for x in (a, c))


@pytest.mark.parametrize("order,attn", [(False, "full"), (False, "lsh"), (True, "full")])
def test_set_has_no_order(order, attn):
    """Permuting items permutes the outputs, and two masks have equal outputs; with positions not."""
    net, _ = bloom_model(order=order, attn=attn, lsh_pairs="all")
    ids, turn = torch.tensor([[3, MASK, 41, 7, MASK]]), torch.tensor([3, 0, 4, 2, 1])
    ids = torch.where(ids == MASK, ids, ids + FIRST_WORD_ID)
    out, turned = (net.encode(t).unflatten(1, (5, 2)) for t in (ids, ids[:, turn]))
    assert torch.allclose(out[:, turn], turned, atol=1e-5) is not order
    assert torch.allclose(out[:, 1], out[:, 4], atol=1e-5) is not order
    assert not torch.allclose(out[:, 1, 0], out[:, 1, 1], atol=1e-3)  # [MASK_1] is not [MASK_2]


def test_padding_of_sets_changes_nothing():
    (net, _), positions = bloom_model(), torch.tensor([1])
    ids = torch.tensor([[FIRST_WORD_ID + 3, MASK, FIRST_WORD_ID + 41]])
    two_rows = torch.cat([F.pad(ids, (0, 1), value=PAD), ids.new_tensor([[5, 6, MASK, 7]])])
    for padded in (F.pad(ids, (0, 4), value=PAD), two_rows):
        out, expected = (net(t, masked_positions=positions) for t in (padded, ids))
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_vectors_of_item_share_position():
    net, _ = bloom_model(order=True)
    ids = torch.tensor([[CLS, FIRST_WORD_ID + 3, FIRST_WORD_ID + 41]])
    positions, rows = net.positions.weight[:3].repeat_interleave(2, 0), net.codes[ids] + torch.tensor([0, 16])
    expected = net.norm(net.embedding.weight[rows.flatten(1)] + positions + net.types.weight[0])
    torch.testing.assert_close(net.embed_inputs(ids), expected)


@pytest.mark.parametrize("emb", ["lookup", "bloom", "mean", "median"])
def test_tied_and_own_table_predict_the_same(emb):
    """With the embedding's rows copied to its own table, a head gives the logits of the tied head."""
    head = "mlm" if emb == "lookup" else "hash-mlm"
    tied, own = (tiny_model(tied=tied, emb=emb, head=head) for tied in (True, False))
    weights = tied.state_dict()
    assert set(own.state_dict()) - set(weights) == {"head.table"}
    own.load_state_dict(weights | {"head.table": weights["embedding.weight"]})
    ids, positions = random_ids(2, 4), torch.tensor([1, 6])
    torch.testing.assert_close(*(net(ids, masked_positions=positions) for net in (tied, own)))


@pytest.mark.parametrize("emb", EMBEDDINGS)
def test_masked_positions_are_predicted_by_rows_of_a_table(emb):
    """Of lookup and bloom by the embedding's, each of an item's hashes by its own vector; else by the head's."""
    is_tied, head = emb in ("lookup", "bloom"), "mlm" if emb == "lookup" else "hash-mlm"
    net = bloom_model()[0] if emb == "bloom" else stir(tiny_model(emb=emb, head=head), 0.3)
    ids, positions, rows = random_ids(2, 7), torch.tensor([2, 9]), torch.tensor([5, 0, 17])
    x = net.encode(ids).view(14, *[2] * (emb == "bloom"), 12)[positions]  # (2, d), or (2, m, d)
    table = net.embedding.weight if is_tied else net.head.table
    expected = net.head.norm(F.gelu(net.head.transform(x))) @ table.T + net.head.bias
    if is_tied:
        torch.testing.assert_close(net(ids, masked_positions=positions, rows=rows), expected[..., rows])
    else:
        expected = expected.view(2, 5, 7)  # [CM] one vector, k predictions, each among the rows of its block
    torch.testing.assert_close(net(ids, masked_positions=positions), expected)


def test_logits_of_evaluation_are_float32():
    """In bfloat16 hundreds of items tie, which training may have and a ranking may not."""
    net, _ = bloom_model()
    ids, positions = random_ids(2, 7, words=53), torch.tensor([2, 9])
    with torch.autocast("cpu", torch.bfloat16):
        hidden = net.head.norm(F.gelu(net.head.transform(net.encode(ids).view(14, 2, 12)[positions]))).float()
        out = net(ids, masked_positions=positions)
        assert net.train()(ids, masked_positions=positions).dtype == torch.bfloat16
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, hidden @ net.embedding.weight.T + net.head.bias, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("head", ["classify", "span", "sr"])
def test_other_heads_see_mean_of_item_vectors(head):
    net, _ = bloom_model(head=head, order=True, pool="mean")
    ids = random_ids(3, 7, words=53)
    x = net.encode(ids).unflatten(1, (7, 2)).mean(2)
    torch.testing.assert_close(net(ids), net.head(x.mean(1)) if head == "classify" else net.head(x))
    padded = F.pad(ids, (0, 2), value=PAD)
    out = net(padded, key_mask=padded != PAD)
    torch.testing.assert_close(out if head == "classify" else out[:, :7], net(ids), rtol=1e-4, atol=1e-5)


def test_pool_ignores_padding():
    """mean: over what is not padding; cls: the first position."""
    x, key_mask = torch.randn(2, 5, 12), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    (mean, cls), ids = (tiny_model(head="classify", pool=pool) for pool in ("mean", "cls")), random_ids(3, 7)
    torch.testing.assert_close(mean.pool(x, key_mask), torch.stack([x[0].mean(0), x[1, :3].mean(0)]))
    torch.testing.assert_close(mean.pool(x, None), x.mean(1))
    assert torch.equal(cls.pool(x, key_mask), x[:, 0])
    torch.testing.assert_close(cls(ids), cls.head(cls.encode(ids)[:, 0]))
