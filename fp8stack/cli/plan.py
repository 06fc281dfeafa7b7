"""The command `fp8stack plan`."""

from typing import Annotated

from fp8stack.cli import options
from fp8stack.cli.options import option

GPU = option("Assume this GPU, by its data sheet (H100, L4, RTX 4090).")


def plan(
    model: Annotated[str | None, options.MODEL] = None,
    recipe: Annotated[str | None, options.RECIPE] = None,
    capability: Annotated[str | None, options.CAPABILITY] = None,
    gpu: Annotated[str | None, GPU] = None,
    te: Annotated[bool | None, options.TE] = None,
    backend: Annotated[str | None, options.BACKEND] = None,
    strict: Annotated[bool | None, options.STRICT] = None,
    batch: Annotated[int | None, options.BATCH] = None,
    context: Annotated[int | None, options.CONTEXT] = None,
    accumulate: Annotated[int | None, options.ACCUMULATE] = None,
    config: Annotated[str | None, options.CONFIG] = None,
    set: Annotated[list[str] | None, options.SET] = None,
    json: Annotated[bool, option("Print JSON, layer by layer.", "--json")] = False,
) -> None:
    """Show the precision of every operation of a training step, and where tensors are cast."""
    flags = options.run_flags(locals())
    from fp8stack import planner
    from fp8stack.config import parse_config
    from fp8stack.planner import request
    from fp8stack.precision.hardware import machine_for

    parsed = parse_config(config, flags, set or [])
    table = request.table_for(parsed, machine_for(capability, te, parsed.device, gpu))
    if json:
        training = {"training": request.training_of(parsed)}
        options.print_json(planner.as_json(table) | training)
        return
    from rich.console import Console

    console = Console()
    print(f"machine: {table.machine}")
    print(*table.plan.summary(), sep="\n")
    print(request.training_line(parsed))
    print()
    if console.is_terminal:
        console.print(planner.rich_table(table, console.width))
        if console.width < planner.WIDE:
            console.print(*planner.reasons_of(table), sep="\n", markup=False, highlight=False)
    else:
        print(*planner.text_rows(table), sep="\n")
    print(*planner.as_lines(table), sep="\n")
