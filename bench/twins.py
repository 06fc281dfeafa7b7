"""Runs that faults are put into, beside a twin that none disturbs.

It must not know which faults make a row of the matrix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.case import Outcome
from tests.faults.whole_runs import Child, Ended, difference, last_step

TEXT = "".join(f"line {n * n}\n" for n in range(3000))
# A model that takes a step in milliseconds, in FP8 as far as its recipe has it.
SMALL = [
    "--device", "cpu", "--batch", "4", "--context", "32",
    "--set", "model_overrides.layers=1", "--set", "model_overrides.width=32",
    "--set", "model_overrides.heads=2", "--set", "eval_windows=4", "--set", "warmup_steps=2",
]  # fmt: skip
_NOTE = re.compile(r"^fault: (\w+) (\d+): (.*)$", re.MULTILINE)


@dataclass
class Tally:
    """Counts what became of faults."""

    survived: int = 0
    lost: list[str] = field(default_factory=list)

    def add(self, faults: Sequence[str], wrong: str, where: str = "") -> None:
        """Count the faults of a run; `wrong` says what is wrong with it, "" if nothing is."""
        if wrong:
            self.lost += [f"{where}{fault}: {wrong}" for fault in faults]
        else:
            self.survived += len(faults)

    @property
    def injected(self) -> int:
        return self.survived + len(self.lost)

    def outcome(self) -> Outcome:
        return Outcome(injected=self.injected, survived=self.survived, lost=tuple(self.lost))


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation on files of a checkpoint: the how manieth, after which step began, and what."""

    number: int
    step: int
    what: str


class Twin:
    """A run that is left alone, and what it takes to begin others like it.

    Args:
        folder: for all of them; made here.
        recipe: their precision.
        steps: of each.
        save_every: steps between their checkpoints.
        flags: further arguments of `pretrain`, which win.
    """

    def __init__(
        self, folder: Path, recipe: str, steps: int, save_every: int, flags: Sequence[str] = ()
    ) -> None:
        folder.mkdir(parents=True)
        self.folder, self.recipe, self.steps, self.save_every = folder, recipe, steps, save_every
        (folder / "text.txt").write_text(TEXT)
        self.words = ["pretrain", "--data", "text.txt", "--recipe", recipe, "--steps", str(steps)]
        self.words += ["--save-every", str(save_every), "--eval-every", str(save_every + 1)]
        self.words += ["--set", "sample_tokens=0", *SMALL, *flags]
        self.path = folder / "clean"
        self._runs = 0
        self.ended = self.go(self.path, "note@step,note@save")
        if self.ended.code:
            raise RuntimeError(f"The run without faults failed: {self.ended.stderr[-500:]}")

    def new(self) -> Path:
        """The folder of another run; nothing is there yet."""
        self._runs += 1
        return self.folder / f"run-{self._runs:03}"

    def start(self, run: Path, faults: str = "") -> Child:
        """Begin a run, or go on with it, as a loop of restarts does."""
        return Child([*self.words, "--resume", "auto", "--out", run.name], self.folder, faults)

    def go(self, run: Path, faults: str = "") -> Ended:
        """Begin a run or go on with it, until it ends."""
        return self.start(run, faults).wait()

    def finish(self, run: Path) -> tuple[Ended, str]:
        """Go on with a run to its end, without faults: how it ended, and in what it differs from
        the twin, "" if in nothing."""
        ended = self.go(run)
        if ended.code:
            return ended, f"could not go on: exit code {ended.code}: {ended.stderr.strip()[-300:]}"
        return ended, difference(run, self.path)

    def operations(self) -> list[Operation]:
        """The operations on files of checkpoints in a run that is not disturbed."""
        found, step = [], 0
        for place, number, what in _NOTE.findall(self.ended.stderr):
            if place == "step":
                step = int(number)
            else:
                found.append(Operation(number=int(number), step=step, what=what))
        return found

    def ahead(self, run: Path, choose: Callable[[int, int], int]) -> int:
        """A step that a run still has to do, chosen as `randint` does."""
        return choose(min(last_step(run) + 1, self.steps), self.steps)


def spread(count: int, among: int) -> list[int]:
    """`count` of the numbers 0 to `among` - 1, evenly spread, the first and the last among them;
    more than there are come again."""
    last = max(count - 1, 1)
    return [n * (among - 1) // last if count < among else n % among for n in range(count)]
