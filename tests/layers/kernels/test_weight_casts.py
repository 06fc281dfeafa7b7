"""The copies of many weights: their kernel in Triton's interpreter against numpy, and its code."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8stack.analysis.conform.oracles import QuantizedMatrix, amax, quantize
from fp8stack.analysis.conform.quantizers import compare_copies, gemm_operand, quantized
from fp8stack.common.formats import Quantizer
from fp8stack.layers.kernels import weight_casts as weights
from fp8stack.layers.kernels.scaled_gemm import Scaled
from fp8stack.layers.kernels.weight_casts import BatchedCast
from tests.layers.kernels.test_variants import SCALES, inputs
from tests.support.cases import case
from tests.support.oracles import to_numpy
from tests.support.sass import unwritten_registers
from tests.support.triton_code import code_of

pytestmark = pytest.mark.usefixtures("one_thread")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

FLOATS = (torch.float32, torch.bfloat16)
FORMATS: tuple[Any, ...] = ("e4m3", "e5m2")
CURRENT: list[dict[str, Any]] = [{}, {"scale": "power_of_two"}, {"eps": 1e3}]
BLOCKS: list[dict[str, Any]] = [{"scale": "power_of_two"}, {}]
MX: dict[str, Any] = {"block": (1, 32), "scale": "e8m0"}
ROUNDINGS: tuple[Any, ...] = ("rceil", "even", "floor")


def matrices(dtype: torch.dtype, every: bool = False) -> list[tuple[Tensor, tuple[int, ...]]]:
    """The non-empty inputs of `test_variants` in a dtype, with the scales to try."""
    selected = [
        (x, tried) for _, x, tried in inputs(few=not every) if x.dtype == dtype and x.numel()
    ]
    if dtype == torch.bfloat16:  # see test_kernels
        least = torch.finfo(dtype).smallest_normal
        selected = [(x.where(x.abs() >= least, 0.0), tried) for x, tried in selected]
    return selected


def aligned() -> list[Tensor]:
    """Matrices of a model's sizes, with magnitudes far apart."""
    generator = torch.Generator().manual_seed(1)
    normals = [torch.randn(size, generator=generator) for size in ((128, 128), (384, 256))]
    return [x * 10.0 ** torch.linspace(-30, 30, len(x))[:, None] for x in normals]


def differences(device: str = "cpu", every: bool = True) -> list[str]:
    """The cases in which copies differ from numpy; `every` dtype in all formats, or in one each."""
    wrong: list[str] = []
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for place, (dtype, name) in enumerate(itertools.product(dtypes, FORMATS)):
        if every or place in (0, 3, 4):
            wrong += differences_with_given_scales(matrices(dtype, every), name, device)
    wrong += differences_with_given_scales([(x, (1, 2)) for x in aligned()], "e4m3", device)
    singles = [x for x, _ in matrices(torch.float32)]
    halves = [x for x, _ in matrices(torch.float16)]
    small = singles if every else [x for x in singles if x.numel() < 2**15]
    rules = [
        (tensors, Quantizer(**options))
        for options, tensors in zip(CURRENT, (singles, small, small), strict=True)
    ]
    rules.append((halves, Quantizer(format="e5m2")))
    rules += [
        (tensors, Quantizer(block=(128, 128), **options))
        for options, tensors in zip(BLOCKS, (singles, halves), strict=True)
    ]
    rules += [(aligned(), Quantizer()), (aligned(), Quantizer(block=(128, 128)))]
    # Values between two float32 values: the nearer float32 value is cast.
    rules.append(([x.double() * (1 + 2.0**-26) for x in aligned()], Quantizer()))
    rules += [
        (tensors, Quantizer(**MX, scale_rounding=rounding))
        for tensors, rounding in zip((singles, halves, aligned()), ROUNDINGS, strict=True)
    ]
    for tensors, quantizer in rules:
        wrong += differences_with_computed_scales(tensors, quantizer, device)
    return wrong


def differences_with_given_scales(
    matrices_and_places: list[tuple[Tensor, tuple[int, ...]]], name: Any, device: str
) -> list[str]:
    """The cases in which bytes, transposes, inverse scales or amaxes differ from numpy. Scales come
    in any order, and several matrices share a scale."""
    cases = [(x, place) for x, tried in matrices_and_places for place in reversed(tried)]
    weights_on_device = [x.to(device) for x, _ in cases]
    quantizer = Quantizer(format=name)
    batched_cast = BatchedCast(weights_on_device, quantizer, [place for _, place in cases])
    scales, memory = torch.tensor(SCALES, device=device), torch.zeros(len(SCALES), 4, device=device)
    memory[2, 0] = math.inf
    before, wrong = memory.clone(), []
    if matrices_and_places[0][0].dtype == torch.bfloat16:  # recording is the same in every dtype
        batched_cast.cast(scales)
        wrong = [] if torch.equal(memory, before) else ["amaxes that were not wanted"]
    batched_cast.cast(scales, memory[:, 0])
    largest = before[:, 0].cpu().numpy()
    for (x, place), copies in zip(cases, batched_cast.copies, strict=True):
        values = to_numpy(x)
        largest[place] = max(largest[place], amax(values).item())
        references = [quantize(values, quantizer, dim, scale=SCALES[place]) for dim in (1, 0)]
        case_name = f"{x.shape} {x.dtype} {name} {place}"
        wrong += compared(case_name, copies, references, quantizer)
    before[:, 0] = torch.tensor(largest)
    return wrong + ([] if torch.equal(memory, before) else [f"amaxes {memory}, not {largest}"])


