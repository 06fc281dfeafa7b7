"""What a real training pass computes in: hooks on modules and on torch's dispatcher.

An operation of the backward pass belongs to the module whose forward pass made its autograd node:
nodes are numbered in the order in which they are made. It must not know a plan.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8stack.backends.emulate import EmulatedLinear, Gemm
from fp8stack.backends.torch import ScaledLinear
from fp8stack.formats import Operand

SHORT = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
GEMMS = ("aten.mm.", "aten.addmm.", "aten._scaled_mm.")
# What moves data, makes it, or asks about it.
MOVES = (
    *("view", "_unsafe_view", "t.", "detach", "transpose", "split", "slice", "as_strided", "alias"),
    *("expand", "unsqueeze", "squeeze", "permute", "clone", "empty", "new_empty", "ones_like"),
    *("select", "copy_", "cat", "zeros", "new_zeros", "_local_scalar", "full", "fill_", "arange"),
    *("cos", "sin", "outer", "reshape", "_reshape"),
)
Seen = tuple[str, str, tuple[str, ...], str]
"""Module path, operation, the operands' dtypes, the output's."""


class Recorder(TorchDispatchMode):
    """Records what the passes of `model` that run inside compute in.

    Attributes:
        operations: every operation that ran, under the planner's names.
        casts: how often a module cast from what to what: path, source, target, pass.
        quantized: how often an operand of a linear was quantized: path, operand, pass.
    """

    def __init__(self, model: nn.Module, rows: int) -> None:
        super().__init__()
        self.model = model
        self.rows = rows
        self.operations: set[Seen] = set()
        self.casts: Counter[tuple[str, str, str, str]] = Counter()
        self.quantized: Counter[tuple[str, str, str]] = Counter()
        self._paths = {part: path for path, part in model.named_modules()}
        self._stack = [""]
        self._numbers: list[int] = []
        self._owners: list[str | None] = []  # None: within one operation, such as attention
        self._inside = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Watch until the end of the context."""
        handles: list[Any] = []
        for part in self.model.modules():
            handles.append(part.register_forward_pre_hook(self._enter))
            handles.append(part.register_forward_hook(self._leave))
        patches = [
            mock.patch.object(F, "scaled_dot_product_attention", self._attention()),
            mock.patch.object(Gemm, "__call__", self._gemm()),
            mock.patch.object(EmulatedLinear, "round", self._quantize(EmulatedLinear.round)),
            mock.patch.object(ScaledLinear, "quantize", self._quantize(ScaledLinear.quantize)),
        ]
        try:
            with patches[0], patches[1], patches[2], patches[3], self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    # Where the forward pass is, and which nodes it made there.

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._stack.append(self._paths[module])
        self._mark(self._stack[-1])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()
        self._mark(self._stack[-1])

    def _mark(self, owner: str | None) -> None:
        self._numbers.append(torch.autograd._get_sequence_nr())
        self._owners.append(owner)

    def _place(self) -> tuple[str | None, str]:
        """The module that what runs now belongs to, and the pass."""
        node = torch._C._current_autograd_node()
        if node is None:
            return self._stack[-1], "forward"
        if "AccumulateGrad" in node.name():
            return "step", "backward"
        return self._owners[bisect_right(self._numbers, node._sequence_nr()) - 1], "backward"

    # Operations that are one, whatever runs within them.

    def _attention(self) -> Any:
        real = F.scaled_dot_product_attention

        def attention(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
            path = self._stack[-1]
            self._mark(None)
            self._inside += 1
            y = real(q, k, v, **more)
            self._inside -= 1
            self._mark(path)
            self.operations.add((path, "attention", dtypes(q, k, v), dtypes(y)[0]))
            return y

        return attention

    def _gemm(self) -> Any:
        real = Gemm.__call__

        def gemm(this: Gemm, a: Any, b: Any, out_dtype: torch.dtype, **more: Any) -> Tensor:
            self._inside += 1
            operands = tuple(_held(x.values) for x in (a, b))
            y = real(this, a, b, out_dtype, **more)
            self._inside -= 1
            self._note_gemm(operands, y)
            return y

        return gemm

    def _quantize(self, real: Any) -> Any:
        def quantize(this: Any, x: Tensor, name: Operand, *more: Any) -> Any:
            place = self._place()[1]
            self._inside += 1
            made = real(this, x, name, *more)
            quantizers = this.operands.quantizers
            ways = {name: quantizers.along(name), f"{name} across": quantizers.across(name)}
            if ways[name] == ways[f"{name} across"]:  # one cast, however many copies
                del ways[f"{name} across"]
            for way, copy in zip(ways, made, strict=False):
                values = getattr(copy, "values", None)
                is_quantized = copy is not None and (values is None or fp8_of(values) in FP8)
                if is_quantized and ways[way] != "forward":
                    self.quantized[self._paths[this], way, place] += 1
            self._inside -= 1
            return made

        return quantize

    def _note_gemm(self, operands: tuple[str, ...], y: Tensor) -> None:
        path, way = self._place()
        assert path is not None
        backward = "dgrad" if len(y) == self.rows else "wgrad"
        name = "fprop" if way == "forward" else backward
        self.operations.add((path, name, operands, dtypes(y)[0]))

    # Everything else.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func)
        path, way = self._place()
        if path is not None and not self._inside:
            self._note(name, path, way, args, out)
        return out

    def _note(self, name: str, path: str, way: str, args: Any, out: Any) -> None:
        inputs = [x for x in tree_leaves(args) if isinstance(x, Tensor) and x.is_floating_point()]
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point()]
        if name.startswith("aten._to_copy"):
            source, target = dtypes(inputs[0])[0], dtypes(outputs[0])[0]
            if source != target and "float64" not in source:
                self.casts[path, source, target, way] += 1
        elif name.startswith(GEMMS):
            pair = inputs[1:3] if "addmm" in name else inputs[:2]
            self._note_gemm(dtypes(*pair), outputs[0])
        elif inputs and outputs and not name.startswith(tuple(f"aten.{move}" for move in MOVES)):
            found = tuple(sorted(set(dtypes(*inputs))))
            self.operations.add((path, self._kind(name, path), found, dtypes(outputs[0])[0]))

    def _kind(self, name: str, path: str) -> str:
        """What the planner calls an operation, by where it runs."""
        last = path.rpartition(".")[2]
        if path == "step":
            return "gradient accumulation"
        if last.endswith("norm"):
            return "norm"
        if last == "dropout":
            return "dropout" if path == "dropout" else "branch dropout"
        if "sum" in name and last in ("qkv", "output", "up", "down"):
            return "bias gradient"
        known = {"": "positions", "attention": "rope", "mlp": "activation"}
        known |= {"embedding": "embedding", "loss": "loss"}
        return known.get(last, "residual" if last.isdecimal() else name)


def dtypes(*tensors: Tensor) -> tuple[str, ...]:
    """The tensors' dtypes as the planner spells them."""
    return tuple(SHORT.get(x.dtype, str(x.dtype)) for x in tensors)


FP8 = ("e2m1", "e5m2", "e4m3")


def fp8_of(values: Tensor) -> str:
    """The format whose significands `values` have, whatever powers of two scale them: E2M3's are
    those of E4M3, E3M2's those of E5M2. Scales in E4M3 make six bits of the two of E2M1."""
    mantissas = values.float().abs().frexp().mantissa  # [0.5, 1)
    for bits, name in ((2, "e2m1"), (3, "e5m2"), (4, "e4m3"), (6, "e2m1"), (8, "bf16")):
        if torch.equal(mantissas * 2**bits, (mantissas * 2**bits).round()):
            return name
    return ""


def _held(values: Tensor) -> str:
    """What operands are and what they are held in, as the planner spells it."""
    dtype, name = dtypes(values)[0], fp8_of(values)
    return dtype if name in ("", dtype) else f"{name} in {dtype}"
