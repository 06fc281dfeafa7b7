"""GEMMs of groups of rows: y = x w^T of each group by its matrix, and dw = dy^T x for each group.

Operands are as `numerics.groups` has them. Each is one operator, so that the code around it
compiles for groups of any sizes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8stack.numerics.fused import needs_operator
from fp8stack.numerics.groups import spans, split_groups, split_rows
from fp8stack.numerics.operators import operator_on_any_device
from fp8stack.precision.native_gemms import MOST_GROUPS

Gemm = Callable[[int, Tensor, Tensor, slice, Tensor | None], Tensor]
"""Multiplies a group: its number, both its matrices, and the rows of the first. The product may be
written to the last argument, if there is one."""


def each_group(
    a: Tensor, b: Tensor, ends: Tensor, multiple: int, multiply: Gemm, out: Tensor
) -> Tensor:
    """The products of groups in `out`: `a` [rows, K] by the matrices in `b` of all groups give
    [rows, N], `a` [rows, M] by `b` [rows, N] give [groups, M, N]. Groups of `a`, and of such `b`,
    start at multiples of `multiple`, and are padded to it."""
    rows = len(a) - len(ends) * (multiple - 1)
    sizes = [-(-(stop - start) // multiple) * multiple for start, stop in spans(ends, rows)]
    by_matrix = b.ndim == 3
    matrices = b.unbind() if by_matrix else split_rows(b, sizes)
    targets = split_rows(out, sizes) if by_matrix else out.unbind()
    groups = zip(split_rows(a, sizes), matrices, targets, strict=True)
    start = 0
    for group, (matrix, other_matrix, target) in enumerate(groups):
        # Write to the output directly if it is aligned like newly allocated memory.
        direct = target.is_cpu and not target.data_ptr() % 64
        operands = aligned(matrix), aligned(other_matrix)
        place = slice(start, start + sizes[group])
        product = multiply(group, *operands, place, target if direct else None)
        if product is not target:
            target.copy_(product)
        start = place.stop
    return out


def aligned(x: Tensor) -> Tensor:
    """`x` as memory of its own would have it: MKL's sums depend on the address modulo 64."""
    return x.clone() if x.is_cpu and x.data_ptr() % 64 else x


def output_shape(a: Tensor, b: Tensor, ends: Tensor, turn: str) -> tuple[int, ...]:
    """The shape of the product; see `grouped_gemm`."""
    if turn == "a":
        return len(ends), a.shape[1], b.shape[1]
    return len(a), b.shape[1 if turn == "b" else 2]


def grouped_gemm(
    a: Tensor, b: Tensor, ends: Tensor, turn: str, bias: Tensor | None = None
) -> Tensor:
    """The products of groups in the dtype that they have.

    Args:
        a: [rows, K]; with `turn` "a", [rows, M].
        b: [groups, N, K] with `turn` "b", [groups, K, N] with "neither", [rows, N] with "a".
        ends: int32 [groups].
        turn: the operand that is transposed.
        bias: [groups, N].

    Returns:
        [rows, N], or [groups, M, N] with `turn` "a".
    """
    run = _operator if needs_operator(a) else _grouped_gemm
    y: Tensor = run(a, b, ends, turn, bias)
    return y


def _grouped_gemm(a: Tensor, b: Tensor, ends: Tensor, turn: str, bias: Tensor | None) -> Tensor:
    if bias is None and takes_grouped_mm(a, b, ends):
        return by_grouped_mm(a, b, ends, turn)

    def multiply(group: int, a: Tensor, b: Tensor, place: slice, out: Tensor | None) -> Tensor:
        a, b = a.t() if turn == "a" else a, b.t() if turn == "b" else b
        if bias is None:
            return torch.mm(a, b, out=out)
        return torch.addmm(bias[group], a, b, out=out)

    return each_group(a, b, ends, 1, multiply, a.new_empty(output_shape(a, b, ends, turn)))


def _fake_grouped_gemm(
    a: Tensor, b: Tensor, ends: Tensor, turn: str, bias: Tensor | None
) -> Tensor:
    return a.new_empty(output_shape(a, b, ends, turn))


_operator = operator_on_any_device("grouped_gemm", _fake_grouped_gemm)(_grouped_gemm)


def takes_grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> bool:
    """Whether `F.grouped_mm` multiplies these in one kernel, as torch 2.13 does for bfloat16 on
    compute capability 9.0 and 10.0 of NVIDIA, with rows of a multiple of 16 bytes and at most
    `MOST_GROUPS` groups; it adds no bias and gives bfloat16."""
    if len(ends) > MOST_GROUPS:
        return False
    nvidia = a.is_cuda and torch.version.hip is None
    if not nvidia or {a.dtype, b.dtype} != {torch.bfloat16} or not a.numel():
        return False
    wide = a.shape[-1] % 8 == 0 and b.shape[-1] % 8 == 0
    return wide and torch.cuda.get_device_capability(a.device)[0] in (9, 10)


def by_grouped_mm(a: Tensor, b: Tensor, ends: Tensor, turn: str) -> Tensor:
    """`grouped_gemm` without a bias by torch's own kernel, which does not wait for `ends`."""
    first = a.t() if turn == "a" else a
    second = b.transpose(-2, -1) if turn == "b" else b
    y = F.grouped_mm(first, second, offs=ends)
    if turn != "a":
        return y
    # On 10.0, groups without rows got other values than 0 (pytorch issue 172439, open in 2026).
    sizes = ends.diff(prepend=torch.zeros_like(ends[:1]))
    return y.masked_fill_((sizes == 0)[:, None, None], 0)


def sum_groups(x: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums over the rows of each group: [groups, columns] in `dtype`."""
    run = _sum_operator if needs_operator(x) else _sum_groups
    sums: Tensor = run(x, ends, dtype)
    return sums


def _sum_groups(x: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.stack([rows.sum(0, dtype=dtype) for rows in split_groups(x, ends)])


def _fake_sum_groups(x: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty((len(ends), x.shape[1]), dtype=dtype)


_sum_operator = operator_on_any_device("sum_groups", _fake_sum_groups)(_sum_groups)
