"""Operators of our own, for what looks at torch's: compilers, profilers, counters, FakeTensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

_LIBRARY: Any = torch.library.Library("fp8stack", "FRAGMENT")  # type: ignore[no-untyped-call]

EAGER: dict[str, Callable[..., Any]] = {}
"""The eager function of each operator, by name."""


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
    overload: Callable[..., Any] = getattr(torch.ops.fp8stack, name).default
    return overload


def operator_on_any_device(
    name: str, fake: Callable[..., Any], tags: Sequence[torch.Tag] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that makes an operator of a function, with the schema of its annotations; see
    `operator`."""

    def made(function: Callable[..., Any]) -> Callable[..., Any]:
        schema = name + torch.library.infer_schema(function, mutates_args=())
        return operator(schema, function, fake, device="CompositeExplicitAutograd", tags=tags)

    return made


def assume_constant_result(function: Function) -> Function:
    """torch.compiler's decorator, which would import the compiler: torch.compile calls the function
    while it traces, and its result is a constant of the code."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
