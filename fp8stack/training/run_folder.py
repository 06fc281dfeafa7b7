"""The folder of a run: `run.toml`, `plan.json`, `metrics.jsonl`, `checkpoints/` and more."""

from __future__ import annotations

import itertools
import json
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from fp8stack.common import presets
from fp8stack.common.errors import StorageError, UserError
from fp8stack.common.io import (
    LOCK,
    TEMPORARY,
    is_held,
    json_lines,
    lock,
    restrict,
    storage_errors,
    sweep,
    write_atomically,
)
from fp8stack.common.terminal import shell_quoted
from fp8stack.data.tokenizer import (
    SPECIAL_TOKENS,
    TOKENIZER_FILE,
    Tokenizer,
    save_tokenizer,
)
from fp8stack.planning.run_config import (
    TRACKERS,
    RunConfig,
    parse_config,
    to_toml,
    with_files,
)
from fp8stack.training.checkpoint import writer
from fp8stack.training.checkpoint.reader import candidates, step_of
from fp8stack.training.checkpoint.writer import forget_after

BESIDES = (
    *("report.html", "report_files/*.png", "presets/*.toml", "tensorboard/events.out.tfevents.*"),
    *("profile/trace.json.gz", "profile/profile.md"),
)
"""Files that reports, trackers and profiles write into a run's folder."""


BRANCH, _BEGUN = "branch", "begun with "
"""The event that follows the metrics until the first checkpoint of a branch, and its reason, before
the path of its origin. It is written before that checkpoint."""


