"""Hash tokens back to items: which items have the most likely buckets, and the proof of it.

Sources:
    [SB] Anderson et al. 2020, Superbloom: Bloom filter meets Transformer
Out of scope: items to hash tokens (bloom.py), the model that gives the probabilities (model.py),
    priors that are learned from item sets (coherent.py).
Deviations:
    1. The beam width doubles. The paper's grows by B.
    2. A prior may be added to each item's score. The paper has none.
Notation:
    N items   m hashes of an item   R buckets of a map   alpha items of the largest bucket
    k items returned (the top k)   B beam width
    P positions, the places of a batch where an item is asked for
Demo: python search.py

An item has a bucket, which it shares with other items, in each of m maps. A model gives a
probability to each bucket of each map. The score of an item adds the log-probabilities of its m
buckets. Three searches find the items of the largest scores: exhaustive scores all items,
beam_search_reference those of the likely buckets alone, in plain loops, and beam_search does the
same for many positions at once.

An argument bloom_map may be any object with the five attributes that they read. BloomMap and
ItemMap of bloom.py have them, and so has main's:

    n_items, m, num_buckets, alpha     int: N, m, R and alpha
    tables_on(device)                  the buckets of each item, int (N, m), and the items of each
                                       bucket, int (m, R, alpha), -1 where it is short
"""

import math
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F

BLOCK = 64  # buckets of a block in top_buckets


# Score all items

