"""The figures of a quantization against float64 in numpy and the casts of ml_dtypes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8stack.analysis.conform import oracles
from fp8stack.analysis.conform.check_inputs import uneven
from fp8stack.common.formats import FormatName, ScaleFormat, ScaleRounding
from fp8stack.numerics import Quantizer, RandomBits, dequantize, error, quantize, round_to
from fp8stack.numerics.error import FIGURES, headroom_bits, joint_error, sqnr_db
from tests.support.oracles import (
    FLOAT_DTYPES,
    FLT_MAX,
    MAX,
    ML_DTYPES,
    fp8_codes,
    to_numpy,
)
from tests.support.quantizers import EVERY, RULES

FORMATS: list[FormatName] = ["e4m3", "e5m2"]
LIMIT = {"e4m3": 464.0, "e5m2": 61440.0}  # the maximum and half of the last step


def tensor_error(x: Tensor, scale: Tensor, format: FormatName = "e4m3") -> Tensor:
    return error.quantization_error(x, Quantizer(format=format, amax="delayed"), scale=scale)


def mxfp8_error(
    x: Tensor, format: FormatName = "e4m3", scale_rounding: ScaleRounding = "rceil"
) -> Tensor:
    quantizer = Quantizer(format=format, block=(1, 32), scale="e8m0", scale_rounding=scale_rounding)
    return error.quantization_error(x, quantizer)


def block_error(x: Tensor, block=(1, 128), format="e4m3", power_of_two: bool = True) -> Tensor:
    scale: ScaleFormat = "power_of_two" if power_of_two else "float32"
    return error.quantization_error(x, Quantizer(format=format, block=block, scale=scale))


pytestmark = pytest.mark.usefixtures("one_thread")


def normal(*shape: int, std: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)) * std


def spiked() -> Tensor:
    """A few elements far above the others."""
    x = normal(96, 160)
    x[5, 7], x[40, 100], x[95, 0] = 4000.0, -900.0, 70.0
    return x


def with_values(*values: float) -> Tensor:
    x = normal(8, 64)
    for i, value in enumerate(values):
        x[i, 3 * i] = value
    return x


TENSORS = {
    "normal": normal(96, 160),
    "tall": normal(700, 96),  # more than one chunk
    "spikes": spiked(),
    "some zeros": normal(64, 64).relu(),
    "all zeros": torch.zeros(4, 40),
    "infs": with_values(math.inf, -math.inf),
    "nans": with_values(math.nan, -math.nan),
    "both": with_values(math.nan, math.inf, 0.0, -math.inf),
    "all inf": torch.full((2, 32), math.inf),
    "all nan": torch.full((2, 32), math.nan),
    "subnormals": torch.logspace(-45, -36, 512).view(4, 128),
    "tiny": normal(40, 64, std=1e-30),
    "huge": normal(40, 64, std=1e37),
    "every magnitude": torch.logspace(-40, 38, 4096).view(32, 128),
    "one": torch.tensor([[-3.0]]),
}


def expected(
    x: np.ndarray, decoded: np.ndarray, scaled: np.ndarray, limit: float
) -> dict[str, float]:
    """The figures by their definition: `decoded` and `scaled` are float64, of x's shape."""
    finite = np.isfinite(x)
    exact = np.where(finite, x, 0).astype(np.float64)
    difference = np.where(finite, exact - decoded, 0)
    numbers = np.abs(x[~np.isnan(x)])
    largest = np.abs(scaled[~np.isnan(scaled)])
    return {
        "amax": float(numbers.max(initial=0)),
        "saturated": float(np.mean(np.abs(scaled) > limit)),
        "underflow": float(np.mean((x != 0) & (decoded == 0))),
        "nonfinite": float(np.mean(~finite)),
        "signal": math.fsum((exact**2).ravel()),
        "noise": math.fsum((difference**2).ravel()),
        "largest": float(largest.max(initial=0)),
    }


def decode(codes: np.ndarray, name: str) -> np.ndarray:
    return codes.view(ML_DTYPES[name]).astype(np.float64)


def check(figures: Tensor, by_definition: dict[str, float]) -> None:
    assert figures.dtype == torch.float64
    values = dict(zip(FIGURES, figures.tolist(), strict=True))
    for name, value in by_definition.items():
        assert values[name] == pytest.approx(value, rel=1e-6, abs=0), name


def cells() -> Iterator[tuple[Tensor, np.ndarray, FormatName]]:
    """Every tensor in every dtype, its values in numpy, and every format to cast to."""
    for x, dtype, format in itertools.product(TENSORS.values(), FLOAT_DTYPES, FORMATS):
        yield x.to(dtype), to_numpy(x.to(dtype)), format


