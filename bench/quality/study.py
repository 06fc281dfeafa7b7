"""What recipes cost in loss: small models trained in each, beside float32 with the same seed.

Runs take hours, so their figures are added to `study.jsonl` as they end, and the same command goes
on with what is not there. Nothing here is timed: it may run beside other work, and waits while
another `python -m bench` measures times.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import Empty
from typing import Any

from bench.cells import append_line, json_lines, words
from bench.quality import study_tables
from bench.timing_lock import held_by_another
from fp8stack.benchmark.timing import machine
from fp8stack.compare.results import read_run
from fp8stack.errors import NumericFailure, UserError, quoted
from fp8stack.model.config import GPTConfig, load_config
from fp8stack.precision import load_recipe
from fp8stack.training.run_folder import RunFolder, read_rows
from fp8stack.training.signals import Preempted

NAME = "study.jsonl"
MODEL = "gpt-nano"
SIZES: dict[str, dict[str, int]] = {
    "0.1M": {"layers": 2, "width": 64, "heads": 2, "mlp_width": 128},
    "0.3M": {"layers": 3, "width": 96, "heads": 3, "mlp_width": 192},
    "0.9M": {},
}
TINY = "tiny"
SHAPES = SIZES | {TINY: {"layers": 1, "width": 32, "heads": 1, "mlp_width": 32}}
RATIOS = (2, 8)  # tokens per parameter
PAIRS = {"0.1M": 12, "0.3M": 6, "0.9M": 3}
BASELINE, SHARED = study_tables.BASELINE, study_tables.SHARED
LADDER = (
    "nvfp4", "nvfp4_nearest", "mxfp4", "mxfp6_e2m3", "mxfp8", "rowwise", "block", "current",
    "delayed",
)  # fmt: skip
ARMS = (
    "nvfp4_no_hadamard", "nvfp4_forward_high", "nvfp4_backward_high", "nvfp4_last_bf16",
    "mxfp6_e3m2",
)  # fmt: skip
"""Recipes that the largest model is not trained in: parts of NVFP4, and the other FP6."""
KEYS: dict[str, Any] = {
    "model": MODEL, "device": "cpu", "threads": 1, "min_lr": 0.0, "eval_windows": 512,
    "sample_tokens": 0, "guard": {"enabled": False},
}  # fmt: skip
DESIGNS: dict[str, dict[str, Any]] = {
    "plain": {"shared": 0.0},
    "learning rate falls to a tenth": {"shared": 0.0, "min_lr": 0.1},
    "four times the windows": {"shared": 0.0, "eval_windows": 2048},
    "first tenth in fp32": {"shared": 0.1},
    SHARED: {"shared": 0.25},
    "first half in fp32": {"shared": 0.5},
    study_tables.AA: {"shared": 0.0, "accumulate": 2},
}
"""How pairs are made. The first steps of a small model are chaotic: rounding in them moves the end
of a run. A share of the steps that all runs of a seed take in float32 removes that, so the study's
tables are of `SHARED`; the others are there to say what each does to the spread of gaps."""
DESIGN_CELL, DESIGN_RECIPES, DESIGN_PAIRS = ("0.1M", 8), ("current", "mxfp4"), 8
FILES = Path(__file__).parents[1] / "recipes"
FILES_CELL, FILES_SEEDS = ("0.1M", 8), range(1, 11)  # one was tuned on the model of seed 0
"""Recipes of files: one of `fp8stack tune`, and with as many bits what is commonly done; and some
with the residual stream in bf16."""
AA_CELL, AA_PAIRS = ("0.1M", 1), 40 * study_tables.AA_PAIRS
OPERANDS = ("input", "weight", "grad_output")


def source_of(recipe: str) -> str:
    """The name that `load_recipe` takes: a path for a recipe in `bench/recipes/`."""
    file = FILES / f"{recipe}.toml"
    return str(file) if file.exists() else recipe


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of the study."""

    size: str
    ratio: int
    recipe: str
    seed: int
    design: str = SHARED

    @property
    def source(self) -> str:
        return source_of(self.recipe)

    @property
    def is_base(self) -> bool:
        """Whether others are compared with it."""
        return self.recipe == BASELINE and self.design != study_tables.AA

    @property
    def trial(self) -> tuple[str, int, int, str]:
        """What a run has in common with the one in float32 that it is compared with: the steps
        that designs share do not change that one."""
        design = self.design
        if design == study_tables.AA:
            design = "plain"
        elif design != "plain" and DESIGNS[design].keys() == {"shared"}:
            design = SHARED
        return self.size, self.ratio, self.seed, design

    @property
    def steps(self) -> int:
        """How many steps make `ratio` tokens per parameter."""
        return round(self.ratio * _shape(self.size).parameters() / TOKENS_PER_STEP)

    @property
    def keys(self) -> dict[str, Any]:
        steps = self.steps
        design = dict(DESIGNS[self.design])
        first = {"name": "shared", "recipe": BASELINE, "until": design.pop("shared")}
        phases = [first, {"name": "compared"}] if first["until"] else []
        every = 20 if self.design == "plain" else 3
        own = {
            "phases": [] if self.recipe == BASELINE else phases,
            "model_overrides": SHAPES[self.size],
            "recipe": self.source,
            "seed": self.seed,
            "steps": steps,
            "eval_every": math.ceil(steps / every),
            "save_every": max(200, math.ceil(steps / 4)),
            "telemetry_every": 0 if self.recipe == BASELINE else math.ceil(steps / 4),
        }
        if self.size == TINY:
            own["eval_windows"] = 16
        return KEYS | own | design

    def content(self, cpu: str) -> str:
        """A hash of all that the run's figures depend on: its keys, what its recipe says, and the
        kind of CPU."""
        keys = self.keys | {"recipe": self.recipe}  # wherever its file is
        shape = _shape(self.size).model_dump(mode="json")
        told = json.dumps([keys, _recipe(self.source), shape, cpu], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        design = "" if self.design == SHARED else f"-{self.design.replace(' ', '-')}"
        return f"{self.size}-{self.ratio}-{self.recipe}-seed{self.seed}{design}"


TOKENS_PER_STEP = 8 * 128  # gpt-nano's batch and context


@cache
def _shape(size: str) -> GPTConfig:
    return load_config(MODEL, SHAPES[size])


@cache
def _recipe(source: str) -> dict[str, Any]:
    recipe = load_recipe(source)
    # Runs of before there was a choice are kept.
    usual = {"residual"} if recipe.residual == "fp32" else set()
    return recipe.model_dump(mode="json", exclude={"description", *usual})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--runs", type=Path, default=Path("runs/study"), help="of runs under way, and the models "
        "that were trained in fp32 (default: %(default)s)")  # fmt: skip
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes of one thread each")
    add("--hours", type=float, default=math.inf, help="stop after so many (default: never)")
    add("--sizes", type=words, default=[*SIZES], metavar="A,B", help="some of the sizes")
    add("--table", action="store_true", help="train nothing: write the tables of what is there")
    add("--tiny", action="store_true", help="one model of 23 thousand parameters, to see it run")


