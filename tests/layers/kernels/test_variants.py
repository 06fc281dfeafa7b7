"""The cast of a matrix with transpose and amax, whose bytes are rows of `fp8stack conform`, and the
transpose's kernel."""

from __future__ import annotations

import math
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8stack.layers.kernels import variants as kernels
from fp8stack.layers.kernels.fused_casts import cast_transpose
from fp8stack.precision import toolchain
from tests.support.cases import case
from tests.support.oracles import codes, fp8_codes, to_numpy
from tests.support.triton_code import ptx_of

pytestmark = pytest.mark.usefixtures("one_thread")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def test_an_empty_matrix_has_empty_copies_and_an_amax_of_0():
    for shape in ((0, 5), (5, 0)):
        data, transposed, amax = cast_transpose(torch.ones(shape), torch.tensor(3.7))
        assert (data.shape, transposed.shape, amax) == (shape, shape[::-1], 0)


def test_a_tensor_that_is_not_contiguous_casts_like_its_copy():
    x = torch.randn(96, 40)
    data, transposed, amax = cast_transpose(x.t(), torch.tensor(3.7), "e5m2")
    np.testing.assert_array_equal(codes(data), fp8_codes(to_numpy(x.t().clone()), 3.7, "e5m2"))
    assert transposed is not None
    np.testing.assert_array_equal(codes(transposed), codes(data).T)
    assert data.is_contiguous()
    assert transposed.is_contiguous()
    assert amax is not None
    assert torch.equal(amax, x.abs().max())


def test_what_is_not_wanted_is_not_given_and_a_transpose_has_its_own_memory():
    x, scale = torch.randn(3, 5), torch.tensor(2.0)
    all_outputs = [output for output in cast_transpose(x, scale) if output is not None]
    data, transposed, amax = cast_transpose(x, scale, columnwise=False)
    assert transposed is None
    assert amax is not None
    assert torch.equal(amax, all_outputs[2])
    data, transposed, amax = cast_transpose(x, scale, record=False)
    assert amax is None
    assert transposed is not None
    np.testing.assert_array_equal(codes(data), codes(all_outputs[0]))
    np.testing.assert_array_equal(codes(transposed), codes(all_outputs[1]))
    for shape in ((1, 16), (16, 1)):
        data, transposed, _ = cast_transpose(torch.ones(shape), scale)
        assert data.data_ptr() != transposed.data_ptr()
    with pytest.raises(ValueError, match="No FP8 format 'e8m0'"):
        cast_transpose(x, scale, "e8m0")


@pytest.mark.parametrize("backend", [case("aot_eager", quick=True), case("inductor", quick=False)])
def test_compiled_code_has_it_in_one_graph_for_any_number_of_rows(backend):
    def norm_and_cast(x: Tensor, scales: Tensor, recorded: Tensor):
        data, transposed, amax = cast_transpose(x / 2, scales[1], "e5m2")
        assert amax is not None
        recorded.copy_(torch.fmax(recorded, amax))
        return data, transposed

    scales = torch.tensor([1.0, 3.7])
    compiled = torch.compile(norm_and_cast, fullgraph=True, dynamic=True, backend=backend)
    for rows in (20, 33):
        x = torch.randn(rows, 48).to(torch.bfloat16)
        expected = fp8_codes(to_numpy(x / 2), 3.7, "e5m2")
        recorded = torch.tensor(0.5)
        data, transposed = compiled(x, scales, recorded)
        np.testing.assert_array_equal(codes(data), expected)
        np.testing.assert_array_equal(codes(transposed), expected.T)
        assert recorded == (x / 2).abs().max()
    torch._dynamo.reset()


# The kernel


@pytest.fixture
def _fresh_choice() -> Iterator[None]:
    kernels._has_kernel.cache_clear()
    yield
    kernels._has_kernel.cache_clear()


