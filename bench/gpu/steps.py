"""Training steps of one model, in bf16 and each recipe or peer in turn, with the host's time by
itself.

A turn runs many steps and waits for the GPU once, at its end. The host's time ends when it has
launched the last step; where the GPU is slower, its queue is full, and both times are equal: then
the host's own time is that of a small batch. A pair that does not fit in memory together is timed
one after the other.
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import peers
from bench.cells import append_line, words
from bench.gpu import kernels
from bench.gpu.facts import HEADLINE, facts
from fp8stack.analysis.benchmark.step_timing import StepWork, free_memory, training_step
from fp8stack.analysis.benchmark.timing import summarize, wait_for
from fp8stack.layers import build_backend
from fp8stack.model.config import GPTConfig, load_config, plan_for, workload
from fp8stack.model.gpt import GPT
from fp8stack.planning.run_config import RunConfig
from fp8stack.precision import Hardware, Plan, load_recipe, probe
from fp8stack.training.graphs import WARM_UP
from fp8stack.training.optim.optimizer import build_optimizer

TINY = GPTConfig(vocabulary=256, context=64, layers=1, width=64, heads=2)
TURNS, STEPS = 7, 10  # of each arm, and of a turn
PEERS = {"plain": "", "torchao": "tensorwise"}  # a plain GPT, without and with torchao's linears
SETTINGS = ("model", "layers", "batch", "context", "backend", "head")
Row = dict[str, Any]


class Turn(NamedTuple):
    """Milliseconds of a step in one turn."""

    host_ms: float  # until the host has launched everything
    step_ms: float  # until the GPU has done everything


def turn(step: Callable[[], None], count: int, device: str) -> Turn:
    """Run `count` steps, and wait once, at the end."""
    wait_for(device)
    begin = time.perf_counter()
    for _ in range(count):
        step()
    launched = time.perf_counter()
    wait_for(device)
    per_step = 1000 / count
    return Turn((launched - begin) * per_step, (time.perf_counter() - begin) * per_step)


class Arm:
    """A model in a recipe, its step, and the times of its turns. `options` has the `backend`,
    whether the `head` is in FP8, and whether passes are replayed as `graphs`."""

    def __init__(
        self, recipe: str, work: StepWork, hardware: Hardware, options: argparse.Namespace
    ):
        self.recipe, self.work, self.hardware = recipe, work, hardware
        self._options = options
        self.turns: list[Turn] = []

    def build(self) -> None:
        """Build the model, and run it until it is compiled."""
        begin = time.perf_counter()
        self.step = self._peer() if self.recipe in PEERS else self._ours()
        for _ in range(2 + WARM_UP):
            self.step()
        wait_for(self.hardware.device)
        self.first_s = time.perf_counter() - begin

    def _peer(self) -> Callable[[], None]:
        device = self.hardware.device
        self.plan: Plan | None = None
        self.graphs, self.compiled = False, device == "cuda"
        return peers.step(self.work, device, PEERS[self.recipe], self.compiled)

    def _ours(self) -> Callable[[], None]:
        options = self._options
        loaded, hardware, work = load_recipe(self.recipe), self.hardware, self.work
        if options.head and loaded.is_fp8:
            loaded = loaded.model_copy(update={"head": True})
        step = workload(work.config, work.tokens, context=work.context)
        self.plan = plan_for(work.config, loaded, hardware, options.backend, work=step)
        built = build_backend(self.plan)
        built.weights.only_tracked_changes = True  # as in a run
        model = GPT(work.config, built).to(hardware.device)
        self.compiled = hardware.device == "cuda" and self.plan.backend != "te"
        if self.compiled:
            model.compile_blocks()
        optimizer = build_optimizer(model, RunConfig(lr=1e-4))
        batches = work.batches_of(hardware.device)
        self.graphs = options.graphs and self.compiled
        return training_step(model, optimizer, batches, graphs=self.graphs)

    def row(self) -> Row:
        """The figures of the turns, and the most memory in a step, with all that is allocated."""
        times = summarize([turn.step_ms for turn in self.turns])
        rate = 1000 * self.work.tokens / times.median_ms
        peak = None
        if self.hardware.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.step()
            peak = round(torch.cuda.max_memory_allocated() / 2**30, 3)
        return {
            "recipe": self.recipe,
            "compiled": self.compiled,
            "graphs": self.graphs,
            "plan": self.plan.summary() if self.plan else [],
            **times.to_json(),
            "host_ms": round(statistics.median(turn.host_ms for turn in self.turns), 4),
            "peak_memory_gib": peak,
            "tokens_per_s": round(rate, 1),
            "tflops": round(rate * self.work.config.flops_per_token(self.work.context) / 1e12, 3),
            "first_s": round(self.first_s, 1),
        }


def measured(arms: list[Arm], arguments: argparse.Namespace) -> Iterator[Row]:
    """Time arms that take turns. Yields a row of times for each; then, if requested, a row of the
    kernels of a step of each, which are all written to a folder beside the file."""
    device = arms[0].hardware.device
    for arm in arms:
        arm.build()
    turns, steps = (2, 2) if arguments.dry_run else (TURNS, STEPS)
    for _ in range(turns):
        for arm in arms:
            arm.turns.append(turn(arm.step, steps, device))
    for arm in arms:
        yield arm.row() | {"in_turn": len(arms) > 1}
    for arm in arms if arguments.profile else ():
        size = f"{arm.work.batch}x{arm.work.context}{'-head' if arguments.head else ''}"
        name = f"{arm.work.model}-{size}-{arm.recipe}"
        rows = kernels.profiled(arm.step, device, arguments.out.parent / "kernels" / name)
        yield {
            "recipe": arm.recipe,
            "kernels_ms": round(sum(row.us for row in rows) / 1000, 3),
            "launches": sum(row.count for row in rows),
            "kinds_ms": kernels.ms_by_kind(rows),
        }


def headline(row: Row, base: Row) -> str:
    """The figures of a row in a line of the visit's summary, relative to `base`."""
    if "kinds_ms" in row:
        kinds = ", ".join(f"{kind} {ms:.1f}" for kind, ms in row["kinds_ms"].items())
        return f"{row['recipe']}: {row['launches']} kernels {row['kernels_ms']:.2f} ms: {kinds}"
    ms, gib = row["median_ms"], row["peak_memory_gib"]
    speed = "" if row is base else f", {base['median_ms'] / ms:.3f} x {base['recipe']}"
    text = f"{row['recipe']}: step {ms:.2f} ms{speed}, host {row['host_ms']:.2f}"
    memory = "" if gib is None else f", {gib:.1f} GiB"
    return f"{text}, {row['tokens_per_s']:,.0f} tokens/s{memory}"


