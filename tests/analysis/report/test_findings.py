"""What a report says of a run: findings, headline, and other recipes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8stack.analysis.report import analysis, summary
from fp8stack.analysis.report.analysis import Analysis, analyze, verdict
from fp8stack.analysis.report.curves import amaxes, throughput
from fp8stack.analysis.report.events import folded
from fp8stack.analysis.report.read import read_run
from fp8stack.analysis.report.summary import headline, what_if
from tests.support.cases import case
from tests.support.run_folders import (
    EVENTS,
    KINDS,
    Change,
    make_run,
    metric_rows,
    operand_rows,
    outlier,
    write_lines,
)


def analyzed(run: Path) -> Analysis:
    return analyze(read_run(run))


def findings_of(run: Path, *levels: str) -> list[str]:
    """The findings about a run of some levels, by default the levels that need attention."""
    levels = levels or ("alarm", "warning")
    return [finding.text for finding in analyzed(run).findings if finding.level in levels]


def at(layer: str, kind: str, figures: Callable[[int], dict[str, Any]]) -> Change:
    """Gives one operand these figures, by step."""

    def change(row: dict[str, Any]) -> None:
        if (row.get("layer"), row.get("operand")) == (layer, kind):
            row |= figures(row["step"])

    return change


# Outliers


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8"])
@pytest.mark.parametrize("seed", [case(seed, quick=seed == 0) for seed in range(3)])
def test_nothing_stands_out_in_a_clean_run(tmp_path, recipe, seed):
    rows = operand_rows(6, [1, *range(20, 401, 20)], recipe, seed)
    run = make_run(tmp_path / "r", 400, 6, recipe, telemetry=rows)
    assert findings_of(run) == []
    assert verdict(analyzed(run)).startswith(("Nothing stands out.", "Nothing alarming: 1 note."))


def test_scales_that_have_not_settled_are_no_alarm(tmp_path):
    rows = operand_rows(4, [1])
    assert min(row["sqnr_db"] for row in rows[1:]) == 3.0
    run = make_run(tmp_path / "r", telemetry=rows)
    assert findings_of(run) == []
    assert "had not settled" in verdict(analyzed(run))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("since", [0, 120])
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
def test_an_outlier_is_pointed_at_by_the_name_of_its_layer_and_operand(
    tmp_path, kind, since, recipe
):
    change = outlier("blocks.2.mlp.up", kind, since)
    run = make_run(tmp_path / "r", 200, 4, recipe, change=change)
    outliers = analyzed(run).outliers
    assert [out.operand.name for out in outliers] == [f"blocks.2.mlp.up, {kind}"]
    when = "from step 120 on" if since else "all along"
    sentence = next(text for text in findings_of(run, "warning") if "stands out" in text)
    assert sentence.startswith(f"blocks.2.mlp.up, {kind} stands out {when}.")
    assert "underflow 31 %" in sentence
    assert "SQNR 17.5 dB" in sentence


@pytest.mark.parametrize(
    ("figure", "value"), [("sqnr_db", 19.0), ("saturated", 0.02), ("underflow", 0.2), ("amax", 900)]
)
def test_one_figure_is_enough_to_stand_out(tmp_path, figure, value):
    change = at(
        "blocks.1.attention.qkv", "input", lambda step: {figure: value} if step > 100 else {}
    )
    (out,) = analyzed(make_run(tmp_path / "r", change=change)).outliers
    assert out.operand.name == "blocks.1.attention.qkv, input"
    assert (list(out.values), out.step) == ([figure], 120)


@pytest.mark.parametrize(
    ("step", "level", "sentence"),
    [(100, "note", "was out of line at step 100 alone: SQNR 10.7 dB"),
     (200, "warning", "stands out at step 200: SQNR 10.7 dB")],
)  # fmt: skip
def test_what_passed_after_one_sample_is_a_note(tmp_path, step, level, sentence):
    worse = {"sqnr_db": 10.7}
    change = at("blocks.1.mlp.up", "grad_output", lambda at: worse if at == step else {})
    run = make_run(tmp_path / "r", change=change)
    assert f"blocks.1.mlp.up, grad_output {sentence}" in findings_of(run, level)[0]
    assert len(findings_of(run)) == (level == "warning")


@pytest.mark.parametrize(("last", "level"), [(False, "note"), (True, "warning")])
def test_outliers_beyond_those_with_a_sentence_are_a_warning_if_one_is(tmp_path, last, level):
    run = make_run(tmp_path / "r", change=outlier("blocks.2.mlp.up", "input", 120))
    (warned,) = analyzed(run).outliers
    noted = replace(warned, changed=False, values={"amax": (900.0, 2.0, None)})
    outliers = [*[warned] * analysis.MOST, noted, warned if last else noted]
    *_, beyond = analysis._outlier_findings(outliers)
    assert beyond.text.startswith("2 more stand out less: blocks.2.mlp.up input")
    assert beyond.level == level


@pytest.mark.parametrize(
    "is_changed",
    [
        lambda row: row["step"] >= 100,
        lambda row: row["layer"].endswith("mlp.down") and row["operand"] == "input",
    ],
    ids=["all layers", "one kind of layer"],
)
def test_what_layers_do_together_or_are_by_nature_does_not_stand_out(tmp_path, is_changed):
    def change(row):
        if "amax" in row and is_changed(row):
            row["amax"] *= 40
            row["underflow"] += 0.2
            row["sqnr_db"] -= 4

    assert analyzed(make_run(tmp_path / "r", change=change)).outliers == []


def test_layers_in_another_format_are_no_peers(tmp_path):
    def in_fp4(row):
        if row.get("layer", "").startswith("blocks.5."):
            row |= {"format": "e2m1", "scale": None, "headroom_bits": 0.0}
            row |= {"sqnr_db": 19.0 + row["amax"] % 0.1, "underflow": 0.2 + row["amax"] % 0.01}

    def with_an_outlier(row):
        in_fp4(row)
        if (row.get("layer"), row.get("operand")) == ("blocks.5.mlp.up", "input"):
            row |= {"sqnr_db": 5.0, "amax": row["amax"] * 2.0**20}

    assert analyzed(make_run(tmp_path / "r", 400, 6, change=in_fp4)).outliers == []
    (out,) = analyzed(make_run(tmp_path / "s", 400, 6, change=with_an_outlier)).outliers
    assert out.operand.name == "blocks.5.mlp.up, input"
    assert out.values.keys() == {"sqnr_db", "amax"}


@pytest.mark.parametrize("is_phase", [False, True])
def test_another_recipe_of_a_later_phase_does_not_stand_out(tmp_path, is_phase):
    def change(row):
        """Switch to FP4 at step 200, which costs one layer most."""
        if row["step"] >= 200 and "amax" in row:
            row |= {"format": "e2m1", "underflow": 0.1 + 0.2 * row["layer"].endswith("2.mlp.up")}
            row["sqnr_db"] -= 12

    phase = {"step": 190, "event": "phase", "phase": "late", "why": "nvfp4 was asked for"}
    metrics = [*metric_rows(400), *[phase] * is_phase]
    run = make_run(tmp_path / "r", 400, 6, metrics=metrics, change=change)
    is_reported = any("from step 200 on" in text for text in findings_of(run, "warning"))
    assert is_reported is not is_phase


def test_values_that_are_not_finite_are_an_alarm_with_their_place(tmp_path):
    bad = {"amax": None, "sqnr_db": None, "nonfinite": 0.02}
    change = at("blocks.0.mlp.down", "grad_output", lambda step: bad if step == 160 else {})
    (alarm,) = findings_of(make_run(tmp_path / "r", change=change), "alarm")
    sentence = "blocks.0.mlp.down, grad_output: values that are not finite at step 160"
    assert alarm.startswith(sentence)
    assert "2 % of them" in alarm
    change = at("blocks.0.mlp.up", "weight", lambda step: {"sqnr_db": 22.4} if step == 60 else {})
    extremes = analyzed(make_run(tmp_path / "s", change=change)).extremes
    assert ("lowest SQNR", "22.4 dB", "blocks.0.mlp.up, weight", 60) in extremes


@pytest.mark.parametrize(("bits", "level"), [(3.5, "warning"), (0.6, "note")])
def test_an_amax_beyond_its_scale_is_named_and_a_slight_one_is_only_noted(tmp_path, bits, level):
    change = at(
        "blocks.3.mlp.up", "weight",
        lambda step: {"headroom_bits": -bits if step == 80 else 0.5, "saturated": 1e-6},
    )  # fmt: skip
    run = make_run(tmp_path / "r", change=change)
    assert len(findings_of(run)) == (level == "warning")
    assert f"blocks.3.mlp.up, weight at step 80, by {bits} bits" in findings_of(run, level)[0]
    picture = amaxes(analyzed(run), "r")
    assert picture is not None
    assert "triangle" in picture.caption


def test_an_amax_that_rounding_takes_back_is_not_clipped(tmp_path):
    """Scales of NVFP4's blocks are rounded to nearest: about half the blocks reach beyond E2M1's
    largest value, and round back to it."""

    def change(row):
        if "headroom_bits" in row:
            row |= {"format": "e2m1", "scale": None, "headroom_bits": -0.08}

    record = analyzed(make_run(tmp_path / "r", change=change))
    assert not any("clipped" in finding.text for finding in record.findings)
    picture = amaxes(record, "r")
    assert picture is not None
    assert "triangle" not in picture.caption


def test_samples_that_are_taken_again_count_once(tmp_path):
    samples = operand_rows(4, [10, 20, 30])
    samples += [
        row | {"amax": 7.0} if "amax" in row else row for row in samples if row["step"] == 20
    ]
    telemetry = read_run(make_run(tmp_path / "r", telemetry=samples)).telemetry
    assert telemetry.model["step"] == 20
    for operand in telemetry.operands:
        assert operand.steps.tolist() == [10, 20]
        assert operand.figures["amax"][-1] == 7.0


# Events


def test_equal_events_in_a_row_are_one_line_and_unknown_ones_stay():
    lines = folded(EVENTS)
    assert [(line["steps"], line["event"]) for line in lines] == [
        ("42 to 44", "skip (3 times)"), ("44", "rollback"), ("44", "demote"), ("120", "restore"),
        ("130", "phase"), ("131", "skip"),
    ]  # fmt: skip
    assert lines[1]["more"] == "to_step 30"
    assert lines[2]["where"] == "blocks.1.mlp.up grad_output"
    assert lines[4]["more"] == "to cooldown"


def test_what_the_guard_did_is_said(tmp_path):
    rows = metric_rows(200)
    run = make_run(tmp_path / "r", metrics=[*rows[:44], *EVENTS[:5], *rows[30:], *EVENTS[5:]])
    text = " ".join(findings_of(run))
    assert "4 steps were skipped (steps 42, 43, 44 and 131)" in text
    assert "Step 44: the run went back to step 30, because three bad steps in a row." in text
    assert "blocks.1.mlp.up (grad_output) was taken out of FP8 to bf16 until step 120" in text
    assert headline(read_run(run))["state"] == "done"


def test_a_branch_has_its_own_events_and_speed(tmp_path):
    rows = metric_rows(200)
    after = [row | {"tokens_per_s": 20_000.0} for row in rows[150:]]
    branch = {"step": 150, "event": "branch", "why": "begun with runs/a/checkpoints/step-000150"}
    before = [*rows[:44], *EVENTS[:5], *rows[30:150]]
    path = make_run(tmp_path / "r", metrics=[*before, branch, *after])
    assert "skipped" not in " ".join(findings_of(path))
    run = read_run(path)
    assert [row["event"] for row in folded(run.metrics.events)] == ["branch"]
    assert len(run.metrics.rows) == 200
    assert headline(run)["tokens/s"] == "20,000 (median)"
    picture = throughput([run], ["r"], "tokens")
    assert picture is not None
    assert "median 20,000 tokens/s" in picture.caption


def test_a_run_that_failed_says_why_first(tmp_path):
    rows = metric_rows(200)
    stop = {"step": 71, "event": "stop", "why": "The loss is nan. Lower --lr.", "loss": None}
    run = make_run(tmp_path / "r", metrics=[*rows[:70], stop])
    assert headline(read_run(run))["state"] == "failed"
    assert findings_of(run)[0] == "The run stopped at step 71: The loss is nan. Lower --lr."
    resumed = make_run(tmp_path / "s", metrics=[*rows[:70], stop, *rows[70:]])
    assert headline(read_run(resumed))["state"] == "done"


@pytest.mark.parametrize(("skipped", "level"), [(3, "note"), (30, "warning")])
def test_a_few_skipped_steps_of_fp16_are_usual_and_many_are_not(tmp_path, skipped, level):
    rows = [row | {"skipped": row["step"] <= skipped} for row in metric_rows(200)]
    rows += [{"step": 201, "event": "skip", "why": "a spike"}]
    run = make_run(tmp_path / "r", recipe="fp16", metrics=rows, every=0)
    assert f"{skipped} steps were skipped because the gradient" in " ".join(findings_of(run, level))
    assert "1 step was skipped (step 201): a spike." in findings_of(run, "warning")


# The run itself


def test_when_a_run_was_trained_how_often_and_with_what_is_told(tmp_path):
    path = make_run(tmp_path / "r")
    assert headline(read_run(path))["began"] == "unknown"
    versions = {"fp8stack": "0.1.0", "torch": "2.13.0"}
    begin = {"event": "begin", "time": "2026-03-01T08:30:00+00:00", "step": 0, "versions": versions}
    end = {"event": "end", "step": 90, "seconds": 3600.4, "how": "stopped by a signal, and saved"}
    again = begin | {"time": "2026-03-02T08:30:00+00:00", "step": 90}
    for rows, took in (
        ([begin], "not known yet"),
        ([begin, end | {"seconds": 1e300}], "not known yet"),
        ([begin, end], "1:00:00"),
        ([begin, end, again], "at least 1:00:00, in 2 sessions"),
    ):
        write_lines(path / "sessions.jsonl", rows)
        run = read_run(path)
        assert headline(run)["took"] == took
    assert headline(run)["began"] == "2026-03-01 08:30 UTC"
    assert headline(run)["with"] == "fp8stack 0.1.0, torch 2.13.0"
    assert [session.ended for session in run.sessions] == [
        "stopped by a signal, and saved", "killed, or still running",
    ]  # fmt: skip


def test_the_times_of_a_run_are_in_utc(tmp_path, monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        run = make_run(tmp_path / "r", metrics=[{"step": 1, "loss": 2.0}])
        os.utime(run / "metrics.jsonl", (1_772_354_400, 1_772_354_400))
        state = headline(read_run(run))["state"]
    finally:
        monkeypatch.undo()
        time.tzset()
    assert state == "unfinished, last row of 2026-03-01 08:40 UTC"


def test_what_is_missing_or_too_large_is_noted(tmp_path):
    run = make_run(tmp_path / "r", telemetry=[])
    (run / "plan.json").unlink()
    with (run / "run.toml").open("r+b") as stream:
        stream.truncate(2**40)  # a hole, which takes no room
    assert {finding.level for finding in analyzed(run).findings} == {"note"}
    assert findings_of(run, "note") == ["run.toml cannot be read.", "plan.json is missing."]
    assert verdict(analyzed(run)).startswith("Nothing alarming: 2 notes.")


def test_why_a_run_has_no_telemetry_is_said(tmp_path):
    fp32 = make_run(tmp_path / "fp32", recipe="fp32", every=0)
    assert "no layer of this run is in FP8 (fp32)" in summary.without_telemetry(read_run(fp32))
    off = make_run(tmp_path / "off", every=0)
    assert "it was switched off" in summary.without_telemetry(read_run(off))
    empty = make_run(tmp_path / "empty", telemetry=[])
    assert "telemetry.jsonl holds no sample" in summary.without_telemetry(read_run(empty))
    (empty / "telemetry.jsonl").unlink()
    assert "there is no telemetry.jsonl" in summary.without_telemetry(read_run(empty))


def test_a_model_from_a_file_and_one_that_trains_on_have_a_forecast_by_size(tmp_path):
    run = make_run(tmp_path / "r", recipe="nvfp4", config="batch = 8\ncontext = 64\n")
    text = (run / "run.toml").read_text().replace('"gpt-nano"', '"presets/mine.toml"')
    (run / "presets").mkdir()
    preset = "vocabulary = 256\ncontext = 64\nlayers = 2\nwidth = 64\nheads = 2\n"
    (run / "presets" / "mine.toml").write_text(preset)
    forecasts = []
    for more in ("", 'init_from = "/elsewhere"\n'):
        (run / "run.toml").write_text(text + more)
        forecasts.append(read_run(run).forecast)
    fresh, trained_on = forecasts
    assert fresh is not None
    assert trained_on is not None
    assert trained_on.tokens != fresh.tokens


def test_what_if_gives_medians_and_the_distance_to_the_runs_own_recipe(tmp_path):
    exact = {("delayed", "input"): 30.0, ("mxfp8", "input"): 34.1, ("current", "input"): 28.5}

    def change(row):
        if "operand" in row:
            row["sqnr_db"] = exact.get((row["recipe"], row["operand"]), 25.0)

    run = make_run(tmp_path / "r", change=change, what_if=("current", "mxfp8"))
    comparison = what_if(analyzed(run))
    assert comparison is not None
    rows = {
        name: dict(zip(comparison.kinds, cells, strict=True)) for name, cells, _ in comparison.rows
    }
    assert rows["mxfp8"]["input"] == (34.1, pytest.approx(4.1))
    assert rows["current"]["input"] == (28.5, pytest.approx(-1.5))
    assert rows["delayed"]["input"] == (30.0, None)
    assert rows["mxfp8"]["weight"] == (25.0, 0.0)
    assert comparison.sentence.startswith(
        "mxfp8 would have cost 4.1 dB less on input; current would have cost 1.5 dB more on input."
    )
    assert what_if(analyzed(make_run(tmp_path / "none"))) is None


def test_idle_experts_are_a_finding_and_shares_that_are_no_numbers_are_unknown(tmp_path):
    def shares(step: int, shares: list[Any]) -> list[dict[str, Any]]:
        return [{"step": step, "experts": f"blocks.{i}.mlp", "shares": shares} for i in range(2)]

    def run(rows: list[dict[str, Any]]) -> Path:
        telemetry = operand_rows(2, [50]) + rows
        return make_run(tmp_path / str(len(rows)), metrics=metric_rows(50), telemetry=telemetry)

    path = run(shares(1, [0.25] * 4) + shares(50, [0.75, 0.25, 0, 0]))
    layers, loads = read_run(path).telemetry.expert_loads()
    assert layers == ["blocks.0.mlp", "blocks.1.mlp"]
    assert loads.tolist() == [[3, 1, 0, 0]] * 2
    (finding,) = findings_of(path, "warning")
    assert finding.startswith("4 experts of 8 got no token at step 50, 2 of them in blocks.0.mlp.")
    path = run([*shares(1, [0.5, "x"]), {"step": 1, "experts": "a", "shares": 3}])
    layers, loads = read_run(path).telemetry.expert_loads()
    assert layers == ["blocks.0.mlp", "blocks.1.mlp"]
    assert np.isnan(loads[:, 1]).all()
    assert findings_of(path) == []
