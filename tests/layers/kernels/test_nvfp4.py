"""Both NVFP4 copies of a matrix: the operators on a CPU, and their kernels in Triton's interpreter,
against `numerics.quantize`, whose bytes are held to independent oracles in `tests/numerics`."""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8stack import numerics
from fp8stack.analysis.conform.scale_layouts import tiles
from fp8stack.common.formats import Quantizer
from fp8stack.layers.kernels import nvfp4
from fp8stack.layers.kernels.nvfp4 import cast_nvfp4
from fp8stack.numerics import RandomBits
from tests.support.cases import case
from tests.support.sass import unwritten_registers
from tests.support.triton_code import code_of, launched_on_a_cpu, launched_ptx, registers_of

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
SHAPES = ((16, 160), (144, 80), (272, 48))


def inputs() -> Iterator[tuple[str, torch.Tensor]]:
    """Shapes in each dtype; ties, specials, outliers, zeros, and what overflows a scale."""
    generator = torch.Generator().manual_seed(0)
    for shape, dtype in zip(
        SHAPES, itertools.cycle((torch.bfloat16, torch.float32, torch.float16))
    ):
        yield f"{shape} of {dtype}", torch.randn(shape, generator=generator).to(dtype)
    x = torch.randn(32, 48, generator=generator)
    halves = torch.arange(-16, 16).repeat_interleave(2)[:48] / 4
    yield "ties", (halves * torch.ones(32, 1)).bfloat16()
    yield "small", x * 1e-38
    yield "large", x.sign() * 3e38
    yield "zero", torch.zeros(32, 32)
    yield "minus zero", -torch.zeros(32, 32)
    x[3, 5], x[20, 7], x[21, 40] = math.nan, math.inf, -math.inf
    yield "NaN", x
    yield "infinite", x.nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
    outliers = torch.randn(32, 32, generator=generator)
    outliers[:, 3] *= 1e4
    yield "outliers", outliers.bfloat16()


def bits(device: str = "cpu") -> tuple[RandomBits, RandomBits]:
    count = torch.tensor(2**33 + 5, device=device)
    return RandomBits(7, 6, count, first_row=40), RandomBits(7, 7, count, first_row=40)


def expected(
    x: torch.Tensor, quantizer: Quantizer, columnwise: bool, drawn: RandomBits
) -> list[Any]:
    """The codes of a copy's lines, its block scales in tiles, and its upper scale."""
    quantized = numerics.quantize(x, quantizer, 0 if columnwise else 1, drawn)
    data, scales = quantized.data, quantized.scales.view(torch.uint8)
    if columnwise:
        data, scales = data.t(), scales.t()
    assert quantizer.blocks is not None
    upper = torch.where(quantized.has_nan, torch.nan, quantized.amax * torch.tensor(1 / 2688))
    return [data, tiles(scales.repeat_interleave(quantizer.blocks[0], 0)), upper]


def differences(device: str = "cpu") -> list[str]:
    """The cases in which copies differ from `quantize`, the first cast with the second or alone."""
    wrong = []
    for (name, x), (way, columnwise) in itertools.product(inputs(), WAYS.items()):
        if " of " not in name and way not in ("squares", "drawn hadamard"):
            continue
        rowwise = replace(columnwise, hadamard=0)
        drawn = bits(device) if rowwise.stochastic else (None, None)
        cases = {"along": (rowwise, False), "across": (columnwise, True)}
        copies = dict(zip(cases, cast_nvfp4(x.to(device), rowwise, columnwise, drawn), strict=True))
        if way == "squares":
            cases["alone"] = rowwise, False
            copies["alone"], none = cast_nvfp4(x.to(device), rowwise, None)
            assert none is None
        for copy, (quantizer, turned) in cases.items():
            matrix = copies[copy]
            assert matrix is not None
            assert matrix.upper_scale is not None
            packed = matrix.inv_scale.view(torch.uint8).flatten()
            reference = expected(x, quantizer, turned, bits()[turned])
            for field, tensor, expected_tensor in zip(
                ("data", "scales", "upper"),
                (matrix.data, packed, matrix.upper_scale),
                reference,
                strict=True,
            ):
                if not torch.equal(tensor.cpu().nan_to_num(-1.0), expected_tensor.nan_to_num(-1.0)):
                    wrong.append(f"{name}, {way}, {copy}: {field}")
    return wrong


def interpreted_differences() -> list[str]:
    """`differences` of the kernels themselves, where Triton interprets them."""
    with launched_on_a_cpu():
        return differences()


def test_both_copies_are_those_of_quantize_to_the_bit():
    assert differences() == []


