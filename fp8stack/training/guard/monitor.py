"""Judges each step on the device before the optimizer takes it, without a sync.

A bad step changes nothing: the optimizer skips it, and the FP8 state is restored. Broken FP8 state
is repaired before a step uses it. The host polls for the verdicts.
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

from fp8stack.layers.delayed import DelayedScaling
from fp8stack.layers.kernels.replay import Replayed
from fp8stack.layers.operands import RngState
from fp8stack.layers.shared_amaxes import several_ranks
from fp8stack.planning.run_config import GuardConfig
from fp8stack.training.checkpoint.state import largest_of_state
from fp8stack.training.guard.amax_checks import Amaxes, nothing_judged
from fp8stack.training.guard.spikes import LARGEST, spike_limit
from fp8stack.training.optim.chained import optimizers_in
from fp8stack.training.optim.grad_clip import NormHistory, keep_newest

LOG_ROWS = 64  # bad steps that are remembered between two polls, unless a monitor keeps more
_MANY, _OF = 7, 21  # 7 * patience bad steps among the last 21 * patience are too many


class Cause(IntFlag):
    """The cause of a bad step: a value is not finite, or is finite but a spike."""

    LOSS = 1
    GRADIENT = 2
    AMAX = 4
    LOSS_SPIKE = 8
    GRADIENT_SPIKE = 16
    AMAX_SPIKE = 32


NOT_FINITE = Cause.LOSS | Cause.GRADIENT | Cause.AMAX


@dataclass(frozen=True, kw_only=True)
class BadStep:
    """A step that the optimizer skipped. Losses and norms above their limits are spikes."""

    step: int
    loss: float
    norm: float
    causes: Cause
    slot: str | None = None  # the FP8 operand with the worst amax, if that is a cause
    amax: float = math.inf  # its amax
    loss_limit: float = math.inf  # infinite while there are too few good steps
    norm_limit: float = math.inf
    said: str = ""  # the text of `reason`; if empty, `reason` builds it from the fields above

    @property
    def reason(self) -> str:
        """The causes, in a sentence."""
        if self.said:
            return self.said
        amax = "infinite" if self.amax == math.inf else f"{self.amax:.4g}"
        texts = {
            Cause.LOSS: f"the loss is {self.loss:.4g}",
            Cause.GRADIENT: f"the gradient norm is {self.norm:.4g}",
            Cause.AMAX: f"the amax of {self.slot} is {amax}",
            Cause.LOSS_SPIKE: f"the loss {self.loss:.4g} is above its limit {self.loss_limit:.4g}",
            Cause.GRADIENT_SPIKE: f"the gradient norm {self.norm:.4g} is above its limit "
            f"{self.norm_limit:.4g}",
            Cause.AMAX_SPIKE: f"the amax of {self.slot} is far above those before it",
        }
        return " and ".join(text for cause, text in texts.items() if cause in self.causes)

    def to_json(self) -> dict[str, Any]:
        """The step as JSON data to save in a checkpoint, with the text of its causes."""
        values = {"step": self.step, "causes": int(self.causes), "slot": self.slot}
        return values | {"said": self.reason}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> BadStep:
        """The step of `to_json`, whose loss and norm are not known."""
        causes = Cause(saved["causes"])
        return cls(**{**saved, "causes": causes, "loss": math.nan, "norm": math.nan})


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The monitor's verdicts since the last poll."""

    bad: tuple[BadStep, ...]  # the bad steps, at most `log_rows`, oldest first
    streak: int  # number of bad steps in a row, up to the last step
    overflows: int  # number of steps in a row that overflowed in fp16, up to the last step
    skipped: bool  # whether all optimizers skipped the last step, as bad or as an overflow
    cleared: tuple[str, ...]  # slots whose broken history or scale was repaired
    repeats: bool = False  # whether too many of the last steps, or too many in a row, are bad
    broken: bool = False  # whether a weight or a moment is not finite (`LARGEST` or more)


