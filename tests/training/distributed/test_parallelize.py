"""Gradients that ranks exchange in bfloat16: half the bytes, the same training, off by default."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fp8stack.analysis.benchmark.step_timing import FP8
from fp8stack.common.errors import UserError
from fp8stack.planning.run_config import RunConfig
from fp8stack.precision import Hardware
from fp8stack.training.distributed import parallelize
from fp8stack.training.distributed.process_group import join
from fp8stack.training.run_plans import plan_run
from tests.conftest import metrics
from tests.faults.processes import in_ranks, run_ranks
from tests.faults.twins import TEXT

BF16 = ("--set", "grad_compression=bf16")
STEPS = 6
SMALL = [
    "--data", "text.txt", "--context", "16", "--batch", "8", "--steps", str(STEPS),
    "--eval-every", "6", "--save-every", "6", "--set", "warmup_steps=2",
    "--set", "eval_windows=5", "--set", "sample_tokens=0", "--set", "model_overrides.layers=1",
    "--set", "model_overrides.width=32", "--set", "model_overrides.heads=2",
    "--set", "rank_timeout=60", "--set", "log_every=1",
]  # fmt: skip


def _gradients(rank: int, *, compressed: bool) -> dict[str, Any]:
    """The gradient that DDP reduces from one gradient per rank, the bytes that it sends, and the
    gradient's dtype."""
    join("cpu", 60)
    layer = nn.Linear(24, 8, bias=False)
    model = DistributedDataParallel(layer, gradient_as_bucket_view=True)
    model.register_comm_hook(False, parallelize._sum_in_bf16 if compressed else parallelize._sum)
    sent: list[int] = []
    reduce = dist.all_reduce

    def counted(tensor: torch.Tensor, **options: Any) -> Any:
        sent.append(tensor.nbytes)
        return reduce(tensor, **options)

    with patch.object(dist, "all_reduce", counted):
        model(_input(rank)).sum().backward()
    gradient = layer.weight.grad
    assert gradient is not None
    return {"gradient": gradient.numpy(), "bytes": sum(sent), "dtype": str(gradient.dtype)}


def _input(rank: int) -> torch.Tensor:
    return torch.randn(5, 24, generator=torch.Generator().manual_seed(rank))


@pytest.fixture(scope="module")
def summed() -> list[dict[str, Any]]:
    return in_ranks(partial(_gradients, compressed=True), 2)


@pytest.mark.capability("E4")
def test_a_compressed_sum_is_that_of_gradients_rounded_to_bfloat16(summed):
    """The oracle is numpy with ml_dtypes' bfloat16, which rounds to nearest even."""
    gradients = [np.tile(_input(rank).sum(0).numpy(), (8, 1)) for rank in (0, 1)]
    rounded = [of.astype(ml_dtypes.bfloat16).astype(np.float32) for of in gradients]
    expected = (rounded[0] + rounded[1]).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert not np.array_equal(expected, gradients[0] + gradients[1])
    for rank in (0, 1):
        assert np.array_equal(summed[rank]["gradient"], expected)
        assert summed[rank]["dtype"] == "torch.float32"


@pytest.mark.capability("E4")
def test_half_the_bytes_are_sent(summed):
    uncompressed = in_ranks(partial(_gradients, compressed=False), 2)
    assert [of["bytes"] for of in uncompressed] == [4 * 24 * 8] * 2
    assert [of["bytes"] for of in summed] == [2 * 24 * 8] * 2


def _buckets(rank: int, *, compressed: bool) -> dict[str, Any]:
    """The gradients of two micro-batches, the first of them within `no_sync`, by each hook, and the
    number of all-reduces before and after the second backward pass."""
    join("cpu", 60)
    inputs = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(rank))
    answers: dict[str, Any] = {}
    for one_by_one in (False, True):
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(24, 24) for _ in range(3)))
        model = DistributedDataParallel(layers, gradient_as_bucket_view=True)
        hook = parallelize._sum_in_bf16 if compressed else parallelize._sum
        model.register_comm_hook(one_by_one, hook)
        with patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as reduce:
            with model.no_sync():
                model(inputs[0]).square().mean().backward()
            within = reduce.call_count
            model(inputs[1]).square().mean().backward()
        gradients = [parameter.grad.numpy() for parameter in model.parameters()]
        answers[str(one_by_one)] = (within, reduce.call_count, gradients)
    torch.manual_seed(0)
    alone = nn.Sequential(*(nn.Linear(24, 24) for _ in range(3)))
    for rows in inputs:
        alone(rows).square().mean().backward()
    answers["alone"] = [parameter.grad.numpy() for parameter in alone.parameters()]
    return answers


