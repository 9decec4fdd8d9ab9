"""canine.py: recorded outputs, by hand, released names, and a fine-tuning read back."""

import json
import re

import pytest
import torch
import torch.nn.functional as F

from baselines import canine
from baselines.canine import Canine, CanineConfig, CharacterTokenizer, load_released
from support.common import InputError
from tests.helpers import assert_refused, run_main
from tests.test_finetune import QUICK, own  # noqa: F401  a fixture
from tokenizer import CLS, SEP, build_inputs

SIZES = dict(layers=2, width=24, heads=3, ffn=40, rows=320, positions=320, length=300, types=3,
             dropout=0.0)
RELEASED_SIZES = dict(model_type="canine", num_hidden_layers=2, hidden_size=24,
                      num_attention_heads=3, intermediate_size=40, num_hash_buckets=320,
                      type_vocab_size=3)


def make_canine():
    """Return a Canine whose weights are sine waves: equal numbers with every version of torch."""
    model = Canine(CanineConfig(**SIZES)).eval()
    for i, weight in enumerate(model.parameters()):
        angles = torch.arange(weight.numel(), dtype=torch.float64) * (1.3 + 0.1 * i)
        weight.data = (0.3 * torch.sin(angles)).float().view_as(weight)
        if weight.ndim == 1:
            weight.data += 1
    return model


def release(model):
    """Return the weights of a Canine by their released names."""
    weights = {}
    for ours, theirs in canine.released_names(model.config).items():
        parts = model.state_dict()[ours].chunk(len(theirs))
        for name, part in zip(theirs, parts):
            weights[name] = part.clone()
    return weights


def write_release(folder, weights):
    """Write the files of a release; return the folder."""
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(RELEASED_SIZES))  # transformers reads it
    return str(folder)


def pool(model, ids, types, mask):
    """Return the pooled vector, without forward's padding."""
    windows = model.encode(ids, types, mask)
    return model.pooler(windows[:, 0]).tanh()


def assert_equal_weights(weights, model):
    """Assert that weights are those of a model, bit for bit, without its head."""
    state = model.state_dict()
    assert weights.keys() == state.keys() - {"head.1.weight", "head.1.bias"}
    assert all(torch.equal(weights[name], state[name]) for name in weights)


def test_release_of_transformers_is_read(tmp_path):
    """Law: what save_pretrained writes, model.safetensors, gives the weights back."""
    transformers = pytest.importorskip("transformers")
    folder = write_release(tmp_path, release(make_canine()))
    library_model = transformers.CanineModel.from_pretrained(folder)
    library_model.save_pretrained(tmp_path / "safe")

    weights = load_released(tmp_path / "safe", CanineConfig(**SIZES))

    assert_equal_weights(weights, make_canine())


def test_outputs_equal_golden_numbers():
    """What transformers 5.23 gives with these weights for 11 characters and one of padding."""
    characters = CharacterTokenizer().ids("hé, 世界 ok").tolist()
    ids = torch.tensor([[1, *characters, 2, 0]])
    types = torch.tensor([[0] * 6 + [1] * 6])

    pooled = pool(make_canine(), ids, types, ids > 0)

    assert pooled[0, :2].tolist() == pytest.approx([0.9146, 0.7848], abs=1e-4)


def test_hash_rows_match_hand_example():
    """Code points are 97 and 20,013: 98 · 31 = 3,038; 20,014 · 31 = 37 · 16,384 + 14,226."""
    points = torch.tensor([ord("a"), ord("中")])
    rows = canine.hash_rows(points, 16_384)
    assert rows[0].tolist() == [3038, 4214, 5782, 5978, 7154, 9506, 10094, 11074]
    assert rows[1, 0] == 14_226


def test_canine_c_has_as_many_parameters_as_the_release():
    """The released encoder has 132,082,944, of which 12,582,912 are hash tables."""
    with torch.device("meta"):
        model = Canine(CanineConfig())
    model.head = None
    assert sum(weight.numel() for weight in model.parameters()) == 132_082_944
    assert model.embedding.weight.numel() == 12_582_912


def test_ids_stand_for_code_points():
    """[PAD] [CLS] [SEP] [UNK] [MASK], as released, then all of Unicode, lone surrogates too."""
    ids = CharacterTokenizer().ids("a\ud800𝄞").tolist()
    assert ids == [97 + 5, 0xD800 + 5, 0x1D11E + 5]
    points = canine.code_points(torch.tensor([*range(5), *ids]))
    assert points.tolist() == [0, 0xE000, 0xE001, 0xE004, 0xE003, 97, 0xD800, 0x1D11E]


