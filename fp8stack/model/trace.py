"""A trace of one training pass of a GPT on tensors without memory: its operators with what each
reads and writes and in which dtypes, and what the parts of the model save for the backward pass.

The model is built from its plan's layers and run forward, and backward where asked. Nothing is
allocated or computed, so a trace of any model takes a fraction of a second.

A view counts as its base, and a copy or concatenation as its sources. Of an embedding's table,
only the rows that are looked up count as read, and their gradients as added. A norm that
Transformer Engine fuses with the linears after it saves its input in the compute dtype.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from fp8stack.backends.activation_checkpoint import GEMMS, policy
from fp8stack.backends.base import DTYPES
from fp8stack.backends.linear import QuantizedLinear
from fp8stack.backends.weight_cache import CachedWeight
from fp8stack.errors import UserError
from fp8stack.model import gpt, meta
from fp8stack.model import loss as losses
from fp8stack.model.config import GPTConfig
from fp8stack.precision import Plan
from fp8stack.precision.attention import FP8_ATTENTION

Rate = Literal["half", "fp8", "fp4", "attention", "fp8_attention"]


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
        step: the step of its module's forward pass that it is part of; None in the backward pass,
            for what hooks on the model do with weights and scales, and for casts within a GEMM or
            Transformer Engine.
        element_bytes: of its first output.
        rate: of GEMMs and attention; else None.
        flops: likewise; causal attention needs half of them.
        reduces: whether it reduces many numbers to one.
        is_given: whether "selective" checkpointing saves what it gives.
    """

    name: str
    path: str
    backward: bool
    reads: tuple[Part, ...]
    writes: tuple[int, ...]
    step: Step | None = None
    element_bytes: int = 4
    rate: Rate | None = None
    flops: int = 0
    reduces: bool = False
    is_given: bool = False

    @property
    def multiplies(self) -> bool:
        """Whether it is a GEMM or attention."""
        return self.rate is not None


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of the module at `path`: "linear", "attention", "norm", "fused norm" (with the linears
    after it), "activation" and so on, or a "cast" of `what`, with the floating-point dtypes of its
    operands and of its output. `back`: whether the gradient is cast back."""

    path: str
    name: str
    operands: tuple[str, ...] = ()
    output: str = ""
    what: str = ""
    back: bool = False


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A pass of a model of some blocks.

    Attributes:
        kinds: the indices of the planned blocks that each traced block stands for.
        operators: in order.
        values: the bytes of what they read and write, inputs of the pass and outputs of operators,
            by number.
        lasting: the numbers of the gradients that the optimizer reads.
        kept: the bytes of activations that each part saves for the backward pass: a block, "loss"
            (with the head), or "" for the rest.
        copies: likewise of copies of weights, for the GEMMs of one micro-batch.
        fp8_weights: the bytes of cached FP8 weights of all layers.
    """

    kinds: list[list[int]]
    operators: list[Operator]
    values: list[int]
    lasting: set[int]
    kept: Counter[str]
    copies: Counter[str]
    fp8_weights: int

    def given(self, part: str) -> int:
        """The bytes of a part's outputs of GEMMs and attention, which "selective" also saves."""
        own = (one for one in self.operators if one.is_given and _part_of(one.path) == part)
        return sum(self.values[number] for one in own for number in one.writes)

    def all_steps(self) -> Iterator[Step]:
        """Yield the steps of the whole model's forward pass in order."""
        steps = steps_of(self.operators)
        inside = [at for at, one in enumerate(steps) if one.path.startswith("blocks.")]
        first, last = inside[0], inside[-1] + 1
        yield from steps[:first]
        kinds = {index: f"blocks.{at}" for at, x in enumerate(self.kinds) for index in x}
        for index, kind in sorted(kinds.items()):
            for one in steps[first:last]:
                if _part_of(one.path) == kind:
                    yield replace(one, path=one.path.replace(kind, f"blocks.{index}", 1))
        yield from steps[last:]


def steps_of(operators: Iterable[Operator]) -> list[Step]:
    """The steps of modules that these operators are part of, each once, in order."""
    found: dict[object, Step] = {}
    for step in filter(None, (one.step for one in operators)):
        key = step if step.name == "cast" else (step.path, step.name)
        before = found.get(key, step).operands
        operands = tuple(dict.fromkeys((*before, *step.operands)))
        found[key] = replace(step, operands=operands)
    return list(found.values())


