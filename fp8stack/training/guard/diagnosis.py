"""Find the layer and operand in which a bad step first goes wrong, by repeating the step with
hooks. The run is not changed."""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8stack.layers.fsdp import first_row, local_shard
from fp8stack.layers.grouped import GroupedLinear
from fp8stack.layers.observe import all_linears, observing
from fp8stack.layers.shared_amaxes import several_ranks
from fp8stack.training.dataloader import inputs_of, tokens_of
from fp8stack.training.guard.monitor import BadStep
from fp8stack.training.guard.spikes import LARGEST
from fp8stack.training.optim.chained import plain
from fp8stack.training.run import Run

STANDS_OUT = 8.0  # an operand is blamed if its amax is this many times its amax in a good step


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """An operand (input, weight, output, grad_output, grad_input or weight gradient) of a layer,
    given by its module path, and its fault; in a grouped linear, also the group."""

    layer: str
    operand: str
    fault: str
    group: int | None = None

    def __str__(self) -> str:
        group = "" if self.group is None else f".{self.group}"
        return f"{self.layer}{group}, {self.operand} {self.fault}"


class Traced(NamedTuple):
    """An operand of a step: its layer, its name, its amax (float32, 0-dim) and, in a grouped
    linear, its group."""

    layer: str
    operand: str
    amax: Tensor
    group: int | None = None


Trace = list[Traced]
"""Operands in the order of execution."""


def diagnose(run: Run, bad: int, good: int) -> Diagnosis | None:
    """Find the first operand that is not finite (`LARGEST` or more) in the step `bad`; if all are
    finite, the first that is much larger than in the good step `good`. A group is compared with all
    groups of its layer, since it may have had few rows in the good step. None if the step does not
    go wrong again. `run` has to be in its state before the bad step."""
    trace = repeat_step(run, bad)
    amaxes = _to_host(trace)
    for traced, amax in zip(trace, amaxes, strict=True):
        if not amax < LARGEST:
            return _blame(traced, f"is {amax:.3g}" if math.isfinite(amax) else "is not finite")
    usual: dict[tuple[str, str], float] = {}
    good_trace = repeat_step(run, good)
    for traced, amax in zip(good_trace, _to_host(good_trace), strict=True):
        place = traced.layer, traced.operand
        usual[place] = max(amax, usual.get(place, 0.0))
    ratios = []
    for traced, amax in zip(trace, amaxes, strict=True):
        usual_amax = usual.get((traced.layer, traced.operand))
        ratios.append(amax / usual_amax if usual_amax else 0.0)
    worst = max(ratios, default=0.0)
    if not worst >= STANDS_OUT:
        return None
    # The excess grows or shrinks from layer to layer: blame the first of about that size.
    first = next(index for index, ratio in enumerate(ratios) if ratio >= worst**0.5)
    return _blame(trace[first], f"is {ratios[first]:.3g} times its usual")


def find_culprit(run: Run, bad: Sequence[BadStep], left_out: Collection[int]) -> Diagnosis | None:
    """The operand to blame for bad steps in a row: the operand with a bad amax, or else the one
    that `diagnose` finds by comparing the last of them with a step before that was not left out."""
    slot = bad[-1].slot
    if slot is not None:
        layer, operand, group = place_of(slot)
        fault = "has an amax out of all proportion"
        return Diagnosis(layer=layer, operand=operand, fault=fault, group=group)
    before = range(bad[0].step - 1, 0, -1)
    good = next((number for number in before if number not in left_out), 1)
    return diagnose(run, bad[-1].step, good)


def broken_tensor(run: Run) -> str:
    """A clause that names a weight or moment that is not finite (`LARGEST` or more), and in a
    grouped linear the group."""
    linears = all_linears(run.model)
    for name, parameter in run.model.named_parameters():
        state = plain(run.optimizer.state.get(parameter, {}))
        for key, tensor in {"": parameter.detach(), **state}.items():
            if tensor.dtype.itemsize == 1:  # quantized; broken values show in its scales
                continue
            shard = local_shard(tensor)
            largest = float(shard.abs().max()) if shard.numel() else 0.0
            if not largest < LARGEST:
                tensor_name = f"the moment {key} of {name}" if key else name
                if isinstance(linears.get(name.rpartition(".")[0]), GroupedLinear):
                    broken = ~(shard.abs().flatten(1).amax(1) < LARGEST)
                    tensor_name += f"[{first_row(tensor) + int(broken.nonzero()[0])}]"
                return f"{tensor_name} contains {largest:.4g}"
    return "a weight or a moment is not finite"


def place_of(slot: str) -> tuple[str, str, int | None]:
    """The layer, the operand and, in a grouped linear, the group of a slot. The slot may be of a
    copy for one GEMM, such as `mlp.up.input.wgrad`."""
    path, _, operand = slot.rpartition(".")
    if operand in ("dgrad", "wgrad"):
        path, _, operand = path.rpartition(".")
    layer, _, number = path.rpartition(".")
    return (layer, operand, int(number)) if number.isdecimal() else (path, operand, None)


