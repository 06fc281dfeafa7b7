"""Summaries of a run: its headline, plan and what-if recipes."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np

from fp8stack.analysis.report.analysis import Analysis, verdict
from fp8stack.analysis.report.events import failure
from fp8stack.analysis.report.run_record import RunRecord
from fp8stack.analysis.report.telemetry import Figures, Operand, kinds_of, of_linears, table
from fp8stack.training.metrics.read import Metrics

ALIKE_DB = 0.5  # smaller differences are not reported


def headline(run: RunRecord) -> dict[str, str]:
    """The main figures of a run, as text by label."""
    rows, plan, config = run.metrics.rows, run.plan, run.config
    ran = next((row["precision"] for row in reversed(rows) if row.get("precision")), run.recipe)
    where = [str(plan[key]) for key in ("backend", "device") if plan.get(key)]
    total = f" of {config['steps']}" if type(config.get("steps")) is int else ""
    steps, losses = run.metrics.column("val_loss")
    _, rates = timed(run.metrics, "tokens_per_s")
    fp8 = sum(layer.get("fp8") is True for layer in run.layers)
    return {
        "state": _state(run),
        **_times(run),
        "model": str(config.get("model", "unknown")),
        "recipe": f"{plan.get('asked') or config.get('recipe') or 'unknown'} → {ran or 'unknown'}",
        "runs on": ", ".join(where) or "unknown",
        "steps": f"{rows[-1]['step'] if rows else 0}{total}",
        "validation loss": f"{losses[-1]:.4f} at step {steps[-1]}" if losses else "not evaluated",
        "tokens/s": f"{np.median(rates):,.0f} (median)" if rates else "not measured",
        "FP8 layers": f"{fp8} of {len(run.layers)}" if run.layers else "unknown",
    }


def _state(run: RunRecord) -> str:
    rows, steps = run.metrics.rows, run.config.get("steps")
    if run.is_running:
        return "running"
    if failure(run.metrics) is not None:
        return "failed"
    if not rows:
        return "no step yet"
    if type(steps) is int and rows[-1]["step"] >= steps:
        return "done"
    last = "" if run.written is None else f", last row of {run.written:%Y-%m-%d %H:%M} UTC"
    return f"unfinished{last}"


def _times(run: RunRecord) -> dict[str, str]:
    """When the run began, how long it took in how many sessions, and its versions."""
    if not run.sessions:
        return {"began": "unknown", "took": "unknown", "with": "unknown"}
    seconds = [session.seconds for session in run.sessions if session.seconds is not None]
    least = "at least " if len(seconds) < len(run.sessions) else ""
    spent = f"{least}{timedelta(seconds=round(sum(seconds)))}" if seconds else "not known yet"
    several = f", in {len(run.sessions)} sessions" if len(run.sessions) > 1 else ""
    return {
        "began": f"{run.sessions[0].began} UTC",
        "took": f"{spent}{several}",
        "with": "; then ".join(dict.fromkeys(session.versions for session in run.sessions)),
    }


def positive(metrics: Metrics, key: str, after: int = 0) -> tuple[list[int], list[float]]:
    """The steps after a step, and the values of `key` there that are above 0."""
    columns = zip(*metrics.column(key), strict=True)
    pairs = [(step, value) for step, value in columns if value > 0 and step > after]
    return [step for step, _ in pairs], [value for _, value in pairs]


def timed(metrics: Metrics, key: str) -> tuple[list[int], list[float]]:
    """The steps that the run itself timed, and their values. Steps of a branch's origin are left
    out."""
    return positive(metrics, key, metrics.began)


def as_json(runs: Sequence[Analysis]) -> str:
    """Headlines, findings and plans of runs as JSON."""
    rows = [
        {
            "run": str(analysis.run.path),
            **headline(analysis.run),
            "verdict": verdict(analysis),
            "findings": [vars(finding) for finding in analysis.findings],
            "plan": reasons(analysis.run),
        }
        for analysis in runs
    ]
    return json.dumps(rows, indent=2, allow_nan=False)


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The what-if recipes in telemetry. `rows` are (recipe, cells, is the run's own recipe). A cell
    is the median SQNR in dB and its difference from the run's own; None if unknown."""

    kinds: list[str]
    rows: list[tuple[str, list[tuple[float | None, float | None]], bool]]
    sentence: str