class RunFolder:
    """The files of one run, in the folder `path`. No other run overwrites them."""

    def __init__(self, path: Path) -> None:
        self.path, self.config, self.metrics = path, path / "run.toml", path / "metrics.jsonl"
        self.plan, self.tokenizer = path / "plan.json", path / TOKENIZER_FILE
        self.telemetry = path / "telemetry.jsonl"
        self.plot, self.sample = path / "loss.png", path / "sample.txt"
        self.sessions = path / "sessions.jsonl"
        self.profile, self.presets = path / "profile", path / "presets"
        self.checkpoints = path / "checkpoints"
        debug = path / "debug.jsonl"  # of earlier versions
        self._own = [self.plan, self.tokenizer, self.telemetry, debug, self.plot, self.sample]
        self._own += [self.sessions, path / SPECIAL_TOKENS]
        self._lock: TextIO | None = None
        self._made: list[Path] = []  # folders that this process created

    @property
    def holds_run(self) -> bool:
        """Whether a run was started in this folder."""
        return self.config.exists() or self.metrics.exists()

    @property
    def is_running(self) -> bool:
        """Whether a process trains in this folder, this one included."""
        return is_held(self.path / LOCK)

    @property
    def cut_at(self) -> tuple[int, int] | None:
        """The newest checkpoint's step (0 for none) and the last step of the run, if it is
        unfinished and no process trains it; else None."""
        with suppress(UserError):
            if self.config.exists() and not self.is_running:
                steps = parse_config(str(self.config), {}).steps
                done = max(map(step_of, candidates(self.checkpoints)), default=0)
                return (done, steps) if done < steps else None
        return None

    def go_on(self, config: RunConfig) -> str:
        """The command to resume this run, which `config` describes, with its trackers."""
        trackers = "".join(f" --{key}" for key in TRACKERS if getattr(config, key))
        return f"fp8stack pretrain --resume {shell_quoted(str(self.path))}{trackers}"

    def next_commands(self) -> list[str]:
        """The commands to use on the run next, as lines for a terminal."""
        path = shell_quoted(str(self.path))
        commands = {
            f"fp8stack report {path}": "losses, speed and FP8 as a page",
            f"fp8stack generate {path}": "text of the model",
            f"fp8stack export {path} --out DIR": "the model for transformers or vLLM",
        }
        if self.cut_at is not None:
            commands = {f"fp8stack pretrain --resume {path}": "go on training"} | commands
        width = max(map(len, commands))
        return ["next:", *(f"  {line:{width}}  {use}" for line, use in commands.items())]

    @property
    def is_vacant(self) -> bool:
        """Whether this folder holds only what an interrupted start leaves behind."""
        if not self.path.is_dir():
            return False
        names = {p.name for p in self.path.iterdir() if not p.name.startswith(TEMPORARY)}
        return names <= {LOCK, self.checkpoints.name} and self._has_no_checkpoints

    @property
    def _has_no_checkpoints(self) -> bool:
        """Whether `checkpoints` is missing, or a folder with temporary files only."""
        if not self.checkpoints.is_dir():
            return not self.checkpoints.exists()
        return all(path.name.startswith(TEMPORARY) for path in self.checkpoints.iterdir())

    def require_idle(self) -> None:
        """Raise a UserError if a process trains in this folder."""
        if self.is_running:
            raise self._in_use()

    def _in_use(self) -> UserError:
        return UserError(
            f"Another process trains in {self.path}. Wait for it or give another --out."
        )

    def require_free(self) -> None:
        """Raise a UserError if a run, a file that a run would write, or a process that trains here
        is in the way of a new run."""
        self.require_idle()
        if self.holds_run:
            raise UserError(
                f"{self.path} holds a run already. Go on with it by --resume auto, give another "
                "--out, or remove it by --overwrite."
            )
        self.require_folder()
        in_the_way = [path for path in (*self._own, self.profile) if path.exists()]
        in_the_way += [] if self._has_no_checkpoints else [self.checkpoints]
        if in_the_way:
            raise UserError(f"{in_the_way[0]} is in the way: it is no run's. Give another --out.")

    def require_folder(self) -> None:
        """Raise a UserError if the path of the folder is a file."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is a file. Give a folder as --out.")

    def require_own_files(self) -> None:
        """Raise a UserError if a file or folder that a run writes or removes is a symbolic link: in
        a run from someone else, it may point at any file of the user's."""
        folders = [self.checkpoints, self.presets, self.profile]
        folders += [self.path / name for name in ("tensorboard", "report_files")]
        files = [*self._own, self.metrics, self.config, self.path / LOCK]
        files.append(self.profile / "trace.json.gz")
        for path in (*folders, *files):
            if path.is_symlink():
                raise UserError(
                    f"{path} is a symbolic link, and a run writes and removes nothing through one. "
                    "Put what it points at in its place, or give another --out."
                )

    def remove(self) -> str | None:
        """Remove the files that a run wrote into the claimed folder; other files stay. Returns a
        line that lists them, None if there were none. Raises a StorageError if a file cannot be
        removed."""
        names = [path.name for path in candidates(self.checkpoints)]
        forget_after(self.checkpoints, -1)
        besides = [file for pattern in BESIDES for file in sorted(self.path.glob(pattern))]
        with storage_errors(self.path):
            # run.toml goes last: if interrupted, the folder still holds a run.
            for file in (*self._own, *besides, self.metrics, self.config):
                if not file.is_file():
                    continue
                names.append(str(file.relative_to(self.path)))
                file.unlink()
                if file.parent != self.path:
                    with suppress(OSError):  # not empty
                        file.parent.rmdir()
        return f"overwrote the run in {self.path}: removed {', '.join(names)}" if names else None

    def claim(self) -> None:
        """Create the folder, lock it until this process ends, and remove a crash's temporary files.
        Raises a UserError if another process trains in it, a StorageError if it cannot be
        created."""
        self.require_own_files()
        with storage_errors(self.path):
            self._made = [path for path in (self.path, *self.path.parents) if not path.exists()]
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / LOCK).open("a")
        # Another process may hold the lock for a moment, to see whether a process trains here.
        if not lock(self._lock.fileno(), wait_s=1.0):
            raise self._in_use()
        _closed_in_children(self)
        with storage_errors(self.path):
            self.checkpoints.mkdir(exist_ok=True)
            sweep(self.path)
            writer.sweep(self.checkpoints)

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """If an error occurs within, release the lock, and remove the folder if it was created for
        nothing."""
        try:
            yield
        except BaseException:
            if self._made and self.is_vacant:
                with suppress(OSError):  # not empty
                    (self.path / LOCK).unlink()
                    for folder in (self.checkpoints, *self._made):
                        folder.rmdir()
            self.release()
            raise

    def release(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def keep_files(self, config: RunConfig) -> RunConfig:
        """Copy the user's model and recipe files here, so that the run does not depend on the
        originals. Returns `config` with the paths of the copies and of the run's own tokenizer
        file. Raises a StorageError if a file cannot be copied."""

        def copied(path: str) -> str:
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

        return with_files(config, copied)

    def portable(self, config: RunConfig) -> RunConfig:
        """`config` with the paths that lie in this folder relative to it, so that the folder can be
        moved."""
        home = os.path.abspath(self.path)

        def inside(path: str) -> str:
            return os.path.relpath(path, home) if path.startswith(home + os.sep) else path

        return with_files(config, inside)

    def write(self, config: RunConfig, plan: dict[str, Any], tokenizer: Tokenizer | None) -> None:
        """Save `run.toml`, which repeats the run, the plan, and the tokenizer of the data, if it
        is known."""
        write_atomically(self.config, to_toml(self.portable(config)).encode())
        self.write_plan(plan)
        if tokenizer is not None:
            save_tokenizer(tokenizer, self.path)

    def write_plan(self, plan: dict[str, Any]) -> None:
        """Save the plan, as JSON."""
        write_atomically(self.plan, (json.dumps(plan, indent=2) + "\n").encode())

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append one line to the metrics, without waiting for the disk."""
        _append(self.metrics, [row])

    @contextmanager
    def session(
        self, step: Callable[[], int], versions: Mapping[str, str]
    ) -> Iterator[dict[str, str]]:
        """Record in `sessions.jsonl` when, and after which `step`, this process's training began
        and ended, and how it ended. The caller can replace the key `how` of the yielded dict, which
        is "done". A process that is killed records no end."""
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
            with suppress(StorageError):  # it would hide the error that ends the run
                _append(self.sessions, [row])

    def append_telemetry(self, rows: Sequence[dict[str, Any]], plan: dict[str, Any]) -> None:
        """Append the rows of a sample to the telemetry file, whose first row is the `plan`."""
        header = [] if self.telemetry.exists() else [{"event": "plan", "plan": plan}]
        _append(self.telemetry, [*header, *rows])

    def sync_metrics(self) -> None:
        """Flush metrics and telemetry to the disk: a checkpoint must not be ahead of them."""
        for path in (self.metrics, self.telemetry):
            if path.exists():
                with storage_errors(path), path.open("rb") as stream:
                    os.fsync(stream.fileno())

    def complete_metrics(self, step: int, more: dict[str, Any]) -> None:
        """Add the keys `more` to the row of `step` if it is the last row (events aside); else
        append a new row."""
        rows = _rows(self.metrics)
        last = next((row for row in reversed(rows) if "event" not in row), None)
        if last is None or last.get("step") != step:
            rows.append(last := {"step": step})
        last |= more
        write_atomically(self.metrics, _lines(rows))

    @property
    def origin(self) -> Path | None:
        """The path of the checkpoint that the run began with, if it is a branch."""
        events = [row for row in json_lines(self.metrics) if row.get("event") == BRANCH]
        return Path(str(events[-1].get("why")).removeprefix(_BEGUN)) if events else None

    def take_over_metrics(self, origin: Path, step: int) -> None:
        """Write the metrics until the checkpoint `origin` of another run, which is of `step`, and
        after them the event of a branch that begins with it."""
        rows = _up_to(step, _rows(RunFolder(origin.parent.parent).metrics))
        event = {"step": step, "event": BRANCH, "why": f"{_BEGUN}{origin.resolve()}"}
        write_atomically(self.metrics, _lines([*rows, event]))

    def forget_after(self, step: int) -> None:
        """Drop the metrics and checkpoints of steps after `step`, which are about to be
        repeated."""
        forget_after(self.checkpoints, step)
        write_atomically(self.metrics, _lines(_up_to(step, _rows(self.metrics))))
        if self.telemetry.exists():
            write_atomically(self.telemetry, _lines(_up_to(step, _rows(self.telemetry))))


def _closed_in_children(folder: RunFolder) -> None:
    """Release the lock in processes that are forked from this one, such as data workers: otherwise
    they could hold it after this process ends."""
    if hasattr(os, "register_at_fork"):
        reference = weakref.ref(folder)

        def release() -> None:
            if (claimed := reference()) is not None:
                claimed.release()

        os.register_at_fork(after_in_child=release)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    is_new = not path.exists()
    with storage_errors(path), path.open("ab") as stream:
        if is_new and os.name == "posix":
            restrict(stream.fileno(), path.parent)
        stream.write(_lines(rows, allow_nan=False))


def _lines(rows: Sequence[dict[str, Any]], *, allow_nan: bool = True) -> bytes:
    return "".join(json.dumps(row, allow_nan=allow_nan) + "\n" for row in rows).encode()


def _rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines, up to the first whose step is no integer."""
    rows = json_lines(path)
    return list(itertools.takewhile(lambda row: isinstance(row.get("step", 0), int), rows))


def _up_to(step: int, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows up to the last row of `step` or an earlier step, or the last event that went back
    before `step`. They may include rows of later steps that were rolled back."""
    counts = [
        count
        for count, row in enumerate(rows, 1)
        if row.get("step", 0) <= step
        or (isinstance(to_step := row.get("to_step"), int) and to_step < step)
    ]
    return list(rows[: max(counts, default=0)])


def new_folder(config: RunConfig, *, overwrite: bool = False) -> RunFolder:
    """The folder of a new run: `--out`, or the first free one of `runs/<model>-<recipe>`, `-2`,
    `-3` ... Raises a UserError if `--out` is not free, or with `overwrite` cannot be removed."""
    if config.out:
        folder = RunFolder(Path(config.out))
        if not overwrite:
            folder.require_free()
            return folder
        folder.require_folder()
        if folder.path.is_symlink():
            raise UserError(
                f"{folder.path} is a symbolic link, and --overwrite removes nothing through one. "
                f"Give --out {shell_quoted(os.path.realpath(folder.path))}"
            )
        return folder
    stem = f"{presets.label(config.model)}-{presets.label(config.recipe)}"
    for number in itertools.count(1):
        folder = RunFolder(Path("runs") / (f"{stem}-{number}" if number > 1 else stem))
        if not folder.path.exists() or (folder.is_vacant and not folder.is_running):
            return folder
    raise AssertionError
