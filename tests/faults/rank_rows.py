"""Rows of the matrix: ranks that are lost, and runs that go on with another number of ranks.

What must come out is known without asking the product: a run like it that was left alone.
"""

import math
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from fp8stack.training.step import Step
from tests.faults.case import Case, Outcome, judged
from tests.faults.processes import difference, last_step, rows, run_ranks, states, telling_states
from tests.faults.twins import SMALL, TEXT, Twin, said_by
from tests.support.quantizers import has_amax_of_tensors

KILLED, DONE, LOST, DISK_FULL, PREEMPTED = -signal.SIGKILL, 0, 4, 4, 75
TIMEOUT_S = 8  # after which a rank counts as lost, here
SECONDS_TO_END = 30.0
STEPS, SAVE_EVERY = 7, 3
BEGUN = 5  # the step in which faults happen


def rank_twin(folder: Path, ranks: int, parallel: str, flags: Sequence[str] = ()) -> Twin:
    """A run of several ranks in delayed scaling that is left alone."""
    flags = ["--parallel", parallel, "--set", f"rank_timeout={TIMEOUT_S}", *flags]
    flags += ["--set", "model_overrides.width=64"]
    return Twin(folder, "delayed", STEPS, SAVE_EVERY, flags, ranks)


def _at(twin: Twin, place: str, rank: int, share: float) -> str:
    """A place in step `BEGUN`, or in the save after it, of a rank: so far into it."""
    step = BEGUN if place == "all-reduce" else 2 * SAVE_EVERY
    numbers = [of.number for of in twin.operations(rank) if (of.place, of.step) == (place, step)]
    return f"{place}:{numbers[int(share * (len(numbers) - 1))]}/rank={rank}"


class Kind(NamedTuple):
    """A kind of fault, and a function that puts it into a run of these twins and says what is wrong
    with the run then."""

    name: str
    parallel: str
    inflict: Callable[[Twin, Path], str]


def _lost(action: str, place: str, main: bool, twin: Twin, run: Path) -> str:
    """Kill or stop one rank, and go on."""
    victim = 0 if main else twin.ranks - 1
    where = f"{place}:{BEGUN}/rank={victim}" if place == "forward" else ""
    ended = twin.go_all(run, f"{action}@{where or _at(twin, place, victim, 0.6)}")
    survivors = [rank for number, rank in enumerate(ended) if number != victim]
    if ended[victim].code != KILLED or any(rank.code != LOST for rank in survivors):
        return said_by(ended)
    lines = "".join(rank.stderr for rank in survivors).splitlines()
    most = len(survivors) if main else 1
    if not all("lost another rank" in line for line in lines) or len(lines) > most:
        return f"what was said: {lines}"
    took = max(rank.seconds for rank in ended) - twin.seconds
    if took > SECONDS_TO_END:
        return f"took {took:.0f} s more than a run without faults"
    return twin.finish(run)[1]


def preempted(twin: Twin, run: Path) -> str:
    """SIGTERM to one rank alone."""
    ended = twin.go_all(run, f"term@backward:{BEGUN}/rank={twin.ranks - 1}")
    messages = "".join(rank.stderr for rank in ended).strip().splitlines()
    if any(rank.code != PREEMPTED for rank in ended) or len(messages) != 1:
        return said_by(ended)
    if last_step(run) != BEGUN:
        return f"stopped in step {BEGUN}, saved {last_step(run)}"
    return twin.finish(run)[1]


def _full(main: bool, twin: Twin, run: Path) -> str:
    """A disk that is full for one rank, as the second checkpoint is begun."""
    victim = 0 if main else twin.ranks - 1
    ended = twin.go_all(run, f"full:100@{_at(twin, 'save', victim, 0.0)}")
    lines = "".join(rank.stderr for rank in ended).splitlines()
    if any(rank.code != DISK_FULL for rank in ended):
        return said_by(ended)
    if len(lines) != 1 or "the disk is full" not in lines[0]:
        return f"what was said: {lines}"
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    if names != [f"step-{SAVE_EVERY:06}"]:
        return f"left over: {names}"
    return twin.finish(run)[1]


def not_finite(twin: Twin, run: Path) -> str:
    """NaN in the gradient of one rank: as if it had been in all, which skip that step."""
    everywhere, states_folder = twin.new(), twin.folder / f"{run.name}-states"
    states_folder.mkdir()
    on_one = partial(_broken_and_told, twin.ranks - 1, str(states_folder))
    on_all = partial(_broken_and_told, -1, "")
    ended = [*twin.go_all(run, "", on_one), *twin.go_all(everywhere, "", on_all)]
    if any(rank.code or rank.stderr for rank in ended):
        return said_by(ended)
    skipped = [row["step"] for row in rows(run) if row.get("event") == "skip"]
    if skipped != [BEGUN]:
        return f"skipped steps {skipped}, not {BEGUN}"
    rank_states = states(states_folder, twin.ranks)
    for rank, state in enumerate(rank_states):
        for name, expected in rank_states[0].items():
            if not torch.equal(expected, state[name]):
                return f"rank {rank} has another {name} than rank 0"
    return difference(run, everywhere)


