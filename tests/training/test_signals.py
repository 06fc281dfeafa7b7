"""How a run gives way: signals before, in and after its steps."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8stack.training import finalize, loop
from fp8stack.training.run_folder import RunFolder
from fp8stack.training.setup import build, datasets
from fp8stack.training.signals import SIGNALS, Preempted, stop_requests
from tests.conftest import Command, losses
from tests.training.conftest import AUTO, saved

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def _terminal() -> Iterator[None]:
    """Whoever runs the tests may have done so by nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_terminal")
@pytest.mark.parametrize("name", SIGNALS)
def test_every_signal_saves_and_ends_with_exit_code_75(
    name: str,
    new: list[str],
    command: Command,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def advance(self: Any, step: int, tokens: Any, really: Any = loop._Loop.advance) -> None:
        if step == 7:
            os.kill(os.getpid(), getattr(signal, name))
        really(self, step, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(loop._Loop, "advance", advance)
        assert command(*new, "--out", "r") == 75
    printed = capsys.readouterr().out
    assert "stopped after step 7, saved r/checkpoints/step-000007" in printed
    assert "fp8stack pretrain --resume r" in printed
    assert saved(tmp_path / "r") == ["step-000007", "step-000004"]
    assert command(*AUTO) == 0
    assert losses(tmp_path / "r") == losses(finished / "r")


@pytest.mark.parametrize("where", ["reading data", "claimed", "timing", "compiling"])
def test_a_signal_before_the_first_step_is_done_ends_at_once(
    where: str,
    new: list[str],
    command: Command,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    after: list[str] = []

    def struck(*arguments: object, **options: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        after.append("went on")

    places: dict[str, tuple[Any, str]] = {
        "reading data": (datasets.data, "load_corpora"),
        "claimed": (RunFolder, "write_plan"),
        "timing": (loop, "peak_rate"),
        "compiling": (loop._Loop, "advance"),
    }
    with monkeypatch.context() as patch:
        if where == "compiling":
            patch.setattr(build, "require_compiler", lambda *_: None)
            patch.setattr("fp8stack.model.gpt.GPT.compile_blocks", lambda *_, **__: None)
            patch.setattr(build, "_be_deterministic", lambda: None)
        patch.setattr(*places[where], struck)
        compiled = ["--compile"] if where == "compiling" else []
        assert command(*new, "--out", "r", *compiled) == 75
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Stopped before a step was done; nothing is lost." in error
    assert not after
    assert command(*new, "--no-compile", "--resume", "auto", "--out", "r") == 0
    assert losses(tmp_path / "r") == losses(finished / "r")


@pytest.mark.parametrize("where", ["loss_plot", "sample"])
def test_a_signal_at_the_end_is_heeded_at_once_and_the_end_is_made_up_for(
    where: str,
    new: list[str],
    command: Command,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def struck(*arguments: object, **options: object) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        raise AssertionError("went on")

    with monkeypatch.context() as patch:
        patch.setattr(finalize, where, struck)
        assert command(*new, "--out", "r") == 75
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Stopped at the end, all is saved. Go on with: fp8stack pretrain --resume r" in error
    assert command(*AUTO) == 0
    for name in ("sample.txt", "loss.png"):
        assert (tmp_path / "r" / name).read_bytes() == (finished / "r" / name).read_bytes()


def test_a_second_ctrl_c_quits_at_once_and_a_second_request_does_not(
    new: list[str], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def advance(self: Any, step: int, tokens: Any, really: Any = loop._Loop.advance) -> None:
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("went on")
        really(self, step, tokens)

    monkeypatch.setattr(loop._Loop, "advance", advance)
    assert command(*new, "--out", "r") == 130
    assert saved(tmp_path / "r") == ["step-000004"]


@pytest.mark.usefixtures("_terminal")
def test_requests_are_heard_where_the_terminal_is_gone_and_not_by_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(*arguments: object) -> int:
        raise OSError(5, "Input/output error")

    with stop_requests() as requested:
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            signal.raise_signal(signal.SIGTERM)
        assert not requested()
        with monkeypatch.context() as hangup:
            hangup.setattr(os, "write", gone)
            signal.raise_signal(signal.SIGHUP)
        assert requested()


def test_a_run_started_by_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_requests() as requested:
            signal.raise_signal(signal.SIGHUP)
            assert not requested()
    finally:
        signal.signal(signal.SIGHUP, before)


def _stopped_before(reached: list[str]) -> Iterator[Callable[[], bool]]:
    with stop_requests() as requested:
        signal.raise_signal(signal.SIGTERM)
        with requested.at_once("why"):
            reached.append("went on")
            yield requested


def test_a_request_that_came_before_counts_where_a_stop_is_at_once() -> None:
    before = signal.getsignal(signal.SIGTERM)
    reached: list[str] = []
    with pytest.raises(Preempted, match="why"):
        next(_stopped_before(reached))
    assert not reached
    assert signal.getsignal(signal.SIGTERM) == before
