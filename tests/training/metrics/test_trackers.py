"""TensorBoard, Weights & Biases and Trackio get a run's numbers: written, and read back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from fp8stack.config import RunConfig
from fp8stack.errors import UserError
from fp8stack.training.metrics import trackers
from tests.conftest import TINY, metrics

PRETRAIN = [sys.executable, "-m", "fp8stack", "pretrain"]
KEYS = ("loss", "lr", "grad_norm")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("WANDB_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")


def wanted(run: Path, key: str) -> list[tuple[int, Any]]:
    """What a tracker should have of a key: the rows of `metrics.jsonl`."""
    rows = [row for row in metrics(run) if row.get(key) is not None]
    return [(row["step"], pytest.approx(row[key], rel=1e-6)) for row in rows]


def in_a_process(*words: str, cwd: Path, **environment: str) -> str:
    """What a command prints."""
    variables = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    done = subprocess.run(words, cwd=cwd, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


# TensorBoard


def tensorboard(run: Path, key: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in seen.Scalars(key)]


def test_tensorboard_has_the_settings_and_every_metric_once_also_when_a_run_goes_on(
    command, tmp_path
):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert command("pretrain", "--recipe", "delayed", "--out", "r", "--tensorboard", *TINY) == 0
    for key in (*KEYS, "val_loss"):
        assert tensorboard(tmp_path / "r", key) == wanted(tmp_path / "r", key)
    assert [step for step, _ in tensorboard(tmp_path / "r", "val_loss")] == [6, 12]
    seen = EventAccumulator(str(tmp_path / "r" / "tensorboard")).Reload()
    (text,) = seen.Tensors("run.toml/text_summary")
    assert 'recipe = "delayed"' in text.tensor_proto.string_val[0].decode()
    earlier = "r/checkpoints/step-000008"
    assert command("pretrain", "--resume", earlier, "--steps", "14", "--save-every", "4") == 0
    assert tensorboard(tmp_path / "r", "loss") == wanted(tmp_path / "r", "loss")
    assert [step for step, _ in tensorboard(tmp_path / "r", "loss")] == list(range(1, 15))


def test_tensorboard_drops_steps_that_a_rollback_undid(tmp_path):
    (board,) = trackers.build_trackers(RunConfig(tensorboard=True), tmp_path)
    board.start()
    for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 2.5), (3, 3.5)):
        board.log({"loss": loss}, step=step)
    board.finish()
    assert tensorboard(tmp_path, "loss") == [(1, 1.0), (2, 2.5), (3, 3.5)]


# Weights & Biases


def wandb_runs(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/offline-run-*"), key=lambda path: path.stat().st_mtime_ns)


def wandb_records(run: Path) -> Iterator[Any]:
    """What an offline run wrote, record by record: the log format of LevelDB, after 7 bytes. Each
    block of 32 KiB has pieces: 4 bytes of checksum, 2 of length, 1 that says if more comes."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = run.glob("*.wandb")
    content, at, whole = file.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # what is left of a block holds no piece
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def wandb_rows(run: Path) -> list[dict[str, Any]]:
    found = []
    for record in wandb_records(run):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
            found.append(row)
    return found


def wandb_run(run: Path) -> Any:
    """Name, project, id and settings of an offline run."""
    records = (r for r in wandb_records(run) if r.WhichOneof("record_type") == "run")
    return next(records).run


