"""The loss scale of fp16: torch's `GradScaler`, kept within bounds, with a count of overflows. It
works in any training loop."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from fp8stack.common.errors import UserError
from fp8stack.planning.run_config import RunConfig

FIRST_SCALE = 65536.0  # torch's own


@dataclass(frozen=True, kw_only=True)
class ScaleStatistics:
    """Statistics of a loss scale: the steps, the steps that overflowed, and the current scale."""

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
    """A `torch.amp.GradScaler` whose scale stays within bounds, or is static.

    Use it like torch's: `scaler.scale(loss).backward()`, `scaler.unscale_(optimizer)`,
    `scaler.step(optimizer)`, and one `scaler.update()` per step, whatever the number of optimizers.
    `update` does not wait for the device. The scale of torch's class has no bounds: repeated
    overflows halve it to 0, and the next step divides by 0.

    Args:
        device: the type of the loss's device: "cpu", "cuda", "xpu".
        first: the initial value of a dynamic scale.
        interval: steps in a row without an overflow after which the scale is multiplied by
            `growth`.
        growth: a factor above 1. Scaling by a power of two does not round.
        backoff: a factor between 0 and 1, by which an overflow multiplies the scale.
        smallest: the smallest scale, above 0.
        largest: the largest scale.
        static: a scale that never changes; None for a dynamic scale.

    Raises:
        UserError: a scale is out of bounds, or a factor, a bound or the interval is invalid.
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
        if not isinstance(device, str | torch.device):
            raise UserError(
                f"device {device!r} is no device, such as 'cpu' or 'cuda'. To set the initial "
                "scale, pass first."
            )
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
        self._counts: Tensor | None = None  # steps and overflows, on the device
        self._counted = [0, 0]  # the initial values of `_counts`

    @property
    def is_dynamic(self) -> bool:
        """Whether the scale changes with the steps."""
        return self.static is None

    def now(self, like: Tensor) -> Tensor:
        """The scale: float32, 0-dim, on the device of `like`, without waiting for the device as
        `get_scale` does."""
        return self.scale(torch.ones_like(like, dtype=torch.float32))

    def can_fall(self, like: Tensor) -> Tensor:
        """Whether an overflow would lower the scale: bool, 0-dim, on the device of `like`."""
        return (self.now(like) > self._bounds[0]) & self.is_dynamic

    @torch.no_grad()
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale after a step, within its bounds, and count the step; or set the scale to
        `new_scale`, within its bounds, and count no step. A scale that is 0 or not finite, and so
        could not recover, is reset to its initial value."""
        if not self.is_enabled():
            return
        if new_scale is None:
            self._count()
        super().update(new_scale)
        scale = self._scale
        assert scale is not None  # torch's `update` raises if it is
        if self.static is not None:
            scale.fill_(self.static)
            return
        usable = scale.isfinite() & (scale > 0)
        bounded = scale.clamp(*self._bounds)
        scale.copy_(torch.where(usable, bounded, self._first))

    def _count(self) -> None:
        """Count the step, and whether the gradients of any optimizer overflowed."""
        assert self._scale is not None
        overflows = [
            flag.to(self._scale.device, non_blocking=True)
            for state in self._per_optimizer_states.values()
            for flag in state["found_inf_per_device"].values()
        ]
        if not overflows:  # torch's `update` raises an error
            return
        if self._counts is None:
            kind = {"dtype": torch.int64, "device": overflows[0].device}
            self._counts = torch.tensor(self._counted, **kind)
        overflowed = torch.stack(overflows).sum() > 0
        self._counts += torch.stack([torch.ones_like(overflowed), overflowed])

    def statistics(self) -> ScaleStatistics:
        """The counts and the scale. This waits for the device."""
        steps, overflows = self._counted if self._counts is None else self._counts.tolist()
        return ScaleStatistics(steps=steps, overflows=overflows, scale=self.get_scale())

    def state_dict(self) -> dict[str, Any]:
        """torch's state and the counts, as JSON data."""
        counts = self.statistics()
        return super().state_dict() | {"steps": counts.steps, "overflows": counts.overflows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a `state_dict` of this class, or of torch's, which has no counts. A static scale
        does not change."""
        super().load_state_dict(state_dict)
        if self.static is not None:
            self._init_scale = self.static
            if self._scale is not None:
                self._scale.fill_(self.static)
        self._counted = [int(state_dict.get(key, 0)) for key in ("steps", "overflows")]
        self._counts = None


def build_scaler(config: RunConfig, device: torch.device) -> LossScaler:
    """Build the loss scaler of a run in fp16. Raises what `LossScaler` does."""
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
    """Raise a UserError that names the first invalid argument of a scaler."""
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
    states = scaler._per_optimizer_states  # torch 2.13 has no public name for this
    return id(optimizer) in states and states[id(optimizer)]["stage"] is not OptState.READY
