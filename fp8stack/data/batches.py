"""The windows of a corpus in the batch of a step, as a function of seed and step only."""

from dataclasses import KW_ONLY, dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from fp8stack.common.errors import UserError, unknown
from fp8stack.common.tables import counted
from fp8stack.data.corpus import Corpus, DataError, require_documents
from fp8stack.data.order import epoch_starts, shares, sources_of, windows_of_epoch
from fp8stack.data.source_mixture import sources_and_counts

Order: TypeAlias = Literal["random", "epochs"]


@dataclass(eq=False)
class StepBatches(Dataset[torch.Tensor]):
    """A map-style dataset whose item N is the batch of step N: int64 [batch, context + 1].

    Columns 0 to context - 1 are the inputs, columns 1 to context the labels. Use it as
    `DataLoader(batches, sampler=range(first, last), batch_size=None)`: the batches do not depend on
    the number of workers or on the step at which a run starts.

    Args:
        corpus: the data. Each source of a mixture has its exact share of every 4096 rows, counted
            from the first row of step 1.
        batch: rows per step.
        context: tokens of a row that are trained on.
        seed: determines the order of the rows.
        vocabulary: the size of the model's vocabulary.
        order: `random`: each row starts at a random token, all equally likely. `epochs`: the corpus
            is cut into windows that do not overlap, and each is read once per epoch, in another
            order in each epoch.
        documents: items are int64 [batch, 2, context + 1] instead: [:, 0] the tokens, [:, 1] the
            number of each token's document, counted from 0 in each row.

    Raises:
        UserError: a seed outside 0 to 2**64 - 1, a batch or context below 1, a source shorter than
            context + 1, or `documents` with data that do not record where documents end.
    """

    corpus: Corpus
    _: KW_ONLY
    batch: int
    context: int
    seed: int
    vocabulary: int
    order: Order = "random"
    documents: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**64:
            raise UserError(f"--seed {self.seed} is not a seed. Use 0 to 2**64 - 1.")
        if self.batch < 1:
            raise UserError(f"--batch {self.batch} holds no sequence. Use 1 or more.")
        if self.order not in get_args(Order):
            raise unknown("data_order", self.order, get_args(Order))
        _require_windows(self.corpus, self.context, self.documents)

    def __getitem__(self, step: int) -> torch.Tensor:
        """The batch of `step`, 0 or more: int64 [batch, context + 1], or [batch, 2, context + 1].
        Raises a DataError for a token outside the vocabulary, or a file that is gone or shrank."""
        assert step >= 0, step
        starts = self._starts(int(step))
        return _windows(self.corpus, starts, self.context, self.vocabulary, self.documents)

    def _starts(self, step: int) -> npt.NDArray[np.int64]:
        """The position in the corpus at which each row of the batch begins: int64 [batch]."""
        sources, counts = sources_and_counts(self.corpus)
        # The first step of a run is step 1.
        rows = (step - 1) * self.batch + np.arange(self.batch, dtype=np.int64)
        source_of_row, numbers = sources_of(rows, counts, self.seed)
        # The step is the high half of Philox's 256-bit counter: a stream per step, in O(1). Raw
        # words follow the published algorithm; numpy may change how `integers` uses them.
        words = np.random.Philox(key=self.seed, counter=step << 128).random_raw(self.batch)
        starts = np.empty_like(rows)
        before = 0
        for index, source in enumerate(sources):
            in_source = source_of_row == index
            if self.order == "epochs":
                source_starts = epoch_starts(
                    numbers[in_source], len(source), self.context, self.seed, index
                )
            else:
                source_starts = (words[in_source] % np.uint64(len(source) - self.context)).astype(
                    np.int64
                )
            starts[in_source] = before + source_starts
            before += len(source)
        return starts


def validation_windows(
    corpus: Corpus, *, count: int, context: int, vocabulary: int, documents: bool = False
) -> torch.Tensor:
    """Fixed windows, evenly spaced from the first token to the last: int64 [n, context + 1].

    `n` is `count`, or fewer if more windows would share labels. Each source of a mixture has its
    share of `count`. With `documents` int64 [n, 2, context + 1], like the items of `StepBatches`.
    Raises what those raise, and a UserError for a count below 1.
    """
    if count < 1:
        raise UserError(f"{count} validation windows measure nothing. Use 1 or more.")
    _require_windows(corpus, context, documents)
    sources, counts = sources_and_counts(corpus)
    starts, before = list[int](), 0
    for source, share in zip(sources, shares(counts, count), strict=True):
        last_start = len(source) - context - 1
        n = min(share, windows_of_epoch(len(source), context))
        starts += [before + i * last_start // max(n - 1, 1) for i in range(n)]
        before += len(source)
    return _windows(corpus, np.array(starts, dtype=np.int64), context, vocabulary, documents)


def describe(
    corpus: Corpus, *, batch: int, context: int, steps: int, order: Order = "random"
) -> tuple[str, ...]:
    """A sentence for each source that a run of `steps` reads: tokens, share, windows, epochs."""
    sources, counts = sources_and_counts(corpus)
    sentences = list[str]()
    for source, count in zip(sources, counts, strict=True):
        rows = steps * batch * count / sum(counts)
        share = f", {count / sum(counts):.2%} of the rows" if len(sources) > 1 else ""
        windows = windows_of_epoch(len(source), context)
        if order == "epochs":
            passes = (
                f"{counted(windows, 'window')} of {context:,} an epoch, {rows / windows:.2f} epochs"
            )
        else:
            times = rows * context / len(source)
            passes = f"windows of {context:,} at random places, {times:.2f} times its tokens"
        sentences.append(
            f"{source.name}: {len(source):,} tokens{share}, {passes} in {counted(steps, 'step')}"
        )
    return tuple(sentences)


def _require_windows(corpus: Corpus, context: int, documents: bool) -> None:
    if context < 1:
        raise UserError(f"--context {context} holds no token. Use 1 or more.")
    for source in sources_and_counts(corpus)[0]:
        present = len(source)
        if present < context + 1:
            lower = f"Lower --context to {present - 1} or give" if present > 1 else "Give"
            raise UserError(
                f"{source.name} has {present} tokens; --context {context} needs {context + 1}. "
                f"{lower} more data."
            )
    if documents:
        require_documents(corpus)


def _windows(
    corpus: Corpus, starts: npt.NDArray[np.int64], context: int, vocabulary: int, documents: bool
) -> torch.Tensor:
    """The windows that begin at `starts` [n], with each token checked; see `StepBatches`."""
    rows = np.empty((len(starts), 2 if documents else 1, context + 1), dtype=np.int64)
    for row, start in zip(rows, starts.tolist(), strict=True):
        row[0] = corpus.window(start, context + 1)
        if documents:
            row[1] = corpus.documents(start, row[0])
    tokens = rows[:, 0]
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        row_index, column = np.argwhere((tokens < 0) | (tokens >= vocabulary))[0].tolist()
        path, offset = corpus.locate(int(starts[row_index]) + column)
        raise DataError(
            f"{path}: token {tokens[row_index, column]} at offset {offset} is outside the "
            f"vocabulary of {vocabulary}. Use a model with a larger vocabulary, or tokenize "
            "the data for this one."
        )
    return torch.from_numpy(rows if documents else tokens)