@pytest.mark.parametrize("stale", [1.0, 16.0, 2.0**-12])
def test_one_scale(stale: float) -> None:
    """`stale` multiplies the scale, as if it came from an earlier amax in delayed scaling."""
    for x, numbers, format in cells():
        largest = float(np.abs(numbers[np.isfinite(numbers)]).max(initial=0))
        with np.errstate(all="ignore"):
            scale = np.float32(
                min(float(oracles.scale_of(largest, format) * np.float32(stale)), FLT_MAX)
            )
            scaled = (numbers * scale).astype(np.float64)
            decoded = decode(fp8_codes(numbers, scale, format), format) / np.float64(scale)
        figures = tensor_error(x, torch.tensor(scale), format)
        check(figures, expected(numbers, decoded, scaled, LIMIT[format]))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.full
def test_blocks(name: str) -> None:
    quantizer = RULES[name]
    saturated = 0.0
    for x, dtype in itertools.product(TENSORS.values(), FLOAT_DTYPES):
        numbers, overflow = to_numpy(x.to(dtype)), min(torch.finfo(dtype).max, FLT_MAX)
        quantized = oracles.quantize(numbers, quantizer, 1, overflow=overflow)
        with np.errstate(all="ignore"):
            scaled = numbers / quantized.out.astype(np.float64)
            by_definition = expected(numbers, quantized.exact, scaled, LIMIT[quantizer.format])
        check(error.quantization_error(x.to(dtype), quantizer), by_definition)
        saturated += by_definition["saturated"] * bool(x.isfinite().all())
    if name in ("mxfp8 e4m3 floor", "mxfp8 e4m3 even"):  # which do not round up
        assert saturated > 0


@pytest.mark.parametrize("to", ["bf16", "fp16", "fp32"])
def test_a_cast_without_scale(to: str) -> None:
    target = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[to]
    for x, numbers, _ in cells():
        with np.errstate(all="ignore"):
            decoded = numbers.astype(ML_DTYPES[to]).astype(np.float64)
            by_definition = expected(numbers, decoded, numbers.astype(np.float64), math.inf)
            by_definition["saturated"] = float(np.mean(np.isinf(decoded)))
        check(error.cast_error(x, target), by_definition)


@pytest.mark.parametrize("format", FORMATS)
def test_what_rounds_down_to_the_maximum_is_not_saturated(format: FormatName) -> None:
    limit = LIMIT[format]
    above = float(np.nextafter(np.float32(limit), np.float32(np.inf)))
    x = torch.tensor([[limit, -limit, MAX[format], 1.0]])
    figures = tensor_error(x, torch.ones(()), format)
    assert figures[FIGURES.index("saturated")] == 0
    x[0, 1] = -above
    figures = tensor_error(x, torch.ones(()), format)
    assert figures[FIGURES.index("saturated")] == 0.25


def test_float64_counts_as_float32() -> None:
    x = normal(8, 64)
    for figures in (tensor_error(x.double(), torch.tensor(50.0)), mxfp8_error(x)):
        assert figures[4] == block_error(x.double())[4]


def test_a_transposed_weight_gives_its_own_figures() -> None:
    x = normal(96, 160)
    assert torch.equal(mxfp8_error(x.t()), mxfp8_error(x.t().contiguous()))
    assert not torch.equal(mxfp8_error(x.t()), mxfp8_error(x))


def test_an_empty_matrix_has_zeros() -> None:
    x = torch.zeros(0, 32)
    for figures in (tensor_error(x, torch.ones(())), mxfp8_error(x)):
        assert figures.tolist() == [0.0] * len(FIGURES)


@pytest.mark.parametrize("power", [-30, 0, 30])
def test_the_ratio_does_not_depend_on_the_magnitude(power: int) -> None:
    x = normal(64, 128)
    figures = mxfp8_error(x)
    scaled_figures = mxfp8_error(x * 2.0 ** (3 * power))
    db = [sqnr_db(float(f[4]), float(f[5])) for f in (scaled_figures, figures)]
    assert db[0] is not None
    assert db[0] == pytest.approx(db[1], abs=1e-9)
    assert 25 < db[0] < 35


def test_the_ratio_is_in_decibels_and_missing_where_there_is_none() -> None:
    assert sqnr_db(1000.0, 1.0) == pytest.approx(30.0)
    assert sqnr_db(1e-70, 1e-73) == pytest.approx(30.0)
    for signal, noise in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, math.inf), (math.nan, 1.0)):
        assert sqnr_db(signal, noise) is None


def test_headroom_is_in_bits_and_negative_where_values_are_clipped() -> None:
    assert headroom_bits(448.0, "e4m3") == 0
    assert headroom_bits(112.0, "e4m3") == 2
    assert headroom_bits(896.0, "e4m3") == -1
    assert headroom_bits(57344.0 / 2, "e5m2") == 1
    for largest in (0.0, math.inf, math.nan):
        assert headroom_bits(largest, "e4m3") is None


