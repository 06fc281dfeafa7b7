"""Runs whose recipe changes with the step: switched when they should be, and resumed to the bit."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from fp8stack.common.errors import UserError
from fp8stack.layers import fp8_state
from fp8stack.layers.observe import fp8_parts
from fp8stack.precision import Hardware
from fp8stack.training import loop
from fp8stack.training.dataloader import batches
from fp8stack.training.guard.policy import WHOLE, Outcome
from fp8stack.training.metrics.console import describe_run
from tests.conftest import TINY, metrics
from tests.faults.processes import difference
from tests.support.cases import case
from tests.support.small_loop import SmallLoop, changed

pytestmark = pytest.mark.usefixtures("one_thread")

# 12 steps: 1 to 3 in bf16, 4 to 9 in the run's recipe, 10 to 12 in fp32.
PHASES = """
[[phases]]
name = "early"
recipe = "bf16"
until = 3
[[phases]]
name = "middle"
until = 9
[[phases]]
name = "late"
recipe = "fp32"
"""


@pytest.fixture
def phases(tmp_path: Path) -> str:
    (tmp_path / "phases.toml").write_text(PHASES)
    return str(tmp_path / "phases.toml")


def three(recipe: str, middle: dict | None = None) -> tuple:
    return (
        {"name": "early", "recipe": recipe, "until": 3},
        {"name": "middle", "until": 6} | (middle or {}),
        {"name": "late", "recipe": recipe},
    )


def events(run: Path) -> list[tuple]:
    phase_rows = [row for row in metrics(run) if row.get("event") == "phase"]
    return [(row["step"], row["phase"], row["precision"]) for row in phase_rows]


def numbers(run: Path) -> list[tuple]:
    """The rows of a run's steps, without times."""
    keys = ("step", "loss", "grad_norm", "lr", "val_loss", "phase", "precision")
    return [tuple(row.get(key) for key in keys) for row in metrics(run) if "loss" in row]


def test_phases_switch_at_their_exact_steps_and_the_log_shows_it(command, phases, tmp_path, capsys):
    assert command("pretrain", "--config", phases, "--recipe", "delayed", "--out", "r", *TINY) == 0
    out = capsys.readouterr().out
    sentence = "early 1 to 3 in bf16, middle 4 to 9 in delayed-emulated, late 10 to 12 in fp32"
    assert f"phases: {sentence}" in out
    assert "step 4: phase middle begins, in delayed-emulated\n" in out
    run = tmp_path / "r"
    assert events(run) == [
        (1, "early", "bf16"),
        (4, "middle", "delayed-emulated"),
        (10, "late", "fp32"),
    ]
    rows = [row for row in metrics(run) if "loss" in row]
    assert [row["phase"] for row in rows] == ["early"] * 3 + ["middle"] * 6 + ["late"] * 3
    assert [row["fp8_gemms"] > 0 for row in rows] == [4 <= row["step"] <= 9 for row in rows]
    plan = json.loads((run / "plan.json").read_text())
    assert plan["recipe"]["name"] == "delayed"
    assert [(p["first"], p["last"], p["precision"]) for p in plan["phases"]] == [
        (1, 3, "bf16"), (4, 9, "delayed-emulated"), (10, 12, "fp32"),
    ]  # fmt: skip
    assert [p["compute_dtype"] for p in plan["phases"]] == ["bf16", "fp32", "fp32"]


@pytest.mark.parametrize(
    "recipe",
    [case(x, quick=x in ("delayed", "fp16")) for x in ("delayed", "current", "mxfp8", "fp16")],
)
def test_a_run_resumed_within_each_phase_repeats_to_the_bit(command, phases, recipe):
    saved = [*TINY, "--save-every", "1", "--set", "keep_checkpoints=12"]
    flags = ["--config", phases, "--recipe", recipe]
    assert command("pretrain", *flags, "--out", "whole", *saved) == 0
    for step in (1, 3, 4, 6, 9, 10) if recipe == "delayed" else (3, 5):
        shutil.rmtree("again", ignore_errors=True)
        shutil.copytree("whole", "again")
        assert command("pretrain", "--resume", f"again/checkpoints/step-{step:06}") == 0
        assert difference(Path("again"), Path("whole")) == "", step


