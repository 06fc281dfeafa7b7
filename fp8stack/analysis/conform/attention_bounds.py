"""The rows of attention: its output and gradients against float64, with and without document masks.

The bound: a score is a sum of E products, a weight its exponential, and each result a sum over
weights. In float32 all of these round at 2^-24; queries, keys, values, weights and results may be
rounded to the dtype of the operands. Each rounding changes a result by at most its share of the sum
of the magnitudes in it; `_ROUNDINGS` of them are allowed for.

B batch, T tokens, H heads, G key/value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fp8stack.analysis.conform.checks import ROUNDOFF, Bounded, Context, Results, Row, within
from fp8stack.layers.kernels.attention import attend, document_mask

_ROUNDINGS = 2


class AttentionSize(NamedTuple):
    """B, T, H, G and E; `documents` holds the length of each document, 0 for one causal text."""

    batch: int
    tokens: int
    heads: int
    groups: int
    width: int
    documents: int

    def __str__(self) -> str:
        mask = f"documents of {self.documents}" if self.documents else "causal"
        return f"{mask}, {self.tokens} tokens, {self.heads}/{self.groups} heads of {self.width}"


# 192 % 128 is 64, where cuDNN's gradients under a mask may be NaN (pytorch issue 196678).
SIZES = (
    AttentionSize(2, 64, 4, 4, 16, 0),
    AttentionSize(1, 192, 4, 2, 32, 37),
    AttentionSize(2, 320, 4, 4, 64, 100),
)


def attention(context: Context) -> Iterator[Row]:
    """y, dq, dk and dv of causal attention and with document masks, in float32 and bfloat16."""
    for size in SIZES[:2] if context.quick else SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            for steep in (1.0, 30.0):  # the second: scores far from 0
                yield _row(context, size, dtype, steep)


def _row(context: Context, size: AttentionSize, dtype: torch.dtype, steep: float) -> Row:
    """One forward and backward pass."""
    B, T, H, G, E, length = size
    documents = torch.arange(T).expand(B, T) // (length or T)

    def inputs() -> Iterator[tuple[str, dict[str, Tensor]]]:
        generator = torch.Generator().manual_seed(context.seed)
        shapes = {"q": (B, H, T, E), "k": (B, G, T, E), "v": (B, G, T, E), "y": (B, H, T, E)}
        tensors = {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}
        yield "", tensors | {"q": tensors["q"] * steep}

    def computed(tensors: dict[str, Tensor]) -> Results:
        leaves = {n: tensors[n].to(context.device).detach().requires_grad_() for n in "qkv"}
        mask = None
        if length:
            on_device = documents.to(context.device)
            mask = document_mask(on_device, dtype, head_width=E, all=False)
        y = attend(leaves["q"], leaves["k"], leaves["v"], mask=mask, dropout=0.0)
        torch.autograd.backward(y, tensors["y"].to(context.device))
        return {"y": y} | {f"d{name}": leaf.grad for name, leaf in leaves.items()}

    def exact(tensors: dict[str, Tensor]) -> Results:
        allowed = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
        return _exact({n: x.double() for n, x in tensors.items()}, allowed, ROUNDOFF[dtype])

    name = f"{size}, {str(dtype).removeprefix('torch.')}, queries times {steep:g}"
    return Row("attention", name, computed, exact, inputs, within)


def _exact(inputs: dict[str, Tensor], allowed: Tensor, roundoff: float) -> Results:
    """y, dq, dk and dv in float64, each with its error bound."""
    q, k, v, dy = inputs["q"], inputs["k"], inputs["v"], inputs["y"]
    groups, repeat = k.shape[1], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    scores = (q @ k.mT * scale).masked_fill(~allowed, -torch.inf)
    weights = scores.softmax(-1)
    dp = dy @ v.mT
    ds = weights * (dp - (weights * dp).sum(-1, keepdim=True))
    # A score's error is its sum's, which the exponential scales by the weight. Sums are float32; ds
    # is a difference, as exact as its two terms.
    of_score = 2.0**-24 * (q.shape[-1] + 4) * (q.abs() @ k.abs().mT * scale)
    of_score = (of_score + roundoff).masked_fill(~allowed, 0)
    mean = (weights * of_score).sum(-1, keepdim=True)
    w_error = weights * (of_score + mean + roundoff)
    size = dy.abs() @ v.abs().mT
    spread = (weights * size).sum(-1, keepdim=True)
    ds_error = w_error * (size + spread) + weights * ((w_error * size).sum(-1, keepdim=True))
    ds_error = ds_error + weights * roundoff * (size + spread)

    def summed(x: Tensor) -> Tensor:
        return torch.unflatten(x, 1, (groups, repeat)).sum(2)

    results = {
        "y": (weights @ v, w_error @ v.abs() + roundoff * (weights @ v.abs())),
        "dq": (ds @ k * scale, (ds_error + roundoff * ds.abs()) @ k.abs() * scale),
        "dk": (
            summed(ds.mT @ q * scale),
            summed((ds_error + roundoff * ds.abs()).mT @ q.abs() * scale),
        ),
        "dv": (summed(weights.mT @ dy), summed((w_error + roundoff * weights).mT @ dy.abs())),
    }
    return {
        name: Bounded(value, _ROUNDINGS * bound + 1e-30, torch.zeros(()))
        for name, (value, bound) in results.items()
    }
