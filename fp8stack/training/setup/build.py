"""From a configuration to a run at its beginning, on one rank or several."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

import fp8stack
from fp8stack.compiler import require_compiler
from fp8stack.config import RunConfig
from fp8stack.distributed.parallelize import (
    DDP_OPTIONS,
    nothing_to_compress,
    require_divisible,
    require_possible,
    spread,
)
from fp8stack.distributed.process_group import Ranks, losing_ranks
from fp8stack.errors import UserError
from fp8stack.model.config import GPTConfig, load_config
from fp8stack.optim.grad_scaler import build_scaler
from fp8stack.optim.optimizer import build_optimizer, require_optimizer
from fp8stack.precision import Hardware, Plan
from fp8stack.precision.hardware import available_memory
from fp8stack.telemetry.operands import Telemetry
from fp8stack.training.metrics.trackers import build_trackers
from fp8stack.training.run import Run, Switch
from fp8stack.training.run_folder import RunFolder
from fp8stack.training.setup.allocator import keep_freed_memory
from fp8stack.training.setup.datasets import read
from fp8stack.training.setup.init_from import Source, begin_with, with_tokenizer
from fp8stack.training.setup.memory_check import Footprint, require_memory
from fp8stack.training.setup.variants import Decided, build_variants, plan_phases


def build(
    config: RunConfig,
    folder: RunFolder,
    decided: Decided,
    *,
    hardware: Hardware,
    ranks: Ranks,
    source: Source | None,
    tokenizer: Path | None,
) -> Run:
    """The run at its beginning: model, optimizer and data as `config` has them, on all `ranks`.

    Args:
        decided: what was decided when the run began.
        hardware: this machine.
        ranks: who trains it.
        source: whose weights it begins with, if not its own.
        tokenizer: the `tokenizer.json` of the weights, of a run that goes on its own; if known.
    """
    with ranks.together():
        run = _build_alone(config, folder, decided, hardware, ranks, tokenizer)
        run.notes += nothing_to_compress(config, ranks.count) + without_effect(config, run)
        if source is not None:
            run.notes += (begin_with(run.model, source), *with_tokenizer(source, run.tokenizer))
    if ranks.count > 1:
        plans = [variant.plan.to_json() for variant in run.variants]
        same = [plans, str(hardware), hardware.te_version, versions()]
        ranks.require_equal("plan, hardware or software", json.dumps(same))
        with losing_ranks():
            run.wrapped = spread(run.wrapped, run.backend, run.accelerator, config)
        run.optimizer = build_optimizer(run.model, config)  # FSDP2's parameters are other ones
    return run


def _build_alone(
    config: RunConfig,
    folder: RunFolder,
    decided: Decided,
    hardware: Hardware,
    ranks: Ranks,
    tokenizer: Path | None,
) -> Run:
    """What each rank makes by itself: the run, its model not spread over ranks yet."""
    require_divisible(config, ranks.count)
    model_config = load_config(config.model, config.model_overrides)
    context = context_of(config, model_config)
    tokens = config.batch // (config.accumulate * ranks.count) * context
    plans, schedule = plan_phases(config, model_config, hardware, decided, tokens)
    for plan in plans:
        require_possible(plan, config, ranks.count)
        if config.compile:
            require_compiler(plan, config.activation_checkpointing)
    require_optimizer(config, hardware, ranks.count)
    footprint = Footprint(config, model_config, context, ranks.count)
    left = available_memory(hardware.device)
    require_memory(footprint, [plans[at] for at in schedule.variants], hardware, left)
    # The main rank's part of a batch is looked at.
    telemetry = Telemetry(plans[0], config.telemetry_every, config.what_if, operands=ranks.is_main)
    found = read(config, model_config.vocabulary, context, tokenizer)
    if plans[0].device == "cpu":
        keep_freed_memory()
    if config.deterministic and (plans[0].device == "cuda" or config.compile):
        _be_deterministic()
    try:
        variants = build_variants(plans, model_config, config)
    except MemoryError as error:
        raise UserError(
            f"Model {config.model} does not fit into the memory that is left. Choose a smaller one."
        ) from error
    # After the model, since what its making draws depends on the recipe; ranks draw other dropout.
    torch.manual_seed(config.seed + ranks.index)
    accelerator = _accelerator(config, folder, plans[0], ranks)
    device = accelerator.device
    for variant in variants:
        if ranks.count == 1 or config.parallel == "ddp":  # else block by block, as it is shared out
            variant.model.to(device)
        if config.compile:
            variant.model.compile_blocks(mode=config.compile_mode)
    scaled = any(plan.loss_scaling for plan in plans)
    switch = Switch(variant.model for variant in variants) if len(variants) > 1 else None
    run = Run(
        config=config,
        context=context,
        folder=folder,
        hardware=hardware,
        variants=variants,
        active=variants[0],
        schedule=schedule,
        wrapped=switch or variants[0].model,
        switch=switch,
        optimizer=build_optimizer(variants[0].model, config),
        accelerator=accelerator,
        loss_scaler=build_scaler(config, device) if scaled else None,
        train=found.train,
        validation=found.validation,
        windows=found.windows,
        tokenizer=found.tokenizer,
        telemetry=telemetry,
        identity={},
        ranks=ranks,
    )
    run.identity = _identity(model_config, run)
    run.use(variants[schedule.variants[0]])
    return run


def without_effect(config: RunConfig, run: Run) -> tuple[str, ...]:
    """A note on each key that was set and changes nothing in this run."""
    known = RunConfig.model_fields
    scaler = tuple(key for key in known if "loss_scale" in key)
    profile = tuple(key for key in known if key.startswith("profile_"))
    reasons = {
        "no phase is in fp16": scaler if run.loss_scaler is None else (),
        "the run has no phases": () if config.phases else ("calibration_steps",),
        "clip_mode is not adaptive": ()
        if config.clip_mode == "adaptive"
        else ("clip_percentile", "clip_window"),
        "optimizer is not sgd": () if config.optimizer == "sgd" else ("momentum",),
        "optimizer is sgd": ("beta1", "beta2", "adam_eps") if config.optimizer == "sgd" else (),
        "the run is not compiled": () if config.compile else ("compile_mode",),
        "the run is not profiled": () if config.profile else profile,
        "there is one rank": () if run.ranks.count > 1 else ("parallel",),
    }
    return tuple(
        f"{key} changes nothing here: {why}"
        for why, keys in reasons.items()
        for key in keys
        if getattr(config, key) != known[key].default
    )


def context_of(config: RunConfig, model: GPTConfig) -> int:
    """Tokens per sequence.

    Raises:
        UserError: they are more than the model takes.
    """
    context = config.context or model.context
    if context > model.context:
        raise UserError(
            f"--context {context} is more than the {model.context} of model {config.model}. "
            f"Lower it, or --set model_overrides.context={context}"
        )
    return context


def _be_deterministic() -> None:
    """Ask for results that repeat, of CUDA and of compiled code, which else adds up an embedding's
    gradient in any order; a CPU's eager ones do already, for the same number of threads."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Not with warn_only: attention's kernels repeat without it alone, and cuDNN's is left out.
    torch.use_deterministic_algorithms(True)
    # Else every buffer would be written twice.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _accelerator(config: RunConfig, folder: RunFolder, plan: Plan, ranks: Ranks) -> Accelerator:
    """accelerate for devices, accumulation, clipping and trackers; the layers cast by themselves,
    so it is told of no precision."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() in ("1", "true"):
        raise UserError(
            "accelerate was told to use DeepSpeed, which cannot train this model. Leave that out; "
            "--parallel ddp or fsdp spreads a model over ranks."
        )
    trackers = build_trackers(config, folder.path) if ranks.is_main else []
    accelerator = Accelerator(
        cpu=plan.device == "cpu",
        mixed_precision="no",
        gradient_accumulation_steps=config.accumulate,
        log_with=trackers or None,  # an empty list would warn
        project_config=ProjectConfiguration(project_dir=str(folder.path)),
        kwargs_handlers=[DDP_OPTIONS],
    )
    # The constructor prefers the environment's ACCELERATE_GRADIENT_ACCUMULATION_STEPS.
    accelerator.gradient_accumulation_steps = config.accumulate
    return accelerator


def _identity(model: GPTConfig, run: Run) -> dict[str, Any]:
    """What a resumed run must share with its checkpoint, besides the configuration."""

    def recipe(plan: Plan) -> dict[str, Any]:
        told = plan.recipe.model_dump(mode="json", exclude={"name", "description"})
        if told["attention"] == "compute":  # of which older checkpoints do not speak
            del told["attention"]
        return told

    same = {
        "model": model.model_dump(mode="json"),
        "recipe": recipe(run.main.plan),
        "data": {
            "train": run.train.fingerprint(),
            "validation": run.validation.fingerprint(),
        },
    }
    places = {*run.schedule.variants, run.schedule.evaluation} - {None}
    if len(places) > 1:  # the reference for the guard is none of them: it may come and go
        same["recipes"] = {
            str(place): recipe(variant.plan)
            for place, variant in enumerate(run.variants)
            if place in places
        }
    return same


def versions() -> dict[str, str]:
    """The versions that a checkpoint was written with."""
    return {
        "fp8stack": fp8stack.__version__,
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
    }
