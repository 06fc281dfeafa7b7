"""The integrations with the newest versions on PyPI of the libraries that they serve. They are
installed into an environment of their own, which takes torch and all else from the one that the
tests run in."""

from __future__ import annotations

import os
import subprocess
import venv
from pathlib import Path
from sysconfig import get_path
from typing import Any

import pytest
import torch

from tests.docs.docs_commands import ROOT, blocks

pytestmark = pytest.mark.slow

NEWEST = ("lightning", "pytorch-lightning", "transformers", "accelerate", "trl", "peft")
# The test environment has its empty meta package, beside which peft cannot be imported.
LEFT_OUT = "transformer_engine"


def run(words: list[Any], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def newest(tmp_path_factory) -> Path:
    """Python with the newest versions."""
    folder = tmp_path_factory.mktemp("newest")
    current = folder / "site-packages"  # by this name dill knows installed modules
    current.mkdir()
    for path in {Path(get_path("purelib")), Path(get_path("platlib"))}:
        for package in path.iterdir():
            if not package.name.startswith(LEFT_OUT) and package.suffix != ".pth":
                (current / package.name).symlink_to(package)
    environment = folder / "environment"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    where = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder)
    (Path(where.stdout.strip()) / "current.pth").write_text(f"{current}\n")
    (folder / "torch.txt").write_text(f"torch=={torch.__version__}\n")
    pip = [python, "-m", "pip"]
    done = run([*pip, "install", "-q", "--upgrade", *NEWEST, "-c", folder / "torch.txt"], folder)
    if "(from versions: none)" in done.stderr:
        pytest.skip("PyPI is out of reach")
    assert done.returncode == 0, done.stderr[-3000:]
    versions = run([*pip, "list", "--format=freeze"], folder).stdout.splitlines()
    print(*(line for line in versions if line.partition("==")[0] in (*NEWEST, "torch")), sep="\n")
    return python


def passes(python: Path, folder: Path, *arguments: str) -> None:
    """Run tests in that environment: some are selected, and none of them is skipped."""
    tests = [python, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-rs"]
    done = run([*tests, "--rootdir", ROOT, *arguments], folder)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    assert "SKIPPED" not in done.stdout, done.stdout[-3000:]


def test_the_tests_of_the_integrations_pass(newest, tmp_path):
    names = ("fp8_state", "transformers", "lightning", "models")
    files = [str(ROOT / "tests" / "integrations" / f"test_{name}.py") for name in names]
    passes(newest, tmp_path, *files, "-m", "not slow")


def test_the_examples_run(newest, tmp_path):
    examples = str(ROOT / "tests" / "examples")
    passes(newest, tmp_path, examples, "-m", "slow", "-k", "peft_lora or trl_sft")


def test_the_code_of_the_page_runs(newest, tmp_path):
    text = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    codes = [block.text for block in blocks(text) if block.language == "python"]
    plugin = next(code for code in codes if "import pytorch_lightning" in code)
    codes.append(plugin.replace("import pytorch_lightning", "import lightning.pytorch"))
    for code in codes:
        done = run([newest, "-c", code], tmp_path)
        assert done.returncode == 0, code + done.stderr[-3000:]
