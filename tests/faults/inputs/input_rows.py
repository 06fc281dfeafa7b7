"""Rows of the reliability matrix: what comes from outside is bad, made up or malicious."""

import contextlib
import io
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

import torch

from tests.faults.case import Case, Outcome, judged
from tests.faults.inputs import (
    input_corruptions,
    input_data,
    input_flags,
    input_fuzz,
    input_pickles,
)

CORRUPTIONS = [*input_corruptions.CORRUPTIONS, *input_corruptions.OF_RUNS]
FUZZ_SHORT, FUZZ_LONG = 1300, 20_000
RUN_FILES = 60
"""The number of fuzzed files of a run to try: each takes a full report."""


def _outcome(results: Iterable[tuple[str, str]]) -> Outcome:
    """The outcome of faults, given as pairs of a fault and its problem, "" if there is none."""
    return sum((judged([name], wrong) for name, wrong in results), Outcome())


def corruptions(place: Path, count: int) -> Outcome:
    run = input_corruptions.make_run(place)
    names = CORRUPTIONS[:count]
    return _outcome((name, input_corruptions.problem(run, place / "copy", name)) for name in names)


def pickles(place: Path, count: int) -> Outcome:
    run, results = input_corruptions.make_run(place), []
    for name in islice(input_pickles.PAYLOADS, count):
        (place / f"of {name}").mkdir()
        executed = input_pickles.executed(run, place / f"of {name}", name)
        results.append((name, "; ".join(executed)))
    return _outcome(results)


def bad_input(place: Path, count: int) -> Outcome:
    input_flags.make_files(place)
    cases = islice(input_flags.bad_input().items(), count)
    return _outcome((name, input_flags.problem(place, *case)) for name, case in cases)


def fuzz(place: Path, count: int) -> Outcome:
    """Half of the examples are configurations, half data files; files of runs besides."""
    configs, run = input_fuzz.configs(), input_corruptions.make_run(place)
    shares = (
        (configs, count // 2 // len(configs) + 1),
        (input_fuzz.data_files(), count // 2),
        (input_fuzz.run_files(run), min(count // 20 + 1, RUN_FILES)),
    )
    outcome = Outcome()
    for name, way, most in ((n, way, most) for ways, most in shares for n, way in ways.items()):
        (folder := place / f"of {name}").mkdir()
        try:
            outcome += judged([name] * input_fuzz.fuzz(folder, *way, most), "")
        except Exception as error:
            wrong = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            outcome += judged([name], wrong)
    return outcome


def data(place: Path, count: int) -> Outcome:
    return _outcome(
        (fault, input_data.problem(place / "data", fault, workers=at % 3))
        for at, fault in enumerate(input_data.FAULTS[:count])
    )


def _quiet(run: Callable[[Path, int], Outcome]) -> Callable[[Path, int], Outcome]:
    """`run` on one thread, since it forks, and without the output of the commands."""

    def quietly(place: Path, count: int) -> Outcome:
        torch.set_num_threads(1)
        with contextlib.redirect_stdout(io.StringIO()):
            return run(place, count)

    return quietly


CASES: dict[str, Case] = {
    "R5": Case(
        description="files of a run cut, changed, swapped, missing, made up or malicious",
        passes="the file is named and the last good checkpoint used; with all of them bad, exit "
        "code 3; memory and time bounded",
        run=_quiet(corruptions),
        short=len(CORRUPTIONS),
        long=len(CORRUPTIONS),
    ),
    "R6": Case(
        description="malicious pickles at every place that takes a file",
        passes="none is executed, and what is refused is refused in one line",
        run=_quiet(pickles),
        short=4,
        long=len(input_pickles.PAYLOADS),
    ),
    "R7": Case(
        description="bad configurations, flags and data files",
        passes="exit code 2, one line on stderr that names it, nothing left behind",
        run=_quiet(bad_input),
        short=len(input_flags.bad_input()),
        long=len(input_flags.bad_input()),
    ),
    "R8": Case(
        description="fuzzed configurations and data files, and files of runs",
        passes="each is taken, or refused in one line",
        run=_quiet(fuzz),
        short=FUZZ_SHORT,
        long=FUZZ_LONG,
    ),
    "R9": Case(
        description="data that are bad, or go bad while they are read",
        passes="refused before the model sees them, with file and offset or size",
        run=_quiet(data),
        short=len(input_data.FAULTS),
        long=len(input_data.FAULTS),
    ),
}
