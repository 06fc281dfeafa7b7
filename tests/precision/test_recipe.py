"""Recipes as files: what ships, what a user may write, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from fp8stack import presets
from fp8stack.errors import UserError
from fp8stack.precision import load_recipe
from fp8stack.precision.recipe import (
    Block,
    BlockRecipe,
    CurrentRecipe,
    DelayedRecipe,
    Mxfp8Recipe,
    PlainRecipe,
    Recipe,
    plain,
)

COMMON = {
    "head": False,
    "exclude": (),
    "exclude_first_blocks": 0,
    "exclude_last_blocks": 0,
    "attention": "compute",
}
HYBRID = {"forward_format": "e4m3", "backward_format": "e5m2"}

# What each shipped recipe holds, beside its name and its description.
SHIPPED: dict[str, tuple[Any, dict[str, Any]]] = {
    "delayed": (
        DelayedRecipe,
        HYBRID | COMMON | {"margin": 0, "history_length": 1024, "amax_algorithm": "max"},
    ),
    "current": (CurrentRecipe, HYBRID | COMMON | {"power_of_two": False, "eps": 0.0}),
    "block": (BlockRecipe, COMMON | {"power_of_two": True}),
    "mxfp8": (Mxfp8Recipe, COMMON | {"scale_rounding": "rceil"}),
    **{
        name: (PlainRecipe, {"compute_dtype": name, "attention": "compute"})
        for name in ("bf16", "fp16", "tf32", "fp32")
    },
}
FP8 = ("delayed", "current", "block", "mxfp8")
LEAST = {  # the least that a user's own file of each scaling holds
    **{name: f'description = "mine"\nscaling = "{name}"\n' for name in FP8},
    "none": 'description = "mine"\nscaling = "none"\ncompute_dtype = "bf16"\n',
}


@pytest.fixture
def own(tmp_path: Path):
    """Writes a user's own recipe and gives its path."""

    def write(text: str | bytes, name: str = "mine.toml") -> str:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


def refusal(name: str) -> str:
    """The message with which the recipe `name` is refused: always one line."""
    with pytest.raises(UserError) as caught:
        load_recipe(name)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 2
    return message


# What ships


def test_every_shipped_recipe_is_listed_here():
    assert presets.names("recipes") == sorted(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_holds_the_documented_values_for_good_and_survives_json(name):
    kind, values = SHIPPED[name]
    recipe: Any = load_recipe(name)
    assert type(recipe) is kind
    held = recipe.model_dump()
    assert held.pop("name") == name
    description = held.pop("description")
    assert description
    assert "\n" not in description
    assert not description.endswith(".")
    assert held == values | {"scaling": name if name in FP8 else "none"}
    assert recipe.is_fp8 == (name in FP8)
    with pytest.raises(ValidationError):
        recipe.description = "other"
    assert TypeAdapter(Recipe).validate_json(recipe.model_dump_json()) == recipe


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_writes_out_every_key_it_has(name):
    _, table = presets.read("recipes", name)
    assert {"name", *table} == {"name", "description", "scaling", *SHIPPED[name][1]}


@pytest.mark.parametrize("name", FP8)
def test_the_defaults_of_a_users_own_file_are_those_of_the_shipped_one(own, name):
    mine = load_recipe(own(LEAST[name]))
    assert (mine.name, mine.description) == ("mine", "mine")
    shipped = load_recipe(name).model_dump()
    assert mine.model_dump() == {**shipped, "name": "mine", "description": "mine"}


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "bf16", "fp16"])
def test_every_compute_dtype_has_a_plain_recipe_of_its_name(dtype):
    assert plain(dtype).compute_dtype == dtype
    assert plain(dtype) == load_recipe(dtype)


# A user's own file


@pytest.mark.parametrize("path", ["mine.toml", "./mine.toml", "../here/mine.toml"])
def test_a_users_own_recipe_works_by_relative_path(tmp_path, monkeypatch, path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mine.toml").write_text(LEAST["block"])
    monkeypatch.chdir(tmp_path / "here")
    assert load_recipe(path).scaling == "block"


@pytest.mark.parametrize("name", ["mine.txt", "delayed.toml"])
def test_a_path_may_end_otherwise_and_a_file_may_have_the_name_of_a_shipped_recipe(own, name):
    recipe = load_recipe(own(LEAST["current"], name))
    assert (recipe.name, recipe.scaling) == (name.partition(".")[0], "current")


def test_a_shipped_recipe_is_not_shadowed_by_a_file_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "delayed").write_text(LEAST["current"])
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "delayed.toml").write_text(LEAST["current"])
    monkeypatch.chdir(tmp_path)
    assert load_recipe("delayed").scaling == "delayed"


