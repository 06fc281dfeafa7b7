"""The pictures of docs/recipes.md show what casts really do: held to oracles of other people."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from bench.quality import pictures

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def drawn() -> dict:
    return pictures.pictures()


def test_the_pictures_in_the_docs_are_those_that_the_code_draws_and_the_page_says_so(drawn):
    text = re.sub(r"\s+", " ", (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8"))
    units = {"percent": "%", "db": "dB", "values": "values"}
    for name, (_, facts) in drawn.items():
        with Image.open(ROOT / "docs" / "images" / f"{name}.png") as image:
            assert json.loads(image.info["Description"]) == pytest.approx(facts, rel=0.02), name
        for key, value in facts.items():
            assert f"{value:g} {units[key.rsplit('_', 1)[1]]}" in text, key
