"""SQuAD: find the words of a text that answer a question, as BERT does it. [BERT §4.2]

Sources:
    [SQ] Rajpurkar et al. 2018, SQuAD 2.0
    [BERT] Devlin et al. 2019, and its code, run_squad.py
Out of scope: training (finetune.py); tasks with one label per text (data/classification.py).
Deviations:
    1. Words of the question are no candidates for an answer, neither in training nor after it.
    2. A word in several windows counts in each, not only where it has most context around it.
    3. All spans of a window are compared, not those of the 20 best starts and ends.
    4. An answer that is not at answer_start is looked for at the nearest place.
    5. A question is cut at half of the room, not at 64 words.
Notation:
    B batch   L positions   W windows   n questions

Example: "Who sat?" about "A cat sat." with the answer "A cat", which starts at character 0:

    position   0      1    2    3  4      5      6  7    8    9  10
    ids        [CLS]  who  sat  ?  [SEP]  [SEP]  a  cat  sat  .  [SEP]
    word                                         0  1    2    3          of the context
    span       (0, 1) (2, 5) (6, 9) (9, 10), the characters of each word of the context
    target     (6, 7), the positions of the first and the last word of the answer; (0, 0), the
               [CLS], in a window without the whole answer

A long context is cut into windows that overlap. A Window has its ids; its part of the
context, words start to stop - 1, here 0 to 3; and offset, the position of word start, here 6.
The model gives each position a score as the start and one as the end of the answer, logits (L, 2).
The answer is the best span of all windows of its question, or none if [CLS] scores higher.
"""

import collections
import re
import string
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from data.classification import Examples, parse_rows, read_records
from data.rows import note_once
from support.common import InputError, blame, send
from tokenizer import build_inputs

V2 = "squad_v2"  # questions may have no answer
VERSIONS = {"squad": "v1.1", V2: "v2.0"}
MAX_ANSWER = 30  # words of the longest answer, max_answer_length of run_squad.py
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


# --------------------------------------------------------------------------------------------------
# Files and the hub to rows


def read_squad(task, args, split):
    """Read the questions of --train or --dev, or of the original files, or from the hub.

    Args:
        task: data.tasks.Task, whose name is a key of VERSIONS.
        args: Namespace with the flags train, dev and data_dir, and those of the reader of files.
        split: str, train or dev.

    Returns:
        list of rows ((question, context), answers): a list of (text, the character where it
        starts).

    Raises:
        InputError: a file cannot be read, or is not as SQuAD.
    """
    original = f"{split}-{VERSIONS[task.name]}.json"
    records, source = read_records(args, split, original, f"rajpurkar/{task.name}")
    with blame(source):
        questions = list(list_questions(record for _, record in records))
    rows = parse_rows(list(enumerate(questions, 1)), task, source, parse_answers)
    # v1 has no score for "no answer": such a question could not be answered right
    if task.name != V2 and not all(answers for _, answers in rows):
        raise InputError(f"{source}: expected an answer to each question. Use --task squad_v2.")
    if split == "train":
        rows = drop_misplaced(rows, source)
    return rows


def list_questions(records):
    """Yield a flat record per question, from records as published or from the hub.

        file   {"paragraphs": [{"context": ..., "qas": [{"question": ..., "answers": ...}, ...]}]}
        hub    {"context": ..., "question": ..., "answers": ...}

    Raises:
        ValueError: a record has "paragraphs", but not as published.
    """
    for record in records:
        if "paragraphs" not in record:
            yield record
            continue
        for paragraph in list_objects(record, "paragraphs"):
            for question in list_objects(paragraph, "qas"):
                yield paragraph | question


def list_objects(record, name):
    """Return the list of objects that a record of a file has under a name."""
    objects = record.get(name)
    if not isinstance(objects, list) or not all(isinstance(part, dict) for part in objects):
        raise ValueError(f"expected {name}, a list of objects, got {objects!r:.60}.")
    return objects


def parse_answers(cell, task, place):
    """Return the answers in a cell, list of (text, start): they are the label of a row."""
    try:
        if isinstance(cell, dict):  # of lists, on the hub
            answers = list(zip(cell["text"], cell["answer_start"], strict=True))
        else:
            answers = [(answer["text"], answer["answer_start"]) for answer in cell]
        # "" is a table's empty cell; for no answer there is []
        is_good = cell != "" and all(type(text) is str and text != "" and type(start) is int
                                     for text, start in answers)
    except (KeyError, TypeError, ValueError):
        is_good = False
    if not is_good:
        raise InputError(f'{place}: expected {task.label_column} as [{{"text": "a", '
                         f'"answer_start": 0}}], or [] for none, got {cell!r:.99}.')
    return answers


