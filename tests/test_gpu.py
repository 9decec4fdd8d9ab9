"""The scripts with --device cuda, where no GPU is: pretend_gpu.py acts as one.

An operation on a tensor that was left on the CPU fails these tests, as it fails on a GPU.
"""

import json

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import attention_fast
import finetune
import infer
import pretrain
from baselines.canine import Canine, CanineConfig
from embeddings import EMBEDDINGS
from model import Config
from objectives import OBJECTIVES
from support.log import measure_gpu
from tests.pretend_gpu import pretend_gpu
from tests.helpers import choose_emb

SETS = "--preset superbloom-small --heads 2 --length 7 --alpha 5"
TEXT_OF = {"proj": "a text", "lookup": "a [MASK] text", "median": "a [MASK] text"}
PROJ = "--emb proj --hash lsh"
LSH = f"{PROJ} --attn lsh --lsh_bands 2"
BLOCKS = f"{LSH} --length 520"  # above 512 positions LSH attention goes bucket by bucket


# The device that acts as a GPU


def test_pretend_gpu_with_a_cpu_tensor_raises():
    with pretend_gpu():
        x = torch.ones(3, device="cuda")
        with pytest.raises(RuntimeError, match=r"add: .* \[\[3\]\] on the CPU"):
            x + torch.ones(3)
        with pytest.raises(RuntimeError, match="__getitem__"):
            torch.ones(3)[x.long()]
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()


@pytest.mark.parametrize("use, num_waits", [
    (lambda x: x.sum().item(), 1),  # reads a result
    (lambda x: x[x > 0], 1),  # has a shape that depends on data
    (lambda x: x.masked_fill(x > 0, 0), 0),
    (lambda x: x[torch.tensor([0])], 1),  # sends the index
    (lambda x: torch.zeros(9).to(x), 1),
    (lambda x: torch.zeros(9).to(x.device, non_blocking=True), 0),
])
def test_pretend_gpu_counts_waits(use, num_waits):
    with pretend_gpu() as waits:
        use(torch.ones(3, device="cuda"))
    assert waits.total() == num_waits
    assert all(place.startswith("tests/test_gpu.py:") for place in waits)


# The scripts


@pytest.fixture(autouse=True)
def no_flex(monkeypatch):
    """FlexAttention has no backward pass on the CPU that acts as a GPU, so LSH attention goes
    bucket by bucket. What it waits for on a GPU is not tested here."""
    monkeypatch.setattr(attention_fast, "has_flex", lambda: False)


@pytest.fixture
def pretrain_on_gpu(small, tmp_path):
    """A function that trains for 12 steps; it returns the folder, and the waits of six of them."""
    def run(flags):
        waits_before = []

        def count(*_):
            waits_before.append(waits.copy())

        data = "sets" if flags == SETS else "text"
        once = "--device cuda --workers 0 --steps 12 --eval_every 99 --save_every 99".split()
        with pretend_gpu() as waits, register_optimizer_step_pre_hook(count):
            pretrain.main(small(*flags.split(), *once, data=data))
        return tmp_path / "run", waits_before[11] - waits_before[5]
    return run


def infer_on_gpu(folder, *texts):
    with pretend_gpu():
        infer.main(["--ckpt", str(folder), "--device", "cuda", *texts])


@pytest.mark.parametrize("flags, text, max_waits", [
    # every tenth step reads loss and norm, no other waits
    *[(f"--objective {name} --emb {choose_emb(name)}", TEXT_OF[choose_emb(name)], 1)
      for name in OBJECTIVES],
    (SETS, "Miles Davis\t[MASK]", 1),  # predicts hashes of items
    (f"{LSH} --lsh_fill mask --lsh_pairs upper --lsh_redraw", "a text", 3),  # sends hyperplanes
    (f"{BLOCKS} --layers 2", "a text", 6),  # each layer reads the number and the sizes of buckets
])
def test_pretraining_and_inference_stay_on_the_gpu_and_seldom_wait(
        flags, text, max_waits, pretrain_on_gpu):
    folder, waits = pretrain_on_gpu(flags)
    infer_on_gpu(folder, text)
    assert waits.total() <= 6 * max_waits, waits.most_common(9)
    assert not any("nonzero" in place for place in waits)