def what_if(analysis: Analysis) -> WhatIf | None:
    """The what-if recipes compared with the run's own recipe. None if the run has none."""
    tried = analysis.run.telemetry.what_if
    if not tried:
        return None
    recipe = analysis.run.recipe or "own"
    of_tried = [operand for operands in tried.values() for operand in operands]
    kinds = kinds_of([*of_linears(analysis.operands), *of_tried])
    steps = _steps(of_tried) & _steps(analysis.operands) or _steps(of_tried)
    medians = {name: _medians(operands, steps) for name, operands in tried.items()}
    run_sqnr = _medians(analysis.operands, steps)
    rows: list[tuple[str, list[tuple[float | None, float | None]], bool]] = []
    if run_sqnr:
        rows.append((recipe, [(run_sqnr.get(kind), None) for kind in kinds], True))
    gains = []
    for name, sqnr in medians.items():
        gain = {kind: sqnr[kind] - run_sqnr[kind] for kind in sqnr.keys() & run_sqnr.keys()}
        gains += [(value, name, kind) for kind, value in gain.items()]
        rows.append((name, [(sqnr.get(kind), gain.get(kind)) for kind in kinds], False))
    return WhatIf(kinds=kinds, rows=rows, sentence=_sentence(gains, recipe))


def _steps(operands: Sequence[Operand]) -> set[int]:
    return {int(step) for operand in operands for step in operand.steps}


def _medians(operands: Sequence[Operand], steps: set[int]) -> dict[str, float]:
    """The median SQNR by operand kind, over all layers at `steps`."""
    values: dict[str, list[Figures]] = defaultdict(list)
    for operand in operands:
        sqnr = operand.figures["sqnr_db"][np.isin(operand.steps, list(steps))]
        values[operand.kind].append(sqnr[np.isfinite(sqnr)])
    joined = {kind: np.concatenate(arrays) for kind, arrays in values.items()}
    return {kind: float(np.median(array)) for kind, array in joined.items() if len(array)}


def _sentence(gains: Sequence[tuple[float, str, str]], run_recipe: str) -> str:
    """A sentence on the largest gain and the largest loss."""
    if not gains:
        return f"There is nothing of {run_recipe} itself to compare with."
    clauses = [
        f"{name} would have cost {abs(gain):.1f} dB {'less' if gain > 0 else 'more'} on {kind}"
        for gain, name, kind in dict.fromkeys((max(gains), min(gains)))
        if abs(gain) >= ALIKE_DB
    ]
    if not clauses:
        return f"None of the recipes tried differs from {run_recipe} by {ALIKE_DB} dB or more."
    return f"{'; '.join(clauses)}. (Median SQNR against that of {run_recipe}.)"


def not_fp8(run: RunRecord) -> list[tuple[str, str]]:
    """The layers that are not in FP8 and the reason, from the plan and the last sample."""
    reason_by_layer = {
        str(layer.get("name")): f"{layer.get('precision', '')}, {layer.get('reason', '')}"
        for layer in run.layers
        if layer.get("fp8") is False
    }
    left_out = table(run.telemetry.model.get("not_fp8"))
    reason_by_layer |= {str(name): str(reason) for name, reason in left_out.items()}
    return [(name, reason.strip(", ")) for name, reason in reason_by_layer.items()]


def reasons(run: RunRecord) -> list[str]:
    """The plan's reasons that concern the whole run, not a single layer."""
    entries = run.plan.get("reasons")
    names = {str(layer.get("name")) for layer in run.layers}
    return [
        str(reason)
        for reason in (entries if isinstance(entries, list) else [])
        if str(reason).partition(":")[0] not in names
    ]


def without_telemetry(run: RunRecord) -> str:
    """Explain why a report has no operands to show; "" if it has some."""
    if run.telemetry.operands:
        return ""
    if run.layers and not any(layer.get("fp8") for layer in run.layers):
        recipe = run.recipe or "this recipe"
        return f"No operands to show: no layer of this run is in FP8 ({recipe})."
    if run.config.get("telemetry_every") == 0:
        return "No telemetry: it was switched off (telemetry_every = 0)."
    if run.telemetry.model:
        return "No operands to show: telemetry.jsonl has samples, and no operand in them."
    if (run.path / "telemetry.jsonl").exists():
        return "No telemetry yet: telemetry.jsonl holds no sample."
    return "No telemetry: there is no telemetry.jsonl in the run folder."
