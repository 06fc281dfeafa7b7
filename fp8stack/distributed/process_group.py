"""The processes that train one run together: which of them this is, and how they agree. torchrun
and accelerate launch start one process per device, a rank. Here the ranks' hosts exchange words,
through gloo, without waiting for a GPU."""

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

from fp8stack.errors import RankLost, UserError

_FINE, _FAILED = 0, -1


class ElsewhereError(UserError):
    """Another rank failed, and said why: its message, and its exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run, of which this is `index`; alone unless several were started. Hosts
    exchange words through `group`; None is torch's default one.

    All exchanges below are made by all ranks, in the same order. A rank that failed says so in its
    next one, and all others raise `ElsewhereError` there: so nobody waits for who will not come.
    """

    index: int = 0
    count: int = 1
    group: dist.ProcessGroup | None = None
    timeout_s: float = 600.0

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes the run's files and speaks."""
        return self.index == 0

    def apart(self) -> Ranks:
        """The same ranks with a group of their own, for a thread of each to use."""
        if self.count == 1:
            return self
        wait = timedelta(seconds=self.timeout_s)
        with losing_ranks():
            return replace(self, group=dist.new_group(backend="gloo", timeout=wait))

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank."""
        return max(self._exchange(int(flag))[0]) > 0

    def wait(self) -> None:
        """Go on when all ranks are here."""
        self.any(False)

    def from_main(self, make: Callable[[], Any]) -> Any:
        """What `make` gives, plain JSON data, or raises: called on the main rank alone, given to
        all."""
        if self.count == 1:
            return make()
        text = ""
        with self.together():
            text = json.dumps(make()) if self.is_main else ""
        return json.loads(self.texts(text)[0])

    def gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """The tensor `mine` of every rank, on the host and of one shape."""
        if self.count == 1:
            return [mine]
        found = [torch.empty_like(mine) for _ in range(self.count)]
        with losing_ranks():
            dist.all_gather(found, mine, group=self.group)
        return found

    def require_equal(self, what: str, value: str) -> None:
        """See that `value` is the same on all ranks. Raises a UserError if it is not."""
        values = self.texts(value)
        for index, other in enumerate(values):
            if other != values[0]:
                raise UserError(
                    f"Rank {index} has another {what} than rank 0: all ranks need the same "
                    "hardware, software and files."
                )

    @contextmanager
    def together(self) -> Iterator[None]:
        """Within, a `UserError` on one rank becomes one on all, at the end at the latest. There
        must be no collective within but those of this class."""
        if self.count == 1:  # others may have to be told by a `together` around this one
            yield
            return
        try:
            yield
        except (ElsewhereError, RankLost):
            raise
        except UserError as error:
            if not error.is_shared:  # by a `together` within this one
                error.is_shared = True
                said = {"message": str(error), "exit_code": error.exit_code}
                self._exchange(_FAILED, json.dumps(said))
            raise
        self._exchange(_FINE)

    def texts(self, text: str) -> list[str]:
        """The text of every rank."""
        return self._exchange(_FINE, text)[1]

    def _exchange(self, number: int, text: str = "") -> tuple[list[int], list[str]]:
        """The number and the text of every rank. Raises an ElsewhereError if a rank failed. If this
        is one, it has an error of its own."""
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
            said = json.loads(texts[index])
            raise ElsewhereError(f"rank {index}: {said['message']}", said["exit_code"])
        return numbers, texts


ALONE = Ranks()


def started() -> int:
    """How many ranks were started, this one among them."""
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
    """Meet the other ranks, if any were started, with tensors on `device`, cpu or cuda. One that
    does not answer for `timeout_s` counts as lost. Raises a UserError if the launcher's environment
    is incomplete, and a RankLost if they cannot be reached."""
    if started() == 1:
        return ALONE
    missing = [key for key in ("RANK", "MASTER_ADDR", "MASTER_PORT") if key not in os.environ]
    if missing:
        raise UserError(
            f"WORLD_SIZE is {started()} and {missing[0]} is not set. Start the ranks by torchrun "
            "or accelerate launch, or unset WORLD_SIZE."
        )
    wait = timedelta(seconds=timeout_s)
    with losing_ranks():
        store, index, count = next(rendezvous("env://", timeout=wait))
        # torchrun keeps its store when it starts ranks again, with the addresses of those before
        # (torch 2.13, `_create_c10d_store`): to be left to torch when it keeps them apart.
        store = PrefixStore(f"restart-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        PartialState(cpu=device == "cpu", timeout=wait, store=store, rank=index, world_size=count)
        # Words go between hosts, whatever tensors go through.
        group = None if device == "cpu" else dist.new_group(backend="gloo", timeout=wait)
    return Ranks(dist.get_rank(), dist.get_world_size(), group, timeout_s)


_BY = ("gloo", "nccl", "timeout caused pair closure")  # the last is gloo's, without its name
_LOST = (
    *("connection closed", "connection reset", "connection refused", "broken pipe", "timed out"),
    *("remote process exited", "nccl watchdog", "peer", "timeout"),
)


@contextmanager
def losing_ranks() -> Iterator[None]:
    """Raise a RankLost, one line, for torch's error about a rank that is gone, or silent."""
    try:
        yield
    except RuntimeError as error:
        said = str(error).lower()
        of_ranks = isinstance(error, dist.DistError) or any(name in said for name in _BY)
        if not (of_ranks and any(sign in said for sign in _LOST)):
            raise
        index, count = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        why = " ".join(str(error).split("\n")[0].split())
        raise RankLost(
            f"rank {index} of {count} lost another rank: {why[:200]} Go on from the last "
            "checkpoint with --resume auto."
        ) from error
