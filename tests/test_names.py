"""The lint's check of names, `.ci/names.py`, and names that have to be unique."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECK = ROOT / ".ci" / "names.py"
# Sources, and the line and name that are refused.
VAGUE = {
    "a variable": ("found = []\n", "1 found"),
    "a variable in a function": ("def f():\n    for part in ():\n        print(part)\n", "2 part"),
    "a parameter": ("def f(x, *, given=None):\n    return x, given\n", "1 given"),
    "a parameter of a lambda": ("f = lambda *rest: rest\n", "1 rest"),
    "a variable of a comprehension": ("widths = [one.width for one in ()]\n", "1 one"),
    "an error": ("try:\n    f()\nexcept ValueError as told:\n    print(told)\n", "3 told"),
    "a capture": ("match words:\n    case [first, *rest]:\n        print(first, rest)\n", "2 rest"),
}
PLAIN = """
class Plan:
    asked: str  # a key of plan.json


def widths(layers, *, scale=1):
    partial_widths, ones = [layer.width * scale for layer in layers], 1
    return partial_widths, ones
"""


def checked(folder: Path, source: str) -> tuple[int, list[str]]:
    """The exit code of the check on a folder with one file, and the lines that it prints."""
    (folder / "package").mkdir()
    (folder / "package" / "module.py").write_text(source, encoding="utf-8")
    command = [sys.executable, str(CHECK), "package"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("kind", VAGUE)
def test_a_vague_name_is_refused_with_its_place(kind, tmp_path):
    source, place = VAGUE[kind]
    code, lines = checked(tmp_path, source)
    assert code == 1
    line, name = place.split()
    assert lines == [
        f"package/module.py:{line}: '{name}' does not say what it holds. "
        "Give it the name of its content."
    ]


def test_plain_names_and_the_fields_of_classes_pass(tmp_path):
    assert checked(tmp_path, PLAIN) == (0, ["Files with plain names only: 1."])


@pytest.mark.full
def test_no_two_classes_of_the_package_share_a_name():
    files = (ROOT / "fp8stack").rglob("*.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text("utf-8")))]
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert {name for name, count in classes.items() if count > 1} == set()


def test_no_two_files_of_the_package_share_a_name():
    """Except for a command in `cli/` and the file that does its work."""
    files = (ROOT / "fp8stack").rglob("*.py")
    counts = Counter(file.name for file in files if file.parent.name != "cli")
    assert {name for name, count in counts.items() if count > 1} - {"__init__.py"} == set()


def test_the_lint_checks_the_names_of_the_package_the_benchmarks_and_the_tests():
    (command,) = re.findall(r"^ +lint\) (.+) ;;$", (CHECK.parent / "check").read_text(), re.M)
    assert "python .ci/names.py fp8stack bench tests" in command.split(" && ")
