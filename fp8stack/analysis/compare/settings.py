"""A comparison: its runs and its folder, validated before training."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, NonNegativeInt

from fp8stack.analysis.benchmark.timing import machine
from fp8stack.analysis.compare.gaps import Judging
from fp8stack.common import presets
from fp8stack.common.errors import UserError, quoted
from fp8stack.common.io import absolute_path, read_json
from fp8stack.common.presets import recipe_words
from fp8stack.common.tables import counted
from fp8stack.data.tokenizer import Tokenizer
from fp8stack.layers.compiler import require_compiler
from fp8stack.model.config import load_config
from fp8stack.planning.phases import PhaseConfig
from fp8stack.planning.run_config import RunConfig, merged, percent
from fp8stack.precision import probe
from fp8stack.training.checkpoint.state import differences
from fp8stack.training.datasets import read, with_vocabulary
from fp8stack.training.init_from import with_source
from fp8stack.training.load import find_source
from fp8stack.training.run_plans import (
    Decided,
    context_of,
    never_asked_for,
    phases_in,
    plan_phases,
    plan_recipe,
)
from fp8stack.training.setup.start import with_absolute_paths
from fp8stack.training.threads import use_threads

REPORT = "compare.json"
FILES = ("runs", "logs", "base.toml", "compare.md", "compare.png", "run.toml", "metrics.jsonl")
"""Files of a comparison, or of a single run, that stand in the way of a new comparison."""
MARGIN, SHARED = "0.25%", "25%"
SHARED_PHASE = "shared"
PER_RUN = {"recipe", "seed", "out"}  # keys that the runs differ in
EVALUATIONS = 10  # evaluations per run, unless `eval_every` is given
FINAL_WINDOWS = 4  # windows of the last evaluation, as a multiple of the others'


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command that are no keys of a run.

    Attributes:
        recipes: names or TOML files, separated by commas.
        seeds: the number of seeds, which are 0, 1, ...
        baseline: one of the recipes; by default fp32 if it is among them, else the first.
        shared: the share of the steps that all runs take in the baseline's recipe first. By default
            25 %, but none with `init_from` or phases.
        margin: the gap that does not matter, in percent of the loss.
        command: the command, to be given again.
    """

    recipes: str
    seeds: int = 3
    baseline: str | None = None
    shared: str | None = None
    margin: str = MARGIN
    command: str = "fp8stack compare"


class _Request(BaseModel):
    recipes: dict[str, str]
    seeds: int
    adding: bool = True  # older versions: unknown


class _SavedRun(BaseModel):
    recipe: str
    seed: NonNegativeInt
    exit: int | None
    error: str
    seconds: float | None = None


