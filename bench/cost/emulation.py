"""The cost of emulated FP8 on a CPU, relative to fp32: one linear and a whole training step.

Arms take turns within one process, and ratios compare their fastest rounds. torchao's emulation of
the same recipes and transformers' GPT-2 take turns with our arms. All arms are compared with eager
fp32, and compiled arms with compiled fp32 as well.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from bench import peers, report, runner
from bench.cells import some_of, words
from bench.report import Report, Row
from fp8stack.analysis.benchmark.step_timing import FP8, StepArm, StepWork, arms, build_step, works
from fp8stack.analysis.benchmark.timing import Timing, ratio
from fp8stack.layers import build_backend
from fp8stack.layers.compiler import allow_many_compilations
from fp8stack.model.config import GPTConfig, load_config
from fp8stack.precision import probe, resolve

Arm = Callable[[], None]
SHAPES = [(2048, 512, 512), (2048, 768, 3072), (4096, 1024, 4096)]
COMPILED_LINEARS = ("delayed", "current", "block", "mxfp8")
FEWER_BITS = ("mxfp6_e2m3", "mxfp4", "nvfp4")
STEP_COMPILED = ("delayed", "mxfp8")  # compiling a step takes one to two minutes for each
SHORT = ["--parts", "linear", "--compiled", "", "--rounds", "8", "--warm-up", "1", "--budget", "15"]

COMPILED = " compiled"
PARTS = ("linear", "step", "large")


def case_of(tokens: int, inputs: int, outputs: int) -> str:
    return f"{tokens} x {inputs} -> {outputs}"


def step_case(work: StepWork) -> str:
    c = work.config
    experts = f" and {c.experts.count} experts" if c.experts else ""
    if work.model == "gpt2-124m":
        return f"step: {work.model}, {work.batch} x {work.context} tokens"
    return f"step: {c.layers} layers of {c.width}{experts}, {work.batch} x {work.context} tokens"


def nano() -> StepWork:
    """The training step of the README's first run."""
    config = load_config("gpt-nano")
    return StepWork(model="gpt-nano", config=config, batch=8, context=config.context)


def large() -> list[StepWork]:
    """Training steps of wider models, whose GEMMs take most of the time."""
    wide = GPTConfig(vocabulary=256, context=256, layers=4, width=768, heads=12)
    return [
        StepWork(model="wide", config=wide, batch=8, context=256),
        StepWork(model="gpt2-124m", config=load_config("gpt2-124m"), batch=4, context=512),
    ]


def mixture() -> StepWork:
    """A training step of a small mixture of experts."""
    config = load_config("gpt-nano-moe")
    return StepWork(model="gpt-nano-moe", config=config, batch=16, context=config.context)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_options(parser, rounds=20, budget_s=40.0, device=False)
    parser.add_argument(
        "--parts",
        type=some_of("part", PARTS),
        default=[*PARTS],
        metavar="A,B",
        help=", ".join(PARTS),
    )
    parser.add_argument(
        "--compiled",
        type=words,
        metavar="A,B",
        help="recipes that are compiled as well, with fp32 and torchao tensorwise "
        f"(default: all of a linear, {' and '.join(STEP_COMPILED)} of a step)",
    )


def measure(arguments: argparse.Namespace) -> Report:
    rows: list[Row] = []
    options = runner.timing_options(arguments)
    timed = arguments.cells.timed
    if "linear" in arguments.parts:
        compiled = COMPILED_LINEARS if arguments.compiled is None else arguments.compiled
        for shape in [(32, 64, 32)] if arguments.tiny else SHAPES:
            rows += timed(case_of(*shape), linear_arms(*shape, compiled), _rows, **options)
    if "step" in arguments.parts:
        compiled = STEP_COMPILED if arguments.compiled is None else arguments.compiled
        work = tiny_work() if arguments.tiny else works("cpu")["small"]
        # A round takes some 20 s.
        options |= {"budget_s": 3.5 * arguments.budget, "warm_up": min(2, arguments.warm_up)}
        rows += timed(step_case(work), step_arms(work, compiled), _rows, **options)
        for work in [] if arguments.tiny else [nano(), mixture()]:
            rows += timed(step_case(work), own_steps(work, ()), _rows, **options)
    if "large" in arguments.parts and not arguments.tiny:
        options |= {"budget_s": arguments.budget, "warm_up": min(1, arguments.warm_up)}
        for work in large():
            rows += timed(step_case(work), own_steps(work, (), FP8), _rows, **options)
    settings = runner.timing_settings(arguments) | {"ratio": "fastest"}
    return report.report_of("cpu", settings, rows, ("torchao", "transformers"))


def tiny_work() -> StepWork:
    """A step that takes almost no time, to test a scenario."""
    config = GPTConfig(vocabulary=64, context=32, layers=1, width=32, heads=2)
    return StepWork(model="tiny", config=config, batch=2, context=32)


