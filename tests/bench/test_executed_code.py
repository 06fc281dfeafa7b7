"""The code that torch generates for a GPU, run in Triton's interpreter."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.gpu_code import executed, gpu_code
from bench.gpu_code.comparison import TOLERANCE, Step, compare
from bench.gpu_code.executed import CASES
from bench.gpu_code.operators import OPERATORS, CpuOperators, Gemm
from fp8stack import numerics
from fp8stack.common import presets
from fp8stack.common.formats import Quantizer
from fp8stack.layers import kernels
from fp8stack.layers.kernels.scaled_gemm import Scaled, ScaleLayout, pack_scales, scaled_gemm
from tests.support.cuda_gemms import blocked_values
from tests.support.kernel_faults import BLOCKS, DELAYED, GENERATED, MX, NV, NVFP4, OURS
from tests.support.triton_code import interpreted

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


# All cases


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.recipe}, {case.name}")
def test_the_executed_code_of_a_case_gives_the_bytes_of_eager_code(case):
    assert executed.executed(case)["wrong"] == []


def test_every_recipe_that_a_gpu_runs_natively_is_executed_on_one():
    recipes = {*presets.training_recipes(), *gpu_code.RESIDUAL}
    native = {(r, c) for c in ("9.0", "10.0") for r in recipes if gpu_code.is_native(r, c)}
    assert {recipe for recipe, _ in native} == {case.recipe for case in CASES}
    assert all((case.recipe, case.capability) in native for case in CASES)


# Faults


def test_kernels_have_the_lines_that_faults_change():
    faults = [*DELAYED, *MX, *BLOCKS, *NV]
    folder = Path(str(kernels.__file__)).parent
    sources = {name: (folder / f"{name}.py").read_text() for name in (OURS, NVFP4)}
    in_kernels = [fault for fault in faults if fault.kernels != GENERATED]
    assert [fault for fault in in_kernels if fault.line not in sources[fault.kernels]] == []


@pytest.mark.parametrize(
    "works",
    [
        ("different_conversions", "in_block"),
        *(pytest.param((name,), marks=pytest.mark.slow) for name in ("in_delayed", "in_mxfp8")),
        pytest.param(("in_nvfp4",), marks=pytest.mark.slow),
    ],
    ids=lambda works: works[-1],
)
@pytest.mark.full
def test_a_step_is_right_and_every_fault_in_its_kernels_is_noticed(works):
    names = [f"tests.support.kernel_faults:{work}" for work in works]
    assert interpreted(*names) == {name: [] for name in names}


# The comparison


def step(*gemms: Gemm, **tensors: Tensor) -> Step:
    return Step(tensors=tensors, gemms=gemms)


def test_a_byte_of_a_gemm_is_noticed_whatever_the_order_of_the_gemms():
    operands = [torch.arange(6, dtype=torch.uint8) + i for i in range(2)]
    first, second = (Gemm("_scaled_mm", (x,)) for x in operands)
    assert compare(step(second, first), step(first, second)).wrong == []
    changed = operands[1].clone()
    changed[3] += 1
    compared = compare(step(Gemm("_scaled_mm", (changed,)), first), step(first, second))
    assert (compared.wrong_bytes, compared.bytes) == (1, 12)
    assert compared.wrong == ["1 bytes of GEMM 1, _scaled_mm of (6,)"]
    assert compare(step(first), step(first, second)).wrong[0] == "1 GEMMs, not 2"


@pytest.mark.parametrize(
    ("change", "wrong"), [(0.9 * TOLERANCE, 0), (1.1 * TOLERANCE, 1), (torch.nan, 1)]
)
def test_sums_may_differ_a_little_but_amaxes_may_not(change, wrong):
    x = torch.ones(8, dtype=torch.float64)
    for name, count in (("loss", wrong), ("amaxes", 1)):
        assert len(compare(step(**{name: x + change}), step(**{name: x})).wrong) == count


LAYOUTS = {
    ScaleLayout.PER_TENSOR: None,
    ScaleLayout.PER_ROW: None,
    ScaleLayout.MX: Quantizer(format="e4m3", block=(1, 32), scale="e8m0"),
    ScaleLayout.ROWS: Quantizer(format="e4m3", block=(1, 128)),
    ScaleLayout.SQUARES: Quantizer(format="e4m3", block=(128, 128)),
}


def operand(layout: ScaleLayout, rows: int, seed: int) -> Scaled:
    """A quantized matrix [rows, 256]."""
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(seed))
    x *= 2.0 ** (torch.arange(256) // 32 % 5)
    if (quantizer := LAYOUTS[layout]) is not None:
        data, inv_scale = numerics.quantize(x, quantizer)[:2]
        return Scaled(data, pack_scales(inv_scale, layout), layout)
    scales = torch.rand(() if layout is ScaleLayout.PER_TENSOR else (rows, 1)) + 0.5
    return Scaled(x.to(torch.float8_e4m3fn), scales, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gemms_multiply_what_scales_as_cublas_documents_them_stand_for(layout):
    a, b = operand(layout, 128, 1), operand(layout, 256, 2)
    with CpuOperators() as operators:
        y = scaled_gemm(a, b, torch.float32)
    first, second = (blocked_values(x.data, x.inv_scale, layout) for x in (a, b))
    torch.testing.assert_close(y.double(), first @ second.t(), rtol=1e-5, atol=1e-3)
    (gemm,) = operators.gemms
    assert [x.shape for x in gemm.operands[:2]] == [(128, 256), (256, 256)]


@pytest.mark.parametrize("masked", [False, True])
def test_attention_and_its_gradients_are_torchs(masked):
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, 4, 24, 16), (2, 2, 24, 16), (2, 2, 24, 16), (2, 4, 24, 16)]
    q, k, v, dy = (torch.randn(shape, generator=generator) for shape in shapes)
    documents = torch.arange(24) // 10
    allowed = (documents[:, None] == documents).tril()
    mask = torch.zeros(24, 24).masked_fill(~allowed, -torch.inf) if masked else None
    leaves = [x.requires_grad_() for x in (q, k, v)]
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": not masked, "enable_gqa": True}
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
    expected = torch.autograd.grad(y, leaves, dy)
    with torch.no_grad():
        result, _ = OPERATORS["attention"](q, k, v, mask)
        gradients = OPERATORS["attention_backward"](dy, q, k, v, mask)
    torch.testing.assert_close((result, *gradients), (y.detach(), *expected))
