"""A linear for each group of rows, such as the experts of a mixture.

A `GroupedLinear` equals, to the bit, a loop of linears over the groups, each with its own
quantizers. In FP8, it runs the code of a `QuantizedLinear`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8stack.common.errors import UserError
from fp8stack.layers.delayed import DelayedScaling
from fp8stack.layers.kernels.grouped_gemm import grouped_gemm, sum_groups
from fp8stack.layers.linear import (
    NO_FX,
    LowPrecisionLayer,
    QuantizedLayer,
    dtype_of_linear,
    no_autocast,
    require_supported_input,
)


class GroupedSize(NamedTuple):
    """The arguments of a `GroupedLinear`."""

    groups: int
    in_features: int
    out_features: int
    bias: bool


def sort_by_group(groups: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The order of rows by their group, and the ends of the groups.

    Args:
        groups: the group of each row, int64, of any shape.
        count: the number of groups. Rows of a higher number come last and belong to no group.

    Returns:
        The indices of `groups.flatten()` by group, rising within a group: int64 [rows]; and the
        ends, int32 [count].
    """
    sorted_groups, order = groups.reshape(-1).sort(stable=True)
    numbers = torch.arange(count, device=groups.device, dtype=groups.dtype)
    return order, torch.searchsorted(sorted_groups, numbers, right=True, out_int32=True)


class _Gather(torch.autograd.Function):
    """See `gather`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, copies: Tensor) -> Tensor:
        ctx.save_for_backward(copies)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (copies,) = ctx.saved_tensors
        rows = dy.index_select(0, copies.flatten()).view(*copies.shape, dy.shape[-1])
        dtype = torch.promote_types(dy.dtype, torch.float32)
        return rows.sum(1, dtype=dtype).to(dy.dtype), None, None


def gather(x: Tensor, places: Tensor, copies: Tensor) -> Tensor:
    """Copy rows. The gradient of a row is the sum over its copies in float32, in a fixed order, so
    that a GPU repeats it to the bit.

    Args:
        x: [rows, columns].
        places: the row that each copy is of, int64 [copies].
        copies: the places of each row's copies in the output, int64 [rows, copies of a row].

    Returns:
        `x[places]`, [copies, columns].
    """
    y: Tensor = _Gather.apply(x, places, copies)  # type: ignore[no-untyped-call]
    return y


class GroupedLinear(LowPrecisionLayer):
    """One linear for each group of rows; by itself in the compute dtype.

    Parameters are `weight` [groups, out, in] and, if the size says so, `bias` [groups, out], each
    matrix initialized as `nn.Linear` does.
    """

    in_fp8 = False
    cast_names: tuple[str, ...] = ("weight", "bias")

    def __init__(
        self,
        size: GroupedSize,
        compute_dtype: torch.dtype,
        delayed: DelayedScaling | None = None,
    ) -> None:
        super().__init__()
        groups, self.in_features, self.out_features, has_bias = size
        self.groups = groups
        self.compute_dtype = compute_dtype
        self.delayed = delayed
        self.weight = nn.Parameter(torch.empty(groups, self.out_features, self.in_features))
        self.bias = nn.Parameter(torch.empty(groups, self.out_features)) if has_bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize each group's parameters as `nn.Linear` does."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def extra_repr(self) -> str:
        """The size, as `nn.Linear` shows it."""
        return (
            f"groups={self.groups}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.bias is not None}"
        )

    def forward(self, input: Tensor, offsets: Tensor) -> Tensor:
        """Multiply each group of rows by its weight.

        Args:
            input: [rows, in] in any floating dtype, the rows of the first group first.
            offsets: int32 [groups], where each group ends, as `F.grouped_mm` takes it.

        Returns:
            [rows, out], see `keeps_dtype`.

        Raises:
            UserError: arguments of other shapes or dtypes; in FP8, see `require_supported_input`.
        """
        if isinstance(input, torch.fx.Proxy):
            raise UserError(NO_FX)
        self._require_groups(input, offsets)
        if not torch.compiler.is_compiling() and not self.was_called:
            self.was_called = True
            if self.reminder is not None:
                self.reminder.remind()
        if self.in_fp8:
            require_supported_input(input, self.stored_weight)
        dtype = dtype_of_linear(input) if self.keeps_dtype else self.compute_dtype
        with no_autocast(input.device.type):
            rows = input.to(self.compute_dtype)
            multiply = self.multiply if self.in_fp8 else self.multiply_plain
            return multiply(rows, offsets).to(dtype)

    def _require_groups(self, x: Tensor, offs: Tensor) -> None:
        if not x.is_floating_point() or x.ndim != 2 or x.shape[1] != self.in_features:
            raise UserError(
                f"A grouped linear takes [rows, {self.in_features}] of floating point, not "
                f"{_shown(x)}."
            )
        if offs.dtype != torch.int32 or offs.shape != (self.groups,):
            raise UserError(
                f"A grouped linear takes offsets int32 [{self.groups}], the ends of the groups, "
                f"not {_shown(offs)}."
            )

    def multiply(self, x: Tensor, offs: Tensor) -> Tensor:
        """[rows, in] in the compute dtype -> [rows, out] in the compute dtype."""
        return self.multiply_plain(x, offs)

    def multiply_plain(self, x: Tensor, offs: Tensor) -> Tensor:
        """`multiply` without FP8."""
        bias = None if self.bias is None else self.in_compute_dtype("bias")
        weight = self.in_compute_dtype("weight")
        y: Tensor = _MultiplyPlain.apply(x, weight, bias, offs)  # type: ignore[no-untyped-call]
        return y


def _shown(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


class _MultiplyPlain(torch.autograd.Function):
    """y = x w^T + b of each group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offs)
        ctx.has_bias = bias is not None
        return grouped_gemm(x, weight, offs, "b", bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, offs = ctx.saved_tensors
        with no_autocast(dy.device.type):
            dx = grouped_gemm(dy, weight, offs, "neither") if ctx.needs_input_grad[0] else None
            dw = grouped_gemm(dy, x, offs, "a") if ctx.needs_input_grad[1] else None
            db = sum_groups(dy, offs, dy.dtype) if ctx.has_bias else None
        return dx, dw, db, None


class QuantizedGroupedLinear(QuantizedLayer, GroupedLinear):
    """A grouped linear on quantized operands.

    Scales of one per tensor are one for each group. A group without rows gives zero gradients of
    its weight and bias. In delayed scaling it follows Transformer Engine's `GroupedLinear`, which
    has a quantizer for each split and casts every weight: the amaxes of its input and its gradient
    are 0, so that they keep their scales until another amax comes, and the amax of its weight is
    recorded as if it had rows.

    Stochastic rounding draws for row i of group g the bits of a linear at `<path>.<g>`, in its row
    rank x rows + i, where `rows` counts the rows of all groups on this rank. So no two ranks with
    equally many rows draw the same bits, but two ranks do not draw what one with all rows would:
    the place of a row in its group depends on the rows of other ranks, and so do the blocks over
    rows and the amaxes of a group.
    """
