"""A trace of a training pass of a GPT on tensors without memory: the steps of its modules, with
their dtypes and casts, and the bytes that it saves for the backward pass. The plan's operations and
the estimate of memory follow from it.

The model is built of its plan's layers without their arithmetic. Nothing is allocated or computed,
so a trace of any model takes a fraction of a second.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from fp8stack.common.errors import UserError
from fp8stack.layers.activation_checkpoint import policy
from fp8stack.layers.backend import DTYPES
from fp8stack.layers.kernels.eager import _Normalize
from fp8stack.model import gpt
from fp8stack.model import loss as losses
from fp8stack.model.config import GPTConfig
from fp8stack.planning.planned_layers import PlannedBackend
from fp8stack.planning.steps import Operation, Step, TensorNames, merged_steps, steps_of
from fp8stack.precision import LayerPlan, Plan

_NO_CONTEXT: Any = None
# Operators that compute nothing from their inputs.
_CONSTANTS = ("empty", "zeros", "ones", "full", "new_", "scalar_tensor", "detach")
_COPIES = ("clone", "cat", "copy_", "_unsafe_view", "alias")


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A forward pass of a model with one block of each kind.

    Attributes:
        kinds: the indices of the planned blocks that each traced block stands for.
        steps: the steps of the traced modules, in order.
        saved: the bytes that each section saves for the backward pass: a block, "loss" (with the
            head), or "" for all else. Copies of weights are not included.
        selective: the bytes of each section's outputs of GEMMs and attention, which "selective"
            checkpointing saves.
    """

    kinds: tuple[tuple[int, ...], ...]
    steps: list[Step]
    saved: Counter[str]
    selective: Counter[str]

    def all_steps(self) -> Iterator[Step]:
        """Yield the steps of the forward pass of a model with all planned blocks, in order."""
        in_blocks = [at for at, step in enumerate(self.steps) if step.path.startswith("blocks.")]
        first, last = in_blocks[0], in_blocks[-1] + 1
        yield from self.steps[:first]
        traced = {index: f"blocks.{at}" for at, kind in enumerate(self.kinds) for index in kind}
        for index, section in sorted(traced.items()):
            for step in self.steps[first:last]:
                if section_of(step.path) == section:
                    yield replace(step, path=step.path.replace(section, f"blocks.{index}", 1))
        yield from self.steps[last:]


def section_of(path: str) -> str:
    """The section of the model that a module is in: its block, "loss" (with the head), or ""."""
    if path.startswith("blocks."):
        return ".".join(path.split(".")[:2])
    return "loss" if path in ("loss", "lm_head") else ""


