"""The operators of one training pass of a GPT, forward and backward, with what each reads and
writes, recorded on tensors without memory as in `trace`.

A view counts as its base, and a copy or concatenation as its sources. Of an embedding's table,
only the rows that are looked up count as read, and their gradients as added.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8stack.model import gpt
from fp8stack.model import loss as losses
from fp8stack.model.config import GPTConfig
from fp8stack.model.trace import backend_of, blocks_like, fused_attention, patched, without_memory
from fp8stack.precision import Plan

Rate = Literal["half", "fp8", "fp4", "attention"]
_AUTOGRAD: Any = torch.autograd
_GEMMS = ("aten::mm", "aten::addmm", "aten::_scaled_mm", "aten::_scaled_mm_v2", "fp8stack::mx_gemm")
_MADE = ("empty", "zeros", "ones", "full", "new_", "scalar_tensor", "detach")
_MOVES = ("aten::clone", "aten::cat", "aten::_unsafe_view", "aten::alias")


@dataclass(frozen=True, kw_only=True)
class Value:
    """A tensor: an input of the pass or an operator's output. `lasts`: whether it is a gradient
    that the optimizer reads."""

    bytes: int
    lasts: bool = False


class Part(NamedTuple):
    """`bytes` of a value, given by its number, from `offset` on."""

    value: int
    offset: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Operator:
    """An operator that computes, unlike views and copies.

    Attributes:
        name: torch's.
        path: of the module that ran it, or whose backward pass it belongs to.
        backward: whether it belongs to the backward pass.
        reads: the parts of values that it reads.
        writes: the numbers of its outputs.
        element_bytes: of its first output.
        rate: of GEMMs and attention; else None.
        flops: likewise; causal attention needs half of them.
        reduces: whether it reduces many numbers to one.
    """

    name: str
    path: str
    backward: bool
    reads: tuple[Part, ...]
    writes: tuple[int, ...]
    element_bytes: int = 4
    rate: Rate | None = None
    flops: int = 0
    reduces: bool = False

    @property
    def multiplies(self) -> bool:
        """Whether it is a GEMM or attention."""
        return self.rate is not None


Operators = tuple[list[Operator], list[Value]]


def operators_of(
    config: GPTConfig, plan: Plan, blocks: tuple[int, ...], batch: int, context: int
) -> Operators:
    """Return the operators of a pass, and the values by number.

    Args:
        config: the shape of the model.
        plan: a plan with its layers.
        blocks: the indices of the plan's blocks to run.
        batch: sequences.
        context: tokens per sequence.
    """
    own_plan = replace(blocks_like(plan, blocks), asked="", reasons=(), gpu="")
    shape = config.model_copy(update={"layers": len(blocks), "context": context})
    return _operators(shape, own_plan, batch, context)


@lru_cache(maxsize=64)
def _operators(config: GPTConfig, plan: Plan, batch: int, context: int) -> Operators:
    with without_memory(plan):
        model = gpt.GPT(config, backend_of(plan, save_fp8=False))
        recorder = _Recorder(model)
        tokens = torch.zeros(batch, context + 1, dtype=torch.int64)
        with (
            patched(losses, "chunk_rows", lambda vocabulary: tokens.numel()),
            patched(F, "scaled_dot_product_attention", fused_attention),
            recorder,
        ):
            model(tokens[:, :-1], tokens[:, 1:]).backward()
        for parameter in model.parameters():
            recorder.keep(parameter.grad)
    return recorder.operators, recorder.values


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, model: gpt.GPT) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Operator] = []
        self.values: list[Value] = []
        self._alive: list[Tensor] = []  # or another storage could take a freed one's address
        self._values_of: dict[int, tuple[int, ...]] = {}  # by storage
        self._rows: set[int] = set()  # gradients of embeddings
        self._paths = {part: path for path, part in model.named_modules()}
        self._inside = [("", 0)]
        # range of autograd's sequence numbers, by module
        self._ran: list[tuple[int, int, str]] = []
        model._rotation(model.embedding.weight.device)  # RoPE's tables are made once
        for part in model.modules():
            part.register_forward_pre_hook(self._enter)
            part.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._inside.append((self._paths[module], _AUTOGRAD._get_sequence_nr()))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        path, first = self._inside.pop()
        self._ran.append((first, _AUTOGRAD._get_sequence_nr(), path))

    def keep(self, gradient: Tensor | None) -> None:
        """Mark a gradient as one that lasts."""
        for number in () if gradient is None else self._read(gradient):
            self.values[number] = replace(self.values[number], lasts=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs, outputs = _numbers((args, kwargs)), _numbers(out)
        self._alive += outputs
        name = str(func._schema.name)
        if func.is_view or not outputs:
            return out
        if name.rpartition(":")[2].startswith(_MADE) or not any(map(self._read, inputs)):
            self._values_of |= {_storage(x): () for x in outputs}  # constants
        elif self._moves(name, inputs, outputs[0]):
            given = inputs[1:] if name == "aten::copy_" else inputs
            found = [number for x in given for number in self._read(x)]
            self._values_of[_storage(outputs[0])] = tuple(dict.fromkeys(found))
        else:
            self._note(name, inputs, outputs)
        return out

    def _moves(self, name: str, inputs: list[Tensor], output: Tensor) -> bool:
        """Whether an operator only moves its inputs. Copies of FP8 count as operators: GEMMs need
        two layouts."""
        if name == "aten::add":  # to an embedding's gradient
            return any(number in self._rows for x in inputs for number in self._read(x))
        if name == "aten::copy_":
            return len(inputs) == 2 and output.nbytes == output.untyped_storage().nbytes()
        return name in _MOVES and output.itemsize > 1

    def _note(self, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        node = torch._C._current_autograd_node()
        reads = [part for x in inputs for part in self._parts(x)]
        rate: Rate | None = None
        flops = 0
        if name in _GEMMS:
            first = inputs[1] if name == "aten::addmm" else inputs[0]
            packed = first.dtype == torch.uint8  # two elements to a byte
            rate = "half" if first.itemsize > 1 else "fp4" if packed else "fp8"
            flops = 2 * outputs[0].numel() * first.shape[-1] * (2 if packed else 1)
        elif name.startswith("aten::_scaled_dot_product"):
            q, k = inputs[:2] if node is None else inputs[1:3]
            rate, flops = "attention", (2 if node is None else 5) * q.numel() * k.shape[2]
        elif "embedding" in name:  # only some rows of the table or its gradient
            size = min(x.nbytes for x in (*inputs, *outputs))
            reads = [] if node is None else reads
            reads.append(Part(self._new(Value(bytes=size)), 0, size))
        writes = tuple(self._given(x) for x in outputs)
        if name == "aten::embedding_dense_backward":
            self.values[writes[0]] = Value(bytes=inputs[0].nbytes)
            self._rows.update(writes)
        many = any(x.numel() > 1 for x in inputs)
        self.operators.append(
            Operator(
                name=name,
                path=self._path(node),
                backward=node is not None,
                reads=tuple(dict.fromkeys(reads)),
                writes=writes,
                element_bytes=outputs[0].itemsize,
                rate=rate,
                flops=flops,
                reduces=many and all(x.numel() == 1 for x in outputs),
            )
        )

    def _path(self, node: Any) -> str:
        if node is None:
            return self._inside[-1][0]
        number = node._sequence_nr()
        around = [(last - first, path) for first, last, path in self._ran if first <= number < last]
        return min(around, default=(0, ""))[1]

    def _parts(self, x: Tensor) -> list[Part]:
        """The parts of values that a tensor consists of."""
        numbers = self._read(x)
        if len(numbers) == 1:
            size = min(x.nbytes, self.values[numbers[0]].bytes)
            return [Part(numbers[0], int(x.storage_offset()), size)]
        return [Part(number, 0, self.values[number].bytes) for number in numbers]

    def _read(self, x: Tensor) -> tuple[int, ...]:
        place = _storage(x)
        if place not in self._values_of:  # an input of the pass
            self._alive.append(x)
            self._given(x)
        return self._values_of[place]

    def _given(self, x: Tensor) -> int:
        size = x.untyped_storage().nbytes()
        number = self._new(Value(bytes=size))
        self._values_of[_storage(x)] = (number,)
        return number

    def _new(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1


def _numbers(of: Any) -> list[Tensor]:
    """The tensors in `of` except tokens and masks."""
    tensors = [x for x in tree_leaves(of) if isinstance(x, Tensor)]
    return [x for x in tensors if x.dtype not in (torch.int64, torch.bool)]


def _storage(x: Tensor) -> int:
    place: int = x.untyped_storage()._cdata
    return place
