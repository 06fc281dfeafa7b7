"""Shared by tests of runs: the flags of a model that trains in a second, and the command."""

from __future__ import annotations

import gc
import json
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from fp8stack import cli
from fp8stack.common.errors import UserError

if TYPE_CHECKING:
    from tests.support.hub_stand_in import Hub

TINY = [
    "--steps", "12", "--batch", "4", "--context", "32", "--eval-every", "6", "--save-every", "4",
    "--set", "model_overrides.layers=1", "--set", "model_overrides.width=32",
    "--set", "model_overrides.heads=2", "--set", "eval_windows=4", "--set", "sample_tokens=2",
    "--set", "warmup_steps=2",
]  # fmt: skip

Command = Callable[..., int]
ONE_THREAD = {"faults", "integrations", "model", "trained", "training"}


def exit_code(*arguments: str) -> int:
    """Run `fp8stack` in this process. Returns its exit code."""
    with pytest.raises(SystemExit) as exit:
        cli.main(list(arguments))
    return int(exit.value.code or 0)


def pytest_configure(config: pytest.Config) -> None:
    """Divide the cores between pytest-xdist's workers, because threads that spin while they wait
    for a core slow all workers. Keep bytecode, which every process would compile again."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    threads = max(1, (os.cpu_count() or 1) // workers)
    if workers > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # for processes that tests start
        torch.set_num_threads(threads)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import only GPU tests with `-m gpu`, as a machine with a GPU may lack the others' packages,
    and by default no file all of whose tests are `full`, as some import large libraries."""
    markers, tests = config.option.markexpr, Path(__file__).parent
    if markers == "gpu" and tests in collection_path.parents:
        return None if tests / "gpu" in (collection_path, *collection_path.parents) else True
    if "not full" in markers and collection_path.name.startswith("test_"):
        return True if "\npytestmark = pytest.mark.full" in collection_path.read_text() else None
    return None


CASES = 6
"""The cases of one test that pytest runs by default."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `full` the cases of a test beyond `CASES`. The first tier runs a random choice,
    seeded by the test's name, in which as many values of its parameters as possible occur."""
    cases = defaultdict(list)
    for item in items:
        test, _, case = item.nodeid.partition("[")
        if case:
            cases[test].append((set(case[:-1].split("-")), item))
    for test, remaining in cases.items():
        random.Random(test).shuffle(remaining)
        values: set[str] = set()
        for _ in range(min(CASES, len(remaining))):
            best = max(remaining, key=lambda case: len(case[0] - values))
            remaining.remove(best)
            values |= best[0]
        for _, item in remaining:
            item.add_marker(pytest.mark.full)


@pytest.fixture(autouse=True, scope="session")
def _quick_runs() -> Iterator[None]:
    from fp8stack.numerics import fused
    from tests.support.quick_runs import quick_runs

    fused.why_not()  # compiles the casts here, so that processes of tests do not report it
    gc.collect()
    gc.freeze()  # else each collection visits all imported objects, in up to 0.3 s
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


@pytest.fixture(autouse=True, scope="module")
def _one_thread(request: pytest.FixtureRequest) -> None:
    """`one_thread` for the tests of whole folders."""
    if request.path.relative_to(Path(__file__).parent).parts[0] in ONE_THREAD:
        request.getfixturevalue("one_thread")


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in delayed scaling with checkpoints of steps 2 and 4; not to be changed."""
    from tests.faults.inputs.input_corruptions import make_run

    return make_run(tmp_path_factory.mktemp("made"))


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """A function that runs `fp8stack` in a new folder and returns its exit code."""
    monkeypatch.chdir(tmp_path)
    return exit_code


@pytest.fixture
def refused(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """A function that runs `fp8stack`, checks its exit code, and returns its line on stderr, which
    must contain `message`. With exit code 2 (bad arguments) it must print nothing else, and create
    or remove no file in the test's folder."""

    def run(*arguments: str, message: str = "", code: int = 2) -> str:
        before = sorted(tmp_path.rglob("*"))
        capsys.readouterr()
        assert command(*arguments) == code
        printed = capsys.readouterr()
        assert printed.err.count("\n") == 1, printed
        assert message in printed.err
        if code == 2:
            assert printed.out == ""
            assert sorted(tmp_path.rglob("*")) == before
        return printed.err

    return run


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots are left empty, for tests of what is written around them."""
    from fp8stack.analysis.report.drawing import Picture

    monkeypatch.setattr(Picture, "svg", lambda picture: f'<svg id="{picture.name}"></svg>')
    monkeypatch.setattr(Picture, "png", lambda picture: b"\x89PNG")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hugging Face Hub on this machine, an empty cache, and no token."""
    # huggingface_hub reads the environment only when it is imported.
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


def refusal(ask: Callable[..., object], *arguments: Any, **keys: Any) -> str:
    """The message of the UserError that a call raises: one line, for exit code 2."""
    with pytest.raises(UserError) as caught:
        ask(*arguments, **keys)
    message = str(caught.value)
    assert len(message.splitlines()) <= 1, message
    assert caught.value.exit_code == 2
    return message


def contents(folder: Path) -> dict[str, bytes]:
    """The contents of all files in a folder, by relative path."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def metrics(run: Path) -> list[dict]:
    """The rows of a run's `metrics.jsonl`."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[tuple]:
    """The numbers of each step of a run, without times."""
    return [
        (row["step"], row["loss"], row["grad_norm"], row["lr"], row.get("val_loss"))
        for row in metrics(run)
        if row.get("event") != "phase"
    ]
