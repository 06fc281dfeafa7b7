"""Groups of rows are packed and unpacked as each would be by itself."""

from __future__ import annotations

import pytest
import torch

from fp8stack.common.formats import Quantizer
from fp8stack.numerics.packed_groups import GroupPacking, PackedGroups
from fp8stack.numerics.quantized import quantize, unpack
from fp8stack.numerics.random import RandomBits
from fp8stack.numerics.rounding import rounding
from tests.numerics.test_groups import ENDS, QUANTIZERS
from tests.support.backend_models import normal

SIX_BITS = {"six bits": Quantizer(format="e2m3", block=(1, 32), scale="e8m0")}


@pytest.mark.parametrize("stacked", [False, True], ids=["rows", "stacked"])
@pytest.mark.parametrize("quantizer", (QUANTIZERS | SIX_BITS).values(), ids=QUANTIZERS | SIX_BITS)
def test_each_group_is_packed_by_itself(quantizer, stacked) -> None:
    x = normal(4, 20, 40) if stacked else normal(39, 40)
    x.view(-1)[700] = torch.nan
    ends = None if stacked else ENDS
    streams, counter = torch.tensor([7, 8, 9, 10]), torch.tensor(3)
    bits = RandomBits(1, streams, counter) if quantizer.stochastic else None
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0]) if quantizer.delayed else None
    packing = GroupPacking(rounding(quantizer, [0]))
    packed = packing.pack(x, ends, bits, scale)
    values, factors = packing.unpack(packed, ends, x.shape)
    groups = x.unbind() if stacked else x.tensor_split(ENDS[:-1].tolist())
    start = 0
    for number, group in enumerate(groups):
        drawn = RandomBits(1, int(streams[number]), counter) if bits is not None else None
        scale_of_group = None if scale is None else scale[number]
        alone = quantize(group, quantizer, 0, drawn, scale=scale_of_group)
        expected, factor = unpack(alone)
        stop = start + len(expected)
        of_group = values[number] if stacked else values[start:stop]
        torch.testing.assert_close(of_group, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(packed.amax[number], alone.amax)
        assert packed.has_nan[number] == alone.has_nan
        if factor is not None and factors is not None:
            torch.testing.assert_close(factors[number], factor, rtol=0, atol=0, equal_nan=True)
        assert (factor is None) == (factors is None)
        start = stop
    assert stacked or not values[start:].any()


def test_four_bits_take_half_a_byte() -> None:
    packing = GroupPacking(rounding(QUANTIZERS["nvfp4"], [0]))
    packed = packing.pack(normal(64, 32), torch.tensor([16, 64], dtype=torch.int32))
    assert isinstance(packed, PackedGroups)
    assert packed.data.numel() == (64 + 2) // 2 * 32
