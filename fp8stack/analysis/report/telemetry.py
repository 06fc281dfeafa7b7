"""The telemetry of a run as series over its samples, and grids of several series."""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8stack.common.io import json_lines
from fp8stack.training.metrics.read import number, step_of

KINDS = ("input", "weight", "grad_output")  # the operands of a linear's three GEMMs
FIGURES = ("amax", "scale", "headroom_bits", "saturated", "underflow", "nonfinite", "sqnr_db")
"""The figures of an operand."""
GRADIENT_FIGURES = ("norm", "ratio", "zeros")  # the figures of a gradient

Figures = NDArray[np.float64]


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


@dataclass(kw_only=True)
class TelemetrySamples:
    """The contents of `telemetry.jsonl`."""

    plan: dict[str, Any] = field(default_factory=dict)
    operands: list[Operand] = field(default_factory=list)  # of the run's recipe
    what_if: dict[str, list[Operand]] = field(default_factory=dict)  # of --what-if recipes, by name
    gradients: list[Gradient] = field(default_factory=list)  # in the model's order
    # The last sample's step and tokens of each expert as shares of the layer's, by mixture.
    expert_shares: dict[str, tuple[int, list[float]]] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)  # the last sample of the whole model

    def expert_loads(self) -> tuple[list[str], Figures]:
        """The layers with experts, and the tokens of each expert over the mean of its layer,
        [layers, experts], NaN where a layer has fewer experts."""
        most = max((len(shares) for _, shares in self.expert_shares.values()), default=0)
        loads = np.full((len(self.expert_shares), most), np.nan)
        for row, (_, shares) in zip(loads, self.expert_shares.values(), strict=True):
            row[: len(shares)] = np.array(shares) * len(shares)
        return list(self.expert_shares), loads


def read_telemetry(path: Path, notes: list[str]) -> TelemetrySamples:
    """Read a telemetry file, which may be missing. For `notes` and errors see `json_lines`."""
    result = TelemetrySamples()
    series: dict[tuple[str, str, str], _Samples] = {}
    by_module: dict[str, _Samples] = {}
    for row in json_lines(path, notes):
        if not result.plan:
            result.plan = table(row.get("plan"))
        step = step_of(row)
        if step is None:
            continue
        if "gradient" in row:
            by_module.setdefault(str(row["gradient"]), _Samples(GRADIENT_FIGURES)).add(step, row)
        elif "experts" in row:
            shares = row.get("shares")
            if isinstance(shares, list) and shares:
                result.expert_shares[str(row["experts"])] = step, [number(x) for x in shares]
        elif "operand" in row:
            recipe = str(row.get("recipe")) if row.get("what_if") is True else ""
            key = (recipe, str(row.get("layer")), str(row["operand"]))
            series.setdefault(key, _Samples(FIGURES)).add(step, row)
        else:
            result.model = row
    result.gradients = [
        Gradient(module=name, **sampled.arrays()) for name, sampled in by_module.items()
    ]
    for (recipe, layer, kind), sampled in series.items():
        operands = result.what_if.setdefault(recipe, []) if recipe else result.operands
        operands.append(Operand(layer=layer, kind=kind, format=sampled.format, **sampled.arrays()))
    return result


def table(value: Any) -> dict[str, Any]:
    """A JSON value as a dict; empty if it is no object."""
    return value if isinstance(value, dict) else {}


class _Samples:
    """The samples of one operand or gradient, in little memory: a long run has millions. A sample
    of an earlier step than the last one means that the run went back there."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names, self.format = names, ""
        self.steps, self.values = array("q"), array("d")

    def add(self, step: int, row: dict[str, Any]) -> None:
        count = bisect_left(self.steps, step)
        del self.steps[count:]
        del self.values[count * len(self.names) :]
        self.steps.append(step)
        self.values.extend(number(row.get(name)) for name in self.names)
        self.format = str(row.get("format", ""))

    def arrays(self) -> dict[str, Any]:
        values = np.array(self.values).reshape(-1, len(self.names))
        figures = {name: values[:, column] for column, name in enumerate(self.names)}
        return {"steps": np.array(self.steps, dtype=np.int64), "figures": figures}


# Grids [series, samples], where series are operands, layers or modules


def kinds_of(operands: Sequence[Operand]) -> list[str]:
    """The operand kinds that occur, those in `KINDS` first."""
    present = {operand.kind: None for operand in operands}
    return [kind for kind in KINDS if kind in present] + [k for k in present if k not in KINDS]


def of_linears(operands: Sequence[Operand]) -> list[Operand]:
    """The operands of linear layers; all operands if there are none. Telemetry of attention's
    operands has no figure but the amax and the scale."""
    linears = [operand for operand in operands if operand.kind.partition(".")[0] in KINDS]
    return linears or list(operands)


def grid(series: Sequence[Series], figure: str) -> tuple[NDArray[np.int64], Figures]:
    """The steps [samples] and `figure` [series, samples], NaN where it is missing."""
    steps = np.unique(np.concatenate([line.steps for line in series]))
    values = np.full((len(series), len(steps)), np.nan)
    for row, line in zip(values, series, strict=True):
        row[np.searchsorted(steps, line.steps)] = line.figures[figure]
    return steps, values


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
