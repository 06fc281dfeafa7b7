"""From a configuration to a run at its beginning, on one rank or several."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import accelerate
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

import fp8stack
from fp8stack import data
from fp8stack.backends import build_backend
from fp8stack.errors import UserError
from fp8stack.model import GPT, GPTConfig, load_config, plan_for
from fp8stack.precision import Hardware, Plan, load_recipe
from fp8stack.telemetry import Telemetry
from fp8stack.training.allocator import keep_freed_memory
from fp8stack.training.compiler import require_compiler
from fp8stack.training.config import RunConfig
from fp8stack.training.initial import Source, begin_with
from fp8stack.training.optimizer import build_optimizer
from fp8stack.training.parallel import DDP_OPTIONS, require_divisible, require_tested, spread
from fp8stack.training.ranks import Ranks, losing_ranks
from fp8stack.training.run import Run
from fp8stack.training.run_folder import RunFolder
from fp8stack.training.trackers import build_trackers, start_trackers


def build(
    config: RunConfig,
    folder: RunFolder,
    left_out: Mapping[str, str] | None,
    *,
    hardware: Hardware,
    ranks: Ranks,
    source: Source | None,
) -> Run:
    """The run at its beginning: model, optimizer and data as `config` has them, on all `ranks`.

    Args:
        left_out: the layers that are not in FP8, and why, if that was decided before.
        hardware: this machine.
        ranks: who trains it.
        source: whose weights it begins with, if not its own.
    """
    with ranks.together():
        run = _build_alone(config, folder, left_out, hardware, ranks)
        if source is not None:
            run.notes += (begin_with(run.model, source),)
    if ranks.count > 1:
        same = [run.plan.to_json(), str(hardware), hardware.te_version, versions()]
        ranks.require_equal("plan, hardware or software", json.dumps(same))
        with losing_ranks():
            run.wrapped = spread(run.model, run.backend, run.accelerator, config)
        run.optimizer = build_optimizer(run.model, config)  # FSDP2's parameters are other ones
    return run


def _build_alone(
    config: RunConfig,
    folder: RunFolder,
    left_out: Mapping[str, str] | None,
    hardware: Hardware,
    ranks: Ranks,
) -> Run:
    """What each rank makes by itself: the run, its model not spread over ranks yet."""
    require_divisible(config, ranks.count)
    model_config = load_config(config.model, config.model_overrides)
    recipe = config.recipe
    if config.recipe_overrides and recipe == "auto":
        raise UserError("recipe_overrides needs a recipe by name: auto chooses one by itself.")
    context = context_of(config, model_config)
    tokens = config.batch // (config.accumulate * ranks.count) * context
    plan = plan_for(
        model_config,
        recipe if recipe == "auto" else load_recipe(recipe, config.recipe_overrides),
        hardware,
        config.backend,
        config.strict,
        tokens=None if left_out is not None else tokens,
        left_out=left_out,
    )
    require_tested(plan, config, ranks.count)
    if config.compile:
        require_compiler(plan)
    # The main rank's part of a batch is looked at.
    telemetry = Telemetry(plan, config.telemetry_every * ranks.is_main, config.what_if)
    train, validation = data.load_corpora(config.data, model_config.vocabulary)
    windows = data.validation_windows(
        validation, count=config.eval_windows, context=context, vocabulary=model_config.vocabulary
    )
    if plan.device == "cpu":
        keep_freed_memory()
    if config.deterministic and (plan.device == "cuda" or config.compile):
        _be_deterministic()
    backend = build_backend(plan, save_fp8=config.save_fp8)
    _require_memory(config, model_config, hardware, ranks)
    try:
        model = GPT(model_config, backend, seed=config.seed)
    except MemoryError as error:
        raise UserError(
            f"Model {config.model} does not fit into the memory that is left. Choose a smaller one."
        ) from error
    # After the model, since what its making draws depends on the recipe; ranks draw other dropout.
    torch.manual_seed(config.seed + ranks.index)
    accelerator = _accelerator(config, folder, plan, ranks)
    if ranks.count == 1 or config.parallel == "ddp":  # else block by block, as it is shared out
        model = model.to(accelerator.device)
    model.recompute = config.activation_checkpointing
    if config.compile:
        model.compile_blocks()
    return Run(
        config=config,
        context=context,
        folder=folder,
        hardware=hardware,
        plan=plan,
        backend=backend,
        model=model,
        wrapped=model,
        optimizer=build_optimizer(model, config),
        accelerator=accelerator,
        scaler=torch.amp.GradScaler(accelerator.device.type) if plan.loss_scaling else None,
        train=train,
        validation=validation,
        windows=windows,
        telemetry=telemetry,
        identity=_identity(model_config, plan, train, validation),
        ranks=ranks,
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


def _require_memory(config: RunConfig, model: GPTConfig, hardware: Hardware, ranks: Ranks) -> None:
    """Refuse a model whose weights, gradients and moments alone exceed the machine's memory."""
    shares = ranks.count if config.parallel == "fsdp" and hardware.device == "cuda" else 1
    needed_gib = 16 * model.parameters() / shares / 2**30  # float32, four times
    if 0 < hardware.memory_gib < needed_gib:
        raise UserError(
            f"Model {config.model} needs {needed_gib:,.1f} GiB for the weights, gradients and "
            f"optimizer of {model.parameters():,} parameters; this machine's memory has "
            f"{hardware.memory_gib} GiB. Choose a smaller one."
        )


def _be_deterministic() -> None:
    """Ask for results that repeat, of CUDA and of compiled code, which else adds up an embedding's
    gradient in any order; a CPU's eager ones do already, for the same number of threads."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Else every buffer would be written twice.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _accelerator(config: RunConfig, folder: RunFolder, plan: Plan, ranks: Ranks) -> Accelerator:
    """accelerate for devices, accumulation, clipping and trackers; the layers cast by themselves,
    so it is told of no precision."""
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
    start_trackers(accelerator, folder.path)
    return accelerator


def _identity(
    model: GPTConfig, plan: Plan, train: data.Corpus, validation: data.Corpus
) -> dict[str, Any]:
    """What a resumed run must share with its checkpoint, besides the configuration."""
    recipe = plan.recipe.model_dump(mode="json", exclude={"name", "description"})
    return {
        "model": model.model_dump(mode="json"),
        "recipe": recipe,
        "data": {"train": train.fingerprint(), "validation": validation.fingerprint()},
    }


def versions() -> dict[str, str]:
    """The versions that a checkpoint was written with."""
    return {
        "fp8stack": fp8stack.__version__,
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
    }
