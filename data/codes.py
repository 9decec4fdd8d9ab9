"""The tokenizer of a corpus, and the codes of its words: each word is hashed once.

Sources:
    [HF] Xue & Aletras 2022, HashFormers
    [SB] Anderson et al. 2020, Superbloom
    [CM] Median is all you need, a proposal
Out of scope: the hash functions (hashing.py), code formats (data/coders.py), Bloom maps (bloom.py),
    the tokenizer (tokenizer.py).
Notation:
    V words   C code numbers of a word   k hash functions of a sketch   m hashes of an item

    Corpus, tokenizer -> build_codes -> Model.set_codes
    Corpus, tokenizer, codes -> build_targets -> objective hash-mlm

The folder of the corpus keeps what takes long: fitted hashes, coherent maps and tables of codes.
The name of a file has a fingerprint of everything that its content depends on, the files of CODE
too: an edit of them takes effect in the next run.
"""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bloom import BloomMap
from data.batches import divide
from data.coders import CODERS
from data.items import learn_map
from hashing import HASHES
from support.common import InputError, blame, build_once, fingerprint, reading, save_parts
from support.common import start_workers
from tokenizer import FIRST_WORD_ID, UNK, HashTokenizer, make_tokenizer

ROOT = Path(__file__).resolve().parents[1]
CODE = [ROOT / name for name in (  # they decide on codes and maps
    "bloom.py", "coherent.py", "data/coders.py", "hashing.py", "data/items.py", "tokenizer.py",
    "data/codes.py")]
MAX_UNKNOWN = 0.1  # share of the words of a text that may be unknown; above it users are told
MAX_HASHED = 20_000  # words that a process hashes at a time


# -------------------------------------------------------------------------------------------------
# The tokenizer, with the hash or the Bloom map that it needs


def build_tokenizer(args, config, corpus):
    """Build the tokenizer that the flags ask for.

    Args:
        args: Namespace with the flags of pretrain.py.
        config: model.Config, as the flags say.
        corpus: data.corpus.Corpus.

    Returns:
        tokenizer: HashTokenizer.
        config: model.Config, whose tables have the sizes that a vocabulary decides.
    """
    fields = CODERS[config.code_format].list_fields()
    parts = dict(hash_seed=args.hash_seed, key=args.key)
    if "hash" in fields:
        parts["hash"] = fit_hash(args, corpus)
    if "vocabulary" in fields:
        parts["vocabulary"] = corpus.words
        if corpus.splitter.json is None:  # the most frequent words; pieces are --vocab already
            parts["vocabulary"] = corpus.words[:args.vocab]
    if "bloom_map" in fields:
        num_items = len(parts["vocabulary"])
        parts["bloom_map"] = build_bloom_map(args, config.hashes, num_items, corpus)
    tokenizer = make_tokenizer(config, corpus.splitter, **parts)
    return tokenizer, replace(config, **tokenizer.coder.table_sizes(FIRST_WORD_ID))


def fit_hash(args, corpus):
    """Return the hash of --hash, fitted to the words of the corpus. [HF §3.3]"""
    hash_class = HASHES[args.hash]
    # argument of fit -> its value, such as {"features": 50_000, "seed": 0}
    options = {name: getattr(args, flag) for name, flag in hash_class.options.items()}
    if not hash_class.needs_counts:  # nothing is learned, so nothing is cached
        return hash_class.fit(None, **options)
    state = cached(corpus, f"fit-{args.hash}", options, fit_state, corpus, hash_class, options)
    return hash_class(**state)


def fit_state(corpus, hash_class, options):
    """Return the state of a hash that is fitted to the words of the corpus."""
    counts = {}
    for word, count in zip(corpus.words, corpus.counts[FIRST_WORD_ID:].tolist()):
        if count > 0:  # some pieces of BPE do not occur
            counts[word] = count
    return hash_class.fit(counts, **options).state()


def build_bloom_map(args, m, num_items, corpus):
    """Return the Bloom map of the vocabulary: random, or by --coherent. [SB App. D]"""
    with blame(f"--alpha for {num_items:,} items"):
        if args.alpha is None:
            bloom_map = fit_bloom_map(args, m, num_items)
        else:
            bloom_map = BloomMap(num_items, args.alpha, m, args.hash_seed)
        if not args.coherent:
            return bloom_map
        options = dict(n_items=num_items, alpha=bloom_map.alpha, m=m, seed=args.hash_seed)
        identity = [options, args.coherent]
        state = cached(corpus, "coherent", identity, learn_map, corpus, args.coherent, options)
        return BloomMap.load(state)


