"""Numbers that break: a step is skipped to the bit, broken state goes back, a layer is named."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8stack.common.errors import NumericFailure
from fp8stack.training.run import Run
from fp8stack.training.setup.start import set_up
from tests.faults.numeric import numeric_rows
from tests.faults.numeric.numeric_faults import VALUES, Fault, places
from tests.faults.numeric.numeric_rows import FP8, RECIPES, transient
from tests.faults.numeric.small_runs import Recorder, events, small_run, trained
from tests.support.cases import case

NAN, INF = math.nan, math.inf


def spoilt(folder: Path, recipe: str, faults: Sequence[Fault], *sets: str, **keys: Any) -> Run:
    """A run that these faults were put into, trained to its end."""
    run = small_run(folder, "r", recipe, sets, **keys)
    for fault in faults:
        fault.put(run)
    trained(run)
    return run


def events_of(run: Run) -> list[tuple[int, str]]:
    return [(row["step"], row["event"]) for row in events(run)]


@pytest.mark.parametrize(
    ("recipe", "share"),
    [
        # Half of the values of places that every recipe has: over these recipes, all.
        *(("fp32", [0]), ("delayed", [1]), ("fp16", [0]), ("current", [1])),
        *(pytest.param(recipe, [0, 1], marks=pytest.mark.slow) for recipe in RECIPES),
    ],
)
@pytest.mark.full
def test_every_value_in_every_place_is_skipped_to_the_bit_taken_back_or_mended(
    recipe, share, tmp_path
):
    chosen = [
        (place, value)
        for at, place in enumerate(places(recipe))
        for number, value in enumerate(VALUES)
        if (at + number) % 2 in share or place not in places("fp32")
    ]
    outcome = transient(tmp_path, recipe, chosen)
    assert outcome.lost == ()
    assert outcome.injected == outcome.survived == len(chosen)


@pytest.mark.parametrize("recipe", ["delayed", "fp16"])
@pytest.mark.full
def test_a_step_skipped_in_its_second_micro_batch_gives_back_what_dropout_drew(recipe, tmp_path):
    runs = []
    for name in ("spoilt", "left out"):
        sets = ["model_overrides.dropout=0.1"]
        run = small_run(tmp_path, name, recipe, sets, steps=8, accumulate=2)
        recorder = Recorder(run)
        fault = Fault(place="activation", value=NAN, steps={5}, micro_batch=1)
        if name == "spoilt":
            fault.put(run)
        else:
            run = replace(run, resumed={"guard": left_out(5), "phases": None})
        trained(run)
        assert fault.injected == (name == "spoilt")
        runs.append({step: digest for step, digest in recorder.starts if step != 5})
    assert list(runs[0]) == [1, 2, 3, 4, 6, 7, 8]
    if recipe == "fp16":  # the skip halved the scale, and what underflows is another then
        runs = [{step: {"cpu": digest["cpu"]} for step, digest in run.items()} for run in runs]
    assert runs[0] == runs[1]
    assert len({digest["cpu"] for digest in runs[0].values()}) == 7  # dropout draws


def left_out(step: int) -> dict[str, Any]:
    """The state of a new guard that leaves a step out."""
    watch = {"window": [], "streak": 0, "overflows": 0}
    state = {"watch": watch, "left_out": [step], "demoted": {}, "incidents": 0, "last_bad": 0}
    return state | {"tried": [], "bad": [], "left_fp16": False}


@pytest.mark.parametrize(
    ("recipe", "step", "sets"),
    [
        *(("delayed", step, []) for step in (1, 4, 8)),
        ("delayed", 5, ["recipe_overrides.history_length=1"]),
        *(("fp32", 1, []), ("nvfp4", 4, [])),
    ],
)
@pytest.mark.full
def test_the_first_step_the_saved_one_and_the_last_are_skipped_like_any_other(
    recipe, step, sets, tmp_path
):
    run = small_run(tmp_path, "r", recipe, sets, steps=8, save_every=4)
    recorder = Recorder(run)
    Fault(place="wgrad", value=INF, steps={step}).put(run)
    trained(run)
    assert events_of(run) == [(step, "skip")]
    saved = sorted(path.name for path in run.folder.checkpoints.iterdir())
    assert saved == ["step-000005" if step == 4 else "step-000004", "step-000008"]
    before, after = recorder.at(step), recorder.ends[step]
    assert before is not None
    assert {name: after[name] for name in before} == before  # step 1 has no moments before it


@pytest.mark.parametrize("place", ["wgrad", "weight"])
def test_a_fault_right_after_a_resumption_is_met_like_any_other(place, tmp_path):
    spoilt(tmp_path, "current", [], steps=4)
    run = set_up({"steps": 8}, None, [], str(tmp_path / "r"))
    Fault(place=place, value=NAN, steps={5}).put(run)
    trained(run)
    expected = [(5, "skip")] if place == "wgrad" else [(5, "skip"), (5, "rollback"), (5, "skip")]
    assert events_of(run) == expected
    assert run.step == 8


def test_weights_that_break_in_the_last_step_do_not_end_the_run(tmp_path):
    run = spoilt(tmp_path, "mxfp8", [Fault(place="moment", value=INF, steps={9})], steps=8)
    assert events_of(run) == [(8, "rollback"), (8, "skip")]
    assert all(parameter.isfinite().all() for parameter in run.model.parameters())


def test_a_learning_rate_that_breaks_the_weights_in_a_finite_step_is_told_at_once(tmp_path):
    with pytest.raises(NumericFailure, match=r"^Step 1: .*weight contains .*Lower --lr"):
        spoilt(tmp_path, "delayed", [], steps=8, lr=1e30)


def alternating(place: str, **more: Any) -> Fault:
    return Fault(place=place, value=NAN, steps=range(11, 100, 2), most=INF, **more)


@pytest.mark.parametrize("log_every", [case(1, quick=False), case(10, quick=True)])
@pytest.mark.full
def test_bad_steps_that_never_come_in_a_row_are_an_incident_all_the_same(log_every, tmp_path):
    keys = {"steps": 80, "save_every": 8, "log_every": log_every, "guard": {"patience": 2}}
    run = spoilt(tmp_path, "delayed", [alternating("input", only_in_fp8=True)], **keys)
    rungs = [row for row in events(run) if row["event"] in ("rollback", "demote")]
    assert [row["event"] for row in rungs] == ["rollback", "demote"]
    assert rungs[0]["to_step"] == 32
    assert rungs[1]["layer"] == "blocks.0.mlp.down"
    if log_every == 1:  # 14 of the last 42
        assert rungs[0]["step"] == 37
        assert rungs[0]["why"].startswith("14 of 27 steps were bad: the loss is nan")


@pytest.mark.full
def test_the_bad_steps_so_far_are_counted_on_after_a_resumption(tmp_path):
    keys = {"guard": {"patience": 2}, "save_every": 8}
    run = spoilt(tmp_path, "fp32", [alternating("loss")], steps=20, **keys)
    assert "rollback" not in dict(events_of(run)).values()
    run = set_up({"steps": 40}, None, [], str(run.folder.path))
    alternating("loss").put(run)
    trained(run)
    assert [row for row in events_of(run) if row[1] == "rollback"] == [(37, "rollback")]  # as above


@pytest.mark.parametrize(
    ("recipe", "place"),
    [
        *(("delayed", place) for place in ("input", "grad_output", "wgrad", "loss")),
        *(("fp16", "input"), ("fp16", "grad_output"), ("fp32", "activation"), ("mxfp8", "dgrad")),
        ("current", "weight"),  # gone back from once
    ],
)
@pytest.mark.full
def test_trouble_in_every_step_climbs_the_ladder_to_its_end_and_the_place_is_named(
    recipe, place, tmp_path
):
    assert numeric_rows.persistent(tmp_path, recipe, place) == ""


@pytest.mark.parametrize(
    ("recipe", "place"),
    [*(case(r, "input", quick=r in ("delayed", "mxfp8")) for r in FP8), ("delayed", "amax")],
)
@pytest.mark.full
def test_trouble_that_fp8_alone_has_ends_when_its_layer_leaves_fp8(recipe, place, tmp_path):
    assert numeric_rows.only_in_fp8(tmp_path, recipe, place) == ""
