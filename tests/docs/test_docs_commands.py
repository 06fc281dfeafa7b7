"""Runs every command in the documents, made small by docs_runner.py.

The commands of a code block run in one session, in the same folder. Commands that take long
(several ranks, comparisons, scenarios of `python -m bench`) run completely only in slow tests; the
other tests only parse them, or run them on one rank.
"""

from __future__ import annotations

import os
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
from tests.docs import docs_checks as checks
from tests.docs import docs_runner as runner
from tests.docs.docs_commands import PAGES, ROOT, Command, blocks, commands
from tests.faults import harness

ALL = [command for page in PAGES for command in commands(page)]
HERE = [command for command in ALL if runner.not_run(command) is None]
_LAUNCHERS = ("torchrun", "accelerate")


def _launches(command: Command) -> bool:
    return any(f"{name} " in command.text for name in _LAUNCHERS) and "pip " not in command.text


def _measures(command: Command) -> bool:
    """Whether it is a scenario of `python -m bench`. Its `check` compares speeds with those that
    are committed: no test does that."""
    return command.text.startswith("python -m bench") and command.words[3:4] != ["check"]


def _compares(command: Command) -> bool:
    return command.text.startswith("fp8stack compare --")


def _estimates(command: Command) -> bool:
    """Whether it looks for the largest batch, by an estimate of many."""
    return command.text.startswith("fp8stack estimate")


def _draws(command: Command) -> bool:
    """Whether it draws the page of a report, as tests of reports do."""
    return command.text.startswith("fp8stack report") and "--text" not in command.text


def _kills(command: Command) -> bool:
    return command.text.startswith("python -m tests.faults.harness")


# Slow: starting ranks takes 10 s and more, scenarios measure even in their short form, a comparison
# starts a process for each run, a largest batch is looked for in seconds, a fault kills a process,
# and a report draws for 5 s and more.
LONG = (_launches, _measures, _compares, _estimates, _draws, _kills)
SLOW = [command for command in HERE if any(is_long(command) for is_long in LONG)]


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
        self.folders: dict[tuple[str, int], Path] = {}
        self.done: set[Command] = set()

    def folder(self, command: Command) -> Path:
        """The folder to run a command in, with the files that the documents mention."""
        key = (command.page, -1 if command.block is None else command.block)
        if command.block is None or key not in self.folders:
            mates = [c for c in ALL if c.page == command.page and c.block == command.block]
            self.folders[key] = self.factory.mktemp("session")
            made_here = [command] if command.block is None else mates
            runner.furnish(self.folders[key], self.goods, made_here)
        return self.folders[key]

    def before(self, command: Command) -> list[Command]:
        """Earlier commands of the same block that have not run yet."""
        if command.block is None:
            return []
        mates = [c for c in HERE if (c.page, c.block) == (command.page, command.block)]
        return [c for c in mates[: mates.index(command)] if c not in self.done]


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
    if command.text.startswith("python - <<"):
        code = "".join(command.text.splitlines(keepends=True)[1:-1])
        exec(compile(code, command.place, "exec"), {"__name__": "__main__"})
        return
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
        checks.check_pip(arguments[1:])
    elif program == "pytest":
        checks.check_pytest(arguments)
    elif program == "make":
        checks.check_target(arguments)
    elif program in _LAUNCHERS:
        _, launched = runner.launched(words)
        launched = launched[launched.index("pretrain") :]
        assert exit_code(*runner.scaled(launched)) == 0
    elif words[:3] == ["python", "-m", "bench"]:
        checks.check_bench(words[3:], folder)
    elif _kills(command):
        assert harness.parse(words[3])
        assert exit_code(*runner.scaled(words[5:])) == 0
    elif program == "fp8stack" or words[:3] == ["python", "-m", "fp8stack"]:
        _fp8stack(arguments if program == "fp8stack" else arguments[2:], command, monkeypatch)
    else:
        pytest.fail(f"{command.place}: nobody knows how to check {command.text}")


