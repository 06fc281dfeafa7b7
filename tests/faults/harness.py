"""Faults put into whole runs: kills, signals and a full disk, at places that are named.

    python -m tests.faults.harness kill@step:7 -- pretrain --steps 20
    torchrun --nproc-per-node 2 -m tests.faults.harness stop@all-reduce:3/rank=1 -- pretrain

A fault is ACTION@PLACE[:N][+SECONDS][/rank=R]; several are separated by commas.

ACTION   kill (SIGKILL), stop (SIGSTOP), term, int, hup, usr1: the process signals itself;
         note: a line on stderr, "fault: PLACE N: what it is", and no harm;
         full:BYTES: from then on no file can grow beyond BYTES, as on a full disk.
PLACE    step:N        the batch of step N is about to be trained (with workers=0, the default)
         forward:N     within the model's forward pass of step N (uncompiled)
         backward:N    within its backward pass
         all-reduce:N  the N-th collective of torch.distributed after the first step began
         save:N        before the N-th operation on files in a folder `checkpoints`: opening (for
                       reading too), making, renaming, removing, flushing (on Linux)
         file:N        before the N-th operation that changes a file or folder of any name below
                       the working folder: opening to write, making, renaming, removing, flushing
         time:SECONDS  so long after the start
Without N it happens each time. +SECONDS: so much later than that. R is the environment's RANK.
"""

import os
import re
import resource
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import TorchDispatchMode

from fp8stack import cli
from fp8stack.data import StepBatches

