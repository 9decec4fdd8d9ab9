"""Tests of objectives.py: corruption, losses and counts by hand, rates, ranks, sampled softmax."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import objectives
from bloom import BloomMap, SketchMap, beam_search, exhaustive, hash_logp
from hashing import MD5
from model import Config, Model
from objectives import IGNORE_INDEX as IGNORE
from objectives import OBJECTIVES, MaskedHashes, MaskedWords, SampledWords, ShuffleRandom
from tests.support import bloom_model, make_words, run_main, tiny_model
from tokenizer import CLS, MASK, PAD, SEP, HashTokenizer
from tokenizer import FIRST_WORD_ID as F0

SR = ShuffleRandom(None, first_word_id=F0)
TEXT, SETS = (MaskedWords(Config(emb="lookup", head="mlm", order=o), 0.15, MASK, F0) for o in (True, False))


def random_batch(rows=257, length=63, vocabulary=5_003):
    """Return ids with special tokens in two columns, noise and random words."""
    rng = np.random.default_rng(0)
    ids, random_words = torch.from_numpy(rng.integers(F0, vocabulary, (2, rows, length)))
    ids[:, 0], ids[:, 40] = CLS, SEP
    return ids, torch.from_numpy(rng.random((3, rows, length), np.float32)), random_words


def test_shuffle_random_rates_and_rows():
    """10 % shuffled, 9 % random; a row keeps its words but for the random ones; labeled is what changed."""
    ids, noise, random_words = random_batch()
    inputs, labels = SR.corrupt(ids, noise, random_words)
    is_word, n = ids >= F0, 257 * 61
    assert ((labels == IGNORE) == ~is_word).all() and (inputs[~is_word] == ids[~is_word]).all()
    assert ((inputs == ids) == (labels == 0))[is_word].all()
    # a chosen word may draw its own position: of about 6 chosen words of a row one on average
    for label, share in ((1, 0.10 - 1 / 61), (2, 0.09)):
        assert abs((labels == label).sum() / n - share) < 6 * math.sqrt(share * (1 - share) / n) + 1e-3
    for before, after, label in zip(ids, inputs, labels):  # nothing comes from another row
        assert torch.equal(before[label != 2].sort().values, after[label != 2].sort().values)


def test_mask_words_rates():
    """Of 15 %: 80 % [MASK], 10 % another word, 10 % unchanged."""
    ids, noise, random_words = random_batch()
    inputs, labels = TEXT.corrupt(ids, noise, random_words)
    chosen = labels != IGNORE
    assert torch.equal(labels, ids.where(chosen, IGNORE)) and torch.equal(inputs[~chosen], ids[~chosen])
    n = int(chosen.sum())
    for part, n, share in ((chosen & (ids >= F0), 257 * 61, 0.15), (inputs == MASK, n, 0.8),
                           (chosen & (inputs == random_words), n, 0.1), (chosen & (inputs == ids), n, 0.1)):
        assert abs(part.sum() / n - share) < 6 * math.sqrt(share * (1 - share) / n) + 2 / 5_003


def test_corruption_thresholds():
    """The shares on either side of each: 0.10; 0.15, of it 0.8, of the rest one half."""
    ids, other = torch.full((1, 1), F0), torch.full((1, 1), F0 + 1)
    for noise, expected in (((0.1499, 0.9, 0.0), (F0 + 1, F0)), ((0.1501, 0.9, 0.0), (F0, IGNORE)),
                            ((0.0, 0.7999, 0.0), (MASK, F0)), ((0.0, 0.8001, 0.0), (F0 + 1, F0)),
                            ((0.0, 0.9, 0.4999), (F0 + 1, F0)), ((0.0, 0.9, 0.5001), (F0, F0))):
        inputs, labels = TEXT.corrupt(ids, torch.tensor(noise).view(3, 1, 1), other)
        assert (inputs.item(), labels.item()) == expected
    for noise, label in ((0.0999, 2), (0.1001, 0)):
        assert SR.corrupt(ids, torch.tensor([0.9, noise, 0.0]).view(3, 1, 1), other)[1].item() == label
        row = torch.tensor([[F0, F0 + 1]])
        inputs, _ = SR.corrupt(row, torch.tensor([[[noise] * 2], [[1.0, 1.0]], [[0.9, 0.1]]]), row)
        assert torch.equal(inputs, row.flip(1) if label else row)


def test_masked_set_has_at_least_one_masked_item():
    """A set of three is masked nowhere in 0.85^3 = 61 % of its turns; then at its lowest noise."""
    ids, noise = torch.tensor([[F0, F0 + 1, F0 + 2, PAD]]).repeat(4_000, 1), torch.rand(3, 4_000, 4)
    scored, as_text = (objective.corrupt(ids, noise, ids)[1] != IGNORE for objective in (SETS, TEXT))
    is_none, lowest = ~as_text.any(1), F.one_hot(noise[0, :, :3].argmin(1), 4).bool()
    assert (scored == torch.where(is_none.unsqueeze(1), lowest, as_text)).all()
    assert abs(is_none.float().mean() - 0.85 ** 3) < 6 * 0.49 / 4_000 ** 0.5


def test_shuffle_random_loss_and_metrics_by_hand():
    logits = torch.tensor([[[2., 0, 0], [2, 0, 0], [0, 0, 2], [0, 9, 0]]])
    loss, confusion = SR.evaluate(lambda inputs: logits, None, torch.tensor([[0, 1, 2, IGNORE]]))
    assert math.isclose(loss, 3 * math.log(math.exp(2) + 2) - 4, rel_tol=1e-6)
    assert confusion.tolist() == [1, 0, 0, 1, 0, 0, 0, 0, 1]
    # intact: predicted twice, once rightly, and once the label: F1 = 2 / 3; shuffled 0; random 1
    assert SR.metrics(confusion) == pytest.approx(dict(accuracy=2 / 3, majority=1 / 3, f1_intact=2 / 3,
                                                       f1_shuffled=0, f1_random=1, macro_f1=5 / 9))


def test_masked_words_loss_and_recall_by_hand():
    logits = torch.cat([torch.eye(40)[[6]], torch.arange(40.)[None].remainder(28)])

    def evaluate(inputs, labels, objective=TEXT):
        return objective.evaluate(lambda inputs, masked_positions: logits, inputs, labels)

    labels = torch.tensor([[F0 + 1, IGNORE, F0]])  # rows 6 and 5
    loss, counts = evaluate(labels, labels)
    assert math.isclose(loss, math.log(math.e + 39) - 1 + logits[1].logsumexp(0) - 5, rel_tol=1e-6)
    assert counts.tolist() == [1, 1, 1, 2]  # row 5 comes after 20 others
    assert TEXT.loss(lambda inputs, masked_positions: logits, labels, labels) == loss
    logits[1, 5] = 26.5  # two rows have 27, none of them a special token's
    assert evaluate(labels, labels)[1].tolist() == [1, 2, 2, 2]
    # a set has an item once: of rows 7 .. 39, which score more than row 6, all but row 38 are visible
    inputs = torch.tensor([[MASK] + [F0 + i for i in range(2, 35) if i != 33]])
    labels, logits = torch.tensor([[F0 + 1] + [IGNORE] * 32]), torch.arange(40.)[None]
    assert evaluate(inputs, labels)[1].tolist() == [0, 0, 0, 1]
    assert evaluate(inputs, labels, SETS)[1].tolist() == [0, 1, 1, 1]


def test_masked_hashes_loss_and_counts_by_hand():
    model, tokenizer = bloom_model()
    bloom_map, codes = tokenizer.bloom_map, torch.from_numpy(tokenizer.codes())
    objective = MaskedHashes(model.config, None, MASK, F0, codes, bloom_map)
    inputs = torch.tensor([[6, MASK, 8], [MASK, 14, PAD]])
    labels = torch.tensor([[IGNORE, 10, IGNORE], [13, IGNORE, IGNORE]])
    loss, counts = objective.evaluate(model, inputs, labels)
    logits = model(inputs, masked_positions=torch.tensor([1, 3]))
    logp, R = logits.log_softmax(-1), model.config.buckets
    expected = -sum(logp[i, j, j * R + codes[x, j]] for i, x in enumerate((10, 13)) for j in range(2)) / 2
    torch.testing.assert_close(torch.stack([loss, objective.loss(model, inputs, labels)]), expected.expand(2))
    exclude = torch.tensor([[1, -1, 3], [-1, 9, -1]])  # what the sets show
    certified = beam_search(hash_logp(logits, bloom_map), bloom_map, exclude=exclude)[2]
    best, _ = exhaustive(hash_logp(logits, bloom_map), bloom_map, exclude=exclude)
    ranks = [row.index(item) if item in row else 99 for row, item in zip(best.tolist(), (5, 8))]
    assert counts.tolist()[:4] == [sum(rank < k for rank in ranks) for k in (1, 10, 20)] + [certified.sum()]
    assert counts[-1] == 2 and objective.metrics([1, 2, 3, 4, 2.5, 5]) == {
        "rec@1": 0.2, "rec@10": 0.4, "rec@20": 0.6, "certified": 0.8, "hashes_right": 0.5}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_batch_without_labels_has_no_loss(name):
    model = tiny_model(emb=dict(sr="proj", mlm="lookup", sampled="lookup").get(name, "median"),
                       head=OBJECTIVES[name].head)
    objective = OBJECTIVES[name](model.config, None, MASK, F0, torch.zeros(30, 5, dtype=torch.int32), None, 7)
    batch = torch.arange(18).view(2, 9), torch.full((2, 9), IGNORE)
    loss, counts = objective.evaluate(model, *batch)
    assert loss == objective.loss(model, *batch) == 0 and counts.tolist() == [0] * objective.num_counts
    assert all(math.isfinite(value) for value in objective.metrics(counts.tolist()).values())


@pytest.mark.parametrize("has_exclude", [False, True])
def test_rank_words_matches_scoring_by_hand(has_exclude):
    """Against every score one by one; words with the digest of the correct one count against it."""
    logp = torch.randn(300, 3, 4).log_softmax(-1)  # three parts of at most 128 positions
    digests = torch.randint(0, 4, (50, 3))  # 64 digests: some words share theirs
    words, exclude = torch.randint(0, 50, (300,)), torch.randint(-1, 50, (300, 2)) if has_exclude else None
    scores = torch.stack([logp[:, j, digests[:, j]] for j in range(3)]).sum(0)  # (300, 50)
    ranks = objectives.rank_words(logp, digests, words, exclude)
    for i, word in enumerate(words.tolist()):
        others = set(range(50)) - {word} - set(exclude[i].tolist() if has_exclude else [])
        equal = {w for w in others if (digests[w] == digests[word]).all()}
        assert ranks[i] == len(equal | {w for w in others - equal if scores[i, w] > scores[i, word]})
    assert len(digests.unique(dim=0)) < 50 and 0 in ranks


def sample(n, num_samples, scores):
    """Return the sampled softmax's loss of one position whose label is row 2 of n, and the sampled rows."""
    c, seen = Config(emb="lookup", head="mlm", rows=F0 + n), []
    objective = SampledWords(c, None, MASK, F0, num_samples=num_samples)

    def model(inputs, masked_positions, rows):
        seen.extend((rows[1:] - F0).tolist())
        return scores(rows - F0).unsqueeze(0)

    return objective.loss(model, None, torch.tensor([[F0 + 2]])).double(), np.array(seen)


