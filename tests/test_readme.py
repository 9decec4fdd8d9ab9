"""README.md: its commands run with tiny settings, its tables and the numbers in its prose follow results/."""

import dataclasses
import importlib
import json
import math
import random
import re
import shlex
import shutil
from collections import Counter
from pathlib import Path

import numpy as np

import data.corpus
import data.squad
import data.tasks
import finetune
import infer
import model
import pretrain
import settings
from bench import common, figures
from tests.support import ROOT, SMALL, make_words
from tests.test_finetune import QUICK, sentence
from tests.test_squad import make_questions, nested_file
from tests.test_tasks import write_table

README = (ROOT / "README.md").read_text(encoding="utf-8")


def readme_commands():
    """Return the lines of all shell blocks that start a Python program."""
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", README, re.S)
    return [line for block in blocks for line in block.splitlines() if "python" in line or "torchrun" in line]


def write_glue(folder, monkeypatch):
    """Write a few rows of every task in the layout of the download, and expect as many rows."""
    rng = random.Random(0)
    for name, task in list(data.tasks.TASKS.items()):
        columns = [text.split("|")[0] for text in task.texts] + [task.label.split("|")[0]]
        labels = list(task.labels) if task.labels else [str(i / 2) for i in range(10)]
        for split, n in (("train", 19), *((dev, 9) for dev in task.dev)):
            rows = [[*(sentence(rng) for _ in task.texts), labels[i % len(labels)]] for i in range(n)]
            (folder / task.folder).mkdir(parents=True, exist_ok=True)
            write_table(folder / task.folder / f"{split}.tsv", [columns, *rows])
        monkeypatch.setitem(data.tasks.TASKS, name, dataclasses.replace(task, rows=(None, None)))
    return str(folder)


def write_files(folder, monkeypatch):
    """Write all files that the README's commands name, in small, and make a few files the installed Python."""
    for name in ("a.csv", "b.csv"):
        (folder / name).write_text("title,body,topic\n" + "one two,three,five\na,b,six\n" * 9)
    (folder / "reviews.txt").write_text("a charming journey\n")
    (folder / "baskets.txt").write_text("socket bind [MASK]\n")
    (folder / "my_words.txt").write_text("with return zebra\n")
    rng, names = random.Random(0), ["socket", "bind", "listen", *make_words(30)]
    pages = (json.dumps(dict(links=rng.sample(names, 5))) + "\n" for _ in range(90))
    (folder / "pages.jsonl").write_text("".join(pages))
    for split in ("train", "dev"):
        (folder / f"{split}-v1.1.json").write_text(json.dumps(nested_file(make_questions(rng, 9))))
    monkeypatch.setitem(data.squad.SQUAD, "squad", ("v1.1", 9, 9))
    modules = {f"{name}/{i}.py": str(folder / f"{name}{i}.py") for name in ("x", "y") for i in range(40)}
    for name, path in modules.items():
        Path(path).write_text(f'"""The docstring of the module {name} has words."""')
    for module in (data.corpus, data.tasks):
        monkeypatch.setattr(module, "python_files", lambda: modules)


