"""Sizes that tensor cores take: padding changes nothing, and `plan` names what does not suit."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fp8stack.layers import build_backend
from fp8stack.model.config import GPTConfig, padded_vocabulary, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.planning.tensor_core_sizes import needed_multiple, size_notes
from fp8stack.precision import Hardware, Plan, assumed, load_recipe
from tests.support.backend_models import grad

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = Hardware("cpu", cpu_bf16=True)
ODD = partial(GPTConfig, vocabulary=61, context=32, layers=1, width=64, heads=4)
RUNS = [  # with, and without, the head in FP8
    ("bf16", "auto", 8, False),
    ("fp16", "auto", 8, False),
    *[(name, "emulate", 16, head) for name in ("delayed", "current", "block") for head in (0, 1)],
    *[("mxfp8", "emulate", 32, head) for head in (0, 1)],
    ("delayed", "torch", 16, False),
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


def test_a_width_that_does_not_divide_is_named_with_the_next_that_does():
    config = GPTConfig(vocabulary=128, context=32, layers=1, width=40, heads=10)
    plan = plan_for(config, "delayed", assumed("9.0"))
    reason = "40 in features, not divisible by 16"
    assert plan.layer("blocks.0.attention.output").reason == reason
    assert size_notes(config, plan) == [
        "width 40 is no multiple of 16, which FP8 GEMMs want; the next one is 48",
        "mlp_width 160 is no multiple of 64, which suits tensor cores best; 192 is one",
        "head width 4 is no multiple of 8, which attention in bf16 wants; the next one is 8",
    ]


PADDED = [
    "vocabulary 50257 is padded to 50264, a multiple of 8; the padding is no token and stays zero",
    "vocabulary 50264 is no multiple of 64, which suits tensor cores best; 50304 is one",
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
