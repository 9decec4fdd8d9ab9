"""Items to m hash tokens and back: Bloom maps, sketch maps, and the beam search for the best items.

Paper map: [SB] Superbloom: Bloom filter meets Transformer, ICLR 2020 submission
    [SB §3.2] BloomMap   [SB App. D] coherent_map   [SB §2.5 Alg.1] beam_search   [SB App. C] SCORES
    [CM] SketchMap (Median is all you need, a proposal)
Out of scope: hashing of strings (hashing.py), the model that gives the probabilities (model.py).
Deviations:
    1. Random orders come from integer arithmetic alone, so a map is the same on every machine.
    2. Items that random maps put together in all m buckets swap places in the last map until none is left.
    3. The beam width doubles; the paper's grows by B. Buckets that tie with the last of the B stay outside.
Notation: N items   m hashes of an item   R buckets of a map   P positions   B beam width   C candidates
Demo: python bloom.py
"""

import zlib
from functools import partial, reduce

import numpy as np
import torch


def random_order(n, *key):
    """Return 0 .. n-1 in a random order, int64 (n,), that the ints of key fix on any machine (splitmix64)."""
    def mix(x):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    start = np.zeros(1, np.uint64)  # an array, whose arithmetic is modulo 2**64 without a warning
    for part in key:
        start = mix(start + np.uint64(part % 2**64) + np.uint64(0x9E3779B97F4A7C15))
    return np.argsort(mix(start + np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)))


