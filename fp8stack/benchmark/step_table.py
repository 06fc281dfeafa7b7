"""`fp8stack bench step`: a training step of each recipe on this machine, as a table.

It must not know other libraries: `python -m bench step` has the peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from fp8stack.benchmark.step import FP8, Work, arms, baseline, build, figures, free_memory
from fp8stack.benchmark.timing import interleaved
from fp8stack.precision import Hardware
from fp8stack.training.metrics.throughput import peak_rate


def measure(
    work: Work, hardware: Hardware, *, recipes: Sequence[str] = FP8, rounds: int, budget_s: float
) -> Iterator[dict[str, Any]]:
    """The figures of each arm (see `benchmark_step.figures`), the baseline without FP8 first.

    Each arm takes turns with the baseline alone, so that no more than two models have to fit.
    """
    first, *others = arms(hardware, [baseline(hardware), *recipes], ())
    base = build(first, work, hardware)
    options: dict[str, Any] = {"rounds": rounds, "warm_up": 3, "device": hardware.device}
    for arm in others:
        made = build(arm, work, hardware)
        steps = {first.name: base.step, arm.name: made.step}
        timings = interleaved(steps, **options, budget_s=budget_s)
        for name, built in ((first.name, base), (arm.name, made)):
            if name == arm.name or arm is others[0]:
                peak = peak_rate(hardware, built.plan)
                yield figures(work, timings[name], timings[first.name], peak) | {"arm": name}
        del made, steps, built
        free_memory(hardware.device)


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
