"""Checkpoints come back as they were written, or what is wrong with them is named."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fp8stack.training.checkpoint import reader, writer
from fp8stack.training.checkpoint.reader import Checkpoint
from fp8stack.training.checkpoint.validation import newest_sound
from tests.faults.inputs.input_corruptions import rewrite

PLAN: dict[str, Any] = {
    "recipe": {"name": "ü"}, "backend": "reference", "device": "cpu", "compute_dtype": "fp32",
    "layers": [{"name": "a", "reason": "", "fp8": False}],
}  # fmt: skip
WATCH: dict[str, Any] = {"window": [[1.0]], "streak": 0, "overflows": 0, "recent": [], "norms": []}
GUARD: dict[str, Any] = {
    "watch": WATCH, "left_out": [], "demoted": {}, "incidents": 0, "last_bad": 0,
    "mended_at": None, "tried": [], "bad": [], "left_fp16": False,
}  # fmt: skip
INFO: dict[str, Any] = {
    "identity": {"model": {}, "recipe": {}, "data": {}, "recipes": {}}, "config": {},
    "plan": PLAN, "scaler": None, "versions": {"torch": "x"}, "guard": GUARD, "plans": [PLAN],
    "phases": None, "tokenizer": None,
}  # fmt: skip


def _checkpoint(step: int) -> Checkpoint:
    values = torch.arange(1000, dtype=torch.float32) + step
    return Checkpoint(step=step, info=INFO, tensors={"model": {"x": values}})


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path):
    path = writer.write(tmp_path, _checkpoint(7))
    loaded = reader.load(path)
    assert (loaded.step, loaded.info) == (7, INFO)
    assert torch.equal(loaded.tensors["model"]["x"], _checkpoint(7).tensors["model"]["x"])


def test_a_checkpoint_of_an_older_version_has_fewer_keys(tmp_path):
    path = writer.write(tmp_path, _checkpoint(3))

    def as_before(body: dict[str, Any]) -> None:
        for key in ("guard", "plans", "phases", "tokenizer"):
            del body["info"][key]
        del body["info"]["identity"]["recipes"]

    rewrite(path, as_before)
    assert reader.load(path).info == INFO | {"guard": None, "plans": []}


def test_only_the_newest_are_kept_and_numbers_sort_as_numbers(tmp_path):
    for step in (999_998, 1_000_000, 999_999):
        writer.retain(tmp_path, 2, 0, {writer.write(tmp_path, _checkpoint(step))})
    assert {p.name for p in tmp_path.iterdir()} == {"step-999999", "step-1000000"}
    assert newest_sound(tmp_path, bool)[0].step == 1_000_000


@pytest.mark.parametrize(
    ("path", "run"),
    [
        ("run/checkpoints/step-000010", "run"),
        ("checkpoints/step-1000000", "."),
        ("checkpoints/run1/step-000010", None),
        ("run/checkpoints", None),
    ],
)
def test_a_checkpoint_is_known_by_its_folder_and_its_name(path, run):
    assert reader.run_of(Path(path)) == (None if run is None else Path(run))
