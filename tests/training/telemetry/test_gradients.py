"""Gradients by part of the model: what telemetry writes, and what the report says of faults."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fp8stack import GPT, build_backend
from fp8stack.analysis.report.analysis import analyze, verdict
from fp8stack.analysis.report.gradient_faults import faults
from fp8stack.analysis.report.run_record import read_run
from fp8stack.analysis.report.telemetry import Gradient
from fp8stack.training.telemetry import gradients
from tests.faults.processes import run_ranks
from tests.faults.twins import SMALL, TEXT
from tests.support.cases import case
from tests.support.small_loop import SmallLoop

FOUR = {"layers": 4, "width": 32, "heads": 2}
SILENT: dict[str, Any] = {"eval_every": 100, "save_every": 100, "steps": 10}


def loop(folder: Path, recipe: str = "fp32", every: int = 2, **flags: Any) -> SmallLoop:
    return SmallLoop(folder / "r", recipe, telemetry_every=every, **(SILENT | flags))


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "r" / "telemetry.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "gradient" in row]


def findings(folder: Path) -> list[str]:
    return [
        finding.text
        for finding in analyze(read_run(folder / "r")).findings
        if finding.level != "note"
    ]


@pytest.mark.capability("A6")
@pytest.mark.parametrize(("recipe", "accumulate"), [("fp32", 1), ("fp16", 2)])
def test_the_rows_are_the_norms_of_the_steps_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, accumulate: int
) -> None:
    """The gradients of all micro-batches, without fp16's scale, before clipping."""
    small = loop(tmp_path, recipe, accumulate=accumulate, clip=1e-3)
    model = small.run.model
    small.advance(1)
    tokens = small.tokens_of(2)
    twin = GPT(model.config, build_backend(small.run.plan))
    twin.load_state_dict(model.state_dict())
    small.advance(1)
    for name in tokens.chunk(accumulate):
        (twin(name[:, :-1], name[:, 1:]) / accumulate).backward()
    by_part = {row["gradient"]: row for row in rows(tmp_path) if row["step"] == 2}
    assert [*by_part] == [
        "embedding", "blocks.0",
        *(f"blocks.0.{name}" for name in (
            "attention_norm", "attention.qkv", "attention.output", "attention.query_norm",
            "attention.key_norm", "mlp_norm", "mlp.up", "mlp.down")),
        "final_norm", "lm_head",
    ]  # fmt: skip
    close = 2e-3 if recipe == "fp16" else 1e-5  # the scale rounds fp16's small gradients elsewhere
    for name, row in by_part.items():
        inside = twin.get_submodule(name)
        gradients = [p.grad for p in inside.parameters() if p.grad is not None]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        weight = math.sqrt(
            sum(float(p.detach().double().square().sum()) for p in inside.parameters())
        )
        assert row["norm"] == pytest.approx(norm, rel=close)
        assert row["ratio"] == pytest.approx(norm / weight, rel=close)
        zeros = sum(int((g == 0).sum()) for g in gradients)
        elements = sum(g.numel() for g in gradients)
        assert row["zeros"] == pytest.approx(zeros / elements, abs=1e-3 if close > 1e-4 else 1e-6)
    total = [by_part[name]["norm"] for name in ("embedding", "blocks.0", "final_norm", "lm_head")]
    metrics = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").open()]
    assert metrics[1]["grad_norm"] == pytest.approx(math.hypot(*total), rel=1e-4)


def test_what_is_frozen_has_no_row_and_what_is_not_finite_is_null() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    model[1].weight.grad = torch.tensor([[math.nan, 0.0], [0.0, 1.0]])
    flow = gradients.look(model)
    assert flow is not None
    assert gradients.figures(flow, flow.sums.tolist()) == [
        {"part": "1", "norm": None, "ratio": None, "zeros": 0.5},
        {"part": "2", "norm": 0.0, "ratio": 0.0, "zeros": 1.0},
    ]
    assert gradients.look(model.requires_grad_(False)) is None


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [("delayed", "emulate"), ("fp16", "auto"), ("delayed", "torch")],
)
@pytest.mark.full
def test_the_runs_numbers_are_the_same_to_the_bit_with_and_without(
    tmp_path: Path, recipe: str, backend: str
) -> None:
    ends = []
    for every in (0, 1):
        more: dict[str, Any] = {"what_if": ["current", "bf16"]} if every else {}
        small = loop(tmp_path / str(every), recipe, every, accumulate=2, backend=backend, **more)
        small.advance(4)
        ends.append(small.state())
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])
    assert not (tmp_path / "0" / "r" / "telemetry.jsonl").exists()


def _detach(model: GPT) -> None:
    """A fault that is made easily: the output of an MLP is taken off the graph."""
    model.blocks[1].mlp.register_forward_hook(lambda module, args, y: y.detach())
    model.blocks[2].attention.register_forward_hook(lambda module, args, y: y.detach())
    model.blocks[2].mlp.register_forward_hook(lambda module, args, y: y.detach())


def _scaled(times: float) -> Callable[[GPT], None]:
    def change(model: GPT) -> None:
        weight = model.get_parameter("blocks.1.mlp.up.weight")
        weight.register_hook(lambda gradient: times * gradient)

    return change