def main() -> int:
    """Measure, print, and append to a file. Returns 1 if a recipe failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.steps", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="a file, one JSON object per line")
    add("--model", default="gpt2-1.5b", help="model preset (default: %(default)s)")
    add("--recipes", type=words, default=["bf16", "delayed"], metavar="A,B",
        help="the first takes turns with each of the others, of which plain and torchao are peers "
        "(default: bf16,delayed)")  # fmt: skip
    add("--batch", type=int, default=4, help="sequences per step (default: %(default)s)")
    add("--context", type=int, default=1024, help="tokens per sequence (default: %(default)s)")
    add("--layers", type=int, help="blocks (default: the model's)")
    add("--backend", default="auto", help="compute backend (default: %(default)s)")
    add("--head", action="store_true", help="the head in FP8 as well")
    add("--graphs", action=argparse.BooleanOptionalAction, default=True,
        help="replay passes as CUDA graphs (default: yes)")  # fmt: skip
    add("--profile", action="store_true", help="all kernels of one step, and a trace")
    add("--dry-run", action="store_true", help="a tiny model on a CPU, to see that it runs")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    hardware = probe("cpu" if arguments.dry_run else "cuda")
    settings = {name: getattr(arguments, name) for name in SETTINGS}
    model, changes = arguments.model, {}
    if arguments.layers is not None:
        model, changes = f"{model}-{arguments.layers}-layers", {"layers": arguments.layers}
    config = load_config(arguments.model, changes)
    if arguments.dry_run:
        config = TINY.model_copy(update=changes)
        arguments.context = TINY.context
    work = StepWork(model=model, config=config, batch=arguments.batch, context=arguments.context)
    arm = partial(Arm, work=work, hardware=hardware, options=arguments)
    settings |= {"dry_run": arguments.dry_run, "facts": facts(hardware)}
    print(f"{HEADLINE}{work.model}, {work.batch} x {work.context} tokens", flush=True)
    base: Row = {}
    failed = False
    first, *compared = arguments.recipes
    for recipe in compared or [first]:
        pair, timed = list(dict.fromkeys([first, recipe])), set[str]()
        for names in [pair, *([name] for name in pair)]:
            if timed.issuperset(names):
                continue  # together
            try:
                for row in measured([arm(name) for name in names], arguments):
                    append_line(arguments.out, row | settings)
                    timed.add(row["recipe"])
                    base = row if row["recipe"] == first and "median_ms" in row else base or row
                    print(f"{HEADLINE}{headline(row, base)}", flush=True)
            except Exception as error:  # of any kind: what follows is measured all the same
                failed = failed or len(names) == 1 or bool(timed)
                traceback.print_exc()
                reason = f"{type(error).__name__}: {str(error).partition('. ')[0][:150]}"
                print(f"{HEADLINE}{' and '.join(names)}: failed: {reason}", flush=True)
            free_memory(hardware.device)
            torch._dynamo.reset()
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
