"""The first visit to a new GPU: `bench gpu --minutes 9`, or `bench gpu --part 1`.

Each task is a command in a process of its own with a time limit; it may fail or hang without
affecting the others. Tasks that measure time run alone, the others side by side. A task that has
ended adds a line to `visit.jsonl`; the same command then continues after the tasks that are there.
A dry run does the same on a CPU with tiny sizes, and collects the tests for a pretended GPU.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
MINUTES = 8.8  # of a part, by default: machines that are lent limit a command to ten
LEAST_S = 15.0  # no task starts with less time left
ENDS_EARLIER_S = 35.0  # a task that knows its time ends so long before it would be stopped
DUMP_S = 2.0  # what a stopped task has to print where it is
CUT_SHORT = 75  # the exit code of a task that left something out for want of time
DRY_PATIENCE = 5.0  # a dry run has so many times as long: small machines are slow, or busy
SHOWN = 15  # lines to print of a task that failed
RECORDS = "visit.jsonl"
PARTS = {
    1: "the installation, a compiled step in each recipe, peak rates; tests of kernels and plans",
    2: "casts, histories, layers and losses held to the CPU and to TE; TE's golden file",
    3: "steps of GPT-2, bf16 and delayed",
    4: "the shapes of an 8B model, the head in bf16 and in FP8",
    5: "training, waiting and telemetry, deterministic and not",
}


@dataclass(frozen=True)
class Task:
    """A command. `words` follow `python -m`; `{out}` stands for the folder of the visit, and
    `{scratch}` for a temporary folder.

    `{seconds}` is the time that the command gives itself, less than its limit.

    Attributes:
        part_number: the key in `PARTS`.
        seconds: the time limit, after which the command is stopped.
        dry: additional words in a dry run, or, with `instead`, all of its words.
        alone: whether it measures time, so that nothing else may run meanwhile.
    """

    part_number: int
    name: str
    words: str
    seconds: float
    dry: str = ""
    instead: bool = False
    alone: bool = False

    def command(
        self, out: Path, scratch: Path, dry: bool, seconds: float | None = None
    ) -> list[str]:
        text = self.dry if dry and self.instead else f"{self.words} {self.dry if dry else ''}"
        ends_s = max(0.0, (seconds or self.seconds) - ENDS_EARLIER_S)
        places = {"out": str(out), "scratch": str(scratch), "seconds": f"{ends_s:.0f}"}
        return [sys.executable, "-m", *(word.format(**places) for word in shlex.split(text))]

    def log(self, out: Path) -> Path:
        """The file of its output."""
        return (
            out / "logs" / f"{self.part_number}-{re.sub(r'[^a-z0-9]+', '-', self.name.lower())}.txt"
        )


def first_step(recipe: str) -> Task:
    """Compiled training steps of a small model."""
    words = f"bench.gpu.first_step --recipe {recipe} --out {{out}}/first-steps.jsonl"
    return Task(1, f"first step in {recipe}", words, 170, "--tiny")


def tests(part_number: int, name: str, seconds: float) -> Task:
    """The GPU tests of this name; a dry run only imports and collects them."""
    words = f"pytest -v -p no:cacheprovider tests/gpu/test_gpu_{name}.py"
    dry = "-p tests.support.pretend_gpu --collect-only"
    return Task(part_number, f"tests of {name}", words, seconds, dry)


def section(name: str, seconds: float, alone: bool = False) -> Task:
    """A section of `bench gpu`. A dry run has two cases of it, on the CPU; layers and losses, which
    are too large for a CPU, are compared in `conform`'s short form, and in a run of two steps."""
    words, dry = (
        f"bench gpu --sections {name} --out {{out}}/{name} --seconds {{seconds}}",
        "--device cpu --quick --cases 2",
    )
    if name == "layers":
        dry = "fp8stack conform --quick --device cpu --only 'gemms: ' --out {out}/layers.json"
    elif name == "losses":
        dry = f"fp8stack pretrain --recipe delayed --out {{scratch}}/losses {TINY_RUN}"
    instead = name in ("layers", "losses")
    return Task(2, name, words, seconds, dry, instead, alone)


def steps(part_number: int, model: str, recipes: str, seconds: float, more: str = "") -> Task:
    """Training steps of a model, each recipe with its own row and profile."""
    name = f"steps of {model} in {recipes}{', head in FP8' if '--head' in more else ''}"
    words = f"bench.gpu.steps --out {{out}}/steps.jsonl --model {model} --recipes {recipes} {more}"
    return Task(part_number, name, words, seconds, "--tiny --rounds 6 --budget 2", alone=True)


