"""Items to m hash tokens and back: Bloom maps, sketch maps, and the beam search for the best items.

Paper map: [SB] Superbloom: Bloom filter meets Transformer, ICLR 2020 submission
    [SB §3.2] BloomMap   [SB App. D] coherent_map   [SB §2.5 Alg.1] beam_search   [SB App. C] SCORES
    [CM] SketchMap (Median is all you need, a proposal)
Out of scope: hashing of strings (hashing.py), the model that gives the probabilities (model.py).
Deviations:
    1. Random orders come from integer arithmetic alone, so a map is the same on every machine.
    2. Items that share all m buckets swap places in the last map. Crowded maps, R^(m-1) < 4 alpha, are dealt
       anew instead. No two items are left with one digest.
    3. The beam width doubles; the paper's grows by B. Buckets that tie with the last of the B stay outside.
Notation: N items   m hashes of an item   R buckets of a map   alpha items per bucket   P positions
          B beam width   b buckets that are new in a round   C candidates   E excluded items
          S rows of a map's block in a model: R, or more with special tokens
Demo: python bloom.py
"""

import zlib
from functools import partial, reduce

import numpy as np
import torch


def random_order(n, *key):
    """Return 0 .. n-1 in random order, int64 (n,), a function of n and the ints of key (splitmix64)."""
    def mix(x):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    start = np.zeros(1, np.uint64)  # an array, as numpy warns when a scalar overflows 2**64
    for part in key:
        start = mix(start + np.uint64(int(part) % 2**64) + np.uint64(0x9E3779B97F4A7C15))
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
        # The items take a share alpha / R^(m-1) of all R^m digests. Above 1/4 swaps often meet a digest that
        # is taken, so _deal builds maps 1, 2, ... anew. Otherwise _repair swaps the few items that need it.
        is_built = R ** (m - 1) >= min(alpha, n_items)  # the items of a bucket differ in the other maps
        if is_built and R ** (m - 1) < 4 * alpha and not self._has_orders:
            is_built = all(self._deal(places, j) for j in range(1, m))
        if is_built:
            is_built = self._repair(places) or self._has_orders and self._deal(places, m - 1)
        if not is_built:
            raise ValueError(f"alpha: expected about {int(n_items ** (1 - 1 / m)):,} at most, got {alpha}.")
        self.digest = (places // alpha).astype(np.int32).T  # (N, m), each map's column in one piece
        self.members = np.full((m, R, alpha), -1, np.int32)
        np.put_along_axis(self.members.reshape(m, -1), places, np.arange(n_items)[None], 1)

    def _cells(self, places):
        """Return int64 (N,), equal for items that share all their buckets in places int64 (maps, N)."""
        cell = np.zeros(self.n_items, np.int64)
        for place in places:
            if cell.max() >= 2**62 // self.buckets:  # renumber: the product below would overflow
                cell = np.unique(cell, return_inverse=True)[1]
            cell = cell * self.buckets + place // self.alpha
        return cell

    def _repair(self, places):
        """Swap items that share their digest with others in the last map; return whether none is left.

        Args: places int64 (m, N), the position of each item in each order; the last row changes in place.
        """
        # For m = 2, random maps leave about (alpha - 1)² / 2 such pairs. At most 1/4 of the digests are
        # taken, so a random new place is free with probability 3/4 or more, and few rounds suffice.
        # Given orders may take more digests: where swaps fail, the last map is dealt anew.
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
        """Rebuild map j: items that share their buckets in maps 0 .. j-1 go to different buckets.

        The largest group of such items goes first, one to each of the buckets with most room, ties at random.
        All buckets get their size. For m = 2 this finds a map if there is one: a 0/1 matrix of groups ×
        buckets with these row and column sums (Gale and Ryser).
        Args: places int64 (m, N), the position of each item in each order; row j changes in place.
        Returns: bool, False if j is the last map and a group finds too few buckets with room.
        """
        cell, order = self._cells(places[:j]), random_order(self.n_items, self.seed, self.m, j)
        order = order[np.argsort(cell[order], kind="stable")]
        groups = np.split(order, np.flatnonzero(np.diff(cell[order])) + 1)
        room = np.bincount(np.arange(self.n_items) // self.alpha)  # (R,), the free places of each bucket
        bucket = np.empty(self.n_items, np.int64)  # of each item
        for number, group in enumerate(sorted(groups, key=len, reverse=True)):
            shuffled = random_order(self.buckets, self.seed, self.m, j, number)
            while len(group):
                best = shuffled[np.argsort(-room[shuffled], kind="stable")[:len(group)]]
                best = best[room[best] > 0]
                room[best] -= 1
                bucket[group[:len(best)]] = best
                group = group[len(best):]
                if len(group) and j == self.m - 1:
                    return False
        places[j, np.argsort(bucket, kind="stable")] = np.arange(self.n_items)
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
    """Words by their sketch, with what the searches read of a BloomMap; words may share all k buckets. [CM]

    Attributes: as of a BloomMap, without the seed; m is the sketch's k, alpha the size of the largest bucket.
    """

    def __init__(self, digest, rows):
        """Take digest int (V, k), as hashing.sketch_index gives it, and the R rows of each hash function."""
        digest = np.asarray(digest)
        if digest.ndim != 2 or digest.dtype.kind not in "iu" or ((digest < 0) | (digest >= rows)).any():
            raise ValueError(f"digest: expected int (V, k) below {rows}, got {digest.dtype} {digest.shape}.")
        (self.n_items, self.m), self.buckets = digest.shape, rows
        self.digest = digest.astype(np.int32)
        sizes = np.stack([np.bincount(column, minlength=rows) for column in digest.T])  # (k, R)
        self.alpha, items = int(sizes.max()), np.argsort(digest, axis=0, kind="stable")  # (V, k), by bucket
        self.members = np.full((self.m, rows, self.alpha), -1, np.int32)
        self.members[np.arange(self.alpha) < sizes[..., None]] = items.T.ravel()  # the first places of each


def item_vectors(items, sizes, n_items, width=64, seed=0):
    """Return a vector per item: items of the same item sets point the same way. [SB App. D]

    Args: items int (links,), set after set; sizes int (sets,), of the sets; n_items N; width, seed int.
    Returns: float32 (N, width) of length 1, or 0 for an item of no set.
    """
    # The rows of V Σ, scaled to length 1, with A = U Σ Vᵀ the sparse matrix sets × items of
    #     A[set, item] = 1 / √(number of sets of the item · number of items of the set).
    # Power iteration V <- qr(Aᵀ A V) finds the leading singular vectors without the N × N matrix Aᵀ A.
    sets = np.repeat(np.arange(len(sizes)), sizes)  # (links,), the set of each
    weight = 1 / np.sqrt(np.bincount(items, minlength=n_items)[items] * np.asarray(sizes)[sets])

    def multiply(vectors, rows, columns, size):  # by A (rows are sets), or by Aᵀ (rows are items)
        return np.stack([np.bincount(rows, weight * v[columns], size) for v in vectors.T], 1)  # (size, width)

    vectors = np.random.default_rng(seed).standard_normal((n_items, min(width, n_items)))
    for _ in range(8):
        vectors = np.linalg.qr(multiply(multiply(vectors, sets, items, len(sizes)), items, sets, n_items))[0]
    projected = multiply(vectors, sets, items, len(sizes))  # A V, (sets, width)
    values, rotation = np.linalg.eigh(projected.T @ projected)  # of Vᵀ Aᵀ A V: the squares of Σ
    vectors = (vectors @ rotation) * np.sqrt(np.maximum(values, 0))  # V Σ
    length, has_set = np.linalg.norm(vectors, axis=1), np.bincount(items, minlength=n_items) > 0
    return (vectors * (has_set / np.maximum(length, 1e-12))[:, None]).astype(np.float32)


def coherent_map(items, sizes, n_items, alpha, m=2, coherent=None, width=64, seed=0):
    """Return a Bloom map whose buckets hold similar items. [SB App. D]

    In order of frequency, each free item opens a bucket with its alpha - 1 nearest free items. Items that
    share one bucket share no other, where possible. Ten thousand items take seconds, a million take hours.

    Args: items, sizes, n_items, width as in item_vectors; alpha, m, seed as in BloomMap; coherent int, number
        of maps built so (default: all m), the others are random.
    """
    vectors = item_vectors(items, sizes, n_items, width, seed)
    by_frequency = np.argsort(-np.bincount(items, minlength=n_items), kind="stable")
    orders, coherent = np.empty((0, n_items), np.int64), m if coherent is None else coherent
    for _ in range(coherent):
        # argsort inverts an order, so this is the bucket of each item in the maps so far, (maps, N)
        left, order, buckets = by_frequency, [], np.argsort(orders, axis=1) // alpha
        while len(left):
            near = left[np.argsort(-(vectors[left] @ vectors[left[0]]), kind="stable")]
            near = np.append(left[0], near[near != left[0]])  # itself, then by similarity
            # rank 2: in the new bucket; 1: shares a bucket of an earlier map with an item of it; 0: neither
            rank, shared = np.zeros(len(near), np.int8), buckets[:, near]
            for _ in range(min(alpha, len(near))):
                best = rank.argmin()  # the nearest item of the lowest rank
                np.maximum(rank, (shared == shared[:, best:best + 1]).any(0), out=rank)
                rank[best] = 2
                order.append(near[best])
            left = left[~np.isin(left, order[-alpha:])]
        orders = np.append(orders, [order], 0)
    orders = [*orders, *(random_order(n_items, seed, j) for j in range(coherent, m))]
    return BloomMap(n_items, alpha, m, seed, orders)


# gamma, from the m log-probabilities of an item to its score: any that decreases in none of them [SB App. C]
SCORES = {"sum": sum, "min": partial(reduce, torch.minimum), "max": partial(reduce, torch.maximum)}


def hash_logp(logits, bloom_map):
    """Return the log-probabilities of each map's buckets, float (P, m, R).

    Args: logits float (P, m, R) of a softmax per hash function [CM], or (P, m, m·S) of one softmax over the
        blocks of all maps, S rows each, R buckets and then special tokens; bloom_map, the model's own.
    """
    # After one softmax over all blocks, the probabilities of a map add up to less than 1. To scale them to 1
    # would add a constant to the map's logarithms. Orders by sum stay, those by min or max may change.
    m, R, rows = bloom_map.m, bloom_map.buckets, logits.shape[-1]
    if logits.ndim != 3 or logits.shape[1] != m or rows != R and (rows % m or rows < m * R):
        raise ValueError(f"logits: expected (P, {m}, {R}) or {m} such blocks or more, got {[*logits.shape]}.")
    logp = logits.log_softmax(-1)
    # of (P, m, m, S) block j at the item's j-th position
    return logp if rows == R else logp.unflatten(-1, (m, -1))[:, range(m), range(m), :R]


def _best(x, k):
    """Return x.topk(k), values and indices (..., k) of x (..., R), fast on long rows.

    The k largest numbers lie in the k blocks with the largest maxima, so topk reads these blocks alone.
    """
    R, block = x.shape[-1], 64
    if R < 4 * block * k:  # they would be more than a quarter of the row
        return x.topk(k)
    whole = R // block * block
    top = x[..., :whole].unflatten(-1, (-1, block)).amax(-1).topk(k).indices.sort().values  # (..., k), blocks
    inside = (top.unsqueeze(-1) * block + torch.arange(block, device=x.device)).flatten(-2)  # (..., k·64)
    inside = torch.cat([inside, torch.arange(whole, R, device=x.device).expand(*x.shape[:-1], -1)], -1)
    values, places = x.gather(-1, inside).topk(k)
    return values, inside.gather(-1, places)


def _check_search(score, logp, bloom_map, exclude, *counts):
    """Return gamma and exclude int64 (P, E+1), with a column of -1; ValueError where arguments do not fit.

    That column excludes the -1 that stand for no item in the members of a short bucket.
    """
    m, R, N, x = bloom_map.m, bloom_map.buckets, bloom_map.n_items, exclude
    if logp.shape[1:] != (m, R) or not logp.is_floating_point():
        raise ValueError(f"logp: expected float (P, {m}, {R}), got {logp.dtype} {tuple(logp.shape)}.")
    if x is not None and (x.dtype != torch.int64 or x.shape[:-1] != logp.shape[:1] or (x >= N).any()):
        raise ValueError(f"exclude: expected int64 ({len(logp)}, E) below {N}, got {x.dtype} {[*x.shape]}.")
    if min(counts) < 1:
        raise ValueError(f"k, beam, rounds: expected 1 or more, got {', '.join(map(str, counts))}.")
    if not callable(SCORES.get(score, score)):
        raise ValueError(f"score: expected {', '.join(SCORES)} or a function, got {score!r}.")
    padding = logp.new_full((len(logp), 1), -1, dtype=torch.int64)
    return SCORES.get(score, score), padding if x is None else torch.cat([x, padding], 1)


def _score_candidates(x, digest, members, fresh, before, gamma, exclude):
    """Score the items of this round's buckets, each item once.

    Args: x float (P, m, R), log-probabilities; digest (N, m) and members (m, R, alpha) of the map; fresh and
        before int64 (P, m, b), buckets of this round and of all earlier ones; exclude int64 (P, E).
    Returns: for each map, items int64 and scores (P, C), C = b · alpha, -inf for an item that is not new;
        and the number of new items, int64 (P,).
    """
    # the buckets whose items have scores, from earlier rounds or maps: an item of one of them is not new
    seen = torch.zeros_like(x, dtype=torch.bool).scatter_(2, before, True)  # (P, m, R)
    all_items, all_scores, count = [], [], 0
    for j in range(x.shape[1]):
        items = members[j].index_select(0, fresh[:, j].flatten()).view(len(x), -1)  # (P, C)
        new, parts = (items.unsqueeze(2) != exclude.unsqueeze(1)).all(2), []  # parts: m of (P, C)
        items = items.clamp(min=0).long()
        for i in range(x.shape[1]):
            if i == j:  # the alpha items of a bucket have its log-probability: no need to look them up
                parts.append(x[:, j].gather(1, fresh[:, j]).repeat_interleave(members.shape[2], 1))
                continue
            bucket = digest[:, i].index_select(0, items.flatten()).view_as(items).long()
            parts.append(x[:, i].gather(1, bucket))
            new &= ~seen[:, i].gather(1, bucket)
        seen[:, j].scatter_(1, fresh[:, j], True)
        all_items.append(items)
        all_scores.append(gamma(parts).masked_fill(~new, -torch.inf))
        count = count + new.sum(1)
    return all_items, all_scores, count


@torch.no_grad()
def beam_search(logp, bloom_map, k=20, beam=20, rounds=1, score="sum", exclude=None):
    """Return the k items with the best score among the items of likely buckets. [SB §2.5 Alg.1]

    An item outside the beam has at most the B-th largest probability of each map, so the score of these m
    numbers is a bound. Where the k-th best item reaches the bound, the k items are certified as the best of
    all. From the second round on, a beam that may hold all items, m·B·alpha >= N, scores all N instead.

    Args:
        logp: float (P, m, R), log-probabilities of the buckets of each map.
        bloom_map: the model's own BloomMap or SketchMap. A map of another seed is not detected.
        k, beam: int, items to return, N at most, and B, the buckets of each map to look into.
        rounds: int, tries with B, 2B, 4B, ... buckets; None: until the certificate holds.
        score: a key of SCORES, or a function like its values. [SB App. C]
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
    todo = torch.arange(P, device=logp.device)  # the positions without a certificate; x and before are theirs
    before = ids.new_empty(P, m, 0)  # the buckets of earlier rounds
    while len(todo) and (rounds is None or turn < rounds):
        x = logp if not turn else logp[todo]
        if turn and m * width * bloom_map.alpha >= N:  # scoring all costs no more than this beam
            ids[todo], scores[todo] = exhaustive(x, bloom_map, k, score, exclude[todo])
            certified[todo], scored[todo] = True, N
            break
        # subtle: a bucket of probability 0 is clamped, to come before those of earlier rounds at -inf
        rest = x if not turn else x.clamp(min=torch.finfo(x.dtype).min).scatter(2, before, -torch.inf)
        fresh = _best(rest, width - before.shape[2])[1]  # (P, m, b), line 4: the buckets of this round
        items, each, count = _score_candidates(x, digest, members, fresh, before, gamma, exclude[todo])
        best, place = torch.cat([scores[todo], *each], 1).topk(k)  # lines 5 and 6, with the best so far
        ids[todo] = torch.cat([ids[todo], *items], 1).gather(1, place).masked_fill(best == -torch.inf, -1)
        scores[todo], scored[todo] = best, scored[todo] + count
        # line 7: the last fresh bucket of a map is its B-th best. With fewer than k answers the k-th score is
        # -inf: they are certified when the beam has all buckets, or when the threshold is -inf too.
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
            width = R  # a beam that may hold all items scores all
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
    """Return ids int64 (P, k) and scores (P, k) of the k best of all items, as beam_search; P at least 1."""
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
    """Show two small Bloom maps, the score of an item, and beam search beside exhaustive search."""
    bloom_map = BloomMap(12, alpha=3, m=2, seed=1)
    logp = torch.tensor([[[0.64, 0.19, 0.14, 0.03], [0.56, 0.02, 0.22, 0.20]]]).log()  # (P 1, m 2, R 4)
    print("Two maps of 12 items in buckets of 3, and the probability that a model gives to each bucket:\n")
    for j, table in enumerate(bloom_map.members.tolist()):
        print(f"  map {j}:  ", "  ".join(f"{p:.2f} {items}" for p, items in zip(logp[0, j].exp(), table)))
    print(f"\nItem 9 has the digest {bloom_map.digest[9].tolist()}: its bucket in each map. Its score is log "
          f"0.64 + log 0.22 =\n{logp[0, [0, 1], [0, 2]].sum():.2f}. A beam of B scores the items of the B "
          "best buckets of each map. Others score\nat most the bound. If the last answer reaches the bound, "
          "the answers are certified:\nprovably the best of all items.\n")
    for beam, bound in zip((1, 2), logp.sort(descending=True).values.sum(1)[0]):
        ids, scores, certified, scored = beam_search(logp, bloom_map, 2, beam)
        print(f"Beam of {beam}: best items {ids[0].tolist()}, scores {scores[0].numpy().round(2)}, bound "
              f"{bound:.2f}, {scored[0]} items scored, {'certified' if certified else 'not certified'}")
    print(f"Exhaustive: best items {exhaustive(logp, bloom_map, 2)[0][0].tolist()}")


if __name__ == "__main__":
    main()
