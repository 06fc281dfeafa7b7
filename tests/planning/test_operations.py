"""Each operation of a real training pass computes in the dtypes that `fp8stack plan` lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8stack.layers import build_backend
from fp8stack.layers.backend import DTYPES
from fp8stack.model.config import Experts, GPTConfig, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.planning.operations import casts_of, operations_of, trace_of
from fp8stack.planning.steps import Operation, Step, merged_steps
from fp8stack.planning.trace import Tracer
from fp8stack.precision import Hardware, Plan, load_recipe
from tests.support.cases import case
from tests.support.dtype_recorder import Recorder
from tests.support.small_loop import SmallLoop
from tests.support.study_recipes import BACKWARD_HIGH
from tests.support.te.te_stand_in import installed

pytestmark = pytest.mark.usefixtures("one_thread")

B, T = 3, 32
SIZES: dict[str, Any] = {"vocabulary": 61, "context": T, "layers": 2, "width": 64, "heads": 4}
GPT2 = GPTConfig(**SIZES)
LLAMA = GPTConfig(
    **SIZES, kv_heads=2, mlp_width=128, norm="rmsnorm", activation="swiglu", positions="rope",
    qk_norm=True, bias=False, tied=False,
)  # fmt: skip
EXPERTS = Experts(count=4, per_token=2, width=32, shared=1, first_dense=1, router_z=0.1)
STYLES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "dropout": LLAMA.model_copy(update={"dropout": 0.1, "qk_norm": False}),
    "mixture": LLAMA.model_copy(update={"qk_norm": "width", "experts": EXPERTS}),
}
# Recipe, backend, and the compute dtype of an FP8 recipe, which on a GPU is bf16.
RUNS = [
    *((recipe, "auto", None) for recipe in ("fp32", "bf16", "fp16")),
    *((recipe, "emulate", "fp32") for recipe in ("current", "block", "mxfp8", "nvfp4")),
    *((recipe, "emulate", "bf16") for recipe in ("delayed", "mxfp6_e2m3", BACKWARD_HIGH)),
    ("nvfp4_forward_high", "emulate", "fp32"),
    *(("rowwise_wgrad_hp", "torch", dtype) for dtype in ("fp32", "bf16")),
    ("current", "torch", "bf16"),
]


@pytest.fixture(autouse=True)
def bf16_instructions(monkeypatch):
    """Emulation holds operands in bf16 on a CPU with instructions for it, as `plan_of` says."""
    monkeypatch.setenv("FP8STACK_CPU_BF16", "yes")


def plan_of(config: GPTConfig, recipe: str, backend: str, dtype: Any, **keys: Any) -> Plan:
    plan = plan_for(config, load_recipe(recipe, keys), Hardware("cpu", cpu_bf16=True), backend)
    if dtype is None:
        return plan
    keeps = {la.name for la in plan.layers if la.fp8} | {*config.routers}
    layers = [la if la.name in keeps else replace(la, precision=dtype) for la in plan.layers]
    return replace(plan, compute_dtype=dtype, layers=tuple(layers))


def record(config: GPTConfig, plan: Plan, passes: int = 1) -> tuple[Recorder, list[Step]]:
    """The passes of a real model of the plan, forward and backward; and the steps of one more."""
    backend = build_backend(plan)
    backend.weights.only_tracked_changes = True  # as in a run
    model = GPT(config, backend)
    model._rotation(torch.device("cpu"))  # the tables of RoPE are made once
    tokens = torch.randint(config.vocabulary, (B, T + 1))
    chosen = 1 if config.experts is None else config.experts.per_token
    recorder = Recorder(model, B * T, B * T * chosen)
    with recorder.recording():
        for _ in range(passes):
            model(tokens[:, :-1], tokens[:, 1:]).backward()
    model = GPT(config, build_backend(plan))  # in which each pass casts the parameters
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    tracer = Tracer(model)
    with tracer.recording():
        model(tokens[:, :-1], tokens[:, 1:])
    return recorder, merged_steps(tracer.steps)


def gemms_of(operations: list[Operation], passes: int = 1) -> Counter[Any]:
    """The GEMMs of linears as the recorder writes them: it distinguishes formats only by their
    significands."""
    gemms: Counter[Any] = Counter()
    for operation in operations:
        if operation.name in ("fprop", "dgrad", "wgrad"):
            operands = (
                x.replace("e2m3", "e4m3").replace("e3m2", "e5m2") for x in operation.operands
            )
            gemms[operation.name, tuple(operands), operation.output] += passes
    return gemms


def check(config: GPTConfig, plan: Plan, passes: int = 1) -> list[Operation]:
    """Compare the GEMMs, casts, quantized operands and module steps of a real optimizer step with
    the plan's, and return the plan's operations."""
    recorder, steps = record(config, plan, passes)
    # Eager code of the torch backend casts a bias after the operands, the trace before them.
    ran, planned = (
        [
            step
            for _, group in groupby(sequence, attrgetter("path"))
            for step in sorted(group, key=lambda step: getattr(step, "what", "") != "bias")
        ]
        for sequence in (steps, trace_of(config, plan).all_steps())
    )
    assert ran == planned
    operations = operations_of(config, plan)
    assert recorder.gemms == gemms_of(operations, passes)
    casts, quantized = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for cast in casts_of(config, plan):
        times = 1 if cast.per == "step" else passes
        if cast.to_fp8:
            operand = cast.what.replace("output gradient", "grad_output")
            operand, _, gemm = operand.partition(" for ")
            operand += " across" if gemm else ""
            quantized[cast.path, operand, cast.runs] += times
        else:
            casts[cast.source, cast.target, cast.runs] += times
    assert recorder.casts == casts
    assert recorder.quantized == quantized
    return operations


# Two runs in every style, the others in the style with the most kinds of operations.
IN_ALL_STYLES = [("fp16", "auto", None), ("delayed", "emulate", "bf16")]
CASES = [
    case(*run, style, quick=run in IN_ALL_STYLES or style == "llama")
    for run in RUNS
    for style in STYLES
]


@pytest.mark.capability("A5")
@pytest.mark.parametrize(("recipe", "backend", "dtype", "style"), CASES)
@pytest.mark.full
def test_a_real_pass_computes_and_casts_as_the_plan_says(style, recipe, backend, dtype):
    config = STYLES[style]
    passes = 2 if style in ("gpt2", "llama") else 1
    check(config, plan_of(config, recipe, backend, dtype), passes)


@pytest.mark.capability("A13")
@pytest.mark.parametrize("style", STYLES)
def test_attention_computes_in_float32_where_the_recipe_says_so(style):
    config = STYLES[style]
    plan = plan_of(config, "fp16", "auto", None, attention="fp32")
    operations = {(operation.path, operation.name): operation for operation in check(config, plan)}
    attention = operations["blocks.1.attention", "attention"]
    assert (attention.operands, attention.output) == (("fp32",) * 3, "fp32")


@pytest.mark.capability("A13")
@pytest.mark.parametrize("style", STYLES)
def test_the_residual_stream_is_in_bf16_where_the_recipe_says_so(style):
    config = STYLES[style]
    plan = plan_of(config, "delayed", "emulate", "bf16", residual="bf16")
    operations = {(operation.path, operation.name): operation for operation in check(config, plan)}
    residual = operations["blocks.1", "residual"]
    assert (residual.operands, residual.adds_in, residual.output) == (("bf16",), "fp32", "bf16")
    assert all("residual stream" in cast.what for cast in casts_of(config, plan) if not cast.path)


# Sums, and what happens once per optimizer step


@pytest.mark.parametrize(("recipe", "backend", "dtype"), RUNS)
def test_a_gemm_adds_in_float32(recipe, backend, dtype):
    """A sum of ones would stop at 256 in bf16, at 2048 in fp16, at 16 in FP8."""
    config = GPTConfig(vocabulary=64, context=8, layers=1, width=4096, heads=1, bias=False)
    built = build_backend(plan_of(config, recipe, backend, dtype))
    linear: Any = built.linear("blocks.0.attention.output", 4096, 128, False)
    model = nn.Sequential(linear)
    built.attach(model)
    with torch.no_grad():
        linear.weight.fill_(1.0)
        y = model(torch.ones(32, 4096))
    # Scales of 448 / 1 are no powers of two: the last bits may differ.
    torch.testing.assert_close(y.float(), torch.full((32, 128), 4096.0), rtol=1e-6, atol=0)


class StepDtypes(TorchDispatchMode):
    """Records the floating-point dtypes of an optimizer step, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        node = torch._C._current_autograd_node()
        gathers = node is not None and "AccumulateGrad" in node.name()
        name = "accumulate" if gathers else str(func).split(".")[1]
        dtypes = {x.dtype for x in tree_leaves((args, out)) if isinstance(x, torch.Tensor)}
        floats = {dtype for dtype in dtypes if dtype.is_floating_point}
        self.dtypes.setdefault(name, set()).update(floats)
        return out


