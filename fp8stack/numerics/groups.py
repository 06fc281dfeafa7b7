"""Rounding of groups of rows: no scale and no block spans two groups.

A matrix [rows, columns] has one group after the other; `offs`, int32 [groups], holds the end of
each group. Groups of one size are [groups, rows, columns] and have no `offs`.

The rounding is one operator, so that the code around it compiles for groups of any sizes. It reads
`offs` on the host, which synchronizes with a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8stack.common.errors import UserError
from fp8stack.numerics import fused
from fp8stack.numerics.blocks import RoundingRule
from fp8stack.numerics.operators import operator_on_any_device
from fp8stack.numerics.random import RandomBits
from fp8stack.numerics.rounding import Rounded, Rounding


def round_groups(
    rule: Rounding,
    x: Tensor,
    offs: Tensor | None,
    bits: RandomBits | None = None,
    scale: Tensor | None = None,
    *,
    bf16: bool = False,
    amaxes: bool = False,
) -> tuple[list[Rounded], Tensor | None]:
    """Apply `rule.round` to each group.

    The stream of `bits` and the `scale` are [groups].

    Returns:
        For each of the rule's blocks, the values in the shape of `x`, and factors [groups], [rows]
        or [groups, columns]. If groups are padded, they begin at multiples of `rule.row_multiple`,
        and the values end in rows of zeros. With `amaxes` and a given scale, also the amaxes of the
        groups, float32 [groups].
    """
    random: Any = (None, 0, None, 0)
    if bits is not None:
        random = bits.counter, bits.seed, bits.stream, int(bits.first_row)
    run: Any = _operator if fused.needs_operator(x) else _round_groups
    tensors: list[Tensor] = run(x, offs, rule.number, scale, *random, bf16, amaxes)
    tensors_per_block = (len(tensors) - amaxes) // len(rule.blocks)
    copies = []
    for i in range(0, len(tensors) - amaxes, tensors_per_block):
        copies.append(Rounded(tensors[i], tensors[i + 1] if tensors_per_block == 2 else None))
    return copies, tensors[-1] if amaxes else None


def sizes_of(offs: Tensor, rows: int) -> np.ndarray:
    """The number of rows of each group: int64 [groups].

    Raises:
        UserError: `offs` are not the ends of groups of `rows` rows in all.
    """
    offsets = offs.cpu().numpy().astype(np.int64)
    sizes: np.ndarray = np.diff(offsets, prepend=0)
    if sizes.min() < 0 or offsets[-1] != rows:
        listed = ", ".join(map(str, offsets[:8])) + (", ..." if len(offsets) > 8 else "")
        raise UserError(
            f"A grouped linear got offsets [{listed}] for {rows} rows. Offsets are the ends of the "
            "groups, in order, the last one the number of rows."
        )
    return sizes


def split_groups(x: Tensor, offs: Tensor | None) -> Sequence[Tensor]:
    """The matrix of each group: views."""
    return x.unbind() if offs is None else x.split_with_sizes(sizes_of(offs, len(x)).tolist())


def _results(x: Tensor, offs: Tensor | None, rule: RoundingRule, bf16: bool) -> list[Tensor]:
    """Allocate the values and, if the rule has them, the factors of each block."""
    groups = len(x) if offs is None else len(offs)
    rows, columns = x.shape[-2:]
    if rule.quantizer.hadamard:
        rows, columns = rule.shape(rows, columns)
    leading: tuple[int, ...] = (groups,)
    if offs is not None:  # any group may need padding
        leading, rows = (), x.shape[0] + groups * (rule.row_multiple - 1)
    dtype = torch.bfloat16 if bf16 else torch.float32
    results = []
    for block in rule.blocks:
        results.append(x.new_empty((*leading, rows, columns), dtype=dtype))
        if rule.has_factor:
            sizes = {(1, 0): (*leading, rows), (0, 1): (groups, columns)}
            # The kernel does not write factors of the columns of an empty group.
            results.append(x.new_ones(sizes.get(block, (groups,)), dtype=torch.float32))
    return results


def _fake_round_groups(x: Tensor, offs: Tensor | None, rule: int, *options: Any) -> list[Tensor]:
    *_, bf16, amaxes = options
    results = _results(x, offs, fused.RULES[rule], bf16)
    groups = len(x) if offs is None else len(offs)
    return [*results, x.new_empty(groups, dtype=torch.float32)] if amaxes else results


def _round_groups(
    x: Tensor,
    offs: Tensor | None,
    rule: int,
    scale: Tensor | None,
    counter: Tensor | None,
    seed: int,
    streams: Tensor | None,
    first_row: int,
    bf16: bool,
    amaxes: bool,
) -> list[Tensor]:
    rounding: Any = fused.RULES[rule]
    results = _results(x, offs, rounding, bf16)
    sizes = np.full(len(x), x.shape[1]) if offs is None else sizes_of(offs, len(x))
    group_amaxes = x.new_zeros(len(sizes), dtype=torch.float32)
    multiple = rounding.row_multiple
    if offs is not None and multiple > 1:
        padded_rows = int((-(-sizes // multiple) * multiple).sum())
        for result in results[:: 2 if rounding.has_factor else 1]:
            result[padded_rows:] = 0
    recorded = group_amaxes if amaxes else None
    if fused.rounds_groups(x):
        random = counter, seed, streams, first_row
        fused.round_groups(x, rule, sizes, scale, recorded, random, results)
        return [*results, group_amaxes] if amaxes else results
    # On a GPU, or without numba: one group after the other.
    streams_of_groups = [0] * len(sizes) if streams is None else streams.tolist()
    start = 0
    for index, matrix in enumerate(split_groups(x, offs)):
        bits = None
        if counter is not None:
            bits = RandomBits(seed, streams_of_groups[index], counter, first_row)
        scale_and_recorded = [
            None if tensor is None else tensor[index] for tensor in (scale, recorded)
        ]
        copies = rounding.round(matrix, bits, *scale_and_recorded, None, bf16, fuse=False)
        stop = start + len(copies[0].values)
        rows: Any = index if offs is None else slice(start, stop)
        remaining_results = iter(results)
        for (values, factor), block in zip(copies, rounding.blocks, strict=True):
            next(remaining_results)[rows] = values
            if factor is not None:
                next(remaining_results)[rows if block == (1, 0) else index] = factor
        start = stop
    return [*results, group_amaxes] if amaxes else results


_operator = operator_on_any_device("round_groups", _fake_round_groups)(_round_groups)
