"""The loss scale of fp16: torch's `GradScaler`, kept within bounds, and counting what it skipped.
It serves any training loop."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from fp8stack.config import RunConfig
from fp8stack.errors import UserError

FIRST_SCALE = 65536.0  # torch's own


@dataclass(frozen=True, kw_only=True)
class ScaleStatistics:
    """What a loss scale has seen: steps, those of them that overflowed, and what it is now."""

    steps: int
    overflows: int
    scale: float

    @property
    def rate(self) -> float:
        """The share of steps that overflowed: 0 to 1."""
        return self.overflows / self.steps if self.steps else 0.0

    def __str__(self) -> str:
        return (
            f"loss scale {self.scale:g}, {self.overflows:,} of {self.steps:,} steps overflowed "
            f"({100 * self.rate:.2f} %)"
        )


class LossScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` whose scale stays within bounds, or is one for good.

    It is used as torch's is: `scaler.scale(loss).backward()`, `scaler.unscale_(optimizer)`,
    `scaler.step(optimizer)`, and one `scaler.update()` per step, whatever the number of optimizers.
    `update` waits for no device. torch's own scale has no bounds: halved again and again it becomes
    0, by which the next step divides.

    Args:
        device: the kind of device that the loss is on: "cpu", "cuda".
        first: what a dynamic scale begins with.
        interval: steps in a row without an overflow after which it is multiplied by `growth`.
        growth: above 1. Scales that are powers of two round nothing.
        backoff: between 0 and 1: what an overflow multiplies the scale by.
        smallest: the smallest scale, above 0.
        largest: the largest scale.
        static: a scale that stays; None for a dynamic one.

    Raises:
        UserError: a scale beyond the bounds, or a factor, a bound or an interval that cannot be.
    """

    def __init__(
        self,
        device: str = "cuda",
        first: float = FIRST_SCALE,
        interval: int = 2000,
        static: float | None = None,
        *,
        growth: float = 2.0,
        backoff: float = 0.5,
        smallest: float = 1.0,
        largest: float = 262144.0,
    ) -> None:
        _check(interval, growth, backoff, smallest, largest)
        for name, scale in (("first_loss_scale", first), ("loss_scale", static)):
            if scale is None or smallest <= scale <= largest:
                continue
            wider = "raise max_loss_scale" if scale > largest else "lower min_loss_scale"
            raise UserError(
                f"{name} {scale:.12g} is not between min_loss_scale {smallest:.12g} and "
                f"max_loss_scale {largest:.12g}. Choose a power of two in between, or {wider} to "
                f"{scale:.12g} too."
            )
        super().__init__(
            device,
            init_scale=static or first,
            growth_factor=growth,
            backoff_factor=backoff,
            growth_interval=interval,
        )
        self.static, self._first = static, first
        self._bounds = (smallest, largest)
        self._counts: Tensor | None = None  # of steps and overflows, on the device
        self._counted = [0, 0]  # what they begin with

    @property
    def is_dynamic(self) -> bool:
        """Whether the scale follows the steps."""
        return self.static is None

    def now(self, like: Tensor) -> Tensor:
        """The scale, float32, 0-dim, on the device of `like`: `get_scale` would wait for it."""
        return self.scale(torch.ones_like(like, dtype=torch.float32))

    def can_fall(self, like: Tensor) -> Tensor:
        """Whether an overflow would lower the scale: bool, 0-dim, on the device of `like`."""
        return (self.now(like) > self._bounds[0]) & self.is_dynamic

    @torch.no_grad()
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Let the scale follow the step, within its bounds, and count the step; or set it to
        `new_scale`, within its bounds, and count none. A scale that is none, which nothing would
        bring down or up again, is begun anew."""
        if not self.is_enabled():
            return
        if new_scale is None:
            self._count()
        super().update(new_scale)
        scale = self._scale
        assert scale is not None  # or the update of torch's would have raised
        if self.static is not None:
            scale.fill_(self.static)
            return
        usable = scale.isfinite() & (scale > 0)
        bounded = scale.clamp(*self._bounds)
        scale.copy_(torch.where(usable, bounded, self._first))

    def _count(self) -> None:
        """Count the step, and whether the gradients of any optimizer overflowed."""
        assert self._scale is not None
        found = [
            flag.to(self._scale.device, non_blocking=True)
            for state in self._per_optimizer_states.values()
            for flag in state["found_inf_per_device"].values()
        ]
        if not found:  # torch's update says what is wrong
            return
        if self._counts is None:
            kind = {"dtype": torch.int64, "device": found[0].device}
            self._counts = torch.tensor(self._counted, **kind)
        overflowed = torch.stack(found).sum() > 0
        self._counts += torch.stack([torch.ones_like(overflowed), overflowed])

    def statistics(self) -> ScaleStatistics:
        """What was counted. This waits for the device."""
        steps, overflows = self._counted if self._counts is None else self._counts.tolist()
        return ScaleStatistics(steps=steps, overflows=overflows, scale=self.get_scale())

    def state_dict(self) -> dict[str, Any]:
        """torch's state and what was counted, as JSON data."""
        seen = self.statistics()
        return super().state_dict() | {"steps": seen.steps, "overflows": seen.overflows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put back what `state_dict` gave, or torch's own, without counts. A static scale stays."""
        super().load_state_dict(state_dict)
        if self.static is not None:
            self._init_scale = self.static
            if self._scale is not None:
                self._scale.fill_(self.static)
        self._counted = [int(state_dict.get(key, 0)) for key in ("steps", "overflows")]
        self._counts = None


def build_scaler(config: RunConfig, device: torch.device) -> LossScaler:
    """The loss scaler that a run in fp16 asks for. Raises what `LossScaler` does."""
    return LossScaler(
        device.type,
        config.first_loss_scale,
        config.loss_scale_interval,
        config.loss_scale,
        growth=config.loss_scale_growth,
        backoff=config.loss_scale_backoff,
        smallest=config.min_loss_scale,
        largest=config.max_loss_scale,
    )


def _check(interval: int, growth: float, backoff: float, smallest: float, largest: float) -> None:
    """Raise a UserError that names the first of a scaler's numbers that cannot be."""
    bounds = f"min_loss_scale {smallest:.12g} and max_loss_scale {largest:.12g}"
    for possible, wrong, instead in (
        (interval >= 1, f"loss_scale_interval {interval} is below 1", "1 or more steps"),
        (1 < growth < math.inf, f"loss_scale_growth {growth:g} is not above 1",
         "a factor such as 2"),
        (0 < backoff < 1, f"loss_scale_backoff {backoff:g} is not between 0 and 1",
         "a factor such as 0.5"),
        (0 < smallest <= largest < math.inf, f"{bounds} are no range of positive numbers",
         "a larger max_loss_scale"),
    ):  # fmt: skip
        if not possible:
            raise UserError(f"{wrong}. Choose {instead}.")


def is_unscaled(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
    """Whether `scaler.unscale_(optimizer)` was called since the last update."""
    states = scaler._per_optimizer_states  # torch has no public name for it (2.13)
    return id(optimizer) in states and states[id(optimizer)]["stage"] is not OptState.READY
