"""The configuration of a run, from flags, a run file, or both, parsed strictly. No torch here."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fp8stack.common import presets
from fp8stack.common.errors import UserError, quoted, unknown
from fp8stack.common.io import DEEPEST, parse_toml, read_toml
from fp8stack.common.terminal import warn
from fp8stack.data.tokenizer import NAMED
from fp8stack.model.config import GPTConfig
from fp8stack.planning.phases import Override, PhaseConfig, overridden, preset
from fp8stack.planning.run_keys import (
    BRANCH,
    PRESET,
    RESUME,
    TRACKER,
    Fraction,
    Limits,
    Mark,
    NotNegative,
    Positive,
    PositiveFloat,
    RunKeys,
)
from fp8stack.precision.recipe_file import RecipeFile


class GuardConfig(BaseModel):
    """The conditions under which a step is bad, and the reaction to repeated bad steps.

    A step is bad if its loss, its gradient norm or, in delayed scaling, the amax of an operand is
    not finite or spikes. A value spikes if it lies more than `deviations` robust standard
    deviations above the median of the last `window` good steps, and above `..._factor` times this
    median.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    enabled: bool = True
    """If disabled, the first loss or gradient that is not finite ends the run."""
    window: Annotated[int, Limits(ge=8, le=1024)] = 128
    warmup: Annotated[int, Limits(ge=8)] = 32
    """Good steps before a value can count as a spike; at most `window`."""
    deviations: PositiveFloat = 8.0
    loss_factor: Annotated[float, Limits(gt=1)] = 1.5
    gradient_factor: Annotated[float, Limits(gt=1)] = 10.0
    amax_factor: Annotated[float, Limits(gt=1)] = 1000.0
    patience: Annotated[int, Limits(ge=1, le=4096)] = 3
    """Bad steps in a row after which skipping them no longer suffices."""
    calm_steps: Positive = 200
    """Good steps in a row after which earlier bad steps no longer count."""
    layer_steps: NotNegative = 500
    """Steps for which a layer that caused bad steps stays out of FP8; 0: until the end."""
    quality: Fraction = 0.01
    """phases: the largest share by which a validation loss may exceed that loss with the same
    weights in fp32. Beyond it, the rest of the run is in fp32. 0: no comparison."""
    overflows: Annotated[int, Limits(ge=5)] = 8
    """fp16: overflows in a row after which the run continues in bf16, if the device supports it."""

    @model_validator(mode="after")
    def _fits(self) -> GuardConfig:
        if self.warmup > self.window:
            raise ValueError(f"guard.warmup {self.warmup} is more than guard.window {self.window}.")
        return self


