"""Shrink a checkpoint to what inference needs, in half precision: a model for models/.

    python -m bench.shrink out/bloom-items models/names.pt
"""

import torch

from support.common import load_checkpoint, make_parser, run_script

NUM_WORDS = 5_000  # infer.py --near searches among them
PARTS = ("format", "config", "model", "tokenizer", "run", "step", "words",
         "kinds", "item_counts")  # texts have no item_counts, and item sets no kinds


def main(argv=None):
    """Shrink the checkpoint that the command line, or the list argv, names."""
    args = build_parser().parse_args(argv)
    run_script("bench.shrink", shrink, args.ckpt, args.out)


def build_parser():
    """Return the parser of the command line."""
    p = make_parser("python -m bench.shrink", __doc__)
    p.add_argument("ckpt", help="folder of a run of pretrain.py, or a checkpoint")
    p.add_argument("out", help="the file to write")
    return p


def shrink(ckpt, out):
    """Write the small copy of a checkpoint."""
    checkpoint = load_checkpoint(ckpt)
    small = {name: checkpoint[name] for name in PARTS if name in checkpoint}
    # the most frequent ones come first
    small["words"] = small["words"][:NUM_WORDS]
    for name, weight in small["model"].items():
        if not name.endswith((".planes", ".coef")):  # rounded, they would change the buckets of LSH
            small["model"][name] = weight.half()
    torch.save(small, out)


if __name__ == "__main__":
    main()
