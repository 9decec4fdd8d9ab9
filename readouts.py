"""Outputs of a head to results: kinds of words, words or items for a [MASK], labels, answers.

A readout is a class for a `method` of heads.HEADS, and its line in READOUTS:

    method            readout        row                               result
    detect            WordJudge      "a cat"                           words, spans, probabilities
    fill_mask         WordRanking    "the [MASK]"                      [[("cat", 0.67), ...]]
    predict_missing   ItemSearch     "the [MASK]", or an item set      [dict(items=..., ...)]
    classify          Labels         "a good one", or a pair           [("up", 0.88), ...]
    answer            Answers        ("Who wrote it?", "Ada did.")     ("Ada", 3.2)

Sources: [HF] Xue & Aletras 2022. [BERT] Devlin et al. 2019. [SB], [CM]: see objectives.py
Out of scope: rows to Examples (support/readers.py), batches (support/runner.py), how results are
    printed (infer.py), scores (metrics.py, data/classification.py)
Notation: B batch   L positions   M masked positions   V items to choose from   E items that a set
    shows   m hashes of an item   R buckets of a hash   s special tokens   k results to return
"""

from dataclasses import dataclass

import torch

from coherent import popularity_prior
from data.squad import V2, find_answers, sliding_windows
from model import Model
from search import beam_search, hash_logp
from support.candidates import map_items
from support.readers import Example
from support.runner import run_batches
from tokenizer import FIRST_WORD_ID, MASK, HashTokenizer

NO_ITEM = -1  # in the place of an item's number, as beam_search returns it


@dataclass
class Readout:
    """Base class. A subclass has interpret, or its own predict if a row has several inputs."""

    model: Model
    tokenizer: HashTokenizer
    items: list  # V str, what a [MASK] may stand for
    task: dict  # what finetune.py says about its task; empty after pretrain.py
    item_counts: torch.Tensor | None  # int (V,), how often each item occurs
    prior: float  # weight of the items' popularity in their scores

    # of a class
    reads_windows = False  # whether it reads a long text whole, in windows
    uses_prior = False  # whether popularity may be added to its scores

    def check(self, example: Example):
        """Raise a ValueError if the head cannot read an Example."""

    def forward(self, ids, key_mask):
        """Return an output for each row of ids (B, L). key_mask is as in Model.forward."""
        return self.model(ids, key_mask)

    def interpret(self, example: Example, output, k):
        """Return the result of an Example by its output, a tensor. k is the most to return."""
        raise NotImplementedError

    def predict(self, examples: list[Example], k):
        """Return the result of each Example, whatever batch it was in."""
        inputs = [example.ids for example in examples]
        batches = run_batches(self.model, self.tokenizer, inputs, self.forward)
        results = [None] * len(examples)
        for chosen, outputs in batches:
            for i, output in zip(chosen, outputs):
                results[i] = self.interpret(examples[i], output, k)
        return results


class WordJudge(Readout):
    """Is each word of a text intact, shuffled or random? [HF §3.6]

        "a cat"  ->  (["a", "cat"], [(0, 1), (2, 5)], [[0.9, 0.1, 0.0], [0.2, 0.1, 0.7]])

    A result is (words, spans, probabilities):

        words            list[str], those that were read, if the text was cut
        spans            list[(start, end)], the characters of each word
        probabilities    float (words, 3); column i is of Predictor.kinds[i]
    """

    def check(self, example):
        if not example.words:
            raise ValueError("expected words, got none.")
        if MASK in example.ids:
            raise ValueError("expected no [MASK]. Remove it, or use a model that fills masks, such "
                             "as models/english-fill.pt.")

    def interpret(self, example, logits, k):  # (L, 3)
        num_read = len(example.ids) - 2  # without [CLS] and [SEP]
        probabilities = logits[1:1 + num_read].softmax(-1).cpu()
        return example.words[:num_read], example.spans[:num_read], probabilities


class MaskReadout(Readout):
    """Base class for heads that predict a [MASK]: a row with M of them has M rows of logits."""

    def check(self, example):
        config = self.model.config
        if config.order and MASK not in example.ids:  # a text, whose [MASK] the user writes
            raise ValueError(f"expected [MASK] in the first {config.length} positions, got "
                             f"{example.row!r:.60}.")
        if not config.order and not example.words:  # a set with no known item; its [MASK] is added
            raise ValueError("expected items that this model knows, split by tabs or spaces, got "
                             f"{example.row!r:.60}.")

    def forward(self, ids, key_mask):
        """Return the logits of each row's [MASK].

            rows "a [MASK] [MASK]" and "[MASK] cat"  ->  logits (2, ...) and (1, ...)
        """
        is_mask = ids == MASK  # (B, L)
        [positions] = torch.where(is_mask.flatten())
        logits = self.model(ids, key_mask, masked_positions=positions)
        return logits.split(is_mask.sum(1).tolist())  # B times (M, ...)

    def name_items(self, numbers, scores):
        """Return pairs (item, score) of two tensors (k,), without NO_ITEM.

            items cat, dog, mat; 2, 0, -1 and 0.7, 0.3, 0.0  ->  [("mat", 0.7), ("cat", 0.3)]
        """
        pairs = []
        for number, score in zip(numbers.tolist(), scores.tolist()):
            if number != NO_ITEM:
                pairs.append((self.items[number], score))
        return pairs


