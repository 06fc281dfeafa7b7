"""The guard's checks of the amax history: repair before a step, a verdict after it. Both run on the
device, without a sync."""

from typing import NamedTuple

import torch
from torch import Tensor

from fp8stack.layers.delayed import DelayedScaling
from fp8stack.numerics.amax_history import decisive_amax
from fp8stack.planning.run_config import GuardConfig
from fp8stack.training.guard.spikes import LARGEST, spike_limit

_ROUNDING = 1e-5  # relative error of a scale, with room to spare


class Verdict(NamedTuple):
    """The verdict on a step's amaxes: whether an amax is not finite (`LARGEST` or more) and whether
    an amax is a spike, bool 0-dim; the column of the worst amax, -1 for none, and its value,
    float64 0-dim."""

    infinite: Tensor
    spikes: Tensor
    column: Tensor
    worst: Tensor


def nothing_judged(like: Tensor) -> Verdict:
    """The verdict on a step without amaxes, on the device of `like`."""
    none, nothing = torch.zeros_like(like, dtype=torch.bool), like.new_full((), -1).double()
    return Verdict(none, none, nothing, nothing)


class Amaxes:
    """Judges and repairs the FP8 state of a model, if `config` is enabled. The model has at least
    one slot; every slot gets `passes` amaxes per step, one per micro-batch."""

    def __init__(self, delayed: DelayedScaling, config: GuardConfig, passes: int) -> None:
        self.delayed, self.config, self.passes = delayed, config, passes
        self._before: list[Tensor] = []
        self._limits = torch.zeros(0)  # [slots]; an amax above its limit is a spike
        self._largest = torch.zeros(0)  # [slots]; the FP8 value that a scale maps the amax to
        self._has_history = torch.zeros(0, dtype=torch.bool)
        # Slots that were repaired since the monitor was last polled.
        self.cleared = torch.zeros(len(self.slots), dtype=torch.bool)

    @property
    def slots(self) -> list[str]:
        """The names of the slots, by column."""
        return self.delayed.history.slots

    def begin(self, device: torch.device) -> None:
        """Repair the state and take a snapshot of it, before the first forward pass of a step."""
        self.delayed.move(device)
        self.cleared = self.cleared.to(device)
        if self.config.enabled:
            self._repair()
        self._before = self.delayed.snapshot()

    def judge(self, like: Tensor) -> Verdict:
        """The verdict on the step's amaxes, on the device of `like`."""
        if not self.config.enabled:
            return nothing_judged(like)
        now, _ = self.delayed.amaxes(self.passes, 0)
        infinite = ~(now < LARGEST)
        # Limits are positive or infinite, so the ratio is never NaN.
        over = torch.where(infinite, torch.inf, now / self._limits)
        column = over.argmax()
        return Verdict(
            infinite.any(),
            (over > 1).any() & ~infinite.any(),
            column.double(),
            now.index_select(0, column[None])[0].double(),
        )

    def restore(self, where: Tensor) -> None:
        """Restore the snapshot of `begin` if `where`, bool and 0-dim, is true."""
        self.delayed.restore(self._before, where)

    def address(self) -> int:
        """The address of the history, which changes if it is moved: a key for CUDA graphs."""
        return self.delayed.history.history.data_ptr()

    def _repair(self) -> None:
        """Clear amaxes that no good step can have recorded, and recompute scales that do not follow
        from their amaxes: a step with wrong scales might look good. The state of good steps does
        not change by a bit.

        With the algorithm "max", a scale may be smaller than the window implies, because of an amax
        that has just left the window.
        """
        history, device = self.delayed.history, self.delayed.history.history.device
        if len(self._largest) != len(self.slots):
            quantizers = [self.delayed.quantizers[slot] for slot in self.slots]
            largest = [q.element.max * 2.0**-q.margin for q in quantizers]
            self._largest = torch.tensor(largest, device=device)
            # A window of length 1 is empty between two passes.
            self._has_history = torch.tensor(
                [q.history_length > 1 for q in quantizers], device=device
            )
        _, window = self.delayed.amaxes(0, self.config.window)
        is_usual = (window > 0) & (window < LARGEST)
        factor = self.config.amax_factor
        self._limits = spike_limit(window.where(is_usual, torch.nan), self.config, factor)
        rows, scales = history.history, history.scales
        rows.masked_fill_(rows >= LARGEST, torch.inf)  # cleared below
        usable = decisive_amax(rows.where(rows.isfinite(), 0.0), history.most_recent)
        wrong = scales * usable > self._largest * (1 + _ROUNDING)
        wrong |= scales < self._largest / LARGEST
        wrong |= self._has_history & (usable == 0) & (scales != 1)
        scales.masked_fill_(wrong, torch.nan)  # recomputed below
        self.cleared |= history.clear_nonfinite()
