"""`fp8stack pretrain`: every key of a run that has a flag. It parses and calls."""

from __future__ import annotations

from typing import Annotated

import typer

from fp8stack.cli.options import THREADS, option
from fp8stack.errors import Interrupted


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
        option("Text, tokens, a folder, or WEIGHT:PATH,WEIGHT:PATH. [Python's standard library]"),
    ] = None,
    data_order: Annotated[
        str | None, option("Windows at random places, or in shuffled epochs. [random]")
    ] = None,
    document_mask: Annotated[
        bool | None,
        option(
            "Attention does not cross documents of the data.",
            "--document-mask/--no-document-mask",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, option("For text, and of .bin files: bytes, gpt2 or a tokenizer.json.")
    ] = None,
    steps: Annotated[int | None, option("Optimizer steps. [1200]")] = None,
    batch: Annotated[int | None, option("Sequences per step, globally. [8]")] = None,
    context: Annotated[int | None, option("Tokens per sequence. [the model's]")] = None,
    accumulate: Annotated[int | None, option("Micro-batches per step. [1]")] = None,
    lr: Annotated[
        float | None, option("Peak learning rate. [0.003]", "--lr", "--learning-rate")
    ] = None,
    schedule: Annotated[str | None, option("cosine, wsd or constant. [cosine]")] = None,
    warmup_steps: Annotated[int | None, option("Steps of linear warm-up. [50]")] = None,
    weight_decay: Annotated[float | None, option("AdamW's, on matrices. [0.1]")] = None,
    optimizer: Annotated[
        str | None, option("adamw, sgd, muon, adamw8bit or adamwfp8. [adamw]")
    ] = None,
    phases: Annotated[
        str | None, option("Recipes by phase: conservative, default or aggressive.")
    ] = None,
    seed: Annotated[int | None, option("Of weights, data order and samples. [0]")] = None,
    out: Annotated[str | None, option("Run folder. [runs/MODEL-RECIPE]")] = None,
    init_from: Annotated[
        str | None,
        option(
            "Run, checkpoint or hf:FOLDER whose weights a new run begins with.",
            "--init-from",
            "--init",
            metavar="PATH",
        ),
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
        str | None,
        option("Go on: auto (the run in --out, if any), a run, or a checkpoint. Bare: auto."),
    ] = None,
    overwrite: Annotated[
        bool, option("Remove the run that is in --out first.", "--overwrite")
    ] = False,
    checkpoint_async: Annotated[
        bool | None,
        option("Write checkpoints in the background.", "--checkpoint-async/--no-checkpoint-async"),
    ] = None,
    device: Annotated[str | None, option("auto, cpu or cuda. [auto]")] = None,
    threads: Annotated[int | None, THREADS] = None,
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
    trackio: Annotated[
        bool | None, option("Log to trackio too, on this machine.", "--trackio/--no-trackio")
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
    flags["guard"] = None if guard is None else {"enabled": guard}
    from fp8stack.training.signals import NOTHING_DONE, stop_requests

    try:
        with stop_requests() as stop:
            with stop.at_once(NOTHING_DONE):
                from fp8stack.training.loop import train
                from fp8stack.training.setup.start import set_up

                run = set_up(flags, config, set or [], resume, overwrite)
            raise typer.Exit(train(run, stop))
    except KeyboardInterrupt:
        raise Interrupted(
            "Interrupted. The last checkpoint, if any, is whole; go on with --resume auto."
        ) from None
