"""Running a comparison, new or interrupted, up to its table."""

import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from typing import Any

from fp8stack.benchmark.timing import machine
from fp8stack.compare.plot import comparison_plot
from fp8stack.compare.results import NUMERIC_FAILURE, RunFigures, read_run
from fp8stack.compare.runs import Ended, Progress, Show, train, wait_until_idle
from fp8stack.compare.settings import Comparison, Job, as_saved, read_report
from fp8stack.compare.summary import RecipeFigures, about, pairs, seeds, summarize
from fp8stack.compare.table import as_markdown, as_text
from fp8stack.config import to_toml
from fp8stack.errors import UserError
from fp8stack.io import lock, storage_errors, write_atomically
from fp8stack.tables import counted
from fp8stack.terminal import say
from fp8stack.training.signals import stop_requests

DONE, PREEMPTED, INTERRUPTED = 0, 75, 130
# How a run ends that would end so again: done, or its numbers were not finite.
FINAL = (DONE, NUMERIC_FAILURE)


def compare(comparison: Comparison) -> int:
    """Train what is not trained yet, write the results, print the table; return the exit code: 0,
    or 75 if it was stopped by a signal, the run under way saved. Raises a UserError if no run came
    to its end, and a StorageError if the disk is full or cannot be written."""
    with storage_errors(comparison.out):
        comparison.out.mkdir(parents=True, exist_ok=True)
    with _alone(comparison):
        return _compare(comparison)


@contextmanager
def _alone(comparison: Comparison) -> Iterator[None]:
    """Hold the comparison's folder. Raises a UserError if another process does."""
    if os.name != "posix":  # no folder can be opened
        yield
        return
    descriptor = os.open(comparison.out, os.O_RDONLY)
    try:
        if not lock(descriptor):
            raise UserError(
                f"Another process compares in {comparison.out}. Wait for it or give another --out."
            )
        yield
    finally:
        os.close(descriptor)


def _compare(comparison: Comparison) -> int:
    found = _Results(comparison)
    found.write()  # first: it shows that the folder is a comparison's
    write_atomically(comparison.out / "base.toml", to_toml(comparison.config).encode())
    try:
        with Progress() as progress, stop_requests() as requested:
            stopped = _train_all(found, requested, progress)
    finally:
        text = found.write()
    written = f"written: {comparison.out}/compare.json, compare.md and compare.png"
    say("", *text.split("\n"), "", written)
    if stopped:
        say("stopped; what is done is kept. Go on with:", f"  {comparison.command}")
        return PREEMPTED
    if not any(ended.exit in FINAL for ended in found.ended.values()):
        name, ended = next(iter(found.ended.items()))
        raise UserError(
            f"No run came to its end. {name}: {ended.error}. All that the runs printed is in "
            f"{comparison.out / 'logs'}."
        )
    return DONE


