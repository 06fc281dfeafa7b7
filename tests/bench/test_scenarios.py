"""Scenarios of `python -m bench` in a tiny form: they run, and measure what they say."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from bench import report, runner
from bench.cost import grid, operations
from fp8stack.analysis.benchmark.timing import Timing
from fp8stack.numerics import cast_to_fp8, dequantize, tensor_scale
from fp8stack.precision import Hardware
from tests.support.clock import timed

CPU, H200 = Hardware("cpu"), Hardware("cuda", (9, 0), name="NVIDIA H200")

pytestmark = pytest.mark.usefixtures("one_thread")

TIMED = ["--tiny", "--rounds", "2", "--warm-up", "1"]
SCENARIOS = {
    "emulation": [*TIMED, "--compiled", ""],
    "grid": [*TIMED, "--device", "cpu", "--recipes", "delayed"],
}


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.full
def test_every_scenario_measures_a_tiny_case_and_writes_it(name, tmp_path):
    module = runner.imported(name)
    measured = runner.measured(module, name, SCENARIOS[name])
    text = module.table(measured)
    report.write(measured, text, tmp_path)
    assert json.loads((tmp_path / f"{name}.json").read_text()) == measured
    rows = {(row["case"], row["arm"]): row for row in measured["results"]}
    assert len(rows) == len(measured["results"]) > 1
    for row in rows.values():
        base = rows[row["case"], row["ratio_to"]]
        ms, base_ms = row["fastest_ms"], base["fastest_ms"]
        rounded = 1e-4 / ms + 1e-4 / base_ms  # of calls that take microseconds, a few %
        assert row["ratio"] == pytest.approx(ms / base_ms, rel=1e-3 + rounded, abs=2e-3)
        assert row.get("rounds", 2) == 2
        assert f"| {row['case']} | {row['arm']} |" in text
        if name == "grid":
            assert row["paired_low"] <= row["paired"] <= row["paired_high"]
            assert report.paired_cell(row) in text


# Sizes


@pytest.mark.capability("D6")
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.full
def test_the_grid_has_every_precision_in_three_sizes_at_least(bf16, monkeypatch):
    def fake(arms: dict[str, Any], **options: Any) -> dict[str, Timing]:
        return timed({name: [1.0] for name in arms}, rounds=6)

    monkeypatch.setattr(grid, "interleaved", fake)
    monkeypatch.setattr(grid, "build_step", lambda *arguments: lambda: None)
    monkeypatch.setattr(grid, "probe", lambda device: Hardware("cpu", cpu_bf16=bf16))
    measured = runner.measured(grid, "grid", ["--tiny", "--device", "cpu", "--parts", "sizes"])
    precisions = ("fp32", "bf16", "fp16", "delayed", "current", "block", "mxfp8", "rowwise")
    sizes = [work.model for work in grid.sizes("cpu", tiny=True)]
    assert len(sizes) >= 3
    assert {(row["case"], row["arm"]) for row in measured["results"]} == {
        (size, precision) for size in sizes for precision in precisions
    }
    assert {row["ratio_to"] for row in measured["results"]} == {"bf16" if bf16 else "fp32"}
    # A CPU has no TF32: said in each size, with the plan's reason.
    assert [(row["case"], row["arm"]) for row in measured["left_out"]] == [
        (s, "tf32") for s in sizes
    ]
    text = grid.table(measured)
    assert "| tf32 | runs as fp32 here | runs as fp32 here | runs as fp32 here |" in text
    needed = "tf32 needs compute capability 8.0, this is a CPU"
    assert f"runs as fp32 here: {needed}" in text
    for device in ("cpu", "cuda"):
        parameters = [work.config.parameters() for work in grid.sizes(device, tiny=False)]
        assert len(parameters) >= 3
        assert parameters == sorted(set(parameters))


# The operations are what they are called


@pytest.mark.capability("D6")
def test_every_cast_gives_its_format():
    x = torch.randn(128, 128)
    copies: dict[str, Any] = {name: arm() for name, arm in operations.casts(x).items()}
    assert copies.keys() == operations.WRITTEN.keys()
    scale = tensor_scale(x.abs().max(), "e4m3")
    assert torch.equal(copies["e4m3"].float(), cast_to_fp8(x, scale, "e4m3").float())
    assert copies["e5m2"].dtype == torch.float8_e5m2
    for name in operations.WRITTEN:
        data = copies[name][0] if isinstance(copies[name], tuple) else copies[name]
        assert data.element_size() == operations.WRITTEN[name], name
    for name in ("mxfp8", "block"):
        assert (dequantize(copies[name]) - x).abs().max() < 0.1 * x.abs().max(), name
