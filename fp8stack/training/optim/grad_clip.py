"""Gradient clipping: by the global norm, by entry, or by a limit that adapts to earlier norms.
Clipping does not wait for the device."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from fp8stack.common.errors import UserError
from fp8stack.training.distributed.parallelize import full_tensor
from fp8stack.training.optim.chained import optimizers_in, parameters_of
from fp8stack.training.optim.grad_scaler import is_unscaled

Mode = Literal["norm", "value", "adaptive"]
_EPS = 1e-6  # torch's clipping adds it to the norm
FEWEST = 10  # with fewer norms, the percentile is no limit


class NormHistory:
    """The gradient norms of the last good steps, the newest `size` of them, on the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._window = torch.full((size,), torch.nan, dtype=torch.float64, device=device)

    def percentile(self, percent: float) -> Tensor:
        """The percentile of the norms, with linear interpolation: float32, 0-dim; infinite while
        there are fewer than 10 norms."""
        ordered = self._window.sort().values  # NaN comes last
        count = self._window.isfinite().sum()
        place = (count - 1).clamp(min=0) * (percent / 100)
        below, above = place.floor().long(), place.ceil().long()
        low, high = ordered.gather(0, torch.stack([below, above]))
        value = low + (high - low) * (place - below)
        return torch.where(count >= FEWEST, value, torch.inf).float()

    def add(self, norm: Tensor, is_good: Tensor) -> None:
        """Add the norm of a step if the step is good; both arguments are 0-dim."""
        moved = torch.cat([self._window[1:], norm.to(self._window)[None]])
        self._window.copy_(torch.where(is_good & norm.isfinite(), moved, self._window))

    def state(self) -> list[float]:
        """The norms, oldest first. This waits for the device."""
        norms: list[float] = self._window[self._window.isfinite()].tolist()
        return norms

    def load_state(self, norms: Sequence[float]) -> None:
        """Restore a `state`; only its newest norms if the window is smaller now."""
        keep_newest(self._window, norms, torch.nan)


def keep_newest(window: Tensor, values: Sequence[Any], missing: float) -> None:
    """Put the newest of `values`, which are oldest first, at the end of a window, and fill the rest
    with `missing`."""
    newest = values[-len(window) :]
    window.fill_(missing)
    if newest:
        window[-len(newest) :] = window.new_tensor(newest)


def clip_gradients(
    optimizer: Optimizer,
    limit: float | Tensor,
    mode: Mode = "norm",
    scaler: torch.amp.GradScaler | None = None,
    order: Iterable[Tensor] | None = None,
    *,
    as_taken: bool = False,
) -> Tensor:
    """Clip the gradients of `optimizer` in place.

    If a member of a ChainedOptimizer has a gradient that is not finite, the gradients of the other
    members are clipped as if it had none.

    Args:
        limit: the limit of the global norm, or, in mode "value", of the magnitude of each entry; 0
            for no limit. In mode "adaptive", a 0-dim float32 tensor, see `adaptive_limit`.
        scaler: the loss scaler, if there is one; its `unscale_` must have been called before.
        order: the parameters in the order in which their norms are added up, such as the model's
            order. None for the optimizer's order.
        as_taken: whether torch's fused optimizers scale the gradients in their step. This saves a
            pass over all gradients; the last bit may differ, since the optimizers divide.

    Returns:
        The norm of the gradients of each optimizer before clipping: float32 [optimizers].

    Raises:
        UserError: the gradients are still multiplied by the loss scale.
    """
    members = optimizers_in(optimizer)
    if scaler is not None and not all(is_unscaled(scaler, member) for member in members):
        raise UserError(
            "Unscale first: the gradients are still multiplied by the loss scale. Call "
            "scaler.unscale_(optimizer) before they are clipped."
        )
    parameters = [parameters_of(member) for member in members]
    if order is not None:
        ranked = {id(p): place for place, p in enumerate(order)}
        parameters = [sorted(params, key=lambda p: ranked[id(p)]) for params in parameters]
    norms = [
        get_total_norm([p.grad for p in params if p.grad is not None]) for params in parameters
    ]
    member_norms = (
        full_tensor(norms[0])[None]
        if len(norms) == 1
        else torch.stack([full_tensor(n) for n in norms])
    )
    # The norm over all members whose gradients are finite.
    norm = (
        norms[0] if len(members) == 1 else _norm(member_norms.where(member_norms.isfinite(), 0.0))
    )
    for member, params in zip(members, parameters, strict=True):
        if not isinstance(limit, Tensor) and not limit:
            continue
        # `_step_supports_amp_scaling` and `grad_scale` are torch's names, see torch.optim.adam.
        if as_taken and mode != "value" and getattr(member, "_step_supports_amp_scaling", False):
            excess = (full_tensor(norm) + _EPS) / limit
            member.grad_scale = excess.clamp(min=1.0)  # type: ignore[attr-defined]
        elif mode == "value":
            clip_grad_value_(params, float(limit))
        elif isinstance(limit, Tensor):  # torch's function would read the limit on the host
            clip_grads_with_norm_(params, 1.0, full_tensor(norm) / limit)
        else:
            clip_grads_with_norm_(params, limit, norm)
    return member_norms


def total_norm(norms: Tensor) -> Tensor:
    """The norm of all gradients, from the norms of the optimizers: [optimizers] -> 0-dim."""
    return norms[0] if len(norms) == 1 else _norm(norms)


def adaptive_limit(norms: NormHistory, percentile: float, ceiling: float = 0.0) -> Tensor:
    """The limit of adaptive clipping: the percentile of earlier norms, at most `ceiling` unless it
    is 0. float32, 0-dim, on the device."""
    smallest = torch.finfo(torch.float32).tiny  # clipping divides by the limit
    return norms.percentile(percentile).clamp(smallest, ceiling or math.inf)


def _norm(values: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values)
    return norm
