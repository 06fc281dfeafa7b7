"""Find a preset by name or path, and parse it strictly, without importing torch. `models/*.toml`
and `recipes/*.toml` hold data, no code; `recipes/served/mxfp8.toml` is called `served:mxfp8`. They
are in a wheel's `fp8stack/_presets/`, or next to the package in a checkout."""

import os
import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from fp8stack.common.errors import UserError, described, quoted, unknown
from fp8stack.common.io import read_toml

Kind = Literal["models", "recipes"]

_INTERVAL = (
    "scales of delayed scaling follow every training pass, as in Transformer Engine, which ignores "
    "its own interval. Leave it out; history_length, margin and amax_algorithm can be set"
)
_NO_KEYS = dict.fromkeys(("interval", "history_interval", "amax_history_interval"), _INTERVAL) | {
    "eps": "in a recipe, set quantizer.eps",
    "rounding": "in a recipe, set grad_output.rounding",
    "hadamard": "in a recipe, set input.wgrad.hadamard and grad_output.wgrad.hadamard",
}
"""Keys of other programs and of earlier versions, and why they are none."""

OTHER_NAMES = {
    "gpt2": "gpt2-124m",
    "gpt2-small": "gpt2-124m",
    "gpt2-medium": "gpt2-350m",
    "gpt2-large": "gpt2-774m",
    "gpt2-xl": "gpt2-1.5b",
    "fp8": "delayed",
    "scaling": "like",
    "learning_rate": "lr",
    "batch_size": "batch",
    "max_steps": "steps",
    "block_size": "context",
    "grad_clip": "clip",
    "gradient_accumulation_steps": "accumulate",
}
"""The names of presets and keys in other programs, such as transformers, with ours to suggest."""


def folder(kind: Kind) -> Path:
    """The folder that holds the presets of `kind`: inside the wheel, or next to the package."""
    package = Path(str(resources.files("fp8stack")))
    shipped = package / "_presets" / kind
    return shipped if shipped.is_dir() else package.parent / kind


def names(kind: Kind) -> list[str]:
    """The names of the presets of `kind` that come with fp8stack, sorted."""
    return sorted(_files(kind))


def label(name: str) -> str:
    """The short name of a preset or of a file: `mine` of `folder/mine.toml`, else `name` itself."""
    return Path(name).stem if name.endswith(".toml") else name


def training_recipes() -> list[str]:
    """The names of the recipes for training, sorted: all but the schemes of inference servers,
    `served:...`, which quantize the forward pass alone."""
    return [name for name in names("recipes") if ":" not in name]


def _files(kind: Kind) -> dict[str, Path]:
    """The files of the presets of `kind`, by name."""
    top = folder(kind)
    paths = (*top.glob("*.toml"), *top.glob("*/*.toml"))
    return {":".join(path.relative_to(top).with_suffix("").parts): path for path in paths}


def recipe_words(recipes: str) -> list[str]:
    """The recipes of a `--recipes`, separated by commas. Raises a UserError for an empty name,
    or one that is there twice."""
    words = [word.strip() for word in recipes.split(",")]
    if not all(words):
        raise UserError(
            f"--recipes '{quoted(recipes)}' has an empty name. Example: fp32,bf16,delayed"
        )
    for word in words:
        if words.count(word) > 1:
            raise UserError(f"--recipes names '{quoted(word)}' twice. Name each recipe once.")
    return words


def read(kind: Kind, name: str) -> tuple[str, dict[str, Any]]:
    """The name and the table of a preset, see `find`. Raises a UserError if there is no such preset
    or file, or it is not TOML."""
    path = find(kind, name)
    return (name if path == _files(kind).get(name) else path.stem), read_toml(path)


def find(kind: Kind, name: str) -> Path:
    """The file of a preset: one that ships with fp8stack, or a user's own file. Anything that ends
    in `.toml` or holds a path separator is a path; the rest are names. Raises a UserError if there
    is no such preset or file."""
    if not isinstance(name, str):
        raise UserError(f"A {kind[:-1]} is given by name or path, not by {described(name)}.")
    if name.endswith(".toml") or "/" in name or "\\" in name:
        path = Path(name)
        if not os.path.isfile(path):  # unlike Path.is_file, False for a name that is too long
            raise UserError(
                f"No {kind[:-1]} file '{quoted(name)}'. Give the path of a TOML file, or one of: "
                f"{', '.join(names(kind))}."
            )
        return path
    files = _files(kind)
    if name not in files:
        rules = ["auto"] if kind == "recipes" and name != "auto" else []  # no file, but a recipe
        raise unknown(kind[:-1], name, sorted(files) + rules, OTHER_NAMES.get(name))
    return files[name]


