"""Exported folders in their own scheme, compared with the recipe that exported them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fp8stack
from fp8stack.model.config import load_config
from fp8stack.precision import Hardware, plan_text
from fp8stack.trained.evaluate.divergence import divergence_sum
from fp8stack.trained.evaluate.served_folder import is_folder, served_folder
from fp8stack.trained.export import write_export
from fp8stack.training.load import find_source
from tests.conftest import refusal
from tests.trained.conftest import trained
from tests.trained.evaluate.test_agreement import agree

SHAPE = {"layers": 2, "width": 128, "heads": 2, "mlp_width": 128}
CONFIG, WEIGHTS = "config.json", "model.safetensors"
SCALE = "model.layers.1.mlp.down_proj.input_scale"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    return {
        recipe: trained(tmp_path_factory.mktemp(recipe), model_overrides=SHAPE, recipe=recipe)
        for recipe in ("delayed", "mxfp4")
    }


@pytest.fixture
def export(runs, tmp_path):
    """A function that exports a run in a scheme and returns the folder."""

    def exported(scheme: str | None = None, recipe: str = "delayed") -> Path:
        write_export(runs[recipe], "fp8", tmp_path / "served", scheme=scheme)
        return tmp_path / "served"

    return exported


def changed(folder: Path, change: Any, file: str = CONFIG) -> None:
    """Rewrite a folder's config, or its tensors, after `change` was called with them."""
    if file == CONFIG:
        table = json.loads((folder / file).read_text())
        change(table)
        (folder / file).write_text(json.dumps(table))
    else:
        tensors: dict[str, Tensor] = load_file(folder / file)
        change(tensors)
        save_file(tensors, folder / file, {"format": "pt"})


@pytest.mark.parametrize(
    ("scheme", "p"),
    [
        ("channel", "served:fp8_dynamic"),
        pytest.param("deepseek", "served:fp8_block", marks=pytest.mark.full),
        (None, "delayed"),
    ],
)
def test_a_folder_is_served_as_the_recipe_of_its_scheme(runs, export, scheme, p):
    result = agree(runs["delayed"], p, str(export(scheme)))
    # Weights are multiplied out before the GEMM, and 1 / (1 / scale) may differ in the last bit.
    assert result.kl < 1e-6
    assert agree(runs["delayed"], "fp32", p).kl > 1e-5
    assert result.plans[1].precision == f"{result.recipes[1]}-emulated"
    assert "lm_head" not in result.layers
    shares = [plan_text.forward_share(plan) for plan in result.plans]
    assert shares[1] == shares[0] > 0.5


@pytest.mark.capability("A15")
@pytest.mark.parametrize("scheme", ["channel", "block", None])
@pytest.mark.full
def test_transformers_computes_what_is_said_of_a_folder(export, scheme):
    """compressed-tensors rounds inputs by scales that differ in the last bit: a few of them to the
    next FP8 value."""
    import transformers

    folder = export(scheme)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    weights = find_source(f"hf:{folder}")
    served = served_folder(str(folder), weights.shape).model(Hardware("cpu"), "auto")
    tokens = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        p = reference(tokens).logits.flatten(0, 1)
        of_served, of_weights = (
            divergence_sum(p, model(tokens).flatten(0, 1)) / tokens.numel()
            for model in (served, weights.model("fp32", Hardware("cpu")))
        )
    assert of_served < 0.1 * of_weights
    assert of_weights > 1e-6  # without quantized inputs


def test_a_folder_of_quantized_weights_alone_has_inputs_in_the_compute_dtype(runs, export):
    folder = export(None, "mxfp4")
    group = {"input_activations": None}
    changed(folder, lambda at: quantization(at)["config_groups"]["group_0"].update(group))
    result = agree(runs["mxfp4"], "fp32", str(folder))
    assert {*result.layers} == {
        f"blocks.{i}.{name}"
        for i in (0, 1)
        for name in ("attention.qkv", "attention.output", "mlp.up", "mlp.down")
    }
    loaded = find_source(f"hf:{folder}").model("fp32", Hardware("cpu"))
    served = served_folder(str(folder), loaded.config).model(Hardware("cpu"), "auto")
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        assert torch.equal(served(tokens), loaded(tokens))