class WordRanking(MaskReadout):
    """Which words of the vocabulary does each [MASK] stand for? [BERT §3.1]

    A result has for each [MASK] a list of the k best (word, probability). An item that the set
    shows is not among them. With the vocabulary cat, dog, mat, and k = 2:

        "the [MASK]", logits (5 special tokens), 2.0, 1.0, 0.0  ->  [[("cat", 0.67), ("dog", 0.24)]]
    """

    def interpret(self, example, logits, k):  # (M, 5 special tokens and V)
        logits = logits[:, FIRST_WORD_ID:].clone()  # (M, V); the model's output stays as it is
        logits[:, list(example.shown)] = -torch.inf
        best = logits.softmax(-1).topk(min(k, len(self.items)))  # values and indices (M, k)
        # subtle: an item that the set shows has the probability 0. If it shows all V items, all
        # have NaN, and NaN > 0 is False too
        is_proposed = best.values > 0
        numbers = best.indices.masked_fill(~is_proposed, NO_ITEM)
        return [self.name_items(*rows) for rows in zip(numbers, best.values)]


class ItemSearch(MaskReadout):
    """Which item has the hashes that are predicted for a [MASK]? [SB §2.5] [CM]

    The score of an item is the sum of the log-probabilities of its hashes. With two hashes of two
    buckets, whose probabilities are (0.8, 0.2) and (0.3, 0.7):

        cat, of buckets 0 and 1    log 0.8 + log 0.7 = -0.58
        dog, of buckets 1 and 1    log 0.2 + log 0.7 = -1.97

    A result has for each [MASK], of which a set has one, a dict:

        items     list of the k best (name, score). An item that the set shows is not among them
        scored    int, how many items the search scored to certify that these are the best
        total     int, how many items there are
    """

    uses_prior = True

    def __init__(self, *fields):
        super().__init__(*fields)
        self.item_map = map_items(self.tokenizer, self.items, self.model.config.buckets)
        self.item_priors = None  # float (V,), what is added to the score of each item
        if self.prior != 0.0:
            self.item_priors = self.prior * popularity_prior(self.item_counts, self.item_map)

    def interpret(self, example, logits, k):  # (M, m, R), or (M, m, m·(R + s)) if stacked
        if self.model.head.is_stacked:
            logp = hash_logp(logits, self.item_map)  # (M, m, R)
        else:  # a sketch: each hash has a softmax of its own
            logp = logits.log_softmax(-1, dtype=torch.float32)
        shown = torch.tensor(example.shown, dtype=torch.int64, device=logits.device)  # (E,)
        # without a limit of rounds the search goes on until the k best are certified
        found = beam_search(
            logp, self.item_map, k, beam=k, rounds=None, exclude=shown.expand(len(logp), -1),
            prior=self.item_priors)
        result = []
        for i, scored in enumerate(found.num_scored.tolist()):
            pairs = self.name_items(found.ids[i], found.scores[i])
            result.append(dict(items=pairs, scored=scored, total=len(self.items)))
        return result


class Labels(Readout):
    """Which label does a text have, or a pair of texts?

        labels up and down, logits 1.0 and -1.0  ->  [("up", 0.88), ("down", 0.12)]

    A result is a list of the k best (label, probability), all of them if k is None. A regression
    has one (name of the label column, number).
    """

    def interpret(self, example, logits, k):  # (labels,)
        if self.task.get("labels") is None:
            mean, deviation = self.task["scale"]
            return [(self.task["label"], logits.item() * deviation + mean)]
        pairs = zip(self.task["labels"], logits.softmax(-1).tolist())
        return sorted(pairs, key=lambda pair: -pair[1])[:k]


class Answers(Readout):
    """Which words of a context answer a question? [BERT §4.2]

        ("Who wrote it?", "Ada Lovelace wrote it.")  ->  ("Ada Lovelace", 3.2)

    A row is (question, context). A result is the answer, "" for none; and its score minus that of
    none, float. Here 3.2 = 4.0 for the start "Ada" + 3.7 for the end "Lovelace" - 4.5 for none.
    """

    reads_windows = True

    def predict(self, examples, k):
        """Return the result of each Example. The best span of all windows of its context counts."""
        pairs = []  # of each Example: (question, context), str
        spans = []  # of each Example: (start, end) of each word of its context, in characters
        windows = []  # of all Examples: (number of the Example, Window)
        for number, example in enumerate(examples):
            pairs.append(example.row)
            spans.append(example.spans)
            question, context = example.text_ids
            for window in sliding_windows(question, context, self.model.config.length):
                windows.append((number, window))
        inputs = [window.ids for _, window in windows]
        # list of (indices of windows, logits (B, L, 2))
        batches = list(run_batches(self.model, self.tokenizer, inputs, self.forward))
        allow_no_answer = self.task["name"] == V2
        answers, margins = find_answers(pairs, windows, spans, batches, allow_no_answer)
        return list(zip(answers, margins.tolist()))


READOUTS = {  # the method of a head -> how its outputs are read
    "detect": WordJudge,
    "fill_mask": WordRanking,
    "predict_missing": ItemSearch,
    "classify": Labels,
    "answer": Answers,
}
