"""Reads the files of a run. Another version may have written them, a user may have edited them, or
a process may be writing them: keys may be missing or unknown, and the last line incomplete.
"""

import math
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from sys import intern
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fp8stack.analysis.forecast.forecast import forecast_of_shape
from fp8stack.analysis.forecast.law import fitted
from fp8stack.analysis.forecast.result import NAME, ForecastResult
from fp8stack.common import presets
from fp8stack.common.errors import UserError, quoted
from fp8stack.common.formats import FORMATS
from fp8stack.common.io import LOCK, is_held, parse_json, read_json, read_toml
from fp8stack.model.config import load_config
from fp8stack.planning.run_config import at_home
from fp8stack.precision.recipe_file import recipe_from_json

KINDS = ("input", "weight", "grad_output")  # the operands of a linear's three GEMMs
FIGURES = ("amax", "scale", "headroom_bits", "saturated", "underflow", "nonfinite", "sqnr_db")
"""The figures of an operand in telemetry."""
GRADIENT_FIGURES = ("norm", "ratio", "zeros")  # the figures of a gradient

LONGEST_LINE = 2**24  # characters: a longer line of JSON is no row of a run
LARGEST = FORMATS["fp32"].max
LARGEST_BYTES = 2**24  # larger files are not read, except for JSON lines

Figures = NDArray[np.float64]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Series:
    """Figures over the sampled steps. `steps` [samples] increases; `figures` maps names to float64
    arrays [samples], NaN where a figure is missing."""

    steps: NDArray[np.int64]
    figures: dict[str, Figures]


@dataclass(frozen=True, kw_only=True)
class Operand(Series):
    """One operand of one layer, with each of `FIGURES`."""

    layer: str
    kind: str
    format: str

    @property
    def name(self) -> str:
        """The layer and the operand, for sentences."""
        return f"{self.layer}, {self.kind}"

    @property
    def clipped(self) -> NDArray[np.bool_]:
        """The samples whose amax lost more by clipping than by rounding, bool [samples]."""
        saturated = self.figures["saturated"] != 0  # NaN: not known
        clipped: NDArray[np.bool_] = saturated & (self.figures["headroom_bits"] < 0)
        return clipped


@dataclass(frozen=True, kw_only=True)
class Gradient(Series):
    """The gradient of a module, with each of `GRADIENT_FIGURES`."""

    module: str  # path


@dataclass(frozen=True, kw_only=True)
class Session:
    """One process that trained the run; values are None if it was killed before writing them."""

    began: str  # date and time in UTC
    first: int  # the step that it continued after
    last: int | None  # its last step
    seconds: float | None  # wall time
    ended: str  # how, as a phrase
    versions: str


@dataclass(kw_only=True)
class RunRecord:
    """The contents of a run folder."""

    path: Path
    name: str
    config: dict[str, Any]
    config_text: str
    plan: dict[str, Any]
    rows: list[dict[str, Any]]  # one per step, the last one written
    events: list[dict[str, Any]]  # in the order written; of a branch, its own
    operands: list[Operand] = field(default_factory=list)  # of the run's recipe
    what_if: dict[str, list[Operand]] = field(default_factory=dict)  # of --what-if recipes, by name
    gradients: list[Gradient] = field(default_factory=list)  # in the model's order
    # The last sample's step and tokens of each expert as shares of the layer's, by mixture.
    expert_shares: dict[str, tuple[int, list[float]]] = field(default_factory=dict)
    models: list[dict[str, Any]] = field(default_factory=list)  # telemetry of the whole model
    sessions: list[Session] = field(default_factory=list)  # in the order of time
    forecast: ForecastResult | None = None
    has_telemetry: bool = False
    is_running: bool = False
    written: datetime | None = None
    notes: list[str] = field(default_factory=list)  # on incomplete, damaged or missing files


