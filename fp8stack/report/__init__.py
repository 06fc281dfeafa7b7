"""`fp8stack report`: a report on runs, as one HTML page or for a terminal."""

from collections.abc import Sequence
from pathlib import Path


def report(
    runs: Sequence[Path], out: str | None = None, text: bool = False, json: bool = False
) -> Path | None:
    """Report on `runs`, and return the page that was written, if any.

    Args:
        runs: run folders.
        out: the page; left out, `report.html` in the run's folder, or in the folder that several
            runs share. Its plots go as PNG files into a folder beside it, `report_files`.
        text: print the essentials; then a page is written only if `out` names one.
        json: the same, as JSON.

    Raises:
        UserError: a path that is no run, or something else in the place of `out`.
        StorageError: the disk is full or cannot be written.
    """
    from fp8stack.report.attention import judge
    from fp8stack.report.read import read_run

    judged = [judge(read_run(run)) for run in runs]
    written = None
    if out is not None or not (text or json):
        from fp8stack.report import page

        written = page.destination(out, runs)
    if text:
        from rich.console import Console

        from fp8stack.report.text import show
        from fp8stack.report.words import titles

        console = Console(highlight=False, markup=False, emoji=False)
        show(judged, titles([one.run for one in judged]), console)
    if json:
        from fp8stack.report.summary import as_json

        print(as_json(judged))
    if written is not None:
        page.write(judged, written)
    return written
