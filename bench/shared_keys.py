"""pretrain.py with keys that are the queries, so that a vector and its equal share a bucket.

    python -m bench.shared_keys --preset bert-lsh --lsh_bands 4 --out out/frontier-1024-shared-4-0

The part of the projection that makes keys has no use. The flags are those of
pretrain.py.
"""

from unittest import mock

import attention
import pretrain
from support.flags import build_parser  # noqa: F401, its flags


def use_shared_keys():
    """Return a context in which all attention has its queries as keys, too."""
    project = attention.SelfAttention.project

    def share(self, x):
        q, _, v = project(self, x)
        return q, q, v

    return mock.patch.object(attention.SelfAttention, "project", share)


def main(argv=None):
    """Pre-train as argv says (default: the command line); return the last evaluation."""
    with use_shared_keys():
        return pretrain.main(argv)


if __name__ == "__main__":
    main()
