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
from torch import Tensor, nn
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
from tests.faults.twins import SMALL, TEXT
from tests.support.cases import case


def _buckets(rank: int, *, compressed: bool) -> dict[str, Any]:
    """The gradients of two micro-batches, the first of them within `no_sync`, by each hook, the
    number of all-reduces before and after the second backward pass, and the bytes sent."""
    join("cpu", 60)
    inputs = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(rank))
    answers: dict[str, Any] = {}
    for one_by_one in (False, True):
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(24, 24) for _ in range(3)))
        model = DistributedDataParallel(layers, gradient_as_bucket_view=True)
        hook = parallelize._sum_in_bf16 if compressed else parallelize._sum
        model.register_comm_hook(one_by_one, hook)
        sent: list[int] = []

        def counted(tensor: Tensor, reduce: Any = dist.all_reduce, **options: Any) -> Any:
            sent.append(tensor.nbytes)  # noqa: B023
            return reduce(tensor, **options)

        with patch.object(dist, "all_reduce", counted):
            with model.no_sync():
                model(inputs[0]).square().mean().backward()
            within = len(sent)
            model(inputs[1]).square().mean().backward()
        gradients = [parameter.grad.numpy() for parameter in model.parameters()]
        answers[str(one_by_one)] = (within, len(sent), sum(sent), gradients)
    torch.manual_seed(0)
    alone = nn.Sequential(*(nn.Linear(24, 24) for _ in range(3)))
    for rows in inputs:
        alone(rows).square().mean().backward()
    answers["alone"] = [parameter.grad.numpy() for parameter in alone.parameters()]
    return answers


@pytest.mark.capability("E4")
@pytest.mark.parametrize("compressed", [False, True])
def test_a_bucket_is_one_message_and_two_ranks_sum_the_same_bits(compressed):
    """The oracle of bfloat16 is numpy with ml_dtypes, which rounds to nearest even."""
    of_ranks = in_ranks(partial(_buckets, compressed=compressed), 2)
    sent = (2 if compressed else 4) * 3 * (24 * 24 + 24)
    for answer in of_ranks:
        hooks = [answer[hook][:3] for hook in ("False", "True")]
        assert hooks == [(0, 1, sent), (0, 6, sent)]
        for bucket, single, *mine in zip(
            answer["False"][3], answer["True"][3], *(of["alone"] for of in of_ranks), strict=True
        ):
            assert np.array_equal(bucket, single)
            if compressed:
                mine = [of.astype(ml_dtypes.bfloat16).astype(np.float32) for of in mine]
            expected = mine[0] + mine[1]
            if compressed:
                expected = expected.astype(ml_dtypes.bfloat16).astype(np.float32)
            assert np.array_equal(bucket, expected)
            assert bucket.dtype == np.float32


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


def _trained(folder: Path, name: str, *flags: str) -> list[dict[str, Any]]:
    """The rows of a run of two ranks."""
    (folder / "text.txt").write_text(TEXT)
    words = ["pretrain", "--data", "text.txt", *SMALL, "--batch", "8", *flags, "--out", name]
    ended = run_ranks([*words, "--set", "sample_tokens=0"], folder, 2, timeout_s=1800)
    assert [rank.code for rank in ended] == [0, 0], ended[0].stderr[-500:]
    return metrics(folder / name)


LONG = [
    *("--steps", "300", "--eval-every", "300", "--save-every", "300", "--context", "64"),
    *("--lr", "5e-4", "--set", "model_overrides.layers=2", "--set", "model_overrides.width=64"),
]


@pytest.mark.capability("E4")
@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        ("delayed", ("--steps", "6")),
        *(case(r, LONG, quick=False) for r in ("fp32", "bf16", "fp16", *FP8)),
    ],
)
@pytest.mark.full
def test_a_compressed_run_learns_the_same(recipe, flags, tmp_path):
    flags = ("--recipe", recipe, *flags)
    plain, small = (
        _trained(tmp_path, name, *flags, "--set", f"grad_compression={name}")
        for name in ("none", "bf16")
    )
    losses = [[row["loss"] for row in rows] for rows in (plain, small)]
    assert losses[1] != losses[0]
    assert losses[1][:6] == pytest.approx(losses[0][:6], rel=1e-3)
    assert small[-1]["val_loss"] == pytest.approx(plain[-1]["val_loss"], rel=2e-3)


def test_with_fsdp_it_is_refused_by_name():
    config, cpu = RunConfig(grad_compression="bf16", parallel="fsdp"), Hardware("cpu")
    with pytest.raises(UserError, match=r"--grad-compression bf16 with --parallel fsdp.*ddp"):
        plan_run(config, cpu, 2)
    for possible, ranks in ((RunConfig(grad_compression="bf16"), 2), (config, 1)):
        assert plan_run(possible, cpu, ranks).plans
