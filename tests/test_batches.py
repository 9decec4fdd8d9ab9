"""Tests of data/batches.py: what a batch reads, what is held out, and that (seed, step) decides."""

import numpy as np
import pytest
import torch

from data.batches import TextBatches, length_batches, pad_batch, text_windows
from data.items import ItemSetBatches
from tokenizer import CLS, FIRST_WORD_ID, SEP

ALL = slice(None)  # rows
NUM_IDS = 30_011
# 101 item sets of 1 to 11 items, of which 13 are held out. Each item occurs once
SIZES = np.random.default_rng(1).integers(1, 12, 101)
ITEMS = FIRST_WORD_ID + np.arange(SIZES.sum())
PAGE_OF_ITEM = np.repeat(np.arange(101), SIZES)
HELD_OUT_PAGES = np.arange(13)
TRAIN_PAGES = np.arange(13, 101)


def text_batches(num_ids=NUM_IDS, seed=3, batch_size=13, short=0.0):
    """Return TextBatches with L 17 of a text in which every ID is its own place."""
    ids = np.arange(num_ids)
    return TextBatches(ids, np.ones(num_ids), 17, batch_size, seed, short)


def set_batches(seed=3, batch_size=13, length=5, num_items=len(ITEMS)):
    """Return ItemSetBatches of the first items."""
    ends = np.cumsum(SIZES)
    ids = np.insert(ITEMS, ends, SEP)  # after each page
    offsets = np.append(0, ends + np.arange(1, 102))
    return ItemSetBatches(
        ids, offsets, TRAIN_PAGES, HELD_OUT_PAGES, np.ones(num_items), length, batch_size, seed)


def read_epoch(batches, epoch=0):
    """Return the IDs of each batch of an epoch."""
    first = epoch * batches.steps_per_epoch
    steps = range(first, first + batches.steps_per_epoch)
    return [batches.get_batch(step, ALL).ids for step in steps]


def pages_of(ids):
    """Return the page of each row, and check that the row is a run of its items."""
    pages = []
    for row in ids.numpy():
        row = row[row > 0]
        [page] = set(PAGE_OF_ITEM[row - FIRST_WORD_ID])
        assert (np.diff(row) == 1).all()
        pages.append(page)
    return pages


# Windows of text


def test_text_epoch_reads_runs_of_the_text_once():
    windows = torch.cat(read_epoch(text_batches()))  # (W, 17)
    places = windows[:, 1:]
    assert (windows[:, 0] == CLS).all()
    assert (places.diff() == 1).all()
    assert 0.9 * NUM_IDS < len(places.unique()) == places.numel()


def test_text_epochs_differ_in_order_and_shift():
    """A word has another position, and stands beside others, in the next epoch."""
    batches = text_batches()
    first = torch.cat(read_epoch(batches, 0))[:, 1]
    second = torch.cat(read_epoch(batches, 1))[:, 1]
    assert (first.diff() < 0).any()
    assert first.min() != second.min()


def test_held_out_text_is_never_trained_on():
    batches = text_batches()
    held_out = batches.read_windows(batches.eval_starts)[:, 1:]
    for epoch in range(20):  # each has its own shift
        places = torch.cat(read_epoch(batches, epoch))[:, 1:]
        assert not torch.isin(places, held_out).any()


def test_held_out_text_is_about_a_fiftieth_from_every_part():
    _, starts = text_windows(NUM_IDS, 17)
    parts = starts * 18 // NUM_IDS  # the text is cut into 18 stretches
    assert set(parts) == set(range(18))
    assert 0.015 < 16 * len(starts) / NUM_IDS < 0.05


@pytest.mark.parametrize("make, sizes, message", [
    (text_batches, dict(num_ids=47), "expected at least 48 words"),
    (set_batches, dict(batch_size=101), "expected 101 training sets of two items"),
])
def test_batches_of_too_little_data_are_refused(make, sizes, message):
    with pytest.raises(ValueError, match=message):
        make(**sizes)


def test_words_of_a_batch_are_known_and_random_ones_occur():
    """A vocabulary of pieces has some that the corpus never uses. All other IDs are [UNK]."""
    batches = TextBatches(np.arange(999), np.array([999, 0, 3]), 17, batch_size=4, seed=0)
    draw = batches.get_batch(0, ALL)
    assert set(draw.random_words.unique().tolist()) == {FIRST_WORD_ID, FIRST_WORD_ID + 2}
    assert draw.ids.max() <= FIRST_WORD_ID + 2


# Both kinds: (seed, step) decides, and ranks share a global batch


def test_share_of_the_training_windows_is_cut():
    """Law: of 5,200 windows 0.3 · 14/15, as one length of fifteen is the whole: 1,456 ± 32."""
    whole = text_batches()
    batches = text_batches(short=0.3)
    sizes = []
    for step in range(400):
        draw = batches.get_batch(step, ALL)
        expected = whole.get_batch(step, ALL)
        assert torch.equal(draw.key_mask, draw.ids > 0)
        assert expected.key_mask is None
        for window, full in zip(draw.ids, expected.ids):
            size = int((window > 0).sum())
            if not torch.equal(window, full):
                assert torch.equal(window[:size - 1], full[:size - 1])
                assert window[size - 1] == SEP
                assert not window[size:].any()
                sizes.append(size)
    assert 1_330 < len(sizes) - sizes.count(17) < 1_580
    assert set(sizes) == set(range(3, 18))
    assert torch.equal(batches.eval_batch(ALL).ids, whole.eval_batch(ALL).ids)


