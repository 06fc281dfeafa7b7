"""Runs the commands of the documents, made small: fewer steps of a smaller model on small files.

The flags of a command are kept; flags added at the end override them and make it cheap. As a
program, this file stands in for `fp8stack` or a launcher in a shell script of a document.
docs_commands.py finds the commands.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tests.docs.docs_commands import Command

Invoke = Callable[..., int]  # `fp8stack` with these words, in this process: its exit code

MODEL = {"layers": 2, "width": 32, "heads": 2, "kv_heads": 2, "mlp_width": 64}
SMALL = [f"--set=model_overrides.{key}={value}" for key, value in MODEL.items()]
RUN = ["--set=eval_windows=2", "--set=sample_tokens=4", "--set=warmup_steps=1"]

PLACEHOLDERS = {"RUN": "runs/gpt-nano-delayed", "X.Y": "9.0", "N": "2"}
_PLACEHOLDER = re.compile(r"<[^<>|]+>|[A-Z][A-Z_.]*$")

# Commands, or beginnings of commands, that are not run, each with the reason.
NOT_RUN = {
    "git clone ": "the repository is here",
    "cd ": "tests have a folder of their own",
    "python3 -m venv .venv": ".ci/run makes a fresh environment",
    ". .venv/bin/activate": ".ci/run makes a fresh environment",
    "python -m bench law": "replaces the law of this checkout; tests/bench fits it",
    "fp8stack prepare hf:HuggingFaceFW/fineweb:sample-10BT "
    "--tokenizer gpt2 --out fineweb": "downloads a data set",
    "torchrun --nproc-per-node 8 ": "needs eight GPUs and that data set",
}


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
    if command == "compare":
        return [*words, *SMALL, *RUN, "--steps=2", "--seeds=1", *_sizes(words)]
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


# Files that the documents mention


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
    """Copy the files of `make_goods` to `folder`, except files that `commands` will write."""
    written = {
        mate
        for command in commands
        if "--resume" not in command.text
        for flag, mate in itertools.pairwise(command.text.split())
        if flag == "--out"
    }
    for path in [*goods.glob("[!r]*"), goods / "run.toml", *(goods / "runs").iterdir()]:
        name = path.relative_to(goods)
        if str(name) in written:
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, folder / name)
        else:
            shutil.copy(path, folder / name)


# Checks by kind of command


def not_run(command: Command) -> str | None:
    """The reason that a command is not run; None if it runs."""
    for start, reason in NOT_RUN.items():
        if command.text == start or (start.endswith(" ") and command.text.startswith(start)):
            return reason
    return None


def check_name(words: Sequence[str], invoke: Invoke) -> bool:
    """Whether `words` only name a command, or a flag of it. Checks then that both exist."""
    flag = words[-1].startswith("--") and not _is_switch(words)
    if not flag and len(words) > (2 if words[0] == "bench" else 1):
        return False
    assert invoke(*(words[:-1] if flag else words), "--help") == 0
    return True


def _is_switch(words: Sequence[str]) -> bool:
    """Whether the last word is a flag of the command that takes no value.

    Raises:
        AssertionError: the command has no such flag.
    """
    from typer.main import get_command

    from fp8stack.cli import app as cli

    parsed = get_command(cli.app)
    for word in words:
        parsed = getattr(parsed, "commands", {}).get(word, parsed)
    for parameter in parsed.params:
        if words[-1] in (*parameter.opts, *parameter.secondary_opts):
            return bool(getattr(parameter, "is_flag", False))
    raise AssertionError(f"{' '.join(words)}: no such flag")


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


def on_two_ranks(words: Sequence[str]) -> list[str]:
    """The command that replaces torchrun or `accelerate launch`: two small ranks on the CPU."""
    (module,), arguments = launched(words)
    at = arguments.index("pretrain")
    arguments = [*arguments[:at], *scaled(arguments[at:]), "--device=cpu", "--set=rank_timeout=60"]
    if words[0] == "accelerate":
        launcher_flags = [word for word in words[2 : words.index("-m")] if word != "--multi_gpu"]
        launcher = ["accelerate.commands.launch", "--cpu", *launcher_flags]
        return [sys.executable, "-m", *launcher, "-m", module, *arguments]
    restarts = [w for k, w in enumerate(words) if "--max-restarts" in (w, words[k - 1])]
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", *restarts]
    return [sys.executable, "-m", *launcher, "-m", module, *arguments]


# Shell scripts


_BE = f'exec "{sys.executable}" -m tests.docs.docs_runner'
_NOTE = '(printf "%s\\0" "$@"; echo) >> calls.txt'
SHIMS = {
    "fp8stack": (f"{_NOTE}", f'{_BE} fp8stack "$@"'),
    "torchrun": (f'set -- torchrun "$@"; {_NOTE}', f'{_BE} torchrun "$@"'),
    "srun": ('exec "$@"',) * 2,
    "scontrol": ('[ "$1" = show ] && echo localhost || echo "$@" >> requeued.txt',) * 2,
    "sleep": (":",) * 2,
}
SLURM = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1"}
SLURM |= {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


def run_script(text: str, folder: Path, *, launch: bool) -> list[list[str]]:
    """Run a shell script of a document.

    Args:
        launch: whether `fp8stack` and torchrun (on two ranks) run, made small. Otherwise the words
            that they are called with are returned.
    """
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name, bodies in SHIMS.items():
        (programs / name).write_text(f"#!/bin/sh\n{bodies[launch]}\n")
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    root = str(Path(__file__).parents[2])
    modules = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, **SLURM, "PATH": path, "PYTHONPATH": modules}
    words = ["bash", "-c", text]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    calls = folder / "calls.txt"
    lines = calls.read_text().splitlines() if calls.exists() else []
    return [line.split("\0")[:-1] for line in lines]


def main() -> None:
    """Stand in for `fp8stack` or torchrun in a script, with words that make it small."""
    program, *words = sys.argv[1:]
    if program == "torchrun":
        raise SystemExit(subprocess.run(on_two_ranks([program, *words])).returncode)
    from fp8stack.cli import app as cli

    cli.main(scaled(words))


if __name__ == "__main__":
    main()
