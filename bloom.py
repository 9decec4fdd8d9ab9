"""Items to m hash tokens and back: Bloom maps, sketch maps, and the beam search for the best items.

Sources:
    [SB] Anderson et al. 2020, Superbloom: Bloom filter meets Transformer
    [CM] Median is all you need, a proposal
Out of scope: hashing of strings (hashing.py), the model that gives the probabilities (model.py),
    maps and priors that are learned from item sets (coherent.py).
Deviations:
    1. Random orders come from integer arithmetic alone, so a BloomMap is the same on every machine.
       The paper names no generator.
    2. In the last map, an item that shares all m buckets with another swaps places with a random
       item, until no two items have the same digest. The paper makes sure that no two have, and
       does not say how.
    3. The beam width doubles. The paper's grows by B.
    4. A prior may be added to each item's score. The paper has none.
Notation:
    N items   m hashes of an item   R buckets of a map   alpha items of a bucket
    k items returned (the top k)   B beam width
    P positions, the places of a batch where an item is asked for
Demo: python bloom.py

A Bloom filter marks each item at m hashed places of one array. Items share places, but the m places
together tell one item from another; hence the name. Here m tables of R = N / alpha rows serve N
items: an item has a row in each, its m hash tokens, and shares each with alpha - 1 others.

A model gives a probability to each bucket of each map. The score of an item adds the
log-probabilities of its m buckets. This file has the maps, and then three searches for the items of
the largest scores: exhaustive scores all items, beam_search_reference those of the likely buckets
alone, in plain loops, and beam_search does the same for many positions at once.
"""

import math
import zlib
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

MAX_SWAP_ROUNDS = 100  # far above what is needed, which is about log of the number of items to swap
BLOCK = 64  # buckets of a block in top_buckets
GOLDEN_STEP = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: its multiples spread evenly


# Items to hash tokens


class ItemMap:
    """N items and their hash tokens, in both directions: what the searches read.

    For example, two maps of 6 items in 3 buckets:

        map 0   0 1 | 2 3 | 4 5          digest of item 1: (0, 1), of item 4: (2, 1)
        map 1   0 2 | 1 4 | 3 5          members of bucket 1 in map 1: 1 and 4

    Items may share all their buckets, as words do by hashing.sketch_index. [CM]

    Args:
        digest: int (N, m), the m buckets of each item.
        num_buckets: int, R, of a map.

    Attributes:
        digest: int32 (N, m), as given.
        members: int32 (m, R, alpha), the items of each bucket, ascending, -1 where it is short.
        n_items, m, num_buckets: int, N, m and R.
        alpha: int, items of the largest bucket.
    """

    def __init__(self, digest, num_buckets):
        self.n_items, self.m = digest.shape
        self.num_buckets = num_buckets
        self.digest = digest.astype(np.int32)
        self.alpha = max(int(np.bincount(column).max()) for column in digest.T)
        self.members = list_members(self.digest, num_buckets, self.alpha)
        self.tables = {}  # device -> (digest, members)

    def tables_on(self, device):
        """Return digest (N, m) and members (m, R, alpha) as tensors, copied to a device once."""
        if device not in self.tables:
            digest = torch.from_numpy(self.digest).to(device)
            members = torch.from_numpy(self.members).to(device)
            self.tables[device] = (digest, members)
        return self.tables[device]


def list_members(digest, num_buckets, alpha):
    """Return the items of each bucket, int32 (m, R, alpha), ascending, -1 where it is short."""
    members = np.full((digest.shape[1], num_buckets, alpha), -1, np.int32)
    for j, column in enumerate(digest.T):
        by_bucket = np.argsort(column, kind="stable")  # (N,), items of bucket 0, of bucket 1, ...
        size = np.bincount(column, minlength=num_buckets)  # (R,)
        is_item = np.arange(alpha) < size[:, None]  # (R, alpha), the first places of each bucket
        members[j][is_item] = by_bucket
    return members