def test_a_run_with_stochastic_rounding_in_some_phase_repeats_to_the_bit(command, tmp_path):
    phases = PHASES.replace('recipe = "fp32"', 'recipe = "nvfp4"')
    (tmp_path / "phases.toml").write_text(phases)
    saved = [*TINY, "--save-every", "1", "--set", "keep_checkpoints=12"]
    flags = ["--config", "phases.toml", "--recipe", "delayed"]
    assert command("pretrain", *flags, "--out", "whole", *saved) == 0
    for step in (2, 5, 11):
        shutil.rmtree("again", ignore_errors=True)
        shutil.copytree("whole", "again")
        assert command("pretrain", "--resume", f"again/checkpoints/step-{step:06}") == 0
        assert difference(Path("again"), Path("whole")) == "", step


def test_steps_of_the_first_phase_are_those_of_a_run_in_its_recipe_alone(tmp_path):
    phased = SmallLoop(tmp_path / "p", "current", phases=three("bf16"), steps=9)
    alone = SmallLoop(tmp_path / "a", "bf16", steps=9)
    # Padded to another multiple, the logits' GEMM may sum in another order.
    for small in (phased, alone):
        small.advance(3)
    first, second = ([row["loss"] for row in metrics(tmp_path / n)[-3:]] for n in "pa")
    assert first == pytest.approx(second, rel=1e-6)
    assert phased.run.plan.precision == "bf16"
    phased.advance(1)
    assert phased.run.plan.precision == "current-emulated"


def test_all_variants_have_the_same_parameters(tmp_path):
    run = SmallLoop(tmp_path / "r", "delayed", phases=three("bf16")).run
    names = [dict(v.model.named_parameters(remove_duplicate=False)) for v in run.variants]
    assert len(names) == 3  # bf16, delayed, and fp32 for the quality guard
    assert all(names[0][name] is named[name] for named in names[1:] for name in names[0])
    assert run.wrapped.get_submodule("models.1") is run.variants[1].model
    held = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in names[0].values()}


def test_delayed_scaling_begins_with_the_scales_of_the_steps_before(tmp_path):
    states, rows = {}, {}
    for calibration in (0, 2):
        small = SmallLoop(
            tmp_path / str(calibration), "delayed", phases=three("fp32"),
            calibration_steps=calibration, accumulate=2,
        )  # fmt: skip
        small.advance(3)
        states[calibration] = fp8_state(small.run.main.model)
        rows[calibration] = numbers(tmp_path / str(calibration))
    assert rows[0] == rows[2]  # to look at those steps does not change them
    scales = [{n: t for n, t in states[k].items() if n.endswith(".scale")} for k in (0, 2)]
    assert all((scale == 1).all() for scale in scales[0].values())
    for name, scale in scales[1].items():
        history = states[2][name.replace(".scale", ".amax_history")]
        recorded = history[history > 0]
        assert len(recorded) == 2, name
        largest = 448.0 if not name.endswith("grad_output.scale") else 57344.0
        torch.testing.assert_close(scale.squeeze(), largest / recorded.max(), rtol=1e-6, atol=0)


def test_calibration_in_fp16_takes_the_loss_scale_out_of_the_gradients(tmp_path):
    scales = {}
    for recipe in ("fp32", "fp16"):
        small = SmallLoop(
            tmp_path / recipe, "delayed", phases=three(recipe), calibration_steps=2,
            first_loss_scale=4096.0,
        )  # fmt: skip
        small.advance(3)
        scales[recipe] = fp8_state(small.run.main.model)
    for name, scale in scales["fp32"].items():
        if name.endswith(".scale"):
            torch.testing.assert_close(scales["fp16"][name], scale, rtol=0.05, atol=0)


def test_validation_in_delayed_scaling_is_calibrated_where_no_phase_trains_in_it(tmp_path):
    phases = ({"name": "evaluation", "recipe": "delayed"},)
    keys: dict[str, Any] = {"eval_every": 4, "steps": 5, "calibration_steps": 2}
    small = SmallLoop(tmp_path / "r", "fp32", phases=phases, **keys)
    assert [step for step in range(1, 6) if small.loop.phases.calibrates(step)] == [3, 4, 5]
    small.advance(4)
    state = fp8_state(small.run.main.model)
    assert all((t != 1).all() for name, t in state.items() if name.endswith(".scale"))
    with pytest.raises(UserError, match="Set calibration_steps to 1 or more"):
        SmallLoop(tmp_path / "n", "fp32", phases=phases, **(keys | {"calibration_steps": 0}))


