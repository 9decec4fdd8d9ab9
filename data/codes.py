"""The tokenizer of a corpus, and the codes of its words: each word is hashed once.

Sources:
    [HF] Xue & Aletras 2022, HashFormers
    [SB] Superbloom, ICLR 2020 submission
    [CM] Median is all you need, a proposal
Out of scope: the hash functions (hashing.py), Bloom maps (bloom.py), the tokenizer (tokenizer.py).
Notation:
    V words   C code numbers of a word   k hash functions of a sketch   m hashes of an item

    corpus -> build_tokenizer -> build_codes -> Model.set_codes
                                 build_targets -> the objective hash-mlm

What takes long is kept in the folder of the corpus: fitted hashes, coherent maps and tables of
codes. The name of a file has a fingerprint of everything that its content depends on.
"""

import json
import os
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from bloom import BloomMap, coherent_map
from common import InputError, blame_file, blame_input, build_once, fingerprint, start_workers
from data.batches import divide
from hashing import NgramLSH
from tokenizer import FIRST_WORD_ID, HASHES, UNK, HashTokenizer

PART = 20_000  # words that a process hashes at a time
MAX_UNKNOWN = 0.1  # share of words; above it there is a warning


def list_vocabulary(args, corpus):
    """Return the words that a fixed vocabulary has, list[str]: the most frequent, or all pieces."""
    if corpus.subwords is not None:  # --vocab is the number of pieces, and all are kept
        return corpus.words
    return corpus.words[:args.vocab]


def build_tokenizer(args, config, corpus):
    """Build the tokenizer that the flags ask for.

    Args:
        args: Namespace with the flags of pretrain.py.
        config: model.Config, with as many rows or buckets as the vocabulary needs.
        corpus: data.corpus.Corpus.

    Returns:
        HashTokenizer.
    """
    parts = dict(split=args.split, subwords=corpus.subwords, hash_seed=args.hash_seed, key=args.key)
    if config.code_format in ("index", "chunks", "bits"):
        parts["hash_name"] = args.hash
        parts["hash"] = fit_hash(args, corpus)
    elif config.code_format in ("row", "digest"):
        parts["vocabulary"] = list_vocabulary(args, corpus)
    if config.code_format == "digest":
        num_items = len(parts["vocabulary"])
        parts["bloom_map"] = build_bloom_map(args, config.hashes, corpus, num_items)
    return HashTokenizer(config, **parts)


def load_tokenizer(state, config, corpus):
    """Return the tokenizer of another run's state(); InputError unless its IDs fit the corpus."""
    tokenizer = HashTokenizer.load(state, config)
    pieces = getattr(tokenizer.subwords, "json", None)  # of BPE or phrases
    corpus_pieces = getattr(corpus.subwords, "json", None)
    corpus_words = corpus.words[:len(tokenizer.words)]  # none, where words are hashed
    if pieces != corpus_pieces or tokenizer.words != corpus_words:
        raise InputError("--init_from: requires the pieces and words of its own corpus, got those "
                         "of another --data. Use the same --data, or hashed whole words.")
    return tokenizer


def build_codes(args, config, tokenizer, corpus):
    """Return the codes of all token IDs, integer tensor (5 + V, C). [HF §3.2]

    Args:
        args: Namespace with quiet, bool.
        config: model.Config.
        tokenizer: HashTokenizer of the corpus.
        corpus: data.corpus.Corpus.
    """
    if tokenizer.is_fixed:  # its codes were made with it
        return torch.from_numpy(tokenizer.codes())

    def hash_corpus():
        announce(args, corpus, "hashing")
        codes = hash_in_parts(tokenizer, corpus.words, args.quiet)
        return np.concatenate([tokenizer.special_codes(), codes])

    c = config
    sizes = [c.code_format, c.bits, c.chunk, c.rows, c.hashes, c.buckets, c.weights]
    codes = build_array_once(corpus, "codes", [sizes, tokenizer.state()], hash_corpus)
    return torch.from_numpy(codes)


def build_targets(config, tokenizer, corpus, codes):
    """Return what hash-mlm predicts of each token ID, int32 tensor (5 + V, k). [CM]

    Digests and sketches are hashes themselves. Other heads predict no hashes: None.
    """
    if config.head != "hash-mlm":
        return None
    if tokenizer.is_fixed or config.code_format == "sketch":
        return codes
    specials = np.zeros((FIRST_WORD_ID, config.hashes), np.int32)  # never predicted
    sketches = tokenizer.sketch_targets(corpus.words)
    return torch.from_numpy(np.concatenate([specials, sketches]))


