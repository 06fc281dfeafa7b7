"""Triton's kernels without a GPU: interpreted by numpy in a second process, and compiled to PTX."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from fp8stack.layers.kernels import fused_casts, nvfp4

_WORK = """
import json, sys, torch
from functools import cache
from multiprocessing import get_context
from pkgutil import resolve_name
from types import SimpleNamespace
from triton.runtime import interpreter

patch = interpreter._patch_lang  # at every call of a function, in half of the time
interpreter._patch_lang = cache(lambda fn: SimpleNamespace(restore=lambda: None, scope=patch(fn)))

def work(name):
    return resolve_name(name)()

for name in sys.argv[1:]:  # imported once for all
    resolve_name(name)
with get_context("fork").Pool(1, maxtasksperchild=1) as pool:  # none changes a module for another
    print(json.dumps(dict(zip(sys.argv[1:], pool.map(work, sys.argv[1:], 1)))))
"""


@contextmanager
def launched_on_a_cpu() -> Iterator[None]:
    """Launch the kernel for casts of matrices on a CPU too, where Triton interprets it."""
    with (
        patch.object(fused_casts, "has_kernel", lambda device: True),
        patch.object(nvfp4, "has_kernel", lambda device: True),
        patch.object(torch.cuda, "device", lambda device: nullcontext()),
    ):
        yield


def interpreted(*functions: str) -> Any:
    """The results of functions without arguments, by `module:name`, as JSON data. They run in a
    process with `TRITON_INTERPRET` set before Triton is imported, where it interprets kernels."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _WORK, *functions],
        cwd=Path(__file__).parents[2],
        # One thread: a fork after OpenMP started threads would wait for them for ever.
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def launched_ptx(kernel: Any, *arguments: Any, capability: int, **options: Any) -> str:
    """The PTX that a launch with these arguments compiles, where there is no GPU; torch's dtypes
    stand for tensors. Unlike `ptx_of`, Triton finds the arguments' types by itself."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    stand_in = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
    )
    kernel.device_caches.clear()
    try:
        with patch.object(driver, "_active", stand_in):
            compiled = kernel.warmup(*arguments, grid=(1,), **options)
    finally:
        kernel.device_caches.clear()
    text: str = compiled.asm["ptx"]
    return text


def ptx_of(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    capability: int,
    **options: Any,
) -> str:
    """The PTX that Triton compiles a kernel to; pointers and sizes are divisible by 16, except for
    `scale`, which points into an array."""
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
    compiled = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    text: str = compiled.asm["ptx"]
    return text


def blocks_per_sm(ptx: str, capability: int, folder: Path, warps: int) -> int:
    """The blocks of `warps` warps that the registers of an SM serve, by Triton's own ptxas: 65,536,
    which a warp takes in units of 256 (CUDA's occupancy calculator, compute capabilities 8.9 to
    12.0). No register of the kernel may be spilled to local memory."""
    from triton.backends.nvidia.compiler import get_ptxas

    (architecture,) = re.findall(r"\.target (\w+)", ptx)
    (file := folder / "kernel.ptx").write_text(ptx)
    command = [get_ptxas(capability).path, "-v", f"--gpu-name={architecture}", str(file)]
    done = subprocess.run([*command, "-o", os.devnull], capture_output=True, text=True, check=True)
    assert set(re.findall(r"(\d+) bytes spill stores", done.stderr)) == {"0"}
    used = max(map(int, re.findall(r"Used (\d+) registers", done.stderr)))
    return 65536 // (-(-used * 32 // 256) * 256 * warps)
