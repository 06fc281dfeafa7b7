"""Build a run from its configuration, on one rank or several: its data, model and optimizer."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import nn

from fp8stack.common.errors import UserError
from fp8stack.data.tokenizer import Tokenizer
from fp8stack.model.gpt import GPT
from fp8stack.planning.run_config import RunConfig
from fp8stack.precision import Hardware, Plan
from fp8stack.training.checkpoint.state import restore_weights
from fp8stack.training.datasets import read
from fp8stack.training.distributed.parallelize import DDP_OPTIONS, spread
from fp8stack.training.distributed.process_group import Ranks, losing_ranks
from fp8stack.training.init_from import weights_for
from fp8stack.training.load import Trained
from fp8stack.training.memory_check import keep_freed_memory
from fp8stack.training.metrics.trackers import build_trackers
from fp8stack.training.models import model_in
from fp8stack.training.optim.grad_scaler import build_scaler
from fp8stack.training.optim.optimizer import build_optimizer
from fp8stack.training.run import Run, TrainingState, identity_of, versions
from fp8stack.training.run_folder import RunFolder
from fp8stack.training.run_plans import RunPlans, never_asked_for, plan_run
from fp8stack.training.setup.resume import Resumption, decided_before
from fp8stack.training.telemetry.operand_errors import Telemetry

COLD = (
    "delayed scaling begins with scales of 1, which harm the first steps without warm-up. Raise "
    'warmup_steps, or take scales from a step in bf16: --set \'phases=[{name="first", '
    'recipe="bf16", until=1}, {name="main"}]\''
)


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """The configuration and the folder of a run, and its initial state."""

    config: RunConfig
    folder: RunFolder
    resumption: Resumption | None  # None: from step 1
    source: Trained | None  # the initial weights; None: random ones, or a checkpoint's
    tokenizer: Tokenizer | None  # the one that `config` names
    tokenizer_file: Path | None  # the `tokenizer.json` of the initial weights or the resumed run
    continues: bool  # whether `folder` already holds the run
    notes: tuple[str, ...]  # printed at the start


def build(beginning: Beginning, hardware: Hardware, ranks: Ranks) -> Run:
    """Build the run before its first step, on all `ranks`. The checkpoint is not yet restored."""
    config, resumption = beginning.config, beginning.resumption
    with ranks.together():
        decided = None if resumption is None else decided_before(resumption, config)
        planned = plan_run(config, hardware, ranks.count, decided)
        config, plan = planned.config, planned.plans[0]
        # Operands are observed on the main rank only.
        sampling = (config.telemetry_every, config.what_if)
        telemetry = Telemetry(plan, *sampling, operands=ranks.is_main)
        tokenizers = (beginning.tokenizer, beginning.tokenizer_file)
        run_data = read(config, planned.model.vocabulary, planned.context, *tokenizers)
        if plan.device == "cpu":
            keep_freed_memory()
        if is_deterministic(config, hardware, any(planned.compiled)):
            _be_deterministic()
        model = _build_model(planned, config)
        # After building the model, which uses the RNG differently by recipe. Each rank draws
        # different dropout masks.
        torch.manual_seed(config.seed + ranks.index)
        accelerator = _build_accelerator(beginning, config, plan, ranks)
        if ranks.count == 1 or config.parallel == "ddp":  # FSDP2 moves block by block
            model.to(accelerator.device)
        loss_scaler = build_scaler(config, accelerator.device) if planned.in_fp16 else None
        if beginning.source is not None:
            restore_weights(model, weights_for(model, beginning.source.weights))
    wrapped: nn.Module = model
    if ranks.count > 1:
        tables = [plan.to_json() for plan in planned.plans]
        machine = [tables, str(hardware), hardware.te_version, versions()]
        ranks.require_equal("plan, hardware or software", json.dumps(machine))
        with losing_ranks():
            wrapped = spread(model, accelerator, config)
    with ranks.together():
        # After `spread`, because FSDP2 replaces the parameters.
        optimizer = build_optimizer(model, config)
        identity = identity_of(planned, run_data)
    if ranks.count > 1:
        ranks.require_equal("copy of the data", json.dumps(identity["data"]))
    return Run(
        config=config,
        context=planned.context,
        folder=beginning.folder,
        hardware=hardware,
        ranks=ranks,
        schedule=planned.schedule,
        optimizer=optimizer,
        accelerator=accelerator,
        loss_scaler=loss_scaler,
        data=run_data,
        telemetry=telemetry,
        identity=identity,
        state=TrainingState(plans=tuple(planned.plans), model=model, wrapped=wrapped),
        notes=tuple(_notes(beginning, planned, run_data.tokenizer, ranks.count)),
    )


def is_deterministic(config: RunConfig, hardware: Hardware, compiled: bool) -> bool:
    """Whether to use torch's deterministic algorithms, which GPUs and compiled code need for
    reproducible results. They are slower on a GPU, so there only if `deterministic` is true."""
    if config.deterministic is None:
        return compiled and hardware.device == "cpu"
    return config.deterministic and (compiled or hardware.device != "cpu")


def _be_deterministic() -> None:
    """Make CUDA and compiled code deterministic. (Compiled code would sum an embedding's gradient
    in any order. Eager code on a CPU is deterministic for a fixed number of threads.)"""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # `warn_only` would neither make attention deterministic nor disable cuDNN's attention.
    torch.use_deterministic_algorithms(True)
    # Skip filling each uninitialized tensor with NaN.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _build_model(planned: RunPlans, config: RunConfig) -> GPT:
    """Build the model of the first phase, with the FP8 state of all phases. Raises a UserError if
    the model does not fit into the memory."""
    first, *later_plans = planned.plans
    try:
        model = model_in(first, config, planned.model, compiled=planned.compiled[0])
    except MemoryError as error:
        raise UserError(
            f"Model {config.model} does not fit into the memory that is left. Choose a smaller one."
        ) from error
    for plan in later_plans:  # whose layers add their counters of random bits to the run's
        model.delayed_scaling = model_in(plan, config, planned.model, model).delayed_scaling
    return model


def _build_accelerator(
    beginning: Beginning, config: RunConfig, plan: Plan, ranks: Ranks
) -> Accelerator:
    """The Accelerator, for devices, accumulation, clipping and trackers; not for mixed precision,
    since the layers cast their inputs."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() in ("1", "true"):
        raise UserError(
            "accelerate was told to use DeepSpeed, which cannot train this model. Leave that out; "
            "--parallel ddp or fsdp spreads a model over ranks."
        )
    folder = beginning.folder.path
    trackers = []
    if ranks.is_main:
        trackers = build_trackers(config, folder, resumed=beginning.continues)
    accelerator = Accelerator(
        cpu=plan.device == "cpu",
        mixed_precision="no",
        gradient_accumulation_steps=config.accumulate,
        log_with=trackers or None,  # an empty list would warn
        project_config=ProjectConfiguration(project_dir=str(folder)),
        kwargs_handlers=[DDP_OPTIONS],
    )
    # In the constructor, ACCELERATE_GRADIENT_ACCUMULATION_STEPS takes precedence.
    accelerator.gradient_accumulation_steps = config.accumulate
    return accelerator


