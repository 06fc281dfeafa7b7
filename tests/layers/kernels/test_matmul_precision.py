"""TF32 is torch's setting, which a model's forward pass sets; a CPU shows the switch too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from fp8stack import GPT, GPTConfig, Hardware, build_backend, convert, plan_for, resolve
from fp8stack.layers.kernels.matmul_precision import exact_matmul
from fp8stack.layers.swapped import swapped

AMPERE = Hardware("cuda", (8, 0))
CONFIG = GPTConfig(vocabulary=32, context=8, layers=2, width=16, heads=2)
TOKENS = torch.arange(16).view(2, 8)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision("highest")


class Record(torch.autograd.Function):
    """Passes values and gradients on, and notes the precision of products in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, precisions: list[str]) -> Tensor:
        ctx.precisions = precisions
        precisions.append(torch.get_float32_matmul_precision())
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.precisions.append(torch.get_float32_matmul_precision())
        return gradient.clone(), None


def recorded(module: nn.Module) -> list[str]:
    """The precisions of the passes through `module`, in a list that grows with each."""
    precisions: list[str] = []
    module.register_forward_hook(lambda _, args, output: Record.apply(output, precisions))
    return precisions


def gpt(recipe: str) -> GPT:
    return GPT(CONFIG, build_backend(plan_for(CONFIG, recipe, AMPERE)), seed=0)


@pytest.mark.capability("A12")
def test_each_model_of_a_run_has_its_own_precision():
    models = {"high": gpt("tf32"), "highest": gpt("fp32")}
    precisions = {
        name: recorded(model.get_submodule("blocks.0.mlp.up")) for name, model in models.items()
    }
    for name in ("high", "highest", "high"):
        models[name](TOKENS, TOKENS).backward()
        assert torch.get_float32_matmul_precision() == name
    assert {name: set(noted) for name, noted in precisions.items()} == {
        "high": {"high"},
        "highest": {"highest"},
    }


@pytest.mark.parametrize(("recipe", "expected"), [("tf32", "high"), ("bf16", "medium")])
def test_a_converted_model_changes_the_precision_only_to_tf32(recipe, expected):
    torch.set_float32_matmul_precision("medium")
    model = convert(nn.Sequential(nn.Linear(16, 16)), resolve(recipe, AMPERE))
    model(torch.ones(3, 16))
    assert torch.get_float32_matmul_precision() == expected


def test_a_swapped_layer_has_the_precision_of_its_model():
    model, donor = gpt("fp32"), gpt("tf32")
    path = "blocks.0.mlp.up"
    around = recorded(model.get_submodule("blocks.1.mlp.up"))
    inside = recorded(donor.get_submodule(path))
    with torch.no_grad(), swapped(model, donor, [path]):
        model(TOKENS)
    assert (around, inside) == (["highest"], ["high"])


@pytest.mark.parametrize("ambient", ["highest", "high", "medium"])
def test_exact_products_give_back_what_a_user_set(ambient):
    """Exact products must not round to bfloat16, as oneDNN does for "medium"."""
    mkldnn = cast(Any, torch.backends.mkldnn).matmul
    torch.set_float32_matmul_precision(ambient)
    before = mkldnn.fp32_precision
    with exact_matmul():
        assert mkldnn.fp32_precision in ("ieee", "none")
    assert mkldnn.fp32_precision == before
    assert torch.get_float32_matmul_precision() == ambient


def test_exact_products_give_back_what_a_user_set_by_torchs_newer_switch():
    matmul = torch.backends.cuda.matmul
    matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError):  # the reason why this is a case of its own
        torch.get_float32_matmul_precision()
    with exact_matmul():
        assert matmul.fp32_precision == "ieee"
    assert matmul.fp32_precision == "tf32"
