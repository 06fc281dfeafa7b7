"""`convert` in code of others: their linears, wrappers and loops; and a plan that stays true."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize, prune

from fp8stack import LossScaler, UserError, convert, fp8_state
from tests.faults.processes import in_ranks
from tests.model.test_convert import (
    AMPERE,
    HOPPER,
    MLP,
    TURING,
    Blocks,
    fit,
    gpt2,
    in_fp8,
    llama,
    plan,
    plan_in,
    reason,
    replaced,
)
from tests.support import converted_ranks
from tests.support.backend_models import grad, gradients, normal, same

BACKENDS = ["emulate", "torch"]


# Linears of others


class Inherits(nn.Linear):
    """An nn.Linear with another attribute, as in torchtitan."""

    tag = "theirs"


class Plain(nn.Linear):
    """A linear that overrides forward with the same computation, as in Falcon and nanochat."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class Scratch(nn.Module):
    """A linear without nn.Linear, and without a bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def of_others() -> nn.Sequential:
    torch.manual_seed(0)
    kinds = (Inherits, nn.Linear, Plain, Scratch, Doubled)
    return nn.Sequential(*(kind(32, 32) for kind in kinds))


@pytest.mark.parametrize("backend", BACKENDS)
def test_linears_of_others_are_converted_where_their_forward_is_one_and_stay_what_they_are(backend):
    model = convert(of_others(), plan("delayed", backend), also=(Plain, Scratch))
    assert replaced(model) == in_fp8(model) == ["0", "1", "2", "3"]
    assert reason(model, "4") == (
        "unchanged, a Doubled has a forward of its own: pass also=(Doubled,) if that is a plain "
        "x W^T + b"
    )
    usual = nn.Sequential(*(nn.Linear(32, 32, bias=i != 3) for i in range(4)), Doubled(32, 32))
    usual.load_state_dict(model.state_dict())
    convert(usual, plan("delayed", backend))
    assert fit(model) == fit(usual)
    assert same(fp8_state(model), fp8_state(usual))
    for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(copied[0], Inherits)
        assert isinstance(copied[2], Plain)
        assert copied[0].tag == "theirs"
        assert replaced(copied) == replaced(model)
        assert same(fp8_state(copied), fp8_state(model))
        with torch.no_grad():
            assert torch.equal(copied(normal(4, 32)), model(normal(4, 32)))


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: nn.Sequential(Plain(32, 32)), {}, r"in FP8 \(0: a Plain .*also=\(Plain,\)"),
        (MLP, {"exclude": "*"}, r"in FP8 \(up and 1 more: excluded by the pattern"),
        (
            lambda: MLP(20, 24),
            {},
            r"in FP8 \(up: 20 in features and 24 out features, not divisible by 16; down: 24",
        ),
        (lambda: nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64)), {}, "head = false"),
        (of_others, {"also": (Scratch, nn.Conv2d)}, "also: no layer of this model is a Conv2d"),
        (lambda: nn.Sequential(nn.LayerNorm(32)), {"also": nn.LayerNorm}, r"no parameter `weight`"),
    ],
)
def test_a_model_that_no_layer_of_which_would_be_in_fp8_is_refused(make, options, message):
    model = make()
    with pytest.raises(UserError, match=message):
        convert(model, plan("current", "torch", HOPPER), **options)
    assert replaced(model) == []
    assert not hasattr(model, "fp8_plan")
    # No model is refused on hardware without FP8.
    model = nn.Sequential(Plain(32, 32), nn.Linear(32, 32))
    assert replaced(convert(model, plan("delayed", "auto", AMPERE), exclude="1")) == []


def test_an_attribute_that_a_converted_layer_needs_is_not_taken_from_its_owner():
    model = MLP()
    vars(model.down)["operands"] = 0.5
    with pytest.raises(UserError, match="down has an attribute 'operands' of its own"):
        convert(model, plan())
    assert replaced(model) == []


# Weights that are no parameter of the layer


@pytest.mark.parametrize("backend", BACKENDS)
def test_functional_calls_compute_with_the_tensors_that_they_are_given(backend):
    model, twin = (convert(MLP(), plan("delayed", backend)) for _ in range(2))
    for step in range(3):
        tensors = {
            name: (value.detach() * (step + 2)).requires_grad_()
            for name, value in model.named_parameters()
        }
        with torch.no_grad():
            for name, value in twin.named_parameters():
                value.copy_(tensors[name])
        x = normal(8, 32, seed=step)
        y, expected = functional_call(model, tensors, (x,)), twin(x)
        assert torch.equal(y, expected)
        y.sum().backward()
        expected.sum().backward()
        assert same({name: grad(p) for name, p in tensors.items()}, gradients(twin))
        twin.zero_grad()
    assert same(fp8_state(model), fp8_state(twin))


class Unit(nn.Module):
    """Computes a weight of length 1 in each row, and counts how often."""

    count = 0

    def forward(self, weight: Tensor) -> Tensor:
        Unit.count += 1
        return F.normalize(weight)


def pruned(layer: nn.Module) -> None:
    prune.custom_from_mask(layer, "weight", (torch.arange(32 * 64).view(64, 32) % 3 > 0).float())


COMPUTED: dict[str, Callable[[Any], object]] = {
    "pruned": pruned,
    "parametrized": lambda layer: parametrize.register_parametrization(layer, "weight", Unit()),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("method", COMPUTED)
def test_a_weight_may_be_computed_from_another_after_convert(method, backend):
    torch.manual_seed(0)
    model = MLP()
    plain = copy.deepcopy(model)
    convert(model, plan("current", backend))
    fit(model, 1)  # what the torch backend keeps of the weight must be forgotten
    model.load_state_dict(plain.state_dict())
    model.zero_grad()
    for module in (model, plain):
        torch.manual_seed(1)
        COMPUTED[method](module.up)
    Unit.count = 0
    for step in range(3):
        x = normal(64, 32, seed=step)
        y, expected = model(x), plain(x)
        y.square().mean().backward()
        expected.square().mean().backward()
        assert 1e-3 < ((y - expected).norm() / expected.norm()) < 0.1
        computed = gradients(model)
        assert computed.keys() == gradients(plain).keys()
        for name, value in gradients(plain).items():
            assert (computed[name] - value).norm() < 0.15 * value.norm() + 1e-6, name
        for module in (model, plain):
            torch.optim.SGD(module.parameters(), lr=0.5).step()
            module.zero_grad()
    if method == "parametrized":
        assert Unit.count == 2 * 3, "once in each pass of each model"


# Ranks


@pytest.fixture(scope="module")
def of_ranks() -> list[dict[str, Any]]:
    return in_ranks(converted_ranks.all_of, 2)


@pytest.mark.full
def test_fsdp_computes_what_ddp_does_whoever_owns_the_parameters(of_ranks):
    for results in of_ranks:
        for wrapper, losses in zip(converted_ranks.WRAPS, results["fsdp"], strict=True):
            assert losses[:6] == pytest.approx(losses[6:], rel=1e-5), wrapper
            assert len(set(losses[:6])) == 6


@pytest.mark.full
def test_ranks_with_other_layers_or_parts_of_weights_are_refused_instead_of_waiting(of_ranks):
    for results in of_ranks:
        assert "have different layers, as in pipeline parallelism" in results["stages"]
        assert results["own group"] == "it runs"
        assert results["tensor parallel"].startswith("FP8 layers do not take the DTensors")


# A plan that stays true


class ReadsWeights(Blocks):
    """A model that reads a linear's weight and never calls the linear, as Mamba does."""

    def __init__(self) -> None:
        super().__init__(1)
        self.dt_proj = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.dt_proj.weight


