"""Runs a comparison, new or interrupted, and writes its table."""

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

from fp8stack.analysis.benchmark.timing import machine
from fp8stack.analysis.compare.comparison_plot import comparison_plot
from fp8stack.analysis.compare.comparison_table import as_markdown, as_text
from fp8stack.analysis.compare.gaps import (
    RecipeFigures,
    about,
    gap_note,
    pairs,
    seeds,
    summarize,
)
from fp8stack.analysis.compare.intervals import CONFIDENCE, CONFIDENCE_ADDING, FEWEST_ADDING
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
        self.failed_now: set[str] = set()  # recipes with a run that failed in this start
        self.last_seed = comparison.seeds - 1
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
        self.failed_now.clear()

    def require_machine(self) -> None:
        """Raise a UserError if runs are left to train and another machine has trained runs to
        compare them with."""
        comparison = self.comparison
        is_open = comparison.judging.until is not None and bool(self.open())
        is_left = is_open or bool(self.runs_left([*comparison.recipes], 0))
        begun_on, machine_here = self.machine.get("machine"), self.machine_here["machine"]
        if is_left and begun_on not in (None, machine_here):
            raise UserError(
                f"{comparison.out} was begun on {begun_on}, and this is {machine_here}: other "
                "machines round differently. Go on there, or give another --out."
            )
        if begun_on == machine_here:
            self.machine = self.machine_here  # its versions may be newer

    def add(self, job: Job, ended: Ended) -> RunFigures:
        """Record how a run ended. Returns its figures."""
        self.last_seed = max(self.last_seed, job.seed)
        self.ended[job.name] = figures = self._read(job, **vars(ended))
        if figures.status == "failed":
            self.failed_now.add(job.recipe)
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
        """The figures of every recipe with every requested or trained seed, by seed."""
        jobs = (
            Job(recipe=recipe, seed=seed)
            for seed in range(self.last_seed + 1)
            for recipe in self.comparison.recipes
        )
        return [
            self.ended.get(job.name) or self._read(job, exit=None)
            for job in jobs
            if job.seed < self.comparison.seeds or job.name in self.ended
        ]

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
        title = f"{config.model}, {counted(config.steps, 'step')}, {seeds(self.last_seed + 1)}"
        title += f"\n{note}" * bool(note)
        confidence = CONFIDENCE_ADDING if comparison.judging.adding else CONFIDENCE
        plot = comparison_plot(rows, baseline, title, confidence)
        write_atomically(out / "compare.png", plot)
        return as_text(rows, baseline, note)

    # Adding pairs until the intervals are narrow

    def open(self) -> list[str]:
        """The baseline and the recipes whose interval is not narrow enough yet; empty if there are
        none. A recipe that diverged, or failed in this start, needs no interval, and if the
        baseline did, no recipe does."""
        until, baseline = self.comparison.judging.until, self.comparison.baseline
        bad = self.without_interval
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

    @property
    def without_interval(self) -> set[str]:
        """The recipes with a diverged run, or with a run that failed in this start."""
        return {run.recipe for run in self.runs if run.status == "diverged"} | self.failed_now

    def pairs_needed(self) -> dict[str, int] | None:
        """The number of further pairs for each open recipe and the baseline, at least 1, since
        their intervals are too wide. None if not known yet."""
        names, baseline = self.open(), self.comparison.baseline
        needed: dict[str, int] = {}
        for row in self.rows if names else ():
            if row.recipe in names and row.recipe != baseline:
                gap = row.gap_percent
                pair_count = None if gap is None else self.comparison.judging.more_pairs(gap)
                if pair_count is None:
                    return None
                needed[row.recipe] = max(1, pair_count)
        return needed and needed | {baseline: max(needed.values())}

    def outlook(self) -> Iterator[str]:
        """Yield lines on the verdict of each recipe after a pair, and on the pairs still needed."""
        comparison, rows = self.comparison, self.rows
        if note := gap_note(rows, comparison.baseline, comparison.shared):
            yield f"  {note}"
        compared = (row for row in rows if row.recipe != comparison.baseline)
        yield from (f"  {row.recipe}: {row.verdict}" for row in compared)
        more_pairs = self.pairs_needed()
        if more_pairs is None:
            least = f"the least is {FEWEST_ADDING}"
            yield f"  how many pairs it takes is known after the second; {least}"
        elif not more_pairs and comparison.baseline in self.without_interval:
            yield f"  no gap is known: {comparison.baseline} diverged or failed"
        elif not more_pairs:
            beside = ", ".join(sorted(self.without_interval))
            except_of = f" other than of {beside}" if beside else ""
            yield f"  every interval{except_of} is at most ± {comparison.judging.until:g} %"
        else:
            took = about(_runs_s(self.seconds, more_pairs))
            yield f"  expected: about {pairs(max(more_pairs.values()), ' more')}, {took}"

    def runs_left(self, names: Sequence[str], seed: int) -> Counter[str]:
        """The number of missing runs of each recipe from this seed on, as far as known."""
        last, fewest, open_names = self.comparison.seeds, self.comparison.fewest_pairs, self.open()
        missing = {
            name: sum(
                not self.has(Job(recipe=name, seed=number))
                for number in range(seed, max(seed + 1, fewest if name in open_names else last))
            )
            for name in names
        }
        return Counter(missing) | Counter(self.pairs_needed() or {})


