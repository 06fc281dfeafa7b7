"""A run's events, as findings and as table rows."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from fp8stack.analysis.report.findings import Finding, in_steps
from fp8stack.common.tables import counted
from fp8stack.training.metrics.read import Metrics, Row

FAILURES = ("stop", "non-finite")
DISTINCT = ("rollback", "demote", "restore", "phase", "branch")  # never share a table row
_KNOWN = {  # event keys that have their own column, and keys of metrics
    *("step", "event", "why", "layer", "operand", "fp16", "val_loss", "loss_scale", "skipped"),
    *("loss", "lr", "grad_norm", "step_ms", "tokens_per_s", "mfu", "memory_gib", "fp8_gemms"),
}


def failure(metrics: Metrics) -> Row | None:
    """The event that ended a failed run; None if a good step or a roll-back came after it."""
    last = max((row["step"] for row in metrics.rows if "event" not in row), default=-1)
    for event in reversed(metrics.events):
        if event["event"] == "rollback":
            return None
        if event["event"] in FAILURES:
            return event if event["step"] >= last else None
    return None


def from_events(metrics: Metrics) -> Iterable[Finding]:
    """Findings on why the run failed, if it did, on losses that are not finite, and on events of
    the guard and the training loop."""
    failed = failure(metrics)
    if failed is not None:
        reason = failed.get("why") or "the loss or a gradient is not finite"
        yield Finding("alarm", f"The run stopped at step {failed['step']}: {reason}")
    lost = [row["step"] for row in metrics.rows if "loss" in row and row["loss"] is None]
    if lost:
        yield Finding("alarm", f"The loss is not finite at {in_steps(lost)}.")
    skipped = [event for event in metrics.events if event["event"] == "skip"]
    bad = [event for event in skipped if "fp16" not in event]
    if bad:
        steps = in_steps(event["step"] for event in bad)
        reason = bad[0].get("why")
        text = f"{counted(len(bad), 'step was', 'steps were')} skipped ({steps}): {reason}."
        yield Finding("warning", text)
    if overflows := len(skipped) - len(bad):
        text = (
            f"{counted(overflows, 'step was', 'steps were')} skipped because the gradient "
            "overflowed in fp16; a few are usual while the loss scale finds its place."
        )
        much = overflows > 0.05 * max(len(metrics.rows), 20)
        yield Finding("warning" if much else "note", text)
    for event in metrics.events:
        yield from _from_event(event)
    if cleared := sum(event["event"] == "clear_amax" for event in metrics.events):
        text = counted(cleared, "amax history was", "amax histories were")
        yield Finding("warning", f"{text} cleared.")


def _from_event(event: Row) -> Iterable[Finding]:
    kind, begins, reason = event["event"], f"Step {event['step']}:", event.get("why", "of trouble")
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


def folded(events: Sequence[Row]) -> list[dict[str, str]]:
    """The events as table rows with the text columns `steps`, `event`, `where`, `why` and `more`;
    consecutive equal events share a row."""
    lines = []
    for (kind, where, _, _), group in groupby(enumerate(events), lambda pair: _key(*pair)):
        same = [event for _, event in group]
        details = {key: value for key, value in same[0].items() if key not in _KNOWN}
        first, last = (choose(event["step"] for event in same) for choose in (min, max))
        line = {
            "steps": str(first) if first == last else f"{first} to {last}",
            "event": f"{kind} ({len(same)} times)" if len(same) > 1 else kind,
            "where": "the whole model" if where == "*" else where,
            "why": str(same[0].get("why") or ""),
            "more": ", ".join(f"{k} {'none' if v is None else v}" for k, v in details.items()),
        }
        lines.append(line)
    return lines


def _key(index: int, event: Row) -> tuple[str, str, str, int | None]:
    """A key that is equal for events that may share a row."""
    kind = str(event["event"])
    where = " ".join(str(event[key]) for key in ("layer", "operand") if event.get(key))
    # 'loss is 7.1' and 'loss is 7.3' are the same reason.
    reason = re.sub(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", "#", str(event.get("why") or ""))
    return kind, where, reason, index if kind in DISTINCT else None
