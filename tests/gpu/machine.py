"""The GPU that is tested; importing this skips the tests of a module where there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from fp8stack.analysis.conform.checks import Context, Skipped, plan_of
from fp8stack.precision import load_recipe, probe

if not torch.cuda.is_available() or torch.version.hip is not None:
    pytest.skip("no CUDA GPU is usable by this torch", allow_module_level=True)

# cuBLAS reads it when it is first used: GEMMs that repeat to the bit, as `pretrain` asks for.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

CONTEXT = Context(probe())


def require_plan(backend: str, recipe: str) -> None:
    """Skip the test if another recipe or backend would run."""
    try:
        plan_of(load_recipe(recipe), CONTEXT, backend)
    except Skipped as reason:
        pytest.skip(str(reason))


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make torch raise in this context where the host would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
