"""Reports on runs that somebody else made: nothing in them becomes markup, and all ends soon."""

from __future__ import annotations

import html
import json
from typing import Any

import pytest

from fp8stack.analysis import report
from fp8stack.analysis.report.analysis import analyze
from fp8stack.analysis.report.page import render
from fp8stack.analysis.report.run_record import read_run
from tests.analysis.report.test_page import Page
from tests.faults.bounded import bounded
from tests.support.cases import case
from tests.support.run_folders import make_run, metric_rows, operand_rows, write_lines

pytestmark = pytest.mark.full

EVIL = [
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "' onmouseover=alert(1) x='",
    "</title></style></svg><script>alert(1)</script>",
    "{{ 7 * 7 }}{% include 'x' %}<!--",
    "javascript:alert(1)//]]>",
    "a\u202eb\u2066c\u200f\x1b[2J\x1b]0;x\x07\x9b31m\r\n\0\ufeff",
    "[link=http://x]y[/link]$\\frac{1}{0}$",
    "\ud800",
]
TAGS = {"script", "img", "iframe", "object", "embed", "base", "form", "input"}


def _poisoned(value: Any, evil: str, key: str = "") -> Any:
    """Every string in JSON data, and every name in a table of names, ends in something evil."""
    if isinstance(value, dict):
        table = {name: _poisoned(inner, evil, name) for name, inner in value.items()}
        return table | {evil: evil, "extra": {evil: [evil]}}
    if isinstance(value, list):
        return [_poisoned(inner, evil, key) for inner in value] + [evil]
    if isinstance(value, str) and key not in ("event", "operand"):
        return f"{value}{evil}"
    return value


@pytest.mark.parametrize(
    "evil",
    [
        # Tags and an attribute, and what a terminal obeys; all by themselves in the long form.
        case(EVIL[0] + EVIL[1], quick=True),
        case(EVIL[6], quick=False),
        *(case(evil, quick=False) for evil in EVIL),
    ],
    ids=range(len(EVIL) + 2),
)
def test_no_field_of_any_file_becomes_markup_or_reaches_the_terminal(evil, tmp_path, capsys):
    name = "".join(c for c in evil if c not in "/\0\ud800")
    run = make_run(tmp_path / f"r{name}", steps=40, blocks=1, every=20)
    events = [
        {"step": 40, "event": kind, "why": "x", "layer": "y", "operand": "z", "precision": "p",
         "until_step": evil, "to_step": evil}
        for kind in ("skip", "demote", "restore", "precision", "loss_scale", "stop", evil)
    ]  # fmt: skip
    rows = [_poisoned(row, evil) for row in [*metric_rows(40)[-5:], *events]]
    write_lines(run / "metrics.jsonl", [*metric_rows(40)[:-5], *rows])
    tried = [row | {"what_if": True, "recipe": evil} for row in operand_rows(1, [1, 20, 40])]
    samples = [_poisoned(row, evil) for row in [*operand_rows(1, [1, 20, 40]), *tried]]
    plan = _poisoned(json.loads((run / "plan.json").read_text()), evil)
    write_lines(run / "telemetry.jsonl", [{"event": "plan", "plan": plan}, *samples])
    (run / "plan.json").write_text(json.dumps(plan))
    keys = ("model", "recipe", "data", "init_from")
    config = "".join(f"{key} = {json.dumps('a' + evil)}\n" for key in keys)
    (run / "run.toml").write_text(config, encoding="utf-8", errors="replace")
    analysis = analyze(read_run(run))
    page, _ = render([analysis, analysis], f"files{name}")
    for tag, attributes in Page(page).tags:
        assert tag not in TAGS
        for key, value in attributes.items():
            assert not key.startswith("on"), (tag, key, value)
            assert not value.strip().lower().startswith("javascript:"), (tag, key, value)
    if evil.isprintable():
        assert html.unescape(page).count(evil) >= 10
    assert all(c.isprintable() or c in "\n\t" for c in page)
    report.show(run)
    assert all(c.isprintable() or c == "\n" for c in capsys.readouterr().out)


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory, one_thread) -> None:
    """Import here what the children need, and fork without threads."""
    report.show(make_run(tmp_path_factory.mktemp("warm") / "r", steps=10, every=5))


ABSURD = {
    "one line of 200 MB": lambda f: _many(f, '{"step": 1, "loss": [', "1," * 2**20, 100, "1]}\n"),
    "200 MB without an end": lambda f: _many(f, "", "x" * 2**20, 200, ""),
    "a string of 200 MB": lambda f: _many(f, '{"step": 1, "why": "', "y" * 2**20, 200, '"}\n'),
    "30000 rows": lambda f: f.writelines(
        json.dumps({"step": step, "loss": 1.0, "lr": 1.0}) + "\n" for step in range(201, 30_201)
    ),
    "30000 events": lambda f: f.writelines(
        json.dumps({"step": step, "event": "skip", "why": f"{step}"}) + "\n"
        for step in range(201, 30_201)
    ),
}


def _many(stream: Any, start: str, piece: str, count: int, end: str) -> None:
    stream.write(start)
    for _ in range(count):
        stream.write(piece)
    stream.write(end)


@pytest.mark.parametrize(
    ("content", "file"),
    [
        case(content, file, quick=file == "metrics.jsonl" or "MB" in content)
        for content in ABSURD
        for file in ("metrics.jsonl", "telemetry.jsonl")
    ],
)
def test_an_absurd_file_takes_bounded_memory_and_time(content, file, tmp_path):
    run = make_run(tmp_path / "r", steps=200, blocks=1, every=100)
    with (run / file).open("a") as stream:
        ABSURD[content](stream)
    ended = bounded(lambda: report.show(run), 3 * 2**28, 40)
    assert ended.code == 0, ended.stderr[-2000:]
    done = 30_200 if (content, file) == ("30000 rows", "metrics.jsonl") else 200
    assert f"{done} of 200" in ended.stdout
    assert (f"{file} is damaged: line " in ended.stdout) == ("MB" in content)
