"""Pre-train, and save what each rank has in its first step: gradients, seed, scored positions.

    torchrun ... tests/scripts/save_gradients.py PREFIX [flags of pretrain.py]
"""

import os
import sys

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import pretrain
from objectives import IGNORE_INDEX, Objective


def main(prefix, *flags):
    corrupt = Objective.corrupt
    counts = [None]  # of masked words; Shuffle+Random has a corrupt of its own

    def corrupt_and_count(self, *batch):
        inputs, labels = corrupt(self, *batch)
        counts.append(int((labels != IGNORE_INDEX).sum()))
        return inputs, labels

    def save(optimizer, *_):
        gradients = []
        for group in optimizer.param_groups:
            gradients += [parameter.grad for parameter in group["params"]]
        rank = os.environ["RANK"]
        content = dict(gradients=gradients, seed=torch.initial_seed(), num_scored=counts[-1])
        torch.save(content, f"{prefix}{rank}.pt")

    Objective.corrupt = corrupt_and_count
    with register_optimizer_step_pre_hook(save):
        pretrain.main([*flags, "--steps", "1", "--warmup", "0", "--clip", "0"])


if __name__ == "__main__":
    main(*sys.argv[1:])