@pytest.mark.parametrize(
    ("scaling", "line", "value"),
    [
        ("delayed", "margin = 3", 3),
        ("delayed", "margin = -1", -1),
        ("delayed", "history_length = 1", 1),
        ("delayed", 'amax_algorithm = "most_recent"', "most_recent"),
        ("delayed", 'backward_format = "e4m3"', "e4m3"),
        ("current", 'forward_format = "e5m2"', "e5m2"),
        ("current", "power_of_two = true", True),
        ("current", "eps = 1e-12", 1e-12),
        ("current", "eps = 1", 1.0),
        ("block", "power_of_two = false", False),
        ("mxfp8", 'scale_rounding = "floor"', "floor"),
        ("mxfp8", 'scale_rounding = "even"', "even"),
        ("mxfp8", "head = true", True),
        ("block", 'exclude = ["*.qkv", "blocks.0.*"]', ("*.qkv", "blocks.0.*")),
        ("delayed", "exclude_first_blocks = 2", 2),
        ("current", "exclude_last_blocks = 100", 100),
        ("none", 'name = "other"', "other"),
    ],
)
def test_a_users_own_file_may_set_each_key(own, scaling, line, value):
    recipe = load_recipe(own(LEAST[scaling] + line + "\n"))
    assert recipe.model_dump()[line.partition(" = ")[0]] == value


# Keys that are refused


TYPOS = {
    "delayed": {"history_lenght": "history_length", "amax_algo": "amax_algorithm"},
    "current": {"power_of_2": "power_of_two", "forward_fmt": "forward_format"},
    "block": {"excludes": "exclude", "power-of-two": "power_of_two"},
    "mxfp8": {"scale_round": "scale_rounding", "exclude_first_block": "exclude_first_blocks"},
    "none": {"desciption": "description"},
}


@pytest.mark.parametrize("scaling", TYPOS)
def test_an_unknown_key_is_refused_with_the_nearest_one(own, scaling):
    for typo, meant in TYPOS[scaling].items():
        message = refusal(own(f"{LEAST[scaling]}{typo} = 1\n"))
        start = f"recipe 'mine': No key '{typo}'. Did you mean '{meant}'? Known: "
        assert message.startswith(start)


@pytest.mark.parametrize("scaling", LEAST)
def test_the_known_keys_are_those_of_the_scaling(own, scaling):
    message = refusal(own(f"{LEAST[scaling]}zzzzzz = 1\n"))
    known = set(message.partition("Known: ")[2].rstrip(".").split(", "))
    own_keys = {"compute_dtype", "attention"} if scaling == "none" else set(SHIPPED[scaling][1])
    assert known == {"name", "description", "scaling"} | own_keys
    assert "Did you mean" not in message


FOREIGN = {
    "mxfp8": ["history_length", "forward_format", "power_of_two"],
    "block": ["margin", "backward_format", "scale_rounding"],
    "current": ["history_length", "amax_algorithm"],
    "delayed": ["power_of_two", "eps", "compute_dtype"],
    "none": ["head", "exclude", "history_length"],
}


@pytest.mark.parametrize("scaling", FOREIGN)
def test_a_key_of_another_scaling_is_refused(own, scaling):
    for key in FOREIGN[scaling]:
        message = refusal(own(f"{LEAST[scaling]}{key} = 1\n"))
        assert message.startswith(f"recipe 'mine': No key '{key}'.")


