"""Tests of model.py: parameter counts of the papers, each part against its formula, refusals."""

import math
import re
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F

import model
from embeddings import EMBEDDINGS, unpack_bits
from model import PRESETS, Config, Model, count_parameters, load_model
from tests.helpers import bloom_model, tiny_model
from tokenizer import CLS, FIRST_WORD_ID, PAD, SEP, UNK

LSH = dict(attn="lsh", lsh_bands=3, lsh_buckets=5, lsh_hashes=2)
X = FIRST_WORD_ID  # two ordinary words
Y = FIRST_WORD_ID + 1
PAIR = [CLS, X, SEP, SEP, Y, SEP, PAD]


def random_ids(*shape):
    """Return random IDs of ordinary words."""
    return torch.randint(FIRST_WORD_ID, 30, shape)


def stir(net):
    """Add noise to all parameters, as attention of new ones is too weak; return the model."""
    for parameter in net.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return net


def assert_near(actual, expected):
    """Assert that tensors are equal, up to the rounding of sums in another order."""
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def embed_inputs(net, ids):
    """Return the input of the first layer, (B, L, m, d)."""
    return net.inputs(ids, net.look_up_codes(ids))


def logits_of(net, x):
    """Return what the head makes of x (B, L, m, d), without padding or masked positions."""
    return net.head(x.mean(2), None)


# Parameter counts


def count(preset, **changes):
    """Count the parameters of a preset without allocating them."""
    config = Config.choose(PRESETS[preset] | changes)
    with torch.device("meta"):
        return count_parameters(Model(config))


def test_counts_match_proformer():
    """[HF Table 2] 322.6K for words. The 15.1M in all hold no positions and no special tokens.

    test_all.py and test_bench.py have HashFormers.
    """
    counts = count("proformer", head="classify")
    assert counts["embedding"] == 420 * 768
    assert round(100 * counts["poep"], 1) == 2.1
    assert counts["embedding"] + counts["encoder"] + counts["head"] == 15_090_434
    assert round(counts["total"] / 1e6, 1) == 15.5


def test_count_of_bert_lsh_is_4_6_million():
    """[BL §2.2] 32,000 pieces, two types, tied MLM head. The paper says 4.7M."""
    assert count("bert-lsh")["total"] == 4_607_360


@pytest.mark.parametrize("emb, head, embedding, rows", [
    ("median", "hash-mlm", 1_280_000, 5 * 500 * 513),  # five blocks of 500 rows and biases
    ("proj", "hash-mlm", 512 * 128, 5 * 500 * 513),
    ("lookup", "mlm", 15_627_264, 30_522),  # tied: a bias for each word alone
])
def test_counts_match_count_median_proposal(emb, head, embedding, rows):
    """[CM] d = 512, 30,522 words."""
    counts = count("median", emb=emb, head=head)
    transform = 512 * 512 + 512 + 2 * 512  # dense layer and norm
    assert counts["embedding"] == embedding
    assert counts["head"] == transform + rows


# Config


@pytest.mark.parametrize("field", sorted(asdict(Config()).keys() - {"dropout"}))
def test_every_field_of_config_is_checked(field):
    """But for the rate of dropout, which PyTorch checks."""
    with pytest.raises(ValueError, match=f"^{field}: expected .*, got '?other"):
        Config(**{field: "other"})


