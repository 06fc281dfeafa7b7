"""The folder of a run: `run.toml`, `plan.json`, `metrics.jsonl`, `checkpoints/` and more."""

import itertools
import json
import os
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from fp8stack.checkpoint.reader import candidates, step_of
from fp8stack.checkpoint.writer import forget_after, sweep
from fp8stack.config import FREE_ON_RESUME, RunConfig, parse_config, with_files
from fp8stack.errors import StorageError, UserError
from fp8stack.io import TEMPORARY, lock, storage_errors, write_atomically
from fp8stack.tokenizer import TOKENIZER_FILE

BESIDES = (
    *("report.html", "report_files/*.png", "presets/*.toml", "tensorboard/events.out.tfevents.*"),
    *("profile/trace.json.gz", "profile/profile.md", "forecast.json"),
)
"""Files in a run's folder, besides its own, that are written for it."""


class RunFolder:
    """The files of one run in the folder `path`. Another run never writes over them."""

    def __init__(self, path: Path) -> None:
        self.path, self.config, self.metrics = path, path / "run.toml", path / "metrics.jsonl"
        self.plan, self.tokenizer = path / "plan.json", path / TOKENIZER_FILE
        self.telemetry, self.debug = path / "telemetry.jsonl", path / "debug.jsonl"
        self.plot, self.sample = path / "loss.png", path / "sample.txt"
        self.sessions = path / "sessions.jsonl"
        self.profile, self.presets = path / "profile", path / "presets"
        self.checkpoints = path / "checkpoints"
        self._own = [self.plan, self.tokenizer, self.telemetry, self.debug, self.plot, self.sample]
        self._own.append(self.sessions)
        self._lock: TextIO | None = None
        self._made: list[Path] = []  # the folders that this process made for it

    @property
    def holds_run(self) -> bool:
        """Whether a run was started here."""
        return self.config.exists() or self.metrics.exists()

    @property
    def cut_at(self) -> tuple[int, int] | None:
        """Where a run that was not trained to its end goes on from, and its last step; else
        None."""
        with suppress(UserError):
            if self.config.exists():
                steps = parse_config(str(self.config), {}).steps
                done = max(map(step_of, candidates(self.checkpoints)), default=0)
                return (done, steps) if done < steps else None
        return None

    def next_commands(self) -> list[str]:
        """What one may do with the run now, as lines for a terminal."""
        path = shlex.quote(str(self.path))
        commands = {
            f"fp8stack report {path}": "losses, speed and FP8 as a page",
            f"fp8stack generate {path}": "text of the model",
            f"fp8stack forecast {path}": "what other recipes would cost",
            f"fp8stack export {path} --out DIR": "the model for transformers or vLLM",
        }
        if self.cut_at is not None:
            commands = {f"fp8stack pretrain --resume {path}": "go on training"} | commands
        width = max(map(len, commands))
        return ["next:", *(f"  {line:{width}}  {what}" for line, what in commands.items())]

    @property
    def is_vacant(self) -> bool:
        """Whether this is a folder with nothing in it but what a start leaves that was cut
        early."""
        if not self.path.is_dir():
            return False
        names = {p.name for p in self.path.iterdir() if not p.name.startswith(TEMPORARY)}
        return names <= {".lock", self.checkpoints.name} and self._has_no_checkpoints

    @property
    def _has_no_checkpoints(self) -> bool:
        """Whether `checkpoints` is missing, or a folder without anything that is finished."""
        if not self.checkpoints.is_dir():
            return not self.checkpoints.exists()
        return all(path.name.startswith(TEMPORARY) for path in self.checkpoints.iterdir())

    def require_free(self) -> None:
        """Raise a UserError unless a new run can be made here: there is no run, and no file."""
        if self.holds_run:
            raise UserError(
                f"{self.path} holds a run already. Go on with it by --resume auto, give another "
                "--out, or remove it by --overwrite."
            )
        self.require_folder()
        found = [path for path in (*self._own, self.profile) if path.exists()]
        found += [] if self._has_no_checkpoints else [self.checkpoints]
        if found:
            raise UserError(f"{found[0]} is in the way: it is no run's. Give another --out.")

    def require_folder(self) -> None:
        """See that there is a folder here, or nothing. Raises a UserError if there is a file."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is a file. Give a folder as --out.")

    def files(self) -> list[Path]:
        """The files here that a run wrote, checkpoints apart. Raises what `require_folder`
        raises."""
        self.require_folder()
        besides = [file for pattern in BESIDES for file in sorted(self.path.glob(pattern))]
        # Those that make it a run come last: cut short, it still is one, without checkpoints.
        files = (*self._own, *besides, self.metrics, self.config)
        return [file for file in files if file.is_file()]

    def remove(self, files: Iterable[Path]) -> str | None:
        """Remove the checkpoints and these `files`, and say so in a line; None if there was
        nothing. Whatever else lies in the folder stays; it is claimed already. Raises a
        StorageError if a file cannot be removed."""
        names = [path.name for path in candidates(self.checkpoints)]
        forget_after(self.checkpoints, -1)
        with storage_errors(self.path):
            for file in files:
                names.append(str(file.relative_to(self.path)))
                file.unlink()
                if file.parent != self.path:
                    with suppress(OSError):  # other things are in there
                        file.parent.rmdir()
        return f"overwrote the run in {self.path}: removed {', '.join(names)}" if names else None

    def claim(self) -> None:
        """Make the folder and hold it until this process ends; what a process that died while it
        wrote left behind is removed. Raises a UserError if another process trains in it, and a
        StorageError if it cannot be made."""
        with storage_errors(self.path):
            self._made = [path for path in (self.path, *self.path.parents) if not path.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("a")
        if not lock(self._lock.fileno()):
            raise UserError(
                f"Another process trains in {self.path}. Wait for it or give another --out."
            )
        with storage_errors(self.path):
            self.checkpoints.mkdir(exist_ok=True)
            sweep(self.path)
            sweep(self.checkpoints)

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Within, an error lets others have the folder; one that was made for nothing goes."""
        try:
            yield
        except BaseException:
            if self._made and self.is_vacant:
                with suppress(OSError):  # something else was put there
                    (self.path / ".lock").unlink()
                    for folder in (self.checkpoints, *self._made):
                        folder.rmdir()
            self.release()
            raise

    def release(self) -> None:
        """Let others have the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def keep_files(self, config: RunConfig) -> RunConfig:
        """Copy the user's model and recipe files here, so that the run does not need them again.
        Returns `config` with the copies, and the run's own tokenizer file, in their place. Raises a
        StorageError if a file cannot be copied."""

        def kept(path: str) -> str:
            if not path.endswith(".toml"):
                return os.path.abspath(self.tokenizer)
            with storage_errors(self.presets):
                content = Path(path).read_bytes()
                self.presets.mkdir(exist_ok=True)
                for number in itertools.count(1):
                    name = f"{Path(path).stem}{f'-{number}' if number > 1 else ''}.toml"
                    copy = self.presets / name
                    if not copy.exists():
                        write_atomically(copy, content)
                    if copy.read_bytes() == content:
                        return os.path.abspath(copy)
            raise AssertionError

        return with_files(config, kept)

    def portable(self, config: RunConfig) -> RunConfig:
        """`config` with the files of this folder named from it, so that it can be moved."""
        home = os.path.abspath(self.path)

        def inside(path: str) -> str:
            return os.path.relpath(path, home) if path.startswith(home + os.sep) else path

        return with_files(config, inside)

    def write_plan(self, plan: dict[str, Any]) -> None:
        """Save the plan, as JSON."""
        write_atomically(self.plan, (json.dumps(plan, indent=2) + "\n").encode())

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Add one line to the metrics; it is on its way to the disk when this returns."""
        _append(self.metrics, [row])

    @contextmanager
    def session(
        self, step: Callable[[], int], versions: Mapping[str, str]
    ) -> Iterator[dict[str, str]]:
        """Within, the run is trained: when that began and ended, after which `step`, and how, is in
        `sessions.jsonl`. What kills a process writes no end. `how` in what this gives is "done"
        until something else is put there."""
        started = time.monotonic()
        row = {"event": "begin", "time": _now(), "step": step(), "versions": dict(versions)}
        _append(self.sessions, [row])
        ended = {"how": "done"}
        try:
            yield ended
        except BaseException as error:
            ended["how"] = str(error).partition("\n")[0] or type(error).__name__
            raise
        finally:
            seconds = round(time.monotonic() - started, 1)
            row = {"event": "end", "time": _now(), "step": step(), "seconds": seconds} | ended
            with suppress(StorageError):  # what ended it is the news
                _append(self.sessions, [row])

    def append_telemetry(self, rows: Sequence[dict[str, Any]], plan: dict[str, Any]) -> None:
        """Add the rows of a sample to the telemetry, which begins with the `plan`."""
        header = [] if self.telemetry.exists() else [{"event": "plan", "plan": plan}]
        _append(self.telemetry, [*header, *rows])

    def sync_metrics(self) -> None:
        """Flush metrics and telemetry to the disk: a checkpoint must not be ahead of them."""
        for path in (self.metrics, self.telemetry):
            if path.exists():
                with storage_errors(path), path.open("rb") as stream:
                    os.fsync(stream.fileno())

    def read_metrics(self) -> list[dict[str, Any]]:
        """The metrics so far; a line that was cut short by a crash ends them."""
        return read_rows(self.metrics, {})

    def complete_metrics(self, step: int, more: dict[str, Any]) -> None:
        """Add `more` to the last row of `step`, or a row."""
        rows = self.read_metrics()
        last = next((row for row in reversed(rows) if row["step"] == step and "loss" in row), None)
        if last is None:
            rows.append({"step": step} | more)
        else:
            last |= more
        write_atomically(self.metrics, _lines(rows))

    def forget_after(self, step: int) -> None:
        """Drop metrics and checkpoints after `step`: those steps are about to be done again."""
        forget_after(self.checkpoints, step)
        write_atomically(self.metrics, _lines(_up_to(step, self.read_metrics())))
        if self.telemetry.exists():
            rows = read_rows(self.telemetry, {"step": 0})
            write_atomically(self.telemetry, _lines(_up_to(step, rows)))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with storage_errors(path), path.open("ab") as stream:
        stream.write(_lines(rows))


