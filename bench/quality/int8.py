"""FP8 against INT8 on the probabilities of attention: how many become exactly zero, and the error.

The softmax over K keys of logits from N(0, s^2) has a few large probabilities and many tiny ones.
INT8 has 255 equal steps, so values below 1/254 of the largest become zero; E4M3's steps shrink with
the value, and with a scale it reaches 1/458752 of the largest. Nothing is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from matplotlib.figure import Figure
from torch import Tensor

from bench import report, runner
from bench.report import Report, Row
from fp8stack.numerics import amax, cast_to_fp8, tensor_scale
from fp8stack.numerics.error import sqnr_db

QUERIES = 256
CASES = [(keys, spread) for spread in (1.0, 2.0, 3.0, 4.0) for keys in (128, 384, 1024)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="of the logits (default: %(default)s)")
    runner.add_options(parser, device=False)


def probabilities(queries: int, keys: int, spread: float, seed: int = 0) -> Tensor:
    """Attention probabilities, float32 [queries, keys]: the softmax of logits from
    N(0, spread^2)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(spread * torch.randn(queries, keys, generator=generator), dim=-1)


def int8(x: Tensor) -> Tensor:
    """`x` quantized to symmetric INT8 and back: one scale, amax / 127, rounding to nearest even."""
    scale = float(amax(x)) / 127
    return torch.fake_quantize_per_tensor_affine(x, scale, 0, -127, 127)


def e4m3(x: Tensor) -> Tensor:
    """`x` quantized to E4M3 and back, with one scale for the tensor, 448 / amax."""
    scale = tensor_scale(amax(x), "e4m3")
    return cast_to_fp8(x, scale, "e4m3").float() / scale


def unscaled(x: Tensor) -> Tensor:
    """`x` quantized to E4M3 and back, without a scale."""
    return cast_to_fp8(x, 1.0, "e4m3").float()


ARMS: dict[str, Callable[[Tensor], Tensor]] = {
    "INT8": int8, "E4M3": e4m3, "E4M3 without a scale": unscaled,
}  # fmt: skip


def figures(x: Tensor, given_back: Tensor) -> dict[str, float | None]:
    """The fraction of nonzero values that became zero, and the signal-to-noise ratio in dB."""
    nonzero = x != 0
    lost = ((given_back == 0) & nonzero).sum() / nonzero.sum()
    noise = (given_back - x).double().square().sum()
    return {
        "zeros": float(lost),
        "sqnr_db": sqnr_db(float(x.double().square().sum()), float(noise)),
    }


def measure(arguments: argparse.Namespace) -> Report:
    rows: list[Row] = []
    for keys, spread in [(16, 2.0)] if arguments.tiny else CASES:
        x = probabilities(QUERIES, keys, spread, arguments.seed)
        for arm, give_back in ARMS.items():
            facts = {"case": f"{keys} keys, s = {spread:g}", "arm": arm}
            rows.append({**facts, **figures(x, give_back(x))})
    return report.report_of("cpu", {"queries": QUERIES, "seed": arguments.seed}, rows)


def table(data: Report) -> str:
    text = (
        "Softmax over so many keys of logits from N(0, s^2), one scale for the tensor. `zeros`:\n"
        "the share of values that became exactly zero."
    )
    cells = (
        [row["case"], row["arm"], f"{row['zeros']:.1%}", report.number("sqnr_db", 1)(row)]
        for row in data["results"]
    )
    header = ["case", "arm", "zeros", "SQNR, dB"]
    title = "FP8 against INT8 on attention's probabilities"
    return report.heading(data, title, text) + report.markdown(header, cells)


def figure(data: Report) -> Figure:
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.add_subplot()
    for arm in ARMS:
        rows = [row for row in data["results"] if row["arm"] == arm]
        axes.plot([row["case"] for row in rows], [row["zeros"] for row in rows], "o-", label=arm)
    axes.set(ylabel="share that becomes zero", title="attention's probabilities in 8 bits")
    axes.tick_params(axis="x", labelrotation=30)
    axes.legend()
    return figure
