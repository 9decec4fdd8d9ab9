"""SQuAD: which words of a text answer a question? Reader, windows, best spans, exact match and F1.

Paper map:    [SQ §6] normalize_answer (Rajpurkar et al. 2018)   [BERT §4.2] QuestionAnswering
Out of scope: training (finetune.py); tasks with one label per text (data/tasks.py).
Deviations:   1. Words of the question are no candidates for an answer, neither in training nor after it.
Notation:     B batch   L positions   W windows
"""

import bisect
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
    version, *sizes = SQUAD[name]
    splits = []
    for split, expected in zip(("train", "dev"), sizes):
        names, on_hub = [f"{split}-{version}", f"squad-{version}-{split}"], split.replace("dev", "validation")
        rows, source = read_source(args, split, "", names, f"rajpurkar/{name}", on_hub)
        try:
            questions = parse_questions(rows)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{source}: expected id, question, context and answers as in SQuAD, got others "
                             f"({type(error).__name__}: {error}).") from error
        if name == "squad" and not all(question["answers"] for question in questions):
            raise InputError(f"{source}: expected an answer to each question. Use --task squad_v2.")
        if not questions or len(questions) != expected and not args.train:
            raise InputError(f"{source}: expected {expected:,} questions, got {len(questions):,}. {PARTS}")
        splits.append(questions)
    return splits


def parse_questions(rows):
    """Return the questions of rows, nested as published or flat as on the hub."""
    if rows and "paragraphs" in rows[0]:
        paragraphs = [part for article in rows for part in article["paragraphs"]]
        rows = [qa | dict(context=part["context"]) for part in paragraphs for qa in part["qas"]]
    questions = []
    for row in rows:
        a = row["answers"]  # {text: list, answer_start: list}, or a list of {text, answer_start}
        texts, starts = ((a[key] if isinstance(a, dict) else [answer[key] for answer in a])
                         for key in ("text", "answer_start"))
        if not all(isinstance(text, str) for text in (row["question"], row["context"], *texts)):
            raise TypeError(f"question {row['id']} has a text that is not a string")
        questions.append(dict(id=row["id"], question=row["question"], context=row["context"],
                              answers=list(zip(texts, map(int, starts)))))
    return questions


def normalize_answer(text):
    """Return the words without case, punctuation and articles: "The U.S. Army!" -> us army. [SQ §6]"""
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def exact_and_f1(answer, truths, allow_no_answer=True):
    """Return exact match and F1, 0 to 1, of normalized words against the best truth; v2: [] is no answer."""
    best = 0.0
    for truth in truths:
        common = sum((collections.Counter(answer) & collections.Counter(truth)).values())
        num_words = len(answer) + len(truth)
        f1 = 2 * common / num_words if answer and truth else float(allow_no_answer and num_words == 0)
        best = max(best, f1)
    return float(answer in truths), best


def best_spans(logits, is_context, num_best, max_words):
    """Find the best spans of each window exactly: pairs start <= end with the largest sum of both scores.

    Args:
        logits: float (B, L, 2), scores of start and end. is_context: bool (B, L), positions that may answer.
        num_best, max_words: int, spans n of a window, and words of the longest.

    Returns:
        scores float (B, n), starts and ends int64 (B, n), best first, -inf where there are fewer; null
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
    first = bisect.bisect_right([end for _, end in spans], start)
    last = bisect.bisect_left([begin for begin, _ in spans], start + len(text)) - 1
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

    Args:
        train, dev, tokenizer, length: as read_squad returns them; HashTokenizer, which learns the words; L.
        stride: int, words from one window to the next, None for a third of L.
        max_words: int, the longest answer, None for 30.
        limit: int, training questions, drawn at random (default: all).
        allow_no_answer: bool, some questions have no answer (v2).

    Attributes: examples, list of int32 IDs; targets, int64 (W, 4), see span_loss.
    Argument predict of methods: function(examples) -> (indices, logits (B, L, 2)) of batches.
    """

    head, num_outputs, metric, loss = "span", 2, "f1", staticmethod(span_loss)

    def __init__(self, train, dev, tokenizer, length, stride, max_words, limit=None, allow_no_answer=False):
        self.tokenizer, self.length, self.questions, self.n = tokenizer, length, dev, len(dev)
        self.stride, self.max_words, self.contexts = stride or max(1, length // 3), max_words or 30, {}
        if limit and limit < len(train):
            train = [train[i] for i in np.sort(np.random.default_rng(0).permutation(len(train))[:limit])]
        self.examples, targets, self.num_lost = [], [], 0
        for question in train:
            windows, spans = self.split_question(question)
            answer = find_answer_words(spans, *question["answers"][0]) if question["answers"] else None
            is_lost = bool(question["answers"])
            for ids, first, start, stop in windows:
                target = 0, 0
                if answer is not None and start <= answer[0] and answer[1] < stop:
                    target, is_lost = (first + answer[0] - start, first + answer[1] - start), False
                self.examples.append(ids)
                targets.append((*target, first, stop - start))
            self.num_lost += is_lost
        self.targets, self.windows, self.spans, places = np.array(targets, np.int64), [], [], []
        for number, question in enumerate(dev):
            windows, spans = self.split_question(question)
            self.windows += [ids for ids, *_ in windows]
            places += [(number, *place) for _, *place in windows]
            self.spans.append(spans)
        self.places = np.array(places)  # (W, 4): question; first, start, stop of sliding_windows
        self.truths = [[normalize_answer(text) for text, _ in question["answers"]] for question in dev]
        self.allow_no_answer = allow_no_answer
        if allow_no_answer:  # as the official script: nothing but punctuation is no answer
            self.truths = [[truth for truth in truths if truth] or [[]] for truths in self.truths]
        self.notes = (f"{len(train):,} questions, {len(self.examples):,} windows, {self.num_lost:,} answers "
                      f"in none; an evaluation reads {len(self.windows):,}")

    def split_question(self, question):
        """Return the sliding windows of a question, and the character spans of its context's words."""
        context = question["context"]
        if context not in self.contexts:  # the questions about one text follow each other
            words, spans = self.tokenizer.split(context)
            self.contexts = {context: (self.tokenizer.ids(words), spans)}
        ids, spans = self.contexts[context]
        question_ids = self.tokenizer.ids(self.tokenizer.split(question["question"])[0])
        return sliding_windows(question_ids, ids, self.length, self.stride), spans

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
            for row, q in enumerate(question):
                null[q] = min(null[q], none[row])
                if score[row] > best[q]:
                    shift = start[row] - first[row]
                    best[q], chosen[q] = score[row], (a[row] + shift, b[row] + shift)
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
        em, f1 = (100 * scores.mean(0)).tolist()
        return dict(f1=f1, em=em), None

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
