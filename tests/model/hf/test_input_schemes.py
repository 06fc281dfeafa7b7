"""The quantizers of inputs that `quantization_config`s name."""

from __future__ import annotations

from typing import Any

import pytest

from fp8stack.common.formats import Quantizer
from fp8stack.model.hf.input_schemes import BY_TOKEN, STATIC, inputs_of_fp8, inputs_of_group
from fp8stack.precision import load_recipe

FLOAT = {"type": "float", "symmetric": True}
FP8, FP4 = FLOAT | {"num_bits": 8}, FLOAT | {"num_bits": 4}


def input_of(recipe: str) -> Quantizer | None:
    table = load_recipe(recipe).quantizers
    assert table is not None
    return table.input


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
    assert inputs_of_group(table) == input_of(recipe)


def test_static_inputs_have_one_scale_of_the_folder():
    static = inputs_of_group(FP8 | {"strategy": "tensor", "dynamic": False})
    assert static == inputs_of_fp8({"activation_scheme": "static"}, Quantizer()) == STATIC
    assert STATIC.delayed
    assert inputs_of_group(FP8 | {"strategy": "tensor", "dynamic": True}) == Quantizer()


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (Quantizer(block=(128, 128)), Quantizer(block=(1, 128))),
        (
            Quantizer(block=(128, 128), scale="power_of_two"),
            Quantizer(block=(1, 128), scale="power_of_two"),
        ),
        (Quantizer(), BY_TOKEN),
    ],
)
def test_inputs_of_deepseeks_scheme_follow_the_weights(weight, expected):
    assert inputs_of_fp8({}, weight) == expected
    assert inputs_of_fp8({"activation_scheme": "dynamic"}, weight) == expected


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (FP8 | {"strategy": "token", "dynamic": False}, "static inputs of 8 bits"),
        (FP8 | {"strategy": "group", "group_size": 64, "dynamic": True}, "group_size = 64"),
        ({"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}, "strategy = token"),
        ("token", "input_activations that are no table"),
    ],
)
def test_an_unknown_scheme_of_inputs_is_named(table: Any, words: str):
    unknown = inputs_of_group(table)
    assert isinstance(unknown, str)
    assert words in unknown


def test_an_unknown_scheme_of_deepseeks_inputs_is_named():
    by_block = Quantizer(block=(128, 128))
    assert inputs_of_fp8({"activation_scheme": "static"}, by_block) == (
        "inputs with activation_scheme = static"
    )
    unknown = inputs_of_fp8({}, Quantizer(block=(32, 32)))
    assert isinstance(unknown, str)
    assert "blocks of (32, 32)" in unknown
