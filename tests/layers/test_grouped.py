"""A grouped linear computes what a loop of linears over its groups computes, to the bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint, noop_context_fn

from fp8stack.common.errors import UserError
from fp8stack.layers import build_backend, fp8_state, load_fp8_state
from fp8stack.layers.activation_checkpoint import contexts
from fp8stack.layers.compiler import compiled
from fp8stack.layers.grouped import GroupedLinear, QuantizedGroupedLinear
from tests.faults.processes import in_ranks
from tests.support import grouped_ranks
from tests.support.backend_models import (
    H100,
    change_weights,
    grad,
    normal,
    planned,
    raw,
    same,
)
from tests.support.grouped_models import (
    IN,
    OUT,
    PLAIN,
    RECIPES,
    Grouped,
    Loop,
    ends_of,
    passed,
)
from tests.support.operators import Operators


def assert_same(grouped: Grouped, loop: Loop, results: list[Tensor], expected: list[Tensor]):
    names = ["weight"] if grouped.up.bias is None else ["weight", "bias"]
    results = [*results, *(grad(grouped.up.get_parameter(name)) for name in names)]
    expected = [*expected, *map(loop.stacked, names)]
    torch.testing.assert_close(results, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "backend",
    [None, pytest.param("aot_eager", marks=pytest.mark.full),
     pytest.param("inductor", marks=pytest.mark.slow)],
)  # fmt: skip
@pytest.mark.parametrize("recipe", [*RECIPES, *PLAIN])
def test_output_and_gradients_are_those_of_a_loop_of_linears(recipe, backend) -> None:
    """The rows of `fp8stack conform` compare grouped GEMMs with float64 on the exact operands."""
    torch.compiler.reset()
    grouped = Grouped(recipe, bias=recipe != "mxfp8")
    loop = Loop(recipe, grouped)
    run = grouped if backend is None else compiled(grouped, backend)
    counter = torch._dynamo.utils.counters["stats"]
    for seed, sizes in enumerate(([5, 33, 16, 1], [0, 54, 0, 1], [20, 20, 10, 5], [1, 2, 3, 49])):
        dtype = torch.bfloat16 if recipe == "delayed" else torch.float32
        grouped.zero_grad()
        loop.zero_grad()
        results = passed(run, sizes, dtype, seed)
        assert_same(grouped, loop, results, passed(loop, sizes, dtype, seed))
        if seed == 1:
            graphs = counter["unique_graphs"]
    assert counter["unique_graphs"] == graphs


@pytest.mark.parametrize("passes", [None, pytest.param("aot_eager", marks=pytest.mark.full)])
def test_delayed_scales_over_steps_are_those_of_a_loop_whose_linears_miss_some(passes) -> None:
    torch.compiler.reset()
    grouped = Grouped("delayed", history_length=4)
    loop = Loop("delayed", grouped, history_length=4)
    run = grouped if passes is None else compiled(grouped, passes)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (grouped, loop)]
    for step, sizes in enumerate(
        ([8, 0, 4, 4], [0, 8, 8, 0], [0, 0, 16, 0], [4, 4, 4, 4], [16, 0, 0, 0], [2, 6, 0, 8])
    ):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for batch in (sizes, sizes[::-1]):  # micro-batches, which share the cast of the weight
            results = passed(run, batch, torch.float32, step)
            assert_same(grouped, loop, results, passed(loop, batch, torch.float32, step))
        for optimizer in optimizers:
            optimizer.step()
    state, expected = fp8_state(grouped), fp8_state(loop)
    for operand in ("input", "weight", "grad_output"):
        for suffix, dim in (("scale", 0), ("amax_history", 1)):
            slots = [expected[f"up.{group}.{operand}.{suffix}"] for group in range(4)]
            stored = state[f"up.{operand}.{suffix}"]
            torch.testing.assert_close(stored, torch.stack(slots, dim), rtol=0, atol=0)
    assert len(state) == 6


def test_no_rows_at_all_give_zero_gradients() -> None:
    for recipe in ("delayed", "nvfp4", "fp32"):
        grouped = Grouped(recipe)
        y, dx = passed(grouped, [0, 0, 0, 0], torch.float32)
        assert y.shape == (0, OUT)
        assert dx.shape == (0, IN)
        assert (grad(grouped.up.weight) == 0).all()


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4"])
def test_fp8_state_makes_a_run_go_on_to_the_bit(recipe) -> None:
    first = Grouped(recipe)
    for step in range(3):
        first.zero_grad()
        passed(first, [3, 0, 9, 4], torch.float32, step)
    second = Grouped(recipe)
    second.load_state_dict(first.state_dict())
    load_fp8_state(second, fp8_state(first))
    change_weights(first)  # as an optimizer's step before a checkpoint does
    results = [passed(model, [2, 5, 5, 4], torch.float32, 9) for model in (first, second)]
    assert all(map(torch.equal, *results))
    assert same(fp8_state(first), fp8_state(second))


def test_ranks_that_shard_the_weights_compute_what_ranks_with_all_of_them_do() -> None:
    for equal in in_ranks(grouped_ranks.all_of, 2):
        assert [len(tensors) for tensors in equal.values()] == [12, 6, 6]
        assert all(map(all, equal.values()))


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8", "fp32"])
def test_selective_checkpointing_multiplies_no_group_again(recipe) -> None:
    """And gives the same gradients."""
    results, counts = [], []
    for selective in (True, False):
        grouped = Grouped(recipe)
        x = normal(16, IN).requires_grad_()
        context = contexts if selective else noop_context_fn
        y = checkpoint(grouped, x, ends_of([4, 0, 8, 4]), use_reentrant=False, context_fn=context)
        with Operators() as operators:
            y.square().sum().backward()
        results.append([y.detach(), grad(x), grad(grouped.up.weight)])
        counts.append(sum("_gemm" in name for name in operators.names))
    assert counts == [2, 3]
    assert all(map(torch.equal, *results))


def test_state_of_another_number_of_groups_is_refused_by_name() -> None:
    state = fp8_state(Grouped("delayed", groups=3))
    with pytest.raises(UserError, match=r"up\.input\.amax_history.*\(1024, 3\).*\(1024, 4\)"):
        load_fp8_state(Grouped("delayed"), state)


@pytest.mark.parametrize("quiet", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_records_nothing(quiet) -> None:
    grouped = Grouped("delayed")
    passed(grouped, [4, 4, 4, 4], torch.float32)
    before = raw(grouped)
    with quiet():
        grouped.eval()(100 * normal(16, IN), ends_of([4, 4, 4, 4]))
    assert same(raw(grouped), before)


def test_a_frozen_weight_or_an_input_without_gradient_costs_no_gemm() -> None:
    counts = []
    for train_weight, train_input in ((True, True), (False, True), (True, False)):
        grouped = Grouped("current")
        grouped.up.weight.requires_grad_(train_weight)
        x = normal(16, IN).requires_grad_(train_input)
        grouped(x, ends_of([4, 4, 4, 4])).sum().backward()
        assert (x.grad is not None) == train_input
        assert (grouped.up.weight.grad is not None) == train_weight
        counts.append(grouped.up.backend.gemm_count)
    assert counts == [3, 2, 2]


@pytest.mark.parametrize(
    ("shape", "ends", "message"),
    [
        ((8, IN), [2, 4, 6, 7], "for 8 rows"),
        ((8, IN), [4, 2, 6, 8], r"\[4, 2, 6, 8\]"),
        ((8, IN), [4, 8], r"int32 \[4\]"),
        ((8, IN), [2.0, 4.0, 6.0, 8.0], "not float32"),
        ((8, OUT), [2, 4, 6, 8], r"\[rows, 72\]"),
        ((2, 4, IN), [2, 4, 6, 8], r"\[2, 4, 72\]"),
    ],
)
@pytest.mark.parametrize("recipe", ["delayed", "fp32"])
def test_arguments_that_are_no_groups_are_refused(recipe, shape, ends, message) -> None:
    model, x = Grouped(recipe).eval(), torch.ones(shape)
    ends = torch.tensor(ends)
    with pytest.raises(UserError, match=message):
        model(x, ends if ends.is_floating_point() else ends.int())


def test_in_fp8_may_be_switched_off_and_on() -> None:
    grouped = Grouped("current")
    quantized = passed(grouped, [4, 4, 4, 4], torch.float32)[0]
    grouped.up.in_fp8 = False
    plain = passed(grouped, [4, 4, 4, 4], torch.float32)[0]
    weight, bias = grouped.up.weight.detach(), grouped.up.bias.detach()
    x = normal(16, IN)
    expected = [F.linear(x[4 * i : 4 * i + 4], weight[i], bias[i]) for i in range(4)]
    assert torch.equal(plain, torch.cat(expected))
    grouped.up.in_fp8 = True
    assert torch.equal(passed(grouped, [4, 4, 4, 4], torch.float32)[0], quantized)
    assert not torch.equal(plain, quantized)


def test_a_backend_without_grouped_gemms_has_groups_emulated_with_the_reason() -> None:
    plan = planned("block", "torch", H100)
    plan = plan.for_layers({"linear": (128, 128), "up": (IN, OUT)}, grouped={"up": 4})
    assert "up: block, torch's grouped GEMM takes E4M3" in " ".join(plan.reasons)
    assert plan.layer("linear").backend is None
    built = build_backend(plan)
    layer = built.grouped_linear("up", 4, IN, OUT, False)
    built.attach(layer)
    passed(layer, [4, 4, 0, 4], torch.float32)
    assert (grad(layer.weight)[2] == 0).all()
    assert built.fp8_gemms() == 3


def test_a_plan_without_fp8_builds_a_plain_grouped_linear() -> None:
    assert type(Grouped("bf16").up) is GroupedLinear
    assert type(Grouped("delayed").up) is QuantizedGroupedLinear
