"""Faults of hardware, drivers and libraries, put into the functions that compute: what `conform` is
there to find. Each breaks a function of the package, or one of torch's that the package calls."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fp8stack import numerics
from fp8stack.backends import delayed, emulate, operands
from fp8stack.formats import FORMATS
from fp8stack.numerics import (
    AmaxHistory,
    RandomBits,
    blocks,
    cast,
    fused,
    hadamard,
    quantized,
    rounding,
)
from fp8stack.numerics import random as random_bits
from fp8stack.ops import attention, kernels, scaled_gemm

amax: Any = sys.modules["fp8stack.numerics.amax"]  # the package has a function of this name
EXACT_CODE = blocks.e8m0_code
Put = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, tuple[str, Put]] = {}


def fault(name: str, only: str) -> Callable[[Put], Put]:
    """A fault, and the checks that have to find it."""

    def add(put: Put) -> Put:
        FAULTS[name] = only, put
        return put

    return add


def changed(where: Any, name: str, only: str, what: str, change: Callable[..., Any]) -> None:
    """A fault: what a function gives is passed through `change(result, *its arguments)`."""

    def put(patch: pytest.MonkeyPatch) -> None:
        exact = getattr(where, name)

        def broken(*given: Any, **options: Any) -> Any:
            return change(exact(*given, **options), *given, **options)

        everywhere(patch, exact, broken, where, name)

    FAULTS[what] = only, put


def everywhere(patch: pytest.MonkeyPatch, exact: Any, broken: Any, where: Any, name: str) -> None:
    """Put `broken` wherever the package has imported `exact` to."""
    patch.setattr(where, name, broken)
    for module in [m for key, m in sys.modules.items() if key.startswith("fp8stack.")]:
        for key, value in list(vars(module).items()):
            if value is exact:
                patch.setattr(module, key, broken)


def bytes_of(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def with_codes(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    return change(bytes_of(x)).view(x.dtype)


# Casts


def _saturated(scaled: Tensor, target: Any, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    data = rounded(scaled.clamp(-target.max, target.max)).to(target.dtype)
    bytes_of(data).masked_fill_(scaled.isnan(), 0x7F)
    return data


@fault("bfloat16 is rounded twice", "casts: bf16*eager")
def _(patch: pytest.MonkeyPatch) -> None:
    def twice(x: Tensor, scale: Any, format: str = "e4m3") -> Tensor:
        scaled = x * torch.as_tensor(scale, dtype=torch.float32)  # stays bfloat16
        return cast.saturated(scaled.float(), FORMATS[format])

    everywhere(patch, numerics.cast_to_fp8, twice, cast, "cast_to_fp8")


def _large(data: Tensor, scaled: Tensor, target: Any, code: int) -> Tensor:
    over = scaled.abs() > target.max
    return with_codes(data, lambda codes: torch.where(over, codes & 0x80 | code, codes))


_CASTS = "casts: *eager"
for what, only, change in (
    ("what is too large becomes NaN", _CASTS, lambda d, s, t: _large(d, s, t, 0x7F)),
    ("E5M2 saturates to infinity", "casts: * e5m2, eager", lambda d, s, t: _large(d, s, t, 0x7C)),
    (
        "-0 loses its sign", _CASTS,
        lambda d, s, t: with_codes(d, lambda c: torch.where(c == 0x80, 0, c)),
    ),
    (
        "NaN keeps its sign", "casts: *eager",
        lambda d, s, t: with_codes(d, lambda c: torch.where(s.isnan() & s.signbit(), 0xFF, c)),
    ),
    (
        "subnormals are flushed to zero", _CASTS,
        lambda d, s, t: with_codes(
            d, lambda c: torch.where(d.float().abs() < t.min_normal, c & 0x80, c)
        ),
    ),
    (
        "rounded towards zero", _CASTS,
        lambda d, s, t: with_codes(d, lambda c: torch.where(d.float().abs() > s.abs(), c - 1, c)),
    ),
    (
        "ties go away from zero", _CASTS,
        lambda d, s, t: _saturated(s, t, lambda x: torch.nextafter(x, x.sign() * torch.inf)),
    ),
    (
        "one element in 100,000 is off by a code", _CASTS,
        lambda d, s, t: with_codes(d, lambda c: _one_off(c)),
    ),
):  # fmt: skip
    changed(cast, "saturated", only, what, change)


def _one_off(codes: Tensor) -> Tensor:
    made = codes.clone()
    made.view(-1)[777 % max(1, made.numel()) :: 100_003] ^= 1
    return made


changed(
    kernels, "_cast_transpose", "casts: *transpose*", "the transpose is a copy",
    lambda made, *given: (made[0], made[0].clone(), made[2]),
)  # fmt: skip
changed(
    kernels, "_cast_transpose", "casts: *transpose*", "the amax is that of the rounded values",
    lambda made, x, scale, *given: (*made[:2], numerics.amax(made[0].float() / scale).view(1)),
)  # fmt: skip
changed(
    cast, "amax", "histories: fp8_state*", "an amax leaves the last row out",
    lambda made, x: made if x.ndim < 2 else cast.magnitude(x[:-1]).max(),
)  # fmt: skip

# Scales and blocks

changed(
    cast, "inverse", "scales: *eager", "the inverse is one unit off",
    lambda made, scale: torch.nextafter(made, torch.full_like(made, torch.inf)),
)  # fmt: skip
changed(
    cast, "truncate_to_power_of_two", "scales: *eager", "powers of two are rounded up",
    lambda made, scale: torch.where(made == scale, made, made * 2),
)  # fmt: skip
changed(
    blocks, "e8m0_value", "quantizers: mxfp8*operators", "E8M0's code 0 counts as zero",
    lambda made, codes: torch.where(codes == 0, 0.0, made),
)  # fmt: skip
changed(
    blocks, "e8m0_code", "quantizers: mxfp8*eager", "E8M0's largest scale is its NaN, 255",
    lambda made, *given: torch.where(made == 254, 255, made),
)  # fmt: skip
changed(
    blocks, "e8m0_code", "golden: mxfp8*", "E8M0's scales are rounded down",
    lambda made, amax, format, rounding: (
        EXACT_CODE(amax, format, "floor") if rounding == "rceil" else made
    ),
)  # fmt: skip
changed(
    quantized, "_block_sizes", "quantizers: blocks*eager", "a block is transposed",
    lambda made, *given: made[::-1],
)  # fmt: skip
changed(
    quantized, "_two_levels", "quantizers: nvfp4*operators", "NVFP4's upper scale is left out",
    lambda made, *given: made._replace(factor=torch.ones_like(made.factor)),
)  # fmt: skip
changed(
    quantized, "_packed", "quantizers: mxfp4*eager", "FP4's halves of a byte are swapped",
    lambda made, *given: made << 4 | made >> 4,
)  # fmt: skip


@fault("the scales of MX are not swizzled", "layouts: scales 1x32")
def _(patch: pytest.MonkeyPatch) -> None:
    def plain(codes: Tensor) -> Tensor:
        rows, columns = codes.shape
        padded = F.pad(bytes_of(codes), (0, -columns % 4, 0, -rows % 128))
        return padded.view(torch.float8_e8m0fnu)

    patch.setattr(scaled_gemm, "_swizzled", plain)


@fault("the scales of squares are not padded", "layouts: scales 128x128")
def _(patch: pytest.MonkeyPatch) -> None:
    exact = scaled_gemm.pack_scales

    def unpadded(scales: Tensor, kind: Any) -> Tensor:
        if kind is scaled_gemm.Scales.SQUARES:
            return scales.contiguous().t()
        return exact(scales, kind)

    everywhere(patch, exact, unpadded, scaled_gemm, "pack_scales")


# Stochastic rounding and transforms

changed(
    RandomBits, "bits", "quantizers: nvfp4*operators", "stochastic rounding always rounds away",
    lambda made, *given: torch.zeros_like(made),
)  # fmt: skip


@fault("stochastic rounding draws zeros in numba's kernels too", "quantizers: nvfp4*numba*")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        rounding,
        "_bits",
        lambda drawn: (None, 0, 0, 0) if drawn is None else (torch.tensor(0), 0, 0, 0),
    )


@fault("all stochastic gradients are zero", "gemms: nvfp4 by emulate*")
def _(patch: pytest.MonkeyPatch) -> None:
    exact = operands.LayerOperands.round

    def zeros(self: Any, x: Tensor, name: str, *given: Any, **options: Any) -> Any:
        made = exact(self, x, name, *given, **options)
        if name != "grad_output":
            return made
        return tuple(each and each._replace(values=each.values * 0) for each in made)

    patch.setattr(operands.LayerOperands, "round", zeros)


@fault("Philox with nine rounds", "random: *eager")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(random_bits, "_ROUNDS", 9)


@fault("the high word of a pass is left out of its bits", "random: *eager")
def _(patch: pytest.MonkeyPatch) -> None:
    exact = random_bits.philox4x32
    low = lambda c0, c1, c2, c3, *key: exact(c0, c1, c2, c3 * 0, *key)  # noqa: E731
    patch.setattr(random_bits, "philox4x32", low)


@fault("the Hadamard transform has no signs", "quantizers: nvfp4*")
def _(patch: pytest.MonkeyPatch) -> None:
    fused._plan.cache_clear()
    patch.setitem(hadamard.MINUS, 16, 0)


# numba's kernels


@fault("the last row is lost where several threads work", "quantizers: *3 threads")
def _(patch: pytest.MonkeyPatch) -> None:
    exact = fused._round

    def lost(*given: Any) -> list[Tensor]:
        made = exact(*given)
        if torch.get_num_threads() > 1:
            made[0][-1] = 0
        return made

    patch.setattr(fused, "_round", lost)


@fault(
    "numba's kernel fuses the product with the sum that rounds", "quantizers: per tensor*1 thread"
)
def _(patch: pytest.MonkeyPatch) -> None:
    exact = fused._round

    def off(x: Tensor, *given: Any) -> list[Tensor]:
        made = exact(x, *given)
        made[0].view(-1)[::1009] *= 1.125
        return made

    patch.setattr(fused, "_round", off)


# Histories


@fault("an amax is dropped", "histories: a trace*")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(amax, "record_amax", lambda *given: None)


@fault("the torch backend drops the gradients' amax", "histories: fp8_state of torch*")
def _(patch: pytest.MonkeyPatch) -> None:
    exact = delayed.Slot.record
    keep = lambda self, value: None if "grad" in self.name else exact(self, value)  # noqa: E731
    patch.setattr(delayed.Slot, "record", keep)


@fault("a NaN enters the amax", "histories: a trace*")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        amax, "record_amax", lambda kept, new, counts=None: kept.copy_(torch.maximum(kept, new))
    )


@fault("the window moves twice", "histories: updates*")
def _(patch: pytest.MonkeyPatch) -> None:
    exact = AmaxHistory.update

    def twice(self: Any, slots: Any = None) -> None:
        exact(self, slots)
        self.history.copy_(self.history.roll(-1, 0))

    patch.setattr(AmaxHistory, "update", twice)


@fault("the margin is ignored", "histories: *trace*")
def _(patch: pytest.MonkeyPatch) -> None:
    exact = amax._Rules.of
    plain = lambda qs, history: exact([dataclasses.replace(q, margin=0) for q in qs], history)  # noqa: E731
    patch.setattr(amax._Rules, "of", staticmethod(plain))


@fault("the scales of two operands are swapped", "gemms: delayed*")
def _(patch: pytest.MonkeyPatch) -> None:
    exact = delayed.Slot.scale

    def other(self: Any) -> Tensor:
        slots = self._delayed._slots
        return exact(slots[(slots.index(self) + 2) % len(slots)])

    patch.setattr(delayed.Slot, "scale", other)


@fault("a micro-batch is not recorded", "histories: fp8_state of emulate*")
def _(patch: pytest.MonkeyPatch) -> None:
    exact = delayed.DelayedScaling._update
    passes = [0]

    def some(self: Any, slots: Any) -> None:
        passes[0] += 1
        if passes[0] % 5:
            exact(self, slots)

    patch.setattr(delayed.DelayedScaling, "_update", some)


# GEMMs


def _sums(change: Callable[[Tensor], Tensor]) -> Any:
    """torch._scaled_mm whose sums over 32 products are changed before they are added up."""

    def multiply(
        a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, bias: Any, out_dtype: Any,
        use_fast_accum: bool,
    ) -> Tensor:  # fmt: skip
        left, right = a.float(), b.float()
        if use_fast_accum:
            y = left @ right
        else:
            y = torch.zeros(left.shape[0], right.shape[1])
            for start in range(0, left.shape[1], 32):
                y = change(y + left[:, start : start + 32] @ right[start : start + 32])
        y = y * (scale_a * scale_b)
        return (y if bias is None else y + bias).to(out_dtype)

    return multiply


@fault("slow accumulation is fast: 13 bits are kept", "gemms: e4m3*slow*")
def _(patch: pytest.MonkeyPatch) -> None:
    def cut(y: Tensor) -> Tensor:
        return (y.view(torch.int32) & -(1 << 10)).view(torch.float32)

    patch.setattr(torch, "_scaled_mm", _sums(cut))


@fault("a GEMM accumulates in bfloat16", "gemms: current by torch*")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "_scaled_mm", _sums(lambda y: y.bfloat16().float()))


changed(
    emulate, "_gemm", "gemms: current by emulate*", "one product in 256 is left out",
    lambda y, a, b, turn, scales, bias: y * 1.004,
)  # fmt: skip
changed(
    emulate, "_factors", "gemms: rowwise by emulate*", "the scales of rows are reversed",
    lambda made, *given: tuple(p.flip(0) if isinstance(p, Tensor) else p for p in made),
)  # fmt: skip


@fault("wgrad takes the copies of fprop, quantized the other way", "gemms: mxfp8 by*")
def _(patch: pytest.MonkeyPatch) -> None:
    exact = operands.LayerOperands.round

    def same(self: Any, x: Tensor, name: str, record: bool, both: bool, bf16: bool = False) -> Any:
        along, _ = exact(self, x, name, record, False, bf16)
        return along, along if both else None

    patch.setattr(operands.LayerOperands, "round", same)


@fault("the bias is left out", "gemms: current by torch*")
def _(patch: pytest.MonkeyPatch) -> None:
    exact = torch._scaled_mm
    patch.setattr(
        torch, "_scaled_mm", lambda a, b, **options: exact(a, b, **options | {"bias": None})
    )


# Attention

changed(
    attention, "dense_mask", "attention: documents*", "a document sees the one before it",
    lambda made, allowed, dtype: torch.zeros_like(made).masked_fill_(
        ~torch.ones_like(allowed).tril(), -torch.inf
    ),
)  # fmt: skip


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return ctx.change(dy), None


def _with_gradient(patch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    exact = F.scaled_dot_product_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return exact(q, _Gradient.apply(k, change), v, **options)

    patch.setattr(F, "scaled_dot_product_attention", attend)


@fault("a gradient under a mask is NaN", "attention: documents*")
def _(patch: pytest.MonkeyPatch) -> None:
    def nan(dk: Tensor) -> Tensor:
        dk = dk.clone()
        dk[0, 0, -1, 0] = torch.nan
        return dk

    _with_gradient(patch, nan)


@fault("the gradient of the keys is 2 percent off", "attention: causal*")
def _(patch: pytest.MonkeyPatch) -> None:
    _with_gradient(patch, lambda dk: dk * 1.02)
