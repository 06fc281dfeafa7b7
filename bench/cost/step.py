"""Whole training steps, in every recipe and backend that runs here, with peers in the same process.

The baseline is fp8stack without FP8: bf16, or fp32 on a CPU without bf16 instructions. On a CPU all
arms take turns. On a GPU every arm takes turns with the baseline only, so that no more than two
models must fit; its ratio is to the baseline's rounds in the same turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType

import torch

from bench import cells, peers, report, runner
from bench.cells import words
from bench.cost import emulation
from bench.report import Bar, Report, Row
from fp8stack.analysis.benchmark.step_timing import (
    FP8,
    StepWork,
    arms,
    baseline,
    build_step,
    chosen,
    figures,
    free_memory,
    plan_of,
)
from fp8stack.analysis.benchmark.timing import interleaved, slug
from fp8stack.precision import Hardware, probe
from fp8stack.training.metrics import profiler
from fp8stack.training.metrics.throughput import peak_rate

Step = Callable[[], None]
PLAIN = "plain GPT"
CPU_COMPILED = ("fp32", "delayed")  # compiling a step takes one to two minutes for each
SHORT = ["--rounds", "6", "--budget", "60", "--compiled", ""]
# Speedups that the fastest FP8 arm is held to: over fp8stack's bf16, and over torchao tensorwise.
SPEEDUPS = {"gpt2-124m": 1.15, "gpt2-350m": 1.25, "gpt2-1.5b": 1.38, "llama-8b-2-layers": 1.45}
OVER_TORCHAO = 1.10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runner.add_options(parser, rounds=100, budget_s=120.0, models=True)
    add = parser.add_argument
    add("--recipes", type=words, metavar="A,B", help=f"(default: the baseline and {','.join(FP8)})")
    add(
        "--compiled",
        type=words,
        metavar="A,B",
        default=",".join(CPU_COMPILED),
        help="CPU: recipes that are compiled as well, and with any of them the peers (default: "
        "%(default)s); on a GPU everything is that can be",
    )
    add("--profile", action="store_true", help="profile one step of each arm: a table and a trace")


def measure(arguments: argparse.Namespace) -> Report:
    hardware = probe(arguments.device)
    tiny = arguments.tiny
    works = [emulation.tiny_work()] if tiny else chosen(arguments.models, hardware.device)
    rows: list[Row] = []
    for work in works:
        peer_builders = dict(peer_arms(work, hardware, bool(arguments.compiled)))
        after = None
        if arguments.profile:
            after = partial(profile, work=work, hardware=hardware, out=arguments.out)
        rows += in_turns(
            work,
            arguments.recipes or FP8,
            hardware,
            arguments,
            arguments.compiled,
            peer_builders,
            after,
        )
    theirs_run = "bf16 autocast" if _gpu(hardware) else "fp32"
    settings = {"ratio": "fastest", "precision_of_peers": theirs_run}
    return report.report_of(
        hardware.device,
        runner.timing_settings(arguments) | settings,
        rows,
        bars=report.judged(bars(rows), rows),
        packages=["torchao"],
    )


def _gpu(hardware: Hardware) -> bool:
    return hardware.device == "cuda"


def in_turns(
    work: StepWork,
    recipes: Iterable[str],
    hardware: Hardware,
    arguments: argparse.Namespace,
    also_compiled: Collection[str] = (),
    peer_builders: Mapping[str, Callable[[], Step]] = MappingProxyType({}),
    after: Callable[[cells.Arm, str], None] | None = None,
) -> list[Row]:
    """The rows of one model's arms, the baseline first. Rows in `arguments.cells` are not measured
    again.

    Args:
        work: the model and its batch.
        recipes: the recipes of our arms, besides the baseline. Recipes that do not run here are
            left out.
        hardware: the machine.
        arguments: the arguments of the scenario, with `cells` and the timing options.
        also_compiled: the recipes that a CPU runs compiled as well.
        peer_builders: builders of the peers' steps, by name.
        after: called with each step and its name after it was timed.
    """
    first = baseline(hardware)
    recipes = list(dict.fromkeys([first, *recipes]))
    our_arms = {arm.name: arm for arm in arms(hardware, recipes, also_compiled)}
    held: dict[str, float] = {}
    builders: dict[str, Callable[[], Step]] = {
        name: partial(build_step, arm, work, hardware) for name, arm in our_arms.items()
    }
    builders |= peer_builders
    builders = {
        name: partial(_build, builder, name, hardware, held) for name, builder in builders.items()
    }
    builders[first] = cache(builders[first])  # it is in every group

    def timed(group: list[str]) -> list[Row]:
        steps, failed = cells.runnable(work.model, {name: builders[name] for name in group})
        timings = interleaved(steps, **runner.timing_options(arguments))
        rows = []
        for name, timing in timings.items():
            plan = plan_of(our_arms.get(name, our_arms[first]), work, hardware)
            facts = figures(work, timing, timings[first], peak_rate(hardware, plan))
            if facts["peak_memory_gib"] is not None:
                facts["step_memory_gib"] = round(held[name] + facts["peak_memory_gib"], 3)
            paired = report.paired(timing, timings[first])
            rows.append({"case": work.model, "arm": name, **facts, **paired, "ratio_to": first})
            if after is not None:
                after(steps[name], name)
        return rows + failed

    rows: dict[str, Row] = {}
    for group in groups(list(builders), hardware):
        for row in arguments.cells.rows(work.model, group, partial(timed, group)):
            rows.setdefault(row["arm"], row)
        free_memory(hardware.device)  # for the next group
    arguments.cells.left_out += cells.not_served(work.model, recipes, hardware)
    return list(rows.values())


def groups(names: list[str], hardware: Hardware) -> list[list[str]]:
    """The groups of arms that take turns; the first arm is in every group."""
    if not _gpu(hardware) or len(names) == 1:
        return [names]
    return [[names[0], name] for name in names[1:]]


def resident_gib(builder: Callable[[], Step]) -> tuple[Step, float]:
    """The step that `builder` builds, and the GPU memory that it holds after its first run:
    weights, moments, FP8 state. Add the peak of a step to get the total peak."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    step = builder()
    step()
    torch.cuda.synchronize()
    return step, (torch.cuda.memory_allocated() - before) / 2**30