def differences_with_computed_scales(
    tensors: list[Tensor], quantizer: Quantizer, device: str
) -> list[str]:
    batched_cast, wrong = BatchedCast([x.to(device) for x in tensors], quantizer), []
    batched_cast.cast()
    batched_cast.cast()  # again: no amax of the first call is left
    for x, copies in zip(tensors, batched_cast.copies, strict=True):
        references = [quantized(x, quantizer, dim) for dim in (1, 0)]
        wrong += compared(f"{x.shape} {x.dtype} {quantizer}", copies, references, quantizer)
    return wrong


def compared(
    case_name: str,
    copies: tuple[Scaled, Scaled],
    references: list[QuantizedMatrix],
    quantizer: Quantizer,
) -> list[str]:
    """The differences of a weight's copies from the references."""
    facts = compare_copies([copy[:2] for copy in copies], references, quantizer, gemm_operand)
    wrong = [f"{case_name}: {line}" for line in facts.get("first", [])]
    return wrong + [f"{case_name}: layout" for copy in copies if not copy.data.is_contiguous()]


def few_differences() -> list[str]:
    return differences(every=False)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The constants of each launch, which is not made."""
    launches: list[dict[str, Any]] = []
    monkeypatch.setattr(
        weights,
        "launch_weights",
        lambda tiles, operands, variant, options: launches.append({"HOW": variant} | options),
    )
    return launches


# One form on one GPU, and one on a GPU whose conversions are inexact; the others are slow.
CODES = [
    case(
        *(capability, dtype, options),
        quick=(capability, dtype, options)
        in ((90, torch.float32, {"block": (128, 128)}), (89, torch.float32, {})),
    )
    for capability in (89, 90, 100, 120)
    for dtype in FLOATS
    for options in ({}, {"block": (128, 128)}, MX)
]


@needs_triton
@pytest.mark.parametrize(("capability", "dtype", "options"), CODES)
def test_a_gpus_code_stores_16_bytes_in_both_directions_and_converts_exactly(
    capability, dtype, options, tmp_path, monkeypatch, launched
) -> None:
    from fp8stack.layers.kernels import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tensors = [torch.zeros(256, 384, dtype=dtype)]
    batched_cast = BatchedCast(tensors, Quantizer(**options))
    batched_cast.cast(None if options else torch.ones(1), None if options else torch.zeros(1))
    constants = launched[0]
    constants["HOW"] = replace(constants["HOW"], exact=capability != 89)
    types = {"table": "*i64", "owners": "*i32", "scales": "*fp32", "amaxes": "*fp32"}
    chosen = {key: constants.pop(key) for key in ("num_warps", "enable_fp_fusion")}
    code = code_of(triton_kernels.cast_weights, types, constants, capability, **chosen)
    text = code["ptx"]
    if capability != 89:  # whose code Triton 3.9's nvdisasm cannot analyze
        assert unwritten_registers(code["cubin"], tmp_path) == []
    stores = Counter(re.findall(r"st\.global\S*", text))
    # Bytes and transposes, 64 to a thread, 32 where scales are packed; one inverse scale, or for
    # blocks two.
    if options == MX:
        assert stores == {"st.global.v4.b32": 4, "st.global.b8": 2}
    else:
        assert stores == {"st.global.v4.b32": 8, "st.global.b32": 2 if options else 1}
        assert "div.rn.f32" in text
    assert "div.full.f32" not in text
    assert "fma." not in text  # rounds the product
    assert ".ftz" not in text  # keeps subnormals
    if capability != 89:
        assert "cvt.rn.satfinite.e4m3x2.f32" in text
        assert ".f16x2" not in text  # rounds no second time


def variants_of(launched: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    return [(launch["HOW"].scales, launch["HOW"].record) for launch in launched]


def test_a_launch_is_all_that_delayed_scaling_needs_and_current_scaling_needs_two(launched) -> None:
    tensors = [torch.ones(32, 48), torch.ones(16, 16)]
    BatchedCast(tensors, Quantizer(amax="delayed"), [3, 0]).cast(torch.ones(4), torch.zeros(4))
    assert variants_of(launched) == [("given", True)]
    launched.clear()
    BatchedCast(tensors, Quantizer()).cast()
    assert variants_of(launched) == [("none", True), ("current", False)]
    launched.clear()
    BatchedCast(tensors, Quantizer(block=(128, 128))).cast()
    BatchedCast(tensors, Quantizer(**MX)).cast()
    assert variants_of(launched) == [("squares", False), ("mx", False)]