def jobs(sizes: Sequence[str]) -> list[Job]:
    """All runs, the shortest first, but the first pair of a cell before others' further ones."""
    found = []
    for size in sizes:
        for ratio in RATIOS if size != TINY else (1,):
            recipes = {TINY: ("mxfp4",), "0.9M": LADDER}.get(size, LADDER + ARMS)
            for seed in range(PAIRS.get(size, 2)):
                for recipe in (BASELINE, *recipes):
                    found.append(Job(size=size, ratio=ratio, recipe=recipe, seed=seed))
            if (size, ratio) == FILES_CELL:
                files = sorted({file.stem for file in FILES.glob("*.toml")} - {*LADDER, *ARMS})
                every = ((recipe, seed) for seed in FILES_SEEDS for recipe in files)
                found += [Job(size=size, ratio=ratio, recipe=r, seed=s) for r, s in every]
            if (size, ratio) == DESIGN_CELL:
                found += _designs(size, ratio)
    found.sort(key=lambda job: _shape(job.size).parameters() ** 2 * job.ratio * (job.seed or 0.1))
    if AA_CELL[0] in sizes:
        middle = next(n for n, job in enumerate(found) if (job.ratio, job.seed) == (RATIOS[-1], 4))
        found[middle:middle] = _same_twice(*AA_CELL)
    return found


