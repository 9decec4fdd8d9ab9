"""An error of the program itself keeps its traceback, where files of a user are read too."""

import argparse
import json
from types import SimpleNamespace

import pytest
import torch

import data.coders
import data.codes
import data.corpus
import data.squad
import infer
import tokenizer
from baselines import canine
from data.corpus import Corpus, prepare
from data.splitters import BPE, Words
from data.tasks import read_task
from infer import Predictor
from model import Config, Model
from support import pretrained
from support.common import load_checkpoint
from support.flags import inherit_settings
from tests.helpers import ROOT
from tests.test_tasks import flags

CHECKPOINT = str(ROOT / "models/english-detect.pt")
QUESTION = dict(question="Which?", answers=[dict(text="b", answer_start=2)])


def read_corpus(tmp_path):
    path = tmp_path / "a.txt"
    if not path.exists():  # else the corpus would be built again
        path.write_text("the cat sat\n" * 20)
    return Corpus(prepare(str(path), "bpe", str(tmp_path), 260))


def read_squad(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([dict(paragraphs=[dict(context="a b", qas=[QUESTION])])]))
    return read_task("squad_v2", flags(train=str(path), dev=str(path)))


def load_released(tmp_path):
    torch.save({}, tmp_path / "pytorch_model.bin")
    canine.load_released(str(tmp_path), canine.CanineConfig())


def inherit(tmp_path):
    inherit_settings(load_checkpoint(CHECKPOINT), dict(init_from=CHECKPOINT))


def load_tokenizer(tmp_path):
    checkpoint = load_checkpoint(CHECKPOINT)
    config = Config(**checkpoint["config"])
    data.codes.load_tokenizer(checkpoint["tokenizer"], config, SimpleNamespace(splitter=Words()))


def load_pretrained(tmp_path):
    pretrained.load_pretrained(argparse.Namespace(preset=None, ckpt=CHECKPOINT, from_scratch=False))


def build_tokenizer(tmp_path):
    checkpoint = load_checkpoint(CHECKPOINT)
    config = Config(**checkpoint["config"])
    start = pretrained.Pretrained(config, tokenizer=checkpoint["tokenizer"])
    pretrained.build_tokenizer(start, [])


def predict(tmp_path):
    Predictor(CHECKPOINT)


class Bug(AttributeError, KeyError, TypeError):
    """An error of each kind that reading a damaged file may raise."""


@pytest.mark.parametrize("read, owner, name", [
    (read_corpus, BPE, "__init__"),
    (read_squad, data.squad, "list_objects"),
    (load_released, canine, "released_names"),
    (inherit, Config, "__post_init__"),
    (load_tokenizer, tokenizer, "load_splitter"),
    (load_pretrained, Model, "__init__"),
    (build_tokenizer, tokenizer, "load_splitter"),
    (predict, Model, "__init__"),
    (predict, data.coders, "load_hash"),
    (predict, infer, "choose_candidates"),
])
def test_error_of_our_own_code_is_no_fault_of_a_file(
        read, owner, name, tmp_path, monkeypatch):
    def fail(*args, **options):
        raise Bug

    if read is read_corpus:
        read_corpus(tmp_path)  # built before the bug
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(Bug):
        read(tmp_path)
