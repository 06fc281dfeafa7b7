"""The dataloader of a run: it reads ahead, and into pinned memory for a GPU. Every rank reads the
whole batch and keeps its rows: this costs little, and all ranks meet a damaged token at the same
step."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fp8stack import data
from fp8stack.training.data_workers import DataWorkers, in_shared_memory
from fp8stack.training.distributed.parallelize import part_of
from fp8stack.training.run import Run


def batches(run: Run, stops: Callable[[], bool] = bool) -> Iterator[tuple[int, Tensor]]:
    """Yield each remaining step and this rank's tokens of it: int64 [batch / ranks, context + 1],
    or with a document mask [batch / ranks, 2, context + 1], see `StepBatches`. For `stops` and the
    errors, see `DataWorkers`."""
    steps = range(run.step + 1, run.config.steps + 1)
    workers = run.config.workers
    loader = DataLoader(
        _RankBatches(run),
        batch_size=None,
        sampler=steps,
        num_workers=workers,
        pin_memory=run.plan.device != "cpu",
        generator=torch.Generator(),  # or starting the loader would advance torch's RNG
    )
    if not workers:
        yield from zip(steps, loader, strict=True)
    elif steps:
        with DataWorkers(loader, run.config.worker_timeout, stops) as reading:
            for step in steps:
                yield step, reading.batch()


def tokens_of(run: Run, step: int) -> Tensor:
    """This rank's tokens of one step, on the CPU; see `batches`."""
    return _RankBatches(run)[step]


def inputs_of(windows: Tensor) -> tuple[Tensor, ...]:
    """Split windows into the arguments of a model's loss: inputs and targets, int64 [n, context],
    and with documents the document number of each input. The windows are int64 [n, context + 1],
    or with documents [n, 2, context + 1], see `StepBatches`."""
    if windows.ndim == 2:
        return windows[:, :-1], windows[:, 1:]
    return windows[:, 0, :-1], windows[:, 0, 1:], windows[:, 1, :-1]


class _RankBatches(Dataset[Tensor]):
    def __init__(self, run: Run) -> None:
        config = run.config
        self.batches = data.StepBatches(
            run.data.train,
            batch=config.batch,
            context=run.context,
            seed=config.seed,
            vocabulary=run.model.config.vocabulary,
            order=config.data_order,
            documents=config.document_mask,
        )
        self.rank, self.ranks = run.ranks.index, run.ranks.count
        self.accumulate = config.accumulate

    def __getitem__(self, step: int) -> Tensor:
        mine = part_of(self.batches[step], self.rank, self.ranks, self.accumulate)
        return in_shared_memory(mine)
