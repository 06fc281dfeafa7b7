"""The recipe of each step of a run, from its phases."""

from __future__ import annotations

import pytest

import fp8stack
from fp8stack.common.errors import UserError
from fp8stack.common.formats import Quantizer
from fp8stack.model.config import load_config
from fp8stack.planning.phases import (
    Override,
    Phase,
    PhaseConfig,
    evaluation_in,
    overridden,
    phases_of,
    preset,
)
from fp8stack.planning.run_config import RunConfig, parse_config, to_toml
from fp8stack.precision import Hardware
from fp8stack.training.run_plans import plan_recipe

H100 = Hardware("cuda", (9, 0))
RUN = {"steps": 100, "warmup_steps": 10, "decay_fraction": 0.2}


def spans(*phases: PhaseConfig, recipe: str = "delayed", **changes: float) -> list[tuple]:
    phases_in_order = phases_of(phases, recipe, **{**RUN, **changes})  # type: ignore[arg-type]
    return [(phase.name, phase.recipe, phase.first, phase.last) for phase in phases_in_order]


@pytest.mark.parametrize(
    ("name", "edge", "middle"),
    [("conservative", "fp32", "fp32"), ("default", "bf16", "mine"), ("aggressive", "mine", "mine")],
)
def test_presets_follow_the_schedule_of_the_learning_rate(
    name: str, edge: str, middle: str
) -> None:
    assert spans(*preset(name), recipe="mine") == [
        ("warmup", edge, 1, 10),
        ("stable", middle, 11, 80),
        ("decay", edge, 81, 100),
    ]
    evaluation = evaluation_in(preset(name), "mine", 100)
    assert evaluation == Phase(name="evaluation", recipe=edge, first=1, last=100)
    assert [span[0] for span in spans(*preset(name), warmup_steps=0)] == ["stable", "decay"]


def test_a_phase_ends_at_a_step_or_at_a_share_of_all() -> None:
    assert spans() == [("all", "delayed", 1, 100)]
    assert evaluation_in((), "delayed", 100) is None
    early = PhaseConfig(name="early", recipe="bf16", until=3)
    middle = PhaseConfig(name="middle", until=0.55)
    assert spans(early, middle, PhaseConfig(name="late", recipe="fp32")) == [
        ("early", "bf16", 1, 3),
        ("middle", "delayed", 4, 55),
        ("late", "fp32", 56, 100),
    ]
    late = PhaseConfig(name="late", recipe="bf16", until=200)  # beyond the run
    assert spans(late, PhaseConfig(name="later")) == [("late", "bf16", 1, 100)]


@pytest.mark.parametrize(("steps", "warmup", "stable"), [(30, 8, 24), (10, 2, 8), (4000, 50, 3200)])
def test_the_warm_up_phase_is_a_quarter_of_the_run_at_most(
    steps: int, warmup: int, stable: int
) -> None:
    assert spans(*preset("default"), steps=steps, warmup_steps=50) == [
        ("warmup", "bf16", 1, warmup),
        ("stable", "delayed", warmup + 1, stable),
        ("decay", "bf16", stable + 1, steps),
    ]
    mine = [PhaseConfig(name="warmup", until=0.5), PhaseConfig(name="stable")]
    assert spans(*mine, steps=steps, warmup_steps=50)[0][2:] == (1, steps // 2)


@pytest.mark.capability("C1")
@pytest.mark.parametrize(
    ("phase", "phases", "hardware", "precision"),
    [
        ("warmup", "default", H100, "bf16"),
        ("evaluation", "default", H100, "bf16"),
        ("warmup", "aggressive", Hardware("cuda", (8, 0)), "bf16"),
        ("stable", "conservative", H100, "fp32"),
        ("stable", "default", Hardware("cpu"), "delayed-emulated"),
        ("mine", [PhaseConfig(name="mine", recipe="current")], H100, "current"),
    ],
)
def test_the_precision_of_a_phase_is_a_plan_for_loops_of_ones_own(
    phase: str, phases: str, hardware: Hardware, precision: str
) -> None:
    plan = fp8stack.precision_for_phase(phase, "delayed", phases, hardware)
    assert plan.precision == precision


def test_the_precision_of_a_phase_has_its_overrides_and_refuses_other_names() -> None:
    phases = [PhaseConfig(name="mine", recipe_overrides={"margin": 2})]
    plan = fp8stack.precision_for_phase("mine", "delayed", phases, H100)
    assert plan.recipe.quantizers is not None
    assert plan.recipe.quantizers.input == Quantizer(amax="delayed", margin=2)
    with pytest.raises(UserError, match=r"No phase 'warmpu'.*Did you mean 'warmup'"):
        fp8stack.precision_for_phase("warmpu", hardware=H100)


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([PhaseConfig(name="a"), PhaseConfig(name="b")], "'a' does not say where it ends"),
        ([PhaseConfig(name="a", until=9), PhaseConfig(name="b", until=5)], "rising order"),
        ([PhaseConfig(name="a", until=50)], "'a', ends at step 50 of 100"),
        ([PhaseConfig(name="a"), PhaseConfig(name="a")], "two are called 'a'"),
        ([PhaseConfig(name="evaluation", until=5)], "no part of training"),
    ],
)
def test_phases_that_make_no_sense_are_refused(phases: list[PhaseConfig], message: str) -> None:
    with pytest.raises(UserError, match=message):
        phases_of(phases, "fp32", **RUN)  # type: ignore[arg-type]


