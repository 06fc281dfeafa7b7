"""The cost of recipes in loss: small models trained in each recipe and, with the same seed, in
float32.

Runs take hours, so the figures of each are added to `study.jsonl` when it ends, and the same
command continues with the missing runs. Nothing is timed: the study may run next to other work, and
pauses while another `python -m bench` measures times.
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
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from queue import Empty
from typing import Any

from bench.cells import append_line, json_lines, words
from bench.quality import corpus, rungs, study_tables
from bench.timing_lock import held_by_another
from fp8stack.analysis.benchmark.timing import machine
from fp8stack.analysis.compare.run_results import read_run
from fp8stack.common.errors import NumericFailure, UserError, quoted
from fp8stack.common.io import write_atomically
from fp8stack.model.config import GPTConfig, load_config
from fp8stack.precision import load_recipe
from fp8stack.precision.plan import WIDE
from fp8stack.training.checkpoint.reader import candidates, is_whole, path_of
from fp8stack.training.run_folder import RunFolder
from fp8stack.training.signals import Preempted

NAME = "study.jsonl"
MODEL = "gpt-nano"
SIZES: dict[str, dict[str, int]] = {
    "0.1M": {"layers": 2, "width": 64, "heads": 2, "mlp_width": 128},
    "0.3M": {"layers": 3, "width": 96, "heads": 3, "mlp_width": 192},
    "0.9M": {},
}
TINY = "tiny"
RUNGS: dict[str, dict[str, int]] = {
    "1M": {"context": 256},
    "3M": {"layers": 6, "width": 192, "heads": 3, "mlp_width": 576, "context": 256},
    "10M": {"layers": 8, "width": 320, "heads": 5, "mlp_width": 960, "context": 256},
}
"""Larger models, trained on the corpus of `bench.quality.corpus` with 20 tokens per parameter. A
run takes hours, so few recipes are trained."""
SHAPES = SIZES | RUNGS | {TINY: {"layers": 1, "width": 32, "heads": 1, "mlp_width": 32}}
RUNG_RATIO, RUNG_PAIRS, RUNG_BATCH = 20, {"1M": 3, "3M": 3, "10M": 2}, 16
SHORT_PAIRS = 2
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
"""Recipes that only the smaller models are trained in: variants of NVFP4, and the other FP6."""
KEYS: dict[str, Any] = {
    "model": MODEL, "device": "cpu", "threads": 1, "min_lr": 0.0, "eval_windows": 512,
    "sample_tokens": 0, "guard": {"enabled": False}, "batch": 8,
}  # fmt: skip
DESIGNS: dict[str, dict[str, Any]] = {
    "plain": {"shared": 0.0},
    "learning rate falls to a tenth": {"shared": 0.0, "min_lr": 0.1},
    "four times the windows": {"shared": 0.0, "eval_windows": 2048},
    "first tenth in fp32": {"shared": 0.1},
    SHARED: {"shared": 0.25},
    rungs.HALF: {"shared": 0.5},
    rungs.LAST_QUARTER: {"shared": 0.75},
    study_tables.SCRATCH: {"shared": 0.0},
    study_tables.AA: {"shared": 0.0, "accumulate": 2},
}
"""Designs of pairs of runs. The first steps of a small model are chaotic: rounding in them changes
the final loss. If all runs of a seed take the first steps in float32, gaps spread less, so the
study's tables use the design `SHARED`; the others show the effect of each design on the spread."""
DESIGN_CELL, DESIGN_RECIPES, DESIGN_PAIRS = ("0.1M", 8), ("current", "mxfp4"), 8
FILES = Path(__file__).parents[1] / "recipes"
FILES_CELL, FILES_SEEDS = ("0.1M", 8), range(1, 11)  # a recipe was tuned on the model of seed 0
"""The cell and seeds for recipes from files: one tuned to 5 bits, common choices with as many
bits, and recipes with the residual stream in bf16."""
SPREAD_CELL, SPREAD_PAIRS = ("3M", 2), 3
"""A cell of float32 pairs that differ in rounding, for the spread of pairs of that size."""
AA_CELL, AA_PAIRS = ("0.1M", 1), 240
OPERANDS = ("input", "weight", "grad_output")


