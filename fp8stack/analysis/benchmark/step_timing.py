"""The measurements of `fp8stack bench step`: a training step of a GPT, AdamW included, in every
recipe that runs here. `python -m bench.gpu.steps` measures other libraries too."""

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from fp8stack.analysis.benchmark.timing import Timing, interleaved, ratio
from fp8stack.common.errors import UserError
from fp8stack.common.presets import training_recipes
from fp8stack.layers import build_backend
from fp8stack.layers.kernels.replay import records
from fp8stack.model.config import GPTConfig, load_config, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.planning.run_config import RunConfig
from fp8stack.precision import Hardware, Plan, load_recipe, resolve
from fp8stack.precision.native_gemms import kernel_of
from fp8stack.precision.rules import best_plain_dtype, shipped
from fp8stack.training.graphs import GraphedPasses
from fp8stack.training.metrics.throughput import Peak, peak_rate
from fp8stack.training.optim.grad_scaler import LossScaler
from fp8stack.training.optim.optimizer import build_optimizer

QUANTIZED = {
    name: tables[0]
    for name in shipped()
    if name in training_recipes() and (tables := load_recipe(name).tables)
}
"""The quantizers of the recipes for training that ship."""
FP8 = tuple(name for name, table in QUANTIZED.items() if kernel_of(table) and table.bits == 8)
"""The recipes of eight bits that some hardware multiplies as they are."""
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", *FP8)


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The work of a step: a model, and the number of tokens that go through it."""

    model: str
    config: GPTConfig
    batch: int
    context: int

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.context

    def batch_of(self, device: str, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Random tokens and targets, int64 [batch, context] each, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.batch, self.context + 1)
        tokens = torch.randint(self.config.vocabulary, shape, generator=generator).to(device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def batches_of(self, device: str) -> list[tuple[Tensor, Tensor]]:
        """The batches of a training step, in turns. They differ, because the experts of a mixture
        get another number of tokens from each batch."""
        return [self.batch_of(device, seed) for seed in range(16)]


SMALL = GPTConfig(vocabulary=256, context=256, layers=6, width=384, heads=6)
"""The model for CPUs, 10.8 million parameters: a step takes about a second."""


def works(device: str) -> dict[str, StepWork]:
    """The models to measure, by name: a small one on a CPU; GPT-2's and two Llama 8B layers on a
    GPU."""
    if device == "cpu":
        return {"small": StepWork(model="small", config=SMALL, batch=8, context=256)}
    batches = {"gpt2-124m": 32, "gpt2-350m": 16, "gpt2-1.5b": 8}
    presets = {
        name: StepWork(model=name, config=load_config(name), batch=batch, context=1024)
        for name, batch in batches.items()
    }
    name = "llama-8b-2-layers"
    llama = load_config("llama-8b", {"layers": 2})
    return presets | {name: StepWork(model=name, config=llama, batch=1, context=8192)}


@dataclass(frozen=True, kw_only=True)
class StepArm:
    """One way to compute the step. The name is the recipe's; who computes and how is added where it
    is not the device's default, which is the backend that `resolve` chooses, eager on a CPU,
    compiled on a GPU of NVIDIA where it can be."""

    name: str
    recipe: str
    backend: str
    compiled: bool


def baseline(hardware: Hardware) -> str:
    """The recipe that others are compared with: the best without FP8, bf16 on any recent GPU."""
    return best_plain_dtype(hardware)


def served(recipe: str, hardware: Hardware) -> list[str]:
    """The backends that run `recipe` here as asked, the one that `resolve` chooses first."""
    first = resolve(recipe, hardware)
    backends: list[str] = []
    for backend in (first.backend, "te", "torch", "emulate"):
        plan = resolve(recipe, hardware, backend)
        ran = plan.backend == backend and plan.recipe.name == recipe
        if ran and backend not in backends and (plan.is_fp8 or backend == first.backend):
            backends.append(backend)
    return backends


def unserved(recipes: Iterable[str], hardware: Hardware) -> dict[str, str]:
    """The recipes that no backend runs here, each with the recipe that replaces it and the
    reasons."""
    replaced = {}
    for recipe in recipes:
        if not served(recipe, hardware):
            plan = resolve(recipe, hardware)
            replaced[recipe] = f"runs as {plan.recipe.name} here: {'; '.join(plan.reasons)}"
    return replaced


def arms(
    hardware: Hardware, recipes: Iterable[str], also_compiled: Collection[str]
) -> list[StepArm]:
    """The arms of `recipes` that this machine has. On a GPU: every backend, compiled where it can
    be. On a CPU: the backend that `resolve` chooses, eager, and compiled for `also_compiled`."""
    on_gpu = hardware.device != "cpu"
    all_arms = []
    for recipe in recipes:
        for number, backend in enumerate(served(recipe, hardware)[: None if on_gpu else 1]):
            name = recipe if number == 0 else f"{recipe} by {backend}"
            compiled = hardware.capability is not None and backend != "te"
            all_arms.append(StepArm(name=name, recipe=recipe, backend=backend, compiled=compiled))
            if not on_gpu and recipe in also_compiled:
                name = f"{name} compiled"
                all_arms.append(StepArm(name=name, recipe=recipe, backend=backend, compiled=True))
    return all_arms


@dataclass(frozen=True)
class Built:
    """A step, ready to be called, and the plan that it runs by."""

    step: Callable[[], None]
    plan: Plan
    model: nn.Module


def plan_of(arm: StepArm, work: StepWork, hardware: Hardware) -> Plan:
    """The plan of an arm. Raises a UserError if this machine would run something else."""
    plan = plan_for(work.config, arm.recipe, hardware, arm.backend)
    if plan.backend != arm.backend or plan.recipe.name != arm.recipe:
        raise UserError(f"'{arm.name}' does not run here: {'; '.join(plan.reasons)}.")
    return plan


def build(arm: StepArm, work: StepWork, hardware: Hardware) -> Built:
    """Model, optimizer and batch on the device; nothing has run yet. Raises what `plan_of`
    raises."""
    plan = plan_of(arm, work, hardware)
    backend = build_backend(plan)
    backend.weights.only_tracked_changes = True  # as in a run
    model = GPT(work.config, backend).to(hardware.device)
    if arm.compiled:
        model.compile_blocks()
    optimizer = build_optimizer(model, RunConfig(lr=1e-4))
    scaler = LossScaler(hardware.device) if plan.loss_scaling else None
    batches = work.batches_of(hardware.device)
    has_graphs = arm.compiled and records(torch.device(hardware.device))
    graphs = has_graphs and work.config.experts is None  # as in a run
    step = training_step(model, optimizer, batches, scaler, graphs=graphs)
    return Built(step, plan, model)


def build_step(arm: StepArm, work: StepWork, hardware: Hardware) -> Callable[[], None]:
    """The step that `build` builds, by itself."""
    return build(arm, work, hardware).step


def training_step(
    model: Callable[[Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    scaler: LossScaler | None = None,
    *,
    graphs: bool = False,
) -> Callable[[], None]:
    """One optimizer step on the next of `batches`, in turns, of a model that gives the loss of
    tokens and targets, with the loss scaled by `scaler` if there is one. With `graphs`, the passes
    of the model, which is a `GPT`, are replayed as CUDA graphs."""
    next_batch = partial(next, cycle(batches))

    def run_pass(tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        loss = model(tokens_BT, targets_BT)
        scaled = loss if scaler is None else scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    call: Callable[..., Tensor] = run_pass
    if graphs:
        assert isinstance(model, GPT)
        passes = GraphedPasses(run_pass, model, model.backend.weights, model.backend.delayed)
        call = partial(passes, first=True)

    def step() -> None:
        call(*next_batch())
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def free_memory(device: str) -> None:
    """Free the memory of models that are gone: they hold themselves, by their hooks."""
    gc.collect()
    if device != "cpu":
        torch.get_device_module(device).empty_cache()


def figures(work: StepWork, timing: Timing, base: Timing, peak: Peak) -> dict[str, Any]:
    """The figures of a timing: tokens per second by the median step; TFLOP/s of the model's own
    operations, causal attention counted as half (see `GPTConfig.flops_per_token`), and MFU, their
    share of `peak`; the time relative to `base`, of the fastest steps, and its inverse."""
    tokens_per_s = 1000 * work.tokens / timing.median_ms
    tflops = tokens_per_s * work.config.flops_per_token(work.context) / 1e12
    relative, mfu = ratio(timing, base), peak.mfu(tflops)
    return {
        "model": work.model,
        "batch": work.batch,
        "context": work.context,
        **timing.to_json(),
        "tokens_per_s": round(tokens_per_s, 1),
        "tflops": round(tflops, 4),
        "mfu": None if mfu is None else round(mfu, 4),
        "mfu_of": peak.name,
        "ratio": round(relative, 4),
        "speedup": round(1 / relative, 4),
    }


def chosen(names: Sequence[str], device: str) -> list[StepWork]:
    """The works called `names`, all if there are none. Raises a UserError for an unknown name."""
    by_name = works(device)
    for name in names:
        if name not in by_name:
            models = ", ".join(by_name)
            raise UserError(f"No model '{name}' for steps on {device}. Known: {models}.")
    return [by_name[name] for name in names or by_name]


def measure(
    work: StepWork,
    hardware: Hardware,
    *,
    recipes: Sequence[str] = FP8,
    rounds: int,
    budget_s: float,
) -> Iterator[dict[str, Any]]:
    """The figures of each arm (see `figures`), the baseline without FP8 first. Each arm takes turns
    with the baseline alone, so that no more than two models have to fit."""
    first, *compared = arms(hardware, [baseline(hardware), *recipes], ())
    base = build(first, work, hardware)
    options: dict[str, Any] = {"rounds": rounds, "warm_up": 3, "device": hardware.device}
    for arm in compared:
        arm_built = build(arm, work, hardware)
        steps = {first.name: base.step, arm.name: arm_built.step}
        timings = interleaved(steps, **options, budget_s=budget_s)
        for name, built in ((first.name, base), (arm.name, arm_built)):
            if name == arm.name or arm is compared[0]:
                peak = peak_rate(hardware, built.plan)
                yield figures(work, timings[name], timings[first.name], peak) | {"arm": name}
        del arm_built, steps, built
        free_memory(hardware.device)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows for people."""
    grid = Table(title=f"{rows[0]['model']}, {rows[0]['batch']} x {rows[0]['context']} tokens")
    for heading in ("arm", "step ms", "95 % interval", "tokens/s", f"speed of {rows[0]['arm']}"):
        grid.add_column(heading, justify="left" if heading == "arm" else "right")
    for row in rows:
        interval = f"{row['low_ms']:.1f} to {row['high_ms']:.1f}"
        cells = (f"{row['median_ms']:.1f}", interval, f"{row['tokens_per_s']:,.0f}")
        grid.add_row(row["arm"], *cells, f"{row['speedup']:.2f}")
    return grid
