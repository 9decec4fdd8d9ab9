"""canine.py: equal to transformers, numbers by hand, names of the release, and a fine-tuning that is read back."""

import functools
import json

import pytest
import torch
import torch.nn.functional as F

import finetune
from baselines.canine import PRIMES, Canine, CanineConfig, CharacterTokenizer, hash_rows, load_released, released_names
from data.corpus import read_rows
from infer import Predictor
from runtime import InputError
from tests.support import assert_refused, run_main
from tests.test_finetune import QUICK, own  # noqa: F401  a fixture
from tokenizer import build_inputs

SIZES = dict(layers=2, width=24, heads=3, ffn=40, rows=320, positions=320, length=300, types=3, dropout=0.0)
RELEASED = dict(num_hidden_layers=2, hidden_size=24, num_attention_heads=3, intermediate_size=40,
                num_hash_buckets=320, type_vocab_size=3, model_type="canine")


def make_canine():
    model = Canine(CanineConfig(**SIZES)).eval()
    for i, weight in enumerate(model.parameters()):
        wave = torch.sin(torch.arange(weight.numel(), dtype=torch.float64) * (1.3 + 0.1 * i))  # by arithmetic
        weight.data = (0.3 * wave).float().view_as(weight) + (weight.ndim == 1)
    return model


def write_release(folder, model, more=(), prefix="", **settings):
    """Write a Canine as the release does, each weight cut into its parts; return the folder."""
    parts = {prefix + name: part.clone() for ours, names in released_names(model.config).items()
             for name, part in zip(names, model.state_dict()[ours].chunk(len(names)))} | dict(more)
    torch.save({name: part for name, part in parts.items() if part is not None}, folder / "pytorch_model.bin")
    return (folder / "config.json").write_text(json.dumps(RELEASED | settings)) and str(folder)


