"""A long run with faults of all kinds, beside one that is left alone and watched for leaks."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from tests.faults.case import Outcome, judged
from tests.faults.processes import Change, Child, Together, last_step, unchanged
from tests.faults.twins import Twin

STEPS_PER_FAULT = 50
MEMORY_MIB = 4.0  # what its memory may vary by, once it is under way
EXPECTED = {"kill": -signal.SIGKILL, "full": 4, "term": 75, "int": 75, "hup": 75, "usr1": 75}
SMALLEST = [
    "--batch", "2", "--context", "16", "--eval-every", "1000", "--set", "telemetry_every=500",
    "--set", "model_overrides.width=16", "--set", "model_overrides.heads=1",
    "--set", "model_overrides.dropout=0.1", "--checkpoint-async",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A look at a process: its resident memory and how many files it has open."""

    memory_mib: float
    open_files: int


def soak(folder: Path, count: int) -> Outcome:
    """`count` faults in one run. If the twin leaks, none counts as survived."""
    twin = WatchedTwin(folder / "delayed", "delayed", STEPS_PER_FAULT * count, 20, SMALLEST)
    rng, run, faults, wrong = random.Random(14), twin.new(), list[str](), ""
    for number in range(count):
        kind = list(EXPECTED)[number % len(EXPECTED)]
        # Spread over the run: no fault is further than its share of the steps.
        first = last_step(run) + 1
        step = rng.randint(first, max(first, STEPS_PER_FAULT * (number + 1) - 1))
        fault = _fault(kind, step, rng)
        ended = twin.go(run, fault)
        faults.append(fault)
        if ended.code != EXPECTED[kind]:
            wrong = f"ended with {ended.code}: {ended.stderr.strip()[-300:]}"
            break
    return judged(faults, wrong or growth(twin.samples) or twin.finish(run)[1])


def _fault(kind: str, step: int, rng: random.Random) -> str:
    in_save = f"save:{rng.randint(1, 15)}"  # of the first save of this start
    place = f"{rng.choice(['step', 'forward', 'backward'])}:{step}"
    if kind == "full":  # a file that is larger than this is written next, or soon
        return f"full:{rng.randint(0, 3000)}@{rng.choice([place, in_save])}"
    return f"{kind}@{rng.choice([place, in_save]) if kind == 'kill' else place}"


class WatchedTwin(Twin):
    """A twin that is looked at while it runs."""

    samples: Sequence[Sample] = ()

    def start(self, run: Path, faults: str = "", change: Change = unchanged) -> Together:
        ranks = super().start(run, faults, change)
        if run == self.path:
            last = run / "checkpoints" / f"step-{self.steps:06d}"  # what comes then is a plot
            self.samples = watched(ranks.children[0], last)
        return ranks


def watched(child: Child, until: Path) -> list[Sample]:
    """Looks at a run until it ends or `until` is there, ten in a second at most (on Linux)."""
    samples = []
    while child.is_alive and not until.exists():
        try:
            pages = int(Path(f"/proc/{child.pid}/statm").read_text().split()[1])
            files = len(os.listdir(f"/proc/{child.pid}/fd"))
        except (OSError, IndexError):  # it has just ended
            break
        mib = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        samples.append(Sample(memory_mib=mib, open_files=files))
        time.sleep(0.1)
    return samples


def growth(samples: Sequence[Sample]) -> str:
    """What grew between the middle of a run and its end, "" if nothing did."""
    fifth = len(samples) // 5
    middle, end = samples[2 * fifth : 3 * fifth], samples[4 * fifth :]
    if not middle or not end:
        return "the run was too short to see whether something grows"
    grown = mean(s.memory_mib for s in end) - mean(s.memory_mib for s in middle)
    if grown > MEMORY_MIB:
        return f"the run without faults grew by {grown:.1f} MiB from its middle to its end"
    # The fewest: now and then a file is open for a moment.
    was, now = (min(s.open_files for s in part) for part in (middle, end))
    return f"the run without faults has {now} files open, {was} before" if now > was else ""
