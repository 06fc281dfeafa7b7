"""The first compiled training steps of a small model in a recipe, compared with eager ones.

A row says which backend ran, and the losses. It fails if a loss is not finite, if training does not
lower it, or if compiled code computes another first loss than eager code.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from fp8stack.layers import build_backend
from fp8stack.model.config import GPTConfig, plan_for
from fp8stack.model.gpt import GPT
from fp8stack.planning.run_config import RunConfig
from fp8stack.precision import Hardware, Plan, probe
from fp8stack.training.optim.optimizer import build_optimizer

SMALL = GPTConfig(vocabulary=512, context=256, layers=2, width=512, heads=4, kv_heads=4)
TINY = GPTConfig(vocabulary=128, context=32, layers=1, width=128, heads=4)
STEPS = 4
MOST_APART = 0.01  # of the first loss, between compiled and eager code


def losses_of(
    plan: Plan, config: GPTConfig, device: str, steps: int, compiler: str | None
) -> list[float]:
    """The losses of so many training steps on one batch, compiled unless `compiler` is None."""
    model = GPT(config, build_backend(plan), seed=0).to(device)
    if compiler is not None:
        torch._dynamo.reset()
        model.compile_blocks(compiler)
    optimizer = build_optimizer(model, RunConfig(lr=1e-3))
    generator = torch.Generator().manual_seed(0)
    size = (4, config.context + 1)
    tokens = torch.randint(config.vocabulary, size, generator=generator).to(device)
    losses: list[float] = []
    for _ in range(steps):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def plans_of(recipe: str, config: GPTConfig, hardware: Hardware) -> list[Plan]:
    """The plan of a recipe, and where Transformer Engine would run it, torch's plan too."""
    plan = plan_for(config, recipe, hardware)
    return [plan, plan_for(config, recipe, hardware, "torch")] if plan.backend == "te" else [plan]


def measured(plan: Plan, config: GPTConfig, hardware: Hardware, compiler: str) -> dict[str, Any]:
    """The row of a plan; its "problem" is "" if all is well. Transformer Engine's layers are not
    compiled."""
    start = time.perf_counter()
    compiled = plan.backend != "te"
    losses = losses_of(plan, config, hardware.device, STEPS, compiler if compiled else None)
    eager = losses_of(plan, config, hardware.device, 1, None)[0]
    row = {
        "recipe": plan.asked,
        "backend": plan.backend,
        "plan": plan.summary(),
        "compiled": compiled,
        "losses": [loss if math.isfinite(loss) else str(loss) for loss in losses],
        "eager_loss": eager if math.isfinite(eager) else str(eager),
        "problem": problem_of(losses, eager),
        "seconds": round(time.perf_counter() - start, 1),
    }
    return row


def problem_of(losses: list[float], eager: float) -> str:
    """The problem with the losses of compiled steps, given the first loss of eager code, or ""."""
    if not all(map(math.isfinite, [*losses, eager])):
        return "a loss is not finite"
    if losses[-1] >= losses[0]:
        return "training did not lower the loss"
    if abs(losses[0] - eager) > MOST_APART * eager:
        return f"compiled code has a first loss of {losses[0]:.4f}, eager code {eager:.4f}"
    return ""


def main() -> int:
    """Run, print, and append to a file. Returns 1 if there is a problem."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.first_step", description=__doc__)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("--out", type=Path, required=True, help="a file, one JSON object per line")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU, traced only")
    arguments = parser.parse_args()
    hardware = probe("cpu" if arguments.tiny else "cuda")
    config, compiler = (TINY, "aot_eager") if arguments.tiny else (SMALL, "inductor")
    failed = False
    for plan in plans_of(arguments.recipe, config, hardware):
        print(plan)
        try:
            row = measured(plan, config, hardware, compiler)
        except Exception as error:  # of any kind: the row is written all the same
            problem = f"{type(error).__name__}: {error}"
            row = {"recipe": plan.asked, "backend": plan.backend, "problem": problem}
            traceback.print_exc()
        with arguments.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"losses: {row.get('losses')}")
        print(f"{plan.asked} by {plan.backend}: {row['problem'] or 'well'}", flush=True)
        failed = failed or bool(row["problem"])
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