def test_recorded_amaxes_are_those_of_the_operands(tmp_path):
    small = SmallLoop(
        tmp_path / "r", "delayed", phases=three("fp32"), calibration_steps=1, accumulate=2
    )
    small.advance(2)
    inputs: list[float] = []
    up = small.run.model.get_submodule("blocks.0.mlp.up")
    up.register_forward_pre_hook(lambda _, args: inputs.append(float(args[0].detach().abs().max())))
    before = {n: float(p.detach().abs().max()) for n, p in small.run.model.named_parameters()}
    small.advance(1)
    state = fp8_state(small.run.main.model)
    recorded = {n.removesuffix(".amax_history"): float(t.max()) for n, t in state.items()}
    assert recorded["blocks.0.mlp.up.weight"] == before["blocks.0.mlp.up.weight"]
    assert recorded["blocks.0.mlp.up.input"] == inputs[0]
    assert all(value > 0 for value in recorded.values())


@pytest.mark.parametrize("first", ["fp32", "current"])
def test_amaxes_of_a_head_are_those_of_all_chunks_and_of_the_whole_loss(first, tmp_path):
    """A plain head lacks factors of the loss in its chunks, and a head in FP8 has them."""
    recorded = {}
    phases = three(first, {"recipe_overrides": {"head": True}})
    if first == "current":
        phases = tuple(phase | {"recipe_overrides": {"head": True}} for phase in phases)
    for rows in (None, 128):
        small = SmallLoop(
            tmp_path / str(rows), "delayed", phases=phases, calibration_steps=1, accumulate=2,
            batch=16,
        )  # fmt: skip
        for variant in small.run.variants:
            variant.model.loss.chunk_rows = rows
        small.advance(3)
        state = fp8_state(small.run.main.model)
        recorded[rows] = {name: float(t.max()) for name, t in state.items() if "lm_head" in name}
    assert len(recorded[128]) == 6
    assert recorded[128] == pytest.approx(recorded[None], rel=1e-5 if first == "fp32" else 0.1)


def test_evaluation_has_a_recipe_of_its_own(tmp_path):
    """fp32 losses of an FP8 run equal the losses of the same weights in a run in fp32."""
    small_run = partial(SmallLoop, recipe="current", eval_every=2, steps=2)
    with_recipe = small_run(tmp_path / "own", phases=({"name": "evaluation", "recipe": "fp32"},))
    plain = small_run(tmp_path / "plain")
    for small in (with_recipe, plain):
        small.advance(2)
    loss, plain_loss = (metrics(tmp_path / n)[-1]["val_loss"] for n in ("own", "plain"))
    assert loss != plain_loss  # the weights are the same, the GEMMs are not
    reference = next(v for v in with_recipe.run.variants if v.plan.recipe.name == "fp32")
    tokens = with_recipe.run.data.windows
    with torch.no_grad():
        expected = reference.model.eval()(tokens[:, :-1], tokens[:, 1:])
    assert loss == pytest.approx(float(expected), rel=1e-6)
    assert changed(with_recipe.state(), plain.state()) == []


def harmful(folder: Path, *more: dict[str, Any]) -> SmallLoop:
    """A loop whose FP8 variant negates the output of the last block in validation, with `more`
    phases."""
    small = SmallLoop(
        folder, "current", phases=(*three("bf16", {"until": 7}), *more), calibration_steps=0,
        eval_every=2, save_every=2, steps=8,
    )  # fmt: skip
    fp8 = next(v for v in small.run.variants if v.plan.is_fp8).model
    fp8.blocks[-1].register_forward_hook(lambda m, a, y: y if m.training else -y)
    return small


def test_that_the_phases_ended_is_told_again_where_a_resumed_run_lost_it(tmp_path):
    small = harmful(tmp_path / "r")
    small.advance(4)
    (ending,) = [row for row in metrics(tmp_path / "r") if row.get("phase") == "conservative"]
    small = small.resumed()
    assert any("ended the phases after step 4" in note for note in small.run.notes)
    small.advance(2)
    rows = [row for row in metrics(tmp_path / "r") if row.get("event") == "phase"]
    assert (rows[-1]["step"], rows[-1]["why"]) == (5, ending["why"])
    assert sum(row["phase"] == "conservative" for row in rows) == 1