def test_readme_commands_run(cache_dir, text_path, tmp_path, monkeypatch):
    """Each command of the README that this machine can run, with its own flags, then those of a tiny run."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(text_path.parent, tmp_path / "my_texts")
    write_files(tmp_path, monkeypatch)
    glue = write_glue(tmp_path / "glue", monkeypatch)
    monkeypatch.setitem(model.PRESETS, "proformer", model.PRESETS["proformer"] | dict(width=32, heads=4, ffn=64))
    cache, kinds = ["--cache", str(cache_dir)], Counter()

    def train(out, *flags):
        pretrain.main(["--data", str(text_path), *cache, "--out", str(tmp_path / out), *SMALL, *flags])

    for line in readme_commands():
        line = line.split("#")[0].split("&&")[-1].strip()
        words = shlex.split(line.replace("$e", "proj").replace("$h", "md5").replace("$s", "0"))
        if "-m" in words and words[words.index("-m") + 1].startswith("bench."):
            module = importlib.import_module(words[words.index("-m") + 1])
            common.parser(module.__doc__, module.BENCHES).parse_args(words[words.index("-m") + 2:])
            kinds["bench"] += 1
        script = next((word for word in words if word.endswith(".py")), None)
        if script is None:
            continue
        flags = words[words.index(script) + 1:]
        if script == "pretrain.py":
            settings.parser("").parse_args(flags)  # the flags as printed
            flags += ["--out", str(tmp_path / f"p{kinds[script]}"), *cache, *SMALL]
            flags += ["--data", str(text_path)] * ("pages.jsonl" not in flags)
            uses_bloom = any("bloom" in flag for flag in flags) and "lookup" not in flags
            pretrain.main([flag for flag in flags if flag] + ["--alpha", "3"] * uses_bloom)  # of few items
        elif script == "finetune.py":
            finetune.parser().parse_args(flags)
            if "--ckpt" in flags:  # out/proj-lsh of the first command, in small
                flags[flags.index("--ckpt") + 1] = str(tmp_path / "p0")
            task = flags[flags.index("--task") + 1] if "--task" in flags else "own"
            where = ["--data_dir", str(tmp_path) if task == "squad" else glue] * (task not in ("own", "pydoc"))
            # each in a folder of its own, as without --out; infer.py loads those of the first command
            out = task + "".join(flag for flag in ("-scratch", "-preset") if flag[1:] in " ".join(flags))
            finetune.main([*flags, *where, *QUICK, "--epochs", "1", "--seeds", "1", *cache,
                           "--out", str(tmp_path / f"f-{out}")])
        elif script == "infer.py":
            name = next((f"f-{task}" for task in ("sst2", "squad") if f"-{task}" in " ".join(flags)), None)
            if name is None:
                name, more = "i", ()
                if "out/bloom-items" in flags:
                    name, more = "ib", ("--data", "pages.jsonl", "--emb", "bloom", "--alpha", "3")
                elif "out/median" in flags:
                    name, more = "im", ("--emb", "median", "--buckets", "31")
                elif any("[MASK]" in flag for flag in flags):
                    name, more = "il", ("--emb", "lookup", "--objective", "mlm")
                train(name, *more, "--length", "33")
            flags[flags.index("--ckpt") + 1] = str(tmp_path / name)
            infer.main(flags)
        else:
            assert (ROOT / script).exists(), line
        kinds[script] += 1
    assert kinds["pretrain.py"] >= 3 and kinds["infer.py"] >= 5 and kinds["finetune.py"] >= 5 and kinds["bench"] >= 1


def test_readme_tables_follow_results():
    """The tables between markers are what bench/figures.py writes from results/."""
    for name, table in figures.readme_tables().items():
        assert f"<!-- {name} -->\n{table}<!-- end -->" in README, f"run python -m bench.figures readme: {name}"


def test_prose_on_lsh_attention_follows_results():
    """The numbers between the tables of the README, from the files the tables come from."""
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())

    def rows(name):
        return json.loads((ROOT / "results" / f"{name}.json").read_text())["rows"]

    def paired(a, b):  # mean and standard error over the seeds
        gaps = np.subtract(a, b)
        return gaps.mean(), gaps.std(ddof=1) / math.sqrt(len(gaps))

    dense, lsh, random = rows("twins")
    for a, b, key, digits, said in ((dense, lsh, "loss_all", 2, "hashed attention, by {} ± {} on average"),
                                    (dense, lsh, "sst2_all", 1, "{} ± {} points"),
                                    (random, lsh, "loss_all", 2, "{} ± {} worse than the hash")):
        mean, error = paired(a[key], b[key])
        assert said.format(f"{mean:.{digits}f}", f"{error:.{digits}f}") in text
    by_length = {row["L"]: row for row in rows("attention")}
    assert "Faster than dense from 256 positions on" in text
    assert all(row["ratio"] > 1 for L, row in by_length.items() if 256 <= L < 65_536)
    assert (f"{by_length[1024]['ratio']:.1f} times at 1,024 and {by_length[16384]['ratio']:.0f} times at "
            f"16,384") in text
    last = by_length[65536]
    assert f"in {last['ours'] / 1000:.1f} seconds and {last['memory']:.0f} MiB" in text
    long = [row for row in rows("steps") if "2048" in row["name"]]
    for key, said in (("share", "{:.0f} to {:.0f} % of the dense one with `upper`"),
                      ("share_all", "{:.0f} to {:.0f} % with `all`")):
        assert said.format(min(row[key] for row in long), max(row[key] for row in long)) in text
    two = [row for row in rows("trained") if row["name"].endswith("r 2")]
    assert (f"{min(r['share'] for r in two):.0f} to {max(r['share'] for r in two):.0f} % of the pairs and "
            f"{min(r['mass'] for r in two):.0f} to {max(r['mass'] for r in two):.0f} % of the mass") in text


def test_prose_on_sets_and_sketches_follows_results():
    """What the README says of Superbloom in words has the numbers of results/*.json."""
    def rows(name):
        with open(ROOT / "results" / f"{name}.json") as file:
            return {row["name"]: row for row in json.load(file)["rows"]}

    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    wiki, names, depth, maps = (rows(n) for n in ("simplewiki", "beams", "depth", "coherent"))
    gaps, glue, beauty, books = (rows(n) for n in ("gaps", "median", "beauty", "books"))
    one_map = "superbloom, 1 of 2 maps coherent"
    [same] = [row for name, row in wiki.items() if "as many parameters" in name]
    walks = "co-occurrence: walks"

    def percent(row, key="rec@10"):
        return f"{100 * row[key]:.1f}"

    one, six = "1 layer", "6 layers"
    row, both = "a row for each", [maps[f"{n} of 2 maps coherent"] for n in (0, 1, 2)]
    claims = [
        f"{percent(wiki['superbloom'])} % for Superbloom, {percent(wiki[one_map])} with one coherent map, "
        f"{percent(same)} for a row for each item with as many parameters, {percent(wiki[walks])} for walks, "
        f"{percent(wiki['co-occurrence: counts'])} for counts",
        f"{percent(beauty[one_map])} and {percent(books[one_map])} %, against "
        f"{percent(beauty['popularity'])} and {percent(books['popularity'])} for popularity",
        f"{percent(names['bloom-items, until certified'])} % against {percent(names['popularity'])} for "
        f"popularity, {percent(names['co-occurrence: counts'])} for counts, "
        f"{percent(names['co-occurrence: cosines'])} for cosines and {percent(names[walks])} for walks",
        f"from {percent(depth[f'superbloom, {one}'])} to {percent(depth[f'superbloom, {six}'])} % hashed, "
        f"from {percent(depth[f'{row}, {one}'])} to {percent(depth[f'{row}, {six}'])} % not",
        "hashes right " + ", ".join(percent(found, "hashes_right") for found in both),
        "items (rec@1) " + ", ".join(percent(found, "rec@1") for found in both)]

    def spread(row, key):
        return f"{row[key]:.1f} ± {row[f'{key}_std']:.1f}"

    tables = "20,000 words", "20,000 BPE pieces"
    claims += [f"{spread(glue['median'], 'sst2')} on SST-2 where the mean has {spread(glue['mean'], 'sst2')}",
               f"on CoLA ({spread(glue['median'], 'cola')} against {spread(glue['mean'], 'cola')})",
               f"ahead on SST-2 ({spread(glue[tables[1]], 'sst2')}) and behind on STS-B "
               f"({spread(glue[tables[1]], 'stsb')})",
               f"it names {spread(gaps['median'], 'first')} % of the hidden words, the mean "
               f"{spread(gaps['mean'], 'first')} %",
               f"{spread(gaps['median'], 'first')} % with the median, "
               f"{spread(gaps['mean'], 'first')} % with the mean",
               f"{spread(gaps['weighted'], 'first')} % with learnt weights",
               f"{spread(gaps[f'{tables[0]}, not tied'], 'first')} % with a row for each of 20,000 words",
               f"and {spread(gaps['proj, LSH'], 'first')} % by a rival",
               f"have {spread(gaps['median, tied'], 'first')}, {spread(gaps['mean, tied'], 'first')} and "
               f"{spread(gaps[tables[0]], 'first')} %, and BPE, tied too, has "
               f"{spread(gaps[tables[1]], 'first')} %"]
    assert len({round(row["first"], 1) for row in glue.values()}) == 1  # all of them still name "the"
    _, last = re.findall(r"step 10,000: eval_loss (\S+), ", text)  # of the example of a gap
    claims.append(f"the held-out losses are {last} of the median")
    year, large = 365 * 24 * 3600, rows("million")["superbloom"]
    formers = rows("train")["hashformer: S+R, proj"]["ms"] / 1000 * 500_000 * 128 / year
    blooms = large["seconds"] / large["batch"] * 1_024 * 1_000_000 / year
    hashed = rows("steps")["mlm, L 512, bfloat16"]["upper"] / 1000 * 64 * 512 / 8_192 * 20_000 / 3600
    claims += [f"of 512) {formers:.1f} years, Superbloom (a billion pages) {blooms:.1f} years, BERT-LSH",
               f"rows of 512) {hashed:.0f} hours."]
    worse = {name: f"{row['more']:.3f}" for name, row in rows("robust").items()}
    lost, coarse = "1 row in 50 spoilt by 10 σ", "rows of 2 bits"
    claims += [f"its loss rises by {worse[f'median: {lost}']}, that of the mean by {worse[f'mean: {lost}']}",
               f"2 bits cost it {worse[f'median: {coarse}']}, the mean {worse[f'mean: {coarse}']}"]
    crowd, layer = rows("collisions")["k 5, R 500"], rows("sketch")
    claims += [f"of the running text {crowd['one']:.0f} % are",
               f"and {crowd['half']:.0f} % are behind a commoner"]
    assert crowd["counted"] == 0 and layer["median"]["ratio"] < 2  # "less than twice the time of the mean"
    claims.append(f"of five rows {layer['median, torch.median']['ratio']:.0f} times")
    for claim in claims:
        assert claim in text, claim
    speed = rows("bloom")
    at50 = [row for name, row in speed.items() if name.startswith("alpha 50")]
    assert min(row["ratio"] for row in at50) > 300 and max(row["beam"] for row in at50) < 1
    assert speed["alpha 50, peaked"]["ratio_sure"] > 30
    assert all(row["exact"] == "True" for row in speed.values())
