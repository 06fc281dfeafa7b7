"""Recipes as files: what ships, what a user may write, and what is refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fp8stack.common import presets
from fp8stack.common.errors import UserError
from fp8stack.common.formats import Quantizer
from fp8stack.common.quantizer_table import Quantizers
from fp8stack.precision import Hardware, load_recipe, recipe_from_json, resolve
from fp8stack.precision.plan import block_indices
from fp8stack.precision.recipe import BlockIndex, Recipe
from tests import conftest


def all_of(input: Quantizer, weight: Quantizer | None = None, grad: Quantizer | None = None):
    """The table in which both copies of an operand are quantized alike."""
    weight, grad = weight or input, grad or input
    return Quantizers(
        input=input,
        weight=weight,
        grad_output=grad,
        input_wgrad=input,
        weight_dgrad=weight,
        grad_output_wgrad=grad,
    )


DELAYED = Quantizer(amax="delayed", history_length=1024)
MX = Quantizer(block=(1, 32), scale="e8m0", scale_rounding="rceil")
BLOCKS = Quantizer(block=(1, 128), scale="power_of_two")
ROW = Quantizer(block="row", scale="power_of_two", eps=1e-12)
FP4 = Quantizer(format="e2m1", block=(1, 16), scale="e4m3")
SQUARES = replace(FP4, block=(16, 16))
DRAWN = replace(FP4, rounding="stochastic")
NVFP4 = replace(
    all_of(FP4, SQUARES, DRAWN),
    input_wgrad=replace(FP4, hadamard=16),
    grad_output_wgrad=replace(DRAWN, hadamard=16),
)
HIGH = {"grad_output": None, "grad_output_wgrad": None}

# The quantizers of each shipped recipe.
SHIPPED: dict[str, Quantizers | None] = {
    "delayed": all_of(DELAYED, grad=replace(DELAYED, format="e5m2")),
    "current": all_of(Quantizer(), grad=Quantizer(format="e5m2")),
    "block": all_of(BLOCKS, replace(BLOCKS, block=(128, 128))),
    "mxfp8": all_of(MX),
    "rowwise": all_of(ROW),
    "rowwise_wgrad_hp": Quantizers(
        input=ROW, weight=ROW, grad_output=ROW, weight_dgrad=replace(ROW, block="tensor")
    ),
    "mxfp6_e2m3": all_of(replace(MX, format="e2m3")),
    "mxfp6_e3m2": all_of(replace(MX, format="e3m2")),
    "mxfp4": all_of(replace(MX, format="e2m1")),
    "nvfp4": NVFP4,
    "nvfp4_forward_high": replace(NVFP4, input=None, weight=None),
    "served:fp8_dynamic": Quantizers(
        input=Quantizer(block="row", eps=1 / 512), weight=Quantizer(block="row")
    ),
    "served:fp8_static": Quantizers(input=DELAYED, weight=DELAYED),
    "served:fp8_block": Quantizers(
        input=Quantizer(block=(1, 128)), weight=Quantizer(block=(128, 128))
    ),
    "served:fp8_block_e8m0": Quantizers(input=BLOCKS, weight=replace(BLOCKS, block=(128, 128))),
    "served:mxfp8": Quantizers(input=MX, weight=MX),
    "served:nvfp4": Quantizers(input=FP4, weight=FP4),
    "served:mxfp4": Quantizers(weight=replace(MX, format="e2m1", scale_rounding="even")),
    **dict.fromkeys(("bf16", "fp16", "tf32", "fp32")),
}
LOW = [name for name, table in SHIPPED.items() if table is not None]
WITH_TABLES = ("delayed", "current", "block", "mxfp8")


@pytest.fixture
def write(tmp_path: Path):
    """A function that writes a user's recipe and returns its path."""

    def write_recipe(text: str | bytes, name: str = "mine.toml") -> str:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write_recipe


refusal = partial(conftest.refusal, load_recipe)


# Shipped recipes


