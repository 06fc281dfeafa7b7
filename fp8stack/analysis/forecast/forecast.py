"""`fp8stack forecast`: predicts the loss gap of training in each recipe from one trained model, and
the layers that cause it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fp8stack.analysis.forecast.law import Law, fitted
from fp8stack.analysis.forecast.result import NAME, WORST, Expected, ForecastResult
from fp8stack.analysis.forecast.sensitivity import Sensitivity, sensitivities
from fp8stack.common.errors import StorageError, UserError, quoted
from fp8stack.common.hub import path_in
from fp8stack.common.io import write_atomically
from fp8stack.common.terminal import warn
from fp8stack.layers import build_backend
from fp8stack.model.config import GPTConfig, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.planning.run_config import RunConfig
from fp8stack.precision import Hardware, Recipe, load_recipe, probe
from fp8stack.trained.evaluate.scores import nats_of
from fp8stack.trained.evaluate.windows import Windows, require_text, windows_for
from fp8stack.training.checkpoint.state import restore_weights
from fp8stack.training.load import Trained, find_source, tokenizer_of_run
from fp8stack.training.run_folder import RunFolder
from fp8stack.training.run_plans import context_of

RECIPES = ("nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp8", "rowwise", "block", "current", "delayed")
WINDOWS, LEAST_WINDOWS, BATCH = 128, 8, 32


@dataclass(frozen=True, kw_only=True)
class ForecastOptions:
    """The options of a forecast."""

    run: str  # a run, a checkpoint, hf:FOLDER or hf:owner/name
    recipes: Sequence[str] = RECIPES
    data: str | None = None  # see `windows_for`
    windows: int = WINDOWS
    tokens: int | None = None  # training tokens; None: those recorded in the run
    tokenizer: str | None = None
    device: str = "auto"


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedModel:
    """A trained model in float32, with held-out text and its loss on the text."""

    name: str
    checkpoint: str
    model: GPT
    tokens: int | None
    windows: Windows
    loss: float  # in nats per token, in float32
    rows: int  # rows of the run's GEMMs: tokens per micro-batch
    hardware: Hardware


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The forecast for a model: each recipe's sensitivity and expected gap."""

    trained: TrainedModel
    law: Law
    measured: dict[str, Sensitivity]
    recipes: tuple[Expected, ...]

    def result(self) -> ForecastResult:
        """The forecast as data."""
        trained = self.trained
        return ForecastResult(
            model=trained.name,
            checkpoint=trained.checkpoint,
            parameters=trained.model.config.parameters(),
            tokens=trained.tokens,
            data=trained.windows.name,
            windows=len(trained.windows.tokens),
            loss=trained.loss,
            law_runs=self.law.runs,
            recipes=self.recipes,
        )


def find_trained(request: ForecastOptions) -> tuple[Trained, int | None]:
    """Find the model of a request, without building it, and the number of its training tokens (None
    if unknown).

    Raises:
        UserError: bad input, see `find_source`; a bad number; or a folder of transformers without
            data.
    """
    if request.windows < LEAST_WINDOWS:
        raise UserError(f"--windows {request.windows} is too few. Use {LEAST_WINDOWS} or more.")
    if request.tokens is not None and request.tokens < 1:
        raise UserError(f"--tokens {request.tokens}: a model is trained on 1 or more.")
    source = find_source(request.run)
    require_text(request.run, source.config, request.data)
    for note in source.notes:
        warn(note)
    config, tokens = source.config or RunConfig(), request.tokens
    if tokens is None and source.checkpoint and not config.init_from:  # else unknown
        tokens = source.checkpoint.step * config.batch * context_of(config, source.shape)
    return source, tokens


