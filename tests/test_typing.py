"""Type checkers find mistakes in a user's script.

`mypy` checks this file too, and reports a comment that ignores no error: so it finds each misuse
below.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import fp8stack
from fp8stack.planning.run_config import GuardConfig
from tests.conftest import refusal


def script() -> None:
    """The right calls of a user's script, which is checked and not run."""
    config = fp8stack.RunConfig(recipe="delayed", steps=10, lr=1e-3, what_if=("mxfp8",))
    folder: Path = fp8stack.pretrain(config, guard={"window": 64})
    fp8stack.pretrain("run.toml", data=Path("tokens"), out=folder / "next", context=None)
    model = fp8stack.convert(nn.Sequential(nn.Linear(32, 32)), "delayed")
    layer: nn.Module = model[0]  # the class of the model is kept
    plan: fp8stack.Plan = fp8stack.plan_of(model)
    reasons: tuple[str, ...] = plan.reasons
    scaling = fp8stack.delayed_scaling_of(model)
    if scaling is not None:
        scaling.apply_pending_update()
    state: dict[str, Tensor] = fp8stack.fp8_state(model)
    del layer, reasons, state


def misuse() -> None:
    """Wrong calls, each with the error that mypy reports."""
    fp8stack.RunConfig(stpes=1)  # type: ignore[call-arg]
    fp8stack.RunConfig(steps="many")  # type: ignore[arg-type]
    fp8stack.RunConfig(optimizer="adam")  # type: ignore[arg-type]
    fp8stack.RunConfig(guard=GuardConfig(windw=64))  # type: ignore[call-arg]
    fp8stack.pretrain(resume=3)  # type: ignore[arg-type]
    fp8stack.convert("delayed", nn.Linear(32, 32))  # type: ignore[arg-type, type-var]
    fp8stack.resolve("delayed", "9.0")  # type: ignore[arg-type]
    print(fp8stack.plan_of(nn.Linear(32, 32)).reason)  # type: ignore[attr-defined]
    fp8stack.load("runs/a", recipes="bf16")  # type: ignore[call-arg]


def test_the_plan_and_the_delayed_scaling_of_a_model_have_names():
    model = fp8stack.convert(nn.Sequential(nn.Linear(32, 32)), "delayed")
    assert fp8stack.plan_of(model).recipe.name == "delayed"
    scaling = fp8stack.delayed_scaling_of(model)
    assert scaling is not None
    model(torch.ones(4, 32)).sum().backward()
    assert float(scaling.amaxes(1, 1)[0].max()) == 1.0
    config = fp8stack.load_config("gpt-nano", {"layers": 1})
    gpt = fp8stack.GPT(config)
    assert fp8stack.plan_of(gpt).recipe.name == "fp32"
    assert fp8stack.delayed_scaling_of(gpt) is None
    for function in (fp8stack.plan_of, fp8stack.delayed_scaling_of):
        assert "Sequential has no plan: convert it first" in refusal(function, nn.Sequential())
