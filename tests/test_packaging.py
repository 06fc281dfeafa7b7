"""The package that pip installs: built, installed and used like a user does, without a network."""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from fp8stack import __version__
from fp8stack.analysis.conform.golden import FOLDER
from fp8stack.common import presets

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
INFO = f"fp8stack-{__version__}.dist-info"
MODELS, RECIPES = presets.names("models"), presets.names("recipes")


def run(*command: str, cwd: Path, path: str = "") -> str:
    """The output of a command; if it fails, the test shows its errors."""
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    options: dict[str, Any] = {"cwd": cwd, "env": environment, "timeout": 80}
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with an sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), ".", cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(built) -> zipfile.ZipFile:
    return zipfile.ZipFile(built / f"fp8stack-{__version__}-py3-none-any.whl")


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """A folder that the wheel is installed in, away from the checkout."""
    target = tmp_path_factory.mktemp("site")
    install = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-compile")
    wheels = [str(path) for path in built.glob("*.whl")]
    run(*install, "--quiet", "--target", str(target), *wheels, cwd=target)
    return target


SOURCES = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fp8stack").rglob("*.py")}
PRESETS = {f"models/{name}.toml" for name in MODELS} | {
    f"recipes/{name.replace(':', '/')}.toml" for name in RECIPES
}
BESIDE = {
    *("pyproject.toml", "README.md", "LICENSE", "constraints.txt", "PKG-INFO", "Makefile"),
    *(".ci/check", ".ci/run", ".github/workflows/checks.yml", ".pre-commit-config.yaml"),
}
OTHERS = {"fp8stack/py.typed", "tests/test_packaging.py"}


# by pytest-cov, matplotlib, torch, huggingface_hub
REQUIRED_BY_OTHERS = {"coverage", "pil", "sympy", "yaml"}


