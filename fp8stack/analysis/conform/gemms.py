"""The rows of GEMMs: each backend and recipe, forward and backward, against exact operands.

The oracle multiplies the operands of `oracles.quantize` in float64, so the remaining error is
rounding. A float32 sum of K products, in any order, is off by at most K 2^-24 of the sum of their
magnitudes, and the output is rounded once more, with a bias twice. Tensor cores add FP8 products
with fewer bits: see `accumulation`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import accumulate, product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fp8stack.analysis.conform import oracles
from fp8stack.analysis.conform.accumulation import accumulation_error
from fp8stack.analysis.conform.casts import RECIPES
from fp8stack.analysis.conform.checks import (
    ROUNDOFF,
    Bounded,
    Context,
    Results,
    Row,
    Share,
    backend_for,
    mark_weights_changed,
    plan_of,
    within,
)
from fp8stack.common.formats import Quantizer
from fp8stack.common.quantizer_table import OPERANDS, Operand, Quantizers
from fp8stack.layers import build_backend
from fp8stack.model.config import GPTConfig
from fp8stack.model.gpt import GPT
from fp8stack.precision import Recipe, load_recipe

BACKENDS = ("te", "torch", "emulate")
QUANTIZED_SHARE = 0.2
"""The norm of a model's errors by FP8 as a share, 14 dB; a wrong scale gives more than 0.3."""
# The number of steps of 32 products whose sum is added up in float32, with slow accumulation.
_PROMOTED = 4


class Shape(NamedTuple):
    """A linear and its operands.

    Attributes:
        rows: the rows of the input.
        inputs: the features of the input.
        outputs: the features of the output.
        bias: whether it has a bias.
        groups: the rows of each group of a grouped linear, such as experts are.
        operands: "wide", columns of many magnitudes; "positive", so that accumulation errors cannot
            cancel; or "ones" and zeros, of which also tensor cores add up 8,192 exactly.
    """

    rows: int
    inputs: int
    outputs: int
    bias: bool
    groups: tuple[int, ...] = ()
    operands: Literal["wide", "positive", "ones"] = "wide"

    def __str__(self) -> str:
        operands = f"{self.operands}, " if self.operands != "wide" else ""
        groups = f", groups of {', '.join(map(str, self.groups))}" if self.groups else ""
        bias = " + bias" if self.bias else ""
        return f"{operands}{self.rows} x {self.inputs} -> {self.outputs}{bias}{groups}"


SHAPES = (
    Shape(48, 128, 256, True),
    Shape(384, 512, 768, False),
    Shape(200, 256, 128, True),  # rows that no FP8 GEMM takes, so they are padded
    Shape(33, 50, 70, True),  # features that no FP8 GEMM takes
)
LONG = 8192
"""The products of a sum of a long GEMM; an eighth of them in the short form."""
GROUPED = Shape(96, 128, 128, True, (48, 0, 33, 15))
MODEL = GPTConfig(vocabulary=256, context=128, layers=1, width=256, heads=4)


def gemms(context: Context) -> Iterator[Row]:
    """Linears by backend and recipe, those with long sums too, and models of one block. With fast
    accumulation, of the forward pass, the bound of long sums is wide, so sums that lose nothing are
    checked as well."""
    shapes = SHAPES[:1] if context.quick else SHAPES
    if context.recipe is not None:
        for recipe in _tables_of(context.recipe):
            for shape in shapes:
                yield from (linear(context, recipe, name, shape) for name in BACKENDS)
        return
    recipes = [load_recipe(name) for name in RECIPES]
    K = LONG // 8 if context.quick else LONG
    for sizes in ((128, K, 128), (K, 128, 128)):  # long sums in fprop, and in wgrad
        long, ones = (Shape(*sizes, False, operands=kind) for kind in ("positive", "ones"))
        for recipe, backend in product(recipes, BACKENDS[:2]):
            yield linear(context, recipe, backend, long)
            if not _two_levels(recipe):
                yield linear(context, recipe, backend, ones)
    for shape in shapes:
        yield linear(context, load_recipe("bf16"), "reference", shape)
        for recipe in recipes:
            yield from (linear(context, recipe, name, shape) for name in BACKENDS)
    if context.quick:
        return
    for recipe in recipes[:4]:
        for backend in BACKENDS[1:]:
            yield linear(context, recipe, backend, SHAPES[0], compiled=True)
        yield from (model(context, recipe, backend) for backend in BACKENDS)


