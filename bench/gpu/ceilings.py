"""The ceilings of this device: bytes per second, operations per second, launches per second.

Each figure is printed and written as soon as it is measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8stack import numerics
from fp8stack.analysis.benchmark.timing import interleaved
from fp8stack.layers.kernels.fused_casts import cast_transpose
from fp8stack.layers.kernels.scaled_gemm import Scaled, ScaleLayout, scaled_gemm
from fp8stack.precision import probe

Call = Callable[[], Any]
# The name, the call, the amount that it moves or computes, and the unit of the rate.
Measured = tuple[str, Call, float, str]
LAUNCHES = 1000


def measurements(device: str, size: int) -> Iterator[Measured]:
    """Copies of `size`^2 bfloat16, products of matrices of `size` rows, casts, empty launches."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(size, size, generator=generator).to(device, torch.bfloat16) for _ in "xw")
    target = torch.empty_like(x)
    flops = 2.0 * size**3
    yield "copy, read and written", partial(target.copy_, x), 2 * 2 * x.numel() / 1e12, "TB/s"
    yield "bf16 matrix product", partial(torch.mm, x, w.t()), flops / 1e12, "TFLOP/s"
    for format in ("e4m3", "e5m2"):
        a, b = per_tensor(x, format), per_tensor(w, "e4m3")
        for fast in (True, False):
            name = f"{format} x e4m3 matrix product, {'fast' if fast else 'slow'} accumulation"
            gemm = partial(scaled_gemm, a, b, torch.bfloat16, fast_accumulation=fast)
            yield name, gemm, flops / 1e12, "TFLOP/s"
    scale = torch.ones((), device=device)
    moved = (2 + 1 + 1) * x.numel() / 1e12
    yield "cast with transpose and amax", partial(cast_transpose, x, scale), moved, "TB/s"
    yield "launches", partial(launch, torch.ones((), device=device)), LAUNCHES / 1e6, "million/s"


def per_tensor(x: Tensor, format: str) -> Scaled:
    """A matrix in FP8 with one scale, computed from its amax."""
    scale = numerics.tensor_scale(numerics.amax(x), format)
    data = numerics.cast_to_fp8(x, scale, format)
    return Scaled(data, numerics.inverse(scale), ScaleLayout.PER_TENSOR)


def launch(x: Tensor) -> None:
    """Launch many operations that take almost no time on the device."""
    for _ in range(LAUNCHES):
        x.add_(1.0)


def main() -> int:
    """Measure, print, and append to a file. Returns 1 if something could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.ceilings", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a file, one JSON object per line")
    parser.add_argument("--tiny", action="store_true", help="on a CPU too, to see that it runs")
    arguments = parser.parse_args()
    hardware = probe("cpu" if arguments.tiny else "cuda")
    size, rounds = (64, 6) if arguments.tiny else (8192, 30)
    failed = False
    for name, call, amount, unit in measurements(hardware.device, size):
        row: dict[str, Any] = {"name": name, "size": size, "unit": unit}
        try:
            timing = interleaved({name: call}, rounds=rounds, device=hardware.device)[name]
            row["rate"] = round(1000 * amount / timing.median_ms, 4)
            row["median_ms"] = round(timing.median_ms, 4)
        except RuntimeError as error:
            failed, row["failed"] = True, str(error).partition("\n")[0][:300]
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{name}: {row.get('failed') or str(row['rate']) + ' ' + unit}", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
