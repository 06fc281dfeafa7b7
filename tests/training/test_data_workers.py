"""A data worker that is killed, stopped or without memory: the run is saved, says why it ends, and
matches an undisturbed run to the bit when resumed."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pkgutil
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.data import dataloader

from fp8stack.common.errors import DataWorkerLost
from fp8stack.data import StepBatches
from fp8stack.training import data_workers
from fp8stack.training.data_workers import DataWorkers, in_shared_memory
from tests.conftest import TINY
from tests.faults.processes import Child, Ended, difference, last_step, run_ranks

WORDS = ["pretrain", "--recipe", "delayed", "--out", "r", *TINY, "--set", "workers=2"]
WORDS += ["--set", "worker_timeout=2"]

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="needs Linux")


def kill(number: int) -> None:
    """Send a signal to the last data worker of this process, from another process. (A worker takes
    SIGTERM from its parent as a request to end.)"""
    worker = max(worker.pid or 0 for worker in multiprocessing.active_children())
    subprocess.run(["bash", "-c", f"kill -{number:d} {worker}"], check=True)


def fill_shared_memory(number: int) -> None:
    """Limit the files of this process, as if /dev/shm were full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))


def lose_memory(number: int) -> None:
    raise MemoryError


def end(number: int) -> None:
    os._exit(3)


@contextmanager
def forking(rank: int) -> Iterator[None]:
    """A change: processes are forked, as in a command, unlike in the tests' server, and torch looks
    after half a second, rather than after five, whether a worker that is silent has ended."""
    multiprocessing.set_start_method("fork", force=True)
    receive = dataloader._MultiProcessingDataLoaderIter._try_get_data
    with (
        patch("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5),
        patch.object(receive, "__defaults__", (0.5,)),
    ):
        yield


@contextmanager
def reading(step: int, act: Callable[[int], None], number: int, rank: int) -> Iterator[None]:
    """A change: the data worker that reads `step` does something before, on the last rank."""
    get, main = StepBatches.__getitem__, os.getpid()

    def item(batches: StepBatches, at: int) -> Tensor:
        if at == step and os.getpid() != main:
            act(number)
        return get(batches, at)

    is_last = rank == int(os.environ.get("WORLD_SIZE", "1")) - 1
    with forking(rank), patch.object(StepBatches, "__getitem__", item if is_last else get):
        yield


@contextmanager
def calling(name: str, count: int, number: int, rank: int) -> Iterator[None]:
    """A change: a data worker gets a signal before the `count`-th call of a function."""
    function, calls = pkgutil.resolve_name(name), list[str]()

    def called(*arguments: Any, **keys: Any) -> Any:
        calls.append(name)
        if len(calls) == count:
            kill(number)
        return function(*arguments, **keys)

    with forking(rank), patch(name, called):
        yield


def signal_itself(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture(scope="module")
def twin(tmp_path_factory) -> Path:
    """The run that nothing befell."""
    folder = tmp_path_factory.mktemp("twin")
    assert run_ranks(WORDS, folder, 1, change=forking)[0].code == 0
    return folder / "r"


FULL = pytest.mark.full
SHA256 = "fp8stack.training.checkpoint.writer.sha256_of_file"
EVALUATION = "fp8stack.training.loop.validation_loss"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            partial(calling, SHA256, 2, signal.SIGTERM),  # in a save
            r"Data worker \d+ was killed by signal 15 \(SIGTERM\)\.",
        ),
        pytest.param(
            partial(reading, 1, signal_itself, signal.SIGKILL),
            r"Data worker \d+ was killed by signal 9 \(SIGKILL\)\. Perhaps the machine "
            r"is out of memory\.",
            marks=FULL,
        ),
        pytest.param(
            partial(calling, EVALUATION, 1, signal.SIGSTOP),
            r"Data workers gave no batch for 2 s \(worker_timeout\): a signal stopped "
            r"process \d+\.",
            marks=FULL,
        ),
        pytest.param(
            partial(reading, 7, fill_shared_memory, 0),
            r"A data worker cannot hand over a batch: /dev/shm, the shared memory, is full\. Make "
            r"room there, or make it larger \(docker run --shm-size=8g\)\.",
            marks=FULL,
        ),
        pytest.param(
            partial(reading, 7, lose_memory, 0), r"A data worker found no memory left\.", marks=FULL
        ),
        pytest.param(
            partial(reading, 7, end, 0), r"Data worker \d+ ended with exit code 3\.", marks=FULL
        ),
    ],
)
def test_a_lost_worker_ends_the_run_saved_and_it_resumes_to_the_bit(
    change, message, twin, tmp_path
):
    ended = run_ranks(WORDS, tmp_path, 1, change=change)[0]
    step = last_step(tmp_path / "r")
    saved = f"The run is saved after step {step}" if step else "No step was done yet"
    saved += ": go on with fp8stack pretrain --resume r, and with --set workers=0 if it happens"
    assert ended.code == 75, ended
    assert ended.is_one_line, ended.stderr
    assert re.fullmatch(f"fp8stack: {message} {re.escape(saved)} again\\.\n", ended.stderr)
    assert step < 12
    assert not list(tmp_path.rglob(".tmp-*"))
    assert run_ranks([*WORDS, "--resume", "auto"], tmp_path, 1, change=forking)[0].code == 0
    assert difference(tmp_path / "r", twin) == ""


