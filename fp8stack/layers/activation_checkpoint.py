"""Selective activation checkpointing: a block saves the outputs of its GEMMs and its attention."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

# They register operators of ours.
import fp8stack.layers.emulate
import fp8stack.layers.kernels.scaled_gemm  # noqa: F401

_ATEN: Any = torch.ops.aten

GEMMS: frozenset[Any] = frozenset(
    getattr(packet, overload)
    for name in (
        *("mm", "addmm", "_scaled_mm", "_scaled_mm_v2"),
        *("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"),
    )
    if (packet := getattr(_ATEN, name, None)) is not None  # torch 2.11 has not all of them
    for overload in ("default", "dtype")
    if overload in packet.overloads()
) | {
    getattr(torch.ops.fp8stack, name).default
    for name in ("emulated_gemm", "mx_gemm", "grouped_gemm")
}
"""The GEMM operators of linears. Not `bmm`, which computes unfused attention: recomputing it saves
the memory of its scores, T x T per head."""

ATTENTION: frozenset[Any] = frozenset(
    packet.default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    if (packet := getattr(_ATEN, name, None)) is not None
)
"""The fused forms of scaled dot-product attention."""


def policy(
    context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    """Save the outputs of GEMMs and of attention without dropout, and the scales of delayed scaling
    in compiled code, and recompute everything else.

    Attention with dropout is recomputed: if it were skipped, it would draw no mask, and the next
    dropout would draw other random numbers than in the forward pass. Compiled code selects scales
    from a vector, which the next pass may change before the backward pass.
    """
    keeps = operator in GEMMS or (operator is _ATEN.index_select.default and args[0].ndim == 1)
    if operator in ATTENTION:
        names = (argument.name for argument in operator._schema.arguments)
        keeps = not (dict(zip(names, args, strict=False)) | kwargs).get("dropout_p")
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def hide_warning_of_in_place_operations() -> None:
    """Hide a warning that torch.compile logs for every `context_fn` (torch 2.13): the checkpointed
    code must not have in-place operations. It may, on tensors that are inputs of the compiled code,
    such as recorded amaxes: the compiler changes them once, in the forward pass."""
    logger = logging.getLogger("torch._higher_order_ops.wrap")
    logger.addFilter(_not_of_in_place_operations)


def _not_of_in_place_operations(record: logging.LogRecord) -> bool:
    return "in-place ops" not in record.getMessage()


contexts = partial(create_selective_checkpoint_contexts, policy)
"""`context_fn` of `torch.utils.checkpoint.checkpoint`."""
