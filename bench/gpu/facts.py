"""The facts that stand with what a GPU measured or captured: date, command, commit and versions."""

from __future__ import annotations

import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import fp8stack
from fp8stack.analysis.benchmark.timing import version
from fp8stack.precision import Hardware

ROOT = Path(__file__).parents[2]
HEADLINE = "> "  # begins a line of a task's output that the visit's summary repeats


def facts(hardware: Hardware) -> dict[str, Any]:
    """The facts of this process and machine. Versions are None if missing or unknown."""
    cudnn: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    module = getattr(sys.modules["__main__"].__spec__, "name", "bench")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python -m {module.removesuffix('.__main__')} {shlex.join(sys.argv[1:])}",
        "commit": output("git", "rev-parse", "HEAD"),
        "changed_since_commit": bool(output("git", "status", "--porcelain")),
        "gpu": hardware.name,
        "capability": None if hardware.capability is None else "{}.{}".format(*hardware.capability),
        "memory_gib": hardware.memory_gib,
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "versions": {
            "fp8stack": fp8stack.__version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cublas": version("nvidia-cublas") or version("nvidia-cublas-cu12"),
            "cudnn": None if cudnn is None else str(cudnn),
            "triton": version("triton"),
            "torchao": version("torchao"),
            "transformer-engine": hardware.te_version,
            "python": platform.python_version(),
        },
    }


def output(*command: str) -> str | None:
    """The output of a command; None if the command does not exist, fails, or prints nothing."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def slug(name: str) -> str:
    """The folder name of a GPU: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unknown"
