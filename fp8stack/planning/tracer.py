"""`Tracer` records the operators of a GPT's passes, with the bytes that each reads and writes, and
the bytes that the model saves for the backward pass.

A view counts as its base, and a copy or concatenation as its sources. Of an embedding's table, only
the rows that are looked up count as read, and their gradients as added. A norm that Transformer
Engine fuses with the linears after it saves its input in the compute dtype.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from fp8stack.layers.activation_checkpoint import GEMMS, policy
from fp8stack.layers.linear import QuantizedLinear
from fp8stack.model import gpt
from fp8stack.planning import meta
from fp8stack.planning.steps import TensorNames, TracedStep, step_of
from fp8stack.precision import Plan
from fp8stack.precision.fp8_attention import FP8_ATTENTION

Rate = Literal["half", "fp8", "fp4", "attention", "fp8_attention"]

_AUTOGRAD: Any = torch.autograd
_ATEN: Any = torch.ops.aten
_NO_CONTEXT: Any = None
_CONSTANTS = ("empty", "zeros", "ones", "full", "new_", "scalar_tensor", "detach")
_MOVES = ("aten::clone", "aten::cat", "aten::_unsafe_view", "aten::alias")
_ORIGINS = ("tokens", "weights", "")


class Slice(NamedTuple):
    """`bytes` of a value, given by its number, from `offset` on."""

    value: int
    offset: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Operator:
    """An operator that computes, unlike views and copies.

    Attributes:
        name: as torch calls it.
        path: the module that ran it, or the module whose backward pass it belongs to.
        backward: whether it belongs to the backward pass.
        reads: the slices of values that it reads.
        writes: the numbers of its outputs.
        step: the step of its module's forward pass that it is a piece of; None in the backward
            pass, for hooks on the model that update weights and scales, and for casts within a GEMM
            or Transformer Engine.
        element_bytes: of its first output.
        rate: the rate of a GEMM or of attention; else None.
        flops: of a GEMM or of attention, which is causal and needs half of them.
        reduces: whether it reduces many numbers to a single number.
        is_saved: whether "selective" checkpointing saves its outputs.
    """

    name: str
    path: str
    backward: bool
    reads: tuple[Slice, ...]
    writes: tuple[int, ...]
    step: TracedStep | None = None
    element_bytes: int = 4
    rate: Rate | None = None
    flops: int = 0
    reduces: bool = False
    is_saved: bool = False

    @property
    def multiplies(self) -> bool:
        """Whether it is a GEMM or attention."""
        return self.rate is not None


def section_of(path: str) -> str:
    """The section of the model that a module is in: its block, "loss" (with the head), or ""."""
    if path.startswith("blocks."):
        return ".".join(path.split(".")[:2])
    return "loss" if path in ("loss", "lm_head") else ""


class _Packed:
    """A tensor that autograd saves, and the section of the model that saves it."""

    def __init__(self, tensor: Tensor, section: str) -> None:
        self.section = section
        self.tensor = tensor.detach()  # else outputs would never be freed


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators of a model's passes, and the tensors saved for the backward pass.

    Args:
        model: of the layers of `plan`.
        plan: with the model's layers.
        composed: whether attention runs as torch composes it here, not as a single operator.

    Attributes:
        operators: in order.
        values: the bytes of the values that they read and write, by number.
    """

    def __init__(self, model: gpt.GPT, plan: Plan, *, composed: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Operator] = []
        self.values: list[int] = []
        self._model, self._plan, self._composed = model, plan, composed
        self._paths: dict[nn.Module, str] = {module: path for path, module in model.named_modules()}
        self._stack: list[tuple[nn.Module, int]] = [(model, 0)]  # with autograd's number at entry
        self._ranges: list[tuple[int, int, str]] = []  # of autograd's numbers, by module
        self._step_name = ""  # of the step that all operators belong to, if any
        # Transformer Engine saves other tensors in these steps, and runs these linears without
        # torch's operators, so that checkpointing sees none of them.
        self._te_steps = {"fused norm"} | ({"attention"} if plan.recipe.fp8_attention else set())
        self._te_linears = {x.name for x in plan.layers if x.fp8 and plan.runs(x) == "te"}
        self._te_saved = Counter[str]()
        self._storages: list[Any] = []  # alive, or a new storage could take the address of another
        self._values_of: dict[int, tuple[int, ...]] = {}  # by storage
        self._row_gradients: set[int] = set()  # of embeddings
        self._origins = {_storage(x): "weights" for x in model.parameters()}  # else tokens
        self._names = TensorNames()
        self._packed: list[weakref.ref[_Packed]] = []
        if plan.backend == "te":
            backend: Any = model.backend
            backend.norm_linear = lambda x, norm, linear: linear(self._norm(x, norm, linear))
            backend.norm_mlp = lambda x, norm, mlp: mlp(self._norm(x, norm, mlp.up, mlp.down))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the passes within the context."""
        self._model._rotation(self._model.embedding.weight.device)  # RoPE's tables are made once
        with ExitStack() as stack:
            for module in self._model.modules():
                stack.enter_context(module.register_forward_pre_hook(self._enter))
                stack.enter_context(module.register_forward_hook(self._leave))
            attention = meta.Replaced({F.scaled_dot_product_attention: self._attention})
            saves = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x.tensor)
            with attention, saves, self:
                yield

    def cached_weights(self) -> Counter[str]:
        """The bytes of quantized weights that layers keep until the weights change, by section."""
        sizes = Counter[str]()
        for layer, copies in self._caches():
            tensors = [x for copy in copies for x in (copy.data, copy.inv_scale)]
            sizes[section_of(self._paths[layer])] += sum(_sizes(tensors).values())
        return sizes

    def saved(self) -> tuple[Counter[str], Counter[str]]:
        """The bytes of activations and of copies of weights that sections of the model save for the
        backward pass, to be taken while the loss is alive."""
        counted = {_storage(x) for x in self._model.parameters()}
        counted |= {_storage(x) for pair in self._model._rotations.values() for x in pair}
        for _, copies in self._caches():
            tensors = [x for copy in copies for x in (copy.upper_scale, copy.data, copy.inv_scale)]
            counted.update(_storage(x) for x in tensors if x is not None)
        activations, weight_copies = self._te_saved.copy(), Counter[str]()
        for packed in filter(None, (reference() for reference in self._packed)):
            storage = _storage(packed.tensor)
            if storage not in counted:
                counted.add(storage)
                of_weights = self._origins.get(storage) == "weights"
                sizes = weight_copies if of_weights else activations
                sizes[packed.section] += packed.tensor.untyped_storage().nbytes()
        return activations, weight_copies

    def _caches(self) -> Iterator[tuple[nn.Module, Any]]:
        """Yield the layers that keep quantized weights, with the copies."""
        for layer in self._model.modules():
            if isinstance(layer, QuantizedLinear):
                cached = getattr(layer.quantizers["weight"], "cached", None)
                if cached is not None:
                    yield layer, cached.copies

    # Modules

    @property
    def _path(self) -> str:
        return self._paths[self._stack[-1][0]]

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._stack.append((module, _AUTOGRAD._get_sequence_nr()))
        if module is self._model:
            self._origins.update((_storage(x), "tokens") for x in args)
        elif isinstance(module, gpt.Block):
            self._names.enter_block(args[0])

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        path, (_, first) = self._path, self._stack.pop()
        self._names.leave(path, output)
        self._ranges.append((first, _AUTOGRAD._get_sequence_nr(), path))

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Replaces `scaled_dot_product_attention`."""
        run = F.scaled_dot_product_attention if self._composed else meta.fused_attention
        with self._step("attention"):
            y = run(q, k, v, **options)
        if "attention" in self._te_steps:  # its casts, its output and statistics
            kind = FP8_ATTENTION[self._plan.recipe.attention]
            casts = kind.copies * sum(x.numel() for x in (q, k, v))
            if not kind.slots:  # a scale for 32 elements
                casts = casts * 33 // 32
            output = y.numel() if kind.keeps_fp8_output else y.nbytes
            self._te_saved[section_of(self._path)] += casts + output + 4 * q[..., 0].numel()
        self._names[y] = "output"
        return y

    def _norm(self, x: Tensor, norm: nn.Module, *linears: nn.Module) -> Tensor:
        """Run a norm before linears that Transformer Engine may fuse it with."""
        layers = [self._plan.layer(self._paths[linear]) for linear in linears]
        rows = x[..., 0].numel()
        if not meta.fuses_norm(self._model.config, self._plan, layers, rows):
            y: Tensor = norm(x)
            return y
        # Torch's norm saves other tensors than the rounded input and float32 statistics.
        statistics = 2 if isinstance(norm, nn.LayerNorm) else 1
        size = x.numel() * self._model.backend.compute_dtype.itemsize + 4 * statistics * rows
        self._te_saved[section_of(self._path)] += size
        with self._step("fused norm"):
            y = norm(x)
        return y

    @contextmanager
    def _step(self, name: str) -> Iterator[None]:
        """Record all operators within the context as one step."""
        self._step_name = name
        yield
        self._step_name = ""

    def _pack(self, tensor: Tensor) -> _Packed:
        packed = _Packed(tensor, section_of(self._path))
        if self._step_name not in self._te_steps:
            self._packed.append(weakref.ref(packed))
        return packed

    # Operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self._storages += [x.untyped_storage() for x in outputs]
        origins = [self._origins.get(_storage(x), "") for x in inputs]
        origin = min(origins, default="", key=_ORIGINS.index)
        self._origins.update((_storage(x), origin) for x in outputs)
        tensor_name = self._names.inherit(func, self._path, inputs, outputs)
        inputs, outputs = _without_tokens(inputs), _without_tokens(outputs)
        name = str(func._schema.name)
        if func.is_view or not outputs:
            return out
        if name.rpartition(":")[2].startswith(_CONSTANTS) or not any(map(self.read, inputs)):
            self._values_of |= {_storage(x): () for x in outputs}
        elif self._moves(name, inputs, outputs[0]):
            sources = inputs[1:] if name == "aten::copy_" else inputs
            numbers = [number for x in sources for number in self.read(x)]
            self._values_of[_storage(outputs[0])] = tuple(dict.fromkeys(numbers))
        else:
            facts: dict[str, Any] = {}
            if torch._C._current_autograd_node() is None:  # a forward pass
                saves = policy(_NO_CONTEXT, func, *args, **kwargs) is CheckpointPolicy.MUST_SAVE
                by_te = self._step_name in self._te_steps or self._path in self._te_linears
                facts["is_saved"] = saves and not by_te
                facts["step"] = self._step_of(func, inputs, outputs[0], origin, tensor_name)
            self.operators.append(self._operator(func, name, inputs, outputs, **facts))
        return out

    def _moves(self, name: str, inputs: list[Tensor], output: Tensor) -> bool:
        """Whether an operator only moves its inputs. Copies of FP8 count as operators: GEMMs need
        two layouts."""
        if name == "aten::add":  # to an embedding's gradient
            return any(number in self._row_gradients for x in inputs for number in self.read(x))
        if name == "aten::copy_":
            return len(inputs) == 2 and output.nbytes == output.untyped_storage().nbytes()
        return name in _MOVES and output.itemsize > 1

    def _operator(
        self, func: Any, name: str, inputs: list[Tensor], outputs: list[Tensor], **facts: Any
    ) -> Operator:
        node = torch._C._current_autograd_node()
        reads = [piece for x in inputs for piece in self._slices(x)]
        if func in GEMMS:  # of [M, K] and [K, N], in any layout
            a, b = inputs[1:3] if name == "aten::addmm" else inputs[:2]
            packed = a.dtype == torch.uint8  # two elements to a byte
            facts["rate"] = "half" if a.itemsize > 1 else "fp4" if packed else "fp8"
            product = outputs[0]
            if "grouped" in name:  # each row is multiplied by the matrix of its group
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
            reads.append(Slice(self._new(size), 0, size))
        writes = tuple(self._write(x) for x in outputs)
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

    def _step_of(
        self, func: Any, inputs: list[Tensor], output: Tensor, origin: str, tensor_name: str
    ) -> TracedStep | None:
        """The step that an operator of the forward pass belongs to."""
        module, path = self._stack[-1][0], self._path
        if self._step_name:
            return TracedStep(path=path, name=self._step_name)
        # Hooks on the model update scales and quantize weights.
        is_hook = module is self._model and origin != "tokens"
        if is_hook or not any(x.is_floating_point() for x in inputs):
            return None
        return step_of(func, path, module, self._plan, inputs, output, tensor_name)

    def _path_of(self, node: Any) -> str:
        if node is None:
            return self._path
        number = node._sequence_nr()
        modules = [(last - first, x) for first, last, x in self._ranges if first <= number < last]
        return min(modules, default=(0, ""))[1]  # the innermost

    def _slices(self, x: Tensor) -> list[Slice]:
        """The slices of values that a tensor consists of."""
        numbers = self.read(x)
        if len(numbers) == 1:
            size = min(x.nbytes, self.values[numbers[0]])
            return [Slice(numbers[0], int(x.storage_offset()), size)]
        return [Slice(number, 0, self.values[number]) for number in numbers]

    def read(self, x: Tensor) -> tuple[int, ...]:
        """The numbers of the values that a tensor consists of."""
        if _storage(x) not in self._values_of:  # an input of the pass
            self._storages.append(x.untyped_storage())
            self._write(x)
        return self._values_of[_storage(x)]

    def _write(self, x: Tensor) -> int:
        """The number of a new value, which a tensor's storage holds from now on."""
        number = self._new(x.untyped_storage().nbytes())
        self._values_of[_storage(x)] = (number,)
        return number

    def _new(self, size: int) -> int:
        self.values.append(size)
        return len(self.values) - 1


def _without_tokens(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors that are no tokens or masks."""
    return [x for x in tensors if x.dtype not in (torch.int64, torch.bool)]


def _sizes(tensors: list[Tensor]) -> dict[int, int]:
    """The bytes of the tensors' storages, each once."""
    return {_storage(x): x.untyped_storage().nbytes() for x in tensors}


def _storage(x: Tensor) -> int:
    address: int = x.untyped_storage()._cdata
    return address
