"""Superbloom: sizes of the paper's models, beam search beside exhaustive search, recall beside baselines.

    python -m bench.superbloom sizes (bloom, million)
    python -m bench.superbloom entities --data pages.jsonl (depth)
    python -m bench.superbloom beams --runs out/bloom-items

Paper map:    [SB Table 1] SIZES   [SB Table 3] SIZES   [SB Table 4] SIZES   [SB Tables 2, 7] bench_entities
              [SB Table 6] bench_beams   [SB Figure 3] recall_by_frequency
Notation:     N items   m hashes of an item   d width   P held-out sets
"""

import collections, functools, itertools, time
from pathlib import Path

import numpy as np
import torch

from bench import common
from bench.common import COMPARE, REQUIRED, Bench, Stopwatch, compare, load_corpus, load_run, sizes_of
from bloom import BloomMap, beam_search, exhaustive, hash_logp
from console import InputError, blame_input
from data.batches import ItemSetBatches
from model import PRESETS, Config, Model
from objectives import RECALL, MaskedHashes
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
        vocabulary = hashes * (buckets := -(-items // alpha))
        total = sizes_of(emb=emb, head=head, rows=vocabulary, hashes=hashes, buckets=buckets, act="relu",
                         order=is_text, types=2, layers=layers, width=d, heads=heads, ffn=ffn,
                         length=512 if is_text else 32)["total"]
        paper = total + d * d + d  # BERT's pooler, which their formula has and nothing uses
        shown = f"{paper / 2**20:.{int(is_text)}f}M" if paper <= 2**30 else f"{paper / 2**30:.1f}G"
        row = f"{table}: {name}", vocabulary, total, paper, shown, printed
        rows.append(dict(zip(("name", "rows", "total", "paper", "shown", "printed"), row)))
    return rows


def search_by_blocks(logp, columns, k=20, block=64):
    """Return the k best scores of all items, (k,), of logp (m, R): exhaustive search at its fastest.

    torch.topk is slow on long rows. The k best lie in the k blocks with the largest maxima.
    """
    scores = sum(row.index_select(0, column) for row, column in zip(logp, columns))  # (N,)
    whole = len(scores) // block * block
    blocks = scores[:whole].view(-1, block)
    best = blocks.amax(1).topk(min(k, len(blocks))).indices
    return torch.cat([blocks[best].flatten(), scores[whole:]]).topk(k).values


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
        watch = Stopwatch({"beam": lambda: beam_search(logp, bloom_map),
                           "sure": lambda: beam_search(logp, bloom_map, rounds=None),
                           "best": lambda: beam_search(logp, bloom_map, k=1, rounds=None),
                           "all": lambda: [search_by_blocks(x, columns) for x in logp[:few]],
                           "plain": lambda: exhaustive(logp[:few], bloom_map)}, rounds)
        _, _, certified, scored = beam_search(logp, bloom_map)
        _, scores, _, scored_sure = beam_search(logp, bloom_map, rounds=None)
        share = positions / few  # an eighth of the positions is scored exhaustively
        rows.append(dict(
            name=f"alpha {alpha}, {kind}", built=built, certified=100 * certified.double().mean().item(),
            scored=scored.double().mean().item(), scored_sure=scored_sure.double().mean().item(),
            exact=str(torch.equal(scores[:few], exhaustive(logp[:few], bloom_map)[1])
                      and torch.equal(scores[0], search_by_blocks(logp[0], columns))),
            **{key: ms / (few if key in ("all", "plain") else positions) for key, ms in watch.ms().items()},
            ratio=share * watch.ratio("plain", "beam"), ratio_all=share * watch.ratio("all", "beam"),
            ratio_sure=share * watch.ratio("plain", "sure")))
    return rows


def time_step(preset, batch, num_items, alpha, dtype):
    """Take three training steps over item sets of 32; return parameters, and the seconds of the last step."""
    bloom_map = BloomMap(num_items, alpha)
    rows = bloom_map.buckets + FIRST_WORD_ID
    net = Model(Config(**PRESETS[preset] | dict(buckets=rows, dropout=0.0))).train()
    specials = np.tile(np.arange(bloom_map.buckets, rows, dtype=np.int32)[:, None], 2)
    net.set_codes(torch.from_numpy(np.concatenate([specials, bloom_map.digest])))
    objective = MaskedHashes(net.config, 0.15, MASK, FIRST_WORD_ID, net.codes, bloom_map)
    ids = torch.randint(FIRST_WORD_ID, FIRST_WORD_ID + num_items, (batch, 32))

    def compute_loss():
        inputs, labels = objective.corrupt(ids, torch.rand(3, *ids.shape), ids.flip(0))
        return objective.loss(net, inputs, labels) / (labels >= 0).sum()
    step = common.training_step(net, compute_loss, dtype)
    for _ in range(3):
        start = time.perf_counter()
        step()
        seconds = time.perf_counter() - start
    return sum(p.numel() for p in net.parameters()), seconds


def bench_million(args, *, num_items=NUM_ITEMS, sizes=(("superbloom-small", 64), ("superbloom", 16))):
    """A step over 5,281,889 items at alpha 50 on this machine, in a process of its own."""
    rows, dtype = [], common.list_dtypes()[-1]
    for preset, batch in sizes:
        job = common.measure_memory, time_step, preset, batch, num_items, 50, dtype
        (total, seconds), memory = common.run_in_new_process(*job)
        rows.append(dict(name=preset, dtype=dtype, batch=batch, total=total, seconds=seconds, memory=memory))
    return rows


def read_sets(corpus, length):
    """Return ItemSetBatches of all items, IDs int64 (P, L) of its held-out sets, and their masked columns."""
    limits, pages = (FIRST_WORD_ID, FIRST_WORD_ID + len(corpus.words)), corpus.split_pages()
    with blame_input():
        sets = ItemSetBatches(corpus.ids, corpus.offsets, *pages, length, 1, np.array(limits), 0, limits)
    ids, noise, _ = sets.eval_batch(slice(0, sets.num_eval))
    return sets, ids, noise[0].argmin(1)


def score_neighbors(args):
    """Return the recall at 1, 10, 20 of what needs no training: popularity, and neighbors by co-occurrence.

    A neighbor scores the sum over the visible items of how often both stand on a training page: as it is,
    over √(frequency · frequency), or each page as 1 / (its size · the visible item's frequency), as a walk.
    """
    corpus = load_corpus(args, "items")
    sets, ids, masked = read_sets(corpus, 32)
    num_ids, pages_of = FIRST_WORD_ID + len(corpus.words), collections.defaultdict(list)
    for i in sets.train:
        page = sets.ids[sets.first[i]:sets.first[i] + sets.size[i]]
        for item in page.tolist():
            pages_of[item].append(page)
    frequency = np.array([len(pages_of[item]) for item in range(num_ids)])
    seen_at = np.zeros(num_ids, int)  # ties go to the item that the corpus names first
    np.put(seen_at, *np.unique(corpus.ids, return_index=True))
    names = ("popularity", "neighbors: counts", "neighbors: cosines", "neighbors: random walks")
    hits = np.zeros((len(names), len(RECALL)))
    for row, column in zip(ids.numpy(), masked.tolist()):
        correct, visible = row[column], np.delete(row, column)
        visible = visible[visible >= FIRST_WORD_ID]
        scores = np.zeros((len(names), num_ids))
        scores[0] = frequency
        for pages in filter(None, map(pages_of.get, visible.tolist())):
            others, sizes = np.concatenate(pages), np.array([len(page) for page in pages])
            both = np.bincount(others, minlength=num_ids)
            scores[1] += both
            scores[2] += both / np.sqrt(np.maximum(frequency, 1) * len(pages))
            scores[3] += np.bincount(others, np.repeat(1 / sizes, sizes), num_ids) / len(pages)
        scores[:, [*range(FIRST_WORD_ID), *visible]] = -1
        target = scores[:, [correct]]
        ranks = ((scores > target) | (scores == target) & (seen_at < seen_at[correct])).sum(1)
        hits += ranks[:, None] < RECALL
    return [dict(name=name, **{f"rec@{k}": share for k, share in zip(RECALL, line)}, data=args.data)
            for name, line in zip(names, hits / len(ids))]


def same_size(num_items, alpha):
    """Return the largest width at which lookup item makes no more parameters than Superbloom has."""
    shape = PRESETS["superbloom-small"]
    limit = sizes_of(**shape | dict(buckets=-(-num_items // alpha) + FIRST_WORD_ID))["total"]
    row, width = shape | dict(emb="lookup", head="mlm", rows=num_items + FIRST_WORD_ID), shape["heads"]
    while sizes_of(**row | dict(width=width, ffn=2 * width))["total"] <= limit:
        width += shape["heads"]
    return width - shape["heads"]


def bench_entities(args):
    """Superbloom, baselines of its size and of its width, neighbors: recall over all items. [SB Tables 2 and 7]"""
    num_items = load_corpus(args, "items").meta["distinct"]
    width = same_size(num_items, args.alpha)
    lookup, sampled = ["--emb", "lookup"], ["--objective", "sampled"]
    small = [*lookup, "--width", width, "--ffn", 2 * width]
    variants = {f"superbloom, {n} of 2 maps coherent": ["--alpha", args.alpha, "--coherent", n] for n in range(3)}
    variants[f"lookup, as many parameters (d {width}), sampled"] = small + sampled
    if num_items < 20_000:  # of more items a full softmax, or a table so wide, takes hours on two cores
        variants |= {f"lookup, as many parameters (d {width})": small,
                     "lookup, same width, sampled": lookup + sampled, "lookup, same width": lookup}
    return compare(args, variants, "--preset", "superbloom-small") + score_neighbors(args)


def bench_depth(args):
    """One layer and six, hashed and not, of frequent items [SB §3.4]: what do layers add? [SB Table 3]"""
    narrow = "--preset", "superbloom-small", "--width", 128, "--ffn", 256, "--vocab", 2_000, "--lr", 1e-3
    kinds = {"superbloom": ["--alpha", args.alpha], "lookup": ["--emb", "lookup"]}
    return compare(args, {f"{kind}, {layers} layer{'s' * (layers > 1)}": ["--layers", layers, *flags]
                          for kind, flags in kinds.items() for layers in (1, 6)}, *narrow)


def bench_beams(args):
    """Recall by beam width [SB Table 6], by how frequent the item is [SB Figure 3]; neighbors."""
    rows = []
    for folder in args.runs:
        net, tokenizer, checkpoint = load_run(folder)
        if not tokenizer.bloom_map or checkpoint["run"]["vocab"]:
            raise InputError(f"--runs: expected runs of --emb bloom without --vocab, got {folder}.")
        corpus, bloom_map = load_corpus(args, "items", checkpoint), tokenizer.bloom_map
        _, ids, masked = read_sets(corpus, net.config.length)
        correct, inputs = ids.gather(1, masked[:, None]), ids.scatter(1, masked[:, None], MASK)
        net.set_codes(torch.from_numpy(tokenizer.codes()))
        with torch.no_grad():
            logits = (net(part, masked_positions=at + part.shape[1] * torch.arange(len(part)))
                      for part, at in zip(inputs.split(64), masked.split(64)))
            logp = torch.cat([hash_logp(part, bloom_map) for part in logits])
        name, visible = Path(folder).name, (inputs - FIRST_WORD_ID).clamp(min=-1)
        for beam in (1, 10, 20, 100, None):
            search = (beam, 1, f"{name}, B {beam}") if beam else (20, None, f"{name}, until certified")
            best, _, certified, scored = beam_search(logp, bloom_map, 20, *search[:2], exclude=visible)
            is_hit = best + FIRST_WORD_ID == correct
            means = dict(certified=100.0 * certified, scored=scored)
            means |= {f"rec@{k}": is_hit[:, :k].any(1) for k in RECALL}
            rows.append({key: x.double().mean().item() for key, x in means.items()} | dict(name=search[2]))
        rows += recall_by_frequency(name, corpus, correct[:, 0].numpy(), is_hit[:, 0].numpy())
    return rows + score_neighbors(args)


def recall_by_frequency(name, corpus, correct, is_first):
    """Return rows with the recall at 1 of ten parts of the links, from frequent items to rare ones."""
    reached = np.cumsum(corpus.counts[FIRST_WORD_ID:]) / corpus.counts[FIRST_WORD_ID:].sum()
    tenth = np.minimum((10 * (reached[correct - FIRST_WORD_ID] - 1e-9)).astype(int), 9)
    return [{"name": f"{name}, links {10 * i} to {10 * i + 10} % by frequency",
             "rec@1": float(is_first[tenth == i].mean()) if (tenth == i).any() else None} for i in range(10)]


PAGES = COMPARE | dict(data="python-names", alpha=25)
ENTITIES = ("name:s:model | parameters:,:parameters | table:,:of the embedding | rec@1:±:rec@1 | "
            "rec@10:±:rec@10 | rec@20:±:rec@20 | hashes_right:±:correct hashes | certified:±:certified | "
            "eval_loss:±:loss")
BENCHES = {
    "sizes": Bench(bench_sizes, "name:s:model | rows:,:rows | total:,:ours, without special tokens | "
        "paper:,:with the pooler | shown:s:in 2^20 or 2^30 | printed:s:paper prints"),
    "bloom": Bench(bench_bloom, "name:s:map, distributions | built:.1f:map built, s | "
        "beam:.3f:beam, ms per position | scored:,.0f:items scored | certified:.0f:certified % | "
        "sure:.3f:until certified, ms | scored_sure:,.0f:items scored | best:.3f:k = 1, ms | "
        "plain:.1f:exhaustive, torch.topk, ms | ratio:.0f:× beam | ratio_sure:.0f:× until certified | "
        "all:.1f:exhaustive by blocks, ms | ratio_all:.0f:× beam | exact:s:equal to exhaustive"),
    "million": Bench(bench_million, "name:s:preset, alpha 50 | dtype:s:dtype | total:,:parameters | "
        "batch:,:sets of 32 per step | seconds:.2f:s per step | memory:.2f:peak memory of the process, GiB"),
    "entities": Bench(bench_entities, ENTITIES, PAGES),
    "depth": Bench(bench_depth, ENTITIES, PAGES),
    "beams": Bench(bench_beams, "name:s:run, beam | rec@1:.3f:rec@1 | rec@10:.3f:rec@10 | "
        "rec@20:.3f:rec@20 | certified:.1f:certified % | scored:,.0f:items scored",
        dict(data="python-names", cache="cache", runs=REQUIRED))}
main = functools.partial(common.run_command, "superbloom", __doc__, BENCHES)

if __name__ == "__main__":
    main()
