"""README.md, docs/ and runs/ are true: commands parse and run, links lead somewhere.

Tables between markers are generated from results/.
"""

import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest

import finetune
import infer
import pretrain
from bench import figures
from tests.commands import PAGES, RUNS, check_command, list_page_commands, list_run_commands
from tests.commands import split_command
from tests.helpers import ROOT, SMALL, make_words, run_main, run_script

ALL = "\n".join(PAGES.values())
FAST = "--device cpu --dtype float32".split()


# ---------------------------------------------------------------------------------------------
# Commands and code


@pytest.mark.parametrize("words", list_page_commands(), ids=" ".join)
def test_command_of_a_page_parses(words):
    check_command(words)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_script_of_runs_has_commands_that_parse_and_a_row_in_its_table(path):
    for words in list_run_commands(path):
        check_command(words)
    assert f"| [{path.name}]({path.name}) |" in PAGES["runs/README.md"]


@pytest.mark.parametrize("page", PAGES)
def test_scripts_that_a_page_names_exist(page):
    for name in re.findall(r"\bruns/[\w-]+\.sh", PAGES[page]):
        assert (ROOT / name).exists(), name


def test_python_blocks_with_the_files_they_name_run(tmp_path, sr_run):
    """In one process, from a folder each; a block with a trained model finds the project, too."""
    folders = []
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", ALL, re.S)):
        folder = tmp_path / str(i)
        folder.mkdir()
        folders.append(folder)
        (folder / "block.py").write_text(code, encoding="utf-8")
        needs = re.search(r"# needs: (.*)", code)[1]
        if needs == "a trained model":
            shutil.copytree(sr_run, folder / "out/proj-lsh")
            shutil.copytree(ROOT / "models", folder / "models")
        else:
            for name in needs.split():
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
    assert len(folders) > 9
    # a warning would say that a file is missing, without which the block is slow
    run_script(ROOT / "tests/scripts/run_blocks.py", *folders, PYTHONPATH="",
               PYTHONWARNINGS="error::UserWarning")


@pytest.fixture
def folder(tmp_path, monkeypatch, text_path):
    """Make a folder with the files that commands name, in small, the current one."""
    monkeypatch.chdir(tmp_path)
    rng = random.Random(0)
    shutil.copytree(text_path.parent, "my_texts")
    shutil.copytree(ROOT / "models", "models")
    for name in ("texts.csv", "train.csv", "dev.csv", "test.csv", "new.csv"):
        lines = "one two,three and four,five\na,b,six\n" * 90
        Path(name).write_text("title,body,topic\n" + lines)
    Path("reviews.txt").write_text("a charming journey\n")
    Path("baskets.txt").write_text("a [MASK]\n")
    names = ["a", "socket", "bind", *make_words(900)]
    pages = [json.dumps(dict(links=rng.sample(names, 5))) for _ in range(900)]
    Path("pages.jsonl").write_text("\n".join(pages))

    Path("SST-2").mkdir()
    Path("SST-2/test.tsv").write_text("index\tsentence\n0\ta good film\n")
    answer = dict(text="Ada Lovelace", answer_start=18)
    question = dict(id="0", question="Who wrote it?", answers=[answer])
    paragraph = dict(context="It was written by Ada Lovelace in 1843.", qas=[question] * 9)
    articles = [dict(title="t", paragraphs=[paragraph])]
    for split in ("train", "dev"):
        rows = "a good film\t1\nno film\t0\n" * 9
        Path(f"SST-2/{split}.tsv").write_text(f"sentence\tlabel\n{split} {rows}")
        Path(f"{split}-v1.1.json").write_text(json.dumps(dict(data=articles)))


def run(main, *words):
    """Run a script, which must succeed."""
    done = run_main(main, *words)
    assert done.code == 0, (words, done.err)


def test_commands_run(folder, cache_dir):
    """Commands run with their own flags, then those of a tiny run, in the order of the scripts.

    Not those that need a download or a large model: finetune.py runs for three kinds of tasks.
    """
    commands = {"pretrain.py": [], "finetune.py": [], "infer.py": []}
    for words in list_page_commands():
        script, flags = split_command(words)
        if script in commands:
            commands[script].append(flags)
    for i, flags in enumerate(commands["pretrain.py"]):
        args, _ = pretrain.parse_flags(flags)
        out = args.out  # as later commands expect it, whatever data takes the place of --data
        if os.path.exists(out):
            out = f"out/{i}"
        flags += ["--out", out]
        if not os.path.exists(args.data):  # the installed Python, or a download
            flags += ["--data", "my_texts" if args.order else "pages.jsonl"]
        if args.emb == "bloom":  # few items
            flags += ["--alpha", 2]
        run(pretrain.main, *flags, "--cache", cache_dir, *SMALL, "--length", 33)
    for flags in commands["finetune.py"]:
        if re.search(r"--ckpt (out|models)/.* --(train|task sst2|task squad)", " ".join(flags)):
            if "0" not in flags:  # --epochs 0
                flags += ["--epochs", "1", "--seeds", "1"]
            if "--train" not in flags:
                flags += ["--data_dir", "."]  # instead of the hub
            run(finetune.main, *flags, "--cache", cache_dir, *FAST)
    for flags in commands["infer.py"]:
        run(infer.main, *flags)


# ---------------------------------------------------------------------------------------------
# Links and tables


def list_anchors(page):
    """Return the anchors of a page's headings."""
    titles = re.findall(r"^#+ (.*)", PAGES[page], re.M)
    return [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    base = (ROOT / page).parent
    for link, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", PAGES[page]):
        target = (base / link).resolve() if link else ROOT / page
        assert target.exists(), link
        if anchor:
            assert anchor in list_anchors(target.relative_to(ROOT).as_posix()), anchor


def test_tables_follow_results():
    """The tables between markers are what bench/figures.py writes."""
    tables = figures.readme_tables()
    for page, text in PAGES.items():
        for name, table in re.findall(r"<!-- (.*?) -->\n(.*?)<!-- end -->", text, re.S):
            assert table == tables[name], f"{page}: run python -m bench.figures readme"


def test_errata_of_bert_lsh_follow_from_its_printed_numbers():
    page = PAGES["docs/bert-lsh.md"]
    # [BL §3.3]: "7 % lower" is so many of the 872 sentences of SST-2's dev set
    assert round(872 * 0.7672) - round(872 * 0.7603) == 6
    assert "0.7672 against 0.7603: six sentences of 872" in page
    # [BL Table 4]: v1.1 has 10,570 dev questions, v2 has 11,873
    assert "2.90 s × 3,646.85 samples per s and 28.80 s × 366.97 per s are both its 10,570" in page
    for seconds, samples_per_second in [(2.90, 3_646.85), (28.80, 366.97)]:
        assert seconds * samples_per_second == pytest.approx(10_570, abs=10)
