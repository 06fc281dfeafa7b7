"""Small layers and models of every backend, and what tests look at in them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8stack.common import presets
from fp8stack.layers import Backend, build_backend, fp8_state
from fp8stack.layers.delayed import DelayedScaling
from fp8stack.model.config import GPTConfig, padded_vocabulary
from fp8stack.model.gpt import GPT
from fp8stack.precision import Hardware, Plan, load_recipe, resolve

CPU, AMPERE = Hardware("cpu"), Hardware("cuda", (8, 0))
H100, B200 = (Hardware("cuda", (major, 0), has_te=True) for major in (9, 10))
RECIPES = ["delayed", "current", "block", "mxfp8"]
# The recipes that ship with the package, and those that quantize every layer alike.
SHIPPED = {name: load_recipe(name) for name in presets.names("recipes")}
LOW = [name for name, recipe in SHIPPED.items() if recipe.is_fp8 and not recipe.layers]
PER_TENSOR = ["delayed", "current"]
BACKENDS = ["emulate", "torch", "te"]
# Recipes and the backends that run them on a CPU.
WAYS = [
    *((recipe, "emulate") for recipe in RECIPES),
    *((recipe, "torch") for recipe in PER_TENSOR),
    *((recipe, "te") for recipe in RECIPES),
]
DELAYED = [("delayed", backend) for backend in BACKENDS]
TINY = {"vocabulary": 64, "context": 16, "layers": 2, "width": 32, "heads": 4}
PARTS = ("attention.qkv", "attention.output", "mlp.up", "mlp.down")
LINEARS = [f"blocks.{i}.{path}" for i in range(2) for path in PARTS]
OPERANDS = ("input", "weight", "grad_output")
# Contexts in which a model is evaluated.
QUIET: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "eval": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def machine(recipe: str) -> Hardware:
    """A GPU that runs `recipe` by Transformer Engine."""
    return B200 if Path(recipe).stem.startswith(("mxfp8", "nvfp4")) else H100


def planned(recipe: str, backend: str, hardware: Hardware | None = None, **options: Any) -> Plan:
    """A plan for `hardware`, by default hardware that the backend runs on. It runs on the CPU."""
    on = hardware or (machine(recipe) if backend == "te" else CPU)
    plan = resolve(load_recipe(recipe, options), on, backend)
    assert backend in (plan.backend, "auto")
    return replace(plan, device="cpu")


def linear(
    recipe: str,
    inputs: int,
    outputs: int,
    bias: bool = True,
    *,
    backend: str = "emulate",
    hardware: Hardware | None = None,
    **options: Any,
) -> tuple[Any, Backend]:
    """One layer called "layer", and its backend."""
    plan = planned(recipe, backend, hardware, **options)
    layer_plan = plan.for_layers({"layer": (inputs, outputs)})
    layer_backend = build_backend(layer_plan)
    torch.manual_seed(0)
    layer = layer_backend.linear("layer", inputs, outputs, bias)
    layer_backend.attach(layer)
    return layer, layer_backend


def gpt(
    recipe: str = "delayed",
    backend: str = "emulate",
    model: dict[str, Any] | None = None,
    *,
    hardware: Hardware | None = None,
    seed: int = 0,
    **options: Any,
) -> GPT:
    """A model of `TINY`, of another shape where `model` says so."""
    config = GPTConfig(**TINY | (model or {}))
    plan = planned(recipe, backend, hardware, **options)
    vocabulary = padded_vocabulary(config, plan.vocabulary_multiple)
    model_plan = plan.for_layers(config.linear_shapes(vocabulary))
    return GPT(config, build_backend(model_plan), seed=seed)


def tokens(seed: int = 1, rows: int = 2, length: int = 16) -> Tensor:
    return torch.randint(64, (rows, length), generator=torch.Generator().manual_seed(seed))


def loss_of(model: Any, step: int, length: int = 16) -> Tensor:
    """The loss of a batch whose targets follow from its tokens, so that a model can learn them."""
    x = tokens(step, length=length)
    return model(x, (5 * x + 3) % 64)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Adam with an epsilon that keeps steps in proportion to gradients: no rounding is a step."""
    return torch.optim.Adam(model.parameters(), lr=0.02, eps=0.01)


