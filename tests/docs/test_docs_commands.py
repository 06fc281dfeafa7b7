"""Parses every command in the documents, and runs those that take seconds, made small by
docs_runner.py. The commands of a code block run in one folder."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

import fp8stack
from bench import runner as bench
from fp8stack.cli.app import app
from fp8stack.training.pretrain import pretrain
from tests.conftest import exit_code
from tests.docs import docs_runner as runner
from tests.docs.docs_commands import PAGES, ROOT, Command, blocks, commands
from tests.faults import harness

ALL = [command for page in PAGES for command in commands(page)]
PARSERS: Any = typer.main.get_command(app)
# Beginnings of commands that are not checked.
NOT_CHECKED = ("git clone ", "cd ", "python3 -m venv .venv", ". .venv/bin/activate")
OTHERS_PACKAGES = {"vllm", "lm-eval", "lm_eval", "twine"}  # that no extra installs
# Commands that are parsed and not run: they start processes or measure, draw for seconds, look for
# a largest batch, or download. (`bench check` compares speeds with committed ones: no test.)
LONG = re.compile(
    r"(\w+=\S* )*(torchrun|accelerate|pip|python|python3|git|cd|\.) "
    r"|fp8stack (compare --|estimate|report|bench|prepare hf:)"
)


def check_pip(words: Sequence[str]) -> None:
    """Check that pip installs an extra of fp8stack, or a package that an extra requires."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    listed = [*project["dependencies"], *itertools.chain(*extras.values())]
    names = {re.split(r"[\[<>=!~; ]", requirement)[0].lower() for requirement in listed}
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower().splitlines()
    values = iter(words)
    for word in values:
        if word in ("-c", "--index-url", "--target"):
            value = next(values)
            assert word != "-c" or (ROOT / value).is_file(), value
        elif word.startswith((".", "dist/fp8stack", "/")):
            assert set(re.findall(r"[\w-]+", word.partition("[")[2])) <= extras.keys(), word
        elif not word.startswith("-"):
            name = re.split(r"[\[<>=!~ ]", word)[0].lower()
            assert name in names | OTHERS_PACKAGES, f"no extra asks for {name}"
            assert "==" not in word or word in pinned, f"constraints.txt has no {word}"


def check(words: list[str]) -> None:
    """Check that the program of a command accepts the words."""
    program, *arguments = words
    if program == "fp8stack":
        check_fp8stack(arguments)
    elif program == "pip":
        assert arguments[0] == "install"
        check_pip(arguments[1:])
    elif program in ("torchrun", "accelerate"):
        _, arguments = runner.launched(words)
        check_fp8stack(arguments[arguments.index("pretrain") :])
    elif words[:3] == ["python", "-m", "tests.faults.harness"]:
        assert harness.parse(words[3])
        check_fp8stack(words[5:])
    elif words[:3] == ["python", "-m", "bench"]:
        name, *options = words[3:] or ["check"]
        if name != "check":
            bench.parse(bench.imported(name), name, options)
    else:
        raise AssertionError(f"nobody knows how to check {words}")


def check_fp8stack(words: list[str]) -> None:
    parser = PARSERS
    while words and words[0] in getattr(parser, "commands", {}):
        parser, words = parser.commands[words[0]], words[1:]
    assert parser is not PARSERS, words
    if words:
        parser.make_context("x", words)


def test_the_programs_of_the_documents_accept_their_commands():
    assert len(ALL) > 100
    for command in ALL:
        if command.text.startswith(NOT_CHECKED) or command.script:
            continue
        words = runner.substituted(command.words)
        while "=" in words[0]:
            del words[0]
        try:
            check(words)
        except (Exception, SystemExit) as error:
            pytest.fail(f"{command.place}: {command.text}: {error!r}")


SESSIONS: dict[tuple[str, int], list[Command]] = defaultdict(list)
for command in ALL:
    key = (command.page, -command.line if command.block is None else command.block)
    SESSIONS[key].append(command)


def is_long(command: Command) -> bool:
    """Whether a command is not run; nor is one that is only named."""
    return bool(LONG.match(command.text)) or re.fullmatch(r"fp8stack \w+", command.text) is not None


@pytest.fixture(scope="module")
def goods(tmp_path_factory, one_thread) -> Path:
    """Small versions of the files that the documents mention."""
    folder = tmp_path_factory.mktemp("goods")
    runner.make_goods(folder, exit_code)
    return folder


@pytest.mark.parametrize(
    "session",
    [pytest.param(s, id=s[0].place) for s in SESSIONS.values() if not all(map(is_long, s))],
)
@pytest.mark.full
def test_the_commands_of_the_documents_run(session: list[Command], goods, tmp_path, monkeypatch):
    runner.furnish(tmp_path, goods, session)
    monkeypatch.chdir(tmp_path)
    for command in session:
        if command.script:
            calls = runner.run_script(command.text, tmp_path)
        elif is_long(command):
            continue
        else:
            words = runner.substituted(command.words)
            while "=" in words[0]:
                monkeypatch.setenv(*words.pop(0).split("=", 1))
            calls = [words[1:]]
        for call in calls:
            assert exit_code(*runner.scaled(call)) == 0, command.place


def _small_pretrain(config: str | None = None, **keys: Any) -> Path:
    """`fp8stack.pretrain`, made small."""
    small = {"steps": 2, "eval_windows": 2, "sample_tokens": 4, "model_overrides": runner.MODEL}
    return pretrain(config, **{**keys, **small})


PYTHON = [
    pytest.param(block.text, id=f"{page}:{block.line}")
    for page in PAGES
    for block in blocks((ROOT / page).read_text(encoding="utf-8"))
    if block.language == "python"
]


@pytest.mark.parametrize("code", PYTHON)
@pytest.mark.full
def test_the_python_of_the_documents_runs(code, goods, tmp_path, monkeypatch):
    runner.furnish(tmp_path, goods, [])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fp8stack, "pretrain", _small_pretrain)
    exec(compile(code, "page", "exec"), {"__name__": "__main__"})
