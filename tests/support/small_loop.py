"""The training loop of a tiny model, for tests that take its steps one by one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fp8stack.common.io import json_lines
from fp8stack.layers import fp8_state
from fp8stack.training.dataloader import batches, tokens_of
from fp8stack.training.loop import _Loop, train
from fp8stack.training.metrics.console import PlainDisplay
from fp8stack.training.metrics.throughput import Peak
from fp8stack.training.setup.start import set_up
from tests.support.each_model import on_each_model

# Sizes that every FP8 GEMM takes, 128 x 128 blocks included, have a width of 128.
SETS = [
    "model_overrides.layers=1", "model_overrides.heads=2", "eval_windows=4", "sample_tokens=0",
    "warmup_steps=2",
]  # fmt: skip

WAITS = {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero"}
WAITS |= {"aten::equal"}

# Tests on a GPU are of eager code, whose numbers repeat, unless they say otherwise.
ON_GPU = {"compile": False, "deterministic": True} if torch.cuda.is_available() else {}

# Flags of a model with four experts in its block.
MIXTURE: dict[str, Any] = {
    "model": "gpt-nano-moe",
    "model_overrides": {"experts": {"count": 4, "per_token": 2, "width": 32, "shared": 1}},
}

PEAK = Peak(tflops=None, name="none")


class SmallLoop:
    """A loop, its run and the tokens of its steps; `flags` are other keys of the run."""

    def __init__(
        self, folder: Path, recipe: str, *, width: int = 32, resume: str | None = None, **flags: Any
    ) -> None:
        small = {"steps": 20, "batch": 4, "context": 32, "eval_every": 100, "save_every": 100}
        small |= ON_GPU
        self._again = {"folder": folder, "recipe": recipe, "width": width} | flags
        settings = small | {"recipe": recipe, "out": str(folder)} | flags
        self.run = set_up(settings, None, [*SETS, f"model_overrides.width={width}"], resume)
        self.loop = _Loop(self.run, PlainDisplay(self.run.config.steps, self.run.step, 1), PEAK)
        self.tokens = batches(self.run)

    def tokens_of(self, step: int) -> Tensor:
        """The tokens of a step."""
        return tokens_of(self.run, step)

    def advance(self, steps: int = 1) -> None:
        """Take steps as `train` does."""
        for _ in range(steps):
            self.loop.advance(*next(self.tokens))

    def go(self) -> int:
        """Train to the end as the command does: its exit code."""
        return train(self.run)

    def resumed(self, **flags: Any) -> SmallLoop:
        """The run as another process resumes it, with other `flags`."""
        self.loop.wait()
        self.run.folder.release()
        return SmallLoop(**{**self._again, "resume": "auto", **flags})

    def next_step(self) -> Callable[[], tuple[Tensor, Tensor]]:
        """The next `train_step`, its tokens on the device already."""
        step, tokens_BT = next(self.tokens)
        on_device = tokens_BT.to(self.run.accelerator.device)
        return lambda: self.loop.train_step(step, on_device)

    def state(self) -> dict[str, Tensor]:
        """Copies of the weights, the moments and the step counts."""
        tensors = {}
        for name, parameter in self.run.model.named_parameters():
            tensors[name] = parameter.detach().clone()
            for key, value in self.run.optimizer.state[parameter].items():
                tensors[f"{name}.{key}"] = value.clone()
        return tensors

    def everything(self) -> dict[str, Tensor]:
        """`state`, copies of the FP8 state, and the random state."""
        fp8 = {name: value.clone() for name, value in fp8_state(self.run.model).items()}
        return self.state() | fp8 | {"rng": torch.get_rng_state()}

    def spoil(
        self, where: str, steps: Container[int], factor: float = math.nan, group: int | None = None
    ) -> None:
        """Multiply, in some training steps, the output of a module ("" is the model, whose output
        is the loss), as long as it is in FP8 if it can be; or the gradient of a parameter. With a
        `group`, the module is a grouped linear and only its output for that group is multiplied, or
        the group's gradient."""

        def spoilt(x: Tensor) -> Tensor:
            return x * (factor if self.run.step + 1 in steps else 1.0)

        def spoilt_rows(x: Tensor, start: int, stop: int) -> Tensor:
            return torch.cat([x[:start], spoilt(x[start:stop]), x[stop:]])

        def spoilt_output(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
            if not module.training:
                return y
            if group is None:
                return spoilt(y)
            return spoilt_rows(y, *[0, *args[1].tolist()][group : group + 2])

        if where.endswith(".weight"):
            self.run.model.get_parameter(where).register_hook(
                spoilt if group is None else lambda x: spoilt_rows(x, group, group + 1)
            )
            return
        was_fp8 = getattr(self.run.model.get_submodule(where), "in_fp8", None)

        def spoil_module() -> None:
            module = self.run.model.get_submodule(where)
            if not was_fp8 or getattr(module, "in_fp8", False):
                module.register_forward_hook(spoilt_output)

        on_each_model(self.run, spoil_module)

    def events(self) -> list[dict[str, Any]]:
        """The rows of the metrics that report what the guard did."""
        return [row for row in json_lines(self.run.folder.metrics) if "event" in row]

    def guard_events(self) -> list[tuple[int, str]]:
        """The steps and names of `events`."""
        return [(row["step"], row["event"]) for row in self.events()]


def changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors that are not the same to the bit."""
    assert before.keys() == after.keys()
    return [name for name in before if not torch.equal(before[name], after[name])]


def host_reads(work: Callable[[], object]) -> Counter[str]:
    """The operators of `work` that read a tensor on the host, with their counts: on a GPU each of
    them waits for the device. The fused optimizer's reads do not count: its CPU kernel reads the
    step counts, which the kernel for CUDA reads on the device."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        work()
    return Counter(e.name for e in recorded.events() if e.name in WAITS and not _optimizes(e))


def _optimizes(event: Any) -> bool:
    """Whether the event lies within the kernel of AdamW."""
    while event is not None and event.name != "aten::_fused_adamw_":
        event = event.cpu_parent
    return event is not None