def _same_twice(size: str, ratio: int) -> Iterator[Job]:
    """Float32 beside float32 that adds its gradients up in two parts, and so rounds otherwise."""
    for seed in range(AA_PAIRS):
        for design in ("plain", study_tables.AA):
            yield Job(size=size, ratio=ratio, recipe=BASELINE, seed=seed, design=design)


def _designs(size: str, ratio: int) -> Iterator[Job]:
    for seed in range(DESIGN_PAIRS):
        for design in DESIGNS:
            if design not in (SHARED, study_tables.AA):
                for recipe in (BASELINE, *DESIGN_RECIPES):
                    job = Job(size=size, ratio=ratio, recipe=recipe, seed=seed, design=design)
                    if recipe != BASELINE or job.trial[-1] == design:
                        yield job


def folder_of(arguments: argparse.Namespace) -> Path:
    """Where results are: all of these are of a CPU."""
    out: Path = arguments.out
    return out / "cpu" if out.name == "results" else out


def run(arguments: argparse.Namespace) -> None:
    """Train what is not there, and write the tables of what there is."""
    sizes = [TINY] if arguments.tiny else arguments.sizes
    for size in sizes:
        if size not in SHAPES:
            raise UserError(f"--sizes {quoted(size)}: there are {', '.join(SIZES)}.")
    folder = folder_of(arguments)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    cpu = machine(device="cpu")["machine"]
    try:
        if not arguments.table:
            rows = json_lines(path)
            left = left_of(jobs(sizes), rows, cpu)
            print(f"{len(left)} runs are to do, {len(rows)} are there", flush=True)
            _train(left, path, cpu, arguments)
    finally:
        print(study_tables.write(json_lines(path), folder))


def left_of(asked: Sequence[Job], rows: Sequence[Mapping[str, Any]], cpu: str) -> list[Job]:
    """The jobs to do on this kind of CPU. A seed's pair that another kind has made is not made
    again, since it is the same pair but for rounding; its float32 run is, where a pair needs it."""
    known = {row["key"] for row in rows}
    cpus = sorted({cpu} | {row["cpu"] for row in rows})
    bases = {job.trial: job for job in asked if job.is_base}

    def is_made(job: Job) -> bool:
        base = bases[job.trial]
        return any(job.content(c) in known and base.content(c) in known for c in cpus)

    pairs = [job for job in asked if not job.is_base and not is_made(job)]
    needed = {bases[job.trial] for job in pairs}.union(pairs)
    return [job for job in asked if job in needed and job.content(cpu) not in known]


# Training


def _train(left: list[Job], path: Path, cpu: str, arguments: argparse.Namespace) -> None:
    """Train the jobs in processes of one thread each, and add their figures to the file at `path`.

    Raises:
        UserError: runs that failed, other than by numbers that are not finite: they are to be made
            again.
    """
    context = multiprocessing.get_context("spawn")
    asked, done = context.Queue(), context.Queue()
    for job in left:
        asked.put(job)
    count = max(1, min(arguments.workers, len(left)))
    for _ in range(count):
        asked.put(None)  # there is no more
    asked.cancel_join_thread()  # a stopped study leaves most of them unread
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    workers = [
        context.Process(target=_work, args=(asked, done, arguments.runs, cpu, os.getpid()))
        for _ in range(count)
    ]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a KeyboardInterrupt, as by Ctrl-C
    for worker in workers:
        worker.start()
    until = time.monotonic() + 3600 * arguments.hours
    ended, failed, stopped = 0, [], False
    while any(worker.is_alive() for worker in workers) or not done.empty():
        try:
            with suppress(Empty):
                row = done.get(timeout=1)
                ended += 1
                print(f"[{ended}/{len(left)}] {row['name']}: {_told(row)}", flush=True)
                if row["error"]:
                    failed.append(row["name"])
                else:
                    append_line(path, row)
            if stopped or time.monotonic() > until:
                _send(signal.SIGCONT, workers)
                _send(signal.SIGTERM, workers)  # they save their runs and end
                stopped, until = True, math.inf
            else:
                _send(signal.SIGSTOP if held_by_another() else signal.SIGCONT, workers)
        except KeyboardInterrupt:
            print("stopping: the same command goes on", flush=True)
            stopped = True
    if failed:
        raise UserError(f"Failed, and to be made again: {', '.join(failed)}.")