def test_sampled_softmax_is_unbiased_against_the_full_softmax():
    """The sum over samples has the sum over all rows but the correct one as its mean; evaluation is exact."""
    n, scores = 113, torch.randn(113)
    scores[2] = 3  # a likely answer, which is often sampled: counted twice it would show
    q = np.log1p(1 / np.arange(1, n + 1)) / math.log(n + 1)
    shares = np.bincount(sample(n, 200_000, scores.__getitem__)[1], minlength=n) / 200_000
    assert abs(q.sum() - 1) < 1e-9 and (abs(shares - q) < 6 * np.sqrt(q / 200_000)).all()
    losses = torch.stack([sample(n, 7, scores.__getitem__)[0] for _ in range(2_000)])
    sums, expected = losses.expm1() * scores[2].exp(), scores.exp().sum() - scores[2].exp()
    assert sums.std() > 0.1 * expected and abs(sums.mean() - expected) < 6 * sums.std() / math.sqrt(2_000)
    loss, rows = sample(5_281_889, 99, torch.zeros_like)  # rare rows: q is small and still right
    weights = math.log(5_281_890) / np.log1p(1 / (rows[rows != 2] + 1.0)) / 99
    assert loss.item() == pytest.approx(math.log(1 + weights.sum()), rel=1e-5)
    assert SampledWords.evaluate is MaskedWords.evaluate


