"""Watches for code that makes the host wait for a device, with the meta device in its place.

Tensors on the meta device have no values, so `float(t)`, `bool(t)` and `t.item()` raise there, and
the code takes the paths of a GPU. Copies from the host are recorded: on a GPU, each waits until the
device has done all that was launched before. An operator on tensors of both devices raises, as on a
GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor


def watch_copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that gets the name of each call from now on, in backward passes too, that puts numbers
    of the host into a tensor of the meta device, or indexes such a tensor with them."""
    calls: list[str] = []

    def watch(owner: Any, name: str, from_host: bool) -> None:
        real = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            devices = [argument.device.type for argument in args if isinstance(argument, Tensor)]
            copied = "cpu" in devices or (from_host and not devices[1:])
            if result.device.type == "meta" and copied:
                calls.append(name)
            return result

        monkeypatch.setattr(owner, name, watched)

    watch(Tensor, "new_tensor", True)
    watch(torch, "tensor", True)
    for name in ("to", "cuda", "copy_"):
        watch(Tensor, name, False)
    real = torch.as_tensor

    def as_tensor(data: Any, **kwargs: Any) -> Tensor:
        result = real(data, **kwargs)
        if result.device.type == "meta" and getattr(data, "device", None) != result.device:
            calls.append("as_tensor")
        return result

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    for name in ("__getitem__", "__setitem__"):
        monkeypatch.setattr(Tensor, name, _watched_index(name, calls))
    return calls


def _watched_index(name: str, calls: list[str]) -> Any:
    real = getattr(Tensor, name)

    def watched(self: Tensor, index: Any, *value: Any) -> Any:
        for place in index if isinstance(index, tuple) else (index,):
            on_host = isinstance(place, Tensor) and place.device.type == "cpu"
            if self.device.type == "meta" and (on_host or isinstance(place, list)):
                calls.append(name)
        return real(self, index, *value)

    return watched
