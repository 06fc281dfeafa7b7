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
from fp8stack.precision.recipe_file import plain
from tests import conftest
from tests.support.study_recipes import BACKWARD_HIGH, LAST_BF16, NEAREST, NO_HADAMARD


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


@pytest.mark.parametrize(
    ("path", "quantizers"),
    [
        (NEAREST, replace(NVFP4, grad_output=FP4, grad_output_wgrad=replace(FP4, hadamard=16))),
        (NO_HADAMARD, all_of(FP4, SQUARES, DRAWN)),
        (BACKWARD_HIGH, Quantizers(input=FP4, weight=SQUARES)),
        (LAST_BF16, NVFP4),
    ],
    ids=lambda value: Path(value).stem if isinstance(value, str) else "",
)
def test_the_studys_variations_of_nvfp4_change_one_thing(path, quantizers):
    recipe = load_recipe(path)
    assert recipe.quantizers == quantizers
    rules = [(rule.match, rule.quantizers) for rule in recipe.layers]
    assert rules == ([("last 1 block", None)] if path == LAST_BF16 else [])


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


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_explains_each_of_its_lines(name):
    text = path_of(name).read_text()
    keys = [line for line in text.splitlines() if " = " in line and not line.startswith("desc")]
    explained = [line for line in keys if "#" in line]
    assert name in ("bf16", "fp16", "tf32", "fp32") or len(explained) >= 0.8 * len(keys)


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "bf16", "fp16"])
def test_every_compute_dtype_has_a_plain_recipe_of_its_name(dtype):
    recipe = plain(dtype, load_recipe("delayed"))
    assert recipe.compute_dtype == dtype
    assert recipe == load_recipe(dtype)


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


def test_a_plain_recipe_in_an_old_checkpoint_is_the_one_that_ships_today():
    assert recipe_from_json(
        {"scaling": "none", "compute_dtype": "bf16"}, "checkpoint.json"
    ).to_json(words=False) == load_recipe("bf16").to_json(words=False)


# A user's own file


