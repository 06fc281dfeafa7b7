"""The grid, the parts and the batch axis measure what they say; the gate finds what got worse."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from bench import grid, operations, report, runner, scaling, step
from fp8stack.benchmark import timing
from fp8stack.benchmark.timing import interleaved, paired_ratio, summarize
from fp8stack.numerics import cast_to_fp8, dequantize_blocks, dequantize_mxfp8, tensor_scale
from fp8stack.precision import Hardware

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = ["--tiny", "--rounds", "2", "--warm-up", "1", "--device", "cpu"]


class Clock:
    """A clock that only arms move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def take(self, seconds: Sequence[float]) -> Callable[[], None]:
        """An arm that takes these seconds in turn, over and over."""
        left = list(seconds)

        def call() -> None:
            self.now += left[0]
            left.append(left.pop(0))

        return call


def timed(arms: dict[str, Sequence[float]], rounds: int = 20) -> dict[str, timing.Timing]:
    """Timings of arms that take so many seconds in their rounds."""
    clock = Clock()
    calls = {name: clock.take(seconds) for name, seconds in arms.items()}
    return interleaved(calls, rounds=rounds, warm_up=0, clock=clock)


# The interval of a ratio


def test_what_slows_down_a_round_leaves_the_ratio_within_it() -> None:
    weather = [1.0, 3.0, 2.0, 9.0, 1.5, 4.0]
    found = timed({"a": weather, "b": [1.25 * of for of in weather]}, rounds=6)
    assert paired_ratio(found["b"], found["a"]) == pytest.approx((1.25, 1.25, 1.25))
    assert found["b"].samples_ms == pytest.approx([1250 * of for of in weather])


def test_the_interval_of_a_ratio_encloses_the_truth_as_often_as_it_says() -> None:
    """400 measurements of 40 rounds, a true median of 1.1: the share's standard error is 1 %."""
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(400):
        base = random.lognormal(0, 0.5, 40)
        ours = 1.1 * base * random.lognormal(0, 0.1, 40)
        found = timed({"base": base.tolist(), "ours": ours.tolist()}, rounds=40)
        _, low, high = paired_ratio(found["ours"], found["base"])
        inside += low <= 1.1 <= high
    assert 0.93 <= inside / 400 <= 0.99


def test_arms_that_did_not_take_turns_have_no_interval() -> None:
    rows = report.rows_of("case", {"a": summarize([1.0]), "b": summarize([2.0, 3.0])}, "a")
    assert [row["ratio"] for row in rows] == [1.0, 2.0]
    assert not [row for row in rows if "paired" in row]


# Scenarios


@pytest.mark.parametrize("module", [grid, operations, scaling], ids=lambda m: m.__name__)
def test_a_tiny_form_measures_every_case_and_writes_it(module: ModuleType, tmp_path: Path) -> None:
    name = module.__name__.removeprefix("bench.")
    flags = ["--recipes", "delayed"] if name != "operations" else []
    found = runner.measured(module, name, [*TINY, *flags])  # type: ignore[arg-type]
    text = module.table(found)
    report.write(found, text, module.figure(found), tmp_path)
    assert json.loads((tmp_path / f"{name}.json").read_text()) == found
    assert (tmp_path / f"{name}.png").stat().st_size > 5000
    assert len({(row["case"], row["arm"]) for row in found["results"]}) == len(found["results"])
    for row in found["results"]:
        assert row["fastest_ms"] > 0
        assert row["rounds"] == 2
        assert f"| {row['case']} | {row['arm']} |" in text
        if name != "scaling":
            assert row["paired_low"] <= row["paired"] <= row["paired_high"]
            assert report.paired_cell(row) in text


