"""Checks what one recipe uses: each of its quantizers, its random rounding, its amax histories, and
the GEMMs of a linear with them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from fp8stack import numerics
from fp8stack.analysis.conform import oracles
from fp8stack.analysis.conform.check_inputs import amaxes, codes_and_ties
from fp8stack.analysis.conform.checks import Check, Context, Facts, merged, same_bits
from fp8stack.analysis.conform.gemms import QUICK, SHAPES, linear
from fp8stack.analysis.conform.histories import follow_updates
from fp8stack.analysis.conform.quantizers import DRAWN, MATRICES, checks_of
from fp8stack.common.formats import Quantizer
from fp8stack.common.quantizer_table import Quantizers
from fp8stack.numerics import RandomBits
from fp8stack.precision import Recipe
from fp8stack.precision.native_gemms import kernel_of

GIVEN_SCALES = (2.0, 3.0)
"""Scales for delayed scaling, by which the largest values overflow: a power of two, which keeps
ties, and one that is none."""
PASSES = 256
"""The passes over which random rounding is averaged."""
DEVIATIONS = 6.0
"""Standard errors that a mean may be off: for one in 500 million, 6."""


def _recipe(context: Context) -> Recipe:
    assert context.recipe is not None
    return context.recipe


def _quantizers(context: Context) -> dict[Quantizer, str | None]:
    """The quantizers of the recipe, with the kind of native GEMM of their table."""
    kinds: dict[Quantizer, str | None] = {}
    for table in _recipe(context).tables:
        for quantizer in table.each.values():
            kinds.setdefault(quantizer, kernel_of(table))
    return kinds


def quantizers_of_recipe(context: Context) -> Iterator[Check]:
    """Check the bytes, scales and values of each quantizer in every implementation: of every value
    of its format, ties and their neighbours, special values, and magnitudes of all of float32."""
    for quantizer, kernel in _quantizers(context).items():
        matrices = [(quantizer.format, "fp32"), *MATRICES]
        if not quantizer.delayed:
            yield from checks_of(context, str(quantizer), kernel, [quantizer], matrices)
            continue
        for scale in GIVEN_SCALES:
            name = f"{quantizer}, with a scale of {scale:g}"
            yield from checks_of(context, name, None, [quantizer], matrices, scale)


def random_rounding(context: Context) -> Iterator[Check]:
    """Check that random rounding repeats its draws, draws others in other passes, and has the exact
    value, clipped to the format's largest, as its mean."""
    for quantizer in _quantizers(context):
        if quantizer.stochastic:
            yield Check(f"{quantizer}, draws", partial(draws, context, quantizer))
            yield Check(f"{quantizer}, mean", partial(mean, context, quantizer))


def _codes(context: Context, x: torch.Tensor, quantizer: Quantizer, counter: int) -> torch.Tensor:
    """The codes of a matrix in the pass `counter`."""
    bits = RandomBits(*DRAWN[:2], torch.tensor(counter, device=context.device))
    scale = torch.tensor(GIVEN_SCALES[0], device=context.device) if quantizer.delayed else None
    return numerics.quantize(x, quantizer, 1, bits, scale=scale).data.view(torch.uint8).cpu()


def draws(context: Context, quantizer: Quantizer) -> Facts:
    """Check that a pass gives the same codes again, and that other passes differ."""
    x = codes_and_ties(quantizer.element, 64, 128, context.seed).to(context.device)
    first, again, next_pass = (_codes(context, x, quantizer, counter) for counter in (1, 1, 2))
    facts = same_bits({"codes of the same pass": (again, first)})
    differing = int((first != next_pass).sum())
    return facts | {"holds": facts["holds"] and differing > 0, "in_another_pass": differing}


