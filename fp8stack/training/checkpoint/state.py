"""Capture a run's state as named tensors, and restore it from a checkpoint."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Muon, Optimizer

from fp8stack.common.errors import UserError
from fp8stack.layers import fp8_state, load_fp8_state
from fp8stack.layers.fsdp import local_shard
from fp8stack.model.config import PADDED
from fp8stack.model.gpt import GPT
from fp8stack.training.checkpoint.sharded import SharedGroup, copy_into, first_row
from fp8stack.training.distributed.process_group import Ranks
from fp8stack.training.optim.chained import BLOCK, first_state, optimizers_in, parameters_of, plain

Group = Mapping[str, Tensor]


def capture(
    model: GPT, optimizer: Optimizer, random: Group | None = None
) -> dict[str, dict[str, Tensor]]:
    """Weights, moments, FP8 state and random state, by name; of sharded tensors, this rank's rows.
    The rows that pad the vocabulary are left out: they are zero, and their number depends on the
    recipe.

    Args:
        random: the result of `random_states`; None for the state of this rank alone.
    """
    weights, moments = {}, {}
    for name, parameter in model.saved_tensors().items():
        weights[name] = _trim(name, parameter.data, model)
        for key, value in plain(optimizer.state.get(parameter, {})).items():
            moments[f"{name}.{key}"] = _trim(name, value, model)
    groups = {"model": weights, "optimizer": moments, "rng": dict(random or random_state())}
    return groups | ({"fp8": state} if (state := fp8_state(model)) else {})


def first_rows(model: GPT) -> dict[str, int]:
    """The index of the first row that `capture` returns, for each sharded tensor."""
    rows: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        row = first_row(parameter)
        moments = ("exp_avg", "exp_avg_sq")
        of_rows = (*moments, "momentum_buffer", *(f"{moment}.codes" for moment in moments))
        rows |= {name: row} | {f"{name}.{key}": row for key in of_rows}
        scales = row * math.prod(parameter.shape[1:]) // BLOCK
        rows |= {f"{name}.{moment}.scale": scales for moment in moments}
    return rows


@torch.no_grad()
def restore(
    model: GPT,
    optimizer: Optimizer,
    groups: Mapping[str, Group],
    rank: int = 0,
) -> None:
    """Restore the state that `capture` returned; the number of ranks may have changed, and `rank`
    is this one. Raises a UserError if a tensor is missing, left over, or of another shape or dtype,
    or if a weight or moment is not finite; then no weight or moment has changed."""
    weights, moments = groups.get("model", {}), groups.get("optimizer", {})
    parameters = dict(model.named_parameters())
    saved_tensors = model.saved_tensors()
    _check(saved_tensors, weights, model)
    # A run that was saved before its first step has no moments.
    likes = _like_moments(parameters, optimizer) if moments else {}
    _check(likes, moments, model)
    for name, tensor in saved_tensors.items():
        copy_into(tensor, _saved(weights, name, tensor, model))
    optimizer.state.clear()
    owners = _owners(optimizer)
    for name, parameter in parameters.items() if moments else ():
        state = first_state(owners[parameter], parameter)
        for key, value in plain(state).items():
            copy_into(value, _saved(moments, f"{name}.{key}", value, model))
        optimizer.state[parameter] = state
    load_fp8_state(model, groups.get("fp8", {}))
    restore_random_state(groups.get("rng", {}), rank)


def random_states(ranks: Ranks) -> Group:
    """The random state of every rank: `cpu`, and on a GPU `cuda` or `xpu`, of the main rank;
    `cpu.1` of the next."""
    return {
        f"{name}.{rank}" if rank else name: state
        for name, mine in random_state().items()
        for rank, state in enumerate(ranks.gather(mine))
    }


def restore_random_state(state: Group, rank: int = 0) -> None:
    """Restore the result of `random_state` or `random_states`. A rank for which no state was saved
    keeps its current state. Raises a UserError if the state is invalid."""
    suffix = f".{rank}" if rank else ""
    if rank and f"cpu{suffix}" not in state:
        return
    try:
        torch.set_rng_state(state[f"cpu{suffix}"])
        gpu = _gpu()
        if gpu is not None and f"{gpu}{suffix}" in state:
            torch.get_device_module(gpu).set_rng_state(state[f"{gpu}{suffix}"])
    except (KeyError, RuntimeError, TypeError) as error:
        raise UserError("The checkpoint's RNG state is invalid.") from error


@torch.no_grad()
def largest_of_state(optimizer: Optimizer, order: float = math.inf) -> Tensor:
    """The largest norm of a weight or moment of this rank: float32, 0-dim; not finite if an element
    is not. With `order` infinity it is the largest element. Order 2 is faster on a CPU and at least
    as large, but infinite if an element is 2^64 or more."""
    tensors = [weight for group in optimizer.param_groups for weight in group["params"]]
    tensors += [value for state in optimizer.state.values() for value in plain(state).values()]
    # Skip 8-bit codes, which are always finite: their scales show values that are not.
    shards = [local_shard(tensor) for tensor in tensors if tensor.dtype.itemsize > 1]
    shards = [shard for shard in shards if shard.ndim and shard.numel()]
    return torch.stack(torch._foreach_norm(shards, ord=order)).max()


@torch.no_grad()
def restore_weights(model: GPT, weights: Group) -> None:
    """Restore a model's weights from a checkpoint, padded to the model's shapes. Raises a UserError
    if a weight is missing, left over, of another shape or dtype, or not finite; then no weight has
    changed."""
    saved_tensors = model.saved_tensors()
    _check(saved_tensors, weights, model)
    for name, tensor in saved_tensors.items():
        copy_into(tensor, _saved(weights, name, tensor, model))


def _like_moments(parameters: Mapping[str, Tensor], optimizer: Optimizer) -> dict[str, Tensor]:
    """Tensors shaped like the optimizer's state of each parameter, by name."""
    likes: dict[str, Tensor] = {}
    owners = _owners(optimizer)
    for name, parameter in parameters.items():
        owner = owners[parameter]
        if isinstance(owner, AdamW):
            moments = {"step": torch.zeros(()), "exp_avg": parameter, "exp_avg_sq": parameter}
        else:
            moments = plain(first_state(owner, parameter))
            if isinstance(owner, SGD | Muon):
                moments = dict.fromkeys(moments, parameter)
        likes |= {f"{name}.{key}": like for key, like in moments.items()}
    return likes


