"""Whole runs of `fp8stack` in several ranks, each a process of its own, as torchrun starts them.

Every rank ends or is killed: nothing here waits for ever. It must not know which faults there are,
nor how ranks divide their work.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8stack.backends import fp8_state
from fp8stack.checkpoint import reader
from fp8stack.errors import UserError
from fp8stack.training import finalize, loop
from fp8stack.training.run import Run
from fp8stack.training.step import Step
from tests.faults import whole_runs
from tests.faults.whole_runs import Child, Ended, rows

Change = Callable[[int], AbstractContextManager[None]]
"""What is different in a rank's process, given the rank; sent there, so a function of a module."""

_STARTING = threading.Lock()


@contextmanager
def unchanged(rank: int) -> Iterator[None]:
    """The process as it is."""
    yield


class Together:
    """The ranks of one run, under way; as a context, none of them outlives it.

    Args:
        words: the arguments of `fp8stack`.
        folder: the working folder.
        count: how many ranks; one gets no launcher's environment.
        faults: see `tests.faults.harness`.
        change: of each rank's process.
        environment: further variables.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        count: int,
        faults: str = "",
        change: Change = unchanged,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.count = count
        self.children: list[Child] = []
        variables = [{**of, **(environment or {})} for of in _launched(count)]
        for rank, of_rank in enumerate(variables):
            # `Child` has its work by this name.
            with _STARTING, patch.object(whole_runs, "_work", partial(_work, change, rank)):
                self.children.append(Child(words, folder, faults, of_rank))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._kill()

    def wait(self, timeout_s: float = 120.0) -> list[Ended]:
        """How each rank ended, once all have or are stopped; those that are stopped are killed.

        Raises:
            TimeoutError: a rank did neither in that time; all are killed.
        """
        until = time.monotonic() + timeout_s
        while under_way := [
            child for child in self.children if child.alive and not _stopped(child)
        ]:
            if time.monotonic() > until:
                hung = [self.children.index(child) for child in under_way]
                self._kill()
                said = [child.wait().stderr[-500:] for child in self.children]
                raise TimeoutError(f"Ranks {hung} did not end in {timeout_s:.0f} s: {said}")
            time.sleep(0.01)
        self._kill()
        return [child.wait() for child in self.children]

    def _kill(self) -> None:
        for child in self.children:
            if child.alive:
                child.signal(signal.SIGKILL)


def run_ranks(
    words: Sequence[str],
    folder: Path,
    count: int,
    faults: str = "",
    change: Change = unchanged,
    timeout_s: float = 120.0,
) -> list[Ended]:
    """`Together` from start to end. Raises what `Together.wait` does."""
    with Together(words, folder, count, faults, change) as ranks:
        return ranks.wait(timeout_s)


def _launched(count: int) -> list[dict[str, str]]:
    """The environment that torchrun gives each of so many ranks of one machine."""
    if count == 1:
        return [{}]
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(count)]


def _stopped(child: Child) -> bool:
    """Whether the process is stopped by a signal (Linux)."""
    try:
        status = Path(f"/proc/{child.pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"


def _work(change: Change, rank: int, *arguments: Any) -> None:
    with change(rank):
        whole_runs._work(*arguments)


# Changes


@contextmanager
def telling_states(folder: str, rank: int) -> Iterator[None]:
    """Have the rank write its FP8 state into `folder` when all steps are done, for `states`."""
    finish = finalize.finish

    def told(run: Run, *arguments: Any) -> None:
        state = {name: tensor.contiguous() for name, tensor in fp8_state(run.model).items()}
        save_file(state, Path(folder) / f"fp8-{rank}.safetensors")
        finish(run, *arguments)

    with patch.object(loop, "finish", told):
        yield


def states(folder: Path, count: int) -> list[dict[str, Tensor]]:
    """What `telling_states` wrote, rank by rank."""
    return [load_file(folder / f"fp8-{rank}.safetensors") for rank in range(count)]


@contextmanager
def broken_gradient(victim: int, step: int, value: float, rank: int) -> Iterator[None]:
    """On one rank, put `value` into the gradient of the loss's own logits at one step, before
    ranks exchange anything."""
    train_step: Any = Step.__call__

    def broken(self: Any, number: int, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        if number != step or rank != victim:
            return cast(tuple[Tensor, Tensor], train_step(self, number, tokens_BT))

        def spoil(part: Any, inputs: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda gradient: torch.full_like(gradient, value))  # type: ignore[no-untyped-call]

        handle = self.run.model.blocks[-1].register_forward_hook(spoil)
        try:
            return cast(tuple[Tensor, Tensor], train_step(self, number, tokens_BT))
        finally:
            handle.remove()

    with patch.object(Step, "__call__", broken):
        yield


# What runs come to


def tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole, however many ranks wrote it."""
    found = reader.load(path).tensors
    return {f"{group}:{name}": of[name] for group, of in found.items() for name in of}


def run_difference(run: Path, twin: Path) -> str:
    """The first thing in which two finished runs differ, "" if none: the newest checkpoint's
    tensors, bit for bit, what it says of the guard and the loss scale, and the rows of the metrics,
    times apart."""
    ours, theirs = (sorted((folder / "checkpoints").glob("step-*"))[-1:] for folder in (run, twin))
    if not ours or not theirs or ours[0].name != theirs[0].name:
        return f"the newest checkpoint is {ours[0].name if ours else 'missing'}"
    try:
        a, b = tensors(ours[0]), tensors(theirs[0])
        info, expected = reader.load(ours[0]).info, reader.load(theirs[0]).info
    except UserError as error:
        return str(error)
    odd = [name for name in sorted(a.keys() | b.keys()) if not _same(a.get(name), b.get(name))]
    if odd:
        return f"{ours[0].name}: {odd[0]} differs, with {len(odd) - 1} more of {len(b)} tensors"
    for key in ("scaler", "guard", "identity"):
        if info[key] != expected[key]:
            return f"{ours[0].name}: '{key}' is {info[key]}, not {expected[key]}"
    if rows(run) != rows(twin):
        pairs = zip(rows(run), rows(twin), strict=False)
        other = next(
            (f"{one}, not {two}" for one, two in pairs if one != two), "a row more or less"
        )
        return f"the metrics differ: {other}"
    return ""


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
