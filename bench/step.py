"""Whole training steps, in every recipe and backend that runs here, with peers in the same process.

The baseline is ours without FP8: bf16, or fp32 on a CPU without bf16 instructions. On a CPU all
arms take turns together. On a GPU each takes turns with the baseline alone, so that two models have
to fit and no more; the ratio is to the baseline's own rounds beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure

from bench import emulation, peers, report
from bench.report import Bar, Report, Row
from bench.runner import RESULTS, add_models_argument, add_timing_arguments, timing_options
from fp8stack.benchmark import interleaved, machine, slug
from fp8stack.benchmark_step import (
    FP8,
    StepArm,
    Work,
    arms,
    baseline,
    build,
    chosen,
    figures,
    free_memory,
    plan_of,
    resident_gib,
)
from fp8stack.cli_options import words
from fp8stack.precision import Hardware, probe
from fp8stack.training import profiling
from fp8stack.training.throughput import Peak, peak_rate

Step = Callable[[], None]
PLAIN = "plain GPT"
CPU_COMPILED = ("fp32", "delayed")  # compiling a step takes one to two minutes for each
SHORT = ["--rounds", "6", "--budget", "60", "--compiled", ""]
# How much faster the fastest FP8 arm is to be than our bf16, and than torchao tensorwise.
SPEEDUPS = {"gpt2-124m": 1.15, "gpt2-350m": 1.25, "gpt2-1.5b": 1.38, "llama-8b-2-layers": 1.45}
OVER_TORCHAO = 1.10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_timing_arguments(parser, rounds=100, budget_s=120.0)
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: %(default)s)")
    add_models_argument(parser)
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
    """Every model."""
    hardware = probe(arguments.device)
    tiny = arguments.tiny
    works = [emulation.tiny_work()] if tiny else chosen(arguments.models, hardware.device)
    rows: list[Row] = []
    for work in works:
        rows += measure_work(work, hardware, arguments)
    settings = {"rounds": arguments.rounds, "budget_s": arguments.budget, "ratio": "fastest"}
    return {
        "machine": machine("torchao", device=hardware.device),
        "settings": settings
        | {"precision_of_peers": "bf16 autocast" if _gpu(hardware) else "fp32"},
        "results": rows,
        "bars": report.judged(bars(rows), rows),
    }


def _gpu(hardware: Hardware) -> bool:
    return hardware.device == "cuda"


def measure_work(work: Work, hardware: Hardware, arguments: argparse.Namespace) -> list[Row]:
    """The rows of one model, the baseline first."""
    first = baseline(hardware)
    also = arguments.compiled
    own = arms(hardware, dict.fromkeys([first, *(arguments.recipes or FP8)]), also)
    builders: dict[str, Callable[[], Step]] = {}
    for arm in own:
        builders[arm.name] = partial(_own, arm, work, hardware)
    builders |= dict(peer_arms(work, hardware, bool(also)))
    rates = {arm.name: _peak(arm, work, hardware) for arm in own}
    options = timing_options(arguments) | {"device": hardware.device}
    rows: list[Row] = []
    steps: dict[str, Step] = {}
    held: dict[str, float] = {}
    for group in groups(list(builders), hardware):
        for name in group:
            if name not in steps:
                steps[name] = _build(builders[name], name, hardware, held)
        timings = interleaved(steps, **options)
        for name in group:
            if name in [row["arm"] for row in rows]:
                continue
            facts = figures(work, timings[name], timings[first], rates.get(name, rates[first]))
            if facts["peak_memory_gib"] is not None:
                facts["step_memory_gib"] = round(held[name] + facts["peak_memory_gib"], 3)
            rows.append({"case": work.model, "arm": name, **facts, "ratio_to": first})
            print(f"{work.model}, {name}: {facts['median_ms']:.1f} ms", flush=True)
            if arguments.profile:
                profile(steps[name], name, work, hardware, arguments.out)
        steps = {first: steps[first]}  # the others' memory is needed
        free_memory(hardware.device)
    return rows


def groups(names: list[str], hardware: Hardware) -> list[list[str]]:
    """Which arms take turns with each other; the first is in every group."""
    if not _gpu(hardware) or len(names) == 1:
        return [names]
    return [[names[0], name] for name in names[1:]]


def _own(arm: StepArm, work: Work, hardware: Hardware) -> Step:
    return build(arm, work, hardware).step


def _build(
    builder: Callable[[], Step], name: str, hardware: Hardware, held: dict[str, float]
) -> Step:
    """The step; on a GPU `held` gets the memory that it keeps."""
    if not _gpu(hardware):
        return builder()
    step, held[name] = resident_gib(builder)
    return step


def _peak(arm: StepArm, work: Work, hardware: Hardware) -> Peak:
    return peak_rate(hardware, plan_of(arm, work, hardware))


def peer_arms(
    work: Work, hardware: Hardware, compiled: bool
) -> Iterator[tuple[str, Callable[[], Step]]]:
    """The peers: compiled on a GPU; on a CPU eager, and compiled if wanted."""
    device = hardware.device
    modes = [True] if _gpu(hardware) else [False, True] if compiled else [False]
    for mode in modes:
        suffix = " compiled" if mode and not _gpu(hardware) else ""
        yield f"{PLAIN}{suffix}", partial(peers.step, work, device, "", mode)
        yield f"torchao tensorwise{suffix}", partial(peers.step, work, device, "tensorwise", mode)
        if not mode or _gpu(hardware):  # on a CPU one compiled peer in FP8 is enough
            yield "torchao rowwise", partial(peers.step, work, device, "rowwise", mode)
    if hardware.has_te:
        from bench import peers_te

        yield "te.TransformerLayer bf16", partial(peers_te.step, work, None)
        for recipe in ("delayed", "current"):
            yield f"te.TransformerLayer {recipe}", partial(peers_te.step, work, recipe)


def bars(rows: list[Row]) -> list[Bar]:
    """What a GPU's results are held to: no weak baseline; FP8 that is worth it."""
    made = []
    for model, speedup in SPEEDUPS.items():
        mine = [
            row
            for row in rows
            if row["case"] == model and row["arm"].partition(" ")[0] in ("delayed", "current")
        ]
        if not mine:
            continue
        best = min(mine, key=lambda row: float(row["ratio"]))["arm"]
        made.append(Bar(case=model, arm=best, of="bf16", at_most=1 / speedup))
        made.append(Bar(case=model, arm="bf16", of=PLAIN, at_most=1.0))
        made.append(Bar(case=model, arm=best, of="torchao tensorwise", at_most=1 / OVER_TORCHAO))
    return made