def parse(schema: Any, table: dict[str, Any], where: str) -> Any:
    """`table` as the pydantic type `schema`. Raises a UserError, one line that names the first
    wrong key, its value and what is allowed."""
    try:
        return TypeAdapter(schema).validate_python(table)
    except ValidationError as error:
        raise UserError(_explain(error, schema, where)) from error


def _explain(error: ValidationError, schema: Any, where: str) -> str:
    """The first problem of `error` in one line."""
    # A key that is not known first: it may be a misspelled one that is missing, too. Then what a
    # key may be; that it is no table, where it may be one, says less.
    order = {"extra_forbidden": 0, "finite_number": 0, "model_type": 2}
    problem = min(error.errors(), key=lambda details: order.get(details["type"], 1))
    tree = _tree(schema)
    # pydantic adds the type that it tried, where a value may have several types.
    types = tree.get("$defs", {})
    path = [p for p in map(str, problem["loc"]) if p not in types and not re.match(r"\w+\[", p)]
    if len(path) > 1 and path[-1] in ("bool", "float", "int", "str"):
        del path[-1]
    if "discriminator" in tree:
        mapping = tree["discriminator"]["mapping"]
        tag = tree["discriminator"]["propertyName"]
        if problem["type"] == "union_tag_invalid":
            return f"{where}: {unknown(tag, str(problem['ctx']['tag']), mapping)}"
        if problem["type"] == "union_tag_not_found":
            return f"{where}: key '{tag}' is missing. Known values: {', '.join(sorted(mapping))}."
        tree = tree["$defs"][mapping[path.pop(0)].rsplit("/", 1)[-1]]
    if problem["type"] == "extra_forbidden":
        last = str(problem["loc"][-1])  # not in `path` if it is named like a type
        outer = path[:-1] if path[-1:] == [last] else path
        within = f"{quoted('.'.join(outer))}: " if outer else ""
        if last in _NO_KEYS:
            return f"{where}: {within}there is no key '{last}': {_NO_KEYS[last]}."
        keys = _keys(tree, outer)
        return f"{where}: {within}{unknown('key', last, keys, OTHER_NAMES.get(last))}"
    key = ".".join(path)
    if problem["type"] == "missing":
        return f"{where}: key '{key}' is missing."
    message = problem["msg"].removeprefix("Value error, ").rstrip(".")
    if problem["type"] == "literal_error" and any(
        details["type"] == "model_type" and details["input"] is problem["input"]
        for details in error.errors()
    ):
        message += f", or a table with keys of {', '.join(_keys(tree, path))}"
    elif problem["type"] in ("list_type", "tuple_type"):
        tables = f" of tables [[{key}]]" if isinstance(problem["input"], dict) else ""
        message = f"a list{tables} is needed"
    elif problem["type"] == "model_type":
        message = f"a table is needed, with keys of {', '.join(_keys(tree, path))}"
    if not key:
        return f"{where}: {message}."
    return f"{where}: {quoted(key)} = {_shown(problem['input'])}: {message}."


@cache
def _tree(schema: Any) -> dict[str, Any]:
    """The JSON schema of a pydantic type; making one takes a hundred times as long as parsing."""
    return TypeAdapter(schema).json_schema()


def _keys(tree: dict[str, Any], path: Sequence[str]) -> list[str]:
    """The keys of the table at `path` in a JSON schema."""
    definitions = tree.get("$defs", {})
    for key in path:
        any_key = tree.get("additionalProperties")  # of a table with keys of any name
        inner = tree.get("items", any_key) if key.isdecimal() else any_key
        tree = tree.get("properties", {}).get(key, inner if isinstance(inner, dict) else {})
        for choice in (tree, *tree.get("anyOf", ())):
            tree = definitions.get(choice.get("$ref", "").rsplit("/", 1)[-1], tree)
    return list(tree.get("properties", {}))


def _shown(value: Any) -> str:
    """A value from a user's file, as it can stand within a line."""
    try:
        return quoted(repr(value))
    except ValueError:  # an integer of more digits than Python prints
        return "a very long number"
    except RecursionError:
        return "a table that is nested too deeply"
