"""A spike in delayed and in current scaling: what a scale from earlier passes does to it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.support.backend_models import gpt, tokens

LAYER = "blocks.0.mlp.down"


def cast(x: np.ndarray, scale: float) -> np.ndarray:
    """Cast to E4M3 and back by ml_dtypes, clipped before, since its overflow gives NaN."""
    scaled = np.clip(x.astype(np.float64) * scale, -448, 448).astype(np.float32)
    return scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float32) / scale


def outputs(recipe: str, x: torch.Tensor, warm_up: torch.Tensor) -> torch.Tensor:
    """A layer's output for `x` after a training pass over `warm_up`. Its weight is the identity,
    which FP8 holds exactly at any scale that is a power of two."""
    model = gpt(recipe, model={"layers": 1})
    layer = model.get_submodule(LAYER)
    with torch.no_grad():
        weight = layer.get_parameter("weight").zero_()
        weight[:, :32] = torch.eye(32)
    inputs: list[torch.Tensor] = []
    # Only the layer gets these inputs; the model's hooks do the rest.
    layer.register_forward_pre_hook(lambda _, args: (inputs[-1],))
    results: list[torch.Tensor] = []
    layer.register_forward_hook(lambda _, args, y: results.append(y.detach()))
    for layer_input in (warm_up, x):
        inputs.append(layer_input)
        model(tokens(rows=1), tokens(2, rows=1)).backward()
    return results[-1]


@pytest.mark.capability("B3")
def test_delayed_scaling_clips_a_spike_that_current_scaling_keeps() -> None:
    usual = torch.rand(1, 16, 128) * 1.75
    usual[0, 0, 0] = 1.75  # the amax: a scale of 256
    spiked = usual.clone()
    spiked[0, 3, 5] = 14.0  # eight times
    delayed = outputs("delayed", spiked, usual)[0]
    current = outputs("current", spiked, usual)[0]
    assert float(delayed[3, 5]) == pytest.approx(1.75)  # what 448 stands for at the old scale
    assert float(current[3, 5]) == pytest.approx(14.0)
    x = spiked[0, :, :32].numpy()
    np.testing.assert_allclose(delayed.numpy(), cast(x, 256.0), rtol=1e-6)
    np.testing.assert_allclose(current.numpy(), cast(x, 32.0), rtol=1e-6)


@pytest.mark.capability("B4")
def test_after_the_spike_the_scale_stays_low_as_long_as_the_history_remembers() -> None:
    usual = torch.full((1, 16, 128), 1.75)
    spiked = usual.clone()
    spiked[0, 3, 5] = 14.0
    after = torch.full((1, 16, 128), 2.0**-16)  # below half of E4M3's least value at the low scale
    delayed = outputs("delayed", after, spiked)[0]
    current = outputs("current", after, spiked)[0]
    assert (cast(after[0, :, :32].numpy(), 32.0) == 0).all()
    assert (delayed == 0).all()
    np.testing.assert_allclose(current.numpy(), 2.0**-16, rtol=1e-6)