def test_what_tests_and_benchmarks_import_is_in_the_test_extra():
    extras = PYPROJECT["project"]["optional-dependencies"]
    itself, *requirements = extras["test"]  # the first is fp8stack itself, with extras
    included = itertools.chain(*(extras[name] for name in re.findall(r"\w+", itself)[1:]))
    listed = [*PYPROJECT["project"]["dependencies"], *included, *requirements]
    names = {re.split(r"[^\w-]", entry)[0].lower().replace("-", "_") for entry in listed}
    assert {"build", "hatchling"} <= names  # for the tests of this file
    imported = set()
    for folder in ("tests", "bench"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    imported |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    imported.add(node.module)
    packages = {name.partition(".")[0].lower() for name in imported}
    packages -= {*sys.stdlib_module_names, "fp8stack", "tests", "bench"}
    assert packages - names == REQUIRED_BY_OTHERS


def test_the_sdist_holds_every_source_and_preset_what_a_builder_needs_and_no_rubbish(built):
    with tarfile.open(built / f"fp8stack-{__version__}.tar.gz") as archive:
        files = [member.name for member in archive.getmembers() if member.isfile()]
    sdist = {name.partition("/")[2] for name in files}
    assert sdist >= SOURCES | PRESETS | BESIDE | OTHERS
    rubbish = re.compile(r"__pycache__|\.pyc$|(^|/)(\.git|\.hypothesis|runs|dist)/")
    assert [name for name in sdist if rubbish.search(name)] == []


def test_the_wheel_is_one_package_with_all_sources_its_types_presets_and_reports_parts(wheel):
    """A package called models or recipes would collide with other projects in site-packages."""
    names = set(wheel.namelist())
    assert {name.partition("/")[0] for name in names} == {"fp8stack", INFO}
    shipped = {name for name in names if name.startswith("fp8stack/_presets/")}
    assert shipped == {f"fp8stack/_presets/{name}" for name in PRESETS}
    for name in shipped:
        assert wheel.read(name) == (ROOT / name.removeprefix("fp8stack/_presets/")).read_bytes()
    report = ROOT / "fp8stack" / "analysis" / "report"
    files = {path.name for path in report.iterdir() if path.is_file()}
    assert {"page.html.jinja", "style.css"} <= files
    golden = "fp8stack/analysis/conform/golden"
    corpus = {f"{golden}/{path.name}" for path in FOLDER.glob("*.safetensors")}
    assert corpus
    assert (
        corpus
        | SOURCES
        | {"fp8stack/py.typed", "fp8stack/trained/export/card.md.jinja"}
        | {"fp8stack/analysis/forecast/law.json"}
        | {f"fp8stack/analysis/report/{name}" for name in files}
        <= names
    )


def test_the_wheel_says_its_name_license_python_and_command_and_that_te_is_optional(wheel):
    license = wheel.read(f"{INFO}/licenses/LICENSE")
    assert license == (ROOT / "LICENSE").read_bytes()
    assert b"Apache License" in license
    metadata = wheel.read(f"{INFO}/METADATA").decode()
    lines = metadata.splitlines()
    expected = ("Name: fp8stack", f"Version: {__version__}", "Requires-Python: >=3.11")
    assert {*expected, "License-Expression: Apache-2.0", "License-File: LICENSE"} <= set(lines)
    assert "\nSummary: " in metadata
    te = [line for line in lines if line.startswith("Requires-Dist: transf")]
    assert te
    assert all("extra ==" in line for line in te)
    points = wheel.read(f"{INFO}/entry_points.txt").decode()
    match = re.search(r"^fp8stack = ([\w.]+):(\w+)$", points, re.MULTILINE)
    assert match
    assert match[1].replace(".", "/") + "/__init__.py" in wheel.namelist()


# Installed


def test_the_installed_package_has_every_preset_inside_and_plans_every_recipe(installed, tmp_path):
    for kind in ("models", "recipes"):  # folders of the user's that are called so are not read
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "mine.toml").write_text("x = 1\n")
    (tmp_path / "mine.toml").write_text('description = "x"\nlike = "block"\n')
    code = f"import sys; sys.path = [p for p in sys.path if p != {str(ROOT)!r}]\n"
    code += """
import fp8stack
from fp8stack.common import presets
from fp8stack.model.config import load_config, plan_for
from fp8stack.precision import assumed, load_recipe
print(fp8stack.__file__)
print(presets.folder("models"))
print(presets.folder("recipes"))
print(*presets.names("models"))
print(*presets.names("recipes"))
for name in presets.names("models"):
    assert load_config(name).layers
for name in presets.names("recipes"):
    assert load_recipe(name).name == name
    for machine in ("none", "9.0"):
        assert plan_for(load_config("gpt-nano"), name, assumed(machine)).layers
print(load_recipe("mine.toml").quantizers.weight.block)
"""
    package = installed / "fp8stack"
    printed = run(sys.executable, "-c", code, cwd=tmp_path, path=str(installed))
    places = [package / "__init__.py", package / "_presets/models", package / "_presets/recipes"]
    assert printed.splitlines() == [
        *map(str, places),
        " ".join(MODELS),
        " ".join(RECIPES),
        "(128, 128)",
    ]


# Files outside the package


def test_a_citation_names_the_version_that_this_is():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {__version__}\n" in citation


def test_the_workflow_runs_every_check_that_ci_runs():
    script = (ROOT / ".ci" / "check").read_text(encoding="utf-8")
    (checks,) = re.findall(r"\|\| set -- (.+)", script)
    workflow = (ROOT / ".github" / "workflows" / "checks.yml").read_text(encoding="utf-8")
    (named,) = re.findall(r"check: \[(.+)\]", workflow)
    assert named.split(", ") == checks.split()
    assert ".ci/check ${{ matrix.check }}" in workflow
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert {*re.findall(r"entry: \.ci/check (\w+)", hooks)} <= {*checks.split()}