class RunConfig(RunKeys, BaseModel):
    """The complete configuration of a run, saved in its folder as `run.toml`, which repeats it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    phases: Annotated[tuple[PhaseConfig, ...], Field(strict=False), BRANCH] = ()
    """The recipe of each phase of the run, and the recipe of its validation losses."""
    guard: Annotated[GuardConfig, RESUME] = GuardConfig()
    model_overrides: Annotated[dict[str, Override], RESUME] = {}
    recipe_overrides: Annotated[dict[str, Override], RESUME] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_removed_keys(cls, table: object) -> object:
        if not isinstance(table, dict):
            return table
        for key in sorted(REMOVED_KEYS.keys() & table.keys()):
            _tell_removed(key, table[key] == REMOVED_KEYS[key][0])
        return {key: value for key, value in table.items() if key not in REMOVED_KEYS}

    @field_validator("phases", mode="before")
    @classmethod
    def _named(cls, phases: object) -> object:
        return preset(phases) if isinstance(phases, str) else phases

    @field_validator("what_if", mode="before")
    @classmethod
    def _listed(cls, names: object) -> object:
        if not isinstance(names, str):
            return tuple(names) if isinstance(names, list) else names
        return tuple(name for word in names.split(",") if (name := word.strip()))

    @model_validator(mode="after")
    def _fits(self) -> RunConfig:
        if self.batch % self.accumulate:
            raise ValueError(
                f"batch {self.batch} is not divisible by accumulate {self.accumulate}. "
                "Choose a batch that is a multiple of it."
            )
        if self.keep_every % self.save_every:
            raise ValueError(
                f"keep_every {self.keep_every} is no multiple of save_every {self.save_every}: "
                "no such steps are saved. Choose a multiple."
            )
        if self.what_if and not self.telemetry_every:
            raise ValueError("what_if needs telemetry: set telemetry_every to 1 or more.")
        if self.profile and (self.profile_step or 0) > self.steps:
            raise ValueError(
                f"profile_step {self.profile_step} is after the last step, {self.steps}. "
                "Choose an earlier one."
            )
        for key, value in self:
            try:
                str(value).encode()
            except UnicodeEncodeError:
                raise ValueError(f"{key} is not valid UTF-8. Use another name.") from None
            if "\0" in str(value):
                raise ValueError(f"{key} holds a NUL character. Use another name.")
        for key in ("data", "init_from", "out", "tokenizer"):
            if getattr(self, key) == "":
                raise ValueError(f"{key} is empty. Give a path, or leave it out.")
        return self

    @property
    def last_eval_windows(self) -> int:
        """The number of windows of the evaluation after the last step."""
        return self.final_eval_windows or self.eval_windows

    @property
    def given(self) -> dict[str, Any]:
        """The keys that were set by a flag or file, with their values."""
        return self.model_dump(exclude_unset=True)


REMOVED_KEYS: dict[str, tuple[Any, str]] = {
    "save_fp8": (False, "--activation-checkpointing selective saves more memory"),
    "calibration_steps": (
        16,
        "a phase in delayed scaling is calibrated by its first step",
    ),
    "debug_steps": (0, "metrics.jsonl has the values of each step"),
}
"""Keys that earlier runs have, with their default and what serves instead. They are ignored."""


@lru_cache(maxsize=64)
def _tell_removed(key: str, is_default: bool) -> None:
    instead = "" if is_default else f": {REMOVED_KEYS[key][1]}"
    warn(f"{key} no longer exists and is ignored{instead}.")


def marked(mark: Mark) -> frozenset[str]:
    """The keys of a run that have `mark`."""
    fields = RunConfig.model_fields.items()
    return frozenset(key for key, field in fields if mark in field.metadata)


FREE_ON_RESUME, FREE_IN_BRANCH = marked(RESUME), marked(BRANCH)
TRACKERS, PRESET_KEYS = sorted(marked(TRACKER)), marked(PRESET)


def parse_config(file: str | None, flags: Mapping[str, Any], sets: Sequence[str] = ()) -> RunConfig:
    """The configuration from the model's training preset, a run file, `--set key=value` and flags.
    Later sources override earlier ones.

    Raises:
        UserError: an unknown key, a wrong value, a `--set` that is not key=value.
    """
    if file == "":
        raise UserError("--config is empty. Give a run file, or leave it out.")
    table = at_home(read_toml(Path(file)), Path(file).parent) if file else {}
    file_phases = table.get("phases")
    where = f"run file '{file}'" if file else "flags"
    # Check the file alone first, so that an error names it as the place of the key.
    _require_run_keys(table, where, file)
    presets.parse(RunConfig, table, where)
    for item in sets:
        _set(table, item)
    if sets:  # before a flag of the same name hides a wrong value
        _require_run_keys(table, "flags")
        presets.parse(RunConfig, table, "flags")
    _require_run_keys(flags, "flags")
    for key, value in flags.items():
        if isinstance(value, dict):  # the given keys of a table
            before = table.get(key, {})
            table[key] = merged(before, value) if isinstance(before, dict) else before
        elif value is not None:
            table[key] = value
    filled = preset_for(table)
    table = filled | table
    config: RunConfig = presets.parse(RunConfig, table, where if not (flags or sets) else "flags")
    config.model_fields_set.difference_update(filled)  # not given by the user
    if isinstance(file_phases, list) and isinstance(table["phases"], str):
        # A flag names a preset of phases, and the file changes some of their keys.
        changes = presets.parse(RunConfig, {"phases": file_phases}, where).phases
        config = config.model_copy(update={"phases": overridden(config.phases, changes)})
    return config


def merged(table: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`table` with the keys of `more` over its own, in tables within tables too."""
    result = dict(table)
    for key, value in more.items():
        before = result.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            value = merged(before, value)
        result[key] = value
    return result


