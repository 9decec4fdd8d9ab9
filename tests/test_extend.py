"""Extensions: a toy embedding, code format, field, hash, attention, objective, task, from outside.

And the table of embeddings and the help, which a new method must join.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import embeddings
import finetune
import model
import pretrain
from attention import ATTENTIONS, SelfAttention
from data import loading
from data.classification import SequenceClassification
from data.coders import CODERS, Coder
from data.corpus import Corpus, prepare
from data.sources import SOURCES, Source
from data.tasks import TASKS, Task
from embeddings import EMBEDDINGS, BloomEmbedding, Embedding, HashEmbedding
from hashing import HASHES, WordHash
from heads import HEADS, PositionHead
from infer import Predictor
from model import Config
from objectives import IGNORE_INDEX, OBJECTIVES, Objective, SampledWords
from support import flags
from tests.helpers import SMALL, assert_refused, run_main
from tokenizer import FIRST_WORD_ID


class ToyEmbedding(Embedding):
    """The bits of a word as -1 and 1, times a matrix."""

    def __init__(self, bits, width):
        super().__init__([2] * bits)
        self.matrix = nn.Parameter(torch.randn(bits, width) / 50)

    def embed(self, codes):
        signs = 2 * codes.to(self.matrix.dtype) - 1  # (..., bits)
        return signs @ self.matrix


@dataclass
class ToyConfig(Config):
    """A field of model.Config that the codes of a format depend on."""

    salt: int = 1


@dataclass(kw_only=True)
class ToyCoder(Coder):
    """The length of a word chooses its row."""

    rows: int
    hash_seed: int
    salt: int

    def codes(self, words):
        lengths = np.array([len(word) for word in words], np.int32)
        return (lengths[:, None] + self.hash_seed + self.salt) % self.rows  # (V, 1)


class ToyRows(HashEmbedding):
    code_format = "toy"


class ToyHash(WordHash):
    """The length of a word, and its rank in the corpus."""

    options = {"shift": "hash_seed"}  # argument of fit -> flag
    needs_counts = True

    def __init__(self, ranks, shift=0):
        self.ranks = ranks
        self.shift = shift

    @classmethod
    def fit(cls, counts, **options):
        ranks = {word: rank for rank, word in enumerate(counts)}
        return cls(ranks, **options)

    def index(self, words, N):
        numbers = [len(word) + self.ranks.get(word, 0) + self.shift for word in words]
        return np.array(numbers) % N

    def bits(self, words, T):
        products = self.index(words, 9973)[:, None] * (2 * np.arange(T) + 1)
        return (products // 7 % 2).astype(np.uint8)

    def state(self):
        return vars(self)

    def knows(self, words):
        return np.array([word in self.ranks for word in words], bool)


class ToyAttention(SelfAttention):
    """A position sees itself alone."""

    def forward(self, x, key_mask=None):
        _, _, v = self.project(x)
        return self.join_heads(v)


class ToyHead(PositionHead):
    """Two classes for each position."""

    method = "detect"
    scales_init = True
    num_classes = 2


class ToyObjective(Objective):
    """Every fifth word is random: which? Class 1 of the toy head says so."""

    head = "toy"
    options = ()
    kinds = {0: "intact", 1: "odd"}

    def corrupt(self, ids, noise, random_words):
        is_word = ids >= FIRST_WORD_ID
        is_random = is_word & (noise[0] < 0.2)
        labels = is_random.long().masked_fill(~is_word, IGNORE_INDEX)
        return torch.where(is_random, random_words, ids), labels

    def predict(self, model, batch):
        return model(batch.inputs, batch.key_mask)  # (B, L, 2)

    def cross_entropy(self, logits, batch):
        return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")

    def tally(self, logits, batch):
        return dict(right=(logits.argmax(2) == batch.labels).sum())

    def metrics(self, sums):
        return dict(toy_accuracy=float(sums["right"] / sums["scored"]))

    def expected_loss(self, word_counts, sums):
        return 2, 0.5


@pytest.fixture
def toy_flags(monkeypatch, small):
    """Register the toys; return flags of a run of two steps into tmp_path/toy."""
    monkeypatch.setitem(EMBEDDINGS, "toy", ToyEmbedding)
    monkeypatch.setitem(HASHES, "toy", ToyHash)
    monkeypatch.setitem(ATTENTIONS, "toy", ToyAttention)
    monkeypatch.setitem(HEADS, "toy", ToyHead)
    monkeypatch.setitem(OBJECTIVES, "toy", ToyObjective)
    monkeypatch.setitem(TASKS, "toy", Task(["text"], ["no", "yes"], ["accuracy"]))
    toys = "--emb toy --hash toy --attn toy --objective toy --bits 24 --hash_seed 3"
    return small(*f"{toys} --steps 2 --eval_every 1".split(), out="toy")


def test_help_of_toys_lists_them(toy_flags):
    text = run_main(pretrain.main, "--help").out + run_main(finetune.main, "--help").out
    kinds = ["hash", "emb", "attn", "objective", "task"]
    assert re.findall(r"--(\w+) {[^}]*\btoy\b", text) == kinds


def test_subclasses_are_set_up_as_their_parents(monkeypatch):
    """The script asks a class what it is, and knows none by its name."""
    monkeypatch.setitem(EMBEDDINGS, "toy", BloomEmbedding)
    monkeypatch.setitem(OBJECTIVES, "toy", SampledWords)
    args, _ = pretrain.parse_flags(["--emb", "toy"])
    assert args.split == "items"
    args, _ = pretrain.parse_flags("--emb lookup --objective toy --samples 7".split())
    assert args.samples == 7


def test_toy_run_trains_and_detects(toy_flags, tmp_path):
    """All that the toys learned is in the checkpoint: the corpus is not read again."""
    result = pretrain.main(toy_flags)

    predictor = Predictor(str(tmp_path / "toy"))
    words, _, p = predictor.detect("a new text of 7 words")

    assert set(result) == {"eval_loss", "toy_accuracy"}
    assert isinstance(predictor.model.inputs.embedding, ToyEmbedding)
    assert isinstance(predictor.model.layers[0].attention, ToyAttention)
    assert predictor.tokenizer.coder.hash.shift == 3
    assert len(predictor.tokenizer.coder.hash.ranks) > 30
    assert p.shape == (len(words), 2)
    assert predictor.kinds == ToyObjective.kinds
    assert_refused(pretrain.main, [*toy_flags, "--noise", "0.2"], "--noise requires other")
    assert torch.allclose(p.sum(1), torch.ones(len(words)))


@pytest.fixture
def format_flags(monkeypatch, text_path, tmp_path):
    """Register a format, its field and flag; return flags of a run with a cache of its own."""
    monkeypatch.setitem(EMBEDDINGS, "toy", ToyRows)
    monkeypatch.setitem(CODERS, "toy", ToyCoder)
    monkeypatch.setitem(flags.DEFAULTS, "salt", 1)
    for module in (model, loading, flags):
        monkeypatch.setattr(module, "Config", ToyConfig)
    build_parser = flags.build_parser

    def build_toy_parser(doc=""):
        parser = build_parser(doc)
        parser.add_argument("--salt", type=int)
        return parser

    monkeypatch.setattr(flags, "build_parser", build_toy_parser)
    files = ["--data", text_path, "--cache", tmp_path / "cache"]
    return [str(flag) for flag in [*SMALL, "--rows", 50, *files]]


def test_new_code_format_is_a_class_and_its_line(format_flags, tmp_path):
    """Its flags, its codes, its checkpoint. Two values of its field share no file of codes."""
    toy = [*format_flags, "--emb", "toy"]
    seen = set()
    for salt in (1, 2):
        out = str(tmp_path / f"salt-{salt}")
        pretrain.main([*toy, "--hash_seed", "3", "--salt", str(salt), "--out", out])
        tokenizer = Predictor(out).tokenizer
        [path] = set(tmp_path.glob("cache/*/codes-*.pt")) - seen
        seen.add(path)
        tokenizer.add_words(Corpus(path.parent).words)
        assert np.array_equal(tokenizer.codes(), torch.load(path))  # infer.py has those of training
        ids = tokenizer.ids(["a", "new", "text"])
        assert tokenizer.codes()[ids].tolist() == [[4 + salt], [6 + salt], [7 + salt]]
    assert_refused(pretrain.main, [*toy, "--bits", "32"], "--bits requires other settings")
    assert_refused(pretrain.main, [*format_flags, "--emb", "emb", "--salt", "1"],
                   "--salt requires other settings")


class ToySource(Source):
    """Two jobs, of which other processes make the documents."""

    def jobs(self):
        yield "red"
        yield "blue"

    @classmethod
    def documents(cls, job):
        return [f"one {job} fish"] * 3


def test_new_source_is_a_class_and_its_line(monkeypatch, tmp_path):
    monkeypatch.setitem(SOURCES, "toy", ToySource)
    corpus = Corpus(prepare("toy", "regex", str(tmp_path)))
    assert corpus.words == ["one", "fish", "red", "blue"]
    assert corpus.meta["documents"] == 6
    assert_refused(pretrain.main, ["--data", "toy", "--field", "a"], "--field: requires rows")


# Lists of methods


def test_table_of_embeddings_and_help_name_each_member():
    table = embeddings.__doc__.split("to vectors e")[1]
    listed = []
    for names in re.findall(r"^    ([a-z, ]+?)   ", table, re.M):
        listed += names.split(", ")
    assert sorted(listed) == sorted(EMBEDDINGS), "the table in the header of embeddings.py"
    actions = flags.build_parser()._actions + finetune.build_parser()._actions
    help_of = {action.dest: action.help for action in actions}
    # embeddings are listed in the text of a group
    help_of["emb"] = re.sub(r"{.*?}", "", flags.build_parser().format_help(), flags=re.S)
    tasks = [name for name, task in TASKS.items() if not task.is_glue]
    kinds = dict(emb=EMBEDDINGS, hash=HASHES, attn=ATTENTIONS, objective=OBJECTIVES, task=tasks)
    for flag, names in kinds.items():
        for name in names:
            # an embedding stands in a sentence; others in a list, "mlm, sampled: predict ..."
            pattern = rf"\b{name}\b" if flag == "emb" else rf"(?<![\w-]){name}[:,]"
            assert re.search(pattern, help_of[flag]), f"the help of --{flag} lacks {name}"


def read_folder(task, args, split):
    """Read a folder with a .txt of each label, a text a line."""
    rows = []
    for path in sorted(Path(getattr(args, split)).glob("*.txt")):
        for line in path.read_text().splitlines():
            rows.append(((line,), path.stem))
    return rows


class ToyExamples(SequenceClassification):
    """Counts how often it is made."""

    instances = 0

    def __init__(self, *args):
        super().__init__(*args)
        ToyExamples.instances += 1


def test_toy_model_learns_a_task_with_a_reader_and_examples_of_its_own(
        monkeypatch, toy_flags, tmp_path):
    """The line in TASKS is all that finetune.py knows of it: classes are found, dev rows drawn."""
    pretrain.main(toy_flags)
    task = Task(["text"], [], ["accuracy"], read=read_folder, examples_class=ToyExamples,
                flags=("train", "dev"))
    monkeypatch.setitem(TASKS, "folder", task)
    for label, word in (("no", "bad"), ("yes", "good")):
        texts = [f"a {word} thing {number}" for number in range(40)]
        (tmp_path / f"{label}.txt").write_text("\n".join(texts))
    flags = ["--ckpt", tmp_path / "toy", "--task", "folder", "--train", tmp_path,
             "--out", tmp_path / "out"]
    fast = "--epochs 20 --batch 8 --lr 1e-2 --seeds 1 --device cpu --dtype float32 --no-compile"

    done = run_main(finetune.main, *flags, *fast.split())

    assert done.code == 0, done.err
    row = done.result["tasks"]["folder"]
    assert sum(row["rows"].values()) == 80
    assert row["rows"]["dev"] == 8
    assert row["f1_per_label"] == dict(no=100, yes=100)
    assert ToyExamples.instances == 3
    predictor = Predictor(str(tmp_path / "out"))
    assert predictor.classify("a good thing 7")[0][0] == "yes"
    assert_refused(finetune.main, [*flags, "--label", "a"], "--label: expected a task that reads")
