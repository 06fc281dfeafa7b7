"""Shards of a weight, cast on each rank and gathered, equal the copies of the full weight to the
bit, in every layout of scales."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8stack.layers import build_backend
from fp8stack.layers.fsdp import ShardedWeight, tensors_of
from fp8stack.layers.gathered_weights import is_gathered_in_fp8, share_amaxes
from fp8stack.layers.linear import Call
from fp8stack.layers.torch import TorchBackend
from fp8stack.precision import Hardware, load_recipe, resolve
from tests.layers.test_fsdp import Mesh

CALL = Call(record=False, rows=0, has_bias=False)
SOFTWARE: Any = {"cuda_version": (13, 0), "torch_version": "2.15.0"}
IN, OUT = 256, 512


def layer_of(recipe: str, rows: int = OUT) -> tuple[TorchBackend, Any]:
    """A backend and its layer, planned for a GPU and built on the CPU."""
    gpu = Hardware("cuda", (9, 0) if recipe == "block" else (10, 0), **SOFTWARE)
    plan = resolve(load_recipe(recipe), gpu, "torch").for_layers({"layer": (IN, rows)})
    backend = build_backend(plan)
    assert isinstance(backend, TorchBackend)
    torch.manual_seed(0)
    layer: Any = backend.linear("layer", IN, rows, bias=False)
    backend.attach(nn.ModuleDict({"layer": layer}))
    return backend, layer


def gathered(layer: Any, weight: Tensor, ranks: int) -> list[Tensor]:
    """The tensors of the weight that `ranks` ranks gather."""
    operand, shards = layer.quantizers["weight"], [*torch.chunk(weight, ranks)]
    shards += [weight[:0]] * (ranks - len(shards))
    operands = [operand]
    largest: list[Tensor] = []
    for shard in shards:  # the all-reduce of each rank
        with patch.object(dist, "all_reduce", lambda x, op: largest.append(x)):
            share_amaxes(operands, [shard])
    if largest:
        reduced = torch.stack(largest).amax(0)
        with patch.object(dist, "all_reduce", lambda x, op: x.copy_(reduced)):
            share_amaxes(operands, [shards[0]])
    sent = [ShardedWeight(shard, layer).fsdp_pre_all_gather(Mesh(ranks)) for shard in shards]
    together = tuple(
        torch.cat(tensors) for tensors in zip(*(tensors for tensors, _ in sent), strict=True)
    )
    full = ShardedWeight(shards[0], layer).fsdp_post_all_gather(together, sent[0][1], torch.float32)
    assert full is not None
    return tensors_of(full[0])


def bytes_of(copy: Any) -> list[Tensor]:
    tensors = [tensor for tensor in copy if isinstance(tensor, Tensor)]
    return [t.contiguous().view(torch.uint8) if t.ndim else t.view(1) for t in tensors]


@pytest.mark.capability("E3")
@pytest.mark.parametrize(
    ("recipe", "rows", "ranks"),
    [
        *(
            (recipe, OUT, ranks)
            for recipe in ("delayed", "current", "rowwise", "block", "mxfp8")
            for ranks in (1, 2, 4)
        ),
        *(("delayed", 80, 3), ("delayed", 16, 7)),  # fewer on the last rank, or none
    ],
)
def test_shards_give_the_bytes_and_scales_of_the_full_weight(recipe, rows, ranks):
    backend, layer = layer_of(recipe, rows)
    weight = layer.weight.detach() * torch.logspace(-3, 3, IN)
    weight[2, 5], weight[rows - 1, 9] = torch.nan, 3e4
    operand = layer.quantizers["weight"]
    assert is_gathered_in_fp8(operand, rows, ranks)
    tensors = gathered(layer, weight, ranks)
    expected = operand.cast(weight, True, CALL)
    alone = backend.gathered_copies(tensors, operand, False)
    assert alone[1] is None
    for copy, full in zip(backend.gathered_copies(tensors, operand, True), expected, strict=True):
        assert copy is not None
        assert full is not None
        assert copy[2] == full[2]
        for mine, reference in zip(bytes_of(copy), bytes_of(full), strict=True):
            assert torch.equal(mine, reference)
    assert all(map(torch.equal, bytes_of(alone[0]), bytes_of(expected[0])))


@pytest.mark.parametrize(
    ("recipe", "per_element"),
    [("delayed", 1), ("current", 1), ("block", 1), ("rowwise", 2), ("mxfp8", 2)],
)
def test_a_weight_is_gathered_in_one_byte_per_element_or_two(recipe, per_element):
    _, layer = layer_of(recipe)
    weight = layer.weight.detach()
    gathered(layer, weight, 2)  # shares amaxes
    sent, _ = ShardedWeight(weight, layer).fsdp_pre_all_gather(Mesh(1))
    total = sum(tensor.nbytes for tensor in sent)
    assert per_element * IN * OUT <= total <= 1.04 * per_element * IN * OUT


@pytest.mark.parametrize(
    ("recipe", "rows", "ranks", "in_fp8"),
    [
        ("block", 512, 4, True), ("block", 512, 3, False), ("block", 384, 3, True),
        ("mxfp8", 512, 16, True), ("mxfp8", 512, 32, False), ("mxfp8", 480, 7, False),
        ("delayed", 480, 7, True), ("rowwise", 480, 7, True), ("nvfp4", 512, 2, False),
    ],
)  # fmt: skip
def test_a_block_must_not_span_two_ranks(recipe, rows, ranks, in_fp8):
    operand = layer_of(recipe, rows)[1].quantizers["weight"]
    assert is_gathered_in_fp8(operand, rows, ranks) is in_fp8


def test_a_weight_of_two_quantizers_is_gathered_in_float32():
    operand = layer_of("rowwise_wgrad_hp")[1].quantizers["weight"]
    gathers = is_gathered_in_fp8(operand, OUT, 2)
    assert gathers is (operand.joint_cast is not None)
    stochastic = layer_of("current")[1].quantizers["weight"]
    stochastic.stochastic = True
    assert not is_gathered_in_fp8(stochastic, OUT, 2)
    assert stochastic.joint_cast is not None
