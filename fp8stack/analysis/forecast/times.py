"""Measures the time of each layer in each recipe on this machine, for `fp8stack tune`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from fp8stack.analysis.benchmark.layer_timing import Measure, side_by_side
from fp8stack.analysis.benchmark.timing import interleaved, ratio
from fp8stack.analysis.forecast.measured import TrainedModel
from fp8stack.layers.compiler import is_compiled
from fp8stack.precision import Recipe, resolve
from fp8stack.precision.profit import Shape

PLAIN = "bf16"
"""The precision of a layer that is not quantized."""
ROUNDS = 20

Pair = tuple[str, str]
"""The recipes of a layer's forward and backward pass."""
Times = Mapping[str, Mapping[Pair, float]]
"""Layer times by module path and recipes, as a share of the time of all layers in bf16."""


def time_shares(
    trained: TrainedModel,
    tell: Callable[[str], None],
    layers: Sequence[str],
    recipes: Mapping[Pair, Recipe],
    *,
    measure: Measure = interleaved,
) -> Times:
    """Measure the forward and backward pass of each layer in each recipe, with the number of tokens
    in a micro-batch of the model's run.

    Each distinct shape is measured in each recipe, alternating with bf16, by the backend that
    trains in the recipe on this machine, and compiled if bf16 would be.

    Args:
        trained: the model.
        tell: called with a line after each measurement.
        layers: module paths.
        recipes: recipes by the names of their forward and backward pass.
        measure: the function that times arms; tests pass their own.
    """
    hardware, config = trained.hardware, trained.model.config
    plain = resolve(PLAIN, hardware)
    compiled, _ = is_compiled(None, plain, hardware)
    plans = {pair: resolve(recipe, hardware) for pair, recipe in recipes.items()}
    sizes = config.linear_shapes()
    rows = dict.fromkeys(layers, trained.rows)
    if config.experts is not None:  # one matrix with all rows that the experts of a layer get
        rows |= dict.fromkeys(config.grouped, trained.rows * config.experts.per_token)
    shapes: dict[str, Shape] = {path: (rows[path], *sizes[path]) for path in layers}
    base: dict[Shape, float] = {}  # bf16's milliseconds
    ratios: dict[Shape, dict[Pair, float]] = {}
    for shape in dict.fromkeys(shapes.values()):
        base[shape], ratios[shape] = math.inf, {(PLAIN, PLAIN): 1.0}
        for pair, plan in plans.items():
            timings = side_by_side(
                {"bf16": plain, "recipe": plan},
                shape,
                config.bias,
                rounds=ROUNDS,
                compiled=compiled,
                measure=measure,
            )
            base[shape] = min(base[shape], timings["bf16"].fastest_ms)
            ratios[shape][pair] = ratio(timings["recipe"], timings["bf16"])
            tell("{} x {} -> {} in {}, {}".format(*shape, *pair))
    total = sum(base[shape] for shape in shapes.values())
    return {
        path: {pair: time_ratio * base[shape] / total for pair, time_ratio in ratios[shape].items()}
        for path, shape in shapes.items()
    }
