"""Grouped linears that Transformer Engine computes. TE itself is called by the backend, in `te`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8stack.layers.grouped import GroupedLinear, GroupedSize
from fp8stack.numerics.groups import sizes_of


class TEGroupedLinear(GroupedLinear):
    """A grouped linear that TE's `GroupedLinear` computes. TE's module has a weight and a bias for
    each group, views of this layer's parameters; the state dict is the same in every backend.

    TE reads the sizes of the groups on the host, which synchronizes with a GPU. Each group is
    padded with rows of zeros to a multiple that TE's GEMMs accept.
    """

    in_fp8 = True
    cast_names = ()
    forward: Any = torch.compiler.disable(GroupedLinear.forward)  # type: ignore[no-untyped-call]

    def __init__(self, size: GroupedSize, path: str, backend: Any) -> None:
        super().__init__(size, backend.compute_dtype, backend.delayed)
        self.path = path
        self.backend = backend
        self.core: Any = None  # TE's module, once there is one

    def multiply(self, x: Tensor, offs: Tensor) -> Tensor:
        """See `GroupedLinear.multiply`."""
        multiple = self.backend.group_multiple
        sizes = sizes_of(offs, len(x))
        padded = -(-sizes // multiple) * multiple
        if not padded.any():  # TE 2.20 may hang (TransformerEngine pull request 3019)
            padded[0] = multiple
        rows = None
        if (total := int(padded.sum())) != len(x):
            # The place of each row among padded groups: int64 [rows].
            shifts = np.cumsum(padded - sizes) - (padded - sizes)
            places = np.arange(len(x)) + np.repeat(shifts, sizes)
            rows = torch.from_numpy(places).to(x.device)
            x = _Spread.apply(x, rows, total)  # type: ignore[no-untyped-call]
        y: Tensor = self.backend.run_grouped(self, x, torch.from_numpy(padded))
        return y if rows is None else _SelectRows.apply(y, rows)  # type: ignore[no-untyped-call]

    def parameters_of_groups(self) -> dict[str, Tensor | None]:
        """The weight and bias of each group as TE's module calls them."""
        lent: dict[str, Tensor | None] = {}
        for name in ("weight", "bias"):
            parameter = getattr(self, name)
            for group, tensor in enumerate(() if parameter is None else parameter.unbind()):
                lent[f"{name}{group}"] = tensor.contiguous()  # converted experts may be [in, out]
        return lent


class _Spread(torch.autograd.Function):
    """Rows at their places among rows of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(rows)
        return x.new_zeros(size, x.shape[1]).index_copy_(0, rows, x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy.index_select(0, *ctx.saved_tensors), None, None


class _SelectRows(torch.autograd.Function):
    """The rows at some places; others have a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.size = len(y)
        return y.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        return dy.new_zeros(ctx.size, dy.shape[1]).index_copy_(0, rows, dy), None
