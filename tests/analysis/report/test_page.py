"""The page of `fp8stack report` and the text of `fp8stack show`."""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8stack.analysis.report import page
from fp8stack.analysis.report.analysis import analyze
from fp8stack.analysis.report.run_record import read_run
from fp8stack.analysis.report.telemetry import joined
from fp8stack.training.metrics.loss_plot import view_range
from tests.support.run_folders import (
    EVENTS,
    make_run,
    metric_rows,
    operand_rows,
    outlier,
    write_lines,
)


def html_of(*runs: Path) -> str:
    return page.render([analyze(read_run(run)) for run in runs], "report_files")[0]


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
        self.handle_startendtag(tag, attrs)
        self.open += [tag] if tag not in self.VOID else []

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


SECTIONS = ("attention", "training", "fp8", "plan", "events", "configuration")


@pytest.mark.full
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
    references = re.findall(r"url\((.)([^)]*)", html)
    assert all(mark == "#" and name in ids for mark, name in references)
    assert not re.search(r"https?://|@import|<script", html)
    tags = [tag for tag, _ in parsed.tags]
    assert {"script", "iframe", "object"} & set(tags) == set()
    assert tags.count("h1") == 1
    images = [v.get("aria-label", "") for _, v in parsed.tags if v.get("role") == "img"]
    assert len(images) == 2 + 2 * 7
    assert all(len(alt) > 30 for alt in images)
    assert "blocks.1.mlp.up, input stands out from step 100 on." in parsed.text


ODD: list[Any] = [None, "2.5", True, [], {}, 10**400, 1e308, -1e308]
FILES: dict[str, list[dict[str, Any]]] = {
    "no steps": [],
    "few steps": [{"step": at, "loss": 2.5, "lr": 0.1, "grad_norm": 0.0} for at in (1, 2)],
    "odd values": [
        {"step": at, "loss": odd, "val_loss": odd, "lr": odd, "grad_norm": odd}
        for at, odd in enumerate(ODD, start=1)
    ],
    "lost losses": [row | {"loss": None} if row["step"] > 58 else row for row in metric_rows(60)],
}
TELEMETRY: list[dict[str, Any]] = [
    {"step": 1, "layer": 5, "operand": "input", "amax": "much", "sqnr_db": None},
    {"step": 1, "layer": "a", "operand": "new", "format": "e9m9", "amax": 1e308, "scale": 0},
    {"step": 1, "operand": None}, {"step": 2, "not_fp8": 7}, {"plan": 3},
    {"step": 2, "gradient": "a", "norm": "x"},
    {"step": 2, "experts": "b", "shares": [0.5, 0.5, "x"]},
]  # fmt: skip
SESSIONS = [{"event": "begin", "step": 0}, {"event": "end", "step": 9, "how": "out of memory"}]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("name", "sentences"),
    [
        ("no steps", ["No step is logged yet.", "no step yet"]),
        ("few steps", ["run.toml is missing.", "plan.json is missing.", "No gradient norm."]),
        ("odd values", ["8 of 200", "not evaluated", "Tokens of each expert at step 2"]),
        ("lost losses", ["The loss is not finite at steps 59 and 60.", "out of memory"]),
    ],
)
def test_every_run_has_a_page(tmp_path, name, sentences):
    telemetry = TELEMETRY if name == "odd values" else []
    run = make_run(tmp_path / "r", metrics=FILES[name], telemetry=telemetry)
    write_lines(run / "sessions.jsonl", SESSIONS)
    if name == "few steps":
        for file in ("plan.json", "run.toml"):
            (run / file).unlink()
    parsed = Page(html_of(run))
    assert [sentence for sentence in sentences if sentence not in parsed.text] == []
    links = {values.get("href") for tag, values in parsed.tags if tag == "a"}
    assert {f"#{values['id']}" for tag, values in parsed.tags if tag == "section"} <= links


@pytest.mark.slow
def test_a_long_run_makes_no_large_page(tmp_path):
    rows = operand_rows(50, [1, *range(50, 1001, 50)], "current")
    run = make_run(tmp_path / "r", 30_000, 50, "current", telemetry=rows)
    assert len(html_of(run)) < 3_000_000


def test_spikes_and_runs_that_diverged_do_not_set_the_axis():
    low, high = view_range([3.0, 2.0], [4.0, 3.9, 1.5, 40.0, 0.1])
    assert 1.0 < low < 1.5 < 4.0 < high < 5.0
    assert 5.0 < view_range([5.0, 2.0, 6.0, 1e9], [])[1] < 7.0


def test_samples_that_are_joined_show_the_worst():
    values = np.full((2, 100), 30.0)
    values[1, 57] = 4.0
    values[0, 3] = np.nan
    steps, few = joined(np.arange(100), values, worst_is_high=False, most=10)
    assert steps.tolist() == list(range(0, 100, 10))
    assert few[1].tolist() == [30.0] * 5 + [4.0] + [30.0] * 4
    assert few[0].tolist() == [30.0] * 10


