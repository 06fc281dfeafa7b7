"""`fp8stack.plan`: what `convert` would do to a model, on any machine."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fp8stack
from fp8stack.precision import Hardware, resolve
from tests.conftest import refusal


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 50), nn.Linear(50, 64))


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4", "bf16"])
def test_the_plan_is_the_one_that_convert_follows(recipe):
    original = model()
    before = copy.deepcopy(original.state_dict())
    planned = fp8stack.plan(original, recipe, exclude="0")
    assert [type(layer) for layer in original] == [nn.Linear, nn.ReLU, nn.Linear, nn.Linear]
    assert all(torch.equal(before[key], value) for key, value in original.state_dict().items())
    converted = fp8stack.convert(original, recipe, exclude="0")
    assert fp8stack.plan_of(converted) == planned
    assert str(planned).splitlines() == planned.summary()


@pytest.mark.parametrize(
    ("machine", "backend"),
    [
        ({"capability": "9.0"}, "te"),
        ({"capability": "9.0", "te": False}, "torch"),
        ({"gpu": "H100"}, "te"),
        ({"capability": "8.0"}, "reference"),
        ({"capability": "none"}, "emulate"),
    ],
)
def test_a_model_is_planned_for_a_gpu_that_is_not_here(machine, backend):
    with torch.device("meta"):
        planned = fp8stack.plan(model(), "delayed", **machine)
    assert planned.backend == backend
    in_fp8 = {"te": [True, False, False], "torch": [True, False, False], "emulate": [True] * 3}
    assert [layer.fp8 for layer in planned.layers] == in_fp8.get(backend, [False] * 3)


def test_an_emulated_layer_that_no_gpu_takes_in_fp8_is_noted():
    notes = [line for line in fp8stack.plan(model(), "delayed").summary() if "note:" in line]
    assert notes == [
        "note: emulated here, but on a GPU not in delayed: 2: 50 out features, not divisible by "
        "16; 3: 50 in features, not divisible by 16"
    ]
    even = nn.Sequential(nn.Linear(64, 64))
    assert fp8stack.plan(even, "mxfp8").notes == []
    # No GPU has kernels of FP6, whatever the size.
    assert fp8stack.plan(model(), "mxfp6_e2m3").notes == []
    on_gpu = fp8stack.plan(model(), "mxfp8", capability="9.0")  # emulated there, too
    assert on_gpu.notes == []


def test_bad_input_is_named():
    assert "takes a model" in refusal(fp8stack.plan, "delayed")
    assert "No GPU has compute capability 9.9" in refusal(
        lambda: fp8stack.plan(model(), "delayed", capability="9.9")
    )
    converted = fp8stack.convert(model(), resolve("delayed", Hardware("cpu")))
    assert "converted already" in refusal(fp8stack.plan, converted)
