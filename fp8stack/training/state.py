"""A run's whole state as named tensors and plain data, and back: what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fp8stack.backends import fp8_state, load_fp8_state
from fp8stack.errors import UserError
from fp8stack.model import GPT, PADDED


def capture(model: GPT, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """Weights, moments, FP8 state and random state, by name.

    The rows that pad the vocabulary are left out: they are zero, and how many there are depends on
    the recipe.
    """
    weights, moments = {}, {}
    for name, parameter in model.named_parameters():
        weights[name] = _trim(name, parameter.data, model)
        for key, value in optimizer.state.get(parameter, {}).items():
            moments[f"{name}.{key}"] = _trim(name, value, model)
    groups = {"model": weights, "optimizer": moments, "rng": _random_state()}
    return groups | ({"fp8": state} if (state := fp8_state(model)) else {})


def restore(model: GPT, optimizer: Optimizer, groups: dict[str, dict[str, Tensor]]) -> None:
    """Put back what `capture` gave.

    Raises:
        UserError: a tensor is missing, left over, or of another shape or dtype.
    """
    restore_weights(model, groups.get("model", {}))
    moments = groups.get("optimizer", {})
    for name, parameter in model.named_parameters():
        keys = [
            key
            for key in moments
            if key.startswith(f"{name}.") and key.count(".") == name.count(".") + 1
        ]
        optimizer.state[parameter] = {
            key.rpartition(".")[2]: _pad(name, moments[key], parameter).to(parameter.device)
            for key in keys
        }
    load_fp8_state(model, groups.get("fp8", {}))
    rng = groups.get("rng", {})
    if "cpu" not in rng:
        raise UserError("The checkpoint has no random state 'cpu': it is not a run's.")
    torch.set_rng_state(rng["cpu"])
    if "cuda" in rng and torch.cuda.is_available():
        torch.cuda.set_rng_state(rng["cuda"])


@torch.no_grad()
def restore_weights(model: GPT, weights: dict[str, Tensor]) -> None:
    """Put the weights of a checkpoint into a model, padded as the model wants it.

    Raises:
        UserError: a tensor is missing, left over, or of another shape or dtype.
    """
    parameters = dict(model.named_parameters())
    odd = sorted(parameters.keys() ^ weights.keys())
    if odd:
        which = "lacks" if odd[0] in parameters else "has a tensor too many,"
        raise UserError(f"The checkpoint {which} '{odd[0]}': it is of another model.")
    for name, parameter in parameters.items():
        padded = _pad(name, weights[name], parameter)
        if padded.shape != parameter.shape or padded.dtype != parameter.dtype:
            raise UserError(
                f"The checkpoint's '{name}' is {weights[name].dtype} {tuple(weights[name].shape)}, "
                f"the model's {parameter.dtype} {tuple(parameter.shape)}: it is of another model."
            )
        parameter.copy_(padded)


def _trim(name: str, tensor: Tensor, model: GPT) -> Tensor:
    return tensor[: model.config.vocabulary] if name in PADDED and tensor.ndim else tensor


def _pad(name: str, tensor: Tensor, parameter: Tensor) -> Tensor:
    if name not in PADDED or not tensor.ndim or tensor.shape[0] >= parameter.shape[0]:
        return tensor
    missing = tensor.new_zeros(parameter.shape[0] - tensor.shape[0], *tensor.shape[1:])
    return torch.cat([tensor, missing])


def _random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def differences(saved: dict[str, Any], now: dict[str, Any], path: str = "") -> Iterator[str]:
    """Where two pieces of JSON data differ, each as `key is X here and Y in the checkpoint`."""
    # What both have first: a key that only one recipe knows follows from the recipes' difference.
    for key in sorted(saved.keys() | now.keys(), key=lambda k: (k not in saved or k not in now, k)):
        ours, theirs = now.get(key), saved.get(key)
        name = f"{path}{key}"
        if isinstance(ours, dict) and isinstance(theirs, dict):
            yield from differences(theirs, ours, f"{name}.")
        elif ours != theirs:
            yield f"{name} is {ours!r} here and {theirs!r} in the checkpoint"
