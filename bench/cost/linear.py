"""One linear, forward and backward, in every recipe and backend that runs here, and in torchao.

On a GPU also the GEMMs alone, on operands that are already in FP8, to show the cost of quantizing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench import peers, report, runner
from bench.cost import emulation
from bench.report import Report, Row
from fp8stack.analysis.benchmark.step_timing import FP8, baseline, served
from fp8stack.analysis.benchmark.timing import Timing
from fp8stack.precision import Hardware, probe

Arm = Callable[[], object]
CPU_SHAPES = [(2048, 768, 3072)]
GPU_SHAPES = [
    (32768, 768, 2304), (32768, 768, 3072), (16384, 1024, 4096), (8192, 1600, 6400),
    (8192, 4096, 6144), (8192, 4096, 28672), (8192, 14336, 4096),
]  # fmt: skip
SHORT = ["--rounds", "10", "--budget", "20"]
GEMMS = {"bf16 GEMMs": torch.bfloat16, "FP8 GEMMs": torch.float8_e4m3fn}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_options(parser, rounds=100)


def measure(arguments: argparse.Namespace) -> Report:
    """Measure every shape. Arms are compared with the best recipe without FP8."""
    hardware = probe(arguments.device)
    shapes = CPU_SHAPES if hardware.device == "cpu" else GPU_SHAPES
    rows: list[Row] = []
    for shape in [(32, 64, 32)] if arguments.tiny else shapes:
        builders = dict(arms_of(shape, hardware))
        rows += arguments.cells.timed(
            emulation.case_of(*shape),
            builders,
            partial(_rows, hardware=hardware),
            **runner.timing_options(arguments),
        )
    mode = {"mode": "compiled but te" if _gpu(hardware) else "eager"}
    settings = runner.timing_settings(arguments) | mode
    return report.report_of(hardware.device, settings, rows, packages=["torchao"])


def _gpu(hardware: Hardware) -> bool:
    return hardware.device == "cuda"


def arms_of(
    shape: tuple[int, int, int], hardware: Hardware
) -> Iterator[tuple[str, Callable[[], Arm]]]:
    """Builders of a forward and backward pass of every linear: eager on a CPU, compiled on a GPU
    except te."""
    tokens, inputs, outputs = shape
    device = hardware.device
    dtype = torch.bfloat16 if _gpu(hardware) else torch.float32
    torch.manual_seed(0)
    x = torch.randn(tokens, inputs, dtype=dtype, device=device, requires_grad=True)
    dy = torch.randn(tokens, outputs, dtype=dtype, device=device) * 1e-3
    plain = list(dict.fromkeys([baseline(hardware), "bf16"]))
    for recipe in [*plain, *FP8]:
        for number, backend in enumerate(served(recipe, hardware)):
            name = recipe if number == 0 else f"{recipe} by {backend}"
            layer = partial(emulation.fp8stack_linear, recipe, inputs, outputs, device, backend)
            compiled = _gpu(hardware) and backend != "te"
            yield name, partial(emulation.linear_arm, layer, x, dy, compiled)
    peer_recipes = ("tensorwise", "rowwise") if _gpu(hardware) else ("tensorwise", "mxfp8")
    for recipe in peer_recipes:
        layer = partial(peers.linear, recipe, inputs, outputs, device, dtype)
        yield f"torchao {recipe}", partial(emulation.linear_arm, layer, x, dy, _gpu(hardware))
    if _gpu(hardware):
        for name, gemm_dtype in GEMMS.items():
            if gemm_dtype == torch.bfloat16 or served("current", hardware)[0] != "emulate":
                yield name, partial(gemms, shape, gemm_dtype)


def gemms(shape: tuple[int, int, int], dtype: torch.dtype) -> Arm:
    """The three GEMMs of a linear (y, dx, dw) alone, on a GPU, from operands in the layout that
    they need. Outputs are bfloat16; in FP8, dw is float32, as in fp8stack."""
    M, K, N = shape
    fp8 = dtype != torch.bfloat16
    grad = torch.float8_e5m2 if fp8 else dtype

    def operand(rows: int, columns: int, operand_dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(rows, columns, device="cuda").to(operand_dtype)

    x, w, dy = operand(M, K, dtype), operand(N, K, dtype), operand(M, N, grad)
    x_t, w_t, dy_t = operand(K, M, dtype), operand(K, N, dtype), operand(N, M, grad)
    unit_scale = torch.ones((), device="cuda")

    def once() -> None:
        if fp8:
            multiply = partial(torch._scaled_mm, scale_a=unit_scale, scale_b=unit_scale)
            multiply(x, w.t(), out_dtype=torch.bfloat16, use_fast_accum=True)
            multiply(dy, w_t.t(), out_dtype=torch.bfloat16)
            multiply(dy_t, x_t.t(), out_dtype=torch.float32)
        else:
            x @ w.t()
            dy @ w
            dy.t() @ x

    return once


def _rows(case: str, timings: dict[str, Timing], hardware: Hardware) -> list[Row]:
    rows = report.rows_of(case, timings, baseline(hardware))
    if "FP8 GEMMs" in timings:
        alone = timings["FP8 GEMMs"].median_ms
        for row in rows:
            if row["arm"].partition(" ")[0] in ("delayed", "current"):
                share = (row["median_ms"] - alone) / alone
                row["quantization_share"] = round(share, 4)
    return rows


def table(data: Report) -> str:
    text = "Forward and backward pass of one linear, tokens x in -> out. `quantization` is what a "
    text += "per-tensor recipe takes beyond its three FP8 GEMMs, as a share of these (GPUs alone)."
    extra = {
        "relative time": report.number("ratio"),
        "quantization": report.number("quantization_share"),
    }
    return report.page(data, "One linear", text, extra)


figure = report.ratios("One linear, forward and backward")
