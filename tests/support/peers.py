"""Comparisons of fp8stack's quantizers with those of other projects.

Each function quantizes a matrix by both, and compares codes and scales, or values. Transformer
Engine's file is loaded without its extension.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import gfloat
import gfloat.formats
import numpy as np
import torch
from torch import Tensor
from torchao.float8 import float8_utils
from torchao.float8.config import ScalingGranularity
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from bench.gpu.references import installed, nvfp4_reference
from fp8stack.analysis.conform.check_inputs import MXFP8, NVFP4
from fp8stack.common.formats import FormatName, Quantizer, ScaleRounding
from fp8stack.numerics import RandomBits, dequantize, quantize
from fp8stack.numerics.hadamard import hadamard
from tests.support.oracles import BITS, codes
from tests.support.quantizers import MXFP4

GFLOAT = {
    "e4m3": gfloat.formats.format_info_ocp_e4m3,
    "e5m2": gfloat.formats.format_info_ocp_e5m2,
    "e2m1": gfloat.formats.format_info_ocp_e2m1,
    "e2m3": gfloat.formats.format_info_ocp_e2m3,
    "e3m2": gfloat.formats.format_info_ocp_e3m2,
}
TORCHAO: dict[str, torch.dtype | str] = {"e2m3": "fp6_e2m3", "e3m2": "fp6_e3m2"}
TORCHAO |= {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.float4_e2m1fn_x2}
DRAWN = RandomBits(2, 3, torch.tensor(2**33 + 1))


class Compared(NamedTuple):
    """The counts of numbers that were compared, that differ, and that were left out."""

    compared: int
    differing: int
    excluded: int


def te_nvfp4(reference: Any, x: Tensor, tile: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Packed codes and E4M3 scales, one for each row and 16 columns, by TE's reference."""
    quantizer = reference.NVFP4QuantizerRef(
        reference.reference_utils.Fp4Formats.E2M1, columnwise=False, quant_tile_shape=tile
    )
    result = quantizer.quantize(x)
    return result.data.numpy(), codes(result.scale)


def _count(*pairs: tuple[np.ndarray, np.ndarray], excluded: np.ndarray | None = None) -> Compared:
    """The differences of pairs of arrays, without the `excluded` elements of the first pair."""
    first, *further = pairs
    included = np.ones(first[0].shape, bool) if excluded is None else ~excluded
    differing = int((first[0] != first[1])[included].sum())
    differing += sum(int((a != b).sum()) for a, b in further)
    return Compared(int(included.sum()), differing, int((~included).sum()))


def mx_by_gfloat(x: Tensor, quantizer: Quantizer) -> Compared:
    """Values of 1x32 blocks by the OCP rule: gfloat's scale and its rounding."""
    quantized = quantize(x, quantizer, 1)
    info = GFLOAT[quantizer.format]
    blocks = x.float().numpy().astype(np.float64).reshape(x.shape[0], -1, 32)
    largest = np.abs(blocks).max(2, keepdims=True)
    scale = 2.0 ** np.clip(np.floor(np.log2(largest)) - info.emax, -127, 127)
    values = gfloat.round_ndarray(info, blocks / scale, sat=True) * scale
    return _count((dequantize(quantized).numpy(), values.reshape(x.shape)))


def draws_by_gfloat(x: Tensor, quantizer: Quantizer) -> Compared:
    """Stochastic rounding by gfloat with 32 bits: it rounds up from a sum, so its bits count from
    the other end; and it rounds the place between two neighbours to 32 bits, where fp8stack rounds
    it up. Places that need more bits, of values below 2^-9 of a step, are left out."""
    quantizer = replace(quantizer, rounding="stochastic")
    quantized = quantize(x, quantizer, 1, DRAWN)
    info = GFLOAT[quantizer.format]
    bits = DRAWN.bits(*x.shape).numpy()
    power = quantized.scales.view(torch.uint8).numpy().astype(int) - 127
    blocks = x.float().numpy().astype(np.float64).reshape(x.shape[0], -1, 32)
    scaled = np.ldexp(blocks, -power[..., None]).reshape(x.shape)
    held = np.clip(scaled, -info.max, info.max)
    values = gfloat.round_ndarray(
        info, held, gfloat.RoundMode.Stochastic, True, srbits=2**32 - 1 - bits, srnumbits=32
    )
    values = np.ldexp(values.reshape(blocks.shape), power[..., None]).reshape(x.shape)
    exponent = np.maximum(np.frexp(np.where(held == 0, 1, held))[1] - 1, 1 - info.bias)
    steps = np.ldexp(np.abs(held), 32 + info.precision - 1 - exponent)
    return _count((dequantize(quantized).numpy(), values), excluded=steps != np.floor(steps))


