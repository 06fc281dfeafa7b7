"""`python -m bench check` compares like with like and finds regressions; the committed pages are
those of the committed results."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import report, runner
from bench.__main__ import main
from bench.cost import grid
from fp8stack.analysis.benchmark.timing import Timing, summarize
from fp8stack.precision import Hardware
from tests.conftest import refusal
from tests.support.clock import timed

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "cpu"
WORDS = ["--tiny", "--device", "cpu", "--recipes", "delayed", "--parts", "sizes"]

pytestmark = pytest.mark.usefixtures("one_thread")


# The gate


def _grid_at(
    monkeypatch: pytest.MonkeyPatch, slowdown: float, noise: Sequence[float] = (1.0,)
) -> None:
    """Replace the times of the grid's arms, which compute nothing: delayed takes 1.2 times as long
    as the others, times `slowdown` and, round by round, `noise`."""

    def fake(arms: dict[str, Any], **options: Any) -> dict[str, Timing]:
        seconds: dict[str, Sequence[float]] = {name: [1.0] for name in arms}
        return timed(seconds | {"delayed": [1.2 * slowdown * factor for factor in noise]})

    monkeypatch.setattr(grid, "interleaved", fake)
    monkeypatch.setattr(grid, "build_step", lambda *arguments: lambda: None)
    monkeypatch.setattr(grid, "free_memory", lambda device: None)
    monkeypatch.setattr(grid, "probe", lambda device: Hardware("cpu"))


@pytest.fixture
def committed(tmp_path, monkeypatch) -> list[str]:
    """The words of a check of the grid against results in `tmp_path`."""
    monkeypatch.setattr(grid, "SHORT", WORDS)
    _grid_at(monkeypatch, 1.0, (1.0, 1.05, 1.1, 1.2, 1.3))
    (tmp_path / "grid.json").write_text(json.dumps(runner.measured(grid, "grid", WORDS)))
    return ["grid", "--results", str(tmp_path)]


@pytest.mark.capability("D6")
@pytest.mark.full
def test_an_injected_slowdown_fails_the_gate_and_is_named(committed, monkeypatch, capsys):
    assert runner.check(committed) == 0
    _grid_at(monkeypatch, 1.5, (1.0, 1.05))
    assert runner.check(committed) == 1
    printed = capsys.readouterr().out
    assert "grid, width 16: delayed takes 1.800 of fp32, committed 1.200 (+50%)" in printed
    assert printed.count(" takes ") == 3  # delayed in three sizes
    assert runner.check([*committed, "--tolerance", "0.6"]) == 0
    # A gain, and noise: the fastest round is 18 % slower, beyond the tolerance; rounds are not.
    for slowdown, noise in ((0.5, (1.0,)), (1.0, (1.18, 1.19, 1.2, 1.25, 1.3))):
        _grid_at(monkeypatch, slowdown, noise)
        assert runner.check(committed) == 0


@pytest.mark.capability("D6")
@pytest.mark.parametrize("kinds", [("fp32", "bf16"), ("bf16", "fp32")])
def test_ratios_to_another_baseline_are_refused(kinds):
    """A CPU without bf16 instructions is compared with fp32, one that has them with bf16."""
    timings = {name: summarize([1.0]) for name in ("fp32", "bf16", "delayed")}
    before, now = (
        {"scenario": "grid", "results": report.rows_of("a", timings, to)} for to in kinds
    )
    assert runner.regressions(now, now, 0.1) == []
    message = refusal(runner.regressions, before, now, 0.1)
    assert f"ratios are to {kinds[0]}, those of this machine to {kinds[1]}. " in message
    assert message.endswith("Measure it here first: python -m bench grid")
    message = refusal(runner.regressions, {"results": []}, now, 0.1)
    assert "no arm was measured that has a committed result" in message


# The committed results


# Results of other commands, or with tables that need more than the results.
OTHERS = {"ladder_predictions", "reliability", "study"}
PAGES = [page for page in sorted(RESULTS.parent.glob("*/*.json")) if page.stem not in OTHERS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_a_committed_page_is_what_the_scenario_makes_of_its_results(page):
    scenario = runner.imported(page.stem.removesuffix("-executed"))  # of gpu-code --execute
    text = scenario.table(json.loads(page.read_text()))
    assert page.with_suffix(".md").read_text() == text


# The command


def test_the_benchmarks_explain_themselves_and_refuse_unknown_scenarios(
    monkeypatch, capsys, tmp_path
):
    assert runner.check(["grid", "--results", str(tmp_path)]) == 2
    assert "python -m bench grid" in capsys.readouterr().out  # there is nothing to compare with

    def bench(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["bench", *words])
        with pytest.raises(SystemExit) as done:
            raise SystemExit(main())
        return int(done.value.code or 0), *capsys.readouterr()

    assert "emulation: " in bench("--help")[1]
    assert "--rounds" in bench("grid", "--help")[1]
    assert bench("nonsense")[0] == 2
    code, _, errors = bench("grid", "--device", "cpu", "--parts", "speed")
    assert code == 2
    assert "No part 'speed'" in errors


def test_tiny_sizes_overwrite_no_committed_results():
    before = {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()}
    message = refusal(lambda: runner.run("emulation", ["--tiny"]))
    assert message.startswith("--tiny would overwrite results")
    assert {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()} == before


@pytest.mark.parametrize("words", [("grid", "--rounds", "0"), ("study", "--workers", "-1")])
def test_a_count_below_one_is_refused(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        runner.run(words[0], words[1:])
    assert f"{words[1]} {words[2]}: give 1 or more" in capsys.readouterr().err
