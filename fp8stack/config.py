"""What a run is made of: flags, a run file, or both, parsed strictly. No torch here."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
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

from fp8stack import presets
from fp8stack.errors import UserError, quoted, unknown
from fp8stack.io import DEEPEST, parse_toml, read_toml
from fp8stack.model.config import GPTConfig
from fp8stack.precision.phases import Override, PhaseConfig, overridden, preset
from fp8stack.precision.recipe import RecipeFile
from fp8stack.tokenizer import NAMED

OptimizerName = Literal["adamw", "sgd", "muon", "adamw8bit", "adamwfp8"]
Fraction = Annotated[float, Field(ge=0, le=1)]
LossScaleBound = Annotated[float, Field(ge=2.0**-126, le=2.0**126)]  # its inverse is normal, too


class GuardConfig(BaseModel):
    """When a step counts as bad, and what is done when bad steps repeat.

    A step is bad if its loss, gradient norm or, in delayed scaling, the amax of an operand is not
    finite, or spikes: lies more than `deviations` robust standard deviations above the median of
    the last `window` good steps, and above `..._factor` times that median.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    enabled: bool = True
    """Without it, the first loss or gradient that is not finite ends the run."""
    window: Annotated[int, Field(ge=8, le=1024)] = 128
    warmup: Annotated[int, Field(ge=8)] = 32
    """Good steps before the first that can count as a spike; at most the window."""
    deviations: PositiveFloat = 8.0
    loss_factor: Annotated[float, Field(gt=1)] = 1.5
    gradient_factor: Annotated[float, Field(gt=1)] = 10.0
    amax_factor: Annotated[float, Field(gt=1)] = 1000.0
    patience: PositiveInt = 3
    """Bad steps in a row that call for more than skipping them."""
    calm_steps: PositiveInt = 200
    """Steps without trouble after which past trouble is forgotten."""
    layer_steps: NonNegativeInt = 500
    """Steps for which a layer that caused trouble stays out of FP8; 0 is for good."""
    quality: Fraction = 0.01
    """phases: by how much, as a share, a validation loss may be above that of the same weights in
    fp32; beyond it, the rest of the run is in fp32. 0: it is not compared."""
    overflows: Annotated[int, Field(ge=5)] = 8
    """fp16: overflows in a row after which the run goes on in bf16, where there is any."""

    @model_validator(mode="after")
    def _fits(self) -> GuardConfig:
        if self.warmup > self.window:
            raise ValueError(f"guard.warmup {self.warmup} is more than guard.window {self.window}.")
        return self


