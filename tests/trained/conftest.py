"""A finished run, and what all tests of trained models share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fp8stack

TEXT = "".join(f"line {i}: Größe {i * i % 97}, ☃ {i % 7}\n" for i in range(300))
SMALL = {"layers": 1, "width": 32, "heads": 2}


def trained(folder: Path, **more: Any) -> Path:
    """A run of six steps on `TEXT`, in delayed scaling where `more` says nothing else."""
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    keys: dict[str, Any] = {
        "recipe": "delayed", "data": str(folder / "text.txt"), "steps": 6, "batch": 4,
        "context": 32, "model_overrides": SMALL, "eval_windows": 9, "sample_tokens": 0,
        "warmup_steps": 1, "telemetry_every": 0, "out": str(folder / "run"),
    }  # fmt: skip
    return fp8stack.pretrain(**keys | more)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `trained`; not to be changed."""
    return trained(tmp_path_factory.mktemp("trained"))
