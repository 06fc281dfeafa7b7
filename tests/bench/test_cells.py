"""Results of benchmarks: they grow on disk, say what was not measured, and are compared with their
like; the committed tables are whole."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench import grid, runner, step
from bench import report as reports
from bench.__main__ import main
from bench.cells import Cells
from fp8stack.backends.emulate import EmulatedLinear
from fp8stack.benchmark.step import FP8, PRECISIONS, Work
from fp8stack.benchmark.timing import Timing, interleaved, summarize
from fp8stack.errors import UserError
from fp8stack.model.config import load_config
from fp8stack.precision import Hardware

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results" / "cpu"
SIZES = ["width 16", "width 32", "width 48"]
WORDS = ["--tiny", "--device", "cpu", "--recipes", "delayed"]
H200 = Hardware("cuda", (9, 0), name="NVIDIA H200", has_te=True, cuda_version=(12, 9),
                torch_version="2.13.0", te_version="2.20.2")  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")


class Timed:
    """Stands in for `interleaved`: every arm takes 1 ms, and it stops in its n-th call."""

    def __init__(self, stops_in: int = 0) -> None:
        self.calls: list[list[str]] = []
        self._stops_in = stops_in

    def __call__(self, arms: dict[str, Any], **options: Any) -> dict[str, Timing]:
        self.calls.append(list(arms))
        if len(self.calls) == self._stops_in:
            raise KeyboardInterrupt
        return {name: Timing(median_ms=1, low_ms=1, high_ms=1, fastest_ms=1, rounds=1,
                             samples_ms=(1.0,)) for name in arms}  # fmt: skip


def bench(monkeypatch: pytest.MonkeyPatch, timed: Callable[..., Any], *words: object) -> int:
    """Run `python -m bench` with these words; its exit code."""
    monkeypatch.setattr(step, "interleaved", timed)
    monkeypatch.setattr(sys, "argv", ["bench", *map(str, words)])
    with pytest.raises(SystemExit) as done:
        raise SystemExit(main())
    return int(done.value.code or 0)


# They grow on disk


def test_a_run_that_was_ended_continues_with_the_cells_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["grid", *WORDS, "--out", tmp_path]
    assert bench(monkeypatch, Timed(stops_in=3), *words) == 130
    assert "The same command continues" in capsys.readouterr().err
    partial_file = tmp_path / "grid.partial.jsonl"
    with partial_file.open("a") as file:
        file.write('\n{"conditions": {"mach')  # killed while it wrote
    rest = Timed()
    assert bench(monkeypatch, rest, *words) == 0
    assert len(rest.calls) == 1
    found = json.loads((tmp_path / "grid.json").read_text())
    assert list(dict.fromkeys(row["case"] for row in found["results"])) == SIZES
    assert not partial_file.exists()
    anew = Timed()
    bench(monkeypatch, anew, *words)
    assert len(anew.calls) == 3


@pytest.mark.parametrize("changed", [["--rounds", "7"], ["--recipes", "delayed,block"]])
def test_what_was_measured_otherwise_is_not_used(
    changed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["grid", *WORDS, "--out", tmp_path]
    assert bench(monkeypatch, Timed(stops_in=3), *words) == 130
    again = Timed()
    assert bench(monkeypatch, again, *words, *changed) == 0
    assert len(again.calls) == 3


def test_on_a_gpu_every_pair_is_kept_as_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each arm takes turns with the baseline, and what was measured before one that ends the run is
    not measured again."""
    built: list[str] = []

    def build(arm: Any, *given: Any) -> Callable[[], None]:
        built.append(arm.name)
        return lambda: None

    monkeypatch.setattr(step, "build_step", build)
    monkeypatch.setattr(step, "resident_gib", lambda builder: (builder(), 1.0))
    monkeypatch.setattr(step, "free_memory", lambda device: None)
    parser = argparse.ArgumentParser()
    step.add_arguments(parser)
    arguments = parser.parse_args(["--device", "cpu"])
    work = Work(model="124m", config=load_config("gpt2-124m"), batch=32, context=1024)

    def measured() -> list[str]:
        arguments.cells = Cells(tmp_path / "cells.jsonl", "here")
        return [row["arm"] for row in step.in_turns(work, FP8, H200, arguments)]

    monkeypatch.setattr(step, "interleaved", Timed(stops_in=3))
    with pytest.raises(KeyboardInterrupt):
        measured()
    built.clear()
    rest = Timed()
    monkeypatch.setattr(step, "interleaved", rest)
    names = measured()
    assert names[0] == "bf16"
    assert {"delayed", "current", "block", "mxfp8"} <= set(names)
    assert rest.calls == [["bf16", name] for name in names[3:]]
    assert built == ["bf16", *names[3:]]  # the baseline once


