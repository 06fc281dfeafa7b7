"""`fp8stack report`: what it reads, what it points at, the page, the terminal, wrong input."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fp8stack.analysis.report import analysis, curves, page, summary
from fp8stack.analysis.report import text as terminal
from fp8stack.analysis.report.analysis import Analysis, analyze, verdict
from fp8stack.analysis.report.curves import amaxes, throughput
from fp8stack.analysis.report.drawing import (
    MOST_POINTS,
    legend_above,
    new_figure,
    style,
    thinned,
)
from fp8stack.analysis.report.events import folded
from fp8stack.analysis.report.expert_shares import relative_loads
from fp8stack.analysis.report.read import joined, read_run
from fp8stack.analysis.report.summary import headline, what_if
from fp8stack.training.metrics.loss_plot import view_range
from tests.support.cases import case
from tests.support.run_folders import (
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


def html_of(*runs: Path) -> str:
    return page.render([analyzed(run) for run in runs], "report_files")[0]


# Reading


def test_of_a_step_that_is_done_again_the_last_row_and_sample_count_and_all_events(tmp_path):
    rows, samples = metric_rows(40), operand_rows(4, [10, 20, 30])
    back = {"step": 40, "event": "rollback", "why": "a spike", "to_step": 30}
    rows += [back, *(row | {"loss": 9.0} for row in rows[30:35])]
    samples += [
        row | {"amax": 7.0} if "amax" in row else row for row in samples if row["step"] == 20
    ]
    run = read_run(make_run(tmp_path / "r", metrics=rows, telemetry=samples))
    assert [row["step"] for row in run.rows] == list(range(1, 36))
    expected = [*(row["loss"] for row in rows[28:30]), 9.0, 9.0]
    assert [row["loss"] for row in run.rows[28:32]] == expected
    assert run.events == [back]
    assert [row["step"] for row in run.models] == [10, 20]
    for operand in run.operands:
        assert operand.steps.tolist() == [10, 20]
        assert operand.figures["amax"][-1] == 7.0


def test_a_line_that_is_being_written_is_left_out_in_silence_and_a_damaged_one_is_said(tmp_path):
    path = make_run(tmp_path / "r")
    complete = read_run(path)
    for name in ("metrics.jsonl", "telemetry.jsonl"):
        with (path / name).open("a") as stream:
            stream.write('{"step": 201, "lo')
    run = read_run(path)
    assert run.notes == []
    assert len(run.rows) == len(complete.rows) == 200
    assert len(run.models) == len(complete.models)
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join([*lines[:50], "\x00\x00\n", *lines[50:]]))
    run = read_run(path)
    assert len(run.rows) == 50
    assert run.notes == ["metrics.jsonl is damaged: line 51 and on are left out."]


@pytest.mark.usefixtures("undrawn")
def test_a_run_of_few_files_and_rows_gets_a_page(tmp_path):
    run = make_run(tmp_path / "r", metrics=[], every=0)
    assert headline(analyzed(run))["state"] == "no step yet"
    assert "No step is logged yet." in html_of(run)
    (run / "metrics.jsonl").unlink()
    assert "No step is logged yet." in html_of(run)
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.4}])
    html = html_of(tmp_path)
    assert "plan.json is missing." in html
    assert "run.toml is missing." in html
    assert headline(analyzed(tmp_path))["validation loss"] == "not evaluated"


@pytest.mark.usefixtures("undrawn")
def test_a_run_whose_gradient_norm_is_never_above_zero_gets_a_page(tmp_path):
    rows: list[dict[str, Any]] = [
        {"step": at, "lr": 0.1, "loss": 2.5, "grad_norm": 0.0} for at in (1, 2)
    ]
    html = html_of(make_run(tmp_path / "r", metrics=rows, every=0))
    assert "No gradient norm." in html


def test_values_that_are_no_numbers_are_unknown_and_not_fatal(tmp_path):
    odd: list[Any] = [None, "2.5", True, [], {}, 10**400, 1e308, -1e308]
    keys = ("loss", "val_loss", "lr", "grad_norm")
    rows: list[dict[str, Any]] = [
        {"step": at} | dict.fromkeys(keys, value) for at, value in enumerate(odd, start=1)
    ]
    rows += [{"step": "seven", "loss": 1.0}, {"step": -1, "loss": 1.0}, {"loss": 1.0}]
    run = make_run(tmp_path / "r", metrics=rows, telemetry=[
        {"step": 1, "layer": 5, "operand": "input", "amax": "much", "sqnr_db": None},
        {"step": 1, "layer": "a", "operand": "new", "format": "e9m9", "amax": 1e308, "scale": 0},
        {"step": 1, "operand": None}, {"step": 2, "not_fp8": 7}, {"plan": 3},
    ])  # fmt: skip
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 9, "loss": NaN, "lr": Infinity}\n')
    assert [row["step"] for row in read_run(run).rows] == list(range(1, 10))
    assert "</html>" in html_of(run)
    terminal.show([analyzed(run)], ["r"], Console(file=io.StringIO()))


@pytest.mark.usefixtures("undrawn")
def test_when_a_run_was_trained_how_often_and_with_what_is_told(tmp_path):
    run = make_run(tmp_path / "r")
    assert headline(analyzed(run))["began"] == "unknown"
    versions = {"fp8stack": "0.1.0", "torch": "2.13.0"}
    begin = {"event": "begin", "time": "2026-03-01T08:30:00+00:00", "step": 0, "versions": versions}
    end = {"event": "end", "step": 90, "seconds": 3600.4, "how": "stopped by a signal, and saved"}
    again = begin | {"time": "2026-03-02T08:30:00+00:00", "step": 90}
    write_lines(run / "sessions.jsonl", [begin])
    assert headline(analyzed(run))["took"] == "not known yet"
    write_lines(run / "sessions.jsonl", [begin, end, again])
    facts = headline(analyzed(run))
    assert facts["began"] == "2026-03-01 08:30 UTC"
    assert facts["took"] == "at least 1:00:00, in 2 sessions"
    assert facts["with"] == "fp8stack 0.1.0, torch 2.13.0"
    html = html_of(run)
    assert "stopped by a signal, and saved" in html
    assert "killed, or still running" in html
    tags = Page(html).tags
    links = {values.get("href") for tag, values in tags if tag == "a"}
    assert {f"#{values['id']}" for tag, values in tags if tag == "section"} <= links
    write_lines(run / "sessions.jsonl", [begin, end | {"seconds": 1e300}])
    assert headline(analyzed(run))["took"] == "not known yet"


def test_the_times_of_a_run_are_in_utc(tmp_path, monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        run = make_run(tmp_path / "r", metrics=[{"step": 1, "loss": 2.0}])
        os.utime(run / "metrics.jsonl", (1_772_354_400, 1_772_354_400))
        state = headline(analyzed(run))["state"]
    finally:
        monkeypatch.undo()
        time.tzset()
    assert state == "unfinished, last row of 2026-03-01 08:40 UTC"


def test_what_is_missing_is_noted_and_telemetry_that_holds_nothing_is_not_missing(tmp_path):
    run = make_run(tmp_path / "r", telemetry=[])
    (run / "plan.json").unlink()
    assert {finding.level for finding in analyzed(run).findings} == {"note"}
    assert verdict(analyzed(run)).startswith("Nothing alarming: ")
    (run / "telemetry.jsonl").write_text('{"event": "plan", "plan": {}}\n')
    sentence = "No telemetry yet: telemetry.jsonl holds no sample."
    assert summary.without_telemetry(read_run(run)) == sentence
    (run / "telemetry.jsonl").unlink()
    assert "there is no telemetry.jsonl" in summary.without_telemetry(read_run(run))


# Outliers


def at(layer: str, kind: str, figures: Callable[[int], dict[str, Any]]) -> Change:
    """Gives one operand these figures, by step."""

    def change(row: dict[str, Any]) -> None:
        if (row.get("layer"), row.get("operand")) == (layer, kind):
            row |= figures(row["step"])

    return change


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
    assert [(out.operand.layer, out.operand.kind) for out in outliers] == [
        ("blocks.2.mlp.up", kind)
    ]
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
    outliers = analyzed(make_run(tmp_path / "r", change=change)).outliers
    assert [out.operand.name for out in outliers] == ["blocks.1.attention.qkv, input"]
    assert list(outliers[0].values) == [figure]
    assert outliers[0].step == 120


def test_what_passed_after_one_sample_is_a_note(tmp_path):
    def run(step):
        worse = {"sqnr_db": 10.7}
        change = at("blocks.1.mlp.up", "grad_output", lambda at: worse if at == step else {})
        return make_run(tmp_path / str(step), change=change)

    passed, newest = run(100), run(200)
    assert findings_of(passed) == []
    sentence = "blocks.1.mlp.up, grad_output was out of line at step 100 alone"
    assert sentence in findings_of(passed, "note")[0]
    assert "grad_output stands out at step 200: SQNR 10.7 dB" in findings_of(newest, "warning")[0]


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


def in_fp4(row):
    """Give the last block the figures of a recipe that has it in FP4."""
    if row.get("layer", "").startswith("blocks.5."):
        row |= {"format": "e2m1", "scale": None, "headroom_bits": 0.0}
        row |= {"sqnr_db": 19.0 + row["amax"] % 0.1, "underflow": 0.2 + row["amax"] % 0.01}


def test_layers_in_another_format_are_no_peers(tmp_path):
    assert analyzed(make_run(tmp_path / "r", 400, 6, change=in_fp4)).outliers == []

    def change(row):
        in_fp4(row)
        if (row.get("layer"), row.get("operand")) == ("blocks.5.mlp.up", "input"):
            row |= {"sqnr_db": 5.0, "amax": row["amax"] * 2.0**20}

    (out,) = analyzed(make_run(tmp_path / "s", 400, 6, change=change)).outliers
    assert out.operand.name == "blocks.5.mlp.up, input"
    assert out.values.keys() == {"sqnr_db", "amax"}


def test_another_recipe_of_a_later_phase_does_not_stand_out(tmp_path):
    def change(row):
        """Switch to FP4 at step 200, which costs one layer most."""
        if row["step"] >= 200 and "amax" in row:
            row |= {"format": "e2m1", "underflow": 0.1 + 0.2 * row["layer"].endswith("2.mlp.up")}
            row["sqnr_db"] -= 12

    phase = {"step": 190, "event": "phase", "phase": "late", "why": "nvfp4 was asked for"}
    rows = [*metric_rows(400), phase]
    for name, metrics, is_reported in (("one", None, True), ("two", rows, False)):
        run = make_run(tmp_path / name, 400, 6, metrics=metrics, change=change)
        assert (
            any("from step 200 on" in text for text in findings_of(run, "warning")) == is_reported
        )


def test_values_that_are_not_finite_are_an_alarm_with_their_place(tmp_path):
    bad = {"amax": None, "sqnr_db": None, "nonfinite": 0.02}
    change = at("blocks.0.mlp.down", "grad_output", lambda step: bad if step == 160 else {})
    (alarm,) = findings_of(make_run(tmp_path / "r", change=change), "alarm")
    sentence = "blocks.0.mlp.down, grad_output: values that are not finite at step 160"
    assert alarm.startswith(sentence)
    assert "2 % of them" in alarm
    change = at("blocks.0.mlp.up", "weight", lambda step: {"sqnr_db": 22.4} if step == 60 else {})
    extremes = analyzed(make_run(tmp_path / "s", change=change)).extremes
    assert ("lowest SQNR", "blocks.0.mlp.up, weight", 60, "22.4 dB") in extremes


@pytest.mark.parametrize(("bits", "level"), [(3.5, "warning"), (0.6, "note")])
def test_an_amax_beyond_its_scale_is_named_and_a_slight_one_is_only_noted(tmp_path, bits, level):
    change = at(
        "blocks.3.mlp.up", "weight",
        lambda step: {"headroom_bits": -bits if step == 80 else 0.5, "saturated": 1e-6},
    )  # fmt: skip
    run = make_run(tmp_path / "r", change=change)
    assert len(findings_of(run)) == (level == "warning")
    assert f"blocks.3.mlp.up, weight at step 80, by {bits} bits" in findings_of(run, level)[0]


def test_an_amax_that_rounding_takes_back_is_not_clipped(tmp_path):
    """Scales of NVFP4's blocks are rounded to nearest: about half the blocks reach beyond E2M1's
    largest value, and round back to it."""

    def change(row):
        if "headroom_bits" in row:
            row |= {"format": "e2m1", "scale": None, "headroom_bits": -0.08}

    analysis = analyzed(make_run(tmp_path / "r", change=change))
    assert not any("clipped" in finding.text for finding in analysis.findings)
    assert "triangle" not in amaxes(analysis, "r").caption
    change = at(
        "blocks.3.mlp.up", "weight",
        lambda step: {"headroom_bits": -0.6, "saturated": 1e-6} if step == 80 else {},
    )  # fmt: skip
    assert "triangle" in amaxes(analyzed(make_run(tmp_path / "s", change=change)), "s").caption


# Events


def events() -> list[dict[str, Any]]:
    skips = [
        {"step": at, "event": "skip", "why": f"the loss is {at / 7:.3f}", "loss": None}
        for at in (42, 43, 44)
    ]
    return [
        *skips,
        {"step": 44, "event": "rollback", "why": "three bad steps in a row", "to_step": 30},
        {"step": 44, "event": "demote", "why": "its amax is not finite", "precision": "bf16",
         "layer": "blocks.1.mlp.up", "operand": "grad_output", "until_step": 120},
        {"step": 120, "event": "restore", "layer": "blocks.1.mlp.up", "why": "its time is up"},
        {"step": 130, "event": "phase", "to": "cooldown"},
        {"step": 131, "event": "skip", "why": "the loss is nan", "loss": None},
    ]  # fmt: skip


def test_equal_events_in_a_row_are_one_line_and_unknown_ones_stay():
    lines = folded(events())
    assert [(line["steps"], line["event"]) for line in lines] == [
        ("42 to 44", "skip (3 times)"), ("44", "rollback"), ("44", "demote"), ("120", "restore"),
        ("130", "phase"), ("131", "skip"),
    ]  # fmt: skip
    assert lines[1]["more"] == "to_step 30"
    assert lines[2]["where"] == "blocks.1.mlp.up grad_output"
    assert lines[4]["more"] == "to cooldown"


def test_what_the_guard_did_is_said(tmp_path):
    rows = metric_rows(200)
    run = make_run(tmp_path / "r", metrics=[*rows[:44], *events()[:5], *rows[30:], *events()[5:]])
    text = " ".join(findings_of(run))
    assert "4 steps were skipped (steps 42, 43, 44 and 131)" in text
    assert "Step 44: the run went back to step 30, because three bad steps in a row." in text
    assert "blocks.1.mlp.up (grad_output) was taken out of FP8 to bf16 until step 120" in text
    assert headline(analyzed(run))["state"] == "done"


def test_a_branch_has_its_own_events_and_speed(tmp_path):
    rows = metric_rows(200)
    after = [row | {"tokens_per_s": 2 * row["tokens_per_s"]} for row in rows[150:]]
    branch = {"step": 150, "event": "branch", "why": "begun with runs/a/checkpoints/step-000150"}
    rows_before = [*rows[:44], *events()[:5], *rows[30:150], branch]
    run = make_run(tmp_path / "r", metrics=[*rows_before, *after])
    assert "skipped" not in " ".join(findings_of(run))
    analysis = analyzed(run)
    assert [row["event"] for row in folded(analysis.run.events)] == ["branch"]
    assert len(analysis.run.rows) == 200
    origin = analyzed(make_run(tmp_path / "s", metrics=rows))
    speeds = [
        float(headline(x)["tokens/s"].split()[0].replace(",", "")) for x in (analysis, origin)
    ]
    assert speeds[0] == pytest.approx(2 * speeds[1], rel=0.1)
    picture = throughput([analysis.run], ["r"], "tokens")
    assert picture is not None
    assert f"median {headline(analysis)['tokens/s'].split()[0]} tokens/s" in picture.caption


def test_a_model_from_a_file_and_one_that_trains_on_have_a_forecast_by_size(tmp_path):
    preset = "vocabulary = 256\ncontext = 64\nlayers = 2\nwidth = 64\nheads = 2\n"
    keys = "batch = 8\ncontext = 64\n"
    run = make_run(tmp_path / "r", recipe="nvfp4", config=keys)
    text = (run / "run.toml").read_text().replace('"gpt-nano"', '"presets/mine.toml"')
    (run / "presets").mkdir()
    (run / "presets" / "mine.toml").write_text(preset)
    (run / "run.toml").write_text(text)
    forecast = read_run(run).forecast
    assert forecast is not None
    (run / "run.toml").write_text(text + 'init_from = "/elsewhere"\n')
    trained_on = read_run(run).forecast
    assert trained_on is not None
    assert trained_on.tokens != forecast.tokens


def test_a_run_that_failed_says_why_first(tmp_path):
    rows = metric_rows(200)[:70]
    stop = {"step": 71, "event": "stop", "why": "The loss is nan. Lower --lr.", "loss": None}
    run = make_run(tmp_path / "r", metrics=[*rows, stop])
    assert headline(analyzed(run))["state"] == "failed"
    assert findings_of(run)[0] == "The run stopped at step 71: The loss is nan. Lower --lr."
    going_on = [*rows, stop, *metric_rows(200)[70:]]
    resumed = make_run(tmp_path / "s", metrics=going_on)
    assert headline(analyzed(resumed))["state"] == "done"


def test_a_few_skipped_steps_of_fp16_are_usual_and_many_are_not(tmp_path):
    def run(name, skipped):
        rows = [
            row | {"loss_scale": 65536.0, "skipped": row["step"] <= skipped}
            for row in metric_rows(200)
        ]
        return make_run(tmp_path / name, recipe="fp16", metrics=rows, every=0)

    assert findings_of(run("few", 3)) == []
    assert "3 steps were skipped" in findings_of(run("few again", 3), "note")[0]
    assert "30 steps were skipped" in findings_of(run("many", 30), "warning")[0]


def test_skipped_steps_of_the_guard_and_of_fp16_are_told_apart(tmp_path):
    rows = [row | {"skipped": row["step"] < 3} for row in metric_rows(200)]
    rows += [{"step": 90, "event": "skip", "why": "a spike"}]
    rows += [{"step": 95, "event": "another", "fp16": True}]
    findings = findings_of(make_run(tmp_path / "r", metrics=rows, every=0), "warning", "note")
    assert findings[0] == "1 step was skipped (step 90): a spike."
    assert "2 steps were skipped because the gradient overflowed" in findings[1]


# Other recipes


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


# The page


class Page(HTMLParser):
    """Parses a page's tags and words, and fails if tags do not match."""

    VOID = frozenset({"meta", "link", "br", "img", "input", "hr"})
    RESOURCES = ("src", "href", "xlink:href", "data", "poster", "srcset", "action")

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, {key: value or "" for key, value in attrs}))
        self.open += [tag] if tag not in self.VOID else []

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


