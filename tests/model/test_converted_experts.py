"""`convert` on the experts of transformers, whose matrices are in one parameter."""

from __future__ import annotations

import copy
import io
import json
import logging
import pickle
import statistics
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8stack import UserError, convert, fp8_state, load_fp8_state
from tests.faults.processes import in_ranks
from tests.layers.test_grouped_torch import Gemm
from tests.model.test_convert import adamw, in_fp8, plan, reason, relative, train
from tests.model.test_experts import FAMILIES, family
from tests.support import expert_ranks
from tests.support.backend_models import H100, SHIPPED, grad, gradients, normal, planned, same
from tests.support.cases import case
from tests.support.expert_loops import CLASSES, EXPERTS, INNER, WIDTH, Model, experts_of, pair
from tests.support.te.te_stand_in import installed

RECIPES = [name for name, recipe in SHIPPED.items() if recipe.is_fp8]
NAMES = ["experts.gate_up_proj", "experts.down_proj"]


def converted(name: str = "MixtralExperts", recipe: str = "delayed", **options: Any) -> Any:
    """A small model whose experts are converted."""
    return convert(Model(experts_of(name)), plan(recipe), **options)


def mixtral() -> Any:
    return family("MixtralForCausalLM", vocab_size=256)


def passed(model: Any, seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The output of a pass, and the gradients of its input and of the router's weight."""
    x = normal(48, model.router.in_features, seed=seed).to(dtype).requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(normal(*y.shape, seed=seed + 1).to(y.dtype))
    return [y.detach(), grad(x), grad(model.router.weight)]


def step(model: nn.Module, seed: int) -> list[Tensor]:
    """`passed`, and an optimizer's step."""
    results = passed(model, seed)
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    return results


def stacked(loop: Any, key: str, kind: str, turned: bool) -> Tensor:
    gradients = [grad(linear.get_parameter(kind)) for linear in getattr(loop, key)]
    return torch.stack([g.t() if turned and kind == "weight" else g for g in gradients])


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        *(("MixtralExperts", recipe) for recipe in [*RECIPES, "bf16"]),
        *(("GptOssExperts", recipe) for recipe in ("mxfp8", "nvfp4")),
        *((name, "delayed") for name in CLASSES if name != "MixtralExperts"),
    ],
)
def test_experts_compute_what_a_loop_of_converted_linears_does(name, recipe) -> None:
    models = pair(name)
    loop = models[1].experts
    for model in models:
        convert(model, plan(recipe))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    for seed in range(3):  # delayed scaling has scales from the second pass on
        results, expected = (step(model, seed) for model in models)
        for computed, target in zip(results, expected, strict=True):
            torch.testing.assert_close(computed, target, rtol=0, atol=0)
        for key in loop.keys:
            for kind, suffix in (("weight", ""), ("bias", "_bias")):
                parameter = getattr(models[0].experts, key + suffix, None)
                if parameter is not None:
                    gradient = grad(parameter)[:EXPERTS]
                    expected_gradient = stacked(loop, key, kind, loop.turned)
                    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=0)
        for optimizer in optimizers:
            optimizer.step()
    state, of_loop = (fp8_state(model) for model in models)
    for slot, tensor in state.items():
        if slot.startswith("experts.") and not slot.endswith(".draws"):
            path, key, place = slot.split(".", 2)
            slots = [of_loop[f"{path}.{key}.{number}.{place}"] for number in range(EXPERTS)]
            assert torch.equal(tensor, torch.stack(slots, dim=-1))


@pytest.mark.parametrize("name", ["MixtralExperts", "GptOssExperts"])
def test_transformer_engine_computes_the_experts_of_a_model(name) -> None:
    with installed():
        models = pair(name, width=64, inner=32)
        for model in models:
            convert(model, planned("delayed", "te"))
        linear = models[0].experts.down_proj_linear
        assert type(linear).__name__ == "StoredInExperts[TEGroupedLinear]"
        for seed in range(3):
            for computed, target in zip(*(step(model, seed) for model in models), strict=True):
                torch.testing.assert_close(computed, target, rtol=0, atol=0)


