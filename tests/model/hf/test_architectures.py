"""Every activation of a model has a layout of transformers, which is read back and compared."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from fp8stack import GPTConfig
from fp8stack.common.errors import UserError
from fp8stack.model.config import ActivationName
from fp8stack.model.hf.architectures import config_json, layout_of, reader_notes
from fp8stack.model.hf.reading import model_from_config
from tests.support.hf_models import BASE, ROPE, SHAPES


def exportable(activation: str) -> list[GPTConfig]:
    """Models with this activation, one for each layout that has it."""
    configs: list[GPTConfig] = []
    shapes: tuple[dict[str, Any], ...] = (BASE, ROPE, ROPE | {"qk_norm": True})
    for shape in shapes:
        config = GPTConfig(**shape | {"activation": activation})
        try:
            layout_of(config)
        except UserError:
            continue
        configs.append(config)
    return configs


@pytest.mark.parametrize("activation", get_args(ActivationName))
def test_every_activation_has_a_layout_and_is_read_back(activation):
    configs = exportable(activation)
    assert configs != []
    for config in configs:
        table = config_json(config, "float32", None)
        assert model_from_config(table, "config.json").config.activation == activation


@pytest.mark.parametrize(
    ("name", "normalize", "readers"),
    [
        ("olmoe", True, ["vLLM and llama.cpp do not normalize"]),
        ("olmoe", False, []),
        ("qwen3_moe", False, ["llama.cpp normalizes"]),
        ("mixtral", True, []),
    ],
)
def test_readers_that_normalize_the_weights_of_experts_otherwise_are_named(
    name, normalize, readers
):
    experts = SHAPES[name]["experts"] | {"normalize": normalize}
    requirement, *warnings = reader_notes(GPTConfig(**SHAPES[name] | {"experts": experts}))
    assert f"weights that are {'' if normalize else 'not '}normalized, " in requirement
    assert len(warnings) == len(readers)
    for warning, words in zip(warnings, readers, strict=True):
        assert warning.startswith(f"{words} the weights of experts in any {name} model")