def groups(context: Context) -> Iterator[Row]:
    """Grouped linears by backend and recipe, a group without rows included."""
    for recipe in map(load_recipe, RECIPES):
        yield from (linear(context, recipe, name, GROUPED) for name in BACKENDS)


def _sum_error(context: Context, magnitudes: Tensor, terms: int) -> Tensor:
    """The error of a float32 sum of `terms` products, whose magnitudes add up to `magnitudes`."""
    share = (terms + 8) * 2.0**-24
    if context.device == "cuda":
        share *= 4  # tensor cores may truncate
    return share * magnitudes


def _core_error(context: Context, a: Tensor, b: Tensor, fast: bool, powers: bool) -> Tensor:
    """The error that tensor cores add in `a @ b.t()`, see `accumulation_error`; 0 on a CPU. Scales
    are `powers` of two."""
    if context.device == "cpu":
        return a.new_zeros(())
    a, b = a.to(context.device), b.to(context.device)
    return accumulation_error(a, b, None if fast else _PROMOTED, exact=powers).cpu()


# Linears, grouped or not


class Layer(NamedTuple):
    """A layer of a recipe, and its operands, see `_operands`."""

    module: nn.Module
    recipe: Recipe
    tensors: dict[str, Tensor]


def linear(
    context: Context, recipe: Recipe, backend: str, shape: Shape, compiled: bool = False
) -> Row:
    """y, dx, dw and db of a linear in FP8, FP6, FP4 or, for comparison, bf16. A group of a grouped
    linear is a linear of its own rows."""
    passes = 3 if recipe.delayed else 1  # until the scales are found

    def inputs() -> Iterator[tuple[str, Layer]]:
        chosen = _rounding_to_nearest(recipe) if backend == "te" else recipe
        plan, sizes = plan_of(chosen, context, backend), shape[1:4]
        built = backend_for(plan, {"linear": sizes[:2]}, len(shape.groups))
        rules = chosen.quantizers.each.values() if chosen.quantizers else ()
        tensors = _operands(shape, context.seed, any(q.hadamard for q in rules))
        module: nn.Module
        if shape.groups:
            module = built.grouped_linear("linear", len(shape.groups), *sizes)
        else:
            module = built.linear("linear", *sizes)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(tensors[name].view(parameter.shape))
        built.attach(module)
        yield "", Layer(module.to(context.device), chosen, tensors)

    def computed(case: Layer) -> Results:
        x, dy = (case.tensors[name].to(context.device) for name in ("input", "grad_output"))
        called: Any = context.compiled(case.module) if compiled else case.module
        if shape.groups:
            offs = torch.tensor([*accumulate(shape.groups)], dtype=torch.int32)
            called = partial(_with_offs, called, offs.to(context.device))
        for _ in range(passes):
            results = one_pass(case.module, called, x, dy)
        return {{"dweight": "dw", "dbias": "db"}.get(name, name): x for name, x in results.items()}

    def exact(case: Layer) -> Results:
        of_groups = _exact(context, case, backend, shape, passes - 1)
        joined: dict[str, Bounded] = {}
        for name in of_groups[0]:
            fields = zip(*(results[name] for results in of_groups), strict=True)
            join: Any = torch.cat if name in ("y", "dx") or not shape.groups else torch.stack
            joined[name] = Bounded(*map(join, fields))
        return joined

    name = f"{recipe.name} by {backend}{', compiled' * compiled}, {shape}"
    return Row("groups" if shape.groups else "gemms", name, computed, exact, inputs, within)


def _with_offs(called: Any, offs: Tensor, x: Tensor) -> Tensor:
    y: Tensor = called(x, offs)
    return y


def _tables_of(recipe: Recipe) -> Iterator[Recipe]:
    """A recipe for each table of quantizers, which all layers have, named by its first layers."""
    everywhere = {"layers": (), "exclude": (), "exclude_first_blocks": 0, "exclude_last_blocks": 0}
    everywhere |= {"attention": "compute", "residual": "fp32"}
    for number, table in enumerate(recipe.tables):
        rule = next((r for r in recipe.layers if r.quantizers == table), None)
        name = recipe.name if number == 0 or rule is None else f"{recipe.name}, '{rule.match}'"
        yield recipe.model_copy(update={"name": name, "quantizers": table, **everywhere})


def _rounding_to_nearest(recipe: Recipe) -> Recipe:
    """The recipe without random rounding, whose bits TE does not show."""
    table = recipe.quantizers
    if table is None or not table.stochastic:
        return recipe
    rules = {field.name: getattr(table, field.name) for field in dataclasses.fields(table)}
    for name, quantizer in rules.items():
        if isinstance(quantizer, Quantizer):
            rules[name] = dataclasses.replace(quantizer, rounding="nearest")
    return recipe.model_copy(update={"quantizers": Quantizers(**rules)})


