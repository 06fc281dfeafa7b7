"""On a device other than a CPU, a pass asks the device for no number, and none is copied to it: the
host runs ahead.

Tensors on the meta device have no values, so `float(t)`, `bool(t)` and `t.item()` raise there, and
the code takes the paths of a GPU. What a GPU's kernels do is in tests/gpu/test_gpu_sync.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8stack.layers import build_backend
from fp8stack.layers.kernels.attention import document_blocks
from fp8stack.model.config import GPTConfig, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.precision import Hardware

# Sizes that every FP8 GEMM takes.
CONFIG = GPTConfig(vocabulary=256, context=128, layers=1, width=128, heads=2)
H200 = Hardware("cuda", (9, 0), cuda_version=(13, 0))
B200 = Hardware("cuda", (10, 0), cuda_version=(13, 0))
ARMS = [("reference", "bf16", H200), ("emulate", "mxfp8", H200), ("torch", "mxfp8", B200)]
ARMS += [("torch", "nvfp4", B200)]
ARMS += [
    (backend, recipe, H200)
    for backend in ("torch", "emulate")
    for recipe in ("delayed", "current", "block")
]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls, in backward passes too, that put numbers of the host into a tensor of the
    device."""
    calls: list[str] = []

    def watch(owner: Any, name: str, from_host: bool) -> None:
        real = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            devices = [argument.device.type for argument in args if isinstance(argument, Tensor)]
            copied = "cpu" in devices or (from_host and not devices[1:])
            if result.device.type == "meta" and copied:
                calls.append(name)
            return result

        monkeypatch.setattr(owner, name, watched)

    watch(Tensor, "new_tensor", True)
    watch(torch, "tensor", True)
    for name in ("to", "cuda", "copy_"):
        watch(Tensor, name, False)
    real = torch.as_tensor

    def as_tensor(data: Any, **kwargs: Any) -> Tensor:
        result = real(data, **kwargs)
        if result.device.type == "meta" and getattr(data, "device", None) != result.device:
            calls.append("as_tensor")
        return result

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    return calls


def test_what_would_wait_is_seen(copies: list[str]) -> None:
    on_device = torch.ones((), device="meta")
    on_device.new_tensor(3.0)
    torch.tensor(3.0, device="meta")
    torch.as_tensor(3.0, device="meta")
    torch.ones(()).to("meta")
    on_device.copy_(torch.ones(()))
    torch.as_tensor(on_device.to(torch.bfloat16) * 3.0)
    assert copies == ["new_tensor", "tensor", "as_tensor", "to", "copy_"]
    with pytest.raises(RuntimeError, match="meta"):
        on_device.item()


@pytest.mark.parametrize(("backend", "recipe", "hardware"), ARMS)
def test_a_pass_waits_for_nothing(
    backend: str, recipe: str, hardware: Hardware, copies: list[str]
) -> None:
    plan = plan_for(CONFIG, recipe, hardware, backend)
    assert plan.backend == backend
    model = GPT(CONFIG, build_backend(plan)).to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.zeros(2, 128, dtype=torch.int64, device="meta")
    for _ in range(2):  # tables and buffers are made in the first
        copies.clear()
        model(tokens, tokens, tokens).backward()
        optimizer.step()
    assert copies == []


def test_documents_blocks_of_scores_are_found_without_waiting(copies: list[str]) -> None:
    documents = torch.zeros(2, 320, dtype=torch.int64, device="meta")
    assert document_blocks(documents).kv_indices.device.type == "meta"
    assert copies == []
