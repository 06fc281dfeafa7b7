"""A stand-in for CUDA graphs: it records operators and runs them again on the same tensors, without
Python code in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST_READS = {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero"}


def tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class Graph(TorchDispatchMode):
    """The operators of a recording. Tensors that they wrote to are restored: it has no effect. Like
    a GPU, it refuses operators that the host would wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in HOST_READS:
            raise RuntimeError(f"{func} is not permitted when stream is capturing")
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[number] if number < len(args) else kwargs.get(argument.name)
                for tensor in tensors(written):
                    self.before.setdefault(id(tensor), (tensor, tensor.detach().clone()))
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    def put_back(self) -> None:
        """Undo the recording's writes, the last one first: tensors may share memory."""
        with torch.no_grad():
            for tensor, content_before in reversed(self.before.values()):
                tensor.copy_(content_before)

    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.calls:
            storages = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs))}
            with torch.no_grad():
                again = func(*args, **kwargs)
                for output, new_output in zip(tensors(out), tensors(again), strict=True):
                    if output.untyped_storage().data_ptr() not in storages:  # else it is up to date
                        output.copy_(new_output)

    @property
    def operators(self) -> list[str]:
        """The names of the operators, in order."""
        return [str(call[0]) for call in self.calls]


class Recorder:
    """In place of `graphs.CudaRecorder`.

    Attributes:
        graphs: the graphs that all recorders recorded.
    """

    graphs: ClassVar[list[Graph]] = []

    def __init__(self, device: torch.device) -> None:
        pass

    def warm_up(self, function: Callable[[], Tensor]) -> Tensor:
        return function()

    def record(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        graph = Graph()
        try:
            with graph:
                result = function()
        finally:
            graph.put_back()
        self.graphs.append(graph)
        return graph.replay, result
