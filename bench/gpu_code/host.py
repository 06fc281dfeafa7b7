"""The host's time in a training step, on this machine's CPU: what would be launched is not.

Python runs as it does on a GPU: forward hooks, the guard, the code that inductor wrote, Triton's
dispatch of our kernels. What a CUDA graph records there runs in the first steps, and is replayed as
nothing after them. The model is very narrow, and its tensors are on the CPU, where single operators
of torch compute.

Import it where `pretend` was called.
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
from fp8stack.backends import build_backend
from fp8stack.backends import torch as torch_backend
from fp8stack.config import GuardConfig
from fp8stack.model.config import load_config
from fp8stack.model.gpt import GPT
from fp8stack.ops import fused_casts, kernels, replay, scaled_gemm
from fp8stack.ops.scaled_gemm import Scaled
from fp8stack.precision import load_recipe, resolve
from fp8stack.precision.hardware import machine_for
from fp8stack.training.guard.monitor import Monitor

NARROW = {"width": 128, "heads": 2, "vocabulary": 256, "context": 128}
WARM_UP = replay.EAGER + 3  # steps after which nothing is compiled or recorded any more
CALLS = 100  # of an operator, timed together

Timed = Callable[[str], Any]
"""A context whose time counts for a part."""


@dataclass(frozen=True, kw_only=True)
class HostTime:
    """A part of a step of one micro-batch.

    Attributes:
        part: "weights", cast before the first pass; "amaxes", moved into the history, from which
            scales follow; "guard", which judges the step; a compiled block's "forward" and
            "backward", without what torch.compile does before and after the code that it wrote.
        ms: of the fastest step.
        calls: `ms` in calls of a small operator of torch, the fastest of those meanwhile.
        launches: of kernels and graphs; single operators of torch not counted.
    """

    part: str
    ms: float
    calls: float
    launches: int


def host_times(model: str, recipe: str, capability: str, *, steps: int = 500) -> list[HostTime]:
    """The parts of a step.

    Args:
        model: a preset, which says how many blocks there are.
        recipe: one whose weights one kernel casts.
        capability: of the pretended GPU.
        steps: how many to time.
    """
    config = load_config(model, NARROW)
    plan = resolve(load_recipe(recipe), machine_for(capability, te=False))
    plan = plan.for_layers(config.linear_shapes())
    one_block = config.model_copy(update={"layers": 1})
    programs = [p for p in compile_for_gpu(one_block, plan, config.context)[1] if p.part == "block"]
    took: dict[str, list[float]] = defaultdict(list)
    launches: Counter[str] = Counter()  # by part
    part = ""

    def launch(*args: Any, **options: Any) -> None:
        launches[part] += 1

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        nonlocal part
        part, start = name, time.perf_counter()
        yield
        spent[name] += time.perf_counter() - start

    number = torch.ones(())
    with _launching(launch):
        whole = _outside_blocks(GPT(config, build_backend(plan)), timed)
        passes = [_bound(program, launch) for program in programs]
        for step in range(WARM_UP + steps):
            spent: defaultdict[str, float] = defaultdict(float)
            launches.clear()
            whole(step)
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
            ms=round(1000 * min(found), 4),
            calls=round(min(found) / call, 1),
            launches=launches[name],
        )
        for name, found in took.items()
    ]


def _outside_blocks(gpt: GPT, timed: Timed) -> Callable[[int], None]:
    """What a step runs outside the blocks and does not depend on the number of tokens."""
    delayed = gpt.backend.delayed
    gpt.backend.weights.only_told = True  # as in a run
    if delayed is not None:
        delayed._compiled = True  # as the compiler sets when it traces a block
    monitor = Monitor(torch.optim.AdamW(gpt.parameters(), fused=True), GuardConfig(), delayed)
    loss, norm = torch.ones(()), torch.ones(())

    def step(number: int) -> None:
        gpt.backend.weights.mark()  # as an optimizer does
        with timed("guard"):
            monitor.begin()
        for hook in gpt._forward_pre_hooks.values():
            owner: object = getattr(hook, "__self__", gpt)
            with timed("amaxes" if owner is delayed else "weights"):
                hook(gpt, ())
        if delayed is not None:
            with timed("amaxes"):
                delayed._after_forward(gpt, (), loss)
                delayed.settle()
        with timed("guard"):
            monitor.judge(number, loss, norm)

    return step


def _bound(program: Program, launch: Callable[..., None]) -> Callable[[], None]:
    """The code of a pass, to be called with its inputs, by which `launch` is called instead of
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
    """Within, the CPU counts as a GPU, and `launch` is called for our kernels and for graphs."""
    graph = SimpleNamespace(replay=launch)

    def load(kernel: Any) -> None:
        kernel._run = launch

    def gemm(a: Scaled, b: Scaled, out_dtype: torch.dtype) -> Tensor:
        launch()
        return torch.empty(len(a.data), len(b.data), dtype=out_dtype)

    with (
        patch.object(torch_backend, "_is_plain", lambda weight: True),
        patch.object(fused_casts, "has_kernel", lambda device: True),
        patch.object(kernels, "has_kernel", lambda device: True),
        patch.object(scaled_gemm, "_by_blocks", gemm),
        patch.object(replay, "records", lambda device: True),
        patch.object(torch.cuda, "CUDAGraph", lambda: graph),
        patch.object(torch.cuda, "graph", lambda graph, **options: nullcontext()),
        patch.object(CompiledKernel, "_init_handles", load),
    ):
        yield
