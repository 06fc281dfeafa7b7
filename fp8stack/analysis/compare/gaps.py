"""The results of each recipe against the baseline: means, standard errors and intervals."""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fp8stack.analysis.compare.intervals import (
    Interval,
    mean_interval,
    pairs_needed,
    standard_error,
)
from fp8stack.analysis.compare.run_results import RunFigures


@dataclass(frozen=True, kw_only=True)
class Judging:
    """The thresholds that gaps are judged by."""

    margin: float = 0.25  # percent; a gap that is certainly smaller does not matter
    adding: bool = False  # pairs are added after a look at the results, see `mean_interval`

    def more_pairs(self, gap: Interval) -> int | None:
        """The number of further pairs that makes the half-width of the interval the margin. None if
        not known yet."""
        if gap.deviation is None:
            return None
        return max(0, pairs_needed(gap.deviation, self.margin) - gap.samples)


@dataclass(frozen=True, kw_only=True)
class RecipeFigures:
    """A recipe over all seeds."""

    recipe: str
    plan: dict[str, Any]
    ran: str  # the precisions that were active, in order, and the backend
    compute_dtype: str  # of everything that is not quantized; "" before a run
    seeds: int
    done: int
    val_loss: float | None  # the mean over the runs that are done, in nats per token
    standard_error: float | None  # of that mean
    gap_percent: Interval | None  # mean of the differences from the baseline, by seed
    verdict: str
    seconds: float | None  # median wall time of a run, with startup
    tokens_per_s: float | None
    relative_speed: float | None  # tokens per second / the baseline's
    peak_memory_gib: float | None
    skips: int
    events: dict[str, int]
    fp8_gemms: int | None
    errors: tuple[str, ...]


def summarize(
    runs: Sequence[RunFigures],
    recipes: Sequence[str],
    baseline: str,
    judging: Judging = Judging(),
) -> list[RecipeFigures]:
    """A row for each of `recipes`, in their order, from the `runs` of all recipes."""
    by_recipe = {name: [run for run in runs if run.recipe == name] for name in recipes}
    return [
        _recipe(name, by_recipe[name], by_recipe[baseline], baseline, judging) for name in recipes
    ]


def _recipe(
    name: str,
    runs: Sequence[RunFigures],
    base: Sequence[RunFigures],
    baseline: str,
    judging: Judging,
) -> RecipeFigures:
    losses = [run.val_loss for run in runs if run.val_loss is not None]
    is_baseline = name == baseline
    gap = None if is_baseline else paired_gap(runs, base, adding=judging.adding)
    speeds = (
        _over_runs(group, lambda run: run.tokens_per_s, statistics.median) for group in (runs, base)
    )
    speed, base_speed = speeds
    plan = next((run.plan for run in runs if run.plan), {})
    dtypes = dict.fromkeys(run.plan["compute_dtype"] for run in runs if run.plan)
    ran = " then ".join(dict.fromkeys(precision for run in runs for precision in run.precisions))
    return RecipeFigures(
        recipe=name,
        plan=plan,
        ran=f"{ran} ({plan['backend']})" if ran and plan else "",
        compute_dtype=" and ".join(dtypes),
        seeds=len(runs),
        done=len(losses),
        val_loss=statistics.fmean(losses) if losses else None,
        standard_error=standard_error(losses),
        gap_percent=gap,
        verdict=verdict(runs, base, gap, baseline, judging),
        seconds=_over_runs(runs, lambda run: run.seconds, statistics.median),
        tokens_per_s=speed,
        relative_speed=speed / base_speed if speed and base_speed else None,
        peak_memory_gib=_over_runs(runs, lambda run: run.peak_memory_gib, max),
        skips=sum(run.skips for run in runs),
        events=dict(sum((Counter(run.events) for run in runs), Counter())),
        fp8_gemms=_over_runs(runs, lambda run: run.fp8_gemms, max),
        errors=tuple(f"seed {run.seed}: {run.error}" for run in runs if run.error),
    )