SECTIONS = ("attention", "training", "fp8", "plan", "events", "configuration")


def test_a_page_is_whole_and_needs_nothing_from_elsewhere(tmp_path):
    change = outlier("blocks.1.mlp.up", "input", 100)
    run = make_run(tmp_path / "a", blocks=2, change=change, what_if=["mxfp8"])
    html = html_of(run, make_run(tmp_path / "b", blocks=2, recipe="mxfp8"))
    assert html.startswith("<!DOCTYPE html>")
    parsed = Page(html)
    ids = [values["id"] for _, values in parsed.tags if values.get("id")]
    assert len(set(ids)) == len(ids)
    expected = {f"run{at}-{section}" for at in (1, 2) for section in SECTIONS}
    assert expected | {"overview", "compared", "run1-what-if"} <= set(ids)
    links = [values.get("href", "") for tag, values in parsed.tags if tag == "a"]
    assert all(link.startswith("#") and link[1:] in ids for link in links)
    for tag, values in parsed.tags:
        for resource in (values[name] for name in Page.RESOURCES if values.get(name)):
            assert tag == "a" or resource.startswith(("data:", "#")), resource
            assert resource[0] != "#" or resource[1:] in ids
    assert not re.search(r"https?://|@import|<script", html)
    assert set(re.findall(r"url\((.)", html)) <= {"#"}
    tags = [tag for tag, _ in parsed.tags]
    assert {"script", "iframe", "object"} & set(tags) == set()
    assert tags.count("h1") == 1
    images = [v.get("aria-label", "") for _, v in parsed.tags if v.get("role") == "img"]
    assert len(images) == 2 + 2 * 7
    assert all(len(alt) > 30 for alt in images)
    assert "blocks.1.mlp.up, input stands out from step 100 on." in parsed.text


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        ("fp32", "No operands to show: no layer of this run is in FP8 (fp32)"),
        ("delayed", "No telemetry: it was switched off"),
    ],
)
def test_a_run_without_telemetry_says_so(tmp_path, recipe, sentence):
    assert sentence in Page(html_of(make_run(tmp_path / "r", recipe=recipe, every=0))).text


