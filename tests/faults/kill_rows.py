"""Rows of the matrix: kills, signals, a full disk, a long run with all of them.

What must come out is known without asking the product: a run like it that was left alone.
"""

import os
import random
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean

import torch

from tests.faults.case import Case, Outcome, judged
from tests.faults.processes import (
    Change,
    Ended,
    Together,
    checkpoint_difference,
    checkpoints,
    files,
    last_step,
    rows,
    unchanged,
)
from tests.faults.twins import Twin

RECIPES = ("fp32", "bf16", "fp16", "delayed", "current", "block", "mxfp8", "nvfp4")
KILLED, DONE, DISK_FULL, PREEMPTED = -signal.SIGKILL, 0, 4, 75
SECONDS_TO_STOP = 10.0
IN_BACKGROUND = ["--checkpoint-async"]
STEPS_PER_FAULT = 50
MEMORY_MIB = 4.0  # what its memory may vary by, once it is under way
EXPECTED = {"kill": KILLED, "full": DISK_FULL} | dict.fromkeys(
    ("term", "int", "hup", "usr1"), PREEMPTED
)
SMALLEST = [
    "--batch", "2", "--context", "16", "--eval-every", "1000", "--set", "telemetry_every=500",
    "--set", "model_overrides.width=16", "--set", "model_overrides.heads=1",
    "--set", "model_overrides.dropout=0.1", "--checkpoint-async",
]  # fmt: skip


# R1: kill -9, anywhere


def kills(
    folder: Path, count: int, recipes: Sequence[str] = RECIPES, flags: Sequence[str] = ()
) -> Outcome:
    """Runs that are killed once to three times and gone on with. Every second one of the recipes
    has dropout, so that the random state matters; every third is saved in the background."""
    rng, outcome, twins = random.Random(1), Outcome(), dict[str, Twin]()
    for number in range(10 * count + 20):
        if outcome.injected >= count:
            break
        recipe = recipes[number % len(recipes)]
        if recipe not in twins:
            dropout = ["--set", f"model_overrides.dropout={0.1 if number % 2 else 0.0}"]
            run_flags = [*dropout, *([] if number % 3 else IN_BACKGROUND), *flags]
            twins[recipe] = Twin(folder / recipe, recipe, 10, 3, run_flags)
        # First each recipe once, one of them twice; then some more than that.
        most = rng.randint(1, 3) if number >= len(recipes) else 2 if number == 0 else 1
        outcome += _kill_and_finish(twins[recipe], rng, min(most, count - outcome.injected))
    return outcome


def _kill_and_finish(twin: Twin, rng: random.Random, times: int) -> Outcome:
    """Kill one run so many times, unless it is done before, and see what it comes to."""
    run, faults, wrong = twin.new(), list[str](), ""
    while len(faults) < times and not wrong:
        fault = random_kill(twin, run, rng)
        ended = twin.go(run, fault)
        if ended.code == DONE:  # before the time came
            break
        faults.append(f"{twin.recipe}, {fault}")
        wrong = _unexpected(ended, KILLED)
    return judged(faults, wrong or twin.finish(run)[1])


def random_kill(twin: Twin, run: Path, rng: random.Random) -> str:
    """A kill at a random place, or time, of what a run has still to do."""
    step = rng.randint(min(last_step(run) + 1, twin.steps), twin.steps)
    return rng.choice(
        [
            f"kill@step:{step}",
            f"kill@forward:{step}",
            f"kill@backward:{step}",
            f"kill@step:{step}+{rng.uniform(0.001, 0.02):.4f}",
            f"kill@save:{rng.randint(1, 15)}",
            f"kill@time:{rng.uniform(0.05, twin.seconds):.3f}",
        ]
    )


def _unexpected(ended: Ended, code: int) -> str:
    """The problem of a run that did not end with `code`, "" if it did."""
    if ended.code == code:
        return ""
    return f"ended with {ended.code}, not {code}: {ended.stderr.strip()[-300:]}"


