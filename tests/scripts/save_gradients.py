"""Save loss, evaluation and gradients of the first step: save_gradients.py FILE [flags of pretrain.py]."""

import sys

import torch

import pretrain
from objectives import IGNORE_INDEX
from runtime import barrier_before_exit, read_ranks
from settings import parser, resolve


def main(path, *flags):
    run = pretrain.build_run(args := parser("").parse_args(flags), resolve(args, read_ranks()[1]))
    micro_batches = pretrain.get_micro_batches(run, 0)
    scored = torch.stack([(labels != IGNORE_INDEX).sum() for _, labels in micro_batches])
    num_idle = pretrain.sum_over_ranks((scored == 0).sum())
    result = dict(eval_loss=pretrain.evaluate(run)["eval_loss"], num_idle=num_idle)
    run.ddp_model.train()
    num_scored = pretrain.sum_over_ranks(scored.sum().float())
    result["loss"] = pretrain.compute_gradients(run, micro_batches, num_scored)
    if run.rank == 0:
        torch.save(result | {name: p.grad for name, p in run.model.named_parameters()}, path)
    barrier_before_exit()
    run.ddp_model = run.model
    if run.world > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