class Monitor:
    """Makes `optimizer` skip bad steps, and restores the FP8 state after them.

    A fused torch optimizer changes no parameter, moment or step count while its attribute
    `found_inf` is 1; this is how `torch.amp.GradScaler` makes it skip a step. (Optimizers that are
    not fused reject the attribute.) The tensor stays on the device, so no sync is needed.

    In a ChainedOptimizer, an fp16 overflow makes only the optimizers skip whose gradients
    overflowed.

    Args:
        optimizer: fused; all its parameters, the losses and the norms are on one device.
        config: what counts as a bad step. If the guard is not enabled, spikes do not count, and all
            steps after the first bad step are skipped.
        delayed: the FP8 state of delayed scaling, whose amaxes are judged too.
        passes: micro-batches per step; every micro-batch records an amax in every slot.
        keep_norms: the number of gradient norms of good steps to keep in `norms`; 0 for none.
        draws: the counters of stochastic rounding, which are restored after a skipped step.
        log_rows: the bad steps that are remembered between two polls.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        config: GuardConfig,
        delayed: DelayedScaling | None = None,
        passes: int = 1,
        keep_norms: int = 0,
        draws: RngState | None = None,
        log_rows: int = LOG_ROWS,
    ) -> None:
        self.config = config
        self._draws = draws or RngState()
        self._drawn: Tensor | None = None  # the counters before the current step, [layers]
        has_slots = delayed is not None and delayed.history.slots  # none, if no layer is in FP8
        self.amaxes = Amaxes(delayed, config, passes) if delayed is not None and has_slots else None
        self._recording = self.amaxes  # None if the current step records no amaxes
        self._optimizer = optimizer
        # Not accelerate's: its "cuda" is not equal to the tensors' "cuda:0".
        self.device = device = optimizer.param_groups[0]["params"][0].device
        optimizers = optimizers_in(optimizer)
        self.skips = torch.zeros(len(optimizers), device=device)
        for member, skip in zip(optimizers, self.skips, strict=True):
            member.found_inf = skip  # type: ignore[attr-defined]
        self.norms = NormHistory(keep_norms, device) if keep_norms else None
        options: dict[str, Any] = {"dtype": torch.float64, "device": device}
        # Losses and norms of the last good steps, newest last; NaN in rows not filled yet.
        self._window = torch.full((config.window, 2), torch.nan, **options)
        self._factors = torch.tensor([config.loss_factor, config.gradient_factor], **options)
        self._streak, self._overflows = torch.zeros((), **options), torch.zeros((), **options)
        self._count = torch.zeros((), **options)  # all bad steps so far
        self._recent = torch.zeros(_OF * config.patience, **options)  # 1 where a step was bad
        self._log = torch.zeros(log_rows, _COLUMNS, **options)
        self._rows = torch.arange(log_rows, device=device)
        self._powers = 2.0 ** torch.arange(len(Cause), **options)
        self._polled = 0  # the number of bad steps that `poll` has returned
        self._step = torch.zeros((), **options)  # the step to judge
        self._inputs: list[Tensor] = []  # loss and norms of the step to judge
        self._begin = Replayed(
            lambda: self._recording.begin(self.device) if self._recording else None
        )
        self._replayed_judge = Replayed(lambda: self._judge(*self._inputs))

    @torch.no_grad()
    def begin(self, records_amaxes: bool = True) -> None:
        """Take a snapshot of the FP8 state before a step, after repairing it if the step records
        amaxes."""
        self._draws.move(self.device)  # layers move their counters in the first pass only
        counters = self._counters()
        self._drawn = torch.stack(counters) if counters else None
        self._recording = self.amaxes if records_amaxes else None
        if self._recording is not None:
            self._begin(self.device, self._recording.address())

    @torch.no_grad()
    def judge(
        self,
        step: int,
        loss: Tensor,
        norm: Tensor,
        excused: Tensor | None = None,
        norms: Tensor | None = None,
    ) -> Tensor:
        """Judge a step after its backward passes and before its `optimizer.step()`.

        Args:
            step: the number of the step, from 1.
            loss: 0-dim, on the device.
            norm: the gradient norm, 0-dim, on the device.
            excused: bool, 0-dim, on the device: whether a gradient that is not finite counts as an
                fp16 overflow, which is skipped but not bad.
            norms: the gradient norm of each optimizer, [optimizers], if there are several.

        Returns:
            The loss and the norm, the same on all ranks: float64 [2].
        """
        self._step.fill_(step)
        if excused is not None or several_ranks() or self._drawn is not None:
            return self._judge(loss, norm, norms, excused)
        inputs = [loss, norm] if norms is None else [loss, norm, norms]
        if [tensor.shape for tensor in inputs] != [tensor.shape for tensor in self._inputs]:
            self._inputs = [torch.empty_like(tensor) for tensor in inputs]
        torch._foreach_copy_(self._inputs, inputs)
        key = None if self._recording is None else self._recording.address()
        result: Tensor = self._replayed_judge(self.device, key)
        return result.clone()  # the next step overwrites it

    def _judge(
        self,
        loss: Tensor,
        norm: Tensor,
        norms: Tensor | None = None,
        excused: Tensor | None = None,
    ) -> Tensor:
        """See `judge`."""
        amaxes = nothing_judged(loss) if self._recording is None else self._recording.judge(loss)
        now = torch.stack([loss, norm]).double()
        # If the guard is not enabled, only infinite values are bad.
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
        # If the guard is not enabled, nothing repairs the run after a bad step: skip the rest.
        not_taken = bad if self.config.enabled else bad | (self._count > 0)
        skip = not_taken | overflow
        verdict = torch.stack([(causes * self._powers).sum(), amaxes.column, amaxes.worst])
        row = torch.cat([self._step[None], now, verdict, limits])
        is_next_row = bad & (self._rows == self._count % len(self._rows))
        self._log.copy_(torch.where(is_next_row[:, None], row, self._log))
        self._count += bad
        self._streak.copy_(torch.where(bad, self._streak + 1, torch.where(skip, self._streak, 0)))
        self._recent.copy_(torch.cat([self._recent[1:], bad.double()[None]]))
        more = torch.where(skip, self._overflows, 0)
        self._overflows.copy_(torch.where(overflow, self._overflows + 1, more))
        shifted = torch.cat([self._window[1:], now[None]])
        self._window.copy_(torch.where(skip, self._window, shifted))
        self.skips.copy_(not_taken | overflow & self._overflowed(norms, largest))
        if self.norms is not None:
            self.norms.add(now[1], ~skip)
        if self._recording is not None:
            self._recording.restore(skip)
        if self._drawn is not None:
            counters = self._counters()
            restored = torch.where(skip, self._drawn, torch.stack(counters))
            torch._foreach_copy_(counters, list(restored.unbind()))
        return now

    def _counters(self) -> list[Tensor]:
        """The counters of the layers that round stochastically, int64 and 0-dim."""
        return [layer.counter for layer in self._draws.layers.values()]

    def _overflowed(self, norms: Tensor | None, largest: float) -> Tensor:
        """A mask of the optimizers with gradients that are not finite: bool [optimizers]; all True
        if unknown."""
        if norms is None:
            return torch.ones_like(self.skips, dtype=torch.bool)
        overflowed = ~(norms.abs() < largest)
        return overflowed | ~overflowed.any()

    def poll(self, check_weights: bool = True) -> Findings:
        """The verdicts since the last poll. This waits for the device.

        Args:
            check_weights: whether to check that weights and moments are finite, which reads all of
                them. After bad steps they are checked in any case.
        """
        numbers = [self._count, self._streak, self._overflows, self.skips.min().double()]
        numbers += [self._recent.sum(), self._broken_state() if check_weights else self._count * 0]
        tensors = [torch.stack(numbers), self._log.flatten()]
        if self.amaxes is not None:
            tensors.append(self.amaxes.cleared.to(self._count))
        values = torch.cat(tensors).tolist()
        count, streak, overflows, skipped, recent, broken = (int(value) for value in values[:6])
        values = values[6:]
        size = len(self._rows)
        rows = [values[_COLUMNS * row : _COLUMNS * (row + 1)] for row in range(size)]
        new = range(max(self._polled, count - size), count)
        self._polled = count
        cleared = values[_COLUMNS * size :]
        if self.amaxes is not None and any(cleared):
            self.amaxes.cleared.zero_()
        if not check_weights and (new or streak):
            broken = int(self._broken_state())
        return Findings(
            bad=tuple(self._bad_step(rows[number % size]) for number in new),
            streak=streak,
            overflows=overflows,
            skipped=bool(skipped),
            cleared=tuple(slot for slot, is_so in zip(self._slots, cleared, strict=False) if is_so),
            repeats=streak >= self.config.patience or recent >= _MANY * self.config.patience,
            broken=broken > 0,
        )

    def _broken_state(self) -> Tensor:
        """Whether a weight or moment is not finite (`LARGEST` or more) on any rank: above 0 or 0,
        float64, 0-dim; always 0 if the guard is not enabled."""
        if not self.config.enabled:
            return torch.zeros_like(self._count)
        broken = ~(largest_of_state(self._optimizer, 2) < LARGEST)
        return broken.double() if not several_ranks() else _sum_of_ranks(broken.double())

    @property
    def _slots(self) -> list[str]:
        return [] if self.amaxes is None else self.amaxes.slots

    def _bad_step(self, row: Sequence[float]) -> BadStep:
        step, loss, norm, causes, slot, amax, loss_limit, norm_limit = row
        cause = Cause(int(causes))
        of_amax = Cause.AMAX in cause or Cause.AMAX_SPIKE in cause
        return BadStep(
            step=int(step),
            loss=loss,
            norm=norm,
            causes=cause,
            slot=self._slots[int(slot)] if of_amax else None,
            amax=amax,
            loss_limit=loss_limit,
            norm_limit=norm_limit,
        )

    def state(self) -> dict[str, Any]:
        """The state to save in a checkpoint, as JSON data."""
        good_rows = self._window[self._window.isfinite().all(dim=1)]
        return {
            "window": good_rows.tolist(),
            "streak": int(self._streak),
            "overflows": int(self._overflows),
            "recent": [int(was_bad) for was_bad in self._recent.tolist()],
            "norms": [] if self.norms is None else self.norms.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the `state` of a checkpoint; only its newest rows if the window is shorter
        now."""
        keep_newest(self._window, state["window"], torch.nan)
        self._streak.fill_(state["streak"])
        self._overflows.fill_(state["overflows"])
        if self.norms is not None:
            self.norms.load_state(state.get("norms", []))
        keep_newest(self._recent, state.get("recent", []), 0.0)  # older checkpoints have none

    def forgive(self) -> None:
        """Forget the last bad steps: the streak starts again at 0, and no step was skipped."""
        self.skips.zero_()
        self._streak.zero_()
        self._recent.zero_()

    @property
    def reach(self) -> int:
        """The number of last steps that `Findings.repeats` looks at."""
        return len(self._recent)


_COLUMNS = 8  # of the log, see `_bad_step`


def _agreed(
    now: Tensor, infinite: Tensor, spike: Tensor, largest: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, norm and the verdicts on amaxes over all ranks, so that all ranks decide the same: the
    mean loss and norm, NaN if not finite on any rank, and whether any rank has a bad amax."""
    if not several_ranks():
        return now, infinite, spike
    finite = now.abs() < largest
    flags = torch.stack([*~finite, infinite, spike]).double()
    shared = _sum_of_ranks(torch.cat([now.where(finite, 0.0), flags]))
    mean = shared[:2] / dist.get_world_size()
    return mean.where(shared[2:4] == 0, torch.nan), shared[4] > 0, shared[5] > 0


def _sum_of_ranks(values: Tensor) -> Tensor:
    """The sum over ranks, in place."""
    dist.all_reduce(values)
    return values
