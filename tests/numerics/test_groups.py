"""Groups of rows are rounded as each would be by itself."""

from __future__ import annotations

import pytest
import torch

from fp8stack.common.errors import UserError
from fp8stack.common.formats import Quantizer
from fp8stack.numerics import fused
from fp8stack.numerics.groups import round_groups, sizes_of, split_groups
from fp8stack.numerics.random import RandomBits
from fp8stack.numerics.rounding import rounding, rounding_of_both
from tests.support.backend_models import normal

SIZES = [5, 0, 33, 1]
ENDS = torch.tensor([5, 5, 38, 39], dtype=torch.int32)
QUANTIZERS = {
    "tensor": Quantizer(format="e5m2"),
    "delayed": Quantizer(amax="delayed"),
    "row": Quantizer(block="row"),
    "mxfp8": Quantizer(block=(1, 32), scale="e8m0"),
    "squares": Quantizer(block=(128, 128)),
    "nvfp4": Quantizer(format="e2m1", block=(1, 16), scale="e4m3"),
    "hadamard": Quantizer(
        format="e2m1", block=(1, 16), scale="e4m3", hadamard=16, rounding="stochastic"
    ),
}


def test_sizes_are_the_differences_of_the_ends() -> None:
    assert sizes_of(ENDS, 39).tolist() == SIZES


@pytest.mark.parametrize("ends", [[4, 3, 5], [-1, 2, 5], [1, 2, 4], [1, 2, 6]])
def test_ends_of_other_rows_are_refused_by_their_numbers(ends) -> None:
    with pytest.raises(UserError, match="for 5 rows") as refused:
        sizes_of(torch.tensor(ends, dtype=torch.int32), 5)
    assert ", ".join(map(str, ends)) in str(refused.value)


@pytest.mark.parametrize("in_torch", [False, True], ids=["fused", "torch"])
@pytest.mark.parametrize("stacked", [False, True], ids=["rows", "stacked"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("quantizer", QUANTIZERS.values(), ids=QUANTIZERS)
def test_each_group_is_rounded_by_itself(
    quantizer, dim, stacked, in_torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_torch:
        monkeypatch.setattr(fused, "rounds_groups", lambda x: False)
    rule = rounding(quantizer, [dim])
    x = normal(4, 20, 40) if stacked else normal(39, 40)
    ends = None if stacked else ENDS
    counter, streams = torch.tensor(3), torch.tensor([7, 8, 9, 10])
    bits = RandomBits(1, streams, counter) if quantizer.stochastic else None
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0]) if quantizer.delayed else None
    [copy], amaxes = round_groups(rule, x, ends, bits, scale, amaxes=quantizer.delayed)
    start = 0
    for place, group in enumerate(split_groups(x, ends)):
        drawn = RandomBits(1, 7 + place, counter) if quantizer.stochastic else None
        of_group = None if scale is None else scale[place]
        expected = rule.round(group.clone(), drawn, of_group)[0]
        rows = slice(start, start + len(expected.values))
        values = copy.values[place] if stacked else copy.values[rows]
        assert torch.equal(values, expected.values)
        if expected.factor is not None:
            assert copy.factor is not None
            by_row = quantizer.block == "row" and dim == 1 and not stacked
            assert torch.equal(copy.factor[rows if by_row else place], expected.factor)
        if amaxes is not None:
            assert amaxes[place] == (group.abs().max() if group.numel() else 0)
        start = rows.stop
    padded = quantizer.hadamard and dim == 0 and not stacked
    assert rule.row_multiple == (16 if quantizer.hadamard and dim == 0 else 1)
    assert len(copy.values) == (4 if stacked else 39 + 60 if padded else 39)


def test_the_operator_is_what_torch_expects_of_one() -> None:
    sweep = rounding_of_both(QUANTIZERS["mxfp8"], QUANTIZERS["mxfp8"])
    assert sweep is not None
    for rule in (sweep, *(rounding(QUANTIZERS[name], [0]) for name in ("delayed", "hadamard"))):
        number = fused.number(rule)
        drawn = (torch.tensor(0), 1, torch.arange(4), 0)
        scale = torch.ones(4) if rule.quantizer.delayed else None
        for x, ends in ((normal(39, 40), ENDS), (normal(4, 20, 40), None)):
            arguments = (x, ends, number, scale, *drawn, False, scale is not None)
            torch.library.opcheck(torch.ops.fp8stack.round_groups, arguments)
