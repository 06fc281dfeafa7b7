"""Where a bad step's trouble shows first: the step is tried again, watched. The run is not changed.
What is found is an operand of a layer, by name."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8stack.backends.delayed import several_ranks
from fp8stack.backends.observe import observing
from fp8stack.checkpoint.sharded import local_shard
from fp8stack.training.dataloader import inputs_of, tokens_of
from fp8stack.training.guard.spikes import LARGEST
from fp8stack.training.run import Run

STANDS_OUT = 8.0  # how many times as large as in a good step an operand must be to be blamed


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """An operand (input, weight, output, grad_output, grad_input or weight gradient) of a layer,
    by its module path, and what is wrong with it."""

    layer: str
    operand: str
    what: str

    def __str__(self) -> str:
        return f"{self.layer}, {self.operand} {self.what}"


Seen = list[tuple[str, str, Tensor]]
"""In the order of execution: layer, operand, amax (float32, 0-dim)."""


def diagnose(run: Run, bad: int, good: int) -> Diagnosis | None:
    """The first operand that is not finite in the step `bad`, or as good as infinite, or, if there
    is none, the first that is much larger than in the step `good`, which went well; None if the
    step does not go wrong again. The run is as before the bad step."""
    seen = _try(run, bad)
    amaxes = _to_host(seen)
    for (layer, operand, _), amax in zip(seen, amaxes, strict=True):
        if not amax < LARGEST:
            what = f"is {amax:.3g}" if math.isfinite(amax) else "is not finite"
            return Diagnosis(layer=layer, operand=operand, what=what)
    usual: dict[tuple[str, str], float] = {}
    seen_before = _try(run, good)
    for (layer, operand, _), amax in zip(seen_before, _to_host(seen_before), strict=True):
        usual[layer, operand] = max(amax, usual.get((layer, operand), 0.0))
    ratios = [
        amax / usual[layer, operand] if usual.get((layer, operand)) else 0.0
        for (layer, operand, _), amax in zip(seen, amaxes, strict=True)
    ]
    worst = max(ratios, default=0.0)
    if not worst >= STANDS_OUT:
        return None
    # It grows or shrinks on its way through the layers: the first of about that size began it.
    first = next(place for place, ratio in enumerate(ratios) if ratio >= worst**0.5)
    layer, operand, _ = seen[first]
    return Diagnosis(layer=layer, operand=operand, what=f"is {ratios[first]:.3g} times its usual")


def _to_host(seen: Seen) -> list[float]:
    """The amaxes, over all ranks: they see the same operands, each of its part of the batch."""
    if not seen:
        return []
    amaxes = torch.stack([amax for _, _, amax in seen])
    if several_ranks():
        broken = amaxes.isnan().float()
        both = torch.stack([amaxes.nan_to_num(0.0, math.inf), broken])
        dist.all_reduce(both, dist.ReduceOp.MAX)
        amaxes = both[0].where(both[1] == 0, math.nan)
    values: list[float] = amaxes.tolist()
    return values


def _try(run: Run, step: int) -> Seen:
    """What the tokens of a step make of every operand; the run is left as it was."""
    seen: Seen = []
    tokens_BT = tokens_of(run, step).to(run.accelerator.device)

    def see(path: str, layer: nn.Module, operand: str, tensor: Tensor) -> None:
        seen.append((path, operand, _amax(tensor)))

    linears = {n: part for n, part in run.model.named_modules() if isinstance(part, nn.Linear)}
    observed = observing(run.model, see, outputs=True, layers=linears)
    eager = torch.compiler.set_stance("force_eager") if run.compiled else nullcontext()
    with _unchanged(run, step), eager, observed, _others(run.model, see):
        for part_BT in tokens_BT.chunk(run.config.accumulate):
            loss = run.model(*inputs_of(part_BT))
            seen.append(("loss", "output", _amax(loss)))
            if run.scaler is not None:
                loss = run.scaler.scale(loss)
            (loss / (run.config.accumulate * run.ranks.count)).backward()
        for name, parameter in reversed(list(run.model.named_parameters())):
            if parameter.grad is not None:
                layer, _, key = name.rpartition(".")
                seen.append((layer, f"{key} gradient", _amax(parameter.grad)))
    return seen


def _amax(x: Tensor) -> Tensor:
    """The largest magnitude; NaN if an element is."""
    x = local_shard(x.detach())
    return x.abs().amax().float() if x.numel() else torch.zeros((), device=x.device)


@contextmanager
def _unchanged(run: Run, step: int) -> Iterator[None]:
    """Be as if `step` were next; put FP8 state, gradients, random state and counters back after."""
    delayed, device = run.backend.delayed, run.accelerator.device
    snapshot = None if delayed is None else delayed.snapshot()
    drawn = run.backend.draws.state_dict()
    gemms = run.backend.fp8_gemms()
    now, run.state.step = run.step, step - 1
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        run.state.step = now
        run.optimizer.zero_grad(set_to_none=True)
        if delayed is not None and snapshot is not None:
            delayed.put_back(snapshot, torch.ones((), dtype=torch.bool, device=device))
        run.backend.draws.load_state_dict(drawn)
        run.backend.weights.mark()  # the next step is again the first with these weights
        run.backend.fp8_gemms()
        run.backend.count_gemms(gemms)


@contextmanager
def _others(model: nn.Module, see: Any) -> Iterator[None]:
    """Show `see` the layers with parameters that are no linears."""

    def show(path: str, part: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for operand, tensor in (("input", args[0] if args else None), ("output", output)):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                see(path, part, operand, tensor)
        if isinstance(output, Tensor) and output.requires_grad:
            hook = partial(see, path, part, "grad_output")
            output.register_hook(hook)  # type: ignore[no-untyped-call]

    handles = [
        part.register_forward_hook(partial(show, path))
        for path, part in model.named_modules()
        if not isinstance(part, nn.Linear) and any(True for _ in part.parameters(recurse=False))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
