"""The backends that run on this GPU, and the reasons that `probe` and `resolve` give."""

from __future__ import annotations

import pytest
import torch

from fp8stack.layers import build_backend
from fp8stack.precision import probe, resolve
from tests.gpu.machine import CONTEXT

pytestmark = pytest.mark.gpu

HARDWARE = CONTEXT.hardware
RECIPES = ("delayed", "current", "block", "mxfp8", "nvfp4")


def test_the_machine_is_what_torch_says_it_is() -> None:
    assert probe() == HARDWARE
    assert HARDWARE.device == "cuda"
    assert HARDWARE.capability == torch.cuda.get_device_capability(0)
    assert HARDWARE.name == torch.cuda.get_device_name(0)
    assert HARDWARE.memory_gib > 1
    assert HARDWARE.has_te == (HARDWARE.te_version is not None and not HARDWARE.te_problem)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("backend", ["te", "torch", "emulate"])
def test_a_backend_runs_or_the_plan_says_why_not(backend: str, recipe: str) -> None:
    plan = resolve(recipe, HARDWARE, backend)
    assert plan.device == "cuda"
    assert plan.backend == backend or plan.reasons
    build_backend(plan.for_layers({"layer": (128, 128)}))


@pytest.mark.skipif(not HARDWARE.has_te, reason="there is no Transformer Engine")
def test_transformer_engine_runs_nvfp4_on_blackwell_for_data_centres_if_it_has_it() -> None:
    import transformer_engine.pytorch as te

    assert HARDWARE.capability is not None
    is_data_centre = HARDWARE.capability[0] == 10  # elsewhere TE's check passes, and casts fail
    runs = resolve("nvfp4", HARDWARE).backend == "te"
    assert runs == (is_data_centre and te.is_nvfp4_available())
