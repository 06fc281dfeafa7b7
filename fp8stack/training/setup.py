"""From a configuration to a run that can take its first step, new or resumed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import Tensor, nn
from torch.optim import AdamW

import fp8stack
from fp8stack import data, presets
from fp8stack.backends import Backend, build_backend
from fp8stack.errors import NoUsableCheckpoint, UserError
from fp8stack.model import GPT, GPTConfig, load_config, plan_for
from fp8stack.precision import Hardware, Plan, load_recipe, probe
from fp8stack.training import checkpoint as checkpoints
from fp8stack.training.checkpoint import Checkpoint
from fp8stack.training.config import FREE_ON_RESUME, RunConfig, parse_config, to_toml
from fp8stack.training.optimizer import build_optimizer
from fp8stack.training.run_folder import RunFolder, default_folder
from fp8stack.training.state import differences, restore


@dataclass(kw_only=True)
class Run:
    """Everything a training loop needs, and the step that was done last."""

    config: RunConfig
    context: int
    folder: RunFolder
    hardware: Hardware
    plan: Plan
    backend: Backend
    model: GPT
    wrapped: nn.Module
    optimizer: AdamW
    accelerator: Accelerator
    scaler: torch.amp.GradScaler | None
    train: data.Corpus
    validation: data.Corpus
    windows: Tensor
    identity: dict[str, Any]
    step: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """Where a run goes on: its folder, its configuration as saved, and a checkpoint if any."""

    folder: RunFolder
    saved: RunConfig
    checkpoint: Checkpoint | None
    notes: tuple[str, ...]


def set_up(flags: dict[str, Any], file: str | None, sets: list[str], resume: str | None) -> Run:
    """The run that the flags, the run file and `--set` describe; `resume` is auto or a path.

    Raises:
        UserError: bad input, or a run to resume that differs in what its losses depend on.
        NoUsableCheckpoint: `resume` names a run whose checkpoints are all damaged.
    """
    config = parse_config(file, flags, sets)
    found = find_resumption(config, resume)
    if found is None:
        folder = RunFolder(Path(config.out) if config.out else _default(config, resume=False))
        folder.require_free()
    else:
        folder = found.folder
        config = config_to_resume(found, config)
    run = build(config, folder)
    folder.create()
    if found is not None:
        _resume(run, found)
    checkpoints.write_atomically(folder.config, to_toml(config).encode())
    folder.write_plan(run.plan.to_json())
    return run


def _default(config: RunConfig, resume: bool) -> Path:
    return default_folder(config.model, config.recipe, resume)


def build(config: RunConfig, folder: RunFolder) -> Run:
    """The run at its beginning: model, optimizer and data as `config` has them."""
    hardware = probe(config.device)
    model_config = load_config(config.model, config.model_overrides)
    recipe = config.recipe
    if config.recipe_overrides and recipe == "auto":
        raise UserError("recipe_overrides needs a recipe by name: auto chooses one by itself.")
    plan = plan_for(
        model_config,
        recipe if recipe == "auto" else load_recipe(recipe, config.recipe_overrides),
        hardware,
        config.backend,
        config.strict,
    )
    context = config.context or model_config.context
    if context > model_config.context:
        raise UserError(
            f"--context {context} is more than the {model_config.context} of model {config.model}. "
            f"Lower it, or --set model_overrides.context={context}"
        )
    train, validation = data.load_corpora(config.data, model_config.vocabulary)
    windows = data.validation_windows(
        validation, count=config.eval_windows, context=context, vocabulary=model_config.vocabulary
    )
    if plan.device == "cuda" and config.deterministic:
        _be_deterministic()
    backend = build_backend(plan, save_fp8=config.save_fp8)
    try:
        model = GPT(model_config, backend, seed=config.seed)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "alloc" not in str(error):
            raise
        raise UserError(
            f"Model {config.model} with {model_config.parameters():,} parameters does not fit into "
            f"this machine's memory. Choose a smaller one."
        ) from error
    torch.manual_seed(config.seed)  # after the model: what its making draws depends on the recipe
    accelerator = _accelerator(config, folder, plan)
    model = model.to(accelerator.device)
    optimizer = build_optimizer(model, config)
    wrapped = accelerator.prepare_model(model)
    return Run(
        config=config,
        context=context,
        folder=folder,
        hardware=hardware,
        plan=plan,
        backend=backend,
        model=model,
        wrapped=wrapped,
        optimizer=optimizer,
        accelerator=accelerator,
        scaler=torch.amp.GradScaler(accelerator.device.type) if plan.loss_scaling else None,
        train=train,
        validation=validation,
        windows=windows,
        identity=_identity(model_config, plan, train, validation),
    )


def _be_deterministic() -> None:
    """Ask CUDA for results that repeat; a CPU's do already, for the same number of threads."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Else every buffer would be written twice.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _accelerator(config: RunConfig, folder: RunFolder, plan: Plan) -> Accelerator:
    """accelerate for devices, accumulation, clipping and trackers; the layers cast by themselves,
    so it is told of no precision."""
    if config.tensorboard:
        _require_tensorboard()
    accelerator = Accelerator(
        cpu=plan.device == "cpu",
        mixed_precision="no",
        gradient_accumulation_steps=config.accumulate,
        log_with="tensorboard" if config.tensorboard else None,
        project_config=ProjectConfiguration(project_dir=str(folder.path)),
    )
    if accelerator.num_processes > 1:
        raise UserError(
            f"{accelerator.num_processes} processes were started and this version trains in one. "
            "Start it without torchrun or accelerate launch."
        )
    # The constructor prefers the environment's ACCELERATE_GRADIENT_ACCUMULATION_STEPS.
    accelerator.gradient_accumulation_steps = config.accumulate
    if config.tensorboard:
        accelerator.init_trackers("tensorboard")
    return accelerator