# R2: kill -9 within a save


def kills_in_saves(folder: Path, count: int) -> Outcome:
    """A kill before every operation on files that saving comes to, and some in between; half of
    them where checkpoints are written in the background."""
    rng, outcome = random.Random(2), Outcome()
    for name, flags, kill_count in (
        ("waiting", [], count - count // 2),
        ("background", IN_BACKGROUND, count // 2),
    ):
        twin = Twin(folder / name, "delayed", 6, 2, flags)
        among = [operation for operation in twin.operations() if operation.step]
        between = kill_count // 4
        faults = [f"kill@save:{among[n].number}" for n in spread(kill_count - between, len(among))]
        for _ in range(between):
            later = f"+{10 ** rng.uniform(-5, -2.5):.6f}"  # 10 microseconds to 3 ms
            faults.append(f"kill@save:{rng.choice(among).number}{later}")
        for fault in faults:
            wrong = _kill_in_save(twin, fault, 2 if flags else 1)
            outcome += judged([f"{name}, {fault}"], wrong)
    return outcome


def spread(count: int, among: int) -> list[int]:
    """`count` of the numbers 0 to `among` - 1, evenly spread, the first and the last among them;
    more than there are come again."""
    last = max(count - 1, 1)
    return [n * (among - 1) // last if count < among else n % among for n in range(count)]


def _kill_in_save(twin: Twin, fault: str, intervals: int) -> str:
    """The problem of a run that is killed in a save, "" if none; at most the steps of so many save
    intervals may be lost."""
    ended = twin.go(run := twin.new(), fault)
    if ended.code == DONE and "+" in fault:  # the run was over before; try again without delay
        ended = twin.go(run := twin.new(), fault.partition("+")[0])
    if wrong := _unexpected(ended, KILLED):
        return wrong
    reached = max((row["step"] for row in rows(run)), default=0)
    ended, wrong = twin.finish(run)
    if wrong:
        return wrong
    resumed = re.search(r"resumed from \S*step-(\d+)", ended.stdout)
    again = reached - int(resumed[1] if resumed else 0)
    if again > intervals * twin.save_every:
        return f"{again} steps were done again, with a save every {twin.save_every}"
    # A whole old checkpoint does no harm, where the kill came just before it was removed.
    saved = checkpoints(run)
    complete = [path for path in saved if files(path) == files(saved[-1])]
    whole_files = {str(p.relative_to(run)) for path in complete for p in (path, *path.iterdir())}
    litter = (files(run) ^ files(twin.path)) - whole_files
    return f"left over or missing: {', '.join(sorted(litter))}" if litter else ""


# R3: signals


def signals(folder: Path, count: int) -> Outcome:
    """Signals in a step, before an evaluation, within a save and at random times."""
    twin = Twin(folder / "delayed", "delayed", 24, 5, ["--set", "model_overrides.dropout=0.1"])
    rng, outcome = random.Random(3), Outcome()
    in_saves = [operation for operation in twin.operations() if 0 < operation.step < twin.steps]
    for number in range(count):
        name = ("term", "int", "usr1", "hup")[number % 4]
        place = (
            f"save:{rng.choice(in_saves).number}",
            f"backward:{rng.choice([6, 12, 18])}",  # an evaluation comes next
            f"step:1+{rng.uniform(0, 0.1):.3f}",
            f"{rng.choice(['step', 'forward', 'backward'])}:{rng.randint(1, 20)}",
        )[(number + number // 4) % 4]
        run, fault = twin.new(), f"{name}@{place}"
        ended = twin.go(run, fault)
        wrong = _unexpected(ended, PREEMPTED)
        if not wrong and ended.seconds > twin.seconds + SECONDS_TO_STOP:
            wrong = f"took {ended.seconds:.1f} s"
        if not wrong and last_step(run) != rows(run)[-1]["step"]:
            wrong = f"stopped after {rows(run)[-1]['step']}, saved {last_step(run)}"
        outcome += judged([fault], wrong or twin.finish(run)[1])
    return outcome


# R4: no room on the disk


def full_disks(folder: Path, count: int) -> Outcome:
    """A disk that fills up at cut-offs from nothing to the largest file, as the second checkpoint
    is written, every second time in the background; every fifth time as the metrics are."""
    outcome = Outcome()
    twins = [Twin(folder / "waiting", "delayed", 6, 3)]
    twins += [Twin(folder / "background", "delayed", 6, 3, IN_BACKGROUND)] if count > 1 else []
    second = checkpoints(twins[0].path)[-1]
    sizes = sorted(path.stat().st_size for path in second.iterdir())
    for number in range(count):
        twin = twins[number % len(twins)]
        begun = next(op.number for op in twin.operations() if second.name in op.description)
        # One byte short of a file, and evenly spread.
        cut = sizes[number] - 1 if number < len(sizes) else number * sizes[-1] // count
        fault = f"full:{cut}@save:{begun}"
        if number % 5 == 4:
            fault = f"full:{100 * number}@step:{4 + number % 2}"
        outcome += judged([f"{twin.folder.name}, {fault}"], _fill_and_finish(twin, fault))
    return outcome


def _fill_and_finish(twin: Twin, fault: str) -> str:
    """The problem of a run whose disk fills up and then has room again, "" if none."""
    run = twin.new()
    ended = twin.go(run, fault)
    lines = ended.stderr.splitlines()
    old = run / "checkpoints" / f"step-{twin.save_every:06d}"
    names_before = {path.name for path in (run / "checkpoints").iterdir()}
    litter = sorted(name for name in files(run) if ".tmp-" in name)
    if wrong := _unexpected(ended, DISK_FULL):
        return wrong
    if len(lines) != 1 or "the disk is full" not in lines[0]:
        return f"what was said: {ended.stderr.strip()[-300:]}"
    # The first save may still run in the background when a disk fills up in a later step.
    is_under_way = twin.folder.name == "background" and "@step:" in fault and not names_before
    if (names_before != {old.name} and not is_under_way) or litter:
        return f"there were checkpoints {sorted(names_before)} and left over {litter}"
    saved = twin.path / "checkpoints" / old.name
    damaged = "" if is_under_way else checkpoint_difference(old, saved)
    return damaged or twin.finish(run)[1]


# R14: a long run with all of them, and a run that is watched for leaks


def soak(folder: Path, count: int) -> Outcome:
    """`count` faults in one run. If the twin leaks, none counts as survived."""
    twin = WatchedTwin(folder / "delayed", "delayed", STEPS_PER_FAULT * count, 20, SMALLEST)
    rng, run, faults, wrong = random.Random(14), twin.new(), list[str](), ""
    for number in range(count):
        kind = list(EXPECTED)[number % len(EXPECTED)]
        # Spread over the run: no fault is further than its share of the steps.
        first = last_step(run) + 1
        step = rng.randint(first, max(first, STEPS_PER_FAULT * (number + 1) - 1))
        place = f"{rng.choice(['step', 'forward', 'backward'])}:{step}"
        if kind in ("kill", "full"):
            place = rng.choice([place, f"save:{rng.randint(1, 15)}"])  # the first of this start
        # A file that is larger than the limit is written next, or soon.
        fault = f"{kind}{f':{rng.randint(0, 3000)}' if kind == 'full' else ''}@{place}"
        ended = twin.go(run, fault)
        faults.append(fault)
        if ended.code != EXPECTED[kind]:
            wrong = f"ended with {ended.code}: {ended.stderr.strip()[-300:]}"
            break
    return judged(faults, wrong or growth(twin.samples) or twin.finish(run)[1])


class WatchedTwin(Twin):
    """A twin whose resident memory, in MiB, and open files are looked at while it runs, from its
    first step to its last, a hundred times in a second at most (on Linux)."""

    def start(self, run: Path, faults: str = "", change: Change = unchanged) -> Together:
        ranks = super().start(run, faults, change)
        if run == self.path:
            child, self.samples = ranks.children[0], list[tuple[float, int]]()
            last = run / "checkpoints" / f"step-{self.steps:06d}"  # what comes then is a plot
            while child.is_alive and not last.exists():
                with suppress(OSError, IndexError):  # it has just ended
                    pages = int(Path(f"/proc/{child.pid}/statm").read_text().split()[1])
                    mib = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
                    if (run / "metrics.jsonl").exists():
                        self.samples.append((mib, len(os.listdir(f"/proc/{child.pid}/fd"))))
                time.sleep(0.01)
        return ranks


def growth(samples: Sequence[tuple[float, int]]) -> str:
    """The resource that grew between the middle of a run and its end, "" if none did."""
    fifth = len(samples) // 5
    if not fifth:
        return "the run was too short to see whether something grows"
    middle, end = samples[2 * fifth : 3 * fifth], samples[4 * fifth :]
    grown = mean(mib for mib, _ in end) - mean(mib for mib, _ in middle)
    if grown > MEMORY_MIB:
        return f"the run without faults grew by {grown:.1f} MiB from its middle to its end"
    # The fewest: now and then a file is open for a moment.
    was, now = (min(files for _, files in fifths) for fifths in (middle, end))
    return f"the run without faults has {now} files open, {was} before" if now > was else ""


# R16: the same on a GPU


def on_cuda(folder: Path, count: int) -> Outcome:
    """R1 and R10 with Transformer Engine on a GPU, a fifth of the faults being kills. It is ready
    to run; no GPU has run it yet."""
    from tests.faults.numeric.numeric_rows import cuda_faults

    if not torch.cuda.is_available():
        raise RuntimeError("There is no CUDA GPU here.")
    large = ["--device", "cuda", "--backend", "te", "--batch", "16", "--context", "256"]
    large += ["--set", "model_overrides.width=1024", "--set", "model_overrides.heads=8"]
    killed = kills(folder / "kills", max(1, count // 5), ("delayed", "current"), large)
    return killed + cuda_faults(folder / "faults", count - killed.injected)


SAME = "every tensor of the last checkpoint and all losses equal, bit for bit, those of a run that"
SAME += " was left alone"
CASES = {
    "R1": Case(
        description="kill -9 at random places and times of training, in eight recipes",
        passes=f"gone on with, {SAME}",
        run=kills,
        short=8,
        long=100,
    ),
    "R2": Case(
        description="kill -9 before each operation on files within a save, and in between",
        passes=f"at most the steps since the save before are done again, nothing is left over, and "
        f"{SAME}",
        run=kills_in_saves,
        short=12,
        long=160,
    ),
    "R3": Case(
        description="SIGTERM, SIGINT, SIGHUP, SIGUSR1 in steps, evaluations and saves, and at "
        "random",
        passes=f"saved, exit code 75 within {SECONDS_TO_STOP:.0f} s; gone on with, {SAME}",
        run=signals,
        short=4,
        long=30,
    ),
    "R4": Case(
        description="a disk that is full from some file size on (RLIMIT_FSIZE)",
        passes="exit code 4 and one line, the checkpoint before is intact, nothing is left over; "
        f"with room again it goes on, and {SAME}",
        run=full_disks,
        short=5,
        long=20,
    ),
    "R14": Case(
        description=f"kills, signals and full disks in one run, one in {STEPS_PER_FAULT} steps",
        passes=f"at the end, {SAME}, whose memory and open files did not grow",
        run=soak,
        short=6,
        long=200,
    ),
    "R16": Case(
        description="R1 and R10 on a GPU by Transformer Engine, delayed and current",
        passes="as in R1 and R10",
        run=on_cuda,
        short=10,
        long=50,
        needs_cuda=True,
    ),
}
