"""The command. It parses, calls and reports; it computes nothing.

torch, accelerate and pydantic are imported inside the commands that need them, so that `--help` is
quick; tests/test_startup.py holds it to that.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

import fp8stack
from fp8stack.bench_cli import bench
from fp8stack.cli_options import HELP, option, words
from fp8stack.errors import Interrupted, StorageError, UserError
from fp8stack.estimate_cli import estimate
from fp8stack.plan_cli import plan

app = typer.Typer(
    name="fp8stack",
    help="Pretrain GPT-style models in FP8, on any machine.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(bench)
app.command()(estimate)
app.command()(plan)


@app.callback()
def _no_command(
    context: typer.Context,
    version: Annotated[bool, option("Print the version.", "--version")] = False,
    help: Annotated[bool, HELP] = False,
) -> None:
    if version:
        print(f"fp8stack {fp8stack.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def pretrain(
    model: Annotated[str | None, option("Model preset or TOML file. [gpt-nano]")] = None,
    recipe: Annotated[str | None, option("Precision recipe or TOML file. [auto]")] = None,
    backend: Annotated[
        str | None, option("Who computes: auto, te, torch, emulate, reference. [auto]")
    ] = None,
    strict: Annotated[
        bool | None,
        option("Refuse to run another recipe or backend than asked.", "--strict/--no-strict"),
    ] = None,
    data: Annotated[
        str | None,
        option("Text file, uint16 .bin, or a folder of them. [Python's standard library]"),
    ] = None,
    steps: Annotated[int | None, option("Optimizer steps. [1200]")] = None,
    batch: Annotated[int | None, option("Sequences per step, globally. [8]")] = None,
    context: Annotated[int | None, option("Tokens per sequence. [the model's]")] = None,
    accumulate: Annotated[int | None, option("Micro-batches per step. [1]")] = None,
    lr: Annotated[float | None, option("Peak learning rate. [0.003]")] = None,
    schedule: Annotated[str | None, option("cosine, wsd or constant. [cosine]")] = None,
    optimizer: Annotated[str | None, option("adamw, muon, adamw8bit or adamwfp8. [adamw]")] = None,
    phases: Annotated[
        str | None, option("Recipes by phase: conservative, default or aggressive.")
    ] = None,
    seed: Annotated[int | None, option("Of weights, data order and samples. [0]")] = None,
    out: Annotated[str | None, option("Run folder. [runs/MODEL-RECIPE]")] = None,
    init_from: Annotated[
        str | None, option("Run or checkpoint whose weights a new run begins with.")
    ] = None,
    config: Annotated[str | None, option("Run file (TOML) with the same keys; flags win.")] = None,
    set: Annotated[
        list[str] | None,
        option("Any other key: --set key=value, as often as needed. Keys: docs/configuration.md."),
    ] = None,
    eval_every: Annotated[int | None, option("Steps between evaluations. [200]")] = None,
    save_every: Annotated[int | None, option("Steps between checkpoints. [400]")] = None,
    log_every: Annotated[int | None, option("Steps between log lines. [1]")] = None,
    resume: Annotated[
        str | None, option("Go on: auto (the run in --out, if any), a run, or a checkpoint.")
    ] = None,
    overwrite: Annotated[
        bool, option("Remove the run that is in --out first.", "--overwrite")
    ] = False,
    checkpoint_async: Annotated[
        bool | None,
        option("Write checkpoints in the background.", "--checkpoint-async/--no-checkpoint-async"),
    ] = None,
    device: Annotated[str | None, option("auto, cpu or cuda. [auto]")] = None,
    parallel: Annotated[
        str | None, option("Several ranks: ddp, or fsdp, which shares the model out. [ddp]")
    ] = None,
    activation_checkpointing: Annotated[
        str | None,
        option("What the backward pass runs again, to save memory: none, selective, block. [none]"),
    ] = None,
    grad_compression: Annotated[
        str | None, option("ddp: bf16 rounds gradients before ranks add them up. [none]")
    ] = None,
    compile: Annotated[
        bool | None, option("Compile the model with torch.compile.", "--compile/--no-compile")
    ] = None,
    profile: Annotated[
        bool | None,
        option("Profile one step after warm-up into the run folder.", "--profile/--no-profile"),
    ] = None,
    tensorboard: Annotated[
        bool | None, option("Write TensorBoard events too.", "--tensorboard/--no-tensorboard")
    ] = None,
    wandb: Annotated[
        bool | None, option("Log to Weights & Biases too.", "--wandb/--no-wandb")
    ] = None,
    telemetry_every: Annotated[
        int | None, option("Steps between looks at what FP8 does; 0 for none. [50]")
    ] = None,
    what_if: Annotated[
        str | None, option("Recipes to try on the same operands, such as mxfp8,block.")
    ] = None,
    guard: Annotated[
        bool | None,
        option("Skip bad steps, roll back, leave FP8. On by default.", "--guard/--no-guard"),
    ] = None,
) -> None:
    """Train a model; with no flags, a small GPT on Python's own source."""
    flags = {
        key: value
        for key, value in locals().items()
        if key not in ("config", "set", "resume", "overwrite")
    }
    flags["what_if"] = None if what_if is None else words(what_if)
    flags["guard"] = None if guard is None else {"enabled": guard}
    from fp8stack.training.stop import NOTHING_DONE, stop_requests

    try:
        with stop_requests() as stop:
            with stop.at_once(NOTHING_DONE):
                from fp8stack.training.loop import train
                from fp8stack.training.setup import set_up

                run = set_up(flags, config, set or [], resume, overwrite)
            raise typer.Exit(train(run, stop))
    except KeyboardInterrupt:
        raise Interrupted(
            "Interrupted. The last checkpoint, if any, is whole; go on with --resume auto."
        ) from None


