"""Ranks that are lost, more than in test_rows.py."""

import time

import numpy as np
import pytest

from fp8stack.common.errors import RankLost
from fp8stack.training.distributed.process_group import losing_ranks
from tests.faults.processes import Together, last_step, rows, run_ranks
from tests.faults.rank_rows import BEGUN, not_finite, preempted, rank_twin
from tests.faults.twins import SMALL, Twin


@pytest.mark.slow
def test_more_than_two_ranks_repeat_to_the_bit_as_well(tmp_path):
    """A sum of three numbers depends on their order, which DDP's buckets must not decide."""
    twin = rank_twin(tmp_path / "3-ddp", 3, "ddp", ["--batch", "6"])
    assert preempted(twin, twin.new()) == ""


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return rank_twin(tmp_path_factory.mktemp("twin") / "2-fsdp", 2, "fsdp")


def test_with_fsdp_all_ranks_skip_a_step_that_is_nan_on_one(twin):
    assert not_finite(twin, twin.new()) == ""


def test_ranks_that_hang_are_named_and_killed(twin):
    words = [*twin.words, "--set", "rank_timeout=600", "--out", twin.new().name]
    with Together(words, twin.folder, 2, f"stop@forward:{BEGUN}/rank=1") as ranks:
        while not ranks.children[1].is_stopped:
            time.sleep(0.01)
        with pytest.raises(TimeoutError, match=r"Ranks \[0\] did not end in 1 s"):
            ranks.wait(0.6)
    assert not any(child.is_alive for child in ranks.children)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_damaged_token_ends_all_ranks_with_one_line_and_what_was_learnt(parallel, tmp_path):
    tokens = np.zeros(3000, dtype=np.uint16)
    tokens[100:2500] = 999  # in some step's batch
    tokens.tofile(tmp_path / "tokens.bin")
    words = ["pretrain", "--data", "tokens.bin", "--recipe", "fp32", *SMALL, "--steps", "9"]
    words += ["--set", "model_overrides.vocabulary=300", "--parallel", parallel, "--out", "r"]
    ended = run_ranks([*words, "--set", "sample_tokens=0"], tmp_path, 2)
    assert [rank.code for rank in ended] == [2, 2]
    lines = "".join(rank.stderr for rank in ended).splitlines()
    assert len(lines) == 1
    assert "999" in lines[0]
    assert "tokens.bin" in lines[0]
    assert last_step(tmp_path / "r") == len(rows(tmp_path / "r"))


@pytest.mark.parametrize(
    "message",
    [
        "[/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:24",
        "[/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv",
        "Application timeout caused pair closure",
        "NCCL communicator was aborted: remote process exited or there was a network error",
    ],
)
def test_what_torch_says_of_a_lost_rank_becomes_one_line(message):
    with pytest.raises(RankLost, match="lost another rank") as error, losing_ranks():
        raise RuntimeError(f"{message}\nException raised from wait")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "message", ["mat1 and mat2 shapes cannot be multiplied", "timeout of a pool"]
)
def test_other_errors_stay_what_they_are(message):
    with pytest.raises(RuntimeError, match=message), losing_ranks():
        raise RuntimeError(message)
