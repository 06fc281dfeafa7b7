"""Attention by torch: masks of the keys that a query may attend to, and the choice of the kernel.

B batch, T queries, S keys, H heads, G key/value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from fp8stack.layers.kernels.variants import TRITON_RUNS

Mask = Tensor | BlockMask
"""The mask that is added to the scores, [B or 1, 1, T, S], or the blocks of scores that are
computed."""

# cuDNN's gradients of masked attention may be NaN where S % 128 is 64 (pytorch issue 196678): to be
# deleted when no torch up to 2.13 is supported.
_TAKE_MASKS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Triton multiplies no narrower matrices.
_LEAST_HEAD_WIDTH = 16


def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask | None, dropout: float) -> Tensor:
    """Scaled dot-product attention; causal if there is no `mask`.

    Args:
        q: queries [B, H, T, E].
        k: keys [B, G, S, E]; S is T, or any number where there is one query, or a mask.
        v: values, of the shape of `k`. All three are of one dtype, which is the result's.
        mask: what `dense_mask` or `document_mask` gave.
        dropout: the probability for an attention weight to be dropped; 0 with blocks.
    """
    grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        y: Tensor = _flex()(q, k, v, block_mask=mask, enable_gqa=grouped)
        return y
    with nullcontext() if mask is None else kernels_for_masks(q.device):
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None and q.shape[2] > 1,  # a single query is the last: it sees all
            enable_gqa=grouped,
        )


def dense_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive mask, the form that all kernels take.

    From booleans, torch would make this mask in every layer and keep it for the backward pass.

    Args:
        allowed: bool [B or 1, 1, T, S]; every query has one key or more.
        dtype: that attention computes in.

    Returns:
        0 or minus infinity: the shape of `allowed`, in `dtype`.
    """
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, -torch.inf)


def document_mask(documents_BT: Tensor, dtype: torch.dtype, *, head_width: int, all: bool) -> Mask:
    """A mask by which a token attends to itself and earlier tokens of its own document.

    On a GPU with a compiler, blocks of 128 x 128 scores that are masked as a whole are never
    computed (flex attention). Elsewhere, and where `all` scores are wanted, the mask is dense.

    Args:
        documents_BT: int64 [B, T], the document that each token is of.
        dtype: that attention computes in.
        head_width: E.
        all: attention has dropout, or keeps what its kernel gave: flex attention does neither.
    """
    if not all and head_width >= _LEAST_HEAD_WIDTH and skips_blocks(documents_BT.device):
        return document_blocks(documents_BT)
    same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    return dense_mask(same_BTT.tril()[:, None], dtype)


def document_blocks(documents_BT: Tensor) -> BlockMask:
    """See `document_mask`."""

    def allowed(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (documents_BT[b, query] == documents_BT[b, key]) & (key <= query)

    B, T = documents_BT.shape
    return create_block_mask(allowed, B, None, T, T, device=documents_BT.device)


def skips_blocks(device: torch.device) -> bool:
    """Whether flex attention is used on `device`: it is compiled, by Triton and a C compiler, and
    has not been tried on GPUs of other makers than NVIDIA."""
    return device.type == "cuda" and torch.version.hip is None and TRITON_RUNS


def kernels_for_masks(device: torch.device) -> AbstractContextManager[None]:
    """Exclude the kernels that fail under masks."""
    return sdpa_kernel(_TAKE_MASKS) if device.type == "cuda" else nullcontext()


def _flex() -> Callable[..., Any]:
    """Flex attention, which is slow, and T x T, unless it is compiled."""
    if torch.compiler.is_compiling():
        return flex_attention
    return _compiled_flex()


@cache
def _compiled_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)
