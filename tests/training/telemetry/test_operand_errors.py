"""Samples of a run: their rows against what the layers cast, and that sampling changes nothing."""

from __future__ import annotations

import contextlib
import json
import math
from itertools import pairwise
from operator import ne
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8stack
from fp8stack import convert, numerics
from fp8stack.layers import build_backend, fp8_state
from fp8stack.layers.observe import observing
from fp8stack.model.config import GPTConfig, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.precision import Hardware, Plan, load_recipe
from fp8stack.training.telemetry.operand_errors import Sample, Telemetry
from tests.conftest import refusal
from tests.support.backend_models import normal
from tests.support.grouped_models import Grouped, passed
from tests.support.host_copies import watch_copies

WHAT_IF = ("current", "block", "mxfp8", "bf16", "fp16", "fp32")
CONFIG = GPTConfig(vocabulary=64, context=32, layers=1, width=32, heads=2)
PARTS = ("attention.qkv", "attention.output", "mlp.up", "mlp.down")
LINEARS = [f"blocks.0.{name}" for name in PARTS]
FIRST = (LINEARS[0], "weight")
OPERANDS = ("input", "weight", "grad_output")
KEYS = [
    "step", "layer", "operand", "recipe", "what_if", "format", "amax", "scale", "headroom_bits",
    "saturated", "underflow", "nonfinite", "sqnr_db",
]  # fmt: skip


def plan_of(recipe: str, backend: str = "auto") -> Plan:
    return plan_for(CONFIG, recipe, Hardware("cpu"), backend)


def gpt(plan: Plan) -> GPT:
    return GPT(CONFIG, build_backend(plan))


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


def backward(model: GPT, seed: int) -> Tensor:
    tokens = torch.randint(64, (2, 33), generator=torch.Generator().manual_seed(seed))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return loss.detach()


def sampled(telemetry: Telemetry, model: GPT, step: int) -> Sample:
    with telemetry.sampling(model):
        backward(model, step)
    return telemetry.finish(step, model.backend.fp8_gemms())


def by_operand(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["layer"], row["operand"]): row for row in rows}


@pytest.mark.parametrize(
    ("recipe", "every", "what_if", "looks"),
    [
        ("delayed", 0, ("current",), False),
        ("fp32", 5, (), False),
        ("fp32", 5, ("current",), True),
        ("mxfp8", 5, (), True),
    ],
)
def test_nothing_is_sampled_where_there_is_nothing_to_see(
    recipe: str, every: int, what_if: tuple[str, ...], looks: bool
) -> None:
    telemetry = Telemetry(plan_of(recipe), every, what_if)
    due = [step for step in range(3, 18) if telemetry.due(step, 3, 17)]
    assert due == ([3, 5, 10, 15, 17] if every else [])
    assert bool(due and telemetry.sees_operands) is looks


@pytest.mark.parametrize("backend", ["emulate", "torch"])
def test_the_rows_are_those_of_what_was_cast(backend: str) -> None:
    plan = plan_of("delayed", backend)
    model, twin = gpt(plan), gpt(plan)
    for gpt_model in (model, twin):
        optimizer = torch.optim.SGD(gpt_model.parameters(), lr=0.1)
        for step in range(2):
            backward(gpt_model, step)
            optimizer.step()  # weights that did not change keep their scale
        with torch.no_grad():
            gpt_model.get_parameter("blocks.0.mlp.up.weight").mul_(3)  # more than the scale is for
    scales = {name: float(tensor) for name, tensor in fp8_state(model).items() if "scale" in name}
    cast: dict[tuple[str, str], Tensor] = {}

    def see(path: str, layer: nn.Module, operand: str, x: Tensor) -> None:
        cast[path, operand] = x.clone()

    with observing(twin, see):
        backward(twin, 2)
    sample = sampled(Telemetry(plan, 1), model, 2)
    assert [(row["layer"], row["operand"]) for row in sample.rows[1:]] == list(cast)
    for (layer, operand), row in by_operand(sample.rows[1:]).items():
        x = cast[layer, operand].double()
        scale = scales[f"{layer}.{operand}.scale"]
        format = "e5m2" if operand == "grad_output" else "e4m3"
        data = numerics.cast_to_fp8(cast[layer, operand], scale, format).double()
        noise = (x - data / scale).square().sum()
        assert list(row) == KEYS
        stated = [row[key] for key in ("step", "recipe", "what_if", "format", "nonfinite")]
        assert stated == [2, "delayed", False, format, 0]
        assert row["amax"] == pytest.approx(float(x.abs().max()))
        assert row["scale"] == pytest.approx(scale)
        limit = 57344 if format == "e5m2" else 448
        bits = math.log2(limit / float(x.abs().max()) / scale)
        assert row["headroom_bits"] == pytest.approx(bits, abs=1e-5)
        assert row["underflow"] == pytest.approx(float(((x != 0) & (data == 0)).double().mean()))
        assert row["sqnr_db"] == pytest.approx(float(10 * (x.square().sum() / noise).log10()), 1e-4)
        most = 61440 if format == "e5m2" else 464
        clipped = float(((x * scale).abs() > most).double().mean())
        assert row["saturated"] == pytest.approx(clipped, rel=1e-5)
    assert by_operand(sample.rows[1:])["blocks.0.mlp.up", "weight"]["saturated"] > 0.1
    assert any(row["underflow"] > 0 for row in sample.rows[1:])
    assert any(row["headroom_bits"] < 0 for row in sample.rows[1:])


