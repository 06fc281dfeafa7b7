"""A model's blocks, compiled for a pretended GPU: which kernels they are, and what these move.

Import it where `pretend` was called: inductor asks for the GPU as it is imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import IRNode
from torch._inductor.scheduler import (
    BaseSchedulerNode,
    ExternKernelSchedulerNode,
    NopKernelSchedulerNode,
)
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.gpu_code import TOKENS
from bench.gpu_code.gemms import ScaledGemm, scaled_gemms
from bench.gpu_code.pretend import CUDA
from fp8stack.backends import build_backend
from fp8stack.backends import torch as torch_backend
from fp8stack.model.config import GPTConfig, load_config
from fp8stack.model.gpt import GPT
from fp8stack.ops import weights as many_weights
from fp8stack.ops.kernels import Variant
from fp8stack.precision import Plan, load_recipe, resolve
from fp8stack.precision.hardware import machine_for

Kind = Literal["generated", "ours", "GEMM", "attention", "other"]
GEMMS = ("mm", "addmm", "bmm", "_scaled_mm", "_scaled_mm_v2", "mx_gemm")
_SOURCE = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str", re.DOTALL)
_STORE = re.compile(r"st\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)")


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One launch.

    Attributes:
        part: "block" or "loss", compiled; "weights": once before the first pass of a step, eager
            or compiled.
        backward: whether it is of the backward pass.
        kind: made by inductor; an operator of fp8stack; a GEMM; attention; another of torch.
        name: of the operator, or of the operators that were fused.
        bytes: read and written, each tensor once.
        waits: whether the host waits for the device, to copy between the two.
        store: the bytes of the narrowest store in the PTX of that of the autotuner's variants where
            it is widest; 0 for what inductor does not generate, or where it was not asked for.
    """

    part: str = "weights"
    backward: bool = False
    kind: Kind
    name: str
    bytes: int
    waits: bool = False
    store: int = 0


def plan_of(model: str, recipe: str, capability: str) -> Plan:
    """What the model runs as on such a GPU, by torch alone."""
    plan = resolve(load_recipe(recipe), machine_for(capability, te=False))
    return plan.for_layers(load_config(model).linear_shapes())


@dataclass(frozen=True, kw_only=True)
class Program:
    """The Python code that launches the kernels of a part's forward or backward pass, and what it
    was called with: fake tensors, for the most part."""

    part: str
    code: str
    inputs: list[Any]


def kernels_of(model: str, plan: Plan, *, stores: bool = True) -> list[Kernel]:
    """The kernels of one block and of the loss, forward and backward, in a pass of 8,192 tokens
    that trains, and of what precedes the first such pass of a step.

    Args:
        model: a preset.
        plan: with its layers decided.
        stores: whether to find `Kernel.store`, which takes as long again.

    Raises:
        RefusedGemmError: torch's meta function refuses a scaled GEMM of the code.
    """
    config = load_config(model, {"layers": 1})
    kernels, programs = compile_for_gpu(config, plan, TOKENS, stores=stores)
    scaled_gemms(programs)
    return kernels


def scaled_gemms_of(model: str, plan: Plan) -> list[ScaledGemm]:
    """The scaled GEMMs of the code that `kernels_of` counts the kernels of.

    Raises:
        RefusedGemmError: torch's meta function refuses one of them.
    """
    torch.compiler.reset()  # several plans may be compiled in one process
    config = load_config(model, {"layers": 1})
    return scaled_gemms(compile_for_gpu(config, plan, TOKENS)[1])


