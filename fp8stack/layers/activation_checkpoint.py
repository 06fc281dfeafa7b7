"""Selective activation checkpointing: a block keeps what its GEMMs and its attention gave."""

from __future__ import annotations

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
import fp8stack.layers.grouped_emulation
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
    for name in ("cpu_gemm", "mx_gemm", "grouped_gemm", "emulated_grouped_gemm")
}
"""Operators that multiply what a linear takes. `bmm` is none of them: it is attention by its parts,
whose scores, T x T for each head, are what running it again saves."""

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
    """Keep what GEMMs and attention without dropout give, run all else again.

    Attention that draws a mask is run again: left out, it would not draw, and the dropout after
    it would draw other numbers than in the forward pass.
    """
    keeps = operator in GEMMS
    if operator in ATTENTION:
        names = (argument.name for argument in operator._schema.arguments)
        keeps = not (dict(zip(names, args, strict=False)) | kwargs).get("dropout_p")
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


contexts = partial(create_selective_checkpoint_contexts, policy)
"""`context_fn` of `torch.utils.checkpoint.checkpoint`."""
