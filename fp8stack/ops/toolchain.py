"""What kernels are compiled by, found without torch."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec


def find_triton_problem() -> str:
    """What Triton lacks to run here, and the remedy; "" if nothing. Triton 3.6 builds what launches
    a kernel by a C compiler."""
    if find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    if not os.environ.get("CC") and not (shutil.which("gcc") or shutil.which("clang")):
        return "triton found no C compiler: install gcc, or name one by the environment's CC"
    return ""