@pytest.mark.parametrize("way", WAYS)
def test_the_operators_are_as_torch_wants_them(way):
    x, columnwise = torch.randn(32, 48).bfloat16(), WAYS[way]
    torch.library.opcheck(torch.ops.fp8stack.nvfp4_amaxes.default, (x, columnwise.hadamard))
    amaxes = torch.ops.fp8stack.nvfp4_amaxes(x, columnwise.hadamard)
    drawn = (torch.tensor(3), torch.tensor([6, 7])) if columnwise.stochastic else (None, None)
    height = 16 if way == "squares" else 1
    for with_second in (True, False):
        arguments = (x, amaxes, height, columnwise.hadamard, with_second, *drawn, 7, 0)
        torch.library.opcheck(torch.ops.fp8stack.cast_nvfp4.default, arguments)


def code(kernel: str, capability: int, *, bf16: bool = True, **variant: Any) -> Mapping[str, Any]:
    """The compiled code of a kernel, see `code_of`."""
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
    return code_of(getattr(triton_nvfp4, kernel), types, constants, capability, **options)


@needs_triton
@pytest.mark.parametrize(
    ("capability", "stochastic"),
    [(100, True), pytest.param(120, False, marks=pytest.mark.slow)],
)
def test_the_code_reads_16_bytes_and_writes_sectors_of_memory(
    capability, stochastic, tmp_path, monkeypatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    variant = {"hadamard": 16, "stochastic": stochastic}
    text = code("find_amaxes", capability, **variant)["ptx"]
    assert Counter(re.findall(r"ld\.global\S*", text)) == {"ld.global.v4.b32": 4}
    cast = code("cast", capability, **variant)
    text = cast["ptx"]
    assert unwritten_registers(cast["cubin"], tmp_path) == []
    assert re.findall(r"ld\.global\.v4\S*", text) == ["ld.global.v4.b32"] * 2
    # Four threads store a line of data, 32 bytes; the others are scales.
    stores = Counter(re.findall(r"st\.global\S*", text))
    assert stores == {"st.global.v2.b32": 2, "st.global.b8": 2}


FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("cast", {"hadamard": 16, "stochastic": True}),
    ("cast", {"hadamard": 0, "stochastic": True}),
    ("cast", {"hadamard": 16, "stochastic": True, "bf16": False}),
    ("cast", {"hadamard": 16}),
    ("cast", {"hadamard": 0}),
    ("cast", {"hadamard": 0, "height": 16}),
    ("cast", {"hadamard": 0, "columnwise": False}),
    ("find_amaxes", {"hadamard": 16}),
    ("find_amaxes", {"hadamard": 0}),
)


@needs_triton
@pytest.mark.parametrize(
    ("capability", "kernel", "form"),
    [
        case(capability, *form, quick=capability == 100 and place == 0)
        for capability in (90, 100)
        for place, form in enumerate(FORMS)
    ],
)
def test_no_register_is_spilled_and_an_sm_runs_two_squares(
    capability, kernel, form, tmp_path, monkeypatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    registers = registers_of(code(kernel, capability, **form)["ptx"], capability, tmp_path)
    assert registers.spilled_bytes == 0
    assert registers.blocks_per_sm(nvfp4.SQUARES[kernel][1]) >= 2


@needs_triton
@pytest.mark.parametrize(
    ("seed", "first_row"),
    [
        case(seed, first_row, quick=(seed, first_row) == (1, 1))
        for seed, first_row in ((1, 1), (1, 0), (0, 1), (0, 0), (2**32 - 1, 16))
    ],
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


@needs_triton
@pytest.mark.parametrize("file", ["triton_kernels.py", "triton_nvfp4.py"])
def test_triton_3_6_compiles_the_shapes_that_follow_from_what_a_kernel_is_compiled_for(file):
    """Its own functions in Triton's language, such as zeros, take no fields of `HOW` in a list."""
    import triton.language as tl
    from triton.runtime import JITFunction

    wrong = []
    for call in ast.walk(ast.parse(Path(nvfp4.__file__).with_name(file).read_text())):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            called = getattr(tl, call.func.attr, None)
            lists = [
                argument for argument in call.args if isinstance(argument, ast.List | ast.Tuple)
            ]
            if isinstance(called, JITFunction) and "HOW." in "".join(map(ast.unparse, lists)):
                wrong.append(ast.unparse(call))
    assert wrong == []


@needs_triton
@pytest.mark.slow
def test_squares_compile(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from fp8stack.layers.kernels import triton_nvfp4

    tensors = torch.float32, torch.float32, *[torch.uint8] * 4, torch.float32, torch.float32
    options = nvfp4.compiled_for("cast", hadamard=0, bf16=False, exact=True, height=16)
    options["capability"] = 100
    text = launched_ptx(triton_nvfp4.cast, *tensors, 0, 0, 256, 128, 128, 64, **options)
    assert "st.global" in text
