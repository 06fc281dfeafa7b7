"""Reads the files of a run. Another version may have written them, a user may have edited them, or
a process may be writing them: keys may be missing or unknown, and the last line incomplete.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from fp8stack.analysis.forecast.forecast import forecast_of_shape
from fp8stack.analysis.report.telemetry import Telemetry, read_telemetry, table
from fp8stack.common import presets
from fp8stack.common.errors import UserError, quoted
from fp8stack.common.io import LOCK, is_held, json_lines, read_json, read_toml
from fp8stack.model.config import load_config
from fp8stack.planning.run_config import at_home
from fp8stack.precision.recipe_file import recipe_from_json
from fp8stack.training.metrics.read import Metrics, Row, number, read_metrics, step_of

LARGEST_BYTES = 2**24  # larger files are not read, except for JSON lines

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Session:
    """One process that trained the run; values are None if it was killed before writing them."""

    began: str  # date and time in UTC
    first: int  # the step that it continued after
    last: int | None  # its last step
    seconds: float | None  # wall time
    ended: str  # how, as a phrase
    versions: str


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The contents of a run folder."""

    path: Path
    name: str
    config: dict[str, Any]
    config_text: str
    plan: dict[str, Any]
    metrics: Metrics
    telemetry: Telemetry
    sessions: list[Session]  # in the order of time
    loss_gap: str  # a sentence on the gap to expect of the recipe; "" if nothing is known
    is_running: bool
    written: datetime | None  # when the last row of metrics was
    notes: list[str]  # on incomplete, damaged or missing files

    @property
    def recipe(self) -> str:
        """The name of the recipe; "" if it is not known."""
        return str(table(self.plan.get("recipe")).get("name") or self.config.get("recipe") or "")

    @property
    def layers(self) -> list[dict[str, Any]]:
        """The layers of the plan; empty if it has none."""
        entries = self.plan.get("layers")
        return [table(layer) for layer in entries] if isinstance(entries, list) else []


def read_run(path: Path, *, telemetry: bool = True) -> RunRecord:
    """Read the run in a folder; without `telemetry`, without a forecast as well. Raises a UserError
    if the folder holds no run, or if a file cannot be read."""
    files = (path / name for name in ("run.toml", "plan.json", "metrics.jsonl", "telemetry.jsonl"))
    config, plan, metrics, samples = files
    if not os.path.isfile(config) and not os.path.isfile(metrics):
        raise UserError(
            f"No run in '{quoted(str(path))}'. Give the folder of a run, which holds run.toml "
            "and metrics.jsonl; `fp8stack list runs` finds them."
        )
    notes: list[str] = []
    lock = path / LOCK
    is_running = is_held(lock) if lock.exists() else None
    sampled = read_telemetry(samples, notes) if telemetry else Telemetry()
    empty: dict[str, Any] = {}
    keys = _read_or_note(config, lambda: read_toml(config), empty, notes)
    planned = _read_or_note(plan, lambda: table(read_json(plan)), empty, notes) or sampled.plan
    run = RunRecord(
        path=path,
        name=path.resolve().name or str(path),
        config=keys,
        config_text=_read_or_note(config, lambda: config.read_text("utf-8", "replace"), "", notes),
        plan=planned,
        metrics=read_metrics(path, notes),
        telemetry=sampled,
        sessions=_sessions(path / "sessions.jsonl", notes, is_running),
        loss_gap=_loss_gap(path, keys, planned) if telemetry else "",
        is_running=is_running is True,
        written=datetime.fromtimestamp(metrics.stat().st_mtime, UTC) if metrics.exists() else None,
        notes=notes,
    )
    order = {str(layer.get("name")): index for index, layer in enumerate(run.layers)}
    for operands in (sampled.operands, *sampled.what_if.values()):
        operands.sort(key=lambda operand: order.get(operand.layer, len(order)))
    return run


def _read_or_note(path: Path, read: Callable[[], T], otherwise: T, notes: list[str]) -> T:
    """The result of `read`; if that fails, `otherwise`, with a note."""
    note = f"{path.name} is missing."
    if path.exists():
        note = f"{path.name} cannot be read."
        with suppress(OSError, ValueError, RecursionError):
            if path.is_file() and path.stat().st_size <= LARGEST_BYTES:  # a pipe would block
                return read()
    if note not in notes:
        notes.append(note)
    return otherwise


def _loss_gap(path: Path, config: dict[str, Any], plan: dict[str, Any]) -> str:
    """The forecast for the run's recipe by the size of its model; "" without a quantized recipe,
    or if the run's files do not say enough."""
    with suppress(UserError, KeyError, TypeError, ValueError):
        recipe = recipe_from_json(plan["recipe"], "plan.json")
        keys = at_home(config, path)
        model = load_config(keys["model"], keys.get("model_overrides"))
        tokens = keys["steps"] * keys["batch"] * keys.get("context", model.context)
        if "init_from" in keys:  # the source's tokens are unknown
            tokens = None
        if recipe.is_fp8:
            name, recipes = presets.label(keys["model"]), {recipe.name: recipe}
            return forecast_of_shape(name, model, recipes, tokens).sentence()
    return ""


def _sessions(path: Path, notes: list[str], is_running: bool | None) -> list[Session]:
    """The processes that trained the run, from their begin and end rows. `is_running`: whether a
    process trains it now; None if unknown."""
    killed: Row = {"how": "killed"}
    pairs: list[tuple[Row, Row]] = []
    for row in json_lines(path, notes):
        if row.get("event") == "begin":
            pairs.append((row, killed))
        elif row.get("event") == "end" and pairs:
            pairs[-1] = (pairs[-1][0], row)
    if pairs and pairs[-1][1] is killed and is_running is not False:
        open_end = "still running" if is_running else "killed, or still running"
        pairs[-1] = (pairs[-1][0], {"how": open_end})
    return [_session(began, ended) for began, ended in pairs]


def _session(began: Row, ended: Row) -> Session:
    seconds = number(ended.get("seconds"))
    versions = table(began.get("versions")).items()
    return Session(
        began=str(began.get("time", "unknown")).replace("T", " ")[:16],
        first=step_of(began) or 0,
        last=step_of(ended),
        seconds=seconds if 0 <= seconds < 2**32 else None,
        ended=str(ended.get("how", "unknown")),
        versions=", ".join(f"{name} {version}" for name, version in versions),
    )
