"""FP8, FP6 and FP4 values in float32: what a cast would give, without its bytes.

An emulated GEMM multiplies these. They equal the bytes of `quantized`, `cast` and `blocks` to the
bit (only the sign of a zero may differ).

How a value is rounded: adding and subtracting `1.5 * 2^(23 - mantissa_bits)` times the value's own
power of two leaves just `mantissa_bits` of mantissa, to nearest even, by float32's own addition.
That power is not let below the format's smallest normal, which keeps the subnormals' fixed step.

On a CPU `fused` computes all of it in one sweep. In compiled code, on a GPU, and where numba is
missing, it is the expressions here: a compiler fuses them with what comes before and after, and a
GPU is asked for no number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8stack.formats import FORMATS, Format, Quantizer, ScaleRounding, fp8_format
from fp8stack.numerics import fused
from fp8stack.numerics.amax import record_amax
from fp8stack.numerics.blocks import MX_BLOCK, block_amax, in_memory, trimmed
from fp8stack.numerics.cast import amax
from fp8stack.numerics.hadamard import hadamard
from fp8stack.numerics.operators import seen
from fp8stack.numerics.quantized import Scales, check_arguments, given_scale, scales_of
from fp8stack.numerics.random import RandomBits

_EXPONENT = 0x7F800000

Block = tuple[int, int]


class Rounded(NamedTuple):
    """A matrix as an emulated GEMM takes it.

    Attributes:
        values: of the shape of the matrix; with a Hadamard transform, the reduced dimension is
            padded to a multiple of the transform's size. NaN where the matrix has NaN. float32, or
            bfloat16 where that was asked for.
        factor: float32, what the GEMM's output is multiplied by for this operand: 0-dim, or for
            block = "row" one for each row of the operand as its GEMM reduces it; None if the values
            carry their scales.
    """

    values: Tensor
    factor: Tensor | None


class Rounding(fused.Rule):
    """How a matrix is rounded, for one GEMM or for two: a rule that can be called."""

    def __call__(
        self,
        x: Tensor,
        generator: RandomBits | None = None,
        scale: Tensor | None = None,
        recorded: Tensor | None = None,
        counts: Tensor | None = None,
        bf16: bool = False,
        *,
        fuse: bool = True,
    ) -> list[Rounded]:
        """`x`, a matrix in float32, bfloat16 or float16, for each of the blocks.

        `generator` gives the bits for stochastic rounding, by the place in `x`; `scale`, float32
        and 0-dim, is that of the whole matrix, if it is known. `recorded`, float32 and 0-dim,
        becomes at least the amax of `x`, if that `counts`, bool and 0-dim. `bf16` gives bfloat16,
        which holds the values of `Quantizer.exact_in_bf16`. Without `fuse`, torch's operators
        compute it wherever `x` is.
        """
        if fuse and fused.serves(x):
            run = fused.op if seen(x) else fused.round
            found = run(x, self.number, scale, recorded, counts, *_bits(generator), bf16)
            if self.has_factor:
                return [Rounded(*found[i : i + 2]) for i in range(0, len(found), 2)]
            return [Rounded(values, None) for values in found]
        if recorded is not None:
            record_amax(recorded, amax(x), counts)
        dtype = x.dtype
        if self.quantizer.hadamard:
            x, dtype = hadamard(x, self.quantizer.hadamard, self.dim), torch.bfloat16
        if scale is None and (0, 0) in self.blocks:
            scale = scales_of(amax(x), self.quantizer, dtype).into
        made = [self._one(x, block, dtype, generator, scale) for block in self.blocks]
        held = torch.bfloat16 if bf16 else torch.float32
        return [each._replace(values=each.values.to(held)) for each in made]

    def _one(
        self,
        x: Tensor,
        block: Block,
        dtype: torch.dtype,
        generator: RandomBits | None,
        scale: Tensor | None,
    ) -> Rounded:
        """`x`, transformed if it is to be, of a tensor of `dtype`, for one of the blocks."""
        target = FORMATS[self.quantizer.format]
        if block == (0, 0):
            assert scale is not None
            scales = given_scale(scale)
            source, block = padded(x, 1, 1), (1, 1)
        else:
            shape = self.factor_shape(block, *x.shape)
            block = (block[0] or max(1, x.shape[0]), block[1] or max(1, x.shape[1]))
            source = padded(x, *block)
            scales = scales_of(in_memory(amaxes(source, block)), self.quantizer, dtype)
            if not x.numel() and not self.carries:  # no column has no amax, and yet an output
                scales = scales._replace(factor=source.new_ones(shape))
        generator = generator if self.quantizer.stochastic else None
        values = round_scaled(source, block, scales, target, generator)
        if values.shape != x.shape:
            values = trimmed(values, x.shape)
        return Rounded(values, scales.factor)


def _bits(generator: RandomBits | None) -> fused.Bits:
    if generator is None:
        return None, 0, 0, 0
    return generator.counter, generator.seed, int(generator.stream), int(generator.first_row)


def rounding(quantizer: Quantizer, dims: Sequence[int]) -> Rounding:
    """How `quantizer` rounds for GEMMs that reduce over each of `dims`: 1 the columns, 0 the
    rows."""
    across, along = (0, 0) if quantizer.per_tensor else quantizer.blocks or (1, 0)
    blocks = [(across, along) if dim == 1 else (along, across) for dim in dims]
    return Rounding(quantizer, tuple(blocks), dims[0])


def rounding_of_both(along: Quantizer, across: Quantizer) -> Rounding | None:
    """How two quantizers round in one sweep, for GEMMs that reduce over the columns and over the
    rows; None if they differ in more than their blocks."""
    if not alike(along, across):
        return None
    return Rounding(along, rounding(along, [1]).blocks + rounding(across, [0]).blocks)


def alike(one: Quantizer, other: Quantizer) -> bool:
    """Whether two quantizers differ in their blocks alone, so that one sweep makes both copies."""
    return (
        not (one.per_tensor or other.per_tensor or one.stochastic or one.hadamard)
        and (one.block == "row") == (other.block == "row")
        and replace(one, block=other.block) == other
    )


def round_to(
    x: Tensor,
    quantizer: Quantizer,
    dim: int,
    generator: RandomBits | None = None,
    *,
    scale: Tensor | None = None,
) -> Rounded:
    """The values of `quantize(x, quantizer, dim)` in float32.

    Args:
        x: a matrix, float32, bfloat16 or float16.
        quantizer: how it is quantized.
        dim: what the GEMM reduces over: 1 the columns, 0 the rows.
        generator: the bits for stochastic rounding, by the place in `x`.
        scale: float32, 0-dim, for one scale per tensor: needed for delayed scaling.

    Raises:
        ValueError: no generator or no scale where one is needed, or a scale for blocks.
    """
    check_arguments(quantizer, generator, scale)
    return rounding(quantizer, [dim % 2])(x, generator, scale)[0]


def round_both(
    x: Tensor,
    along: Quantizer,
    across: Quantizer,
    generators: tuple[RandomBits | None, RandomBits | None] = (None, None),
) -> tuple[Rounded, Rounded]:
    """`round_to` with dims 1 and 0: for GEMMs that reduce over the columns and over the rows.

    Equal to two calls, and cheaper where the two quantizers are alike.
    """
    if along.turns and along == across:
        both = round_to(x, along, 1, generators[0])
        return both, both
    at_once = rounding_of_both(along, across)
    if at_once is None:
        return round_to(x, along, 1, generators[0]), round_to(x, across, 0, generators[1])
    one, other = at_once(x)
    return one, other


def round_to_fp8(x: Tensor, scale: Tensor, format: str = "e4m3") -> Tensor:
    """The values of `cast_to_fp8(x, scale, format)`, still multiplied by `scale`: float32.

    Args:
        x: any shape, float32, bfloat16 or float16.
        scale: float32, 0-dim; multiplies into the format.
        format: "e4m3" or "e5m2".
    """
    quantizer = Quantizer(format=fp8_format(format).name)  # type: ignore[arg-type]
    return round_to(x.reshape(1, -1), quantizer, 1, scale=scale).values.view(x.shape)


def round_to_mxfp8(
    x: Tensor, dims: Sequence[int], format: str = "e4m3", scale_rounding: ScaleRounding = "rceil"
) -> list[Tensor]:
    """The values of `quantize_mxfp8(x, dim)` for each of `dims`: float32, of the shape of `x`.

    Args:
        x: a matrix, float32, bfloat16 or float16.
        dims: 0 and 1, or one of them; both at once cost less than one after the other.
        format: "e4m3" or "e5m2".
        scale_rounding: see `quantize_mxfp8`.
    """
    name = fp8_format(format).name
    rules: Any = {"block": (1, MX_BLOCK), "scale": "e8m0", "scale_rounding": scale_rounding}
    quantizer = Quantizer(format=name, **rules)  # type: ignore[arg-type]
    return [each.values for each in rounding(quantizer, [dim % 2 for dim in dims])(x)]


def round_to_blocks(
    x: Tensor, blocks: Sequence[Block], format: str = "e4m3", power_of_two: bool = True
) -> list[Tensor]:
    """The values of `quantize_blocks(x, block)` for each of `blocks`: float32, the shape of `x`.

    Args:
        x: a matrix, float32, bfloat16 or float16.
        blocks: such as (1, 128) and (128, 1), together or alone.
        format: "e4m3" or "e5m2".
        power_of_two: see `quantize_blocks`.
    """
    name, scale = fp8_format(format).name, "power_of_two" if power_of_two else "float32"
    quantizer = Quantizer(format=name, block=(1, 128), scale=scale)  # type: ignore[arg-type]
    return [Rounding(quantizer, (block,))(x)[0].values for block in blocks]


def _round(scaled: Tensor, target: Format) -> Tensor:
    """`scaled`, float32, saturated and rounded to `target`, as one expression."""
    values = scaled.clamp(-target.max, target.max)
    smallest = target.min_normal * _magic(target)
    if values.device.type == "cpu":
        # inductor's vectors cannot look at bits. Veltkamp's splitting (Dekker, 1971) rounds to the
        # nearest with sums alone, here to even at ties: the tests try every mantissa.
        split = values * (2.0 ** (23 - target.mantissa_bits) + 1)
        rounded = split - (split - values)
        return torch.where(
            values.abs() < target.min_normal, (values + smallest) - smallest, rounded
        )
    # Compilers for GPUs make one operation of a product and a sum; here a limit stands in between.
    power = (values.view(torch.int32) & _EXPONENT).view(torch.float32)
    spacing = (power * _magic(target)).clamp_min(smallest)
    return (values + spacing) - spacing


def round_scaled(
    source: Tensor, block: Block, scales: Scales, target: Format, generator: RandomBits | None
) -> Tensor:
    """The matrix `source` rounded to `target`, multiplied by the scales before and after."""
    scaled = blocked(source, block) * in_memory(scales.into)
    if generator is None:
        rounded = _round(scaled, target)
    else:
        bits = generator.bits(*source.shape).view(scaled.shape)
        rounded = _round_at_random(scaled.clamp(-target.max, target.max), bits, target)
    if scales.out is not None:
        rounded = rounded * in_memory(scales.out)
    return rounded.view_as(source)


def _round_at_random(values: Tensor, bits: Tensor, target: Format) -> Tensor:
    """`values`, float32 and clamped, rounded to `target`: away from zero where the random number is
    below the place between the two neighbours times 2^32, rounded up. All of it is exact."""
    power = (values.view(torch.int32) & _EXPONENT).view(torch.float32)
    step = (power * 2.0**-target.mantissa_bits).clamp_min(float(target.min_subnormal or 0))
    per_step = ((254 << 23) - step.view(torch.int32)).view(torch.float32)  # 1 / step
    steps = values * per_step
    below = steps.trunc()
    threshold = ((steps - below).abs() * 2.0**32).ceil()
    away = (bits < threshold.to(torch.int64)).to(torch.float32)
    return (below + away.copysign(steps)) * step


def _magic(target: Format) -> float:
    return float(1.5 * 2.0 ** (23 - target.mantissa_bits))


def amaxes(source: Tensor, block: Block) -> Tensor:
    """The amax of each block of a matrix, NaN ignored: float32 [n0, 1, n1, 1]."""
    if not source.numel():
        (rows, columns), (b0, b1) = source.shape, block
        return source.new_zeros(rows // b0, 1, columns // b1, 1)
    return block_amax(blocked(source, block))


def blocked(matrix: Tensor, block: Block) -> Tensor:
    """A contiguous matrix as [n0, b0, n1, b1], a view; of a part of a block of all rows too."""
    (rows, columns), (b0, b1) = matrix.shape, block
    b0 = min(b0, max(1, rows))
    return matrix.view(rows // b0, b0, columns // b1, b1)


def padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """The matrix `x` in float32, contiguous, with zeros up to a multiple in both dimensions."""
    padding = (0, -x.shape[1] % columns, 0, -x.shape[0] % rows)
    return F.pad(x.to(torch.float32), padding) if any(padding) else x.to(torch.float32).contiguous()
