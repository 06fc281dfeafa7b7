"""Whole runs of a tiny model in this process, and what they look like from step to step."""

import contextlib
import hashlib
import io
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fp8stack.common.io import json_lines
from fp8stack.layers import fp8_state
from fp8stack.training.checkpoint.state import random_state
from fp8stack.training.loop import train
from fp8stack.training.run import Run
from fp8stack.training.setup.start import set_up
from tests.support.each_model import on_each_model

SETS = ["model_overrides.layers=1", "model_overrides.heads=2", "model_overrides.width=32"]
SMALL: dict[str, Any] = {
    "batch": 4, "context": 32, "eval_every": 10**6, "warmup_steps": 2, "telemetry_every": 0,
    "eval_windows": 4, "sample_tokens": 0, "save_every": 2, "device": "cpu",
}  # fmt: skip
Event = dict[str, Any]
Digest = dict[str, str]


def write_text(folder: Path, lines: int = 3000) -> Path:
    """A text that a tiny model can learn something from."""
    draw = random.Random(0)
    words = ("to", "be", "or", "not", "that", "is", "the", "question", "nobler", "mind", "suffer")
    file = folder / "text.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(" ".join(draw.choices(words, k=8)) for _ in range(lines)))
    return file


def small_run(folder: Path, name: str, recipe: str, sets: Sequence[str] = (), **keys: Any) -> Run:
    """A run of a tiny model, from its beginning, in `folder/name`."""
    file = folder / "text.txt"
    data = file if file.exists() else write_text(folder)
    out = folder / name
    shutil.rmtree(out, ignore_errors=True)
    settings = {**SMALL, "recipe": recipe, "data": str(data), "out": str(out), **keys}
    return set_up(settings, None, [*SETS, *sets], None)


def trained(run: Run) -> list[Event]:
    """Train the run to its end, and return the guard's events. Raises what `train` raises."""
    with contextlib.redirect_stdout(io.StringIO()):
        train(run)
    return events(run)


def events(run: Run) -> list[Event]:
    """The guard's events so far."""
    return [row for row in json_lines(run.folder.metrics) if "event" in row]


class Recorder:
    """Remembers what a run looked like at the beginning of each step, and before the next.

    Attributes:
        starts: step, and digests of all that a skipped step must leave as it was.
        ends: the same after the optimizer's part of the step, by step.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.starts: list[tuple[int, Digest]] = []
        self.ends: dict[int, Digest] = {}
        self._begun: tuple[int, Digest] | None = None
        self._passes = 0
        on_each_model(run, lambda: run.model.register_forward_pre_hook(self._before, prepend=True))
        run.optimizer.register_step_post_hook(self._after)

    def at(self, step: int) -> Digest | None:
        """The state at the first start of `step`; None if it did not start."""
        return next((digest for number, digest in self.starts if number == step), None)

    def after(self, back_to: int, bad: int) -> Digest | None:
        """The state at the start of the first step after `bad`, when the run had rolled back to
        `back_to`."""
        numbers = [number for number, _ in self.starts]
        place = numbers.index(bad) + 1
        if place == len(numbers) or numbers[place] <= back_to:
            return None
        return self.starts[place][1]

    def _before(self, model: object, args: object) -> None:
        if self.run.model.training:
            if self._passes % self.run.config.accumulate == 0:  # a step tried again counts not
                self._begun = (self.run.step + 1, self._digest())
            self._passes += 1

    def _after(self, *_: object) -> None:
        assert self._begun is not None
        self.starts.append(self._begun)
        self.ends[self._begun[0]] = self._digest()
        self._passes = 0

    def _digest(self) -> Digest:
        run = self.run
        state = dict(fp8_state(run.model)) | random_state()
        for name, parameter in run.model.named_parameters():
            state[name] = parameter.detach()
            for key, value in run.optimizer.state.get(parameter, {}).items():
                state[f"{name}.{key}"] = value
        return {name: digest_of(tensor) for name, tensor in state.items()}


def digest_of(x: Tensor) -> str:
    """A hash of the bytes of a tensor."""
    return hashlib.blake2b(x.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def is_sound(run: Run) -> bool:
    """Whether all that the run keeps is finite."""
    state = list(fp8_state(run.model).values()) + list(run.model.parameters())
    state += [value for moments in run.optimizer.state.values() for value in moments.values()]
    return all(bool(tensor.isfinite().all()) for tensor in state)