def mean(context: Context, quantizer: Quantizer) -> Facts:
    """Check the mean of each element over many passes, and of all: within some standard errors of
    the exact value."""
    name, passes = quantizer.format, PASSES // 4 if context.quick else PASSES
    x = codes_and_ties(quantizer.element, 64, 128, context.seed)
    scale = GIVEN_SCALES[0] if quantizer.delayed else None
    zeros = partial(np.zeros, dtype=np.int64)
    reference = oracles.quantize(
        x.numpy(), quantizer, 1, bits=lambda *shape: zeros(shape), scale=scale
    )
    source = oracles.hadamard(x.numpy(), quantizer.hadamard, 1) if quantizer.hadamard else x.numpy()
    grid = oracles.grid(name)
    with np.errstate(over="ignore"):
        exact = np.abs((source * reference.into).astype(np.float64)).clip(max=grid[-1])
    below = np.searchsorted(grid, exact, side="right") - 1
    step = grid[np.minimum(below + 1, len(grid) - 1)] - grid[below]
    share = np.divide(exact - grid[below], step, out=np.zeros_like(exact), where=step > 0)
    error = step * np.sqrt(share * (1 - share) / passes)
    total = np.zeros_like(exact)
    on_device = x.to(context.device)
    for counter in range(passes):
        codes = unpacked(_codes(context, on_device, quantizer, counter).numpy(), quantizer)
        total += np.abs(oracles.decode(codes, name).astype(np.float64))
    # The count of a rare outcome is no normal variable: four draws more or less may pass.
    off = np.abs(total / passes - exact)
    worst = float((off / (DEVIATIONS * error + 4 * step / passes + 1e-300)).max())
    unit = np.maximum(step, grid[1])  # so that large elements do not hide others
    sum_of_all = abs(float(((total / passes - exact) / unit).sum()))
    bound = DEVIATIONS * float(np.sqrt(((error / unit) ** 2).sum())) + 1e-9
    return {
        "holds": worst <= 1 and sum_of_all <= bound,
        "checked": exact.size * passes,
        "worst": float(f"{worst:.3g}"),
        "of_all": float(f"{sum_of_all / bound:.3g}"),
    }


def unpacked(data: oracles.Array, quantizer: Quantizer) -> oracles.Array:
    """One code to an element, of an even number of columns; the inverse of `packed`."""
    if sum(oracles.layout(quantizer.format)[:2]) > 3:
        return data
    return np.stack([data % 16, data // 16], -1).reshape(len(data), -1)


def histories_of_recipe(context: Context) -> Iterator[Check]:
    """Check the window and the scale of each quantizer of delayed scaling over 40 updates."""
    for quantizer in _quantizers(context):
        if quantizer.delayed:
            yield Check(f"{quantizer}, updates", partial(history, context, quantizer))


def history(context: Context, quantizer: Quantizer) -> Facts:
    """Check the amax history of one quantizer."""
    recorded = amaxes(context.seed)[:40, None]
    return merged(follow_updates(context, {"x": quantizer}, recorded))


def gemms_of_recipe(context: Context) -> Iterator[Check]:
    """Check y, dx, dw and db of a linear with each table of quantizers, by backend."""
    recipe = _recipe(context)
    for number, table in enumerate(recipe.tables):
        rule = next((r for r in recipe.layers if r.quantizers == table), None)
        name = recipe.name if number == 0 or rule is None else f"{recipe.name}, '{rule.match}'"
        for shape in QUICK if context.quick else SHAPES:
            for backend in ("te", "torch", "emulate"):
                if backend == "te" and table.stochastic:
                    continue  # it does not show its random bits
                check = partial(linear, context, _alone(recipe, table), backend, shape)
                yield Check(f"{name} by {backend}, {shape}", check)


def _alone(recipe: Recipe, table: Quantizers) -> Recipe:
    """A recipe with one table of quantizers for all layers."""
    everywhere = {"layers": (), "exclude": (), "exclude_first_blocks": 0, "exclude_last_blocks": 0}
    return recipe.model_copy(
        update={"quantizers": table, "attention": "compute", "residual": "fp32", **everywhere}
    )
