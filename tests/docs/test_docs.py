"""What the documents say of defaults and names is what the code has."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from fp8stack.backends import fp8_state
from fp8stack.cli import app as cli
from fp8stack.config import GuardConfig, RunConfig
from fp8stack.model.config import GPTConfig
from fp8stack.precision import recipe as recipes

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "pretrain": cli.pretrain,
    "compare": cli.compare,
    "report": cli.report,
    "doctor": cli.doctor,
    "plan": cli.plan,
    "prepare": cli.prepare,
    "generate": cli.generate,
    "eval": cli.evaluate,
    "export": cli.export,
    "estimate": cli.estimate,
}


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("key", RunConfig.model_fields)
def test_every_key_is_documented_with_its_default(key: str) -> None:
    row = re.search(rf"^\| `{key}` \| (.*?) \| (.*?) \|", _text("docs/configuration.md"), re.M)
    assert row, key
    default = RunConfig.model_fields[key].default
    if isinstance(default, GuardConfig):  # it has a table of its own
        assert row[2] == "see below"
        return
    assert row[2].strip("` ") == ("" if default is None else _shown(default))


@pytest.mark.parametrize("key", GuardConfig.model_fields)
def test_every_key_of_the_guard_is_documented_with_its_default(key: str) -> None:
    row = re.search(rf"^\| `guard.{key}` \| (.*?) \|", _text("docs/configuration.md"), re.M)
    assert row, key
    assert row[1].strip("` ") == _shown(GuardConfig.model_fields[key].default)


def _shown(default: object) -> str:
    if isinstance(default, tuple):
        default = list(default)
    return str(default).lower() if isinstance(default, bool) else str(default)


def test_every_flag_is_documented_and_every_documented_flag_exists() -> None:
    flags = {f"--{name.replace('_', '-')}" for name in inspect.signature(cli.pretrain).parameters}
    documented = set(re.findall(r"`(--[a-z-]+)", _text("docs/configuration.md")))
    assert documented - {"--no-guard", "--init", "--learning-rate"} == flags


def test_the_defaults_in_the_help_are_the_defaults() -> None:
    for name, parameter in inspect.signature(cli.pretrain, eval_str=True).parameters.items():
        option = parameter.annotation.__metadata__[0]
        found = re.search(r"\[([0-9a-z.-]+)\]$", option.help)
        if found and name in RunConfig.model_fields:
            assert found[1] == str(RunConfig.model_fields[name].default), name


def test_recipe_and_model_keys_are_documented() -> None:
    text = _text("docs/configuration.md")
    kinds = (
        recipes.DelayedRecipe, recipes.CurrentRecipe, recipes.BlockRecipe, recipes.Mxfp8Recipe,
        recipes.PlainRecipe, GPTConfig,
    )  # fmt: skip
    for kind in kinds:
        for key in kind.model_fields:
            if key not in ("name", "description", "scaling"):
                assert f"`{key}`" in text, key


@pytest.mark.parametrize("name", ["README.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))])
def test_links_between_documents_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", _text(name)):
        assert (ROOT / name).parent.joinpath(target).exists(), target


def test_the_readmes_loops_train_in_delayed_scaling() -> None:
    codes = re.findall(r"```python\n(.*?)```", _text("README.md"), re.S)
    loops = [code for code in codes if "optimizer.step()" in code]
    assert len(loops) == 2
    for code in loops:
        scope: dict[str, object] = {}
        exec(compile(code, "README.md", "exec"), scope)
        assert any(value.any() for value in fp8_state(scope["model"]).values())


@pytest.mark.parametrize("name", ["README.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))])
def test_commands_have_only_flags_that_exist(name: str) -> None:
    flags = {
        name: {f"--{key.replace('_', '-')}" for key in inspect.signature(command).parameters}
        for name, command in COMMANDS.items()
    }
    flags["doctor"].add("--no-te")
    flags["pretrain"] |= {"--no-guard", "--init"}
    flags["compare"].add("--from")
    flags["plan"].add("--no-te")
    flags["estimate"].add("--no-te")
    text = _text(name).replace("\\\n", " ")
    commands = re.findall(rf"fp8stack ({'|'.join(COMMANDS)})((?: +[^`\n ]+)*)", text)
    if name == "README.md":
        assert {command for command, _ in commands} == COMMANDS.keys()
    for command, words in commands:
        used = {word.strip(".,;:)") for word in words.split() if word.startswith("--")}
        assert used <= flags[command], (command, used - flags[command])


def test_every_capability_names_tests_that_exist() -> None:
    text = _text("docs/capabilities.md")
    rows = re.findall(r"^\| ([A-E]\d+) \|.*\| ([^|]*) \|$", text, re.M)
    counts = {"A": 13, "B": 10, "C": 3, "D": 10, "E": 4}
    wanted = [f"{part}{number}" for part, n in counts.items() for number in range(1, n + 1)]
    assert [row for row, _ in rows] == wanted
    for row, told in rows:
        assert "::" in told, row
    named = re.findall(r"`([\w/]*test_\w+\.py)::(test_\w+)`", text)
    assert len(named) > 80
    for file, test in named:
        assert f"def {test}(" in _text(f"tests/{file}"), f"{file}::{test}"
    assert text.count("::test_") == len(named)


def test_the_readmes_table_is_the_committed_result() -> None:
    for line in _text("bench/results/cpu/compare.md").splitlines():
        if line.startswith("|"):
            assert line in _text("README.md")
