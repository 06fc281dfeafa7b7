"""Checks of documented commands that are not run: the things that they name must exist."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import runner
from tests.docs.docs_commands import ROOT

# Packages that documented commands use and no extra installs.
OTHERS_PACKAGES = {"vllm", "lm-eval", "lm_eval", "twine"}


def check_pip(words: Sequence[str]) -> None:
    """Check that pip installs an extra of fp8stack, or a package that an extra requires."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    listed = [
        *project["dependencies"],
        *(requirement for extra in extras.values() for requirement in extra),
    ]
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower().splitlines()
    values = iter(words)
    for word in values:
        if word in ("-c", "--index-url", "--target"):
            value = next(values)
            assert word != "-c" or (ROOT / value).is_file(), value
        elif word.startswith((".", "dist/fp8stack", "/")):
            for extra in re.findall(r"[\w-]+", word.partition("[")[2]):
                assert extra in extras, f"pyproject.toml has no extra {extra}"
        elif not word.startswith("-"):
            name = re.split(r"[\[<>=!~ ]", word)[0]
            names = {re.split(r"[\[<>=!~; ]", requirement)[0].lower() for requirement in listed}
            assert name.lower() in names | OTHERS_PACKAGES, f"no extra asks for {name}"
            assert "==" not in word or word in pinned, f"constraints.txt has no {word}"


def check_bench(words: Sequence[str], folder: Path) -> None:
    """Check that a scenario of `python -m bench` accepts the options, without running it."""
    if not words:
        return
    if words[0] == "check":
        assert runner.check([*words[1:], "--results", str(folder)]) in (0, 2)
        return
    assert words[0] in runner.SCENARIOS, words[0]
    module: Any = runner.imported(words[0])
    runner.parse(module, words[0], words[1:])
