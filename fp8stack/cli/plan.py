"""`fp8stack plan`: it parses, calls and prints; it computes nothing."""

from __future__ import annotations

from typing import Annotated, Any

from fp8stack.cli.options import option


def plan(
    model: Annotated[str | None, option("Model preset or TOML file. [gpt-nano]")] = None,
    recipe: Annotated[str | None, option("Precision recipe or TOML file. [auto]")] = None,
    capability: Annotated[
        str | None,
        option("Plan for a GPU of this compute capability (9.0), or a CPU (none). [this machine]"),
    ] = None,
    gpu: Annotated[
        str | None, option("Plan for this GPU, by its data sheet (H100, L4, RTX 4090).")
    ] = None,
    te: Annotated[
        bool | None,
        option("With --capability: is Transformer Engine installed there? [yes]", "--te/--no-te"),
    ] = None,
    backend: Annotated[
        str | None, option("Who computes: auto, te, torch, emulate, reference. [auto]")
    ] = None,
    strict: Annotated[
        bool | None, option("Refuse to run another recipe or backend than asked.", "--strict")
    ] = None,
    batch: Annotated[int | None, option("Sequences per step. [8]")] = None,
    context: Annotated[int | None, option("Tokens per sequence. [the model's]")] = None,
    accumulate: Annotated[int | None, option("Micro-batches per step. [1]")] = None,
    config: Annotated[str | None, option("Run file (TOML) with the same keys; flags win.")] = None,
    set: Annotated[
        list[str] | None, option("Any other key of a run: --set key=value, as often as needed.")
    ] = None,
    json: Annotated[bool, option("Print JSON, layer by layer.", "--json")] = False,
) -> None:
    """What every operation of a training step would compute in, and where it casts."""
    flags: dict[str, Any] = {"model": model, "recipe": recipe, "backend": backend}
    flags |= {"strict": strict, "batch": batch, "context": context, "accumulate": accumulate}
    from fp8stack import planner
    from fp8stack.config import parse_config
    from fp8stack.planner import request
    from fp8stack.precision.hardware import machine_for

    parsed = parse_config(config, flags, set or [])
    table = request.table_for(parsed, machine_for(capability, te, parsed.device, gpu))
    if json:
        import json as encoder

        answer = planner.as_json(table) | {"training": request.training_of(parsed)}
        print(encoder.dumps(answer, indent=2))
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
