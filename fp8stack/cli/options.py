"""The options that commands share, and how they are printed."""

from collections.abc import Mapping
from typing import Any

import typer


def option(help: str, *names: str, **more: Any) -> Any:
    """An option whose help ends with its default in brackets."""
    return typer.Option(*names, help=help, show_default=False, **more)


def _show(context: typer.Context, asked: bool) -> None:
    if asked:
        print(context.get_help())
        raise typer.Exit


# In place of typer's own --help, for which it imports pydantic whatever the command.
HELP = option("Show this message and exit.", "--help", "-h", is_eager=True, callback=_show)

# Keys of a run. `RunConfig` has the defaults, and a test compares them; its pydantic is too slow to
# import for a help text.
MODEL = option("Model preset or TOML file. [gpt-nano]")
RECIPE = option("Precision recipe or TOML file. [auto]")
BACKEND = option("Compute backend: auto, te, torch, emulate or reference. [auto]")
STRICT = option("Fail instead of substituting a recipe or backend.")
STEPS = option("Optimizer steps. [1200]")
BATCH = option("Sequences per step, over all ranks. [8]")
CONTEXT = option("Tokens per sequence. [the model's]")
ACCUMULATE = option("Micro-batches per step. [1]")
LR = option("Peak learning rate. [0.003]", "--lr", "--learning-rate")
OPTIMIZER = option("Optimizer: adamw, sgd, muon, adamw8bit or adamwfp8. [adamw]")
PARALLEL = option("How ranks share the work: ddp, or fsdp to shard the model. [ddp]")
RECOMPUTE = option("Recompute in the backward pass: none, selective or block. [none]")
PHASES = option("Recipes by phase: conservative, default or aggressive.")
DEVICE = option("Device: auto, cpu or cuda. [auto]")
THREADS = option("CPU threads for torch. [torch's choice]")
CONFIG = option("Run file (TOML) with the same keys; flags override it.")
SET = option("Set any other key: --set key=value, repeatable. Keys: docs/configuration.md.")

# A trained model
TOKENIZER = option("Tokenizer if the run records none: bytes, gpt2, or a tokenizer.json.")

# A machine that is not here
CAPABILITY = option(
    "Assume a GPU of this compute capability (9.0), or a CPU (none). [this machine]"
)
TE = option("With --capability: is Transformer Engine installed? [yes]")

JSON = option("Print JSON.", "--json")


def run_flags(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a command's arguments that are keys of a run."""
    from fp8stack.config import RunConfig

    return {key: value for key, value in values.items() if key in RunConfig.model_fields}


def print_json(data: Any) -> None:
    """Print an answer as JSON, indented; a value that is not finite is an error."""
    import json

    print(json.dumps(data, indent=2, allow_nan=False))


def words(text: str) -> list[str]:
    """The words of an option's value, separated by commas."""
    return [word for part in text.split(",") if (word := part.strip())]