@pytest.mark.parametrize("length", [7, 30, 131, 300])
def test_outputs_equal_those_of_transformers(length, tmp_path):
    """Characters and pooled vector, with types and padding, through the files that the library writes."""
    library, ours = pytest.importorskip("transformers"), make_canine()
    theirs = library.CanineModel.from_pretrained(write_release(tmp_path, ours))  # in evaluation mode
    theirs.save_pretrained(tmp_path / "safe")  # model.safetensors
    config, weights = load_released(tmp_path / "safe")
    assert config == CanineConfig(**SIZES | dict(length=309, dropout=0.1))
    assert all(torch.equal(weights[name], ours.state_dict()[name]) for name in weights)
    points, types = torch.randint(0x110000, (3, length)), torch.randint(3, (3, length))
    mask, more = torch.arange(length) < torch.tensor([[length], [length * 2 // 3], [5]]), (0, 312 - length)
    with torch.no_grad():
        (x, pooled), expected = ours.contextualize(points + 5, types, mask), theirs(points, mask.long(), types)
        assert (pooled - expected.pooler_output).abs().max() < 1e-5
        assert (x[mask] - expected.last_hidden_state[mask]).abs().max() < 1e-5
        expected = theirs(F.pad(points, more), F.pad(mask, more).long())  # encode: whatever the padding
        assert (ours.encode(points + 5, mask, use_upsampling=False) - expected.pooler_output).abs().max() < 1e-5


def test_outputs_equal_golden_numbers():
    """What transformers 5.23 gives with these weights for a text of 11 characters and padding."""
    ids = torch.tensor([[1, *CharacterTokenizer().ids("hé, 世界 ok").tolist(), 2, 0]])
    x, pooled = make_canine().contextualize(ids, (torch.arange(12) > 5).long()[None], ids > 0)
    golden = [0.8757, -0.2264, -0.2116, -0.2009, -0.1776, -0.3991, -0.4047, -0.159, -0.5064, -0.1726, -0.8115]
    assert [*x[0, :11, 7].tolist(), *pooled[0, :2].tolist()] == pytest.approx([*golden, 0.9146, 0.7848], abs=1e-4)


def test_hash_rows_match_hand_example():
    """"a" is 97: 98 · 31 = 3,038 and 98 · 113 = 11,074; "中" is 20,013: 20,014 · 31 - 37 · 16,384 = 14,226."""
    (a, character), model = hash_rows(torch.tensor([ord("a"), ord("中")]), 16_384), make_canine()
    assert a.tolist() == [3038, 4214, 5782, 5978, 7154, 9506, 10094, 11074] and character[0] == 14_226
    expected = [model.embedding.weight[320 * i + 98 * prime % 320] for i, prime in enumerate(PRIMES)]
    assert torch.equal(model.embed(torch.tensor([97 + 5]))[0], torch.cat(expected))


def test_parameter_counts_match_formulas():
    """CANINE-C has 132,082,944; with 2,048 positions 121.07 million, where HashFormers prints 121.0M."""
    with torch.device("meta"):
        model, (d, f) = Canine(CanineConfig()), (768, 3072)
    layer, count = 4 * (d * d + d) + 2 * d * f + f + d + 4 * d, lambda part: sum(p.numel() for p in part.parameters())
    total = 2 * 16_384 * d + 16 * d + 3 * 2 * d + 14 * layer + (4 + 8 + 1) * d * d + 3 * d
    assert count(model.embedding) == 12_582_912 and count(model) - count(model.head) == total == 132_082_944


def test_pairs_have_code_points_and_types_of_canine_and_do_not_depend_on_the_batch():
    tokenizer, model = CharacterTokenizer(), make_canine()
    with pytest.raises(ValueError, match="length: expected"):
        CanineConfig(length="5")
    assert tokenizer.ids("a\ud800𝄞").tolist() == [102, 0xD805, 0x1D123]  # lone surrogates and all planes
    ids, _ = build_inputs(*tokenizer.ids_of_texts(["No", "go!"]), 300, tokenizer.separator)
    points, types = [0xE000, *b"No", 0xE001, *b"go!", 0xE001, *[0] * 8], torch.tensor([[0] * 4 + [1] * 4 + [0] * 8])
    expected, pooled = model.contextualize(torch.tensor([points]) + 5, types, torch.arange(16)[None] < 8)
    for width in (8, 9, 12, 130, 261):
        longer, mask = F.pad(torch.from_numpy(ids).long()[None], (0, width - 8)), torch.arange(width)[None] < 8
        torch.testing.assert_close(model.encode(longer, mask)[:, :8], expected[:, :8])
        torch.testing.assert_close(model(longer, mask), model.head(pooled))


def test_released_names_round_trip_and_others_are_refused(tmp_path):
    model, name, key = make_canine(), "projection.conv.weight", "encoder.layer.0.attention.self.key.weight"
    state, buffer = model.state_dict(), {"canine.char_embeddings.position_ids": torch.arange(320)}
    _, weights = load_released(write_release(tmp_path, model, buffer, "canine."))
    assert weights.keys() == state.keys() - {"head.1.weight", "head.1.bias"} and len(weights) == 63
    assert all(torch.equal(weights[name], state[name]) for name in weights)
    for more in {name: None}, dict(x=weights["norm.bias"]), {name: weights["up.weight"][1:]}, {key: torch.ones(2)}, 0:
        with pytest.raises(ValueError, match="expected config.json and weights of a CANINE, got"):
            load_released(write_release(tmp_path, model, more or {}, downsampling_rate=4 if more else 2))


def test_fine_tuning_learns_a_word_and_is_read_back(own, tmp_path, monkeypatch):  # noqa: F811
    """From scratch it is above chance; infer.py gives the same score. --weights starts from the release's."""
    monkeypatch.setattr(finetune, "CanineConfig", functools.partial(CanineConfig, **SIZES | dict(layers=1)))
    flags, model = ["--preset", "canine", *QUICK, *own, "--seeds", "1", "--out", str(tmp_path / "out")], make_canine()
    score = run_main(finetune.main, *flags).result["tasks"]["own"]
    assert score["max"] > 90 > 60 > score["majority"] and score["bag_of_words"] is None
    predictor, rows = Predictor(str(tmp_path / "out")), list(read_rows(own[own.index("--dev") + 1]))
    right = sum(predictor.classify(row["text"])[0][0] == row["label"] for row in rows)
    assert 100 * right / len(rows) == pytest.approx(score["max"])
    with pytest.raises(InputError, match="--vectors: expected a model of words"):
        predictor.embed(["one text"])
    flags += ["--weights", write_release(tmp_path, model)]
    data = finetune.prepare_task(run := finetune.build_run(finetune.parser().parse_args(flags)), "own")
    start = finetune.build_model(run, "own", data).state_dict()
    assert all(torch.equal(start[name], w) for name, w in model.state_dict().items() if name[:5] != "head.")
    for more in ("--pool mean", "--bag 9", "--weights .", "--preset proformer", "--from_scratch"):
        assert_refused(finetune.main, [*flags, *more.split()], "--", more.split()[0][2:5])
    assert_refused(finetune.main, [*flags[:2], *own[4:], "--task", "squad"], "--task: expected a task with labels")
