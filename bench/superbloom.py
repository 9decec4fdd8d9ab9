"""Superbloom: sizes of the paper's models, beam search beside exhaustive search, and recall against baselines.

    python -m bench.superbloom sizes (bloom, million)
    python -m bench.superbloom entities --data pages.jsonl (depth, coherent)
    python -m bench.superbloom beams --runs out/bloom-items

Paper map:    [SB Table 1] SIZES   [SB Table 3] SIZES   [SB Table 4] SIZES   [SB Table 2] bench_entities
              [SB Table 7] bench_coherent   [SB Table 6] bench_beams   [SB Figure 3] recall_by_frequency
Notation:     N items   m hashes of an item   d width   P held-out sets
"""

import functools, itertools, sys, time

import numpy as np
import torch

from bench import common
from bench.common import COMPARE, REQUIRED, Bench, Stopwatch, compare, load_corpus, load_run, run_name, sizes_of
from bloom import BloomMap, beam_search, exhaustive, hash_logp
from data.batches import ItemSetBatches
from model import PRESETS, Config, Model
from objectives import RECALL, MaskedHashes
from runtime import InputError
from tokenizer import FIRST_WORD_ID, MASK

NUM_ITEMS = 5_281_889  # of [SB Table 1]
SIZES = {  # [SB Tables 1, 3 and 4]: items, is text; name, alpha, d, heads, dF, layers, what is printed
    ("Table 1", NUM_ITEMS, False): (
        ("baseline", 1, 48, 4, 1024, 12, "248M"), ("sampled-softmax", 1, 512, 8, 2048, 12, "2.6G"),
        ("superbloom", 50, 768, 12, 3072, 12, "229M")),
    ("Table 3", 500_000, False): (
        ("baseline-l1", 1, 256, 1, 1024, 1, "123M"), ("baseline-l12", 1, 256, 8, 1024, 12, "132M"),
        ("superbloom-d256l1", 20, 256, 1, 1024, 1, "13M"), ("superbloom-d384l1", 20, 384, 1, 1536, 1, "21M"),
        ("superbloom-d256l12", 20, 256, 8, 1024, 12, "21M")),
    ("Table 4", 1_000_000, True): (
        ("baseline-h64", 1, 64, 4, 256, 12, "62.6M"), ("hash40-h512", 40, 512, 8, 2048, 12, "62.3M"),
        ("baseline-h256", 1, 256, 8, 1024, 12, "254.4M"), ("hash20-h1024", 20, 1024, 16, 4096, 12, "246.3M"))}


