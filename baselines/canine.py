"""CANINE-C: an encoder of characters, each hashed to a row in each of eight tables. No vocabulary.

    python -m baselines.canine --task sst2                          from fresh weights
    python -m baselines.canine --task sst2 --weights canine-c/      from the released ones
    python -m baselines.canine --task sst2 --preset canine-tiny     a small one

Sources:
    [CA] Clark et al. 2021, CANINE
    [HF] Xue & Aletras 2022, HashFormers: CANINE-C is one of their baselines
Out of scope: pre-training, CANINE-S, n-grams of characters, a vector for each character (which
    pre-training and tagging read), answers in a context (--task squad), texts of a user (infer.py),
    several GPUs, resuming.
Deviations:
    1. Matrices start with std 0.02 · √(768/d) as in model.py, but untruncated. Positions start with
       std 0.02, not with model.py's sinusoids.
    2. forward pads to full windows, so that its outputs do not depend on the batch.
Notation:
    B batch   L characters   W windows of 4 characters, L/4   d hidden size
    k hash functions   N rows of a hash table

    characters -> hash rows -> local layer -> strided convolution -> deep layers -> head
    (B, L)        (B, L, k)    (B, L, d)      (B, W, d)              (B, W, d)      (B, labels)
"""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from data.classification import SequenceClassification
from data.tasks import TASKS, read_task
from finetune import choose_recipe, train_and_score
from model import Config, TransformerLayer
from support.common import InputError, fingerprint, make_parser, reading, resolve_device, run_script
from support.common import write_json
from support.finetune_flags import add_run_flags, check_flags, fill_flags
from support.jobs import check_out, list_seeds
from support.pretrained import encode_splits
from support.results import RESULTS_FORMAT, Result, summarize, write_results
from tokenizer import FIRST_WORD_ID, SEP

PRIMES = (31, 43, 59, 61, 73, 97, 103, 113)  # one for each of the k hash functions
RATE = 4  # characters of a window: width and stride of the convolution
BLOCK = 128  # characters of a block of local attention
NORM_EPS = 1e-12  # in all layer norms, as released
# Code points of [PAD] [CLS] [SEP] [UNK] [MASK], by token ID. CANINE has no [UNK]: 0xE004, which it
# reserves, stands in.
SPECIAL_POINTS = (0, 0xE000, 0xE001, 0xE004, 0xE003)


@dataclass
class CanineConfig:
    """Everything that shapes the weights, in plain types, at the size of the paper. [HF §4.1]"""
    layers: int = 12  # deep layers; the local layer and the last one come on top
    width: int = 768  # d
    heads: int = 12
    ffn: int = 3072
    rows: int = 16_384  # N
    length: int = 2_048  # characters of a text, special tokens included
    positions: int = 16_384  # rows of the position table
    types: int = 16  # rows of the token type table; texts use two
    dropout: float = 0.1
    labels: int = 2


SHAPES = {  # --preset; the tiny one is ours
    "canine": CanineConfig(),
    "canine-tiny": CanineConfig(layers=2, width=128, heads=4, ffn=512, length=512, positions=1_024,
                                dropout=0.0),
}


