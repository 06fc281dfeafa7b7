"""Sharded weights that FSDP2 gathers as FP8 bytes, a quarter of the traffic of float32.

Each rank casts its shard with the scale of the full weight, so that the gathered bytes equal a cast
of the full weight. The float32 shards remain the master weights. Only for one scale per tensor: a
block could span the shards of two ranks.

FSDP2 calls `fsdp_pre_all_gather` and `fsdp_post_all_gather` of a parameter's local tensor:
docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only


class GatheredLayer(Protocol):
    """A layer with a sharded weight: a `QuantizedLinear`. `quantizers["weight"]` is a
    `ScaledOperand`, which casts a shard with the scale of the full weight."""

    in_fp8: bool
    quantizers: Any


class _Wrapper(Tensor):
    """A float32 tensor subclass that wraps another tensor. Operators take `plain()` instead."""

    @staticmethod
    def __new__(cls, held: Tensor, *args: Any) -> _Wrapper:
        wrapper: _Wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            held.stride(),
            held.storage_offset(),
            dtype=torch.float32,
            device=held.device,
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
        if func is _aten.detach.default:
            return first.same()
        if func is _aten.as_strided.default and isinstance(first, FullWeight):
            assert tuple(args[1]) == first.shape, "FSDP2 takes no other view of it"
            return first.same()
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
    """This rank's shard `held` of a layer's weight: float32 [rows, in]. Gathered as FP8 bytes if
    the layer is `in_fp8`, else as float32."""

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
        """This shard, detached."""
        return self.like(self._held.detach())

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor], tuple[Tensor | None]]:
        """The tensors to gather, and the data to pass to `fsdp_post_all_gather`."""
        if not self._layer.in_fp8:
            return (self._held,), (None,)
        data, scale = self._layer.quantizers["weight"].cast_rows(self._held)
        return (data.view(torch.uint8),), (scale,)

    def fsdp_post_all_gather(
        self,
        gathered: tuple[Tensor],
        local: tuple[Tensor | None],
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor]] | None:
        """The full weight, from the gathered shards."""
        (data,), (scale,) = gathered, local
        if out is None:
            if scale is None:
                return data, (data,)
            dtype8 = self._layer.quantizers["weight"].target.dtype
            assert dtype8 is not None
            return FullWeight(data.view(dtype8), scale), (data,)
        # From the second time on, FSDP2 has gathered into the memory of `out`.
        if isinstance(out, FullWeight):
            assert scale is not None
            assert out.data8.data_ptr() == data.data_ptr()
            out.scale = scale
        return None


def local_shard(tensor: Tensor) -> Tensor:
    """The rows of `tensor` that are on this rank; all rows, if it is not sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    rows = tensor.to_local()
    return rows.plain() if isinstance(rows, ShardedWeight) else rows


def first_row(tensor: Tensor) -> int:
    """The index of the first row of `local_shard(tensor)`. FSDP2 shards rows as `torch.chunk`."""
    if not isinstance(tensor, DTensor):
        return 0
    mesh = tensor.device_mesh
    rows = -(-len(tensor) // mesh.size())
    return min(mesh.get_local_rank() * rows, len(tensor))


class FullWeight(_Wrapper):
    """A gathered weight: `data8`, float8 [out, in], cast with `scale`, float32 and 0-dim."""

    def __init__(self, data8: Tensor, scale: Tensor) -> None:
        self.data8 = data8
        self.scale = scale

    def plain(self) -> Tensor:
        """The dequantized weight, float32."""
        return self.data8.float() / self.scale

    def same(self) -> Tensor:
        """This weight, detached."""
        return FullWeight(self.data8, self.scale)
