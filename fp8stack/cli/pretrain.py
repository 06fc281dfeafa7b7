"""The command `fp8stack pretrain`."""

from typing import Annotated

import typer

from fp8stack.cli import leave_while_importing, options
from fp8stack.cli.options import option
from fp8stack.common.errors import Interrupted

DATA = option("Text, tokens, a folder, or a mixture. [Python's library]")
DATA_ORDER = option("Window order: random, or shuffled epochs. [random]")
TOKENIZER = option("Of text and .bin: bytes, gpt2 or a tokenizer.json.")
SCHEDULE = option("cosine, wsd or constant. [cosine]")
RESUME = option("auto, a run, or a checkpoint. Bare: auto.")
GRAD_COMPRESSION = option("With ddp: bf16, or none. [none]")
PROFILE = option("Profile one step after warm-up.")
TELEMETRY_EVERY = option("Steps between FP8 samples; 0: none. [50]")
WHAT_IF = option("More recipes for telemetry: mxfp8,block.")
GUARD = option("Skip bad steps, roll back, leave FP8. On by default.")


def pretrain(
    model: Annotated[str | None, options.MODEL] = None,
    recipe: Annotated[str | None, options.RECIPE] = None,
    backend: Annotated[str | None, options.BACKEND] = None,
    strict: Annotated[bool | None, options.STRICT] = None,
    data: Annotated[str | None, DATA] = None,
    data_order: Annotated[str | None, DATA_ORDER] = None,
    document_mask: Annotated[bool | None, option("Keep attention within documents.")] = None,
    tokenizer: Annotated[str | None, TOKENIZER] = None,
    steps: Annotated[int | None, options.STEPS] = None,
    batch: Annotated[int | None, options.BATCH] = None,
    context: Annotated[int | None, options.CONTEXT] = None,
    accumulate: Annotated[int | None, options.ACCUMULATE] = None,
    lr: Annotated[float | None, options.LR] = None,
    schedule: Annotated[str | None, SCHEDULE] = None,
    warmup_steps: Annotated[int | None, option("Steps of linear warm-up. [50]")] = None,
    weight_decay: Annotated[float | None, option("Weight decay of matrices. [0.1]")] = None,
    optimizer: Annotated[str | None, options.OPTIMIZER] = None,
    phases: Annotated[str | None, options.PHASES] = None,
    seed: Annotated[int | None, option("Seed for weights, data order and samples. [0]")] = None,
    out: Annotated[str | None, option("Run folder. [runs/MODEL-RECIPE]")] = None,
    init_from: Annotated[
        str | None,
        option(
            "Run, checkpoint, hf:FOLDER or hf:owner/name to begin from.",
            "--init-from",
            "--init",
            metavar="PATH",
        ),
    ] = None,
    config: Annotated[str | None, options.CONFIG] = None,
    set: Annotated[list[str] | None, options.SET] = None,
    eval_every: Annotated[int | None, option("Steps between evaluations. [300]")] = None,
    save_every: Annotated[int | None, option("Steps between checkpoints. [400]")] = None,
    log_every: Annotated[int | None, option("Steps between log lines. [1]")] = None,
    resume: Annotated[str | None, RESUME] = None,
    overwrite: Annotated[bool, option("Delete the run in --out first.", "--overwrite")] = False,
    checkpoint_async: Annotated[bool | None, option("Write checkpoints in the background.")] = None,
    device: Annotated[str | None, options.DEVICE] = None,
    threads: Annotated[int | None, options.THREADS] = None,
    parallel: Annotated[str | None, options.PARALLEL] = None,
    activation_checkpointing: Annotated[str | None, options.RECOMPUTE] = None,
    grad_compression: Annotated[str | None, GRAD_COMPRESSION] = None,
    compile: Annotated[bool | None, options.COMPILE] = None,
    profile: Annotated[bool | None, PROFILE] = None,
    tensorboard: Annotated[bool | None, option("Also write TensorBoard events.")] = None,
    wandb: Annotated[bool | None, option("Also log to Weights & Biases.")] = None,
    trackio: Annotated[bool | None, option("Also log to trackio, on this machine.")] = None,
    telemetry_every: Annotated[int | None, TELEMETRY_EVERY] = None,
    what_if: Annotated[str | None, WHAT_IF] = None,
    guard: Annotated[bool | None, GUARD] = None,
) -> None:
    """Train a model; with no flags, a small GPT on Python's own source."""
    flags = locals() | {"guard": None if guard is None else {"enabled": guard}}
    for name in ("config", "set", "resume", "overwrite"):
        del flags[name]
    from fp8stack.training.signals import NOTHING_DONE, stop_requests

    try:
        with stop_requests(leave_while_importing) as stop:
            with stop.at_once(NOTHING_DONE):
                from fp8stack.training.loop import train
                from fp8stack.training.setup.start import set_up

                run = set_up(flags, config, set or [], resume, overwrite)
            raise typer.Exit(train(run, stop))
    except KeyboardInterrupt:
        raise Interrupted(
            "Interrupted. The last checkpoint, if any, is complete; continue with --resume auto."
        ) from None
