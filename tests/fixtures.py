"""Fixtures of all tests: no network, a fixed seed, and data and tiny models made once a session."""

import gc
import gzip
import json
import os
import random
import signal
import socket

import pytest
import torch

# before `datasets` is imported, which reads them once
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import finetune  # noqa: E402
import pretrain  # noqa: E402
from data.corpus import Corpus, prepare  # noqa: E402
from data.splitters import BPE  # noqa: E402
from hashing import NgramLSH  # noqa: E402
from tests.helpers import SMALL, SMALL_SETS, make_words  # noqa: E402


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Make a connection to anywhere but this machine an error."""
    connect = socket.socket.connect

    def connect_locally(self, address):
        is_local = isinstance(address, str) or address[0] in ("127.0.0.1", "::1", "localhost")
        assert is_local, f"network: {address}"
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_locally)


@pytest.fixture(autouse=True)
def fixed_seed():
    """Give every test the same random numbers, one thread and the usual handlers of signals."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.fixture(autouse=True, scope="session")
def quick_runs():
    """Leave out what takes longer than the steps of a tiny run, but for the tests of these parts.

    A run draws no picture, and a bag of words trains for as many steps as the model beside it.
    What is imported by now is never garbage, so finetune.py does not search it after each job.
    """
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "draw_losses", lambda *arguments: "No picture")
        patch.setattr(finetune, "BAG_STEPS", 10)
        yield


@pytest.fixture
def long_control(monkeypatch):
    """Train each bag of words for 300 steps, as finetune.py does."""
    monkeypatch.setattr(finetune, "BAG_STEPS", 300)


@pytest.fixture(scope="session")
def text_path(tmp_path_factory):
    """A text of 3,000 lines with an order to learn: two words may follow each word."""
    rng = random.Random(1)
    words = make_words(40, 7)
    followers = {word: rng.sample(words, 2) for word in words}
    lines = []
    word = words[0]
    for _ in range(3_000):
        line = []
        for _ in range(rng.randint(4, 15)):
            word = rng.choice(followers[word])
            line.append(word)
        lines.append(" ".join(line) + ".")
    path = tmp_path_factory.mktemp("text") / "small.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def pages_path(tmp_path_factory):
    """400 item sets of 3 to 9 names out of one of 12 groups of 10: other names say the group."""
    rng = random.Random(3)
    names = [name.title() for name in make_words(120, 5)]
    names[7] = "Miles Davis"
    path = tmp_path_factory.mktemp("pages") / "pages.jsonl"
    with open(path, "w") as file:
        for _ in range(400):
            group = rng.randrange(12)
            page = rng.sample(names[10 * group:10 * group + 10], rng.randint(3, 9))
            file.write(json.dumps(dict(title="t", links=page, number=1)) + "\n")
    return path


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory):
    """The folder of prepared corpora that all tests share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def lsh():
    words = make_words(400, 3) + ["play", "plays", "played", "xylophone"]
    return NgramLSH.fit(dict.fromkeys(words, 1), 997, seed=5)


@pytest.fixture(scope="session")
def bpe():
    texts = ["the cat sat on the mat, the cats sat there"] * 50
    return BPE.train(texts, size=300)


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a file below tmp_path: bytes, or text, zipped for .gz."""
    def write(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            content = content.encode()
            if name.endswith(".gz"):
                content = gzip.compress(content)
        path.write_bytes(content)
        return str(path)

    return write


@pytest.fixture
def load(tmp_path):
    """Return a function that prepares data and loads it."""
    def load(data, split="regex", **options):
        folder = prepare(str(data), split, str(tmp_path / "cache"), **options)
        return Corpus(folder)

    return load


@pytest.fixture
def small(text_path, pages_path, cache_dir, tmp_path):
    """Return a function: flags of a run of a second over text or sets, with an --out of its own."""
    def flags(*more, out="run", data="text"):
        files = dict(
            text=["--data", text_path, *SMALL],
            sets=["--data", pages_path, *SMALL_SETS])
        words = [*files[data], "--cache", cache_dir, "--out", tmp_path / out, *more]
        return [str(word) for word in words]

    return flags


@pytest.fixture
def two_ranks(monkeypatch):
    """Set what torchrun sets, for rank 0 of two."""
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")


def trained_folder(name, data, flags):
    """Return a session fixture: the folder of a model that pretrain.py trained with these flags."""
    @pytest.fixture(scope="session", name=name)
    def train(request, cache_dir, tmp_path_factory):
        out = tmp_path_factory.mktemp(name)
        data_path = request.getfixturevalue(data)
        files = ["--data", str(data_path), "--cache", str(cache_dir), "--out", str(out)]
        pretrain.main([*files, *flags])
        return out

    return train


sr_run = trained_folder("sr_run", "text_path", [*SMALL, "--length", "33", "--emb", "proj"])
mlm_run = trained_folder("mlm_run", "text_path", [
    *SMALL, "--emb", "lookup", "--split", "regex", "--objective", "mlm"])
sets_run = trained_folder("sets_run", "pages_path", SMALL_SETS)
median_run = trained_folder("median_run", "text_path", [*SMALL, "--emb", "median"])
