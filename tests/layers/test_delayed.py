"""FP8 state from pass to pass, of every backend, in a training loop that calls nothing of it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from fp8stack import numerics
from fp8stack.common.errors import UserError
from fp8stack.layers import fp8_state, load_fp8_state
from fp8stack.layers.delayed import DelayedScaling
from fp8stack.model.gpt import GPT
from tests.support.backend_models import (
    BACKENDS,
    DELAYED,
    LINEARS,
    OPERANDS,
    QUIET,
    change_weights,
    checkpointed,
    filled,
    gpt,
    gradients,
    linear,
    loss_of,
    normal,
    raw,
    same,
    scales,
    tokens,
    train,
)
from tests.support.cases import case
from tests.support.te import te_stand_in

pytestmark = pytest.mark.usefixtures("one_thread", "te_throughout")
# Ways to train that keep quantized weights, and ways that quantize weights at each call.
SOME = [*DELAYED, ("current", "torch"), ("current", "te"), ("mxfp8", "emulate"), ("mxfp8", "te")]
EMULATED = ["emulate", "torch"]


def sgd(model: nn.Module, lr: float = 0.3) -> None:
    torch.optim.SGD(model.parameters(), lr=lr).step()
    model.zero_grad()


def assert_same(*models: GPT) -> None:
    """They have the same gradients and the same FP8 state."""
    for model in models[1:]:
        assert same(gradients(models[0]), gradients(model))
        assert same(fp8_state(models[0]), fp8_state(model))


# When amaxes are recorded and scales updated


@pytest.mark.capability("B3")
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_step_gives_the_hand_computed_scales(backend):
    layer, _ = linear("delayed", 32, 48, backend=backend, margin=1)
    with torch.no_grad():
        layer.weight.fill_(0.5)
        layer.weight[3, 4] = -7.0
    x, dy = torch.full((6, 32), 0.25), torch.full((6, 48), 2.0**-10)
    x[2, 2], dy[5, 5] = -28.0, 0.125
    y = layer(x)
    y.backward(dy.to(y.dtype))
    expected = {
        "layer.input": 8.0,  # 448 / 2 / 28
        "layer.weight": 32.0,  # 448 / 2 / 7
        "layer.grad_output": 229376.0,  # 57344 / 2 / 0.125
    }
    assert scales(layer) == expected
    with torch.no_grad():
        layer(x)
    # Not before the next training pass, or if it is asked for.
    assert {float(raw(layer)[f"{slot}.scale"]) for slot in expected} == {1.0}
    layer.delayed.apply_pending_update()
    assert {slot: float(raw(layer)[f"{slot}.scale"]) for slot in expected} == expected
    history = raw(layer)["layer.input.amax_history"]
    assert (history[-1].item(), history[:-1].any().item(), len(history)) == (28.0, False, 1024)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_state_is_named_by_module_path_and_operand(backend):
    model = gpt("delayed", backend)
    names = {
        f"{path}.{operand}.{kind}"
        for path in LINEARS
        for operand in OPERANDS
        for kind in ("amax_history", "scale")
    }
    state = fp8_state(model)
    assert state.keys() == names
    assert {v.dtype for v in state.values()} == {torch.float32}
    assert not any("amax" in name or "scale" in name for name in model.state_dict())
    assert set(scales(model).values()) == {1.0}
    headed = fp8_state(gpt("delayed", backend, head=True, exclude_last_blocks=1, history_length=3))
    assert len(headed) == 2 * 3 * 5
    assert headed["lm_head.grad_output.amax_history"].shape == (3,)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_micro_batch_updates_its_scales_once_and_the_weights_only_the_first(backend):
    """Also where another TE module casts the weight: 26 rows are padded and not fused."""
    model = gpt("delayed", backend)
    for count, length in enumerate((16, 13, 16, 13), start=1):
        loss_of(model, count, length).backward()
        assert {tuple(filled(model, path)) for path in LINEARS} == {(count, 1, count)}


@pytest.mark.parametrize("backend", ["emulate", "te"])
def test_a_layer_that_the_first_micro_batch_skips_records_its_weight_when_it_runs(backend):
    model = gpt("delayed", backend)
    skipped, ran = LINEARS[4], LINEARS[0]
    block, forward = model.blocks[1], model.blocks[1].forward
    for step in range(2):
        for micro_batch in range(3):
            block.forward = forward if micro_batch else lambda x, rotation: x
            loss_of(model, 10 * step + micro_batch).backward()
        counts = 3 * (step + 1), step + 1, 3 * (step + 1)
        assert tuple(filled(model, ran)) == counts
        assert tuple(filled(model, skipped)) == (2 * (step + 1), step + 1, 2 * (step + 1))
        sgd(model)
    assert scales(model)[f"{skipped}.weight"] != 1.0


def step_through_data(layer):
    """Update like older optimizers: no version counts it, the optimizer's step does."""

    class Old(torch.optim.Optimizer):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                parameter.data.mul_(1.0)

    Old(layer.parameters(), {}).step()


