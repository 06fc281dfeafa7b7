"""Faults of hardware, drivers and libraries, put into the functions that compute, for `conform` to
find. Each breaks a function of the package, or one of torch's that the package calls."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fp8stack import numerics
from fp8stack.analysis.conform import casts, suite
from fp8stack.analysis.conform.checks import Context, Facts
from fp8stack.common.formats import FORMATS, Quantizer
from fp8stack.layers import delayed, emulate
from fp8stack.layers.kernels import attention, fused_casts, nvfp4, scaled_gemm
from fp8stack.layers.kernels import weight_casts as weights
from fp8stack.layers.kernels.activations import ACTIVATIONS, GRADIENTS
from fp8stack.numerics import (
    AmaxHistory,
    RandomBits,
    amax_history,
    blocks,
    cast,
    fused,
    groups,
    hadamard,
    quantized,
    rounding,
    scales,
)
from fp8stack.numerics import random as random_bits
from fp8stack.precision import probe
from tests.support.triton_code import launched_on_a_cpu

CONTEXT = Context(probe("cpu"), quick=True)
Put = Callable[[pytest.MonkeyPatch], None]


def report_with(fault: tuple[str, Put], context: Context, patch: pytest.MonkeyPatch) -> Facts:
    """The report on the rows that a fault concerns, with the fault."""
    only, put = fault
    fused._plan.cache_clear()
    put(patch)
    try:
        return suite.run(context, only)
    finally:
        fused._plan.cache_clear()


def instead(where: Any, name: str, broken: Callable[..., Any]) -> Put:
    """Make a function return `broken(the exact function, *its arguments)`, in every module of the
    package that imports it."""

    def put(patch: pytest.MonkeyPatch) -> None:
        exact = getattr(where, name)

        def fault(*arguments: Any, **options: Any) -> Any:
            return broken(exact, *arguments, **options)

        patch.setattr(where, name, fault)
        for module in [m for key, m in sys.modules.items() if key.startswith("fp8stack.")]:
            for key, value in list(vars(module).items()):
                if value is exact:
                    patch.setattr(module, key, fault)

    return put


def after(where: Any, name: str, change: Callable[..., Any]) -> Put:
    """Pass the result of a function through `change(result, *its arguments)`."""
    return instead(where, name, lambda exact, *x, **more: change(exact(*x, **more), *x, **more))


# Casts


def bytes_of(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def codes(change: Callable[..., Tensor]) -> Put:
    """The codes of a saturated cast are `change(codes, data, scaled, format)`."""
    return after(
        *(cast, "saturated"),
        lambda data, scaled, target: change(bytes_of(data), data, scaled, target).view(data.dtype),
    )


def too_large(code: int) -> Put:
    return codes(lambda c, d, s, t: torch.where(s.abs() > t.max, c & 0x80 | code, c))


def ties_away(exact: Any, scaled: Tensor, target: Any) -> Tensor:
    held = scaled.clamp(-target.max, target.max)
    data = torch.nextafter(held, held.sign() * torch.inf).to(target.dtype)
    bytes_of(data).masked_fill_(scaled.isnan(), 0x7F)
    return data


def one_off(codes: Tensor, *arguments: Any) -> Tensor:
    changed = codes.clone()
    changed.view(-1)[777 % max(1, changed.numel()) :: 100_003] ^= 1
    return changed


def rounded_twice(exact: Any, x: Tensor, scale: Any, format: str = "e4m3") -> Tensor:
    scaled = x * torch.as_tensor(scale, dtype=torch.float32)  # stays bfloat16
    return cast.saturated(scaled.float(), FORMATS[format])


# Scales and numba's kernels


def not_swizzled(exact: Any, codes: Tensor) -> Tensor:
    rows, columns = codes.shape
    padded = F.pad(bytes_of(codes), (0, -columns % 4, 0, -rows % 128))
    return padded.view(torch.float8_e8m0fnu)


def not_padded(packed: Tensor, scales: Tensor, kind: Any) -> Tensor:
    return scales.contiguous().t() if kind is scaled_gemm.ScaleLayout.SQUARES else packed


def without_last_row(outputs: list[Tensor], *arguments: Any) -> list[Tensor]:
    if torch.get_num_threads() > 1:
        outputs[0][-1] = 0
    return outputs


def some_off(outputs: list[Tensor], *arguments: Any) -> list[Tensor]:
    outputs[0].view(-1)[::1009] *= 1.125
    return outputs


# Histories


def twice(_: None, self: Any, slots: Any = None) -> None:
    self.history.copy_(self.history.roll(-1, 0))


def of_another(exact: Any, self: Any, record: bool) -> tuple[Any, ...]:
    slots = list(self._delayed.slots.values())
    scale, _, _ = exact(slots[(slots.index(self) + 2) % len(slots)], record)
    return (scale, *exact(self, record)[1:])


def not_every_fifth(patch: pytest.MonkeyPatch) -> None:
    passes = itertools.count(1)
    instead(
        *(delayed.DelayedScaling, "apply_pending_update"),
        lambda exact, self: exact(self) if next(passes) % 5 else None,
    )(patch)


# GEMMs and attention


def sums(change: Callable[[Tensor], Tensor]) -> Put:
    """torch._scaled_mm whose sums over 32 products are changed before they are added up."""

    def multiply(
        exact: Any, a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, bias: Any,
        out_dtype: Any, use_fast_accum: bool,
    ) -> Tensor:  # fmt: skip
        a_values, b_values = a.float(), b.float()
        if use_fast_accum:
            y = a_values @ b_values
        else:
            y = torch.zeros(a_values.shape[0], b_values.shape[1])
            for start in range(0, a_values.shape[1], 32):
                y = change(y + a_values[:, start : start + 32] @ b_values[start : start + 32])
        y = y * (scale_a * scale_b)
        return (y if bias is None else y + bias).to(out_dtype)

    return instead(torch, "_scaled_mm", multiply)


def zero_gradients(copies: Any, operand: Any, *arguments: Any) -> Any:
    if operand.name != "grad_output":
        return copies
    return tuple(copy and copy._replace(values=copy.values * 0) for copy in copies)


def with_ends_before_the_last_row(sizes: np.ndarray, *arguments: Any) -> np.ndarray:
    ends = np.cumsum(sizes)
    ends[:-1] = np.maximum(ends[:-1] - 1, 0)
    return np.diff(ends, prepend=0)


def along_twice(exact: Any, operand: Any, x: Tensor, with_columnwise: bool, call: Any) -> Any:
    rowwise, _ = exact(operand, x, False, call)
    return rowwise, rowwise._replace(layout=operand.layouts[1]) if with_columnwise else None


def gradient_of_keys(change: Callable[[Tensor], Tensor]) -> Put:
    def attend(exact: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        k = k.clone()
        k.register_hook(change)
        return exact(q, k, v, **options)

    return instead(F, "scaled_dot_product_attention", attend)


def last_is_nan(dk: Tensor) -> Tensor:
    dk = dk.clone()
    dk[0, 0, -1, 0] = torch.nan
    return dk


def without_margins(exact: Any, quantizers: list[Quantizer], history: Tensor) -> Any:
    """The rules of an amax history, of quantizers whose margins are 0."""
    return exact([dataclasses.replace(q, margin=0) for q in quantizers], history)


# Each fault with the rows that have to find it.
FAULTS: dict[str, tuple[str, Put]] = {
    "bfloat16 is rounded twice": (
        "casts: bf16*eager", instead(cast, "cast_to_fp8", rounded_twice)
    ),
    "what is too large becomes NaN": ("casts: *eager", too_large(0x7F)),
    "E5M2 saturates to infinity": ("casts: * e5m2, eager", too_large(0x7C)),
    "-0 loses its sign": (
        "casts: *eager", codes(lambda c, d, s, t: torch.where(c == 0x80, 0, c))
    ),
    "NaN keeps its sign": (
        "casts: *eager",
        codes(lambda c, d, s, t: torch.where(s.isnan() & s.signbit(), 0xFF, c)),
    ),
    "subnormals are flushed to zero": (
        "casts: *eager",
        codes(lambda c, d, s, t: torch.where(d.float().abs() < t.min_normal, c & 0x80, c)),
    ),
    "rounded towards zero": (
        "casts: *eager",
        codes(lambda c, d, s, t: torch.where(d.float().abs() > s.abs(), c - 1, c)),
    ),
    "ties go away from zero": ("casts: *eager", instead(cast, "saturated", ties_away)),
    "one element in 100,000 is off by a code": ("casts: *eager", codes(one_off)),
    "the transpose is a copy": (
        "casts: *transpose*",
        after(
            fused_casts, "_cast_op",
            lambda copies, *x: (copies[0], copies[0].clone(), *copies[2:]),
        ),
    ),
    "the amax is that of the rounded values": (
        "casts: *transpose*",
        after(
            fused_casts, "_cast_op",
            lambda copies, name, x, dy, scale, *arguments: (
                *copies[:2], numerics.amax(copies[0].float() / scale).view(1), copies[3]
            ),
        ),
    ),
    "an amax leaves the last row out": (
        "histories: fp8_state*",
        after(
            cast, "amax",
            lambda amax, x: amax if x.ndim < 2 else cast.magnitude(x[:-1]).max(),
        ),
    ),
    "the inverse is one unit off": (
        "casts: *eager",
        after(
            cast, "inverse",
            lambda inverse, scale: torch.nextafter(inverse, torch.full_like(inverse, torch.inf)),
        ),
    ),
    "powers of two are rounded up": (
        "quantizers: block, bytes*",
        after(
            cast, "truncate_to_power_of_two",
            lambda power, scale: torch.where(power == scale, power, power * 2),
        ),
    ),
    "E8M0's code 0 counts as zero": (
        "quantizers: mxfp8*operators",
        after(scales, "e8m0_value", lambda values, codes: torch.where(codes == 0, 0.0, values)),
    ),
    "E8M0's largest scale is its NaN, 255": (
        "quantizers: mxfp8*eager",
        after(scales, "e8m0_code", lambda code, *x: torch.where(code == 254, 255, code)),
    ),
    "E8M0's scales are rounded down": (
        "golden: mxfp8*",
        instead(
            scales, "e8m0_code",
            lambda exact, amax, format, rounding: exact(
                amax, format, "floor" if rounding == "rceil" else rounding
            ),
        ),
    ),
    "the last row of a group counts to the next": (
        "groups: current by emulate",
        after(groups, "sizes_of", with_ends_before_the_last_row),
    ),
    "a block is transposed": (
        "quantizers: block, bytes*", after(blocks, "block_sizes", lambda sizes, *x: sizes[::-1])
    ),
    "the second copy in blocks is the transpose of the first": (
        "quantizers: block, both*",
        after(
            fused_casts, "_blocks_op",
            lambda copies, *x: (copies[0], copies[0].t().contiguous(), *copies[2:]),
        ),
    ),
    "the scales of MX's second copy are in reverse": (
        "quantizers: mxfp8, both*",
        after(
            fused_casts, "_blocks_op",
            lambda copies, *x: (
                *copies[:3], bytes_of(copies[3]).flip(0).view(copies[3].dtype), copies[4]
            ),
        ),
    ),
    "an activation is not rounded before it is cast": (
        "casts: relu2*",
        lambda patch: patch.setitem(ACTIVATIONS, "relu2", lambda x: F.relu(x.float()).square()),
    ),
    "the gradient of an activation lacks a factor": (
        "casts: relu2 gradient*",
        lambda patch: patch.setitem(GRADIENTS, "relu2", lambda x, dy: dy * F.relu(x)),
    ),
    "NVFP4's upper scale is left out": (
        "quantizers: nvfp4*operators",
        after(
            scales, "_two_levels",
            lambda levels, *arguments: levels._replace(factor=torch.ones_like(levels.factor)),
        ),
    ),
    "the upper scale of a transformed copy is that of the matrix": (
        "quantizers: nvfp4, both*",
        after(nvfp4, "_amaxes_op", lambda amaxes, *x: amaxes[:2].repeat(2)),
    ),
    "FP4's halves of a byte are swapped": (
        "quantizers: mxfp4*eager",
        after(quantized, "_packed", lambda packed, *arguments: packed << 4 | packed >> 4),
    ),
    "the scales of MX are not swizzled": (
        "layouts: scales 1x32", instead(scaled_gemm, "_swizzled", not_swizzled)
    ),
    "the scales of squares are not padded": (
        "layouts: scales 128x128", after(scaled_gemm, "pack_scales", not_padded)
    ),
    "stochastic rounding always rounds away": (
        "quantizers: nvfp4*operators",
        after(RandomBits, "bits", lambda bits, *arguments: torch.zeros_like(bits)),
    ),
    "stochastic rounding draws zeros in numba's kernels too": (
        "quantizers: nvfp4*numba*",
        after(
            rounding, "_bits",
            lambda bits, drawn: (torch.tensor(0), 0, 0, 0),
        ),
    ),
    "all stochastic gradients are zero": (
        "gemms: nvfp4 by emulate*", after(emulate.EmulatedOperand, "cast", zero_gradients)
    ),
    "Philox with nine rounds": (
        "quantizers: nvfp4, values, by torch*",
        lambda patch: patch.setattr(random_bits, "_ROUNDS", 9),
    ),
    "the high word of a pass is left out of its bits": (
        "quantizers: nvfp4, values, by torch*",
        instead(
            random_bits, "philox4x32",
            lambda exact, c0, c1, c2, c3, *key: exact(c0, c1, c2, c3 * 0, *key),
        ),
    ),
    "the Hadamard transform has no signs": (
        "quantizers: nvfp4*", lambda patch: patch.setitem(hadamard.MINUS, 16, 0)
    ),
    "the last row is lost where several threads work": (
        "quantizers: *3 threads", after(fused, "round", without_last_row)
    ),
    "numba's kernel fuses the product with the sum that rounds": (
        "quantizers: current*1 thread", after(fused, "round", some_off)
    ),
    "an amax is dropped": (
        "histories: updates*", instead(amax_history, "record_amax", lambda *arguments: None)
    ),
    "the torch backend drops the gradients' amax": (
        "histories: fp8_state of torch*",
        instead(
            delayed.Slot, "cast_arguments",
            lambda exact, self, record: exact(self, record and "grad" not in self.name),
        ),
    ),
    "a NaN enters the amax": (
        "histories: updates*",
        instead(
            amax_history, "record_amax",
            lambda exact, recorded, new, counts=None: recorded.copy_(torch.maximum(recorded, new)),
        ),
    ),
    "the window moves twice": ("histories: updates*", after(AmaxHistory, "update", twice)),
    "the margin is ignored": (
        "histories: updates*",
        instead(amax_history._Rules, "of", without_margins),
    ),
    "the scales of two operands are swapped": (
        "gemms: delayed*", instead(delayed.Slot, "cast_arguments", of_another)
    ),
    "a micro-batch is not recorded": ("histories: fp8_state of emulate*", not_every_fifth),
    "slow accumulation is fast: 13 bits are kept": (
        "gemms: current by torch, positive, 1024 *",
        sums(lambda y: (y.view(torch.int32) & -(1 << 10)).view(torch.float32)),
    ),
    "a GEMM accumulates in bfloat16": (
        "gemms: current by torch*", sums(lambda y: y.bfloat16().float())
    ),
    "one product in 256 is left out": (
        "gemms: current by emulate*", after(emulate, "_multiply", lambda y, *arguments: y * 1.004)
    ),
    "the scales of rows are reversed": (
        "gemms: rowwise by emulate*",
        instead(
            emulate, "_multiply",
            lambda exact, a, b, transposed, *factors_and_more: exact(
                a, b, transposed,
                *(f if f is None or not f.ndim else f.flip(0) for f in factors_and_more[:2]),
                *factors_and_more[2:],
            ),
        ),
    ),
    "wgrad takes the copies of fprop, quantized the other way": (
        "gemms: mxfp8 by*", instead(emulate.EmulatedOperand, "cast", along_twice)
    ),
    "the bias is left out": (
        "gemms: current by torch*",
        instead(
            scaled_gemm, "scaled_gemm",
            lambda exact, *operands, **options: exact(*operands, **options | {"bias": None}),
        ),
    ),
    "a document sees the one before it": (
        "attention: documents*",
        after(
            attention, "dense_mask",
            lambda mask, allowed, dtype: torch.zeros_like(mask).masked_fill_(
                ~torch.ones_like(allowed).tril(), -torch.inf
            ),
        ),
    ),
    "a gradient under a mask is NaN": ("attention: documents*", gradient_of_keys(last_is_nan)),
    "the gradient of the keys is 2 percent off": (
        "attention: causal*", gradient_of_keys(lambda dk: dk * 1.02)
    ),
}  # fmt: skip


def other_rules(**changes: Any) -> Put:
    """Give the kernel for many weights another quantizer."""
    return instead(
        weights, "variant",
        lambda make_variant, quantizer, **options: make_variant(
            dataclasses.replace(quantizer, **changes), **options
        ),
    )  # fmt: skip


# Faults of the kernel for many weights, which a CPU runs only in Triton's interpreter.
OF_WEIGHTS: dict[str, tuple[str, Put]] = {
    "the amaxes of weights are not recorded": (
        "casts: bf16 to e4m3, *many weights",
        instead(
            weights,
            "variant",
            lambda make_variant, **options: make_variant(**options | {"record": False}),
        ),
    ),
    "weights are cast to the other format": (
        "quantizers: current, *many weights",
        other_rules(format="e5m2"),
    ),
    "the scales of squares of weights are powers of two no more": (
        "quantizers: block, *many weights",
        other_rules(scale="float32"),
    ),
    "the E8M0 scales of weights are rounded down": (
        "quantizers: mxfp8, *many weights",
        other_rules(scale_rounding="floor"),
    ),
}


# Faults that the rows of `OWN` find.
OF_RECIPE: dict[str, tuple[str, Put]] = {
    "codes of one's own format are cut off, not rounded": (
        "quantizers: own*bytes*",
        instead(
            cast, "encode",
            lambda exact, scaled, target, bits=None: exact(
                scaled, target, torch.full(scaled.shape, 2**32 - 1) if bits is None else bits
            ),
        ),
    ),
    "the topmost exponent holds values": (
        "quantizers: own*bytes*",
        after(
            cast, "encode",
            lambda codes, scaled, target, bits=None: torch.where(
                scaled.abs() > target.max, codes + 1, codes
            ),
        ),
    ),
    "a format without subnormals": (
        "quantizers: own*operators",
        after(
            cast, "round_to_format",
            lambda values, scaled, target, bits=None: torch.where(
                values.abs() < target.min_normal, 0.0, values
            ),
        ),
    ),
    "draws are the same in every pass": (
        "quantizers: own*bytes*",
        instead(
            RandomBits, "bits",
            lambda exact, self, *shape: exact(
                dataclasses.replace(self, counter=torch.tensor(0)), *shape
            ),
        ),
    ),
    "random rounding has four bits, and goes up too often": (
        "quantizers: own*bytes*",
        after(RandomBits, "bits", lambda bits, *arguments: bits >> 28 << 28),
    ),
    "the margin of one's own format is ignored": (
        "histories: updates*",
        instead(amax_history._Rules, "of", without_margins),
    ),
    "gradients of one's own format are zero": (
        "gemms: own by emulate*", after(emulate.EmulatedOperand, "cast", zero_gradients)
    ),
}  # fmt: skip


# Elements of two formats of one's own: scales of earlier passes, of blocks, and random rounding.
OWN = """
[quantizer]
format = "e3m4"
block = [1, 64]
scale = "power_of_two"

