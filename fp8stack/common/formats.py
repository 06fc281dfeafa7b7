"""Number formats and quantizers as data. No tensor here; torch only to name its types.

Sources: IEEE 754 (fp32, fp16), "FP8 formats for deep learning" (arXiv 2209.05433) for E4M3 and
E5M2, and the OCP Microscaling specification 1.0 for E8M0, E2M1, E2M3 and E3M2. For formats of one's
own, see `ELEMENT_FORMATS`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from fp8stack.common.errors import quoted

if TYPE_CHECKING:
    import torch

FormatName = Literal["e4m3", "e5m2", "e2m1", "e2m3", "e3m2"]
"""Formats that hardware and checkpoints have for operands; see `ELEMENT_FORMATS` for others."""
ScaleRounding = Literal["rceil", "floor", "even"]
"""Rules that round a block's scale to a power of two: see `numerics.scales.e8m0_code`."""
AmaxAlgorithm = Literal["max", "most_recent"]
"""The choice of a window's amax: see `numerics.AmaxHistory`."""


@dataclass(frozen=True)
class Format:
    """A binary format: `sign_bits` + `exponent_bits` + `mantissa_bits`, and what its codes mean.

    `specials` says what the topmost exponent holds: "ieee" infinities and NaNs, "fn" finite
    values and one NaN (all ones), "finite" finite values alone, "e8m0" no sign, no zero, a power of
    two per code and one NaN. `dtype_name` is what torch calls its type, None where torch has none
    of one value each (tf32 is stored in float32, FP4 and FP6 as codes in bytes).

    `max` is the largest finite value, `min_normal` the smallest positive normal one,
    `min_subnormal` the smallest positive one, which is `min_normal` without mantissa bits; None for
    E8M0.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    specials: Literal["ieee", "fn", "finite", "e8m0"]
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
    def is_shipped(self) -> bool:
        """Whether hardware or checkpoints have it, unlike a format of one's own."""
        return self.name in FORMATS

    @property
    def has_nan(self) -> bool:
        """Whether some code is a NaN."""
        return self.specials != "finite"

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
            if self.specials == "fn" and mantissa == 2**self.mantissa_bits - 1:
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
        return ones - {"finite": 0, "fn": 1}.get(self.specials, 1 << self.mantissa_bits)

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next value up."""
        return math.ldexp(1.0, -self.mantissa_bits)


FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        Format("fp32", 8, 23, "ieee", "float32", "any"),
        Format("tf32", 8, 10, "ieee", None, "8.0+"),
        Format("bf16", 8, 7, "ieee", "bfloat16", "8.0+"),
        Format("fp16", 5, 10, "ieee", "float16", "7.0+"),
        Format("e4m3", 4, 3, "fn", "float8_e4m3fn", "8.9+"),
        Format("e5m2", 5, 2, "ieee", "float8_e5m2", "8.9+"),
        Format("e2m1", 2, 1, "finite", None, "10.x, 12.x"),
        Format("e2m3", 2, 3, "finite", None, "10.x"),
        Format("e3m2", 3, 2, "finite", None, "10.x"),
        Format("e8m0", 8, 0, "e8m0", "float8_e8m0fnu", "10.x, 12.x", sign_bits=0),
    )
}


def fp8_format(name: str) -> Format:
    """The format called "e4m3" or "e5m2". Raises a ValueError for any other name."""
    if name not in ("e4m3", "e5m2"):
        raise ValueError(f"No FP8 format '{name}'. Known: e4m3, e5m2.")
    return FORMATS[name]


def _element_format(exponent_bits: int, mantissa_bits: int) -> Format:
    name = f"e{exponent_bits}m{mantissa_bits}"
    specials: Literal["ieee", "fn", "finite"] = "finite"
    if exponent_bits + mantissa_bits == 7:
        specials = "ieee" if exponent_bits > 1 and mantissa_bits else "fn"
    return Format(name, exponent_bits, mantissa_bits, specials, None, "none")


ELEMENT_FORMATS: dict[str, Format] = {
    format.name: format
    for format in (_element_format(x, y) for x in range(1, 8) for y in range(8 - x))
} | {name: FORMATS[name] for name in get_args(FormatName)}
"""Every format `eXmY` that an operand can be quantized to: a sign, X exponent bits and Y mantissa
bits, of 8 bits at most.

