"""`python -m bench.gpu_code` in a process of its own, because it changes torch permanently."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from fp8stack.common.errors import UserError


def told(model: str, recipe: str, capability: str, *options: str, interpret: bool = False) -> Any:
    """The output of `python -m bench.gpu_code`.

    Args:
        model: the name of a preset.
        recipe: the recipe.
        capability: the compute capability of the pretended GPU.
        options: more options of the command.
        interpret: whether Triton interprets kernels in it.

    Raises:
        UserError: the command failed.
    """
    command = [sys.executable, "-W", "ignore", "-m", "bench.gpu_code", model, recipe, capability]
    environment = {**os.environ, "TRITON_INTERPRET": "1"} if interpret else None
    done = subprocess.run([*command, *options], capture_output=True, text=True, env=environment)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "Error" in line]
        raise UserError(f"{model} in {recipe} on {capability}: {(errors or ['?'])[-1]}")
    return json.loads(done.stdout)
