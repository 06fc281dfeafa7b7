"""Small work on tensors that stay where they are, which a GPU does as one launch: a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch

EAGER = 2  # calls before the recorded one, which create tensors that are created once


def records(device: torch.device) -> bool:
    """Whether work on `device` is recorded."""
    return device.type == "cuda"


class Replayed:
    """Calls `function`, which launches many small kernels and waits for nothing; on a GPU it is
    recorded once, and what Python does in it does not happen again.

    It takes no arguments: it reads and writes tensors that are there before and after. What it
    returns, the next call overwrites.
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
