"""The first half hour on a new GPU in five parts, each under nine minutes: `bench gpu --part 1`.

Every task runs in a separate process with a time limit, and may fail or hang without affecting the
others. The log of a part has the output of its tasks, and its JSON file how each task ended; both
are on disk at any moment. A dry run does the same on a CPU with tiny sizes, and collects the tests
for a pretended GPU.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
WHOLE = 530.0  # seconds for a part; a task may use the time that earlier tasks left
SHOWN = 15  # lines to print of a task that failed
# Layers and losses are left out: they are too large for a CPU.
FEW_CASES = "--device cpu --quick --cases 2 --sections casts,histories,golden"


@dataclass(frozen=True)
class Task:
    """One command of a part. `words` follow `python -m`; `{out}` stands for the part's folder and
    `{scratch}` for a temporary folder.

    Attributes:
        seconds: the time limit, after which the command is stopped.
        dry: additional words in a dry run, or, with `instead`, all of its words.
    """

    name: str
    words: str
    seconds: float
    dry: str = ""
    instead: bool = False

    def command(self, out: Path, scratch: Path, dry: bool) -> list[str]:
        text = self.dry if dry and self.instead else f"{self.words} {self.dry if dry else ''}"
        places = {"out": str(out), "scratch": str(scratch)}
        return [sys.executable, "-m", *(word.format(**places) for word in shlex.split(text))]


def tests(names: str, seconds: float) -> Task:
    """The GPU tests of these names; a dry run only imports and collects them."""
    files = " ".join(f"tests/gpu/test_gpu_{name}.py" for name in names.split())
    words = f"pytest -q -p no:cacheprovider {files}"
    dry = "-p tests.support.pretend_gpu --collect-only"
    return Task(f"tests of {names}", words, seconds, dry)


def steps(model: str, recipes: str, seconds: float, more: str = "") -> Task:
    """Training steps of a model, each recipe with its own row and profile."""
    name = f"steps of {model} in {recipes}{', head in FP8' if '--head' in more else ''}"
    words = f"bench.gpu.steps --out {{out}}/steps.jsonl --model {model} --recipes {recipes} {more}"
    return Task(name, words, seconds, "--tiny --rounds 6 --budget 2")


def training(key: str) -> Task:
    """A small run, whose loss and speed are in the log."""
    run = (
        "fp8stack pretrain --model gpt-nano --recipe delayed --set model_overrides.context=320 "
        f"--set deterministic={key} --out {{scratch}}/{key}"
    )
    tiny = (
        "--steps 2 --batch 2 --context 32 --set model_overrides.layers=1 --set eval_windows=2 "
        "--set sample_tokens=0 --set warmup_steps=1 --device cpu"
    )
    return Task(
        f"a run with deterministic={key}",
        f"{run} --context 320 --steps 300",
        100,
        f"{run} {tiny}",
        True,
    )


@dataclass(frozen=True)
class Part:
    description: str
    tasks: Sequence[Task] = field(default_factory=tuple)


PARTS = {
    1: Part(
        "what this machine is, what it reaches, and whether kernels, numbers and plans are right",
        (
            Task("doctor", "fp8stack doctor --json", 60),
            Task("ceilings", "bench.gpu.ceilings --out {out}/ceilings.jsonl", 90, "--tiny"),
            tests("kernels numbers plan", 450),
        ),
    ),
    2: Part(
        "casts, histories, layers and losses held to the CPU and to TE; TE's golden file",
        (Task("bench gpu", "bench gpu --out {out}", 520, FEW_CASES),),
    ),
    3: Part(
        "steps of GPT-2, bf16 and delayed",
        (
            steps("gpt2-1.5b", "bf16,delayed", 300, "--profile"),
            steps("gpt2-124m", "bf16,delayed,current,block", 300),
        ),
    ),
    4: Part(
        "the shapes of an 8B model, the head in bf16 and in FP8",
        (
            steps("llama-8b-2-layers", "bf16,delayed,current", 240),
            steps("llama-8b-2-layers", "delayed,current", 160, "--head --profile"),
        ),
    ),
    5: Part(
        "training, waiting and telemetry, deterministic and not",
        (tests("sync telemetry", 150), training("true"), training("false"), tests("training", 400)),
    ),
}


class Visit:
    def __init__(self, number: int, out: Path, dry: bool) -> None:
        out = out.resolve()  # the tasks run in another folder
        self.part, self.out, self.dry = PARTS[number], out, dry
        self.log, self.summary = out / f"part-{number}.log", out / f"part-{number}.json"
        self.report: dict[str, Any] = {
            "part": number, "what": self.part.description, "dry_run": dry, "tasks": [],
        }  # fmt: skip
        self.child: subprocess.Popen[bytes] | None = None

    def run(self) -> bool:
        end = time.monotonic() + WHOLE
        out = self.out
        out.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        before = signal.signal(signal.SIGTERM, self._stop)
        try:
            with tempfile.TemporaryDirectory() as scratch:
                for task in self.part.tasks:
                    self._do(task, Path(scratch), end - time.monotonic())
        finally:
            signal.signal(signal.SIGTERM, before)
        return all(task["ended"] == "done" for task in self.report["tasks"])

    def _do(self, task: Task, scratch: Path, remaining_s: float) -> None:
        command = task.command(self.out, scratch, self.dry)
        row = {"task": task.name, "command": command[1:], "ended": "under way", "seconds": 0.0}
        self.report["tasks"].append(row)
        self._write()
        start = time.monotonic()
        with self.log.open("ab") as log:
            log.write(f"\n==== {task.name}: python {' '.join(command[1:])}\n".encode())
            log.flush()
            begin = log.tell()
            row["ended"] = self._process(command, log, min(task.seconds, remaining_s))
        row["seconds"] = round(time.monotonic() - start, 1)
        self._write()
        print(f"{task.name}: {row['ended']} after {row['seconds']} s", flush=True)
        if row["ended"] != "done":
            with self.log.open("rb") as log:
                log.seek(begin)
                lines = log.read().decode(errors="replace").splitlines()
            print(*lines[-SHOWN:], sep="\n", flush=True)

    def _process(self, command: list[str], log: Any, seconds: float) -> str:
        if seconds <= 0:
            return "left out: no time was left"
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self.child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = self.child.wait(seconds)
        except subprocess.TimeoutExpired:
            self._kill()
            return f"stopped after {seconds:.0f} s"
        finally:
            self.child = None
        return "done" if code == 0 else f"failed with exit code {code}"

    def _kill(self) -> None:
        if self.child is not None:
            os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._kill()
        raise SystemExit(128 + number)

    def _write(self) -> None:
        self.summary.write_text(json.dumps(self.report, indent=2) + "\n")


def run(number: int | None, out: Path, dry: bool) -> None:
    """Run one part, or all parts for a dry run. Exits with code 1 if a task failed."""
    chosen = [number] if number else list(PARTS)
    good = True
    for part_number in chosen:
        print(f"part {part_number}: {PARTS[part_number].description}", flush=True)
        good = Visit(part_number, out, dry).run() and good
    print(f"written: {out}")
    if not good:
        raise SystemExit(1)
