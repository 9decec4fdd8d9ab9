"""A trained model and its tokenizer at work: token IDs in, outputs out, in batches.

    runner = Runner(model, tokenizer)
    ids = list_ids(tokenizer, ["the", "cat"])
    for chosen, outputs in runner.run([ids], model.encode):
        ...                                          outputs[i] is of input chosen[i]

Threads may share a Runner and its tokenizer.

Notation: B batch   L positions
"""

import threading

from data.batches import length_batches, pad_batch
from support.common import send

BATCH = 32  # rows; on a CPU 8 to 64 are best, as more have more padding
# subtle: held while the tokenizer's list of words grows, or is read
LOCK = threading.Lock()


def list_ids(tokenizer, words):
    """Return the token IDs of words, int32 (n,). The tokenizer may add them to its list."""
    with LOCK:
        return tokenizer.ids(words)


class Runner:
    """Runs a model on token IDs, after it has got the codes of all words that were read.

    Args:
        model: model.Model, on its device.
        tokenizer: HashTokenizer, which made the token IDs.
    """

    def __init__(self, model, tokenizer):
        self.model = model
        self.tokenizer = tokenizer

    def run(self, inputs, forward):
        """Yield the indices of the inputs in a batch, (B,), and their B outputs.

        Inputs of similar length are in one batch. In batches of two:

            inputs of 3, 9 and 4 token IDs  ->  (0, 2) and (2, 4, d), then (1,) and (1, 9, d)

        Args:
            inputs: list of int32 (L,), token IDs.
            forward: function of ids int64 (B, L), 0 is padding, and mask bool (B, L) or None; such
                as model.encode, whose outputs are (B, L, d).
        """
        self.update_codes()
        for chosen in length_batches(inputs, BATCH):
            ids, key_mask = pad_batch([inputs[i] for i in chosen])
            ids = send(ids, self.model.device)
            key_mask = send(key_mask, self.model.device)
            yield chosen, forward(ids, key_mask)

    def update_codes(self):
        """Let the model have the codes of all words that were read."""
        with LOCK:
            self.model.set_codes(self.tokenizer.codes())