def _lines(rows: Sequence[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()


def read_rows(path: Path, defaults: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of a file of lines, up to one that is cut or has no step, nor by `defaults`."""
    rows: list[dict[str, Any]] = []
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    with suppress(ValueError, RecursionError):
        for line in text.splitlines():
            row = json.loads(line)
            json.dumps(row, allow_nan=False)  # it may be written again
            if not isinstance(row, dict) or not isinstance((defaults | row).get("step"), int):
                break
            rows.append(row)
    return rows


def _up_to(step: int, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows up to the last of `step` or one before it. Before those there may be some of later
    steps, which were rolled back, and the events that tell so."""
    kept = [number for number, row in enumerate(rows, 1) if row.get("step", 0) <= step]
    return list(rows[: max(kept, default=0)])


def choose_folder(config: RunConfig, resume: bool) -> RunFolder:
    """`--out`, or `runs/<model>-<recipe>`, or that with a number: the first that is free. To
    resume, the last run in `runs` that was cut and that `config` may go on with; else the last of
    that name."""
    if config.out:
        return RunFolder(Path(config.out))
    cut = (run for run in cut_runs() if _agree(parse_config(str(run.config), {}), config))
    if resume and (found := next(cut, None)):
        return found
    stem = f"{Path(config.model).stem}-{Path(config.recipe).stem}"
    used = None
    for number in itertools.count(1):
        folder = RunFolder(Path("runs") / (f"{stem}-{number}" if number > 1 else stem))
        if not folder.path.exists() or (not resume and folder.is_vacant):
            break
        used = folder if folder.holds_run else used
    return used if resume and used else folder


def cut_runs() -> Iterator[RunFolder]:
    """The runs in `runs` that were not trained to their end, the last one first."""
    folders = [path.parent for path in Path("runs").glob("*/run.toml")]
    for path in sorted(folders, key=lambda path: (path / "run.toml").stat().st_mtime, reverse=True):
        if RunFolder(path).cut_at is not None:
            yield RunFolder(path)


def _agree(saved: RunConfig, asked: RunConfig) -> bool:
    """Whether what `asked` gives is of the run `saved`, as far as names tell."""
    named = {"model", "recipe"} & asked.given.keys()
    fixed = asked.given.keys() - FREE_ON_RESUME - {"init_from"}
    pairs = [(Path(getattr(saved, key)).stem, Path(getattr(asked, key)).stem) for key in named]
    pairs += [(getattr(saved, key), getattr(asked, key)) for key in fixed]
    return all(there == here for there, here in pairs)
