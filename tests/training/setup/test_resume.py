"""What a resumed run accepts, refuses and passes over; what a checkpoint survives."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fp8stack.checkpoint import reader, writer
from fp8stack.checkpoint.reader import Checkpoint
from fp8stack.checkpoint.validation import newest_sound
from fp8stack.errors import NoUsableCheckpoint, StorageError, UserError
from fp8stack.model.config import GPTConfig, plan_for
from fp8stack.precision import Hardware
from fp8stack.training.inference import layers_left_out
from fp8stack.training.run_folder import RunFolder
from tests.conftest import TINY, Command, losses, metrics


@pytest.fixture
def run(command: Command, tmp_path: Path) -> Path:
    """A finished delayed run of 12 steps with checkpoints of steps 8 and 12."""
    assert command("pretrain", "--recipe", "delayed", "--out", "r", *TINY) == 0
    return tmp_path / "r"


@pytest.mark.parametrize(
    ("flags", "difference"),
    [
        (["--recipe", "current"], "recipe.scaling is 'current' here and 'delayed'"),
        (["--set", "recipe_overrides.margin=1"], "recipe.margin is 1 here and 0"),
        (["--set", "model_overrides.layers=2"], "model.layers is 2 here and 1"),
        (["--data", "other.txt"], "the data are not those that the run was trained on"),
        (["--seed", "3"], "seed is 3 here and 0"),
        (["--lr", "0.1"], "lr is 0.1 here and 0.003"),
        (["--batch", "8"], "batch is 8 here and 4"),
    ],
)
def test_a_run_that_differs_is_refused_and_the_difference_named(
    flags: list[str],
    difference: str,
    run: Path,
    command: Command,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "other.txt").write_text("some other text\n" * 500)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    capsys.readouterr()
    overrides = ["model_overrides.width=32", "model_overrides.heads=2"]
    if "model_overrides.layers=2" not in flags:
        overrides.append("model_overrides.layers=1")
    sets = [word for item in overrides for word in ("--set", item)]
    assert command("pretrain", "--resume", "auto", "--out", "r", *sets, *flags) == 2
    error = capsys.readouterr().err
    assert difference in error
    assert error.count("\n") == 1
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_the_data_may_have_moved_if_its_contents_are_the_same(
    command: Command, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be\n" * 500)
    assert command("pretrain", "--recipe", "fp32", "--data", "a.txt", "--out", "r", *TINY) == 0
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    assert command("pretrain", "--resume", "r", "--data", "b.txt", "--steps", "13") == 0


def test_a_damaged_checkpoint_is_passed_over_and_named(
    run: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = losses(run)
    weights = run / "checkpoints" / "step-000012" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100] ^= 1
    weights.write_bytes(content)
    capsys.readouterr()
    assert command("pretrain", "--resume", "auto", "--out", "r") == 0
    printed = capsys.readouterr().out
    assert "resumed from r/checkpoints/step-000008; passed over:" in printed
    assert "step-000012/model.safetensors is damaged" in printed
    assert losses(run) == whole


def test_when_all_checkpoints_are_damaged_the_exit_code_is_3(
    run: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    for manifest in run.glob("checkpoints/*/checkpoint.json"):
        manifest.write_text("{}")
    before = metrics(run)
    capsys.readouterr()
    assert command("pretrain", "--resume", "auto", "--out", "r") == 3
    error = capsys.readouterr().err
    assert "step-000012" in error
    assert "step-000008" in error
    assert error.count("\n") == 1
    assert metrics(run) == before


def test_a_named_checkpoint_is_the_one_that_is_used(
    run: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = losses(run)
    assert command("pretrain", "--resume", "r/checkpoints/step-000008") == 0
    assert "resumed from r/checkpoints/step-000008\n" in capsys.readouterr().out
    assert losses(run) == whole
    (run / "checkpoints" / "step-000008" / "checkpoint.json").unlink()
    assert command("pretrain", "--resume", "r/checkpoints/step-000008") == 3


def test_resuming_a_finished_run_changes_nothing(run: Path, command: Command) -> None:
    whole = losses(run)
    assert command("pretrain", "--resume", "r") == 0
    assert losses(run) == whole


def test_auto_starts_anew_where_there_is_no_run(command: Command, tmp_path: Path) -> None:
    assert command("pretrain", "--recipe", "fp32", "--resume", "auto", "--out", "n", *TINY) == 0
    assert len(losses(tmp_path / "n")) == 12


def test_a_run_killed_before_its_first_checkpoint_starts_again_in_place(
    run: Path, command: Command
) -> None:
    whole = losses(run)
    shutil.rmtree(run / "checkpoints")
    assert command("pretrain", "--resume", "auto", "--out", "r") == 0
    assert losses(run) == whole


def test_a_new_run_does_not_overwrite_an_old_one(
    run: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert command("pretrain", "--recipe", "delayed", "--out", "r", *TINY) == 2
    assert "r holds a run already" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_bytes() == before


def test_the_same_command_goes_on_with_a_run_that_was_cut(
    run: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = losses(run)
    shutil.rmtree(run / "checkpoints" / "step-000012")
    same = ["pretrain", "--recipe", "delayed", "--out", "r", *TINY]
    assert command(*same, "--lr", "0.1") == 2
    error = capsys.readouterr().err
    assert "r holds a run already, and another one: lr is 0.1 here and 0.003" in error
    assert command(*same) == 0
    assert "resumed from r/checkpoints/step-000008" in capsys.readouterr().out
    assert losses(run) == whole


def test_without_a_folder_the_run_that_was_cut_last_goes_on(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = ["pretrain", *TINY, "--set", "sample_tokens=0"]
    assert command(*begin, "--recipe", "fp32") == 0
    assert command(*begin, "--recipe", "bf16") == 0
    cut = tmp_path / "runs/gpt-nano-bf16"
    whole = losses(cut)
    shutil.rmtree(cut / "checkpoints/step-000012")
    capsys.readouterr()
    assert command(*begin, "--resume", "--recipe", "current") == 0
    told = capsys.readouterr().out
    assert "runs/gpt-nano-bf16 was cut after step 8 of 12, and this is a new run" in told
    assert "--resume runs/gpt-nano-bf16" in told
    assert command("pretrain", "--resume") == 0
    assert "resumed from runs/gpt-nano-bf16/checkpoints/step-000008" in capsys.readouterr().out
    assert losses(cut) == whole
    assert len(list((tmp_path / "runs").iterdir())) == 3


def test_a_longer_run_says_that_the_schedule_follows(
    run: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("pretrain", "--resume", "r", "--steps", "14") == 0
    assert "steps 12 -> 14: the learning rate follows the new" in capsys.readouterr().out
    assert losses(run)[-1][0] == 14
    assert command("pretrain", "--resume", "r", "--steps", "3") == 2


def test_a_checkpoint_moves_between_backends_and_recipes_with_its_weights(run: Path) -> None:
    import fp8stack

    tokens = torch.randint(256, (2, 32))
    plain = fp8stack.load(str(run))
    quantized = fp8stack.load(str(run / "checkpoints" / "step-000012"), recipe="mxfp8")
    with torch.no_grad():
        assert plain(tokens).shape == (2, 32, 256)
        assert not plain.training
        difference = (plain(tokens) - quantized(tokens)).norm() / plain(tokens).norm()
    assert 0 < difference < 0.1


INFO = {
    "identity": {"a": [1, "ü"]},
    "config": {},
    "plan": {},
    "scaler": None,
    "versions": {"torch": "x"},
    "guard": None,
    "plans": [],
    "phases": None,
}


def _checkpoint(step: int) -> Checkpoint:
    values = torch.arange(1000, dtype=torch.float32) + step
    return Checkpoint(step=step, info=INFO, tensors={"model": {"x": values}})


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    path = writer.save(tmp_path, _checkpoint(7), keep=2)
    loaded = reader.load(path)
    assert (loaded.step, loaded.info) == (7, INFO)
    assert torch.equal(loaded.tensors["model"]["x"], _checkpoint(7).tensors["model"]["x"])


def test_a_checkpoint_of_a_version_without_a_guard_can_be_loaded(tmp_path: Path) -> None:
    old = {key: value for key, value in INFO.items() if key != "guard"}
    path = writer.save(tmp_path, Checkpoint(step=3, info=old), keep=2)
    assert reader.load(path).info["guard"] is None


def test_only_the_newest_are_kept_and_numbers_sort_as_numbers(tmp_path: Path) -> None:
    for step in (999_998, 1_000_000, 999_999):
        writer.save(tmp_path, _checkpoint(step), keep=2)
    assert {p.name for p in tmp_path.iterdir()} == {"step-999999", "step-1000000"}
    assert newest_sound(tmp_path, bool)[0].step == 1_000_000


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def _rewrite(path: Path, **changes: object) -> None:
    """Change the manifest at `path` and state its new checksum, as a stranger could."""
    body = json.loads(path.read_text()) | changes
    del body["sha256"]
    for key in [key for key, value in body.items() if value is ...]:
        del body[key]
    body["sha256"] = reader.sha256_of(reader.canonical(body))
    path.write_text(json.dumps(body))


@pytest.mark.parametrize("file", ["model.safetensors", "checkpoint.json"])
@pytest.mark.parametrize("damage", [_truncate, _flip, Path.unlink, lambda p: p.write_bytes(b"")])
def test_damage_is_found_and_the_file_named(
    file: str, damage: Callable[[Path], object], tmp_path: Path
) -> None:
    path = writer.save(tmp_path, _checkpoint(3), keep=2)
    damage(path / file)
    with pytest.raises(UserError, match=file):
        reader.load(path)
    with pytest.raises(NoUsableCheckpoint, match=file):
        newest_sound(tmp_path, bool)


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {"../../secret.safetensors": {"bytes": 1, "sha256": ""}}},
        {"files": {"model.safetensors": {"sha256": ""}}},
        {"files": {"model.safetensors": "x"}},
        {"files": []},
        {"step": ...},
        {"step": "x"},
        {"info": []},
        {"info": ...},
        {"format": 2},
        {"more": 1},
    ],
)
def test_a_manifest_that_is_none_is_refused_though_its_checksum_is_right(
    changes: dict, tmp_path: Path
) -> None:
    path = writer.save(tmp_path, _checkpoint(3), keep=2)
    _rewrite(path / "checkpoint.json", **changes)
    with pytest.raises(UserError, match=r"checkpoint\.json") as error:
        reader.load(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["[1]", "null", '{"a": ' + "9" * 5000 + "}", "[" * 100_000])
def test_json_that_is_no_manifest_is_refused(text: str, tmp_path: Path) -> None:
    path = writer.save(tmp_path, _checkpoint(3), keep=2)
    (path / "checkpoint.json").write_text(text)
    with pytest.raises(UserError, match=r"checkpoint\.json"):
        reader.load(path)


def _tensor_faults() -> dict[str, tuple[str, str, object]]:
    """What is wrong: the group, the tensor, and what is done to it (None takes it away)."""
    up = "blocks.0.mlp.up.weight"
    return {
        "short moment": ("optimizer", f"{up}.exp_avg", lambda t: t[:3]),
        "double moment": ("optimizer", f"{up}.exp_avg_sq", lambda t: t.double()),
        "no moment": ("optimizer", f"{up}.step", None),
        "short weight": ("model", "embedding.weight", lambda t: t[:3]),
        "nan weight": ("model", up, lambda t: t * torch.nan),
        "no weight": ("model", up, None),
        "short random state": ("rng", "cpu", lambda t: t[:9]),
        "float random state": ("rng", "cpu", lambda t: t.float()),
        "no scale": ("fp8", "blocks.0.mlp.up.input.scale", None),
        "short history": ("fp8", "blocks.0.mlp.up.input.amax_history", lambda t: t[:5]),
    }


@pytest.mark.parametrize("fault", _tensor_faults())
def test_tensors_that_do_not_fit_are_refused_before_a_step_is_taken(
    fault: str, run: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    group, name, change = _tensor_faults()[fault]
    path = run / "checkpoints" / "step-000008"
    saved = reader.load(path)
    tensor = saved.tensors[group].pop(name)
    if change is not None:
        saved.tensors[group][name] = change(tensor)  # type: ignore[operator]
    shutil.rmtree(run / "checkpoints")
    writer.save(path.parent, saved, keep=2)
    capsys.readouterr()
    assert command("pretrain", "--resume", "r") == 3
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert (name if group != "rng" else "random state") in error


def test_going_back_to_an_older_checkpoint_abandons_the_later_ones(
    run: Path, command: Command
) -> None:
    whole = losses(run)
    resume = ["pretrain", "--resume", "r/checkpoints/step-000008", "--save-every", "100"]
    assert command(*resume, "--steps", "10") == 0
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["step-000008", "step-000010"]
    assert [row[0] for row in losses(run)] == list(range(1, 11))
    assert losses(run)[:8] == whole[:8]


def test_damaged_newer_checkpoints_do_not_crowd_out_good_ones(run: Path, command: Command) -> None:
    (run / "checkpoints" / "step-000012" / "checkpoint.json").write_text("{")
    assert command("pretrain", "--resume", "r", "--save-every", "2") == 0
    assert newest_sound(run / "checkpoints", bool)[2] == []
    assert reader.load(run / "checkpoints" / "step-000010").step == 10


def test_an_edited_run_file_does_not_change_a_run_that_has_checkpoints(
    run: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run / "run.toml"
    file.write_text(file.read_text().replace("lr = 0.003", "lr = 0.1"))
    assert command("pretrain", "--resume", "r", "--steps", "13") == 0
    assert metrics(run)[-1]["lr"] < 0.003
    assert "lr = 0.003" in file.read_text()


def test_a_run_shortened_to_where_it_stands_ends_well(run: Path, command: Command) -> None:
    assert command("pretrain", "--resume", "r/checkpoints/step-000008", "--steps", "8") == 0


@pytest.mark.parametrize("room", [0, 100, 4000])
def test_a_full_disk_leaves_the_old_checkpoint_and_no_litter(room: int, tmp_path: Path) -> None:
    writer.save(tmp_path, _checkpoint(1), keep=2)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    import signal

    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, old[1]))
        with pytest.raises(StorageError, match="disk is full"):
            writer.save(tmp_path, _checkpoint(2), keep=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    assert newest_sound(tmp_path, bool)[0].step == 1


def test_what_a_dead_save_left_is_no_checkpoint_and_is_swept(tmp_path: Path) -> None:
    writer.save(tmp_path, _checkpoint(1), keep=2)
    litter = tmp_path / ".tmp-step-000002-123"
    litter.mkdir()
    (litter / "model.safetensors").write_bytes(b"half")
    assert newest_sound(tmp_path, bool)[0].step == 1
    writer.forget_after(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_layers_that_a_run_left_out_stay_out_wherever_it_goes_on() -> None:
    """FP8 does not pay for some layers on one machine: another is to have the same in FP8."""
    config = GPTConfig(vocabulary=512, context=64, layers=2, width=384, heads=6)
    machine = Hardware("cuda", (9, 0), name="NVIDIA H200")
    made = plan_for(config, "auto", machine, "torch", tokens=32768)
    kept = {layer.name for layer in made.layers if layer.fp8}
    assert 0 < len(kept) < 8
    left_out = layers_left_out(made.to_json())
    for hardware in (Hardware("cpu"), Hardware("cuda", (8, 9))):
        there = plan_for(config, "delayed", hardware, left_out=left_out)
        assert {layer.name for layer in there.layers if layer.fp8} == kept
        assert [layer.reason for layer in there.layers] == [layer.reason for layer in made.layers]


def test_resuming_after_a_roll_back_keeps_the_events_that_came_before(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    rows = [
        *({"step": step, "loss": 1.0} for step in range(1, 9)),
        {"step": 8, "event": "rollback", "to_step": 4},
        *({"step": step, "loss": 2.0} for step in range(5, 8)),
    ]
    for row in rows:
        folder.append_metrics(row)
    folder.append_telemetry([{"step": 1}, {"step": 7}], {"recipe": "delayed"})
    folder.forget_after(6)
    assert folder.read_metrics() == rows[:-1]
    kept = folder.telemetry.read_text().splitlines()
    assert [json.loads(line).get("step") for line in kept] == [None, 1]
