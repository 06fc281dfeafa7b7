"""The first visit to a new GPU: `bench gpu --minutes 9`, or `bench gpu --part 1`. What it runs, the
most valuable first; how it runs is in `visit`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from bench.gpu.visit import DRY_PATIENCE, Task, Visit

MINUTES = 9.0  # of a part, by default: machines that are lent limit a command to ten
PARTS = {
    1: "the machine, steps of gpt2-1.5b with all kernels, operations by themselves",
    2: "steps by tokens and by layers",
    3: "tests of kernels, plans and waiting; losses",
    4: "peers, and steps in every recipe",
    5: "conform, and the other tests",
}


def steps(part_number: int, options: str, seconds: float) -> Task:
    """Training steps of a model in turns."""
    words = f"bench.gpu.steps --out {{out}}/steps.jsonl {options}"
    name = f"steps {options.replace('--', '')}"
    return Task(part_number, name, words, seconds, "--dry-run")


def micro(groups: str, seconds: float) -> Task:
    """Operations by themselves."""
    words = f"bench.gpu.micro --out {{out}}/micro.jsonl --groups {groups} --seconds {seconds - 15}"
    name = f"operations: {groups}"
    return Task(1, name, words, seconds, "--dry-run")


def tests(part_number: int, names: str, seconds: float) -> Task:
    """The GPU tests of these names, side by side; a dry run only imports and collects them."""
    files = " ".join(f"tests/gpu/test_gpu_{name}.py" for name in names.split(","))
    words = f"pytest -q -p no:cacheprovider -n 4 {files}"
    dry = "-n 0 -p tests.support.pretend_gpu --collect-only"
    return Task(part_number, f"tests: {names}", words, seconds, dry)


EVERY = "delayed,current,block,rowwise,nvfp4,mxfp8"
LLAMA = "--model llama-8b --batch 1 --context 8192"
TINY_RUN = (
    "--model gpt-nano --steps 2 --batch 2 --context 32 --set model_overrides.layers=1 "
    "--set eval_windows=2 --set sample_tokens=0 --set warmup_steps=1 --device cpu"
)
TASKS = (
    micro("machine", 60),
    steps(1, "--batch 4 --profile", 260),
    steps(1, "--batch 1 --context 128 --profile", 120),
    micro("gemms,attention,optimizer", 120),
    micro("casts,elementwise", 150),
    micro("tiles", 120),
    steps(2, "--batch 16 --profile", 180),
    steps(2, "--batch 16 --no-graphs", 120),
    steps(2, f"{LLAMA} --layers 2 --profile", 150),
    steps(2, f"{LLAMA} --layers 4", 150),
    steps(2, "--batch 32", 180),
    tests(3, "kernels,sync,plan", 400),
    Task(3, "losses", "fp8stack compare --model gpt2-124m --recipes bf16,delayed,current,block "
        "--baseline bf16 --seeds 1 --steps 200 --batch 8 --context 1024 --lr 6e-4 "
        "--out {out}/losses", 300, f"{TINY_RUN} --recipes bf16,delayed"),
    steps(4, "--recipes bf16,delayed,plain,torchao", 400),
    steps(4, f"--model gpt2-124m --batch 32 --recipes bf16,{EVERY}", 400),
    steps(4, f"{LLAMA} --layers 2 --recipes bf16,delayed,current --head --profile", 200),
    Task(5, "doctor", "fp8stack doctor --json", 60),
    Task(5, "conform", "fp8stack conform --device cuda --out {out}/conform.json", 300,
        "--quick --device cpu --only 'gemms: '"),
    tests(5, "telemetry,training", 400),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    contents = "; ".join(f"{number}: {text}" for number, text in PARTS.items())
    add("--part", type=int, choices=list(PARTS), help=f"one part alone ({contents})")
    add("--minutes", type=float, metavar="N", help=f"for everything (default: {MINUTES:g} a part)")
    add("--dry-run", action="store_true", help="on a CPU, with tiny sizes")
    add("--archives", type=Path, metavar="FOLDER",
        help="gets the results after each task in archives of at most 15 MiB")  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    """Run a part, or all parts. Exits with code 1 if a task failed or is left."""
    if not arguments.dry_run and (not torch.cuda.is_available() or torch.version.hip is not None):
        print("python -m bench gpu needs a CUDA GPU, and torch finds none here.")
        raise SystemExit(2)
    tasks = [task for task in TASKS if arguments.part in (None, task.part_number)]
    count = len({task.part_number for task in tasks})
    minutes = arguments.minutes or MINUTES * count * (DRY_PATIENCE if arguments.dry_run else 1.0)
    if not Visit(arguments.out, 60 * minutes, arguments.dry_run, arguments.archives).run(tasks):
        raise SystemExit(1)
