"""A trace of a training pass for the roofline: its operators with the bytes that each reads and
writes.

Reading a view counts as reading its base, reading a copy or a concatenation as reading its sources.
An embedding reads only the rows that are looked up, and its backward pass adds only their
gradients.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fp8stack.layers.activation_checkpoint import GEMMS
from fp8stack.model import gpt
from fp8stack.model.config import GPTConfig
from fp8stack.planning.roofline_model import backend_of
from fp8stack.planning.trace import (
    Replaced,
    Tracer,
    fused_attention,
    kernels_of,
    requires_64_bits,
    storage_of,
    with_blocks,
)
from fp8stack.precision import Plan

Rate = Literal["half", "fp8", "fp4", "attention", "fp8_attention"]

_AUTOGRAD: Any = torch.autograd
_CONSTANTS = ("empty", "zeros", "ones", "full", "new_", "scalar_tensor", "detach")
_MOVES = ("aten::clone", "aten::cat", "aten::_unsafe_view", "aten::alias")


class Slice(NamedTuple):
    """A slice of the value with the number `value`: `bytes` from `offset` on."""

    value: int
    offset: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A recorded operator; views and copies are not recorded.

    Attributes:
        name: torch's name, such as "aten::mm".
        path: the module that ran it, or the module whose backward pass it belongs to.
        backward: whether it belongs to the backward pass.
        reads: the slices of values that it reads.
        writes: the numbers of its outputs.
        element_bytes: the bytes of an element of its first output.
        rate: the hardware's rate that applies to a GEMM or attention; else None.
        flops: the FLOPs of a GEMM or attention, whose causal mask halves them.
        reduces: whether it reduces a tensor to a single number.
    """

    name: str
    path: str
    backward: bool
    reads: tuple[Slice, ...]
    writes: tuple[int, ...]
    element_bytes: int = 4
    rate: Rate | None = None
    flops: int = 0
    reduces: bool = False

    @property
    def multiplies(self) -> bool:
        """Whether it is a GEMM or attention."""
        return self.rate is not None


@dataclass(frozen=True, kw_only=True)
class OperatorTrace:
    """The operators of a pass of a model of some blocks.

    Attributes:
        operators: in order.
        values: the bytes of the values that operators read and write, inputs of the pass and
            outputs of operators, by number.
        lasting: the numbers of the gradients that the optimizer reads.
    """

    operators: list[Operator]
    values: list[int]
    lasting: Set[int]