@pytest.mark.parametrize("compressed", [False, True])
def test_a_bucket_is_one_message_and_two_ranks_sum_the_same_bits(compressed):
    of_ranks = in_ranks(partial(_buckets, compressed=compressed), 2)
    for answer in of_ranks:
        assert [answer[hook][:2] for hook in ("False", "True")] == [(0, 1), (0, 6)]
        for bucket, single, *mine in zip(
            answer["False"][2], answer["True"][2], *(of["alone"] for of in of_ranks), strict=True
        ):
            assert np.array_equal(bucket, single)
            if compressed:
                mine = [of.astype(ml_dtypes.bfloat16).astype(np.float32) for of in mine]
            expected = mine[0] + mine[1]
            if compressed:
                expected = expected.astype(ml_dtypes.bfloat16).astype(np.float32)
            assert np.array_equal(bucket, expected)


@pytest.mark.parametrize(
    ("deterministic", "device", "ranks", "one_by_one"),
    [
        *((None, "cuda", 8, False), (None, "cpu", 3, True), (None, "cpu", 2, False)),
        *((True, "cuda", 8, True), (True, "cuda", 2, False), (False, "cpu", 3, False)),
    ],
)
def test_gradients_are_summed_one_by_one_only_where_the_order_could_differ(
    deterministic, device, ranks, one_by_one
):
    config = RunConfig(deterministic=deterministic)
    assert parallelize._sums_one_by_one(config, torch.device(device), ranks) is one_by_one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compressed")
    (path / "text.txt").write_text(TEXT)
    return path


def _trained(folder: Path, name: str, *flags: str) -> Path:
    """A run of two ranks."""
    words = ["pretrain", "--device", "cpu", *flags, "--out", name]
    ended = run_ranks(words, folder, 2, timeout_s=1800)
    assert [rank.code for rank in ended] == [0, 0], ended[0].stderr[-500:]
    return folder / name


@pytest.mark.parametrize(
    "recipe",
    [
        "delayed",
        *(pytest.param(r, marks=pytest.mark.slow) for r in ("fp32", "bf16", "fp16", *FP8[1:])),
    ],
)
@pytest.mark.full
def test_a_compressed_run_learns_the_same(recipe, folder):
    flags = [*SMALL, "--recipe", recipe]
    plain = _trained(folder, f"{recipe}-plain", *flags)
    small = _trained(folder, f"{recipe}-bf16", *flags, *BF16)
    losses = [[row["loss"] for row in metrics(run)] for run in (plain, small)]
    assert len(losses[1]) == STEPS
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[1] != losses[0]


@pytest.mark.capability("E4")
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp32", *FP8])
def test_after_300_steps_the_loss_is_within_a_thousandth(recipe, tmp_path):
    flags = [
        "--batch", "8", "--context", "64", "--steps", "300", "--eval-every", "300",
        "--save-every", "300", "--lr", "5e-4", "--recipe", recipe, "--set", "sample_tokens=0",
        "--set", "model_overrides.layers=2", "--set", "model_overrides.width=64",
        "--set", "model_overrides.heads=2", "--set", "rank_timeout=120",
    ]  # fmt: skip
    plain, small = (
        metrics(_trained(tmp_path, name, *flags, *more))[-1]["val_loss"]
        for name, more in (("plain", ()), ("bf16", BF16))
    )
    assert small == pytest.approx(plain, rel=1e-3)


def test_with_fsdp_it_is_refused_by_name():
    config, cpu = RunConfig(grad_compression="bf16", parallel="fsdp"), Hardware("cpu")
    with pytest.raises(UserError, match=r"--grad-compression bf16 with --parallel fsdp.*ddp"):
        plan_run(config, cpu, 2)
    for possible, ranks in ((RunConfig(grad_compression="bf16"), 2), (config, 1)):
        assert plan_run(possible, cpu, ranks).plans