class RunConfig(BaseModel):
    """A run, whole: saved as `run.toml` with it, and enough to do it again."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    model: str = "gpt-nano"
    recipe: str = "auto"
    backend: Literal["auto", "te", "torch", "emulate", "reference"] = "auto"
    strict: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    data: str | None = None
    data_order: Literal["random", "epochs"] = "random"
    """Windows at random places, or all of them once an epoch, shuffled anew each time."""
    document_mask: bool = False
    """Attention does not cross documents; the data must say where they end."""
    tokenizer: str | None = None
    """Tokenizer to assume if the data record none: bytes, gpt2, or the path of a tokenizer.json."""
    out: str | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    steps: Annotated[int, Field(ge=1, le=2**31)] = 1200
    batch: Annotated[int, Field(ge=1, le=2**24)] = 8
    """Sequences per step, over all ranks and micro-batches."""
    context: PositiveInt | None = None
    """Tokens per sequence; the model's own if left out."""
    accumulate: PositiveInt = 1
    lr: PositiveFloat = 3e-3
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: NonNegativeInt = 50
    decay_fraction: Fraction = 0.2
    """wsd: the share of the steps over which the learning rate falls."""
    min_lr: Fraction = 0.1
    """The last learning rate, as a share of `lr`."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    adam_eps: PositiveFloat = 1e-8
    clip: Annotated[float, Field(ge=0)] = 1.0
    """The largest global gradient norm, or with clip_mode "value" the largest entry; 0: none."""
    clip_mode: Literal["norm", "value", "adaptive"] = "norm"
    """What is bounded; adaptive: the norm, by `clip_percentile` of those before, and by `clip`."""
    clip_percentile: Annotated[float, Field(gt=0, lt=100)] = 95.0
    clip_window: Annotated[int, Field(ge=10, le=4096)] = 100
    """adaptive: the good steps whose norms count."""
    optimizer: OptimizerName = "adamw"
    """muon optimizes the blocks' matrices, AdamW the rest; adamw8bit and adamwfp8 need torchao."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """sgd: the share of the last update that is kept; 0 for plain gradient descent."""
    loss_scale: PositiveFloat | None = None
    """fp16: a static loss scale; dynamic if left out."""
    first_loss_scale: PositiveFloat = 65536.0
    """fp16: the initial dynamic loss scale."""
    loss_scale_interval: Annotated[int, Field(ge=1, lt=2**31)] = 2000
    """fp16: steps in a row without an overflow after which a dynamic loss scale grows."""
    loss_scale_growth: Annotated[float, Field(gt=1, le=65536)] = 2.0
    """fp16: the factor by which it grows."""
    loss_scale_backoff: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """fp16: the factor that an overflow multiplies it by."""
    min_loss_scale: LossScaleBound = 1.0
    max_loss_scale: LossScaleBound = 262144.0
    """fp16: the range that every loss scale stays in."""

    log_every: PositiveInt = 1
    eval_every: PositiveInt = 200
    eval_windows: PositiveInt = 256
    """Windows of the held-out part per evaluation."""
    save_every: PositiveInt = 400
    keep_checkpoints: Annotated[int, Field(ge=2)] = 2
    """The newest valid checkpoints to keep; older ones are removed."""
    keep_every: NonNegativeInt = 0
    """Keep checkpoints of steps that are multiples of it for good; 0: none."""
    checkpoint_async: bool = False
    """Write checkpoints in the background: a step waits only for a copy in host memory."""
    sample_tokens: NonNegativeInt = 256
    sample_prompt: str | None = None
    temperature: PositiveFloat = 0.8
    workers: Annotated[int, Field(ge=0, le=64)] = 0
    """Processes that read data ahead; batches are the same for any number."""
    worker_timeout: Annotated[float, Field(ge=1)] = 60.0
    """Seconds after which data workers that give no batch count as lost."""
    threads: PositiveInt | None = None
    """CPU threads for torch, at most the cores; torch's own choice if left out."""
    deterministic: bool | None = None
    """GPUs and compiled code: operations that repeat to the bit; slower. By default on CPUs."""
    save_fp8: bool = False
    """emulate: keep x and w for the backward pass as FP8 bytes. Less memory, more time."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Several ranks: DDP, a whole model on each, or FSDP2, which shards it."""
    rank_timeout: Annotated[float, Field(ge=1)] = 600.0
    """Seconds after which a rank that does not answer counts as lost."""
    activation_checkpointing: Literal["none", "selective", "block"] = "none"
    """What the backward pass recomputes: all but GEMMs and attention, or whole blocks."""
    grad_compression: Literal["none", "bf16"] = "none"
    """ddp: what gradients are rounded to before ranks add them up."""
    debug_steps: NonNegativeInt = 0
    """Number of steps after each start that log what they do, event by event."""
    compile: bool | None = None
    """torch.compile: the first step takes a minute or so, the others less. By default on GPUs."""
    compile_mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """compile: the mode of torch.compile, of those that record no CUDA graphs."""
    check_memory: bool = True
    """Refuse a run that by its estimate cannot fit into the memory that is left."""
    profile: bool = False
    """Profile some steps after warm-up into the run folder."""
    profile_step: PositiveInt | None = None
    """profile: the first step profiled; the fifth of this start if left out."""
    profile_steps: Annotated[int, Field(ge=1, le=100)] = 1
    """profile: how many steps in a row."""
    profile_shapes: bool = False
    """profile: record the shapes of operands, and list operators by them."""
    profile_memory: bool = False
    """profile: list what operators allocate on a GPU; on a CPU they are always listed."""
    tensorboard: bool = False
    wandb: bool = False
    trackio: bool = False
    telemetry_every: NonNegativeInt = 50
    """Steps between samples of what FP8 does to each operand; 0 for none."""
    what_if: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Recipes that telemetry tries on the same operands, without changing the run."""
    init_from: str | None = None
    """A run or checkpoint whose weights the run begins with."""
    phases: Annotated[tuple[PhaseConfig, ...], Field(strict=False)] = ()
    """Which recipe runs when, and in which one validation losses are computed."""
    calibration_steps: Annotated[int, Field(ge=0, le=4096)] = 16
    """phases: steps before delayed scaling begins in which its amaxes are already recorded."""
    guard: GuardConfig = GuardConfig()
    model_overrides: dict[str, Override] = {}
    recipe_overrides: dict[str, Override] = {}

    @field_validator("phases", mode="before")
    @classmethod
    def _named(cls, phases: object) -> object:
        return preset(phases) if isinstance(phases, str) else phases

    @field_validator("what_if", mode="before")
    @classmethod
    def _listed(cls, names: object) -> object:
        if not isinstance(names, str):
            return names
        return [word for part in names.split(",") if (word := part.strip())]

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
    def given(self) -> dict[str, Any]:
        """The keys that were set, by flag or file, with their values."""
        return self.model_dump(exclude_unset=True)


TRACKERS = ("tensorboard", "wandb", "trackio")
"""Keys that start an experiment tracker."""
FREE_ON_RESUME = frozenset(
    {
        *("model", "model_overrides", "recipe", "recipe_overrides", "data", "backend", "strict"),
        *("device", "deterministic", "out", "steps", "workers", "save_fp8", "compile"),
        "worker_timeout",
        *("compile_mode", "check_memory", "profile", "profile_step", "profile_steps"),
        *("profile_shapes", "profile_memory", "parallel", "rank_timeout", "threads"),
        *("activation_checkpointing", "debug_steps", "log_every", "eval_every", "eval_windows"),
        *("save_every", "keep_checkpoints", "keep_every", "checkpoint_async", "sample_tokens"),
        *("sample_prompt", "temperature", "tokenizer", *TRACKERS),
        *("telemetry_every", "what_if", "guard"),
    }
)
"""What a resumed run may change: keys that leave its numbers alone, the device and the backend
(another one sums in another order), and a longer `steps`. The model, the recipe and the data may
have moved; it is their contents that are compared."""

PRESET_KEYS = frozenset(
    {
        *("batch", "accumulate", "lr", "schedule", "warmup_steps", "min_lr", "weight_decay"),
        *("beta1", "beta2", "adam_eps", "clip"),
    }
)
"""What the training preset of a model may set."""


def parse_config(file: str | None, flags: Mapping[str, Any], sets: Sequence[str] = ()) -> RunConfig:
    """The configuration from the model's training preset, a run file, `--set key=value` and flags;
    the later one wins.

    Raises:
        UserError: an unknown key, a wrong value, a `--set` that is not key=value.
    """
    if file == "":
        raise UserError("--config is empty. Give a run file, or leave it out.")
    table = at_home(read_toml(Path(file)), Path(file).parent) if file else {}
    own = table.get("phases")
    where = f"run file '{file}'" if file else "flags"
    # The file is checked alone first, so that an error names where the key stands.
    _require_run_keys(table, where, file)
    presets.parse(RunConfig, table, where)
    for item in sets:
        _set(table, item)
    if sets:  # before a flag of the same name hides what is wrong
        _require_run_keys(table, "flags")
        presets.parse(RunConfig, table, "flags")
    for key, value in flags.items():
        if isinstance(value, dict):  # of a table's keys, those that were given
            table[key] = {**old, **value} if isinstance(old := table.get(key, {}), dict) else old
        elif value is not None:
            table[key] = value
    filled = preset_for(table)
    table = filled | table
    config: RunConfig = presets.parse(RunConfig, table, where if not (flags or sets) else "flags")
    config.model_fields_set.difference_update(filled)  # nobody gave them
    if isinstance(own, list) and isinstance(table["phases"], str):  # a preset, and what it changes
        by = presets.parse(RunConfig, {"phases": own}, where).phases
        config = config.model_copy(update={"phases": overridden(config.phases, by)})
    return config


def with_files(config: RunConfig, change: Callable[[str], str]) -> RunConfig:
    """`config` with the path of each model, recipe and tokenizer file as `change` has it."""
    table = config.model_dump(include={"model", "recipe", "tokenizer", "phases", "what_if"})
    changed = _changed_files(table, change)
    if "phases" in changed:
        changed["phases"] = tuple(PhaseConfig(**phase) for phase in changed["phases"])
    return config.model_copy(update=changed)


def at_home(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The keys of a run with the paths of files that are relative to `folder` and lie there, as a
    run keeps its own, as whole paths."""

    def found(path: str) -> str:
        try:
            inside = not os.path.isabs(path) and (folder / path).is_file()
        except (OSError, ValueError):  # too long, or it holds a NUL
            return path
        return os.path.abspath(folder / path) if inside else path

    return table | _changed_files(table, found)


