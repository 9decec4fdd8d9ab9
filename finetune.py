"""Fine-tune a pre-trained model on a task, with several seeds and a control.

    python finetune.py --ckpt out/proj-lsh --task pydoc         offline: the module of a docstring
    python finetune.py --ckpt out/proj-lsh --task sst2          a task of GLUE, from the hub
    python finetune.py --ckpt out/proj-lsh --task squad         the words that answer a question
    python finetune.py --ckpt out/proj-lsh --train train.csv --dev dev.csv --text body --label topic
    torchrun --nproc_per_node=8 finetune.py --ckpt out/proj-lsh --task glue     eight tasks

A job is one task with one seed. It trains the model, and a bag of words as the control, and scores
both on the dev rows. It writes TASK-seed-N.json to --out: scores, predictions and losses. The same
command skips finished jobs; more seeds need a new --out. At the end --out has the means over the
seeds, results.json, and the model of the best seed, ckpt.pt, for infer.py.

Sources: [HF] Xue & Aletras 2022, HashFormers
Deviations:
    1. A tenth of the training rows, the selection rows, chooses the weights that are scored: those
       of the best evaluation (--select); the eval_loss decides between equal scores. Dev rows
       choose nothing.
    2. About two evaluations per epoch (--eval_every). [HF Table 5]: five, and three for small tasks
    3. Gradients are clipped at norm 1, and the cosine restarts after each fifth of the steps that
       follow the warm-up. The paper gives no norm, and does not say how often the cosine restarts.
    4. Models of width below 512 have their own lr and pool (docs/finetuning.md).
Notation:
    data             dict, split -> Examples of data/classification.py: a task's rows as token IDs
    data["train"]    the rows that train
    data["select"]   those that choose the weights; none with --select 0
    data["dev"]      those that are scored
Order: a job, from its model to its scores; its control; all jobs of a run
"""

import copy
import dataclasses
import gc
import math
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn

from data.batches import length_batches, pad_batch
from data.tasks import TASKS, list_tasks, read_task
from model import STEP_STRIDE, Model
from support.common import InputError, Ranks, autocast, fingerprint, lock_output, make_parser
from support.common import resolve_device, run_script, save_checkpoint, send, write_json
from support.finetune_flags import add_run_flags, check_flags, fill_flags
from support.jobs import check_out, collect_results, job_path, share_jobs
from support.pretrained import choose_head, encode_rows, load_pretrained, print_rows
from support.results import RESULTS_FORMAT, Outcome, Result
from support.run import NEAR_WORDS

WARMUP = 0.06  # share of the steps [HF Table 5]
CYCLES = 5  # cosines after the warm-up; each restarts at the peak
BAG_LR = 0.1  # for the bag of words: the best of 0.03, 0.1 and 0.3 on MRPC, CoLA and STS-B
BAG_STEPS = 300  # at least: fewer leave it half trained on a small file. GLUE's tasks have more
EVAL_POSITIONS = 32_768  # positions in a batch of an evaluation


# --------------------------------------------------------------------------------------------------
# A job: a task and a seed


def run_job(args, runtime, pretrained, data, seed):
    """Train, score and save a model, train and score its control; return the Result.

    Args:
        args: Namespace, the flags.
        runtime: support.common.Runtime, the device and the dtype.
        pretrained: support.pretrained.Pretrained, what the model starts from.
        data: dict, split -> Examples.
        seed: int, decides fresh weights, dropout and the order of the examples.
    """
    train_data = data["train"]
    redraw = pretrained.config.lsh_redraw
    recipe = choose_recipe(args, data, seed, runtime.dtype, redraw=redraw)
    model = build_model(args, runtime, pretrained, train_data, seed)
    outcome = train_and_score(model, data, recipe)
    save_model(args, pretrained, train_data, model, outcome, seed)
    control = None
    if args.epochs > 0 and train_data.has_control:
        control = run_control(len(model.codes), data, recipe, runtime.device)
    return Result.collect(data, seed, model, outcome, control)


def build_model(args, runtime, pretrained, train_data, seed):
    """Return a Model for a task; weights that pretrained lacks, such as a new head, are fresh."""
    torch.manual_seed(seed)  # for fresh weights and dropout
    config = dataclasses.replace(pretrained.config, head=train_data.head,
                                 labels=train_data.num_outputs, pool=args.pool)
    model = Model(config)
    model.load_state_dict(model.state_dict() | pretrained.weights)
    model.to(runtime.device)
    model.set_codes(train_data.tokenizer.codes())  # after .to, which does not move codes
    if runtime.use_compile:
        model.encode = torch.compile(model.encode, dynamic=True)  # batches differ in length
    return model


