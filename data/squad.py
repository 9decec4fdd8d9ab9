"""SQuAD: find the words of a text that answer a question, as BERT does it. [BERT §4.2]

    question, context -> windows [CLS] question [SEP] [SEP] part of the context [SEP]
    window, answer -> start and end of the answer, or [CLS] where the window does not have it
    window -> model -> scores of start and end (L, 2) -> best span
    best spans of all windows of a question -> answer, or none

Sources:
    [SQ] Rajpurkar et al. 2018, SQuAD 2.0
    [BERT] Devlin et al. 2019, and its code, run_squad.py
Out of scope: training (finetune.py); tasks with one label per text (data/tasks.py).
Deviations:
    1. Words of the question are no candidates for an answer, neither in training nor after it.
Notation:
    B batch   L positions   W windows   n questions
"""

import collections
import re
import string

import numpy as np
import torch
import torch.nn.functional as F

from common import InputError, blame_file
from data.rows import note_once
from data.tasks import Task, divide_rows, parse_rows, read_records
from tokenizer import sliding_windows

SQUAD = {"squad": "v1.1", "squad_v2": "v2.0"}
MAX_ANSWER = 30  # words of the longest answer, max_answer_length of run_squad.py
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


# --------------------------------------------------------------------------------------------------
# Files and the hub to rows


def read_squad(name, args):
    """Read the questions of --train and --dev, or of the original files, or from the hub.

    Args:
        name: str, a key of SQUAD.
        args: Namespace with the flags train, dev, data_dir, limit, select, and of the reader.

    Returns:
        Task; and dict, split -> rows: train, select where it has any, and dev. The texts of a row
        are question and context, its label is a list of the answers, (text, start).

    Raises:
        InputError: a file cannot be read, or is not as SQuAD.
    """
    task = Task(["question", "context"], None, ["f1"], "answers")
    splits = {}
    for split in ("train", "dev"):
        original = f"{split}-{SQUAD[name]}.json"
        records, source = read_records(args, split, original, (f"rajpurkar/{name}",))
        with blame_file(source):
            questions = list(list_questions(records))
        rows = parse_rows(questions, task, source, parse_answers)
        # v1 has no score for "no answer": such a question could not be answered right
        if name == "squad" and not all(answers for _, answers in rows):
            raise InputError(f"{source}: expected an answer to each question. Use --task squad_v2.")
        if split == "train":
            rows = drop_misplaced(rows, source)
        splits[split] = rows
    # questions about one context, the second text, stay together
    return task, divide_rows(splits["train"], args, start=1) | dict(dev=splits["dev"])


def list_questions(records):
    """Yield a flat record per question, as the hub has them, of files as published, too.

        file   {"paragraphs": [{"context": ..., "qas": [{"question": ..., "answers": ...}, ...]}]}
        hub    {"context": ..., "question": ..., "answers": ...}
    """
    for record in records:
        # a flat record is its own paragraph and its own question
        for paragraph in record.get("paragraphs", [record]):
            for question in paragraph.get("qas", [paragraph]):
                yield paragraph | question


def parse_answers(cell, task, place):
    """Return list of (text, start): the label of a row, as parse_label of data/tasks.py is."""
    try:
        if isinstance(cell, dict):  # of lists, on the hub
            answers = list(zip(cell["text"], cell["answer_start"], strict=True))
        else:
            answers = [(answer["text"], answer["answer_start"]) for answer in cell]
        is_good = all(type(text) is str and type(start) is int for text, start in answers)
    except (KeyError, TypeError, ValueError):
        is_good = False
    if not is_good:
        raise InputError(f'{place}: expected {task.label_column} as [{{"text": "a", '
                         f'"answer_start": 0}}], or [] for none, got {cell!r:.99}.')
    return answers


def find_place(context, text, start):
    """Return the character of a context where a text stands, nearest to start; None: nowhere."""
    if context.startswith(text, start):
        return start
    places = [match.start() for match in re.finditer(f"(?={re.escape(text)})", context)]
    return min(places, key=lambda place: abs(place - start), default=None)


