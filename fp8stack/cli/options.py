"""Options shared by commands, the layout of help, and printing of results."""

from collections.abc import Mapping, Sequence
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from fp8stack.cli import completion
from fp8stack.common.terminal import show, show_json, write_text
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

# Keys of a run. `RunConfig` has the defaults, and a test compares them; its pydantic is too slow to
# import for a help text.
MODEL = option("Model preset or TOML file. [gpt-nano]", autocompletion=completion.MODELS)
RECIPE = option("Precision recipe or TOML file. [auto]", autocompletion=completion.RECIPES)
BACKEND = option(
    "auto, te, torch, emulate or reference. [auto]", autocompletion=completion.choices("backend")
)
STRICT = option("Fail instead of substituting a recipe or backend.")
STEPS = option("Optimizer steps. [1200]")
BATCH = option("Sequences per step, over all ranks. [8]")
CONTEXT = option("Tokens per sequence. [the model's]")
ACCUMULATE = option("Micro-batches per step. [1]")
LR = option("Peak learning rate. [0.003]", "--lr", "--learning-rate")
OPTIMIZER = option(
    "adamw, sgd, muon, adamw8bit or adamwfp8. [adamw]",
    autocompletion=completion.choices("optimizer"),
)
PARALLEL = option(
    "ddp, or fsdp to shard the model. [ddp]", autocompletion=completion.choices("parallel")
)
RECOMPUTE = option(
    "Recompute: none, selective or block. [none]",
    autocompletion=completion.choices("activation_checkpointing"),
)
COMPILE = option("Use torch.compile. [on a GPU]")
PHASES = option(
    "By phase: conservative, default or aggressive.", autocompletion=completion.choices("phases")
)
DEVICE = option(
    "Device: auto, cpu, cuda or xpu. [auto]", autocompletion=completion.choices("device")
)
THREADS = option("CPU threads for torch. [torch's choice]")
THREADS_NOW = option("CPU threads for torch. [torch's choice]", callback=_compute_with)
CONFIG = option("Run file (TOML); flags override it.")
SET = option("Any other key, as key=value; repeatable.", autocompletion=completion.SETTINGS)

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


def run_flags(values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a command that are keys of a run."""
    from fp8stack.planning.run_config import RunConfig

    return {key: value for key, value in values.items() if key in RunConfig.model_fields}


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
    "Model and precision": "model init_from from_ recipe recipes agree limit baseline shared "
    "phases backend strict",
    "Data": "data data_order document_mask tokenizer windows",
    "Training": "steps batch context accumulate lr schedule warmup_steps weight_decay optimizer "
    "seed seeds margin tokens prompt prompt_file temperature top_k top_p",
    "Machine": "device threads ranks parallel activation_checkpointing grad_compression compile "
    "capability gpu te memory price",
    "Files": "out overwrite resume eval_every save_every checkpoint_async config set",
    "Logs": "log_every tensorboard wandb trackio telemetry_every what_if profile guard",
}
"""The options of each group, by their names in the code."""
TITLES = {"eval": "Evaluation", "generate": "Sampling"}
"""The title of the group "Training" in commands that train nothing."""
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names.split()}
COMMAND_GROUPS = {
    "Train": "pretrain compare prepare",
    "Plan": "plan estimate doctor list copy",
    "Inspect": "show report eval generate",
    "Choose a recipe": "forecast tune",
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