def training(key: str) -> Task:
    """A small run, whose loss and speed are in the log."""
    run = (
        "fp8stack pretrain --model gpt-nano --recipe delayed --set model_overrides.context=320 "
        f"--set deterministic={key} --out {{scratch}}/{key}"
    )
    full = f"{run} --context 320 --steps 300"
    return Task(5, f"a run with deterministic={key}", full, 100, f"{run} {TINY_RUN}", True)


TINY_RUN = (
    "--steps 2 --batch 2 --context 32 --set model_overrides.layers=1 --set eval_windows=2 "
    "--set sample_tokens=0 --set warmup_steps=1 --device cpu"
)
RECIPES = ("bf16", "delayed", "current", "block", "mxfp8", "rowwise", "nvfp4")
# The most valuable first: what a visit that is cut off leaves out is at the end.
TASKS = (
    Task(1, "packages", "bench.gpu.wheels missing", 30),
    Task(1, "doctor", "fp8stack doctor --json", 60),
    *map(first_step, RECIPES),
    Task(1, "ceilings", "bench.gpu.ceilings --out {out}/ceilings.jsonl", 90, "--tiny", alone=True),
    steps(3, "gpt2-1.5b", "bf16,delayed", 240, "--profile"),
    tests(1, "kernels", 300),
    tests(1, "plan", 300),
    section("casts", 150),
    section("histories", 120),
    section("golden", 90),
    section("layers", 150),
    steps(3, "gpt2-124m", "bf16,delayed,current,block", 200),
    steps(4, "llama-8b-2-layers", "bf16,delayed,current", 200),
    steps(4, "llama-8b-2-layers", "delayed,current", 150, "--head --profile"),
    tests(5, "sync", 150),
    tests(5, "telemetry", 150),
    tests(5, "training", 400),
    training("true"),
    training("false"),
    section("losses", 400, alone=True),
)


