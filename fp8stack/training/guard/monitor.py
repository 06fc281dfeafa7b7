"""Each step is judged on the device before the optimizer takes it; nobody waits for the verdict.

A bad step changes nothing: the optimizer skips it, and the FP8 state is put back. FP8 state that is
broken by itself is mended before a step uses it. The host polls for the verdicts when it wants to.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fp8stack.backends.delayed import DelayedScaling, several_ranks
from fp8stack.backends.operands import Draws
from fp8stack.checkpoint.state import largest_of_state
from fp8stack.config import GuardConfig
from fp8stack.ops.replay import Replayed
from fp8stack.optim.chained import optimizers_in
from fp8stack.optim.grad_clip import Norms
from fp8stack.training.guard.amax import Amaxes, nothing_judged
from fp8stack.training.guard.spikes import LARGEST, spike_limit

KEPT = 64  # how many bad steps are remembered between two polls
_MANY, _OF = 7, 21  # times patience: so many bad steps of the last so many are too many


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
    """A step that was not taken. The limits are those of a spike."""

    step: int
    loss: float
    norm: float
    causes: Cause
    slot: str | None = None  # the FP8 operand with the worst amax, if that is a cause
    amax: float = math.inf  # its amax
    loss_limit: float = math.inf  # infinite while too few good steps are known
    norm_limit: float = math.inf
    said: str = ""  # in place of the sentence that is made of these

    @property
    def why(self) -> str:
        """The causes, in a sentence."""
        if self.said:
            return self.said
        amax = "infinite" if self.amax == math.inf else f"{self.amax:.4g}"
        said = {
            Cause.LOSS: f"the loss is {self.loss:.4g}",
            Cause.GRADIENT: f"the gradient norm is {self.norm:.4g}",
            Cause.AMAX: f"the amax of {self.slot} is {amax}",
            Cause.LOSS_SPIKE: f"the loss {self.loss:.4g} is above its limit {self.loss_limit:.4g}",
            Cause.GRADIENT_SPIKE: f"the gradient norm {self.norm:.4g} is above its limit "
            f"{self.norm_limit:.4g}",
            Cause.AMAX_SPIKE: f"the amax of {self.slot} is far above those before it",
        }
        return " and ".join(text for cause, text in said.items() if cause in self.causes)


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What the monitor saw since the last poll."""

    bad: tuple[BadStep, ...]  # the bad steps, at most `KEPT`, oldest first
    streak: int  # how many steps in a row were bad up to now
    overflows: int  # how many steps in a row overflowed in fp16 up to now
    skipped: bool  # whether no optimizer took the last step, for either reason
    cleared: tuple[str, ...]  # slots whose history or scale was broken, and was mended
    # Whether bad steps are so many, in a row or among the last ones, that skipping them is not
    # enough.
    repeats: bool = False
    broken: bool = False  # whether a weight or a moment is not finite, or as good as infinite


