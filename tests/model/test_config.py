"""Shapes and their plans: sizes that tensor cores take, and mixtures of experts."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fp8stack.layers import build_backend
from fp8stack.model.config import GPTConfig, load_config, padded_vocabulary, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.planning.run_config import toml_lines
from fp8stack.planning.tensor_core_sizes import needed_multiple, size_notes
from fp8stack.precision import Hardware, Plan, assumed, load_recipe
from tests.conftest import refusal
from tests.support.backend_models import grad

CPU = Hardware("cpu", cpu_bf16=True)
ODD = partial(GPTConfig, vocabulary=61, context=32, layers=1, width=64, heads=4)
RUNS = [  # with, and without, the head in FP8
    ("bf16", "auto", 8, False),
    ("fp16", "auto", 8, False),
    *[("delayed", "emulate", 16, head) for head in (False, True)],
    *[("mxfp8", "emulate", 32, head) for head in (False, True)],
    ("current", "torch", 16, False),
]
# One step of the compute dtype at the largest element: all that another order of summation in a
# GEMM of another width may change. Here, on one thread, nothing changes.
STEP = {"fp32": 1e-6, "bf16": 2.0**-8, "fp16": 2.0**-11}


def built(config: GPTConfig, plan: Plan, multiple: int) -> tuple[GPT, torch.Tensor]:
    """A model after one pass, and its loss."""
    backend = build_backend(plan)
    backend.vocabulary_multiple = multiple
    model = GPT(config, backend)
    tokens = torch.randint(61, (3, 33), generator=torch.Generator().manual_seed(1))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    (loss * (1024 if plan.loss_scaling else 1)).backward()
    return model, loss.detach()


@pytest.mark.capability("A12")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("recipe", "backend", "multiple", "head"), RUNS)
def test_a_padded_vocabulary_gives_the_loss_and_gradients_of_the_plain_one(
    recipe, backend, multiple, head, tied
):
    config = ODD(tied=tied)
    chosen = load_recipe(recipe)
    if head:
        chosen = chosen.model_copy(update={"head": True})
    plan = plan_for(config, chosen, CPU, backend)
    assert plan.vocabulary_multiple == multiple
    (plain, loss), (padded, same) = (built(config, plan, m) for m in (1, multiple))
    assert [len(m.get_parameter("lm_head.weight")) for m in (plain, padded)] == [61, 64]
    step = STEP[plan.compute_dtype]
    torch.testing.assert_close(same, loss, rtol=step / 100, atol=0)
    for name, parameter in plain.named_parameters():
        gradient = grad(padded.get_parameter(name))
        largest = float(grad(parameter).abs().max())
        assert largest > 0
        difference = gradient[: len(parameter)] - grad(parameter)
        assert float(difference.abs().max()) <= step * largest
        assert not gradient[len(parameter) :].any()


def test_sizes_are_to_be_multiples_of_16_bytes_or_of_mxfp8s_blocks():
    multiples = {("fp32", "9.0"): 1, ("tf32", "9.0"): 4, ("bf16", "9.0"): 8, ("fp16", "7.5"): 8}
    multiples |= {("delayed", "9.0"): 16, ("current", "8.9"): 16, ("mxfp8", "10.0"): 32}
    for (recipe, capability), multiple in multiples.items():
        plan = plan_for(ODD(), recipe, assumed(capability))
        assert needed_multiple(plan) == multiple, recipe


@pytest.mark.capability("A12")
def test_a_width_that_does_not_divide_is_named_with_the_next_that_does():
    config = GPTConfig(vocabulary=128, context=32, layers=1, width=40, heads=10)
    plan = plan_for(config, "delayed", assumed("9.0"))
    reason = "40 in features and 40 out features, not divisible by 16"
    assert plan.layer("blocks.0.attention.output").reason == reason
    assert size_notes(config, plan) == [
        "width 40 is no multiple of 16, which FP8 GEMMs want; the next one is 48",
        "head width 4 is no multiple of 8, which attention in bf16 wants; the next one is 8",
    ]
    config = load_config("gpt-nano-moe", {"experts": {"count": 8, "per_token": 2, "width": 40}})
    note = "experts.width 40 is no multiple of 16, which FP8 GEMMs want; the next one is 48"
    assert size_notes(config, plan_for(config, "delayed", assumed("9.0"))) == [note]


PADDED = [
    "vocabulary 50257 is padded to 50264, a multiple of 8; the padding is no token and stays zero"
]


@pytest.mark.parametrize(
    ("vocabulary", "recipe", "capability", "notes"),
    [(50257, "bf16", "8.0", PADDED), (50304, "delayed", "9.0", []), (50257, "fp32", "9.0", [])],
)
def test_the_vocabulary_is_noted_with_its_padding(vocabulary, recipe, capability, notes):
    config = GPTConfig(vocabulary=vocabulary, context=32, layers=1, width=128, heads=2)
    plan = plan_for(config, recipe, assumed(capability))
    assert size_notes(config, plan) == notes
    assert padded_vocabulary(config, 64) == 50304


# Mixtures of experts

MIXTURE = {"count": 4, "per_token": 2, "width": 32}
MIXED = partial(ODD, layers=3, norm="rmsnorm", activation="swiglu", positions="rope", bias=False)


# Muennighoff et al. 2024 (OLMoE), Qwen Team 2025 (Qwen3), Dai et al. 2024 (DeepSeekMoE).
@pytest.mark.parametrize(
    ("name", "total", "active"),
    [("olmoe-7b", 6.9, 1.3), ("qwen3-30b-a3b", 30.5, 3.3), ("deepseek-16b", 16.4, 2.8)],
)
def test_a_mixture_has_its_published_total_and_active_parameters(name, total, active):
    config = load_config(name)
    assert round(config.parameters() / 1e9, 1) == total
    # Qwen counts 3.3 billion of 3.35.
    assert int(config.active_parameters() / 1e8) / 10 in (active, active - 0.1)
    assert config.active_parameters() / 1e9 == pytest.approx(active, abs=0.06)


def test_the_work_of_a_mixture_counts_the_experts_that_a_token_meets():
    dense, mixed = MIXED(mlp_width=64), MIXED(experts=MIXTURE)
    routers = 3 * 64 * 4
    assert mixed.flops_per_token() == dense.flops_per_token() + 6 * routers
    assert mixed.active_parameters() == dense.parameters() + routers
    assert mixed.parameters() == dense.parameters() + routers + 3 * 2 * (3 * 64 * 32)


def test_a_plan_leaves_routers_in_float32_and_counts_experts_by_their_tokens():
    config = MIXED(experts=MIXTURE, vocabulary=64)
    for recipe in ("delayed", "bf16", "fp32"):
        plan = plan_for(config, recipe, CPU)
        router, experts = (plan.layer(f"blocks.0.mlp.{name}") for name in ("router", "experts.up"))
        assert (router.fp8, router.precision) == (False, "fp32")
        assert bool(router.reason) == (recipe != "fp32")
        assert (experts.fp8, experts.active) == (plan.is_fp8, 0.5)
    plan = plan_for(config, "delayed", CPU)
    assert plan.layer("blocks.0.mlp.router").sentence in plan.reasons
    shapes = config.linear_shapes()
    work = {name: i * o * (2 if "experts" in name else 1) for name, (i, o) in shapes.items()}
    plain = sum(w for name, w in work.items() if name == "lm_head" or "router" in name)
    assert plan.fp8_share == pytest.approx(1 - plain / sum(work.values()))


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        ({"per_token": 5}, "per_token 5 is more than the 4 experts. Set per_token to 4 or less"),
        ({"width": 0}, "experts.width = 0: Input should be greater than or equal to 1"),
        ({"balance": 0.1, "bias": 0.1}, "two ways to balance the load. Leave one of them out"),
        ({"first_dense": 3}, "leaves none of the 3 layers with experts"),
        ({"count": 65536, "width": 2**30}, "parameters are the most"),
        ({"per_tokn": 2}, "Did you mean 'per_token'?"),
    ],
)
def test_an_impossible_mixture_is_one_line(experts, words, tmp_path):
    table = {key: value for key, value in MIXED().model_dump().items() if value is not None}
    lines = toml_lines(table | {"experts": MIXTURE | experts})
    (tmp_path / "mine.toml").write_text("\n".join(lines))
    assert words in refusal(load_config, str(tmp_path / "mine.toml"))


def test_a_model_without_experts_is_stored_as_before_there_were_any():
    assert not {"experts", "head_width"} & ODD().model_dump().keys()
    assert {"experts", "head_width"} <= MIXED(experts=MIXTURE, head_width=8).model_dump().keys()
