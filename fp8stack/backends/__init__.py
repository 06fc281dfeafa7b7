"""Compute backends: `build_backend(plan)` builds the layers of a model as the plan decided them.

One contract for all: the same parameter names, float32 master weights, layers that differ only in
how they multiply.
"""

from __future__ import annotations

from fp8stack.backends.base import Backend, fp8_state, load_fp8_state
from fp8stack.backends.emulate import EmulateBackend
from fp8stack.backends.torch import TorchBackend
from fp8stack.precision.plan import Plan

__all__ = ["Backend", "build_backend", "fp8_state", "load_fp8_state"]


def build_backend(plan: Plan, *, save_fp8: bool = False) -> Backend:
    """The backend that runs `plan`, whose layers must have been decided (`plan.for_layers`).

    Args:
        plan: what `resolve` gave.
        save_fp8: keep x and w for the backward pass as FP8 bytes, a quarter of float32's memory,
            and unpack them again: slower on a CPU. For the emulator; te and torch always do.
    """
    if plan.backend == "te":
        # Imported only when asked for: Transformer Engine is optional, and slow to import.
        from fp8stack.backends.te import TEBackend

        return TEBackend(plan)
    if plan.backend == "torch":
        return TorchBackend(plan)
    if plan.backend == "emulate":
        return EmulateBackend(plan, save_fp8=save_fp8)
    return Backend(plan)