def _told(row: Mapping[str, Any]) -> str:
    if row["error"]:
        return str(row["error"])
    loss = "" if row["val_loss"] is None else f", loss {row['val_loss']:.4f}"
    return f"{row['status']}{loss}, {row['seconds']:.0f} s"


def _send(which: signal.Signals, workers: Sequence[Any]) -> None:
    for worker in workers:
        if worker.is_alive():
            os.kill(worker.pid, which)


def _work(asked: Any, done: Any, runs: Path, cpu: str, parent: int) -> None:
    """Train one job after the other, until there is none left, a signal comes or the parent is
    gone."""
    import fp8stack

    runs.mkdir(parents=True, exist_ok=True)
    while os.getppid() == parent:
        try:
            job = asked.get(timeout=5)
        except Empty:
            return
        if job is None:
            return
        folder = runs / job.name
        began, error, exit = time.monotonic(), "", 0
        try:
            with (runs / f"{job.name}.log").open("a") as log, redirect_stdout(log):
                fp8stack.pretrain(out=str(folder), resume="auto", **job.keys)
        except NumericFailure as failed:
            exit = failed.exit_code  # that is a result
        except Preempted:
            return
        except UserError as failed:
            error, exit = str(failed), failed.exit_code
        row = _figures(job, folder, cpu, exit, time.monotonic() - began) | {"error": error}
        (runs / f"{job.name}.log").unlink(missing_ok=True)
        if (job.recipe, job.design) != (BASELINE, SHARED) and not error:
            shutil.rmtree(folder, ignore_errors=True)
        done.put(row)


def _figures(job: Job, folder: Path, cpu: str, exit: int, seconds: float) -> dict[str, Any]:
    shape = _shape(job.size)
    found = read_run(
        RunFolder(folder),
        recipe=job.recipe,
        seed=job.seed,
        steps=job.steps,
        vocabulary=shape.vocabulary,
        exit=exit,
    )
    return {
        "key": job.content(cpu),
        "name": job.name,
        "design": job.design,
        "size": job.size,
        "ratio": job.ratio,
        "recipe": job.recipe,
        "seed": job.seed,
        "cpu": cpu,
        "parameters": shape.parameters(),
        "tokens": job.steps * TOKENS_PER_STEP,
        "status": found.status,
        "val_loss": found.val_loss,
        "curve": [[step, round(loss, 6)] for step, loss in found.curve],
        "skips": found.skips,
        "operand_errors": operand_errors(folder / "telemetry.jsonl"),
        "seconds": round(seconds, 1),
    }


def operand_errors(path: Path) -> dict[str, float]:
    """The mean relative squared error of each kind of operand, over layers and sampled steps; the
    first of these does not count, since delayed scaling has all its scales at 1 then."""
    rows = [row for row in read_rows(path, {"step": 0}) if row.get("sqnr_db") is not None]
    first = min((row["step"] for row in rows), default=0)
    found = {}
    for kind in OPERANDS:
        of = [
            10 ** (-row["sqnr_db"] / 10)
            for row in rows
            if row["operand"] == kind and row["step"] > first
        ]
        if of:
            found[kind] = round(sum(of) / len(of), 9)
    return found