# The commands


@pytest.mark.full
def test_the_command_writes_the_page_and_its_plots(tmp_path, command, capsys):
    """The same run gives the same page, and no plot has formulas for numbers."""
    rows: list[dict[str, Any]] = [
        {"gradient": f"blocks.{at}.a", "step": step, "norm": 10.0**-at, "ratio": 1.0, "zeros": 0.0}
        for step in (10, 20)
        for at in range(2)
    ]
    rows += [{"step": 20, "experts": "blocks.0.mlp", "shares": [0.75, 0.25, 0]}]
    telemetry = [*operand_rows(1, [10, 20]), *rows]
    run = make_run(tmp_path / "runs" / "a", steps=20, blocks=1, telemetry=telemetry)
    assert command("report", "runs/a") == 0
    assert "report: runs/a/report.html" in capsys.readouterr().out
    html = (run / "report.html").read_text()
    assert html_of(Path("runs/a")) == html
    assert "mathdefault" not in html
    names = ["amax", "experts", "gradient", "loss", "rates", "saturated", "sqnr_db", "throughput"]
    plots = sorted((run / "report_files").iterdir())
    assert [path.name for path in plots] == [f"run1-{name}.png" for name in [*names, "underflow"]]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in plots)


@pytest.mark.usefixtures("undrawn")
def test_several_runs_share_a_page_beside_them_which_is_written_over(tmp_path, command):
    for name in "ab":
        make_run(tmp_path / "runs" / name, every=0)
    plots = tmp_path / "runs" / "report_files"
    plots.mkdir()
    for old in ("mine.png", "run7-loss.png"):
        (plots / old).write_text("old")
    for _ in range(2):  # over its own, not over others'
        assert command("report", "runs/a", "runs/b") == 0
    names = {path.name for path in plots.iterdir()}
    assert {"runs-loss.png", "run1-loss.png", "mine.png"} <= names
    assert "run7-loss.png" not in names
    assert command("report", "runs/a", "--out", "new/one.html") == 0
    assert (tmp_path / "new" / "one_files" / "run1-loss.png").exists()


WRONG = {
    "no run": (["empty"], "No run in 'empty'"),
    "a file": (["file"], "No run in 'file'"),
    "a folder as page": (["runs/a", "--out", "empty"], "--out empty is a folder"),
    "below a file": (["runs/a", "--out", "file/x.html"], "file is a file"),
    "a pipe": (["runs/a", "--out", "pipe"], "pipe exists and is no report of fp8stack"),
    "its metrics": (["runs/a", "--out", "runs/a/metrics.jsonl"], "is no report of fp8stack"),
    "a link": (["runs/a", "--out", "link.html"], "link_files is a symbolic link"),
    "plots' place": (["runs/a", "--out", "taken.html"], "taken_files is a file"),
    "apart": (["runs/a", "far/b"], "different folders. Say by --out"),
}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_line_and_writes_nothing(name, tmp_path, refused):
    arguments, expected = WRONG[name]
    make_run(tmp_path / "runs" / "a", every=0)
    make_run(tmp_path / "far" / "b", every=0)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link_files").symlink_to("empty")
    for file in ("file", "taken_files"):
        (tmp_path / file).write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    assert expected in refused("report", *arguments)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.usefixtures("undrawn")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev here")
def test_a_place_that_cannot_be_written_is_exit_code_4(tmp_path, command, capsys):
    make_run(tmp_path / "a", every=0)
    assert command("report", "a", "--out", "/proc/none/report.html") == 4
    assert "Cannot write to /proc/none" in capsys.readouterr().err


# Text


def test_show_prints_the_essentials_without_empty_columns_and_writes_nothing(
    tmp_path, command, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "200")
    rows = metric_rows(200)
    metrics = [*rows[:44], *EVENTS[:5], *rows[30:], *EVENTS[5:]]
    change = outlier("blocks.1.mlp.up", "input", 100)
    run = make_run(tmp_path / "a", metrics=metrics, change=change, what_if=["mxfp8"])
    before = sorted(tmp_path.rglob("*"))
    assert command("show", "a") == 0
    lines = capsys.readouterr().out.splitlines()
    text = " ".join(" ".join(lines).split())
    assert "blocks.1.mlp.up, input stands out from step 100 on" in text
    assert "mxfp8 would have cost" in text
    assert "SQNR in dB: █ below 13" in text
    assert "plan: this is a CPU: emulated" in text
    heads = [line.split() for line in lines if line.startswith("steps ")]
    assert heads[-1] == ["steps", "event", "where", "why", "more"]
    write_lines(run / "metrics.jsonl", [*rows, EVENTS[-1]])
    assert command("show", "a") == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [line.split() for line in lines if line.startswith("steps ")]
    assert heads[-1] == ["steps", "event", "why"]
    assert sorted(tmp_path.rglob("*")) == before
