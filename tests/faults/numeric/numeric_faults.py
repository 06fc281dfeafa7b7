"""Values that break numbers, put into a run by hooks: what, into which place, at which steps."""

import math
from collections.abc import Container
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fp8stack.layers.delayed import DelayedScaling
from fp8stack.layers.observe import fp8_linears
from fp8stack.training.run import Run
from tests.support.each_model import on_each_model

VALUES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "1e38": 1e38}
AT_REST = ("weight", "moment", "history", "scale")
"""Places in what a run keeps: the fault is there before its step begins."""
IN_PASS = ("activation", "input", "grad_output", "dgrad", "wgrad", "loss", "amax", "loss_scale")
"""Places in what a step computes."""


@dataclass(kw_only=True)
class Fault:
    """A value, put into one element of a place.

    Attributes:
        place: activation (the residual stream), dgrad (its gradient), input and grad_output of a
            linear, wgrad and weight of that linear, loss (the value alone; its gradient stays),
            amax (as recorded in the pass), history (an old amax), moment (the first), scale (of
            delayed scaling), loss_scale (of fp16).
        steps: their numbers, from 1.
        block: where the residual stream is meant: at the entry of this module.
        micro_batch: in which pass of the step, from 0.
        only_in_fp8: whether the fault goes away where the linear leaves FP8.
        most: how often it happens at most; once, if it is not to come again after a roll-back.
    """

    place: str
    value: float
    steps: Container[int]
    layer: str = "blocks.0.mlp.down"
    block: str = "final_norm"
    micro_batch: int = 0
    only_in_fp8: bool = False
    most: float = 1
    injected: int = 0
    _pass: int = field(default=-1, repr=False)
    _step: int = field(default=-1, repr=False)

    def put(self, run: Run) -> None:
        """Put the fault into `run`, which has not begun its next step."""
        on_each_model(run, lambda: self._hook(run))
        if self.place == "wgrad":
            self._follow(run, self._weight(run), accumulates=True)
        if self.place in IN_PASS:
            return
        if run.step + 1 in self.steps:
            self._break(run)
        run.optimizer.register_step_post_hook(
            # The step under way counts as done only later.
            lambda *_: self._break(run) if run.step + 2 in self.steps else None
        )

    def _hook(self, run: Run) -> None:
        """Register the hooks of a place in the pass on the run's model."""
        submodule = run.model.get_submodule
        block, layer = submodule(self.block), submodule(self.layer)
        run.model.register_forward_pre_hook(lambda model, args: self._count(run), prepend=True)

        def spoil_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            return (self._spoilt(args[0]), *args[1:]) if self._happens(run) else None

        def loss_of_value(model: nn.Module, args: object, loss: Tensor) -> Tensor | None:
            return loss + (self.value - loss.detach()) if self._happens(run) else None

        def record(model: nn.Module, args: object, loss: Tensor) -> None:
            if self._happens(run):
                self._delayed(run).history.recorded(f"{self.layer}.input").fill_(self.value)

        def set_loss_scale(model: nn.Module, args: object) -> None:
            if self._happens(run):
                assert run.scaler is not None
                run.scaler.load_state_dict(run.scaler.state_dict() | {"scale": self.value})

        if self.place == "activation":
            block.register_forward_pre_hook(spoil_input)
        elif self.place == "input":
            layer.register_forward_pre_hook(spoil_input)
        elif self.place == "dgrad":
            block.register_forward_pre_hook(lambda block, args: self._follow(run, args[0]))
        elif self.place == "grad_output":
            layer.register_forward_hook(lambda layer, args, y: self._follow(run, y))
        elif self.place == "loss":
            run.model.register_forward_hook(loss_of_value)
        elif self.place == "amax":
            run.model.register_forward_hook(record)
        elif self.place == "loss_scale":
            run.model.register_forward_pre_hook(set_loss_scale)

    def _count(self, run: Run) -> None:
        """Count the micro-batches of a step; a repeated step starts again at 0."""
        if run.model.training:
            again = self._pass + 1 >= run.config.accumulate
            self._pass = 0 if run.step != self._step or again else self._pass + 1
            self._step = run.step

    def _due(self, run: Run) -> bool:
        in_pass = run.model.training and self._pass == self.micro_batch
        now = in_pass and run.step + 1 in self.steps and self.injected < self.most
        return now and (not self.only_in_fp8 or self.layer in fp8_linears(run.model))

    def _happens(self, run: Run) -> bool:
        due = self._due(run)
        self.injected += due
        return due

    def _spoilt(self, x: Tensor) -> Tensor:
        """`x` with the value in one of its elements."""
        chosen = torch.zeros(x.numel(), dtype=torch.bool, device=x.device)
        chosen[x.numel() // 2] = True
        value = torch.tensor(self.value, device=x.device).to(x.dtype)  # fp16 has no 1e38
        return torch.where(chosen.view(x.shape), value, x)

    def _follow(self, run: Run, x: Tensor, accumulates: bool = False) -> None:
        """Spoil the gradient of `x`; a parameter's gradient arrives in every pass."""
        if x.requires_grad and (accumulates or self._due(run)):
            x.register_hook(lambda gradient: self._spoilt(gradient) if self._happens(run) else None)

    def _weight(self, run: Run) -> Tensor:
        return run.model.get_parameter(f"{self.layer}.weight")

    def _delayed(self, run: Run) -> DelayedScaling:
        assert run.backend.delayed is not None
        return run.backend.delayed

    @torch.no_grad()
    def _break(self, run: Run) -> None:
        """Break what the run keeps."""
        if self.injected >= self.most:
            return
        self.injected += 1
        if self.place == "scale":
            self._delayed(run).history.scale(f"{self.layer}.input").fill_(self.value)
        elif self.place == "history":
            history = self._delayed(run).history
            history.history[1, history.column(f"{self.layer}.input")] = self.value
        else:
            weight = self._weight(run)
            target = weight if self.place == "weight" else run.optimizer.state[weight]["exp_avg"]
            target.view(-1)[target.numel() // 2] = self.value


def places(recipe: str) -> tuple[str, ...]:
    """The places that a run in this recipe has."""
    only = {"amax": "delayed", "history": "delayed", "scale": "delayed", "loss_scale": "fp16"}
    return tuple(place for place in (*IN_PASS, *AT_REST) if only.get(place, recipe) == recipe)
