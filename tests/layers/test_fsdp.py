"""Weights sharded over ranks and gathered as FP8 bytes equal the cast of the full weight."""

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
def weight() -> torch.Tensor:
    return torch.randn(64, 32)


@pytest.fixture
def sharded(weight: torch.Tensor) -> ShardedWeight:
    return ShardedWeight(weight.clone(), Layer(3.5))


def gathered(shards: list[ShardedWeight]) -> FullWeight:
    """The full weight that FSDP2 gathers from the shards of all ranks."""
    sent = [shard.fsdp_pre_all_gather(None) for shard in shards]
    assert all(data.dtype == torch.uint8 for (data,), _ in sent)
    data = torch.cat([data for (data,), _ in sent])
    outputs = shards[0].fsdp_post_all_gather((data,), sent[0][1], torch.float32)
    assert outputs is not None
    assert outputs[1][0] is data
    assert isinstance(outputs[0], FullWeight)
    return outputs[0]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_bytes_of_all_ranks_are_those_of_the_whole_cast(
    weight: torch.Tensor, sharded: ShardedWeight, ranks: int
) -> None:
    shards = torch.chunk(sharded, ranks)
    full = gathered([shard for shard in shards if isinstance(shard, ShardedWeight)])
    expected = numerics.cast_to_fp8(weight, torch.tensor(3.5), "e4m3")
    assert torch.equal(full.data8.view(torch.uint8), expected.view(torch.uint8))
    assert (full.shape, full.dtype, full.scale.item()) == (weight.shape, torch.float32, 3.5)


def test_a_quarter_of_the_bytes_travels(sharded: ShardedWeight) -> None:
    ((data,), _) = sharded.fsdp_pre_all_gather(None)
    assert data.numel() * data.element_size() * 4 == sharded.numel() * 4


def test_a_layer_out_of_fp8_gathers_the_rows_themselves(
    weight: torch.Tensor, sharded: ShardedWeight
) -> None:
    sharded._layer.in_fp8 = False
    (data,), metadata = sharded.fsdp_pre_all_gather(None)
    assert torch.equal(data, weight)
    outputs = sharded.fsdp_post_all_gather((data,), metadata, torch.float32)
    assert outputs is not None
    assert type(outputs[0]) is torch.Tensor


def test_an_optimizer_changes_the_rows_in_place(
    weight: torch.Tensor, sharded: ShardedWeight
) -> None:
    parameter, twin = nn.Parameter(sharded), nn.Parameter(weight.clone())
    assert isinstance(parameter, ShardedWeight)
    for trained in (parameter, twin):
        trained.grad = torch.ones_like(weight)
        torch.optim.AdamW([trained], lr=0.1, fused=True).step()
    assert torch.equal(parameter.plain(), twin.detach())
    assert not torch.equal(parameter.plain(), weight)


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
    (data,), metadata = sharded.fsdp_pre_all_gather(None)
    full.data8.view(torch.uint8).copy_(data)  # FSDP2 gathers into the same memory
    same = full.data8.view(torch.uint8)
    assert sharded.fsdp_post_all_gather((same,), metadata, torch.float32, out=full) is None
    assert full.scale.item() == 2.0
