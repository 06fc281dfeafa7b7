"""The setting `deterministic`: no step calls an operation that torch then refuses on a GPU."""

import re
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8stack.training.setup import build
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


class Calls(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func).split(".")[1].rstrip("_"))
        return func(*args, **(kwargs or {}))


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
    with Calls() as calls:
        small.advance(3)
    assert {"embedding_dense_backward", "_foreach_norm"} & calls.names
    assert not {name for name in calls.names if name.removesuffix("_backward") in refused}
    assert not {"scatter_add", "index_add"} & calls.names
