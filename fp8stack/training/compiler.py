"""Whether torch.compile has what it needs here. It must not know what is compiled."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

from fp8stack.errors import UserError
from fp8stack.precision import Plan


def require_compiler(plan: Plan) -> None:
    """See that a model with this plan can be compiled, before anything is built or written.

    Raises:
        UserError: the backend cannot be compiled, or a compiler or its headers are missing.
    """
    if plan.backend == "te":
        raise UserError(
            "--compile: Transformer Engine's layers cannot be compiled into one graph. Leave "
            "--compile out, or choose --backend torch."
        )
    if plan.device == "cuda":
        _require_triton()
    else:
        _require_cpp_compiler()
    # Both build Python extensions. Elsewhere (macOS) the path that Python gives may not exist.
    headers = Path(sysconfig.get_path("include"))
    if sys.platform == "linux" and not (headers / "Python.h").exists():
        raise UserError(
            f"--compile needs Python's headers, and {headers} has no Python.h. Install them "
            "(python3-dev on Debian and Ubuntu), or leave --compile out."
        )


def _require_cpp_compiler() -> None:
    # Private, and the only way to ask for the compiler that torch.compile will call (torch 2.13).
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except RuntimeError as error:
        raise UserError(
            "--compile needs a C++ compiler and none was found. Install g++, name one by the "
            "environment's CXX, or leave --compile out."
        ) from error


def _require_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise UserError(
            "--compile needs triton on a GPU and it is not installed: pip install triton, or leave "
            "--compile out."
        )
    if not os.environ.get("CC") and not (shutil.which("gcc") or shutil.which("clang")):
        raise UserError(
            "--compile needs a C compiler on a GPU, for triton, and none was found. Install gcc, "
            "name one by the environment's CC, or leave --compile out."
        )
