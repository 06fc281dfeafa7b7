"""When delayed scaling records and updates, seen from a training loop that calls nothing of it."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8stack import numerics
from fp8stack.backends import build_backend, fp8_state, load_fp8_state
from fp8stack.errors import UserError
from fp8stack.model.config import GPTConfig, padded_vocabulary
from fp8stack.model.gpt import GPT
from fp8stack.precision import Hardware, load_recipe, resolve
from tests.support.oracles import FP8_MAX

TINY = {"vocabulary": 64, "context": 16, "layers": 2, "width": 32, "heads": 4}
LINEARS = [
    f"blocks.{i}.{part}"
    for i in range(2)
    for part in ("attention.qkv", "attention.output", "mlp.up", "mlp.down")
]
FORWARD, BACKWARD = ("input", "weight"), ("grad_output",)


pytestmark = pytest.mark.usefixtures("one_thread")


def plan_for(shapes, **options):
    recipe = load_recipe("delayed").model_copy(update=options)
    return resolve(recipe, Hardware("cpu"), "emulate").for_layers(shapes)


def bare(inputs=24, outputs=40, **options):
    """One layer called "layer"."""
    backend = build_backend(plan_for({"layer": (inputs, outputs)}, **options))
    torch.manual_seed(0)
    layer = backend.linear("layer", inputs, outputs, True)
    backend.attach(layer)
    return layer


def gpt(seed=0, save_fp8=False, **options):
    config = GPTConfig(**TINY)
    shapes = config.linear_shapes(padded_vocabulary(config, 16))
    return GPT(config, build_backend(plan_for(shapes, **options), save_fp8=save_fp8), seed=seed)


def tokens(seed=1):
    return torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(seed))


def loss_of(model, step):
    return model(tokens(step), tokens(step + 100))


def train(model, steps, optimizer=None):
    """Losses of AdamW steps."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def normal(*shape, seed=0, std=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std


@torch.no_grad()
def change_weights(model) -> None:
    """What an optimizer with a learning rate of 0 does."""
    for parameter in model.parameters():
        parameter.add_(0)


def raw(model) -> dict[str, Tensor]:
    """The state as it lies there, with no update made by looking at it."""
    part = next(m for m in model.modules() if hasattr(m, "delayed"))
    return part.delayed.history.state_dict()


def scales(model, operands=FORWARD + BACKWARD) -> dict[str, float]:
    return {
        name.removesuffix(".scale"): value.item()
        for name, value in raw(model).items()
        if name.endswith(".scale") and name.split(".")[-2] in operands
    }


def filled(model, operand, path="blocks.0.mlp.up") -> int:
    """How many amaxes the window of one slot holds."""
    return int((raw(model)[f"{path}.{operand}.amax_history"][1:] != 0).sum())


def recorded(model) -> float:
    """The largest amax that is recorded and waits for an update."""
    return max(v[0].item() for k, v in raw(model).items() if k.endswith("amax_history"))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def assert_close(one: Tensor, other: Tensor) -> None:
    assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def gradients(model) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters()}


def expected_scale(amax: float, format: str) -> float:
    return float(np.float32(FP8_MAX[format]) / np.float32(amax))


# The moments of the updates


def test_the_first_pass_casts_with_scale_1():
    layer = bare()
    x, dy = normal(6, 24, std=300).requires_grad_(), normal(6, 40, seed=1, std=1e-4)
    y = layer(x)
    y.backward(dy)
    qx, qw, qdy = (
        numerics.cast_to_fp8(t.detach(), 1.0, f).float()
        for t, f in [(x, "e4m3"), (layer.weight, "e4m3"), (dy, "e5m2")]
    )
    assert (qx.abs() == 448).any()  # saturated
    assert ((qdy == 0) & (dy != 0)).any()  # underflowed
    assert_close(y, qx @ qw.T + layer.bias)
    assert_close(x.grad, qdy @ qw)
    assert_close(layer.weight.grad, qdy.T @ qx)


def test_one_step_gives_the_hand_computed_scales():
    layer = bare(margin=1)
    with torch.no_grad():
        layer.weight.fill_(0.5)
        layer.weight[3, 4] = -7.0
    x, dy = torch.full((6, 24), 0.25), torch.full((6, 40), 1e-3)
    x[2, 2], dy[5, 5] = -28.0, 0.125
    layer(x).backward(dy)
    assert scales(layer) == {
        "layer.input": 8.0,  # 448 / 2 / 28
        "layer.weight": 32.0,  # 448 / 2 / 7
        "layer.grad_output": 229376.0,  # 57344 / 2 / 0.125
    }
    history = raw(layer)["layer.input.amax_history"]
    assert (history[-1].item(), history[:-1].any().item(), len(history)) == (28.0, False, 1024)


