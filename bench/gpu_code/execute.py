"""The code that inductor generates for a GPU, run on a CPU and compared with eager code.

A small model trains for one step on a pretended GPU, compiled: its tensors are fake, and each has a
shadow with values on the CPU, see `Shadow`. The generated programs run on the shadows; their
kernels, and fp8stack's own, run in Triton's interpreter.

Import this module after `pretend`, in a process with `TRITON_INTERPRET` set.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import FakeTensor
from triton.runtime.interpreter import InterpretedFunction

from bench.gpu_code.blocks import fake_outputs
from bench.gpu_code.comparison import TOLERANCE, Step, compare
from bench.gpu_code.executed import SMALL, Case
from bench.gpu_code.interpreter import InductorKernel
from bench.gpu_code.operators import CpuOperators
from bench.gpu_code.pretend import CUDA
from bench.gpu_code.shadow import Shadow
from fp8stack.layers import build_backend
from fp8stack.layers import torch as torch_backend
from fp8stack.layers.kernels import (
    attention,
    fused_casts,
    nvfp4,
    scaled_gemm,
    variants,
    weight_casts,
)
from fp8stack.model.config import GPTConfig, load_config, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.precision import Plan, load_recipe
from fp8stack.precision.hardware import machine_for

SIZES = {"layers": 1, "width": 128, "context": 128, "vocabulary": 200}
ATTENTION = 2.0**-6
"""The tolerance for flex attention, which rounds attention weights to bfloat16."""
BFLOAT16 = 2.0**-8
"""The tolerance without FP8: bfloat16 GEMMs of a CPU sum in another order for another layout."""


@dataclass(frozen=True, kw_only=True)
class ProgramRun:
    """A run of a generated program: its code, its inputs before the run, and the step that it
    made, in which the inputs after the run are results as well."""

    code: str
    inputs: list[Any]
    step: Step


def executed(case: Case) -> dict[str, Any]:
    """The fields of the `Comparison` of a case, the kernels that ran, and the seconds that the
    process took."""
    kernels: list[str] = []
    run: Any = InterpretedFunction.run

    def counted(self: Any, *arguments: Any, **options: Any) -> None:
        kernels.append(self.fn.__name__)
        run(self, *arguments, **options)

    reference = eager(case)
    with patch.object(InterpretedFunction, "run", counted):
        step, _ = generated(case)
    plain = BFLOAT16 if load_recipe(case.recipe).quantizers is None else TOLERANCE
    tolerance = ATTENTION if case.documents == "blocks" else plain
    compared = asdict(compare(step, reference, tolerance=tolerance, flips=case.flips))
    return compared | {"kernels": len(kernels), "cpu_s": round(time.process_time(), 1)}


# The step


def train(gpt: GPT, case: Case) -> dict[str, Tensor]:
    """Train for one step: the loss, the gradients, and the state of delayed scaling."""
    gpt.backend.weights.only_tracked_changes = True  # as in a run
    gpt.recompute = "block" if case.recompute else "none"
    device = gpt.embedding.weight.device
    generator = torch.Generator().manual_seed(7)

    def drawn(draw: Callable[..., Tensor], *arguments: Any) -> Tensor:
        return draw(*arguments, generator=generator).to(device)

    with torch.no_grad():
        for name, parameter in gpt.named_parameters():
            size = 0.2 if "norm" in name else 0.1 if name.endswith("bias") else 0.05
            parameter.add_(size * drawn(torch.randn, parameter.shape))
        delayed = gpt.backend.delayed
        if delayed is not None:
            scales = delayed.history.scales
            scales.copy_(drawn(torch.rand, scales.shape) * 60 + 1)
            for slot in delayed.slots.values():
                if slot.operand == "grad_output":
                    scales[slot.column] *= 1000
    tensors: dict[str, Tensor] = {}
    shape = (1, case.tokens)
    for number in range(case.micro_batches):
        tokens, targets = (drawn(torch.randint, gpt.config.vocabulary, shape) for _ in range(2))
        targets[:, :5] = -100
        documents = torch.arange(case.tokens, device=device)[None] // 50
        loss = gpt(tokens, targets, documents if case.documents else None)
        tensors[f"loss {number}"] = loss.detach()
        loss.backward()
    for name, parameter in gpt.named_parameters():
        if parameter.grad is not None:
            tensors[f"gradient of {name}"] = parameter.grad
    if delayed is not None:
        delayed.apply_pending_update()  # else the next pass does
        tensors |= {"amaxes": delayed.history.history, "scales": delayed.history.scales}
    return tensors


def eager(case: Case) -> Step:
    """The step on the CPU, without a compiler and without kernels."""
    config, plan = _planned(case)
    rows = patch.object(scaled_gemm, "_rows_in_float32", lambda data: case.capability == "9.0")
    with rows, CpuOperators() as operators:
        tensors = train(GPT(config, build_backend(plan)), case)
    return Step(tensors=tensors, gemms=operators.gemms)


def generated(case: Case) -> tuple[Step, list[ProgramRun]]:
    """The step on the pretended GPU, and the runs of the programs in it."""
    config, plan = _planned(case)
    operators = CpuOperators()
    shadow = Shadow(operators)
    runs: list[ProgramRun] = []
    blocks = patch.object(attention, "skips_blocks", lambda device: case.documents == "blocks")
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with blocks, fake, shadow, _on_shadows(shadow, runs):
        with CUDA:
            gpt = GPT(config, build_backend(plan))
        gpt.compile_blocks()
        tensors = train(gpt, case)
    results = {name: shadow.real(x) for name, x in tensors.items()}
    return Step(tensors=results, gemms=operators.gemms), runs


def run_again(run: ProgramRun, edit: Callable[[str], str]) -> Step:
    """The step of a program on the same inputs as before, with the sources of its kernels edited.
    Kernels of fp8stack that are patched are the ones that run."""
    operators = CpuOperators()
    inputs = [_copied(x) for x in run.inputs]
    with _kernels_on_the_cpu(), operators:
        results = program(run.code, edit)([*inputs])
    return Step(tensors=_named(inputs, results), gemms=operators.gemms)


def _planned(case: Case) -> tuple[GPTConfig, Plan]:
    config = load_config(case.model, SIZES | SMALL[case.model] | case.sizes)
    machine = machine_for(case.capability, te=False)
    return config, plan_for(config, load_recipe(case.recipe), machine)


# Programs


@contextmanager
def _on_shadows(shadow: Shadow, runs: list[ProgramRun]) -> Iterator[None]:
    """A context in which programs and fp8stack's kernels run on shadows."""

    def compiled(graph: GraphLowering) -> Any:
        code = graph.codegen()[0].value
        run, outputs = program(code), fake_outputs(graph)

        def call(inputs: list[Any]) -> list[Any]:
            values = [shadow.real(x) if isinstance(x, Tensor) else x for x in inputs]
            owners = {_place(x): fake for x, fake in zip(values, inputs, strict=True)}
            inputs.clear()
            with shadow.outside() as operators:
                before = [_copied(x) for x in values]
                first = len(operators.gemms)
                results = run([*values])
                step = Step(tensors=_named(values, results), gemms=operators.gemms[first:])
            runs.append(ProgramRun(code=code, inputs=before, step=step))
            fakes = outputs()
            for place, (fake, result) in enumerate(zip(fakes, results, strict=True)):
                if (key := _place(result)) in owners and key:
                    fakes[place] = owners[key]  # which a later program may change
                elif isinstance(fake, Tensor):
                    shadow.give(fake, result)
            return fakes

        return SimpleNamespace(call=call, __file__="", key="")

    launch = weight_casts.launch_weights

    def launch_weights(tiles: int, operands: Any, *options: Any) -> None:
        with shadow.outside():
            launch(tiles, tuple(map(shadow.real, operands)), *options)

    with (
        patch.object(GraphLowering, "compile_to_module", compiled),
        patch.object(weight_casts, "launch_weights", launch_weights),
        patch.object(torch_backend, "is_castable_in_batch", lambda weight: True),
        patch.object(FakeTensor, "data_ptr", lambda x: shadow.real(x).data_ptr()),
        _kernels_on_the_cpu(),
    ):
        yield