@pytest.mark.parametrize("change", [change_weights, step_through_data])
@pytest.mark.parametrize("backend", EMULATED)
def test_micro_batches_cast_a_weight_with_the_scale_of_the_first(backend, change):
    layer, _ = linear("delayed", 32, 48, backend=backend)
    w = layer.weight.detach()
    fresh = float(np.float32(448) / np.float32(w.abs().max().item()))

    def quantized(t, scale):
        return numerics.cast_to_fp8(t, scale).float() / scale

    def weight_scales():
        """Those of 1 and `fresh` with which a pass casts the weight."""
        before, x = scales(layer)["layer.input"], normal(6, 32)
        y = layer(x)
        y.sum().backward()
        expected = [quantized(x, before) @ quantized(w, s).T + layer.bias for s in (1.0, fresh)]
        return [bool((y - e).abs().max() <= 1e-5 * y.abs().max()) for e in expected]

    for _ in range(3):
        assert weight_scales() == [True, False]
        assert scales(layer)["layer.weight"] == fresh
        assert filled(layer, "layer")[1] == 1
    change(layer)
    assert weight_scales()[1]
    assert filled(layer, "layer")[1] == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_interleaved_passes_each_forward_is_an_update_and_the_backwards_are_one(backend):
    model, twin = gpt("delayed", backend), gpt("delayed", backend)
    for first, second in ((1, 2), (3, 4)):
        losses = [loss_of(model, first), loss_of(model, second)]
        for loss in losses:
            loss.backward()
        for micro_batch in (first, second):
            loss_of(twin, micro_batch).backward()
    assert {tuple(filled(model, path)) for path in LINEARS} == {(4, 1, 2)}
    assert scales(model, ("weight",)) == scales(twin, ("weight",))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forward_without_a_backward_still_updates(backend):
    model, twin = gpt("delayed", backend), gpt("delayed", backend)
    loss_of(model, 1)
    loss_of(twin, 1).backward()
    for _ in range(2):  # a look changes nothing
        state, expected = fp8_state(model), fp8_state(twin)
        for name, value in state.items():
            if ".grad_output." in name:
                assert torch.equal(value, torch.full_like(value, float(name.endswith("scale"))))
            else:
                assert torch.equal(value, expected[name])
    loss_of(model, 2)
    assert filled(model) == [2, 1, 0]


# Passes that are not to be recorded, or fail


@pytest.mark.parametrize(
    ("recipe", "backend", "mode"),
    [*(case(*way, mode, quick=way == DELAYED[0] or mode == "eval")
       for way in DELAYED for mode in QUIET),
     *(case(*way, "no_grad", quick=False) for way in SOME if way not in DELAYED)],
)  # fmt: skip
def test_evaluations_between_do_not_change_the_training(recipe, backend, mode):
    plain, evaluated = gpt(recipe, backend), gpt(recipe, backend)
    for step in range(3):
        assert train(evaluated, [step], accumulate=2) == train(plain, [step], accumulate=2)
        before, state = raw(evaluated), fp8_state(evaluated)
        evaluated.train(mode != "eval")
        for length in (16, 13):
            with QUIET[mode]():
                loss = loss_of(evaluated, 50, length)
            if mode == "eval":
                loss.backward()
            # The row that records may hold amaxes of TE now; updates alone move the other rows.
            assert all(torch.equal(before[n][1:] if n.endswith("history") else before[n],
                                   x[1:] if n.endswith("history") else x)
                       for n, x in raw(evaluated).items())  # fmt: skip
            assert same(state, fp8_state(evaluated))
        evaluated.train()
    assert same(fp8_state(plain), fp8_state(evaluated))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_evaluation_between_forward_and_backward_changes_nothing(backend):
    plain, evaluated = gpt("delayed", backend), gpt("delayed", backend)
    for step in range(2):
        for model in (plain, evaluated):
            loss = loss_of(model, step)
            if model is evaluated:
                model.eval()
                with torch.no_grad():
                    loss_of(model, 50)
                model.train()
            loss.backward()
    assert_same(plain, evaluated)


