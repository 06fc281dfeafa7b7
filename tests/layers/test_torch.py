"""The torch backend: its bytes, scales and amaxes are the emulator's, its GEMMs the oracle's.

`scaled_mm` runs on a CPU for scales per tensor and per row. For blocks it does not: there torch's
own checks for CUDA (its meta implementation) accept the operands, and a GEMM that reads their
layouts as cuBLAS documents them gives the numbers.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import SwizzleType

from fp8stack import numerics
from fp8stack.analysis.conform import gemms
from fp8stack.analysis.conform.checks import Context
from fp8stack.analysis.conform.gemms import Shape
from fp8stack.layers import fp8_state, operands
from fp8stack.layers.kernels import scaled_gemm as scaled_gemms
from fp8stack.layers.kernels.scaled_gemm import Scaled, ScaleLayout, pack_scales, scaled_gemm
from fp8stack.layers.linear import Call
from fp8stack.precision import Hardware, load_recipe
from tests.layers.test_scaled_operands import MIXED
from tests.support.backend_models import (
    CPU,
    PER_TENSOR,
    linear,
    same,
    saved_tensors,
)
from tests.support.cases import case
from tests.support.gemm_oracle import assert_all_close, normal, oracle, run
from tests.support.not_finite import hidden
from tests.support.odd_shapes import odd_shapes
from tests.support.study_recipes import NEAREST, NO_HADAMARD

FLOATS = (torch.bfloat16, torch.float32)
H100, B200, RTX = (Hardware("cuda", (major, 0)) for major in (9, 10, 12))
MACHINES = {"delayed": H100, "current": H100, "block": H100, "mxfp8": B200, "rowwise": H100}
MACHINES["nvfp4"] = RTX
ON_CPUS = [*PER_TENSOR, "rowwise"]

pytestmark = pytest.mark.usefixtures("one_thread")


OPTIONS = [
    ("delayed", {"backward_format": "e4m3"}),
    ("current", {"power_of_two": True}),
    ("current", {"quantizer": {"eps": 100.0}}),
    ("block", {"power_of_two": False}),
    ("mxfp8", {"scale_rounding": "floor"}),
    ("mxfp8", {"scale_rounding": "even"}),
]


@pytest.mark.parametrize(
    ("recipe", "options"), [*((recipe, {}) for recipe in MACHINES), *OPTIONS], ids=str
)
def test_a_linears_gemms_are_near_float64_on_the_exact_operands(
    cuda_gemm, planned_for_gpus, recipe, options
):
    chosen = load_recipe(recipe, options)
    for shape in (Shape(128, 128, 256, True), Shape(30, 128, 384, False), Shape(1, 256, 128, True)):
        facts = gemms.linear(Context(CPU), chosen, "torch", shape).compare()
        assert facts["holds"], (shape, facts)


@pytest.mark.parametrize("recipe", MACHINES)
def test_accumulation_is_fast_in_the_forward_pass_alone_and_formats_are_the_recipes(
    cuda_gemm, recipe
):
    layer, _ = linear(recipe, 128, 128, hardware=MACHINES[recipe], backend="torch")
    run(layer, normal(128, 128).bfloat16(), normal(128, 128).bfloat16())
    per_tensor = recipe in PER_TENSOR
    assert [call["fast"] for call in cuda_gemm] == [recipe in ON_CPUS, False, False]
    forward = torch.float4_e2m1fn_x2 if recipe == "nvfp4" else torch.float8_e4m3fn
    gradient = torch.float8_e5m2 if per_tensor else forward
    assert [call["formats"] for call in cuda_gemm] == [(forward,) * 2] + [(gradient, forward)] * 2
    if recipe not in ON_CPUS:
        swizzle = SwizzleType.SWIZZLE_32_4_4 if recipe != "block" else SwizzleType.NO_SWIZZLE
        swizzles = {(call["swizzle_a"], call["swizzle_b"]) for call in cuda_gemm}
        assert swizzles == {(swizzle, swizzle)}


# Against the emulator, to the bit


def compiled(layer, mode):
    return torch.compile(layer, backend=mode, fullgraph=True)


def quantized(layer: Any, x: Tensor, name: str) -> tuple[Scaled, Scaled]:
    """Both copies of an operand."""
    call = Call(record=False, rows=len(x), has_bias=False, after_norm=True)
    rows, columns = layer.quantizers[name].cast(x, True, call)
    return rows, columns


@pytest.mark.parametrize(
    ("recipe", "dtype"),
    [case("delayed", torch.bfloat16, quick=True), case("current", torch.float32, quick=False)],
)
@pytest.mark.full
def test_the_bytes_that_compiled_code_makes_are_those_of_the_casts(recipe, dtype):
    torch._dynamo.reset()
    layer, _ = linear(recipe, 32, 32, backend="torch")
    layer.eval()
    formats = {"input": "e4m3", "weight": "e4m3", "grad_output": "e5m2"}

    def quantize(x: Tensor) -> list:
        return [quantized(layer, x, name) for name in formats]

    quantize = torch.compile(quantize)
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16).view(-1, 32).to(dtype)
    for x in (values, normal(*values.shape, std=1e-4).to(dtype)):
        for format, (rowwise, columnwise) in zip(formats.values(), quantize(x), strict=True):
            scale = torch.ones(())
            if recipe == "current":
                scale = numerics.tensor_scale(numerics.amax(x), format)
            expected = numerics.cast_to_fp8(x, scale, format).view(torch.uint8)
            assert torch.equal(rowwise.data.view(torch.uint8), expected)
            assert torch.equal(columnwise.data.view(torch.uint8), expected.t())
            assert torch.equal(rowwise.inv_scale, 1 / scale)


@pytest.mark.parametrize("hardware", [B200, RTX])
@pytest.mark.parametrize("recipe", ["nvfp4", NEAREST, NO_HADAMARD])
def test_nvfp4_multiplies_what_the_emulator_does(cuda_gemm, recipe, hardware, monkeypatch):
    monkeypatch.setattr(operands, "several_ranks", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)  # has rows 40 to 79 of the batch
    by_torch, emulated = (
        linear(recipe, 96, 64, hardware=hardware, backend=backend)[0]
        for backend in ("torch", "emulate")
    )
    for step in range(3):  # each draws other bits, and 40 rows are padded
        x = normal(40, 96, seed=step).bfloat16()
        dy = normal(40, 64, seed=9 + step).bfloat16()
        results, expected = run(by_torch, x, dy), run(emulated, x, dy)
        assert_all_close(results[:2], expected[:2], tolerance=2**-7)
        assert_all_close([results[2]], [expected[2]], tolerance=2**-20)
        assert same(fp8_state(by_torch), fp8_state(emulated))
    assert len(cuda_gemm) == 9


def test_weight_gradients_are_float32_where_a_gemm_of_rows_gives_bf16_alone(monkeypatch):
    layer, _ = linear("rowwise", 64, 32, hardware=H100, backend="torch")
    x, dy = normal(16, 64, seed=1).bfloat16(), normal(16, 32, seed=2).bfloat16()
    expected = run(layer, x, dy)
    dtypes, mm = [], torch.mm

    def multiply(a, b, out_dtype):
        dtypes.append((a.dtype, b.dtype, out_dtype))
        return mm(a.to(out_dtype), b.to(out_dtype))

    monkeypatch.setattr(torch, "mm", multiply)
    monkeypatch.setattr(scaled_gemms, "_rows_in_float32", lambda data: False)
    results = run(layer, x, dy)
    assert dtypes == [(torch.bfloat16, torch.bfloat16, torch.float32)]
    assert results[2].dtype == torch.float32
    assert_all_close(results, oracle("rowwise", layer, x, dy), tolerance=2**-7)
    assert_all_close(results[2:3], expected[2:3], tolerance=2**-22)


def test_a_gemm_of_rows_in_bf16_adds_a_bias_as_well(monkeypatch):
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: mm(a.to(out_dtype), b.to(out_dtype)))
    monkeypatch.setattr(scaled_gemms, "_rows_in_float32", lambda data: False)
    a, b = (
        Scaled(normal(n, 32, seed=n).to(torch.float8_e4m3fn), torch.rand(n, 1), ScaleLayout.PER_ROW)
        for n in (16, 48)
    )
    bias = normal(48)
    y = scaled_gemm(a, b, torch.float32, bias=bias)
    values = [matrix.data.double() * matrix.inv_scale.double() for matrix in (a, b)]
    assert_all_close([y], [values[0] @ values[1].t() + bias], tolerance=2**-20)


@pytest.mark.parametrize(
    ("cuda", "capability", "gives"),
    [("12.9", (9, 0), True), ("12.8", (9, 0), False), ("13.0", (10, 0), False),
     (None, (9, 0), False)],
)  # fmt: skip
def test_which_gpus_give_float32_for_rows(monkeypatch, cuda, capability, gives):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    on_gpu: Any = SimpleNamespace(is_cuda=True, device="cuda")
    assert scaled_gemms._rows_in_float32(on_gpu) is gives


@pytest.mark.parametrize("out_dtype", FLOATS, ids=str)
def test_a_float32_gemm_of_the_bytes_gives_what_onednns_reference_code_gives(out_dtype):
    # Integers, so that every order of summation gives the same sums.
    values = [torch.randint(-8, 9, (rows, 48)).float() for rows in (32, 16)]
    bias = normal(16)

    def product(*scales: float, in_float32: bool) -> Tensor:
        a, b = (
            Scaled(matrix.to(torch.float8_e4m3fn), torch.tensor(scale), ScaleLayout.PER_TENSOR)
            for matrix, scale in zip(values, scales, strict=True)
        )
        return scaled_gemm(a, b, out_dtype, bias=bias, in_float32=in_float32)

    # In the order of oneDNN's ref_matmul.cpp, each operation rounds to float32.
    y = product(0.37, 1.91, in_float32=True)
    sums = (values[0].numpy().astype(np.float64) @ values[1].numpy().T).astype(np.float32)
    expected = sums * np.float32(0.37) * np.float32(1.91) + bias.to(out_dtype).float().numpy()
    assert expected.dtype == np.float32
    assert torch.equal(y, torch.from_numpy(expected).to(out_dtype))
    # The order does not matter to scales that are powers of two: torch's own result, on any CPU.
    by_torch = product(0.25, 8.0, in_float32=False)
    assert torch.equal(product(0.25, 8.0, in_float32=True), by_torch)


def test_where_scaled_mm_is_slow_it_multiplies_no_operands_of_one_format(monkeypatch):
    multiply, pairs = torch._scaled_mm, []

    def recorded(a, b, **options):
        pairs.append({a.dtype, b.dtype})
        return multiply(a, b, **options)

    monkeypatch.setattr(torch, "_scaled_mm", recorded)
    slow = replace(CPU, slow_scaled_mm=True)
    layer, _ = linear("delayed", 64, 32, hardware=slow, backend="torch")
    x, dy = normal(16, 64, seed=1), normal(16, 32, seed=2)
    results = run(layer, x, dy)
    assert pairs == [{torch.float8_e4m3fn, torch.float8_e5m2}] * 2  # dx and dw
    assert_all_close(results, oracle("delayed", layer, x, dy), tolerance=2**-20)


@pytest.mark.parametrize("recipe", ON_CPUS)
def test_x_and_w_are_saved_as_fp8(recipe):
    layer, _ = linear(recipe, 64, 32, backend="torch")
    with saved_tensors() as saved:
        layer(normal(16, 64).requires_grad_())
    large = [t for t in saved if t.numel() > 64]
    assert sorted(t.numel() for t in large) == [16 * 64, 64 * 32]
    assert {t.dtype for t in large} == {torch.float8_e4m3fn}


def test_in_nvfp4_half_a_byte_of_an_element_is_saved_and_a_scale_of_16(cuda_gemm):
    layer, _ = linear("nvfp4", 128, 256, hardware=RTX, backend="torch")
    with saved_tensors() as saved:
        layer(normal(256, 128).requires_grad_())
    codes = 256 * 128 // 2
    expected = [codes, codes, codes // 8, codes // 8, 4, 4]
    assert sorted((t.nbytes for t in saved), reverse=True) == expected


# Non-finite values and odd shapes

RUNS: list[Any] = [(recipe, {}, hardware) for recipe, hardware in MACHINES.items()]
RUNS += [(recipe, {}, CPU) for recipe in ON_CPUS] + [row[:3] for row in MIXED]


@pytest.fixture
def run_on(request):
    """Makes a recipe's small linear for a machine, with the GEMMs that it has."""

    def make(recipe, hardware, **options):
        if hardware is not CPU:
            request.getfixturevalue("cuda_gemm")
        width = 128 if recipe == "block" else 32
        sizes = recipe, width, 2 * width
        return lambda: linear(*sizes, hardware=hardware, backend="torch", **options)[0]

    return make


