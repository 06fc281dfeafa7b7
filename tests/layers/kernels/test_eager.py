"""RMSNorm and SwiGLU in eager mode against what torch and autograd compose, to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8stack.layers.kernels.eager import RMSNorm, swiglu
from tests.support.backend_models import saved_tensors

pytestmark = pytest.mark.usefixtures("one_thread")


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def results(function: Callable[[Tensor], Tensor], x: Tensor, *parameters: Tensor) -> list[Tensor]:
    """The output and the gradients, of `x` first."""
    x = x.detach().requires_grad_()
    y = function(x)
    gradients = torch.autograd.grad(y, [x, *parameters], normal(*y.shape, seed=7).to(y.dtype))
    return [y.detach(), *gradients]


def assert_same(got: list[Tensor], expected: list[Tensor]) -> None:
    for tensor, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(tensor, reference, rtol=0, atol=0, equal_nan=True)


def norms(width: int) -> tuple[nn.RMSNorm, nn.RMSNorm]:
    pair = RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
    for norm in pair:
        nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(1))
    return pair


SPECIAL = torch.tensor([0.0, -0.0, 1e-30, 1e-45, 1.6e38, torch.inf, torch.nan, -1.0])
INPUTS = {
    "rows": normal(33, 128, seed=2),
    "tokens": normal(4, 33, 40, seed=3),
    "heads of a part of a tensor": normal(2, 9, 12, 32, seed=4)[:, :, 4:8].transpose(1, 2),
    "special values": torch.stack([SPECIAL, SPECIAL[:1].expand(8), SPECIAL.nan_to_num(1.0, 2.0)]),
    "zeros": torch.zeros(3, 16),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS)
def test_rms_norm_gives_torchs_values_and_gradients(x, dtype):
    x, (rms_norm, plain) = x.to(dtype), (norm.to(dtype) for norm in norms(x.shape[-1]))
    assert_same(results(rms_norm, x, rms_norm.weight), results(plain, x, plain.weight))


def swapped(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: norm(x).transpose(1, 2)  # so its gradient comes turned


def added(norm: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: x + norm(x).sin()


@pytest.mark.parametrize("width", [16, 40])
@pytest.mark.parametrize("around", [swapped, added])
def test_gradients_in_another_order_of_memory_or_added_up_give_torchs(width, around):
    """Attention gives such gradients to the norms of heads; torch's sum over rows depends on it."""
    x_BHTE = normal(4, 32, 2, width, seed=5).transpose(1, 2)
    rms_norm, plain = norms(width)
    for x in (x_BHTE, x_BHTE.contiguous()):
        expected = results(around(plain), x, plain.weight)
        assert_same(results(around(rms_norm), x, rms_norm.weight), expected)


def test_rms_norm_keeps_its_input_and_no_other_tensor_of_that_size():
    x = normal(4, 16, seed=6).requires_grad_()
    with saved_tensors() as saved:
        norms(16)[0](x)
    assert [t.data_ptr() for t in saved if t.numel() == x.numel()] == [x.data_ptr()]


@pytest.mark.parametrize("trains", [(True, False), (False, True)], ids=["input", "weight"])
def test_what_is_frozen_gets_no_gradient(trains):
    norm, _ = norms(16)
    x = normal(4, 16, seed=6).requires_grad_(trains[0])
    norm.weight.requires_grad_(trains[1])
    norm(x).sum().backward()
    assert (x.grad is not None, norm.weight.grad is not None) == trains


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 7, 24), (1, 2), (0, 8)])
def test_swiglu_gives_torchs_values_and_gradients(shape, dtype):
    def composed(hidden: Tensor) -> Tensor:
        gate, value = hidden.chunk(2, dim=-1)
        return F.silu(gate) * value

    hidden = normal(*shape, seed=9, dtype=dtype)
    assert_same(results(swiglu, hidden), results(composed, hidden))


@pytest.mark.parametrize(
    "function", [RMSNorm(8, eps=1e-5), RMSNorm(8), swiglu], ids=["rms_norm", "eps", "swiglu"]
)
def test_transforms_of_torch_func_pass_through(function):
    x = normal(3, 8, seed=10)
    got = torch.func.grad(lambda x: function(x).sum())(x)
    torch.testing.assert_close(got, torch.autograd.grad(function(x.requires_grad_()).sum(), x)[0])