def drop_misplaced(rows, source):
    """Return the training rows without those whose first answer is nowhere in the context.

    They would be trained as "no answer". Answers beside their answer_start, such as one that was
    counted in UTF-16, are kept, see find_place. Both are counted on stderr.
    """
    good = []
    num_answered = 0
    num_moved = 0
    for row in rows:
        (_, context), answers = row
        if answers:
            num_answered += 1
            text, start = answers[0]
            place = find_place(context, text, start)
            if place is None:
                continue
            if place != start:
                num_moved += 1
        good.append(row)
    num_lost = len(rows) - len(good)
    message = (f"{source}: {num_moved:,} of {num_answered:,} answers stand elsewhere in the "
               f"context than at answer_start, {num_lost:,} nowhere.")
    if num_lost > num_answered / 2:
        raise InputError(message)
    if num_moved + num_lost > 0:
        note_once(f"{message} The nearest place is taken; questions without one do not train.")
    return good


def find_place(context, text, start):
    """Return the character of a context where a text stands, nearest to start; None: nowhere."""
    places = [i for i in range(len(context)) if context.startswith(text, i)]
    return min(places, key=lambda place: abs(place - start), default=None)


# --------------------------------------------------------------------------------------------------
# A split of the data


class QuestionAnswering(Examples):
    """Questions and contexts as token IDs. Each window of a long context is an example.

    Attributes, besides those of Examples:
        pairs: list of n (question, context).
        truths: list of n, the right answers to each question, see list_truths.
        windows, spans: as cut_windows returns them.
        targets: int64 (W, 2), as label_windows returns them.
        notes: str, how many windows there are, and what was lost.
    """

    head = "span"
    num_outputs = 2  # a score as the start of the answer, and one as its end
    # has_control is False: a bag of words does not know where in the text a word stands

    def __init__(self, task, rows, tokenizer, length):
        super().__init__(task, rows, tokenizer, length)
        self.allow_no_answer = task.name == V2
        self.pairs = [texts for texts, _ in rows]
        self.truths = [list_truths(answers, self.allow_no_answer) for _, answers in rows]
        windows, spans, num_cut = cut_windows(self.pairs, tokenizer, length)
        self.windows = windows
        self.spans = spans
        self.ids = [window.ids for _, window in windows]
        self.targets, num_lost = label_windows(rows, windows, spans)
        self.notes = (f"{len(self.ids):,} windows, {num_lost:,} answers found in none, "
                      f"{num_cut:,} questions cut")

    def loss(self, logits, indices):
        """Return the mean cross-entropy of start and end in the windows with these indices.

        logits: float (B, L, 2). [CLS] and the words of the context are the classes: words of the
        question and padding cannot be right.
        """
        windows = [self.windows[i] for i in indices]
        is_candidate = mark_contexts(windows, logits)  # (B, L)
        is_candidate[:, 0] = True  # [CLS]
        logits = logits.masked_fill(~is_candidate.unsqueeze(-1), -torch.inf)
        targets = torch.from_numpy(self.targets[indices])  # (B, 2)
        targets = send(targets, logits.device)
        start_loss = F.cross_entropy(logits[..., 0], targets[:, 0])
        end_loss = F.cross_entropy(logits[..., 1], targets[:, 1])
        return (start_loss + end_loss) / 2

    def evaluate(self, batches):
        """Score the answers of a model.

        eval_loss takes an answer that is in no window, or nowhere in the context, as none.

        Args:
            batches: list of (indices, logits (B, L, 2)): of all windows, in any order.

        Returns:
            dict of the scores in percent and eval_loss; and the answers, list of str, "" for none.
        """
        total_loss = 0.0
        for indices, logits in batches:
            total_loss += self.loss(logits, indices).item() * len(indices)
        texts, _ = find_answers(
            self.pairs, self.windows, self.spans, batches, self.allow_no_answer)
        percent = 100 * self.score(texts).mean(0)
        em, f1 = percent.tolist()
        eval_loss = total_loss / len(self.ids)
        return dict(f1=f1, em=em, eval_loss=eval_loss), texts

    def score(self, texts):
        """Return float (n, 2), EM and F1 of an answer to each question."""
        scores = []
        for text, truths in zip(texts, self.truths):
            scores.append(exact_and_f1(normalize_answer(text), truths, self.allow_no_answer))
        return np.array(scores)

    def majority(self, train):
        """Return the score in percent that needs no model: F1 of giving no answer."""
        scores = self.score([""] * self.num_rows)  # (n, 2)
        return 100 * float(scores[:, 1].mean())


