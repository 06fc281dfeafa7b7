"""Results of benchmarks grow on disk, and say what was not measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

from bench.__main__ import main
from bench.cost import grid
from fp8stack.analysis.benchmark.timing import Timing
from fp8stack.precision import Hardware

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


def built(arm: Any, *arguments: Any) -> Callable[[], None]:
    """Stands in for `build_step`: a step that computes nothing."""
    return lambda: None


def broken(arm: Any, *arguments: Any) -> Callable[[], None]:
    if arm.name in ("block", "fp32"):
        raise RuntimeError("self must be row_major\nat somewhere")
    return lambda: None


def bench(
    monkeypatch: pytest.MonkeyPatch,
    timed: Callable[..., Any],
    *words: object,
    build: Callable[..., Any] = built,
) -> int:
    """Run `python -m bench` with these words; its exit code."""
    monkeypatch.setattr(grid, "interleaved", timed)
    monkeypatch.setattr(grid, "build_step", build)
    monkeypatch.setattr(grid, "free_memory", lambda device: None)
    monkeypatch.setattr(grid, "probe", lambda device: Hardware("cpu", cpu_bf16=True))
    monkeypatch.setattr(sys, "argv", ["bench", *map(str, words)])
    with pytest.raises(SystemExit) as done:
        raise SystemExit(main())
    return int(done.value.code or 0)


@pytest.mark.parametrize(
    ("changed", "calls"), [([], 1), (["--rounds", "7"], 3), (["--recipes", "delayed,block"], 3)]
)
def test_a_run_that_was_ended_continues_with_the_cells_that_are_missing(
    changed, calls, tmp_path, monkeypatch, capsys
):
    """Cells that were measured under other conditions are not used."""
    words = ["grid", *WORDS, "--parts", "sizes", "--out", tmp_path]
    assert bench(monkeypatch, Timed(stops_in=3), *words) == 130
    assert "The same command continues" in capsys.readouterr().err
    partial_file = tmp_path / "grid.partial.jsonl"
    with partial_file.open("a") as file:
        file.write('\n{"conditions": {"mach')  # killed while it wrote
    second_run = Timed()
    assert bench(monkeypatch, second_run, *words, *changed) == 0
    assert len(second_run.calls) == calls
    measured = json.loads((tmp_path / "grid.json").read_text())
    cases = list(dict.fromkeys(row["case"] for row in measured["results"]))
    assert cases == ["width 16", "width 32", "width 48"]
    assert not partial_file.exists()
    third_run = Timed()
    bench(monkeypatch, third_run, *words)
    assert len(third_run.calls) == 3


@pytest.mark.full
def test_an_arm_that_fails_takes_no_other_with_it(tmp_path, monkeypatch, capsys):
    words = ["grid", "--tiny", "--device", "cpu", "--parts", "sizes", "--out", tmp_path]
    assert bench(monkeypatch, Timed(), *words, build=broken) == 1
    assert (
        "width 16, block: failed: RuntimeError: self must be row_major" in capsys.readouterr().err
    )
    results = json.loads((tmp_path / "grid.json").read_text())
    assert {"delayed", "current", "mxfp8"} <= {r["arm"] for r in results["results"]}
    line = "- block (width 16, width 32, width 48): failed: RuntimeError: self must be row_major\n"
    assert line in (tmp_path / "grid.md").read_text()
    # The arm works now: it is measured again with its baseline.
    assert bench(monkeypatch, Timed(), *words) == 0
    results = json.loads((tmp_path / "grid.json").read_text())
    assert "block" in {row["arm"] for row in results["results"]}


def test_a_scenario_that_cannot_do_without_a_package_names_it(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "bench.gpu.golden", raising=False)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert bench(monkeypatch, Timed(), "golden") == 2
    printed = capsys.readouterr().err
    expected = "bench golden needs safetensors, which is not installed: pip install -e '.[test]'\n"
    assert printed == expected
