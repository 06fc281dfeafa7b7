"""`fp8stack.pretrain`: the command as a function."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import fp8stack
from fp8stack.common.errors import UserError
from fp8stack.training.run_folder import RunFolder
from tests.conftest import TINY, losses

SMALL: dict[str, Any] = {
    "steps": 12, "batch": 4, "context": 32, "eval_every": 6, "save_every": 4,
    "eval_windows": 4, "sample_tokens": 2, "warmup_steps": 2,
    "model_overrides": {"layers": 1, "width": 32, "heads": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that the function trained, called in another thread."""
    folder = tmp_path_factory.mktemp("called") / "r"
    with ThreadPoolExecutor() as pool:
        train = pool.submit(fp8stack.pretrain, recipe="delayed", out=folder, **SMALL)
        assert train.result() == folder
    return folder


def test_it_trains_what_the_command_trains(called, command, tmp_path):
    assert command("pretrain", "--recipe", "delayed", "--out", "run", *TINY) == 0
    assert losses(called) == losses(tmp_path / "run")
    assert len(losses(called)) == 12


def test_its_keys_overrule_a_run_file(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('steps = 99\nrecipe = "fp32"\nsave_every = 1\n')
    run = fp8stack.pretrain(file, **SMALL | {"steps": 2}, out=tmp_path / "run", recipe="bf16")
    saved = (run / "run.toml").read_text()
    assert "\nsteps = 2\n" in saved
    assert '\nrecipe = "bf16"\n' in saved
    config = fp8stack.RunConfig(out=str(run), steps=3)
    assert fp8stack.pretrain(config, resume="auto") == run
    assert [row[0] for row in losses(run)] == [1, 2, 3]


def test_a_signal_saves_and_is_raised(called, tmp_path, monkeypatch):
    append = RunFolder.append_metrics

    def stop_at_three(self: RunFolder, row: dict) -> None:
        append(self, row)
        if row["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as stop:
        stop.setattr(RunFolder, "append_metrics", stop_at_three)
        with pytest.raises(UserError, match=r"after step [34]") as caught:
            fp8stack.pretrain(recipe="delayed", out=tmp_path / "run", **SMALL)
    assert caught.value.exit_code == 75
    run = fp8stack.pretrain(out=tmp_path / "run", resume="auto")
    assert losses(run) == losses(called)
