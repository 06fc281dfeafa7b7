"""Run scenarios, write their results, and compare them with the committed results.

A scenario is a module with `add_arguments(parser)`, `measure(arguments)`, which returns JSON data,
and `table(report)`. It may have `SHORT`, options for a quick run, and `FOLDER`, a folder of
bench/results to write to instead of the machine's.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from bench import report as reports
from bench.cells import Cells, words
from bench.report import Report, Row
from bench.timing_lock import timing
from fp8stack.analysis.benchmark.timing import machine, slug
from fp8stack.common.errors import UserError, quoted
from fp8stack.precision import Hardware, probe

RESULTS = Path(__file__).parent / "results"
# Options that do not change a timing.
CHOOSING = ("out", "recipes", "models", "capabilities", "parts", "compiled", "profile", "minutes")
TOLERANCE = 0.15
SCENARIOS = {
    "emulation": "What does emulated FP8 cost on a CPU? A linear and a step, with peers beside.",
    "grid": "What does a step take by precision, size and batch; a cast, a scale, a history?",
    "gpu": "How fast is this GPU? The first visit: steps, kernels, tests, losses, peers.",
    "gpu-code": "What code does torch make of our models for a GPU? Bytes, launches, stores.",
    "golden": "What does Transformer Engine compute? For tests/numerics/test_golden.py.",
    "study": "What does each recipe cost in loss, by size of model and number of tokens? (hours)",
    "law": "Which law of the loss gap fits published losses and the study, with which errors?",
    "reliability": "Are faults of all kinds in whole runs survived?",
    "pictures": "The pictures of docs/recipes.md, drawn from the results of casts.",
}


def add_options(
    parser: argparse.ArgumentParser,
    *,
    rounds: int | None = None,
    budget_s: float = 60.0,
    warm_up: int = 3,
    device: bool = True,
    recipes: Sequence[str] = (),
) -> None:
    """Add the options that several scenarios have, and `--tiny`.

    Args:
        parser: the parser of the scenario.
        rounds: the default number of timed rounds; None if the scenario does not time arms.
        budget_s: the default seconds for the rounds of a case.
        warm_up: the default number of rounds before the timed ones.
        device: whether the scenario can run on a GPU as well.
        recipes: the recipes that are measured by default; none if the scenario has no choice.
    """
    add = parser.add_argument
    if rounds is not None:
        add(
            "--rounds", type=int, default=rounds, help="timed rounds at most (default: %(default)s)"
        )
        add("--warm-up", type=int, default=warm_up, help="rounds before (default: %(default)s)")
        budget = "seconds for a case, after compiling; six rounds at least (default: %(default)s)"
        add("--budget", type=float, default=budget_s, help=budget)
    add("--tiny", action="store_true", help="the smallest sizes, to see that it runs")
    if device:
        devices = ("auto", "cpu", "cuda")
        add("--device", choices=devices, default="auto", help="(default: %(default)s)")
    if recipes:
        recipes_help = f"(default: {','.join(recipes)})"
        add("--recipes", type=words, default=[*recipes], metavar="A,B", help=recipes_help)


def timing_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `interleaved` that these options give."""
    return timing_settings(arguments) | {"device": _hardware(arguments).device}


def timing_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    names = {"rounds": "rounds", "warm_up": "warm_up", "budget": "budget_s"}
    return {key: getattr(arguments, name) for name, key in names.items()}


def parse(scenario: Any, name: str, words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m bench {name}", description=SCENARIOS.get(name)
    )
    parser.add_argument(
        "--out", type=Path, help="folder (default: bench/results/<machine>, such as cpu or h200)"
    )
    scenario.add_arguments(parser)
    arguments = parser.parse_args(words)
    for key in ("rounds", "workers"):
        if (count := getattr(arguments, key, 1)) < 1:
            parser.error(f"--{key} {count}: give 1 or more")
    return arguments


def run(name: str, words: Sequence[str]) -> int:
    """Run one scenario with these options: print its table, write its results. Returns 1 if an arm
    failed, else 0."""
    module = imported(name)
    arguments = parse(module, name, words)
    if getattr(arguments, "tiny", False) and arguments.out is None:
        raise UserError("--tiny would overwrite results in bench/results. Give --out FOLDER.")
    at_once = hasattr(module, "run")  # a scenario that writes its results itself
    subfolder = Path() if at_once else Path(getattr(module, "FOLDER", slug(_hardware(arguments))))
    arguments.out = folder = arguments.out or RESULTS / subfolder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {quoted(str(folder))} cannot be made: {error.strerror}.") from error
    if at_once:
        module.run(arguments)
        return 0
    cells = Cells(folder / f"{name}.partial.jsonl", _conditions(arguments))
    report = measured(module, name, words, cells)
    text = module.table(report)
    reports.write(report, text, folder)
    print(text)
    stem = report["scenario"]
    print(f"written: {folder}/{stem}.json and {stem}.md")
    return int(cells.finish() > 0)


