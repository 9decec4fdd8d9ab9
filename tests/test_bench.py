"""Tests of bench/: every table at tiny sizes, formulas of the papers, figures of results."""

import json
from argparse import Namespace

import numpy as np
import pytest
import torch

import attention as lsh_attention
import pretrain
from bench import attention, figures, harness, hashformers, sketch, superbloom, training
from hashing import MD5, sketch_index
from model import Config
from tests.support import ROOT, SMALL, assert_refused
from tokenizer import BPE, FIRST_WORD_ID, UNK, HashTokenizer


@pytest.fixture
def args(text_path, cache_dir):
    """Return a function of flags that differ from those of a comparison: one run of two steps."""
    flags = dict(data=str(text_path), cache=str(cache_dir), steps=2, seeds=1, only=".")
    return lambda **changes: Namespace(**flags | changes)


@pytest.fixture
def one_process(monkeypatch):
    """Run in this process what takes seconds to start a process for."""
    monkeypatch.setattr(harness, "run_in_new_process", lambda function, *args: function(*args))
    monkeypatch.setattr(harness, "run_jobs", map)


def run_bench(file, name, settings=None, *flags, missing=(), **sizes):
    """Return the rows of a bench, which fill every column of its table but the missing ones."""
    bench = file.BENCHES[name]
    rows = list(bench.function(settings, *flags, **sizes))
    columns = {line.split()[0] for line in bench.columns.strip().splitlines()}
    filled = set().union(*rows)
    assert columns - filled == set(missing)
    harness.markdown(rows, bench.columns)  # every cell has a format
    return rows


# Every command at tiny sizes


@pytest.mark.parametrize("file, name, sizes", [
    (attention, "attention", dict(positions=128, lengths=(64,), rounds=1)),
    (attention, "auto", dict(positions=256, lengths=(16,), rounds=1)),
    (attention, "flops", dict(rounds=1)),
    (hashformers, "hashing", dict(num_words=300, repeats=3, rounds=1)),
    (hashformers, "embeddings", dict(batch=1, length=8, rows=300, rounds=1)),
    (hashformers, "words", dict(num_words=3_000, flags=["--layers", 1, "--length", 17])),
    (sketch, "sketch", dict(num_words=300, shape=(2, 8), rounds=1)),
    (superbloom, "bloom", dict(num_items=9_000, positions=8, rounds=1)),
    (superbloom, "million", dict(num_items=9_000, sizes=(("superbloom-small", 2),))),
    (training, "steps", dict(lengths=(16,), positions=32, num_words=50, rounds=1)),
    (training, "train", dict(sizes=(("tiny", 1),), num_words=300, rounds=1)),
])
def test_bench_at_tiny_sizes_fills_all_columns(file, name, sizes, one_process, monkeypatch):
    monkeypatch.setattr(training, "build_transformers_model", lambda *args: None)
    missing = ["against_transformers"] if name == "train" else []
    run_bench(file, name, Namespace(device="cpu"), missing=missing, **sizes)


@pytest.mark.parametrize("file, name, sizes, ratios", [
    (attention, "attention", dict(positions=128, lengths=(64,)), dict(
        ratio=("dense", "ours"), ratio_upper=("dense", "upper"))),
    (attention, "auto", dict(positions=256, lengths=(16,)), dict(
        formula=("dense", "attention"), gain=("attention", "auto"))),
    # one of eight positions is searched exhaustively; all times are per position
    (superbloom, "bloom", dict(num_items=9_000, positions=8), dict(
        ratio=("plain", "beam"), ratio_all=("all", "beam"), ratio_sure=("plain", "sure"))),
])
def test_ratios_of_one_round_are_those_of_the_times(file, name, sizes, ratios, one_process):
    for row in run_bench(file, name, Namespace(device="cpu"), rounds=1, **sizes):
        for key, (slow, fast) in ratios.items():
            assert row[key] == pytest.approx(row[slow] / row[fast])


@pytest.mark.parametrize("file, name, flags", [
    (hashformers, "variants", dict(only="^proj, md5$")),
    (sketch, "collisions", {}),
    (superbloom, "entities", dict(only="0 of 2", alpha=5)),
    (superbloom, "depth", dict(only="^superbloom, 1", alpha=5)),
])
def test_bench_of_a_corpus_fills_all_columns(file, name, flags, args, pages_path, one_process):
    if file is superbloom:
        flags = flags | dict(data=str(pages_path))
    run_bench(file, name, args(**flags))


