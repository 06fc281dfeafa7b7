"""Makes commands of the documents small: fewer steps of a smaller model on small files.

The flags of a command are kept; flags added at the end override them and make it cheap.
docs_commands.py finds the commands.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tests.docs.docs_commands import ROOT, Command

Invoke = Callable[..., int]  # `fp8stack` with these words, in this process: its exit code

MODEL = {"layers": 2, "width": 32, "heads": 2, "kv_heads": 2, "mlp_width": 64}
SMALL = [f"--set=model_overrides.{key}={value}" for key, value in MODEL.items()]
RUN = ["--set=eval_windows=2", "--set=sample_tokens=4", "--set=warmup_steps=1"]

PLACEHOLDERS = {"RUN": "runs/gpt-nano-delayed", "X.Y": "9.0", "N": "2"}
_PLACEHOLDER = re.compile(r"<[^<>|]+>|[A-Z][A-Z_.]*$")


def substituted(words: Sequence[str]) -> list[str]:
    """`words` with values in place of placeholders and alternatives.

    Raises:
        AssertionError: a placeholder has no value here.
    """
    if words[0] == "torchrun" and "..." in words and "-m" not in words:
        words = [words[0], "--nproc-per-node=2", "-m", "fp8stack", "pretrain", *words[2:]]
    result = [PLACEHOLDERS.get(word, word) for word in words if word not in ("...", "…")]
    result = [re.sub(r"^(\w+)\|[\w|]+$", r"\1", word) for word in result]
    for word in result:
        assert not _PLACEHOLDER.fullmatch(word), f"what does {word} stand for? docs_runner.py"
    return result


def scaled(words: Sequence[str]) -> list[str]:
    """The words of a `fp8stack` command, and words that make it small."""
    words = [re.sub(r"^/shared/", "shared/", word) for word in words]
    command = words[0]
    if command == "pretrain" and "--resume" in words and _is_there(words):
        return [*words, f"--steps={_steps(words)}"]
    if command == "pretrain":
        return [*words, *SMALL, *RUN, f"--steps={_steps(words)}", *_sizes(words)]
    small = {"generate": ["--tokens=4"]}
    small["conform"] = ["--quick", f"--only={'quantizers' if '--recipe' in words else 'layouts'}"]
    return [*words, *small.get(command, [])]


def _is_there(words: Sequence[str]) -> bool:
    """Whether the run to resume exists; then it is already small."""
    values = dict(itertools.pairwise(words))
    return (Path(values.get("--out", values["--resume"])) / "run.toml").is_file()


def _steps(words: Sequence[str]) -> int:
    """Enough steps for phases of each kind, a profile or a resumption; else two."""
    most = {"--phases": 10, "--profile": 6, "--resume": 4}
    return next((steps for flag, steps in most.items() if flag in words), 2)


def _sizes(words: Sequence[str]) -> list[str]:
    """Flags for a small batch and context, unless `words` set smaller ones."""
    values = dict(itertools.pairwise(words))
    most = {"--batch": 8, "--context": 32}
    return [f"{flag}={n}" for flag, n in most.items() if int(values.get(flag, n)) >= n]


def make_goods(folder: Path, invoke: Invoke) -> None:
    """Create the files that the documents mention in `folder`, under the same names."""
    stories = [f"Once there was a number {n}, and it was {n * n} squared.\n" for n in range(200)]
    (folder / "texts").mkdir(parents=True)
    (folder / "texts" / "a.txt").write_text("".join(stories))
    rows = "".join(json.dumps({"text": story * 3}) + "\n" for story in stories)
    (folder / "texts" / "b.jsonl").write_text(rows)
    shutil.copytree(folder / "texts", folder / "corpus")
    (folder / "book.txt").write_text("".join(stories))
    ids = np.random.default_rng(0).integers(0, 256, 4000)
    ids.astype("<u2").tofile(folder / "tokens.bin")
    texts, tokens = str(folder / "texts"), str(folder / "tokens")
    assert invoke("prepare", texts, "--tokenizer", "bytes", "--out", tokens) == 0
    run = folder / "runs" / "gpt-nano-delayed"
    assert invoke(*scaled(["pretrain", "--recipe", "delayed", "--out", str(run)])) == 0
    for name in ("a", "b", "c", "x"):
        shutil.copytree(run, folder / "runs" / name)
    lines = (run / "run.toml").read_text().splitlines()
    config = "\n".join(line for line in lines if not line.startswith("out "))
    (folder / "run.toml").write_text(config + "\n")


def furnish(folder: Path, goods: Path, commands: Sequence[Command]) -> None:
    """Copy the files of `make_goods` to `folder`, except those that `commands` will write."""
    shutil.copytree(goods, folder, dirs_exist_ok=True)
    for command in commands:
        for flag, value in itertools.pairwise(command.text.split()):
            if flag == "--out" and "--resume" not in command.text:
                shutil.rmtree(folder / value, ignore_errors=True)


def launched(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The module that torchrun or `accelerate launch` runs, and its arguments. The launcher's own
    parser reads its options."""
    if words[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        options = get_args_parser().parse_args(words[1:])
    else:
        from accelerate.commands.launch import launch_command_parser

        options = launch_command_parser().parse_args(words[2:])
    assert options.module, "launched otherwise than by -m"
    return [options.training_script], list(options.training_script_args)


_NOTE = '(printf "%s\\0" "$@"; echo) >> calls.txt'
SHIMS = {
    "fp8stack": _NOTE,
    "torchrun": f'set -- torchrun "$@"; {_NOTE}',
    "srun": 'exec "$@"',
    "scontrol": '[ "$1" = show ] && echo localhost || echo "$@" >> requeued.txt',
    "sleep": ":",
}
SLURM = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1"}
SLURM |= {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


def run_script(text: str, folder: Path) -> list[list[str]]:
    """Run a shell script with stand-ins for the programs that it starts. Returns the words that
    `fp8stack` and torchrun are called with."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name, body in SHIMS.items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **SLURM, "PATH": path, "PYTHONPATH": str(ROOT)}
    words = ["bash", "-c", text]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    calls = folder / "calls.txt"
    lines = calls.read_text().splitlines() if calls.exists() else []
    return [line.split("\0")[:-1] for line in lines]
