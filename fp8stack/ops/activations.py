"""What stands between the two linears of an MLP, by name."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from fp8stack.ops.eager import swiglu


def _gelu_tanh(hidden: Tensor) -> Tensor:
    return F.gelu(hidden, approximate="tanh")


def _relu2(hidden: Tensor) -> Tensor:
    return F.relu(hidden).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu2": _relu2,
    "swiglu": swiglu,
}
"""Each takes what the first linear gave; SwiGLU's gate and value are its halves, gate first."""