def _require_tensorboard() -> None:
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        raise UserError(
            "--tensorboard needs the package tensorboard: pip install 'fp8stack[tensorboard]'"
        ) from None


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


def find_resumption(config: RunConfig, resume: str | None) -> Resumption | None:
    """The run to go on with, or None for a new one.

    Raises:
        UserError: no run at the path given, or `--out` names another folder.
        NoUsableCheckpoint: the checkpoints are damaged, or the one that was named is.
    """
    if resume is None:
        return None
    if resume == "auto":
        folder = RunFolder(Path(config.out) if config.out else _default(config, resume=True))
        if not folder.holds_run:
            return None
        named = None
    else:
        folder, named = _locate(Path(resume))
        if config.out and Path(config.out).resolve() != folder.path.resolve():
            raise UserError(
                f"--resume {resume} goes on in {folder.path}, not in --out {config.out}."
            )
    saved = parse_config(str(folder.config), {})
    if named is not None:
        try:
            checkpoint = checkpoints.load(named)
        except UserError as error:
            raise NoUsableCheckpoint(
                f"{error} Give another checkpoint or the run's folder."
            ) from error
        return _resumption(folder, saved, checkpoint, [f"resumed from {named}"])
    if not checkpoints.exists(folder.checkpoints):
        note = f"{folder.path} has no checkpoint yet: starting again from step 1"
        return _resumption(folder, saved, None, [note])
    checkpoint, path, passed_over = checkpoints.newest(folder.checkpoints)
    why = "".join(f"; passed over: {reason}" for reason in passed_over)
    return _resumption(folder, saved, checkpoint, [f"resumed from {path}{why}"])


def _resumption(
    folder: RunFolder, saved: RunConfig, checkpoint: Checkpoint | None, notes: list[str]
) -> Resumption:
    if checkpoint is not None:  # what the run was made with, whatever run.toml says now
        where = f"checkpoint of step {checkpoint.step}"
        saved = presets.parse(RunConfig, checkpoint.info["config"], where)
    return Resumption(folder=folder, saved=saved, checkpoint=checkpoint, notes=tuple(notes))


def _locate(path: Path) -> tuple[RunFolder, Path | None]:
    """The run folder that `path` names, and the checkpoint in it if it names one."""
    if (path / "run.toml").is_file():
        return RunFolder(path), None
    if path.parent.name == "checkpoints" and (path.parent.parent / "run.toml").is_file():
        return RunFolder(path.parent.parent), path
    raise UserError(f"--resume {path}: there is no run and no checkpoint. Give a run's folder.")


def config_to_resume(found: Resumption, asked: RunConfig) -> RunConfig:
    """The saved configuration with the flags that were given now.

    Raises:
        UserError: a flag differs in something that the run's losses depend on.
    """
    merged: RunConfig = presets.parse(RunConfig, found.saved.model_dump() | asked.given, "flags")
    fixed = set(RunConfig.model_fields) - FREE_ON_RESUME
    saved, now = found.saved.model_dump(include=fixed), merged.model_dump(include=fixed)
    _refuse(found, list(differences(saved, now)))
    return merged


def _resume(run: Run, found: Resumption) -> None:
    """Put `run` where the checkpoint left off."""
    run.notes = found.notes
    if found.checkpoint is None:
        run.folder.forget_after(0)
        return
    info = found.checkpoint.info
    _refuse(found, list(differences(info["identity"], run.identity)))
    if found.checkpoint.step > run.config.steps:
        raise UserError(
            f"--steps {run.config.steps} is less than the {found.checkpoint.step} that the run has "
            "done. Give at least as many."
        )
    if run.config.steps != found.saved.steps:
        note = f"steps {found.saved.steps} -> {run.config.steps}: the learning rate follows the new"
        run.notes = (*run.notes, note)
    if info["versions"].get("torch") != torch.__version__:
        note = f"torch {info['versions'].get('torch')} -> {torch.__version__}: losses may differ"
        run.notes = (*run.notes, note)
    restore(run.model, run.optimizer, found.checkpoint.tensors)
    if run.scaler is not None:
        run.scaler.load_state_dict(info["scaler"])
    run.step = found.checkpoint.step
    run.folder.forget_after(run.step)


def _refuse(found: Resumption, differing: list[str]) -> None:
    if differing:
        raise UserError(
            f"Cannot resume {found.folder.path}: {differing[0]}. Leave it as it was, or start a "
            "new run in another --out."
        )
