"""Presets: found by name or path, parsed strictly, refused in one line whatever they hold."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable

import pytest

from fp8stack.common import presets
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


@pytest.mark.parametrize(
    ("name", "near"),
    [("gpt2-124", "gpt2-124m"), ("gpt2-1.5B", "gpt2-1.5b"), ("zzzzzzzz", "")],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(name, near):
    all_names = f"Known: {', '.join(presets.names('models'))}."
    hint = f"Did you mean '{near}'? " if near else ""
    assert refusal(presets.read, "models", name) == f"No model '{name}'. {hint}{all_names}"
    assert "served:mxfp8" in refusal(presets.read, "recipes", "served:mxpf8")
    for hostile in ("a\nb", "a\u2028b", "a\x1b[2Jb", "x\ny.toml", "x/\n"):
        assert refusal(presets.read, "models", hostile).isprintable()


def test_a_users_own_model_works_by_path_with_gpt2s_choices_as_defaults_and_overrides(write_file):
    config = load_config(write_file(LEAST))
    assert (config.layers, config.width, config.norm) == (2, 64, "layernorm")
    assert (config.tied, config.bias, config.positions) == (True, True, "learned")
    config = load_config(write_file(LEAST), {"layers": 3, "tied": False})
    assert (config.layers, config.tied, config.width) == (3, False, 64)


WRONG = {  # lines that replace the key's line: the message
    "layer = 3": "No key 'layer'. Did you mean 'layers'?",
    "[optimizer]\nlr = 1.0": "No key 'optimizer'.",
    "kv_heads = 3": "heads 4 is not divisible by kv_heads 3",
    'context = "128"': "context = '128': ",
    "vocabulary = { a = 1 }": "vocabulary = {'a': 1}: ",
    "width = 66": "width 66 is not divisible by heads 4",
    'width = 12\npositions = "rope"': "even head width, this is 3",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_model_is_refused_with_the_file_the_key_and_the_value(write_file, line):
    key = line.split()[0]
    lines = [least for least in LEAST.splitlines() if not least.startswith(f"{key} =")]
    message = refusal(load_config, write_file("\n".join([*lines, line])))
    assert message.startswith("model 'mine': ")
    assert WRONG[line] in message


@pytest.mark.parametrize("key", ["vocabulary", "heads"])
def test_a_missing_size_is_named_and_one_that_is_mistyped_is_called_unknown(write_file, key):
    missing = write_file(re.sub(f"{key} = .*", "", LEAST))
    assert refusal(load_config, missing) == f"model 'mine': key '{key}' is missing."
    message = refusal(load_config, write_file(LEAST.replace(f"{key} =", f"n_{key} =")))
    assert f"No key 'n_{key}'. Did you mean '{key}'?" in message


@pytest.mark.parametrize("key", ["a\nb", "\x1b[2J", "", "'\"", "日本語", "GPTConfig"], ids=repr)
@pytest.mark.parametrize("load", [load_config, load_recipe])
def test_a_key_of_any_characters_is_refused_in_one_printable_line(write_file, load, key):
    escaped = "".join(f"\\U{ord(character):08x}" for character in key)
    head = LEAST if load is load_config else 'description = "x"\nlike = "mxfp8"\n'
    assert refusal(load, write_file(f'{head}"{escaped}" = 1\n')).isprintable()
