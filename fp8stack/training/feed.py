"""The tokens of each step of a run, read ahead and in pinned memory for a GPU.

Every rank reads the whole batch and keeps its part: that is little beside the step itself, and a
damaged token is found by all of them at the same step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fp8stack import data
from fp8stack.errors import UserError
from fp8stack.training.parallel import part_of
from fp8stack.training.ranks import Ranks
from fp8stack.training.run import Run


def batches(run: Run) -> Iterator[tuple[int, Tensor]]:
    """Each step that is left, with this rank's tokens of it, int64 [batch / ranks, context + 1]."""
    config = run.config
    steps = range(run.step + 1, config.steps + 1)
    loader = DataLoader(
        _dataset(run),
        batch_size=None,
        sampler=steps,
        num_workers=config.workers,
        pin_memory=run.plan.device == "cuda",
        generator=torch.Generator(),  # else each start of the loader would draw from torch's own
    )
    try:
        yield from zip(steps, loader, strict=True)
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise UserError(
            "A process that reads data died; was it out of memory? Go on with --resume auto "
            "--set workers=0"
        ) from error


def tokens_of(run: Run, step: int) -> Tensor:
    """This rank's tokens of one step: int64 [batch / ranks, context + 1], on the CPU."""
    return _dataset(run)[step]


class _RankBatches(Dataset[Tensor]):
    """What one rank trains on of each step."""

    def __init__(self, batches: data.StepBatches, ranks: Ranks, accumulate: int) -> None:
        self.batches = batches
        self.rank, self.ranks = ranks.index, ranks.count
        self.accumulate = accumulate

    def __getitem__(self, step: int) -> Tensor:
        return part_of(self.batches[step], self.rank, self.ranks, self.accumulate)


def _dataset(run: Run) -> _RankBatches:
    whole = data.StepBatches(
        run.train,
        batch=run.config.batch,
        context=run.context,
        seed=run.config.seed,
        vocabulary=run.model.config.vocabulary,
    )
    return _RankBatches(whole, run.ranks, run.config.accumulate)
