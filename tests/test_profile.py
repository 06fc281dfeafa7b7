"""`--profile`: one step after warm-up, as a trace and as a table."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, Command, losses, metrics
from small_loop import SmallLoop
from torch.profiler import profile

from fp8stack.training import loop, profiling

CPU = torch.device("cpu")


def traced(run: Path) -> list[str]:
    """The names of all events in a run's trace."""
    content = json.loads(gzip.decompress((run / "profile" / "trace.json.gz").read_bytes()))
    return [event["name"] for event in content["traceEvents"]]


def test_the_fifth_step_is_profiled_and_the_losses_are_the_same(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--recipe", "fp32", *TINY]
    assert command("pretrain", "--out", "plain", *flags) == 0
    assert not (tmp_path / "plain" / "profile").exists()
    capsys.readouterr()
    assert command("pretrain", "--out", "r", "--profile", *flags) == 0
    printed = capsys.readouterr().out
    assert losses(tmp_path / "r") == losses(tmp_path / "plain")
    table = (tmp_path / "r" / "profile" / "profile.md").read_text()
    assert table in printed
    assert "profile: r/profile" in printed
    assert table.startswith("Step 5: ")
    assert printed.index("step 4/12") < printed.index("Step 5: ") < printed.index("step 5/12")
    names = traced(tmp_path / "r")
    # One step: forward, backward and one optimizer step for each of the two groups.
    assert names.count("aten::_fused_adamw_") == 2
    assert "aten::embedding" in names
    assert any("Backward" in name for name in names)
    # A run with a profile goes on, and may be profiled again or not.
    assert command("pretrain", "--resume", "r", "--steps", "14", "--no-profile") == 0
    assert (tmp_path / "r" / "profile" / "profile.md").read_text() == table
    assert command("pretrain", "--resume", "r", "--steps", "16", "--profile") == 0
    again = (tmp_path / "r" / "profile" / "profile.md").read_text()
    assert again.startswith("Step 16: ")  # the last, since there is no fifth


def test_the_table_has_the_largest_own_times_in_order_with_shares_of_all() -> None:
    a = torch.ones(512, 512)

    def work() -> None:
        for _ in range(3):
            a.mm(a)
        for _ in range(5):
            a.add(1)

    work()
    with profiling.recording(CPU) as recorded:
        work()
    text = profiling.table(recorded, 7)
    found = re.findall(r"^\| (aten::\S+) +\| +(\d+) \| +([\d.]+) \| +(\d+) % \|$", text, re.M)
    rows = {name: (int(calls), float(ms), int(share)) for name, calls, ms, share in found}
    assert rows["aten::mm"][0] == 3
    assert rows["aten::add"][0] == 5
    times = [ms for _, ms, _ in rows.values()]
    assert times == sorted(times, reverse=True)
    total = float(re.findall(r"^Step 7: ([\d.]+) ms on the CPU", text)[0])
    for _, ms, share in rows.values():
        assert share == pytest.approx(100 * ms / total, abs=0.6)


class Event:
    """What torch's profiler says of an operator, or of a kernel."""

    def __init__(self, device: str, key: str, count: int, cpu_us: float, gpu_us: float) -> None:
        self.device_type = getattr(torch.autograd.DeviceType, device)
        self.key, self.count, self.is_user_annotation = key, count, False
        self.self_cpu_time_total, self.self_device_time_total = cpu_us, gpu_us


def test_on_a_gpu_the_time_is_the_kernels_and_no_kernel_counts_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events = [
        Event("CPU", "aten::mm", 4, 10.0, 3000.0),
        Event("CPU", "aten::add", 2, 900.0, 1000.0),
        Event("CUDA", "gemm_kernel", 4, 0.0, 3000.0),
        Event("CUDA", "add_kernel", 2, 0.0, 1000.0),
    ]
    recorded = profile(activities=[torch.profiler.ProfilerActivity.CPU])
    monkeypatch.setattr(recorded, "key_averages", lambda: events)
    lines = profiling.table(recorded, 5).splitlines()
    assert lines[0].startswith("Step 5: 4.00 ms on the GPU.")
    assert lines[4:] == [
        "| aten::mm  |     4 |     3.000 |  75 % |",
        "| aten::add |     2 |     1.000 |  25 % |",
    ]


def test_the_time_of_the_profiled_step_is_without_what_writing_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, write = [0.0], profiling.write
    small = SmallLoop(tmp_path / "r", "fp32", steps=2, profile=True)
    train_step = small.loop.train_step

    def slow_step(*given: Any) -> Any:
        now[0] += 2
        return train_step(*given)

    def slow_write(*given: Any) -> str:
        now[0] += 100
        return write(*given)

    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(small.loop, "train_step", slow_step)
    monkeypatch.setattr(profiling, "write", slow_write)
    small.loop.journal.restart_clock()
    small.advance(2)
    assert [row["step_ms"] for row in metrics(tmp_path / "r")] == [2000, 2000]
    assert now[0] == 104


def test_a_folder_with_a_profile_of_something_else_is_not_written_into(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r" / "profile").mkdir(parents=True)
    assert command("pretrain", "--recipe", "fp32", "--out", "r", *TINY) == 2
    assert "r/profile is in the way" in capsys.readouterr().err
