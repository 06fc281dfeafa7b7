"""Summaries of a run: its headline, plan and what-if recipes."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from fp8stack.analysis.report.analysis import Analysis, verdict
from fp8stack.analysis.report.read import (
    Operand,
    RunRecord,
    column,
    kinds_of,
    layers,
    of_linears,
    table,
    timed,
)

ALIKE_DB = 0.5  # smaller differences are not reported


def headline(analysis: Analysis) -> dict[str, str]:
    """The main figures of a run, as text by label."""
    run = analysis.run
    recipe = table(run.plan.get("recipe")).get("name") or run.config.get("recipe")
    requested = run.plan.get("asked") or run.config.get("recipe")
    ran = next((row["precision"] for row in reversed(run.rows) if row.get("precision")), recipe)
    where = [str(run.plan[key]) for key in ("backend", "device") if run.plan.get(key)]
    total = "" if analysis.total is None else f" of {analysis.total}"
    steps, losses = column(run, "val_loss")
    _, rates = timed(run, "tokens_per_s")
    fp8 = sum(layer.get("fp8") is True for layer in layers(run.plan))
    state = analysis.state
    if state == "unfinished" and run.written is not None:
        state += f", last row of {run.written:%Y-%m-%d %H:%M} UTC"
    return {
        "state": state,
        **_times(run),
        "model": str(run.config.get("model", "unknown")),
        "recipe": f"{requested or 'unknown'} → {ran or 'unknown'}",
        "runs on": ", ".join(where) or "unknown",
        "steps": f"{analysis.done}{total}",
        "validation loss": f"{losses[-1]:.4f} at step {steps[-1]}" if losses else "not evaluated",
        "tokens/s": f"{np.median(rates):,.0f} (median)" if rates else "not measured",
        "FP8 layers": f"{fp8} of {len(layers(run.plan))}" if layers(run.plan) else "unknown",
    }


def as_json(runs: Sequence[Analysis]) -> str:
    """Headlines, findings and plans of runs as JSON."""
    rows = [
        {
            "run": str(analysis.run.path),
            **headline(analysis),
            "verdict": verdict(analysis),
            "findings": [vars(finding) for finding in analysis.findings],
            "plan": reasons(analysis.run),
        }
        for analysis in runs
    ]
    return json.dumps(rows, indent=2, allow_nan=False)


def _times(run: RunRecord) -> dict[str, str]:
    """When the run began, how long it took in how many sessions, and its versions."""
    if not run.sessions:
        return {"began": "unknown", "took": "unknown", "with": "unknown"}
    took = sum(session.seconds or 0.0 for session in run.sessions)
    least = "at least " if any(session.seconds is None for session in run.sessions) else ""
    several = f", in {len(run.sessions)} sessions" if len(run.sessions) > 1 else ""
    spent = str(timedelta(seconds=round(took)))
    none_ended = all(session.seconds is None for session in run.sessions)
    versions = dict.fromkeys(session.versions for session in run.sessions)
    return {
        "began": f"{run.sessions[0].began} UTC",
        "took": f"{'not known yet' if none_ended else least + spent}{several}",
        "with": "; then ".join(versions),
    }


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The what-if recipes in telemetry. `rows` are (recipe, cells, is the run's own recipe). A cell
    is the median SQNR in dB and its difference from the run's own; None if unknown."""

    kinds: list[str]
    rows: list[tuple[str, list[tuple[float | None, float | None]], bool]]
    sentence: str


