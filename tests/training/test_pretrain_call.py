"""`fp8stack.pretrain`: the command as a function."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

import fp8stack
from fp8stack.errors import UserError
from tests.conftest import TINY, Command, losses

SMALL = {
    "steps": 12, "batch": 4, "context": 32, "eval_every": 6, "save_every": 4,
    "eval_windows": 4, "sample_tokens": 8, "warmup_steps": 2,
    "model_overrides": {"layers": 1, "width": 32, "heads": 2},
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")


def test_it_trains_what_the_command_trains(command: Command, tmp_path: Path) -> None:
    run = fp8stack.pretrain(recipe="delayed", out=tmp_path / "called", **SMALL)
    assert run == tmp_path / "called"
    assert command("pretrain", "--recipe", "delayed", "--out", "run", *TINY) == 0
    assert losses(run) == losses(tmp_path / "run")
    assert len(losses(run)) == 12


def test_its_keys_overrule_a_run_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('steps = 99\nrecipe = "fp32"\nsave_every = 1\n')
    run = fp8stack.pretrain(file, **SMALL | {"steps": 2}, out=tmp_path / "run", recipe="bf16")
    saved = (run / "run.toml").read_text()
    assert "\nsteps = 2\n" in saved
    assert '\nrecipe = "bf16"\n' in saved
    assert fp8stack.pretrain(out=run, resume="auto", steps=3) == run
    assert [row[0] for row in losses(run)] == [1, 2, 3]


def test_bad_input_is_raised_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="stepz") as caught:
        fp8stack.pretrain(stepz=3)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.toml").write_text("")
    with pytest.raises(UserError, match="holds a run already"):
        fp8stack.pretrain(out=tmp_path / "run", **SMALL)


def test_another_thread_may_call_it(tmp_path: Path) -> None:
    found: list[Path] = []
    train = threading.Thread(
        target=lambda: found.append(fp8stack.pretrain(out=tmp_path / "run", **SMALL))
    )
    train.start()
    train.join()
    assert found == [tmp_path / "run"]
    assert len(losses(found[0])) == 12


def test_a_signal_saves_and_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8stack.training.run_folder import RunFolder

    append = RunFolder.append_metrics

    def stop_at_three(self: RunFolder, row: dict) -> None:
        append(self, row)
        if row["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(RunFolder, "append_metrics", stop_at_three)
    with pytest.raises(UserError, match=r"after step [34]") as caught:
        fp8stack.pretrain(out=tmp_path / "run", **SMALL)
    assert caught.value.exit_code == 75
    monkeypatch.setattr(RunFolder, "append_metrics", append)
    run = fp8stack.pretrain(out=tmp_path / "run", resume="auto")
    whole = fp8stack.pretrain(out=tmp_path / "whole", **SMALL)
    assert losses(run) == losses(whole)
