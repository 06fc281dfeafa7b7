"""The predicted time of a step: against measured steps, counted bytes and calculations by hand, and
asked for in every way that a user has."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fp8stack.cli.estimate import answer
from fp8stack.cli.plan import table_for
from fp8stack.model.config import GPTConfig, load_config, plan_for, workload
from fp8stack.planning.run_config import parse_config
from fp8stack.precision import Hardware, Plan, load_recipe
from fp8stack.precision.gpus import gpu_named
from fp8stack.precision.hardware import machine_for
from fp8stack.precision.plan import LayerPlan
from fp8stack.precision.step_time import (
    EFFICIENCY,
    HOST_BLOCK_S,
    LEAST_GEMM_S,
    Range,
    Rates,
    StepTime,
    Workload,
    _gpu_seconds,
    cast_bytes,
    layer_doubt,
    layer_ratio,
    rates_of,
    step_time,
)
from fp8stack.training import memory_check

RESULTS = Path(__file__).parents[2] / "bench" / "results"
H100, H200, B200, L4 = map(gpu_named, ("H100", "H200", "B200", "L4"))
INF = 1e30


def on(name: str) -> Hardware:
    return machine_for(None, None, gpu=name)


def timed(
    config: GPTConfig, recipe: str, tokens: int, gpu: str = "H100", **options: Any
) -> StepTime:
    plan = plan_for(config, recipe, on(gpu), work=workload(config, tokens, **options))
    (time,) = plan.times
    return time


def contains(values: Range, value: float) -> bool:
    return values.low <= value <= values.high


# Measured


@pytest.mark.parametrize(
    ("model", "layers", "tokens", "context", "bf16_ms", "delayed_ms"),
    [("gpt2-1.5b", 48, 4096, 1024, 201, 252), ("llama-8b", 2, 8192, 8192, 102, 91)],
)
def test_the_ranges_contain_the_measured_steps_and_their_ratio(
    model, layers, tokens, context, bf16_ms, delayed_ms
):
    config = load_config(model, {"layers": layers})
    time = timed(config, "delayed", tokens, context=context)
    assert contains(time.step_ms, delayed_ms)
    assert contains(time.base_ms, bf16_ms)
    assert contains(time.ratio, delayed_ms / bf16_ms)
    assert contains(timed(config, "bf16", tokens, context=context).step_ms, bf16_ms)
    page = (RESULTS / "h100" / "README.md").read_text()
    assert f"| {bf16_ms} ms | {delayed_ms} ms |" in page


def test_the_kernels_of_a_measured_step_are_in_the_range_of_the_gpu_alone(monkeypatch):
    monkeypatch.setitem(HOST_BLOCK_S, "bf16", 0.0)
    monkeypatch.setitem(HOST_BLOCK_S, "fp8", 0.0)
    time = timed(load_config("gpt2-1.5b"), "delayed", 4096)
    assert contains(time.step_ms, 185)
    assert contains(time.base_ms, 190)
    # 6 to 14 of the 185 ms copied padded codes, which blocks are compiled without.
    assert contains(time.ratio, 175 / 190)


def test_the_rates_of_an_h100_are_the_measured_ones():
    rates = rates_of(H100)
    assert (rates.half, rates.memory) == pytest.approx((748e12, 2.60e12))
    y, dx, dw = 1 / 1255e12, 1 / 1202e12, 1 / 1202e12  # seconds of an operation in FP8
    assert 3 / rates.fp8 == pytest.approx(y + dx + dw)
    assert rates.casts == (1.14e12, 2.0e12)
    page = (RESULTS / "h100" / "README.md").read_text()
    for figure in ("2.60 TB/s", "748", "1,255", "1,202", "1.14 TB/s", "5.2 ms", "220 TFLOP/s"):
        assert figure in page
    assert rates_of(H100, head_width=64).attention == pytest.approx(220e12)


# Work


@pytest.mark.parametrize("model", ["gpt2-1.5b", "llama-8b", "olmoe-7b", "deepseek-16b"])
@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_gemms_and_attention_do_the_operations_that_the_configuration_needs(model, recipe):
    config, tokens = load_config(model), 4096
    rates = Rates(half=1, fp8=1, fp4=1, attention=1, casts=(INF, INF), memory=INF)
    plan = plan_for(config, recipe, on("H200"))
    work = workload(config, tokens)
    in_pass, once = _gpu_seconds(plan.layers, work, rates, INF)
    head = plan.layer("lm_head").out_features - config.vocabulary
    useful = in_pass - work.attention_flops / 7 - 6 * head * config.width * tokens
    assert useful == pytest.approx(tokens * config.flops_per_token(), rel=1e-12)
    assert once == pytest.approx(0, abs=1e-9)


COUNTED = json.loads((RESULTS / "gpu-code" / "gpu-code.json").read_text())["results"]


@pytest.mark.parametrize("model", ["gpt2-1.5b", "llama-8b"])
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current"])
def test_a_block_moves_about_the_bytes_that_its_compiled_code_moves(model, recipe):
    rates = Rates(half=INF, fp8=INF, fp4=INF, attention=INF, casts=(1, 1), memory=1)
    seconds = []
    for layers in (1, 2):
        config = load_config(model, {"layers": layers})
        work = dataclasses.replace(workload(config, 8192), parameters=0)
        plan = plan_for(config, recipe, on("H100"))
        seconds.append(sum(_gpu_seconds(plan.layers, work, rates, 1)))
    (row,) = (r for r in COUNTED if (r["case"], r["arm"]) == (f"{model} on 9.0", recipe))
    head = plan.layer("lm_head")  # in bf16, and cast with the weights of the block
    counted = row["block_bytes"] + row["weights_bytes"] - 6 * head.in_features * head.out_features
    assert 0.75 < (seconds[1] - seconds[0]) / counted < 1.05


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
def test_casts_move_so_many_bytes_per_element_of_each_operand(recipe, inputs, gradients, weights):
    quantizers = load_recipe(recipe).quantizers
    assert quantizers is not None
    sizes = [cast_bytes(quantizers, name) for name in ("input", "grad_output", "weight")]
    assert sizes == pytest.approx([inputs, gradients, weights])


# A layer


def linear(inputs: int, outputs: int, recipe: str = "delayed", name: str = "linear") -> LayerPlan:
    return LayerPlan(
        name=name,
        in_features=inputs,
        out_features=outputs,
        fp8=True,
        precision=recipe,
        quantizers=load_recipe(recipe).quantizers,
    )


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_layers_ratio_by_hand(accumulate):
    tokens, k, n = 16384, 1600, 4800
    weights = 6 * k * n / accumulate  # bytes of a cast of w, which is for all micro-batches
    casts = [(4 * tokens * (k + n) + weights) / rate for rate in (1.14e12, 2.0e12)]
    gemms = 2 * tokens * k * n * (1 / 1255e12 + 2 / 1202e12)
    base = 6 * tokens * k * n / 748e12 + (weights + 6 * k * n) / 2.60e12  # and of the gradient
    work = Workload(tokens=tokens, accumulate=accumulate)
    ratio = layer_ratio(linear(k, n), work, H100)
    assert ratio.high == pytest.approx((gemms + casts[0]) / base)
    assert ratio.low == pytest.approx((gemms + casts[1]) / base)
    # The norm before it casts: bf16's copy is neither written nor read.
    fused = layer_ratio(linear(k, n, name="blocks.0.attention.qkv"), work, H100)
    assert ratio.low - fused.low == pytest.approx(4 * tokens * k / 2.60e12 / base)


def test_a_layer_is_doubted_on_the_gpu_of_the_least_gain_and_not_without_fp8_units():
    work = Workload(tokens=2**16)
    assert layer_doubt(linear(4096, 4096), work, [H100, H200]) == ""
    assert layer_doubt(linear(512, 512), work, [gpu_named("A100")]) == ""
    assert layer_doubt(linear(512, 512), work, []) == ""
    doubt = layer_doubt(linear(512, 512), work, [H200])
    assert doubt.startswith("65536 x 512 -> 512 on H200: ")
    assert doubt.endswith(" of its time in bf16")


def test_a_gemm_that_does_not_fill_a_gpu_gets_no_faster():
    features = 4096
    tokens = int(LEAST_GEMM_S * rates_of(H100).half / 2 / features**2)
    rates = dataclasses.replace(rates_of(H100), memory=INF)
    for times, gain in ((1, 1), (8, rates.fp8 / rates.half)):
        work = Workload(tokens=times * tokens)
        fp8, half = (
            _gpu_seconds([linear(features, features)], work, rates, casts)[0]
            for casts in (INF, None)
        )
        assert half / fp8 == pytest.approx(gain)
    assert layer_doubt(linear(features, features), Workload(tokens=tokens), [H100])


# A step


def test_the_host_is_as_slow_as_its_linears_are_many():
    config = load_config("gpt2-124m")
    time = timed(config, "delayed", 1024)
    host_ms = 1000 * (12 * HOST_BLOCK_S["fp8"] + HOST_BLOCK_S["bf16"] / 4)  # and the head
    assert time.host_ms == pytest.approx(host_ms)
    adamw_ms = 1000 * 36 * config.parameters() / 2.60e12
    assert host_ms < time.step_ms.high < host_ms + 3 * adamw_ms
    assert time.step_ms.low < host_ms / 5
    assert time.verdict == "too close to tell"


@pytest.mark.parametrize(
    ("has_te", "key", "waits", "base_waits"),
    [
        (False, "cuda_graphs=true", False, False),
        (False, "cuda_graphs=false", True, True),
        (False, "compile=false", True, True),
        (False, "activation_checkpointing=block", True, True),
        (True, "cuda_graphs=true", True, False),  # Transformer Engine's passes are not recorded
    ],
)
def test_the_host_limits_steps_that_are_not_replayed_as_cuda_graphs(has_te, key, waits, base_waits):
    flags = {"model": "gpt2-124m", "recipe": "delayed", "batch": 2}
    parsed = parse_config(None, flags, ["model.layers=2", key])
    (time,) = table_for(parsed, machine_for(None, has_te, gpu="H100")).plan.times
    assert (time.host_ms > 0) == waits
    assert (time.step_ms.high > 2 * HOST_BLOCK_S["fp8"] * 1000) == waits
    assert (time.base_ms.high > 2 * HOST_BLOCK_S["bf16"] * 1000) == base_waits


def test_a_step_is_its_micro_batches_and_once_the_optimizer_and_the_casts_of_weights():
    config, rates = load_config("llama-1b"), rates_of(H100, head_width=64)
    plan = plan_for(config, "delayed", on("H100"))
    four, two, single = (
        step_time(plan.layers, workload(config, 32768, accumulate=n), H100) for n in (4, 2, 1)
    )
    summed = 12 * config.parameters() / rates.memory
    one_pass = _gpu_seconds(plan.layers, workload(config, 32768), rates, 2e12)[0]
    base = _gpu_seconds(plan.layers, workload(config, 32768), rates, None)[0]
    shared = (1 / EFFICIENCY[1] - 1) * (base + summed)
    later_ms = 1000 * (one_pass + summed + shared)
    assert two.step_ms.low - single.step_ms.low == pytest.approx(later_ms, rel=1e-6)
    assert four.step_ms.low - two.step_ms.low == pytest.approx(2 * later_ms, rel=1e-6)


# One answer


MODELS = ("gpt2-124m", "gpt2-1.5b", "llama-1b", "llama-8b", "olmoe-7b")


class NoMemory:
    """Stands in for `Footprint`, which traces every plan."""

    def __init__(self, *_: object) -> None: ...

    def largest(self, *_: object) -> int:
        return 0

    fewest = largest

    def estimates(self, plans: list[Plan], *_: object) -> list[Any]:
        return [SimpleNamespace(peak=0)] * len(plans)


QUESTIONS = [
    (model, gpu, batch, recipe)
    for model in MODELS
    for gpu in ("H100", "B200")
    for batch in (1, 16)
    for recipe in ("auto", "delayed")
]


@pytest.mark.parametrize(("model", "gpu", "batch", "recipe"), QUESTIONS)
@pytest.mark.full
def test_plan_auto_estimate_and_the_module_give_one_answer(model, gpu, batch, recipe, monkeypatch):
    monkeypatch.setattr(memory_check, "Footprint", NoMemory)
    flags = {"model": model, "recipe": recipe, "batch": 2 * batch, "accumulate": 2}
    parsed = parse_config(None, flags, ["model.layers=2"])
    config, machine = load_config(model, {"layers": 2}), on(gpu)
    work = workload(config, batch * config.context, accumulate=2)
    work = dataclasses.replace(work, graphed=config.experts is None)
    planned = plan_for(config, recipe, machine, work=work)
    (expected,) = planned.times
    assert table_for(parsed, machine).plan.times == (expected,)
    (phase,) = answer(parsed, machine, 1, None).phases
    assert phase.plan.times == (expected,)
    assert phase.plan.layers == planned.layers
    dtype, by_te = planned.compute_dtype, planned.backend == "te"
    assert step_time(planned.layers, work, gpu_named(gpu), dtype=dtype, by_te=by_te) == expected
    if recipe == "auto":  # is FP8 exactly if that surely pays
        assert planned.is_fp8 == planned.runs_fp8 == (expected.verdict == "FP8 pays")


@pytest.mark.full
def test_where_a_capability_is_given_auto_goes_by_the_card_of_the_lesser_gain():
    config = load_config("gpt2-1.5b")

    def runs(tokens: int, machine: Hardware) -> Plan:
        return plan_for(config, "auto", machine, work=workload(config, tokens))

    hopper = machine_for("9.0", None)
    kinds = set()
    for tokens in range(8192, 20480, 2048):
        decisions = {name: runs(tokens, on(name)).runs_fp8 for name in ("H100", "H200")}
        plan = runs(tokens, hopper)
        assert [time.gpu for time in plan.times] == ["H200", "H100"]
        assert plan.runs_fp8 == all(decisions.values())
        kinds.add(tuple(decisions.values()))
    assert {(False, False), (True, True)} <= kinds


@pytest.mark.parametrize(
    ("recipe", "machine"),
    [
        ("delayed", Hardware("cuda", (9, 0), name="NVIDIA H900")),
        ("delayed", Hardware("cpu")),
        ("mxfp8", on("H200")),
    ],
    ids=["unknown GPU", "CPU", "emulated"],
)
def test_no_time_is_predicted_of_unknown_gpus_and_emulated_recipes(recipe, machine):
    config = load_config("gpt-nano")
    plan = plan_for(config, recipe, machine, work=workload(config, 1024))
    assert (plan.times, plan.doubt) == ((), "")
