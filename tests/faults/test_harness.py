"""The tool that puts faults into a run: what it reads, and where its faults happen."""

import os
import signal
import threading

import pytest
import torch

from fp8stack.common.errors import UserError
from fp8stack.data import StepBatches
from tests.faults import harness as faults
from tests.faults.harness import Fault, injected, parse


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill@step:7", Fault(action="kill", place="step", number=7)),
        ("note@save", Fault(action="note", place="save")),
        ("full:4096@save:3", Fault(action="full", bytes=4096, place="save", number=3)),
        ("stop@all-reduce:3/rank=1", Fault(action="stop", place="all-reduce", number=3, rank=1)),
        ("term@time:0.5", Fault(action="term", place="time", delay_s=0.5)),
        ("usr1@forward:2+0.25", Fault(action="usr1", place="forward", number=2, delay_s=0.25)),
    ],
)
def test_a_fault_is_read_as_it_is_written(text, fault):
    assert parse(text) == [fault]


@pytest.mark.parametrize(
    "text",
    ["kill", "kill@", "kil@step:1", "kill@stop:1", "full@step:1", "kill@step:1.5", "kill@time",
     "kill@step:-1", "kill@step:1/rank=x"],
)  # fmt: skip
def test_what_is_no_fault_is_refused_in_one_line(text, capsys):
    with pytest.raises(UserError, match="is no fault"):
        parse(f"kill@step:1,{text}")
    with pytest.raises(SystemExit) as exit:
        faults.main([text, "--", "pretrain"])
    assert exit.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_without_a_command_the_usage_is_shown(capsys):
    with pytest.raises(SystemExit) as exit:
        faults.main(["kill@step:1", "pretrain"])
    assert exit.value.code == 2
    assert capsys.readouterr().err.startswith("usage: python -m tests.faults.harness")


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> StepBatches:
    """Batches of steps that hold nothing."""
    monkeypatch.setattr(StepBatches, "__getitem__", lambda self, step: torch.zeros(1))
    return StepBatches.__new__(StepBatches)


@pytest.mark.parametrize("name", ["term", "int", "hup", "usr1"])
def test_signals_reach_the_process_at_their_place(name, batches):
    heard: list[int] = []
    number = faults.SIGNALS[name]
    old = signal.signal(number, lambda number, frame: heard.append(number))
    try:
        with injected(parse(f"{name}@step:2")):
            batches[1]
            assert heard == []
            batches[2]
            assert heard == [number]
            batches[2]  # a roll-back: it does not happen again
            assert heard == [number]
        batches[2]
    finally:
        signal.signal(number, old)
    assert heard == [number]


def test_a_fault_of_another_rank_does_not_happen(batches, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with injected(parse("kill@step:1/rank=1")):
        batches[1]


def test_collectives_are_counted_those_of_ddp_included(batches, tmp_path, capfd):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        with injected(parse("note@all-reduce")):
            torch.distributed.all_reduce(torch.ones(1))  # set-up
            batches[1]
            model(torch.ones(1, 2)).sum().backward()
            torch.distributed.all_reduce(torch.ones(1))
    finally:
        torch.distributed.destroy_process_group()
    notes = [line for line in capfd.readouterr().err.splitlines() if line.startswith("fault")]
    assert [line.split(":")[1] for line in notes] == [" all-reduce 1", " all-reduce 2"]


def test_a_fault_in_a_process_that_reads_data_does_not_happen_there(batches, monkeypatch):
    with injected(parse("kill@step:1")):
        monkeypatch.setattr(os, "getpid", lambda: -1)
        batches[1]


def test_a_delayed_fault_comes_later_and_from_another_thread(batches, monkeypatch):
    came = threading.Event()
    threads: list[threading.Thread] = []

    def kill(pid: int, signal: int) -> None:
        threads.append(threading.current_thread())
        came.set()

    monkeypatch.setattr(os, "kill", kill)
    with injected(parse("term@step:1+0.01")):
        batches[1]
        assert came.wait(30)
    assert threads != [threading.current_thread()]
