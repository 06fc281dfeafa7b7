"""A run that begins with the weights of another: what it takes, and what it does not."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8stack.planning.run_config import parse_config
from fp8stack.training.checkpoint import reader as checkpoints
from fp8stack.training.checkpoint.state import capture
from fp8stack.training.checkpoint.validation import newest_sound
from fp8stack.training.run import Run
from fp8stack.training.setup.start import set_up
from tests.conftest import TINY, losses
from tests.support.small_loop import changed

SHAPE = [f"model_overrides.{key}" for key in ("layers=1", "width=32", "heads=2")]
FREE = [word for word in TINY[10:] if word not in ("--set", *SHAPE)]


@pytest.fixture
def source(run: Path) -> Path:
    """A finished fp32 run with checkpoints of steps 8 and 12."""
    return run.rename(run.with_name("source"))


@pytest.fixture
def begun() -> Iterator[Callable[..., Run]]:
    """Runs as they are before their first step."""
    runs: list[Run] = []

    def begin(out: str, init_from: str | Path | None, *sets: str, **flags: object) -> Run:
        keys = {"recipe": "delayed", "steps": 6, "batch": 4, "context": 32, "out": out} | flags
        keys["init_from"] = init_from and str(init_from)
        runs.append(set_up(keys, None, [*FREE, *sets], None))
        return runs[-1]

    yield begin
    for run in runs:
        run.folder.release()


def weights(run: Run) -> dict[str, torch.Tensor]:
    return capture(run.model, run.optimizer)["model"]


@pytest.mark.parametrize(
    ("recipe", "where", "step"),
    [("fp32", "", 12), ("delayed", "checkpoints/step-000008", 8), ("mxfp8", "", 12)],
)
def test_a_new_run_begins_with_the_weights_and_nothing_else(recipe, where, step, source, begun):
    run = begun("new", source / where, recipe=recipe)
    saved = checkpoints.load(source / "checkpoints" / f"step-{step:06d}").tensors["model"]
    assert changed(weights(run), saved) == []
    assert run.step == 0
    assert not run.optimizer.state
    assert f"step-{step:06d}" in run.notes[-1]


def test_weights_of_a_padded_vocabulary_are_padded_anew(command, begun, tmp_path):
    np.tile(np.arange(250, dtype="<u2"), 40).tofile(tmp_path / "t.bin")
    odd = ["--data", "t.bin", "--set", "model_overrides.vocabulary=250", "--steps", "2"]
    assert command("pretrain", "--recipe", "mxfp8", "--out", "a", *TINY, *odd) == 0
    run = begun("b", "a", recipe="fp32", data="t.bin")
    saved = newest_sound(tmp_path / "a" / "checkpoints", bool)[0].tensors["model"]
    assert changed(weights(run), saved) == []


@pytest.mark.parametrize(
    ("sets", "difference"),
    [
        (["model_overrides.width=64"], "width is 64 here and 32"),
        (["model=gpt-nano", "model_overrides.context=64", *SHAPE], "context is"),
        (["model_overrides.activation=gelu"], "activation is 'gelu' here and"),
    ],
)
def test_another_shape_is_refused_by_name_and_nothing_is_written(sets, difference, source, refused):
    flags = ["--init-from", "source", "--out", "new", "--steps", "3"]
    error = refused(
        "pretrain", *flags, *(w for s in sets for w in ("--set", s)), message=difference
    )
    assert "Cannot begin with the weights of" in error


def test_a_resumed_run_does_not_begin_again_and_needs_its_source_no_more(
    source, command, tmp_path, monkeypatch, capsys
):
    flags = ["--recipe", "delayed", "--init-from", "source", *TINY]
    assert command("pretrain", "--out", "whole", *flags) == 0
    uninterrupted = losses(tmp_path / "whole")
    shutil.copytree("whole", "cut")
    shutil.rmtree("cut/checkpoints/step-000012")
    shutil.rmtree(source)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    capsys.readouterr()
    assert command("pretrain", "--resume", "../cut", "--init-from", "../source") == 0
    printed = capsys.readouterr().out
    assert "weights of" not in printed
    assert "--init-from is not read: the run has a checkpoint" in printed
    assert losses(tmp_path / "cut") == uninterrupted
    config = parse_config(str(tmp_path / "cut/run.toml"), {})
    assert config.init_from == str(source.resolve() / "checkpoints" / "step-000012")
