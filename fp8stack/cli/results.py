"""The commands `fp8stack list`, `show` and `report`."""

from pathlib import Path
from typing import Annotated

from fp8stack.cli import completion, options
from fp8stack.cli.options import argument, option
from fp8stack.common import terminal
from fp8stack.common.errors import UserError, unknown

KINDS = ("models", "recipes", "runs")
KIND = argument("KIND", "models, recipes or runs.", autocompletion=completion.values(lambda: KINDS))
FOLDER = argument("FOLDER", "Of runs: the folder to look in. [runs]")
RUN = argument("RUN", "Run folder.")
OUT = option("HTML file. [report.html in the run, or beside several runs]")
TEXT = option("Print a summary; write a page only with --out.", "--text")
RUNS = argument("RUNS", "Run folders.")


def list_(
    kind: Annotated[str, KIND],
    folder: Annotated[Path | None, FOLDER] = None,
    capability: Annotated[str | None, options.CAPABILITY] = None,
    json: Annotated[bool, options.JSON] = False,
) -> None:
    """List models, recipes or runs, with the main facts of each."""
    if kind not in KINDS:
        raise unknown("kind to list", kind, KINDS)
    for name, value, of in (("FOLDER", folder, "runs"), ("--capability", capability, "recipes")):
        if value is not None and kind != of:
            raise UserError(f"{name} is for `list {of}`. Leave it out.")
    from fp8stack.analysis.report import listing

    if kind == "models":
        rows = listing.models()
    elif kind == "runs":
        rows = listing.runs(folder or Path("runs"))
    else:
        from fp8stack.precision.hardware import machine_for

        rows = listing.recipes(machine_for(capability, None))
    if json:
        options.print_json(rows)
    elif not rows:
        terminal.show(f"No runs in {folder or 'runs'}.")
    else:
        options.print_rows(rows)


def show(run: Annotated[Path, RUN]) -> None:
    """Show a run on the terminal: figures, findings and what to do next."""
    from fp8stack.analysis.report import report
    from fp8stack.training.run_folder import RunFolder

    report([run], text=True)
    folder = RunFolder(run)
    terminal.show(*folder.next_commands())


def report(
    runs: Annotated[list[Path], RUNS],
    out: Annotated[str | None, OUT] = None,
    text: Annotated[bool, TEXT] = False,
    json: Annotated[bool, options.JSON] = False,
) -> None:
    """Report on runs in one HTML page: losses, speed, FP8, and what needs attention."""
    from fp8stack.analysis import report as reports

    if json and text:
        raise UserError("Give --json or --text, not both.")
    page = reports.report(runs, out, text, json)
    if page is not None:
        (terminal.warn if json else terminal.say)(f"report: {page}")
