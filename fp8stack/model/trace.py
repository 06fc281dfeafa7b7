"""A trace of one training pass of a GPT on tensors without memory: the dtypes in which its modules
compute, their casts, and what they save for the backward pass.

The model is built from its plan's layers and run forward, one block of each kind. Nothing is
allocated or computed, so a trace of any model takes a fraction of a second.

Where a GPU differs from torch's behaviour on such tensors, this file follows the sources of torch
and Transformer Engine:

- attention runs in one fused kernel that saves its operands, its output and a float32 log-sum-exp
  per query. On a CPU with dropout, and on a GPU for grouped queries in float32, no kernel exists,
  and it is composed of operators;
- the mask of dropout is as wide as its values on a CPU, and takes one byte each on a GPU;
- a quantizer returns its values and scales from one operator, as on a CPU;
- Transformer Engine saves the operands of its linears as torch's scaled GEMMs do, NVFP4's in half
  the bytes. A norm fused with the linears after it saves its input in the compute dtype.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from fp8stack.backends import Backend, build_backend
from fp8stack.backends import torch as torch_backend
from fp8stack.backends.activation_checkpoint import policy
from fp8stack.backends.base import DTYPES
from fp8stack.backends.torch import ScaledLinear, TorchBackend
from fp8stack.errors import UserError
from fp8stack.formats import Quantizers
from fp8stack.model import gpt
from fp8stack.model import loss as losses
from fp8stack.model.config import GPTConfig
from fp8stack.numerics import fused
from fp8stack.ops.activations import TRANSFORMER_ENGINES
from fp8stack.ops.eager import _Normalize
from fp8stack.ops.scaled_gemm import Scaled
from fp8stack.precision import Plan
from fp8stack.precision.kernels import feature_multiple, kernel_of
from fp8stack.precision.plan import LayerPlan


@dataclass(frozen=True)
class Kept:
    """Bytes saved for the backward pass: `activations` grow with the rows, `weights` are copies of
    weights for the GEMMs of one micro-batch."""

    activations: int = 0
    weights: int = 0

    def __add__(self, other: Kept) -> Kept:
        return Kept(self.activations + other.activations, self.weights + other.weights)

    def __mul__(self, times: int) -> Kept:
        return Kept(times * self.activations, times * self.weights)


@dataclass(frozen=True, kw_only=True)
class Block:
    """What each block of one kind saves for the backward pass.

    Attributes:
        indices: of the blocks.
        kept: without activation checkpointing.
        input: bytes of the block's input, the residual stream.
        given: bytes of the outputs of its GEMMs and attention, which "selective" also saves.
    """

    indices: list[int]
    kept: Kept
    input: int
    given: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """An operation of the module at `path`: "linear" (`bias`: whether it has one), "attention",
    "norm", "fused norm" (with the linears after it), "activation" and so on, with the
    floating-point dtypes of its operands and of its output."""

    path: str
    name: str
    operands: tuple[str, ...] = ()
    output: str = ""
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Moved:
    """A cast in the module at `path`. `back`: whether the gradient is cast back."""

    path: str
    what: str
    source: str
    target: str
    back: bool


Event = Step | Moved


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A forward pass: its events in order, with one block of each kind; what is saved by each kind
    of block, outside of blocks, and by the head and the loss; and the bytes of cached FP8 weights
    of all layers."""

    events: list[Event]
    blocks: list[Block]
    outside: Kept
    loss: Kept
    fp8_weights: int

    def all_events(self) -> Iterator[Event]:
        """Yield the events of the whole model in order."""
        inside = [at for at, one in enumerate(self.events) if one.path.startswith("blocks.")]
        first, last = inside[0], inside[-1] + 1
        yield from self.events[:first]
        kinds = {index: f"blocks.{at}" for at, x in enumerate(self.blocks) for index in x.indices}
        for index, kind in sorted(kinds.items()):
            for one in self.events[first:last]:
                if _part_of(one.path) == kind:
                    yield replace(one, path=one.path.replace(kind, f"blocks.{index}", 1))
        yield from self.events[last:]


