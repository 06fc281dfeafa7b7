"""The stand-ins for Transformer Engine and for CUDA's scaled GEMMs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from fp8stack.analysis.conform import gemms, histories
from fp8stack.model.config import plan_for as real_plan_for
from fp8stack.precision import resolve
from fp8stack.training import run_plans
from fp8stack.training.setup import start
from tests.support.backend_models import H100, machine
from tests.support.cuda_gemms import cuda_gemms
from tests.support.te.te_stand_in import StandIn, installed


@pytest.fixture
def te() -> Iterator[StandIn]:
    """Transformer Engine can be imported, and remembers what it was asked for."""
    with installed() as stand_in:
        yield stand_in


@pytest.fixture(scope="module")
def te_throughout() -> Iterator[None]:
    """Transformer Engine can be imported in all tests of a module."""
    with installed():
        yield


@pytest.fixture
def cuda_gemm(monkeypatch):
    """The calls of torch's scaled GEMMs, see `cuda_gemms`."""
    return cuda_gemms(monkeypatch)


@pytest.fixture
def planned_for_gpus(monkeypatch):
    """The rows of `fp8stack conform` run what is planned for the GPU that a recipe needs."""

    def plan_of(recipe, context, backend):
        return replace(resolve(recipe, machine(recipe.name), backend), device="cpu")

    for rows in (gemms, histories):
        monkeypatch.setattr(rows, "plan_of", plan_of)


@pytest.fixture
def on_gpus(monkeypatch):
    """Runs are planned for a GPU that fits their recipe, and run on the CPU."""

    def plan_for(config, recipe, hardware, work=None, **more):
        name = recipe if isinstance(recipe, str) else recipe.name
        # `work` is left out: with it, layers this small stay out of FP8, for speed.
        plan = real_plan_for(config, recipe, machine(name), **more)
        return replace(plan, device="cpu")

    monkeypatch.setattr(run_plans, "plan_for", plan_for)
    monkeypatch.setattr(start, "probe", lambda device: H100)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 * 2**30, 80 * 2**30))
