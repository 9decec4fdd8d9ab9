"""Fixtures of all tests: no network, a fixed seed, and data and tiny models that are made once a session."""

import functools
import json
import os
import random
import signal
import socket

import pytest
import torch

os.environ.setdefault("HF_DATASETS_OFFLINE", "1")  # before `datasets` is imported, which reads them once
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pretrain  # noqa: E402
from hashing import NgramLSH  # noqa: E402
from tests.support import SMALL, SMALL_SETS, make_words  # noqa: E402
from tokenizer import BPE  # noqa: E402


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Make a connection to anywhere but this machine an error."""
    connect = socket.socket.connect

    def connect_locally(self, address):
        is_local = self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost")
        assert is_local, f"network: {address}"
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_locally)


@pytest.fixture(autouse=True)
def fixed_seed():
    """Give every test the same random numbers, one thread and the usual handlers of signals."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL,
                signal.SIGHUP: signal.SIG_DFL}
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def text_path(tmp_path_factory):
    """A text of 3,000 lines with an order to learn: each word is one of two that may follow the last one."""
    rng, words = random.Random(1), make_words(40, 7)
    followers = {word: rng.sample(words, 2) for word in words}
    lines, word = [], words[0]
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
    """400 item sets of 3 to 9 names out of one of 12 groups of 10: the other names of a set say the group."""
    rng, names = random.Random(3), [name.title() for name in make_words(120, 5)]
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
    return BPE.train(["the cat sat on the mat, the cats sat there"] * 50, size=300)


def trained_folder(name, data, flags):
    """Return a session fixture: the folder of a model that pretrain.py trained with these flags."""
    @pytest.fixture(scope="session", name=name)
    def train(request, cache_dir, tmp_path_factory):
        out = tmp_path_factory.mktemp(name)
        data_path = request.getfixturevalue(data)
        pretrain.main(["--data", str(data_path), "--cache", str(cache_dir), "--out", str(out), *flags])
        return out

    return train


SR_FLAGS = [*SMALL, "--length", "33", "--emb", "proj", "--hash", "lsh"]
sr_run = trained_folder("sr_run", "text_path", SR_FLAGS)
mlm_run = trained_folder("mlm_run", "text_path", (  # long enough to know the order of the words
    *SMALL, *"--emb lookup --split regex --objective mlm --layers 2 --width 64 --dropout 0 --batch 32 "
    "--steps 800 --lr 2e-3 --eval_every 800 --save_every 800".split()))
sets_run = trained_folder("sets_run", "pages_path", SMALL_SETS)
median_run = trained_folder("median_run", "text_path", [*SMALL, "--emb", "median"])

# Hostile checkpoints: a place in the checkpoint of sr_run, and the value put there. "" is the file itself
MISSING, NUMBERS = object(), torch.zeros(3)
NOT_WHOLE = dict(another_shape=NUMBERS, missing=MISSING, number=1.0, meta=torch.zeros(32, device="meta"),
                 sparse=torch.eye(32).to_sparse(), nan=torch.full((32,), torch.nan),
                 repeated=torch.zeros(1).expand(2**40))
HOSTILE = [("", kind, kind) for kind in ("cut", "empty", "folder", "fifo")] + [
    *(("model/norm.weight", kind, value) for kind, value in NOT_WHOLE.items()),
    ("model/norm.weight", "dtype", torch.zeros(32, dtype=torch.complex64)), ("model/more", "extra", NUMBERS),
    ("model", "missing", MISSING), ("format", "later", 99), ("config", "missing", MISSING),
    ("config/width", "text", "32"), ("config/emb", "list", ["proj"]),
    ("words", "numbers", [1]), ("step", "negative", -5), ("step", "text", "6")]
HOSTILE_TO_INFER = [("encoder", "empty", {}), ("encoder/hash", "foreign", {"bits": 3}),
                    ("encoder/split", "unknown", "letters"), ("config/more", "new", 1), ("task", "list", [])]
HOSTILE_TO_RESUME = [*(("optimizer/state/4/exp_avg", kind, value) for kind, value in NOT_WHOLE.items()),
                     ("optimizer", "missing", MISSING), ("optimizer/state", "missing", MISSING),
                     ("optimizer/state", "empty", {}), ("optimizer/state", "list", [1]),
                     ("optimizer/state/4", "missing", MISSING), ("optimizer/state/4", "empty", {}),
                     ("optimizer/state/99", "extra", {"step": torch.tensor(6.0)}),
                     ("optimizer/state/4/step", "another", torch.tensor(-1.0)), ("run", "missing", MISSING),
                     ("optimizer/param_groups/1", "missing", MISSING), ("optimizer/param_groups", "text", ""),
                     ("best", "text", "0"), ("log_size", "missing", MISSING), ("config/layers", "another", 2),
                     ("step", "missing", MISSING), ("step", "another", 5), ("step", "monstrous", 10**9)]


def spoil_checkpoint(path, keys, value):
    """Damage the checkpoint at path, a Path: see HOSTILE."""
    content, whole = torch.load(path), path.read_bytes()
    if keys:
        *parents, last = [int(key) if key.isdigit() else key for key in keys.split("/")]
        part = functools.reduce(lambda part, key: part[key], parents, content)
        part[last] = value
        if value is MISSING:
            del part[last]
        return torch.save(content, path)
    path.unlink()
    if value in ("folder", "fifo"):
        dict(folder=os.mkdir, fifo=os.mkfifo)[value](path)
    else:
        path.write_bytes(whole[:len(whole) // 2] if value == "cut" else b"")