def train(
    model: nn.Module,
    steps: Any,
    optimizer: torch.optim.Optimizer | None = None,
    accumulate: int = 1,
) -> list[float]:
    """Losses of optimizer steps."""
    optimizer = optimizer or adam(model)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        for micro_step in range(accumulate):
            loss = loss_of(model, step + 1000 * micro_step) / accumulate
            loss.backward()
            losses.append(loss.item() * accumulate)
        optimizer.step()
    return losses


def history(
    model: nn.Module,
    steps: int = 2,
    accumulate: int = 2,
    update: Callable[[nn.Module], None] | None = None,
    around: Callable[[int, int], AbstractContextManager[Any]] | None = None,
) -> dict[str, Tensor]:
    """Losses, gradients, FP8 state and weights of optimizer steps. `update` takes the place of SGD,
    `around` gives a context for each micro-batch of a step."""
    torch.manual_seed(1)  # of dropout, and of what Transformer Engine draws
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tensors: dict[str, Tensor] = {}
    for step in range(steps):
        for micro_batch in range(accumulate):
            with nullcontext() if around is None else around(step, micro_batch):
                loss = loss_of(model, 10 * step + micro_batch)
                loss.backward()
            tensors[f"{step} {micro_batch} loss"] = loss.detach()
        tensors |= {f"{step} gradient of {n}": x.clone() for n, x in gradients(model).items()}
        optimizer.step() if update is None else update(model)
        model.zero_grad()
        tensors |= {f"{step} {n}": x.clone() for n, x in fp8_state(model).items()}
    return tensors | dict(model.state_dict())


@torch.no_grad()
def change_weights(model: nn.Module) -> None:
    """Update each weight by nothing, as an optimizer with a learning rate of 0 does."""
    for parameter in model.parameters():
        parameter.add_(0)


def checkpointed(model: GPT, use_reentrant: bool) -> GPT:
    """Run the blocks again in the backward pass, by torch's checkpointing."""
    for block in model.blocks:
        inner = block.forward
        block.forward = lambda x, rotation, inner=inner: checkpoint(
            inner, x, rotation, use_reentrant=use_reentrant
        )
    return model


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std


def grad(x: Tensor) -> Tensor:
    """The gradient of a tensor, which has one."""
    assert x.grad is not None
    return x.grad


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """The tensors that are saved for the backward pass in this context."""
    saved: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield saved


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same(first: Mapping[Any, Tensor], second: Mapping[Any, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def delayed_of(model: nn.Module) -> DelayedScaling | None:
    states = (getattr(module, "delayed", None) for module in model.modules())
    return next((state for state in states if state is not None), None)


def raw(model: nn.Module) -> dict[str, Tensor]:
    """The FP8 state as stored, without the update that `fp8_state` makes; empty if none."""
    delayed = delayed_of(model)
    return {} if delayed is None else delayed.history.state_dict()


def updated(model: nn.Module) -> dict[str, Tensor]:
    """The FP8 state with which the next training pass begins; empty if none."""
    delayed = delayed_of(model)
    return {} if delayed is None else delayed.state_dict()


def scales(model: nn.Module, operands: tuple[str, ...] = OPERANDS) -> dict[str, float]:
    return {
        name.removesuffix(".scale"): value.item()
        for name, value in updated(model).items()
        if name.endswith(".scale") and name.split(".")[-2] in operands
    }


def filled(model: nn.Module, path: str = LINEARS[2]) -> list[int]:
    """The counts of amaxes in a layer's windows: of its input, weight and grad_output."""
    state = updated(model)
    windows = [state[f"{path}.{operand}.amax_history"][1:] for operand in OPERANDS]
    return [int((window != 0).sum()) for window in windows]
