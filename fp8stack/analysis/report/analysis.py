"""Analysis of a run: findings that need attention, the worst first."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8stack.analysis.report.events import from_events
from fp8stack.analysis.report.findings import Finding, Level, in_steps, percent, several, with_unit
from fp8stack.analysis.report.gradient_faults import gradient_findings
from fp8stack.analysis.report.outliers import Outlier, find_outliers, settled
from fp8stack.analysis.report.run_record import RunRecord
from fp8stack.analysis.report.telemetry import Operand, TelemetrySamples, of_linears, table
from fp8stack.common.errors import UserError
from fp8stack.common.formats import named_format
from fp8stack.common.tables import counted
from fp8stack.precision.recipe_file import recipe_from_json

MOST = 6  # the worst outliers get a sentence each, the others only their name
CLIPPED_BITS = 3.0  # amax / largest value in range = 8; delayed scaling often has less
CLIPPED_SHARE = 1e-2
LOW_SQNR_DB = 15.0  # E5M2 at best has 25 dB, E4M3 31 dB
LOWER_SQNR_DB = 10.0  # for formats with less than two mantissa bits; E2M1 at best has 20 dB


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """A run with its findings. `extremes` are the worst figures, alarming or not: label, figure as
    text, operand, and step."""

    run: RunRecord
    findings: list[Finding]
    outliers: list[Outlier]
    operands: list[Operand]  # only samples with settled scales, see `outliers.settled`
    extremes: list[tuple[str, str, str, int]]


def analyze(run: RunRecord) -> Analysis:
    """Analyze a run."""
    measured = run.telemetry.operands
    delayed = _is_delayed(table(run.plan.get("recipe"))) or any(
        operand.steps[0] <= 1 and operand.figures["scale"][0] == 1.0 for operand in measured
    )
    operands = settled(measured, delayed)
    events = run.metrics.events
    switches = [event["step"] for event in events if event["event"] == "phase"]
    outliers = find_outliers(operands, switches)
    findings = [
        *from_events(run.metrics),
        *_not_finite(measured),
        *gradient_findings(run.telemetry.gradients, delayed),
        *_idle_experts(run.telemetry),
        *_outlier_findings(outliers),
        *_clipped(operands),
        *_low_sqnr(operands, outliers),
        *(Finding("note", note) for note in run.notes),
    ]
    rank = {"alarm": 0, "warning": 1, "note": 2}
    return Analysis(
        run=run,
        findings=sorted(findings, key=lambda finding: rank[finding.level]),
        outliers=outliers,
        operands=operands,
        extremes=_extremes(of_linears(operands)),
    )


def _is_delayed(recipe: Mapping[str, Any]) -> bool:
    """Whether a run's recipe uses delayed scaling; False if the recipe cannot be read."""
    try:
        return recipe_from_json(recipe, "the run").delayed
    except UserError:
        return False


def verdict(analysis: Analysis) -> str:
    """The sentence above the findings."""
    counts = Counter(finding.level for finding in analysis.findings)
    words: tuple[Level, ...] = ("alarm", "warning")
    problems = [counted(counts[word], word) for word in words if counts[word]]
    if problems:
        return f"Needs attention: {' and '.join(problems)}."
    if analysis.findings:
        return f"Nothing alarming: {counted(len(analysis.findings), 'note')}."
    telemetry = analysis.run.telemetry
    if telemetry.operands and not analysis.operands:
        return "Nothing stands out so far; the scales had not settled at the only sample."
    if analysis.operands or telemetry.gradients:
        return "Nothing stands out."
    return "Nothing stands out in the metrics; there is no telemetry of operands to look at."


def _not_finite(operands: Sequence[Operand]) -> Iterable[Finding]:
    for operand in operands:
        share, steps = operand.figures["nonfinite"], operand.steps
        samples = np.flatnonzero(share > 0)
        if len(samples):
            first, worst = samples[0], samples[np.argmax(share[samples])]
            yield Finding(
                "alarm",
                f"{operand.name}: values that are not finite at {in_steps(steps[samples])}, "
                f"first at step {steps[first]}, at most {percent(share[worst])} of them "
                f"(step {operand.steps[worst]}). Its amax is infinite there.",
            )


def _idle_experts(telemetry: TelemetrySamples) -> Iterable[Finding]:
    """Name the layer with most experts that got no token in the last sample."""
    layers, loads = telemetry.expert_loads()
    idle = (loads == 0).sum(axis=1)
    if total := int(idle.sum()):
        worst = int(idle.argmax())
        count, step = int(np.isfinite(loads).sum()), telemetry.expert_shares[layers[worst]][0]
        yield Finding(
            "warning" if total > count / 4 else "note",
            f"{counted(total, 'expert')} of {count} got no token at step {step}, {idle[worst]} of "
            f"them in {layers[worst]}. A larger balance or bias in [experts] spreads the tokens.",
        )


