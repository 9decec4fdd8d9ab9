"""SQuAD: find the words of a text that answer a question. Reader, windows, spans, scores.

Paper map:
    [SQ §6] normalize_answer
    [BERT §4.2] QuestionAnswering
Sources:
    [SQ] Rajpurkar et al. 2018, SQuAD 2.0
    [BERT] Devlin et al. 2019
Out of scope: training (finetune.py); tasks with one label per text (data/tasks.py).
Deviations:
    1. Words of the question are no candidates for an answer, neither in training nor after it.
Notation:
    B batch   L positions   W windows   S spans of a window   n questions

    question, context -> windows [CLS] question [SEP] [SEP] part of the context [SEP]
    window -> scores of start and end (L, 2) -> best span; of all windows the best one answers
"""

import collections
import os
import re
import string

import numpy as np
import torch
import torch.nn.functional as F

from common import InputError
from data.tasks import read_source
from tokenizer import sliding_windows

SQUAD = {"squad": "v1.1", "squad_v2": "v2.0"}
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


# --------------------------------------------------------------------------------------------------
# Reading


def read_squad(name, args):
    """Read the questions of --train and --dev, or of the original files, or from the hub.

    Args:
        name: str, a key of SQUAD.
        args: Namespace with the flags train, dev and data_dir.

    Returns:
        train and dev: lists of dict, question, context, and answers: list of (text, start).

    Raises:
        InputError: a file cannot be read, or is not as SQuAD.
    """
    splits = []
    # flags come first, then the original files, then the hub
    for split, path in (("train", args.train), ("dev", args.dev)):
        if not path and args.data_dir:
            path = os.path.join(args.data_dir, f"{split}-{SQUAD[name]}.json")
        rows, source = read_source(path, (f"rajpurkar/{name}",), split)
        questions = []
        try:
            for row in list_questions(rows):
                questions.append(parse_question(row))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{source}, question {len(questions) + 1:,}: expected question, "
                             f"context and answers as in SQuAD ({error!r}).") from error
        # v1 has no score for "no answer": such a question could not be answered right
        if not questions:
            raise InputError(f"{source}: expected questions, got none.")
        if name == "squad" and not all(question["answers"] for question in questions):
            raise InputError(f"{source}: expected an answer to each question. Use --task squad_v2.")
        splits.append(questions)
    return splits


def list_questions(rows):
    """Yield a row per question: nested as published, or flat as on the hub."""
    for row in rows:
        if "paragraphs" not in row:
            yield row
            continue
        for paragraph in row["paragraphs"]:
            for question in paragraph["qas"]:
                yield question | dict(context=paragraph["context"])


def parse_question(row):
    """Return dict of question, context and answers [(text, start)]. It raises whatever is wrong."""
    answers = row["answers"]
    if isinstance(answers, dict):  # on the hub
        pairs = list(zip(answers["text"], answers["answer_start"], strict=True))
    else:
        pairs = [(answer["text"], answer["answer_start"]) for answer in answers]
    question = row["question"]
    context = row["context"]
    texts = [question, context, *[text for text, _ in pairs]]
    are_texts = all(isinstance(text, str) for text in texts)
    are_starts = all(type(start) is int for _, start in pairs)
    if not are_texts or not are_starts:
        raise ValueError("not all are texts, and whole numbers of characters")
    return dict(question=question, context=context, answers=pairs)


# --------------------------------------------------------------------------------------------------
# Scores of the official scripts


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
    best = 0.0
    for truth in truths:
        # a word counts as often as both have it
        common = collections.Counter(answer) & collections.Counter(truth)
        if answer and truth:
            f1 = 2 * common.total() / (len(answer) + len(truth))
        else:
            f1 = float(allow_no_answer and answer == truth)
        best = max(best, f1)
    return float(answer in truths), best


def score_answers(scores, silent, margins):
    """Return scores where margins above 0 answer, and with the best threshold of these questions.

    Args:
        scores, silent: float (n, 2), EM and F1 of the answers, and of giving none.
        margins: float (n,), score of the answer minus that of none.

    Returns:
        dict: f1 and em, in percent; best_f1, best_em, and threshold, the margin from which on to
        answer.
    """
    def score(is_answered):
        """Return EM and F1 in percent."""
        chosen = np.where(is_answered[:, None], scores, silent)  # (n, 2)
        return (100 * chosen.mean(0)).tolist()

    em, f1 = score(margins > 0)
    best_threshold = margins.max() + 1  # nothing is answered
    best_em, best_f1 = score(margins >= best_threshold)
    # every other threshold there is: two seconds for the dev set of v2
    for threshold in np.unique(margins)[::-1]:
        scores_here = score(margins >= threshold)
        if scores_here[1] > best_f1:
            best_threshold = threshold
            best_em, best_f1 = scores_here
    return dict(f1=f1, em=em, best_f1=best_f1, best_em=best_em, threshold=float(best_threshold))


