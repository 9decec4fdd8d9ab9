"""Fit a tokenizer to a corpus, and hash each of its words once: the table of codes that a model reads.

Paper map:    [HF §3.2] build_codes   [HF §3.3] fit_hash   [SB App. D] build_bloom_map
Out of scope: the hash functions (hashing.py), Bloom maps (bloom.py), the tokenizer itself (tokenizer.py).
Notation:     V words   C code numbers per word   k hash functions of a sketch
"""

import contextlib
import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from bloom import BloomMap, coherent_map
from runtime import InputError, blame_input, build_once, fingerprint, start_workers
from tokenizer import FIRST_WORD_ID, HASHES, HashTokenizer


def build_tokenizer(args, config, corpus):
    """Build the tokenizer that the flags ask for.

    Args: args, Namespace with the flags of pretrain.py; config, model.Config; corpus, data.corpus.Corpus.
    Returns: HashTokenizer, whose config is the final one: a fixed vocabulary decides its rows.
    """
    options = dict(split=args.split, subwords=corpus.subwords, hash_seed=args.hash_seed, key=args.key)
    if config.code_format in ("row", "digest"):
        words = options["vocabulary"] = corpus.words if corpus.subwords else corpus.words[:args.vocab]
        rows = dict(rows=FIRST_WORD_ID + len(words))
        if config.code_format == "digest":
            bloom_map = options["bloom_map"] = build_bloom_map(args, config, corpus, len(words))
            rows = dict(buckets=bloom_map.buckets + FIRST_WORD_ID)  # of a block
        config = dataclasses.replace(config, **rows)
    elif config.code_format in ("index", "chunks", "bits"):
        options |= dict(hash_name=args.hash, hash=fit_hash(args, corpus))
    return HashTokenizer(config, **options)


def fit_hash(args, corpus):
    """Return the hash of --hash fitted to the corpus, beside which it is kept. [HF §3.3]"""
    cls = HASHES[args.hash]
    options = {name: getattr(args, flag) for name, flag in cls.options.items()}
    if not cls.needs_counts:
        return cls.fit(None, **options)

    def fit(path):
        counts = {word: n for word, n in zip(corpus.words, corpus.counts[FIRST_WORD_ID:].tolist()) if n}
        Path(path).write_text(json.dumps(cls.fit(counts, **options).state()))

    path = os.path.join(corpus.folder, f"fit-{args.hash}-{fingerprint(options)}.json")
    return _build_and_load(path, fit, lambda path: cls(**json.loads(Path(path).read_text())))


def build_bloom_map(args, config, corpus, num_items):
    """Return the Bloom map of the flags; --coherent learns from the training pages alone. [SB App. D]"""
    shape = dict(n_items=num_items, alpha=args.alpha, m=config.hashes, seed=args.hash_seed)
    if not args.coherent:
        with blame_input(f"--alpha of {num_items:,} items"):
            return BloomMap(**shape)

    def build(path):
        spans = (corpus.offsets[i:i + 2] for i in corpus.split_pages()[0])
        pages = [corpus.ids[start:stop].astype(np.int64) - FIRST_WORD_ID for start, stop in spans]
        pages = [page[(page >= 0) & (page < num_items)] for page in pages]
        if not any(map(len, pages)):
            raise InputError("--coherent requires training pages, and all pages are held out.")
        sizes = np.array([len(page) for page in pages])
        bloom_map = coherent_map(np.concatenate(pages), sizes, coherent=args.coherent, **shape)
        with open(path, "wb") as file:
            np.save(file, bloom_map.members.reshape(config.hashes, -1)[:, :num_items])

    path = os.path.join(corpus.folder, f"coherent-{fingerprint([*shape.values(), args.coherent])}.npy")
    return _build_and_load(path, build, lambda path: BloomMap(**shape, orders=np.load(path)))


def build_codes(args, tokenizer, corpus):
    """Return two tensors: codes (5 + V, C), and what hash-mlm predicts, (5 + V, k), else codes. [HF §3.2]"""
    c, hash = tokenizer.config, tokenizer.hash
    if tokenizer.is_fixed:
        codes = torch.from_numpy(tokenizer.codes())
        return codes, codes
    about = [c.code_format, tokenizer.hash_name, hash and fingerprint(hash.state()), c.bits, c.chunk, c.rows,
             c.hashes, c.buckets, c.weights, args.hash_seed, args.key]
    is_slow = hash is not None and hash.is_slow
    codes = _hash_corpus(tokenizer.hash_words, tokenizer.special_codes(), corpus, about, is_slow, args.quiet)
    if c.head != "hash-mlm" or c.code_format == "sketch":
        return codes, codes
    specials, about = np.zeros((FIRST_WORD_ID, c.hashes), np.int32), ["targets", *about]
    return codes, _hash_corpus(tokenizer.sketch_targets, specials, corpus, about, False, args.quiet)


def _hash_corpus(hash_words, specials, corpus, about, is_slow, quiet):
    """Return the codes of special tokens and all words as a tensor, computed once for each `about`."""
    def build(path):
        parts = [corpus.words[i:i + 20_000] for i in range(0, len(corpus.words), 20_000)]
        workers = start_workers() if is_slow and len(parts) > 1 else contextlib.nullcontext()
        with open(path, "wb") as file, workers as pool:
            hashed = (pool.imap if pool else map)(hash_words, parts)
            bar = tqdm(hashed, "hashing words", len(parts), disable=quiet or None)
            np.save(file, np.concatenate([specials, *bar]))

    path = os.path.join(corpus.folder, f"codes-{fingerprint(about)}.npy")
    return torch.from_numpy(_build_and_load(path, build, np.load))


def _build_and_load(path, build, load):
    """Build a file beside the corpus once, and load it; InputError where it is damaged."""
    build_once(path, build)
    try:
        return load(path)
    except Exception as error:  # whatever the libraries raise
        raise InputError(f"{path}: damaged file ({error}). Remove its folder: it is built again.") from error
