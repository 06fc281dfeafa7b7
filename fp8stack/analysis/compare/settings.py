"""The settings of a comparison, validated before training."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, NonNegativeInt

from fp8stack.analysis.compare.gaps import Judging
from fp8stack.common import presets
from fp8stack.common.errors import UserError, quoted
from fp8stack.common.io import absolute_path, read_json
from fp8stack.common.presets import recipe_words
from fp8stack.common.tables import counted
from fp8stack.common.terminal import shell_quoted
from fp8stack.data.tokenizer import Tokenizer
from fp8stack.layers.compiler import require_compiler
from fp8stack.model.config import load_config
from fp8stack.planning.phases import SHARED_PHASE, PhaseConfig, shared_note, shared_steps
from fp8stack.planning.run_config import RunConfig, parse_config, percent
from fp8stack.precision import Plan, Recipe, probe
from fp8stack.precision.recipe_file import recipe_from_json
from fp8stack.training.checkpoint.state import differences
from fp8stack.training.datasets import named_tokenizer, read, with_vocabulary
from fp8stack.training.init_from import with_source
from fp8stack.training.load import find_source
from fp8stack.training.run_folder import RunFolder
from fp8stack.training.run_plans import Decided, context_of, never_asked_for, plan_phases
from fp8stack.training.setup.start import with_absolute_paths
from fp8stack.training.threads import use_threads

PER_RUN = {"recipe": "--recipes", "seed": "--seeds", "out": "--out"}
"""Config keys that differ between the runs, and the options that set them."""
REPORT = "compare.json"
MARGIN, SHARED = "0.25%", "25%"
EVALUATIONS = 10  # evaluations per run, unless `eval_every` is given
FINAL_WINDOWS = 4  # windows of the last evaluation, as a multiple of the others'


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run of the comparison: a recipe, by its name in tables, and a seed."""

    recipe: str
    seed: int

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return f"{self.recipe}-seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A validated comparison: its recipes and seeds, and the configuration that all runs share."""

    out: Path
    recipes: dict[str, str]  # name in tables -> value of `--recipe`
    seeds: int  # per recipe
    baseline: str
    judging: Judging
    config: RunConfig
    contents: dict[str, Any]  # contents behind names and paths, which a later start must match
    plans: dict[str, Plan]  # by recipe
    command: str
    vocabulary: int

    def folder(self, job: Job) -> RunFolder:
        """The folder of a run."""
        return RunFolder(self.out / "runs" / job.name)

    @property
    def report(self) -> Path:
        """The path of `compare.json`."""
        return self.out / REPORT

    @property
    def shared(self) -> str:
        """A sentence on the steps that all runs of a seed share; "" if there are none."""
        return shared_note([phase.model_dump() for phase in self.config.phases])


class _SavedRequest(BaseModel):
    recipes: dict[str, str] | list[str]
    seeds: int


class _Run(BaseModel):
    recipe: str
    seed: NonNegativeInt
    exit: int | None
    error: str
    seconds: float | None = None


class _Report(BaseModel):
    """The keys of `compare.json` that a later start reads."""

    request: _SavedRequest = Field(alias="asked")
    config: dict[str, Any]
    contents: dict[str, Any]
    runs: list[_Run]


def prepare(
    recipes: str,
    seeds: int,
    out: str | None,
    baseline: str | None,
    flags: Mapping[str, Any],
    sets: Sequence[str],
    *,
    shared: str | None = None,
    margin: str = MARGIN,
) -> Comparison:
    """Validate the options of the command, and return the comparison.

    Args:
        recipes: names or TOML files, separated by commas.
        seeds: the number of seeds, which are 0, 1, ...
        out: the folder; by default `runs/compare-<model>`.
        baseline: one of the recipes; by default fp32 if it is among them, else the first.
        flags: config keys that all runs share; None means not given.
        sets: more config keys, as `key=value`.
        shared: the share of the steps that all runs take in the baseline's recipe first. By default
            25 %, but none with `init_from` or phases; a comparison that is continued keeps its
            share.
        margin: the gap that does not matter, in percent of the loss.

    Raises:
        UserError: bad input. Nothing was trained or written.
        NoUsableCheckpoint: the checkpoint of `init_from` is damaged.
    """
    sources = _names(recipes)
    if seeds < 1:
        raise UserError(f"--seeds {seeds}: there is nothing to train. Give 1 or more.")
    baseline_name = "fp32" if "fp32" in sources else next(iter(sources))
    if baseline is not None:
        baseline_name = presets.label(baseline)
    if baseline_name not in sources:
        raise UserError(
            f"--baseline {quoted(baseline_name)} is not among the recipes: {', '.join(sources)}. "
            "Add it to --recipes."
        )
    judging = Judging(margin=percent("--margin", margin, MARGIN))
    config, tokenizer, tokenizer_file = _config(flags, sets)
    use_threads(config.threads)  # raises here, not in every run
    folder = out or f"runs/compare-{presets.label(config.model)}"
    report = Path(folder) / REPORT
    config = _with_final_windows(config, report)
    config = _with_shared_steps(config, shared, sources[baseline_name], report)
    plans = {name: _plan(config, source) for name, source in sources.items()}
    options: dict[str, Any] = {
        "seeds": seeds,
        "baseline": baseline,
        "shared": shared,
        "margin": None if margin == MARGIN else margin,
    }
    comparison = Comparison(
        out=Path(folder).resolve(),
        recipes=sources,
        seeds=seeds,
        baseline=baseline_name,
        judging=judging,
        config=config,
        contents=_contents(config, plans, tokenizer, tokenizer_file),
        plans=plans,
        command=_command(recipes, folder, {**flags, **options}, sets),
        vocabulary=load_config(config.model, config.model_overrides).vocabulary,
    )
    return _checked(comparison)


