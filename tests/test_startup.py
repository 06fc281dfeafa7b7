"""The modules that commands import: which ones and how many, without measuring time."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import fp8stack
from fp8stack.cli.app import app
from fp8stack.precision.hardware import ASSUMED_TORCH

ROOT = Path(__file__).parents[1]


def paths(command: Any) -> list[list[str]]:
    """The words that lead to each command below this one."""
    below = getattr(command, "commands", {}).items()
    return [[name, *deeper] for name, inner in below for deeper in [[], *paths(inner)]]


COMMANDS = paths(typer.main.get_command(app))
assert ["bench", "step"] in COMMANDS
# Modules that take longer to import than an answer may take, or that answers do not need.
HEAVY = {
    "accelerate", "fp8stack.layers", "fp8stack.model.convert", "fp8stack.model.gpt",
    "fp8stack.training.telemetry.operand_errors", "fp8stack.training.run", "matplotlib",
    "safetensors", "tensorboard",
    "torch._dynamo", "torch._inductor", "torch.utils.tensorboard", "torchao", "wandb",
    "transformer_engine", "transformers",
}  # fmt: skip
NO_TORCH = {"fp8stack.numerics", "numpy", "torch"}
# Modules that answers need and help texts do not.
NO_ANSWER = {"fp8stack.precision.doctor", "fp8stack.precision", "pydantic", "rich"}

# Modules that Python needs to start, and this for `json`, do not count. The bounds below are a
# little above what was counted with the versions of constraints.txt.
OBSERVE = """
import json, sys
before = set(sys.modules)
try:
    {code}
except SystemExit as end:
    assert not end.code, end.code
print(json.dumps(sorted(set(sys.modules) - before)), file=sys.stderr)
"""
ANSWER = "from fp8stack.cli import main; main({})"


def observed(code: str) -> tuple[str, set[str]]:
    """The output of `code` in a new process, and the modules that it imports."""
    command = [sys.executable, "-c", OBSERVE.format(code=code)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=80)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, set(json.loads(done.stderr.splitlines()[-1]))


# Help

HELP = [[], ["--help"], ["--version"], *([*words, "--help"] for words in COMMANDS)]
ALL = """for words in {}:
        try:
            from fp8stack.cli import main; main(words)
        except SystemExit as end:
            assert not end.code, words
"""


def test_help_imports_a_parser_and_little_beside():
    """For all commands, in one process, no more than each of them may."""
    printed, modules = observed(ALL.format(HELP))
    assert printed.count("Usage: ") == len(HELP) - 1
    assert "fp8stack 0" in printed
    assert modules & (HEAVY | NO_TORCH | NO_ANSWER) == set()
    assert len(modules) < 118


# doctor

ANSWERS = [["--capability", "9.0"], ["--capability", "none"], ["--json", "--capability", "10.0"]]
if not torch.cuda.is_available():  # torch is needed to ask a GPU
    ANSWERS += [[], ["--json"]]


@pytest.mark.parametrize("arguments", ANSWERS, ids=" ".join)
def test_doctor_answers_without_torch_and_in_json_without_what_draws_tables(arguments):
    printed, modules = observed(ANSWER.format(["doctor", *arguments]))
    assert "mxfp8" in printed
    is_assumed_gpu = "--capability" in arguments and "none" not in arguments
    assert (ASSUMED_TORCH if is_assumed_gpu else torch.__version__) in printed
    assert modules & (HEAVY | NO_TORCH) == set()
    assert ("rich" in modules) == ("--json" not in arguments)
    assert len(modules) < 316


@pytest.mark.full
def test_doctor_says_the_same_where_torch_is_imported_and_imports_nothing_heavy_beside_it():
    answer = ANSWER.format(["doctor", "--json"])
    printed, beside = observed(f"import torch; before |= set(sys.modules); {answer}")
    assert beside & HEAVY == set()
    assert len(beside) < 200
    assert observed(answer)[0] == printed


# The package


def test_importing_the_package_imports_none_of_its_rooms():
    _, modules = observed("import fp8stack; dir(fp8stack)")
    submodules = {name.removeprefix("fp8stack") for name in modules if name.startswith("fp8stack")}
    assert submodules == {"", ".common", ".common.version"}
    assert len(modules) < 16


def test_what_is_about_data_is_given_without_torch():
    without_torch = ("common.errors", "common.formats", "common.presets", "precision.doctor")
    code = "".join(f"import fp8stack.{name}; " for name in without_torch)
    _, modules = observed(f"{code}from fp8stack import Recipe, UserError, load_recipe, resolve")
    assert modules & (HEAVY | NO_TORCH) == set()


def test_every_public_name_and_no_other_is_listed_found_and_seen_by_type_checkers():
    assert set(fp8stack.__all__) <= set(dir(fp8stack))
    for name in fp8stack.__all__:
        value = getattr(fp8stack, name)
        assert getattr(value, "__name__", name).endswith(name) or name == "Recipe"
    tree = ast.parse(Path(fp8stack.__file__).read_text(encoding="utf-8"))
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in guarded.body if isinstance(node, ast.ImportFrom)]
    names = [alias.name for node in imports for alias in node.names]
    assert sorted(names) == sorted(fp8stack.__all__)
    with pytest.raises(AttributeError, match="module 'fp8stack' has no attribute 'probes'"):
        fp8stack.probes  # noqa: B018
