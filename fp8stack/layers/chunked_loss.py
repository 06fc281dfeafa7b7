"""The cross-entropy of a quantized head, which computes the logits of a chunk of rows at a time.

N rows (tokens), D width, V vocabulary, P outputs of the head: V, and more for padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8stack.layers.linear import (
    Call,
    CopyLayout,
    QuantizedLinear,
    Saved,
    backward_ran,
    no_autocast,
    restored,
)
from fp8stack.numerics.operators import operator_on_any_device

IGNORED = -100
_ATEN: Any = torch.ops.aten
_SUM = 2  # the number of reduction="sum"


class Chunks(NamedTuple):
    """The division of a loss into chunks.

    Attributes:
        vocabulary: V.
        rows: the rows whose logits exist at the same time, a multiple of 128, the longest block of
            FP8 recipes.
        softmax_rows: the rows whose float32 logits exist at the same time in eager code. In
            compiled code, inductor fuses them into neighbouring operations.
    """

    vocabulary: int
    rows: int
    softmax_rows: int


def cross_entropy(layer: QuantizedLinear, x: Tensor, targets: Tensor, chunks: Chunks) -> Tensor:
    """The mean of `cross_entropy(layer(x)[:, :V].float(), targets)`.

    The layer runs chunk by chunk, also in compiled code. The backward pass computes the logits of a
    chunk again, from operands that were cast in the forward pass, and replaces them by their
    gradient: one more GEMM. The gradient cannot be computed in the forward pass, because it is cast
    with all factors of the loss, such as 1 / the number of micro-batches. The gradients of the
    weight are added in float32.

    Each chunk is cast as a matrix of its own. Bytes, scales, recorded amaxes and random bits equal
    those of one GEMM over all rows where a scale does not depend on several rows: in delayed
    scaling, and with blocks, of which a chunk is a multiple. In current scaling, with one scale per
    column of x or of the gradient, and above NVFP4's block scales, a chunk has its own scale.

    Args:
        layer: a head without a bias, in FP8.
        x: [N, D] in the compute dtype.
        targets: int64 [N]; -100 is ignored.
        chunks: how to divide the rows.

    Returns:
        float32, 0-dim; NaN if all targets are ignored.
    """
    if torch.compiler.is_compiling() and layer.backend.caches_weights:
        layer.backend.weights.note_compiled_call()
    weight = layer.weight.t() if layer.transposed else layer.weight
    grad = torch.is_grad_enabled()
    needs = grad and x.requires_grad, grad and weight.requires_grad
    record = layer.delayed is not None and layer.delayed.records(layer.training and grad)
    call = Call(record, len(x), has_bias=False)
    if missing := -len(x) % layer.row_multiple:
        x = F.pad(x, (0, 0, 0, missing))
        targets = F.pad(targets, (0, missing), value=IGNORED)
    loss: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        x, weight, targets, layer, chunks, needs, call
    )
    return loss


class _CrossEntropy(torch.autograd.Function):
    """See `cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        layer: QuantizedLinear,
        chunks: Chunks,
        needs: tuple[bool, bool],
        call: Call,
    ) -> Tensor:
        quantizers, (needs_dx, needs_dw) = layer.quantizers, needs
        w_rows, w_columns = quantizers["weight"].cast(weight, needs_dx, call)
        copies = [w_rows, w_columns]
        losses: list[Tensor] = []
        for start, rows in _starts(len(x), chunks.rows):
            x_chunk, targets_chunk = x[start : start + rows], targets[start : start + rows]
            if losses and torch.compiler.is_compiling():
                x_chunk = _after(x_chunk, losses[-1])
            at = call._replace(first_row=start)
            x_rows, x_columns = quantizers["input"].cast(x_chunk, needs_dw, at)
            copies += [x_rows, x_columns]
            losses += _losses(layer, x_rows, w_rows, targets_chunk, chunks)
        count = (targets != IGNORED).sum()
        ctx.layer, ctx.chunks, ctx.needs, ctx.call = layer, chunks, needs, call
        saved: list[Tensor | None] = []
        ctx.weight_dtype, ctx.forms = weight.dtype, []
        for copy in copies:
            ctx.forms.append(None if copy is None else (type(copy), copy[2]))
            saved += () if copy is None else (*copy[:2], *copy[3:])
        ctx.save_for_backward(targets, count, *saved)
        return torch.cat(losses).sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        with no_autocast(upstream.device.type):
            targets, count, *saved = ctx.saved_tensors
            copies = _all_restored(ctx.forms, saved)
            dx, dw = _gradients(
                ctx.layer, ctx.chunks, ctx.needs, ctx.call, copies, targets, upstream / count
            )
        backward_ran(ctx.layer, ctx.call)
        return dx, None if dw is None else dw.to(ctx.weight_dtype), None, None, None, None, None


def _gradients(
    layer: QuantizedLinear,
    chunks: Chunks,
    needs: tuple[bool, bool],
    call: Call,
    copies: Sequence[Any],
    targets: Tensor,
    factor: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and of the weight, None for each that is not needed.

    Args:
        copies: the row copy and the column copy of the weight, and of each chunk of x.
        factor: the gradient of the loss divided by the number of targets: float32, 0-dim.
    """
    backend, (needs_dx, needs_dw) = layer.backend, needs
    w_rows, w_columns, *of_chunks = copies
    dx: list[Tensor] = []
    dw: Tensor | None = None
    before = factor
    for place, (start, rows) in enumerate(_starts(len(targets), chunks.rows)):
        x_rows, x_columns = of_chunks[2 * place : 2 * place + 2]
        if torch.compiler.is_compiling():
            x_rows = type(x_rows)(_after(x_rows[0], before), *x_rows[1:])
        logits = _logits(layer, x_rows, w_rows)
        dy = _gradient_of_logits(logits, targets[start : start + rows], factor, chunks)
        if backend.observer is not None:
            backend.observer.report_chunk(layer, "grad_output", dy)
        at = call._replace(first_row=start)
        dy_rows, dy_columns = layer.quantizers["grad_output"].cast(dy, needs_dw, at)
        del logits, dy
        if needs_dx:
            dx.append(backend.matmul(dy_rows, w_columns, layer.compute_dtype))
            before = dx[-1]
        if needs_dw:
            addend = backend.matmul(dy_columns, x_columns, torch.float32)
            before = dw = addend if dw is None else _add(dw, addend)
            del addend
        del dy_rows, dy_columns  # frees them before the next chunk's logits
    if not torch.compiler.is_compiling():
        backend.gemm_count += len(of_chunks) // 2 * (needs_dx + needs_dw)
    return torch.cat(dx) if dx else None, dw


def _starts(total: int, rows: int) -> Iterator[tuple[int, int]]:
    """Yield the first row of each chunk and its number of rows."""
    for start in range(0, total, rows):
        yield start, min(rows, total - start)


def _all_restored(forms: Sequence[CopyLayout | None], saved: Sequence[Tensor | None]) -> list[Any]:
    """The copies of these forms, whose tensors were saved one after the other."""
    copies: list[Any] = []
    place = 0
    for form in forms:
        size = 0 if form is None else len(form[0]._fields) - 1  # type: ignore[attr-defined]
        tensors: Saved = tuple(saved[place : place + size])
        copies.append(None if form is None else restored(form, tensors))
        place += size
    return copies


def _logits(layer: QuantizedLinear, x_rows: Any, w_rows: Any) -> Tensor:
    """The logits of a chunk: [rows, P] in the compute dtype."""
    backend = layer.backend
    if not torch.compiler.is_compiling():
        backend.gemm_count += 1
    y: Tensor = backend.matmul(x_rows, w_rows, layer.compute_dtype, fast_accumulation=True)
    return y


def _softmax_slices(rows: int, chunks: Chunks) -> list[slice]:
    """The rows of a chunk whose float32 logits exist at the same time."""
    step = rows if torch.compiler.is_compiling() else chunks.softmax_rows
    return [slice(start, start + step) for start in range(0, rows, step)]


def _losses(
    layer: QuantizedLinear, x_rows: Any, w_rows: Any, targets: Tensor, chunks: Chunks
) -> list[Tensor]:
    """The cross-entropies of a chunk's rows, 0 where the target is ignored: float32, in slices."""
    logits = _logits(layer, x_rows, w_rows)
    if layer.backend.observer is not None:
        layer.backend.observer.report_chunk(layer, "output", logits)
    return [
        F.cross_entropy(
            logits[places, : chunks.vocabulary].float(),
            targets[places],
            reduction="none",
            ignore_index=IGNORED,
        )
        for places in _softmax_slices(len(logits), chunks)
    ]


def _gradient_of_logits(logits: Tensor, targets: Tensor, factor: Tensor, chunks: Chunks) -> Tensor:
    """The gradient of `factor` times the sum of a chunk's cross-entropies: [rows, P] in the dtype
    of the logits, computed in float32 by the operators of torch's own backward pass. In eager code,
    it overwrites the logits."""
    padding = logits.shape[1] - chunks.vocabulary
    for places in _softmax_slices(len(logits), chunks):
        log_p = torch.log_softmax(logits[places, : chunks.vocabulary].float(), 1)
        of_log_p = _ATEN.nll_loss_backward(
            factor, log_p, targets[places], None, _SUM, IGNORED, factor
        )
        gradient = _ATEN._log_softmax_backward_data(of_log_p, log_p, 1, torch.float32)
        if torch.compiler.is_compiling():
            return F.pad(gradient.to(logits.dtype), (0, padding))
        logits[places, : chunks.vocabulary] = gradient
    logits[:, chunks.vocabulary :] = 0
    return logits


# An operator, because compiled code would otherwise save the logits of the forward pass, equal to
# those that the backward pass computes again, and might compute several chunks together.
@operator_on_any_device("after", lambda x, before: torch.empty_like(x))
def _after(x: Tensor, before: Tensor) -> Tensor:
    """A copy of `x` that is made after `before` was computed."""
    return x.clone()


def _add(total: Tensor, addend: Tensor) -> Tensor:
    """`total += addend`."""
    if torch.compiler.is_compiling():
        _add_op(total, addend)
    else:
        _add_in_place(total, addend)
    return total


def _add_in_place(total: Tensor, addend: Tensor) -> None:
    total.add_(addend)


# A custom operator, because inductor would sum the gradients of several chunks in one kernel, for
# which all of them would have to exist.
_add_op = torch.library.custom_op("fp8stack::add_into", _add_in_place, mutates_args=("total",))
