"""Observed operands are the tensors that linears cast, and observing changes no result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8stack.layers import build_backend, fp8_state
from fp8stack.layers.kernels.activations import TRANSFORMER_ENGINES
from fp8stack.layers.observe import fp8_linears, observing, scale_of
from fp8stack.model.config import GPTConfig, plan_for
from fp8stack.model.convert import convert
from fp8stack.model.gpt import GPT
from fp8stack.precision import load_recipe, resolve
from tests.support.backend_models import (
    CPU,
    LINEARS,
    OPERANDS,
    TINY,
    WAYS,
    checkpointed,
    gpt,
    history,
    loss_of,
    normal,
    same,
    train,
)
from tests.support.cases import case
from tests.support.expert_loops import EXPERTS, WIDTH, pair
from tests.support.grouped_models import Grouped, Loop, passed
from tests.support.te import te_stand_in

pytestmark = pytest.mark.usefixtures("one_thread")
Seen = list[tuple[str, str, Tensor]]


def keep(records: Seen) -> Callable[..., None]:
    def see(path: str, layer: nn.Module, operand: str, tensor: Tensor) -> None:
        assert not tensor.requires_grad
        assert tensor.ndim == 2
        assert not torch.is_grad_enabled()
        records.append((path, operand, tensor.clone()))

    return see


def operands_of(
    model: Any, run: Callable[[Any], object], *, outputs: bool = True
) -> dict[tuple[str, str], Tensor]:
    """The operands that are observed while `run` runs a model, by path and operand."""
    records: Seen = []
    with observing(model, keep(records), outputs=outputs):
        run(model)
    operands = {(path, operand): tensor for path, operand, tensor in records}
    assert len(operands) == len(records)
    return operands


# The operands


@pytest.mark.parametrize("outputs", [False, True])
def test_operands_come_in_the_order_of_execution(outputs: bool) -> None:
    model, records = gpt("current"), Seen()
    with observing(model, keep(records), outputs=outputs):
        loss_of(model, 0).backward()
    forward = ("input", "weight", "output") if outputs else ("input", "weight")
    backward = ("grad_output", "grad_input") if outputs else ("grad_output",)
    expected = [(name, operand) for name in LINEARS for operand in forward]
    expected += [(name, operand) for name in reversed(LINEARS) for operand in backward]
    assert [(path, operand) for path, operand, _ in records] == expected


class Pair(nn.Module):
    """Two linears that read the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 16), nn.Linear(32, 48, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(input=x)


def test_tensors_are_those_of_each_linear_alone() -> None:
    torch.manual_seed(0)
    model = Pair()
    x = torch.randn(2, 5, 32, requires_grad=True)
    da, db = torch.randn(2, 5, 16), torch.randn(2, 5, 48)
    layers = {"a": model.a, "b": model.b}
    records: Seen = []
    with observing(model, keep(records), outputs=True, layers=layers):
        torch.autograd.backward(model(x), (da, db))
    tensor_of = {(path, operand): tensor for path, operand, tensor in records}
    rows = x.detach().view(10, 32)
    for path, dy in (("a", da.view(10, 16)), ("b", db.view(10, 48))):
        layer = layers[path]
        assert torch.equal(tensor_of[path, "input"], rows)
        assert torch.equal(tensor_of[path, "weight"], layer.weight)
        assert torch.equal(tensor_of[path, "output"], layer(rows))
        assert torch.equal(tensor_of[path, "grad_output"], dy)
        torch.testing.assert_close(tensor_of[path, "grad_input"], dy @ layer.weight)
    assert len(tensor_of) == len(records) == 10


@pytest.mark.parametrize("sizes", [[5, 33, 16, 1], [0, 8, 0, 0]])
def test_a_grouped_linear_shows_what_a_loop_of_linears_over_its_groups_casts(sizes) -> None:
    grouped = Grouped("delayed")
    models = grouped, Loop("delayed", grouped)
    operands, expected = (
        operands_of(model, lambda model: passed(model, sizes, torch.float32)) for model in models
    )
    assert len(operands) == 4 * 5
    assert same(operands, expected)
    quantizers = grouped.plan.layer("up.1").quantizers
    assert quantizers is not None
    assert quantizers.input is not None
    grouped.up.delayed.apply_pending_update()
    for group in (1, 2):
        x = operands["up.1", "input"]
        scale = scale_of(f"up.{group}", grouped.up, "input", x, quantizers.input)
        assert scale is not None
        assert torch.equal(scale, fp8_state(grouped)["up.input.scale"][group])


@pytest.mark.parametrize("name", ["GptOssExperts", "MixtralExperts"])
def test_converted_experts_show_what_a_loop_of_converted_linears_casts(name) -> None:
    def run(model: Any) -> None:
        model(normal(48, WIDTH).requires_grad_()).square().sum().backward()

    operands, expected = (
        operands_of(convert(model, resolve("delayed", CPU)), run) for model in pair(name)
    )
    assert len(operands) == 2 * EXPERTS * 5
    assert ("experts.gate_up_proj.3", "weight") in operands
    assert same(operands, expected)


def backward(model: Any) -> None:
    loss_of(model, 0).backward()


def test_operands_have_the_dtype_that_is_cast() -> None:
    config = GPTConfig.model_validate(TINY)
    plan = replace(plan_for(config, "current", CPU, "emulate"), compute_dtype="bf16")
    operands = operands_of(GPT(config, build_backend(plan)), backward)
    dtypes = {(operand, tensor.dtype) for (_, operand), tensor in operands.items()}
    computed = ("input", "grad_output", "output", "grad_input")
    assert dtypes == {("weight", torch.float32), *((name, torch.bfloat16) for name in computed)}


def test_a_transposed_weight_is_seen_as_out_by_in() -> None:
    from transformers.pytorch_utils import Conv1D

    model = convert(nn.Sequential(Conv1D(48, 32)), resolve("current", CPU))
    operands = operands_of(model, lambda model: model(torch.randn(4, 32)))
    assert torch.equal(operands["0", "weight"], model.get_parameter("0.weight").t())


def test_a_linear_that_is_not_in_fp8_is_not_seen() -> None:
    model = gpt("current")
    model.blocks[1].mlp.up.in_fp8 = False
    names = [name for name in LINEARS if name != "blocks.1.mlp.up"]
    assert list(fp8_linears(model)) == names
    operands = operands_of(model, backward, outputs=False)
    assert operands.keys() == {(name, operand) for name in names for operand in OPERANDS}


def test_nothing_is_seen_after_the_context() -> None:
    model, losses = gpt("current"), []
    operands = operands_of(model, lambda model: losses.append(loss_of(model, 0)), outputs=False)
    losses[0].backward()
    backward(model)
    assert len(operands) == 2 * len(LINEARS)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in fp8_linears(model).values())


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("backend", ["emulate", "torch"])
def test_the_scale_is_that_of_the_cast(recipe: str, backend: str) -> None:
    model = gpt(recipe, backend)
    rules = load_recipe(recipe).quantizers
    assert rules is not None
    train(model, range(2))  # delayed scaling has seen amaxes by then
    scales: dict[str, tuple[float, float]] = {}

    def see(path: str, layer: nn.Module, operand: Any, x: Tensor) -> None:
        scale = scale_of(path, layer, operand, x, rules.each[operand])
        assert scale is not None
        scales[f"{path}.{operand}"] = float(scale), float(x.abs().max())

    before = fp8_state(model)
    with observing(model, see):
        backward(model)
    assert len(scales) == 3 * len(LINEARS)
    for name, (scale, amax) in scales.items():
        if recipe == "delayed":
            assert scale == before[f"{name}.scale"] != 1.0
        else:
            limit = 57344.0 if name.endswith("grad_output") else 448.0
            assert scale == pytest.approx(limit / amax, rel=1e-6)


