"""On a device other than a CPU, a pass asks the device for no number, and none is copied to it: the
host runs ahead. What a GPU's kernels do is in tests/gpu/test_gpu_sync.py.
"""

from __future__ import annotations

import pytest
import torch

from fp8stack.layers import build_backend
from fp8stack.layers.kernels.attention import document_blocks
from fp8stack.model.config import GPTConfig, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.planning.run_config import GuardConfig
from fp8stack.precision import Hardware
from fp8stack.training.guard.monitor import Monitor
from tests.support.host_copies import watch_copies

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
    return watch_copies(monkeypatch)


@pytest.mark.parametrize(("backend", "recipe", "hardware"), ARMS)
@pytest.mark.full
def test_a_pass_waits_for_nothing(backend, recipe, hardware, copies):
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


@pytest.mark.parametrize("recipe", ["delayed", "nvfp4", "bf16"])
def test_a_step_that_the_guard_judges_waits_for_nothing(recipe: str, copies: list[str]) -> None:
    model = GPT(CONFIG, build_backend(plan_for(CONFIG, recipe, B200))).to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backend = model.backend
    monitor = Monitor(optimizer, GuardConfig(), backend.delayed, 2, draws=backend.draws)
    tokens = torch.zeros(2, 128, dtype=torch.int64, device="meta")
    for step in range(1, 3):
        copies.clear()
        monitor.begin()
        for _ in range(2):
            loss = model(tokens, tokens, tokens)
            loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        monitor.judge(step, loss.detach(), norm)
        optimizer.zero_grad()
    assert copies == []


def test_documents_blocks_of_scores_are_found_without_waiting(copies: list[str]) -> None:
    documents = torch.zeros(2, 320, dtype=torch.int64, device="meta")
    assert document_blocks(documents).kv_indices.device.type == "meta"
    assert copies == []
