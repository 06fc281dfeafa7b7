"""The command: bad input ends in one line on stderr and exit code 2, and touches nothing."""

from __future__ import annotations

import io
import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from fp8stack.common.io import read_toml
from fp8stack.planning.run_config import RunConfig, parse_config, to_toml
from fp8stack.precision import Hardware, doctor
from fp8stack.precision.hardware import TE_REMEDY
from fp8stack.precision.recipe import load_recipe
from fp8stack.trained import generate as trained_generate
from fp8stack.trained.generate import GenerationOptions
from fp8stack.training.memory_check import Footprint
from tests.conftest import TINY, refusal
from tests.faults.inputs.input_flags import bad_input, make_files, problem

BAD = bad_input()

CASES = {  # further flags of pretrain: what must be said
    "digits": (["--set", "lr=" + "9" * 5000], "lr = "),
    "two keys": (["--set", "lr=0.1\nsteps=5"], "sets more than one key"),
    "bytes": (["--out", "h\udcff"], "out is not valid UTF-8"),
    "newline": (["--resume", "a\nb"], "--resume a\\nb"),
    "out in the way": (["--out", "mine"], "mine/sample.txt is in the way"),
    "out in a file": (["--out", "mine/sample.txt/r"], "mine/sample.txt is a file. Give a path in"),
    "empty config": (["--config", ""], "--config is empty. Give a run file"),
    "folder as config": (["--config", "mine"], "fp8stack: mine is no regular file. Give a TOML"),
    "interval": (["--set", "interval=4"], "there is no key 'interval': scales of delayed scaling"),
    "recipe interval": (
        ["--recipe", "delayed", "--set", "recipe_overrides.interval=4"],
        "ignores its own interval. Leave it out",
    ),
    "compile mode": (["--set", "compile_mode=reduce-overhead"], "'max-autotune-no-cudagraphs'"),
    "recipe key": (
        ["--recipe", "delayed", "--set", "recipe_overrides.eps=1"],
        "eps changes nothing",
    ),
    "recipe auto": (["--set", "recipe_overrides.margin=1"], "needs a recipe by name"),
    "pattern": (
        ["--recipe", "delayed", "--set", 'recipe_overrides.exclude=["blocks.9.*"]'],
        "the pattern 'blocks.9.*' in exclude matches no layer",
    ),
    "too many blocks": (
        ["--recipe", "delayed", "--set", "recipe_overrides.exclude_last_blocks=99"],
        "exclude_last_blocks = 99, and the model has 1 block. Give 1 at most",
    ),
    "no number": (["--steps", "abc"], "Invalid value for '--steps' = 'abc': Input should be"),
    "strict torch": (
        ["--recipe", "block", "--backend", "torch", "--device", "cpu", "--strict"],
        "--strict: 'block' does not run as asked: torch has no block GEMM on a CPU",
    ),
    "strict te": (
        ["--recipe", "delayed", "--backend", "te", "--device", "cpu", "--strict"],
        "--strict: 'delayed' does not run as asked: delayed needs an FP8 GPU and this is a CPU",
    ),
    "strict reference": (
        ["--recipe", "current", "--backend", "reference", "--strict"],
        "the reference backend has no FP8, which current asks for",
    ),
    "strict shape": (
        [
            *("--recipe", "delayed", "--backend", "torch", "--device", "cpu", "--strict"),
            *("--set", "model_overrides.width=24"),
        ],
        "--strict: blocks.0.attention.qkv cannot run in FP8: 24 in features and 72 out features, ",
    ),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    make_files(folder)
    return folder


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_that_names_it_and_touches_nothing(name, files):
    assert problem(files, *BAD[name]) == ""


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_line_that_names_it_and_exit_code_2(case, refused, tmp_path):
    flags, expected = CASES[case]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sample.txt").write_text("a sample of mine")
    out = [] if "--out" in flags else ["--out", "r"]
    assert expected in refused("pretrain", *TINY, *out, *flags)


def test_prepare_refuses_an_empty_name_of_a_tokenizer(command, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text")
    assert command("prepare", "a.txt", "--tokenizer", "", "--out", "t") == 2
    assert "No tokenizer ''" in capsys.readouterr().err


@pytest.mark.parametrize("capability", ["x.y", "9.0.1", "", "-1.0"])
def test_doctor_refuses_what_is_no_capability(capability, refused):
    assert "is no compute capability" in refused("doctor", "--capability", capability)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["pretend"], "No such command 'pretend'. Did you mean 'pretrain'? See --help."),
        (["plan", "--recipes", "x"], "No such option: --recipes (Possible options: --recipe). See"),
        (["generate"], "Missing argument 'RUN'. See --help."),
    ],
)
def test_a_command_line_that_is_wrong_is_told_in_whole_sentences(words, line, refused):
    assert line in refused(*words)


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
        assert re.search("step.*roofline|roofline.*step", capsys.readouterr().out, re.S)


def test_an_unknown_key_within_a_table_is_named_with_the_keys_of_that_table():
    message = refusal(parse_config, None, {"guard": {"windows": 1}})
    assert message.startswith("flags: guard: No key 'windows'. Did you mean 'window'? Known: amax_")
    assert "accumulate" not in message


def test_an_override_that_is_not_finite_is_named_by_its_key():
    table = {"model_overrides": {"experts": {"bias": math.nan}}}
    message = refusal(parse_config, None, table)
    assert "model_overrides.experts.bias = nan: Input should be a finite number" in message


