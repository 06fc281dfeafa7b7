"""The GPU that is tested; importing this skips the tests of a module where there is none."""

from __future__ import annotations

import os

import pytest
import torch

from bench.gpu.cases import Case, broken, run_case, this_machine

if not torch.cuda.is_available():
    pytest.skip("no CUDA GPU is usable by this torch", allow_module_level=True)

# cuBLAS reads it when it is first used: GEMMs that repeat to the bit, as `pretrain` asks for.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

CONTEXT = this_machine()


def require(case: Case) -> None:
    """The case holds; it is skipped where it does not apply to this machine."""
    row = run_case(case)
    if "skipped" in row:
        pytest.skip(row["skipped"])
    assert not broken(row), row
