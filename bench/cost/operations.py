"""Single operations of FP8 training, for `bench grid`: casts, scales, amax histories, and judging a
step.

The GB/s of a cast count the bytes that it must move: every float32 read once and every result
written once, without scales. Operations run eagerly, as in the package; a kernel that fuses an
operation with its neighbours costs less.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from bench import report, runner
from bench.report import Row
from fp8stack.analysis.benchmark.timing import Timing, interleaved
from fp8stack.numerics import (
    AmaxHistory,
    Quantizer,
    amax,
    cast_to_fp8,
    quantize,
    tensor_scale,
)
from fp8stack.planning.run_config import GuardConfig
from fp8stack.training.guard.monitor import Monitor

EDGES = (512, 1024, 2048)
HISTORIES = ((48, 16), (48, 1024), (288, 1024))  # (slots of 4 or 24 blocks, history length)
WIDTHS = (256, 512, 1024)
BLOCK = Quantizer(block=(1, 128), scale="power_of_two")
MXFP8 = Quantizer(block=(1, 32), scale="e8m0")
COPY, BARE = "copy", "e4m3, scale known"
ALONE = "norm"
WRITTEN = {COPY: 4, "bf16": 2, "fp16": 2, "e4m3": 1, "e5m2": 1, "block": 1, "mxfp8": 1}

Arm = Callable[[], object]


def rows(device: str, arguments: argparse.Namespace) -> list[Row]:
    """The rows of every operation; the arms of a case take turns."""
    tiny = arguments.tiny
    rows: list[Row] = []

    def add(
        case: str, arms: dict[str, Arm], to_rows: Callable[..., list[Row]], *of: object
    ) -> None:
        def timed() -> list[Row]:
            return to_rows(case, interleaved(arms, **runner.timing_options(arguments)), *of)

        rows.extend(arguments.cells.rows(case, arms, timed))

    for edge in (16,) if tiny else EDGES:
        x = torch.randn(edge, edge, generator=torch.Generator().manual_seed(0)).to(device)
        add(f"cast, {edge} x {edge}", casts(x), _cast_rows, x.numel())
        add(f"scaling, {edge} x {edge}", scaled_casts(x), report.rows_of, BARE)
    for slots, length in ((3, 4), (6, 4)) if tiny else HISTORIES:
        arms = updates(slots, length, device)
        add(f"history, {slots} x {length}", arms, report.rows_of, "record")
    for width in (16,) if tiny else WIDTHS:
        case = f"judging, {4 * width * width:,} parameters"
        add(case, judging(width, device), report.rows_of, ALONE)
    return rows


def casts(x: Tensor) -> dict[str, Arm]:
    """Casts from float32 to each format, with a given scale; block formats compute their scales."""
    scale = tensor_scale(amax(x), "e4m3")
    return {
        COPY: x.clone,
        "bf16": x.bfloat16,
        "fp16": x.half,
        "e4m3": partial(cast_to_fp8, x, scale, "e4m3"),
        "e5m2": partial(cast_to_fp8, x, scale, "e5m2"),
        "block": partial(quantize, x, BLOCK),
        "mxfp8": partial(quantize, x, MXFP8),
    }


def _cast_rows(case: str, timings: dict[str, Timing], elements: int) -> list[Row]:
    rows = report.rows_of(case, timings, COPY)
    for row in rows:
        moved = elements * (4 + WRITTEN[row["arm"]])
        row["gb_per_s"] = round(moved / row["median_ms"] / 1e6, 3)
    return rows


def scaled_casts(x: Tensor) -> dict[str, Arm]:
    """The work of each recipe to quantize an operand to FP8, and the cast alone."""
    history = AmaxHistory({"x": "e4m3"}, length=16, device=x.device)
    scale = tensor_scale(amax(x), "e4m3")

    def delayed() -> Tensor:
        history.record("x", amax(x))
        return cast_to_fp8(x, history.scale("x"), "e4m3")

    def current() -> Tensor:
        return cast_to_fp8(x, tensor_scale(amax(x), "e4m3"), "e4m3")

    return {
        BARE: partial(cast_to_fp8, x, scale, "e4m3"),
        "amax alone": partial(amax, x),
        "delayed: amax noted, scale known": delayed,
        "current: amax, then its scale": current,
        "block: a scale per 1 x 128": partial(quantize, x, BLOCK),
        "mxfp8: a scale per 32": partial(quantize, x, MXFP8),
    }


def updates(slots: int, length: int, device: str) -> dict[str, Arm]:
    """Recording the amaxes of all operands, alone and with the update of their scales."""
    names = [f"layer.{number}" for number in range(slots)]
    history = AmaxHistory(dict.fromkeys(names, "e4m3"), length=length, device=device)
    amaxes = [torch.tensor(1.0 + number, device=device) for number in range(slots)]

    def record() -> None:
        for name, value in zip(names, amaxes, strict=True):
            history.record(name, value)

    def record_and_update() -> None:
        record()
        history.update()

    return {"record": record, "record and update": record_and_update}


def judging(width: int, device: str) -> dict[str, Arm]:
    """Detecting a step that must be skipped: the gradient norm alone, which clipping needs in any
    case; the norm and the guard's verdict, without and with waiting for the device; and the norm
    and the check of `torch.amp.GradScaler`."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4)).to(device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    watch = Monitor(optimizer, GuardConfig())
    loss = torch.ones((), device=device)

    def norm() -> Tensor:
        return torch.nn.utils.get_total_norm(gradients)

    def judged() -> None:
        watch.begin()
        watch.judge(1, loss, norm())

    def waited() -> None:
        judged()
        watch.poll()

    def scaler() -> None:
        norm()
        found_inf = torch.zeros((), device=device)
        inverse = torch.ones((), device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse)

    return {
        ALONE: norm,
        "norm, judged by the guard": judged,
        "the same, and the host waits": waited,
        "norm, and GradScaler's check": scaler,
    }
