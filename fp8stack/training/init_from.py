"""The initial weights of a new run (`--init-from`): only the weights are taken over, not the
optimizer, step, scales and schedule."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fp8stack.common import presets
from fp8stack.common.errors import UserError
from fp8stack.data.tokenizer import TOKENIZER_FILE
from fp8stack.model.config import GPTConfig, load_config
from fp8stack.model.gpt import GPT
from fp8stack.planning.run_config import RunConfig, merged, preset_for
from fp8stack.training.checkpoint.state import differences
from fp8stack.training.load import Trained, own_tokenizer

FREE: Any = {"dropout": True, "init_std": True, "experts": {"balance", "bias", "router_z"}}
"""Keys that may differ from the source's: initialization, dropout and losses of routers."""


def tokenizer_to_begin_with(source: Trained, config: RunConfig) -> Path | None:
    """The `tokenizer.json` of initial weights, if they have one. Raises a UserError if it is not
    the one that their checkpoint records, and `config` names no tokenizer."""
    recorded = source.recorded_tokenizer
    if recorded is not None and config.tokenizer is None:
        own_tokenizer(source.tokenizer or source.path.parent.parent / TOKENIZER_FILE, recorded)
    return source.tokenizer


def weights_for(model: GPT, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The `weights` of another run for `model`: biases of routers start from their initial
    values if only one of the two models has them."""
    new = {name: model.get_buffer(name).detach().cpu() for name in model.config.buffer_shapes()}
    biases = {name for name in weights if name.endswith(".balance_bias")}
    return new | {name: weights[name] for name in weights if name in new or name not in biases}


def nearest_preset(shape: GPTConfig) -> tuple[str, dict[str, Any]]:
    """The preset closest to `shape`, and the overrides that make it `shape`."""
    keys = _explicit(shape)
    changes = {}
    for name in presets.names("models"):
        preset = _explicit(load_config(name))
        if (preset["experts"] is None) == (keys["experts"] is None):
            changes[name] = {key: value for key, value in keys.items() if preset[key] != value}
    return min(changes.items(), key=lambda item: len(item[1]))


def _explicit(shape: GPTConfig) -> dict[str, Any]:
    """The keys of a shape, with defaults that depend on other keys filled in."""
    keys: dict[str, Any] = dict.fromkeys(GPTConfig.model_fields)
    keys |= shape.model_dump(mode="json") | _sizes(shape)
    if shape.experts is not None:
        keys["experts"] = shape.experts.model_dump(mode="json", exclude_none=True)
        if shape.experts.bias is None:
            keys["experts"]["balance"] = shape.experts.balance_coefficient
    return keys


def _sizes(shape: GPTConfig) -> dict[str, int]:
    """The keys whose defaults depend on other keys."""
    return {
        "kv_heads": shape.query_groups,
        "mlp_width": shape.hidden,
        "head_width": shape.head_dim,
    }


def with_source(config: RunConfig, source: Trained) -> RunConfig:
    """`config` with the source, and without `--model` its model, so that the source is not needed
    once the run has a checkpoint. Raises a UserError that names the first difference if the model
    differs from the source's."""
    keys: dict[str, Any] = {"init_from": source.name}
    filled: dict[str, Any] = {}
    if "model" not in config.given:
        if (run := source.config) is not None:
            model, overrides = run.model, run.model_overrides
        else:
            model, overrides = nearest_preset(source.shape)
        overrides = merged(overrides, config.model_overrides)
        keys |= {"model": model, "model_overrides": overrides}
        if not overrides.keys() & {"layers", "width"}:  # it is that model
            filled = preset_for(config.given | keys)
    config = config.model_copy(update=keys | filled)
    config.model_fields_set.difference_update(filled)  # not given by the user
    shape = load_config(config.model, config.model_overrides)
    for difference in differences(_beside(source.shape, shape), _beside(shape, source.shape)):
        raise UserError(
            f"Cannot begin with the weights of {source.name}: the model's {difference}. Leave out "
            "--model and model_overrides, to have the checkpoint's model."
        )
    return config


def _beside(shape: GPTConfig, compared: GPTConfig) -> dict[str, Any]:
    """The keys of `shape` that weights depend on; defaults that depend on other keys are filled in
    where `compared` sets them."""
    keys = shape.model_dump(mode="json", exclude=FREE)
    sizes = _sizes(shape)
    return keys | {key: size for key, size in sizes.items() if getattr(compared, key) is not None}
