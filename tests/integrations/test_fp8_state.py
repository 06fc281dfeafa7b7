"""`FP8State` in loops that checkpoint objects with a `state_dict`: accelerate's, and those that use
torch.distributed.checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from fp8stack import UserError, fp8_state
from fp8stack.integrations import FP8State
from tests.integrations.loops import RECIPES, adamw, gpt2, train
from tests.support.backend_models import same

ROOT = Path(__file__).parents[2]


# accelerate


def prepared(recipe: str, seed: int) -> tuple[Accelerator, nn.Module, Any]:
    accelerator = Accelerator(cpu=True)
    model = gpt2(recipe, seed)
    accelerator.register_for_checkpointing(FP8State(model))
    return accelerator, *accelerator.prepare(model, adamw(model))


@pytest.mark.parametrize("recipe", RECIPES)
def test_accelerate_resumes_to_the_bit(recipe, tmp_path, caplog):
    accelerator, model, optimizer = prepared(recipe, seed=0)
    train(model, optimizer, range(3), backward=accelerator.backward)
    accelerator.save_state(str(tmp_path))
    losses = train(model, optimizer, range(3, 6), backward=accelerator.backward)
    accelerator, resumed, optimizer = prepared(recipe, seed=1)
    accelerator.load_state(str(tmp_path))
    assert train(resumed, optimizer, range(3, 6), backward=accelerator.backward) == losses
    assert same(resumed.state_dict(), model.state_dict())
    assert same(fp8_state(resumed), fp8_state(model))
    assert "load_fp8_state" not in caplog.text


# torch.distributed.checkpoint


def save(model: nn.Module, optimizer: Any, folder: Path | str) -> None:
    weights, moments = get_state_dict(model, optimizer)
    state_dict_saver.save(
        {"model": weights, "optim": moments, "fp8": FP8State(model)}, checkpoint_id=folder
    )


def load(model: nn.Module, optimizer: Any, folder: Path | str) -> None:
    weights, moments = get_state_dict(model, optimizer)
    state_dict_loader.load(
        {"model": weights, "optim": moments, "fp8": FP8State(model)}, checkpoint_id=folder
    )
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


@pytest.mark.parametrize("recipe", RECIPES)
def test_torch_distributed_checkpoint_resumes_to_the_bit(recipe, tmp_path):
    model = gpt2(recipe)
    assert isinstance(FP8State(model), Stateful)
    optimizer = adamw(model)
    train(model, optimizer, range(3))
    save(model, optimizer, tmp_path)
    losses = train(model, optimizer, range(3, 6))
    again = gpt2(recipe, seed=1)
    resumed = adamw(again)
    load(again, resumed, tmp_path)
    assert train(again, resumed, range(3, 6)) == losses
    assert same(again.state_dict(), model.state_dict())
    assert same(fp8_state(again), fp8_state(model))


@pytest.mark.slow
def test_two_ranks_of_fsdp2_resume_to_the_bit(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, "-m", "tests.integrations.dcp_ranks", str(tmp_path)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_state_of_another_model_is_refused():
    state = FP8State(gpt2("delayed")).state_dict()
    with pytest.raises(UserError, match="has no place in this model"):
        FP8State(gpt2("current")).load_state_dict(state)
    name = next(iter(state))
    del state[name]
    with pytest.raises(UserError, match=f"'{name}' is missing"):
        FP8State(gpt2("delayed")).load_state_dict(state)
    assert FP8State(gpt2("current")).state_dict() == {}
    with pytest.raises(UserError, match="This Linear was not converted"):
        FP8State(torch.nn.Linear(2, 2)).state_dict()