@pytest.mark.parametrize("path", ["mine.toml", "./mine.toml", "../here/mine.toml"])
def test_a_users_own_recipe_works_by_relative_path(tmp_path, monkeypatch, path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mine.toml").write_text('like = "block"\n')
    monkeypatch.chdir(tmp_path / "here")
    assert load_recipe(path).quantizers == SHIPPED["block"]


def test_a_shipped_recipe_is_not_shadowed_by_a_file_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    for path in (tmp_path / "delayed", tmp_path / "recipes" / "delayed.toml"):
        path.write_text('like = "current"\n')
    monkeypatch.chdir(tmp_path)
    assert load_recipe("delayed").quantizers == SHIPPED["delayed"]


OF_ONE_FIELD = [
    ("delayed", "margin = 3", "input", {"margin": 3}),
    ("delayed", "margin = -1", "grad_output.wgrad", {"margin": -1}),
    ("delayed", "history_length = 1", "weight", {"history_length": 1}),
    ("delayed", 'amax_algorithm = "most_recent"', "weight", {"amax_algorithm": "most_recent"}),
    ("delayed", 'backward_format = "e4m3"', "grad_output", {"format": "e4m3"}),
    ("current", 'forward_format = "e5m2"', "weight.dgrad", {"format": "e5m2"}),
    ("current", "power_of_two = true", "input", {"scale": "power_of_two"}),
    ("current", "quantizer.eps = 1e-12", "input", {"eps": 1e-12}),
    ("current", "quantizer.eps = 1", "grad_output", {"eps": 1.0}),
    ("block", "power_of_two = false", "weight", {"scale": "float32"}),
    ("mxfp8", 'scale_rounding = "floor"', "input", {"scale_rounding": "floor"}),
    ("mxfp8", 'backward_format = "e5m2"', "grad_output", {"format": "e5m2"}),
    ("nvfp4", 'grad_output.rounding = "nearest"', "grad_output.wgrad", {"rounding": "nearest"}),
    ("mxfp4", "quantizer.hadamard = 32", "input.wgrad", {"hadamard": 32}),
    ("mxfp8", "[quantizer]\nblock = [1, 128]", "weight", {"block": (1, 128)}),
    ("mxfp8", '[weight]\nformat = "e2m1"', "weight.dgrad", {"format": "e2m1"}),
    ("mxfp8", '[weight.dgrad]\nformat = "e2m1"', "weight.dgrad", {"format": "e2m1"}),
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


def test_a_table_of_one_gemm_leaves_the_other_copy_of_the_operand_alone(write):
    table = load_recipe(write('like = "mxfp8"\n[weight.dgrad]\nformat = "e2m1"\n')).quantizers
    assert table == replace(all_of(MX), weight_dgrad=replace(MX, format="e2m1"))


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


def test_a_recipe_of_known_parts_needs_no_other_recipe(write):
    path = write(
        """
        description = "squares of weights in FP6, the gradients in FP8"
        [quantizer]
        format = "e3m2"
        block = [1, 16]
        scale = "power_of_two"
        [weight]
        block = [16, 16]
        [grad_output]
        format = "e5m2"
        block = "row"
        """
    )
    small = Quantizer(format="e3m2", block=(1, 16), scale="power_of_two")
    rows = replace(small, format="e5m2", block="row")
    assert load_recipe(path).quantizers == all_of(small, replace(small, block=(16, 16)), rows)


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


BAD_LAYERS = {
    'match = "a"': "layers entry 1: 'a' changes nothing",
    'match = "a"\nrecipe = "mxpf8"': "No recipe 'mxpf8'. Did you mean 'mxfp8'?",
    'match = "a"\nrecipe = "mine.toml"': "layers entry 1: 'mine.toml' is a file",
    'match = "a"\nrecipe = "fp32"': "Use recipe = 'bf16'",
    'recipe = "mxfp8"': "layers.0.match",
    'match = "a"\nrecipe = "bf16"\n[[layers]]\nmatch = "a"\nrecipe = "mxfp8"': "said twice",
    'match = "a"\nblok = 3': "No key 'blok'",
    'match = "a"\nquantizer.hadamard = 16\nrecipe = "delayed"': (
        "layers entry 1: quantizer: amax = 'delayed'"
    ),
}


@pytest.mark.parametrize("lines", BAD_LAYERS)
def test_a_wrong_entry_for_layers_is_refused_with_its_place(write, lines):
    assert BAD_LAYERS[lines] in refusal(write(f'like = "mxfp8"\n[[layers]]\n{lines}\n'))


def test_a_pattern_that_is_excluded_is_not_to_have_a_recipe_too(write):
    text = 'like = "mxfp8"\nexclude = "a"\n[[layers]]\nmatch = "a"\nrecipe = "block"\n'
    assert "'a' is said twice" in refusal(write(text))


# Keys that are refused


TYPOS = {
    "history_lenght": "history_length",
    "amax_algo": "amax_algorithm",
    "forward_fmt": "forward_format",
    "excludes": "exclude",
    "power-of-two": "power_of_two",
    "scale_round": "scale_rounding",
    "desciption": "description",
}


@pytest.mark.parametrize("typo", TYPOS)
def test_an_unknown_key_is_refused_with_the_nearest_one(write, typo):
    message = refusal(write(f'like = "delayed"\n{typo} = 1\n'))
    assert message.startswith(f"recipe 'mine': No key '{typo}'. Did you mean '{TYPOS[typo]}'?")


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("eps = 1e-3", "set quantizer.eps."),
        ('rounding = "nearest"', "set grad_output.rounding."),
        ("hadamard = 0", "set input.wgrad.hadamard and grad_output.wgrad.hadamard."),
    ],
)
def test_a_short_key_of_earlier_versions_is_refused_with_what_to_set(write, line, remedy):
    key = line.partition(" ")[0]
    message = refusal(write(f'like = "nvfp4"\n{line}\n'))
    assert message == f"recipe 'mine': there is no key '{key}': in a recipe, {remedy}"


