"""A run that tests of going on, of overwriting and of signals begin from: trained once."""

import shutil
from pathlib import Path

import pytest
import torch

from fp8stack.training.checkpoint import reader
from tests.conftest import TINY, Command, exit_code

AUTO = ["pretrain", "--resume", "auto", "--out", "r"]


def saved(run: Path) -> list[str]:
    """The names of a run's checkpoints, the newest first."""
    return [path.name for path in reader.candidates(run / "checkpoints")]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and a run `r` on it, of 12 steps, with checkpoints of steps 8 and 12."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "t.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    flags = ["--recipe", "fp32", "--data", str(folder / "t.txt"), "--out", str(folder / "r")]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the tests that compare with it
    assert exit_code("pretrain", *flags, *TINY) == 0
    torch.set_num_threads(threads)
    return folder


@pytest.fixture
def run(finished: Path, command: Command, tmp_path: Path) -> Path:
    """A copy of it, in the folder where the command runs."""
    shutil.copytree(finished / "r", tmp_path / "r")
    return tmp_path / "r"


@pytest.fixture
def new(finished: Path) -> list[str]:
    """The flags that `finished` was made by, but for `--out`."""
    return ["pretrain", "--recipe", "fp32", "--data", str(finished / "t.txt"), *TINY]
