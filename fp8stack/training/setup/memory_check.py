"""Check before a run that its phases fit into the free memory of this machine."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fp8stack.config import RunConfig
from fp8stack.errors import UserError
from fp8stack.estimate.parts import Estimate, Setting, estimate
from fp8stack.estimate.savings import largest_batch
from fp8stack.model.config import GPTConfig
from fp8stack.model.gpt import Recompute
from fp8stack.model.loss import chunk_rows
from fp8stack.precision import Hardware, Plan

UNCERTAIN = 0.1  # how much an estimate may exceed the measured memory, as a fraction
COMPILED = 0.5  # the same for compiled code, which chooses what it saves for backward


@dataclass(frozen=True)
class Footprint:
    """Estimates the memory of a run on `ranks` processes."""

    config: RunConfig
    model: GPTConfig
    context: int
    ranks: int

    def estimates(self, plans: Sequence[Plan], kind: Recompute, sequences: int) -> list[Estimate]:
        """Estimates of the phases that run `plans`, in order, with this kind of activation
        checkpointing and so many sequences per rank and micro-batch. FP8 weights and amax histories
        of earlier plans stay in memory."""
        made: list[Estimate] = []
        lasting: dict[int, Estimate] = {}  # of the plans met so far
        for plan in plans:
            setting = Setting(
                config=self.model,
                plan=plan,
                sequences=sequences,
                context=self.context,
                micro_batches=self.config.accumulate,
                optimizer=self.config.optimizer,
                momentum=self.config.momentum,
                checkpointing=kind,
                save_fp8=self.config.save_fp8,
                ranks=self.ranks,
                parallel=self.config.parallel,
            )
            own = lasting[id(plan)] = estimate(setting)
            weights = sum(one.fp8_weights for one in lasting.values())
            buffers = sum(one.buffers for one in lasting.values())
            made.append(replace(own, fp8_weights=weights, buffers=buffers))
        return made

    def peak(self, plans: Sequence[Plan], kind: Recompute, sequences: int) -> int:
        """The bytes of the worst phase. For the arguments see `estimates`."""
        return max(one.peak for one in self.estimates(plans, kind, sequences))

    def largest(self, plans: Sequence[Plan], kind: Recompute, memory: int) -> int:
        """The largest micro-batch of a rank that fits into `memory` bytes; 0 if none does."""
        turn = chunk_rows(self.model.vocabulary) // self.context
        return largest_batch(lambda count: self.peak(plans, kind, count), memory, turn)


def require_memory(
    of: Footprint,
    plans: Sequence[Plan],
    hardware: Hardware,
    left: int | None,
    *,
    compiled: bool = False,
) -> None:
    """Raise a UserError that names the largest batch that fits, if a run clearly does not fit into
    the free memory. `left`, in bytes, is for this rank, on a CPU for all ranks on this machine."""
    if left is None or not of.config.check_memory:
        return
    if hardware.device == "cpu":  # one memory for all
        left //= int(os.environ.get("LOCAL_WORLD_SIZE", of.ranks)) if of.ranks > 1 else 1
    config, kind = of.config, of.config.activation_checkpointing
    uncertain = COMPILED if compiled else UNCERTAIN
    share = config.batch // of.ranks
    needed = of.peak(plans, kind, share // config.accumulate)
    if needed * (1 - uncertain) <= left:
        return
    told = f"{_gib(left)} are left{' for each rank' if of.ranks > 1 else ''}"
    fits = of.largest(plans, kind, left)
    if not fits:
        least = max(of.estimates(plans, kind, 1), key=lambda one: one.floor)
        lower = "" if kind == "block" else ", --activation-checkpointing block"
        raise UserError(
            f"Model {config.model} needs about {_gib(of.peak(plans, kind, 1))} for one sequence of "
            f"{of.context} tokens, {_gib(least.floor)} of it for the weights, gradients and "
            f"optimizer of {of.model.parameters():,} parameters; {told}. Choose a smaller model or "
            f"--context{lower}. (--set check_memory=false skips this check.)"
        )
    parts = next(n for n in range(1, share + 1) if share % n == 0 and share // n <= fits)
    raise UserError(
        f"Model {config.model} needs about {_gib(needed)} for {share // config.accumulate} "
        f"sequences of {of.context} tokens at a time; {told}, enough for {fits}. Give --batch "
        f"{config.batch} --accumulate {parts}, or --batch {fits * of.ranks}. (--set "
        "check_memory=false skips this check.)"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
