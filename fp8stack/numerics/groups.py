"""Rounding of groups of rows, each by itself: no scale and no block crosses a group.

A matrix [rows, columns] has its groups one after the other, and `ends`, int32 [groups], says where
each ends. Groups of one size are [groups, rows, columns] and need no ends.

The rounding is one operator, so that the code around it compiles for groups of any sizes. It reads
the ends, for which it waits on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8stack.common.errors import UserError
from fp8stack.numerics import fused
from fp8stack.numerics.operators import operator_on_any_device
from fp8stack.numerics.random import RandomBits
from fp8stack.numerics.rounding import Rounded, Rounding


class GroupRounding:
    """The rounding of groups by one rule.

    Attributes:
        multiple: what each group's rows are padded to a multiple of: the size of a Hadamard
            transform that mixes rows, else 1.
    """

    def __init__(self, rule: Rounding) -> None:
        self._number = fused.number(rule)
        self._has_factor = rule.has_factor
        self.multiple = multiple_of(rule)

    def round(
        self,
        x: Tensor,
        ends: Tensor | None,
        bits: RandomBits | None = None,
        scale: Tensor | None = None,
        *,
        bf16: bool = False,
        amaxes: bool = False,
    ) -> tuple[list[Rounded], Tensor | None]:
        """`Rounding.round` of each group.

        The stream of `bits` and the `scale` are [groups].

        Returns:
            For each of the rule's blocks the values, in the shape of `x`, and the factors: [groups]
            in place of 0-dim, one for each row, or one for each group and column. If groups are
            padded, they begin at multiples of `multiple`, and the values end in rows of zeros.
            And the amaxes of the groups, float32 [groups], if `amaxes`, for a known scale.
        """
        run = round_groups if fused.needs_operator(x) else _round_groups
        tensors = run(x, ends, self._number, scale, *drawn_from(bits), bf16, amaxes)
        largest = tensors[-1] if amaxes else None
        step = 2 if self._has_factor else 1
        copies = []
        for i in range(0, len(tensors) - amaxes, step):
            copies.append(Rounded(tensors[i], tensors[i + 1] if self._has_factor else None))
        return copies, largest


def drawn_from(bits: RandomBits | None) -> tuple[Tensor | None, int, Tensor | None, int]:
    """The counter, seed, streams and first row of the bits of groups, as arguments of operators."""
    if bits is None:
        return None, 0, None, 0
    assert isinstance(bits.stream, Tensor)
    return bits.counter, bits.seed, bits.stream, int(bits.first_row)


def spans(ends: Tensor, rows: int, multiple: int = 1) -> list[tuple[int, int]]:
    """The rows at which each group starts and stops, if each starts at a multiple of `multiple`.

    Raises:
        UserError: `ends` are not the ends of groups of `rows` rows in all.
    """
    numbers = ends.tolist()
    sizes = [end - start for start, end in zip([0, *numbers], numbers, strict=False)]
    if min(sizes) < 0 or sum(sizes) != rows:
        listed = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
        raise UserError(
            f"A grouped linear got offsets [{listed}] for {rows} rows. Offsets are the ends of the "
            "groups, in order, the last one the number of rows."
        )
    places, start = [], 0
    for size in sizes:
        places.append((start, start + size))
        start += -(-size // multiple) * multiple
    return places


def split_groups(x: Tensor, ends: Tensor | None) -> list[Tensor]:
    """The matrix of each group: views."""
    if ends is None:
        return list(x.unbind())
    return split_rows(x, [stop - start for start, stop in spans(ends, len(x))])


def split_rows(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The first rows of `x` in matrices of these numbers of rows: views."""
    return list(x.split_with_sizes([*sizes, len(x) - sum(sizes)]))[:-1]


def multiple_of(rule: Rounding) -> int:
    """See `GroupRounding.multiple`."""
    return (rule.quantizer.hadamard or 1) if rule.dim == 0 else 1


def rule_of(number: int) -> Rounding:
    """The rounding rule with this id, of `fused.number`."""
    rule = fused.rule(number)
    assert isinstance(rule, Rounding)
    return rule


class _Result(NamedTuple):
    """Memory for a result of all groups; `by_row`: it has a row for each of theirs."""

    memory: Tensor
    by_row: bool


def _results(x: Tensor, ends: Tensor | None, rule: Rounding, bf16: bool) -> list[_Result]:
    """Memory for the values of each block and, if there is one, the factor."""
    groups = len(x) if ends is None else len(ends)
    rows, columns = rule.shape(*x.shape[-2:])
    if ends is not None:  # any group may need padding
        rows = x.shape[0] + groups * (multiple_of(rule) - 1)
    leading = (groups,) if ends is None else ()
    dtype = torch.bfloat16 if bf16 else torch.float32
    results = []
    for block in rule.blocks:
        results.append(_Result(x.new_empty((*leading, rows, columns), dtype=dtype), True))
        if rule.has_factor:
            by_row = block == (1, 0)
            size = (*leading, rows) if by_row else (groups, *rule.factor_shape(block, 0, columns))
            results.append(_Result(x.new_empty(size, dtype=torch.float32), by_row))
    return results


def _fake_round_groups(x: Tensor, ends: Tensor | None, rule: int, *options: Any) -> list[Tensor]:
    *_, bf16, amaxes = options
    results = [result.memory for result in _results(x, ends, rule_of(rule), bf16)]
    groups = len(x) if ends is None else len(ends)
    return [*results, x.new_empty(groups, dtype=torch.float32)] if amaxes else results


def _round_groups(
    x: Tensor,
    ends: Tensor | None,
    rule: int,
    scale: Tensor | None,
    counter: Tensor | None,
    seed: int,
    streams: Tensor | None,
    first_row: int,
    bf16: bool,
    amaxes: bool,
) -> list[Tensor]:
    rounding = rule_of(rule)
    results = _results(x, ends, rounding, bf16)
    groups = split_groups(x, ends)
    largest = torch.zeros(len(groups), dtype=torch.float32, device=x.device)
    numbers = [0] * len(groups) if streams is None else streams.tolist()
    nothing = [None] * len(groups)
    scales = nothing if scale is None else scale.unbind()
    recorded = largest.unbind() if amaxes else nothing
    sizes = [rounding.shape(*group.shape)[0] for group in groups]
    memories = [
        split_rows(memory, sizes) if by_row and ends is not None else memory.unbind()
        for memory, by_row in results
    ]
    for place, group in enumerate(groups):
        targets = [memory[place] for memory in memories]
        of_group = scales[place], recorded[place], None
        if fused.implementation(group) is fused.round:
            drawn = counter, seed, numbers[place], first_row
            fused.round(group, rule, *of_group, *drawn, bf16, into=targets)
        else:
            bits = None
            if counter is not None:
                bits = RandomBits(seed, numbers[place], counter, first_row)
            copies = rounding.round(group, bits, *of_group, bf16)
            tensors = [tensor for copy in copies for tensor in copy if tensor is not None]
            for target, tensor in zip(targets, tensors, strict=True):
                target.copy_(tensor)
    if ends is not None:
        for memory, by_row in results:
            if by_row:
                memory[sum(sizes) :] = 0
    rounded = [memory for memory, _ in results]
    return [*rounded, largest] if amaxes else rounded


round_groups = operator_on_any_device("round_groups", _fake_round_groups)(_round_groups)
"""`GroupRounding.round` for what looks at operators."""
