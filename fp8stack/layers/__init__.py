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
from fp8stack.layers.grouped_emulation import GroupedEmulation
from fp8stack.layers.operands import Draws
from fp8stack.layers.torch import TorchBackend
from fp8stack.precision.plan import Plan

__all__ = ["Backend", "Draws", "build_backend", "fp8_state", "load_fp8_state"]


def build_backend(plan: Plan, *, save_fp8: bool = False, draws: Draws | None = None) -> Backend:
    """The backend that runs `plan`, with the decisions of `plan.for_layers`.

    Args:
        plan: a plan from `resolve`.
        save_fp8: save x and w for the backward pass as FP8 bytes, a quarter of float32's memory;
            slower on a CPU. For the emulator; te and torch always do so.
        draws: the seed and counters of stochastic rounding, if several models share them.

    Raises:
        UserError: `plan` is not a `Plan`.
    """
    if not isinstance(plan, Plan):
        raise UserError(
            f"build_backend needs a plan, such as plan_for(config, 'delayed', probe()), not "
            f"{described(plan)}."
        )
    backend = _build(plan, save_fp8, draws)
    for name in dict.fromkeys(layer.backend for layer in plan.layers if layer.backend):
        backend.delegate_to(_build(replace(plan, backend=name), save_fp8, backend.draws))
    return backend


def _build(plan: Plan, save_fp8: bool, draws: Draws | None) -> Backend:
    if plan.backend == "te":
        load_cudnn()
        # Imported only if needed: Transformer Engine is optional, and slow to import.
        from fp8stack.layers.te import TEBackend

        return TEBackend(plan, draws=draws)
    if plan.backend == "torch":
        return TorchBackend(plan, draws=draws)
    if plan.backend == "emulate":
        emulated = EmulateBackend(plan, save_fp8=save_fp8, draws=draws)
        emulated.grouped = GroupedEmulation(emulated, save_fp8=save_fp8)
        return emulated
    return Backend(plan, draws=draws)
