"""Steps that are not finite are not taken, and nobody waits for the device to find out.

Flags on the device tell the optimizer; the host asks when it wants to. It must not know what a step
is made of, or what is done about one that failed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first step that could not be taken, with its loss and the norm of its gradient."""

    step: int
    loss: float
    norm: float


class FiniteWatch:
    """Has `optimizer` skip steps whose loss or gradient is not finite, and all after a failure.

    A fused torch optimizer changes no parameter, no moment and no step count while its attribute
    `found_inf` is a 1: that is how `torch.amp.GradScaler` has it skip a step. (One that is not
    fused refuses the attribute.) The tensor stays on the device, so that nothing waits for it.

    Args:
        optimizer: fused, all its parameters on `device`.
        device: where losses and norms are.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._skips = torch.zeros((), device=device)
        # Of the first failure: step, loss, norm. A step counts from 1: 0 is none.
        self._failure = torch.zeros(3, dtype=torch.float64, device=device)
        optimizer.found_inf = self._skips  # type: ignore[attr-defined]

    @torch.no_grad()
    def see(self, step: int, loss: Tensor, norm: Tensor, excused: Tensor | None = None) -> None:
        """Judge a step before its `optimizer.step()`, without waiting for the device.

        Args:
            step: its number, from 1.
            loss: 0-dim, on the device.
            norm: of the gradient, 0-dim, on the device.
            excused: bool, 0-dim, on the device: whether a step that is not finite is skipped only,
                as while a loss scale is being found. Otherwise it is a failure, and no later step
                is taken.
        """
        broken = ~(loss.isfinite() & norm.isfinite())
        fails = broken if excused is None else broken & ~excused
        number = torch.full_like(loss, step, dtype=torch.float64)
        now = torch.stack([number, loss.double(), norm.double()])
        first = fails & (self._failure[0] == 0)
        self._failure.copy_(torch.where(first, now, self._failure))
        self._skips.copy_(broken | (self._failure[0] > 0))

    def failure(self) -> Failure | None:
        """The step that failed first, if one did. This waits for the device."""
        step, loss, norm = self._failure.tolist()
        return Failure(step=int(step), loss=loss, norm=norm) if step else None