def trace(
    config: GPTConfig,
    plan: Plan,
    sequences: int,
    context: int,
    save_fp8: bool = False,
    gathers: bool = False,
) -> Trace:
    """Trace a micro-batch on one rank.

    Args:
        config: the shape of the model.
        plan: a plan with its layers.
        sequences: per micro-batch.
        context: tokens per sequence.
        save_fp8: see `build_backend`.
        gathers: whether each pass gathers weights from the ranks (FSDP2).

    Raises:
        UserError: a tensor has more bytes than 64 bits can count.
    """
    try:
        return _traced(config, plan, sequences, context, save_fp8, gathers)
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
    weights = 4 * config.parameters() / 2**30
    raise UserError(
        f"No machine holds a model of width {config.width} and {sequences} x {context} tokens: "
        f"its weights take {weights:,.0f} GiB. Use smaller sizes."
    )


def _traced(
    config: GPTConfig, plan: Plan, sequences: int, context: int, save_fp8: bool, gathers: bool
) -> Trace:
    kinds = kinds_of(plan)
    planned = blocks_like(plan, [first for first, *_ in kinds])
    small = config.model_copy(update={"layers": len(kinds), "context": context})
    with without_memory(plan):
        model = gpt.GPT(small, backend_of(planned, save_fp8))
        watch = Watch(model, planned, composed=_composes_attention(config, plan))
        if plan.backend == "te":
            _fuse_norms(model, planned, watch)
        if gathers:
            _gather_weights(model.backend)
        tokens = torch.zeros(sequences, context + 1, dtype=torch.int64)
        with watch.watching():
            loss = model(tokens[:, :-1], tokens[:, 1:])
        assert loss.requires_grad
        return watch.trace(kinds)


def kinds_of(plan: Plan) -> list[list[int]]:
    """The indices of the blocks of each kind; blocks of a kind have the same plan."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index, layers in _blocks(plan).items():
        alike = tuple((la.quantizers, la.backend, la.precision) for la in layers)
        kinds.setdefault(alike, []).append(index)
    return list(kinds.values())


def blocks_like(plan: Plan, indices: Iterable[int]) -> Plan:
    """The plan of a model with just the blocks of these indices."""
    own = [layer for layer in plan.layers if not layer.name.startswith("blocks.")]
    blocks = _blocks(plan)
    for place, index in enumerate(indices):
        for layer in blocks[index]:
            name = layer.name.replace(f"blocks.{index}.", f"blocks.{place}.", 1)
            own.append(replace(layer, name=name))
    return replace(plan, layers=tuple(own))


def _blocks(plan: Plan) -> dict[int, list[LayerPlan]]:
    blocks: dict[int, list[LayerPlan]] = {}
    for layer in plan.layers:
        if layer.name.startswith("blocks."):
            blocks.setdefault(int(layer.name.split(".")[1]), []).append(layer)
    return blocks


# Stand-ins for hardware


@contextmanager
def patched(owner: Any, name: str, value: object) -> Iterator[None]:
    """Set an attribute to `value` within the context."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def without_memory(plan: Plan) -> Iterator[None]:
    """Within, new tensors have no memory, and code takes the paths of the plan's device."""
    on_cpu = plan.device == "cpu"
    where: AbstractContextManager[Any] = FakeTensorMode() if on_cpu else torch.device("meta")
    with ExitStack() as stack:
        stack.enter_context(patched(gpt, "initialize", lambda model, seed: None))
        stack.enter_context(patched(fused, "serves", lambda x: x.numel() > 0))
        if plan.backend == "te":
            stack.enter_context(patched(torch_backend, "scaled_gemm", _any_gemm))
        if not on_cpu:
            stack.enter_context(patched(F, "dropout", _fused_dropout))
            stack.enter_context(patched(F, "rms_norm", _fused_rms_norm))
        stack.enter_context(where)
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        yield