def _with_final_windows(config: RunConfig, report: Path) -> RunConfig:
    """The configuration with more windows in the last evaluation, whose loss makes the gap. A
    comparison that is continued keeps its number: the two runs of a pair have the same windows."""
    if "final_eval_windows" in config.given:
        return config
    count = FINAL_WINDOWS * config.eval_windows
    if report.exists():
        count = read_report(report)["config"].get("final_eval_windows")
    return config.model_copy(update={"final_eval_windows": count})


def _with_shared_steps(
    config: RunConfig, shared: str | None, baseline: str, report: Path
) -> RunConfig:
    """The configuration with phases, the first of them in the baseline's recipe. The first steps of
    a small model are chaotic, and rounding in them changes the final loss more than recipes do
    later (`python -m bench study` measures it)."""
    saved = read_report(report)["config"].get("phases", []) if report.exists() else []
    if report.exists() and "phases" not in config.given:
        saved_share = f"{100 * shared_steps(saved):g}%"
        if (
            shared is not None
            and f"{percent('--shared', shared, SHARED, least=0):g}%" != saved_share
        ):
            raise UserError(
                f"{report.parent} holds another comparison, whose runs share {saved_share} of "
                f"their steps. Leave out --shared {shared}, or give another --out."
            )
        if saved:
            return _with_phases(config, [PhaseConfig.model_validate(phase) for phase in saved])
        return config
    if shared is not None and "phases" in config.given:
        raise UserError("--shared makes phases of its own. Leave out --shared, or the phases.")
    default = "0" if config.init_from or "phases" in config.given else SHARED
    share = percent("--shared", default if shared is None else shared, SHARED, least=0)
    if share >= 100:
        raise UserError(
            f"--shared {shared}: no step is left to compare. Example: --shared {SHARED}"
        )
    if not round(share / 100 * config.steps):
        if shared is not None and share:
            raise UserError(
                f"--shared {shared}: of {counted(config.steps, 'step')} that is none. Give more "
                "--steps, or --shared 0%"
            )
        return config
    first = PhaseConfig(
        name=SHARED_PHASE,
        recipe=baseline,
        until=share / 100,
        recipe_overrides=config.recipe_overrides,  # as in the runs of the baseline
    )
    return _with_phases(config, [first, PhaseConfig(name="compared")])


def _with_phases(config: RunConfig, phases: Sequence[PhaseConfig]) -> RunConfig:
    """The configuration with phases. The quality guard, which would end the phase of a recipe with
    a large gap, is off unless the user configures it."""
    update: dict[str, Any] = {"phases": tuple(phases)}
    if "quality" not in config.guard.model_fields_set:
        update["guard"] = config.guard.model_copy(update={"quality": 0.0})
    return config.model_copy(update=update)


def _names(recipes: str) -> dict[str, str]:
    """The recipes as {name in tables and folders: name or absolute path of a TOML file}."""
    sources: dict[str, str] = {}
    for recipe in recipe_words(recipes):
        name = presets.label(recipe)
        source = absolute_path(recipe) if recipe.endswith(".toml") else recipe
        if name in sources:
            remedy = "Give one of the two another file name."
            raise UserError(f"--recipes names '{quoted(name)}' twice. {remedy}")
        sources[name] = source
    return sources


