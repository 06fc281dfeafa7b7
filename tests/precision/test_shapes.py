"""Measurements of FP8 shape by shape: the cache of them, and how they are taken."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8stack.backends.weights import WeightChanges
from fp8stack.benchmark import shapes
from fp8stack.benchmark.timing import Timing
from fp8stack.errors import StorageError, UserError
from fp8stack.model.config import GPTConfig
from fp8stack.precision import Hardware, Plan, load_recipe, probe, resolve
from fp8stack.precision.shapes import cache_path, load_measured, save_measured
from tests.conftest import refusal

H200 = Hardware(
    "cuda", (9, 0), name="NVIDIA H200", torch_version="2.13.0+cu130", te_version="2.20.0"
)
MEASURED = {(8192, 768, 768): 0.93, (8192, 768, 3072): 1.25}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fp8stack" / "shapes.json"


def test_what_is_saved_is_loaded(cache: Path) -> None:
    assert save_measured(H200, "te", "delayed", MEASURED) == cache
    assert load_measured(H200, "te", "delayed") == MEASURED


def test_nothing_is_measured_before_anything_is_saved(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_measured(H200, "te", "delayed") == {}
    assert not caplog.records
    assert not cache.exists()


@pytest.mark.parametrize(
    ("hardware", "backend", "scaling"),
    [
        (dataclasses.replace(H200, name="NVIDIA H100 80GB HBM3"), "te", "delayed"),
        (dataclasses.replace(H200, torch_version="2.12.0"), "te", "delayed"),
        (dataclasses.replace(H200, te_version="2.21.0"), "te", "delayed"),
        (dataclasses.replace(H200, te_version=None), "te", "delayed"),
        (H200, "torch", "delayed"),
        (H200, "te", "current"),
    ],
    ids=["gpu", "torch", "te", "no te", "backend", "scaling"],
)
def test_what_was_measured_with_something_else_is_not_used(
    hardware: Hardware, backend: str, scaling: str
) -> None:
    save_measured(H200, "te", "delayed", MEASURED)
    assert load_measured(hardware, backend, scaling) == {}


def test_a_later_measurement_replaces_that_shape_and_keeps_all_else() -> None:
    save_measured(H200, "te", "delayed", MEASURED)
    save_measured(H200, "torch", "delayed", {(1, 2, 3): 1.5})
    save_measured(H200, "te", "delayed", {(8192, 768, 768): 1.01, (16, 16, 16): 0.5})
    expected = MEASURED | {(8192, 768, 768): 1.01, (16, 16, 16): 0.5}
    assert load_measured(H200, "te", "delayed") == expected
    assert load_measured(H200, "torch", "delayed") == {(1, 2, 3): 1.5}


KEY = "NVIDIA H200 | torch 2.13.0+cu130 | Transformer Engine 2.20.0 | backend te | delayed"


def stored(name: str, ratio: object) -> str:
    return json.dumps({"version": 1, "measured": {KEY: {name: ratio}}})


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"version": 2, "measured": {}}',
        '{"version": 1, "measured": {}, "more": 1}',
        stored("8x16x32", 0.5),
        stored("8 x 0 -> 32", 0.5),
        stored("8 x 16 -> 32", "0.5"),
        stored("8 x 16 -> 32", 0),
        stored("8 x 16 -> 32", -1.0),
        stored("8 x 16 -> 32", float("nan")),
        stored("8 x 16 -> 32", float("inf")),
        "\ud800",
    ],
    ids=ascii,
)
def test_a_damaged_file_is_ignored_with_one_line_that_names_it_and_the_remedy(
    cache: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(stored("8 x 16 -> 32", 0.5))  # as it should be
    assert load_measured(H200, "te", "delayed") == {(8, 16, 32): 0.5}
    cache.write_bytes(content.encode("utf-8", "surrogatepass"))
    assert load_measured(H200, "te", "delayed") == {}
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert str(cache) in message
    assert "fp8stack bench shapes" in message
    assert "\n" not in message
    save_measured(H200, "te", "delayed", MEASURED)  # which mends it
    assert load_measured(H200, "te", "delayed") == MEASURED


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_measured(H200, "te", "delayed", MEASURED)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="the disk is full") as caught:
        save_measured(H200, "te", "delayed", {(1, 1, 1): 2.0})
    assert str(cache) in str(caught.value)
    assert load_measured(H200, "te", "delayed") == MEASURED
    assert list(cache.parent.iterdir()) == [cache]


def test_a_cache_folder_that_cannot_be_made_is_an_error_with_a_way_out(
    tmp_path: Path,
) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(StorageError, match="XDG_CACHE_HOME") as caught:
        save_measured(H200, "te", "delayed", MEASURED)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_ratio_that_could_not_be_read_back_is_not_written(value: float, cache: Path) -> None:
    with pytest.raises(ValueError, match="measured"):
        save_measured(H200, "te", "delayed", {(8, 8, 8): value})
    assert not cache.exists()


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {}, "HOME/.cache"),
        ("linux", {"XDG_CACHE_HOME": "/somewhere"}, "/somewhere"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "HOME/.cache"),
        ("darwin", {}, "HOME/Library/Caches"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local"),
    ],
)
def test_the_cache_is_where_the_platform_wants_it(
    platform: str, variables: dict, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    folder = Path(expected.replace("HOME", str(tmp_path)))
    assert cache_path() == folder / "fp8stack" / "shapes.json"


# Measuring

CPU = Hardware("cpu")
CONFIG = GPTConfig(vocabulary=100, context=32, layers=2, width=32, heads=2, mlp_width=48)


def plan_on_a_cpu(recipe: str) -> Plan:
    return resolve(recipe, CPU, "torch")


class Recorder:
    """Runs each arm a few times, in place of a clock, and says that it took what it is told."""

    def __init__(self, ms: dict[str, float], passes: int = 2) -> None:
        self.ms = ms
        self.passes = passes
        self.calls: list[tuple[list[str], int, str]] = []

    def __call__(self, arms, *, rounds, device):
        self.calls.append((list(arms), rounds, device))
        for arm in arms.values():
            for _ in range(self.passes):
                arm()
        return {
            name: Timing(
                median_ms=self.ms[name],
                low_ms=self.ms[name] / 2,
                high_ms=self.ms[name] * 2,
                fastest_ms=self.ms[name] / 4,
                rounds=rounds,
            )
            for name in arms
        }


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_each_distinct_linear_is_measured_once_and_the_head_with_its_padding(recipe: str) -> None:
    recorder = Recorder({"bf16": 24.0, "fp8": 16.0})
    results = shapes.measure_shapes(
        CONFIG, plan_on_a_cpu(recipe), CPU, tokens=16, rounds=7, compiled=False, measure=recorder
    )
    assert {result.shape: result.layers for result in results} == {
        (16, 32, 96): 2,
        (16, 32, 32): 2,
        (16, 32, 48): 2,
        (16, 48, 32): 2,
        (16, 32, 112): 1,
    }
    assert recorder.calls == [(["bf16", "fp8"], 7, "cpu")] * 5
    assert all(result.ratio == 1.5 for result in results)
    # Eight linears are measured together, and a figure is for one.
    times = {(r.bf16.median_ms, r.bf16.low_ms, r.bf16.high_ms, r.bf16.fastest_ms) for r in results}
    assert times == {(3.0, 1.5, 6.0, 0.75)}


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_one_arm_multiplies_in_fp8_forward_and_backward_and_the_other_does_not(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gemms: list[tuple[int, ...]] = []
    real = torch._scaled_mm

    def counted(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        gemms.append((a.shape[0], a.shape[1], b.shape[1]))
        return real(a, b, **options)

    monkeypatch.setattr(torch, "_scaled_mm", counted)
    by_arm = {}

    def measure(arms, *, rounds, device):
        for name, arm in arms.items():
            gemms.clear()
            arm()
            by_arm[name] = sorted(set(gemms)), len(gemms)
        return dict.fromkeys(arms, ONE)

    config = GPTConfig(vocabulary=100, context=32, layers=1, width=32, heads=1, mlp_width=160)
    plan = plan_on_a_cpu(recipe)
    shapes.measure_shapes(config, plan, CPU, tokens=16, rounds=1, compiled=False, measure=measure)
    assert by_arm["bf16"] == ([], 0)
    # The last of the shapes is the head's, 32 -> 112: y, dx and dw of eight linears.
    assert by_arm["fp8"] == ([(16, 32, 112), (16, 112, 32), (112, 16, 32)], 24)


ONE = Timing(median_ms=1.0, low_ms=1.0, high_ms=1.0, fastest_ms=1.0, rounds=1)


def test_weights_are_quantized_anew_in_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    marks = []
    real = WeightChanges.mark

    def mark(changes: WeightChanges) -> None:
        marks.append(changes)
        real(changes)

    monkeypatch.setattr(WeightChanges, "mark", mark)
    seen: list[bool] = []

    def measure(arms, *, rounds, device):
        for _ in range(3):
            marks.clear()
            arms["fp8"]()
            seen.append(bool(marks))
        return dict.fromkeys(arms, ONE)

    shapes.measure_shapes(
        CONFIG, plan_on_a_cpu("delayed"), CPU, tokens=16, rounds=1, compiled=False, measure=measure
    )
    assert seen == [True] * 15


def test_what_the_recipe_leaves_out_is_measured_and_what_the_hardware_cannot_serve_is_not() -> None:
    recipe = load_recipe("current").model_copy(
        update={"exclude": ("*.down",), "exclude_first_blocks": 1}
    )
    config = CONFIG.model_copy(update={"mlp_width": 40})
    results = shapes.measure_shapes(
        config,
        resolve(recipe, CPU, "torch"),
        CPU,
        tokens=16,
        rounds=1,
        compiled=False,
        measure=Recorder({"bf16": 1.0, "fp8": 1.0}, passes=1),
    )
    assert [result.shape for result in results] == [(16, 32, 96), (16, 32, 32), (16, 32, 112)]


def test_large_layers_are_measured_fewer_at_a_time() -> None:
    assert shapes._copies((1024, 768, 768)) == 8
    assert shapes._copies((8192, 4096, 28672)) == 2
    assert shapes._copies((8192, 4096, 128256)) == 1


@pytest.mark.slow
def test_compiled_layers_are_measured_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "_copies", lambda shape: 1)
    config = GPTConfig(vocabulary=32, context=32, layers=1, width=32, heads=1, mlp_width=32)
    results = shapes.measure_shapes(config, plan_on_a_cpu("delayed"), CPU, tokens=16, rounds=6)
    assert all(result.fp8.median_ms > 0 for result in results)


def test_what_was_measured_is_saved_for_plans_of_that_backend_and_scaling() -> None:
    plan = resolve("delayed", H200, "torch")
    half = dataclasses.replace(ONE, median_ms=0.5)
    shape = (8192, 768, 768)
    results = [shapes.Measured(shape=shape, layers=12, bf16=half, fp8=ONE)]
    shapes.save(results, plan, H200)
    measured = load_measured(H200, "torch", "delayed")
    assert measured == {shape: 0.5}
    made = plan.for_layers({"a": (768, 768)}, tokens=8192, measured=measured)
    assert made.layers[0].doubt == "8192 x 768 -> 768 measured at 0.5 of bf16's speed"


def test_the_table_has_a_row_per_shape_with_medians_and_their_intervals() -> None:
    fast = Timing(median_ms=0.5, low_ms=0.4, high_ms=0.6, fastest_ms=0.4, rounds=9)
    row = shapes.Measured(shape=(8192, 768, 3072), layers=12, bf16=ONE, fp8=fast)
    lines = shapes.as_lines([row], resolve("delayed", H200))
    assert lines[0] == "| tokens x in -> out | layers | bf16 ms | delayed ms | bf16 / FP8 |"
    assert lines[2:] == [
        "| 8192 x 768 -> 3072 | 12 | 1.000 (1.000 to 1.000) | 0.500 (0.400 to 0.600) | 2.000 |"
    ]


@pytest.mark.parametrize(
    ("recipe", "hardware", "said"),
    [
        ("delayed", CPU, "this is a CPU"),
        ("bf16", H200, "bf16 runs as bf16"),
        ("mxfp8", H200, "this is compute capability 9.0"),
        ("delayed", Hardware("cuda", (8, 0)), "this is compute capability 8.0"),
    ],
)
def test_where_fp8_is_not_native_there_is_nothing_to_measure(
    recipe: str, hardware: Hardware, said: str
) -> None:
    message = refusal(shapes.native_plan, recipe, hardware)
    assert "needs FP8 in hardware" in message
    assert said in message


def test_without_a_compiler_it_is_said_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lacking(plan: Plan) -> None:
        raise UserError("--compile needs triton")

    monkeypatch.setattr(shapes, "require_compiler", lacking)
    with pytest.raises(UserError, match="Install triton"):
        shapes.native_plan("delayed", H200)
    monkeypatch.setattr(shapes, "require_compiler", lambda plan: None)
    assert shapes.native_plan("delayed", H200, "torch").backend == "torch"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_the_command_refuses_a_cpu_in_one_line(command, capsys) -> None:
    assert command("bench", "shapes", "--model", "gpt-nano", "--recipe", "delayed") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "needs FP8 in hardware" in printed.err


def test_the_command_measures_prints_and_saves(
    command, capsys, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_on_a_cpu("delayed")
    recorder = Recorder({"bf16": 8.0, "fp8": 16.0}, passes=0)
    real = shapes.measure_shapes

    def measure(config, plan, hardware, **options):
        return real(config, plan, hardware, **options, compiled=False, measure=recorder)

    monkeypatch.setattr(shapes, "native_plan", lambda recipe, hardware, backend: plan)
    monkeypatch.setattr(shapes, "measure_shapes", measure)
    sizes = ["--batch", "2", "--context", "8", "--rounds", "9"]
    assert command("bench", "shapes", "--model", "gpt-nano", *sizes) == 0
    printed = capsys.readouterr().out
    assert "| 16 x 128 -> 768 | 4 | 1.000 (0.500 to 2.000) | 2.000 (1.000 to 4.000) | 0.500 |" in (
        printed.splitlines()
    )
    assert f"written: {cache}" in printed
    assert recorder.calls[0][1] == 9
    kept = load_measured(probe("cpu"), "torch", "delayed")
    assert set(kept.values()) == {0.5}
    assert (16, 128, 768) in kept