@pytest.fixture
def nothing_compiled(monkeypatch) -> None:
    """Make torch look as if this process never compiled anything."""
    import torch._dynamo.utils as dynamo

    monkeypatch.setattr(dynamo, "counters", {"frames": {}})


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_layers_that_never_ran_are_warned_of_once(recipe, nothing_compiled, caplog):
    silent, model = convert(Blocks(1), plan(recipe)), convert(ReadsWeights(), plan(recipe))
    with torch.no_grad():
        model(normal(8, 32))  # no pass that trains
    fit(silent)
    assert caplog.records == []
    fit(model)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith(
        "1 converted layer(s) were not called in the first training pass: dt_proj."
    )
    assert record.message in plan_in(model).reasons


def shape(model: Any, name: str) -> tuple[int, int]:
    layer = model.fp8_plan.layer(name)
    return layer.in_features, layer.out_features


@pytest.mark.parametrize(
    ("make", "backend", "precision"),
    [(gpt2, "emulate", "delayed"), (gpt2, "torch", "fp32"), (llama, "torch", "unchanged")],
)
def test_the_plan_follows_resized_embeddings(make, backend, precision, caplog):
    """GPT-2's head is tied and stays the same module; Llama's becomes a new one."""
    model = convert(make(), plan("delayed", backend, head=True))
    model.resize_token_embeddings(300)
    tokens = torch.arange(64).view(2, 32)
    for _ in range(2):
        assert model(tokens, labels=tokens).logits.shape[-1] == 300
    assert shape(model, "lm_head") == (32, 300)
    assert model.fp8_plan.layer("lm_head").precision == precision
    assert ("lm_head" in in_fp8(model)) == (precision == "delayed")
    expected = {
        "delayed": None,
        "fp32": "fp32, 300 out features, not divisible by 16",
        "unchanged": (
            "unchanged, replaced after convert: convert the model once its layers are final"
        ),
    }[precision]
    if expected is not None:
        assert reason(model, "lm_head") == expected
        messages = [record.message for record in caplog.records if record.name == "fp8stack"]
        assert messages == [f"lm_head: {expected}"]


