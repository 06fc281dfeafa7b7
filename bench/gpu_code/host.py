"""The host's time in a training step, on this machine's CPU, with launches that do nothing.

Python runs as it does on a GPU: forward hooks, the guard, the code that inductor wrote, Triton's
dispatch of our kernels. Code that a CUDA graph would record runs in the first steps; its replays do
nothing. The model is very narrow, and its tensors are on the CPU, where torch's single operators
run.

Import this module after `pretend`.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from triton.compiler import CompiledKernel

from bench.gpu_code.blocks import GEMMS, Program, compile_for_gpu
from fp8stack.layers import build_backend
from fp8stack.layers import torch as torch_backend
from fp8stack.layers.kernels import fused_casts, replay, scaled_gemm
from fp8stack.layers.kernels import variants as kernels
from fp8stack.layers.kernels.scaled_gemm import Scaled
from fp8stack.model.config import load_config, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.planning.run_config import GuardConfig
from fp8stack.precision import load_recipe
from fp8stack.precision.hardware import machine_for
from fp8stack.training.guard.monitor import Monitor

NARROW = {"width": 128, "heads": 2, "vocabulary": 256, "context": 128}
WARM_UP = replay.EAGER + 3  # steps after which nothing is compiled or recorded
CALLS = 100  # calls of an operator that are timed together

Timed = Callable[[str], Any]
"""A context manager that adds its time to a part."""


@dataclass(frozen=True, kw_only=True)
class HostTime:
    """The host's time for a part of a step of one micro-batch.

    Attributes:
        part: "weights", the casts before the first pass; "amaxes", the update of the history and
            the scales; "guard", the judging of the step; "forward" and "backward" of a compiled
            block, without torch.compile's work before and after the generated code.
        ms: milliseconds in the fastest step.
        calls: `ms` in units of a call of a small operator of torch, the fastest meanwhile.
        launches: launches of kernels and graphs, without single operators of torch.
    """

    part: str
    ms: float
    calls: float
    launches: int


def host_times(model: str, recipe: str, capability: str, *, steps: int = 500) -> list[HostTime]:
    """The host's time for each part of a step.

    Args:
        model: the name of a preset, which sets the number of blocks.
        recipe: a recipe whose weights one kernel casts.
        capability: the compute capability of the pretended GPU.
        steps: the number of steps to time.
    """
    config = load_config(model, NARROW)
    plan = plan_for(config, load_recipe(recipe), machine_for(capability, te=False))
    one_block = config.model_copy(update={"layers": 1})
    programs = [
        p for p in compile_for_gpu(one_block, plan, config.context)[1] if p.model_part == "block"
    ]
    took: dict[str, list[float]] = defaultdict(list)
    launches: Counter[str] = Counter()  # by part
    current_part = ""

    def launch(*args: Any, **options: Any) -> None:
        launches[current_part] += 1

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        nonlocal current_part
        current_part, start = name, time.perf_counter()
        yield
        spent[name] += time.perf_counter() - start

    number = torch.ones(())
    with _launching(launch):
        run_outside = _outside_blocks(GPT(config, build_backend(plan)), timed)
        passes = [_bound(program, launch) for program in programs]
        for step in range(WARM_UP + steps):
            spent: defaultdict[str, float] = defaultdict(float)
            launches.clear()
            run_outside(step)
            for name, run in zip(("forward", "backward"), passes, strict=True):
                with timed(name):
                    run()
            with timed("call"):
                for _ in range(CALLS):
                    number.mul_(number)
            for name in spent if step >= WARM_UP else ():
                took[name].append(spent[name])
    call = min(took.pop("call")) / CALLS
    return [
        HostTime(
            part=name,
            ms=round(1000 * min(samples), 4),
            calls=round(min(samples) / call, 1),
            launches=launches[name],
        )
        for name, samples in took.items()
    ]


def _outside_blocks(gpt: GPT, timed: Timed) -> Callable[[int], None]:
    """The work of a step outside the blocks that does not depend on the number of tokens."""
    delayed = gpt.backend.delayed
    gpt.backend.weights.only_tracked_changes = True  # as in a run
    monitor = Monitor(torch.optim.AdamW(gpt.parameters(), fused=True), GuardConfig(), delayed)
    loss, norm = torch.ones(()), torch.ones(())

    def step(number: int) -> None:
        gpt.backend.weights.mark_changed()  # as an optimizer does
        with timed("guard"):
            monitor.begin()
        for hook in gpt._forward_pre_hooks.values():
            owner: object = getattr(hook, "__self__", gpt)
            with timed("amaxes" if owner is delayed else "weights"):
                hook(gpt, ())
        if delayed is not None:
            with timed("amaxes"):
                delayed._after_forward(gpt, (), loss)
                delayed.apply_pending_update()
        with timed("guard"):
            monitor.judge(number, loss, norm)

    return step


def _bound(program: Program, launch: Callable[..., None]) -> Callable[[], None]:
    """A function that runs the code of a pass on its inputs, and calls `launch` in place of
    inductor's kernels and GEMMs."""
    kernel = SimpleNamespace(run=launch)
    with patch.object(AsyncCompile, "triton", lambda *source, **options: kernel):
        module: Any = PyCodeCache.load(program.code)
    module.empty_strided_cuda = module.empty_strided_cpu
    module.extern_kernels = SimpleNamespace(**dict.fromkeys(GEMMS, launch))
    inputs = [_on_cpu(value) for value in program.inputs]

    def run() -> None:
        module.call([*inputs])

    return run


def _on_cpu(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


@contextmanager
def _launching(launch: Callable[..., None]) -> Iterator[None]:
    """A context in which the CPU counts as a GPU, and `launch` replaces our kernels and graphs."""
    graph = SimpleNamespace(replay=launch)

    def load(kernel: Any) -> None:
        kernel._run = launch

    def gemm(a: Scaled, b: Scaled, out_dtype: torch.dtype) -> Tensor:
        launch()
        return torch.empty(len(a.data), len(b.data), dtype=out_dtype)

    with (
        patch.object(torch_backend, "is_castable_in_batch", lambda weight: True),
        patch.object(fused_casts, "has_kernel", lambda device: True),
        patch.object(kernels, "has_kernel", lambda device: True),
        patch.object(scaled_gemm, "_by_blocks", gemm),
        patch.object(replay, "records", lambda device: True),
        patch.object(torch.cuda, "CUDAGraph", lambda: graph),
        patch.object(torch.cuda, "graph", lambda graph, **options: nullcontext()),
        patch.object(CompiledKernel, "_init_handles", load),
    ):
        yield
