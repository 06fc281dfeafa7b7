"""Weights that FSDP2's ranks shard and gather as FP8 bytes: a quarter of float32's.

Each rank casts its rows with the scale of the whole weight, so that the gathered bytes equal a cast
of the whole weight. The float32 rows stay the master weights. For one scale per tensor only: blocks
do not end where ranks' rows do.

FSDP2 asks a parameter's local tensor for `fsdp_pre_all_gather` and `fsdp_post_all_gather`:
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
    """A layer whose weight ranks shard: a `QuantizedLinear`. `quantizers` has the `ScaledOperand`
    of "weight", which cast rows with the scale of the whole weight."""

    in_fp8: bool
    quantizers: Any


class _Wrapper(Tensor):
    """A tensor that looks like float32 and holds another. Operators act on `plain()`."""

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
        """`tensor`, which is a view of this or takes its place, as one of the same kind."""
        return tensor

    def same(self) -> Tensor:
        """The same values, apart from autograd."""
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
            assert tuple(args[1]) == first.shape, "FSDP2 asks for the whole, as it is"
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
    """The float32 rows `held` of a layer's weight that are on this rank. They are gathered as FP8
    bytes where the layer is `in_fp8`, else as float32."""

    def __init__(self, held: Tensor, layer: GatheredLayer) -> None:
        self._held = held
        self._layer = layer

    def plain(self) -> Tensor:
        """The rows, as a plain tensor."""
        return self._held

    def like(self, tensor: Tensor) -> Tensor:
        """Those rows of the same weight that `tensor` has."""
        return ShardedWeight(tensor, self._layer)

    def same(self) -> Tensor:
        """The same rows, apart from autograd."""
        return self.like(self._held.detach())

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor], tuple[Tensor | None]]:
        """What to gather from every rank, and what stays here."""
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
        """The whole weight, of all ranks' rows."""
        (data,), (scale,) = gathered, local
        if out is None:
            if scale is None:
                return data, (data,)
            dtype8 = self._layer.quantizers["weight"].target.dtype
            assert dtype8 is not None
            return FullWeight(data.view(dtype8), scale), (data,)
        # The second time, FSDP2 has gathered into the same memory.
        if isinstance(out, FullWeight):
            assert scale is not None
            assert out.data8.data_ptr() == data.data_ptr()
            out.scale = scale
        return None


def local_shard(tensor: Tensor) -> Tensor:
    """The rows of `tensor` that are on this rank; all, if it is not shared out."""
    if not isinstance(tensor, DTensor):
        return tensor
    rows = tensor.to_local()
    return rows.plain() if isinstance(rows, ShardedWeight) else rows


class FullWeight(_Wrapper):
    """A whole weight in FP8, as gathered: `data8` is float8 [out, in], cast with the 0-dim float32
    `scale`."""

    def __init__(self, data8: Tensor, scale: Tensor) -> None:
        self.data8 = data8
        self.scale = scale

    def plain(self) -> Tensor:
        """The values of the bytes, float32."""
        return self.data8.float() / self.scale

    def same(self) -> Tensor:
        """The same weight, apart from autograd."""
        return FullWeight(self.data8, self.scale)