def _composes_attention(config: GPTConfig, plan: Plan) -> bool:
    """Whether attention has no fused kernel and is composed of operators."""
    if plan.device == "cpu":
        return config.dropout > 0
    return config.query_groups != config.heads and DTYPES[plan.attention].itemsize == 4


def fused_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Replaces `scaled_dot_product_attention` by one operator."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    y: Tensor = kernel(q, k, v, options["dropout_p"], options["is_causal"])[0]
    return y


def _fused_dropout(x: Tensor, p: float, training: bool, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, training)[0] if p and training else x


def _fused_rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
    y: Tensor = _Normalize.apply(x, x, weight, eps)  # type: ignore[no-untyped-call]
    return y


def _any_gemm(a: Scaled, b: Scaled, out_dtype: torch.dtype, **options: Any) -> Tensor:
    """A scaled GEMM of any sizes; Transformer Engine supports some that torch does not."""
    gemm = torch.ops.fp8stack.mx_gemm
    y: Tensor = gemm(a.data, b.data, a.inv_scale, b.inv_scale, out_dtype)
    return y


def _fuses_norm(config: GPTConfig, plan: Plan, layers: list[LayerPlan], rows: int) -> bool:
    """Whether Transformer Engine fuses a block's norm with the linears after it. It cannot where
    rows are padded: they would not stay zero."""
    known = config.norm == "rmsnorm" or config.bias
    known = known and (len(layers) == 1 or config.activation in TRANSFORMER_ENGINES)
    if not known or not all(layer.fp8 and plan.runs(layer) == "te" for layer in layers):
        return False
    assert plan.recipe.quantizers is not None
    return rows % feature_multiple(plan.recipe.quantizers, "te") == 0


class _FusedNorm(torch.autograd.Function):
    """Stands for a norm fused into Transformer Engine's linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: nn.Module, dtype: torch.dtype) -> Tensor:
        statistics = 2 if isinstance(norm, nn.LayerNorm) else 1
        rounded = x.to(dtype)
        ctx.save_for_backward(rounded, x.sum(-1).expand(statistics, -1, -1).clone())
        return torch.empty_like(rounded)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy.float(), None, None


def backend_of(plan: Plan, save_fp8: bool) -> Backend:
    """The plan's backend, with `torch` in place of Transformer Engine."""

    def by_torch(name: Any) -> Any:
        return "torch" if name == "te" else name

    layers = tuple(
        replace(la, backend=by_torch(la.backend), quantizers=_held_by_torch(la.quantizers))
        if plan.runs(la) == "te"
        else la
        for la in plan.layers
    )
    native = replace(plan, backend=by_torch(plan.backend), layers=layers)
    backend = build_backend(native, save_fp8=save_fp8)
    backend.vocabulary_multiple = plan.layer("lm_head").out_features  # as padded
    if backend.delayed is not None:
        backend.delayed.group = None  # no exchange with other ranks
    return backend


def _held_by_torch(quantizers: Quantizers | None) -> Quantizers | None:
    """Quantizers that torch's backend can hold, of as many bytes: Transformer Engine stores NVFP4's
    scales of squares once for each row."""
    if quantizers is None or kernel_of(quantizers) != "nvfp4":
        return quantizers
    return Quantizers(**dict.fromkeys((f.name for f in fields(Quantizers)), quantizers.input))