def _blame(traced: Traced, fault: str) -> Diagnosis:
    return Diagnosis(layer=traced.layer, operand=traced.operand, fault=fault, group=traced.group)


def _to_host(trace: Trace) -> list[float]:
    """The largest amaxes over all ranks, whose traces list the same operands for their rows of the
    batch."""
    if not trace:
        return []
    amaxes = torch.stack([traced.amax for traced in trace])
    if several_ranks():
        broken = amaxes.isnan().float()
        amaxes_and_nans = torch.stack([amaxes.nan_to_num(0.0, math.inf), broken])
        dist.all_reduce(amaxes_and_nans, dist.ReduceOp.MAX)
        amaxes = amaxes_and_nans[0].where(amaxes_and_nans[1] == 0, math.nan)
    values: list[float] = amaxes.tolist()
    return values


def repeat_step(run: Run, step: int) -> Trace:
    """Run the passes of a step and record every operand's amax, without changing the run."""
    trace: Trace = []
    tokens_BT = tokens_of(run, step).to(run.accelerator.device)

    def record(path: str, layer: nn.Module, operand: str, tensor: Tensor) -> None:
        group = None
        if isinstance(layer, GroupedLinear):
            path, _, number = path.rpartition(".")
            group = int(number)
        trace.append(Traced(path, operand, _amax(tensor), group))

    linears = all_linears(run.model)
    observed = observing(run.model, record, outputs=True, layers=linears)
    with _unchanged(run, step), observed, _others(run.model, record):
        for part_BT in tokens_BT.chunk(run.config.accumulate):
            loss = run.model(*inputs_of(part_BT))
            trace.append(Traced("loss", "output", _amax(loss)))
            if run.scaler is not None:
                loss = run.scaler.scale(loss)
            (loss / (run.config.accumulate * run.ranks.count)).backward()
        for name, parameter in reversed(list(run.model.named_parameters())):
            if parameter.grad is not None:
                layer, _, key = name.rpartition(".")
                is_grouped = isinstance(linears.get(layer), GroupedLinear)
                # Also the parameters, which are not observed where they are gathered in FP8.
                for operand, tensor in ((f"{key} gradient", parameter.grad), (key, parameter)):
                    if is_grouped:
                        for group, amax in enumerate(_amaxes_of_groups(tensor)):
                            trace.append(Traced(layer, operand, amax, group))
                    else:
                        trace.append(Traced(layer, operand, _amax(tensor)))
    return trace


def _amax(x: Tensor) -> Tensor:
    """The largest magnitude; NaN if an element is NaN."""
    x = local_shard(x.detach())
    return x.abs().amax().float() if x.numel() else torch.zeros((), device=x.device)


def _amaxes_of_groups(x: Tensor) -> Tensor:
    """The `_amax` of each group of a parameter's gradient [groups, ...], 0 for the groups that are
    on other ranks: [groups]."""
    shard = local_shard(x.detach())
    amaxes = torch.zeros(len(x), device=shard.device)
    start = first_row(x)
    amaxes[start : start + len(shard)] = shard.flatten(1).abs().amax(1).float()
    return amaxes


@contextmanager
def _unchanged(run: Run, step: int) -> Iterator[None]:
    """A context in which `step` is the next step; at the end, restore FP8 state, gradients, RNG and
    counters."""
    delayed, device = run.backend.delayed, run.accelerator.device
    snapshot = None if delayed is None else delayed.snapshot()
    drawn = run.backend.draws.state_dict()
    gemms = run.backend.fp8_gemms()
    now, run.state.step = run.step, step - 1
    try:
        on_gpu = device.type != "cpu"
        gpu: dict[str, Any] = {"devices": [device], "device_type": device.type} if on_gpu else {}
        with torch.random.fork_rng(**gpu or {"devices": []}):
            yield
    finally:
        run.state.step = now
        run.optimizer.zero_grad(set_to_none=True)
        if delayed is not None and snapshot is not None:
            delayed.copy_amaxes_in()  # which empties a library's buffers
            delayed.restore(snapshot, torch.ones((), dtype=torch.bool, device=device))
        run.backend.draws.load_state_dict(drawn)
        run.backend.weights.mark_changed()  # so that the next step quantizes the weights again
        run.backend.fp8_gemms()
        run.backend.gemm_count = gemms


@contextmanager
def _others(model: nn.Module, record: Any) -> Iterator[None]:
    """A context that calls `record` for layers that are not linear but have parameters, such as
    norms and embeddings."""
    linears = all_linears(model).values()

    def hook(path: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for operand, tensor in (("input", args[0] if args else None), ("output", output)):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                record(path, module, operand, tensor)
        if isinstance(output, Tensor) and output.requires_grad:
            on_gradient = partial(record, path, module, "grad_output")
            output.register_hook(on_gradient)  # type: ignore[no-untyped-call]

    handles = [
        module.register_forward_hook(partial(hook, path))
        for path, module in model.named_modules()
        if module not in linears and any(True for _ in module.parameters(recurse=False))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