def test_losses_that_are_not_finite_are_said_and_left_out_of_the_plot(tmp_path):
    rows = metric_rows(60)
    for row in rows[20:23]:
        row |= {"loss": None, "grad_norm": None}
    run = make_run(tmp_path / "r", 60, metrics=rows, every=0)
    assert "The loss is not finite at steps 21, 22 and 23." in findings_of(run, "alarm")
    assert "run1-loss" in html_of(run)


@pytest.mark.slow
def test_a_long_run_makes_no_large_page(tmp_path):
    rows = operand_rows(50, [1, *range(50, 1001, 50)], "current")
    run = make_run(tmp_path / "r", 1000, 50, "current", telemetry=rows)
    assert len(html_of(run)) < 3_000_000


def test_a_long_line_keeps_its_extremes_and_spikes_do_not_set_the_axis():
    low, high = view_range([3.0, 2.0], [4.0, 3.9, 1.5, 40.0, 0.1])
    assert 1.0 < low < 1.5 < 4.0 < high < 5.0
    assert 5.0 < view_range([5.0, 2.0, 6.0, 1e9], [])[1] < 7.0  # one of the runs diverged
    values = np.zeros(100_000)
    values[[777, 60_001]] = [9.0, -9.0]
    steps, thinned_values, _ = thinned(list(range(100_000)), list(values))
    assert len(steps) <= MOST_POINTS
    assert dict(zip(steps.tolist(), thinned_values.tolist(), strict=True))[777] == 9.0
    assert thinned_values.min() == -9.0
    assert (np.diff(steps) > 0).all()


