"""Sharded weights that FSDP2 gathers in the bytes that a GEMM multiplies, not in float32.

Each rank casts its shard with the scales of the full weight, so that the gathered bytes equal a
cast of the full weight: the float32 shards remain the master weights. A layer without FP8 gathers
its weight in the compute dtype.

FSDP2 calls `fsdp_pre_all_gather` and `fsdp_post_all_gather` of a parameter's local tensor:
docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fp8stack.common.formats import Quantizer
from fp8stack.numerics.operators import operator

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class WeightTensors(NamedTuple):
    """A weight as it is gathered.

    Attributes:
        gathered: tensors that begin with the rows of the weight, or with blocks of its rows: a
            rank's, or those of all ranks, one below the other. The first one is [rows, in].
        shared: tensors that are the same on all ranks.
        quantizer: the quantizer of the bytes; None for values in the compute dtype.
    """

    gathered: list[Tensor]
    shared: list[Tensor]
    quantizer: Quantizer | None = None


class GatheredLayer(Protocol):
    """A layer with a sharded weight, [out_features, in_features]."""

    in_fp8: bool
    out_features: int

    def cast_shard(self, rows: Tensor) -> WeightTensors:
        """Cast a shard of the weight, float32 [rows, in]. float32 `gathered` stands for itself."""


class _Wrapper(Tensor):
    """A float32 tensor subclass that wraps another tensor. Operators take `plain()` instead."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor | WeightTensors, *args: Any) -> _Wrapper:
        like = held.gathered[0] if isinstance(held, WeightTensors) else held
        wrapper: _Wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            like.size(),
            like.stride(),
            like.storage_offset(),
            dtype=torch.float32,
            device=like.device,
        )
        return wrapper

    def plain(self) -> Tensor:
        """The float32 tensor that operators see."""
        raise NotImplementedError

    def like(self, tensor: Tensor) -> Tensor:
        """Wrap `tensor`, a view or a replacement of the wrapped tensor, in the same class."""
        return tensor

    def same(self) -> Tensor:
        """This tensor, detached."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        first = args[0]
        if func is _aten.detach.default or func is _aten.alias.default:
            return first.same()
        if isinstance(first, FullWeight):
            if func is _tensors_op:
                return [
                    tensor.detach() for tensor in (*first.tensors.gathered, *first.tensors.shared)
                ]
            if func is _aten.as_strided.default:
                assert tuple(args[1]) == first.shape, "FSDP2 takes no other view of it"
                return first.same()
            values = first.tensors.gathered[0]
            is_cast = func is _aten._to_copy.default and first.tensors.quantizer is None
            if is_cast and dict(kwargs or {}) == {"dtype": values.dtype}:
                # No copy: FSDP2 frees the memory after the forward pass, and gathers it again.
                return values.detach()
        plain_args, plain_kwargs = tree_map_only(
            _Wrapper, lambda wrapper: wrapper.plain(), (args, kwargs or {})
        )
        out = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable:
            return first if isinstance(first, _Wrapper) else out
        if isinstance(first, _Wrapper) and func in _KEEPS:
            return tree_map_only(Tensor, first.like, out)
        return out


_aten = torch.ops.aten
# Operators that FSDP2 uses to shard a parameter.
_KEEPS = {
    *(_aten.split.Tensor, _aten.slice.Tensor, _aten.view.default, _aten.as_strided.default),
    _aten.new_zeros.default,
}


class ShardedWeight(_Wrapper):
    """This rank's shard `held` of a layer's weight: float32 [rows, in]."""

    detaches_plain = False

    def __init__(self, held: Tensor, layer: GatheredLayer) -> None:
        self._held = held
        self._layer = layer

    def plain(self) -> Tensor:
        """The shard, as a plain tensor."""
        return self._held

    def like(self, tensor: Tensor) -> Tensor:
        """Wrap `tensor`, rows of the same weight."""
        return ShardedWeight(tensor, self._layer)

    def same(self) -> Tensor:
        """This shard, detached; a plain tensor within `plain_shards`."""
        held = self._held.detach()
        return held if ShardedWeight.detaches_plain else self.like(held)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], WeightTensors]:
        """The tensors to gather, and their dtypes and the other data of the full weight."""
        # FSDP2 shards as torch.chunk: the last ranks may have fewer rows, or none.
        missing = -(-self._layer.out_features // mesh.size()) - len(self._held)
        rows = F.pad(self._held, (0, 0, 0, missing)) if missing else self._held
        tensors = self._layer.cast_shard(rows)
        # Gather bytes, because not every operation knows the dtypes of 8 bits.
        sent = [
            tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
            for tensor in tensors.gathered
        ]
        return tuple(sent), tensors

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor, ...],
        mine: WeightTensors,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The full weight, from the gathered shards of all ranks and this rank's tensors."""
        # FSDP2 has gathered into the memory of `out`, from the second time on.
        if isinstance(out, FullWeight):
            assert out.tensors.gathered[0].data_ptr() == gathered[0].data_ptr()
            out.set_tensors(out.tensors._replace(shared=mine.shared))
        if out is not None:
            return None
        rows, full = len(mine.gathered[0]), self._layer.out_features
        # Drop the rows that fill up the last shards. A block may have several rows.
        tensors = [
            tensor.view(shard.dtype)[: -(-full * len(shard) // rows)]
            for tensor, shard in zip(gathered, mine.gathered, strict=True)
        ]
        if tensors[0].dtype == torch.float32:
            return tensors[0], gathered
        return FullWeight(mine._replace(gathered=tensors)), gathered


@contextmanager
def plain_shards() -> Iterator[None]:
    """A context in which `detach` gives plain shards, for an optimizer that compiles its step."""
    ShardedWeight.detaches_plain = True
    try:
        yield
    finally:
        ShardedWeight.detaches_plain = False


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor, without the import of its class, which takes half as long as
    torch's."""
    return hasattr(tensor, "device_mesh")


def local_shard(tensor: Tensor) -> Tensor:
    """The rows of `tensor` that are on this rank; all rows, if it is not sharded."""
    if not is_dtensor(tensor):
        return tensor
    rows = tensor.to_local()
    return rows.plain() if isinstance(rows, ShardedWeight) else rows


def first_row(tensor: Tensor) -> int:
    """The index of the first row of `local_shard(tensor)`. FSDP2 shards rows as `torch.chunk`."""
    if not is_dtensor(tensor):
        return 0
    mesh = tensor.device_mesh
    rows = -(-len(tensor) // mesh.size())
    return min(mesh.get_local_rank() * rows, len(tensor))


class FullWeight(_Wrapper):
    """A gathered weight, float32 [out, in] to autograd; `tensors` hold it."""

    tensors: WeightTensors

    def __init__(self, tensors: WeightTensors) -> None:
        self.set_tensors(tensors)

    def set_tensors(self, tensors: WeightTensors) -> None:
        """Set `tensors`, also as the attributes that torch.compile reads."""
        self.tensors = tensors
        for name, tensor in zip(self._names(), (*tensors.gathered, *tensors.shared), strict=True):
            setattr(self, name, tensor)

    def _names(self) -> list[str]:
        return [f"tensor{n}" for n in range(len(self.tensors.gathered) + len(self.tensors.shared))]

    def plain(self) -> Tensor:
        """The weight's values, float32."""
        (data, *_), shared, quantizer = self.tensors
        if quantizer is None:
            return data.float()
        assert quantizer.per_tensor, "only GEMMs take a weight in blocks"
        return data.float() / shared[0]

    def same(self) -> Tensor:
        """This weight, detached."""
        return FullWeight(self.tensors)

    # torch.compile takes the inner tensors in the place of the weight. It reuses code for weights
    # with equal contexts.

    def __tensor_flatten__(self) -> tuple[list[str], tuple[int, Quantizer | None]]:
        return self._names(), (len(self.tensors.gathered), self.tensors.quantizer)

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], context: tuple[int, Quantizer | None], *_: Any
    ) -> FullWeight:
        (count, quantizer), tensors = context, list(inner.values())
        return FullWeight(WeightTensors(tensors[:count], tensors[count:], quantizer))

    def _stable_hash_for_caching(self) -> str:
        """Called by torch.compile's cache on disk: equal for weights that have the same code."""
        names, context = self.__tensor_flatten__()
        tensors: list[Tensor] = [getattr(self, name) for name in names]
        layouts = [(t.dtype, t.device, [*t.shape], t.stride()) for t in tensors]
        content = repr((context, layouts, self.requires_grad))
        return hashlib.sha256(content.encode()).hexdigest()


def _no_tensors(weight: Tensor) -> list[Tensor]:
    raise NotImplementedError("Only a gathered weight has tensors.")


# An operator, since torch.compile does not trace attributes of tensors in autograd functions.
_tensors_op = operator("weight_tensors(Tensor weight) -> Tensor[]", _no_tensors, _no_tensors)


def tensors_of(weight: Tensor) -> list[Tensor]:
    """The `gathered` and `shared` tensors of a `FullWeight`, in this order."""
    tensors: list[Tensor] = _tensors_op(weight)
    return tensors
