"""Both NVFP4 copies of a matrix: the operators, and the code of their kernels. Their bytes are rows
of `fp8stack conform`."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from fp8stack.common.formats import Quantizer
from fp8stack.layers.kernels import nvfp4
from fp8stack.layers.kernels.nvfp4 import cast_nvfp4
from tests.support.cases import case
from tests.support.triton_code import blocks_per_sm, launched_ptx, ptx_of

pytestmark = pytest.mark.usefixtures("one_thread")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

ROWS = Quantizer(format="e2m1", block=(1, 16), scale="e4m3")
WAYS = {  # the second copy of each
    "plain": ROWS,
    "squares": replace(ROWS, block=(16, 16)),
    "hadamard": replace(ROWS, hadamard=16),
    "drawn": replace(ROWS, rounding="stochastic"),
    "drawn hadamard": replace(ROWS, rounding="stochastic", hadamard=16),
}


def test_the_first_copy_alone_is_that_of_both():
    x = torch.randn(144, 80, generator=torch.Generator().manual_seed(0)).bfloat16()
    for quantizer in (ROWS, WAYS["squares"]):
        (first, _), (alone, second) = (cast_nvfp4(x, quantizer, q) for q in (quantizer, None))
        assert second is None
        assert torch.equal(alone.data, first.data)
        assert torch.equal(alone.inv_scale.view(torch.uint8), first.inv_scale.view(torch.uint8))
        assert alone.upper_scale == first.upper_scale


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.full
def test_the_operators_are_as_torch_wants_them(way):
    x, columnwise = torch.randn(32, 48).bfloat16(), WAYS[way]
    torch.library.opcheck(torch.ops.fp8stack.nvfp4_amaxes.default, (x, columnwise.hadamard))
    amaxes = torch.ops.fp8stack.nvfp4_amaxes(x, columnwise.hadamard)
    drawn = (torch.tensor(3), torch.tensor([6, 7])) if columnwise.stochastic else (None, None)
    height = 16 if way == "squares" else 1
    for with_second in (True, False):
        arguments = (x, amaxes, height, columnwise.hadamard, with_second, *drawn, 7, 0)
        torch.library.opcheck(torch.ops.fp8stack.cast_nvfp4.default, arguments)


def code(kernel: str, capability: int, *, bf16: bool = True, **variant: Any) -> str:
    """The PTX of a kernel."""
    from fp8stack.layers.kernels import triton_nvfp4

    types, sizes = {"x": "*bf16" if bf16 else "*fp32"}, dict.fromkeys(("rows", "columns"), "i32")
    if kernel == "find_amaxes":
        types |= {"figures": "*fp32"} | sizes
    else:
        copies = dict.fromkeys(("data", "scales", "transposed", "columnwise_scales"), "*u8")
        drawn = {"counter": "*i64", "streams": "*i64", "seed": "i64", "first_row": "i32"}
        halves = dict.fromkeys(("half_rows", "half_columns"), "i32")
        types |= {"amaxes": "*fp32"} | copies | drawn | sizes | halves
    options = nvfp4.compiled_for(kernel, bf16=bf16, exact=capability != 89, **variant)
    constants = {"HOW": options.pop("HOW")}
    return ptx_of(getattr(triton_nvfp4, kernel), types, constants, capability, **options)


@needs_triton
@pytest.mark.parametrize("capability", [100, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.full
def test_the_code_reads_16_bytes_and_writes_sectors_of_memory(capability, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    variant: dict[str, Any] = {"hadamard": 16, "stochastic": True}
    text = code("find_amaxes", capability, **variant)
    assert Counter(re.findall(r"ld\.global\S*", text)) == {"ld.global.v4.b32": 4}
    text = code("cast", capability, **variant)
    assert re.findall(r"ld\.global\.v4\S*", text) == ["ld.global.v4.b32"] * 2
    # Four threads store a line of data, 32 bytes; the others are scales.
    stores = Counter(re.findall(r"st\.global\S*", text))
    assert stores == {"st.global.v2.b32": 2, "st.global.b8": 2}


FORMS: list[dict[str, Any]] = [
    {"hadamard": 16, "stochastic": True},
    {"hadamard": 16, "stochastic": True, "bf16": False},
    {"hadamard": 0},
    {"hadamard": 0, "height": 16},
    {"hadamard": 0, "columnwise": False},
]


@needs_triton
@pytest.mark.parametrize("form", [case(form, quick=form is FORMS[0]) for form in FORMS])
@pytest.mark.full
def test_no_register_is_spilled_and_an_sm_runs_two_squares(form, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    warps = nvfp4.SQUARES["cast"][1]
    assert blocks_per_sm(code("cast", 100, **form), 100, tmp_path, warps) >= 2


@needs_triton
@pytest.mark.parametrize(
    ("seed", "first_row"), [case(1, 1, quick=True), case(2**32 - 1, 16, quick=False)]
)
def test_any_seed_and_first_row_may_be_drawn_from(seed, first_row, tmp_path, monkeypatch):
    """Triton makes a constant of an argument that is 1."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from fp8stack.layers.kernels import triton_nvfp4

    variant = {"hadamard": 0, "bf16": True, "stochastic": True, "columnwise": False}
    tensors = torch.bfloat16, torch.float32, *[torch.uint8] * 4, torch.int64, torch.int64
    numbers = seed, first_row, 256, 128, 128, 64
    options = nvfp4.compiled_for("cast", exact=True, **variant) | {"capability": 100}
    assert "mul.hi.u32" in launched_ptx(triton_nvfp4.cast, *tensors, *numbers, **options)
