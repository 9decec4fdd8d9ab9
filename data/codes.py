"""Fit a tokenizer to a corpus, and hash each of its words once: the table that a model reads.

Paper map:
    [HF §3.2] build_codes
    [HF §3.3] fit_hash
    [SB App. D] build_bloom_map
Sources:
    [HF] Xue & Aletras 2022, HashFormers
    [SB] Superbloom, ICLR 2020 submission
Out of scope: the hash functions (hashing.py), Bloom maps (bloom.py), the tokenizer (tokenizer.py).
Notation:
    V words   C code numbers of a word   k hash functions of a sketch   m hashes of an item

What takes long is kept in the folder of the corpus: fitted hashes, coherent maps and tables of
codes. The name of a file has a fingerprint of everything that its content depends on.
"""

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from bloom import BloomMap, coherent_map
from common import InputError, blame_file, blame_input, build_once, fingerprint, start_workers
from data.batches import divide
from tokenizer import FIRST_WORD_ID, HASHES, HashTokenizer

PART = 20_000  # words that a process hashes at a time


def build_tokenizer(args, config, corpus):
    """Build the tokenizer that the flags ask for.

    Args:
        args: Namespace with the flags of pretrain.py.
        config: model.Config.
        corpus: data.corpus.Corpus.

    Returns:
        HashTokenizer. Its config is the final one: a fixed vocabulary decides its rows or buckets.
    """
    options = dict(split=args.split, subwords=corpus.subwords, hash_seed=args.hash_seed,
                   key=args.key)
    if config.code_format in ("index", "chunks", "bits"):
        options["hash_name"] = args.hash
        options["hash"] = fit_hash(args, corpus)
    elif config.code_format in ("row", "digest"):
        words = corpus.words
        if corpus.subwords is None:  # else --vocab is the number of pieces, and all are kept
            words = words[:args.vocab]
        options["vocabulary"] = words
        if config.code_format == "row":
            config = dataclasses.replace(config, rows=FIRST_WORD_ID + len(words))
        else:
            bloom_map = build_bloom_map(args, config, corpus, len(words))
            options["bloom_map"] = bloom_map
            # of one block of the table: a row for each bucket and special token
            config = dataclasses.replace(config, buckets=bloom_map.buckets + FIRST_WORD_ID)
    return HashTokenizer(config, **options)


def announce(args, corpus, stage):
    """Print which stage begins, where there are words enough for it to take seconds."""
    if len(corpus.words) > PART and not args.quiet:
        print(f"{stage} {len(corpus.words):,} words", flush=True)


def fit_hash(args, corpus):
    """Return the hash of --hash, fitted to the words of the corpus. [HF §3.3]"""
    cls = HASHES[args.hash]
    options = {name: getattr(args, flag) for name, flag in cls.options.items()}
    if not cls.needs_counts:
        return cls.fit(None, **options)

    def fit(temporary):
        announce(args, corpus, f"fitting {args.hash} to")
        counts = {}
        for word, count in zip(corpus.words, corpus.counts[FIRST_WORD_ID:].tolist()):
            if count > 0:  # some pieces of BPE do not occur
                counts[word] = count
        state = cls.fit(counts, **options).state()
        Path(temporary).write_text(json.dumps(state))

    path = os.path.join(corpus.folder, f"fit-{args.hash}-{fingerprint(options)}.json")
    build_once(path, fit)
    with blame_file(path):
        state = json.loads(Path(path).read_text())
        return cls(**state)


def build_bloom_map(args, config, corpus, num_items):
    """Return the Bloom map of the first num_items words: random, or by --coherent. [SB App. D]

    A coherent map has items of the same pages in a bucket. It learns from training pages alone:
    held-out pages would tell which items go together.
    """
    shape = dict(n_items=num_items, alpha=args.alpha, m=config.hashes, seed=args.hash_seed)

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
        identity = [shape, args.coherent]
        orders = build_array_once(corpus, "coherent", identity, learn_orders)
        return BloomMap(**shape, orders=orders)


def build_codes(args, tokenizer, corpus):
    """Return the codes of all token IDs, and what a model predicts of them. [HF §3.2]

    Args:
        args: Namespace with quiet, bool.
        tokenizer: HashTokenizer of the corpus.
        corpus: data.corpus.Corpus.

    Returns:
        codes: integer tensor (5 + V, C).
        targets: int32 tensor (5 + V, k), the sketches that hash-mlm predicts. For any other head,
            and where the codes are these sketches, they are the codes.
    """
    c = tokenizer.config
    if tokenizer.is_fixed:
        codes = torch.from_numpy(tokenizer.codes())
        return codes, codes

    def hash_corpus():
        announce(args, corpus, "hashing")
        codes = hash_in_parts(tokenizer, corpus.words, args.quiet)
        return np.concatenate([tokenizer.special_codes(), codes])

    identity = [[c.code_format, c.bits, c.chunk, c.rows, c.hashes, c.buckets, c.weights],
                tokenizer.state()]
    codes = build_array_once(corpus, "codes", identity, hash_corpus)
    codes = torch.from_numpy(codes)
    if c.head != "hash-mlm" or c.code_format == "sketch":
        return codes, codes
    of_specials = np.zeros((FIRST_WORD_ID, c.hashes), np.int32)
    targets = np.concatenate([of_specials, tokenizer.sketch_targets(corpus.words)])
    return codes, torch.from_numpy(targets)


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
