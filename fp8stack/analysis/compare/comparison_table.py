"""A comparison as text: the table that is printed, and `compare.md`."""

from collections.abc import Sequence

from fp8stack.analysis.compare.gaps import RecipeFigures, seeds
from fp8stack.analysis.compare.intervals import CONFIDENCE_ADDING, FEWEST_ADDING
from fp8stack.analysis.compare.run_results import HOPELESS, WARM_UP
from fp8stack.analysis.compare.settings import Comparison
from fp8stack.common.tables import aligned, counted, markdown


def header(baseline: str) -> list[str]:
    """Column titles."""
    return [
        "recipe", "ran", "FP8 layers", "FP8 GEMMs per step", "validation loss",
        f"gap to {baseline}", "verdict", "tokens/s", "peak GiB", "skips",
    ]  # fmt: skip


def cells(row: RecipeFigures) -> list[str]:
    """The cells of a recipe's row."""
    plan, gap = row.plan, row.gap_percent
    relative = "" if row.relative_speed is None else f" ({row.relative_speed:.2f})"
    return [
        row.recipe,
        row.ran,
        f"{plan['fp8_layers']}/{plan['layers']}" if plan else "",
        "" if row.fp8_gemms is None else str(row.fp8_gemms),
        _with_error(row.val_loss, row.standard_error, "{:.4f}"),
        f"{_with_error(gap.mean, gap.half_width, '{:+.2f}')} %" if gap else "",
        row.verdict,
        "" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}{relative}",
        "" if row.peak_memory_gib is None else f"{row.peak_memory_gib:.2f}",
        str(row.skips),
    ]


def _with_error(value: float | None, error: float | None, form: str) -> str:
    if value is None:
        return ""
    return form.format(value) + ("" if error is None else f" ± {form.format(error).lstrip('+')}")


def as_text(rows: Sequence[RecipeFigures], baseline: str, gap_note: str) -> str:
    """The table with aligned columns, and notes. `gap_note`: see `gaps.gap_note`."""
    gap_lines = [f"gap: {gap_note}"] * bool(gap_note)
    return "\n".join([*aligned([header(baseline), *map(cells, rows)]), *gap_lines, *notes(rows)])


def as_markdown(rows: Sequence[RecipeFigures], comparison: Comparison, gap_note: str) -> str:
    """The text of `compare.md`: the command, the table, an explanation of it, and notes."""
    config, machine = comparison.config, comparison.machine
    work = f"{counted(config.steps, 'step')} of {counted(config.batch, 'sequence')}"
    start = f", begun with the weights of {config.init_from}" * bool(config.init_from)
    facts = [f"{name} {value}" for name, value in machine.items()
             if value is not None and name not in ("machine", "slug")]  # fmt: skip
    lines = [
        f"`{comparison.command}`",
        "",
        f"made this: {config.model}, {work}, {seeds(comparison.seeds)}{start}; {gap_note}, on "
        f"{machine['machine']} ({', '.join(facts)}). For one seed all recipes have the same data, "
        "the same first weights and the same order.",
        "",
        *markdown(header(comparison.baseline), map(cells, rows)),
        "",
        _explanation(comparison),
        "",
        *(f"- {note}" for note in notes(rows)),
        "",
        "![Validation loss by step, and the gap at the end](compare.png)",
        "",
    ]
    return "\n".join(lines)


def _explanation(comparison: Comparison) -> str:
    judging, baseline = comparison.judging, comparison.baseline
    kind = (
        f"{100 * CONFIDENCE_ADDING:g} % interval by Student's t, from {FEWEST_ADDING} pairs on; "
        "as seeds were added after a look at it, it holds the gap in 96 to 98 % of all "
        "comparisons whose noise is normal"
        if judging.adding
        else "95 % interval by Student's t, which holds for a number of seeds chosen beforehand "
        "and normal noise (lognormal: 82 to 89 %; correlated across seeds: 75 to 92 %)"
    )
    errors = (
        "With one seed there are no errors, and differences mean little. "
        if comparison.seeds == 1
        else f"Validation loss: mean over seeds ± its standard error. Gap: the mean over seeds of "
        f"the difference to {baseline} of the same seed, in percent of it, ± the half-width of a "
        f"{kind}. A recipe is worse or better if that does not hold 0, and within "
        f"{judging.margin:g} % of {baseline} if all of it lies there. Each interval is for itself"
        f"{' and for this first model alone' * bool(comparison.config.init_from)}: of "
        f"{'fifty' if judging.adding else 'twenty'} recipes that are equal, one would seem to "
        "differ. "
    )
    windows = counted(comparison.config.last_eval_windows, "held-out window")
    return (
        f"Losses are in nats per token, at the last step, on at most {windows}. {errors}A run "
        "diverged if its numbers were no longer finite, or if its loss ended above "
        f"{HOPELESS} times that of guessing uniformly. tokens/s: the median over steps, without "
        f"the first {WARM_UP}, and relative to {baseline}; runs were made one after the other."
    )


def notes(rows: Sequence[RecipeFigures]) -> list[str]:
    """Notes on single recipes: reasons for another plan, events of the guard, failures."""
    lines = []
    for row in rows:
        if row.plan.get("reasons"):
            lines.append(f"{row.recipe}: {'; '.join(row.plan['reasons'])}")
        left_out = row.plan.get("not_fp8", {})
        if left_out and row.plan["fp8_layers"]:
            reasons = "; ".join(dict.fromkeys(left_out.values()))
            more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
            names = ", ".join(list(left_out)[:3]) + more
            lines.append(f"{row.recipe}: not in FP8: {names} ({reasons})")
        events = ", ".join(f"{name} {count}" for name, count in row.events.items())
        if events:
            lines.append(f"{row.recipe}: events: {events}")
        lines += [f"{row.recipe}, {error}" for error in row.errors]
    return lines
