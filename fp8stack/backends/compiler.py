"""Whether torch.compile has what it needs here."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

from fp8stack.errors import UserError
from fp8stack.precision import Plan

SELECTIVE_COMPILED = (
    "activation_checkpointing selective does not work with --compile: compiled code chooses by "
    "itself what it keeps. Use none, block for less memory, or leave --compile out."
)
TE_COMPILED = "--compile: Transformer Engine's layers cannot be compiled into one graph"


def require_compiler(plan: Plan, recompute: str = "none") -> None:
    """See that a model with this plan can be compiled, before anything is built or written.

    Args:
        plan: what is to run.
        recompute: its activation checkpointing, see `GPT`.

    Raises:
        UserError: the backend or the checkpointing cannot be compiled, or a compiler or its headers
            are missing.
    """
    require_compilable(plan, recompute)
    require_tools(plan.device, "--compile", "leave --compile out")


def require_compilable(plan: Plan, recompute: str = "none") -> None:
    """See that this backend and this activation checkpointing work in compiled code.

    Raises:
        UserError: one does not.
    """
    if plan.backend == "te":
        raise UserError(f"{TE_COMPILED}. Leave --compile out, or choose --backend torch.")
    if recompute == "selective":
        raise UserError(SELECTIVE_COMPILED)


def require_tools(device: str, what: str, instead: str) -> None:
    """See that torch.compile works for `device`, "cpu" or "cuda", before anything is built.

    Args:
        device: where the compiled code is to run.
        what: needs it, and
        instead: what to do without it, for the error.

    Raises:
        UserError: a compiler or its headers are missing.
    """
    if device == "cuda":
        _require_triton(what, instead)
    else:
        _require_cpp_compiler(what, instead)
    # Both build Python extensions. Elsewhere (macOS) the path that Python gives may not exist.
    headers = Path(sysconfig.get_path("include"))
    if sys.platform == "linux" and not (headers / "Python.h").exists():
        raise UserError(
            f"{what} needs Python's headers, and {headers} has no Python.h. Install them "
            f"(python3-dev on Debian and Ubuntu), or {instead}."
        )


def _require_cpp_compiler(what: str, instead: str) -> None:
    # Private, and the only way to ask for the compiler that torch.compile will call (torch 2.13).
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError as error:
        raise UserError(
            f"{what} needs a C++ compiler and none was found. Install g++, name one by the "
            f"environment's CXX, or {instead}."
        ) from error


def _require_triton(what: str, instead: str) -> None:
    if importlib.util.find_spec("triton") is None:
        raise UserError(
            f"{what} needs triton on a GPU and it is not installed: pip install triton, or "
            f"{instead}."
        )
    if not os.environ.get("CC") and not (shutil.which("gcc") or shutil.which("clang")):
        raise UserError(
            f"{what} needs a C compiler on a GPU, for triton, and none was found. Install gcc, "
            f"name one by the environment's CC, or {instead}."
        )