@pytest.mark.parametrize(
    ("recipe", "changes", "hardware"),
    [case(*run, quick=run[2] is CPU or run[0] in ("mxfp8", "rowwise_wgrad_hp")) for run in RUNS],
    ids=str,
)
def test_nothing_hides_a_nan_in_any_pair_of_operands(run_on, recipe, changes, hardware):
    assert hidden(run_on(recipe, hardware, bias=False, **changes)(), 40) == []


@pytest.mark.parametrize(("recipe", "changes", "hardware"), RUNS, ids=str)
def test_any_number_of_rows_and_dtype_of_weights_is_multiplied(run_on, recipe, changes, hardware):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert odd_shapes(run_on(recipe, hardware, **changes), dtype) == []


@pytest.mark.parametrize("recipe", [case(name, quick=name == "delayed") for name in ON_CPUS])
@pytest.mark.full
def test_nothing_hides_a_nan_in_compiled_code(run_on, recipe):
    torch._dynamo.reset()
    layer = run_on(recipe, CPU, bias=False)()
    assert hidden(layer, 40, compiled(layer, "aot_eager")) == []


def test_the_mxfp8_gemm_is_an_operator_as_torch_wants_it(cuda_gemm):
    operands = []
    for rows in (48, 32):
        mxfp8 = numerics.Quantizer(block=(1, 32), scale="e8m0")
        data, scales = numerics.quantize(normal(rows, 64, seed=rows), mxfp8)[:2]
        operands += [data, pack_scales(scales, ScaleLayout.MX)]
    a, scale_a, b, scale_b = operands
    operator = torch.ops.fp8stack.mx_gemm.default
    checks = ("test_faketensor", "test_aot_dispatch_static")  # the others would add up float8
    torch.library.opcheck(operator, (a, b, scale_a, scale_b, torch.bfloat16), test_utils=checks)


# Operands that CUDA would refuse


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a": torch.float8_e5m2, "b": torch.float8_e5m2}, "Two E5M2 operands"),
        ({"K": 24}, "reduction has 24 elements: not divisible by 16"),
        ({"N": 40}, "output has 40 elements: not divisible by 16"),
        ({"turned": True}, "not row-major"),
        ({"K_of_b": 48}, "reductions differ"),
    ],
)
def test_what_the_hardware_does_not_take_is_refused_on_every_device(change, words):
    K, N = change.get("K", 32), change.get("N", 32)
    a = torch.zeros(16, K).to(change.get("a", torch.float8_e4m3fn))
    b = torch.zeros(N, change.get("K_of_b", K)).to(change.get("b", torch.float8_e4m3fn))
    if change.get("turned"):
        a = torch.zeros(K, 16).to(torch.float8_e4m3fn).t()
    operands = [Scaled(matrix, torch.ones(()), ScaleLayout.PER_TENSOR) for matrix in (a, b)]
    with pytest.raises(ValueError, match=words):
        scaled_gemm(operands[0], operands[1], torch.float32)
