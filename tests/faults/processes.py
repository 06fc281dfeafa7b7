"""Runs of `fp8stack` in processes of their own, one per rank, and what two runs differ in.

A process starts in a fraction of a second: it is forked from a server that has imported everything
and has computed nothing, so that it is like a fresh interpreter. Each computes in one thread. Every
rank ends or is killed: nothing here waits for ever.
"""

import gc
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8stack import cli
from fp8stack.layers import fp8_state
from fp8stack.training import finalize, loop
from fp8stack.training.checkpoint import reader
from fp8stack.training.run import Run
from tests.faults.harness import injected, parse
from tests.support.quick_runs import quick_runs

_PRELOADED = [
    "pytest", "tests.faults.processes", "bench.__main__", "fp8stack.training.setup.start",
    "torch.utils.tensorboard", "torch._dynamo", "fp8stack.numerics.fused_kernels",
    "fp8stack.analysis.report.page", "fp8stack.trained.export",
]  # fmt: skip
_TIMES = {"step_ms", "tokens_per_s", "mfu", "memory_gib"}  # what no two runs share

Change = Callable[[int], AbstractContextManager[None]]
"""A change to a rank's process, given the rank. It is pickled: it must be a module's function."""


@contextmanager
def unchanged(rank: int) -> Iterator[None]:
    """The process as it is."""
    yield


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of a process: its exit code, or the negative number of the signal."""

    code: int
    stdout: str
    stderr: str
    seconds: float = 0.0

    @property
    def is_one_line(self) -> bool:
        """Whether stderr holds a single line, and no traceback."""
        return self.stderr.count("\n") == 1 and "Traceback" not in self.stderr


class Child:
    """A rank of `fp8stack` with some words under way, in a working folder."""

    def __init__(
        self,
        words: Sequence[str],
        folder: Path,
        faults: str = "",
        environment: Mapping[str, str] | None = None,
        change: Change = unchanged,
        rank: int = 0,
    ) -> None:
        context = _server()
        # Pipes and not files, which a full disk would cut short.
        pipes = [context.Pipe(duplex=False) for _ in ("stdout", "stderr")]
        writers = [writer for _, writer in pipes]
        variables = {"OMP_NUM_THREADS": "1", **(environment or {})}
        arguments = (list(words), folder, faults, variables, writers, change, rank)
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
    def printed(self) -> bytes:
        """The process's stdout so far."""
        return bytes(self._printed[0])

    @property
    def is_alive(self) -> bool:
        """Whether it still runs, or is stopped."""
        return self._process.is_alive()

    @property
    def is_stopped(self) -> bool:
        """Whether it is stopped by a signal (Linux)."""
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] == "T"

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = 300.0) -> Ended:
        """Wait for the process to end.

        Raises:
            TimeoutError: the process did not end in time; it is killed.
        """
        self._process.join(timeout_s)
        late = self.is_alive
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


class Together:
    """The ranks of one run, under way; as a context, none of them outlives it. One rank alone gets
    no launcher's environment."""

    def __init__(
        self, words: Sequence[str], folder: Path, count: int, faults: str, change: Change
    ) -> None:
        self.children = [
            Child(words, folder, faults, variables, change, rank)
            for rank, variables in enumerate(_launched(count))
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()

    def wait(self, timeout_s: float = 300.0) -> list[Ended]:
        """Wait until every rank has ended or is stopped; stopped ranks are killed.

        Raises:
            TimeoutError: a rank did neither in time; all are killed.
        """
        until = time.monotonic() + timeout_s
        while hung := [
            rank
            for rank, child in enumerate(self.children)
            if child.is_alive and not child.is_stopped
        ]:
            if time.monotonic() > until:
                self._kill()
                errors = [child.wait().stderr[-500:] for child in self.children]
                raise TimeoutError(f"Ranks {hung} did not end in {timeout_s:.0f} s: {errors}")
            time.sleep(0.01)
        self._kill()
        return [child.wait() for child in self.children]

    def _kill(self) -> None:
        for child in self.children:
            if child.is_alive:
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


def in_ranks(work: Callable[[int], Any], count: int, timeout_s: float = 60.0) -> list[Any]:
    """The results of `work`, a module's function, on each rank."""
    context = _server()
    ends, processes = [], []
    for rank, variables in enumerate(_launched(count)):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_send, args=(work, rank, variables, sender), daemon=True)
        process.start()
        sender.close()
        ends.append(receiver)
        processes.append(process)
    try:
        assert all(end.poll(timeout_s) for end in ends)
        return [end.recv() for end in ends]
    finally:
        for process in processes:
            process.kill()


