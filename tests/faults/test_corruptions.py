"""A run on the disk that is damaged or made up: the file is named, the last good one used."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import fp8stack
from fp8stack.checkpoint import reader
from fp8stack.errors import NoUsableCheckpoint
from tests.conftest import Command
from tests.faults.bounded import TIMEOUT, TRACEBACK, bounded, command
from tests.faults.input_corruptions import (
    CORRUPTIONS,
    NEWEST,
    OLDER,
    make_run,
    problem,
    replace,
    rewrite,
)

# Children are forked, and threads are not.
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("made"))


@pytest.fixture
def run(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "run"))


@pytest.mark.parametrize("what", CORRUPTIONS)
def test_the_file_is_named_and_the_last_good_checkpoint_used(
    what: str, pristine: Path, tmp_path: Path
) -> None:
    assert problem(pristine, tmp_path / "copy", CORRUPTIONS[what]) == ""


def _nan_weights(checkpoint_folder: Path) -> None:
    CORRUPTIONS["NaN weight"].damage(checkpoint_folder)


def _flipped(checkpoint_folder: Path) -> None:
    CORRUPTIONS["model.safetensors flipped"].damage(checkpoint_folder)


@pytest.mark.parametrize("damage", [_nan_weights, _flipped])
def test_a_named_checkpoint_that_is_bad_is_refused_and_no_other_taken(damage, run: Path) -> None:
    bad = run / "checkpoints" / NEWEST
    damage(bad)
    for words in (["--resume", str(bad)], ["--init-from", str(bad), "--out", "o"]):
        ended = command(["pretrain", *words], run.parent)
        assert (ended.code, ended.is_one_line) == (3, True)
        assert f"{NEWEST}" in ended.stderr
    with pytest.raises(NoUsableCheckpoint, match=NEWEST):
        fp8stack.load(bad)


@pytest.mark.parametrize("damage", [_nan_weights, _flipped])
def test_weights_come_from_the_last_good_checkpoint_and_it_is_said(damage, run: Path) -> None:
    damage(run / "checkpoints" / NEWEST)
    with pytest.warns(UserWarning, match=f"{OLDER} is used, an older checkpoint.*{NEWEST}"):
        model = fp8stack.load(run)
    good = reader.load(run / "checkpoints" / OLDER).tensors["model"]
    assert all(torch.equal(p, good[name]) for name, p in model.named_parameters())
    short = ["--data", str(run / "run.toml"), "--steps", "1", "--context", "8"]
    ended = command(["pretrain", "--init-from", str(run), "--out", "o", *short], run.parent)
    assert ended.code == 0, ended.stderr
    assert f"{OLDER}; optimizer, scales and schedule are new; passed over: " in ended.stdout


def test_a_run_without_run_toml_goes_on_by_its_path_too(
    run: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "run.toml").unlink()
    (run / "metrics.jsonl").unlink()
    assert command("pretrain", "--resume", str(run), "--steps", "5") == 0
    assert "written anew from the checkpoint" in capsys.readouterr().out
    assert "steps = 5" in (run / "run.toml").read_text()


def test_a_renamed_checkpoint_gives_its_weights(run: Path) -> None:
    (run / "checkpoints" / OLDER).rename(run / "best")
    assert isinstance(fp8stack.load(run / "best"), fp8stack.GPT)


def test_a_checkpoint_in_the_place_of_another_is_named(run: Path) -> None:
    for path in (run / "checkpoints" / OLDER, run / "checkpoints" / "step-000009"):
        shutil.copytree(run / "checkpoints" / NEWEST, path, dirs_exist_ok=True)
    with pytest.warns(UserWarning, match="step-000009 cannot be used: it is of step 4"):
        fp8stack.load(run)


@pytest.mark.parametrize("name", [f"{NEWEST}/model.safetensors", f"{NEWEST}/checkpoint.json"])
def test_looking_for_a_bad_checkpoint_changes_nothing(name: str, run: Path) -> None:
    (run / "checkpoints" / name).write_bytes(b"")
    (run / "checkpoints" / OLDER / "checkpoint.json").write_text("[]")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert command(["pretrain", "--resume", "auto", "--out", str(run)], run.parent).code == 3
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_file_that_is_far_too_large_is_not_read(run: Path) -> None:
    weights = run / "checkpoints" / NEWEST / "model.safetensors"
    with weights.open("r+b") as stream:
        stream.truncate(2**40)  # a hole, which takes no room
    ended = command(["pretrain", "--resume", "auto", "--out", str(run)], run.parent)
    assert ended.code == 0, ended.stderr
    assert f"{NEWEST}/model.safetensors is damaged: it has {2**40} bytes" in ended.stdout


def test_a_child_that_eats_memory_or_time_is_ended() -> None:
    assert bounded(lambda: bytearray(2**31), 2**28).code == TRACEBACK
    assert bounded(lambda: [None for _ in iter(int, 1)], seconds=0.3).code in (TIMEOUT, TRACEBACK)


def test_a_stranger_can_state_right_sums(run: Path) -> None:
    """What the corruptions build on: a manifest that is rewritten verifies."""
    folder = run / "checkpoints" / NEWEST
    rewrite(folder, lambda body: body["info"]["versions"].update(torch="0"))
    replace(folder, "rng.safetensors", (folder / "rng.safetensors").read_bytes())
    assert reader.load(folder).info["versions"]["torch"] == "0"