def test_bench_gaps_fills_all_columns(args, text_path, one_process):
    settings = args(only="^median$", text=str(text_path), data_dir=None)
    glue = ("sst2", "cola", "mrpc", "stsb")  # without --data_dir
    run_bench(sketch, "gaps", settings, *SMALL[:6], "--length", 65, missing=glue)


def test_bench_twins_fills_all_columns(args, one_process, monkeypatch):
    def score(job, start, tasks, flags):
        [task] = tasks
        return {f"{task}{suffix}": 50.0 for suffix in ("", "_loss", "_bag", "_em")}

    monkeypatch.setattr(harness, "finetune_run", score)
    settings = args(only="random", data_dir="glue")
    [row] = run_bench(attention, "twins", settings, *SMALL[:-4], "--vocab", 300)
    assert row["perplexity"] == pytest.approx(np.exp(row["loss"]))


def test_bench_glue_compares_with_bert(args, one_process, monkeypatch):
    # 45 of BERT's 60 points with 500 of its 2,000 parameters: 75 % retained, 75 % saved
    scores = iter([45.0, 60.0])
    sizes = iter([dict(total=500, poep=9.0), dict(total=2_000, poep=90.0)])

    def score(job, start, tasks, flags):
        row = dict.fromkeys(tasks, next(scores))
        for task in tasks:
            row[f"{task}_bag"] = 30.0
        return row

    def read_json(*names):
        return dict(tasks=dict(sst2=dict(size=next(sizes))))

    monkeypatch.setattr(harness, "finetune_run", score)
    monkeypatch.setattr(harness, "read_json", read_json)
    settings = args(only="^proj, md5$|MLM", data_dir="glue")
    proj, bert, bag = run_bench(hashformers, "glue", settings)
    assert proj["average"] == 45
    assert proj["prr"] == 75
    assert proj["pcr"] == 75
    assert bert["average"] == 60
    assert bert["prr"] == 100
    assert bert["pcr"] == 0
    assert bag["name"] == "bag of words, as proj, md5"
    assert bag["average"] == 30


# Times, comparisons, tables, commands


def test_stopwatch_leaves_out_the_first_round_and_pairs_the_others():
    # 9 and 9 seconds first, then 1, 5, 2 beside 1, 1, 4: medians 2 and 1, ratios 1, 5, 1/2
    clock = iter([0, 9, 0, 9, 0, 1, 0, 1, 0, 5, 0, 1, 0, 2, 0, 4])
    watch = harness.Stopwatch(dict(a=list, b=list), 3, lambda: next(clock))
    assert watch.ms == {"a": 2000, "b": 1000}
    assert watch.ratio("a", "b") == 1


def test_compare_lists_every_seed_with_mean_and_deviation(args, one_process):
    def train(job):
        return dict(score=job.seed + len(job.name))

    variants = dict(a=["--emb", "a"], bcd=["--emb", "bcd"])
    first, second = harness.compare(args(seeds=3), variants, ["--shared"], train)
    assert first["score_all"] == [1, 2, 3]
    assert (second["score"], second["score_std"]) == (4, 1)
    assert second["flags"] == "--shared --emb bcd"


def test_markdown_equals_table_made_by_hand():
    rows = [dict(name="a", n=1_234, score=0.5, score_std=0.0123), dict(name="b", score=2.0)]
    columns = """
        name     s     a name
        n        ,     n
        score    ±     score
        score    ±1
        other    .1f   nobody has it
    """
    assert harness.markdown(rows, columns) == (
        "| a name | n | score |  |\n"
        "| --- | --: | --- | --- |\n"
        "| a | 1,234 | 0.500 ± 0.012 | 0.5 ± 0.0 |\n"
        "| b | not measured | 2.000 | 2.0 |\n")


def test_command_writes_rows_with_command_and_machine(tmp_path):
    path = tmp_path / "sizes.json"
    superbloom.main(["sizes", "--json", str(path)])
    result = json.loads(path.read_text())
    assert result["command"] == f"python -m bench.superbloom sizes --json {path}"
    assert list(result["machine"]) == ["device", "torch", "commit", "date"]
    assert result["rows"] == list(superbloom.bench_sizes())


