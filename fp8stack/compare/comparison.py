"""A comparison from its beginning, or from where it was cut, to its table."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from fp8stack.benchmark.timing import machine
from fp8stack.compare.plot import comparison_plot
from fp8stack.compare.results import NUMERIC_FAILURE, RunFigures, read_run
from fp8stack.compare.runs import Ended, Progress, train
from fp8stack.compare.settings import Comparison, Job, as_saved, read_report
from fp8stack.compare.summary import summarize
from fp8stack.compare.table import as_markdown, as_text
from fp8stack.config import to_toml
from fp8stack.errors import UserError
from fp8stack.io import storage_errors, write_atomically
from fp8stack.terminal import say
from fp8stack.training.signals import stop_requests

DONE, PREEMPTED, INTERRUPTED = 0, 75, 130
# How a run ends that would end so again: done, or its numbers were not finite.
FINAL = (DONE, NUMERIC_FAILURE)

Outcomes = dict[str, Ended]


def compare(comparison: Comparison) -> int:
    """Train what is not trained yet, write the results, print the table; return the exit code: 0,
    or 75 if it was stopped by a signal, the run under way saved. Raises a UserError if no run came
    to its end, and a StorageError if the disk is full or cannot be written."""
    outcomes = _outcomes(comparison)
    with storage_errors(comparison.out):
        comparison.out.mkdir(parents=True, exist_ok=True)
    write_atomically(comparison.out / "base.toml", to_toml(comparison.config).encode())
    facts = machine("accelerate", device=comparison.config.device)
    _write(comparison, outcomes, facts)
    try:
        with Progress() as progress, stop_requests() as requested:
            stopped = _train_all(comparison, outcomes, facts, requested, progress)
    finally:
        text = _write(comparison, outcomes, facts)
    say("", text, "", f"written: {comparison.out}/compare.json, compare.md and compare.png")
    if stopped:
        say("stopped; what is done is kept. Go on with:", f"  {comparison.command}")
        return PREEMPTED
    if not any(ended.exit in FINAL for ended in outcomes.values()):
        job = comparison.jobs[0]
        raise UserError(
            f"No run came to its end. {job.name}: {outcomes[job.name].error}. All that the runs "
            f"printed is in {comparison.out / 'logs'}."
        )
    return DONE


def _train_all(
    comparison: Comparison,
    outcomes: Outcomes,
    facts: Mapping[str, Any],
    requested: Callable[[], bool],
    progress: Progress,
) -> bool:
    """Train what is to do, and add how it ended to `outcomes`; whether it was stopped."""
    for number, job in enumerate(comparison.jobs, start=1):
        name = f"[{number}/{len(comparison.jobs)}] {job.recipe}, seed {job.seed}"
        if job.name in outcomes and outcomes[job.name].exit in FINAL:
            progress.note(f"{name}: done before")
            continue
        outcomes.pop(job.name, None)

        def show(text: str, share: float, name: str = name) -> None:
            progress.step(f"{name} | {text}", share)

        began = time.monotonic()
        ended = train(comparison, job, requested, show)
        cut = ended.exit in (PREEMPTED, INTERRUPTED)
        if cut or (requested() and ended.exit not in FINAL):
            return True
        outcomes[job.name] = ended
        _write(comparison, outcomes, facts)
        progress.note(f"{name}: {_told(comparison, job, ended)} ({time.monotonic() - began:.0f} s)")
        if requested():
            return True
    return False


def _told(comparison: Comparison, job: Job, ended: Ended) -> str:
    run = _figures(comparison, job, ended)
    if run.status == "done":
        return f"validation loss {run.val_loss:.4f}"
    if run.status == "diverged":
        return f"diverged at step {run.diverged_at}"
    return f"{run.status}, exit code {ended.exit}: {ended.error}"


def _outcomes(comparison: Comparison) -> Outcomes:
    """How the runs of an earlier start ended, by name; none where the run is gone."""
    if not comparison.report.exists():
        return {}
    names = {job.name for job in comparison.jobs if comparison.folder(job).holds_run}
    outcomes = {}
    for run in read_report(comparison.report)["runs"]:
        name = f"{run['recipe']}-seed{run['seed']}"
        if name in names and run["exit"] is not None:
            outcomes[name] = Ended(exit=run["exit"], error=run["error"])
    return outcomes


def _figures(comparison: Comparison, job: Job, ended: Ended | None) -> RunFigures:
    return read_run(
        comparison.folder(job),
        recipe=job.recipe,
        seed=job.seed,
        steps=comparison.config.steps,
        vocabulary=comparison.vocabulary,
        exit=None if ended is None else ended.exit,
        error="" if ended is None else ended.error,
    )


def _write(comparison: Comparison, outcomes: Outcomes, facts: Mapping[str, Any]) -> str:
    """Write `compare.json`, `.md` and `.png` of what there is, and return the table as text."""
    runs = [_figures(comparison, job, outcomes.get(job.name)) for job in comparison.jobs]
    baseline, config, out = comparison.baseline, comparison.config, comparison.out
    rows = summarize(runs, list(comparison.recipes), baseline)
    report = as_saved(comparison) | {
        "machine": facts,
        "recipes": [asdict(row) for row in rows],
        "runs": [run.model_dump(mode="json") for run in runs],
    }
    text = json.dumps(report, indent=1, allow_nan=False) + "\n"
    write_atomically(comparison.report, text.encode())
    write_atomically(out / "compare.md", as_markdown(rows, comparison, facts).encode())
    seeds = "one seed" if comparison.seeds == 1 else f"{comparison.seeds} seeds"
    title = f"{config.model}, {config.steps} steps, {seeds}"
    write_atomically(out / "compare.png", comparison_plot(rows, baseline, title))
    return as_text(rows, baseline)
