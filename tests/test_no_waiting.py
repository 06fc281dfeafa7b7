"""On a device other than a CPU, a pass asks the device for no number: the host runs ahead.

Tensors on the meta device have no values, so `float(t)`, `bool(t)` and `t.item()` raise there, and
the code takes the paths of a GPU. What a GPU's kernels do is in tests/gpu/test_gpu_sync.py.
"""

from __future__ import annotations

import pytest
import torch

from fp8stack import numerics
from fp8stack.backends import build_backend
from fp8stack.model import GPT, GPTConfig, plan_for
from fp8stack.precision import Hardware

H100, B200 = Hardware("cuda", (9, 0)), Hardware("cuda", (10, 0))
CONFIG = GPTConfig(vocabulary=256, context=128, layers=2, width=128, heads=4)


def model_on_meta(recipe: str, backend: str) -> GPT:
    hardware = B200 if recipe == "mxfp8" else H100
    plan = plan_for(CONFIG, recipe, hardware, backend)
    return GPT(CONFIG, build_backend(plan)).to("meta")


@pytest.mark.parametrize("backend", ["torch", "emulate"])
@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8"])
def test_forward_and_backward_ask_for_no_number(recipe: str, backend: str) -> None:
    model = model_on_meta(recipe, backend)
    tokens = torch.zeros(2, 128, dtype=torch.int64, device="meta")
    for _ in range(2):
        loss = model(tokens, tokens)
        loss.backward()
    assert loss.device.type == "meta"
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in gradients)


def test_a_pass_on_the_meta_device_fails_where_a_number_is_asked_for() -> None:
    with pytest.raises(RuntimeError):
        float(numerics.amax(torch.ones(2, device="meta")))
