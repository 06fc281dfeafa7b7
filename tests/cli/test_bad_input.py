"""The command: bad input ends in one line on stderr and exit code 2, and touches nothing."""

from __future__ import annotations

import io
import json
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from fp8stack.planning.run_config import RunConfig, parse_config, to_toml
from fp8stack.precision import Hardware, doctor
from fp8stack.precision.hardware import TE_REMEDY
from fp8stack.precision.recipe_file import load_recipe
from fp8stack.trained import generate as trained_generate
from fp8stack.trained.generate import GenerationOptions
from tests.conftest import TINY
from tests.faults.inputs.input_flags import bad_input, make_files, problem

BAD = bad_input()


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    make_files(folder)
    return folder


@pytest.mark.capability("A1")
@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_that_names_it_and_touches_nothing(name, files):
    assert problem(files, *BAD[name]) == ""


def test_no_command_prints_the_help_which_is_found_by_every_usual_name(command, capsys):
    assert command() == 0
    assert "pretrain" in capsys.readouterr().out
    helps = set()
    for words in (["plan", "--help"], ["plan", "-h"], ["help", "plan"]):
        assert command(*words) == 0
        helps.add(capsys.readouterr().out)
    assert len(helps) == 1
    assert command("help") == command("-h") == 0
    for words in (["bench"], ["bench", "--help"]):
        capsys.readouterr()
        assert command(*words) == 0
        assert "step" in capsys.readouterr().out


def test_the_byte_order_mark_of_a_prompt_file_is_no_part_of_the_prompt(
    command, tmp_path, monkeypatch
):
    requests: list[GenerationOptions] = []
    monkeypatch.setattr(trained_generate, "write", requests.append)
    (tmp_path / "prompt.txt").write_text("Once upon", encoding="utf-8-sig")
    assert command("generate", "run", "--prompt-file", "prompt.txt") == 0
    assert [request.prompt for request in requests] == ["Once upon"]


def test_keys_of_the_model_and_the_recipe_are_set_by_their_short_names():
    sets = ["model.layers=2", "recipe.margin=1", "recipe.exclude=*.mlp.down"]
    sets += ["what_if=mxfp8, block"]
    config = parse_config(None, {"recipe": "delayed"}, sets)
    assert config.model_overrides == {"layers": 2}
    assert config.recipe_overrides == {"margin": 1, "exclude": "*.mlp.down"}
    assert config.what_if == ("mxfp8", "block")
    recipe = load_recipe("delayed", config.recipe_overrides)
    assert recipe.exclude == ("*.mlp.down",)


def test_usual_flags_of_training_and_a_bare_resume_are_taken(command, tmp_path):
    flags = ["--learning-rate", "0.002", "--warmup-steps", "3", "--weight-decay", "0.2"]
    tiny = [*TINY, "--recipe", "fp32", "--steps", "1"]
    assert command("pretrain", *tiny, *flags, "--out", "r", "--resume") == 0
    table = tomllib.loads((tmp_path / "r" / "run.toml").read_text())
    assert (table["lr"], table["warmup_steps"], table["weight_decay"]) == (0.002, 3, 0.2)
    before = (tmp_path / "r" / "metrics.jsonl").read_bytes()
    assert command("pretrain", "--resume", "--out", "r") == 0
    assert (tmp_path / "r" / "metrics.jsonl").read_bytes() == before


@pytest.mark.capability("A1")
@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        RunConfig,
        out=st.none() | st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1),
        lr=st.floats(min_value=1e-10, max_value=1e10),
        seed=st.integers(0, 2**63 - 1),
        model_overrides=st.dictionaries(
            st.from_regex(r"[a-z_]+", fullmatch=True),
            st.booleans()
            | st.integers(-(2**63), 2**63 - 1)
            | st.text(st.characters(codec="utf-8", exclude_characters="\0")),
        ),
    )
)
@pytest.mark.full
def test_a_configuration_survives_its_own_file(config):
    assert RunConfig(**tomllib.loads(to_toml(config))) == config


# doctor


def test_doctor_answers_in_json_for_any_machine(command, capsys):
    assert command("doctor", "--json", "--capability", "8.0") == 0
    ampere = json.loads(capsys.readouterr().out)
    delayed = ampere["recipes"]["delayed"]
    assert ampere["hardware"]["capability"] == "8.0"
    outcome = (delayed["recipe"], delayed["compute_dtype"], delayed["native"])
    assert outcome == ("bf16", "bf16", False)
    assert "8.9" in delayed["reasons"][0]
    assert ampere["recipes"]["auto"]["recipe"] == "bf16"
    assert ampere["formats"]["e4m3"]["max"] == 448


@pytest.mark.capability("B1")
def test_doctor_prints_this_machine_the_recipes_and_the_formats(command, capsys):
    assert command("doctor") == 0
    printed = capsys.readouterr().out
    for piece in ("machine: ", "delayed (emulated)", "e5m2", "57344", "448", "2^-9"):
        assert piece in printed


TO_ADD_TE = f"Transformer Engine is optional; to add it: {TE_REMEDY}"


@pytest.mark.parametrize(
    ("flags", "printed", "not_printed"),
    [
        ("8.9 --no-te", [TO_ADD_TE], []),
        ("8.6 --no-te", [], [TO_ADD_TE]),
        ("9.0", ["rowwise_wgrad_hp: wgrad in high precision"], [TO_ADD_TE]),
        ("10.0", ["nvfp4_forward_high: fprop in high precision"], [TO_ADD_TE]),
        ("10.0 --no-te", [rf"block: .*{re.escape(TE_REMEDY)}"], []),
    ],
)
@pytest.mark.full
def test_doctor_prints_a_reason_or_remedy_as_one_line_where_it_is_of_use(
    flags, printed, not_printed, command, capsys
):
    assert command("doctor", "--capability", *flags.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    for pattern in printed + not_printed:
        matching = [line for line in lines if line == pattern or re.match(pattern, line)]
        assert len(matching) == (pattern in printed), pattern


@pytest.mark.parametrize("width", [40, 80])
def test_doctor_prints_why_te_cannot_be_used_where_it_is_wanted(width):
    problem = "importing Transformer Engine 2.20.0 failed (x [red]y): pip install 'te[pytorch]'"
    hardware = Hardware(
        "cuda", (9, 0), te_version="2.20.0", te_problem=problem, torch_version="2.13.0"
    )
    printed = io.StringIO()
    doctor.show(hardware, Console(file=printed, width=width))
    lines = printed.getvalue().splitlines()
    assert problem in lines
    assert f"auto, delayed, current, block: {problem}: torch runs" in lines
    # A row of a recipe is one line from 80 columns on.
    row = r"│ nvfp4_forward_high +│ nvfp4_forward_high \(emulated\) "
    assert bool(re.search(row, printed.getvalue())) == (width >= 80)
    assert bool(re.search(r"┃ subnormal ┃", printed.getvalue())) == (width >= 80)
    assert doctor.as_json(hardware)["hardware"]["te_problem"] == problem