# A score takes a list of m tensors, one for each map: the log-probability of the item's bucket, or
# those of many items. By "sum", log 0.3 and log 0.7 give log 0.21. A score must not fall when a
# part grows: the certificate of the beam search rests on that. [SB App. C: gamma]
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
        ValueError: If logp, k, exclude or prior does not fit, or logp has NaN or inf.
    """
    query = read_query(logp, bloom_map, k, score, exclude, prior)
    return search_all(query)


class Query(NamedTuple):
    """What a search is asked, as read_query has checked it."""

    logp: torch.Tensor  # float (P, m, R)
    bloom_map: object  # with the attributes of the header
    k: int  # 1 to N
    score: str  # a key of SCORES
    exclude: torch.Tensor  # int64 (P, E), -1 for none
    prior: torch.Tensor | None  # (N,)

    def at(self, rows):
        """Return the query at n positions, int64 (n,)."""
        return self._replace(logp=self.logp[rows], exclude=self.exclude[rows])


def read_query(logp, bloom_map, k, score, exclude, prior):
    """Return a Query, on the device of logp: exclude (P, 0) for None, and prior in logp's dtype.

    Raises a ValueError for what a search would answer wrongly in silence.
    """
    if logp.shape[1:] != (bloom_map.m, bloom_map.num_buckets):
        raise ValueError(f"logp: expected (P, {bloom_map.m}, {bloom_map.num_buckets}), "
                         f"got {[*logp.shape]}.")
    largest = logp.amax((1, 2))  # (P,), NaN where a position has NaN, which topk would rank first
    if not (largest < torch.inf).all():
        raise ValueError("logp: expected log-probabilities, got NaN or inf.")
    if k < 1:
        raise ValueError(f"k: expected 1 or more, got {k}.")
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
    return Query(logp, bloom_map, min(k, bloom_map.n_items), score, exclude, prior)


def search_all(query):
    """Return what exhaustive returns."""
    P = len(query.logp)
    ids = torch.empty(P, query.k, dtype=torch.int64, device=query.logp.device)
    scores = query.logp.new_empty(ids.shape)
    for p in range(P):  # one at a time, as a position has N values
        values = score_all(query, p)  # (N,)
        excluded = query.exclude[p]  # (E,)
        excluded = excluded[excluded >= 0]
        values[excluded] = -torch.inf
        scores[p], ids[p] = values.topk(query.k)
    return ids.masked_fill(scores == -torch.inf, -1), scores


def score_all(query, p):
    """Return the score of each of the N items at position p, an int: float (N,)."""
    digest, _ = query.bloom_map.tables_on(query.logp.device)  # (N, m)
    parts = []
    for j, column in enumerate(digest.unbind(1)):  # (N,), the bucket of each item in map j
        part = query.logp[p, j].index_select(0, column)  # (N,)
        parts.append(part)
    scores = SCORES[query.score](parts)
    if query.prior is not None:
        scores = scores + query.prior
    return scores


def score_listed(query, items):
    """Return the score of each of the items, int64 (P, n): float (P, n), -inf where one is -1."""
    digest, _ = query.bloom_map.tables_on(query.logp.device)  # (N, m)
    parts = []
    for j, column in enumerate(digest.unbind(1)):  # (N,)
        buckets = column[items].long()  # (P, n); -1 reads the last item: masked below
        part = query.logp[:, j].gather(1, buckets)  # (P, n)
        parts.append(part)
    scores = SCORES[query.score](parts)
    if query.prior is not None:
        scores = scores + query.prior[items]
    return scores.masked_fill(items < 0, -torch.inf)


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
        3. A score does not fall when a part grows. So an item outside scores at most the bound, the
           score of the last buckets of the m beams, plus the largest prior of all items.
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
    m, R = logp.shape
    k = min(k, bloom_map.n_items)
    if prior is None:
        prior = [0.0] * bloom_map.n_items
    # [Alg.1 l.2]: the beam of each map, which ends at its B-th best bucket
    ranked = logp.argsort(dim=1, descending=True)  # (m, R), the best first
    beams = ranked[:, :beam].tolist()  # m lists of B buckets
    # [Alg.1 l.4]: the bound, the score of those last buckets
    last = [logp[j, beams[j][-1]] for j in range(m)]
    bound = SCORES[score](last) + max(prior)
    # [Alg.1 l.5]: score each item that has a bucket in a beam
    digest, _ = bloom_map.tables_on(logp.device)  # (N, m)
    scored = []  # (score, item)
    for item, row in enumerate(digest.tolist()):  # row: m buckets
        is_candidate = any(row[j] in beams[j] for j in range(m))
        if is_candidate and item not in exclude:
            parts = [logp[j, row[j]] for j in range(m)]
            value = float(SCORES[score](parts) + prior[item])
            if value > -math.inf:
                scored.append((value, item))
    # [Alg.1 l.6]: the best of them
    best = sorted(scored, reverse=True)[:k]
    num_missing = k - len(best)
    best += [(-math.inf, -1)] * num_missing
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

    def overwrite(self, rows, new):
        """Write the Found of some positions, int64 (n,), in place of what is here for them."""
        for old_values, new_values in zip(self, new):
            old_values[rows] = new_values


@torch.no_grad()
def beam_search(logp, bloom_map, k=20, beam=20, rounds=1, score="sum", exclude=None, prior=None):
    """Return the k best of the items that have a bucket in a beam. [SB §2.5 Alg.1]

    If they are certified, they are the k best of all items: beam_search_reference says why. A
    certificate is about the search, not about the model. Items with equal scores come in any order.

    Args:
        beam: int, B, 1 or more, buckets of each map to look into.
        rounds: int, 1 or more. Each round after the first searches with twice the beam where the
            items are not certified yet, or scores all items if so many buckets may hold all. None:
            until all are certified.
        logp, bloom_map, k, score, exclude, prior: as in exhaustive.

    Returns:
        Found.

    Raises:
        ValueError: If logp, k, exclude, prior or beam does not fit, or logp has NaN or inf.

    Example:
        from bloom import BloomMap
        bloom_map = BloomMap(100_000, alpha=25)  # 2 maps of 4,000 buckets
        logits = torch.randn(8, 2, 4_000)  # of your model
        logp = logits.log_softmax(-1)
        ids, scores, certified, num_scored = beam_search(logp, bloom_map)
    """
    query = read_query(logp, bloom_map, k, score, exclude, prior)
    if beam < 1:
        raise ValueError(f"beam: expected 1 or more, got {beam}.")
    found = search_round(query, beam)
    max_rounds = math.inf if rounds is None else rounds
    turn = 1
    while turn < max_rounds and not found.certified.all():
        beam = widen_beam(beam, bloom_map)
        todo = (~found.certified).nonzero().squeeze(1)  # positions without a certificate
        found.overwrite(todo, search_round(query.at(todo), beam))
        turn += 1
    return found  # [Alg.1 l.8]


def widen_beam(beam, bloom_map):
    """Return twice the beam [Alg.1 l.3], or all R buckets if such beams may hold all N items."""
    beam = 2 * beam
    if bloom_map.m * beam * bloom_map.alpha >= bloom_map.n_items:
        beam = bloom_map.num_buckets
    return beam


def search_round(query, beam):
    """Return the Found of one round, by the steps of beam_search_reference."""
    if beam >= query.bloom_map.num_buckets:  # no item is outside
        ids, scores = search_all(query)
        num_scored = torch.full_like(ids[:, 0], query.bloom_map.n_items)
        certified = torch.ones_like(num_scored, dtype=torch.bool)
        return Found(ids, scores, certified, num_scored)
    # [Alg.1 l.2]: the beam of each map, which ends at its B-th best bucket
    beam_logp, beams = top_buckets(query.logp, beam)  # (P, m, B) each, the best first
    # [Alg.1 l.4]: the bound, the score of those last buckets
    last = beam_logp[:, :, -1]  # (P, m)
    bound = SCORES[query.score](last.unbind(1))  # (P,)
    if query.prior is not None:
        bound = bound + query.prior.max()
    # [Alg.1 l.5]: score each item that has a bucket in a beam
    items = list_candidates(query, beams)  # (P, candidates), -1 for none
    values = score_listed(query, items)
    num_scored = (items >= 0).sum(1)  # (P,)
    # [Alg.1 l.6]: the best of them
    scores, place = values.topk(query.k)  # (P, k)
    ids = items.gather(1, place).masked_fill(scores == -torch.inf, -1)  # (P, k)
    # [Alg.1 l.7]: the k-th item reaches the bound
    certified = scores[:, -1] >= bound  # (P,)
    return Found(ids, scores, certified, num_scored)


def top_buckets(logp, num):
    """Return logp.topk(num), (P, m, num) each, faster on a CPU from about 20,000 buckets on.

    For num 1 and blocks of 3 buckets, where the last two buckets fill no block:

        logp       -5 -9 -8 | -3 -9 -7 | -4 -6 -9 | -8 -2
        maxima     -5         -3         -4
        read                  -3 -9 -7              -8 -2     of which -2 is returned

    The num blocks with the largest maxima are enough: a bucket of another block is at most as
    likely as each of these num maxima.
    """
    P, m, R = logp.shape
    num_blocks = R // BLOCK
    if num_blocks <= num:  # all would be read
        return logp.topk(num)
    end = num_blocks * BLOCK  # of the blocks
    maxima = logp[:, :, :end].unflatten(2, (num_blocks, BLOCK)).amax(3)  # (P, m, num_blocks)
    # which buckets to read: those of the best blocks, and the R mod BLOCK that fill no block
    starts = maxima.topk(num).indices * BLOCK  # (P, m, num)
    in_blocks = starts.unsqueeze(3) + torch.arange(BLOCK, device=logp.device)
    others = torch.arange(end, R, device=logp.device).expand(P, m, -1)
    buckets = torch.cat([in_blocks.flatten(2), others], 2)  # (P, m, num · BLOCK + R mod BLOCK)
    # the best of these
    values, place = logp.gather(2, buckets).topk(num)
    return values, buckets.gather(2, place)


def list_candidates(query, beams):
    """Return the items of the beams int64 (P, m, B), each once, int64 (P, m · B · alpha).

    At one position, with the items a to f of beam_search_reference as 0 to 5, B 2 and 3 excluded:

        items of the beams         0 1, 2 3 of map 0     2 4, 1 3 of map 1
        sorted                     0  1  1  2  2  3  3  4
        returned                   0  1 -1  2 -1 -1 -1  4     -1 is none

    If m · B · alpha is less than k, more -1 follow, up to k columns.
    """
    _, members = query.bloom_map.tables_on(beams.device)  # (m, R, alpha)
    columns = []
    for j, items_of_bucket in enumerate(members):  # (R, alpha)
        items = items_of_bucket[beams[:, j]]  # (P, B, alpha)
        columns.append(items.flatten(1))
    items = torch.cat(columns, 1)  # (P, m · B · alpha)
    # an item may be in the beams of several maps: sort, and drop those that repeat the one before
    items = items.sort(1).values.long()
    is_repeated = items[:, 1:] == items[:, :-1]
    items[:, 1:].masked_fill_(is_repeated, -1)
    for excluded in query.exclude.unbind(1):  # (P,)
        items.masked_fill_(items == excluded.unsqueeze(1), -1)
    return F.pad(items, (0, max(query.k - items.shape[1], 0)), value=-1)


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
        bloom_map: the model's own BloomMap. A map with another R is not detected here. The searches
            refuse it if its R is larger than R + s, the width of a block. They do not otherwise.

    Raises:
        ValueError: If logits has not m rows at each position.
    """
    m = bloom_map.m
    if logits.shape[1] != m:
        raise ValueError(f"logits: expected {m} rows of each position, got {logits.shape[1]}.")
    logp = logits.log_softmax(-1, dtype=torch.float32)
    blocks = logp.unflatten(-1, (m, -1))  # (P, m rows, m blocks, R + s)
    rows = []
    for j in range(m):
        rows.append(blocks[:, j, j, :bloom_map.num_buckets])  # (P, R)
    return torch.stack(rows, 1)


