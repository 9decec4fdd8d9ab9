"""data/batches.py: windows of text, segments of item sets, padding; all are functions of (seed, step)."""

from collections import Counter

import numpy as np
import pytest
import torch

from data.batches import ItemSetBatches, TextBatches, length_batches, pad_batch, sample_noise, text_windows

CLS, SEP, FIRST = 1, 2, 5
WORDS = np.arange(FIRST, 200)


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(0).integers(FIRST, 200, 30_011).astype(np.uint16)


@pytest.fixture(scope="module")
def pages():
    """ids, offsets of 101 pages of 1 to 11 items out of 120, and train and held-out numbers."""
    rng = np.random.default_rng(1)
    parts = [[*rng.permutation(np.arange(FIRST, FIRST + 120))[:rng.integers(1, 12)], SEP] for _ in range(101)]
    offsets = np.append(0, np.cumsum([len(part) for part in parts]))
    order = rng.permutation(101)
    return np.concatenate(parts).astype(np.uint16), offsets, order[13:], order[:13]


def item_batches(pages, length=5, batch_size=8, last=FIRST + 120):
    return ItemSetBatches(*pages, length, batch_size, np.arange(FIRST, last), 3, (FIRST, last))


def items_of(pages, number):
    return pages[0][pages[1][number]:pages[1][number + 1] - 1].tolist()


def test_noise_is_that_of_the_global_batch():
    noise, words = sample_noise([7, 2, 0], 13, 11, WORDS, slice(None))
    for rows in (slice(2, 6), np.array([9, 0, 4])):
        part, random_words = sample_noise([7, 2, 0], 13, 11, WORDS, rows)
        assert (part == noise[:, rows]).all() and (random_words == words[rows]).all()
    assert noise.shape == (3, 13, 11) and 0 <= noise.min() < noise.max() < 1 and FIRST <= words.min()


def test_text_windows_cover_the_text_and_leave_held_out_text_apart():
    batches = TextBatches(np.arange(30_011), 17, 13, WORDS, 3, CLS)  # every ID is its own place
    train, held_out = text_windows(30_011, 17)
    held_out = set((held_out[:, None] + np.arange(16)).ravel().tolist())
    assert len(train) == 18 and 0.015 < len(held_out) / 30_011 < 0.05
    epochs = []
    for numbers in np.arange(3 * batches.steps_per_epoch).reshape(3, -1).tolist():
        windows = torch.cat([batches.get_batch(step, slice(0, 13))[0] for step in numbers])
        assert (windows[:, 0] == CLS).all() and (windows[:, 1:].diff() == 1).all()
        places = windows[:, 1:].flatten().tolist()
        assert len(set(places)) == len(places) > 0.9 * (30_011 - len(held_out))  # no text twice in an epoch
        assert not held_out & set(places)
        epochs.append(windows[:, 1].tolist())
    assert len({min(starts) for starts in epochs}) > 1 and epochs[0] != sorted(epochs[0])  # shifted, shuffled


def test_text_batch_depends_on_seed_and_step_alone(ids):
    def batch(step, rows, seed=3, skip=()):
        batches = TextBatches(ids, 17, 13, WORDS, seed, CLS)
        for other in skip:
            batches.get_batch(other, slice(0, 13))
        return batches.get_batch(step, rows)

    first, whole = batch(5, slice(2, 6), skip=(0, 300, 4)), batch(5, slice(0, 13))
    assert first[0].shape == first[2].shape == first[1].shape[1:] == (4, 17)
    assert all((a[..., 2:6, :] == b).all() for a, b in zip(whole, first))
    for other in (batch(6, slice(2, 6)), batch(5, slice(2, 6), seed=4)):
        assert not any((a == b).all() for a, b in zip(other, first))
    # held-out windows are the same for every seed
    a, b = (TextBatches(ids, 17, 13, WORDS, seed, CLS).eval_batch(slice(1, 4)) for seed in (3, 4))
    assert all(map(torch.equal, a, b)) and a[0].shape == (3, 17)


def test_too_little_text_is_a_value_error(ids):
    for n, batch_size, message in ((47, 1, "--data: expected at least 48"), (500, 99, "--batch: expected")):
        with pytest.raises(ValueError, match=message):
            TextBatches(ids[:n], 17, batch_size, WORDS, 3, CLS)


