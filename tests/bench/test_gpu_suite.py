"""`python -m bench gpu` as far as a CPU can run it: the same functions, on small sizes."""

from __future__ import annotations

import csv
import itertools
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import runner
from bench.cells import json_lines
from bench.gpu import micro, steps, visit, wheels

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("one_thread")


# The command


def exit_code(call: Any) -> object:
    with pytest.raises(SystemExit) as exit:
        call()
    return exit.value.code


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu", "python -m bench gpu needs a CUDA GPU, and torch finds none here.\n"),
        ("golden", "python -m bench golden needs a CUDA GPU and Transformer Engine: "),
    ],
)
def test_without_a_gpu_it_says_so_in_one_line_and_exits_with_2(name, message, tmp_path, capsys):
    assert exit_code(lambda: runner.run(name, ["--out", str(tmp_path)])) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith(message)
    assert (printed.out.count("\n"), printed.err) == (1, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_tests_for_gpus_need_nothing_that_a_bare_machine_lacks():
    lacks = "torchao,transformer_engine,tiktoken,gfloat,datasets,pyarrow,zstandard,transformers"
    lacks += ",compressed_tensors,tensorboard,wandb,trackio"
    environment = os.environ | {"PRETEND_WITHOUT": lacks, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--collect-only"]
    command += ["-p", "tests.support.pretend_gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    collected = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(collected) > 150
    assert all(line.startswith("tests/gpu/") for line in collected)


# A rehearsal, looked at as if it came from a GPU


@pytest.mark.slow
def test_a_rehearsal_leaves_all_that_explains_a_step(tmp_path, capsys):
    out, archives = tmp_path / "out", tmp_path / "archives"
    words = ["--dry-run", "--part", "1", "--out", str(out), "--archives", str(archives)]
    assert runner.run("gpu", words) == 0
    printed = capsys.readouterr().out
    assert len(printed) < 12_000
    assert printed.rstrip().splitlines()[-1].startswith("  ")  # the last task's headline
    operations = [row for row in json_lines(out / "micro.jsonl") if "group" in row]
    assert {row["group"] for row in operations} == micro.GROUPS.keys()
    assert not [row for row in operations if "failed" in row]
    names: set[str] = set()
    for path in archives.iterdir():
        assert path.stat().st_size < 15 * 2**20
        names |= set(zipfile.ZipFile(path).namelist())
    in_out = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert names == in_out
    assert {"kernels/gpt2-1.5b-4x64-delayed/kernels.csv", "summary.txt", "visit.jsonl"} <= names
    capsys.readouterr()
    assert runner.run("gpu", words) == 0  # nothing is left to do
    assert "started" not in capsys.readouterr().out


def run_steps(monkeypatch: Any, out: Path, *options: str) -> list[dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["steps", "--out", str(out), "--dry-run", *options])
    assert steps.main() == 0
    return json_lines(out)


@pytest.mark.full
def test_bf16_and_a_recipe_take_turns_and_leave_every_operator(tmp_path, monkeypatch, capsys):
    options = ["--layers", "2", "--batch", "16", "--profile"]
    rows = run_steps(monkeypatch, tmp_path / "steps.jsonl", *options)
    recipes = ["bf16", "delayed"]
    assert [row["recipe"] for row in rows] == recipes * 2
    for row in rows[:2]:
        assert (row["in_turn"], row["batch"], row["layers"]) == (True, 16, 2)
        assert 0 < row["host_ms"] <= row["median_ms"] * 1.5
        assert row["facts"]["versions"]["torch"] == torch.__version__
    for row, recipe in zip(rows[2:], recipes, strict=True):
        folder = tmp_path / "kernels" / f"gpt2-1.5b-2-layers-16x64-{recipe}"
        with (folder / "kernels.csv").open(newline="") as file:
            operators = list(csv.DictReader(file))
        assert sum(int(o["count"]) for o in operators) == row["launches"]
        total_ms = sum(float(o["us"]) for o in operators) / 1000
        assert total_ms == pytest.approx(row["kernels_ms"], rel=1e-3)
        assert sum(row["kinds_ms"].values()) == pytest.approx(total_ms, abs=0.1)
        assert any(o["op"] == "Optimizer.step#AdamW.step" for o in operators)
        assert (folder / "trace.json.gz").stat().st_size > 1000
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("> bf16: step ")
    assert " x bf16, host " in lines[2]


# Kernels of a GPU: a profile's events, as torch 2.11 to 2.13 have them


# The visit


def records(folder: Path) -> list[dict[str, Any]]:
    return json_lines(folder / visit.RECORDS)


def python(code: str, seconds: float = 60.0) -> visit.Task:
    return visit.Task(1, code, f"timeit -n 1 -r 1 '{code}'", seconds)


FOUR = (python("print(1)"), python("1 / 0"), python("while True: pass", 1), python("print(2)"))


@pytest.mark.full
def test_a_task_that_fails_or_hangs_does_not_take_the_others_with_it(tmp_path, capsys):
    archives = tmp_path / "archives"
    assert not visit.Visit(tmp_path, 99.0, dry=False, archives=archives).run(FOUR)
    ended = {record["task"]: record["ended"] for record in records(tmp_path)}
    assert ended == {
        "print(1)": "done",
        "1 / 0": "failed with exit code 1",
        "while True: pass": "stopped after 1 s",
        "print(2)": "done",
    }
    printed = capsys.readouterr().out
    assert "  ZeroDivisionError: division by zero" in printed
    assert printed.splitlines()[-2:] == [
        "Failed: 1 / 0.",
        "The time is up; left out: while True: pass. The same command continues there.",
    ]
    assert (tmp_path / "logs" / "1-print-1-.txt").read_text().startswith("1\n")
    packed = zipfile.ZipFile(archives / "1.zip")
    assert packed.read("logs/1-print-2-.txt").startswith(b"2\n")
    assert b"print(2): done" in packed.read("summary.txt")


@pytest.mark.full
def test_a_visit_continues_after_the_tasks_that_are_recorded(tmp_path, capsys):
    hangs = python('print("here"); import time; time.sleep(99)', 5)
    assert not visit.Visit(tmp_path, 99.0, dry=False).run([hangs, python("1 / 0")])
    log = hangs.log(tmp_path).read_text()
    assert log.startswith("here\n")
    assert "most recent call first" in log  # where it was
    with (tmp_path / visit.RECORDS).open("a") as file:
        file.write('{"task": "a line that was cut o')
    capsys.readouterr()
    again = visit.Visit(tmp_path, 99.0, dry=False)
    assert not again.run([hangs, python("1 / 0"), python("print(1)")])
    printed = capsys.readouterr().out.splitlines()
    started = [line.partition(":")[0] for line in printed if line.endswith("started")]
    assert started == ["print(1)", hangs.name.partition(":")[0]]  # what was never tried comes first
    # A dry run says nothing about the GPU.
    assert visit.Visit(tmp_path, 9.0, dry=True).recorded() == {}


KILLED = """
from pathlib import Path
from bench.gpu import visit
codes = ("print(1)", "import os, signal; os.kill(os.getppid(), signal.{name})", "print(2)")
tasks = [visit.Task(1, code, f"timeit -n 1 -r 1 '{{code}}'", 60.0) for code in codes]
visit.Visit(Path(), 99.0, dry=False).run(tasks)
"""


@pytest.mark.parametrize(("name", "code"), [("SIGKILL", -9), ("SIGTERM", 143)])
@pytest.mark.full
def test_what_was_found_is_kept_where_a_visit_is_killed(tmp_path, name, code):
    options = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    script = KILLED.format(name=name)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, **options)
    assert done.returncode == code
    assert records(tmp_path)[0]["ended"] == "done"
    assert "print(2)" not in {record["task"] for record in records(tmp_path)}


@pytest.mark.full
def test_a_machine_without_a_package_is_told_so_in_one_line(tmp_path):
    (tmp_path / "pydantic.py").write_text("raise ModuleNotFoundError(name='pydantic')\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "bench", "gpu", "--minutes", "9"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "python -m bench needs pydantic. For all that is missing: python bench/gpu/wheels.py "
        "missing.\n"
    )


# Wheels for a machine that lacks packages


def test_wheels_are_downloaded_for_the_python_there_in_the_tested_versions(tmp_path):
    command = wheels.download(tmp_path, wheels.USUALLY_MISSING, "3.12")
    assert command[1:4] == ["-m", "pip", "download"]
    options = dict(itertools.pairwise(command))
    assert options["--python-version"] == "3.12"
    assert (options["-c"], options["-d"]) == (str(ROOT / "constraints.txt"), str(tmp_path))
    assert command[-3:] == ["pydantic", "rich", "torchao"]


def test_what_is_missing_is_told_where_nothing_can_be_imported():
    script = ROOT / "bench" / "gpu" / "wheels.py"
    command = [sys.executable, "-I", "-S", str(script), "missing"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert {"torch", "pydantic", "typer"} <= set(done.stdout.split())
