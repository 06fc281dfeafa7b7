"""The models that `fp8stack eval` evaluates, each with its recipes and its text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8stack.common.errors import UserError, quoted
from fp8stack.common.terminal import warn
from fp8stack.model.gpt import GPT
from fp8stack.planning.run_config import RunConfig
from fp8stack.precision import Hardware, probe
from fp8stack.precision.system_memory import available_memory
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
    at_once: int = 1,
) -> Iterator[EvaluatedRun]:
    """Find the models and their text; for the arguments and errors see `evaluate`. Of several, all
    models and recipes are tried before the first is evaluated. Notes on a model are printed to
    stderr. The logits of so many recipes are needed `at_once`."""
    for name, value in (("windows", windows), ("context", context), ("batch", batch)):
        if value is not None and value < 1:
            raise UserError(f"--{name} {value} evaluates nothing. Use 1 or more.")
    hardware = probe(device)
    if isinstance(runs, str | Path) or not isinstance(runs, Iterable):
        runs = [runs]
    names = [*map(name_of_run, runs)]
    for run in names if len(names) > 1 else []:
        _found(run, recipes, data, hardware, backend)
    for run in names:
        trained, folders = _found(run, recipes, data, hardware, backend)
        for note in trained.notes:
            warn(note)
        config = trained.config or RunConfig()
        tokenizer_name = tokenizer or trained.own_tokenizer
        run_tokenizer = tokenizer_of_run(run, tokenizer_name, trained.recorded_tokenizer)
        run_windows = windows_for(
            run, config, trained.shape, run_tokenizer, data, windows, context, trained.data
        )
        usual = config.batch // config.accumulate if trained.config else run_windows.usual_batch
        count = min(batch or usual, len(run_windows.tokens))
        length = run_windows.tokens.shape[-1] - 1
        _require_memory(count, length, at_once * trained.shape.vocabulary, hardware.device)
        for name, folder in folders.items():
            _require_context(name, folder, length)
        yield EvaluatedRun(
            run=run,
            trained=trained,
            recipes=tuple(recipes) or (trained.recipe,),
            windows=run_windows,
            batch=count,
            hardware=hardware,
            backend=backend,
            folders=folders,
        )


def _found(
    run: str, recipes: Sequence[str], data: str | None, hardware: Hardware, backend: str
) -> tuple[Trained, dict[str, ServedFolder]]:
    """The model of a run, and the recipes that are folders, by name. Raises a UserError if one
    cannot be used."""
    trained = find_source(run)
    require_text(run, trained.config, data)
    folders = {name: served_folder(name, trained.shape) for name in recipes if is_folder(name)}
    for recipe in recipes or (trained.recipe,):
        if recipe in folders:
            folders[recipe].plan(hardware, backend)
        else:
            trained.plan(recipe, hardware, backend)
    return trained, folders


def _require_context(name: str, folder: ServedFolder, length: int) -> None:
    """Raise a UserError if windows of `length` tokens are longer than a folder's context."""
    context = folder.shape.context
    if length > context:
        raise UserError(
            f"The context of '{quoted(name)}' is {context}, and the windows have {length} tokens. "
            f"Give --context {context}."
        )


def _require_memory(windows: int, context: int, logits: int, device: str) -> None:
    """Raise a UserError if so many `logits` of each token, in float32, do not fit into memory."""
    size, free = 4 * windows * context * logits, available_memory(device)
    if free is not None and size > free:
        raise UserError(
            f"The logits of {windows} x {context} tokens take {size / 2**30:,.1f} GiB, and "
            f"{free / 2**30:,.1f} GiB are left. Give a smaller --batch or --context."
        )
