"""Help: on one screen, in groups, with an example that parses."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer

from fp8stack.cli.app import app
from fp8stack.cli.options import COMMAND_GROUPS, GROUPS
from fp8stack.planning.run_keys import FLAGS

ROOT: Any = typer.main.get_command(app)
NAMES = sorted(set(ROOT.commands) - {"bench"})


@pytest.fixture
def helped(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def help_of(*words: str) -> str:
        assert command(*words, "--help") == 0
        return capsys.readouterr().out

    return help_of


def test_the_commands_help_is_one_screen_of_80_by_40_in_groups(helped):
    lines = helped().splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    for group, names in COMMAND_GROUPS.items():
        assert f"{group}:" in lines
        assert all(any(line.startswith(f"  {name} ") for line in lines) for name in names.split())
    assert set(" ".join(COMMAND_GROUPS.values()).split()) == set(ROOT.commands)


def test_pretrains_help_has_at_most_75_lines_in_all_groups(helped):
    lines = helped("pretrain").splitlines()
    assert len(lines) <= 75
    assert [line[:-1] for line in lines if line.endswith(":") and line[:1].strip()] == [
        *GROUPS,
        "Options",
    ]
    assert "  --[no-]compile               Use torch.compile. [on a GPU]" in lines


def test_every_option_of_a_group_is_one_of_a_command_and_pretrains_all_have_a_group():
    options = {option.name for command in ROOT.commands.values() for option in command.params}
    grouped = {name for names in GROUPS.values() for name in names.split()}
    assert grouped <= options
    pretrain = {option.name for option in ROOT.commands["pretrain"].params}
    assert pretrain - grouped - FLAGS.keys() == set()


def test_a_flag_is_the_type_the_choices_and_the_default_of_its_key(helped):
    text = " ".join(helped("pretrain").split())
    for key, type_name, ending in (
        ("optimizer", "str", "adamw, sgd, muon, adamw8bit or adamwfp8. [adamw]"),
        ("steps", "int", "Optimizer steps. [1200]"),
        ("lr, --learning-rate", "float", "Peak learning rate. [0.003]"),
        ("seed", "int", "samples. [0]"),
    ):
        assert re.search(rf"--{key} <{type_name}>[^<]*{re.escape(ending)}", text), key


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_a_command_is_one_that_it_parses(name, helped):
    example = helped(name).rpartition("Example: ")[2]
    program, called, *words = shlex.split(example.replace("\n", " "))
    assert (program, called) == ("fp8stack", name)
    parsed = ROOT.commands[name].make_context(name, words)
    assert parsed.params
