"""Run single layers of a model as another model has them, to see what they change."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fp8stack.layers.kernels.matmul_precision import matmul_precision


@contextmanager
def swapped(model: nn.Module, donor: nn.Module, paths: Collection[str]) -> Iterator[None]:
    """Replace the linears of `model` at the module paths `paths` by those linears of `donor`, with
    the weights, the quantizers and the backend that they have there, until the context ends.
    Outputs are in the dtype of the replaced linears. Backends do not fuse a swapped linear with its
    neighbors.

    Args:
        model, donor: models of the same shape on the same device, built from a backend's layers.
            `donor` has run a forward pass with its weights of now.
        paths: module paths of linears or grouped linears.
    """
    replaced = {path: model.get_submodule(path) for path in paths}
    try:
        for path in paths:
            _replace(model, path, _Swapped(replaced[path], donor.get_submodule(path), donor))
        yield
    finally:
        for path, layer in replaced.items():
            _replace(model, path, layer)


def _replace(model: nn.Module, path: str, layer: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, layer)


class _Swapped(nn.Module):
    """A linear of another model. As its class is no backend's, backends call it by itself."""

    def __init__(self, replaced: nn.Module, layer: nn.Module, donor: Any) -> None:
        super().__init__()
        self.layer = layer
        self.compute_dtype = _dtype_of(layer)
        self.out_dtype = _dtype_of(replaced)
        self.matmul_precision = donor.backend.matmul_precision

    def forward(self, x: Tensor, *offsets: Tensor) -> Tensor:
        with matmul_precision(self.matmul_precision):
            y: Tensor = self.layer(x, *offsets)
        return y.to(self.out_dtype)


def _dtype_of(layer: nn.Module) -> torch.dtype:
    """The dtype in which a linear computes."""
    dtype: torch.dtype = getattr(layer, "compute_dtype", torch.float32)
    return dtype
