"""Items to m hash tokens each: Bloom maps, which search.py reads to find the items again.

Sources:
    [SB] Anderson et al. 2020, Superbloom: Bloom filter meets Transformer
    [CM] Median is all you need, a proposal
Out of scope: hash tokens to items (search.py), hashing of strings (hashing.py), maps that are
    learned from item sets (coherent.py).
Deviations:
    1. Random orders come from integer arithmetic alone, so a BloomMap is the same on every machine.
       The paper names no generator.
    2. In the last map, an item that shares all m buckets with another swaps places with a random
       item, until no two items have the same digest. The paper makes sure that no two have, and
       does not say how.
Notation:
    N items   m hashes of an item   R buckets of a map   alpha items of a bucket
Demo: python bloom.py

A Bloom filter marks each item at m hashed places of one array. Items share places, but the m places
together tell one item from another; hence the name. Here m tables of R = N / alpha rows serve N
items: an item has a row in each, its m hash tokens, and shares each with alpha - 1 others.
"""

import math
import zlib

import numpy as np
import torch

MAX_SWAP_ROUNDS = 100  # far above what is needed, which is about log2 of the items to swap
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
        # subtle: tobytes goes item by item (row-major), although in memory it is map by map
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
        largest = largest_alpha(n_items, m)
        raise ValueError(f"alpha: expected about {largest:,} at most, got {alpha}.")
    return digest


def largest_alpha(n_items, m):
    """Return about the largest alpha with which swap_repeated ends, int, at least 1.

    N of the R^m = (N / alpha)^m digests are taken. A swap gives two items new digests. Where a
    quarter is taken, a swap makes 2 · 1/4 repeated items on average, so each turn of swap_repeated
    leaves half of them. A quarter is taken where

        (N / alpha)^m = 4 · N,  so  alpha = (N^(m-1) / 4)^(1/m)
    """
    alpha = (n_items ** (m - 1) / 4) ** (1 / m)
    return max(int(alpha), 1)


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
    for turn in range(MAX_SWAP_ROUNDS):  # a swap may make a digest that another item has
        repeated = find_repeated(digest)
        if len(repeated) == 0:
            return True
        partners = choose_partners(repeated, n_items, seed, m, turn)
        repeated = repeated[:len(partners)]  # if N < 2n some wait for the next turn
        last[repeated], last[partners] = last[partners], last[repeated]
    return False


def choose_partners(repeated, n_items, seed, m, turn):
    """Return a random item for each of repeated, int (n,), to swap places with: int (n,).

    If N < 2n there are fewer, N - n.
    """
    # subtle: a repeated item is no partner, or it would move twice. At most n of 2n random items
    # are repeated, so n partners are left
    n = len(repeated)
    candidates = random_order(n_items, seed, m, turn)[:2 * n]
    return candidates[~np.isin(candidates, repeated)][:n]


def find_repeated(digest):
    """Return all items of each digest but its first: int (n,), by digest and then by number.

    For the digests (0, 1), (2, 0), (0, 1), (0, 1), (2, 0) of the items 0 to 4 these are 2, 3 and 4.
    """
    # sort by map 0, then by map 1 ...: lexsort sorts by its last row first. In another order the
    # same items would swap with other partners, and saved checksums would fail
    by_digest = np.lexsort(digest.T[::-1])  # (N,), items
    is_equal = np.diff(digest[by_digest], axis=0) == 0  # (N - 1, m), to the item before
    is_repeated = is_equal.all(1)
    return by_digest[1:][is_repeated]


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


def main():
    """Show two small Bloom maps and the digest of an item."""
    bloom_map = BloomMap(12, alpha=3, orders=DEMO_ORDERS)
    print("Two maps of 12 items in buckets of 3:")
    for j in range(2):
        print(f"\nmap {j}")
        for bucket, items in enumerate(bloom_map.members[j]):
            print(f"    bucket {bucket}  {items}")
    print(f"\nItem 9 has the digest {bloom_map.digest[9].tolist()}, as no other item has.")


if __name__ == "__main__":
    main()
