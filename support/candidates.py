"""The words that a trained model chooses from: for a [MASK], and as neighbors of a word.

A tokenizer that hashes words can choose from any list of them. One with a vocabulary is fixed: only
the words of its vocabulary have a row of the table, or a Bloom digest.

Sources: [HF] Xue & Aletras 2022. [SB], [CM]: see bloom.py
Notation: V words   Q words to look up   k results, or hashes of a word   m vectors of an item
    T bits   d hidden size
"""

import torch
import torch.nn.functional as F

from bloom import ItemMap
from support.runner import list_ids, update_codes

# For a [MASK]


def choose_candidates(tokenizer, words):
    """Return the words that neighbors searches, and the items that a [MASK] may stand for.

        vocabulary a b c, words b x     words b      items a b c
        no vocabulary, words b x        words b x    items b x

    Args:
        tokenizer: HashTokenizer.
        words: list[str], the most frequent first.
    """
    if not tokenizer.is_fixed:
        return words, words
    known = [word for word in words if word in tokenizer.id_of_word]
    return known, tokenizer.words


def map_items(tokenizer, items, num_buckets):
    """Return the hashes of items: a BloomMap [SB], or the ItemMap of a sketch. [CM]

    Args:
        tokenizer: HashTokenizer.
        items: list[str], as choose_candidates returns them.
        num_buckets: int, R, of each hash of a sketch.
    """
    if tokenizer.is_fixed:
        return tokenizer.coder.bloom_map
    buckets = tokenizer.target_coder.codes(items)  # (V, k)
    return ItemMap(buckets, num_buckets)


# Neighbors of a word


def find_neighbors(model, tokenizer, words, queries, k):
    """Find the words that are most similar to each query, seen in training or not. [HF §3.3]

    Words are compared by their hash bits, +1 or -1, if the hash gives similar words similar bits.
    Otherwise they are compared by their embeddings, less the mean embedding of `words`.

    Args:
        model, tokenizer: model.Model and its HashTokenizer.
        words: list of V str, those to choose from, the most frequent first. All are hashed.
        queries: list of Q str.
        k: int.

    Returns:
        For each query a list of the k best (word, cosine), without the query itself. Among equals
        the more frequent word comes first.
    """
    hash = tokenizer.coder.hash
    if hash is not None and hash.near_bits > 0:
        bits = hash.bits(words + queries, hash.near_bits)  # (V + Q, T) of 0 and 1
        vectors = 2.0 * torch.from_numpy(bits) - 1
    else:
        vectors = embed_words(model, tokenizer, words + queries)  # (V + Q, m·d)
        vectors = vectors - vectors[:len(words)].mean(0)
    word_vectors, query_vectors = F.normalize(vectors).split([len(words), len(queries)])
    results = []
    for query, vector in zip(queries, query_vectors):
        cosines = word_vectors @ vector  # (V,)
        best = cosines.argsort(descending=True, stable=True)[:k + 1]
        pairs = []
        for i in best.tolist():
            if words[i] != query:
                pairs.append((words[i], cosines[i].item()))
        results.append(pairs[:k])
    return results


def embed_words(model, tokenizer, words):
    """Return the embeddings of words, float32 (n, m·d), on the CPU."""
    ids = torch.from_numpy(list_ids(tokenizer, words)).long()
    update_codes(model, tokenizer)
    x = model.embed(ids.to(model.device))  # (n·m, d)
    return x.view(len(words), -1).cpu().float()  # cosines of half precision are coarse