def source_of(recipe: str) -> str:
    """The argument of `load_recipe`: the path of a recipe in `bench/recipes/`, else the name."""
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
    corpus: Path | None = None  # of larger models; None: Python's standard library

    @property
    def source(self) -> str:
        return source_of(self.recipe)

    @property
    def is_base(self) -> bool:
        """Whether other runs are compared with this one."""
        return self.recipe == BASELINE and self.design != study_tables.AA

    @property
    def is_quantized(self) -> bool:
        return load_recipe(self.source).is_fp8

    @property
    def trial(self) -> tuple[str, int, int, str]:
        """The key that a run shares with the float32 run that it is compared with. Designs that
        differ only in their shared steps have the same float32 run."""
        design = self.design
        if design == study_tables.AA:
            design = "plain"
        elif design != "plain" and DESIGNS[design].keys() == {"shared"}:
            design = SHARED
        return self.size, self.ratio, self.seed, design

    @property
    def steps(self) -> int:
        """The number of steps that make `ratio` tokens per parameter."""
        return round(self.ratio * _shape(self.size).parameters() / self.tokens_per_step)

    @property
    def shared_steps(self) -> int:
        """The number of steps, at the start, in the recipe of the float32 run."""
        share: float = DESIGNS[self.design]["shared"]
        return round(share * self.steps)

    @property
    def tokens_per_step(self) -> int:
        return int(self.usual_keys["batch"] * _shape(self.size).context)

    @property
    def usual_keys(self) -> dict[str, Any]:
        """The keys of all runs of the job's size."""
        if self.size not in RUNGS:
            return KEYS
        larger = {"batch": RUNG_BATCH, "eval_windows": 2048, "warmup_steps": 200}
        return KEYS | larger | {"data": str(self.corpus and self.corpus / corpus.TOKENS)}

    @property
    def keys(self) -> dict[str, Any]:
        steps = self.steps
        design = dict(DESIGNS[self.design])
        first = {"name": "shared", "recipe": BASELINE, "until": design.pop("shared")}
        phases = [first, {"name": "compared"}] if first["until"] else []
        every = 20 if self.design == "plain" else 10 if self.size in RUNGS else 3
        if (self.size, self.ratio) == rungs.SHORT_CELL:
            every = 4
        run_keys = {
            "phases": [] if self.recipe == BASELINE else phases,
            "model_overrides": SHAPES[self.size],
            "recipe": self.source,
            "seed": self.seed,
            "steps": steps,
            "eval_every": math.ceil(steps / every),
            "save_every": max(200, math.ceil(steps / 4)),
            "telemetry_every": 0 if self.recipe == BASELINE else math.ceil(steps / 4),
        }
        if self.is_quantized and _shape(self.size).width >= WIDE:
            # The baseline's: on CPUs with bf16 instructions, wide models would compute in bf16.
            run_keys["recipe_overrides"] = {"compute_dtype": "fp32"}
        if self.size == TINY:
            run_keys["eval_windows"] = 16
        return self.usual_keys | run_keys | design

    @property
    def kept_every(self) -> int:
        """The number of steps between checkpoints of the float32 run, such that one of them is
        after the steps that the other runs of the trial share."""
        every: int = self.keys["save_every"]
        if (self.size, self.ratio) != rungs.SHORT_CELL:
            return every
        shared = replace(self, design=rungs.LAST_QUARTER).shared_steps
        return next(number for number in range(every, 0, -1) if shared % number == 0)

    def content(self, cpu: str) -> str:
        """A hash of everything that the run's figures depend on: its keys, the content of its
        recipe, its text, and the kind of CPU. Defaults are left out, so that a new key of recipes
        or models changes no hash."""
        keys = self.keys | {"recipe": self.recipe}  # independent of the path of its file
        if self.corpus is not None:
            keys["data"] = corpus.IDENTITY
        shape = _shape(self.size).model_dump(mode="json", exclude_defaults=True)
        content = json.dumps([keys, _recipe(self.source), shape, cpu], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        design = "" if self.design == SHARED else f"-{self.design.replace(' ', '-')}"
        return f"{self.size}-{self.ratio}-{self.recipe}-seed{self.seed}{design}"


@cache
def _shape(size: str) -> GPTConfig:
    return load_config(MODEL, SHAPES[size])


@cache
def _recipe(source: str) -> dict[str, Any]:
    return load_recipe(source).model_dump(
        mode="json", exclude={"description"}, exclude_defaults=True
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--runs", type=Path, default=Path("runs/study"), help="of runs under way, and the models "
        "that were trained in fp32 (default: %(default)s)")  # fmt: skip
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes of one thread each")
    add("--hours", type=float, default=math.inf, help="stop after so many (default: never)")
    more = f"some of the sizes, and of {', '.join(RUNGS)}, which take days (default: %(default)s)"
    add("--sizes", type=words, default=[*SIZES], metavar="A,B", help=more)
    add("--corpus", type=Path, default=Path("runs/corpus"), help="folder of the text of "
        "larger models; built if it is not there (default: %(default)s)")  # fmt: skip
    add("--table", action="store_true", help="train nothing: write the tables of what is there")
    add("--tiny", action="store_true", help="one model of 23 thousand parameters, to see it run")


def jobs(sizes: Sequence[str], text: Path | None = None) -> list[Job]:
    """All runs, the shortest first, except that the first pair of every cell comes early. `text` is
    the corpus of the larger models, which come last."""
    planned = []
    for size in (size for size in sizes if size not in RUNGS):
        for ratio in RATIOS if size != TINY else (1,):
            recipes = {TINY: ("mxfp4",), "0.9M": LADDER}.get(size, LADDER + ARMS)
            for seed in range(PAIRS.get(size, 2)):
                for recipe in (BASELINE, *recipes):
                    planned.append(Job(size=size, ratio=ratio, recipe=recipe, seed=seed))
            if (size, ratio) == FILES_CELL:
                files = sorted({file.stem for file in FILES.glob("*.toml")} - {*LADDER, *ARMS})
                every = ((recipe, seed) for seed in FILES_SEEDS for recipe in files)
                planned += [Job(size=size, ratio=ratio, recipe=r, seed=s) for r, s in every]
            if (size, ratio) == DESIGN_CELL:
                planned += _designs(size, ratio)
    planned.sort(key=lambda job: _shape(job.size).parameters() ** 2 * job.ratio * (job.seed or 0.1))
    if AA_CELL[0] in sizes:
        middle = next(
            n for n, job in enumerate(planned) if (job.ratio, job.seed) == (RATIOS[-1], 4)
        )
        planned[middle:middle] = _same_twice(*AA_CELL, AA_PAIRS)
    for size in (size for size in sizes if size in RUNGS):
        planned += _rung(size, text)
    return planned


def _rung(size: str, text: Path | None) -> Iterator[Job]:
    if size == SPREAD_CELL[0]:
        yield from _same_twice(*SPREAD_CELL, SPREAD_PAIRS, text)
        yield from _pairs(*rungs.SHORT_CELL, rungs.SHORT_DESIGNS, SHORT_PAIRS, text)
    yield from _pairs(size, RUNG_RATIO, rungs.DESIGNS, RUNG_PAIRS[size], text)


def _pairs(
    size: str, ratio: int, recipes: rungs.Designs, pairs: int, text: Path | None
) -> Iterator[Job]:
    for recipe, designs in {BASELINE: (SHARED,), **recipes}.items():
        for seed in range(pairs):
            for design in designs:
                place: Any = {"size": size, "ratio": ratio, "seed": seed, "corpus": text}
                yield Job(recipe=recipe, design=design, **place)


def _same_twice(size: str, ratio: int, pairs: int, text: Path | None = None) -> Iterator[Job]:
    """Pairs of float32 runs. The second run of a pair adds up its gradients in two parts and so
    rounds differently."""
    for seed in range(pairs):
        for design in ("plain", study_tables.AA):
            place: Any = {"size": size, "ratio": ratio, "seed": seed, "corpus": text}
            yield Job(recipe=BASELINE, design=design, **place)


def _designs(size: str, ratio: int) -> Iterator[Job]:
    for seed in range(DESIGN_PAIRS):
        for design in DESIGNS:
            if design not in (
                SHARED, study_tables.SCRATCH, study_tables.AA, rungs.LAST_QUARTER
            ):  # fmt: skip
                for recipe in (BASELINE, *DESIGN_RECIPES):
                    job = Job(size=size, ratio=ratio, recipe=recipe, seed=seed, design=design)
                    if recipe != BASELINE or job.trial[-1] == design:
                        yield job


def folder_of(arguments: argparse.Namespace) -> Path:
    """The folder of the results, which are all measured on CPUs."""
    out: Path = arguments.out
    return out / "cpu" if out.name == "results" else out


def run(arguments: argparse.Namespace) -> None:
    """Train the missing runs, and write the tables of all finished ones."""
    sizes = [TINY] if arguments.tiny else arguments.sizes
    for size in sizes:
        if size not in SHAPES:
            raise UserError(f"--sizes {quoted(size)}: there are {', '.join(SIZES | RUNGS)}.")
    text = arguments.corpus if not RUNGS.keys().isdisjoint(sizes) else None
    if text is not None and not arguments.table:
        corpus.require(text)
    folder = folder_of(arguments)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    cpu = machine(device="cpu")["machine"]
    try:
        if not arguments.table:
            rows = json_lines(path)
            remaining = left_of(jobs(sizes, text), rows, cpu)
            print(f"{len(remaining)} runs are to do, {len(rows)} are there", flush=True)
            _train(remaining, path, cpu, arguments)
    finally:
        print(_write(json_lines(path), folder))


def _write(rows: Sequence[Mapping[str, Any]], folder: Path) -> str:
    """Write the tables, and return the page."""
    larger = [row for row in rows if row["size"] in RUNGS]
    small = [row for row in rows if row["size"] not in RUNGS]
    section = rungs.section(larger, rungs.predictions())
    return study_tables.write(small, folder, [*study_tables.rounding(rows), *section])


def left_of(jobs: Sequence[Job], rows: Sequence[Mapping[str, Any]], cpu: str) -> list[Job]:
    """The jobs left to run on this kind of CPU. A pair that another kind of CPU has finished is not
    repeated, since it differs only in rounding. A float32 run is repeated if a new pair needs
    it."""
    known_keys = {row["key"] for row in rows}
    cpus = sorted({cpu} | {row["cpu"] for row in rows})
    bases = {job.trial: job for job in jobs if job.is_base}

    def is_made(job: Job) -> bool:
        base = bases[job.trial]
        return any(job.content(c) in known_keys and base.content(c) in known_keys for c in cpus)

    pairs = [job for job in jobs if not job.is_base and not is_made(job)]
    needed = {bases[job.trial] for job in pairs}.union(pairs)
    return [job for job in jobs if job in needed and job.content(cpu) not in known_keys]


# Training


def _train(remaining: list[Job], path: Path, cpu: str, arguments: argparse.Namespace) -> None:
    """Train the jobs in processes of one thread each, and add their figures to the file at `path`.

    Raises:
        UserError: runs failed for another reason than non-finite numbers, and must be repeated.
    """
    context = multiprocessing.get_context("spawn")
    queue, done = context.Queue(), context.Queue()
    for job in remaining:
        queue.put(job)
    count = max(1, min(arguments.workers, len(remaining)))
    for _ in range(count):
        queue.put(None)  # ends a worker
    queue.cancel_join_thread()  # a stopped study leaves most jobs unread
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    workers = [
        context.Process(target=_work, args=(queue, done, arguments.runs, cpu, os.getpid()))
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
                print(f"[{ended}/{len(remaining)}] {row['name']}: {_told(row)}", flush=True)
                if row["error"]:
                    failed.append(row["name"])
                else:
                    append_line(path, row)
            if stopped or time.monotonic() > until:
                _send(signal.SIGCONT, workers)
                _send(signal.SIGTERM, workers)  # the workers save their runs and end
                stopped, until = True, math.inf
            else:
                _send(signal.SIGSTOP if held_by_another() else signal.SIGCONT, workers)
        except KeyboardInterrupt:
            print("stopping: the same command goes on", flush=True)
            stopped = True
    if failed:
        raise UserError(f"Failed, and to be made again: {', '.join(failed)}.")
    if ended < len(remaining) and not stopped:
        codes = " or ".join(sorted({str(worker.exitcode) for worker in workers}))
        raise UserError(
            f"{len(remaining) - ended} runs are to be made: a process ended with exit code {codes}."
        )


def _told(row: Mapping[str, Any]) -> str:
    if row["error"]:
        return str(row["error"])
    loss = "" if row["val_loss"] is None else f", loss {row['val_loss']:.4f}"
    return f"{row['status']}{loss}, {row['seconds']:.0f} s"


def _send(signal_number: signal.Signals, workers: Sequence[Any]) -> None:
    for worker in workers:
        if worker.is_alive():
            os.kill(worker.pid, signal_number)


def beginning(job: Job, runs: Path) -> str:
    """The value of `resume` for a run: the checkpoint of the float32 run of its seed after the
    steps that they share, if it is there and the run has none yet, else "auto". Either way the run
    ends with the same bytes. (Delayed scaling takes the amaxes of the last shared steps.)"""
    shares = job.shared_steps and not job.is_base and not load_recipe(job.source).delayed
    if shares and not candidates(RunFolder(runs / job.name).checkpoints):
        base = replace(job, recipe=BASELINE, design=job.trial[-1])
        checkpoint = path_of(RunFolder(runs / base.name).checkpoints, job.shared_steps)
        if is_whole(checkpoint):
            return str(checkpoint)
    return "auto"


def _work(queue: Any, done: Any, runs: Path, cpu: str, parent: int) -> None:
    """Train one job after the other, until none is left, a signal arrives or the parent process is
    gone."""
    import fp8stack

    runs.mkdir(parents=True, exist_ok=True)
    while os.getppid() == parent:
        try:
            job = queue.get(timeout=5)
        except Empty:
            return
        if job is None:
            return
        folder = runs / job.name
        began, error, exit = time.process_time(), "", 0
        try:
            with (runs / f"{job.name}.log").open("a") as log, redirect_stdout(log):
                saves = {"save_every": job.kept_every}
                if job.is_base:  # keeps the checkpoints that other runs begin with
                    saves["keep_every"] = job.kept_every
                fp8stack.pretrain(out=str(folder), resume=beginning(job, runs), **job.keys | saves)
        except NumericFailure as failed:
            exit = failed.exit_code  # a failed training is a result
        except Preempted:
            _spent(folder, time.process_time() - began)
            return
        except UserError as failed:
            error, exit = str(failed), failed.exit_code
        seconds = _spent(folder, time.process_time() - began)
        row = _figures(job, folder, cpu, exit, seconds) | {"error": error}
        (runs / f"{job.name}.log").unlink(missing_ok=True)
        if not error:
            (runs / f"{job.name}.seconds").unlink(missing_ok=True)
        if (job.recipe, job.design) != (BASELINE, SHARED) and not error:
            shutil.rmtree(folder, ignore_errors=True)
        done.put(row)


def _spent(folder: Path, seconds: float) -> float:
    """Add the CPU time of this start of a run to that of earlier ones that were not killed. Returns
    the sum."""
    file = folder.with_name(f"{folder.name}.seconds")
    total = seconds + (float(file.read_text()) if file.exists() else 0.0)
    write_atomically(file, f"{total:.1f}".encode())
    return total


def _figures(job: Job, folder: Path, cpu: str, exit: int, seconds: float) -> dict[str, Any]:
    shape = _shape(job.size)
    results = read_run(
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
        "tokens": job.steps * job.tokens_per_step,
        "status": results.status,
        "val_loss": results.val_loss,
        "compute_dtype": results.plan.get("compute_dtype"),
        "curve": [[step, round(loss, 6)] for step, loss in results.curve],
        "skips": results.skips,
        "operand_errors": operand_errors(folder / "telemetry.jsonl"),
        "seconds": round(seconds, 1),
    }


def operand_errors(path: Path) -> dict[str, float]:
    """The mean relative squared error of each kind of operand, over layers and sampled steps. The
    first sample does not count, since delayed scaling starts with all scales at 1."""
    rows = [row for row in json_lines(path) if row.get("sqnr_db") is not None]
    first = min((row["step"] for row in rows), default=0)
    errors = {}
    for kind in OPERANDS:
        squared_errors = [
            10 ** (-row["sqnr_db"] / 10)
            for row in rows
            if row["operand"] == kind and row["step"] > first
        ]
        if squared_errors:
            errors[kind] = round(sum(squared_errors) / len(squared_errors), 9)
    return errors
