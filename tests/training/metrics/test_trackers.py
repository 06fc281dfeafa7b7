"""TensorBoard, Weights & Biases and Trackio get a run's numbers: written, and read back."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from accelerate import Accelerator

import fp8stack
from fp8stack.common.errors import UserError
from fp8stack.planning.run_config import RunConfig
from fp8stack.training.metrics import trackers
from tests.conftest import TINY, metrics, refusal
from tests.faults.inputs.input_corruptions import rewrite

pytestmark = pytest.mark.full
KEYS = ("loss", "lr", "grad_norm", "val_loss")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("WANDB_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")


def expected_points(run: Path, key: str) -> list[tuple[int, Any]]:
    """The values that a tracker should have for a key: the rows of `metrics.jsonl`."""
    rows = [row for row in metrics(run) if row.get(key) is not None]
    return [(row["step"], pytest.approx(row[key], rel=1e-6)) for row in rows]


def in_a_process(*words: str, cwd: Path, **environment: str) -> str:
    """The output of a command in a process without the user's settings."""
    process_environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "TRACKIO_"))
    }
    process_environment |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", **environment}
    done = subprocess.run(words, cwd=cwd, env=process_environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run `r` that all trackers were told of, Weights & Biases in `elsewhere`, and what it
    printed. In a process of its own: at its end all is written, wandb reads its settings once, and
    trackio settles when imported where it writes."""
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "elsewhere").mkdir()
    settings = {"WANDB_PROJECT": "mine", "WANDB_NAME": "first try", "WANDB_DIR": "elsewhere"}
    words = ["pretrain", "--recipe", "delayed", "--out", "r", *TINY]
    words += ["--tensorboard", "--wandb", "--trackio"]
    return folder / "r", in_a_process(
        sys.executable, "-m", "fp8stack", *words, cwd=folder, **settings
    )


def _events(run: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()


def tensorboard(run: Path, key: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in _events(run).Scalars(key)]


def test_tensorboard_has_the_settings_and_every_metric_once_also_when_a_run_goes_on(
    tracked, command, tmp_path
):
    run = tmp_path / "r"
    shutil.copytree(tracked[0], run)
    for key in KEYS:
        assert tensorboard(run, key) == expected_points(run, key)
    assert [step for step, _ in tensorboard(run, "val_loss")] == [6, 12]
    (text,) = _events(run).Tensors("run.toml/text_summary")
    assert 'recipe = "delayed"' in text.tensor_proto.string_val[0].decode()
    earlier = ["pretrain", "--resume", "r/checkpoints/step-000008", "--steps", "14"]
    assert command(*earlier, "--tensorboard", "--save-every", "4") == 0
    assert tensorboard(run, "loss") == expected_points(run, "loss")
    assert [step for step, _ in tensorboard(run, "loss")] == list(range(1, 15))


def wandb_runs(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/offline-run-*"), key=lambda path: path.stat().st_mtime_ns)


def wandb_records(run: Path) -> Iterator[Any]:
    """The records of an offline run, in the log format of LevelDB, after 7 bytes. A block of 32 KiB
    has pieces: 4 bytes of checksum, 2 of length, 1 that says whether more follow."""
    from wandb.proto import wandb_internal_pb2

    (file,) = run.glob("*.wandb")
    content, at, joined = file.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # what is left of a block holds no piece
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        joined += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            record = cast(Any, wandb_internal_pb2).Record()
            record.ParseFromString(joined)
            yield record
            joined = b""


def of_kind(run: Path, kind: str) -> list[Any]:
    records = wandb_records(run)
    return [getattr(record, kind) for record in records if record.WhichOneof("record_type") == kind]


def test_wandb_has_every_metric_at_its_step_where_the_environment_says(tracked):
    run, _ = tracked
    assert not wandb_runs(run)
    (offline,) = wandb_runs(run.parent / "elsewhere")
    rows = [
        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in history.item}
        for history in of_kind(offline, "history")
    ]
    for key in KEYS:
        assert [(row["_step"], row[key]) for row in rows if key in row] == expected_points(run, key)
    run_record = of_kind(offline, "run")[0]
    assert (run_record.project, run_record.display_name) == ("mine", "first try")
    settings = {item.key: json.loads(item.value_json) for item in run_record.config.update}
    assert settings["recipe"] == "delayed"
    assert settings["model_overrides"] == {"layers": 1, "width": 32, "heads": 2}
    assert of_kind(offline, "exit"), "the run was not finished"


@pytest.mark.slow
def test_wandb_goes_on_with_the_same_run(tmp_path):
    ids = []
    for resumed in (False, True, False):
        config = RunConfig(wandb=True)
        built = trackers.build_trackers(config, tmp_path, resumed=resumed)
        accelerator = Accelerator(cpu=True, log_with=built)
        trackers.start_trackers(accelerator, tmp_path, resumed=resumed)
        accelerator.log({"loss": 1.0}, step=1)
        ids.append(accelerator.trackers[0].run.id)
        accelerator.trackers[0].finish()
    assert ids[0] == ids[1] != ids[2]
    run_record = of_kind(wandb_runs(tmp_path)[0], "run")[0]
    assert (run_record.project, run_record.display_name) == ("fp8stack", tmp_path.name)


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
    runs: list[dict[str, Any]] = json.loads(read.splitlines()[-1])
    return runs


def test_trackio_has_every_metric_in_the_runs_folder(tracked):
    folder, printed = tracked
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")  # drawn, unlike in most tests
    assert "\033" not in printed
    assert "trackio show" not in printed
    (run,) = trackio_runs(folder / "trackio")
    assert run["name"] == "r"
    assert run["config"]["recipe"] == "delayed"
    for key in KEYS:
        points = [(row["step"], row[key]) for row in run["rows"] if key in row]
        assert points == expected_points(folder, key)


LOG = """
import sys
from pathlib import Path
from accelerate import Accelerator
from fp8stack.training.metrics import trackers
from fp8stack.planning.run_config import RunConfig
folder = Path("r")
for resumed, steps in ((False, (1, 2)), (True, (2, 3)), (False, (1,))):
    built = trackers.build_trackers(RunConfig(trackio=True), folder, resumed=resumed)
    accelerator = Accelerator(cpu=True, log_with=built)
    trackers.start_trackers(accelerator, folder, resumed=resumed)
    for step in steps:
        accelerator.log({"loss": float(step)}, step=step)
    accelerator.trackers[0].finish()
"""


@pytest.mark.slow
def test_trackio_goes_on_with_the_same_run_where_the_environment_says(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    in_a_process(sys.executable, "-c", LOG, cwd=tmp_path, TRACKIO_DIR=str(elsewhere))
    assert not (tmp_path / "r" / "trackio").exists()
    first, second = sorted(trackio_runs(elsewhere), key=lambda run: -len(run["rows"]))
    assert sorted({row["step"] for row in first["rows"]}) == [1, 2, 3]
    assert [row["step"] for row in second["rows"]] == [1]


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "trackio"])
def test_a_package_that_is_missing_is_one_line(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    config = RunConfig.model_validate({package: True})
    with pytest.raises(UserError, match=f"--{package} needs .*: pip install {package}$"):
        trackers.build_trackers(config, tmp_path, resumed=False)


def test_trackio_with_a_server_and_no_token_is_one_line_and_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:9")
    (tmp_path / "mine").mkdir()
    for out in ("runs/r", "mine/r"):
        message = refusal(fp8stack.pretrain, out=tmp_path / out, trackio=True, steps=1)
        assert message.startswith("--trackio: Self-hosted logging requires a write token")
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]


def test_a_resumed_run_starts_only_the_trackers_that_the_command_names(
    command, capsys, tmp_path, monkeypatch
):
    started: list[str] = []

    monkeypatch.setattr(trackers, "require", lambda name, needed_by: started.append(name))
    assert command("pretrain", *TINY, "--recipe", "fp32", "--out", "r") == 0
    named = {"tensorboard": True, "trackio": True, "wandb": True}
    text = (tmp_path / "r/run.toml").read_text()
    for name in named:
        text = text.replace(f"{name} = false", f"{name} = true")
    (tmp_path / "r/run.toml").write_text(text)
    for checkpoint in tmp_path.glob("r/checkpoints/*"):
        rewrite(checkpoint, lambda body: body["info"]["config"].update(named))
    capsys.readouterr()
    assert command("pretrain", "--resume", "r", "--steps", "13") == 0
    message = "not started: tensorboard, trackio, wandb, which only the saved run names; to go on: "
    assert f"{message}--tensorboard --trackio --wandb" in capsys.readouterr().out
    assert started == []
    assert not (tmp_path / "r/wandb").exists()
    again = ["pretrain", "--resume", "r/checkpoints/step-000012", "--steps", "14", "--tensorboard"]
    assert command(*again) == 0
    assert started == ["tensorboard"]
    # Looking at it starts nothing.
    for words in (["eval", "r"], ["report", "r"], ["show", "r"], ["list", "runs", "."]):
        assert command(*words) == 0
    assert started == ["tensorboard"]


def test_tensorboard_drops_steps_that_a_rollback_undid(tmp_path):
    (board,) = trackers.build_trackers(RunConfig(tensorboard=True), tmp_path, resumed=False)
    board.start()
    for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 2.5), (3, 3.5)):
        board.log({"loss": loss}, step=step)
    board.finish()
    assert tensorboard(tmp_path, "loss") == [(1, 1.0), (2, 2.5), (3, 3.5)]