@pytest.mark.parametrize(
    ("recipe", "backend", "length"),
    [*((*way, 13) for way in SOME), ("delayed", "te", 16)],
)
def test_a_first_pass_in_inference_mode_leaves_a_model_trainable(recipe, backend, length):
    model, twin = gpt(recipe, backend), gpt(recipe, backend)
    with torch.inference_mode():
        loss_of(model, 9, length)
    for trainee in (model, twin):
        for step in range(2):
            loss_of(trainee, step, length).backward()
    assert_same(model, twin)


@pytest.mark.parametrize(("recipe", "backend"), [*DELAYED[:2], ("nvfp4", "emulate")])
@pytest.mark.full
def test_a_pass_of_weights_on_meta_leaves_the_state_to_later_passes(recipe, backend):
    model, twin = gpt(recipe, backend), gpt(recipe, backend)
    x = tokens().to("meta")
    on_meta = {name: weight.to("meta") for name, weight in model.named_parameters()}
    for step in range(3):  # before the first, there is no amax to lose
        before = fp8_state(model)
        assert functional_call(model, on_meta, (x, x)).is_meta
        assert step == 0 or same(fp8_state(model), before)
        assert train(model, [step]) == train(twin, [step])
    assert same(fp8_state(model), fp8_state(twin))


def test_the_state_stays_where_it_is_if_the_weights_are_offloaded():
    from accelerate import cpu_offload

    shape = {"positions": "rope", "norm": "rmsnorm", "bias": False}  # no weight without a call
    model, twin = gpt(model=shape), gpt(model=shape)
    for trainee in (model, twin):
        train(trainee, range(2))
    cpu_offload(model, execution_device="cpu")
    assert next(model.parameters()).is_meta
    x, before = tokens(), fp8_state(model)
    with torch.no_grad():
        assert torch.equal(model(tokens_BT=x), twin(x))
    assert same(fp8_state(model), before)


def test_the_state_moves_with_the_model_before_code_is_compiled_that_cannot_move_it(monkeypatch):
    moved: list[torch.device] = []
    model = gpt("delayed", "emulate")
    monkeypatch.setattr(DelayedScaling, "move", lambda self, device: moved.append(device))
    model.to("cpu")
    assert set(moved) == {torch.device("cpu")}
    moved.clear()
    copy.deepcopy(model).to("meta")  # which holds no state
    assert moved == []
    gpt("delayed", "emulate")  # a model that is converted may be on the GPU already
    assert moved == [torch.device("cpu")]


