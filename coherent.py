"""What item sets tell about their items: maps with similar items in one bucket, and a prior.

bloom.py and search.py need neither: maps are random orders, and searches run without a prior.

Sources:
    [SB] Anderson et al. 2020, Superbloom: Bloom filter meets Transformer
Out of scope: Bloom maps (bloom.py), the search (search.py), which sets to learn from
    (data/items.py).
Deviations:
    1. The paper has no prior.
Notation:
    N items   m maps   alpha items of a bucket   a link is an item of a set
"""

import numpy as np
import torch

from bloom import BloomMap, cut_order, random_order

POWER_ITERATIONS = 8  # of item_vectors


# Coherent maps: similar items in one bucket


def coherent_map(items, sizes, n_items, alpha, m=2, coherent=1, seed=0):
    """Return a Bloom map whose buckets have similar items. [SB App. D]

    The most frequent free item opens a bucket, which the alpha - 1 nearest free items fill, and so
    on. Where possible, two items share the bucket of one coherent map at most. Ten thousand items
    take seconds, a million take hours.

    A coherent bucket is a topic, which a set predicts more easily than a random bucket. But such
    maps tell the items of a topic apart no longer: with 0, 1 and 2 coherent maps of 2, Simple
    Wikipedia has rec@1 0.120, 0.116, 0.086, and certificates for 7, 68, 98 % of the lists
    (results/simplewiki.json).

    Args:
        items: int (links,), the items of all sets, set after set.
        sizes: int (sets,), items of each set.
        n_items: int, N.
        alpha: int, items of a bucket.
        m: int, number of maps.
        coherent: int, number of maps built so, the first ones. The others are random.
        seed: int, 0 or more, of the random maps and of item_vectors.

    Returns:
        BloomMap, whose last map is changed where items would share all m buckets. Its state has the
        orders, as the floats of item_vectors may differ between machines.

    Example, two items in each set:
        items = np.array([0, 3, 1, 2, 4, 7, 5, 6])  # the sets {0, 3}, {1, 2}, {4, 7} and {5, 6}
        bloom_map = coherent_map(items, np.full(4, 2), n_items=8, alpha=2)
        bloom_map.members[0]  # [[0, 3], [1, 2], [4, 7], [5, 6]]
    """
    assert coherent <= m, "coherent: expected m at most"
    vectors = item_vectors(items, sizes, n_items, seed=seed)
    sets_of_item = np.bincount(items, minlength=n_items)  # (N,)
    by_frequency = np.argsort(-sets_of_item, kind="stable")
    orders = []
    buckets = np.empty((n_items, coherent), np.int32)  # of the items in the maps so far
    for j in range(coherent):
        order = []
        free = by_frequency
        while len(free) > 0:
            chosen = pick_similar(free, vectors, buckets[:, :j], alpha)
            order.extend(chosen)
            free = free[~np.isin(free, chosen)]
        orders.append(order)
        buckets[:, j] = cut_order(order, alpha)
    for j in range(coherent, m):
        orders.append(random_order(n_items, seed, j))
    return BloomMap(n_items, alpha, m, seed, orders)


def pick_similar(free, vectors, earlier, alpha):
    """Return the first free item and its alpha - 1 nearest.

    An item that shares a bucket of an earlier map with a chosen one is chosen last. Here alpha is
    4, and the free items are 0 to 4:

        item (nearest first)         0    1    2    3    4
        bucket in the earlier map    0    0    1    1    2
        chosen                       1st  4th  2nd       3rd

    1 and 3 share a bucket with 0 and with 2, so they wait until no other item is left.

    Args:
        free: int (number of free items,), the most frequent first.
        vectors: float (N, width), of item_vectors: a product of two is their cosine.
        earlier: int (N, maps), the buckets of each item in earlier maps.
    """
    similarity = vectors[free] @ vectors[free[0]]
    similarity[0] = np.inf  # itself first
    near = free[np.argsort(-similarity, kind="stable")]  # nearest first
    near_buckets = earlier[near]  # (n, maps)
    is_free = np.ones(len(near), bool)
    is_sharing = np.zeros(len(near), bool)  # a bucket, with a chosen item
    chosen = []
    for _ in range(min(alpha, len(near))):
        candidates = is_free & ~is_sharing
        if not candidates.any():
            candidates = is_free
        best = candidates.argmax()  # the first True, the nearest candidate
        chosen.append(near[best])
        is_free[best] = False
        is_sharing |= (near_buckets == near_buckets[best]).any(1)
    return chosen


