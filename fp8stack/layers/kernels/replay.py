"""CUDA graphs of functions that launch many small kernels on tensors at fixed addresses."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch

EAGER = 2  # warm-up calls, which allocate tensors, before the call that is recorded


def records(device: torch.device) -> bool:
    """Whether functions on `device` are recorded: on a GPU of NVIDIA."""
    return device.type == "cuda" and torch.version.hip is None


class Replayed:
    """Calls `function`; on an NVIDIA GPU, records its kernels once as a CUDA graph and replays it.

    A replay runs no Python code of `function`, which must not synchronize. It takes no arguments:
    it reads and writes tensors in fixed memory. The next call overwrites the tensors it returns.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._forget(None)
        self._refused = False

    def _forget(self, key: Hashable) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: Any = None
        self._key, self._calls = key, 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_graph": None, "_result": None, "_calls": 0}

    def __call__(self, device: torch.device, key: Hashable = None) -> Any:
        """Call `function`, whose tensors are on `device`, or replay it. Another `key` than before
        discards the recorded graph."""
        if not records(device) or self._refused or torch.compiler.is_compiling():
            return self._function()
        if torch.cuda.is_current_stream_capturing():  # part of a larger graph
            return self._function()
        if key != self._key:
            self._forget(key)
        if self._graph is None:
            self._calls += 1
            if self._calls <= EAGER or not self._record():
                return self._function()
        assert self._graph is not None
        self._graph.replay()
        return self._result

    def _record(self) -> bool:
        try:
            graph = torch.cuda.CUDAGraph()
            # Other threads read data and pin memory meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                result = self._function()
        except RuntimeError as error:
            warnings.warn(
                f"A CUDA graph could not be made, and its work goes on without: {error}",
                stacklevel=2,
            )
            self._refused = True
            return False
        self._graph, self._result = graph, result
        return True
