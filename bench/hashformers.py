"""HashFormers: parameters of the paper's table, speed of the hashes and embeddings, and every variant compared.

    python -m bench.hashformers counts (hashing, embeddings)
    python -m bench.hashformers words          minutes
    python -m bench.hashformers variants       half an hour

Paper map:    [HF Table 2] count_paper_models   [HF §4.3] VARIANTS
"""

import contextlib, functools, os, tempfile, time

import torch

import embeddings
import hashing
import pretrain
from bench import common
from bench.common import Bench, Stopwatch, compare, made_up_words, run_quietly, sizes_of
from data.corpus import number_work, prepare
from model import PRESETS, Config, Model
from runtime import autocast


def count_paper_models(args=None):
    """Parameters of [HF Table 2], exact, beside what the paper prints."""
    d, rows, bert = 768, [], None
    for name, changes, word_row, printed, printed_total, authors, note in (
            ("lookup 50K (BERT)", dict(emb="lookup", rows=50_265), 0, "38.6M", "124.6M", 0, ""),
            ("emb 50K", dict(emb="emb", rows=50_260), 0, "38.6M", "124.6M", 0, ""),
            ("emb 1K", dict(emb="emb", rows=1_038), 0, "797.2K", "86.8M", -5 * d,
             "theirs: the specials are among the rows"),
            ("pool", dict(emb="pool"), d, "797.2K", "86.8M", d, "theirs: a 1,025th codebook row, for padding"),
            ("add", dict(emb="add"), d, "197.4K", "86.2M", 0, ""),
            ("proj", dict(emb="proj"), d, "99.1K", "86.1M", 0, "")):
        c = sizes_of(**PRESETS["hashformer"] | dict(head="classify") | changes)
        bert, embedding, total = bert or c, c["embedding"] + word_row, c["total"]
        shown = f"{embedding / 1e6:.1f}M" if embedding >= 1e6 else f"{embedding / 1e3:.1f}K"
        rows.append(dict(name=name, embedding=c["embedding"], with_word=embedding, shown=shown, printed=printed,
                         total=total, printed_total=printed_total, authors=total + authors,
                         pcr_all=100 * (1 - total / bert["total"]), pcr_emb=100 * (1 - embedding / bert["embedding"]),
                         poep=100 * embedding / total, note=note))
    return rows