class _Results:
    """The results of finished runs by name, on disk and in memory, and what they leave to do."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.machine = machine("accelerate", device=comparison.config.device)
        self.ended: dict[str, RunFigures] = {}
        self.last_seed = comparison.seeds - 1
        # How the runs of an earlier start ended, where they are still there.
        saved = read_report(comparison.report)["runs"] if comparison.report.exists() else []
        for run in saved:
            job = Job(recipe=run["recipe"], seed=run["seed"])
            if job.recipe not in comparison.recipes or run["exit"] is None:
                continue
            if comparison.folder(job).holds_run:
                self.add(
                    job, Ended(exit=run["exit"], error=run["error"], seconds=run.get("seconds"))
                )

    def add(self, job: Job, ended: Ended) -> RunFigures:
        """Note how a run ended, and return what it came to."""
        self.last_seed = max(self.last_seed, job.seed)
        self.ended[job.name] = figures = self._read(job, **vars(ended))
        return figures

    def has(self, job: Job) -> bool:
        """Whether the run has a final result."""
        return job.name in self.ended and self.ended[job.name].exit in FINAL

    def _read(self, job: Job, **ended: Any) -> RunFigures:
        return read_run(
            self.comparison.folder(job),
            **vars(job),
            steps=self.comparison.config.steps,
            vocabulary=self.comparison.vocabulary,
            **ended,
        )

    @property
    def runs(self) -> list[RunFigures]:
        """Of every recipe with every seed that it is to have, seed by seed."""
        jobs = (
            Job(recipe=recipe, seed=seed)
            for seed in range(self.last_seed + 1)
            for recipe in self.comparison.recipes
        )
        asked = self.comparison.seeds
        return [
            self.ended.get(job.name) or self._read(job, exit=None)
            for job in jobs
            if job.seed < asked or job.name in self.ended
        ]

    @property
    def rows(self) -> list[RecipeFigures]:
        """The results of each recipe."""
        comparison = self.comparison
        names = list(comparison.recipes)
        return summarize(self.runs, names, comparison.baseline, comparison.judging)

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds that a run takes, by recipe, where measured."""
        return {row.recipe: row.seconds for row in self.rows if row.seconds}

    def write(self) -> str:
        """Write `compare.json`, `.md` and `.png` of what there is, and return the table as text."""
        rows, comparison = self.rows, self.comparison
        baseline, config, out = comparison.baseline, comparison.config, comparison.out
        report = as_saved(comparison) | {
            "machine": self.machine,
            "recipes": [asdict(row) for row in rows],
            "runs": [run.model_dump(mode="json") for run in self.runs],
        }
        text = json.dumps(report, indent=1, allow_nan=False) + "\n"
        write_atomically(comparison.report, text.encode())
        write_atomically(out / "compare.md", as_markdown(rows, comparison, self.machine).encode())
        title = f"{config.model}, {counted(config.steps, 'step')}, {seeds(self.last_seed + 1)}"
        title += f"\n{comparison.shared}" * bool(comparison.shared)
        write_atomically(out / "compare.png", comparison_plot(rows, baseline, title))
        return as_text(rows, baseline, comparison.shared)

    # Pairs until intervals are narrow

    def open(self) -> list[str]:
        """The recipes whose interval is not narrow enough yet, and the baseline; none if all are.
        A recipe that diverged or failed has its verdict, and the baseline's is every one's."""
        until, baseline = self.comparison.judging.until, self.comparison.baseline
        bad = {run.recipe for run in self.runs if run.status in ("diverged", "failed")}
        if until is None or baseline in bad:
            return []
        gaps = ((row.recipe, row.gap_percent) for row in self.rows)
        wide = [
            recipe
            for recipe, gap in gaps
            if recipe not in bad | {baseline}
            and (gap is None or gap.half_width is None or gap.half_width > until)
        ]
        return [baseline, *wide] if wide else []

    def pairs_left(self) -> dict[str, int] | None:
        """How many pairs more each open recipe takes, one at least, since its interval is too wide,
        and the baseline; None if that is not known yet."""
        names, baseline = self.open(), self.comparison.baseline
        more: dict[str, int] = {}
        for row in self.rows if names else ():
            if row.recipe in names and row.recipe != baseline:
                gap = row.gap_percent
                count = None if gap is None else self.comparison.judging.more_pairs(gap)
                if count is None:
                    return None
                more[row.recipe] = max(1, count)
        return more and more | {baseline: max(more.values())}

    def outlook(self) -> Iterator[str]:
        """What is known of each recipe after a pair, and what is still to do."""
        comparison = self.comparison
        others = (row for row in self.rows if row.recipe != comparison.baseline)
        if comparison.shared:
            yield f"  {comparison.shared}"
        yield from (f"  {row.recipe}: {row.verdict}" for row in others)
        more = self.pairs_left()
        if more is None:
            yield "  how many pairs it takes is known after the second; the least is 3"
        elif not more:
            yield f"  every interval is at most ± {comparison.judging.until:g} %"
        else:
            took = about(_runs_s(self.seconds, more))
            yield f"  expected: about {pairs(max(more.values()), ' more')}, {took}"

    def runs_left(self, names: Sequence[str], seed: int) -> Counter[str]:
        """How many runs of each recipe are left from this seed on, as far as that is known."""
        of = range(seed, max(seed + 1, self.comparison.seeds))
        left = {n: sum(not self.has(Job(recipe=n, seed=seed)) for seed in of) for n in names}
        return Counter(left) | Counter(self.pairs_left() or {})


