"""What is compared, checked before anything is trained."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8stack.backends.compiler import require_compiler
from fp8stack.checkpoint.state import differences
from fp8stack.config import RunConfig, parse_config
from fp8stack.errors import UserError, quoted
from fp8stack.model.config import GPTConfig, load_config, plan_for
from fp8stack.precision import Recipe, load_recipe, probe
from fp8stack.precision.recipe import recipe_from_json
from fp8stack.threads import use_threads
from fp8stack.training.run_folder import RunFolder
from fp8stack.training.setup.build import context_of
from fp8stack.training.setup.datasets import read
from fp8stack.training.setup.init_from import find_source, with_source
from fp8stack.training.setup.start import with_absolute_paths
from fp8stack.training.setup.variants import unwanted_backends

OWN = {"recipe": "--recipes", "seed": "--seeds", "out": "--out"}
"""Keys of a run that differ between the runs, and what to give in place of them."""
EVALUATIONS = 10  # how often each run is evaluated, unless `eval_every` says otherwise


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run: a recipe, by its name in tables and as `--recipe` takes it, and a seed."""

    recipe: str
    source: str
    seed: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.recipe}-seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is compared, and the configuration that all runs share."""

    out: Path
    recipes: dict[str, str]  # by the names they go by
    seeds: int
    baseline: str
    config: RunConfig
    contents: dict[str, Any]  # what names and paths stood for, for a later start to be held to
    command: str
    vocabulary: int

    @property
    def jobs(self) -> list[Job]:
        """All runs, seed by seed, so that half of them are of every recipe."""
        return [
            Job(recipe=name, source=source, seed=seed)
            for seed in range(self.seeds)
            for name, source in self.recipes.items()
        ]

    def folder(self, job: Job) -> RunFolder:
        """Where a run is."""
        return RunFolder(self.out / "runs" / job.name)

    @property
    def report(self) -> Path:
        """The figures of all runs, and what they are of."""
        return self.out / "compare.json"


def prepare(
    recipes: str,
    seeds: int,
    out: str | None,
    baseline: str | None,
    flags: Mapping[str, Any],
    sets: Sequence[str],
) -> Comparison:
    """The comparison that the command asks for, found to be possible.

    Args:
        recipes: names or TOML files, separated by commas.
        seeds: how many; they are 0, 1, ...
        out: the folder; None is `runs/compare-<model>`.
        baseline: one of the recipes; None is fp32 if it is among them, else the first.
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
    config = _shared(flags, sets)
    use_threads(config.threads)  # refused here, and not by every run
    folder = out or f"runs/compare-{Path(config.model).stem}"
    comparison = Comparison(
        out=Path(folder).resolve(),
        recipes=named,
        seeds=seeds,
        baseline=chosen,
        config=config,
        contents=_contents(config, named),
        command=_command(recipes, seeds, folder, baseline, flags, sets),
        vocabulary=load_config(config.model, config.model_overrides).vocabulary,
    )
    _require_place(comparison)
    return comparison


def _names(recipes: str) -> dict[str, str]:
    """The recipes by the names that they go by in tables and folders; files by their paths."""
    found: dict[str, str] = {}
    for word in recipes.split(","):
        recipe = word.strip()
        if not recipe:
            raise UserError(
                f"--recipes '{quoted(recipes)}' has an empty name. Example: fp32,bf16,delayed"
            )
        name = Path(recipe).stem if recipe.endswith(".toml") else recipe
        if name in found:
            raise UserError(f"--recipes names '{quoted(name)}' twice. Name each recipe once.")
        found[name] = str(Path(recipe).resolve()) if recipe.endswith(".toml") else recipe
    return found


def _shared(flags: Mapping[str, Any], sets: Sequence[str]) -> RunConfig:
    config = parse_config(None, flags, sets)
    for key, instead in OWN.items():
        if key in config.given:
            raise UserError(f"--set {key} is what the runs differ in. Give {instead} instead.")
    usual = {"eval_every": max(1, config.steps // EVALUATIONS), "sample_tokens": 0}
    unset = {key: value for key, value in usual.items() if key not in config.given}
    config = with_absolute_paths(config.model_copy(update=unset))
    if config.init_from:
        config = with_source(config, find_source(config.init_from))
    return config


def _contents(config: RunConfig, recipes: Mapping[str, str]) -> dict[str, Any]:
    """What the model, the data and the recipes are, once every plan was found to be possible."""
    model = load_config(config.model, config.model_overrides)
    context = context_of(config, model)
    found = {name: _recipe(config, source, model) for name, source in recipes.items()}
    source = find_source(config.init_from).tokenizer if config.init_from else None
    reading = read(config, model.vocabulary, context, source)
    parts = {"train": reading.train, "validation": reading.validation}
    return {
        "model": model.model_dump(mode="json"),
        "data": {name: part.fingerprint() for name, part in parts.items()},
        "recipes": found,
    }


def _recipe(config: RunConfig, source: str, model: GPTConfig) -> dict[str, Any]:
    """The recipe that runs where `source` is asked for."""
    if config.recipe_overrides and source == "auto":
        raise UserError("recipe_overrides needs recipes by name: auto chooses one by itself.")
    asked = source if source == "auto" else load_recipe(source, config.recipe_overrides)
    tokens = config.batch // config.accumulate * context_of(config, model)
    how = (probe(config.device), config.backend, config.strict)
    plan = plan_for(model, asked, *how, tokens=tokens, without=unwanted_backends(config))
    if config.compile:
        require_compiler(plan, config.activation_checkpointing)
    return _told(plan.recipe)


def _told(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json", exclude={"description"})


def _require_place(comparison: Comparison) -> None:
    """See that the folder is free, or holds the beginning of this comparison. Raises a UserError if
    it is a file, holds something else, or a comparison that differs."""
    out = comparison.out
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file. Give a folder as --out.")
    if RunFolder(out).holds_run:
        raise UserError(f"{out} holds a single run. Give another --out.")
    if not comparison.report.exists():
        for name in ("runs", "logs", "base.toml", "compare.md", "compare.png"):
            if (own := out / name).exists():
                raise UserError(f"{own} is in the way: it is no comparison's. Give another --out.")
        return
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
        },
        "config": comparison.config.model_dump(mode="json", exclude=set(OWN)),
        "contents": comparison.contents,
    }


def read_report(path: Path) -> dict[str, Any]:
    """`compare.json`, as far as a later start needs it. Raises a UserError if it is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        whole = all(isinstance(found[key], dict) for key in ("asked", "config", "contents"))
        if whole and isinstance(found["runs"], list):
            return dict(found)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    raise UserError(f"{path} is no comparison's, or is damaged. Give another --out.")


def _command(
    recipes: str,
    seeds: int,
    out: str,
    baseline: str | None,
    flags: Mapping[str, Any],
    sets: Sequence[str],
) -> str:
    words = ["fp8stack", "compare", "--recipes", recipes]
    for key, value in flags.items():
        if value not in (None, False):
            flag = "--from" if key == "init_from" else f"--{key}"
            words += [flag] if value is True else [flag, str(value)]
    words += ["--seeds", str(seeds), *(["--baseline", baseline] if baseline else [])]
    for item in sets:
        words += ["--set", item]
    return shlex.join([*words, "--out", out])