def _fuse_norms(model: gpt.GPT, plan: Plan, watch: Watch) -> None:
    """Fuse the model's norms where Transformer Engine does."""
    paths = {part: path for path, part in model.named_modules()}
    backend: Any = model.backend

    def normed(x: Tensor, norm: nn.Module, *linears: nn.Module) -> Tensor:
        layers = [plan.layer(paths[linear]) for linear in linears]
        if not _fuses_norm(model.config, plan, layers, x[..., 0].numel()):
            y: Tensor = norm(x)
            return y
        with watch.as_one(Step(path=paths[norm], name="fused norm")):
            y = _FusedNorm.apply(x, norm, backend.compute_dtype)  # type: ignore[no-untyped-call]
        return y

    backend.norm_linear = lambda x, norm, linear: linear(normed(x, norm, linear))
    backend.norm_mlp = lambda x, norm, mlp: mlp(normed(x, norm, mlp.up, mlp.down))


def _gather_weights(backend: Backend) -> None:
    """Quantize weights in each pass, except those with one scale per tensor: they are gathered as
    FP8 bytes, and are not saved."""
    for one in (backend, *backend._lenders.values()):
        if isinstance(one, TorchBackend):
            one._layers = [x for x in one._layers if x.quantizer("weight").per_tensor]


# Recording

_scaled_dot_product_attention = F.scaled_dot_product_attention
_NO_CONTEXT: Any = None
_OF_CHUNKS = {2: "loss of 2 chunks", 3: "loss of 3 chunks"}
_PLAIN_HEADS: dict[tuple[object, ...], tuple[Kept, Kept]] = {}
"""Cache: what heads without FP8, alike in many recipes, save with a loss of 2 and of 3 chunks."""
_SOURCES = ("tokens", "weights", "")