class BloomMap(ItemMap):
    """N items in m maps of buckets; no two items share all their m buckets. [SB §3.2]

    Map j is an order of the items, cut after every alpha items, as the two maps of ItemMap are with
    alpha 2. The last bucket may be short.

    Args:
        n_items: int, N.
        alpha: int, items of a bucket.
        m: int, number of maps.
        seed: int, 0 or more, of random orders, and of the random items of swap_repeated.
        orders: int (m, N), a permutation of the items for each map; None: random orders. The last
            map is changed where items would share all m buckets.

    Raises:
        ValueError: If orders has no permutations, or alpha leaves too few digests for N items.
    """

    def __init__(self, n_items, alpha, m=2, seed=0, orders=None):
        digest = build_digest(n_items, alpha, m, seed, orders)
        super().__init__(digest, math.ceil(n_items / alpha))
        self.seed = seed
        self.orders = orders  # as given: load builds the same digest from them

    def checksum(self):
        """Return eight hex digits of the digests, which load compares."""
        return f"{zlib.crc32(self.digest.tobytes()):08x}"

    def state(self):
        """Return a dict of plain types, which load reads: the arguments, and a checksum."""
        orders = self.orders
        if orders is not None:
            orders = [np.array(order, np.int32).tobytes() for order in orders]
        return dict(n_items=self.n_items, alpha=self.alpha, m=self.m, seed=self.seed,
                    check=self.checksum(), orders=orders)

    @classmethod
    def load(cls, state):
        """Return the BloomMap of a state(); ValueError if its digests are not the saved ones."""
        options = dict(state)
        if set(state) != {"n_items", "alpha", "m", "seed", "check", "orders"}:
            raise ValueError(f"Bloom map: expected what state returns, got {', '.join(state)}.")
        check = options.pop("check")
        if options["orders"] is not None:
            options["orders"] = [np.frombuffer(order, np.int32) for order in options["orders"]]
        bloom_map = cls(**options)
        if bloom_map.checksum() != check:
            raise ValueError(f"Bloom map: expected check {check}, got {bloom_map.checksum()}.")
        return bloom_map


def build_digest(n_items, alpha, m, seed, orders):
    """Return the digest of each item, int (N, m), no two of which are equal. See BloomMap."""
    if orders is None:
        orders = [random_order(n_items, seed, j) for j in range(m)]
    elif not np.array_equal(np.sort(orders), np.tile(np.arange(n_items), (m, 1))):
        raise ValueError(f"orders: expected {m} permutations of {n_items} items.")
    columns = [cut_order(order, alpha) for order in orders]
    digest = np.stack(columns).T  # (N, m); in memory each map's column is in one piece
    if not swap_repeated(digest, seed):
        # there are (N / alpha)^m digests, and 4 · N are enough. Solved for alpha:
        largest = int((n_items ** (m - 1) / 4) ** (1 / m))
        raise ValueError(f"alpha: expected about {max(largest, 1):,} at most, got {alpha}.")
    return digest


def cut_order(order, alpha):
    """Return the bucket of each item, (N,), of an order (N,) cut after every alpha items."""
    bucket = np.empty(len(order), np.int32)
    bucket[order] = np.arange(len(order)) // alpha
    return bucket


