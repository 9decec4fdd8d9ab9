"""bag.py: the formula, idf, the switch, hashes of codes, and the bag within a model."""

import math

import pytest
import torch
import torch.nn.functional as F

from baselines.bag import BagOfWords, HashedBag
from tests.support import tiny_model


def test_bag_matches_the_formula_text_by_text():
    """Law: 30 · Σ x w / √Σ x² of its own words is added. Without words nothing is."""
    bag = HashedBag(13, 3).eval()
    bag.weight.data.normal_()
    bag.idf.uniform_(1, 5)
    rows = torch.randint(13, (7, 11))
    mask = torch.rand(7, 11) < 0.6
    mask[4] = False
    logits = torch.randn(7, 3)

    output = bag(rows, mask, logits)

    for text in range(7):
        words = rows[text][mask[text]]
        total = 0
        squares = 1e-30  # not 0 in a text without words
        for row in range(13):
            count = (words == row).sum()
            x = bag.idf[row] * torch.log(1 + count)
            total += x * bag.weight[row]
            squares += x * x
        expected = logits[text] + 30 * total / squares.sqrt()
        torch.testing.assert_close(output[text], expected)


def test_idf_starts_as_1_and_matches_hand_example():
    """Rows 0, 1, 2, 3 are in 3, 2, 1, 0 of three texts, however often: 1 + ln(4 / (1 + n_r))."""
    bag = HashedBag(4, 2)
    assert bag.state_dict()["idf"].tolist() == [1, 1, 1, 1]
    texts = [
        torch.tensor([0, 1, 1, 0, 1]),
        torch.tensor([0, 1]),
        torch.tensor([0, 2, 2]),
    ]

    bag.set_idf(texts)

    expected = [1, 1 + math.log(4 / 3), 1 + math.log(2), 1 + math.log(4)]
    assert bag.idf.tolist() == pytest.approx(expected)


def test_bag_in_training_drops_the_encoder_of_half_the_texts():
    """Law: a text's logits are all 0, or all doubled, each for half of the texts (six sigma)."""
    n = 10_000
    rows = torch.zeros(n, 2).long()
    logits = HashedBag(4, 3)(rows, None, torch.ones(n, 3))
    assert set(logits.unique().tolist()) == {0, 2}
    assert torch.equal(logits[:, 0], logits[:, 2])
    assert abs(logits[:, 0].mean() - 1) < 6 / math.sqrt(n)


def test_hash_codes_are_uniform():
    """Law: 100,000 codes fill 1,000 rows with the variance of their mean, 100 (six sigma)."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(256, (100_000, 16), generator=generator, dtype=torch.uint8)
    counts = HashedBag(1_000, 2).hash_codes(codes).bincount()
    assert len(counts) == 1_000
    variance = counts.double().var()
    assert abs(variance / 100 - 1) < 6 * math.sqrt(2 / 1_000)


def test_hash_codes_are_the_same_on_every_machine():
    codes = torch.arange(12).view(3, 4)
    rows = HashedBag(2**16, 2).hash_codes(codes)
    assert rows.tolist() == [60143, 2108, 9609]


@pytest.mark.parametrize("emb", [
    "proj",  # codes are bytes of bits
    "emb",  # one hash bucket
    "median",  # a bucket by each hash function
    "lookup",  # the row of a vocabulary
])
def test_model_with_bag_starts_as_one_without_and_reads_whole_texts(emb):
    """The encoder reads the first 9 positions, the bag all. Neither reads padding."""
    plain = tiny_model(emb=emb, head="classify", labels=3)
    model = tiny_model(emb=emb, head="classify", labels=3, bag=64)
    model.load_state_dict(plain.state_dict(), strict=False)
    ids = torch.randint(5, 9, (2, 30))
    mask = torch.arange(30) < torch.tensor([[30], [20]])
    logits = plain(ids[:, :9])
    torch.testing.assert_close(model(ids, mask), logits)

    model.bag.weight.data.normal_()

    expected = model.bag(model.bag_rows[ids], mask, logits)
    torch.testing.assert_close(model(ids, mask), expected)
    assert not torch.allclose(expected, logits)


def test_bag_of_words_has_a_row_for_each_token_id():
    """Law: with no encoder it is the bag of the IDs, and its idf counts the training texts."""
    texts = [
        [1, 5, 6, 5],
        [1, 5],
    ]
    control = BagOfWords(texts, 8, 3, 9).eval()
    control.bag.weight.data.normal_()
    ids = torch.tensor([[1, 5, 6, 7], [1, 1, 0, 0]])
    mask = ids > 0

    logits = control(ids, mask)

    assert control.bag.weight.shape == (8, 3)
    rare = 1 + math.log(3 / 2)
    new = 1 + math.log(3)
    assert control.bag.idf.tolist() == pytest.approx([new, 1, new, new, new, 1, rare, new])
    torch.testing.assert_close(logits, control.bag(ids, mask, torch.zeros(2, 3)))


def test_bag_of_words_learns_the_word_that_tells():
    """Words 5 and 6 tell the label, words 7 and 8 do not."""
    ids = torch.tensor([[1, 5, 7], [1, 5, 8], [1, 6, 7], [1, 6, 8]])
    labels = torch.tensor([0, 0, 1, 1])
    control = BagOfWords(ids, 9, 2, 3)
    optimizer = torch.optim.Adam(control.parameters(), 0.01)
    for _ in range(20):
        loss = F.cross_entropy(control(ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert control(ids).argmax(1).tolist() == [0, 0, 1, 1]
    assert loss < 0.2
