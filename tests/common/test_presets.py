"""Presets: found by name or path, parsed strictly, refused in one line whatever they hold."""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8stack.common import presets
from fp8stack.common.errors import UserError, unknown
from fp8stack.model.config import GPTConfig, load_config
from fp8stack.precision import load_recipe
from fp8stack.precision.recipe import Recipe
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
    "n_embd = 3": "No key 'n_embd'.",
    "[optimizer]\nlr = 1.0": "No key 'optimizer'.",
    "dropout = 1.0": "dropout = 1.0: Input should be less than 1",
    "dropout = -0.1": "dropout = -0.1: ",
    "dropout = nan": "dropout = nan: ",
    'norm = "batchnorm"': "norm = 'batchnorm': Input should be 'layernorm' or 'rmsnorm'",
    "bias = 1": "bias = 1: ",
    "kv_heads = 3": "heads 4 is not divisible by kv_heads 3",
    "kv_heads = 0": "kv_heads = 0: ",
    "mlp_width = 1.5": "mlp_width = 1.5: ",
    'init_std = "small"': "init_std = 'small': ",
    "init_std = -1.0": "init_std = -1.0: ",
    "init_std = inf": "init_std = inf: ",
    "norm_eps = 0.0": "norm_eps = 0.0: ",
    "norm_eps = inf": "norm_eps = inf: ",
    "norm_eps = 1979-05-27": "norm_eps = ",
    "rope_theta = inf": "rope_theta = inf: ",
    "width = 66": "width 66 is not divisible by heads 4",
    "width = 0": "width = 0: ",
    "layers = -1": "layers = -1: ",
    "heads = 4.0": "heads = 4.0: ",
    "heads = true": "heads = True: ",
    'context = "128"': "context = '128': ",
    "vocabulary = []": "vocabulary = []: ",
    "vocabulary = { a = 1 }": "vocabulary = {'a': 1}: ",
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


def test_wrong_overrides_and_sizes_that_no_machine_can_hold_are_refused():
    for value in ("layers", ["layers"], None, object()):
        assert "layers = " in refusal(load_config, "gpt-nano", {"layers": value})
    # Else they end in a hang or an untyped error while the model is built.
    for key in ("vocabulary", "context", "layers", "width", "kv_heads", "mlp_width"):
        sizes = {key: 10**30} | ({"heads": 10**30, "width": 10**30} if key == "kv_heads" else {})
        assert " = 1000000" in refusal(load_config, "gpt-nano", sizes)


@pytest.mark.parametrize("key", ["a\nb", "\r", "\x1b[2J", "", "=", "'\"", "日本語"], ids=repr)
@pytest.mark.parametrize("load", [load_config, load_recipe])
def test_a_key_of_any_characters_is_refused_in_one_printable_line(write_file, load, key):
    escaped = "".join(f"\\U{ord(character):08x}" for character in key)
    head = LEAST if load is load_config else 'description = "x"\nlike = "mxfp8"\n'
    assert refusal(load, write_file(f'{head}"{escaped}" = 1\n')).isprintable()


# Arbitrary tables raise only a UserError

scalars = st.one_of(
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, 2, 4, 64, 128, 10**30, 10**400, "delayed", "e4m3", "rope", "swiglu"]),
    st.floats(),
    st.text(max_size=8),
    st.dates(),
    st.datetimes(timezones=st.none() | st.just(datetime.UTC)),
    st.times(),
)
few = st.text(max_size=5)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(few, inner, max_size=3),
    max_leaves=5,
)
RECIPE_LIKE = st.fixed_dictionaries(
    {"name": st.just("x"), "description": st.just("x")},
    optional={
        "like": st.sampled_from(["delayed", "current", "block", "mxfp8"]) | values,
        "compute_dtype": st.sampled_from(["bf16", "fp32"]) | values,
        "exclude": st.lists(few, max_size=3) | values,
        **dict.fromkeys(("margin", "history_length", "head", "forward_format"), values),
    },
)
MODEL_LIKE = st.fixed_dictionaries(
    {key: st.integers(1, 64) | values for key in ("vocabulary", "context", "layers")},
    optional={
        "width": st.sampled_from([64, 128]) | values,
        "heads": st.sampled_from([1, 2, 4]) | values,
        "kv_heads": st.integers(-1, 4) | values,
        "positions": st.just("rope") | values,
        **dict.fromkeys(("norm_eps", "dropout", "rope_theta"), values),
    },
)
NAMES = st.text(max_size=20) | st.text(max_size=20).map(lambda text: text + ".toml")
ASKED: dict[str, tuple[Any, Callable[[Any], object], str]] = {
    "recipe": (RECIPE_LIKE, lambda table: presets.parse(Recipe, table, "here"), "here: "),
    "model": (MODEL_LIKE, lambda table: presets.parse(GPTConfig, table, "here"), "here: "),
    "name of a model": (NAMES, lambda name: presets.read("models", name), ""),
    "name of a recipe": (NAMES, lambda name: presets.read("recipes", name), ""),
}


@pytest.mark.parametrize("examples", [100, pytest.param(1000, id="long", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ASKED)
def test_whatever_is_asked_for_is_found_or_refused_in_one_line(examples, case):
    like, ask, start = ASKED[case]

    def check(value: Any) -> None:
        message = start
        try:
            ask(value)
        except UserError as error:
            message = str(error)
        assert len(message.splitlines()) <= 1, message
        assert message.startswith(start)

    quietly: dict[str, Any] = {"derandomize": True, "deadline": None, "database": None}
    slow = [HealthCheck.too_slow]
    settings(max_examples=examples, suppress_health_check=slow, **quietly)(given(like)(check))()
