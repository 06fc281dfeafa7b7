"""Runs every command in the documents, made small by docs_runner.py.

The commands of a code block run in one session, in the same folder. Commands that take long
(several ranks, comparisons, scenarios of `python -m bench`) run completely only in slow tests; the
other tests only parse them, or run them on one rank.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8stack
from fp8stack.training.memory_check import Footprint
from fp8stack.training.pretrain import pretrain
from tests.conftest import exit_code
from tests.docs import docs_runner as runner
from tests.docs.docs_checks import check_bench, check_pip
from tests.docs.docs_commands import PAGES, ROOT, Command, blocks, commands
from tests.faults import harness

ALL = [command for page in PAGES for command in commands(page)]
HERE = [command for command in ALL if runner.not_run(command) is None]
# Slow: starting ranks takes 10 s and more, scenarios measure even in their short form, a comparison
# starts a process for each run, a largest batch is looked for in seconds, a fault kills a process,
# and a report draws for 5 s and more. (`bench check` compares speeds with committed ones: no test.)
LONG = {
    "launch": r"(?!.*\bpip ).*\b(torchrun|accelerate) ",
    "bench": r"python -m bench(?! check)",
    "compare": r"fp8stack compare --",
    "estimate": r"fp8stack estimate",
    "report": r"fp8stack report",
    "fault": r"python -m tests\.faults\.harness",
}


def kind(command: Command) -> str | None:
    """The kind of a command that takes long; None for others."""
    return next((name for name, start in LONG.items() if re.match(start, command.text, re.S)), None)


@pytest.fixture(scope="module")
def goods(tmp_path_factory, one_thread) -> Path:
    """Small versions of the files that the documents mention."""
    folder = tmp_path_factory.mktemp("goods")
    runner.make_goods(folder, exit_code)
    return folder


class Sessions:
    """The folders of code blocks, and the commands that have run in them."""

    def __init__(self, goods: Path, factory: pytest.TempPathFactory) -> None:
        self.goods = goods
        self.factory = factory
        self.folders: dict[tuple[str, int | None], Path] = {}
        self.done: set[Command] = set()

    def folder(self, command: Command) -> Path:
        """The folder to run a command in, with the files that the documents mention."""
        key = (command.page, command.block)
        if command.block is None or key not in self.folders:
            self.folders[key] = self.factory.mktemp("session")
            runner.furnish(self.folders[key], self.goods, mates(command, ALL))
        return self.folders[key]

    def before(self, command: Command) -> list[Command]:
        """Earlier commands of the same block that have not run yet."""
        block = mates(command, HERE)
        return [c for c in block[: block.index(command)] if c not in self.done]


def mates(command: Command, among: list[Command]) -> list[Command]:
    """The commands of the same block; inline code stands alone."""
    if command.block is None:
        return [command]
    return [c for c in among if (c.page, c.block) == (command.page, command.block)]


@pytest.fixture(scope="module")
def sessions(goods, tmp_path_factory) -> Sessions:
    return Sessions(goods, tmp_path_factory)


@pytest.mark.parametrize("command", HERE, ids=lambda command: command.place)
def test_a_command_of_the_documents_runs(command, sessions, monkeypatch):
    folder = sessions.folder(command)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for current in (*sessions.before(command), command):
        sessions.done.add(current)
        _run(current, folder, monkeypatch)


def _run(command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if command.script:
        reads = " > " in command.text  # what the command prints
        for words in runner.run_script(command.text, folder, launch=reads):
            words = runner.launched(words)[1] if words[0] == "torchrun" else words
            assert exit_code(*runner.scaled(words)) == 0
        return
    words = runner.substituted(command.words)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    program, *arguments = words
    if program == "pip":
        assert arguments[0] == "install"
        check_pip(arguments[1:])
    elif kind(command) == "launch":
        _, launched = runner.launched(words)
        launched = launched[launched.index("pretrain") :]
        assert exit_code(*runner.scaled(launched)) == 0
    elif words[:3] == ["python", "-m", "bench"]:
        check_bench(words[3:], folder)
    elif kind(command) == "fault":
        assert harness.parse(words[3])
        assert exit_code(*runner.scaled(words[5:])) == 0
    elif program == "fp8stack" or words[:3] == ["python", "-m", "fp8stack"]:
        _fp8stack(arguments if program == "fp8stack" else arguments[2:], command, monkeypatch)
    else:
        pytest.fail(f"{command.place}: nobody knows how to check {command.text}")


def _fp8stack(words: list[str], command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    if command.block is None and runner.check_name(words, exit_code):
        return
    if kind(command) == "compare":
        from fp8stack.analysis.compare import comparison

        monkeypatch.setattr(comparison, "compare", lambda comparison: 0)
    if kind(command) == "estimate":
        monkeypatch.setattr(Footprint, "largest", lambda *arguments: 1)
    if kind(command) == "report":
        import fp8stack.analysis.report

        monkeypatch.setattr(fp8stack.analysis.report, "report", _runs_are_there)
    assert exit_code(*runner.scaled(words)) == 0


def _runs_are_there(runs: list[Path], *options: Any) -> None:
    """In place of a report's drawing."""
    assert all((run / "metrics.jsonl").exists() for run in runs)


