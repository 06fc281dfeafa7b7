"""`fp8stack copy`: presets and configurations, to be edited."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8stack.model.config import load_config
from fp8stack.precision import load_recipe
from tests.conftest import TINY, metrics


def test_a_copied_preset_is_the_preset_under_the_name_of_its_file(command, capsys):
    assert command("copy", "recipe", "nvfp4", "mine.toml") == 0
    assert load_recipe("mine.toml").model_copy(update={"name": "nvfp4"}) == load_recipe("nvfp4")
    assert command("copy", "recipe", "served:mxfp8", "served.toml") == 0
    assert load_recipe("served.toml").quantizers == load_recipe("served:mxfp8").quantizers
    assert command("copy", "model", "gpt-nano", "small.toml") == 0
    assert load_config("small.toml") == load_config("gpt-nano")
    capsys.readouterr()
    assert command("copy", "model", "gpt-nano", "my model.toml") == 0
    assert "then: fp8stack pretrain --model 'my model.toml'" in capsys.readouterr().out
    assert command("copy", "recipe", "mine.toml", "again.toml") == 0
    assert Path("again.toml").read_bytes() == Path("mine.toml").read_bytes()
    assert command("copy", "recipe", "delayed", "again.toml", "--overwrite") == 0
    assert load_recipe("again.toml").quantizers == load_recipe("delayed").quantizers


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("recipes", "delayed", "a.toml"), "kind to copy"),
        (("recipe", "delyaed", "a.toml"), "Did you mean 'delayed'?"),
        (("recipe", "auto", "a.toml"), "auto stands for another recipe"),
        (("recipe", "delayed", "a.json"), "a.json is no TOML file"),
        (("recipe", "delayed", "no/a.toml"), "There is no folder no."),
        (("recipe", "delayed", "there.toml"), "there.toml exists"),
        (("run", "runs/none", "a.toml"), "runs/none is no run folder"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(command, capsys, words, message):
    Path("there.toml").write_text("kept")
    assert command("copy", *words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [path.name for path in Path().iterdir()] == ["there.toml"]
    assert Path("there.toml").read_text() == "kept"


def test_a_copied_configuration_names_the_runs_own_files_and_trains_the_same(command, capsys):
    Path("mine.toml").write_text('like = "current"\n')
    flags = ["--recipe", "mine.toml", "--steps", "1", "--seed", "7"]
    assert command("pretrain", *TINY, *flags, "--out", "a") == 0
    Path("mine.toml").unlink()
    assert command("copy", "run", "a", "copy.toml") == 0
    assert "then: fp8stack pretrain --config copy.toml" in capsys.readouterr().out
    assert command("pretrain", "--config", "copy.toml", "--out", "b") == 0
    a, b = (metrics(Path(path))[-1]["val_loss"] for path in ("a", "b"))
    assert a == b
