"""`fp8stack forecast RUN`: the sensitivities of a trained model, which place recipes that no source
trains with, and name the layers that cause a gap."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fp8stack.analysis.forecast.forecast import (
    RECIPES,
    expectation,
    forecast_of_shape,
    load_recipes,
    remarks,
)
from fp8stack.analysis.forecast.law import Law, fitted
from fp8stack.analysis.forecast.result import (
    NAME,
    WORST,
    Expected,
    ForecastResult,
    Gap,
    Measured,
)
from fp8stack.analysis.forecast.sensitivity import Sensitivity, sensitivities
from fp8stack.analysis.forecast.severity import RecipeSeverity, severity_of
from fp8stack.common.errors import StorageError, UserError, quoted
from fp8stack.common.hub import path_in
from fp8stack.common.io import write_atomically
from fp8stack.common.terminal import warn
from fp8stack.layers import build_backend
from fp8stack.model.config import plan_for
from fp8stack.model.gpt import GPT
from fp8stack.planning.run_config import RunConfig
from fp8stack.precision import Hardware, load_recipe, probe
from fp8stack.trained.evaluate.scores import nats_of
from fp8stack.trained.evaluate.windows import Windows, require_text, windows_for
from fp8stack.training.checkpoint.state import restore_weights
from fp8stack.training.load import Trained, find_source, tokenizer_of_run
from fp8stack.training.run_folder import RunFolder
from fp8stack.training.run_plans import context_of

WINDOWS, LEAST_WINDOWS = 128, 8
REFERENCE = "nvfp4"
BY_DIVERGENCE = "by its divergence and its backward error on this model, relative to NVFP4's"


@dataclass(frozen=True, kw_only=True)
class ForecastOptions:
    """The options of a forecast for a trained model."""

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
class ModelLaw:
    """The law for one trained model: severities by sensitivities.

    Attributes:
        law: the law.
        ratio: training tokens per active parameter.
        reference: the sensitivity to NVFP4.
        severity_of_reference: NVFP4's severity for the model's shape.
    """

    law: Law
    ratio: float
    reference: Sensitivity
    severity_of_reference: float

    @property
    def forward(self) -> float:
        """The severity of a divergence of 1 nat per token, to be raised to the law's power."""
        share = self.severity_of_reference * self.law.forward
        return float(share / self.reference.forward**self.law.power)

    @property
    def backward(self) -> float:
        """The severity of a backward error of 1."""
        return self.severity_of_reference * (1 - self.law.forward) / self.reference.backward

    def severity(self, forward: float, backward: float) -> float:
        """The severity of sensitivities; for the arguments see `Sensitivity`."""
        return float(self.forward * forward**self.law.power + self.backward * backward)

    def gap(self, severity: float) -> Gap:
        """The expected gap in percent of the loss."""
        return self.law.gap(self.ratio, severity)

    def largest_severity(self, percent: float) -> float:
        """The largest severity whose gap is at most `percent`, interval included."""
        low, high = -30.0, 10.0  # logarithms
        for _ in range(60):
            middle = (low + high) / 2
            below = self.gap(math.exp(middle)).high <= percent
            low, high = (middle, high) if below else (low, middle)
        return math.exp(low)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The forecast for a trained model.

    Attributes:
        trained: the model.
        law: the law for the model.
        measured: the sensitivity to each requested recipe, by name.
        result: the forecast as data.
    """

    trained: TrainedModel
    law: ModelLaw
    measured: dict[str, Sensitivity]
    result: ForecastResult


def find_trained(request: ForecastOptions) -> tuple[Trained, int | None]:
    """Find the model of a request, without building it, and the number of its training tokens (None
    if unknown).

    Raises:
        UserError: bad input, see `find_source`; a bad number; or a folder of transformers without
            data.
    """
    if request.windows < LEAST_WINDOWS:
        raise UserError(f"--windows {request.windows} is too few. Use {LEAST_WINDOWS} or more.")
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
        request.run,
        config,
        source.shape,
        tokenizer,
        request.data,
        request.windows,
        None,
        source.data,
    )
    nats = nats_of(model, windows.tokens, windows.usual_batch)
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


def forecast(request: ForecastOptions, tell: Callable[[str], None] = lambda line: None) -> Forecast:
    """Predict the loss gap of each requested recipe, and measure the layers that cause it.

    Args:
        request: the model, the recipes and the data.
        tell: called with the name of each recipe once it is measured.

    Raises:
        UserError: bad input, see `load_recipes`, `find_trained` and `load_trained`.
    """
    recipes = load_recipes(request.recipes)
    trained = load_trained(request, *find_trained(request))
    measured: dict[str, Sensitivity] = {}
    for name, sensitivity in sensitivities(
        trained.model,
        {REFERENCE: load_recipe(REFERENCE)} | recipes,
        trained.windows.tokens,
        trained.hardware,
        trained.windows.usual_batch,
    ):
        measured[name] = sensitivity
        tell(name)
    if not (measured[REFERENCE].forward and measured[REFERENCE].backward):
        raise UserError(
            f"{quoted(request.run)}: {REFERENCE} changes nothing in this model, and other recipes "
            "are placed relative to it. Give a trained model."
        )
    config, law = trained.model.config, fitted()
    by_shape = forecast_of_shape(request.run, config, recipes, trained.tokens, law)
    reference = severity_of(load_recipe(REFERENCE), config, law)
    assert reference.value is not None
    model_law = ModelLaw(
        law=law,
        ratio=by_shape.tokens / by_shape.active_parameters,
        reference=measured[REFERENCE],
        severity_of_reference=reference.value,
    )
    expectations = tuple(
        expected(severity_of(recipe, config, law), name, measured[name], trained, model_law)
        for name, recipe in recipes.items()
    )
    result = by_shape.model_copy(
        update={
            "checkpoint": trained.checkpoint,
            "loss": trained.loss,
            "loss_source": f"{len(trained.windows.tokens)} windows of {trained.windows.name}",
            "recipes": expectations,
            "remarks": tuple(remarks(config, trained.tokens, by_shape.tokens, expectations, law)),
        }
    )
    requested = {name: measured[name] for name in recipes}
    return Forecast(trained=trained, law=model_law, measured=requested, result=result)


def expected(
    by_shape: RecipeSeverity,
    name: str,
    measured: Sensitivity,
    trained: TrainedModel,
    law: ModelLaw,
) -> Expected:
    """The forecast for a recipe: its severity by published gaps if there is one, else by its
    sensitivity."""
    by_sensitivity = law.severity(measured.forward, measured.backward)
    severity = by_shape
    if by_shape.value is None:
        notes = (*by_shape.notes, BY_DIVERGENCE)
        severity = replace(by_shape, value=by_sensitivity, recipes=(REFERENCE,), notes=notes)
    forecast_of_all = expectation(name, severity, law.law, law.ratio, trained.loss)
    worst = tuple(sorted(measured.layers, key=lambda path: -measured.layers[path])[:WORST])
    remaining = measured.without(worst)
    without_worst = None
    if severity.value is not None and by_sensitivity:
        share = law.severity(remaining.forward, remaining.backward) / by_sensitivity
        without_worst = law.gap(severity.value * share)
    return forecast_of_all.model_copy(
        update={
            "measured": Measured(
                forward=measured.forward,
                forward_layers=measured.layers,
                backward=measured.backward,
                backward_layers=measured.backward_layers,
                worst=worst,
                without_worst=without_worst,
            )
        }
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