@pytest.mark.parametrize("scaling", LEAST)
def test_a_table_where_a_key_belongs_is_refused(own, scaling):
    assert "No key 'training'" in refusal(own(f"{LEAST[scaling]}[training]\nlr = 1.0\n"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('description = "x"\nscaling = "none"\n', "key 'compute_dtype' is missing."),
        ('description = "x"\n', "key 'scaling' is missing."),
        ("# nothing but a comment\n", "key 'scaling' is missing."),
        ('desciption = "x"\nscaling = "block"\n', "No key 'desciption'. Did you mean 'descr"),
        ('description = "x"\nscaling = "none"\ncompute_dtyp = 1', "Did you mean 'compute_dtype'?"),
    ],
)
def test_a_missing_key_is_named_and_one_that_is_mistyped_is_called_unknown(own, text, said):
    assert said in refusal(own(text))


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ('"delayd"', "No scaling 'delayd'. Did you mean 'delayed'?"),
        ('"blocks"', "Did you mean 'block'?"),
        ('"mxpf8"', "Did you mean 'mxfp8'?"),
        ('"auto"', "Known: block, current, delayed, mxfp8, none."),
        ('""', "Known: block, current, delayed, mxfp8, none."),
        ("3", "recipe 'mine'"),
        ("true", "recipe 'mine'"),
        ("[]", "recipe 'mine'"),
        ('["delayed"]', "recipe 'mine'"),
        ("{ delayed = 1 }", "recipe 'mine'"),
        ("nan", "recipe 'mine'"),
        ("1979-05-27", "recipe 'mine'"),
    ],
)
def test_an_unknown_scaling_is_refused(own, value, hint):
    assert hint in refusal(own(f'description = "x"\nscaling = {value}\n'))


# Values that are refused

WRONG = {  # of another type, out of range, or nothing that a scale could be made of
    ("delayed", "margin"): ['"0"', "0.5", "true", "2000", "-2000"],
    ("delayed", "history_length"): ["16.0", '"16"', "[16]", "0", "-1", "1" + 30 * "0"],
    ("delayed", "amax_algorithm"): ["1", '"mean"'],
    ("delayed", "forward_format"): ['["e4m3"]', '"e8m0"'],
    ("delayed", "backward_format"): ['"E5M2"'],
    ("current", "power_of_two"): ["1", '"yes"'],
    ("current", "eps"): ['"small"', "true", "-1e-6", "nan", "-inf", "inf"],
    ("block", "head"): ["0", '"false"'],
    ("block", "exclude"): ["true", "{ a = 1 }"],
    ("block", "exclude_last_blocks"): ["-2"],
    ("mxfp8", "exclude_first_blocks"): ["1.0", "-1"],
    ("mxfp8", "exclude_last_blocks"): ["[1]", "1979-05-27"],
    ("mxfp8", "scale_rounding"): ["false", '"up"'],
    ("none", "name"): ["1"],
}


@pytest.mark.parametrize(
    ("scaling", "key", "value"), [(*place, value) for place in WRONG for value in WRONG[place]]
)
def test_a_wrong_value_is_refused_with_its_file_key_and_value(own, scaling, key, value):
    message = refusal(own(f"{LEAST[scaling]}{key} = {value}\n"))
    assert message.startswith(f"recipe 'mine': {key} = ")
    assert value.strip("\"[]{} '").partition(" ")[0].lower()[:4] in message.lower()


@pytest.mark.parametrize("value", ['"fp8"', '"bfloat16"', '"BF16"', "16", "true"])
def test_a_compute_dtype_is_spelled_in_one_way(own, value):
    message = refusal(own(f'description = "x"\nscaling = "none"\ncompute_dtype = {value}\n'))
    assert message.startswith("recipe 'mine': compute_dtype = ")
    assert "'fp32', 'tf32', 'bf16' or 'fp16'" in message


@pytest.mark.parametrize("value", ["[1]", '["a", 2]', "[[]]"])
def test_a_pattern_that_is_no_string_is_refused_with_its_place(own, value):
    message = refusal(own(f"{LEAST['delayed']}exclude = {value}\n"))
    assert message.startswith("recipe 'mine': exclude.")


# Files that are refused


NOT_TOML = ["not toml", "a = 1\na = 2", "[x", "a = 'x\n'", '{"scaling": "delayed"}', "\x00"]
NOT_UTF8 = [b"\xff\xfe", b"description = '\xe9'\n", "x = 1".encode("utf-16")]
BAD_FILES = [
    *((text, "not valid TOML") for text in NOT_TOML),
    *((data, "UTF-8") for data in NOT_UTF8),
    ("a = " + "[" * 100_000 + "]" * 100_000, "nested too deeply"),
]