@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_torchs_grouped_gemm_computes_the_experts_of_a_model(recipe, monkeypatch) -> None:
    monkeypatch.setattr(torch, "_scaled_grouped_mm", gemm := Gemm())

    def build(backend: str) -> Any:
        model = Model(experts_of("GptOssExperts", 64, 32), width=64)
        return convert(model, planned(recipe, backend, H100))

    model, emulated, fresh = build("torch"), build("emulate"), build("torch")
    for computed, target in zip(step(model, 0), step(emulated, 0), strict=True):
        assert relative(computed, target) < 0.04  # bfloat16 turns some codes
    step(model, 1)
    assert len(gemm.fast) >= 4
    fresh.load_state_dict(model.state_dict())  # the first model kept weights that it had cast
    for computed, target in zip(step(model, 2), step(fresh, 2), strict=True):
        assert torch.equal(computed, target)


# A converted model is the same model


def test_the_gradient_of_a_token_is_summed_over_its_experts_in_float32() -> None:
    experts = converted(recipe="current").to(torch.bfloat16).experts
    x, dy = normal(16, WIDTH).bfloat16(), normal(16, WIDTH, seed=1).bfloat16()
    index = torch.stack([torch.arange(4).roll(token) for token in range(16)])
    weights = normal(16, 4, seed=2).softmax(-1).bfloat16()
    together, apart = x.clone().requires_grad_(), x.repeat_interleave(4, 0).requires_grad_()
    experts(together, index, weights).backward(dy)
    experts(apart, index.view(-1, 1), weights.view(-1, 1)).backward(dy.repeat_interleave(4, 0))
    assert torch.equal(grad(together), grad(apart).view(16, 4, -1).float().sum(1).bfloat16())


def test_modules_parameters_and_names_stay_the_same() -> None:
    model: Any = family("GptOssForCausalLM")
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    names = list(model.state_dict())
    convert(model, plan("delayed"))
    assert list(model.state_dict()) == names
    assert all(model.get_parameter(name) is p for name, p in parameters.items())
    assert [name for name, _ in model.named_parameters()] == list(parameters)
    assert all(model.get_submodule(path) is module for path, module in modules.items())
    assert type(model.model.layers[0].mlp.experts).__name__ == "GptOssExperts"
    assert model.fp8_plan.summary()[-1].startswith(
        "FP8: 92 % of GEMM FLOPs (8 of 9 linears, 4 of 4 expert groups); lm_head: unchanged"
    )


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_fp8_state_of_experts_has_a_vector_for_each_operand_and_one_counter(recipe) -> None:
    model = converted(recipe=recipe)
    for seed in range(2):
        step(model, seed)
    state = {name: x for name, x in fp8_state(model).items() if name.startswith("experts.down")}
    if recipe == "nvfp4":
        assert list(state) == ["experts.down_proj.draws"]
        assert state["experts.down_proj.draws"] == 2
    else:
        slots = [f"experts.down_proj.{x}" for x in ("input", "weight", "grad_output")]
        assert [*state] == [f"{slot}.{key}" for slot in slots for key in ("amax_history", "scale")]
        assert {tuple(state[f"{slot}.scale"].shape) for slot in slots} == {(EXPERTS,)}
    resumed = converted(recipe=recipe)
    resumed.load_state_dict(model.state_dict())
    load_fp8_state(resumed, fp8_state(model))
    for computed, expected in zip(step(resumed, 5), step(model, 5), strict=True):
        assert torch.equal(computed, expected)


@pytest.mark.parametrize("name", ["GptOssExperts", "Llama4TextExperts"])
def test_copies_and_saved_modules_train_by_themselves(name, monkeypatch) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

    model, twin = (converted(name) for _ in range(2))
    for trained in (model, twin):
        step(trained, 0)
    expected = [step(twin, seed) for seed in (1, 2)]
    saved = io.BytesIO()
    torch.save(model, saved)
    copied = copy.deepcopy(model)
    # A process that has converted nothing registers no function of ours.
    functions = {k: f for k, f in ALL_EXPERTS_FUNCTIONS.items() if not k.startswith("fp8stack")}
    monkeypatch.setattr(ExpertsInterface, "_global_mapping", functions)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    for twin_of in (loaded, copied, pickle.loads(pickle.dumps(model))):
        assert same(fp8_state(twin_of), fp8_state(model))
        assert twin_of.experts.down_proj_linear.stored.module is twin_of.experts
        for seed, results in zip((1, 2), expected, strict=True):
            for computed, target in zip(step(twin_of, seed), results, strict=True):
                assert torch.equal(computed, target)


