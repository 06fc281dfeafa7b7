"""The guard's actions when steps go wrong: roll back, leave FP8, leave fp16, stop."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8stack.common import presets
from fp8stack.common.errors import NumericFailure
from fp8stack.common.io import json_lines
from fp8stack.layers import backend as base
from fp8stack.layers.kernels import replay
from fp8stack.layers.kernels.attention import attend
from fp8stack.training.guard import monitor, policy
from tests.conftest import metrics
from tests.support.cases import case
from tests.support.small_loop import MIXTURE, SmallLoop, changed

NAN, INF = math.nan, math.inf


@pytest.mark.full
def test_steps_that_go_wrong_again_and_again_roll_back_then_take_the_layer_out_of_fp8(tmp_path):
    small = SmallLoop(tmp_path / "r", "delayed", steps=16, save_every=4, guard={"layer_steps": 3})
    small.spoil("blocks.0.mlp.up", range(6, 12))
    assert small.go() == 0
    assert small.guard_events() == [
        (6, "skip"), (7, "skip"), (8, "skip"), (8, "rollback"),
        (6, "skip"), (7, "skip"), (8, "skip"),  # left out, after 5 was done again
        (9, "skip"), (10, "skip"), (11, "skip"), (11, "demote"),
        (15, "restore"),
    ]  # fmt: skip
    by_name = {row["event"]: row for row in small.events()}
    assert by_name["rollback"]["to_step"] == 4
    demoted = by_name["demote"]
    assert (demoted["layer"], demoted["operand"]) == ("blocks.0.mlp.up", "output")
    assert (demoted["precision"], demoted["until_step"]) == ("fp32", 14)
    gemms = {row["step"]: row["fp8_gemms"] for row in metrics(tmp_path / "r") if "fp8_gemms" in row}
    assert [gemms[step] for step in (5, 12, 14, 15)] == [12, 9, 9, 12]
    losses = {row["step"]: row["loss"] for row in metrics(tmp_path / "r") if "fp8_gemms" in row}
    assert all(losses[step] is not None for step in (1, 5, 12, 16))


def test_a_weight_or_history_of_an_expert_that_is_not_finite_is_named_with_the_expert(tmp_path):
    small = SmallLoop(tmp_path / "r", "delayed", **MIXTURE)
    small.advance(1)
    delayed = small.run.backend.delayed
    assert delayed is not None
    delayed.scale("blocks.0.mlp.experts.up.1.input").fill_(NAN)
    small.advance(1)
    [cleared] = small.events()
    assert (cleared["layer"], cleared["operand"]) == ("blocks.0.mlp.experts.up.1", "input")
    with torch.no_grad():
        small.run.model.get_parameter("blocks.0.mlp.experts.down.weight")[3, 0, 0] = NAN
    with pytest.raises(NumericFailure, match=r"experts\.down\.weight\[3\] contains nan"):
        small.advance(1)


@pytest.mark.parametrize(
    ("recipe", "keys"),
    [
        *(
            case(name, {}, quick=name in ("delayed", "mxfp8", "nvfp4"))
            for name in presets.training_recipes()
        ),
        # What the guard judges follows from these keys.
        case("delayed", {"amax_algorithm": "most_recent", "history_length": 1}, quick=True),
        case("delayed", {"history_length": 2, "margin": -2, "head": True}, quick=False),
    ],
)
@pytest.mark.full
def test_the_guard_finds_nothing_in_a_clean_run(recipe, keys, tmp_path):
    small = SmallLoop(
        tmp_path / "r", recipe, steps=8, recipe_overrides=keys, guard={"warmup": 8, "window": 8},
        accumulate=2, first_loss_scale=1024.0,
    )  # fmt: skip
    small.advance(8)
    assert small.events() == []


def spoilt(folder: Path, **keys: Any) -> SmallLoop:
    """A run whose steps 6 to 11 go wrong in a layer, so that it rolls back and takes it out of FP8
    for four steps."""
    small = SmallLoop(folder, "delayed", steps=18, save_every=2, guard={"layer_steps": 4}, **keys)
    small.spoil("blocks.0.mlp.up", range(6, 12))
    return small


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], list[Any]]:
    """The final state and the events of such a run without a stop."""
    small = spoilt(tmp_path_factory.mktemp("whole") / "r")
    small.go()
    return small.everything(), small.guard_events()


@pytest.mark.parametrize(
    ("step", "saves"),
    [(8, False), (7, True), case(10, False, quick=False), case(12, False, quick=False)],
)
@pytest.mark.full
def test_a_run_that_ends_amid_the_guards_work_and_is_resumed_decides_the_same_again(
    step, saves, uninterrupted, tmp_path
):
    ended = spoilt(tmp_path / "r")
    for _ in range(step):
        number = ended.run.step + 1
        ended.loop.advance(number, ended.tokens_of(number))
    if saves:  # as where a signal asks for it
        ended.loop.stop()
    ended.run.folder.release()
    resumed = spoilt(tmp_path / "r", resume="auto")
    resumed.go()
    assert changed(uninterrupted[0], resumed.everything()) == []
    assert resumed.guard_events()[-3:] == uninterrupted[1][-3:]
    assert resumed.guard_events() == uninterrupted[1] or not saves


def test_on_a_gpu_weights_and_moments_are_looked_at_rarely_after_bad_steps_and_before_a_save(
    tmp_path, monkeypatch
):
    looked: list[int] = []
    monkeypatch.setattr(policy, "CHECK_WEIGHTS_EVERY", 6)
    monkeypatch.setattr(replay, "records", lambda device: False)

    def largest(*_: object) -> Tensor:
        looked.append(small.run.step)
        return torch.ones(())

    monkeypatch.setattr(monitor, "largest_of_state", largest)
    small = SmallLoop(tmp_path / "r", "fp32", steps=40, log_every=2)
    small.advance(4)
    assert looked == [2, 4]  # a CPU
    looked.clear()
    small.loop.monitor.device = torch.device("cuda")
    small.spoil("", {15})
    small.advance(16)
    assert looked == [6, 12, 16, 18]


@pytest.mark.capability("A8")
def test_fp16_with_a_document_mask_goes_on_in_bf16_masks_and_plan_included(tmp_path, monkeypatch):
    tokens = np.random.default_rng(0).integers(0, 40, 4000)
    tokens[9::10] = 255  # ends a document
    tokens.astype("<u2").tofile(tmp_path / "tokens.bin")
    keys: dict[str, Any] = {"data": str(tmp_path / "tokens.bin"), "tokenizer": "bytes"}
    keys |= {"document_mask": True, "telemetry_every": 1, "guard": {"overflows": 5}}
    small = SmallLoop(tmp_path / "r", "fp16", steps=9, **keys)
    run, precisions = small.run, []

    def spied(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor, dropout: float) -> Tensor:
        precisions.append((run.step, q.dtype, mask.dtype))
        return attend(q, k, v, mask=mask, dropout=dropout)

    monkeypatch.setattr(base, "attend", spied)
    run.model.get_parameter("final_norm.weight").register_hook(
        lambda gradient: gradient * (INF if run.scaler is not None and run.step + 1 >= 3 else 1.0)
    )
    fp16 = run.model
    assert small.go() == 0
    assert small.guard_events() == [(6, "loss_scale"), (7, "precision")]
    alarm = small.events()[0]["why"]
    assert alarm.startswith("4 overflows in a row. Lower --lr, clip harder")
    assert "a larger scale is no help" in alarm
    rows = [row for row in metrics(tmp_path / "r") if "event" not in row]
    assert [row["precision"] for row in rows] == ["fp16"] * 7 + ["bf16"] * 2
    assert "loss_scale" not in rows[-1]
    assert run.model.lm_head(torch.zeros(1, run.model.config.width)).dtype == torch.bfloat16
    half, brain = torch.float16, torch.bfloat16
    assert {step: dtypes for step, *dtypes in precisions} == {
        step: [half, half] if step < 7 else [brain, brain] for step in range(10)
    }
    assert run.model is not fp16
    assert fp16.backend.plan.precision == "fp16"
    assert (run.plan.precision, run.backend.plan) == ("bf16", run.plan)
    assert run.telemetry.plan is run.plan
    written = json.loads((tmp_path / "r" / "plan.json").read_text())
    assert (written["asked"], written["recipe"]["name"]) == ("fp16", "bf16")
    assert {layer["precision"] for layer in written["layers"]} == {"bf16"}
    assert "the guard left fp16 for bf16" in written["reasons"]
    sampled = json_lines(tmp_path / "r" / "telemetry.jsonl")
    layers = {row["step"]: {*row["not_fp8"].values()} for row in sampled if "not_fp8" in row}
    assert layers == {step: {"fp16" if step < 8 else "bf16"} for step in range(1, 10)}
    resumed = SmallLoop(tmp_path / "r", "fp16", steps=10, resume="auto", **keys)
    assert resumed.run.plan == run.plan
    assert json.loads((tmp_path / "r" / "plan.json").read_text()) == written
    assert resumed.go() == 0
    assert precisions[-1][1:] == (brain, brain)
    assert metrics(tmp_path / "r")[-1]["precision"] == "bf16"
