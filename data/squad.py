"""SQuAD: which words of a text answer a question? Reader, windows, best spans, exact match and F1.

Paper map:    [SQ §6] normalize_answer (Rajpurkar et al. 2018)   [BERT §4.2] QuestionAnswering
Out of scope: training (finetune.py); tasks with one label per text (data/tasks.py).
Deviations:   1. Words of the question are no candidates for an answer, neither in training nor after it.
Notation:     B batch   L positions   W windows
"""

import collections
import re
import string

import numpy as np
import torch
import torch.nn.functional as F

from data.tasks import PARTS, read_source
from runtime import InputError
from tokenizer import sliding_windows

SQUAD = {"squad": ("v1.1", 87_599, 10_570), "squad_v2": ("v2.0", 130_319, 11_873)}  # questions of train, dev
ARTICLES, PUNCTUATION = re.compile(r"\b(a|an|the)\b"), str.maketrans("", "", string.punctuation)


def read_squad(name, args):
    """Return train and dev of SQUAD[name]: lists of dict(id, question, context, answers [(text, start)])."""
    (version, *sizes), splits = SQUAD[name], []
    for split, expected in zip(("train", "dev"), sizes):
        names = [f"{split}-{version}", f"squad-{version}-{split}"]
        rows, source = read_source(args, split, "", names, f"rajpurkar/{name}", split)
        questions = parse_questions(rows, source)
        if name == "squad" and not all(question["answers"] for question in questions):
            raise InputError(f"{source}: expected an answer to each question. Use --task squad_v2.")
        if not questions or len(questions) != expected and not args.train:
            raise InputError(f"{source}: expected {expected:,} questions, got {len(questions):,}. {PARTS}")
        splits.append(questions)
    return splits


def parse_questions(rows, source):
    """Return the questions of rows, nested as published or flat as on the hub; source is named in errors."""
    questions = []
    try:
        if rows and "paragraphs" in rows[0]:
            paragraphs = [part for article in rows for part in article["paragraphs"]]
            rows = [qa | dict(context=part["context"]) for part in paragraphs for qa in part["qas"]]
        for row in rows:
            a = row["answers"]  # {text: list, answer_start: list}, or a list of {text, answer_start}
            if not isinstance(a, dict):
                a = {key: [answer[key] for answer in a] for key in ("text", "answer_start")}
            about = {key: row[key] for key in ("id", "question", "context")}
            kinds = set(map(type, [*about.values()] + a["text"])), set(map(type, a["answer_start"])) | {int}
            if kinds != ({str}, {int}) or min(a["answer_start"], default=0) < 0:
                raise TypeError("not all are strings, or starts from 0 on")
            questions.append(about | dict(answers=list(zip(a["text"], a["answer_start"], strict=True))))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{source}, question {len(questions) + 1:,}: expected id, question, context and "
                         f"answers as in SQuAD ({error!r}).") from error
    if len({question["id"] for question in questions}) < len(questions):
        raise InputError(f"{source}: expected a distinct id for each question.")
    return questions


def normalize_answer(text):
    """Return the words without case, punctuation and articles: "The U.S. Army!" -> us army. [SQ §6]"""
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def exact_and_f1(answer, truths, allow_no_answer=True):
    """Return exact match and F1, 0 to 1, of normalized words against the best truth; v2: [] is no answer."""
    best = 0.0
    for truth in truths:
        common = sum((collections.Counter(answer) & collections.Counter(truth)).values())
        is_right = allow_no_answer and answer == truth  # where one of them has no words
        best = max(best, 2 * common / (len(answer) + len(truth)) if answer and truth else float(is_right))
    return float(answer in truths), best


def best_spans(logits, is_context, num_best, max_words):
    """Find the best spans of each window exactly: pairs start <= end with the largest sum of both scores.

    Args: logits float (B, L, 2), scores of start and end; is_context bool (B, L), positions that may answer;
        num_best, max_words int, spans n of a window, and words of the longest.
    Returns: scores float (B, n), starts and ends int64 (B, n), best first, -inf where there are fewer; null
        float (B,), the score of "no answer", which is [CLS] to [CLS].
    """
    null = logits[:, 0].float().sum(1)
    start, end = logits.float().masked_fill(~is_context.unsqueeze(-1), -torch.inf).unbind(-1)  # (B, L) each
    max_words = min(max_words, is_context.shape[1])
    # start i with each of the max_words ends from i on
    pairs = start.unsqueeze(-1) + F.pad(end, (0, max_words - 1), value=-torch.inf).unfold(1, max_words, 1)
    scores, best = pairs.flatten(1).topk(min(num_best, pairs[0].numel()))  # (B, n), of (B, L·max_words)
    starts = best // max_words
    return scores, starts, starts + best % max_words, null


