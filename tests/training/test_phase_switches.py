"""Runs whose recipe changes with the step: switched when they should be, and resumed to the bit."""

import gc
import json
import shutil
import tomllib
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fp8stack.common.errors import UserError
from fp8stack.layers import fp8_state
from fp8stack.layers.observe import all_linears, observing
from fp8stack.model.gpt import GPT
from fp8stack.precision import Hardware
from fp8stack.training.dataloader import batches
from fp8stack.training.guard.diagnosis import repeat_step
from fp8stack.training.metrics.console import describe_run
from fp8stack.training.setup.build import COLD
from tests.conftest import TINY, metrics
from tests.faults.processes import difference
from tests.support.small_loop import PEAK, SmallLoop, changed

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


def three(recipe: str, middle: dict | None = None) -> tuple:
    return (
        {"name": "early", "recipe": recipe, "until": 3},
        {"name": "middle", "until": 6} | (middle or {}),
        {"name": "late", "recipe": recipe},
    )


def events(run: Path) -> list[tuple]:
    phase_rows = [row for row in metrics(run) if row.get("event") == "phase"]
    return [(row["step"], row["phase"], row["precision"]) for row in phase_rows]


@pytest.mark.capability("C1")
def test_phases_switch_at_their_exact_steps_and_the_log_shows_it(command, tmp_path, capsys):
    Path("phases.toml").write_text(PHASES)
    flags = ["--config", "phases.toml", "--recipe", "delayed", "--out", "r"]
    assert command("pretrain", *flags, *TINY) == 0
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


@pytest.mark.capability("C1")
@pytest.mark.parametrize(
    ("recipe", "last", "steps"),
    [("fp16", "fp32", (3, 5)), ("delayed", "nvfp4", (3, 5, 11))],  # nvfp4 draws random bits
)
@pytest.mark.full
def test_a_run_resumed_within_each_phase_repeats_to_the_bit(command, recipe, last, steps):
    Path("phases.toml").write_text(PHASES.replace('recipe = "fp32"', f'recipe = "{last}"'))
    saved = [*TINY, "--save-every", "1", "--set", "keep_checkpoints=12"]
    flags = ["--config", "phases.toml", "--recipe", recipe]
    assert command("pretrain", *flags, "--out", "whole", *saved) == 0
    for step in steps:
        shutil.rmtree("again", ignore_errors=True)
        shutil.copytree("whole", "again")
        assert command("pretrain", "--resume", f"again/checkpoints/step-{step:06}") == 0
        assert difference(Path("again"), Path("whole")) == "", step


@pytest.mark.capability("C1")
def test_a_switch_builds_the_model_again_around_the_same_parameters(tmp_path):
    small = SmallLoop(tmp_path / "r", "delayed", phases=three("bf16"))
    run, before = small.run, dict(small.run.model.named_parameters(remove_duplicate=False))
    models = [weakref.ref(run.model)]
    for precision in ("delayed-emulated", "bf16"):
        small.advance(3)
        small.loop.enter_phase(run.step + 1)
        assert run.plan.precision == precision
        models.append(weakref.ref(run.model))
    gc.collect()
    assert [model() is not None for model in models] == [False, False, True]
    after = dict(run.model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in before.items())
    held = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in before.values()}


@pytest.mark.capability("C1")
@pytest.mark.parametrize("before", ["fp32", "fp16"])
def test_delayed_scaling_begins_with_the_scales_of_its_first_steps_operands(before, tmp_path):
    flags: dict[str, Any] = {"accumulate": 2, "first_loss_scale": 4096.0}
    small = SmallLoop(tmp_path / "r", "delayed", phases=three(before), **flags)
    small.advance(3)
    saved = small.everything()
    amaxes: dict[str, float] = {}

    def see(path: str, layer: object, operand: str, x: torch.Tensor) -> None:
        amax = float(x.abs().max()) / (small.run.scaler.get_scale() if small.run.scaler else 1.0)
        amax = amax if operand == "grad_output" else float(x.abs().max())
        amaxes[f"{path}.{operand}"] = max(amax, amaxes.get(f"{path}.{operand}", 0.0))

    with observing(small.run.model, see, layers=all_linears(small.run.model)):
        small.loop.enter_phase(4)
    assert small.run.plan.delayed
    state = fp8_state(small.run.model)
    assert changed(saved, small.everything()) == [*state]  # nothing else
    for name, scale in state.items():
        if name.endswith(".scale"):
            slot = name.removesuffix(".scale")
            largest = 57344.0 if slot.endswith("grad_output") else 448.0
            history = state[f"{slot}.amax_history"]
            assert history[history > 0].tolist() == pytest.approx([amaxes[slot]], rel=1e-6)
            torch.testing.assert_close(scale, largest / history.max(), rtol=1e-6, atol=0)


