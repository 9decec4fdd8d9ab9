"""A trained model and its tokenizer at work: words to token IDs, and those to outputs, in batches.

    inputs = [list_ids(tokenizer, ["the", "cat"])]
    for chosen, outputs in run_batches(model, tokenizer, inputs, model.encode):
        ...                                          outputs[i] is of inputs[chosen[i]]

Threads may share the two: the tokenizer's list of words grows, and the model needs all codes.

Notation: B batch   L positions   d hidden size
"""

import threading

from data.batches import length_batches, pad_batch
from support.common import send

BATCH = 32  # rows; on a CPU 8 to 64 are best, as more have more padding
# subtle: held while a tokenizer's list of words grows, or is read
LOCK = threading.Lock()


def list_ids(tokenizer, words):
    """Return the token IDs of words, int32 (n,). The tokenizer may add them to its list."""
    with LOCK:
        return tokenizer.ids(words)


def update_codes(model, tokenizer):
    """Let the model have the codes of all words that were read."""
    with LOCK:
        model.set_codes(tokenizer.codes())


def run_batches(model, tokenizer, inputs, forward):
    """Yield the indices of the inputs in a batch, (B,), and their B outputs.

    Inputs of similar length are in one batch. In batches of two:

        inputs of 3, 9 and 4 token IDs  ->  (0, 2) and (2, 4, d), then (1,) and (1, 9, d)

    Args:
        model: model.Model, on its device.
        tokenizer: HashTokenizer, which made the token IDs.
        inputs: list of int32 (L,), token IDs.
        forward: function of ids int64 (B, L), 0 is padding, and mask bool (B, L) or None; such as
            model.encode, whose outputs are (B, L, d).
    """
    update_codes(model, tokenizer)
    for chosen in length_batches(inputs, BATCH):
        ids, key_mask = pad_batch([inputs[i] for i in chosen])
        ids = send(ids, model.device)
        key_mask = send(key_mask, model.device)
        yield chosen, forward(ids, key_mask)