def imported(name: str) -> Any:
    """Import the module of a scenario, and only that: another may need missing packages.

    Raises:
        UserError: the scenario needs a package that is not installed.
    """
    try:
        (file,) = Path(__file__).parent.glob(f"*/{name.replace('-', '_')}.py")
        return import_module(f"bench.{file.parent.name}.{file.stem}")
    except ModuleNotFoundError as error:
        package = (error.name or "bench").partition(".")[0]
        if package in ("bench", "fp8stack"):
            raise
        raise UserError(
            f"bench {name} needs {package}, which is not installed: pip install -e '.[test]'"
        ) from None


def measured(scenario: Any, name: str, words: Sequence[str], cells: Cells | None = None) -> Report:
    """The report of a scenario with these options, with the command that repeats it.

    Args:
        scenario: the module of the scenario.
        name: the name of the scenario.
        words: its options.
        cells: a store for rows as they are measured; by default they are kept in memory.
    """
    command = shlex.join(["python", "-m", "bench", name, *words])
    arguments = parse(scenario, name, words)
    arguments.cells = cells or Cells()
    timed = getattr(scenario, "__name__", "").startswith("bench.cost.")
    with timing() if timed else nullcontext():
        data = scenario.measure(arguments)
    left_out = arguments.cells.left_out
    return {"scenario": name, "command": command, **data, "left_out": left_out}


def _hardware(arguments: argparse.Namespace) -> Hardware:
    return probe(getattr(arguments, "device", "cpu"))


def _conditions(arguments: argparse.Namespace) -> dict[str, Any]:
    """The conditions that a row depends on besides its case and arm."""
    options = {key: value for key, value in vars(arguments).items() if key not in CHOOSING}
    return {"machine": machine(device=_hardware(arguments).device), "options": options}


# Comparison with committed results


def check(words: Sequence[str]) -> int:
    """Run scenarios again, in short, and compare ratios with the committed ones: 0 if none got
    worse, 1 if one did, 2 if there is nothing to compare."""
    parser = argparse.ArgumentParser(prog="python -m bench check", description=check.__doc__)
    parser.add_argument("scenarios", nargs="*", help="default: all that have results here")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        help="how much larger a ratio may be, as a share of it (default: %(default)s)",
    )
    parser.add_argument("--results", type=Path, help="default: bench/results/<machine>")
    arguments = parser.parse_args(words)
    folder: Path = arguments.results or RESULTS / slug(probe())
    names = arguments.scenarios or [name for name in SCENARIOS if _has_ratios(folder, name)]
    for name in names:
        if not _has_ratios(folder, name):
            print(f"{folder / name}.json has no ratios to compare with: python -m bench {name}")
            return 2
    worse: list[str] = []
    for name in names:
        module = imported(name)
        committed = json.loads((folder / f"{name}.json").read_text())
        measured_again = measured(module, name, getattr(module, "SHORT", ()))
        worse += regressions(committed, measured_again, arguments.tolerance)
    print(*worse, sep="\n")
    print(f"{', '.join(names)}: {len(worse)} worse by more than {arguments.tolerance:.0%}")
    return 1 if worse else 0


def _has_ratios(folder: Path, name: str) -> bool:
    path = folder / f"{name}.json"
    results = json.loads(path.read_text()).get("results", []) if path.exists() else []
    return any("ratio" in row for row in results)


def regressions(committed: Report, fresh: Report, tolerance: float) -> list[str]:
    """A line for each arm whose ratio exceeds the committed ratio by more than the fraction
    `tolerance`, unless this may be noise, because both have 95 % confidence intervals and these
    overlap.

    Raises:
        UserError: the reports have no arm in common, or their ratios are to different arms.
    """
    name = fresh["scenario"]
    before = {(row["case"], row["arm"]): row for row in committed["results"]}
    common = [row for row in fresh["results"] if (row["case"], row["arm"]) in before]
    if not common:
        raise UserError(f"{name}: no arm was measured that has a committed result.")
    for row in common:
        committed_row = before[row["case"], row["arm"]]
        if committed_row["ratio_to"] != row["ratio_to"]:
            raise UserError(
                f"{name}: the committed ratios are to {committed_row['ratio_to']}, those of this "
                f"machine to {row['ratio_to']}. Measure it here first: python -m bench {name}"
            )
    lines = []
    for row in common:
        committed_row = before[row["case"], row["arm"]]
        was, now = committed_row["ratio"], row["ratio"]
        if now > was * (1 + tolerance) and not _may_be_noise(committed_row, row):
            lines.append(
                f"{name}, {row['case']}: {row['arm']} takes {now:.3f} of "
                f"{row['ratio_to']}, committed {was:.3f} ({now / was - 1:+.0%})"
            )
    return lines


def _may_be_noise(committed: Row, fresh: Row) -> bool:
    """Whether the new ratio's interval begins within the committed one; False if either has no
    interval."""
    if "paired_low" not in fresh or "paired_high" not in committed:
        return False
    return bool(fresh["paired_low"] <= committed["paired_high"])
