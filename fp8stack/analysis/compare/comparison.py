"""Runs a comparison, new or interrupted, and writes its table."""

import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from fp8stack.analysis.benchmark.timing import machine
from fp8stack.analysis.compare.comparison_plot import comparison_plot
from fp8stack.analysis.compare.comparison_table import as_markdown, as_text
from fp8stack.analysis.compare.gaps import (
    RecipeFigures,
    about,
    gap_note,
    seeds,
    summarize,
)
from fp8stack.analysis.compare.intervals import CONFIDENCE, CONFIDENCE_ADDING
from fp8stack.analysis.compare.run_results import NUMERIC_FAILURE, RunFigures, read_run
from fp8stack.analysis.compare.runs import Ended, Progress, Show, train, wait_until_idle
from fp8stack.analysis.compare.settings import Comparison, Job, as_saved, read_report
from fp8stack.analysis.compare.workload import workload
from fp8stack.common.errors import UserError
from fp8stack.common.io import lock, storage_errors, write_atomically
from fp8stack.common.tables import counted
from fp8stack.common.terminal import say
from fp8stack.planning.run_config import to_toml
from fp8stack.training.checkpoint.reader import candidates
from fp8stack.training.signals import stop_requests

DONE, RUN_FAILED, PREEMPTED, INTERRUPTED = 0, 1, 75, 130
FINAL = (DONE, NUMERIC_FAILURE)  # exit codes of runs that are not trained again


def compare(comparison: Comparison) -> int:
    """Train the missing runs, write the results and print the table.

    Returns the exit code: 0; 1 if a run failed, which the next start trains again (a run that
    diverged is a result); 75 if a signal stopped the comparison after it saved the current run.

    Raises:
        UserError: no run came to its end.
        StorageError: the disk is full or cannot be written.
    """
    with storage_errors(comparison.out):
        comparison.out.mkdir(parents=True, exist_ok=True)
    with _alone(comparison):
        return _compare(comparison)


@contextmanager
def _alone(comparison: Comparison) -> Iterator[None]:
    """Lock the comparison's folder. Raises a UserError if another process holds the lock."""
    if os.name != "posix":  # elsewhere a folder cannot be opened
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
    results = _Results(comparison)
    results.require_machine()
    results.write()  # first, so that a later start knows the folder as a comparison's
    write_atomically(comparison.out / "base.toml", to_toml(comparison.config).encode())
    try:
        with Progress() as progress, stop_requests() as requested:
            stopped = _train_all(results, requested, progress)
    finally:
        text = results.write()
    written = f"written: {comparison.out}/compare.json, compare.md and compare.png"
    say("", *text.split("\n"), "", written)
    if stopped:
        say("stopped; what is done is kept. Go on with:", f"  {comparison.command}")
        return PREEMPTED
    failed = {name: run for name, run in results.ended.items() if run.exit not in FINAL}
    if not failed:
        return DONE
    name, ended = next(iter(failed.items()))
    printed = f"{name}: {ended.error}. All that the runs printed is in {comparison.out / 'logs'}."
    if len(failed) == len(results.ended):
        raise UserError(f"No run came to its end. {printed}")
    say(f"{len(failed)} of {counted(len(results.ended), 'run')} failed. {printed}")
    return RUN_FAILED


