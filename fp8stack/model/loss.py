"""The cross-entropy loss of a language-model head, computed in chunks of rows.

N rows (tokens), D width, V vocabulary. The head may have more outputs than V, for padding.

Torch's own `linear_cross_entropy` came with 2.13 and takes a weight, so no hook of the head would
run and no FP8 head would serve.
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

from fp8stack.backends.emulate import EmulateBackend
from fp8stack.backends.linear import CastLinear, LowPrecisionLinear

CHUNK_BYTES = 128 * 2**20
"""Of float32 logits. More rows make better GEMMs and fewer sums of weight gradients."""


def head_loss(
    head: nn.Module, x: Tensor, targets: Tensor, vocabulary: int, rows: int | None = None
) -> Tensor:
    """`cross_entropy(head(x)[..., :vocabulary].float(), targets)`, the mean over the targets.

    Logits that fit into one chunk, and compiled code, in which inductor fuses the float32 values
    into their neighbours, take just that expression. Else, in eager mode:

    - A head whose logits are in half precision runs once, over all rows, and the cross-entropy
      takes a chunk of them at a time. In bf16 its gradient is found in the forward pass: no
      softmax is computed twice, and the logits are not kept. In fp16 and for an FP8 head it is
      found in the backward pass, from logits that are kept. fp16 would underflow until the loss
      scale arrives; and FP8 is to cast, and record the amax of, just the gradient that compiled
      code has, which depends on all that the loss is multiplied by.
    - A plain float32 head runs chunk by chunk, and so does its backward pass, within the forward
      pass: no logits are kept and nothing is computed twice.
    - An FP8 head whose logits are float32, or whose rounded operands are (the emulator's), runs
      chunk by chunk and again in the backward pass: one GEMM more, for the reason above. Bytes,
      scales and amaxes are those of one GEMM over all rows, since chunks are whole blocks. Only
      in current scaling, each chunk of `x` and of the gradient has a scale of its own. As with
      activation checkpointing, in delayed scaling no second forward pass may come before the
      first one's backward.

    Args:
        head: [..., D] -> [..., V or more], in any dtype.
        x: [..., D], any dtype.
        targets: int64, the shape of `x` without D; -100 is left out of the mean.
        vocabulary: V.
        rows: of a chunk; None: `chunk_rows(vocabulary)`.

    Returns:
        float32, 0-dim; NaN if every target is left out.
    """
    targets_N = targets.flatten()
    rows = rows or chunk_rows(vocabulary)
    if torch.compiler.is_compiling() or len(targets_N) <= rows:
        return F.cross_entropy(head(x).float()[..., :vocabulary].flatten(0, -2), targets_N)
    if _runs_by_chunks(head, x):
        module, inputs, at_once = head, x.flatten(0, -2), type(head) is nn.Linear
    else:
        module, inputs = nn.Identity(), head(x).flatten(0, -2)
        is_fp8 = isinstance(head, LowPrecisionLinear) and not isinstance(head, CastLinear)
        at_once = inputs.dtype != torch.float16 and not is_fp8
    parameters = list(module.parameters())
    trains = torch.is_grad_enabled() and any(t.requires_grad for t in (inputs, *parameters))
    if at_once and trains:
        loss: Tensor = _GradientInForward.apply(  # type: ignore[no-untyped-call]
            module, vocabulary, rows, targets_N, inputs, *parameters
        )
        return loss
    parts = zip(torch.split(inputs, rows), torch.split(targets_N, rows), strict=True)
    losses = [checkpoint(_loss, module, vocabulary, *part, use_reentrant=False) for part in parts]
    return torch.stack(losses).sum() / _count(targets_N)


def chunk_rows(vocabulary: int) -> int:
    """How many rows a chunk has: a multiple of 128, the longest of FP8's blocks."""
    return max(CHUNK_BYTES // (4 * vocabulary) // 128, 1) * 128


def _runs_by_chunks(head: nn.Module, x: Tensor) -> bool:
    """Whether `head` makes float32 tensors of the logits' size, so that chunks save memory."""
    if isinstance(head, LowPrecisionLinear):
        in_float32 = head.keeps_dtype or head.compute_dtype == torch.float32
        return in_float32 or isinstance(getattr(head, "backend", None), EmulateBackend)
    # Not for replacements of nn.Linear, whose parameters may not be plain tensors.
    plain = type(head) is nn.Linear and head.weight.dtype == torch.float32
    return plain and (x.is_meta or not torch.is_autocast_enabled(x.device.type))


def _loss(head: Callable[[Tensor], Tensor], vocabulary: int, x: Tensor, targets: Tensor) -> Tensor:
    """The sum of the losses of some rows: float32, 0-dim."""
    logits = head(x)[:, :vocabulary].float()
    return F.cross_entropy(logits, targets, reduction="sum")


def _count(targets: Tensor) -> Tensor:
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
        # Leaves of their own: a hook on a parameter's gradient is to see the whole of it, once.
        leaves = [p.detach().requires_grad_(n) for p, n in zip(parameters, needs, strict=True)]
        names = [name for name, _ in module.named_parameters()]
        head = partial(functional_call, module, dict(zip(names, leaves, strict=True)))
        count = _count(targets)
        dx = torch.empty_like(inputs) if needs_dx else None
        total = torch.zeros((), device=inputs.device)
        for start in range(0, len(inputs), rows):
            part = slice(start, start + rows)
            x = inputs[part].detach().requires_grad_(needs_dx)
            with torch.enable_grad():
                loss = _loss(head, vocabulary, x, targets[part])
                torch.autograd.backward(loss / count)  # adds to the leaves' gradients
            total += loss.detach()
            if dx is not None:
                assert x.grad is not None
                dx[part] = x.grad
        ctx.save_for_backward(dx, *(leaf.grad for leaf in leaves))
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        return None, None, None, None, *(None if d is None else d * upstream for d in kept)