def fit_hash(args, corpus):
    """Return the hash of --hash, fitted to the words of the corpus. [HF §3.3]"""
    cls = HASHES[args.hash]
    options = {name: getattr(args, flag) for name, flag in cls.options.items()}
    if not cls.needs_counts:
        return cls.fit(None, **options)

    def fit(temporary):
        announce(args, corpus, f"fitting {args.hash} to")
        counts = dict(zip(corpus.words, corpus.counts[FIRST_WORD_ID:].tolist()))
        # some pieces of BPE do not occur
        counts = {word: count for word, count in counts.items() if count > 0}
        state = cls.fit(counts, **options).state()
        Path(temporary).write_text(json.dumps(state))

    path = os.path.join(corpus.folder, f"fit-{args.hash}-{fingerprint(options)}.json")
    build_once(path, fit)
    with blame_file(path):
        state = json.loads(Path(path).read_text())
        return cls(**state)


def build_bloom_map(args, m, corpus, num_items):
    """Return the Bloom map of the first num_items words: random, or by --coherent. [SB App. D]

    A coherent map has items of the same pages in a bucket. It learns from training pages alone:
    held-out pages would tell which items go together.
    """
    shape = dict(n_items=num_items, alpha=args.alpha, m=m, seed=args.hash_seed)

    def learn_orders():
        pages = []
        train_pages, _ = corpus.split_pages()
        for number in train_pages:
            start, end = corpus.offsets[number:number + 2]
            items = corpus.ids[start:end].astype(np.int64) - FIRST_WORD_ID
            is_item = (items >= 0) & (items < num_items)  # neither a separator nor unknown
            pages.append(items[is_item])
        sizes = np.array([len(items) for items in pages])
        if sizes.sum() == 0:
            raise InputError("--coherent: requires training pages, got none. Use more item sets.")
        items = np.concatenate(pages)
        bloom_map = coherent_map(items, sizes, coherent=args.coherent, **shape)
        return np.argsort(bloom_map.digest, axis=0, kind="stable").T  # (m, N)

    with blame_input(f"--alpha of {num_items:,} items"):
        if not args.coherent:
            return BloomMap(**shape)
        orders = build_array_once(corpus, "coherent", [shape, args.coherent], learn_orders)
        return BloomMap(**shape, orders=orders)


def announce(args, corpus, stage):
    """Print which stage begins, where there are words enough for it to take seconds."""
    if len(corpus.words) > PART and not args.quiet:
        print(f"{stage} {len(corpus.words):,} words", flush=True)


def hash_in_parts(tokenizer, words, quiet):
    """Return the codes (V, C) of words, computed in parallel processes where that pays."""
    parts = divide(words, PART)
    is_slow = tokenizer.hash is not None and tokenizer.hash.is_slow
    if not is_slow or len(parts) == 1:  # done before the processes have started
        return np.concatenate([tokenizer.hash_words(part) for part in parts])
    hidden = True if quiet else None  # of the progress bar; None: where no terminal shows it
    with start_workers() as pool:
        codes = pool.imap(tokenizer.hash_words, parts)
        return np.concatenate(list(tqdm(codes, "hashing words", len(parts), disable=hidden)))


def build_array_once(corpus, name, identity, build):
    """Return the array that build() returns, kept in a file beside the corpus.

    Args:
        corpus: data.corpus.Corpus.
        name: str, how the name of the file begins.
        identity: value of plain types, all that the result depends on besides the corpus.
        build: function without arguments.

    Raises:
        InputError: If the file is damaged.
    """
    def save(temporary):
        array = build()
        with open(temporary, "wb") as file:  # to a path, np.save would append .npy
            np.save(file, array)

    path = os.path.join(corpus.folder, f"{name}-{fingerprint(identity)}.npy")
    build_once(path, save)
    with blame_file(path):
        return np.load(path)


def report_unknown(tokenizer, codes, counts):
    """Print the share of a text's words that look all alike to a model, if there are any.

    A table or a Bloom map knows its vocabulary, and an LSH the words with an n-gram of the corpus
    that it was fitted to.

    Args:
        tokenizer: HashTokenizer.
        codes: (V, C), tensor or array, by token ID.
        counts: int (n,), how often each ID is in the text. IDs from V on are unknown.
    """
    codes = np.asarray(codes)[:len(counts)]
    is_known = np.zeros(len(counts), bool)
    is_known[FIRST_WORD_ID:len(codes)] = True
    if isinstance(tokenizer.hash, NgramLSH):  # without such an n-gram no bit is set, or index is 0
        is_known[FIRST_WORD_ID:len(codes)] = codes[FIRST_WORD_ID:].any(1)
    is_word = np.arange(len(counts)) >= FIRST_WORD_ID
    is_word[UNK] = True
    share = 1 - counts[is_known].sum() / max(counts[is_word].sum(), 1)
    if share > 0:
        text = f"unknown words, all alike to the model: {share:.1%}"
        if share > MAX_UNKNOWN:
            text = f"warning: {text}. Use --hash md5, or pre-train on such text."
        print(text, flush=True)
