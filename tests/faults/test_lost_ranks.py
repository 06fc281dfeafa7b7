"""Ranks that are lost, more than in test_rows.py."""

import numpy as np
import pytest

from fp8stack.common.errors import RankLost
from fp8stack.training.distributed.process_group import losing_ranks
from tests.faults.processes import last_step, rows, run_ranks
from tests.faults.rank_rows import not_finite, preempted, rank_twin
from tests.faults.twins import SMALL


@pytest.mark.slow
def test_more_than_two_ranks_repeat_to_the_bit_as_well(tmp_path):
    """A sum of three numbers depends on their order, which DDP's buckets must not decide."""
    twin = rank_twin(tmp_path / "3-ddp", 3, "ddp", ["--batch", "6"])
    assert preempted(twin, twin.new()) == ""


@pytest.mark.full
def test_with_fsdp_all_ranks_skip_a_step_that_is_nan_on_one(tmp_path):
    twin = rank_twin(tmp_path / "2-fsdp", 2, "fsdp")
    assert not_finite(twin, twin.new()) == ""


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.full
def test_a_damaged_token_ends_all_ranks_with_one_line_and_what_was_learnt(parallel, tmp_path):
    tokens = np.zeros(3000, dtype=np.uint16)
    tokens[100:2500] = 999  # in some step's batch
    tokens.tofile(tmp_path / "tokens.bin")
    words = ["pretrain", "--data", "tokens.bin", "--recipe", "fp32", *SMALL, "--steps", "9"]
    words += ["--set", "model_overrides.vocabulary=300", "--parallel", parallel, "--out", "r"]
    ended = run_ranks([*words, "--set", "sample_tokens=0"], tmp_path, 2)
    assert [rank.code for rank in ended] == [2, 2]
    (line,) = "".join(rank.stderr for rank in ended).splitlines()
    assert "999" in line
    assert "tokens.bin" in line
    assert last_step(tmp_path / "r") == len(rows(tmp_path / "r"))


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]", RankLost),
        ("/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv", RankLost),
        ("Application timeout caused pair closure", RankLost),
        ("NCCL communicator was aborted: remote process exited or network error", RankLost),
        ("mat1 and mat2 shapes cannot be multiplied", RuntimeError),
        ("timeout of a pool", RuntimeError),
    ],
)
def test_what_torch_says_of_a_lost_rank_becomes_one_line(message, error):
    with pytest.raises(error) as caught, losing_ranks():
        raise RuntimeError(f"{message}\nException raised from wait")
    assert ("\n" in str(caught.value)) == (error is RuntimeError)
