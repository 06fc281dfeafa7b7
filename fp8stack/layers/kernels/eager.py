"""RMSNorm and SwiGLU, whose backward passes in eager mode write fewer tensors than autograd's own:
the same values and gradients, to the bit. Compiled code fuses what torch composes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm over the last dimension. On a CPU torch composes it of operators, and its
    backward pass writes 12 tensors of the size of the input (torch 2.13); in float32, this makes
    2, and does not keep the normalized rows."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., width]."""
        on_cpu = x.device.type == "cpu" and x.dtype == self.weight.dtype == torch.float32
        if self.eps is None or not on_cpu or not _is_eager(x):
            return super().forward(x)
        y: Tensor = _Normalize.apply(x, x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return y


def swiglu(hidden: Tensor) -> Tensor:
    """silu(gate) * value of the halves of the last dimension, the gate first."""
    if not _is_eager(hidden):
        gate, value = hidden.chunk(2, dim=-1)
        return F.silu(gate) * value
    y: Tensor = _SwiGLU.apply(hidden)  # type: ignore[no-untyped-call]
    return y


def _is_eager(x: Tensor) -> bool:
    """Whether an autograd function serves: no compiler, no DTensor, no transform of torch.func."""
    if torch.compiler.is_compiling():
        return False
    return type(x) in _PLAIN and not torch._C._are_functorch_transforms_active()


_PLAIN = (Tensor, FakeTensor)  # fake tensors trace the operators that would run


class _Normalize(torch.autograd.Function):
    """y = x / sqrt(mean(x^2) + eps) w, each product and sum as torch and autograd have it, but that
    autograd doubles x, which may overflow.

    `x` comes twice, for its two gradients: autograd adds them to others one after the other.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, inverse, weight)
        return (x * inverse).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, inverse, weight = ctx.saved_tensors
        # Laid out like dy, as autograd's product: the order of the sum over rows depends on it.
        product, dw = torch.empty_like(dy), None
        if ctx.needs_input_grad[2]:
            torch.mul(x, inverse, out=product)
            dw = product.mul_(dy).sum(list(range(x.ndim - 1)))
        dx = dy * weight
        of_inverse = torch.mul(dx, x, out=product).sum(-1, keepdim=True)
        of_square = of_inverse * -0.5 * inverse.pow(3) / x.shape[-1]
        return dx.mul_(inverse), torch.mul(x, 2 * of_square, out=product), dw, None


class _SwiGLU(torch.autograd.Function):
    """SwiGLU, whose backward pass writes both gradients into one tensor; autograd copies them into
    it."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        gate, value = hidden.chunk(2, dim=-1)
        activated = F.silu(gate)
        ctx.save_for_backward(hidden, activated)
        return activated * value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        hidden, activated = ctx.saved_tensors
        return _swiglu_gradient(hidden, activated, dy)


def swiglu_gradient(hidden: Tensor, dy: Tensor) -> Tensor:
    """The gradient of `hidden` from that of `swiglu(hidden)`."""
    return _swiglu_gradient(hidden, F.silu(hidden.chunk(2, dim=-1)[0]), dy)


def _swiglu_gradient(hidden: Tensor, activated: Tensor, dy: Tensor) -> Tensor:
    gate, value = hidden.chunk(2, dim=-1)
    gradient = torch.empty_like(hidden)
    of_gate, of_value = gradient.chunk(2, dim=-1)
    torch.mul(dy, activated, out=of_value)
    torch.ops.aten.silu_backward.grad_input(dy * value, gate, grad_input=of_gate)
    return gradient