@pytest.mark.usefixtures("_fresh_choice")
@pytest.mark.parametrize(
    ("capability", "cuda", "triton", "expected"),
    [
        ((8, 0), "13.0", True, False),  # has no E4M3
        ((8, 9), "13.0", True, True),
        ((9, 0), "13.0", True, True),
        ((9, 0), "13.0", False, False),
        ((9, 4), None, True, False),  # torch for AMD
    ],
)
def test_the_kernel_runs_on_nvidia_gpus_with_fp8(monkeypatch, capability, cuda, triton, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(kernels, "TRITON_RUNS", triton)
    assert kernels.has_kernel(torch.device("cuda", 0)) is expected
    assert not kernels.has_kernel(torch.device("cpu"))


@pytest.mark.usefixtures("_fresh_choice")
def test_compiled_code_asks_for_the_kernel_in_one_graph_and_without_a_warning(monkeypatch):
    """torch 2.11 would compile what a cached function does, and compiles no `find_spec`."""
    monkeypatch.setattr(toolchain, "find_spec", torch.compiler.disable(find_spec))
    capability = torch.compiler.disable(lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def chosen(x: Tensor) -> Tensor:
        return x + 1 if kernels.has_kernel(torch.device("cuda", 0)) else x

    compiled = torch.compile(chosen, fullgraph=True, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled(torch.zeros(2)).tolist() == [float(kernels.TRITON_RUNS)] * 2
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("triton", "cc", "compilers", "runs"),
    [(True, "", {"gcc"}, True), (True, "", {"clang"}, True), (True, "cc", set(), True),
     (True, "", set(), False), (False, "", {"gcc"}, False)],
)  # fmt: skip
def test_triton_runs_with_a_c_compiler(monkeypatch, triton, cc, compilers, runs):
    monkeypatch.setenv("CC", cc)
    monkeypatch.setattr(shutil, "which", lambda name: name if name in compilers else None)
    monkeypatch.setattr(toolchain, "find_spec", lambda name: name if triton else None)
    assert (toolchain.find_triton_problem() == "") is runs


def interpreted_differences() -> list[str]:
    """The matrices whose transpose is not numpy's, by the kernel where Triton interprets it."""
    wrong = []
    for shape in ((1, 1), (7, 200), (129, 128), (272, 144)):
        data = torch.arange(math.prod(shape)).to(torch.uint8).view(shape)
        for matrix in (data, data.t(), data[:, : shape[1] // 2 + 1]):  # the last has padded rows
            if not np.array_equal(kernels.run_transpose(matrix).numpy(), matrix.numpy().T):
                wrong.append(f"{list(matrix.shape)} of strides {matrix.stride()}")
    return wrong


def test_the_transpose_is_an_operator():
    data = torch.arange(33 * 20).to(torch.uint8).view(33, 20)
    torch.library.opcheck(torch.ops.fp8stack.transpose_bytes.default, (data,))
    assert torch.equal(kernels.transpose_bytes(data), data.t())


@needs_triton
@pytest.mark.parametrize("capability", [case(90, quick=True), case(120, quick=False)])
def test_the_transposes_code_reads_and_writes_16_bytes(capability, tmp_path, monkeypatch):
    from fp8stack.layers.kernels import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    numbers = dict.fromkeys(("rows", "columns", "row_stride"), "i32")
    types = {"data": "*u8", "transposed": "*u8", **numbers}
    # Triton takes a number 1 for a constant.
    constants = {"column_stride": 1, "SIZE": 128, "IN_GROUP": 4}
    text = ptx_of(triton_kernels.transpose_bytes, types, constants, capability, num_warps=8)
    for kind in ("ld", "st"):
        instructions = Counter(re.findall(rf"{kind}\.global\S*", text))
        assert instructions == {f"{kind}.global.v4.b32": 4}
        assert set(re.findall(rf"{kind}\.shared\S*", text)) == {f"{kind}.shared.b32"}