@pytest.mark.parametrize("file, argv, fragment", [
    (attention, ["twins"], "--data_dir"),  # a required flag
    (sketch, ["gaps"], "--text"),  # one of two flags
    (superbloom, ["sizes", "--json", "/no/x.json"], "/no/x.json"),  # before the work
    (superbloom, ["sizes", "--json", "/dev/full"], "No space left"),  # after it
    (hashformers, ["variants", "--only", "("], "--only"),  # no regular expression
    (figures, ["figures", "--runs", "/no"], "--runs: expected"),
])
def test_command_with_bad_input_is_refused(file, argv, fragment):
    assert_refused(file.main, argv, fragment)


# BERT-LSH


def test_attention_flops_match_paper():
    # [BL Table 1]: q kᵀ alone is 2·2·10·10·64
    cost = attention.attention_flops(10, 2, 64, 2, 64)
    assert cost["full"] == 25_600
    assert cost["hashing"] == 10_240
    # 55 pairs a head; a pair collides where both signs are equal, else by chance in 1 of 64 buckets
    chance = 1 / 4 + 3 / 4 / 64
    assert cost["upper_pairs"] == 2 * 55 * chance
    # erratum [BL Alg. 1]: all of C, and not its triangle alone
    assert cost["all_pairs"] == 2 * 100 * chance
    assert cost["all_pairs"] > 52
    # erratum [BL §3.1]: "40 %"
    share = (cost["hashing"] + cost["upper_scores"]) / cost["full"]
    assert round(100 * share) == 54
    # [BL Figure 1], r 8: 1.6 of q kᵀ alone, 0.8 of the whole attention, so no error of the paper
    wide = attention.attention_flops(10, 2, 64, 8, 64)
    assert wide["hashing"] == 1.6 * cost["full"]
    # [BL Figure 1]: linear in n and r, flat in m
    many = attention.attention_flops(10, 2, 64, 4, 1024, 3)
    assert many["hashing"] == 5_120 * 3 * 4


def test_pairs_counted_in_draws_are_those_of_the_law():
    law = attention.attention_flops(10, 2, 64, 2, 64)["upper_pairs"]
    counted = [attention.count_upper_pairs(seed) for seed in range(500)]
    sigma = np.std(counted) / np.sqrt(500)
    assert abs(np.mean(counted) - law) < 5 * sigma


def test_random_buckets_are_those_of_the_layer_in_another_order():
    layer = lsh_attention.SelfAttention(32, 4, attn="lsh")
    q, k = torch.randn(2, 3, 4, 40, 8)
    buckets, _ = layer.hash_buckets(q, k)
    with attention.use_random_buckets():
        control, _ = layer.hash_buckets(q, k)
        other, _ = layer.hash_buckets(q, k)
    assert not torch.equal(buckets, control)
    assert not torch.equal(other, control)
    assert torch.equal(buckets.sort(-1).values, control.sort(-1).values)


def put_in_one_bucket(x, planes, coef, num_buckets):
    """Return simhash's buckets if all vectors had the same one."""
    B, H, L, _ = x.shape
    return torch.zeros(B, H, 1, L, dtype=torch.long)


def test_attention_in_one_bucket_has_all_pairs_and_the_work_of_hashing(monkeypatch, one_process):
    monkeypatch.setattr(lsh_attention, "simhash", put_in_one_bucket)
    sizes = dict(positions=128, lengths=(64,), rounds=1)
    [row] = run_bench(attention, "attention", Namespace(device="cpu"), **sizes)
    assert row["share"] == 100
    # seven products of q, k of 2 x 2 x 64 x 64 pairs, 64 numbers; 8 signs for q and for k
    assert row["dense_gflop"] == pytest.approx(7 * 2 * 64 * (2 * 2 * 64 * 64) / 1e9)
    assert row["gflop"] == pytest.approx(row["dense_gflop"] + 2 * 64 * 8 * 512 / 1e9)


