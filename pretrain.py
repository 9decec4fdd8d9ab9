"""Pre-train a transformer over hashed words.

    python pretrain.py                                               laptop: the docstrings of your Python
    python pretrain.py --emb pool --hash md5 --data my_texts/        your own files
    torchrun --nproc_per_node=8 pretrain.py --emb proj --hash lsh    eight GPUs, or processes on CPUs
    torchrun --nproc_per_node=8 pretrain.py --preset hashformer --emb proj --hash lsh \\
        --data wikipedia+bookcorpus                                  the paper's size and data
    python pretrain.py --emb median                                  masked words, predicted by their hashes
    python pretrain.py --preset superbloom-small                     masked names of item sets
    python pretrain.py --preset superbloom-small --data pages.jsonl --alpha 50        your own item sets
    python pretrain.py --init_from out/proj-lsh --data my_texts/     from the weights of another run

Paper map:    [HF Table 4] learning_rate   [SB §3.2] learning_rate
Out of scope: flags (settings.py), objectives (objectives.py), scores on tasks (finetune.py), texts of a user
              (infer.py).
"""

import dataclasses
import datetime
import gc
import json
import math
import os
import shlex
import signal
import sys
import time
import warnings

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from attention import collision_share
from data.batches import ItemSetBatches, TextBatches
from data.codes import build_codes, build_tokenizer
from data.corpus import Corpus, prepare
from model import Model, count_parameters, load_model, parameter_groups
from objectives import IGNORE_INDEX, OBJECTIVES
from runtime import InputError, autocast, barrier_before_exit, blame_input, catch_signals, exit_on_bad_input
from runtime import gather_from_ranks, load_checkpoint, load_optimizer, lock_output, read_ranks
from runtime import resolve_device, save_checkpoint, try_compile, wrap
from settings import WORDS, parser, require_weights, resolve
from tokenizer import CLS, FIRST_WORD_ID, MASK, UNK, HashTokenizer

PROGRESS_SECONDS = 30  # between two lines of progress, where stderr is no terminal
# flags that, with the config and the corpus, must be equal to resume a run
IDENTITY = "preset", *WORDS, *"batch steps lr warmup schedule optimizer decay clip seed mask samples".split()


class Run:
    """State of one run on one rank: build_run sets it, and the functions below read it.

    args, config, rank, world, device, dtype: settings. corpus, tokenizer, num_ids, batches, micro_size,
    slices: data. model, ddp_model (wrapped for ranks), objective, optimizer, is_compiled: what trains.
    step, best (lowest eval_loss), log_size, eval_counts, path, log_path: where it stands. identity: what a
    checkpoint must agree with.
    """


def build_run(args, config, start=None):
    """Build tokenizer, codes, batches, model, objective and optimizer, and resume from a checkpoint.

    Args: args and config of resolve(); start dict, the checkpoint of --init_from, or None.
    """
    run = Run()
    run.args = a = args
    run.rank, run.world, local_rank = read_ranks()
    run.device, run.dtype, use_compile = resolve_device(a, local_rank)
    a.quiet = a.quiet or run.rank > 0

    with blame_input():
        run.corpus = corpus = Corpus(prepare(a.data, a.split, a.cache, a.vocab, a.quiet, a.field))
        run.tokenizer = (load_tokenizer(a, config, corpus, start["encoder"]) if start
                         else build_tokenizer(a, config, corpus))
        run.config = config = run.tokenizer.config
        require_weights(config)  # again: a fixed vocabulary decides its rows
        codes, targets = build_codes(a, run.tokenizer, corpus)
        # of a fixed vocabulary, IDs from num_ids on are unknown words; a random word must occur in the corpus
        run.num_ids = FIRST_WORD_ID + len(run.tokenizer.words if run.tokenizer.is_fixed else corpus.words)
        words = FIRST_WORD_ID + np.flatnonzero(corpus.counts[FIRST_WORD_ID:run.num_ids])
        sizes = dict(length=config.length, batch_size=a.batch, words=words, seed=a.seed)
        run.batches = (TextBatches(corpus.ids, first_id=CLS, **sizes) if config.order else
                       ItemSetBatches(corpus.ids, corpus.offsets, *corpus.split_pages(),
                                      limits=(FIRST_WORD_ID, run.num_ids), **sizes))
    share = a.batch // run.world
    first, end = share * run.rank, share * (run.rank + 1)  # of each step's sequences, those of this rank
    run.micro_size = min(a.micro, share)
    run.slices = [slice(i, min(i + run.micro_size, end)) for i in range(first, end, run.micro_size)]

    bloom_map = run.tokenizer.bloom_map
    run.identity = {name: getattr(a, name) for name in IDENTITY} | dict(
        corpus=corpus.meta["digest"], bloom=bloom_map and bloom_map.checksum(),
        init_from=start and f"{a.init_from} at step {start.get('step')}")
    run.path, run.log_path = os.path.join(a.out, "ckpt.pt"), os.path.join(a.out, "log.jsonl")
    saved = load_own_checkpoint(run) if os.path.exists(run.path) else start
    torch.manual_seed(a.seed)
    with blame_input(f"--init_from {a.init_from}" if saved is start else run.path):
        model = load_model(saved | dict(config=dataclasses.asdict(config))) if saved else Model(config)
    run.model = run.ddp_model = model.to(run.device).train()
    run.model.set_codes(codes)
    run.objective = OBJECTIVES[a.objective](
        config, mask_rate=a.mask, mask_id=MASK, first_word_id=FIRST_WORD_ID, targets=targets.to(run.device),
        bloom_map=bloom_map, num_samples=a.samples)
    run.optimizer = torch.optim.AdamW(parameter_groups(run.model, a.decay), betas=(0.9, a.beta2), fused=True)
    run.step, run.best, run.log_size = 0, math.inf, 0
    if saved is not start:
        run.step, run.best, run.log_size = (saved[name] for name in ("step", "best", "log_size"))
        load_optimizer(run.optimizer, saved.get("optimizer"), run.path, run.step)
        run.dtype = saved["dtype"] if a.dtype == "auto" else run.dtype
    run.is_compiled = use_compile and try_compile(run.model, lambda: dry_run(run))
    if run.world > 1:
        connect_ranks(run)
    return run