@pytest.mark.parametrize("bf16", [False, True])
def test_the_grid_has_every_precision_in_three_sizes_at_least(
    bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _grid_at(monkeypatch, 1.0, bf16=bf16)
    found = runner.measured(grid, "grid", TINY)
    cells = {(row["case"], row["arm"]) for row in found["results"]}
    precisions = ("fp32", "bf16", "fp16", "delayed", "current", "block", "mxfp8")
    sizes = [work.model for work in grid.sizes("cpu", tiny=True)]
    assert len(sizes) >= 3
    assert cells == {(size, precision) for size in sizes for precision in precisions}
    assert {row["ratio_to"] for row in found["results"]} == {"bf16" if bf16 else "fp32"}
    # A CPU has no TF32: said in each size, with the plan's reason.
    assert [(row["case"], row["arm"]) for row in found["left_out"]] == [(s, "tf32") for s in sizes]
    text = grid.table(found)
    assert "| tf32 | runs as fp32 here | runs as fp32 here | runs as fp32 here |" in text
    assert "runs as fp32 here: tf32 needs a GPU of compute capability 8.0, this is a CPU" in text
    for device in ("cpu", "cuda"):
        parameters = [work.config.parameters() for work in grid.sizes(device, tiny=False)]
        assert len(parameters) >= 3
        assert parameters == sorted(set(parameters))


@pytest.mark.parametrize(
    "hardware", [Hardware("cpu"), Hardware("cuda", (9, 0))], ids=["cpu", "gpu"]
)
def test_the_batch_grows_from_32_to_256(hardware: Hardware) -> None:
    batches = scaling.AXES[hardware.device]["batch"]
    works = [scaling.work_at("batch", size, hardware, tiny=False) for size in batches]
    assert [work.batch for work in works] == [32, 64, 128, 256]
    assert all((work.config, work.context) == (works[0].config, works[0].context) for work in works)


@pytest.mark.parametrize("module", [grid, operations, scaling], ids=lambda m: m.__name__)
def test_ten_rounds_warm_up_and_a_hundred_are_timed(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def note(arms: dict[str, Any], **options: Any) -> dict[str, timing.Timing]:
        asked.append(options)
        return timed({name: [1.0] for name in arms}, rounds=6)

    monkeypatch.setattr(operations if module is operations else step, "interleaved", note)
    flags = ["--recipes", "delayed"] if module is not operations else []
    words = ["--tiny", "--device", "cpu", *flags]
    runner.measured(module, "x", words)  # type: ignore[arg-type]
    assert asked
    assert {(of["warm_up"], of["rounds"], of["device"]) for of in asked} == {(10, 100, "cpu")}


def test_gigabytes_per_second_are_those_read_and_written() -> None:
    timings = timed({name: [0.001] for name in operations.WRITTEN}, rounds=6)
    rows = {row["arm"]: row for row in operations._cast_rows("case", timings, 10**6)}
    assert rows["copy"]["gb_per_s"] == pytest.approx(8.0)  # 8 MB in a millisecond
    assert rows["bf16"]["gb_per_s"] == pytest.approx(6.0)
    assert rows["mxfp8"]["gb_per_s"] == pytest.approx(5.0)


# The parts are what they are called


def test_every_cast_gives_its_format() -> None:
    x = torch.randn(128, 128)
    found = {name: arm() for name, arm in operations.casts(x).items()}
    assert found.keys() == operations.WRITTEN.keys()
    scale = tensor_scale(x.abs().max(), "e4m3")
    assert torch.equal(found["e4m3"].float(), cast_to_fp8(x, scale, "e4m3").float())
    assert found["e5m2"].dtype == torch.float8_e5m2
    for name in operations.WRITTEN:
        data = found[name][0] if isinstance(found[name], tuple) else found[name]
        assert data.element_size() == operations.WRITTEN[name], name
    for name, back in (("mxfp8", dequantize_mxfp8), ("block", dequantize_blocks)):
        assert (back(*found[name]) - x).abs().max() < 0.1 * x.abs().max(), name


def test_every_way_to_a_scale_ends_in_the_same_bytes_where_it_is_the_same() -> None:
    x = torch.randn(64, 64)
    found = {name: arm() for name, arm in operations.scaled_casts(x).items()}
    bare = found[operations.BARE].float()
    assert torch.equal(found["current: amax, then its scale"].float(), bare)
    # Delayed scaling casts with the scale known before, here none: 1.
    first = found["delayed: amax noted, scale known"].float()
    assert torch.equal(first, cast_to_fp8(x, 1.0, "e4m3").float())
    assert found["amax alone"] == x.abs().max()


def test_an_update_moves_what_was_recorded_into_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[operations.AmaxHistory] = []
    original = operations.AmaxHistory

    def kept(*given: Any, **options: Any) -> operations.AmaxHistory:
        made.append(original(*given, **options))
        return made[-1]

    monkeypatch.setattr(operations, "AmaxHistory", kept)
    arms = operations.updates(3, 4, "cpu")
    arms["record"]()
    assert made[0].scales.tolist() == [1.0] * 3
    arms["record and update"]()
    assert made[0].scales.tolist() == pytest.approx([448.0, 224.0, 448 / 3])


@pytest.mark.parametrize("arm", ["norm, judged by the guard", "the same, and the host waits"])
def test_a_step_that_is_judged_is_skipped_if_it_overflows(
    arm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[operations.Monitor] = []
    original = operations.Monitor

    def kept(*given: Any, **options: Any) -> operations.Monitor:
        made.append(original(*given, **options))
        return made[-1]

    monkeypatch.setattr(operations, "Monitor", kept)
    arms = operations.judging(16, "cpu")
    optimizer = made[0]._optimizer
    arms[arm]()
    assert optimizer.found_inf == 0  # type: ignore[attr-defined]
    optimizer.param_groups[0]["params"][0].grad[0, 0] = torch.inf
    arms[arm]()
    assert optimizer.found_inf == 1  # type: ignore[attr-defined]


# The gate


def _grid_at(
    monkeypatch: pytest.MonkeyPatch,
    slowdown: float,
    noise: Sequence[float] = (1.0,),
    bf16: bool = False,
) -> None:
    """Have the grid's arms take times of a clock of ours, and compute nothing: delayed 1.2 of
    the others, times `slowdown` and, round by round, `noise`; on a CPU with or without bf16
    instructions."""

    def fake(arms: dict[str, Any], **options: Any) -> dict[str, timing.Timing]:
        seconds: dict[str, Sequence[float]] = {name: [1.0] for name in arms}
        seconds["delayed"] = [1.2 * slowdown * of for of in noise]
        return timed(seconds)

    monkeypatch.setattr(step, "interleaved", fake)
    monkeypatch.setattr(step, "build_step", lambda *given: lambda: None)
    monkeypatch.setattr(grid, "probe", lambda device: Hardware("cpu", cpu_bf16=bf16))


@pytest.fixture
def committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words of a check of the grid against results in `tmp_path`."""
    monkeypatch.setattr(grid, "SHORT", ["--tiny", "--device", "cpu", "--recipes", "delayed"])
    noise = (1.0, 1.05, 1.1, 1.2, 1.3)
    _grid_at(monkeypatch, 1.0, noise)
    (tmp_path / "grid.json").write_text(json.dumps(runner.measured(grid, "grid", grid.SHORT)))
    assert runner.check(["grid", "--results", str(tmp_path)]) == 0
    return ["grid", "--results", str(tmp_path)]


def test_an_injected_slowdown_fails_the_gate_and_is_named(
    committed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _grid_at(monkeypatch, 1.5, (1.0, 1.05))
    assert runner.check(committed) == 1
    said = capsys.readouterr().out
    assert "grid, width 16: delayed takes 1.800 of fp32, committed 1.200 (+50%)" in said
    assert said.count(" takes ") == 3  # delayed in three sizes


def test_noise_within_the_interval_does_not_fail_the_gate(
    committed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest round is 18 % slower, beyond the tolerance; the rounds are no slower."""
    _grid_at(monkeypatch, 1.0, (1.18, 1.19, 1.2, 1.25, 1.3))
    assert runner.check(committed) == 0
    # The same without intervals does fail: the fastest rounds are all that there is.
    path = Path(committed[-1]) / "grid.json"
    known = json.loads(path.read_text())
    for row in known["results"]:
        del row["paired_high"]
    path.write_text(json.dumps(known))
    assert runner.check(committed) == 1


def test_a_slowdown_within_the_tolerance_or_a_gain_passes(
    committed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for slowdown in (1.14, 0.5):
        _grid_at(monkeypatch, slowdown)
        assert runner.check(committed) == 0
