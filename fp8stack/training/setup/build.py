"""Build a new run from its configuration, on one rank or several."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import nn

from fp8stack.backends.compiler import is_compiled, require_compiler
from fp8stack.checkpoint.state import restore_weights
from fp8stack.config import RunConfig
from fp8stack.distributed.parallelize import (
    DDP_OPTIONS,
    require_divisible,
    require_possible,
    spread,
)
from fp8stack.distributed.process_group import Ranks, losing_ranks
from fp8stack.errors import UserError
from fp8stack.model.config import GPTConfig, load_config
from fp8stack.optim.grad_scaler import build_scaler
from fp8stack.optim.optimizer import build_optimizer, require_optimizer
from fp8stack.precision import Hardware, Plan, recipe_from_json
from fp8stack.precision.hardware import available_memory
from fp8stack.telemetry.operands import Telemetry
from fp8stack.training.load import Trained
from fp8stack.training.metrics.trackers import build_trackers
from fp8stack.training.run import Run, Schedule, Switch, TrainingState, Variant, main_variant
from fp8stack.training.run_folder import RunFolder
from fp8stack.training.setup.allocator import keep_freed_memory
from fp8stack.training.setup.datasets import read
from fp8stack.training.setup.memory_check import Footprint, require_memory
from fp8stack.training.setup.variants import Decided, build_variants, never_asked_for, plan_phases
from fp8stack.version import __version__


def build(
    config: RunConfig,
    folder: RunFolder,
    decided: Decided,
    *,
    hardware: Hardware,
    ranks: Ranks,
    source: Trained | None,
    tokenizer: Path | None,
) -> Run:
    """Build the run before its first step: model, optimizer and data of `config`, on all `ranks`.

    Args:
        decided: decisions of the run that is resumed.
        source: the initial weights, None for random ones.
        tokenizer: the `tokenizer.json` of the initial weights or of the resumed run, if known.
    """
    with ranks.together():
        require_divisible(config, ranks.count)
        shape = load_config(config.model, config.model_overrides)
        context = context_of(config, shape)
        tokens = config.batch // (config.accumulate * ranks.count) * context
        plans, schedule = plan_phases(config, shape, hardware, decided, tokens)
        for plan in plans:
            require_possible(plan, config, ranks.count)
            if config.compile:
                require_compiler(plan, config.activation_checkpointing)
        kind = config.activation_checkpointing
        compiled = [is_compiled(config.compile, plan, hardware, kind)[0] for plan in plans]
        require_optimizer(config, hardware, ranks.count)
        footprint = Footprint(config, shape, context, ranks.count)
        left = available_memory(hardware.device)
        trained = [plans[at] for at in schedule.variants]
        require_memory(footprint, trained, hardware, left, compiled=any(compiled))
        # Operands are observed on the main rank only.
        wanted = (config.telemetry_every, config.what_if)
        telemetry = Telemetry(plans[0], *wanted, operands=ranks.is_main)
        found = read(config, shape.vocabulary, context, tokenizer)
        if plans[0].device == "cpu":
            keep_freed_memory()
        if is_deterministic(config, hardware, any(compiled)):
            _be_deterministic()
        try:
            variants = build_variants(plans, shape, config, compiled)
        except MemoryError as error:
            raise UserError(
                f"Model {config.model} does not fit into the memory that is left. Choose a "
                "smaller one."
            ) from error
        # After the model, whose initialization draws depend on the recipe. Dropout differs by rank.
        torch.manual_seed(config.seed + ranks.index)
        accelerator = _accelerator(config, folder, plans[0], ranks)
        device = accelerator.device
        for variant in variants:
            if ranks.count == 1 or config.parallel == "ddp":  # else block by block, as it is shared
                variant.model.to(device)
            if variant.compiled:
                variant.model.compile_blocks(mode=config.compile_mode)
        in_fp16 = any(plan.loss_scaling for plan in plans)
        loss_scaler = build_scaler(config, device) if in_fp16 else None
        model = variants[0].model
        notes = without_effect(config, in_fp16, ranks.count, compiled=any(compiled))
        if unasked := never_asked_for(config, schedule.phases):
            notes += (unasked,)
        if source is not None:
            restore_weights(model, source.weights)
            told = "optimizer, scales and schedule are new"
            notes += ("; ".join([f"weights of {source.name}", told, *source.notes]),)
            if source.tokenizer is None and found.tokenizer is not None:
                theirs = "the tokenizer of the weights is unknown"
                notes += (f"{theirs}: the data are tokens of {found.tokenizer.name}",)
            if source.tokenizer is not None and found.tokenizer is None:
                whose = "they do not say whose they are"
                notes += (f"the data must be tokens of {source.tokenizer}; {whose}",)
    switch = Switch(variant.model for variant in variants) if len(variants) > 1 else None
    wrapped: nn.Module = switch or model
    if ranks.count > 1:
        same = [[plan.to_json() for plan in plans], str(hardware), hardware.te_version, versions()]
        ranks.require_equal("plan, hardware or software", json.dumps(same))
        with losing_ranks():
            wrapped = spread(
                wrapped, variants[0].backend, accelerator, config, compiled=variants[0].compiled
            )
    with ranks.together():
        optimizer = build_optimizer(model, config)  # of FSDP2's parameters, if it made other ones
    run = Run(
        config=config,
        context=context,
        folder=folder,
        hardware=hardware,
        ranks=ranks,
        schedule=schedule,
        wrapped=wrapped,
        switch=switch,
        optimizer=optimizer,
        accelerator=accelerator,
        loss_scaler=loss_scaler,
        data=found,
        telemetry=telemetry,
        identity=_identity(shape, variants, schedule, found.fingerprints()),
        state=TrainingState(variants=variants),
        notes=notes,
    )
    run.use(schedule.variants[0])
    return run


def is_deterministic(config: RunConfig, hardware: Hardware, compiled: bool) -> bool:
    """Whether to use torch's deterministic algorithms, which a GPU and compiled code need for
    repeatable results. On a GPU they are slower, so only with `deterministic = true`."""
    if config.deterministic is None:
        return compiled and hardware.device == "cpu"
    return config.deterministic and (compiled or hardware.device == "cuda")


def without_effect(
    config: RunConfig, in_fp16: bool, ranks: int, *, compiled: bool
) -> tuple[str, ...]:
    """A note for each key that is set but has no effect in this run."""
    known, adaptive = RunConfig.model_fields, config.clip_mode == "adaptive"
    scaler = tuple(key for key in known if "loss_scale" in key)
    profile = tuple(key for key in known if key.startswith("profile_"))
    reasons = {
        "no phase is in fp16": () if in_fp16 else scaler,
        "the run has no phases": () if config.phases else ("calibration_steps",),
        "clip_mode is not adaptive": () if adaptive else ("clip_percentile", "clip_window"),
        "optimizer is not sgd": () if config.optimizer == "sgd" else ("momentum",),
        "optimizer is sgd": ("beta1", "beta2", "adam_eps") if config.optimizer == "sgd" else (),
        "there are no workers": () if config.workers else ("worker_timeout",),
        "the run is not compiled": () if compiled else ("compile_mode",),
        "the run is not profiled": () if config.profile else profile,
        "there is one rank": () if ranks > 1 else ("parallel", "grad_compression"),
    }
    return tuple(
        f"{key} changes nothing here: {why}"
        for why, keys in reasons.items()
        for key in keys
        if getattr(config, key) != known[key].default
    )


def context_of(config: RunConfig, model: GPTConfig) -> int:
    """Tokens per sequence. Raises a UserError if the model's context is shorter."""
    context = config.context or model.context
    if context > model.context:
        raise UserError(
            f"--context {context} is more than the {model.context} of model {config.model}. "
            f"Lower it, or --set model_overrides.context={context}"
        )
    return context


