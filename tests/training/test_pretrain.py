"""Whole runs through the command: what they print, write, repeat, and go on from."""

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path

import pytest
import torch

from fp8stack import cli
from fp8stack.model.gpt import GPT
from tests.conftest import TINY, exit_code, losses, metrics
from tests.faults.bounded import bounded
from tests.faults.processes import checkpoint_difference, difference
from tests.training.conftest import saved

RECIPES = ["fp32", "fp16", "delayed", "mxfp8"]
Whole = Callable[[str], tuple[Path, str]]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A finished run in a recipe, and what it printed; each is trained once."""

    @cache
    def train(recipe: str) -> tuple[Path, str]:
        folder, printed = tmp_path_factory.mktemp(recipe), io.StringIO()
        with redirect_stdout(printed):
            words = ["pretrain", "--recipe", recipe, "--out", str(folder / "r")]
            assert exit_code(*words, *TINY) == 0
        return folder / "r", printed.getvalue()

    return train


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_leaves_all_its_files_and_a_falling_loss(recipe, uninterrupted):
    run, printed = uninterrupted(recipe)
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
    pieces = ("plan: ", "step 12/12 | loss ", " tok/s", "MFU ", " GiB", "ETA ", "sample:\ndef ",
              "model: gpt-nano (layers 1, width 32, heads 2), ")  # fmt: skip
    assert [piece for piece in pieces if piece not in printed] == []
    assert (f"loss gap to expect of {recipe}: +" in printed) == (rows[-1]["fp8_gemms"] > 0)


@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        ("delayed", ["--checkpoint-async"]),
        ("fp32", ["--set", "workers=2"]),
        ("mxfp8", ["--activation-checkpointing", "selective"]),
    ],
)
@pytest.mark.full
def test_what_changes_no_number_gives_the_same_losses_and_checkpoints(
    recipe, flags, uninterrupted, command, tmp_path
):
    assert command("pretrain", "--recipe", recipe, "--out", "r", *TINY, *flags) == 0
    assert losses(tmp_path / "r") == losses(uninterrupted(recipe)[0])
    assert saved(tmp_path / "r") == ["step-000012", "step-000008"]
    changed_run, plain_run = (
        run / "checkpoints/step-000012" for run in (tmp_path / "r", uninterrupted(recipe)[0])
    )
    assert checkpoint_difference(changed_run, plain_run) == ""


@pytest.mark.full
def test_the_saved_configuration_reproduces_the_run_and_another_seed_another(
    uninterrupted, command, tmp_path
):
    saved = str(uninterrupted("delayed")[0] / "run.toml")
    assert command("pretrain", "--config", saved, "--set", "workers=1", "--out", "a") == 0
    assert losses(tmp_path / "a") == losses(uninterrupted("delayed")[0])
    assert command("pretrain", "--config", saved, "--seed", "1", "--out", "b") == 0
    assert losses(tmp_path / "b") != losses(uninterrupted("delayed")[0])


@pytest.mark.full
def test_fp16_that_always_overflows_ends_with_advice_and_not_with_nan_weights(
    command, refused, tmp_path
):
    flags = ["pretrain", "--recipe", "fp16", *TINY, "--steps", "40", "--save-every", "100"]
    flags += ["--set", "model_overrides.init_std=300.0", "--eval-every", "100"]
    advice = "or use a recipe with more range"
    refused(*flags, "--no-guard", "--out", "r", code=5, message=advice)
    rows = metrics(tmp_path / "r")
    assert [row["event"] for row in rows if "event" in row] == ["skip", "stop"]
    # The guard finds no loss scale to be the cause, and that bf16 has the range.
    assert command(*flags, "--out", "guarded") == 0
    rows = metrics(tmp_path / "guarded")
    assert [row["event"] for row in rows if "event" in row] == ["skip"] * 3 + ["precision"]
    assert rows[-1]["precision"] == "bf16"


def test_a_reader_that_goes_away_does_not_stop_the_run(tmp_path):
    def train_unread() -> None:
        reader, writer = os.pipe()
        os.close(reader)
        sys.stdout = os.fdopen(writer, "w")
        cli.main(["pretrain", "--recipe", "fp32", "--out", str(tmp_path / "r"), *TINY])

    ended = bounded(train_unread)
    assert ended.code == 0, ended.stderr
    assert len(metrics(tmp_path / "r")) == 12


@pytest.fixture
def compiling() -> Iterator[None]:
    """Restore torch's global settings after compiled runs, and forget their code."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("compiling")
@pytest.mark.full
def test_compile_compiles_a_block_and_the_loss_for_training_and_for_evaluating(
    uninterrupted, command, tmp_path, monkeypatch, capsys
):
    from torch._dynamo.testing import CompileCounterWithBackend

    compiler = CompileCounterWithBackend("eager")
    with_inductor = GPT.compile_blocks  # which takes minutes
    monkeypatch.setattr(
        GPT, "compile_blocks", lambda model, mode: with_inductor(model, compiler, mode)
    )
    plain, plain_output = uninterrupted("fp32")
    assert not compiler.graphs
    assert "compiling" not in plain_output
    assert command("pretrain", "--recipe", "fp32", "--out", "r", "--compile", *TINY) == 0
    assert (
        len(compiler.graphs) == 4
    )  # a block, for all of them, and the loss; to train and to evaluate
    assert losses(tmp_path / "r") == losses(plain)
    assert (tmp_path / "r" / "sample.txt").read_text() == (plain / "sample.txt").read_text()
    printed = capsys.readouterr().out
    assert printed.count("compiling: the first step takes a minute or so") == 1
    assert "compile = true" in (tmp_path / "r" / "run.toml").read_text()
    # A resumed run may change who computes.
    assert command("pretrain", "--resume", "r", "--no-compile", "--steps", "14") == 0
    assert len(compiler.graphs) == 4


@pytest.mark.slow
@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("recipe", ["fp32", "delayed", "mxfp8"])
def test_a_compiled_run_resumes_to_the_losses_of_the_uninterrupted_one(recipe, command, tmp_path):
    flags = [*TINY, "--set", "model_overrides.dropout=0.1", "--recipe", recipe, "--compile"]
    assert command("pretrain", "--out", "whole", *flags) == 0
    torch._dynamo.reset()  # as in a new process
    uninterrupted = tmp_path / "whole"
    shutil.copytree(uninterrupted, tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-000012")
    assert command("pretrain", "--resume", "cut") == 0
    assert difference(tmp_path / "cut", uninterrupted) == ""
