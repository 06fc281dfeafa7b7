"""Signals before, in and after the steps of a run."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from fp8stack import data
from fp8stack.training import finalize, loop, run_plans
from fp8stack.training.run_folder import RunFolder
from fp8stack.training.setup import build
from fp8stack.training.signals import Preempted, stop_requests
from tests.conftest import losses
from tests.training.conftest import AUTO, saved


@pytest.fixture
def _terminal() -> Iterator[None]:
    """Set SIGHUP to its default for the test, since the tests may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def at_step_7(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The signals that step 7 begins with, until the test ends or they are none."""
    signals: list[int] = []
    advance = loop._Loop.advance

    def struck(self: loop._Loop, step: int, tokens: Any) -> None:
        for number in signals if step == 7 else ():
            os.kill(os.getpid(), number)
        advance(self, step, tokens)

    monkeypatch.setattr(loop._Loop, "advance", struck)
    return signals


# Every signal, in processes of their own: tests/faults, row R3.
def test_a_signal_saves_and_ends_with_exit_code_75_and_the_run_goes_on_to_the_bit(
    at_step_7, new, command, finished, tmp_path, capsys
):
    at_step_7.append(signal.SIGINT)
    assert command(*new, "--out", "r") == 75
    printed = capsys.readouterr().out
    assert "stopped after step 7, saved r/checkpoints/step-000007" in printed
    assert "fp8stack pretrain --resume r" in printed
    assert saved(tmp_path / "r") == ["step-000007", "step-000004"]
    at_step_7.clear()
    assert command(*AUTO) == 0
    assert losses(tmp_path / "r") == losses(finished / "r")


def test_a_second_ctrl_c_quits_at_once_and_a_second_request_does_not(
    at_step_7, new, command, tmp_path
):
    at_step_7 += [signal.SIGTERM, signal.SIGTERM, signal.SIGINT]
    assert command(*new, "--out", "r") == 130
    assert saved(tmp_path / "r") == ["step-000004"]


@pytest.mark.parametrize("where", ["reading data", "claimed", "timing", "compiling"])
def test_a_signal_before_the_first_step_is_done_ends_at_once(
    where, new, command, refused, finished, tmp_path, monkeypatch
):
    after: list[str] = []

    def struck(*arguments: object, **options: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        after.append("went on")

    places: dict[str, tuple[Any, str]] = {
        "reading data": (data, "load_corpora"),
        "claimed": (RunFolder, "write_plan"),
        "timing": (loop, "peak_rate"),
        "compiling": (loop._Loop, "advance"),
    }
    with monkeypatch.context() as patch:
        if where == "compiling":
            patch.setattr(run_plans, "require_compiler", lambda *_: None)
            patch.setattr("fp8stack.model.gpt.GPT.compile_blocks", lambda *_, **__: None)
            patch.setattr(build, "_be_deterministic", lambda: None)
        patch.setattr(*places[where], struck)
        compiled = ["--compile"] if where == "compiling" else []
        message = "Stopped before a step was done; nothing is lost."
        refused(*new, "--out", "r", *compiled, code=75, message=message)
    assert not after
    assert command(*new, "--no-compile", "--resume", "auto", "--out", "r") == 0
    assert losses(tmp_path / "r") == losses(finished / "r")


@pytest.mark.parametrize("where", ["loss_plot", "generate"])
def test_a_signal_at_the_end_is_heeded_at_once_and_the_end_is_made_up_for(
    where, new, command, refused, finished, tmp_path, monkeypatch
):
    def struck(*arguments: object, **options: object) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        raise AssertionError("went on")

    with monkeypatch.context() as patch:
        patch.setattr(finalize, where, struck)
        message = "Stopped at the end, all is saved. Go on with: fp8stack pretrain --resume r"
        refused(*new, "--out", "r", code=75, message=message)
    assert command(*AUTO) == 0
    for name in ("sample.txt", "loss.png"):
        assert (tmp_path / "r" / name).read_bytes() == (finished / "r" / name).read_bytes()


@pytest.mark.usefixtures("_terminal")
def test_requests_are_heard_where_the_terminal_is_gone_and_not_by_children(monkeypatch):
    def write(*arguments: object) -> int:
        raise OSError(5, "Input/output error")

    with stop_requests() as requested:
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            signal.raise_signal(signal.SIGTERM)
        assert not requested()
        with monkeypatch.context() as hangup:
            hangup.setattr(os, "write", write)
            signal.raise_signal(signal.SIGHUP)
        assert requested()


def test_a_request_that_came_before_counts_where_a_stop_is_at_once():
    before = signal.getsignal(signal.SIGTERM)

    def stopped() -> None:
        with stop_requests() as requested:
            signal.raise_signal(signal.SIGTERM)
            with requested.at_once("why"):
                pytest.fail("went on")

    with pytest.raises(Preempted, match="why"):
        stopped()
    assert signal.getsignal(signal.SIGTERM) == before
