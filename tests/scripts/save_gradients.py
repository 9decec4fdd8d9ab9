"""Pre-train, and save what each rank has in its first step: gradients, seed, scored positions.

    torchrun ... tests/scripts/save_gradients.py FOLDER [flags of pretrain.py]
"""

import os
import sys

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import pretrain


def main(folder, *flags):
    count_scored = pretrain.count_scored
    counts = []

    def count_and_record(labels):
        counts.append(count_scored(labels))
        return counts[-1]

    def save(optimizer, *_):
        gradients = []
        for group in optimizer.param_groups:
            gradients += [parameter.grad for parameter in group["params"]]
        rank = os.environ.get("RANK", "0")
        content = dict(gradients=gradients, seed=torch.initial_seed(), num_scored=counts[-1])
        torch.save(content, os.path.join(folder, f"rank-{rank}.pt"))

    pretrain.count_scored = count_and_record
    with register_optimizer_step_pre_hook(save):
        pretrain.main([*flags, "--steps", "1", "--warmup", "0", "--clip", "0"])


if __name__ == "__main__":
    main(*sys.argv[1:])
