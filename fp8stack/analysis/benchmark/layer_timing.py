"""Times one linear of a model in several plans, side by side on this machine."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from fp8stack.analysis.benchmark.timing import Arm, Timing, interleaved
from fp8stack.layers import build_backend
from fp8stack.layers.backend import DTYPES
from fp8stack.precision import Plan
from fp8stack.precision.profit import Shape

Measure = Callable[..., Mapping[str, Timing]]
"""A function that times arms, such as `fp8stack.analysis.benchmark.timing.interleaved`."""


def side_by_side(
    plans: Mapping[str, Plan],
    shape: Shape,
    bias: bool,
    *,
    rounds: int,
    compiled: bool,
    measure: Measure = interleaved,
) -> dict[str, Timing]:
    """Time the forward and backward pass of a linear of this shape in each of `plans`.

    Layers that the plans' recipes leave out are measured as well.

    Args:
        plans: by name.
        shape: (tokens, in, out).
        bias: whether the linear has a bias.
        rounds: how often `measure` times each plan.
        compiled: whether to time the code that torch.compile generates; Transformer Engine's
            layers are not compiled.
        measure: times the plans.

    Returns:
        The time of one linear by the plan's name.
    """
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
    """The number of linears of a shape that are measured as one model. Its layers share the work
    that a model does once per pass, and kernels are launched while others run. Large layers are
    measured fewer at a time, for memory."""
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
    # The layers notice a step even if it has no gradients and changes no weight: each pass
    # quantizes the weights again, as the first micro-batch of a training step does.
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])

    def once() -> None:
        optimizer.step()
        torch.autograd.backward(run(*xs), dys)
        for tensor in (*xs, *model.parameters()):
            tensor.grad = None

    return once
