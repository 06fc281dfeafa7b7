"""Presets: found by name or path, parsed strictly, refused in one line whatever they hold."""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8stack import presets
from fp8stack.errors import UserError, unknown
from fp8stack.model.config import GPTConfig, load_config
from fp8stack.precision import load_recipe
from fp8stack.precision.recipe import Recipe

QUICK = settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
LONG = settings(QUICK, max_examples=1000)  # 10,000 in all

MODELS = {  # the parameters of each shipped model, in millions
    "gpt-nano": 0.92,
    "gpt2-124m": 124.4,
    "gpt2-350m": 354.8,
    "gpt2-774m": 774.0,
    "gpt2-1.5b": 1557.6,
    "llama-1b": 1235.8,
    "llama-8b": 8030.3,
}
LEAST = "vocabulary = 256\ncontext = 128\nlayers = 2\nwidth = 64\nheads = 4\n"


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], str]:
    """Writes a user's own model and gives its path."""

    def write(text: str) -> str:
        path = tmp_path / "mine.toml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def refusal(ask: Callable[[], object]) -> str:
    """The message of the refusal: always one line."""
    with pytest.raises(UserError) as caught:
        ask()
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


# Names


@pytest.mark.parametrize("kind", ["models", "recipes"])
def test_names_are_sorted_and_those_of_the_files(kind):
    found = presets.names(kind)
    assert found == sorted(found)
    assert set(found) == {path.stem for path in presets.folder(kind).iterdir()}
    assert len(found) >= 7


def test_the_shipped_models_are_listed_here():
    assert presets.names("models") == sorted(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_a_shipped_model_has_as_many_parameters_as_its_name_says(name):
    assert load_config(name).parameters() / 1e6 == pytest.approx(MODELS[name], rel=0.02)


@pytest.mark.parametrize("kind", ["models", "recipes"])
def test_every_shipped_file_is_read_by_its_name_and_by_its_path(kind):
    for name in presets.names(kind):
        path = presets.folder(kind) / f"{name}.toml"
        held = name, tomllib.loads(path.read_text())
        assert presets.read(kind, name) == presets.read(kind, str(path)) == held


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("gpt2", "gpt2-124m"),
        ("gpt2-124", "gpt2-124m"),
        ("gpt2-1.5B", "gpt2-1.5b"),
        ("nano", "gpt-nano"),
        ("llama-8", "llama-8b"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(name, near):
    message = refusal(lambda: presets.read("models", name))
    known = ", ".join(presets.names("models"))
    assert message == f"No model '{name}'. Did you mean '{near}'? Known: {known}."


@pytest.mark.parametrize("name", ["", "zzzzzzzz", "\u2028", "日本語"])
def test_a_name_like_no_other_gets_no_suggestion(name):
    assert "Did you mean" not in refusal(lambda: presets.read("models", name))


CONTROL = ["a\nb", "a\r\nb", "a\u2028b", "a\x1b[2Jb", "x\ny.toml", "x/\n"]


@pytest.mark.parametrize("name", CONTROL, ids=repr)
def test_a_name_is_quoted_so_that_no_control_character_reaches_the_terminal(name):
    assert refusal(lambda: presets.read("models", name)).isprintable()
    assert str(unknown("thing", name, ["one"])).isprintable()


# A user's own model


def test_a_users_own_model_works_by_path_with_gpt2s_choices_as_defaults(own):
    config = load_config(own(LEAST))
    assert (config.layers, config.width, config.norm) == (2, 64, "layernorm")
    assert (config.tied, config.bias, config.positions) == (True, True, "learned")


def test_overrides_win_over_the_file(own):
    config = load_config(own(LEAST), {"layers": 3, "tied": False})
    assert (config.layers, config.tied, config.width) == (3, False, 64)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("layer = 3", "No key 'layer'. Did you mean 'layers'?"),
        ("n_embd = 3", "No key 'n_embd'."),
        ("kv_head = 2", "Did you mean 'kv_heads'?"),
        ("[optimizer]\nlr = 1.0", "No key 'optimizer'."),
        ("dropout = 1.0", "dropout = 1.0: Input should be less than 1"),
        ("dropout = -0.1", "dropout = -0.1: "),
        ("dropout = nan", "dropout = nan: "),
        ('norm = "batchnorm"', "norm = 'batchnorm': Input should be 'layernorm' or 'rmsnorm'"),
        ("bias = 1", "bias = 1: "),
        ("kv_heads = 3", "heads 4 is not divisible by kv_heads 3"),
        ("kv_heads = 0", "kv_heads = 0: "),
        ("mlp_width = 1.5", "mlp_width = 1.5: "),
        ('init_std = "small"', "init_std = 'small': "),
        ("norm_eps = 0.0", "norm_eps = 0.0: "),
        ("norm_eps = inf", "norm_eps = inf: "),
        ("rope_theta = inf", "rope_theta = inf: "),
        ("init_std = inf", "init_std = inf: "),
        ("norm_eps = 1979-05-27", "norm_eps = "),
    ],
)
def test_a_wrong_model_is_refused_with_the_file_the_key_and_the_value(own, line, said):
    message = refusal(lambda: load_config(own(f"{LEAST}{line}\n")))
    assert message.startswith("model 'mine': ")
    assert said in message


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("width", "66", "width 66 is not divisible by heads 4"),
        ("width", "0", "width = 0: "),
        ("layers", "-1", "layers = -1: "),
        ("heads", "4.0", "heads = 4.0: "),
        ("heads", "true", "heads = True: "),
        ("context", '"128"', "context = '128': "),
        ("vocabulary", "[]", "vocabulary = []: "),
        ("vocabulary", "{ a = 1 }", "vocabulary = {'a': 1}: "),
    ],
)
def test_a_wrong_size_is_refused_with_its_key_and_value(own, key, value, said):
    lines = [line for line in LEAST.splitlines() if not line.startswith(key)]
    text = "\n".join([*lines, f"{key} = {value}"])
    assert said in refusal(lambda: load_config(own(text)))