@app.command()
def compare(
    recipes: Annotated[
        str, option("Precision recipes or TOML files, separated by commas. [six of them]")
    ] = "fp32,bf16,delayed,current,block,mxfp8",
    out: Annotated[
        str | None,
        option("Folder of the runs, and of compare.json, .md and .png. [runs/compare-MODEL]"),
    ] = None,
    seeds: Annotated[int, option("How many runs of each recipe, with seeds 0, 1, ... [3]")] = 3,
    baseline: Annotated[
        str | None, option("What the others are compared with. [fp32, else the first]")
    ] = None,
    from_: Annotated[
        str | None,
        option("Run or checkpoint whose weights all runs begin with.", "--from", metavar="PATH"),
    ] = None,
    model: Annotated[
        str | None, option("Model preset or TOML file. [gpt-nano, or that of --from]")
    ] = None,
    steps: Annotated[int | None, option("Optimizer steps of each run. [1200]")] = None,
    batch: Annotated[int | None, option("Sequences per step. [8]")] = None,
    context: Annotated[int | None, option("Tokens per sequence. [the model's]")] = None,
    data: Annotated[str | None, option("Text file, .bin or folder. [Python's library]")] = None,
    lr: Annotated[float | None, option("Peak learning rate. [0.003]")] = None,
    device: Annotated[str | None, option("auto, cpu or cuda. [auto]")] = None,
    backend: Annotated[
        str | None, option("Who computes: auto, te, torch, emulate, reference. [auto]")
    ] = None,
    compile: Annotated[bool, option("Compile the model with torch.compile.", "--compile")] = False,
    set: Annotated[
        list[str] | None, option("Any other key of a run: --set key=value, as often as needed.")
    ] = None,
) -> None:
    """Train every recipe with every seed: losses with their errors, speed and memory, in a table.

    Called again, it goes on where it was cut, and adds recipes and seeds.
    """
    flags: dict[str, Any] = {"model": model, "steps": steps, "batch": batch, "context": context}
    flags |= {"data": data, "lr": lr, "device": device, "backend": backend}
    flags |= {"compile": compile or None, "init_from": from_}
    from fp8stack.compare import comparison, settings

    asked = settings.prepare(recipes, seeds, out, baseline, flags, set or [])
    try:
        raise typer.Exit(comparison.compare(asked))
    except KeyboardInterrupt:
        raise Interrupted(
            "Interrupted. What is done is kept; the same command goes on with it."
        ) from None


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.", show_default=False)],
    out: Annotated[
        str | None, option("The page. [report.html in the run, or beside several runs]")
    ] = None,
    text: Annotated[
        bool, option("Print the essentials; write a page only with --out.", "--text")
    ] = False,
) -> None:
    """What runs did, in one HTML page: losses, speed, what FP8 did, and what needs attention."""
    from fp8stack.report import report

    page = report(runs, out, text)
    if page is not None:
        print(f"report: {page}")