def load_tokenizer(args, config, corpus, state):
    """Return the tokenizer of --init_from; InputError unless its token IDs are those of the corpus."""
    tokenizer = HashTokenizer.load(state, config)
    pieces, own = (subwords and subwords.json for subwords in (corpus.subwords, tokenizer.subwords))
    if pieces != own or corpus.words[:len(tokenizer.words)] != tokenizer.words:
        raise InputError(f"--init_from {args.init_from}: requires the pieces and words of its own corpus, "
                         f"got those of --data {args.data}. Use the same --data, or hashed whole words.")
    return tokenizer


def load_own_checkpoint(run):
    """Return the checkpoint of --out; InputError if it does not belong to this very run."""
    checkpoint, kinds = load_checkpoint(run.path), dict(step=int, best=float, log_size=int, dtype=str)
    now, old = run.identity | dataclasses.asdict(run.config), checkpoint.get("run", {}) | checkpoint["config"]
    changes = [f"{name} was {old.get(name)} and is {now[name]}" for name in now if old.get(name) != now[name]
               and name != "corpus"]
    if old.get("corpus") != now["corpus"]:
        changes.append("--data was another text")
    changes += [f"{name} is damaged" for name, cls in kinds.items() if type(checkpoint.get(name)) is not cls]
    if changes:
        found = "; ".join(changes[:3]) + "; ..." * (len(changes) > 3)
        raise InputError(f"{run.path}: expected a checkpoint of this run, got another: {found}. Use another "
                         f"--out; there --init_from {run.args.out} starts from these weights.")
    return checkpoint


def connect_ranks(run):
    """Start the process group, and wrap the model so that ranks average their gradients."""
    is_cuda = run.device.type == "cuda"
    dist.init_process_group("nccl" if is_cuda else "gloo", device_id=run.device if is_cuda else None,
                            timeout=datetime.timedelta(hours=12))  # one node may prepare the corpus for hours
    states = gather_from_ranks((run.step, run.dtype, run.identity))
    if any(state != states[0] for state in states):
        raise InputError("--out, --cache: expected a folder that all nodes see, got ranks that differ in "
                         f"steps, data, hashes or dtypes; their steps: {[step for step, *_ in states]}.")
    with warnings.catch_warnings():
        # deprecated, but the newer flag would still broadcast buffers at the start
        warnings.simplefilter("ignore", FutureWarning)
        # codes and hyperplanes, the buffers, are large, and equal on all ranks
        run.ddp_model = torch.nn.parallel.DistributedDataParallel(run.model, broadcast_buffers=False)
    # subtle: after its first pass DDP packs gradients anew, and more than two ranks sum in another order.
    # With this pass a resumed run sums as one that never stopped
    dry_run(run)


