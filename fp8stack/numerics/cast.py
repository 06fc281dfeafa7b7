"""Casts to FP8, FP6 and FP4, and the per-tensor scale, to the bit.

`scale` multiplies into FP8, `inv_scale` multiplies out. All scale arithmetic is IEEE float32.
The rules are those of Transformer Engine 2.20, written out in docs/numerics.md.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fp8stack.common.errors import described
from fp8stack.common.formats import Format, fp8_format, quantized_format

FLT_MAX = torch.finfo(torch.float32).max
_NAN_CODE = 0x7F  # NaN's sign is dropped, as NVIDIA's conversion does.
_EXPONENT = 0x7F800000
_POWER_OF_TWO_MASK = -0x800000  # 0xFF800000 as int32: sign and exponent, no mantissa.
_LEAST_POWER_OF_TWO = 2.0**-126  # float32's least normal number


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
        ValueError: an unknown format, another dtype.
    """
    target = fp8_format(format)
    check_dtype(x)  # float64 would be rounded twice
    return cast_scaled(x, torch.as_tensor(scale, dtype=torch.float32, device=x.device), target)


def check_dtype(x: Tensor) -> None:
    """Raise a `ValueError` if `x` is no tensor, or of no dtype that is quantized."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{described(x)} is not quantized. Give a tensor")
    if x.dtype not in _DTYPES:
        raise ValueError(f"{x.dtype} is not quantized. Give float32, bfloat16 or float16")


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def cast_scaled(x: Tensor, scale: Tensor, target: Format) -> Tensor:
    """`cast_to_fp8` to a format that is known to be FP8."""
    # Upcast first: a bfloat16 tensor times a 0-dim float32 scale would stay bfloat16.
    return saturated(x.to(torch.float32) * scale, target)


def codes_of_cast(x: Tensor, scale: Tensor, format: str) -> Tensor:
    """The bytes of `cast_to_fp8`, uint8. In compiled code, bytes that an operator reads and others
    read as float8 are written once."""
    return _saturated_codes(x.to(torch.float32) * scale, fp8_format(format))


def saturated(scaled: Tensor, target: Format) -> Tensor:
    """float32 values, scaled already, cast to an FP8 format: float8, of the same shape."""
    assert target.dtype_name is not None
    return _saturated_codes(scaled, target).view(getattr(torch, target.dtype_name))


def _saturated_codes(scaled: Tensor, target: Format) -> Tensor:
    """The bytes of `saturated`: uint8."""
    # Clamp first: torch's own cast saturates on some versions, overflows on others.
    assert target.dtype_name is not None
    dtype = getattr(torch, target.dtype_name)
    codes = scaled.clamp(-target.max, target.max).to(dtype).view(torch.uint8)
    return torch.where(scaled.isnan(), _NAN_CODE, codes)


def round_to_format(scaled: Tensor, target: Format, bits: Tensor | None = None) -> Tensor:
    """Values of a format, in float32: `scaled`, saturated and rounded. A zero may lose its sign.

    Rounds to nearest, ties to even, or at random by `bits`: away from zero where they are below the
    distance from the neighbour nearer to zero, in steps times 2^32, rounded up.

    Args:
        scaled: float32; NaN gives NaN if `bits` is None.
        target: a format of at most eight bits.
        bits: int64 in [0, 2^32), of the shape of `scaled`.
    """
    values = scaled.clamp(-target.max, target.max)
    if bits is None:
        return _round_to_nearest(values, target)
    step = _power_of_two(values) * 2.0**-target.mantissa_bits
    step = step.clamp_min(float(target.min_subnormal or 0))
    per_step = ((254 << 23) - step.view(torch.int32)).view(torch.float32)  # 1 / step
    steps = values * per_step
    below = steps.trunc()
    threshold = ((steps - below).abs() * 2.0**32).ceil()
    away = (bits < threshold.to(torch.int64)).to(torch.float32)
    return (below + away.copysign(steps)) * step


def _round_to_nearest(values: Tensor, target: Format) -> Tensor:
    """Saturated values rounded to nearest, ties to even.

    Adding and subtracting `1.5 * 2^(23 - mantissa_bits)` times a value's power of two leaves
    `mantissa_bits` of mantissa, by float32's own addition. The power is at least the format's
    smallest normal, which gives subnormals their fixed step.
    """
    magic = 1.5 * 2.0 ** (23 - target.mantissa_bits)
    smallest = target.min_normal * magic
    if values.device.type == "cpu":
        # inductor's vectors cannot look at bits. Veltkamp's splitting (Dekker, 1971) rounds to the
        # nearest with sums alone, here to even at ties: the tests try every mantissa.
        split = values * (2.0 ** (23 - target.mantissa_bits) + 1)
        rounded = split - (split - values)
        return torch.where(
            values.abs() < target.min_normal, (values + smallest) - smallest, rounded
        )
    # Compilers for GPUs fuse a product and a sum into one operation; the limit keeps them apart.
    spacing = (_power_of_two(values) * magic).clamp_min(smallest)
    return (values + spacing) - spacing


def _power_of_two(values: Tensor) -> Tensor:
    """The power of two of each float32 value; 0 for subnormals."""
    return (values.view(torch.int32) & _EXPONENT).view(torch.float32)


def encode(scaled: Tensor, target: Format, bits: Tensor | None = None) -> Tensor:
    """The codes of float32 values, saturated and rounded as `round_to_format` does: uint8. NaN is
    0x7F in formats of 8 bits, the largest value in others."""
    size = round_to_format(scaled, target, bits).abs()
    mantissa = target.mantissa_bits
    normal = (size.view(torch.int32) >> (23 - mantissa)) - ((127 - target.bias) << mantissa)
    steps = size * (1.0 / float(target.min_subnormal or 1))  # exact
    codes = torch.where(size < target.min_normal, steps.to(torch.int32), normal)
    codes = codes + (scaled.signbit().to(torch.int32) << (target.bits - 1))
    nan_code = _NAN_CODE if target.has_nan else target.max_code
    return torch.where(scaled.isnan(), nan_code, codes).to(torch.uint8)


def amax(x: Tensor) -> Tensor:
    """The largest magnitude in `x`, NaN ignored: float32, 0-dim; 0 for an empty tensor."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    if torch.compiler.is_compiling() and x.ndim > 1:
        # Reducing rows first lets the compiler fuse it with its neighbours (pytorch issue 133242).
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


