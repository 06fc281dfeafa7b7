"""Capturing a run's state as named tensors, and restoring it from a checkpoint."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Muon, Optimizer

from fp8stack.backends import fp8_state, load_fp8_state
from fp8stack.backends.fsdp import local_shard
from fp8stack.checkpoint.sharded import SharedGroup, copy_into, first_row
from fp8stack.distributed.process_group import Ranks
from fp8stack.errors import UserError
from fp8stack.model.gpt import GPT, PADDED
from fp8stack.optim.chained import first_state, optimizers_in, parameters_of, plain

Group = Mapping[str, Tensor]


def capture(
    model: GPT, optimizer: Optimizer, random: Group | None = None, *, fp8_model: GPT | None = None
) -> dict[str, dict[str, Tensor]]:
    """Weights, moments, FP8 state and random state, by name; of tensors that ranks share out, the
    rows that are here. The rows that pad the vocabulary are left out: they are zero, and how many
    there are depends on the recipe.

    Args:
        random: what `random_states` gave, on several ranks.
        fp8_model: the variant of the model whose FP8 state it is, if that is another one.
    """
    weights, moments = {}, {}
    for name, parameter in model.named_parameters():
        weights[name] = _trim(name, parameter.data, model)
        for key, value in plain(optimizer.state.get(parameter, {})).items():
            moments[f"{name}.{key}"] = _trim(name, value, model)
    groups = {"model": weights, "optimizer": moments, "rng": dict(random or random_state())}
    return groups | ({"fp8": state} if (state := fp8_state(fp8_model or model)) else {})


def first_rows(model: GPT) -> dict[str, int]:
    """The index of the first row that `capture` returns, for each sharded tensor."""
    return {
        f"{name}{of}": first_row(parameter)
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DTensor)
        for of in ("", ".exp_avg", ".exp_avg_sq")
    }


@torch.no_grad()
def restore(
    model: GPT,
    optimizer: Optimizer,
    groups: Mapping[str, Group],
    rank: int = 0,
    *,
    fp8_model: GPT | None = None,
) -> None:
    """Put back what `capture` gave, on as many ranks as there are now; `rank` is this one. Raises a
    UserError if a tensor is missing, left over, or of another shape or dtype, or a weight or moment
    is not finite; then all weights and moments are as they were."""
    weights, moments = groups.get("model", {}), groups.get("optimizer", {})
    parameters = dict(model.named_parameters())
    _check(parameters, weights, model)
    # A run that was saved before its first step has no moments.
    likes = _like_moments(parameters, optimizer) if moments else {}
    _check(likes, moments, model)
    for name, parameter in parameters.items():
        copy_into(parameter, _saved(weights, name, parameter, model))
    optimizer.state.clear()
    owners = _owners(optimizer)
    for name, parameter in parameters.items() if moments else ():
        state = first_state(owners[parameter], parameter)
        for key, value in plain(state).items():
            copy_into(value, _saved(moments, f"{name}.{key}", value, model))
        optimizer.state[parameter] = state
    load_fp8_state(fp8_model or model, groups.get("fp8", {}))
    restore_random_state(groups.get("rng", {}), rank)


def random_states(ranks: Ranks) -> Group:
    """The random state of every rank: `cpu` and `cuda` of the main one, `cpu.1` of the next."""
    return {
        f"{name}.{rank}" if rank else name: state
        for name, mine in random_state().items()
        for rank, state in enumerate(ranks.gather(mine))
    }


def restore_random_state(state: Group, rank: int = 0) -> None:
    """Put back what `random_state` gave, or `random_states`. A rank that there was none of then
    keeps what it has. Raises a UserError if it is invalid."""
    suffix = f".{rank}" if rank else ""
    if rank and f"cpu{suffix}" not in state:
        return
    try:
        torch.set_rng_state(state[f"cpu{suffix}"])
        if f"cuda{suffix}" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state[f"cuda{suffix}"])
    except (KeyError, RuntimeError, TypeError) as error:
        raise UserError("The checkpoint's RNG state is invalid.") from error


@torch.no_grad()
def largest_of_state(optimizer: Optimizer, order: float = math.inf) -> Tensor:
    """The largest norm of a weight or moment that is here: float32, 0-dim; not finite if an element
    is not. With `order` infinity that is the largest element; 2 is faster on a CPU and at least as
    large, but infinite from elements of 2^64 on."""
    tensors = [weight for group in optimizer.param_groups for weight in group["params"]]
    tensors += [value for kept in optimizer.state.values() for value in plain(kept).values()]
    # Codes of 8 bits are bounded; where what they stood for was not, their scale is not finite.
    parts = [local_shard(tensor) for tensor in tensors if tensor.dtype.itemsize > 1]
    parts = [part for part in parts if part.ndim and part.numel()]
    return torch.stack(torch._foreach_norm(parts, ord=order)).max()


@torch.no_grad()
def restore_weights(model: GPT, weights: Group) -> None:
    """Put the weights of a checkpoint into a model, padded as the model wants it. Raises a
    UserError if one is missing, left over, of another shape or dtype, or not finite; then all are
    as they were."""
    parameters = dict(model.named_parameters())
    _check(parameters, weights, model)
    for name, parameter in parameters.items():
        copy_into(parameter, _saved(weights, name, parameter, model))


def _like_moments(parameters: Mapping[str, Tensor], optimizer: Optimizer) -> dict[str, Tensor]:
    """Tensors shaped like the optimizer's state of each parameter, by name."""
    likes: dict[str, Tensor] = {}
    owners = _owners(optimizer)
    for name, parameter in parameters.items():
        owner = owners[parameter]
        if isinstance(owner, AdamW):
            kept = {"step": torch.zeros(()), "exp_avg": parameter, "exp_avg_sq": parameter}
        else:
            kept = plain(first_state(owner, parameter))
            if isinstance(owner, SGD | Muon):
                kept = dict.fromkeys(kept, parameter)
        likes |= {f"{name}.{key}": like for key, like in kept.items()}
    return likes


def _owners(optimizer: Optimizer) -> dict[Tensor, Optimizer]:
    return {one: part for part in optimizers_in(optimizer) for one in parameters_of(part)}


def _check(likes: Group, saved: Group, model: GPT) -> None:
    """Check that each tensor of `saved` fits the one in `likes`, before any is changed."""
    odd = sorted(likes.keys() ^ saved.keys())
    if odd:
        which = "lacks" if odd[0] in likes else "has a tensor too many,"
        raise UserError(f"The checkpoint {which} '{odd[0]}': it is of another model.")
    for name, like in likes.items():
        values = local_shard(_saved(saved, name, like, model))
        if not (values.float() if values.dtype.itemsize == 1 else values).isfinite().all():
            raise UserError(f"The checkpoint's '{name}' is not finite. Use an older checkpoint.")


def _trim(name: str, tensor: Tensor, model: GPT) -> Tensor:
    """The rows of `tensor` that are here, without those that pad the vocabulary."""
    first, tensor = first_row(tensor), local_shard(tensor)
    if name not in PADDED or not tensor.ndim:
        return tensor
    return tensor[: max(0, model.config.vocabulary - first)]


def _saved(group: Group, name: str, like: Tensor, model: GPT) -> Tensor:
    """The tensor `name` with the rows that `_trim` cut off, checked to be what `like` can take."""
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