def fit_bloom_map(args, m, num_items):
    """Return the random map of the largest alpha that gives each item a Bloom digest of its own.

    It is args.max_alpha where there are many items.
    """
    for alpha in range(args.max_alpha, 0, -1):
        try:
            bloom_map = BloomMap(num_items, alpha, m, args.hash_seed)
        except ValueError:  # too few digests
            continue
        if alpha < args.max_alpha:
            print(f"alpha: {alpha} items a token, as {num_items:,} are too few for "
                  f"{args.max_alpha}")
        return bloom_map
    raise AssertionError("alpha 1 has enough digests, a bucket for each item")


def load_tokenizer(state, config, corpus):
    """Return the tokenizer of another run's state(); InputError unless its IDs fit the corpus."""
    with blame("--init_from"):
        tokenizer = HashTokenizer.load(state, config)
    # a hashed tokenizer has no list of words, so any corpus fits; a fixed one must be its beginning
    words = corpus.words[:len(tokenizer.words)]
    if tokenizer.splitter.json != corpus.splitter.json or tokenizer.words != words:
        raise InputError("--init_from: requires the pieces and words of its own corpus, got those "
                         "of another --data. Use the same --data, or hashed whole words.")
    return tokenizer


# -------------------------------------------------------------------------------------------------
# The codes of all words, hashed once


def build_codes(config, tokenizer, corpus):
    """Return the codes of all token IDs, integer tensor (5 + V, C). [HF §3.2]

    Args:
        config: model.Config.
        tokenizer: HashTokenizer of the corpus.
        corpus: data.corpus.Corpus.
    """
    if tokenizer.is_fixed:  # codes by the place in a vocabulary: nothing is hashed
        return torch.from_numpy(tokenizer.codes())
    return hash_once(config.code_format, tokenizer.coder, corpus)


def hash_once(code_format, coder, corpus):
    """Return hash_corpus, from a file that all models with these codes share."""
    identity = [code_format, coder.state()]
    return cached(corpus, "codes", identity, hash_corpus, coder, corpus)


def hash_corpus(coder, corpus):
    """Return the codes of special tokens and words, (5 + V, C). Several processes hash many."""
    jobs = divide(corpus.words, MAX_HASHED)
    codes = [coder.special_codes(FIRST_WORD_ID)]
    if len(jobs) == 1:  # done before processes would have started
        codes.append(coder.codes(corpus.words))
    else:
        with start_workers() as pool:
            codes += pool.map(coder.codes, jobs)
    return torch.from_numpy(np.concatenate(codes))


def build_targets(config, tokenizer, corpus, codes):
    """Return the k hash buckets of each token ID, int32 (5 + V, k), which hash-mlm predicts. [CM]

    They are `codes` where the model reads digests or sketches; None for other objectives.
    """
    if config.head != "hash-mlm":
        return None
    if tokenizer.coder.is_predicted:
        return codes
    return hash_once("sketch", tokenizer.target_coder, corpus)


def cached(corpus, name, identity, build, *args):
    """Return build(*args), from a file beside the corpus. build runs if there is no such file.

    Args:
        corpus: data.corpus.Corpus.
        name: str, how the name of the file begins.
        identity: value of plain types, all that the result depends on besides the corpus and the
            files of CODE.
        build: function that returns plain types and tensors.

    Raises:
        InputError: The file is damaged.
    """
    code = [path.read_text("utf-8") for path in CODE]
    path = os.path.join(corpus.folder, f"{name}-{fingerprint([identity, code])}.pt")
    build_once(path, lambda temporary: save_parts(build(*args), temporary))
    with reading(path):
        return torch.load(path, weights_only=True)


def report_unknown(tokenizer, words, counts):
    """Print which share of a text's words a model cannot tell apart, if there are any.

    Args:
        tokenizer: HashTokenizer; its is_known says which words these are.
        words: list[str], the words of token IDs FIRST_WORD_ID, FIRST_WORD_ID + 1, ...
        counts: int (5 + V,), how often each token ID is in the text.
    """
    is_known = tokenizer.is_known(words)
    word_counts = counts[FIRST_WORD_ID:]
    num_unknown = counts[UNK] + word_counts[~is_known].sum()
    share = num_unknown / max(counts[UNK] + word_counts.sum(), 1)
    if share > 0:
        text = f"unknown words, all alike to the model: {share:.1%}"
        if share > MAX_UNKNOWN:
            text = f"warning: {text}. Use an embedding of MD5 hashes, or pre-train on such text."
        print(text, flush=True)
