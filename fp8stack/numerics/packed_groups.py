"""Groups of rows as bytes: `quantize` over the rows of each group, and `unpack` of what it gave.

The bytes and scales of the groups are stored one group after the other. Both ways are one operator
each, so that the code around them compiles for groups of any sizes, see `numerics.groups`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8stack.common.formats import Quantizer
from fp8stack.numerics import fused
from fp8stack.numerics.groups import drawn_from, multiple_of, rule_of, spans, split_groups
from fp8stack.numerics.operators import operator_on_any_device
from fp8stack.numerics.quantized import Quantized, quantize, unpack
from fp8stack.numerics.random import RandomBits
from fp8stack.numerics.rounding import Rounded, Rounding


class PackedGroups(NamedTuple):
    """The bytes of groups, see `Quantized`. Rows at the end may belong to no group.

    Attributes:
        data: [rows, columns], half as many rows for four bits.
        scales: [blocks of rows, blocks of columns]; without blocks one row for each group.
        amax: float32 [groups].
        has_nan: bool [groups].
    """

    data: Tensor
    scales: Tensor
    amax: Tensor
    has_nan: Tensor


class GroupPacking:
    """The bytes of groups by a rule whose GEMM reduces over the rows."""

    def __init__(self, rule: Rounding) -> None:
        assert rule.dim == 0
        self._number = fused.number(rule)
        self._has_factor = _has_factor(rule.quantizer)

    def pack(
        self,
        x: Tensor,
        ends: Tensor | None,
        bits: RandomBits | None = None,
        scale: Tensor | None = None,
    ) -> PackedGroups:
        """`quantize` each group of `x`; for the arguments see `GroupRounding.round`."""
        run = pack_groups if fused.needs_operator(x) else _pack_groups
        return PackedGroups(*run(x, ends, self._number, scale, *drawn_from(bits)))

    def unpack(
        self, packed: PackedGroups, ends: Tensor | None, shape: Sequence[int], bf16: bool = False
    ) -> Rounded:
        """The values and factors of groups of `shape`, as `GroupRounding.round` gives them; NaN in
        formats that have no code for it is a factor of NaN, see `quantized.unpack`."""
        run = unpack_groups if fused.needs_operator(packed.data) else _unpack_groups
        tensors = run(*packed, ends, self._number, list(shape), bf16)
        return Rounded(tensors[0], tensors[1] if self._has_factor else None)


def _has_factor(quantizer: Quantizer) -> bool:
    """Whether `unpack` gives a factor."""
    lacks_nan = not quantizer.element.has_nan
    return quantizer.blocks is None or quantizer.scale == "e4m3" or lacks_nan


def _rows_of(rows: int, quantizer: Quantizer, groups: int = 1) -> tuple[Any, Any]:
    """The rows of the bytes and of the scales of a group of `rows` rows; for several groups, the
    most that they may have."""
    multiple = quantizer.hadamard or 1
    padded = _blocks(rows, multiple, groups) * multiple
    data = _blocks(padded, 2, groups) if quantizer.element_bits == 4 else padded
    block = None if quantizer.blocks is None else quantizer.blocks[1]
    return data, groups if block is None else _blocks(padded, block, groups)


def _blocks(rows: int, size: int, groups: int) -> int:
    """The number of blocks that each group's rows fill; for several groups, an upper bound."""
    return -(-rows // size) if groups == 1 else (rows + groups * (size - 1)) // size


def _columns_of_scales(columns: int, quantizer: Quantizer) -> int:
    if quantizer.blocks is None:
        return 1 if quantizer.per_tensor else columns
    return -(-columns // quantizer.blocks[0])


def _memory(x: Tensor, groups: int, quantizer: Quantizer) -> list[Tensor]:
    """Memory for the bytes of all groups of `x`, [rows, columns] or [groups, rows, columns]."""
    columns = x.shape[-1]
    if x.ndim == 3:
        data, scales = (groups * rows for rows in _rows_of(x.shape[1], quantizer))
    else:
        data, scales = _rows_of(x.shape[0], quantizer, groups)
    element = quantizer.element.dtype or torch.uint8
    stored = {"e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}
    scale_dtype = stored.get(quantizer.scale, torch.float32)
    return [
        x.new_zeros((data, columns), dtype=torch.uint8).view(element),
        x.new_zeros((scales, _columns_of_scales(columns, quantizer)), dtype=scale_dtype),
        x.new_zeros(groups, dtype=torch.float32),
        x.new_zeros(groups, dtype=torch.bool),
    ]


def _places(sizes: Sequence[int], quantizer: Quantizer) -> Iterator[tuple[slice, slice]]:
    """The rows of the bytes and of the scales of each group."""
    data = scales = 0
    for size in sizes:
        data_rows, scale_rows = _rows_of(size, quantizer)
        yield slice(data, data + data_rows), slice(scales, scales + scale_rows)
        data, scales = data + data_rows, scales + scale_rows


def _pack_groups(
    x: Tensor,
    ends: Tensor | None,
    rule: int,
    scale: Tensor | None,
    counter: Tensor | None,
    seed: int,
    streams: Tensor | None,
    first_row: int,
) -> list[Tensor]:
    quantizer, groups = rule_of(rule).quantizer, split_groups(x, ends)
    data, scales, amax, has_nan = memory = _memory(x, len(groups), quantizer)
    numbers = [] if streams is None else streams.tolist()
    places = _places([len(group) for group in groups], quantizer)
    for index, (group, (of_data, of_scales)) in enumerate(zip(groups, places, strict=True)):
        bits = None
        if counter is not None:
            bits = RandomBits(seed, numbers[index], counter, first_row)
        scale_of_group = None if scale is None else scale[index]
        packed = quantize(group, quantizer, 0, bits, scale=scale_of_group)
        data[of_data] = packed.data
        scales[of_scales] = packed.scales
        amax[index], has_nan[index] = packed.amax, packed.has_nan
    return memory


def _fake_pack_groups(x: Tensor, ends: Tensor | None, rule: int, *options: Any) -> list[Tensor]:
    return _memory(x, len(x) if ends is None else len(ends), rule_of(rule).quantizer)


def _unpacked_memory(
    data: Tensor, groups: int, rule: Rounding, shape: Sequence[int], bf16: bool
) -> list[Tensor]:
    """Memory for the values and, if there are any, the factors."""
    quantizer, columns = rule.quantizer, shape[-1]
    if len(shape) == 3:
        size: tuple[int, ...] = (groups, *rule.shape(shape[1], columns))
    else:
        size = shape[0] + groups * (multiple_of(rule) - 1), columns
    results = [data.new_zeros(size, dtype=torch.bfloat16 if bf16 else torch.float32)]
    if _has_factor(quantizer):
        by_column = quantizer.blocks is None and not quantizer.per_tensor
        factors = (groups, columns) if by_column else (groups,)
        results.append(data.new_zeros(factors, dtype=torch.float32))
    return results


def _unpack_groups(
    data: Tensor,
    scales: Tensor,
    amax: Tensor,
    has_nan: Tensor,
    ends: Tensor | None,
    rule: int,
    shape: list[int],
    bf16: bool,
) -> list[Tensor]:
    rounding, columns = rule_of(rule), shape[-1]
    quantizer, groups = rounding.quantizer, len(amax)
    results = _unpacked_memory(data, groups, rounding, shape, bf16)
    if ends is None:
        sizes = [shape[1]] * groups
    else:
        sizes = [stop - start for start, stop in spans(ends, shape[0])]
    start = 0
    for index, (size, (of_data, of_scales)) in enumerate(
        zip(sizes, _places(sizes, quantizer), strict=True)
    ):
        stored = scales[of_scales]
        packed = Quantized(
            data[of_data],
            stored.reshape(()) if quantizer.per_tensor else stored,
            amax[index],
            quantizer,
            0,
            torch.Size((size, columns)),
            has_nan[index],
        )
        values, factor = unpack(packed)
        target = results[0][index if ends is None else slice(start, start + len(values))]
        target.copy_(values)
        if factor is not None:
            results[1][index] = factor
        start += len(values)
    return results


def _fake_unpack_groups(
    data: Tensor,
    scales: Tensor,
    amax: Tensor,
    has_nan: Tensor,
    ends: Tensor | None,
    rule: int,
    shape: list[int],
    bf16: bool,
) -> list[Tensor]:
    return _unpacked_memory(data, len(amax), rule_of(rule), shape, bf16)


pack_groups = operator_on_any_device("pack_groups", _fake_pack_groups)(_pack_groups)
"""`GroupPacking.pack` for what looks at operators."""
unpack_groups = operator_on_any_device("unpack_groups", _fake_unpack_groups)(_unpack_groups)
"""`GroupPacking.unpack` for what looks at operators."""
