"""Mixtures of experts against transformers' and against formulas, in models of every recipe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fp8stack.layers import build_backend
from fp8stack.model.config import Experts, GPTConfig, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.model.mixture import MixtureMLP, choose
from tests.support.backend_models import CPU, adam, grad, gradients, machine
from tests.support.cases import case
from tests.support.te.te_stand_in import installed

MIXTURE: dict[str, Any] = {"count": 4, "per_token": 2, "width": 32}
TINY: dict[str, Any] = {
    "vocabulary": 64, "context": 16, "layers": 2, "width": 32, "heads": 2, "norm": "rmsnorm",
    "activation": "swiglu", "positions": "rope", "bias": False, "tied": False,
}  # fmt: skip


def shape(experts: dict[str, Any] | None = None, **keys: Any) -> GPTConfig:
    return GPTConfig.model_validate(TINY | {"experts": MIXTURE | (experts or {})} | keys)


def built(config: GPTConfig, recipe: str = "fp32") -> GPT:
    return GPT(config, build_backend(plan_for(config, recipe, CPU)))


def tokens(rows: int = 2, seed: int = 1) -> torch.Tensor:
    return torch.randint(64, (rows, 16), generator=torch.Generator().manual_seed(seed))


def trained_once(model: GPT, rows: int = 2) -> torch.Tensor:
    """The loss of a pass, whose gradients are in the model."""
    x = tokens(rows)
    loss = model(x, (5 * x + 3) % 64)
    loss.backward()
    return loss.detach()


def mixture(model: GPT, block: int = 0) -> MixtureMLP:
    mlp = model.blocks[block].mlp
    assert isinstance(mlp, MixtureMLP)
    return mlp


def spread(model: GPT, factor: float = 50) -> GPT:
    """The model with larger logits of routers, so that experts get different numbers of tokens."""
    with torch.no_grad():
        for block in model.blocks:
            if isinstance(block.mlp, MixtureMLP):
                block.mlp.router.weight.mul_(factor)
    return model


@pytest.mark.capability("A14")
@pytest.mark.parametrize("normalize", [True, False])
def test_the_outputs_and_gradients_are_those_of_transformers(normalize):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    model = spread(built(shape({"normalize": normalize})))
    mixture_mlp = mixture(model)
    config = Qwen3MoeConfig(
        hidden_size=32, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
        norm_topk_prob=normalize, hidden_act="silu",
    )  # fmt: skip
    reference = Qwen3MoeSparseMoeBlock(config)
    pairs = {
        reference.gate.weight: mixture_mlp.router.weight,
        reference.experts.gate_up_proj: mixture_mlp.experts.up.weight,
        reference.experts.down_proj: mixture_mlp.experts.down.weight,
    }
    with torch.no_grad():
        for their, our in pairs.items():
            their.copy_(our)
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(3, 8, 32, generator=generator) for _ in range(2))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    y, _ = mixture_mlp(inputs[0])
    expected = reference(inputs[1])
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-7)
    y.backward(dy)
    expected.backward(dy)
    torch.testing.assert_close(grad(inputs[0]), grad(inputs[1]), rtol=1e-4, atol=1e-6)
    for their, our in pairs.items():
        torch.testing.assert_close(grad(our), grad(their), rtol=1e-4, atol=1e-6)


def test_of_equal_scores_the_experts_of_lower_index_are_chosen():
    logits = torch.tensor([[[0.0, 0, 0, 0], [1, 2, 1, 1], [0, 1, 0, 1]]])
    choice, routing = choose(logits, Experts(**MIXTURE), None)
    assert choice.experts.tolist() == [[[0, 1], [1, 0], [1, 3]]]
    assert routing.counts.tolist() == [2, 3, 0, 1]
    torch.testing.assert_close(choice.weights.sum(-1), torch.ones(1, 3))


def test_a_bias_chooses_experts_and_changes_no_routing_weight():
    config = Experts(**MIXTURE | {"bias": 0.5, "normalize": False})
    logits = torch.tensor([[[3.0, 2, 1, 0]]])
    choice, _ = choose(logits, config, torch.tensor([0.0, 0, 0, 2]))
    assert choice.experts.tolist() == [[[3, 0]]]
    assert torch.equal(choice.weights[0, 0], logits.softmax(-1)[0, 0, [3, 0]])


def test_the_losses_of_a_router_are_their_formulas_sequence_by_sequence():
    logits = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)
    config = Experts(**MIXTURE | {"balance": 0.25, "router_z": 0.125})
    _, routing = choose(torch.from_numpy(logits), config, None)
    balances, squares = [], []
    for sequence in logits.astype(np.float64):
        scores = np.exp(sequence) / np.exp(sequence).sum(1, keepdims=True)
        counts = np.bincount(np.argsort(-sequence)[:, :2].ravel(), minlength=4)
        balances.append(sum(4 / (2 * 5) * counts * scores.mean(0)))
        squares.append(np.log(np.exp(sequence).sum(1)) ** 2)
    assert float(routing.balance) == pytest.approx(np.mean(balances), rel=1e-6)
    loss = 0.25 * np.mean(balances) + 0.125 * np.mean(squares)
    assert float(routing.loss) == pytest.approx(loss, rel=1e-6)


def test_routers_compute_in_float32_under_autocast_as_well():
    router = mixture(built(shape(), "delayed")).router
    x = torch.randn(2, 4, 32)
    expected = x @ router.weight.t()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(router(x), expected)


@pytest.mark.capability("A14")
def test_the_losses_of_routers_are_in_the_gradients_and_not_in_the_loss():
    plain, balanced = (built(shape({"balance": balance})) for balance in (0.0, 1.0))
    assert torch.equal(trained_once(plain), trained_once(balanced))
    model = built(shape({"balance": 1.0}))
    _, routing = mixture(model, 1)(torch.randn(2, 16, 32))
    assert routing.loss.requires_grad
    weights = [grad(mixture(m, 1).router.weight) for m in (plain, balanced)]
    assert not torch.equal(*weights)
    # With loss scaling, both gradients are scaled.
    x = tokens()
    (model(x, (5 * x + 3) % 64) * 8).backward()
    scaled = grad(mixture(model, 1).router.weight)
    assert torch.equal(scaled, 8 * weights[1])


def test_micro_batches_have_the_gradients_of_the_batch():
    together, apart = built(shape({"balance": 1.0})), built(shape({"balance": 1.0}))
    trained_once(together, rows=4)
    x = tokens(4)
    for micro_batch in x.chunk(4):
        (apart(micro_batch, (5 * micro_batch + 3) % 64) / 4).backward()
    for name, gradient in gradients(together).items():
        torch.testing.assert_close(grad(apart.get_parameter(name)), gradient, rtol=1e-4, atol=1e-7)
    assert together.routing.counts is not None
    assert apart.routing.counts is not None
    assert torch.equal(together.routing.counts, apart.routing.counts)
    assert (together.routing.passes, apart.routing.passes) == (1, 4)


def test_no_token_is_dropped_if_all_choose_the_same_experts():
    model = built(shape())
    with torch.no_grad():
        mixture(model).router.weight.zero_()
    trained_once(model)
    assert model.routing.counts is not None
    assert model.routing.counts[0].tolist() == [32, 32, 0, 0]
    assert grad(mixture(model).experts.up.weight)[:2].any()
    assert not grad(mixture(model).experts.up.weight)[2:].any()


@pytest.mark.parametrize("recompute", ["block", "selective"])
def test_blocks_that_run_again_change_no_gradient_and_count_no_token_twice(recompute):
    models = [spread(built(shape({"shared": 1}), "delayed")) for _ in range(2)]
    models[1].recompute = recompute
    for _ in range(2):
        losses = [trained_once(model) for model in models]
        assert torch.equal(*losses)
    for name, gradient in gradients(models[0]).items():
        assert torch.equal(grad(models[1].get_parameter(name)), gradient), name
    counts = [model.routing.counts for model in models]
    assert counts[0] is not None
    assert counts[1] is not None
    assert torch.equal(counts[0], counts[1])
    assert counts[0].sum() == 2 * 2 * 2 * 16 * 2  # passes, layers, rows, tokens, experts


@pytest.mark.parametrize(
    ("recipe", "backend", "recompute"),
    [
        case("bf16", "aot_eager", "none", quick=True),
        case("delayed", "aot_eager", "selective", quick=False),
        case("mxfp8", "inductor", "none", quick=False),
    ],
)
@pytest.mark.full
def test_a_compiled_mixture_trains_as_in_eager_mode_and_is_compiled_once(
    recipe, backend, recompute
):
    torch.compiler.reset()
    config = shape({"shared": 1, "bias": 0.1}, layers=1)
    models = [spread(built(config, recipe)) for _ in range(2)]
    models[1].recompute = recompute
    models[1].compile_blocks(backend)
    optimizers = [adam(model) for model in models]
    compiled, counts = torch._dynamo.utils.counters["stats"], set()
    graphs = 0
    for step in range(6):
        x = tokens(seed=step)
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            model.routing.begin()
            losses.append(model(x, (5 * x + 3) % 64))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
            assert model.routing.counts is not None
            model.update_biases(model.routing.counts, torch.tensor(False))
        counts.add(str(models[1].routing.counts))
        torch.testing.assert_close(*losses, rtol=1e-6 if backend == "aot_eager" else 2e-2, atol=0)
        if step == 2:
            graphs = compiled["unique_graphs"]
    assert compiled["unique_graphs"] == graphs > 0
    assert len(counts) == 6


def learned(recipe: str) -> float:
    """The loss of a mixture after some steps."""
    config = shape({"shared": 1, "first_dense": 1, "bias": 0.01}, qk_norm="width", head_width=16)
    model = built(config, recipe)
    optimizer = adam(model)
    losses = []
    for step in range(20):
        x = tokens(4, seed=step)
        loss = model(x, (5 * x + 3) % 64)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]
    if plan_for(config, recipe, CPU).is_fp8:
        assert mixture(model, 1).experts.up.in_fp8
    return sum(losses[-4:]) / 4


@pytest.fixture(scope="module")
def learned_in_fp32() -> float:
    return learned("fp32")


@pytest.mark.capability("A14")
@pytest.mark.parametrize(
    "recipe",
    ["delayed", "nvfp4", *(pytest.param(r, marks=pytest.mark.full) for r in ("bf16", "block"))],
)
def test_a_mixture_learns_in_every_recipe_as_in_fp32(recipe, learned_in_fp32):
    near = 0.05 if recipe == "nvfp4" else 0.02
    assert learned(recipe) == pytest.approx(learned_in_fp32, rel=near)


@pytest.mark.parametrize(("recipe", "backend"), [("delayed", "te"), ("current", "torch")])
def test_the_backends_of_gpus_train_a_mixture_as_the_emulator_does(recipe, backend):
    config = shape({"shared": 1}, width=64)
    losses = {}
    with installed():
        for name in ("emulate", backend):
            hardware = CPU if name != "te" else machine(recipe)
            plan = replace(plan_for(config, recipe, hardware, name), device="cpu")
            model = GPT(config, build_backend(plan))
            assert plan.layer("blocks.0.mlp.experts.up").fp8
            losses[name] = [float(trained_once(model)) for _ in range(2)]
            assert grad(mixture(model).experts.up.weight).any()
            assert grad(mixture(model).router.weight).any()
    assert losses[backend] == pytest.approx(losses["emulate"], rel=2e-3)


@pytest.mark.parametrize("recipe", ["fp32", "current"])
def test_a_cache_generates_the_logits_of_the_whole_sequence(recipe):
    model = spread(built(shape({"shared": 1}), recipe)).eval()
    x = tokens(1)
    with torch.no_grad():
        expected = model(x)
        cache = model.new_cache()
        steps = [model(x[:, i : i + 1], cache=cache) for i in range(x.shape[1])]
    rtol = 1e-4 if recipe == "fp32" else 0.1  # current scaling sees other tokens
    torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=rtol, atol=rtol / 10)
    assert model.routing.counts is None


def test_biases_rise_for_experts_below_the_mean_and_only_after_good_steps():
    mlp = mixture(built(shape({"bias": 0.25})))
    assert mlp.balance_bias is not None
    counts = torch.tensor([4, 10, 6, 4])
    mlp.update_bias(counts, torch.tensor(True))
    assert mlp.balance_bias.tolist() == [0, 0, 0, 0]
    mlp.update_bias(counts, torch.tensor(False))
    assert mlp.balance_bias.tolist() == [0.25, -0.25, 0, 0.25]
    assert "balance_bias" in mlp.state_dict()
    assert mixture(built(shape())).balance_bias is None