@contextmanager
def _broken_and_told(victim: int, states_folder: str, rank: int) -> Iterator[None]:
    """NaN in the gradient of the last block's output on one rank, -1 is all, before ranks exchange
    anything; and their FP8 states in the end."""
    train_step: Any = Step.__call__

    def broken(self: Any, step: int, tokens_BT: Tensor) -> Any:
        if step != BEGUN or victim not in (-1, rank):
            return train_step(self, step, tokens_BT)

        def spoil(module: Any, inputs: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda gradient: torch.full_like(gradient, math.nan))

        handle = self.run.model.blocks[-1].register_forward_hook(spoil)
        try:
            return train_step(self, step, tokens_BT)
        finally:
            handle.remove()

    telling = telling_states(states_folder, rank) if states_folder else nullcontext()
    with patch.object(Step, "__call__", broken), telling:
        yield


KINDS = (
    Kind("kill in forward", "ddp", partial(_lost, "kill", "forward", False)),
    Kind("stop in a save", "fsdp", partial(_lost, "stop", "save", False)),
    Kind("NaN on one rank", "ddp", not_finite),
    Kind("SIGTERM to one rank", "fsdp", preempted),
    Kind("disk full, main rank", "ddp", partial(_full, True)),
    Kind("disk full", "fsdp", partial(_full, False)),
    Kind("kill at an all-reduce, main rank", "fsdp", partial(_lost, "kill", "all-reduce", True)),
    Kind("stop at an all-reduce", "ddp", partial(_lost, "stop", "all-reduce", False)),
    Kind("stop in forward", "fsdp", partial(_lost, "stop", "forward", False)),
    Kind("kill in a save, main rank", "ddp", partial(_lost, "kill", "save", True)),
    Kind("stop in a save, main rank", "ddp", partial(_lost, "stop", "save", True)),
    Kind("kill in a save", "fsdp", partial(_lost, "kill", "save", False)),
)


def lost_ranks(folder: Path, count: int) -> Outcome:
    """Each kind with two ranks, then with four, all with dropout and delayed scaling."""
    kinds = [(KINDS[n % len(KINDS)], 2 if n < len(KINDS) else 4) for n in range(count)]
    # Two at a time, since stopped ranks are mostly waited for.
    with ThreadPoolExecutor() as pool:
        outcomes = pool.map(partial(_lost_in, folder, kinds), ("ddp", "fsdp"))
        return sum(outcomes, Outcome())


def _lost_in(folder: Path, kinds: Sequence[tuple[Kind, int]], parallel: str) -> Outcome:
    """Run the kinds of faults that apply to ddp, or to fsdp."""
    outcome, twins = Outcome(), dict[int, Twin]()
    for kind, ranks in kinds:
        if kind.parallel != parallel:
            continue
        if ranks not in twins:
            dropout = ["--set", "model_overrides.dropout=0.1"]
            twins[ranks] = rank_twin(folder / f"{ranks}-{parallel}", ranks, parallel, dropout)
        try:
            wrong = kind.inflict(twins[ranks], twins[ranks].new())
        except TimeoutError as error:
            wrong = str(error)
        outcome += judged([f"{ranks} ranks, {parallel}: {kind.name}"], wrong)
    return outcome


# R13: another number of ranks

EXACT, NEAR = 1e-5, 5e-3
MUON = 1e-4
"""Muon's Newton-Schulz iterations round to bf16: on one rank, sums of gradients in another order
already change the losses of fp32 by 1e-5 (AdamW's by 1e-7)."""
EACH = 3  # steps of a start
ODD = ("--set", "model_overrides.vocabulary=257", "--set", "model_overrides.width=64")
"""A vocabulary that low precision pads, and that ranks do not share equally."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """The starts of one run: with how many ranks, and how they share the work."""

    recipe: str
    starts: tuple[tuple[int, str], ...]
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The recipe, and the ranks start by start."""
        starts = " -> ".join(f"{count} {parallel}" for count, parallel in self.starts)
        return " ".join([f"{self.recipe}: {starts}", *self.flags])


