"""An error on one rank becomes the same error on all ranks; so do differences between ranks."""

import shutil
from itertools import product
from pathlib import Path

import pytest

from fp8stack.common.errors import UserError
from fp8stack.planning.run_config import RunConfig
from fp8stack.precision import Hardware
from fp8stack.training.run_plans import plan_run
from tests.conftest import metrics
from tests.faults.processes import checkpoints, last_step, run_ranks
from tests.faults.twins import SMALL, TEXT

WORDS = ["pretrain", *SMALL, "--data", "text.txt", "--recipe", "fp32", "--set", "sample_tokens=0"]
WORDS += ["--steps", "4", "--save-every", "2", "--set", "rank_timeout=30"]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two ranks in `r`."""
    folder = tmp_path_factory.mktemp("begun")
    (folder / "text.txt").write_text(TEXT)
    ended = run_ranks([*WORDS, "--parallel", "fsdp", "--out", "r"], folder, 2)
    assert [rank.code for rank in ended] == [0, 0], ended
    return folder


@pytest.fixture
def folder(begun: Path, tmp_path: Path) -> Path:
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--out", "r"], "holds a run already"),
        (["--resume", "r", "--seed", "5"], "seed"),
        (["--out", "n", "--recipe", "fp7"], "No recipe 'fp7'"),
        (["--out", "n", "--batch", "5"], "cannot be shared equally by 2 ranks"),
        (["--out", "n", "--data", "none.txt"], "none.txt"),
    ],
)
@pytest.mark.full
def test_bad_input_is_one_line_of_all_ranks_and_their_exit_code(flags, message, folder):
    ended = run_ranks([*WORDS, *flags], folder, 2)
    assert [rank.code for rank in ended] == [2, 2], ended
    (line,) = "".join(rank.stderr for rank in ended).splitlines()
    assert message in line
    assert not (folder / "n").exists()


@pytest.mark.full
def test_a_disk_that_is_full_for_one_rank_in_the_background_ends_all(folder):
    words = [*WORDS, "--resume", "r", "--steps", "8", "--parallel", "fsdp", "--checkpoint-async"]
    ended = run_ranks(words, folder, 2, "full:3000@save:1/rank=1")
    assert [rank.code for rank in ended] == [4, 4], ended
    assert "disk is full" in ended[0].stderr
    assert last_step(folder / "r") == 4
    assert not list((folder / "r" / "checkpoints").glob(".tmp*"))


@pytest.mark.full
def test_ranks_begin_a_branch_together(folder):
    named = "r/checkpoints/step-000002"
    ended = run_ranks([*WORDS, "--resume", named, "--out", "n", "--recipe", "current"], folder, 2)
    assert [rank.code for rank in ended] == [0, 0], ended
    assert [path.name for path in checkpoints(folder / "n")] == ["step-000002", "step-000004"]
    ended = run_ranks([*WORDS, "--resume", named, "--out", "same"], folder, 2)
    assert [rank.code for rank in ended] == [0, 0], ended
    keys = ("step", "loss", "grad_norm")
    runs = [[tuple(map(row.get, keys)) for row in metrics(folder / run)] for run in ("r", "same")]
    assert [row for row in runs[1] if row[1] is not None] == runs[0]


@pytest.mark.full
def test_a_branch_that_is_started_again_goes_on(folder, command, monkeypatch, capsys):
    named = "r/checkpoints/step-000002"
    words = [*WORDS, "--resume", named, "--out", "n", "--recipe", "bf16"]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert command(*words) == 0  # the first start did not come to begin it
    assert "a new run that begins with r/checkpoints/step-000002" in capsys.readouterr().out
    shutil.rmtree(folder / "n/checkpoints/step-000004")
    assert command(*words) == 0
    assert "resumed from n/checkpoints/step-000002" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", ["fp16", "delayed", "mxfp8"])
def test_whatever_can_be_compiled_may_be_in_several_ranks(recipe):
    backends = ("auto", "torch", "emulate", "reference")
    machines = (Hardware("cpu"), Hardware("cuda", (10, 0), has_te=True))
    for hardware, backend, parallel in product(machines, backends, ("ddp", "fsdp")):
        keys = {"parallel": parallel, "compile": True, "recipe": recipe, "backend": backend}
        assert plan_run(RunConfig.model_validate(keys), hardware, 2, will_train=False).plans


def test_transformer_engine_by_name_is_not_shared_out_by_rows():
    config = RunConfig(parallel="fsdp", recipe="delayed", backend="te")
    hardware = Hardware("cuda", (9, 0), has_te=True)
    (plan,) = plan_run(config, hardware, 1, will_train=False).plans
    assert plan.backend == "te"
    plan_run(config.model_copy(update={"parallel": "ddp"}), hardware, 2, will_train=False)
    message = (
        "cannot share out Transformer Engine's layers. Choose --parallel ddp, or --backend torch"
    )
    with pytest.raises(UserError, match=message):
        plan_run(config, hardware, 2, will_train=False)