class Recipe(NamedTuple):
    """How a model is trained."""

    title: str  # what each line of progress begins with
    epochs: int
    batch: int  # examples of a step
    lr: float  # the peak
    eval_every: int  # steps between evaluations
    seed: int  # decides the order of the examples
    dtype: str  # of matrix products
    redraw: bool  # new hyperplanes of LSH attention in each step


def choose_recipe(args, data, seed, dtype, redraw=False):
    """Return the Recipe of a job, as the flags say. redraw: without LSH attention it is False."""
    title = f"{data['train'].task.name}, seed {seed}"
    eval_every = args.eval_every
    if eval_every is None:  # twice per epoch
        steps_per_epoch = math.ceil(len(data["train"].ids) / args.batch)
        eval_every = max(1, steps_per_epoch // 2)
    return Recipe(title, args.epochs, args.batch, args.lr, eval_every, seed, dtype, redraw)


def train_and_score(model, data, recipe):
    """Train a model in place, as train does, and score it on data["dev"]; return its Outcome.

    Afterwards the model has the weights of the best evaluation; without selection rows, the last.
    """
    best, log = train(model, data, recipe)
    # the last weights are scored too: this shows what the choice brings
    last_scores, predicted = evaluate(model, data["dev"])
    scores = last_scores
    if best.weights is not None:
        model.load_state_dict(best.weights)
        scores, predicted = evaluate(model, data["dev"])
    return Outcome(scores, last_scores, predicted, best.score, log)


def save_model(args, pretrained, train_data, model, outcome, seed):
    """Write the checkpoint of a job, for infer.py: the model as train_and_score leaves it."""
    task = train_data.task
    tokenizer = train_data.tokenizer
    words = pretrained.words
    if words is None:
        words = tokenizer.words[:NEAR_WORDS]
    save_checkpoint(
        f"{job_path(args.out, task.name, seed)}.pt", model, tokenizer.state(),
        # a checkpoint of pretrain.py has its settings there. --init_from of pretrain.py needs them,
        # and so refuses a fine-tuned model
        run=outcome.scores,
        words=words,
        task=task.identity() | dict(scale=task.scale))  # support.pretrained.choose_head reads it


# --------------------------------------------------------------------------------------------------
# Training


def train(model, data, recipe):
    """Train a model on data["train"], and evaluate it on data["select"] now and then.

    Args:
        model: nn.Module, maps token IDs (B, L) and an attention mask to logits.
        data: dict, split -> Examples.
        recipe: Recipe.

    Returns:
        best: Best, the weights of the best evaluation.
        log: list of dict, the scores of each evaluation.
    """
    train_data = data["train"]
    batches = draw_batches(train_data, recipe)
    num_steps = len(batches)
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-6, weight_decay=0.0, fused=True)
    best = Best()
    log = []
    losses = []  # since the last evaluation
    for step, indices in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * lr_factor(step, num_steps)
        if recipe.redraw:
            model.redraw_hyperplanes(recipe.seed * STEP_STRIDE + step)
        losses.append(train_step(model, optimizer, train_data, indices, recipe.dtype))

        num_done = step + 1
        if num_done % recipe.eval_every == 0 or num_done == num_steps:
            row = dict(step=num_done, loss=torch.stack(losses).mean().item())
            losses = []
            if "select" in data:
                scores, _ = evaluate(model, data["select"])
                best.update(scores[train_data.task.metrics[0]], scores["eval_loss"], model)
                row |= scores
            log.append(row)
            print_progress(recipe.title, row, num_steps)
    return best, log


class Best:
    """The weights of the best evaluation so far. The eval_loss decides between equal scores.

    A larger score is better: that holds for all metrics of data/tasks.py.

    Attributes:
        score: float, the task's first metric on the selection rows; None before any evaluation.
        eval_loss: float, of these weights on the selection rows.
        weights: dict, or None before the first evaluation.
    """

    def __init__(self):
        self.score = None
        self.eval_loss = math.inf
        self.weights = None

    def update(self, score, eval_loss, model):
        """Keep the weights of a model if they are better than those before."""
        if self.weights is None or (score, -eval_loss) > (self.score, -self.eval_loss):
            self.score = score
            self.eval_loss = eval_loss
            self.weights = copy.deepcopy(model.state_dict())


