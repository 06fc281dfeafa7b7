"""How much memory a run takes, before it runs: bytes of each part, added up.

Nothing is allocated: the sizes come from a trace of the model on tensors without memory.
"""

from __future__ import annotations

from fp8stack.estimate.parts import PARTS, Estimate, Setting, estimate
from fp8stack.estimate.savings import Savings, largest_batch, savings
from fp8stack.estimate.weights import OptimizerName, optimizer_bytes

__all__ = [
    "PARTS",
    "Estimate",
    "OptimizerName",
    "Savings",
    "Setting",
    "estimate",
    "largest_batch",
    "optimizer_bytes",
    "savings",
]
