"""What finetune.py asks of the rows of a split as token IDs: the base class of a task's examples.

    SequenceClassification   texts with a label, data/classification.py
    QuestionAnswering        questions and answers, data/squad.py

Out of scope: the rows (data/tasks.py), training (finetune.py).
"""


class Examples:
    """The rows of a split as token IDs; they score a model's logits.

    A row is what is scored: a text, a pair of texts, or a question. An example is what a model
    reads at once. A text is one example; a question has one for each window of its context.

    Args:
        task: data.tasks.Task, as read_task returns it.
        rows: list of (texts, label), those of the split.
        tokenizer: HashTokenizer, which learns the words.
        length: int, the most positions of an example.

    Attributes:
        ids: list of int32 arrays, the token IDs of each example.
        num_rows: int.
        num_outputs: int, the outputs of a model, or of each position.
        notes: str, what was lost, such as words that did not fit.
    """

    head = None  # of the model, a key of model.HEADS
    has_control = False  # whether each row has one number, `targets`, that a bag of words can learn

    def __init__(self, task, rows, tokenizer, length):
        self.task = task
        self.tokenizer = tokenizer
        self.length = length
        self.num_rows = len(rows)

    def loss(self, logits, indices):
        """Return the mean loss to train on, a tensor.

        Args:
            logits: float32 (B, ...), a model's outputs for B examples.
            indices: int64 (B,), which examples these are.
        """
        raise NotImplementedError

    def evaluate(self, batches):
        """Return the scores of a model, and what it predicts.

        Args:
            batches: list of (indices, logits), as for loss: all examples once, in any order.

        Returns:
            scores: dict, metric -> percent; and eval_loss.
            predicted: list of num_rows classes, numbers or answers.
        """
        raise NotImplementedError

    def majority(self, train):
        """Return the score in percent that needs no model; train: Examples, the training rows."""
        raise NotImplementedError