def _send(work: Callable[[int], Any], rank: int, variables: dict[str, str], to: Connection) -> None:
    os.environ.update(variables)
    torch.set_num_threads(1)
    to.send(work(rank))
    os._exit(0)


def _launched(count: int) -> list[dict[str, str]]:
    """The environment that torchrun gives each of so many ranks of one machine."""
    if count == 1:
        return [{}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(count)]


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
    folder: Path,
    faults: str,
    variables: dict[str, str],
    writers: list[Connection],
    change: Change,
    rank: int,
) -> None:
    """The main function of a process."""
    gc.freeze()  # what the server imported is no garbage
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and would stay so
    for number, writer in enumerate(writers, 1):
        os.dup2(writer.fileno(), number)
        writer.close()
    # The server's own stand for files that they no longer are.
    sys.stdout, sys.stderr = (os.fdopen(n, "w", 1, closefd=False) for n in (1, 2))
    os.environ.update(variables)
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.argv = ["fp8stack", *words]
    within_pytest = "PYTEST_VERSION" in os.environ
    with quick_runs() if within_pytest else nullcontext(), change(rank), injected(parse(faults)):
        cli.main(words)


@contextmanager
def telling_states(folder: str, rank: int) -> Iterator[None]:
    """A change: the rank writes its FP8 state into `folder` when all steps are done."""
    finish = finalize.finish

    def finished(run: Run, *arguments: Any) -> None:
        state = {name: tensor.contiguous() for name, tensor in fp8_state(run.model).items()}
        save_file(state, Path(folder) / f"fp8-{rank}.safetensors")
        finish(run, *arguments)

    with patch.object(loop, "finish", finished):
        yield


def states(folder: Path, count: int) -> list[dict[str, Tensor]]:
    """The states that `telling_states` wrote, by rank."""
    return [load_file(folder / f"fp8-{rank}.safetensors") for rank in range(count)]


# The content of a run, and the differences of two runs


def difference(run: Path, twin: Path) -> str:
    """The first thing in which two finished runs of as many ranks differ, "" if none: every tensor
    of the newest checkpoint and what it says of the guard and the loss scale, and every row of the
    metrics, times apart."""
    if not checkpoints(twin) or last_step(run) != last_step(twin):
        return f"the newest checkpoint is of step {last_step(run)}, not {last_step(twin)}"
    wrong = checkpoint_difference(checkpoints(run)[-1], checkpoints(twin)[-1])
    for row, expected in zip_longest(rows(run), rows(twin)):
        if row != expected:
            wrong = wrong or f"a row of the metrics is {row}, not {expected}"
    return wrong


def checkpoint_difference(checkpoint: Path, twin: Path) -> str:
    """The first thing in which two checkpoints differ, "" if none."""
    a, b = dict(_contents(checkpoint)), dict(_contents(twin))
    odd = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    if odd:
        return f"{checkpoint.name}: {odd[0]} differs, with {len(odd) - 1} more of {len(b)} tensors"
    info, expected = _info(checkpoint), _info(twin)
    for key in ("step", "scaler", "guard", "identity"):
        if info.get(key) != expected.get(key):
            return f"{checkpoint.name}: '{key}' is {info.get(key)}, not {expected.get(key)}"
    return ""


def _contents(checkpoint: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every tensor of a checkpoint, by file and name: its dtype, shape and bytes. The product's
    reader is not asked."""
    for file in sorted(checkpoint.rglob("*.safetensors")):
        for name, tensor in safetensors.deserialize(file.read_bytes()):
            yield f"{file.relative_to(checkpoint)}'s {name}", tensor


def _info(checkpoint: Path) -> dict[str, Any]:
    manifest = json.loads((checkpoint / "checkpoint.json").read_text())
    return {"step": manifest["step"], **manifest["info"]}


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint as `group:name`, whole, however many ranks wrote it."""
    groups = reader.load(checkpoint).tensors
    return {f"{group}:{name}": of[name] for group, of in groups.items() for name in of}


def rows(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics, without times; a last one that was cut short is left out."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    parsed = (json.loads(line) for line in lines if line.endswith("\n"))
    return [{key: value for key, value in row.items() if key not in _TIMES} for row in parsed]


def checkpoints(run: Path) -> list[Path]:
    """A run's checkpoints, the oldest first."""
    return sorted((run / "checkpoints").glob("step-*"))


def last_step(run: Path) -> int:
    """The step of the newest checkpoint, 0 if there is none."""
    saved = checkpoints(run)
    return int(saved[-1].name.removeprefix("step-")) if saved else 0


def files(run: Path) -> set[str]:
    """The names of all files and folders of a run."""
    return {str(path.relative_to(run)) for path in run.rglob("*")}