def test_the_model_row_tells_what_ran() -> None:
    model = gpt(plan_of("current"))
    first, *_ = sampled(Telemetry(plan_of("current"), 1), model, 7).rows
    assert first == {
        "step": 7,
        "fp8_gemms": 12,
        "fp8_layers": 4,
        "layers": 5,
        "not_fp8": {"lm_head": "fp32, the recipe says head = false"},
        "scale_changes": None,
    }


def test_a_layer_that_left_fp8_has_no_rows_and_the_plan_of_then_says_why() -> None:
    plan = plan_of("delayed")
    model, telemetry = gpt(plan), Telemetry(plan, 1)
    model.blocks[0].mlp.up.in_fp8 = False
    left_out = {"blocks.0.mlp.up": "its gradient overflowed"}
    now = plan_for(CONFIG, "delayed", Hardware("cpu"), left_out=left_out)
    with telemetry.sampling(model):
        backward(model, 0)
    first, *rows = telemetry.finish(1, None, now).rows
    assert first["not_fp8"]["blocks.0.mlp.up"] == "fp32, its gradient overflowed"
    assert first["fp8_layers"] == 3
    assert first["fp8_gemms"] is None
    assert {row["layer"] for row in rows} == set(LINEARS) - {"blocks.0.mlp.up"}


