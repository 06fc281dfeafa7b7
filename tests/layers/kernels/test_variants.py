"""The cast of a matrix with transpose and amax: the operator on a CPU, and its kernel and the
transpose's in Triton's interpreter.

See `tests/support/triton_code.py` for how.
"""

from __future__ import annotations

import itertools
import math
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8stack.analysis.conform.check_inputs import fp32_values
from fp8stack.layers.kernels import variants as kernels
from fp8stack.layers.kernels.fused_casts import cast_transpose
from fp8stack.precision import toolchain
from tests.support.cases import case
from tests.support.oracles import FLT_MAX, codes, every_value, fp8_codes, to_numpy
from tests.support.triton_code import launched_on_a_cpu, ptx_of

pytestmark = pytest.mark.usefixtures("one_thread")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

FORMATS = ("e4m3", "e5m2")
SCALES = (1.0, 3.7, 2.0**-20, 1e10, 1.3e-36, FLT_MAX, math.inf)
# Single rows and columns, parts of tiles, whole tiles, more than one.
SHAPES = ((1, 1), (1, 200), (300, 1), (7, 5), (128, 64), (129, 65), (272, 144), (0, 5), (5, 0))
Run = Callable[[Tensor, Tensor, str], tuple[Tensor, Tensor | None, Tensor | None]]


def inputs(few: bool) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    """Name, matrix and the indices of the scales to try with it: all, or a `few`, where every scale
    has at least one matrix. Matrices hold all values of the 16-bit formats; float32's ties, ends
    and specials; NaN alone; and values in various shapes."""
    every = tuple(range(len(SCALES)))
    yield "bf16", every_value(torch.bfloat16).view(256, 256), (1, 2, 6) if few else every
    yield "fp16", every_value(torch.float16).view(256, 256), (1, 3) if few else every
    yield "fp32", fp32_values(), (0, 1, 4, 5) if few else every
    yield "NaN", torch.full((130, 70), math.nan), (1,)
    generator = torch.Generator().manual_seed(0)
    for shape in SHAPES:
        x = torch.randn(shape, generator=generator)
        x[-1:, -1:] = -1000  # the amax, in the last tile's corner
        x[:1, 1:2] = math.nan
        for dtype in (torch.float32, torch.bfloat16):
            yield f"{shape} of {dtype}", x.to(dtype), (1,)


def differences(run: Run, device: str = "cpu", interpreted: bool = False) -> list[str]:
    """The cases in which the bytes, transpose or amax of `run` differ from numpy."""
    wrong = []
    scales = torch.tensor(SCALES, device=device)  # each a view, as in a history
    for name, x, tried in inputs(few=interpreted):
        # Triton 3.9's interpreter reads subnormal bfloat16 wrongly; float32 has subnormals too.
        if interpreted and x.dtype == torch.bfloat16:
            x = x.where(x.abs() >= torch.finfo(x.dtype).smallest_normal, 0.0)
        size = np.abs(to_numpy(x))
        amax = np.float32(np.max(size, where=~np.isnan(size), initial=0))
        for format, index in itertools.product(FORMATS, tried):
            cast = run(x.to(device), scales[index], format)
            data, transposed, largest = (output.cpu() for output in cast)
            expected = fp8_codes(to_numpy(x), SCALES[index], format)
            same = {
                "data": np.array_equal(codes(data), expected),
                "transpose": np.array_equal(codes(transposed), expected.T),
                "contiguous": data.is_contiguous() and transposed.is_contiguous(),
                "amax": largest.dtype == torch.float32 and largest.numpy() == amax,
            }
            wrong += [f"{name}, {format}, {SCALES[index]}: {key}" for key in same if not same[key]]
    return wrong


def test_data_transpose_and_amax_are_numpys_to_the_bit():
    assert differences(cast_transpose) == []


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


@pytest.mark.parametrize(("columnwise", "record"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("shape", [(33, 20), (1, 16), (16, 1), (0, 4)])
def test_the_operator_is_as_torch_wants_it(shape, columnwise, record):
    x = torch.randn(shape).to(torch.bfloat16)
    arguments = ("cast", x, None, torch.tensor(3.7), "e4m3", columnwise, record, False)
    torch.library.opcheck(torch.ops.fp8stack.cast_product.default, arguments)


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


def transposes_wrongly() -> list[str]:
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
@pytest.mark.parametrize("capability", [case(n, quick=n == 90) for n in (89, 90, 100, 120)])
def test_the_transposes_code_reads_and_writes_16_bytes(capability, tmp_path, monkeypatch):
    from fp8stack.layers.kernels import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    numbers = dict.fromkeys(("rows", "columns", "row_stride"), "i32")
    types = {"data": "*u8", "transposed": "*u8", **numbers}
    constants = {"column_stride": 1, "SIZE": 128}  # Triton takes a number 1 for a constant
    text = ptx_of(triton_kernels.transpose_bytes, types, constants, capability, num_warps=8)
    for kind in ("ld", "st"):
        instructions = Counter(re.findall(rf"{kind}\.global\S*", text))
        assert instructions == {f"{kind}.global.v4.b32": 4}


@launched_on_a_cpu()
def interpreted_differences() -> list[str]:
    """`differences` of the kernels themselves, where Triton interprets them."""
    return differences(cast_transpose, interpreted=True) + transposes_wrongly()
