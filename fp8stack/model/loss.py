"""The cross-entropy loss of a language-model head, computed in chunks of rows.

N rows (tokens), D width, V vocabulary. The head may have more outputs than V, for padding.

torch.nn.functional.linear_cross_entropy (torch 2.13) takes a weight and no module, so it would skip
the head's hooks and its FP8 GEMM.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from fp8stack.layers.chunked_loss import Chunks, cross_entropy
from fp8stack.layers.linear import LowPrecisionLinear, QuantizedLinear
from fp8stack.precision.profit import HEAD_CHUNK_ROWS

CHUNK_BYTES = 128 * 2**20
"""The size of a chunk's float32 logits in bytes. Larger chunks give faster GEMMs and fewer
accumulations into weight gradients."""

FP8_CHUNK_ROWS = HEAD_CHUNK_ROWS  # unless `CHUNK_BYTES` allow more


def head_loss(
    head: nn.Module, x: Tensor, targets: Tensor, vocabulary: int, rows: int | None = None
) -> Tensor:
    """The mean of `cross_entropy(head(x)[..., :vocabulary].float(), targets)`.

    If the logits fit into one chunk, exactly this expression is computed. Otherwise:

    - An FP8 head of the backends emulate and torch runs chunk by chunk, in compiled code as well,
      and is recomputed in the backward pass, see `chunked_loss.cross_entropy`.
    - Other heads in compiled code compute the expression: inductor fuses the float32 logits into
      neighbouring operations.
    - Another head with logits in half precision, or in FP8 by Transformer Engine, runs once, over
      all rows; the cross-entropy processes chunks of the logits. In bf16, the forward pass also
      computes the gradient of the logits, so that the softmax is computed once and the logits are
      not saved. In fp16 and for an FP8 head, the backward pass computes the gradient from saved
      logits: fp16 would underflow without the loss scale, and FP8 must cast the same gradient as
      compiled code, with all factors of the loss.
    - A plain float32 head runs chunk by chunk; the forward pass also computes the gradients, so
      that no logits are saved or recomputed.

    Args:
        head: [..., D] -> [..., V or more], in any dtype.
        x: [..., D], any dtype.
        targets: int64, the shape of `x` without D; -100 is ignored.
        vocabulary: V.
        rows: the rows of a chunk, by default `chunk_rows`.

    Returns:
        float32, 0-dim; NaN if every target is ignored.
    """
    targets_N = targets.flatten()
    is_chunked = _is_quantized(head)
    rows = rows or chunk_rows(vocabulary, is_chunked)
    fits = len(targets_N) <= rows
    if is_chunked and not fits:
        # A tensor without memory needs no slices.
        softmax_rows = rows if x.is_meta else min(rows, chunk_rows(vocabulary))
        chunks = Chunks(vocabulary, rows, softmax_rows)
        function = partial(cross_entropy, targets=targets_N, chunks=chunks)
        chunked: Tensor = head(x, function)
        return chunked
    if fits or torch.compiler.is_compiling():
        return F.cross_entropy(head(x).float()[..., :vocabulary].flatten(0, -2), targets_N)
    if _runs_by_chunks(head, x):
        module, inputs, at_once = head, x.flatten(0, -2), True
    else:
        module, inputs = nn.Identity(), head(x).flatten(0, -2)
        is_fp8 = isinstance(head, LowPrecisionLinear) and head.in_fp8
        at_once = inputs.dtype != torch.float16 and not is_fp8
    parameters = list(module.parameters())
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in (inputs, *parameters))
    if at_once and trains:
        loss: Tensor = _GradientInForward.apply(  # type: ignore[no-untyped-call]
            module, vocabulary, rows, targets_N, inputs, *parameters
        )
        return loss
    pairs = zip(torch.split(inputs, rows), torch.split(targets_N, rows), strict=True)
    losses = [checkpoint(_loss, module, vocabulary, *pair, use_reentrant=False) for pair in pairs]
    return torch.stack(losses).sum() / _count(targets_N)


def chunk_rows(vocabulary: int, fp8: bool = False) -> int:
    """The rows of a chunk of a head, in FP8 or not: a multiple of 128, the longest block of FP8
    recipes."""
    rows = CHUNK_BYTES // (4 * vocabulary) // 128 * 128
    return max(rows, FP8_CHUNK_ROWS if fp8 else 128)


def _is_quantized(head: nn.Module) -> bool:
    """Whether `chunked_loss.cross_entropy` can run this head."""
    if not isinstance(head, QuantizedLinear) or not head.in_fp8 or head.bias is not None:
        return False
    return bool(head.backend.chunks_loss)


def _runs_by_chunks(head: nn.Module, x: Tensor) -> bool:
    """Whether a head that is not in FP8 runs once per chunk: if its logits are float32."""
    # Not subclasses of nn.Linear, whose parameters may not be plain tensors.
    plain = type(head) is nn.Linear and head.weight.dtype == torch.float32
    return plain and (x.is_meta or not torch.is_autocast_enabled(x.device.type))


def _loss(head: Callable[[Tensor], Tensor], vocabulary: int, x: Tensor, targets: Tensor) -> Tensor:
    """The sum of the cross-entropies of some rows: float32, 0-dim."""
    logits = head(x)[:, :vocabulary].float()
    return F.cross_entropy(logits, targets, reduction="sum")


def _count(targets: Tensor) -> Tensor:
    """The number of targets that are not ignored: int64, 0-dim."""
    return (targets != -100).sum()


class _GradientInForward(torch.autograd.Function):
    """The mean loss; the forward pass also computes the gradients, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        module: nn.Module,
        vocabulary: int,
        rows: int,
        targets: Tensor,
        inputs: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        needs_dx, *needs = ctx.needs_input_grad[4:]
        # Detached leaves, so that hooks on parameters run once, with the complete gradient.
        leaves = [p.detach().requires_grad_(n) for p, n in zip(parameters, needs, strict=True)]
        names = [name for name, _ in module.named_parameters()]
        head = partial(functional_call, module, dict(zip(names, leaves, strict=True)))
        count = _count(targets)
        dx = torch.empty_like(inputs) if needs_dx else None
        total = torch.zeros((), device=inputs.device)
        for start in range(0, len(inputs), rows):
            chunk = slice(start, start + rows)
            x = inputs[chunk].detach().requires_grad_(needs_dx)
            with torch.enable_grad():
                loss = _loss(head, vocabulary, x, targets[chunk])
                torch.autograd.backward(loss / count)  # adds to the leaves' gradients
            total += loss.detach()
            if dx is not None:
                assert x.grad is not None
                dx[chunk] = x.grad
        ctx.save_for_backward(dx, *(leaf.grad for leaf in leaves))
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (None if d is None else d * upstream for d in ctx.saved_tensors)
        return None, None, None, None, *gradients