class _Results:
    """The results of ended runs, in memory and on disk, and the runs that are still missing."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.machine_here = machine("accelerate", device=comparison.config.device)
        self.ended: dict[str, RunFigures] = {}
        # Results of an earlier start, if the run's folder still exists.
        report = read_report(comparison.report) if comparison.report.exists() else {"runs": []}
        self.machine = self.machine_here  # the machine the runs ran on
        for run in report["runs"]:
            job = Job(recipe=run["recipe"], seed=run["seed"])
            if candidates(comparison.folder(job).checkpoints):  # also failed runs go on from there
                self.machine = report.get("machine", self.machine_here)
            if job.recipe not in comparison.recipes or run["exit"] is None:
                continue
            if comparison.folder(job).holds_run:
                self.add(
                    job, Ended(exit=run["exit"], error=run["error"], seconds=run.get("seconds"))
                )

    def require_machine(self) -> None:
        """Raise a UserError if runs are left to train and another machine has trained runs to
        compare them with."""
        comparison = self.comparison
        begun_on, machine_here = self.machine.get("machine"), self.machine_here["machine"]
        if self.missing and begun_on not in (None, machine_here):
            raise UserError(
                f"{comparison.out} was begun on {begun_on}, and this is {machine_here}: other "
                "machines round differently. Go on there, or give another --out."
            )
        if begun_on == machine_here:
            self.machine = self.machine_here  # its versions may be newer

    def add(self, job: Job, ended: Ended) -> RunFigures:
        """Record how a run ended. Returns its figures."""
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
    def jobs(self) -> list[Job]:
        """Every recipe with every seed, by seed."""
        comparison = self.comparison
        return [
            Job(recipe=recipe, seed=seed)
            for seed in range(comparison.seeds)
            for recipe in comparison.recipes
        ]

    @property
    def missing(self) -> list[Job]:
        """The runs without a final result."""
        return [job for job in self.jobs if not self.has(job)]

    @property
    def runs(self) -> list[RunFigures]:
        """The figures of every run, and of seeds that an earlier start added, by seed."""
        runs = [self.ended.get(job.name) or self._read(job, exit=None) for job in self.jobs]
        return runs + [run for run in self.ended.values() if run.seed >= self.comparison.seeds]

    @property
    def rows(self) -> list[RecipeFigures]:
        """The results of each recipe."""
        comparison = self.comparison
        names = list(comparison.recipes)
        return summarize(self.runs, names, comparison.baseline, comparison.judging)

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds that a run takes, by recipe, if measured."""
        return {row.recipe: row.seconds for row in self.rows if row.seconds}

    def write(self) -> str:
        """Write `compare.json`, `.md` and `.png` of the results so far. Returns the text table."""
        rows, comparison = self.rows, self.comparison
        baseline, config, out = comparison.baseline, comparison.config, comparison.out
        note = gap_note(rows, baseline, comparison.shared)
        report = as_saved(comparison) | {
            "machine": self.machine,
            "gap_note": note,
            "recipes": [asdict(row) for row in rows],
            "runs": [run.model_dump(mode="json") for run in self.runs],
        }
        text = json.dumps(report, indent=1, allow_nan=False) + "\n"
        write_atomically(comparison.report, text.encode())
        page = as_markdown(rows, comparison, self.machine, note)
        write_atomically(out / "compare.md", page.encode())
        title = f"{config.model}, {counted(config.steps, 'step')}, {seeds(self.runs[-1].seed + 1)}"
        title += f"\n{note}" * bool(note)
        confidence = CONFIDENCE_ADDING if comparison.judging.adding else CONFIDENCE
        plot = comparison_plot(rows, baseline, title, confidence)
        write_atomically(out / "compare.png", plot)
        return as_text(rows, baseline, note)


def _train_all(results: _Results, requested: Callable[[], bool], progress: Progress) -> bool:
    """Train the missing runs and add them to `results`. Returns whether a signal stopped them."""
    comparison, jobs = results.comparison, results.jobs
    later_runs = Counter(job.recipe for job in results.missing)
    if later_runs:
        progress.note(workload(comparison, later_runs, results.seconds))
    for number, job in enumerate(jobs, start=1):
        name = f"[{number}/{len(jobs)}] {job.recipe}, seed {job.seed}"
        if results.has(job):
            progress.note(f"{name}: done before")
            continue
        results.ended.pop(job.name, None)  # it is trained again
        later_runs -= Counter([job.recipe])
        show = _progress_callback(progress, name, results, job.recipe, later_runs)
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
        run = results.add(job, ended)
        results.write()
        outcome = f"{name}: {_outcome(run)} ({time.monotonic() - started:.0f} s)"
        if later_runs:
            later_s = _runs_s(results.seconds, later_runs)
            outcome += f"; {counted(later_runs.total(), 'run')} to do, about {about(later_s)}"
        progress.note(outcome)
        if requested():
            return True
    return False


def _progress_callback(
    progress: Progress, name: str, results: _Results, recipe: str, later_runs: Mapping[str, int]
) -> Show:
    """A function that shows the progress of a run in `recipe`, and estimates the time that it and
    `later_runs` take, from its own pace and the time that finished runs took."""
    steps, seconds = results.comparison.config.steps, results.seconds

    def show(text: str, share: float, step_s: float | None) -> None:
        remaining = "n/a"
        if step_s is not None:
            run_s = step_s * steps
            later_s = _runs_s({recipe: run_s, **seconds}, later_runs)
            remaining = f"about {about((1 - share) * run_s + later_s)}"
        progress.step(f"{name} | {text} | all runs: {remaining}", share)

    return show


def _outcome(run: RunFigures) -> str:
    if run.status == "done":
        return f"validation loss {run.val_loss:.4f}"
    if run.status == "diverged":
        return f"diverged at step {run.diverged_at}"
    return f"{run.status}, exit code {run.exit}: {run.error}"


def _runs_s(seconds: Mapping[str, float], runs: Mapping[str, int]) -> float:
    """Seconds that `runs` take, a number by recipe. A recipe without a time counts as the mean."""
    usual = statistics.fmean(seconds.values()) if seconds else 0.0
    return sum(count * seconds.get(recipe, usual) for recipe, count in runs.items())
