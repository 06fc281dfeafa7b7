"""Layers of every backend against a float64 oracle and against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8stack.layers import fp8_state
from fp8stack.layers.linear import CastLinear, QuantizedLinear
from fp8stack.model.gpt import Loss
from tests.support.backend_models import (
    AMPERE,
    RECIPES,
    WAYS,
    gpt,
    grad,
    gradients,
    linear,
    tokens,
)
from tests.support.gemm_oracle import assert_all_close, normal, oracle, run

pytestmark = pytest.mark.usefixtures("one_thread", "te_throughout")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_bfloat16_layer_rounds_its_operands_first_and_its_results_last(recipe):
    layer, _ = linear(recipe, 96, 40, hardware=AMPERE)
    x, dy = normal(12, 96, seed=1), normal(12, 40, seed=2).bfloat16()
    y, dx, dw, db = run(layer, x, dy)
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert_all_close([y, dx, dw, db], oracle(recipe, layer, x.bfloat16(), dy), 2.0**-8)
    expected = oracle(recipe, layer, x.bfloat16(), dy)[2]
    assert (dw - expected).abs().max() <= 1e-5 * expected.abs().max()  # a float32 master's


@pytest.mark.parametrize(("recipe", "backend"), WAYS)
def test_the_layout_of_the_operands_and_their_leading_dimensions_do_not_matter(recipe, backend):
    layer, flat, turned, _ = (linear(recipe, 32, 64, backend=backend)[0] for _ in range(4))
    x, dy = normal(6, 10, 32, seed=1), normal(6, 10, 64, seed=2).to(layer.compute_dtype)
    expected = run(layer, x, dy)
    y, dx, *gradients_of_rows = run(flat, x.view(60, 32), dy.view(60, 64))
    results = [y.view(6, 10, 64), dx.view(6, 10, 32), *gradients_of_rows]
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    odd_x = x.transpose(0, 1).contiguous().transpose(0, 1)
    odd_dy = dy.transpose(0, 1).contiguous().transpose(0, 1)
    results = run(turned, odd_x, odd_dy)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert layer(x[0, 0]).shape == (64,)
    # A sum's gradient is one number expanded.
    x.requires_grad_()
    layer(x[:, ::2]).sum().backward()
    assert x.grad[:, ::2].any()
    assert not x.grad[:, 1::2].any()


@pytest.mark.parametrize(("recipe", "backend"), [way for way in WAYS if way[1] != "emulate"])
def test_padded_rows_give_the_numbers_of_rows_of_zeros(recipe, backend):
    rows, padded_rows = 13, 32 if recipe == "mxfp8" else 16

    def results(padding):
        layer, _ = linear(recipe, 64, 32, backend=backend)
        x = normal(rows, 64)
        x = torch.cat([x, x.new_zeros(padding, 64)]).requires_grad_()
        for step in range(2):
            y = layer(x)[:rows]
            y.backward(normal(rows, 32, seed=step).to(y.dtype))
        return [y, grad(x)[:rows], *gradients(layer).values(), *fp8_state(layer).values()]

    for tensor, padded_tensor in zip(results(0), results(padded_rows - rows), strict=True):
        assert torch.equal(tensor, padded_tensor)


# Counting, and what is left out


@pytest.mark.parametrize(("recipe", "backend"), WAYS)
def test_only_the_gradients_that_are_needed_are_computed_and_counted(recipe, backend):
    layer, built_backend = linear(recipe, 32, 64, backend=backend)
    x = normal(16, 32)

    def gemms(x):
        layer.zero_grad()
        y = layer(x)
        forward = built_backend.fp8_gemms()
        if y.requires_grad:
            y.sum().backward()
        return forward, built_backend.fp8_gemms(), built_backend.fp8_gemms()

    assert gemms(x) == (1, 1, 0)
    x.requires_grad_()
    assert gemms(x) == (1, 2, 0)
    layer.weight.requires_grad_(False)
    assert gemms(x) == (1, 1, 0)
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
    with torch.no_grad():
        assert not layer(x).requires_grad
        assert built_backend.fp8_gemms() == 1
    layer.bias.requires_grad_(False)
    assert not layer(x.detach()).requires_grad


@pytest.mark.parametrize(
    ("recipe", "options", "layers"),
    [
        ("block", {}, 8),
        ("mxfp8", {"head": True}, 9),
        ("delayed", {"exclude": ("*.down", "blocks.1.attention.qkv")}, 5),
        ("current", {"exclude_first_blocks": 1, "head": True}, 5),
        ("fp32", {}, 0),
        ("bf16", {}, 0),
    ],
)
def test_a_model_runs_just_the_planned_layers_in_fp8(recipe, options, layers):
    model = gpt(recipe, "auto", **options)
    kinds = {name: type(m) for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert list(kinds.values()).count(QuantizedLinear) == layers
    assert set(kinds.values()) <= {QuantizedLinear, CastLinear if recipe == "bf16" else nn.Linear}
    loss = model(tokens(), tokens(2))
    assert model.backend.fp8_gemms() == layers
    loss.backward()
    assert model.backend.fp8_gemms() == 2 * layers
    excluded = {"delayed": "blocks.0.mlp.down", "current": "blocks.0.mlp.up", "mxfp8": "embedding"}
    if options:
        assert kinds.get(excluded[recipe]) in (nn.Linear, None)


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_models_of_other_recipes_beside_it_do_not_influence_a_model(recipe):
    alone, beside, losses = gpt(recipe), gpt(recipe), []
    neighbours = [gpt(neighbour, "auto") for neighbour in [*RECIPES, "fp32", "bf16"]]
    for model in (alone, beside):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss = model(tokens(step), tokens(step + 1))
            for neighbour in neighbours if model is beside else ():
                neighbour(tokens(9), tokens(8)).backward()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]
    assert beside.backend.fp8_gemms() == 3 * 3 * 8


# Plain torch


@pytest.mark.capability("A7")
def test_the_recipe_fp32_is_plain_torch_to_the_bit():
    model = gpt("fp32", "auto")
    assert {type(m) for m in model.modules() if not list(m.children())} == {
        nn.Embedding, nn.Dropout, nn.LayerNorm, nn.Linear, Loss,
    }  # fmt: skip
    parameters, plain = dict(model.named_parameters()), {}
    for name, parameter in parameters.items():
        plain[name] = parameter.detach().clone().requires_grad_()

    def layer(x: Tensor, path: str) -> Tensor:
        return F.linear(x, plain[f"{path}.weight"], plain[f"{path}.bias"])

    def norm(x: Tensor, path: str) -> Tensor:
        return F.layer_norm(x, (32,), plain[f"{path}.weight"], plain[f"{path}.bias"])

    def heads(x: Tensor) -> Tensor:
        return x.view(2, 16, 4, 8).transpose(1, 2)

    x = F.embedding(tokens(), plain["embedding.weight"]) + plain["position_embedding.weight"]
    for path in ("blocks.0", "blocks.1"):
        q, k, v = layer(norm(x, f"{path}.attention_norm"), f"{path}.attention.qkv").chunk(3, -1)
        y = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True)
        x = x + layer(y.transpose(1, 2).reshape(2, 16, 32), f"{path}.attention.output")
        hidden = F.gelu(layer(norm(x, f"{path}.mlp_norm"), f"{path}.mlp.up"), approximate="tanh")
        x = x + layer(hidden, f"{path}.mlp.down")
    logits = F.linear(norm(x, "final_norm"), plain["embedding.weight"])
    loss = F.cross_entropy(logits.view(-1, 64), tokens(2).view(-1))
    assert torch.equal(model(tokens()), logits)
    model(tokens(), tokens(2)).backward()
    loss.backward()
    for name, parameter in parameters.items():
        assert torch.equal(grad(parameter), grad(plain[name])), name
    assert model.backend.fp8_gemms() == 0


@pytest.mark.parametrize("recipe", ["bf16", "fp16"])
def test_a_plain_half_precision_linear_computes_in_it_on_float32_masters(recipe):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[recipe]
    model = gpt(recipe, "auto")
    calls = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert type(module) is CastLinear
            module.register_forward_hook(lambda m, a, y, name=name: calls.update({name: (m, a, y)}))
    model(tokens(), tokens(2)).backward()
    assert len(calls) == 9
    for module, (x,), y in calls.values():
        bias = None if module.bias is None else module.bias.to(dtype)
        assert torch.equal(y, F.linear(x.to(dtype), module.weight.to(dtype), bias))
        assert y.dtype == dtype
    assert model.backend.fp8_gemms() == 0


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "delayed", "mxfp8"])
def test_norms_and_the_residual_stream_are_float32_in_every_recipe(recipe):
    model = gpt(recipe, "auto")
    dtypes = []
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.register_forward_hook(lambda m, args, y: dtypes.append((args[0].dtype, y.dtype)))
    model(tokens())
    assert dtypes == [(torch.float32, torch.float32)] * 5