def swap_repeated(digest, seed):
    """Move items that share all m buckets with another: swap them with random items, in place.

    Only the last map changes. Here items 2 and 3 share both buckets, so 3 swaps places with 0:

        map 0   0 1 | 2 3 | 4 5
        map 1   2 3 | 0 4 | 1 5     before
                2 0 | 3 4 | 1 5     after

    For m = 2, random maps leave about (alpha - 1)² / 2 pairs that share both buckets.

    Args:
        digest: int (N, m), which is changed.
        seed: int, of the partners.

    Returns:
        Whether no two items share all m buckets.
    """
    n_items, m = digest.shape
    last = digest[:, -1]  # (N,), a view
    for turn in range(MAX_SWAP_ROUNDS):
        # equal digests become neighbors. Keep [::-1]: another order gives other maps, and saved
        # checksums fail
        by_digest = np.lexsort(digest.T[::-1])  # (N,)
        is_equal = np.diff(digest[by_digest], axis=0) == 0  # (N - 1, m)
        repeated = by_digest[1:][is_equal.all(1)]  # all items of a digest but one
        if len(repeated) == 0:
            return True
        # subtle: a repeated item is no partner, or it would move twice. Of the first 2n items of a
        # random order at most n are repeated, so n partners are left
        n = len(repeated)
        partners = random_order(n_items, seed, m, turn)[:2 * n]
        partners = partners[~np.isin(partners, repeated)][:n]
        repeated = repeated[:len(partners)]  # if N < 2n some wait for the next turn
        last[repeated], last[partners] = last[partners], last[repeated]
    return False


# Hash tokens to items: score all of them

# The score of an item is gamma(parts). parts is a list of m tensors, one for each map: the
# log-probability of the item's bucket, or those of many items. By "sum", the parts log 0.3 and
# log 0.7 give log 0.21. gamma must not fall when a part grows: the certificate of the beam search
# rests on that. [SB App. C]
SCORES = {
    "sum": sum,
    "min": lambda parts: torch.stack(parts).amin(0),
    "max": lambda parts: torch.stack(parts).amax(0),
}


@torch.no_grad()
def exhaustive(logp, bloom_map, k=20, score="sum", exclude=None, prior=None):
    """Return the k best of all items by scoring each of them.

    Args:
        logp: float (P, m, R), log-probabilities of the buckets of each map, as of hash_logp.
            Unnormalized logits (P, m, R) do as well with "sum".
        bloom_map: the model's own BloomMap or ItemMap. A map of another seed is not detected.
        k: int, items to return; if it is larger than N, all N are.
        score: a key of SCORES. An item of score -inf is never returned.
        exclude: int64 (P, E), items that may not be returned, below N; -1 stands for no item. None
            excludes none.
        prior: float (N,), finite, which is added to the score of each item, as
            coherent.popularity_prior returns it; or None.

    Returns:
        ids int64 (P, k) and scores (P, k), best first, -1 and -inf where fewer than k are left.

    Raises:
        ValueError: If logp, exclude or prior does not fit, or logp has NaN.
    """
    exclude, prior = read_query(logp, bloom_map, exclude, prior)  # (P, E), (N,) or None
    return score_all(logp, bloom_map, k, score, exclude, prior)


def read_query(logp, bloom_map, exclude, prior):
    """Return exclude, (P, 0) for None, and prior, in the dtype and on the device of logp.

    Raises a ValueError for what a search would answer wrongly in silence.
    """
    if logp.shape[1:] != (bloom_map.m, bloom_map.num_buckets):
        raise ValueError(f"logp: expected (P, {bloom_map.m}, {bloom_map.num_buckets}), "
                         f"got {[*logp.shape]}.")
    if logp.sum().isnan():  # topk would rank NaN first. Faster than logp.isnan().any()
        raise ValueError("logp: expected log-probabilities, got NaN.")
    if exclude is None:
        exclude = torch.empty(len(logp), 0, dtype=torch.int64)
    exclude = exclude.to(logp.device)
    # a mask of bool (P, N) would be read as the items 0 and 1
    if exclude.dtype != torch.int64 or exclude.shape[:-1] != logp.shape[:1]:
        raise ValueError(f"exclude: expected int64 ({len(logp)}, E), "
                         f"got {exclude.dtype} {[*exclude.shape]}.")
    if ((exclude < -1) | (exclude >= bloom_map.n_items)).any():  # a beam would leave nothing out
        raise ValueError(f"exclude: expected items below {bloom_map.n_items}, or -1.")
    if prior is not None:
        prior = prior.to(logp)
        if prior.shape != (bloom_map.n_items,) or not prior.isfinite().all():  # NaN ranks first
            raise ValueError(f"prior: expected {bloom_map.n_items} finite numbers, "
                             f"got {[*prior.shape]} with {prior.isfinite().sum()} finite.")
    return exclude, prior