def test_trained_buckets_by_hand(monkeypatch):
    """All queries and the 16 best of 32 keys share a bucket: 16 of weight 3, and 16 of weight 1."""
    q = torch.zeros(1, 1, 32, 4)
    q[..., 0] = 1
    k = torch.zeros(1, 1, 32, 4)
    k[..., ::2, 0] = 2 * np.log(3)  # a score is divided by √4
    k[..., 1::2, 1] = 1
    monkeypatch.setattr(lsh_attention, "simhash", lambda x, *_: (x[..., 1] > 0).long().unsqueeze(2))
    row = attention.measure_layer([q, k, torch.randn(1, 1, 32, 4)], bands=2, rounds=1)
    assert row["share"] == row["share_random"] == row["largest"] == 50
    assert row["recall"] == 100
    assert row["mass"] == pytest.approx(100 * 48 / 64)
    # of 16 keys by chance n are among the best: 16 + 2 n of the mass of 64
    assert row["recall_random"] < 100
    assert row["mass_random"] == pytest.approx(25 + row["recall_random"] / 2)


def test_bench_trained_one_bucket_has_all_the_mass(sr_run, monkeypatch):
    monkeypatch.setattr(lsh_attention, "simhash", put_in_one_bucket)
    settings = Namespace(runs=[str(sr_run)])
    for row in run_bench(attention, "trained", settings, rounds=1, sequences=3):
        assert row["share"] == row["recall"] == row["largest"] == 100
        assert row["mass"] == pytest.approx(100, abs=1e-3)


def test_bench_curves_has_the_mean_loss_since_the_last_evaluation(tmp_path):
    log = [
        dict(step=0, eval_loss=9.0),
        dict(step=10, loss=8.0),
        dict(step=20, loss=6.0),
        dict(step=20, eval_loss=6.5),
        dict(step=30, loss=5.0, eval_loss=4.0),
    ]
    run = tmp_path / "dense"
    run.mkdir()
    (run / "log.jsonl").write_text("\n".join(map(json.dumps, log)))
    rows = run_bench(attention, "curves", Namespace(runs=[str(run)]))
    assert rows == [
        dict(name="dense", step=20, loss=7.0, eval_loss=6.5),
        dict(name="dense", step=30, loss=5.0, eval_loss=4.0),
    ]


# HashFormers and Superbloom


def test_counts_match_hashformers():
    # [HF Table 2]
    rows = {row["name"]: row for row in run_bench(hashformers, "counts")}
    assert rows["emb 50K"]["total"] == 124_647_170
    assert rows["proj"]["total"] == 86_146_562
    assert rows["pool"]["authors"] == 86_845_442
    assert rows["emb 1K"]["authors"] == 86_840_834
    for row in rows.values():
        assert row["printed"] == row["shown"] or row["note"]
    printed = {  # PCR all and PCR emb
        "emb 50K": (0.0, 0.0),
        "emb 1K": (30.3, 97.9),
        "pool": (30.3, 97.9),
        "add": (30.8, 99.5),
        "proj": (30.9, 99.7),
    }
    for name, (pcr_all, pcr_emb) in printed.items():
        assert round(rows[name]["pcr_all"], 1) == pcr_all
        assert round(rows[name]["pcr_emb"], 1) == pcr_emb


def test_sizes_match_superbloom_but_for_four():
    # [SB Tables 1, 3, 4]: four do not follow from their own numbers
    rows = {row["name"]: row for row in run_bench(superbloom, "sizes")}
    differ = {name.split(": ")[1] for name, row in rows.items() if row["shown"] != row["printed"]}
    assert differ == {"superbloom", "superbloom-d384l1", "hash40-h512", "hash20-h1024"}
    # erratum: 229M needs 200,000 rows, and 2N/50 is 211,276
    row = rows["Table 1: superbloom"]
    assert row["rows"] == 211_276
    assert round((row["paper"] - 11_276 * 769) / 2**20) == 229


def test_find_width_is_that_of_the_published_table():
    # results/simplewiki.json: 14,109 items, alpha 4, a lookup table of width 168
    assert superbloom.find_width(14_109, 4) == 168


def test_score_items_by_hand():
    pages = [
        np.array([0, 1]),
        np.array([0, 1, 2]),
        np.array([2, 3]),
        np.array([2]),
    ]
    pages_of = {
        0: pages[:2],
        1: pages[:2],
        2: pages[1:],
        3: pages[2:3],
    }
    frequency = np.array([2, 2, 3, 1])
    popularity, counts, cosines, walks = superbloom.score_items([0], pages_of, frequency)
    assert popularity.tolist() == [2, 2, 3, 1]
    # the visible item 0 stands with 1 on two pages, with 2 on one
    assert counts.tolist() == [2, 2, 1, 0]
    assert cosines == pytest.approx([1, 1, 1 / np.sqrt(6), 0])
    # a walk from 0 takes each of its pages with 1/2, then an item there: 1 has (1/2 + 1/3) / 2
    assert walks == pytest.approx([5 / 12, 5 / 12, 1 / 6, 0])


