"""Rows of token ids for training: windows of source and packed arithmetic lines.

What it does: turns the corpus into endless shuffled rows that start as prompts do (the
beginning-of-sequence token, then the start of a line), with a weight per predicted token.
What it does not do: see held-out sources or products, except in the evaluation rows it builds
on request.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from training import corpus
from training.tokenizer import BOS_ID, encode_plain, row_ends

QUESTION_WEIGHT = 0.1
ANSWER_WEIGHT = 2.0
AUXILIARY_SHARE = 0.2


@dataclass(frozen=True)
class Batch:
    """Input ids, the ids that follow them, and the weight of each prediction."""

    ids_BT: Tensor
    next_BT: Tensor
    weights_BT: Tensor


class SourceRows:
    """Endless windows over a set of sources, every token covered once per pass, in an order of the seed."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, sources: list[corpus.SourceFile], seed: int) -> None:
        self.files = [encode_plain(tokenizer, source.text) for source in sources]
        self.row_ends = row_ends(tokenizer)
        self.rng = random.Random(seed)
        pieces = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
        self.ends_line = [piece.endswith("\n") for piece in pieces]
        self.breaks_line = ["\n" in piece and not end for piece, end in zip(pieces, self.ends_line, strict=True)]
        self.waiting: dict[int, list[list[int]]] = {}

    def _pass(self, length: int) -> list[list[int]]:
        """Cuts all files, in a new order, into rows of length + 1 that start at line starts."""
        bos, eos = self.row_ends.bos, self.row_ends.eos
        stream: list[int] = []
        for file in self.rng.sample(self.files, len(self.files)):
            stream += [bos, *file, eos]
        starts = [0]
        for position, token in enumerate(stream):
            if self.ends_line[token] or token == eos:
                starts.append(position + 1)
            elif self.breaks_line[token]:
                starts.append(position)
        rows, begin, index = [], starts[self.rng.randrange(20)], 0
        while begin + length + 1 < len(stream):
            row = stream[begin : begin + length + 1]
            rows.append(row if row[0] == bos else [bos, *row[:-1]])
            limit = begin + length - 1
            while index + 1 < len(starts) and starts[index + 1] <= limit:
                index += 1
            begin = starts[index] if starts[index] > begin else limit
        self.rng.shuffle(rows)
        return rows

    def take(self, count: int, length: int) -> list[list[int]]:
        """Returns the next rows of length + 1 tokens."""
        waiting = self.waiting.setdefault(length, [])
        while len(waiting) < count:
            waiting.extend(self._pass(length))
        taken, self.waiting[length] = waiting[:count], waiting[count:]
        return taken


class ArithmeticRows:
    """Endless rows of packed multiplication lines, in an order of the seed, with some auxiliary lines between them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)
        self.equals = encode_plain(tokenizer, " =")[0]
        self.lines = [encode_plain(tokenizer, line) for line in corpus.seen_product_lines()]
        self.stream = self._stream()

    def _stream(self) -> Iterator[list[int]]:
        while True:
            for line in self.rng.sample(self.lines, len(self.lines)):
                while self.rng.random() < AUXILIARY_SHARE:
                    yield encode_plain(self.tokenizer, corpus.auxiliary_line(self.rng))
                yield line

    def _weights(self, line: list[int]) -> list[float]:
        """Weights the question low, since nobody can predict it, and the answer high."""
        question = line.index(self.equals) + 2
        return [QUESTION_WEIGHT] * question + [ANSWER_WEIGHT] * (len(line) - question)

    def take(self, count: int, length: int) -> tuple[list[list[int]], list[list[float]]]:
        """Returns rows of length + 1 tokens and the weights of predicting each but the first."""
        rows, weights = [], []
        for _ in range(count):
            row, weight = [BOS_ID], [0.0]
            while len(row) < length + 1:
                line = next(self.stream)
                row += line
                weight += self._weights(line)
            rows.append(row[: length + 1])
            weights.append(weight[1 : length + 1])
        return rows, weights


class Mixture:
    """The training mixture: source rows first, arithmetic rows after them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.sources = SourceRows(tokenizer, corpus.training_sources(), seed)
        self.arithmetic = ArithmeticRows(tokenizer, seed)

    def take(self, rows: int, arithmetic: int, length: int, own: list[list[int]] | None = None) -> Batch:
        """Returns a batch of so many rows, of which the last ones are arithmetic.

        Before those stand the rows of `own`, the target's own text, which no loss counts.
        """
        own = own or []
        ids = self.sources.take(rows - arithmetic - len(own), length)
        sums, sum_weights = self.arithmetic.take(arithmetic, length)
        rows_BT = torch.tensor(ids + own + sums)
        weights = [[1.0] * length] * len(ids) + [[0.0] * length] * len(own) + sum_weights
        return Batch(rows_BT[:, :-1], rows_BT[:, 1:], torch.tensor(weights))


def heldout_rows(tokenizer: PreTrainedTokenizerFast, count: int, length: int) -> Tensor:
    """Returns a fixed set of rows of held-out source, of shape (count, length + 1)."""
    rows = SourceRows(tokenizer, corpus.heldout_sources(), seed=1)
    return torch.tensor(rows.take(count, length))
