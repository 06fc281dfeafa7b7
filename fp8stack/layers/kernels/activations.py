"""The activations between the two linears of an MLP, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8stack.layers.kernels.eager import swiglu, swiglu_gradient

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda hidden: F.relu(hidden).square(),
    "swiglu": swiglu,
}
"""Activations take the first linear's output; SwiGLU's gate and value are its halves, gate
first."""

TRANSFORMER_ENGINES = {"gelu_tanh": "gelu", "relu2": "srelu", "swiglu": "swiglu"}
"""Transformer Engine's names of those that it has; its gelu is the tanh approximation."""

GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu": lambda hidden, dy: torch.ops.aten.gelu_backward(dy, hidden),
    "gelu_tanh": lambda hidden, dy: torch.ops.aten.gelu_backward(dy, hidden, approximate="tanh"),
    "relu2": lambda hidden, dy: torch.where(hidden <= 0, 0.0, dy * (2 * hidden)),
    "swiglu": swiglu_gradient,
}
"""The gradient of an activation's input, from the input and the gradient of the output: the same
bits as autograd's."""
