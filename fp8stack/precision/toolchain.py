"""The compilers of Triton's kernels, looked up without torch."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec


def find_triton_problem() -> str:
    """The reason why Triton does not run on this machine, and the remedy; "" if it runs. Triton 3.6
    compiles the launcher of a kernel by a C compiler."""
    if find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    if not os.environ.get("CC") and not (shutil.which("gcc") or shutil.which("clang")):
        return "triton found no C compiler: install gcc, or name one by the environment's CC"
    return ""