@pytest.mark.full
def test_all_ranks_end_alike_if_one_of_them_loses_a_worker(tmp_path):
    change = partial(reading, 7, signal_itself, signal.SIGKILL)
    ended: list[Ended] = run_ranks(WORDS, tmp_path, 2, change=change)
    assert [rank.code for rank in ended] == [75, 75]
    assert "rank 1: Data worker" in ended[0].stderr
    assert last_step(tmp_path / "r") in range(1, 7)


@pytest.mark.full
def test_a_run_that_is_told_to_stop_does_not_wait_for_a_stopped_worker(tmp_path):
    words = [*WORDS, "--steps", "100000", "--set", "worker_timeout=3000"]
    child = Child(words, tmp_path, change=partial(reading, 7, signal_itself, signal.SIGSTOP))
    while not any(map(is_stopped, children(child.pid))):
        assert child.is_alive
        time.sleep(0.05)
    child.signal(signal.SIGTERM)
    ended = child.wait(120)
    assert ended.code == 75
    assert last_step(tmp_path / "r")
    assert children(child.pid) == []


def children(process: int) -> list[int]:
    """The processes that a process started (Linux)."""
    try:
        return [*map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())]
    except OSError:
        return []


def is_stopped(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG])
def test_torchs_errors_about_shared_memory_name_it(code, monkeypatch):
    def full(tensor: Tensor) -> Tensor:
        file = "shared memory(shm) for file </torch_1_2_3>"
        raise RuntimeError(f"unable to allocate {file}: {os.strerror(code)} ({code})")

    monkeypatch.setattr(Tensor, "share_memory_", full)
    tokens = torch.zeros(3)
    assert in_shared_memory(tokens) is tokens  # in the main process nothing is shared
    monkeypatch.setattr(data_workers, "get_worker_info", lambda: object())
    with pytest.raises(DataWorkerLost, match="/dev/shm, the shared memory, is full"):
        in_shared_memory(tokens)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "/dev/shm, the shared memory, is full"),
        (OSError(errno.EAGAIN, "Resource temporarily unavailable"), "temporarily unavailable"),
    ],
)
def test_workers_that_cannot_start_are_lost(error, message):
    class Loader:
        def __iter__(self) -> Iterator[Tensor]:
            raise error

    with pytest.raises(DataWorkerLost, match=f"^Cannot start data workers: .*{message}"):
        DataWorkers(Loader(), 60.0, bool)  # type: ignore[arg-type]


def test_a_lost_worker_keeps_its_message_on_its_way_to_the_main_process():
    wrapped = (
        "Caught DataWorkerLost in DataLoader worker process 0.\nOriginal Traceback (most recent"
    )
    wrapped += ' call last):\n  File "x"\nfp8stack.errors.DataWorkerLost: It is: full.\n'
    assert str(DataWorkerLost(wrapped)) == str(DataWorkerLost("It is: full.")) == "It is: full."