def train_step(model, optimizer, train_data, indices, dtype):
    """Forward, backward, clip, update, on the examples with these indices; return their loss."""
    model.train()
    logits = compute_logits(model, train_data, indices, dtype)
    loss = train_data.loss(logits, indices)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()  # stays on the device: to read it would wait for a GPU


def draw_batches(train_data, recipe):
    """Return the batches of all epochs, each the indices of examples of similar length."""
    batches = []
    for epoch in range(recipe.epochs):
        rng = np.random.default_rng([recipe.seed, epoch])
        batches += length_batches(train_data.ids, recipe.batch, rng)
    return batches


def lr_factor(step, num_steps):
    """Return what the peak lr is multiplied by: a rise to 1, then five cosines. [HF Table 5]

    Example: 80 steps, of which 5 are the warm-up and 15 each cosine

        step     0     1     ...   4     5     ...   19      20
        factor   0.2   0.4         1     1           0.01    1
    """
    warmup = math.ceil(WARMUP * num_steps)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / (num_steps - warmup)  # from 0 to below 1
    place = (CYCLES * progress) % 1  # in a cosine, from its peak at 0
    return 0.5 * (1 + math.cos(math.pi * place))


def print_progress(title, row, num_steps):
    """Print an evaluation, as the log has it."""
    scores = [f"{name} {value:.2f}" for name, value in row.items() if name != "step"]
    print(f"{title}, step {row['step']:,} of {num_steps:,}: {', '.join(scores)}", flush=True)


# --------------------------------------------------------------------------------------------------
# Scores


