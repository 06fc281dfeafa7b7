"""What the tests of whole runs share: a model that trains in a second, and the command."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from fp8stack import cli
from fp8stack.errors import UserError

if TYPE_CHECKING:
    from tests.support.hub_stand_in import Hub

TINY = [
    "--steps", "12", "--batch", "4", "--context", "32", "--eval-every", "6", "--save-every", "4",
    "--set", "model_overrides.layers=1", "--set", "model_overrides.width=32",
    "--set", "model_overrides.heads=2", "--set", "eval_windows=4", "--set", "sample_tokens=2",
    "--set", "warmup_steps=2",
]  # fmt: skip

Command = Callable[..., int]


def exit_code(*arguments: str) -> int:
    """`fp8stack` with some arguments, in this process: its exit code."""
    with pytest.raises(SystemExit) as exit:
        cli.main(list(arguments))
    return int(exit.value.code or 0)


def pytest_configure(config: pytest.Config) -> None:
    """Share the cores between pytest-xdist's workers: threads that wait for a core that another
    worker has spin, and all take longer. Keep bytecode, which all processes else make anew."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    threads = max(1, (os.cpu_count() or 1) // workers)
    if workers > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # of the processes that tests start
        torch.set_num_threads(threads)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu`, import no other tests: a machine with a GPU may lack what they need."""
    tests = Path(__file__).parent
    others = tests in collection_path.parents and tests / "gpu" not in (
        collection_path,
        *collection_path.parents,
    )
    return True if config.option.markexpr == "gpu" and others else None


@pytest.fixture(autouse=True, scope="session")
def _quick_runs() -> Iterator[None]:
    from fp8stack.numerics import fused
    from tests.support.quick_runs import quick_runs

    fused.why_not()  # compiles the casts, which else processes that tests start would say
    gc.collect()
    gc.freeze()  # else each collection goes through all that is imported, in up to 0.3 s
    with quick_runs():
        yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _same_random_state() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny GEMMs wait longer for a second thread than they take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in delayed scaling with checkpoints of steps 2 and 4; not to be changed."""
    from tests.faults.inputs.input_corruptions import make_run

    return make_run(tmp_path_factory.mktemp("made"))


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """`fp8stack` with some arguments, in this process and a fresh folder: its exit code."""
    monkeypatch.chdir(tmp_path)
    return exit_code


@pytest.fixture
def refused(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What `fp8stack` says when it ends with an exit code: one line on stderr, which holds what is
    `said`. With 2, of wrong words, it says no more, and no file is made or removed in the test's
    folder."""

    def run(*arguments: str, said: str = "", code: int = 2) -> str:
        before = sorted(tmp_path.rglob("*"))
        capsys.readouterr()
        assert command(*arguments) == code
        printed = capsys.readouterr()
        assert printed.err.count("\n") == 1, printed
        assert said in printed.err
        if code == 2:
            assert printed.out == ""
            assert sorted(tmp_path.rglob("*")) == before
        return printed.err

    return run


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hugging Face Hub on this machine, an empty cache, and no token."""
    # Read from the environment once, when huggingface_hub is imported.
    from huggingface_hub import constants

    from tests.support.hub_stand_in import serve

    home = tmp_path / "huggingface"
    home.mkdir()
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serve() as served:
        for name, value in {
            "ENDPOINT": served.endpoint,
            "HUGGINGFACE_CO_URL_TEMPLATE": served.endpoint
            + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_HOME": str(home),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_STORED_TOKENS_PATH": str(home / "stored_tokens"),
            "HF_XET_CACHE": str(home / "xet"),
            "HF_HUB_DISABLE_XET": True,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_ENDPOINT", served.endpoint)
        monkeypatch.setenv("HF_HOME", str(home))
        yield served


def refusal(ask: Callable[..., object], *given: Any, **keys: Any) -> str:
    """The message with which a call is refused: one line, for exit code 2."""
    with pytest.raises(UserError) as caught:
        ask(*given, **keys)
    message = str(caught.value)
    assert len(message.splitlines()) <= 1, message
    assert caught.value.exit_code == 2
    return message


def contents(folder: Path) -> dict[str, bytes]:
    """Every file in a folder, by its path there."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def metrics(run: Path) -> list[dict]:
    """The rows of a run's `metrics.jsonl`."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[tuple]:
    """What a run's numbers came to, step by step; times left out."""
    return [
        (row["step"], row["loss"], row["grad_norm"], row["lr"], row.get("val_loss"))
        for row in metrics(run)
        if row.get("event") != "phase"
    ]