def _train_all(found: _Results, requested: Callable[[], bool], progress: Progress) -> bool:
    """Train what is to do, and add it to `found`; whether it was stopped."""
    comparison, began = found.comparison, time.monotonic()
    adds_pairs = comparison.judging.until is not None
    for line in found.outlook() if adds_pairs else ():
        progress.note(line)
    for seed in count():
        names = list(comparison.recipes) if seed < comparison.seeds else found.open()
        to_do = [name for name in names if not found.has(Job(recipe=name, seed=seed))]
        over = _over(found, to_do, time.monotonic() - began)
        if over is not None:
            progress.note(over)
        if not names or over is not None:
            return False
        ahead = found.runs_left(names, seed)
        for place, recipe in enumerate(names, start=1):
            job = Job(recipe=recipe, seed=seed)
            number = f"{seed * len(names) + place}/{comparison.seeds * len(names)}"
            name = f"[{f'pair {seed + 1}' if adds_pairs else number}] {recipe}, seed {seed}"
            if found.has(job):
                progress.note(f"{name}: done before")
                continue
            found.ended.pop(job.name, None)  # it is made again
            ahead[recipe] -= 1
            show = _showing(progress, name, found, recipe, ahead)
            folder = comparison.folder(job)
            if folder.is_running:
                progress.note(f"{name}: waiting for another process that trains in {folder.path}")
                wait_until_idle(folder, requested)
                if requested():
                    return True
            started = time.monotonic()
            ended = train(comparison, job, requested, show)
            cut = ended.exit in (PREEMPTED, INTERRUPTED)
            if cut and not requested():
                progress.note(f"{name}: {ended.error}")
            if cut or (requested() and ended.exit not in FINAL):
                return True
            run = found.add(job, ended)
            found.write()
            progress.note(f"{name}: {_told(run)} ({time.monotonic() - started:.0f} s)")
            if requested():
                return True
        for line in found.outlook() if adds_pairs and to_do else ():
            progress.note(line)
    raise AssertionError


def _showing(
    progress: Progress, name: str, found: _Results, recipe: str, ahead: Mapping[str, int]
) -> Show:
    """What shows the progress of a run in `recipe`, and about how long it and those `ahead` take:
    by its own pace, and by the time that runs took before."""
    steps, seconds = found.comparison.config.steps, found.seconds

    def show(text: str, share: float, step_s: float | None) -> None:
        left = "n/a"
        if step_s is not None:
            run_s = step_s * steps
            later_s = _runs_s({recipe: run_s, **seconds}, ahead)
            left = f"about {about((1 - share) * run_s + later_s)}"
        progress.step(f"{name} | {text} | all runs: {left}", share)

    return show


def _told(run: RunFigures) -> str:
    if run.status == "done":
        return f"validation loss {run.val_loss:.4f}"
    if run.status == "diverged":
        return f"diverged at step {run.diverged_at}"
    return f"{run.status}, exit code {run.exit}: {run.error}"


def _over(found: _Results, names: Sequence[str], elapsed_s: float) -> str | None:
    """Why the next pair is not begun, if it would exceed the time limit; else None."""
    hours = found.comparison.hours
    if hours is None or not found.ended or not names:
        return None
    expected_s = _runs_s(found.seconds, dict.fromkeys(names, 1))
    if expected_s <= hours * 3600 - elapsed_s:
        return None
    return (
        f"{hours:g} hours are over, or would be before the next pair is done (it takes "
        f"{about(expected_s)}). Give more --hours to go on."
    )


def _runs_s(seconds: Mapping[str, float], runs: Mapping[str, int]) -> float:
    """Seconds that so many runs of each recipe take; of one not seen yet, as those seen."""
    usual = statistics.fmean(seconds.values()) if seconds else 0.0
    return sum(count * seconds.get(recipe, usual) for recipe, count in runs.items())
