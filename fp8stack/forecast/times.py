"""How long each layer takes in each recipe on this machine, for `fp8stack tune`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from fp8stack.backends.compiler import is_compiled
from fp8stack.benchmark.layer_timing import Measure, side_by_side
from fp8stack.benchmark.timing import interleaved, ratio
from fp8stack.forecast.forecast import Trained
from fp8stack.precision import Recipe, resolve
from fp8stack.precision.profit import Shape

PLAIN = "bf16"
"""The precision of a layer that is not quantized."""
ROUNDS = 20

Pair = tuple[str, str]
"""The recipes of a layer's forward and backward pass."""
Times = Mapping[str, Mapping[Pair, float]]
"""By module path and recipes, a layer's time as a share of the time of all layers in bf16."""


def time_shares(
    trained: Trained,
    tell: Callable[[str], None],
    layers: Sequence[str],
    recipes: Mapping[Pair, Recipe],
    *,
    measure: Measure = interleaved,
) -> Times:
    """Measure the forward and backward pass of each layer in each recipe, with as many tokens as a
    micro-batch of the model's run has.

    Each distinct shape is measured in each recipe, in turns with bf16, by the backend that trains
    in the recipe on this machine, compiled if bf16 would be.

    Args:
        trained: the model.
        tell: called with what was measured.
        layers: module paths.
        recipes: by the names of the recipes for the forward and the backward pass.
        measure: what times arms: `interleaved`, or a test's own.
    """
    hardware, config = trained.hardware, trained.model.config
    plain = resolve(PLAIN, hardware)
    compiled, _ = is_compiled(None, plain, hardware)
    plans = {pair: resolve(recipe, hardware) for pair, recipe in recipes.items()}
    sizes = config.linear_shapes()
    shapes: dict[str, Shape] = {path: (trained.rows, *sizes[path]) for path in layers}
    base: dict[Shape, float] = {}  # bf16's milliseconds
    ratios: dict[Shape, dict[Pair, float]] = {}
    for shape in dict.fromkeys(shapes.values()):
        base[shape], ratios[shape] = math.inf, {(PLAIN, PLAIN): 1.0}
        for pair, plan in plans.items():
            found = side_by_side(
                {"bf16": plain, "recipe": plan},
                shape,
                config.bias,
                rounds=ROUNDS,
                compiled=compiled,
                measure=measure,
            )
            base[shape] = min(base[shape], found["bf16"].fastest_ms)
            ratios[shape][pair] = ratio(found["recipe"], found["bf16"])
            tell("{} x {} -> {} in {}, {}".format(*shape, *pair))
    total = sum(base[shape] for shape in shapes.values())
    return {
        path: {pair: slower * base[shape] / total for pair, slower in ratios[shape].items()}
        for path, shape in shapes.items()
    }