def test_a_recipe_that_does_harm_gives_way_to_fp32_for_good(tmp_path):
    small = harmful(tmp_path / "r")
    small.advance(8)
    rows = metrics(tmp_path / "r")
    switches = [row for row in rows if row.get("phase") == "conservative" and "event" in row]
    assert [(row["step"], row["precision"]) for row in switches] == [(5, "fp32")]
    assert "worse than the" in switches[0]["why"]
    assert "guard.quality allows 1 %" in switches[0]["why"]
    precisions = [row["precision"] for row in rows if "loss" in row]
    assert precisions == ["bf16"] * 3 + ["current-emulated"] + ["fp32"] * 4
    saved = str(tmp_path / "r/checkpoints/step-000006")
    for guard in ({}, {"enabled": False}):
        small = small.resumed(resume=saved, guard=guard)
        small.advance(1)
        assert small.run.plan.precision == "fp32"


def test_after_the_phases_ended_losses_and_the_sample_are_of_the_reference(tmp_path, monkeypatch):
    small = harmful(tmp_path / "r", {"name": "evaluation", "recipe": "current"})
    sampled: list[Any] = []
    monkeypatch.setattr(
        loop, "finish", lambda run, display, variant, evaluate: sampled.append(variant)
    )
    assert small.go() == 0
    assert small.run.plan.precision == "fp32"
    row = metrics(tmp_path / "r")[-1]
    assert (row["step"], row["val_loss"]) == (8, small.loop.loss_in(small.run.active))
    assert row["val_loss"] != small.loop.loss_in(small.run.evaluation)
    assert sampled == [small.run.active]


def test_a_comparison_that_a_stop_cut_short_is_made_when_the_run_goes_on(tmp_path):
    small = SmallLoop(
        tmp_path / "r", "current", phases=three("bf16"), eval_every=2, steps=6, calibration_steps=0
    )
    small.advance(3)
    stops = iter([False] * 1 + [True] * 99)  # after the row's own evaluation
    with patch.object(small.loop, "stops", lambda: next(stops)):
        small.advance(1)
    assert (small.loop.phases.judged_at, metrics(tmp_path / "r")[-1]["step"]) == (2, 4)
    assert "val_loss" in metrics(tmp_path / "r")[-1]
    small.loop.save()
    resumed = small.resumed()
    assert resumed.loop.phases.judged_at == 2
    resumed.loop.evaluate_if_interrupted()
    assert resumed.loop.phases.judged_at == 4


@pytest.mark.parametrize("first", ["delayed", "mxfp8"])
def test_a_run_goes_on_whose_later_phase_rounds_at_random(first, tmp_path):
    keys: dict[str, Any] = {"phases": three(first), "steps": 7, "width": 128}
    uninterrupted = SmallLoop(tmp_path / "a", "nvfp4", **keys)
    uninterrupted.advance(7)
    small = SmallLoop(tmp_path / "b", "nvfp4", **keys)
    small.advance(5)
    small.loop.save()
    resumed = small.resumed()
    assert resumed.run.step == 5
    resumed.advance(2)
    assert changed(uninterrupted.everything(), resumed.everything()) == []


def test_a_recipe_that_does_none_stays(tmp_path):
    small = SmallLoop(tmp_path / "r", "current", phases=three("bf16"), eval_every=2, steps=6)
    with patch.object(small.loop, "loss_in", wraps=small.loop.loss_in) as compared:
        small.advance(6)
    assert [row for row in metrics(tmp_path / "r") if row.get("phase") == "conservative"] == []
    # At steps 2, 4 and 6 for the row, and twice for each comparison, but nothing follows step 6.
    assert compared.call_count == 7


def test_a_roll_back_over_a_switch_goes_on_in_the_phase_before(tmp_path):
    small = SmallLoop(tmp_path / "r", "delayed", phases=three("bf16"), save_every=2, steps=9)
    small.advance(3)
    handle = small.run.main.model.register_forward_hook(
        lambda m, a, y: y * torch.nan if m.training else y
    )
    while small.run.step >= 3:
        small.advance(1)
    handle.remove()
    assert (small.run.step, small.run.plan.precision) == (2, "delayed-emulated")
    small.tokens = batches(small.run)
    small.advance(1)
    assert small.run.plan.precision == "bf16"


def test_a_phase_that_returns_is_not_compiled_again(tmp_path, monkeypatch):
    counter = CompileCounterWithBackend("eager")
    phases = (
        {"name": "a", "recipe": "bf16", "until": 1},
        {"name": "b", "until": 2},
        {"name": "c", "recipe": "bf16", "until": 3},
        {"name": "d"},
    )
    small = SmallLoop(
        tmp_path / "r", "fp32", phases=phases, calibration_steps=0, telemetry_every=0,
        guard={"quality": 0.0}, steps=8,
    )  # fmt: skip
    for variant in small.run.variants:
        variant.model.compile_blocks(counter)
    small.advance(2)
    compiled = counter.frame_count
    assert compiled > 0
    small.advance(3)
    assert counter.frame_count == compiled


