"""`Tracer` records the operators of a GPT's forward and backward pass, the bytes that each reads
and writes, and the bytes that the model saves for the backward pass.

Reading a view counts as reading its base, reading a copy or a concatenation as reading its sources.
An embedding reads only the rows that are looked up, and its backward pass adds only their
gradients. A norm that Transformer Engine fuses with the next linears saves its input in the compute
dtype.
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
from fp8stack.layers.linear import QuantizedLayer
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
        step: the step of its module's forward pass that it belongs to; None in the backward pass,
            for hooks on the model that update weights and scales, and for casts within a GEMM or
            Transformer Engine.
        element_bytes: the bytes of an element of its first output.
        rate: the hardware's rate that applies to a GEMM or attention; else None.
        flops: the FLOPs of a GEMM or attention, whose causal mask halves them.
        reduces: whether it reduces a tensor to a single number.
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
        self.tensor = (
            tensor.detach()
        )  # otherwise the graph, and so the outputs, would never be freed


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators of a model's passes, and the tensors saved for the backward pass.

    Args:
        model: the model, whose layers are planned in `plan`.
        plan: the plan of the model's layers.
        composed: whether attention runs as several operators, as torch composes it on this machine,
            and not as one.

    Attributes:
        operators: the recorded operators, in order.
        values: the bytes of each value that an operator reads or writes; the index is its number.
    """

    def __init__(self, model: gpt.GPT, plan: Plan, *, composed: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Operator] = []
        self.values: list[int] = []
        self._model, self._plan, self._composed = model, plan, composed
        self._paths: dict[nn.Module, str] = {module: path for path, module in model.named_modules()}
        self._stack: list[tuple[nn.Module, int]] = [
            (model, 0)
        ]  # running modules; autograd's number at entry
        self._ranges: list[tuple[int, int, str]] = []  # first and last autograd number, module path
        self._step_name = ""  # the step within `_step`, else ""
        # In these steps, Transformer Engine saves other tensors. It runs these linears without
        # torch's operators, so that selective checkpointing saves none of their outputs.
        self._te_steps = {"fused norm"} | ({"attention"} if plan.recipe.fp8_attention else set())
        self._te_linears = {x.name for x in plan.layers if x.fp8 and plan.backend_of(x) == "te"}
        self._te_saved = Counter[str]()
        self._storages: list[Any] = []  # kept alive, so that their addresses are not reused
        self._values_of: dict[int, tuple[int, ...]] = {}  # by storage
        self._row_gradients: set[int] = set()  # the gradients of embedding tables
        # "weights", "tokens" or "", by storage: what a tensor was computed from.
        self._origins = {_storage(x): "weights" for x in model.parameters()}
        self._names = TensorNames()
        self._packed: list[weakref.ref[_Packed]] = []
        if plan.backend == "te":
            backend: Any = model.backend
            backend.norm_linear = lambda x, norm, linear: linear(self._norm(x, norm, linear))
            backend.norm_mlp = lambda x, norm, mlp: mlp(self._norm(x, norm, mlp.up, mlp.down))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record all passes within the context."""
        self._model._rotation(self._model.embedding.weight.device)  # computes RoPE's tables first
        with ExitStack() as stack:
            for module in self._model.modules():
                stack.enter_context(module.register_forward_pre_hook(self._before_forward))
                stack.enter_context(module.register_forward_hook(self._after_forward))
            attention = meta.Replaced({F.scaled_dot_product_attention: self._attention})
            saves = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x.tensor)
            with attention, saves, self:
                yield

    def cached_weights(self) -> Counter[str]:
        """The bytes of cached quantized weights, by section."""
        sizes = Counter[str]()
        for layer, copies in self._caches():
            tensors = [x for copy in copies for x in copy[:2] if x is not None]
            sizes[section_of(self._paths[layer])] += sum(_sizes(tensors).values())
        return sizes

    def saved(self) -> tuple[Counter[str], Counter[str]]:
        """The bytes of activations and of copies of weights that are saved for the backward pass,
        by section. Call it while the loss, and so the graph, exists."""
        counted = {_storage(x) for x in self._model.parameters()}
        counted |= {_storage(x) for pair in self._model._rotations.values() for x in pair}
        for _, copies in self._caches():
            tensors = [x for copy in copies for x in copy if isinstance(x, Tensor)]
            counted.update(map(_storage, tensors))
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
        """Yield the layers with cached quantized weights, and the copies."""
        for layer in self._model.modules():
            if isinstance(layer, QuantizedLayer):
                cached = getattr(layer.quantizers["weight"], "cached_weight", None)
                if cached is not None:
                    yield layer, cached.copies

    # Modules

    @property
    def _path(self) -> str:
        return self._paths[self._stack[-1][0]]

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._stack.append((module, _AUTOGRAD._get_sequence_nr()))
        if module is self._model:
            self._origins.update((_storage(x), "tokens") for x in args)
        elif isinstance(module, gpt.Block):
            self._names.enter_block(args[0])

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        path, (_, first) = self._path, self._stack.pop()
        self._names.leave(path, output)
        self._ranges.append((first, _AUTOGRAD._get_sequence_nr(), path))

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Called in place of `scaled_dot_product_attention`."""
        run = F.scaled_dot_product_attention if self._composed else meta.fused_attention
        with self._step("attention"):
            y = run(q, k, v, **options)
        if "attention" in self._te_steps:  # TE saves its casts, its output and statistics
            kind = FP8_ATTENTION[self._plan.recipe.attention]
            casts = kind.copies * sum(x.numel() for x in (q, k, v))
            if not kind.slots:  # a scale for 32 elements
                casts = casts * 33 // 32
            output = y.numel() if kind.keeps_fp8_output else y.nbytes
            self._te_saved[section_of(self._path)] += casts + output + 4 * q[..., 0].numel()
        self._names[y] = "output"
        return y

    def _norm(self, x: Tensor, norm: nn.Module, *linears: nn.Module) -> Tensor:
        """Run a norm that Transformer Engine may fuse with the next linears."""
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
        """Record all operators within the context as one step `name`."""
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
        if name.rpartition(":")[2].startswith(_CONSTANTS) or not any(
            map(self.value_numbers, inputs)
        ):
            self._values_of |= {_storage(x): () for x in outputs}
        elif self._only_moves(name, inputs, outputs[0]):
            sources = inputs[1:] if name == "aten::copy_" else inputs
            numbers = [number for x in sources for number in self.value_numbers(x)]
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
        self, func: Any, name: str, inputs: list[Tensor], outputs: list[Tensor], **facts: Any
    ) -> Operator:
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
        """The slices of values that reading a tensor reads."""
        numbers = self.value_numbers(x)
        if len(numbers) == 1:
            size = min(x.nbytes, self.values[numbers[0]])
            return [Slice(numbers[0], int(x.storage_offset()), size)]
        return [Slice(number, 0, self.values[number]) for number in numbers]

    def value_numbers(self, x: Tensor) -> tuple[int, ...]:
        """The numbers of the values that reading a tensor reads."""
        if _storage(x) not in self._values_of:  # an input of the model
            self._storages.append(x.untyped_storage())
            self._add_value(x)
        return self._values_of[_storage(x)]

    def _add_value(self, x: Tensor) -> int:
        """Add a value that a tensor's storage contains from now on. Returns its number."""
        number = self._new_number(x.untyped_storage().nbytes())
        self._values_of[_storage(x)] = (number,)
        return number

    def _new_number(self, size: int) -> int:
        self.values.append(size)
        return len(self.values) - 1


def _without_tokens(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors except tokens and masks."""
    return [x for x in tensors if x.dtype not in (torch.int64, torch.bool)]


def _sizes(tensors: list[Tensor]) -> dict[int, int]:
    """The bytes of the tensors' storages, by storage."""
    return {_storage(x): x.untyped_storage().nbytes() for x in tensors}


def _storage(x: Tensor) -> int:
    """The address of a tensor's storage."""
    address: int = x.untyped_storage()._cdata
    return address
