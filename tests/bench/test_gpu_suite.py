"""`python -m bench gpu` as far as a CPU can run it: the same functions, on small sizes.

A stand-in replaces Transformer Engine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import runner
from bench.cells import json_lines
from bench.gpu import ceilings, first_step, gpu, gpu_report, losses, steps, visit, wheels
from bench.gpu.gpu_report import TIME_IS_UP
from fp8stack.analysis.conform import suite
from fp8stack.analysis.conform.checks import Check, Context, Facts, broken, run_check, same_bits
from fp8stack.precision import Hardware

ROOT = Path(__file__).parents[2]
CPU = Context(Hardware("cpu", name="a CPU"), compiler="eager")

pytestmark = pytest.mark.usefixtures("one_thread")


# The command


def exit_code(call: Callable[[], object]) -> object:
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


def test_steps_of_a_visit_are_measured_with_the_head_in_bf16_and_in_fp8(tmp_path, monkeypatch):
    for task in (task for task in visit.TASKS if task.part_number == 4):
        monkeypatch.setattr(sys, "argv", task.command(tmp_path, tmp_path, dry=True)[2:])
        assert steps.main() == 0
    rows = json_lines(tmp_path / "steps.jsonl")
    measured = [(row["recipe"], row["head"]) for row in rows]
    first = [(name, False) for name in ("bf16", "delayed", "current")]
    assert measured == [*first, ("delayed", True), ("current", True)]
    assert all(row["median_ms"] > 0 for row in rows)
    assert "lm_head" not in str(rows[3]["plan"])
    assert (tmp_path / "llama-8b-2-layers-delayed-head" / "profile.md").exists()
    assert steps.main() == 0  # all is measured
    assert json_lines(tmp_path / "steps.jsonl") == rows


def test_the_time_of_one_launch_does_not_count():
    now, first = [0.0], [1.0]

    def call() -> None:
        now[0] += 1e-4 + (first.pop() if first else 0.0)  # it compiles

    def wait() -> None:
        now[0] += 5e-5

    assert ceilings.calls_of_a_round(call, wait, lambda: now[0]) == 64
    assert ceilings.calls_of_a_round(lambda: None, lambda: None, lambda: 0.0) == ceilings.MOST_CALLS
    calls = []
    ceilings.repeated(lambda: calls.append(1), 3)
    assert len(calls) == 3


# The first visit


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / visit.RECORDS).read_text().splitlines()]


@pytest.mark.slow
def test_all_parts_run_through_on_a_cpu(tmp_path, capsys):
    assert runner.run("gpu", ["--dry-run", "--out", str(tmp_path)]) == 0
    ended = {record["task"]: record["ended"] for record in records(tmp_path)}
    assert ended == dict.fromkeys([task.name for task in visit.TASKS], "done")
    assert all(record["dry_run"] for record in records(tmp_path))
    first = [json.loads(line) for line in (tmp_path / "first-steps.jsonl").read_text().splitlines()]
    assert {row["recipe"] for row in first} == set(visit.RECIPES)
    assert all(row["compiled"] and row["problem"] == "" for row in first)
    # The same command again has nothing left to do.
    capsys.readouterr()
    assert runner.run("gpu", ["--dry-run", "--out", str(tmp_path)]) == 0
    assert "started" not in capsys.readouterr().out
    assert len(records(tmp_path)) == len(visit.TASKS)


def test_the_most_valuable_tasks_come_first_and_time_is_measured_alone():
    names = [task.name for task in visit.TASKS]
    assert len(set(names)) == len(names)
    assert len({task.log(Path()) for task in visit.TASKS}) == len(names)
    assert [task.part_number for task in visit.TASKS[:9]] == [1] * 9
    assert names[2:9] == [f"first step in {recipe}" for recipe in visit.RECIPES]
    assert names[9] == "ceilings"
    assert {task.part_number for task in visit.TASKS} == visit.PARTS.keys()
    timed = ("steps of", "ceilings", "losses")
    assert [task.name for task in visit.TASKS if task.alone] == [
        name for name in names if name.startswith(timed)
    ]
    for task in visit.TASKS:
        assert task.seconds <= 60 * visit.MINUTES < 570  # a command may take ten minutes


def python(code: str, seconds: float = 60.0, alone: bool = False) -> visit.Task:
    return visit.Task(1, code, f"timeit -n 1 -r 1 '{code}'", seconds, alone=alone)


@pytest.fixture
def four_tasks(monkeypatch) -> None:
    tasks = (python("print(1)"), python("1 / 0"), python("while True: pass", 1), python("print(2)"))
    monkeypatch.setattr(visit, "TASKS", tasks)


def test_a_task_that_fails_or_hangs_does_not_take_the_others_with_it(four_tasks, tmp_path, capsys):
    assert exit_code(lambda: visit.run(1, tmp_path, None, False)) == 1
    ended = {record["task"]: record["ended"] for record in records(tmp_path)}
    assert ended == {
        "print(1)": "done",
        "1 / 0": "failed with exit code 1",
        "while True: pass": "stopped after 1 s",
        "print(2)": "done",
    }
    printed = capsys.readouterr().out
    assert "ZeroDivisionError" in printed
    assert "The time is up; left out: while True: pass. The same command continues" in printed
    assert "Failed: 1 / 0." in printed
    for record in records(tmp_path):
        assert (tmp_path / "logs" / record["log"]).exists()
    assert (tmp_path / "logs" / "1-print-1-.txt").read_text().startswith("1\n")


def test_a_visit_continues_after_the_tasks_that_are_recorded(four_tasks, tmp_path, capsys):
    assert exit_code(lambda: visit.run(1, tmp_path, None, False)) == 1
    with (tmp_path / visit.RECORDS).open("a") as file:
        file.write('{"task": "a line that was cut o')
    capsys.readouterr()
    assert exit_code(lambda: visit.run(1, tmp_path, None, False)) == 1
    printed = capsys.readouterr().out
    assert "3 of 4 tasks are recorded" in printed
    assert [line for line in printed.splitlines() if line.endswith("started")] == [
        "while True: pass: started"
    ]
    # A dry run says nothing about the GPU.
    assert visit.Visit(tmp_path, 9.0, dry=True).recorded() == {}


def test_what_was_stopped_is_repeated_after_what_was_never_tried(monkeypatch, tmp_path, capsys):
    hangs, prints = python('print("here"); import time; time.sleep(99)', 5), python("print(1)")
    monkeypatch.setattr(visit, "TASKS", (hangs,))
    assert exit_code(lambda: visit.run(1, tmp_path, None, False)) == 1
    log = hangs.log(tmp_path).read_text()
    assert log.startswith("here\n")
    assert "most recent call first" in log  # where it was
    monkeypatch.setattr(visit, "TASKS", (hangs, prints))
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    capsys.readouterr()
    assert exit_code(lambda: visit.run(1, tmp_path, None, False)) == 1
    printed = capsys.readouterr().out.splitlines()
    started = [line.partition(":")[0] for line in printed if line.endswith("started")]
    assert started == ["print(1)", hangs.name.partition(":")[0]]


def test_an_archive_holds_all_that_a_visit_wrote_and_it_continues_from_there(
    four_tasks, tmp_path, capsys
):
    archive = tmp_path / "visit.tar.gz"
    assert exit_code(lambda: visit.run(1, tmp_path / "a", None, False, archive)) == 1
    capsys.readouterr()
    assert exit_code(lambda: visit.run(1, tmp_path / "b", None, False, archive)) == 1
    assert "3 of 4 tasks are recorded" in capsys.readouterr().out
    assert (tmp_path / "b" / "logs" / "1-print-2-.txt").read_text().startswith("2\n")


def test_no_task_starts_without_time_and_the_last_are_left_out(monkeypatch, tmp_path, capsys):
    tasks = [python("print(1)", alone=True), python("print(2)", alone=True)]
    monkeypatch.setattr(visit, "TASKS", tasks)
    monkeypatch.setattr(visit, "LEAST_S", 1e6)
    assert exit_code(lambda: visit.run(None, tmp_path, 1.0, False)) == 1
    assert "The time is up; left out: print(1), print(2)." in capsys.readouterr().out
    assert not (tmp_path / visit.RECORDS).exists()


TOUCH = 'open("{out}/first", "w")'
WAIT = 'import os, time; n = 1\nwhile not os.path.exists("{out}/first"): time.sleep(0.01)'


@pytest.mark.parametrize(("cores", "together"), [(16, True), (2, False)])
def test_tasks_that_do_not_measure_time_run_side_by_side(monkeypatch, tmp_path, cores, together):
    """The first task ends once the second has started."""
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    waits = visit.Task(1, "waits", f"timeit -n 1 -r 1 '{WAIT}'", 60.0 if together else 2.0)
    tasks = (waits, visit.Task(1, "touches", f"timeit -n 1 -r 1 '{TOUCH}'", 60.0))
    monkeypatch.setattr(visit, "TASKS", tasks)
    if together:
        visit.run(1, tmp_path, None, False)
    else:
        assert exit_code(lambda: visit.run(1, tmp_path, None, False)) == 1
    waited = {record["task"]: record["ended"] for record in records(tmp_path)}["waits"]
    assert waited == ("done" if together else "stopped after 2 s")


def test_a_folder_that_is_named_from_here_is_where_its_tasks_write(monkeypatch, tmp_path):
    task = visit.Task(1, "one", 'timeit -n 1 -r 1 \'open("{out}/written", "w")\'', 60.0)
    monkeypatch.setattr(visit, "TASKS", (task,))
    monkeypatch.chdir(tmp_path)
    visit.run(1, Path("here"), None, False)
    assert (tmp_path / "here" / "written").exists()


KILLED = """
from pathlib import Path
from bench.gpu import visit
codes = ("print(1)", "import os, signal; os.kill(os.getppid(), signal.{name})", "print(2)")
visit.TASKS = [visit.Task(1, c, f"timeit -n 1 -r 1 '{{c}}'", 60.0, alone=True) for c in codes]
visit.run(1, Path(), None, False)
"""


@pytest.mark.parametrize(("name", "code"), [("SIGKILL", -9), ("SIGTERM", 143)])
def test_what_was_found_is_kept_where_a_visit_is_killed(tmp_path, name, code):
    options = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    script = KILLED.format(name=name)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, **options)
    assert done.returncode == code
    assert records(tmp_path)[0]["ended"] == "done"
    assert "print(2)" not in {record["task"] for record in records(tmp_path)}


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


@pytest.mark.parametrize(
    ("losses", "eager", "problem"),
    [
        ([4.0, 3.0], 4.01, ""),
        ([4.0, math.nan], 4.0, "a loss is not finite"),
        ([4.0, 3.0], math.inf, "a loss is not finite"),
        ([4.0, 4.0], 4.0, "training did not lower the loss"),
        ([4.0, 3.0], 4.2, "compiled code has a first loss of 4.0000, eager code 4.2000"),
    ],
)
def test_the_losses_of_first_steps_are_judged(losses, eager, problem):
    assert first_step.problem_of(losses, eager) == problem


def test_first_steps_are_compiled_also_by_torch_where_te_would_run_them():
    config = first_step.SMALL
    h100 = Hardware("cuda", (9, 0), has_te=True, cuda_version=(13, 0))
    backends = {
        recipe: [plan.backend for plan in first_step.plans_of(recipe, config, h100)]
        for recipe in ("bf16", "delayed", "rowwise", "mxfp8")
    }
    assert backends == {
        "bf16": ["reference"],
        "delayed": ["te", "torch"],
        "rowwise": ["torch"],
        "mxfp8": ["emulate"],
    }


def test_the_first_steps_of_a_recipe_are_a_row(tmp_path, monkeypatch, capsys):
    task = visit.first_step("bf16")
    monkeypatch.setattr(sys, "argv", task.command(tmp_path, tmp_path, dry=True)[2:])
    assert first_step.main() == 0
    row = json.loads((tmp_path / "first-steps.jsonl").read_text())
    assert (row["recipe"], row["backend"], row["compiled"]) == ("bf16", "reference", True)
    assert row["losses"][0] == row["eager_loss"] == pytest.approx(math.log(128), rel=0.1)
    monkeypatch.setattr(first_step, "losses_of", lambda *arguments: 1 / 0)
    assert first_step.main() == 1
    assert "bf16 by reference: ZeroDivisionError: division by zero" in capsys.readouterr().out
    _, row = map(json.loads, (tmp_path / "first-steps.jsonl").read_text().splitlines())
    assert row["problem"] == "ZeroDivisionError: division by zero"


def parsed(*words: str) -> argparse.Namespace:
    return runner.parse(gpu, "gpu", words)


def test_sections_are_run_in_their_own_order_and_unknown_ones_refused(capsys):
    assert parsed().sections == ["casts", "histories", "golden", "layers", "losses"]
    assert not parsed().quick
    assert parsed("--quick", "--sections", "losses,casts").sections == ["casts", "losses"]
    with pytest.raises(SystemExit):
        parsed("--sections", "casts,nonsense")
    assert "no section 'nonsense'; known: casts," in capsys.readouterr().err
    assert sorted(sum(gpu.CONFORM.values(), ())) == sorted(suite.GROUPS)
    limit_s = gpu.WHOLE + gpu.GRACE
    assert sum(gpu.BUDGETS[name] for name in gpu.BUDGETS if name != "losses") < limit_s < 480


# Losses


def test_losses_are_compared_with_bf16s(monkeypatch):
    monkeypatch.setattr(losses, "COMPARED_FROM", 1)
    arms = [losses.BF16, ("te", "delayed"), ("emulate", "delayed"), ("torch", "current")]
    monkeypatch.setattr(losses, "ARMS", arms)
    training = losses.Training("gpt-nano", steps=2, batch=2, context=32)
    results = [run_check(case) for case in losses.cases(CPU, math.inf, training)]
    assert ["skipped" in row for row in results] == [False, True, False, False]
    assert not any(map(broken, results))
    bf16, _, delayed, _ = results
    assert len(delayed["losses"]) == delayed["steps"] == 2
    assert (delayed["fp8_layers"], delayed["layers"], delayed["fp8_gemms"]) == (16, 17, 96)
    gap = 100 * (delayed["mean_of_last"] / bf16["mean_of_last"] - 1)
    assert delayed["gap_to_bf16_percent"] == pytest.approx(gap, abs=1e-3)
    monkeypatch.setattr(losses, "MOST_APART_PERCENT", 1e-9)
    monkeypatch.setattr(losses, "ARMS", [losses.BF16, ("emulate", "delayed")])
    again = {"bf16": bf16, "delayed": delayed}
    monkeypatch.setattr(losses, "train", lambda *arguments, **options: dict(again[arguments[3]]))
    results = [run_check(case) for case in losses.cases(CPU, math.inf, training)]
    assert [broken(row) for row in results] == [False, True]
    # Training that runs out of time has no final loss.
    monkeypatch.undo()
    training = losses.Training("gpt-nano", steps=9, batch=2, context=32)
    facts = losses.train(CPU, training, "reference", "bf16", time.monotonic())
    assert facts["steps"] == 1
    assert facts["final_loss"] is facts["mean_of_last"] is None
    assert facts["ms_per_step"] > 0
    assert facts["note"] == "the time was up after 1 of 9 steps"


# The report


def report(**sections: list[Facts]) -> gpu_report.Report:
    gpu_results = gpu_report.new_report(Hardware("cuda", (9, 0), name="NVIDIA H200"), quick=True)
    for name, cases in sections.items():
        gpu_results["sections"][name] = {
            "seconds": 1.5,
            "budget_s": 9.0,
            "problem": "",
            "cases": cases,
        }
    return gpu_results


def fail() -> Facts:
    raise ValueError("a kernel is missing\nand more")


def test_the_report_is_written_as_json_and_as_tables(tmp_path):
    db = {"worst": {"y": 1.5}, "unquantized_db": {"y": math.nan, "db": 200.0}}
    losses = {"steps": 20, "final_loss": None, "ms_per_step": 81.5, "losses": [1.0, math.inf]}
    differing = same_bits({"x": (torch.zeros(2), torch.ones(2))})
    gpu_results = report(
        casts=[{"check": "a | b", "seconds": 0.1, **differing}, run_check(Check("broken", fail))],
        layers=[{"check": "linear", "seconds": 0.1, "holds": False, **db}],
        losses=[{"check": "bf16", "seconds": 1, "holds": True, **losses}],
        golden=[{"check": "late", "seconds": 0, "skipped": TIME_IS_UP}],
    )
    gpu_results["sections"]["losses"]["problem"] = "died with exit code -11 in the case 'te'"
    gpu_report.write(gpu_results, tmp_path)
    data = json.loads((tmp_path / "gpu.json").read_text())
    assert (data["gpu"], data["capability"]) == ("NVIDIA H200", "9.0")
    assert data["versions"]["torch"] == torch.__version__
    assert data["sections"]["layers"]["cases"][0]["unquantized_db"] == {"y": None, "db": 200.0}
    assert data["sections"]["losses"]["cases"][0]["losses"] == [1.0, None]
    assert len(data["problems"]) == 4
    text = (tmp_path / "gpu.md").read_text()
    for line in (
        "- casts: a | b: 2 of 2 differ: x[0]: 0 (0x00000000), not 1 (0x3f800000); x[1]: 0 "
        "(0x00000000), not 1 (0x3f800000)",
        "- casts: broken: ValueError: a kernel is missing",
        "- losses: died with exit code -11 in the case 'te'",
        "| case | seconds | checked | differing |  |",
        "| a / b | 0.1 | 2 | 2 | DOES NOT HOLD |",
        "| case | seconds | worst | unquantized db |  |",
        "| linear | 0.1 | y 1.5 | y nan, db 200 | DOES NOT HOLD |",
        "| bf16 | 1 | 20 |  | 81.5 | holds |",
        f"| late | 0 | skipped: {TIME_IS_UP} |",
    ):
        assert line in text.splitlines(), line
    assert "1 skipped, 1 of these for want of time" in text
    assert gpu_report.problems(report(casts=[])) == []
    assert "Everything that has to hold holds." in gpu_report.markdown(report(casts=[]))
    assert gpu_report.slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"


@pytest.mark.parametrize(
    ("target", "seconds", "problem"),
    [
        (partial(os._exit, 3), 60.0, "died with exit code 3"),
        (partial(time.sleep, 60), 0.5, "stopped after 0 s"),
        (partial(abs, 1), 60.0, ""),
    ],
)
def test_a_section_may_die_or_hang(target, seconds, problem):
    assert gpu.in_a_process(target, seconds) == problem


def test_the_rows_of_a_process_that_died_are_kept(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"starting": "a"}\n{"check": "a"}\n{"starting": "b"}\n{"check": "b')
    assert gpu.read_rows(path) == ([{"check": "a"}], "b")


@pytest.mark.slow
def test_a_section_runs_in_a_process_and_stops_when_its_time_is_up(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "GRACE", 300.0)  # a busy machine takes its time to start a process
    gpu_results = report()
    gpu.add_section(gpu_results, gpu.Section("casts", CPU, tmp_path, budget=0.001))
    section = gpu_results["sections"]["casts"]
    assert section["problem"] == ""
    groups = gpu.CONFORM["casts"]
    assert len(section["cases"]) == sum(len(list(suite.GROUPS[group](CPU))) for group in groups)
    assert section["cases"][-1]["skipped"] == TIME_IS_UP


@pytest.mark.parametrize("holds", [True, False])
def test_what_does_not_hold_ends_in_exit_code_1(holds, tmp_path, monkeypatch, capsys):
    def add(gpu_results: gpu_report.Report, section: gpu.Section) -> None:
        row = {"check": "c", "seconds": 0.0, "holds": holds or section.name != "layers"}
        gpu_results["sections"][section.name] = {"seconds": 0.0, "problem": "", "cases": [row]}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "probe", lambda device: CPU.hardware)
    monkeypatch.setattr(gpu, "add_section", add)
    arguments = parsed("--quick", "--out", str(tmp_path))
    if holds:
        gpu.run(arguments)
    else:
        assert exit_code(lambda: gpu.run(arguments)) == 1
        assert "1 problems:\n  layers: c: does not hold" in capsys.readouterr().out
    data = json.loads((tmp_path / "a-cpu" / "gpu.json").read_text())
    assert list(data["sections"]) == list(gpu.BUDGETS)
    assert bool(data["problems"]) == (not holds)


# Wheels for a machine that lacks packages


NOW = "python_version <= '{}.{}'".format(*sys.version_info)


def test_what_is_missing_is_named_with_what_installed_packages_want():
    installed = {
        "torch": ["typing-extensions>=4.10", "triton==3; platform_system == 'Linux'"],
        "typing-extensions": [],
        "typer": ["Rich>=13", "shellingham", "old; python_version < '3.8'", f"now; {NOW}"],
        "rich": ["pygments", "ipywidgets; extra == 'jupyter'", "colorama; sys_platform == 'win32'"],
    }

    def requires(name: str) -> list[str]:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    missing = wheels.missing(["torch>=2.10", "typer", "pydantic>=2.10", "ml_dtypes"], requires)
    assert list(missing) == ["pydantic", "ml-dtypes", "triton", "shellingham", "now", "pygments"]
    assert list(wheels.missing(wheels.dependencies())) == []  # these tests run
    assert any(name.startswith("pydantic") for name in wheels.dependencies())


def test_wheels_are_downloaded_for_the_python_there_in_the_tested_versions(tmp_path):
    command = wheels.download(tmp_path, wheels.USUALLY_MISSING, "3.12")
    assert command[1:4] == ["-m", "pip", "download"]
    options = dict(itertools.pairwise(command))
    assert options["--python-version"] == "3.12"
    assert (options["-c"], options["-d"]) == (str(ROOT / "constraints.txt"), str(tmp_path))
    assert command[-2:] == ["pydantic", "rich"]


def test_what_is_missing_is_told_where_nothing_can_be_imported():
    script = ROOT / "bench" / "gpu" / "wheels.py"
    command = [sys.executable, "-I", "-S", str(script), "missing"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert {"torch", "pydantic", "typer"} <= set(done.stdout.split())
