"""The results of each recipe against the baseline: means, standard errors and intervals."""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fp8stack.compare.intervals import Interval, mean_interval, pairs_needed, standard_error
from fp8stack.compare.results import RunFigures


@dataclass(frozen=True, kw_only=True)
class Judging:
    """How gaps are judged."""

    margin: float = 0.25  # percent; a gap that is surely less does not matter
    always_valid: bool = False  # see `mean_interval`
    until: float | None = None  # percent; the half-width that pairs are added for; None: `margin`

    @property
    def wanted(self) -> float:
        """The half-width that an interval should have, in percent."""
        return self.until or self.margin

    def more_pairs(self, gap: Interval) -> int | None:
        """How many pairs more make the interval that narrow, with what it costs to look meanwhile;
        None if that is not known yet."""
        if gap.deviation is None:
            return None
        needed = pairs_needed(gap.deviation, self.wanted, always_valid=True)
        return max(0, needed - gap.samples)


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
    seconds: float | None  # the median that a run took, with its start
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
    runs: Sequence[RunFigures],
    recipes: Sequence[str],
    baseline: str,
    judging: Judging = Judging(),
) -> list[RecipeFigures]:
    """A row for each of the `recipes`, in their order; `runs` has the runs of each."""
    of = {name: [run for run in runs if run.recipe == name] for name in recipes}
    return [_recipe(name, of[name], of[baseline], baseline, judging) for name in recipes]


def _recipe(
    name: str,
    runs: Sequence[RunFigures],
    base: Sequence[RunFigures],
    baseline: str,
    judging: Judging,
) -> RecipeFigures:
    losses = [run.val_loss for run in runs if run.val_loss is not None]
    is_baseline = name == baseline
    gap = None if is_baseline else paired_gap(runs, base, always_valid=judging.always_valid)
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
        verdict=verdict(runs, base, gap, baseline, judging),
        seconds=_of(runs, lambda run: run.seconds, statistics.median),
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


def paired_gap(
    runs: Sequence[RunFigures], base: Sequence[RunFigures], *, always_valid: bool = False
) -> Interval | None:
    """The mean of (loss - baseline's) / baseline's over the seeds that both have done, in percent.
    A seed's runs have data, order and first weights in common, so that what these do to a loss
    cancels in its difference. None if there is no such seed."""
    losses = {run.seed: run.val_loss for run in base if run.val_loss is not None}
    gaps = [
        100 * (run.val_loss / losses[run.seed] - 1)
        for run in runs
        if run.val_loss is not None and run.seed in losses
    ]
    return mean_interval(gaps, always_valid=always_valid) if gaps else None


def verdict(
    runs: Sequence[RunFigures],
    base: Sequence[RunFigures],
    gap: Interval | None,
    baseline: str,
    judging: Judging,
) -> str:
    """The conclusion in a few words; failures come before figures."""
    diverged = [f"{run.diverged_at} (seed {run.seed})" for run in runs if run.status == "diverged"]
    failed = [str(run.seed) for run in runs if run.status == "failed"]
    open_seeds = sum(run.status == "unfinished" for run in runs)
    said = []
    if diverged:
        said.append(f"diverged at step {', '.join(diverged)}")
    if failed:
        said.append(f"failed (seed {', '.join(failed)})")
    if any(run.recipe == baseline for run in runs):
        said.append("baseline")
    elif not diverged and gap is not None:
        pair_s = sum(
            _of(of, lambda run: run.seconds, statistics.median) or 0 for of in (runs, base)
        )
        said.append(judged(gap, baseline, judging, pair_s))
    elif not said and not open_seeds:
        said.append("no seed in common with the baseline")
    if open_seeds:
        said.append(f"{open_seeds} of {len(runs)} seeds to do")
    return ", ".join(said)


def judged(gap: Interval, baseline: str, judging: Judging, pair_s: float = 0) -> str:
    """One of three: better or worse by so much; within the margin; not known yet, and how many more
    pairs it takes, of `pair_s` seconds each if that is known."""
    width, within = gap.half_width, f"within {judging.margin:g} % of {baseline}"
    inside = width is not None and abs(gap.mean) + width <= judging.margin
    if not gap.contains_zero:
        better = "better" if gap.mean < 0 else "worse"
        found = f"{better} by {abs(gap.mean):.2f} ± {width:.2f} %"
        return f"{found}, {within}" if inside else found
    if inside:
        return within
    said = "not known yet"
    said += f": ± {width:.2f} %" if width is not None else f": {pairs(gap.samples)}"
    if more := judging.more_pairs(gap):
        took = f" ({about(more * pair_s)})" if pair_s else ""
        said += f", about {pairs(more, ' more')}{took} for ± {judging.wanted:g} %"
    return said


def pairs(count: int, more: str = "") -> str:
    """A number of pairs, in words."""
    return f"{count:,}{more} pair{'s' * (count != 1)}"


def seeds(count: int) -> str:
    """A number of seeds, in words."""
    return "one seed" if count == 1 else f"{count} seeds"


def about(seconds: float) -> str:
    """A time, roughly."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


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
