"""The savings and the loss of gradients that ranks exchange in bfloat16: whole runs of two ranks on
a CPU, with and without compression.

The bytes are counted in the calls of all_reduce. Nothing is timed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor

from bench import report, runner
from bench.report import Report, Row
from fp8stack.analysis.benchmark.step_timing import FP8
from fp8stack.training import finalize, loop
from fp8stack.training.checkpoint import reader
from fp8stack.training.run import Run
from tests.faults.processes import checkpoints, rows, run_ranks

SHORT = ["--steps", "300"]
AT_MOST = 0.001  # the largest relative gap of the loss between compressed and plain runs
PLAIN, COMPRESSED = "float32", "bfloat16"
SIZES = [
    "--batch", "8", "--context", "64", "--set", "model_overrides.layers=2",
    "--set", "model_overrides.width=64", "--set", "model_overrides.heads=2",
    "--set", "sample_tokens=0", "--set", "log_every=10", "--set", "rank_timeout=120",
]  # fmt: skip
TINY = ["--context", "16", "--set", "model_overrides.layers=1"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=int, default=300, help="of each run (default: %(default)s)")
    add("--lr", default="5e-4", help="of each run (default: %(default)s)")
    add("--ranks", type=int, default=2, help="of each run (default: %(default)s)")
    runner.add_options(parser, device=False, recipes=["fp32", *FP8])


def measure(arguments: argparse.Namespace) -> Report:
    """Two runs of each recipe: with gradients in float32, and in bfloat16."""
    sizes = [*SIZES, *(TINY if arguments.tiny else []), "--steps", str(arguments.steps)]
    sizes += ["--lr", arguments.lr]
    sizes += ["--eval-every", str(arguments.steps), "--save-every", str(arguments.steps)]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for recipe in arguments.recipes:
            flags = ["--recipe", recipe, *sizes]
            plain = trained(Path(folder), f"{recipe}-plain", arguments.ranks, flags)
            flags = [*flags, "--set", "grad_compression=bf16"]
            small = trained(Path(folder), f"{recipe}-bf16", arguments.ranks, flags)
            rows += [
                _row(recipe, arm, run, plain, arguments)
                for arm, run in ((PLAIN, plain), (COMPRESSED, small))
            ]
    settings = {"steps": arguments.steps, "ranks": arguments.ranks, "lr": arguments.lr}
    return report.report_of("cpu", settings, rows)


def trained(folder: Path, name: str, ranks: int, flags: Sequence[str]) -> Path:
    """A run of several ranks that counts the bytes of its gradients.

    Raises:
        RuntimeError: a rank failed.
    """
    words = ["pretrain", "--device", "cpu", *flags, "--out", name]
    change = partial(counting, str(folder / name))
    ended = run_ranks(words, folder, ranks, change=change, timeout_s=1800)
    if any(rank.code for rank in ended):
        raise RuntimeError(f"{name}: {[(rank.code, rank.stderr[-500:]) for rank in ended]}")
    return folder / name


@contextmanager
def counting(run: str, rank: int) -> Iterator[None]:
    """A change to a rank, see `tests.faults.processes`: when all steps are done, the rank writes
    the bytes of gradients that it passed to all_reduce, for `sent`.

    Only DDP's hook reduces asynchronously; the guard, the amaxes and the loss wait.
    """
    counted = 0
    reduce, finish = cast(Any, dist.all_reduce), finalize.finish

    def count(tensor: Tensor, *args: Any, **options: Any) -> Any:
        nonlocal counted
        if options.get("async_op"):
            counted += tensor.nbytes
        return reduce(tensor, *args, **options)

    def write_count(finished: Run, *arguments: Any) -> None:
        Path(f"{run}.sent-{rank}").write_text(str(counted))
        finish(finished, *arguments)

    with patch.object(dist, "all_reduce", count), patch.object(loop, "finish", write_count):
        yield


def sent(run: Path) -> list[int]:
    """The bytes of gradients that each rank of the run passed to all_reduce."""
    return [int(file.read_text()) for file in sorted(run.parent.glob(f"{run.name}.sent-*"))]


def parameters(run: Path) -> int:
    weights = reader.load(checkpoints(run)[-1]).tensors["model"]
    return sum(tensor.numel() for tensor in weights.values())


def _row(recipe: str, arm: str, run: Path, plain: Path, arguments: argparse.Namespace) -> Row:
    loss, base = last_loss(run), last_loss(plain)
    per_step = sent(run)[0] // arguments.steps
    return {
        "case": recipe,
        "arm": arm,
        "val_loss": round(loss, 6),
        "gap_percent": round(100 * (loss / base - 1), 4),
        "bytes_per_step": per_step,
        "bytes_share": round(per_step / (sent(plain)[0] // arguments.steps), 4),
    }


def last_loss(run: Path) -> float:
    return float(next(row["val_loss"] for row in reversed(rows(run)) if "val_loss" in row))


def table(data: Report) -> str:
    settings = data["settings"]
    text = f"Runs of {settings['ranks']} ranks over gloo, same data and first weights: a GPT of 2\n"
    text += "layers of 64. Bytes are those of the gradients that a rank gives to all_reduce. The\n"
    text += "gap is that of the validation loss."
    cells = (
        [
            row["case"], row["arm"], f"{row['bytes_per_step']:,}", f"{row['bytes_share']:.2f}",
            f"{row['val_loss']:.4f}", f"{row['gap_percent']:+.3f} %",
        ]
        for row in data["results"]
    )  # fmt: skip
    header = ["recipe", "gradients travel as", "bytes per step", "share", "validation loss", "gap"]
    return report.heading(data, "Gradient compression", text) + report.markdown(header, cells)


def figure(data: Report) -> Figure:
    rows = [row for row in data["results"] if row["arm"] == COMPRESSED]
    names, gaps = [row["case"] for row in rows], [row["gap_percent"] for row in rows]
    title = "gradients in bfloat16, against float32"
    return report.bar_figure(names, gaps, title, "gap of the validation loss, %")
