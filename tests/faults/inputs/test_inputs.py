"""Bad, forged or changing input: the error names it, and the good checkpoints are used."""

import shutil
from pathlib import Path

import pytest

import fp8stack
from fp8stack.common.errors import NoUsableCheckpoint
from fp8stack.training.checkpoint import reader
from tests.faults.inputs import input_data, input_fuzz
from tests.faults.inputs.input_corruptions import CORRUPTIONS, NEWEST, OF_RUNS, OLDER, problem
from tests.support.small_loop import changed


@pytest.fixture
def run(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "run"))


ALL_BAD = {"rng missing", "swapped files", "NaN weight", "a pipe as manifest", "no plan"}


@pytest.mark.parametrize("corruption", [*CORRUPTIONS, *OF_RUNS])
@pytest.mark.full
def test_the_file_is_named_and_the_last_good_checkpoint_used(corruption, pristine, tmp_path):
    assert problem(pristine, tmp_path / "copy", corruption, corruption in ALL_BAD) == ""


BAD = ["NaN weight", "the guard's memory"]


@pytest.mark.parametrize("corruption", BAD)
def test_a_named_checkpoint_that_is_bad_is_refused_and_no_other_taken(corruption, run, refused):
    bad = run / "checkpoints" / NEWEST
    CORRUPTIONS[corruption][0](bad)
    for words in (["--resume", str(bad)], ["--init-from", str(bad), "--out", "o"]):
        refused("pretrain", *words, code=3, message=NEWEST)
    assert not Path("o").exists()
    with pytest.raises(NoUsableCheckpoint, match=NEWEST):
        fp8stack.load(bad)


@pytest.mark.parametrize("corruption", BAD)
def test_weights_come_from_the_last_good_checkpoint_and_it_is_said(
    corruption, run, command, capsys
):
    CORRUPTIONS[corruption][0](run / "checkpoints" / NEWEST)
    with pytest.warns(UserWarning, match=f"{OLDER} is used, an older checkpoint.*{NEWEST}"):
        model = fp8stack.load(run)
    good = reader.load(run / "checkpoints" / OLDER).tensors["model"]
    assert changed(dict(model.named_parameters()), good) == []
    short = ["--data", str(run / "run.toml"), "--steps", "1", "--context", "8"]
    short += ["--set", "eval_windows=1", "--set", "sample_tokens=0"]
    assert command("pretrain", "--init-from", str(run), "--out", "o", *short) == 0
    message = f"{OLDER}; optimizer, scales and schedule are new; passed over: "
    assert message in capsys.readouterr().out


def test_a_run_without_run_toml_goes_on_by_its_path_too(run, command, capsys):
    (run / "run.toml").unlink()
    (run / "metrics.jsonl").unlink()
    assert command("pretrain", "--resume", str(run), "--steps", "5") == 0
    assert "written anew from the checkpoint" in capsys.readouterr().out
    assert "steps = 5" in (run / "run.toml").read_text()


def test_a_checkpoint_in_the_place_of_another_is_named(run):
    for path in (run / "checkpoints" / OLDER, run / "checkpoints" / "step-000009"):
        shutil.copytree(run / "checkpoints" / NEWEST, path, dirs_exist_ok=True)
    with pytest.warns(UserWarning, match="step-000009 cannot be used: it is of step 4"):
        fp8stack.load(run)


# Data


@pytest.mark.parametrize(
    ("fault", "workers"),
    [*((fault, 0) for fault in input_data.FAULTS), *((fault, 2) for fault in input_data.MEANWHILE)],
)
def test_the_file_and_the_place_are_named(fault, workers, tmp_path):
    assert input_data.problem(tmp_path, fault, workers) == ""


# Files that nobody would write; the long form is `python -m bench reliability`


CONFIGS, DATA_FILES = input_fuzz.configs(), input_fuzz.data_files()
RUN_FILES = ("metrics.jsonl", "telemetry.jsonl", "plan.json", "run.toml", "manifests")


@pytest.mark.parametrize("name", CONFIGS)
def test_any_configuration_is_taken_or_refused_in_one_line(name, tmp_path):
    assert input_fuzz.fuzz(tmp_path, *CONFIGS[name], 30) >= 25


@pytest.mark.parametrize("name", DATA_FILES)
def test_any_data_are_taken_or_refused_in_one_line(name, tmp_path):
    assert input_fuzz.fuzz(tmp_path, *DATA_FILES[name], 100) >= 75


@pytest.mark.parametrize("name", RUN_FILES)
@pytest.mark.full
def test_any_file_of_a_run_is_read_or_refused_in_one_line(name, pristine, tmp_path):
    assert input_fuzz.fuzz(tmp_path, *input_fuzz.run_files(pristine)[name], 8) >= 6
