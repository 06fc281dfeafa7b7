"""A model's blocks, or a whole model, compiled for a pretended GPU: the kernels, and the bytes that
they move.

Import this module after `pretend`: inductor looks for the GPU when it is imported.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Set
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
from torch._inductor.loop_body import LoopBody, MemoryUsageType
from torch._inductor.scheduler import (
    BaseSchedulerNode,
    ExternKernelSchedulerNode,
    NopKernelSchedulerNode,
)
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.gpu_code import TOKENS
from bench.gpu_code.gemms import ScaledGemm, scaled_gemms
from bench.gpu_code.pretend import CUDA
from fp8stack.layers import build_backend, compiler
from fp8stack.layers import torch as torch_backend
from fp8stack.layers.kernels import weight_casts as many_weights
from fp8stack.layers.kernels.variants import KernelVariant
from fp8stack.model.config import GPTConfig, load_config, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.precision import Plan, load_recipe
from fp8stack.precision.hardware import machine_for

Kind = Literal["generated", "ours", "GEMM", "attention", "other"]
GEMMS = ("mm", "addmm", "bmm", "_scaled_mm", "_scaled_mm_v2", "mx_gemm")
_CONTIGUOUS = tuple(f"fp8stack::{name}" for name in ("cast_product", "product_amax"))
"""The operators that copy an operand that is not contiguous before they read it."""
_WITHOUT_KERNEL = tuple(
    f"aten::{name}" for name in ("empty", "new_empty", "detach", "_unsafe_view")
)
_MOVES = {
    *("load", "store", "to_dtype_bitcast", "index_expr", "value_expr", "constant"),
    *("masked", "where", "ge", "lt", "and_", "output"),
}
"""The operations of a loop that moves elements, from several tensors or between padding."""
_SOURCE = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str", re.DOTALL)
_STORE = re.compile(r"st\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)")


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One launch.

    Attributes:
        part: "block" or "loss", or the whole "model", which are compiled, or "weights", which runs
            once before the first pass of a step, eager or compiled.
        backward: whether the kernel belongs to the backward pass.
        kind: "generated" by inductor; "ours", an operator of fp8stack; a GEMM; attention; or
            another operator of torch.
        name: the name of the operator, or of the fused operators.
        bytes: the bytes read and written; each tensor counts once.
        copies: the number of tensors that are copied in the same order: only strides, padding or
            the name of the dtype change. 0 for eager code.
        waits: whether the host waits for the device, for a copy between the two.
        store: the bytes of the narrowest store in the PTX, for the autotuner's variant where they
            are most; 0 if inductor does not generate the kernel, or if stores are not analyzed.
    """

    part: str = "weights"
    backward: bool = False
    kind: Kind
    name: str
    bytes: int
    copies: int = 0
    waits: bool = False
    store: int = 0


def plan_of(model: str, recipe: str, capability: str) -> Plan:
    """The plan of the model on such a GPU, without Transformer Engine."""
    machine = machine_for(capability, te=False)
    return plan_for(load_config(model), load_recipe(recipe), machine)


@dataclass(frozen=True, kw_only=True)
class Program:
    """The Python code that launches the kernels of the forward or backward pass of a part of the
    model, see `Kernel`, and its inputs, which are mostly fake tensors."""

    model_part: str
    code: str
    inputs: list[Any]


def kernels_of(
    model: str, plan: Plan, *, stores: bool = True, as_one_graph: bool = False
) -> list[Kernel]:
    """The kernels of one block and of the loss, forward and backward, in a training pass of 8,192
    tokens, and the kernels that run before the first pass of a step.

    Args:
        model: the name of a preset.
        plan: a plan for the layers of the model.
        stores: whether to determine `Kernel.store`, which doubles the time.
        as_one_graph: whether to compile the model, with two blocks, as one graph instead.

    Raises:
        RefusedGemmError: torch's meta function refuses a scaled GEMM of the code.
    """
    config = load_config(model, {"layers": 1 + as_one_graph})
    kernels, programs = compile_for_gpu(
        config, plan, TOKENS, stores=stores, as_one_graph=as_one_graph
    )
    scaled_gemms(programs)
    return kernels


