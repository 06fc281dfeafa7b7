"""Whole runs of `fp8stack` in processes of their own, and what two of them differ in.

A process starts in a fraction of a second: it is forked from a server that has imported everything
and has computed nothing, so that it is like a fresh interpreter. Each computes in one thread. It
must not know which faults there are, nor how a checkpoint is written.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import safetensors

_PRELOADED = [
    "pytest", "tests.faults.harness", "bench.__main__", "fp8stack.training.loop",
    "fp8stack.training.setup.start",
    "torch.utils.tensorboard", "torch._dynamo",
]  # fmt: skip
_TIMES = {"step_ms", "tokens_per_s", "mfu", "memory_gib"}  # what no two runs share


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended: its exit code, or the signal's number, negative; what it printed; how long
    it took."""

    code: int
    stdout: str
    stderr: str
    seconds: float


class Child:
    """A run under way.

    Args:
        words: the arguments of `fp8stack`.
        folder: the working folder.
        faults: see `tests.faults.harness`.
        environment: variables to set.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        faults: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        variables = {"OMP_NUM_THREADS": "1", **(environment or {})}
        context = _server()
        # Pipes and not files, which a full disk would cut short.
        pipes = [context.Pipe(duplex=False) for _ in ("stdout", "stderr")]
        writers = [writer for _, writer in pipes]
        arguments = (list(words), str(folder), faults, variables, writers)
        self._process = context.Process(target=_work, args=arguments)
        self._printed = [bytearray(), bytearray()]
        self._readers = [
            threading.Thread(target=_drain, args=(reader, printed), daemon=True)
            for (reader, _), printed in zip(pipes, self._printed, strict=True)
        ]
        self._began = time.monotonic()
        self._process.start()
        for end in writers:
            end.close()
        for thread in self._readers:
            thread.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs, or is stopped."""
        return self._process.is_alive()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = 300.0) -> Ended:
        """How it ended.

        Raises:
            TimeoutError: it did not in that time; it is killed.
        """
        self._process.join(timeout_s)
        late = self.alive
        if late:
            self.signal(signal.SIGKILL)
            self._process.join()
        seconds = time.monotonic() - self._began
        for thread in self._readers:
            thread.join()
        out, err = (printed.decode(errors="replace") for printed in self._printed)
        if late:
            raise TimeoutError(f"The run did not end in {timeout_s:.0f} s: {(err or out)[-500:]}")
        code = self._process.exitcode
        assert code is not None
        return Ended(code=code, stdout=out, stderr=err, seconds=seconds)


def _server() -> multiprocessing.context.ForkServerContext:
    """The server; it starts with the first process."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _drain(reader: Connection, printed: bytearray) -> None:
    """Read a pipe to its end."""
    with reader:
        while read := os.read(reader.fileno(), 65536):
            printed += read


def _work(
    words: list[str],
    folder: str,
    faults: str,
    variables: dict[str, str],
    writers: list[Connection],
) -> None:
    """What a process does."""
    for number, writer in enumerate(writers, 1):
        os.dup2(writer.fileno(), number)
        writer.close()
    # The server's own stand for files that they no longer are.
    sys.stdout, sys.stderr = (os.fdopen(n, "w", 1, closefd=False) for n in (1, 2))
    os.environ.update(variables)
    os.chdir(folder)
    import torch

    from fp8stack import cli
    from tests.faults.harness import injected, parse

    torch.set_num_threads(1)
    sys.argv = ["fp8stack", *words]
    with injected(parse(faults)):
        cli.main(words)


# What two runs differ in


def difference(run: Path, twin: Path) -> str:
    """The first thing in which two finished runs differ, "" if none: every tensor of the newest
    checkpoint and what it says of the guard and the loss scale, and every row of the metrics, times
    apart."""
    ours, theirs = checkpoints(run), checkpoints(twin)
    if not ours or not theirs or ours[-1].name != theirs[-1].name:
        return f"the newest checkpoint is {ours[-1].name if ours else 'missing'}"
    return checkpoint_difference(ours[-1], theirs[-1]) or _rows_difference(rows(run), rows(twin))


def checkpoint_difference(ours: Path, theirs: Path) -> str:
    """The first thing in which two checkpoints differ, "" if none."""
    a, b = dict(_tensors(ours)), dict(_tensors(theirs))
    odd = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    if odd:
        return f"{ours.name}: {odd[0]} differs, with {len(odd) - 1} more of {len(b)} tensors"
    info, expected = _info(ours), _info(theirs)
    for key in ("step", "scaler", "guard", "identity"):
        if info.get(key) != expected.get(key):
            return f"{ours.name}: '{key}' is {info.get(key)}, not {expected.get(key)}"
    return ""


def _tensors(checkpoint: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every tensor of a checkpoint, by file and name: its dtype, shape and bytes."""
    for file in sorted(checkpoint.rglob("*.safetensors")):
        for name, tensor in safetensors.deserialize(file.read_bytes()):  # type: ignore[no-untyped-call]
            yield f"{file.relative_to(checkpoint)}'s {name}", tensor


def _info(checkpoint: Path) -> dict[str, Any]:
    manifest = json.loads((checkpoint / "checkpoint.json").read_text())
    return {"step": manifest["step"], **manifest["info"]}


def _rows_difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> str:
    for number, (row, expected) in enumerate(zip(ours, theirs, strict=False), 1):
        if row != expected:
            return f"row {number} of the metrics is {row}, not {expected}"
    return "" if len(ours) == len(theirs) else f"{len(ours)} rows of metrics, not {len(theirs)}"


def rows(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics, without times; a last one that was cut short is left out."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = (json.loads(line) for line in lines if line.endswith("\n"))
    return [{key: value for key, value in row.items() if key not in _TIMES} for row in whole]


def checkpoints(run: Path) -> list[Path]:
    """A run's checkpoints, the oldest first."""
    return sorted((run / "checkpoints").glob("step-*"))


def last_step(run: Path) -> int:
    """The step of the newest checkpoint, 0 if there is none."""
    found = checkpoints(run)
    return int(found[-1].name.removeprefix("step-")) if found else 0


def files(run: Path) -> set[str]:
    """The names of all files and folders of a run."""
    return {str(path.relative_to(run)) for path in run.rglob("*")}