def _rows(case: str, timings: dict[str, Timing]) -> list[Row]:
    rows = report.rows_of(case, timings, "fp32")
    for row in rows:
        row["mode"] = "compiled" if row["arm"].endswith(COMPILED) else "eager"
        if "fp32 compiled" in timings:
            relative = ratio(timings[row["arm"]], timings["fp32 compiled"])
            row["ratio_to_compiled"] = round(relative, 4)
    return rows


# One linear


def linear_arms(
    tokens: int, inputs: int, outputs: int, compiled: Collection[str]
) -> dict[str, Callable[[], Arm]]:
    """Builders of a forward and backward pass of every linear: eager, and compiled for the recipes
    in `compiled`. If there are any, fp32 and torchao tensorwise are compiled as well."""
    torch.manual_seed(0)
    x = torch.randn(tokens, inputs, requires_grad=True)
    dy = torch.randn(tokens, outputs) * 1e-3
    layers: dict[str, Callable[[], nn.Module]] = {"fp32": partial(nn.Linear, inputs, outputs)}
    recipes: tuple[str, ...] = (*FP8, *FEWER_BITS)
    if probe("cpu").cpu_bf16 or (tokens, inputs, outputs) == SHAPES[0]:
        recipes = ("bf16", *recipes)  # without bf16 instructions, a large GEMM takes minutes
    layers |= {recipe: partial(fp8stack_linear, recipe, inputs, outputs) for recipe in recipes}
    for recipe in ("tensorwise", "mxfp8"):
        layers[f"torchao {recipe}"] = partial(peers.linear, recipe, inputs, outputs)
    also = {*compiled, "fp32", "torchao tensorwise"} if compiled else set()
    builders: dict[str, Callable[[], Arm]] = {}
    for name, layer in layers.items():
        builders[name] = partial(linear_arm, layer, x, dy)
        if name in also:
            builders[name + COMPILED] = partial(linear_arm, layer, x, dy, compiled=True)
    return builders


def fp8stack_linear(recipe: str, inputs: int, outputs: int) -> nn.Module:
    """A linear layer of fp8stack on a CPU, as a model would have it."""
    plan = resolve(recipe, probe("cpu")).for_layers({"linear": (inputs, outputs)})
    backend = build_backend(plan)
    layer = backend.linear("linear", inputs, outputs, True)
    backend.attach(layer)
    return layer


def linear_arm(
    build: Callable[[], nn.Module], x: Tensor, dy: Tensor, compiled: bool = False
) -> Arm:
    """A forward and backward pass that drops the gradients; `compiled` as one graph, including
    hooks."""
    layer = build()
    called = layer
    if compiled:
        allow_many_compilations()
        called = cast(nn.Module, torch.compile(layer, fullgraph=True, dynamic=False))

    def once() -> None:
        called(x).backward(dy)
        x.grad = None
        for parameter in layer.parameters():
            parameter.grad = None

    return once


# A step


def own_steps(
    work: StepWork, compiled: Collection[str], recipes: Sequence[str] = (*FP8, *FEWER_BITS)
) -> dict[str, Callable[[], Arm]]:
    """Builders of a training step in these recipes and those without quantizers."""
    hardware = probe("cpu")
    also = {*compiled, "fp32"} if compiled else set()
    baselines = ["fp32", "bf16"] if hardware.cpu_bf16 else ["fp32"]
    our_arms: list[StepArm] = arms(hardware, [*baselines, *recipes], also)
    return {arm.name: partial(build_step, arm, work, hardware) for arm in our_arms}


def step_arms(work: StepWork, compiled: Collection[str]) -> dict[str, Callable[[], Arm]]:
    """Builders of `own_steps`, and of the steps of torchao's recipes and transformers' GPT-2."""
    builders = own_steps(work, compiled)
    builders["torchao tensorwise"] = partial(peers.step, work, "cpu", "tensorwise", False)
    if compiled:
        builders["torchao tensorwise compiled"] = partial(peers.step, work, "cpu", "tensorwise")
    builders["torchao mxfp8"] = partial(peers.step, work, "cpu", "mxfp8", False)
    builders["transformers GPT-2, fp32"] = partial(peers.transformers_step, work)
    return builders


# The report


def table(data: Report) -> str:
    rows = data["results"]
    ratios = {(row["arm"], row["case"]): f"{row['ratio']:.2f}" for row in rows}
    extra = {
        "x fp32": report.number("ratio"),
        "x fp32 compiled": report.number("ratio_to_compiled"),
    }
    text = "Time of one linear's forward and backward pass (tokens x in -> out), and of a training "
    text += "step, relative to fp32 eager in the same run: ratio of the fastest rounds."
    return (
        report.heading(data, "What emulated FP8 costs on a CPU", text)
        + report.crossed(ratios, "arm")
        + "\nEvery timing:\n\n"
        + report.timing_table(rows, extra)
    )
