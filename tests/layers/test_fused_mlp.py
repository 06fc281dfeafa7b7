"""The torch backend's MLP whose activation is computed as it is cast: on a CPU, where torch
computes what the kernel does on a GPU, it gives what its parts give, to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8stack import numerics
from fp8stack.layers import build_backend, fp8_state, fused_mlp
from fp8stack.layers import torch as torch_backend
from fp8stack.layers.kernels.activations import ACTIVATIONS
from fp8stack.layers.kernels.fused_casts import FusedInput
from fp8stack.layers.kernels.scaled_gemm import Scaled
from fp8stack.layers.linear import Call, QuantizedLinear
from fp8stack.layers.observe import observing
from fp8stack.model.config import Experts, GPTConfig, load_config, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.numerics.cast import codes_of_cast
from fp8stack.precision import Hardware
from tests.support.backend_models import CPU, linear
from tests.support.oracles import every_value

pytestmark = pytest.mark.usefixtures("one_thread")
TINY: dict[str, Any] = {
    "layers": 1,
    "width": 64,
    "heads": 2,
    "kv_heads": 2,
    "mlp_width": 128,
    "context": 32,
    "vocabulary": 64,
}


EXPERTS = Experts(count=4, per_token=2, width=64, shared=2)


class Fusing:
    """Has the backend fuse as on a GPU, and counts how often it did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on, self.count = False, 0
        fused = fused_mlp.fused_mlp

        def counted(backend: Any, x: Tensor, mlp: Any) -> Tensor:
            if not torch.compiler.is_compiling():
                self.count += 1
            return fused(backend, x, mlp)

        for module in (fused_mlp, torch_backend):
            monkeypatch.setattr(module, "has_kernel", lambda device: self.on)
        monkeypatch.setattr(torch_backend, "fused_mlp", counted)


@pytest.fixture
def fusing(monkeypatch) -> Iterator[Fusing]:
    yield Fusing(monkeypatch)
    torch._dynamo.reset()


def config_of(activation: str) -> GPTConfig:
    name = "llama-8b" if activation == "swiglu" else "gpt2-124m"
    return load_config(name, TINY | {"activation": activation})


def trained(recipe: str, activation: str, way: str = "eager", rows: int = 2) -> list[Tensor]:
    """The losses, gradients and FP8 state of two passes."""
    config = config_of(activation)
    if way == "shared experts":
        config = config.model_copy(update={"experts": EXPERTS})
    gpt = GPT(config, build_backend(plan_for(config, recipe, Hardware("cpu"), backend="torch")))
    if way == "frozen":
        gpt.blocks[0].mlp.up.weight.requires_grad_(False)
    if way == "compiled":
        gpt.compile_blocks("aot_eager")
    tokens = torch.arange(rows * 32).view(rows, 32) % 64
    tensors = []
    for _ in range(2):
        loss = gpt(tokens, tokens.roll(1))
        loss.backward()
        tensors.append(loss.detach())
    tensors += [p.grad for p in gpt.parameters() if p.grad is not None]
    assert way == "compiled" or gpt.backend.fp8_gemms() > 0
    return tensors + list(fp8_state(gpt).values())


@pytest.mark.parametrize(
    ("recipe", "way"),
    [*itertools.product(["delayed", "current"], ["eager", "frozen", "shared experts"]),
     *(pytest.param(x, "compiled", marks=pytest.mark.slow) for x in ("delayed", "current"))],
)  # fmt: skip
def test_a_fused_mlp_gives_what_its_parts_give(recipe, way, fusing):
    for activation in ACTIVATIONS if way == "eager" else ("swiglu",):
        apart = trained(recipe, activation, "eager" if way == "compiled" else way)
        assert fusing.count == 0
        fusing.on = True
        together = trained(recipe, activation, way)
        assert len(together) == len(apart)
        for tensor, unfused in zip(together, apart, strict=True):
            rtol = 1e-5 if tensor.ndim == 1 else 0  # a bias's gradient is summed in another order
            torch.testing.assert_close(tensor, unfused, rtol=rtol, atol=0)
        assert fusing.count == (0 if way == "compiled" else 2)
        fusing.on, fusing.count = False, 0


def test_an_mlp_that_is_observed_or_left_fp8_or_has_rows_to_add_runs_by_its_parts(fusing):
    fusing.on = True
    config = config_of("swiglu")
    gpt = GPT(config, build_backend(plan_for(config, "current", CPU, backend="torch")))
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    operands = []
    with observing(gpt, lambda path, layer, place, x: operands.append((path, place))):
        gpt(tokens, tokens).backward()
    assert ("blocks.0.mlp.down", "input") in operands
    assert ("blocks.0.mlp.up", "grad_output") in operands
    gpt.blocks[0].mlp.down.in_fp8 = False
    gpt(tokens, tokens)
    gpt.blocks[0].mlp.down.in_fp8 = True
    gpt(tokens[:, :30], tokens[:, :30])
    assert fusing.count == 0
    gpt(tokens, tokens)
    assert fusing.count == 1
    assert gpt.blocks[0].mlp.up.was_called


def test_blocks_of_a_product_are_those_of_its_values(fusing):
    layer, _ = linear("block", 128, 256, backend="torch", hardware=Hardware("cuda", (9, 0)))
    assert isinstance(layer, QuantizedLinear)
    hidden, dy = torch.randn(256, 512).bfloat16(), torch.randn(256, 256).bfloat16()
    operand = layer.quantizers["grad_output"]
    call = Call(record=False, rows=256, has_bias=True)

    def quantize(x: Tensor | FusedInput) -> tuple[Scaled, Scaled]:
        rowwise, columnwise = operand.cast(x, True, call)
        return rowwise, columnwise

    for product in (FusedInput("swiglu", hidden), FusedInput("swiglu", hidden, dy)):
        values = product.values()
        apart = quantize(values)
        fusing.on = True
        for copies in (quantize(product), quantize(values)):
            assert copies[0].sums is not None
            torch.testing.assert_close(copies[0].sums, values.float().sum(0))
            for copy, expected in zip(copies, apart, strict=True):
                assert torch.equal(copy.data.view(torch.uint8), expected.data.view(torch.uint8))
                assert torch.equal(copy.inv_scale, expected.inv_scale)
                assert copy.inv_scale.stride() == expected.inv_scale.stride()
                assert copy.kind is expected.kind
        fusing.on = False


def test_the_bytes_that_compiled_code_transposes_are_those_of_the_cast():
    for dtype, format in itertools.product((torch.bfloat16, torch.float16), ("e4m3", "e5m2")):
        x, scale = every_value(dtype).view(256, 256), torch.tensor(3.7)
        expected = numerics.cast_to_fp8(x, scale, format).view(torch.uint8)
        assert torch.equal(codes_of_cast(x, scale, format), expected)
