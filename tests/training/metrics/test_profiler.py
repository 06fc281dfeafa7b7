"""`--profile`: one step after warm-up, as a trace and as a table."""

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8stack.training.metrics import profiler
from tests.conftest import TINY, losses
from tests.support.small_loop import SmallLoop

CPU = torch.device("cpu")


def traced(run: Path) -> list[str]:
    """The names of all events in a run's trace."""
    content = json.loads(gzip.decompress((run / "profile" / "trace.json.gz").read_bytes()))
    return [event["name"] for event in content["traceEvents"]]


@pytest.mark.capability("D5")
def test_the_fifth_step_is_profiled_and_the_losses_are_the_same(
    command, finished, new, tmp_path, capsys
):
    assert not (finished / "r" / "profile").exists()
    assert command(*new, "--out", "r", "--profile", "--log-every", "1") == 0
    printed = capsys.readouterr().out
    assert losses(tmp_path / "r") == losses(finished / "r")
    file = tmp_path / "r" / "profile" / "profile.md"
    table = file.read_text()
    assert table in printed
    assert "profile: r/profile" in printed
    assert table.startswith("Step 5: ")
    assert printed.index("step 4/12") < printed.index("Step 5: ") < printed.index("step 5/12")
    names = traced(tmp_path / "r")
    # One step: forward, backward and one optimizer step for each of the two groups.
    assert names.count("aten::_fused_adamw_") == 2
    assert "aten::embedding" in names
    assert any("Backward" in name for name in names)
    # A run with a profile can be resumed, with or without another profile.
    assert command("pretrain", "--resume", "r", "--steps", "13", "--no-profile") == 0
    assert file.read_text() == table
    assert command("pretrain", "--resume", "r", "--steps", "14", "--profile") == 0
    assert file.read_text().startswith("Step 14: ")  # the last, since there is no fifth


def operators(text: str) -> list[list[str]]:
    """The rows of the table: an operator's name, and its columns."""
    lines = [line for line in text.splitlines() if re.match(r" +(aten::|\[memory\])", line)]
    return [re.split(r" {2,}", line.strip()) for line in lines]


@pytest.mark.capability("D5")
def test_the_table_has_the_operators_with_the_largest_times_of_their_own_in_order():
    a = torch.ones(512, 512)

    def work() -> None:
        for _ in range(3):
            a.mm(a)
        for _ in range(5):
            a.add(1)

    work()
    with profiler.recording(CPU) as recorded:
        work()
    text = profiler.table(recorded, 7)
    assert text.startswith("Step 7: ")
    calls = {name: int(columns[-1]) for name, *columns in operators(text)}
    assert (calls["aten::mm"], calls["aten::add"]) == (3, 5)
    shares = [float(columns[0].rstrip("%")) for _, *columns in operators(text)]
    assert shares == sorted(shares, reverse=True)


@pytest.mark.capability("D5")
@pytest.mark.full
def test_several_steps_are_one_profile_with_shapes_and_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(profiler, "TOP", 1000)  # which are the slowest is up to chance
    keys: dict[str, Any] = {"profile": True, "profile_step": 2, "profile_steps": 3}
    plain = SmallLoop(tmp_path / "plain", "fp32", steps=6)
    plain.advance(6)
    small = SmallLoop(
        tmp_path / "r", "fp32", steps=6, profile_shapes=True, profile_memory=True, **keys
    )
    small.advance(3)
    assert not (tmp_path / "r" / "profile").exists()
    small.advance(3)
    assert losses(tmp_path / "r") == losses(tmp_path / "plain")
    names = traced(tmp_path / "r")
    assert [names.count(f"step {step}") for step in range(1, 7)] == [0, 1, 1, 1, 0, 0]
    assert names.count("aten::_fused_adamw_") == 2 * 3
    text = (tmp_path / "r" / "profile" / "profile.md").read_text()
    assert text.startswith("Steps 2 to 4: ")
    # A GEMM of the MLP: 4 sequences of 32 tokens, a width of 32.
    assert re.search(r"^ +aten::mm .* Mi?B .*\[\[128, \d+\], \[\d+, \d+\]\]", text, re.M)
    assert "Memory in 3 steps: " in text


@pytest.mark.full
def test_a_profile_ends_with_the_run_and_one_that_is_over_is_told(command, tmp_path, capsys):
    flags = ["pretrain", "--recipe", "fp32", "--profile", *TINY, "--out", "r"]
    assert command(*flags, "--set", "profile_step=11", "--set", "profile_steps=5") == 0
    table = (tmp_path / "r" / "profile" / "profile.md").read_text()
    assert table.startswith("Steps 11 to 12: ")
    capsys.readouterr()
    assert command("pretrain", "--resume", "r", "--steps", "13") == 0
    assert "profile_step 11 is done already: nothing is profiled" in capsys.readouterr().out
    assert (tmp_path / "r" / "profile" / "profile.md").read_text() == table


def test_the_share_of_the_time_that_a_gpu_is_busy_counts_kernels_at_once_once(
    monkeypatch, tmp_path
):
    def event(device: str, start: float, stop: float, is_annotation: bool = False) -> Any:
        return SimpleNamespace(
            device_type=getattr(torch.autograd.DeviceType, device),
            time_range=SimpleNamespace(start=start, end=stop),
            is_user_annotation=is_annotation,
        )

    spans = [(0, 30), (10, 20), (25, 40), (50, 60)]  # together 50 of 100 us
    events = [*(event("CUDA", *span) for span in spans), event("CUDA", 0, 100, True)]
    recorded = profiler.Recording(activities=[torch.profiler.ProfilerActivity.CPU])
    monkeypatch.setattr(recorded, "events", lambda: events)
    recorded.wall_s = 100e-6
    assert profiler.busy(recorded) == pytest.approx(0.5)
    monkeypatch.setattr(profiler, "table", lambda *args: "")
    monkeypatch.setattr(recorded, "export_chrome_trace", lambda path: None)
    assert "\nThe GPU was busy 50.0 % of the time.\n" in profiler.write(recorded, tmp_path, 1)
    monkeypatch.setattr(recorded, "events", lambda: [event("CPU", 0, 1)])
    assert profiler.busy(recorded) is None