def test_a_model_trains_in_bfloat16_and_under_autocast() -> None:
    low = converted().bfloat16()
    y, dx, _ = passed(low, 0, torch.bfloat16)
    assert y.dtype == dx.dtype == grad(low.experts.down_proj).dtype == torch.bfloat16
    model = converted()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(normal(16, WIDTH))
    assert y.dtype == torch.float32
    assert model(normal(0, WIDTH)).shape == (0, WIDTH)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("GptOssExperts", "delayed"),
        case("MixtralExperts", "mxfp8", quick=False),
        case("Llama4TextExperts", "nvfp4", quick=False),
    ],
)
@pytest.mark.full
def test_compiled_code_computes_what_the_eager_model_does(name, recipe) -> None:
    torch.compiler.reset()
    eager, model = (converted(name, recipe) for _ in range(2))
    called: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    for seed in range(4):  # with other numbers of tokens for each expert
        for computed, expected in zip(step(called, seed), step(eager, seed), strict=True):
            assert torch.equal(computed, expected)
        assert same(gradients(model), gradients(eager))
        if seed == 2:
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert same(fp8_state(called), fp8_state(eager))


@pytest.mark.slow
def test_fsdp_computes_what_ranks_without_it_do() -> None:
    for losses_of_wrappers in in_ranks(expert_ranks.losses, 2):
        for losses, expected in losses_of_wrappers:
            assert losses == expected
            assert len(set(losses)) == 6


# Families of transformers


def losses(name: str, recipe: str, steps: int) -> list[float]:
    model = convert(family(name), plan(recipe))
    torch.manual_seed(0)  # some routers draw
    return train(model.train(), range(steps))


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *((f"{name}ForCausalLM", 3) for name in ("GptOss", "Llama4", "NemotronH", "AriaText")),
        *(case(name, 30, quick=False) for name in FAMILIES),
    ],
)
def test_the_loss_of_a_family_is_within_one_percent_of_fp32(name, steps) -> None:
    expected, low = (losses(name, recipe, steps) for recipe in ("fp32", "delayed"))
    last = slice(-5, None)
    assert statistics.mean(low[last]) == pytest.approx(statistics.mean(expected[last]), rel=0.01)
    assert low[-1] < 0.99 * low[0]


@pytest.mark.parametrize("name", [case(n, quick=n == "GptOssForCausalLM") for n in FAMILIES])
def test_a_family_that_is_saved_resumes_to_the_bit(name, tmp_path) -> None:
    model: Any = convert(family(name), plan("delayed"))
    optimizer = adamw(model)
    train(model, range(2), optimizer)
    model.save_pretrained(tmp_path)
    assert "experts_implementation" not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [name]
    plain: Any = type(model).from_pretrained(tmp_path).train()
    for path, parameter in plain.named_parameters():  # transformers forgets some that are frozen
        parameter.requires_grad_(model.get_parameter(path).requires_grad)
    assert same(plain.state_dict(), model.state_dict())
    resumed = convert(plain, plan("delayed"))
    load_fp8_state(resumed, fp8_state(model))
    steps = adamw(resumed)
    steps.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    results = []
    for trained, by in ((model, optimizer), (resumed, steps)):
        torch.manual_seed(0)
        results.append(train(trained, range(2, 4), by))
    assert results[0] == results[1]
    assert same(fp8_state(resumed), fp8_state(model))


# Experts that are left out, and later changes


