"""Plain torch in fp32, tf32, bf16 or fp16. It must not know what FP8 is.

Weights are float32 masters, cast to the compute dtype at each use; in fp32 the layers are torch's
own, so the recipe fp32 is plain torch to the bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8stack.backends.contract import Backend, set_matmul_precision
from fp8stack.backends.linear import MasterLinear


class CastLinear(MasterLinear):
    """A linear whose GEMM takes `compute_dtype` operands and returns `compute_dtype`."""

    def multiply(self, x: Tensor) -> Tensor:
        """See `MasterLinear.multiply`."""
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        return F.linear(x, self.matrix.to(self.compute_dtype), bias)


def plain_linear(
    in_features: int, out_features: int, bias: bool, compute_dtype: torch.dtype
) -> nn.Linear:
    """A linear without FP8: torch's own where no cast is needed."""
    if compute_dtype == torch.float32:
        return nn.Linear(in_features, out_features, bias=bias)
    return CastLinear(in_features, out_features, bias, compute_dtype=compute_dtype)


class ReferenceBackend(Backend):
    """Layers of plain torch."""

    def linear(self, name: str, in_features: int, out_features: int, bias: bool) -> nn.Module:
        """See `Backend.linear`."""
        return plain_linear(in_features, out_features, bias, self.compute_dtype)

    def attach(self, model: nn.Module) -> None:
        """See `Backend.attach`: TF32 or full float32."""
        set_matmul_precision(model, "high" if self.plan.compute_dtype == "tf32" else "highest")
