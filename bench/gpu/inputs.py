"""What a GPU is checked on: all values, ties, ends, specials; and steps with spikes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fp8stack.numerics import FORMATS

FORMAT_NAMES = ("e4m3", "e5m2")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MATRICES = ("ordinary", "special")


class Operands(NamedTuple):
    """What a linear multiplies in one step: x [rows, in], w [out, in], dy [rows, out]."""

    x: Tensor
    w: Tensor
    dy: Tensor


def bf16_values() -> Tensor:
    """Every bfloat16: [256, 256]."""
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    return codes.view(torch.bfloat16).view(256, 256)


def fp32_values() -> Tensor:
    """Ties of both formats and their neighbours, subnormals, ends, specials, random bits:
    float32 [256, 256]."""
    parts = [torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan])]
    parts.append(torch.tensor([3.4028234663852886e38, 1.1754943508222875e-38, 1e-45]))
    for name in FORMAT_NAMES:
        target = FORMATS[name]
        codes = [target.decode(code) for code in range(target.max_code + 1)]
        known = torch.tensor([*codes, 2 * codes[-1] - codes[-2]], dtype=torch.float32)
        ties = (known[:-1] + known[1:]) / 2
        up, down = torch.full_like(ties, torch.inf), torch.zeros_like(ties)
        parts += [known, ties, torch.nextafter(ties, up), torch.nextafter(ties, down)]
    generator = torch.Generator().manual_seed(0)
    parts.append(
        torch.randint(1, 0x800000, (1024,), generator=generator, dtype=torch.int32).view(
            torch.float32
        )
    )
    named = torch.cat(parts)
    named = torch.cat([named, -named])
    bits = torch.randint(
        -(2**31), 2**31, (2**16 - len(named),), generator=generator, dtype=torch.int64
    )
    return torch.cat([named, bits.to(torch.int32).view(torch.float32)]).view(256, 256)


def values_of(dtype: str) -> Tensor:
    """What casts are tried on."""
    return bf16_values() if dtype == "bf16" else fp32_values()


def matrix(kind: str, dtype: str) -> Tensor:
    """[192, 320], its blocks of all magnitudes; "special" has zeros, ends, infinities and NaN."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(192, 320, generator=generator)
    x *= 2.0 ** torch.randint(-12, 13, (192, 1), generator=generator)
    x *= 2.0 ** torch.randint(-6, 7, (1, 320), generator=generator)
    if kind == "special":
        x[:32] = 0
        x[32:48] *= 1e-38
        x[48:64] = x[48:64].sign() * 3e38
        x[70, 3], x[71, 40], x[72, 130] = torch.inf, -torch.inf, torch.nan
        x[128:, 256:] = torch.nan
        x[100] = 448.0
        x[101, :] = 2.0**-130
    return x.to(DTYPES[dtype])


def amaxes() -> Tensor:
    """Amaxes of all magnitudes, and 0, inf and NaN: float32 [4096]."""
    generator = torch.Generator().manual_seed(2)
    bits = torch.randint(0, 0x7F800000, (4088,), generator=generator, dtype=torch.int64)
    ends = [0.0, torch.inf, torch.nan, 448.0, 57344.0, 1e-45, 3.4028234663852886e38, 1.0]
    return torch.cat([torch.tensor(ends), bits.to(torch.int32).view(torch.float32)])


def spiky_steps(steps: int, rows: int, inputs: int, outputs: int, seed: int = 3) -> list[Operands]:
    """Operands whose amaxes make a delayed scale do everything it can, bfloat16: each of the three
    has steps with a spike, zeros, infinities, NaN, and numbers next to nothing."""
    shapes = ((rows, inputs), (outputs, inputs), (rows, outputs))
    series = [_spiky(steps, shape, seed + place, 2 * place) for place, shape in enumerate(shapes)]
    return [Operands(*operands) for operands in zip(*series, strict=True)]


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