@contextlib.contextmanager
def one_core():
    """Run the block on one processor core, where the system lets a process choose."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    try:
        if cores:
            os.sched_setaffinity(0, {min(cores)})
        yield
    finally:
        if cores:
            os.sched_setaffinity(0, cores)


def bench_hashing(args, *, num_words=100_000, repeats=20_000, rounds=5):
    """Words per second on one core, distinct words; targets 1 M (MD5), 150 K (LSH bits), 5 K (LSH index)."""
    words, n = made_up_words(num_words), 50_260
    text = "The 12 quick-witted foxes (all of them!) jumped over one lazy dog; it didn't mind. " * repeats
    with one_core():
        start = time.perf_counter()
        lsh = hashing.NgramLSH.fit(dict.fromkeys(words, 1), features=n)
        fit = time.perf_counter() - start
        cases = {
            "MD5 digests": (len(words), lambda: hashing.md5_digests(words)),
            "MD5 index, N 50,260": (len(words), lambda: hashing.md5_index(words, n)),
            "LSH bits, T 128": (len(words), lambda: lsh.bits(words, 128)),
            "LSH index, N 50,260": (len(words[::10]), lambda: lsh.index(words[::10], n)),
            "text to words, characters": (len(text), lambda: hashing.list_words(text)),
            "text to ids, characters": (len(text), lambda: number_work(("texts", [text]), "regex"))}
        ms = Stopwatch({name: function for name, (_, function) in cases.items()}, rounds).ms()
    return [*(dict(name=name, rate=1000 * amount / ms[name]) for name, (amount, _) in cases.items()),
            dict(name="LSH fit", rate=len(words) / fit)]


def bench_embeddings(args, *, batch=4, length=512, rows=50_260, rounds=5):
    """Forward and backward of each embedding at width 768 beside the twelve layers it feeds; target 10 %."""
    B, L, d = batch, length, 768
    layers = Model(Config(**PRESETS["hashformer"] | dict(layers=2, dropout=0.0))).layers
    x, cotangent = torch.randn(2, B, L, d)
    bits = torch.randint(0, 2, (B, L, 128), dtype=torch.uint8)
    cases = {"emb 50K": (embeddings.HashEmbedding(rows, d), torch.randint(0, rows, (B, L, 1))),
             "emb 1K": (embeddings.HashEmbedding(1_038, d), torch.randint(0, 1_038, (B, L, 1))),
             "pool": (embeddings.PoolEmbedding(128, 10, d), torch.randint(0, 256, (B, L, 13))),
             "add": (embeddings.AddEmbedding(128, d), bits), "proj": (embeddings.ProjEmbedding(128, d), bits)}

    def both_passes(modules, inputs):
        def run():
            with autocast(x.device, "bfloat16"):
                out = inputs
                for module in modules:
                    out = module(out)
            out.backward(cotangent.to(out.dtype))
            modules.zero_grad(set_to_none=True)
        return run

    functions = {name: both_passes(torch.nn.ModuleList([module]), codes) for name, (module, codes) in cases.items()}
    watch = Stopwatch(functions | {"encoder": both_passes(layers, x)}, rounds)
    ms = watch.ms()  # two layers were timed, there are twelve
    return [dict(name=name, ms=ms[name], encoder=6 * ms["encoder"], share=100 / 6 * watch.ratio(name, "encoder"))
            for name in cases]


def bench_words(args, *, flags=()):
    """Twelve million distinct words: prepared, hashed, trained on for two steps, each in its own process."""
    rows, train = [], functools.partial(run_quietly, pretrain.main)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "words.txt")
        with open(path, "w") as file:
            for start in range(0, args.count, 1_000):
                file.write(" ".join(made_up_words(min(start + 1_000, args.count), start)) + "\n")
        flags = ["--data", path, "--cache", folder, "--steps", 2, "--device", "cpu", *flags, "--out"]
        for name, *job in (("prepare", prepare, path, "regex", folder, 50_000, True),
                           ("hash with MD5, train 2 steps", train, [*flags, f"{folder}/a", "--hash", "md5"]),
                           ("hash with LSH, train 2 steps", train, [*flags, f"{folder}/b"]),
                           ("hashed already, train 2 steps", train, [*flags, f"{folder}/c", "--seed", 1])):
            start = time.perf_counter()
            _, gigabytes = common.run_in_new_process(common.measure_memory, *job)
            rows.append(dict(name=name, seconds=time.perf_counter() - start, gigabytes=gigabytes, words=args.count))
    return rows


VARIANTS = {  # name -> flags of pretrain.py
    **{f"{e}, {h}": ["--emb", e, "--hash", h] for e in ("emb", "pool", "add", "proj") for h in ("md5", "lsh")},
    "lookup of BPE pieces": ["--emb", "lookup"],
    **{f"{e}, {h}, of BPE pieces": ["--emb", e, "--hash", h, "--split", "bpe"]
       for e in ("emb", "proj") for h in ("md5", "lsh")},
    "lookup of BPE pieces, MLM": ["--emb", "lookup", "--objective", "mlm"],
    "one word at a time (proj, lsh, no layers)": ["--layers", "0"],
}


def bench_variants(args):
    """Every variant with the same budget and seeds on one corpus: mean and std of the last evaluation."""
    return compare(args, VARIANTS)


BENCHES = {
    "counts": Bench(count_paper_models, "name:s:model | embedding:,:to embed words | with_word:,:with the WORD row | "
                    "printed:s:paper prints | total:,:in all | printed_total:s:paper prints | "
                    "authors:,:in the authors' code | pcr_all:.1f:PCR all % | pcr_emb:.1f:PCR emb % | "
                    "poep:.1f:PoEP % | note:s:"),
    "hashing": Bench(bench_hashing, "name:s:one core | rate:,.0f:a second"),
    "embeddings": Bench(bench_embeddings, "name:s:embedding, 4 × 512 words | ms:,.1f:ms | encoder:,.0f:12 layers, ms | "
                        "share:.1f:share %"),
    "words": Bench(bench_words, "name:s:step | words:,:distinct words | seconds:,.0f:seconds | "
                   "gigabytes:.2f:peak memory, GiB", dict(count=12_000_000)),
    "variants": Bench(bench_variants, "name:s:embedding, hash | accuracy:±:accuracy | f1_intact:±:F1 intact | "
                      "f1_shuffled:±:F1 shuffled | f1_random:±:F1 random | eval_loss:±:loss", common.COMPARE)}
main = functools.partial(common.run_command, "hashformers", __doc__, BENCHES)

if __name__ == "__main__":
    main()