def test_pairs_have_one_separator_and_types_of_canine():
    """Types are 1 after the first [SEP], and 0 in padding."""
    first, second = CharacterTokenizer().ids_of_texts(["No", "gone"])
    ids, _ = build_inputs(first, second, 300, CharacterTokenizer.separator)
    ids = torch.from_numpy(ids).long().unsqueeze(0)  # (1, 9)

    ids, types, mask = canine.pad_inputs(ids)

    assert ids.tolist() == [[CLS, *first, SEP, *second, SEP, 0, 0, 0]]
    assert types.tolist() == [[0] * 4 + [1] * 5 + [0] * 3]
    assert torch.equal(mask, ids > 0)


@pytest.mark.parametrize("width", [
    9,  # one more window
    130,  # another block, of padding alone
])
@torch.no_grad()
def test_outputs_do_not_depend_on_the_batch(width):
    """Law: padding to a longer text of the batch changes no logit."""
    model = make_canine()
    ids = torch.tensor([[1, 102, 2, 300, 400, 500, 2]])  # the last window is cut
    longer = F.pad(ids, (0, width - 7))

    logits = model(longer, longer > 0)

    torch.testing.assert_close(logits, model(ids))


def test_released_weights_round_trip(tmp_path):
    """Names may have a prefix, and older releases hold the numbers of positions."""
    model = make_canine()
    weights = {f"canine.{name}": weight for name, weight in release(model).items()}
    weights["canine.char_embeddings.position_ids"] = torch.arange(320)

    ours = load_released(write_release(tmp_path, weights), CanineConfig(**SIZES))

    assert len(ours) == 63
    assert_equal_weights(ours, model)


@pytest.mark.parametrize("name, weight", [
    ("pooler.dense.bias", None),  # a missing weight
    ("x", torch.ones(24)),  # a weight of no part
])
def test_release_of_another_model_is_refused(name, weight, tmp_path):
    weights = release(make_canine())
    weights[name] = weight
    if weight is None:
        del weights[name]
    folder = write_release(tmp_path, weights)
    with pytest.raises(InputError, match=re.escape(folder)):
        load_released(folder, CanineConfig(**SIZES))


@pytest.fixture
def flags(own, tmp_path, monkeypatch):  # noqa: F811
    """Flags of a quick fine-tuning of a tiny CANINE on a file of two labels."""
    monkeypatch.setitem(canine.SHAPES, "canine", CanineConfig(**SIZES | dict(layers=1)))
    return [*QUICK, *own, "--seeds", "1", "--out", str(tmp_path / "out")]


def test_release_of_another_size_is_refused(flags, tmp_path):
    weights = release(Canine(canine.SHAPES["canine"]))
    weights["pooler.dense.bias"] = torch.ones(23)
    folder = write_release(tmp_path, weights)
    assert_refused(canine.main, [*flags, "--weights", folder], folder)


def test_fine_tuning_from_scratch_learns_a_word(flags):
    done = run_main(canine.main, *flags)
    score = done.result["tasks"]["own"]
    assert score["majority"] < 60
    assert score["mean"] > 90
    assert score["bag_of_words"] is None


def test_fine_tuning_starts_from_released_weights(flags, tmp_path, monkeypatch):
    """Law: the first forward pass has the weights of the release, but for the head."""
    monkeypatch.setitem(canine.SHAPES, "canine", CanineConfig(**SIZES))
    model = make_canine()
    folder = write_release(tmp_path, release(model))
    starts = []

    def train(model, *rest):
        starts.append({name: weight.clone() for name, weight in model.state_dict().items()})
        raise InputError("stop")

    monkeypatch.setattr(canine, "train_and_score", train)
    run_main(canine.main, *flags, "--weights", folder)

    [start] = starts
    weights = {name: weight for name, weight in start.items() if not name.startswith("head.")}
    assert_equal_weights(weights, model)


def test_released_weights_have_an_out_of_their_own(flags, monkeypatch):
    """Else a run after one from fresh weights would be refused."""
    def check_out(out, settings):
        raise InputError(out)

    monkeypatch.setattr(canine, "check_out", check_out)
    monkeypatch.setattr(canine, "load_released", lambda folder, config: {})
    without_out = flags[:-2]
    assert_refused(canine.main, [*without_out, "--weights", "in/release"], "out/release-own")


@pytest.mark.parametrize("more, fragment", [
    ("--pool mean", "--pool"),  # only the first position is trained to classify
    ("--epochs 0", "--epochs"),  # nothing is saved that could be scored
    ("--weights .", "pytorch_model.bin"),  # a folder without a release
    ("--task squad", "--task: invalid choice"),  # no answers
    ("--compile", "--compile"),  # it would change nothing
])
def test_flags_that_do_not_fit_are_refused(more, fragment, flags):
    assert_refused(canine.main, [*flags, *more.split()], fragment)