def score_all(logp, bloom_map, k, score, exclude, prior):
    """Return what exhaustive returns, from what read_query has checked."""
    digest, _ = bloom_map.tables_on(logp.device)  # (N, m)
    k = min(k, bloom_map.n_items)
    ids = torch.empty(len(logp), k, dtype=torch.int64, device=logp.device)
    scores = logp.new_empty(ids.shape)
    for p in range(len(logp)):  # one at a time, as a position has N values
        parts = []
        for j in range(bloom_map.m):
            parts.append(logp[p, j].index_select(0, digest[:, j]))  # (N,)
        values = SCORES[score](parts)  # (N,)
        if prior is not None:
            values = values + prior
        excluded = exclude[p]
        values[excluded[excluded >= 0]] = -torch.inf  # -1 is none
        scores[p], ids[p] = values.topk(k)
    return ids.masked_fill(scores == -torch.inf, -1), scores


# The beam search: score the items of likely buckets, and prove that no other is better


def beam_search_reference(logp, bloom_map, k, beam, score="sum", exclude=(), prior=None):
    """Search one position in plain loops, with one beam width. [SB §2.5 Alg.1]

    The beam of a map has its B best buckets. For example, two maps of the items a to f. The numbers
    are probabilities, and their products stand for sums of logarithms:

        map 0     0.6  a b     0.3  c d     0.1  e f
        map 1     0.7  c e     0.2  b d     0.1  a f

        B    scored       the best of them       bound
        1    a b c e      c 0.3 · 0.7 = 0.21     0.6 · 0.7 = 0.42     d or f may be better
        2    a b c d e    c 0.3 · 0.7 = 0.21     0.3 · 0.2 = 0.06     f is not: c is certified

    Why certified items are the k best of all items that may be returned:

        1. Call an item outside if none of its m buckets is in a beam. All others are scored.
        2. In each map the bucket of an item outside is at most as likely as the last of the beam.
        3. gamma does not fall when a part grows. So an item outside scores at most the bound, which
           is gamma of the last buckets of the m beams, plus the largest prior of all items.
        4. If the k-th best of the scored items reaches the bound, no item outside scores more.

    Args:
        logp: float (m, R), log-probabilities of the buckets of each map.
        bloom_map: BloomMap or ItemMap.
        k: int, items to return.
        beam: int, B.
        score: a key of SCORES.
        exclude: list of items that may not be returned.
        prior: list of N finite floats, which are added to the scores of the items; or None.

    Returns:
        ids list[int] and scores list[float], best first, -1 and -inf where fewer than k items are
        reached; and certified bool.
    """
    gamma = SCORES[score]
    m, R = logp.shape
    k = min(k, bloom_map.n_items)
    if prior is None:
        prior = [0.0] * bloom_map.n_items
    # [Alg.1 l.2]: the beam of each map, which ends at its B-th best bucket
    ranked = logp.argsort(dim=1, descending=True)  # (m, R), the best first
    beams = ranked[:, :beam].tolist()  # m lists of B buckets
    # [Alg.1 l.4]: the bound, the score of those last buckets
    last = [logp[j, beams[j][-1]] for j in range(m)]
    bound = gamma(last) + max(prior)
    # [Alg.1 l.5]: score each item that has a bucket in a beam
    pairs = [(-math.inf, -1)] * k  # returned where fewer than k items are reached
    for item, row in enumerate(bloom_map.digest.tolist()):  # row: m buckets
        is_candidate = any(row[j] in beams[j] for j in range(m))
        if is_candidate and item not in exclude:
            parts = [logp[j, row[j]] for j in range(m)]
            value = float(gamma(parts) + prior[item])
            if value > -math.inf:
                pairs.append((value, item))
    # [Alg.1 l.6]: the best of them
    best = sorted(pairs, reverse=True)[:k]
    scores = [value for value, _ in best]
    ids = [item for _, item in best]
    # [Alg.1 l.7]: the k-th item reaches the bound, or no item is outside
    certified = bool(scores[-1] >= bound) or beam >= R
    return ids, scores, certified


