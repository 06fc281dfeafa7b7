"""Fused casts on this GPU: the bytes that numpy gives, and no waiting."""

from __future__ import annotations

import pytest
import torch

from fp8stack import numerics
from fp8stack.common.formats import Quantizer
from fp8stack.layers.kernels.activations import ACTIVATIONS
from fp8stack.layers.kernels.fused_casts import cast_transpose
from fp8stack.layers.kernels.variants import has_kernel
from fp8stack.layers.kernels.weight_casts import BatchedCast
from tests.gpu.machine import CONTEXT, no_waiting
from tests.layers.kernels import test_fused_casts
from tests.layers.kernels import test_weight_casts as test_weights

pytestmark = pytest.mark.gpu

DEVICE = CONTEXT.device


def test_the_kernel_runs_where_the_gpu_has_fp8() -> None:
    device = torch.device(DEVICE)
    assert has_kernel(device) == (torch.cuda.get_device_capability(device) >= (8, 9))


def test_casts_of_activations_and_of_their_gradients_are_numpys() -> None:
    assert test_fused_casts.differences(tuple(ACTIVATIONS), DEVICE) == []


def test_weights_share_scales_and_are_rounded_from_float64() -> None:
    assert test_weights.interpreted_differences(DEVICE) == []


def test_a_cuda_graph_casts_many_weights_again() -> None:
    x, scales = torch.randn(256, 384, device=DEVICE), torch.ones(3, device=DEVICE)
    weights, amaxes = (
        BatchedCast([x], Quantizer(amax="delayed"), [1]),
        torch.zeros(3, device=DEVICE),
    )
    weights.cast(scales, amaxes)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights.cast(scales, amaxes)
    x.normal_()
    scales[1] = 3.7
    amaxes.zero_()
    graph.replay()
    rowwise, columnwise = (copy.data.view(torch.uint8) for copy in weights.copies[0])
    assert torch.equal(rowwise, numerics.cast_to_fp8(x, scales[1]).view(torch.uint8))
    assert torch.equal(columnwise, rowwise.t())
    assert amaxes.tolist() == [0, x.abs().max().item(), 0]


def test_compiled_code_gives_the_same_bits_in_one_graph() -> None:
    compiled = torch.compile(cast_transpose, fullgraph=True, dynamic=True)
    scales = torch.tensor([1.0, 3.7], device=DEVICE)
    for format in ("e4m3", "e5m2"):
        for rows in (400, 33):
            x = torch.randn(rows, 208, device=DEVICE, dtype=torch.bfloat16)
            x[2, 3], x[4, 5] = torch.nan, 100.0
            results, expected = (cast(x, scales[1], format) for cast in (compiled, cast_transpose))
            for pair in zip(results, expected, strict=True):
                bits = [tensor.reshape(-1).view(torch.uint8) for tensor in pair]
                assert torch.equal(*bits)


def test_the_operator_is_as_torch_wants_it() -> None:
    x = torch.randn(300, 200, device=DEVICE, dtype=torch.bfloat16)
    scale = torch.tensor(3.7, device=DEVICE)
    for columnwise, record in ((True, True), (False, True), (True, False)):
        operator = torch.ops.fp8stack.cast_product.default
        arguments = ("cast", x, None, scale, "e4m3", columnwise, record, False)
        torch.library.opcheck(operator, arguments)


def test_nothing_waits_for_the_device() -> None:
    x, scale = torch.ones(64, 64, device=DEVICE), torch.ones((), device=DEVICE)
    cast_transpose(x, scale)  # compiles
    torch.cuda.synchronize()
    with no_waiting():
        cast_transpose(x, scale)


def test_a_captured_graph_casts_what_it_finds() -> None:
    x = torch.randn(256, 320, device=DEVICE, dtype=torch.bfloat16)
    scale = torch.tensor(3.7, device=DEVICE)
    cast_transpose(x, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        data, transposed, amax = cast_transpose(x, scale)
    x.mul_(3)
    scale.mul_(2)
    graph.replay()
    expected = numerics.cast_to_fp8(x.cpu(), scale.cpu()).view(torch.uint8)
    assert torch.equal(data.view(torch.uint8).cpu(), expected)
    assert torch.equal(transposed.view(torch.uint8).cpu(), expected.t())
    assert torch.equal(amax.cpu(), numerics.amax(x.cpu()))


def test_more_than_2_to_the_31_elements_are_cast() -> None:
    rows, columns = 2**16 + 16, 2**15 + 16
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free memory on the GPU")
    x = torch.zeros(rows, columns, device=DEVICE, dtype=torch.bfloat16)
    x[-16:] = torch.randn(16, columns, device=DEVICE)
    scale = torch.tensor(100.0, device=DEVICE)
    data, transposed, amax = cast_transpose(x, scale)
    assert transposed is not None
    expected = numerics.cast_to_fp8(x[-16:].cpu(), scale.cpu()).view(torch.uint8)
    assert torch.equal(data[-16:].view(torch.uint8).cpu(), expected)
    assert torch.equal(transposed[:, -16:].view(torch.uint8).cpu(), expected.t())
    assert not data[:-16].view(torch.uint8).any()
    assert torch.equal(amax.cpu(), numerics.amax(x[-16:].cpu()))