def test_expected_loss_by_hand():
    """Of S+R by the labels that came out, rows of confusion counts: here 8, 4 and 4; else by the words."""
    counts = np.array([4, 2, 1, 1])
    assert SR.expected_loss(None, [5, 2, 1, 0, 3, 1, 4, 0, 0]) == (3, pytest.approx(1.5 * math.log(2)))
    c = Config(emb="median", head="hash-mlm", rows=31, buckets=7)
    assert MaskedWords(c).expected_loss(counts, None) == (31, pytest.approx(1.75 * math.log(2)))
    targets = F.pad(torch.tensor([[0, 3], [1, 3], [1, 3], [1, 3]]), (0, 0, F0, 0))
    objective = MaskedHashes(c, None, MASK, F0, targets)  # buckets: half and half, and all in one
    assert objective.expected_loss(counts, None) == (7, pytest.approx(math.log(2) / 2))
    assert objective.expected_loss(counts[:1], None) == (7, 0)  # a shorter vocabulary
    items = Config(emb="bloom", head="hash-mlm", buckets=3 + 5)
    items = MaskedHashes(items, None, MASK, F0, targets, BloomMap(6, 2))
    assert items.expected_loss(counts, None)[0] == 2 * 8  # an item's token is one of all rows


def test_masked_hashes_training_scores_no_vocabulary():
    """No tensor of floats that the backward pass needs has as many numbers as there are items."""
    model, tokenizer = bloom_model(n=40_009, alpha=97)
    objective = MaskedHashes(model.config, None, MASK, F0, torch.from_numpy(tokenizer.codes()), tokenizer.bloom_map)
    inputs, labels, sizes = torch.tensor([[F0 + 1, MASK]]), torch.tensor([[IGNORE, F0 + 5]]), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        objective.loss(model, inputs, labels).backward()
    assert model.embedding.weight.numel() in sizes and max(sizes) < 40_009 / 3