@pytest.mark.capability("A15")
def test_swapped_scales_of_two_layers_of_a_folder_are_found(runs, export):
    folder = export("channel")
    scales = [f"model.layers.{i}.self_attn.o_proj.weight_scale" for i in (0, 1)]

    def swap(tensors: dict[str, Tensor]) -> None:
        tensors |= {scales[0]: tensors[scales[1]], scales[1]: tensors[scales[0]]}

    changed(folder, swap, WEIGHTS)
    result = agree(runs["delayed"], "served:fp8_dynamic", str(folder))
    first, second, *unchanged = result.layers
    assert {first, second} == {f"blocks.{i}.attention.output" for i in (0, 1)}
    assert result.layers[second] > 1e-7
    assert max(result.layers[path] for path in unchanged) < result.layers[second] / 10


def quantization(table: dict[str, Any]) -> Any:
    return table["quantization_config"]


def inputs_by_channel(table: dict[str, Any]) -> None:
    quantization(table)["config_groups"]["group_0"]["input_activations"]["strategy"] = "channel"


@pytest.mark.parametrize(
    ("change", "file", "words"),
    [
        (inputs_by_channel, CONFIG, "which no recipe computes. Name the nearest recipe of served:"),
        (lambda tensors: tensors.pop(SCALE), WEIGHTS, f"'{SCALE}' is missing"),
        (lambda tensors: tensors[SCALE].neg_(), WEIGHTS, f"'{SCALE}' holds -"),
        (lambda tensors: tensors.update({SCALE: torch.ones(0)}), WEIGHTS, f"'{SCALE}' is F32 [0],"),
    ],
)
def test_a_folder_that_cannot_be_run_is_refused_in_one_line(
    refused, runs, export, change, file, words
):
    folder = export()
    changed(folder, change, file)
    flags = ("--agree", "--recipes", f"delayed,{folder}")
    assert words in refused("eval", str(runs["delayed"]), *flags)


def test_a_folder_of_another_model_or_of_none_is_refused(refused, runs, export, tmp_path):
    shape = load_config("gpt-nano", SHAPE | {"layers": 1})
    message = refusal(served_folder, str(export("channel")), shape)
    assert "holds a model of another shape" in message
    (tmp_path / "empty").mkdir()
    flags = ("--agree", "--recipes", f"delayed,{tmp_path / 'empty'}")
    assert "config.json is missing" in refused("eval", str(runs["delayed"]), *flags)


def test_a_name_of_a_recipe_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("bf16", "auto", "mine"):
        (tmp_path / name).mkdir()
    assert [is_folder(name) for name in ("bf16", "auto", "mine", "nothing", "hf:nothing")] == [
        *(False, False, True, False, True)
    ]


def test_a_folder_with_a_shorter_context_than_the_windows_is_refused(refused, runs, export):
    folder = export("channel")
    changed(folder, lambda table: table.update(max_position_embeddings=16))
    message = f"The context of '{folder}' is 16, and the windows have 32 tokens. Give --context 16."
    for flags in (["--agree"], []):
        words = ("eval", str(runs["delayed"]), *flags, "--recipes", f"delayed,{folder}")
        refused(*words, message=message)
    assert agree(runs["delayed"], "delayed", str(folder), context=16).kl < 1


def test_the_experts_of_a_folder_share_the_largest_static_scale(tmp_path):
    experts = {"count": 2, "per_token": 1, "width": 64, "shared": 0}
    run = trained(
        tmp_path, model="gpt-nano-moe", model_overrides=SHAPE | {"layers": 1, "experts": experts}
    )
    write_export(run, "fp8", tmp_path / "served")
    assert agree(run, "delayed", str(tmp_path / "served")).kl < 1e-6
    name = "model.layers.0.mlp.experts.1.up_proj.input_scale"
    changed(
        tmp_path / "served", lambda tensors: tensors.update({name: torch.tensor([0.5])}), WEIGHTS
    )
    served = served_folder(str(tmp_path / "served"), fp8stack.load(run).config)
    assert served.input_scales["blocks.0.mlp.experts.up"].tolist() == [2, 2]
