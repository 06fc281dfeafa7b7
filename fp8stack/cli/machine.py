"""The commands `fp8stack doctor` and `fp8stack conform`."""

from __future__ import annotations

from typing import Annotated

import typer

from fp8stack.cli import completion, options
from fp8stack.cli.options import option
from fp8stack.common.terminal import show

RECIPE = option(
    "Check the quantizers and GEMMs of this recipe or TOML file. [everything]",
    autocompletion=completion.RECIPES,
)
ONLY = option("Checks to run: part of a name such as 'gemms: ', or a pattern with * and ?.")
OUT = option("File to write the report to, as JSON.")
QUICK = option("Short form: smaller inputs, nothing compiled; under 20 seconds.", "--quick")


def doctor(
    capability: Annotated[str | None, options.CAPABILITY] = None,
    te: Annotated[bool | None, options.TE] = None,
    json: Annotated[bool, options.JSON] = False,
) -> None:
    """Show how each recipe runs on this machine and why, and the number formats."""
    from fp8stack.precision import doctor
    from fp8stack.precision.hardware import machine_for

    hardware = machine_for(capability, te)
    if json:
        options.print_json(doctor.as_json(hardware))
    else:
        from fp8stack.common.screen import Screen

        doctor.show(hardware, Screen())


def conform(
    device: Annotated[str, options.DEVICE] = "auto",
    recipe: Annotated[str | None, RECIPE] = None,
    quick: Annotated[bool, QUICK] = False,
    only: Annotated[str | None, ONLY] = None,
    seed: Annotated[int, option("Seed of the random inputs. [0]", min=0, max=2**31)] = 0,
    json: Annotated[bool, options.JSON] = False,
    out: Annotated[str | None, OUT] = None,
) -> None:
    """Check that this machine computes what the formats say: casts, scales, GEMMs, gradients.

    Exit code 1 if something is wrong.
    """
    from rich.text import Text

    from fp8stack.analysis.conform import suite
    from fp8stack.analysis.conform.checks import Context
    from fp8stack.common.screen import Screen
    from fp8stack.precision import probe

    file = suite.file_for(out)
    chosen = None if recipe is None else suite.recipe_to_check(recipe)
    context = Context(probe(device), quick, seed=seed, recipe=chosen)
    with Screen(stderr=True).status("checking") as status:
        report = suite.run(context, only, lambda name: status.update(Text(name)), file)
    if json:
        options.print_json(report)
    else:
        show(*suite.as_text(report))
    if not report["holds"]:
        raise typer.Exit(1)
