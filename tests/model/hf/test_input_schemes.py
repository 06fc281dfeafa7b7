"""The quantizers of inputs that `quantization_config`s name."""

from __future__ import annotations

from typing import Any

import pytest

from fp8stack.common.formats import Quantizer
from fp8stack.model.hf.input_schemes import BY_TOKEN, STATIC, inputs_of_fp8, inputs_of_group
from fp8stack.precision import load_recipe

FLOAT = {"type": "float", "symmetric": True}
FP8, FP4 = FLOAT | {"num_bits": 8}, FLOAT | {"num_bits": 4}
BLOCKS = Quantizer(block=(128, 128))


@pytest.mark.parametrize(
    ("table", "recipe"),
    [
        (FP8 | {"strategy": "token", "dynamic": True}, "served:fp8_dynamic"),
        (FP8 | {"strategy": "group", "group_size": 128, "dynamic": True}, "served:fp8_block"),
        (FP4 | {"strategy": "tensor_group", "group_size": 16, "dynamic": "local"}, "served:nvfp4"),
        (None, "served:mxfp4"),
    ],
)
def test_inputs_of_compressed_tensors_are_those_of_the_served_recipe(table, recipe):
    served: Any = load_recipe(recipe).quantizers
    assert inputs_of_group(table) == served.input


def test_static_inputs_have_one_scale_and_those_of_deepseeks_scheme_follow_the_weights():
    static = inputs_of_group(FP8 | {"strategy": "tensor", "dynamic": False})
    assert static == inputs_of_fp8({"activation_scheme": "static"}, Quantizer()) == STATIC
    assert STATIC.delayed
    assert inputs_of_group(FP8 | {"strategy": "tensor", "dynamic": True}) == Quantizer()
    assert inputs_of_fp8({}, BLOCKS) == Quantizer(block=(1, 128))
    power_of_two = Quantizer(block=(128, 128), scale="power_of_two")
    expected = Quantizer(block=(1, 128), scale="power_of_two")
    assert inputs_of_fp8({"activation_scheme": "dynamic"}, power_of_two) == expected
    assert inputs_of_fp8({}, Quantizer()) == BY_TOKEN


@pytest.mark.parametrize(
    ("unknown", "words"),
    [
        (inputs_of_group(FP8 | {"strategy": "token", "dynamic": False}), "static inputs of 8 bits"),
        (
            inputs_of_group(FP8 | {"strategy": "group", "group_size": 64, "dynamic": True}),
            "group_size = 64",
        ),
        (inputs_of_group("token"), "input_activations that are no table"),
        (inputs_of_fp8({"activation_scheme": "static"}, BLOCKS), "with activation_scheme = static"),
        (inputs_of_fp8({}, Quantizer(block=(32, 32))), "blocks of (32, 32)"),
    ],
)
def test_an_unknown_scheme_of_inputs_is_named(unknown, words):
    assert isinstance(unknown, str)
    assert words in unknown