def trace(
    config: GPTConfig,
    plan: Plan,
    sequences: int,
    context: int,
    *,
    save_fp8: bool = False,
    gathers: bool = False,
    blocks: tuple[int, ...] | None = None,
    backward: bool = False,
) -> Trace:
    """Trace a micro-batch on one rank.

    Args:
        config: the shape of the model.
        plan: a plan with its layers.
        sequences: per micro-batch.
        context: tokens per sequence.
        save_fp8: see `build_backend`.
        gathers: whether each pass gathers weights from the ranks (FSDP2).
        blocks: the indices of the plan's blocks to run; None: the first of each kind.
        backward: whether to run the backward pass too, with a loss in one chunk and attention in
            one kernel; else with a loss in two chunks where it has many.

    Raises:
        UserError: a tensor has more bytes than 64 bits can count.
    """
    kinds = meta.kinds_of(plan) if blocks is None else [[index] for index in blocks]
    own = replace(plan, asked="", reasons=(), gpu="")
    rows, chunk = sequences * context, losses.chunk_rows(config.vocabulary)
    if backward:
        chunk = rows
    elif rows > chunk:
        chunk = -(-rows // 256) * 128  # two chunks save as much as many
    made = tuple(map(tuple, kinds)), sequences, context, save_fp8, gathers, backward, chunk
    try:
        return _traced(config, own, *made)
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
    weights = 4 * config.parameters() / 2**30
    raise UserError(
        f"No machine holds a model of width {config.width} and {sequences} x {context} tokens: "
        f"its weights take {weights:,.0f} GiB. Use smaller sizes."
    )


@lru_cache(maxsize=128)
def _traced(
    config: GPTConfig,
    plan: Plan,
    kinds: tuple[tuple[int, ...], ...],
    sequences: int,
    context: int,
    save_fp8: bool,
    gathers: bool,
    backward: bool,
    chunk: int,
) -> Trace:
    planned = meta.blocks_like(plan, [first for first, *_ in kinds])
    small = config.model_copy(update={"layers": len(kinds), "context": context})
    composed = not backward and meta.composes_attention(config, plan)
    with meta.without_memory(plan):
        model = gpt.GPT(small, meta.backend_of(planned, save_fp8=save_fp8), seed=None)
        model.loss.chunk_rows = chunk
        tracer = Tracer(model, planned, composed=composed)
        if gathers:
            meta.gather_weights(model.backend)
        tokens = torch.zeros(sequences, context + 1, dtype=torch.int64)
        with tracer.recording():
            loss = model(tokens[:, :-1], tokens[:, 1:])
            assert loss.requires_grad
            made = tracer.trace([list(kind) for kind in kinds])
            if backward:
                loss.backward()
        for gradient in (parameter.grad for parameter in model.parameters()):
            made.lasting.update(() if gradient is None else tracer.read(gradient))
    return made


_AUTOGRAD: Any = torch.autograd
_ATEN: Any = torch.ops.aten
_NO_CONTEXT: Any = None
_MADE = ("empty", "zeros", "ones", "full", "new_", "scalar_tensor", "detach")
_MOVES = ("aten::clone", "aten::cat", "aten::_unsafe_view", "aten::alias")
_SOURCES = ("tokens", "weights", "")


class _Packed:
    """A tensor that autograd saves, and the part of the model that saves it."""

    def __init__(self, tensor: Tensor, part: str) -> None:
        self.part = part
        self.tensor = tensor.detach()  # else outputs would never be freed


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators of a model's passes, and what its parts save for the backward pass.

    Args:
        model: of the layers of `plan`.
        plan: with the model's layers.
        composed: whether attention is what torch makes of it here, not one operator.
    """

    def __init__(self, model: gpt.GPT, plan: Plan, *, composed: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Operator] = []
        self.values: list[int] = []
        self._model, self._plan, self._composed = model, plan, composed
        self._paths: dict[nn.Module, str] = {part: path for path, part in model.named_modules()}
        self._inside: list[tuple[nn.Module, int]] = [(model, 0)]
        self._ran: list[tuple[int, int, str]] = []  # range of autograd's numbers, by module
        self._one = ""  # what all that runs is a step of
        self._by_te = {"fused norm"}  # steps of which Transformer Engine saves something else
        if plan.recipe.fp8_attention:
            self._by_te.add("attention")
        # Linears that Transformer Engine runs, without torch's operators: checkpointing sees none.
        self._of_te = {x.name for x in plan.layers if x.fp8 and plan.runs(x) == "te"}
        self._alive: list[Any] = []  # or another storage could take a freed one's address
        self._values_of: dict[int, tuple[int, ...]] = {}  # by storage
        self._rows: set[int] = set()  # gradients of embeddings
        # What storages were computed from: tokens, if any, else weights.
        self._made_of = {_storage(x): "weights" for x in model.parameters()}
        # Names of tensors, to name casts by; results inherit them.
        self._labels: dict[tuple[int, int], str] = {}
        self._packed: list[weakref.ref[_Packed]] = []
        self._kept = Counter[str]()
        if plan.backend == "te":
            backend: Any = model.backend
            backend.norm_linear = lambda x, norm, linear: linear(self._norm(x, norm, linear))
            backend.norm_mlp = lambda x, norm, mlp: mlp(self._norm(x, norm, mlp.up, mlp.down))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the passes within the context."""
        self._model._rotation(self._model.embedding.weight.device)  # RoPE's tables are made once
        with ExitStack() as stack:
            for part in self._model.modules():
                stack.enter_context(part.register_forward_pre_hook(self._enter))
                stack.enter_context(part.register_forward_hook(self._leave))
            attention = meta.Replaced({F.scaled_dot_product_attention: self._attention})
            saves = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda one: one.tensor)
            with attention, saves, self:
                yield

    def trace(self, kinds: list[list[int]]) -> Trace:
        """The trace, to be taken while the loss is alive; later operators are added to it."""
        counts = {f"blocks.{at}": len(indices) for at, indices in enumerate(kinds)}
        known = {_storage(x) for x in self._model.parameters()}
        known |= {_storage(x) for pair in self._model._rotations.values() for x in pair}
        fp8_weights = 0
        for path, layer in self._model.named_modules():
            cached = _cached_weight(layer)
            if cached is not None:
                both = cached.copies
                known.update(_storage(copy.whole) for copy in both if copy.whole is not None)
                tensors = [x for copy in both for x in (copy.data, copy.inv_scale)]
                memories = {_storage(x): x.untyped_storage().nbytes() for x in tensors}
                fp8_weights += sum(memories.values()) * counts.get(_part_of(path), 1)
                known.update(memories)
        kept, copies = self._kept, Counter[str]()
        for one in filter(None, (reference() for reference in self._packed)):
            storage, size = _storage(one.tensor), one.tensor.untyped_storage().nbytes()
            if storage not in known:
                known.add(storage)
                sizes = copies if self._made_of.get(storage) == "weights" else kept
                sizes[one.part] += size
        return Trace(
            kinds=kinds,
            operators=self.operators,
            values=self.values,
            lasting=set(),
            kept=kept,
            copies=copies,
            fp8_weights=fp8_weights,
        )

    # Modules

    @property
    def _path(self) -> str:
        return self._paths[self._inside[-1][0]]

    @property
    def _part(self) -> str:
        return _part_of(self._path)

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._inside.append((module, _AUTOGRAD._get_sequence_nr()))
        if module is self._model:
            self._made_of.update((_storage(x), "tokens") for x in args)
        elif isinstance(module, gpt.Block):
            self._labels[_place(args[0])] = _GIVES["embedding"]

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if label := _GIVES.get(self._path.rpartition(".")[2]):
            self._labels[_place(output)] = label
        path, (_, first) = self._path, self._inside.pop()
        self._ran.append((first, _AUTOGRAD._get_sequence_nr(), path))

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Replaces `scaled_dot_product_attention`."""
        run = F.scaled_dot_product_attention if self._composed else meta.fused_attention
        with self._within("attention"):
            y = run(q, k, v, **options)
        if "attention" in self._by_te:  # what it casts; the output, and statistics
            kind = FP8_ATTENTION[self._plan.recipe.attention]
            casts = kind.copies * sum(x.numel() for x in (q, k, v))
            if not kind.slots:  # a scale for 32 elements
                casts = casts * 33 // 32
            output = y.numel() if kind.keeps_fp8_output else y.nbytes
            self._kept[self._part] += casts + output + 4 * q[..., 0].numel()
        self._labels[_place(y)] = "output"
        return y

    def _norm(self, x: Tensor, norm: nn.Module, *linears: nn.Module) -> Tensor:
        """A norm before linears that Transformer Engine may run."""
        layers = [self._plan.layer(self._paths[linear]) for linear in linears]
        rows = x[..., 0].numel()
        if not meta.fuses_norm(self._model.config, self._plan, layers, rows):
            y: Tensor = norm(x)
            return y
        # Not what torch's norm saves, but the rounded input and float32 statistics.
        statistics = 2 if isinstance(norm, nn.LayerNorm) else 1
        size = x.numel() * self._model.backend.compute_dtype.itemsize + 4 * statistics * rows
        self._kept[self._part] += size
        with self._within("fused norm"):
            y = norm(x)
        return y

    @contextmanager
    def _within(self, step: str) -> Iterator[None]:
        """All that runs within is one step."""
        self._one = step
        yield
        self._one = ""

    def _pack(self, tensor: Tensor) -> _Packed:
        one = _Packed(tensor, self._part)
        if self._one not in self._by_te:
            self._packed.append(weakref.ref(one))
        return one

    # Operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self._alive += [x.untyped_storage() for x in outputs]
        sources = [self._made_of.get(_storage(x), "") for x in inputs]
        source = min(sources, default="", key=_SOURCES.index)
        self._made_of.update((_storage(x), source) for x in outputs)
        label = next(filter(None, (self._labels.get(_place(x), "") for x in inputs)), "")
        labels = [label] * len(outputs)
        if func is _ATEN.split_with_sizes.default and "attention" in self._path:
            labels = ["queries", "keys", "values"]
        elif func is _ATEN.add.Tensor and _kind(self._path) == "residual":
            labels = [f"sum with {self._labels.get(_place(inputs[-1]), '')}"]
        self._labels.update(zip(map(_place, outputs), labels, strict=True))
        inputs, outputs = _numbers(inputs), _numbers(outputs)
        name = str(func._schema.name)
        if func.is_view or not outputs:
            return out
        if name.rpartition(":")[2].startswith(_MADE) or not any(map(self.read, inputs)):
            self._values_of |= {_storage(x): () for x in outputs}  # constants
        elif self._moves(name, inputs, outputs[0]):
            given = inputs[1:] if name == "aten::copy_" else inputs
            found = [number for x in given for number in self.read(x)]
            self._values_of[_storage(outputs[0])] = tuple(dict.fromkeys(found))
        else:
            saves = policy(_NO_CONTEXT, func, *args, **kwargs) is CheckpointPolicy.MUST_SAVE
            saves = saves and self._one not in self._by_te and self._path not in self._of_te
            made = self._operator(func, name, inputs, outputs)
            if not made.backward:
                step = self._step(func, inputs, outputs[0], source, label)
                made = replace(made, step=step, is_given=saves)
            self.operators.append(made)
        return out

    def _moves(self, name: str, inputs: list[Tensor], output: Tensor) -> bool:
        """Whether an operator only moves its inputs. Copies of FP8 count as operators: GEMMs need
        two layouts."""
        if name == "aten::add":  # to an embedding's gradient
            return any(number in self._rows for x in inputs for number in self.read(x))
        if name == "aten::copy_":
            return len(inputs) == 2 and output.nbytes == output.untyped_storage().nbytes()
        return name in _MOVES and output.itemsize > 1

    def _operator(
        self, func: Any, name: str, inputs: list[Tensor], outputs: list[Tensor]
    ) -> Operator:
        node = torch._C._current_autograd_node()
        reads = [part for x in inputs for part in self._parts(x)]
        rate: Rate | None = None
        flops = 0
        if func in GEMMS:  # [M, K] and [K, N], either of which may be turned
            a, b = inputs[1:3] if name == "aten::addmm" else inputs[:2]
            packed = a.dtype == torch.uint8  # two elements to a byte
            rate = "half" if a.itemsize > 1 else "fp4" if packed else "fp8"
            inner = math.isqrt(a.numel() * b.numel() // outputs[0].numel())
            flops = 2 * outputs[0].numel() * inner * (2 if packed else 1)
        elif name.startswith("aten::_scaled_dot_product"):
            q, k = inputs[:2] if node is None else inputs[1:3]
            rate = "fp8_attention" if self._plan.recipe.fp8_attention else "attention"
            flops = (2 if node is None else 5) * q.numel() * k.shape[2]
        elif "embedding" in name:  # only some rows of the table or its gradient
            size = min(x.nbytes for x in (*inputs, *outputs))
            reads = [] if node is None else reads
            reads.append(Part(self._new(size), 0, size))
        writes = tuple(self._given(x) for x in outputs)
        if name == "aten::embedding_dense_backward":
            self.values[writes[0]] = inputs[0].nbytes
            self._rows.update(writes)
        many = any(x.numel() > 1 for x in inputs)
        return Operator(
            name=name,
            path=self._path_of(node),
            backward=node is not None,
            reads=tuple(dict.fromkeys(reads)),
            writes=writes,
            element_bytes=outputs[0].itemsize,
            rate=rate,
            flops=flops,
            reduces=many and all(x.numel() == 1 for x in outputs),
        )

    def _step(
        self, func: Any, inputs: list[Tensor], output: Tensor, source: str, label: str
    ) -> Step | None:
        """What an operator of the forward pass is part of."""
        module, path = self._inside[-1][0], self._path
        operands = [x for x in inputs if x.is_floating_point()]
        if self._one:
            return Step(path=path, name=self._one)
        if not operands or (module is self._model and source != "tokens"):
            return None  # hooks on the model update scales and quantize weights
        is_linear = isinstance(module, nn.Linear)
        names = tuple(dict.fromkeys(map(_name, operands)))
        if func is not _ATEN._to_copy.default:
            if is_linear:
                return Step(path=path, name="linear")
            return Step(path=path, name=_kind(path), operands=names, output=_name(output))
        back = torch.is_grad_enabled() and operands[0].requires_grad
        if is_linear:
            layer, label = self._plan.layer(path), "input"
            if isinstance(operands[0], nn.Parameter):
                label = "weight" if operands[0].ndim == 2 else "bias"
            # Within a quantized GEMM, outside of autograd, only the bias has a cast of its own;
            # casts within Transformer Engine do not count.
            if (layer.fp8 and self._plan.runs(layer) == "te") or not (back or label == "bias"):
                return None
        if names == (_name(output),):
            return None
        return Step(
            path=path, name="cast", operands=names, output=_name(output), what=label, back=back
        )

    def _path_of(self, node: Any) -> str:
        if node is None:
            return self._path
        number = node._sequence_nr()
        around = [(last - first, path) for first, last, path in self._ran if first <= number < last]
        return min(around, default=(0, ""))[1]

    def _parts(self, x: Tensor) -> list[Part]:
        """The parts of values that a tensor consists of."""
        numbers = self.read(x)
        if len(numbers) == 1:
            size = min(x.nbytes, self.values[numbers[0]])
            return [Part(numbers[0], int(x.storage_offset()), size)]
        return [Part(number, 0, self.values[number]) for number in numbers]

    def read(self, x: Tensor) -> tuple[int, ...]:
        """The numbers of the values that a tensor consists of."""
        place = _storage(x)
        if place not in self._values_of:  # an input of the pass
            self._alive.append(x.untyped_storage())
            self._given(x)
        return self._values_of[place]

    def _given(self, x: Tensor) -> int:
        number = self._new(x.untyped_storage().nbytes())
        self._values_of[_storage(x)] = (number,)
        return number

    def _new(self, size: int) -> int:
        self.values.append(size)
        return len(self.values) - 1


def _kind(path: str) -> str:
    """The operation of a module that is not a linear."""
    last = path.rpartition(".")[2]
    if last == "dropout":
        return "dropout" if path == last else "branch dropout"
    return "norm" if last.endswith("norm") else _KINDS.get(last, "residual")


_KINDS = {"": "positions", "attention": "rope", "mlp": "activation"}
_KINDS |= {name: name for name in ("embedding", "loss")}
_GIVES = {"attention": "attention's output", "mlp": "mlp's output", "lm_head": "logits"}
_GIVES |= {"embedding": "residual stream"}
_NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "tf32"}


def _name(x: Tensor) -> str:
    """The name of a tensor's dtype, as in plans."""
    return _NAMES.get(x.dtype, str(x.dtype))


def _cached_weight(module: nn.Module) -> CachedWeight | None:
    """The FP8 copies of the module's weight, if it keeps any."""
    if not isinstance(module, QuantizedLinear):
        return None
    cached: CachedWeight | None = getattr(module.quantizers["weight"], "cached", None)
    return cached


def _part_of(path: str) -> str:
    if path.startswith("blocks."):
        return ".".join(path.split(".")[:2])
    return "loss" if path in ("loss", "lm_head") else ""


def _numbers(tensors: list[Tensor]) -> list[Tensor]:
    """Those that are no tokens or masks."""
    return [x for x in tensors if x.dtype not in (torch.int64, torch.bool)]


def _storage(x: Tensor) -> int:
    place: int = x.untyped_storage()._cdata
    return place


def _place(x: Tensor) -> tuple[int, int]:
    return _storage(x), int(x.storage_offset())
