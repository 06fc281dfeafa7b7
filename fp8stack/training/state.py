"""A run's whole state as named tensors and plain data, and back: what a checkpoint holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
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
    groups = {"model": weights, "optimizer": moments, "rng": random_state()}
    return groups | ({"fp8": state} if (state := fp8_state(model)) else {})


def restore(model: GPT, optimizer: Optimizer, groups: dict[str, dict[str, Tensor]]) -> None:
    """Put back what `capture` gave.

    Raises:
        UserError: a tensor is missing, left over, or of another shape or dtype, or a weight or
            moment is not finite; then all weights and moments are as they were.
    """
    moments = _moments(model, groups.get("optimizer", {}))
    restore_weights(model, groups.get("model", {}))
    for name, parameter in model.named_parameters():
        if name in moments:
            optimizer.state[parameter] = moments[name]
    load_fp8_state(model, groups.get("fp8", {}))
    restore_random_state(groups.get("rng", {}))


def restore_random_state(state: Mapping[str, Tensor]) -> None:
    """Put back what `random_state` gave.

    Raises:
        UserError: it is none of torch's.
    """
    try:
        torch.set_rng_state(state["cpu"])
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])
    except (KeyError, RuntimeError, TypeError) as error:
        raise UserError("The checkpoint's random state is none of torch's.") from error


def all_finite(model: nn.Module, optimizer: Optimizer) -> bool:
    """Whether all weights and moments are finite. This waits for the device."""
    tensors = [parameter.detach() for parameter in model.parameters()]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    # The largest magnitude of each: inf or NaN if an element is.
    largest = torch._foreach_norm([t for t in tensors if t.ndim], ord=math.inf)
    return bool(torch.stack(largest).isfinite().all())


def _moments(model: GPT, saved: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """AdamW's state of each parameter by name; empty if the optimizer had not stepped yet."""
    moments: dict[str, dict[str, Tensor]] = {}
    parameters = dict(model.named_parameters()) if saved else {}
    expected = {f"{name}.{key}" for name in parameters for key in ("exp_avg", "exp_avg_sq", "step")}
    _require_names(expected, saved)
    for name, parameter in parameters.items():
        like = {"exp_avg": parameter, "exp_avg_sq": parameter, "step": torch.zeros(())}
        moments[name] = {
            key: _fitted(f"{name}.{key}", saved[f"{name}.{key}"], shape, model).to(parameter.device)
            for key, shape in like.items()
        }
    return moments


@torch.no_grad()
def restore_weights(model: GPT, weights: dict[str, Tensor]) -> None:
    """Put the weights of a checkpoint into a model, padded as the model wants it.

    Raises:
        UserError: a tensor is missing, left over, or of another shape or dtype.
    """
    parameters = dict(model.named_parameters())
    _require_names(parameters.keys(), weights)
    fitted = {name: _fitted(name, weights[name], like, model) for name, like in parameters.items()}
    for name, parameter in parameters.items():
        parameter.copy_(fitted[name])


def _require_names(expected: Set[str], saved: dict[str, Tensor]) -> None:
    odd = sorted(expected ^ saved.keys())
    if odd:
        which = "lacks" if odd[0] in expected else "has a tensor too many,"
        raise UserError(f"The checkpoint {which} '{odd[0]}': it is of another model.")


def _trim(name: str, tensor: Tensor, model: GPT) -> Tensor:
    return tensor[: model.config.vocabulary] if name in PADDED and tensor.ndim else tensor


def _fitted(name: str, tensor: Tensor, like: Tensor, model: GPT) -> Tensor:
    """`tensor` with the rows that `_trim` cut off, checked to be what `like` can take."""
    shape = tuple(like.shape)
    if name.removesuffix(".exp_avg").removesuffix(".exp_avg_sq") in PADDED:
        shape = (model.config.vocabulary, *shape[1:])
    if tuple(tensor.shape) != shape or tensor.dtype != like.dtype:
        raise UserError(
            f"The checkpoint's '{name}' is {tensor.dtype} {tuple(tensor.shape)}, the model's "
            f"{like.dtype} {shape}: it is of another model."
        )
    if not tensor.isfinite().all():
        raise UserError(f"The checkpoint's '{name}' is not finite. Use an older checkpoint.")
    missing = like.shape[0] - shape[0] if shape else 0
    return torch.cat([tensor, tensor.new_zeros(missing, *shape[1:])]) if missing else tensor


def random_state() -> dict[str, Tensor]:
    """The state of torch's generators, for `restore_random_state`."""
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
