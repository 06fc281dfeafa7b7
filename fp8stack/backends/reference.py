"""Plain torch in fp32, tf32, bf16 or fp16. It must not know what FP8 is.

Weights are float32 masters, cast to the compute dtype at each use; in fp32 the layers are torch's
own, so the recipe fp32 is plain torch to the bit.
"""

from __future__ import annotations

from torch import nn

from fp8stack.backends.contract import Backend, set_matmul_precision


class ReferenceBackend(Backend):
    """Layers of plain torch."""

    def attach(self, model: nn.Module) -> None:
        """See `Backend.attach`: TF32 or full float32."""
        set_matmul_precision(model, "high" if self.plan.compute_dtype == "tf32" else "highest")