# --------------------------------------------------------------------------------------------------
# Spans


def best_spans(logits, is_context, num_best, max_words):
    """Find the best spans of each window exactly: start <= end, the largest sum of both scores.

    Args:
        logits: float (B, L, 2), scores of start and end.
        is_context: bool (B, L), positions that may answer.
        num_best: int, S, spans of a window.
        max_words: int, words of the longest span.

    Returns:
        scores float (B, S), starts and ends int64 (B, S), best first, -inf where there are fewer;
        and null float (B,), the score of "no answer", which is [CLS] to [CLS].
    """
    logits = logits.float()  # in bfloat16 many sums tie
    null = logits[:, 0].sum(1)
    start, end = logits.masked_fill(~is_context.unsqueeze(-1), -torch.inf).unbind(-1)  # (B, L)
    # column j of row i of pairs: start i, end i + j, for j below max_words; so start <= end
    max_words = min(max_words, is_context.shape[1])
    end = F.pad(end, (0, max_words - 1), value=-torch.inf)
    pairs = start.unsqueeze(-1) + end.unfold(1, max_words, 1)  # (B, L, max_words)
    pairs = pairs.flatten(1)
    scores, best = pairs.topk(min(num_best, pairs.shape[1]))  # (B, S)
    starts = best // max_words
    ends = starts + best % max_words
    return scores, starts, ends, null


def find_answer_words(spans, text, start):
    """Return the (first, last) word that an answer at character `start` touches, or None.

    Args:
        spans: list of (start, end), characters of each word.
        text, start: str and int, the answer and where it stands.
    """
    touched = []
    for number, (word_start, word_end) in enumerate(spans):
        if word_start < start + len(text) and word_end > start:
            touched.append(number)
    if not touched:
        return None
    return touched[0], touched[-1]


def find_targets(questions, places, spans):
    """Find the answers of questions in their windows.

    Args:
        questions: list of dict, as read_squad returns them.
        places, spans: as split_questions returns them.

    Returns:
        int64 (W, 4), see span_loss; and int, answers that are in no window, or are misplaced.
    """
    answers = []  # first and last word of each question's first answer, or None
    for question, words in zip(questions, spans):
        answer = None
        if question["answers"]:
            text, start = question["answers"][0]
            if question["context"].startswith(text, start):
                answer = find_answer_words(words, text, start)
        answers.append(answer)

    # the positions of the answer in each window that has all of it
    targets = []
    found = set()
    for number, first, start, stop in places:
        target = (0, 0)  # [CLS]
        if answers[number] is not None:
            a, b = answers[number]
            if start <= a and b < stop:
                target = (first + a - start, first + b - start)
                found.add(number)
        targets.append((*target, first, stop - start))
    num_answered = sum(len(question["answers"]) > 0 for question in questions)
    return np.array(targets), num_answered - len(found)


def span_loss(logits, targets):
    """Return the mean cross-entropy of start and end, over [CLS] and the words of the context.

    Args:
        logits: float (B, L, 2).
        targets: int64 (B, 4), start, end, and position and length of the context.
    """
    start, end, first, count = targets.unbind(1)  # (B,)
    position = torch.arange(logits.shape[1], device=logits.device)
    is_context = (position >= first[:, None]) & (position < (first + count)[:, None])  # (B, L)
    # words of the question and padding cannot be right: they take no part in the softmax
    is_candidate = is_context | (position == 0)
    logits = logits.masked_fill(~is_candidate.unsqueeze(-1), -torch.inf)
    return (F.cross_entropy(logits[..., 0], start) + F.cross_entropy(logits[..., 1], end)) / 2


