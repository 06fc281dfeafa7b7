"""An optimizer step: forward and backward passes, clipping, the monitor's verdict, the update."""

import weakref
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from fp8stack.model.gpt import GPT
from fp8stack.training.checkpoint.state import random_state, restore_random_state
from fp8stack.training.dataloader import inputs_of
from fp8stack.training.graphs import GraphedPasses, obstacle
from fp8stack.training.guard.monitor import Monitor
from fp8stack.training.metrics.expert_load import ExpertLoad, load_in
from fp8stack.training.optim.chained import optimizers_in
from fp8stack.training.optim.grad_clip import adaptive_limit, clip_gradients, total_norm
from fp8stack.training.optim.optimizer import learning_rate, set_learning_rate
from fp8stack.training.run import Run


class Step:
    """Runs optimizer steps; `monitor` judges the gradients before the optimizer applies them.

    Attributes:
        draws: whether a step uses torch's random number generators, see `restore_rng`.
    """

    def __init__(self, run: Run, monitor: Monitor) -> None:
        self.run = run
        self.config = run.config
        self.monitor = monitor
        self.draws = run.model.config.dropout > 0  # only dropout uses torch's RNG
        self._random: dict[str, Tensor] = {}  # RNG state before the last step
        self._load: ExpertLoad | None = None  # once it is computed
        self._graphs: GraphedPasses | None = None  # of the model that trains, if it has them
        # The model that `_graphs` is for.
        self._model: Callable[[], GPT | None] = lambda: None
        # The order in which torch sums the norm; all models of a run share the parameters.
        self._order = list(run.model.parameters())

    def __call__(self, step: int, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Train on the batch of a step. Returns the mean loss and the gradient norm before
        clipping, both 0-dim and over all ranks. A bad step changes nothing, except that the loss
        scale of fp16 decreases.

        Does not synchronize with the device, except in the `step` of some optimizers (not AdamW).
        """
        run, config = self.run, self.config
        optimizer, scaler = run.optimizer, run.scaler
        if self.draws:
            self._random = random_state()
        self.monitor.begin(run.plan.delayed)
        set_learning_rate(optimizer, learning_rate(step, config))
        micro_batches = tokens_BT.chunk(config.accumulate)
        run.model.routing.begin()
        self._load = None
        losses = [
            self.micro_step(step, part_BT, number) for number, part_BT in enumerate(micro_batches)
        ]
        # For the monitor, and evaluations and checkpoints after this step.
        if run.backend.delayed is not None:
            run.backend.delayed.apply_pending_update()
        if scaler is not None:
            for member in optimizers_in(optimizer):
                scaler.unscale_(member)  # also tells the other ranks of an overflow
        if run.telemetry.due(step, 1, config.steps):
            run.telemetry.gradients(run.model)
        limit: float | Tensor = config.clip
        if (past_norms := self.monitor.norms) is not None:
            limit = adaptive_limit(past_norms, config.clip_percentile, config.clip)
        # On a CPU, clipped gradients equal torch.nn.utils.clip_grad_norm_'s to the bit.
        as_taken, order = run.accelerator.device.type != "cpu", self._order
        norms = clip_gradients(optimizer, limit, config.clip_mode, scaler, order, as_taken=as_taken)
        mean = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
        norm = total_norm(norms)
        # An overflow is a bad step only if the loss scale cannot decrease any further.
        excused = None if scaler is None else scaler.can_fall(norm)
        loss, norm = self.monitor.judge(step, mean, norm, excused, norms)
        optimizer.step()  # not `scaler.step`, which decides for itself whether to skip
        if run.model.config.buffer_shapes() and (load := self.load()) is not None:
            run.model.update_biases(load.counts, self.monitor.skips.bool().all())
        if scaler is not None:
            scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss, norm

    def load(self) -> ExpertLoad | None:
        """The load of the experts in the last step; None for a model without experts. All ranks
        call this, since it sums over them."""
        if self._load is None:
            self._load = load_in(self.run.model.routing, self.run.ranks.count)
        return self._load

    def micro_step(self, step: int, part_BT: Tensor, number: int) -> Tensor:
        """Run the forward and backward pass of a step's micro-batch `number`, counted from 0.
        Returns its loss. Gradients are of the mean loss over all micro-batches, times the loss
        scale."""
        run, is_first = self.run, number == 0
        samples = run.telemetry.sees_operands and run.telemetry.due(step, 1, self.config.steps)
        if samples:
            with run.telemetry.sampling(run.model) if is_first else nullcontext():
                return self._run_pass(part_BT)
        if self._model() is not run.model:
            self._model, backend = weakref.ref(run.model), run.backend
            self._graphs = None
            if not obstacle(run):
                state = backend.weights, backend.delayed
                self._graphs = GraphedPasses(self._run_pass, run.model, *state)
        if self._graphs is None:
            return self._run_pass(part_BT)
        return self._graphs(part_BT, first=is_first)

    def _run_pass(self, part_BT: Tensor) -> Tensor:
        """See `micro_step`."""
        run, scaler = self.run, self.run.scaler
        with run.accelerator.accumulate(run.wrapped):
            loss: Tensor = run.wrapped(*inputs_of(part_BT))
            mean_loss = loss.detach()
            # accelerate divides by the number of micro-batches; gradients are summed over ranks.
            loss = loss / run.ranks.count if run.ranks.count > 1 else loss
            run.accelerator.backward(loss if scaler is None else scaler.scale(loss))
        return mean_loss

    def restore_rng(self) -> None:
        """Restore the state of the random number generators from before the last step, which was
        skipped."""
        if self.draws:
            restore_random_state(self._random)