@pytest.mark.parametrize("recipe", ["bf16", "fp16", "delayed"])
def test_gradients_clipping_and_the_optimizer_are_float32(tmp_path, recipe):
    small = SmallLoop(tmp_path, recipe, accumulate=2, clip=1e-3, telemetry_every=0)
    step = small.next_step()
    recorded = StepDtypes()
    with recorded:
        step()
    run = small.run
    plan = run.plan
    assert plan.compute_dtype == {"delayed": "fp32"}.get(recipe, recipe)
    rows = {
        operation.name: operation
        for operation in operations_of(run.model.config, plan)
        if operation.path == "step"
    }
    assert ("amax history" in rows) == (recipe == "delayed")
    assert ("loss scaling" in rows) == (recipe == "fp16")
    for name, operator in (
        ("gradient accumulation", "accumulate"),
        ("clipping", "_foreach_norm"),
        ("clipping", "_foreach_mul_"),
        ("optimizer", "_fused_adamw_"),
    ):
        assert rows[name].operands == ("fp32",)
        assert recorded.dtypes[operator] == {torch.float32}
    for state in run.optimizer.state.values():
        assert {value.dtype for value in state.values()} == {torch.float32}


# Attention in float32


def attention_oracle(q, k, v):
    """Causal attention in float64, row by row."""
    q, k, v = q.double(), k.double(), v.double()
    y = torch.empty_like(q)
    for t in range(q.shape[2]):
        logits = (k[:, :, : t + 1] @ q[:, :, t, :, None])[..., 0] / q.shape[-1] ** 0.5
        weights = torch.exp(logits - logits.amax(-1, keepdim=True))
        weights = weights / weights.sum(-1, keepdim=True)
        y[:, :, t] = (weights[..., None] * v[:, :, : t + 1]).sum(2)
    return y


