"""Pre-train on several ranks, and send a signal to rank 1 in its n-th step, unless restarted.

    torchrun ... tests/scripts/end_rank.py SIGKILL 31 [flags of pretrain.py]
"""

import os
import signal
import sys

from torch.optim.optimizer import register_optimizer_step_pre_hook

import pretrain


def main(name, number, *flags):
    steps = []

    def end(*_):
        steps.append(1)
        if len(steps) == int(number):
            os.kill(os.getpid(), getattr(signal, name))

    if os.environ["RANK"] == "1" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        register_optimizer_step_pre_hook(end)
    pretrain.main(flags)


if __name__ == "__main__":
    main(*sys.argv[1:])
