"""The report as a self-contained HTML page, and its plots as PNG files in a folder next to it."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from fp8stack.analysis.report import curves, summary
from fp8stack.analysis.report.analysis import Analysis, verdict
from fp8stack.analysis.report.drawing import Picture
from fp8stack.analysis.report.events import folded
from fp8stack.analysis.report.heatmaps import MAPS, expert_map, gradient_map, heat_map
from fp8stack.analysis.report.read import RunRecord
from fp8stack.common.errors import UserError, quoted
from fp8stack.common.io import storage_errors, sweep, write_atomically
from fp8stack.common.terminal import printable
from fp8stack.common.version import __version__

MARK = '<meta name="generator" content="fp8stack report'
"""The beginning of a page that fp8stack wrote, which may be overwritten."""
_PLOT = re.compile(r"(run\d+|runs)-[a-z_]+\.png")


def destination(out: str | None, runs: Sequence[Path]) -> Path:
    """The path of the page: `out`, by default `report.html` in the run's folder or in the folder
    that all runs share. Raises a UserError if another file has that path, or if the runs share no
    folder."""
    if out is not None:
        page = Path(out)
    elif len(runs) == 1:
        page = runs[0] / "report.html"
    else:
        parents = {run.resolve().parent for run in runs}
        if len(parents) > 1:
            raise UserError("The runs lie in different folders. Say by --out where to write.")
        page = parents.pop() / "report.html"
    quoted_page = quoted(str(page))
    if page.is_dir() or not page.name:
        raise UserError(f"--out {quoted_page} is a folder. Name a file in it, such as report.html.")
    if os.path.lexists(page) and not _is_ours(page):
        raise UserError(
            f"--out {quoted_page} exists and is no report of fp8stack. Give another --out."
        )
    if (plots := _plots_of(page)).is_symlink():
        raise UserError(f"{quoted(str(plots))} is a symbolic link. Give another --out.")
    return page


def _plots_of(page: Path) -> Path:
    return page.with_name(f"{page.stem}_files")


def _is_ours(page: Path) -> bool:
    if not page.is_file():  # reading a pipe or a device would block
        return False
    try:
        with page.open("rb") as stream:
            return MARK.encode() in stream.read(2000)
    except OSError:
        return False


def write(runs: Sequence[Analysis], page: Path) -> None:
    """Write the page and its plots. Raises a StorageError if they cannot be written.

    Plots of an earlier page are deleted last, so that no page lacks one if this process is
    killed."""
    folder = _plots_of(page)
    html, pictures = render(runs, folder.name)
    plots = {folder / f"{picture.name}.png": picture for picture in pictures}
    with storage_errors(folder / "plots"):
        folder.mkdir(parents=True, exist_ok=True)
    sweep(folder, _PLOT.fullmatch)
    for path, picture in plots.items():
        write_atomically(path, picture.png())
    write_atomically(page, html.encode())
    with storage_errors(page):
        for path in folder.iterdir():
            if _PLOT.fullmatch(path.name) and path not in plots:
                path.unlink()


def render(runs: Sequence[Analysis], plots: str) -> tuple[str, list[Picture]]:
    """The page as HTML, and its plots. `plots` is the name of their folder, for the page's text."""
    inner = [analysis.run for analysis in runs]
    names = _titles(inner)
    compared = []
    if len(runs) > 1:
        loss = curves.loss(inner, names, "runs-loss")
        compared = _drawn(loss, curves.throughput(inner, names, "runs-throughput"))
    sections = [
        _section(analysis, name, f"run{number}")
        for number, (analysis, name) in enumerate(zip(runs, names, strict=True), start=1)
    ]
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: printable(value, "\n\t") if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"svg": lambda picture: Markup(printable(picture.svg(), "\n\t"))}
    source = files("fp8stack.analysis.report")
    template = environment.from_string(source.joinpath("page.html.jinja").read_text("utf-8"))
    html = template.render(
        version=__version__,
        style=Markup(source.joinpath("style.css").read_text("utf-8")),
        sections=sections,
        compared=compared,
        plots=plots,
    )
    return html, [*compared, *(picture for section in sections for picture in section["pictures"])]


def _titles(runs: Sequence[RunRecord]) -> list[str]:
    """The title of each run: its folder's name, or its path if names collide."""
    names = Counter(run.name for run in runs)
    return [run.name if names[run.name] == 1 else str(run.path) for run in runs]


def _drawn(*pictures: Picture | None) -> list[Picture]:
    return [picture for picture in pictures if picture is not None]


def _section(analysis: Analysis, name: str, prefix: str) -> dict[str, Any]:
    """The values for the template's section of a run."""
    run = analysis.run
    training = _drawn(
        curves.loss([run], [name], f"{prefix}-loss"),
        curves.rates(run, f"{prefix}-rates"),
        curves.throughput([run], [name], f"{prefix}-throughput"),
        gradient_map(run, f"{prefix}-gradient"),
        expert_map(run, f"{prefix}-experts"),
    )
    maps = [
        heat_map(run, figure, f"{prefix}-{figure}") for figure in MAPS if run.telemetry.operands
    ]
    fp8 = _drawn(*maps, curves.amaxes(analysis, f"{prefix}-amax"))
    return {
        "id": prefix,
        "name": name,
        "path": str(run.path),
        "headline": summary.headline(run),
        "verdict": verdict(analysis),
        "level": analysis.findings[0].level if analysis.findings else "note",
        "findings": analysis.findings,
        "extremes": analysis.extremes,
        "training": training,
        "fp8": fp8,
        "pictures": [*training, *fp8],
        "no_telemetry": summary.without_telemetry(run),
        "what_if": summary.what_if(analysis),
        "loss_gap": run.loss_gap,
        "reasons": summary.reasons(run),
        "not_fp8": summary.not_fp8(run),
        "has_plan": bool(run.plan),
        "events": folded(run.metrics.events),
        "sessions": run.sessions,
        "config": run.config_text,
    }
