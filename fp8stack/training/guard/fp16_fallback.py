"""What is done when fp16's loss scale falls without end: a warning, and going on in bf16 instead.

It must not know how the scale is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fp8stack.backends.base import DTYPES
from fp8stack.backends.linear import LowPrecisionLinear
from fp8stack.precision import resolve
from fp8stack.precision.recipe import plain
from fp8stack.training.run import Run

ALARM = 4  # overflows in a row
LOW_SCALE = 256.0
_REMEDY = "Lower --lr, clip harder (--set clip=0.5), or use bf16; a larger scale is no help."


class Fp16Fallback:
    """Watches the loss scale of a run in fp16; in any other it does nothing.

    Args:
        run: its layers may be taken to bf16.
        announce: is called with each event, a row of `metrics.jsonl`.
    """

    def __init__(self, run: Run, announce: Callable[[dict[str, Any]], None]) -> None:
        self.run = run
        self.announce = announce
        self.is_left = False
        self._alarmed: set[str] = set()

    def look(self, step: int, overflows: int) -> bool:
        """Say that the scale falls and falls, or go on in bf16 and return True.

        Args:
            step: the last one.
            overflows: how many in a row did up to it.
        """
        scaler = self.run.scaler
        if scaler is None:
            return False
        if overflows >= self.run.config.guard.overflows and self.give_up(
            step, f"{overflows} steps in a row overflowed in fp16"
        ):
            return True
        scale = float(scaler.get_scale())
        low = scaler.is_dynamic and scale < LOW_SCALE
        self._alarm(step, "overflows", overflows >= ALARM, f"{overflows} overflows in a row.")
        self._alarm(step, "scale", low, f"the loss scale is down to {scale:g}.")
        return False

    def _alarm(self, step: int, kind: str, is_so: bool, why: str) -> None:
        """Say it once, until it is over."""
        if not is_so:
            self._alarmed.discard(kind)
        elif kind not in self._alarmed:
            self._alarmed.add(kind)
            self.announce({"step": step, "event": "loss_scale", "why": f"{why} {_REMEDY}"})

    def give_up(self, step: int, why: str) -> bool:
        """Go on in bf16; False if the run is not in fp16, or this machine has no bf16."""
        run = self.run
        if not run.plan.loss_scaling or resolve("bf16", run.hardware).compute_dtype != "bf16":
            return False
        self.leave()
        self.announce({"step": step, "event": "precision", "why": why, "precision": "bf16"})
        return True

    def leave(self) -> None:
        """Have every layer compute in bf16, without a loss scale."""
        run = self.run
        self.is_left = True
        run.scaler = None
        for variant in run.variants:
            if not variant.plan.loss_scaling:
                continue
            recipe = plain("bf16", variant.plan.recipe.attention)
            variant.plan = replace(variant.plan, recipe=recipe, compute_dtype="bf16")
            variant.backend.compute_dtype = DTYPES["bf16"]
            for part in variant.model.modules():
                if isinstance(part, LowPrecisionLinear):
                    part.compute_dtype = DTYPES["bf16"]