def test_score_neighbors_popularity_equals_loops(args, pages_path, monkeypatch):
    # the most frequent items of training pages, ties by first appearance, without visible items
    monkeypatch.setattr(superbloom, "RECALL", tuple(range(1, 60)))
    settings = args(data=str(pages_path))
    popularity, *_, walks = superbloom.score_neighbors(settings)
    corpus = harness.load_corpus(settings, "items")
    frequency = dict.fromkeys(corpus.ids.tolist(), 0)
    for number in corpus.split_pages()[0]:
        page = corpus.ids[corpus.offsets[number]:corpus.offsets[number + 1] - 1]
        for item in page.tolist():
            frequency[item] += 1
    _, ids, masked = superbloom.read_sets(corpus, 32)
    ranks = []
    for row, column in zip(ids.tolist(), masked.tolist()):
        correct = row.pop(column)
        others = [item for item in frequency if item >= FIRST_WORD_ID and item not in row]
        others.sort(key=frequency.get, reverse=True)
        ranks.append(others.index(correct))
    for k in superbloom.RECALL:
        assert popularity[f"rec@{k}"] == pytest.approx(np.mean(np.array(ranks) < k))
    assert walks["rec@10"] > 0.8  # the other items of a page say the group


def test_bench_beams_until_certified_equals_evaluation(sets_run, pages_path, args):
    settings = args(runs=[str(sets_run)], data=str(pages_path))
    rows = {row["name"]: row for row in run_bench(superbloom, "beams", settings)}
    sure = rows[f"{sets_run.name}, until certified"]
    evaluation = harness.read_log(sets_run)[-1]
    assert sure["certified"] == 100
    for k in (1, 10, 20):
        assert sure[f"rec@{k}"] == pytest.approx(evaluation[f"rec@{k}"], abs=1e-4)


def test_bench_beams_of_another_corpus_is_refused(sets_run, text_path):
    argv = ["beams", "--runs", str(sets_run), "--data", str(text_path)]
    assert_refused(superbloom.main, argv, "--data: expected the corpus")


# Sketch


def test_collisions_by_hand(monkeypatch):
    index = np.array([
        [0, 0, 0],  # 8 times
        [1, 0, 1],  # 4 times: behind the first in one bucket
        [0, 0, 2],  # twice: behind the first in two
        [2, 2, 2],  # once: behind the third in one
    ])
    corpus = Namespace(words=["a", "b", "c", "d"], counts=np.array([0, 0, 0, 0, 0, 8, 4, 2, 1]))
    monkeypatch.setattr(sketch, "load_corpus", lambda args, split: corpus)
    monkeypatch.setattr(sketch, "sketch_index", lambda words, k, R: index[:, :k])
    rows = {row["name"]: row for row in sketch.bench_collisions(None)}

    one = rows["k 1, R 500"]
    assert one["words"] == 4 / 500
    assert one["most"] == 2
    assert one["counted"] == 1  # a and c
    assert one["expected"] == pytest.approx(4 * 3 / 2 / 500)
    assert one["one"] == one["half"] == pytest.approx(100 * 2 / 15)

    three = rows["k 3, R 500"]
    assert three["counted"] == 0
    assert three["expected"] == pytest.approx(4 * 3 / 2 / 500**3)
    assert three["one"] == pytest.approx(100 * 7 / 15)
    assert three["half"] == pytest.approx(100 * 2 / 15)


def test_damaged_tables_by_hand():
    weight = torch.randn(100, 400)  # two blocks of 50
    weight[0, :3] = torch.tensor([7, 3.4, -2])
    weight[0, 3:] = 0
    tables = dict(sketch.damaged_tables(weight, 50))
    assert torch.equal(tables["as trained"], weight)
    noise = tables["1 row in 50 corrupted by 10 σ"] - weight
    chosen = noise.abs().amax(1).nonzero().flatten()
    assert len(chosen) == 2
    assert noise[chosen].std() == pytest.approx(10 * weight.std().item(), rel=0.15)
    assert tables["rows of 4 bits"][0, :3].tolist() == [7, 3, -2]
    assert tables["rows of 2 bits"][0, :3].tolist() == [7, 0, 0]
    halved = tables["half as many buckets"]
    assert torch.equal(halved[1], (weight[1] + weight[26]) / 2)
    assert torch.equal(halved[1], halved[26])


