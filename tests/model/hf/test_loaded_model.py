"""`convert` on models that transformers dequantized as it loaded them."""

from __future__ import annotations

import shutil

import pytest
import torch

import fp8stack
from fp8stack import GPTConfig
from tests.support.hf_models import export_to, loaded, logits, random_model, tokens
from tests.support.quantized_folders import MODELS, dequantized, write_quantized

SENTENCES = {
    "deepseek": "FP8 with a float32 scale per block of 128 x 128 (weight_scale_inv), nearest "
    "--recipe block --set recipe.quantizer.scale=float32",
    "mxfp4": "FP4 with an E8M0 scale per 32 values (mxfp4-pack-quantized), nearest --recipe mxfp4",
}


@pytest.mark.parametrize("layout", [pytest.param("deepseek", marks=pytest.mark.full), "mxfp4"])
def test_a_converted_model_names_the_scheme_that_its_weights_come_from(layout, tmp_path):
    values = write_quantized(tmp_path / "x", layout)
    model = dequantized(tmp_path / "x", fp8=layout == "deepseek")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(model.get_parameter(name), values[name])
    converted = fp8stack.convert(model, "current")
    sentence = f"the weights come from {tmp_path / 'x'}: {SENTENCES[layout]}"
    assert sentence in converted.fp8_plan.reasons
    assert logits(converted, tokens(256)).isfinite().all()


@pytest.mark.full
def test_a_model_of_another_folder_or_of_none_names_no_scheme(tmp_path):
    write_quantized(tmp_path / "x", "deepseek")
    model = dequantized(tmp_path / "x", fp8=True)
    plain = loaded(export_to(tmp_path / "plain", random_model(GPTConfig(**MODELS["llama"]))))
    shutil.rmtree(tmp_path / "x")
    built = type(model)(model.config)
    for unquantized in (plain, built, model):
        plan = fp8stack.convert(unquantized, "current").fp8_plan
        assert not any("the weights come from" in reason for reason in plan.reasons)