def number(value: Any) -> float:
    """A JSON value as a float; NaN if it is no number within the range of float32."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        result = float(value)
    except OverflowError:
        return math.nan
    return result if abs(result) <= LARGEST else math.nan


def table(value: Any) -> dict[str, Any]:
    """A JSON value as a dict; empty if it is no object."""
    return value if isinstance(value, dict) else {}


def column(run: RunRecord, key: str) -> tuple[list[int], list[float]]:
    """The steps and values of the rows that have a finite `key`."""
    pairs = [(row["step"], number(row.get(key))) for row in run.rows]
    pairs = [(step, value) for step, value in pairs if not math.isnan(value)]
    return [step for step, _ in pairs], [value for _, value in pairs]


def positive(run: RunRecord, key: str) -> tuple[list[int], list[float]]:
    """The steps and values of the rows whose `key` is finite and above 0."""
    pairs = [(step, value) for step, value in zip(*column(run, key), strict=True) if value > 0]
    return [step for step, _ in pairs], [value for _, value in pairs]


def timed(run: RunRecord, key: str) -> tuple[list[int], list[float]]:
    """The steps that the run itself timed, and their values above 0: a branch has the rows of the
    run that it began with, too."""
    began = max((event["step"] for event in run.events if event["event"] == "branch"), default=0)
    steps, values = positive(run, key)
    timed_here = bisect_right(steps, began)
    return steps[timed_here:], values[timed_here:]


def read_run(path: Path, *, telemetry: bool = True) -> RunRecord:
    """Read the run in a folder. Raises a UserError if the folder holds no run, or if a file cannot
    be read."""
    config, metrics = path / "run.toml", path / "metrics.jsonl"
    if not os.path.isfile(config) and not os.path.isfile(metrics):
        raise UserError(
            f"No run in '{quoted(str(path))}'. Give the folder of a run, which holds run.toml "
            "and metrics.jsonl; `fp8stack list runs` finds them."
        )
    notes: list[str] = []
    lock = path / LOCK
    running = is_held(lock) if lock.exists() else None
    rows, events = _metrics(metrics, notes)
    written = datetime.fromtimestamp(metrics.stat().st_mtime, UTC) if metrics.exists() else None
    plan, forecast = path / "plan.json", path / NAME
    text = _read_or_note(
        lambda: config.read_text(encoding="utf-8", errors="replace"), config, "", notes
    )
    run = RunRecord(
        path=path,
        name=path.resolve().name or str(path),
        config=_read_or_note(lambda: read_toml(config), config, {}, notes),
        config_text=text,
        plan=_read_or_note(lambda: table(read_json(plan)), plan, {}, notes),
        rows=rows,
        events=events,
        written=written,
        sessions=_sessions(path / "sessions.jsonl", notes, running),
        has_telemetry=(path / "telemetry.jsonl").exists(),
        is_running=running is True,
        notes=notes,
    )
    if forecast.exists():
        read = ForecastResult.model_validate_json
        run.forecast = _read_or_note(
            lambda: read(forecast.read_text("utf-8")), forecast, None, notes
        )
    if run.forecast is None:
        run.forecast = _forecast_by_size(run)
    if telemetry:
        _read_telemetry(path / "telemetry.jsonl", run)
    return run


def _forecast_by_size(run: RunRecord) -> ForecastResult | None:
    """The forecast for a run's recipe by the size of its model; None without a quantized recipe, or
    if the run folder does not say enough."""
    with suppress(UserError, KeyError, TypeError, ValueError):
        recipe = recipe_from_json(run.plan["recipe"], "plan.json")
        keys = at_home(run.config, run.path)
        config = load_config(keys["model"], keys.get("model_overrides"))
        tokens = keys["steps"] * keys["batch"] * keys.get("context", config.context)
        if "init_from" in keys:  # the source's tokens are unknown
            tokens = None
        if recipe.is_fp8:
            return forecast_of_shape(
                presets.label(keys["model"]), config, {recipe.name: recipe}, tokens, fitted()
            )
    return None


def _read_or_note(read: Callable[[], T], path: Path, otherwise: T, notes: list[str]) -> T:
    """The result of `read`; if that fails, `otherwise`, with a note."""
    if not path.exists():
        notes.append(f"{path.name} is missing.")
        return otherwise
    with suppress(OSError, ValueError, RecursionError):
        if path.is_file() and path.stat().st_size <= LARGEST_BYTES:  # reading a pipe would block
            return read()
    notes.append(f"{path.name} cannot be read.")
    return otherwise


def _lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The objects in a file of JSON lines, up to the first invalid line."""
    if not path.exists():
        return
    if not path.is_file():
        raise UserError(f"{quoted(str(path))} is no regular file. Give the folder of a run.")
    try:
        with path.open(encoding="utf-8", errors="replace") as stream:
            for count, line in enumerate(iter(lambda: stream.readline(LONGEST_LINE), ""), start=1):
                try:
                    row = parse_json(line, path.name) if len(line) < LONGEST_LINE else None
                except UserError:
                    row = None
                if not isinstance(row, dict):
                    # A file that is being written ends in the middle of a line.
                    if line.endswith("\n") or len(line) == LONGEST_LINE:
                        notes.append(f"{path.name} is damaged: line {count} and on are left out.")
                    return
                yield {intern(key): value for key, value in row.items()}  # shared keys
    except OSError as error:
        raise UserError(f"Cannot read {quoted(str(path))}: {error.strerror}.") from error


