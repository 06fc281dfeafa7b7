"""Type checkers find mistakes in a user's script.

`mypy` checks this file too, and reports a comment that ignores no error: so it finds each misuse
below.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor, nn

import fp8stack
from fp8stack.planning.run_config import GuardConfig, RunConfig
from fp8stack.planning.run_keys import GuardKeys, RunKeys
from tests.conftest import refusal


def script() -> None:
    """The right calls of a user's script, which is checked and not run."""
    folder: Path = fp8stack.pretrain(recipe="delayed", steps=10, lr=1e-3, guard={"window": 64})
    fp8stack.pretrain("run.toml", data=Path("tokens"), model_overrides={"layers": 2})
    fp8stack.pretrain(
        phases=[{"name": "all"}], what_if=["mxfp8"], out=folder / "next", context=None
    )
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
    fp8stack.pretrain(stpes=1)  # type: ignore[call-arg]
    fp8stack.pretrain(steps="many")  # type: ignore[arg-type]
    fp8stack.pretrain(optimizer="adam")  # type: ignore[arg-type]
    fp8stack.pretrain(guard={"windw": 64})  # type: ignore[typeddict-unknown-key]
    fp8stack.pretrain(parallel="pp")  # type: ignore[arg-type]
    fp8stack.convert("delayed", nn.Linear(32, 32))  # type: ignore[arg-type, type-var]
    fp8stack.resolve("delayed", "9.0")  # type: ignore[arg-type]
    print(fp8stack.plan_of(nn.Linear(32, 32)).reason)  # type: ignore[attr-defined]
    fp8stack.load("runs/a", recipes="bf16")  # type: ignore[call-arg]


def _plain(annotation: Any) -> set[Any]:
    """The types that an annotation allows, without pydantic's limits; of Literal, the values."""
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return set().union(*map(_plain, get_args(annotation)))
    return set(get_args(annotation)) if get_origin(annotation) is Literal else {annotation}


PATHS = {"model", "recipe", "data", "out", "tokenizer", "init_from"}
OF_PYTHON = {  # keys that Python gives in more ways than a run file
    "what_if": {str, Sequence[str]},
    "phases": {str, Sequence[Mapping[str, Any]]},
    "guard": {GuardKeys},
    "model_overrides": {Mapping[str, Any]},
    "recipe_overrides": {Mapping[str, Any]},
}


@pytest.mark.parametrize(("keys", "config"), [(RunKeys, RunConfig), (GuardKeys, GuardConfig)])
def test_the_keys_for_type_checkers_are_those_of_a_run(keys, config):
    typed = get_type_hints(keys)
    assert list(typed) == list(config.model_fields)
    for key, annotation in get_type_hints(config, include_extras=True).items():
        if key in typed and not (key in OF_PYTHON and config is RunConfig):
            paths = {Path} if key in PATHS and config is RunConfig else set()
            assert _plain(typed[key]) == _plain(annotation) | paths, key
    for key in OF_PYTHON.keys() & typed.keys() if config is RunConfig else ():
        assert _plain(typed[key]) == OF_PYTHON[key]


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
