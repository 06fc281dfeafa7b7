"""The configuration of a run, from flags, a run file, or both, parsed strictly. No torch here."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from fp8stack.common import presets
from fp8stack.common.errors import UserError, quoted, unknown
from fp8stack.common.io import DEEPEST, parse_toml, read_toml
from fp8stack.common.terminal import warn
from fp8stack.data.tokenizer import NAMED
from fp8stack.model.config import GPTConfig
from fp8stack.planning.phases import Override, PhaseConfig, overridden, preset
from fp8stack.precision.recipe_file import RecipeFile

OptimizerName = Literal["adamw", "sgd", "muon", "adamw8bit", "adamwfp8"]
Fraction = Annotated[float, Field(ge=0, le=1)]
LossScaleBound = Annotated[float, Field(ge=2.0**-126, le=2.0**126)]  # its inverse is normal, too


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
    window: Annotated[int, Field(ge=8, le=1024)] = 128
    warmup: Annotated[int, Field(ge=8)] = 32
    """Good steps before a value can count as a spike; at most `window`."""
    deviations: PositiveFloat = 8.0
    loss_factor: Annotated[float, Field(gt=1)] = 1.5
    gradient_factor: Annotated[float, Field(gt=1)] = 10.0
    amax_factor: Annotated[float, Field(gt=1)] = 1000.0
    patience: Annotated[int, Field(ge=1, le=4096)] = 3
    """Bad steps in a row after which skipping them no longer suffices."""
    calm_steps: PositiveInt = 200
    """Good steps in a row after which earlier bad steps no longer count."""
    layer_steps: NonNegativeInt = 500
    """Steps for which a layer that caused bad steps stays out of FP8; 0: until the end."""
    quality: Fraction = 0.01
    """phases: the largest share by which a validation loss may exceed that loss with the same
    weights in fp32. Beyond it, the rest of the run is in fp32. 0: no comparison."""
    overflows: Annotated[int, Field(ge=5)] = 8
    """fp16: overflows in a row after which the run continues in bf16, if the device supports it."""

    @model_validator(mode="after")
    def _fits(self) -> GuardConfig:
        if self.warmup > self.window:
            raise ValueError(f"guard.warmup {self.warmup} is more than guard.window {self.window}.")
        return self


class RunConfig(BaseModel):
    """The complete configuration of a run, saved in its folder as `run.toml`, which repeats it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    model: str = "gpt-nano"
    recipe: str = "auto"
    backend: Literal["auto", "te", "torch", "emulate", "reference"] = "auto"
    strict: bool = False
    device: Literal["auto", "cpu", "cuda", "xpu"] = "auto"
    data: str | None = None
    data_order: Literal["random", "epochs"] = "random"
    """Windows at random positions, or all windows once per epoch, in a new order each epoch."""
    document_mask: bool = False
    """Attention does not cross documents. The data must record where documents end."""
    tokenizer: str | None = None
    """Tokenizer to assume if the data record none: bytes, gpt2, or the path of a tokenizer.json."""
    out: str | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    steps: Annotated[int, Field(ge=1, le=2**31)] = 1200
    batch: Annotated[int, Field(ge=1, le=2**24)] = 8
    """Sequences per step, over all ranks and micro-batches."""
    context: PositiveInt | None = None
    """Tokens per sequence; the model's context if left out."""
    accumulate: PositiveInt = 1
    lr: PositiveFloat = 3e-3
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: NonNegativeInt = 50
    decay_fraction: Fraction = 0.2
    """wsd: the share of the steps in which the learning rate decays."""
    min_lr: Fraction = 0.1
    """The last learning rate, as a share of `lr`."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    adam_eps: PositiveFloat = 1e-8
    clip: Annotated[float, Field(ge=0)] = 1.0
    """The largest global gradient norm, or with clip_mode "value" the largest entry; 0: none."""
    clip_mode: Literal["norm", "value", "adaptive"] = "norm"
    """adaptive: limit the norm to `clip_percentile` of the previous norms, and to `clip`."""
    clip_percentile: Annotated[float, Field(gt=0, lt=100)] = 95.0
    clip_window: Annotated[int, Field(ge=10, le=4096)] = 100
    """adaptive: the number of previous good steps whose norms count."""
    optimizer: OptimizerName = "adamw"
    """muon uses AdamW except for the blocks' matrices. adamw8bit and adamwfp8 need torchao."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """sgd: the momentum factor; 0 is plain gradient descent."""
    loss_scale: PositiveFloat | None = None
    """fp16: a static loss scale; dynamic if left out."""
    first_loss_scale: PositiveFloat = 65536.0
    """fp16: the initial dynamic loss scale."""
    loss_scale_interval: Annotated[int, Field(ge=1, lt=2**31)] = 2000
    """fp16: steps in a row without an overflow after which a dynamic loss scale grows."""
    loss_scale_growth: Annotated[float, Field(gt=1, le=65536)] = 2.0
    """fp16: the factor by which a dynamic loss scale grows."""
    loss_scale_backoff: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """fp16: the factor that an overflow multiplies it by."""
    min_loss_scale: LossScaleBound = 1.0
    max_loss_scale: LossScaleBound = 262144.0
    """fp16: the bounds of the loss scale."""

    log_every: PositiveInt = 1
    eval_every: PositiveInt = 300
    eval_windows: PositiveInt = 256
    """Held-out windows per evaluation."""
    final_eval_windows: PositiveInt | None = None
    """Held-out windows of the evaluation after the last step; `eval_windows` if left out."""
    save_every: PositiveInt = 400
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2
    """The newest valid checkpoints to keep; older ones are removed."""
    keep_every: NonNegativeInt = 0
    """Also keep every checkpoint whose step is a multiple of this; 0: none."""
    checkpoint_async: bool = False
    """Write checkpoints in the background: a step waits only for a copy in host memory."""
    sample_tokens: NonNegativeInt = 256
    sample_prompt: str | None = None
    temperature: PositiveFloat = 0.8
    workers: Annotated[int, Field(ge=0, le=64)] = 0
    """Processes that read data ahead; batches are the same for any number."""
    worker_timeout: Annotated[float, Field(ge=1)] = 60.0
    """Seconds without a batch after which a data worker counts as lost."""
    threads: PositiveInt | None = None
    """CPU threads for torch, at most the number of cores; by default torch's choice."""
    deterministic: bool | None = None
    """GPUs and compiled code: reproducible operations, which are slower. Default on CPUs."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Several ranks: DDP, with a complete model on each rank, or FSDP2, which shards the model."""
    rank_timeout: Annotated[float, Field(ge=1)] = 600.0
    """Seconds without an answer after which a rank counts as lost."""
    activation_checkpointing: Literal["none", "selective", "block"] = "none"
    """The backward pass recomputes all but GEMMs and attention (selective), or blocks (block)."""
    grad_compression: Literal["none", "bf16"] = "none"
    """ddp: the format that gradients are rounded to before the all-reduce."""
    compile: bool | None = None
    """torch.compile: the first step takes about a minute, others less time. Default on GPUs."""
    compile_mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """compile: the mode of torch.compile; only modes without CUDA graphs."""
    check_memory: bool = True
    """Refuse a run whose estimated memory exceeds the free memory."""
    profile: bool = False
    """Profile some steps after warm-up into the run folder."""
    profile_step: PositiveInt | None = None
    """profile: the first profiled step; the fifth of this start if left out."""
    profile_steps: Annotated[int, Field(ge=1, le=100)] = 1
    """profile: the number of consecutive steps."""
    profile_shapes: bool = False
    """profile: record the shapes of operands, and list operators by shape."""
    profile_memory: bool = False
    """profile: list the memory that operators allocate on a GPU; on a CPU it is always listed."""
    tensorboard: bool = False
    wandb: bool = False
    trackio: bool = False
    telemetry_every: NonNegativeInt = 50
    """Steps between telemetry samples of the quantization of each operand; 0: no samples."""
    what_if: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Recipes that telemetry tries on the same operands, without changing the run."""
    init_from: str | None = None
    """A run or checkpoint whose weights the run begins with."""
    phases: Annotated[tuple[PhaseConfig, ...], Field(strict=False)] = ()
    """The recipe of each phase of the run, and the recipe of its validation losses."""
    guard: GuardConfig = GuardConfig()
    model_overrides: dict[str, Override] = {}
    recipe_overrides: dict[str, Override] = {}

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
            return names
        return [name for word in names.split(",") if (name := word.strip())]

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
    "debug_steps": (0, "metrics.jsonl has the values of each step with log_every = 1"),
}
"""Keys that earlier runs have, with their default and what serves instead. They are ignored."""


@lru_cache(maxsize=64)
def _tell_removed(key: str, is_default: bool) -> None:
    instead = "" if is_default else f": {REMOVED_KEYS[key][1]}"
    warn(f"{key} no longer exists and is ignored{instead}.")


TRACKERS = ("tensorboard", "wandb", "trackio")
"""Keys that start an experiment tracker."""
FREE_ON_RESUME = frozenset(
    {
        *("model", "model_overrides", "recipe", "recipe_overrides", "data", "backend", "strict"),
        *("device", "deterministic", "out", "steps", "workers", "compile"),
        *("accumulate", "worker_timeout"),
        *("compile_mode", "check_memory", "profile", "profile_step", "profile_steps"),
        *("profile_shapes", "profile_memory", "parallel", "rank_timeout", "threads"),
        *("activation_checkpointing", "log_every", "eval_every", "eval_windows"),
        *(
            "final_eval_windows",
            "save_every",
            "keep_checkpoints",
            "keep_every",
            "checkpoint_async",
            "sample_tokens",
        ),
        *("sample_prompt", "temperature", "tokenizer", *TRACKERS),
        *("telemetry_every", "what_if", "guard"),
    }
)
"""Keys that a resumed run may change: keys that do not affect its numbers; the device, the backend
and `accumulate`, so that it can resume on other machines; and `steps`. The files of the model, the
recipe and the data may have moved; their contents are compared."""
FREE_IN_BRANCH = frozenset({"phases", "lr", "min_lr", "schedule", "warmup_steps", "decay_fraction"})
"""More keys that a branch may change: a new run that begins with a checkpoint of another. Its
recipe may be another one, too."""

PRESET_KEYS = frozenset(
    {
        *("batch", "accumulate", "lr", "schedule", "warmup_steps", "min_lr", "weight_decay"),
        *("beta1", "beta2", "adam_eps", "clip"),
    }
)
"""Keys that the training preset of a model may set."""


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