def what_if(analysis: Analysis) -> WhatIf | None:
    """The what-if recipes compared with the run's own recipe. None if the run has none."""
    run = analysis.run
    if not run.what_if:
        return None
    kinds = kinds_of(
        [
            *of_linears(analysis.operands),
            *(operand for operands in run.what_if.values() for operand in operands),
        ]
    )
    steps = {
        int(step)
        for operands in run.what_if.values()
        for operand in operands
        for step in operand.steps
    }
    steps &= {int(step) for operand in analysis.operands for step in operand.steps} or steps
    run_sqnr = _medians(analysis.operands, steps)
    recipe = str(table(run.plan.get("recipe")).get("name") or run.config.get("recipe") or "own")
    rows: list[tuple[str, list[tuple[float | None, float | None]], bool]] = []
    if run_sqnr:
        rows.append((recipe, [(run_sqnr.get(kind), None) for kind in kinds], True))
    gains: list[tuple[float, str, str]] = []
    for name, operands in run.what_if.items():
        sqnr = _medians(operands, steps)
        cells: list[tuple[float | None, float | None]] = []
        for kind in kinds:
            value, run_value = sqnr.get(kind), run_sqnr.get(kind)
            gain = value - run_value if value is not None and run_value is not None else None
            cells.append((value, gain))
            if gain is not None:
                gains.append((gain, name, kind))
        rows.append((name, cells, False))
    return WhatIf(kinds=kinds, rows=rows, sentence=_sentence(gains, recipe))


def _medians(operands: Sequence[Operand], steps: set[int]) -> dict[str, float]:
    """The median SQNR by operand kind, over all layers at `steps`."""
    values: dict[str, list[Any]] = defaultdict(list)
    for operand in operands:
        sqnr = operand.figures["sqnr_db"]
        selected = np.isin(operand.steps, list(steps)) & np.isfinite(sqnr)
        values[operand.kind].append(sqnr[selected])
    joined = {kind: np.concatenate(arrays) for kind, arrays in values.items()}
    return {kind: float(np.median(array)) for kind, array in joined.items() if len(array)}


def _sentence(gains: list[tuple[float, str, str]], run_recipe: str) -> str:
    """A sentence on the largest gain and the largest loss."""
    if not gains:
        return f"There is nothing of {run_recipe} itself to compare with."
    clauses = []
    for gain, name, kind in dict.fromkeys((max(gains), min(gains))):
        if abs(gain) >= ALIKE_DB:
            less = "less" if gain > 0 else "more"
            clauses.append(f"{name} would have cost {abs(gain):.1f} dB {less} on {kind}")
    if not clauses:
        return f"None of the recipes tried differs from {run_recipe} by {ALIKE_DB} dB or more."
    return f"{'; '.join(clauses)}. (Median SQNR against that of {run_recipe}.)"


def not_fp8(run: RunRecord) -> list[tuple[str, str]]:
    """The layers that are not in FP8 and the reason, from the plan and the last sample."""
    reason_by_layer = {
        str(layer.get("name")): f"{layer.get('precision', '')}, {layer.get('reason', '')}"
        for layer in layers(run.plan)
        if layer.get("fp8") is False
    }
    if run.models:
        left_out = table(run.models[-1].get("not_fp8"))
        reason_by_layer |= {str(name): str(reason) for name, reason in left_out.items()}
    return [(name, reason.strip(", ")) for name, reason in reason_by_layer.items()]


def reasons(run: RunRecord) -> list[str]:
    """The plan's reasons that concern the whole run, not a single layer."""
    entries = run.plan.get("reasons")
    names = {str(layer.get("name")) for layer in layers(run.plan)}
    return [
        str(reason)
        for reason in (entries if isinstance(entries, list) else [])
        if str(reason).partition(":")[0] not in names
    ]


def without_telemetry(run: RunRecord) -> str:
    """Explain why a report has no operands to show; "" if it has some."""
    if run.operands:
        return ""
    recipe = table(run.plan.get("recipe")).get("name") or run.config.get("recipe") or "this recipe"
    if layers(run.plan) and not any(layer.get("fp8") for layer in layers(run.plan)):
        return f"No operands to show: no layer of this run is in FP8 ({recipe})."
    if run.config.get("telemetry_every") == 0:
        return "No telemetry: it was switched off (telemetry_every = 0)."
    if run.models:
        return "No operands to show: telemetry.jsonl has samples, and no operand in them."
    if run.has_telemetry:
        return "No telemetry yet: telemetry.jsonl holds no sample."
    return "No telemetry: there is no telemetry.jsonl in the run folder."