# The same result, faster: all positions at once, and only the items of the beams


class Found(NamedTuple):
    """What a search has found for each position."""

    ids: torch.Tensor  # int64 (P, k), best first, -1 where fewer than k items are reached
    scores: torch.Tensor  # float (P, k), -inf where the ID is -1
    certified: torch.Tensor  # bool (P,), whether these are proved to be the k best of all items
    num_scored: torch.Tensor  # int64 (P,), items that its last round scored, N if it scored all


@torch.no_grad()
def beam_search(logp, bloom_map, k=20, beam=20, rounds=1, score="sum", exclude=None, prior=None):
    """Return the k best of the items that have a bucket in a beam. [SB §2.5 Alg.1]

    If they are certified, they are the k best of all items: beam_search_reference says why. A
    certificate is about the search, not about the model. Items with equal scores come in any order.

    Args:
        beam: int, B, buckets of each map to look into.
        rounds: int, 1 or more. Each round after the first searches with twice the beam where the
            items are not certified yet, or scores all items if so many buckets may hold all. None:
            until all are certified.
        logp, bloom_map, k, score, exclude, prior: as in exhaustive.

    Returns:
        Found.

    Raises:
        ValueError: If logp, exclude or prior does not fit, or logp has NaN.

    Example:
        bloom_map = BloomMap(100_000, alpha=25)  # 2 maps of 4,000 buckets
        logits = torch.randn(8, 2, 4_000)  # of your model
        logp = logits.log_softmax(-1)
        ids, scores, certified, num_scored = beam_search(logp, bloom_map)
    """
    exclude, prior = read_query(logp, bloom_map, exclude, prior)
    found = search_round(logp, bloom_map, k, beam, score, exclude, prior)
    turn = 1
    while not found.certified.all() and (rounds is None or turn < rounds):
        beam *= 2  # [Alg.1 l.3]
        if bloom_map.m * beam * bloom_map.alpha >= bloom_map.n_items:
            beam = bloom_map.num_buckets  # such beams may hold all N items: score all directly
        todo = (~found.certified).nonzero().squeeze(1)  # positions without a certificate
        again = search_round(logp[todo], bloom_map, k, beam, score, exclude[todo], prior)
        for result, new in zip(found, again):
            result[todo] = new
        turn += 1
    return found  # [Alg.1 l.8]


def search_round(logp, bloom_map, k, beam, score, exclude, prior):
    """Return the Found of one round, by the steps of beam_search_reference."""
    if beam >= bloom_map.num_buckets:  # no item is outside
        ids, scores = score_all(logp, bloom_map, k, score, exclude, prior)
        num_scored = torch.full_like(ids[:, 0], bloom_map.n_items)
        certified = torch.ones_like(num_scored, dtype=torch.bool)
        return Found(ids, scores, certified, num_scored)
    gamma = SCORES[score]
    digest, members = bloom_map.tables_on(logp.device)  # (N, m), (m, R, alpha)
    k = min(k, bloom_map.n_items)
    # [Alg.1 l.2]: the beam of each map, which ends at its B-th best bucket
    beam_logp, beams = top_buckets(logp, beam)  # (P, m, B) each, the best first
    # [Alg.1 l.4]: the bound, the score of those last buckets
    last = beam_logp[:, :, -1]  # (P, m)
    bound = gamma(last.unbind(1))  # (P,)
    if prior is not None:
        bound = bound + prior.max()
    # [Alg.1 l.5]: score each item that has a bucket in a beam
    items = list_candidates(members, beams, exclude)  # (P, candidates), -1 for none
    items = F.pad(items, (0, max(k - items.shape[1], 0)), value=-1)  # k of them at least
    parts = []
    for j in range(bloom_map.m):
        column = digest[:, j]  # (N,)
        buckets = column[items].long()  # (P, candidates); -1 reads the last item: masked below
        parts.append(logp[:, j].gather(1, buckets))
    values = gamma(parts)  # (P, candidates)
    if prior is not None:
        values = values + prior[items]
    values = values.masked_fill(items < 0, -torch.inf)
    num_scored = (items >= 0).sum(1)  # (P,)
    # [Alg.1 l.6]: the best of them
    scores, place = values.topk(k)  # (P, k)
    ids = items.gather(1, place).masked_fill(scores == -torch.inf, -1)  # (P, k)
    # [Alg.1 l.7]: the k-th item reaches the bound
    certified = scores[:, -1] >= bound  # (P,)
    return Found(ids, scores, certified, num_scored)


