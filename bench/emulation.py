"""The cost of emulated FP8 on a CPU: one linear, forward and backward, as a ratio to fp32.

Arms take turns within one process and the ratio is that of their fastest rounds. torchao's
emulation of the same recipes runs beside ours, eager like ours.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.moe_training.mxfp8_linear import mx_mm
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.quantization.quantize_.common import KernelPreference

from bench import machine
from fp8stack.backends import build_backend
from fp8stack.precision import probe, resolve
from fp8stack.training.allocator import keep_freed_memory

SHAPES = [(2048, 512, 512), (2048, 768, 3072), (4096, 1024, 4096)]
RECIPES = ["bf16", "delayed", "current", "block", "mxfp8"]
# The bars that this benchmark is held to, for the shape 2048 x 768 -> 3072.
BARS = {"delayed": 1.25, "current": 1.25, "mxfp8": 1.45}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds (default: 20)")


def run(arguments: argparse.Namespace) -> None:
    """Measure every shape, print the table, write `emulation.json`."""
    allocator = "keeps freed memory" if keep_freed_memory() else "the system's own"
    results = [measure(*shape, rounds=arguments.rounds) for shape in SHAPES]
    report = {"machine": machine.describe("torchao"), "rounds": arguments.rounds, "bars": BARS}
    report["allocator"] = allocator
    report["results"] = results
    path = arguments.out / "emulation.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(table(results))
    print(f"\nbars at 2048 x 768 -> 3072: {BARS}\nwritten: {path}")


def measure(tokens: int, inputs: int, outputs: int, rounds: int) -> dict[str, object]:
    """The milliseconds of each arm and their ratio to fp32, for one shape."""
    torch.manual_seed(0)
    x = torch.randn(tokens, inputs, requires_grad=True)
    dy = torch.randn(tokens, outputs) * 1e-3
    layers: dict[str, nn.Module] = {"fp32": nn.Linear(inputs, outputs)}
    layers |= {recipe: ours(recipe, inputs, outputs) for recipe in RECIPES}
    layers["torchao tensorwise"] = convert_to_float8_training(
        nn.Sequential(nn.Linear(inputs, outputs)), config=Float8LinearConfig(emulate=True)
    )
    layers["torchao mxfp8"] = TorchaoMxfp8(inputs, outputs)
    seconds = machine.interleaved({n: arm(layer, x, dy) for n, layer in layers.items()}, rounds)
    fastest = {name: min(values) for name, values in seconds.items()}
    return {
        "tokens": tokens,
        "in": inputs,
        "out": outputs,
        "fastest_ms": {name: round(1000 * value, 2) for name, value in fastest.items()},
        "median_ms": {
            name: round(1000 * statistics.median(values), 2) for name, values in seconds.items()
        },
        "ratio": {name: round(value / fastest["fp32"], 3) for name, value in fastest.items()},
    }


def ours(recipe: str, inputs: int, outputs: int) -> nn.Module:
    """Our emulated linear, as a model would hold it."""
    plan = resolve(recipe, probe("cpu")).for_layers({"linear": (inputs, outputs)})
    backend = build_backend(plan)
    layer = backend.linear("linear", inputs, outputs, True)
    backend.attach(layer)
    return layer


class TorchaoMxfp8(nn.Linear):
    """torchao's emulated MXFP8 linear, with the casts that run without CUDA."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = mx_mm.apply(
            x,
            self.weight,
            torch.float8_e4m3fn,
            torch.float8_e4m3fn,
            torch.float8_e4m3fn,
            32,
            KernelPreference.EMULATED,
            MXFP8Dim0CastKernelChoice.TORCH,
            MXFP8Dim1CastKernelChoice.TORCH,
            ScaleCalculationMode.RCEIL,
            False,
        )
        return y + self.bias


def arm(layer: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], None]:
    """One forward and backward pass, gradients dropped after."""

    def once() -> None:
        layer(x).backward(dy)
        x.grad = None
        for parameter in layer.parameters():
            parameter.grad = None

    return once


def table(results: list[dict[str, object]]) -> str:
    """The ratios as a Markdown table."""
    ratios = [result["ratio"] for result in results]
    assert all(isinstance(ratio, dict) for ratio in ratios)
    names = list(ratios[0])  # type: ignore[call-overload]
    lines = [
        "| tokens x in -> out | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for result, ratio in zip(results, ratios, strict=True):
        cells = " | ".join(f"{ratio[name]:.2f}" for name in names)  # type: ignore[index]
        shape = f"{result['tokens']} x {result['in']} -> {result['out']}"
        lines.append(f"| {shape} | {cells} |")
    return "\n".join(lines)
