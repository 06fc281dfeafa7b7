"""A run that tests of going on, of overwriting and of signals begin from: trained once."""

import shutil
from pathlib import Path

import pytest
import torch

from fp8stack import cli
from fp8stack.checkpoint import reader
from tests.conftest import TINY, Command

AUTO = ["pretrain", "--resume", "auto", "--out", "r"]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file in a folder, by its path there."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


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
    with pytest.raises(SystemExit) as exit:
        cli.main(["pretrain", *flags, *TINY])
    torch.set_num_threads(threads)
    assert exit.value.code == 0
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