@lru_cache(maxsize=128)
def trace(config: GPTConfig, plan: Plan, sequences: int, context: int) -> Trace:
    """Trace the forward pass of a micro-batch on one rank.

    Args:
        config: the shape of the model.
        plan: a plan with its layers.
        sequences: per micro-batch.
        context: tokens per sequence.

    Raises:
        UserError: a tensor has more bytes than 64 bits can count.
    """
    kinds = kinds_of(plan)
    small_config, small_plan = with_blocks(config, plan, [first for first, *_ in kinds], context)
    rows, chunk = sequences * context, losses.chunk_rows(config.vocabulary)
    with torch.device("meta"), requires_64_bits(config, sequences, context):
        model = gpt.GPT(small_config, PlannedBackend(small_plan), seed=None)
        # Two chunks of a loss save as much as many.
        model.loss.chunk_rows = chunk if rows <= chunk else -(-rows // 256) * 128
        tracer = Tracer(model)
        tokens = torch.zeros(sequences, context + 1, dtype=torch.int64)
        with Replaced(kernels_of(config, plan)), tracer.recording():
            loss = model(tokens[:, :-1], tokens[:, 1:])  # its graph holds what is saved
            saved = tracer.saved()
        del loss
    steps = merged_steps(tracer.steps)
    return Trace(kinds=kinds, steps=steps, saved=saved, selective=tracer.selective)


@contextmanager
def requires_64_bits(config: GPTConfig, sequences: int, context: int) -> Iterator[None]:
    """Raise a UserError if a tensor of a traced model has more bytes than 64 bits can count."""
    try:
        yield
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        weights = 4 * config.parameters() / 2**30
        raise UserError(
            f"No machine holds a model of width {config.width} and {sequences} x {context} tokens: "
            f"its weights take {weights:,.0f} GiB. Use smaller sizes."
        ) from error


def kinds_of(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The indices of the blocks of each kind; blocks of a kind have the same plan."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index, layers in _blocks(plan).items():
        kind = tuple((la.quantizers, la.backend, la.precision) for la in layers)
        kinds.setdefault(kind, []).append(index)
    return tuple(map(tuple, kinds.values()))


def with_blocks(
    config: GPTConfig, plan: Plan, indices: list[int] | tuple[int, ...], context: int
) -> tuple[GPTConfig, Plan]:
    """The shape and the plan of a model with just the blocks of these indices."""
    layers = [layer for layer in plan.layers if not layer.name.startswith("blocks.")]
    blocks = _blocks(plan)
    for place, index in enumerate(indices):
        for layer in blocks[index]:
            name = layer.name.replace(f"blocks.{index}.", f"blocks.{place}.", 1)
            layers.append(replace(layer, name=name))
    changes: dict[str, object] = {"layers": len(indices), "context": context}
    if config.experts is not None:
        dense = sum(not config.has_experts(index) for index in indices)
        changes["experts"] = config.experts.model_copy(update={"first_dense": dense})
    return config.model_copy(update=changes), replace(plan, layers=tuple(layers))


def _blocks(plan: Plan) -> dict[int, list[LayerPlan]]:
    blocks: dict[int, list[LayerPlan]] = {}
    for layer in plan.layers:
        if layer.name.startswith("blocks."):
            blocks.setdefault(int(layer.name.split(".")[1]), []).append(layer)
    return blocks


# The kernels of the plan's device


class Replaced(TorchFunctionMode):
    """Runs other functions in place of some of torch's."""

    def __init__(self, functions: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._functions = functions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._functions.get(func, func)(*args, **(kwargs or {}))


def kernels_of(config: GPTConfig, plan: Plan) -> dict[Any, Callable[..., Tensor]]:
    """Functions in place of torch's whose kernels on the plan's device save other tensors than
    meta's. Attention is one kernel, except on a CPU with dropout and on a GPU for grouped queries
    in float32."""
    kernels: dict[Any, Callable[..., Tensor]] = {F.rms_norm: _rms_norm}
    is_composed = config.dropout > 0
    if plan.device != "cpu":
        kernels[F.dropout] = _dropout
        grouped = config.query_groups != config.heads
        is_composed = grouped and DTYPES[plan.attention].itemsize == 4
    if not is_composed:
        kernels[F.scaled_dot_product_attention] = fused_attention
    return kernels


def _rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
    y: Tensor = _Normalize.apply(x, x, weight, eps)  # type: ignore[no-untyped-call]
    return y


def _dropout(x: Tensor, p: float, training: bool, inplace: bool = False) -> Tensor:
    """A GPU's dropout, whose mask takes a byte per value."""
    return torch.native_dropout(x, p, training)[0] if p and training else x


def fused_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Attention in one operator."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    y: Tensor = kernel(q, k, v, options["dropout_p"], options["is_causal"])[0]
    return y


class _Packed:
    """A tensor that autograd saves, and the section of the model that saves it."""

    def __init__(self, tensor: Tensor, section: str) -> None:
        self.section = section
        # Detached, or the graph, and so the outputs, would never be freed.
        self.tensor = tensor.detach()


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the steps of a model's forward passes, and the tensors saved for the backward pass.

    Attributes:
        steps: the step of each recorded operator, in order.
        selective: see `Trace`.
    """

    def __init__(self, model: gpt.GPT) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Step] = []
        self.selective = Counter[str]()
        self._model = model
        self._paths: dict[nn.Module, str] = {module: path for path, module in model.named_modules()}
        self._stack: list[nn.Module] = [model]  # running modules
        self._in_attention = False
        self._names = TensorNames()
        self._storages: list[Any] = []  # kept alive, so that their addresses are not reused
        self._packed: list[weakref.ref[_Packed]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record all passes within the context."""
        self._model._rotation(self._model.embedding.weight.device)  # computes RoPE's tables first
        with ExitStack() as stack:
            for module in self._model.modules():
                stack.enter_context(module.register_forward_pre_hook(self._before_forward))
                stack.enter_context(module.register_forward_hook(self._after_forward))
            attention = Replaced({F.scaled_dot_product_attention: self._attention})
            saves = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x.tensor)
            with attention, saves, self:
                yield

    def saved(self) -> Counter[str]:
        """The bytes that are saved for the backward pass, by section, without parameters. Call it
        while the loss, and so the graph, exists."""
        counted = {storage_of(x) for x in self._model.parameters()}
        counted |= {storage_of(x) for pair in self._model._rotations.values() for x in pair}
        sizes = Counter[str]()
        for packed in filter(None, (reference() for reference in self._packed)):
            storage = storage_of(packed.tensor)
            if storage not in counted:
                counted.add(storage)
                sizes[packed.section] += packed.tensor.untyped_storage().nbytes()
        return sizes

    @property
    def _path(self) -> str:
        return self._paths[self._stack[-1]]

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._stack.append(module)
        if isinstance(module, gpt.Block):
            self._names.enter_block(args[0])

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._names.leave(self._path, output)
        self._stack.pop()

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Called in place of `scaled_dot_product_attention`."""
        self._in_attention = True
        y = F.scaled_dot_product_attention(q, k, v, **options)
        self._in_attention = False
        self._names[y] = "output"
        return y

    def _pack(self, tensor: Tensor) -> _Packed:
        packed = _Packed(tensor, section_of(self._path))
        self._packed.append(weakref.ref(packed))
        return packed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        self._storages += [x.untyped_storage() for x in outputs]
        module, path = self._stack[-1], self._path
        tensor_name = self._names.inherit(func, path, inputs, outputs)
        name = str(func._schema.name).rpartition(":")[2]
        of_backward = torch._C._current_autograd_node() is not None
        if func.is_view or of_backward or name in _COPIES or name.startswith(_CONSTANTS):
            return out
        is_saved = policy(_NO_CONTEXT, func, *args, **kwargs) is CheckpointPolicy.MUST_SAVE
        if is_saved and not getattr(module, "by_te", False):
            self.selective[section_of(path)] += sum(x.nbytes for x in outputs)
        outputs = [x for x in outputs if x.is_floating_point()]
        if not outputs or not any(x.is_floating_point() for x in inputs):
            return out
        if self._in_attention:
            self.steps.append(Operation(path=path, name="attention", operands=(), output=""))
        else:
            self.steps += steps_of(func, path, module, inputs, outputs[0], tensor_name)
        return out


def storage_of(x: Tensor) -> int:
    """The address of a tensor's storage."""
    address: int = x.untyped_storage()._cdata
    return address
