"""The pictures of docs/recipes.md show what casts really do: held to oracles of other people."""

from __future__ import annotations

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from PIL import Image

from bench.quality import pictures

ROOT = Path(__file__).parents[2]
ORACLES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "bf16": ml_dtypes.bfloat16,
}


@pytest.fixture(scope="module")
def drawn() -> dict:
    return pictures.pictures()


def _oracle(x: np.ndarray, largest: float) -> tuple[float, float, float]:
    """Clipped, zeroed and dB of a cast to E4M3 whose scale was made of this amax."""
    scale = np.float32(448) / np.float32(largest)
    scaled = x * scale
    q = np.clip(scaled, -448, 448).astype(ORACLES["e4m3"]).astype(np.float64)
    noise = np.square(x - q / np.float64(scale)).sum()
    db = 10 * np.log10(np.square(x.astype(np.float64)).sum() / noise)
    return (np.abs(scaled) > 464).mean(), ((q == 0) & (x != 0)).mean(), db


def test_the_spike_costs_what_another_library_says():
    amaxes, courses = pictures.spike()
    tensors = [pictures.spiky_tensor(step).numpy() for step in range(pictures.STEPS)]
    assert amaxes == pytest.approx([np.abs(x).max() for x in tensors])
    for step in range(1, pictures.STEPS):
        largest = {
            "current": amaxes[step],
            "delayed, window 16": amaxes[max(0, step - 16) : step].max(),
            "delayed, window 1024": amaxes[:step].max(),
        }
        assert largest.keys() == courses.keys()
        for name, course in courses.items():
            expected = _oracle(tensors[step], largest[name])
            figures = (course.clipped[step], course.zeroed[step], course.sqnr[step])
            assert figures == pytest.approx(expected, rel=1e-4, abs=1e-9), (name, step)
            assert course.limit[step] == pytest.approx(largest[name], rel=1e-6)


def test_the_pictures_in_the_docs_are_those_that_the_code_draws_and_the_page_says_so(drawn):
    text = re.sub(r"\s+", " ", (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8"))
    units = {"percent": "%", "db": "dB", "values": "values"}
    for name, (_, facts) in drawn.items():
        with Image.open(ROOT / "docs" / "images" / f"{name}.png") as image:
            assert json.loads(image.info["Description"]) == pytest.approx(facts, rel=0.02), name
        for key, value in facts.items():
            assert f"{value:g} {units[key.rsplit('_', 1)[1]]}" in text, key