[weight]
block = "tensor"
scale = "float32"
amax = "delayed"
history_length = 4
margin = 1

[grad_output]
format = "e5m1"
rounding = "stochastic"

[[layers]]
match = "last 1 block"
recipe = "mxfp4"
"""


# Called in a process in which Triton interprets kernels


def interpreted_rows() -> list[str]:
    """Differences of Triton's kernels from the oracle, but of those that take long."""
    return _interpreted("Triton|block.*many weights|bf16 to e4m3.*many weights", "nvfp4")


def long_interpreted_rows() -> list[str]:
    """Differences of the other kernels."""
    return _interpreted("nvfp4.*Triton|many weights", "block|bf16 to e4m3")


def _interpreted(pattern: str, excluded: str) -> list[str]:
    excluded += "|relu2 gradient"  # Triton 3.9's interpreter reads subnormal bfloat16 wrongly
    with launched_on_a_cpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(casts, "has_kernel", lambda device: True)
        named = [row for row in suite.rows(CONTEXT) if re.search(pattern, row.name)]
        results = [row.run() for row in named if not re.search(excluded, row.name)]
    return [f"{row['check']}: {row['why']}" for row in results if row["verdict"] != "pass"]


def interpreted_faults() -> list[str]:
    """The faults of `OF_WEIGHTS` that are not found."""
    wrong = []
    for name, fault in OF_WEIGHTS.items():
        with launched_on_a_cpu(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(casts, "has_kernel", lambda device: True)
            rows = report_with(fault, CONTEXT, patch)["rows"]
        if not any(row.get("differing") for row in rows):  # by its numbers
            wrong.append(f"not found: {name}: {rows}")
    return wrong
