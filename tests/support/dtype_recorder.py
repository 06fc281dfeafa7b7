"""Records the operands of a real training pass's GEMMs, by their values, and its casts, forward and
backward, without reading the plan."""

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

from fp8stack.layers import torch as torch_backend
from fp8stack.layers.emulate import EmulateBackend, EmulatedOperand, emulated_matmul
from fp8stack.layers.linear import QuantizedLayer
from fp8stack.layers.torch import TorchOperand

SHORT = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
GEMMS = ("aten.mm.", "aten.addmm.", "aten._scaled_mm.", "fp8stack.grouped_gemm.")
FP8 = ("e2m1", "e5m2", "e4m3")


class Recorder(TorchDispatchMode):
    """Records the passes of `model` that run in the context, with inputs of linears of so many
    `rows`.

    Attributes:
        gemms: the number of GEMMs by name, operands and output.
        casts: the number of casts by source, target and pass.
        quantized: the number of quantized operands of linears by path, operand and pass.
    """

    def __init__(self, model: nn.Module, *rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.gemms: Counter[tuple[str, tuple[str, ...], str]] = Counter()
        self.casts: Counter[tuple[str, str, str]] = Counter()
        self.quantized: Counter[tuple[str, str, str]] = Counter()
        self._paths_of_quantizers = {
            id(quantizers): path
            for path, module in model.named_modules()
            if isinstance(module, QuantizedLayer)
            for quantizers in module.quantizers.values()
        }
        self._inside = 0  # the depth of operations that count as one, whatever they call
        self._of_attention: set[int] = set()  # autograd's nodes, by number

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Watch until the end of the context."""
        matmul = self._gemm(emulated_matmul)
        with (
            mock.patch.object(F, "scaled_dot_product_attention", self._attention()),
            mock.patch.object(EmulateBackend, "matmul", staticmethod(matmul)),
            mock.patch.object(torch_backend, "emulated_matmul", matmul),
            mock.patch.object(EmulatedOperand, "cast", self._quantize(EmulatedOperand.cast)),
            mock.patch.object(TorchOperand, "cast", self._quantize(TorchOperand.cast)),
            self,
        ):
            yield

    def _attention(self) -> Any:
        real = F.scaled_dot_product_attention

        def attention(*args: Any, **options: Any) -> Tensor:
            first = torch.autograd._get_sequence_nr()
            self._inside += 1
            y = real(*args, **options)
            self._inside -= 1
            self._of_attention.update(range(first, torch.autograd._get_sequence_nr()))
            return y

        return attention

    def _gemm(self, real: Any) -> Any:
        def gemm(*arguments: Any, **options: Any) -> Tensor:
            self._inside += 1
            operands = tuple(_held(x.values) for x in arguments[:2])
            y: Tensor = real(*arguments, **options)
            self._inside -= 1
            if not self._inside:  # groups are multiplied one by one
                self._note_gemm(operands, y)
            return y

        return gemm

    def _quantize(self, real: Any) -> Any:
        def quantize(operand: Any, *arguments: Any) -> Any:
            self._inside += 1
            copies = real(operand, *arguments)
            cached = getattr(operand, "cached_weight", None)
            is_cached = cached is not None and copies[0] is cached.copies[0]
            if self._inside > 1 or is_cached:  # within a cast that counts, or no cast
                self._inside -= 1
                return copies
            path, name = self._paths_of_quantizers[id(operand)], operand.name
            ways = {name: operand.rowwise, f"{name} across": operand.columnwise}
            if operand.rowwise == operand.columnwise:  # one cast, however many copies
                del ways[f"{name} across"]
            for way, copy in zip(ways, copies, strict=False):
                values = getattr(copy, "values", None)
                is_quantized = copy is not None and (values is None or fp8_of(values) in FP8)
                if is_quantized and ways[way] != "forward":
                    self.quantized[path, way, _pass()] += 1
            self._inside -= 1
            return copies

        return quantize

    def _note_gemm(self, operands: tuple[str, ...], y: Tensor) -> None:
        # A gradient of grouped weights has three dimensions.
        backward = "dgrad" if y.ndim == 2 and len(y) in self.rows else "wgrad"
        name = "fprop" if _pass() == "forward" else backward
        self.gemms[name, operands, dtypes(y)[0]] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        node, name = torch._C._current_autograd_node(), str(func)
        if self._inside or (node is not None and node._sequence_nr() in self._of_attention):
            return out
        tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        copied: list[tuple[Tensor, Tensor]] = []
        if name.startswith("aten._to_copy"):
            copied = [(tensors[0], out)]
        elif name.startswith("aten._foreach_copy_"):
            copied = [*zip(args[1], args[0], strict=True)]
        for original, copy in copied:
            source, target = dtypes(original, copy)
            if source != target and original.is_floating_point() and "float64" not in source:
                self.casts[source, target, _pass()] += 1
        if name.startswith(GEMMS):
            self._note_gemm(dtypes(*(tensors[1:3] if "addmm" in name else tensors[:2])), out)
        return out


def _pass() -> str:
    return "forward" if torch._C._current_autograd_node() is None else "backward"


def dtypes(*tensors: Tensor) -> tuple[str, ...]:
    """The tensors' dtypes as the planner spells them."""
    return tuple(SHORT.get(x.dtype, str(x.dtype)) for x in tensors)


def fp8_of(values: Tensor) -> str:
    """The format whose significands `values` have, whatever powers of two scale them. E2M3
    has E4M3's significands, E3M2 has E5M2's. With scales in E4M3, E2M1's two bits become six."""
    mantissas = values.float().abs().frexp().mantissa  # [0.5, 1)
    for bits, name in ((2, "e2m1"), (3, "e5m2"), (4, "e4m3"), (6, "e2m1"), (8, "bf16")):
        if torch.equal(mantissas * 2**bits, (mantissas * 2**bits).round()):
            return name
    return ""


def _held(values: Tensor) -> str:
    """An operand's format and the dtype that holds its values, as the planner spells them."""
    dtype, name = dtypes(values)[0], fp8_of(values)
    return dtype if name in ("", dtype) else f"{name} in {dtype}"
