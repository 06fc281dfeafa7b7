"""Trained models by name, and initial weights of a new run from one of them: only the weights, the
optimizer, step, scales and schedule are new."""

import os
from pathlib import Path
from typing import Any

from fp8stack import hf, presets
from fp8stack.checkpoint.state import differences
from fp8stack.config import RunConfig, preset_for
from fp8stack.errors import UserError
from fp8stack.model.config import GPTConfig, load_config
from fp8stack.tokenizer import TOKENIZER_FILE
from fp8stack.training.load import Trained, find_checkpoint, trained_run
from fp8stack.training.setup.datasets import own_tokenizer

# Keys that may differ from the source's: initialization and dropout.
FREE = {"dropout", "init_std"}


def find_source(init_from: str) -> Trained:
    """The model of a checkpoint, a run (its newest usable checkpoint), `hf:` and a folder that
    transformers saved, or `hf:owner/name[@revision]` on the Hub, as `--init-from` names it. Raises
    what `fetch` raises, a UserError if it does not exist or our GPT cannot represent the model, and
    a NoUsableCheckpoint if the checkpoint is damaged, or all of the run's are."""
    repository, folder = hf.repository_in(init_from), hf.path_in(init_from)
    if repository is not None:
        path, fetched = hf.fetch(repository)
        return _of_folder(path, str(fetched))
    if folder is not None:
        return _of_folder(folder, absolute_source(init_from))
    return trained_run(*find_checkpoint(init_from))


def _of_folder(path: Path, name: str) -> Trained:
    """The model in a folder that transformers saved; `name` is the source's."""
    folder = hf.open_folder(path)
    found = hf.model_from_config(folder.config, str(path / "config.json"))
    return Trained(
        path=Path(name),
        shape=found.config,
        weights=hf.from_hf(found.config, found.layout, folder.tensors, str(path)),
        notes=found.notes,
        tokenizer=folder.tokenizer,
    )


def tokenizer_to_begin_with(source: Trained, config: RunConfig) -> Path | None:
    """The `tokenizer.json` of initial weights, if they have one. Raises a UserError if it is not
    the one that their checkpoint records, and `config` names no tokenizer."""
    recorded = source.recorded_tokenizer
    if recorded is not None and config.tokenizer is None:
        own_tokenizer(source.tokenizer or source.path.parent.parent / TOKENIZER_FILE, recorded)
    return source.tokenizer


def nearest_preset(shape: GPTConfig) -> tuple[str, dict[str, Any]]:
    """The preset closest to `shape`, and the overrides that make it `shape`."""
    wanted = _explicit(shape)
    changes = {}
    for name in presets.names("models"):
        found = _explicit(load_config(name))
        changes[name] = {key: value for key, value in wanted.items() if found[key] != value}
    return min(changes.items(), key=lambda item: len(item[1]))


def _explicit(shape: GPTConfig) -> dict[str, Any]:
    """The keys of a shape, with defaults that depend on other keys filled in."""
    told = shape.model_dump(mode="json")
    return told | {"kv_heads": shape.query_groups, "mlp_width": shape.hidden}


def with_source(config: RunConfig, source: Trained) -> RunConfig:
    """`config` with the source, and without `--model` its model, so that the source is not needed
    once the run has a checkpoint. Raises a UserError that names the first difference if the model
    differs from the source's."""
    found: dict[str, Any] = {"init_from": source.name}
    if "model" not in config.given:
        if (run := source.config) is not None:
            model, overrides = run.model, run.model_overrides
        else:
            model, overrides = nearest_preset(source.shape)
        overrides = {**overrides, **config.model_overrides}
        found |= {"model": model, "model_overrides": overrides}
        if not overrides.keys() & {"layers", "width"}:  # it is that model
            found |= preset_for(config.given | found)
    made = config.model_copy(update=found)
    ours = load_config(made.model, made.model_overrides)
    there, here = _beside(source.shape, ours), _beside(ours, source.shape)
    for difference in differences(there, here):
        raise UserError(
            f"Cannot begin with the weights of {source.name}: the model's {difference}. Leave out "
            "--model and model_overrides, to have the checkpoint's model."
        )
    return made


def _beside(shape: GPTConfig, other: GPTConfig) -> dict[str, Any]:
    """The keys that weights depend on; dependent defaults are filled in where `other` sets them."""
    told = shape.model_dump(mode="json", exclude=FREE)
    said = _explicit(shape)
    return {key: value if getattr(other, key) is None else said[key] for key, value in told.items()}


def absolute_source(init_from: str) -> str:
    """`--init-from` as an absolute path, so that a run can be resumed from any directory."""
    if (folder := hf.path_in(init_from)) is None:
        return os.path.realpath(init_from)
    return init_from if hf.repository_in(init_from) else f"{hf.HF}{os.path.realpath(folder)}"


def _same_repository(asked: hf.Repository, saved: hf.Repository) -> bool:
    """Whether `asked` may be `saved`, whose revision is a commit."""
    if asked.name != saved.name:
        return False
    commit = saved.revision or ""
    if asked.revision is None or (len(asked.revision) >= 7 and commit.startswith(asked.revision)):
        return True
    return hf.commit_in_cache(asked) == commit


def same_source(asked: str, saved: str | None) -> bool:
    """Whether `asked`, see `find_source`, names the `saved` source of a run's initial weights."""
    if saved is None or hf.path_in(asked) is not None or hf.path_in(saved) is not None:
        there = None if saved is None else hf.repository_in(saved)
        here = hf.repository_in(asked)
        if there is not None and here is not None:
            return _same_repository(here, there)
        return saved is not None and absolute_source(asked) == saved
    places = (Path(saved), Path(saved).parent.parent)  # RUN/checkpoints/step-000200, and RUN
    return Path(asked).resolve() in places
