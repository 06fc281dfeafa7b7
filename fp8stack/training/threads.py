"""The number of torch's CPU threads."""

from __future__ import annotations

import os

from fp8stack.common.errors import UserError


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def use_threads(count: int | None) -> None:
    """Set the number of torch's threads in this process; None keeps torch's choice. Raises a
    UserError for fewer than 1, or more than the number of cores."""
    if count is None:
        return
    limit = cores()
    if not 1 <= count <= limit:
        raise UserError(
            f"threads {count}: this machine has {limit} cores. Give --threads 1 to {limit}."
        )
    import torch

    torch.set_num_threads(count)