@lru_cache(maxsize=8)
def _operands(shape: Shape, seed: int, transformed: bool) -> dict[str, Tensor]:
    """x, dy, and the weight and the bias of each group, bfloat16 on the CPU: eight-bit integers
    times powers of two. Columns of x and dy differ in magnitude: by 2^28, to reveal the direction
    of blocks, or by 2^6, which keeps the sums of a Hadamard transform exact. The rows of groups
    differ by 2^4."""
    generator = torch.Generator().manual_seed(seed + 5)
    groups = shape.groups or (shape.rows,)
    sizes = {
        "input": (shape.rows, shape.inputs),
        "weight": (len(groups), shape.outputs, shape.inputs),
        "grad_output": (shape.rows, shape.outputs),
        "bias": (len(groups), shape.outputs),
    }
    factors = {"input": 0, "weight": -6, "grad_output": -10, "bias": -6}
    operands = {
        name: (32 * torch.randn(size, generator=generator)).round().clamp(-255, 255)
        * 2.0 ** (factors[name] - 5)
        for name, size in sizes.items()
    }
    group = torch.arange(len(groups)).repeat_interleave(torch.tensor(groups))
    for name in ("input", "grad_output"):
        column = torch.arange(operands[name].shape[1])
        powers = column % 7 - 3 if transformed else 5 * column % 29 - 14
        operands[name] *= 2.0 ** (powers * (shape.operands == "wide"))
        operands[name] /= 16.0 ** group[:, None]
    # 1.75 is the significand of 448 and of 57344, so scales are powers of two. No two such elements
    # are multiplied with each other: the product would need more bits than the others.
    largest = {"input": (0, 0), "weight": (0, 0, 1), "grad_output": (1, 1), "bias": (0, 0)}
    for name, index in largest.items() if shape.operands != "wide" else ():
        x = operands[name].abs()
        positive = x if shape.operands == "positive" else (x > x.median()).float()
        positive[index] = 1.75 * 2.0 ** (positive.max() / 1.75).log2().ceil()
        operands[name] = positive
    return {name: x.bfloat16() for name, x in operands.items()}


