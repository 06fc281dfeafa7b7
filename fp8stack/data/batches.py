"""Which windows of a corpus make the batch of a step: a function of seed and step alone.

Knows a corpus; nothing of devices, ranks or workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from fp8stack.data.corpus import Corpus, DataError
from fp8stack.errors import UserError


class StepBatches(Dataset[torch.Tensor]):
    """A map-style dataset whose item N is the batch of step N: int64 [batch, context + 1].

    Columns 0 to context - 1 are the inputs, columns 1 to context the labels. Each row starts at a
    random token of the corpus, all equally likely. Use it as
    `DataLoader(batches, sampler=range(first, last), batch_size=None)`: the batches are the same
    for any number of workers and from whichever step a run starts.

    Raises:
        UserError: a seed outside 0 to 2**64 - 1, a batch or context below 1, a corpus shorter
            than context + 1.
    """

    def __init__(
        self, corpus: Corpus, *, batch: int, context: int, seed: int, vocabulary: int
    ) -> None:
        if not 0 <= seed < 2**64:
            raise UserError(f"--seed {seed} is not a seed. Use 0 to 2**64 - 1.")
        if batch < 1:
            raise UserError(f"--batch {batch} holds no sequence. Use 1 or more.")
        _require_a_window(corpus, context)
        self.corpus = corpus
        self.batch = batch
        self.context = context
        self.seed = seed
        self.vocabulary = vocabulary

    def __getitem__(self, step: int) -> torch.Tensor:
        """The batch of `step`, 0 or more: int64 [batch, context + 1].

        Raises:
            DataError: a token outside the vocabulary, or a file that is gone or has shrunk.
        """
        assert step >= 0, step
        # The step is the high half of Philox's 256-bit counter: a stream per step, in O(1). The
        # raw words are the published algorithm's; numpy may change what `integers` makes of them.
        generator = np.random.Philox(key=self.seed, counter=int(step) << 128)
        starts = generator.random_raw(self.batch) % np.uint64(len(self.corpus) - self.context)
        return _windows(self.corpus, starts.astype(np.int64), self.context, self.vocabulary)


def validation_windows(
    corpus: Corpus, *, count: int, context: int, vocabulary: int
) -> torch.Tensor:
    """Fixed windows, evenly spaced from the first token to the last: int64 [n, context + 1].

    `n` is `count`, or as many windows as fit without a label standing in two of them.

    Raises:
        UserError: a count or context below 1, a corpus shorter than context + 1.
        DataError: a token outside the vocabulary, or a file that is gone or has shrunk.
    """
    if count < 1:
        raise UserError(f"{count} validation windows measure nothing. Use 1 or more.")
    _require_a_window(corpus, context)
    last_start = len(corpus) - context - 1
    n = min(count, (len(corpus) - 1) // context)
    starts = np.array([i * last_start // max(n - 1, 1) for i in range(n)], dtype=np.int64)
    return _windows(corpus, starts, context, vocabulary)


def decode(tokens: Sequence[int]) -> str:
    """The text of byte tokens, read as UTF-8; what is no byte or no UTF-8 becomes U+FFFD."""
    not_utf8 = 0xFF
    values = [int(token) for token in tokens]
    return bytes(v if 0 <= v <= 0xFF else not_utf8 for v in values).decode(errors="replace")


def _require_a_window(corpus: Corpus, context: int) -> None:
    if context < 1:
        raise UserError(f"--context {context} holds no token. Use 1 or more.")
    present = len(corpus)
    if present < context + 1:
        lower = f"Lower --context to {present - 1} or give" if present > 1 else "Give"
        raise UserError(
            f"{corpus.name} has {present} tokens; --context {context} needs {context + 1}. "
            f"{lower} more data."
        )


def _windows(
    corpus: Corpus, starts: npt.NDArray[np.int64], context: int, vocabulary: int
) -> torch.Tensor:
    """The windows from `starts` [n] on, each token checked: int64 [n, context + 1]."""
    rows = np.empty((len(starts), context + 1), dtype=np.int64)
    for row, start in zip(rows, starts.tolist(), strict=True):
        row[:] = corpus.window(start, context + 1)
    if int(rows.max()) >= vocabulary:
        row_index, column = np.argwhere(rows >= vocabulary)[0].tolist()
        path, offset = corpus.locate(int(starts[row_index]) + column)
        raise DataError(
            f"{path}: token {rows[row_index, column]} at offset {offset} is outside the "
            f"vocabulary of {vocabulary}. Use a model with a larger vocabulary, or tokenize "
            "the data for this one."
        )
    return torch.from_numpy(rows)