SLOW = [command for command in HERE if kind(command)]


@pytest.mark.slow
@pytest.mark.parametrize("command", SLOW, ids=lambda command: command.place)
def test_a_command_that_takes_longer_runs_too(command, sessions, monkeypatch):
    folder = sessions.folder(command)
    monkeypatch.chdir(folder)
    for earlier in sessions.before(command):
        _run(earlier, folder, monkeypatch)
    sessions.done |= {*sessions.before(command), command}
    if command.script:
        runner.run_script(command.text, folder, launch=True)
        return
    words = runner.substituted(command.words)
    if command.block is None and words[0] == "fp8stack" and runner.check_name(words[1:], exit_code):
        return
    on_a_gpu = words[3:4] in (["golden"], ["gpu"]) and "--dry-run" not in words
    if on_a_gpu and not torch.cuda.is_available():
        pytest.skip("measures a GPU")
    expected = 0
    if kind(command) == "fault":  # not made shorter, or the fault would never come
        words = [sys.executable, *words[1:], *runner.SMALL, *runner.RUN, "--context=16"]
        expected = -9
    elif words[0] == "fp8stack":
        words = [sys.executable, "-m", "fp8stack", *runner.scaled(words[1:])]
    elif kind(command) == "launch":
        words = runner.on_two_ranks(words)
    elif words[3:]:
        words = [sys.executable, *words[1:], *_short(words[3:])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == expected, (done.stdout + done.stderr)[-2000:]


def _short(words: list[str]) -> list[str]:
    """The options of a scenario's quick form."""
    options = {"reliability": ["--short", "--only=R3"], "golden": []}
    options["gpu"] = ["--part=1"] if "--dry-run" in words else []
    options["gpu-code"] = ["--models=gpt2-124m", "--recipes=delayed", "--capabilities=9.0"]
    options["emulation"] = ["--tiny", "--rounds=6", "--budget=1", "--compiled=delayed"]
    return [*options.get(words[0], ["--tiny"]), "--out", "measured"]


def test_every_command_that_is_not_run_has_a_reason_and_is_in_the_documents():
    starts = [start for start in runner.NOT_RUN if not any(c.text.startswith(start) for c in ALL)]
    assert starts == []
    assert len(ALL) - len(HERE) < len(HERE) / 5


def _small_pretrain(config: str | None = None, **keys: Any) -> Path:
    """`fp8stack.pretrain`, made small."""
    small = {"steps": 2, "eval_windows": 2, "sample_tokens": 4, "model_overrides": runner.MODEL}
    return pretrain(config, **{**keys, **small})


PYTHON = [
    (f"{page}:{block.line}", block.text)
    for page in PAGES
    for block in blocks((ROOT / page).read_text(encoding="utf-8"))
    if block.language == "python"
]


@pytest.mark.parametrize(("place", "code"), PYTHON, ids=[place for place, _ in PYTHON])
@pytest.mark.full
def test_the_python_of_the_documents_runs(place, code, goods, tmp_path, monkeypatch):
    runner.furnish(tmp_path, goods, [])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fp8stack, "pretrain", _small_pretrain)
    exec(compile(code, place, "exec"), {"__name__": "__main__"})


PAGE = """
Text with `fp8stack plan
--model gpt-nano` and `torch`.

```
step 1/2 | loss 1.0
```

```
$ fp8stack doctor --json
{}
```

```bash
fp8stack plan \\
    --json  # as JSON
rm -rf runs && fp8stack report runs/x
```

```bash
cat > a.toml <<'END'
width = 64
END
fp8stack plan --model ./a.toml
```

| `fp8stack eval RUN` | `a\\|b` |
"""


def test_commands_are_found_wherever_they_stand():
    places = [(command.line, command.text, command.block) for command in commands("a.md", PAGE)]
    assert places == [
        (2, "fp8stack plan --model gpt-nano", None),
        (10, "fp8stack doctor --json", 1),
        (15, "fp8stack plan --json  # as JSON", 2),
        (17, "rm -rf runs", 2),
        (17, "fp8stack report runs/x", 2),
        (21, "cat > a.toml <<'END'\nwidth = 64\nEND\n", 3),
        (24, "fp8stack plan --model ./a.toml", 3),
        (27, "fp8stack eval RUN", None),
    ]
    with pytest.raises(ValueError, match="a code block in 'zsh'"):
        commands("a.md", "```zsh\nfp8stack plan\n```\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp8stack plan --model no-such-model", ""),
        ("fp8stack report FILE", "what does FILE stand for"),
        ("frobnicate all", "nobody knows how to check"),
        ("pip install '.[gpus]'", "no extra gpus"),
    ],
)
def test_a_command_that_cannot_run_is_noticed(text, message, sessions, monkeypatch):
    command = Command("README.md", 1, text, 99)
    with pytest.raises((AssertionError, pytest.fail.Exception), match=message):
        _run(command, sessions.folder(command), monkeypatch)