def cut_batches(seed=3):
    """Return TextBatches of which some windows are padded, so that there is a mask to compare."""
    return text_batches(seed=seed, short=0.5)


def list_parts(draw):
    """Return the tensors of a Draw."""
    return [part for part in draw if part is not None]


both_kinds = pytest.mark.parametrize("make", [cut_batches, set_batches])


@both_kinds
def test_batch_depends_on_seed_and_step_alone(make):
    """A resumed run sees what an uninterrupted one does."""
    used = make()
    used.get_batch(300, ALL)
    batch = list_parts(make().get_batch(5, ALL))
    next_step = list_parts(make().get_batch(6, ALL))
    other_seed = list_parts(make(seed=4).get_batch(5, ALL))
    assert len(batch) == 4
    assert all(map(torch.equal, batch, list_parts(used.get_batch(5, ALL))))
    assert not any(map(torch.equal, batch, next_step))
    assert not any(map(torch.equal, batch, other_seed))


@both_kinds
@pytest.mark.parametrize("read", [
    lambda batches, rows: batches.get_batch(5, rows),
    lambda batches, rows: batches.eval_batch(rows),
], ids=["train", "eval"])
def test_rank_gets_its_rows_of_the_global_batch_and_of_the_held_out_set(make, read):
    batches = make()
    rows = np.array([3, 0, 1])
    whole = list_parts(read(batches, ALL))
    part = list_parts(read(batches, rows))
    width = part[0].shape[1]  # of these sets
    assert len(part) == len(whole) >= 3
    for a, b in zip(whole, part):
        assert torch.equal(a[..., rows, :width], b)


@both_kinds
def test_eval_batch_is_the_same_for_every_seed(make):
    """So the evaluations of two runs can be compared."""
    rows = slice(1, 4)
    batch = list_parts(make().eval_batch(rows))
    assert all(map(torch.equal, batch, list_parts(make(seed=4).eval_batch(rows))))


# Segments of item sets


def test_set_epoch_reads_a_segment_of_each_page_once():
    """[SB §3.1] At most L items; pages of one item are left out. The next epoch has others."""
    pages = []
    first, second = [read_epoch(set_batches(batch_size=1), epoch) for epoch in (0, 1)]
    assert set(map(str, first)) != set(map(str, second))
    for ids in first:
        [page] = pages_of(ids)
        assert ids.shape == (1, min(5, SIZES[page]))
        pages.append(page)
    assert sorted(pages) == TRAIN_PAGES[SIZES[13:] > 1].tolist()
    assert pages != sorted(pages)


def test_set_segments_begin_anywhere_in_their_page():
    page = SIZES.argmax()
    fractions = np.linspace(0, 1, 100, endpoint=False)
    segments = set_batches().read_segments(np.full(100, page), fractions)
    starts = segments[:, 0].unique()
    assert len(starts) == SIZES[page] - 5 + 1


def test_set_eval_batch_masks_one_item_of_each_held_out_page():
    ids, _, _, _, is_masked = set_batches().eval_batch(ALL)
    row, column = torch.nonzero(is_masked, as_tuple=True)
    assert sorted(pages_of(ids)) == np.flatnonzero(SIZES[:13] > 1).tolist()
    assert row.tolist() == list(range(len(ids)))
    assert (ids[row, column] > 0).all()
    assert len(column.unique()) > 2  # not always the same position


def test_set_micro_batches_hold_pages_of_a_size():
    """The rows of a rank are dealt anew: small pages, then large ones."""
    batches = set_batches(length=11, batch_size=24)
    small, large = batches.divide_rows(2, np.arange(12, 24), 6)
    ids = batches.get_batch(2, ALL).ids
    sizes = (ids > 0).sum(1)
    assert len(small) == len(large)
    assert sorted([*small, *large]) == list(range(12, 24))
    assert sizes[small].max() <= sizes[large].min()


# Examples of any length


@pytest.mark.parametrize("rng", [None, np.random.default_rng(5)])
def test_length_batches_hold_all_examples_once_and_little_padding(rng):
    lengths = np.random.default_rng(0).integers(1, 90, 403)
    examples = [np.ones(length) for length in lengths]
    batches = length_batches(examples, 7, rng)
    widths = [lengths[batch].max() for batch in batches]
    assert sorted(np.concatenate(batches)) == list(range(403))
    assert 7 * sum(widths) < 1.2 * lengths.sum()
    assert (widths == sorted(widths)) == (rng is None)


def test_pad_batch_fills_with_zeros_to_the_longest():
    ids, mask = pad_batch([np.array([7, 8, 9]), np.array([6])])
    assert ids.tolist() == [[7, 8, 9], [6, 0, 0]]
    assert torch.equal(mask, ids != 0)
    _, mask = pad_batch([np.array([4, 9]), np.array([3, 8])])
    assert mask is None  # nothing is padded
