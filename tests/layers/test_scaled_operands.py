"""Linears some of whose GEMMs are in no FP8, or whose operands have other quantizers for each GEMM:
what the torch backend multiplies is what the emulator does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8stack.layers import build_backend, fp8_state, fused_mlp
from fp8stack.layers import torch as torch_backend
from fp8stack.layers.emulate import Emulated, EmulatedLayout
from fp8stack.layers.kernels.scaled_gemm import Scaled
from fp8stack.layers.torch import TorchBackend
from fp8stack.precision import Hardware
from tests.support.backend_models import CPU, gpt, linear, planned, same, saved_tensors, train
from tests.support.cuda_gemms import blocked_values
from tests.support.gemm_oracle import assert_all_close, normal, run
from tests.support.study_recipes import hadamard

L4, H100 = Hardware("cuda", (8, 9)), Hardware("cuda", (9, 0))
B200 = Hardware("cuda", (10, 0))
HIGH = {"backward": "high_precision"}
FORWARD = {"backward": "dequantized"}
NO_DGRAD = {"grad_output": {"dgrad": "none"}, "weight": {"dgrad": "none"}}
NO_WGRAD = {"grad_output": {"wgrad": "none"}, "input": {"wgrad": "none"}}
NEAREST_WGRAD = {"grad_output": {"wgrad": {"rounding": "nearest"}}}
# A recipe, its changes, a GPU, and the GEMMs that it multiplies in FP8 or FP4.
MIXED: list[tuple[str, dict[str, Any], Hardware, str]] = [
    ("rowwise_wgrad_hp", {}, H100, "fprop dgrad"),
    ("nvfp4_forward_high", {}, B200, "dgrad wgrad"),
    ("nvfp4", HIGH, B200, "fprop"),
    ("nvfp4", FORWARD, B200, "fprop"),
    ("nvfp4", hadamard(32), B200, "fprop dgrad"),
    ("nvfp4", NEAREST_WGRAD, B200, "fprop dgrad wgrad"),
    ("mxfp8", FORWARD, B200, "fprop"),
    ("mxfp8", {"backward": "current"}, H100, "dgrad wgrad"),
    ("block", HIGH, H100, "fprop"),
    ("current", FORWARD, L4, "fprop"),
    ("rowwise", FORWARD, H100, "fprop"),
    ("delayed", NO_DGRAD, H100, "fprop wgrad"),
    ("delayed", NO_WGRAD, H100, "fprop dgrad"),
    ("delayed", {"grad_output": {"wgrad": "none"}}, H100, "fprop dgrad"),
    ("delayed", {"grad_output": {"amax": "current"}}, H100, "fprop dgrad wgrad"),
    ("delayed", {"input": {"wgrad": "forward"}}, H100, "fprop dgrad wgrad"),
    ("delayed", {"weight": {"dgrad": {"margin": 2}}}, H100, "fprop dgrad wgrad"),
]
ROWS, IN, OUT = 128, 128, 256

pytestmark = pytest.mark.usefixtures("one_thread")


def values_of(copy: Any) -> Tensor:
    """The values of a copy as its GEMM reduces it, [rows, K], float64."""
    if isinstance(copy, Scaled):
        values = blocked_values(copy.data, copy.inv_scale, copy.kind)
        return values if copy.upper_scale is None else values * copy.upper_scale.double()
    values = copy.values.double()
    factor = 1.0 if copy.factor is None else copy.factor.double()
    if isinstance(factor, Tensor) and factor.ndim:
        factor = factor[:, None]
    return (values.t() if copy.layout.transposed else values) * factor


def multiplied(layer: Any, x: Tensor, dy: Tensor) -> tuple[list[tuple[Any, Any]], list[Tensor]]:
    """The operands of the three GEMMs of a layer, and the results of its pass."""
    pairs: list[tuple[Any, Any]] = []
    matmul = layer.backend.matmul

    def noted(a: Any, b: Any, *arguments: Any, **options: Any) -> Tensor:
        pairs.append((a, b))
        y: Tensor = matmul(a, b, *arguments, **options)
        return y

    layer.backend.matmul = noted
    results = run(layer, x, dy)
    del layer.backend.matmul
    return pairs, list(results)


@pytest.mark.parametrize(("recipe", "changes", "hardware", "scaled"), MIXED, ids=str)
def test_each_gemm_multiplies_what_the_emulator_does_to_the_bit(
    cuda_gemm, recipe, changes, hardware, scaled
):
    by_torch, emulated = (
        linear(recipe, IN, OUT, hardware=hardware, backend=backend, **changes)[0]
        for backend in ("torch", "emulate")
    )
    for step in range(2):  # the second with scales of the first, and other random bits
        x, dy = (normal(ROWS, n, seed=step + n).bfloat16() for n in (IN, OUT))
        pairs, results = multiplied(by_torch, x, dy)
        expected_pairs, expected = multiplied(emulated, x, dy)
        assert same(fp8_state(by_torch), fp8_state(emulated))
        for place, gemm in enumerate(("fprop", "dgrad", "wgrad")):
            in_fp8 = gemm in scaled
            operands = zip(pairs[place], expected_pairs[place], strict=True)
            for copy, emulated_copy in operands:
                assert isinstance(copy, Scaled) == in_fp8
                assert torch.equal(values_of(copy), values_of(emulated_copy))
            if in_fp8:
                tolerance = 2**-20 if gemm == "wgrad" else 2**-7
                assert_all_close([results[place]], [expected[place]], tolerance)
            else:
                assert torch.equal(results[place], expected[place])
        assert_all_close(results[3:], expected[3:])
    assert len(cuda_gemm) == 2 * len(scaled.split())


def test_a_copy_that_is_not_quantized_is_saved_as_it_is_and_the_other_as_bytes(monkeypatch):
    monkeypatch.setenv("FP8STACK_CPU_BF16", "yes")
    layer, _ = linear("rowwise_wgrad_hp", 64, 32, hardware=H100, backend="torch")
    with saved_tensors() as saved:
        layer(normal(16, 64).bfloat16().requires_grad_())
    large = {t.dtype: t.numel() for t in saved if t.numel() > 64}
    assert large == {torch.bfloat16: 16 * 64, torch.float8_e4m3fn: 64 * 32}


@pytest.mark.full
def test_compiled_a_layer_multiplies_the_same():
    torch._dynamo.reset()
    layer, _ = linear("rowwise_wgrad_hp", 64, 32, backend="torch")
    forward = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x, dy = normal(16, 64), normal(16, 32)
    assert_all_close(run(layer, x, dy, forward), run(layer, x, dy), tolerance=1e-6)


def test_a_frozen_weight_and_a_frozen_input_leave_the_other_gradient():
    layer, _ = linear("rowwise_wgrad_hp", 64, 32, backend="torch")
    x, dy = normal(16, 64), normal(16, 32)
    _, dx, dw, _ = run(layer, x, dy)
    layer.zero_grad()
    layer(x).backward(dy)
    assert torch.equal(layer.weight.grad, dw)
    layer.weight.requires_grad_(False)
    x.requires_grad_()
    layer(x).backward(dy)
    assert torch.equal(x.grad, dx)


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_forward_high"])
def test_a_model_trains_as_the_emulators_and_casts_a_weight_once_a_step(
    cuda_gemm, monkeypatch, recipe
):
    by_torch, emulated = (
        gpt(recipe, backend, {"layers": 1}, hardware=B200) for backend in ("torch", "emulate")
    )
    casts = []
    copies = torch_backend.scaled_copies

    def counted(x, operand, *arguments):
        casts.append(operand.name)
        return copies(x, operand, *arguments)

    monkeypatch.setattr(torch_backend, "scaled_copies", counted)
    losses = [train(model, range(2), accumulate=2) for model in (by_torch, emulated)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    assert same(fp8_state(by_torch), fp8_state(emulated))
    # 4 linears in 2 micro-batches of 2 steps, but their weights once a step.
    assert [casts.count(name) for name in ("input", "grad_output", "weight")] == [16, 16, 8]


def test_the_plain_gemm_is_one_of_bfloat16_throughout():
    a, b = (torch.randint(-4, 5, (16, 32), dtype=torch.float32) for _ in range(2))
    bias = torch.randint(-4, 5, (16,), dtype=torch.float32)
    matrices = {
        False: (a, b),
        True: (a.t().contiguous(), b.t().contiguous()),
    }
    backend = TorchBackend(planned("current", "torch", CPU))
    for turned_a, turned_b in ((False, False), (False, True), (True, True)):
        first, second = matrices[turned_a][0].bfloat16(), matrices[turned_b][1].bfloat16()
        copies = (
            Emulated(first, None, EmulatedLayout(turned_a, False)),
            Emulated(second, None, EmulatedLayout(turned_b, False)),
        )
        for added in (None, bias):
            y = backend.matmul(*copies, torch.bfloat16, bias=added)
            assert y.dtype == torch.bfloat16
            assert torch.equal(y.float(), a @ b.t() + (0 if added is None else added))


def test_only_operands_whose_copies_one_cast_makes_are_fused_with_an_activation():
    plan = planned("current", "torch", CPU, layers=[{"match": "b", "recipe": "rowwise_wgrad_hp"}])
    backend = build_backend(plan.for_layers({"a": (32, 32), "b": (32, 32)}))
    takes = [fused_mlp._takes_fused_inputs(backend.linear(name, 32, 32, False)) for name in "ab"]
    assert takes == [True, False]
