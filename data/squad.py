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

from common import InputError, blame_file
from data.corpus import reader_options
from data.tasks import Task, read_source
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
        args: Namespace with the flags train, dev, data_dir, encoding and sep.

    Returns:
        Task; the training rows; and dict, dev -> rows to score. The texts of a row are question
        and context, its label is a list of the answers, (text, start).

    Raises:
        InputError: a file cannot be read, or is not as SQuAD.
    """
    splits = {}
    # flags come first, then the original files, then the hub
    for split, path in (("train", args.train), ("dev", args.dev)):
        if not path and args.data_dir:
            path = os.path.join(args.data_dir, f"{split}-{SQUAD[name]}.json")
        records, source = read_source(path, (f"rajpurkar/{name}",), split, **reader_options(args))
        with blame_file(source):
            rows = list(parse_questions(records))
        if not rows:
            raise InputError(f"{source}: expected questions, got none.")
        # v1 has no score for "no answer": such a question could not be answered right
        if name == "squad" and not all(answers for _, answers in rows):
            raise InputError(f"{source}: expected an answer to each question. Use --task squad_v2.")
        splits[split] = rows
    train = splits.pop("train")
    # group_start: questions about one context, the second text, stay together
    task = Task(["question", "context"], None, ["f1"], "answers", group_start=1)
    return task, train, splits


def parse_questions(records):
    """Yield a row per question, from files as published or from the flat records of the hub.

        file   {"paragraphs": [{"context": ..., "qas": [{"question": ..., "answers": ...}, ...]}]}
        hub    {"context": ..., "question": ..., "answers": ...}
    """
    for record in records:
        # a flat record is its own paragraph and its own question
        for paragraph in record.get("paragraphs", [record]):
            for question in paragraph.get("qas", [paragraph]):
                answers = parse_answers(question["answers"])
                texts = (require_text(question["question"]), require_text(paragraph["context"]))
                yield texts, answers


def parse_answers(answers):
    """Return list of (text, start). A file has a list of dicts, the hub a dict of lists."""
    if isinstance(answers, list):
        texts = [answer["text"] for answer in answers]
        starts = [answer["answer_start"] for answer in answers]
    else:
        texts = answers["text"]
        starts = answers["answer_start"]
    pairs = zip(texts, starts, strict=True)
    return [(require_text(text), int(start)) for text, start in pairs]


def require_text(value):
    """Return value if it is a str. read_squad reports the TypeError as one of the file."""
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r:.60}")
    return value


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
    null = logits[:, 0].sum(1)  # (B,)
    logits = logits.masked_fill(~is_context.unsqueeze(-1), -torch.inf)
    start = logits[..., 0]  # (B, L)
    end = logits[..., 1]

    # pairs[:, i, j] is the span of j + 1 words from i on: start[i] + end[i + j]
    max_words = min(max_words, end.shape[1])
    end = F.pad(end, (0, max_words - 1), value=-torch.inf)  # no span ends behind the window
    next_ends = end.unfold(1, max_words, 1)  # (B, L, max_words): at i are end[i], end[i + 1], ...
    pairs = start.unsqueeze(-1) + next_ends  # (B, L, max_words)
    pairs = pairs.flatten(1)
    scores, best = pairs.topk(min(num_best, pairs.shape[1]))  # (B, S)
    starts = best // max_words
    ends = starts + best % max_words
    return scores, starts, ends, null


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


def find_answer_words(spans, text, start):
    """Return list of int, the words that an answer at character `start` touches.

    Args:
        spans: list of (start, end), characters of each word.
        text, start: str and int, the answer and where it stands.
    """
    end = start + len(text)
    return [i for i, span in enumerate(spans) if span[0] < end and span[1] > start]


def find_first_answer(row, spans):
    """Return the words of a context in which its row's first answer is, list of int.

    It is empty where the row has no answer, or the context has another text in its place.
    """
    (_, context), answers = row
    if not answers:
        return []
    text, start = answers[0]
    if not context.startswith(text, start):
        return []
    return find_answer_words(spans, text, start)


def find_targets(rows, places, spans):
    """Find the first answer to each question in its windows.

    Args:
        rows: as read_squad returns them.
        places, spans: as split_questions returns them.

    Returns:
        int64 (W, 4), see span_loss; and int, answers that are in no window, or are misplaced.
    """
    words_of_answers = [find_first_answer(row, part) for row, part in zip(rows, spans)]
    targets = []
    found = set()  # questions with the whole answer in some window
    for number, first, start, stop in places.tolist():
        words = words_of_answers[number]
        target = (0, 0)  # [CLS]
        if words and start <= words[0] and words[-1] < stop:
            shift = first - start  # from words of the context to positions
            target = (words[0] + shift, words[-1] + shift)
            found.add(number)
        targets.append((*target, first, stop - start))
    num_answered = sum(len(answers) > 0 for _, answers in rows)
    return np.array(targets), num_answered - len(found)


class QuestionAnswering:
    """Rows of SQuAD as token IDs: which words of a text answer a question? [BERT §4.2]

    A text that is too long is read in windows that overlap. A window without the answer points to
    [CLS].

    Args:
        task: Task, as read_squad returns it.
        rows: list of ((question, context), answers), one split.
        tokenizer: HashTokenizer, which learns the words.
        length: int, L.
        stride: int, words from one window to the next. None: a third of L.
        max_words: int, the longest answer. None: 30.
        allow_no_answer: bool, some questions have no answer (v2).

    Attributes:
        examples: list of int32 token IDs, the W windows of the questions.
        targets: int64 (W, 4), see span_loss.
        places: int64 (W, 4), and spans: see split_questions.
        truths: for each question its right answers, see list_truths.
        notes: str, what was lost.
    """

    head = "span"
    num_outputs = 2
    has_bag = False
    loss = staticmethod(span_loss)

    def __init__(self, task, rows, tokenizer, length, stride=None, max_words=None,
                 allow_no_answer=False):
        if stride is None:
            stride = max(1, length // 3)
        if max_words is None:
            max_words = 30
        self.task = task
        self.tokenizer = tokenizer
        self.length = length
        self.stride = stride
        self.max_words = max_words
        self.allow_no_answer = allow_no_answer
        self.rows = rows
        self.truths = [self.list_truths(answers) for _, answers in rows]
        self.examples, self.places, self.spans = self.split_questions()
        self.targets, self.num_lost = find_targets(rows, self.places, self.spans)
        self.notes = f"{len(self.examples):,} windows, {self.num_lost:,} answers found in none"

    def list_truths(self, answers):
        """Return the right answers to a question, each a list of normalized words."""
        truths = [normalize_answer(text) for text, _ in answers]
        if self.allow_no_answer:  # as the official script: punctuation alone is no answer
            truths = [truth for truth in truths if truth]
            if not truths:
                truths = [[]]
        return truths

    def split_questions(self):
        """Cut the questions and their contexts into sliding windows.

        Returns:
            windows, list of W int32 token IDs; places, int64 (W, 4): the question's number, then
            first, start, stop of its Window; and for each question the spans of its context's
            words.
        """
        windows = []
        places = []
        spans = []
        last_context = None
        for number, ((question, context), _) in enumerate(self.rows):
            if context != last_context:  # questions about one text follow each other: split it once
                words, context_spans = self.tokenizer.split(context)
                context_ids = self.tokenizer.ids(words)
                last_context = context
            words, _ = self.tokenizer.split(question)
            question_ids = self.tokenizer.ids(words)
            cut = sliding_windows(question_ids, context_ids, self.length, self.stride)
            for window in cut:
                windows.append(window.ids)
                places.append((number, window.first, window.start, window.stop))
            spans.append(context_spans)
        return windows, np.array(places), spans

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
            numbers, first, start, stop = places.unbind(1)
            is_context = mark_context(logits, first, stop - start)
            scores, starts, ends, nulls = best_spans(logits, is_context, 1, self.max_words)
            shift = start - first  # from positions to words of the context
            windows = zip(
                numbers.tolist(),
                nulls.tolist(),
                scores[:, 0].tolist(),
                (starts[:, 0] + shift).tolist(),
                (ends[:, 0] + shift).tolist(),
            )
            for number, no_answer, score, first_word, last_word in windows:
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
            batches: iterable of (indices, logits (B, L, 2)): of all windows, in any order.

        Returns:
            dict of the scores in percent and eval_loss; and the answers, list of str, "" for none.
        """
        batches = list(batches)  # read twice; of SQuAD's dev set some tens of MB
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

    def name_constant(self, texts):
        """Return "no answer" if that is all that is given, else None."""
        if self.allow_no_answer and not any(texts):
            return "no answer"
        return None

    def majority(self, train):
        """Return the F1 in percent of giving no answer.

        Its name and argument are those of SequenceClassification, whose majority stands in the
        same place of results.json.
        """
        silent = self.score([""] * len(self.rows))
        return 100 * float(silent[:, 1].mean())

    def description(self):
        """Return what infer.py has to know, as plain types."""
        options = dict(stride=self.stride, longest=self.max_words, null=self.allow_no_answer)
        return self.task.description() | options