@pytest.mark.parametrize(("content", "said"), BAD_FILES, ids=range(len(BAD_FILES)))
def test_a_file_that_cannot_be_read_is_refused_by_its_path(own, content, said):
    path = own(content)
    message = refusal(path)
    assert path in message
    assert said in message


@pytest.mark.parametrize("digits", ["9" * 5000, "0x" + "f" * 5000], ids=["decimal", "hex"])
def test_a_number_of_thousands_of_digits_is_refused(own, digits):
    assert "mine" in refusal(own(f"{LEAST['delayed']}margin = {digits}\n"))


def test_a_directory_is_refused(tmp_path):
    folder = tmp_path / "mine.toml"
    folder.mkdir()
    message = refusal(str(folder))
    assert str(folder) in message
    assert "TOML file" in message


@pytest.mark.parametrize(
    "name", ["missing.toml", "no/file", "/", "a\\b", "x" * 300 + ".toml", "x/" * 3000, "\0.toml"],
    ids=["missing", "no ending", "root", "backslash", "long name", "long path", "nul"],
)  # fmt: skip
def test_a_path_without_a_file_is_refused_and_the_shipped_recipes_are_named(name):
    message = refusal(name)
    assert message.startswith("No recipe file")
    assert "mxfp8" in message


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("mxpf8", "mxfp8"),
        ("delay", "delayed"),
        ("blocks", "block"),
        ("bfloat16", "bf16"),
        ("fp23", "fp32"),
        ("Delayed", "delayed"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one(name, near):
    known = "auto, bf16, block, current, delayed, fp16, fp32, mxfp8, tf32"
    assert refusal(name) == f"No recipe '{name}'. Did you mean '{near}'? Known: {known}."


@pytest.mark.parametrize("name", ["", "zzzzzzz", ".", "..", "*", "mxfp8 ", "auto"])
def test_a_name_of_no_file_is_refused_and_so_is_auto_which_is_a_rule(name):
    assert refusal(name).startswith(f"No recipe '{name}'.")


# What stays out of FP8


HEAD = ("lm_head", None, True)


def up(index: int, count: int = 12) -> tuple[str, Block, bool]:
    return (f"blocks.{index}.mlp.up", Block(index, count), False)


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize(
    ("over", "layer", "said"),
    [
        ({}, HEAD, "the recipe says head = false"),
        ({}, ("score", None, True), "the recipe says head = false"),
        ({}, ("h.0.score", Block(0, 1), True), "the recipe says head = false"),
        ({}, ("lm_head", None, False), None),  # a head by its name alone is none
        ({"head": True}, HEAD, None),
        ({}, up(0), None),
        ({"exclude": ("*.up",)}, up(0), "excluded by the pattern '*.up'"),
        ({"exclude": ("*.UP",)}, up(0), None),
        ({"exclude": ("mlp",)}, up(0), None),
        ({"exclude": ("*.down", "*.up")}, up(0), "excluded by the pattern '*.up'"),
        ({"exclude": ("lm_*",), "head": True}, HEAD, "excluded by the pattern 'lm_*'"),
        ({"exclude": ("lm_*",)}, HEAD, "the recipe says head = false"),
        ({"exclude_first_blocks": 1}, up(0), "in the first 1 block"),
        ({"exclude_first_blocks": 1}, up(1), None),
        ({"exclude_first_blocks": 1}, ("h.0.up", Block(0, 12), False), "in the first 1 block"),
        ({"exclude_first_blocks": 1}, ("blocks.0.mlp.up", None, False), None),
        ({"exclude_first_blocks": 1}, ("blocks.0.mlp.up", Block(7, 12), False), None),
        ({"exclude_last_blocks": 2}, up(9), None),
        ({"exclude_last_blocks": 2}, up(10), "in the last 2 blocks"),
        ({"exclude_last_blocks": 2}, up(10, 13), None),
        ({"exclude_last_blocks": 2}, ("encoder.11", None, False), None),
        ({"exclude_last_blocks": 12}, up(0), "in the last 12 blocks"),
        ({"exclude_last_blocks": 99}, HEAD, "the recipe says head = false"),
        ({"exclude_last_blocks": 99, "head": True}, HEAD, None),
    ],
    ids=str,
)
def test_a_recipe_says_why_a_layer_stays_out(name, over, layer, said):
    recipe: Any = load_recipe(name).model_copy(update=over)
    assert recipe.excluded(*layer) == said
