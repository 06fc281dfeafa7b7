"""Runs of mixtures of experts: what they log, and that they go on, share and skip as others do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fp8stack.common import presets
from fp8stack.model.mixture import RoutingRecord
from fp8stack.training.metrics.expert_load import load_in
from tests.conftest import metrics
from tests.faults.processes import difference, run_ranks
from tests.support.cases import case
from tests.support.small_loop import MIXTURE, SmallLoop

FLAGS = [
    "pretrain", "--model", "gpt-nano-moe", "--device", "cpu", "--seed", "5", "--batch", "4",
    "--steps", "6", "--save-every", "3", "--eval-every", "6", "--lr", "1e-2", "--context", "32",
    "--set", "sample_tokens=0", "--set", "eval_windows=2", "--set", "telemetry_every=3",
    "--set", "warmup_steps=2", "--set", "model.layers=2", "--set", "model.width=32",
    "--set", "model.heads=2", "--set", "model.experts.count=4", "--set", "model.experts.width=32",
]  # fmt: skip
BIASED = ("--set", "model.experts.bias=0.01")
BIAS = "blocks.1.mlp.balance_bias"


def biases(run: Path, step: int = 6) -> Tensor:
    return load_file(run / "checkpoints" / f"step-{step:06}" / "model.safetensors")[BIAS]


def test_the_load_is_the_mean_over_passes_and_counts_all_tokens():
    record = RoutingRecord()
    assert load_in(record, 1) is None
    record.counts, record.passes = torch.tensor([[4, 0, 8, 4], [4, 4, 4, 4]]), 2
    record.balance = torch.tensor([3.0, 2.0])
    load = load_in(record, 1)
    assert load is not None
    assert load.metrics() == {"balance_loss": 1.25, "idle_experts": 1}
    assert load.rows(7, ["a", "b"]) == [
        {"step": 7, "experts": "a", "shares": [0.25, 0, 0.5, 0.25]},
        {"step": 7, "experts": "b", "shares": [0.25] * 4},
    ]
    assert load.numbers(["a", "b"]) == {
        "experts/largest/a": 2, "experts/largest/b": 1, "experts/idle/a": 1, "experts/idle/b": 0,
    }  # fmt: skip


@pytest.mark.capability("A14")
def test_a_run_of_a_mixture_logs_its_load_and_goes_on_to_the_bit(tmp_path, command, capsys):
    flags = [*FLAGS, *BIASED, "--recipe", "delayed", "--accumulate", "2"]
    for out in ("finished", "cut"):
        assert command(*flags, "--out", out) == 0
    printed = capsys.readouterr().out
    assert "expert groups" in printed
    assert " | balance 1.0" in printed
    assert "parameters, " in printed
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-000006")
    assert command("pretrain", "--resume", "cut") == 0
    assert difference(tmp_path / "cut", tmp_path / "finished") == ""
    assert biases(tmp_path / "cut").abs().max() > 0
    assert not torch.equal(biases(tmp_path / "cut", 3), biases(tmp_path / "cut"))
    row = metrics(tmp_path / "cut")[0]
    assert 0.9 < row["balance_loss"] < 4
    assert row["idle_experts"] in range(8)
    lines = (tmp_path / "cut" / "telemetry.jsonl").read_text().splitlines()
    shares = [row for line in lines if "shares" in (row := json.loads(line))]
    assert {row["step"] for row in shares} == {1, 3, 6}
    assert {row["experts"] for row in shares} == {"blocks.0.mlp", "blocks.1.mlp"}
    assert sum(shares[0]["shares"]) == pytest.approx(1, abs=1e-5)


@pytest.mark.capability("A14")
@pytest.mark.parametrize(
    ("recipe", "parallel"),
    [
        case("fp32", "ddp", quick=True),
        case("delayed", "fsdp", quick=True),
        case("mxfp8", "ddp", quick=False),
    ],
)
@pytest.mark.full
def test_two_ranks_train_like_one(tmp_path, recipe, parallel):
    rows = {}
    for ranks in (1, 2):
        flags = ("--recipe", recipe, "--parallel", parallel, "--set", "rank_timeout=60")
        words = [*FLAGS, *BIASED, *flags, "--accumulate", "2", "--out", str(ranks)]
        ended = run_ranks(words, tmp_path, ranks, timeout_s=400)
        assert [rank.code for rank in ended] == [0] * ranks, ended
        rows[ranks] = metrics(tmp_path / str(ranks))
    near = 1e-5 if recipe == "fp32" else 5e-3
    for row, expected in zip(rows[2], rows[1], strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=near)
        assert row["balance_loss"] == pytest.approx(expected["balance_loss"], rel=10 * near)
    if recipe == "fp32" and parallel == "ddp":
        assert torch.equal(biases(tmp_path / "2"), biases(tmp_path / "1"))


def test_a_step_that_is_skipped_moves_no_bias(tmp_path):
    experts = {"count": 4, "width": 32, "bias": 0.01}
    overrides = {"layers": 2, "experts": experts}
    loop = SmallLoop(tmp_path / "r", "delayed", **MIXTURE | {"model_overrides": overrides})
    loop.advance()
    before = loop.run.model.get_buffer(BIAS).clone()
    loop.spoil("blocks.1.mlp.experts.down.weight", [2])
    loop.advance()
    assert loop.guard_events() == [(2, "skip")]
    assert torch.equal(loop.run.model.get_buffer(BIAS), before)
    loop.advance()
    assert not torch.equal(loop.run.model.get_buffer(BIAS), before)


def test_a_balance_loss_replaces_the_bias(tmp_path, command):
    preset = presets.find("models", "gpt-nano-moe").read_text()  # [experts] comes last
    (tmp_path / "mine.toml").write_text(f"{preset}bias = 0.01\n")
    flags = ["--recipe", "fp32", "--set", "model.experts.balance=0.1", "--steps", "1"]
    flags += ["--model", "mine.toml"]
    assert command(*FLAGS, *flags, "--out", "o") == 0
    assert BIAS not in load_file(tmp_path / "o/checkpoints/step-000001/model.safetensors")


def test_experts_whose_amaxes_go_wrong_leave_fp8_together(tmp_path):
    loop = SmallLoop(tmp_path / "r", "delayed", **MIXTURE, steps=12, guard={"patience": 2})
    loop.spoil("blocks.0.mlp.experts.up", range(3, 99))
    assert loop.go() == 0
    demoted = [row for row in loop.events() if row["event"] == "demote"]
    assert [row["layer"] for row in demoted] == ["blocks.0.mlp.experts.up"]