@pytest.mark.capability("C1")
def test_an_override_wins_and_leaves_the_rest() -> None:
    overrides = [PhaseConfig(name="decay", recipe="fp32"), PhaseConfig(name="stable", until=90)]
    assert spans(*overridden(preset("default"), overrides)) == [
        ("warmup", "bf16", 1, 10),
        ("stable", "delayed", 11, 90),
        ("decay", "fp32", 91, 100),
    ]
    with pytest.raises(UserError, match="the preset has no phase 'end'"):
        overridden(preset("default"), [PhaseConfig(name="end")])


def test_a_preset_by_flag_is_overridden_by_the_run_file_and_saved_phase_by_phase(tmp_path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[[phases]]\nname = "stable"\nrecipe = "current"\nuntil = 0.5\n')
    config = parse_config(str(file), {"phases": "default", "recipe": "delayed"})
    assert [(phase.name, phase.recipe, phase.until) for phase in config.phases] == [
        ("warmup", "bf16", None), ("stable", "current", 0.5),
        ("decay", "bf16", None), ("evaluation", "bf16", None),
    ]  # fmt: skip
    file.write_text(to_toml(config))
    assert parse_config(str(file), {}) == config
    assert parse_config(None, {}, ["phases=default"]).phases == preset("default")


def test_overrides_of_a_phase_are_read_and_written_and_part_of_what_it_asks_for(tmp_path) -> None:
    text = '[[phases]]\nname = "a"\nuntil = 0.5\n[phases.recipe_overrides]\nmargin = 1\n'
    text += 'exclude = ["*.up", "x"]\n[[phases]]\nname = "b"\nrecipe_overrides.head = true\n'
    file = tmp_path / "run.toml"
    file.write_text(text)
    config = parse_config(str(file), {"recipe": "delayed"})
    assert [phase.recipe_overrides for phase in config.phases] == [
        {"margin": 1, "exclude": ["*.up", "x"]},
        {"head": True},
    ]
    first, _ = phases_of(config.phases, "delayed", **RUN)  # type: ignore[arg-type]
    assert first.asked == 'delayed with exclude = ["*.up", "x"], margin = 1'
    file.write_text(to_toml(config))
    assert parse_config(str(file), {}) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[phases]]\nname = "a"\nuntill = 3', "Did you mean 'until'"),
        ('[[phases]]\nname = "a"\nuntil = 1.5', "no share .0.1 to 1.0.\\.$"),
        ('[[phases]]\nname = "a"\nuntil = true', "until"),
        ('[[phases]]\nrecipe = "bf16"', "name"),
        ('phases = "defualt"', "'defualt'.*Did you mean 'default'"),
    ],
)
def test_a_wrong_table_is_one_line_that_names_the_key(tmp_path, text: str, message: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        parse_config(str(file), {})
    assert "\n" not in str(caught.value)


def test_overrides_of_a_phase_come_on_top_of_the_runs_tables() -> None:
    overrides: dict[str, Override] = {"grad_output": {"format": "e4m3"}}
    config = RunConfig(recipe="current", recipe_overrides=overrides)
    more: dict[str, Override] = {"grad_output": {"eps": 1e-6}}
    shape = load_config("gpt-nano")
    plan = plan_recipe("current", config, shape, Hardware("cpu"), 1024, overrides=more)
    assert plan.recipe.quantizers is not None
    quantizer = plan.recipe.quantizers.grad_output
    assert (quantizer.format, quantizer.eps) == ("e4m3", 1e-6)