def gap_note(rows: Sequence[RecipeFigures], baseline: str, shared: str) -> str:
    """A sentence to print with gaps: the steps that runs of a seed share (`Comparison.shared`), and
    the compute dtype of the baseline. In another dtype, rounding to it is part of a gap."""
    dtypes = {row.recipe: row.compute_dtype for row in rows if row.compute_dtype}
    base = dtypes.get(baseline)
    if base is None:
        return shared
    computes = f"the baseline, {baseline}, computes in {base}"
    for dtype in dict.fromkeys(dtypes.values()):
        # A recipe called bf16 is known to compute in bf16.
        names = [name for name, computed in dtypes.items() if computed == dtype != name]
        if names and dtype != base:
            computes += f", but {', '.join(names)} in {dtype}, whose rounding is part of the gap"
    return "; ".join(filter(None, (shared, computes)))


def paired_gap(
    runs: Sequence[RunFigures], base: Sequence[RunFigures], *, adding: bool = False
) -> Interval | None:
    """The mean over seeds of (loss - baseline loss) / baseline loss, in percent, for the seeds that
    both recipes have finished; None if there are none. Runs of a seed share the data, its order and
    the initial weights, so their effect on the loss cancels in the difference."""
    losses = {run.seed: run.val_loss for run in base if run.val_loss is not None}
    gaps = [
        100 * (run.val_loss / losses[run.seed] - 1)
        for run in runs
        if run.val_loss is not None and run.seed in losses
    ]
    return mean_interval(gaps, adding=adding) if gaps else None


def verdict(
    runs: Sequence[RunFigures],
    base: Sequence[RunFigures],
    gap: Interval | None,
    baseline: str,
    judging: Judging,
) -> str:
    """The conclusion in a few words; failures come first."""
    diverged = [f"{run.diverged_at} (seed {run.seed})" for run in runs if run.status == "diverged"]
    failed = [str(run.seed) for run in runs if run.status == "failed"]
    open_seeds = sum(run.status == "unfinished" for run in runs)
    phrases = []
    if diverged:
        phrases.append(f"diverged at step {', '.join(diverged)}")
    if failed:
        phrases.append(f"failed (seed {', '.join(failed)})")
    if any(run.recipe == baseline for run in runs):
        phrases.append("baseline")
    elif not diverged and gap is not None:
        pair_s = sum(
            _over_runs(group, lambda run: run.seconds, statistics.median) or 0
            for group in (runs, base)
        )
        phrases.append(judged(gap, baseline, judging, pair_s))
    elif not phrases and not open_seeds:
        phrases.append("no seed in common with the baseline")
    if open_seeds:
        phrases.append(f"{open_seeds} of {len(runs)} seeds to do")
    return ", ".join(phrases)


def judged(gap: Interval, baseline: str, judging: Judging, pair_s: float = 0) -> str:
    """The conclusion from an interval: better or worse by a percentage, within the margin, or not
    known yet, with the number of further pairs needed and, if `pair_s` is given, their time."""
    width, within_margin = gap.half_width, f"within {judging.margin:g} % of {baseline}"
    is_inside = width is not None and abs(gap.mean) + width <= judging.margin
    if not gap.contains_zero:
        better = "better" if gap.mean < 0 else "worse"
        text = f"{better} by {abs(gap.mean):.2f} ± {width:.2f} %"
        return f"{text}, {within_margin}" if is_inside else text
    if is_inside:
        return within_margin
    text = "not known yet"
    text += f": ± {width:.2f} %" if width is not None else f": {pairs(gap.samples)}"
    if more := judging.more_pairs(gap):
        took = f" ({about(more * pair_s)})" if pair_s else ""
        text += f", about {pairs(more, ' more')}{took} for ± {judging.margin:g} %"
    return text


def pairs(count: int, more: str = "") -> str:
    """A number of pairs with its noun: "3 pairs", "3 more pairs"."""
    return f"{count:,}{more} pair{'s' * (count != 1)}"


def seeds(count: int) -> str:
    """A number of seeds with its noun: "one seed", "2 seeds"."""
    return "one seed" if count == 1 else f"{count} seeds"


def about(seconds: float) -> str:
    """A rounded time: "45 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _over_runs(
    runs: Sequence[RunFigures],
    figure: Callable[[RunFigures], Any],
    choose: Callable[[list[Any]], Any],
) -> Any:
    """Reduce a figure over the runs that have it by `choose`; None if no run has it."""
    values = [value for run in runs if (value := figure(run)) is not None]
    return choose(values) if values else None