@app.command()
def doctor(
    capability: Annotated[
        str | None,
        option("Answer for a GPU of this compute capability (9.0), or for a CPU (none)."),
    ] = None,
    te: Annotated[
        bool | None,
        option("With --capability: is Transformer Engine installed there? [yes]", "--te/--no-te"),
    ] = None,
    json: Annotated[bool, option("Print JSON.", "--json")] = False,
) -> None:
    """What this machine can do: every recipe's plan with its reasons, and the number formats."""
    from fp8stack import doctor
    from fp8stack.precision.hardware import machine_for

    hardware = machine_for(capability, te)
    if json:
        import json as encoder

        print(encoder.dumps(doctor.as_json(hardware), indent=2))
    else:
        from rich.console import Console

        doctor.show(hardware, Console())


def main(arguments: list[str] | None = None) -> None:
    """Run the command and exit: bad input is one line on stderr and the error's exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a sample may hold what the terminal cannot show
    try:
        code = app(sys.argv[1:] if arguments is None else arguments, standalone_mode=False)
    except UserError as error:
        _fail(str(error), error.exit_code)
    except _UsageError as error:
        message = " ".join(error.format_message().split()).rstrip(".?")
        _fail(f"{message}. See --help.", 2)
    except (typer.Abort, KeyboardInterrupt):
        _fail("interrupted", Interrupted.exit_code)
    except BrokenPipeError:
        # The reader of our output has gone; say nothing to a pipe that is closed.
        with contextlib.suppress(OSError):
            sys.stdout.close()
        _exit(1)
    except OSError as error:  # such as a full disk behind a redirected stdout
        _fail(f"{error.filename or 'output'}: {error.strerror}", StorageError.exit_code)
    except Exception:
        if _ranks() == 1:
            raise
        traceback.print_exc()
        _exit(1)
    _exit(code)


# click's UsageError: from click or, in newer versions (0.29 is one), from typer's copy of it.
_UsageError: Any = typer.BadParameter.__bases__[0]


def _fail(message: str, code: int) -> NoReturn:
    # Of several ranks of a run, one per machine speaks: what is wrong is mostly wrong for all.
    if _ranks() == 1 or os.environ.get("LOCAL_RANK", "0") == "0":
        # Names from files and the command line may hold anything; what is printed stays one line.
        line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in message)
        print(f"fp8stack: {line}", file=sys.stderr)
    _exit(code)


def _ranks() -> int:
    """How many ranks torchrun or another launcher started, as far as it said so."""
    count = os.environ.get("WORLD_SIZE", "1")
    return int(count) if count.isdecimal() else 1


def _exit(code: int | None) -> NoReturn:
    """End the process. A rank does it at once: freeing its process group may hang for ever (torch
    2.13's gloo: a thread waits for Python's lock, whose holder waits for the thread)."""
    if _ranks() > 1:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code or 0)
    sys.exit(code)