def test_vectors_come_from_the_gpu(sr_run, tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("a text\n")
    infer_on_gpu(sr_run, "--file", str(path), "--vectors", str(tmp_path / "vectors.npy"))
    infer_on_gpu(sr_run, "--near", "word")


@pytest.fixture
def finetune_on_gpu(sr_run, tmp_path):
    """A function that fine-tunes a small model on a file; it returns the folder of the run."""
    def run(path, *flags):
        out = tmp_path / "fine-tuned"
        files = ["--ckpt", sr_run, "--train", path, "--dev", path, "--out", out]
        fast = "--epochs 1 --seeds 1 --device cuda --dtype float32 --no-compile".split()
        with pretend_gpu():
            finetune.main([*map(str, files), *flags, *fast])
        return out
    return run


def test_regression_stays_on_the_gpu(finetune_on_gpu, tmp_path):
    """test_finetune.py has classes."""
    path = tmp_path / "texts.csv"
    path.write_text("text,label\n" + "a good text,1\na bad one,0\n" * 20)
    folder = finetune_on_gpu(path, "--text", "text", "--label", "label", "--regression")
    infer_on_gpu(folder, "a good text")


def test_answers_stay_on_the_gpu(finetune_on_gpu, tmp_path):
    context = "It is said of Ada."
    answers = dict(text=["Ada"], answer_start=[context.index("Ada")])
    question = dict(id="1", question="Who?", context=context, answers=answers)
    path = tmp_path / "questions.json"
    path.write_text(json.dumps(dict(data=[question] * 2)))
    folder = finetune_on_gpu(path, "--task", "squad")
    infer_on_gpu(folder, "Who?", context)


def test_canine_stays_on_the_gpu():
    model = Canine(CanineConfig(layers=1, width=16, heads=2, ffn=16, rows=31))
    with pretend_gpu():
        model.to("cuda")
        ids = torch.randint(5, 99, (2, 300), device="cuda")
        model(ids, ids > 9).sum().backward()


@pytest.mark.parametrize("emb", EMBEDDINGS)
def test_embedding_stays_on_the_gpu(emb):
    config = Config(emb=emb, width=12, heads=3, rows=31, bits=16, chunk=5, buckets=7, weights=11)
    embedding = EMBEDDINGS[emb].from_config(config)
    codes = torch.zeros(2, 9, len(embedding.code_limits), dtype=torch.int64)
    with pretend_gpu():
        embedding.to("cuda")(codes.to("cuda")).sum().backward()


@pytest.mark.parametrize("flags, attention", [("", 12 * 17 * 32), ("--attn lsh", 0)])
def test_log_has_the_operations_of_the_layers(flags, attention, pretrain_on_gpu):
    """By hand: a layer of width 32 with a feed-forward part of 128, and 17 positions."""
    folder, _ = pretrain_on_gpu(f"{PROJ} {flags}")
    row = json.loads((folder / "log.jsonl").read_text().splitlines()[0])
    weights = 32 * 96 + 32 * 32 + 2 * 32 * 128
    tflops = row["words_per_s"] * (6 * weights + attention) / 1e12
    assert row["tflops"] == pytest.approx(tflops, rel=1e-4)
    assert row["peak_gib"] >= 0


def test_mfu_is_a_share_of_a_known_peak():
    with pretend_gpu():  # of 989 TFLOP/s in bfloat16
        assert measure_gpu(98.9e12, "bfloat16")["mfu"] == pytest.approx(0.1)
        assert "mfu" not in measure_gpu(98.9e12, "float32")
