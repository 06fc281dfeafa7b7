"""The values of options and arguments that a shell completes; see `fp8stack --completion`.

Each is a function of the word that was typed so far. Modules with the values are imported when a
shell asks, not for every command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, get_args

if TYPE_CHECKING:
    from fp8stack.common.presets import Kind

Complete = Callable[[str], list[str]]


def values(names: Callable[[], Iterable[str]]) -> Complete:
    """Complete a word, or the last of several words between commas, to one of `names()`."""

    def complete(incomplete: str) -> list[str]:
        words = incomplete[: incomplete.rfind(",") + 1]
        return [words + name for name in names()]

    return complete


def _presets(kind: Kind) -> Iterable[str]:
    from fp8stack.common.presets import names

    return names(kind)


def _gpus() -> Iterable[str]:
    from fp8stack.precision.gpus import GPUS

    return (gpu.name for gpu in GPUS)


def _capabilities() -> Iterable[str]:
    from fp8stack.precision.hardware import CAPABILITIES

    return ("none", *(f"{major}.{minor}" for major, minor in CAPABILITIES))


def _settings() -> Iterable[str]:
    """The keys of a run, of its model and of its recipe, each followed by an equals sign."""
    from fp8stack.model.config import GPTConfig
    from fp8stack.planning.run_config import RunConfig
    from fp8stack.precision import Recipe

    for prefix, schema in (("", RunConfig), ("model.", GPTConfig), ("recipe.", Recipe)):
        yield from (f"{prefix}{key}=" for key in schema.model_fields)


def _export_formats() -> Iterable[str]:
    from fp8stack.trained.export import Format

    return get_args(Format)


def _export_schemes() -> Iterable[str]:
    from fp8stack.trained.export.quantized_weights import SchemeName

    return get_args(SchemeName)


MODELS, RECIPES = values(partial(_presets, "models")), values(partial(_presets, "recipes"))
GPUS, CAPABILITIES, SETTINGS = values(_gpus), values(_capabilities), values(_settings)
EXPORT_FORMATS, EXPORT_SCHEMES = values(_export_formats), values(_export_schemes)
