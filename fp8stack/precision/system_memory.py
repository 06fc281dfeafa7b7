"""The memory of the system, and what of it, or of a GPU, this process can still allocate."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from fp8stack.common.errors import MissingRequirement


def system_memory_gib() -> float:
    """The memory of the system; 0 where it does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError, AttributeError):
        return 0.0


def available_memory(device: str, root: Path = Path("/")) -> int | None:
    """The bytes that this process can still allocate: on its GPU, or of the system's memory and
    swap within the limits of its control groups. None where the system does not report them.

    Args:
        device: see `Hardware.device`.
        root: the folder that holds `proc` and `sys`.
    """
    if device != "cpu":
        import torch

        free: int = torch.get_device_module(device).mem_get_info()[0]
        return free
    try:
        text = (root / "proc/meminfo").read_text(encoding="utf-8")
        sizes = {words[0]: int(words[1]) * 1024 for words in map(str.split, text.splitlines())}
        available, swap = sizes["MemAvailable:"], sizes.get("SwapFree:", 0)
    except (OSError, KeyError, ValueError, IndexError):
        return None
    return min([available, *_available_in_groups(root)]) + swap


def require_free(size: int, consumer: str) -> None:
    """Require that the system has `size` bytes of memory available.

    Raises:
        MissingRequirement: it has less; the message names the `consumer` that needs them.
    """
    available = available_memory("cpu")
    if available is not None and size > available:
        raise MissingRequirement(
            f"{consumer} needs {size / 2**30:,.1f} GiB of memory, and {available / 2**30:,.1f} GiB "
            "are left. Use a machine with more."
        )


def _available_in_groups(root: Path) -> Iterator[int]:
    """The bytes that each control group (version 2) with a limit leaves this process; pages of
    files that the kernel can drop do not count as used."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        inner = Path(name.lstrip("/"))
        for group in () if controllers else (inner, *inner.parents):
            folder = root / "sys/fs/cgroup" / group
            try:
                most = int((folder / "memory.max").read_text())
                used = int((folder / "memory.current").read_text())
                stat = (folder / "memory.stat").read_text().split()
            except (OSError, ValueError):  # no such group in a container, or no limit ("max")
                continue
            pages = dict(zip(stat[::2], stat[1::2], strict=False))
            yield max(0, most - used + int(pages.get("inactive_file", 0)))