@pytest.mark.parametrize("key", ["vocabulary", "context", "layers", "width", "heads"])
@pytest.mark.parametrize("typo", ["", "{}s_", "n_{}"])
def test_a_missing_size_is_named_and_one_that_is_mistyped_is_called_unknown(own, key, typo):
    named = typo.format(key)
    text = LEAST.replace(f"{key} =", f"{named} =") if typo else re.sub(f"{key} = .*", "", LEAST)
    message = refusal(lambda: load_config(own(text)))
    if typo:
        assert f"No key '{named}'. Did you mean '{key}'?" in message
    else:
        assert message == f"model 'mine': key '{key}' is missing."


def test_rope_needs_an_even_head_width(own):
    text = LEAST.replace("width = 64", "width = 12") + 'positions = "rope"\n'
    assert "even head width, this is 3" in refusal(lambda: load_config(own(text)))


@pytest.mark.parametrize(
    "value", ["layers", ["layers"], None, object()], ids=["str", "list", "None", "object"]
)
def test_a_wrong_override_is_refused_too(value):
    assert "layers = " in refusal(lambda: load_config("gpt-nano", {"layers": value}))


@pytest.mark.parametrize(
    "key", ["vocabulary", "context", "layers", "width", "kv_heads", "mlp_width"]
)
def test_a_size_that_no_machine_can_hold_is_refused(key):
    """Else it ends in a hang or an untyped error while the model is built."""
    sizes = {key: 10**30} | ({"heads": 10**30, "width": 10**30} if key == "kv_heads" else {})
    assert " = 1000000" in refusal(lambda: load_config("gpt-nano", sizes))


@pytest.mark.parametrize("key", ["a\nb", "\r", "\x1b[2J", "", "=", "'\"", "日本語"], ids=repr)
@pytest.mark.parametrize("load", [load_config, load_recipe])
def test_a_key_of_any_characters_is_refused_in_one_printable_line(tmp_path, load, key):
    escaped = "".join(f"\\U{ord(character):08x}" for character in key)
    head = LEAST if load is load_config else 'description = "x"\nscaling = "mxfp8"\n'
    path = tmp_path / "mine.toml"
    path.write_text(f'{head}"{escaped}" = 1\n')
    assert refusal(lambda: load(str(path))).isprintable()


# Whatever a table holds, nothing but a UserError comes out

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
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
RECIPE_LIKE = st.fixed_dictionaries(
    {"name": st.just("x"), "description": st.just("x")},
    optional={
        "scaling": st.sampled_from(["delayed", "current", "block", "mxfp8", "none"]) | values,
        "compute_dtype": st.sampled_from(["bf16", "fp32"]) | values,
        "exclude": st.lists(st.text(max_size=5), max_size=3) | values,
        **dict.fromkeys(("margin", "history_length", "eps", "head", "forward_format"), values),
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
EFFORT = [
    pytest.param(QUICK, id="quick"),
    pytest.param(LONG, id="long", marks=pytest.mark.slow),
]


def parses_or_refuses(ask: Callable[[], object], start: str = "") -> None:
    """A value comes out of `ask`, or a UserError of one line."""
    message = start
    try:
        ask()
    except UserError as error:
        message = str(error)
    assert len(message.splitlines()) <= 1, message
    assert message.startswith(start)


@pytest.mark.parametrize("effort", EFFORT)
@pytest.mark.parametrize(
    ("schema", "like"), [(Recipe, RECIPE_LIKE), (GPTConfig, MODEL_LIKE)], ids=["recipe", "model"]
)
def test_any_table_parses_or_is_refused_in_one_line(effort, schema, like):
    def check(table: dict[str, Any]) -> None:
        parses_or_refuses(lambda: presets.parse(schema, table, "here"), "here: ")

    effort(given(like)(check))()


@pytest.mark.parametrize("effort", EFFORT)
@pytest.mark.parametrize("kind", ["models", "recipes"])
def test_any_name_is_found_or_refused_in_one_line(effort, kind):
    def check(name: str) -> None:
        parses_or_refuses(lambda: presets.read(kind, name))

    like = st.text(max_size=20) | st.text(max_size=20).map(lambda text: text + ".toml")
    effort(given(like)(check))()
