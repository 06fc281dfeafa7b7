"""TF32 is for the model that asked for it, forward and backward; a CPU shows the switch too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8stack import GPT, GPTConfig, Hardware, build_backend, convert, plan_for, resolve
from fp8stack.layers.kernels.matmul_precision import exact_matmul

AMPERE = Hardware("cuda", (8, 0))
CONFIG = GPTConfig(vocabulary=32, context=8, layers=2, width=16, heads=2)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


class Record(torch.autograd.Function):
    """Passes values and gradients on, and notes what products would be rounded to then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Callable[[str], None]) -> Tensor:
        ctx.note = note
        note("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.note("backward")
        return gradient.clone(), None


class Precisions(defaultdict[str, list[str]]):
    """The switch's positions, by the place and the pass where it was looked at."""

    def __init__(self) -> None:
        super().__init__(list)

    def record(self, x: Tensor, name: str) -> Tensor:
        def note(pass_name: str) -> None:
            self[f"{name} {pass_name}"].append(torch.get_float32_matmul_precision())

        return Record.apply(x, note)

    def around(self, module: nn.Module, name: str) -> None:
        module.register_forward_pre_hook(lambda _, args: (self.record(args[0], name), *args[1:]))
        module.register_forward_hook(lambda _, args, out: self.record(out, name))

    def check(self, **expected: str) -> None:
        """Each place had one position throughout, in both passes."""
        passes = ("forward", "backward")
        by_pass = {f"{name} {way}": {at} for name, at in expected.items() for way in passes}
        assert {name: set(precisions) for name, precisions in self.items()} == by_pass


def gpt(recipe: str, precisions: Precisions) -> GPT:
    plan = plan_for(CONFIG, recipe, AMPERE)
    model = GPT(CONFIG, build_backend(plan))
    for path in ("blocks.0.mlp.up", "blocks.1.attention.output", "lm_head"):
        precisions.around(model.get_submodule(path), "ours")
    return model


TOKENS = torch.arange(16).view(2, 8)


@pytest.mark.parametrize("ambient", ["highest", "high"])
@pytest.mark.parametrize(("recipe", "expected"), [("tf32", "high"), ("fp32", "highest")])
@pytest.mark.parametrize("first", ["ours", "other"])
def test_a_model_has_its_own_precision_and_other_layers_keep_theirs(
    recipe, expected, ambient, first
):
    torch.set_float32_matmul_precision(ambient)
    precisions = Precisions()
    model, layers = gpt(recipe, precisions), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    precisions.around(layers, "other")
    losses = [lambda: model(TOKENS, TOKENS), lambda: layers(torch.ones(3, 16)).sum()]
    for _ in range(2):
        total = sum(make() for make in (losses if first == "ours" else losses[::-1]))
        assert torch.get_float32_matmul_precision() == ambient
        total.backward()
        assert torch.get_float32_matmul_precision() == ambient
    precisions.check(ours=expected, other=ambient)


@pytest.mark.parametrize("again", [False, True])
def test_layers_around_a_converted_model_keep_their_precision_also_where_it_is_run_again(again):
    precisions = Precisions()
    inner = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    before, after = nn.Linear(16, 16), nn.Linear(16, 16)
    for module in (inner[0], inner[2]):
        precisions.around(module, "ours")
    for module in (before, after):
        precisions.around(module, "other")
    convert(inner, resolve("tf32", AMPERE))
    x = before(torch.ones(3, 16))
    y = checkpoint(inner, x, use_reentrant=False) if again else inner(x)
    after(y).sum().backward()
    precisions.check(ours="high", other="highest")
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("recompute", ["selective", "block"])
def test_what_the_backward_pass_runs_again_has_the_models_precision(recompute):
    precisions = Precisions()
    model = gpt("tf32", precisions)
    model.recompute = recompute
    model(TOKENS, TOKENS).backward()
    precisions.check(ours="high")
    assert len(precisions["ours forward"]) > 6  # some were run again


def test_passes_that_end_early_or_fail_give_the_precision_back():
    precisions = Precisions()
    model = gpt("tf32", precisions)
    torch.autograd.grad(
        model(TOKENS, TOKENS), [model.get_parameter("lm_head.weight")]
    )  # ends within the model
    assert torch.get_float32_matmul_precision() == "highest"
    with torch.no_grad():
        model(TOKENS)
    assert set(precisions["ours forward"]) == {"high"}
    assert torch.get_float32_matmul_precision() == "highest"

    def fail(*_: object) -> None:
        raise RuntimeError("on purpose")

    model.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        model(TOKENS, TOKENS)
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("recipe", ["tf32", "fp32", "delayed"])
def test_what_a_user_set_by_torchs_newer_switch_stays(recipe):
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with pytest.raises(RuntimeError):  # the reason why this is a case of its own
            torch.get_float32_matmul_precision()
        precisions = []
        hardware = AMPERE if recipe == "tf32" else Hardware("cpu")
        model = GPT(CONFIG, build_backend(plan_for(CONFIG, recipe, hardware)))
        model.lm_head.register_forward_hook(lambda *_: precisions.append(matmul.fp32_precision))
        model(TOKENS, TOKENS).backward()
        assert precisions == ["tf32" if recipe == "tf32" else "ieee"]
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize("ambient", ["highest", "high", "medium"])
def test_exact_products_give_back_what_a_user_set(ambient):
    """Exact products must not round to bfloat16, as oneDNN does for "medium"."""
    mkldnn = cast(Any, torch.backends.mkldnn).matmul
    torch.set_float32_matmul_precision(ambient)
    before = mkldnn.fp32_precision
    with exact_matmul():
        assert mkldnn.fp32_precision in ("ieee", "none")
    assert mkldnn.fp32_precision == before
    assert torch.get_float32_matmul_precision() == ambient