def dry_run(run):
    """Run forward and backward on one micro-batch without a step; the first step clears its gradients."""
    compute_gradients(run, get_micro_batches(run, 0)[:1], num_scored=torch.ones((), device=run.device))


def get_micro_batches(run, step):
    """Return a list of (inputs, labels) on the device, one for each micro-batch of this rank."""
    return [corrupt(run, run.batches.get_batch(step, rows))
            for rows in run.batches.micro_batch_rows(step, run.slices)]


def corrupt(run, batch):
    """Return inputs and labels on the device, of ids, noise and random words."""
    ids, noise, random_words = (tensor.to(run.device, non_blocking=True) for tensor in batch)
    return run.objective.corrupt(ids.masked_fill(ids >= run.num_ids, UNK), noise, random_words)


def sum_over_ranks(tensor):
    """Sum a tensor over all ranks, in place; return it."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def compute_gradients(run, micro_batches, num_scored):
    """Run the forward and backward passes of one step; the gradients are in the parameters.

    Args:
        micro_batches: list of (inputs, labels).
        num_scored: float tensor, scored positions of the global batch.

    Returns:
        The mean loss of the global batch, a 0-dim tensor, the same on all ranks.
    """
    run.model.zero_grad()
    total = torch.zeros((), device=run.device)
    for i, (inputs, labels) in enumerate(micro_batches, 1):
        run.ddp_model.require_backward_grad_sync = i == len(micro_batches)  # average once, at the end
        with autocast(run.device, run.dtype):
            loss = run.objective.loss(run.ddp_model, inputs, labels)
        # subtle: by the global count, else short micro-batches weigh too much; DDP averages: times world
        (loss * (run.world / num_scored)).backward()
        total += loss.detach()
    return sum_over_ranks(total) / num_scored


@torch.no_grad()
def evaluate(run):
    """Return eval_loss and the objective's metrics over the held-out sequences of all ranks."""
    run.model.eval()
    rows = np.array_split(np.arange(run.batches.num_eval), run.world)[run.rank]
    total = torch.zeros(2 + run.objective.num_counts, dtype=torch.float64, device=run.device)
    for i in range(0, len(rows), run.micro_size):
        inputs, labels = corrupt(run, run.batches.eval_batch(rows[i:i + run.micro_size]))
        with autocast(run.device, run.dtype):
            loss, counts = run.objective.evaluate(run.model, inputs, labels)
        total += torch.cat([torch.stack([loss, (labels != IGNORE_INDEX).sum()]).double(), counts.double()])
    run.model.train()
    loss, num_scored, *run.eval_counts = sum_over_ranks(total).tolist()
    if not num_scored:
        raise InputError("--data: expected words to predict in the held-out text, got none. Use more text "
                         "or a larger --mask.")
    if not math.isfinite(loss):
        raise InputError(f"--lr: expected a finite loss at step {run.step}, got {loss}. Try a lower --lr.")
    return dict(eval_loss=loss / num_scored, **run.objective.metrics(run.eval_counts))


def save(run, name="ckpt.pt"):
    """Write ckpt.pt, from which a run resumes, or best.pt, the same without the optimizer; on rank 0."""
    if run.rank == 0:
        more = dict(optimizer=run.optimizer.state_dict()) if name == "ckpt.pt" else {}
        save_checkpoint(os.path.join(run.args.out, name), run.model, run.tokenizer.state(), step=run.step,
                        best=run.best, dtype=run.dtype, run=run.identity,
                        log_size=os.path.getsize(run.log_path), words=run.corpus.frequent(50_000), **more)


def write_log(run, **row):
    """Append a line to log.jsonl, on rank 0."""
    if run.rank == 0:
        row = {name: float(f"{x:.6g}") if isinstance(x, float) else x for name, x in row.items()}
        with open(run.log_path, "a") as file:
            file.write(json.dumps(row) + "\n")


def print_line(run, text, **values):
    """Print a text and named values on rank 0, above a progress bar, unless --quiet."""
    if not run.args.quiet:
        values = ", ".join(f"{name} {value:.3f}" for name, value in values.items())
        tqdm.write(wrap(f"{text} {values}") if values else text)


