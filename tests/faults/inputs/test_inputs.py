"""What comes from outside is bad, made up or goes bad: it is named, and what is good is used."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st

import fp8stack
from fp8stack.checkpoint import reader
from fp8stack.errors import NoUsableCheckpoint
from fp8stack.training import loop
from tests.conftest import TINY, metrics
from tests.faults.bounded import TIMEOUT, TRACEBACK, bounded
from tests.faults.bounded import command as in_child
from tests.faults.inputs import input_data, input_fuzz
from tests.faults.inputs.input_corruptions import (
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
def test_the_file_is_named_and_the_last_good_checkpoint_used(what, pristine, tmp_path):
    assert problem(pristine, tmp_path / "copy", CORRUPTIONS[what]) == ""


def _nan_weights(checkpoint_folder: Path) -> None:
    CORRUPTIONS["NaN weight"].damage(checkpoint_folder)


def _flipped(checkpoint_folder: Path) -> None:
    CORRUPTIONS["model.safetensors flipped"].damage(checkpoint_folder)


@pytest.mark.parametrize("damage", [_nan_weights, _flipped])
def test_a_named_checkpoint_that_is_bad_is_refused_and_no_other_taken(damage, run):
    bad = run / "checkpoints" / NEWEST
    damage(bad)
    for words in (["--resume", str(bad)], ["--init-from", str(bad), "--out", "o"]):
        ended = in_child(["pretrain", *words], run.parent)
        assert (ended.code, ended.is_one_line) == (3, True)
        assert f"{NEWEST}" in ended.stderr
    with pytest.raises(NoUsableCheckpoint, match=NEWEST):
        fp8stack.load(bad)


@pytest.mark.parametrize("damage", [_nan_weights, _flipped])
def test_weights_come_from_the_last_good_checkpoint_and_it_is_said(damage, run):
    damage(run / "checkpoints" / NEWEST)
    with pytest.warns(UserWarning, match=f"{OLDER} is used, an older checkpoint.*{NEWEST}"):
        model = fp8stack.load(run)
    good = reader.load(run / "checkpoints" / OLDER).tensors["model"]
    assert all(torch.equal(p, good[name]) for name, p in model.named_parameters())
    short = ["--data", str(run / "run.toml"), "--steps", "1", "--context", "8"]
    ended = in_child(["pretrain", "--init-from", str(run), "--out", "o", *short], run.parent)
    assert ended.code == 0, ended.stderr
    assert f"{OLDER}; optimizer, scales and schedule are new; passed over: " in ended.stdout


def test_a_run_without_run_toml_goes_on_by_its_path_too(run, command, capsys):
    (run / "run.toml").unlink()
    (run / "metrics.jsonl").unlink()
    assert command("pretrain", "--resume", str(run), "--steps", "5") == 0
    assert "written anew from the checkpoint" in capsys.readouterr().out
    assert "steps = 5" in (run / "run.toml").read_text()


def test_a_renamed_checkpoint_gives_its_weights(run):
    (run / "checkpoints" / OLDER).rename(run / "best")
    assert isinstance(fp8stack.load(run / "best"), fp8stack.GPT)


def test_a_checkpoint_in_the_place_of_another_is_named(run):
    for path in (run / "checkpoints" / OLDER, run / "checkpoints" / "step-000009"):
        shutil.copytree(run / "checkpoints" / NEWEST, path, dirs_exist_ok=True)
    with pytest.warns(UserWarning, match="step-000009 cannot be used: it is of step 4"):
        fp8stack.load(run)


@pytest.mark.parametrize("name", [f"{NEWEST}/model.safetensors", f"{NEWEST}/checkpoint.json"])
def test_looking_for_a_bad_checkpoint_changes_nothing(name, run):
    (run / "checkpoints" / name).write_bytes(b"")
    (run / "checkpoints" / OLDER / "checkpoint.json").write_text("[]")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert in_child(["pretrain", "--resume", "auto", "--out", str(run)], run.parent).code == 3
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_file_that_is_far_too_large_is_not_read(run):
    weights = run / "checkpoints" / NEWEST / "model.safetensors"
    with weights.open("r+b") as stream:
        stream.truncate(2**40)  # a hole, which takes no room
    ended = in_child(["pretrain", "--resume", "auto", "--out", str(run)], run.parent)
    assert ended.code == 0, ended.stderr
    assert f"{NEWEST}/model.safetensors is damaged: it has {2**40} bytes" in ended.stdout


def test_a_child_that_eats_memory_or_time_is_ended():
    assert bounded(lambda: bytearray(2**31), 2**28).code == TRACEBACK
    assert bounded(lambda: [None for _ in iter(int, 1)], seconds=0.3).code in (TIMEOUT, TRACEBACK)


def test_a_stranger_can_state_right_sums(run):
    """What the corruptions build on: a manifest that is rewritten verifies."""
    folder = run / "checkpoints" / NEWEST
    rewrite(folder, lambda body: body["info"]["versions"].update(torch="0"))
    replace(folder, "rng.safetensors", (folder / "rng.safetensors").read_bytes())
    assert reader.load(folder).info["versions"]["torch"] == "0"


# Data


@pytest.mark.parametrize("fault", input_data.FAULTS)
def test_the_file_and_the_place_are_named(fault, tmp_path):
    assert input_data.problem(tmp_path, fault) == ""


@pytest.mark.parametrize("fault", input_data.MEANWHILE)
def test_they_are_named_by_processes_that_read_ahead_too(fault, tmp_path):
    assert input_data.problem(tmp_path, fault, workers=2) == ""


def test_a_run_whose_data_go_bad_ends_with_what_it_learnt_saved(tmp_path, command, monkeypatch):
    path = input_data.good(tmp_path / "a.bin")
    advance = loop._Loop.advance

    def then_shrink(self: loop._Loop, step: int, tokens_BT: torch.Tensor) -> None:
        advance(self, step, tokens_BT)
        if step == 6:
            with path.open("r+b") as stream:
                stream.truncate(100)

    monkeypatch.setattr(loop._Loop, "advance", then_shrink)
    words = ["--data", "a.bin", "--recipe", "fp32", "--set", "model_overrides.vocabulary=300"]
    ended = in_child(["pretrain", "--out", "r", *TINY, *words], tmp_path)
    assert (ended.code, ended.is_one_line) == (2, True), ended.stderr
    assert "a.bin shrank while in use" in ended.stderr
    assert [row["step"] for row in metrics(tmp_path / "r")] == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "r" / "checkpoints" / "step-000006").is_dir()
    input_data.good(path)
    assert command("pretrain", "--resume", "r") == 0
    assert metrics(tmp_path / "r")[-1]["step"] == 12


def test_every_fault_is_done_to_a_file_that_was_good(tmp_path):
    """Else a fault could be found for another reason than the one it is for."""
    input_data.BEFORE["no fault"] = (lambda path: None, ())
    try:
        assert input_data.problem(tmp_path, "no fault").startswith("exit 0")
    finally:
        del input_data.BEFORE["no fault"]


# Files that nobody would write; the long form is `python -m bench reliability`


CONFIGS, DATA_FILES = input_fuzz.configs(), input_fuzz.data_files()
RUN_FILES = ("metrics.jsonl", "telemetry.jsonl", "plan.json", "run.toml", "rows", "manifests")


@pytest.mark.parametrize("name", CONFIGS)
def test_any_configuration_is_taken_or_refused_in_one_line(name, tmp_path):
    assert input_fuzz.fuzz(tmp_path, *CONFIGS[name], 50) >= 45


@pytest.mark.parametrize("name", DATA_FILES)
def test_any_data_are_taken_or_refused_in_one_line(name, tmp_path):
    assert input_fuzz.fuzz(tmp_path, *DATA_FILES[name], 200) >= 150


@pytest.mark.parametrize("name", RUN_FILES)
def test_any_file_of_a_run_is_read_or_refused_in_one_line(name, pristine, tmp_path):
    assert input_fuzz.fuzz(tmp_path, *input_fuzz.run_files(pristine)[name], 15) >= 12


def test_an_error_that_is_not_for_users_is_not_let_by(tmp_path):
    def fails(place: Path, value: int) -> None:
        raise KeyError(value)

    with pytest.raises(KeyError):
        input_fuzz.fuzz(tmp_path, st.integers(), fails, 5)
