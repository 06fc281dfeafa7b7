"""The tables of `kernels.activations` have an entry for every activation of a model."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from fp8stack import GPTConfig
from fp8stack.layers.kernels.activations import ACTIVATIONS, GRADIENTS
from fp8stack.layers.kernels.fused_casts import FusedInput
from fp8stack.model.config import ActivationName

NAMES: tuple[ActivationName, ...] = get_args(ActivationName)


@pytest.mark.parametrize("name", NAMES)
def test_an_activation_turns_the_outputs_of_the_first_linear_into_the_inner_width(name):
    config = GPTConfig(
        vocabulary=8, context=4, layers=1, width=8, heads=2, mlp_width=12, activation=name
    )
    shapes = config.linear_shapes()
    hidden = torch.ones(3, shapes["blocks.0.mlp.up"][1])
    assert shapes["blocks.0.mlp.down"][0] == 12
    assert ACTIVATIONS[name](hidden).shape == FusedInput(name, hidden).shape == (3, 12)
    assert GRADIENTS[name](hidden, torch.ones(3, 12)).shape == hidden.shape
