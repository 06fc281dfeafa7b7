"""A trained model that tests of forecasts share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fp8stack

SMALL = {"layers": 2, "width": 32, "heads": 1, "mlp_width": 32}


@pytest.fixture(scope="package")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 3,840 tokens."""
    folder = tmp_path_factory.mktemp("forecast")
    keys: dict[str, Any] = {
        "recipe": "mxfp8", "steps": 30, "batch": 4, "context": 32, "model_overrides": SMALL,
        "eval_windows": 4, "sample_tokens": 0, "telemetry_every": 0, "warmup_steps": 2,
    }  # fmt: skip
    return fp8stack.pretrain(out=str(folder / "run"), **keys)