class Canine(nn.Module):
    """Classify texts by their characters.

    Args:
        config: CanineConfig.

    Shape:
        ids: int64 (B, L), token IDs of CharacterTokenizer: code points + 5, and 0 as padding.
        output: float (B, labels), logits.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        d = config.width
        self.dropout = nn.Dropout(config.dropout)

        # the order of these lines decides which random numbers a weight gets
        k = len(PRIMES)
        self.embedding = nn.Embedding(k * config.rows, d // k)  # table after table
        self.positions = nn.Embedding(config.positions, d)
        self.types = nn.Embedding(config.types, d)
        self.norm = nn.LayerNorm(d)
        self.down_norm = nn.LayerNorm(d)
        self.up_norm = nn.LayerNorm(d)  # up_norm, up and final: not used, but released and counted
        self.down = nn.Conv1d(d, d, kernel_size=RATE, stride=RATE)
        self.up = nn.Conv1d(2 * d, d, kernel_size=RATE)
        sizes = Config(
            width=d, heads=config.heads, ffn=config.ffn, dropout=config.dropout)
        self.local = TransformerLayer(sizes, 0)  # 0: layer number, which LSH attention alone reads
        self.final = TransformerLayer(sizes, 0)
        self.layers = nn.ModuleList([TransformerLayer(sizes, 0) for _ in range(config.layers)])
        self.pooler = nn.Linear(d, d)
        self.head = nn.Sequential(nn.Dropout(config.dropout), nn.Linear(d, config.labels))

        self.apply(self.init_weights)

    def init_weights(self, module):
        """Draw the first weights of a module, and set the released eps of a layer norm."""
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, (nn.Linear, nn.Conv1d)):
            nn.init.normal_(module.weight, std=0.02 * (768 / self.config.width) ** 0.5)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            module.eps = NORM_EPS

    def forward(self, ids, key_mask=None):  # the mask follows from ids
        windows = self.encode(*pad_inputs(ids))
        pooled = self.pooler(windows[:, 0]).tanh()  # (B, d), of [CLS]
        return self.head(pooled)

    def encode(self, ids, types, key_mask):
        """Read a text: characters in local blocks, then windows over the whole text. [CA §3.1]

        Args:
            ids: int64 (B, L), token IDs, L at least 4.
            types: int64 (B, L), token types: 0, and 1 for the second text of a pair.
            key_mask: bool (B, L), True = attend.

        Returns:
            float (B, W, d), the vectors of windows.
        """
        L = ids.shape[1]
        x = self.embed(ids) + self.types(types) + self.positions.weight[:L]  # (B, L, d)
        x = self.dropout(self.norm(x))
        x = self.attend_locally(x, key_mask)
        windows = self.downsample(x)  # (B, W, d)

        # subtle: downsample moved the windows one place to the right, behind [CLS], but the mask
        # stays as it was, as in the released model. So the last window of the text is masked, and
        # its characters count only through local attention. Windows 1 to 4 of text, 5 and 6 of
        # padding:
        #     vector of    [CLS]  1  2  3  4  5     6 is left out
        #     mask of          1  2  3  4  5  6
        #     attended         1  1  1  1  0  0
        W = windows.shape[1]
        window_mask = key_mask[:, :RATE * W].unflatten(1, (W, RATE)).any(-1)  # (B, W)
        for layer in self.layers:
            windows = layer(windows, window_mask)
        return windows

    def embed(self, ids):
        """Return (B, L, d) of ids (B, L): d/k numbers from each of the k tables. [CA §3.1]"""
        N = self.config.rows
        rows = hash_rows(code_points(ids), N)  # (B, L, k)
        starts = N * torch.arange(len(PRIMES), device=ids.device)  # (k,), of the tables
        return self.embedding(rows + starts).flatten(-2)  # (B, L, k, d/k) -> (B, L, d)

    def attend_locally(self, x, key_mask):
        """Return (B, L, d) of x (B, L, d): characters attend within blocks of 128. [CA §3.1]"""
        B, L, d = x.shape
        block = min(L, BLOCK)  # a shorter text is one block
        padding = -L % block
        x = F.pad(x, (0, 0, 0, padding))
        key_mask = F.pad(key_mask, (0, padding))
        # Blocks become rows of a batch, so that none sees another.
        blocks = x.reshape(-1, block, d)
        blocks = self.local(blocks, key_mask.reshape(-1, block))
        return blocks.reshape(B, -1, d)[:, :L]

    def downsample(self, x):
        """Return (B, W, d) of x (B, L, d): the first character, all windows but the last. [CA §3.1]

            [CLS] t h e   · c a t   [SEP] 0 0 0   ->   [CLS]   [CLS]the   ·cat
        """
        windows = self.down(x.transpose(1, 2))  # (B, d, W)
        windows = F.gelu(windows).transpose(1, 2)  # (B, W, d)
        windows = torch.cat([x[:, :1], windows[:, :-1]], dim=1)
        return self.down_norm(windows)


def hash_rows(points, num_rows):
    """Return (point + 1) · prime mod N, int64 (..., k): rows of code points (...) in each table."""
    primes = torch.tensor(PRIMES, device=points.device)  # (k,)
    return (points.unsqueeze(-1) + 1) * primes % num_rows


def code_points(ids):
    """Return the code points of token IDs, both int64 (...)."""
    special_points = torch.tensor(SPECIAL_POINTS, device=ids.device)
    special = special_points[ids.clamp(max=FIRST_WORD_ID - 1)]
    return torch.where(ids < FIRST_WORD_ID, special, ids - FIRST_WORD_ID)


def pad_inputs(ids):
    """Return token IDs, token types and attention mask, padded to full windows."""
    ids = F.pad(ids, (0, -ids.shape[1] % RATE))
    key_mask = ids != 0  # True = attend
    is_sep = (ids == SEP).long()
    seps_before = is_sep.cumsum(1) - is_sep
    types = seps_before.clamp(max=1) * key_mask  # 1 after the first [SEP], 0 in padding
    return ids, types, key_mask


class CharacterTokenizer:
    """Map texts to token IDs of characters. It has what SequenceClassification calls.

    Example:
        CharacterTokenizer().ids("No")  # 78 + 5, 111 + 5
    """
    separator = (SEP,)  # between the texts of a pair

    def ids(self, text):
        """Return int32 (n,), code points + 5."""
        data = text.encode("utf-32-le", "surrogatepass")  # four bytes a character
        return np.frombuffer(data, "<i4") + FIRST_WORD_ID

    def ids_of_texts(self, texts):
        """Return a list of int32 (characters,), one for each text."""
        return [self.ids(text) for text in texts]


# The released checkpoint

def load_released(folder, config):
    """Read a released CANINE-C, as Hugging Face Transformers saves it.

    Args:
        folder: str, with pytorch_model.bin or model.safetensors.
        config: CanineConfig, with the sizes of the release.

    Returns:
        dict of weights by our names, float32, without those of a head.

    Raises:
        FileNotFoundError: a file is missing.
        InputError: a file is damaged, or of another model.
    """
    with reading(folder):
        path = Path(folder, "model.safetensors")
        if path.exists():
            from safetensors.torch import load_file  # a package that only this format needs
            content = load_file(path)
        else:
            path = Path(folder, "pytorch_model.bin")
            content = dict(torch.load(path, map_location="cpu", weights_only=True))
    released = {name.removeprefix("canine."): weight for name, weight in content.items()}
    released.pop("char_embeddings.position_ids", None)  # 0, 1, 2, ...: of older versions
    weights = {}
    for ours, theirs in released_names(config).items():
        for name in theirs:
            if name not in released:
                raise InputError(f"{folder}: expected the weights of CANINE-C, got no {name}.")
        parts = [released.pop(name).float() for name in theirs]
        with reading(folder):  # raises where sizes differ
            weights[ours] = torch.cat(parts)
    if released:
        raise InputError(f"{folder}: expected the weights of CANINE-C alone, got "
                         f"{list(released)[:3]} too.")
    return weights


def released_names(config):
    """Return dict, our name of each weight but the head's -> list of the released names.

    A weight of ours joins the weights with these names.
    """
    tables = "char_embeddings.HashBucketCodepointEmbedder"
    names = {
        "embedding.weight": [f"{tables}_{i}.weight" for i in range(len(PRIMES))],
        "positions.weight": ["char_embeddings.char_position_embeddings.weight"],
        "types.weight": ["char_embeddings.token_type_embeddings.weight"],
    }

    modules = {  # each has a weight and a bias
        "norm": ["char_embeddings.LayerNorm"],
        "down": ["chars_to_molecules.conv"],
        "down_norm": ["chars_to_molecules.LayerNorm"],
        "up": ["projection.conv"],
        "up_norm": ["projection.LayerNorm"],
        "pooler": ["pooler.dense"],
    }
    layers = {
        "local": "initial_char_encoder.layer.0",
        "final": "final_char_encoder.layer.0",
    }
    for i in range(config.layers):
        layers[f"layers.{i}"] = f"encoder.layer.{i}"
    for ours, theirs in layers.items():
        parts = ("query", "key", "value")
        modules[f"{ours}.attention.qkv"] = [f"{theirs}.attention.self.{part}" for part in parts]
        modules[f"{ours}.attention.out"] = [f"{theirs}.attention.output.dense"]
        modules[f"{ours}.norm1"] = [f"{theirs}.attention.output.LayerNorm"]
        modules[f"{ours}.up"] = [f"{theirs}.intermediate.dense"]
        modules[f"{ours}.down"] = [f"{theirs}.output.dense"]
        modules[f"{ours}.norm2"] = [f"{theirs}.output.LayerNorm"]

    for ours, theirs in modules.items():
        for kind in ("weight", "bias"):
            names[f"{ours}.{kind}"] = [f"{module}.{kind}" for module in theirs]
    return names


# The script


def build_parser():
    """Return the parser of all flags: those of finetune.py, except --ckpt and --from_scratch."""
    p = make_parser("python -m baselines.canine", __doc__)
    p.add_argument("--preset", choices=tuple(SHAPES), default="canine",
                   help="size of the model (default: canine, that of the release)")
    p.add_argument("--weights", help="folder of the released CANINE-C (default: fresh weights)")
    tasks = [name for name, task in TASKS.items() if task.examples_class is SequenceClassification]
    add_run_flags(p.add_argument, tasks)
    p.set_defaults(device="auto", dtype="auto", ckpt=None, from_scratch=False, pool="cls",
                   compile=False)
    return p


def finetune_canine(args):
    """Fine-tune on one task with each seed, then write and print the means, as finetune.py does."""
    check_flags(args)
    if args.pool != "cls" or args.epochs == 0 or args.compile:
        raise InputError("--pool, --epochs, --compile: expected cls, one epoch or more, and no "
                         "--compile.")
    config = SHAPES[args.preset]
    weights = {}
    if args.weights:
        weights = load_released(args.weights, config)
        if args.out is None:  # not that of fresh weights
            args.out = f"out/{Path(args.weights).absolute().name}-{args.task}"
    args = fill_flags(args, config.width)
    runtime = resolve_device(args)

    # texts
    task, rows = read_task(args.task, args)
    settings = dict(vars(args), texts=fingerprint(rows), format=RESULTS_FORMAT)
    check_out(args.out, settings)
    data = encode_splits(task, rows, CharacterTokenizer(), config.length)

    # training
    results = []
    for seed in list_seeds(args):
        torch.manual_seed(seed)  # for fresh weights and dropout
        model = Canine(dataclasses.replace(config, labels=data["train"].num_outputs))
        with reading(args.weights):  # raises where sizes differ
            model.load_state_dict(model.state_dict() | weights)  # released weights have no head
        model.to(runtime.device)
        recipe = choose_recipe(args, data, seed, runtime.dtype)
        outcome = train_and_score(model, data, recipe)
        results.append(Result.collect(data, seed, model, outcome))

    # results
    os.makedirs(args.out, exist_ok=True)
    write_json(Path(args.out, "settings.json"), settings)
    return write_results(args.out, {args.task: summarize(results)}, settings)


def main(argv=None):
    """Fine-tune as the command line, or the list argv, says; return the content of results.json."""
    return run_script("canine.py", finetune_canine, build_parser().parse_args(argv))


if __name__ == "__main__":
    main()