def record_amax(recorded: Tensor, amax: Tensor, is_counted: Tensor | None = None) -> None:
    """Raise `recorded` to `amax` if that is larger; both are float32 and 0-dim. A NaN is ignored,
    and so is an amax where `is_counted`, bool and 0-dim, is false."""
    if is_counted is not None:
        amax = torch.where(is_counted, amax, 0.0)
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
    becomes `overflow`; `power_of_two` truncates the scale's mantissa, and makes a subnormal scale
    2^-126.

    Args:
        amax: float32, any shape; one per tensor or one per block.
        format: see `ELEMENT_FORMATS`.
        margin: headroom in bits.
        power_of_two: round the scale down to a power of two, at least 2^-126.
        eps: the least amax.
        overflow: the replacement of an infinite scale; by default float32's maximum.

    Returns:
        float32, of the shape of `amax`. `1 / scale` is the inverse; `amax / fp8_max` is not.

    Raises:
        ValueError: an unknown format.
    """
    largest = torch.as_tensor(amax, dtype=torch.float32)
    # Filled on the device: new_tensor would copy from the host and wait for the GPU.
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
    """The largest power of two not above `scale` (float32, positive), and at least 2^-126: formats
    with a maximum below 4 have subnormal scales for amaxes near float32's maximum."""
    power = (scale.view(torch.int32) & _POWER_OF_TWO_MASK).view(torch.float32)
    return power.clamp_min(_LEAST_POWER_OF_TWO)
