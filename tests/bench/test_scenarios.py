"""Scenarios of `python -m bench` in a tiny form: they run, and measure what they say."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch

from bench import cells, peers, report, runner
from bench.cost import (
    emulation,
    grid,
    linear,
    memory,
    operations,
    startup,
    step,
)
from fp8stack.analysis.benchmark import step_timing as training_step
from fp8stack.analysis.benchmark.timing import Timing, summarize
from fp8stack.model.config import GPTConfig
from fp8stack.numerics import cast_to_fp8, dequantize, tensor_scale
from fp8stack.precision import Hardware
from tests.support.clock import timed

CPU, H200 = Hardware("cpu"), Hardware("cuda", (9, 0), name="NVIDIA H200")

pytestmark = pytest.mark.usefixtures("one_thread")

TIMED = ["--tiny", "--rounds", "2", "--warm-up", "1"]
SCENARIOS = {
    "emulation": [*TIMED, "--compiled", ""],
    "grid": [*TIMED, "--device", "cpu", "--recipes", "delayed"],
    "linear": [*TIMED, "--device", "cpu"],
    "memory": ["--tiny", "--device", "cpu"],
    "startup": ["--rounds", "2"],
    "step": [*TIMED, "--device", "cpu", "--compiled", ""],
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "memory" else n for n in SCENARIOS]
)
def test_every_scenario_measures_a_tiny_case_and_writes_it(name, tmp_path, monkeypatch):
    monkeypatch.setattr(startup, "CASES", {"import torch": "pass", "nothing": "pass"})
    module = runner.imported(name)
    measured = runner.measured(module, name, SCENARIOS[name])
    text = module.table(measured)
    report.write(measured, text, module.figure(measured), tmp_path)
    assert json.loads((tmp_path / f"{name}.json").read_text()) == measured
    assert (tmp_path / f"{name}.png").stat().st_size > 5000
    rows = {(row["case"], row["arm"]): row for row in measured["results"]}
    assert len(rows) == len(measured["results"]) > 1
    key = "peak_gib" if name == "memory" else "fastest_ms"
    for row in rows.values():
        base = rows[row["case"], row["ratio_to"]]
        assert row[key] > 0
        rounded = 1e-4 / row[key] + 1e-4 / base[key]  # of calls that take microseconds, a few %
        assert row["ratio"] == pytest.approx(row[key] / base[key], rel=1e-3 + rounded, abs=2e-3)
        assert row.get("rounds", 2) == 2
        assert f"| {row['case']} | {row['arm']} |" in text
        if name == "grid":
            assert row["paired_low"] <= row["paired"] <= row["paired_high"]
            assert report.paired_cell(row) in text


def test_a_scenario_calls_what_it_times(monkeypatch):
    """The numbers come from the clock: a stand-in clock determines them."""

    def fake(arms: dict, **options: object) -> dict[str, Timing]:
        assert options["rounds"] == 2
        return {name: summarize([10.0 + i]) for i, name in enumerate(arms)}

    monkeypatch.setattr(step, "interleaved", fake)
    rows = runner.measured(step, "step", SCENARIOS["step"])["results"]
    assert [row["fastest_ms"] for row in rows] == [10.0 + i for i in range(len(rows))]
    assert rows[0]["tokens_per_s"] == pytest.approx(emulation.tiny_work().tokens / 0.010)
    assert rows[1]["ratio"] == pytest.approx(1.1)
    assert rows[1]["speedup"] == pytest.approx(1 / 1.1, abs=1e-4)
    options = runner.timing_options(runner.parse(grid, "grid", ["--device", "cpu"]))
    # A hundred rounds after a warm-up of ten.
    assert (options["warm_up"], options["rounds"], options["device"]) == (10, 100, "cpu")


def test_on_a_gpu_each_arm_takes_turns_with_the_baseline_alone():
    assert step.groups(["bf16", "a", "b"], H200) == [["bf16", "a"], ["bf16", "b"]]
    assert step.groups(["fp32", "a", "b"], CPU) == [["fp32", "a", "b"]]


def test_a_profile_of_a_step_is_a_table_and_a_trace(tmp_path):
    work = emulation.tiny_work()
    step.profile(peers.step(work, "cpu", compiled=False), "plain GPT", work, CPU, tmp_path)
    files = list((tmp_path / "profiles" / "tiny" / "plain-GPT").iterdir())
    assert len(files) == 2
    assert all(file.stat().st_size > 100 for file in files)


@pytest.mark.slow
def test_the_memory_of_a_larger_model_is_larger_and_above_its_floor():
    config = GPTConfig(vocabulary=256, context=32, layers=2, width=512, heads=8)
    work = training_step.StepWork(model="larger", config=config, batch=2, context=32)
    peak_gib = memory.in_a_process(training_step.arms(CPU, ["fp32"], ())[0], work, CPU)
    assert memory.floor_gib(work) == pytest.approx(16 * config.parameters() / 2**30)
    assert memory.floor_gib(work) < peak_gib < memory.floor_gib(work) + 0.25


def test_modules_are_counted_when_the_code_has_run():
    few, more = startup.modules("pass"), startup.modules("import xml.dom.minidom")
    assert 0 < few < more


def test_the_share_of_quantization_is_what_comes_on_top_of_the_gemms():
    ms = {"bf16": 5.0, "current by torch": 2.5, "FP8 GEMMs": 2.0}
    timings = {name: summarize([value]) for name, value in ms.items()}
    rows = {row["arm"]: row for row in linear._rows("case", timings, H200)}
    assert rows["current by torch"]["quantization_share"] == 0.25
    assert "quantization_share" not in rows["bf16"]


# Bars


def test_bars_are_judged_by_the_rows():
    timings = {"fp32": summarize([100.0]), "fast": summarize([110.0]), "slow": summarize([130.0])}
    rows = report.rows_of("case", timings, "fp32")
    assert not [row for row in rows if "paired" in row]  # they did not take turns
    arms = ("fast", "slow", "not there")
    bars = [report.Bar(case="case", arm=arm, of="fp32", at_most=1.2) for arm in arms]
    judged = report.judged(bars, rows)
    assert [(bar["arm"], bar["holds"]) for bar in judged] == [("fast", True), ("slow", False)]


def test_a_gpus_bars_are_of_the_fastest_fp8_arm():
    ms = {"bf16": 100.0, "plain GPT": 101.0, "delayed": 80.0, "delayed by torch": 70.0,
          "torchao tensorwise": 76.0}  # fmt: skip
    timings = {name: summarize([value]) for name, value in ms.items()}
    rows = report.rows_of("gpt2-1.5b", timings, "bf16")
    judged = report.judged(step.bars(rows), rows)
    assert [(bar["arm"], bar["of"], bar["holds"]) for bar in judged] == [
        ("delayed by torch", "bf16", True),
        ("bf16", "plain GPT", True),
        ("delayed by torch", "torchao tensorwise", False),
    ]


# Sizes


@pytest.mark.parametrize("bf16", [False, True])
def test_the_grid_has_every_precision_in_three_sizes_at_least(bf16, monkeypatch):
    def fake(arms: dict[str, Any], **options: Any) -> dict[str, Timing]:
        return timed({name: [1.0] for name in arms}, rounds=6)

    monkeypatch.setattr(step, "interleaved", fake)
    monkeypatch.setattr(step, "build_step", lambda *arguments: lambda: None)
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


@pytest.mark.parametrize("hardware", [CPU, H200], ids=["cpu", "gpu"])
def test_the_batch_grows_from_32_to_256(hardware):
    batches = grid.AXES[hardware.device]["batch"]
    works = [grid.grown("batch", size, hardware, tiny=False) for size in batches]
    assert [work.batch for work in works] == [32, 64, 128, 256]
    assert all((work.config, work.context) == (works[0].config, works[0].context) for work in works)


# The operations are what they are called


def test_gigabytes_per_second_are_those_read_and_written():
    timings = timed({name: [0.001] for name in operations.WRITTEN}, rounds=6)
    rows = {row["arm"]: row for row in operations._cast_rows("case", timings, 10**6)}
    assert rows["copy"]["gb_per_s"] == pytest.approx(8.0)  # 8 MB in a millisecond
    assert rows["bf16"]["gb_per_s"] == pytest.approx(6.0)
    assert rows["mxfp8"]["gb_per_s"] == pytest.approx(5.0)


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


def instances_of(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """The instances of the class `name` that `operations` creates from here on."""
    instances: list[Any] = []
    original = getattr(operations, name)

    def make(*arguments: Any, **options: Any) -> Any:
        instances.append(original(*arguments, **options))
        return instances[-1]

    monkeypatch.setattr(operations, name, make)
    return instances


def test_ways_to_a_scale_end_in_the_same_bytes_and_an_update_moves_what_was_recorded(monkeypatch):
    x = torch.randn(64, 64)
    results: dict[str, Any] = {name: arm() for name, arm in operations.scaled_casts(x).items()}
    bare = results[operations.BARE].float()
    assert torch.equal(results["current: amax, then its scale"].float(), bare)
    # Delayed scaling casts with the scale known before, here none: 1.
    first = results["delayed: amax noted, scale known"].float()
    assert torch.equal(first, cast_to_fp8(x, 1.0, "e4m3").float())
    assert results["amax alone"] == x.abs().max()
    histories = instances_of(monkeypatch, "AmaxHistory")
    arms = operations.updates(3, 4, "cpu")
    arms["record"]()
    assert histories[0].scales.tolist() == [1.0] * 3
    arms["record and update"]()
    assert histories[0].scales.tolist() == pytest.approx([448.0, 224.0, 448 / 3])


@pytest.mark.parametrize("arm", ["norm, judged by the guard", "the same, and the host waits"])
def test_a_step_that_is_judged_is_skipped_if_it_overflows(arm, monkeypatch):
    monitors = instances_of(monkeypatch, "Monitor")
    arms = operations.judging(16, "cpu")
    optimizer = monitors[0]._optimizer
    arms[arm]()
    assert optimizer.found_inf == 0
    optimizer.param_groups[0]["params"][0].grad[0, 0] = torch.inf
    arms[arm]()
    assert optimizer.found_inf == 1


# Other processes


@pytest.mark.parametrize(("busy", "share"), [(16.0, 0.0), (26.0, 0.5)])
def test_the_share_of_other_processes_is_that_of_all_cpus(busy, share, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    begin = cells.Clocks(wall=5.0, busy=100.0, this_process=50.0)
    assert cells._others_share(begin, cells.Clocks(15.0, 100.0 + busy, 66.0)) == share
    assert cells._others_share(begin, cells.Clocks(15.0, float("nan"), 66.0)) is None