@pytest.mark.parametrize("failing", ["train", "eval"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_passes_after_one_that_failed_record_as_before(backend, use_reentrant, failing):
    """Training loops catch such a failure when memory runs out. What it recorded counts."""
    model = checkpointed(gpt("delayed", backend), use_reentrant)
    hook = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    model.train(failing == "train")
    with pytest.raises(ZeroDivisionError):
        loss_of(model, 0)
    assert (te_stand_in.NOW.depth, te_stand_in.NOW.enabled) == (0, False)
    hook.remove()
    model.train()
    for step in range(3):
        loss_of(model, step).backward()
    in_first = 3 + (failing == "train")
    for path in LINEARS:
        forwards = in_first if path < "blocks.1" else 3
        assert filled(model, path)[::2] == [forwards, 3], path


@pytest.mark.parametrize("again", [False, True])
def test_a_backward_that_fails_half_way_can_be_tried_again_or_left(again):
    model, twin = gpt(), gpt()
    failing: list[bool] = []

    def fail(gradient):
        if failing:
            raise RuntimeError("half-way")

    model.blocks[0].register_forward_hook(lambda m, args, y: y.register_hook(fail) and None)
    for trainee in (model, twin):
        loss_of(trainee, 0).backward()
    loss, twin_loss = loss_of(model, 1), loss_of(twin, 1)
    failing.append(True)
    with pytest.raises(RuntimeError, match="half-way"):
        loss.backward(retain_graph=True)
    failing.clear()
    if again:
        loss.backward()
        twin_loss.backward()
    for trainee in (model, twin):
        trainee.zero_grad()
        loss_of(trainee, 2).backward()
    # The forward pass counts, and the backward pass as far as it came.
    assert scales(model, OPERANDS[:2]) == scales(twin, OPERANDS[:2])
    for path in LINEARS:
        assert filled(model, path) == [3, 1, 3 if again or path > "blocks.1" else 2]


def test_a_frozen_or_unused_layer_keeps_its_gradient_scale():
    used, unused = (linear("delayed", 32, 48)[0] for _ in range(2))
    used.requires_grad_(False)
    (used(normal(6, 32).requires_grad_()).sum() + 0 * unused.weight.sum()).backward()
    assert scales(used)["layer.grad_output"] == 57344.0
    assert set(scales(unused).values()) == {1.0}


# The state is saved, restored, copied, moved


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_restored_state_continues_training_to_the_bit(backend):
    straight, first, second, unscaled = (gpt("delayed", backend, seed=s) for s in (0, 0, 5, 5))
    expected = train(straight, range(6))
    optimizer = torch.optim.Adam(first.parameters(), lr=0.02, eps=0.01)
    losses = train(first, range(3), optimizer)
    train(second, [9])  # a past to be forgotten
    for model in (second, unscaled):
        model.load_state_dict(first.state_dict())
    load_fp8_state(second, fp8_state(first))
    assert same(fp8_state(first), fp8_state(second))
    resumed = torch.optim.Adam(second.parameters(), lr=0.02, eps=0.01)
    resumed.load_state_dict(optimizer.state_dict())
    losses += train(second, range(3, 6), resumed)
    assert losses == expected
    assert same(fp8_state(straight), fp8_state(second))
    assert loss_of(unscaled, 3).item() != expected[3]


@pytest.mark.capability("B7")
@pytest.mark.parametrize(
    ("writer", "reader"),
    [("te", "emulate"), ("emulate", "te"), ("torch", "emulate"), ("emulate", "torch")],
)
def test_training_goes_on_with_the_other_backend(writer, reader):
    first, second = gpt("delayed", writer), gpt("delayed", reader, seed=9)
    straight = gpt("delayed", writer)
    train(first, range(3))
    second.load_state_dict(first.state_dict())
    load_fp8_state(second, fp8_state(first))
    assert same(fp8_state(first), fp8_state(second))
    train(straight, range(3))
    expected = train(straight, range(3, 8))
    assert train(second, range(3, 8)) == pytest.approx(expected, rel=0.01)
    assert train(first, range(3, 8)) == expected


def test_a_state_of_other_layers_or_another_recipe_is_an_error_and_changes_nothing():
    model, untrained = gpt(), gpt()
    train(model, [0])
    state, before = fp8_state(untrained), raw(model)
    for value in fp8_state(model).values():  # copies
        value.fill_(9.0)
    with pytest.raises(UserError, match=r"blocks\.7\.x\.scale"):
        load_fp8_state(model, state | {"blocks.7.x.scale": torch.ones(())})
    with pytest.raises(UserError, match="float16"):
        load_fp8_state(model, {name: value.half() for name, value in state.items()})
    with pytest.raises(UserError, match="1024"):
        load_fp8_state(gpt(history_length=16), state)
    assert same(before, raw(model))
    plain = gpt("fp32", "auto")
    assert fp8_state(plain) == {}
    load_fp8_state(plain, {})
    with pytest.raises(UserError, match="recipe keeps none"):
        load_fp8_state(plain, state)


@pytest.mark.parametrize(("recipe", "backend"), SOME)
def test_a_copy_of_a_model_has_a_state_of_its_own(recipe, backend):
    model, twin = gpt(recipe, backend), gpt(recipe, backend)
    for trainee in (model, twin):
        train(trainee, range(2))
    before, copied = fp8_state(model), copy.deepcopy(model)
    assert same(before, fp8_state(copied))
    expected = train(twin, range(2, 4))
    assert train(copied, range(2, 4)) == expected
    assert same(before, fp8_state(model))
    assert same(fp8_state(copied), fp8_state(twin))
    assert train(model, range(2, 4)) == expected
    assert same(fp8_state(model), fp8_state(copied))


@pytest.mark.parametrize("backend", BACKENDS)
def test_models_side_by_side_keep_their_own_histories(backend):
    alone, together = (
        [gpt("delayed", backend, seed=s, history_length=n) for s, n in ((0, 2), (1, 8))]
        for _ in range(2)
    )
    for index, model in enumerate(alone):
        for step in range(3):
            loss_of(model, 10 * index + step).backward()
    for step in range(3):  # one backward pass through both
        sum(loss_of(model, 10 * index + step) for index, model in enumerate(together)).backward()
    for model_alone, model_together in zip(alone, together, strict=True):
        assert_same(model_alone, model_together)
    assert scales(alone[0]) != scales(alone[1])


def test_converting_a_model_does_not_round_its_state():
    model = gpt()
    train(model, range(2))
    before = raw(model)
    assert same(before, raw(model.bfloat16()))