def test_an_unknown_field_of_a_quantizer_is_refused_with_its_place(write):
    message = refusal(write('like = "mxfp8"\n[input.wgrad]\nblok = [1, 16]\n'))
    assert message.startswith("recipe 'mine': input.wgrad: No key 'blok'. Did you mean 'block'?")


CHANGES_NOTHING = {
    "mxfp8": ["history_length = 16", "power_of_two = true", "margin = 1"],
    "block": ['scale_rounding = "floor"', 'amax_algorithm = "max"'],
    "current": ["history_length = 16"],
    "delayed": ["power_of_two = true"],
    "bf16": ["history_length = 16", 'backward_format = "e4m3"'],
}


@pytest.mark.parametrize(
    ("like", "line"),
    [
        ("current", "quantizer.margin = 1"),
        ("delayed", "quantizer.eps = 0.01"),
        ("mxfp8", "input.eps = 1e-6"),
        ("delayed", 'weight.scale_rounding = "even"'),
    ],
)
def test_a_field_of_a_table_that_no_quantizer_uses_is_refused(write, like, line):
    place, _, key = line.partition(" ")[0].partition(".")
    message = refusal(write(f'like = "{like}"\n{line}\n'))
    assert message.startswith(f"recipe 'mine': {place}: {key} changes nothing: no quantizer ")


def test_no_layers_of_its_own_can_be_an_override():
    path = "bench/recipes/nvfp4_last_bf16.toml"
    assert load_recipe(path).layers
    assert load_recipe(path, {"layers": []}).layers == ()


@pytest.mark.parametrize("like", CHANGES_NOTHING)
def test_a_short_form_that_no_quantizer_has_a_field_for_is_refused(write, like):
    for line in CHANGES_NOTHING[like]:
        key = line.partition(" ")[0]
        message = refusal(write(f'like = "{like}"\n{line}\n'))
        assert message.startswith(f"recipe 'mine': {key} changes nothing: no quantizer ")