def find_answer_words(spans, text, start):
    """Return the (first, last) word that an answer at character `start` touches, or None."""
    begins, ends = np.reshape(spans, (-1, 2)).T
    first, last = np.searchsorted(ends, start, "right"), np.searchsorted(begins, start + len(text)) - 1
    return (first, last) if first <= last else None


def span_loss(logits, targets):
    """Return the mean cross-entropy of start and end, over [CLS] and the words of the context.

    Args: logits, float (B, L, 2); targets, int64 (B, 4): start, end, the context's position and length.
    """
    start, end, first, count = targets.unsqueeze(-1).unbind(1)  # (B, 1) each
    position = torch.arange(logits.shape[1], device=logits.device)
    is_candidate = (position == 0) | (position >= first) & (position < first + count)  # (B, L)
    logits = logits.masked_fill(~is_candidate.unsqueeze(-1), -torch.inf)
    return (F.cross_entropy(logits[..., 0], start[:, 0]) + F.cross_entropy(logits[..., 1], end[:, 0])) / 2


def score_answers(scores, silent, margins):
    """Return F1 and EM in percent where margins above 0 answer, and with this set's best threshold.

    Args: scores and silent, float (n, 2), EM and F1 of spans, and of no answer; margins, float (n,).
    """
    order = np.argsort(-margins, kind="stable")
    margin = margins[order]
    ends = np.flatnonzero(np.append(margin[1:] < margin[:-1], True))  # equal margins answer together
    gain = np.cumsum((scores - silent)[order, 1])[ends]
    threshold = float(margin[ends[gain.argmax()]] if gain.max() > 0 else margin[0] + 1)
    em, f1 = (100 * np.where((margins > 0)[:, None], scores, silent).mean(0)).tolist()
    best_em, best_f1 = (100 * np.where((margins >= threshold)[:, None], scores, silent).mean(0)).tolist()
    return dict(f1=f1, em=em, best_f1=best_f1, best_em=best_em, threshold=threshold)