class QuestionAnswering:
    """Which words of a text answer a question? [BERT §4.2]

    A text that is too long is read in windows that overlap. A window without the answer points to
    [CLS]. A `predict` that methods take is a function(examples) that yields (indices, logits
    (B, L, 2)) of batches in any order.

    Args:
        train, dev: as read_squad returns them.
        tokenizer: HashTokenizer, which learns the words.
        length: int, L.
        stride: int, words from one window to the next. None: a third of L.
        max_words: int, the longest answer. None: 30.
        limit: int, training questions, drawn at random. None: all.
        allow_no_answer: bool, some questions have no answer (v2).

    Attributes:
        examples: list of int32 token IDs, the W windows of the training questions.
        targets: int64 (W, 4), see span_loss.
        n: int, questions whose score counts.
    """

    head = "span"
    num_outputs = 2
    has_one_text = False
    metric = "f1"
    columns = ["question", "context", "answers"]
    loss = staticmethod(span_loss)

    def __init__(self, train, dev, tokenizer, length, stride=None, max_words=None, limit=None,
                 allow_no_answer=False):
        if stride is None:
            stride = max(1, length // 3)
        if max_words is None:
            max_words = 30
        self.tokenizer = tokenizer
        self.length = length
        self.stride = stride
        self.max_words = max_words
        self.allow_no_answer = allow_no_answer

        if limit is not None:  # the same for all seeds
            chosen = np.sort(np.random.default_rng(0).permutation(len(train))[:limit])
            train = [train[i] for i in chosen]
        self.questions = dev
        self.n = len(dev)
        self.rows = dict(train=len(train), dev=self.n)
        self.truths = [self.list_truths(question) for question in dev]
        # subtle: train is read first, as the tokenizer numbers words by first appearance
        self.examples, places, spans = self.split_questions(train)
        self.targets, self.num_lost = find_targets(train, places, spans)
        self.windows, self.places, self.spans = self.split_questions(dev)
        self.notes = (f"{len(train):,} questions, {len(self.examples):,} windows, "
                      f"{self.num_lost:,} answers found in none; an evaluation reads "
                      f"{len(self.windows):,}")

    def list_truths(self, question):
        """Return the right answers to a question, each a list of normalized words."""
        truths = [normalize_answer(text) for text, _ in question["answers"]]
        if self.allow_no_answer:  # as the official script: punctuation alone is no answer
            truths = [truth for truth in truths if truth]
            if not truths:
                truths = [[]]
        return truths

    def split_questions(self, questions):
        """Cut the questions and their contexts into sliding windows.

        Returns:
            windows, list of W int32 token IDs; places, list of W (question's number, first, start,
            stop), see sliding_windows; and spans, for each question those of its context's words.
        """
        windows = []
        places = []
        spans = []
        context = None
        for number, question in enumerate(questions):
            if question["context"] != context:  # the questions about one text follow each other
                context = question["context"]
                words, context_spans = self.tokenizer.split(context)
                context_ids = self.tokenizer.ids(words)
            words, _ = self.tokenizer.split(question["question"])
            question_ids = self.tokenizer.ids(words)
            for ids, *place in sliding_windows(question_ids, context_ids, self.length, self.stride):
                windows.append(ids)
                places.append((number, *place))
            spans.append(context_spans)
        return windows, places, spans

    def answers(self, predict):
        """Return the best answer to each dev question, and its score minus no answer's, (n,)."""
        best = np.full(self.n, -np.inf)
        null = np.full(self.n, np.inf)
        texts = [""] * self.n
        # of the windows of a question: the highest span, and the lowest "no answer"
        for indices, logits in predict(self.windows):
            places = [self.places[i] for i in indices]
            # a batch may have windows of several questions
            is_context = torch.zeros(logits.shape[:2], dtype=torch.bool)
            for row, (_, first, start, stop) in zip(is_context, places):
                row[first:first + stop - start] = True
            is_context = is_context.to(logits.device)
            scores, starts, ends, nulls = best_spans(logits, is_context, 1, self.max_words)
            spans = zip(scores[:, 0].tolist(), starts[:, 0].tolist(), ends[:, 0].tolist())
            for place, (score, a, b), none in zip(places, spans, nulls.tolist()):
                number, first, start, _ = place
                null[number] = min(null[number], none)
                if score > best[number]:
                    best[number] = score
                    # position a of the window is word start + a - first of the context
                    words = self.spans[number]
                    begin = words[start + a - first][0]
                    end = words[start + b - first][1]
                    texts[number] = self.questions[number]["context"][begin:end].strip()
        return texts, best - null

    def score(self, texts):
        """Return float (n, 2), EM and F1 of an answer to each question."""
        scores = []
        for text, truths in zip(texts, self.truths):
            answer = normalize_answer(text)
            scores.append(exact_and_f1(answer, truths, self.allow_no_answer))
        return np.array(scores)

    def evaluate(self, predict):
        """Return a dict of scores in percent, and "no answer" if nothing else is given, or None."""
        texts, margins = self.answers(predict)
        scores = self.score(texts)
        if not self.allow_no_answer:
            em, f1 = (100 * scores.mean(0)).tolist()
            return dict(f1=f1, em=em), None
        silent = self.score([""] * self.n)
        constant_prediction = "no answer"
        if (margins > 0).any():
            constant_prediction = None
        return score_answers(scores, silent, margins), constant_prediction

    def baselines(self):
        """Return the F1 in percent of giving no answer, as majority."""
        silent = self.score([""] * self.n)
        return dict(majority=100 * float(silent[:, 1].mean()), bag_of_words=None)

    def description(self):
        """Return what infer.py has to know, as plain types."""
        return dict(head=self.head, labels=None, pair=True, stride=self.stride,
                    longest=self.max_words, null=self.allow_no_answer)
