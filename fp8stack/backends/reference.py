"""Plain torch in fp32, tf32, bf16 or fp16: a `Backend` without FP8.

Weights are float32 masters, cast to the compute dtype at each use; in fp32 the layers are torch's
own, so the recipe fp32 is plain torch to the bit.
"""

from __future__ import annotations

from fp8stack.backends.base import Backend


class ReferenceBackend(Backend):
    """Layers of plain torch: those that every backend has for what is not in FP8."""