def test_the_next_pass_casts_with_the_updated_scales():
    layer = bare()
    layer(normal(6, 24)).sum().backward()
    change_weights(layer)
    before, x = scales(layer), normal(6, 24, seed=3).requires_grad_()
    y = layer(x)
    scale = {k: torch.tensor(v) for k, v in before.items()}
    qx = numerics.cast_to_fp8(x.detach(), scale["layer.input"]).float() / scale["layer.input"]
    w = layer.weight.detach()
    qw = numerics.cast_to_fp8(w, scale["layer.weight"]).float() / scale["layer.weight"]
    assert_close(y, qx @ qw.T + layer.bias)
    assert scales(layer) == before  # not before the pass has ended


def test_the_state_is_named_by_module_path_and_operand():
    model = gpt()
    names = {
        f"{path}.{operand}.{kind}"
        for path in LINEARS
        for operand in FORWARD + BACKWARD
        for kind in ("amax_history", "scale")
    }
    state = fp8_state(model)
    assert state.keys() == names
    assert {v.dtype for v in state.values()} == {torch.float32}
    assert not any("amax" in name or "scale" in name for name in model.state_dict())
    assert set(scales(model).values()) == {1.0}
    headed = fp8_state(gpt(head=True, exclude_last_blocks=1, history_length=3))
    assert len(headed) == 2 * 3 * 5
    assert headed["lm_head.grad_output.amax_history"].shape == (3,)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_each_micro_batch_updates_its_scales_once_and_the_weights_only_the_first(micro_batches):
    model = gpt()
    for count in range(1, micro_batches + 1):
        (loss_of(model, count) / micro_batches).backward()
        for path in LINEARS:
            held = [filled(model, operand, path) for operand in FORWARD + BACKWARD]
            assert held == [count, 1, count], path
        assert recorded(model) == 0.0


def change_in_place(layer):
    change_weights(layer)


def step_an_optimizer(layer):
    torch.optim.SGD(layer.parameters(), lr=0.0).step()


def step_through_data(layer):
    """As older optimizers write: no version counts it, the optimizer's step does."""

    class Old(torch.optim.Optimizer):
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                parameter.data.mul_(1.0)

    Old(layer.parameters(), {}).step()


@pytest.mark.parametrize("change", [change_in_place, step_an_optimizer, step_through_data])
def test_micro_batches_cast_a_weight_with_the_scale_of_the_first(change):
    layer = bare()
    w = layer.weight.detach()

    def weight_cast_with(scale, y):
        qx = numerics.cast_to_fp8(x, before["layer.input"]).float() / before["layer.input"]
        qw = numerics.cast_to_fp8(w, scale).float() / scale
        return bool((y - (qx @ qw.T + layer.bias)).abs().max() <= 1e-5 * y.abs().max())

    amax = w.abs().max().item()
    fresh = expected_scale(amax, "e4m3")
    for micro_batch in range(3):
        before, x = scales(layer), normal(6, 24, seed=micro_batch)
        y = layer(x)
        assert weight_cast_with(1.0, y)
        assert not weight_cast_with(fresh, y)
        y.sum().backward()
        assert scales(layer)["layer.weight"] == fresh
        assert filled(layer, "weight", "layer") == 1
    change(layer)
    before = scales(layer)
    y = layer(x)
    assert weight_cast_with(fresh, y)
    y.sum().backward()
    assert filled(layer, "weight", "layer") == 2


def test_a_copy_of_a_model_notices_its_own_weights_change():
    layer = bare()
    layer(normal(6, 24)).sum().backward()
    twin = copy.deepcopy(layer)
    for each in (layer, twin):
        step_through_data(each)
        each(normal(6, 24)).sum().backward()
        assert filled(each, "weight", "layer") == 2


def test_two_forwards_before_a_backward_are_two_forward_updates_and_one_backward():
    model = gpt()
    loss = loss_of(model, 1) + loss_of(model, 2)
    assert (filled(model, "input"), filled(model, "grad_output")) == (1, 0)
    loss.backward()
    assert (filled(model, "input"), filled(model, "weight")) == (2, 1)
    assert filled(model, "grad_output") == 1
    assert recorded(model) == 0.0


