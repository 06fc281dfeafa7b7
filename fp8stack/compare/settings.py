"""The settings of a comparison, validated before training."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, NonNegativeInt

from fp8stack.backends.compiler import require_compiler
from fp8stack.checkpoint.state import differences
from fp8stack.compare.summary import Judging
from fp8stack.config import RunConfig, parse_config, percent
from fp8stack.errors import UserError, quoted
from fp8stack.io import read_json
from fp8stack.model.config import GPTConfig, load_config
from fp8stack.precision import Recipe, probe
from fp8stack.precision.phases import SHARED_PHASE, PhaseConfig, shared_note, shared_steps
from fp8stack.precision.recipe import recipe_from_json
from fp8stack.presets import recipe_words
from fp8stack.terminal import shell_quoted
from fp8stack.threads import use_threads
from fp8stack.training.datasets import named_tokenizer, read, with_vocabulary
from fp8stack.training.init_from import with_source
from fp8stack.training.load import find_source
from fp8stack.training.run_folder import RunFolder
from fp8stack.training.run_plans import Decided, context_of, plan_phases
from fp8stack.training.setup.start import with_absolute_paths

OWN = {"recipe": "--recipes", "seed": "--seeds", "out": "--out"}
"""Keys of a run that differ between the runs, and what to give in place of them."""
REPORT = "compare.json"
MARGIN, SHARED = "0.25%", "25%"
EVALUATIONS = 10  # how often each run is evaluated, unless `eval_every` says otherwise


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: a recipe, by its name in tables, and a seed."""

    recipe: str
    seed: int

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.recipe}-seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is compared, and the configuration that all runs share."""

    out: Path
    recipes: dict[str, str]  # as `--recipe` takes them, by their names in tables
    seeds: int  # of every recipe; with `judging.until`, at least
    baseline: str
    judging: Judging
    hours: float | None  # no pair is begun after so many
    config: RunConfig
    contents: dict[str, Any]  # what names and paths stood for, for a later start to be held to
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


class _Asked(BaseModel):
    recipes: dict[str, str] | list[str]
    seeds: int


class _Run(BaseModel):
    recipe: str
    seed: NonNegativeInt
    exit: int | None
    error: str
    seconds: float | None = None


class _Report(BaseModel):
    """Of `compare.json`, what a later start reads."""

    asked: _Asked
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
    until: str | None = None,
    margin: str = MARGIN,
    hours: float | None = None,
) -> Comparison:
    """The comparison that the command asks for, found to be possible.

    Args:
        recipes: names or TOML files, separated by commas.
        seeds: how many; they are 0, 1, ...
        out: the folder; None is `runs/compare-<model>`.
        baseline: one of the recipes; None is fp32 if it is among them, else the first.
        shared: the share of its steps that each run takes in the baseline's recipe first; None is
            25 %, of a comparison begun before what it was, and none with weights to begin with or
            phases.
        until: the half-width, in percent of the loss, that seeds are added for: "0.15%".
        margin: the gap that does not matter, in percent of the loss.
        hours: begin no pair after so many.
        flags: keys of a run that all share; None is not given.
        sets: more of them, as `key=value`.

    Raises:
        UserError: bad input; one line, and nothing was trained or written.
        NoUsableCheckpoint: the checkpoint to begin with is damaged.
    """
    named = _names(recipes)
    if seeds < 1:
        raise UserError(f"--seeds {seeds}: there is nothing to train. Give 1 or more.")
    chosen = baseline or ("fp32" if "fp32" in named else next(iter(named)))
    if chosen not in named:
        raise UserError(
            f"--baseline {quoted(chosen)} is not among the recipes: {', '.join(named)}. "
            "Add it to --recipes."
        )
    judging = Judging(
        margin=percent("--margin", margin, MARGIN),
        until=None if until is None else percent("--until", until, MARGIN),
        always_valid=until is not None,
    )
    if hours is not None and not 0 < hours < math.inf:
        raise UserError(f"--hours {hours:g}: there is no time to train. Give more than 0.")
    if hours is not None and until is None:
        raise UserError("--hours limits --until, which is not given. Example: --until 0.25%")
    config, tokenizer = _config(flags, sets)
    use_threads(config.threads)  # refused here, and not by every run
    folder = out or f"runs/compare-{Path(config.model).stem}"
    config = _with_shared_steps(config, shared, named[chosen], Path(folder) / REPORT)
    own: dict[str, Any] = {"seeds": seeds, "baseline": baseline, "shared": shared, "until": until}
    own |= {"margin": None if margin == MARGIN else margin, "hours": hours}
    comparison = Comparison(
        out=Path(folder).resolve(),
        recipes=named,
        seeds=seeds,
        baseline=chosen,
        judging=judging,
        hours=hours,
        config=config,
        contents=_contents(config, named, tokenizer),
        command=_command(recipes, folder, {**flags, **own}, sets),
        vocabulary=load_config(config.model, config.model_overrides).vocabulary,
    )
    return _beginning(comparison)


def _with_shared_steps(
    config: RunConfig, shared: str | None, baseline: str, report: Path
) -> RunConfig:
    """The configuration with phases, of which the first is in the baseline's recipe: the first
    steps of a small model are chaotic, and rounding in them moves the end of a run by more than
    recipes do later (`python -m bench study` measures it)."""
    saved = read_report(report)["config"].get("phases", []) if report.exists() else []
    if report.exists() and "phases" not in config.given:
        before = f"{100 * shared_steps(saved):g}%"
        if shared is not None and f"{percent('--shared', shared, SHARED, least=0):g}%" != before:
            raise UserError(
                f"{report.parent} holds another comparison, whose runs share {before} of their "
                f"steps. Leave out --shared {shared}, or give another --out."
            )
        if saved:
            return _with_phases(config, [PhaseConfig.model_validate(phase) for phase in saved])
        return config
    if shared is not None and "phases" in config.given:
        raise UserError("--shared makes phases of its own. Leave out --shared, or the phases.")
    usual = "0" if config.init_from or "phases" in config.given else SHARED
    share = percent("--shared", usual if shared is None else shared, SHARED, least=0)
    if share >= 100:
        raise UserError(
            f"--shared {shared}: no step is left to compare. Example: --shared {SHARED}"
        )
    if not share:
        return config
    first = PhaseConfig(name=SHARED_PHASE, recipe=baseline, until=share / 100)
    return _with_phases(config, [first, PhaseConfig(name="compared")])


def _with_phases(config: RunConfig, phases: Sequence[PhaseConfig]) -> RunConfig:
    """The quality guard, which would end a costly recipe's phase, is off unless it is given."""
    update: dict[str, Any] = {"phases": tuple(phases)}
    if "quality" not in config.guard.model_fields_set:
        update["guard"] = config.guard.model_copy(update={"quality": 0.0})
    return config.model_copy(update=update)


