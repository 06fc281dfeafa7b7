"""Blocks of a tensor that share a scale: splitting a tensor, and the amaxes of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8stack.common.formats import Quantizer
from fp8stack.numerics.cast import magnitude


def block_sizes(quantizer: Quantizer, shape: Sequence[int], dim: int) -> list[int]:
    """The size of a block in each dimension of a tensor that a GEMM reduces over `dim`, from 0;
    blocks of no fixed size are rows along `dim`."""
    sizes = [1] * len(shape)
    if quantizer.blocks is None:
        sizes[dim] = max(1, shape[dim])
        return sizes
    across, sizes[dim] = quantizer.blocks
    if across > 1:
        if len(shape) < 2:
            raise ValueError(f"A block {quantizer.blocks} does not fit a tensor of one dimension.")
        sizes[-2 if dim == len(shape) - 1 else -1] = across
    return sizes


def split_into_blocks(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """`x` padded with zeros and viewed as [n0, b0, n1, b1, ...], and the way back to its shape."""
    padding: list[int] = []
    for length, size in zip(reversed(x.shape), reversed(sizes), strict=True):
        padding += [0, -length % size]
    padded = F.pad(x, padding) if any(padding) else x
    shape: list[int] = []
    for length, size in zip(padded.shape, sizes, strict=True):
        shape += [length // size, size]

    def restore(blocks: Tensor) -> Tensor:
        unblocked = blocks.reshape(padded.shape)
        if padded is x:
            return unblocked.contiguous()
        # Stored first: inductor's code for a CPU (torch 2.13) writes wrong numbers if it trims
        # padded blocks while it computes them.
        trimmed = in_memory(unblocked)[tuple(slice(length) for length in x.shape)]
        return trimmed.clone(memory_format=torch.contiguous_format)  # no view of `padded`

    return padded.reshape(shape), restore


def block_amax(blocks: Tensor) -> Tensor:
    """The amax of each block of [n0, b0, n1, b1, ...], NaN ignored: [n0, 1, n1, 1, ...]."""
    return magnitude(blocks).amax(dim=list(range(1, blocks.ndim, 2)), keepdim=True)


def spread(scales: Tensor, sizes: Sequence[int], shape: Sequence[int]) -> Tensor:
    """The scale of each element of a tensor of `shape`, from the scales of its blocks."""
    for axis, size in enumerate(sizes):
        if size > 1:
            scales = in_memory(scales.repeat_interleave(size, axis)).narrow(axis, 0, shape[axis])
    return scales


def in_memory(x: Tensor) -> Tensor:
    """`x`, stored once by compiled code for a CPU, which would otherwise compute it for every
    use."""
    return x.as_strided(x.shape, x.stride()) if x.device.type == "cpu" else x
