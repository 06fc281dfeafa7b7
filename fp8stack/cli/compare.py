"""The command `fp8stack compare`."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from fp8stack.cli import completion, options
from fp8stack.cli.options import option
from fp8stack.common.errors import Interrupted, require
from fp8stack.common.terminal import shell_quoted

RECIPES = option(
    "Precision recipes or TOML files, separated by commas. [six of them]",
    autocompletion=completion.RECIPES,
)
OUT = option("Folder for the runs and compare.json, .md and .png. [runs/compare-MODEL]")
BASELINE = option(
    "Recipe to compare the others with. [fp32, else the first]", autocompletion=completion.RECIPES
)
FROM = option("Run, checkpoint, hf:FOLDER or hf:owner/name to start all runs from.", "--from")
SHARED = option("Share of steps, at the start, in the baseline's recipe. [25%, with --from 0%]")
MARGIN = option("Largest gap that counts as equal, in percent of the loss. [0.25%]")


@options.takes_keys(
    *("model", "steps", "batch", "context", "data", "lr", "device", "threads", "backend"),
    "compile",
)
def compare(
    flags: dict[str, Any],
    recipes: Annotated[str, RECIPES] = "fp32,bf16,delayed,current,block,mxfp8",
    out: Annotated[str | None, OUT] = None,
    seeds: Annotated[int, option("Runs of each recipe, with seeds 0, 1, ... [3]")] = 3,
    shared: Annotated[str | None, SHARED] = None,
    margin: Annotated[str, MARGIN] = "0.25%",
    baseline: Annotated[str | None, BASELINE] = None,
    from_: Annotated[str | None, FROM] = None,
    set: Annotated[list[str] | None, options.SET] = None,
) -> None:
    """Train every recipe with every seed, and tabulate the cost of each: its loss gap to the
    baseline with an interval, speed and memory.

    Run again, it continues an interrupted comparison, and adds recipes and seeds.
    """
    require("scipy", "fp8stack compare")
    chosen = {"recipes": recipes, "out": out, "seeds": seeds, "shared": shared}
    chosen |= {"margin": margin, "baseline": baseline, "from": from_}
    command = _command(chosen | flags | {"set": set})
    flags |= {"init_from": from_, "out": out}
    from fp8stack.analysis.compare import comparison
    from fp8stack.analysis.compare.settings import Options, comparison_of
    from fp8stack.planning.run_config import parse_config

    settings = Options(
        recipes=recipes,
        seeds=seeds,
        baseline=baseline,
        shared=shared,
        margin=margin,
        command=command,
    )
    validated = comparison_of(parse_config(None, flags, set or []), settings)
    try:
        raise typer.Exit(comparison.compare(validated))
    except KeyboardInterrupt:
        raise Interrupted(
            "Interrupted. Finished runs are kept; the same command continues."
        ) from None


def _command(values: Mapping[str, Any]) -> str:
    """The command with these values of its options, for a shell."""
    words = ["fp8stack", "compare"]
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            for item in value if isinstance(value, list) else [value]:
                words += [f"--{name}", str(item)]
    return " ".join(map(shell_quoted, words))