def _config(
    flags: Mapping[str, Any], sets: Sequence[str]
) -> tuple[RunConfig, Tokenizer | None, Path | None]:
    """The configuration that all runs share, the tokenizer that it names, and the `tokenizer.json`
    of `init_from`."""
    config = parse_config(None, flags, sets)
    for key, option in PER_RUN.items():
        if key in config.given:
            raise UserError(f"--set {key} is what the runs differ in. Give {option} instead.")
    defaults = {"eval_every": max(1, config.steps // EVALUATIONS), "sample_tokens": 0}
    unset = {key: value for key, value in defaults.items() if key not in config.given}
    config = with_absolute_paths(config.model_copy(update=unset))
    named = named_tokenizer(config)
    if not config.init_from:
        return with_vocabulary(config, named), named, None
    source = find_source(config.init_from)
    return with_source(config, source), named, source.tokenizer


def _contents(
    config: RunConfig, plans: Mapping[str, Plan], named: Tokenizer | None, tokenizer: Path | None
) -> dict[str, Any]:
    """The contents of the model, data and recipes."""
    model = load_config(config.model, config.model_overrides)
    reading = read(config, model.vocabulary, context_of(config, model), named, tokenizer)
    return {
        "model": model.model_dump(mode="json"),
        "data": reading.fingerprints(),
        "recipes": {name: _recipe_table(plan.recipe) for name, plan in plans.items()},
    }


def _plan(config: RunConfig, source: str) -> Plan:
    """The plan that runs if `source` is requested. Raises a UserError for a bad recipe."""
    model = load_config(config.model, config.model_overrides)
    run_config = config.model_copy(update={"recipe": source})
    tokens = config.batch // config.accumulate * context_of(config, model)
    plans, schedule = plan_phases(run_config, model, probe(config.device), Decided(), tokens)
    if warning := never_asked_for(run_config, schedule.phases):
        raise UserError(f"{warning}. Give more --steps, a smaller --shared or other phases.")
    of_source = [
        place
        for phase, place in zip(schedule.phases, schedule.indices, strict=True)
        if phase.recipe == source
    ]
    plan = plans[of_source[-1] if of_source else schedule.indices[-1]]
    if config.compile:
        require_compiler(plan, config.activation_checkpointing)
    return plan


def _recipe_table(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json", exclude={"description"})


def _checked(comparison: Comparison) -> Comparison:
    """The comparison, after a check that its folder is free or holds an earlier start of it. Raises
    a UserError if `out` is a file, holds other things, or holds a comparison that differs.

    If seeds are added, the user may have seen the earlier results (`Judging.adding`)."""
    out = comparison.out
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file. Give a folder as --out.")
    if RunFolder(out).holds_run:
        raise UserError(f"{out} holds a single run. Give another --out.")
    if not comparison.report.exists():
        for name in ("runs", "logs", "base.toml", "compare.md", "compare.png"):
            if (leftover := out / name).exists():
                raise UserError(
                    f"{leftover} is in the way: it is no comparison's. Give another --out."
                )
        return comparison
    saved = read_report(comparison.report)
    saved["config"].setdefault("final_eval_windows", None)  # older: alike in all evaluations
    recipes = saved["contents"].get("recipes")
    if isinstance(recipes, dict):  # an older version may have written another form
        where = str(comparison.report)
        saved["contents"]["recipes"] = {
            name: _recipe_table(recipe_from_json(recipe, where)) for name, recipe in recipes.items()
        }
    data = saved["config"].get("data"), comparison.config.data
    if None not in data and len(set(map(os.path.realpath, data))) == 1:  # by a link, or not
        saved["config"]["data"] = comparison.config.data
    for difference in _changes(saved, as_saved(comparison)):
        raise UserError(
            f"{out} holds another comparison: {difference}. More recipes and more seeds may be "
            "added; for anything else give another --out."
        )
    request = saved["asked"]
    added_before = request.get("adding", request.get("always_valid", False))  # the older name
    adding = added_before or request["seeds"] < comparison.seeds
    return replace(comparison, judging=replace(comparison.judging, adding=adding))


def _changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences from the saved comparison in settings that must not change."""
    request, saved_request = now["asked"], saved["asked"]
    for name in saved_request["recipes"]:
        if name not in request["recipes"]:
            yield f"recipe '{name}' is missing here"
    if saved_request["seeds"] > request["seeds"]:
        yield f"seeds is {request['seeds']} here and {saved_request['seeds']} there"
    for key in ("config", "contents"):
        table = json.loads(json.dumps(now[key]))  # tuples become lists, as in the saved table
        saved_table = _common_keys(saved[key], table)
        for difference in differences(saved_table, _common_keys(table, saved_table)):
            yield difference.replace("in the checkpoint", "there")


def _common_keys(table: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `table` that `reference` has too, at all depths."""
    return {
        key: _common_keys(value, reference[key])
        if isinstance(value, dict) and isinstance(reference[key], dict)
        else value
        for key, value in table.items() if key in reference
    }  # fmt: skip


def as_saved(comparison: Comparison) -> dict[str, Any]:
    """The part of `compare.json` that describes the request."""
    return {
        "command": comparison.command,
        "asked": {
            "recipes": comparison.recipes,
            "seeds": comparison.seeds,
            "baseline": comparison.baseline,
            **asdict(comparison.judging),
        },
        "config": comparison.config.model_dump(mode="json", exclude=set(PER_RUN)),
        "contents": comparison.contents,
    }


def read_report(path: Path) -> dict[str, Any]:
    """The contents of a `compare.json`. Raises a UserError if the file is not one."""
    try:
        report: dict[str, Any] = read_json(path)
        _Report.model_validate(report)
    except ValueError as error:
        message = f"{path} is no comparison's, or is damaged. Give another --out."
        raise UserError(message) from error
    return report


def _command(recipes: str, out: str, flags: Mapping[str, Any], sets: Sequence[str]) -> str:
    words = ["fp8stack", "compare", "--recipes", recipes]
    renamed = {"init_from": "from"}
    for key, value in flags.items():
        name = renamed.get(key, key)
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            words += [f"--{name}", str(value)]
    for item in sets:
        words += ["--set", item]
    return " ".join(map(shell_quoted, [*words, "--out", out]))