# --------------------------------------------------------------------------------------------------
# Texts to windows, and answers to positions


class Window(NamedTuple):
    """Token IDs of a question and the words start .. stop-1 of its context.

    ids[offset] is word `start` of the context, ids[offset + 1] the next one.
    """

    ids: np.ndarray  # int32 (L at most,)
    offset: int
    start: int
    stop: int


def sliding_windows(question, context, length):
    """Cut a long context into overlapping windows, each behind the question. [BERT run_squad.py]

    Every word of the context is in some window.

    Args:
        question, context: int32 (n,) and (m,), token IDs. A question is cut to half of the room.
        length: int, L, at least 8: two words of each.

    Returns:
        list of Window.
    """
    if length < 8:
        raise ValueError(f"length: expected 8 or more, got {length}.")
    # [CLS] question [SEP] [SEP] context [SEP]: four special tokens, three before the context
    question = question[:(length - 4) // 2]
    room = length - 4 - len(question)
    # words between starts, never more than room. run_squad.py uses 128 where L is 384
    stride = length // 3
    windows = []
    start = 0
    while True:
        stop = min(start + room, len(context))
        ids, _ = build_inputs(question, context[start:stop], length)
        windows.append(Window(ids, len(question) + 3, start, stop))
        if stop == len(context):
            return windows
        start += stride


def cut_windows(pairs, tokenizer, length):
    """Cut questions and their contexts into sliding windows.

    Args:
        pairs: list of (question, context).
        tokenizer: HashTokenizer.
        length: int, L.

    Returns:
        windows: list of W (number of the question, Window).
        spans: list of n, the (start, end) in characters of each word of a question's context.
        num_cut: int, the questions that were cut.
    """
    windows = []
    spans = []
    num_cut = 0
    last_context = None
    for number, (question, context) in enumerate(pairs):
        # questions about one context follow each other: it is split once
        if context != last_context:
            words, context_spans = tokenizer.split(context)
            context_ids = tokenizer.ids(words)
            last_context = context
        words, _ = tokenizer.split(question)
        for window in sliding_windows(tokenizer.ids(words), context_ids, length):
            windows.append((number, window))
        if window.offset < len(words) + 3:  # special tokens before the context
            num_cut += 1
        spans.append(context_spans)
    return windows, spans, num_cut


def label_windows(rows, windows, spans):
    """Find the first answer to each question in its windows.

    Args:
        rows: as read_squad returns them.
        windows, spans: as cut_windows returns them.

    Returns:
        targets: int64 (W, 2), the positions of the answer's first and last word; (0, 0), the
            [CLS], where the window lacks a part of the answer.
        num_lost: int, the answers that are whole in no window.
    """
    answer_words = {}  # question -> the words of its answer, as numbers of words of the context
    for number, ((_, context), answers) in enumerate(rows):
        if answers:
            text, start = answers[0]
            answer_words[number] = find_answer_words(context, spans[number], text, start)
    targets = np.zeros((len(windows), 2), np.int64)
    found = set()  # questions with the whole answer in some window
    for i, (number, window) in enumerate(windows):
        words = answer_words.get(number)
        if words and window.start <= words[0] and words[-1] < window.stop:
            shift = window.offset - window.start  # from words to positions
            targets[i] = [words[0] + shift, words[-1] + shift]
            found.add(number)
    return targets, len(answer_words) - len(found)


def find_answer_words(context, spans, text, start):
    """Return list of int, the words of a context that an answer touches.

    Args:
        context: str.
        spans: list of (start, end), characters of each of its words.
        text, start: str and int, the answer and the character where it stands, or nearly so.
    """
    start = find_place(context, text, start)
    if start is None:
        return []
    end = start + len(text)
    return [i for i, span in enumerate(spans) if span[0] < end and span[1] > start]


def mark_contexts(windows, logits):
    """Return bool (B, L), the positions of the context in each window.

    Args:
        windows: list of B (number of the question, Window).
        logits: float (B, L, 2), of these windows.
    """
    is_context = torch.zeros(logits.shape[:2], dtype=torch.bool)
    for row, (_, window) in enumerate(windows):
        size = window.stop - window.start
        is_context[row, window.offset:window.offset + size] = True
    return send(is_context, logits.device)


# --------------------------------------------------------------------------------------------------
# Scores of positions to answers


def find_answers(pairs, windows, spans, batches, allow_no_answer):
    """Find the best answer to each question by a model's scores of all its windows.

    The highest span of all windows of a question counts, and the lowest "no answer".

    Args:
        pairs: list of n (question, context).
        windows, spans: as cut_windows returns them.
        batches: iterable of (indices of windows, logits (B, L, 2)): of all windows, in any order.
        allow_no_answer: bool, an answer that scores no more than none becomes "".

    Returns:
        list of n str; and float (n,), the score of each answer minus that of none.
    """
    best = np.full(len(pairs), -np.inf)
    null = np.full(len(pairs), np.inf)
    texts = [""] * len(pairs)
    for indices, logits in batches:
        chosen = [windows[i] for i in indices]
        is_context = mark_contexts(chosen, logits)
        found = best_spans(logits, is_context, MAX_ANSWER)  # four tensors (B,)
        found = [values.tolist() for values in found]
        for (number, window), score, first, last, no_answer in zip(chosen, *found):
            null[number] = min(null[number], no_answer)
            if score > best[number]:
                best[number] = score
                _, context = pairs[number]
                texts[number] = read_span(context, spans[number], window, first, last)
    margins = best - null
    if allow_no_answer:
        texts = [text if margin > 0 else "" for text, margin in zip(texts, margins)]
    return texts, margins


def read_span(context, spans, window, first, last):
    """Return the text of a context from position `first` of a window to position `last`."""
    shift = window.offset - window.start  # from words to positions
    start, _ = spans[first - shift]  # in characters
    _, end = spans[last - shift]
    return context[start:end].strip()  # a piece of BPE begins with the space before it


def best_spans(logits, is_context, max_words):
    """Find the best span of each window exactly: first <= last, the largest sum of both scores.

    Args:
        logits: float32 (B, L, 2), scores of start and end. In bfloat16 many sums tie.
        is_context: bool (B, L), positions that may answer.
        max_words: int, words of the longest span.

    Returns:
        score: float (B,), -inf without a context.
        first, last: int64 (B,), positions of the span's words.
        null: float (B,), the score of "no answer", which is [CLS] to [CLS].
    """
    null = logits[:, 0].sum(1)  # (B,)
    logits = logits.masked_fill(~is_context.unsqueeze(-1), -torch.inf)
    start = logits[..., 0]  # (B, L)
    end = logits[..., 1]

    # spans[:, i, j] = start[i] + end[i + j], for the j + 1 words from position i on. Three words,
    # two in a span at most:  s0 + e0  s0 + e1 | s1 + e1  s1 + e2 | s2 + e2  -inf
    end = F.pad(end, (0, max_words - 1), value=-torch.inf)  # no span ends behind the window
    next_ends = end.unfold(1, max_words, 1)  # (B, L, max_words): at i are end[i], end[i + 1], ...
    spans = start.unsqueeze(-1) + next_ends
    score, best = spans.flatten(1).max(1)  # (B,)
    first = best // max_words
    last = first + best % max_words
    return score, first, last, null


# --------------------------------------------------------------------------------------------------
# Scores of the official scripts


def list_truths(answers, allow_no_answer):
    """Return the right answers to a question, each a list of normalized words."""
    truths = [normalize_answer(text) for text, _ in answers]
    if allow_no_answer:  # as the official script: punctuation alone is no answer
        truths = [truth for truth in truths if truth]
        if not truths:
            truths = [[]]
    return truths


def normalize_answer(text):
    """Return words without case, punctuation, articles: "The U.S. Army!" -> us army. [SQ §6]"""
    text = text.lower().translate(PUNCTUATION)
    return ARTICLES.sub(" ", text).split()


def exact_and_f1(answer, truths, allow_no_answer=True):
    """Return exact match and F1, 0 to 1, of an answer against the best truth.

    Args:
        answer: list of str, normalized words.
        truths: list of such lists.
        allow_no_answer: bool, [] is no answer and right where a truth is []. As the script of v2.
    """
    best_f1 = 0.0
    for truth in truths:
        if answer and truth:
            # a word counts as often as both have it
            num_common = (collections.Counter(answer) & collections.Counter(truth)).total()
            f1 = 2 * num_common / (len(answer) + len(truth))
        else:
            f1 = float(allow_no_answer and answer == truth)
        best_f1 = max(best_f1, f1)
    return float(answer in truths), best_f1
