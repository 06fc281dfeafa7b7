"""Master weights: float32 whatever the recipe computes in, so that nothing small is lost. And the
path of one linear, which is short enough to be read."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8stack.layers.linear import Size, plain_linear
from fp8stack.model.convert import convert
from fp8stack.planning.run_config import RunConfig
from fp8stack.training.optim.optimizer import build_optimizer
from tests.support.backend_models import RECIPES, gpt, linear, tokens
from tests.support.grouped_models import IN, Grouped


@pytest.mark.capability("A4")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_thousand_tiny_updates_are_not_lost(dtype: torch.dtype) -> None:
    """Each is an eighth of what the working copy can tell apart; in it alone, none would count."""
    linear = plain_linear(Size(4, 4, False), dtype)
    update = float(torch.finfo(dtype).eps) / 8
    with torch.no_grad():
        linear.weight.fill_(1.0)
    alone = linear.weight.detach().to(dtype)
    for _ in range(1000):
        with torch.no_grad():
            linear.weight += update
            alone += update
    assert (alone == 1).all()
    expected = 1 + 1000 * update
    torch.testing.assert_close(
        linear.weight.detach(), torch.full((4, 4), expected), rtol=1e-5, atol=0
    )
    y = linear(torch.eye(4))
    assert y.dtype == dtype
    assert (y == torch.tensor(expected).to(dtype)).all()


@pytest.mark.capability("A4")
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp16", *RECIPES])
def test_masters_gradients_and_moments_are_float32(recipe: str) -> None:
    model = gpt(recipe, "auto", {"layers": 1})
    optimizer = build_optimizer(model, RunConfig())
    model(tokens(), tokens(2)).backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32, name
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32, name
        moments = optimizer.state[parameter]
        assert {value.dtype for value in moments.values()} == {torch.float32}, name


@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
@pytest.mark.parametrize("shape", [(8, 31), (8, 16), (0,), ()], ids=str)
def test_an_input_of_another_width_is_refused_by_the_shapes_as_torch_does(recipe, shape) -> None:
    converted = convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), recipe).eval()
    with pytest.raises(RuntimeError) as expected:
        torch.nn.Linear(32, 32)(torch.ones(shape))
    for x in (torch.ones(shape), torch.ones(shape, dtype=torch.bfloat16)):
        with pytest.raises(RuntimeError) as refused:
            converted(x)
        assert str(refused.value) == str(expected.value)


PACKAGE = Path(sys.modules["fp8stack"].__file__ or "").parent


@contextmanager
def calls() -> Iterator[list[tuple[str, str]]]:
    """The file and the qualified name of each function of the package that is called, in order."""
    called: list[tuple[str, str]] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            called.append((path.name, frame.f_code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield called
    finally:
        sys.setprofile(before)


def second_pass(model: Any, layer: Any, *inputs: Tensor) -> list[list[tuple[str, str]]]:
    """The calls of the second forward pass of a layer of a model and of the backward pass."""
    run, recorded = layer.forward, []

    def forward(*inputs: Tensor) -> Tensor:
        with calls() as called:
            y = run(*inputs)
        recorded.append(called)
        return y

    layer.forward = forward
    for _ in range(2):
        loss = model(*inputs).sum()
        with calls() as called, torch.autograd.set_multithreading_enabled(False):
            loss.backward()
    return [recorded[1], called]


def calls_of_linear(backend: str) -> list[list[tuple[str, str]]]:
    layer, _ = linear("delayed", 64, 48, backend=backend)
    return second_pass(layer, layer, torch.randn(32, 64, requires_grad=True))


@pytest.mark.parametrize("backend", ["emulate", "torch"])
def test_the_forward_pass_of_a_linear_is_at_most_25_calls_in_5_files(backend) -> None:
    forward, _ = calls_of_linear(backend)
    assert len(forward) <= 25, forward
    assert len({file for file, _ in forward}) <= 5, forward


@pytest.mark.parametrize("groups", [4, 64])
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8", "rowwise"])
def test_the_forward_pass_of_groups_is_at_most_40_calls_and_2_for_each_group(recipe, groups):
    offs = torch.arange(8, 8 * groups + 1, 8, dtype=torch.int32)
    x = torch.randn(8 * groups, IN, requires_grad=True)
    model = Grouped(recipe, groups=groups)
    forward, _ = second_pass(model, model.up, x, offs)
    assert len(forward) <= 40 + 2 * groups, forward


def missing_calls(heading: str, elsewhere: set[str], called: list[tuple[str, str]]) -> list[str]:
    """The calls that the numbered list below a heading of the page names and that were not made, in
    their order; without those that are made `elsewhere`."""
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    steps = re.findall(r"^(?:\d\. | {3}).*$", section, re.MULTILINE)
    names = re.findall(r"`([\w.]+)`", "\n".join(steps))
    expected = [name for name in names if name not in elsewhere]
    assert len(expected) > 7
    for file, name in called:
        method = "matmul" if name in MATMULS else name.rpartition(".")[2]
        if expected and expected[0] in (name, method, f"{file.removesuffix('.py')}.{name}"):
            expected.pop(0)
    return expected


MATMULS = ("emulated_matmul", "TorchBackend.matmul")


@pytest.mark.parametrize("backend", ["emulate", "torch"])
def test_the_architecture_page_names_the_calls_of_a_linear_in_their_order(backend) -> None:
    elsewhere = {"emulate", "torch", "fused_casts.cast_product"}  # the last one on a GPU
    in_torch = {"scaled_copies", "cast_scaled"}
    elsewhere |= {"Rounding.round", "fused.round"} if backend == "torch" else in_torch
    forward, backward = calls_of_linear(backend)
    assert missing_calls("One linear", elsewhere, [*forward, *backward]) == []