_DDP = ((1, "ddp"), (2, "ddp"), (1, "ddp"))
_FSDP = ((1, "ddp"), (2, "fsdp"), (1, "ddp"))
_LATER = ("--checkpoint-async",)
_MIXED = ((2, "ddp"), (2, "fsdp"), (1, "ddp"))
WAYS = (
    Way(recipe="fp32", starts=_DDP, flags=_LATER),
    Way(recipe="delayed", starts=_FSDP, flags=ODD),
    Way(recipe="bf16", starts=((2, "fsdp"), (1, "ddp"), (2, "ddp")), flags=(*ODD, *_LATER)),
    Way(recipe="fp32", starts=_FSDP, flags=ODD),
    Way(recipe="delayed", starts=_MIXED),
    Way(recipe="delayed", starts=((2, "fsdp"), (2, "ddp"), (1, "ddp")), flags=_LATER),
    Way(recipe="fp16", starts=_FSDP),
    Way(recipe="current", starts=_DDP),
    Way(recipe="mxfp8", starts=_FSDP, flags=ODD),
    Way(recipe="block", starts=_FSDP, flags=("--context", "64")),
    Way(recipe="delayed", starts=((3, "fsdp"), (1, "ddp")), flags=(*ODD, "--batch", "12")),
    Way(recipe="fp32", starts=((1, "ddp"), (2, "fsdp"), (1, "ddp"), (4, "fsdp"))),
    Way(recipe="nvfp4", starts=_FSDP),
    Way(recipe="mxfp4", starts=_DDP, flags=ODD),
)


def world_sizes(folder: Path, count: int) -> Outcome:
    """Runs whose starts have different numbers of ranks, compared with one undisturbed rank."""
    outcome = Outcome()
    for number in range(count):
        way = WAYS[number % len(WAYS)]
        changes = [way.name] * (len(way.starts) - 1)
        outcome += judged(changes, go_way(folder / f"way-{number:02}", way))
    return outcome


def go_way(folder: Path, way: Way) -> str:
    """The problem of a run that was started in these ways, "" if none."""
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text(TEXT)
    steps = EACH * len(way.starts)
    words = ["pretrain", "--data", "text.txt", "--recipe", way.recipe, *SMALL, "--batch", "8"]
    words += ["--steps", str(steps), "--save-every", "100", "--eval-every", str(steps)]
    words += ["--accumulate", "2", "--set", "model_overrides.width=128"]
    words += ["--set", "sample_tokens=0", "--resume", "auto", *way.flags]
    alone = run_ranks([*words, "--out", "alone"], folder, 1)
    if alone[0].code:
        return f"one rank alone: {said_by(alone)}"
    for number, (count, parallel) in enumerate(way.starts, 1):
        last = number == len(way.starts)
        # The last rank alone hears of it; all save, and stop.
        faults = "" if last else f"term@step:{number * EACH}/rank={count - 1}"
        ended = run_ranks([*words, "--parallel", parallel, "--out", "run"], folder, count, faults)
        if any(rank.code != (DONE if last else PREEMPTED) for rank in ended):
            return f"start {number}: {said_by(ended)}"
        if last_step(folder / "run") != EACH * number:
            return f"start {number} saved step {last_step(folder / 'run')}"
    return apart(folder, way)


def apart(folder: Path, way: Way) -> str:
    """The first step whose loss is too far from the loss of one rank, "" if none is.

    In FP8, the first step, and the first step with another number of ranks, start from the same
    weights and scales, so their losses are as near as in fp32. Later, a rounding that flips grows.
    In current scaling and NVFP4 a rank computes scales from its own rows of a batch, so losses are
    only roughly equal.
    """
    run_rows, alone_rows = (
        [row for row in rows(folder / run) if "loss" in row] for run in ("run", "alone")
    )
    steps = [row["step"] for row in run_rows]
    if steps != [row["step"] for row in alone_rows]:
        return f"steps {steps}"
    first = next(n for n, (count, _) in enumerate(way.starts) if count > 1) * EACH + 1
    by_part = has_amax_of_tensors(way.recipe)
    for row, alone_row in zip(run_rows, alone_rows, strict=True):
        exact = way.recipe == "fp32" or (row["step"] <= first and not by_part)
        limit = (MUON if "muon" in way.flags else EXACT) if exact else NEAR
        loss, expected = row["loss"], alone_row["loss"]
        if not abs(loss - expected) / expected <= limit:
            return f"step {row['step']}: the loss is {loss}, and {expected} on one rank"
    return ""


CASES = {
    "R12": Case(
        description="one of 2 or 4 ranks killed, stopped, signalled, with NaN or with a full disk",
        passes=f"no rank hangs over {SECONDS_TO_END:.0f} s, all end alike and say so in a line; "
        "started again, every tensor and loss equals, bit for bit, a run's that was left alone",
        run=lost_ranks,
        short=len(KINDS),
        long=2 * len(KINDS),
    ),
    "R13": Case(
        description="going on with another number of ranks, DDP and FSDP2, in nine recipes",
        passes=f"losses as of one rank: fp32 within {EXACT:g} at every step, others within "
        f"{NEAR:g}, and {EXACT:g} at the first step of several ranks, except in current scaling "
        "and NVFP4",
        run=world_sizes,
        short=3,
        long=len(WAYS),
    ),
}
