"""The ceilings of this device: bytes per second, operations per second, launches per second.

Each figure is printed and written as soon as it is measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.cells import append_line
from fp8stack import numerics
from fp8stack.analysis.benchmark.timing import interleaved, wait_for
from fp8stack.layers.kernels.fused_casts import cast_transpose
from fp8stack.layers.kernels.scaled_gemm import Scaled, ScaleLayout, scaled_gemm
from fp8stack.precision import probe

Call = Callable[[], Any]
# The name, the size, the call, the amount that it moves or computes, and the unit of the rate.
Measured = tuple[str, tuple[int, ...], Call, float, str]
LAUNCHES = 1000
ROUND_S, MOST_CALLS = 5e-3, 1024
# Rows, in and out features: a square, and the MLPs of gpt2-1.5b and llama-8b.
SHAPES = ((8192, 8192, 8192), (8192, 1600, 6400), (8192, 4096, 14336))
TINY = ((64, 64, 64), (64, 32, 96))


def measurements(device: str, shapes: Sequence[tuple[int, int, int]]) -> Iterator[Measured]:
    """Copies and casts of inputs [rows, in] of the first shape, empty launches, and then the
    matrix products of all shapes."""
    rows, inputs, _ = shapes[0]
    size = (rows, inputs)
    x = matrix(*size, device)
    target = torch.empty_like(x)
    moved = 2 * 2 * x.numel() / 1e12
    yield "copy, read and written", size, partial(target.copy_, x), moved, "TB/s"
    scale = torch.ones((), device=device)
    moved = (2 + 1 + 1) * x.numel() / 1e12
    yield "cast with transpose and amax", size, partial(cast_transpose, x, scale), moved, "TB/s"
    number = torch.ones((), device=device)
    yield "launches", (), partial(launch, number), LAUNCHES / 1e6, "million/s"
    for rows, inputs, outputs in shapes:
        yield from products(device, rows, inputs, outputs)


def products(device: str, rows: int, inputs: int, outputs: int) -> Iterator[Measured]:
    """Products of [rows, in] and [in, out] in bf16, and in FP8 with fast and slow accumulation."""
    x, w = matrix(rows, inputs, device), matrix(outputs, inputs, device)
    size, flops = (rows, inputs, outputs), 2.0 * rows * inputs * outputs
    yield "bf16 matrix product", size, partial(torch.mm, x, w.t()), flops / 1e12, "TFLOP/s"
    for format in ("e4m3", "e5m2"):
        a, b = per_tensor(x, format), per_tensor(w, "e4m3")
        for fast in (True, False):
            name = f"{format} x e4m3 matrix product, {'fast' if fast else 'slow'} accumulation"
            gemm = partial(scaled_gemm, a, b, torch.bfloat16, fast_accumulation=fast)
            yield name, size, gemm, flops / 1e12, "TFLOP/s"


def matrix(rows: int, columns: int, device: str) -> Tensor:
    """A matrix of normal bfloat16, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, generator=generator).to(device, torch.bfloat16)


def per_tensor(x: Tensor, format: str) -> Scaled:
    """A matrix in FP8 with one scale, computed from its amax."""
    scale = numerics.tensor_scale(numerics.amax(x), format)
    data = numerics.cast_to_fp8(x, scale, format)
    return Scaled(data, numerics.inverse(scale), ScaleLayout.PER_TENSOR)


def launch(x: Tensor) -> None:
    """Launch many operations that take almost no time on the device."""
    for _ in range(LAUNCHES):
        x.add_(1.0)


def calls_of_a_round(
    call: Callable[[], object],
    wait: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """The number of calls in a row that take the device `ROUND_S` or more, so that the time of one
    launch and of waiting does not count."""
    call()  # it may compile
    count = 1
    while count < MOST_CALLS:
        wait()
        start = clock()
        repeated(call, count)
        wait()
        if clock() - start >= ROUND_S:
            break
        count *= 2
    return count


def repeated(call: Callable[[], object], count: int) -> None:
    """Call so many times."""
    for _ in range(count):
        call()


def main() -> int:
    """Measure, print, and append to a file. Returns 1 if something could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.ceilings", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a file, one JSON object per line")
    parser.add_argument("--tiny", action="store_true", help="on a CPU too, to see that it runs")
    arguments = parser.parse_args()
    hardware = probe("cpu" if arguments.tiny else "cuda")
    shapes, rounds = (TINY, 6) if arguments.tiny else (SHAPES, 30)
    failed = False
    for name, size, call, amount, unit in measurements(hardware.device, shapes):
        words = " x ".join(map(str, size))
        row: dict[str, Any] = {"name": name, "size": words, "unit": unit}
        try:
            count = calls_of_a_round(call, partial(wait_for, hardware.device))
            arms = {name: partial(repeated, call, count)}
            timing = interleaved(arms, rounds=rounds, device=hardware.device)[name]
            row["rate"] = round(1000 * amount * count / timing.median_ms, 4)
            row |= {"median_ms": round(timing.median_ms / count, 4), "calls": count}
        except RuntimeError as error:
            failed, row["failed"] = True, str(error).partition("\n")[0][:300]
        append_line(arguments.out, row)
        print(f"{name} {words}: {row.get('failed') or str(row['rate']) + ' ' + unit}", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