def load_trained(request: ForecastOptions, source: Trained, tokens: int | None) -> TrainedModel:
    """Build the model that `find_trained` returned, and compute its loss on the text. For errors
    see `windows_for`."""
    hardware, config = probe(request.device), source.config or RunConfig()
    model = GPT(source.shape, build_backend(plan_for(source.shape, "fp32", hardware)))
    restore_weights(model, source.weights)
    model.to(hardware.device).eval()
    name = request.tokenizer or source.own_tokenizer
    tokenizer = tokenizer_of_run(request.run, name, source.recorded_tokenizer)
    windows = windows_for(
        request.run, config, source.shape, tokenizer, request.data, request.windows, None
    )
    nats = nats_of(model, windows.tokens, BATCH)
    return TrainedModel(
        name=request.run,
        checkpoint=Path(source.name).name,
        model=model,
        tokens=tokens,
        windows=windows,
        loss=nats.mean().item(),
        rows=config.batch // config.accumulate * context_of(config, source.shape),
        hardware=hardware,
    )


def forecast(
    request: ForecastOptions,
    tell: Callable[[str], None] = lambda line: None,
    *,
    require_covered: bool = False,
) -> Forecast:
    """Predict the loss gap of each requested recipe. If the law does not cover the model, print a
    warning before computing anything, and measure sensitivities without predicting gaps.

    Args:
        request: the model, the recipes and the data.
        tell: called with the name of each recipe once it is measured.
        require_covered: raise an error in place of the warning.

    Raises:
        UserError: the law does not cover the model and `require_covered` is set; or bad input, see
            `find_trained`, `load_trained` and `load_recipe`.
    """
    recipes = {name: load_recipe(name) for name in request.recipes}
    unquantized = [name for name, recipe in recipes.items() if not recipe.is_fp8]
    if unquantized:
        raise UserError(f"{', '.join(unquantized)}: nothing is quantized. Name other --recipes.")
    defaults = Recipe(name="").beside_linears
    for name, recipe in recipes.items():
        for key, value in recipe.beside_linears.items():
            if value != defaults[key]:
                note = f"{name}: the forecast is of linear layers, without {key} = '{value}'"
                warn(note)
    law = fitted()
    source, tokens = find_trained(request)
    if reason := uncovered(law, source.shape, tokens):
        if require_covered:
            raise UserError(f"No recipe can be tuned for {quoted(request.run)}: {reason}.")
        warn(f"cannot tell the gap of any recipe: {reason}; divergences are measured")
    trained = load_trained(request, source, tokens)
    measured: dict[str, Sensitivity] = {}
    windows = trained.windows.tokens
    for name, sensitivity in sensitivities(
        trained.model, recipes, windows, trained.hardware, BATCH
    ):
        measured[name] = sensitivity
        tell(name)
    forecasts = tuple(
        expected(name, sensitivity, trained, law) for name, sensitivity in measured.items()
    )
    return Forecast(trained=trained, law=law, measured=measured, recipes=forecasts)


def uncovered(law: Law, shape: GPTConfig, tokens: int | None, forward: float = 0.0) -> str:
    """Explain in a few words why the law does not apply; "" if it does. For `tokens` and `forward`
    see `Law.beyond`."""
    if shape.experts is not None:
        return "the law is of models without experts, and this has some"
    return law.beyond(shape.parameters(), tokens, forward)


def expected(name: str, measured: Sensitivity, trained: TrainedModel, law: Law) -> Expected:
    """The loss gap that the law predicts from a recipe's sensitivity."""
    reason = uncovered(law, trained.model.config, trained.tokens, measured.forward)
    worst = tuple(sorted(measured.layers, key=lambda path: -measured.layers[path])[:WORST])
    remaining = measured.without(worst)
    return Expected(
        recipe=name,
        gap=None if reason else law.gap(measured.forward, measured.backward),
        reason=reason,
        worst=worst,
        without_worst=None if reason else law.gap(remaining.forward, remaining.backward),
        forward=measured.forward,
        forward_layers=measured.layers,
        backward=measured.backward,
        backward_layers=measured.backward_layers,
    )


def keep(result: ForecastResult, run: str) -> Path | None:
    """Write the result to the run's folder, where `fp8stack report` reads it. Returns the path,
    or None if `run` is not a run's folder or, with a warning, if the file cannot be written.
    """
    if path_in(run) is not None or not RunFolder(Path(run)).holds_run:
        return None
    path = Path(run) / NAME
    try:
        write_atomically(path, (result.model_dump_json(indent=1) + "\n").encode())
    except StorageError as error:
        warn(f"fp8stack: the report will not show this: {error}")
        return None
    return path