# What is not measured


def test_an_arm_that_fails_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build = step.build_step

    def broken(arm: Any, *given: Any) -> Callable[[], None]:
        if arm.name == "block":
            raise RuntimeError("self must be row_major\nat somewhere")
        return build(arm, *given)

    monkeypatch.setattr(step, "build_step", broken)
    words = ["step", "--tiny", "--device", "cpu", "--compiled", ",", "--out", tmp_path]
    assert bench(monkeypatch, Timed(), *words) == 1
    assert "tiny, block: failed: RuntimeError: self must be row_major" in capsys.readouterr().err
    found = json.loads((tmp_path / "step.json").read_text())
    assert {"delayed", "current", "mxfp8", "plain GPT"} <= {r["arm"] for r in found["results"]}
    said = "- block (tiny): failed: RuntimeError: self must be row_major\n"
    assert said in (tmp_path / "step.md").read_text()
    # It works by now: what it was measured with is measured again.
    monkeypatch.setattr(step, "build_step", build)
    assert bench(monkeypatch, Timed(), *words) == 0
    found = json.loads((tmp_path / "step.json").read_text())
    assert "block" in {row["arm"] for row in found["results"]}


def test_a_baseline_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Callable[[], None]:
        raise RuntimeError("nothing works")

    monkeypatch.setattr(step, "build_step", broken)
    with pytest.raises(RuntimeError, match="nothing works"):
        runner.measured(grid, "grid", WORDS)  # type: ignore[arg-type]


