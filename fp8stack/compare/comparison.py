"""Running a comparison, new or interrupted, up to its table."""

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from typing import Any

from fp8stack.benchmark.timing import machine
from fp8stack.compare.intervals import Interval
from fp8stack.compare.plot import comparison_plot
from fp8stack.compare.results import NUMERIC_FAILURE, RunFigures, read_run
from fp8stack.compare.runs import Ended, Progress, Show, train
from fp8stack.compare.settings import Comparison, Job, as_saved, read_report
from fp8stack.compare.summary import RecipeFigures, about, pairs, summarize
from fp8stack.compare.table import as_markdown, as_text
from fp8stack.config import to_toml
from fp8stack.errors import UserError
from fp8stack.io import storage_errors, write_atomically
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
    write_atomically(comparison.out / "base.toml", to_toml(comparison.config).encode())
    found = _Results(comparison)
    found.write()
    try:
        with Progress() as progress, stop_requests() as requested:
            stopped = _train_all(comparison, found, requested, progress)
    finally:
        text = found.write()
    say("", text, "", f"written: {comparison.out}/compare.json, compare.md and compare.png")
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
    """The results of finished runs by name, on disk and in memory."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.machine = machine("accelerate", device=comparison.config.device)
        self.ended: dict[str, RunFigures] = {}
        self.last_seed = comparison.seeds - 1
        if comparison.report.exists():
            self._take_over()

    def _take_over(self) -> None:
        """Take over how the runs of an earlier start ended, where they are still there."""
        for run in read_report(self.comparison.report)["runs"]:
            recipe, seed, exit = run["recipe"], run["seed"], run["exit"]
            if recipe not in self.comparison.recipes or exit is None:
                continue
            job = self.comparison.job(recipe, seed)
            if self.comparison.folder(job).holds_run:
                ended = Ended(exit=exit, error=run["error"], seconds=run.get("seconds"))
                self.add(job, ended)

    def add(self, job: Job, ended: Ended) -> RunFigures:
        """Note how a run ended, and return what it came to."""
        self.last_seed = max(self.last_seed, job.seed)
        self.ended[job.name] = figures = self._read(job, **vars(ended))
        return figures

    def drop(self, job: Job) -> None:
        """Forget a run that is made again."""
        self.ended.pop(job.name, None)

    def has(self, job: Job) -> bool:
        """Whether the run has a final result."""
        return job.name in self.ended and self.ended[job.name].exit in FINAL

    def _read(self, job: Job, **ended: Any) -> RunFigures:
        return read_run(
            self.comparison.folder(job),
            recipe=job.recipe,
            seed=job.seed,
            steps=self.comparison.config.steps,
            vocabulary=self.comparison.vocabulary,
            **ended,
        )

    @property
    def runs(self) -> list[RunFigures]:
        """Of every recipe with every seed that it is to have, seed by seed."""
        jobs = (
            self.comparison.job(recipe, seed)
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
        title = f"{config.model}, {config.steps} steps, {_seeds(self.last_seed + 1)}"
        write_atomically(out / "compare.png", comparison_plot(rows, baseline, title))
        return as_text(rows, baseline)


def _train_all(
    comparison: Comparison, found: _Results, requested: Callable[[], bool], progress: Progress
) -> bool:
    """Train what is to do, and add it to `found`; whether it was stopped."""
    began = time.monotonic()
    if comparison.judging.until is not None:
        for line in _outlook(comparison, found):
            progress.note(line)
    for seed in count():
        names = list(comparison.recipes) if seed < comparison.seeds else _open(comparison, found)
        to_do = [name for name in names if not found.has(comparison.job(name, seed))]
        if not names or _over(comparison, found, to_do, time.monotonic() - began, progress):
            return False
        ahead = _ahead(comparison, found, names, seed)
        for place, recipe in enumerate(names, start=1):
            job = comparison.job(recipe, seed)
            number = f"{seed * len(names) + place}/{comparison.seeds * len(names)}"
            if comparison.judging.until is not None:
                number = f"pair {seed + 1}"
            name = f"[{number}] {recipe}, seed {seed}"
            if found.has(job):
                progress.note(f"{name}: done before")
                continue
            found.drop(job)
            ahead[recipe] -= 1
            show = _showing(progress, name, comparison, recipe, found.seconds, ahead)
            started = time.monotonic()
            ended = train(comparison, job, requested, show)
            cut = ended.exit in (PREEMPTED, INTERRUPTED)
            if cut or (requested() and ended.exit not in FINAL):
                return True
            run = found.add(job, ended)
            found.write()
            progress.note(f"{name}: {_told(run)} ({time.monotonic() - started:.0f} s)")
            if requested():
                return True
        if comparison.judging.until is not None and to_do:
            for line in _outlook(comparison, found):
                progress.note(line)
    raise AssertionError


def _ahead(
    comparison: Comparison, found: _Results, names: Sequence[str], seed: int
) -> Counter[str]:
    """How many runs of each recipe are left from this seed on, as far as that is known."""
    seeds = range(seed, max(seed + 1, comparison.seeds))
    left = {n: sum(not found.has(comparison.job(n, seed)) for seed in seeds) for n in names}
    return Counter(left) | Counter(_pairs_left(comparison, found) or {})


def _showing(
    progress: Progress,
    name: str,
    comparison: Comparison,
    recipe: str,
    seconds: Mapping[str, float],
    ahead: Mapping[str, int],
) -> Show:
    """What shows the progress of a run in `recipe`, and about how long it and those `ahead` take:
    by its own pace, and by the `seconds` that runs took before."""

    def show(text: str, share: float, step_s: float | None) -> None:
        left = "n/a"
        if step_s is not None:
            run_s = step_s * comparison.config.steps
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


def _seeds(number: int) -> str:
    return "one seed" if number == 1 else f"{number} seeds"


# Pairs until intervals are narrow


def _open(comparison: Comparison, found: _Results) -> list[str]:
    """The recipes whose interval is not narrow enough yet, and the baseline; none if all are.
    A recipe that diverged or failed has its verdict, and the baseline's is every one's."""
    until = comparison.judging.until
    bad = {run.recipe for run in found.runs if run.status in ("diverged", "failed")}
    if until is None or comparison.baseline in bad:
        return []
    wide = [
        row.recipe
        for row in found.rows
        if row.recipe not in bad | {comparison.baseline} and not _narrow(row.gap_percent, until)
    ]
    return [comparison.baseline, *wide] if wide else []


def _narrow(gap: Interval | None, until: float) -> bool:
    return gap is not None and gap.half_width is not None and gap.half_width <= until


def _over(
    comparison: Comparison,
    found: _Results,
    names: Sequence[str],
    elapsed_s: float,
    progress: Progress,
) -> bool:
    """Whether the next pair would exceed the time limit."""
    if comparison.hours is None or not found.ended or not names:
        return False
    left = comparison.hours * 3600 - elapsed_s
    expected = _runs_s(found.seconds, dict.fromkeys(names, 1))
    if expected <= left:
        return False
    progress.note(
        f"{comparison.hours:g} hours are over, or would be before the next pair is done (it takes "
        f"{about(expected)}). Give more --hours to go on."
    )
    return True


def _runs_s(seconds: Mapping[str, float], runs: Mapping[str, int]) -> float:
    """Seconds that so many runs of each recipe take; of one not seen yet, as those seen."""
    usual = statistics.fmean(seconds.values()) if seconds else 0.0
    return sum(count * seconds.get(recipe, usual) for recipe, count in runs.items())


def _outlook(comparison: Comparison, found: _Results) -> Iterator[str]:
    """What is known of each recipe after a pair, and what is still to do."""
    rows = found.rows
    yield from (f"  {r.recipe}: {r.verdict}" for r in rows if r.recipe != comparison.baseline)
    more = _pairs_left(comparison, found)
    if more is None:
        yield "  how many pairs it takes is known after the second; the least is 3"
    elif not more:
        yield f"  every interval is at most ± {comparison.judging.until:g} %"
    else:
        took = about(_runs_s(found.seconds, more))
        yield f"  expected: about {pairs(max(more.values()), ' more')}, {took}"


def _pairs_left(comparison: Comparison, found: _Results) -> dict[str, int] | None:
    """How many pairs more each open recipe takes, one at least, since its interval is too wide, and
    the baseline; None if that is not known yet."""
    names, baseline = _open(comparison, found), comparison.baseline
    more: dict[str, int] = {}
    for row in found.rows if names else ():
        if row.recipe in names and row.recipe != baseline:
            gap = row.gap_percent
            count = None if gap is None else comparison.judging.more_pairs(gap)
            if count is None:
                return None
            more[row.recipe] = max(1, count)
    return more and more | {baseline: max(more.values())}