class QuestionAnswering:
    """Which words of a text answer a question? [BERT §4.2]

    A text that is too long is read in windows that overlap; a window without the answer points to [CLS].

    Args: train, dev as read_squad returns them; tokenizer HashTokenizer, learns the words; length int L;
        stride int, words from one window to the next (default: a third of L); max_words int, the longest
        answer (default: 30); limit int, training questions, drawn at random (default: all); allow_no_answer
        bool, some questions have no answer (v2).
    Attributes: examples, list of int32 IDs; targets, int64 (W, 4), see span_loss.
    Argument predict of methods: function(examples) -> (indices, logits (B, L, 2)) of batches.
    """

    head, num_outputs, has_one_text, metric, loss = "span", 2, False, "f1", staticmethod(span_loss)
    columns = ["question", "context", "answers"]

    def __init__(self, train, dev, tokenizer, length, stride, max_words, limit=None, allow_no_answer=False):
        self.tokenizer, self.length, self.questions, self.n = tokenizer, length, dev, len(dev)
        self.stride, self.max_words = stride or max(1, length // 3), max_words or 30
        if not all(type(value) is int and value > 0 for value in (self.stride, self.max_words)):
            raise InputError(f"stride, max_words: expected 1 or more, got {stride!r} and {max_words!r}.")
        train = [train[i] for i in np.sort(np.random.default_rng(0).permutation(len(train))[:limit or None])]
        self.rows = dict(train=len(train), dev=self.n)
        self.examples, places, spans = self.split_questions(train)
        # first and last word of each answer that is where it says; no window reaches back to word -1
        answers = [question["answers"] and question["context"].startswith(*question["answers"][0])
                   and find_answer_words(words, *question["answers"][0]) or (-1, -1)
                   for question, words in zip(train, spans)]
        number, first, start, stop = places.T  # (W,) each
        a, b = np.array(answers)[number].T
        is_inside = (start <= a) & (b < stop)
        positions = np.where(is_inside, [a + first - start, b + first - start], 0)  # 0: [CLS]
        self.targets = np.array([*positions, first, stop - start]).T.copy()
        self.num_lost = sum(bool(question["answers"]) for question in train) - len({*number[is_inside]})
        self.windows, self.places, self.spans = self.split_questions(dev)
        self.truths = [[normalize_answer(text) for text, _ in question["answers"]] for question in dev]
        self.allow_no_answer = allow_no_answer
        if allow_no_answer:  # as the official script: nothing but punctuation is no answer
            self.truths = [[truth for truth in truths if truth] or [[]] for truths in self.truths]
        self.notes = (f"{len(train):,} questions, {len(self.examples):,} windows, {self.num_lost:,} answers "
                      f"found in none; an evaluation reads {len(self.windows):,}")

    def split_questions(self, questions):
        """Cut the questions and their contexts into sliding windows.

        Returns: windows, list of int32 IDs; places int64 (W, 4), the question's number, and first, start,
            stop of sliding_windows; spans, of each question the character spans of its context's words.
        """
        windows, places, spans, context = [], [], [], None
        for number, question in enumerate(questions):
            if question["context"] != context:  # the questions about one text follow each other
                context = question["context"]
                words, spans_of_context = self.tokenizer.split(context)
                context_ids = self.tokenizer.ids(words)
            question_ids = self.tokenizer.ids(self.tokenizer.split(question["question"])[0])
            for ids, *place in sliding_windows(question_ids, context_ids, self.length, self.stride):
                windows.append(ids)
                places.append((number, *place))
            spans.append(spans_of_context)
        return windows, np.array(places), spans

    def answers(self, predict):
        """Return the best answer to each dev question, and float (n,), its score minus that of no answer."""
        best, null = np.full(self.n, -np.inf), np.full(self.n, np.inf)
        chosen = np.zeros((self.n, 2), np.int64)  # first and last word of the context
        for batch, logits in predict(self.windows):
            question, first, start, stop = self.places[batch].T  # (B,) each
            position = np.arange(logits.shape[1])
            is_context = (position >= first[:, None]) & (position < (first + stop - start)[:, None])  # (B, L)
            spans = best_spans(logits, torch.from_numpy(is_context).to(logits.device), 1, self.max_words)
            score, a, b, none = (t.reshape(-1).cpu().numpy() for t in spans)
            np.minimum.at(null, question, none)
            for q, value, *words in zip(question, score, a + start - first, b + start - first):
                if value > best[q]:
                    best[q], chosen[q] = value, words
        texts = [question["context"][spans[a][0]:spans[b][1]].strip() if spans else ""
                 for question, spans, (a, b) in zip(self.questions, self.spans, chosen.tolist())]
        return texts, best - null

    def score(self, texts):
        """Return float (n, 2), EM and F1 of an answer to each question."""
        return np.array([exact_and_f1(normalize_answer(text), truths, self.allow_no_answer)
                         for text, truths in zip(texts, self.truths)])

    def evaluate(self, predict):
        """Return a dict of scores in percent, and "no answer" if nothing else is predicted, or None."""
        texts, margins = self.answers(predict)
        scores = self.score(texts)
        if self.allow_no_answer:
            constant_prediction = None if (margins > 0).any() else "no answer"
            return score_answers(scores, self.score([""] * self.n), margins), constant_prediction
        return dict(zip(("f1", "em"), (100 * scores.mean(0)[::-1]).tolist())), None

    def submission(self, predict):
        """Return the official predictions: dict of question ID -> answer, "" where there is none."""
        texts, margins = self.answers(predict)
        return {question["id"]: text if not self.allow_no_answer or margin > 0 else ""
                for question, text, margin in zip(self.questions, texts, margins)}

    def baselines(self):
        """Return the F1 in percent of giving no answer, as majority."""
        return dict(majority=100 * float(self.score([""] * self.n)[:, 1].mean()), bag_of_words=None)

    def description(self):
        """Return what infer.py has to know, as plain types."""
        return dict(head=self.head, labels=None, pair=True, stride=self.stride, longest=self.max_words,
                    null=self.allow_no_answer)