def huge_heads() -> list[torch.Tensor]:
    """Queries, keys and values in fp16; all logits are near 113137, which fp16 cannot hold."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 16, 8, generator=generator) for _ in range(3))
    q[..., 0], k[..., 0] = 400.0, 800.0
    return [q.half(), k.half(), v.half()]


@pytest.fixture
def _half_sums() -> Iterator[None]:
    """Use torch's attention in plain operations, with intermediate results in fp16."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


@pytest.mark.capability("A13")
@pytest.mark.usefixtures("_half_sums")
def test_logits_beyond_fp16_stay_finite_in_float32_attention_and_overflow_without():
    q, k, v = huge_heads()
    assert float((q.double() @ k.double().transpose(2, 3) / 8**0.5).abs().min()) > 65504
    outputs = {}
    for precision in ("compute", "fp32"):
        backend = build_backend(plan_of(GPT2, "fp16", "auto", None, attention=precision))
        outputs[precision] = backend.attention(q, k, v, dropout=0.0)
        assert outputs[precision].dtype == torch.float16
    assert not outputs["compute"].isfinite().any()
    # A float32 logit of 113137 has an error of up to 113137 x 2**-23, a sum of eight terms a few
    # times as much: weights are accurate to 3 %.
    error = outputs["fp32"].double() - attention_oracle(q, k, v)
    assert float(error.abs().max()) < 0.03 * float(v.abs().max())


@pytest.mark.parametrize("precision", ["fp32", "compute"])
def test_transformer_engines_backend_runs_attention_as_planned(precision, monkeypatch):
    config = LLAMA.model_copy(update={"layers": 1})
    gpu = Hardware("cuda", (9, 0), has_te=True)
    plan = plan_for(config, load_recipe("current", {"attention": precision}), gpu, "te")
    dtype = {"fp32": "fp32", "compute": "bf16"}[precision]
    assert (plan.backend, plan.attention) == ("te", dtype)
    attention_dtypes = []
    real = F.scaled_dot_product_attention

    def attention(*args, **options):
        attention_dtypes.append({x.dtype for x in args})
        return real(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    with installed():  # on a CPU, in place of Transformer Engine
        record(config, replace(plan, device="cpu"))
    assert {dtype for dtypes in attention_dtypes for dtype in dtypes} == {DTYPES[plan.attention]}


def test_an_autocast_around_the_model_does_not_round_float32_attention(monkeypatch):
    autocasts = []
    real = F.scaled_dot_product_attention

    def attention(q, k, v, **more):
        autocasts.append(torch.is_autocast_enabled("cpu"))
        return real(q, k, v, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    for precision in ("fp32", "compute"):
        model = GPT(GPT2, build_backend(plan_of(GPT2, "bf16", "auto", None, attention=precision)))
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.zeros(1, 8, dtype=torch.long))
    assert autocasts == [False, False, True, True]


@pytest.mark.parametrize(
    ("kind", "gradient"), [("mxfp8", "e4m3"), ("current", "e5m2"), ("delayed", "e5m2")]
)
def test_attention_in_fp8_is_in_the_plan_and_in_the_casts(kind, gradient):
    gpu = Hardware("cuda", (10, 0), has_te=True)
    config = LLAMA.model_copy(update={"width": 128, "heads": 4, "kv_heads": 2, "layers": 1})
    plans = [
        plan_for(config, load_recipe("mxfp8", {"attention": precision}), gpu)
        for precision in ("compute", kind)
    ]
    plain, low = ([x for x in operations_of(config, p) if x.name == "attention"] for p in plans)
    reason = f"the recipe says attention = {kind}"
    assert low == [replace(plain[0], operands=("e4m3",) * 3, why=reason)]
    assert plans[1].summary()[-1] == f"attention: {kind}, the recipe says so"
    before, after = (casts_of(config, plan) for plan in plans)
    added = [cast for cast in after if cast not in before]
    assert [cast for cast in after if cast not in added] == before
    assert [(cast.what, cast.source, cast.target, cast.runs) for cast in added] == [
        *((name, "bf16", "e4m3", "forward") for name in ("queries", "keys", "values")),
        ("output, gradient", "bf16", gradient, "backward"),
    ]
    assert {cast.path for cast in added} == {"blocks.0.attention"}