def test_two_backwards_of_one_forward_are_two_backward_updates():
    model = gpt()
    loss = loss_of(model, 1)
    loss.backward(retain_graph=True)
    loss.backward()
    assert (filled(model, "input"), filled(model, "grad_output")) == (1, 2)


@pytest.mark.parametrize("look", ["the next forward", "a look at the state"])
def test_a_forward_without_a_backward_still_updates(look):
    model, twin = gpt(), gpt()
    loss_of(model, 1)
    loss_of(twin, 1).backward()
    assert filled(model, "input") == 0
    if look == "the next forward":
        with torch.no_grad():
            loss_of(model, 2)
        assert filled(model, "input") == 1
        assert scales(model, FORWARD) == scales(twin, FORWARD)
    found, expected = fp8_state(model), fp8_state(twin)
    for name, value in found.items():
        if ".grad_output." in name:
            assert torch.equal(value, torch.full_like(value, float(name.endswith("scale"))))
        else:
            assert torch.equal(value, expected[name])
    assert same(found, fp8_state(model))


QUIET = {
    "eval": lambda: torch.enable_grad(),
    "no_grad": lambda: torch.no_grad(),
    "inference": lambda: torch.inference_mode(),
}


@pytest.mark.parametrize("mode", QUIET)
def test_a_pass_outside_training_changes_nothing(mode):
    model = gpt()
    train(model, range(2))
    before = raw(model)
    model.train(mode != "eval")
    with QUIET[mode]():
        loss = loss_of(model, 5)
    if mode == "eval":
        loss.backward()
    assert same(before, raw(model))
    assert same(before, fp8_state(model))


@pytest.mark.parametrize("mode", QUIET)
def test_evaluations_between_do_not_change_the_training(mode):
    plain, evaluated = gpt(), gpt()
    expected = [train(plain, [step]) for step in range(3)]
    found = []
    for step in range(3):
        evaluated.eval()
        with QUIET[mode]():
            loss_of(evaluated, 50)
        evaluated.train()
        found.append(train(evaluated, [step]))
    assert found == expected
    assert same(fp8_state(plain), fp8_state(evaluated))


def test_a_move_to_another_device_in_inference_leaves_the_state_trainable():
    model = gpt().to("meta")
    with torch.inference_mode():
        model(tokens().to("meta"))
    history = model.blocks[0].mlp.up.delayed.history
    assert history.history.device.type == "meta"
    assert not history.history.is_inference()


# Ten steps against a simulation in plain Python


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 4, 1024])
def test_ten_steps_give_the_scales_of_an_independent_simulation(length, algorithm):
    model = gpt(history_length=length, amax_algorithm=algorithm, margin=1)
    seen: dict[str, float] = {}

    def note(slot: str, x: Tensor) -> None:
        seen[slot] = max(abs(value) for value in x.detach().float().flatten().tolist())

    def watch(path: str, layer: nn.Module) -> None:
        def forward(module, args, y):
            note(f"{path}.input", args[0])
            note(f"{path}.weight", module.weight)
            y.register_hook(lambda dy: note(f"{path}.grad_output", dy))

        layer.register_forward_hook(forward)

    for path in LINEARS:
        watch(path, model.get_submodule(path))
    windows = {slot: [] for slot in scales(model)}
    expected = dict.fromkeys(windows, 1.0)
    for step in range(10):
        factor = 10.0 ** (step % 3)  # gradients that rise and fall
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3 / factor)
        optimizer.zero_grad()
        (loss_of(model, step) * factor).backward()
        optimizer.step()
        for slot, window in windows.items():
            window.append(seen[slot])
            del window[:-length]
            amax = max(window) if algorithm == "max" else window[-1]
            top = 57344.0 if slot.endswith("grad_output") else 448.0
            expected[slot] = float(np.float32(top / 2) / np.float32(amax))
        assert scales(model) == expected
    assert len(expected) == 24
    assert len(set(expected.values())) > 12


def test_an_infinity_freezes_one_scale_until_it_leaves_the_window():
    layer = bare(history_length=2)
    found = []
    for value in (2.0, math.inf, 4.0, 8.0, 16.0):
        x = torch.ones(3, 24)
        x[0, 0] = value
        layer(x).sum().backward()
        found.append(scales(layer)["layer.input"])
    assert found == [224.0, 224.0, 224.0, 56.0, 28.0]


