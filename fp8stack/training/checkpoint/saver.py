"""Save checkpoints while the run waits, or in a thread while the run continues. With a thread, a
step waits only until its tensors are copied to host memory; the thread then writes, flushes,
verifies and removes checkpoints by `writer`. It writes one checkpoint at a time."""

import copy
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Thread
from typing import Any, Self

import torch
from torch import Tensor

from fp8stack.common.errors import UserError
from fp8stack.common.terminal import say
from fp8stack.training.checkpoint import reader as checkpoints
from fp8stack.training.checkpoint import writer
from fp8stack.training.checkpoint.reader import Checkpoint
from fp8stack.training.distributed.process_group import ALONE, Ranks

Groups = Mapping[str, Mapping[str, Tensor]]


class Saver:
    """Writes the checkpoints of one run into `folder`, and keeps the newest `keep` good ones and
    every checkpoint of a `keep_every`-th step, see `retain`.

    As a context manager it waits at the end for the checkpoint being written, unless the user
    interrupted the run, and frees the host memory.

    Args:
        good: checkpoints that are known to be undamaged.
        in_background: whether `save` returns as soon as the tensors are copied.
        before: called before a checkpoint is written, by the thread that writes it.
        first_rows: the first rows of a model that ranks shard, see `writer.write`; else None.
        ranks: the ranks that write a sharded model. They need a process group of their own, since
            they may write in threads.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        keep_every: int = 0,
        in_background: bool = False,
        before: Callable[[], None] | None = None,
        good: Iterable[Path] = (),
        first_rows: Mapping[str, int] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.folder, self.in_background, self.before = folder, in_background, before
        self.keep, self.keep_every, self.good = keep, keep_every, set(good)
        self.first_rows = first_rows
        self._ranks = ALONE if first_rows is None else ranks
        self._host = HostCopy()
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, info: Mapping[str, Any], capture: Callable[[], Groups]) -> Path:
        """Write the tensors that `capture` returns as the checkpoint of `step`, with the JSON data
        `info`, and return its path. Waits for the previous checkpoint first. Raises a StorageError
        if this checkpoint or, in the background, the previous one cannot be written."""
        self.wait()
        path = checkpoints.path_of(self.folder, step)
        if not self.in_background:
            self._write(step, info, capture())
            return path
        self._host.take(capture())
        info_copy = copy.deepcopy(dict(info))  # the run may change `info` while the thread writes
        # A daemon thread: an interrupted process does not wait for it. `sweep` removes its files.
        self._thread = Thread(
            target=self._work, args=(step, info_copy), name="checkpoint", daemon=True
        )
        self._thread.start()
        return path

    @property
    def failed(self) -> bool:
        """Whether a background save failed, which `wait` would raise."""
        return self._error is not None

    def wait(self) -> None:
        """Wait until every checkpoint is on the disk. Raises a StorageError, once, if a
        checkpoint could not be written in the background."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyboardInterrupt):
            return
        try:
            self.wait()
        except UserError as lost:
            if error is None:
                raise
            say(str(lost))  # raising it would hide the error that ends the run
        finally:
            self._host = HostCopy()

    def _work(self, step: int, info: Mapping[str, Any]) -> None:
        try:
            self._write(step, info, self._host.values())
        except BaseException as error:  # `wait` raises it in the main thread
            self._error = error

    def _write(self, step: int, info: Mapping[str, Any], tensors: Groups) -> None:
        saved = Checkpoint(step=step, info=dict(info), tensors=tensors)
        with self._ranks.together():
            if self._ranks.is_main and self.before is not None:
                self.before()
        path = writer.write(self.folder, saved, self.first_rows, self._ranks)
        if self._ranks.is_main:
            self.good.add(path)
            writer.retain(self.folder, self.keep, self.keep_every, self.good)


class HostCopy:
    """Copies of tensors in host memory, which is allocated once and reused. For a GPU the memory is
    pinned, and the GPU's later work waits for the copies."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, Tensor]] = {}
        self._copied: Any = None  # an event of the GPU that is copied from

    def take(self, groups: Groups) -> None:
        """Copy `groups`. Copies from a GPU may still be running when this returns."""
        old = self._groups
        self._groups = {
            group: {
                name: self._copy(value, old.get(group, {}).get(name))
                for name, value in values.items()
            }
            for group, values in groups.items()
        }
        devices = {value.device for values in groups.values() for value in values.values()}
        gpu = next((device for device in devices if device.type != "cpu"), None)
        self._copied = None if gpu is None else torch.get_device_module(gpu).Event()
        if self._copied is not None:
            self._copied.record()

    def values(self) -> Groups:
        """Wait for the copies and return them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._groups

    @staticmethod
    def _copy(value: Tensor, into: Tensor | None) -> Tensor:
        value = value.detach()
        if into is None or (into.shape, into.dtype) != (value.shape, value.dtype):
            pin_memory = value.device.type != "cpu"
            into = torch.empty(value.shape, dtype=value.dtype, pin_memory=pin_memory)
        return into.copy_(value, non_blocking=True)