@pytest.mark.parametrize("changes, message", [
    # sizes that would build a model without an error
    (dict(layers=-1), "layers: expected an integer of at least 0, got -1"),
    (dict(labels=None), "labels: expected an integer of at least 1, got None"),
    (dict(attn="lsh", lsh_bands=0), "lsh_bands: expected an integer of at least 1, got 0"),
    (dict(emb="bloom", head="hash-mlm", order=False, attn="lsh", lsh_pairs="upper"),
     "lsh_pairs: expected all for sets"),
    # no row for each word; no hashes; nothing to shuffle
    (dict(head="mlm"), "head (--objective): expected sr or hash-mlm for"),
    (dict(emb="lookup", head="hash-mlm"), "head (--objective): expected sr or mlm for"),
    (dict(order=False, head="sr"), "head (--objective): expected hash-mlm for proj"),
    (dict(head="hash-mlm", tied=True), "tied requires an embedding with rows of words or hashes"),
])
def test_config_refuses_contradictions(changes, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        Config(**changes)


# Codes and word vectors


def test_set_codes_refuses_bits_that_are_not_packed():
    """test_embeddings.py tests what is refused for other codes."""
    net = tiny_model(emb="proj")
    one_column_more = F.pad(net.codes, (0, 1))
    for codes in (one_column_more, net.codes.int()):
        with pytest.raises(ValueError, match="^codes: expected uint8"):
            net.set_codes(codes)


@pytest.mark.parametrize("emb", EMBEDDINGS)
def test_embed_adds_one_row_to_every_word(emb):
    """[HF §3.1] Lookup, Emb and Bloom have no such row. Special tokens have rows of their own."""
    net = stir(tiny_model(emb=emb))
    ids = torch.arange(30).view(6, 5)  # row 0: the special tokens
    codes = net.codes[ids]  # (6, 5, C)
    if net.config.code_format == "bits":
        codes = unpack_bits(codes, 16)
    expected = net.inputs.embedding(codes)
    if emb not in ("lookup", "bloom"):
        special = net.inputs.specials.weight
        if emb != "emb":
            expected = expected + special[5]
        expected = torch.cat([special[:5].unsqueeze(0), expected[1:]])
    assert_near(net.embed(ids), expected)


# Inputs that are refused


@pytest.mark.parametrize("word", [30, -1])  # as an index −1 would be the last row
def test_model_refuses_ids_without_codes(word):
    net = tiny_model(emb="lookup")
    ids = random_ids(2, 7)
    ids[1, 3] = word
    with pytest.raises(IndexError):
        net(ids)


@pytest.mark.parametrize("sizes", [
    dict(length=9, spare_positions=2),  # spare rows are none of them
    dict(length=1),  # one position would be broadcast
    dict(length=9, emb="bloom", head="hash-mlm", order=False),
])
def test_model_fails_at_more_positions_than_it_has(sizes):
    net = tiny_model(**sizes)
    with pytest.raises(AssertionError, match="^ids: expected at most . positions, got 10"):
        net.encode(random_ids(1, 10))


# Encoder


@pytest.mark.parametrize("emb, places", [
    ("proj", [0, 1, 2]),
    ("bloom", [0, 0, 1, 1, 2, 2]),  # deviation 2: an item's m = 2 vectors share its position
])
def test_encode_matches_sum_norm_and_layers(emb, places):
    """Word, position and type, norm, layers. The spare rows of the position table come first."""
    net = stir(tiny_model(emb=emb, spare_positions=2))
    ids = random_ids(4, 3)
    rows = 2 + torch.tensor(places)
    x = net.embed(ids).view(4, len(rows), 12)  # (B, L·m, d)
    x = x + net.inputs.positions.weight[rows] + net.inputs.types.weight[0]
    x = net.inputs.norm(x)
    for layer in net.layers:
        x = layer(x)
    assert_near(net.encode(ids).flatten(1, 2), x)


@pytest.mark.parametrize("emb, m", [("proj", 1), ("bloom", 2)])
def test_text_of_one_position_has_the_vectors_of_one(emb, m):
    """It has no second text, for which a type row would be read."""
    net = stir(tiny_model(emb=emb, types=2))
    ids = torch.tensor([[SEP], [X]])
    x = net.embed(ids).view(2, 1, m, 12)
    x = x + net.inputs.positions.weight[0] + net.inputs.types.weight[0]
    assert_near(embed_inputs(net, ids), net.inputs.norm(x))


def test_layer_has_the_settings_of_the_config():
    """Other ones than those that LSHSelfAttention has by itself; its tests say what they do."""
    layer = tiny_model(**LSH, lsh_fill="mask", lsh_pairs="upper", act="relu").layers[1]
    attention = layer.attention
    assert isinstance(layer.act, torch.nn.ReLU)
    assert attention.planes.shape == (3, 2, 3, 4)  # H, n, r, e
    assert attention.num_buckets == 5
    assert attention.fill == "mask"
    assert attention.pairs == "upper"


@pytest.mark.parametrize("changes", [
    dict(head="sr", emb="bloom"),  # a mask of m vectors for each item
    dict(head="classify", pool="cls"),
    dict(head="classify", pool="mean", emb="bloom"),  # the mean of items, not of vectors
])
def test_padding_of_text_changes_nothing(changes):
    net = stir(tiny_model(**changes))
    ids = random_ids(3, 7)
    padded = F.pad(ids, (0, 2), value=PAD)
    out = net(padded, key_mask=padded != PAD)
    if net.config.head == "sr":
        out = out[:, :7]
    assert_near(out, net(ids))


@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_classify_sees_one_vector_of_a_text(pool):
    """The mean of its positions, or the first."""
    net = tiny_model(head="classify", pool=pool)
    x = torch.randn(3, 7, 1, net.config.width)  # (B, L, m, d)
    one = x.mean(1) if pool == "mean" else x[:, 0]
    assert_near(logits_of(net, x), logits_of(net, one.unsqueeze(1)))


def test_mean_of_a_text_of_padding_is_finite():
    net = tiny_model(head="classify", pool="mean")
    ids = torch.tensor([[X, Y], [PAD, PAD]])
    assert net(ids, key_mask=ids != PAD).isfinite().all()


@pytest.mark.parametrize("ids, order, start", [
    (PAIR, True, 3),
    ([CLS, X, SEP, Y, X, SEP, PAD], True, 7),  # a window of text: a document ends with one [SEP]
    ([CLS, X, Y, X, SEP, SEP, PAD], True, 7),  # one that ends with a document
    ([CLS, X, Y, X, Y, SEP, SEP], True, 7),
    ([CLS, X, SEP, SEP, UNK, SEP, PAD], True, 3),  # the second text has an unknown word alone
    ([CLS, X, Y, SEP, SEP, SEP, PAD], True, 4),  # it is empty
    (PAIR, False, 7),  # a set has no second text
])
def test_second_type_row_is_of_the_second_text_of_a_pair(ids, order, start):
    """[SEP] [SEP] begins it. All m = 2 vectors of an item have its type."""
    net, _ = bloom_model(types=2, order=order)
    ids = torch.tensor([ids])
    before = embed_inputs(net, ids)  # (1, 7, m, d)
    net.inputs.types.weight.data[1] += torch.randn(12)
    is_changed = (embed_inputs(net, ids) != before).any(3)[0]  # (7, m)
    assert is_changed.tolist() == [[False] * 2] * start + [[True] * 2] * (7 - start)


# Heads


POSITIONS = torch.tensor([2, 9])  # in row 0 and in row 1 of ids (2, 7)


@pytest.mark.parametrize("emb, head, tied, shape", [
    ("lookup", "mlm", True, (31,)),
    ("lookup", "mlm", False, (31,)),
    ("bloom", "hash-mlm", True, (2, 14)),  # each of m vectors scores the rows of all blocks
    ("proj", "hash-mlm", False, (5, 7)),  # k = 5 hashes of R = 7 buckets, of one vector
    ("median", "hash-mlm", True, (5, 7)),
])
def test_masked_lm_head_scores_the_rows_of_its_table(emb, head, tied, shape):
    """[BERT §3.1] Dense layer, GELU, norm, table. [SB §2.3] [CM]"""
    net = stir(tiny_model(emb=emb, head=head, tied=tied))
    ids = random_ids(2, 7)
    table = net.inputs.embedding.weight if tied else net.head.table
    x = net.encode(ids).flatten(0, 1)[POSITIONS]  # (2, m, d)
    expected = net.head.norm(F.gelu(net.head.transform(x))) @ table.T + net.head.bias
    assert_near(net(ids, masked_positions=POSITIONS), expected.reshape(2, *shape))


@pytest.mark.parametrize("emb", ["proj", "bloom"])
def test_head_of_hashes_refuses_a_sample_of_rows(emb):
    """Ten rows could be regrouped as two of each of five hashes."""
    net = tiny_model(emb=emb, head="hash-mlm")
    with pytest.raises(AssertionError, match="rows: a sample"):
        net(random_ids(2, 7), masked_positions=POSITIONS, rows=torch.arange(10))


def test_logits_of_evaluation_are_float32():
    """In bfloat16 hundreds of items tie, which training may have and a ranking may not."""
    net, _ = bloom_model()
    ids = random_ids(2, 7)
    with torch.autocast("cpu", torch.bfloat16):
        out = net(ids, masked_positions=POSITIONS)
        training_out = net.train()(ids, masked_positions=POSITIONS)
    assert training_out.dtype == torch.bfloat16
    assert out.dtype == torch.float32
    assert not torch.equal(out, out.bfloat16().float())  # digits that bfloat16 does not have


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_a_model_in_half_precision_are_float32(dtype):
    net, _ = bloom_model()
    ids = random_ids(2, 7)
    expected = net(ids, masked_positions=POSITIONS)
    out = net.to(dtype)(ids, masked_positions=POSITIONS)
    assert out.dtype == torch.float32
    assert (out - expected).abs().max() <= 0.05 * expected.abs().max()


@pytest.mark.parametrize("head, pool", [
    ("classify", "mean"),
    ("classify", "cls"),
    ("sr", "cls"),
])
def test_other_heads_see_mean_of_item_vectors(head, pool):
    net, _ = bloom_model(head=head, order=True, pool=pool)
    ids = random_ids(3, 7)
    x = net.encode(ids).mean(2, keepdim=True)  # (3, 7, 1, d)
    assert_near(net(ids), logits_of(net, x))


# Dropout. In evaluation there is none: all models above have 0.1


@pytest.mark.parametrize("head", ["sr", "classify"])
def test_dropout_acts_on_embeddings_branches_and_head(head):
    """At a rate of 1 it leaves no embeddings, the residual alone, and the bias of the head.

    test_attention.py tests what SelfAttention does with its rate.
    """
    net = stir(tiny_model(head=head, dropout=0.5)).train()
    assert net.layers[0].attention.dropout == 0.5
    for module in net.modules():
        if isinstance(module, torch.nn.Dropout):
            assert module.p == 0.5
            module.p = 1.0
    ids = random_ids(3, 7)
    x = torch.randn(3, 7, 12)
    layer = net.layers[0]
    *_, bias = net.head.parameters()
    assert not embed_inputs(net, ids).any()
    assert torch.equal(layer(x), layer.norm2(layer.norm1(x)))
    assert (net(ids) == bias).all()


# Initial weights and weight decay


def test_sinusoids_match_hand_example():
    """[V §3.5] Width 4 has the rates 1 and 1/100."""
    expected = [math.sin(1), math.cos(1), math.sin(0.01), math.cos(0.01)]
    assert model.sinusoids(3, 4)[1].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("emb", ["proj", "mean", "median"])  # an exact std, and measured ones
def test_positions_start_as_sinusoids_at_one_ratio_to_words(emb):
    """2.25 standard deviations of a word's vector, which test_embeddings.py measures."""
    net = tiny_model(emb=emb)
    std = net.inputs.embedding.initial_std()
    expected = 2.25 * std * model.sinusoids(9, 12)
    assert_near(net.inputs.positions.weight, expected)


@pytest.mark.parametrize("head, name, std", [
    ("sr", "layers.0.attention.qkv", 0.04),
    ("sr", "head.linear", 0.02),
    ("span", "head.linear", 0.04),
    ("classify", "head.out", 0.04),
])
def test_matrices_start_at_scaled_std(head, name, std):
    """Deviation 1: 0.02 · √(768/192) = 0.04. A normal truncated at 2 std has 0.8796 of its std."""
    net = tiny_model(head=head, width=192, ffn=64)
    linear = net.get_submodule(name)
    assert abs(linear.weight.std() / (0.8796 * std) - 1) < 0.2
    assert not linear.bias.any()


def test_parameter_groups_decay_no_biases_and_norms():
    """[HF Table 4]"""
    net = tiny_model(head="hash-mlm")
    decayed, plain = model.parameter_groups(net, 0.01)
    assert decayed["weight_decay"] == 0.01
    assert plain["weight_decay"] == 0
    assert len(decayed["params"]) + len(plain["params"]) == len(list(net.parameters()))
    plain_ids = [id(p) for p in plain["params"]]
    for name, parameter in net.named_parameters():
        is_plain = "norm" in name or name.endswith("bias")
        assert (id(parameter) in plain_ids) == is_plain, name


# Hyperplanes and checkpoints


def test_weights_of_lsh_model_equal_those_of_the_dense_model():
    sparse = tiny_model(**LSH)
    dense = tiny_model()
    for a, b in zip(sparse.parameters(), dense.parameters(), strict=True):
        assert torch.equal(a, b)


def test_hyperplanes_are_of_the_seed_the_layer_and_the_head():
    """test_pretrain.py tests that a run has those of its seed, and that steps redraw them."""
    net = tiny_model(**LSH)  # of seed 0
    torch.manual_seed(1)
    other = Model(net.config)
    planes = net.layers[0].attention.planes
    assert not torch.equal(planes, other.layers[0].attention.planes)
    assert not torch.equal(planes, net.layers[1].attention.planes)
    assert not torch.equal(planes[0], planes[1])


def test_models_of_one_checkpoint_share_no_weights():
    net = tiny_model()
    loaded = load_model(dict(config=asdict(net.config), model=net.state_dict()))
    loaded.inputs.norm.weight.data.zero_()
    assert net.inputs.norm.weight.all()


def test_weight_that_the_model_lacks_is_refused_by_its_own_name():
    net = tiny_model()
    weights = net.state_dict() | {"adapter.weight": torch.zeros(3)}
    with pytest.raises(ValueError, match="^weights: .*\n.*Unexpected key.*: \"adapter.weight\""):
        load_model(dict(config=asdict(net.config), model=weights))


@pytest.mark.parametrize("changes, message", [
    # the 96 GiB are not allocated before they are refused
    (dict(emb="emb", rows=2**31), "^weights: .*\n.*size mismatch for inputs.embedding.weight"),
    (dict(emb_rows=7), "^config: expected fields of Config, got emb_rows"),
])
def test_load_model_refuses_what_does_not_fit(changes, message):
    net = tiny_model()
    config = asdict(net.config) | changes
    with pytest.raises(ValueError, match=message):
        load_model(dict(config=config, model=net.state_dict()))