def test_the_curves_of_a_single_step_are_dots(tmp_path):
    runs = [read_run(make_run(tmp_path / name, steps=1)) for name in ("one", "other")]
    for selected in (runs[:1], runs):
        names = [run.name for run in selected]
        pictures = [curves.loss(selected, names, "l"), curves.throughput(selected, names, "t")]
        pictures.append(curves.rates(selected[0], "r"))
        for picture in pictures:
            assert picture is not None
            drawn = [line for axes in picture.figure.axes for line in axes.lines]
            assert drawn
            assert all(line.get_marker() == "o" for line in drawn), picture.title
    picture = curves.loss([read_run(make_run(tmp_path / "two", steps=2))], ["two"], "l")
    assert picture is not None
    (axes,) = picture.figure.axes
    assert "None" in {line.get_marker() for line in axes.lines}


def test_a_long_legend_leaves_the_plot_its_height():
    heights = []
    with style():
        for count in (1, 14):
            figure = new_figure(7.4, 2.9)
            axes = figure.add_subplot()
            for number in range(count):
                axes.plot([0, 1], label=f"{number:02}{'-in-a-folder-with-a-long-name' * 4}")
            legend_above(figure, axes)
            figure.draw_without_rendering()
            heights.append(axes.get_window_extent().height)
    assert heights[1] > 0.9 * heights[0]