def test_item_segments_are_runs_of_their_pages(pages):
    batches = item_batches(pages)
    train = [number for number in pages[2] if len(items_of(pages, number)) > 1]
    num_read, starts = Counter(), set()
    assert batches.steps_per_epoch == len(train) // 8
    for step in range(7 * batches.steps_per_epoch):
        numbers, (ids, noise, random_words) = batches._pages(step), batches.get_batch(step, slice(0, 8))
        assert ids.shape == random_words.shape == noise.shape[1:] and random_words.min() >= FIRST
        for row, number in zip(ids.tolist(), numbers):
            page, row = items_of(pages, number), [i for i in row if i]
            starts.add(start := page.index(row[0]))
            assert len(row) == min(5, len(page)) and row == page[start:start + len(row)]
        num_read.update(numbers.tolist())
    assert set(num_read) == set(train) and max(num_read.values()) <= 7 and starts == set(range(7))
    assert (batches.get_batch(3, slice(2, 5))[0] == batches.get_batch(3, np.arange(2, 5))[0]).all()


def test_held_out_pages_mask_one_item_each(pages):
    batches = item_batches(pages)
    ids, noise, _ = batches.eval_batch(slice(None))
    masked, is_open = noise[0] == 0, noise[:2].sum(0) == 2
    assert len(ids) == batches.num_eval == sum(len(items_of(pages, page)) > 1 for page in pages[3])
    assert (masked.sum(1) == 1).all() and (ids[masked] >= FIRST).all() and (masked ^ is_open).all()
    assert len(set(masked.float().argmax(1).tolist())) > 2  # not always the same position
    for row, number in zip(ids.tolist(), batches.held_out):
        assert number in pages[3] and set(row) - {0} <= set(items_of(pages, number))
    few = batches.eval_batch(slice(0, 4))[0]
    assert (few == ids[:4, :few.shape[1]]).all()


def test_smaller_vocabulary_leaves_out_the_other_items(pages):
    batches = item_batches(pages, batch_size=3, last=FIRST + 60)
    for step in range(batches.steps_per_epoch):
        ids, *_ = batches.get_batch(step, slice(0, 3))
        assert ((ids == 0) | (ids >= FIRST) & (ids < FIRST + 60)).all() and ((ids > 0).sum(1) >= 2).all()
    with pytest.raises(ValueError, match="--data: expected 113 sets of two items or more"):
        item_batches(pages, batch_size=101)


def test_micro_batches_hold_pages_of_a_size(pages):
    batches = item_batches(pages, length=9, batch_size=24)
    micro = batches.micro_batch_rows(2, [slice(12, 18), slice(18, 24)])
    assert sorted(np.concatenate(micro)) == list(range(12, 24)) and [len(part) for part in micro] == [6, 6]
    small, large = (batches.get_batch(2, rows)[0] for rows in micro)
    assert small.shape[1] < large.shape[1] and (small > 0).sum(1).max() <= (large > 0).sum(1).min()
    whole = {tuple(i for i in row if i) for row in batches.get_batch(2, slice(12, 24))[0].tolist()}
    assert whole == {tuple(i for i in row if i) for row in [*small.tolist(), *large.tolist()]}


def test_length_batches_hold_all_examples_once_and_little_padding():
    lengths = np.random.default_rng(0).integers(1, 90, 1_003)
    in_order, shuffled = (length_batches(lengths, 7, rng) for rng in (None, np.random.default_rng(5)))
    for batches in (in_order, shuffled):
        assert sorted(np.concatenate(batches)) == list(range(1_003)) and len(batches) == 144
        assert sum(lengths[batch].max() * len(batch) for batch in batches) < 1.2 * lengths.sum()
    assert (np.diff(lengths[np.concatenate(in_order)]) >= 0).all()
    assert (np.diff([lengths[batch].max() for batch in shuffled]) < 0).any()


@pytest.mark.parametrize("max_length,width", [(None, 5), (7, 7), (6, 6), (64, 8), (4, 5)])
def test_pad_batch_width(max_length, width):
    ids, mask = pad_batch([np.arange(1, n + 1, dtype=np.int32) for n in (3, 5, 2)], max_length)
    assert ids.dtype == torch.int64 and ids[2].tolist() == [1, 2] + [0] * (width - 2)
    assert mask.sum(1).tolist() == [3, 5, 2] and (mask == (ids != 0)).all()
    assert pad_batch([np.array([4, 9])] * 3, None)[1] is None
