"""Superbloom: sizes of the paper's models, beam search and exhaustive search, recall.

`sizes` counts parameters beside what the paper prints. `bloom` measures times. The other tables
show recall@k, the share of held-out items among the k best of all items, beside baselines of the
same size and beside neighbors by co-occurrence, which need no training.

    python -m bench.superbloom sizes             or bloom
    python -m bench.superbloom entities --data pages.jsonl        or depth
    python -m bench.superbloom beams --runs out/bloom-items       or prior

Notation:
    N items   m hashes of an item   R buckets   d width   P held-out sets
"""

import itertools
import math
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from bench import harness
from bench.harness import COMPARE, RUNS, compare, count_sizes, load_corpus, train_variant
from bloom import BloomMap
from coherent import popularity_prior
from data.corpus import Corpus
from data.items import ItemSetBatches, split_pages
from data.neighbors import NEIGHBORS, rank_hidden_items
from metrics import count_hits, measure_recall, rank_in_lists
from model import PRESETS
from search import beam_search, exhaustive, hash_logp
from support.common import InputError, blame
from tokenizer import FIRST_WORD_ID, MASK

NUM_ITEMS = 5_281_889  # of [SB Table 1]

# Sizes

SIZES = (  # [SB Tables 1, 3 and 4]: model, items, alpha, d, heads, dF, layers, what is printed
    ("Table 1: baseline", NUM_ITEMS, 1, 48, 4, 1024, 12, "248M"),
    ("Table 1: sampled-softmax", NUM_ITEMS, 1, 512, 8, 2048, 12, "2.6G"),
    ("Table 1: superbloom", NUM_ITEMS, 50, 768, 12, 3072, 12, "229M"),
    ("Table 3: baseline-l1", 500_000, 1, 256, 1, 1024, 1, "123M"),
    ("Table 3: baseline-l12", 500_000, 1, 256, 8, 1024, 12, "132M"),
    ("Table 3: superbloom-d256l1", 500_000, 20, 256, 1, 1024, 1, "13M"),
    ("Table 3: superbloom-d384l1", 500_000, 20, 384, 1, 1536, 1, "21M"),
    ("Table 3: superbloom-d256l12", 500_000, 20, 256, 8, 1024, 12, "21M"),
    ("Table 4: baseline-h64", 1_000_000, 1, 64, 4, 256, 12, "62.6M"),
    ("Table 4: hash40-h512", 1_000_000, 40, 512, 8, 2048, 12, "62.3M"),
    ("Table 4: baseline-h256", 1_000_000, 1, 256, 8, 1024, 12, "254.4M"),
    ("Table 4: hash20-h1024", 1_000_000, 20, 1024, 16, 4096, 12, "246.3M"),
)
SIZES_COLUMNS = """
    model                        | name    | s
    rows                         | rows    | ,
    ours, without special tokens | total   | ,
    with the pooler              | paper   | ,
    in 2^20 or 2^30              | shown   | s
    paper prints                 | printed | s
"""


def bench_sizes(args):
    """Count the parameters of [SB Tables 1, 3 and 4], where M and G are 2^20 and 2^30."""
    for name, num_items, alpha, d, heads, ffn, layers, printed in SIZES:
        is_text = name.startswith("Table 4")
        shape = dict(width=d, heads=heads, ffn=ffn, layers=layers, act="relu", types=2)
        # on text there are positions, in their order
        shape |= dict(order=is_text, length=512 if is_text else 32)
        if alpha == 1:
            rows = num_items
            shape |= dict(emb="lookup", head="mlm", rows=rows)
        else:
            buckets = math.ceil(num_items / alpha)
            rows = 2 * buckets
            shape |= dict(emb="bloom", head="hash-mlm", hashes=2, buckets=buckets)
        total = count_sizes(shape)["total"]
        paper = total + d * d + d  # BERT's pooler, which their formula has and nothing uses
        # the paper's M and G are binary, as its printed sizes show
        if paper > 2**30:
            shown = f"{paper / 2**30:.1f}G"
        else:
            shown = f"{paper / 2**20:.{int(is_text)}f}M"
        yield dict(name=name, rows=rows, total=total, paper=paper, shown=shown, printed=printed)


# Times

BLOOM = """
    map, distributions         | name        | s
    beam, ms per position      | beam        | .3f
    items scored               | scored      | ,.0f
    certified %                | certified   | .0f
    until certified, ms        | sure        | .3f
    items scored               | scored_sure | ,.0f
    k = 1, ms                  | best        | .3f
    exhaustive, torch.topk, ms | plain       | .1f
    × beam                     | ratio       | .0f
    × until certified          | ratio_sure  | .0f
    exhaustive by blocks, ms   | all         | .1f
    × beam                     | ratio_all   | .0f
    equal to exhaustive        | exact       | s
"""


