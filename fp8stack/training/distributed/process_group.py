"""The ranks of a run, and the messages by which they agree. torchrun and accelerate launch start
one process, a rank, per device. The ranks exchange messages between hosts through gloo, without
waiting for a GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fp8stack.common.errors import RankLost, UserError

_FINE, _FAILED = 0, -1


class ElsewhereError(UserError):
    """An error on another rank, with its message and exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run; this process is rank `index`. There is one rank unless several were
    started. Hosts exchange messages through `group`; None is torch's default group.

    All ranks call the methods that exchange messages, in the same order. A rank that failed says so
    in the next exchange, and all others raise an `ElsewhereError` there, so that no rank waits for
    a rank that never comes.
    """

    index: int = 0
    count: int = 1
    group: dist.ProcessGroup | None = None
    timeout_s: float = 600.0

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the run's files and prints."""
        return self.index == 0

    def apart(self) -> Ranks:
        """The same ranks with a process group of their own, for use in a thread."""
        if self.count == 1:
            return self
        wait = timedelta(seconds=self.timeout_s)
        with losing_ranks():
            return replace(self, group=dist.new_group(backend="gloo", timeout=wait))

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank."""
        return max(self._exchange(int(flag))[0]) > 0

    def wait(self) -> None:
        """Wait until all ranks have called this."""
        self.any(False)

    def from_main(self, make: Callable[[], Any]) -> Any:
        """Call `make` on the main rank, and return its result, plain JSON data, on all ranks.
        Raises on all ranks if `make` does."""
        if self.count == 1:
            return make()
        text = ""
        with self.together():
            text = json.dumps(make()) if self.is_main else ""
        return json.loads(self.texts(text)[0])

    def gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """The tensors `mine` of all ranks, which are on the host and have the same shape."""
        if self.count == 1:
            return [mine]
        tensors = [torch.empty_like(mine) for _ in range(self.count)]
        with losing_ranks():
            dist.all_gather(tensors, mine, group=self.group)
        return tensors

    def require_equal(self, subject: str, value: str) -> None:
        """Raise a UserError, which names `subject`, unless `value` is the same on all ranks."""
        values = self.texts(value)
        for index, rank_value in enumerate(values):
            if rank_value != values[0]:
                raise UserError(
                    f"Rank {index} has another {subject} than rank 0: all ranks need the same "
                    "hardware, software and files."
                )

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context in which a `UserError` on one rank becomes an error on all ranks, at its end at
        the latest. The methods of this class are the only collectives allowed in it."""
        if self.count == 1:  # an outer `together` may still have ranks to tell
            yield
            return
        try:
            yield
        except (ElsewhereError, RankLost):
            raise
        except UserError as error:
            if not error.is_shared:  # an inner `together` may have told the other ranks
                error.is_shared = True
                failure = {"message": str(error), "exit_code": error.exit_code}
                self._exchange(_FAILED, json.dumps(failure))
            raise
        self._exchange(_FINE)

    def texts(self, text: str) -> list[str]:
        """The texts of all ranks."""
        return self._exchange(_FINE, text)[1]

    def _exchange(self, number: int, text: str = "") -> tuple[list[int], list[str]]:
        """The numbers and texts of all ranks. Raises an ElsewhereError if another rank failed,
        unless this rank failed as well: it then has its own error to raise."""
        if self.count == 1:
            return [number], [text]
        content = text.encode()
        heads = self.gather(torch.tensor([number, len(content)], dtype=torch.int64))
        numbers, sizes = torch.stack(heads, 1).tolist()
        texts = [""] * self.count
        if longest := max(sizes):
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(content)] = torch.tensor(list(content), dtype=torch.uint8)
            pairs = zip(self.gather(padded), sizes, strict=True)
            texts = [bytes(row[:size].tolist()).decode() for row, size in pairs]
        if _FAILED in numbers and number != _FAILED:
            index = numbers.index(_FAILED)
            failure = json.loads(texts[index])
            raise ElsewhereError(f"rank {index}: {failure['message']}", failure["exit_code"])
        return numbers, texts


ALONE = Ranks()


def started() -> int:
    """The number of ranks that were started, including this one."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if "WORLD_SIZE" not in os.environ and tasks.isdecimal() and int(tasks) > 1:
        raise UserError(
            f"srun started {tasks} processes, and none knows the others. Have srun start one "
            "torchrun on each machine (docs/long_runs.md), or give it --ntasks=1."
        )
    try:
        return max(1, int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError:
        raise UserError(
            f"The environment's WORLD_SIZE is '{os.environ['WORLD_SIZE']}', not a number. "
            "Start several ranks by torchrun or accelerate launch."
        ) from None


def join(device: str, timeout_s: float) -> Ranks:
    """Join the process group of the other ranks, if any were started; tensors are on `device`, see
    `Hardware.device`. A rank that does not answer for `timeout_s` counts as lost. Raises a
    UserError if the launcher's environment is incomplete, and a RankLost if the ranks cannot be
    reached."""
    if started() == 1:
        return ALONE
    needed = ["RANK", "MASTER_ADDR", "MASTER_PORT", *["LOCAL_RANK"] * (device != "cpu")]
    missing = [key for key in needed if key not in os.environ]
    if missing:
        raise UserError(
            f"WORLD_SIZE is {started()} and {missing[0]} is not set. Start the ranks by torchrun "
            "or accelerate launch, or unset WORLD_SIZE."
        )
    for key in ("RANK", "MASTER_PORT"):
        if not os.environ[key].isdecimal():
            raise UserError(
                f"The environment's {key} is '{os.environ[key]}', not a number. Start the ranks by "
                "torchrun or accelerate launch."
            )
    wait = timedelta(seconds=timeout_s)
    with losing_ranks():
        store, index, count = next(rendezvous("env://", timeout=wait))
        # torchrun keeps its store, with the old ranks' addresses, when it restarts ranks (torch
        # 2.13, `_create_c10d_store`). Remove the prefix once torch separates them.
        store = PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        PartialState(cpu=device == "cpu", timeout=wait, store=store, rank=index, world_size=count)
        # Messages go between hosts, also where tensors go through NCCL.
        group = None if device == "cpu" else dist.new_group(backend="gloo", timeout=wait)
    return Ranks(dist.get_rank(), dist.get_world_size(), group, timeout_s)


_BY = ("gloo", "nccl", "timeout caused pair closure")  # the last is a message of gloo
_LOST = (
    *("connection closed", "connection reset", "connection refused", "broken pipe", "timed out"),
    *("remote process exited", "nccl watchdog", "peer", "timeout"),
)


@contextmanager
def losing_ranks() -> Iterator[None]:
    """A context that turns torch's error about a rank that is gone or silent into a RankLost."""
    try:
        yield
    except RuntimeError as error:
        message = str(error).lower()
        of_ranks = isinstance(error, dist.DistError) or any(name in message for name in _BY)
        if not (of_ranks and any(sign in message for sign in _LOST)):
            raise
        index, count = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        first_line = " ".join(str(error).split("\n")[0].split())
        raise RankLost(
            f"rank {index} of {count} lost another rank: {first_line[:200]} Go on from the last "
            "checkpoint with --resume RUN."
        ) from error
