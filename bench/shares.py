"""How much of a query's attention weight the keys of its hash bucket have, by law and measured.

In the paper a pair that does not collide keeps the score 0, so all keys outside the bucket share a
plain mean of their values (attention.py). `shares` measures what is left for the keys inside: for
random vectors beside the law, and for the queries and keys of a trained model's layers.

    python -m bench.shares shares --text valid.txt --runs models/english-detect.pt
"""

import math
from pathlib import Path

import torch

import attention
from bench import harness
from bench.attention import hash_both
from bench.harness import REQUIRED, RUNS
from model import LAYER_STRIDE
from support.common import InputError

NUM_BUCKETS = 256
HEAD_SIZE = 64
DRAWS = 6  # of vectors and hyperplanes

SHARES = """
    queries and keys                   | name   | s
    hyperplanes                        | r      | d
    positions                          | L      | ,
    weight inside the bucket %         | inside | .1f ±
    law %                              | law    | .1f
    queries without a key inside %     | empty  | .1f ±
    law %                              | alone  | .1f
    draws of hyperplanes               | seeds  | d
"""


def bench_shares(args, *, hyperplanes=(1, 2, 4, 8), lengths=(128, 512, 1024), num_windows=16):
    """Measure the weight inside a query's bucket: random vectors, and layers of trained models."""
    for L in lengths:
        for r in hyperplanes:
            measured = []
            for draw in range(DRAWS):
                generator = torch.Generator().manual_seed(draw)
                q, k = torch.randn(2, 1, 8, L, HEAD_SIZE, generator=generator)
                measured.append(measure(q, k, r, generator))
            yield make_row(f"random vectors, r {r}, L {L}", r, L, HEAD_SIZE, measured)

    for run in args.runs:
        model, tokenizer, _ = harness.load_run(run)
        L = model.config.length
        ids = read_windows(args.text, tokenizer, num_windows, L)
        for number, (q, k) in enumerate(harness.walk_layers(model, tokenizer, ids), 1):
            for r in hyperplanes:
                measured = []
                for draw in range(DRAWS):
                    generator = torch.Generator().manual_seed(draw * LAYER_STRIDE + number)
                    measured.append(measure(q, k, r, generator))
                name = f"{Path(run).stem}, layer {number}, r {r}"
                yield make_row(name, r, L, q.shape[-1], measured)


def measure(q, k, r, generator):
    """Measure one draw of hyperplanes.

    Args:
        q, k: float (B, H, L, e).
        r: int, hyperplanes of a hash function.
        generator: torch.Generator, of the hyperplanes.

    Returns:
        dict of float, means over queries in percent: inside, the weight of the keys in the bucket;
        empty, the queries without one.
    """
    _, H, _, e = q.shape
    draw = attention.draw_hyperplanes(H, 1, r, e, NUM_BUCKETS, generator)
    hq, hk = hash_both(q, k, draw, NUM_BUCKETS)
    inside = 1 - outside_share(q, k, hq, hk)  # (B, H, L)
    is_empty = ~attention.collisions(hq, hk).any(-1)
    return dict(
        inside=100 * inside.mean().item(),
        empty=100 * is_empty.float().mean().item(),
    )


def make_row(name, r, L, head_size, measured):
    """Return a row of the table, beside the laws of independent vectors of normal numbers."""
    law = 100 * (1 - outside_share_law(head_size, r, NUM_BUCKETS))
    # a query collides with none of L keys at right angles
    P = attention.collision_probability(torch.pi / 2, r, NUM_BUCKETS)
    alone = 100 * (1 - P) ** L
    row = dict(name=name, r=r, L=L, law=law, alone=alone, seeds=len(measured), e=head_size)
    return row | harness.summarize(measured)


def outside_share(q, k, hq, hk):
    """Return the share of each query's weight that keys outside have, (B, H, L), if fill="zero".

    With c keys outside it is c / (c + Σ exp(score)), the sum over the keys inside. Random vectors
    collide with a probability P of about 1 / 2^r. So c and the sum both grow with L, and the share
    hardly depends on it. It is smaller where queries and keys are similar. For random vectors, e 64
    and 256 buckets:

        r hyperplanes                                            1       2       4       8
        share of the keys outside                               36 %    60 %    86 %    98 %
        queries without a key inside, (1 - P)^L, for L = 128     0 %     0 %     0 %    37 %
    """
    e = q.shape[-1]
    is_outside = ~attention.collisions(hq, hk)  # (B, H, L, L)
    scores = q @ k.transpose(-2, -1) / math.sqrt(e)
    weights = scores.masked_fill(is_outside, 0.0).softmax(-1)
    return (weights * is_outside).sum(-1)


def outside_share_law(head_size, num_hyperplanes, num_buckets):
    """Return about what outside_share is for independent vectors with standard normal entries.

    Their scores s are about normal(0, 1), and the angle of a pair is about acos(s / √e), so it
    collides with the probability P(s) of collision_probability. With means E over s, the share is

        E[1 - P] / (E[1 - P] + E[P exp(s)])
    """
    s = torch.linspace(-6, 6, 1001)
    density = torch.exp(-s.square() / 2)
    cosine = s / math.sqrt(head_size)
    angle = cosine.clamp(-1, 1).acos()
    P = attention.collision_probability(angle, num_hyperplanes, num_buckets)
    outside = (density * (1 - P)).sum()
    inside = (density * P * s.exp()).sum()
    return (outside / (outside + inside)).item()


def read_windows(path, tokenizer, count, L):
    """Return token IDs int64 (count, L) of a text, without padding."""
    words, _ = tokenizer.split(Path(path).read_text(encoding="utf-8"))
    if len(words) < count * L:
        raise InputError(f"--text: expected {count * L:,} words at least, got {len(words):,}.")
    return torch.from_numpy(tokenizer.ids(words[:count * L])).long().view(count, L)


TABLES = {  # name -> function that yields the rows, columns, flags and their defaults
    "shares": (bench_shares, SHARES, RUNS | dict(text=REQUIRED)),
}


if __name__ == "__main__":
    harness.main("bench.shares", TABLES, __doc__)