def scaled_gemms_of(model: str, plan: Plan) -> list[ScaledGemm]:
    """The scaled GEMMs of the code whose kernels `kernels_of` counts.

    Raises:
        RefusedGemmError: torch's meta function refuses one of them.
    """
    torch.compiler.reset()  # several plans may be compiled in one process
    config = load_config(model, {"layers": 1})
    return scaled_gemms(compile_for_gpu(config, plan, TOKENS)[1])


def compile_for_gpu(
    config: GPTConfig, plan: Plan, tokens: int, *, stores: bool = False, as_one_graph: bool = False
) -> tuple[list[Kernel], list[Program]]:
    """The kernels, see `kernels_of`, and the programs of the parts, in the order in which they
    ran."""
    launched: list[Kernel] = []
    programs: list[Program] = []
    current_part = "weights"

    def compiled(graph: GraphLowering) -> Any:
        """Replaces `compile_to_module`: calls record the kernels, and return tensors without
        values."""
        with _kernels_by_node() as names:
            code = graph.codegen()[0].value
        widths = dict(_widths(code)) if stores else {}
        kernels = list(_launches(graph, {node: widths.get(names[node], 0) for node in names}))
        outputs = fake_outputs(graph)

        def call(inputs: list[Any]) -> list[Any]:
            launched.extend(replace(kernel, part=current_part) for kernel in kernels)
            programs.append(Program(model_part=current_part, code=code, inputs=[*inputs]))
            inputs.clear()
            return outputs()

        return SimpleNamespace(call=call, __file__="", key="")

    context = config.context
    with (
        patch.object(GraphLowering, "compile_to_module", compiled),
        patch.object(
            torch_backend, "is_castable_in_batch", lambda weight: True
        ),  # fake ones stand for those
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        with CUDA:
            gpt = GPT(config, build_backend(plan))
            gpt.backend.weights.only_tracked_changes = True  # as in a run
            shape, stream = (tokens // context, context), gpt.backend.residual_dtype
            x = torch.empty(*shape, config.width, dtype=stream, requires_grad=True)
            targets = torch.empty(shape, dtype=torch.int64)
        rotation = None
        if config.positions != "learned":
            rotation = tuple(rows[:context, None] for rows in gpt._rotation(CUDA))
        if as_one_graph:
            current_part = "model"
            compiler.compiled(gpt, "inductor")(targets, targets).backward()
            return launched, programs
        gpt.compile_blocks()
        for _ in range(2):  # the first allocates the casts
            launched.clear()
            gpt.backend.weights.mark_changed()  # as an optimizer does
            before = Launches()
            with patch.object(many_weights, "launch_weights", before.launched), before:
                for hook in gpt._forward_pre_hooks.values():
                    hook(gpt, ())
        launched += before.kernels
        current_part = "block"
        gpt.blocks[0](x, rotation).sum().backward()
        current_part = "loss"
        gpt.loss(gpt.final_norm, gpt.lm_head, x, targets).backward()
    return launched, programs


def fake_outputs(graph: GraphLowering) -> Callable[[], list[Any]]:
    """A function that gives new tensors like the outputs of a graph."""
    gave = graph.orig_gm.graph.find_nodes(op="output")[0].args[0]
    values = [getattr(node, "meta", {}).get("val") for node in gave]
    outputs = [*graph.graph_outputs]
    return lambda: [*map(_like, values, outputs)]


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
    """A context that collects the names of the kernels that inductor defines, by the scheduler
    nodes in them."""
    names: dict[str, str] = {}
    define: Any = TritonScheduling.define_kernel

    def defined(self: Any, source: str, nodes: list[Any], kernel: Any) -> str:
        name: str = define(self, source, nodes, kernel)
        names.update({n.get_name(): name for n in nodes if isinstance(n, BaseSchedulerNode)})
        return name

    with patch.object(TritonScheduling, "define_kernel", defined):
        yield names


def _launches(graph: GraphLowering, widths: dict[str, int]) -> Iterator[Kernel]:
    """The kernels of a graph; `widths` has `Kernel.store` by scheduler node."""
    for node in graph.scheduler.nodes:
        if isinstance(node, NopKernelSchedulerNode):
            continue
        kind, name = _what(node)
        if name == "MultiOutput":  # selects an output of another node
            continue
        yield Kernel(
            backward=graph.is_backward,
            kind=kind,
            name=name,
            bytes=node.get_read_write_buffers_sizes(),
            copies=_copies(node, name, graph.removed_buffers | graph.inplaced_to_remove),
            waits=name == "DeviceCopy",
            store=max((widths.get(member.get_name(), 0) for member in node.get_nodes()), default=0),
        )


def _copies(node: BaseSchedulerNode, name: str, removed: Set[str]) -> int:
    """`Kernel.copies`; `removed` has the buffers that are not in memory."""
    if isinstance(node, ExternKernelSchedulerNode):
        kernel: Any = node.node
        operands = kernel.inputs if name.startswith(_CONTIGUOUS) else ()
        return sum(not operand.get_layout().is_contiguous() for operand in operands)
    copies: Counter[frozenset[str]] = Counter()  # by what they copy
    for member in node.get_nodes():
        body = getattr(member, "_body", None)
        if body is not None and _moves_in_order(body) and not member.get_buffer_names() <= removed:
            copies[frozenset(x.name for x in member.read_writes.reads)] += 1
    # The first copy of a buffer that is not in memory is the buffer.
    return sum(count - (sources <= removed) for sources, count in copies.items())


def _moves_in_order(body: LoopBody) -> bool:
    """Whether loops write elements as they read them and in the same order, not transposed."""
    loops = [loop for loop, size in body.var_ranges.items() if size > 1]

    def orders(usage: MemoryUsageType) -> list[list[int]]:
        """The loops from inside to outside, for each tensor; empty if it is read repeatedly."""
        indices = [body.indexing_exprs[entry.index_name] for entry in body.memory_usage[usage]]
        plain = [index.expand(identity=True) for index in indices]
        strides = [V.graph.sizevars.stride_vars(index, loops, loops) for index in plain]
        return [[] if 0 in x else sorted(range(len(loops)), key=x.__getitem__) for x in strides]

    reads, writes = orders(MemoryUsageType.LOAD), orders(MemoryUsageType.STORE)
    moves = bool(loops and reads) and body.op_counts.keys() <= _MOVES
    return moves and all(order == writes[0] for order in reads)


def _what(node: BaseSchedulerNode) -> tuple[Kind, str]:
    """The kind and the name of a kernel."""
    if not isinstance(node, ExternKernelSchedulerNode):
        ir_nodes: list[Any] = [
            member.node for member in node.get_nodes() if member.node is not None
        ]
        origins = [origin.name for member in ir_nodes for origin in member.origins]
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
    """Yield the name and `Kernel.store` of each Triton kernel in a wrapper's code."""
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
    """Records the kernels that eager code runs before a pass: operators other than views and
    allocations, and the kernel that casts many weights, which cannot run because fake tensors have
    no addresses."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[Kernel] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether compiled code stays compiled in this mode."""
        return True

    def launched(self, tiles: int, operands: Any, variant: KernelVariant, options: Any) -> None:
        """Replaces the kernel that casts many weights, and records it."""
        elements = tiles * variant.rows * variant.columns
        element_bytes = variant.dtype.primitive_bitwidth // 8 + 2 * (variant.scales != "none")
        self.kernels.append(Kernel(kind="ours", name="weights", bytes=elements * element_bytes))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gave = func(*args, **(kwargs or {}))
        if not (func.is_view or func.name().startswith(_WITHOUT_KERNEL)):
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
