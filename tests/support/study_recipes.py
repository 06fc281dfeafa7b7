"""Paths of recipes in `bench/recipes/`: variations of nvfp4, each with one thing changed."""

from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parents[2] / "bench" / "recipes"

NEAREST = str(_FOLDER / "nvfp4_nearest.toml")
NO_HADAMARD = str(_FOLDER / "nvfp4_no_hadamard.toml")
LAST_BF16 = str(_FOLDER / "nvfp4_last_bf16.toml")
BACKWARD_HIGH = str(_FOLDER / "nvfp4_backward_high.toml")


def hadamard(size: int, **of_gradients: str) -> dict[str, Any]:
    """The keys of a recipe for Hadamard transforms of both operands of dw, and for gradients."""
    wgrad = {"wgrad": {"hadamard": size}}
    return {"input": wgrad, "grad_output": wgrad | of_gradients}