def _changed_files(table: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """The keys of `table` whose files `change` calls otherwise, with those names."""

    def of(value: Any, ending: str = ".toml") -> Any:
        return change(value) if isinstance(value, str) and value.endswith(ending) else value

    found = {key: of(table[key]) for key in ("model", "recipe") if key in table}
    if table.get("tokenizer") not in (None, *NAMED):
        found["tokenizer"] = of(table["tokenizer"], "")
    if isinstance(tried := table.get("what_if"), list | tuple):
        found["what_if"] = type(tried)(of(name) for name in tried)
    changed = {key: value for key, value in found.items() if value != table[key]}
    phases = table.get("phases")
    if isinstance(phases, list | tuple) and any(isinstance(phase, dict) for phase in phases):
        named = [
            phase | {"recipe": of(phase["recipe"])} if isinstance(phase, dict) and "recipe" in phase
            else phase
            for phase in phases
        ]  # fmt: skip
        if named != list(phases):
            changed["phases"] = named
    return changed


def preset_for(table: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that a run with the keys of `table` leaves to the training preset of its model, with
    their values. Its warm-up takes a tenth of the steps at most.

    Raises:
        UserError: see `training_preset`.
    """
    if table.keys() >= PRESET_KEYS:
        return {}
    model = table.get("model", RunConfig.model_fields["model"].default)
    preset = training_preset(model) if isinstance(model, str) else {}
    left = {key: preset[key] for key in preset.keys() & PRESET_KEYS - table.keys()}
    if "batch" in table:  # whose micro-batches those are not
        left.pop("accumulate", None)
    steps = table.get("steps", RunConfig.model_fields["steps"].default)
    if "warmup_steps" in left and isinstance(steps, int):
        left["warmup_steps"] = min(left["warmup_steps"], steps // 10)
    return left


def training_preset(model: str) -> dict[str, Any]:
    """The table `[training]` of a model's file: keys of a run, and the `source` of their values;
    empty if it has none. `tokenizer` is the one that texts are read with.

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
    """What a run has of its model's training preset, in a line; None if nothing."""
    preset = training_preset(config.model)
    keys = [key for key in RunConfig.model_fields if key in PRESET_KEYS & preset.keys()]
    told = [f"{key} {getattr(config, key)}" for key in keys if key not in config.given]
    source = f" ({preset['source']})" if "source" in preset else ""
    begin = f"training preset of {config.model}{source}"
    return f"{begin}: {', '.join(told)}; --batch and the like change it" if told else None


def for_ranks(config: RunConfig, ranks: int) -> RunConfig:
    """`config` with the preset's micro-batches shared out, whose size stays, where it can."""
    if "accumulate" in config.given:
        return config
    share = config.accumulate // math.gcd(config.accumulate, ranks)
    shared = config.model_copy(update={"accumulate": share})
    shared.model_fields_set.discard("accumulate")
    return shared


def _require_run_keys(table: Mapping[str, Any], where: str, file: str | None = None) -> None:
    """See that no key is a model's or a recipe's. `file` is where the table is from.

    Raises:
        UserError: one is; the message says where it belongs.
    """
    for key in table:
        owner = owner_of(key)
        if owner in (None, "run"):
            continue
        if file is not None and {"width", "like", "quantizer"} & table.keys():
            raise UserError(f"{where}: this is a {owner} file. Give it as --{owner} {file}.")
        raise UserError(f"{where}: '{key}' is a key of the {owner}. Give --set {owner}.{key}=VALUE")


def owner_of(key: str) -> str | None:
    """What has a key of that name: "run", "model" or "recipe"; None if nothing has."""
    if key in RunConfig.model_fields:
        return "run"
    if key in GPTConfig.model_fields:
        return "model"
    return "recipe" if key in RecipeFile.model_fields else None


def _set(table: dict[str, Any], item: str) -> None:
    """Apply one `key=value`: `lr=0.001`, `model.layers=2`; a bare word is a string."""
    key, equals, text = item.partition("=")
    shown = f"--set '{quoted(item)}'"
    if not equals or not key:
        raise UserError(f"{shown} is not key=value. Example: --set lr=0.001")
    try:
        parsed = parse_toml(f"value = {text}", "--set")
    except UserError:  # a bare word
        parsed = {"value": text}
    if len(parsed) > 1:
        raise UserError(f"{shown} sets more than one key. Give each its own --set.")
    value = parsed["value"]
    *outer, last = key.split(".")
    if len(outer) >= DEEPEST:
        raise UserError(f"{shown} is nested too deeply: a key has more than {DEEPEST} parts.")
    if outer and outer[0] in ("model", "recipe"):  # which are names themselves
        outer[0] += "_overrides"
    for part in outer:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise UserError(f"{shown}: '{quoted(part)}' is not a table.")
        table = inner
    table[last] = value


def to_toml(config: RunConfig) -> str:
    """The configuration as the text of a run file; keys without a value are left out."""
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
    """The lines of a TOML table; keys without a value, and empty tables, are left out."""
    return [f"{key} = {_literal(value)}" for key, value in table.items() if value not in (None, {})]


def _literal(value: Any) -> str:
    """One TOML value; TOML's strings, numbers and booleans read as JSON's, DEL apart."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(toml_lines(value))} }}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def percent(flag: str, text: str, example: str, least: float = 1e-9) -> float:
    """A share in percent that was given to `flag`, as "0.15%" or "0.15". Raises a UserError if it
    is none, less than `least` or above 100."""
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = math.nan
    if not least <= value <= 100:
        raise UserError(
            f"{flag} '{quoted(text)}' is no share in percent. Example: {flag} {example}"
        )
    return value