# Nothing changes


@pytest.mark.parametrize(
    ("recipe", "backend", "again"),
    [*(case(*way, None, quick=way[0] in ("delayed", "mxfp8")) for way in (*WAYS, ("nvfp4", "te"))),
     *(("delayed", "emulate", again) for again in (False, True)),
     ("mxfp8", "emulate", False), ("current", "emulate", True)],
)  # fmt: skip
@pytest.mark.full
def test_a_run_is_the_same_to_the_bit(te, recipe, backend, again):
    """`again`: blocks run again in the backward pass, by reentrant checkpointing or not."""
    records: Seen = []
    models = [gpt(recipe, backend) for _ in range(2)]
    if again is not None:
        models = [checkpointed(model, again) for model in models]
    observed, plain = models

    def around(step, micro_batch):
        once = (step, micro_batch) == (1, 0)
        return observing(observed, keep(records), outputs=True) if once else nullcontext()

    assert same(history(observed, 3, around=around), history(plain, 3))
    assert observed.backend.fp8_gemms() == plain.backend.fp8_gemms()
    operands = {(path, operand) for path, operand, _ in records}
    assert operands >= {(name, operand) for name in LINEARS for operand in OPERANDS}
    if backend != "te":
        assert len(records) == len(operands) == 5 * len(LINEARS)