def _names(recipes: str) -> dict[str, str]:
    """The recipes by the names that they go by in tables and folders; files by their paths."""
    found: dict[str, str] = {}
    for recipe in recipe_words(recipes):
        name = Path(recipe).stem if recipe.endswith(".toml") else recipe
        if name in found:
            raise UserError(f"--recipes names '{quoted(name)}' twice. Name each recipe once.")
        found[name] = str(Path(recipe).resolve()) if recipe.endswith(".toml") else recipe
    return found


def _config(flags: Mapping[str, Any], sets: Sequence[str]) -> tuple[RunConfig, Path | None]:
    """The configuration that all runs share, and the `tokenizer.json` of their first weights."""
    config = parse_config(None, flags, sets)
    for key, instead in OWN.items():
        if key in config.given:
            raise UserError(f"--set {key} is what the runs differ in. Give {instead} instead.")
    usual = {"eval_every": max(1, config.steps // EVALUATIONS), "sample_tokens": 0}
    unset = {key: value for key, value in usual.items() if key not in config.given}
    config = with_absolute_paths(config.model_copy(update=unset))
    if not config.init_from:
        return with_vocabulary(config, named_tokenizer(config)), None
    source = find_source(config.init_from)
    return with_source(config, source), source.tokenizer


def _contents(
    config: RunConfig, recipes: Mapping[str, str], tokenizer: Path | None
) -> dict[str, Any]:
    """What the model, the data and the recipes are, once every plan was found to be possible."""
    model = load_config(config.model, config.model_overrides)
    context = context_of(config, model)
    found = {name: _recipe(config, source, model) for name, source in recipes.items()}
    reading = read(config, model.vocabulary, context, named_tokenizer(config), tokenizer)
    return {
        "model": model.model_dump(mode="json"),
        "data": reading.fingerprints(),
        "recipes": found,
    }


def _recipe(config: RunConfig, source: str, model: GPTConfig) -> dict[str, Any]:
    """The recipe that runs where `source` is asked for."""
    if config.recipe_overrides and source == "auto":
        raise UserError("recipe_overrides needs recipes by name: auto chooses one by itself.")
    own = config.model_copy(update={"recipe": source})
    tokens = config.batch // config.accumulate * context_of(config, model)
    plans, schedule = plan_phases(own, model, probe(config.device), Decided(), tokens)
    plan = plans[schedule.variants[-1]]
    if config.compile:
        require_compiler(plan, config.activation_checkpointing)
    return _told(plan.recipe)


def _told(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json", exclude={"description"})


def _beginning(comparison: Comparison) -> Comparison:
    """The comparison, once its folder was seen to be free, or to hold the beginning of it. Raises a
    UserError if that is a file, holds something else, or a comparison that differs.

    Who adds seeds has seen what the first ones gave, so from then on intervals are to be valid
    however often they are looked at."""
    out = comparison.out
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file. Give a folder as --out.")
    if RunFolder(out).holds_run:
        raise UserError(f"{out} holds a single run. Give another --out.")
    if not comparison.report.exists():
        for name in ("runs", "logs", "base.toml", "compare.md", "compare.png"):
            if (own := out / name).exists():
                raise UserError(f"{own} is in the way: it is no comparison's. Give another --out.")
        return comparison
    saved = read_report(comparison.report)
    recipes = saved["contents"].get("recipes")
    if isinstance(recipes, dict):  # an older version's may be in another form
        where = str(comparison.report)
        saved["contents"]["recipes"] = {
            name: _told(recipe_from_json(recipe, where)) for name, recipe in recipes.items()
        }
    for difference in _changes(saved, as_saved(comparison)):
        raise UserError(
            f"{out} holds another comparison: {difference}. More recipes and more seeds may be "
            "added; for anything else give another --out."
        )
    asked = saved["asked"]
    looked = asked.get("always_valid", False) or asked["seeds"] < comparison.seeds
    if not looked or comparison.judging.always_valid:
        return comparison
    judging = replace(comparison.judging, always_valid=True)
    return replace(comparison, judging=judging)


def _changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Where the comparison that is asked for differs from the one begun, in what may not change."""
    asked, before = now["asked"], saved["asked"]
    for name in before["recipes"]:
        if name not in asked["recipes"]:
            yield f"recipe '{name}' is missing here"
    if before["seeds"] > asked["seeds"]:
        yield f"seeds is {asked['seeds']} here and {before['seeds']} there"
    for key in ("config", "contents"):
        here = json.loads(json.dumps(now[key]))  # tuples are lists there
        there = _part(saved[key], here)
        for difference in differences(there, _part(here, there)):
            yield difference.replace("in the checkpoint", "there")


def _part(table: Mapping[str, Any], of: Mapping[str, Any]) -> dict[str, Any]:
    """What both tables have: another version has other keys, and recipes may be added."""
    return {
        key: _part(value, of[key]) if isinstance(value, dict) and isinstance(of[key], dict)
        else value
        for key, value in table.items() if key in of
    }  # fmt: skip


def as_saved(comparison: Comparison) -> dict[str, Any]:
    """What `compare.json` says of what was asked."""
    return {
        "command": comparison.command,
        "asked": {
            "recipes": comparison.recipes,
            "seeds": comparison.seeds,
            "baseline": comparison.baseline,
            **asdict(comparison.judging),
        },
        "config": comparison.config.model_dump(mode="json", exclude=set(OWN)),
        "contents": comparison.contents,
    }


def read_report(path: Path) -> dict[str, Any]:
    """The contents of `compare.json`. Raises a UserError if it is none."""
    try:
        found: dict[str, Any] = read_json(path)
        _Report.model_validate(found)
    except ValueError as error:
        said = f"{path} is no comparison's, or is damaged. Give another --out."
        raise UserError(said) from error
    return found


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