def with_files(config: RunConfig, change: Callable[[str], str]) -> RunConfig:
    """`config` with `change` applied to the path of each model, recipe and tokenizer file."""
    table = config.model_dump(include={"model", "recipe", "tokenizer", "phases", "what_if"})
    changed = _changed_files(table, change)
    if "phases" in changed:
        changed["phases"] = tuple(PhaseConfig(**phase) for phase in changed["phases"])
    return config.model_copy(update=changed)


def at_home(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The keys of a run with absolute paths for files that exist relative to `folder`, such as the
    files that a run keeps in its folder."""

    def absolute(path: str) -> str:
        try:
            inside = not os.path.isabs(path) and (folder / path).is_file()
        except (OSError, ValueError):  # too long, or contains NUL
            return path
        return os.path.abspath(folder / path) if inside else path

    return table | _changed_files(table, absolute)


def _changed_files(table: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """The keys of `table` whose files get another name by `change`, with the new names."""

    def renamed(value: Any, ending: str = ".toml") -> Any:
        return change(value) if isinstance(value, str) and value.endswith(ending) else value

    new_names = {key: renamed(table[key]) for key in ("model", "recipe") if key in table}
    if table.get("tokenizer") not in (None, *NAMED):
        new_names["tokenizer"] = renamed(table["tokenizer"], "")
    if isinstance(names := table.get("what_if"), list | tuple):
        new_names["what_if"] = type(names)(renamed(name) for name in names)
    changed = {key: value for key, value in new_names.items() if value != table[key]}
    phases = table.get("phases")
    if isinstance(phases, list | tuple) and any(isinstance(phase, dict) for phase in phases):
        new_phases = [
            phase | {"recipe": renamed(phase["recipe"])}
            if isinstance(phase, dict) and "recipe" in phase
            else phase
            for phase in phases
        ]  # fmt: skip
        if new_phases != list(phases):
            changed["phases"] = new_phases
    return changed


def preset_for(table: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the model's training preset that `table` does not set, with their values. The
    warm-up is limited to a tenth of the steps.

    Raises:
        UserError: see `training_preset`.
    """
    if table.keys() >= PRESET_KEYS:
        return {}
    model = table.get("model", RunConfig.model_fields["model"].default)
    preset = training_preset(model) if isinstance(model, str) else {}
    defaults = {key: preset[key] for key in preset.keys() & PRESET_KEYS - table.keys()}
    if "batch" in table:  # the preset's accumulate belongs to its own batch
        defaults.pop("accumulate", None)
    steps = table.get("steps", RunConfig.model_fields["steps"].default)
    if "warmup_steps" in defaults and isinstance(steps, int):
        defaults["warmup_steps"] = min(defaults["warmup_steps"], steps // 10)
    return defaults


def training_preset(model: str) -> dict[str, Any]:
    """The table `[training]` of a model's file, empty if it has none: keys of a run, the `source`
    of their values, and the `tokenizer` for texts.

    Raises:
        UserError: no such model or file, an unknown key or a wrong value.
    """
    stem, table = presets.read("models", model)
    preset = table.get("training", {})
    where = f"model '{stem}': training"
    if not isinstance(preset, dict):
        raise UserError(f"{where} is no table. Write [training] and its keys below.")
    for key in preset:
        if key not in PRESET_KEYS | {"source", "tokenizer"}:
            raise unknown(f"key of {where}", key, PRESET_KEYS | {"source", "tokenizer"})
    presets.parse(RunConfig, {k: v for k, v in preset.items() if k != "source"}, where)
    return preset


def preset_note(config: RunConfig) -> str | None:
    """A line on the settings that come from the model's training preset; None if there are none."""
    preset = training_preset(config.model)
    keys = [key for key in RunConfig.model_fields if key in PRESET_KEYS & preset.keys()]
    settings = [f"{key} {getattr(config, key)}" for key in keys if key not in config.given]
    source = f" ({preset['source']})" if "source" in preset else ""
    begin = f"training preset of {config.model}{source}"
    return f"{begin}: {', '.join(settings)}; --batch and the like change it" if settings else None


def for_ranks(config: RunConfig, ranks: int) -> RunConfig:
    """`config` with the preset's micro-batches divided among ranks, if their size can stay."""
    if "accumulate" in config.given:
        return config
    share = config.accumulate // math.gcd(config.accumulate, ranks)
    shared = config.model_copy(update={"accumulate": share})
    shared.model_fields_set.discard("accumulate")
    return shared


def _require_run_keys(table: Mapping[str, Any], where: str, file: str | None = None) -> None:
    """Check that `table`, from `file`, has no key of a model or a recipe.

    Raises:
        UserError: it has one. The message says where the key belongs.
    """
    for key in table:
        owner = owner_of(key)
        if owner in (None, "run"):
            continue
        if file is not None and {"width", "like", "quantizer"} & table.keys():
            raise UserError(f"{where}: this is a {owner} file. Give it as --{owner} {file}.")
        raise UserError(f"{where}: '{key}' is a key of the {owner}. Give --set {owner}.{key}=VALUE")


def owner_of(key: str) -> str | None:
    """The owner of a key: "run", "model" or "recipe"; None if no such key exists."""
    if key in RunConfig.model_fields:
        return "run"
    if key in GPTConfig.model_fields:
        return "model"
    return "recipe" if key in RecipeFile.model_fields else None


def _set(table: dict[str, Any], item: str) -> None:
    """Apply `key=value` to `table`: `lr=0.001`, `model.layers=2`. A bare word is a string."""
    key, equals, text = item.partition("=")
    option = f"--set '{quoted(item)}'"
    if not equals or not key:
        raise UserError(f"{option} is not key=value. Example: --set lr=0.001")
    try:
        parsed = parse_toml(f"value = {text}", "--set")
    except UserError:  # a bare word
        parsed = {"value": text}
    if len(parsed) > 1:
        raise UserError(f"{option} sets more than one key. Give each its own --set.")
    value = parsed["value"]
    *outer, last = key.split(".")
    if len(outer) >= DEEPEST:
        raise UserError(f"{option} is nested too deeply: a key has more than {DEEPEST} parts.")
    if outer and outer[0] in ("model", "recipe"):  # whose key without a dot is a name
        outer[0] += "_overrides"
    for name in outer:
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            raise UserError(f"{option}: '{quoted(name)}' is not a table.")
        table = inner
    table[last] = value


def to_toml(config: RunConfig) -> str:
    """The configuration as the text of a run file, without keys that have no value."""
    lines: list[str] = []
    tables: list[str] = []
    for key, value in config.model_dump().items():
        if isinstance(value, dict):
            if value:
                tables += ["", f"[{key}]", *toml_lines(value)]
        elif isinstance(value, tuple) and any(isinstance(item, dict) for item in value):
            for item in value:
                tables += ["", f"[[{key}]]", *toml_lines(item)]
        elif value is not None:
            lines.append(f"{key} = {_literal(value)}")
    return "\n".join(lines + tables) + "\n"


def toml_lines(table: Mapping[str, Any]) -> list[str]:
    """The lines of a TOML table, without keys that have no value and empty tables."""
    return [f"{key} = {_literal(value)}" for key, value in table.items() if value not in (None, {})]


def _literal(value: Any) -> str:
    """A value in TOML, whose strings, numbers and booleans are written as in JSON, except DEL."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(toml_lines(value))} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_literal, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def percent(flag: str, text: str, example: str, least: float = 1e-9) -> float:
    """Parse the percentage that was given to `flag`: "0.15%" or "0.15". Raises a UserError if it is
    not a number, below `least` or above 100."""
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = math.nan
    if not least <= value <= 100:
        raise UserError(
            f"{flag} '{quoted(text)}' is no share in percent. Example: {flag} {example}"
        )
    return value