SIGNALS = {
    word: signal.Signals[f"SIG{word.upper()}"]
    for word in ("kill", "stop", "term", "int", "hup", "usr1")
}
PLACES = ("step", "forward", "backward", "all-reduce", "save", "file", "time")
_FAULT = re.compile(
    rf"(?P<action>{'|'.join(SIGNALS)}|note|full:(?P<bytes>\d+))@(?P<place>{'|'.join(PLACES)})"
    r"(:(?P<number>\d+(\.\d+)?))?(\+(?P<delay>\d+(\.\d+)?))?(/rank=(?P<rank>\d+))?"
)
# Python tells of these before they are done; which argument is the folder that paths start from.
_EVENTS = {
    "open": None, "os.mkdir": 2, "os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.truncate": None,
    "shutil.rmtree": 1,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault and its place, see the module. `number` is None if it happens each time."""

    action: str
    bytes: int = 0
    place: str
    number: int | None = None
    delay_s: float = 0.0
    rank: int | None = None


def parse(text: str) -> list[Fault]:
    """The faults that `text` names, separated by commas.

    Raises:
        ValueError: something in it is no fault.
    """
    return [_parse_one(word.strip()) for word in text.split(",") if word.strip()]


def _parse_one(word: str) -> Fault:
    match = _FAULT.fullmatch(word)
    if match is None:
        raise ValueError(f"'{word}' is no fault. Write ACTION@PLACE:N, such as kill@step:7.")
    number, timed = match["number"], match["place"] == "time"
    return Fault(
        action=match["action"].partition(":")[0],
        bytes=int(match["bytes"] or 0),
        place=match["place"],
        number=None if timed or number is None else int(number),
        delay_s=float(match["delay"] or 0) + (float(number) if timed else 0),
        rank=int(match["rank"]) if match["rank"] else None,
    )


@dataclass
class _Injection:
    """The faults of this process, and how far it is."""

    faults: list[Fault]
    process: int = field(default_factory=os.getpid)
    home: Path = field(default_factory=Path.cwd)
    step: int = 0
    forward_due: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    done: set[Fault] = field(default_factory=set)

    def reach(self, place: str, number: int, detail: str = "") -> None:
        """Trigger the faults of the `number`-th visit of a place; a numbered fault happens once."""
        if os.getpid() != self.process:  # a process that reads data ahead
            return
        for fault in self.faults:
            if fault.place == place and fault.number in (None, number) and fault not in self.done:
                self.done |= {fault} if fault.number is not None else set()
                timer = threading.Timer(fault.delay_s, _act, (fault, f"{place} {number}: {detail}"))
                timer.daemon = True
                if fault.delay_s:
                    timer.start()
                else:
                    timer.run()

    def count(self, place: str, detail: str) -> None:
        self.counts[place] += 1
        self.reach(place, self.counts[place], detail)

    def begin(self, step: int) -> None:
        self.step, self.forward_due = step, True
        self.reach("step", step)

    def after_module(self, module: nn.Module, args: object, output: object) -> None:
        """The first module of a step's forward pass to be done, and that pass's gradient there."""
        if self.forward_due and module.training and isinstance(output, Tensor):
            if not output.requires_grad:
                return
            self.forward_due, step = False, self.step
            output.register_hook(lambda gradient: self.reach("backward", step))
            self.reach("forward", step)


def _act(fault: Fault, detail: str) -> None:
    if fault.action == "note":
        os.write(2, f"fault: {detail}\n".encode())
    elif fault.action == "full":
        # A write beyond the limit is cut short, and the next fails (EFBIG: Python ignores SIGXFSZ),
        # as on a full disk (ENOSPC). Folders and file names do not fail.
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.bytes, most))
    else:
        os.kill(os.getpid(), SIGNALS[fault.action])


class _Collectives(TorchDispatchMode):
    """Counts the collectives, those that DDP calls by itself included."""

    def __init__(self, injection: _Injection) -> None:
        super().__init__()
        self.injection = injection

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d" and self.injection.step:
            self.injection.count("all-reduce", str(func))
        return func(*args, **(kwargs or {}))


_injections: list[_Injection] = []  # audit hooks cannot be removed, so one serves all


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _injections and event in _EVENTS:
        base = _EVENTS[event]
        folder = arguments[base] if base is not None and base < len(arguments) else -1
        names = arguments[:2] if event == "os.rename" else arguments[:1]
        paths = [_full(name, folder) for name in names]
        injection, note = _injections[-1], f"{event} {paths[-1]}"
        if any("checkpoints" in path.parts for path in paths):
            injection.count("save", note)
        changes = event != "open" or bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if changes and any(path.is_relative_to(injection.home) for path in paths):
            injection.count("file", note)


@cache
def _start_audit() -> None:
    sys.addaudithook(_audit)


def _full(name: Any, folder: int | None) -> Path:
    if isinstance(name, int):
        return _path_of(name)
    path = Path(os.fsdecode(name))
    base = _path_of(folder) if folder is not None and folder >= 0 else Path.cwd()
    return path if path.is_absolute() else base / path


def _path_of(descriptor: int) -> Path:
    try:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    except OSError:  # closed, or no Linux
        return Path()


@contextmanager
def injected(faults: Sequence[Fault]) -> Iterator[None]:
    """A context in which the faults of this process's rank happen."""
    rank = int(os.environ.get("RANK", "0"))
    injection = _Injection([fault for fault in faults if fault.rank in (None, rank)])
    places = {fault.place for fault in injection.faults}
    get, flush = StepBatches.__getitem__, os.fsync

    def item(batches: StepBatches, step: int) -> Tensor:
        tokens = get(batches, step)
        injection.begin(step)
        return tokens

    def fsync(descriptor: int) -> None:
        path = _path_of(descriptor)
        if "checkpoints" in path.parts:
            injection.count("save", f"os.fsync {path}")
        if path.is_relative_to(injection.home):
            injection.count("file", f"os.fsync {path}")
        flush(descriptor)

    on_files = bool(places & {"save", "file"})
    if on_files:
        _start_audit()
    with ExitStack() as stack:
        stack.enter_context(patch.object(StepBatches, "__getitem__", item))
        if places & {"forward", "backward"}:
            hook = register_module_forward_hook(injection.after_module)
            stack.callback(hook.remove)
        if "all-reduce" in places:
            stack.enter_context(_Collectives(injection))
        if on_files:
            stack.enter_context(patch.object(os, "fsync", fsync))
            _injections.append(injection)
            stack.callback(_injections.remove, injection)
        injection.reach("time", 0)
        yield


def main(words: Sequence[str]) -> None:
    """`FAULT[,FAULT...] -- COMMAND`: run `fp8stack COMMAND` with faults, and exit as it does."""
    if len(words) < 3 or words[1] != "--":
        sys.exit("usage: python -m tests.faults.harness FAULT[,FAULT...] -- pretrain ...")
    with injected(parse(words[0])):
        cli.main(list(words[2:]))


if __name__ == "__main__":
    main(sys.argv[1:])