# Demo


DEMO_MEMBERS = [  # (m, R, alpha), of two maps of 12 items
    [[8, 9, 10], [3, 5, 11], [0, 1, 4], [2, 6, 7]],
    [[3, 4, 7], [2, 8, 11], [0, 5, 9], [1, 6, 10]],
]
DEMO_PROBABILITIES = [[0.64, 0.19, 0.14, 0.03], [0.56, 0.02, 0.22, 0.20]]  # of buckets, (m, R)


def main():
    """Show two small maps, the score of an item, and beam searches with their bounds."""
    members = torch.tensor(DEMO_MEMBERS)
    probabilities = torch.tensor(DEMO_PROBABILITIES)
    digest = members.flatten(1).argsort(1).T // 3  # (N, m): the place of an item says its bucket
    bloom_map = SimpleNamespace(
        n_items=12, m=2, num_buckets=4, alpha=3, tables_on=lambda device: (digest, members))
    print("Two maps of 12 items in buckets of 3, and the probability that a model gives to each "
          "bucket:")
    for j in range(2):
        print(f"\nmap {j}")
        for p, items in zip(probabilities[j], members[j].numpy()):
            print(f"    {p:.2f}  {items}")
    print(f"\nItem 9 has the digest {digest[9].tolist()}", end="")
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