@torch.no_grad()
def evaluate(model, examples):
    """Return the scores of a model on one split of data, dict, and its predictions."""
    model.eval()
    batches = []
    for indices in length_batches(examples.ids, max(1, EVAL_POSITIONS // examples.length)):
        # float32, as in infer.py: in bfloat16 many logits tie
        batches.append((indices, compute_logits(model, examples, indices, "float32")))
    # after the loop, since each check waits for a GPU
    if not all(logits.isfinite().all() for _, logits in batches):
        raise InputError("--lr, --ckpt: expected finite outputs of the model, got NaN or infinity. "
                         "Try a lower --lr or another checkpoint.")
    return examples.evaluate(batches)


def compute_logits(model, examples, indices, dtype):
    """Return the float32 logits of the examples with these indices in one split of data."""
    device = next(model.parameters()).device
    ids, key_mask = pad_batch([examples.ids[i] for i in indices])  # (B, L), (B, L)
    ids = send(ids, device)
    key_mask = send(key_mask, device)  # None where nothing is padded
    with autocast(device, dtype):
        logits = model(ids, key_mask)
    return logits.float()


# --------------------------------------------------------------------------------------------------
# The control: what can be told from the words without their order


class BagOfWords(nn.EmbeddingBag):
    """The control: a word has a score per output, a text their mean. It knows no order of words."""

    def __init__(self, num_ids, num_outputs):
        super().__init__(num_ids, num_outputs, mode="mean", padding_idx=0)
        nn.init.zeros_(self.weight)

    def forward(self, ids, key_mask=None):  # ids (B, L), 0 is padding -> (B, num_outputs)
        return super().forward(ids)


def run_control(num_ids, data, model_recipe, device):
    """Train and score a bag of words on the data of a model; return its Outcome."""
    if device.type == "mps":  # PyTorch 2.8 and 2.9 have no embedding bag there
        device = torch.device("cpu")
    bag = BagOfWords(num_ids, data["train"].num_outputs).to(device)
    return train_and_score(bag, data, choose_control_recipe(model_recipe, data))


def choose_control_recipe(recipe, data):
    """Return the Recipe of a bag of words, whose model has this one: BAG_STEPS steps or more.

    Example: 357 rows in batches of 16 are 23 steps per epoch. A model trains 3 epochs, 69 steps,
    and the bag of words 14 epochs, 322 steps.
    """
    recipe = recipe._replace(title=f"{recipe.title}, bag of words", lr=BAG_LR, redraw=False)
    epochs = math.ceil(BAG_STEPS * recipe.batch / len(data["train"].ids))
    if epochs <= recipe.epochs:
        return recipe
    # with eval_every of the model, the lines of its evaluations would be many
    return recipe._replace(epochs=epochs, eval_every=BAG_STEPS // 10)


# --------------------------------------------------------------------------------------------------
# The script: all tasks, seeds and ranks


def finetune(args, ranks):
    """Prepare a job for each task and seed, then run them.

    Returns:
        dict, the content of results.json; None on ranks other than the first.
    """
    # Settings: what a flag leaves open follows from the checkpoint
    check_flags(args)
    pretrained = load_pretrained(args)
    args = fill_flags(args, pretrained.config.width, pretrained.pool)

    # Device: torchrun starts a process, called rank, for each GPU
    ranks.connect("cpu", days=30)  # they exchange nothing: each has jobs of its own
    runtime = resolve_device(args, ranks.local_rank)

    # Texts: all are read before the first job, so that a bad file shows at once
    tasks = {}  # name -> Task
    rows = {}  # name -> dict, split -> list of (texts, label)
    for name in list_tasks(args.task):
        tasks[name], rows[name] = read_task(name, args)
        if args.epochs == 0 and not pretrained.has_head(tasks[name]):
            raise InputError("--epochs 0 requires --ckpt of a model that was fine-tuned for this "
                             f"very task, {name}, with its columns and labels.")
    settings = dict(vars(args), device=str(runtime.device), dtype=runtime.dtype,
                    format=RESULTS_FORMAT, train_and_dev_rows=fingerprint(rows),
                    checkpoint=pretrained.digest)
    return run_all(args, runtime, pretrained, tasks, rows, settings, ranks)


def run_all(args, runtime, pretrained, tasks, rows, settings, ranks):
    """Run this rank's jobs in --out, which holds those of one choice of settings.

    Returns:
        what finetune returns, the means over the seeds. They are written and printed, too.
    """
    with lock_output(args.out, ranks.rank):
        check_out(args.out, settings)
        if ranks.is_first:
            write_json(Path(args.out, "settings.json"), settings)
            for name, value in settings.items():
                if value is not None and value is not False:  # settings.json has all
                    print(f"{name}: {value}")
        seeds_of_task = share_jobs(args, rows, ranks)  # the jobs of this rank
        # Here each rank waits until the others are here, too, for two reasons:
        # - Rank 0 has locked and checked --out before any job starts.
        # - All ranks have seen the same finished jobs: one that ends now would shift their shares.
        ranks.wait()
        for name, seeds in seeds_of_task.items():
            start, task = choose_head(pretrained, tasks[name])
            data = encode_rows(task, rows[name], start)  # once: the seeds share its token IDs
            print_rows(data)
            for seed in seeds:
                result = run_job(args, runtime, start, data, seed)
                write_json(f"{job_path(args.out, name, seed)}.json", dataclasses.asdict(result))
                gc.collect()  # a compiled model refers to itself, and would stay in memory
        ranks.wait()  # rank 0 reads the results when all ranks have written theirs
        if ranks.is_first:
            return collect_results(args, tasks, settings)


# --------------------------------------------------------------------------------------------------
# The command line


def build_parser():
    """Return the parser of all flags."""
    usage = "python finetune.py (--ckpt DIR | --preset NAME) (--task NAME | --train CSV) [flags]"
    p = make_parser("finetune.py", __doc__, usage=usage)
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--ckpt", help="folder of a run of pretrain.py, or its ckpt.pt")
    source.add_argument("--preset", choices=("proformer", "proformer-tiny"),
                        help="a model with fresh weights, instead of --ckpt")
    p.add_argument("--from_scratch", action="store_true",
                   help="fresh weights; sizes, hash and words of --ckpt")
    add_run_flags(p.add_argument, (*TASKS, "glue"))
    p.set_defaults(device="auto", dtype="auto",
                   compile=False)  # on an H200, two epochs of MRPC: 89 s with it, 34 s without
    return p


def finetune_on_ranks(args):
    """Fine-tune, on each rank that torchrun starts."""
    with Ranks() as ranks:
        try:
            return finetune(args, ranks)
        except KeyboardInterrupt:
            print("The same command goes on with the seeds that have not ended.", file=sys.stderr)
            raise


def main(argv=None):
    """Fine-tune as the command line, or the list argv, says; return the content of results.json."""
    return run_script("finetune.py", finetune_on_ranks, build_parser().parse_args(argv))


if __name__ == "__main__":
    main()
