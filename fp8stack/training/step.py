"""One optimizer step of a run, as a device does it."""

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
    """Makes the steps of `run`, judged by `monitor`, in the phase that each is in.

    Attributes:
        draws: whether a step draws random numbers; then what a bad one drew can be given back.
    """

    def __init__(self, run: Run, monitor: Monitor, phases: Phases) -> None:
        self.run = run
        self.config = run.config
        self.monitor, self.phases = monitor, phases
        self.draws = run.model.config.dropout > 0  # nothing else does
        self._random: dict[str, Tensor] = {}
        self._told = run.config.debug_steps if run.ranks.is_main else 0
        self.events = DebugLog(run) if self._told else NoDebugLog()

    def __call__(self, step: int, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """One optimizer step over all micro-batches: the mean loss, and the gradient's norm before
        clipping, both 0-dim and of all ranks. A bad step changes nothing (in fp16 the loss scale
        falls).

        Nothing here waits for the device, AdamW's step included; of other optimizers one may.
        """
        run, config, events = self.run, self.config, self.events
        optimizer, scaler = run.optimizer, run.scaler
        if self.draws:
            self._random = random_state()
        self.monitor.begin(run.active is run.main or self.phases.calibrates(step))
        rate = learning_rate(step, config)
        set_learning_rate(optimizer, rate)
        events.begin(step)
        parts = tokens_BT.chunk(config.accumulate)
        events.add("batch", shape=list(tokens_BT.shape), micro_batches=len(parts))
        losses = [self.pass_of(step, part_BT, place) for place, part_BT in enumerate(parts)]
        if scaler is not None:
            for part in optimizers_in(optimizer):
                scaler.unscale_(part)  # an overflow in one rank's rows is known to all after it
        events.add("unscale", scale=None if scaler is None else scaler.now(losses[0]))
        if run.telemetry.due(step, 1, config.steps):
            run.telemetry.gradients(run.model)
        limit: float | Tensor = config.clip
        if (known := self.monitor.norms) is not None:
            limit = adaptive_limit(known, config.clip_percentile, config.clip)
        order = run.model.parameters()  # plain torch's
        # On a CPU clipped gradients stay those of torch's own clipping, to the bit.
        as_taken = run.accelerator.device.type != "cpu"
        norms = clip_gradients(optimizer, limit, config.clip_mode, scaler, order, as_taken=as_taken)
        mean = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
        norm = total_norm(norms)
        events.add("clip", mode=config.clip_mode, norm=norm, limit=limit)
        # Where the loss scale can fall no more, an overflow is as bad as any other.
        excused = None if scaler is None else scaler.can_fall(norm)
        seen = self.monitor.see(step, mean, norm, excused, norms)
        events.add("judge", loss=seen[0], norm=seen[1], skip=self.monitor.skips.bool())
        optimizer.step()  # and not `scaler.step`, which would overrule the monitor
        events.add("optimizer", lr=rate)
        if scaler is not None:
            scaler.update()
        events.add("update_scale", scale=None if scaler is None else scaler.now(norm))
        optimizer.zero_grad(set_to_none=True)
        self._told -= 1
        if self._told == 0:
            self.events = NoDebugLog()
        return seen[0], seen[1]

    def pass_of(self, step: int, part_BT: Tensor, place: int) -> Tensor:
        """A forward and a backward pass over a micro-batch, the `place`-th: its loss. Gradients are
        those of the mean over all of them, times the loss scale."""
        run, scaler, events = self.run, self.run.scaler, self.events
        with (
            run.accelerator.accumulate(run.wrapped),
            nullcontext() if place else self._observed(step),
        ):
            loss: Tensor = run.wrapped(*inputs_of(part_BT))
            told = loss.detach()
            events.add("forward", loss=told)
            # accelerate divides by the number of micro-batches; ranks' gradients are summed.
            loss = loss / run.ranks.count if run.ranks.count > 1 else loss
            scaled = loss if scaler is None else scaler.scale(loss)
            events.add("scale_loss", loss=scaled.detach())
            run.accelerator.backward(scaled)
            # Here, so that ranks of which one looks, uncompiled, do it in the same order.
            if run.backend.delayed is not None:
                run.backend.delayed.settle()
            events.add("backward")
        return told

    @contextmanager
    def _observed(self, step: int) -> Iterator[None]:
        """Have telemetry and calibration see a micro-batch, where one is due."""
        run, telemetry = self.run, self.run.telemetry
        looks = telemetry.sees_operands and telemetry.due(step, 1, self.config.steps)
        calibrates = self.phases.calibrates(step)
        # Compiled code has no place for hooks.
        eager = run.compiled and (looks or calibrates)
        with (
            torch.compiler.set_stance("force_eager") if eager else nullcontext(),
            self.phases.calibrating() if calibrates else nullcontext(),
            telemetry.sampling(run.model) if looks else nullcontext(),
        ):
            yield

    def give_back(self) -> None:
        """Have the next step draw what the last one drew, which was not taken."""
        if self.draws:
            restore_random_state(self._random)