def test_samples_that_are_joined_show_the_worst_and_a_terminals_map_bad_ones_dark():
    assert terminal.shades(np.array([31.0, 25.0, 17.0, 5.0, np.nan, -3.0])) == "·░▓█ █"
    assert terminal.sparkline([0.0, 1.0, 0.5], 10) == "▁█▅"
    assert terminal.sparkline([2.0] * 50, 4) == "▁▁▁▁"
    values = np.full((2, 100), 30.0)
    values[1, 57] = 4.0
    values[0, 3] = np.nan
    steps, few = joined(np.arange(100), values, worst_is_high=False, most=10)
    assert steps.tolist() == list(range(0, 100, 10))
    assert few[1].tolist() == [30.0] * 5 + [4.0] + [30.0] * 4
    assert few[0].tolist() == [30.0] * 10


# The command


def test_the_command_writes_the_page_and_its_plots(tmp_path, command, capsys, monkeypatch):
    """The same run gives the same page, and no plot has formulas for numbers."""
    rows = [
        {"gradient": f"blocks.{at}.a", "step": step, "norm": 10.0**-at, "ratio": 1.0, "zeros": 0.0}
        for step in (10, 20)
        for at in range(2)
    ]
    telemetry = [*operand_rows(1, [10, 20]), *rows]
    run = make_run(tmp_path / "runs" / "a", steps=20, blocks=1, telemetry=telemetry)
    assert command("report", "runs/a") == 0
    assert "report: runs/a/report.html" in capsys.readouterr().out
    html = (run / "report.html").read_text()
    assert html.startswith("<!DOCTYPE html>")
    assert html_of(Path("runs/a")) == html
    assert "Gradient by part of the model" in html
    assert "mathdefault" not in html
    narrow = html[html.index("@media (max-width: 600px)") :]  # none is wider than a telephone
    assert ".plot:not(.wide) svg { min-width: 0; }" in narrow[:400]
    names = ("amax", "gradient", "loss", "rates", "saturated", "sqnr_db", "throughput", "underflow")
    plots = sorted((run / "report_files").iterdir())
    assert [path.name for path in plots] == [f"run1-{name}.png" for name in names]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in plots)


