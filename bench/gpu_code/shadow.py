"""Fake tensors with values: what is computed on a GPU that is not there, computed on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from bench.gpu_code.operators import CPU, CpuOperators


class Shadow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs each operator on fake tensors, and on tensors of the CPU that have the same shapes,
    strides and aliases. Enter it within a `FakeTensorMode`.

    Args:
        operators: the mode that the operators on the CPU run in.
    """

    def __init__(self, operators: CpuOperators) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operators = operators
        self._memory: dict[int, tuple[Any, Any]] = {}  # fake and real storages, by the fake one's

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether compiled code stays compiled in this mode."""
        return True

    def real(self, tensor: Tensor) -> Tensor:
        """The values of a tensor, in memory that in-place operators on it change."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        with _disable_current_modes():
            _, memory = self._memory[tensor.untyped_storage()._cdata]
            view = torch.empty(0, dtype=tensor.dtype, device=CPU)
            place = tensor.storage_offset(), tensor.shape, tensor.stride()
            return view.set_(memory, *place)

    def give(self, tensor: Tensor, values: Tensor) -> None:
        """Give a fake tensor these values, and memory that is its own if it has none yet."""
        storage = tensor.untyped_storage()
        with _disable_current_modes():
            if storage._cdata not in self._memory:
                empty = torch.full((storage.nbytes(),), 0xAB, dtype=torch.uint8, device=CPU)
                self._memory[storage._cdata] = storage, empty.untyped_storage()
            self.real(tensor).copy_(values)

    @contextmanager
    def outside(self) -> Iterator[CpuOperators]:
        """A context for computing with values."""
        with _disable_current_modes(), CPU, self._operators:
            yield self._operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        inputs = tree_map_only(Tensor, self.real, (args, kwargs))
        if func is torch.ops.aten._local_scalar_dense.default:
            return inputs[0][0].item()
        gave = func(*args, **kwargs)
        tensors = [x for x in tree_leaves(gave) if isinstance(x, Tensor)]
        aliases = [x.untyped_storage()._cdata in self._memory for x in tensors]
        is_view = func.is_view or func.overloadpacket is torch.ops.aten.set_
        if is_view and all(aliases):
            return gave
        with torch.no_grad(), self.outside():
            values = func(*inputs[0], **inputs[1])
        reals = [x for x in tree_leaves(values) if isinstance(x, Tensor)]
        for x, real, alias in zip(tensors, reals, aliases, strict=True):
            if not alias and isinstance(x, FakeTensor):
                self.give(x, real)
        return gave