def _notes(
    beginning: Beginning, planned: RunPlans, tokenizer: Tokenizer | None, ranks: int
) -> Iterator[str]:
    """Notes to print at the start. `tokenizer` is the data's."""
    config, source = planned.config, beginning.source
    yield from without_effect(config, planned.in_fp16, ranks, compiled=any(planned.compiled))
    if warning := never_asked_for(config, planned.schedule.phases):
        yield warning
    begins_cold = planned.trained[0].delayed and beginning.resumption is None
    if begins_cold and config.warmup_steps == 0 and config.steps >= 10:  # shorter runs have none
        yield COLD
    if source is None:
        return
    new = "optimizer, scales and schedule are new"
    yield "; ".join([f"weights of {source.name}", new, *source.notes])
    if source.tokenizer is None and tokenizer is not None:
        unknown = "the tokenizer of the weights is unknown"
        yield f"{unknown}: the data are tokens of {tokenizer.name}"
    if source.tokenizer is not None and tokenizer is None:
        yield f"the data must be tokens of {source.tokenizer}; they do not say whose they are"


def without_effect(
    config: RunConfig, in_fp16: bool, ranks: int, *, compiled: bool
) -> tuple[str, ...]:
    """A note for each key that is set but has no effect in this run."""
    fields, adaptive = RunConfig.model_fields, config.clip_mode == "adaptive"
    scaler = tuple(key for key in fields if "loss_scale" in key)
    profile = tuple(key for key in fields if key.startswith("profile_"))
    reasons = {
        "no phase is in fp16": () if in_fp16 else scaler,
        "clip_mode is not adaptive": () if adaptive else ("clip_percentile", "clip_window"),
        "optimizer is not sgd": () if config.optimizer == "sgd" else ("momentum",),
        "optimizer is sgd": ("beta1", "beta2", "adam_eps") if config.optimizer == "sgd" else (),
        "there are no workers": () if config.workers else ("worker_timeout",),
        "the run is not compiled": () if compiled else ("compile_mode",),
        "the run is not profiled": () if config.profile else profile,
        "there is one rank": () if ranks > 1 else ("grad_compression",),
    }
    return tuple(
        f"{key} changes nothing here: {reason}"
        for reason, keys in reasons.items()
        for key in keys
        if getattr(config, key) != fields[key].default
    )