class OperatorTracer(Tracer):  # type: ignore[no-untyped-call]
    """Records the operators of a model's passes.

    Attributes:
        operators: the recorded operators, in order.
        values: the bytes of each value that an operator reads or writes; the index is its number.
    """

    def __init__(self, model: gpt.GPT, plan: Plan) -> None:
        super().__init__(model)
        self.operators: list[Operator] = []
        self.values: list[int] = []
        self._plan = plan
        self._entries: list[int] = []  # autograd's number at the entry of each running module
        self._ranges: list[tuple[int, int, str]] = []  # first and last autograd number, module path
        self._values_of: dict[int, tuple[int, ...]] = {}  # by storage
        self._row_gradients: set[int] = set()  # the gradients of embedding tables

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        super()._before_forward(module, args)
        self._entries.append(_AUTOGRAD._get_sequence_nr())

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._ranges.append((self._entries.pop(), _AUTOGRAD._get_sequence_nr(), self._path))
        super()._after_forward(module, args, output)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = super().__torch_dispatch__(func, types, args, kwargs)
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        inputs, outputs = _without_tokens(inputs), _without_tokens(outputs)
        name = str(func._schema.name)
        if func.is_view or not outputs:
            return out
        if name.rpartition(":")[2].startswith(_CONSTANTS) or not any(
            map(self.value_numbers, inputs)
        ):
            self._values_of |= {storage_of(x): () for x in outputs}
        elif self._only_moves(name, inputs, outputs[0]):
            sources = inputs[1:] if name == "aten::copy_" else inputs
            numbers = [number for x in sources for number in self.value_numbers(x)]
            self._values_of[storage_of(outputs[0])] = tuple(dict.fromkeys(numbers))
        else:
            self.operators.append(self._operator(func, name, inputs, outputs))
        return out

    def _only_moves(self, name: str, inputs: list[Tensor], output: Tensor) -> bool:
        """Whether an operator only copies its inputs. Copies of FP8 tensors are recorded, since
        GEMMs require two layouts."""
        if name == "aten::add":  # to an embedding's gradient
            return any(
                number in self._row_gradients for x in inputs for number in self.value_numbers(x)
            )
        if name == "aten::copy_":
            return len(inputs) == 2 and output.nbytes == output.untyped_storage().nbytes()
        return name in _MOVES and output.itemsize > 1

    def _operator(
        self, func: Any, name: str, inputs: list[Tensor], outputs: list[Tensor]
    ) -> Operator:
        facts: dict[str, Any] = {}
        node = torch._C._current_autograd_node()
        reads = [piece for x in inputs for piece in self._slices(x)]
        if func in GEMMS:  # of [M, K] and [K, N], in any layout
            a, b = inputs[1:3] if name == "aten::addmm" else inputs[:2]
            packed = a.dtype == torch.uint8  # two elements to a byte
            facts["rate"] = "half" if a.itemsize > 1 else "fp4" if packed else "fp8"
            product = outputs[0]
            # Offsets of groups: each row is multiplied by the matrix of its group.
            if any(x.dtype == torch.int32 for x in inputs):
                multiplications = a.numel() * (b if product.ndim == 3 else product).shape[1]
            else:
                inner = math.isqrt(a.numel() * b.numel() // product.numel())
                multiplications = product.numel() * inner
            facts["flops"] = 2 * multiplications * (2 if packed else 1)
        elif name.startswith("aten::_scaled_dot_product"):
            q, k = inputs[:2] if node is None else inputs[1:3]
            facts["rate"] = "fp8_attention" if self._plan.recipe.fp8_attention else "attention"
            facts["flops"] = (2 if node is None else 5) * q.numel() * k.shape[2]
        elif "embedding" in name:  # only some rows of the table or its gradient
            size = min(x.nbytes for x in (*inputs, *outputs))
            reads = [] if node is None else reads
            reads.append(Slice(self._new_number(size), 0, size))
        writes = tuple(self._add_value(x) for x in outputs)
        if name == "aten::embedding_dense_backward":
            self.values[writes[0]] = inputs[0].nbytes
            self._row_gradients.update(writes)
        many = any(x.numel() > 1 for x in inputs)
        return Operator(
            name=name,
            path=self._path_of(node),
            backward=node is not None,
            reads=tuple(dict.fromkeys(reads)),
            writes=writes,
            element_bytes=outputs[0].itemsize,
            reduces=many and all(x.numel() == 1 for x in outputs),
            **facts,
        )

    def _path_of(self, node: Any) -> str:
        if node is None:
            return self._path
        number = node._sequence_nr()
        modules = [(last - first, x) for first, last, x in self._ranges if first <= number < last]
        return min(modules, default=(0, ""))[1]  # the innermost

    def _slices(self, x: Tensor) -> list[Slice]:
        """The slices of values that reading a tensor reads."""
        numbers = self.value_numbers(x)
        if len(numbers) == 1:
            size = min(x.nbytes, self.values[numbers[0]])
            return [Slice(numbers[0], int(x.storage_offset()), size)]
        return [Slice(number, 0, self.values[number]) for number in numbers]

    def value_numbers(self, x: Tensor) -> tuple[int, ...]:
        """The numbers of the values that reading a tensor reads."""
        if storage_of(x) not in self._values_of:  # an input of the model
            self._storages.append(x.untyped_storage())
            self._add_value(x)
        return self._values_of[storage_of(x)]

    def _add_value(self, x: Tensor) -> int:
        """Add a value that a tensor's storage contains from now on. Returns its number."""
        number = self._new_number(x.untyped_storage().nbytes())
        self._values_of[storage_of(x)] = (number,)
        return number

    def _new_number(self, size: int) -> int:
        self.values.append(size)
        return len(self.values) - 1


def _without_tokens(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors except tokens and masks."""
    return [x for x in tensors if x.dtype not in (torch.int64, torch.bool)]


@lru_cache(maxsize=128)
def trace_operators(
    config: GPTConfig,
    plan: Plan,
    sequences: int,
    context: int,
    *,
    blocks: tuple[int, ...],
    backward: bool = True,
) -> OperatorTrace:
    """Trace a micro-batch, with the loss in one chunk.

    Args:
        config: the shape of the model.
        plan: a plan with its layers.
        sequences: per micro-batch.
        context: tokens per sequence.
        blocks: the indices of the plan's blocks to run, in order.
        backward: whether to run the backward pass too.
    """
    small_config, small_plan = with_blocks(config, plan, blocks, context)
    fused = {F.scaled_dot_product_attention: fused_attention}
    with torch.device("meta"), requires_64_bits(config, sequences, context):
        model = gpt.GPT(small_config, backend_of(small_plan), seed=None)
        model.loss.chunk_rows = sequences * context
        tracer = OperatorTracer(model, small_plan)
        tokens = torch.zeros(sequences, context + 1, dtype=torch.int64)
        with Replaced(kernels_of(config, plan) | fused), tracer.recording():
            loss = model(tokens[:, :-1], tokens[:, 1:])
            if backward:
                loss.backward()
        gradients = [x.grad for x in model.parameters() if x.grad is not None]
        lasting = {number for gradient in gradients for number in tracer.value_numbers(gradient)}
        return OperatorTrace(operators=tracer.operators, values=tracer.values, lasting=lasting)
