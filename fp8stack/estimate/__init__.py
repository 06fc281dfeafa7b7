"""How much memory a run takes, before it runs: bytes of each part, added up from shapes and a plan.

Nothing is allocated and nothing is measured here; docs/estimate.md has the formulas.
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
