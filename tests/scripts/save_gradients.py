"""Pre-train, and save what each rank has in its first step: gradients and seed.

    torchrun ... tests/scripts/save_gradients.py PREFIX [flags of pretrain.py]
"""

import os
import sys

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import pretrain


def main(prefix, *flags):
    def save(optimizer, *_):
        gradients = []
        for group in optimizer.param_groups:
            gradients += [parameter.grad for parameter in group["params"]]
        rank = os.environ["RANK"]
        torch.save(dict(gradients=gradients, seed=torch.initial_seed()), f"{prefix}{rank}.pt")

    with register_optimizer_step_pre_hook(save):
        pretrain.main([*flags, "--steps", "1", "--warmup", "0", "--clip", "0"])


if __name__ == "__main__":
    main(*sys.argv[1:])
