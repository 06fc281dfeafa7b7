"""More than a hundred ways to ask for nonsense: each is one line that names it, and exit code 2."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from fp8stack import presets
from fp8stack.config import parse_config
from fp8stack.errors import UserError
from fp8stack.precision.recipe import DelayedRecipe, load_recipe
from tests.conftest import TINY, Command
from tests.faults.input_flags import bad_input, make_files, problem

BAD = bad_input()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    make_files(folder)
    return folder


def test_there_are_at_least_as_many_as_promised() -> None:
    assert len(BAD) >= 120


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_that_names_it_and_touches_nothing(name: str, files: Path) -> None:
    assert problem(files, *BAD[name]) == ""


def test_an_unknown_key_within_a_table_is_named_with_the_keys_of_that_table() -> None:
    with pytest.raises(UserError) as caught:
        parse_config(None, {"guard": {"windows": 1}})
    message = str(caught.value)
    assert message.startswith("flags: guard: No key 'windows'. Did you mean 'window'? Known: amax_")
    assert "accumulate" not in message


@pytest.mark.parametrize("key", ["steps", "model_overrides", "what_if"])
def test_a_value_that_is_nested_too_deeply_is_refused_in_one_line(key: str, tmp_path: Path) -> None:
    setting = f"{key}.{'a.' * 3000}a=1"
    (tmp_path / "run.toml").write_text(setting)
    for ask in (
        lambda: parse_config(None, {}, [setting]),
        lambda: parse_config(str(tmp_path / "run.toml"), {}),
    ):
        with pytest.raises(UserError, match=key) as caught:
            ask()
        assert len(str(caught.value)) < 500


def test_a_file_that_is_far_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "run.toml").open("wb") as stream:
        stream.truncate(2**40)  # a hole, which takes no room
    with pytest.raises(UserError, match="is too large"):
        presets.read_toml(tmp_path / "run.toml")


def test_keys_of_the_model_and_the_recipe_are_set_by_their_short_names() -> None:
    sets = [
        "model.layers=2",
        "recipe.margin=1",
        "recipe.exclude=*.mlp.down",
        "what_if=mxfp8, block",
    ]
    config = parse_config(None, {"recipe": "delayed"}, sets)
    assert config.model_overrides == {"layers": 2}
    assert config.recipe_overrides == {"margin": 1, "exclude": "*.mlp.down"}
    assert config.what_if == ("mxfp8", "block")
    recipe = load_recipe("delayed", config.recipe_overrides)
    assert isinstance(recipe, DelayedRecipe)
    assert recipe.exclude == ("*.mlp.down",)


def test_help_is_found_by_every_usual_name(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = set()
    for words in (["plan", "--help"], ["plan", "-h"], ["help", "plan"]):
        assert command(*words) == 0
        shown.add(capsys.readouterr().out)
    assert len(shown) == 1
    assert command("help") == command("-h") == 0


@pytest.mark.parametrize(
    ("memory", "size"),
    [("80", 80 * 2**30), ("80GB", 80 * 10**9), ("80 gib", 80 * 2**30), ("1.5G", 3 * 2**29)],
)
def test_memory_has_a_unit(
    memory: str, size: int, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("estimate", "--memory", memory, "--json") == 0
    assert json.loads(capsys.readouterr().out)["memory"] == size


def test_usual_flags_of_training_and_a_bare_resume_are_taken(
    command: Command, tmp_path: Path
) -> None:
    flags = ["--learning-rate", "0.002", "--warmup-steps", "3", "--weight-decay", "0.2"]
    tiny = [*TINY, "--recipe", "fp32", "--steps", "1"]
    assert command("pretrain", *tiny, *flags, "--out", "r", "--resume") == 0
    table = tomllib.loads((tmp_path / "r" / "run.toml").read_text())
    assert (table["lr"], table["warmup_steps"], table["weight_decay"]) == (0.002, 3, 0.2)
    before = (tmp_path / "r" / "metrics.jsonl").read_bytes()
    assert command("pretrain", "--resume", "--out", "r") == 0
    assert (tmp_path / "r" / "metrics.jsonl").read_bytes() == before
