"""Checkpoints that are written in the background, and which ones are kept."""

import errno
import os
import shutil
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8stack.common import io
from fp8stack.common.errors import NumericFailure, StorageError
from fp8stack.training.checkpoint import reader, writer
from fp8stack.training.checkpoint.saver import Saver
from tests.conftest import TINY, losses
from tests.training.checkpoint.test_reader import GUARD, INFO

Groups = dict[str, dict[str, Tensor]]


def _tensors(value: float) -> Groups:
    model = {"b": torch.full((3, 5), value), "a": torch.arange(6.0).view(2, 3).t() + value}
    return {"model": model, "rng": {"cpu": torch.full((9,), int(value), dtype=torch.uint8)}}


def _saver(folder: Path, **options: Any) -> Saver:
    return Saver(folder, **({"keep": 2, "in_background": True} | options))


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_is_what_the_tensors_were_though_training_goes_on(tmp_path, monkeypatch):
    changed, write = threading.Event(), writer.write

    def late(*arguments: Any) -> Path:
        assert changed.wait(30)
        return write(*arguments)

    monkeypatch.setattr(writer, "write", late)
    saver, tensors, info = _saver(tmp_path), _tensors(1), INFO | {"guard": GUARD | {"bad": []}}
    saver.save(1, info, lambda: tensors)
    assert not list(tmp_path.glob("step-*"))  # `save` did not wait for it
    tensors["model"]["b"].zero_()
    info["guard"]["bad"].append({"step": 2})
    changed.set()
    saver.wait()
    saved = reader.load(tmp_path / "step-000001")
    assert torch.equal(saved.tensors["model"]["b"], _tensors(1)["model"]["b"])
    assert saved.info["guard"] == GUARD


def _no_room(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("surfaces", ["save", "wait", "with"])
def test_a_full_disk_in_the_background_is_told_once_at_the_next_chance(
    surfaces, tmp_path, monkeypatch
):
    saver = _saver(tmp_path)
    saver.save(1, INFO, lambda: _tensors(1))
    saver.wait()
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", _no_room)
        saver.save(2, INFO, lambda: _tensors(2))
        assert saver._thread is not None
        saver._thread.join()
    ways: dict[str, Callable[[], object]] = {
        "save": lambda: saver.save(3, INFO, lambda: _tensors(3)),
        "wait": saver.wait,
        "with": lambda: saver.__exit__(None, None, None),
    }
    with pytest.raises(StorageError, match=r"disk is full. Make room there."):
        ways[surfaces]()
    saver.wait()  # once
    assert _names(tmp_path) == ["step-000001"]
    saver.save(4, INFO, lambda: _tensors(4))
    saver.wait()
    assert _names(tmp_path) == ["step-000001", "step-000004"]


def test_another_error_is_not_hidden_by_a_full_disk_but_both_are_told(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(os, "fsync", _no_room)
    saver, failure = _saver(tmp_path), NumericFailure("steps went wrong")
    saver.save(1, INFO, lambda: _tensors(1))
    saver.__exit__(NumericFailure, failure, None)
    assert "the disk is full" in capsys.readouterr().out


def _save_all(saver: Saver, *steps: int) -> None:
    for step in steps:
        saver.save(step, INFO, partial(_tensors, step))
    saver.wait()


def _steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in reader.candidates(folder)]


@pytest.mark.parametrize("in_background", [False, True])
def test_the_newest_and_every_so_many_are_kept(in_background, tmp_path):
    saver = _saver(tmp_path, keep=3, keep_every=4, in_background=in_background)
    _save_all(saver, *range(2, 21, 2))
    assert _steps(tmp_path) == [20, 18, 16, 12, 8, 4]
    assert _names(tmp_path) == [f"step-{step:06d}" for step in (4, 8, 12, 16, 18, 20)]


@pytest.mark.parametrize("file", ["model.safetensors", "checkpoint.json"])
@pytest.mark.parametrize("grow", [True, False])
def test_a_damaged_checkpoint_takes_the_place_of_no_good_one(file, grow, tmp_path):
    _save_all(_saver(tmp_path), 1, 2)
    damaged = tmp_path / "step-000002" / file
    content = damaged.read_bytes()
    damaged.write_bytes(content + b"x" if grow else content[:-2] + b"??")
    later = _saver(tmp_path)  # as in a new process, which does not know
    _save_all(later, 3)
    assert _steps(tmp_path) == [3, 2, 1]
    _save_all(later, 4)
    assert _steps(tmp_path) == [4, 3]


def test_a_removal_that_is_cut_short_leaves_no_half_of_a_checkpoint(tmp_path, monkeypatch):
    saver = _saver(tmp_path, in_background=False)
    _save_all(saver, 1, 2)
    with monkeypatch.context() as cut:

        def remove_the_second(path: Path, remove: Any = shutil.rmtree, **options: Any) -> None:
            if "000001" not in path.name:
                remove(path, **options)

        cut.setattr(shutil, "rmtree", remove_the_second)
        _save_all(saver, 3)
    assert _steps(tmp_path) == [3, 2]
    writer.sweep(tmp_path)
    assert _names(tmp_path) == ["step-000002", "step-000003"]


# Whole runs; that one which saves in the background is the same: tests/training/test_pretrain.py


def test_a_stop_waits_until_the_checkpoint_is_on_the_disk(command, tmp_path, monkeypatch):
    def slow(path: Path, content: bytes, write: Any = io.write_flushed) -> None:
        if path.parent.name == ".tmp-step-000004":  # the one of `--save-every`
            os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(0.1)
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_flushed", slow)
        flags = ["pretrain", "--recipe", "delayed", *TINY]
        assert command(*flags, "--out", "r", "--checkpoint-async") == 75
    stopped = losses(tmp_path / "r")[-1][0]
    assert stopped < 12
    assert _steps(tmp_path / "r/checkpoints")[0] == stopped
    assert not list((tmp_path / "r/checkpoints").glob(".tmp-*"))


def test_metrics_are_flushed_before_the_checkpoint_can_be_seen(tmp_path):
    visible: list[list[str]] = []
    saver = _saver(tmp_path, before=lambda: visible.append(_names(tmp_path)))
    saver.save(1, INFO, lambda: _tensors(1))
    saver.wait()
    assert visible == [[]]