def test_hide_words_hides_the_same_words_from_words_and_pieces():
    text = "A cafe, a Cat; the cat-like dog saw 4 cats and it's 'fine'."
    bpe = BPE.train(lambda: ["the cat"] * 9)
    by_words = HashTokenizer(Config(), hash=MD5())
    by_pieces = HashTokenizer(Config(emb="lookup"), split="bpe", subwords=bpe, vocabulary=bpe.units)
    hidden_words = []
    for tokenizer in (by_words, by_pieces):
        rows, hidden = sketch.hide_words(["A café", *[text] * 40], tokenizer)  # ASCII alone
        units, _ = tokenizer.split(text)
        hidden_words.append([])
        for row, gaps in zip(rows, hidden, strict=True):
            for word, positions in gaps:
                hidden_words[-1].append(word)
                pieces = tokenizer.ids(sketch.split_word(word, tokenizer)).tolist()
                row[positions[0]:positions[-1] + 1] = pieces
            assert row[1:-1] == tokenizer.ids(units).tolist()  # with the hidden words back
    assert hidden_words[0] == hidden_words[1]
    # of letters, after a space: 10 of a text, of which 15 % are hidden
    assert set(hidden_words[0]) == {"cafe", "a", "cat", "the", "dog", "saw", "cats", "and", "it"}
    assert 0.1 < len(hidden_words[0]) / (40 * 10) < 0.2


def list_columns(words, tokenizer, median):
    """Return dict, word -> its bucket for each hash function, or the IDs of its pieces."""
    if median:
        buckets = sketch_index(words, 5, 31).tolist()
        return dict(zip(words, buckets, strict=True))
    columns = {}
    for word in words:
        ids = tokenizer.ids(sketch.split_word(word, tokenizer)).tolist()
        if UNK not in ids:
            columns[word] = ids
    return columns


def score_all(model, row, positions, columns):
    """Return dict, word -> its log probability at the hidden positions of a row."""
    logits = model(torch.tensor([row]), masked_positions=torch.tensor(positions))
    logp = logits.flatten(0, -2).log_softmax(-1)  # one row per hash function, or per piece
    scores = {}
    for word, places in columns.items():
        if len(places) == len(logp):  # as many pieces as are hidden
            scores[word] = logp[range(len(places)), places].sum().item()
    return scores


@pytest.mark.parametrize("flags", [
    "--emb median --buckets 31",  # hashes
    "--emb lookup --objective mlm --split regex --vocab 30",  # rows; some words have none
    "--emb lookup --objective mlm --vocab 290",  # pieces, several of a word
])
def test_name_hidden_equals_scoring_all_by_hand(
        flags, text_path, cache_dir, tmp_path, monkeypatch):
    places = ["--data", str(text_path), "--cache", str(cache_dir), "--out", str(tmp_path)]
    pretrain.main([*places, *SMALL, *flags.split(), "--steps", "2", "--length", "128"])
    run = harness.load_run(tmp_path)
    monkeypatch.setattr(sketch, "load_run", lambda folder: run)
    model, tokenizer, _ = run
    torch.manual_seed(0)
    for weight in model.parameters():
        torch.nn.init.normal_(weight)  # scores far apart: hardly a tie
    lines = text_path.read_text().splitlines()[:400]
    texts = [line.replace(" ", " the ", 1) for line in lines]
    words = set(" ".join(texts).replace(".", "").split())
    words = sorted(words - {"the"})
    result = sketch.name_hidden(tmp_path, words, texts)

    columns = list_columns(words, tokenizer, "median" in flags)
    rows, hidden = sketch.hide_words(texts, tokenizer)
    model.set_codes(torch.from_numpy(tokenizer.codes()))
    num_asked = 0
    num_first = 0
    num_ten = 0
    for row, gaps in zip(rows, hidden):
        for correct, positions in gaps:
            num_asked += correct in words
            if correct in columns:
                scores = score_all(model, row, positions, columns)
                num_better = sum(score > scores[correct] for score in scores.values())
                num_first += num_better < 1
                num_ten += num_better < 10
    assert result["asked"] == num_asked > 300
    assert 0 < result["first"] < result["ten"]
    one_tie = 100 / num_asked + 1e-9
    assert result["first"] == pytest.approx(100 * num_first / num_asked, abs=one_tie)
    assert result["ten"] == pytest.approx(100 * num_ten / num_asked, abs=one_tie)


