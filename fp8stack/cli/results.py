"""The commands `fp8stack list`, `copy`, `show` and `report`."""

from pathlib import Path
from typing import Annotated

import typer

from fp8stack.cli import completion, options
from fp8stack.cli.options import argument, option
from fp8stack.common import terminal
from fp8stack.common.errors import UserError, quoted, unknown

KINDS = ("models", "recipes", "runs")
KIND = argument("KIND", "models, recipes or runs.", autocompletion=completion.values(lambda: KINDS))
FOLDER = argument("FOLDER", "Of runs: the folder to look in. [runs]")
RUN = argument("RUN", "Run folder.")
OUT = option("HTML file. [report.html in the run, or beside several runs]")
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
    """Show the report on a run on the terminal, and what to do next."""
    from fp8stack.analysis import report
    from fp8stack.training.run_folder import RunFolder

    report.show(run)
    terminal.show(*RunFolder(run).next_commands())


def report(
    runs: Annotated[list[Path], RUNS],
    out: Annotated[str | None, OUT] = None,
    json: Annotated[bool, options.JSON] = False,
) -> None:
    """Report on runs in one HTML page: losses, speed, FP8, and what needs attention."""
    from fp8stack.analysis import report as reports

    page = reports.report(runs, out, json)
    if page is not None:
        (terminal.warn if json else terminal.say)(f"report: {page}")


COPIES = {"model": "--model", "recipe": "--recipe", "run": "--config"}
"""The kinds that can be copied, and the flag of `pretrain` that takes the copy."""
COPIED = argument("KIND", "model, recipe or run.", autocompletion=completion.values(lambda: COPIES))


def _names(context: typer.Context, incomplete: str) -> list[str]:
    """The presets of the kind that was typed before; none of runs."""
    kinds = {"model": completion.MODELS, "recipe": completion.RECIPES}
    complete = kinds.get(context.params.get("kind", ""))
    return complete(incomplete) if complete else []


NAME = argument(
    "NAME", "Model preset, recipe or TOML file; of a run, its folder.", autocompletion=_names
)
FILE = argument("FILE", "TOML file to write.")
OVERWRITE = option("Replace the file if it exists.", "--overwrite")


def copy(
    kind: Annotated[str, COPIED],
    name: Annotated[str, NAME],
    file: Annotated[Path, FILE],
    overwrite: Annotated[bool, OVERWRITE] = False,
) -> None:
    """Copy a model, a recipe or a run's configuration to a file, to be edited."""
    from fp8stack.common import presets
    from fp8stack.common.io import write_atomically

    content: bytes | None = None
    if kind == "model":
        source = presets.find("models", name)
    elif kind == "recipe":
        if name == "auto":
            raise UserError("auto stands for another recipe; `fp8stack plan` says which. Copy it.")
        source = presets.find("recipes", name)
    elif kind == "run":
        source, content = _configuration(name)
    else:
        raise unknown("kind to copy", kind, tuple(COPIES))
    if file.suffix != ".toml":
        raise UserError(f"{quoted(str(file))} is no TOML file. Give a name such as mine.toml.")
    if not file.parent.is_dir():
        raise UserError(f"There is no folder {quoted(str(file.parent))}. Create it first.")
    if file.exists() and not overwrite:
        raise UserError(f"{quoted(str(file))} exists. Give another name, or --overwrite.")
    write_atomically(file, source.read_bytes() if content is None else content)
    terminal.say(
        f"copied {source} to {file}; edit it, then: fp8stack pretrain {COPIES[kind]} "
        f"{terminal.shell_quoted(str(file))}"
    )


def _configuration(name: str) -> tuple[Path, bytes]:
    """The `run.toml` of a run, and its content with absolute paths of the files in the run."""
    from fp8stack.planning.run_config import parse_config, to_toml
    from fp8stack.training.run_folder import RunFolder

    folder = RunFolder(Path(name))
    if not folder.holds_run:
        raise UserError(f"{quoted(name)} is no run folder: it has no {folder.config.name}.")
    return folder.config, to_toml(parse_config(str(folder.config), {})).encode()