@pytest.mark.usefixtures("undrawn")
def test_several_runs_share_a_page_beside_them_which_is_written_over(tmp_path, command):
    for name in "ab":
        make_run(tmp_path / "runs" / name, every=0)
    for _ in range(2):  # over its own, not over others'
        assert command("report", "runs/a", "runs/b") == 0
    assert (tmp_path / "runs" / "report_files" / "runs-loss.png").exists()
    assert command("report", "runs/a", "--out", "new/one.html") == 0
    assert (tmp_path / "new" / "one_files" / "run1-loss.png").exists()


WRONG = {
    "no such run": (["none"], "No run in 'none'"),
    "no run": (["empty"], "No run in 'empty'"),
    "a file": (["file"], "No run in 'file'"),
    "a folder as page": (["runs/a", "--out", "empty"], "--out empty is a folder"),
    "below a file": (["runs/a", "--out", "file/x.html"], "file is no folder"),
    "something else": (["runs/a", "--out", "file"], "file exists and is no report of fp8stack"),
    "a pipe": (["runs/a", "--out", "pipe"], "pipe exists and is no report of fp8stack"),
    "its metrics": (["runs/a", "--out", "runs/a/metrics.jsonl"], "is no report of fp8stack"),
    "plots' place": (["runs/a", "--out", "taken.html"], "taken_files is where the plots belong"),
    "apart": (["runs/a", "far/b"], "different folders. Say by --out"),
    "nothing": ([], "Missing argument"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_line_and_writes_nothing(name, tmp_path, refused):
    arguments, expected = WRONG[name]
    make_run(tmp_path / "runs" / "a", every=0)
    make_run(tmp_path / "far" / "b", every=0)
    (tmp_path / "empty").mkdir()
    (tmp_path / "taken_files").mkdir()
    (tmp_path / "taken_files" / "mine.png").write_text("mine")
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    assert expected in refused("report", *arguments)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev here")
def test_a_place_that_cannot_be_written_is_exit_code_4(tmp_path, command, capsys):
    make_run(tmp_path / "a", every=0)
    assert command("report", "a", "--out", "/proc/none/report.html") == 4
    assert "Cannot write to /proc/none" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_text_prints_the_essentials_and_writes_nothing(tmp_path, command, capsys):
    change = outlier("blocks.1.mlp.up", "input", 100)
    make_run(tmp_path / "a", change=change, what_if=["mxfp8"])
    make_run(tmp_path / "b", recipe="fp32", every=0)
    before = sorted(tmp_path.rglob("*"))
    assert command("report", "a", "b", "--text") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "blocks.1.mlp.up, input stands out from step 100 on" in out
    assert "mxfp8 would have cost" in out
    assert "No operands to show: no layer of this run is in FP8" in out
    assert sorted(tmp_path.rglob("*")) == before
    assert command("report", "a", "--text", "--out", "page.html") == 0
    assert (tmp_path / "page.html").exists()


# A browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
                None)  # fmt: skip
FRAME = """<!DOCTYPE html><iframe id="f" src="{page}" style="width:{width}px;height:900px;border:0">
</iframe><script>onload = () => {{
const frame = document.getElementById("f").contentWindow, root = frame.document.documentElement;
const fetched = frame.performance.getEntriesByType("resource").map(entry => entry.name)
  .filter(name => !name.startsWith("data:"));
const boxes = query => [...frame.document.querySelectorAll(query)]
  .map(element => element.getBoundingClientRect()).filter(box => box.height);
document.body.innerHTML = "<p>" + JSON.stringify({{scroll: root.scrollWidth,
  client: root.clientWidth, captions: Math.max(...boxes("caption").map(box => box.right)),
  labels: Math.min(...boxes(".wide svg text").map(box => Math.max(box.height, box.width))),
  fetched: fetched, plots: frame.document.querySelectorAll("svg").length,
  shown: [...frame.document.querySelectorAll("svg")].filter(s => s.clientHeight > 100).length}});
}}</script>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium to look with")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_the_page_without_scrolling_sideways(tmp_path, width):
    long = "blocks.1." + "very_long_name." * 8 + "up"

    def change(row):
        row |= {"layer": long} if row.get("layer") == "blocks.1.mlp.up" else {}

    make_run(tmp_path / "a", change=change, what_if=["mxfp8", "current", "block"])
    make_run(tmp_path / ("b" * 80), metrics=[*metric_rows(200), *events()])
    html = html_of(tmp_path / "a", tmp_path / ("b" * 80))
    assert CHROMIUM is not None
    (tmp_path / "page.html").write_text(html)
    (tmp_path / "frame.html").write_text(FRAME.format(page="page.html", width=width))
    done = subprocess.run(
        [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
         "--dump-dom", "--allow-file-access-from-files",
         f"--user-data-dir={tmp_path / 'profile'}",
         "--window-size=1400,1000", "--virtual-time-budget=5000",
         (tmp_path / "frame.html").as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    match = re.search(r"<p>(\{.*?\})</p>", done.stdout)
    assert match, done.stderr[-2000:]
    measured = json.loads(match[1].replace("&quot;", '"'))
    assert measured["client"] == width
    assert measured["scroll"] <= width
    assert measured["captions"] <= width
    assert measured["labels"] >= 7  # pixels: of a heat map, to be read
    assert measured["fetched"] == []
    assert measured["plots"] == measured["shown"] == 2 + 2 * 7


# Experts


def expert_rows(step: int, shares: list[Any]) -> list[dict[str, Any]]:
    return [{"step": step, "experts": f"blocks.{i}.mlp", "shares": shares} for i in range(2)]


def test_the_tokens_of_experts_are_a_map_and_idle_experts_a_finding(tmp_path):
    rows = expert_rows(1, [0.25] * 4) + expert_rows(50, [0.75, 0.25, 0, 0])
    telemetry = operand_rows(2, [50]) + rows
    run = make_run(tmp_path / "r", metrics=metric_rows(50), telemetry=telemetry)
    layers, loads = relative_loads(read_run(run))
    assert layers == ["blocks.0.mlp", "blocks.1.mlp"]
    assert loads.tolist() == [[3, 1, 0, 0]] * 2
    assert [row["step"] for row in read_run(run).models] == [50]
    (finding,) = findings_of(run, "warning")
    assert finding.startswith("4 experts of 8 got no token at step 50, 2 of them in blocks.0.mlp.")
    assert "Tokens by expert" in html_of(run)


def test_shares_of_experts_that_are_no_numbers_are_left_out(tmp_path):
    rows = [*expert_rows(1, [0.5, "x"]), {"step": 1, "experts": "a", "shares": 3}]
    run = make_run(tmp_path / "r", metrics=metric_rows(5), telemetry=rows)
    layers, loads = relative_loads(read_run(run))
    assert layers == ["blocks.0.mlp", "blocks.1.mlp"]
    assert np.isnan(loads[:, 1]).all()
    assert findings_of(run) == []
    html_of(run)
