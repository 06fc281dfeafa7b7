"""The memory of a run: settings of allocators, and the check that its phases fit into the free
memory of this machine."""

import ctypes
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fp8stack.common.errors import UserError
from fp8stack.model.config import GPTConfig
from fp8stack.model.gpt import Recompute
from fp8stack.planning.memory import Estimate, Setting, estimate
from fp8stack.planning.run_config import RunConfig
from fp8stack.planning.savings import largest_batch
from fp8stack.precision import Hardware, Plan, system_memory

UNCERTAIN = 0.1  # how much an estimate may exceed the measured memory, as a fraction
COMPILED = 0.5  # the same for compiled code, which chooses what it saves for backward

# glibc's malloc.h. The largest threshold that glibc takes for mapping a block is 32 MiB.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MALLOPT = {_M_TRIM_THRESHOLD: 2**31 - 1, _M_MMAP_THRESHOLD: 32 * 2**20}
_TORCH_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the first since torch 2.10


def keep_freed_memory() -> bool:
    """Stop glibc from handing freed memory back to the system, which faults it in again page by
    page in the next step. Returns whether it was done: on Linux, unless the environment sets
    MALLOC_* itself.
    """
    if sys.platform != "linux" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in every C library
    return mallopt is not None and all(mallopt(key, value) for key, value in _MALLOPT.items())


def expand_segments(device: str) -> bool:
    """Set torch's CUDA allocator to grow its segments in place, so that blocks of changing sizes
    leave no gaps between segments. Returns whether it was done: not for `device` "cpu", nor after
    CUDA is initialized, nor where the environment sets the allocator itself.
    """
    is_initialized: Any = torch.cuda.is_initialized  # it has no types
    if device == "cpu" or torch.version.cuda is None or is_initialized():
        return False
    if any(name in os.environ for name in _TORCH_SETTINGS):
        return False
    os.environ[_TORCH_SETTINGS[0]] = "expandable_segments:True"
    return True


@dataclass(frozen=True)
class Footprint:
    """Estimates the memory of a run on `ranks` processes."""

    config: RunConfig
    model: GPTConfig
    context: int
    ranks: int

    def estimates(self, plans: Sequence[Plan], kind: Recompute, sequences: int) -> list[Estimate]:
        """Estimates of the phases that run `plans` with this kind of activation checkpointing and
        so many sequences per rank and micro-batch. Only the running phase's model is in memory."""
        return [
            estimate(
                Setting(
                    config=self.model,
                    plan=plan,
                    sequences=sequences,
                    context=self.context,
                    micro_batches=self.config.accumulate,
                    optimizer=self.config.optimizer,
                    momentum=self.config.momentum,
                    checkpointing=kind,
                    ranks=self.ranks,
                    parallel=self.config.parallel,
                )
            )
            for plan in plans
        ]

    def accumulating(self, micro_batches: int) -> "Footprint":
        """The footprint with so many micro-batches."""
        config = self.config.model_copy(update={"accumulate": micro_batches})
        return replace(self, config=config)

    def peak(self, plans: Sequence[Plan], kind: Recompute, sequences: int) -> int:
        """The bytes of the worst phase. For the arguments see `estimates`."""
        return max(phase.peak for phase in self.estimates(plans, kind, sequences))

    def largest(self, plans: Sequence[Plan], kind: Recompute, memory: int) -> int:
        """The largest micro-batch of a rank that fits into `memory` bytes; 0 if none does."""
        return largest_batch(lambda count: self.peak(plans, kind, count), memory)

    def fewest(self, plans: Sequence[Plan], kind: Recompute, memory: int) -> int:
        """The fewest equal micro-batches of the run's batch that fit into `memory` bytes; 0 if none
        do."""
        share = self.config.batch // self.ranks
        if self.accumulating(1).peak(plans, kind, share) <= memory:
            return 1
        # Gradients stay from one micro-batch to the next.
        largest = self.accumulating(2).largest(plans, kind, memory)
        counts = (n for n in range(2, share + 1) if share % n == 0 and share // n <= largest)
        return next(counts, 0)


def require_memory(
    footprint: Footprint,
    plans: Sequence[Plan],
    hardware: Hardware,
    *,
    compiled: bool = False,
) -> None:
    """Raise a UserError that names the largest batch that fits, if a run clearly does not fit into
    the free memory."""
    config, ranks = footprint.config, footprint.ranks
    free = system_memory.available_memory(hardware.device) if config.check_memory else None
    if free is None:
        return
    if hardware.device == "cpu" and ranks > 1:  # one memory for all
        free //= int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    kind, share = config.activation_checkpointing, config.batch // ranks
    needed = footprint.peak(plans, kind, share // config.accumulate)
    if needed * (1 - (COMPILED if compiled else UNCERTAIN)) <= free:
        return
    available = f"{_gib(free)} are left{' for each rank' if ranks > 1 else ''}"
    fits = footprint.largest(plans, kind, free)
    if not fits:
        least = max(footprint.estimates(plans, kind, 1), key=lambda phase: phase.floor)
        lower = "" if kind == "block" else ", --activation-checkpointing block"
        raise UserError(
            f"Model {config.model} needs about {_gib(footprint.peak(plans, kind, 1))} for one "
            f"sequence of {footprint.context} tokens, {_gib(least.floor)} of it for the weights, "
            f"gradients and optimizer of {footprint.model.parameters():,} parameters; {available}. "
            f"Choose a smaller model or --context{lower}. (--set check_memory=false skips this "
            "check.)"
        )
    count = footprint.fewest(plans, kind, free)
    ways = [f"--batch {config.batch} --accumulate {count}"] if count else []
    if alone := footprint.accumulating(1).largest(plans, kind, free):
        ways.append(f"--batch {alone * ranks}{' --accumulate 1' * (config.accumulate > 1)}")
    raise UserError(
        f"Model {config.model} needs about {_gib(needed)} for {share // config.accumulate} "
        f"sequences of {footprint.context} tokens at a time; {available}, enough for {fits}. Give "
        f"{', or '.join(ways)}. (--set check_memory=false skips this check.)"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
