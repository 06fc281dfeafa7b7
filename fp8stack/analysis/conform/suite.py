"""The table: all rows by group. Runs them, and reports the results as text and JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fp8stack.analysis.benchmark.timing import machine
from fp8stack.analysis.conform.attention_bounds import attention
from fp8stack.analysis.conform.casts import casts, layouts, quantizers
from fp8stack.analysis.conform.checks import Context, Facts, Row
from fp8stack.analysis.conform.gemms import gemms, groups
from fp8stack.analysis.conform.golden import golden
from fp8stack.analysis.conform.histories import histories
from fp8stack.common.errors import UserError, quoted
from fp8stack.common.io import write_atomically
from fp8stack.common.tables import aligned
from fp8stack.numerics import fused
from fp8stack.precision import Recipe, load_recipe

GROUPS: dict[str, Callable[[Context], Iterator[Row]]] = {
    "casts": casts,
    "quantizers": quantizers,
    "layouts": layouts,
    "histories": histories,
    "gemms": gemms,
    "groups": groups,
    "attention": attention,
    "golden": golden,
}
GROUPS_OF_RECIPE = ("quantizers", "histories", "gemms")
"""The groups with rows of what `Context.recipe` uses."""
VERDICTS = ("pass", "FAIL", "skipped")


def rows(context: Context, only: str | None = None) -> list[Row]:
    """The rows of the table. `only` selects those whose "group: name" contains it, or matches it as
    a pattern with * and ?.

    Raises:
        UserError: no row matches.
    """
    names = tuple(GROUPS) if context.recipe is None else GROUPS_OF_RECIPE
    every = [row for name in names for row in GROUPS[name](context)]
    if only is None:
        return every
    pattern = only if any(char in only for char in "*?[") else f"*{only}*"
    chosen = [row for row in every if fnmatchcase(str(row), pattern)]
    if not chosen:
        raise UserError(f"No check matches --only '{quoted(only)}'. Groups: {', '.join(names)}.")
    return chosen


def recipe_to_check(name: str) -> Recipe:
    """The recipe of a `--recipe`. Raises a UserError if it has no quantizers; see `load_recipe`."""
    recipe = load_recipe(name)
    if not recipe.tables:
        raise UserError(
            f"--recipe {quoted(name)} quantizes nothing that could be checked. Give a recipe with "
            "quantizers, or none."
        )
    return recipe


def run(
    context: Context,
    only: str | None = None,
    tell: Callable[[str], object] = len,
    file: Path | None = None,
) -> Facts:
    """Run the table.

    Args:
        context: where and how to run.
        only: see `rows`.
        tell: called with the name of each row before it runs.
        file: the file for the report, written after each row, so that a run that is cut off
            leaves what it has found.

    Returns:
        The report as JSON data: `machine`, the `recipe` if it was chosen, `quick`, `seed`,
            `checks`, their number, `rows`, `counts` by verdict, and `holds`, whether all ran and
            none failed. For a row of them see `Row.run`.

    Raises:
        StorageError: the file cannot be written.
    """
    chosen, results = rows(context, only), []
    about = {
        "machine": facts(context),
        "recipe": None if context.recipe is None else context.recipe.name,
        "quick": context.quick,
        "seed": context.seed,
    }
    for row in chosen:
        tell(str(row))
        results.append(row.run())
        counts = Counter(result["verdict"] for result in results)
        report = about | {
            "checks": len(chosen),
            "counts": {verdict: counts[verdict] for verdict in VERDICTS},
            "holds": not counts["FAIL"] and len(results) == len(chosen),
            "rows": results,
        }
        if file is not None:
            content = json.dumps(report, indent=1, allow_nan=False) + "\n"
            write_atomically(file, content.encode())
    return report


def facts(context: Context) -> dict[str, Any]:
    """The machine, its driver, and the versions of the libraries that compute."""
    packages = ("numba", "triton", "nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cudnn-cu13")
    versions = machine(*packages, device=context.device)
    hardware = context.hardware
    te = hardware.te_version if hardware.has_te else hardware.te_problem or "not installed"
    versions |= {"transformer-engine": te, "casts without numba": fused.why_not()}
    return {name: value for name, value in versions.items() if value is not None}


def file_for(out: str | None) -> Path | None:
    """The file for the report, checked before anything runs.

    Raises:
        UserError: its folder does not exist, it is a folder, or it exists and is no report.
    """
    if out is None:
        return None
    path = Path(out)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"--out {quoted(out)} is not a file in an existing folder. Give another.")
    if path.exists() and not _is_report(path):
        raise UserError(f"--out {quoted(out)} exists and is no report of conform. Give another.")
    return path


def _is_report(path: Path) -> bool:
    try:
        content = json.loads(path.read_text(encoding="utf-8") or '{"rows": []}')
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "rows" in content


def as_text(report: Facts) -> list[str]:
    """The report as lines: the machine, each check, why checks were skipped, what failed, and
    counts."""
    versions = ", ".join(
        f"{k} {v}" for k, v in report["machine"].items() if k not in ("machine", "slug")
    )
    lines = [f"machine: {report['machine']['machine']}", versions, ""]
    table, skipped, failed = [("group", "check", "verdict", "s")], Counter[str](), []
    for row in report["rows"]:
        group, check, verdict, reason = (row[key] for key in ("group", "check", "verdict", "why"))
        if verdict == "skipped":
            skipped[reason] += 1
            continue
        table.append((group, check, verdict, f"{row['seconds']:.2f}"))
        if verdict == "FAIL":
            failed.append(f"FAIL {group}: {check}: {reason}")
    lines += [*aligned(table), ""]
    lines += [*(f"skipped {count}: {reason}" for reason, count in skipped.items()), *failed]
    counts = ", ".join(f"{count} {verdict}" for verdict, count in report["counts"].items())
    seconds = sum(row["seconds"] for row in report["rows"])
    return [*lines, f"{counts} after {seconds:.0f} s, seed {report['seed']}"]
