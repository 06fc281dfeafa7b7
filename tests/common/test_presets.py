"""Presets: found by name or path, parsed strictly, refused in one line whatever they hold."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable

import pytest

from fp8stack.common import presets
from fp8stack.common.errors import unknown
from fp8stack.model.config import load_config
from fp8stack.precision import load_recipe
from tests.conftest import refusal

LEAST = "vocabulary = 256\ncontext = 128\nlayers = 2\nwidth = 64\nheads = 4\n"


@pytest.fixture
def write_file(tmp_path) -> Callable[[str], str]:
    """Writes a user's own model and gives its path."""

    def write(text: str) -> str:
        path = tmp_path / "mine.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@pytest.mark.parametrize("kind", ["models", "recipes"])
def test_names_are_those_of_the_files_which_are_read_by_name_and_by_path(kind):
    names = presets.names(kind)
    files = {
        ":".join(path.relative_to(presets.folder(kind)).with_suffix("").parts): path
        for path in presets.folder(kind).rglob("*.toml")
    }
    assert names == sorted(files)
    assert len(names) >= 7
    for name, path in files.items():
        table = tomllib.loads(path.read_text())
        assert presets.read(kind, name) == (name, table)
        assert presets.read(kind, str(path)) == (path.stem, table)


def test_recipes_of_servers_are_no_recipes_of_training():
    training = presets.training_recipes()
    assert {*presets.names("recipes")} - {*training} == {
        f"served:{path.stem}" for path in (presets.folder("recipes") / "served").iterdir()
    }
    assert "mxfp8" in training


@pytest.mark.parametrize("name", ["served:mxpf8", "served", "served:", "served:../mxfp8"])
def test_an_unknown_recipe_of_a_server_is_refused(name):
    message = refusal(presets.read, "recipes", name)
    assert message.startswith(f"No recipe {'file ' * ('/' in name)}'{name}'")
    assert "served:mxfp8" in message


@pytest.mark.parametrize(
    ("name", "near"),
    [("gpt2-124", "gpt2-124m"), ("gpt2-1.5B", "gpt2-1.5b"), ("nano", "gpt-nano"), ("zzzzzzzz", "")],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(name, near):
    all_names = f"Known: {', '.join(presets.names('models'))}."
    hint = f"Did you mean '{near}'? " if near else ""
    assert refusal(presets.read, "models", name) == f"No model '{name}'. {hint}{all_names}"


@pytest.mark.parametrize(
    "name", ["a\nb", "a\r\nb", "a\u2028b", "a\x1b[2Jb", "x\ny.toml", "x/\n", "", "\u2028"], ids=repr
)
def test_a_name_is_quoted_so_that_no_control_character_reaches_the_terminal(name):
    assert refusal(presets.read, "models", name).isprintable()
    assert str(unknown("thing", name, ["one"])).isprintable()


def test_a_users_own_model_works_by_path_with_gpt2s_choices_as_defaults_and_overrides(write_file):
    config = load_config(write_file(LEAST))
    assert (config.layers, config.width, config.norm) == (2, 64, "layernorm")
    assert (config.tied, config.bias, config.positions) == (True, True, "learned")
    config = load_config(write_file(LEAST), {"layers": 3, "tied": False})
    assert (config.layers, config.tied, config.width) == (3, False, 64)


WRONG = {  # lines that replace the key's line: the message
    "layer = 3": "No key 'layer'. Did you mean 'layers'?",
    "[optimizer]\nlr = 1.0": "No key 'optimizer'.",
    "bias = 1": "bias = 1: ",
    "kv_heads = 3": "heads 4 is not divisible by kv_heads 3",
    "norm_eps = 1979-05-27": "norm_eps = ",
    'context = "128"': "context = '128': ",
    "vocabulary = { a = 1 }": "vocabulary = {'a': 1}: ",
    "width = 66": "width 66 is not divisible by heads 4",
    'width = 12\npositions = "rope"': "even head width, this is 3",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_model_is_refused_with_the_file_the_key_and_the_value(write_file, line):
    other_lines = [
        least_line
        for least_line in LEAST.splitlines()
        if not least_line.startswith(f"{line.split()[0]} =")
    ]
    message = refusal(load_config, write_file("\n".join([*other_lines, line])))
    assert message.startswith("model 'mine': ")
    assert WRONG[line] in message


@pytest.mark.parametrize("key", ["vocabulary", "context", "layers", "width", "heads"])
def test_a_missing_size_is_named_and_one_that_is_mistyped_is_called_unknown(write_file, key):
    missing = write_file(re.sub(f"{key} = .*", "", LEAST))
    assert refusal(load_config, missing) == f"model 'mine': key '{key}' is missing."
    for typo in (f"{key}s_", f"n_{key}"):
        message = refusal(load_config, write_file(LEAST.replace(f"{key} =", f"{typo} =")))
        assert f"No key '{typo}'. Did you mean '{key}'?" in message


def test_overrides_that_are_no_size_are_refused():
    for value in ("layers", ["layers"], None, object()):
        assert "layers = " in refusal(load_config, "gpt-nano", {"layers": value})


@pytest.mark.parametrize(
    "key",
    ["a\nb", "\r", "\x1b[2J", "", "=", "'\"", "日本語", "GPTConfig", "RecipeFile", "a[b"],
    ids=repr,
)
@pytest.mark.parametrize("load", [load_config, load_recipe])
def test_a_key_of_any_characters_is_refused_in_one_printable_line(write_file, load, key):
    escaped = "".join(f"\\U{ord(character):08x}" for character in key)
    head = LEAST if load is load_config else 'description = "x"\nlike = "mxfp8"\n'
    assert refusal(load, write_file(f'{head}"{escaped}" = 1\n')).isprintable()
