"""The FP8 cast and the per-tensor scale, to the bit.

`scale` multiplies into FP8, `inv_scale` multiplies out. All scale arithmetic is IEEE float32.
The rules are those of Transformer Engine 2.20, written out in docs/numerics.md.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fp8stack.formats import Format, fp8_format, quantized_format

FLT_MAX = torch.finfo(torch.float32).max
_NAN_CODE = 0x7F  # NaN's sign is dropped, as NVIDIA's conversion does.
_POWER_OF_TWO_MASK = -0x800000  # 0xFF800000 as int32: sign and exponent, no mantissa.


def cast_to_fp8(x: Tensor, scale: Tensor | float, format: str = "e4m3") -> Tensor:
    """`saturate(rne(float32(x) * scale))`: multiplied in float32, rounded once, to nearest even.

    Overflow and infinities become +-fp8_max (never inf, which E5M2 has), NaN becomes code 0x7F,
    -0.0 keeps its sign, subnormals are kept.

    Args:
        x: any shape, float32, bfloat16 or float16.
        scale: float32, broadcastable to `x`; multiplies into FP8.
        format: "e4m3" or "e5m2".

    Returns:
        `float8_e4m3fn` or `float8_e5m2`, of the shape of `x`.

    Raises:
        ValueError: an unknown format.
    """
    target = fp8_format(format)
    return cast_scaled(x, torch.as_tensor(scale, dtype=torch.float32, device=x.device), target)


def cast_scaled(x: Tensor, scale: Tensor, target: Format) -> Tensor:
    """`cast_to_fp8` to a format that is known to be FP8."""
    # Upcast first: a bfloat16 tensor times a 0-dim float32 scale would stay bfloat16.
    return saturated(x.to(torch.float32) * scale, target)


def saturated(scaled: Tensor, target: Format) -> Tensor:
    """float32 values, scaled already, cast to an FP8 format: float8, of the same shape."""
    # Clamp first: torch's own cast saturates on some versions, overflows on others.
    assert target.dtype_name is not None
    data = scaled.clamp(-target.max, target.max).to(getattr(torch, target.dtype_name))
    data.view(torch.uint8).masked_fill_(scaled.isnan(), _NAN_CODE)
    return data


def codes_of_cast(x: Tensor, scale: Tensor, format: str) -> Tensor:
    """The bytes of `cast_to_fp8`, uint8, for compiled code: what an operator reads, and others
    as float8, are written once."""
    target = fp8_format(format)
    assert target.dtype is not None
    scaled = x.to(torch.float32) * scale
    bits = scaled.clamp(-target.max, target.max).to(target.dtype).view(torch.uint8)
    return torch.where(scaled.isnan(), _NAN_CODE, bits)


def amax(x: Tensor) -> Tensor:
    """The largest magnitude in `x`, NaN ignored: float32, 0-dim; 0 for an empty tensor."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    if torch.compiler.is_compiling() and x.ndim > 1:
        # By rows first: that fuses with what comes before and after (pytorch issue 133242).
        return magnitude(x).amax(dim=-1).max()
    if x.device.type != "cpu" or torch.compiler.is_compiling() or type(x) is FakeTensor:
        return magnitude(x).max()  # to look for a NaN first would wait for the device
    low, high = torch.aminmax(x)  # one pass; abs() would write a copy first
    largest = torch.maximum(low.abs(), high.abs())
    if bool(largest.isnan()):
        largest = magnitude(x).max()
    return largest.to(torch.float32)


def magnitude(x: Tensor) -> Tensor:
    """`|x|` in float32 with NaN replaced by 0, so that a NaN never enters an amax."""
    size = x.to(torch.float32).abs()
    return torch.where(size <= torch.inf, size, 0.0)  # a comparison with NaN is false


def record_amax(recorded: Tensor, amax: Tensor, counts: Tensor | None = None) -> None:
    """Let `recorded` be the larger of the two, both float32 and 0-dim; a NaN is ignored, and an
    amax that does not count, bool and 0-dim, too."""
    if counts is not None:
        amax = torch.where(counts, amax, 0.0)
    # fmax, unlike maximum, takes the number where the other side is NaN.
    recorded.copy_(torch.fmax(recorded, amax))


def tensor_scale(
    amax: Tensor | float,
    format: str = "e4m3",
    margin: int = 0,
    power_of_two: bool = False,
    eps: float = 0.0,
    overflow: float = FLT_MAX,
) -> Tensor:
    """The scale that brings `amax` to `fp8_max * 2^-margin`, element by element.

    An amax below `eps` counts as `eps`; an amax of 0, inf or NaN gives 1; a scale beyond float32
    becomes `overflow`; `power_of_two` truncates the scale's mantissa.

    Args:
        amax: float32, any shape; one per tensor or one per block.
        format: see `FormatName`.
        margin: headroom in bits.
        power_of_two: round the scale down to a power of two.
        eps: the smallest amax that is believed.
        overflow: what an infinite scale becomes; float32's maximum.

    Returns:
        float32, of the shape of `amax`. `1 / scale` is the inverse; `amax / fp8_max` is not.

    Raises:
        ValueError: an unknown format.
    """
    largest = torch.as_tensor(amax, dtype=torch.float32)
    # Filled on the device: new_tensor would copy from the host, and a GPU be waited for.
    limit = torch.full_like(largest, quantized_format(format).max * 2.0**-margin)
    # A comparison with NaN is false: a NaN amax passes and gives 1 below.
    largest = torch.where(largest < eps, torch.full_like(largest, eps), largest)
    scale = quotient(limit, largest)
    scale = torch.where(scale == torch.inf, torch.full_like(scale, overflow), scale)
    usable = (largest > 0) & (largest < torch.inf)
    scale = torch.where(usable, scale, torch.ones_like(scale))
    return truncate_to_power_of_two(scale) if power_of_two else scale


def inverse(scale: Tensor) -> Tensor:
    """`1 / scale` as IEEE float32 has it, compiled or not: float32, of the shape of `scale`."""
    return quotient(torch.ones_like(scale), scale)


def quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The IEEE float32 quotient, in compiled code too.

    Compilers for GPUs divide float32 approximately. The quotient in float64 is exact enough that
    rounding it gives the float32 quotient (53 bits are more than twice 24 and 2).
    """
    if denominator.device.type == "cpu":
        return numerator / denominator
    return (numerator.to(torch.float64) / denominator.to(torch.float64)).to(torch.float32)


def truncate_to_power_of_two(scale: Tensor) -> Tensor:
    """The largest power of two not above `scale` (float32, normal, positive)."""
    return (scale.view(torch.int32) & _POWER_OF_TWO_MASK).view(torch.float32)