@contextmanager
def _kernels_on_the_cpu() -> Iterator[None]:
    """A context in which fp8stack's kernels run on the CPU, in their variants for the GPU."""
    exact = torch.cuda.get_device_capability() >= (9, 0)
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.cuda, "device", lambda device: nullcontext()))
        for module in (fused_casts, nvfp4, variants):
            stack.enter_context(patch.object(module, "has_kernel", lambda device: True))
            stack.enter_context(patch.object(module, "converts_exactly", lambda device: exact))
        yield


def program(code: str, edit: Callable[[str], str] = str) -> Callable[[list[Any]], Sequence[Any]]:
    """The function that launches the kernels of a program, whose sources are edited."""

    def kernel(self: AsyncCompile, name: str, source: str, **options: Any) -> InductorKernel:
        return InductorKernel(name, edit(source))

    PyCodeCache.cache_clear()  # of programs with other kernels
    with patch.object(AsyncCompile, "triton", kernel):
        module: Any = PyCodeCache.load(code)
    module.empty_strided_cuda = _filled
    run: Callable[[list[Any]], Sequence[Any]] = module.call
    return run


def _filled(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of bytes that kernels have to overwrite."""
    size = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    memory = torch.full((max(0, size) * dtype.itemsize,), 0xAB, dtype=torch.uint8)
    return memory.view(dtype).as_strided(shape, stride)


def _named(inputs: Sequence[Any], outputs: Sequence[Any]) -> dict[str, Tensor]:
    """Copies of the tensors that a program may have written, by name."""
    tensors = {f"input {i}": x for i, x in enumerate(inputs)}
    tensors |= {f"output {i}": x for i, x in enumerate(outputs)}
    return {name: x.clone() for name, x in tensors.items() if isinstance(x, Tensor)}


def _copied(value: Any) -> Any:
    """A copy of a tensor in memory of its own, with the same strides; another value itself."""
    if not isinstance(value, Tensor):
        return value
    memory = value.untyped_storage().clone()  # type: ignore[no-untyped-call]
    return value.new_empty(0).set_(memory, value.storage_offset(), value.shape, value.stride())


def _place(value: Any) -> tuple[Any, ...]:
    """The memory of a tensor, to compare; nothing for other values and empty tensors."""
    if not isinstance(value, Tensor) or not value.numel():
        return ()
    return value.data_ptr(), value.shape, value.stride(), value.dtype
