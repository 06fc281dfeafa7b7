"""Reports on runs: `fp8stack report`, a page or JSON, and `fp8stack show`, text."""

from collections.abc import Sequence
from pathlib import Path

from fp8stack.common import terminal


def report(runs: Sequence[Path], out: str | None = None, json: bool = False) -> Path | None:
    """Report on `runs`. Returns the path of the HTML page, None if no page was written.

    Args:
        runs: run folders.
        out: path of the page; by default `report.html` in the run's folder, or in the folder that
            several runs share. Its plots are written as PNG files to the folder `report_files` next
            to the page.
        json: print a summary as JSON. A page is then written only if `out` is given.

    Raises:
        UserError: a path holds no run, or `out` is not a file that can be replaced.
        StorageError: the disk is full or cannot be written.
    """
    from fp8stack.analysis.report.analysis import analyze
    from fp8stack.analysis.report.run_record import read_run

    analyses = [analyze(read_run(run)) for run in runs]
    written = None
    if out is not None or not json:
        from fp8stack.analysis.report import page

        written = page.destination(out, runs)
    if json:
        from fp8stack.analysis.report.summary import as_json

        terminal.show_json(as_json(analyses))
    if written is not None:
        page.write(analyses, written)
    return written


def show(run: Path) -> None:
    """Print the report on a run as text. Raises a UserError if the path holds no run."""
    from fp8stack.analysis.report import text
    from fp8stack.analysis.report.analysis import analyze
    from fp8stack.analysis.report.run_record import read_run
    from fp8stack.common.screen import Screen

    text.show(analyze(read_run(run)), Screen())
