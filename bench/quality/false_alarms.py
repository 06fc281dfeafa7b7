"""False alarms of `fp8stack compare`: verdicts of better or worse on runs of one recipe. The pairs
are runs in fp32 with different seeds, and so with other batches and initial weights."""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from bench import report, runner
from bench.report import Report, Row
from fp8stack.analysis.compare.intervals import FEWEST_ADDING, student_factor
from fp8stack.training.loop import train
from fp8stack.training.setup.start import set_up
from tests.support.quick_runs import quick_runs

PAIRS = 200
COMPARISONS = 5000
SEEDS = (3, 6)
WIDTHS = (2.0, 1.0, 0.5)  # of `--until`, in standard deviations of a gap
MODEL = {"layers": 1, "width": 32, "heads": 1, "mlp_width": 32}
KEYS: dict[str, Any] = {
    "recipe": "fp32", "device": "cpu", "threads": 1, "batch": 8, "context": 64,
    "model_overrides": MODEL, "eval_windows": 512, "sample_tokens": 0, "telemetry_every": 0,
    "min_lr": 0.0, "check_memory": False,
}  # fmt: skip
Array = NDArray[np.float64]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--pairs", type=int, default=PAIRS, help="of runs (default: %(default)s)")
    add("--steps", type=int, default=100, help="of each run (default: %(default)s)")
    runner.add_options(parser, device=False)


def measure(arguments: argparse.Namespace) -> Report:
    """A row for each run: its seed and its validation loss."""
    pairs, steps = (2, 4) if arguments.tiny else (arguments.pairs, arguments.steps)
    rows: list[Row] = []
    for seed in range(2 * pairs):
        rows += arguments.cells.rows(f"seed {seed}", ["fp32"], partial(_rows, seed, steps))
    return report.report_of("cpu", {"pairs": pairs, "steps": steps}, rows)


def _rows(seed: int, steps: int) -> list[Row]:
    silent = contextlib.redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, silent, quick_runs():
        flags = KEYS | {"out": f"{folder}/run", "seed": seed, "steps": steps}
        flags |= {"eval_every": steps, "save_every": steps, "log_every": steps}
        run = set_up(flags, None, [], None)
        train(run)
        loss = next(row["val_loss"] for row in run.folder.read_metrics() if "val_loss" in row)
    return [{"case": f"seed {seed}", "arm": "fp32", "val_loss": round(loss, 6)}]


@dataclass(frozen=True, kw_only=True)
class Ends:
    """The intervals at which comparisons end, one for each comparison: [comparisons]."""

    means: Array
    half_widths: Array
    pairs: NDArray[np.int64]

    def covers(self, mean: float) -> float:
        """The share of the intervals that contain `mean`."""
        return float((np.abs(self.means - mean) <= self.half_widths).mean())


def ends(gaps: Array, *, seeds: int | None = None, until: float | None = None) -> Ends:
    """The ends of comparisons with these gaps [comparisons, pairs]: after `seeds` pairs, or, as
    `--until` does it, after the first pair that makes the half-width at most `until`."""
    most = gaps.shape[1]
    numbers = np.arange(1, most + 1)
    means = gaps.cumsum(axis=1) / numbers
    squares = (gaps**2).cumsum(axis=1) - numbers * means**2
    deviations = np.sqrt(squares.clip(0) / np.maximum(numbers - 1, 1))
    first = FEWEST_ADDING if seeds is None else seeds
    factors = [student_factor(n, adding=seeds is None) for n in range(first, most + 1)]
    half_widths = deviations[:, first - 1 :] * factors
    is_narrow = half_widths <= (np.inf if until is None else until)
    is_narrow[:, -1] = True  # no more pairs
    last = is_narrow.argmax(axis=1)
    every = np.arange(len(gaps))
    return Ends(
        means=means[every, last + first - 1],
        half_widths=half_widths[every, last],
        pairs=last + first,
    )


def alarms(losses: Array) -> Iterator[tuple[str, float, float]]:
    """Yield each rule, the median number of pairs that it takes, and the share of comparisons that
    it ends with an interval without 0. Each comparison pairs the runs at random."""
    draw = np.random.default_rng(0)
    orders = np.array([draw.permutation(losses) for _ in range(COMPARISONS)])
    gaps = 100 * (orders[:, 0::2] / orders[:, 1::2] - 1)
    rules: dict[str, dict[str, Any]] = {f"--seeds {count}": {"seeds": count} for count in SEEDS}
    for width in WIDTHS:
        until = width * float(gaps.std())
        rules[f"--until {until:.2f}%"] = {"until": until}
    for name, rule in rules.items():
        if rule.get("seeds", FEWEST_ADDING) <= gaps.shape[1]:
            comparisons = ends(gaps, **rule)
            yield name, float(np.median(comparisons.pairs)), 1 - comparisons.covers(0.0)


def _losses(data: Report) -> Array:
    return np.array([row["val_loss"] for row in data["results"]])


def table(data: Report) -> str:
    losses = _losses(data)
    gaps = 100 * (losses[0::2] / losses[1::2] - 1)
    text = (
        f"{len(gaps)} pairs of runs of one model in fp32, in different seeds. The gap of a pair "
        f"has a standard deviation of {gaps.std(ddof=1):.2f} %.\nEach of {COMPARISONS:,} "
        "comparisons pairs the runs at random, and should say neither better nor worse."
    )
    cells = ([rule, f"{pairs:g}", f"{share:.1%}"] for rule, pairs, share in alarms(losses))
    header = ["rule", "pairs (median)", "said better or worse"]
    return report.heading(data, "False alarms", text) + report.markdown(header, cells)


def figure(data: Report) -> Figure:
    rules = list(alarms(_losses(data)))
    names, shares = [rule for rule, _, _ in rules], [100 * share for _, _, share in rules]
    return report.bar_figure(names, shares, "One recipe in two seeds", "better or worse, %")
