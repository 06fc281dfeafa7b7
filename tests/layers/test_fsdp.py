"""Weights sharded over ranks and gathered as FP8 bytes equal the cast of the full weight."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fp8stack import numerics
from fp8stack.common.formats import Quantizer
from fp8stack.layers.fsdp import FullWeight, ShardedWeight, WeightTensors, tensors_of

FP8 = torch.float8_e4m3fn
QUANTIZER = Quantizer(format="e4m3")


class Layer:
    """Casts a weight of `out_features` rows with a given scale; out of FP8, to bfloat16."""

    in_fp8 = True

    def __init__(self, scale: float, out_features: int = 64) -> None:
        self.scale = torch.tensor(scale)
        self.out_features = out_features

    def cast_shard(self, rows: torch.Tensor) -> WeightTensors:
        if not self.in_fp8:
            return WeightTensors([rows.bfloat16()], [])
        return WeightTensors(
            [numerics.cast_to_fp8(rows, self.scale, "e4m3")], [self.scale], QUANTIZER
        )


class Mesh:
    """A mesh of so many ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        return self.ranks


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(64, 32)


@pytest.fixture
def sharded(weight: torch.Tensor) -> ShardedWeight:
    return ShardedWeight(weight.clone(), Layer(3.5))


def gathered(shards: list[ShardedWeight]) -> FullWeight:
    """The full weight that FSDP2 gathers from the shards of all ranks."""
    sent = [shard.fsdp_pre_all_gather(Mesh(len(shards))) for shard in shards]
    assert len({data.shape for (data,), _ in sent}) == 1
    data = torch.cat([data for (data,), _ in sent])
    outputs = shards[0].fsdp_post_all_gather((data,), sent[0][1], torch.float32)
    assert outputs is not None
    assert outputs[1][0] is data
    assert isinstance(outputs[0], FullWeight)
    return outputs[0]


def shards_of(weight: torch.Tensor, ranks: int) -> list[ShardedWeight]:
    """Shards as FSDP2 makes them; the last ranks may have no rows."""
    chunks = [*torch.chunk(weight, ranks)]
    chunks += [weight[:0]] * (ranks - len(chunks))
    return [ShardedWeight(chunk, Layer(3.5, len(weight))) for chunk in chunks]


def test_a_layer_out_of_fp8_gathers_the_rows_in_the_compute_dtype(weight, sharded):
    layer: Any = sharded._layer
    layer.in_fp8 = False
    full = gathered([sharded])
    assert torch.equal(tensors_of(full)[0], weight.bfloat16())
    cast = full.to(torch.bfloat16)
    assert type(cast) is torch.Tensor
    assert torch.equal(cast, weight.bfloat16())
    assert cast.data_ptr() == tensors_of(full)[0].data_ptr()  # memory that FSDP2 frees
    assert torch.equal(full + 0.0, weight.bfloat16().float())


def test_weights_share_cached_code_if_only_their_values_differ(weight, sharded):
    full, doubled = gathered([sharded]), gathered(shards_of(2 * weight, 2))
    assert full._stable_hash_for_caching() == doubled._stable_hash_for_caching()
    layer: Any = sharded._layer
    layer.in_fp8 = False
    in_bf16, short = gathered([sharded]), gathered(shards_of(weight[:50], 1))
    needs_grad = gathered(shards_of(weight, 1))
    needs_grad.requires_grad_()
    different = (full, in_bf16, short, needs_grad)
    assert len({full_weight._stable_hash_for_caching() for full_weight in different}) == 4


def test_rows_that_no_cast_changes_are_gathered_as_they_are(weight: torch.Tensor) -> None:
    layer = Layer(1.0)
    layer.cast_shard = lambda rows: WeightTensors([rows], [])  # type: ignore[method-assign]
    sharded = ShardedWeight(weight, layer)
    (data,), tensors = sharded.fsdp_pre_all_gather(Mesh(1))
    assert torch.equal(data, weight)
    outputs = sharded.fsdp_post_all_gather((data,), tensors, torch.float32)
    assert outputs is not None
    assert type(outputs[0]) is torch.Tensor


def test_an_optimizer_changes_the_rows_in_place(weight, sharded):
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
    back = tensors_of(full)[0].float() / 3.5
    assert torch.equal(full + 0.0, back)
    assert torch.equal(copy.copy(full).plain(), back)


def test_a_second_gathering_brings_its_own_scale(sharded: ShardedWeight) -> None:
    full = gathered([sharded])
    layer: Any = sharded._layer
    layer.scale = torch.tensor(2.0)
    (data,), tensors = sharded.fsdp_pre_all_gather(Mesh(1))
    memory = full.tensors.gathered[0].view(torch.uint8)
    memory.copy_(data)  # FSDP2 gathers into the same memory
    assert sharded.fsdp_post_all_gather((memory,), tensors, torch.float32, out=full) is None
    assert tensors_of(full)[1].item() == 2.0
    names, _ = full.__tensor_flatten__()
    assert getattr(full, names[1]).item() == 2.0


def test_compiled_code_takes_the_tensors_of_a_weight(weight: torch.Tensor) -> None:
    parameters = [nn.Parameter(gathered(shards_of(weight, 2))) for _ in range(2)]
    compiled: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    def values(weight: torch.Tensor) -> torch.Tensor:
        data, scale = tensors_of(weight)
        return data.float() / scale

    function: Any = torch.compile(values, backend=count, fullgraph=True)
    with torch.no_grad():
        for parameter in parameters:  # the second one uses the first one's code
            assert torch.equal(function(parameter), (weight * 3.5).to(FP8).float() / 3.5)
    assert len(compiled) == 1