# Activation checkpointing, copies, errors


def checkpointed(model, use_reentrant):
    for block in model.blocks:
        inner = block.forward
        block.forward = lambda x, rotation, inner=inner: checkpoint(
            inner, x, rotation, use_reentrant=use_reentrant
        )
    return model


@pytest.mark.parametrize("save_fp8", [False, True], ids=["values", "bytes"])
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["saved", "reentrant"])
def test_checkpointing_changes_no_gradient_and_no_state(use_reentrant, save_fp8):
    plain, frugal = gpt(save_fp8=save_fp8), checkpointed(gpt(save_fp8=save_fp8), use_reentrant)
    for step in range(3):
        for model in (plain, frugal):
            loss_of(model, step).backward()  # gradients accumulate
        assert same(gradients(plain), gradients(frugal))
        assert same(fp8_state(plain), fp8_state(frugal))
    for path in LINEARS:
        assert [filled(frugal, operand, path) for operand in FORWARD + BACKWARD] == [3, 1, 3]


def test_a_look_at_the_state_before_the_backward_does_not_disturb_checkpointing():
    plain, frugal = gpt(), checkpointed(gpt(), use_reentrant=False)
    for model in (plain, frugal):
        loss = loss_of(model, 0)
        fp8_state(model)
        loss.backward()
    assert same(gradients(plain), gradients(frugal))
    assert same(fp8_state(plain), fp8_state(frugal))


def test_a_restored_state_continues_training_to_the_bit():
    straight, first, second = gpt(), gpt(), gpt(seed=5)
    expected = train(straight, range(6))
    optimizer = torch.optim.AdamW(first.parameters(), lr=1e-2)
    losses = train(first, range(3), optimizer)
    train(second, [9])  # a past to be forgotten
    second.load_state_dict(first.state_dict())
    load_fp8_state(second, fp8_state(first))
    resumed = torch.optim.AdamW(second.parameters(), lr=1e-2)
    resumed.load_state_dict(optimizer.state_dict())
    losses += train(second, range(3, 6), resumed)
    assert losses == expected
    assert same(fp8_state(straight), fp8_state(second))


def test_the_state_matters_to_the_next_step():
    trained, fresh = gpt(), gpt()
    train(trained, range(2))
    fresh.load_state_dict(trained.state_dict())
    assert loss_of(trained, 3).item() != loss_of(fresh, 3).item()
    load_fp8_state(fresh, fp8_state(trained))
    change_weights(trained)
    assert loss_of(trained, 3).item() == loss_of(fresh, 3).item()


def test_a_state_given_out_is_a_copy():
    model = gpt()
    train(model, [0])
    before = raw(model)
    for value in fp8_state(model).values():
        value.fill_(9.0)
    assert same(before, raw(model))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("blocks.1.mlp.up.weight.scale"), "blocks.1.mlp.up.weight.scale"),
        (lambda s: s.update({"blocks.7.x.scale": torch.ones(())}), "blocks.7.x.scale"),
        (lambda s: s.update({"blocks.0.mlp.up.input.scale": torch.ones(2)}), "(2,)"),
        (lambda s: s.update({k: v.half() for k, v in s.items()}), "float16"),
    ],
    ids=["too few", "too many", "another shape", "another dtype"],
)
def test_a_state_that_does_not_fit_is_an_error_and_changes_nothing(change, words):
    model, other = gpt(), gpt()
    train(model, [0])
    train(other, [1])
    state, before = fp8_state(other), raw(model)
    change(state)
    with pytest.raises(UserError) as error:
        load_fp8_state(model, state)
    assert words in str(error.value)
    assert same(before, raw(model))


def test_another_history_length_or_a_recipe_without_state_is_an_error():
    state = fp8_state(gpt())
    with pytest.raises(UserError, match="1024"):
        load_fp8_state(gpt(history_length=16), state)
    plain = GPT(GPTConfig(**TINY))
    assert fp8_state(plain) == {}
    load_fp8_state(plain, {})
    with pytest.raises(UserError, match="recipe keeps none"):
        load_fp8_state(plain, state)


def test_a_copy_of_a_model_has_a_state_of_its_own():
    model, twin = gpt(), gpt()
    for each in (model, twin):
        train(each, range(2))
    before, copied = raw(model), copy.deepcopy(model)
    assert same(before, raw(copied))
    expected = train(twin, range(2, 4))
    assert train(copied, range(2, 4)) == expected
    assert same(before, raw(model))
    assert same(raw(copied), raw(twin))
    assert train(model, range(2, 4)) == expected
    assert same(raw(model), raw(copied))


