"""Telemetry on this GPU: the figures of a CPU, and a sample that waits for nothing but its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fp8stack.common.formats import Quantizer
from fp8stack.numerics.error import quantization_error
from tests.gpu.machine import CONTEXT, no_waiting
from tests.support.small_loop import SmallLoop

pytestmark = pytest.mark.gpu

QUANTIZERS = {
    "tensor e4m3": Quantizer(format="e4m3"),
    "tensor e5m2": Quantizer(format="e5m2"),
    "mxfp8": Quantizer(block=(1, 32), scale="e8m0"),
    "block": Quantizer(block=(1, 128), scale="power_of_two"),
}


def error(name: str, x: Tensor) -> Tensor:
    scale = torch.tensor(100.0, device=x.device) if name.startswith("tensor") else None
    return quantization_error(x, QUANTIZERS[name], scale=scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_the_figures_of_an_operand_equal_the_figures_of_a_cpu(name, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 256, generator=generator)
    x[3, 5], x[7, 9], x[100:140] = torch.inf, torch.nan, 1e-6
    x = x.to(dtype)
    on_gpu = error(name, x.to(CONTEXT.device)).cpu()
    torch.testing.assert_close(on_gpu, error(name, x), rtol=1e-9, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8"])
def test_a_sampled_step_reads_the_device_once(recipe: str, tmp_path: Path) -> None:
    small = SmallLoop(tmp_path / "r", recipe, width=128, steps=9, telemetry_every=4)
    small.advance(3)
    step = small.next_step()
    with no_waiting():
        step()
    plan = small.run.plan
    rows = small.run.telemetry.finish(4, None, plan).rows
    assert len(rows) == 1 + 3 * sum(layer.fp8 for layer in plan.layers)
    assert all(json.dumps(row, allow_nan=False) for row in rows)
