"""Operators of our own, for what looks at torch's: compilers, profilers, counters, FakeTensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_LIBRARY: Any = torch.library.Library("fp8stack", "FRAGMENT")  # type: ignore[no-untyped-call]

EAGER: dict[str, Callable[..., Any]] = {}
"""What computes each operator."""


def operator(
    schema: str,
    eager: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    device: str = "CPU",
    tags: Sequence[torch.Tag] = (),
) -> Callable[..., Any]:
    """An operator without a gradient. Unlike `torch.library.custom_op`, whose checks of every call
    take longer than the call itself.

    Args:
        schema: "name(Tensor x, ...) -> Tensor", in torch's language.
        eager: computes it.
        fake: gives tensors of the right shapes.
        device: torch's dispatch key.
        tags: for compilers.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=tags)
    _LIBRARY.impl(name, eager, device)
    torch.library.register_fake(f"fp8stack::{name}", fake, lib=_LIBRARY)
    EAGER[name] = eager
    made: Callable[..., Any] = getattr(torch.ops.fp8stack, name).default
    return made


def operator_on_any_device(
    name: str, fake: Callable[..., Any], tags: Sequence[torch.Tag] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function, whose annotations are those of its schema; see `operator`."""

    def made(function: Callable[..., Any]) -> Callable[..., Any]:
        schema = name + torch.library.infer_schema(function, mutates_args=())
        return operator(schema, function, fake, device="CompositeExplicitAutograd", tags=tags)

    return made
