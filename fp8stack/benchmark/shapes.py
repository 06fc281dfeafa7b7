"""`fp8stack bench shapes`: what FP8 gains for each linear of a model, on this GPU."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fp8stack.backends import build_backend
from fp8stack.backends.base import DTYPES
from fp8stack.backends.compiler import require_compiler
from fp8stack.benchmark.timing import Arm, Timing, interleaved
from fp8stack.errors import UserError
from fp8stack.model.config import GPTConfig, padded_vocabulary
from fp8stack.precision import Hardware, Plan, resolve
from fp8stack.precision.profit import Shape
from fp8stack.precision.shapes import save_measured
from fp8stack.tables import markdown

Measure = Callable[..., Mapping[str, Timing]]
"""What times arms: `fp8stack.benchmark.timing.interleaved`, or a test's own."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Forward and backward of a linear."""

    shape: Shape
    layers: int  # of the model that have this shape
    bf16: Timing
    fp8: Timing

    @property
    def ratio(self) -> float:
        """bf16's median time / FP8's: above 1 where FP8 is faster."""
        return self.bf16.median_ms / self.fp8.median_ms


def native_plan(recipe: str, hardware: Hardware, backend: str = "auto") -> Plan:
    """The plan to measure. Raises a UserError if it is not native FP8, so that there is nothing to
    compare, or torch.compile does not work here, and what `resolve` raises."""
    plan = resolve(recipe, hardware, backend)
    if not (plan.is_fp8 and plan.native):
        why = plan.reasons[0] if plan.reasons else f"{recipe} runs as {plan.recipe.name}"
        raise UserError(f"bench shapes needs FP8 in hardware, to compare it with bf16: {why}.")
    try:
        require_compiler(resolve("bf16", hardware))
    except UserError as error:
        raise UserError(
            "bench shapes measures compiled layers, and torch.compile lacks something here. "
            "Install triton, a C compiler and Python's headers."
        ) from error
    return plan


def measure_shapes(
    config: GPTConfig,
    plan: Plan,
    hardware: Hardware,
    *,
    tokens: int,
    rounds: int,
    compiled: bool = True,
    measure: Measure = interleaved,
) -> list[Measured]:
    """Every distinct linear of the model that `plan`'s backend can run in FP8, beside bf16; the
    head too, whether the recipe has it in FP8 or not. The GEMMs have `tokens` rows and are timed
    `rounds` times by `measure`. If `compiled`, what torch.compile makes of a layer is measured,
    Transformer Engine's excepted."""
    vocabulary = padded_vocabulary(config, plan.vocabulary_multiple)
    names: dict[tuple[int, int], list[str]] = {}
    for name, sizes in config.linear_shapes(vocabulary).items():
        if _in_fp8(plan, {name: sizes}).runs_fp8:
            names.setdefault(sizes, []).append(name)
    plans, results = {"bf16": resolve("bf16", hardware), "fp8": plan}, []
    for sizes, of in names.items():
        shape = (tokens, *sizes)
        timings = side_by_side(
            plans,
            shape,
            config.bias and of != ["lm_head"],
            rounds=rounds,
            compiled=compiled,
            measure=measure,
        )
        results.append(Measured(shape=shape, layers=len(of), **timings))
    return results


def side_by_side(
    plans: Mapping[str, Plan],
    shape: Shape,
    bias: bool,
    *,
    rounds: int,
    compiled: bool,
    measure: Measure = interleaved,
) -> dict[str, Timing]:
    """The forward and backward pass of a linear of this shape in each of `plans`, whatever layers
    their recipes leave out. For the other arguments see `measure_shapes`."""
    copies = dict.fromkeys(map(str, range(_copies(shape))), shape[1:])
    arms = {
        name: _arm(_in_fp8(plan, copies), shape, bias, compiled) for name, plan in plans.items()
    }
    device = next(iter(plans.values())).device
    timings = measure(arms, rounds=rounds, device=device)
    return {name: _divided(timing, len(copies)) for name, timing in timings.items()}


def _in_fp8(plan: Plan, shapes: Mapping[str, tuple[int, int]]) -> Plan:
    """`plan` for layers that nothing but their shape can keep out of FP8."""
    everything = {"exclude": (), "exclude_first_blocks": 0, "exclude_last_blocks": 0}
    recipe = plan.recipe.model_copy(update=everything)
    # Not by way of "auto", which would turn to bf16 for a shape that cannot be served.
    alone = replace(plan, recipe=recipe, asked=recipe.name, strict=False, layers=())
    return alone.for_layers(shapes, heads=())


def _copies(shape: Shape) -> int:
    """How many linears of a shape are measured as one model: what a model does once per pass is
    shared by its layers, and kernels are launched while others run. Fewer where memory is short."""
    tokens, inputs, outputs = shape
    elements = inputs * outputs + tokens * (inputs + outputs)
    return max(1, min(8, 2**30 // elements))


def _divided(timing: Timing, copies: int) -> Timing:
    names = ("median_ms", "low_ms", "high_ms", "fastest_ms")
    return replace(timing, **{name: getattr(timing, name) / copies for name in names})


class _SideBySide(nn.Module):
    """Linears with inputs of their own, so that no cast serves two of them."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return [layer(x) for layer, x in zip(self.layers, inputs, strict=True)]


def _arm(plan: Plan, shape: Shape, bias: bool, compiled: bool) -> Arm:
    """One pass forward and backward of the linears of `plan`, all of `shape`."""
    tokens, inputs, outputs = shape
    backend = build_backend(plan)
    layers = [backend.linear(layer.name, inputs, outputs, bias) for layer in plan.layers]
    model = _SideBySide(layers).to(plan.device)
    backend.attach(model)
    generator = torch.Generator(plan.device).manual_seed(0)

    def random(columns: int) -> Tensor:
        drawn = torch.randn(tokens, columns, device=plan.device, generator=generator)
        return drawn.to(DTYPES[plan.compute_dtype])

    xs = [random(inputs).requires_grad_() for _ in layers]
    dys = [1e-3 * random(outputs)] * len(layers)
    run: Callable[..., list[Tensor]] = model
    if compiled and plan.backend != "te":
        run = torch.compile(model, fullgraph=True, dynamic=False)
    # A step without gradients changes no weight and is noticed all the same, so that each pass
    # quantizes the weights anew, as the first micro-batch of a training step does.
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])

    def once() -> None:
        optimizer.step()
        torch.autograd.backward(run(*xs), dys)
        for tensor in (*xs, *model.parameters()):
            tensor.grad = None

    return once


def save(results: list[Measured], plan: Plan, hardware: Hardware) -> Path:
    """Keep the ratios for plans on this machine. Raises what `save_measured` raises."""
    ratios = {result.shape: result.ratio for result in results}
    return save_measured(hardware, plan.backend, plan.kernel or "", ratios)


def as_lines(results: list[Measured], plan: Plan) -> list[str]:
    """The results as lines of Markdown: medians, with their 95 % confidence intervals."""
    heads = ("tokens x in -> out", "layers", "bf16 ms", f"{plan.recipe.name} ms", "bf16 / FP8")
    rows = []
    for result in results:
        times = (
            f"{t.median_ms:.3f} ({t.low_ms:.3f} to {t.high_ms:.3f})"
            for t in (result.bf16, result.fp8)
        )
        shape = "{} x {} -> {}".format(*result.shape)
        rows.append([shape, str(result.layers), *times, f"{result.ratio:.3f}"])
    return markdown(heads, rows)