def test_every_shipped_recipe_is_listed_here():
    assert presets.names("recipes") == sorted(SHIPPED)


@pytest.mark.capability("B5")
@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_holds_the_documented_quantizers_for_good_and_survives_json(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.description
    assert "\n" not in recipe.description
    assert not recipe.description.endswith(".")
    assert recipe.quantizers == SHIPPED[name]
    assert recipe.is_fp8 == (name in LOW)
    assert recipe.compute_dtype == (None if name in LOW else name)
    assert (recipe.head, recipe.exclude, recipe.attention) == (False, (), "compute")
    with pytest.raises(ValidationError):
        recipe.description = "other"  # type: ignore[misc]
    assert recipe_from_json(json.loads(json.dumps(recipe.to_json())), "here") == recipe


E4M3, E5M2 = ("QKV", "S", "O"), ("dO", "dP", "dQKV")
NEWEST = {"history_length": 1, "amax_algorithm": "most_recent"}


@pytest.mark.parametrize(
    ("name", "options", "settings"),
    [
        ("delayed", {}, {}),
        ("delayed", {"history_length": 7, "margin": 2}, {"history_length": 7, "margin": 2}),
        ("delayed", {"input": {"amax": "current"}, "margin": 3}, {"margin": 3}),
        ("current", {}, NEWEST),  # what Transformer Engine has where linears have no history
        ("nvfp4", {}, NEWEST),
        ("bf16", {}, NEWEST),
    ],
)
def test_attention_has_the_delayed_scaling_of_the_recipes_linears(name, options, settings):
    for attention, operands in (("delayed", (*E4M3, *E5M2)), ("current", ("S", "dP"))):
        recipe = load_recipe(name, {"attention": attention} | options)
        assert (recipe.fp8_attention, recipe.delayed) == (True, True)
        assert recipe.attention_slots == {
            operand: Quantizer(
                format="e4m3" if operand in E4M3 else "e5m2", amax="delayed", **settings
            )
            for operand in operands
        }
    for attention in ("compute", "fp32", "mxfp8"):
        recipe = load_recipe(name, {"attention": attention} | options)
        assert recipe.attention_slots == {}
        assert recipe.fp8_attention == (attention == "mxfp8")
        assert recipe.delayed == (name == "delayed")


def path_of(name: str) -> Path:
    """The file of a shipped recipe."""
    return presets.folder("recipes").joinpath(*name.split(":")).with_suffix(".toml")


@pytest.mark.capability("A15")
@pytest.mark.parametrize("name", [name for name in SHIPPED if ":" in name])
def test_a_scheme_of_a_server_names_its_source_and_has_no_backward_pass(name):
    comments = [line for line in path_of(name).read_text().splitlines() if line.startswith("# ")]
    assert re.search("vLLM|SGLang|TensorRT-LLM", " ".join(comments))
    table = load_recipe(name).quantizers
    assert table is not None
    assert table.each.keys() <= {"input", "weight"}


# Recipes in old checkpoints

OLD: dict[str, dict[str, Any]] = {
    "delayed": {
        "forward_format": "e4m3",
        "backward_format": "e5m2",
        "margin": 0,
        "history_length": 1024,
        "amax_algorithm": "max",
    },
    "current": {
        "forward_format": "e4m3",
        "backward_format": "e5m2",
        "power_of_two": False,
        "eps": 0.0,
    },
    "block": {"power_of_two": True},
    "mxfp8": {"scale_rounding": "rceil"},
}
EXCLUSIONS = {"head": False, "exclude": [], "exclude_first_blocks": 0, "exclude_last_blocks": 0}


@pytest.mark.parametrize("name", WITH_TABLES)
def test_a_recipe_in_an_old_checkpoint_is_the_one_that_ships_today(name):
    data = {"scaling": name, **EXCLUSIONS, **OLD[name]}
    read = recipe_from_json(data, "checkpoint.json")
    assert read.to_json(words=False) == load_recipe(name).to_json(words=False)
    data |= {"exclude_last_blocks": 2, "head": True, "exclude": ["*.up"]}
    read = recipe_from_json(data, "checkpoint.json")
    assert (read.exclude_last_blocks, read.head, read.exclude) == (2, True, ("*.up",))


def test_an_old_recipe_keeps_what_was_changed_in_it():
    data = {"scaling": "current", **EXCLUSIONS, **OLD["current"], "eps": 0.5}
    assert recipe_from_json(data, "here").quantizers == all_of(
        Quantizer(eps=0.5), grad=Quantizer(format="e5m2", eps=0.5)
    )
    data = {"scaling": "delayed", **EXCLUSIONS, **OLD["delayed"], "margin": 3, "history_length": 16}
    read = recipe_from_json(data, "checkpoint.json").quantizers
    assert read is not None
    assert read.input == replace(DELAYED, margin=3, history_length=16)
    plain_data = {"scaling": "none", "compute_dtype": "bf16"}
    assert recipe_from_json(plain_data, "here").to_json(words=False) == load_recipe("bf16").to_json(
        words=False
    )
    before_residual = {k: v for k, v in load_recipe("delayed").to_json().items() if k != "residual"}
    assert recipe_from_json(before_residual, "here") == load_recipe("delayed")


# A user's own file


@pytest.mark.parametrize("path", ["mine.toml", "../here/mine.toml"])
def test_a_users_own_recipe_works_by_relative_path_and_shadows_none_that_ships(
    tmp_path, monkeypatch, path
):
    (tmp_path / "here" / "recipes").mkdir(parents=True)
    (tmp_path / "here" / "mine.toml").write_text('like = "block"\n')
    for name in ("delayed", "recipes/delayed.toml"):
        (tmp_path / "here" / name).write_text('like = "current"\n')
    monkeypatch.chdir(tmp_path / "here")
    assert load_recipe(path).quantizers == SHIPPED["block"]
    assert load_recipe("delayed").quantizers == SHIPPED["delayed"]


OF_ONE_FIELD = [
    ("delayed", "margin = -1", "grad_output.wgrad", {"margin": -1}),
    ("delayed", "history_length = 1", "weight", {"history_length": 1}),
    ("delayed", 'amax_algorithm = "most_recent"', "weight", {"amax_algorithm": "most_recent"}),
    ("delayed", 'backward_format = "e4m3"', "grad_output", {"format": "e4m3"}),
    ("current", 'forward_format = "e5m2"', "weight.dgrad", {"format": "e5m2"}),
    ("current", "power_of_two = true", "input", {"scale": "power_of_two"}),
    ("current", "quantizer.eps = 1", "grad_output", {"eps": 1.0}),
    ("mxfp8", 'scale_rounding = "floor"', "input", {"scale_rounding": "floor"}),
    ("nvfp4", 'grad_output.rounding = "nearest"', "grad_output.wgrad", {"rounding": "nearest"}),
    ("mxfp4", "quantizer.hadamard = 32", "input.wgrad", {"hadamard": 32}),
    ("mxfp8", "[quantizer]\nblock = [1, 128]", "weight", {"block": (1, 128)}),
    ("mxfp8", '[input.fprop]\nformat = "e2m1"', "input", {"format": "e2m1"}),
]


@pytest.mark.parametrize(("like", "lines", "place", "fields"), OF_ONE_FIELD)
def test_a_key_changes_the_fields_of_the_quantizers_that_it_speaks_of(
    write, like, lines, place, fields
):
    table, before = load_recipe(write(f'like = "{like}"\n{lines}\n')).quantizers, SHIPPED[like]
    assert table is not None
    assert before is not None
    assert table.each[place] == replace(before.each[place], **fields)


@pytest.mark.parametrize(
    ("lines", "changed"),
    [
        ('grad_output = "none"', HIGH),
        ('input = "none"', {"input": None, "input_wgrad": None}),
        ('[weight]\ndgrad = "forward"', {"weight_dgrad": "forward"}),
        ('backward = "same"', {}),
        ('backward = "high_precision"', {**HIGH, "input_wgrad": None, "weight_dgrad": None}),
        (
            'backward = "dequantized"',
            {**HIGH, "input_wgrad": "forward", "weight_dgrad": "forward"},
        ),
    ],
)
def test_an_operand_may_stay_in_the_compute_dtype_or_keep_its_forward_values(write, lines, changed):
    table = load_recipe(write(f'like = "mxfp8"\n{lines}\n')).quantizers
    assert table == replace(all_of(MX), **changed)


def test_overrides_come_after_what_the_file_says(write):
    recipe = load_recipe(write('like = "delayed"\nmargin = 1\n'), {"margin": 2, "head": True})
    assert recipe.quantizers == all_of(
        replace(DELAYED, margin=2), grad=replace(DELAYED, margin=2, format="e5m2")
    )
    assert recipe.head


# Layers


def choices(recipe: Recipe, blocks: int = 4) -> dict[str, str]:
    """The name of the quantizers of each layer of a small model; "none" without."""
    choice = {}
    for index in range(blocks):
        for linear in ("attention.qkv", "mlp.up", "mlp.down"):
            name = f"blocks.{index}.{linear}"
            choice[name] = recipe.for_layer(name, BlockIndex(index, blocks), False)
    choice["lm_head"] = recipe.for_layer("lm_head", None, True)
    return {name: called if table else "none" for name, (table, called, _) in choice.items()}


RULES = """
like = "delayed"
[[layers]]
match = "last 1 block"
recipe = "bf16"
[[layers]]
match = "blocks.*.mlp.down"
recipe = "mxfp8"
[[layers]]
match = "first 2 blocks"
history_length = 16
[[layers]]
match = "head"
recipe = "mxfp8"
grad_output = "none"
"""


def test_the_first_entry_that_matches_a_layer_decides_what_it_runs_in(write):
    recipe = load_recipe(write(RULES))
    names = choices(recipe)
    assert {names[f"blocks.3.{linear}"] for linear in ("mlp.up", "mlp.down")} == {"none"}
    assert names["blocks.0.mlp.down"] == names["blocks.2.mlp.down"] == "mxfp8"
    assert names["blocks.1.mlp.up"] == "mine, changed"
    assert names["blocks.2.mlp.up"] == "mine"
    assert names["lm_head"] == "mxfp8, changed"
    assert recipe.tables[1:] == (
        SHIPPED["mxfp8"],
        recipe.layers[2].quantizers,
        replace(all_of(MX), **HIGH),
    )
    first = recipe.layers[2].quantizers
    assert first is not None
    assert first.input == replace(DELAYED, history_length=16)
    assert recipe.delayed
    assert recipe_from_json(recipe.to_json(), "here") == recipe


@pytest.mark.parametrize(
    ("match", "missing"),
    [("blocks.*.mlp.dwn", "matches no layer"), ("first 1 block", "numbered blocks")],
)
def test_an_entry_that_matches_nothing_is_an_error(write, match, missing):
    recipe = load_recipe(write(f'like = "mxfp8"\n[[layers]]\nmatch = "{match}"\nrecipe = "bf16"\n'))
    with pytest.raises(UserError, match=missing):
        recipe.check_layers(["up", "down"], {}, [])


@pytest.mark.parametrize("match", ["first 3 blocks", "last 3 blocks"])
def test_an_entry_for_more_blocks_than_there_are_is_an_error(write, match):
    recipe = load_recipe(write(f'like = "mxfp8"\n[[layers]]\nmatch = "{match}"\nrecipe = "bf16"\n'))
    names = ["blocks.0.up", "blocks.1.up"]
    with pytest.raises(UserError, match=f"'{match}', and the model has 2 blocks. Give 2 at most"):
        recipe.check_layers(names, block_indices(names), [])
    recipe.check_layers(names := [*names, "blocks.2.up"], block_indices(names), [])


# Keys that are refused


def test_no_layers_of_its_own_can_be_an_override():
    path = "bench/recipes/nvfp4_last_bf16.toml"
    assert load_recipe(path).layers
    assert load_recipe(path, {"layers": []}).layers == ()


NO_OPERANDS = 'input = "none"\nweight = "none"\ngrad_output = "none"\n'


# Files that are refused


REFUSED = {
    # Unknown names, and keys of earlier versions.
    'like = "delayed"\nhistory_lenght = 1': ": No key 'history_lenght'. Did you mean 'history_le",
    'like = "delayed"\npower-of-two = 1': ": No key 'power-of-two'. Did you mean 'power_of_two'?",
    'like = "mxfp8"\n[input.wgrad]\nblok = [1, 16]': ": input.wgrad: No key 'blok'. Did you mean ",
    'scaling = "delayed"': "No key 'scaling'. Did you mean 'like'?",
    'like = "mxpf8"': "No recipe 'mxpf8'. Did you mean 'mxfp8'?",
    'like = "nvfp4"\neps = 1e-3': ": there is no key 'eps': in a recipe, set quantizer.eps.",
    'like = "nvfp4"\nhadamard = 0': "set input.wgrad.hadamard and grad_output.wgrad.hadamard.",
    # What no quantizer of the recipe has a use for.
    'like = "mxfp8"\nhistory_length = 16': ": history_length changes nothing: no quantizer ",
    'like = "bf16"\nbackward_format = "e4m3"': ": backward_format changes nothing: no quantizer ",
    'like = "current"\nquantizer.margin = 1': ": quantizer: margin changes nothing: no quantizer ",
    'like = "delayed"\nweight.scale_rounding = "even"': ": weight: scale_rounding changes nothing",
    # What does not go together.
    "# nothing but a comment": "it has no quantizer. Begin with a key",
    'like = "bf16"\nhead = true': "head, router, exclude, exclude_first_blocks, ",
    'like = "bf16"\nexclude_first_blocks = 1': "need quantizers, and it has none",
    f'like = "current"\n{NO_OPERANDS}': "it has no quantizer. Begin with a key",
    'like = "delayed"\ncompute_dtype = "fp16"': "compute_dtype is bf16 or fp32, not fp16",
    'like = "./other.toml"': "is a file. Name a recipe that ships",
    'like = "tf32"\nattention = "fp32"': "not possible in tf32",
    'like = "delayed"\nbackward = "dequantized"': "is not for delayed scaling",
    'like = "mxfp8"\nbackward = "dequantized"\ngrad_output = "none"': "stands for keys of the back",
    'like = "mxfp4"\nbackward = "dequantized"\n[quantizer]\nhadamard = 32': (
        "input: hadamard = 32 mixes the forward values that its backward GEMM is to take"
    ),
    'like = "mxfp8"\n[input]\nblock = "tensor"': "input: scale = 'e8m0' needs a block",
    'like = "current"\n[input]\nformat = "e2m1"': "input: format = 'e2m1' needs a block",
    'like = "mxfp8"\n[input]\nscale = "e4m3"': "is for format = 'e2m1' alone",
    'like = "mxfp8"\n[input.wgrad]\nhadamard = 16': "wgrad: hadamard = 0 and 16",
    'like = "block"\n[input]\namax = "delayed"': "amax = 'delayed' needs block = 'tensor'",
    # Entries for layers.
    'like = "mxfp8"\n[layers]\nmatch = "head"': "a list of tables [[layers]] is needed.",
    '[[layers]]\nmatch = "a"': "layers entry 1: 'a' changes nothing",
    '[[layers]]\nmatch = "a"\nrecipe = "mxpf8"': "No recipe 'mxpf8'. Did you mean 'mxfp8'?",
    '[[layers]]\nmatch = "a"\nrecipe = "mine.toml"': "layers entry 1: 'mine.toml' is a file",
    '[[layers]]\nmatch = "a"\nrecipe = "fp32"': "Use recipe = 'bf16'",
    '[[layers]]\nrecipe = "mxfp8"': "layers.0.match",
    '[[layers]]\nmatch = "a"\nrecipe = "bf16"\n[[layers]]\nmatch = "a"\nrecipe = "block"': "twice",
    'exclude = "a"\n[[layers]]\nmatch = "a"\nrecipe = "block"': "'a' is said twice",
    '[[layers]]\nmatch = "a"\nblok = 3': "No key 'blok'",
    '[[layers]]\nmatch = "a"\nquantizer.hadamard = 16\nrecipe = "delayed"': (
        "layers entry 1: quantizer: amax = 'delayed'"
    ),
    # Values of another type, out of range, or not known.
    "like = 3": "like = 3: ",
    'like = "delayed"\nmargin = "0"': ": margin = '0'",
    'like = "delayed"\nmargin = 2000': ": margin = 2000",
    f'like = "delayed"\nmargin = {"9" * 5000}': "mine",
    f'like = "delayed"\nmargin = 0x{"f" * 5000}': "mine",
    'like = "delayed"\nhistory_length = 16.0': ": history_length = 16.0",
    'like = "delayed"\nhistory_length = 0': ": history_length = 0",
    'like = "delayed"\namax_algorithm = "mean"': ": amax_algorithm = 'mean'",
    'like = "delayed"\nforward_format = "e8m0"': ": forward_format = 'e8m0'",
    'like = "current"\npower_of_two = 1': ": power_of_two = 1",
    'like = "current"\nquantizer.eps = -1e-6': ": quantizer.eps = -1e-06",
    'like = "current"\nquantizer.eps = nan': ": quantizer.eps = nan",
    'like = "block"\nhead = "false"': ": head = 'false'",
    'like = "block"\nexclude = { a = 1 }': ": exclude = {'a': 1}",
    'like = "mxfp8"\nexclude = 3': "exclude = 3: a list is needed.",
    'like = "delayed"\nexclude = ["a", 2]': ": exclude.",
    'like = "mxfp8"\nexclude_first_blocks = -1': ": exclude_first_blocks = -1",
    'like = "mxfp8"\nexclude_last_blocks = 1979-05-27': ": exclude_last_blocks = ",
    'like = "mxfp8"\n[input]\nblock = [1, 17]': "block = [1, 17]: No block [1, 17]. Known: ",
    "[quantizer]\nblock = 64": "block = 64: No block 64. Known: tensor, row, [1, ",
    'like = "mxfp8"\nweight = "e5m2"': "should be 'none', or a table with keys of ",
    'like = "mxfp8"\nbackward = "hp"': "Or high_precision, dequantized, same.",
    'like = "mxfp8"\n[grad_output]\nwgrad = "nune"': "grad_output.wgrad = 'nune'",
    'like = "mxfp4"\nquantizer.hadamard = 8': ": quantizer.hadamard = 8",
    'like = "mxfp4"\ngrad_output.rounding = "random"': ": grad_output.rounding = 'random'",
    'like = "bf16"\nname = 1': ": name = 1",
    'like = "bf16"\ncompute_dtype = "bfloat16"': ": compute_dtype = 'bfloat16'",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_wrong_file_is_refused_with_the_keys_place_and_value(write, text):
    begin = "" if "like" in text.partition("[[")[0] or "[[" not in text else 'like = "mxfp8"\n'
    message = refusal(write(begin + text + "\n"))
    assert REFUSED[text] in message
    if REFUSED[text].startswith(": "):
        assert message.startswith(f"recipe 'mine'{REFUSED[text]}")


BAD_FILES = [
    *((text, "not valid TOML") for text in ("not toml", "a = 1\na = 2", "\x00")),
    *((data, "UTF-8") for data in (b"\xff\xfe", "x = 1".encode("utf-16"))),
    ("a = " + "[" * 100_000 + "]" * 100_000, "nested too deeply"),
]


@pytest.mark.parametrize(("content", "problem"), BAD_FILES, ids=range(len(BAD_FILES)))
def test_a_file_that_cannot_be_read_is_refused_by_its_path(write, content, problem):
    path = write(content)
    message = refusal(path)
    assert path in message
    assert problem in message


def test_a_path_without_a_file_is_refused_and_the_shipped_recipes_are_named(tmp_path):
    for name in ("missing.toml", "no/file", "a\\b", "x" * 300 + ".toml", "x/" * 3000, "\0.toml"):
        message = refusal(name)
        assert message.startswith("No recipe file")
        assert "mxfp8" in message
    (tmp_path / "mine.toml").mkdir()
    message = refusal(str(tmp_path / "mine.toml"))
    assert f"{tmp_path}/mine.toml" in message
    assert "TOML file" in message


def test_an_unknown_name_is_refused_with_the_nearest_one():
    names = ", ".join(sorted(["auto", *SHIPPED]))
    for name, near in (("mxpf8", "mxfp8"), ("bfloat16", "bf16"), ("Delayed", "delayed")):
        assert refusal(name) == f"No recipe '{name}'. Did you mean '{near}'? Known: {names}."
    for name in ("", ".", "*", "mxfp8 "):
        assert refusal(name).startswith(f"No recipe '{name}'.")
    assert refusal("auto").startswith("recipe 'auto' is chosen by machine, and a recipe must be")
    with pytest.raises(UserError, match="like cannot be overridden"):
        load_recipe("delayed", {"like": "current"})


# Layers that stay out of FP8


HEAD = ("lm_head", None, True)


def up(index: int, count: int = 12) -> tuple[str, BlockIndex, bool]:
    return (f"blocks.{index}.mlp.up", BlockIndex(index, count), False)


@pytest.mark.parametrize(
    ("over", "layer", "expected"),
    [
        ({}, ("h.0.score", BlockIndex(0, 1), True), "the recipe says head = false"),
        ({}, ("lm_head", None, False), None),  # a head by its name alone is none
        ({"head": True}, HEAD, None),
        ({"exclude": ("*.UP", "mlp")}, up(0), None),
        ({"exclude": ("*.down", "*.up")}, up(0), "excluded by the pattern '*.up'"),
        ({"exclude": ("lm_*",), "head": True}, HEAD, "excluded by the pattern 'lm_*'"),
        ({"exclude": ("lm_*",)}, HEAD, "the recipe says head = false"),
        ({"exclude_first_blocks": 1}, up(0), "in the first 1 block"),
        ({"exclude_first_blocks": 1}, ("blocks.0.mlp.up", BlockIndex(7, 12), False), None),
        ({"exclude_first_blocks": 99}, up(11), "in the first 99 blocks"),
        ({"exclude_first_blocks": 1, "exclude_last_blocks": 1}, up(5), None),
        ({"exclude_last_blocks": 2}, up(10), "in the last 2 blocks"),
        ({"exclude_last_blocks": 2}, up(10, 13), None),
        ({"exclude_last_blocks": 99, "head": True}, HEAD, None),
    ],
    ids=str,
)
def test_a_recipe_says_why_a_layer_stays_out(over, layer, expected):
    table, _, reason = load_recipe("nvfp4").model_copy(update=over).for_layer(*layer)
    assert (table, reason) == ((None, expected) if expected else (NVFP4, ""))


@pytest.mark.parametrize(("name", "capability"), [("mxfp8", (8, 0)), ("bf16", (7, 0))])
def test_the_residual_stream_is_in_what_was_asked_whatever_runs_instead(name, capability):
    recipe = load_recipe(name, {"residual": "bf16"})
    plan = resolve(recipe, Hardware("cuda", capability))
    assert plan.recipe.residual == "bf16"
    assert "residual stream: bf16, the recipe says so" in plan.summary()
    assert plan.to_json()["reasons"][-1] == "residual stream: bf16, the recipe says so"
    assert recipe_from_json(recipe.to_json(), "here") == recipe
    assert recipe.to_json(words=False) != load_recipe(name).to_json(words=False)