NO_OPERANDS = 'input = "none"\nweight = "none"\ngrad_output = "none"\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("# nothing but a comment\n", "it has no quantizer. Begin with a key"),
        ('like = "bf16"\nhead = true\n', "head, router, exclude, exclude_first_blocks, "),
        ('like = "bf16"\nrouter = true\n', "and layers need quantizers, and it has none"),
        ('like = "bf16"\nexclude_first_blocks = 1\n', "need quantizers, and it has none"),
        ('like = "bf16"\nexclude_last_blocks = 1\n', "need quantizers, and it has none"),
        (f'like = "current"\n{NO_OPERANDS}', "it has no quantizer. Begin with a key"),
        ('like = "delayed"\ncompute_dtype = "fp16"\n', "compute_dtype is bf16 or fp32, not fp16"),
        ('like = "mxfp8"\ncompute_dtype = "tf32"\n', "compute_dtype is bf16 or fp32, not tf32"),
        ('scaling = "delayed"\n', "No key 'scaling'. Did you mean 'like'?"),
        ('like = "delayd"\n', "No recipe 'delayd'. Did you mean 'delayed'?"),
        ('like = "mxpf8"\n', "No recipe 'mxpf8'. Did you mean 'mxfp8'?"),
        ('like = "./other.toml"\n', "is a file. Name a recipe that ships"),
        ("like = 3\n", "like = 3: "),
        ('like = "tf32"\nattention = "fp32"\n', "not possible in tf32"),
        ('like = "delayed"\nbackward = "dequantized"\n', "is not for delayed scaling"),
        (
            'like = "mxfp8"\nbackward = "dequantized"\ngrad_output = "none"\n',
            "stands for keys of the backward operands",
        ),
        (
            'like = "mxfp4"\nbackward = "dequantized"\n[quantizer]\nhadamard = 32\n',
            "input: hadamard = 32 mixes the forward values that its backward GEMM is to take",
        ),
        (
            'like = "mxfp8"\n[input]\nblock = [1, 17]\n',
            "block = [1, 17]: No block [1, 17]. Known: ",
        ),
        ("[quantizer]\nblock = 64\n", "block = 64: No block 64. Known: tensor, row, [1, "),
        ('like = "mxfp8"\nweight = "e5m2"\n', "should be 'none', or a table with keys of "),
        ('like = "mxfp8"\n[layers]\nmatch = "head"\n', "a list of tables [[layers]] is needed."),
        ('like = "mxfp8"\nexclude = 3\n', "exclude = 3: a list is needed."),
        ('like = "mxfp8"\nbackward = "hp"\n', "Or high_precision, dequantized, same."),
        ('like = "mxfp8"\n[input]\nblock = "tensor"\n', "input: scale = 'e8m0' needs a block"),
        ('like = "current"\n[input]\nformat = "e2m1"\n', "input: format = 'e2m1' needs a block"),
        ('like = "mxfp8"\n[input]\nscale = "e4m3"\n', "is for format = 'e2m1' alone"),
        ('like = "mxfp8"\n[input.wgrad]\nhadamard = 16\n', "wgrad: hadamard = 0 and 16"),
        ('like = "block"\n[input]\namax = "delayed"\n', "amax = 'delayed' needs block = 'tensor'"),
        ('like = "mxfp8"\n[grad_output]\nwgrad = "nune"\n', "grad_output.wgrad = 'nune'"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_keys_place(write, text, problem):
    message = refusal(write(text))
    assert message.startswith("recipe 'mine'")
    assert problem in message


# Values that are refused

WRONG = {  # of another type, out of range, or nothing that a scale could be made of
    ("delayed", "margin"): ['"0"', "0.5", "true", "2000", "-2000"],
    ("delayed", "history_length"): ["16.0", '"16"', "[16]", "0", "-1", "1" + 30 * "0"],
    ("delayed", "amax_algorithm"): ["1", '"mean"'],
    ("delayed", "forward_format"): ['["e4m3"]', '"e8m0"'],
    ("delayed", "backward_format"): ['"E5M2"'],
    ("current", "power_of_two"): ["1", '"yes"'],
    ("current", "quantizer.eps"): ['"small"', "true", "-1e-6", "nan", "-inf", "inf"],
    ("block", "head"): ["0", '"false"'],
    ("block", "exclude"): ["true", "{ a = 1 }"],
    ("block", "exclude_last_blocks"): ["-2"],
    ("mxfp8", "exclude_first_blocks"): ["1.0", "-1"],
    ("mxfp8", "exclude_last_blocks"): ["[1]", "1979-05-27"],
    ("mxfp8", "scale_rounding"): ["false", '"up"'],
    ("mxfp4", "quantizer.hadamard"): ["8", "true"],
    ("mxfp4", "grad_output.rounding"): ['"random"'],
    ("bf16", "name"): ["1"],
    ("bf16", "compute_dtype"): ['"fp8"', '"bfloat16"', '"BF16"', "16", "true"],
}


@pytest.mark.parametrize(
    ("like", "key", "value"), [(*place, value) for place in WRONG for value in WRONG[place]]
)
def test_a_wrong_value_is_refused_with_its_file_key_and_value(write, like, key, value):
    message = refusal(write(f'like = "{like}"\n{key} = {value}\n'))
    assert message.startswith(f"recipe 'mine': {key} = ")
    assert value.strip("\"[]{} '").partition(" ")[0].lower()[:4] in message.lower()


@pytest.mark.parametrize("value", ["[1]", '["a", 2]', "[[]]"])
def test_a_pattern_that_is_no_string_is_refused_with_its_place(write, value):
    message = refusal(write(f'like = "delayed"\nexclude = {value}\n'))
    assert message.startswith("recipe 'mine': exclude.")


def test_another_recipe_cannot_be_an_override():
    with pytest.raises(UserError, match="like cannot be overridden"):
        load_recipe("delayed", {"like": "current"})


# Files that are refused


NOT_TOML = ["not toml", "a = 1\na = 2", "[x", "a = 'x\n'", '{"scaling": "delayed"}', "\x00"]
NOT_UTF8 = [b"\xff\xfe", b"description = '\xe9'\n", "x = 1".encode("utf-16")]
BAD_FILES = [
    *((text, "not valid TOML") for text in NOT_TOML),
    *((data, "UTF-8") for data in NOT_UTF8),
    ("a = " + "[" * 100_000 + "]" * 100_000, "nested too deeply"),
]


@pytest.mark.parametrize(("content", "problem"), BAD_FILES, ids=range(len(BAD_FILES)))
def test_a_file_that_cannot_be_read_is_refused_by_its_path(write, content, problem):
    path = write(content)
    message = refusal(path)
    assert path in message
    assert problem in message


@pytest.mark.parametrize("digits", ["9" * 5000, "0x" + "f" * 5000], ids=["decimal", "hex"])
def test_a_number_of_thousands_of_digits_is_refused(write, digits):
    assert "mine" in refusal(write(f'like = "delayed"\nmargin = {digits}\n'))


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
    names = ", ".join(sorted(["auto", *SHIPPED]))
    assert refusal(name) == f"No recipe '{name}'. Did you mean '{near}'? Known: {names}."


@pytest.mark.parametrize("name", ["", "zzzzzzz", ".", "..", "*", "mxfp8 "])
def test_a_name_of_no_file_is_refused(name):
    assert refusal(name).startswith(f"No recipe '{name}'.")


def test_auto_is_refused_where_a_recipe_must_be_named():
    assert refusal("auto").startswith("recipe 'auto' is chosen by machine, and a recipe must be")


# Layers that stay out of FP8


HEAD = ("lm_head", None, True)


def up(index: int, count: int = 12) -> tuple[str, BlockIndex, bool]:
    return (f"blocks.{index}.mlp.up", BlockIndex(index, count), False)


@pytest.mark.parametrize(
    ("over", "layer", "expected"),
    [
        ({}, HEAD, "the recipe says head = false"),
        ({}, ("score", None, True), "the recipe says head = false"),
        ({}, ("h.0.score", BlockIndex(0, 1), True), "the recipe says head = false"),
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
        ({"exclude_first_blocks": 1}, ("h.0.up", BlockIndex(0, 12), False), "in the first 1 block"),
        ({"exclude_first_blocks": 1}, ("blocks.0.mlp.up", None, False), None),
        ({"exclude_first_blocks": 1}, ("blocks.0.mlp.up", BlockIndex(7, 12), False), None),
        ({"exclude_first_blocks": 99}, up(11), "in the first 99 blocks"),
        ({"exclude_first_blocks": 1, "exclude_last_blocks": 1}, up(5), None),
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
def test_a_recipe_says_why_a_layer_stays_out(over, layer, expected):
    table, _, reason = load_recipe("nvfp4").model_copy(update=over).for_layer(*layer)
    assert (table, reason) == ((None, expected) if expected else (NVFP4, ""))


@pytest.mark.parametrize("name", ["mxfp8", "bf16"])
@pytest.mark.parametrize("capability", [(8, 0), (7, 0), (10, 0)])
def test_the_residual_stream_is_in_what_was_asked_whatever_runs_instead(name, capability):
    recipe = load_recipe(name, {"residual": "bf16"})
    plan = resolve(recipe, Hardware("cuda", capability))
    assert plan.recipe.residual == "bf16"
    assert "residual stream: bf16, the recipe says so" in plan.summary()
    assert plan.to_json()["reasons"][-1] == "residual stream: bf16, the recipe says so"
    assert recipe_from_json(recipe.to_json(), "here") == recipe
    assert recipe.to_json(words=False) != load_recipe(name).to_json(words=False)


def test_a_recipe_that_was_written_before_there_was_a_choice_has_its_residual_stream_in_float32():
    data = load_recipe("delayed").to_json()
    del data["residual"]
    assert recipe_from_json(data, "here") == load_recipe("delayed")


@pytest.mark.parametrize("name", LOW)
def test_a_shipped_recipe_quantizes_all_layers_but_the_head_alike(name):
    recipe = load_recipe(name)
    assert (recipe.layers, recipe.exclude, recipe.head) == ((), (), False)
    assert recipe.exclude_first_blocks == recipe.exclude_last_blocks == 0