def test_the_plan_follows_layers_that_are_replaced_wrapped_or_removed():
    model = convert(Blocks(3), plan())
    fit(model, 1)
    model.blocks[0].up = nn.Linear(32, 64)
    model.blocks[1].up = nn.Sequential(model.get_submodule("blocks.1.up"))
    del model.blocks[2]
    fit(model, 1)
    assert in_fp8(model) == ["blocks.0.down", "blocks.1.up", "blocks.1.down"]
    assert reason(model, "blocks.0.up").startswith("unchanged, replaced after convert")
    assert reason(model, "blocks.2.up") == "it is no longer a linear of this model"
    reasons = model.fp8_plan.reasons
    fit(model, 1)
    assert model.fp8_plan.reasons == reasons


@pytest.mark.full
def test_fp8_layers_of_torchao_in_the_place_of_ours_are_refused():
    """Accelerator(mixed_precision="fp8") does this to a model that it prepares."""
    from torchao.float8 import convert_to_float8_training

    model = convert(Blocks(2), plan("current"))
    convert_to_float8_training(model, module_filter_fn=lambda module, name: "down" in name)
    with pytest.raises(UserError, match=r"2 of 4 linears were replaced .* Float8Linear of torchao"):
        model(normal(16, 32))


@pytest.mark.parametrize("recipe", ["delayed", "bf16"])
def test_an_input_of_no_floats_is_refused_as_nn_linear_refuses_it(recipe):
    plain, model = MLP(), convert(MLP(), plan(recipe, "auto"))
    with pytest.raises(TypeError, match="must be Tensor"):
        model.up(None)
    for x in (torch.ones(2, 32, dtype=torch.int64), torch.ones(2, 32) > 0):
        with pytest.raises(RuntimeError) as expected:
            plain.up(x)
        with pytest.raises(RuntimeError) as raised:
            model(x)
        assert str(raised.value) == str(expected.value)


# fp16


def test_under_a_scaled_loss_layers_compute_in_fp16():
    torch.manual_seed(0)
    plain = Blocks(2)
    model = convert(copy.deepcopy(plain), plan("delayed", "auto", TURING), scaled_loss=True)
    assert {layer.precision for layer in model.fp8_plan.layers} == {"fp16"}
    assert replaced(model) == [layer.name for layer in model.fp8_plan.layers]
    weight, bias = plain.get_submodule("blocks.0.up").parameters()
    x = normal(8, 32)
    expected = F.linear(x.half(), weight.half(), bias.half()).float()
    assert torch.equal(model.get_submodule("blocks.0.up")(x), expected)
    scaler, losses = LossScaler("cpu"), []
    for trained, scale in ((model, scaler), (plain, torch.amp.GradScaler("cpu", enabled=False))):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
        for step in range(10):
            loss = 1e-6 * trained(normal(8, 32, seed=step)).pow(2).mean()
            scale.scale(loss).backward()
            scale.step(optimizer)
            scale.update()
            optimizer.zero_grad()
            losses.append(1e6 * loss.item())
    assert losses[9] < 0.9 * losses[0]
    assert losses[:10] == pytest.approx(losses[10:], rel=1e-2)
    statistics = scaler.statistics()
    assert (statistics.steps, statistics.overflows) == (10, 0)