def _outlier_findings(outliers: Sequence[Outlier]) -> Iterable[Finding]:
    labels = {"sqnr_db": "SQNR"}
    for out in outliers[:MOST]:
        start = f"from step {out.step} on" if out.changed else "all along"
        where = f"stands out {start}. At step {out.worst_step}:"
        if not out.lasting:
            where = f"was out of line at step {out.worst_step} alone:"
        elif out.changed and out.step == out.operand.steps[-1]:
            where = f"stands out at step {out.step}:"
        figures = "; ".join(
            f"{labels.get(figure, figure)} {with_unit(figure, value)}, "
            f"its peers {with_unit(figure, peers)}"
            + ("" if before is None else f", itself {with_unit(figure, before)} before")
            for figure, (value, peers, before) in out.values.items()
        )
        yield Finding(_level(out), f"{out.operand.name} {where} {figures}.")
    if more := outliers[MOST:]:
        yield Finding(
            "warning" if "warning" in map(_level, more) else "note",
            f"{counted(len(more), 'more stands', 'more stand')} out less: "
            f"{several([out.operand.name.replace(', ', ' ') for out in more])}.",
        )


def _level(out: Outlier) -> Level:
    """The level of an outlier. An amax that was always large is only a note: the scale adapts to
    it, and if it does not, other figures stand out too."""
    always_large = not out.changed and out.values.keys() == {"amax"}
    return "warning" if out.lasting and not always_large else "note"


def _clipped(operands: Sequence[Operand]) -> Iterable[Finding]:
    """Count the amaxes that exceeded the range of their scale, and name the worst."""
    samples = sum(int(np.isfinite(operand.figures["headroom_bits"]).sum()) for operand in operands)
    clipped = [
        (
            float(figures["headroom_bits"][sample]),
            float(figures["saturated"][sample]),
            operand,
            sample,
        )
        for operand in operands
        for figures in [operand.figures]
        for sample in np.flatnonzero(operand.clipped)
    ]
    if not clipped:
        return
    bits, saturated, operand, sample = min(clipped, key=lambda item: item[0])
    share = "" if math.isnan(saturated) else f", {percent(saturated)} of its elements saturated"
    is_severe = -bits >= CLIPPED_BITS or any(item[1] >= CLIPPED_SHARE for item in clipped)
    yield Finding(
        "warning" if is_severe else "note",
        f"{len(clipped)} of {samples} sampled amaxes were clipped, being larger than their scale "
        f"can hold. The worst: {operand.name} at step {operand.steps[sample]}, by {-bits:.2g} "
        f"bits{share}.",
    )


def _low_sqnr(operands: Sequence[Operand], outliers: Sequence[Outlier]) -> Iterable[Finding]:
    reported_ids = {id(out.operand) for out in outliers if "sqnr_db" in out.values}
    groups: dict[float, list[tuple[float, Operand]]] = {}
    for operand in operands:
        sqnr = operand.figures["sqnr_db"]
        sqnr = sqnr[np.isfinite(sqnr)]
        format = named_format(operand.format)
        least_db = LOWER_SQNR_DB if format and format.mantissa_bits < 2 else LOW_SQNR_DB
        if len(sqnr) and id(operand) not in reported_ids and float(np.median(sqnr)) < least_db:
            groups.setdefault(least_db, []).append((float(np.median(sqnr)), operand))
    for least_db, group in groups.items():
        value, operand = min(group, key=lambda pair: pair[0])
        yield Finding(
            "warning",
            f"{counted(len(group), 'operand keeps', 'operands keep')} less than {least_db:.0f} dB "
            f"of signal to quantization noise. The worst: {operand.name}, {value:.1f} dB (median).",
        )


def _extremes(operands: Sequence[Operand]) -> list[tuple[str, str, str, int]]:
    """The worst sample of each figure once scales have settled, alarming or not."""
    extremes = []
    for label, figure, sign in (
        ("lowest SQNR", "sqnr_db", -1.0),
        ("most saturated", "saturated", 1.0),
        ("most underflow", "underflow", 1.0),
        ("least headroom", "headroom_bits", -1.0),
    ):
        signed = ((sign * operand.figures[figure], operand) for operand in operands)
        peaks = [
            (float(np.nanmax(values)), values, operand)
            for values, operand in signed
            if np.isfinite(values).any()
        ]
        if peaks:
            value, values, operand = max(peaks, key=lambda peak: peak[0])
            step = int(operand.steps[np.nanargmax(values)])
            extremes.append((label, with_unit(figure, sign * value), operand.name, step))
    return extremes
