"""pretrain.py with another attention: the controls of BERT-LSH.

    python -m bench.attention_controls random --preset bert-lsh --lsh_bands 2
    python -m bench.attention_controls shared --preset bert-lsh --lsh_bands 4

random: random pairs in place of those that collide. Buckets keep their sizes, and stand at random
    positions, anew in every pass.
shared: the queries are the keys, too, so that a vector and its equal share a bucket. The part of
    the projection that makes keys has no use.

The flags after the name are those of pretrain.py.
"""

import sys
from unittest import mock

import torch

import attention
import pretrain
from support import flags


def permute_buckets(h):
    """Return buckets of equal sizes in a random order, unrelated to the vectors."""
    order = torch.rand(h.shape, device=h.device).argsort(-1)
    return h.gather(-1, order)


def use_random_pairs():
    """Return a context in which models permute their hash buckets."""
    simhash = attention.simhash
    return mock.patch.object(attention, "simhash", lambda *args: permute_buckets(simhash(*args)))


def use_shared_keys():
    """Return a context in which all attention has its queries as keys, too."""
    project = attention.SelfAttention.project

    def share(self, x):
        q, _, v = project(self, x)
        return q, q, v

    return mock.patch.object(attention.SelfAttention, "project", share)


CONTROLS = {
    "random": use_random_pairs,
    "shared": use_shared_keys,
}


def main(argv=None):
    """Pre-train as argv says (default: the command line); return the last evaluation."""
    if argv is None:
        argv = sys.argv[1:]
    args = build_parser().parse_args(argv)
    with CONTROLS[args.control]():
        return pretrain.main(argv[1:])


def build_parser():
    """Return the parser of pretrain.py, with the name of a control before its flags."""
    p = flags.build_parser(__doc__)
    p.usage = "python -m bench.attention_controls NAME [flags of pretrain.py]"
    p.add_argument("control", choices=CONTROLS)
    return p


if __name__ == "__main__":
    main()
