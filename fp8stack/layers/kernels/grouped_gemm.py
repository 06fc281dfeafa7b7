"""GEMMs of groups of rows: y = x w^T of each group by its matrix, and dw = dy^T x for each group.

Operands are as `numerics.groups` has them. Each is one operator, so that the code around it
compiles for groups of any sizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8stack.numerics.fused import needs_operator
from fp8stack.numerics.groups import sizes_of, split_groups
from fp8stack.numerics.operators import operator_on_any_device
from fp8stack.precision.native_gemms import MOST_GROUPS


class Groups(NamedTuple):
    """Rows that belong to groups: [rows, columns], and where each group offs, int32 [groups]."""

    rows: Tensor
    offs: Tensor

    def sum(self, dim: int, dtype: torch.dtype) -> Tensor:
        """The sums over the rows of each group, [groups, columns]; `dim` is 0."""
        return sum_groups(self.rows, self.offs, dtype)


def matrices_of_groups(
    a: Tensor, b: Tensor, offs: Tensor, multiple: int, out: Tensor
) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
    """The matrices of each group in two operands and their product: `a` [rows, K] by the matrices
    in `b` of all groups give [rows, N], `a` [rows, M] by `b` [rows, N] give [groups, M, N]. Groups
    of `a`, and of such `b`, start at multiples of `multiple`, and are padded to it."""
    sizes = sizes_of(offs, len(a) - len(offs) * (multiple - 1))
    padded = (-(-sizes // multiple) * multiple).tolist()
    padded.append(len(a) - sum(padded))  # rows of no group, which `zip` leaves out
    rows = a.split_with_sizes(padded)
    if b.ndim == 3:
        return zip(rows, b.unbind(), out.split_with_sizes(padded), strict=False)
    return zip(rows, b.split_with_sizes(padded), out.unbind(), strict=False)


def aligned(x: Tensor) -> Tensor:
    """`x` as memory of its own would have it: MKL's sums depend on the address modulo 64."""
    return x.clone() if x.is_cpu and x.data_ptr() % 64 else x


def output_shape(a: Tensor, b: Tensor, offs: Tensor | None, transposed: str) -> tuple[int, ...]:
    """The shape of the product; see `grouped_gemm`. Without `offs`, of two matrices."""
    if offs is None:
        return a.shape[transposed == "a"], b.shape[transposed != "b"]
    if transposed == "a":
        return len(offs), a.shape[1], b.shape[1]
    return len(a), b.shape[1 if transposed == "b" else 2]


def grouped_gemm(
    a: Tensor, b: Tensor, offs: Tensor, transposed: str, bias: Tensor | None = None
) -> Tensor:
    """The products of groups in the dtype that they have.

    Args:
        a: [rows, K]; with `transposed` "a", [rows, M].
        b: [groups, N, K] with `transposed` "b", [groups, K, N] with "neither", [rows, N] with "a".
        offs: int32 [groups].
        transposed: the operand that is transposed.
        bias: [groups, N].

    Returns:
        [rows, N], or [groups, M, N] with `transposed` "a".
    """
    run = _operator if needs_operator(a) else _grouped_gemm
    y: Tensor = run(a, b, offs, transposed, bias)
    return y


def _grouped_gemm(
    a: Tensor, b: Tensor, offs: Tensor, transposed: str, bias: Tensor | None
) -> Tensor:
    if bias is None and takes_grouped_mm(a, b, offs):
        return by_grouped_mm(a, b, offs, transposed)

    y = a.new_empty(output_shape(a, b, offs, transposed))
    matrices = matrices_of_groups(a, b, offs, 1, y)
    for group, (matrix, other_matrix, target) in enumerate(matrices):
        first, second = aligned(matrix), aligned(other_matrix)
        first, second = (
            first.t() if transposed == "a" else first,
            second.t() if transposed == "b" else second,
        )
        # Write to the output directly if it is aligned like newly allocated memory.
        out = target if target.is_cpu and not target.data_ptr() % 64 else None
        if bias is None:
            product = torch.mm(first, second, out=out)
        else:
            product = torch.addmm(bias[group], first, second, out=out)
        if product is not target:
            target.copy_(product)
    return y


def _fake_grouped_gemm(
    a: Tensor, b: Tensor, offs: Tensor, transposed: str, bias: Tensor | None
) -> Tensor:
    return a.new_empty(output_shape(a, b, offs, transposed))


_operator = operator_on_any_device("grouped_gemm", _fake_grouped_gemm)(_grouped_gemm)


def takes_grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> bool:
    """Whether `F.grouped_mm` multiplies these in one kernel, as torch 2.13 does for bfloat16 on
    compute capability 9.0 and 10.0 of NVIDIA, with rows of a multiple of 16 bytes and at most
    `MOST_GROUPS` groups; it adds no bias and gives bfloat16."""
    if len(offs) > MOST_GROUPS:
        return False
    nvidia = a.is_cuda and torch.version.hip is None
    if not nvidia or {a.dtype, b.dtype} != {torch.bfloat16} or not a.numel():
        return False
    wide = a.shape[-1] % 8 == 0 and b.shape[-1] % 8 == 0
    return wide and torch.cuda.get_device_capability(a.device)[0] in (9, 10)


def by_grouped_mm(a: Tensor, b: Tensor, offs: Tensor, transposed: str) -> Tensor:
    """`grouped_gemm` without a bias by torch's own kernel, which does not wait for `offs`."""
    first = a.t() if transposed == "a" else a
    second = b.transpose(-2, -1) if transposed == "b" else b
    y = F.grouped_mm(first, second, offs=offs)
    if transposed != "a":
        return y
    # On 10.0, groups without rows got other values than 0 (pytorch issue 172439, open in 2026).
    sizes = offs.diff(prepend=torch.zeros_like(offs[:1]))
    return y.masked_fill_((sizes == 0)[:, None, None], 0)


def sum_groups(x: Tensor, offs: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums over the rows of each group: [groups, columns] in `dtype`."""
    run = _sum_operator if needs_operator(x) else _sum_groups
    sums: Tensor = run(x, offs, dtype)
    return sums


def _sum_groups(x: Tensor, offs: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.stack([rows.sum(0, dtype=dtype) for rows in split_groups(x, offs)])


def _fake_sum_groups(x: Tensor, offs: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty((len(offs), x.shape[1]), dtype=dtype)


_sum_operator = operator_on_any_device("sum_groups", _fake_sum_groups)(_sum_groups)
