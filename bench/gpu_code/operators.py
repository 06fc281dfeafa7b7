"""Operators of GPUs on the CPU: GEMMs of quantized operands, and attention.

The GEMMs multiply what the bytes and scales stand for, in float32; their operands are recorded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fp8stack.numerics.operators import EAGER

CPU = torch.device("cpu")
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def on_cpu(value: Any) -> Any:
    """An argument of an operator; the CPU for a device."""
    return CPU if isinstance(value, torch.device) else value


_aten: Any = torch.ops.aten
_PLAIN_GEMMS = {
    getattr(packet, overload)
    for packet in (_aten.mm, _aten.addmm)
    for overload in packet.overloads()
}


class Gemm(NamedTuple):
    """The tensors that a scaled GEMM reads."""

    operator: str
    operands: tuple[Tensor, ...]

    @property
    def geometry(self) -> list[tuple[torch.Size, torch.dtype]]:
        """The shapes and dtypes of the tensors."""
        return [(x.shape, x.dtype) for x in self.operands]

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors."""
        return sum(x.nbytes for x in self.operands)


class CpuOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators of GPUs on the CPU.

    Attributes:
        gemms: the scaled GEMMs, in the order of the calls.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gemms: list[Gemm] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = tree_map(on_cpu, dict(kwargs or {}))
        args = tree_map(on_cpu, args)
        space, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        if space == "fp8stack" and name.endswith("_gemm"):
            with self:  # to see the GEMMs in it
                return EAGER[name](*args, **options)
        if space == "pretended":
            return OPERATORS[name](*args)
        if name not in OPERATORS and func not in _PLAIN_GEMMS:
            return func(*args, **options)
        out = options.pop("out", None)
        if name in OPERATORS:
            tensors = [x for x in tree_leaves((args, options)) if isinstance(x, Tensor)]
            fp4 = torch.float4_e2m1fn_x2  # which cannot be copied
            read = [(x.view(torch.uint8) if x.dtype == fp4 else x).clone() for x in tensors]
            self.gemms.append(Gemm(name, tuple(read)))
            y = OPERATORS[name](*args, **options)
        else:
            y = _multiplied(*args, **options)
        return y if out is None else out.copy_(y)


def _multiplied(
    *arguments: Any, out_dtype: torch.dtype | None = None, beta: float = 1, alpha: float = 1
) -> Tensor:
    """`mm` or `addmm`, whose sums do not depend on how the matrices lie in memory."""
    *biases, a, b = (x for x in arguments if isinstance(x, Tensor))
    dtypes = [x for x in arguments if isinstance(x, torch.dtype)]
    y = alpha * (a.float().contiguous() @ b.float().contiguous())
    if biases and beta:  # of a bias without a factor, elements may not be written yet
        y = y + beta * biases[0].float()
    return y.to(out_dtype or (dtypes or [a.dtype])[0])


# Scaled GEMMs


def _scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    y = (a.float() * scale_a) @ (b.float() * scale_b)
    return (y if bias is None else y + bias.float()).to(out_dtype or torch.bfloat16)


def _scaled_mm_v2(
    a: Tensor,
    b: Tensor,
    scale_a: list[Tensor],
    recipe_a: list[int],
    swizzle_a: list[int],
    scale_b: list[Tensor],
    recipe_b: list[int],
    swizzle_b: list[int],
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    *more: Any,
) -> Tensor:
    first, second = _values(a, scale_a, recipe_a[0]), _values(b.t(), scale_b, recipe_b[0])
    return (first @ second.t()).to(out_dtype or torch.bfloat16)


def _scaled_grouped_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    assert offs is not None
    y = torch.zeros(len(a), b.shape[-1], dtype=out_dtype or torch.bfloat16)
    start = 0
    for group, end in enumerate(offs.tolist()):
        rows = a[start:end].float() * scale_a[start:end, None]
        y[start:end] = (rows @ (b[group].float() * scale_b[group])).to(y.dtype)
        start = end
    return y


def _values(data: Tensor, scales: list[Tensor], layout: int) -> Tensor:
    """The float32 values of an operand [rows, K] in blocks."""
    rows, scale = len(data), scales[0]
    if layout == ScalingType.BlockWise1x16.value:
        codes = data.contiguous().view(torch.uint8).int()
        codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
        values = _E2M1[codes & 7] * (1 - 2 * (codes >> 3))
        return values * _factors(scale, values, 16) * scales[1]
    values = data.float()
    if layout == ScalingType.BlockWise1x32.value:
        return values * _factors(scale, values, 32)
    if layout == ScalingType.BlockWise1x128.value:
        return values * scale.repeat_interleave(128, 1)[:, : values.shape[1]]
    assert layout == ScalingType.BlockWise128x128.value
    squares = scale.t().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return values * squares[:rows, : values.shape[1]]


def _factors(scales: Tensor, values: Tensor, size: int) -> Tensor:
    """The scale of each element, from scales swizzled in tiles of 128 x 4: see `pack_scales`."""
    rows, columns = values.shape
    high, wide = -(-rows // 128), -(-columns // (4 * size))
    tiles = scales.view(torch.uint8).reshape(high, wide, 32, 4, 4)
    codes = tiles.permute(0, 3, 2, 1, 4).reshape(high * 128, wide * 4)
    factors = codes.contiguous().view(scales.dtype).float()
    return factors.repeat_interleave(size, 1)[:rows, :columns]


# Attention


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `pretend`."""
    weights, _, v = _weights(q, k, v, mask)
    return _by_token(weights @ v, q), q.new_zeros(q.shape[:-1], dtype=torch.float32)


def _attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *forward: Tensor
) -> tuple[Tensor, ...]:
    weights, k_of_heads, v_of_heads = _weights(q, k, v, mask)
    dy = dy.float()
    change = dy @ v_of_heads.transpose(-2, -1)
    dscores = weights * (change - (change * weights).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5
    dk, dv = dscores.transpose(-2, -1) @ q.float(), weights.transpose(-2, -1) @ dy
    groups = k.shape[1]
    dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in (dk, dv))
    return _by_token(dscores @ k_of_heads, q), _by_token(dk, k), _by_token(dv, v)


def _weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Attention weights [B, H, T, T], and the keys and values of all heads: float32."""
    k, v = (x.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q.float() @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if mask is None:
        mask = torch.full(scores.shape[-2:], -torch.inf).triu(1)
    return (scores + mask.float()).softmax(-1), k, v


def _by_token(x: Tensor, like: Tensor) -> Tensor:
    """`x` [B, H, T, E] in the dtype of another tensor, in memory in the order [B, T, H, E]."""
    return x.to(like.dtype).transpose(1, 2).contiguous().transpose(1, 2)


OPERATORS: dict[str, Any] = {
    "_scaled_mm": _scaled_mm,
    "_scaled_mm_v2": _scaled_mm_v2,
    "_scaled_grouped_mm": _scaled_grouped_mm,
    "attention": _attention,
    "attention_backward": _attention_backward,
}