class _Packed:
    """A tensor that autograd saves, and the part of the model that saves it."""

    def __init__(self, tensor: Tensor, part: str) -> None:
        self.tensor, self.part = tensor, part


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations and casts of a model's modules, and what its parts save for the
    backward pass.

    A part is a block, "loss" (with the head), or "" for the rest.
    """

    def __init__(self, model: gpt.GPT, plan: Plan, *, composed: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._plan, self._composed = model, plan, composed
        self._paths: dict[nn.Module, str] = {part: path for path, part in model.named_modules()}
        self._modules: list[nn.Module] = [model]
        self._chunk_part = ""  # overrides the module's part
        self._chunks: int | None = None
        self._head: tuple[object, ...] | None = None
        self._inside = 0  # above 0 within `as_one`
        self.events: dict[object, Event] = {}
        self._packed: list[weakref.ref[_Packed]] = []
        self._given = Counter[str]()
        self._inputs: dict[str, int] = {}
        # What storages were computed from: tokens, if any, else weights.
        self._made_of = {_storage(x): "weights" for x in model.parameters()}
        # Names of tensors, to name casts by; results inherit them.
        self._labels: dict[tuple[int, int], str] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the forward passes within the context."""
        self._model._rotation(self._model.embedding.weight.device)  # RoPE's tables are made once
        handles: list[Any] = []
        for part in self._model.modules():
            handles.append(part.register_forward_pre_hook(self._enter))
            handles.append(part.register_forward_hook(self._leave))
        try:
            with (
                patched(gpt, "head_loss", self.loss),
                patched(F, "scaled_dot_product_attention", self.attention),
                torch.autograd.graph.saved_tensors_hooks(self._pack, lambda one: one.tensor),
                self,
            ):
                yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def as_one(self, step: Step) -> Iterator[None]:
        """Record whatever runs within the context as `step`."""
        self.events[step.path, step.name] = step
        self._inside += 1
        yield
        self._inside -= 1

    @property
    def _path(self) -> str:
        return self._paths[self._modules[-1]]

    @property
    def _part(self) -> str:
        return self._chunk_part or _part_of(self._path)

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._modules.append(module)
        if isinstance(module, gpt.Block):
            self._inputs[self._part] = args[0].nbytes
        elif module is self._model:
            self._made_of.update((_storage(x), "tokens") for x in args)
        elif isinstance(module, nn.Linear):
            step = Step(path=self._path, name="linear", bias=module.bias is not None)
            self.events[step.path, step.name] = step

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if label := _GIVES.get(self._path.rpartition(".")[2]):
            self._labels[_place(output)] = label
        self._modules.pop()

    def _pack(self, tensor: Tensor) -> _Packed:
        one = _Packed(tensor, self._part)
        self._packed.append(weakref.ref(one))
        return one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        sources = [self._made_of.get(_storage(x), "") for x in inputs]
        source = min(sources, default="", key=_SOURCES.index)
        self._made_of.update((_storage(x), source) for x in outputs)
        if policy(_NO_CONTEXT, func, *args, **kwargs) is CheckpointPolicy.MUST_SAVE:
            memories = {_storage(x): x.untyped_storage().nbytes() for x in outputs}
            self._given[self._part] += sum(memories.values())
        self._note(func, inputs, outputs)
        return out

    def _note(self, func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Record a cast or an operation."""
        found = [self._labels.get(_place(x), "") for x in inputs]
        label, module = next(filter(None, found), ""), self._modules[-1]
        labels = [label] * len(outputs)
        if func is torch.ops.aten.split_with_sizes.default and isinstance(module, gpt.Attention):
            labels = ["queries", "keys", "values"]
        self._labels.update(zip(map(_place, outputs), labels, strict=True))
        floats = [x for x in inputs if x.is_floating_point()]
        if not outputs:
            return
        # Hooks on the model update scales and quantize weights.
        between = module is self._model and self._made_of[_storage(outputs[0])] != "tokens"
        if self._inside or between or not floats:
            return
        if func is _ATEN._to_copy.default:
            self._cast(floats[0], outputs[0], label)
        elif not isinstance(module, nn.Linear) and not func.is_view and func not in _MOVES:
            self._step(_kind(self._path), floats, outputs[0])

    def _cast(self, source: Tensor, target: Tensor, label: str) -> None:
        back = torch.is_grad_enabled() and source.requires_grad
        if isinstance(self._modules[-1], nn.Linear):
            layer, label = self._plan.layer(self._path), "input"
            if isinstance(source, nn.Parameter):
                label = "weight" if source.ndim == 2 else "bias"
            # Within a quantized GEMM, outside of autograd, only the bias has a cast of its own;
            # casts within Transformer Engine do not count.
            if (layer.fp8 and self._plan.runs(layer) == "te") or not (back or label == "bias"):
                return
        names = {"source": _name(source), "target": _name(target)}
        one = Moved(path=self._path, what=label, back=back, **names)
        if one.source != one.target:
            self.events[one] = one

    def _step(self, name: str, inputs: Iterable[Tensor], output: Tensor) -> None:
        before: Any = self.events.get((self._path, name), Step(path="", name=""))
        operands = tuple(dict.fromkeys((*before.operands, *map(_name, inputs))))
        step = Step(path=self._path, name=name, operands=operands, output=_name(output))
        self.events[self._path, name] = step

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Replaces `scaled_dot_product_attention`."""
        with self.as_one(Step(path=self._path, name="attention")):
            run = _scaled_dot_product_attention if self._composed else fused_attention
            y = run(q, k, v, **options)
        self._labels[_place(y)] = "output"
        return y

    def loss(self, head: nn.Module, x: Tensor, targets: Tensor, vocabulary: int) -> Tensor:
        """Replaces `head_loss`; runs two and three chunks instead of many."""
        rows, chunk = targets.numel(), losses.chunk_rows(vocabulary)
        if rows <= 3 * chunk:
            return losses.head_loss(head, x, targets, vocabulary)
        self._chunks = rows // chunk
        made = [x.sum()]  # so that what came before stays saved
        layer = self._plan.layer("lm_head")
        if not layer.fp8:
            dtypes = x.device, self._plan.compute_dtype
            self._head = (*dtypes, layer.in_features, layer.out_features, rows % chunk, chunk)
            if self._head in _PLAIN_HEADS:
                return made[0]
        for chunks, self._chunk_part in _OF_CHUNKS.items():
            some = chunks * chunk + rows % chunk
            inputs = x.new_empty(some, x.shape[-1]).requires_grad_()
            labels = targets.new_empty(some)
            self._made_of.update((_storage(x), "tokens") for x in (inputs, labels))
            made.append(losses.head_loss(head, inputs, labels, vocabulary))
        self._chunk_part = ""
        return torch.stack(made).sum()

    def trace(self, kinds: list[list[int]]) -> Trace:
        """The trace, to be taken while the loss is alive."""
        counts = {f"blocks.{at}": len(indices) for at, indices in enumerate(kinds)}
        known = {_storage(x) for x in self._model.parameters()}
        known |= {_storage(x) for pair in self._model._rotations.values() for x in pair}
        fp8_weights, kept = 0, defaultdict[str, Kept](Kept)
        for path, layer in self._model.named_modules():
            if isinstance(layer, ScaledLinear) and layer._kept is not None:
                both = layer._kept.copies
                known.update(_storage(copy.whole) for copy in both if copy.whole is not None)
                tensors = [x for copy in both for x in (copy.data, copy.inv_scale)]
                memories = {_storage(x): x.untyped_storage().nbytes() for x in tensors}
                fp8_weights += sum(memories.values()) * counts.get(_part_of(path), 1)
                known.update(memories)
        for one in filter(None, (reference() for reference in self._packed)):
            tensor = one.__dict__.pop("tensor")  # else outputs would never be freed
            storage = _storage(tensor)
            if storage not in known:
                known.add(storage)
                size = tensor.untyped_storage().nbytes()
                copies = self._made_of.get(storage) == "weights"
                kept[one.part] += Kept(0, size) if copies else Kept(size)
        loss = kept["loss"]
        if self._chunks is not None:
            sizes = kept[_OF_CHUNKS[2]], kept[_OF_CHUNKS[3]]
            if self._head is not None:
                sizes = _PLAIN_HEADS.setdefault(self._head, sizes)
            two, three = sizes
            loss = two + (three + two * -1) * (self._chunks - 2)
        blocks = [
            Block(indices=x, kept=kept[part], input=self._inputs[part], given=self._given[part])
            for part, x in zip(counts, kinds, strict=True)
        ]
        events = list(self.events.values())
        return Trace(
            events=events, blocks=blocks, outside=kept[""], loss=loss, fp8_weights=fp8_weights
        )


def _kind(path: str) -> str:
    """The operation of a module that is not a linear."""
    last = path.rpartition(".")[2]
    if last == "dropout":
        return "dropout" if path == last else "branch dropout"
    return "norm" if last.endswith("norm") else _KINDS.get(last, "residual")


_KINDS = {"": "positions", "attention": "rope", "mlp": "activation"}
_KINDS |= {name: name for name in ("embedding", "loss")}
_GIVES = {"attention": "attention's output", "mlp": "mlp's output", "lm_head": "logits"}
_ATEN: Any = torch.ops.aten
_MOVES = {
    packet.default
    for packet in (_ATEN.clone, _ATEN._unsafe_view, _ATEN.cat, _ATEN.empty_like, _ATEN.new_empty)
}
"""Operators other than views that compute nothing."""
_NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "tf32"}


def _name(x: Tensor) -> str:
    """The name of a tensor's dtype, as in plans."""
    return _NAMES.get(x.dtype, str(x.dtype))


def _part_of(path: str) -> str:
    if path.startswith("blocks."):
        return ".".join(path.split(".")[:2])
    return "loss" if path in ("loss", "lm_head") else ""


def _storage(x: Tensor) -> int:
    place: int = x.untyped_storage()._cdata
    return place


def _place(x: Tensor) -> tuple[int, int]:
    return _storage(x), int(x.storage_offset())
