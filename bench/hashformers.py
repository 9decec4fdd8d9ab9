"""HashFormers: parameters of the paper's table, speed of hashes and embeddings, every variant compared.

    python -m bench.hashformers counts (hashing, embeddings)
    python -m bench.hashformers words          minutes
    python -m bench.hashformers variants       half an hour
    python -m bench.hashformers glue --steps 2000 --data_dir glue/    two hours

Paper map:    [HF Table 2] count_paper_models   [HF §4.3] VARIANTS   [HF Tables 1, 2, 6] bench_glue
"""

import functools, statistics, tempfile, time

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
    rows, bert = [], None
    for name, emb, num_rows, word_row, printed, printed_total, extra_rows, note in (
            ("lookup 50K (BERT)", "lookup", 50_265, 0, "38.6M", "124.6M", 0, ""),
            ("emb 50K", "emb", 50_260, 0, "38.6M", "124.6M", 0, ""),
            ("emb 1K", "emb", 1_038, 0, "797.2K", "86.8M", -5, "theirs: the specials are among the rows"),
            ("pool", "pool", 1, 1, "797.2K", "86.8M", 1, "theirs: a 1,025th codebook row, for padding"),
            ("add", "add", 1, 1, "197.4K", "86.2M", 0, ""), ("proj", "proj", 1, 1, "99.1K", "86.1M", 0, "")):
        c = sizes_of(**PRESETS["hashformer"] | dict(head="classify", emb=emb, rows=num_rows))
        bert, embedding, total = bert or c, c["embedding"] + 768 * word_row, c["total"]
        shown = f"{embedding / 1e6:.1f}M" if embedding >= 1e6 else f"{embedding / 1e3:.1f}K"
        rows.append(dict(
            name=name, embedding=c["embedding"], with_word=embedding, shown=shown, printed=printed, note=note,
            total=total, printed_total=printed_total, authors=total + 768 * extra_rows,
            pcr_all=100 * (1 - total / bert["total"]), pcr_emb=100 * (1 - embedding / bert["embedding"]),
            poep=100 * embedding / total))
    return rows


def bench_hashing(args, *, num_words=100_000, repeats=20_000, rounds=5):
    """Words per second on one core, distinct words; targets 1 M (MD5), 150 K (LSH bits), 5 K (LSH index)."""
    words, n = made_up_words(num_words), 50_260
    text = "The 12 quick-witted foxes (all of them!) jumped over one lazy dog; it didn't mind. " * repeats
    start = time.perf_counter()
    lsh = hashing.NgramLSH.fit(dict.fromkeys(words, 1), features=n)
    fit = time.perf_counter() - start
    cases = {"MD5 digests": (words, hashing.md5_digests),
             "MD5 index, N 50,260": (words, lambda words: hashing.md5_index(words, n)),
             "LSH bits, T 128": (words, lambda words: lsh.bits(words, 128)),
             "LSH index, N 50,260": (words[::10], lambda words: lsh.index(words, n)),
             "text to words, characters": (text, hashing.list_words),
             "text to ids, characters": (text, lambda text: number_work(("texts", [text]), "regex"))}
    functions = {name: functools.partial(function, what) for name, (what, function) in cases.items()}
    ms = Stopwatch(functions, rounds).ms()
    return [*(dict(name=name, rate=1000 * len(what) / ms[name]) for name, (what, _) in cases.items()),
            dict(name="LSH fit", rate=len(words) / fit)]


def bench_embeddings(args, *, batch=4, length=512, rows=50_260, rounds=5):
    """Forward and backward of each embedding at width 768 beside the twelve layers it feeds; target 10 %."""
    shape, d, dtype = (batch, length), 768, common.list_dtypes()[-1]
    layers = Model(Config(**PRESETS["hashformer"] | dict(layers=2, dropout=0.0))).layers
    x, cotangent = torch.randn(2, *shape, d)
    bits = torch.randint(0, 2, (*shape, 128), dtype=torch.uint8)

    def both_passes(inputs, *modules):
        net = torch.nn.Sequential(*modules)
        def run():
            with autocast(x.device, dtype):
                out = net(inputs)
            out.backward(cotangent.to(out.dtype))
            net.zero_grad(set_to_none=True)
        return run
    watch = Stopwatch({
        "emb 50K": both_passes(torch.randint(0, rows, (*shape, 1)), embeddings.HashEmbedding(rows, d)),
        "emb 1K": both_passes(torch.randint(0, 1_038, (*shape, 1)), embeddings.HashEmbedding(1_038, d)),
        "pool": both_passes(torch.randint(0, 256, (*shape, 13)), embeddings.PoolEmbedding(128, 10, d)),
        "add": both_passes(bits, embeddings.AddEmbedding(128, d)), "encoder": both_passes(x, *layers),
        "proj": both_passes(bits, embeddings.ProjEmbedding(128, d))}, rounds)
    times = watch.ms()
    encoder = 6 * times.pop("encoder")  # two layers were timed, there are twelve
    return [dict(name=name, dtype=dtype, ms=ms, encoder=encoder, share=100 / 6 * watch.ratio(name, "encoder"))
            for name, ms in times.items()]


