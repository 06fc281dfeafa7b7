"""Hands the scales of Transformer Engine over by the functions of docs/integrations.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8stack import fp8_state
from tests.docs.docs_commands import ROOT, blocks
from tests.integrations.loops import converted
from tests.support.backend_models import normal, same
from tests.support.te import te_stand_in

LENGTH = 16  # amax histories
LAYERS = {"proj": ["out"], "mlp": ["up", "down"]}


class TEModel(nn.Module):
    """One linear and one module of two GEMMs, as in Megatron-LM's layers."""

    def __init__(self) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        options = {"params_dtype": torch.float32, "device": "cpu", "bias": False}
        self.proj = te.Linear(32, 32, **options)
        self.mlp = te.LayerNormMLP(32, 64, activation="srelu", normalization="RMSNorm", **options)
        for seed, parameter in enumerate(self.parameters()):
            with torch.no_grad():
                parameter.copy_(normal(*parameter.shape, seed=seed, std=0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.proj(x))


class ConvertedModel(nn.Module):
    """The same linears by other names."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(32, 32, bias=False)
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.out(x)).relu())


def trained_te() -> TEModel:
    from transformer_engine.common.recipe import DelayedScaling, Format
    from transformer_engine.pytorch import autocast

    recipe = DelayedScaling(
        fp8_format=Format.HYBRID, amax_history_len=LENGTH, amax_compute_algo="max"
    )
    model = TEModel()
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16), autocast(enabled=True, recipe=recipe):
            y = model(normal(32, 32, seed=step, std=step + 1))
        y.float().square().mean().backward()
    return model


@pytest.fixture(scope="module")
def documented() -> dict[str, Any]:
    """The definitions of the page's two code blocks."""
    names: dict[str, Any] = {}
    for block in blocks((ROOT / "docs/integrations.md").read_text()):
        if "_te_scales" in block.text:
            exec(block.text, names)
    return names


def test_the_page_hands_the_scales_of_te_over(documented, tmp_path):
    recipe = tmp_path / "te.toml"
    recipe.write_text(f'like = "delayed"\nhistory_length = {LENGTH}\n')
    with te_stand_in.installed() as te:
        te_model = trained_te()
        documented["save_te_scales"](te_model, LAYERS, tmp_path / "scales.safetensors")
        mlp = te_model.mlp.fp8_meta
        down = te.source.index(True, "weight", 2), te.source.index(False, "grad_output", 2)
    model = converted(ConvertedModel(), str(recipe))
    before = fp8_state(model)
    documented["load_te_scales"](model, tmp_path / "scales.safetensors")
    state = fp8_state(model)
    assert state.keys() == before.keys()
    assert all(history[1:].any() for name, history in state.items() if name.endswith("_history"))
    assert torch.equal(state["down.weight.scale"], mlp["scaling_fwd"].scale[down[0]])
    assert torch.equal(state["down.grad_output.scale"], mlp["scaling_bwd"].scale[down[1]])
    assert torch.equal(
        state["down.weight.amax_history"], mlp["scaling_fwd"].amax_history[:, down[0]]
    )
    model(normal(32, 32)).square().mean().backward()  # trains on from these scales
    assert not same(fp8_state(model), state)