def mx_by_torchao(x: Tensor, quantizer: Quantizer) -> Compared:
    """Codes and scales of 1x32 blocks by torchao's `to_mx`."""
    quantized = quantize(x, quantizer, 1)
    mode = ScaleCalculationMode(quantizer.scale_rounding)
    scales, data = to_mx(x, TORCHAO[quantizer.format], 32, mode)
    return _count((_bytes(quantized.data), _bytes(data)), (codes(quantized.scales), codes(scales)))


def row_by_torchao(x: Tensor, quantizer: Quantizer) -> Compared:
    """Bytes and scales of rows by torchao's recipe `rowwise`. Left out: rows whose scale is so
    close below a power of two that torchao's float32 logarithm takes it for one."""
    quantized = quantize(x, quantizer, 1)
    scale = float8_utils.tensor_to_scale(
        x,
        torch.float8_e4m3fn,
        scaling_granularity=ScalingGranularity.AXISWISE,
        axiswise_dim=-1,
        round_scales_to_power_of_2=True,
    )
    data = float8_utils.to_fp8_saturated(x.float() * scale, torch.float8_e4m3fn)
    exact = 448 / x.double().abs().amax(1, keepdim=True)
    near = (exact.log2() - exact.log2().round()).abs() < 2e-6
    excluded = near.numpy().repeat(x.shape[1], 1)
    compared_rows = ~near.numpy()
    return _count(
        (codes(quantized.data), codes(data)),
        (quantized.scales.numpy()[compared_rows], (1 / scale).numpy()[compared_rows]),
        excluded=excluded,
    )


def nvfp4_by_te(x: Tensor, quantizer: Quantizer) -> Compared:
    """Codes and scales by Transformer Engine's reference, of the transformed tensor where there is
    a transform. Its function drops the sign of -0; TE's kernels do not."""
    path = installed()
    assert path is not None
    quantized = quantize(x, quantizer, 1)
    if quantizer.hadamard:
        x = hadamard(x, 16, 1).bfloat16()
    assert quantizer.blocks is not None
    with nvfp4_reference(path) as reference:
        data, scales = te_nvfp4(reference, x, quantizer.blocks)
    scale_codes = codes(quantized.scales).repeat(quantizer.blocks[0], 0)
    zeros = (x == 0) & x.signbit()
    excluded = (zeros[:, ::2] | zeros[:, 1::2]).numpy()
    return _count((quantized.data.numpy(), data), (scale_codes, scales), excluded=excluded)


def mx_by_microxcaling(x: Tensor, quantizer: Quantizer) -> Compared:
    """Values of 1x32 blocks by microxcaling, with its rounding to even and the OCP rule."""
    mx_ops = importlib.import_module("mx.mx_ops")
    name = {"e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2", "e2m1": "fp4_e2m1"}.get(
        quantizer.format, f"fp6_{quantizer.format}"
    )
    values = mx_ops._quantize_mx(
        x.float(), 8, mx_ops.ElemFormat.from_str(name), axes=[-1], block_size=32, round="even"
    )
    return _count((dequantize(quantize(x, quantizer, 1)).numpy(), values.numpy()))


def _bytes(data: Tensor) -> np.ndarray:
    return data.view(torch.uint8).numpy()


_MX = {"mxfp8": MXFP8, "mxfp8 e5m2": replace(MXFP8, format="e5m2"), "mxfp4": MXFP4}
_FP6 = [name for name in get_args(FormatName) if BITS[name] == 6]
_MX |= {f"mxfp6 {name}": replace(MXFP8, format=name) for name in _FP6}
_RULES: tuple[ScaleRounding, ...] = get_args(ScaleRounding)
_FLOOR = {f"{name} floor": replace(q, scale_rounding="floor") for name, q in _MX.items()}
_EVERY_MX = {
    f"{name} {rule}": replace(q, scale_rounding=rule) for name, q in _MX.items() for rule in _RULES
}
_NVFP4 = {
    "nvfp4": NVFP4,
    "nvfp4 16x16": replace(NVFP4, block=(16, 16)),
    "nvfp4 hadamard": replace(NVFP4, hadamard=16),
}
Peer = Callable[[Tensor, Quantizer], Compared]
PEERS: dict[str, tuple[Peer, dict[str, Quantizer]]] = {
    "gfloat": (mx_by_gfloat, _FLOOR),
    "gfloat stochastic": (draws_by_gfloat, _MX),
    "torchao to_mx": (mx_by_torchao, _EVERY_MX),
    "torchao rowwise": (row_by_torchao, {"row": Quantizer(block="row", scale="power_of_two")}),
    "Transformer Engine": (nvfp4_by_te, _NVFP4),
    "microxcaling": (mx_by_microxcaling, _FLOOR),
}
