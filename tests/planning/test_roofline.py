"""The prediction of a training step: every term against a calculation by hand, and the table."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fp8stack.analysis.benchmark.step_timing import FP8
from fp8stack.common.presets import training_recipes
from fp8stack.model.config import Experts, GPTConfig, load_config, padded_vocabulary, plan_for
from fp8stack.planning import roofline
from fp8stack.planning.roofline import PARTS, KernelWork, Prediction, ideal_work, predict
from fp8stack.planning.roofline_trace import Operator, OperatorTrace, Slice, trace_operators
from fp8stack.precision import Hardware, Plan, assumed, hardware, load_recipe, resolve
from fp8stack.precision.gpus import GPUS, find_gpu, gpu_named
from fp8stack.precision.profit import Rates, achievable, cast_bytes
from tests.conftest import refusal
from tests.support.cases import case

INF = math.inf
HOPPER, H200 = assumed("9.0"), gpu_named("H200")
BYTES = Rates(
    half=INF, fp8=INF, fp4=INF, attention=INF, fp8_attention=INF, casts=1.0, memory=1.0
)  # seconds are bytes
FLOPS = Rates(
    half=1.0, fp8=1.0, fp4=1.0, attention=1.0, fp8_attention=1.0, casts=INF, memory=INF
)  # seconds are operations
FREE = dataclasses.replace(BYTES, casts=INF, memory=INF)
NVFP4 = ("nvfp4", "nvfp4_forward_high")
ROWWISE = ("rowwise", "rowwise_wgrad_hp")
# The recipes that run natively on 12.0.
ON_12 = ["bf16", "block", "current", "delayed", "mxfp8", *NVFP4, *ROWWISE]
PRESETS = ("gpt-nano", "gpt2-124m", "gpt2-1.5b", "llama-1b", "llama-8b")


def of_presets(*recipes: str) -> list[Any]:
    """A model in each of these recipes, and another in the first; the others take longer."""
    return [
        case(
            model, recipe, quick=model == "llama-1b" or (model, recipe) == (PRESETS[0], recipes[0])
        )
        for model in PRESETS
        for recipe in recipes
    ]


def plan(config: GPTConfig, recipe: str, head: bool = False) -> Plan:
    chosen = load_recipe(recipe)
    if chosen.is_fp8:
        chosen = chosen.model_copy(update={"head": head})
    resolved = resolve(chosen, assumed("10.0") if recipe == "nvfp4" else HOPPER)
    return resolved.for_layers(config.linear_shapes(padded_vocabulary(config, 32)))


def at(rates: Rates, model: str = "gpt2-124m", recipe: str = "bf16", **options) -> Prediction:
    config = load_config(model)
    head = options.pop("head", False)
    sizes = {"batch": 4, "context": 128} | options
    return predict(config, plan(config, recipe, head), H200, rates=rates, **sizes)


def seconds(prediction: Prediction) -> dict[str, float]:
    return {name: ms / 1000 for name, ms in prediction.parts_ms.items()}


# Terms by hand


@pytest.mark.parametrize(("model", "recipe"), of_presets("delayed", "bf16", "nvfp4"))
def test_gemms_and_attention_do_the_operations_that_the_configuration_needs(model, recipe):
    config = load_config(model)
    config = config.model_copy(update={"vocabulary": padded_vocabulary(config, 32)})
    got = seconds(predict(config, plan(config, recipe), H200, batch=4, context=128, rates=FLOPS))
    # A seventh of attention's operations is done twice, and useful once.
    useful = got["GEMMs"] + got["head and loss"] + 6 / 7 * got["attention"]
    assert useful == pytest.approx(4 * 128 * config.flops_per_token(128), rel=1e-12)
    assert got["casts"] == got["optimizer"] == got["norms, elementwise"] == 0


def test_work_takes_as_long_as_its_operations_or_its_bytes():
    rates = Rates(
        half=1e6, fp8=2e6, fp4=3e6, attention=4e6, fp8_attention=8e6, casts=5e2, memory=1e3
    )
    assert KernelWork(category="GEMMs", moved=1, flops=8192).seconds(rates) == pytest.approx(
        8192 / 1e6
    )
    fp8, attention = (
        KernelWork(category="", moved=1, flops=8192, rate=x) for x in ("fp8", "attention")
    )
    assert fp8.seconds(rates) == pytest.approx(8192 / 2e6)
    assert attention.seconds(rates) == pytest.approx(8192 / 4e6)
    assert KernelWork(category="", moved=100, flops=8192).seconds(rates) == pytest.approx(100 / 1e3)


@pytest.mark.parametrize(
    ("recipe", "inputs", "gradients", "weights"),
    [
        ("delayed", 4, 4, 6),
        ("current", 6, 6, 10),
        ("block", 4 + 8 / 128, 4 + 8 / 128, 6),
        ("mxfp8", 4 + 2 / 32, 4 + 2 / 32, 6 + 2 / 32),
        ("mxfp4", 3 + 2 / 32, 3 + 2 / 32, 5 + 2 / 32),  # half a byte each
        ("mxfp6_e2m3", 4 + 2 / 32, 4 + 2 / 32, 6 + 2 / 32),  # a byte each
        # A pass finds the tensor's amax, and a second writes two copies, each with scales.
        ("nvfp4", 5 + 2 / 16, 5 + 2 / 16, 9),
        ("rowwise_wgrad_hp", 3, 3, 5 + 9),
        ("nvfp4_forward_high", 4.5 + 1 / 16, 5 + 2 / 16, 8.5 + 6),
    ],
)
def test_casts_alone_move_so_many_bytes_per_element_of_each_operand(
    recipe, inputs, gradients, weights
):
    quantizers = load_recipe(recipe).quantizers
    assert quantizers is not None
    got = [cast_bytes(quantizers, name) for name in ("input", "grad_output", "weight")]
    assert got == pytest.approx([inputs, gradients, weights])


# M tokens in two sequences of T, width D, MLP width H, vocabulary V
LAYERS, T, D, H, V = 3, 5, 10, 7, 64
M, WEIGHTS = 2 * T, LAYERS * (D * 3 * D + D * D + 2 * D * H)
SMALL = GPTConfig(
    vocabulary=V, context=16, layers=LAYERS, width=D, heads=1, mlp_width=H, bias=False
)


def small(**changes) -> dict[str, float]:
    config = SMALL.model_copy(update=changes)
    plain = resolve("bf16", HOPPER).for_layers(config.linear_shapes())
    return seconds(predict(config, plain, H200, batch=2, context=T, rates=BYTES))


# The residual stream x and its gradient are float32, all else is bf16; y is a linear's output.
# A norm fused with the residual sum reads x and y, and writes x and the norm's output. Backward, it
# reads the output's gradient, x and its gradient, and writes the gradients of x and of y.
NORM = (4 + 2 + 4 + 2) + (2 + 4 + 4 + 4 + 2)
# The first norm reads an embedding's row, and adds the gradient of x to the row's. The last norm
# does not write x, which the backward pass sums again, and x has no other gradient.
FIRST = (4 + 4 + 2) + (2 + 4 + 4) + (4 + 4)
LAST = (4 + 2 + 2) + (2 + 4 + 2 + 4 + 2)
ENDS = FIRST + LAST - NORM
TABLE = 2 * 4 * T * D  # of positions: rows are read, and their gradient written
NORM_WEIGHTS = 3 * 4 * D * (2 * LAYERS + 1)  # read in both passes, their gradients written


@pytest.mark.parametrize(
    ("changes", "more", "fixed"),
    [
        # Attention writes qkv's output gradient, which is read again for the bias; other kernels
        # sum the gradients that they write. The norms' biases are read in both passes, and their
        # gradients are written.
        ({"bias": True}, 2 * 3 * D, 3 * 4 * D * (2 * LAYERS + 1)),
        # Cosines and sines in both passes.
        ({"positions": "rope"}, 8 * 2 * D, 3 * 2 * 2 * 4 * T * D - TABLE),
        ({"qk_norm": True}, 10 * 2 * D, 3 * 2 * 3 * 4 * D),
        ({"activation": "swiglu"}, 6 * H, 0),
        (
            {"positions": "rope", "heads": 5, "kv_heads": 1},
            8 * (D + 2),
            3 * 2 * 2 * 4 * T * 2 - TABLE,
        ),
    ],
    ids=str,
)
def test_bytes_of_norms_and_activations_by_hand(changes, more, fixed):
    # An activation reads and writes H; backward, it reads two tensors and writes a gradient.
    expected = M * (LAYERS * (2 * NORM * D + 10 * H) + ENDS * D) + TABLE + NORM_WEIGHTS
    assert small()["norms, elementwise"] == pytest.approx(expected)
    expected += M * LAYERS * more + fixed
    assert small(**changes)["norms, elementwise"] == pytest.approx(expected)


def test_bytes_of_attention_loss_weights_and_optimizer_by_hand():
    got = small()
    # Forward, q, k, v and the output; backward, these and their gradients; in both, a float32
    # log-sum-exp for each query and head.
    assert got["attention"] == pytest.approx(M * 3 * (12 * (D + D) + 8))
    grouped = small(heads=5, kv_heads=1)
    assert grouped["attention"] == pytest.approx(M * 3 * (12 * (D + 2) + 8 * 5))
    assert got["optimizer"] == pytest.approx(36 * SMALL.parameters())
    gemms = 2 * ((640 + 10 * M) + 64 * M) + 2 * ((640 + 64 * M) + 10 * M)
    gemms += 2 * ((10 + 64) * M + 640)
    # Logits in bf16 are read in both passes and their gradient is written; a few numbers of loss.
    assert got["head and loss"] == pytest.approx(6 * V * M + gemms, abs=32)
    # Each float32 weight is rounded to bf16, and its gradient back.
    assert got["casts"] == pytest.approx((4 + 2 + 2 + 4) * (WEIGHTS + V * D))


WIDE = GPTConfig(
    vocabulary=256, context=64, layers=4, width=128, heads=2, mlp_width=384, bias=False, tied=False
)


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_bytes_of_quantized_layers_by_hand(recipe):
    config, tokens = WIDE, 4 * 64
    got = seconds(predict(config, plan(config, recipe), H200, batch=4, context=64, rates=BYTES))
    d, h, layers = 128, 384, 4
    # Two copies, of a byte per element, of the inputs and output gradients of qkv, output, up and
    # down. The casts read what attention wrote; other kernels cast their own outputs.
    operands = (d + d + d + h) + (3 * d + d + h + d)
    casts: float = 2 * operands + 2 * d + 2 * 3 * d
    weights = 6
    # Kept in FP8 only: forward, the outputs of all norms but the last; backward, the gradients that
    # all norms but the first write for y; the outputs and gradients of activations.
    elementwise = layers * (2 * NORM * d + 10 * h) + ENDS * d
    elementwise -= 2 * (2 * layers * 2 * d + layers * 2 * h)
    if recipe == "current":  # casts wait for the amax, and read bf16 again
        casts += 2 * operands + 2 * (operands - d - 3 * d)
        weights += 4
    if recipe == "block":
        casts += operands * 8 / 128  # scales
    # An amax history for each operand of the four linears, read and written.
    once = 2 * 4 * 1024 * 12 * layers if recipe == "delayed" else 0
    positions = 2 * 4 * 64 * d
    norms = 3 * 4 * d * (2 * layers + 1)
    expected: float = tokens * elementwise + positions + norms
    assert got["norms, elementwise"] == pytest.approx(expected, rel=1e-6)
    layer_weights = layers * (d * 3 * d + d * d + 2 * d * h)
    if recipe == "block":  # output's weight is a single block, with the amax of the matrix
        once = 4 * d * d * layers
    expected = tokens * layers * casts + weights * layer_weights + 12 * 256 * d + once
    assert got["casts"] == pytest.approx(expected, rel=2e-3)  # and some scales and amaxes
    # Operands of a byte, y and dx in bf16, dw in float32; scales are some bytes more.
    gemms = sum(
        (tokens * k + k * n + 2 * tokens * n)
        + (tokens * n + k * n + 2 * tokens * k)
        + (tokens * (k + n) + 4 * k * n)
        for k, n in ((d, 3 * d), (d, d), (d, h), (h, d))
    )
    assert got["GEMMs"] == pytest.approx(layers * gemms, rel=0.03 if recipe == "block" else 1e-3)


def planned(config: GPTConfig, recipe: str) -> Plan:
    return plan_for(config, recipe, assumed("10.0") if recipe == "nvfp4" else HOPPER)


@pytest.mark.parametrize(
    ("model", "recipe"),
    [("gpt-nano-moe", "delayed"), ("olmoe-7b", "bf16"), case("deepseek-16b", "nvfp4", quick=False)],
)
def test_gemms_of_experts_do_the_operations_of_the_experts_that_are_chosen(model, recipe):
    config, tokens = load_config(model), 4 * 128
    got = seconds(predict(config, planned(config, recipe), H200, batch=4, context=128, rates=FLOPS))
    useful = got["GEMMs"] + got["head and loss"] + 6 / 7 * got["attention"]
    assert useful == pytest.approx(tokens * config.flops_per_token(128), rel=1e-12)
    # By hand: attention's four matrices, three of each expert that a token meets, and the router.
    if model == "olmoe-7b":
        d, h, chosen, experts, layers = 2048, 1024, 8, 64, 16
        assert got["GEMMs"] == 6 * tokens * layers * (4 * d * d + chosen * 3 * d * h + d * experts)


def test_gemms_of_experts_read_the_weights_of_all_and_the_rows_of_those_chosen():
    experts = Experts(count=8, per_token=2, width=256, first_dense=2)
    config, tokens, d, h = WIDE.model_copy(update={"experts": experts}), 4 * 64, 128, 384
    got = seconds(
        predict(config, planned(config, "delayed"), H200, batch=4, context=64, rates=BYTES)
    )

    def gemms(rows: int, k: int, n: int, groups: int = 1) -> int:
        """Operands of a byte, y and dx in bf16, dw in float32."""
        weights = groups * k * n
        moved = (rows * k + weights + 2 * rows * n) + (rows * n + weights + 2 * rows * k)
        return moved + rows * (k + n) + 4 * weights

    attention = gemms(tokens, d, 3 * d) + gemms(tokens, d, d)
    dense = gemms(tokens, d, h) + gemms(tokens, h, d)
    mixture = gemms(2 * tokens, d, 256, 8) + gemms(2 * tokens, 256, d, 8)
    mixture += 3 * 4 * (tokens * d + d * 8 + tokens * 8)  # the router's, in float32
    assert got["GEMMs"] == pytest.approx(4 * attention + 2 * (dense + mixture), rel=2e-3)
    assert got["optimizer"] == 36 * config.parameters()


def test_blocks_of_several_kinds_are_counted_one_by_one():
    chosen = load_recipe("delayed", {"exclude": ("blocks.0.*", "blocks.3.mlp.up")})
    resolved = resolve(chosen, HOPPER).for_layers(WIDE.linear_shapes())
    got = predict(WIDE, resolved, H200, batch=2, context=64, rates=BYTES).parts_ms
    traced_blocks = trace_operators(WIDE, resolved, 2, 64, blocks=(0, 1, 2, 3))
    every = list(ideal_work(traced_blocks))
    for category in ("GEMMs", "attention", "norms, elementwise", "head and loss"):
        moved_bytes = sum(work.moved for work in every if work.category == category)
        assert 1000 * moved_bytes == pytest.approx(got[category], rel=1e-4)


# The rule


def traced(*operators: dict) -> OperatorTrace:
    """Operators of values of 100 bytes each; `reads` is their numbers."""
    traced_operators, count = [], 0
    for operator in operators:
        reads = tuple(Slice(number, 0, 100) for number in operator["reads"])
        traced_operators.append(
            Operator(**({"name": "", "path": "", "backward": False} | operator | {"reads": reads}))
        )
        count = max(count, *operator["reads"], *operator["writes"])
    return OperatorTrace(operators=traced_operators, values=[100] * (count + 1), lasting=set())


def moved(*operators: dict) -> int:
    return sum(work.moved for work in ideal_work(traced(*operators)))


def test_operators_that_can_be_fused_are_one_kernel():
    first, second = {"reads": [0], "writes": [1]}, {"reads": [1, 0], "writes": [2]}
    gemm = {"reads": [2, 3], "writes": [4], "rate": "half"}
    # 0 is read once, 1 is never in memory, 2 is written for the GEMM, which reads 2 and 3
    after = {"reads": [4], "writes": [5]}
    assert moved(first, second, gemm, after) == 100 * (1 + 1 + 3 + 1)
    # A value that is needed after the GEMM is written before it and read again.
    assert moved(first, second, gemm, after | {"reads": [4, 1]}) == 100 * (1 + 2 + 3 + 2)
    # The backward pass computes it again from values in memory.
    back = {"reads": [4, 1], "writes": [5], "backward": True}
    assert moved(first, second, gemm, back) == 100 * (1 + 1 + 3 + 2)


def test_an_operator_that_needs_a_reduction_of_the_tensor_is_another_kernel():
    first = {"reads": [0], "writes": [1]}
    amax = {"reads": [1], "writes": [2]}
    cast = {"reads": [1, 2], "writes": [3]}
    gemm = {"reads": [3], "writes": [4], "rate": "fp8"}
    together = moved(first, amax, cast, gemm, {"reads": [4], "writes": [5]})
    assert together == 100 * (1 + 1 + 2 + 1)
    apart = moved(first, amax | {"reduces": True}, cast, gemm, {"reads": [4], "writes": [5]})
    assert apart == 100 * (1 + 2 + 3 + 2 + 1)


# A step


@pytest.mark.parametrize(("model", "recipe"), of_presets("delayed", "current", "block", "nvfp4"))
def test_where_all_but_gemms_is_free_fp8_gains_the_ratio_of_the_rates(model, recipe):
    rates = Rates(
        half=7e14, fp8=13e14, fp4=26e14, attention=INF, fp8_attention=INF, casts=INF, memory=INF
    )
    plain, fp8 = at(rates, model, "bf16"), at(rates, model, recipe, head=True)
    assert plain.step_ms / fp8.step_ms == pytest.approx((26 if recipe == "nvfp4" else 13) / 7)


def test_checkpointing_does_the_forward_pass_of_the_blocks_again():
    plain, block, selective = (
        seconds(at(FLOPS, recipe="delayed", checkpointing=kind))
        for kind in ("none", "block", "selective")
    )
    # A third of the GEMMs' operations, and two sevenths of attention's, are of the forward pass.
    again = {"GEMMs": plain["GEMMs"] * 4 / 3, "attention": plain["attention"] * 9 / 7}
    assert block == pytest.approx(plain | again)
    assert selective == plain
    plain, selective = (
        seconds(at(BYTES, recipe="delayed", checkpointing=kind)) for kind in ("none", "selective")
    )
    changed = {name for name in PARTS if selective[name] != plain[name]}
    assert changed == {"norms, elementwise"}


@pytest.mark.parametrize("model", ["gpt2-1.5b", "llama-8b"])
def test_checkpointing_makes_the_passes_of_a_large_model_longer(model):
    passes = {}
    for kind in ("none", "selective", "block"):
        got = at(achievable(H200), model, batch=4, context=1024, checkpointing=kind)
        passes[kind] = got.step_ms - got.parts_ms["optimizer"]
    assert 1 < passes["selective"] / passes["none"] < 1.1
    assert 1.2 < passes["block"] / passes["none"] < 1.4


def test_a_head_that_stays_in_bf16_takes_as_long_as_before():
    plain, fp8 = at(FLOPS), at(dataclasses.replace(FLOPS, fp8=2.0), recipe="delayed")
    assert fp8.parts_ms["head and loss"] == plain.parts_ms["head and loss"]
    assert fp8.parts_ms["GEMMs"] == plain.parts_ms["GEMMs"] / 2
    assert (fp8.fp8_layers, fp8.layers) == (48, 49)


def test_attention_in_fp8_has_the_rate_of_fp8():
    config = load_config("llama-1b").model_copy(update={"layers": 1, "heads": 16})
    rates = dataclasses.replace(FLOPS, fp8_attention=2.0)
    recipes = (load_recipe("delayed", {"attention": x}) for x in ("compute", "delayed"))
    plans = [plan_for(config, recipe, HOPPER) for recipe in recipes]
    plain, fp8 = (
        seconds(predict(config, chosen, H200, batch=1, context=128, rates=rates))
        for chosen in plans
    )
    assert fp8 == plain | {"attention": plain["attention"] / 2}
    assert plain["attention"] > 0


@pytest.mark.parametrize(
    "recipe", [case(x, quick=x != "current") for x in ("bf16", "delayed", "current", "block")]
)
def test_half_the_bandwidth_doubles_what_is_bound_by_memory_and_free_casts_cost_nothing(recipe):
    rates = achievable(H200)
    before = at(rates, "gpt2-1.5b", recipe, batch=32, context=1024).parts_ms
    assert rates.casts == rates.memory
    slower = dataclasses.replace(rates, casts=rates.casts / 2, memory=rates.memory / 2)
    after = at(slower, "gpt2-1.5b", recipe, batch=32, context=1024).parts_ms
    for category in ("casts", "norms, elementwise", "optimizer"):
        assert after[category] == pytest.approx(2 * before[category])
    for category in ("GEMMs", "attention"):
        assert after[category] == before[category]
    free = at(rates, "gpt2-1.5b", recipe, batch=32, context=1024, free_casts=True)
    assert free.parts_ms == {**before, "casts": 0}
    assert sum(before.values()) - free.step_ms == pytest.approx(before["casts"])


def test_parts_add_up_and_rates_follow_from_the_step():
    got = at(achievable(H200), recipe="delayed", batch=8, context=1024)
    assert tuple(got.parts_ms) == PARTS
    assert got.step_ms == pytest.approx(sum(got.parts_ms.values()))
    assert got.tokens_per_s == pytest.approx(8 * 1024 / got.step_ms * 1000)
    flops = load_config("gpt2-124m").flops_per_token(1024)
    assert got.mfu == pytest.approx(flops * got.tokens_per_s / 1979e12)
    assert (got.peak_of, got.peak_tflops) == ("fp8", 1979)
    assert (at(FLOPS).peak_of, at(FLOPS).peak_tflops) == ("half", 989)
    config, b200 = load_config("gpt2-124m"), gpu_named("B200")
    got = predict(config, plan(config, "nvfp4"), b200, batch=8, context=1024)
    assert (got.peak_of, got.peak_tflops) == ("fp4", 9000)


def test_the_default_rates_are_the_named_shares_of_the_data_sheets_peaks():
    rates = achievable(H200)
    actual = (rates.half, rates.fp8, rates.attention, rates.memory)
    assert actual == pytest.approx((700e12, 1300e12, 400e12, 4.1e12))
    assert rates.fp8_attention / 1979 == pytest.approx(rates.attention / 989)
    a100 = achievable(gpu_named("A100"))
    assert a100.fp8 == a100.half
    b200 = achievable(gpu_named("B200"))
    assert (b200.fp4, rates.fp4) == (2 * b200.fp8, rates.fp8)
    pcie = achievable(gpu_named("H100 PCIe"))
    assert (pcie.half / 756, pcie.source) == (pytest.approx(rates.half / 989), rates.source)


def test_the_rates_of_an_h100_are_measured_but_attention():
    h100 = achievable(gpu_named("H100"))
    assert (h100.half, h100.casts, h100.memory) == (748e12, 1.14e12, 2.60e12)
    y, dx, dw = 1 / 1255e12, 1 / 1202e12, 1 / 1202e12  # seconds of an operation in FP8
    assert 3 / h100.fp8 == pytest.approx(y + dx + dw)
    assert h100.attention == achievable(H200).attention
    page = Path(__file__).parents[2].joinpath("bench/results/h100/README.md").read_text()
    assert "easured on one H100, 2026-11-26; the raw output was not kept" in page
    assert h100.source.startswith("measured on one H100, 2026-11-26; the raw output was not kept")
    for figure in ("2.60 TB/s", "748", "1,255", "1,202", "1.14 TB/s", "5.2 ms"):
        assert figure in page


def test_casts_are_as_slow_as_their_own_rate():
    rates = achievable(gpu_named("H100"))
    slow = at(rates, "gpt2-1.5b", "delayed", batch=4, context=1024).parts_ms
    even = dataclasses.replace(rates, casts=rates.memory)
    fast = at(even, "gpt2-1.5b", "delayed", batch=4, context=1024).parts_ms
    assert slow["casts"] == pytest.approx(fast["casts"] * 2.60 / 1.14)
    assert {**slow, "casts": 0} == {**fast, "casts": 0}
    in_bf16 = [at(r, "gpt2-1.5b", "bf16", batch=4, context=1024) for r in (rates, even)]
    assert in_bf16[0] == in_bf16[1]


# GPUs


NAMES = {
    "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H100 PCIe": "H100 PCIe", "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H200": "H200", "NVIDIA B200": "B200", "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA L40S": "L40S", "NVIDIA GeForce RTX 4090": "RTX 4090", "NVIDIA L4": "L4",
    "Tesla V100-SXM2-16GB": "V100",
    "Tesla T4": "T4", "NVIDIA L40": "L40", "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
    "NVIDIA RTX A6000": "RTX A6000", "NVIDIA GeForce RTX 3090": "RTX 3090",
    "NVIDIA GeForce RTX 5080": "RTX 5080", "NVIDIA GeForce RTX 3090 Ti": None,
    "NVIDIA GeForce RTX 4080 SUPER": None, "NVIDIA GeForce RTX 5090 Laptop GPU": None,
    "NVIDIA GeForce RTX 4090 D": None, "NVIDIA A10G": None, "NVIDIA GB200": None,
    "NVIDIA H1000": None, "": None,
}  # fmt: skip


@pytest.mark.parametrize("device", NAMES)
def test_a_gpu_is_known_by_the_name_that_its_driver_gives(device):
    gpu = find_gpu(device)
    assert (gpu.name if gpu else None) == NAMES[device]


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_the_data_of_a_gpu_are_in_its_units_and_found_by_its_own_name(gpu):
    assert find_gpu(gpu.name) is gpu
    assert 50 < gpu.half_tflops < 5000
    assert 0.1 < gpu.memory_tb_per_s < 20
    assert (gpu.fp8_tflops is None) == (gpu.capability < (8, 9))
    assert (gpu.fp4_tflops is None) == (gpu.capability < (10, 0))
    if gpu.fp4_tflops:  # GeForce has it in full, unlike the others with float32 accumulation
        times = 8 if gpu.capability[0] > 10 else 4
        assert gpu.fp4_tflops / gpu.half_tflops == pytest.approx(times, rel=0.01)
    if gpu.fp8_tflops:
        assert gpu.fp8_tflops / gpu.half_tflops == pytest.approx(2, rel=0.02)
    assert gpu.source.startswith("NVIDIA")
    assert (gpu.tf32_tflops is None) == (gpu.capability < (8, 0))
    if gpu.tf32_tflops:
        assert gpu.half_tflops / gpu.tf32_tflops == pytest.approx(2, rel=0.03)
        assert gpu.fp32_tflops <= gpu.tf32_tflops
    assert 5 < gpu.fp32_tflops < 130


@pytest.mark.parametrize(
    ("capability", "gpu", "name"),
    [
        ("9.0", None, "H200"),
        ("9.0", "H100", "H100"),
        (None, "h100 pcie", "H100 PCIe"),
        ("10.0", None, "B200"),
        ("8.0", None, "A100"),
        ("8.6", None, "A40"),
        ("8.9", None, "L40S"),
        ("12.0", None, "RTX 5090"),
    ],
)
def test_a_gpu_is_chosen_by_name_or_capability(capability, gpu, name):
    chosen, machine = roofline.choose_gpu(capability, gpu)
    assert chosen.name == name
    assert machine.capability == chosen.capability


def test_this_machines_gpu_is_the_default_and_where_there_is_none_one_has_to_be_named(monkeypatch):
    machine = Hardware("cuda", (8, 9), name="NVIDIA L4")
    monkeypatch.setattr(hardware, "probe", lambda device: machine)
    assert roofline.choose_gpu(None, None) == (gpu_named("L4"), machine)
    monkeypatch.setattr(hardware, "probe", lambda device: Hardware("cpu", name="Xeon"))
    assert "--gpu H200" in refusal(roofline.choose_gpu, None, None)


@pytest.mark.parametrize(
    ("capability", "gpu", "phrase"),
    [
        (None, "H20O", "Did you mean 'H200'"),
        ("8.0", "H200", "has compute capability 9.0, not 8.0"),
        ("6.0", None, "No data on a GPU of compute capability 6.0"),
        ("none", None, "No data on a GPU of compute capability none"),
        ("10", None, "no compute capability"),
    ],
)
def test_a_gpu_that_is_not_known_is_refused_with_a_way_out(capability, gpu, phrase):
    assert phrase in refusal(roofline.choose_gpu, capability, gpu)


# The table


@cache
def table(capability="9.0", model="gpt2-1.5b", **options) -> roofline.Roofline:
    gpu, hardware = roofline.choose_gpu(capability, None)
    arguments = {"batch": 8, "context": 1024} | options
    return roofline.predict_all(model, load_config(model), gpu, hardware, **arguments)


@pytest.mark.parametrize(
    ("capability", "predicted"),
    [
        ("8.0", ["bf16"]),
        ("8.9", ["bf16", "current", "delayed"]),
        ("9.0", ["bf16", "block", "current", "delayed", *ROWWISE]),
        ("10.0", ["bf16", "block", "current", "delayed", "mxfp8", *NVFP4, *ROWWISE]),
        pytest.param("12.0", ON_12, marks=pytest.mark.slow),
    ],
)
def test_every_recipe_that_runs_natively_is_predicted_and_the_others_have_a_reason(
    capability, predicted
):
    predicted_table = table(capability)
    assert [row.precision for row in predicted_table.predictions] == predicted
    quantized = {name for name in training_recipes() if load_recipe(name).is_fp8}
    assert set(predicted_table.left_out) == quantized - set(predicted)
    for name, reason in predicted_table.left_out.items():
        has_gemm = name in (*FP8, *NVFP4, *ROWWISE)
        assert ("compute capability" if has_gemm else "no GEMM of the GPU") in reason


def test_a_gemm_that_is_not_quantized_is_predicted_at_the_rate_of_bf16():
    steps = {row.precision: row for row in table("9.0").predictions}
    by_recipe = {name: row.parts_ms["GEMMs"] for name, row in steps.items()}
    # wgrad is in bf16, and the head in all three recipes.
    saved = (by_recipe["bf16"] - by_recipe["rowwise"]) * 2 / 3
    assert by_recipe["bf16"] - by_recipe["rowwise_wgrad_hp"] == pytest.approx(saved, rel=0.02)


def test_the_head_is_in_fp8_and_casts_are_free_in_the_ceiling_alone():
    rows, bound = (
        {row.precision: row for row in predicted_table.predictions}["delayed"]
        for predicted_table in (table(), table(ceiling=True))
    )
    assert (rows.fp8_layers, bound.fp8_layers) == (rows.layers - 1, bound.layers)
    assert bound.parts_ms["casts"] == 0
    assert bound.step_ms < rows.step_ms


def test_the_table_says_that_it_predicts_what_it_assumes_and_what_it_leaves_out():
    lines = roofline.as_lines(table())
    assert lines[0] == "Predicted, not measured: gpt2-1.5b on one H200, 8 x 1024 tokens per step"
    assert "NVIDIA H200 data sheet" in lines[1]
    assert "bf16 GEMMs 700 of 989 (71 %) TFLOP/s, FP8 GEMMs 1300 of 1979 (66 %)" in lines[1]
    assert "attention 400 of 989 (40 %), in FP8 800 of 1979 (40 %), memory" in lines[1]
    assert "memory 4.1 of 4.8 (85 %) TB/s" in lines[1]
    assert lines[3].startswith("| recipe | FP8 layers | GEMMs | attention | casts |")
    assert "measured" not in lines[3]
    assert len({line.count("|") for line in lines[3:11]}) == 1
    assert lines[11].startswith("mxfp4, mxfp6_e2m3, ")  # printed once for all of them
    assert lines[12].startswith("mxfp8: no prediction, mxfp8 needs compute capability 10.x")
    assert "upper bound" in roofline.as_lines(table(ceiling=True))[0]
    base, *rows = (cells(line) for line in lines[5:11])
    for row in rows:
        assert sum(int(cell.split()[0]) for cell in row[2:8]) == pytest.approx(100, abs=3)
        assert float(row[11]) == pytest.approx(float(base[8]) / float(row[8]), abs=0.01)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.fixture
def results(tmp_path) -> Path:
    path = tmp_path / "step.json"
    rows = [
        {"model": "gpt2-1.5b", "arm": "bf16", "median_ms": 150.0, "more": 1},
        {"model": "gpt2-1.5b", "arm": "delayed", "median_ms": 120.0},
        {"model": "gpt2-124m", "arm": "current", "median_ms": 1.0},
    ]
    path.write_text(json.dumps({"results": rows, "machine": {}}))
    return path


def test_a_gpu_without_bf16_is_predicted_in_fp16():
    lines = roofline.as_lines(table("7.5", "gpt2-124m"))
    assert "bf16" not in "\n".join(lines[:5])
    assert "fp16 GEMMs " in lines[1]
    assert cells(lines[3])[-1] == "vs fp16"
    assert cells(lines[5])[0] == "fp16"


def test_measured_steps_stand_beside_the_predicted_ones(results):
    predicted_table = table(results=results)
    lines = roofline.as_lines(predicted_table)
    assert cells(lines[3])[-2:] == ["measured ms", "measured vs bf16"]
    rows = {cells(line)[0]: cells(line)[-2:] for line in lines[5:9]}
    none = ["-", "-"]
    measured = {"bf16": ["150.0", "1.00"], "delayed": ["120.0", "1.25"]}
    assert rows == measured | {"current": none, "block": none}
    assert lines[-1] == f"measured: {results}, at the batch and context given there"
    data = {row["precision"]: row for row in roofline.as_json(predicted_table)["predictions"]}
    assert (data["delayed"]["measured_ms"], data["block"]["measured_ms"]) == (120.0, None)
    unmeasured = table("7.5", "llama-1b", results=results)
    assert "measured ms" not in roofline.as_lines(unmeasured)[3]
    assert unmeasured.measured_in == ""


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"results": [1]}', '{"results": [{"model": "a", "arm": "b"}]}',
     '{"results": [{"model": "a", "arm": "b", "median_ms": "fast"}]}',
     '{"results": [{"model": "a", "arm": "b", "median_ms": null}]}'],
)  # fmt: skip
def test_a_file_without_results_is_refused_with_what_it_should_hold(tmp_path, content):
    path = tmp_path / "step.json"
    path.write_text(content)
    message = refusal(roofline.measured_steps, path, "a")
    assert "median_ms" in message
    assert str(path) in message


def test_results_are_found_in_the_folder_of_that_machine(tmp_path, monkeypatch, results):
    package = tmp_path / "checkout" / "fp8stack"
    folders = {"H200": "h200", "H100 PCIe": "h100-pcie"}
    for folder in (*folders.values(), "cpu"):
        path = tmp_path / "checkout" / "bench" / "results" / folder / "step.json"
        path.parent.mkdir(parents=True)
        path.write_text(results.read_text())
    monkeypatch.setattr(roofline, "files", lambda name: package)
    for gpu in GPUS:
        results_file = roofline.find_results(gpu)
        assert (results_file.parent.name if results_file else None) == folders.get(gpu.name)


# The command

ARGUMENTS = ("bench", "roofline", "--model", "gpt2-1.5b", "--capability", "9.0")


def test_the_command_prints_the_table_and_as_json_the_same_figures(command, capsys, results):
    words = [*ARGUMENTS[:-1], "8.9", "--batch", "4", "--context", "512", "--results", str(results)]
    assert command(*words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("on one L40S, 4 x 512 tokens per step")
    assert command(*words, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["predicted"] is True
    assert (data["gpu"]["name"], data["batch"], data["context"]) == ("L40S", 4, 512)
    assert data["assumed"]["memory"] == pytest.approx(achievable(gpu_named("L40S")).memory)
    for row, line in zip(data["predictions"], lines[5:8], strict=True):
        assert cells(line)[0] == row["precision"]
        assert float(cells(line)[8]) == pytest.approx(row["step_ms"], abs=0.051)
        assert float(cells(line)[11]) == pytest.approx(row["speedup"], abs=0.0051)


@pytest.mark.parametrize(
    ("words", "phrase"),
    [
        (["--gpu", "H900"], "No GPU 'H900'"),
        (["--gpu", "H200", "--model", "gpt3"], "No model 'gpt3'"),
        (["--gpu", "H200", "--batch", "0"], "--batch"),
        (["--gpu", "H200", "--results", "none.json"], "No such file"),
        (["--gpu", "H200", "--context", "2048"], "2048 is more than the 1024 of model gpt2-124m"),
    ],
)
def test_bad_input_to_the_command_is_one_line(refused, words, phrase):
    assert phrase in refused("bench", "roofline", *words)


def test_the_document_says_what_the_command_prints(command, capsys, monkeypatch):
    monkeypatch.setattr(roofline, "find_results", lambda gpu: None)
    text = (Path(__file__).parents[2] / "docs" / "performance.md").read_text(encoding="utf-8")
    text = " ".join(text.partition("## Roofline")[2].split())
    printed = []
    for more in ([], ["--ceiling"]):
        assert command(*ARGUMENTS, *more) == 0
        printed.append([x for x in capsys.readouterr().out.splitlines() if x[:1] == "|"])
    assert " ".join(("fp8stack", *ARGUMENTS)) in text
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in printed[0]]
    (delayed,) = (dict(zip(cells[0], row, strict=True)) for row in cells if row[0] == "delayed")
    shares = f"{delayed['GEMMs']} of its time in GEMMs, {delayed['attention']} in attention and "
    assert f"{shares}{delayed['casts']} in casts, and is {delayed['vs bf16']} times" in text
    gains = {row.split("|")[-2].strip() for row in printed[1] if row.startswith("| delayed ")}
    assert gains == set(re.findall(r"at most a factor of ([\d.]+)\.", text))
