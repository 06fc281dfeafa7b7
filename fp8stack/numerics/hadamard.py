"""The Hadamard transform of an operand: outliers spread over their block before it is quantized.

Both operands of a GEMM are transformed along the dimension that it reduces over, and the transforms
cancel. Source: Transformer Engine 2.20's NVFP4 recipe, from which the signs are; its products are
bfloat16 GEMMs, here they are float32 sums in one order, rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Bit i of these is set where the sign of element i of a block is minus.
MINUS = {16: 0b1101_0111_1110_1000, 32: 0}


def hadamard(x: Tensor, size: int, dim: int = -1) -> Tensor:
    """`x` with each block of `size` along `dim` multiplied by `diag(signs) H / sqrt(size)`.

    `x` is rounded to bfloat16, its elements get their signs, Sylvester's H is applied as sums and
    differences in float32 over strides 1, 2, 4, ..., and the product with float32(1 / sqrt(size))
    is rounded to bfloat16.

    Args:
        x: any shape, float32, bfloat16 or float16.
        size: 16 or 32.
        dim: the dimension that the GEMM reduces over; padded with zeros to a multiple of `size`.

    Returns:
        float32 that bfloat16 holds exactly, of the shape of `x`, `dim` padded.
    """
    dim %= x.ndim
    padding = [0, 0] * (x.ndim - 1 - dim) + [0, -x.shape[dim] % size]
    padded = F.pad(x, padding) if any(padding) else x
    blocks = torch.unflatten(padded, dim, (padded.shape[dim] // size, size)).movedim(dim + 1, 0)
    signs = 1.0 - 2.0 * ((MINUS[size] >> torch.arange(size, device=x.device)) & 1)
    signs = signs.to(torch.float32).view(size, *[1] * x.ndim)
    values = _rounded(blocks.to(torch.float32)) * signs
    plus_minus = 1.0 - 2.0 * torch.arange(2, dtype=torch.float32, device=x.device)
    plus_minus = plus_minus.view(1, 2, *[1] * values.ndim)
    for level in range(size.bit_length() - 1):
        # a + b above, a - b below; a product with -1 is exact. Without `flip`, which inductor
        # computes wrongly where it pads strides (torch 2.11 and 2.13).
        pairs = torch.unflatten(values, 0, (size >> (level + 1), 2, 1 << level))
        values = (pairs[:, :1] + pairs[:, 1:] * plus_minus).flatten(0, 2)
    return _rounded(values * size**-0.5).movedim(0, dim + 1).flatten(dim, dim + 1).contiguous()


def _rounded(x: Tensor) -> Tensor:
    """float32 `x` rounded to bfloat16, by its bits: compilers take two casts for none."""
    bits = x.view(torch.int32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return torch.where(x != x, x, rounded.view(torch.float32))
