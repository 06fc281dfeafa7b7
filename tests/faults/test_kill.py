"""Runs that are killed at any moment come to the same numbers (R1), and the tool that kills."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from bench import twins
from bench.twins import Twin
from fp8stack.data import StepBatches
from fp8stack.errors import UserError
from tests.faults import harness as faults
from tests.faults.harness import Fault, injected, parse
from tests.faults.kill_rows import CASES, kills
from tests.faults.whole_runs import Child, checkpoint_difference, checkpoints, difference, rows


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    """A run of 6 steps that nothing disturbs, with checkpoints of steps 3 and 6."""
    return Twin(tmp_path_factory.mktemp("twin") / "fp32", "fp32", 6, 3)


def test_killed_runs_end_as_if_they_had_not_been_in_every_recipe(tmp_path: Path) -> None:
    case = CASES["R1"]
    outcome = case.run(tmp_path, case.short)
    assert outcome.lost == ()
    assert outcome.injected == outcome.survived == case.short
    assert {path.name for path in tmp_path.iterdir()} == {
        "fp32", "bf16", "fp16", "delayed", "current", "block", "mxfp8",
    }  # fmt: skip


def test_a_kill_that_never_happens_is_not_counted_as_survived(
    tmp_path: Path, twin: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(twins.Twin, "go", lambda self, run, faults="": twin.ended)
    with pytest.raises(RuntimeError, match="not killed as they should be"):
        kills(tmp_path, 1, ["fp32"])


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill@step:7", Fault(action="kill", place="step", number=7)),
        ("note@save", Fault(action="note", place="save")),
        ("full:4096@save:3", Fault(action="full", bytes=4096, place="save", number=3)),
        (
            "stop@all-reduce:3/rank=1",
            Fault(action="stop", place="all-reduce", number=3, rank=1),
        ),
        ("term@time:0.5", Fault(action="term", place="time", delay_s=0.5)),
        ("usr1@forward:2+0.25", Fault(action="usr1", place="forward", number=2, delay_s=0.25)),
    ],
)
def test_a_fault_is_read_as_it_is_written(text: str, fault: Fault) -> None:
    assert parse(text) == [fault]


@pytest.mark.parametrize(
    "text",
    ["kill", "kill@", "kil@step:1", "kill@stop:1", "full@step:1", "kill@step:1.5", "kill@time",
     "kill@step:-1", "kill@step:1/rank=x"],
)  # fmt: skip
def test_what_is_no_fault_is_refused_in_one_line(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="is no fault"):
        parse(f"kill@step:1,{text}")
    with pytest.raises(SystemExit) as exit:
        faults.main([text, "--", "pretrain"])
    assert exit.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_without_a_command_the_usage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        faults.main(["kill@step:1", "pretrain"])
    assert exit.value.code == 2
    assert capsys.readouterr().err.startswith("usage: python -m tests.faults.harness")


def test_places_are_reached_in_the_order_of_training(twin: Twin) -> None:
    faults = "note@step:2,note@forward:2,note@backward:2,note@step:3,note@forward:9"
    ended = twin.go(twin.new(), faults)
    assert ended.code == 0
    found = [line.split(":")[1].strip() for line in ended.stderr.splitlines() if "fault" in line]
    assert found == ["step 2", "forward 2", "backward 2", "step 3"]


def test_all_file_operations_of_a_save_are_found(twin: Twin) -> None:
    second = [operation.what for operation in twin.operations() if operation.step == 6]
    kinds = {what.split()[0] for what in second}
    assert {"os.mkdir", "open", "os.fsync", "os.rename"} <= kinds
    for file in ("model.safetensors", "checkpoint.json"):
        assert any(what.startswith("os.fsync") and what.endswith(file) for what in second)


@pytest.mark.parametrize("name", ["term", "int", "hup", "usr1"])
def test_signals_reach_the_process_at_their_place(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[int] = []
    number = faults.SIGNALS[name]
    old = signal.signal(number, lambda number, frame: heard.append(number))
    monkeypatch.setattr(StepBatches, "__getitem__", lambda self, step: torch.zeros(1))
    batches = StepBatches.__new__(StepBatches)
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


def test_a_fault_of_another_rank_does_not_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepBatches, "__getitem__", lambda self, step: torch.zeros(1))
    monkeypatch.setenv("RANK", "0")
    with injected(parse("kill@step:1/rank=1")):
        StepBatches.__new__(StepBatches)[1]


def test_collectives_are_counted_those_of_ddp_included(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(StepBatches, "__getitem__", lambda self, step: torch.zeros(1))
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        with injected(parse("note@all-reduce")):
            torch.distributed.all_reduce(torch.ones(1))  # set-up
            StepBatches.__new__(StepBatches)[1]
            model(torch.ones(1, 2)).sum().backward()
            torch.distributed.all_reduce(torch.ones(1))
    finally:
        torch.distributed.destroy_process_group()
    found = [line for line in capfd.readouterr().err.splitlines() if line.startswith("fault")]
    assert [line.split(":")[1] for line in found] == [" all-reduce 1", " all-reduce 2"]


def test_a_fault_in_a_process_that_reads_data_does_not_happen_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StepBatches, "__getitem__", lambda self, step: torch.zeros(1))
    with injected(parse("kill@step:1")):
        monkeypatch.setattr(os, "getpid", lambda: -1)
        StepBatches.__new__(StepBatches)[1]


def test_a_delayed_fault_comes_later_and_from_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    came = threading.Event()
    who: list[threading.Thread] = []
    monkeypatch.setattr(StepBatches, "__getitem__", lambda self, step: torch.zeros(1))
    monkeypatch.setattr(
        faults.os, "kill", lambda pid, n: (who.append(threading.current_thread()), came.set())
    )
    with injected(parse("term@step:1+0.01")):
        StepBatches.__new__(StepBatches)[1]
        assert came.wait(30)
    assert who != [threading.current_thread()]


# What two runs differ in


def test_two_runs_that_differ_in_one_thing_are_told_apart(twin: Twin) -> None:
    same, other = twin.new(), twin.new()
    assert twin.go(same).code == 0
    assert difference(same, twin.path) == ""
    words = [*twin.words, "--seed", "1", "--out", other.name]
    assert Child(words, twin.folder).wait().code == 0
    assert "tensors" in difference(other, twin.path)
    assert "tensors" in checkpoint_difference(*(checkpoints(run)[-1] for run in (other, same)))
    metrics = same / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:-1]))
    assert "rows of metrics, not" in difference(same, twin.path)
    metrics.write_text("".join(lines).replace('"loss": ', '"loss": 1'))
    assert "row 1 of the metrics" in difference(same, twin.path)
    assert difference(same.with_name("none"), twin.path) == "the newest checkpoint is missing"


def test_a_run_that_does_not_end_is_killed(twin: Twin) -> None:
    child = twin.start(twin.new(), "stop@step:2")
    with pytest.raises(TimeoutError, match="did not end in 3 s"):
        child.wait(3)
    assert not child.alive


def test_a_killed_run_has_the_rows_of_its_steps(twin: Twin) -> None:
    run = twin.new()
    assert twin.go(run, "kill@step:4").code == -signal.SIGKILL
    assert [row["step"] for row in rows(run)] == [1, 2, 3]
