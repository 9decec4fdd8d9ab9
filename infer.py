"""Look inside a trained model: find what is wrong in a text, fill its gaps, find a word's neighbours.

    python infer.py --ckpt out/proj-lsh "the arrays have same the shape"       which words are misplaced?
    python infer.py --ckpt out/lookup-bpe-mlm "Return the [MASK] of a list."    what stands there?
    python infer.py --ckpt out/proj-lsh --near initalization                    which words look like it?
    python infer.py --ckpt out/proj-lsh                                        asks for text after text

Sources   [HF] Xue & Aletras 2022, HashFormers   [BERT] Devlin et al. 2019
Map       [HF §3.6] detect   [BERT §3.1] fill   [HF §3.3] neighbours
Not here  scores over a data set (pretrain.py evaluates; this reads one text).
Departs   1. A word never seen is hashed like any other: there is no [UNK] but in a lookup table.
Letters   L positions   V candidate words   d width
"""

import argparse
import sys

import torch

from hashing import CLS, FIRST, MASK, SEP, SPECIALS, UNK, Encoder, InputError
from model import ConfigError, choose_machine, load_checkpoint, load_model

CLASSES = ("intact", "shuffled", "random")
COLOURS = {"shuffled": "\033[33m", "random": "\033[31m"}  # yellow, red


class Reader:
    """A checkpoint made ready to read texts."""

    def __init__(self, path, device="cpu"):
        """in: path of a checkpoint or its folder; device str"""
        checkpoint = load_checkpoint(path)
        self.model = load_model(checkpoint).to(device)
        self.encoder = Encoder.load(checkpoint["encoder"])
        self.words = checkpoint.get("words", [])  # the commonest of the corpus
        self.config = checkpoint["config"]

    def read(self, text):
        """Split a text and give it to the model as [CLS] words [SEP]; a literal [MASK] is the mask.

        in:  text str
        out: words list[str], spans list[(start, end)], ids int64 (1, L) with L = words + 2;
             the model knows their codes
        """
        words, spans, ids, start, mask = [], [], [CLS], 0, SPECIALS[MASK]
        # A BPE piece holds the space before it and knows what it touches: split the whole text, with letters
        # in place of each mask. Words touch nothing: split what stands between the masks.
        whole = self.encoder.split(text.replace(mask, "x" * len(mask))) if self.encoder.bpe else None
        for i, part in enumerate(text.split(mask)):
            end = start + len(part)
            if whole is None:
                found, places = self.encoder.split(part)
                places = [(start + a, start + b) for a, b in places]
            else:
                stop = end - text[:end].endswith(" ") if i < text.count(mask) else end  # the mask's own space
                pairs = [(word, span) for word, span in zip(*whole) if start <= span[0] and span[1] <= stop]
                found, places = [word for word, _ in pairs], [span for _, span in pairs]
            last = i == text.count(mask)
            words += found + [mask] * (not last)
            spans += places + [(end, end + len(mask))] * (not last)
            ids += self.encoder.ids(found).tolist() + [MASK] * (not last)
            start = end + len(mask)
        if not words:
            raise InputError("the text has no words")
        ids.append(SEP)
        self.model.set_codes(torch.from_numpy(self.encoder.codes()))
        return words, spans, torch.tensor([ids], device=self.model.positions.weight.device)

    @torch.no_grad()
    def detect(self, text):
        """For each word, whether it seems intact, shuffled or random. [HF §3.6]

        in:  text str
        out: words, spans, probabilities float (words, 3) in the order of CLASSES
        err: ConfigError when the model was not trained with --objective sr, or the text is too long for it
        """
        if self.config.head != "sr":
            raise ConfigError(f"this model was trained for {self.config.head}: finding misplaced words "
                              f"needs one trained with --objective sr")
        words, spans, ids = self.read(text)
        return words, spans, self.model(ids).softmax(-1)[0, 1:-1].cpu()

    @torch.no_grad()
    def fill(self, text, k):
        """The likeliest pieces for each [MASK]. [BERT §3.1]

        in:  text str with [MASK]; k int
        out: list, one per mask, of k pairs (piece, probability)
        err: InputError without a [MASK]; ConfigError when the model was not trained with --objective mlm
        """
        if self.config.head != "mlm":
            raise ConfigError(f"this model was trained for {self.config.head}: filling a [MASK] "
                              f"needs one trained with --emb lookup --objective mlm")
        _, _, ids = self.read(text)
        at = (ids.flatten() == MASK).nonzero().squeeze(1)
        if not len(at):
            raise InputError('nothing to fill: write [MASK] where a word is missing, '
                             'as in "the [MASK] statement"')
        logits = self.model(ids, at=at)
        logits[:, :FIRST - 1] = -torch.inf  # the rows of the specials
        best = logits.softmax(-1).topk(min(k, logits.shape[1]))
        return [[(self.encoder.words[row + 1 - FIRST], p) for row, p in zip(rows, ps)]  # row = id - 1
                for rows, ps in zip(best.indices.tolist(), best.values.tolist())]

    @torch.no_grad()
    def neighbours(self, word, k, among=None):
        """The words whose embedding is most like a word's, no context. [HF §3.3]

        in:  word str, seen or not; k int; among list[str], default the corpus's 50,000 commonest words
        out: k pairs (word, cosine), the cosine of the vectors less their mean over the candidates

        Under LSH a misspelling finds its word; under MD5 strangers, for their bits have nothing in common.
        """
        pieces, _ = self.encoder.split(word)
        if len(pieces) != 1:
            raise InputError(f"{word!r} is {len(pieces)} words or pieces to this model ({' '.join(pieces)}): "
                             f"give it one that is whole")
        [word] = pieces
        among = [w for w in (self.words if among is None else among) if w != word]
        if not among:
            raise InputError("there are no words to look among")
        ids = self.encoder.ids([word] + among)
        if ids[0] == UNK:
            raise InputError(f"{word!r} is not in this model's vocabulary: "
                             f"a lookup table has no vector for it")
        self.model.set_codes(torch.from_numpy(self.encoder.codes()))
        device = self.model.positions.weight.device
        vectors = self.model.embed(torch.from_numpy(ids)[None].to(device))[0]  # (1+V, d)
        vectors = torch.nn.functional.normalize(vectors - vectors.mean(0), dim=-1)
        best = (vectors[1:] @ vectors[0]).topk(min(k, len(among)))
        return [(among[i], cosine) for i, cosine in zip(best.indices.tolist(), best.values.tolist())]


