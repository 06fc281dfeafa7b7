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
from fp8stack.analysis.conform.check_inputs import MXFP8, uneven
from fp8stack.common.formats import FormatName
from fp8stack.numerics import Quantizer, RandomBits, dequantize, error, quantize
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
    "normal, more than one chunk": normal(700, 96),
    "spikes": spiked(),
    "all zeros": torch.zeros(4, 40),
    "not finite": with_values(math.nan, math.inf, 0.0, -math.inf),
    "all inf": torch.full((2, 32), math.inf),
    "all nan": torch.full((2, 32), math.nan),
    "huge": normal(40, 64, std=1e37),
    "every magnitude": torch.logspace(-45, 38, 4096).view(32, 128),
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
    for x, dtype in itertools.product(TENSORS.values(), FLOAT_DTYPES):
        numbers, overflow = to_numpy(x.to(dtype)), min(torch.finfo(dtype).max, FLT_MAX)
        quantized = oracles.quantize(numbers, quantizer, 1, overflow=overflow)
        with np.errstate(all="ignore"):
            scaled = numbers / quantized.out.astype(np.float64)
            by_definition = expected(numbers, quantized.exact, scaled, LIMIT[quantizer.format])
        check(error.quantization_error(x.to(dtype), quantizer), by_definition)


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


@pytest.mark.parametrize("name", EVERY)
def test_any_quantizer_by_its_bytes(name: str) -> None:
    quantizer = EVERY[name]
    bits = RandomBits(1, 2, torch.tensor(3)) if quantizer.stochastic else None
    x = uneven(75, 140)
    x[32:64, 32:64] *= 2.0**-60  # all zero under a scale of E4M3, or of the tensor
    x[64:, :32] = 0
    for dim in (0, 1):
        figures = error.quantization_error(x, quantizer, dim=dim, generator=bits)
        drawn = None if bits is None else lambda *shape: bits.bits(*shape).numpy()
        quantized = oracles.quantize(to_numpy(x), quantizer, dim, bits=drawn)
        values = dequantize(quantize(x, quantizer, dim, bits)).double().numpy()
        check_by_bytes(to_numpy(x), quantizer, dim, quantized, values, figures)


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


def test_the_ratio_and_the_headroom_are_missing_where_there_is_none() -> None:
    assert sqnr_db(1000.0, 1.0) == pytest.approx(30.0)
    assert sqnr_db(1e-70, 1e-73) == pytest.approx(30.0)
    for signal, noise in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, math.inf), (math.nan, 1.0)):
        assert sqnr_db(signal, noise) is None
    assert (headroom_bits(112.0, "e4m3"), headroom_bits(57344.0 / 2, "e5m2")) == (2, 1)
    assert headroom_bits(896.0, "e4m3") == -1  # values are clipped
    for largest in (0.0, math.inf, math.nan):
        assert headroom_bits(largest, "e4m3") is None


def test_an_empty_matrix_has_zeros_and_a_device_is_asked_for_no_number() -> None:
    for device, shape in (("cpu", (0, 32)), ("meta", (256, 256))):  # a read from "meta" raises
        x = torch.ones(shape, device=device)
        for figures in (
            tensor_error(x, torch.ones((), device=device)),
            *(error.quantization_error(x, q) for q in (MXFP8, *RULES.values())),
            error.cast_error(x, torch.bfloat16),
        ):
            assert (figures.device.type, figures.shape) == (device, (len(FIGURES),))
            assert device == "meta" or figures[:7].tolist() == [0.0] * 7


def check_by_bytes(
    numbers: np.ndarray,
    quantizer: Quantizer,
    dim: int,
    quantized: oracles.QuantizedMatrix,
    values: np.ndarray,
    figures: Tensor,
) -> None:
    """Compare the figures, with those of scales and of blocks, with the oracle's bytes."""
    if quantizer.hadamard:
        numbers = oracles.hadamard(numbers, quantizer.hadamard, dim)
    into = quantized.into
    if quantizer.scale == "e4m3":  # a block whose scale is zero is lost, and not clipped
        into = np.where((quantized.out == 0) & (numbers != 0), np.float32(0), into)
    with np.errstate(all="ignore"):
        scaled = (numbers * into).astype(np.float64)
    limits = {"e2m1": 7.0, "e2m3": 7.75, "e3m2": 30.0} | LIMIT
    limits |= {"e3m4": 15.75, "e3m0": 24.0, "e2m4": 7.875, "e7m0": 1.5 * 2.0**63}
    by_definition = expected(numbers, values, scaled, limits[quantizer.format])
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
