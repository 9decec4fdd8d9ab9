"""pretrain.py with random pairs in place of those that collide, the control of LSH attention.

    python -m bench.random_pairs --preset bert-lsh --lsh_bands 2 --out out/scores-random-0

Hash buckets keep their sizes and stand at random positions, anew in every pass. The flags are those
of pretrain.py.
"""

import pretrain
from bench.attention import use_random_buckets
from support.flags import build_parser  # noqa: F401, its flags


def main(argv=None):
    """Pre-train as argv says (default: the command line); return the last evaluation."""
    with use_random_buckets():
        return pretrain.main(argv)


if __name__ == "__main__":
    main()
