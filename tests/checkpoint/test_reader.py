"""Checkpoints come back as they were written, or what is wrong with them is named."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path

import pytest
import torch

from fp8stack.checkpoint import reader, writer
from fp8stack.checkpoint.reader import Checkpoint
from fp8stack.checkpoint.validation import newest_sound
from fp8stack.errors import NoUsableCheckpoint, StorageError, UserError

INFO = {
    "identity": {"a": [1, "ü"]}, "config": {}, "plan": {}, "scaler": None,
    "versions": {"torch": "x"}, "guard": None, "plans": [], "phases": None,
}  # fmt: skip


def _checkpoint(step: int) -> Checkpoint:
    values = torch.arange(1000, dtype=torch.float32) + step
    return Checkpoint(step=step, info=INFO, tensors={"model": {"x": values}})


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path):
    path = writer.write(tmp_path, _checkpoint(7))
    loaded = reader.load(path)
    assert (loaded.step, loaded.info) == (7, INFO)
    assert torch.equal(loaded.tensors["model"]["x"], _checkpoint(7).tensors["model"]["x"])


def test_a_checkpoint_of_a_version_without_a_guard_can_be_loaded(tmp_path):
    old = {key: value for key, value in INFO.items() if key != "guard"}
    path = writer.write(tmp_path, Checkpoint(step=3, info=old))
    assert reader.load(path).info["guard"] is None


def test_only_the_newest_are_kept_and_numbers_sort_as_numbers(tmp_path):
    for step in (999_998, 1_000_000, 999_999):
        writer.retain(tmp_path, 2, 0, {writer.write(tmp_path, _checkpoint(step))})
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
def test_damage_is_found_and_the_file_named(file, damage, tmp_path):
    path = writer.write(tmp_path, _checkpoint(3))
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
def test_a_manifest_that_is_none_is_refused_though_its_checksum_is_right(changes, tmp_path):
    path = writer.write(tmp_path, _checkpoint(3))
    _rewrite(path / "checkpoint.json", **changes)
    with pytest.raises(UserError, match=r"checkpoint\.json") as error:
        reader.load(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["[1]", "null", '{"a": ' + "9" * 5000 + "}", "[" * 100_000])
def test_json_that_is_no_manifest_is_refused(text, tmp_path):
    path = writer.write(tmp_path, _checkpoint(3))
    (path / "checkpoint.json").write_text(text)
    with pytest.raises(UserError, match=r"checkpoint\.json"):
        reader.load(path)


@pytest.mark.parametrize("room", [0, 100, 4000])
def test_a_full_disk_leaves_the_old_checkpoint_and_no_litter(room, tmp_path):
    writer.write(tmp_path, _checkpoint(1))
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, old[1]))
        with pytest.raises(StorageError, match="disk is full"):
            writer.write(tmp_path, _checkpoint(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    assert newest_sound(tmp_path, bool)[0].step == 1


def test_what_a_dead_save_left_is_no_checkpoint_and_is_swept(tmp_path):
    writer.write(tmp_path, _checkpoint(1))
    litter = tmp_path / ".tmp-step-000002-123"
    litter.mkdir()
    (litter / "model.safetensors").write_bytes(b"half")
    assert newest_sound(tmp_path, bool)[0].step == 1
    writer.forget_after(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