@pytest.mark.full
def test_a_compiled_pass_is_sampled_and_changes_nothing() -> None:
    models = [convert(Mlp(), "delayed") for _ in "ab"]
    telemetry = Telemetry(fp8stack.plan_of(models[0]), 1)
    passes = [torch.compile(model, backend="eager") for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    losses = []
    for step in range(3):
        for model, call, optimizer in zip(models, passes, optimizers, strict=True):
            observed = step == 1 and model is models[0]
            with telemetry.sampling(model) if observed else contextlib.nullcontext():
                loss = call(normal(16, 32, seed=step)).square().mean()
                loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[::2] == losses[1::2]
    rows = telemetry.finish(1).rows
    assert [row["layer"] for row in rows[1:]] == ["0", "0", "2", "2", "2", "0"]
    assert rows[0]["scale_changes"] is None


def test_ranks_that_measure_no_operands_sample_none() -> None:
    model = convert(Mlp(), "current")
    telemetry = Telemetry(fp8stack.plan_of(model), 1, operands=False)
    with telemetry.sampling(model):
        model(normal(16, 32)).sum().backward()
    telemetry.gradients(model)
    assert [row["gradient"] for row in telemetry.finish(1).rows[1:]] == ["0", "2"]


def test_scale_changes_count_the_scales_that_moved_since_the_sample_before() -> None:
    plan = plan_of("delayed")
    model, telemetry = gpt(plan), Telemetry(plan, 1)
    scales, counts = [], []
    for step in range(6):
        if step in (1, 4):  # not sampled
            backward(model, step)
            continue
        state = fp8_state(model).items()
        scales.append([float(value) for name, value in state if name.endswith(".scale")])
        counts.append(sampled(telemetry, model, step).rows[0]["scale_changes"])
    moved = [sum(map(ne, *pair)) for pair in pairwise(scales)]
    assert counts == [None, *moved]
    assert moved[0] == 3 * len(LINEARS) > moved[1] > 0  # a smaller amax moves no scale


def test_blocked_recipes_have_no_single_scale() -> None:
    for recipe in ("block", "mxfp8"):
        model = gpt(plan_of(recipe))
        with torch.no_grad():
            up = model.get_parameter("blocks.0.mlp.up.weight")
            up[0] *= 2**-14  # too small for the scale of its block
        rows = sampled(Telemetry(plan_of(recipe), 1), model, 1).rows[1:]
        assert len(rows) == 3 * len(LINEARS)
        assert all(row["scale"] is None and row["headroom_bits"] >= 0 for row in rows)
        assert all(20 < row["sqnr_db"] < 45 for row in rows)
        weight = up.detach()
        quantizers: Any = load_recipe(recipe).quantizers
        decoded = numerics.dequantize(numerics.quantize(weight, quantizers.weight))
        noise = (weight - decoded).double().square().sum()
        ratio = float(10 * (weight.double().square().sum() / noise).log10())
        weight_row = by_operand(rows)["blocks.0.mlp.up", "weight"]
        assert weight_row["sqnr_db"] == pytest.approx(ratio, rel=1e-5)
        zeros = float((decoded == 0).double().mean())
        assert weight_row["underflow"] == pytest.approx(zeros, rel=1e-5)
        assert (weight_row["underflow"] > 0) == (recipe == "block")


def test_figures_that_are_not_finite_are_null() -> None:
    plan = plan_of("delayed")
    model, telemetry = gpt(plan), Telemetry(plan, 1, ("fp16",))
    with torch.no_grad():
        model.get_parameter("blocks.0.mlp.up.weight")[0, 0] = math.inf
        model.get_parameter("blocks.0.mlp.down.weight").fill_(1e30)
        model.get_parameter("blocks.0.attention.output.weight").zero_()
    rows = sampled(telemetry, model, 1).rows
    json.dumps(rows, allow_nan=False)
    by_place = by_operand([row for row in rows[1:] if not row["what_if"]])
    up = by_place["blocks.0.mlp.up", "weight"]
    assert up["amax"] is None
    assert up["nonfinite"] == pytest.approx(1 / (32 * 128), rel=1e-4)
    assert up["saturated"] == up["nonfinite"]
    zero = by_place["blocks.0.attention.output", "weight"]
    assert (zero["amax"], zero["headroom_bits"], zero["sqnr_db"]) == (0, None, None)
    half = by_operand([row for row in rows[1:] if row["what_if"]])["blocks.0.mlp.down", "weight"]
    assert (half["saturated"], half["sqnr_db"]) == (1, None)


def test_other_recipes_are_tried_on_the_same_operands() -> None:
    plan = plan_of("mxfp8")
    sample = sampled(Telemetry(plan, 1, WHAT_IF), gpt(plan), 1)
    rows = sample.rows[1:]
    assert [(row["recipe"], row["what_if"]) for row in rows[:7]] == [
        ("mxfp8", False), *((name, True) for name in WHAT_IF),
    ]  # fmt: skip
    for recipe in WHAT_IF:
        tried = [row for row in rows if row["recipe"] == recipe and row["what_if"]]
        assert len(tried) == 3 * len(LINEARS)
        assert {row["amax"] for row in tried} == {row["amax"] for row in rows if not row["what_if"]}
    # A run in that recipe casts the same first weight.
    native = by_operand(sampled(Telemetry(plan_of("block"), 1), gpt(plan_of("block")), 1).rows[1:])
    tried_by_operand = by_operand([row for row in rows if row["recipe"] == "block"])
    assert native[FIRST] | {"what_if": True} == tried_by_operand[FIRST]
    formats = {(row["recipe"], row["operand"]): row["format"] for row in rows}
    assert formats["current", "grad_output"] == "e5m2"
    assert formats["block", "grad_output"] == "e4m3"
    assert formats["bf16", "input"] == "bf16"
    exact = [row for row in rows if row["recipe"] == "fp32"]
    assert all(row["sqnr_db"] is None and row["underflow"] == 0 for row in exact)


@pytest.mark.parametrize("recipe", ["delayed", "fp32"])
def test_a_grouped_linear_has_a_row_for_each_operand_of_all_its_groups(recipe: str) -> None:
    grouped = Grouped(recipe)
    telemetry = Telemetry(grouped.plan, 1, "mxfp8")  # a name alone
    with telemetry.sampling(grouped):
        passed(grouped, [5, 0, 16, 1], torch.float32)
    rows = [row for row in telemetry.finish(1, 3).rows if "operand" in row]
    labels = [(row["layer"], row["operand"], row["recipe"]) for row in rows]
    recipes = [name for name in (recipe, "mxfp8") if name != "fp32"]
    assert sorted(labels) == sorted(("up", o, name) for o in OPERANDS for name in recipes)
    amaxes = {row["operand"]: row["amax"] for row in rows}
    assert amaxes["weight"] == pytest.approx(
        float(grouped.up.weight.detach().abs().max()), rel=1e-8
    )
    assert all(row["sqnr_db"] > 20 and row["scale"] is None for row in rows)


def _sampled_with(model: Any) -> None:
    with Telemetry(plan_of("current"), 1).sampling(model):
        pass


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: _sampled_with(nn.Sequential()), ("a Sequential has no layer", "the plan has")),
        (lambda: _sampled_with(gpt(plan_of("fp32"))), ("has no layer", "as the plan has it")),
        (lambda: _sampled_with(None), ("sampling takes a model (torch.nn.Module), not None",)),
        (lambda: Telemetry(gpt(plan_of("current"))), ("plan_of(model), not a GPT",)),  # type: ignore[arg-type]
        (lambda: Telemetry(plan_of("current"), every=1.5), ("every 1.5 is no number of steps",)),  # type: ignore[arg-type]
        (lambda: Telemetry(plan_of("current"), what_if=3), ("names of recipes, not an int",)),  # type: ignore[arg-type]
        (lambda: Telemetry(plan_of("current"), 1, ("delayed",)), ("'delayed'", "current")),
        (lambda: Telemetry(plan_of("current"), 1, ("tf32",)), ("tf32", "bf16")),
        (lambda: Telemetry(plan_of("current"), 1, ("mxpf8",)), ("'mxpf8'", "mxfp8")),
        (lambda: Telemetry(plan_of("current"), 1, ("block", "block")), ("'block'",)),
    ],
)
def test_what_cannot_be_sampled_is_refused(ask: Any, words: tuple[str, ...]) -> None:
    message = refusal(ask)
    assert all(word in message for word in words)