def item_vectors(items, sizes, n_items, width=64, seed=0):
    """Return a vector for each item: items of the same item sets point the same way. [SB App. D]

    A is a sparse matrix (sets, items) that has, for each item of each set,

        1 / √(number of sets of the item · number of items of the set).

    So a large set counts for less. The similarity of two items is the cosine of their columns. The
    item factor cancels in the cosine; it only keeps frequent items from filling the largest
    singular values. The sets {0, 1}, {0, 2} and {1, 2, 3}:

        A   0.50  0.50  0     0         columns 0 and 1   0.50 · 0.50 = 0.25      cosine 0.55
            0.50  0     0.50  0         columns 1 and 2   0.41 · 0.41 = 0.17      cosine 0.40
            0     0.41  0.41  0.58      columns 0 and 3                 0         cosine 0

    A column has a number for each set, which may be millions. The singular value decomposition
    A = U Σ Vᵀ replaces it by `width` numbers: the rows of V Σ, with the largest singular values
    alone, have about the same cosines as the columns of A.

    Args:
        items: as in coherent_map.
        sizes: as in coherent_map.
        n_items: int, N.
        width: int, size of a vector.
        seed: int, of the first V.

    Returns:
        float32 (N, width), of length 1. An item of no set is 0.
    """
    num_sets = len(sizes)
    sets = np.repeat(np.arange(num_sets), sizes)  # (links,), the set of each link
    sets_of_item = np.bincount(items, minlength=n_items)  # (N,)
    weight = 1 / np.sqrt(sets_of_item[items] * sizes[sets])  # (links,), the numbers of A

    # Power iteration: a product with Aᵀ A stretches the directions of large singular values most,
    # so random columns turn toward them. qr keeps the columns from all becoming the first one
    V = np.random.default_rng(seed).standard_normal((n_items, min(width, n_items)))
    for _ in range(POWER_ITERATIONS):
        AV = multiply_sparse(sets, items, weight, V, num_sets)  # (sets, width)
        AAV = multiply_sparse(items, sets, weight, AV, n_items)  # (N, width), Aᵀ A V
        V, _ = np.linalg.qr(AAV)  # orthogonal columns of length 1

    # The columns of V span the right space, but are mixtures of the singular vectors. The
    # eigenvectors of (A V)ᵀ A V, (width, width), separate them, and its eigenvalues are Σ²
    AV = multiply_sparse(sets, items, weight, V, num_sets)
    squares, rotation = np.linalg.eigh(AV.T @ AV)
    sigma = np.sqrt(np.maximum(squares, 0))  # rounding may make 0 negative
    vectors = (V @ rotation) * sigma  # V Σ

    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = vectors / np.maximum(length, 1e-12)
    vectors[sets_of_item == 0] = 0
    return vectors.astype(np.float32)


def multiply_sparse(rows, columns, numbers, x, num_rows):
    """Return A @ x, (num_rows, width); A has numbers[i] at row rows[i] and column columns[i]."""
    products = []
    for vector in x.T:
        terms = numbers * vector[columns]
        products.append(np.bincount(rows, terms, num_rows))  # the sum of the terms of each row
    return np.stack(products, 1)


# A prior for the score


def popularity_prior(counts, bloom_map):
    """Return log P(item) - Σ_j log P(bucket of the item in map j), a prior for the score "sum".

    A sum of log p cannot know which item of a bucket is popular: p is the probability of all alpha
    items of the bucket together. Even a model that knows nothing but how often each bucket occurs
    would rank items wrongly. Here item a was seen 8 times, b, c and d never, and each count is
    raised by 1, so that no probability is 0:

        map 0   a b | c d    P 10/12 | 2/12                  a      b      c      d
        map 1   a c | b d    P 10/12 | 2/12    Π P(bucket)   0.69   0.14   0.14   0.03
                                               P(item)       0.75   0.08   0.08   0.08
                                               exp(prior)    1.08   0.60   0.60   3.00

    b and c gain from the popularity of a, with which they share a bucket. The prior takes that
    back: score + prior is log P(item). If a model knows more, and its m predictions are independent
    of each other for each item, score + prior is log P(item | input) up to a constant.

    It costs speed. The bound adds the largest prior of all items, so it is looser, and beams are
    wider until items are certified.

    Args:
        counts: int (N,), how often each item occurs in the training sets.
        bloom_map: BloomMap or ItemMap.

    Returns:
        float32 (N,), a tensor.
    """
    counts = np.asarray(counts) + 1.0
    total = counts.sum()
    prior = np.log(counts / total)
    for column in bloom_map.digest.T:  # (N,), the bucket of each item
        count_of_bucket = np.bincount(column, counts)
        share = count_of_bucket[column] / total  # (N,)
        prior -= np.log(share)
    return torch.from_numpy(prior).float()