def bench_bloom(args, *, num_items=NUM_ITEMS, positions=64, rounds=5):
    """Time beam search (B = k = 20) and exhaustive search of 5,281,889 items, m 2."""
    generator = torch.Generator().manual_seed(0)
    for alpha in (10, 20, 50):
        # a larger alpha has fewer tokens to score, and more items behind each
        bloom_map = BloomMap(num_items, alpha)
        digest = torch.from_numpy(bloom_map.digest).long()
        for kind in ("flat", "peaked"):
            logits = 2 * torch.randn(positions, 2, bloom_map.num_buckets, generator=generator)
            if kind == "peaked":  # the hashes of one item stand out, as in a trained model
                items = torch.randint(num_items, (positions,), generator=generator)
                peak = torch.full((positions, 2, 1), 20.0)
                logits.scatter_add_(2, digest[items].unsqueeze(2), peak)
            row = compare_searches(logits.log_softmax(-1), bloom_map, rounds)
            yield dict(name=f"alpha {alpha}, {kind}") | row


def compare_searches(logp, bloom_map, rounds):
    """Return times and results of beam search and exhaustive search of logp (P, 2, R)."""
    some = logp[:len(logp) // 8]  # an eighth of the positions is scored exhaustively
    # contiguous, a row for each map, as search_by_blocks reads them
    columns = torch.from_numpy(bloom_map.digest).T.contiguous()  # (2, N)
    watch = harness.Stopwatch({
        "beam": lambda: beam_search(logp, bloom_map),
        "sure": lambda: beam_search(logp, bloom_map, rounds=None),
        "best": lambda: beam_search(logp, bloom_map, k=1, rounds=None),
        "all": lambda: [search_by_blocks(x, columns) for x in some],
        "plain": lambda: exhaustive(some, bloom_map),
    }, rounds)
    # the results: how many items were scored, and whether the best are those of all items
    found = beam_search(logp, bloom_map)
    sure = beam_search(logp, bloom_map, rounds=None)
    _, expected = exhaustive(some, bloom_map)
    is_equal = torch.equal(sure.scores[:len(some)], expected)
    is_equal = is_equal and torch.equal(sure.scores[0], search_by_blocks(logp[0], columns))
    share = len(logp) / len(some)  # of times: the exhaustive searches had fewer positions
    row = dict(
        certified=100 * found.certified.double().mean().item(),
        scored=found.num_scored.double().mean().item(),
        scored_sure=sure.num_scored.double().mean().item(),
        exact=str(is_equal),
        ratio=share * watch.ratio("plain", "beam"),
        ratio_all=share * watch.ratio("all", "beam"),
        ratio_sure=share * watch.ratio("plain", "sure"),
    )
    for name, ms in watch.ms.items():
        num_positions = len(some) if name in ("all", "plain") else len(logp)
        row[name] = ms / num_positions
    return row


def search_by_blocks(logp, columns, k=20, block=64):
    """Return the k best scores of all items, (k,), from logp (m, R): fast exhaustive search.

    torch.topk is slow on long rows. The k best lie in the k blocks with the largest maxima.
    """
    # the score of an item is the sum of its log-probabilities over the maps
    scores = sum(row.index_select(0, column) for row, column in zip(logp, columns))  # (N,)
    num_whole = len(scores) // block * block
    blocks = scores[:num_whole].view(-1, block)
    best = blocks.amax(1).topk(min(k, len(blocks))).indices
    # the items after the last whole block
    rest = scores[num_whole:]
    return torch.cat([blocks[best].flatten(), rest]).topk(k).values


# Recall


def read_sets(corpus, length, num_items=None):
    """Return ItemSetBatches; IDs of the held-out sets, int64 (P, L); the masked columns, (P,).

    num_items: int, the most frequent items, which the model knows; None: all.
    """
    word_counts = corpus.counts[FIRST_WORD_ID:][:num_items]
    with blame():
        sets = ItemSetBatches(corpus.ids, corpus.offsets, *split_pages(corpus), word_counts,
                              length, batch_size=1, seed=0)
    draw = sets.eval_batch(slice(None))
    return sets, draw.ids, draw.is_masked.int().argmax(1)


def score_neighbors(args):
    """Yield rows of recall@k for baselines without training: popularity and neighbors."""
    sets, _, _ = read_sets(load_corpus(args, "items"), 32)
    ranks = rank_hidden_items(sets, sets.eval_batch(slice(None)))  # (P, 4)
    for name, ranks_of_one in zip(NEIGHBORS, torch.from_numpy(ranks.T)):
        yield dict(name=name) | recall_of(ranks_of_one)


def recall_of(ranks):
    """Return recall@k, dict, of the ranks of the hidden items, int64 (P,)."""
    return measure_recall(count_hits(ranks).tolist(), len(ranks))


ENTITIES = """
    model            | name         | s
    parameters       | parameters   | ,
    of the embedding | table        | ,
    rec@1            | rec@1        | .3f ±
    rec@10           | rec@10       | .3f ±
    rec@20           | rec@20       | .3f ±
    correct hashes   | hashes_right | .3f ±
    certified        | certified    | .3f ±
    loss             | eval_loss    | .3f ±
"""


def find_width(num_items, alpha):
    """Return the largest width at which lookup has no more parameters than Superbloom."""
    shape = PRESETS["superbloom-small"]
    buckets = math.ceil(num_items / alpha) + FIRST_WORD_ID
    limit = count_sizes(shape | dict(buckets=buckets))["total"]
    lookup = shape | dict(emb="lookup", head="mlm", rows=num_items + FIRST_WORD_ID)
    heads = shape["heads"]
    # a width has to be a multiple of the heads
    for width in itertools.count(heads, heads):
        if count_sizes(lookup | dict(width=width, ffn=2 * width))["total"] > limit:
            return width - heads


def bench_entities(args):
    """Compare Superbloom, a lookup table of its size, and neighbors. [SB Tables 2 and 7]

    The lookup table has a softmax over all items, which takes hours for more than some 20,000.
    """
    variants = {}
    for n in range(3):
        variants[f"superbloom, {n} of 2 maps coherent"] = f"--alpha {args.alpha} --coherent {n}"
    num_items = len(load_corpus(args, "items").words)
    width = find_width(num_items, args.alpha)
    lookup = f"--emb lookup --width {width} --ffn {2 * width}"
    variants[f"lookup, as many parameters (d {width})"] = lookup
    # the paper's rival, where a softmax over all items takes too long
    sampled = "--objective sampled --samples 1000"
    variants[f"the same, sampled softmax (d {width})"] = f"{lookup} {sampled}"
    variants["lookup, as wide, sampled softmax (d 256)"] = f"--emb lookup {sampled}"
    yield from compare(args, variants, train_variant, "--preset superbloom-small")
    yield from score_neighbors(args)


def bench_depth(args):
    """Compare one layer, six, and a wide one, on frequent items. [SB §3.4] [SB Table 3]"""
    variants = {}
    bloom = f"--alpha {args.alpha}"
    for kind, flags in (("superbloom", bloom), ("lookup", "--emb lookup")):
        variants[f"{kind}, 1 layer"] = f"--layers 1 {flags}"
        variants[f"{kind}, 6 layers"] = f"--layers 6 {flags}"
    # as many parameters as six layers have
    variants["superbloom, 1 layer, wide (d 276)"] = f"--layers 1 {bloom} --width 276 --ffn 552"
    shared = "--preset superbloom-small --width 128 --ffn 256 --vocab 2000 --lr 0.001"
    return compare(args, variants, train_variant, shared)


BEAMS = """
    run, beam    | name      | s
    rec@1        | rec@1     | .3f
    rec@10       | rec@10    | .3f
    rec@20       | rec@20    | .3f
    certified %  | certified | .1f
    items scored | scored    | ,.0f
"""


def bench_beams(args):
    """Measure recall by beam width [SB Table 6] and by frequency of the item [SB Figure 3]."""
    for folder in args.runs:
        hidden = hide_items(folder, args)
        # one round of a fixed width, then widened until it provably has the best
        searches = [(f"B {beam}", beam, 1) for beam in (1, 10, 20, 100)]
        searches.append(("until certified", 20, None))
        for search in searches:
            row, ranks = measure_search(hidden, *search)
            yield row
        yield from recall_by_frequency(hidden, ranks)
    yield from score_neighbors(args)


PRIOR = """
    run, weight of the prior | name          | s
    rec@1                    | rec@1         | .3f
    rec@10                   | rec@10        | .3f
    rec@20                   | rec@20        | .3f
    items scored             | scored        | ,.0f
    search, ms a set         | ms            | .2f
    all items, ms a set      | exhaustive_ms | .2f
    held-out sets            | n             | ,
"""


def bench_prior(args):
    """Measure what the prior of the items adds to a search until it is certified.

    The prior is of the training sets alone, times a weight. Weight 0 is the paper's score.
    """
    for folder in args.runs:
        hidden = hide_items(folder, args)
        for weight in (0.0, 0.5, 1.0):
            prior = weight * hidden.prior
            row, _ = measure_search(hidden, weight, 20, None, prior)
            start = time.perf_counter()
            exhaustive(hidden.logp, hidden.bloom_map, 20, exclude=hidden.visible, prior=prior)
            seconds = time.perf_counter() - start
            yield row | dict(exhaustive_ms=1000 * seconds / row["n"])


class Hidden(NamedTuple):
    """Held-out sets of which one item each is hidden, the same one as in training's evaluation."""

    name: str  # of the run
    corpus: Corpus
    bloom_map: BloomMap
    correct: torch.Tensor  # int64 (P,), token ID of the hidden item
    visible: torch.Tensor  # int64 (P, L), numbers of the other items; -1: none
    logp: torch.Tensor  # float (P, m, R), log-probabilities of the hashes at the hidden item
    prior: torch.Tensor  # float (N,), of each item, by the training sets alone


@torch.no_grad()
def hide_items(folder, args):
    """Return the Hidden of a run over item sets."""
    model, tokenizer, corpus, _ = harness.load_run_with_corpus(folder, args)
    bloom_map = tokenizer.coder.bloom_map
    if bloom_map is None:
        raise InputError(f"--runs: expected runs of --emb bloom, got {folder}.")
    batches, ids, masked = read_sets(corpus, model.config.length, bloom_map.n_items)
    correct = ids.gather(1, masked[:, None])  # (P, 1)
    inputs = ids.scatter(1, masked[:, None], MASK)
    positions = (inputs == MASK).flatten().nonzero().flatten()
    logp = hash_logp(model(inputs, inputs != 0, positions), bloom_map)
    return Hidden(
        name=Path(folder).name,
        corpus=corpus,
        bloom_map=bloom_map,
        correct=correct[:, 0],
        visible=(inputs - FIRST_WORD_ID).clamp(min=-1),
        logp=logp,
        prior=popularity_prior(batches.count_items(), bloom_map),
    )


def measure_search(hidden, search, beam, rounds, prior=None):
    """Return a row: recall, certified lists in percent, items scored, ms a set; the ranks (P,)."""
    start = time.perf_counter()
    found = beam_search(
        hidden.logp, hidden.bloom_map, 20, beam, rounds, exclude=hidden.visible, prior=prior)
    seconds = time.perf_counter() - start
    # beam_search numbers items without the special tokens
    ranks = rank_in_lists(found.ids + FIRST_WORD_ID, hidden.correct)
    row = dict(
        name=f"{hidden.name}, {search}",
        n=len(ranks),
        certified=100 * found.certified.double().mean().item(),
        scored=found.num_scored.double().mean().item(),
        ms=1000 * seconds / len(ranks),
    )
    return row | recall_of(ranks), ranks


def recall_by_frequency(hidden, ranks):
    """Yield recall@1 for each tenth of the links, from frequent items to rare ones."""
    counts = hidden.corpus.counts[FIRST_WORD_ID:]
    # an item lies in the tenth in which its last link lies, counted from the most frequent item
    reached = np.cumsum(counts) / counts.sum()
    tenths = (10 * (reached[hidden.correct - FIRST_WORD_ID] - 1e-9)).astype(int)  # (P,)
    for i in range(10):
        name = f"{hidden.name}, links {10 * i} to {10 * i + 10} % by frequency"
        row = {"name": name, "rec@1": None}
        if (tenths == i).any():
            row["rec@1"] = (ranks[tenths == i] == 0).double().mean().item()
        yield row


PAGES = COMPARE | dict(data="python-names", alpha=25)
SETS = RUNS | dict(data="python-names", cache="cache")
TABLES = {  # name -> function that yields the rows, columns, flags and their defaults
    "sizes": (bench_sizes, SIZES_COLUMNS, {}),
    "bloom": (bench_bloom, BLOOM, {}),
    "entities": (bench_entities, ENTITIES, PAGES),
    "depth": (bench_depth, ENTITIES, PAGES),
    "beams": (bench_beams, BEAMS, SETS),
    "prior": (bench_prior, PRIOR, SETS),
}


if __name__ == "__main__":
    harness.main("bench.superbloom", TABLES, __doc__)
