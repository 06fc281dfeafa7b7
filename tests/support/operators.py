"""The operators that run, and the graphs that are compiled."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Records the names of the operators that run in this mode, such as "aten.mm.default"."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def counting(backend: str) -> Any:
    """A backend of torch.compile that counts the graphs it is given, as `frame_count`."""
    from torch._dynamo.testing import CompileCounterWithBackend  # imports much

    return CompileCounterWithBackend(backend)