@pytest.mark.parametrize("flag", ["--config", "--model", "--recipe", "--set"])
def test_a_dotted_key_of_100_kb_is_refused_in_one_line(flag, refused, tmp_path):
    key = ".".join("a" * 50_000)
    (tmp_path / "deep.toml").write_text(f"{key} = 1\n")
    value = f"{key}=1" if flag == "--set" else "deep.toml"
    assert len(refused("pretrain", flag, value, message="is nested too deeply")) < 500


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ("layers = 3000000", "layers = 3000000: Input should be less than or equal to 2048"),
        ("layers = 1\nmlp_width = 2147483648\nkv_heads = 1", "GiB"),
        ("layers = 2048\nmlp_width = 2147483648", "parameters are the most"),
    ],
)
def test_a_model_that_no_machine_holds_is_refused_before_anything_is_allocated(
    sizes, message, refused, tmp_path
):
    shape = "vocabulary = 256\ncontext = 64\nwidth = 32\nheads = 2\n"
    (tmp_path / "large.toml").write_text(shape + sizes)
    refused("pretrain", "--model", "large.toml", "--recipe", "fp32", "--out", "r", message=message)


@pytest.mark.parametrize("key", ["steps", "model_overrides", "what_if"])
def test_a_value_that_is_nested_too_deeply_is_refused_in_one_line(key, tmp_path):
    setting = f"{key}.{'a.' * 3000}a=1"
    (tmp_path / "run.toml").write_text(setting)
    arguments: Any
    for arguments in ((None, {}, [setting]), (str(tmp_path / "run.toml"), {})):
        message = refusal(parse_config, *arguments)
        assert key in message
        assert len(message) < 500


def test_a_file_that_is_far_too_large_is_not_read(tmp_path):
    with (tmp_path / "run.toml").open("wb") as stream:
        stream.truncate(2**40)  # a hole, which takes no room
    assert "is too large" in refusal(read_toml, tmp_path / "run.toml")


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


@pytest.mark.parametrize(
    ("memory", "size"),
    [("80", 80 * 2**30), ("80GB", 80 * 10**9), ("80 gib", 80 * 2**30), ("1.5G", 3 * 2**29)],
)
def test_memory_has_a_unit(memory, size, command, capsys, monkeypatch):
    monkeypatch.setattr(Footprint, "largest", lambda *arguments: 1)
    assert command("estimate", "--memory", memory, "--json") == 0
    assert json.loads(capsys.readouterr().out)["memory"] == size


def test_usual_flags_of_training_and_a_bare_resume_are_taken(command, tmp_path):
    flags = ["--learning-rate", "0.002", "--warmup-steps", "3", "--weight-decay", "0.2"]
    tiny = [*TINY, "--recipe", "fp32", "--steps", "1"]
    assert command("pretrain", *tiny, *flags, "--out", "r", "--resume") == 0
    table = tomllib.loads((tmp_path / "r" / "run.toml").read_text())
    assert (table["lr"], table["warmup_steps"], table["weight_decay"]) == (0.002, 3, 0.2)
    before = (tmp_path / "r" / "metrics.jsonl").read_bytes()
    assert command("pretrain", "--resume", "--out", "r") == 0
    assert (tmp_path / "r" / "metrics.jsonl").read_bytes() == before


@settings(max_examples=200, deadline=None)
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
def test_a_configuration_survives_its_own_file(config):
    assert RunConfig(**tomllib.loads(to_toml(config))) == config


def test_doctor_answers_in_json_for_any_machine(command, capsys):
    assert command("doctor", "--capability", "8.0", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["hardware"]["capability"] == "8.0"
    delayed = answer["recipes"]["delayed"]
    outcome = (delayed["recipe"], delayed["compute_dtype"], delayed["native"])
    assert outcome == ("bf16", "bf16", False)
    assert "8.9" in delayed["reasons"][0]
    assert answer["recipes"]["auto"]["recipe"] == "bf16"
    assert answer["formats"]["e4m3"]["max"] == 448
    assert command("doctor", "--capability", "9.0", "--no-te", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["hardware"]["has_te"], answer["hardware"]["te_problem"]) == (False, "")
    delayed = answer["recipes"]["delayed"]
    assert (delayed["backend"], delayed["native"], delayed["reasons"]) == ("torch", True, [])


def test_doctor_prints_this_machine_the_recipes_and_the_formats(command, capsys):
    assert command("doctor") == 0
    printed = capsys.readouterr().out
    for piece in ("machine: ", "delayed (emulated)", "e5m2", "57344", "448", "2^-9"):
        assert piece in printed


@pytest.mark.parametrize(
    ("flags", "count"),
    [("8.9 --no-te", 1), ("12.0 --no-te", 1), ("9.0", 0), ("8.6 --no-te", 0), ("none --no-te", 0)],
)
def test_doctor_says_how_to_add_te_where_it_would_be_of_use(flags, count, command, capsys):
    assert command("doctor", "--capability", *flags.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines.count(f"Transformer Engine is optional; to add it: {TE_REMEDY}") == count


def test_doctor_prints_a_reason_and_its_remedy_whole_in_one_line(command, capsys):
    assert command("doctor", "--capability", "10.0", "--no-te") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("block: ") and TE_REMEDY in line]) == 1


@pytest.mark.parametrize("capability", ["9.0", "10.0"])
def test_doctor_names_the_gemms_in_low_precision_and_those_that_are_not(
    capability, command, capsys
):
    assert command("doctor", "--capability", capability) == 0
    lines = capsys.readouterr().out.splitlines()
    reason = "wgrad in high precision"
    assert f"rowwise_wgrad_hp: {reason}" in lines
    reason = "fprop in high precision"
    native = capability == "10.0"
    assert (f"nvfp4_forward_high: {reason}" in lines) == native
    assert any("nvfp4_forward_high (native)" in line for line in lines) == native


@pytest.mark.parametrize("width", [40, 80, 400])
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
