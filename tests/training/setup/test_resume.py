"""The checkpoints that a restarted run resumes from, passes over or refuses.

Tests of changes that a resumed run refuses are in tests/faults/numeric/test_other_run.py; tests of
other damage are in tests/faults/inputs/test_inputs.py.
"""

import errno
import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8stack.model.config import load_config
from fp8stack.planning.run_config import RunConfig
from fp8stack.precision import Hardware
from fp8stack.training.checkpoint import reader
from fp8stack.training.run_folder import RunFolder
from fp8stack.training.run_plans import Decided, plan_phases
from fp8stack.training.setup import resume
from tests.conftest import losses, metrics
from tests.faults.inputs.input_corruptions import rewrite
from tests.training.conftest import AUTO, saved


@pytest.mark.parametrize("flags", [["--resume"], ["--resume", "auto"]])
def test_only_the_run_in_out_or_a_named_one_is_resumed(
    flags, new, command, refused, tmp_path, monkeypatch
):
    """Nothing is looked for in `runs`, and a finished or unfinished run in `--out` is kept."""
    cut = RunFolder(tmp_path / "runs/gpt-nano-fp32")
    cut.claim()
    cut.release()
    needs_out = "--resume auto needs --out, the run's folder. Or name it: --resume RUN"
    refused(*new, *flags, message=needs_out)
    with monkeypatch.context() as restart:
        restart.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        refused(*new, message=needs_out)
    assert command(*new, "--steps", "1") == 0  # where a start was cut early
    assert command(*new, "--steps", "1") == 0
    assert [path.name for path in cut.path.parent.iterdir()] == [
        cut.path.name,
        f"{cut.path.name}-2",
    ]
    again = [*new, "--steps", "2", "--out", "runs/gpt-nano-fp32"]
    refused(*again, message="holds a run already. Go on with it by --resume auto")
    assert command(*again, *flags, "--steps", "2") == 0
    assert [row[0] for row in losses(cut.path)] == [1, 2]


@pytest.mark.full
def test_a_run_goes_on_in_its_compute_dtype_on_another_kind_of_cpu(
    finished, command, monkeypatch, tmp_path, capsys
):
    flags = ["pretrain", "--recipe", "mxfp8", "--data", str(finished / "t.txt"), "--out", "r"]
    flags += ["--set", "model_overrides.width=256", "--set", "model_overrides.layers=1"]
    flags += ["--context", "8", "--batch", "2", "--seed", "1", "--schedule", "constant"]
    monkeypatch.setenv("FP8STACK_CPU_BF16", "no")
    assert command(*flags, "--steps", "4") == 0
    expected = [row[1] for row in losses(tmp_path / "r")]
    shutil.rmtree(tmp_path / "r")
    assert command(*flags, "--steps", "2") == 0
    monkeypatch.setenv("FP8STACK_CPU_BF16", "yes")
    capsys.readouterr()
    assert command("pretrain", "--resume", "auto", "--out", "r", "--steps", "4") == 0
    printed = capsys.readouterr().out
    assert "computes in fp32 as it began; bf16 is faster here" in printed
    assert [row[1] for row in losses(tmp_path / "r")] == pytest.approx(expected, rel=1e-3)
    plan = reader.load(tmp_path / "r/checkpoints/step-000004").info["plan"]
    assert plan["compute_dtype"] == "fp32"


MEMORY = "fp8stack.precision.system_memory.available_memory"


def _deny(*_: object) -> bytes:
    raise PermissionError(errno.EACCES, "Permission denied")


LACKING: dict[str, tuple[Callable[[pytest.MonkeyPatch, Path], object], str]] = {
    "memory": (lambda patch, _: patch.setattr(MEMORY, lambda _: 0), "0.0 GiB are left"),
    "a permission": (lambda patch, _: patch.setattr(Path, "read_bytes", _deny), "Permission den"),
    "a newer version": (
        lambda _, folder: rewrite(folder, lambda body: body.update(format=2)),
        "has format 2; this version of fp8stack reads 1. Use the version that wrote it",
    ),
}


@pytest.mark.parametrize("lacking", LACKING)
def test_a_sound_checkpoint_is_not_passed_over_for_what_the_machine_lacks(
    lacking, run, refused, monkeypatch
):
    take_away, message = LACKING[lacking]
    take_away(monkeypatch, run / "checkpoints/step-000012")
    refused(*AUTO, message=message)
    if lacking != "memory":  # else a module that is first imported here would keep the change
        refused("eval", "r", message=message)


def test_a_run_without_a_checkpoint_begins_again_as_its_run_toml_says_now(
    run, command, finished, capsys
):
    shutil.rmtree(run / "checkpoints")
    assert command(*AUTO) == 0
    assert "r has no checkpoint yet: starting again from step 1" in capsys.readouterr().out
    assert losses(run) == losses(finished / "r")
    file = run / "run.toml"
    for edit, code in (("lr = 0.001", 0), ("lr = ", 2)):
        shutil.rmtree(run / "checkpoints")
        file.write_text(file.read_text().replace("lr = 0.003", edit).replace("lr = 0.001", edit))
        assert command(*AUTO) == code
    assert max(row["lr"] for row in metrics(run)) == 0.001
    file.write_text(file.read_text().replace("lr = ", "lr = 0.001", 1))
    assert command(*AUTO, "--lr", "0.002") == 0  # nothing is trained that it could change
    assert max(row["lr"] for row in metrics(run)) == 0.002


