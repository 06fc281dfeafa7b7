"""What a result was measured on, and how arms are timed side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib import metadata

import torch

import fp8stack
from fp8stack.precision import probe


def describe(*packages: str) -> dict[str, object]:
    """The machine, the thread count, and the versions of fp8stack, torch and `packages`."""
    return {
        "machine": str(probe()),
        "threads": torch.get_num_threads(),
        "fp8stack": fp8stack.__version__,
        "torch": torch.__version__,
        **{package: metadata.version(package) for package in packages},
    }


def interleaved(arms: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """The seconds of each arm in each round, all arms once per round, after two warm-up rounds.

    Noise of a shared machine hits all arms alike; take ratios within one call only.
    """
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds + 2):
        for name, arm in arms.items():
            start = time.perf_counter()
            arm()
            seconds[name].append(time.perf_counter() - start)
    return {name: values[2:] for name, values in seconds.items()}