class _Saved(BaseModel):
    """The keys of `compare.json` that a later start reads."""

    request: _Request = Field(alias="asked")
    config: dict[str, Any]
    contents: dict[str, dict[str, Any]]
    machine: dict[str, Any]
    runs: list[_SavedRun]

    @property
    def seeds(self) -> int:
        """The number of seeds, those that an older version added included."""
        return max([self.request.seeds, *(run.seed + 1 for run in self.runs)])


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs of several recipes with the same seeds.

    Attributes:
        out: the folder of the comparison.
        config: the configuration that all runs share.
        recipes: the name or path of each recipe, by its name in tables.
        seeds: the number of runs of each recipe.
        baseline: the name of the recipe that the others are compared with.
        contents: the contents behind names and paths, which a later start must match.
        machine: the facts of this machine.
        ended: the runs that ended before.
    """

    out: Path
    config: RunConfig
    recipes: dict[str, str]
    seeds: int
    baseline: str
    judging: Judging
    command: str
    contents: dict[str, dict[str, Any]]
    machine: dict[str, Any]
    ended: list[_SavedRun]

    @property
    def runs(self) -> list[RunConfig]:
        """The configuration of each run, by seed, then by recipe."""
        return [
            self.config.model_copy(
                update={"recipe": source, "seed": seed, "out": f"{self.out}/runs/{name}-seed{seed}"}
            )
            for seed in range(self.seeds)
            for name, source in self.recipes.items()
        ]

    @property
    def report(self) -> Path:
        """The path of `compare.json`."""
        return self.out / REPORT

    @property
    def shared(self) -> str:
        """A note on the steps that all runs of a seed share; "" if there are none."""
        share = _shared_steps(self.config)
        if not share:
            return ""
        recipe = self.config.phases[0].recipe
        return f"the first {share:.0%} of the steps are in {recipe} in all runs of a seed"

    def request(self) -> dict[str, Any]:
        """The part of `compare.json` that describes the request."""
        return {
            "command": self.command,
            "asked": {
                "recipes": self.recipes,
                "seeds": self.seeds,
                "baseline": self.baseline,
                **asdict(self.judging),
            },
            "config": self.config.model_dump(mode="json", exclude=PER_RUN),
            "contents": self.contents,
            "machine": self.machine,
        }


def comparison_of(config: RunConfig, options: Options) -> Comparison:
    """The comparison of runs that have the keys of `config` in common, whose `out` is the
    comparison's folder.

    Raises:
        UserError: bad input. Nothing was trained or written.
        NoUsableCheckpoint: the checkpoint of `init_from` is damaged.
    """
    recipes = _recipes(options.recipes)
    baseline = _baseline(options.baseline, recipes)
    if options.seeds < 1:
        raise UserError(f"--seeds {options.seeds}: there is nothing to train. Give 1 or more.")
    for key, option in (("recipe", "--recipes"), ("seed", "--seeds")):
        if key in config.given:
            raise UserError(f"--set {key} is what the runs differ in. Give {option} instead.")
    use_threads(config.threads)  # raises here, not in every run
    config, tokenizer, file = _with_model(with_absolute_paths(config))
    out = Path(config.out or f"runs/compare-{presets.label(config.model)}").resolve()
    saved = _read(out)
    if saved is None:
        config = _with_defaults(config, options.shared, recipes[baseline])
    else:
        config = _saved_config(saved, config, options.shared, out)
        config, tokenizer, file = _with_model(config)
    model = load_config(config.model, config.model_overrides)
    data = read(config, model.vocabulary, context_of(config, model), tokenizer, file)
    comparison = Comparison(
        out=out,
        config=config,
        recipes=recipes,
        seeds=options.seeds,
        baseline=baseline,
        judging=Judging(
            margin=percent("--margin", options.margin, MARGIN),
            # The user may have seen the results of fewer seeds.
            adding=bool(saved and (saved.request.adding or saved.seeds < options.seeds)),
        ),
        command=options.command,
        contents={
            "model": model.model_dump(mode="json"),
            "data": data.fingerprints(),
            "recipes": {name: _recipe_table(config, recipe) for name, recipe in recipes.items()},
        },
        machine=machine("accelerate", device=config.device),
        ended=[run for run in saved.runs if run.exit is not None] if saved else [],
    )
    if saved is not None:
        _require_same(comparison, saved)
    return comparison


def _with_model(config: RunConfig) -> tuple[RunConfig, Tokenizer | None, Path | None]:
    """The configuration with the vocabulary of its data or the model of its initial weights, the
    tokenizer that it names, and the `tokenizer.json` of the weights."""
    config, tokenizer = with_vocabulary(config)
    if not config.init_from:
        return config, tokenizer, None
    source = find_source(config.init_from)
    return with_source(config, source), tokenizer, source.tokenizer


def _baseline(name: str | None, recipes: Mapping[str, str]) -> str:
    """The baseline, one of the recipes. Raises a UserError if it is not."""
    if name is None:
        return "fp32" if "fp32" in recipes else next(iter(recipes))
    baseline = presets.label(name)
    if baseline not in recipes:
        raise UserError(
            f"--baseline {quoted(baseline)} is not among the recipes: {', '.join(recipes)}. "
            "Add it to --recipes."
        )
    return baseline


def _recipes(text: str) -> dict[str, str]:
    """The recipes as {name in tables and folders: name or absolute path of a TOML file}."""
    recipes: dict[str, str] = {}
    for recipe in recipe_words(text):
        name = presets.label(recipe)
        if name in recipes:
            remedy = "Give one of the two another file name."
            raise UserError(f"--recipes names '{quoted(name)}' twice. {remedy}")
        recipes[name] = absolute_path(recipe) if recipe.endswith(".toml") else recipe
    if len(recipes) < 2:
        raise UserError(
            f"--recipes {quoted(text)} is one recipe, and a gap is the difference of two. Name at "
            "least two, such as --recipes fp32,delayed"
        )
    return recipes


def _read(out: Path) -> _Saved | None:
    """The saved state of an earlier start in the folder of a comparison; None if the folder is
    free. Raises a UserError if `out` is a file, or holds something else than a comparison."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file. Give a folder as --out.")
    path = out / REPORT
    if path.exists():
        try:
            return _Saved.model_validate(read_json(path))
        except ValueError as error:
            message = f"{path} is no comparison's, or is damaged. Give another --out."
            raise UserError(message) from error
    if leftover := next((out / name for name in FILES if (out / name).exists()), None):
        raise UserError(f"{leftover} is in the way: it is no comparison's. Give another --out.")
    return None


def _saved_config(saved: _Saved, config: RunConfig, shared: str | None, out: Path) -> RunConfig:
    """The configuration of the comparison that is continued. Raises a UserError if a key that is
    given in `config` differs from it."""
    keys = config.model_dump(mode="json", exclude_unset=True, exclude=PER_RUN)
    _refuse(out, list(differences(saved.config, merged(saved.config, keys))))
    saved_config: RunConfig = presets.parse(RunConfig, saved.config, str(out / REPORT))
    saved_share = _shared_steps(saved_config)
    if shared is not None and _percent(shared) != saved_share:
        _refuse(out, [f"--shared is {shared} here and {100 * saved_share:g}% there"])
    return saved_config


