"""The rows of `metrics.jsonl` that count."""

from __future__ import annotations

import os
from random import Random
from typing import Any

import pytest

from fp8stack.common.io import LONGEST_LINE
from fp8stack.training.metrics.read import Metrics, read_metrics
from tests.conftest import refusal
from tests.support.run_folders import write_lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


def read(folder, rows: list[dict[str, Any]]) -> Metrics:
    write_lines(folder / "metrics.jsonl", rows)
    return read_metrics(folder)


@pytest.mark.parametrize("seed", range(12))
def test_the_rows_of_the_steps_that_a_run_left_do_not_count(folder, seed):
    """The state of a run is the numbers of the steps that it went through."""
    random = Random(seed)
    step, number, state = 0, 0, dict[int, float]()
    lines: list[dict[str, Any]] = []
    for _ in range(random.randint(1, 6)):
        begin = random.randint(0, step)
        if random.random() < 0.5:  # else it was resumed
            lines.append({"step": step, "event": "rollback", "why": "", "to_step": begin})
        state = {step: state[step] for step in range(1, begin + 1)}
        for step in range(begin + 1, begin + random.randint(2, 6)):
            number += 1
            state[step] = number
            lines.append({"step": step, "loss": number})
    metrics = read(folder, lines)
    assert metrics.column("loss") == (list(state), list(state.values()))
    assert metrics.events == [line for line in lines if "event" in line]


def test_events_are_no_rows_but_overflows_and_losses_that_are_not_finite_are_both(folder):
    rows: list[dict[str, Any]] = [
        {"step": 1, "loss": 2.0, "skipped": True},
        {"step": 2, "event": "skip", "loss": 9.0, "why": "a spike"},
        {"step": 2, "loss": 9.0, "skipped": False},
        {"step": 3, "loss": 1.0, "val_loss": None, "event": "non-finite", "why": "it is nan"},
    ]
    metrics = read(folder, rows)
    assert metrics.rows == [rows[0], rows[2], rows[3]]
    assert [(event["step"], event["event"]) for event in metrics.events] == [
        (1, "skip"), (2, "skip"), (3, "non-finite"),
    ]  # fmt: skip
    assert [event.get("fp16", False) for event in metrics.events] == [True, False, False]


def test_a_branch_has_the_rows_of_its_origin_and_its_own_events(folder):
    rows: list[dict[str, Any]] = [
        {"step": 4, "event": "skip", "why": "a spike"}, {"step": 5, "loss": 2.0},
        {"step": 5, "event": "branch", "why": "begun with x"}, {"step": 6, "loss": 1.0},
    ]  # fmt: skip
    metrics = read(folder, rows)
    assert (metrics.rows, metrics.events, metrics.began) == ([rows[1], rows[3]], rows[2:3], 5)


def test_a_column_has_the_finite_numbers(folder):
    odd: list[Any] = [None, "2.5", True, [], {}, 10**400, 1e308, -1e308, float("nan"), 2, 0.5]
    rows = [{"step": step, "loss": value} for step, value in enumerate(odd)]
    rows += [{"step": step, "loss": 1.0} for step in ("seven", -1, 1.5, True, 2**60)]
    assert read(folder, [*rows, {"loss": 1.0}]).column("loss") == ([9, 10], [2.0, 0.5])


@pytest.mark.parametrize(
    ("end", "is_damaged"),
    [
        ('{"step": 201, "lo', False),  # it is being written
        ("\0\0\0\n", True),
        ("[1]\n", True),
        ("[" * 9999 + "\n", True),
        ('{"step": ' + "9" * 5000 + "}\n", True),
        ('{"why": "' + "x" * LONGEST_LINE, True),
    ],
    ids=range(6),
)
def test_rows_end_at_a_damaged_line(tmp_path, end, is_damaged):
    rows = [{"step": 1, "loss": 1.0}]
    write_lines(tmp_path / "metrics.jsonl", rows)
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write(end)
        if is_damaged:
            stream.write('\n{"step": 2, "loss": 1.0}\n')
    notes: list[str] = []
    assert read_metrics(tmp_path, notes).rows == rows
    expected = ["metrics.jsonl is damaged: line 2 and on are left out."]
    assert notes == (expected if is_damaged else [])


def test_a_file_that_is_missing_has_no_rows_and_a_pipe_is_not_read(tmp_path):
    assert read_metrics(tmp_path) == Metrics()
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert "metrics.jsonl is no regular file" in refusal(read_metrics, tmp_path)