def one_pass(module: nn.Module, called: Any, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The output of one pass, "y", and the gradients of the input, "dx", and of each parameter."""
    mark_weights_changed(module)
    x = x.detach().clone().requires_grad_()
    y = called(x)
    y.backward(dy.to(y.dtype))
    assert x.grad is not None
    gradients = {f"d{name}": p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "dx": x.grad} | gradients


def _exact(
    context: Context, case: Layer, backend: str, shape: Shape, counter: int
) -> list[dict[str, Bounded]]:
    """y, dx, dw and db of each group in float64, of the pass `counter`. Without groups, dw and db
    are of the shape of the parameters."""
    draws = getattr(getattr(case.module, "operands", None), "draws", None)
    groups, by_group = shape.groups or (shape.rows,), []
    for group, last in enumerate(accumulate(groups)):
        rows = slice(last - groups[group], last)
        operands: dict[Operand, Tensor] = {
            "input": case.tensors["input"][rows],
            "weight": case.tensors["weight"][group],
            "grad_output": case.tensors["grad_output"][rows],
        }
        x, w, dy = (
            [
                _multiplied(case.recipe, operands[name], name, dim, draws, counter, group)
                for dim in (1, 0)
            ]
            for name in OPERANDS
        )
        bias = case.tensors["bias"][group].double() if shape.bias else torch.zeros(())
        pairs = {"y": (x[0], w[0].t()), "dx": (dy[0], w[1]), "dw": (dy[1].t(), x[1])}
        bounded = {}
        for name, (a, b) in pairs.items():
            value, magnitudes = a @ b, a.abs() @ b.abs()
            rounded = value.abs()
            if name == "y":
                value, magnitudes = value + bias, magnitudes + bias.abs()
                rounded = value.abs()
                if shape.bias:  # the product may be rounded before the bias is added
                    rounded = 2 * value.abs() + bias.abs()
            error = torch.zeros_like(value)
            if shape.operands != "ones":
                error = _sum_error(context, magnitudes, a.shape[1])
            if shape.operands != "ones" and backend in ("te", "torch"):
                powers = shape.operands == "positive" and not _two_levels(case.recipe)
                error = error + _core_error(context, a, b.t(), fast=name == "y", powers=powers)
            bounded[name] = Bounded(value, error, rounded)
        if shape.bias:
            dy_rows = operands["grad_output"].double()
            value, error = dy_rows.sum(0), _sum_error(context, dy_rows.abs().sum(0), len(dy_rows))
            bounded["db"] = Bounded(value, error, value.abs())
        if not _keeps_float32(context, backend, shape):
            for name in bounded.keys() - {"y", "dx"}:
                value, error, rounded = bounded[name]
                error = error + ROUNDOFF[torch.bfloat16] * rounded
                bounded[name] = Bounded(value, error, rounded)
        by_group.append(bounded)
    return by_group


def _two_levels(recipe: Recipe) -> bool:
    """Whether scales are no powers of two, of "positive" operands too (NVFP4)."""
    return any(q.scale == "e4m3" for table in recipe.tables for q in table.each.values())


def _keeps_float32(context: Context, backend: str, shape: Shape) -> bool:
    """Whether no gradient of a parameter is rounded to bfloat16 before it is float32."""
    if shape.groups:
        return backend == "emulate" and context.device == "cpu"
    return backend in ("emulate", "torch")


def _multiplied(
    recipe: Recipe, x: Tensor, name: Operand, dim: int, draws: Any, counter: int, group: int
) -> Tensor:
    """The values of an operand in the GEMM that reduces it over `dim`, in float64."""
    table = recipe.quantizers or Quantizers()
    quantizer = table.rowwise(name) if dim == 1 else table.columnwise(name)
    if quantizer == "forward":
        quantizer, dim = table.rowwise(name), 1
    if not isinstance(quantizer, Quantizer) or not len(x):
        return x.double()
    scale = None
    if quantizer.delayed:
        slot = oracles.DelayedSlot(quantizer.format, 2, quantizer.margin)
        slot.record(oracles.amax(x.float().numpy()).item())
        slot.update()
        scale = slot.scale
    return multiplied(x, quantizer, name, dim, draws, scale, counter, group)


def multiplied(
    x: Tensor,
    quantizer: Quantizer,
    name: Operand,
    dim: int,
    draws: Any = None,
    scale: float | None = None,
    counter: int = 0,
    group: int = 0,
) -> Tensor:
    """The values of the operand `name` in a GEMM that reduces it over `dim`, in float64. `draws`
    are the layer's, in the pass `counter`; `scale` is delayed scaling's."""
    bits = None
    if quantizer.stochastic:
        drawn = draws.bits(name, dim == 0, len(x))
        stream = torch.as_tensor(drawn.stream).reshape(-1)[group]
        bits = partial(oracles.philox, drawn.seed, int(stream), counter)
    values, largest = x.float().numpy(), torch.finfo(x.dtype).max
    quantized = oracles.quantize(values, quantizer, dim, overflow=largest, bits=bits, scale=scale)
    return torch.from_numpy(quantized.exact)  # Hadamard transforms of both operands cancel


# Models, whose norms and MLPs TE fuses


def model(context: Context, recipe: Recipe, backend: str) -> Row:
    """Outputs and gradients of a GPT of one block against plain torch in float32."""

    def inputs() -> Iterator[tuple[str, list[GPT]]]:
        shapes, models = MODEL.linear_shapes(), []
        for chosen, name in ((recipe, backend), (load_recipe("fp32"), "reference")):
            plan = plan_of(chosen, context, name)
            backend_for(plan, {k: v for k, v in shapes.items() if k != "lm_head"})
            models.append(GPT(MODEL, build_backend(plan.for_layers(shapes))).to(context.device))
        yield "", models

    def run(gpt: GPT, passes: int) -> Results:
        generator = torch.Generator().manual_seed(context.seed + 6)
        tokens = torch.randint(MODEL.vocabulary, (2, 129), generator=generator).to(context.device)
        for _ in range(passes):
            mark_weights_changed(gpt)
            gpt(tokens[:, :-1], tokens[:, 1:]).backward()
        return {name: p.grad for name, p in gpt.named_parameters() if p.grad is not None}

    def computed(case: list[GPT]) -> Results:
        return run(case[0], 3 if recipe.delayed else 1)

    def expected(case: list[GPT]) -> Results:
        gradients = run(case[1], 1).items()
        return {name: Share(x.double().cpu(), QUANTIZED_SHARE) for name, x in gradients}

    name = f"a model in {recipe.name} by {backend}"
    return Row("gemms", name, computed, expected, inputs, within)
