"""On attention's probabilities INT8 loses most values to zero, and E4M3 with a scale few."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from bench import runner
from bench.quality import int8

QUERIES, KEYS, SPREAD = 256, 384, 3.0
"""Sizes at which INT8 loses 93 % and E4M3 16 or 17 %: see docs/numerics.md."""


def _probabilities(seed: int) -> np.ndarray:
    """The oracle's own data: numpy's random numbers, softmax in float64."""
    logits = SPREAD * np.random.default_rng(seed).standard_normal((QUERIES, KEYS))
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return (exponentials / exponentials.sum(axis=1, keepdims=True)).astype(np.float32)


def _int8(x: np.ndarray) -> np.ndarray:
    scale = np.abs(x).max() / np.float32(127)
    return np.clip(np.rint(x / scale), -127, 127).astype(np.int8).astype(np.float32) * scale


def _e4m3(x: np.ndarray, scale: np.float32) -> np.ndarray:
    return (x * scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) / scale


@pytest.mark.parametrize("seed", range(4))
def test_int8_loses_93_percent_to_zero_and_e4m3_about_16(seed):
    """Our shares of zeros also equal the shares by numpy and ml_dtypes."""
    x = _probabilities(seed)
    expected = {
        "INT8": _int8(x),
        "E4M3": _e4m3(x, np.float32(448) / x.max()),
        "E4M3 without a scale": _e4m3(x, np.float32(1)),
    }
    zeros = {arm: np.mean(given_back == 0) for arm, given_back in expected.items()}
    assert zeros["INT8"] == pytest.approx(0.93, abs=0.01)
    assert zeros["E4M3"] == pytest.approx(0.16, abs=0.02)
    assert zeros["E4M3 without a scale"] > 0.8  # it is the scale that does it
    assert expected.keys() == int8.ARMS.keys()
    for arm, give_back in int8.ARMS.items():
        rounded = give_back(torch.from_numpy(x)).numpy()
        assert np.array_equal(rounded == 0, expected[arm] == 0), arm
        np.testing.assert_allclose(rounded, expected[arm], rtol=1e-6, atol=0)
        figures = int8.figures(torch.from_numpy(x), torch.from_numpy(expected[arm]))
        assert figures["zeros"] == pytest.approx(zeros[arm], abs=1e-6)
        noise = np.sum((expected[arm].astype(np.float64) - x) ** 2)
        power = np.sum(x.astype(np.float64) ** 2)
        assert figures["sqnr_db"] == pytest.approx(10 * np.log10(power / noise), abs=1e-3)


def test_the_scenarios_table_has_every_case_and_its_middle_is_the_one_that_is_tested():
    measured = runner.measured(int8, "int8", [])
    rows = {(row["case"], row["arm"]): row["zeros"] for row in measured["results"]}
    assert len(rows) == len(measured["results"]) == len(int8.CASES) * len(int8.ARMS)
    case = "384 keys, s = 3"
    assert rows[case, "INT8"] == pytest.approx(0.93, abs=0.01)
    assert rows[case, "E4M3"] == pytest.approx(0.16, abs=0.02)
    assert f"| {case} | INT8 | {rows[case, 'INT8']:.1%} |" in int8.table(measured)
