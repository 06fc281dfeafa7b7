"""`fp8stack list`, `show` and `report --json`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8stack.common import presets
from fp8stack.model.config import load_config
from fp8stack.precision.rules import shipped
from tests.conftest import TINY
from tests.support.run_folders import make_run


def listed(command, capsys, *words):
    capsys.readouterr()
    assert command("list", *words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_models_are_listed_with_their_sizes_the_smallest_first(command, capsys):
    rows = listed(command, capsys, "models")
    assert {row["model"] for row in rows} == set(presets.names("models"))
    sizes = [row["parameters"] for row in rows]
    assert sizes == sorted(sizes)
    nano = rows[0]
    assert nano["parameters"] == load_config("gpt-nano").parameters()
    assert (nano["model"], nano["layers"], nano["context"]) == ("gpt-nano", 4, 128)


@pytest.mark.parametrize(
    ("machine", "execution"), [("9.0", "native"), ("none", "emulated"), ("7.5", "as fp16")]
)
def test_recipes_are_listed_with_how_a_machine_runs_them(command, capsys, machine, execution):
    listing = listed(command, capsys, "recipes", "--capability", machine)
    rows = {row["recipe"]: row for row in listing}
    assert list(rows) == shipped()
    assert rows["delayed"]["runs here"] == execution
    assert (rows["nvfp4"]["bits"], rows["bf16"]["bits"]) == (4, 16)


def test_runs_are_listed_and_shown_with_what_to_do_next(command, capsys):
    Path("runs").mkdir()
    assert command("list", "runs") == 0
    assert capsys.readouterr().out == "No runs in runs.\n"
    assert command("pretrain", *TINY, "--recipe", "current", "--steps", "2", "--out", "runs/a") == 0
    trained = capsys.readouterr().out
    (row,) = listed(command, capsys, "runs")
    assert (row["run"], row["state"], row["steps"]) == ("runs/a", "done", "2 of 2")
    assert command("list", "runs") == command("show", "runs/a") == 0
    details = capsys.readouterr().out
    assert "validation loss" in details
    for output in (trained, details):
        for name in ("report", "generate", "export"):
            assert f"  fp8stack {name} runs/a" in output
        assert "--resume" not in output
    config = Path("runs/a/run.toml")
    config.write_text(config.read_text().replace("steps = 2", "steps = 4"))  # as if it was cut
    assert command("show", "runs/a") == 0
    assert "fp8stack pretrain --resume runs/a" in capsys.readouterr().out


@pytest.mark.full
def test_a_report_as_json_has_the_figures_and_findings_and_writes_no_page(
    command, capsys, tmp_path, undrawn
):
    make_run(tmp_path / "a", steps=20)
    assert command("report", "a", "--json") == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert (facts["run"], facts["state"], facts["steps"]) == ("a", "done", "20 of 20")
    assert "emulat" in " ".join(facts["plan"])
    # --out also writes a page, from the same analysis.
    assert not Path("a/report.html").exists()
    assert command("report", "a", "--json", "--out", "a.html") == 0
    output = capsys.readouterr()
    assert (json.loads(output.out), output.err) == ([facts], "report: a.html\n")
    assert Path("a.html").exists()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("fp8stack f", "forecast"),
        ("fp8stack pretrain --recipe mxfp6_e2", "mxfp6_e2m3"),
        ("fp8stack compare --recipes fp32,mxfp6_e2", "fp32,mxfp6_e2m3"),
        ("fp8stack pretrain --optimizer mu", "muon"),
        ("fp8stack pretrain --set recipe.resi", "recipe.residual="),
        ("fp8stack pretrain --set weight_d", "weight_decay="),
        ("fp8stack export runs/a --format saf", "safetensors"),
        ("fp8stack plan --gpu H20", "H200"),
        ("fp8stack plan --capability 8.9", "8.9"),
        ("fp8stack list rec", "recipes"),
        ("fp8stack copy recipe dela", "delayed"),
    ],
)
def test_a_shell_completes_commands_presets_and_choices(
    command, capsys, monkeypatch, typed, offered
):
    monkeypatch.setenv("SHELL", "/bin/bash")
    assert command("--completion") == 0
    assert "_FP8STACK_COMPLETE=complete_bash" in capsys.readouterr().out
    monkeypatch.setenv("_FP8STACK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    assert command() == 0
    assert capsys.readouterr().out.split() == [offered]


def test_a_shell_without_completion_is_named(refused, monkeypatch):
    monkeypatch.setenv("SHELL", "/bin/csh")
    refused(
        "--completion", message="No completion for the shell csh. Set SHELL to bash, zsh or fish."
    )
    monkeypatch.setenv("SHELL", "")
    refused("--completion", message="No completion for the shell (SHELL is not set). Set SHELL to")
