"""Whole runs through the command: what they print, write, repeat, and go on from."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

import pytest
import torch
import torch._inductor.config

import fp8stack
from fp8stack import cli
from fp8stack.model.gpt import GPT
from tests.conftest import TINY, Command, losses, metrics

RECIPES = ["fp32", "bf16", "fp16", "delayed", "current", "block", "mxfp8"]
Whole = Callable[[str], tuple[Path, str]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A finished run in a recipe, and what it printed; each is trained once."""

    @cache
    def train(recipe: str) -> tuple[Path, str]:
        folder = tmp_path_factory.mktemp(recipe)
        printed = io.StringIO()
        with redirect_stdout(printed), pytest.raises(SystemExit) as exit:
            cli.main(["pretrain", "--recipe", recipe, "--out", str(folder / "r"), *TINY])
        assert exit.value.code == 0
        return folder / "r", printed.getvalue()

    return train


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_leaves_all_its_files_and_a_falling_loss(recipe: str, whole: Whole) -> None:
    run, printed = whole(recipe)
    for name in ("run.toml", "plan.json", "metrics.jsonl", "loss.png", "sample.txt"):
        assert (run / name).stat().st_size > 0, name
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000008", "step-000012"]
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["step"] for row in rows if "val_loss" in row] == [6, 12]
    assert rows[-1]["val_loss"] < rows[5]["val_loss"]
    assert rows[-1]["precision"].startswith(recipe)
    assert [row.get("loss_scale", 0) > 0 for row in rows] == [recipe == "fp16"] * 12
    fp8 = json.loads((run / "plan.json").read_text())["layers"]
    assert rows[-1]["fp8_gemms"] == 3 * sum(layer["fp8"] for layer in fp8)
    pieces = ("plan: ", "step 12/12 | loss ", " tok/s", "MFU ", " GiB", "ETA ", "sample:\ndef ")
    assert [piece for piece in pieces if piece not in printed] == []


@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        ("fp32", []),
        ("delayed", []),
        ("fp32", ["--set", "workers=2"]),
        ("delayed", ["--set", "save_fp8=true"]),
        ("mxfp8", ["--set", "save_fp8=true"]),
    ],
)
def test_what_changes_no_number_gives_the_same_losses(
    recipe: str, flags: list[str], whole: Whole, command: Command, tmp_path: Path
) -> None:
    assert command("pretrain", "--recipe", recipe, "--out", "r", *TINY, *flags) == 0
    assert losses(tmp_path / "r") == losses(whole(recipe)[0])


@pytest.mark.parametrize("recipe", ["fp32", "delayed"])
def test_another_seed_gives_other_losses(
    recipe: str, whole: Whole, command: Command, tmp_path: Path
) -> None:
    assert command("pretrain", "--recipe", recipe, "--out", "r", "--seed", "1", *TINY) == 0
    assert losses(tmp_path / "r") != losses(whole(recipe)[0])


def test_the_saved_configuration_reproduces_the_run(
    whole: Whole, command: Command, tmp_path: Path
) -> None:
    assert command("pretrain", "--config", str(whole("current")[0] / "run.toml"), "--out", "b") == 0
    assert losses(tmp_path / "b") == losses(whole("current")[0])


def test_dropout_is_continued_on_resume(command: Command, tmp_path: Path) -> None:
    half = [*TINY, "--set", "model_overrides.dropout=0.2", "--recipe", "delayed"]
    half += ["--schedule", "constant"]
    assert command("pretrain", "--out", "whole", *half) == 0
    assert command("pretrain", "--out", "b", *half, "--steps", "5") == 0
    assert command("pretrain", "--resume", "b", "--steps", "12") == 0
    # Evaluations are at the last step, too, so the cut run has one more at step 5.
    without = [row[:4] for row in losses(tmp_path / "whole")]
    assert [row[:4] for row in losses(tmp_path / "b")] == without


def test_accumulation_takes_the_same_steps_in_smaller_pieces(
    whole: Whole, command: Command, tmp_path: Path
) -> None:
    assert command("pretrain", "--recipe", "fp32", "--out", "b", *TINY, "--accumulate", "4") == 0
    for one, pieces in zip(losses(whole("fp32")[0]), losses(tmp_path / "b"), strict=True):
        assert pieces[1] == pytest.approx(one[1], rel=1e-4)
        assert pieces[2] == pytest.approx(one[2], rel=1e-3)


