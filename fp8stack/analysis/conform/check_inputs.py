"""The inputs of checks: quantizers of every kind; values, ties, limits and special values; steps
with spikes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fp8stack.common.formats import FORMATS, Format, Quantizer

FORMAT_NAMES = ("e4m3", "e5m2")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}

SERVED_RECIPES = ("served:fp8_dynamic", "served:fp8_block", "served:mxfp4")
"""Schemes of inference servers with further quantizers."""
MXFP8 = Quantizer(block=(1, 32), scale="e8m0")
NVFP4 = Quantizer(format="e2m1", block=(1, 16), scale="e4m3")


class LinearOperands(NamedTuple):
    """The operands of a linear in one step: x [rows, in], w [out, in], dy [rows, out]."""

    x: Tensor
    w: Tensor
    dy: Tensor


def bf16_values() -> Tensor:
    """Every bfloat16: [256, 256]."""
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    return codes.view(torch.bfloat16).view(256, 256)


def fp32_values(seed: int = 0) -> Tensor:
    """Ties of both formats and their neighbours, subnormals, limits, special values, random bits:
    float32 [256, 256]."""
    groups = [torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan])]
    groups.append(torch.tensor([3.4028234663852886e38, 1.1754943508222875e-38, 1e-45]))
    for name in FORMAT_NAMES:
        target = FORMATS[name]
        codes = [target.decode(code) for code in range(target.max_code + 1)]
        values = torch.tensor([*codes, 2 * codes[-1] - codes[-2]], dtype=torch.float32)
        ties = (values[:-1] + values[1:]) / 2
        up, down = torch.full_like(ties, torch.inf), torch.zeros_like(ties)
        groups += [values, ties, torch.nextafter(ties, up), torch.nextafter(ties, down)]
    generator = torch.Generator().manual_seed(seed)
    named = torch.cat([*groups, _of_random_bits(1, 0x800000, 1024, generator)])
    named = torch.cat([named, -named])
    random_values = _of_random_bits(-(2**31), 2**31, 2**16 - len(named), generator)
    return torch.cat([named, random_values]).view(256, 256)


def _of_random_bits(first: int, end: int, count: int, generator: torch.Generator) -> Tensor:
    bits = torch.randint(first, end, (count,), generator=generator)
    return bits.to(torch.int32).view(torch.float32)


def values_of(dtype: str, seed: int = 0) -> Tensor:
    """The values to test casts with."""
    return bf16_values() if dtype == "bf16" else fp32_values(seed)


def amaxes(seed: int = 2) -> Tensor:
    """Amaxes of all magnitudes, and 0, inf and NaN: float32 [4096]."""
    generator = torch.Generator().manual_seed(seed)
    ends = [0.0, torch.inf, torch.nan, 448.0, 57344.0, 1e-45, 3.4028234663852886e38, 1.0]
    return torch.cat([torch.tensor(ends), _of_random_bits(0, 0x7F800000, 4088, generator)])


def uneven(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Normal values whose magnitudes differ by rows and columns by up to 2^16."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x = x * 2.0 ** torch.randint(-8, 8, (rows, 1), generator=generator)
    return x * 2.0 ** torch.randint(-3, 3, (1, columns), generator=generator)


def with_specials(x: Tensor) -> Tensor:
    """A copy with a few elements that are not finite, zeros in blocks, and subnormal values."""
    x = x.clone()
    x[1, 3], x[40, 7], x[5, 0], x[41, 100] = math.nan, math.inf, -math.inf, -math.nan
    x[64:96, 64:96], x[9], x[33, :16] = 0.0, -0.0, -0.0
    x[12, 32:64], x[13, 32:64] = 2.0**-140, -(2.0**-126)
    return x


def extreme(seed: int = 0) -> Tensor:
    """All magnitudes of float32, sorted into blocks; and random float32 bits."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2**23, (70, 300), generator=generator, dtype=torch.int32)
    exponents = (
        torch.arange(70 * 300, dtype=torch.int32).div(82, rounding_mode="floor").view(70, 300)
    )
    signs = torch.randint(0, 2, (70, 300), generator=generator, dtype=torch.int32) << 31
    return (bits | (exponents.clamp(max=254) << 23) | signs).view(torch.float32)


def codes_and_ties(target: Format, rows: int, columns: int, seed: int = 1) -> Tensor:
    """Every value of a format, the ties between two of them and the ties' neighbours in float32,
    of both signs, times a power of two for each square of 16: float32. Each row and each column of
    16 has the largest value, so that its scale is a power of two, and ties stay ties."""
    values = torch.tensor([target.decode(code) for code in range(target.max_code + 1)])
    ties = (values[:-1] + values[1:]) / 2
    up, down = torch.full_like(ties, torch.inf), torch.zeros_like(ties)
    kinds = torch.cat([values, ties, torch.nextafter(ties, up), torch.nextafter(ties, down)])
    generator = torch.Generator().manual_seed(seed)
    x = kinds.repeat(-(-rows * columns // len(kinds)))[: rows * columns]
    x = x[torch.randperm(len(x), generator=generator)].view(rows, columns)
    x[::16], x[:, ::16] = target.max, target.max
    x = x * (1 - 2 * torch.randint(0, 2, (rows, columns), generator=generator))
    squares = torch.randint(-3, 4, (-(-rows // 16), -(-columns // 16)), generator=generator)
    powers = 2.0 ** squares.repeat_interleave(16, 0).repeat_interleave(16, 1)
    return x * powers[:rows, :columns]


def spiky_steps(
    steps: int, rows: int, inputs: int, outputs: int, seed: int = 3
) -> list[LinearOperands]:
    """bfloat16 operands that exercise all cases of a delayed scale: each operand has steps with a
    spike, zeros, infinities, NaN, and tiny values."""
    shapes = ((rows, inputs), (outputs, inputs), (rows, outputs))
    series = [_spiky(steps, shape, seed + place, 2 * place) for place, shape in enumerate(shapes)]
    return [LinearOperands(*operands) for operands in zip(*series, strict=True)]


def _spiky(steps: int, shape: tuple[int, int], seed: int, shift: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    magnitudes = 2.0 ** torch.randint(-4, 5, (steps, 1, 1), generator=generator)
    x = torch.randn(steps, *shape, generator=generator) * magnitudes
    for step in range(steps):
        match (step + shift) % 25:
            case 5:
                x[step] *= 1e4
            case 9:
                x[step] = 0
            case 12:
                x[step, 1, 3] = torch.inf
            case 15:
                x[step, 2, 5] = torch.nan
            case 18:
                x[step] = torch.nan
            case 20:
                x[step, 0, 0] = -torch.inf
            case 22:
                x[step] *= 1e-38
            case 24:
                x[step] = x[step].sign() * 3e38
    return list(x.to(torch.bfloat16).unbind())
