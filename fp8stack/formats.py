"""Number formats as data, read off their bits. No tensor here; torch only to name its types.
Sources: IEEE 754 (fp32, fp16), "FP8 formats for deep learning" (arXiv 2209.05433) for E4M3 and
E5M2, and the OCP Microscaling specification 1.0 for E8M0."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Fp8Name = Literal["e4m3", "e5m2"]
ScaleRounding = Literal["rceil", "floor", "even"]
"""How a block's scale becomes a power of two: see `numerics.quantize_mxfp8`."""
AmaxAlgorithm = Literal["max", "most_recent"]
"""What a window of amaxes gives: see `numerics.AmaxHistory`."""


@dataclass(frozen=True)
class Format:
    """A binary format: `sign_bits` + `exponent_bits` + `mantissa_bits`, and what its codes mean.

    `specials` says what the topmost exponent holds: "ieee" infinities and NaNs, "fn" finite
    values and one NaN (all ones), "e8m0" no sign, no zero, a power of two per code and one NaN.
    `dtype_name` is what torch calls its type, None where torch stores the format in a wider one
    (tf32).

    `max` is the largest finite value, `min_normal` the smallest positive normal one,
    `min_subnormal` the smallest positive one, None where there are no subnormals.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    specials: Literal["ieee", "fn", "e8m0"]
    dtype_name: str | None
    hardware: str
    sign_bits: int = 1
    # Read off the bits once, and plain values: torch.compile traces no cached property.
    max: float = field(init=False)
    min_normal: float = field(init=False)
    min_subnormal: float | None = field(init=False)

    def __post_init__(self) -> None:
        unsigned = self.specials == "e8m0"
        normal = self.decode(0 if unsigned else 2**self.mantissa_bits)
        object.__setattr__(self, "max", self.decode(self.max_code))
        object.__setattr__(self, "min_normal", normal)
        object.__setattr__(self, "min_subnormal", None if unsigned else self.decode(1))

    @property
    def dtype(self) -> torch.dtype | None:
        """torch's type, None where it has none; torch is imported when this is first asked for."""
        if self.dtype_name is None:
            return None
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype_name)
        return dtype

    @property
    def bits(self) -> int:
        """The bits that carry information (tf32 has 19 of them and is stored in 32)."""
        return self.sign_bits + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """The exponent's bias."""
        return (1 << self.exponent_bits - 1) - 1

    @property
    def has_inf(self) -> bool:
        """Whether some code is an infinity."""
        return self.specials == "ieee"

    def decode(self, code: int) -> float:
        """The value of one code, as exact arithmetic on its bits: the scalar reference."""
        if self.specials == "e8m0":
            return math.nan if code == 255 else 2.0 ** (code - 127)
        top = 2**self.exponent_bits - 1
        mantissa = code & (2**self.mantissa_bits - 1)
        exponent = (code >> self.mantissa_bits) & top
        sign = -1.0 if code >> (self.exponent_bits + self.mantissa_bits) else 1.0
        if exponent == top:
            if self.specials == "ieee":
                return math.nan if mantissa else sign * math.inf
            if mantissa == 2**self.mantissa_bits - 1:
                return math.nan
        if exponent == 0:
            return sign * math.ldexp(mantissa, 1 - self.bias - self.mantissa_bits)
        fraction = 1 + math.ldexp(mantissa, -self.mantissa_bits)
        return sign * math.ldexp(fraction, exponent - self.bias)

    @property
    def max_code(self) -> int:
        """The code of the largest finite value."""
        if self.specials == "e8m0":
            return 254
        ones = (1 << self.exponent_bits + self.mantissa_bits) - 1
        return ones - 1 if self.specials == "fn" else ones - (1 << self.mantissa_bits)

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next value up."""
        return math.ldexp(1.0, -self.mantissa_bits)

    def nan_codes(self) -> list[int]:
        """The codes that are not a number; for formats of eight bits only."""
        assert self.bits == 8, f"{self.name} has too many codes to list"
        return [code for code in range(256) if math.isnan(self.decode(code))]


FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        Format("fp32", 8, 23, "ieee", "float32", "any"),
        Format("tf32", 8, 10, "ieee", None, "8.0+"),
        Format("bf16", 8, 7, "ieee", "bfloat16", "8.0+"),
        Format("fp16", 5, 10, "ieee", "float16", "7.0+"),
        Format("e4m3", 4, 3, "fn", "float8_e4m3fn", "8.9+"),
        Format("e5m2", 5, 2, "ieee", "float8_e5m2", "8.9+"),
        Format("e8m0", 8, 0, "e8m0", "float8_e8m0fnu", "10.x", sign_bits=0),
    )
}


def fp8_format(name: str) -> Format:
    """The format called "e4m3" or "e5m2". Raises a ValueError for any other name."""
    if name not in ("e4m3", "e5m2"):
        raise ValueError(f"No FP8 format '{name}'. Known: e4m3, e5m2.")
    return FORMATS[name]
