"""Bad input ends in one line on stderr and exit code 2, and touches nothing."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from fp8stack import doctor
from fp8stack.config import RunConfig, parse_config, to_toml
from fp8stack.errors import UserError
from fp8stack.precision import Hardware
from fp8stack.precision.hardware import TE_REMEDY
from tests.conftest import TINY, Command

CASES = {
    "recipe": (["--recipe", "mxpf8"], "No recipe 'mxpf8'. Did you mean 'mxfp8'?"),
    "recipe file": (["--recipe", "./none.toml"], "none.toml'. Give the path of a TOML file"),
    "model": (["--model", "gpt-nan"], "No model 'gpt-nan'. Did you mean 'gpt-nano'?"),
    "backend": (["--backend", "tee"], "backend = 'tee'"),
    "device": (["--device", "tpu"], "device = 'tpu'"),
    "no cuda": (["--device", "cuda"], "No CUDA GPU is usable"),
    "flag": (["--stpes", "3"], "--stpes"),
    "number": (["--steps", "many"], "Invalid value for '--steps'"),
    "steps": (["--steps", "0"], "steps = 0"),
    "batch": (["--batch", "-1"], "batch = -1"),
    "accumulate": (
        ["--batch", "5", "--accumulate", "2"],
        "batch 5 is not divisible by accumulate 2",
    ),
    "lr": (["--lr", "0"], "lr = 0.0"),
    "lr nan": (["--lr", "nan"], "lr = nan"),
    "lr inf": (["--lr", "inf"], "lr = inf"),
    "digits": (["--set", "lr=" + "9" * 5000], "lr = "),
    "nested": (["--set", "lr=" + "[" * 5000], "lr = "),
    "two keys": (["--set", "lr=0.1\nsteps=5"], "sets more than one key"),
    "bytes": (["--out", "h\udcff"], "out is not valid UTF-8"),
    "newline": (["--resume", "a\nb"], "--resume a\\nb"),
    "too large": (
        ["--set", "model_overrides.vocabulary=2147483648", "--set", "model_overrides.width=1024"],
        "for the weights, gradients and optimizer of",
    ),
    "schedule": (["--schedule", "cosin"], "schedule = 'cosin'"),
    "seed": (["--seed", "-1"], "seed = -1"),
    "key": (["--set", "learning_rate=1"], "No key 'learning_rate'"),
    "near key": (["--set", "eval_window=1"], "Did you mean 'eval_windows'?"),
    "set": (["--set", "lr"], "is not key=value"),
    "set value": (["--set", "workers=two"], "workers = 'two'"),
    "set table": (["--set", "lr.x=1"], "lr"),
    "keep": (["--set", "keep_checkpoints=1"], "keep_checkpoints = 1"),
    "model key": (["--set", "model_overrides.layres=1"], "Did you mean 'layers'?"),
    "heads": (["--set", "model_overrides.heads=5"], "width 32 is not divisible by heads 5"),
    "interval": (["--set", "interval=4"], "there is no key 'interval': scales of delayed scaling"),
    "recipe interval": (
        ["--recipe", "delayed", "--set", "recipe_overrides.interval=4"],
        "ignores its own interval. Leave it out",
    ),
    "compile mode": (["--set", "compile_mode=reduce-overhead"], "'max-autotune-no-cudagraphs'"),
    "recipe key": (["--recipe", "delayed", "--set", "recipe_overrides.eps=1"], "No key 'eps'"),
    "recipe auto": (["--set", "recipe_overrides.margin=1"], "needs a recipe by name"),
    "pattern": (
        ["--recipe", "delayed", "--set", 'recipe_overrides.exclude=["blocks.9.*"]'],
        "the pattern 'blocks.9.*' in exclude matches no layer",
    ),
    "context": (["--context", "4096"], "--context 4096 is more than the 128"),
    "strict": (["--recipe", "delayed", "--strict"], "--strict: 'delayed' does not run as asked"),
    "strict torch": (
        ["--recipe", "block", "--backend", "torch", "--device", "cpu", "--strict"],
        "--strict: 'block' does not run as asked: torch's scaled_mm on a CPU has no block scaling",
    ),
    "strict te": (
        ["--recipe", "delayed", "--backend", "te", "--device", "cpu", "--strict"],
        "--strict: 'delayed' does not run as asked: Transformer Engine needs a CUDA GPU",
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
        "--strict: blocks.0.attention.qkv cannot run in FP8: 24 in features, not divisible by 16",
    ),
    "config": (["--config", "none.toml"], "Cannot read none.toml"),
    "config syntax": (["--config", "broken.toml"], "broken.toml is not valid TOML"),
    "config key": (["--config", "key.toml"], "Did you mean 'steps'?"),
    "config type": (["--config", "type.toml"], "steps = 'ten'"),
    "no data": (["--data", "none.txt"], "none.txt"),
    "empty data": (["--data", "empty.txt"], "empty.txt"),
    "short data": (["--data", "short.txt"], "short.txt"),
    "binary data": (["--data", "binary.txt"], "binary.txt"),
    "odd data": (["--data", "odd.bin"], "odd.bin"),
    "large token": (["--data", "large.bin"], "large.bin"),
    "resume": (["--resume", "nowhere"], "--resume nowhere"),
    "out": (["--out", "file"], "file"),
    "out in the way": (["--out", "mine"], "mine/sample.txt is in the way"),
    "endless config": (["--config", "/dev/zero"], "/dev/zero is no regular file"),
    "many steps": (["--steps", "9" * 30], "steps = "),
    "many workers": (["--set", "workers=1000"], "workers = 1000"),
}


@pytest.fixture
def files(tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("steps = = 3")
    (tmp_path / "key.toml").write_text("stesp = 3")
    (tmp_path / "type.toml").write_text("steps = 'ten'")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "binary.txt").write_bytes(b"\x00\x01" * 5000)
    (tmp_path / "odd.bin").write_bytes(b"\x01" * 9999)
    np.full(5000, 300, dtype="<u2").tofile(tmp_path / "large.bin")
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sample.txt").write_text("a sample of mine")


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_line_that_names_it_and_exit_code_2(
    case: str, command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, expected = CASES[case]
    before = sorted(tmp_path.rglob("*"))
    out = [] if "--out" in flags else ["--out", "r"]
    assert command("pretrain", *TINY, *out, *flags) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1, error
    assert "Traceback" not in error
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("capability", ["9", "x.y", "9.0.1", "", "-1.0"])
def test_doctor_refuses_what_is_no_capability(
    capability: str, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("doctor", "--capability", capability) == 2
    assert "is no compute capability" in capsys.readouterr().err


def test_an_unknown_command_is_refused_and_none_prints_the_help(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("pretrian") == 2
    assert "pretrian" in capsys.readouterr().err
    assert command() == 0
    assert "pretrain" in capsys.readouterr().out


values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.text()),
    st.dictionaries(st.text(), st.integers()),
)  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from([*RunConfig.model_fields, "bogus"]), values))
def test_any_configuration_is_taken_or_refused_in_one_line(table: dict) -> None:
    try:
        outcome = repr(parse_config(None, table))
    except UserError as error:
        outcome = str(error)
    assert "\n" not in outcome


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
def test_a_configuration_survives_its_own_file(config: RunConfig) -> None:
    import tomllib

    assert RunConfig(**tomllib.loads(to_toml(config))) == config


def test_doctor_answers_in_json_for_any_machine(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("doctor", "--capability", "8.0", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["hardware"]["capability"] == "8.0"
    delayed = answer["recipes"]["delayed"]
    assert (delayed["recipe"], delayed["compute_dtype"], delayed["native"]) == (
        "bf16",
        "bf16",
        False,
    )
    assert "8.9" in delayed["reasons"][0]
    assert answer["recipes"]["auto"]["recipe"] == "bf16"
    assert answer["formats"]["e4m3"]["max"] == 448
    assert command("doctor", "--capability", "9.0", "--no-te", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["hardware"]["has_te"], answer["hardware"]["te_problem"]) == (False, "")
    delayed = answer["recipes"]["delayed"]
    assert (delayed["backend"], delayed["native"], delayed["reasons"]) == ("torch", True, [])


def test_doctor_prints_this_machine_the_recipes_and_the_formats(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("doctor") == 0
    printed = capsys.readouterr().out
    for piece in ("machine: ", "delayed (emulated)", "e5m2", "57344", "448", "2^-9"):
        assert piece in printed


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["8.9", "--no-te"], True),
        (["9.0", "--no-te"], True),
        (["12.0", "--no-te"], True),
        (["9.0"], False),
        (["8.6", "--no-te"], False),
        (["7.0", "--no-te"], False),
        (["none", "--no-te"], False),
    ],
    ids=str,
)
def test_doctor_says_how_to_add_te_where_it_would_be_of_use(
    flags: list[str], said: bool, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("doctor", "--capability", *flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (f"Transformer Engine is optional; to add it: {TE_REMEDY}" in lines) == said


def test_doctor_prints_a_reason_and_its_remedy_whole_in_one_line(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("doctor", "--capability", "10.0", "--no-te") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("block: ") and TE_REMEDY in line]) == 1


@pytest.mark.parametrize("width", [40, 80, 400])
def test_doctor_prints_why_te_cannot_be_used_where_it_is_wanted(width: int) -> None:
    problem = "importing Transformer Engine 2.20.0 failed (x [red]y): pip install 'te[pytorch]'"
    here = Hardware("cuda", (9, 0), te_version="2.20.0", te_problem=problem, torch_version="2.13.0")
    printed = io.StringIO()
    doctor.show(here, Console(file=printed, width=width))
    lines = printed.getvalue().splitlines()
    assert problem in lines
    for recipe in ("auto", "delayed", "current", "block"):
        assert f"{recipe}: {problem}; until then torch runs" in lines
    assert not [line for line in lines if line.startswith("mxfp8: importing")]
    assert doctor.as_json(here)["hardware"]["te_problem"] == problem
