"""Compute backends: `build_backend(plan)` returns a backend, which builds the layers of a model.

All backends have the same parameter names and float32 master weights; their layers differ only in
how they multiply.
"""

from __future__ import annotations

from dataclasses import replace

from fp8stack.common.errors import UserError, described
from fp8stack.layers.backend import Backend, fp8_state, load_fp8_state
from fp8stack.layers.cudnn import load_cudnn
from fp8stack.layers.emulate import EmulateBackend
from fp8stack.layers.operands import RngState
from fp8stack.layers.torch import TorchBackend
from fp8stack.precision.plan import Plan

__all__ = ["Backend", "RngState", "build_backend", "fp8_state", "load_fp8_state"]


def build_backend(plan: Plan, *, draws: RngState | None = None) -> Backend:
    """The backend that runs `plan`, with the decisions of `plan.for_layers`.

    Args:
        plan: a plan from `resolve`.
        draws: the seed and counters of stochastic rounding, if several models share them.

    Raises:
        UserError: `plan` is not a `Plan`.
    """
    if not isinstance(plan, Plan):
        raise UserError(
            f"build_backend needs a plan, such as plan_for(config, 'delayed', probe()), not "
            f"{described(plan)}."
        )
    backend = _build(plan, draws)
    for name in dict.fromkeys(layer.backend for layer in plan.layers if layer.backend):
        backend.delegate_to(_build(replace(plan, backend=name), backend.draws))
    return backend


def _build(plan: Plan, draws: RngState | None) -> Backend:
    if plan.backend == "te":
        load_cudnn()
        # Imported only if needed: Transformer Engine is optional, and slow to import.
        from fp8stack.layers.te import TEBackend

        return TEBackend(plan, draws=draws)
    if plan.backend == "torch":
        return TorchBackend(plan, draws=draws)
    if plan.backend == "emulate":
        return EmulateBackend(plan, draws=draws)
    return Backend(plan, draws=draws)
