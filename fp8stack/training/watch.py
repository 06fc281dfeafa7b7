"""Each step is judged on the device before the optimizer takes it; nobody waits for the verdict.

A bad step changes nothing: the optimizer skips it, and the FP8 state is put back. The host asks for
the verdicts when it wants to. It must not know what is done about steps that stay bad.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fp8stack.backends.delayed import DelayedScaling
from fp8stack.training.config import GuardConfig

KEPT = 64
"""How many bad steps are remembered between two looks."""
_MAD_TO_SIGMA = 1.4826  # of a normal distribution


class Cause(IntFlag):
    """Why a step is bad; the spikes are finite."""

    LOSS = 1
    GRADIENT = 2
    AMAX = 4
    LOSS_SPIKE = 8
    GRADIENT_SPIKE = 16
    AMAX_SPIKE = 32


NOT_FINITE = Cause.LOSS | Cause.GRADIENT | Cause.AMAX


@dataclass(frozen=True, kw_only=True)
class BadStep:
    """A step that was not taken. `slot` is the FP8 operand with the worst amax, if that is a cause.
    The limits are those of a spike; infinite while too few good steps are known. `said` replaces
    the sentence that is made of these."""

    step: int
    loss: float
    norm: float
    causes: Cause
    slot: str | None = None
    loss_limit: float = math.inf
    norm_limit: float = math.inf
    said: str = ""

    @property
    def why(self) -> str:
        """The causes, in a sentence."""
        if self.said:
            return self.said
        said = {
            Cause.LOSS: f"the loss is {self.loss:.4g}",
            Cause.GRADIENT: f"the gradient norm is {self.norm:.4g}",
            Cause.AMAX: f"the amax of {self.slot} is infinite",
            Cause.LOSS_SPIKE: f"the loss {self.loss:.4g} is above its limit {self.loss_limit:.4g}",
            Cause.GRADIENT_SPIKE: f"the gradient norm {self.norm:.4g} is above its limit "
            f"{self.norm_limit:.4g}",
            Cause.AMAX_SPIKE: f"the amax of {self.slot} is far above those before it",
        }
        return " and ".join(text for cause, text in said.items() if cause in self.causes)


@dataclass(frozen=True, kw_only=True)
class Look:
    """What the watch saw since the last look.

    Attributes:
        bad: the bad steps, at most `KEPT`, oldest first.
        streak: how many steps in a row were bad up to now.
        overflows: how many steps in a row overflowed in fp16 up to now.
        skipped: whether the last step was not taken, for either reason.
        cleared: slots whose history or scale was not finite, and was mended.
    """

    bad: tuple[BadStep, ...]
    streak: int
    overflows: int
    skipped: bool
    cleared: tuple[str, ...]


class Watch:
    """Has `optimizer` skip bad steps, and the FP8 state forget them.

    A fused torch optimizer changes no parameter, no moment and no step count while its attribute
    `found_inf` is a 1: that is how `torch.amp.GradScaler` has it skip a step. (One that is not
    fused refuses the attribute.) The tensor stays on the device, so that nothing waits for it.

    Args:
        optimizer: fused, all its parameters on one device, where losses and norms are too.
        config: what counts as bad. If it is not enabled, spikes do not, and after the first bad
            step none is taken.
        delayed: the amax history of the model, in delayed scaling: its amaxes are judged as well.
        passes: micro-batches per step: how many amaxes a slot gets.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        config: GuardConfig,
        delayed: DelayedScaling | None = None,
        passes: int = 1,
    ) -> None:
        self.config = config
        self.delayed = delayed
        self.passes = passes
        # And not accelerate's: of "cuda" and the tensors' "cuda:0", torch says that they differ.
        self.device = device = optimizer.param_groups[0]["params"][0].device
        self._skips = torch.zeros((), device=device)
        optimizer.found_inf = self._skips  # type: ignore[attr-defined]
        made: dict[str, Any] = {"dtype": torch.float64, "device": device}
        # Losses and norms of the last good steps, newest last; NaN where there was none yet.
        self._window = torch.full((config.window, 2), torch.nan, **made)
        self._factors = torch.tensor([config.loss_factor, config.gradient_factor], **made)
        self._streak = torch.zeros((), **made)
        self._overflows = torch.zeros((), **made)
        self._count = torch.zeros((), **made)  # of bad steps
        self._log = torch.zeros(KEPT, 7, **made)
        self._places = torch.arange(KEPT, device=device)
        self._powers = 2.0 ** torch.arange(len(Cause), **made)
        self._told = 0
        self._before: list[Tensor] = []
        self._cleared: Tensor | None = None

    def begin(self) -> None:
        """Remember the FP8 state, before the first pass of a step."""
        if self.delayed is not None:
            self.delayed.move(self.device)
            self._before = self.delayed.snapshot()

    @torch.no_grad()
    def see(self, step: int, loss: Tensor, norm: Tensor, excused: Tensor | None = None) -> None:
        """Judge a step after its backward passes and before its `optimizer.step()`.

        Args:
            step: its number, from 1.
            loss: 0-dim, on the device.
            norm: of the gradient, 0-dim, on the device.
            excused: bool, 0-dim, on the device: whether a gradient that is not finite is an
                overflow of fp16, to be skipped only, as while a loss scale is being found.
        """
        amax_infinite, amax_spike, slot = self._judge_amaxes(loss)
        now = torch.stack([loss, norm]).double()
        now, amax_infinite, amax_spike = _agreed(now, amax_infinite, amax_spike)
        finite = now.isfinite()
        limits = self._limits()
        spikes = now > limits if self.config.enabled else torch.zeros_like(finite)
        causes = torch.stack([*~finite, amax_infinite, *(spikes & finite), amax_spike])
        overflow = torch.zeros_like(amax_infinite)
        if excused is not None:
            overflow = excused & finite[0] & ~finite[1]
        bad = causes.any() & ~overflow
        skip = bad | overflow
        if not self.config.enabled:  # nobody is there to do something about it
            skip = skip | (self._count > 0)
        self._note(step, now, causes, slot, limits, bad)
        self._streak.copy_(torch.where(bad, self._streak + 1, torch.where(skip, self._streak, 0)))
        more = torch.where(skip, self._overflows, 0)
        self._overflows.copy_(torch.where(overflow, self._overflows + 1, more))
        kept = torch.cat([self._window[1:], now[None]])
        self._window.copy_(torch.where(skip, self._window, kept))
        self._skips.copy_(skip)
        if self.delayed is not None:
            self.delayed.put_back(self._before, skip)
            if self.config.enabled:
                cleared = self.delayed.history.clear_nonfinite()
                self._cleared = cleared if self._cleared is None else self._cleared | cleared

    def _note(
        self,
        step: int,
        now: Tensor,
        causes: Tensor,
        slot: Tensor,
        limits: Tensor,
        bad: Tensor,
    ) -> None:
        """Write a bad step into the log."""
        number = torch.full_like(now[:1], step)
        row = torch.cat([number, now, (causes * self._powers).sum()[None], slot[None], limits])
        here = bad & (self._places == self._count % KEPT)
        self._log.copy_(torch.where(here[:, None], row, self._log))
        self._count += bad

    def _limits(self) -> Tensor:
        """What the loss and the norm must not exceed: float64 [2]."""
        return _limit(self._window, self.config, self._factors)

    def _judge_amaxes(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Whether the amax of a slot is infinite, or spikes, and the column of the worst one:
        bool, bool and float64, 0-dim."""
        none = torch.zeros_like(like, dtype=torch.bool)
        if self.delayed is None or not self.config.enabled or not self.delayed.history.slots:
            return none, none, like.new_full((), -1, dtype=torch.float64)
        now, window = self.delayed.amaxes(self.passes, self.config.window)
        limit = _limit(window.where(window > 0, torch.nan), self.config, self.config.amax_factor)
        infinite = now.isinf()
        over = torch.where(infinite, now, now / limit)  # a limit is infinite or more than 0
        return infinite.any(), (over > 1).any() & ~infinite.any(), over.argmax().double()

    def look(self) -> Look:
        """What happened since the last look. This waits for the device."""
        counters = torch.stack([self._count, self._streak, self._overflows, self._skips.double()])
        parts = [counters, self._log.flatten()]
        if self._cleared is not None:
            parts.append(self._cleared.double())
        values = torch.cat(parts).tolist()
        count, streak, overflows, skipped = (int(value) for value in values[:4])
        rows = [values[4 + 7 * place : 11 + 7 * place] for place in range(KEPT)]
        fresh = range(max(self._told, count - KEPT), count)
        self._told = count
        cleared = values[4 + 7 * KEPT :]
        if any(cleared):
            self._cleared = None
        return Look(
            bad=tuple(self._bad_step(rows[number % KEPT]) for number in fresh),
            streak=streak,
            overflows=overflows,
            skipped=bool(skipped),
            cleared=tuple(slot for slot, is_so in zip(self._slots, cleared, strict=False) if is_so),
        )

    @property
    def _slots(self) -> list[str]:
        return [] if self.delayed is None else self.delayed.history.slots

    def _bad_step(self, row: Sequence[float]) -> BadStep:
        step, loss, norm, causes, slot, loss_limit, norm_limit = row
        found = Cause(int(causes))
        of_amax = Cause.AMAX in found or Cause.AMAX_SPIKE in found
        return BadStep(
            step=int(step),
            loss=loss,
            norm=norm,
            causes=found,
            slot=self._slots[int(slot)] if of_amax else None,
            loss_limit=loss_limit,
            norm_limit=norm_limit,
        )

    def state(self) -> dict[str, Any]:
        """What a run that goes on needs, as JSON data."""
        known = self._window[self._window.isfinite().all(dim=1)]
        return {
            "window": known.tolist(),
            "streak": int(self._streak),
            "overflows": int(self._overflows),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Put back what `state` gave, the newest part of it if the window is shorter now."""
        known = state["window"][-self.config.window :]
        self._window.fill_(torch.nan)
        if known:
            self._window[-len(known) :] = self._window.new_tensor(known)
        self._streak.fill_(state["streak"])
        self._overflows.fill_(state["overflows"])

    def forgive(self) -> None:
        """Begin a new streak."""
        self._streak.zero_()


def _limit(window: Tensor, config: GuardConfig, factor: float | Tensor) -> Tensor:
    """The largest value in each column that is no spike: [n, columns] -> [columns].

    The median and 1.4826 times the median absolute deviation stand for mean and standard deviation,
    so that what spiked before does not hide what spikes now. NaN is no value; infinite while there
    are fewer than `config.warmup`.
    """
    count = window.isfinite().sum(dim=0)
    median = _median(window, count)
    sigma = _MAD_TO_SIGMA * _median((window - median).abs(), count)
    limit = torch.maximum(median + config.deviations * sigma, factor * median)
    return torch.where(count >= config.warmup, limit, torch.inf)


def _median(values: Tensor, count: Tensor) -> Tensor:
    """The lower median of the `count` values of each column that are no NaN: [n, columns] ->
    [columns]. By sorting: torch.median picks nondeterministically on a GPU."""
    ordered = values.sort(dim=0).values  # NaN comes last
    place = ((count - 1).clamp(min=0) // 2)[None]
    return ordered.gather(0, place)[0]


def _agreed(now: Tensor, infinite: Tensor, spike: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, norm and the verdicts on amaxes as all ranks see them, so that all decide alike: the
    mean, and not finite or bad if that is so on any rank."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return now, infinite, spike
    finite = now.isfinite()
    flags = torch.stack([*~finite, infinite, spike]).double()
    shared = torch.cat([now.where(finite, 0.0), flags])
    dist.all_reduce(shared)
    mean = shared[:2] / dist.get_world_size()
    return mean.where(shared[2:4] == 0, torch.nan), shared[4] > 0, shared[5] > 0
