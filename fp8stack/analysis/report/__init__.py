"""`fp8stack report`: a report on runs, as an HTML page, text or JSON."""

from collections.abc import Sequence
from pathlib import Path

from fp8stack.common import terminal


def report(
    runs: Sequence[Path], out: str | None = None, text: bool = False, json: bool = False
) -> Path | None:
    """Report on `runs`. Returns the path of the HTML page, None if no page was written.

    Args:
        runs: run folders.
        out: path of the page; by default `report.html` in the run's folder, or in the folder that
            several runs share. Its plots are written as PNG files to the folder `report_files` next
            to the page.
        text: print a summary. A page is then written only if `out` is given.
        json: print the summary as JSON. A page is then written only if `out` is given.

    Raises:
        UserError: a path holds no run, or `out` is not a file that can be replaced.
        StorageError: the disk is full or cannot be written.
    """
    from fp8stack.analysis.report.analysis import analyze
    from fp8stack.analysis.report.read import read_run

    analyses = [analyze(read_run(run)) for run in runs]
    written = None
    if out is not None or not (text or json):
        from fp8stack.analysis.report import page

        written = page.destination(out, runs)
    if text:
        from fp8stack.analysis.report.formatting import titles
        from fp8stack.analysis.report.text import show
        from fp8stack.common.screen import Screen

        show(analyses, titles([analysis.run for analysis in analyses]), Screen())
    if json:
        from fp8stack.analysis.report.summary import as_json

        terminal.show_json(as_json(analyses))
    if written is not None:
        page.write(analyses, written)
    return written