def _without_cores() -> None:
    """Disable core dumps in the child process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class Running:
    """A task in progress, from `start` to `ended`.

    Args:
        seconds: its time limit.
        threads: the number of threads of its libraries; None for their own choice.
    """

    def __init__(
        self, task: Task, command: list[str], log: Path, seconds: float, threads: int | None
    ) -> None:
        self.task, self.command, self.log = task, command, log
        self._began, self._limit = time.monotonic(), seconds
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        if threads is not None:
            names = ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")
            environment |= dict.fromkeys(names, str(threads))
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                stdout=file, stderr=file, start_new_session=True, preexec_fn=_without_cores,
            )  # fmt: skip

    @property
    def seconds(self) -> float:
        """The time since it started."""
        return time.monotonic() - self._began

    def ended(self) -> str:
        """The task's ending, "" while it runs. Stops a task whose time is up."""
        code = self._process.poll()
        if code is None and self.seconds < self._limit:
            return ""
        if code is None:
            self.stop()
            return f"stopped after {self._limit:.0f} s"
        if code == CUT_SHORT:
            return "stopped by itself, its time was up"
        return "done" if code == 0 else f"failed with exit code {code}"

    def stop(self) -> None:
        """End the process and those that it started. The log gets the stacks of its threads."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(DUMP_S)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class Visit:
    """Runs tasks within a time limit, and records how each ended.

    Args:
        out: the folder of records, logs and results.
        seconds: the time for all tasks together.
        dry: whether to run on a CPU with tiny sizes.
        archive: a file that gets all of `out` after each task.
    """

    def __init__(self, out: Path, seconds: float, dry: bool, archive: Path | None = None) -> None:
        self.out = out.resolve()  # the tasks run in another folder
        self.dry, self.archive = dry, archive and archive.resolve()
        self._patience = DRY_PATIENCE if dry else 1.0
        self._end = time.monotonic() + seconds
        self._running: list[Running] = []

    def run(self, tasks: Sequence[Task]) -> bool:
        """Run the tasks that are not recorded yet, those that were stopped before at the end.
        Returns whether all tasks are done."""
        if self.archive is not None:
            self.archive.parent.mkdir(parents=True, exist_ok=True)
        self._unpack()
        (self.out / "logs").mkdir(parents=True, exist_ok=True)
        endings, attempted = self.recorded(), {record["task"] for record in self._records()}
        remaining = [task for task in tasks if task.name not in endings]
        remaining.sort(key=lambda task: task.name in attempted)
        if len(remaining) < len(tasks):
            print(f"{len(tasks) - len(remaining)} of {len(tasks)} tasks are recorded in {self.out}")
        before = signal.signal(signal.SIGTERM, self._stop)
        try:
            with tempfile.TemporaryDirectory() as scratch:
                for alone, group in groupby(remaining, key=lambda task: task.alone):
                    self._run_group(list(group), Path(scratch), alone)
        finally:
            for running in self._running:
                running.stop()
            self._pack()
            signal.signal(signal.SIGTERM, before)
        endings = self.recorded()
        unfinished = [task.name for task in tasks if task.name not in endings]
        failed = [task.name for task in tasks if endings.get(task.name, "done") != "done"]
        if unfinished:
            names = ", ".join(unfinished)
            print(f"The time is up; left out: {names}. The same command continues there.")
        if failed:
            print(f"Failed: {', '.join(failed)}.")
        return not unfinished and not failed

    def recorded(self) -> dict[str, str]:
        """The endings of tasks that need not run again, by name: of those that were done, and those
        that failed before their time was up. A last line that was cut off does not count."""
        endings: dict[str, str] = {}
        for record in self._records():
            if not record["ended"].startswith("stopped"):
                endings[record["task"]] = record["ended"]
        return endings

    def _records(self) -> Iterator[dict[str, Any]]:
        path = self.out / RECORDS
        for line in path.read_text().splitlines() if path.exists() else ():
            with suppress(json.JSONDecodeError):
                record = json.loads(line)
                if record["dry_run"] == self.dry:
                    yield record

    def _unpack(self) -> None:
        """Take over what an earlier visit has put into the archive, if `out` has no records."""
        if self.archive is None or (self.out / RECORDS).exists() or not self.archive.is_file():
            return
        self.out.mkdir(parents=True, exist_ok=True)
        with tarfile.open(self.archive) as packed:
            packed.extractall(self.out, filter="data")

    def _pack(self) -> None:
        """Put all of `out` into the archive."""
        if self.archive is None:
            return
        fresh = self.archive.with_name(f".{self.archive.name}.new")
        names = {fresh.name, self.archive.name}  # it may lie in `out`
        try:
            with tarfile.open(fresh, "w:gz") as packed:
                for path in sorted(self.out.iterdir()):
                    if path.name not in names:
                        packed.add(path, path.name)
            fresh.replace(self.archive)
        except OSError as error:  # a task writes; after the next one all is packed again
            print(f"not packed: {error}", flush=True)

    def _run_group(self, tasks: list[Task], scratch: Path, alone: bool) -> None:
        cores = os.cpu_count() or 1
        places = 1 if alone else max(1, min(len(tasks), cores // 2))
        threads = None if places == 1 else max(1, cores // places)
        while tasks or self._running:
            while tasks and len(self._running) < places:
                left_s = self._end - time.monotonic()
                knows_its_time = "{seconds}" in tasks[0].words
                if left_s < LEAST_S + ENDS_EARLIER_S * knows_its_time:
                    tasks.clear()
                    break
                task = tasks.pop(0)
                limit_s = min(task.seconds * self._patience, left_s)
                command = task.command(self.out, scratch, self.dry, limit_s)
                print(f"{task.name}: started", flush=True)
                self._running.append(Running(task, command, task.log(self.out), limit_s, threads))
            for running in list(self._running):
                if ended := running.ended():
                    self._running.remove(running)
                    self._record(running, ended)
            time.sleep(0.05)

    def _record(self, running: Running, ended: str) -> None:
        task, log = running.task, running.log
        record: dict[str, Any] = {
            "task": task.name,
            "part": task.part_number,
            "ended": ended,
            "seconds": round(running.seconds, 1),
            "command": running.command[1:],
            "log": log.name,
            "dry_run": self.dry,
        }
        with (self.out / RECORDS).open("a") as file:
            file.write(json.dumps(record) + "\n")
        self._pack()
        print(f"{task.name}: {ended} after {running.seconds:.1f} s", flush=True)
        if ended != "done":
            lines = log.read_text(errors="replace").splitlines()
            print(*lines[-SHOWN:], sep="\n", flush=True)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)


def run(
    part_number: int | None,
    out: Path,
    minutes: float | None,
    dry: bool,
    archive: Path | None = None,
) -> None:
    """Run a part, or all parts, in `minutes`, by default `MINUTES` for each part. Exits with code 1
    if a task failed or is left."""
    tasks = [task for task in TASKS if part_number in (None, task.part_number)]
    numbers = sorted({task.part_number for task in tasks})
    for number in numbers:
        print(f"part {number}: {PARTS[number]}", flush=True)
    if minutes is None:
        minutes = MINUTES * len(numbers) * (DRY_PATIENCE if dry else 1.0)
    good = Visit(out, 60 * minutes, dry, archive).run(tasks)
    print(f"written: {out}")
    if not good:
        raise SystemExit(1)
