"""The setting `deterministic`: no step calls an operation that torch then refuses on a GPU."""

import re
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from fp8stack.training.setup import build
from tests.support.operators import Operators
from tests.support.small_loop import SmallLoop


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    settings = cast(Any, torch.utils.deterministic)
    fill = settings.fill_uninitialized_memory
    build._be_deterministic()
    yield
    settings.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_attention_is_to_repeat_too():
    """Only asked for in earnest do torch's kernels of attention repeat on a GPU, and is cuDNN's,
    which does not, left out (`check_cudnn_deterministic` in torch's sdp_utils.cpp)."""
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


def refused_on_gpus() -> set[str]:
    """The operations that raise an error in deterministic mode, by torch's documentation."""
    text = torch.use_deterministic_algorithms.__doc__ or ""
    _, _, refused = text.partition("operations will throw a")
    listed, _, _ = refused.partition("In addition, several operations fill")
    return {name.lower() for name in re.findall(r":\w+:`torch\.(?:\w+\.)*(\w+)`", listed)}


@pytest.mark.parametrize(
    ("recipe", "model"),
    [("delayed", "gpt-nano"), ("mxfp8", "gpt-nano"), ("delayed", "gpt-nano-moe")],
)
@pytest.mark.full
def test_no_step_calls_what_is_refused(recipe, model, tmp_path):
    refused = refused_on_gpus()
    assert {"histc", "median", "bincount"} <= refused  # cumsum repeats from torch 2.15 on
    options = {"model": model, "telemetry_every": 1, "accumulate": 2, "clip_mode": "adaptive"}
    small = SmallLoop(tmp_path / "r", recipe, **options)
    with Operators() as operators:
        small.advance(3)
    names = {name.split(".")[1].rstrip("_") for name in operators.names}
    assert {"embedding_dense_backward", "_foreach_norm"} & names
    assert not {name for name in names if name.removesuffix("_backward") in refused}
    assert not {"scatter_add", "index_add"} & names
