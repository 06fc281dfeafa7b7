"""`FP8State` in loops that checkpoint objects with a `state_dict`: accelerate's, and those that use
torch.distributed.checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from fp8stack import UserError, fp8_state
from fp8stack.integrations import FP8State
from tests.faults.processes import in_ranks
from tests.integrations.loops import RECIPES, adamw, converted, gpt2, train
from tests.support.backend_models import same

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


def _sharded(recipe: str, seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)]
    model = converted(nn.Sequential(*blocks), recipe)
    for module in (*blocks, model):
        fully_shard(module)
    return model, adamw(model)


def _squares(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    x = torch.randn(16, 32, generator=generator)
    loss: Tensor = (model(x) - x.flip(-1)).square().mean()
    return loss


def _resumes(rank: int, *, recipe: str, folder: Path) -> bool:
    dist.init_process_group("gloo")
    straight, resumed = _sharded(recipe, seed=0), _sharded(recipe, seed=1)
    train(*straight, range(3), _squares)
    save(*straight, folder)
    load(*resumed, folder)
    losses = [train(*model, range(3, 6), _squares) for model in (resumed, straight)]
    return losses[0] == losses[1] and same(fp8_state(resumed[0]), fp8_state(straight[0]))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.full
def test_two_ranks_of_fsdp2_resume_to_the_bit(recipe, tmp_path):
    assert in_ranks(partial(_resumes, recipe=recipe, folder=tmp_path), 2) == [True, True]


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
