"""bag.py: by hand, the drawn encoder, hashes of codes, and the bag within a model and a fine-tuning."""

import math

import pytest
import torch

from baselines.bag import HashedBag
from tests.support import tiny_model


def test_hashed_bag_matches_hand_example():
    """Rows 1, 2, 1 with idf 3 / ln 3 and 4 / ln 2: 30 · (3 · (1, 2) + 4 · (3, -1)) / 5 = (90, 12) are added."""
    bag = HashedBag(4, 2).eval()
    bag.weight.data = torch.tensor([[9.0, 9], [1, 2], [3, -1], [9, 9]])
    bag.idf[:] = torch.tensor([9, 3 / math.log(3), 4 / math.log(2), 9])
    logits, mask = torch.tensor([[0.5, -0.5]]), torch.tensor([[True, True, True, False]])
    expected = torch.tensor([[90.5, 11.5]])
    torch.testing.assert_close(bag(torch.tensor([[1, 2, 1, 0]]), mask, logits), expected)
    two = bag(torch.tensor([[2, 1, 1], [3, 3, 3]]), None, logits.expand(2, 2))  # rows of another text do not count
    torch.testing.assert_close(two, torch.cat([expected, logits + 270]))
    assert torch.equal(bag(torch.tensor([[1, 2]]), torch.zeros(1, 2, dtype=torch.bool), logits), logits)  # no word


def test_idf_matches_hand_example_and_starts_as_1():
    """Rows 0, 1, 2, 3 are in 3, 2, 1, 0 of three texts, however often in each: 1 + ln(4 / (1 + n))."""
    bag = HashedBag(4, 2)
    assert bag.idf.tolist() == [1] * 4 and "idf" in bag.state_dict()
    bag.set_idf([torch.tensor(rows) for rows in ([0, 1, 1, 0, 1], [0, 1], [0, 2, 2])])
    torch.testing.assert_close(bag.idf, 1 + torch.tensor([1, 4 / 3, 2, 4]).log())


def test_hashed_bag_in_training_drops_the_encoder_of_half_the_texts():
    bag, n = HashedBag(4, 3), 10_000
    out = bag(torch.zeros(n, 2, dtype=torch.int64), None, torch.ones(n, 3))
    assert {*out.unique().tolist()} == {0, 2} and torch.equal(out[:, 0], out[:, 2])
    assert abs(out[:, 0].mean() - 1) < 6 / math.sqrt(n)


def test_hash_codes_are_uniform_and_the_same_on_every_machine():
    """100,000 codes in 1,000 rows: the variance of the counts is the mean, 100, within six sigma."""
    codes = torch.randint(256, (100_000, 16), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    rows = HashedBag(1_000, 2).hash_codes(codes)
    assert torch.equal(rows, HashedBag(1_000, 5).hash_codes(codes.clone()))
    assert 0 <= rows.min() and rows.max() < 1_000
    assert abs(rows.bincount(minlength=1_000).double().var() / 100 - 1) < 6 * math.sqrt(2 / 1_000)
    assert HashedBag(2**16, 2).hash_codes(torch.arange(12).view(3, 4)).tolist() == [60143, 2108, 9609]


@pytest.mark.parametrize("emb", ["proj", "emb", "median", "lookup"])
def test_model_with_bag_starts_as_one_without_and_ignores_padding(emb):
    plain, model = (tiny_model(emb=emb, head="classify", labels=3, bag=bag).eval() for bag in (0, 64))
    model.load_state_dict(plain.state_dict(), strict=False)
    ids = torch.randint(5, 9, (2, 7))
    torch.testing.assert_close(model(ids), plain(ids))
    model.bag.weight.data.normal_()
    assert not torch.allclose(model(ids), plain(ids))
    mask = torch.arange(7) < 5
    torch.testing.assert_close(model(ids, mask.expand(2, 7)), model(ids[:, :5]))
    long, short = torch.randint(5, 9, (2, 30)), model.config.length  # the encoder reads 9 positions, the bag all
    mask = torch.arange(30) < torch.tensor([[30], [20]])
    expected = model.bag(model.bag_rows[long], mask, plain(long[:, :short]))
    torch.testing.assert_close(model(long, mask), expected)
    with pytest.raises(ValueError, match="at most 9 positions"):
        plain(long)