def test_a_file_system_without_locks_can_be_trained_on(run, command, monkeypatch):
    def no_locks(*arguments: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert command(*AUTO, "--steps", "13") == 0


def test_what_torchrun_starts_again_goes_on_by_itself_and_overwrites_nothing(
    run, new, command, refused, finished, monkeypatch, capsys
):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert command(*new, "--out", "r") == 2
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    refused(*new, "--out", "r", "--overwrite", message="give torchrun no --max-restarts")
    shutil.rmtree(run / "checkpoints/step-000012")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    capsys.readouterr()
    assert command(*new, "--out", "r") == 0
    printed = capsys.readouterr().out
    assert "torchrun started this again: going on as with --resume auto" in printed
    assert "resumed from r/checkpoints/step-000008" in printed
    assert losses(run) == losses(finished / "r")
    assert saved(run) == ["step-000012", "step-000008"]


def test_a_named_checkpoint_is_the_one_that_is_used(run, finished, command, refused, capsys):
    uninterrupted = losses(run)
    shutil.copy(finished / "t.txt", "moved.txt")  # the data may have moved
    words = ["pretrain", "--resume", "r/checkpoints/step-000008", "--data", "moved.txt"]
    assert command(*words, "--steps", "8") == 0
    assert saved(run) == ["step-000008"]  # the later one is abandoned
    assert losses(run)[-1][0] == 8
    assert command(*words, "--steps", "14") == 0
    printed = capsys.readouterr().out
    assert "resumed from r/checkpoints/step-000008\n" in printed
    assert "steps 12 -> 14: the learning rate follows the new" in printed
    assert [row[:3] for row in losses(run)[:8]] == [row[:3] for row in uninterrupted[:8]]
    refused("pretrain", "--resume", "r", "--steps", "3", message="has done 14. Give more")
    (run / "checkpoints/step-000012/checkpoint.json").unlink()
    refused("pretrain", "--resume", "r/checkpoints/step-000012", code=3)


def test_steps_that_are_repeated_are_dropped_from_the_log(tmp_path):
    """Events of a roll-back are kept, whether or not a step was logged since."""
    for number, since in enumerate(([{"step": s, "loss": 2.0} for s in (5, 6)], [])):
        folder = RunFolder(tmp_path / str(number))
        folder.path.mkdir()
        rows: list[dict[str, Any]] = [
            *({"step": step, "loss": 1.0} for step in range(1, 9)),
            {"step": 8, "event": "skip", "why": "nan"},
            {"step": 8, "event": "rollback", "to_step": 4},
            *since,
        ]
        for row in (*rows, {"step": 7, "loss": 2.0}):
            folder.append_metrics(row)
        folder.append_telemetry([{"step": 1}, {"step": 7}], {"recipe": "delayed"})
        folder.forget_after(6)
        assert metrics(folder.path) == rows
        rows_before = folder.telemetry.read_text().splitlines()
        assert [json.loads(line).get("step") for line in rows_before] == [None, 1]


def test_a_late_validation_loss_belongs_to_the_row_of_its_step_and_to_no_event(tmp_path):
    folder = RunFolder(tmp_path)
    bad = {"step": 8, "event": "skip", "loss": 9.0, "why": "the loss is above its limit"}
    for row in ({"step": 8, "loss": 1.0}, bad):
        folder.append_metrics(row)
    folder.complete_metrics(8, {"val_loss": 2.0})
    rows = [{"step": 8, "loss": 1.0, "val_loss": 2.0}, bad]
    assert metrics(folder.path) == rows
    folder.append_metrics(bad | {"step": 9})
    folder.complete_metrics(9, {"val_loss": 3.0})
    assert metrics(folder.path) == [*rows, bad | {"step": 9}, {"step": 9, "val_loss": 3.0}]


def test_auto_keeps_its_choice_to_train_without_fp8():
    """On an H100 without Transformer Engine, FP8 does not pay for such micro-batches."""
    h100 = Hardware("cuda", (9, 0), has_te=False, name="NVIDIA H100")
    config, shape = RunConfig(model="gpt2-1.5b", recipe="auto"), load_config("gpt2-1.5b")
    (plan,), _ = plan_phases(config, shape, h100, Decided(), 4096)
    assert plan.recipe.name == "bf16"
    assert "too close to tell" in " ".join(plan.reasons)
    for tokens in (4096, 2**20):  # on fewer ranks, FP8 might pay
        info = {"phases": None, "plans": [plan.to_json()], "plan": plan.to_json()}
        (again,), _ = plan_phases(config, shape, h100, resume._decided_in(info), tokens)
        assert again.recipe.to_json(words=False) == plan.recipe.to_json(words=False)
        assert "the run began without FP8" in " ".join(again.reasons)
        plan = again