@pytest.mark.parametrize("convert", ["bfloat16", "half", "double"])
def test_converting_a_model_does_not_round_its_state(convert):
    model = gpt()
    train(model, range(2))
    before = raw(model)
    getattr(model, convert)()
    assert same(before, raw(model))
    layer = bare()
    getattr(layer, convert)()
    layer(normal(6, 24)).sum().backward()
    amax = layer.weight.detach().abs().max().item()
    assert scales(layer)["layer.weight"] == expected_scale(amax, "e4m3")


def test_a_backward_that_fails_half_way_does_not_break_the_next_step():
    model, twin = gpt(), gpt()
    failing = []

    def fail(gradient):
        if failing:
            raise RuntimeError("half-way")

    model.blocks[0].register_forward_hook(lambda m, args, y: y.register_hook(fail) and None)
    for each in (model, twin):
        loss_of(each, 0).backward()
    failing.append(True)
    with pytest.raises(RuntimeError, match="half-way"):
        loss_of(model, 1).backward()
    failing.clear()
    loss_of(twin, 1)  # the forward pass counts, the backward pass did not end
    for each in (model, twin):
        each.zero_grad()
        loss_of(each, 2).backward()
    assert scales(model, FORWARD) == scales(twin, FORWARD)
    reached = "blocks.1.mlp.up"
    for path in LINEARS:
        assert [filled(model, operand, path) for operand in FORWARD + BACKWARD] == [3, 1, 2]
        if path < "blocks.1":
            assert torch.equal(*(m.get_submodule(path).weight.grad for m in (model, twin)))
    assert scales(model)[f"{reached}.grad_output"] <= scales(twin)[f"{reached}.grad_output"]
    assert recorded(model) == 0.0


def test_a_forward_that_fails_half_way_does_not_break_the_next_step():
    model, twin = gpt(), gpt()
    for each in (model, twin):
        loss_of(each, 0).backward()
    hook = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, 1)
    hook.remove()
    for each in (model, twin):
        each.zero_grad()
        loss_of(each, 1).backward()
    assert same(gradients(model), gradients(twin))
    assert same(fp8_state(model), fp8_state(twin))


def test_a_failed_backward_can_be_tried_again():
    model, failing = gpt(), [True]

    def fail(gradient):
        if failing:
            raise RuntimeError("half-way")

    model.blocks[0].register_forward_hook(lambda m, args, y: y.register_hook(fail) and None)
    loss = loss_of(model, 0)
    with pytest.raises(RuntimeError, match="half-way"):
        loss.backward(retain_graph=True)
    failing.clear()
    loss.backward()
    assert [filled(model, operand) for operand in FORWARD + BACKWARD] == [1, 1, 1]


def test_models_side_by_side_keep_their_own_histories():
    alone = [gpt(seed=seed, history_length=length) for seed, length in ((0, 2), (1, 8))]
    together = [gpt(seed=seed, history_length=length) for seed, length in ((0, 2), (1, 8))]
    for index, model in enumerate(alone):
        for step in range(3):
            loss_of(model, 10 * index + step).backward()
    for step in range(3):  # one backward pass through both
        losses = [loss_of(model, 10 * index + step) for index, model in enumerate(together)]
        sum(losses).backward()
    for one, other in zip(alone, together, strict=True):
        assert same(fp8_state(one), fp8_state(other))
        assert same(gradients(one), gradients(other))
    assert scales(alone[0]) != scales(alone[1])


def test_a_frozen_or_unused_layer_keeps_its_gradient_scale():
    used, unused = bare(), bare()
    x = normal(6, 24)
    used.requires_grad_(False)
    (used(x.requires_grad_()).sum() + 0 * unused.weight.sum()).backward()
    assert scales(used)["layer.grad_output"] == 57344.0
    assert set(scales(unused).values()) == {1.0}


def test_training_a_part_of_the_model_by_itself_is_refused_and_evaluating_it_is_not():
    model = gpt()
    loss_of(model, 0).backward()
    layer = model.blocks[0].mlp.up
    before = raw(model)
    with pytest.raises(UserError, match="Call the module that was converted"):
        layer(normal(4, 32))
    with torch.no_grad():
        layer(normal(4, 32))
    model.eval()
    layer(normal(4, 32))
    assert same(before, raw(model))
