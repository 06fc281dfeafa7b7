"""A run's events, as findings and as table rows."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from fp8stack.analysis.report.formatting import Finding, in_steps
from fp8stack.analysis.report.read import RunRecord, number
from fp8stack.common.tables import counted

FAILURES = ("stop", "non-finite")
DISTINCT = ("rollback", "demote", "restore", "phase", "branch")  # never share a table row
_KNOWN = {  # event keys that have their own column, and keys of metrics
    *("step", "event", "why", "layer", "operand", "fp16", "val_loss", "loss_scale", "skipped"),
    *("loss", "lr", "grad_norm", "step_ms", "tokens_per_s", "mfu", "memory_gib", "fp8_gemms"),
}


def failure(run: RunRecord) -> dict[str, Any] | None:
    """The event that ended a failed run; None if a good step or a rollback came after it."""
    for event in reversed(run.events):
        if event.get("event") == "rollback":
            return None
        if event.get("event") in FAILURES:
            last = max((row["step"] for row in run.rows if "event" not in row), default=-1)
            return event if (number(event.get("step")) >= last) else None
    return None


def ending(run: RunRecord) -> Iterable[Finding]:
    """Findings on why the run failed, if it did, and on losses that are not finite."""
    failed = failure(run)
    if failed is not None:
        reason = failed.get("why") or "the loss or a gradient is not finite"
        yield Finding("alarm", f"The run stopped at step {failed.get('step')}: {reason}")
    lost = [row["step"] for row in run.rows if "loss" in row and row["loss"] is None]
    if lost:
        yield Finding("alarm", f"The loss is not finite at {in_steps(lost)}.")


def from_events(run: RunRecord) -> Iterable[Finding]:
    """Findings on events of the guard and the training loop."""
    counts: Counter[str] = Counter(str(event.get("event")) for event in run.events)
    skipped = [event for event in run.events if event.get("event") == "skip"]
    bad = [event for event in skipped if "fp16" not in event]
    overflows = len(skipped) - len(bad)
    if bad:
        steps = in_steps(event["step"] for event in bad)
        reason = bad[0].get("why")
        text = f"{counted(len(bad), 'step was', 'steps were')} skipped ({steps}): {reason}."
        yield Finding("warning", text)
    if overflows:
        text = (
            f"{counted(overflows, 'step was', 'steps were')} skipped because the gradient "
            "overflowed in fp16; a few are usual while the loss scale finds its place."
        )
        much = overflows > 0.05 * max(len(run.rows), 20)
        yield Finding("warning" if much else "note", text)
    for event in run.events:
        kind, begins = event.get("event"), f"Step {event.get('step')}:"
        reason = event.get("why", "of trouble")
        if kind == "rollback":
            back = f"the run went back to step {event.get('to_step')}"
            yield Finding("alarm", f"{begins} {back}, because {reason}.")
        elif kind == "demote":
            layer = str(event.get("layer", "a layer"))
            place = "the whole model" if layer == "*" else layer
            operand = f" ({event['operand']})" if event.get("operand") else ""
            precision, until = event.get("precision", "a wider format"), event.get("until_step")
            change = f"{precision} {'for good' if until is None else f'until step {until}'}"
            text = f"{begins} {place}{operand} was taken out of FP8 to {change}, because {reason}."
            yield Finding("alarm", text)
        elif kind in ("precision", "loss_scale"):
            yield Finding("warning", f"{begins} {event.get('why', kind)}.")
    if counts["clear_amax"]:
        cleared = counted(counts["clear_amax"], "amax history was", "amax histories were")
        yield Finding("warning", f"{cleared} cleared.")


def folded(events: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """The events as table rows with the text columns `steps`, `event`, `where`, `why` and `more`;
    consecutive equal events share a row."""
    lines: list[dict[str, str]] = []
    last_key: tuple[str, str, str] | None = None
    runs: list[list[int]] = []
    for event in events:
        where = " ".join(str(event[key]) for key in ("layer", "operand") if event.get(key))
        reason = str(event.get("why") or "")
        kind = str(event.get("event"))
        # 'loss is 7.1' and 'loss is 7.3' are the same reason.
        row_key = (kind, where, re.sub(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", "#", reason))
        if last_key == row_key and kind not in DISTINCT:
            runs[-1].append(event["step"])
            continue
        last_key = row_key
        runs.append([event["step"]])
        details = {key: value for key, value in event.items() if key not in _KNOWN}
        more = ", ".join(f"{k} {'none' if v is None else v}" for k, v in details.items())
        where = "the whole model" if where == "*" else where
        lines.append({"event": kind, "where": where, "why": reason, "more": more})
    for line, steps in zip(lines, runs, strict=True):
        begin, end = min(steps), max(steps)
        line["steps"] = str(begin) if begin == end else f"{begin} to {end}"
        if len(steps) > 1:
            line["event"] += f" ({len(steps)} times)"
    return lines