def test_evaluation_has_a_recipe_of_its_own(tmp_path):
    small_run = partial(SmallLoop, recipe="current", eval_every=2, steps=2)
    with_recipe = small_run(tmp_path / "own", phases=({"name": "evaluation", "recipe": "fp32"},))
    plain = small_run(tmp_path / "plain")
    for small in (with_recipe, plain):
        small.advance(2)
    loss, plain_loss = (metrics(tmp_path / n)[-1]["val_loss"] for n in ("own", "plain"))
    assert loss != plain_loss  # the weights are the same, the GEMMs are not
    evaluation = with_recipe.run.schedule.evaluation
    assert evaluation is not None
    reference = with_recipe.run.model_in(evaluation)
    tokens = with_recipe.run.data.windows
    with torch.no_grad():
        expected = reference.eval()(tokens[:, :-1], tokens[:, 1:])
    assert loss == pytest.approx(float(expected), rel=1e-6)
    assert changed(with_recipe.state(), plain.state()) == []


def harmful(folder: Path, *more: dict[str, Any]) -> SmallLoop:
    """A loop whose validation losses in FP8 are twice what they are, with `more` phases."""
    small = SmallLoop(
        folder, "current", phases=(*three("bf16", {"until": 7}), *more), eval_every=2,
        save_every=2, steps=8,
    )  # fmt: skip
    loss_in: Any = small.loop.loss_in
    by_plan: Any = lambda plan: (1 + small.run.plans[plan].is_fp8) * loss_in(plan)  # noqa: E731
    small.loop.loss_in = by_plan  # type: ignore[method-assign]
    return small


@pytest.mark.capability("C3")
@pytest.mark.full
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


@pytest.mark.full
def test_a_comparison_that_a_stop_cut_short_is_made_when_the_run_goes_on(tmp_path):
    small = SmallLoop(tmp_path / "r", "current", phases=three("bf16"), eval_every=2, steps=6)
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


@pytest.mark.capability("C3")
@pytest.mark.full
def test_a_recipe_that_does_none_stays(tmp_path):
    small = SmallLoop(tmp_path / "r", "current", phases=three("bf16"), eval_every=2, steps=6)
    with patch.object(small.loop, "loss_in", wraps=small.loop.loss_in) as compared:
        small.advance(6)
    assert [row for row in metrics(tmp_path / "r") if row.get("phase") == "conservative"] == []
    # At steps 2, 4 and 6 for the row, and twice for each comparison, but nothing follows step 6.
    assert compared.call_count == 7


@pytest.mark.full
def test_a_roll_back_over_a_switch_goes_on_in_the_phase_before(tmp_path):
    small = SmallLoop(tmp_path / "r", "delayed", phases=three("bf16"), save_every=2, steps=9)
    small.spoil("blocks.0.mlp.up.weight", {4, 5, 6})
    name = "fp8stack.training.phase_switches.repeat_step"
    with patch(name, wraps=repeat_step) as repeated:
        small.advance(5)
        assert small.run.plan.precision == "delayed-emulated"
        small.advance(1)
        assert (small.run.step, small.run.plan.precision) == (2, "bf16")
        small.tokens = batches(small.run)
        small.advance(7)
    # The batches of steps 4 to 6 are left out, also for the first scales.
    assert [call.args[1] for call in repeated.call_args_list] == [4, 7]


@pytest.mark.full
def test_the_model_of_each_phase_is_compiled_and_that_of_an_evaluation_is_not(
    tmp_path, monkeypatch
):
    compiled: list[str] = []
    monkeypatch.setattr(
        GPT, "compile_blocks", lambda model, mode: compiled.append(model.backend.plan.precision)
    )
    phases = (*three("bf16"), {"name": "evaluation", "recipe": "current"})
    keys: dict[str, Any] = {"compile": True, "deterministic": False, "eval_every": 2, "steps": 8}
    small = SmallLoop(tmp_path / "r", "fp32", phases=phases, **keys)
    small.advance(8)
    assert compiled == ["bf16", "fp32", "bf16"]