class BloomMap:
    """N items in m maps of buckets, alpha items per bucket; no two items share all m buckets. [SB §3.2]

    Map j is an order of the items, cut after every alpha items; the last bucket may be short:

        N 6, alpha 2        map 0   0 1 | 2 3 | 4 5          digest of item 1: (0, 1)
                            map 1   0 2 | 1 4 | 3 5          digest of item 4: (2, 1)

    Attributes: digest int32 (N, m) in 0 .. R-1; members int32 (m, R, alpha), the items of each bucket, -1
        where it is short; n_items N; alpha; m; seed; buckets R = ceil(N / alpha).
    """

    def __init__(self, n_items, alpha, m=2, seed=0, orders=None):
        """Build the maps from the seed, or from orders int (m, N), a permutation of the items per map."""
        if not all(isinstance(x, (int, np.integer)) and x > 0 for x in (n_items, alpha, m)) or m > 255:
            raise ValueError(f"n_items, alpha, m: expected 1 or more, m < 256, got {n_items}, {alpha}, {m}.")
        self.n_items, self.alpha, self.m, self.seed = n_items, alpha, m, seed
        self.buckets = R = -(-n_items // alpha)
        self._has_orders = orders is not None
        if not self._has_orders:
            orders = [random_order(n_items, seed, j) for j in range(m)]
        elif np.shape(orders) != (m, n_items) or (np.sort(orders) != np.arange(n_items)).any():
            raise ValueError(f"orders: expected {m} permutations of 0 .. {n_items - 1:,}, got other numbers.")
        places = np.empty((m, n_items), np.int64)  # of each item in each order
        np.put_along_axis(places, np.stack(orders), np.arange(n_items)[None], 1)
        # where at least a quarter of all digests is taken, swapping would go on for long: deal the maps out
        dealt = range(1, m) if R ** (m - 1) < 4 * alpha and not self._has_orders else ()
        is_possible = R ** (m - 1) >= min(alpha, n_items)  # the items of a bucket differ in the other maps
        if not (is_possible and all(self._deal(places, j) for j in dealt) and self._repair(places)):
            raise ValueError(f"alpha: expected about {int(n_items ** (1 - 1 / m)):,} at most, got {alpha}.")
        self.digest = (places // alpha).astype(np.int32).T  # (N, m), each map's column in one piece
        self.members = np.full((m, R, alpha), -1, np.int32)
        np.put_along_axis(self.members.reshape(m, -1), places, np.arange(n_items)[None], 1)

    def _cells(self, places):
        """Return int64 (N,), equal for items that share their buckets in all maps of places (maps, N)."""
        cell = np.zeros(self.n_items, np.int64)
        for place in places:
            if cell.max() >= 2**62 // self.buckets:
                cell = np.unique(cell, return_inverse=True)[1]
            cell = cell * self.buckets + place // self.alpha
        return cell

    def _repair(self, places):
        """Swap items that share their digest with others in the last map; return whether none is left."""
        # about (alpha - 1)² / 2 pairs; a new place is good with probability 3/4 or more: few rounds suffice
        for turn in range(100):
            cell = self._cells(places)
            order = np.argsort(cell, kind="stable")
            offenders = order[1:][np.diff(cell[order]) == 0]  # all but one of each cell
            if not len(offenders):
                return True
            partners = random_order(self.n_items, self.seed, self.m, turn)[:2 * len(offenders)]
            partners = partners[~np.isin(partners, offenders)][:len(offenders)]
            offenders = offenders[:len(partners)]
            places[-1, offenders], places[-1, partners] = places[-1, partners], places[-1, offenders]
        return False

    def _deal(self, places, j):
        """Rebuild map j: items alike so far go to different buckets, and every bucket fills up exactly.

        The largest group of them goes first, one to each of the buckets with most room, ties at random. For
        m = 2 this finds a map if there is one: a 0/1 matrix of these row and column sums (Gale and Ryser).
        Returns: bool, False if the last map cannot be dealt so.
        """
        cell, order = self._cells(places[:j]), random_order(self.n_items, self.seed, self.m, j)
        order = order[np.argsort(cell[order], kind="stable")]
        groups = np.split(order, np.flatnonzero(np.diff(cell[order])) + 1)
        token = np.arange(self.n_items) // self.alpha  # of any order, for the size of each bucket
        room = np.bincount(token)
        for number, group in enumerate(sorted(groups, key=len, reverse=True)):
            shuffled = random_order(self.buckets, self.seed, self.m, j, number)
            while len(group):
                best = shuffled[np.argsort(-room[shuffled], kind="stable")[:len(group)]]
                best = best[room[best] > 0]
                room[best] -= 1
                token[group[:len(best)]] = best
                group = group[len(best):]
                if len(group) and j == self.m - 1:
                    return False
        places[j, np.argsort(token, kind="stable")] = np.arange(self.n_items)
        return True

    def check(self):
        """Return eight hex digits of the digests: load() compares them."""
        return f"{zlib.crc32(self.digest.tobytes()):08x}"

    def state(self):
        """Return a dict of plain types: the seed, or the orders of a map that was built from orders."""
        orders = self.members.reshape(self.m, -1)[:, :self.n_items] if self._has_orders else ()
        return dict(n_items=self.n_items, alpha=self.alpha, m=self.m, seed=self.seed, check=self.check(),
                    orders=[order.tobytes() for order in orders] or None)

    @classmethod
    def load(cls, state):
        """Return the BloomMap of a state(). ValueError: the rebuilt digests differ from the saved ones."""
        orders = state["orders"] and [np.frombuffer(order, np.int32) for order in state["orders"]]
        bloom_map = cls(state["n_items"], state["alpha"], state["m"], state["seed"], orders)
        if bloom_map.check() != state["check"]:
            raise ValueError(f"Bloom map: expected check {state['check']}, got {bloom_map.check()}.")
        return bloom_map


class SketchMap:
    """Words by their sketch, with the attributes of a BloomMap; some words may share all k buckets. [CM]"""

    def __init__(self, digest, rows):
        """Take digest int (V, k), as hashing.sketch_index gives it, and the R rows of each hash function."""
        digest = np.asarray(digest)
        if digest.ndim != 2 or digest.dtype.kind not in "iu" or ((digest < 0) | (digest >= rows)).any():
            raise ValueError(f"digest: expected int (V, k) below {rows}, got {digest.dtype} {digest.shape}.")
        (self.n_items, self.m), self.buckets = digest.shape, rows
        self.digest = digest.astype(np.int32)
        sizes = np.stack([np.bincount(column, minlength=rows) for column in digest.T])  # (k, R)
        self.alpha, items = int(sizes.max()), np.argsort(digest, axis=0, kind="stable")  # bucket by bucket
        self.members = np.full((self.m, rows, self.alpha), -1, np.int32)
        self.members[np.arange(self.alpha) < sizes[..., None]] = items.T.ravel()


def item_vectors(items, sizes, n_items, width=64, seed=0):
    """Return a vector per item: items of the same item sets point the same way. [SB App. D]

    Args: items int (links,), set after set; sizes int (sets,), of the sets; n_items N; width, seed int.
    Returns: float32 (N, width) of length 1, or 0 for an item of no set.
    """
    # leading singular vectors of the matrix sets × items, whose co-occurrence matrix is never built
    sets = np.repeat(np.arange(len(sizes)), sizes)  # (links,), the set of each
    weight = 1 / np.sqrt(np.bincount(items, minlength=n_items)[items] * np.asarray(sizes)[sets])

    def multiply(vectors, rows, columns, size):  # by the matrix, or by its transpose
        return np.stack([np.bincount(rows, weight * v[columns], size) for v in vectors.T], 1)  # (size, width)

    vectors = np.random.default_rng(seed).standard_normal((n_items, min(width, n_items)))
    for _ in range(8):
        vectors = np.linalg.qr(multiply(multiply(vectors, sets, items, len(sizes)), items, sets, n_items))[0]
    projected = multiply(vectors, sets, items, len(sizes))
    values, rotation = np.linalg.eigh(projected.T @ projected)
    vectors = (vectors @ rotation) * np.sqrt(np.maximum(values, 0))
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.maximum(length, 1e-12) * (length > 1e-9)).astype(np.float32)


def coherent_map(items, sizes, n_items, alpha, m=2, coherent=None, width=64, seed=0):
    """Return a Bloom map whose buckets hold similar items. [SB App. D]

    By frequency, each free item opens a bucket with its alpha - 1 nearest free items. Items that share one
    bucket share no other, where possible. Ten thousand items take seconds, a million take hours.

    Args: items, sizes, n_items, width as in item_vectors; alpha, m, seed as in BloomMap; coherent int, number
        of maps built so (default: all m), the others are random.
    """
    vectors = item_vectors(items, sizes, n_items, width, seed)
    by_frequency = np.argsort(-np.bincount(items, minlength=n_items), kind="stable")
    orders, coherent = np.empty((0, n_items), np.int64), m if coherent is None else coherent
    for _ in range(coherent):
        left, order, tokens = by_frequency, [], np.argsort(orders, axis=1) // alpha  # (maps so far, N)
        while len(left):
            near = left[np.argsort(-(vectors[left] @ vectors[left[0]]), kind="stable")]
            near = np.append(left[0], near[near != left[0]])
            rank, token = np.zeros(len(near), np.int8), tokens[:, near]
            for _ in range(min(alpha, len(near))):
                best = rank.argmin()
                np.maximum(rank, (token == token[:, best:best + 1]).any(0), out=rank)
                rank[best] = 2  # in this bucket; 1: has shared one with an item of it; 0: free
                order.append(near[best])
            left = left[~np.isin(left, order[-alpha:])]
        orders = np.append(orders, [order], 0)
    orders = [*orders, *(random_order(n_items, seed, j) for j in range(coherent, m))]
    return BloomMap(n_items, alpha, m, seed, orders)


# from the m log-probabilities of an item to its score: any function that is increasing in each [SB App. C]
SCORES = {"sum": sum, "min": partial(reduce, torch.minimum), "max": partial(reduce, torch.maximum)}


def hash_logp(logits, bloom_map):
    """Return the log-probabilities of each map's buckets, float (P, m, R).

    Args: logits float (P, m, R) of a softmax per hash function [CM], or (P, m, m·S) of one over the blocks of
        all maps, where S is R and the special tokens' rows after them; bloom_map, the model's own.
    """
    # Of one over all maps a map's numbers lack one factor: it changes no order by sums of logarithms, but may
    # change one by min or max.
    m, R, rows = bloom_map.m, bloom_map.buckets, logits.shape[-1]
    if logits.ndim != 3 or logits.shape[1] != m or rows != R and (rows % m or rows < m * R):
        raise ValueError(f"logits: expected (P, {m}, {R}) or {m} such blocks or more, got {[*logits.shape]}.")
    logp = logits.log_softmax(-1)
    return logp if rows == R else logp.unflatten(-1, (m, -1))[:, range(m), range(m), :R]


def _best(x, k):
    """Return x.topk(k) of x (..., R), fast on long rows: the k largest lie in the k blocks of top maxima."""
    R, block = x.shape[-1], 64
    if R < 4 * block * k:
        return x.topk(k)
    whole = R // block * block
    first = x[..., :whole].unflatten(-1, (-1, block)).amax(-1).topk(k).indices.sort().values  # (..., k)
    inside = (first.unsqueeze(-1) * block + torch.arange(block, device=x.device)).flatten(-2)
    inside = torch.cat([inside, torch.arange(whole, R, device=x.device).expand(*x.shape[:-1], -1)], -1)
    values, places = x.gather(-1, inside).topk(k)
    return values, inside.gather(-1, places)


def _check_search(score, logp, bloom_map, exclude, *counts):
    """Return the function of a score, and exclude with -1 in it; ValueError where arguments do not fit."""
    m, R, N, x = bloom_map.m, bloom_map.buckets, bloom_map.n_items, exclude
    if logp.shape[1:] != (m, R) or not logp.is_floating_point():
        raise ValueError(f"logp: expected float (P, {m}, {R}), got {logp.dtype} {tuple(logp.shape)}.")
    if x is not None and (x.dtype != torch.int64 or x.shape[:-1] != logp.shape[:1] or (x >= N).any()):
        raise ValueError(f"exclude: expected int64 ({len(logp)}, E) below {N}, got {x.dtype} {[*x.shape]}.")
    if min(counts) < 1:
        raise ValueError(f"k, beam, rounds: expected 1 or more, got {', '.join(map(str, counts))}.")
    if not callable(SCORES.get(score, score)):
        raise ValueError(f"score: expected {', '.join(SCORES)} or a function, got {score!r}.")
    none = logp.new_full((len(logp), 1), -1, dtype=torch.int64)
    return SCORES.get(score, score), none if x is None else torch.cat([x, none], 1)


def _score_candidates(x, digest, members, fresh, before, gamma, exclude):
    """Score the items of fresh buckets (P, m, b), each once: lists of items, scores (P, C); counts (P,)."""
    # the buckets whose items are scored, by an earlier round or map: an item of one of them is not new
    seen = torch.zeros_like(x, dtype=torch.bool).scatter_(2, before, True)  # (P, m, R)
    all_items, all_scores, count = [], [], 0
    for j in range(x.shape[1]):
        items = members[j].index_select(0, fresh[:, j].flatten()).view(len(x), -1)  # (P, C)
        new, parts = (items.unsqueeze(2) != exclude.unsqueeze(1)).all(2), []
        items = items.clamp(min=0).long()
        for i in [*range(j), *range(j + 1, x.shape[1])]:
            token = digest[:, i].index_select(0, items.flatten()).view_as(items).long()
            parts.append(x[:, i].gather(1, token))
            new &= ~seen[:, i].gather(1, token)
        # all items of a bucket have its probability
        parts.insert(j, x[:, j].gather(1, fresh[:, j]).repeat_interleave(members.shape[2], 1))
        seen[:, j].scatter_(1, fresh[:, j], True)
        all_items.append(items)
        all_scores.append(gamma(parts).masked_fill(~new, -torch.inf))
        count = count + new.sum(1)
    return all_items, all_scores, count


@torch.no_grad()
def beam_search(logp, bloom_map, k=20, beam=20, rounds=1, score="sum", exclude=None):
    """Return the k items with the best score among the items of likely buckets. [SB §2.5 Alg.1]

    In each map an item outside the beam has at most the B-th largest probability, so it scores at most what
    these m thresholds do. That certifies k items that reach it. A beam as wide as N items scores all.

    Args:
        logp: float (P, m, R), log-probabilities of the buckets of each map.
        bloom_map: BloomMap or SketchMap that the probabilities are of: one of another seed is not detected.
        k, beam: int, items to return, N at most, and B, the buckets of each map to look into.
        rounds: int, tries with B, 2B, 4B, ... buckets; None: until the certificate holds.
        score: a name of SCORES, or a function of a list of m tensors that is increasing in each. [SB App. C]
        exclude: int64 (P, E), items that may not be returned, -1 for none; or None.
    Returns: ids int64 (P, k), scores (P, k), best first, -1 and -inf where fewer are reached; certified bool
        (P,), no other item scores more than the last of these; scored int64 (P,), number of items scored.
    """
    gamma, exclude = _check_search(score, logp, bloom_map, exclude, k, beam, 1 if rounds is None else rounds)
    digest, members = (torch.from_numpy(a).to(logp.device) for a in (bloom_map.digest, bloom_map.members))
    P, m, R = logp.shape
    N, k, width, turn = bloom_map.n_items, min(k, bloom_map.n_items), min(beam, R), 0
    ids, scores = logp.new_full((P, k), -1, dtype=torch.int64), logp.new_full((P, k), -torch.inf)
    certified, scored = logp.new_zeros(P, dtype=torch.bool), logp.new_zeros(P, dtype=torch.int64)
    todo = torch.arange(P, device=logp.device)  # the positions without a certificate
    before = ids.new_empty(P, m, 0)  # their buckets of earlier rounds
    while len(todo) and (rounds is None or turn < rounds):
        x, left_out = logp if not turn else logp[todo], exclude[todo]
        if turn and m * width * bloom_map.alpha >= N:
            ids[todo], scores[todo] = exhaustive(x, bloom_map, k, score, left_out)
            certified[todo], scored[todo] = True, N
            break
        # subtle: a bucket of probability 0 must not tie with those that are through
        rest = x if not turn else x.clamp(min=torch.finfo(x.dtype).min).scatter(2, before, -torch.inf)
        fresh = _best(rest, width - before.shape[2])[1]  # (P, m, b), line 4: the buckets of this round
        items, each, count = _score_candidates(x, digest, members, fresh, before, gamma, left_out)
        best, place = torch.cat([scores[todo], *each], 1).topk(k)  # lines 5 and 6, with the best so far
        ids[todo] = torch.cat([ids[todo], *items], 1).gather(1, place).masked_fill(best == -torch.inf, -1)
        scores[todo], scored[todo] = best, scored[todo] + count
        # line 7; fewer than k answers score -inf and are never sure, unless all buckets have been looked into
        threshold = gamma(x.gather(2, fresh[:, :, -1:])[..., 0].unbind(1))  # (P,)
        certified[todo] = sure = (best[:, -1] >= threshold) | (width == R)
        before = torch.cat([before, fresh], 2)[~sure]
        todo, width, turn = todo[~sure], min(2 * width, R), turn + 1
    return ids, scores, certified, scored


def beam_search_reference(logp, bloom_map, k, beam, rounds=1, score="sum", exclude=()):
    """Run Algorithm 1 in plain loops for one position: slow, the oracle of the tests. [SB §2.5 Alg.1]

    Args: logp float (m, R); the others as in beam_search.  Returns: ids list, scores list, certified bool.
    """
    gamma, k = {"sum": sum, "min": min, "max": max}[score], min(k, bloom_map.n_items)
    logp, digest, R = logp.tolist(), bloom_map.digest.tolist(), bloom_map.buckets
    best, certified, width, turn = [], False, beam, 0
    # line 2: sort the buckets of each map by probability
    ranked = [sorted(range(R), key=lambda bucket: -row[bucket]) for row in logp]
    while not certified and (rounds is None or turn < rounds):  # line 3: B, 2B, 4B, ... buckets
        if turn and bloom_map.m * width * bloom_map.alpha >= bloom_map.n_items:
            width = R  # a beam as wide as N items scores all
        # line 4: the threshold of a map is the probability of its last bucket in the beam
        beams = [order[:width] for order in ranked]
        threshold = gamma([row[buckets[-1]] for row, buckets in zip(logp, beams)])
        # line 5: the candidates are the items of these buckets
        candidates = {i for i, row in enumerate(digest) if any(b in top for b, top in zip(row, beams))}
        # line 6: score them
        scored = [(gamma([row[b] for row, b in zip(logp, digest[i])]), i) for i in candidates - set(exclude)]
        best = sorted((pair for pair in scored if pair[0] > -float("inf")), reverse=True)[:k]
        # line 7: stop when the k-th item scores what no other item can exceed
        certified = width >= R or (best[-1][0] if len(best) == k else -float("inf")) >= threshold
        turn, width = turn + 1, 2 * width
    return [item for _, item in best], [value for value, _ in best], certified  # line 8


@torch.no_grad()
def exhaustive(logp, bloom_map, k=20, score="sum", exclude=None):
    """Return ids int64 (P, k) and scores (P, k) of the k best of all N items; Args as in beam_search."""
    gamma, exclude = _check_search(score, logp, bloom_map, exclude, k)
    digest = torch.from_numpy(bloom_map.digest).to(logp.device).T  # (m, N)
    results = []
    for x, left_out in zip(logp, exclude):  # (m, R), (E,)
        every = gamma([row.index_select(0, tokens) for row, tokens in zip(x, digest)])  # (N,)
        every[left_out[left_out >= 0]] = -torch.inf
        results.append(_best(every, min(k, bloom_map.n_items)))
    scores, ids = map(torch.stack, zip(*results))
    return ids.masked_fill(scores == -torch.inf, -1), scores


def main():
    """Show a small Bloom map, digests, and beam search beside exhaustive search."""
    bloom_map = BloomMap(12, 3, seed=1)
    logp = torch.randn(1, 2, 4, generator=torch.Generator().manual_seed(2)).mul(2).log_softmax(-1)
    print("A map of 12 items in buckets of 3, and random probabilities of the buckets:")
    for j, table in enumerate(bloom_map.members.tolist()):
        print(f"  map {j}:  ", "  ".join(f"{p:.2f} {items}" for p, items in zip(logp[0, j].exp(), table)))
    for beam in (1, 2, 4):
        ids, scores, certified, scored = beam_search(logp, bloom_map, 2, beam)
        print(f"Beam of {beam}: best items {ids[0].tolist()}, log-probabilities {scores[0].numpy().round(3)}",
              f"{scored.item()} items scored", "certified" if certified else "not certified", sep=", ")
    ids, scores = exhaustive(logp, bloom_map, 2)
    print(f"Exhaustive: best items {ids[0].tolist()}, log-probabilities {scores[0].numpy().round(3)}")


if __name__ == "__main__":
    main()
