"""Operands of any table of quantizers, in the layers that the emulator builds."""

import math
from typing import Any, cast

import pytest
import torch

from fp8stack.common.errors import UserError
from fp8stack.common.quantizer_table import OPERANDS
from fp8stack.layers import emulate, fp8_state, load_fp8_state
from fp8stack.precision import load_recipe
from tests.support.backend_models import LOW, linear, normal
from tests.support.gemm_oracle import assert_all_close
from tests.support.not_finite import hidden
from tests.support.odd_shapes import odd_shapes


def run(recipe, x, dy, **options):
    """A layer's output and gradients: y, dx, dw."""
    layer, _ = linear(recipe, x.shape[1], dy.shape[1], bias=False, **options)
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad


@pytest.mark.parametrize("recipe", LOW)
def test_a_nan_in_an_operand_is_seen_behind_every_gemm_that_takes_it_and_nowhere_else(recipe):
    x, dy = normal(48, 32, seed=1), normal(48, 64, seed=2)
    x[5, 7] = torch.nan
    y, dx, dw = run(recipe, x, dy)
    assert y[5].isnan().all()
    assert dw[:, 7].isnan().all()
    assert y.isnan().sum() == dw.isnan().sum() == 64
    assert not dx.isnan().any()
    x[5, 7], dy[3, 4] = 0, torch.nan
    y, dx, dw = run(recipe, x, dy)
    assert not y.isnan().any()
    assert dx[3].isnan().all()
    assert dw[4].isnan().all()
    assert dx.isnan().sum() == dw.isnan().sum() == 32


def emulated_gemm(a, b, factors, bias, in_bf16):
    """The operator, on matrices whose factors are those of both or of the first one."""
    matrices = a, b, None, "neither", 1, *[*factors, None, None][:2], False, bias, in_bf16
    return torch.ops.fp8stack.emulated_gemm(*matrices, torch.float32)


UNDERFLOW = [(0.0,), (0.0, 0.0), (1e-40,), (1e-30, 1e-30), (1e-45, 1.0), (1e-45, 1e-45)]
NOT_FINITE = [(torch.nan,), (torch.inf, 1.0), (3e38, 3e38), (0.0, torch.inf), (0.0, torch.nan)]


@pytest.mark.parametrize("in_bf16", [False, True])
@pytest.mark.parametrize("bias", [None, torch.ones(7)])
@pytest.mark.parametrize("scales", [*UNDERFLOW, *NOT_FINITE, (1e30, 1e-30)])
def test_no_scale_hides_a_nan_in_an_operand_and_none_is_hidden(scales, bias, in_bf16):
    """BLAS does not read its operands where alpha is 0. MKL's GEMM for CPUs without AVX-512 takes a
    NaN in its alpha for 1."""
    a, b = torch.ones(5, 8), torch.ones(8, 7)
    a[1, 2], b[3, 4] = torch.nan, torch.inf
    factors = [torch.tensor(scale) for scale in scales]
    y = emulated_gemm(a, b, factors, bias, in_bf16)
    expected = a @ b
    for scale in sorted(factors, reverse=True):
        expected = expected * scale
    if scales[0] == 0 and not all(map(math.isfinite, scales)):
        expected = torch.full_like(expected, torch.nan)
    torch.testing.assert_close(y, expected + (0 if bias is None else bias), equal_nan=True)


@pytest.mark.parametrize("recipe", LOW)
def test_nothing_hides_a_nan_in_any_pair_of_operands(recipe):
    layer, _ = linear(recipe, 32, 48, bias=False)
    assert hidden(layer, 40) == []