def print_summary(run, loss):
    """Print what is about to run, and the loss that theory expects."""
    def show(text):
        print(wrap(text), flush=True)

    a, c, corpus, batches = run.args, run.config, run.corpus, run.batches
    size, meta, bloom_map = count_parameters(run.model), corpus.meta, run.tokenizer.bloom_map
    classes, unigram = run.objective.expected_loss(corpus.counts[FIRST_WORD_ID:run.num_ids], run.eval_counts)
    show(f"model: emb {a.emb}, split {a.split}, objective {a.objective}, {c.layers} layers, width "
         f"{c.width}, length {c.length}")
    show(f"parameters: {size['total']:,}; embedding {size['embedding']:,} (PoEP {100 * size['poep']:.2f} %)")
    show(f"corpus: {a.data}, {meta['words']:,} words, {meta['distinct']:,} distinct, {meta['documents']:,} "
         f"documents, {meta['replaced']:,} characters not UTF-8")
    if bloom_map:
        show(f"Bloom map: {bloom_map.n_items:,} items in {bloom_map.m} maps of {bloom_map.buckets:,} "
             f"buckets of {bloom_map.alpha}; {batches.words_per_sequence:.1f} items per set")
    show(f"batch: {a.batch} = {run.world} ranks × {len(run.slices)} micro-batches, {run.micro_size} each")
    epochs = a.steps / batches.steps_per_epoch
    show(f"steps: {a.steps:,} = {epochs:.1f} epochs, lr {a.lr:g}, warm-up {a.warmup:,}")
    if epochs > 20:
        show("warning: more than 20 epochs. Use fewer --steps or more text; best.pt is the best so far.")
    if c.attn == "lsh" and c.layers:
        run.model.eval()
        rows = slice(run.micro_size) if c.order else slice(-run.micro_size, None)  # of sets, the largest
        with autocast(run.device, run.dtype):
            ids = corrupt(run, batches.eval_batch(rows))[0]
            shares = measure_collisions(run.model, ids)
        run.model.train()
        shares = ", ".join(f"{100 * share:.1f} %" for share in shares)
        show(f"attention: lsh, pairs that collide in each layer {shares}")
    show(f"device: {run.device}, {run.dtype}, {'not ' * (not run.is_compiled)}compiled, torch "
         f"{torch.__version__}, seed {a.seed}")
    show(f"eval_loss: {loss:.3f} at step {run.step:,}; uniform baseline {math.log(classes):.3f} = ln "
         f"{classes:,}, frequencies alone {unigram:.3f}")


@torch.no_grad()
def measure_collisions(model, ids):
    """Return for each layer the share of pairs that collide, list of float."""
    x = model.embed_inputs(ids)
    key_mask = model.padding_mask(ids)
    shares = []
    for layer in model.layers:
        q, k, _ = layer.attention.project(x)
        hq, hk = layer.attention.hash_buckets(q, k)
        shares.append(collision_share(hq, hk))
        x = layer(x, key_mask)
    return shares


def learning_rate(a, step):
    """Return a step's rate: linear warm-up to --lr, then linear [HF Table 4] or rsqrt decay. [SB §3.2]"""
    rise = (step + 1) / max(a.warmup, 1)
    fall = rise**-0.5 if a.schedule == "rsqrt" else (a.steps - step) / max(a.steps - a.warmup, 1)
    return a.lr * min(rise, fall)


def take_step(run, micro_batches, num_scored):
    """Take one optimizer step; return what to log, and the next step's micro-batches."""
    a = run.args
    # dropout depends on seed, step and rank alone: a resumed run draws what the uninterrupted one drew
    torch.manual_seed(((a.seed * 1_000_003 + run.step) * 4_099 + run.rank) % 2**63)
    if run.config.lsh_redraw:
        run.model.redraw_hyperplanes(a.seed * 1_000_003 + run.step)
    for group in run.optimizer.param_groups:
        group["lr"] = lr = learning_rate(a, run.step)
    loss = compute_gradients(run, micro_batches, num_scored)
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), a.clip or math.inf)
    next_batches = get_micro_batches(run, run.step + 1)  # while a GPU is still busy
    loss, norm = loss.item(), norm.item()
    if not math.isfinite(loss + norm):
        raise InputError(f"--lr: expected finite numbers in step {run.step + 1}, got loss {loss}, gradient "
                         f"norm {norm}. What {a.out} holds is older. Try a lower --lr.")
    run.optimizer.step()
    run.step += 1
    return dict(loss=loss, lr=lr, grad_norm=norm), next_batches