# Transformer Engine's fused modules


def near(x: Tensor, reference: Tensor, tolerance: float) -> bool:
    return bool((x.float() - reference.float()).norm() <= tolerance * reference.float().norm())


@pytest.mark.parametrize("activation", TRANSFORMER_ENGINES)
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_fused_modules_show_the_operands_of_an_unfused_model(te, recipe, activation):
    shape = {"activation": activation, "bias": activation == "gelu_tanh"}
    fused, plain = (gpt(recipe, "te", shape) for _ in range(2))
    plain.blocks[0].backend._fuses = lambda x, norm: False
    for model in (fused, plain):
        for step in range(2):  # delayed scaling learns the sizes of the operands
            loss_of(model, step).backward()
    operands, expected = (operands_of(model, backward, outputs=False) for model in (fused, plain))
    assert operands.keys() == {(name, operand) for name in LINEARS for operand in OPERANDS}
    for key, tensor in operands.items():
        assert tensor.shape == expected[key].shape
        assert near(tensor, expected[key], 0.2), key  # FP8's noise between the linears
    assert near(operands[LINEARS[0], "input"], expected[LINEARS[0], "input"], 0.01)


@pytest.mark.parametrize("norm_by", ["TE", "cuDNN", "cuDNN, but for whole tiles alone"])
def test_an_mxfp8_norm_is_rounded_unless_its_kernel_casts(te, norm_by, monkeypatch):
    """Observers get the bits that Transformer Engine casts, by the rule in its source."""
    monkeypatch.setenv("NVTE_NORM_FWD_USE_CUDNN", str(int("cuDNN" in norm_by)))
    cast: list[Tensor] = []
    real = te_stand_in.Module.quantize

    def noted(module: Any, x: Tensor, gemm: int, kind: str) -> Any:
        if kind == "input" and type(module) is not te_stand_in.Linear and gemm == 1:
            cast.append(x.float())
        return real(module, x, gemm, kind)

    monkeypatch.setattr(te_stand_in.Module, "quantize", noted)
    model, records = gpt("mxfp8", "te", {"width": 128, "context": 32}), Seen()
    sequences = 3 if "alone" in norm_by else 4  # of 32 tokens
    tokens = torch.randint(64, (sequences, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), observing(model, keep(records)):
        model(tokens)
    normed = ("attention.qkv", "mlp.up")
    observed = [
        x.float() for path, operand, x in records if operand == "input" and path[9:] in normed
    ]
    assert len(observed) == len(cast) == 4
    assert all(torch.equal(a, b) for a, b in zip(observed, cast, strict=True))
    rounded = all(torch.equal(x, x.bfloat16().float()) for x in cast)
    assert rounded == (norm_by != "cuDNN")


def test_a_backend_is_observed_by_the_inner_context_and_then_the_outer(te: object) -> None:
    model = gpt("current", "te")
    outer: Seen = []
    with observing(model, keep(outer)):
        inner = operands_of(model, lambda model: loss_of(model, 0))
        before = len(outer)
        loss_of(model, 0)
        assert len(outer) > before
    assert {path for path, _ in inner} == set(LINEARS)
    assert model.blocks[0].backend.observer is None


def test_recomputing_between_fused_linears_gives_the_gradient_of_the_activation() -> None:
    from fp8stack.layers.observe import Observer

    torch.manual_seed(0)
    up, down = nn.Linear(16, 32), nn.Linear(32, 16)
    x, dy = torch.randn(8, 16), torch.randn(8, 16)
    hidden = up(x)
    hidden.retain_grad()
    y = down(F.gelu(hidden, approximate="tanh"))
    y.backward(dy)
    records: Seen = []
    observer = Observer(keep(records), {"up": up, "down": down}, False)
    output = y.detach().requires_grad_()
    observer.report_fused_mlp(up, down, "gelu_tanh", x, output, torch.float32)
    output.backward(dy)
    tensor_of = {(path, operand): tensor for path, operand, tensor in records}
    torch.testing.assert_close(tensor_of["up", "grad_output"], hidden.grad)
    torch.testing.assert_close(tensor_of["down", "input"], F.gelu(hidden, approximate="tanh"))
    assert torch.equal(tensor_of["down", "grad_output"], dy)
