"""fp16 and its loss scale: when it falls without end, and when to go on in bf16 instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8stack.backends.contract import DTYPES
from fp8stack.backends.linear import MasterLinear
from fp8stack.precision import resolve
from fp8stack.precision.recipe import plain
from fp8stack.training.run import Run

SMALLEST_SCALE, LARGEST_SCALE = 1.0, 262144.0  # of the loss; at 0 it would make NaN
FIRST_SCALE = 65536.0  # torch's own
ALARM = 4  # overflows in a row
LOW_SCALE = 256.0
_REMEDY = "Lower --lr, clip harder (--set clip=0.5), or use bf16; a larger scale is no help."


def scale_now(scaler: torch.amp.GradScaler, like: Tensor) -> Tensor:
    """The loss scale, 0-dim, on the device of `like`: `get_scale` would wait for the device."""
    return scaler.scale(torch.ones_like(like))


def update_scale(scaler: torch.amp.GradScaler, like: Tensor) -> None:
    """Let the loss scale follow the step, within its bounds, without waiting for the device. One
    that is no scale, which nothing would bring down or up again, is begun anew."""
    scaler.update()
    scale = scale_now(scaler, like)
    usable = scale.isfinite() & (scale > 0)
    bounded = scale.clamp(SMALLEST_SCALE, LARGEST_SCALE)
    scaler.update(torch.where(usable, bounded, FIRST_SCALE))


class HalfPrecision:
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
        self._alarm(step, "overflows", overflows >= ALARM, f"{overflows} overflows in a row.")
        self._alarm(step, "scale", scale < LOW_SCALE, f"the loss scale is down to {scale:g}.")
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
        run.plan = replace(run.plan, recipe=plain("bf16"), compute_dtype="bf16")
        run.backend.compute_dtype = DTYPES["bf16"]
        for part in run.model.modules():
            if isinstance(part, MasterLinear):
                part.compute_dtype = DTYPES["bf16"]