def test_bench_lengths_at_the_full_length_equals_the_last_evaluation(sr_run, args):
    rows = run_bench(hashformers, "lengths", args(runs=[str(sr_run)]), lengths=(5, 33))
    assert [row["positions"] for row in rows] == [5, 33]
    evaluation = harness.read_log(sr_run)[-1]
    for key in ("eval_loss", "f1_random", "f1_shuffled"):
        assert rows[1][key] == pytest.approx(evaluation[key], rel=1e-4)


def test_bench_robust_as_trained_does_not_move(median_run, args):
    rows = run_bench(sketch, "robust", args(runs=[str(median_run)]))
    assert rows[0]["moved"] == rows[0]["more"] == 0
    assert min(row["moved"] for row in rows[1:]) > 0


# Training


@pytest.mark.parametrize("name, folder, lines, words, characters", [
    # classes: [CLS] The model [SEP] are 4 words and 11 characters
    ("cola", "CoLA", "gj04\t0\t\tThe model\ngj04\t1\t\tThe model\n", 4, 11),
    # numbers: [CLS] The [SEP] [SEP] model [SEP], where characters have one separator
    ("stsb", "STS-B", "sentence1\tsentence2\tscore\n" + "The\tmodel\t2\n" * 2, 6, 11),
])
def test_bench_inference_reads_units_of_the_dev_texts(
        name, folder, lines, words, characters, args, tmp_path):
    (tmp_path / folder).mkdir()
    for split in ("train", "dev"):
        (tmp_path / folder / f"{split}.tsv").write_text(lines)
    sizes = dict(layers=1, width=24, heads=3, ffn=40, length=64, rows=300)
    settings = args(data_dir=str(tmp_path))
    [row] = run_bench(training, "inference", settings, names=[name], rounds=1, **sizes)
    assert row["words"] == words
    assert row["characters"] == characters


@pytest.fixture
def tuned_run(tmp_path):
    """Return a function that writes results.json, one result for all tasks; returns --runs."""
    def write(tasks, **settings):
        result = dict(mean=70.0, std=1.0, last=69.0, majority=50.0, bag_of_words=60.0,
                      bag_of_words_std=2.0, over_bag=10.0, over_bag_error=3.0, rows=dict(dev=7),
                      size=dict(total=9))
        defaults = dict(preset=None, from_scratch=False, select=0.1)
        content = dict(settings=defaults | settings, tasks=dict.fromkeys(tasks, result))
        (tmp_path / "results.json").write_text(json.dumps(content))
        return Namespace(runs=[str(tmp_path)])
    return write


def test_bench_tasks_has_a_row_a_task_with_its_controls(tuned_run):
    runs = tuned_run(["sst2", "mrpc"], ckpt="out/proj-lsh/")
    runs.runs.append("out/none")  # is not fine-tuned
    rows = run_bench(training, "tasks", runs)
    assert [row["name"] for row in rows] == ["proj-lsh, sst2", "proj-lsh, mrpc"]
    table = harness.markdown(rows[:1], training.TASKS)
    assert table.endswith("| proj-lsh, sst2 | 70.0 ± 1.0 | 69.0 | 60.0 ± 2.0 | 10.0 ± 3.0 | 50.0 | "
                          "7 |\n")


# Figures


def test_figures_draws_what_stands_in_assets(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "ASSETS", str(tmp_path))
    figures.main(["figures"])
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (ROOT / "assets").iterdir()} - {"collisions.png"}


def test_figures_draws_losses_and_collisions_of_runs(text_path, cache_dir, tmp_path):
    run = str(tmp_path / "run")
    out = tmp_path / "figures"
    pretrain.main(["--data", str(text_path), "--cache", str(cache_dir), "--out", run, *SMALL,
                   "--attn", "lsh"])
    figures.main(["figures", "--runs", run, "--out", str(out)])
    assert {path.name for path in out.iterdir()} == {"loss-sr.png", "collisions.png"}
