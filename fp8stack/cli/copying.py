"""The command `fp8stack copy`."""

from pathlib import Path
from typing import Annotated

import typer

from fp8stack.cli import completion
from fp8stack.cli.options import argument, option
from fp8stack.common import terminal
from fp8stack.common.errors import UserError, quoted, unknown

FLAGS = {"model": "--model", "recipe": "--recipe", "run": "--config"}
"""The kinds that can be copied, and the flag of `pretrain` that takes the copy."""
KIND = argument("KIND", "model, recipe or run.", autocompletion=completion.values(lambda: FLAGS))


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
    kind: Annotated[str, KIND],
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
        raise unknown("kind to copy", kind, tuple(FLAGS))
    if file.suffix != ".toml":
        raise UserError(f"{quoted(str(file))} is no TOML file. Give a name such as mine.toml.")
    if not file.parent.is_dir():
        raise UserError(f"There is no folder {quoted(str(file.parent))}. Create it first.")
    if file.exists() and not overwrite:
        raise UserError(f"{quoted(str(file))} exists. Give another name, or --overwrite.")
    write_atomically(file, source.read_bytes() if content is None else content)
    terminal.say(
        f"copied {source} to {file}; edit it, then: fp8stack pretrain {FLAGS[kind]} "
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