Beside the shipped ones, formats below 8 bits have finite values alone, as OCP's FP6 and FP4. Those
of 8 bits are IEEE-like, as E5M2 and ml_dtypes' float8_e3m4: the topmost exponent holds infinities
and NaNs. Where that would leave no normal value (e1m6) or no NaN (e7m0), all ones are the only NaN,
as in E4M3 and E8M0."""


def quantized_format(name: str) -> Format:
    """The format called `name`, one that operands are quantized to.

    Raises:
        ValueError: any other name.
    """
    if not isinstance(name, str) or name not in ELEMENT_FORMATS:
        shipped = ", ".join(get_args(FormatName))
        near = re.search(r"e\dm\d(?!\d)", str(name).lower())  # in E4M3, float8_e4m3fn
        hint = f" Did you mean '{near[0]}'?" if near and near[0] in ELEMENT_FORMATS else ""
        raise ValueError(
            f"No format '{quoted(str(name))}'.{hint} Known: {shipped}, and eXmY with X >= 1 "
            "exponent bits and Y mantissa bits, X + Y <= 7, such as e3m4"
        )
    return ELEMENT_FORMATS[name]


def named_format(name: str) -> Format | None:
    """The format of an operand or of `FORMATS` that is called `name`; None if there is none."""
    return FORMATS.get(name) or ELEMENT_FORMATS.get(name)


BlockSize = Literal["tensor", "row"] | tuple[int, int]
BLOCKS = ((1, 16), (1, 32), (1, 64), (1, 128), (16, 16), (32, 32), (64, 64), (128, 128))


def known_block(block: object) -> BlockSize:
    """`block` if elements can share a scale in this way; a list, as in files, as a tuple.

    Raises:
        ValueError: any other value.
    """
    if block == "tensor" or block == "row":
        return block
    for size in BLOCKS:
        if isinstance(block, list | tuple) and repr(list(block)) == repr(list(size)):
            return size
    value = f"'{quoted(block)}'" if isinstance(block, str) else block
    value = list(block) if isinstance(block, tuple) else value
    sizes = ", ".join(str(list(size)) for size in BLOCKS)
    raise ValueError(f"No block {value}. Known: tensor, row, {sizes}")


ScaleFormat = Literal["float32", "power_of_two", "e8m0", "e4m3"]


@dataclass(frozen=True, kw_only=True)
class Quantizer:
    """The rules by which one operand of a GEMM is quantized.

    Attributes:
        format: the elements' format: e4m3, e5m2 (FP8), e2m3, e3m2 (FP6), e2m1 (FP4), or one's own,
            see `ELEMENT_FORMATS`.
        block: the elements that share a scale: "tensor" all, "row" a row along the GEMM's
        reduction, (1, n) n in a row along the reduction, (n, n) a square.
        scale: float32, float32 rounded down to a power_of_two, e8m0 (OCP Microscaling), or e4m3 of
            two levels: E4M3 per block, and above it one float32 per tensor (NVFP4).
        scale_rounding: how e8m0 scales are rounded, see `numerics.scales.e8m0_code`.
        amax: the source of the scale: the current tensor, or the tensors of earlier passes
        (delayed).
        history_length: the amaxes that a window of delayed scaling holds.
        amax_algorithm: the amax of that window: max, or most_recent.
        margin: headroom in bits of delayed scaling.
        eps: the least amax; smaller ones count as eps, for scales in float32.
        rounding: nearest (ties to even), or stochastic.
        hadamard: 16 or 32 to multiply each block of that many elements along the reduction by a
            Hadamard matrix before the amax is taken, 0 for none.

    Raises:
        ValueError: an unknown value, or fields that do not go together.
    """

    format: str = "e4m3"
    block: BlockSize = "tensor"
    scale: ScaleFormat = "float32"
    scale_rounding: ScaleRounding = "rceil"
    amax: Literal["current", "delayed"] = "current"
    history_length: int = 1024
    amax_algorithm: AmaxAlgorithm = "max"
    margin: int = 0
    eps: float = 0.0
    rounding: Literal["nearest", "stochastic"] = "nearest"
    hadamard: Literal[0, 16, 32] = 0

    def __post_init__(self) -> None:
        element = quantized_format(self.format)
        object.__setattr__(self, "block", known_block(self.block))
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                kind, choices_text = name.replace("_", " "), ", ".join(map(str, choices))
                raise ValueError(f"No {kind} '{getattr(self, name)}'. Known: {choices_text}.")
        if self.scale in ("e8m0", "e4m3") and isinstance(self.block, str):
            raise ValueError(f"scale = '{self.scale}' needs a block such as [1, 32]")
        if self.scale == "e4m3" and self.format != "e2m1":
            raise ValueError("scale = 'e4m3' is for format = 'e2m1' alone (NVFP4)")
        # A GEMM adds up the products of the elements themselves if blocks have no scales.
        overflows = element.max**2 * _MOST_TERMS > FORMATS["fp32"].max
        if (element.bits < 8 or overflows) and isinstance(self.block, str):
            raise ValueError(f"format = '{self.format}' needs a block such as [1, 32]")
        if self.delayed and (self.block != "tensor" or self.scale != "float32" or self.hadamard):
            raise ValueError(
                "amax = 'delayed' needs block = 'tensor', scale = 'float32', hadamard = 0"
            )
        if type(self.history_length) is not int or not 1 <= self.history_length <= 2**20:
            raise ValueError("history_length is a whole number from 1 to 1048576")
        if type(self.margin) is not int or not -64 <= self.margin <= 64:
            raise ValueError("margin is a whole number from -64 to 64")
        if not isinstance(self.eps, int | float) or not 0 <= self.eps < math.inf:
            raise ValueError("eps is a number from 0")

    @property
    def element(self) -> Format:
        """The elements' format."""
        return ELEMENT_FORMATS[self.format]

    @property
    def delayed(self) -> bool:
        """Whether its scale comes from earlier passes."""
        return self.amax == "delayed"

    @property
    def per_tensor(self) -> bool:
        """Whether one scale serves the whole tensor."""
        return self.block == "tensor"

    @property
    def blocks(self) -> tuple[int, int] | None:
        """Rows and columns of a block, along the columns; None without blocks of a fixed size."""
        return None if isinstance(self.block, str) else self.block

    @property
    def stochastic(self) -> bool:
        """Whether it rounds at random."""
        return self.rounding == "stochastic"

    @property
    def element_bits(self) -> int:
        """The bits that an element takes in memory: two codes of at most 4 bits share a byte."""
        return 4 if self.element.bits <= 4 else 8

    @property
    def scale_bytes(self) -> int:
        """The bytes of one scale."""
        return 1 if self.scale in ("e8m0", "e4m3") else 4

    @property
    def exact_in_bf16(self) -> bool:
        """Whether bfloat16 represents what a GEMM multiplies: the elements, times the scale of
        their block where there are blocks."""
        return self._bf16_represents(scaled=self.blocks is not None)

    @property
    def columnwise_exact_in_bf16(self) -> bool:
        """`exact_in_bf16`, for a GEMM that takes what fprop had and reduces over its rows: there
        values carry the scales of rows as well."""
        return self._bf16_represents(scaled=not self.per_tensor)

    def _bf16_represents(self, *, scaled: bool) -> bool:
        """Whether bfloat16 has the range and the significant bits of the elements, `scaled` or not.
        A product has at most the bits of both factors."""
        bf16, element = FORMATS["bf16"], self.element
        bits = element.mantissa_bits + 1 + (_SCALE_BITS[self.scale] if scaled else 0)
        has_range = bf16.min_normal <= (element.min_subnormal or 0) and element.max <= bf16.max
        return has_range and bits <= bf16.mantissa_bits + 1

    def __str__(self) -> str:
        block = self.block if isinstance(self.block, str) else list(self.block)
        words = [self.format, f"block {block}", f"scale {self.scale}"]
        words += [f"from {self.history_length} amaxes"] * self.delayed
        words += [f"scale_rounding {self.scale_rounding}"] * (self.scale == "e8m0")
        words += [f"hadamard {self.hadamard}"] * bool(self.hadamard)
        return ", ".join([*words, self.rounding])

    @property
    def turns(self) -> bool:
        """Whether the bytes of the transposed tensor are the transposed bytes."""
        square = self.per_tensor or (self.blocks is not None and self.blocks[0] > 1)
        return square and not self.hadamard and not self.stochastic


_SCALE_BITS = {"float32": 24, "power_of_two": 0, "e8m0": 0, "e4m3": 4}
"""The significant bits that a scale adds to those of an element."""
_MOST_TERMS = 2**20
"""The most products that a GEMM is expected to add up."""

# The values of the fields that have one of a few values.
_CHOICES: dict[str, tuple[object, ...]] = {
    "scale": get_args(ScaleFormat),
    "scale_rounding": get_args(ScaleRounding),
    "amax": ("current", "delayed"),
    "amax_algorithm": get_args(AmaxAlgorithm),
    "rounding": ("nearest", "stochastic"),
    "hadamard": (0, 16, 32),
}