def compile_for_gpu(
    config: GPTConfig, plan: Plan, tokens: int, *, stores: bool = False
) -> tuple[list[Kernel], list[Program]]:
    """See `kernels_of`; and the programs of these parts, in the order in which they ran."""
    found: list[Kernel] = []
    programs: list[Program] = []
    part = "weights"

    def compiled(graph: GraphLowering) -> Any:
        """In place of `compile_to_module`: calls note the kernels, and give tensors without
        values."""
        with _kernels_by_node() as names:
            code = graph.codegen()[0].value
        widths = dict(_widths(code)) if stores else {}
        kernels = list(_launches(graph, {node: widths.get(names[node], 0) for node in names}))
        gave = graph.orig_gm.graph.find_nodes(op="output")[0].args[0]
        values = [getattr(node, "meta", {}).get("val") for node in gave]
        outputs = [*graph.graph_outputs]

        def call(inputs: list[Any]) -> list[Any]:
            found.extend(replace(kernel, part=part) for kernel in kernels)
            programs.append(Program(part=part, code=code, inputs=[*inputs]))
            inputs.clear()
            return [*map(_like, values, outputs)]

        return SimpleNamespace(call=call, __file__="", key="")

    context = config.context
    with (
        patch.object(GraphLowering, "compile_to_module", compiled),
        patch.object(torch_backend, "_is_plain", lambda weight: True),  # fake ones stand for those
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        with CUDA:
            gpt = GPT(config, build_backend(plan))
            gpt.backend.weights.only_told = True  # as in a run
            shape, stream = (tokens // context, context), gpt.backend.residual_dtype
            x = torch.empty(*shape, config.width, dtype=stream, requires_grad=True)
            targets = torch.empty(shape, dtype=torch.int64)
        rotation = None
        if config.positions != "learned":
            rotation = tuple(rows[:context, None] for rows in gpt._rotation(CUDA))
        gpt.compile_blocks()
        for _ in range(2):  # the first makes room
            found.clear()
            gpt.backend.weights.mark()  # as an optimizer does
            before = Launches()
            with patch.object(many_weights, "launch_weights", before.launched), before:
                for hook in gpt._forward_pre_hooks.values():
                    hook(gpt, ())
        found += before.kernels
        part = "block"
        gpt.blocks[0](x, rotation).sum().backward()
        part = "loss"
        gpt.loss(gpt.final_norm, gpt.lm_head, x, targets).backward()
    return found, programs


def _like(value: Any, output: Any) -> Any:
    """A tensor like an output of a graph, whose rows inductor may have padded."""
    if not isinstance(value, Tensor):
        return value
    strides = list(value.stride())
    if isinstance(output, IRNode) and output.has_tensor_output():
        strides = [int(stride) for stride in output.get_stride()]
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=CUDA)


# Compiled


@contextmanager
def _kernels_by_node() -> Iterator[dict[str, str]]:
    """The names of the kernels that inductor defines meanwhile, by scheduler's nodes in them."""
    found: dict[str, str] = {}
    define: Any = TritonScheduling.define_kernel

    def defined(self: Any, source: str, nodes: list[Any], kernel: Any) -> str:
        name: str = define(self, source, nodes, kernel)
        found.update({n.get_name(): name for n in nodes if isinstance(n, BaseSchedulerNode)})
        return name

    with patch.object(TritonScheduling, "define_kernel", defined):
        yield found


def _launches(graph: GraphLowering, widths: dict[str, int]) -> Iterator[Kernel]:
    """The kernels of a graph; `widths` is `Kernel.store` by the scheduler's nodes."""
    for node in graph.scheduler.nodes:
        if isinstance(node, NopKernelSchedulerNode):
            continue
        kind, name = _what(node)
        if name == "MultiOutput":  # names a part of what another gave
            continue
        yield Kernel(
            backward=graph.is_backward,
            kind=kind,
            name=name,
            bytes=node.get_read_write_buffers_sizes(),
            waits=name == "DeviceCopy",
            store=max((widths.get(one.get_name(), 0) for one in node.get_nodes()), default=0),
        )


def _what(node: BaseSchedulerNode) -> tuple[Kind, str]:
    """The kind of a kernel, and a name for it."""
    if not isinstance(node, ExternKernelSchedulerNode):
        made: list[Any] = [one.node for one in node.get_nodes() if one.node is not None]
        origins = [origin.name for one in made for origin in one.origins]
        return "generated", " ".join(dict.fromkeys(origins))
    operator = getattr(node.node, "op_overload", None)
    return _kind(str(operator.name())) if operator else ("other", type(node.node).__name__)


def _kind(operator: str) -> tuple[Kind, str]:
    space, _, name = operator.partition("::")
    if space == "pretended":
        return "attention", operator
    if name.partition(".")[0] in GEMMS:
        return "GEMM", operator
    return ("ours" if space == "fp8stack" else "other"), operator


def _widths(code: str) -> Iterator[tuple[str, int]]:
    """Of each Triton kernel in a wrapper's code its name and `Kernel.store`."""
    for name, source in _SOURCE.findall(code):
        kernel = getattr(PyCodeCache.load(source), name)
        kernel.precompile(warm_cache_only=True)
        narrowest = [
            min(int(count or 1) * int(bits) // 8 for count, bits in _STORE.findall(ptx))
            for ptx in (variant.kernel.asm["ptx"] for variant in kernel.compile_results)
        ]
        yield name, max(narrowest)


# Eager


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What eager code runs before a pass: operators but for views, and the kernel that casts many
    weights, which reads addresses that fake tensors do not have."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[Kernel] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether compiled code runs compiled where this looks on."""
        return True

    def launched(self, tiles: int, operands: Any, how: Variant, options: Any) -> None:
        """In place of the kernel that casts many weights."""
        elements = tiles * how.rows * how.columns
        each = how.dtype.primitive_bitwidth // 8 + 2 * (how.scales != "none")
        self.kernels.append(Kernel(kind="ours", name="weights", bytes=elements * each))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gave = func(*args, **(kwargs or {}))
        if not _is_view(func):
            kind, name = _kind(str(func.name()))
            tensors = [t for t in tree_leaves([args, kwargs, gave]) if isinstance(t, Tensor)]
            self.kernels.append(
                Kernel(
                    kind=kind,
                    name=name,
                    bytes=sum(t.numel() * t.itemsize for t in tensors),
                    waits=len({t.device.type for t in tensors if t.numel()}) > 1,
                )
            )
        return gave


def _is_view(func: Any) -> bool:
    aten = torch.ops.aten
    return bool(func.is_view) or func in (aten.detach.default, aten._unsafe_view.default)
