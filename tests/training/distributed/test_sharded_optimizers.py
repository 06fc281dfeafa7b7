"""Optimizers of sharded parameters: the weights of one rank to the bit, and checkpoints that resume
to the bit and on another number of ranks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8stack.common.errors import UserError
from fp8stack.planning.run_config import RunConfig
from fp8stack.training.distributed.parallelize import full_tensor
from fp8stack.training.distributed.process_group import join
from fp8stack.training.optim.chained import plain
from fp8stack.training.optim.optimizer import build_optimizer
from tests.faults.processes import difference, in_ranks, run_ranks
from tests.faults.rank_rows import Way, go_way
from tests.faults.twins import SMALL, TEXT
from tests.support.cases import case
from tests.training.distributed.test_gathered_bytes import VOCABULARY, model_of, sharded, train

CHAINED = ("muon", "adamw8bit")


def _stepped(rank: int, *, name: Any, recipe: str, backend: str) -> dict[str, Any]:
    """The losses, weights and optimizer states of a model that two ranks shard and, on the main
    rank, of one that is not sharded."""
    join("cpu", 60)
    torch.use_deterministic_algorithms(True)
    tokens = torch.randint(VOCABULARY, (3, 2, 17), generator=torch.Generator().manual_seed(0))
    config = RunConfig(optimizer=name, lr=0.01)
    answers = {}
    for kind in ("alone", "sharded") if rank == 0 else ("sharded",):
        width = 32 if name == "muon" else 128  # large enough for whole blocks in 8 bits
        model = model_of(recipe, backend, width=width)
        if kind == "sharded":
            sharded(model)
        elif model.backend.delayed is not None:
            model.backend.delayed.sharing.group = None
        optimizer = build_optimizer(model, config)
        losses, weights = train(model, tokens, 2 if kind == "alone" else 1, optimizer)
        states = {}
        for path, parameter in model.named_parameters():
            for key, value in plain(optimizer.state[parameter]).items():
                states[f"{path}.{key}"] = _bytes(full_tensor(value))
        answers[kind] = (losses, [weight.tolist() for weight in weights], states)
    return answers


def _bytes(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).tolist() if tensor.ndim else [int(tensor)]


@pytest.mark.parametrize(
    ("name", "recipe", "backend"),
    [
        case(name, recipe, backend, quick=(name, recipe) == ("muon", "delayed"))
        for name in CHAINED
        for recipe, backend in (("fp32", "reference"), ("delayed", "torch"))
    ],
)
def test_ranks_update_a_sharded_model_as_one_rank_does(name, recipe, backend):
    work = partial(_stepped, name=name, recipe=recipe, backend=backend)
    main, _ = in_ranks(work, 2, timeout_s=500)
    losses, weights, states = main["sharded"]
    assert losses == main["alone"][0]
    assert weights == main["alone"][1]
    assert states == main["alone"][2]
    assert any("momentum_buffer" in key or "codes" in key for key in states)


FLAGS = [*SMALL, "--save-every", "3", "--set", "sample_tokens=0", "--set", "rank_timeout=120"]
WIDE = ("--set", "model_overrides.width=64")  # matrices that are large enough for 8 bits


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        case(name, recipe, quick=(name, recipe) == ("muon", "delayed"))
        for name in CHAINED
        for recipe in ("fp32", "delayed")
    ],
)
@pytest.mark.full
def test_a_sharded_run_resumes_to_the_bit(name, recipe, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    words = ["pretrain", "--data", "text.txt", "--recipe", recipe, *FLAGS, *WIDE]
    words += ["--optimizer", name, "--parallel", "fsdp"]
    words += ["--steps", "6", "--resume", "auto"]
    for run, faults, codes in (("whole", "", [0]), ("halves", "term@step:3/rank=1", [75, 0])):
        for start, code in enumerate(codes):
            fault = "" if start else faults
            ended = run_ranks([*words, "--out", run], tmp_path, 2, fault, timeout_s=500)
            assert [rank.code for rank in ended] == [code, code], ended
    assert difference(tmp_path / "halves", tmp_path / "whole") == ""


def _built(rank: int) -> str:
    """The message of an optimizer whose moments ranks cannot share."""
    join("cpu", 60)
    model = sharded(model_of("fp32", "reference", width=48))
    try:
        build_optimizer(model, RunConfig(optimizer="adamw8bit"))
    except UserError as error:
        return str(error)
    return ""


def test_shards_that_are_no_whole_blocks_are_refused():
    for message in in_ranks(_built, 2):
        assert message.startswith("optimizer adamw8bit with --parallel fsdp: 2 ranks cannot share ")
        assert "in whole blocks of 256 elements. Choose --parallel ddp" in message


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINED)
def test_a_sharded_run_goes_on_with_another_number_of_ranks(name: str, tmp_path: Path) -> None:
    starts = ((2, "fsdp"), (1, "ddp"), (2, "fsdp"))
    way = Way(recipe="fp32", starts=starts, flags=("--optimizer", name, *WIDE))
    assert go_way(tmp_path / "way", way) == ""
