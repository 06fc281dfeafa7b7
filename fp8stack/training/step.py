"""One optimizer step of a run, as a device does it. It must not know what happens around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from fp8stack.checkpoint.state import random_state, restore_random_state
from fp8stack.optim.chained import optimizers_in
from fp8stack.optim.grad_clip import adaptive_limit, clip_gradients, total_norm
from fp8stack.optim.optimizer import learning_rate, set_learning_rate
from fp8stack.training.dataloader import inputs_of
from fp8stack.training.guard.monitor import Monitor
from fp8stack.training.metrics.debug_log import DebugLog, NoDebugLog
from fp8stack.training.phases import Phases
from fp8stack.training.run import Run


class Step:
    """Makes the steps of `run`, judged by `watch`, in the phase that each is in.

    Attributes:
        draws: whether a step draws random numbers; then what a bad one drew can be given back.
    """

    def __init__(self, run: Run, watch: Monitor, phases: Phases) -> None:
        self.run = run
        self.config = run.config
        self.watch = watch
        self.phases = phases
        self.draws = run.model.config.dropout > 0  # nothing else does
        self._random: dict[str, Tensor] = {}
        adaptive = run.config.clip_mode == "adaptive"
        self.norms = watch.keep_norms(run.config.clip_window) if adaptive else None
        self.events: NoDebugLog = NoDebugLog()
        self._told = run.config.debug_steps if run.ranks.is_main else 0
        if self._told:
            self.events = DebugLog(run)

    def __call__(self, step: int, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """One optimizer step over all micro-batches: the mean loss, and the gradient's norm before
        clipping, both 0-dim and of all ranks. A bad step changes nothing (in fp16 the loss scale
        falls).

        Nothing here waits for the device, AdamW's step included; of other optimizers one may.
        """
        optimizer, scaler, events = self.run.optimizer, self.run.scaler, self.events
        if self.draws:
            self._random = random_state()
        self.watch.begin()
        rate = learning_rate(step, self.config)
        set_learning_rate(optimizer, rate)
        events.begin(step)
        parts = tokens_BT.chunk(self.config.accumulate)
        events.add("batch", shape=list(tokens_BT.shape), micro_batches=len(parts))
        losses = [self.pass_of(step, part_BT, place) for place, part_BT in enumerate(parts)]
        if scaler is not None:
            for part in optimizers_in(optimizer):
                scaler.unscale_(part)  # an overflow in one rank's rows is known to all after it
        events.add("unscale", scale=None if scaler is None else scaler.now(losses[0]))
        if self.run.telemetry.due(step, 1, self.config.steps):
            self.run.telemetry.gradients(self.run.model)
        norms = self.clip()
        mean, norm = torch.stack(losses).mean(), total_norm(norms)
        # Where the loss scale can fall no more, an overflow is as bad as any other.
        excused = None if scaler is None else scaler.can_fall(norm)
        seen = self.watch.see(step, mean, norm, excused, norms)
        events.add("judge", loss=seen[0], norm=seen[1], skip=self.watch.skips.bool())
        optimizer.step()  # and not `scaler.step`, which would overrule the watch
        events.add("optimizer", lr=rate)
        if scaler is not None:
            scaler.update()
        events.add("update_scale", scale=None if scaler is None else scaler.now(norm))
        optimizer.zero_grad(set_to_none=True)
        self._has_told()
        return seen[0], seen[1]

    def pass_of(self, step: int, part_BT: Tensor, place: int) -> Tensor:
        """A forward and a backward pass over a micro-batch, the `place`-th: its loss. Gradients are
        those of the mean over all of them, times the loss scale."""
        run, scaler, events = self.run, self.run.scaler, self.events
        ranks = run.ranks.count
        with run.accelerator.accumulate(run.wrapped), self.observed(step, place > 0):
            loss: Tensor = run.wrapped(*inputs_of(part_BT))
            told = loss.detach()
            events.add("forward", loss=told)
            # accelerate divides by the number of micro-batches; ranks' gradients are summed.
            loss = loss / ranks if ranks > 1 else loss
            scaled = loss if scaler is None else scaler.scale(loss)
            events.add("scale_loss", loss=scaled.detach())
            run.accelerator.backward(scaled)
            # Here, so that ranks of which one looks, uncompiled, do it in the same order.
            if run.backend.delayed is not None:
                run.backend.delayed.settle()
            events.add("backward")
        return told

    def clip(self) -> Tensor:
        """Bound the gradients as configured: their norms before, by optimizer."""
        config = self.config
        limit: float | Tensor = config.clip
        if self.norms is not None:
            limit = adaptive_limit(self.norms, config.clip_percentile, config.clip)
        run = self.run
        order = run.model.parameters()  # plain torch's
        norms = clip_gradients(run.optimizer, limit, config.clip_mode, run.scaler, order)
        self.events.add("clip", mode=config.clip_mode, norm=total_norm(norms), limit=limit)
        return norms

    def _has_told(self) -> None:
        """Count down the steps that are written down."""
        self._told -= 1
        if self._told == 0:
            self.events = NoDebugLog()

    @contextmanager
    def observed(self, step: int, again: bool) -> Iterator[None]:
        """Have telemetry and the calibration of a later phase see a micro-batch, where one is due:
        the first of a step."""
        run = self.run
        telemetry = run.telemetry
        looks = telemetry.sees_operands and telemetry.due(step, 1, self.config.steps)
        calibrates = self.phases.calibrates(step)
        if again or not (looks or calibrates):
            yield
            return
        # Compiled code has no place for hooks.
        eager = torch.compiler.set_stance("force_eager") if run.config.compile else nullcontext()
        calibrating = self.phases.calibrating() if calibrates else nullcontext()
        sampling = telemetry.sampling(run.model) if looks else nullcontext()
        with eager, calibrating, sampling:
            yield

    def give_back(self) -> None:
        """Have the next step draw what the last one drew, which was not taken."""
        if self.draws:
            restore_random_state(self._random)
