"""Operators of our own, for what looks at torch's: compilers, profilers, counters, FakeTensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LIBRARY: Any = torch.library.Library("fp8stack", "FRAGMENT")  # type: ignore[no-untyped-call]
_PLAIN = (Tensor, torch.nn.Parameter)


def operator(
    schema: str, eager: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """An operator for CPUs. Unlike `torch.library.custom_op`, whose checks take 50 us a call.

    Args:
        schema: "name(Tensor x, ...) -> Tensor", in torch's language.
        eager: computes it.
        fake: gives tensors of the right shapes.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, eager, "CPU")
    torch.library.register_fake(f"fp8stack::{name}", fake, lib=_LIBRARY)
    made: Callable[..., Any] = getattr(torch.ops.fp8stack, name).default
    return made


def seen(x: Tensor) -> bool:
    """Whether somebody looks at the operators on `x`, and has to be told of ours. Else their code
    is called as it is: an operator costs as much as the work on a small matrix."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or type(x) not in _PLAIN
        or torch.autograd.profiler._is_profiler_enabled
    )