@pytest.mark.parametrize(
    ("recipe", "keys", "message"),
    [
        ("fp32", {"phases": ({"name": "evaluation", "recipe": "delayed"},)}, "need a first phase"),
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


@pytest.mark.parametrize("recipe", ["bf16", "current"])
def test_the_plan_of_a_run_is_that_of_its_recipe_whatever_its_other_phases_are_in(recipe, tmp_path):
    phases = ({"name": "shared", "recipe": "delayed", "until": 2}, {"name": "own"})
    plan = SmallLoop(tmp_path / "r", recipe, phases=phases).run.plan_json()
    assert (plan["asked"], plan["recipe"]["name"]) == (recipe, recipe)
    assert any(layer["fp8"] for layer in plan["layers"]) == (recipe == "current")


def test_a_phase_without_steps_is_told(tmp_path):
    small_run = partial(SmallLoop, recipe="delayed", phases="default", steps=4, decay_fraction=1.0)
    run = small_run(tmp_path / "r").run
    assert any("stable has no steps" in line for line in describe_run(run, PEAK))
    reason = "recipe 'delayed' runs in no step: phases warmup 1 to 1 in bf16, decay 2 to 4 in bf16"
    assert (run.plan_json()["asked"], run.plan_json()["reasons"][0]) == ("delayed", reason)
    assert reason in describe_run(run, PEAK)
    with pytest.raises(UserError, match=f"--strict: {reason}. Give more --steps"):
        small_run(tmp_path / "s", strict=True, backend="emulate")


@pytest.mark.capability("C1")
@pytest.mark.full
def test_a_phase_may_set_keys_of_the_recipe_otherwise(tmp_path):
    copy = tmp_path / "copy.toml"
    copy.write_text('like = "current"\n')
    phases = (
        {"name": "a", "until": 1, "recipe_overrides": {"exclude": ["*qkv"]}},
        {"name": "b", "until": 2},
        {"name": "c", "recipe": str(copy), "until": 4},
        {"name": "d", "recipe": "bf16", "recipe_overrides": {"attention": "fp32"}},
    )
    small = SmallLoop(tmp_path / "r", "current", phases=phases, steps=6, save_every=3)
    assert small.run.schedule.indices == (0, 1, 1, 2)  # recipes that are alike share a plan
    small.advance(3)
    first, second, third, *_ = small.run.plans
    assert {layer.name for layer in first.layers if layer.fp8} == {
        layer.name for layer in second.layers if layer.fp8 and not layer.name.endswith("qkv")
    }
    assert (third.precision, third.attention) == ("bf16", "fp32")
    overrides = [phase["overrides"] for phase in small.run.plan_json()["phases"]]
    assert overrides == [{"exclude": ["*qkv"]}, {}, {}, {"attention": "fp32"}]
    small.run.folder.release()
    resumed = SmallLoop(tmp_path / "r", "current", resume=str(tmp_path / "r"))
    assert resumed.run.schedule.indices == small.run.schedule.indices
    resumed.advance(3)
    assert resumed.run.plan.attention == "fp32"


def test_keys_that_change_nothing_are_told(tmp_path):
    keys: dict[str, Any] = {"loss_scale": 8.0, "clip_window": 50, "momentum": 0.5}
    notes = SmallLoop(tmp_path / "r", "fp32", **keys).run.notes
    assert [note.partition(" ")[0] for note in notes] == [*keys]
    assert SmallLoop(tmp_path / "s", "fp32").run.notes == ()


def test_delayed_scaling_without_warm_up_is_warned_of_and_the_remedy_is_one(tmp_path):
    def notes(name: str, recipe: str, **keys: Any) -> tuple[str, ...]:
        return SmallLoop(tmp_path / name, recipe, **keys).run.notes

    assert notes("a", "delayed", warmup_steps=0) == (COLD,)
    phases = tomllib.loads(COLD.split("'")[1])["phases"]
    assert notes("b", "delayed", warmup_steps=0, phases=tuple(phases)) == ()
    assert notes("c", "delayed") == notes("d", "current", warmup_steps=0) == ()


@pytest.mark.full
def test_a_gpus_mfu_refers_to_the_units_that_the_phase_runs_on(tmp_path, capsys):
    small = SmallLoop(tmp_path / "r", "current", phases=three("bf16"), steps=8)
    run, log = small.run, small.loop.metrics
    run.state.plans = tuple(
        replace(plan, device="cuda", native=True, compute_dtype="bf16") for plan in run.plans
    )
    log.run = replace(run, hardware=Hardware("cuda", (9, 0), name="NVIDIA H100 80GB HBM3"))
    capsys.readouterr()
    rates = []
    for index in (0, 1):
        run.use(index)
        log.update_peak()
        rates.append(log.peak.tflops)
    assert rates == [989, 1979]
    assert "peak for MFU: 1979 TFLOP/s " in capsys.readouterr().out


@pytest.mark.full
def test_the_model_that_left_fp16_shares_the_counters_of_the_others(tmp_path):
    phases = {"name": "a", "recipe": "fp16", "until": 3}, {"name": "b"}
    run = SmallLoop(tmp_path / "r", "nvfp4", phases=phases, width=128).run
    run.leave_fp16()
    assert run.plan.precision == "bf16"
    draws = run.backend.draws
    run.use(1)
    assert run.plan.precision == "nvfp4-emulated"
    assert run.backend.draws is draws


@pytest.mark.full
def test_a_layer_that_left_fp8_stays_out_of_it_in_the_next_phase(tmp_path):
    small = SmallLoop(tmp_path / "r", "delayed", phases=three("current"), steps=9)
    small.loop.guard.demoted["blocks.0.mlp.up"] = None
    full = {}
    for step in range(1, 7):
        small.advance(1)
        full[step] = small.loop.metrics.fp8_gemms
    assert full[1] == full[4] == 9  # three linears of a block of four
    assert small.run.plan.layer("blocks.0.mlp.up").fp8 is False
