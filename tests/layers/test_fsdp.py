"""Weights that ranks share out and gather as FP8 bytes: the bytes are those of the whole, cast."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fp8stack import numerics
from fp8stack.layers.fsdp import FullWeight, ShardedWeight


class Layer:
    """Casts its weight with a given scale."""

    in_fp8 = True
    target = numerics.FORMATS["e4m3"]

    def __init__(self, scale: float) -> None:
        self.scale = torch.tensor(scale)
        self.quantizers = {"weight": self}

    def cast_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return numerics.cast_to_fp8(rows, self.scale, "e4m3"), self.scale


@pytest.fixture
def whole() -> torch.Tensor:
    return torch.randn(64, 32)


@pytest.fixture
def sharded(whole: torch.Tensor) -> ShardedWeight:
    return ShardedWeight(whole.clone(), Layer(3.5))


def gathered(parts: list[ShardedWeight]) -> FullWeight:
    """What FSDP2 makes of the parts of all ranks."""
    sent = [part.fsdp_pre_all_gather(None) for part in parts]
    assert all(data.dtype == torch.uint8 for (data,), _ in sent)
    data = torch.cat([data for (data,), _ in sent])
    made = parts[0].fsdp_post_all_gather((data,), sent[0][1], torch.float32)
    assert made is not None
    assert made[1][0] is data
    assert isinstance(made[0], FullWeight)
    return made[0]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_bytes_of_all_ranks_are_those_of_the_whole_cast(
    whole: torch.Tensor, sharded: ShardedWeight, ranks: int
) -> None:
    parts = torch.chunk(sharded, ranks)
    full = gathered([part for part in parts if isinstance(part, ShardedWeight)])
    expected = numerics.cast_to_fp8(whole, torch.tensor(3.5), "e4m3")
    assert torch.equal(full.data8.view(torch.uint8), expected.view(torch.uint8))
    assert (full.shape, full.dtype, full.scale.item()) == (whole.shape, torch.float32, 3.5)


def test_a_quarter_of_the_bytes_travels(sharded: ShardedWeight) -> None:
    ((data,), _) = sharded.fsdp_pre_all_gather(None)
    assert data.numel() * data.element_size() * 4 == sharded.numel() * 4


def test_a_layer_out_of_fp8_gathers_the_rows_themselves(
    whole: torch.Tensor, sharded: ShardedWeight
) -> None:
    sharded._layer.in_fp8 = False
    (data,), kept = sharded.fsdp_pre_all_gather(None)
    assert torch.equal(data, whole)
    made = sharded.fsdp_post_all_gather((data,), kept, torch.float32)
    assert made is not None
    assert type(made[0]) is torch.Tensor


def test_an_optimizer_changes_the_rows_in_place(
    whole: torch.Tensor, sharded: ShardedWeight
) -> None:
    parameter, twin = nn.Parameter(sharded), nn.Parameter(whole.clone())
    assert isinstance(parameter, ShardedWeight)
    for one in (parameter, twin):
        one.grad = torch.ones_like(whole)
        torch.optim.AdamW([one], lr=0.1, fused=True).step()
    assert torch.equal(parameter.plain(), twin.detach())
    assert not torch.equal(parameter.plain(), whole)


def test_parts_of_the_rows_are_views_of_them(sharded: ShardedWeight) -> None:
    with torch.no_grad():
        sharded[:8].copy_(torch.zeros(8, 32))
    assert sharded.plain()[:8].eq(0).all()
    assert isinstance(sharded[8:], ShardedWeight)


def test_a_whole_weight_stands_for_what_its_bytes_do(sharded: ShardedWeight) -> None:
    full = gathered([sharded])
    back = full.data8.float() / 3.5
    assert torch.equal(full + 0.0, back)
    assert torch.equal(copy.copy(full).plain(), back)


def test_a_second_gathering_brings_its_own_scale(sharded: ShardedWeight) -> None:
    full = gathered([sharded])
    sharded._layer.quantizers["weight"].scale = torch.tensor(2.0)
    (data,), kept = sharded.fsdp_pre_all_gather(None)
    full.data8.view(torch.uint8).copy_(data)  # FSDP2 gathers into the same memory
    same = full.data8.view(torch.uint8)
    assert sharded.fsdp_post_all_gather((same,), kept, torch.float32, out=full) is None
    assert full.scale.item() == 2.0
