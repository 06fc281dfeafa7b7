"""Runs a comparison, new or interrupted, and writes its table."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from fp8stack.analysis.compare.comparison_plot import comparison_plot
from fp8stack.analysis.compare.comparison_table import as_markdown, as_text
from fp8stack.analysis.compare.gaps import RecipeFigures, about, gap_note, seeds, summarize
from fp8stack.analysis.compare.intervals import CONFIDENCE, CONFIDENCE_ADDING
from fp8stack.analysis.compare.run_results import NUMERIC_FAILURE, RunFigures, read_run
from fp8stack.analysis.compare.runs import Show, train, wait_until_idle
from fp8stack.analysis.compare.settings import Comparison
from fp8stack.common.errors import UserError
from fp8stack.common.io import claimed, write_atomically
from fp8stack.common.presets import label
from fp8stack.common.tables import counted
from fp8stack.common.terminal import say
from fp8stack.planning.run_config import RunConfig, to_toml
from fp8stack.training.run_folder import RunFolder
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
    out = comparison.out
    busy = f"Another process compares in {out}. Wait for it or give another --out."
    with claimed(out, busy):
        results = _Results(comparison)
        results.write()  # first, so that a later start knows the folder as a comparison's
        write_atomically(out / "base.toml", to_toml(comparison.config).encode())
        try:
            with stop_requests() as requested:
                stopped = _train_all(results, requested)
        finally:
            text = results.write()
    say("", *text.split("\n"), "", f"written: {out}/compare.json, compare.md and compare.png")
    if stopped:
        say("stopped; what is done is kept. Go on with:", f"  {comparison.command}")
        return PREEMPTED
    ended = [run for run in results.figures.values() if run.exit is not None]
    failed = [run for run in ended if run.exit not in FINAL]
    if not failed:
        return DONE
    where = f"{failed[0].recipe}-seed{failed[0].seed}: {failed[0].error}"
    printed = f"{where}. All that the runs printed is in {out / 'logs'}."
    if len(failed) == len(ended):
        raise UserError(f"No run came to its end. {printed}")
    say(f"{len(failed)} of {counted(len(ended), 'run')} failed. {printed}")
    return RUN_FAILED


def _folder(run: RunConfig) -> RunFolder:
    return RunFolder(Path(run.out or ""))


class _Results:
    """The results of runs, in memory and on disk.

    Attributes:
        figures: the figures of each run, by the path of its folder.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.comparison, self.runs = comparison, comparison.runs
        ended = {(run.recipe, run.seed): run for run in comparison.ended}
        self.figures: dict[str | None, RunFigures] = {}
        for run in self.runs:
            before = ended.get((label(run.recipe), run.seed))
            if before is None or not _folder(run).holds_run:
                self.add(run)
            else:
                self.add(run, before.exit, before.error, before.seconds)

    def add(
        self,
        run: RunConfig,
        exit: int | None = None,
        error: str = "",
        seconds: float | None = None,
    ) -> RunFigures:
        """Record how a run ended: its exit code (None: it has not), the last line that it printed
        and its wall time. Returns its figures."""
        self.figures[run.out] = read_run(
            _folder(run),
            recipe=label(run.recipe),
            seed=run.seed,
            steps=run.steps,
            vocabulary=self.comparison.contents["model"]["vocabulary"],
            exit=exit,
            error=error,
            seconds=seconds,
        )
        return self.figures[run.out]

    def is_done(self, run: RunConfig) -> bool:
        """Whether the run has a final result."""
        return self.figures[run.out].exit in FINAL

    def rows(self) -> list[RecipeFigures]:
        """The results of each recipe."""
        comparison, names = self.comparison, list(self.comparison.recipes)
        runs = list(self.figures.values())
        return summarize(runs, names, comparison.baseline, comparison.judging)

    def write(self) -> str:
        """Write `compare.json`, `.md` and `.png` of the results so far. Returns the text table."""
        rows, comparison = self.rows(), self.comparison
        baseline, config, out = comparison.baseline, comparison.config, comparison.out
        note = gap_note(rows, baseline, comparison.shared)
        report = comparison.request() | {
            "gap_note": note,
            "recipes": [asdict(row) for row in rows],
            "runs": [run.model_dump(mode="json") for run in self.figures.values()],
        }
        text = json.dumps(report, indent=1, allow_nan=False) + "\n"
        write_atomically(comparison.report, text.encode())
        page = as_markdown(rows, comparison, note)
        write_atomically(out / "compare.md", page.encode())
        title = f"{config.model}, {counted(config.steps, 'step')}, {seeds(comparison.seeds)}"
        title += f"\n{note}" * bool(note)
        confidence = CONFIDENCE_ADDING if comparison.judging.adding else CONFIDENCE
        plot = comparison_plot(rows, baseline, title, confidence)
        write_atomically(out / "compare.png", plot)
        return as_text(rows, baseline, note)


def _train_all(results: _Results, requested: Callable[[], bool]) -> bool:
    """Train the missing runs and add them to `results`. Returns whether a signal stopped them."""
    runs, out = results.runs, results.comparison.out
    for number, run in enumerate(runs, start=1):
        folder = _folder(run)
        name = f"[{number}/{len(runs)}] {label(run.recipe)}, seed {run.seed}"
        if results.is_done(run):
            say(f"{name}: done before")
            continue
        if folder.is_running:
            say(f"{name}: waiting for another process that trains in {folder.path}")
            wait_until_idle(folder, requested)
            if requested():
                return True
        results.add(run)  # it is trained again
        later = [next_run for next_run in runs[number:] if not results.is_done(next_run)]
        show = _progress(name, results.rows(), run, later)
        started = time.monotonic()
        log = out / "logs" / f"{folder.path.name}.txt"
        ended = train(run, out / "base.toml", log, requested, show)
        cut = ended.exit in (PREEMPTED, INTERRUPTED)
        if cut and not requested():
            say(f"{name}: {ended.error}")
        if cut or (requested() and ended.exit not in FINAL):
            results.add(run)
            return True
        outcome = _outcome(results.add(run, **vars(ended)))
        results.write()
        say(f"{name}: {outcome} ({time.monotonic() - started:.0f} s)")
        if requested():
            return True
    return False


def _progress(
    name: str, rows: Sequence[RecipeFigures], run: RunConfig, later: Sequence[RunConfig]
) -> Show:
    """A function that prints the progress of a run, and the time that it and the `later` runs take:
    as earlier runs of the same recipe took, in other recipes as long as this one."""
    seconds = {row.recipe: row.seconds for row in rows if row.seconds}

    def show(step: int, loss: float | None, step_s: float | None) -> None:
        text, remaining = f"{name} | step {step}/{run.steps}", "n/a"
        if loss is not None:
            text += f" | loss {loss:.4f}"
        if step_s is not None:
            run_s = step_s * run.steps
            later_s = sum(seconds.get(label(run.recipe), run_s) for run in later)
            remaining = f"about {about(step_s * (run.steps - step) + later_s)}"
        say(f"{text} | all runs: {remaining}")

    return show


def _outcome(run: RunFigures) -> str:
    if run.status == "done":
        return f"validation loss {run.val_loss:.4f}"
    if run.status == "diverged":
        return f"diverged at step {run.diverged_at}"
    return f"{run.status}, exit code {run.exit}: {run.error}"