class Monitor:
    """Has `optimizer` skip bad steps, and the FP8 state forget them.

    A fused torch optimizer changes no parameter, no moment and no step count while its attribute
    `found_inf` is a 1: that is how `torch.amp.GradScaler` has it skip a step. (One that is not
    fused refuses the attribute.) The tensor stays on the device, so that nothing waits for it.

    Of several optimizers in one, an overflow of fp16 has only those skip whose gradients have it.

    Args:
        optimizer: fused, all its parameters on one device, where losses and norms are too.
        config: what counts as bad. If it is not enabled, spikes do not, and after the first bad
            step none is taken.
        delayed: the amax history of the model, in delayed scaling: its amaxes are judged as well.
        passes: micro-batches per step: how many amaxes a slot gets.
        keep_norms: how many gradient norms of good steps to keep, in `norms`; 0 for none.
        draws: the counters of stochastic rounding, which a step that is skipped does not move.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        config: GuardConfig,
        delayed: DelayedScaling | None = None,
        passes: int = 1,
        keep_norms: int = 0,
        draws: Draws | None = None,
    ) -> None:
        self.config = config
        self._draws = draws or Draws()
        self._drawn: Tensor | None = None  # the counters before the step under way, [layers]
        kept = delayed is not None and delayed.history.slots  # none, if no layer is in FP8
        self.amaxes = Amaxes(delayed, config, passes) if delayed is not None and kept else None
        self._judged = self.amaxes  # in the step under way
        self._optimizer = optimizer
        # And not accelerate's: of "cuda" and the tensors' "cuda:0", torch says that they differ.
        self.device = device = optimizer.param_groups[0]["params"][0].device
        parts = optimizers_in(optimizer)
        self.skips = torch.zeros(len(parts), device=device)
        for part, skip in zip(parts, self.skips, strict=True):
            part.found_inf = skip  # type: ignore[attr-defined]
        self.norms = Norms(keep_norms, device) if keep_norms else None
        made: dict[str, Any] = {"dtype": torch.float64, "device": device}
        # Losses and norms of the last good steps, newest last; NaN where there was none yet.
        self._window = torch.full((config.window, 2), torch.nan, **made)
        self._factors = torch.tensor([config.loss_factor, config.gradient_factor], **made)
        self._streak, self._overflows = torch.zeros((), **made), torch.zeros((), **made)
        self._count = torch.zeros((), **made)  # of bad steps
        self._recent = torch.zeros(_OF * config.patience, **made)  # 1 where a step was bad
        self._log = torch.zeros(KEPT, _COLUMNS, **made)
        self._places = torch.arange(KEPT, device=device)
        self._powers = 2.0 ** torch.arange(len(Cause), **made)
        self._told = 0
        self._step = torch.zeros((), **made)  # that is judged
        self._given: list[Tensor] = []  # its loss and norms
        self._begins = Replayed(lambda: self._judged.begin(self.device) if self._judged else None)
        self._sees = Replayed(lambda: self._see(*self._given))

    @torch.no_grad()
    def begin(self, records_amaxes: bool = True) -> None:
        """Remember the FP8 state before a step; mend it first if it is broken and the step records
        amaxes."""
        counters = self._counters()
        self._drawn = torch.stack(counters) if counters else None
        self._judged = self.amaxes if records_amaxes else None
        if self._judged is not None:
            self._begins(self.device, self._judged.address())

    @torch.no_grad()
    def see(
        self,
        step: int,
        loss: Tensor,
        norm: Tensor,
        excused: Tensor | None = None,
        norms: Tensor | None = None,
    ) -> Tensor:
        """Judge a step after its backward passes and before its `optimizer.step()`.

        Args:
            step: its number, from 1.
            loss: 0-dim, on the device.
            norm: of the gradient, 0-dim, on the device.
            excused: bool, 0-dim, on the device: whether a gradient that is not finite is an
                overflow of fp16, to be skipped only, as while a loss scale is being found.
            norms: of the gradient, by optimizer, if there are several.

        Returns:
            The loss and the norm as all ranks see them: float64 [2].
        """
        self._step.fill_(step)
        if excused is not None or several_ranks() or self._drawn is not None:
            return self._see(loss, norm, norms, excused)
        given = [loss, norm] if norms is None else [loss, norm, norms]
        if [one.shape for one in given] != [one.shape for one in self._given]:
            self._given = [torch.empty_like(one) for one in given]
        torch._foreach_copy_(self._given, given)
        key = None if self._judged is None else self._judged.address()
        seen: Tensor = self._sees(self.device, key)
        return seen.clone()  # the next step writes over it

    def _see(
        self,
        loss: Tensor,
        norm: Tensor,
        norms: Tensor | None = None,
        excused: Tensor | None = None,
    ) -> Tensor:
        """See `see`."""
        amaxes = nothing_judged(loss) if self._judged is None else self._judged.judge(loss)
        now = torch.stack([loss, norm]).double()
        # Without the guard, only what is infinite is.
        largest = LARGEST if self.config.enabled else math.inf
        now, amax_infinite, amax_spike = _agreed(now, amaxes.infinite, amaxes.spikes, largest)
        finite = now.abs() < largest
        limits = spike_limit(self._window, self.config, self._factors)
        spikes = (now > limits) & self.config.enabled
        causes = torch.stack([*~finite, amax_infinite, *(spikes & finite), amax_spike])
        overflow = torch.zeros_like(amax_infinite)
        if excused is not None:
            overflow = excused & finite[0] & ~finite[1]
        bad = causes.any() & ~overflow
        # Nobody is there to do something about what was bad before, without a guard.
        not_taken = bad if self.config.enabled else bad | (self._count > 0)
        skip = not_taken | overflow
        said = torch.stack([(causes * self._powers).sum(), amaxes.column, amaxes.worst])
        row = torch.cat([self._step[None], now, said, limits])
        here = bad & (self._places == self._count % KEPT)
        self._log.copy_(torch.where(here[:, None], row, self._log))
        self._count += bad
        self._streak.copy_(torch.where(bad, self._streak + 1, torch.where(skip, self._streak, 0)))
        self._recent.copy_(torch.cat([self._recent[1:], bad.double()[None]]))
        more = torch.where(skip, self._overflows, 0)
        self._overflows.copy_(torch.where(overflow, self._overflows + 1, more))
        kept = torch.cat([self._window[1:], now[None]])
        self._window.copy_(torch.where(skip, self._window, kept))
        self.skips.copy_(not_taken | overflow & self._overflowed(norms, largest))
        if self.norms is not None:
            self.norms.add(now[1], ~skip)
        if self._judged is not None:
            self._judged.put_back(skip)
        if self._drawn is not None:
            counters = self._counters()
            put_back = torch.where(skip, self._drawn, torch.stack(counters))
            torch._foreach_copy_(counters, list(put_back.unbind()))
        return now

    def _counters(self) -> list[Tensor]:
        """Those of the layers that round at random, int64 and 0-dim."""
        return [layer.counter for layer in self._draws.layers.values()]

    def _overflowed(self, norms: Tensor | None, largest: float) -> Tensor:
        """Whose gradients are not finite: bool [optimizers]; all, if it is not clear whose."""
        if norms is None:
            return torch.ones_like(self.skips, dtype=torch.bool)
        found = ~(norms.abs() < largest)
        return found | ~found.any()

    def poll(self, looks: bool = True) -> Findings:
        """What happened since the last poll. This waits for the device.

        Args:
            looks: whether to look at all weights and moments, too, which is a pass over them. They
                are looked at in any case where steps were bad.
        """
        numbers = [self._count, self._streak, self._overflows, self.skips.min().double()]
        numbers += [self._recent.sum(), self._broken_state() if looks else self._count * 0]
        parts = [torch.stack(numbers), self._log.flatten()]
        if self.amaxes is not None:
            parts.append(self.amaxes.cleared.to(self._count))
        values = torch.cat(parts).tolist()
        count, streak, overflows, skipped, recent, broken = (int(value) for value in values[:6])
        values = values[6:]
        rows = [values[_COLUMNS * place : _COLUMNS * (place + 1)] for place in range(KEPT)]
        fresh = range(max(self._told, count - KEPT), count)
        self._told = count
        cleared = values[_COLUMNS * KEPT :]
        if self.amaxes is not None and any(cleared):
            self.amaxes.forget()
        if not looks and (fresh or streak):
            broken = int(self._broken_state())
        return Findings(
            bad=tuple(self._bad_step(rows[number % KEPT]) for number in fresh),
            streak=streak,
            overflows=overflows,
            skipped=bool(skipped),
            cleared=tuple(slot for slot, is_so in zip(self._slots, cleared, strict=False) if is_so),
            repeats=streak >= self.config.patience or recent >= _MANY * self.config.patience,
            broken=broken > 0,
        )

    def _broken_state(self) -> Tensor:
        """1 if a weight or moment is not finite, or as good as that, on any rank: float64, 0-dim;
        0 if nobody is there to do something about it."""
        if not self.config.enabled:
            return torch.zeros_like(self._count)
        broken = ~(largest_of_state(self._optimizer, 2) < LARGEST)
        return broken.double() if not several_ranks() else _sum_of_ranks(broken.double())

    @property
    def _slots(self) -> list[str]:
        return [] if self.amaxes is None else self.amaxes.slots

    def _bad_step(self, row: Sequence[float]) -> BadStep:
        step, loss, norm, causes, slot, amax, loss_limit, norm_limit = row
        found = Cause(int(causes))
        of_amax = Cause.AMAX in found or Cause.AMAX_SPIKE in found
        return BadStep(
            step=int(step),
            loss=loss,
            norm=norm,
            causes=found,
            slot=self._slots[int(slot)] if of_amax else None,
            amax=amax,
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
            "recent": [int(was_bad) for was_bad in self._recent.tolist()],
            "norms": [] if self.norms is None else self.norms.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Put back what `state` gave, the newest part of it if the window is shorter now."""
        known = state["window"][-self.config.window :]
        self._window.fill_(torch.nan)
        if known:
            self._window[-len(known) :] = self._window.new_tensor(known)
        self._streak.fill_(state["streak"])
        self._overflows.fill_(state["overflows"])
        if self.norms is not None:
            self.norms.load_state(state.get("norms", []))
        recent = state.get("recent", [])[-len(self._recent) :]  # older checkpoints have none
        self._recent.zero_()
        if recent:
            self._recent[-len(recent) :] = self._recent.new_tensor(recent)

    def forgive(self) -> None:
        """Begin a new streak."""
        self._streak.zero_()
        self._recent.zero_()

    @property
    def reach(self) -> int:
        """How many of the last steps are counted."""
        return len(self._recent)


_COLUMNS = 8  # of the log: a step, and what `_bad_step` takes


def _agreed(
    now: Tensor, infinite: Tensor, spike: Tensor, largest: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, norm and the verdicts on amaxes as all ranks see them, so that all decide alike: the
    mean, and not finite or bad if that is so on any rank."""
    if not several_ranks():
        return now, infinite, spike
    finite = now.abs() < largest
    flags = torch.stack([*~finite, infinite, spike]).double()
    shared = _sum_of_ranks(torch.cat([now.where(finite, 0.0), flags]))
    mean = shared[:2] / dist.get_world_size()
    return mean.where(shared[2:4] == 0, torch.nan), shared[4] > 0, shared[5] > 0


def _sum_of_ranks(values: Tensor) -> Tensor:
    """Changes `values`, too."""
    dist.all_reduce(values)
    return values
