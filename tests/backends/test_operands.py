"""Operands of any table of quantizers, in the layers that the emulator builds."""

from typing import Any, cast

import pytest
import torch

from fp8stack.backends import emulate, fp8_state, load_fp8_state
from fp8stack.errors import UserError
from fp8stack.formats import OPERANDS
from tests.support.backend_models import LOW, linear


def run(recipe, x, dy, **options):
    """A layer's output and gradients: y, dx, dw."""
    layer, _ = linear(recipe, x.shape[1], dy.shape[1], bias=False, **options)
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("save_fp8", [False, True])
@pytest.mark.parametrize("recipe", LOW)
def test_a_nan_in_an_operand_is_seen_behind_every_gemm_that_takes_it_and_nowhere_else(
    recipe, save_fp8
):
    x, dy = normal(48, 32, seed=1), normal(48, 64, seed=2)
    x[5, 7] = torch.nan
    y, dx, dw = run(recipe, x, dy, save_fp8=save_fp8)
    assert y[5].isnan().all()
    assert dw[:, 7].isnan().all()
    # Packed in a format without NaN, a whole operand is NaN.
    assert save_fp8 or y.isnan().sum() == dw.isnan().sum() == 64
    assert not dx.isnan().any()
    x[5, 7], dy[3, 4] = 0, torch.nan
    y, dx, dw = run(recipe, x, dy, save_fp8=save_fp8)
    assert not y.isnan().any()
    assert dx[3].isnan().all()
    assert dw[4].isnan().all()
    assert save_fp8 or dx.isnan().sum() == dw.isnan().sum() == 32


@pytest.mark.parametrize("bias", [None, torch.ones(7)])
@pytest.mark.parametrize("scales", [(torch.nan,), (torch.inf, 1.0), (3e38, 3e38), (1e30, 1e-30)])
def test_a_gemm_is_multiplied_by_scales_that_are_not_finite(scales, bias):
    """MKL's GEMM for CPUs without AVX-512 takes a NaN in its alpha for 1."""
    a, b = normal(5, 8, seed=1), normal(8, 7, seed=2)
    y = torch.ops.fp8stack.cpu_gemm(a, b, "", [torch.tensor(s) for s in scales], bias, False)
    alpha = torch.tensor(scales, dtype=torch.float64).prod().float()
    expected = (a @ b) * alpha + (0 if bias is None else bias)
    torch.testing.assert_close(y, expected, equal_nan=True)


@pytest.mark.parametrize("rows", [48, 41])
@pytest.mark.parametrize("recipe", LOW)
def test_packed_operands_give_the_gradients_of_those_in_float32(recipe, rows):
    x, dy = normal(rows, 36, seed=1), normal(rows, 20, seed=2)
    kept, packed = (run(recipe, x, dy, save_fp8=save) for save in (False, True))
    for one, other in zip(kept, packed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


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
    alike, _ = linear("delayed", 32, 64)
    assert {name.rpartition(".")[0] for name in fp8_state(alike)} == {
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


FLOAT32_SCALES = {"power_of_two": False}
HIGH_WGRAD = {"input": {"wgrad": "none"}, "grad_output": {"wgrad": "none"}}


@pytest.mark.parametrize("save_fp8", [False, True])
@pytest.mark.parametrize(
    ("recipe", "changes", "in_bf16"),
    [
        *((name, {}, 3) for name in LOW if not name.endswith(("_hp", "_high"))),
        ("rowwise_wgrad_hp", {}, 2),
        ("block", FLOAT32_SCALES, 0),
        ("mxfp8", HIGH_WGRAD, 2),
    ],
)
def test_onednn_may_multiply_in_bf16_what_bf16_holds_and_nothing_else(
    monkeypatch, recipe, changes, in_bf16, save_fp8
):
    seen, matmul, product = [], cast(Any, torch.backends.mkldnn).matmul, emulate._product

    def noted(a, b, *others):
        held = all(torch.equal(one, one.to(torch.bfloat16).to(one.dtype)) for one in (a, b))
        seen.append((matmul.fp32_precision, held))
        return product(a, b, *others)

    monkeypatch.setattr(emulate, "_product", noted)
    layer, _ = linear(recipe, 64, 128, bias=False, save_fp8=save_fp8, **changes)
    before = matmul.fp32_precision
    layer(normal(32, 64, seed=1).requires_grad_()).backward(normal(32, 128, seed=2))
    assert matmul.fp32_precision == before
    assert len(seen) == 3
    assert all(held for precision, held in seen if precision == "bf16")
    assert sum(precision == "bf16" for precision, _ in seen) == in_bf16
