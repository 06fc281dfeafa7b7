"""The models that `fp8stack eval` evaluates, each with its recipes and its text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8stack.common.errors import UserError
from fp8stack.common.terminal import warn
from fp8stack.model.gpt import GPT
from fp8stack.planning.run_config import RunConfig
from fp8stack.precision import Hardware, probe
from fp8stack.trained.evaluate.served_folder import ServedFolder, is_folder, served_folder
from fp8stack.trained.evaluate.windows import Windows, require_text, windows_for
from fp8stack.training.load import Trained, find_source, name_of_run, tokenizer_of_run


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluatedRun:
    """A model, to be evaluated in several recipes on the same windows."""

    run: str  # as the user named it
    trained: Trained
    recipes: tuple[str, ...]  # as the user named them
    windows: Windows
    batch: int  # windows per forward pass
    hardware: Hardware
    backend: str
    folders: Mapping[str, ServedFolder]  # the recipes that are folders, by name

    def model(self, recipe: str) -> GPT:
        """The model in a recipe, see `Trained.model`; of a folder, the model in that folder."""
        if recipe in self.folders:
            return self.folders[recipe].model(self.hardware, self.backend)
        return self.trained.model(recipe, self.hardware, self.backend)


def evaluated_runs(
    runs: str | Path | Sequence[str | Path],
    recipes: Sequence[str],
    *,
    data: str | None,
    windows: int | None,
    context: int | None,
    batch: int | None,
    tokenizer: str | None,
    device: str,
    backend: str,
) -> Iterator[EvaluatedRun]:
    """Find the models and their text; for the arguments and errors see `evaluate`. Notes on a model
    are printed to stderr."""
    for name, value in (("windows", windows), ("context", context), ("batch", batch)):
        if value is not None and value < 1:
            raise UserError(f"--{name} {value} evaluates nothing. Use 1 or more.")
    hardware = probe(device)
    if isinstance(runs, str | Path) or not isinstance(runs, Iterable):
        runs = [runs]
    for run in map(name_of_run, runs):
        trained = find_source(run)
        for note in trained.notes:
            warn(note)
        require_text(run, trained.config, data)
        config = trained.config or RunConfig()
        chosen = tuple(recipes) or (trained.recipe,)
        folders = {name: served_folder(name, trained.shape) for name in chosen if is_folder(name)}
        for recipe in chosen:  # raise for any recipe before the first is evaluated
            if recipe in folders:
                folders[recipe].plan(hardware, backend)
            else:
                trained.plan(recipe, hardware, backend)
        tokenizer_name = tokenizer or trained.own_tokenizer
        run_tokenizer = tokenizer_of_run(run, tokenizer_name, trained.recorded_tokenizer)
        yield EvaluatedRun(
            run=run,
            trained=trained,
            recipes=chosen,
            windows=windows_for(run, config, trained.shape, run_tokenizer, data, windows, context),
            batch=batch or config.batch // config.accumulate,
            hardware=hardware,
            backend=backend,
            folders=folders,
        )
