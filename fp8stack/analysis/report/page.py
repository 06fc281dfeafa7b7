"""The report as a self-contained HTML page, and its plots as PNG files in a folder next to it."""

import os
import re
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
from fp8stack.analysis.report.expert_shares import expert_map
from fp8stack.analysis.report.formatting import titles
from fp8stack.analysis.report.heatmaps import MAPS, gradient_map, heat_map
from fp8stack.common.errors import UserError, quoted
from fp8stack.common.io import storage_errors, sweep, write_atomically
from fp8stack.common.version import __version__

MARK = '<meta name="generator" content="fp8stack report'
"""The beginning of a page that fp8stack wrote, which may be overwritten."""
_UNSEEN = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
_OURS = re.compile(r"(run\d+|runs)-[a-z_]+\.png")


def destination(out: str | None, runs: Sequence[Path]) -> Path:
    """The path of the page: `out`, by default `report.html` in the run's folder or in the folder
    that all runs share. Raises a UserError if another file has that path, or if the runs share no
    folder."""
    if out is None:
        parents = {run.resolve().parent for run in runs}
        if len(runs) > 1 and len(parents) > 1:
            raise UserError("The runs lie in different folders. Say by --out where to write.")
        page = (runs[0] if len(runs) == 1 else runs[0].resolve().parent) / "report.html"
    else:
        page = Path(out)
    quoted_page = quoted(str(page))
    if page.is_dir() or not page.name:
        raise UserError(f"--out {quoted_page} is a folder. Name a file in it, such as report.html.")
    for folder in page.parents:
        if os.path.lexists(folder) and not folder.is_dir():
            raise UserError(
                f"--out {quoted_page}: {quoted(str(folder))} is no folder. Give another."
            )
    if os.path.lexists(page) and not _is_ours(page):
        raise UserError(
            f"--out {quoted_page} exists and is no report of fp8stack. Give another --out."
        )
    plots = _plots_of(page)
    if plots.is_symlink():
        raise UserError(f"{quoted(str(plots))} is a symbolic link. Give another --out.")
    try:
        entries = plots.iterdir() if os.path.lexists(plots) else iter(())
        foreign = not all(
            entry.name.startswith(".") or _OURS.fullmatch(entry.name) for entry in entries
        )
    except OSError:
        foreign = True
    if foreign:
        raise UserError(
            f"{quoted(str(plots))} is where the plots belong and holds other things. "
            "Give another --out."
        )
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
    plots = _plots_of(page)
    html, pictures = render(runs, plots.name)
    with storage_errors(page):
        plots.mkdir(parents=True, exist_ok=True)
    sweep(plots, _OURS.fullmatch)
    for picture in pictures:
        write_atomically(plots / f"{picture.name}.png", picture.png())
    # Replace characters of run names that UTF-8 cannot encode.
    write_atomically(page, html.encode("utf-8", "replace"))
    names = {f"{picture.name}.png" for picture in pictures}
    with storage_errors(page):
        for plot in plots.iterdir():
            if _OURS.fullmatch(plot.name) and plot.name not in names:
                plot.unlink()


def render(runs: Sequence[Analysis], plots: str) -> tuple[str, list[Picture]]:
    """The page as HTML, and its plots. `plots` is the name of their folder, for the page's text."""
    inner = [analysis.run for analysis in runs]
    names = titles(inner)
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
        finalize=lambda value: visible(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"svg": lambda picture: Markup(visible(picture.svg()))}
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


def visible(text: str) -> str:
    """`text` with invisible characters, such as direction marks, escaped."""
    return _UNSEEN.sub(lambda match: repr(match[0])[1:-1], text)


def _drawn(*pictures: Picture | None) -> list[Picture]:
    return [picture for picture in pictures if picture is not None]


def _section(analysis: Analysis, name: str, prefix: str) -> dict[str, Any]:
    """The values for the template's section of a run."""
    run = analysis.run
    training = _drawn(
        curves.loss([run], [name], f"{prefix}-loss"),
        curves.rates(run, f"{prefix}-rates"),
        curves.throughput([run], [name], f"{prefix}-throughput"),
        gradient_map(run, prefix),
        expert_map(run, f"{prefix}-experts"),
    )
    maps = [heat_map(run, figure, f"{prefix}-{figure}") for figure in MAPS if run.operands]
    fp8 = _drawn(*maps, curves.amaxes(analysis, f"{prefix}-amax"))
    return {
        "id": prefix,
        "name": name,
        "path": str(run.path),
        "state": analysis.state,
        "headline": summary.headline(analysis),
        "verdict": verdict(analysis),
        "level": analysis.findings[0].level if analysis.findings else "note",
        "findings": analysis.findings,
        "extremes": analysis.extremes,
        "training": training,
        "fp8": fp8,
        "pictures": [*training, *fp8],
        "no_telemetry": summary.without_telemetry(run),
        "what_if": summary.what_if(analysis),
        "forecast": run.forecast,
        "reasons": summary.reasons(run),
        "not_fp8": summary.not_fp8(run),
        "has_plan": bool(run.plan),
        "events": folded(run.events),
        "sessions": run.sessions,
        "config": run.config_text,
    }
