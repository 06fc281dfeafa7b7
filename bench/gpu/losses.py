"""Short trainings of GPT-2 in every precision: losses and first timings, eager and untuned.

Data, initial weights, order and learning rates are the same for all. A run that runs out of time
reports its milliseconds per step but no final loss.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fp8stack import data
from fp8stack.analysis.benchmark.step_timing import free_memory
from fp8stack.analysis.benchmark.timing import wait_for
from fp8stack.analysis.conform.checks import Check, Context, Facts, Skipped, plan_of
from fp8stack.layers import build_backend
from fp8stack.model.config import GPTConfig, load_config, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.planning.run_config import RunConfig
from fp8stack.precision import load_recipe
from fp8stack.training.optim.optimizer import build_optimizer, learning_rate

BF16 = ("reference", "bf16")
# The most important arms first, since the time may not suffice for all.
ARMS = [BF16] + [
    (backend, recipe)
    for backend in ("te", "torch", "emulate")
    for recipe in ("delayed", "current", "block", "mxfp8")
]
AVERAGED = 20  # the last losses, whose mean is compared
MOST_APART_PERCENT = 5.0  # the largest gap to bf16
COMPARED_FROM = 200  # steps: shorter runs are not compared with bf16


@dataclass(frozen=True)
class Training:
    """The model to train, its batch and the number of steps."""

    model: str = "gpt2-124m"
    steps: int = 200
    batch: int = 8
    context: int = 1024
    lr: float = 6e-4

    def __str__(self) -> str:
        return f"{self.model}, {self.steps} steps of {self.batch} x {self.context} tokens"


def cases(
    context: Context, deadline: float = math.inf, preset: Training | None = None
) -> Iterator[Check]:
    """The trainings of all arms, each compared with bf16, which is the first. `deadline` is a time
    of `time.monotonic`."""
    training = preset or Training(steps=20 if context.quick else 200)
    results: dict[tuple[str, str], Facts] = {}

    def compared(arm: tuple[str, str]) -> Facts:
        """Train an arm. The check holds if the losses are finite and near bf16's."""
        facts = results[arm] = train(context, training, *arm, deadline=deadline)
        facts["holds"] = all(map(math.isfinite, facts["losses"]))
        reference = results.get(BF16, {}).get("mean_of_last")
        if arm != BF16 and reference and facts["mean_of_last"]:
            gap = 100 * (facts["mean_of_last"] / reference - 1)
            facts["gap_to_bf16_percent"] = round(gap, 3)
            if training.steps >= COMPARED_FROM:
                facts["holds"] = facts["holds"] and abs(gap) <= MOST_APART_PERCENT
        return facts

    for arm in ARMS:
        yield Check(f"{arm[1]} by {arm[0]}, {training}", partial(compared, arm))


def train(
    context: Context, training: Training, backend: str, recipe: str, deadline: float = math.inf
) -> Facts:
    """Train, and return the losses by step, the median milliseconds of a step, the peak memory and
    the number of layers and GEMMs in FP8."""
    config = load_config(training.model)
    plan_of(load_recipe(recipe), context, backend)
    plan = plan_for(config, recipe, context.hardware, backend)
    built = build_backend(plan)
    built.weights.only_tracked_changes = True  # as in a run
    batches = _batches(config, training)
    free_memory(context.device)
    if context.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = GPT(config, built).to(context.device)
    run_config = RunConfig(steps=training.steps, lr=training.lr, warmup_steps=training.steps // 10)
    optimizer = build_optimizer(model, run_config)
    losses: list[Tensor] = []
    seconds: list[float] = []
    for step in range(1, training.steps + 1):
        tokens = batches[step].to(context.device)
        wait_for(context.device)
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, run_config)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        wait_for(context.device)
        seconds.append(time.perf_counter() - start)
        if time.monotonic() + 1.5 * seconds[-1] > deadline:
            break
    facts = _summary(training, torch.stack(losses).tolist(), seconds)
    facts["fp8_layers"] = sum(layer.fp8 for layer in plan.layers)
    facts["layers"] = len(plan.layers)
    facts["fp8_gemms"] = built.fp8_gemms()
    if context.device == "cuda":
        facts["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
    return facts


def _summary(training: Training, losses: list[float], seconds: list[float]) -> Facts:
    done = len(losses)
    warm = seconds[min(5, done // 2) :]
    is_complete = done == training.steps
    facts: Facts = {
        "steps": done,
        "final_loss": round(losses[-1], 5) if is_complete else None,
        "mean_of_last": round(statistics.fmean(losses[-AVERAGED:]), 5) if is_complete else None,
        "ms_per_step": round(1000 * statistics.median(warm), 3),
        "tokens_per_s": round(training.batch * training.context / statistics.median(warm)),
        "losses": [round(loss, 5) for loss in losses],
    }
    if not is_complete:
        facts["note"] = f"the time was up after {done} of {training.steps} steps"
    return facts


def _batches(config: GPTConfig, training: Training) -> data.StepBatches:
    """Batches of the default corpus, the bytes of Python's standard library."""
    corpus, _ = data.load_corpora(None, config.vocabulary)
    if config.context < training.context:
        raise Skipped(f"{training.context} tokens are more than {training.model}'s context")
    return data.StepBatches(
        corpus, batch=training.batch, context=training.context, seed=0, vocabulary=config.vocabulary
    )