def _step(row: dict[str, Any]) -> int | None:
    step = row.get("step")
    return step if type(step) is int and 0 <= step < 2**53 else None


def _metrics(path: Path, notes: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rows: dict[int, dict[str, Any]] = {}
    events: list[dict[str, Any]] = []
    for row in _lines(path, notes):
        step = _step(row)
        if step is None:
            continue
        if row.get("event") == "branch":  # what was before is the origin's
            events = [row]
        elif "event" in row:
            events.append(row)
        elif row.get("skipped") is True:
            reason = "the gradient overflowed in fp16, and the loss scale was lowered"
            events.append({"step": step, "event": "skip", "why": reason, "fp16": True})
        back = row.get("to_step")
        if row.get("event") == "rollback" and type(back) is int:
            rows = {
                logged_step: logged_row
                for logged_step, logged_row in rows.items()
                if logged_step <= back
            }
        if {"loss", "lr", "val_loss"} & row.keys():
            values = {key: value for key, value in row.items() if value is not None}
            rows[step] = rows.get(step, {"loss": None}) | values if "event" in row else row
    return [rows[step] for step in sorted(rows)], events


def _sessions(path: Path, notes: list[str], running: bool | None) -> list[Session]:
    """The processes that trained the run, from their begin and end rows. `running`: whether a
    process trains it now; None if unknown."""
    open_end = {True: "still running", False: "killed", None: "killed, or still running"}[running]
    sessions: list[Session] = []
    began: dict[str, Any] | None = None
    for row in _lines(path, notes):
        if row.get("event") == "begin":
            if began is not None:
                sessions.append(_session(began, {"how": "killed"}))
            began = row
        elif row.get("event") == "end" and began is not None:
            sessions.append(_session(began, row))
            began = None
    if began is not None:
        sessions.append(_session(began, {"how": open_end}))
    return sessions


def _session(began: dict[str, Any], ended: dict[str, Any]) -> Session:
    seconds = number(ended.get("seconds"))
    versions = table(began.get("versions")).items()
    return Session(
        began=str(began.get("time", "unknown")).replace("T", " ")[:16],
        first=_step(began) or 0,
        last=_step(ended),
        seconds=seconds if 0 <= seconds < 2**32 else None,
        ended=str(ended.get("how", "unknown")),
        versions=", ".join(f"{name} {version}" for name, version in versions),
    )


def _read_telemetry(path: Path, run: RunRecord) -> None:
    series: dict[tuple[str, str, str], _Rows] = {}
    by_module: dict[str, _Rows] = {}
    models: dict[int, dict[str, Any]] = {}
    newest = -1
    for row in _lines(path, run.notes):
        if "plan" in row and not run.plan:
            run.plan = table(row["plan"])
        step = _step(row)
        if step is None:
            continue
        if "gradient" in row:
            by_module.setdefault(str(row["gradient"]), _Rows(GRADIENT_FIGURES)).add(step, row)
            continue
        if "experts" in row:
            shares = row.get("shares")
            if isinstance(shares, list) and shares:
                run.expert_shares[str(row["experts"])] = step, [number(share) for share in shares]
            continue
        if "operand" not in row:
            if step <= newest:  # rolled back: these samples are taken again
                models = {earlier: model for earlier, model in models.items() if earlier < step}
                for sampled in (*series.values(), *by_module.values()):
                    sampled.forget_from(step)
            newest = step
            models[step] = row
            continue
        what_if_recipe = str(row.get("recipe")) if row.get("what_if") is True else ""
        key = (what_if_recipe, str(row.get("layer")), str(row["operand"]))
        series.setdefault(key, _Rows(FIGURES)).add(step, row)
    run.models = [models[step] for step in sorted(models)]
    run.gradients = [
        Gradient(module=module, **sampled.arrays())
        for module, sampled in by_module.items()
        if sampled.rows
    ]
    order = {str(table(layer).get("name")): i for i, layer in enumerate(layers(run.plan))}
    for key in sorted(series, key=lambda key: order.get(key[1], len(order))):
        if (rows := series[key]).rows:
            what_if_recipe, layer, kind = key
            group = run.what_if.setdefault(what_if_recipe, []) if what_if_recipe else run.operands
            group.append(Operand(layer=layer, kind=kind, format=rows.format, **rows.arrays()))


def layers(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """The layers of a plan; empty if it has none."""
    entries = plan.get("layers")
    return [table(layer) for layer in entries] if isinstance(entries, list) else []


class _Rows:
    """The last row of each step for one operand or gradient, in little memory: a long run has
    millions of rows."""

    def __init__(self, figures: tuple[str, ...]) -> None:
        self.figures = figures
        self.rows: dict[int, array[float]] = {}
        self.format = ""

    def add(self, step: int, row: dict[str, Any]) -> None:
        self.rows[step] = array("d", (number(row.get(key)) for key in self.figures))
        self.format = str(row.get("format", ""))

    def forget_from(self, step: int) -> None:
        self.rows = {
            sampled_step: values
            for sampled_step, values in self.rows.items()
            if sampled_step < step
        }

    def arrays(self) -> dict[str, Any]:
        steps = sorted(self.rows)
        values = np.array([self.rows[step] for step in steps], dtype=np.float64)
        figures = {key: values[:, column] for column, key in enumerate(self.figures)}
        return {"steps": np.array(steps, dtype=np.int64), "figures": figures}


# Grids [series, samples], where series are operands, layers or modules


def kinds_of(operands: Sequence[Operand]) -> list[str]:
    """The operand kinds that occur, those in `KINDS` first."""
    present = {operand.kind: None for operand in operands}
    return [kind for kind in KINDS if kind in present] + [k for k in present if k not in KINDS]


def grid(series: Sequence[Series], figure: str) -> tuple[NDArray[np.int64], Figures]:
    """The steps [samples] and `figure` [series, samples], NaN where it is missing."""
    steps = np.unique(np.concatenate([line.steps for line in series]))
    values = np.full((len(series), len(steps)), np.nan)
    for row, line in zip(values, series, strict=True):
        row[np.searchsorted(steps, line.steps)] = line.figures[figure]
    return steps, values


def of_linears(operands: Sequence[Operand]) -> list[Operand]:
    """The operands of linear layers; all operands if there are none. Telemetry of attention's
    operands has no figure but the amax and the scale."""
    linears = [operand for operand in operands if operand.kind.partition(".")[0] in KINDS]
    return linears or list(operands)


def layers_by_steps(
    operands: Sequence[Operand], kind: str, figure: str
) -> tuple[list[str], NDArray[np.int64], Figures]:
    """The layers, the steps [samples] and `figure` [layers, samples] of one operand kind."""
    steps, all_values = grid(operands, figure)
    values = {operand.layer: np.full(len(steps), np.nan) for operand in operands}
    for operand, row in zip(operands, all_values, strict=True):
        if operand.kind == kind:
            values[operand.layer] = row
    return list(values), steps, np.stack(list(values.values()))


def joined(
    steps: NDArray[np.int64], values: Figures, worst_is_high: bool, most: int
) -> tuple[NDArray[np.int64], Figures]:
    """Merge neighbouring samples into at most `most`, keeping the worst figures."""
    if len(steps) <= most:
        return steps, values
    worst = np.fmax.reduce if worst_is_high else np.fmin.reduce
    stretches = np.array_split(np.arange(len(steps)), most)
    columns = [worst(values[:, stretch], axis=1) for stretch in stretches]
    return steps[[stretch[0] for stretch in stretches]], np.stack(columns, axis=1)
