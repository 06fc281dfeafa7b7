"""Options shared by commands, the layout of help, and printing of results."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_args

import typer
from typer.core import TyperCommand, TyperGroup

from fp8stack.cli import completion
from fp8stack.common.terminal import show, show_json, write_text
from fp8stack.planning.run_keys import FLAGS, RunKeys
from fp8stack.training.threads import use_threads


def option(help: str, *names: str, **more: Any) -> Any:
    """An option whose help ends with its default in brackets."""
    return typer.Option(*names, help=help, show_default=False, **more)


def argument(metavar: str, help: str, **more: Any) -> Any:
    """An argument that help and errors call `metavar`, in capitals."""
    return typer.Argument(metavar=metavar, help=help, show_default=False, **more)


def _show(context: typer.Context, requested: bool) -> None:
    if requested:
        write_text(f"{context.get_help()}\n")
        raise typer.Exit


def _compute_with(threads: int | None) -> int | None:
    use_threads(threads)
    return threads


# Replaces typer's --help, which imports pydantic for every command.
HELP = option("Show this message and exit.", "--help", "-h", is_eager=True, callback=_show)


def key_option(key: str, **more: Any) -> Any:
    """The option of a key of a run, with its choices and its default in the help."""
    flag, default = FLAGS[key], getattr(RunKeys, key)
    choices = [kind for kind in _types(RunKeys.__annotations__[key]) if isinstance(kind, str)]
    help, complete = flag.help, None
    if choices:
        help += f" {', '.join(choices[:-1])} or {choices[-1]}."
        complete = completion.values(lambda: choices)
    elif flag.complete is not None:
        complete = {"models": completion.MODELS, "recipes": completion.RECIPES}[flag.complete]
    if flag.default or str(default) not in ("None", "False", "()"):
        help += f" [{flag.default or default}]"
    return option(help, *flag.names, autocompletion=complete, **more)


def _types(annotation: Any) -> Iterator[Any]:
    """The types that an annotation allows, without limits; of a Literal, its values."""
    is_limited = hasattr(annotation, "__metadata__")
    inner = (annotation.__origin__,) if is_limited else get_args(annotation)
    if not inner:
        yield annotation
    for type_ in inner:
        yield from _types(type_)


def takes_keys(*keys: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command options for keys of a run. Its function gets those that the user gave as a
    dict, its first argument.

    Args:
        keys: the keys; all that have a flag if left out.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def command(**values: Any) -> None:
            flags = {key: values.pop(key) for key in keys or FLAGS}
            function({key: value for key, value in flags.items() if value is not None}, **values)

        _, *parameters = signature(function, eval_str=True).parameters.values()
        parameters = [*map(_parameter, keys or FLAGS), *parameters]
        command.__annotations__ = {option.name: option.annotation for option in parameters}
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def _parameter(key: str) -> Parameter:
    """The parameter of a command for a key of a run. pydantic checks all but its type."""
    types = [*_types(RunKeys.__annotations__[key])]
    plain_type = next((plain for plain in (bool, int, float) if plain in types), str)
    annotation = Annotated[plain_type | None, key_option(key)]  # type: ignore[valid-type]
    return Parameter(key, Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)


# Keys that are tables have options of other types.
PHASES = option(
    "By phase: conservative, default or aggressive.",
    autocompletion=completion.values(lambda: ("conservative", "default", "aggressive")),
)
BACKEND, DEVICE = key_option("backend"), key_option("device")
THREADS_NOW = key_option("threads", callback=_compute_with)
CONFIG = option("Run file (TOML); flags override it.")
SET = option("Any other key; repeatable.", metavar="KEY=VALUE", autocompletion=completion.SETTINGS)

# A trained model
TRAINED = "Run or checkpoint folder, hf:FOLDER or hf:owner/name."
RUN = argument("RUN", TRAINED)
TOKENIZER = option("Tokenizer if the run records none: bytes, gpt2, or a tokenizer.json.")

# A machine that is not here
CAPABILITY = option(
    "Assume a GPU of this compute capability (9.0), or a CPU (none). [this machine]",
    autocompletion=completion.CAPABILITIES,
)
GPU = option(
    "Assume this GPU, by its data sheet (H100, L4, RTX 4090).", autocompletion=completion.GPUS
)
TE = option("With --capability: is Transformer Engine installed? [yes]")

JSON = option("Print JSON.", "--json")


def print_json(data: Any) -> None:
    """Print a result as indented JSON. Raises a ValueError for a value that is not finite."""
    import json

    show_json(json.dumps(data, indent=2, allow_nan=False))


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as columns, under the names of their keys; integers have thousands separators."""
    from fp8stack.common.tables import aligned

    def cell(value: Any) -> str:
        if value is None:
            return "-"
        return f"{value:,}" if isinstance(value, int) else str(value)

    show(*aligned([list(rows[0]), *([cell(v) for v in row.values()] for row in rows)]))


