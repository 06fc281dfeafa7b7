"""Ranks that are lost, stopped, signalled or out of room: all end alike, and go on to the same
numbers (R12); what launchers start, and start again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bench.twins import SMALL, TEXT
from fp8stack.distributed.process_group import losing_ranks
from fp8stack.errors import RankLost
from tests.conftest import metrics
from tests.faults.rank_rows import BEGUN, CASES, KINDS, Twins, lost_ranks
from tests.faults.rank_rows import _not_finite as not_finite
from tests.faults.whole_ranks import Together, run_difference, run_ranks, tensors
from tests.faults.whole_runs import checkpoints, last_step, rows


def test_lost_ranks_end_all_and_runs_go_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    case = CASES["R12"]
    outcome = case.run(tmp_path, case.short)
    assert outcome.lost == ()
    assert outcome.injected == outcome.survived == len(KINDS)


@pytest.mark.slow
def test_so_do_four_ranks(tmp_path: Path) -> None:
    assert lost_ranks(tmp_path, 2 * len(KINDS)).lost == ()


def test_more_than_two_ranks_repeat_to_the_bit_as_well(tmp_path: Path) -> None:
    """A sum of four numbers depends on their order, which DDP's buckets must not decide."""
    kind = KINDS[0]
    assert (kind.name, kind.parallel) == ("kill in forward", "ddp")
    twins = Twins(tmp_path / "4-ddp", 4, "ddp", "delayed")
    assert kind.inflict(twins, twins.new()) == ""


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return Twins(tmp_path_factory.mktemp("twins") / "2-fsdp", 2, "fsdp", "delayed")


def test_with_fsdp_all_ranks_skip_a_step_that_is_nan_on_one(twins: Twins) -> None:
    assert not_finite(twins, twins.new()) == ""


def test_a_run_that_came_to_other_numbers_counts_as_lost(twins: Twins) -> None:
    other = twins.new()
    words = [*twins.words, "--seed", "1", "--out", other.name]
    assert [each.code for each in run_ranks(words, twins.folder, 2)] == [0, 0]
    assert "differs" in run_difference(other, twins.path)
    same = twins.new()
    twins.go(same)
    assert run_difference(same, twins.path) == ""
    metrics_file = same / "metrics.jsonl"
    metrics_file.write_text(metrics_file.read_text().replace('"loss": ', '"loss": 1'))
    assert "the metrics differ" in run_difference(same, twins.path)
    assert "missing" in run_difference(twins.new(), twins.path)


def test_ranks_that_hang_are_named_and_killed(twins: Twins) -> None:
    words = [*twins.words, "--set", "rank_timeout=600", "--out", twins.new().name]
    with (
        Together(words, twins.folder, 2, f"stop@forward:{BEGUN}/rank=1") as ranks,
        pytest.raises(TimeoutError, match=r"Ranks \[0\] did not end in 6 s"),
    ):
        ranks.wait(6)
    assert not any(child.alive for child in ranks.children)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_damaged_token_ends_all_ranks_with_one_line_and_what_was_learnt(
    parallel: str, tmp_path: Path
) -> None:
    tokens = np.zeros(3000, dtype=np.uint16)
    tokens[100:2500] = 999  # in some step's batch
    tokens.tofile(tmp_path / "tokens.bin")
    words = ["pretrain", "--data", "tokens.bin", "--recipe", "fp32", *SMALL, "--steps", "9"]
    words += ["--set", "model_overrides.vocabulary=300", "--parallel", parallel, "--out", "r"]
    ended = run_ranks([*words, "--set", "sample_tokens=0"], tmp_path, 2)
    assert [each.code for each in ended] == [2, 2]
    lines = "".join(each.stderr for each in ended).splitlines()
    assert len(lines) == 1
    assert "999" in lines[0]
    assert "tokens.bin" in lines[0]
    assert last_step(tmp_path / "r") == len(rows(tmp_path / "r"))


@pytest.mark.parametrize(
    "said",
    [
        "[/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:24",
        "[/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv",
        "Application timeout caused pair closure",
        "NCCL communicator was aborted: remote process exited or there was a network error",
    ],
)
def test_what_torch_says_of_a_lost_rank_becomes_one_line(said: str) -> None:
    with pytest.raises(RankLost, match="lost another rank") as error, losing_ranks():
        raise RuntimeError(f"{said}\nException raised from wait")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("said", ["mat1 and mat2 shapes cannot be multiplied", "timeout of a pool"])
def test_other_errors_stay_what_they_are(said: str) -> None:
    with pytest.raises(RuntimeError, match=said), losing_ranks():
        raise RuntimeError(said)


# Launchers


def _launch(words: list[str], folder: Path) -> subprocess.Popen[str]:
    (folder / "text.txt").write_text(TEXT)
    keep = {key: of for key, of in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        words,
        cwd=folder,
        env={**keep, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _ended(launcher: subprocess.Popen[str]) -> str:
    """What a launcher and its ranks printed; none of them outlives this."""
    try:
        return launcher.communicate(timeout=240)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)


def _words(steps: int) -> list[str]:
    words = ["pretrain", "--data", "text.txt", "--recipe", "delayed", *SMALL, "--out", "r"]
    return [*words, "--steps", str(steps), "--save-every", "50", "--set", "sample_tokens=0"]


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def _rank_1(launcher: int) -> int:
    """The process of rank 1 that a launcher started."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and b"\0RANK=1\0" in b"\0" + (folder / "environ").read_bytes():
                return int(folder.name)
        except OSError:
            continue
    raise AssertionError("there is no rank 1")


def test_torchrun_starts_a_run_again_when_a_rank_is_killed_and_it_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "r"
    launcher = _launch([*TORCHRUN, "--max-restarts", "1", "-m", "fp8stack", *_words(150)], tmp_path)
    until = time.monotonic() + 120
    while last_step(run) < 60 and launcher.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(_rank_1(launcher.pid), signal.SIGKILL)
    said = _ended(launcher)
    assert launcher.returncode == 0, said
    assert "torchrun started this again: going on as with --resume auto" in said
    assert "resumed from" in said
    assert [row["step"] for row in metrics(run) if "loss" in row] == [*range(1, 151)]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_accelerate_launch_starts_ranks_as_well(parallel: str, tmp_path: Path) -> None:
    # Its --cpu starts one process, whatever --num_processes says (or wants mpirun): accelerate 1.x.
    flags = [
        "--multi_gpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
    ]
    flags += ["--dynamo_backend", "no", "--main_process_port", "0", "-m", "fp8stack"]
    words = [sys.executable, "-m", "accelerate.commands.launch", *flags]
    launcher = _launch([*words, *_words(60), "--parallel", parallel], tmp_path)
    said = _ended(launcher)
    assert launcher.returncode == 0, said
    assert last_step(tmp_path / "r") == 60
    saved = tensors(checkpoints(tmp_path / "r")[-1])
    assert {"rng:cpu", "rng:cpu.1"} <= saved.keys()  # of both ranks
    assert said.count("done: validation loss") == 1
