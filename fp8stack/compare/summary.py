"""What the runs of each recipe came to beside the baseline's: means, errors and intervals."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fp8stack.compare.results import RunFigures

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Interval:
    """`mean` +- `half_width`, at a confidence of 95 %; of one sample there is no width."""

    mean: float
    half_width: float | None
    samples: int

    @property
    def contains_zero(self) -> bool:
        """Whether 0 lies within; of one sample nothing is known, so it does."""
        return self.half_width is None or abs(self.mean) <= self.half_width


def standard_error(samples: Sequence[float]) -> float | None:
    """The standard error of the mean, s / sqrt(n); None for fewer than two samples."""
    if len(samples) < 2:
        return None
    return statistics.stdev(samples) / math.sqrt(len(samples))


def mean_interval(samples: Sequence[float]) -> Interval:
    """The mean with its interval by Student's t: t s / sqrt(n), t of n - 1 degrees of freedom. For
    differences of pairs this is the paired t-test (NIST/SEMATECH e-Handbook of Statistical Methods,
    7.3.1.1, "Analysis of paired observations")."""
    from scipy import stats  # takes a second to import

    width = None
    if (error := standard_error(samples)) is not None:
        width = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(samples) - 1)) * error
    return Interval(mean=statistics.fmean(samples), half_width=width, samples=len(samples))


@dataclass(frozen=True, kw_only=True)
class RecipeFigures:
    """A recipe over all seeds. `curve` has step, mean, lowest and highest validation loss."""

    recipe: str
    plan: dict[str, Any]
    ran: str  # the precisions that were active, in order, and who computed
    seeds: int
    done: int
    val_loss: float | None  # the mean over the runs that are done, in nats per token
    standard_error: float | None  # of that mean
    gap_percent: Interval | None  # of the baseline: the mean of the differences seed by seed
    verdict: str
    tokens_per_s: float | None
    relative_speed: float | None  # tokens per second / the baseline's
    peak_memory_gib: float | None
    skips: int
    events: dict[str, int]
    fp8_gemms: int | None
    worst_sqnr: dict[str, Any] | None
    curve: tuple[tuple[int, float, float, float], ...]
    errors: tuple[str, ...]


def summarize(
    runs: Sequence[RunFigures], recipes: Sequence[str], baseline: str
) -> list[RecipeFigures]:
    """A row for each of the `recipes`, in their order; `runs` has a run for each seed of each."""
    of = {name: [run for run in runs if run.recipe == name] for name in recipes}
    return [_recipe(name, of[name], of[baseline], name == baseline) for name in recipes]


def _recipe(
    name: str, runs: Sequence[RunFigures], base: Sequence[RunFigures], is_baseline: bool
) -> RecipeFigures:
    losses = [run.val_loss for run in runs if run.val_loss is not None]
    gap = None if is_baseline else paired_gap(runs, base)
    speeds = (_of(of, lambda run: run.tokens_per_s, statistics.median) for of in (runs, base))
    speed, base_speed = speeds
    plan = next((run.plan for run in runs if run.plan), {})
    ran = " then ".join(dict.fromkeys(which for run in runs for which in run.precisions))
    seen = [run.worst_sqnr.model_dump() | {"seed": run.seed} for run in runs if run.worst_sqnr]
    return RecipeFigures(
        recipe=name,
        plan=plan,
        ran=f"{ran} ({plan['backend']})" if ran and plan else "",
        seeds=len(runs),
        done=len(losses),
        val_loss=statistics.fmean(losses) if losses else None,
        standard_error=standard_error(losses),
        gap_percent=gap,
        verdict=verdict(runs, gap, is_baseline),
        tokens_per_s=speed,
        relative_speed=speed / base_speed if speed and base_speed else None,
        peak_memory_gib=_of(runs, lambda run: run.peak_memory_gib, max),
        skips=sum(run.skips for run in runs),
        events=dict(sum((Counter(run.events) for run in runs), Counter())),
        fp8_gemms=_of(runs, lambda run: run.fp8_gemms, max),
        worst_sqnr=min(seen, key=lambda worst: worst["db"], default=None),
        curve=_curve(runs),
        errors=tuple(f"seed {run.seed}: {run.error}" for run in runs if run.error),
    )


def paired_gap(runs: Sequence[RunFigures], base: Sequence[RunFigures]) -> Interval | None:
    """The mean of (loss - baseline's) / baseline's over the seeds that both have done, in percent.
    A seed's runs have data, order and first weights in common, so that what these do to a loss
    cancels in its difference. None if there is no such seed."""
    losses = {run.seed: run.val_loss for run in base if run.val_loss is not None}
    gaps = [
        100 * (run.val_loss / losses[run.seed] - 1)
        for run in runs
        if run.val_loss is not None and run.seed in losses
    ]
    return mean_interval(gaps) if gaps else None


def verdict(runs: Sequence[RunFigures], gap: Interval | None, is_baseline: bool) -> str:
    """What is to be concluded, in a few words; what went wrong comes before any figure."""
    diverged = [f"{run.diverged_at} (seed {run.seed})" for run in runs if run.status == "diverged"]
    failed = [str(run.seed) for run in runs if run.status == "failed"]
    open_seeds = sum(run.status == "unfinished" for run in runs)
    said = []
    if diverged:
        said.append(f"diverged at step {', '.join(diverged)}")
    if failed:
        said.append(f"failed (seed {', '.join(failed)})")
    if is_baseline:
        said.append("baseline")
    elif not diverged and gap is not None:
        said.append(_judged(gap))
    elif not said and not open_seeds:
        said.append("no seed in common with the baseline")
    if open_seeds:
        said.append(f"{open_seeds} of {len(runs)} seeds to do")
    return ", ".join(said)


def _judged(gap: Interval) -> str:
    if gap.half_width is None:
        return "one seed: no verdict"
    if gap.contains_zero:
        return "no difference seen"
    better = "better" if gap.mean < 0 else "worse"
    return f"{better} by {abs(gap.mean):.2f} ± {gap.half_width:.2f} %"


def _of(
    runs: Sequence[RunFigures],
    figure: Callable[[RunFigures], Any],
    choose: Callable[[list[Any]], Any],
) -> Any:
    """What `choose` makes of a figure of all runs that have it; None if none has."""
    found = [value for run in runs if (value := figure(run)) is not None]
    return choose(found) if found else None


def _curve(runs: Sequence[RunFigures]) -> tuple[tuple[int, float, float, float], ...]:
    """Validation loss by step over the runs that are done; without any, over what there is."""
    done = [run for run in runs if run.status == "done"]
    chosen = done or [run for run in runs if run.status == "unfinished"] or runs
    by_step: dict[int, list[float]] = {}
    for run in chosen:
        for step, loss in run.curve:
            by_step.setdefault(step, []).append(loss)
    return tuple(
        (step, statistics.fmean(losses), min(losses), max(losses))
        for step, losses in sorted(by_step.items())
    )