@pytest.mark.parametrize(
    ("exclude", "quantized"),
    [("experts.gate_up_proj", NAMES[1:]), ("*.down_proj", NAMES[:1]), ("exp*ts", [])],
)
def test_a_weight_that_is_excluded_is_multiplied_in_its_own_precision(exclude, quantized) -> None:
    original = experts_of("AriaExperts")
    children = {"other": nn.Linear(WIDTH, WIDTH), "experts": experts_of("AriaExperts")}
    model: Any = nn.ModuleDict(children)
    convert(model, plan("current"), exclude=exclude)
    assert in_fp8(model) == ["other", *quantized]
    for name in {*NAMES} - {*quantized}:
        assert reason(model, name) == f"unchanged, excluded by the pattern '{exclude}'"
    if not quantized:
        assert [*model.experts.children()] == [model.experts.act_fn]
        assert model.experts.config._experts_implementation == "grouped_mm"
        return
    x, ends = normal(16, WIDTH), torch.tensor([0, 0, 16, 16], dtype=torch.int32)
    index, weights = torch.full((16, 1), 2), torch.ones(16, 1)  # one expert for all tokens
    if quantized == NAMES[1:]:
        inner = original._apply_gate(F.linear(x, original.gate_up_proj[2].t()))
        expected = model.experts.down_proj_linear(inner, ends)
    else:
        inner = original._apply_gate(model.experts.gate_up_proj_linear(x, ends))
        expected = F.linear(inner, original.down_proj[2].t())
    torch.testing.assert_close(model.experts(x, index, weights), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_experts_that_are_left_out_run_as_before(implementation) -> None:
    plain: Any = mixtral()
    plain.set_experts_implementation(implementation)
    model: Any = convert(copy.deepcopy(plain), plan("current"), exclude="*layers.1.*experts")
    assert model.config._experts_implementation == f"fp8stack-{implementation}"
    experts, original = (m.model.layers[1].mlp.experts for m in (model, plain))
    x = normal(16, 64)
    index, weights = torch.arange(32).view(16, 2) % EXPERTS, normal(16, 2).abs()
    assert torch.equal(experts(x, index, weights), original(x, index, weights))
    again = type(plain)(model.config)  # another model of the same configuration
    again.load_state_dict(plain.state_dict())
    tokens = torch.arange(32)[None]
    assert torch.equal(again(tokens).logits, plain(tokens).logits)


def test_the_plan_says_when_experts_run_by_another_implementation(caplog) -> None:
    model: Any = convert(mixtral(), plan("current"))
    tokens = torch.arange(32)[None]
    quantized = model(tokens).logits
    decided = model.fp8_plan
    model.set_experts_implementation("eager")
    plain = mixtral()
    plain.set_experts_implementation("eager")
    convert(plain, plan("current"), exclude="*experts*")
    for _ in range(2):
        assert torch.equal(model(tokens).logits, plain(tokens).logits)
    name = "model.layers.0.mlp.experts.down_proj"
    assert name not in in_fp8(model)
    assert reason(model, name) == "unchanged, config._experts_implementation was set to 'eager'"
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 4
    model.set_experts_implementation("fp8stack-grouped_mm")
    assert torch.equal(model(tokens).logits, quantized)
    assert model.fp8_plan == decided


def test_the_plan_follows_experts_that_are_replaced_resized_or_removed() -> None:
    model: Any = nn.ModuleDict({name: Model(experts_of("MixtralExperts")) for name in "abcd"})
    model.forward = lambda x: sum(mixture(x) for mixture in model.values())
    convert(model, plan("current"))
    x = normal(16, WIDTH)
    model(x)
    model.a.experts = experts_of("MixtralExperts")
    with torch.no_grad():
        model.b.experts.down_proj = nn.Parameter(model.b.experts.down_proj[:, :, :-4].clone())
        up = model.b.experts.gate_up_proj.view(EXPERTS, 2, INNER, WIDTH)[:, :, :-4]
        model.b.experts.gate_up_proj = nn.Parameter(up.flatten(1, 2).clone())
    model.c.experts = nn.ReLU()
    model.c.forward = lambda x: x
    model(x)
    assert in_fp8(model) == [f"d.{name}" for name in NAMES]
    for name in NAMES:
        assert reason(model, f"a.{name}").startswith("unchanged, replaced after convert")
        assert reason(model, f"b.{name}").startswith("unchanged, resized after convert")
        assert reason(model, f"c.{name}") == "it is no longer a weight of experts of this model"
    reasons = model.fp8_plan.reasons
    model(x)
    assert model.fp8_plan.reasons == reasons


def test_an_attribute_that_converted_experts_need_is_not_taken_from_its_owner() -> None:
    model = Model(experts_of("MixtralExperts"))
    model.experts.down_proj_linear = "theirs"
    with pytest.raises(UserError, match="experts has an attribute 'down_proj_linear' of its own"):
        convert(model, plan("current"))
    assert not hasattr(model.experts, "gate_up_proj_linear")
    assert model.experts.config._experts_implementation == "grouped_mm"


def test_experts_that_ranks_share_out_are_refused() -> None:
    model = converted()
    model.experts._is_expert_parallel = True
    with pytest.raises(UserError, match="do not run under expert parallelism"):
        model(normal(4, WIDTH))
