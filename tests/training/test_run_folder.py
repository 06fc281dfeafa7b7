"""A run that another process trains, which its lock shows: nobody calls it cut, and nobody else
trains in its folder."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8stack.planning.run_config import parse_config
from fp8stack.training.run_folder import RunFolder, new_folder
from tests.common.test_io import held_by_another_process
from tests.conftest import contents, refusal
from tests.support.run_folders import make_run, write_lines

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such locks")

IN_USE = "Another process trains in runs/gpt-nano-fp32. Wait for it or give another --out."


@pytest.fixture
def unfinished(tmp_path, monkeypatch) -> Path:
    """A run whose first 20 of 200 steps are done, in `runs` of the working folder."""
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs" / "gpt-nano-fp32", steps=200, recipe="fp32", every=0)
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[:20]
    (run / "metrics.jsonl").write_text("".join(rows))
    begin = {"event": "begin", "step": 0, "time": "2026-01-01T10:00:00+00:00", "versions": {}}
    write_lines(run / "sessions.jsonl", [begin, begin])
    (run / "checkpoints" / "step-000016").mkdir(parents=True)
    (run / ".lock").touch()
    return run


@pytest.fixture
def live(unfinished) -> Iterator[Path]:
    """The same while another process trains it."""
    with held_by_another_process(unfinished / ".lock"):
        yield unfinished


def test_a_run_is_running_as_long_as_another_process_holds_its_lock(unfinished):
    folder = RunFolder(unfinished)
    assert not folder.is_running
    assert folder.cut_at == (16, 200)
    with held_by_another_process(unfinished / ".lock") as process:
        assert folder.is_running
        assert folder.cut_at is None
        process.kill()
        process.wait()
        assert not folder.is_running


@pytest.mark.parametrize(
    ("held", "state", "ending"),
    [(True, "running", "still running"), (False, "unfinished", "killed")],
)
def test_list_show_and_report_say_that_a_run_is_running(
    held, state, ending, unfinished, command, capsys, undrawn
):
    os.chdir(unfinished.parents[1])
    with held_by_another_process(unfinished / ".lock") if held else os.scandir():
        assert command("list", "runs", "--json") == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert row["state"].split(",")[0] == state
        assert command("show", str(unfinished)) == 0
        printed = capsys.readouterr().out
        assert state in printed
        assert ("pretrain --resume" in printed) is not held
        assert command("report", str(unfinished)) == 0
        page = (unfinished / "report.html").read_text()
        assert f'badge {state}"' in page
        assert ("killed" in page, "still running" in page) == (True, held)
        assert ending in page


@pytest.mark.parametrize(
    "flags",
    [
        ["--out", "runs/gpt-nano-fp32", "--resume", "auto"],
        ["--resume", "runs/gpt-nano-fp32/checkpoints/step-000016"],
        ["--out", "runs/gpt-nano-fp32", "--overwrite"],
    ],
)
def test_a_run_that_another_process_trains_is_left_alone(flags, live, refused):
    os.chdir(live.parents[1])
    before = contents(live)
    recipe = [] if "--resume" in flags else ["--recipe", "fp32"]
    refused("pretrain", *flags, *recipe, message=IN_USE)
    assert contents(live) == before


def test_a_new_run_takes_another_folder_than_one_that_another_process_has_claimed(live):
    config = parse_config(None, {"recipe": "fp32"})
    os.chdir(live.parents[1])
    assert new_folder(config).path.name == "gpt-nano-fp32-2"
    for path in live.iterdir():
        if path.name != ".lock":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert new_folder(config).path.name == "gpt-nano-fp32-2"
    assert refusal(RunFolder(live).require_free).startswith("Another process trains in")


def test_a_process_that_was_forked_does_not_keep_the_lock(tmp_path):
    folder = RunFolder(tmp_path / "r")
    folder.claim()
    (reader, writer), (heard, begun) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(begun, b"x")
        os.read(reader, 1)
        os._exit(0)
    try:
        os.read(heard, 1)
        assert folder.is_running
        folder.release()
        assert not folder.is_running
    finally:
        os.write(writer, b"x")
        os.waitpid(child, 0)
        for end in (reader, writer, heard, begun):
            os.close(end)