def test_wandb_has_every_metric_at_its_step_where_the_environment_says(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    own = {"WANDB_NAME": "first try", "WANDB_DIR": str(tmp_path / "elsewhere")}
    words = [*PRETRAIN, "--recipe", "delayed", "--out", "r", "--wandb", *TINY]
    # At the end of a process all is written; the project is read once a process.
    in_a_process(*words, cwd=tmp_path, WANDB_PROJECT="mine", **own)
    assert not wandb_runs(tmp_path / "r")
    (offline,) = wandb_runs(tmp_path / "elsewhere")
    rows = wandb_rows(offline)
    for key in (*KEYS, "val_loss"):
        found = [(row["_step"], row[key]) for row in rows if key in row]
        assert found == wanted(tmp_path / "r", key)
    told = wandb_run(offline)
    assert (told.project, told.display_name) == ("mine", "first try")
    settings = {item.key: json.loads(item.value_json) for item in told.config.update}
    assert settings["recipe"] == "delayed"
    assert settings["model_overrides"] == {"layers": 1, "width": 32, "heads": 2}
    kinds = [record.WhichOneof("record_type") for record in wandb_records(offline)]
    assert "exit" in kinds, "the run was not finished"


def test_wandb_goes_on_with_the_same_run(tmp_path):
    ids = []
    for resumed in (False, True, False):
        accelerator = Accelerator(
            cpu=True, log_with=trackers.build_trackers(RunConfig(wandb=True), tmp_path)
        )
        trackers.start_trackers(accelerator, tmp_path, resumed)
        accelerator.log({"loss": 1.0}, step=1)
        ids.append(accelerator.trackers[0].run.id)
        accelerator.trackers[0].finish()
    assert ids[0] == ids[1] != ids[2]
    told = wandb_run(wandb_runs(tmp_path)[0])
    assert (told.project, told.display_name) == ("fp8stack", tmp_path.name)


# Trackio: in a process of its own, for it settles when imported where it writes

READ = """
import json, sys, trackio
from trackio import Api
from trackio.sqlite_storage import SQLiteStorage
runs = []
for run in Api().runs("fp8stack"):
    rows = SQLiteStorage.get_logs("fp8stack", run.name, run_id=run.id)
    runs.append({"name": run.name, "config": run.config, "rows": rows})
print(json.dumps(runs))
"""


def trackio_runs(folder: Path) -> list[dict[str, Any]]:
    read = in_a_process(sys.executable, "-c", READ, cwd=folder, TRACKIO_DIR=str(folder))
    found: list[dict[str, Any]] = json.loads(read.splitlines()[-1])
    return found


def test_trackio_has_every_metric_in_the_runs_folder(tmp_path):
    words = [*PRETRAIN, "--recipe", "delayed", "--out", "r", "--trackio", *TINY]
    said = in_a_process(*words, cwd=tmp_path)
    assert "\033" not in said
    assert "trackio show" not in said
    (run,) = trackio_runs(tmp_path / "r" / "trackio")
    assert run["name"] == "r"
    assert run["config"]["recipe"] == "delayed"
    for key in (*KEYS, "val_loss"):
        seen = [(row["step"], row[key]) for row in run["rows"] if key in row]
        assert seen == wanted(tmp_path / "r", key)


LOG = """
import sys
from pathlib import Path
from accelerate import Accelerator
from fp8stack.training.metrics import trackers
from fp8stack.config import RunConfig
folder = Path("r")
for resumed, steps in ((False, (1, 2)), (True, (2, 3)), (False, (1,))):
    found = trackers.build_trackers(RunConfig(trackio=True), folder)
    accelerator = Accelerator(cpu=True, log_with=found)
    trackers.start_trackers(accelerator, folder, resumed)
    for step in steps:
        accelerator.log({"loss": float(step)}, step=step)
    accelerator.trackers[0].finish()
"""


def test_trackio_goes_on_with_the_same_run_where_the_environment_says(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    in_a_process(sys.executable, "-c", LOG, cwd=tmp_path, TRACKIO_DIR=str(elsewhere))
    assert not (tmp_path / "r" / "trackio").exists()
    first, second = sorted(trackio_runs(elsewhere), key=lambda run: -len(run["rows"]))
    assert sorted({row["step"] for row in first["rows"]}) == [1, 2, 3]
    assert [row["step"] for row in second["rows"]] == [1]


# What is missing


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "trackio"])
def test_a_package_that_is_missing_is_one_line(package, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"--{package} needs .*: pip install {package}$"):
        trackers.build_trackers(RunConfig(**{package: True}), tmp_path)


def test_trackio_with_a_server_and_no_token_is_one_line(command, monkeypatch, capsys):
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:9")
    assert command("pretrain", "--recipe", "fp32", "--out", "r", "--trackio", *TINY) == 2
    error = capsys.readouterr().err
    assert error.startswith("fp8stack: --trackio: Self-hosted logging requires a write token")
    assert error.count("\n") == 1
