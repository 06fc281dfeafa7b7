"""Runs that faults are put into, and an undisturbed twin to compare them with."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.faults.processes import Change, Ended, Together, difference, unchanged

TEXT = "".join(f"line {n * n}\n" for n in range(3000))
# A model that takes a step in milliseconds, in FP8 as far as its recipe has it; to estimate its
# memory takes longer than to train it.
SMALL = [
    "--device", "cpu", "--batch", "4", "--context", "32", "--set", "check_memory=false",
    "--set", "model_overrides.layers=1", "--set", "model_overrides.width=32",
    "--set", "model_overrides.heads=2", "--set", "eval_windows=4", "--set", "warmup_steps=2",
]  # fmt: skip
_NOTE = re.compile(r"^fault: ([\w-]+) (\d+): (.*)$", re.MULTILINE)


class Operation(NamedTuple):
    """An operation that a rank reached: its place, its number among those of that place, the step
    in which it happened, and its description."""

    place: str
    number: int
    step: int
    description: str


class Twin:
    """A run that is left alone, and what it takes to begin others like it in the same `folder`;
    `flags` are further arguments of `pretrain`, which win."""

    def __init__(
        self,
        folder: Path,
        recipe: str,
        steps: int,
        save_every: int,
        flags: Sequence[str] = (),
        ranks: int = 1,
    ) -> None:
        folder.mkdir(parents=True)
        self.folder, self.recipe, self.steps, self.save_every = folder, recipe, steps, save_every
        self.ranks = ranks
        (folder / "text.txt").write_text(TEXT)
        self.words = ["pretrain", "--data", "text.txt", "--recipe", recipe, "--steps", str(steps)]
        self.words += ["--save-every", str(save_every), "--eval-every", str(save_every + 1)]
        self.words += ["--set", "sample_tokens=0", *SMALL, *flags]
        self.path = folder / "clean"
        self._runs = 0
        notes = "note@step,note@save" + (",note@all-reduce" if ranks > 1 else "")
        self.ended = self.go_all(self.path, notes)
        if any(rank.code for rank in self.ended):
            raise RuntimeError(f"The run without faults failed: {self.ended[0].stderr[-500:]}")
        self.seconds = max(rank.seconds for rank in self.ended)

    def new(self) -> Path:
        """The folder of another run; nothing is there yet."""
        self._runs += 1
        return self.folder / f"run-{self._runs:03}"

    def start(self, run: Path, faults: str = "", change: Change = unchanged) -> Together:
        """Begin a run, or go on with it, as a loop of restarts does."""
        words = [*self.words, "--resume", "auto", "--out", run.name]
        return Together(words, self.folder, self.ranks, faults, change)

    def go_all(self, run: Path, faults: str = "", change: Change = unchanged) -> list[Ended]:
        """Begin a run or go on with it, until all ranks have ended or are stopped."""
        with self.start(run, faults, change) as ranks:
            return ranks.wait()

    def go(self, run: Path, faults: str = "") -> Ended:
        """`go_all`: how the first rank ended."""
        return self.go_all(run, faults)[0]

    def finish(self, run: Path) -> tuple[Ended, str]:
        """Go on with a run to its end, without faults: how its first rank ended, and in what it
        differs from the twin, "" if in nothing."""
        ended = self.go_all(run)
        if any(rank.code for rank in ended):
            return ended[0], f"could not go on: {said_by(ended)}"
        return ended[0], difference(run, self.path)

    def operations(self, rank: int = 0) -> list[Operation]:
        """Operations on files of checkpoints, and collectives, in a run that is not disturbed."""
        operations, step = [], 0
        for place, number, description in _NOTE.findall(self.ended[rank].stderr):
            if place == "step":
                step = int(number)
            else:
                operations.append(Operation(place, int(number), step, description))
        return operations


def said_by(ended: Sequence[Ended]) -> str:
    """A text on how ranks ended, for the line about a lost fault."""
    return f"exit codes {[rank.code for rank in ended]}: " + " | ".join(
        rank.stderr.strip()[-300:] for rank in ended if rank.stderr
    )