@pytest.mark.parametrize("recipe", ["delayed", "block"])
@pytest.mark.full
def test_a_sample_on_a_device_copies_nothing_to_it_and_reads_nothing_before_its_end(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = watch_copies(monkeypatch)
    config = GPTConfig(vocabulary=64, context=32, layers=1, width=128, heads=2)
    plan = plan_for(config, recipe, Hardware("cuda", (10, 0), cuda_version=(13, 0)), "torch")
    model = GPT(config, build_backend(plan)).to("meta")
    telemetry = Telemetry(plan, 1, ["current", "nvfp4", "fp16"])
    tokens = torch.zeros(2, 32, dtype=torch.int64, device="meta")
    for _ in range(2):  # tables and buffers are made in the first
        copies.clear()
        with telemetry.sampling(model):
            model(tokens, tokens).backward()
        telemetry.gradients(model)
    assert copies == []
    with pytest.raises(RuntimeError, match="meta"):
        telemetry.finish(1)


def test_numbers_are_named_by_figure_and_operand() -> None:
    plan = plan_of("current")
    sample = sampled(Telemetry(plan, 1, ("mxfp8",)), gpt(plan), 1)
    rows = {(r["recipe"], r["layer"], r["operand"]): r for r in sample.rows[1:]}
    row = rows["current", "blocks.0.mlp.up", "input"]
    for key in ("amax", "scale", "headroom_bits", "saturated", "underflow", "sqnr_db"):
        assert sample.numbers[f"fp8/{key}/blocks.0.mlp.up.input"] == row[key]
    tried = rows["mxfp8", "blocks.0.mlp.up", "input"]["sqnr_db"]
    assert sample.numbers["what_if/mxfp8/sqnr_db/blocks.0.mlp.up.input"] == tried
    assert len(sample.numbers) == (6 + 1) * 3 * len(LINEARS)