# Help: options in named groups

GROUPS = {
    "Model and precision": "from_ recipes agree limit baseline shared phases",
    "Data": "windows",
    "Training": "seeds margin tokens prompt prompt_file temperature top_k top_p",
    "Machine": "ranks capability gpu te memory price",
    "Files": "overwrite resume config set",
    "Logs": "guard",
}
"""The options of each group that are no keys of a run, by their names in the code."""
TITLES = {"eval": "Evaluation", "generate": "Sampling"}
"""The title of the group "Training" in commands that train nothing."""
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names.split()} | {
    key: flag.group for key, flag in FLAGS.items()
}
COMMAND_GROUPS = {
    "Train": "pretrain compare prepare",
    "Plan": "plan estimate forecast doctor list copy",
    "Inspect": "show report eval generate",
    "Export": "export",
    "Check and measure": "conform bench",
}
FEW = 8  # with at most so many options, help has no groups


class Command(TyperCommand):
    """A command whose help has groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then options in groups."""
        visible = [
            (parameter, record)
            for parameter in self.get_params(ctx)
            if (record := parameter.get_help_record(ctx)) is not None
        ]
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], **{g: [] for g in GROUPS}}
        few = sum(parameter.param_type_name == "option" for parameter, _ in visible) <= FEW
        groups["Options"] = []
        for parameter, (names, help) in visible:
            if parameter.param_type_name == "argument":
                group = "Arguments"
            else:
                group = "Options" if few else _GROUP_OF.get(parameter.name or "", "Options")
            groups[group].append((_shorter(names), help))
        title = TITLES.get(self.name or "", "Training")
        _write(formatter, {title if g == "Training" else g: rows for g, rows in groups.items()})


class Group(TyperGroup):
    """A command with subcommands, listed in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write commands in groups, then options."""
        ungrouped = dict.fromkeys(self.list_commands(ctx))
        groups: dict[str, list[tuple[str, str]]] = {}
        for group, names in {**COMMAND_GROUPS, "Commands": " ".join(ungrouped)}.items():
            members = [name for name in names.split() if name in ungrouped]
            groups[group] = [(name, _short(self.commands[name])) for name in members]
            for name in members:
                del ungrouped[name]
        records = (parameter.get_help_record(ctx) for parameter in self.get_params(ctx))
        groups["Options"] = [record for record in records if record is not None]
        _write(formatter, groups)


def _write(formatter: Any, groups: dict[str, list[tuple[str, str]]]) -> None:
    for group, rows in groups.items():
        if rows:
            with formatter.section(group):
                formatter.write_dl(rows, col_max=27)


def _shorter(names: str) -> str:
    """`--[no-]compile` of `--compile / --no-compile`."""
    yes, slash, no = names.partition(" / ")
    return f"--[no-]{yes[2:]}" if slash and no == f"--no-{yes[2:]}" else names


def _short(command: Any) -> str:
    """A command's help in one line."""
    text: str = command.short_help or (command.help or "").partition("\n")[0]
    return text.rstrip(".")
