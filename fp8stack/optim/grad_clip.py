"""What bounds gradients before an optimizer takes them: their norm, each entry, or what was usual.
Nothing here waits for the device."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from fp8stack.distributed.parallelize import whole
from fp8stack.errors import UserError
from fp8stack.optim.chained import optimizers_in, parameters_of
from fp8stack.optim.grad_scaler import is_unscaled

Mode = Literal["norm", "value", "adaptive"]
_EPS = 1e-6  # that torch's clipping adds to a norm
FEWEST = 10  # norms that must be known before their percentile is a limit


class Norms:
    """The gradient norms of the last good steps, the newest `size` of them, on the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._window = torch.full((size,), torch.nan, dtype=torch.float64, device=device)

    def percentile(self, percent: float) -> Tensor:
        """The value below which `percent` of the norms lie, linear between two of them: float32,
        0-dim; infinite while there are fewer than 10."""
        ordered = self._window.sort().values  # NaN comes last
        count = self._window.isfinite().sum()
        place = (count - 1).clamp(min=0) * (percent / 100)
        below, above = place.floor().long(), place.ceil().long()
        low, high = ordered.gather(0, torch.stack([below, above]))
        value = low + (high - low) * (place - below)
        return torch.where(count >= FEWEST, value, torch.inf).float()

    def add(self, norm: Tensor, is_good: Tensor) -> None:
        """Take in the norm of a step, unless the step was not good: both 0-dim."""
        moved = torch.cat([self._window[1:], norm.to(self._window)[None]])
        self._window.copy_(torch.where(is_good & norm.isfinite(), moved, self._window))

    def state(self) -> list[float]:
        """The norms, oldest first. This waits for the device."""
        found: list[float] = self._window[self._window.isfinite()].tolist()
        return found

    def load_state(self, norms: Sequence[float]) -> None:
        """Put back what `state` gave; the newest of it, if fewer are kept now."""
        keep_newest(self._window, norms, torch.nan)


def keep_newest(window: Tensor, values: Sequence[Any], missing: float) -> None:
    """Put the newest of `values`, which are in order, at the end of a window, and `missing` before
    them."""
    kept = values[-len(window) :]
    window.fill_(missing)
    if kept:
        window[-len(kept) :] = window.new_tensor(kept)


def clip_gradients(
    optimizer: Optimizer,
    limit: float | Tensor,
    mode: Mode = "norm",
    scaler: torch.amp.GradScaler | None = None,
    order: Iterable[Tensor] | None = None,
    *,
    as_taken: bool = False,
) -> Tensor:
    """Bound the gradients that `optimizer` would take next, in place.

    Where it consists of several and one of those has a gradient that is not finite, the others'
    gradients are bounded as if that one had none.

    Args:
        limit: of the global norm, or, in mode "value", of the magnitude of each entry; 0 is none.
            For "adaptive" a float32 tensor, 0-dim, on the device: what `adaptive_limit` gives.
        scaler: of the loss, if there is one; its `unscale_` must have been called before.
        order: the parameters in the order in which their norms are added up, such as a model's;
            the optimizer's own if left out.
        as_taken: have torch's fused optimizers scale the gradients as they take them: a pass over
            all gradients less, and the last bit may differ, since they divide.

    Returns:
        The norm of the gradients before, by optimizer: float32 [optimizers].

    Raises:
        UserError: the gradients are still multiplied by the loss scale.
    """
    parts = optimizers_in(optimizer)
    if scaler is not None and not all(is_unscaled(scaler, part) for part in parts):
        raise UserError(
            "Unscale first: the gradients are still multiplied by the loss scale. Call "
            "scaler.unscale_(optimizer) before they are clipped."
        )
    parameters = [parameters_of(part) for part in parts]
    if order is not None:
        ranked = {id(parameter): place for place, parameter in enumerate(order)}
        parameters = [sorted(of, key=lambda one: ranked[id(one)]) for of in parameters]
    norms = [get_total_norm([one.grad for one in of if one.grad is not None]) for of in parameters]
    told = whole(norms[0])[None] if len(norms) == 1 else torch.stack([whole(n) for n in norms])
    # Of several: the norm of all gradients but those of optimizers with one that is not finite.
    norm = norms[0] if len(parts) == 1 else _norm(told.where(told.isfinite(), 0.0))
    for part, of in zip(parts, parameters, strict=True):
        # torch's names, see torch.optim.adam.
        if not isinstance(limit, Tensor) and not limit:
            continue
        if as_taken and mode != "value" and getattr(part, "_step_supports_amp_scaling", False):
            excess = (whole(norm) + _EPS) / limit
            part.grad_scale = excess.clamp(min=1.0)  # type: ignore[attr-defined]
        elif mode == "value":
            clip_grad_value_(of, float(limit))
        elif isinstance(limit, Tensor):  # torch's function would read it on the host
            clip_grads_with_norm_(of, 1.0, whole(norm) / limit)
        else:
            clip_grads_with_norm_(of, limit, norm)
    return told


def total_norm(norms: Tensor) -> Tensor:
    """The norm of all gradients from those of the optimizers: [optimizers] -> 0-dim."""
    return norms[0] if len(norms) == 1 else _norm(norms)


def adaptive_limit(norms: Norms, percentile: float, ceiling: float = 0.0) -> Tensor:
    """The limit of adaptive clipping: the percentile of the norms before, and never above the
    ceiling, if that is not 0. float32, 0-dim, on the device."""
    smallest = torch.finfo(torch.float32).tiny  # nothing is divided by 0
    return norms.percentile(percentile).clamp(smallest, ceiling or math.inf)


def _norm(values: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values)
    return norm