@pytest.mark.parametrize("emb", ["median", "weighted", "proj"])
def test_overfitted_batch_is_decoded_to_its_words(emb):
    """[CM] From k hashes back to the very words, among thousands that were never seen, with a certificate."""
    c = Config(emb=emb, head="hash-mlm", rows=61, bits=32, buckets=41, weights=97, layers=1, width=48,
               heads=2, ffn=96, length=12, dropout=0.0)
    tokenizer, words, model = HashTokenizer(c, hash=MD5()), make_words(3_000), Model(c)
    tokenizer.ids(words)
    model.set_codes(torch.from_numpy(tokenizer.codes()))
    digests = tokenizer.sketch_targets(words)
    objective = MaskedHashes(c, None, MASK, F0, F.pad(torch.from_numpy(digests), (0, 0, F0, 0)))
    ids, labels = F0 + torch.arange(60).view(5, 12) % 31 * 7, torch.full((5, 12), IGNORE)  # words come again
    labels[:, [2, 7]] = ids[:, [2, 7]]
    inputs, optimizer = ids.masked_fill(labels > 0, MASK), torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        (objective.loss(model, inputs, labels) / 10).backward()
        optimizer.step()
    with torch.no_grad():
        assert objective.evaluate(model.eval(), inputs, labels)[1].tolist() == [10, 10, 10, 0, 10, 10]
        logits = model(inputs, masked_positions=(labels.flatten() > 0).nonzero().squeeze(1))
    sketch = SketchMap(digests, 41)
    best, _, certified, num_scored = beam_search(hash_logp(logits, sketch), sketch, 1, 2, None)
    assert certified.all() and (num_scored < 3_000).all() and (best[:, 0] + F0 == labels[labels > 0]).all()


def test_demo_prints_labeled_examples():
    lines = run_main(objectives.main).out.splitlines()
    assert 0 < len(lines) <= 25 and max(map(len, lines)) <= 100
    assert "shuffled" in lines[2] and "[MASK]" in lines[3] and "[0, 2]" in lines[5]
    assert [len(line.split()[-9:]) for line in lines[:3]] == [9] * 3  # bench/figures.py draws these three
