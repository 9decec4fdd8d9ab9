"""Extensions: a toy embedding, hash, objective and task work, each registered from outside as one object."""

import dataclasses
import re

import numpy as np
import pytest
import torch
import torch.nn as nn

import finetune
import pretrain
import settings
from data.tasks import TASKS, Task
from embeddings import EMBEDDINGS, Embedding
from hashing import HASHES
from infer import Predictor
from model import load_model
from objectives import IGNORE_INDEX, OBJECTIVES, MaskedHashes, Objective
from runtime import load_checkpoint
from tests.support import SMALL, assert_refused, run_main
from tokenizer import HashTokenizer


class ToyEmbedding(Embedding):
    def __init__(self, bits, width):
        super().__init__([2] * bits)
        self.matrix = nn.Parameter(torch.randn(bits, width) / 50)

    def embed(self, codes):
        return (2 * codes.to(self.matrix.dtype) - 1) @ self.matrix


@dataclasses.dataclass
class ToyHash:
    ranks: dict
    shift: int = 0
    salt: str | None = None
    options = {"shift": "hash_seed", "salt": "key"}  # keyword of fit -> flag
    needs_counts, is_slow = True, False

    @classmethod
    def fit(cls, counts, **options):
        return cls({word: i for i, word in enumerate(counts)}, **options)

    def index(self, words, N):
        return np.array([sum(map(ord, word)) + self.ranks.get(word, 0) + self.shift for word in words]) % N

    def bits(self, words, T):
        return (self.index(words, 9973)[:, None] * (2 * np.arange(T) + 1) // 7 % 2).astype(np.uint8)

    def state(self):
        return vars(self)


class ToyObjective(Objective):
    head, num_counts = "sr", 2

    def corrupt(self, ids, noise, random_words):
        is_random = (ids >= self.first_word_id) & (noise[0] < 0.2)
        labels = is_random.long().masked_fill(ids < self.first_word_id, IGNORE_INDEX)
        return torch.where(is_random, random_words, ids), labels

    def loss(self, model, inputs, labels):
        return nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), reduction="sum")

    def evaluate(self, model, inputs, labels):
        counts = torch.stack([(model(inputs).argmax(2) == labels).sum(), (labels != IGNORE_INDEX).sum()])
        return self.loss(model, inputs, labels), counts

    def metrics(self, counts):
        return dict(toy_accuracy=counts[0] / counts[1])

    def expected_loss(self, word_counts, counts):
        return 3, 0.5


@pytest.fixture
def toy_flags(monkeypatch, text_path, cache_dir, tmp_path):
    """Register the toys; return flags of a run of two steps into tmp_path/toy."""
    for table, toy in ((EMBEDDINGS, ToyEmbedding), (HASHES, ToyHash), (OBJECTIVES, ToyObjective),
                       (TASKS, Task(("text",), ("no", "yes"), ("accuracy",)))):
        monkeypatch.setitem(table, "toy", toy)
    toys = "--emb toy --hash toy --objective toy --bits 24 --hash_seed 3 --steps 2 --eval_every 1".split()
    files = "--data", str(text_path), "--cache", str(cache_dir), "--out", str(tmp_path / "toy")
    return [*SMALL, *toys, *files]


def test_flags_of_toys_follow_from_their_attributes(toy_flags, monkeypatch):
    """Help lists them; what a flag requires depends on code_format, head and options, not on names."""
    monkeypatch.setitem(OBJECTIVES, "toy-hashes", MaskedHashes)
    text = run_main(pretrain.main, "--help").out + run_main(finetune.main, "--help").out
    assert re.findall(r"--(\w+) {[^}]*\btoy\b", text) == ["hash", "emb", "objective", "task"]
    for flags, other in dict(alpha="bloom", buckets="median", mask="mlm", key="--hash").items():
        assert_refused(pretrain.main, f"--emb toy --objective toy --{flags} 1".split(), f"--{flags}", other)
    for flags, lr in (("toy --hash toy --key k", 5e-5), ("toy-hashes --buckets 7 --key k --mask 0.2", 1e-4)):
        args = settings.parser("").parse_args(f"--preset hashformer --emb toy --objective {flags}".split())
        settings.resolve(args, 1)
        assert args.lr == lr and args.objective in args.out


def test_toys_train_and_load(toy_flags, tmp_path):
    assert set(pretrain.main(toy_flags)) == {"eval_loss", "toy_accuracy"}

    args = settings.parser("").parse_args(toy_flags)
    run = pretrain.build_run(args, settings.resolve(args, 1))  # has the trained model
    checkpoint = load_checkpoint(str(tmp_path / "toy"))
    loaded = load_model(checkpoint)
    tokenizer, outputs = HashTokenizer.load(checkpoint["encoder"], loaded.config), []
    for model, tokenizer in (loaded, tokenizer), (run.model.eval(), run.tokenizer):
        ids = tokenizer.ids(tokenizer.split("a new text of 7 words")[0])
        model.set_codes(torch.from_numpy(tokenizer.codes()))
        outputs.append(model(torch.from_numpy(ids).long()[None]))
        assert tokenizer.hash.shift == 3 and len(tokenizer.hash.ranks) > 30
    assert torch.equal(*outputs) and "embedding.matrix" in checkpoint["model"]


def test_toy_model_is_fine_tuned_on_a_toy_task(toy_flags, tmp_path):
    pretrain.main(toy_flags)
    rows = [f"{letter} good thing,yes\n{letter} bad thing,no\n" for letter in "abcdefgh"]
    (tmp_path / "data.csv").write_text("text,label\n" + "".join(rows))
    files = ["--train", tmp_path / "data.csv", "--dev", tmp_path / "data.csv", "--out", tmp_path / "tuned"]
    done = run_main(finetune.main, "--ckpt", tmp_path / "toy", "--task", "toy", *files, *(
        "--epochs 20 --batch 8 --lr 1e-2 --seeds 1 --device cpu --dtype float32 --no-compile".split()))
    assert not done.code, done.err
    classify = Predictor(str(tmp_path / "tuned")).classify
    assert classify("a good thing")[0][0] == "yes" and classify("a bad thing")[0][0] == "no"
