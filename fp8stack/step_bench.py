"""`fp8stack bench step`: a training step of each recipe on this machine, as a table.

It must not know other libraries: `python -m bench step` has the peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from fp8stack.benchmark import interleaved
from fp8stack.benchmark_step import FP8, Work, arms, baseline, build, figures
from fp8stack.model import plan_for
from fp8stack.precision import Hardware
from fp8stack.training.allocator import keep_freed_memory
from fp8stack.training.throughput import peak_rate


def measure(
    work: Work, hardware: Hardware, *, recipes: Sequence[str] = FP8, rounds: int, budget_s: float
) -> Iterator[dict[str, Any]]:
    """The figures of each arm (see `benchmark_step.figures`), the baseline without FP8 first.

    Each arm takes turns with the baseline alone, so that no more than two models have to fit.
    """
    if hardware.device == "cpu":
        keep_freed_memory()
    first, *others = arms(hardware, [baseline(hardware), *recipes], ())
    rate = peak_rate(hardware, plan_for(work.config, first.recipe, hardware))
    base = build(first, work, hardware).step
    options: dict[str, Any] = {"rounds": rounds, "warm_up": 3, "device": hardware.device}
    for arm in others:
        steps = {first.name: base, arm.name: build(arm, work, hardware).step}
        timings = interleaved(steps, **options, budget_s=budget_s)
        if arm is others[0]:
            yield figures(work, timings[first.name], timings[first.name], rate) | {
                "arm": first.name
            }
        yield figures(work, timings[arm.name], timings[first.name], rate) | {"arm": arm.name}


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows for people."""
    shown = Table(title=f"{rows[0]['model']}, {rows[0]['batch']} x {rows[0]['context']} tokens")
    for heading in ("arm", "step ms", "95 % interval", "tokens/s", f"speed of {rows[0]['arm']}"):
        shown.add_column(heading, justify="left" if heading == "arm" else "right")
    for row in rows:
        interval = f"{row['low_ms']:.1f} to {row['high_ms']:.1f}"
        cells = (f"{row['median_ms']:.1f}", interval, f"{row['tokens_per_s']:,.0f}")
        shown.add_row(row["arm"], *cells, f"{row['speedup']:.2f}")
    return shown