def test_scenarios_run_without_the_peers_that_are_not_installed(tmp_path: Path) -> None:
    code = f"""
import sys
for name in ("torchao", "transformers"):
    sys.modules[name] = None
from bench import runner
from bench.__main__ import main
for name in runner.SCENARIOS:
    runner.imported(name)
for name in ("emulation", "step"):
    sys.argv = ["bench", name, "--tiny", "--rounds", "1", "--warm-up", "0", "--compiled", ","]
    sys.argv += ["--out", {str(tmp_path)!r}]
    assert main() == 0
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    for name in ("emulation", "step"):
        rows = json.loads((tmp_path / f"{name}.json").read_text())["results"]
        assert {row["arm"] for row in rows} >= {"delayed", "mxfp8"}
        text = (tmp_path / f"{name}.md").read_text()
        assert "skipped: torchao is not installed (pip install torchao)" in text


def test_a_scenario_that_cannot_do_without_a_package_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "bench.golden", raising=False)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert bench(monkeypatch, Timed(), "golden") == 2
    said = capsys.readouterr().err
    assert said == (
        "bench golden needs safetensors, which is not installed: pip install -e '.[test]'\n"
    )


# Like is compared with like


@pytest.mark.parametrize("kinds", [("fp32", "bf16"), ("bf16", "fp32")])
def test_ratios_to_another_baseline_are_refused(kinds: tuple[str, str]) -> None:
    """A CPU without bf16 instructions is compared with fp32, one that has them with bf16."""
    timings = {name: summarize([1.0]) for name in ("fp32", "bf16", "delayed")}
    before, now = (
        {"scenario": "grid", "results": reports.rows_of("a", timings, to)} for to in kinds
    )
    assert runner.regressions(now, now, 0.1) == []
    expected = (
        f"grid: the committed ratios are to {kinds[0]}, those of this machine to {kinds[1]}. "
    )
    with pytest.raises(UserError, match=expected + "Measure it here first: python -m bench grid"):
        runner.regressions(before, now, 0.1)


class Operations(TorchDispatchMode):
    """Counts the operations of torch: a clock that no other process moves."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_slowdown_of_a_layer_fails_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Real steps, timed as always, by a clock that counts operations: emulated linears multiply
    twice as often as when the results were committed."""
    words = [*WORDS, "--rounds", "6", "--warm-up", "1"]
    monkeypatch.setattr(grid, "SHORT", words)
    monkeypatch.setattr(grid, "probe", lambda device: Hardware("cpu"))
    multiply = EmulatedLinear.multiply
    with Operations() as work:
        timed = partial(interleaved, clock=lambda: float(work.count))
        assert bench(monkeypatch, timed, "grid", *words, "--out", tmp_path) == 0
        check = ["check", "grid", "--results", tmp_path]
        assert bench(monkeypatch, timed, *check) == 0

        def twice(self: EmulatedLinear, x: torch.Tensor) -> torch.Tensor:
            multiply(self, x)
            return multiply(self, x)

        monkeypatch.setattr(EmulatedLinear, "multiply", twice)
        capsys.readouterr()
        assert bench(monkeypatch, timed, *check) == 1
    said = capsys.readouterr().out
    for size in SIZES:
        assert f"grid, {size}: delayed takes " in said
    assert "fp32 takes" not in said


def test_an_arm_without_a_committed_result_is_refused_in_one_line() -> None:
    rows = reports.rows_of("case", {"a": summarize([1.0])}, "a")
    found = {"scenario": "stub", "results": rows}
    with pytest.raises(UserError, match="no arm was measured that has a committed result"):
        runner.regressions({"results": []}, found, 0.1)


# What is committed


def _committed(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    assert (RESULTS / f"{name}.md").read_text() == runner.imported(name).table(found)
    assert found["machine"]["slug"] == "cpu"
    assert not [row for row in found["left_out"] if row.get("failed")]
    return found


def test_the_committed_grid_has_every_precision_by_size_with_intervals() -> None:
    found = _committed("grid")
    precisions = set(PRECISIONS) - {"tf32"}  # which CPUs do not have
    sizes = [work.model for work in grid.sizes("cpu", tiny=False)]
    assert {(r["case"], r["arm"]) for r in found["results"]} == {
        (size, precision) for size in sizes for precision in precisions
    }
    assert {(r["case"], r["arm"]) for r in found["left_out"]} == {(s, "tf32") for s in sizes}
    assert found["settings"]["warm_up"] == 10
    for row in found["results"]:
        assert row["rounds"] >= 6
        assert row["low_ms"] <= row["median_ms"] <= row["high_ms"]
        assert row["paired_low"] <= row["paired"] <= row["paired_high"]


def test_the_committed_scaling_has_batches_from_32_to_256_contexts_and_depths() -> None:
    found = _committed("scaling")
    arms = {row["arm"] for row in found["results"]}
    assert len(arms) >= 2
    for arm in arms:
        values = {
            axis: [r["value"] for r in found["results"] if (r["axis"], r["arm"]) == (axis, arm)]
            for axis in ("batch", "context", "layers")
        }
        assert values["batch"] == [32, 64, 128, 256]
        assert len(values["context"]) >= 3
        assert len(values["layers"]) >= 3


def test_the_committed_operations_have_casts_scales_updates_and_the_judging_of_steps() -> None:
    found = _committed("operations")
    kinds = {row["case"].partition(",")[0] for row in found["results"]}
    assert kinds == {"cast", "scaling", "history", "judging"}
    assert {row["rounds"] for row in found["results"]} == {100}


def test_the_committed_memory_has_every_fp8_recipe_above_its_floor() -> None:
    found = _committed("memory")
    assert {r["arm"] for r in found["results"]} >= {"fp32", *FP8}
    assert all(row["peak_gib"] > row["floor_gib"] for row in found["results"])
    assert found["activations"]
