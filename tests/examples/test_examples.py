"""The examples run: made small in this process, and as documented, which takes longer."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from tests.conftest import exit_code
from tests.docs import docs_runner as runner
from tests.docs.docs_commands import ROOT

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
# The arguments that make a script small, and a piece of its output.
SMALL = {
    "01_first_run.py": ("--tiny --steps 2", "parameters"),
    "02_your_own_text.py": ("README.md --tiny --steps 2", "The "),
    "03_convert_hugging_face.py": ("--steps 2", "step 2: loss"),
    "04_your_own_recipe.py": ("--tiny --steps 2", "fast     validation loss"),
    "05_two_gpus_torchrun.py": ("--steps 5", "ranks have the same FP8 state"),
}
# The variables that torchrun sets for a single rank.
RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
RANK |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
# Packages that the test extra does not have.
NEEDS = {
    "peft_lora.py": "peft", "trl_sft.py": "trl", "litgpt_model.py": "litgpt", "ray_train.py": "ray",
}  # fmt: skip


def commands(name: str) -> list[str]:
    """The commands at the top of a script, without those that install or download something."""
    doc = (EXAMPLES / name).read_text(encoding="utf-8").split('"""')[1]
    lines = [line.partition("  #")[0].strip() for line in doc.splitlines()[1:]]
    runs = [line for line in lines if line.startswith(("python", "torchrun"))]
    return [line for line in runs if "--model" not in line]  # --model downloads a model


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.full
def test_a_script_runs(name, tmp_path, monkeypatch, capsys, one_thread):
    words, output = SMALL[name]
    arguments = [str(ROOT / word) if word == "README.md" else word for word in words.split()]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    for key, value in RANK.items() if "torchrun" in name else ():
        monkeypatch.setenv(key, value)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert output in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_by_its_command_in_a_copy_of_the_repository(name, tmp_path):
    if name in NEEDS and not find_spec(NEEDS[name]):
        pytest.skip(f"needs {NEEDS[name]}")
    for linked in ("examples", "models", "recipes", "fp8stack", "README.md"):
        (tmp_path / linked).symlink_to(ROOT / linked)
    for command in commands(name):
        words = shlex.split(command)
        launcher = ["-m", "torch.distributed.run"] if words[0] == "torchrun" else []
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *launcher, *words[1:]],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


@pytest.mark.full
def test_the_notebook_runs_and_is_stored_without_outputs(monkeypatch, capsys):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn: list[int] = []

    def show() -> None:
        drawn.extend(pyplot.get_fignums())
        pyplot.gcf().canvas.draw()
        pyplot.close("all")

    monkeypatch.setattr(pyplot, "show", show)
    (path,) = EXAMPLES.glob("*.ipynb")
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    scope: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            exec("".join(cell["source"]), scope)
    assert len(drawn) == 6
    assert "e4m3: 126 positive values, 1.95e-03 to 448" in capsys.readouterr().out


def test_the_list_has_every_example_and_the_scripts_say_how_they_are_run():
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([\w.]+)` \|.*\| (.*) \|$", page, re.M))
    assert set(rows) == {path.name for path in EXAMPLES.iterdir()} - {"README.md", "__pycache__"}
    for name in SCRIPTS:
        assert rows[name].strip("`") == commands(name)[0], name
        lines = (EXAMPLES / name).read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 60, name
    assert set(SMALL) | set(NEEDS) == set(SCRIPTS)


@pytest.mark.parametrize(("code", "requeued"), [(2, False), (75, True)])
def test_the_slurm_script_resumes_and_requeues_only_a_run_that_was_cut_short(
    code, requeued, tmp_path
):
    """Stand-ins for the programs of the job record their arguments."""
    for name, body in {
        "fp8stack": f'echo "$@" >> called; exit {code}',
        "srun": '"$@"',
        "scontrol": 'echo "$@" >> requeued',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SLURM_JOB_ID": "17"}
    done = subprocess.run(["bash", EXAMPLES / "slurm.sbatch"], cwd=tmp_path, env=environment)
    assert done.returncode == code
    assert (tmp_path / "called").read_text().startswith("pretrain --resume auto --out ")
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 17\n"


def test_the_slurm_script_for_several_nodes_trains(tmp_path, monkeypatch, one_thread):
    """On one node, with a small model, by a rank in this process."""
    text = (EXAMPLES / "slurm_nodes.sbatch").read_text(encoding="utf-8")
    np.random.default_rng(0).integers(0, 256, 4000).astype("<u2").tofile(tmp_path / "tokens.bin")
    (words,) = runner.run_script(text, tmp_path)
    monkeypatch.chdir(tmp_path)
    _, arguments = runner.launched(words)
    assert exit_code(*runner.scaled(arguments)) == 0
    assert (tmp_path / "runs" / "long" / "plan.json").is_file()
    assert not (tmp_path / "requeued.txt").exists()


def test_the_slurm_script_for_several_nodes_requeues_a_job_that_ran_for_ten_minutes(
    tmp_path, monkeypatch
):
    text = (EXAMPLES / "slurm_nodes.sbatch").read_text(encoding="utf-8")
    monkeypatch.setitem(runner.SHIMS, "torchrun", "exit 1")
    for seconds, requeued in ((0, False), (900, True)):
        monkeypatch.setenv("SECONDS", str(seconds))
        with pytest.raises(AssertionError):  # its exit code is torchrun's
            runner.run_script(text, tmp_path)
        assert (tmp_path / "requeued.txt").exists() == requeued