def profile(step: Step, name: str, work: Work, hardware: Hardware, out: Path | None) -> None:
    """Profile one step: a table of the operators that take longest, and a trace."""
    folder = (out or RESULTS / slug(hardware)) / "profiles" / work.model / name.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    with profiling.recording(torch.device(hardware.device)) as recorded:
        step()
    print(f"{work.model}, {name}, in {folder}:")
    print(profiling.write(recorded, folder, 1))


def table(found: Report) -> str:
    """Every arm's speed, and its ratio to the baseline."""
    extra = {
        "tokens/s": report.number("tokens_per_s", 0),
        "TFLOP/s": report.number("tflops"),
        "MFU": report.number("mfu"),
        "memory GiB": report.number("step_memory_gib"),
        "relative time": report.number("ratio", 3),
        "speedup": report.number("speedup", 3),
    }
    rows = found["results"]
    text = "One optimizer step: forward, backward, AdamW. TFLOP/s counts causal attention as half. "
    text += f"The MFU is of {rows[0]['mfu_of']} for the baseline and the peers; time and speedup "
    text += f"are relative to {rows[0]['ratio_to']}, of the fastest rounds."
    return (
        report.heading(found, "Training steps", text)
        + report.timing_table(rows, extra)
        + report.bars_table(found["bars"])
    )


def figure(found: Report) -> Figure:
    """Speedups over the baseline."""
    rows = found["results"]
    label = f"speed, relative to {rows[0]['ratio_to']}"
    return report.ratio_figure(rows, "Training steps", "speedup", label)