def fit(run, caught):
    """Train until the last step or until a signal is in `caught`, and save; return the last evaluation."""
    a, result = run.args, evaluate(run)  # before training, to compare with the loss that theory expects
    if run.rank == 0:
        with open(run.log_path, "a") as file:  # the steps after the checkpoint run again
            file.truncate(min(run.log_size, file.tell()))
    if not a.quiet:
        print_summary(run, result["eval_loss"])
    if run.step:
        print_line(run, f"Resuming {a.out} at step {run.step:,}")
    micro_batches = get_micro_batches(run, run.step)
    clock = shown = time.perf_counter()
    since = run.step
    with tqdm(total=a.steps, initial=run.step, unit="step", disable=a.quiet or None) as bar:
        while run.step < a.steps:
            # one sum over the ranks carries how many positions are scored, and whether any rank has to stop
            counts = [sum((labels != IGNORE_INDEX).sum().item() for _, labels in micro_batches), len(caught)]
            num_scored, must_stop = sum_over_ranks(torch.tensor(counts, device=run.device).float())
            if must_stop:
                bar.close()
                save(run)
                print_line(run, f"Interrupted at step {run.step:,}; saved {run.path}.")
                print_line(run, "Rerun the same command to resume, bit for bit on the same device,\n"
                                "ranks, threads and --micro.")
                barrier_before_exit()
                raise SystemExit(128 + (caught or [signal.SIGTERM])[0])
            row, micro_batches = take_step(run, micro_batches, num_scored.clamp(min=1))
            bar.update()
            is_last, now = run.step == a.steps, time.perf_counter()
            if run.step % 10 == 0 or is_last:
                period = (now - clock) / ((run.step - since) * a.batch)  # seconds per sequence
                speed = dict(words_per_s=run.batches.words_per_sequence / period, ms_per_sample=1e3 * period)
                text = "loss {:.3f}, {:,.0f} words/s, {:.2f} ms/sample".format(row["loss"], *speed.values())
                bar.set_postfix_str(text)
                if bar.disable and not a.quiet and now > shown + PROGRESS_SECONDS:
                    print(f"step {run.step:,} of {a.steps:,}: {text}", file=sys.stderr, flush=True)
                    shown = now
                write_log(run, step=run.step, **row, **speed)
                clock, since = now, run.step
            if is_evaluated := run.step % a.eval_every == 0 or is_last:
                result = evaluate(run)
                write_log(run, step=run.step, **result)
                if result["eval_loss"] < run.best:
                    run.best = result["eval_loss"]
                    save(run, "best.pt")
            if run.step % a.save_every == 0 or is_last:
                save(run)
            if is_evaluated:  # once it is saved
                print_line(run, f"step {run.step:,}:", **result)
            clock += time.perf_counter() - now  # evaluation and saving do not count as speed
    return result


def example_text(run):
    """Return the first words of the held-out text, with a [MASK] for a model that predicts words."""
    ids = run.batches.eval_batch(slice(0, 1))[0][0].numpy()
    ids = ids[ids >= FIRST_WORD_ID] - FIRST_WORD_ID
    words = (run.corpus.subwords.tokenizer.decode(ids.tolist()).split() if run.args.split == "bpe"
             else [run.corpus.words[i] for i in ids])[:12 if run.config.order else 2]
    if run.args.mask:  # of a text a word in the middle, of a set one more
        words[min(6, len(words)):7] = ["[MASK]"]
    return " ".join(words).replace("Ġ", "")


def train(args):
    """Build a run, train it and say how to continue; return the last evaluation."""
    rank, world, _ = read_ranks()
    start = load_checkpoint(args.init_from) if args.init_from else None
    config = resolve(args, world, start)
    with lock_output(args.out, rank):  # before the checkpoint there is read: another run may be saving it
        run = build_run(args, config, start)
        try:
            with catch_signals() as caught:
                result = fit(run, caught)
            print_line(run, f"Saved {run.path}, and the lowest loss in best.pt:", eval_loss=run.best)
            print_line(run, f"Next: python infer.py --ckpt {shlex.join([args.out, example_text(run)])}")
            barrier_before_exit()
            return result
        finally:
            # subtle: let go of DDP before the process group ends. As the group's last owner it would wait,
            # holding Python's lock, for a thread that may be waiting for that lock
            run.ddp_model = run.model
            gc.collect()


def main(argv=None):
    """Train as argv says (default: the command line); return the last evaluation. Bad input exits with 2."""
    with exit_on_bad_input("pretrain.py"):
        return train(parser((__doc__ or "").split("\nPaper map")[0]).parse_args(argv))


if __name__ == "__main__":
    main()