def bench_words(args, *, flags=()):
    """Twelve million distinct words: prepared, hashed, trained on for two steps, each in its own process."""
    rows, train = [], functools.partial(run_quietly, pretrain.main)
    with tempfile.TemporaryDirectory() as folder:
        with open(path := f"{folder}/words.txt", "w") as file:
            for start in range(0, args.count, 1_000):
                file.write(" ".join(made_up_words(min(start + 1_000, args.count), start)) + "\n")
        flags = ["--data", path, "--cache", folder, "--steps", 2, "--device", "cpu", *flags, "--out"]
        for name, *job in (("prepare", prepare, path, "regex", folder, 50_000, True),
                           ("hash with MD5, train 2 steps", train, [*flags, f"{folder}/a", "--hash", "md5"]),
                           ("hash with LSH, train 2 steps", train, [*flags, f"{folder}/b"]),
                           ("hashed already, train 2 steps", train, [*flags, f"{folder}/c", "--seed", 1])):
            start = time.perf_counter()
            _, gigabytes = common.run_in_new_process(common.measure_memory, *job)
            seconds = time.perf_counter() - start
            rows.append(dict(name=name, seconds=seconds, gigabytes=gigabytes, words=args.count))
    return rows


VARIANTS = {  # name -> flags of pretrain.py
    **{f"{e}, {h}": ["--emb", e, "--hash", h] for e in "emb pool add proj".split() for h in ("md5", "lsh")},
    "lookup of BPE pieces": ["--emb", "lookup"],
    **{f"{e}, {h}, of BPE pieces": ["--emb", e, "--hash", h, "--split", "bpe"]
       for e in ("emb", "proj") for h in ("md5", "lsh")},
    "lookup of BPE pieces, MLM": ["--emb", "lookup", "--objective", "mlm"],
    "proj, lsh, no layers": ["--layers", "0"]}
PAPER = {  # name -> average of eight tasks [HF Table 1] [HF Table 6]; emb has 50,260 rows there
    "emb, md5": 79.9, "emb, lsh": 76.0, "pool, md5": 75.3, "pool, lsh": 78.9, "add, md5": 75.7, "add, lsh": 78.9,
    "proj, md5": 75.7, "proj, lsh": 79.1, "lookup of BPE pieces": 79.6, "lookup of BPE pieces, MLM": 79.5,
    "emb, md5, of BPE pieces": 78.5, "emb, lsh, of BPE pieces": 66.0, "proj, md5, of BPE pieces": 74.1,
    "proj, lsh, of BPE pieces": 78.3}


def bench_variants(args):
    """Every variant with the same budget and seeds on one corpus: the last evaluation."""
    return compare(args, VARIANTS)


def score_glue(folder, seed, flags):
    """Fine-tune a run on five GLUE tasks; return dict: each task's score, their average, sizes of SST-2's model."""
    scores = common.finetune_run(folder, seed, dict(sst2=1, cola=5, mrpc=5, rte=5, stsb=5), flags)
    model = common.read_json(f"{folder}-sst2", "results.json")["model"]
    return scores | dict(average=statistics.mean(scores.values()), parameters=model["parameters"], poep=model["poep"])


def bench_glue(args):
    """Every variant, pre-trained, then fine-tuned on five GLUE tasks. [HF Tables 1, 2, 6] [HF §4.4 eq.4, 5, 7]"""
    flags = ["--data_dir", args.data_dir, "--cache", args.cache]
    rows = compare(args, VARIANTS, after=functools.partial(score_glue, flags=flags))
    for bert in (row for row in rows if row["name"] == "lookup of BPE pieces, MLM"):
        for row in rows:
            row |= dict(prr=100 * row["average"] / bert["average"],
                        pcr=100 * (1 - row["parameters"] / bert["parameters"]), paper=PAPER.get(row["name"]))
    return rows


BENCHES = {
    "counts": Bench(count_paper_models, "name:s:model | embedding:,:embedding | "
        "with_word:,:with the word row | printed:s:paper prints | total:,:total | "
        "printed_total:s:paper prints | authors:,:in the authors' code | pcr_all:.1f:PCR all % | "
        "pcr_emb:.1f:PCR emb % | poep:.1f:PoEP % | note:s:"),
    "hashing": Bench(bench_hashing, "name:s:one core | rate:,.0f:per second"),
    "embeddings": Bench(bench_embeddings, "name:s:embedding, 4 × 512 words | dtype:s:dtype | ms:,.1f:ms | "
        "encoder:,.0f:12 layers, ms | share:.1f:share %"),
    "words": Bench(bench_words, "name:s:step | words:,:distinct words | seconds:,.0f:seconds | "
        "gigabytes:.2f:peak memory, GiB", dict(count=12_000_000)),
    "variants": Bench(bench_variants, "name:s:embedding, hash | accuracy:±:accuracy | "
        "f1_intact:±:F1 intact | f1_shuffled:±:F1 shuffled | f1_random:±:F1 random | eval_loss:±:loss",
        common.COMPARE),
    "glue": Bench(bench_glue, "name:s:embedding, hash | sst2:±1:SST-2 | cola:±1:CoLA | mrpc:±1:MRPC | rte:±1:RTE | "
        "stsb:±1:STS-B | average:±1:average | paper:.1f:paper prints | prr:.1f:PRR % | pcr:.1f:PCR all % | "
        "poep:.1f:PoEP %", common.COMPARE | dict(data_dir=common.REQUIRED))}
main = functools.partial(common.run_command, "hashformers", __doc__, BENCHES)

if __name__ == "__main__":
    main()