def test_a_device_is_asked_for_no_number() -> None:
    x = torch.ones(256, 256, device="meta")  # where reading a value raises
    for figures in (
        tensor_error(x, torch.ones((), device="meta")),
        mxfp8_error(x),
        block_error(x),
        block_error(x, (128, 128)),
        error.cast_error(x, torch.bfloat16),
    ):
        assert figures.device.type == "meta"
        assert figures.shape == (len(FIGURES),)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", EVERY)
def test_any_quantizer_by_its_bytes(name: str, dim: int) -> None:
    quantizer = EVERY[name]
    bits = RandomBits(1, 2, torch.tensor(3)) if quantizer.stochastic else None
    x = uneven(75, 140)
    x[32:64, 32:64] *= 2.0**-60  # all zero under a scale of E4M3, or of the tensor
    x[64:, :32] = 0
    figures = error.quantization_error(x, quantizer, dim=dim, generator=bits)
    drawn = None if bits is None else lambda *shape: bits.bits(*shape).numpy()
    quantized = oracles.quantize(to_numpy(x), quantizer, dim, bits=drawn)
    numbers = to_numpy(x)
    if quantizer.hadamard:
        numbers = oracles.hadamard(numbers, quantizer.hadamard, dim)
    values = dequantize(quantize(x, quantizer, dim, bits)).double().numpy()
    into = quantized.into
    if quantizer.scale == "e4m3":  # a block whose scale is zero is lost, and not clipped
        into = np.where((quantized.out == 0) & (numbers != 0), np.float32(0), into)
    with np.errstate(all="ignore"):
        scaled = (numbers * into).astype(np.float64)
    limits = {"e2m1": 7.0, "e2m3": 7.75, "e3m2": 30.0} | LIMIT
    of_own_formats = {"e3m4": 15.75, "e3m0": 24.0, "e2m4": 7.875, "e7m0": 1.5 * 2.0**63}
    limit = (limits | of_own_formats)[quantizer.format]
    by_definition = expected(numbers, values, scaled, limit)
    value_of = dict(zip(FIGURES, figures.tolist(), strict=True))
    for figure, value in by_definition.items():
        assert value_of[figure] == pytest.approx(value, rel=2e-5, abs=0), figure

    rows, columns = quantized.stored.shape
    tall, wide = -(-numbers.shape[0] // rows), -(-numbers.shape[1] // columns)
    if quantizer.blocks is not None:
        columnwise, rowwise = quantizer.blocks
        tall, wide = (columnwise, rowwise) if dim == 1 else (rowwise, columnwise)
    emptied, used = 0, []
    for i, j in np.ndindex(rows, columns):
        block = (slice(i * tall, i * tall + tall), slice(j * wide, j * wide + wide))
        if numbers[block].any():
            used += [quantized.into[block][0, 0]] * bool(scaled[block].any())
            emptied += not values[block].any()
    share = emptied / quantized.stored.size if quantizer.blocks is not None else 0
    assert value_of["zero_blocks"] == pytest.approx(share)
    assert share > 0 or quantizer.scale != "e4m3"
    assert (value_of["least_scale"], value_of["largest_scale"]) == (min(used), max(used))


def test_a_matrix_of_zeros_and_a_cast_without_a_scale_have_ranges_too() -> None:
    for quantizer in EVERY.values():
        bits = RandomBits(1, 2, torch.tensor(3)) if quantizer.stochastic else None
        figures = error.quantization_error(torch.zeros(8, 40), quantizer, generator=bits)
        assert figures[:8].tolist() == [0.0] * 8
        assert 0 < figures[8] <= figures[9]
    assert error.cast_error(torch.ones(2, 2), torch.bfloat16)[7:].tolist() == [0, 1, 1]


def test_the_figures_of_several_matrices_are_those_of_one_of_all_their_rows() -> None:
    x = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    x[:4] *= 1000.0
    x[40] = 0
    quantizer = Quantizer(block=(1, 32), scale="e8m0")
    groups = x.tensor_split([32, 32, 80])  # one is empty
    figures = [error.quantization_error(group, quantizer) for group in groups]
    joint = joint_error(figures, [group.numel() for group in groups])
    torch.testing.assert_close(joint, error.quantization_error(x, quantizer), rtol=1e-12, atol=0)
    empty = figures[1]
    assert torch.equal(joint_error([empty, empty], [0, 0]), empty)


def test_blocks_of_all_rows_are_counted_over_all_chunks() -> None:
    x = normal(64, 4096)
    x[:40] = 0  # a chunk is of 32 rows
    x[:, 128:] = 0
    quantizer = Quantizer(block=(1, 128))
    figures = dict(
        zip(FIGURES, error.quantization_error(x, quantizer, dim=0).tolist(), strict=True)
    )
    assert figures["zero_blocks"] == 0


def test_rounded_values_have_no_gradient() -> None:
    x = normal(8, 32).requires_grad_()
    assert not round_to(x, Quantizer(), 1).values.requires_grad
