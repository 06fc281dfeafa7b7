"""Several optimizers with disjoint parameters, combined into one."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Muon, Optimizer

from fp8stack.layers.fsdp import plain_shards

BLOCK = 256  # elements that share a scale in torchao's moments


class ChainedOptimizer(Optimizer):
    """Steps all of `optimizers`, which share no parameter. It shares their groups and state.

    torch's fused optimizers skip a step while their `found_inf` is 1. For other optimizers this
    class skips the step: the host reads `found_inf` in each step, which waits for a GPU.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        super().__init__([parameter for group in groups for parameter in group["params"]], {})
        self.optimizers = tuple(optimizers)
        self.param_groups = groups
        state: defaultdict[Tensor, Any] = defaultdict(dict)
        self.state = state
        for optimizer in optimizers:
            optimizer.state = state

    def step(self, closure: Any = None) -> Any:
        """Step every optimizer that does not skip the step. A closure is not supported."""
        assert closure is None
        for optimizer in self.optimizers:
            found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
            by_itself = getattr(optimizer, "_step_supports_amp_scaling", False)  # torch's name
            if found_inf is not None and not by_itself and bool(found_inf):
                _begin(optimizer)
            else:
                with plain_shards():  # torchao's step is compiled, which takes no other shards
                    optimizer.step()


def optimizers_in(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The members of a ChainedOptimizer; the optimizer itself if it is not chained."""
    return optimizer.optimizers if isinstance(optimizer, ChainedOptimizer) else (optimizer,)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of all groups of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _begin(optimizer: Optimizer) -> None:
    """Create an optimizer's first state, as torch's fused optimizers do in a skipped step: a
    checkpoint needs it."""
    for parameter in parameters_of(optimizer):
        if parameter.grad is not None and not optimizer.state.get(parameter):
            optimizer.state[parameter] = first_state(optimizer, parameter)


def first_state(optimizer: Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """The state of a parameter before the first step of AdamW, SGD, Muon or torchao's AdamW."""
    if isinstance(optimizer, SGD) and not optimizer.defaults["momentum"]:
        return {}
    if isinstance(optimizer, SGD | Muon):
        return {"momentum_buffer": torch.zeros_like(parameter)}
    new_buffer = getattr(optimizer, "_new_buffer", None)  # torchao's, private (0.18)
    if new_buffer is not None:
        first, second = new_buffer(parameter.detach(), True), new_buffer(parameter.detach(), False)
        return {"step": torch.tensor(0.0), "exp_avg": first, "exp_avg_sq": second}
    moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), device=parameter.device), **moments}


def plain(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A parameter's state as plain tensors or DTensors of plain tensors, without copies: a
    quantized tensor of torchao becomes `exp_avg.codes`, `exp_avg.scale` and so on."""
    tensors = {}
    for key, value in state.items():
        local = value.to_local() if isinstance(value, DTensor) else value
        if not hasattr(local, "__tensor_flatten__"):
            tensors[key] = value
            continue
        for name in local.__tensor_flatten__()[0]:
            inner = getattr(local, name)
            # Rows are whole blocks, so that codes and scales are sharded as the rows are.
            is_sharded = isinstance(value, DTensor) and name in ("codes", "scale")
            tensors[f"{key}.{name}"] = _sharded_like(value, inner) if is_sharded else inner
    return tensors


def _sharded_like(like: Any, local: Tensor) -> DTensor:
    """A DTensor with `local` on this rank, whose first dimension is sharded as that of `like`,
    equally."""
    mesh = like.device_mesh
    return DTensor.from_local(local, mesh, like.placements, run_check=False)