def drop_misplaced(rows, source):
    """Return the training rows without those whose answer is not in their context, and say so.

    They would be trained as "no answer". Starts may be a little wrong, such as those counted in
    UTF-16, where an emoji is two characters: label_windows takes the nearest place of the answer.
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


# --------------------------------------------------------------------------------------------------
# Rows to windows and labels


def cut_windows(rows, tokenizer, length, stride):
    """Cut the questions and their contexts into sliding windows.

    Returns:
        windows, list of W int32 token IDs; places, int64 (W, 4): the question's number, then
        first, start, stop of its Window; and for each question the spans of its context's words.
    """
    windows = []
    places = []
    spans = []
    last_context = None
    for number, ((question, context), _) in enumerate(rows):
        if context != last_context:  # questions about one text follow each other: split it once
            words, context_spans = tokenizer.split(context)
            context_ids = tokenizer.ids(words)
            last_context = context
        words, _ = tokenizer.split(question)
        for window in sliding_windows(tokenizer.ids(words), context_ids, length, stride):
            windows.append(window.ids)
            places.append((number, window.first, window.start, window.stop))
        spans.append(context_spans)
    return windows, np.array(places), spans


def label_windows(rows, places, spans):
    """Find the first answer to each question in its windows.

    Args:
        rows: as read_squad returns them.
        places, spans: as cut_windows returns them.

    Returns:
        int64 (W, 4), start and end of the answer, [CLS] in windows that have not all of it, and
        position and length of the context; and int, answers that are whole in no window.
    """
    words_of_answers = []
    for ((_, context), answers), context_spans in zip(rows, spans):
        words = []
        if answers:
            text, start = answers[0]
            words = find_answer_words(context_spans, text, find_place(context, text, start))
        words_of_answers.append(words)
    labels = []
    found = set()  # questions with the whole answer in some window
    for number, first, start, stop in places.tolist():
        words = words_of_answers[number]
        label = (0, 0)  # [CLS]
        if words and start <= words[0] and words[-1] < stop:
            shift = first - start  # from words of the context to positions
            label = (words[0] + shift, words[-1] + shift)
            found.add(number)
        labels.append((*label, first, stop - start))
    num_answered = sum(len(answers) > 0 for _, answers in rows)
    return np.array(labels), num_answered - len(found)


def find_answer_words(spans, text, start):
    """Return list of int, the words that an answer at character `start` touches.

    Args:
        spans: list of (start, end), characters of each word.
        text, start: str and int, the answer and where it stands; None: nowhere.
    """
    if start is None:
        return []
    end = start + len(text)
    return [i for i, span in enumerate(spans) if span[0] < end and span[1] > start]


# --------------------------------------------------------------------------------------------------
# Loss, and the best span


def mark_context(logits, first, count):
    """Return bool (B, L), the positions of the context: `count` from `first` on, int64 (B,)."""
    position = torch.arange(logits.shape[1], device=logits.device)  # (L,)
    first = first[:, None]  # (B, 1)
    count = count[:, None]
    return (position >= first) & (position < first + count)


def span_loss(logits, targets):
    """Return the mean cross-entropy of start and end, over [CLS] and the words of the context.

    Args:
        logits: float (B, L, 2).
        targets: int64 (B, 4), start, end, and position and length of the context.
    """
    start, end, first, count = targets.unbind(1)  # (B,)
    # words of the question and padding cannot be right: they take no part in the softmax
    is_candidate = mark_context(logits, first, count)  # (B, L)
    is_candidate[:, 0] = True
    logits = logits.masked_fill(~is_candidate.unsqueeze(-1), -torch.inf)
    start_loss = F.cross_entropy(logits[..., 0], start)
    end_loss = F.cross_entropy(logits[..., 1], end)
    return (start_loss + end_loss) / 2


def best_spans(logits, is_context, max_words):
    """Find the best span of each window exactly: start <= end, the largest sum of both scores.

    Args:
        logits: float (B, L, 2), scores of start and end.
        is_context: bool (B, L), positions that may answer.
        max_words: int, words of the longest span.

    Returns:
        score float, start and end int64, (B,), -inf without a context; and null float (B,), the
        score of "no answer", which is [CLS] to [CLS].
    """
    logits = logits.float()  # in bfloat16 many sums tie
    null = logits[:, 0].sum(1)  # (B,)
    logits = logits.masked_fill(~is_context.unsqueeze(-1), -torch.inf)
    start = logits[..., 0]  # (B, L)
    end = logits[..., 1]

    # pairs[:, i, j] is the span of j + 1 words from i on: start[i] + end[i + j]
    max_words = min(max_words, end.shape[1])
    end = F.pad(end, (0, max_words - 1), value=-torch.inf)  # no span ends behind the window
    next_ends = end.unfold(1, max_words, 1)  # (B, L, max_words): at i are end[i], end[i + 1], ...
    pairs = start.unsqueeze(-1) + next_ends  # (B, L, max_words)
    score, best = pairs.flatten(1).max(1)  # (B,)
    start = best // max_words
    return score, start, start + best % max_words, null


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


def score_answers(scores, silent, margins):
    """Return the scores of a model that gives an answer only where its margin is high enough.

    Args:
        scores, silent: float (n, 2), EM and F1 of each answer, and of giving none in its place.
        margins: float (n,), score of the answer minus that of none.

    Returns:
        dict: f1 and em, in percent, of answers with margins above 0; best_f1 and best_em, each of
        answers with margins from that threshold on which is best for it and these questions; and
        threshold, that of best_f1.
    """
    def score(is_answered):
        """Return EM and F1 in percent."""
        chosen = np.where(is_answered[:, None], scores, silent)  # (n, 2)
        return (100 * chosen.mean(0)).tolist()

    em, f1 = score(margins > 0)
    gains = scores - silent  # (n, 2), of an answer over none
    best_em, _ = score(margins >= choose_threshold(gains[:, 0], margins))
    threshold = choose_threshold(gains[:, 1], margins)
    _, best_f1 = score(margins >= threshold)
    return dict(f1=f1, em=em, best_f1=best_f1, best_em=best_em, threshold=threshold)


def choose_threshold(gains, margins):
    """Return the threshold, float, from which on answers have the largest sum of gains, (n,)."""
    # lower the threshold step by step; answers of equal margins are given in one step
    negative_margins, step = np.unique(-margins, return_inverse=True)
    totals = np.append(0, np.bincount(step, gains)).cumsum()  # 0: where nothing is answered
    thresholds = np.append(margins.max() + 1, -negative_margins)
    return float(thresholds[totals.argmax()])


# --------------------------------------------------------------------------------------------------
# All of it


class QuestionAnswering:
    """Rows of SQuAD as token IDs: which words of a text answer a question?

    A text that is too long is read in windows that overlap.

    Args:
        task: Task, as read_squad returns it.
        rows: list of ((question, context), answers), one split.
        tokenizer: HashTokenizer, which learns the words.
        length: int, L.
        allow_no_answer: bool, some questions have no answer (v2).

    Attributes:
        examples, places, spans: see cut_windows.
        targets: int64 (W, 4), see label_windows.
        truths: for each question its right answers, see list_truths.
        notes: str, what was lost.
    """

    head = "span"
    num_outputs = 2
    loss = staticmethod(span_loss)

    def __init__(self, task, rows, tokenizer, length, allow_no_answer=False):
        self.task = task
        self.rows = rows
        self.tokenizer = tokenizer
        self.length = length
        self.allow_no_answer = allow_no_answer
        self.truths = [list_truths(answers, allow_no_answer) for _, answers in rows]
        stride = max(1, length // 3)  # words; doc_stride of run_squad.py, 128 of 384
        self.examples, self.places, self.spans = cut_windows(rows, tokenizer, length, stride)
        self.targets, num_lost = label_windows(rows, self.places, self.spans)
        self.notes = f"{len(self.examples):,} windows, {num_lost:,} answers found in none"

    def __len__(self):
        return len(self.rows)

    def answers(self, batches):
        """Return the best answer to each question, and its score minus that of none, (n,).

        Of all windows of a question the highest span counts, and the lowest "no answer".

        Args:
            batches: as evaluate reads them.
        """
        best = np.full(len(self.rows), -np.inf)
        null = np.full(len(self.rows), np.inf)
        texts = [""] * len(self.rows)
        for indices, logits in batches:
            places = torch.from_numpy(self.places[indices]).to(logits.device)  # (B, 4)
            numbers, first, start, stop = places.unbind(1)  # (B,)
            is_context = mark_context(logits, first, stop - start)
            scores, starts, ends, nulls = best_spans(logits, is_context, MAX_ANSWER)
            shift = start - first  # from positions to words of the context
            windows = torch.stack([numbers, starts + shift, ends + shift], 1).tolist()
            for window, score, no_answer in zip(windows, scores.tolist(), nulls.tolist()):
                number, first_word, last_word = window
                null[number] = min(null[number], no_answer)
                if score > best[number]:
                    best[number] = score
                    texts[number] = self.cut_answer(number, first_word, last_word)
        return texts, best - null

    def cut_answer(self, number, first_word, last_word):
        """Return the text of a question's context from one word to another."""
        (_, context), _ = self.rows[number]
        spans = self.spans[number]
        start, _ = spans[first_word]
        _, end = spans[last_word]
        return context[start:end].strip()  # a piece of BPE begins with the space before it

    def score(self, texts):
        """Return float (n, 2), EM and F1 of an answer to each question."""
        scores = []
        for text, truths in zip(texts, self.truths):
            answer = normalize_answer(text)
            scores.append(exact_and_f1(answer, truths, self.allow_no_answer))
        return np.array(scores)

    def evaluate(self, batches):
        """Score the answers of a model.

        Args:
            batches: list of (indices, logits (B, L, 2)): of all windows, in any order.

        Returns:
            dict of the scores in percent and eval_loss; and the answers, list of str, "" for none.
        """
        total_loss = 0.0
        for indices, logits in batches:
            targets = torch.from_numpy(self.targets[indices]).to(logits.device)
            total_loss += span_loss(logits, targets).item() * len(indices)
        texts, margins = self.answers(batches)
        scores = self.score(texts)
        if self.allow_no_answer:
            silent = self.score([""] * len(texts))
            result = score_answers(scores, silent, margins)
            texts = [text if margin > 0 else "" for text, margin in zip(texts, margins)]
        else:
            em, f1 = (100 * scores.mean(0)).tolist()
            result = dict(f1=f1, em=em)
        result["eval_loss"] = total_loss / len(self.examples)
        return result, texts

    def majority(self, train):
        """Return the F1 in percent of giving no answer, as SequenceClassification.majority does."""
        silent = self.score([""] * len(self.rows))
        return 100 * float(silent[:, 1].mean())

    def description(self):
        """Return what infer.py has to know, as plain types."""
        return self.task.description() | dict(null=self.allow_no_answer)
