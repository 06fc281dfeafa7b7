"""What stands between the two linears of an MLP, by name."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8stack.ops.eager import swiglu, swiglu_gradient


def _gelu_tanh(hidden: Tensor) -> Tensor:
    return F.gelu(hidden, approximate="tanh")


def _relu2(hidden: Tensor) -> Tensor:
    return F.relu(hidden).square()


def _gelu_gradient(hidden: Tensor, dy: Tensor) -> Tensor:
    gradient: Tensor = torch.ops.aten.gelu_backward(dy, hidden)
    return gradient


def _gelu_tanh_gradient(hidden: Tensor, dy: Tensor) -> Tensor:
    gradient: Tensor = torch.ops.aten.gelu_backward(dy, hidden, approximate="tanh")
    return gradient


def _relu2_gradient(hidden: Tensor, dy: Tensor) -> Tensor:
    return torch.where(hidden <= 0, 0.0, dy * (2 * hidden))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu2": _relu2,
    "swiglu": swiglu,
}
"""Each takes what the first linear gave; SwiGLU's gate and value are its halves, gate first."""

TRANSFORMER_ENGINES = {"gelu_tanh": "gelu", "relu2": "srelu", "swiglu": "swiglu"}
"""Transformer Engine's names of those that it has; its gelu is the tanh approximation."""

GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": _gelu_gradient,
    "gelu_tanh": _gelu_tanh_gradient,
    "relu2": _relu2_gradient,
    "swiglu": swiglu_gradient,
}
"""The gradient of each one's input, of its input and of the gradient of what it gave: what autograd
finds, to the bit."""