def show_detected(words, spans, probabilities, text, colour):
    """in: what detect() gave, the text, colour or not; prints the text, then the suspects, worst first"""
    guesses = [CLASSES[i] for i in probabilities.argmax(-1).tolist()]
    line, last = "", 0
    for (start, end), guess in zip(spans, guesses):
        word = text[start:end]
        if guess != "intact":
            word = f"{COLOURS[guess]}{word}\033[0m" if colour else f"{{{word}:{guess}}}"
        line, last = line + text[last:start] + word, end
    print(line + text[last:])
    order = sorted(range(len(words)), key=lambda i: probabilities[i, 0].item())
    for i in order[:8]:
        shown = "   ".join(f"{name} {p:5.1%}" for name, p in zip(CLASSES, probabilities[i].tolist()))
        print(f"  {words[i]:>16}   {shown}")


def answer(reader, text, args):
    """Print what the model has to say of one text."""
    if args.near:
        for word, cosine in reader.neighbours(text, args.top_k):
            print(f"  {word.replace('Ġ', ' '):>16}   {cosine:.3f}")
    elif reader.config.head == "mlm":
        for place, best in enumerate(reader.fill(text, args.top_k), 1):
            print(f"[MASK] {place}")
            for piece, p in best:
                print(f"  {piece.replace('Ġ', ' '):>16}   {p:6.1%}")
    else:
        show_detected(*reader.detect(text), text, sys.stdout.isatty())


def main(argv=None):
    """in: argv list[str] or None for the command line. Bad input exits with code 2."""
    p = argparse.ArgumentParser(description=__doc__.split("\nSources")[0],
                                formatter_class=argparse.RawDescriptionHelpFormatter,
                                usage="python infer.py --ckpt DIR [flags] [TEXT]        "
                                      "(--help explains them)")
    p.add_argument("text", nargs="?", help="the text; without it, texts are asked for until the input ends")
    p.add_argument("--ckpt", required=True, metavar="DIR",
                   help="folder of a run of pretrain.py, or its ckpt.pt; it says what model this is, "
                        "so there are no flags for that")
    p.add_argument("--near", action="store_true",
                   help="TEXT is a word: show the words nearest to it in the embedding")
    p.add_argument("--top_k", type=int, default=8, metavar="k", help="how many answers (default 8)")
    p.add_argument("--device", default="cpu", metavar="NAME",
                   help="cpu or cuda (default cpu: one text is quick)")
    args = p.parse_args(argv)
    try:
        args.dtype, args.compile = "float32", False
        device, _, _ = choose_machine(args)
        if args.top_k < 1:
            raise InputError(f"--top_k {args.top_k}: wanted 1 or more")
        reader = Reader(args.ckpt, device)
        if args.text is not None:
            return answer(reader, args.text, args)
    except (InputError, ConfigError) as error:
        print(f"infer.py: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    while True:
        try:
            answer(reader, input("> "), args)
        except EOFError:
            return print()
        except (InputError, ConfigError) as error:  # one bad line does not end the conversation
            print(f"infer.py: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