def list_candidates(members, beams, exclude):
    """Return the items of the beams, each once: int64 (P, m · B · alpha), -1 for none.

    At one position, with the items a to f of beam_search_reference as 0 to 5, B 2 and 3 excluded:

        items of the beams         0 1, 2 3 of map 0     2 4, 1 3 of map 1
        sorted                     0  1  1  2  2  3  3  4
        returned                   0  1 -1  2 -1 -1 -1  4

    Args:
        members: int32 (m, R, alpha), of the map.
        beams: int64 (P, m, B), buckets.
        exclude: int64 (P, E), items to leave out.
    """
    columns = []
    for j, items_of_bucket in enumerate(members):  # (R, alpha)
        items = items_of_bucket[beams[:, j]]  # (P, B, alpha)
        columns.append(items.flatten(1))
    items = torch.cat(columns, 1)  # (P, m · B · alpha)
    # an item may be in the beams of several maps: sort, and drop those that repeat the one before
    items = items.sort(1).values.long()
    is_repeated = items[:, 1:] == items[:, :-1]
    items[:, 1:].masked_fill_(is_repeated, -1)
    for excluded in exclude.unbind(1):  # (P,)
        items.masked_fill_(items == excluded.unsqueeze(1), -1)
    return items


def top_buckets(logp, num):
    """Return logp.topk(num), (P, m, num) each, faster on a CPU from about 20,000 buckets on.

    Cut the R buckets into blocks of 64, and take the num blocks with the largest maxima. A bucket
    of another block is not among the best num, as those maxima are at least as large. The rest, the
    R mod 64 buckets after the last block, may be.
    """
    P, m, R = logp.shape
    num_blocks = R // BLOCK
    if num_blocks <= num:
        return logp.topk(num)
    whole = num_blocks * BLOCK  # buckets in blocks
    blocks = logp[:, :, :whole].unflatten(2, (-1, BLOCK))  # (P, m, blocks, BLOCK)
    best_blocks = blocks.amax(3).topk(num).indices  # (P, m, num)
    inside = torch.arange(BLOCK, device=logp.device)
    likely = best_blocks.unsqueeze(3) * BLOCK + inside  # (P, m, num, BLOCK), buckets
    rest = torch.arange(whole, R, device=logp.device)
    likely = torch.cat([likely.flatten(2), rest.expand(P, m, -1)], 2)
    likely_logp = logp.gather(2, likely)
    values, place = likely_logp.topk(num)
    return values, likely.gather(2, place)


# The logits of Superbloom to log-probabilities of buckets