@pytest.mark.full
def test_nothing_hides_a_nan_in_compiled_code():
    torch._dynamo.reset()
    layer, _ = linear("current", 32, 48, bias=False)
    assert hidden(layer, 40, torch.compile(layer, backend="aot_eager", fullgraph=True)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", LOW)
def test_any_number_of_rows_and_dtype_of_weights_is_multiplied(recipe, dtype):
    assert odd_shapes(lambda: linear(recipe, 32, 48)[0], dtype) == []


def test_gradients_are_rounded_anew_in_every_backward_pass_and_the_same_after_loading():
    x, dy = normal(48, 32, seed=1), normal(48, 64, seed=2)
    layer, _ = linear("nvfp4", 32, 64, bias=False)

    def gradient():
        layer.weight.grad = None
        layer(x).backward(dy)
        return layer.weight.grad

    first, state = gradient(), fp8_state(layer)
    second = gradient()
    assert not torch.equal(first, second)
    assert state.keys() == {"layer.draws"}
    load_fp8_state(layer, state)
    assert torch.equal(gradient(), second)
    with pytest.raises(UserError, match=r"'layer\.draws' is only in this model"):
        load_fp8_state(layer, {"other.draws": torch.zeros((), dtype=torch.int64)})


def test_the_two_copies_of_an_operand_share_a_slot_of_delayed_scaling_if_they_are_alike():
    shared, _ = linear("delayed", 32, 64)
    assert {name.rpartition(".")[0] for name in fp8_state(shared)} == {
        f"layer.{name}" for name in OPERANDS
    }
    wgrad = {"format": "e4m3", "history_length": 2}
    apart, _ = linear("delayed", 32, 64, grad_output={"wgrad": wgrad})
    state = fp8_state(apart)
    assert state["layer.grad_output.wgrad.amax_history"].shape == (2,)
    assert state["layer.grad_output.amax_history"].shape == (1024,)
    dy = normal(48, 64, seed=2)
    apart(normal(48, 32, seed=1)).backward(dy)
    scales = [fp8_state(apart)[f"layer.grad_output{of}.scale"] for of in ("", ".wgrad")]
    assert torch.equal(scales[0] / scales[1], torch.tensor(57344.0 / 448.0))


# On the forward values

BACKWARD = [name for name in LOW if not name.startswith("served:")]  # quantized in training


def uneven(*shape, seed):
    """Normal values whose rows and columns have different magnitudes."""
    x = normal(*shape, seed=seed)
    rows, columns = (torch.arange(size) for size in shape)
    return x * 2.0 ** (rows % 5)[:, None] * 2.0 ** (columns % 7)


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        *((name, {"backward": "dequantized"}) for name in ("rowwise", "mxfp8", "current", "nvfp4")),
        ("rowwise", {"weight": {"dgrad": "forward"}, "power_of_two": False}),
    ],
)
def test_a_transposed_weight_is_multiplied_as_the_weight_is(recipe, changes):
    """Scales of rows differ along what GEMMs on the forward values reduce over."""
    weight, x, dy = (uneven(*n, seed=1) for n in ((48, 64), (40, 64), (40, 48)))
    results = []
    for transposed in (False, True):
        layer, _ = linear(recipe, 64, 48, bias=False, **changes)
        layer.transposed = transposed
        layer.weight = torch.nn.Parameter(weight.t().contiguous() if transposed else weight)
        x = x.detach().requires_grad_()
        y = layer(x)
        y.backward(dy)
        dw = layer.weight.grad.t() if transposed else layer.weight.grad
        results.append([y.detach(), x.grad, dw])
        x.grad = None
    assert_all_close(results[1], results[0], tolerance=1e-6)


@pytest.mark.parametrize(
    ("recipe", "changes", "exact"),
    [
        ("rowwise", {}, True),  # its scales are powers of two
        ("rowwise", {"power_of_two": False}, False),
        ("current", {}, True),
        ("block", {}, True),
        ("block", {"power_of_two": False}, False),
        ("nvfp4", {}, True),
    ],
)
def test_bf16_gemms_take_the_forward_values_only_where_bf16_holds_them(recipe, changes, exact):
    quantizers = load_recipe(recipe, {"backward": "dequantized"} | changes).quantizers
    assert quantizers is not None
    assert quantizers.exact_in_bf16 is exact


FLOAT32_SCALES = {"power_of_two": False}
FORWARD_WEIGHT = {"weight": {"dgrad": "forward"}}
HIGH_WGRAD = {"input": {"wgrad": "none"}, "grad_output": {"wgrad": "none"}}


@pytest.mark.parametrize(
    ("recipe", "changes", "in_bf16"),
    [
        *((name, {}, 3) for name in BACKWARD if not name.endswith(("_hp", "_high"))),
        ("rowwise_wgrad_hp", {}, 2),
        ("served:fp8_dynamic", {}, 1),
        ("served:fp8_block", {}, 0),
        ("block", FLOAT32_SCALES, 0),
        ("mxfp8", HIGH_WGRAD, 2),
        ("rowwise", FORWARD_WEIGHT, 3),
        ("rowwise", FORWARD_WEIGHT | FLOAT32_SCALES, 2),
        ("current", FORWARD_WEIGHT, 3),
    ],
)
def test_onednn_may_multiply_in_bf16_what_bf16_holds_and_nothing_else(
    monkeypatch, recipe, changes, in_bf16
):
    products, matmul, product = [], cast(Any, torch.backends.mkldnn).matmul, emulate._product

    def noted(a, b, *arguments):
        held = all(torch.equal(x, x.to(torch.bfloat16).to(x.dtype)) for x in (a, b))
        products.append((matmul.fp32_precision, held))
        return product(a, b, *arguments)

    monkeypatch.setattr(emulate, "_product", noted)
    layer, _ = linear(recipe, 64, 128, bias=False, **changes)
    before = matmul.fp32_precision
    layer(normal(32, 64, seed=1).requires_grad_()).backward(normal(32, 128, seed=2))
    assert matmul.fp32_precision == before
    assert len(products) == 3
    assert all(held for precision, held in products if precision == "bf16")
    assert sum(precision == "bf16" for precision, _ in products) == in_bf16
