"""A visit to a GPU: tasks within a time limit, each recorded when it ends.

A task is a command in a process of its own; it may fail or hang without affecting the others. A
dry run does the same on a CPU with tiny sizes.
"""

from __future__ import annotations

import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.cells import append_line, json_lines
from bench.gpu.facts import HEADLINE, ROOT

LEAST_S = 15.0  # no task starts with less time left
DUMP_S = 2.0  # for a stopped task to print where it is
DRY_PATIENCE = 5.0  # a dry run has so many times as long: small machines are slow, or busy
SHOWN, WIDEST = 20, 220  # lines of a task in the summary, and characters of a line
RECORDS, SUMMARY = "visit.jsonl", "summary.txt"
# An archive with this many bytes gets no further file, and longer files are cut into pieces, so
# that none is larger than 15 MiB.
FULL_ARCHIVE = PIECE = 7 * 2**20


@dataclass(frozen=True)
class Task:
    """A command."""

    part_number: int
    name: str
    words: str  # that follow `python -m`; `{out}` stands for the folder of the visit
    seconds: float  # after which it is stopped
    dry: str = ""  # additional words in a dry run

    def command(self, out: Path, dry: bool) -> list[str]:
        """The words of its command."""
        text = f"{self.words} {self.dry if dry else ''}"
        return [sys.executable, "-m", *(word.format(out=out) for word in shlex.split(text))]

    def log(self, out: Path) -> Path:
        """The file of its output."""
        name = re.sub(r"[^a-z0-9]+", "-", self.name.lower())
        return out / "logs" / f"{self.part_number}-{name}.txt"

    def headlines(self, out: Path, failed: bool) -> list[str]:
        """The lines of its output for the summary: the marked ones, or the last of a failure."""
        lines = self.log(out).read_text(errors="replace").splitlines()
        marked = [line.removeprefix(HEADLINE) for line in lines if line.startswith(HEADLINE)]
        last = lines[-8:] if failed else [] if marked else lines[-2:]
        return [line[:WIDEST] for line in marked[:SHOWN] + last]


def ended(command: list[str], log: Path, limit_s: float) -> str:
    """Run a command, with its output in a log. Returns its ending: "done", "failed with exit code
    1", or "stopped after 9 s", when the log gets the stacks of its threads."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    without_core = partial(resource.setrlimit, resource.RLIMIT_CORE, (0, 0))
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True, preexec_fn=without_core,
        )  # fmt: skip
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(DUMP_S)
        return f"stopped after {limit_s:.0f} s"
    finally:  # end what the process started
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return "done" if code == 0 else f"failed with exit code {code}"


class Visit:
    """Runs tasks within a time limit, and records how each ended.

    Args:
        out: the folder of records, logs and results.
        seconds: the time for all tasks together.
        dry: whether to run on a CPU with tiny sizes.
        archives: a folder that gets `out` in archives after each task.
    """

    def __init__(self, out: Path, seconds: float, dry: bool, archives: Path | None = None) -> None:
        self.out = out.resolve()  # the tasks run in another folder
        self.dry, self.archives = dry, archives and archives.resolve()
        self._patience = DRY_PATIENCE if dry else 1.0
        self._end = time.monotonic() + seconds

    def run(self, tasks: Sequence[Task]) -> bool:
        """Run the tasks that are not recorded yet, those that were stopped before at the end.
        Returns whether all tasks are done. The summary is printed last."""
        (self.out / "logs").mkdir(parents=True, exist_ok=True)
        endings, attempted = self.recorded(), {record["task"] for record in self._records()}
        remaining = [task for task in tasks if task.name not in endings]
        remaining.sort(key=lambda task: task.name in attempted)
        before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        try:
            for task in remaining:
                if self._end - time.monotonic() < LEAST_S:
                    break
                try:
                    self._run_task(task)
                finally:  # also where the visit is stopped
                    self._pack(tasks)
        finally:
            signal.signal(signal.SIGTERM, before)
        print(f"\n{self.summary(remaining)}", flush=True)
        endings = self.recorded()
        return all(endings.get(task.name) == "done" for task in tasks)

    def recorded(self) -> dict[str, str]:
        """The endings of tasks that need not run again, by name: of those that were done, and those
        that failed before their time was up."""
        records = self._records()
        return {r["task"]: r["ended"] for r in records if not r["ended"].startswith("stopped")}

    def _records(self) -> Iterator[dict[str, Any]]:
        """The records of such a visit, dry or not. A last line that was cut off does not count."""
        return (row for row in json_lines(self.out / RECORDS) if row["dry_run"] == self.dry)

    def summary(self, tasks: Sequence[Task]) -> str:
        """The endings of tasks, each with its most important lines."""
        records = {record["task"]: record for record in self._records()}
        lines = []
        for task in tasks:
            if record := records.get(task.name):
                lines.append(f"{task.name}: {record['ended']}, {record['seconds']:.0f} s")
                failed = record["ended"] != "done"
                lines += [f"  {line}" for line in task.headlines(self.out, failed)]
        endings = self.recorded()
        unfinished = [task.name for task in tasks if task.name not in endings]
        failed = [task.name for task in tasks if endings.get(task.name, "done") != "done"]
        if failed:
            lines.append(f"Failed: {', '.join(failed)}.")
        if unfinished:
            names = ", ".join(unfinished)
            lines.append(f"The time is up; left out: {names}. The same command continues there.")
        return "\n".join(lines)

    def _pack(self, tasks: Sequence[Task]) -> None:
        """Write the summary, and put `out` into the archives."""
        (self.out / SUMMARY).write_text(self.summary(tasks) + "\n")
        try:
            if self.archives is not None:
                pack(self.out, self.archives)
        except OSError as error:  # the tasks go on
            print(f"not packed: {error}", flush=True)

    def _run_task(self, task: Task) -> None:
        limit_s = min(task.seconds * self._patience, self._end - time.monotonic())
        print(f"{task.name}: started", flush=True)
        command, begin = task.command(self.out, self.dry), time.monotonic()
        record = {
            "task": task.name,
            "ended": ended(command, task.log(self.out), limit_s),
            "seconds": round(time.monotonic() - begin, 1),
            "command": command[1:],
            "log": task.log(self.out).name,
            "dry_run": self.dry,
        }
        append_line(self.out / RECORDS, record)
        print(f"{task.name}: {record['ended']} after {record['seconds']} s", flush=True)


def pack(folder: Path, archives: Path) -> None:
    """Put the files of a folder, the oldest first, into `1.zip`, `2.zip` and so on, without weights
    of runs. A file that is longer than `PIECE` is cut into pieces, `name.1`, `name.2`."""
    archives.mkdir(parents=True, exist_ok=True)
    files = [
        path
        for path in folder.rglob("*")
        if path.is_file() and "checkpoints" not in path.parts and archives not in path.parents
    ]
    files.sort(key=lambda path: path.stat().st_mtime)
    written: list[Path] = []
    for path in files:
        data = path.read_bytes()
        count = max(1, -(-len(data) // PIECE))
        for number in range(count):
            if not written or written[-1].stat().st_size > FULL_ARCHIVE:
                written.append(archives / f".{len(written) + 1}.zip.new")
                written[-1].unlink(missing_ok=True)
            name = f"{path.relative_to(folder)}{f'.{number + 1}' if count > 1 else ''}"
            with zipfile.ZipFile(written[-1], "a", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(name, data[number * PIECE : (number + 1) * PIECE])
    for path in written:
        path.replace(archives / path.name.removeprefix(".").removesuffix(".new"))
