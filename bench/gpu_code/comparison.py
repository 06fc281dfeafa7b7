"""Steps that should be equal: the bytes of quantized operands to the last, float32 sums nearly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu_code.operators import Gemm

TOLERANCE = 2.0**-11
"""The largest difference of other tensors, as a share of their norm: sums in another order, after
which a few elements are rounded to the next bfloat16."""
EXACT = ("amaxes", "scales")


@dataclass(frozen=True, kw_only=True)
class Step:
    """The results of a training step: tensors by name, and the scaled GEMMs."""

    tensors: Mapping[str, Tensor]
    gemms: Sequence[Gemm]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two steps that should be equal.

    Attributes:
        gemms: the number of scaled GEMMs.
        bytes: the bytes that have to be equal.
        wrong_bytes: the bytes among them that differ.
        largest_difference: the largest difference of another tensor, as a share of its norm.
        wrong: a line for each tensor, and each GEMM, that differs by more than it may.
    """

    gemms: int
    bytes: int
    wrong_bytes: int
    largest_difference: float
    wrong: list[str]


def compare(
    step: Step, reference: Step, *, tolerance: float = TOLERANCE, flips: int = 0
) -> Comparison:
    """Compare a step with another one, in which GEMMs may be called in another order. Up to `flips`
    bytes of their operands may differ; for the tolerance see `TOLERANCE`."""
    wrong: list[str] = []
    total = wrong_bytes = 0
    largest = 0.0
    if len(step.gemms) != len(reference.gemms):
        wrong.append(f"{len(step.gemms)} GEMMs, not {len(reference.gemms)}")
    candidates = [*step.gemms]
    of_gemms: list[str] = []
    for number, gemm in enumerate(reference.gemms):
        counts = [(_bytes_of_gemm(candidate, gemm), i) for i, candidate in enumerate(candidates)]
        count, place = min(counts, default=(gemm.nbytes, 0))
        del candidates[place : place + 1]
        total, wrong_bytes = total + gemm.nbytes, wrong_bytes + count
        if count:
            shapes = ", ".join(str(tuple(x.shape)) for x in gemm.operands)
            of_gemms.append(f"{count} bytes of GEMM {number}, {gemm.operator} of {shapes}")
    wrong += of_gemms if wrong_bytes > flips else []
    for name, expected in reference.tensors.items():
        actual = step.tensors[name]
        if name in EXACT or expected.dtype.itemsize == 1 or not expected.is_floating_point():
            count = _bytes(actual, expected)
            total, wrong_bytes = total + expected.nbytes, wrong_bytes + count
            wrong += [f"{count} bytes of {name}"] * (count > 0)
        elif difference := relative_difference(actual, expected):
            largest = max(largest, difference)
            wrong += [f"{name} by {difference:.1e} of its norm"] * (difference > tolerance)
    return Comparison(
        gemms=len(step.gemms),
        bytes=total,
        wrong_bytes=wrong_bytes,
        largest_difference=largest,
        wrong=wrong,
    )


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """The norm of the difference over the norm of the expected tensor; infinite where only one of
    two elements is finite."""
    if actual.shape != expected.shape:
        return float("inf")
    x, y = actual.detach().double(), expected.detach().double()
    same = (x == y) | (x.isnan() & y.isnan())
    difference = torch.where(same, 0.0, x - y).norm()
    if difference == 0:
        return 0.0
    share = difference / torch.where(y.isfinite(), y, 0.0).norm()
    return float(share.nan_to_num(torch.inf, torch.inf))


def _bytes_of_gemm(gemm: Gemm, reference: Gemm) -> int:
    """The number of bytes in which the operands of two GEMMs differ; all where their shapes
    do."""
    if gemm.geometry != reference.geometry:
        return reference.nbytes
    pairs = zip(gemm.operands, reference.operands, strict=True)
    return sum(_bytes(x, y) for x, y in pairs)


def _bytes(x: Tensor, y: Tensor) -> int:
    if x.shape != y.shape:
        return y.nbytes
    first, second = (t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (x, y))
    return int((first != second).sum())