def bench_sizes(args=None):
    """The parameters of [SB Tables 1, 3 and 4], exact; M and G are 2^20 and 2^30 there."""
    rows = []
    for (table, items, is_text), (name, alpha, d, heads, ffn, layers, printed) in (
            (table, model) for table, models in SIZES.items() for model in models):
        emb, head, hashes = ("lookup", "mlm", 1) if alpha == 1 else ("bloom", "hash-mlm", 2)
        vocabulary = hashes * -(-items // alpha)
        total = sizes_of(emb=emb, head=head, rows=vocabulary, hashes=hashes, act="relu", order=is_text, types=2,
                         layers=layers, width=d, heads=heads, ffn=ffn, length=512 if is_text else 32)["total"]
        paper = total + d * d + d  # BERT's pooler, which their formula has and nothing uses
        shown = f"{paper / 2**20:.{int(is_text)}f}M" if paper <= 2**30 else f"{paper / 2**30:.1f}G"
        rows.append(dict(name=f"{table}: {name}", rows=vocabulary, total=total, paper=paper, shown=shown,
                         printed=printed))
    return rows


def bench_bloom(args, *, num_items=NUM_ITEMS, positions=64, rounds=5):
    """Beam search (B = k = 20) and exhaustive scoring of 5,281,889 items, m 2, 64 positions."""
    rows, generator, few = [], torch.Generator().manual_seed(0), positions // 8
    for alpha, kind in itertools.product((10, 20, 50), ("flat", "peaked")):
        if kind == "flat":
            start = time.perf_counter()
            bloom_map = BloomMap(num_items, alpha)
            built, digest = time.perf_counter() - start, torch.from_numpy(bloom_map.digest).long()
            columns = [column.contiguous() for column in torch.from_numpy(bloom_map.digest).T]
        logits = 2 * torch.randn(positions, 2, bloom_map.buckets, generator=generator)
        if kind == "peaked":  # one item's hashes stand out, as of a trained model
            item = digest[torch.randint(num_items, (positions,), generator=generator)]  # (P, 2)
            logits.scatter_add_(2, item.unsqueeze(2), torch.full((positions, 2, 1), 20.0))
        logp = logits.log_softmax(-1)

        def plain():  # torch.topk on all scores
            for x in logp[:few]:
                sum(row.index_select(0, column) for row, column in zip(x, columns)).topk(20)

        watch = Stopwatch({"beam": lambda: beam_search(logp, bloom_map),
                           "sure": lambda: beam_search(logp, bloom_map, rounds=None),
                           "best": lambda: beam_search(logp, bloom_map, k=1, rounds=None),
                           "all": lambda: exhaustive(logp[:few], bloom_map), "plain": plain}, rounds)
        _, _, certified, scored = beam_search(logp, bloom_map)
        _, scores, _, scored_sure = beam_search(logp, bloom_map, rounds=None)
        share = positions / few  # an eighth of the positions is scored exhaustively
        rows.append(dict(
            name=f"alpha {alpha}, {kind}", built=built,
            exact=str(torch.equal(scores[:few], exhaustive(logp[:few], bloom_map)[1])),
            **{name: ms / (few if name in ("all", "plain") else positions) for name, ms in watch.ms().items()},
            ratio=share * watch.ratio("plain", "beam"), ratio_all=share * watch.ratio("all", "beam"),
            ratio_sure=share * watch.ratio("plain", "sure"), scored=scored.double().mean().item(),
            scored_sure=scored_sure.double().mean().item(), certified=100 * certified.double().mean().item()))
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def time_step(preset, batch, num_items, alpha):
    """Take three training steps over item sets of 32; return parameters, and the seconds of the last step."""
    bloom_map = BloomMap(num_items, alpha)
    rows = 2 * (bloom_map.buckets + FIRST_WORD_ID)
    net = Model(Config(**PRESETS[preset] | dict(rows=rows, dropout=0.0))).train()
    specials = rows - 2 * FIRST_WORD_ID + np.arange(2 * FIRST_WORD_ID, dtype=np.int32).reshape(-1, 2)
    ranges = np.arange(2, dtype=np.int32) * np.int32(bloom_map.buckets)
    net.set_codes(torch.from_numpy(np.concatenate([specials, bloom_map.digest + ranges]).astype(np.int32)))
    objective = MaskedHashes(net.config, 0.15, MASK, FIRST_WORD_ID, net.codes, bloom_map)
    ids = torch.randint(FIRST_WORD_ID, FIRST_WORD_ID + num_items, (batch, 32))

    def compute_loss():
        inputs, labels = objective.corrupt(ids, torch.rand(3, *ids.shape), ids.flip(0))
        return objective.loss(net, inputs, labels) / (labels >= 0).sum()

    step = common.training_step(net, compute_loss)
    for _ in range(3):
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
    return sum(p.numel() for p in net.parameters()), seconds


def bench_million(args, *, num_items=NUM_ITEMS, sizes=(("superbloom-small", 64), ("superbloom", 16))):
    """A step over 5,281,889 items at alpha 50 on this machine, in a process of its own."""
    rows = []
    for preset, batch in sizes:
        (total, seconds), memory = common.run_in_new_process(
            common.measure_memory, time_step, preset, batch, num_items, 50)
        rows.append(dict(name=preset, batch=batch, total=total, seconds=seconds, memory=memory))
    return rows


def read_sets(corpus, length):
    """Return ItemSetBatches of all items, IDs int64 (P, L) of its held-out sets, and their masked column (P,)."""
    limits = FIRST_WORD_ID, FIRST_WORD_ID + len(corpus.words)
    sets = ItemSetBatches(corpus.ids, corpus.offsets, *corpus.split_pages(), length, 1, np.array(limits), 0, limits)
    ids, noise, _ = sets.eval_batch(slice(0, sets.num_eval))
    return sets, ids, noise[0].argmin(1)


def score_neighbors(args, length=32):
    """Rank what needs no training on the held-out sets: recall at 1, 10, 20.

    Popularity; and co-occurrence neighbors, where an item scores the sum over the visible items of how often both
    stand on a training page, as it is, over √(frequency · frequency), or, a step of a walk from the item to a page
    to an item, each page 1 / (its size · the visible item's frequency). Visible items are left out.
    """
    corpus = load_corpus(args, "items")
    sets, ids, masked = read_sets(corpus, length)
    num_ids = FIRST_WORD_ID + len(corpus.words)
    sizes = sets.size[sets.train]
    starts = np.cumsum(sizes) - sizes
    items = np.concatenate([sets.ids[sets.first[i]:sets.first[i] + sets.size[i]] for i in sets.train]).astype(int)
    frequency = np.bincount(items, minlength=num_ids)
    on = np.repeat(np.arange(len(sizes)), sizes)[np.argsort(items, kind="stable")]  # pages, item after item
    first = np.cumsum(frequency) - frequency
    seen_at = np.zeros(num_ids, int)  # ties go to the item that the corpus names first
    names, places = np.unique(corpus.ids, return_index=True)
    seen_at[names] = places
    names = ("popularity", "co-occurrence: counts", "co-occurrence: cosines", "co-occurrence: walks")
    hits = np.zeros((len(names), len(RECALL)))
    for row, column in zip(ids.numpy(), masked.tolist()):
        correct, visible = row[column], np.delete(row, column)
        visible = visible[visible >= FIRST_WORD_ID]
        scores = np.zeros((len(names), num_ids))
        scores[0] = frequency
        for item in visible:
            pages = on[first[item]:first[item] + frequency[item]]
            if len(pages):
                others = np.concatenate([items[starts[i]:starts[i] + sizes[i]] for i in pages])
                both = np.bincount(others, minlength=num_ids)
                scores[1] += both
                scores[2] += both / np.sqrt(np.maximum(frequency, 1) * len(pages))
                scores[3] += np.bincount(others, np.repeat(1 / sizes[pages], sizes[pages]), num_ids) / len(pages)
        scores[:, [*range(FIRST_WORD_ID), *visible]] = -1
        target = scores[:, [correct]]
        ranks = ((scores > target) | (scores == target) & (seen_at < seen_at[correct])).sum(1)
        hits += ranks[:, None] < RECALL
    return [dict(name=name, **{f"rec@{k}": share for k, share in zip(RECALL, line)}, data=args.data)
            for name, line in zip(names, hits / len(ids))]


def same_size(num_items, alpha):
    """Return the largest width at which a row for each item makes no more parameters than Superbloom has."""
    shape = PRESETS["superbloom-small"]
    limit = sizes_of(**shape | dict(rows=2 * (-(-num_items // alpha) + FIRST_WORD_ID)))["total"]
    row, width = dict(emb="lookup", head="mlm", rows=num_items + FIRST_WORD_ID), shape["heads"]
    while sizes_of(**shape | row | dict(width=width, ffn=2 * width))["total"] <= limit:
        width += shape["heads"]
    return width - shape["heads"]


def bench_entities(args):
    """Superbloom, baselines of its size and of its width, neighbors: recall over all items. [SB Table 2]"""
    num_items = load_corpus(args, "items").meta["distinct"]
    width, row = same_size(num_items, args.alpha), "a row for each"
    lookup, sampled = ["--emb", "lookup"], ["--objective", "sampled"]
    small = [*lookup, "--width", width, "--ffn", 2 * width]
    variants = {"superbloom": ["--alpha", args.alpha],
                "superbloom, 1 of 2 maps coherent": ["--alpha", args.alpha, "--coherent", 1],
                f"{row}, as many parameters (d {width}), sampled": small + sampled}
    if num_items < 20_000:  # of more items a full softmax, or a table so wide, takes hours on two cores
        variants |= {f"{row}, as many parameters (d {width})": small,
                     f"{row}, same width, sampled": lookup + sampled, f"{row}, same width": lookup}
    return compare(args, variants, "--preset", "superbloom-small") + score_neighbors(args)


# many runs: a smaller model, of the most frequent items alone, as [SB §3.4]
NARROW = ("--preset", "superbloom-small", "--width", 128, "--ffn", 256, "--vocab", 2_000, "--lr", 1e-3)


def bench_depth(args):
    """One layer and six, hashed and not: what do layers add? [SB Table 3]"""
    kinds = {"superbloom": ["--alpha", args.alpha], "a row for each": ["--emb", "lookup"]}
    return compare(args, {f"{kind}, {layers} layer{'s' * (layers > 1)}": ["--layers", layers, *flags]
                          for kind, flags in kinds.items() for layers in (1, 6)}, *NARROW)


def bench_coherent(args):
    """Maps that put alike items together, none, one and both of two. [SB Table 7]"""
    variants = {f"{n} of 2 maps coherent": ["--coherent", n] for n in (0, 1, 2)}
    return compare(args, variants, *NARROW, "--alpha", args.alpha)


def bench_beams(args):
    """Recall by beam width [SB Table 6], by how frequent the item is [SB Figure 3]; neighbors."""
    rows = []
    for folder in args.runs:
        net, tokenizer, checkpoint = load_run(folder)
        if not tokenizer.bloom_map or checkpoint["run"]["vocab"]:
            raise InputError(f"--runs: expected runs of --emb bloom without --vocab, got {folder}.")
        corpus, name, bloom_map = load_corpus(args, "items", checkpoint), run_name(folder), tokenizer.bloom_map
        _, ids, masked = read_sets(corpus, net.config.length)
        masked = masked.unsqueeze(1)  # (P, 1)
        correct, inputs = ids.gather(1, masked), ids.scatter(1, masked, MASK)
        visible = (inputs - FIRST_WORD_ID).clamp(min=-1)
        net.set_codes(torch.from_numpy(tokenizer.codes()))
        with torch.no_grad():
            logits = [net(part, masked_positions=at.squeeze(1) + part.shape[1] * torch.arange(len(part)))
                      for part, at in zip(inputs.split(64), masked.split(64))]
            logp = torch.cat([hash_logp(part, bloom_map) for part in logits])
        for beam in (1, 10, 20, 100, None):
            best, _, certified, scored = beam_search(logp, bloom_map, 20, beam or 20, 1 if beam else None,
                                                     exclude=visible)
            is_hit = best + FIRST_WORD_ID == correct
            rows.append(dict(name=f"{name}, B {beam}" if beam else f"{name}, until certified",
                             certified=100 * certified.double().mean().item(), scored=scored.double().mean().item(),
                             **{f"rec@{k}": is_hit[:, :k].any(1).double().mean().item() for k in RECALL}))
        rows += recall_by_frequency(name, corpus, correct[:, 0].numpy(), is_hit[:, 0].numpy())
    return rows + score_neighbors(args)


def recall_by_frequency(name, corpus, correct, is_first):
    """Return rows with the recall at 1 of ten parts of the links, from the most frequent items to the rarest."""
    reached = np.cumsum(corpus.counts[FIRST_WORD_ID:]) / corpus.counts[FIRST_WORD_ID:].sum()
    tenth = np.minimum((10 * (reached[correct - FIRST_WORD_ID] - 1e-9)).astype(int), 9)
    return [{"name": f"{name}, links {10 * i} to {10 * i + 10} % by frequency",
             "rec@1": float(is_first[tenth == i].mean()) if (tenth == i).any() else None} for i in range(10)]


PAGES = COMPARE | dict(data="python-names", alpha=25)
ENTITIES = ("name:s:model | parameters:,:parameters | table:,:of the table | rec@1:±:rec@1 | rec@10:±:rec@10 | "
            "rec@20:±:rec@20 | hashes_right:±:hashes right | certified:±:certified | eval_loss:±:loss")
BENCHES = {
    "sizes": Bench(bench_sizes, "name:s:model | rows:,:rows | total:,:ours, specials left out | "
                   "paper:,:with the pooler | shown:s:that is | printed:s:paper prints"),
    "bloom": Bench(bench_bloom, "name:s:map, distributions | built:.1f:map built, s | beam:.3f:beam, ms a position | "
                   "scored:,.0f:items scored | certified:.0f:certified % | sure:.3f:until certified, ms | "
                   "scored_sure:,.0f:items scored | best:.3f:k = 1, ms | plain:.1f:exhaustive, torch.topk, ms | "
                   "ratio:.0f:× beam | ratio_sure:.0f:× until certified | all:.1f:exhaustive, our top k, ms | "
                   "ratio_all:.0f:× beam | exact:s:same scores"),
    "million": Bench(bench_million, "name:s:preset, alpha 50 | total:,:parameters | batch:,:pages of 32 a step | "
                     "seconds:.2f:s a step | memory:.2f:peak memory of the process, GiB"),
    "entities": Bench(bench_entities, ENTITIES, PAGES), "depth": Bench(bench_depth, ENTITIES, PAGES),
    "coherent": Bench(bench_coherent, ENTITIES, PAGES),
    "beams": Bench(bench_beams, "name:s:run, beam | rec@1:.3f:rec@1 | rec@10:.3f:rec@10 | rec@20:.3f:rec@20 | "
                   "certified:.1f:certified % | scored:,.0f:items scored",
                   dict(data="python-names", cache="cache", runs=REQUIRED))}
main = functools.partial(common.run_command, "superbloom", __doc__, BENCHES)

if __name__ == "__main__":
    main()