@pytest.mark.parametrize(
    ("recipe", "keys", "message"),
    [
        ("delayed", {"parallel": "fsdp"}, "phases in several recipes need --parallel ddp"),
        ("delayed", {"phases": three("bf16", {"recipe": "nope"})}, "No recipe 'nope'"),
        # though it has no steps
        ("nope", {"phases": "default", "steps": 2, "warmup_steps": 50}, "No recipe 'nope'"),
        ("delayed", {"phases": three("other.toml")}, "one delayed recipe"),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(recipe, keys, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("other.toml").write_text('like = "delayed"\nmargin = 1\n')
    with pytest.raises(UserError, match=message):
        SmallLoop(tmp_path / "r", recipe, **({"phases": three("bf16")} | keys))
    assert not Path("r/run.toml").exists()


def test_a_phase_without_steps_is_told(tmp_path):
    small_run = partial(SmallLoop, recipe="delayed", phases="default", steps=4, decay_fraction=1.0)
    run = small_run(tmp_path / "r").run
    assert any("stable has no steps" in line for line in describe_run(run))
    reason = "recipe 'delayed' runs in no step: phases warmup 1 to 1 in bf16, decay 2 to 4 in bf16"
    assert (run.plan_json()["asked"], run.plan_json()["reasons"][0]) == ("delayed", reason)
    assert reason in describe_run(run)
    with pytest.raises(UserError, match=f"--strict: {reason}. Give more --steps"):
        small_run(tmp_path / "s", strict=True, backend="emulate")


def test_a_short_run_has_steps_in_the_recipe_that_it_asks_for(tmp_path):
    run = SmallLoop(
        tmp_path / "r", "delayed", phases="default", steps=30, warmup_steps=50, decay_fraction=0.2,
        strict=True, backend="emulate",
    ).run  # fmt: skip
    assert [(phase.name, phase.first, phase.last) for phase in run.schedule.phases] == [
        ("warmup", 1, 8), ("stable", 9, 24), ("decay", 25, 30),
    ]  # fmt: skip
    plan = run.plan_json()
    assert (plan["asked"], plan["recipe"]["name"]) == ("delayed", "delayed")
    assert [phase["precision"] for phase in plan["phases"]] == ["bf16", "delayed-emulated", "bf16"]


def test_a_phase_may_set_keys_of_the_recipe_otherwise(tmp_path):
    phases = (
        {"name": "a", "until": 2, "recipe_overrides": {"exclude": ["*qkv"]}},
        {"name": "b", "until": 4},
        {"name": "c", "recipe": "bf16", "recipe_overrides": {"attention": "fp32"}},
    )
    small = SmallLoop(tmp_path / "r", "current", phases=phases, steps=6, save_every=3)
    small.advance(3)
    first, second, third = (small.run.variants[n].plan for n in small.run.schedule.variants)
    assert {layer.name for layer in first.layers if layer.fp8} == {
        layer.name for layer in second.layers if layer.fp8 and not layer.name.endswith("qkv")
    }
    assert (third.precision, third.attention) == ("bf16", "fp32")
    overrides = [phase["overrides"] for phase in small.run.plan_json()["phases"]]
    assert overrides == [{"exclude": ["*qkv"]}, {}, {"attention": "fp32"}]
    resumed = small.resumed()
    assert resumed.run.schedule == small.run.schedule
    resumed.advance(3)
    assert resumed.run.plan.attention == "fp32"


def test_keys_that_change_nothing_are_told(tmp_path):
    notes = SmallLoop(
        tmp_path / "r", "fp32", loss_scale=8.0, clip_window=50, calibration_steps=3
    ).run.notes
    assert [note.partition(" ")[0] for note in notes] == [
        "loss_scale", "calibration_steps", "clip_window",
    ]  # fmt: skip
    assert SmallLoop(tmp_path / "s", "fp32").run.notes == ()


def test_recipes_that_are_alike_share_a_variant_and_resume(tmp_path):
    copy, third = tmp_path / "copy.toml", tmp_path / "third.toml"
    copy.write_text('like = "current"\n')
    third.write_text('like = "delayed"\nexclude = ["*qkv"]\n')
    phases = (
        {"name": "a", "until": 2},
        {"name": "b", "recipe": str(copy), "until": 4},
        {"name": "c", "recipe": str(third)},
    )
    small = SmallLoop(tmp_path / "r", "current", phases=phases, save_every=3)
    assert small.run.schedule.variants == (0, 0, 1)
    small.advance(3)
    small.run.folder.release()
    resumed = SmallLoop(tmp_path / "r", "current", resume=str(tmp_path / "r"))
    resumed.advance(2)
    assert resumed.run.plan.delayed


def test_more_steps_that_move_the_phases_are_announced(tmp_path):
    small = SmallLoop(
        tmp_path / "r", "current", phases="default", steps=6, save_every=6, warmup_steps=1,
        decay_fraction=0.5,
    )  # fmt: skip
    small.advance(6)
    assert [event[:2] for event in events(tmp_path / "r")] == [
        (1, "warmup"), (2, "stable"), (4, "decay"),
    ]  # fmt: skip
    more = small.resumed(steps=16)
    assert any("the learning rate and the phases follow" in note for note in more.run.notes)
    more.advance(1)
    assert events(tmp_path / "r")[-1][:2] == (7, "stable")


def test_a_gpus_mfu_refers_to_the_units_that_the_phase_runs_on(tmp_path, monkeypatch):
    small = SmallLoop(tmp_path / "r", "current", phases=three("bf16"), steps=8)
    h100 = Hardware("cuda", (9, 0), name="NVIDIA H100 80GB HBM3")
    run = small.run
    run.state.variants = tuple(
        replace(
            variant, plan=replace(variant.plan, device="cuda", native=True, compute_dtype="bf16")
        )
        for variant in run.variants
    )
    small.loop.run = small.loop.metrics.run = replace(run, hardware=h100)
    rates = []
    for _ in range(7):
        small.advance(1)
        rates.append(small.loop.metrics.peak.tflops)
    assert rates[3:] == [1979] * 3 + [989]


def test_the_whole_model_is_the_layers_of_all_phases(tmp_path):
    overrides = {"recipe_overrides": {"exclude": ["*.down"]}}
    phases = {"name": "a", "until": 3, **overrides}, {"name": "b"}
    guard = SmallLoop(tmp_path / "r", "mxfp8", phases=phases, width=128).loop.guard
    assert "blocks.0.mlp.down" not in fp8_parts(guard.run.model)
    guard._outcome = Outcome()
    guard._leave_fp8(2, {"layer": WHOLE}, "steps went wrong", None)
    assert "blocks.0.mlp.down" in guard._outcome.leave_fp8


def test_the_variant_that_left_fp16_shares_the_counters_of_the_others(tmp_path):
    phases = {"name": "a", "recipe": "fp16", "until": 3}, {"name": "b"}
    run = SmallLoop(tmp_path / "r", "nvfp4", phases=phases, width=128).run
    run.leave_fp16()
    assert run.variants[0].plan.precision == "bf16"
    assert run.variants[0].backend.draws is run.variants[1].backend.draws


def test_a_layer_that_left_fp8_stays_out_of_it_in_the_next_phase(tmp_path):
    small = SmallLoop(tmp_path / "r", "delayed", phases=three("current"), steps=9)
    small.run.set_fp8("blocks.0.mlp.up", False)
    small.loop.guard.demoted["blocks.0.mlp.up"] = None
    full = {}
    for step in range(1, 7):
        small.advance(1)
        full[step] = small.loop.metrics.fp8_gemms
    assert full[1] == full[4] == 9  # three linears of a block of four
    assert small.loop.guard.plan_now().layer("blocks.0.mlp.up").fp8 is False


def test_resuming_with_other_phases_is_refused(command, refused, phases, capsys):
    flags = ["--config", phases, "--recipe", "current"]
    assert command("pretrain", *flags, "--out", "r", *TINY) == 0
    again = ["pretrain", "--resume", "r", "--steps", "14"]
    refused(*again, "--phases", "default", message="phases")
    assert command(*again, "--no-guard") == 0  # without the reference in fp32
    assert "late 10 to 14" in capsys.readouterr().out


def test_a_recipe_of_a_file_is_not_said_to_run_in_no_step(command, tmp_path):
    (tmp_path / "mine.toml").write_text('like = "mxfp8"\n')
    assert command("pretrain", "--recipe", "mine.toml", "--out", "r", *TINY) == 0
    reasons = json.loads((tmp_path / "r" / "plan.json").read_text())["reasons"]
    assert not any("runs in no step" in reason for reason in reasons)