def _train_all(results: _Results, requested: Callable[[], bool], progress: Progress) -> bool:
    """Train the missing runs and add them to `results`. Returns whether a signal stopped them."""
    comparison, began = results.comparison, time.monotonic()
    adds_pairs = comparison.judging.until is not None
    if missing_runs := results.runs_left([*comparison.recipes], 0):
        progress.note(workload(comparison, missing_runs, results.seconds))
    for line in results.outlook() if adds_pairs else ():
        progress.note(line)
    for seed in count():
        names = list(comparison.recipes) if seed < comparison.seeds else results.open()
        missing = [name for name in names if not results.has(Job(recipe=name, seed=seed))]
        time_limit_note = _time_limit_note(results, missing, time.monotonic() - began)
        if time_limit_note is not None:
            progress.note(time_limit_note)
        if not names or time_limit_note is not None:
            return False
        later_runs = results.runs_left(names, seed)
        for place, recipe in enumerate(names, start=1):
            job = Job(recipe=recipe, seed=seed)
            number = f"{seed * len(names) + place}/{comparison.seeds * len(names)}"
            name = f"[{f'pair {seed + 1}' if adds_pairs else number}] {recipe}, seed {seed}"
            if results.has(job):
                progress.note(f"{name}: done before")
                continue
            results.ended.pop(job.name, None)  # it is trained again
            later_runs -= Counter([recipe])
            show = _progress_callback(progress, name, results, recipe, later_runs)
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
        for line in results.outlook() if adds_pairs and missing else ():
            progress.note(line)
    raise AssertionError


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


def _time_limit_note(results: _Results, names: Sequence[str], elapsed_s: float) -> str | None:
    """Say that the next pair would exceed the time limit; None if it would not."""
    hours = results.comparison.hours
    if hours is None or not results.ended or not names:
        return None
    expected_s = _runs_s(results.seconds, dict.fromkeys(names, 1))
    if expected_s <= hours * 3600 - elapsed_s:
        return None
    return (
        f"{hours:g} hours are over, or would be before the next pair is done (it takes "
        f"{about(expected_s)}). Give more --hours to go on."
    )


def _runs_s(seconds: Mapping[str, float], runs: Mapping[str, int]) -> float:
    """Seconds that `runs` take, a number by recipe. A recipe without a time counts as the mean."""
    usual = statistics.fmean(seconds.values()) if seconds else 0.0
    return sum(count * seconds.get(recipe, usual) for recipe, count in runs.items())
