"""Triton's kernels without a GPU: interpreted by numpy in a second process, and compiled to PTX."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def interpreted(module: str, function: str) -> Any:
    """What a function without arguments of a test module gives, as JSON data, where Triton
    interprets its kernels: where `TRITON_INTERPRET` was set before Triton came in."""
    code = f"import json; from {module} import {function} as work; print(json.dumps(work()))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ptx_of(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    capability: int,
    **options: Any,
) -> str:
    """What Triton compiles a kernel to; pointers and sizes are divisible by
    16, but for a `scale`, which is one of many."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = dict(types) | dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
        for name in types
        if name != "scale"
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    made = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    text: str = made.asm["ptx"]
    return text