def test_a_loss_that_is_not_finite_stops_the_run_and_leaves_its_checkpoints(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Steps so large that the weights soon leave all bounds; each is larger than the one before.
    flags = [*TINY, "--lr", "1e26", "--set", "warmup_steps=1000000000", "--save-every", "1"]
    assert command("pretrain", "--recipe", "fp32", "--out", "r", *flags) == 5
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Lower --lr (now 1e+26)" in error
    rows = metrics(tmp_path / "r")
    assert rows[-1]["event"] == "stop"
    assert fp8stack.load(tmp_path / "r").embedding.weight.isfinite().all()


def test_without_the_guard_the_first_loss_that_is_not_finite_ends_the_run(
    command: Command,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward, losses_seen = GPT.forward, []

    def broken(self: GPT, *tokens: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = forward(self, *tokens)
        losses_seen.append(self.training)
        return made * math.nan if sum(losses_seen) > 4 else made

    monkeypatch.setattr(GPT, "forward", broken)
    flags = [*TINY, "--save-every", "1", "--no-guard"]
    assert command("pretrain", "--recipe", "fp32", "--out", "r", *flags) == 5
    assert "The step was not taken" in capsys.readouterr().err
    rows = metrics(tmp_path / "r")
    assert [row["event"] for row in rows if "event" in row] == ["skip", "stop"]
    saved = sorted(p.name for p in (tmp_path / "r" / "checkpoints").iterdir())
    assert saved[-1] == f"step-{rows[-1]['step'] - 1:06d}"


def test_fp16_that_always_overflows_ends_with_advice_and_not_with_nan_weights(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--recipe", "fp16", "--out", "r", *TINY, "--steps", "40", "--save-every", "100"]
    flags += ["--set", "model_overrides.init_std=300.0", "--eval-every", "100"]
    assert command("pretrain", *flags, "--no-guard") == 5
    assert "or use a recipe with more range" in capsys.readouterr().err
    rows = metrics(tmp_path / "r")
    assert [row["event"] for row in rows if "event" in row] == ["skip", "stop"]
    # The guard finds no loss scale to be the cause, and that bf16 has the range.
    flags[flags.index("r")] = "guarded"
    assert command("pretrain", *flags) == 0
    rows = metrics(tmp_path / "guarded")
    assert [row["event"] for row in rows if "event" in row] == ["skip"] * 3 + ["precision"]
    assert rows[-1]["precision"] == "bf16"


def test_fp8_gemms_are_those_of_one_step_however_rarely_they_are_logged(
    command: Command, tmp_path: Path
) -> None:
    flags = ["--recipe", "delayed", "--out", "r", *TINY, "--log-every", "5"]
    assert command("pretrain", *flags) == 0
    assert [(row["step"], row["fp8_gemms"]) for row in metrics(tmp_path / "r")] == [
        (5, 12), (6, 12), (10, 12), (12, 12),
    ]  # fmt: skip


def test_a_reader_that_goes_away_does_not_stop_the_run(tmp_path: Path) -> None:
    flags = ["--recipe", "fp32", "--out", str(tmp_path / "r"), *TINY]
    process = subprocess.Popen(
        [sys.executable, "-m", "fp8stack", "pretrain", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=120) == 0, errors
    assert len(metrics(tmp_path / "r")) == 12


@pytest.fixture
def compiling() -> Iterator[None]:
    """What compiled runs ask of torch as a whole is put back, and what they compiled forgotten."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("compiling")
def test_compile_compiles_a_block_and_the_loss_for_training_and_for_evaluating(
    whole: Whole,
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    graphs: list[object] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        graphs.append(graph)
        return graph.forward

    with_inductor = GPT.compile_blocks  # which takes minutes
    monkeypatch.setattr(
        GPT, "compile_blocks", lambda model, mode: with_inductor(model, compiler, mode)
    )
    plain, told = whole("fp32")
    assert not graphs
    assert "compiling" not in told
    assert command("pretrain", "--recipe", "fp32", "--out", "r", "--compile", *TINY) == 0
    assert len(graphs) == 4  # a block, for all of them, and the loss; to train and to evaluate
    assert losses(tmp_path / "r") == losses(plain)
    assert (tmp_path / "r" / "sample.txt").read_text() == (plain / "sample.txt").read_text()
    printed = capsys.readouterr().out
    assert printed.count("compiling: the first step takes a minute or so") == 1
    assert "compile = true" in (tmp_path / "r" / "run.toml").read_text()
    # Who computes is free on resume.
    assert command("pretrain", "--resume", "r", "--no-compile", "--steps", "14") == 0
    assert len(graphs) == 4


def test_without_a_compiler_nothing_is_written(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with torch._inductor.config.patch("cpp.cxx", ("no-such-compiler",)):
        assert command("pretrain", "--recipe", "fp32", "--out", "r", "--compile", *TINY) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Install g++" in error
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("recipe", ["fp32", "delayed", "mxfp8"])
def test_a_compiled_run_resumes_to_the_losses_of_the_uninterrupted_one(
    recipe: str, command: Command, tmp_path: Path
) -> None:
    flags = [*TINY, "--set", "model_overrides.dropout=0.1", "--recipe", recipe, "--compile"]
    assert command("pretrain", "--out", "whole", *flags) == 0
    torch._dynamo.reset()  # as in a new process
    whole = tmp_path / "whole"
    shutil.copytree(whole, tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-000012")
    assert command("pretrain", "--resume", "cut") == 0
    assert losses(tmp_path / "cut") == losses(whole)
    last = "checkpoints/step-000012"
    for file in sorted((whole / last).glob("*.safetensors")):
        assert file.read_bytes() == (tmp_path / "cut" / last / file.name).read_bytes(), file.name
