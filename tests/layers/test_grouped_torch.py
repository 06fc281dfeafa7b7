"""Grouped linears on torch's grouped FP8 GEMM: a stand-in makes the checks of the CUDA source."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8stack.layers import fp8_state
from fp8stack.layers.compiler import compiled
from fp8stack.layers.torch import TorchBackend
from fp8stack.numerics import groups
from fp8stack.precision.hardware import cpu_multiplies_bf16
from tests.support.backend_models import H100, grad, normal, same, saved_tensors
from tests.support.grouped_models import Grouped, ends_of, passed

IN, OUT = 64, 96
SIZES = [[5, 0, 20, 7], [16, 16, 0, 32], [0, 0, 0, 9], [0, 0, 0, 0]]
# fprop, and dgrad where both operands are E4M3
FP8_GEMMS = {"delayed": 1, "current": 1, "rowwise": 2, "rowwise_wgrad_hp": 2}


class Gemm:
    """`torch._scaled_grouped_mm` of rows by matrices, with the checks of GroupedBlas.cpp and
    ScaledGroupMM.cu, and of the function for tensors without memory."""

    def __init__(self) -> None:
        self.fast: list[bool] = []
        self.meta: Any = torch._scaled_grouped_mm

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        *,
        offs: Tensor,
        out_dtype: torch.dtype,
        use_fast_accum: bool,
    ) -> Tensor:
        assert a.ndim == 2
        assert b.ndim == 3
        assert a.dtype == b.dtype == torch.float8_e4m3fn
        assert a.stride() == (a.shape[1], 1)
        assert b.stride()[-2:] == (1, b.shape[1])
        assert a.shape[1] == b.shape[1]
        assert not any(size % 16 for size in (a.shape[1], *b.shape[1:]))
        assert offs.dtype == torch.int32
        assert offs.shape == (len(b),)
        for scale, shape in ((scale_a, a.shape[:1]), (scale_b, (len(b), b.shape[2]))):
            assert scale.dtype == torch.float32
            assert scale.shape == shape
            assert scale.is_contiguous()
        assert out_dtype == torch.bfloat16
        assert len(b) < 1024
        self.fast.append(use_fast_accum)
        on_meta: list[Any] = [x.to("meta") for x in (a, b, scale_a, scale_b)]
        shaped = self.meta(*on_meta, offs=offs.to("meta"), out_dtype=out_dtype)
        places = [0, *offs.tolist()]
        y = torch.empty(shaped.shape)
        for group, matrix in enumerate(b.float()):
            rows = slice(places[group], places[group + 1])
            y[rows] = a[rows].float() @ matrix * scale_a[rows, None] * scale_b[group]
        return y.to(out_dtype)


@pytest.fixture
def gemm(monkeypatch) -> Gemm:
    stand_in = Gemm()
    monkeypatch.setattr(torch, "_scaled_grouped_mm", stand_in)
    return stand_in


def grouped(recipe: str, backend: str, **options: Any) -> Grouped:
    return Grouped(recipe, backend=backend, hardware=H100, size=(IN, OUT), **options)


def results(model: Any, up: Any, sizes: list[int], seed: int) -> list[Tensor]:
    up.zero_grad()
    tensors = passed(model, sizes, torch.float32, seed, (IN, OUT))
    return tensors + [grad(parameter) for parameter in up.parameters()]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", FP8_GEMMS)
def test_outputs_and_gradients_follow_the_emulators(gemm, recipe, bias) -> None:
    by_torch, emulated = (grouped(recipe, name, bias=bias) for name in ("torch", "emulate"))
    assert type(by_torch.up.backend) is TorchBackend
    for seed, sizes in enumerate(SIZES):
        models = by_torch, emulated
        y, dx, *gradients = zip(*(results(m, m.up, sizes, seed) for m in models), strict=True)
        # Rounded to bfloat16 once, or twice where there is a bias.
        torch.testing.assert_close(*y, rtol=2**-7, atol=2**-7)
        torch.testing.assert_close(*dx, rtol=2**-7, atol=2**-12)
        for tensor, expected in gradients:  # in float32
            assert torch.equal(tensor, expected)
    assert same(fp8_state(by_torch), fp8_state(emulated))
    with_rows = sum(any(sizes) for sizes in SIZES)
    assert len(gemm.fast) == with_rows * FP8_GEMMS[recipe]
    assert sum(gemm.fast) == with_rows  # forward alone


def test_groups_that_are_too_many_for_the_kernel_are_emulated(gemm) -> None:
    many = Grouped("rowwise", backend="torch", hardware=H100, size=(16, 16), groups=1024)
    x = normal(8, 16)
    y = many(x, torch.full((1024,), 8, dtype=torch.int32))
    of_one_group = Grouped("rowwise", backend="emulate", hardware=H100, size=(16, 16), groups=1)
    with torch.no_grad():
        of_one_group.up.weight.copy_(many.up.weight[:1])
        of_one_group.up.bias.copy_(many.up.bias[:1])
    assert torch.equal(y, of_one_group(x, ends_of([8])))
    assert not gemm.fast


@pytest.mark.parametrize("recipe", FP8_GEMMS)
def test_a_weight_is_cast_once_until_it_changes_and_saved_as_bytes(gemm, recipe, monkeypatch):
    casts: list[Tensor] = []
    round_groups = groups._round_groups

    def counted(x: Tensor, ends: Tensor | None, *options: Any) -> list[Tensor]:
        casts.extend([x] if ends is None else [])
        return round_groups(x, ends, *options)

    monkeypatch.setattr(groups, "_round_groups", counted)
    model = grouped(recipe, "torch")
    counts = []
    for _ in range(2):
        for _ in range(2):
            with saved_tensors() as saved:
                results(model, model.up, SIZES[0], 0)
        counts.append(len(casts))
        with torch.no_grad():
            model.up.weight.mul_(2)
    copies = 2 if recipe == "rowwise_wgrad_hp" else 1  # which are rounded one by one
    assert counts == [copies, 2 * copies]
    large = {tensor.dtype for tensor in saved if tensor.numel() > 1000}
    dtypes = {torch.float8_e4m3fn}
    if recipe == "rowwise_wgrad_hp":  # and the input in high precision
        dtypes.add(torch.bfloat16 if cpu_multiplies_bf16() else torch.float32)
    assert large == dtypes
    with torch.no_grad():  # an evaluation has copies of its own
        expected = grouped(recipe, "torch")
        expected.load_state_dict(model.state_dict())
        if recipe != "delayed":
            x = normal(32, IN)
            assert torch.equal(model(x, ends_of(SIZES[0])), expected(x, ends_of(SIZES[0])))


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
@pytest.mark.full
def test_code_is_compiled_once_for_groups_of_any_sizes(gemm, recipe, monkeypatch) -> None:
    torch.compiler.reset()
    eager, model = grouped(recipe, "torch"), grouped(recipe, "torch")
    operator = torch.library.custom_op(
        f"tests::grouped_gemm_of_{recipe}",
        lambda a, b, scale_a, scale_b, offs, fast: gemm(
            a, b, scale_a, scale_b, offs=offs, out_dtype=torch.bfloat16, use_fast_accum=fast
        ),
        mutates_args=(),
        schema="(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor offs, bool fast)"
        " -> Tensor",
    )
    operator.register_fake(
        lambda a, b, scale_a, scale_b, offs, fast: a.new_empty(
            (a.shape[0], b.shape[2]), dtype=torch.bfloat16
        )
    )

    def multiply(
        a: Any, b: Any, sa: Any, sb: Any, *, offs: Any, out_dtype: Any, use_fast_accum: bool
    ) -> Any:
        return operator(a, b, sa, sb, offs, use_fast_accum)

    monkeypatch.setattr(torch, "_scaled_grouped_mm", multiply)
    run = compiled(model, "aot_eager")
    counter = torch._dynamo.utils.counters["stats"]
    for seed, sizes in enumerate(([5, 33, 16, 1], [0, 54, 0, 1], [20, 20, 10, 5], [1, 2, 3, 49])):
        expected = results(eager, eager.up, sizes, seed)
        assert all(map(torch.equal, results(run, model.up, sizes, seed), expected))
        if seed == 1:
            graphs = counter["unique_graphs"]
    assert counter["unique_graphs"] == graphs