def hash_logp(logits, bloom_map):
    """Return the log-probabilities of each map's buckets, float32 (P, m, R). [SB §2.3]

    At each position Superbloom has m rows of logits. Row j predicts the bucket in map j, but its
    softmax is over m blocks, each of the R buckets of a map and s special tokens. Only the buckets
    of block j are read from row j, here marked + (m 2, R 2, s 1):

                 block 0   block 1
        row 0    + + .     . . .
        row 1    . . .     + + .

    The probabilities of a row's + add up to less than 1. That lowers all scores by "sum" alike. It
    does not lower those by "min" or "max" alike, so the order of items may change.

    Where each map has a softmax of its own, logits (P, m, R) need logits.log_softmax(-1) alone.

    Args:
        logits: float (P, m, m·(R + s)). Those of bfloat16 become float32, so that fewer tie.
        bloom_map: the model's own BloomMap. A wrong R passes unnoticed up to the width of a block;
            the searches refuse a larger one.
    """
    m = bloom_map.m
    assert logits.shape[1] == m, f"logits: expected {m} rows of each position"
    logp = logits.log_softmax(-1, dtype=torch.float32)
    blocks = logp.unflatten(-1, (m, -1))  # (P, m rows, m blocks, R + s)
    rows = []
    for j in range(m):
        rows.append(blocks[:, j, j, :bloom_map.num_buckets])  # (P, R)
    return torch.stack(rows, 1)


# Random orders


def random_order(n, *key):
    """Return 0 .. n-1 in random order, int64 (n,), a function of n and the ints of key alone.

    Each of 0 .. n-1 gets a random number of the generator splitmix64, and they are sorted by it.
    The seed of the generator is a number that mixes the ints of the key, one after another.
    """
    start = np.zeros(1, np.uint64)  # an array, as numpy warns when a scalar overflows 2^64
    for part in key:
        start = mix_bits(start + np.uint64(part) + GOLDEN_STEP)
    numbers = mix_bits(start + np.arange(n, dtype=np.uint64) * GOLDEN_STEP)  # no two are equal
    return np.argsort(numbers)


def mix_bits(x):
    """Mix numbers uint64 (n,) as splitmix64 does: a change of one bit changes about 32 of 64.

    Each line can be undone, so different numbers stay different. The constants are the published
    ones.
    """
    x = x ^ (x >> np.uint64(30))
    x = x * np.uint64(0xBF58476D1CE4E5B9)
    x = x ^ (x >> np.uint64(27))
    x = x * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# Demo


DEMO_ORDERS = [
    [8, 9, 10, 3, 5, 11, 0, 1, 4, 2, 6, 7],
    [3, 4, 7, 2, 8, 11, 0, 5, 9, 1, 6, 10],
]
DEMO_PROBABILITIES = [[0.64, 0.19, 0.14, 0.03], [0.56, 0.02, 0.22, 0.20]]  # of buckets, (m, R)


def main():
    """Show two small Bloom maps, the digest of an item, and beam searches with their bounds."""
    bloom_map = BloomMap(12, alpha=3, orders=DEMO_ORDERS)
    probabilities = torch.tensor(DEMO_PROBABILITIES)  # (m, R)
    print("Two maps of 12 items in buckets of 3, and the probability that a model gives to each "
          "bucket:")
    for j in range(2):
        print(f"\nmap {j}")
        for p, items in zip(probabilities[j], bloom_map.members[j]):
            print(f"    {p:.2f}  {items}")
    print(f"\nItem 9 has the digest {bloom_map.digest[9].tolist()}", end="")
    print(""", and so the score log 0.64 + log 0.22 = -1.96.
A beam of B scores the items of the B best buckets of each map. Others score at most the bound, the
sum of the B-th best buckets. If the last answer reaches it, the answers are certified: the best.
""")
    logp = probabilities.log().unsqueeze(0)  # (P 1, m, R)
    for beam in (1, 2):
        ids, scores, certified, num_scored = beam_search(logp, bloom_map, 2, beam)
        bound = logp.topk(beam).values[0, :, -1].sum()
        print(f"Beam of {beam}: best items {ids[0].tolist()}, {num_scored.item()} items scored, "
              f"last {scores[0, -1]:.2f}, bound {bound:.2f}, certified: {certified.item()}")


if __name__ == "__main__":
    main()
