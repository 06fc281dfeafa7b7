"""Events of a run, as findings and as lines of a table."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from fp8stack.report.read import Run, number
from fp8stack.report.words import Finding, in_steps, times

FAILURES = ("stop", "non-finite")
_OF_ROWS = frozenset(
    {
        *("loss", "lr", "grad_norm", "step_ms", "tokens_per_s", "mfu", "memory_gib", "fp8_gemms"),
        *("val_loss", "loss_scale", "skipped"),
    }
)


def failure(run: Run) -> dict[str, Any] | None:
    """The event that the run ended with, if it failed: no good step came after it."""
    for event in reversed(run.events):
        if event.get("event") == "rollback":
            return None
        if event.get("event") in FAILURES:
            last = max((row["step"] for row in run.rows if "event" not in row), default=-1)
            return event if (number(event.get("step")) >= last) else None
    return None


def ending(run: Run) -> Iterable[Finding]:
    """How the run failed, if it did, and losses that are not finite."""
    failed = failure(run)
    if failed is not None:
        why = failed.get("why") or "the loss or a gradient is not finite"
        yield Finding(level="alarm", text=f"The run stopped at step {failed.get('step')}: {why}")
    lost = [row["step"] for row in run.rows if "loss" in row and row["loss"] is None]
    if lost:
        text = f"The loss is not finite at {in_steps(lost)}."
        yield Finding(level="alarm", text=text)


def from_events(run: Run) -> Iterable[Finding]:
    """What the guard and the loop did about trouble."""
    counts: Counter[str] = Counter(str(event.get("event")) for event in run.events)
    overflows = sum("fp16" in event for event in run.events)
    skips = counts["skip"] - overflows
    if skips:
        whys = [str(event.get("why")) for event in run.events
                if event.get("event") == "skip" and "fp16" not in event]  # fmt: skip
        steps = [event["step"] for event in run.events if event.get("event") == "skip"]
        text = f"{times(skips, 'step was', 'steps were')} skipped ({in_steps(steps)}): {whys[0]}."
        yield Finding(level="warning", text=text)
    if overflows:
        text = (
            f"{times(overflows, 'step was', 'steps were')} skipped because the gradient "
            "overflowed in fp16; a few are usual while the loss scale finds its place."
        )
        much = overflows > 0.05 * max(len(run.rows), 20)
        yield Finding(level="warning" if much else "note", text=text)
    for event in run.events:
        kind = event.get("event")
        if kind == "rollback":
            text = (
                f"Step {event.get('step')}: the run went back to step {event.get('to_step')}, "
                f"because {event.get('why', 'of trouble')}."
            )
            yield Finding(level="alarm", text=text)
        elif kind == "demote":
            yield Finding(level="alarm", text=_demotion(event))
        elif kind in ("precision", "loss_scale"):
            text = f"Step {event.get('step')}: {event.get('why', kind)}."
            yield Finding(level="warning", text=text)
    if counts["clear_amax"]:
        text = f"{times(counts['clear_amax'], 'amax history was', 'amax histories were')} cleared."
        yield Finding(level="warning", text=text)


def _demotion(event: dict[str, Any]) -> str:
    layer = str(event.get("layer", "a layer"))
    who = "the whole model" if layer == "*" else layer
    operand = f" ({event['operand']})" if event.get("operand") else ""
    until = event.get("until_step")
    how_long = "for good" if until is None else f"until step {until}"
    return (
        f"Step {event.get('step')}: {who}{operand} was taken out of FP8 to "
        f"{event.get('precision', 'a wider format')} {how_long}, "
        f"because {event.get('why', 'of trouble')}."
    )


def folded(events: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """The events as table lines; equal ones in a row are one line.

    Each has `steps`, `event`, `where`, `why` and `more`, all text.
    """
    lines: list[dict[str, str]] = []
    marks: list[tuple[str, str, str]] = []
    runs: list[list[int]] = []
    for event in events:
        where = " ".join(str(event[key]) for key in ("layer", "operand") if event.get(key))
        why = str(event.get("why") or "")
        kind = str(event.get("event"))
        # 'loss is 7.1' and 'loss is 7.3' are the same why.
        mark = (kind, where, re.sub(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", "#", why))
        if marks and marks[-1] == mark and kind not in ("rollback", "demote", "restore", "phase"):
            runs[-1].append(event["step"])
            continue
        marks.append(mark)
        runs.append([event["step"]])
        known = {"step", "event", "why", "layer", "operand", "fp16", *_OF_ROWS}
        more = ", ".join(
            f"{key} {'none' if value is None else value}"
            for key, value in event.items()
            if key not in known
        )
        where = "the whole model" if where == "*" else where
        lines.append({"event": kind, "where": where, "why": why, "more": more})
    for line, steps in zip(lines, runs, strict=True):
        first, last = min(steps), max(steps)
        line["steps"] = str(first) if first == last else f"{first} to {last}"
        if len(steps) > 1:
            line["event"] += f" ({len(steps)} times)"
    return lines
