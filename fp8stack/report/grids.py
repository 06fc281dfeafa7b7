"""Telemetry as grids: operands, layers or parts of the model by samples."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fp8stack.report.read import KINDS, Figures, Operand, Run, Series


def kinds_of(operands: Sequence[Operand]) -> list[str]:
    """The operand kinds that occur, the known ones first."""
    found = {operand.kind: None for operand in operands}
    return [kind for kind in KINDS if kind in found] + [k for k in found if k not in KINDS]


def grid(series: Sequence[Series], figure: str) -> tuple[NDArray[np.int64], Figures]:
    """The steps [samples] and `figure` as [series, samples], NaN where there is none."""
    steps = np.unique(np.concatenate([one.steps for one in series]))
    values = np.full((len(series), len(steps)), np.nan)
    for row, one in zip(values, series, strict=True):
        row[np.searchsorted(steps, one.steps)] = one.figures[figure]
    return steps, values


def layers_by_steps(
    run: Run, kind: str, figure: str
) -> tuple[list[str], NDArray[np.int64], Figures]:
    """The layers, the steps [samples] and `figure` as [layers, samples] of one operand kind."""
    names = list(dict.fromkeys(operand.layer for operand in run.operands))
    operands = [operand for operand in run.operands if operand.kind == kind]
    steps = np.unique(np.concatenate([operand.steps for operand in run.operands]))
    values = np.full((len(names), len(steps)), np.nan)
    own_steps, own = grid(operands, figure)
    rows = [names.index(operand.layer) for operand in operands]
    values[np.array(rows)[:, None], np.searchsorted(steps, own_steps)] = own
    return names, steps, values


def joined(
    steps: NDArray[np.int64], values: Figures, worst_is_high: bool, most: int
) -> tuple[NDArray[np.int64], Figures]:
    """At most `most` samples: neighbours become one with the worst of their figures."""
    if len(steps) <= most:
        return steps, values
    worst = np.fmax.reduce if worst_is_high else np.fmin.reduce
    parts = np.array_split(np.arange(len(steps)), most)
    columns = [worst(values[:, part], axis=1) for part in parts]
    return steps[[part[0] for part in parts]], np.stack(columns, axis=1)
