"""A report's findings, headline, and figures of other recipes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC
from typing import Any

import numpy as np
import pytest

from fp8stack.analysis.report import analysis, summary
from fp8stack.analysis.report.analysis import Analysis, analyze, verdict
from fp8stack.analysis.report.curves import amaxes, throughput
from fp8stack.analysis.report.events import folded
from fp8stack.analysis.report.run_record import read_run
from fp8stack.analysis.report.summary import headline, what_if
from fp8stack.model.config import load_config
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


@pytest.fixture
def analyzed(tmp_path) -> Callable[..., Analysis]:
    def make(steps: int = 200, blocks: int = 4, **more: Any) -> Analysis:
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        return analyze(read_run(make_run(path, steps, blocks, **more)))

    return make


def texts(result: Analysis, *levels: str) -> list[str]:
    """The findings of some levels, by default the levels that need attention."""
    levels = levels or ("alarm", "warning")
    return [finding.text for finding in result.findings if finding.level in levels]


def at(name: str, figures: dict[str, Any], begin: int = 0, end: int = 10**9) -> Change:
    """A change of the figures of one operand, in the steps from `begin` until `end`."""

    def change(row: dict[str, Any]) -> None:
        if f"{row.get('layer')}, {row.get('operand')}" == name and begin <= row["step"] < end:
            row |= figures

    return change


# Outliers


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8"])
@pytest.mark.parametrize("seed", [case(seed, quick=seed == 0) for seed in range(3)])
def test_nothing_stands_out_in_a_clean_run(analyzed, recipe, seed):
    rows = operand_rows(6, [1, *range(20, 401, 20)], recipe, seed)
    result = analyzed(400, 6, recipe=recipe, telemetry=rows)
    assert texts(result) == []
    assert verdict(result).startswith(("Nothing stands out.", "Nothing alarming: 1 note."))


def test_scales_that_have_not_settled_are_no_alarm(analyzed):
    rows = operand_rows(4, [1])
    assert min(row["sqnr_db"] for row in rows[1:]) == 3.0
    result = analyzed(telemetry=rows)
    assert texts(result) == []
    assert "had not settled" in verdict(result)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("since", "when"), [(0, "all along"), (120, "from step 120 on")])
@pytest.mark.parametrize("recipe", ["delayed", "mxfp8"])
@pytest.mark.full
def test_an_outlier_is_pointed_at_by_the_name_of_its_layer_and_operand(
    analyzed, kind, since, when, recipe
):
    result = analyzed(recipe=recipe, change=outlier("blocks.2.mlp.up", kind, since))
    assert [out.operand.name for out in result.outliers] == [f"blocks.2.mlp.up, {kind}"]
    (sentence,) = (text for text in texts(result, "warning") if "stands out" in text)
    assert sentence.startswith(f"blocks.2.mlp.up, {kind} stands out {when}.")
    assert "underflow 31 %" in sentence
    assert "SQNR 17.5 dB" in sentence


@pytest.mark.parametrize(
    ("figure", "value"), [("sqnr_db", 19.0), ("saturated", 0.02), ("underflow", 0.2), ("amax", 900)]
)
def test_one_figure_is_enough_to_stand_out(analyzed, figure, value):
    (out,) = analyzed(change=at("blocks.1.mlp.up, input", {figure: value}, 101)).outliers
    assert out.operand.name == "blocks.1.mlp.up, input"
    assert (list(out.values), out.step) == ([figure], 120)


UP = "blocks.1.mlp.up, weight"
NOT_FINITE = {"amax": None, "sqnr_db": None, "nonfinite": 0.02}


@pytest.mark.parametrize(
    ("level", "sentence", "figures", "step"),
    [
        ("note", "was out of line at step 100 alone: SQNR 10.7 dB", {"sqnr_db": 10.7}, 100),
        ("warning", "stands out at step 200: SQNR 10.7 dB", {"sqnr_db": 10.7}, 200),
        ("alarm", "step 160, first at step 160, at most 2 % of them", NOT_FINITE, 160),
        ("warning", "at step 80, by 3.5 bits", {"headroom_bits": -3.5, "saturated": 1e-6}, 80),
        ("note", "at step 80, by 0.6 bits", {"headroom_bits": -0.6, "saturated": 1e-6}, 80),
    ],
)
def test_a_bad_sample_has_a_finding_of_its_weight(analyzed, level, sentence, figures, step):
    result = analyzed(change=at(UP, figures, step, step + 1))
    finding = texts(result, level)[0]
    assert UP in finding
    assert sentence in finding
    assert len(texts(result)) == (level != "note")
    picture = amaxes(result, "r")
    assert picture is not None
    assert ("triangle" in picture.caption) == ("bits" in sentence)


@pytest.mark.parametrize(("last", "level"), [(False, "note"), (True, "warning")])
def test_outliers_beyond_those_with_a_sentence_are_a_warning_if_one_is(analyzed, last, level):
    (warned,) = analyzed(change=outlier("blocks.2.mlp.up", "input", 120)).outliers
    noted = replace(warned, changed=False, values={"amax": (900.0, 2.0, None)})
    outliers = [*[warned] * analysis.MOST, noted, warned if last else noted]
    *_, beyond = analysis._outlier_findings(outliers)
    assert beyond.text.startswith("2 more stand out less: blocks.2.mlp.up input")
    assert beyond.level == level


def all_layers(row: dict[str, Any]) -> None:
    if row["step"] >= 100 and "amax" in row:
        row |= {"amax": 40 * row["amax"], "underflow": row["underflow"] + 0.2}
        row["sqnr_db"] -= 4


def one_kind_of_layer(row: dict[str, Any]) -> None:
    if row.get("layer", "").endswith("mlp.down") and row["operand"] == "input":
        all_layers(row | {"step": 100})


def last_block_in_fp4(row: dict[str, Any]) -> None:
    if row.get("layer", "").startswith("blocks.5."):
        row |= {"format": "e2m1", "scale": None, "headroom_bits": 0.0}
        row |= {"sqnr_db": 19.0 + row["amax"] % 0.1, "underflow": 0.2 + row["amax"] % 0.01}


def rounding_beyond_the_largest(row: dict[str, Any]) -> None:
    """Scales of NVFP4's blocks are rounded to nearest: about half the blocks reach beyond E2M1's
    largest value, and round back to it."""
    if "headroom_bits" in row:
        row |= {"format": "e2m1", "scale": None, "headroom_bits": -0.08}


@pytest.mark.parametrize(
    "change", [all_layers, one_kind_of_layer, last_block_in_fp4, rounding_beyond_the_largest]
)
def test_what_layers_do_together_or_are_by_nature_does_not_stand_out(analyzed, change):
    result = analyzed(400, 6, change=change)
    assert result.outliers == []
    assert not any("clipped" in finding.text for finding in result.findings)


@pytest.mark.parametrize("is_phase", [False, True])
def test_another_recipe_of_a_later_phase_does_not_stand_out(analyzed, is_phase):
    def change(row):
        """Switch to FP4 at step 200, which costs one layer most."""
        if row["step"] >= 200 and "amax" in row:
            row |= {"format": "e2m1", "underflow": 0.1 + 0.2 * row["layer"].endswith("2.mlp.up")}
            row["sqnr_db"] -= 12

    phase = {"step": 190, "event": "phase", "phase": "late", "why": "nvfp4 was asked for"}
    result = analyzed(400, 6, metrics=[*metric_rows(400), *[phase] * is_phase], change=change)
    assert any("from step 200 on" in text for text in texts(result, "warning")) is not is_phase


# Events


def test_equal_events_in_a_row_are_one_line_and_unknown_ones_stay():
    lines = folded(EVENTS)
    assert [(line["steps"], line["event"]) for line in lines] == [
        ("42 to 44", "skip (3 times)"), ("44", "rollback"), ("44", "demote"), ("120", "restore"),
        ("130", "phase"), ("131", "skip"),
    ]  # fmt: skip
    assert [line["more"] for line in lines[1:5:3]] == ["to_step 30", "to cooldown"]
    assert lines[2]["where"] == "blocks.1.mlp.up grad_output"


ROWS = metric_rows(200)
STOP = {"step": 71, "event": "stop", "why": "The loss is nan. Lower --lr.", "loss": None}


def overflowing(steps: int) -> list[dict[str, Any]]:
    return [row | {"skipped": row["step"] <= steps} for row in ROWS]


@pytest.mark.parametrize(
    ("metrics", "state", "level", "sentences"),
    [
        ([*ROWS[:44], *EVENTS[:5], *ROWS[30:], *EVENTS[5:]], "done", "alarm", [
            "Step 44: the run went back to step 30, because three bad steps in a row.",
            "blocks.1.mlp.up (grad_output) was taken out of FP8 to bf16 until step 120"]),
        ([*EVENTS, *ROWS], "done", "warning", ["4 steps were skipped (steps 42, 43, 44 and 131)"]),
        ([*ROWS[:70], STOP], "failed", "alarm",
         ["The run stopped at step 71: The loss is nan. Lower --lr."]),
        ([*ROWS[:70], STOP, *ROWS[70:]], "done", "alarm", []),
        (ROWS[:70], "unfinished", "warning", []),
        (overflowing(3), "done", "note", ["3 steps were skipped because the gradient overflowed"]),
        (overflowing(30), "done", "warning", ["30 steps were skipped because the gradient"]),
        ([*ROWS, {"step": 200, "event": "clear_amax"}], "done", "warning", ["1 amax history was"]),
    ],
)  # fmt: skip
def test_what_happened_is_said_with_its_weight(analyzed, metrics, state, level, sentences):
    result = analyzed(metrics=metrics, every=0)
    assert headline(result.run)["state"].split(",")[0] == state
    assert len(texts(result, level)) == len(sentences)
    for text, sentence in zip(texts(result, level), sentences, strict=True):
        assert sentence in text


def test_a_branch_has_its_own_events_and_speed(analyzed):
    after = [row | {"tokens_per_s": 20_000.0} for row in ROWS[150:]]
    branch = {"step": 150, "event": "branch", "why": "begun with runs/a/checkpoints/step-000150"}
    result = analyzed(metrics=[*ROWS[:44], *EVENTS[:5], *ROWS[30:150], branch, *after])
    assert "skipped" not in " ".join(texts(result))
    assert len(result.run.metrics.rows) == 200
    assert headline(result.run)["tokens/s"] == "20,000 (median)"
    picture = throughput([result.run], ["r"], "tokens")
    assert picture is not None
    assert "median 20,000 tokens/s" in picture.caption


# The run itself


def test_when_a_run_was_trained_how_often_and_with_what_is_told(tmp_path):
    path = make_run(tmp_path / "r")
    assert headline(read_run(path))["began"] == "unknown"
    versions = {"fp8stack": "0.1.0", "torch": "2.13.0"}
    begin = {"event": "begin", "time": "2026-03-01T08:30:00+00:00", "step": 0, "versions": versions}
    end = {"event": "end", "step": 90, "seconds": 3600.4, "how": "stopped by a signal, and saved"}
    for rows, took in (
        ([begin], "not known yet"),
        ([begin, end | {"seconds": 1e300}], "not known yet"),
        ([begin, end, begin | {"step": 90}], "at least 1:00:00, in 2 sessions"),
    ):
        write_lines(path / "sessions.jsonl", rows)
        run = read_run(path)
        assert headline(run)["took"] == took
    assert headline(run)["began"] == "2026-03-01 08:30 UTC"
    assert run.written is not None
    assert run.written.tzinfo is UTC
    assert headline(run)["with"] == "fp8stack 0.1.0, torch 2.13.0"
    assert [session.ended for session in run.sessions] == [
        "stopped by a signal, and saved", "killed, or still running",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"recipe": "fp32", "every": 0}, "no layer of this run is in FP8 (fp32)"),
        ({"every": 0}, "it was switched off"),
        ({"telemetry": []}, "telemetry.jsonl holds no sample"),
    ],
)
def test_why_a_run_has_no_telemetry_is_said(tmp_path, more, reason):
    run = make_run(tmp_path / "r", **more)
    assert reason in summary.without_telemetry(read_run(run))
    (run / "telemetry.jsonl").unlink(missing_ok=True)
    sentence = reason if more.get("every") == 0 else "there is no telemetry.jsonl"
    assert sentence in summary.without_telemetry(read_run(run))


def test_the_loss_gap_to_expect_is_of_a_model_from_a_file_and_of_one_that_trains_on(tmp_path):
    run = make_run(tmp_path / "r", recipe="nvfp4", config="batch = 8\ncontext = 64\n")
    text = (run / "run.toml").read_text().replace('"gpt-nano"', '"presets/mine.toml"')
    (run / "presets").mkdir()
    preset = "vocabulary = 256\ncontext = 64\nlayers = 2\nwidth = 64\nheads = 2\n"
    (run / "presets" / "mine.toml").write_text(preset)
    sentences = []
    for more in ("", 'init_from = "/elsewhere"\n'):
        (run / "run.toml").write_text(text + more)
        sentences.append(read_run(run).loss_gap)
    parameters = load_config(str(run / "presets" / "mine.toml")).active_parameters()
    ratio = 200 * 8 * 64 / parameters
    assert f"at {ratio:.3g} tokens per parameter; rests on" in sentences[0]
    assert "at 20 tokens per parameter" in sentences[1]


def test_what_if_gives_medians_and_the_distance_to_the_runs_own_recipe(analyzed):
    exact = {("delayed", "input"): 30.0, ("mxfp8", "input"): 34.1, ("current", "input"): 28.5}

    def change(row):
        if "operand" in row:
            row["sqnr_db"] = exact.get((row["recipe"], row["operand"]), 25.0)

    comparison = what_if(analyzed(change=change, what_if=("current", "mxfp8")))
    assert comparison is not None
    rows = {name: (cells[0], is_own) for name, cells, is_own in comparison.rows}
    assert comparison.kinds[0] == "input"
    assert rows["delayed"] == ((30.0, None), True)
    assert rows["mxfp8"] == ((34.1, pytest.approx(4.1)), False)
    assert rows["current"] == ((28.5, pytest.approx(-1.5)), False)
    assert comparison.sentence.startswith(
        "mxfp8 would have cost 4.1 dB less on input; current would have cost 1.5 dB more on input."
    )
    assert what_if(analyzed()) is None


def test_idle_experts_are_a_finding_and_shares_that_are_no_numbers_are_unknown(analyzed):
    def run(*samples: tuple[int, list[Any]]) -> Analysis:
        rows = [
            {"step": step, "experts": f"blocks.{i}.mlp", "shares": shares}
            for step, shares in samples
            for i in range(2)
        ]
        return analyzed(50, telemetry=operand_rows(2, [50]) + rows)

    result = run((1, [0.25] * 4), (50, [0.75, 0.25, 0, 0]))
    layers, loads = result.run.telemetry.expert_loads()
    assert layers == ["blocks.0.mlp", "blocks.1.mlp"]
    assert loads.tolist() == [[3, 1, 0, 0]] * 2
    (finding,) = texts(result, "warning")
    assert finding.startswith("4 experts of 8 got no token at step 50, 2 of them in blocks.0.mlp.")
    result = run((1, [0.5, "x"]))
    assert np.isnan(result.run.telemetry.expert_loads()[1][:, 1]).all()
    assert texts(result) == []
