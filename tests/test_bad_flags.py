"""More than a hundred ways to ask for nonsense: each is one line that names it, and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.input_flags import bad_input, make_files, problem
from fp8stack import presets
from fp8stack.errors import UserError
from fp8stack.training.config import parse_config

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