@pytest.mark.capability("A6")
@pytest.mark.parametrize(
    ("recipe", "spoil", "named", "level"),
    [
        ("fp32", _detach, "Dead: no gradient reaches blocks.1.mlp_norm, blocks.1.mlp.up, "
         "blocks.1.mlp.down and blocks.2; it was exactly zero at 6 samples", "alarm"),
        ("delayed", _detach, "it was exactly zero at 5 samples in a row, steps 2 to 10", "alarm"),
        ("fp32", _scaled(1e6), "Exploding: the gradient of blocks.1.mlp.up has", "warning"),
        pytest.param(
            "fp32", _scaled(1e-6), "Vanishing: the gradient of blocks.1.mlp.up has", "warning",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
@pytest.mark.full
def test_an_injected_fault_is_named(
    tmp_path: Path, recipe: str, spoil: Callable[[GPT], None], named: str, level: str
) -> None:
    small = loop(tmp_path, recipe, model_overrides=FOUR, guard={"enabled": False})
    spoil(small.run.model)
    small.advance(10)
    analysis = analyze(read_run(tmp_path / "r"))
    words = ("Dead", "Vanishing", "Exploding")
    named_faults = [finding for finding in analysis.findings if finding.text.startswith(words)]
    assert len(named_faults) == 1
    assert named in named_faults[0].text
    assert named_faults[0].level == level
    assert "Needs attention" in verdict(analysis)


@pytest.mark.capability("A6")
@pytest.mark.parametrize(
    "recipe",
    [case(x, quick=x in ("fp16", "delayed")) for x in ("fp32", "fp16", "delayed", "mxfp8")],
)
@pytest.mark.full
def test_a_clean_run_has_no_such_finding(tmp_path: Path, recipe: str) -> None:
    small = loop(tmp_path, recipe, model_overrides=FOUR)
    small.advance(10)
    texts = findings(tmp_path)
    assert not [text for text in texts if text.startswith(("Dead", "Vanishing", "Exploding"))]
    if recipe in ("fp32", "fp16"):
        assert verdict(analyze(read_run(tmp_path / "r"))).startswith("Nothing")


def series(norms: dict[str, list[float]]) -> list[Gradient]:
    return [
        Gradient(
            module=module,
            steps=np.arange(1, len(values) + 1) * 10,
            figures={"norm": np.array(values), "ratio": np.array(values),
                     "zeros": np.zeros(len(values))},
        )
        for module, values in norms.items()
    ]  # fmt: skip


def named(norms: dict[str, list[float]], delayed: bool = False) -> set[tuple[str, str]]:
    return {(fault.kind, fault.module) for fault in faults(series(norms), delayed)}


def test_where_gradients_explode_on_their_way_the_end_of_the_model_is_sound() -> None:
    """The fault is in a block in the middle: all before it explode, most of the model."""
    norms = {f"blocks.{i}.mlp.up": [1e5 if i < 4 else 1.0] * 5 for i in range(6)}
    assert named(norms | {"final_norm": [0.1] * 5}) == {
        ("exploding", f"blocks.{i}.mlp.up") for i in range(4)
    }
    usual = {f"blocks.{i}.mlp.up": [1.0] * 6 for i in range(5)}  # two samples are no fault
    assert not named(usual | {"blocks.1.mlp.up": [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]})
    assert not named(usual | {"blocks.1.mlp.up": [0.01] * 6, "blocks.2.mlp.up": [100.0] * 6})


def _rank_rows(folder: Path, ranks: int, *flags: str) -> list[dict[str, Any]]:
    words = ["pretrain", "--data", "text.txt", *SMALL, "--batch", "8", "--steps", "2"]
    words += ["--recipe", "fp32", "--set", "sample_tokens=0", "--set", "telemetry_every=1"]
    words += ["--out", "r", *flags]
    folder.mkdir()
    (folder / "text.txt").write_text(TEXT)
    ended = run_ranks(words, folder, ranks, timeout_s=200)
    assert [rank.code for rank in ended] == [0] * ranks, ended
    return rows(folder)


@pytest.mark.slow
def test_ranks_see_the_gradients_of_the_whole_model(tmp_path: Path) -> None:
    """Also where each holds a part of it, and with activation checkpointing."""
    alone = _rank_rows(tmp_path / "alone", 1)
    assert len(alone) == 2 * 12
    for parallel, mode in (("ddp", "selective"), ("fsdp", "none"), ("fsdp", "selective")):
        flags = ("--parallel", parallel, "--activation-checkpointing", mode)
        rank_rows = _rank_rows(tmp_path / f"{parallel}-{mode}", 2, *flags)
        assert [row["gradient"] for row in rank_rows] == [row["gradient"] for row in alone]
        for row, alone_row in zip(rank_rows, alone, strict=True):
            assert row["step"] == alone_row["step"]
            assert row["norm"] == pytest.approx(alone_row["norm"], rel=2e-3)
            assert row["ratio"] == pytest.approx(alone_row["ratio"], rel=2e-3)
            assert row["zeros"] == pytest.approx(alone_row["zeros"], abs=2e-3)