def _be_deterministic() -> None:
    """Make CUDA and compiled code deterministic; the latter else sums an embedding's gradient in
    any order. Eager code on a CPU is, for the same number of threads."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Without warn_only: only then attention is deterministic, and cuDNN's is not used.
    torch.use_deterministic_algorithms(True)
    # Otherwise every empty tensor would be filled first.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _accelerator(config: RunConfig, folder: RunFolder, plan: Plan, ranks: Ranks) -> Accelerator:
    """The Accelerator, for devices, accumulation, clipping and trackers; not for mixed precision,
    since the layers cast by themselves."""
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


def _identity(
    model: GPTConfig, variants: Sequence[Variant], schedule: Schedule, data: dict[str, str]
) -> dict[str, Any]:
    """What must be the same in a resumed run and its checkpoint, besides the configuration."""

    def recipe(plan: Plan) -> dict[str, Any]:
        return plan.recipe.to_json(words=False)

    same = {
        "model": model.model_dump(mode="json"),
        "recipe": recipe(main_variant(variants).plan),
        "data": data,
    }
    places = {*schedule.variants, schedule.evaluation} - {None}
    if len(places) > 1:  # without the guard's reference, which may come and go
        numbered = ((place, one) for place, one in enumerate(variants) if place in places)
        same["recipes"] = {str(place): recipe(one.plan) for place, one in numbered}
    return same


def with_quantizers(identity: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's identity, with its recipes in the format of this version."""

    def recipe(told: Mapping[str, Any]) -> dict[str, Any]:
        return recipe_from_json(told, "identity in checkpoint.json").to_json(words=False)

    same = {**identity, "recipe": recipe(identity["recipe"])}
    if "recipes" in identity:
        same["recipes"] = {place: recipe(told) for place, told in identity["recipes"].items()}
    return same


def versions() -> dict[str, str]:
    """The versions to save in a checkpoint."""
    return {
        "fp8stack": __version__,
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
    }