def _build(
    builder: Callable[[], Step], name: str, hardware: Hardware, held: dict[str, float]
) -> Step:
    """Build the step; on a GPU, `held` gets the memory that it holds."""
    if not _gpu(hardware):
        return builder()
    step, held[name] = resident_gib(builder)
    return step


def peer_arms(
    work: StepWork, hardware: Hardware, compiled: bool
) -> Iterator[tuple[str, Callable[[], Step]]]:
    """Builders of the peers' steps: compiled on a GPU; eager on a CPU, and compiled if
    `compiled`."""
    device = hardware.device
    modes = [True] if _gpu(hardware) else [False, True] if compiled else [False]
    for mode in modes:
        suffix = " compiled" if mode and not _gpu(hardware) else ""
        yield f"{PLAIN}{suffix}", partial(peers.step, work, device, "", mode)
        yield f"torchao tensorwise{suffix}", partial(peers.step, work, device, "tensorwise", mode)
        if not mode or _gpu(hardware):  # on a CPU one compiled peer in FP8 is enough
            yield "torchao rowwise", partial(peers.step, work, device, "rowwise", mode)
    if hardware.has_te:
        from bench.peers import te

        yield "te.TransformerLayer bf16", partial(te.step, work, None)
        for recipe in ("delayed", "current"):
            yield f"te.TransformerLayer {recipe}", partial(te.step, work, recipe)


def bars(rows: list[Row]) -> list[Bar]:
    """The limits that a GPU's results are held to: a strong baseline, and FP8 that is faster."""
    bars = []
    for model, speedup in SPEEDUPS.items():
        mine = [
            row
            for row in rows
            if row["case"] == model and row["arm"].partition(" ")[0] in ("delayed", "current")
        ]
        if not mine:
            continue
        best = min(mine, key=lambda row: float(row["ratio"]))["arm"]
        bars.append(Bar(case=model, arm=best, of="bf16", at_most=1 / speedup))
        bars.append(Bar(case=model, arm="bf16", of=PLAIN, at_most=1.0))
        bars.append(Bar(case=model, arm=best, of="torchao tensorwise", at_most=1 / OVER_TORCHAO))
    return bars


def profile(
    step: cells.Arm, name: str, work: StepWork, hardware: Hardware, out: Path | None
) -> None:
    """Profile one step: print a table of the slowest operators, and write a trace."""
    out = out or runner.RESULTS / slug(hardware)
    folder = out / "profiles" / work.model / name.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    with profiler.recording(torch.device(hardware.device)) as recorded:
        step()
    print(f"{work.model}, {name}, in {folder}:")
    print(profiler.write(recorded, folder, 1))


def table(data: Report) -> str:
    extra = {
        "tokens/s": report.number("tokens_per_s", 0),
        "TFLOP/s": report.number("tflops"),
        "MFU": report.number("mfu"),
        "memory GiB": report.number("step_memory_gib"),
        "relative time": report.number("ratio", 3),
        "speedup": report.number("speedup", 3),
    }
    rows = data["results"]
    text = "One optimizer step: forward, backward, AdamW. TFLOP/s counts causal attention as half. "
    text += f"The MFU is of {rows[0]['mfu_of']} for the baseline and the peers; time and speedup "
    text += f"are relative to {rows[0]['ratio_to']}, of the fastest rounds."
    return report.page(data, "Training steps", text, extra)


figure = report.ratios("Training steps", "speedup", "speed, relative to {ratio_to}")