def _owners(optimizer: Optimizer) -> dict[Tensor, Optimizer]:
    return {
        parameter: member
        for member in optimizers_in(optimizer)
        for parameter in parameters_of(member)
    }


def _check(likes: Group, saved: Group, model: GPT) -> None:
    """Check that every tensor of `saved` fits its counterpart in `likes`, before any is changed."""
    odd = sorted(likes.keys() ^ saved.keys())
    if odd:
        fault = "lacks" if odd[0] in likes else "has a tensor too many,"
        raise UserError(f"The checkpoint {fault} '{odd[0]}': it is of another model.")
    for name, like in likes.items():
        values = local_shard(_saved(saved, name, like, model))
        if not (values.float() if values.dtype.itemsize == 1 else values).isfinite().all():
            raise UserError(f"The checkpoint's '{name}' is not finite. Use an older checkpoint.")


def _trim(name: str, tensor: Tensor, model: GPT) -> Tensor:
    """This rank's rows of `tensor`, without the rows that pad the vocabulary."""
    first, tensor = first_row(tensor), local_shard(tensor)
    if name not in PADDED or not tensor.ndim:
        return tensor
    return tensor[: max(0, model.config.vocabulary - first)]


def _saved(group: Group, name: str, like: Tensor, model: GPT) -> Tensor:
    """The tensor `name`, checked to fit `like`, with the padding that `_trim` cut off."""
    tensor = group.like(name, like) if isinstance(group, SharedGroup) else group[name]
    shape = tuple(like.shape)
    if re.sub(r"\.(exp_avg|exp_avg_sq|momentum_buffer)$", "", name) in PADDED:
        shape = (model.config.vocabulary, *shape[1:])
    if tuple(tensor.shape) != shape or tensor.dtype != like.dtype:
        raise UserError(
            f"The checkpoint's '{name}' is {tensor.dtype} {tuple(tensor.shape)}, the model's "
            f"{like.dtype} {shape}: it is of another model."
        )
    missing = like.shape[0] - shape[0] if shape else 0
    return torch.cat([tensor, tensor.new_zeros(missing, *shape[1:])]) if missing else tensor


def random_state() -> dict[str, Tensor]:
    """The state of torch's generators, for `restore_random_state`."""
    state = {"cpu": torch.get_rng_state()}
    if (gpu := _gpu()) is not None:
        state[gpu] = torch.get_device_module(gpu).get_rng_state()
    return state


def _gpu() -> str | None:
    """The type of this machine's GPU, "cuda" or "xpu"; None without one."""
    if torch.cuda.is_available():
        return "cuda"
    return "xpu" if torch.xpu.is_available() else None


def differences(saved: dict[str, Any], now: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield the differences of two JSON objects: `key is X here and Y in the checkpoint`."""
    # Common keys come first: a key that only one recipe has follows from the recipes' difference.
    for key in sorted(saved.keys() | now.keys(), key=lambda k: (k not in saved or k not in now, k)):
        value, saved_value = now.get(key), saved.get(key)
        name = f"{path}{key}"
        if isinstance(value, dict) and isinstance(saved_value, dict):
            yield from differences(saved_value, value, f"{name}.")
        elif value != saved_value:
            yield f"{name} is {value!r} here and {saved_value!r} in the checkpoint"