def _fp8stack(words: list[str], command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    if command.block is None and runner.check_name(words, exit_code):
        return
    if _compares(command):
        from fp8stack.analysis.compare import comparison

        monkeypatch.setattr(comparison, "compare", lambda comparison: 0)
    if _estimates(command):
        monkeypatch.setattr(Footprint, "largest", lambda *arguments: 1)
    if _draws(command):
        import fp8stack.analysis.report

        monkeypatch.setattr(fp8stack.analysis.report, "report", _runs_are_there)
    assert exit_code(*runner.scaled(words)) == 0


def _runs_are_there(runs: list[Path], out: str | None, text: bool, as_json: bool) -> None:
    """In place of a report's drawing."""
    assert all((run / "metrics.jsonl").exists() for run in runs)


def _be_killed(words: list[str], folder: Path) -> None:
    """A fault that kills: its run, not made shorter, or the fault would never come."""
    small = [*words, *runner.SMALL, *runner.RUN, "--context=16"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = [sys.executable, "-m", "tests.faults.harness", *small]
    done = subprocess.run(started, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("command", SLOW, ids=lambda command: command.place)
def test_a_command_that_takes_longer_runs_too(command, sessions, monkeypatch):
    folder = sessions.folder(command)
    monkeypatch.chdir(folder)
    for earlier in sessions.before(command):
        sessions.done.add(earlier)
        _run(earlier, folder, monkeypatch)
    sessions.done.add(command)
    if command.script:
        runner.run_script(command.text, folder, launch=True)
        return
    words = runner.substituted(command.words)
    named = command.block is None and words[0] == "fp8stack"
    if named and runner.check_name(words[1:], exit_code):
        return
    on_a_gpu = words[3:4] in (["golden"], ["gpu"]) and "--dry-run" not in words
    if on_a_gpu and not torch.cuda.is_available():
        pytest.skip("measures a GPU")
    if _kills(command):
        _be_killed(words[3:], folder)
        return
    if words[0] == "fp8stack":
        words = [sys.executable, "-m", "fp8stack", *runner.scaled(words[1:])]
    elif words[0] in _LAUNCHERS:
        words = runner.on_two_ranks(words)
    elif words[3:]:
        words = [sys.executable, *words[1:], *_short(words[3:])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]


@pytest.mark.parametrize(
    "words", [c.words[3:] for c in SLOW if _measures(c) and c.words[3:]], ids=lambda words: words[0]
)
def test_a_scenario_has_the_options_of_its_quick_form(words, tmp_path):
    checks.check_bench([*words, *_short(words)], tmp_path)


def test_every_command_that_is_not_run_has_a_reason_and_is_in_the_documents():
    assert len(HERE) > 80
    assert all(runner.NOT_RUN.values())
    reasons = {command.text: runner.not_run(command) for command in ALL if command not in HERE}
    assert len(reasons) < len(HERE) / 5


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
def test_the_python_of_the_documents_runs(place, code, goods, tmp_path, monkeypatch):
    runner.furnish(tmp_path, goods, [])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fp8stack, "pretrain", _small_pretrain)
    exec(compile(code, place, "exec"), {"__name__": "__main__"})


def test_an_unknown_placeholder_is_not_let_through():
    with pytest.raises(AssertionError, match="what does FILE stand for"):
        runner.substituted(["fp8stack", "report", "FILE"])
    with pytest.raises(AssertionError, match="what does <run> stand for"):
        runner.substituted(["fp8stack", "report", "<run>"])
    assert runner.substituted(["fp8stack", "report", "RUN"])[2] == "runs/gpt-nano-delayed"


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


def test_a_block_in_a_language_that_nobody_runs_is_an_error():
    with pytest.raises(ValueError, match="a code block in 'zsh'"):
        commands("a.md", "```zsh\nfp8stack plan\n```\n")


def test_a_command_that_fails_is_noticed(sessions, monkeypatch):
    wrong = Command("README.md", 1, "fp8stack plan --model no-such-model", 99)
    with pytest.raises(AssertionError):
        _run(wrong, sessions.folder(wrong), monkeypatch)
    with pytest.raises(pytest.fail.Exception, match="nobody knows how to check"):
        _run(Command("README.md", 1, "frobnicate all", 99), Path(), monkeypatch)
    with pytest.raises(AssertionError, match="no extra gpus"):
        _run(Command("README.md", 1, "pip install '.[gpus]'", 99), Path(), monkeypatch)


def _short(words: list[str]) -> list[str]:
    """The options of a scenario's quick form."""
    options = {"reliability": ["--short", "--only=R3"], "golden": []}
    options["gpu"] = ["--part=1"] if "--dry-run" in words else []
    options["gpu-code"] = ["--models=gpt2-124m", "--recipes=delayed", "--capabilities=9.0"]
    options["emulation"] = ["--tiny", "--rounds=6", "--budget=1", "--compiled=delayed"]
    return [*options.get(words[0], ["--tiny"]), "--out", "measured"]