def _require_same(comparison: Comparison, saved: _Saved) -> None:
    """Raise a UserError that names the first difference of a comparison from the saved one, other
    than added recipes and seeds."""
    recipes = comparison.contents["recipes"]
    changes = [
        f"recipe '{name}' is missing here" for name in saved.request.recipes if name not in recipes
    ]
    if saved.seeds > comparison.seeds:
        changes.append(f"seeds is {comparison.seeds} here and {saved.seeds} there")
    table = {name: recipes[name] for name in saved.contents["recipes"] if name in recipes}
    changes += differences(saved.contents, comparison.contents | {"recipes": table})
    _refuse(comparison.out, changes)
    begun_on, machine_name = saved.machine.get("machine"), comparison.machine["machine"]
    if begun_on != machine_name:
        raise UserError(
            f"{comparison.out} was begun on {begun_on}, and this is {machine_name}: other machines "
            "round differently. Go on there, or give another --out."
        )


def _refuse(out: Path, changes: Sequence[str]) -> None:
    """Raise a UserError about the first of the changes, if there are any."""
    if changes:
        difference = changes[0].replace("in the checkpoint", "there")
        raise UserError(
            f"{out} holds another comparison: {difference}. More recipes and more seeds may be "
            "added; for anything else give another --out."
        )


def _percent(shared: str) -> float:
    return percent("--shared", shared, SHARED, least=0) / 100


def _with_defaults(config: RunConfig, shared: str | None, baseline: str) -> RunConfig:
    """The configuration of a new comparison: with fewer evaluations, more windows in the last one,
    whose loss makes the gap, and shared steps."""
    defaults = {
        "eval_every": max(1, config.steps // EVALUATIONS),
        "final_eval_windows": FINAL_WINDOWS * config.eval_windows,
        "sample_tokens": 0,
    }
    unset = {key: value for key, value in defaults.items() if key not in config.given}
    config = config.model_copy(update={**unset, "out": None})  # each run has its own
    return _with_shared_steps(config, shared, baseline)


def _with_shared_steps(config: RunConfig, shared: str | None, baseline: str) -> RunConfig:
    """The configuration with phases, the first of them in the baseline's recipe. The first steps of
    a small model are chaotic, and rounding in them changes the final loss more than recipes do
    later (`python -m bench study` measures it). The quality guard, which would end the phase of a
    recipe with a large gap, is off unless the user configures it."""
    if "phases" in config.given:
        if shared is not None:
            raise UserError("--shared makes phases of its own. Leave out --shared, or the phases.")
        return config
    default = "0%" if config.init_from else SHARED
    share = _percent(default if shared is None else shared)
    if share >= 1:
        raise UserError(
            f"--shared {shared}: no step is left to compare. Example: --shared {SHARED}"
        )
    if not round(share * config.steps):
        if shared is not None and share:
            raise UserError(
                f"--shared {shared}: of {counted(config.steps, 'step')} that is none. Give more "
                "--steps, or --shared 0%"
            )
        return config
    first = PhaseConfig(
        name=SHARED_PHASE,
        recipe=baseline,
        until=share,
        recipe_overrides=config.recipe_overrides,  # as in the runs of the baseline
    )
    update: dict[str, Any] = {"phases": (first, PhaseConfig(name="compared"))}
    if "quality" not in config.guard.model_fields_set:
        update["guard"] = config.guard.model_copy(update={"quality": 0.0})
    return config.model_copy(update=update)


def _shared_steps(config: RunConfig) -> float:
    """The share of the steps, at the start, that all runs take in the baseline's recipe."""
    for phase in config.phases[:1]:
        if phase.name == SHARED_PHASE and isinstance(phase.until, float):
            return phase.until
    return 0.0


def _recipe_table(config: RunConfig, source: str) -> dict[str, Any]:
    """The recipe that runs if `source` is requested. Raises a UserError if a run in it is not
    possible."""
    run = config.model_copy(update={"recipe": source})
    model, hardware = load_config(run.model, run.model_overrides), probe(run.device)
    tokens = run.batch // run.accumulate * context_of(run, model)
    plan_phases(run, model, hardware, Decided(), tokens)
    if warning := never_asked_for(run, phases_in(run)):
        raise UserError(f"{warning}. Give more --steps, a smaller --shared or other phases.")
    plan = plan_recipe(source, run, model, hardware, tokens)
    if run.compile:
        require_compiler(plan, run.activation_checkpointing)
    return plan.recipe.model_dump(mode="json", exclude={"description"})
